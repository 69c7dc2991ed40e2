//! Collectives as data: which range of a buffer goes to whom in which round, and what is done with what comes.
//!
//! A schedule is a pure function of a rank's seat and the number of elements. It is tested without any I/O by playing the
//! schedules of all ranks against each other. In a round, all sends and receives may run at once; the next round starts when
//! they are done. Ranges are in elements.
//!
//! Which algorithm an operation takes is chosen in [`choice`]; each has a file of its own. Every algorithm fixes the order of
//! its sums, and all ranks get the same bits: either a sum is taken on one rank and handed on, or on each in the same order.
//! Different algorithms have different orders.

mod barrier;
mod choice;
mod circle;
mod digits;
mod direct;
mod hosts;
mod ring;
mod tree;

#[cfg(test)]
mod tests;

pub(crate) use choice::SMALL_PARTS;
pub use choice::{Algorithm, Choice};

use crate::topology::Topology;
use circle::{Circle, Parts};
use std::ops::Range;

/// What happens to the elements that a receive brings.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Take {
    /// They replace the buffer's range.
    Replace,
    /// They are combined into the buffer's range.
    Combine,
    /// The whole buffer of another rank: kept aside, and combined in the order of ranks when all are there.
    InRankOrder,
}

/// Sends and receives that run at once: so, but for what is kept aside, none of their ranges overlap.
#[derive(Clone, PartialEq, Debug, Default)]
pub(crate) struct Round {
    pub(crate) sends: Vec<(usize, Range<usize>)>,
    pub(crate) receives: Vec<(usize, Range<usize>, Take)>,
}

impl Round {
    /// Each of these ranks is told the range that `range` says.
    fn tell(ranks: impl IntoIterator<Item = usize>, range: impl Fn(usize) -> Range<usize>) -> Round {
        let sends = ranks.into_iter().map(|rank| (rank, range(rank))).collect();
        Round { sends, ..Round::default() }
    }

    /// From each of these ranks comes the range that `range` says.
    fn hear(
        ranks: impl IntoIterator<Item = usize>,
        range: impl Fn(usize) -> Range<usize>,
        take: Take,
    ) -> Round {
        let receives = ranks.into_iter().map(|rank| (rank, range(rank), take)).collect();
        Round { receives, ..Round::default() }
    }
}

/// The rounds of one rank, and why they are these.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Schedule {
    pub(crate) rounds: Vec<Round>,
    pub(crate) choice: Choice,
    /// Whether messages have lengths of their own, so that both sides of each must agree on that instead of the operation's.
    pub(crate) uneven: bool,
}

impl Schedule {
    fn new(choice: Choice, rounds: Vec<Round>) -> Schedule {
        Schedule { rounds, choice, uneven: false }
    }
}

/// An operation in memory that all ranks see: two words with everybody, that all slices are there and that all results are. What is
/// done between them is no message.
pub(crate) fn in_place(rank: usize, n: usize) -> Schedule {
    let exchange = direct::words(Circle::all(rank, n));
    Schedule::new(Choice::in_place(), vec![exchange.clone(), exchange])
}

/// What a schedule is made for, apart from the operation.
#[derive(Clone, Copy)]
pub(crate) struct Seat<'a> {
    pub(crate) rank: usize,
    pub(crate) topology: &'a Topology,
    /// How all-reduces shall be carried out, if somebody says so.
    pub(crate) asked: Option<Algorithm>,
}

/// Up to this many bytes hosts sum by leaders: what fewer messages save counts for more than that only leaders work.
const LEADER_BYTES: usize = 16 << 10;

impl<'a> Seat<'a> {
    fn circle(&self) -> Circle<'static> {
        Circle::all(self.rank, self.topology.ranks())
    }

    /// How an all-reduce of so many bytes is carried out.
    pub(crate) fn all_reduce_choice(&self, bytes: usize) -> Choice {
        Choice::all_reduce(bytes, self.topology, self.asked)
    }

    /// Sum (or another reduction) of all ranks' buffers, on all ranks.
    pub(crate) fn all_reduce(&self, len: usize, element_bytes: usize) -> Schedule {
        let (circle, whole, bytes) = (self.circle(), 0..len, len * element_bytes);
        let choice = self.all_reduce_choice(bytes);
        let parts = Parts::of(whole.clone(), circle.n);
        let rounds = match choice.algorithm {
            Algorithm::Direct => direct::all_reduce(circle, whole),
            Algorithm::Doubling => digits::doubling(circle, whole),
            Algorithm::Tree => tree::all_reduce(circle, whole),
            Algorithm::Star => direct::all_reduce_by_one(circle, whole),
            Algorithm::Halving => {
                [digits::reduce_scatter(circle, &parts), digits::all_gather(circle, &parts)].concat()
            }
            Algorithm::Hierarchical if bytes > LEADER_BYTES && self.topology.is_even() => {
                hosts::all_reduce_by_parts(self.rank, self.topology, whole)
            }
            Algorithm::Hierarchical => hosts::all_reduce_by_leaders(self.rank, self.topology, whole),
            Algorithm::Ring => {
                [ring::reduce_scatter(circle, &parts), ring::all_gather(circle, &parts)].concat()
            }
            Algorithm::Dissemination | Algorithm::InPlace => {
                unreachable!("a group refuses to all-reduce by what can't")
            }
        };
        Schedule::new(choice, rounds)
    }

    /// Each rank ends with its own segment reduced: segment `rank` of as many equal ones as there are ranks.
    pub(crate) fn reduce_scatter(&self, len: usize, element_bytes: usize) -> Schedule {
        let (circle, n) = (self.circle(), self.topology.ranks());
        let choice = Choice::reduce_scatter(len * element_bytes, self.topology);
        let parts = Parts::of(0..len, n);
        let rounds = match choice.algorithm {
            Algorithm::Halving => digits::reduce_scatter(circle, &parts),
            _ => ring::reduce_scatter(circle, &parts),
        };
        Schedule::new(choice, rounds)
    }

    /// Every rank starts with its own segment in place, of as many equal ones as there are ranks, and ends with all.
    pub(crate) fn all_gather(&self, len: usize, element_bytes: usize) -> Schedule {
        let (circle, n) = (self.circle(), self.topology.ranks());
        let choice = Choice::all_gather(len * element_bytes, self.topology);
        let parts = Parts::of(0..len, n);
        let rounds = match choice.algorithm {
            Algorithm::Direct => direct::all_gather(circle, &parts),
            _ => ring::all_gather(circle, &parts),
        };
        Schedule::new(choice, rounds)
    }

    /// The buffer of `root` on all ranks.
    pub(crate) fn broadcast(&self, len: usize, root: usize) -> Schedule {
        let choice = Choice::broadcast(self.topology);
        let rounds = match choice.algorithm {
            Algorithm::Hierarchical => hosts::broadcast(self.rank, self.topology, 0..len, root),
            _ => tree::broadcast(self.circle(), root, 0..len),
        };
        Schedule::new(choice, rounds)
    }

    /// Sum (or another reduction) of all ranks' buffers, at rank `root`; what the others' buffers hold then means nothing.
    pub(crate) fn reduce(&self, len: usize, element_bytes: usize, root: usize) -> Schedule {
        let (circle, whole) = (self.circle(), 0..len);
        let choice = Choice::reduce(len * element_bytes, self.topology);
        let rounds = match choice.algorithm {
            Algorithm::Direct => direct::reduce(circle, root, whole),
            Algorithm::Hierarchical => hosts::reduce(self.rank, self.topology, whole, root),
            _ => {
                let parts = Parts::of(whole, circle.n);
                let own = parts.part(self.rank);
                let mut rounds = ring::reduce_scatter(circle, &parts);
                rounds.extend(direct::gather(circle, root, own, |rank| parts.part(rank)));
                rounds
            }
        };
        Schedule::new(choice, rounds)
    }

    /// The first operation of a group: nobody leaves before everybody came, and only ranks that are next to each other in a tree
    /// have to be connected for it.
    pub(crate) fn assembly(&self) -> Schedule {
        Schedule::new(Choice::only(Algorithm::Tree), tree::assembly(self.circle()))
    }

    /// Nobody leaves before everybody came.
    pub(crate) fn barrier(&self) -> Schedule {
        Schedule::new(Choice::only(Algorithm::Dissemination), barrier::dissemination(self.circle()))
    }

    /// A barrier by way of rank 0, where what is still to come is who is missing.
    pub(crate) fn monitored_barrier(&self) -> Schedule {
        Schedule::new(Choice::only(Algorithm::Direct), barrier::counted(self.circle()))
    }

    /// Rank `root` ends with everyone's part, of `len` elements, in the order of ranks; its own is in place. The others'
    /// buffers are their parts.
    pub(crate) fn gather(&self, len: usize, root: usize) -> Schedule {
        let rounds = direct::gather(self.circle(), root, 0..len, |rank| rank * len..(rank + 1) * len);
        Schedule::new(Choice::only(Algorithm::Direct), rounds)
    }

    /// The way back from [`Seat::gather`].
    pub(crate) fn scatter(&self, len: usize, root: usize) -> Schedule {
        let rounds = direct::scatter(self.circle(), root, 0..len, |rank| rank * len..(rank + 1) * len);
        Schedule::new(Choice::only(Algorithm::Direct), rounds)
    }

    /// Range `sends[r]` goes to rank r, and what rank r sends comes into range `receives[r]`; the two don't overlap.
    pub(crate) fn all_to_all(&self, sends: &[Range<usize>], receives: &[Range<usize>]) -> Schedule {
        let rounds = direct::all_to_all(self.circle(), sends, receives);
        Schedule { rounds, choice: Choice::only(Algorithm::Direct), uneven: true }
    }
}
