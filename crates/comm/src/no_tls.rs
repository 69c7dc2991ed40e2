//! What stands in the place of `tls.rs` in a build without the feature of that name: an endpoint can't have it, so there are no
//! sessions.

use phalanx_wire::{Deadline, Socket};
use std::io::{Error, Read, Result, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::Duration;

#[derive(Clone)]
pub(crate) enum Tls {}

pub(crate) enum Session {}

impl Tls {
    pub(crate) fn new() -> Result<Tls> {
        Err(Error::other("this program was built without TLS\nhint: build it with the feature `tls`"))
    }

    pub(crate) fn dial(&self, _: TcpStream, _: &Deadline) -> Result<Session> {
        match *self {}
    }

    pub(crate) fn accept(&self, _: TcpStream, _: &Deadline) -> Result<Session> {
        match *self {}
    }
}

impl Session {
    pub(crate) fn stream(&self) -> &Arc<TcpStream> {
        match *self {}
    }

    pub(crate) fn holds(&self) -> bool {
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
