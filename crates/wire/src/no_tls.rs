//! What stands in the place of `tls.rs` in a build without the feature of that name: nobody can have it, so there are no sessions.

use crate::deadline::Deadline;
use crate::handshake::Socket;
use std::io::{Error, Read, Result, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::Duration;

/// What nobody has.
#[derive(Clone)]
pub enum Tls {}

/// What can't be begun.
pub enum Session {}

impl Tls {
    /// Says that there is none.
    pub fn new() -> Result<Tls> {
        Err(Error::other("this program was built without TLS\nhint: build it with the feature `tls`"))
    }

    /// As a build with TLS has it.
    pub fn dial(&self, _: TcpStream, _: &Deadline) -> Result<Session> {
        match *self {}
    }

    /// As a build with TLS has it.
    pub fn accept(&self, _: TcpStream, _: &Deadline) -> Result<Session> {
        match *self {}
    }
}

impl Session {
    /// As a build with TLS has it.
    pub fn stream(&self) -> &Arc<TcpStream> {
        match *self {}
    }

    /// As a build with TLS has it.
    pub fn holds(&self) -> bool {
        match *self {}
    }
}

impl Read for Session {
    fn read(&mut self, _: &mut [u8]) -> Result<usize> {
        match *self {}
    }
}

impl Write for Session {
    fn write(&mut self, _: &[u8]) -> Result<usize> {
        match *self {}
    }

    fn flush(&mut self) -> Result<()> {
        match *self {}
    }
}

impl Socket for Session {
    fn limit(&self, _: Duration) -> Result<()> {
        match *self {}
    }
}
