//! A process that has no descriptors left. The limit is the process's, so this test has one to itself.

use nix::sys::resource::{Resource, UsageWho, getrlimit, getrusage, setrlimit};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, SockaddrIn, connect, socket};
use nix::sys::time::TimeValLike;
use phalanx_comm::{Endpoint, Generation, Group, GroupConfig, Rank, Secret};
use std::fs::File;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::os::fd::AsRawFd;
use std::sync::mpsc::channel;
use std::time::Duration;

const WHILE: Duration = Duration::from_millis(400);

fn cpu_ms() -> i64 {
    let usage = getrusage(UsageWho::RUSAGE_SELF).unwrap();
    usage.user_time().num_milliseconds() + usage.system_time().num_milliseconds()
}

#[test]
fn a_door_that_can_let_nobody_in_rests_and_goes_on_when_it_can() {
    let endpoint = Endpoint::bind(Ipv4Addr::LOCALHOST.into()).unwrap();
    let peers = vec![endpoint.address()];
    let SocketAddr::V4(door) = peers[0].tcp else { unreachable!("it is bound to such an address") };
    let (rank, generation, secret) = (Rank(0), Generation(1), Secret::from_bytes([7; 32]));
    let timeout = Duration::from_secs(20);
    let _group = Group::connect(GroupConfig { rank, generation, secret, endpoint, peers, timeout }).unwrap();
    let stranger = socket(AddressFamily::Inet, SockType::Stream, SockFlag::empty(), None).unwrap();
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    // Descriptors are given out from the lowest on.
    let next = File::open("/dev/null").unwrap().as_raw_fd();
    setrlimit(Resource::RLIMIT_NOFILE, next as u64, hard).unwrap();
    connect(stranger.as_raw_fd(), &SockaddrIn::from(door)).unwrap();
    let (before, (_quiet, nothing)) = (cpu_ms(), channel::<()>());
    nothing.recv_timeout(WHILE).unwrap_err();
    let took = cpu_ms() - before;
    setrlimit(Resource::RLIMIT_NOFILE, soft, hard).unwrap();
    assert!(took < WHILE.as_millis() as i64 / 4, "{took} ms of {WHILE:?}");
    let mut stranger = TcpStream::from(stranger);
    stranger.set_read_timeout(Some(timeout)).unwrap();
    // It is heard, as far as it takes to see that it is none of them, and refused: the connection ends.
    stranger.write_all(&[0; 40]).unwrap();
    assert!(stranger.read(&mut [0]).is_ok_and(|n| n == 0));
}
