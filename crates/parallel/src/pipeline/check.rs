//! Whether a schedule can be carried out: found by playing it, without computing anything.
//!
//! Ranks send without waiting and receive what they need at the moment when they need it, as the runtime does. So a schedule that
//! plays to its end here can't hang there.

use super::schedule::{Action, Schedule, Work};
use std::collections::HashSet;
use thiserror::Error;

/// What is wrong with a schedule.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum Fault {
    /// A rank does what isn't its work.
    #[error("rank {rank} is to do {action} of stage {}, which is another rank's", .action.stage)]
    Foreign {
        /// Who.
        rank: usize,
        /// What.
        action: Action,
    },
    /// The same twice.
    #[error("{0} of stage {stage} is done twice", stage = .0.stage)]
    Twice(Action),
    /// Something isn't done at all.
    #[error("{0} of stage {stage} is never done", stage = .0.stage)]
    Missing(Action),
    /// Everybody waits.
    #[error("nobody can go on: {}", .waiting.iter().map(|(rank, action, needs)| format!("rank {rank} waits before {action} of stage {} for {needs} of stage {}", action.stage, needs.stage)).collect::<Vec<_>>().join(", "))]
    Deadlock {
        /// Who waits before what for what.
        waiting: Vec<(usize, Action, Action)>,
    },
    /// More is kept than was promised.
    #[error("rank {rank} holds {alive} micro-batches at a time, and was to hold {most}")]
    Alive {
        /// Who.
        rank: usize,
        /// How many.
        alive: usize,
        /// The schedule's bound.
        most: usize,
    },
}

/// What playing a schedule shows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Played {
    /// The most micro-batches that each rank holds the activations of at a time, counted a stage.
    pub alive: Vec<usize>,
    /// The most messages that wait at a time between any two neighbouring stages of different ranks, in one direction.
    pub waiting: usize,
    /// Messages in all.
    pub messages: usize,
}

/// Plays `schedule` to its end. Fails with the first fault that it finds.
pub fn check(schedule: &Schedule) -> Result<Played, Fault> {
    whole(schedule)?;
    let ranks = schedule.shape().ranks;
    let mut done: HashSet<Action> = HashSet::new();
    let mut next = vec![0; ranks];
    let mut alive = vec![0usize; ranks];
    let mut played = Played { alive: vec![0; ranks], waiting: 0, messages: 0 };
    // Messages that were sent and not taken, by the stage that sent and the direction.
    let mut under_way = vec![[0usize; 2]; schedule.stages()];
    loop {
        let mut moved = false;
        for rank in 0..ranks {
            while let Some(&action) = schedule.actions(rank).get(next[rank]) {
                let mut needs = schedule.needs(action).into_iter().flatten();
                if !needs.all(|needed| done.contains(&needed)) {
                    break;
                }
                take(schedule, action, &mut under_way);
                let held = &mut alive[rank];
                match action.work {
                    Work::Forward => *held += 1,
                    Work::Backward | Work::BackwardWeight => *held -= 1,
                    Work::BackwardInput => {}
                }
                played.alive[rank] = played.alive[rank].max(*held);
                if let Some(sent) = send(schedule, action, &mut under_way) {
                    played.messages += 1;
                    played.waiting = played.waiting.max(sent);
                }
                done.insert(action);
                next[rank] += 1;
                moved = true;
            }
        }
        let waiting = |rank: usize| {
            let action = *schedule.actions(rank).get(next[rank])?;
            let needs = schedule.needs(action).into_iter().flatten().find(|needed| !done.contains(needed))?;
            Some((rank, action, needs))
        };
        if next.iter().enumerate().all(|(rank, &next)| next == schedule.actions(rank).len()) {
            break;
        }
        if !moved {
            return Err(Fault::Deadlock { waiting: (0..ranks).filter_map(waiting).collect() });
        }
    }
    for (rank, &alive) in played.alive.iter().enumerate() {
        let most = schedule.most_alive(rank);
        if alive > most {
            return Err(Fault::Alive { rank, alive, most });
        }
    }
    Ok(played)
}

/// Whether everything is done once, by whom it belongs to.
fn whole(schedule: &Schedule) -> Result<(), Fault> {
    let mut seen = HashSet::new();
    for rank in 0..schedule.shape().ranks {
        for &action in schedule.actions(rank) {
            if schedule.rank_of(action.stage) != rank {
                return Err(Fault::Foreign { rank, action });
            }
            if !seen.insert(action) {
                return Err(Fault::Twice(action));
            }
        }
    }
    for stage in 0..schedule.stages() {
        for micro_batch in 0..schedule.shape().micro_batches {
            let of = |work| Action { work, stage, micro_batch };
            let in_parts =
                seen.contains(&of(Work::BackwardInput)) || seen.contains(&of(Work::BackwardWeight));
            let owed: &[Work] = match in_parts {
                true => &[Work::Forward, Work::BackwardInput, Work::BackwardWeight],
                false => &[Work::Forward, Work::Backward],
            };
            if let Some(&missing) = owed.iter().find(|&&work| !seen.contains(&of(work))) {
                return Err(Fault::Missing(of(missing)));
            }
            if in_parts && seen.contains(&of(Work::Backward)) {
                return Err(Fault::Twice(of(Work::Backward)));
            }
        }
    }
    Ok(())
}

/// Where the result of `action` travels to, if another rank needs it, and in which direction.
pub(super) fn sends(schedule: &Schedule, action: Action) -> Option<(usize, usize)> {
    let (to, direction) = match action.work {
        Work::Forward => (Some(action.stage + 1).filter(|&to| to < schedule.stages())?, 0),
        Work::Backward | Work::BackwardInput => (action.stage.checked_sub(1)?, 1),
        Work::BackwardWeight => return None,
    };
    (schedule.rank_of(to) != schedule.rank_of(action.stage)).then_some((to, direction))
}

fn send(schedule: &Schedule, action: Action, under_way: &mut [[usize; 2]]) -> Option<usize> {
    let (_, direction) = sends(schedule, action)?;
    let count = &mut under_way[action.stage][direction];
    *count += 1;
    Some(*count)
}

/// Takes the message that brings what `action` works on, if one does.
fn take(schedule: &Schedule, action: Action, under_way: &mut [[usize; 2]]) {
    for needed in schedule.needs(action).into_iter().flatten() {
        if needed.stage != action.stage
            && let Some((_, direction)) = sends(schedule, needed)
        {
            under_way[needed.stage][direction] -= 1;
        }
    }
}
