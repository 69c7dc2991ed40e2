//! Which faults a campaign has, and when: a pure function of its seed.

use phalanx::tensor::Philox;

/// Something that happens to a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Act {
    /// The worker that was started as this rank is killed.
    Kill { rank: usize },
    /// Two are killed at once, this one and the next.
    KillTwo { rank: usize },
    /// All workers are killed at once.
    KillAll,
    /// The worker is stopped, and not continued.
    Stop { rank: usize },
    /// It is stopped for a moment, which is to cost nothing but that moment.
    Pause { rank: usize },
    /// It is asked to end: all end with a checkpoint, and the run is gone on with.
    Ask { rank: usize },
    /// A checkpoint is asked for.
    Checkpoint,
    /// The agent is killed, and all workers with it; the run is gone on with.
    KillAgent,
    /// The agent is asked to end, as by a batch system; the run is gone on with.
    Drain,
}

/// Names of the kinds, for the report, with how many of a hundred faults are of each.
const KINDS: [(&str, u32); 9] = [
    ("a worker killed", 52),
    ("two workers killed at once", 10),
    ("all workers killed at once", 4),
    ("a worker stopped", 5),
    ("a worker paused", 8),
    ("a worker asked to end", 4),
    ("a checkpoint asked for", 9),
    ("the agent killed", 4),
    ("the agent asked to end", 4),
];

impl Act {
    fn of(kind: usize, rank: usize) -> Act {
        match kind {
            0 => Act::Kill { rank },
            1 => Act::KillTwo { rank },
            2 => Act::KillAll,
            3 => Act::Stop { rank },
            4 => Act::Pause { rank },
            5 => Act::Ask { rank },
            6 => Act::Checkpoint,
            7 => Act::KillAgent,
            _ => Act::Drain,
        }
    }

    /// What it is called.
    pub(super) fn name(self) -> &'static str {
        let kind = match self {
            Act::Kill { .. } => 0,
            Act::KillTwo { .. } => 1,
            Act::KillAll => 2,
            Act::Stop { .. } => 3,
            Act::Pause { .. } => 4,
            Act::Ask { .. } => 5,
            Act::Checkpoint => 6,
            Act::KillAgent => 7,
            Act::Drain => 8,
        };
        KINDS[kind].0
    }
}

/// A fault, and the step after which it comes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Fault {
    pub(super) after: u64,
    pub(super) act: Act,
}

/// So many faults, spread over the steps of a run, with a few steps before the first and after the last.
pub(super) fn plan(seed: u64, faults: usize, workers: usize, steps: u64) -> Vec<Fault> {
    let random = Philox::new(seed, 0);
    let total: u32 = KINDS.iter().map(|(_, share)| share).sum();
    let gap = steps as f64 / (faults as f64 + 2.0);
    let fault = |i: usize| {
        let [kind, rank, when, _] = random.block(i as u64);
        let mut left = kind % total;
        let is_it = |&(_, share): &(&str, u32)| {
            let found = left < share;
            left = left.saturating_sub(share);
            found
        };
        let kind = KINDS.iter().position(is_it).expect("the shares add up to the total");
        let jitter = f64::from(when) / 2f64.powi(32);
        Fault { after: ((i as f64 + 0.5 + jitter) * gap) as u64, act: Act::of(kind, rank as usize % workers) }
    };
    (0..faults).map(fault).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn a_seed_gives_one_plan_in_order_with_everything_in_it() {
        let faults = plan(7, 400, 3, 10_000);
        assert_eq!(faults, plan(7, 400, 3, 10_000));
        assert_ne!(faults, plan(8, 400, 3, 10_000));
        assert!(faults.is_sorted_by_key(|fault| fault.after));
        assert!(faults.iter().all(|fault| fault.after < 10_000));
        let kinds: HashSet<&str> = faults.iter().map(|fault| fault.act.name()).collect();
        assert_eq!(kinds.len(), KINDS.len());
        let kills = faults.iter().filter(|fault| matches!(fault.act, Act::Kill { .. })).count();
        assert!((160..260).contains(&kills), "{kills}");
    }
}
