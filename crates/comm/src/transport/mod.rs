//! Bytes between two ranks, in order, without blocking. Nothing here knows what the bytes mean.

mod memory;
mod tcp;
mod threads;
mod wires;

pub(crate) use memory::Memory;
pub(crate) use tcp::Tcp;
pub(crate) use threads::{Shared as SharedThreads, end_of, threads};
pub(crate) use wires::{Wire, Wires};

use std::fs::File;
use std::time::Duration;

/// Ends a sleep from another thread: that of the transport it was made for, or its next one.
pub(crate) type Waker = Box<dyn Fn() + Send + Sync>;

/// A connection ended; the text is what the transport saw.
#[derive(Debug)]
pub(crate) struct Lost(pub(crate) String);

/// A rank's end of the connections to all others.
pub(crate) trait Transport: Send {
    /// Takes as many bytes for rank `to` as fit now; says how many.
    fn try_send(&mut self, to: usize, bytes: &[u8]) -> Result<usize, Lost>;

    /// Brings as many bytes from rank `from` as are there now; says how many.
    fn try_receive(&mut self, from: usize, into: &mut [u8]) -> Result<usize, Lost>;

    /// The next bytes from rank `from` where they lie, if the connection can show them: as many as lie in one piece.
    fn look(&mut self, _from: usize) -> Result<Option<&[u8]>, Lost> {
        Ok(None)
    }

    /// So many bytes that were looked at are done with.
    fn consume(&mut self, _from: usize, _n: usize) {}

    /// Hands rank `to` a file, whose memory both then see; whether that could be done now.
    fn pass(&mut self, _to: usize, _file: &File) -> Result<bool, Lost> {
        Err(Lost("memory can't be shared with it".into()))
    }

    /// The next file that rank `from` passed, if there is one.
    fn take_passed(&mut self, _from: usize) -> Result<Option<File>, Lost> {
        Err(Lost("memory can't be shared with it".into()))
    }

    /// Whether files can be passed to all others.
    fn shares_memory(&self) -> bool {
        false
    }

    /// Sleeps until one of these ranks may have sent something, or may take something, or the time is over.
    fn park(&mut self, receives: &[usize], sends: &[usize], at_most: Duration);

    /// What ends a [`Transport::park`] from another thread.
    fn waker(&self) -> Waker;

    /// Closes all connections, so that every peer notices.
    fn close(&mut self);

    /// What this is, for people.
    fn name(&self) -> String;
}
