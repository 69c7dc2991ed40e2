//! What can go wrong between ranks.
//!
//! Inside of a group an error names ranks as the group numbers them. Whoever gets it out of there may hold several groups, and whoever
//! started the ranks knows none of these: they are told the numbers in the run ([`Error::in_run`]).

use phalanx_wire::Rank;
use std::fmt;
use std::time::Duration;
use thiserror::Error;

/// Why a collective, or the making of a group, failed. A group that failed once stays failed.
///
/// Ranks have the numbers here by which the run knows them ([`crate::Group::members`]), also where a group of some of them has others;
/// only what an operation was asked for, as `from rank 0`, is told as it was said.
#[derive(Clone, Error)]
pub enum Error {
    /// The deadline passed.
    #[error("{operation}: waited {waited:.1?} for {}{}", ranks(.missing), told(.heard))]
    Timeout {
        /// Operation, sequence number, element type and count.
        operation: String,
        /// How long it lasted.
        waited: Duration,
        /// The ranks that something was still to come from or to be taken by.
        missing: Vec<Rank>,
        /// What this rank heard of some of them last.
        heard: Vec<Heard>,
    },
    /// A connection closed: its process died, left, or was cut off.
    #[error("{operation}: rank {peer} is gone{}: {reason}", says(.said_by))]
    PeerLost {
        /// Operation, sequence number, element type and count.
        operation: String,
        /// Who was lost: whose connection closed, here or where that was seen first.
        peer: Rank,
        /// The rank that saw it first, if that was another one; this one has it from a parting word.
        said_by: Option<Rank>,
        /// What the transport saw.
        reason: String,
    },
    /// Two ranks are in different operations.
    #[error(
        "rank {rank} is in {ours}, but rank {peer} is in {theirs}\nhint: all ranks of a group must issue the same operations in the same order"
    )]
    Mismatch {
        /// This rank.
        rank: Rank,
        /// What it was doing.
        ours: String,
        /// The other rank.
        peer: Rank,
        /// What that one was doing.
        theirs: String,
    },
    /// A rank sends more than this one may keep until it asks for it.
    #[error(
        "rank {rank} has no room for {letter} from rank {peer}, which nobody asked for yet: {limit} bytes may wait\nhint: receive messages before more are sent"
    )]
    Overrun {
        /// This rank.
        rank: Rank,
        /// Who sends.
        peer: Rank,
        /// What it sends.
        letter: String,
        /// How many bytes may wait, in all.
        limit: usize,
    },
    /// A rank is there, as far as is known, but gives no sign of life: it is stopped, or cut off. See
    /// [`crate::Group::with_silence`].
    #[error("{operation}: rank {peer} is silent: {reason}")]
    Silent {
        /// Operation, sequence number, element type and count.
        operation: String,
        /// Who is silent.
        peer: Rank,
        /// What is known of it, and for how long it has been so.
        reason: String,
    },
    /// A rank ended the group: it called [`crate::Group::abort`], or met an error that is the reason here.
    #[error("rank {by} ended the group: {reason}")]
    Aborted {
        /// Which, this one or another.
        by: Rank,
        /// Why.
        reason: String,
    },
    /// What the ranks' GPUs do together has failed on this one.
    #[error("{operation}: {reason}")]
    Gpu {
        /// What was done, and with how much.
        operation: String,
        /// What the library says of it, and what to do.
        reason: String,
    },
    /// Another thread was in an operation of the same group all the time.
    #[error(
        "waited {waited:.1?} for another thread's operation of the same group\nhint: give each thread a group of its own"
    )]
    Busy {
        /// How long it lasted.
        waited: Duration,
    },
    /// A group couldn't be made.
    #[error("rank {rank} can't join its group: {reason}")]
    Connect {
        /// This rank.
        rank: Rank,
        /// What failed.
        reason: String,
    },
}

/// Its message, which is what a `main` that returns it tells.
impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// What a rank heard of another last.
#[derive(Clone, Debug, PartialEq)]
pub struct Heard {
    /// The other rank.
    pub rank: Rank,
    /// The operation that its last message belonged to; none if it never sent one.
    pub operation: Option<String>,
    /// How long ago that was.
    pub ago: Duration,
    /// How fast the rest comes, or goes, where it does.
    pub pace: Option<Pace>,
}

/// How fast a message moves that isn't whole.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Pace {
    /// Bits in a second, both directions together.
    pub bits_per_s: f64,
    /// Bytes of it that came or went.
    pub moved: usize,
    /// Bytes that it has.
    pub of: usize,
}

impl fmt::Display for Heard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.operation {
            Some(operation) => {
                write!(f, "rank {} was last heard in {operation} {:.1?} ago", self.rank, self.ago)?
            }
            None => write!(f, "nothing was ever heard of rank {}", self.rank)?,
        }
        self.pace.map_or(Ok(()), |pace| write!(f, ", and is slow: {pace}"))
    }
}

impl fmt::Display for Pace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mib = |bytes: usize| bytes as f64 / f64::from(1 << 20);
        let (moved, of) = (mib(self.moved), mib(self.of));
        write!(f, "{:.2} Mbit/s, {moved:.1} of {of:.1} MiB moved", self.bits_per_s / 1e6)
    }
}

/// How many of the missing ranks an error tells of.
const TOLD: usize = 4;

fn told(heard: &[Heard]) -> String {
    let mut text: String = heard.iter().take(TOLD).map(|heard| format!("; {heard}")).collect();
    if heard.len() > TOLD {
        text.push_str(&format!("; and {} more", heard.len() - TOLD));
    }
    text
}

impl Error {
    /// The same for those outside of the group, whose ranks are `members` to them.
    pub(crate) fn in_run(mut self, members: &[Rank]) -> Error {
        // Words of others may name any.
        let rename = |rank: &mut Rank| *rank = members.get(rank.index()).copied().unwrap_or(*rank);
        match &mut self {
            Error::Timeout { missing, heard, .. } => {
                missing.iter_mut().for_each(rename);
                missing.sort_unstable();
                heard.iter_mut().for_each(|heard| rename(&mut heard.rank));
            }
            Error::PeerLost { peer, said_by, .. } => {
                rename(peer);
                said_by.iter_mut().for_each(rename);
            }
            Error::Mismatch { rank, peer, .. } | Error::Overrun { rank, peer, .. } => {
                rename(rank);
                rename(peer);
            }
            Error::Silent { peer, .. } => rename(peer),
            Error::Aborted { by, .. } => rename(by),
            // That is the run's number already.
            Error::Connect { .. } => {}
            Error::Gpu { .. } | Error::Busy { .. } => {}
        }
        self
    }

    /// What an error is to rank `own` when it happens before its group is complete.
    pub(crate) fn in_making(self, own: Rank) -> Error {
        let making = "making the group".to_owned();
        match self {
            Error::Timeout { waited, missing, heard, .. } => {
                Error::Timeout { operation: making, waited, missing, heard }
            }
            Error::PeerLost { peer, said_by, reason, .. } => {
                Error::PeerLost { operation: making, peer, said_by, reason }
            }
            // They differ in what isn't said.
            Error::Mismatch { peer, ours, theirs, .. } if ours == theirs => {
                Error::connect(own, format!("rank {peer} makes a group of other ranks"))
            }
            other => other,
        }
    }

    pub(crate) fn connect(rank: Rank, reason: impl Into<String>) -> Error {
        Error::Connect { rank, reason: reason.into() }
    }
}

fn says(by: &Option<Rank>) -> String {
    by.map_or_else(String::new, |by| format!(", says rank {by}"))
}

/// "rank 3" or "ranks 1, 2".
fn ranks(ranks: &[Rank]) -> String {
    let list: Vec<String> = ranks.iter().map(Rank::to_string).collect();
    format!("{} {}", if ranks.len() == 1 { "rank" } else { "ranks" }, list.join(", "))
}
