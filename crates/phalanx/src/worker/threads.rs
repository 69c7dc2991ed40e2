//! How many threads a rank computes with while ranks of its host come and go.

use super::cores;
use phalanx_job::WorkerEnv;

/// What says how many they are.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) enum Threads {
    /// Somebody who asked for so many.
    Asked(usize),
    /// The ranks of the host, of which each has `share` when all are there, and `most` when it is alone.
    Shared { share: usize, ranks: usize, most: usize },
}

impl Threads {
    /// What the program asks for counts before what the environment does, and that before a share of the cores, which whoever
    /// started the workers may count otherwise: it may have bound each to some of them.
    pub(super) fn of(program: Option<usize>, env: Option<&WorkerEnv>) -> Threads {
        let asked = program.or(env.and_then(|env| env.threads));
        let ranks = env.map_or(1, |env| env.local_world_size).max(1);
        let share = env.and_then(|env| env.share).unwrap_or(cores() / ranks);
        asked.map_or_else(|| Threads::shared(share, ranks, cores()), Threads::Asked)
    }

    fn shared(share: usize, ranks: usize, cores: usize) -> Threads {
        let share = share.max(1);
        Threads::Shared { share, ranks, most: cores.max(share) }
    }

    /// Those that it begins with.
    pub(super) fn first(self) -> usize {
        match self {
            Threads::Asked(threads) | Threads::Shared { share: threads, .. } => threads,
        }
    }

    /// Those of each rank where the host has `left` at the moment. The cores of those that are lost are idle until others come in
    /// their place.
    pub(super) fn among(self, left: usize) -> usize {
        match self {
            Threads::Asked(threads) => threads,
            Threads::Shared { share, ranks, most } => (share * ranks / left.max(1)).clamp(1, most),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cores_of_the_lost_are_used_unless_somebody_asked_for_a_number() {
        // Threads of each when all are there, how many that are, cores that one rank may use, how many are left, and theirs.
        let rows = [
            (4, 2, 8, 2, 4),
            (4, 2, 8, 1, 8),
            (2, 4, 8, 3, 2),
            (2, 4, 8, 1, 8),
            // Bound to its own.
            (4, 2, 4, 1, 4),
            // More ranks than cores.
            (0, 9, 2, 1, 2),
            (0, 9, 2, 9, 1),
        ];
        for (share, ranks, cores, left, want) in rows {
            let shared = Threads::shared(share, ranks, cores);
            assert_eq!(shared.among(left), want, "{left} of {ranks}, {share} each of {cores}");
            assert_eq!(shared.first(), shared.among(ranks));
        }
        for left in 1..9 {
            assert_eq!(Threads::Asked(3).among(left), 3);
        }
        assert_eq!(Threads::of(Some(7), None), Threads::Asked(7));
        assert_eq!(Threads::of(None, None).first(), cores());
    }
}
