//! What a rank asked for, as errors tell it.

use super::number::Number;
use std::fmt;

/// What is done among ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The others are awaited.
    Join,
    /// New communicators come of this one.
    Split,
    /// All that was issued is awaited.
    Finalize,
    /// Everyone has the reduction of all.
    AllReduce,
    /// This rank has the reduction of all.
    Reduce(usize),
    /// Everyone has what this rank has.
    Broadcast(usize),
    /// Everyone has what all have, in the order of ranks.
    AllGather,
    /// Everyone has its part of the reduction of all.
    ReduceScatter,
    /// To this rank.
    Send(usize),
    /// From this rank.
    Receive(usize),
}

impl Kind {
    /// The library's function.
    pub(super) const fn call(self) -> &'static str {
        match self {
            Kind::Join => "ncclCommInitRankConfig",
            Kind::Split => "ncclCommSplit",
            Kind::Finalize => "ncclCommFinalize",
            Kind::AllReduce => "ncclAllReduce",
            Kind::Reduce(_) => "ncclReduce",
            Kind::Broadcast(_) => "ncclBroadcast",
            Kind::AllGather => "ncclAllGather",
            Kind::ReduceScatter => "ncclReduceScatter",
            Kind::Send(_) => "ncclSend",
            Kind::Receive(_) => "ncclRecv",
        }
    }

    /// The other rank that it names.
    pub(super) const fn peer(self) -> Option<usize> {
        match self {
            Kind::Reduce(rank) | Kind::Broadcast(rank) | Kind::Send(rank) | Kind::Receive(rank) => Some(rank),
            _ => None,
        }
    }
}

/// An operation of a communicator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Operation {
    /// What is done.
    pub kind: Kind,
    /// How many numbers, and of what type, where it moves any.
    pub numbers: Option<(usize, Number)>,
    /// Which of the communicator's operations it is, counted from 1; 0 for joining.
    pub sequence: u64,
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (words, peer) = match self.kind {
            Kind::Join => ("joining the others", None),
            Kind::Split => ("a split", None),
            Kind::Finalize => ("finalizing", None),
            Kind::AllReduce => ("all-reduce", None),
            Kind::Reduce(root) => ("reduce", Some(("to", root))),
            Kind::Broadcast(root) => ("broadcast", Some(("from", root))),
            Kind::AllGather => ("all-gather", None),
            Kind::ReduceScatter => ("reduce-scatter", None),
            Kind::Send(peer) => ("send", Some(("to", peer))),
            Kind::Receive(peer) => ("receive", Some(("from", peer))),
        };
        f.write_str(words)?;
        if let Some((count, number)) = self.numbers {
            write!(f, " of {count} {number}")?;
        }
        if let Some((word, peer)) = peer {
            write!(f, " {word} rank {peer}")?;
        }
        write!(f, " (operation {})", self.sequence)
    }
}
