//! Ranks that are processes, without a launcher: `cargo run --release -p phalanx-comm --example processes -- 64`.
//!
//! The first process starts the others, hands each the addresses of all through its standard input, and prints how long it took
//! them to become a group and to sum a slice. A real program has its addresses from a scheduler, a file or a store, and its
//! secret from somewhere that nobody else can read.

use phalanx_comm::{Endpoint, Generation, Group, GroupConfig, PeerAddress, Rank, ReduceOp, Secret};
use std::error::Error;
use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

type Outcome = Result<(), Box<dyn Error>>;

fn main() -> Outcome {
    let mut args = std::env::args().skip(1);
    let first = args.next().unwrap_or("4".into());
    match args.next() {
        Some(secret) => work(Rank(first.parse()?), &secret),
        None => lead(first.parse()?),
    }
}

/// Starts `n` ranks and lets them find each other.
fn lead(n: usize) -> Outcome {
    let secret = Secret::random()?.to_hex();
    let start = |rank: usize| {
        let mut command = Command::new(std::env::current_exe()?);
        // Everybody can see arguments: good enough for an example on a machine of one's own.
        command.args([&rank.to_string(), &secret]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()
    };
    let mut ranks: Vec<_> = (0..n).map(start).collect::<Result<_, _>>()?;
    let mut addresses = Vec::new();
    for rank in &mut ranks {
        let mut line = String::new();
        BufReader::new(rank.stdout.take().expect("it is piped")).read_line(&mut line)?;
        addresses.push(serde_json::from_str::<PeerAddress>(&line)?);
    }
    let addresses = serde_json::to_string(&addresses)?;
    for rank in &mut ranks {
        writeln!(rank.stdin.take().expect("it is piped"), "{addresses}")?;
    }
    for mut rank in ranks {
        assert!(rank.wait()?.success(), "a rank failed");
    }
    Ok(())
}

/// One rank.
fn work(rank: Rank, secret: &str) -> Outcome {
    let endpoint = Endpoint::bind([127, 0, 0, 1].into())?;
    println!("{}", serde_json::to_string(&endpoint.address())?);
    let mut line = String::new();
    std::io::stdin().read_line(&mut line)?;
    let peers: Vec<PeerAddress> = serde_json::from_str(&line)?;
    let n = peers.len();
    let secret = Secret::from_hex(secret).ok_or("a secret has 64 digits")?;
    let start = Instant::now();
    let (generation, timeout) = (Generation(0), Duration::from_secs(60));
    let group = Group::connect(GroupConfig { rank, generation, secret, endpoint, peers, timeout })?;
    let made = start.elapsed();
    // Where all ranks of a host see it, so that it is summed in place.
    let mut values = group.allocate::<f32>(1 << 20)?;
    values.fill(rank.0 as f32);
    group.barrier()?;
    let start = Instant::now();
    group.all_reduce(&mut values, ReduceOp::Sum)?;
    let summed = start.elapsed();
    assert_eq!(values[n], (n * (n - 1) / 2) as f32);
    if rank == Rank(0) {
        let how = group.history().last().map(|record| record.algorithm.to_string()).unwrap_or_default();
        eprintln!("{}: a group after {made:.1?}, 4 MiB summed in {summed:.1?} ({how})", group.describe());
    }
    Ok(())
}
