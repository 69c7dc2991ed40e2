//! A worker's connection to the coordinator. As long as it is open, the worker counts as alive.

use crate::error::Error;
use crate::message::{FromWorker, Roster, ToWorker};
use phalanx_wire::{
    Deadline, Generation, HandshakeError, Hello, Rank, Secret, Side, handshake, read_frame, write_frame,
};
use std::io::ErrorKind;
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::time::Duration;

/// The longest message, in bytes: a roster of some ten thousand workers.
pub const MAX_FRAME: usize = 1 << 20;
/// What both ends say the connection is for.
pub(crate) const PURPOSE: &str = "coord";
/// How long to wait before a coordinator that isn't there yet is tried again.
const RETRY: Duration = Duration::from_millis(20);

/// The worker's end.
pub struct Link {
    stream: TcpStream,
    address: SocketAddr,
}

impl Link {
    /// What the handshake of such a connection says it is for.
    pub fn purpose() -> &'static str {
        PURPOSE
    }

    /// Connects and proves the secret, trying again until the deadline while nobody listens there yet.
    pub fn connect(
        place: impl ToSocketAddrs + std::fmt::Display,
        secret: &Secret,
        rank: Rank,
        generation: Generation,
        deadline: Deadline,
    ) -> Result<Link, Error> {
        let unreachable = |reason: String| Error::Unreachable { address: place.to_string(), reason };
        let addresses: Vec<SocketAddr> =
            place.to_socket_addrs().map_err(|e| unreachable(e.to_string()))?.collect();
        let address = *addresses.first().ok_or_else(|| unreachable("the name has no address".into()))?;
        let mut stream = loop {
            match TcpStream::connect_timeout(&address, deadline.remaining().max(Duration::from_millis(1))) {
                Ok(stream) => break stream,
                Err(error) if error.kind() == ErrorKind::ConnectionRefused && !deadline.expired() => {
                    std::thread::sleep(RETRY.min(deadline.remaining()));
                }
                Err(error) => return Err(unreachable(error.to_string())),
            }
        };
        let broken = |error: std::io::Error| Error::Broken { address, reason: error.to_string() };
        bounded(&stream, &deadline).map_err(broken)?;
        let hello = Hello { purpose: PURPOSE.into(), rank, generation };
        handshake(&mut stream, secret, Side::Dialed, &hello)
            .map_err(|source: HandshakeError| Error::Handshake { address, source })?;
        Ok(Link { stream, address })
    }

    /// The address of this end, which is one that the run's other machines can reach.
    pub fn local_address(&self) -> Result<SocketAddr, Error> {
        self.stream.local_addr().map_err(|e| self.broken(e.to_string()))
    }

    /// Says that this worker is there, and waits until all are.
    pub fn join(&mut self, address: String, deadline: Deadline) -> Result<Roster, Error> {
        self.say(&FromWorker::Join { address })?;
        bounded(&self.stream, &deadline).map_err(|e| self.broken(e.to_string()))?;
        let frame = read_frame(&mut self.stream, MAX_FRAME).map_err(|error| match error.kind() {
            ErrorKind::WouldBlock | ErrorKind::TimedOut => {
                self.broken(format!("no roster after {:.0?}: not all ranks came", deadline.waited()))
            }
            ErrorKind::UnexpectedEof => self.broken("it closed the connection: the run has ended".into()),
            _ => self.broken(error.to_string()),
        })?;
        match serde_json::from_slice(&frame)
            .map_err(|e| self.broken(format!("an unreadable message: {e}")))?
        {
            ToWorker::Roster(roster) => Ok(roster),
            ToWorker::Missing { seconds, missing } => Err(Error::Missing { seconds, missing }),
        }
    }

    /// Says why this worker can't go on.
    pub fn fail(&mut self, message: String, consequence: bool) -> Result<(), Error> {
        self.say(&FromWorker::Fail { message, consequence })
    }

    fn say(&mut self, message: &FromWorker) -> Result<(), Error> {
        let frame = serde_json::to_vec(message).expect("a message is always JSON");
        write_frame(&mut self.stream, &frame).map_err(|e| self.broken(e.to_string()))
    }

    fn broken(&self, reason: String) -> Error {
        Error::Broken { address: self.address, reason }
    }
}

fn bounded(stream: &TcpStream, deadline: &Deadline) -> std::io::Result<()> {
    let limit = Some(deadline.remaining().max(Duration::from_millis(1)));
    stream.set_nodelay(true)?;
    stream.set_read_timeout(limit)?;
    stream.set_write_timeout(limit)
}
