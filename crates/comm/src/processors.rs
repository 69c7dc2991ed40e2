//! Which processors a rank may run on: what tells ranks that have a core each from ranks that share one.

use nix::sched::{CpuSet, sched_getaffinity};
use nix::unistd::Pid;
use serde::{Deserialize, Serialize};
use std::thread::available_parallelism;

/// The processors that a rank may run on, as rows of neighbours: the first and the last of each.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub(crate) struct Processors(pub(crate) Vec<(u16, u16)>);

impl Processors {
    /// Those of the calling thread; none if the system doesn't tell, or gives it less of their time than there is.
    pub(crate) fn own() -> Processors {
        let set = sched_getaffinity(Pid::from_raw(0)).unwrap_or_default();
        let allowed = (0..CpuSet::count()).filter(|&number| set.is_set(number).unwrap_or(false));
        let numbers: Vec<u16> = allowed.map(|number| number as u16).collect();
        let is_all = available_parallelism().is_ok_and(|cores| cores.get() == numbers.len());
        Processors::of(if is_all { numbers } else { Vec::new() })
    }

    /// These, which come in order.
    fn of(numbers: impl IntoIterator<Item = u16>) -> Processors {
        let mut rows = Vec::<(u16, u16)>::new();
        for number in numbers {
            match rows.last_mut() {
                Some((_, last)) if last.checked_add(1) == Some(number) => *last = number,
                _ => rows.push((number, number)),
            }
        }
        Processors(rows)
    }

    /// How many there are among all of these; none if one of them isn't told.
    pub(crate) fn together<'a>(all: impl Iterator<Item = &'a Processors>) -> Option<usize> {
        let mut rows = Vec::new();
        for Processors(some) in all {
            rows.extend((!some.is_empty()).then_some(some)?);
        }
        rows.sort_unstable();
        let (mut count, mut next) = (0, 0);
        for (first, last) in rows.into_iter().map(|&(first, last)| (usize::from(first), usize::from(last))) {
            count += (last + 1).saturating_sub(next.max(first));
            next = next.max(last + 1);
        }
        Some(count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::sched::sched_setaffinity;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    proptest! {
        #[test]
        fn processors_of_several_ranks_are_counted_once(
            ranks in prop::collection::vec(prop::collection::btree_set(0u16..40, 1..20), 1..6),
        ) {
            let all: BTreeSet<u16> = ranks.iter().flatten().copied().collect();
            let ranks: Vec<Processors> = ranks.into_iter().map(Processors::of).collect();
            prop_assert_eq!(Processors::together(ranks.iter()), Some(all.len()));
        }

        /// They come from a peer.
        #[test]
        fn rows_that_make_no_sense_are_counted_somehow(rows in prop::collection::vec((any::<u16>(), any::<u16>()), 0..9)) {
            prop_assert!(Processors::together([Processors(rows)].iter()).is_none_or(|n| n <= 1 << 16));
        }
    }

    #[test]
    fn one_that_is_not_told_leaves_all_unknown() {
        assert_eq!(Processors::together([Processors::of([3]), Processors::default()].iter()), None);
    }

    #[test]
    fn one_own_core_is_told_as_such() {
        let cores = available_parallelism().unwrap().get();
        let all = Processors::own();
        assert!(all.0.is_empty() || Processors::together([&all].into_iter()) == Some(cores));
        let mut first = CpuSet::new();
        let allowed = sched_getaffinity(Pid::from_raw(0)).unwrap();
        let number = (0..CpuSet::count()).find(|&number| allowed.is_set(number).unwrap()).unwrap();
        first.set(number).unwrap();
        // Of this thread alone.
        sched_setaffinity(Pid::from_raw(0), &first).unwrap();
        assert_eq!(Processors::own(), Processors::of([number as u16]));
    }
}
