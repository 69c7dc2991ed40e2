//! Going to another rank's door.

use crate::door::{Call, Door, Key, hear_answer};
use crate::endpoint::{LocalAddress, PeerAddress, Stream};
use crate::lobby::{Dialing, Lobby, Way};
use crate::transport::{Lost, Pulse};
use crate::word::{Why, Word};
use nix::errno::Errno;
use nix::sys::socket::{AddressFamily, SockFlag, SockType, UnixAddr, connect, socket};
use phalanx_wire::tls::Tls;
use phalanx_wire::{Deadline, HandshakeError, Rank, Secret, Side};
use std::cell::Cell;
use std::io::ErrorKind;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long a rank tries to reach another one.
const LIMIT: Duration = Duration::from_secs(30);
/// How long it waits for a descriptor, or for whatever else this process has none of.
const SHORTAGE: Duration = Duration::from_secs(2);
/// The first pause between two attempts; each is twice as long as the one before, up to the second.
const RETRY: Duration = Duration::from_millis(1);
const LONGEST_RETRY: Duration = Duration::from_millis(200);

/// How often a rank that seems to know another secret is tried again.
const DOUBTS: u32 = 4;

/// One way to one rank.
pub(crate) struct Errand {
    pub(crate) key: Key,
    /// This rank, as the group numbers it.
    pub(crate) here: Rank,
    /// Both as the run numbers them.
    pub(crate) own: Rank,
    pub(crate) peer: Rank,
    pub(crate) address: PeerAddress,
    /// Whether the other one is on this host.
    pub(crate) is_here: bool,
}

/// An errand under way, with what it takes to get in.
struct Journey {
    errand: Errand,
    lobby: Arc<Lobby>,
    secret: Secret,
    tls: Option<Tls>,
    pulse: Arc<Pulse>,
    deadline: Deadline,
    /// Whether this process could make no memory to share with the other one.
    lacks_memory: Cell<bool>,
}

impl Errand {
    /// Goes there on a thread of its own; what comes of it is found in the lobby.
    pub(crate) fn send_off(self, door: &Door, lobby: &Arc<Lobby>) {
        let (here, peer) = (self.here, self.peer);
        let journey = Journey {
            errand: self,
            lobby: Arc::clone(lobby),
            secret: door.secret().clone(),
            tls: door.tls().cloned(),
            pulse: Arc::clone(door.pulse()),
            deadline: Deadline::after(LIMIT),
            lacks_memory: Cell::new(false),
        };
        let thread = std::thread::Builder::new().name("phalanx-dial".into());
        let spawned = thread.spawn(move || {
            let outcome = journey.go();
            journey.lobby.dialed(peer, outcome, Instant::now());
        });
        if let Err(error) = spawned {
            lobby.dialed(peer, Err(short_of("thread", here, peer, &error)), Instant::now());
        }
    }
}

impl Journey {
    /// A peer that is beset by strangers may close a connection before it was proven: then the next attempt comes.
    fn go(&self) -> Result<Way, Lost> {
        let (mut pause, mut doubts) = (RETRY, 0);
        let shortage = Deadline::after(SHORTAGE);
        loop {
            match self.attempt() {
                // A peer that has no room hangs up just as one does that knows another secret.
                Err(Failure::Passing(error @ HandshakeError::WrongSecret)) if doubts == DOUBTS => {
                    return Err(self.unreachable(&error));
                }
                Err(Failure::Passing(error)) if self.deadline.remaining() <= pause => {
                    return Err(self.unreachable(&error));
                }
                Err(Failure::Short(error)) if shortage.expired() => {
                    let Errand { here, peer, .. } = self.errand;
                    return Err(short_of("connection", here, peer, &error));
                }
                Err(Failure::Passing(error)) => {
                    doubts += u32::from(matches!(error, HandshakeError::WrongSecret));
                }
                Err(Failure::Short(_)) => {}
                Err(Failure::Final(lost)) => return Err(lost),
                Ok(way) => return Ok(way),
            }
            std::thread::sleep(pause);
            pause = (2 * pause).min(LONGEST_RETRY);
        }
    }

    fn attempt(&self) -> Result<Way, Failure> {
        let Errand { key, own, peer, address, is_here, .. } = &self.errand;
        if !self.lobby.still_dials(*peer, Dialing::begun(Instant::now())) {
            return Ok(Way::Crossed);
        }
        let stream = match &address.local {
            Some(local) if *is_here && !self.lacks_memory.get() => dial_here(local, &self.deadline),
            _ => dial_tcp(address.tcp, &self.deadline),
        };
        let stream = match stream {
            Ok(stream) => stream,
            Err(error) if is_shortage(&error) => return Err(Failure::Short(error)),
            Err(error) => return Ok(Way::Blocked(self.unreachable(&error))),
        };
        let connected = Dialing { since: Instant::now(), is_connected: true, process: stream.process() };
        if !self.lobby.still_dials(*peer, connected) {
            return Ok(Way::Crossed);
        }
        let hello = Call { key: *key, whom: *peer }.hello(*own);
        let proven = stream.prove(self.tls.as_ref(), &self.secret, &hello, &self.deadline);
        let (mut stream, _) = proven.map_err(|error| {
            if is_passing(&error) {
                Failure::Passing(error)
            } else {
                Failure::Final(self.unreachable(&error))
            }
        })?;
        if !hear_answer(&mut stream).map_err(Failure::Final)? {
            return Ok(Way::Crossed);
        }
        let is_memory = stream.is_memory();
        match stream.into_wire(Side::Dialed, &self.pulse) {
            Ok(wire) => Ok(Way::Through(wire)),
            Err(error) if is_memory => {
                tracing::warn!("memory can't be shared with rank {peer}, TCP is used: {error}");
                self.lacks_memory.set(true);
                Err(Failure::Short(error))
            }
            Err(error) => Err(Failure::Final(self.unreachable(&error))),
        }
    }

    fn unreachable(&self, why: &impl std::fmt::Display) -> Lost {
        Lost::Seen(format!("it can't be reached at {}: {why}", self.errand.address.tcp))
    }
}

enum Failure {
    /// Another attempt may do.
    Passing(HandshakeError),
    /// This process lacks something, perhaps for a while.
    Short(std::io::Error),
    Final(Lost),
}

/// That rank `here` is to blame, and not the one that it doesn't get to.
fn short_of(what: &str, here: Rank, peer: Rank, error: &std::io::Error) -> Lost {
    let hint = "raise the limits on open files and processes (ulimit -n, ulimit -u)";
    let text = format!("it has no {what} to spare for rank {peer}: {error}\nhint: {hint}");
    Lost::Told(Word { by: here, why: Why::Ended, text })
}

fn is_shortage(error: &std::io::Error) -> bool {
    let errno = error.raw_os_error().map(Errno::from_raw);
    matches!(errno, Some(Errno::EMFILE | Errno::ENFILE | Errno::ENOMEM | Errno::ENOBUFS))
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
