//! Bytes between two ranks, in order, without blocking. Nothing here knows what the bytes mean.

mod memory;
mod process;
mod signs;
mod tcp;
mod threads;
mod wires;

pub(crate) use memory::Memory;
pub(crate) use process::Process;
pub(crate) use signs::{Signs, State, Traffic, Verdict, is_cut_off, judge};
pub(crate) use tcp::{BEAT, Pulse, Tcp};
pub(crate) use threads::{Shared as SharedThreads, end_of, threads};
pub(crate) use wires::{LEAVING_FAILED, Wire, Wires, deliver};

use crate::error::Error;
use crate::word::Word;
use phalanx_wire::Rank;
use std::fs::File;
use std::time::Duration;

/// Ends a sleep from another thread: that of the transport it was made for, or its next one.
pub(crate) type Waker = Box<dyn Fn() + Send + Sync>;

/// A connection ended.
#[derive(Clone, Debug)]
pub(crate) enum Lost {
    /// Without a word: what the transport saw of it.
    Seen(String),
    /// For the reason that the peer gives, or that this rank gives for not going there.
    Told(Word),
}

impl Lost {
    /// What it is to a rank that is in `operation` with that peer.
    pub(crate) fn into_error(self, operation: String, peer: Rank) -> Error {
        match self {
            Lost::Seen(reason) => Error::PeerLost { operation, peer, said_by: None, reason },
            Lost::Told(word) => word.into_error(operation, peer),
        }
    }
}

/// A rank's end of the connections to all others.
pub(crate) trait Transport: Send {
    /// Takes as many bytes for rank `to` as fit now; says how many.
    fn try_send(&mut self, to: usize, bytes: &[u8]) -> Result<usize, Lost>;

    /// Brings as many bytes from rank `from` as are there now; says how many.
    fn try_receive(&mut self, from: usize, into: &mut [u8]) -> Result<usize, Lost>;

    /// Puts a whole letter where rank `to` takes it from without this rank's help, if it fits there; says where, which is to be told
    /// to that rank in what is sent next.
    fn shelve(&mut self, _to: usize, _letter: &[u8]) -> Result<Option<u32>, Lost> {
        Ok(None)
    }

    /// Takes a letter from where rank `from` says that it lies.
    fn unshelve(&mut self, _from: usize, _at: u32, _into: &mut [u8]) -> Result<(), Lost> {
        Err(Lost::Seen("memory can't be shared with it".into()))
    }

    /// The next bytes from rank `from` where they lie, if the connection can show them: as many as lie in one piece.
    fn look(&mut self, _from: usize) -> Result<Option<&[u8]>, Lost> {
        Ok(None)
    }

    /// So many bytes that were looked at are done with.
    fn consume(&mut self, _from: usize, _n: usize) {}

    /// Hands rank `to` a file, whose memory both then see; whether that could be done now.
    fn pass(&mut self, _to: usize, _file: &File) -> Result<bool, Lost> {
        Err(Lost::Seen("memory can't be shared with it".into()))
    }

    /// The next file that rank `from` passed, if there is one, or why this process couldn't take it.
    fn take_passed(&mut self, _from: usize) -> Result<Option<std::io::Result<File>>, Lost> {
        Err(Lost::Seen("memory can't be shared with it".into()))
    }

    /// Whether files can be passed to all others, as far as is known of where they are.
    fn shares_memory(&self) -> bool {
        false
    }

    /// The process that rank `peer` is, if that can be seen.
    fn process(&self, _peer: usize) -> Option<Process> {
        None
    }

    /// Whether something may come from a rank without this one asking for it.
    fn reaches(&mut self, _peer: usize) -> bool {
        true
    }

    /// All ranks have been here once: one that doesn't answer now is no late one.
    fn have_met(&mut self) {}

    /// Sleeps until one of these ranks may have sent something, or may take something, or the time is over.
    fn park(&mut self, receives: &[usize], sends: &[usize], at_most: Duration);

    /// What ends a [`Transport::park`] from another thread.
    fn waker(&self) -> Waker;

    /// What can be seen of rank `peer` without waiting.
    fn signs(&mut self, _peer: usize) -> Signs {
        Signs::Unseen
    }

    /// Tells every peer why this rank leaves, as far as that goes without waiting, and leaves, so that every peer notices.
    /// Nothing is sent or received afterwards.
    fn part(&mut self, word: &Word);

    /// What this is, for people.
    fn name(&self) -> String;
}
