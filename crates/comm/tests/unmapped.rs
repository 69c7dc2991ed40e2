//! A rank that may map no memory of another one, as under `ulimit -v`. The limit is a process's, so that rank is one of its own.

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use phalanx_comm::{Endpoint, Generation, Group, GroupConfig, PeerAddress, Rank, ReduceOp, Secret};
use std::io::{BufRead, BufReader, Write};
use std::net::Ipv4Addr;
use std::process::{Command, Stdio};
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(20);
/// In the environment of the rank that may map nothing.
const CHILD: &str = "PHALANX_COMM_TEST_UNMAPPED";
/// Stands before where it says that it is.
const MARK: &str = "@here ";
/// What it may still map: enough for threads, and less than the memory that a pair of ranks shares.
const LEFT: u64 = 24 << 20;

fn bind() -> Endpoint {
    Endpoint::bind(Ipv4Addr::LOCALHOST.into()).unwrap()
}

/// The sum over the two ranks, as this one has it.
fn sum_as(rank: u32, endpoint: Endpoint, peers: Vec<PeerAddress>) -> Vec<u32> {
    let (rank, generation, secret) = (Rank(rank), Generation(1), Secret::from_bytes([7; 32]));
    let config = GroupConfig { rank, generation, secret, endpoint, peers, timeout: LIMIT };
    let mut sum = vec![rank.0 + 1; 1000];
    let group = Group::connect(config).unwrap_or_else(|error| panic!("rank {rank}: {error}"));
    group.all_reduce(&mut sum, ReduceOp::Sum).unwrap_or_else(|error| panic!("rank {rank}: {error}"));
    sum
}

/// The test starts this once more with [`CHILD`] in its environment, and then it is rank 0, to which the other one dials.
#[test]
fn the_rank_that_may_map_nothing() {
    if std::env::var_os(CHILD).is_none() {
        return;
    }
    let endpoint = bind();
    println!("{MARK}{}", serde_json::to_string(&endpoint.address()).unwrap());
    let mut peers = String::new();
    std::io::stdin().read_line(&mut peers).unwrap();
    let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages: u64 = pages.split(' ').next().unwrap().parse().unwrap();
    let (_, hard) = getrlimit(Resource::RLIMIT_AS).unwrap();
    setrlimit(Resource::RLIMIT_AS, pages * 4096 + LEFT, hard).unwrap();
    assert_eq!(sum_as(0, endpoint, serde_json::from_str(&peers).unwrap()), [3; 1000]);
}

#[test]
fn a_rank_that_may_map_nothing_is_met_over_tcp() {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["the_rank_that_may_map_nothing", "--exact", "--nocapture"])
        .env(CHILD, "1")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    // The test harness speaks there, too.
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
    let here = lines.find_map(|line| Some(line.split_once(MARK)?.1.to_owned())).unwrap();
    let endpoint = bind();
    let peers = vec![serde_json::from_str(&here).unwrap(), endpoint.address()];
    let told = serde_json::to_string(&peers).unwrap() + "\n";
    child.stdin.take().unwrap().write_all(told.as_bytes()).unwrap();
    assert_eq!(sum_as(1, endpoint, peers), [3; 1000]);
    lines.for_each(drop);
    assert!(child.wait().unwrap().success());
}
