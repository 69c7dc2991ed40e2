//! An agent's connection to the coordinator.

use super::{AGENT_PURPOSE, FromAgent, ToAgent};
use crate::error::Error;
use phalanx_wire::{
    Channel, Deadline, Doubts, Generation, HandshakeError, Hello, Pass, Rank, read_frame, why_no_frame,
    write_frame,
};
use std::io::ErrorKind;
use std::net::{IpAddr, Shutdown, SocketAddr, TcpStream};
use std::time::Duration;

/// The longest message between an agent and the coordinator, in bytes. How a run stands is told whole: with the arguments of each node's
/// program, and with the last lines of all workers that failed.
pub const MAX_AGENT_FRAME: usize = 1 << 26;
/// How often each end gives a sign of life.
pub const AGENT_BEAT: Duration = Duration::from_millis(200);
/// How long a proof may take: one that is stopped, or has too much to do, has its machine take connections meanwhile.
const PROOF_LIMIT: Duration = Duration::from_secs(30);
/// How long a message may take to be handed to the system.
const SAY_LIMIT: Duration = Duration::from_secs(1);

/// The agent's end. It is shared: one thread hears, others say.
#[derive(Debug)]
pub struct AgentLink {
    stream: Channel,
    address: SocketAddr,
}

impl AgentLink {
    /// Connects with the run's secret, or with TLS as well ([`Pass`]), once: nobody may be there yet, which is for the caller to wait for. `silence` is how
    /// long the coordinator may give no sign of life.
    pub fn dial(
        address: SocketAddr,
        pass: impl Into<Pass>,
        deadline: Deadline,
        silence: Duration,
    ) -> Result<AgentLink, Error> {
        let unreachable = |error: std::io::Error| match error.kind() {
            ErrorKind::ConnectionRefused => Error::NobodyListens { address },
            _ => Error::Unreachable { address: address.to_string(), reason: error.to_string() },
        };
        let broken = |error: std::io::Error| Error::Broken { address, reason: error.to_string() };
        let hello = Hello { purpose: AGENT_PURPOSE.into(), rank: Rank(0), generation: Generation(0) };
        let (pass, mut doubts) = (pass.into(), Doubts::default());
        let met = loop {
            let left = deadline.remaining().clamp(Duration::from_millis(1), PROOF_LIMIT);
            let stream = TcpStream::connect_timeout(&address, left).map_err(unreachable)?;
            let proof = Deadline::after(deadline.remaining().min(PROOF_LIMIT));
            match Channel::dial(stream, &pass, &hello, &proof) {
                Err(error) if doubts.remain(&error, &deadline) => {}
                met => break met,
            }
        };
        let (stream, _) = met.map_err(|error| match error {
            HandshakeError::NotOurs => Error::NotOurs { address },
            HandshakeError::Io(error) if error.kind() == ErrorKind::TimedOut => Error::NotOurs { address },
            source @ (HandshakeError::WantsTls | HandshakeError::HasNoTls) => {
                Error::Handshake { address, source }
            }
            HandshakeError::WrongSecret => Error::OtherSecret { address },
            HandshakeError::Disagreement { theirs, .. } => {
                Error::OtherVersion { address, ours: AGENT_PURPOSE.into(), theirs: theirs.purpose.clone() }
            }
            HandshakeError::Io(error) => broken(error),
        })?;
        stream.set_read_timeout(Some(silence)).map_err(broken)?;
        stream.set_write_timeout(Some(SAY_LIMIT)).map_err(broken)?;
        Ok(AgentLink { stream, address })
    }

    /// The address of this end, which is one that the run's other nodes can reach.
    pub fn local_ip(&self) -> Result<IpAddr, Error> {
        self.stream.local_addr().map(|local| local.ip()).map_err(|error| self.broken(error.to_string()))
    }

    /// Where the coordinator is.
    pub fn coordinator(&self) -> SocketAddr {
        self.address
    }

    /// Ends the connection; whoever hears at it finds that out.
    pub fn close(&self) {
        // One that is gone already needs no closing.
        let _ = self.stream.shutdown(Shutdown::Both);
    }

    /// Says something.
    pub fn say(&self, message: &FromAgent) -> Result<(), Error> {
        let frame = serde_json::to_vec(message).expect("a message is always JSON");
        write_frame(&mut &self.stream, &frame).map_err(|error| self.broken(error.to_string()))
    }

    /// Waits for the next message. The coordinator's beats come long before it counts as silent.
    pub fn hear(&self) -> Result<ToAgent, Error> {
        let frame = read_frame(&mut &self.stream, MAX_AGENT_FRAME);
        let frame = frame.map_err(|error| self.broken(why_no_frame(&error)))?;
        serde_json::from_slice(&frame).map_err(|error| self.broken(format!("an unreadable message: {error}")))
    }

    fn broken(&self, reason: String) -> Error {
        Error::Broken { address: self.address, reason }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use phalanx_wire::Secret;
    use std::net::TcpListener;

    #[test]
    fn what_a_long_run_has_to_tell_is_heard() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (address, secret) = (listener.local_addr().unwrap(), Secret::random().unwrap());
        let (pass, deadline) = (Pass::from(&secret), Deadline::after(Duration::from_secs(60)));
        let long = "x".repeat(3 << 20);
        let refused = ToAgent::Refused { reason: long.clone() };
        let coordinator = std::thread::spawn(move || {
            let (stream, _) = listener.accept().unwrap();
            let answer = |theirs: &Hello| Hello { rank: Rank(0), ..theirs.clone() };
            let (stream, _) = Channel::accept(stream, &pass, &deadline, answer).unwrap();
            write_frame(&mut &stream, &serde_json::to_vec(&refused).unwrap()).unwrap();
        });
        let link = AgentLink::dial(address, &secret, deadline, Duration::from_secs(60)).unwrap();
        assert!(matches!(link.hear().unwrap(), ToAgent::Refused { reason } if reason == long));
        coordinator.join().unwrap();
    }
}
