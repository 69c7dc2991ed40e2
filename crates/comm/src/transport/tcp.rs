//! Ranks in processes anywhere: one TCP connection a pair.

use super::{Lost, Transport};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::AsFd;
use std::time::Duration;

/// A process's end.
pub(crate) struct Tcp {
    /// By rank; none for this rank itself.
    streams: Vec<Option<TcpStream>>,
}

impl Tcp {
    /// Over connections that are made and proven already.
    pub(crate) fn new(streams: Vec<Option<TcpStream>>) -> std::io::Result<Tcp> {
        for stream in streams.iter().flatten() {
            stream.set_nonblocking(true)?;
            stream.set_nodelay(true)?;
        }
        Ok(Tcp { streams })
    }

    fn stream(&mut self, peer: usize) -> &mut TcpStream {
        self.streams[peer].as_mut().expect("a connection to every other rank")
    }
}

fn outcome(result: std::io::Result<usize>) -> Result<usize, Lost> {
    match result {
        Ok(n) => Ok(n),
        Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => Ok(0),
        Err(error) => Err(Lost(error.to_string())),
    }
}

impl Transport for Tcp {
    fn try_send(&mut self, to: usize, bytes: &[u8]) -> Result<usize, Lost> {
        outcome(self.stream(to).write(bytes))
    }

    fn try_receive(&mut self, from: usize, into: &mut [u8]) -> Result<usize, Lost> {
        if into.is_empty() {
            return Ok(0);
        }
        match self.stream(from).read(into) {
            Ok(0) => Err(Lost("its connection closed".into())),
            other => outcome(other),
        }
    }

    fn park(&mut self, receives: &[usize], sends: &[usize], at_most: Duration) {
        let wanted = |peers: &[usize], flag: PollFlags| {
            let streams = peers.iter().filter_map(|&peer| self.streams[peer].as_ref());
            streams.map(|stream| PollFd::new(stream.as_fd(), flag)).collect::<Vec<_>>()
        };
        let mut fds = wanted(receives, PollFlags::POLLIN);
        fds.extend(wanted(sends, PollFlags::POLLOUT));
        // Rounded up, so that a wait that is nearly over doesn't become a spin; an error only ends the sleep early.
        let ms = at_most.as_millis().saturating_add(1);
        let _ = poll(&mut fds, PollTimeout::try_from(ms).unwrap_or(PollTimeout::MAX));
    }

    fn close(&mut self) {
        for stream in self.streams.iter().flatten() {
            // A connection that is gone already needs no closing.
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    fn name(&self) -> &'static str {
        "TCP"
    }
}
