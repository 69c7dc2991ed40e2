//! Within each host first, then between hosts, then within each host again: the wires between hosts carry as little as they can,
//! whatever the number of ranks behind them.
//!
//! *By parts*, for large buffers where all hosts have equally many ranks: each rank of a host sums one part of it, the ranks that
//! have the same part on their hosts sum theirs between them, and then all parts are gathered on each host. Every rank works
//! all the time, and each part crosses between hosts as often as if there were one rank a host.
//!
//! *By leaders*, for small buffers or uneven hosts: the first rank of each host gathers the host's sum down a tree, leaders sum
//! between them, and the tree carries the result back. Few messages, one of them at most between two hosts at a time.

use super::circle::{Circle, Parts};
use super::{Round, digits, ring, tree};
use crate::topology::Topology;
use std::ops::Range;

/// Everyone ends with everything reduced, by parts; all hosts have equally many ranks.
pub(super) fn all_reduce_by_parts(rank: usize, topology: &Topology, whole: Range<usize>) -> Vec<Round> {
    let here: Vec<usize> = topology.neighbours(rank).collect();
    let here = Circle::of(rank, &here);
    let parts = Parts::of(whole, here.n);
    let there = counterparts(rank, topology);
    let there = Circle::of(rank, &there);
    let own = Parts::of(parts.part(here.me), there.n);
    let mut rounds = ring::reduce_scatter(here, &parts);
    rounds.extend(digits::reduce_scatter(there, &own));
    rounds.extend(digits::all_gather(there, &own));
    rounds.extend(ring::all_gather(here, &parts));
    rounds
}

/// Everyone ends with everything reduced, by way of the first rank of each host.
pub(super) fn all_reduce_by_leaders(rank: usize, topology: &Topology, whole: Range<usize>) -> Vec<Round> {
    let here: Vec<usize> = topology.neighbours(rank).collect();
    let here = Circle::of(rank, &here);
    let leaders = leaders(topology, 0);
    let mut rounds = tree::reduce(here, 0, whole.clone());
    if here.me == 0 {
        rounds.extend(digits::doubling(Circle::of(rank, &leaders), whole.clone()));
    }
    rounds.extend(tree::broadcast(here, 0, whole));
    rounds
}

/// Rank `root` ends with everything reduced.
pub(super) fn reduce(rank: usize, topology: &Topology, whole: Range<usize>, root: usize) -> Vec<Round> {
    let Ways { here, leaders, lead, first } = Ways::of(rank, topology, root);
    let mut rounds = tree::reduce(Circle::of(rank, &here), lead, whole.clone());
    if here[lead] == rank {
        rounds.extend(tree::reduce(Circle::of(rank, &leaders), first, whole));
    }
    rounds
}

/// Everyone ends with the buffer of rank `root`.
pub(super) fn broadcast(rank: usize, topology: &Topology, whole: Range<usize>, root: usize) -> Vec<Round> {
    let Ways { here, leaders, lead, first } = Ways::of(rank, topology, root);
    let mut rounds = Vec::new();
    if here[lead] == rank {
        rounds = tree::broadcast(Circle::of(rank, &leaders), first, whole.clone());
    }
    rounds.extend(tree::broadcast(Circle::of(rank, &here), lead, whole));
    rounds
}

/// The ways between a root and a rank.
struct Ways {
    /// The ranks of this one's host.
    here: Vec<usize>,
    /// One rank of each host; of the root's, the root.
    leaders: Vec<usize>,
    /// The place of the leader among `here`.
    lead: usize,
    /// The place of the root among `leaders`.
    first: usize,
}

impl Ways {
    fn of(rank: usize, topology: &Topology, root: usize) -> Ways {
        let here: Vec<usize> = topology.neighbours(rank).collect();
        let leaders = leaders(topology, root);
        let lead = here.iter().position(|other| leaders.contains(other)).expect("every host has a leader");
        let first = leaders.iter().position(|&leader| leader == root).expect("the root leads its host");
        Ways { here, leaders, lead, first }
    }
}

/// The first rank of each host, but of the root's host the root.
fn leaders(topology: &Topology, root: usize) -> Vec<usize> {
    let first = |&rank: &usize| topology.neighbours(rank).next() == Some(rank);
    let leaders = (0..topology.ranks()).filter(first);
    leaders.map(|rank| if topology.is_same(rank, root) { root } else { rank }).collect()
}

/// The ranks that have this one's place on their hosts, itself among them.
fn counterparts(rank: usize, topology: &Topology) -> Vec<usize> {
    let place = |rank: usize| topology.neighbours(rank).take_while(|&other| other < rank).count();
    (0..topology.ranks()).filter(|&other| place(other) == place(rank)).collect()
}
