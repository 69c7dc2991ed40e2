//! Ranks on two hosts, as far as one machine has that: two network namespaces and a cable, which is cut, or slow. Where this
//! process may make none, the tests say that they were skipped.

use crate::processes::{Processes, connect, own_rank, say};
use crate::ranks::LIMIT;
use phalanx_comm::{Deadline, Endpoint, Rank, ReduceOp};
use std::io::Write;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// The ends of the cable, alike in all namespaces.
const CABLE: &str = "phx0";
const ADDRESSES: [&str; 2] = ["10.77.0.1", "10.77.0.2"];

/// Two namespaces, which end with it.
struct Net {
    names: [String; 2],
}

impl Net {
    /// None, and a word about it, where this process may not make them.
    fn new(test: &str) -> Option<Net> {
        let names = ["a", "b"].map(|side| format!("phx-{}-{test}-{side}", std::process::id()));
        let net = Net { names };
        let made = net.names.iter().all(|name| is_done("ip", &["netns", "add", name]));
        let [a, b] = net.names();
        let wire = ["link", "add", CABLE, "netns", a, "type", "veth", "peer", "name", CABLE, "netns", b];
        let is_up = |(name, address): (&String, &str)| {
            let address = format!("{address}/24");
            is_done("ip", &["-n", name, "addr", "add", &address, "dev", CABLE])
                && is_done("ip", &["-n", name, "link", "set", CABLE, "up"])
        };
        if made && is_done("ip", &wire) && net.names.iter().zip(ADDRESSES).all(is_up) {
            return Some(net);
        }
        // Past the harness, which keeps what tests print.
        let text = format!("{test}: SKIPPED, since no network namespaces can be made here\n");
        std::io::stderr().write_all(text.as_bytes()).unwrap();
        None
    }

    fn names(&self) -> [&str; 2] {
        [&self.names[0], &self.names[1]]
    }

    fn ranks(&self, test: &str) -> Processes {
        let [a, b] = self.names();
        Processes::start_in(test, &[(a, ADDRESSES[0]), (b, ADDRESSES[1])])
    }

    /// Pulls the cable out of one side.
    fn cut(&self) {
        assert!(is_done("ip", &["-n", self.names()[1], "link", "set", CABLE, "down"]));
    }
}

impl Drop for Net {
    fn drop(&mut self) {
        // One that wasn't made isn't there.
        for name in &self.names {
            is_done("ip", &["netns", "del", name]);
        }
    }
}

fn is_done(program: &str, args: &[&str]) -> bool {
    let quiet = Command::new(program).args(args).stdout(Stdio::null()).stderr(Stdio::null()).status();
    quiet.is_ok_and(|status| status.success())
}

#[test]
fn a_rank_that_is_cut_off_is_told_from_a_stopped_one() {
    let test = "network::a_rank_that_is_cut_off_is_told_from_a_stopped_one";
    if let Some(rank) = own_rank() {
        let group = connect(rank, Endpoint::tcp).unwrap();
        let mut values = vec![1f32; 1000];
        group.all_reduce(&mut values, ReduceOp::Max).unwrap();
        say("works");
        let error = (0u64..).find_map(|_| group.all_reduce(&mut values, ReduceOp::Max).err()).unwrap();
        return say(&error.to_string());
    }
    let Some(net) = Net::new("cut") else { return };
    let ranks = net.ranks(test);
    (0..2).for_each(|rank| assert_eq!(ranks.line(rank), "works"));
    let start = Instant::now();
    net.cut();
    for rank in 0..2 {
        let (said, other) = (ranks.line(rank), 1 - rank);
        let want = format!("rank {other} is silent: it can't be reached: ");
        assert!(said.contains(&want) && said.contains("s without an acknowledgement"), "{said}");
    }
    let took = start.elapsed();
    assert!(Duration::from_secs(2) < took && took < Duration::from_secs(6), "{took:?}");
}

#[test]
fn a_group_that_is_dropped_does_not_wait_for_a_rank_that_is_cut_off() {
    let test = "network::a_group_that_is_dropped_does_not_wait_for_a_rank_that_is_cut_off";
    if let Some(rank) = own_rank() {
        let group = connect(rank, Endpoint::tcp).unwrap();
        group.barrier().unwrap();
        say("works");
        let (carrier, soon) = (format!("/sys/class/net/{CABLE}/carrier"), Deadline::after(LIMIT));
        // A side that is down itself can't be read.
        while std::fs::read_to_string(&carrier).is_ok_and(|text| text.trim() == "1") {
            assert!(!soon.expired(), "the cable stays where it is");
            std::thread::yield_now();
        }
        // The kernel takes it, and can't be rid of it.
        let sent = group.start_send(vec![7u8; 1000], Rank(1 - rank.0), 0);
        sent.wait(Deadline::after(LIMIT)).unwrap();
        let start = Instant::now();
        drop(group);
        return say(&start.elapsed().as_millis().to_string());
    }
    let Some(net) = Net::new("drop") else { return };
    let ranks = net.ranks(test);
    (0..2).for_each(|rank| assert_eq!(ranks.line(rank), "works"));
    net.cut();
    for rank in 0..2 {
        let took: u64 = ranks.line(rank).parse().unwrap();
        assert!((1900..6000).contains(&took), "rank {rank} waited for {took} ms");
    }
}

#[test]
fn a_slow_link_is_no_error_until_the_deadline_and_then_told_with_its_pace() {
    let test = "network::a_slow_link_is_no_error_until_the_deadline_and_then_told_with_its_pace";
    if let Some(rank) = own_rank() {
        let group = connect(rank, Endpoint::tcp).unwrap();
        // Longer than a rank may be silent.
        let mut values = vec![1f32; 100_000];
        let start = Instant::now();
        group.all_reduce(&mut values, ReduceOp::Sum).unwrap();
        let took = start.elapsed();
        let work = group.start_all_reduce(vec![1f32; 4 << 20], ReduceOp::Sum);
        let error = work.wait(Deadline::after(Duration::from_secs(5))).unwrap_err();
        say(&format!("{} {error}", took.as_millis()));
        // On a busy machine the other comes to its deadline later, and isn't to see this one's end before.
        std::thread::sleep(Duration::from_secs(3));
        drop(group);
        return;
    }
    let Some(net) = Net::new("slow") else { return };
    for name in net.names() {
        let rate = [
            "-n", name, "qdisc", "add", "dev", CABLE, "root", "tbf", "rate", "1mbit", "burst", "32kb",
            "latency", "400ms",
        ];
        assert!(is_done("tc", &rate));
    }
    let ranks = net.ranks(test);
    for rank in 0..2 {
        let said = ranks.line(rank);
        let (took, error) = said.split_once(' ').unwrap();
        assert!(took.parse::<u64>().unwrap() > 2500, "400 kB at 1 Mbit/s: {took} ms");
        if let Some((_, pace)) = error.split_once("and is slow: ") {
            let rate: f64 = pace.split(' ').next().unwrap().parse().unwrap();
            // Both directions together.
            assert!((0.5..3.0).contains(&rate) && pace.contains(" of 16.0 MiB moved"), "{said}");
        } else {
            // The other gave up first, and its word came.
            let other = 1 - rank;
            assert!(error.contains(&format!("rank {other} ended the group")), "{said}");
        }
    }
}
