//! Groups for tests: of threads, and as processes make them.

pub(crate) mod meeting;

use meeting::Meeting;
use phalanx_comm::{Endpoint, Error, Generation, Group, GroupConfig, PeerAddress, Rank, Secret};
use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

pub(crate) const HOST: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
pub(crate) const LIMIT: Duration = Duration::from_secs(20);

/// Runs `f` on every rank of a group of threads over each transport.
pub(crate) fn on_all(n: usize, f: impl Fn(Group) + Sync) {
    std::thread::scope(|scope| {
        for group in Group::threads(n) {
            scope.spawn(|| f(group.with_timeout(LIMIT)));
        }
    });
    for bind in BINDS {
        connected(bind, n, |_| {}, |group| f(group.unwrap()));
    }
}

/// How an endpoint is made.
pub(crate) type Bind = fn(IpAddr) -> Result<Endpoint, Error>;

/// For shared memory, for TCP, and for TLS.
pub(crate) const BINDS: [Bind; 3] = [Endpoint::bind, Endpoint::tcp, tls];

/// Over TCP, encrypted.
pub(crate) fn tls(ip: IpAddr) -> Result<Endpoint, Error> {
    Endpoint::tcp(ip)?.with_tls()
}

/// Makes a group as processes do, of threads; `meanwhile` gets the addresses before anyone connects. No rank goes on before all
/// are connected: one that fails at once would take those with it that still are about to.
pub(crate) fn connected(
    bind: Bind,
    n: usize,
    meanwhile: impl FnOnce(&[PeerAddress]),
    f: impl Fn(Result<Group, Error>) + Sync,
) {
    let secret = Secret::from_bytes([7; 32]);
    let endpoints: Vec<Endpoint> = (0..n).map(|_| bind(HOST).unwrap()).collect();
    let peers: Vec<_> = endpoints.iter().map(Endpoint::address).collect();
    meanwhile(&peers);
    let all_connected = Meeting::of(n);
    std::thread::scope(|scope| {
        for (rank, endpoint) in endpoints.into_iter().enumerate() {
            let (secret, peers, f, all_connected) = (secret.clone(), peers.clone(), &f, &all_connected);
            scope.spawn(move || {
                let rank = Rank(rank as u32);
                let timeout = LIMIT;
                let generation = Generation(3);
                let group =
                    Group::connect(GroupConfig { rank, generation, secret, endpoint, peers, timeout });
                all_connected.wait();
                f(group)
            });
        }
    });
}
