//! Which losses of workers count as one.

use std::time::Duration;

/// How long after a loss others belong to it: a machine that is out of memory kills several workers, one after the other.
const TOGETHER: Duration = Duration::from_secs(1);

/// The restarts that were counted. Losses that come at once are one event, which counts once, whatever is started because of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Restarts {
    /// How many there were.
    pub count: usize,
    /// How often some were started again beside that, for a loss that had counted.
    free: usize,
    /// Whether a loss has counted since all were started.
    has_lost: bool,
    /// When the last event began, if that isn't over.
    last: Option<Duration>,
}

impl Restarts {
    /// With another loss, seen at `now`, of a worker that was started at `started` and of no use from `lost` on: one that hangs
    /// is killed later, after others that hang as well. One that was started because of the last event is no part of it, so one
    /// that fails at once, again and again, uses restarts up.
    pub fn with(self, started: Duration, lost: Duration, now: Duration) -> Restarts {
        match self.last {
            Some(last) if started < last && lost <= last + TOGETHER => self,
            _ => Restarts { count: self.count + 1, has_lost: true, last: Some(now), ..self },
        }
    }

    /// With a worker that was started at `started`, and couldn't go on at `now` since a part of the run was lost with another. Where the
    /// loss of that one has counted it was the same event, and so it is for whoever else can't go on.
    pub fn with_part_lost(self, started: Duration, now: Duration) -> Restarts {
        match self.has_lost {
            true => Restarts { free: self.free + 1, has_lost: false, last: Some(now), ..self },
            false => self.with(started, now, now),
        }
    }

    /// With all workers started again, who couldn't go on since a part of the run was lost with one of them, or for another reason.
    pub fn anew(self, part_lost: bool) -> Restarts {
        let is_free = part_lost && (self.has_lost || self.last.is_some());
        let (count, free) = (self.count + usize::from(!is_free), self.free + usize::from(is_free));
        Restarts { count, free, has_lost: false, last: None }
    }

    /// How often some were started again, whether it counts or not.
    pub fn starts(self) -> usize {
        self.count + self.free
    }

    /// After all workers have gone on together: whoever is lost now is lost for another reason.
    pub fn got_over(self) -> Restarts {
        Restarts { last: None, ..self }
    }

    /// All have been started.
    pub fn begun(self) -> Restarts {
        Restarts { has_lost: false, ..self.got_over() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn losses_at_once_are_one_restart() {
        // When each was started and lost, in milliseconds.
        let check = |losses: &[[u64; 2]], want: usize| {
            let losses = losses.iter().map(|times| times.map(Duration::from_millis));
            let restarts =
                losses.fold(Restarts::default(), |before, [started, now]| before.with(started, now, now));
            assert_eq!(restarts.count, want);
        };
        check(&[], 0);
        check(&[[0, 5000], [0, 5003], [1, 6000]], 1);
        check(&[[0, 5000], [0, 6001]], 2);
        // What counts is when the event began: losses that follow each other closely, but for long, are no single one.
        check(&[[0, 5000], [0, 5900], [0, 6800]], 2);
        // Another in the place of the first is lost while the rest of the event goes on.
        check(&[[0, 5000], [5001, 5100], [0, 5101]], 2);
        let time = Duration::from_millis;
        let one = Restarts::default().with(time(0), time(5000), time(5000));
        let next = |before: Restarts, lost, now| before.with(time(0), time(lost), time(now)).count;
        assert_eq!([one, one.got_over()].map(|before| next(before, 5001, 5001)), [1, 2]);
        // Those that hang at once are killed one after the other, with whoever ends because of that.
        assert_eq!([next(one, 4500, 9000), next(one, 6001, 9000)], [1, 2]);
    }

    #[test]
    fn whoever_cannot_go_on_without_a_lost_part_belongs_to_the_loss() {
        let time = Duration::from_millis;
        let lost = Restarts::default().with(time(0), time(5000), time(5000)).got_over();
        // All that are left, the last of them when it was seen that none goes on, and only for that loss.
        let first = lost.with_part_lost(time(0), time(5100));
        let second = first.with_part_lost(time(0), time(5200));
        assert_eq!([first, second, second.anew(true)].map(|after| after.count), [1, 1, 1]);
        assert_eq!([first, second, second.anew(true)].map(Restarts::starts), [2, 2, 3]);
        assert_eq!([second.anew(false), second.got_over().anew(true)].map(|after| after.count), [2, 2]);
        assert_eq!(second.got_over().with_part_lost(time(5100), time(9000)).count, 2);
        assert_eq!([lost.anew(true), lost.anew(true).anew(true)].map(|after| after.count), [1, 2]);
        assert_eq!(lost.begun().anew(true).count, 2);
        // Nobody was lost.
        assert_eq!(Restarts::default().with_part_lost(time(0), time(9000)).count, 1);
    }

    proptest! {
        /// So many workers, each lost again and again after it ran for a while: however these times fall.
        #[test]
        fn restarts_count_events_and_no_loop_is_free(
            workers in 1usize..9,
            ran in prop::collection::vec((0usize..9, 1u64..3000), 0..60),
        ) {
            // When the worker of each rank was started, and which losses there are, in order.
            let mut lost: Vec<[u64; 2]> = Vec::new();
            let mut started = vec![0; workers];
            for (rank, ms) in ran {
                let rank = rank % workers;
                lost.push([started[rank], started[rank] + ms]);
                started[rank] += ms + 1;
            }
            lost.sort_by_key(|[_, now]| *now);
            let time = Duration::from_millis;
            let (mut restarts, mut of_event) = (Restarts::default(), 0);
            for [started, now] in lost {
                let after = restarts.with(time(started), time(now), time(now));
                of_event = if after.count > restarts.count { 1 } else { of_event + 1 };
                // An event has each rank at most once, is over after a second, and no loss later than that is free.
                prop_assert!(of_event <= workers);
                prop_assert!(after.count - restarts.count <= 1);
                let began = after.last.unwrap();
                prop_assert!(time(now) - began <= TOGETHER && time(started) <= began);
                prop_assert!(after.count > restarts.count || after.last == restarts.last);
                restarts = after;
            }
        }
    }
}
