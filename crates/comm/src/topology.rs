//! Which ranks share a host: what a schedule may know of the machines, and no more. How it was found out is not decided here.

use crate::processors::Processors;
use std::sync::Arc;

/// The host of each rank. All ranks of a group have the same one.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Topology {
    /// By rank; hosts are numbered in the order of their first ranks.
    hosts: Arc<[usize]>,
    /// By rank, what each may run on; empty where ranks haven't told.
    processors: Arc<[Processors]>,
}

impl Topology {
    /// So many ranks of one host.
    pub(crate) fn one_host(ranks: usize) -> Topology {
        Topology { hosts: vec![0; ranks].into(), processors: Arc::default() }
    }

    /// Of ranks that were found on these hosts; `same` says of two whether they are one. A rank is on the host of the first
    /// rank that it shares one with.
    pub(crate) fn of<T>(found: &[T], same: impl Fn(&T, &T) -> bool) -> Topology {
        let mut hosts: Vec<usize> = Vec::with_capacity(found.len());
        let mut n = 0;
        for (rank, place) in found.iter().enumerate() {
            let known = found[..rank].iter().position(|other| same(place, other)).map(|first| hosts[first]);
            hosts.push(known.unwrap_or_else(|| {
                n += 1;
                n - 1
            }));
        }
        Topology { hosts: hosts.into(), processors: Arc::default() }
    }

    /// With what its ranks may run on, by rank.
    pub(crate) fn on(self, processors: Vec<Processors>) -> Topology {
        Topology { processors: processors.into(), ..self }
    }

    /// What is left of it for these ranks, which are numbered anew in this order.
    pub(crate) fn part(&self, ranks: &[usize]) -> Topology {
        let hosts: Vec<usize> = ranks.iter().map(|&rank| self.hosts[rank]).collect();
        let processors = ranks.iter().filter_map(|&rank| self.processors.get(rank).cloned()).collect();
        Topology::of(&hosts, |a, b| a == b).on(processors)
    }

    /// How many ranks there are.
    pub(crate) fn ranks(&self) -> usize {
        self.hosts.len()
    }

    /// How many hosts there are.
    pub(crate) fn hosts(&self) -> usize {
        self.hosts.iter().max().map_or(0, |last| last + 1)
    }

    /// Whether all hosts have equally many ranks.
    pub(crate) fn is_even(&self) -> bool {
        (0..self.ranks()).all(|rank| self.neighbours(rank).count() * self.hosts() == self.ranks())
    }

    /// Whether two ranks share a host.
    pub(crate) fn is_same(&self, a: usize, b: usize) -> bool {
        self.hosts[a] == self.hosts[b]
    }

    /// Whether the ranks of this one's host have a core each, of those that some of them may run on. `own` is how many it may
    /// run on itself, which has to do where others haven't told.
    pub(crate) fn has_cores(&self, rank: usize, own: usize) -> bool {
        let told = self.neighbours(rank).map(|rank| self.processors.get(rank));
        let cores = told.collect::<Option<Vec<_>>>().and_then(|all| Processors::together(all.into_iter()));
        self.neighbours(rank).count() <= cores.unwrap_or(own)
    }

    /// The ranks that share this one's host, itself among them, in their order.
    pub(crate) fn neighbours(&self, rank: usize) -> impl Iterator<Item = usize> {
        (0..self.ranks()).filter(move |&other| self.is_same(rank, other))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_are_numbered_by_their_first_ranks() {
        let rows: [(&[&str], &[usize]); 4] = [
            (&[], &[]),
            (&["a"], &[0]),
            (&["b", "b", "b"], &[0, 0, 0]),
            (&["b", "a", "b", "c", "a"], &[0, 1, 0, 2, 1]),
        ];
        for (names, hosts) in rows {
            let topology = Topology::of(names, |a, b| a == b);
            assert_eq!((&*topology.hosts, topology.ranks()), (hosts, names.len()));
            assert_eq!(topology.hosts(), hosts.iter().max().map_or(0, |last| last + 1));
        }
    }

    #[test]
    fn some_of_the_ranks_keep_their_hosts() {
        let all = Topology::of(&["a", "b", "a", "c", "b"], |a, b| a == b);
        let part = all.part(&[4, 3, 1]);
        assert_eq!(*part.hosts, [0, 1, 0]);
        assert_eq!(part.neighbours(2).collect::<Vec<_>>(), [0, 2]);
        assert!(!part.is_even() && part.part(&[1, 2]).is_even());
        assert_eq!(all.part(&[0, 2]), Topology::one_host(2));
    }

    #[test]
    fn ranks_that_are_bound_to_a_core_each_have_one_each() {
        let on = |cores: &[&[u16]]| {
            let processors = cores.iter().map(|row| row.iter().map(|&n| (n, n)).collect());
            Topology::one_host(cores.len()).on(processors.map(Processors).collect())
        };
        assert!(on(&[&[0], &[1]]).has_cores(0, 1));
        assert!(!on(&[&[0], &[0]]).has_cores(0, 1));
        assert!(!on(&[&[0, 1], &[0, 1], &[0, 1]]).has_cores(2, 2));
        assert!(on(&[&[0, 1], &[0, 1], &[0, 1]]).part(&[0, 2]).has_cores(1, 2));
        assert!(Topology::one_host(2).has_cores(0, 2) && !Topology::one_host(3).has_cores(0, 2));
    }
}
