//! When each action of a schedule begins and ends, by times that are given or were measured.

use super::schedule::{Action, Schedule, Times};
use std::collections::HashMap;

/// An action and when it was done, in the unit of the times.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Done {
    /// What.
    pub action: Action,
    /// From when.
    pub start: f64,
    /// Until when.
    pub end: f64,
}

/// What ranks did when in a step.
#[derive(Clone, Debug, PartialEq)]
pub struct Timeline {
    /// By rank, each in order.
    pub ranks: Vec<Vec<Done>>,
}

impl Timeline {
    /// What comes of a schedule that [`super::check`] has found right, if every stage takes these times and a message `message`.
    /// Panics if it hangs.
    #[track_caller]
    pub fn simulate(schedule: &Schedule, times: Times, message: f64) -> Timeline {
        Timeline::play(schedule, message, |_, _, action| times.of(action.work))
    }

    /// The same of stages that differ: forward and backward together take so many seconds each, of which each action has the share
    /// that it has of `times`. Panics if it hangs, or there isn't a number for each stage.
    #[track_caller]
    pub fn foretell(schedule: &Schedule, seconds: &[f64], times: Times) -> Timeline {
        assert!(
            seconds.len() == schedule.stages(),
            "{} stages, times of {}",
            schedule.stages(),
            seconds.len()
        );
        let whole = times.forward + times.input + times.weight;
        Timeline::play(schedule, 0.0, |_, _, action| seconds[action.stage] * times.of(action.work) / whole)
    }

    /// This one, of which each action takes as long as it took, as soon as what it needs is there and its rank is free: how much of
    /// the ranks' time passes idly because actions aren't equally long, and not because messages travel. Panics if these aren't the
    /// actions of `schedule`.
    #[track_caller]
    pub fn without_waits(&self, schedule: &Schedule) -> Timeline {
        Timeline::play(schedule, 0.0, |rank, place, action| {
            let done = self.ranks.get(rank).and_then(|row| row.get(place));
            let Some(done) = done.filter(|done| done.action == action) else {
                panic!(
                    "Timeline::without_waits: {done:?} at {place} of rank {rank}, where the schedule has {action:?}"
                );
            };
            done.end - done.start
        })
    }

    /// With actions of the length that is told of a rank, its place in that rank's row, and the action.
    #[track_caller]
    fn play(schedule: &Schedule, message: f64, length: impl Fn(usize, usize, Action) -> f64) -> Timeline {
        let n = schedule.shape().ranks;
        let mut ends: HashMap<Action, f64> = HashMap::new();
        let (mut ranks, mut free) = (vec![Vec::new(); n], vec![0.0f64; n]);
        let mut left: usize = (0..n).map(|rank| schedule.actions(rank).len()).sum();
        while left > 0 {
            let before = left;
            for rank in 0..n {
                while let Some(&action) = schedule.actions(rank).get(ranks[rank].len()) {
                    let arrival = |needed: &Action| {
                        let travels = schedule.rank_of(needed.stage) != rank;
                        ends.get(needed).map(|end| end + if travels { message } else { 0.0 })
                    };
                    let needs = schedule.needs(action);
                    let arrivals: Option<Vec<f64>> = needs.iter().flatten().map(arrival).collect();
                    let Some(arrivals) = arrivals else { break };
                    let start = arrivals.into_iter().fold(free[rank], f64::max);
                    let end = start + length(rank, ranks[rank].len(), action);
                    ends.insert(action, end);
                    free[rank] = end;
                    ranks[rank].push(Done { action, start, end });
                    left -= 1;
                }
            }
            assert!(left < before, "Timeline: a schedule that hangs, which check would have told");
        }
        Timeline { ranks }
    }

    /// From the first start to the last end.
    pub fn length(&self) -> f64 {
        let all = || self.ranks.iter().flatten();
        let end = all().map(|done| done.end).fold(0.0, f64::max);
        end - all().map(|done| done.start).fold(end, f64::min)
    }

    /// How long ranks did something, all together.
    pub fn busy(&self) -> f64 {
        self.ranks.iter().flatten().map(|done| done.end - done.start).sum()
    }

    /// The share of the ranks' time that passed idly.
    pub fn bubble(&self) -> f64 {
        let whole = self.length() * self.ranks.len() as f64;
        if whole > 0.0 { 1.0 - self.busy() / whole } else { 0.0 }
    }
}
