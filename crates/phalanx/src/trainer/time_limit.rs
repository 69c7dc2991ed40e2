//! Ends that are known ahead: a run whose time is nearly up ends by itself, with a checkpoint, while there is time for one.
//!
//! Each rank looks at its own clock when it makes the tally, and one that finds the end near has all stop after that step.

use std::time::{Duration, Instant, SystemTime};

/// When the time of a run is up, and how long before it ends by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TimeLimit {
    /// When the time is up.
    pub end: SystemTime,
    /// How long before that the run ends at the latest. It ends earlier where twice the longest step and checkpoint of
    /// the run took longer than this; of one process on a GPU, which is given a step ahead, twice three such steps and the checkpoint.
    pub margin: Duration,
}

/// Why a run has ended before all its steps were made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Interruption {
    /// [`super::Requests::stop`] asked for it.
    Stop,
    /// [`super::Requests::drain`] asked for it.
    Drain,
    /// [`super::Trainer::time_limit`] is near.
    TimeLimit,
}

impl Interruption {
    const ALL: [Interruption; 3] = [Interruption::Stop, Interruption::Drain, Interruption::TimeLimit];

    /// What a rank tells the others: a number for each reason, which they add up.
    pub(super) fn words(own: Option<Interruption>) -> [f64; 3] {
        Interruption::ALL.map(|why| f64::from(own == Some(why)))
    }

    /// Why ranks end that have told this together. Who is asked to stop for good is not to be started again.
    pub(super) fn of_words(sums: [f64; 3]) -> Option<Interruption> {
        Interruption::ALL.into_iter().zip(sums).find_map(|(why, sum)| (sum > 0.0).then_some(why))
    }
}

/// What a rank knows of its run's time, as long as one membership lasts.
pub(super) struct Clock {
    limit: Option<TimeLimit>,
    /// When the tally before was made.
    last: Instant,
    /// The longest time from one to the next.
    step: Duration,
    /// The longest that a checkpoint has taken.
    checkpoint: Duration,
    /// Whether the end was found near. It stays so, whatever becomes of the system's clock.
    is_near: bool,
}

impl Clock {
    pub(super) fn new(limit: Option<TimeLimit>) -> Clock {
        let (step, checkpoint) = (Duration::ZERO, Duration::ZERO);
        Clock { limit, last: Instant::now(), step, checkpoint, is_near: false }
    }

    /// From now on steps are made: bringing ranks together is none.
    pub(super) fn begin(&mut self) {
        self.last = Instant::now();
    }

    /// The longest that a checkpoint has taken, as far as this rank knows.
    pub(super) fn checkpoint_took(&mut self, longest: Duration) {
        self.checkpoint = longest;
    }

    /// Another tally is made, with so many steps given to a GPU that it has still to make: whether the end is near.
    pub(super) fn tick(&mut self, ahead: u32) -> bool {
        let now = Instant::now();
        self.step = self.step.max(now - self.last);
        self.last = now;
        self.is_near |= self.limit.is_some_and(|limit| {
            // Of an end that is past nothing is left.
            let left = limit.end.duration_since(SystemTime::now()).unwrap_or_default();
            is_near(left, limit.margin, self.step * steps_to_come(ahead), self.checkpoint)
        });
        self.is_near
    }
}

/// How many steps are still to be made after a tally that lets the run go on, up to the end that the next one finds near: one, or where a
/// GPU has some ahead of each of the two tallies, these as well.
fn steps_to_come(ahead: u32) -> u32 {
    1 + 2 * ahead
}

/// Whether a run that goes on could be too late. What comes are these steps, and then a checkpoint, which may have to wait for another
/// that is being written; twice what they took covers that and a disk that is slower this time.
fn is_near(left: Duration, margin: Duration, steps: Duration, checkpoint: Duration) -> bool {
    left <= margin.max((steps + checkpoint).saturating_mul(2))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_ends_while_there_is_time_for_a_step_and_a_checkpoint() {
        let check = |[left, margin, step, checkpoint]: [u64; 4], want: bool| {
            let [left, margin, step, checkpoint] = [left, margin, step, checkpoint].map(Duration::from_secs);
            assert_eq!(is_near(left, margin, step, checkpoint), want, "{left:?} left");
        };
        check([31, 30, 1, 2], false);
        check([30, 30, 1, 2], true);
        check([0, 0, 0, 0], true);
        check([121, 30, 20, 40], false);
        check([120, 30, 20, 40], true);
    }

    #[test]
    fn steps_that_a_gpu_has_ahead_count() {
        let left = |seconds| SystemTime::now() + Duration::from_secs(seconds);
        for (ahead, near, far) in [(0, 19, 30), (1, 59, 70)] {
            for (seconds, want) in [(near, true), (far, false)] {
                let mut clock =
                    Clock::new(Some(TimeLimit { end: left(seconds), margin: Duration::from_secs(1) }));
                clock.step = Duration::from_secs(10);
                assert_eq!(clock.tick(ahead), want, "{ahead} ahead, {seconds} s left");
            }
        }
    }

    #[test]
    fn ranks_agree_in_why_they_end() {
        let sum = |ranks: &[Option<Interruption>]| {
            let words = ranks.iter().map(|own| Interruption::words(*own));
            Interruption::of_words(words.fold([0.0; 3], |a, b| std::array::from_fn(|i| a[i] + b[i])))
        };
        use Interruption::{Drain, Stop, TimeLimit};
        assert_eq!(sum(&[None, None]), None);
        for why in Interruption::ALL {
            assert_eq!(sum(&[None, Some(why), None]), Some(why));
        }
        assert_eq!(sum(&[Some(TimeLimit), Some(Drain)]), Some(Drain));
        assert_eq!(sum(&[Some(Drain), Some(Stop)]), Some(Stop));
    }
}
