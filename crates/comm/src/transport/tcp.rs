//! A peer anywhere: a TCP connection.

use super::{Lost, Wire};
use nix::poll::PollFlags;
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};

/// A process's end.
pub(crate) struct Tcp {
    stream: TcpStream,
}

impl Tcp {
    /// Over a connection that is made and proven already.
    pub(crate) fn new(stream: TcpStream) -> std::io::Result<Tcp> {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        Ok(Tcp { stream })
    }
}

fn outcome(result: std::io::Result<usize>) -> Result<usize, Lost> {
    match result {
        Ok(n) => Ok(n),
        Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => Ok(0),
        Err(error) => Err(Lost(error.to_string())),
    }
}

impl Wire for Tcp {
    fn try_send(&mut self, bytes: &[u8]) -> Result<usize, Lost> {
        outcome(self.stream.write(bytes))
    }

    fn try_receive(&mut self, into: &mut [u8]) -> Result<usize, Lost> {
        match self.stream.read(into) {
            Ok(0) => Err(Lost("its connection closed".into())),
            other => outcome(other),
        }
    }

    fn fall_asleep(&mut self, wanted: PollFlags) -> Option<PollFlags> {
        Some(wanted)
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }

    fn close(&mut self) {
        // A connection that is gone already needs no closing.
        let _ = self.stream.shutdown(Shutdown::Both);
    }

    fn name(&self) -> &'static str {
        "TCP"
    }
}
