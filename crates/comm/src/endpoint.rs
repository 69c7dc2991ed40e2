//! Where the ranks of a group are, when they are processes, and how the group is made.

use crate::door::{Door, Key};
use crate::error::Error;
use crate::group::{Group, Home, Kin, Place};
use crate::processors::Processors;
use crate::topology::Topology;
use crate::transport::{Memory, Process, Pulse, Tcp, Wire, Wires};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::EventFd;
use nix::sys::socket::{getsockopt, sockopt};
use phalanx_wire::tls::{Session, Tls};
use phalanx_wire::{
    Deadline, Generation, HandshakeError, Hello, Rank, Secret, Side, Socket, handshake, welcome,
};
use serde::{Deserialize, Serialize};
use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Where a rank can be reached.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PeerAddress {
    /// Its listening address.
    pub tcp: SocketAddr,
    /// Its ear for ranks of the same host, if it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub local: Option<LocalAddress>,
    /// Whether it speaks TLS over TCP, as whoever dials it must then.
    #[serde(default)]
    pub tls: bool,
    /// What it may run on: ranks of a host that have a core each wait for each other without falling asleep.
    #[serde(default)]
    pub(crate) processors: Processors,
}

/// Where a rank can be reached by others of its host.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LocalAddress {
    /// Which host that is: ranks that say the same can reach each other.
    pub host: String,
    /// The name of its socket, in the abstract namespace.
    pub name: String,
}

impl PeerAddress {
    /// Whether two ranks are on one host, and both have an ear for that.
    pub(crate) fn can_share_memory_with(&self, other: &PeerAddress) -> bool {
        matches!((&self.local, &other.local), (Some(a), Some(b)) if a.host == b.host)
    }
}

/// A rank's ear, before it knows the others.
pub struct Endpoint {
    tcp: TcpListener,
    local: Option<(UnixListener, LocalAddress)>,
    tls: Option<Tls>,
    /// Those of the thread that bound it.
    processors: Processors,
    /// Gives signs of life over its connections.
    pulse: Arc<Pulse>,
}

/// How a group is made.
pub struct GroupConfig {
    /// Which rank this is.
    pub rank: Rank,
    /// Which membership of the run; others are refused.
    pub generation: Generation,
    /// What every peer must prove to know.
    pub secret: Secret,
    /// This rank's ear, whose address the others have.
    pub endpoint: Endpoint,
    /// The addresses of all ranks, by rank.
    pub peers: Vec<PeerAddress>,
    /// How long making the group may take, and how long a blocking operation waits afterwards.
    pub timeout: Duration,
}

/// How many this process has made.
static ENDPOINTS: AtomicU64 = AtomicU64::new(0);

impl Endpoint {
    /// Listens on a free port of `ip`, which should be the address that the others can reach, and for ranks of the same host
    /// on a socket over which memory is shared.
    pub fn bind(ip: IpAddr) -> Result<Endpoint, Error> {
        let mut endpoint = Endpoint::tcp(ip)?;
        // Another address of this process may have the same port, and another container the same process number.
        let (process, number) = (std::process::id(), ENDPOINTS.fetch_add(1, Ordering::Relaxed));
        let name = format!("phalanx-{process}-{}-{number}", endpoint.address().tcp.port());
        let ear = || {
            Memory::probe()?;
            Ok((listen(&name)?, LocalAddress { host: host()?, name: name.clone() }))
        };
        match ear() {
            Ok(local) => endpoint.local = Some(local),
            Err(error) => warn_of(&error),
        }
        Ok(endpoint)
    }

    /// As [`Endpoint::bind`], with TCP only.
    pub fn tcp(ip: IpAddr) -> Result<Endpoint, Error> {
        let listener = TcpListener::bind((ip, 0)).and_then(|l| l.set_nonblocking(true).map(|()| l));
        let tcp = listener
            .map_err(|error| Error::connect(Rank(0), format!("no port of {ip} can be had: {error}")))?;
        Ok(Endpoint { tcp, local: None, tls: None, processors: Processors::own(), pulse: Arc::default() })
    }

    /// Encrypts what goes over TCP, with TLS 1.3; ranks of a host that share memory need none. All ranks of a group do that, or
    /// none.
    pub fn with_tls(self) -> Result<Endpoint, Error> {
        let tls = Tls::new().map_err(|error| Error::connect(Rank(0), error.to_string()))?;
        Ok(Endpoint { tls: Some(tls), ..self })
    }

    /// What it begins sessions with, if it does.
    pub(crate) fn tls(&self) -> Option<&Tls> {
        self.tls.as_ref()
    }

    /// What gives signs of life over its connections.
    pub(crate) fn pulse(&self) -> &Arc<Pulse> {
        &self.pulse
    }

    /// Where the others find it.
    pub fn address(&self) -> PeerAddress {
        let tcp = self.tcp.local_addr().expect("a bound socket has an address");
        let local = self.local.as_ref().map(|(_, address)| address.clone());
        PeerAddress { tcp, local, tls: self.tls.is_some(), processors: self.processors.clone() }
    }

    /// A connection of a newcomer, if there is one; an error where one waits that this process can't take in.
    pub(crate) fn accept(&self) -> std::io::Result<Option<Stream>> {
        let is_none = |error: &std::io::Error| {
            // One that left again is none either.
            matches!(
                error.kind(),
                ErrorKind::WouldBlock | ErrorKind::Interrupted | ErrorKind::ConnectionAborted
            )
        };
        match self.tcp.accept() {
            Ok((stream, _)) => return Ok(Some(Stream::Tcp(stream))),
            Err(error) if !is_none(&error) => return Err(error),
            Err(_) => {}
        }
        let Some((listener, _)) = &self.local else { return Ok(None) };
        match listener.accept() {
            Ok((stream, _)) => Ok(Some(Stream::Local(stream))),
            Err(error) if is_none(&error) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Sleeps until there may be a newcomer, or the time is over, or somebody says that it is: true.
    pub(crate) fn park(&self, stop: &EventFd, at_most: Option<Duration>) -> bool {
        let mut fds = vec![
            PollFd::new(stop.as_fd(), PollFlags::POLLIN),
            PollFd::new(self.tcp.as_fd(), PollFlags::POLLIN),
        ];
        if let Some((listener, _)) = &self.local {
            fds.push(PollFd::new(listener.as_fd(), PollFlags::POLLIN));
        }
        let ms =
            at_most.map(|limit| PollTimeout::try_from(limit.as_millis() + 1).unwrap_or(PollTimeout::MAX));
        // An error only ends the sleep early.
        let _ = poll(&mut fds, ms.unwrap_or(PollTimeout::NONE));
        fds[0].any() == Some(true)
    }
}

/// TCP does as well, more slowly.
fn warn_of(error: &std::io::Error) {
    tracing::warn!("memory can't be shared with the ranks of this host, TCP is used: {error}");
}

/// What ranks must have in common to share memory: the kernel that runs, and the network namespace, which abstract names
/// belong to.
fn host() -> std::io::Result<String> {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
    let network = std::fs::read_link("/proc/self/ns/net")?;
    Ok(format!("{} {}", boot.trim(), network.display()))
}

fn listen(name: &str) -> std::io::Result<UnixListener> {
    let listener = UnixListener::bind_addr(&std::os::unix::net::SocketAddr::from_abstract_name(name)?)?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// A connection before it is known who is at its other end.
pub(crate) enum Stream {
    Tcp(TcpStream),
    Tls(Box<Session>),
    Local(UnixStream),
}

impl Stream {
    /// Proves itself to one who dialed, and has it proven; over TCP in a session of `tls`, if there is that.
    pub(crate) fn welcome(
        mut self,
        tls: Option<&Tls>,
        secret: &Secret,
        deadline: &Deadline,
        answer: impl FnOnce(&Hello) -> Hello,
    ) -> Result<(Stream, Hello), HandshakeError> {
        match &self {
            Stream::Tcp(stream) => {
                stream.set_nonblocking(false)?;
                stream.set_nodelay(true)?;
            }
            Stream::Tls(_) => {}
            Stream::Local(stream) => stream.set_nonblocking(false)?,
        }
        if let Some(tls) = tls {
            self = self.encrypted(|stream| tls.accept(stream, deadline))?;
        }
        let theirs = welcome(&mut self, secret, deadline, answer)?;
        Ok((self, theirs))
    }

    /// As [`Stream::welcome`], for the one who dialed.
    pub(crate) fn prove(
        mut self,
        tls: Option<&Tls>,
        secret: &Secret,
        hello: &Hello,
        deadline: &Deadline,
    ) -> Result<(Stream, Hello), HandshakeError> {
        if let Some(tls) = tls {
            self = self.encrypted(|stream| tls.dial(stream, deadline))?;
        }
        let theirs = handshake(&mut self, secret, Side::Dialed, hello, deadline)?;
        Ok((self, theirs))
    }

    /// What goes over TCP goes in a session.
    fn encrypted(self, begin: impl FnOnce(TcpStream) -> std::io::Result<Session>) -> std::io::Result<Stream> {
        match self {
            Stream::Tcp(stream) => Ok(Stream::Tls(Box::new(begin(stream)?))),
            other => Ok(other),
        }
    }

    /// Whether its wire is memory that both sides have.
    pub(crate) fn is_memory(&self) -> bool {
        matches!(self, Stream::Local(_))
    }

    /// Makes a wire of a connection whose sides have proven themselves.
    /// Over TCP it begins to give signs of life at once, whatever this rank does.
    pub(crate) fn into_wire(self, side: Side, pulse: &Pulse) -> std::io::Result<Box<dyn Wire>> {
        Ok(match self {
            Stream::Tcp(stream) => Box::new(Tcp::new(stream, pulse)?),
            Stream::Tls(session) => Box::new(Tcp::with_tls(*session, pulse)?),
            Stream::Local(stream) => Box::new(Memory::new(stream, side)?),
        })
    }

    pub(crate) fn handle(&self) -> std::io::Result<Stream> {
        Ok(match self {
            Stream::Tcp(stream) => Stream::Tcp(stream.try_clone()?),
            Stream::Tls(session) => Stream::Tcp(session.stream().try_clone()?),
            Stream::Local(stream) => Stream::Local(stream.try_clone()?),
        })
    }

    /// A connection that is gone already needs no closing.
    pub(crate) fn close(&self) {
        let _ = match self {
            Stream::Tcp(stream) => stream.shutdown(Shutdown::Both),
            Stream::Tls(session) => session.stream().shutdown(Shutdown::Both),
            Stream::Local(stream) => stream.shutdown(Shutdown::Both),
        };
    }

    /// The process that listened where this one dialed, if it can be seen from here.
    pub(crate) fn process(&self) -> Option<Process> {
        let Stream::Local(stream) = self else { return None };
        getsockopt(stream, sockopt::PeerCredentials).ok().and_then(|peer| Process::of(peer.pid()))
    }

    pub(crate) fn describe(&self) -> String {
        let tcp = match self {
            Stream::Tcp(stream) => stream,
            Stream::Tls(session) => session.stream(),
            Stream::Local(_) => return "a process of this host".into(),
        };
        tcp.peer_addr().map_or("an unknown address".into(), |address| address.to_string())
    }
}

impl Read for Stream {
    fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
        match self {
            Stream::Tcp(stream) => stream.read(into),
            Stream::Tls(session) => session.read(into),
            Stream::Local(stream) => stream.read(into),
        }
    }
}

impl Write for Stream {
    fn write(&mut self, from: &[u8]) -> std::io::Result<usize> {
        match self {
            Stream::Tcp(stream) => stream.write(from),
            Stream::Tls(session) => session.write(from),
            Stream::Local(stream) => stream.write(from),
        }
    }

    fn flush(&mut self) -> std::io::Result<()> {
        match self {
            Stream::Tls(session) => session.flush(),
            Stream::Tcp(_) | Stream::Local(_) => Ok(()),
        }
    }
}

impl Socket for Stream {
    fn limit(&self, limit: Duration) -> std::io::Result<()> {
        match self {
            Stream::Tcp(stream) => stream.limit(limit),
            Stream::Tls(session) => session.limit(limit),
            Stream::Local(stream) => stream.limit(limit),
        }
    }

    fn binding(&self) -> std::io::Result<Vec<u8>> {
        match self {
            Stream::Tls(session) => session.binding(),
            Stream::Tcp(_) | Stream::Local(_) => Ok(Vec::new()),
        }
    }
}

impl Group {
    /// Meets all peers, each proven to belong to this run and generation. Ranks of one host share memory, others use TCP, and
    /// two are connected when they first need each other. Strangers are refused and logged, now and later.
    pub fn connect(config: GroupConfig) -> Result<Group, Error> {
        let GroupConfig { rank, generation, secret, endpoint, peers, timeout } = config;
        if rank.index() >= peers.len() {
            return Err(Error::connect(rank, format!("there are only {} ranks", peers.len())));
        }
        let place = Place::in_world(rank, peers.len(), generation, timeout);
        let door = Arc::new(Door::open(endpoint, secret, rank)?);
        Group::meet(place, Home { door, peers })
    }

    /// As [`Group::connect`], for a rank that has a place and a home already.
    pub(crate) fn meet(place: Place, home: Home) -> Result<Group, Error> {
        let peers = &home.peers;
        let topology = Topology::of(peers, |a, b| a.tcp.ip() == b.tcp.ip() || a.can_share_memory_with(b));
        let topology = topology.on(peers.iter().map(|peer| peer.processors.clone()).collect());
        let key = Key { generation: place.generation, group: place.name };
        // A group of one meets nobody, and turns away the same.
        home.door.raise(place.generation);
        let wires = match peers.len() {
            1 => None,
            _ => Some(Box::new(Wires::new(place.rank.index(), &place.members, &home, key)?) as _),
        };
        let kin = Kin::Processes(Arc::new(home));
        let group = Group::over(Place { topology, kin, ..place }, wires);
        group.assemble()?;
        Ok(group)
    }
}
