//! A process that has no descriptors left. Such a limit is the process's, so these tests have one to themselves, by turns.

#[path = "ranks/meeting.rs"]
mod meeting;

use meeting::Meeting;
use nix::sys::resource::{Resource, UsageWho, getrlimit, getrusage, setrlimit};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, SockaddrIn, connect, socket};
use nix::sys::time::TimeValLike;
use phalanx_comm::{Deadline, Endpoint, Error, Generation, Group, GroupConfig, Rank, Secret};
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::os::fd::AsRawFd;
use std::sync::mpsc::channel;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

const WHILE: Duration = Duration::from_millis(400);
const LIMIT: Duration = Duration::from_secs(20);

static TURN: Mutex<()> = Mutex::new(());

/// Keeps this process from getting any descriptor until it is dropped.
struct Scarcity {
    soft: u64,
    hard: u64,
}

impl Scarcity {
    fn begin() -> Scarcity {
        let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
        // Those below are the standard streams. What others give back meanwhile is no use then; a poll of three still works.
        setrlimit(Resource::RLIMIT_NOFILE, 3, hard).unwrap();
        Scarcity { soft, hard }
    }
}

impl Drop for Scarcity {
    fn drop(&mut self) {
        setrlimit(Resource::RLIMIT_NOFILE, self.soft, self.hard).unwrap();
    }
}

fn cpu_ms() -> i64 {
    let usage = getrusage(UsageWho::RUSAGE_SELF).unwrap();
    usage.user_time().num_milliseconds() + usage.system_time().num_milliseconds()
}

#[test]
fn a_door_that_can_let_nobody_in_rests_and_goes_on_when_it_can() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let endpoint = Endpoint::bind(Ipv4Addr::LOCALHOST.into()).unwrap();
    let peers = vec![endpoint.address()];
    let SocketAddr::V4(door) = peers[0].tcp else { unreachable!("it is bound to such an address") };
    let (rank, generation, secret) = (Rank(0), Generation(1), Secret::from_bytes([7; 32]));
    let timeout = LIMIT;
    let _group = Group::connect(GroupConfig { rank, generation, secret, endpoint, peers, timeout }).unwrap();
    let stranger = socket(AddressFamily::Inet, SockType::Stream, SockFlag::empty(), None).unwrap();
    let scarcity = Scarcity::begin();
    connect(stranger.as_raw_fd(), &SockaddrIn::from(door)).unwrap();
    let (before, (_quiet, nothing)) = (cpu_ms(), channel::<()>());
    nothing.recv_timeout(WHILE).unwrap_err();
    let took = cpu_ms() - before;
    drop(scarcity);
    assert!(took < WHILE.as_millis() as i64 / 4, "{took} ms of {WHILE:?}");
    let mut stranger = TcpStream::from(stranger);
    stranger.set_read_timeout(Some(timeout)).unwrap();
    // It is heard, as far as it takes to see that it is none of them, and refused: the connection ends.
    stranger.write_all(&[0; 40]).unwrap();
    assert!(stranger.read(&mut [0]).is_ok_and(|n| n == 0));
}

#[test]
fn a_rank_without_descriptors_waits_for_some_and_then_blames_itself() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let endpoints: Vec<Endpoint> =
        (0..4).map(|_| Endpoint::tcp(Ipv4Addr::LOCALHOST.into()).unwrap()).collect();
    let peers: Vec<_> = endpoints.iter().map(Endpoint::address).collect();
    let are_done = Meeting::of(4);
    let rank = |rank: usize, endpoint: Endpoint| {
        let (rank, peers, secret) = (Rank(rank as u32), peers.clone(), Secret::from_bytes([7; 32]));
        let config = GroupConfig { rank, generation: Generation(1), secret, endpoint, peers, timeout: LIMIT };
        let group = Group::connect(config).unwrap();
        // By way of rank 0, so ranks 2 and 3 have no connection to rank 1 yet.
        group.monitored_barrier(LIMIT).unwrap();
        let mut came = [0u8];
        match rank.0 {
            1 => group.receive(&mut came, Rank(2)).unwrap(),
            2 => {
                let scarcity = Scarcity::begin();
                let mut sent = group.start_send(vec![1u8], Rank(1), 0);
                let (_quiet, nothing) = channel::<()>();
                nothing.recv_timeout(WHILE).unwrap_err();
                assert!(!sent.poll(), "there is a descriptor");
                drop(scarcity);
                sent.wait(Deadline::after(LIMIT)).unwrap();
            }
            _ => {}
        }
        group.monitored_barrier(LIMIT).unwrap();
        let error = match rank.0 {
            1 => group.receive(&mut came, Rank(3)).err(),
            3 => {
                let _scarcity = Scarcity::begin();
                group.send(&[1u8], Rank(1)).err()
            }
            _ => None,
        };
        // What a rank gives back when it leaves would be enough.
        are_done.wait();
        error
    };
    let errors: Vec<Option<Error>> = std::thread::scope(|scope| {
        let rank = &rank;
        let ranks = endpoints.into_iter().enumerate();
        let ranks: Vec<_> =
            ranks.map(|(number, endpoint)| scope.spawn(move || rank(number, endpoint))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    // Both were on their way to each other.
    for number in [1, 3] {
        let error = errors[number].as_ref().map(Error::to_string).unwrap_or_default();
        assert!(error.contains("ended the group: it has no connection to spare for rank"), "{error}");
    }
}
