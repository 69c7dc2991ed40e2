//! Nodes that really are apart, as far as one machine has that: network namespaces and cables to a switch, which are cut. Where
//! this process may make none, the tests say that they were skipped.

use super::nodes::{Agent, Site};
use super::user::LOOK;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// The end of the cable, alike in all namespaces of nodes.
const CABLE: &str = "phx0";

/// A namespace for each node and one for the switch, which end with it.
struct Net {
    nodes: Vec<String>,
    switch: String,
}

impl Net {
    /// None, and a word about it, where this process may not make them.
    fn new(count: usize) -> Option<Net> {
        static MADE: AtomicU32 = AtomicU32::new(0);
        let name = format!("phx-run-{}-{}", std::process::id(), MADE.fetch_add(1, Ordering::Relaxed));
        let net = Net {
            nodes: (0..count).map(|node| format!("{name}-{node}")).collect(),
            switch: format!("{name}-switch"),
        };
        let switch = |args: &[&str]| is_done(&[&["-n", &net.switch], args].concat());
        let is_up = is_done(&["netns", "add", &net.switch])
            && switch(&["link", "add", "bridge", "type", "bridge"])
            && switch(&["link", "set", "bridge", "up"])
            && (0..count).all(|node| {
                let (port, inside) = (port(node), ["-n", &net.nodes[node]]);
                let inside = |args: &[&str]| is_done(&[&inside, args].concat());
                is_done(&["netns", "add", &net.nodes[node]])
                    && switch(&[
                        "link",
                        "add",
                        &port,
                        "type",
                        "veth",
                        "peer",
                        CABLE,
                        "netns",
                        &net.nodes[node],
                    ])
                    && switch(&["link", "set", &port, "master", "bridge"])
                    && switch(&["link", "set", &port, "up"])
                    && inside(&["addr", "add", &format!("{}/24", address(node)), "dev", CABLE])
                    && inside(&["link", "set", CABLE, "up"])
                    && inside(&["link", "set", "lo", "up"])
            });
        if is_up {
            return Some(net);
        }
        println!("skipped: no network namespaces can be made here");
        None
    }

    fn cut(&self, node: usize) {
        assert!(is_done(&["-n", &self.switch, "link", "set", &port(node), "down"]));
    }

    fn mend(&self, node: usize) {
        assert!(is_done(&["-n", &self.switch, "link", "set", &port(node), "up"]));
    }

    /// The command of an agent on one of them.
    fn command(&self, site: &Site, node: usize, script: &str) -> Command {
        let name = ["a", "b", "c"][node];
        let agent = site.command(name, &["--rdzv-endpoint", &format!("{}:29400", address(0))]);
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.nodes[node]]).arg(agent.get_program()).args(agent.get_args());
        command.args(["--", "sh", "-c", script]).current_dir(site.folder(name));
        for (name, value) in agent.get_envs() {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        command
    }
}

impl Drop for Net {
    fn drop(&mut self) {
        // One that wasn't made isn't there.
        for name in self.nodes.iter().chain([&self.switch]) {
            is_done(&["netns", "del", name]);
        }
    }
}

fn port(node: usize) -> String {
    format!("port{node}")
}

fn address(node: usize) -> String {
    format!("10.78.0.{}", node + 1)
}

fn is_done(args: &[&str]) -> bool {
    let quiet = Command::new("ip").args(args).stdout(Stdio::null()).stderr(Stdio::null()).status();
    quiet.is_ok_and(|status| status.success())
}

/// Cuts off the second node, whose worker runs on beside the other's for no longer than it takes to know.
fn ends_its_worker(net: &Net, other: &mut Agent, worker: &str) -> Instant {
    let start = Instant::now();
    net.cut(1);
    let line = other.line();
    assert_eq!(line, "0 of 1 at 10.78.0.1", "{}", std::fs::read_to_string(&other.said).unwrap());
    assert!(start.elapsed() < Duration::from_secs(4), "{:?}", start.elapsed());
    other.line();
    while Path::new(&format!("/proc/{worker}")).exists() {
        assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
        std::thread::sleep(LOOK);
    }
    start
}

#[test]
fn a_node_that_is_cut_off_stops_itself_and_the_other_goes_on() {
    let Some(net) = Net::new(2) else { return };
    let site = Site::new(&["--nnodes", "1:2"]);
    let script = "echo $RANK of $WORLD_SIZE at $MASTER_ADDR; echo $$; exec sleep 60";
    let mut a = Agent::of(net.command(&site, 0, script));
    a.waits_for_others();
    let mut b = Agent::of(net.command(&site, 1, script));
    assert_eq!([a.line(), b.line()], ["0 of 2 at 10.78.0.1", "1 of 2 at 10.78.0.1"]);
    let [_, worker] = [a.line(), b.line()];
    // What is mended within seconds costs the run nothing but a start of its workers.
    ends_its_worker(&net, &mut a, &worker);
    net.mend(1);
    assert_eq!([a.line(), b.line()], ["0 of 2 at 10.78.0.1", "1 of 2 at 10.78.0.1"]);
    let [_, worker] = [a.line(), b.line()];
    b.says("joining the run anew");
    let start = ends_its_worker(&net, &mut a, &worker);
    let (code, _, said) = b.end();
    assert!(start.elapsed() < Duration::from_secs(16), "{:?}", start.elapsed());
    assert_eq!(code, 1, "{said}");
    assert!(said.contains("gives no sign of life"), "{said}");
    a.signal("-TERM");
    let (code, _, said) = a.end();
    assert_eq!(code, 143, "{said}");
    assert!(said.contains("lost: gave no sign of life for 2.0 s"), "{said}");
}

#[test]
fn a_coordinator_that_is_cut_off_stops_itself_and_the_others_go_on_under_another() {
    let Some(net) = Net::new(3) else { return };
    let site = Site::new(&["--nnodes", "1:3"]);
    let script = "echo $RANK of $WORLD_SIZE at $MASTER_ADDR; exec sleep 60";
    let start = |node| Agent::of(net.command(&site, node, script));
    let mut a = start(0);
    a.waits_for_others();
    let mut b = start(1);
    a.says("nodes here: 2 of");
    let mut c = start(2);
    let begun = ["0 of 3 at 10.78.0.1", "1 of 3 at 10.78.0.1", "2 of 3 at 10.78.0.1"];
    assert_eq!([a.line(), b.line(), c.line()], begun);
    let start = Instant::now();
    net.cut(0);
    let (code, _, said) = a.end();
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
    assert!(code == 1 && said.contains("error: only 1 of 3 nodes are left"), "{said}");
    let mut lines = [b.line(), c.line()];
    assert!(start.elapsed() < Duration::from_secs(8), "{:?}", start.elapsed());
    lines.sort();
    assert_eq!(lines.each_ref().map(|line| &line[..6]), ["0 of 2", "1 of 2"]);
    for (agent, words) in [(c, "another node leads the run on"), (b, "this node leads the run on")] {
        agent.signal("-TERM");
        let (code, _, said) = agent.end();
        assert!(code == 143 && said.contains(words), "{code}: {said}");
    }
}
