//! Ranks that are processes: this very test program, started again in the test that starts them.

use crate::ranks::{Bind, HOST, LIMIT};
use phalanx_comm::{Error, Generation, Group, GroupConfig, PeerAddress, Rank, Secret};
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};

/// Where a rank finds its number, in the environment.
const RANK: &str = "PHALANX_TEST_RANK";
/// The address that a rank binds, in the environment, if it isn't the one of this host.
const IP: &str = "PHALANX_TEST_IP";
/// What a line of a rank begins with, among those of the test's own harness.
const MARK: &str = "@ ";

/// The ranks, as the test that started them sees them. They end with it.
pub(crate) struct Processes {
    children: Vec<Child>,
    lines: Vec<Receiver<String>>,
}

/// Which rank this process is, if it is one.
pub(crate) fn own_rank() -> Option<Rank> {
    std::env::var(RANK).ok().map(|rank| Rank(rank.parse().unwrap()))
}

/// A line for whoever started this rank.
pub(crate) fn say(line: &str) {
    let line = format!("\n{MARK}{}\n", line.replace('\n', " "));
    std::io::stdout().write_all(line.as_bytes()).unwrap();
}

/// Connects this rank to the others.
pub(crate) fn connect(rank: Rank, bind: Bind) -> Result<Group, Error> {
    let endpoint = bind(std::env::var(IP).map_or(HOST, |ip| ip.parse().unwrap())).unwrap();
    say(&serde_json::to_string(&endpoint.address()).unwrap());
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
    let peers: Vec<PeerAddress> = serde_json::from_str(&line).unwrap();
    let (generation, secret) = (Generation(1), Secret::from_bytes([7; 32]));
    Group::connect(GroupConfig { rank, generation, secret, endpoint, peers, timeout: LIMIT })
}

impl Processes {
    /// `n` ranks in the test of this name, introduced to each other.
    pub(crate) fn start(test: &str, n: usize, variables: &[(&str, &str)]) -> Processes {
        let program = std::env::current_exe().unwrap();
        Processes::start_by(test, (0..n).map(|_| Command::new(&program)).collect(), variables)
    }

    /// A rank in each of these network namespaces, where it has that address.
    pub(crate) fn start_in(test: &str, places: &[(&str, &str)]) -> Processes {
        let program = std::env::current_exe().unwrap();
        let inside = |&(namespace, ip): &(&str, &str)| {
            let mut command = Command::new("ip");
            command.args(["netns", "exec", namespace]).arg(&program).env(IP, ip);
            command
        };
        Processes::start_by(test, places.iter().map(inside).collect(), &[])
    }

    fn start_by(test: &str, commands: Vec<Command>, variables: &[(&str, &str)]) -> Processes {
        let (mut children, mut lines) = (Vec::new(), Vec::new());
        for (rank, mut command) in commands.into_iter().enumerate() {
            command.args(["--exact", test, "--nocapture"]).env(RANK, rank.to_string());
            command.envs(variables.iter().copied()).stdin(Stdio::piped()).stdout(Stdio::piped());
            let mut child = command.spawn().unwrap();
            let out = BufReader::new(child.stdout.take().unwrap());
            let (sender, receiver) = channel();
            std::thread::spawn(move || {
                let marked =
                    out.lines().map_while(Result::ok).filter_map(|l| Some(l.strip_prefix(MARK)?.to_owned()));
                marked.take_while(|line| sender.send(line.clone()).is_ok()).for_each(drop);
            });
            children.push(child);
            lines.push(receiver);
        }
        let mut ranks = Processes { children, lines };
        let addresses: Vec<String> = (0..ranks.children.len()).map(|rank| ranks.line(rank)).collect();
        let all = format!("[{}]\n", addresses.join(","));
        ranks
            .children
            .iter_mut()
            .for_each(|child| child.stdin.take().unwrap().write_all(all.as_bytes()).unwrap());
        ranks
    }

    /// The next line of a rank.
    pub(crate) fn line(&self, rank: usize) -> String {
        self.lines[rank]
            .recv_timeout(LIMIT)
            .unwrap_or_else(|error| panic!("rank {rank} says nothing: {error}"))
    }

    /// Sends a signal to a rank, by its name.
    pub(crate) fn signal(&self, rank: usize, name: &str) {
        let pid = self.children[rank].id().to_string();
        assert!(Command::new("kill").args(["-s", name, &pid]).status().unwrap().success());
    }
}

impl Drop for Processes {
    fn drop(&mut self) {
        for child in &mut self.children {
            // One that has ended already needs no end.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
