//! One of the processes: carries out orders, and all-reduces in between.

use crate::talk::{Blame, MARK, Order, Said, Transport};
use nix::sys::socket::{Shutdown, SockaddrStorage, getpeername, shutdown};
use phalanx_comm::{Algorithm, Endpoint, Error, Group, GroupConfig, PeerAddress, Rank, ReduceOp, Secret};
use std::io::BufRead;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Elements of the all-reduces: one segment, several, and more than a connection holds.
const LENGTHS: [usize; 3] = [3, 500, 200_000];
const HOST: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
const TIMEOUT: Duration = Duration::from_secs(15);
/// After which a stopped process is given up: some of the beats by which processes tell each other that they live.
const SILENCE: Duration = Duration::from_secs(1);

/// What orders of another thread reach.
#[derive(Default)]
struct Reach {
    group: Mutex<Option<Group>>,
    peers: Mutex<Vec<PeerAddress>>,
    rest: AtomicBool,
}

fn say(said: &Said) {
    println!("{MARK}{}", serde_json::to_string(said).unwrap());
}

/// Until the test that started this process ends.
pub(crate) fn live(transport: Transport) {
    let reach = Arc::new(Reach::default());
    let (send, orders) = channel();
    let heeds = Arc::clone(&reach);
    let heed = move || {
        for line in std::io::stdin().lock().lines().map_while(Result::ok) {
            match serde_json::from_str(&line).unwrap() {
                Order::Abort => heeds.group.lock().unwrap().as_ref().unwrap().abort("told to"),
                Order::Cut(rank) => cut(heeds.peers.lock().unwrap()[rank].tcp),
                Order::Rest => heeds.rest.store(true, Ordering::Relaxed),
                order => send.send(order).unwrap(),
            }
        }
        // Nobody is left to speak to.
        std::process::exit(0);
    };
    std::thread::Builder::new().name("orders".into()).spawn(heed).unwrap();
    carry_out(transport, &orders, &reach);
}

fn carry_out(transport: Transport, orders: &Receiver<Order>, reach: &Reach) {
    let mut endpoint = None;
    for order in orders {
        let group = match order {
            Order::Listen => {
                let bound = match transport {
                    Transport::Memory => Endpoint::bind(HOST),
                    Transport::Tcp => Endpoint::tcp(HOST),
                };
                say(&Said::Here(endpoint.insert(bound.unwrap()).address()));
                continue;
            }
            Order::Join { rank, generation, peers } => {
                *reach.peers.lock().unwrap() = peers.clone();
                let (endpoint, secret) = (endpoint.take().unwrap(), Secret::from_bytes([5; 32]));
                Group::connect(GroupConfig { rank, generation, secret, endpoint, peers, timeout: TIMEOUT })
            }
            Order::Rebuild { survivors, generation } => {
                let old = reach.group.lock().unwrap().take().unwrap();
                // Ranks of the last group, which may have been built of others.
                let place = |rank: &Rank| old.members().iter().position(|member| member == rank).unwrap();
                let ranks: Vec<Rank> = survivors.iter().map(|rank| Rank(place(rank) as u32)).collect();
                old.rebuild(&ranks, generation)
            }
            Order::Rest | Order::Abort | Order::Cut(_) => unreachable!("these are heeded at once"),
        };
        match group {
            Ok(group) => {
                let group = group.with_silence(Some(SILENCE));
                *reach.group.lock().unwrap() = Some(group.clone());
                say(&play(&group, &reach.rest));
            }
            Err(error) => say(&Said::Wrong(error.to_string())),
        }
    }
}

/// All-reduces until one fails, or one of the ranks shall rest.
fn play(group: &Group, rest: &AtomicBool) -> Said {
    let (rank, ranks) = (u64::from(group.rank().0), group.world_size() as u64);
    // Most algorithms leave some connections alone, and nobody misses one that nothing goes over; in this, every two ranks speak.
    let pairs = group.clone().with_algorithm(Some(Algorithm::Direct));
    for step in 0u64.. {
        let len = LENGTHS[step as usize % LENGTHS.len()];
        let group = if len == LENGTHS[0] { &pairs } else { group };
        let wish = u64::from(rest.load(Ordering::Relaxed));
        let mut values: Vec<u64> = (0..len as u64).map(|i| (rank + 1) * (i + step)).collect();
        values[0] = wish;
        match group.all_reduce(&mut values, ReduceOp::Sum) {
            Err(error) => return Said::Failed(blame(&error)),
            Ok(()) if step == 0 => say(&Said::Playing),
            Ok(()) => {}
        }
        let all = ranks * (ranks + 1) / 2;
        let wrong = (1..len).find(|&i| values[i] != all * (i as u64 + step));
        if let Some(at) = wrong {
            return Said::Wrong(format!("element {at} of {len} in step {step} is {}", values[at]));
        }
        if values[0] > 0 {
            rest.store(false, Ordering::Relaxed);
            return Said::Resting;
        }
    }
    unreachable!("the steps don't end")
}

fn blame(error: &Error) -> Blame {
    let process = |rank: &Rank| rank.index();
    let mut blame = Blame { lost: None, ended_by: None, silent: None, text: error.to_string() };
    match error {
        Error::PeerLost { peer, .. } => blame.lost = Some(process(peer)),
        Error::Aborted { by, .. } => blame.ended_by = Some(process(by)),
        Error::Silent { peer, .. } => blame.silent = Some(process(peer)),
        _ => {}
    }
    blame
}

/// Cuts the connection that this process made to an address.
fn cut(address: SocketAddr) {
    let open = std::fs::read_dir("/proc/self/fd").unwrap();
    let numbers = open.filter_map(|fd| fd.ok()?.file_name().to_str()?.parse::<i32>().ok());
    for fd in numbers {
        let Ok(peer) = getpeername::<SockaddrStorage>(fd) else { continue };
        let is_it =
            peer.as_sockaddr_in().is_some_and(|peer| SocketAddr::from((peer.ip(), peer.port())) == address);
        if is_it {
            // It may have ended meanwhile.
            let _ = shutdown(fd, Shutdown::Both);
        }
    }
}
