//! Going to another rank's door.

use crate::door::{Call, Door, Key, hear_answer};
use crate::endpoint::{LocalAddress, PeerAddress, Stream};
use crate::lobby::Lobby;
use crate::tls::Tls;
use crate::transport::{Lost, Pulse, Wire};
use nix::errno::Errno;
use nix::sys::socket::{AddressFamily, SockFlag, SockType, UnixAddr, connect, socket};
use phalanx_wire::{Deadline, HandshakeError, Rank, Secret, Side};
use std::io::ErrorKind;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

/// How long a rank tries to reach another one.
const LIMIT: Duration = Duration::from_secs(30);
/// The first pause between two attempts; each is twice as long as the one before, up to the second.
const RETRY: Duration = Duration::from_millis(1);
const LONGEST_RETRY: Duration = Duration::from_millis(200);

/// How often a rank that seems to know another secret is tried again.
const DOUBTS: u32 = 4;

/// One way to one rank.
pub(crate) struct Errand {
    pub(crate) key: Key,
    /// Both as the run numbers them.
    pub(crate) own: Rank,
    pub(crate) peer: Rank,
    pub(crate) address: PeerAddress,
    /// Whether the other one is on this host.
    pub(crate) is_here: bool,
}

impl Errand {
    /// Goes there on a thread of its own; what comes of it is found in the lobby.
    pub(crate) fn send_off(self, door: &Door, lobby: &Arc<Lobby>) {
        let (secret, tls, pulse) = (door.secret().clone(), door.tls().cloned(), Arc::clone(door.pulse()));
        let (at, peer) = (Arc::clone(lobby), self.peer);
        let thread = std::thread::Builder::new().name("phalanx-dial".into());
        let spawned = thread.spawn(move || at.dialed(peer, self.go(&secret, tls.as_ref(), &pulse)));
        if let Err(error) = spawned {
            lobby.dialed(peer, Err(Lost::Seen(format!("it can't be reached: no thread for it: {error}"))));
        }
    }

    /// A connection, or none if the other one is on its way here. A peer that is beset by strangers may close a connection
    /// before it was proven: then the next attempt comes.
    fn go(self, secret: &Secret, tls: Option<&Tls>, pulse: &Pulse) -> Result<Option<Box<dyn Wire>>, Lost> {
        let deadline = Deadline::after(LIMIT);
        let (mut pause, mut doubts) = (RETRY, 0);
        loop {
            match self.attempt(secret, tls, pulse, &deadline) {
                // A peer that has no room hangs up just as one does that knows another secret.
                Err(Failure::Passing(error @ HandshakeError::WrongSecret)) if doubts == DOUBTS => {
                    return Err(self.unreachable(&error));
                }
                Err(Failure::Passing(error)) if deadline.remaining() <= pause => {
                    return Err(self.unreachable(&error));
                }
                Err(Failure::Passing(error)) => {
                    doubts += u32::from(matches!(error, HandshakeError::WrongSecret));
                    std::thread::sleep(pause);
                    pause = (2 * pause).min(LONGEST_RETRY);
                }
                Err(Failure::Final(lost)) => return Err(lost),
                Ok(outcome) => return Ok(outcome),
            }
        }
    }

    fn attempt(
        &self,
        secret: &Secret,
        tls: Option<&Tls>,
        pulse: &Pulse,
        deadline: &Deadline,
    ) -> Result<Option<Box<dyn Wire>>, Failure> {
        let stream = match &self.address.local {
            Some(local) if self.is_here => dial_here(local, deadline),
            _ => dial_tcp(self.address.tcp, deadline),
        };
        let stream = stream.map_err(|error| Failure::Final(self.unreachable(&error)))?;
        let hello = Call { key: self.key, whom: self.peer }.hello(self.own);
        let (mut stream, _) = stream.prove(tls, secret, &hello, deadline).map_err(|error| {
            if is_passing(&error) {
                Failure::Passing(error)
            } else {
                Failure::Final(self.unreachable(&error))
            }
        })?;
        if !hear_answer(&mut stream).map_err(Failure::Final)? {
            return Ok(None);
        }
        stream
            .into_wire(Side::Dialed, pulse)
            .map(Some)
            .map_err(|error| Failure::Final(self.unreachable(&error)))
    }

    fn unreachable(&self, why: &impl std::fmt::Display) -> Lost {
        Lost::Seen(format!("it can't be reached at {}: {why}", self.address.tcp))
    }
}

enum Failure {
    /// Another attempt may do.
    Passing(HandshakeError),
    Final(Lost),
}

fn is_passing(error: &HandshakeError) -> bool {
    match error {
        HandshakeError::Io(error) => matches!(
            error.kind(),
            ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset | ErrorKind::BrokenPipe
        ),
        HandshakeError::WrongSecret => true,
        _ => false,
    }
}

fn dial_tcp(address: SocketAddr, deadline: &Deadline) -> std::io::Result<Stream> {
    let limit = deadline.remaining().max(Duration::from_millis(1));
    let stream = TcpStream::connect_timeout(&address, limit)?;
    stream.set_nodelay(true)?;
    Ok(Stream::Tcp(stream))
}

/// A Unix socket connects at once, or not at all while the queue of its listener is full.
fn dial_here(address: &LocalAddress, deadline: &Deadline) -> std::io::Result<Stream> {
    let name = UnixAddr::new_abstract(address.name.as_bytes())?;
    loop {
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let socket = socket(AddressFamily::Unix, SockType::Stream, flags, None)?;
        match connect(socket.as_raw_fd(), &name) {
            Ok(()) => {
                let stream = UnixStream::from(socket);
                stream.set_nonblocking(false)?;
                return Ok(Stream::Local(stream));
            }
            Err(Errno::EAGAIN) if !deadline.expired() => std::thread::sleep(RETRY.min(deadline.remaining())),
            Err(error) => return Err(error.into()),
        }
    }
}
