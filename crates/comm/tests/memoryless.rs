//! A process that may make no memory to share. The limit that keeps it from that is the process's, and counts for a log that its output
//! goes to as well, so this test has one to itself: the harness writes nothing while it runs.

#[path = "ranks/meeting.rs"]
mod meeting;

use meeting::Meeting;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::signal::{SigSet, Signal};
use phalanx_comm::{Endpoint, Generation, Group, GroupConfig, Rank, ReduceOp, Secret};
use std::net::Ipv4Addr;
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(20);

/// Keeps this process from making any memory that others could have, too: a limit on files counts for it.
struct NoMemory(u64, u64);

impl NoMemory {
    fn begin() -> NoMemory {
        // Whoever reaches the limit is sent this, and every thread that is started here has it blocked, too.
        SigSet::from(Signal::SIGXFSZ).thread_block().unwrap();
        let (soft, hard) = getrlimit(Resource::RLIMIT_FSIZE).unwrap();
        setrlimit(Resource::RLIMIT_FSIZE, 4096, hard).unwrap();
        NoMemory(soft, hard)
    }
}

impl Drop for NoMemory {
    fn drop(&mut self) {
        setrlimit(Resource::RLIMIT_FSIZE, self.0, self.1).unwrap();
    }
}

#[test]
fn ranks_that_can_make_no_memory_to_share_meet_over_tcp() {
    // The ends were made while there was memory, so that they say that they may be reached by it.
    let endpoints: Vec<Endpoint> =
        (0..3).map(|_| Endpoint::bind(Ipv4Addr::LOCALHOST.into()).unwrap()).collect();
    let peers: Vec<_> = endpoints.iter().map(Endpoint::address).collect();
    assert!(peers.iter().all(|peer| peer.local.is_some()));
    let (no_memory, met, may_share) = (NoMemory::begin(), Meeting::of(4), Meeting::of(4));
    std::thread::scope(|scope| {
        for (number, endpoint) in endpoints.into_iter().enumerate() {
            let (rank, peers, secret) = (Rank(number as u32), peers.clone(), Secret::from_bytes([7; 32]));
            let (generation, met, may_share) = (Generation(1), &met, &may_share);
            scope.spawn(move || {
                let config = GroupConfig { rank, generation, secret, endpoint, peers, timeout: LIMIT };
                let group = Group::connect(config).unwrap();
                let sum = |values: &mut [u32]| {
                    values.fill(rank.0 + 1);
                    group.all_reduce(values, ReduceOp::Sum).unwrap();
                    assert!(values.iter().all(|&sum| sum == 6), "{values:?}");
                };
                sum(&mut [0; 1000]);
                met.wait();
                may_share.wait();
                // It can be made now, but not be passed to those that were met over TCP.
                sum(&mut group.allocate(100_000).unwrap());
                assert!(!group.history().last().unwrap().algorithm.to_string().contains("in place"));
            });
        }
        met.wait();
        drop(no_memory);
        may_share.wait();
    });
}
