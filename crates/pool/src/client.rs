//! The other end of a pool's connections: of whoever asks, and of nodes.

use crate::error::Error;
use crate::message::{ASKER_PURPOSE, Answer, Ask, MAX_ANSWER};
use crate::server::{ANSWER_LIMIT, hello, say};
use phalanx_wire::{Channel, Deadline, Doubts, HandshakeError, Secret, read_frame, why_no_frame};
use serde::de::DeserializeOwned;
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

/// How long it may take to be connected, with the proof.
const DIAL_LIMIT: Duration = Duration::from_secs(5);

/// Somebody who asks.
pub struct Client {
    line: Line,
}

impl Client {
    /// Connects.
    pub fn dial(address: SocketAddr, secret: &Secret) -> Result<Client, Error> {
        let line = Line::dial(address, secret, ASKER_PURPOSE, ANSWER_LIMIT)?;
        Ok(Client { line })
    }

    /// Asks, and waits for the answer.
    pub fn ask(&self, ask: &Ask) -> Result<Answer, Error> {
        self.line.say(ask)?;
        self.line.hear()
    }
}

/// A connection to a pool.
#[derive(Clone)]
pub(crate) struct Line {
    address: SocketAddr,
    pub(crate) channel: Channel,
}

impl Line {
    /// `silence` is how long nothing may come where something is waited for.
    pub(crate) fn dial(
        address: SocketAddr,
        secret: &Secret,
        purpose: &str,
        silence: Duration,
    ) -> Result<Line, Error> {
        let deadline = Deadline::after(DIAL_LIMIT);
        let mut doubts = Doubts::default();
        let met = loop {
            let stream = TcpStream::connect_timeout(&address, DIAL_LIMIT)
                .map_err(|error| Error::Unreachable { address, reason: error.to_string() })?;
            match Channel::dial(stream, &secret.into(), &hello(purpose), &deadline) {
                Err(error) if doubts.remain(&error, &deadline) => {}
                met => break met,
            }
        };
        let (channel, _) = met.map_err(|source| match source {
            HandshakeError::Io(error) => Error::Unreachable { address, reason: error.to_string() },
            source => Error::Handshake { address, source: Box::new(source) },
        })?;
        let broken = |error: std::io::Error| Error::Broken { address, reason: error.to_string() };
        channel.set_read_timeout(Some(silence)).map_err(broken)?;
        channel.set_write_timeout(Some(DIAL_LIMIT)).map_err(broken)?;
        Ok(Line { address, channel })
    }

    pub(crate) fn say(&self, message: &impl serde::Serialize) -> Result<(), Error> {
        say(&self.channel, message).map_err(|error| self.broken(error.to_string()))
    }

    pub(crate) fn hear<T: DeserializeOwned>(&self) -> Result<T, Error> {
        let frame = read_frame(&mut &self.channel, MAX_ANSWER);
        let frame = frame.map_err(|error| self.broken(why_no_frame(&error)))?;
        serde_json::from_slice(&frame).map_err(|error| self.broken(format!("an unreadable message: {error}")))
    }

    fn broken(&self, reason: String) -> Error {
        Error::Broken { address: self.address, reason }
    }
}
