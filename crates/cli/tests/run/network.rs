//! Nodes that really are apart, as far as one machine has that: two network namespaces and a cable, which is cut. Where this
//! process may make none, the test says that it was skipped.

use super::nodes::{Agent, Site};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// The ends of the cable, alike in both namespaces.
const CABLE: &str = "phx0";
const ADDRESSES: [&str; 2] = ["10.78.0.1", "10.78.0.2"];

/// Two namespaces, which end with it.
struct Net([String; 2]);

impl Net {
    /// None, and a word about it, where this process may not make them.
    fn new() -> Option<Net> {
        let net = Net(["a", "b"].map(|side| format!("phx-run-{}-{side}", std::process::id())));
        let [a, b] = &net.0;
        let made = net.0.iter().all(|name| is_done(&["netns", "add", name]));
        let wire = ["link", "add", CABLE, "netns", a, "type", "veth", "peer", "name", CABLE, "netns", b];
        let is_up = |(name, address): (&String, &str)| {
            is_done(&["-n", name, "addr", "add", &format!("{address}/24"), "dev", CABLE])
                && is_done(&["-n", name, "link", "set", CABLE, "up"])
                && is_done(&["-n", name, "link", "set", "lo", "up"])
        };
        if made && is_done(&wire) && net.0.iter().zip(ADDRESSES).all(is_up) {
            return Some(net);
        }
        println!("skipped: no network namespaces can be made here");
        None
    }

    /// The command of an agent on one of the two.
    fn command(&self, site: &Site, side: usize, script: &str) -> Command {
        let name = ["a", "b"][side];
        let agent = site.command(name, &["--rdzv-endpoint", &format!("{}:29400", ADDRESSES[0])]);
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.0[side]]).arg(agent.get_program()).args(agent.get_args());
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
        for name in &self.0 {
            is_done(&["netns", "del", name]);
        }
    }
}

fn is_done(args: &[&str]) -> bool {
    let quiet = Command::new("ip").args(args).stdout(Stdio::null()).stderr(Stdio::null()).status();
    quiet.is_ok_and(|status| status.success())
}

#[test]
fn a_node_that_is_cut_off_stops_itself_and_the_other_goes_on() {
    let Some(net) = Net::new() else { return };
    let site = Site::new(&["--nnodes", "1:2"]);
    let script = "echo $RANK of $WORLD_SIZE at $MASTER_ADDR; exec sleep 60";
    let mut a = Agent::of(net.command(&site, 0, script));
    a.waits_for_others();
    let mut b = Agent::of(net.command(&site, 1, script));
    assert_eq!([a.line(), b.line()], ["0 of 2 at 10.78.0.1", "1 of 2 at 10.78.0.1"]);
    let start = Instant::now();
    assert!(is_done(&["-n", &net.0[1], "link", "set", CABLE, "down"]));
    assert_eq!(a.line(), "0 of 1 at 10.78.0.1");
    assert!(start.elapsed() < Duration::from_secs(4), "{:?}", start.elapsed());
    let (code, _, said) = b.end();
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
    assert_eq!(code, 1, "{said}");
    assert!(said.contains("gives no sign of life"), "{said}");
    a.signal("-TERM");
    let (code, _, said) = a.end();
    assert_eq!(code, 143, "{said}");
    assert!(said.contains("lost: gave no sign of life for 2.0 s"), "{said}");
}
