//! Making a group between processes: every rank listens, dials the ranks below it, and takes those above it.

use crate::error::Error;
use crate::group::Group;
use crate::transport::Tcp;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use phalanx_wire::{Deadline, Generation, Hello, Rank, Secret, Side, handshake};
use serde::{Deserialize, Serialize};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::Duration;

/// Where a rank can be reached.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PeerAddress {
    /// Its listening address.
    pub tcp: SocketAddr,
}

/// A rank's ear, before it knows the others.
pub struct Endpoint {
    listener: TcpListener,
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
/// How many unproven connections are looked at at once; more are closed unread.
const MAX_UNPROVEN: usize = 64;
const PURPOSE: &str = "comm";

impl Endpoint {
    /// Listens on a free port of `ip`, which should be the address that the others can reach.
    pub fn bind(ip: IpAddr) -> Result<Endpoint, Error> {
        let listener = TcpListener::bind((ip, 0)).and_then(|l| l.set_nonblocking(true).map(|()| l));
        let listener = listener
            .map_err(|error| Error::connect(Rank(0), format!("no port of {ip} can be had: {error}")))?;
        Ok(Endpoint { listener })
    }

    /// Where the others find it.
    pub fn address(&self) -> PeerAddress {
        PeerAddress { tcp: self.listener.local_addr().expect("a bound socket has an address") }
    }
}

impl Group {
    /// Connects to all peers, each proven to belong to this run and generation. Strangers are refused and logged.
    pub fn connect(config: GroupConfig) -> Result<Group, Error> {
        let GroupConfig { rank, generation, secret, endpoint, peers, timeout } = config;
        let n = peers.len();
        if rank.index() >= n {
            return Err(Error::connect(rank, format!("there are only {n} ranks")));
        }
        if n == 1 {
            return Ok(Group::over(rank, 1, generation, timeout, None));
        }
        let deadline = Deadline::after(timeout);
        let hello = Hello { purpose: PURPOSE.into(), rank, generation };
        let mut streams: Vec<Option<TcpStream>> = (0..n).map(|_| None).collect();
        for (peer, address) in peers.iter().enumerate().take(rank.index()) {
            streams[peer] = Some(dial(peer, address.tcp, &secret, &hello, deadline)?);
        }
        accept(&endpoint.listener, &mut streams, &secret, &hello, deadline)?;
        let wires = Tcp::new(streams).map_err(|error| Error::connect(rank, error.to_string()))?;
        Ok(Group::over(rank, n, generation, timeout, Some(Box::new(wires))))
    }
}

fn dial(
    peer: usize,
    address: SocketAddr,
    secret: &Secret,
    hello: &Hello,
    deadline: Deadline,
) -> Result<TcpStream, Error> {
    let failed = |reason: String| Error::connect(hello.rank, format!("rank {peer} at {address}: {reason}"));
    let limit = deadline.remaining().max(Duration::from_millis(1));
    let mut stream =
        TcpStream::connect_timeout(&address, limit).map_err(|error| failed(error.to_string()))?;
    bounded(&stream, deadline.remaining()).map_err(|error| failed(error.to_string()))?;
    let theirs = handshake(&mut stream, secret, Side::Dialed, hello)
        .map_err(|error| Error::handshake(hello.rank, peer, address, &error))?;
    if theirs.rank.index() != peer {
        return Err(failed(format!("it says it is rank {}", theirs.rank)));
    }
    Ok(stream)
}

fn bounded(stream: &TcpStream, limit: Duration) -> std::io::Result<()> {
    let limit = Some(limit.max(Duration::from_millis(1)));
    stream.set_nodelay(true)?;
    stream.set_read_timeout(limit)?;
    stream.set_write_timeout(limit)
}

/// Takes a connection from every rank above this one. Each newcomer proves itself on a thread of its own, so that a silent
/// one holds up nobody.
fn accept(
    listener: &TcpListener,
    streams: &mut [Option<TcpStream>],
    secret: &Secret,
    hello: &Hello,
    deadline: Deadline,
) -> Result<(), Error> {
    let own = hello.rank.index();
    let missing = |streams: &[Option<TcpStream>]| -> Vec<Rank> {
        (own + 1..streams.len()).filter(|&r| streams[r].is_none()).map(|r| Rank(r as u32)).collect()
    };
    let (proven, arrivals): (SyncSender<(TcpStream, Hello)>, Receiver<_>) = sync_channel(MAX_UNPROVEN);
    let mut unproven = 0usize;
    let (finished, endings) = sync_channel::<()>(MAX_UNPROVEN);
    while !missing(streams).is_empty() {
        if deadline.expired() {
            let operation = "making the group".to_owned();
            return Err(Error::Timeout { operation, waited: deadline.waited(), missing: missing(streams) });
        }
        // Short sleeps: a proof may arrive from its thread while the socket is quiet.
        let mut fds = [PollFd::new(listener.as_fd(), PollFlags::POLLIN)];
        let nap = if unproven > 0 { 1u16 } else { 100 };
        let _ = poll(&mut fds, PollTimeout::from(nap));
        while let Ok((stream, address)) = listener.accept() {
            unproven -= endings.try_iter().count();
            if unproven >= MAX_UNPROVEN {
                tracing::warn!(%address, "refused a connection: {MAX_UNPROVEN} others are yet to prove themselves");
                continue;
            }
            unproven += 1;
            let (secret, greeting, proven, finished) =
                (secret.clone(), hello.clone(), proven.clone(), finished.clone());
            let limit = deadline.remaining().min(HANDSHAKE_LIMIT);
            let prover = std::thread::Builder::new().name("phalanx-accept".into()).spawn(move || {
                let mut stream = stream;
                let ready = stream.set_nonblocking(false).and_then(|()| bounded(&stream, limit));
                match ready
                    .map_err(Into::into)
                    .and_then(|()| handshake(&mut stream, &secret, Side::Accepted, &greeting))
                {
                    // The receiver is gone when the group is complete: then the newcomer is a surplus one.
                    Ok(theirs) => drop(proven.send((stream, theirs))),
                    Err(error) => tracing::warn!(%address, "refused a connection: {error}"),
                }
                let _ = finished.try_send(());
            });
            if let Err(error) = prover {
                return Err(Error::connect(hello.rank, format!("no thread for a newcomer: {error}")));
            }
        }
        for (stream, theirs) in arrivals.try_iter() {
            let peer = theirs.rank.index();
            match streams.get_mut(peer) {
                Some(place @ None) if peer > own => *place = Some(stream),
                _ => tracing::warn!(rank = peer, "refused a connection: no such rank is expected here"),
            }
        }
        unproven -= endings.try_iter().count();
    }
    Ok(())
}
