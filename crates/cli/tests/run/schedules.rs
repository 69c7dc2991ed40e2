//! Schedules of what happens to the hosts of a run, as Horovod's tests of elastic training have them: a table says which hosts
//! come, go and are lost, and whose workers die, once training has got on; a real run of real agents goes through it, and must
//! end with every step made once, every sample of an epoch used once and the bits of a run that was left alone.
//!
//! Horovod leaves a host on which workers fail out for a while, or for good. There is no such list here: what bounds the
//! failures is `--max-restarts`, for the whole run, and the cause of the last one is told.

use super::nodes::{Agent, kill};
use super::training::Training;
use Act::{AllDie, Comes, Dies, Hosts, Lost};
use Told::{Ranks, Resumed, Saved};
use serde_json::Value;
use std::collections::BTreeMap;

/// What happens at once.
enum Act {
    /// The hosts become these: new ones are started, and then those that are not among them are asked to leave.
    Hosts(&'static [&'static str]),
    /// This host comes, and is given a rank; whether it takes part already isn't known.
    Comes(&'static str),
    /// The agent of a host is killed, and its worker with it.
    Lost(&'static str),
    /// The worker of a host dies.
    Dies(&'static str),
    /// The workers of all hosts die, and none sees the end of another.
    AllDie,
}

/// What is told of it.
enum Told {
    /// So many ranks go on.
    Ranks(usize),
    /// They take a checkpoint.
    Saved(usize),
    /// The newest checkpoint is gone on with, by so many ranks.
    Resumed(usize),
}

/// What happens, and what is told then, in this order: a worker in the place of one that dies may come before the others have
/// gone on without it.
type Row = (&'static [Act], &'static [Told]);

/// How often a step is told before the next row: every tenth is.
const STEPS: usize = 3;
/// Those that are enough don't wait long for others.
const SOON: &str = "last_call_timeout=0.2";
const TRAINING: &str = "--epochs 1000 --set train.checkpoint_every=50";

/// A run on its way through a schedule.
struct Play {
    run: Training,
    hosts: BTreeMap<&'static str, Agent>,
}

impl Play {
    /// Nobody is there yet; hosts have these flags.
    fn new(flags: &[&str]) -> Play {
        Play { run: Training::new(flags, TRAINING), hosts: BTreeMap::new() }
    }

    /// Goes through the rows.
    fn through(&mut self, rows: &[Row]) {
        for (acts, told) in rows {
            let before = self.workers();
            acts.iter().for_each(|act| self.act(act));
            let ranks = told.iter().map(|told| self.until(told)).last().unwrap_or_default();
            let is_step = |event: &Value| event["event"] == "step" && event["world_size"] == ranks;
            (0..STEPS).for_each(|_| drop(self.run.until(is_step)));
            let all_began_anew = told.iter().any(|told| matches!(told, Resumed(_)));
            let after = self.workers();
            for (host, worker) in before.iter().filter(|_| !all_began_anew) {
                let is_hurt = acts.iter().any(|act| matches!(act, Dies(hurt) if hurt == host));
                let is_other = after.get(host).is_some_and(|after| after != worker);
                assert_eq!(is_other, is_hurt, "the worker of {host} before {before:?} and after {after:?}");
            }
        }
    }

    /// The worker of each host.
    fn workers(&self) -> BTreeMap<&'static str, Option<i32>> {
        self.hosts.keys().map(|host| (*host, self.run.newest_worker(host))).collect()
    }

    /// Reads on to what is to be told, and gives how many ranks there are.
    fn until(&mut self, told: &Told) -> usize {
        let (kind, ranks) = match *told {
            Ranks(ranks) => {
                self.run.until_members(ranks);
                return ranks;
            }
            Saved(ranks) => ("checkpoint", ranks),
            Resumed(ranks) => ("resume", ranks),
        };
        self.run.until(|event| event["event"] == kind);
        ranks
    }

    /// All hosts end by themselves, with this code; gives what each of them said.
    fn all_end(&mut self, code: i32) -> Vec<String> {
        let end = |(_, host): (_, Agent)| {
            let (got, _, said) = host.end();
            assert_eq!(got, code, "{said}");
            said
        };
        std::mem::take(&mut self.hosts).into_iter().map(end).collect()
    }

    /// Asks all hosts to end and checks what has come of the run; gives what the first host said.
    fn end(mut self) -> String {
        self.hosts.values().for_each(|host| host.signal("-TERM"));
        let said = self.all_end(143).swap_remove(0);
        self.run.goes_on_to_the_same_bits();
        said
    }

    fn act(&mut self, act: &Act) {
        match act {
            Act::Hosts(hosts) => self.become_hosts(hosts),
            Act::Comes(host) => {
                let agent = self.run.node(host);
                self.hosts.insert(host, agent);
                self.run.wait_for(|run| run.newest_worker(host).is_some(), "a worker of it");
            }
            Act::Lost(host) => {
                let agent = self.hosts.remove(host).expect("it is there");
                agent.signal("-KILL");
            }
            Act::Dies(host) => {
                let worker = self.run.newest_worker(host).expect("it has a worker");
                kill("-KILL", &worker.to_string());
            }
            Act::AllDie => {
                let workers = self.hosts.keys().filter_map(|host| self.run.newest_worker(host));
                let workers: Vec<String> = workers.map(|worker| worker.to_string()).collect();
                for signal in ["-STOP", "-KILL"] {
                    workers.iter().for_each(|worker| kill(signal, worker));
                }
            }
        }
    }

    fn become_hosts(&mut self, hosts: &[&'static str]) {
        for name in hosts {
            if !self.hosts.contains_key(name) {
                let host = self.run.node(name);
                if self.hosts.is_empty() {
                    host.waits_for_others();
                }
                self.hosts.insert(name, host);
            }
        }
        let goes = |name: &&str| !hosts.contains(name);
        for name in self.hosts.keys().copied().filter(goes).collect::<Vec<_>>() {
            let host = self.hosts.remove(name).expect("it is there");
            host.signal("-TERM");
            let (code, _, said) = host.end();
            assert_eq!(code, 143, "{said}");
        }
    }
}

#[test]
fn hosts_come_and_go_and_workers_die_and_the_others_go_on() {
    let mut play = Play::new(&["--nnodes", "1:3", "--max-restarts", "9", "--rdzv-conf", SOON]);
    play.through(&[
        (&[Hosts(&["a"])], &[Ranks(1)]),
        (&[Hosts(&["a", "b"])], &[Ranks(2)]),
        (&[Hosts(&["a", "b", "c"])], &[Ranks(3)]),
        (&[Dies("b")], &[Ranks(3), Saved(3)]),
        (&[AllDie], &[Resumed(3)]),
        (&[Hosts(&["a", "b"])], &[Ranks(2)]),
        // One comes while the loss of another is being handled: in Horovod's issue 2652 it waits for ever.
        (&[Dies("b"), Hosts(&["a", "b", "d"])], &[Ranks(3)]),
        (&[Lost("b"), Hosts(&["a", "d", "e"])], &[Ranks(3)]),
    ]);
    let said = play.end();
    assert!(!said.contains("starting all workers"), "{said}");
}

/// In Horovod's issue 3494 those that are left take the state that they have, and those that come wait for it for ever.
#[test]
fn losses_down_to_the_least_number_and_below_wait_for_another_host_and_for_nothing_else() {
    let mut play = Play::new(&["--nnodes", "2:3", "--max-restarts", "9", "--rdzv-conf", SOON]);
    play.through(&[
        (&[Hosts(&["a", "b"])], &[Ranks(2), Saved(2)]),
        (&[Lost("b"), Hosts(&["a", "c"])], &[Resumed(2)]),
        (&[Hosts(&["a", "c", "d"])], &[Ranks(3)]),
        (&[Hosts(&["a", "d"])], &[Ranks(2)]),
        // One leaves while another comes for it.
        (&[Comes("e"), Hosts(&["a", "e"])], &[Ranks(2), Saved(2)]),
        (&[Dies("a"), Lost("e"), Hosts(&["a", "f"])], &[Resumed(2), Saved(2)]),
    ]);
    // One leaves too few behind, and another comes for it when it has gone.
    play.act(&Hosts(&["a"]));
    play.through(&[(&[Hosts(&["a", "g"])], &[Resumed(2)])]);
    play.end();
}

#[test]
fn too_many_failures_and_too_few_hosts_end_the_run_with_the_cause() {
    let dies: Row = (&[Dies("b")], &[Ranks(2)]);
    let mut play = Play::new(&["--nnodes", "2", "--max-restarts", "2"]);
    play.through(&[(&[Hosts(&["a", "b"])], &[Ranks(2)]), dies, dies]);
    play.act(&Dies("b"));
    for said in play.all_end(1) {
        let words =
            ["restarts: 2; what went wrong each time:", "error: rank 1 (pid ", "was killed by SIGKILL"];
        assert!(words.iter().all(|words| said.contains(words)), "{said}");
        assert!(said.contains("not started again: "), "{said}");
        // Who is left doesn't wait for who is lost.
        assert!(!said.contains("still running after the grace period"), "{said}");
    }
    play.run.has_kept_its_last_step();
    let mut play = Play::new(&[
        "--nnodes",
        "2:3",
        "--max-restarts",
        "2",
        "--rdzv-conf",
        "join_timeout=0.5,last_call_timeout=0.2",
    ]);
    play.through(&[(&[Hosts(&["a", "b"])], &[Ranks(2)])]);
    play.act(&Lost("b"));
    let said = play.all_end(1).swap_remove(0);
    let words =
        ["its agent's connection ended", "nodes here: 1 of 2 to 3", "error: too few nodes: 1, after 0 s"];
    assert!(words.iter().all(|words| said.contains(words)), "{said}");
    assert!(!said.contains("still running after the grace period"), "{said}");
    play.run.has_kept_its_last_step();
}
