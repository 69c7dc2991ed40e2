//! Making a group between processes: every rank listens, dials the ranks below it, and takes those above it.

use crate::error::Error;
use crate::group::{Group, Home, Kin, Place};
use crate::topology::Topology;
use crate::transport::{Memory, Pulse, Tcp, Wire, Wires};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, UnixAddr, connect, socket};
use phalanx_wire::{
    Deadline, Generation, HandshakeError, Hello, Rank, Secret, Side, Socket, Strangers, handshake,
};
use serde::{Deserialize, Serialize};
use std::io::ErrorKind;
use std::net::{IpAddr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Duration;

/// Where a rank can be reached.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PeerAddress {
    /// Its listening address.
    pub tcp: SocketAddr,
    /// Its ear for ranks of the same host, if it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub local: Option<LocalAddress>,
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
    fn can_share_memory_with(&self, other: &PeerAddress) -> bool {
        matches!((&self.local, &other.local), (Some(a), Some(b)) if a.host == b.host)
    }
}

/// A rank's ear, before it knows the others.
pub struct Endpoint {
    tcp: TcpListener,
    local: Option<(UnixListener, LocalAddress)>,
    /// Gives signs of life over its connections.
    pulse: Pulse,
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

/// How long one stranger may take to prove itself.
const HANDSHAKE_LIMIT: Duration = Duration::from_secs(5);
/// How many unproven connections may be open at once, above one a rank.
const SURPLUS: usize = 64;
/// How long to wait before the next attempt.
const RETRY: Duration = Duration::from_millis(1);
const PURPOSE: &str = "comm";

impl Endpoint {
    /// Listens on a free port of `ip`, which should be the address that the others can reach, and for ranks of the same host
    /// on a socket over which memory is shared.
    pub fn bind(ip: IpAddr) -> Result<Endpoint, Error> {
        let mut endpoint = Endpoint::tcp(ip)?;
        // The port is nobody else's, so the name is too.
        let name = format!("phalanx-{}-{}", std::process::id(), endpoint.address().tcp.port());
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
        Ok(Endpoint { tcp, local: None, pulse: Pulse::default() })
    }

    /// One more like it, for another group.
    pub(crate) fn another(&self) -> Result<Endpoint, Error> {
        let ip = self.address().tcp.ip();
        if self.local.is_some() { Endpoint::bind(ip) } else { Endpoint::tcp(ip) }
    }

    /// Where the others find it.
    pub fn address(&self) -> PeerAddress {
        let tcp = self.tcp.local_addr().expect("a bound socket has an address");
        PeerAddress { tcp, local: self.local.as_ref().map(|(_, address)| address.clone()) }
    }

    /// A connection of a newcomer, if there is one.
    fn accept(&self) -> Option<Stream> {
        if let Ok((stream, _)) = self.tcp.accept() {
            return Some(Stream::Tcp(stream));
        }
        let (listener, _) = self.local.as_ref()?;
        Some(Stream::Local(listener.accept().ok()?.0))
    }

    /// Sleeps until there may be a newcomer, or the time is over.
    fn park(&self, at_most: u16) {
        let mut fds = vec![PollFd::new(self.tcp.as_fd(), PollFlags::POLLIN)];
        if let Some((listener, _)) = &self.local {
            fds.push(PollFd::new(listener.as_fd(), PollFlags::POLLIN));
        }
        // An error only ends the sleep early.
        let _ = poll(&mut fds, PollTimeout::from(at_most));
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
enum Stream {
    Tcp(TcpStream),
    Local(UnixStream),
}

impl Stream {
    /// Proves and has proven before the deadline, and makes a wire of it.
    fn introduce(
        self,
        secret: &Secret,
        side: Side,
        hello: &Hello,
        deadline: &Deadline,
    ) -> Result<(Box<dyn Wire>, Hello), HandshakeError> {
        Ok(match self {
            Stream::Tcp(mut stream) => {
                stream.set_nonblocking(false)?;
                stream.set_nodelay(true)?;
                let theirs = handshake(&mut stream, secret, side, hello, deadline)?;
                (Box::new(Tcp::new(stream)?), theirs)
            }
            Stream::Local(mut stream) => {
                stream.set_nonblocking(false)?;
                let theirs = handshake(&mut stream, secret, side, hello, deadline)?;
                stream.limit(deadline.remaining().max(Duration::from_millis(1)))?;
                (Box::new(Memory::new(stream, side)?), theirs)
            }
        })
    }

    fn handle(&self) -> std::io::Result<Stream> {
        Ok(match self {
            Stream::Tcp(stream) => Stream::Tcp(stream.try_clone()?),
            Stream::Local(stream) => Stream::Local(stream.try_clone()?),
        })
    }

    /// A connection that is gone already needs no closing.
    fn close(&self) {
        let _ = match self {
            Stream::Tcp(stream) => stream.shutdown(Shutdown::Both),
            Stream::Local(stream) => stream.shutdown(Shutdown::Both),
        };
    }

    fn describe(&self) -> String {
        match self {
            Stream::Tcp(stream) => stream.peer_addr().map_or("an unknown address".into(), |a| a.to_string()),
            Stream::Local(_) => "a process of this host".into(),
        }
    }
}

impl Group {
    /// Connects to all peers, each proven to belong to this run and generation: over shared memory to those of the same host,
    /// else over TCP. Strangers are refused and logged.
    pub fn connect(config: GroupConfig) -> Result<Group, Error> {
        let GroupConfig { rank, generation, secret, endpoint, peers, timeout } = config;
        let place = Place::in_world(rank, peers.len(), generation, timeout);
        Group::join(place, Home { endpoint: Arc::new(endpoint), peers, secret })
    }

    /// As [`Group::connect`], for a rank that has a place already.
    pub(crate) fn join(place: Place, home: Home) -> Result<Group, Error> {
        let Home { endpoint, peers, secret } = &home;
        let Place { rank, generation, timeout, .. } = place;
        let n = peers.len();
        if rank.index() >= n {
            return Err(Error::connect(rank, format!("there are only {n} ranks")));
        }
        if n == 1 {
            return Ok(Group::over(Place { kin: Kin::Processes(Arc::new(home)), ..place }, None));
        }
        let deadline = Deadline::after(timeout);
        let hello = Hello { purpose: PURPOSE.into(), rank, generation };
        let mut wires: Vec<Option<Box<dyn Wire>>> = (0..n).map(|_| None).collect();
        let own = &peers[rank.index()];
        for (peer, address) in peers.iter().enumerate().take(rank.index()) {
            let dial = || match &address.local {
                Some(local) if own.can_share_memory_with(address) => dial_here(local, &deadline),
                _ => dial_tcp(address.tcp, &deadline),
            };
            let (wire, theirs) = meet(dial, secret, &hello, &deadline)
                .map_err(|error| Error::connect(rank, format!("rank {peer} at {}: {error}", address.tcp)))?;
            if theirs.rank.index() != peer {
                let reason = format!("rank {peer} at {} says it is rank {}", address.tcp, theirs.rank);
                return Err(Error::connect(rank, reason));
            }
            wires[peer] = Some(wire);
        }
        accept(endpoint, &mut wires, secret, &hello, deadline)?;
        let topology = Topology::of(peers, |a, b| a.tcp.ip() == b.tcp.ip() || a.can_share_memory_with(b));
        let beats = wires.iter().flatten().try_for_each(|wire| wire.beat_by(&endpoint.pulse));
        let wires = beats.and_then(|()| Wires::new(wires));
        let wires = wires.map_err(|error| Error::connect(rank, error.to_string()))?;
        let kin = Kin::Processes(Arc::new(home));
        Ok(Group::over(Place { topology, kin, ..place }, Some(Box::new(wires))))
    }
}

/// Connects and introduces itself. A peer that is beset by strangers may close a connection before it was proven, and one that
/// still belongs to an older generation may take a while to come; then the next attempt comes.
fn meet(
    dial: impl Fn() -> std::io::Result<Stream>,
    secret: &Secret,
    hello: &Hello,
    deadline: &Deadline,
) -> Result<(Box<dyn Wire>, Hello), HandshakeError> {
    loop {
        match dial()?.introduce(secret, Side::Dialed, hello, deadline) {
            Err(error) if is_passing(&error) && !deadline.expired() => {
                std::thread::sleep(RETRY.min(deadline.remaining()));
            }
            result => return result,
        }
    }
}

fn is_passing(error: &HandshakeError) -> bool {
    match error {
        HandshakeError::Io(error) => matches!(
            error.kind(),
            ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset | ErrorKind::BrokenPipe
        ),
        HandshakeError::Disagreement { theirs, ours } => {
            theirs.purpose == ours.purpose && theirs.generation < ours.generation
        }
        _ => false,
    }
}

fn dial_tcp(address: SocketAddr, deadline: &Deadline) -> std::io::Result<Stream> {
    let limit = deadline.remaining().max(Duration::from_millis(1));
    TcpStream::connect_timeout(&address, limit).map(Stream::Tcp)
}

/// A Unix socket connects at once, or not at all while the queue of its listener is full.
fn dial_here(address: &LocalAddress, deadline: &Deadline) -> std::io::Result<Stream> {
    let name = UnixAddr::new_abstract(address.name.as_bytes())?;
    loop {
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let socket = socket(AddressFamily::Unix, SockType::Stream, flags, None)?;
        match connect(socket.as_raw_fd(), &name) {
            Ok(()) => return Ok(Stream::Local(UnixStream::from(socket))),
            Err(Errno::EAGAIN) if !deadline.expired() => std::thread::sleep(RETRY.min(deadline.remaining())),
            Err(error) => return Err(error.into()),
        }
    }
}

/// Takes a connection from every rank above this one. Each newcomer proves itself on a thread of its own, so that a silent
/// one holds up nobody.
fn accept(
    endpoint: &Endpoint,
    wires: &mut [Option<Box<dyn Wire>>],
    secret: &Secret,
    hello: &Hello,
    deadline: Deadline,
) -> Result<(), Error> {
    let own = hello.rank.index();
    let missing = |wires: &[Option<Box<dyn Wire>>]| -> Vec<Rank> {
        (own + 1..wires.len()).filter(|&r| wires[r].is_none()).map(|r| Rank(r as u32)).collect()
    };
    let strangers = Arc::new(Strangers::new(wires.len() + SURPLUS));
    let (proven, arrivals) = channel::<(Box<dyn Wire>, Hello)>();
    while !missing(wires).is_empty() {
        if deadline.expired() {
            let operation = "making the group".to_owned();
            let (waited, missing) = (deadline.waited(), missing(wires));
            return Err(Error::Timeout { operation, waited, missing, heard: Vec::new() });
        }
        // Short sleeps: a proof may arrive from its thread while the sockets are quiet.
        endpoint.park(if strangers.is_empty() { 100 } else { 1 });
        while let Some(stream) = endpoint.accept() {
            let address = stream.describe();
            let Ok(handle) = stream.handle() else { continue };
            let (number, evicted) = strangers.enter(handle);
            if let Some(evicted) = evicted {
                evicted.close();
            }
            let (secret, greeting, proven) = (secret.clone(), hello.clone(), proven.clone());
            let limit = Deadline::after(deadline.remaining().min(HANDSHAKE_LIMIT));
            let inside = Arc::clone(&strangers);
            let prover = std::thread::Builder::new().name("phalanx-accept".into()).spawn(move || {
                match stream.introduce(&secret, Side::Accepted, &greeting, &limit) {
                    // The receiver is gone when the group is complete: then the newcomer is a surplus one.
                    Ok(met) => drop(proven.send(met)),
                    Err(error) => tracing::warn!(address, "refused a connection: {error}"),
                }
                inside.leave(number);
            });
            if let Err(error) = prover {
                return Err(Error::connect(hello.rank, format!("no thread for a newcomer: {error}")));
            }
        }
        for (wire, theirs) in arrivals.try_iter() {
            let peer = theirs.rank.index();
            match wires.get_mut(peer) {
                Some(place @ None) if peer > own => *place = Some(wire),
                _ => tracing::warn!(rank = peer, "refused a connection: no such rank is expected here"),
            }
        }
    }
    Ok(())
}
