//! Runs of several nodes: agents on this host, which meet over 127.0.0.1, or in network namespaces of their own.

use super::user::{LOOK, phalanx};
use phalanx::Worker;
use phalanx::comm::ReduceOp;
use std::collections::BTreeMap;
use std::fs;
use std::io::{self, BufRead, BufReader, Read};
use std::net::TcpListener;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

const LIMIT: Duration = Duration::from_secs(180);

/// Nodes of one run, each with a folder of its own.
pub(crate) struct Site {
    folder: TempDir,
    endpoint: String,
    flags: Vec<String>,
}

impl Site {
    /// With these flags on all nodes.
    pub(crate) fn new(flags: &[&str]) -> Site {
        let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let flags = flags.iter().map(|&flag| flag.to_owned()).collect();
        Site { folder: tempfile::tempdir().unwrap(), endpoint: format!("127.0.0.1:{free}"), flags }
    }

    pub(crate) fn folder(&self, name: &str) -> PathBuf {
        let folder = self.folder.path().join(name);
        fs::create_dir_all(&folder).unwrap();
        folder
    }

    /// What the agent of this name has written where it was told `--exit-code-to code`.
    fn exit_code(&self, name: &str) -> io::Result<String> {
        fs::read_to_string(self.folder(name).join("code"))
    }

    /// The command of the agent of this name, up to its program; `flags` go before those of all nodes.
    pub(crate) fn command(&self, name: &str, flags: &[&str]) -> Command {
        let mut command = phalanx(&self.folder(name));
        command.env_remove("PHALANX_SECRET_FILE").env("XDG_CONFIG_HOME", self.folder("config"));
        command.env("SITE", self.folder.path()).args(["run", "--out", "out", "--no-prefix"]).args(flags);
        let usual = ["--rdzv-endpoint", &self.endpoint, "--rdzv-id", "test"].map(str::to_owned);
        for pair in usual.chunks(2).chain(self.flags.chunks(2)) {
            if !flags.contains(&pair[0].as_str()) {
                command.args(pair);
            }
        }
        command
    }

    fn start(&self, name: &str, flags: &[&str], script: &str) -> Agent {
        let mut command = self.command(name, flags);
        command.args(["--", "sh", "-c", script]);
        Agent::of(command)
    }

    /// Two agents with a worker each.
    fn two(&self, script: &str) -> [Agent; 2] {
        self.two_of(|name| self.start(name, &[], script))
    }

    /// Two agents whose workers are this test, as which they know themselves by `PHALANX_TEST`.
    pub(crate) fn two_of_test(&self, body: &str) -> [Agent; 2] {
        self.two_of(|name| {
            let mut command = self.command(name, &[]);
            command.env("PHALANX_TEST", body).env("RUST_BACKTRACE", "0").arg("--");
            command.arg(std::env::current_exe().unwrap()).args(["--exact", body, "--nocapture"]);
            Agent::of(command)
        })
    }

    fn two_of(&self, start: impl Fn(&str) -> Agent) -> [Agent; 2] {
        // The first one is to have rank 0.
        let first = start("a");
        first.waits_for_others();
        [first, start("b")]
    }
}

/// An agent that runs.
pub(crate) struct Agent {
    process: Child,
    out: BufReader<ChildStdout>,
    /// Where what it says to people is kept while it runs.
    pub(crate) said: PathBuf,
    _folder: TempDir,
}

impl Agent {
    pub(crate) fn of(mut command: Command) -> Agent {
        let folder = tempfile::tempdir().unwrap();
        let said = folder.path().join("said");
        command.stdout(Stdio::piped()).stderr(fs::File::create(&said).unwrap()).process_group(0);
        let mut process = command.spawn().unwrap();
        Agent { out: BufReader::new(process.stdout.take().unwrap()), process, said, _folder: folder }
    }

    fn said(&self) -> String {
        fs::read_to_string(&self.said).unwrap()
    }

    /// Waits until it has said this.
    pub(crate) fn says(&self, words: &str) {
        let start = Instant::now();
        while !self.said().contains(words) {
            assert!(start.elapsed() < LIMIT, "{words:?} in {}", self.said());
            std::thread::sleep(LOOK);
        }
    }

    pub(crate) fn waits_for_others(&self) {
        self.says("nodes here: 1 of");
    }

    pub(crate) fn line(&mut self) -> String {
        let mut line = String::new();
        self.out.read_line(&mut line).unwrap();
        line.trim_end().to_owned()
    }

    pub(crate) fn signal(&self, signal: &str) {
        kill(signal, &self.process.id().to_string());
    }

    /// Waits for its end; gives its exit code, what its workers wrote, and what it said.
    pub(crate) fn end(mut self) -> (i32, String, String) {
        let start = Instant::now();
        let status = loop {
            if let Some(status) = self.process.try_wait().unwrap() {
                break status;
            }
            assert!(start.elapsed() < LIMIT, "the run doesn't end: {}", self.said());
            std::thread::sleep(LOOK);
        };
        let mut out = String::new();
        self.out.read_to_string(&mut out).unwrap();
        (status.code().unwrap_or(-1), out, self.said())
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        // One that has ended is beyond it.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

pub(crate) fn kill(signal: &str, pid: &str) {
    assert!(Command::new("kill").args([signal, "--", pid]).status().unwrap().success());
}

/// A node's environment, as its workers told it, by rank.
fn told(out: &str) -> BTreeMap<String, BTreeMap<String, String>> {
    let worker = |line: &str| {
        let words = line.split_whitespace().filter_map(|word| word.split_once('='));
        let words: BTreeMap<String, String> =
            words.map(|(name, value)| (name.to_owned(), value.to_owned())).collect();
        (words["RANK"].clone(), words)
    };
    out.lines().map(worker).collect()
}

#[test]
fn workers_that_want_to_be_started_later_say_so_on_every_node() {
    let site = Site::new(&["--nnodes", "2", "--max-restarts", "3"]);
    for node in site.two("exit 75") {
        let (code, _, said) = node.end();
        assert!(code == 75 && !said.contains("error"), "{code}: {said}");
    }
    // A failure beside is told.
    let script = "test $RANK = 0 && { echo $$ > $SITE/pid; mv $SITE/pid $SITE/drains; exit 75; }; \
                  until test -e $SITE/drains; do sleep 0.01; done; \
                  while kill -0 $(cat $SITE/drains) 2> kill; do sleep 0.01; done; exit 4";
    let site = Site::new(&["--nnodes", "2", "--max-restarts", "3"]);
    for node in site.two(script) {
        let (code, _, said) = node.end();
        let told =
            said.contains("what went wrong:\n  0: rank 1 (pid ") && said.contains("exited with code 4");
        assert!(code == 75 && told && !said.contains("starting all workers again"), "{code}: {said}");
    }
}

#[test]
fn workers_that_make_room_because_another_has_failed_are_started_again_with_it() {
    let script = "test $TORCHELASTIC_RESTART_COUNT = 1 && exit 0; test $RANK = 0 && { trap 'exit 75' TERM; \
                  touch $SITE/waits; sleep 60 & wait; }; until test -e $SITE/waits; do sleep 0.01; done; exit 3";
    let site = Site::new(&["--nnodes", "2", "--max-restarts", "1"]);
    for node in site.two(script) {
        let (code, _, said) = node.end();
        assert!(code == 0 && said.contains("exited with code 3"), "{code}: {said}");
    }
}

#[test]
fn workers_of_two_nodes_that_are_asked_to_end_get_one_signal() {
    let site = Site::new(&["--nnodes", "2"]);
    let script = "trap 'echo asked >> $SITE/asked.$RANK' TERM; echo $RANK; until test -e $SITE/go; do sleep 0.05; done";
    let [mut first, mut second] = site.two(script);
    assert_eq!([first.line(), second.line()], ["0", "1"]);
    first.signal("-TERM");
    second.says("stopping the workers of this node");
    second.signal("-TERM");
    second.says("SIGTERM: the workers have had it");
    fs::write(site.folder.path().join("go"), "").unwrap();
    for (rank, node) in [first, second].into_iter().enumerate() {
        assert_eq!(node.end().0, 143);
        let asked = fs::read_to_string(site.folder.path().join(format!("asked.{rank}"))).unwrap();
        assert_eq!(asked, "asked\n", "of rank {rank}");
    }
}

#[test]
fn nodes_meet_over_tls_which_their_workers_are_told_of() {
    let site = Site::new(&["--nnodes", "2", "--tls"]);
    for mut agent in site.two("echo tls $PHALANX_TLS") {
        assert_eq!(agent.line(), "tls 1");
        let (code, _, said) = agent.end();
        assert_eq!(code, 0, "{said}");
    }
}

#[test]
fn all_ranks_get_torchruns_environment_whatever_each_node_starts() {
    let site = Site::new(&["--nnodes", "2"]);
    let script =
        "env | grep -E '^(RANK|WORLD_SIZE|LOCAL_|GROUP_|ROLE_|MASTER_|TORCHELASTIC_R)' | tr '\\n' ' '; echo";
    let first = site.start("a", &["--nproc-per-node", "3"], script);
    first.waits_for_others();
    let second = site.start("b", &["--nproc-per-node", "2"], script);
    let ends = [first.end(), second.end()];
    let mut master = None;
    for (node, (first_rank, (code, out, said))) in [0, 3].into_iter().zip(ends).enumerate() {
        assert_eq!(code, 0, "{said}");
        let told = told(&out);
        let workers = [3, 2][node];
        assert_eq!(told.len(), workers);
        for (local, rank) in (first_rank..).take(workers).enumerate() {
            let worker = &told[&rank.to_string()];
            let want = [
                ("WORLD_SIZE", "5".to_owned()),
                ("LOCAL_RANK", local.to_string()),
                ("LOCAL_WORLD_SIZE", workers.to_string()),
                ("GROUP_RANK", node.to_string()),
                ("GROUP_WORLD_SIZE", "2".into()),
                ("ROLE_RANK", rank.to_string()),
                ("ROLE_WORLD_SIZE", "5".into()),
                ("TORCHELASTIC_RUN_ID", "test".into()),
                ("TORCHELASTIC_RESTART_COUNT", "0".into()),
                ("MASTER_ADDR", "127.0.0.1".into()),
            ];
            for (name, value) in want {
                assert_eq!(worker[name], value, "{name} of rank {rank}");
            }
            assert_eq!(*master.get_or_insert(worker["MASTER_PORT"].clone()), worker["MASTER_PORT"]);
            let name = ["a", "b"][node];
            assert!(site.folder(name).join(format!("out/logs/0/{rank}.out")).exists());
        }
    }
    assert!(master.unwrap().parse::<u16>().unwrap() > 0);
}

#[test]
fn a_failure_on_one_node_starts_all_workers_again_and_is_told_on_both() {
    let site = Site::new(&["--nnodes", "2", "--max-restarts", "1"]);
    // It fails when the other has said what it says: one that is stopped before that says nothing.
    let met = site.folder("met").display().to_string();
    let script = format!(
        "echo $TORCHELASTIC_RESTART_COUNT $GROUP_RANK; mkdir -p {met}/$TORCHELASTIC_RESTART_COUNT-$GROUP_RANK; \
         test $GROUP_RANK = 0 && exec sleep 60; \
         until test -d {met}/$TORCHELASTIC_RESTART_COUNT-0; do sleep 0.01; done; \
         echo the reason >&2; exit $((7 + TORCHELASTIC_RESTART_COUNT))"
    );
    let [a, b] = site.two(&script);
    for (node, agent) in [a, b].into_iter().enumerate() {
        let (code, out, said) = agent.end();
        assert_eq!(code, 1, "{said}");
        assert_eq!(out, format!("0 {node}\n1 {node}\n"), "{said}");
        let at = |words: &str| said.rfind(words).unwrap_or_else(|| panic!("{words} in {said}"));
        let order = [
            "restarts: 1; what went wrong each time:",
            "  0: rank 1 (pid ",
            "exited with code 7",
            "error: rank 1 (pid ",
            "exited with code 8",
            "    the reason",
            "all restarts of --max-restarts 1 are used",
        ];
        assert!(order.windows(2).all(|pair| at(pair[0]) < at(pair[1])), "{said}");
        assert!(said.contains(" on node 1 ("), "{said}");
        assert_eq!(
            said.contains("rank 1 exited with code 7: stopping the workers of this node"),
            node == 0,
            "{said}"
        );
    }
}

#[test]
fn a_run_without_restarts_ends_on_all_nodes_with_the_same_code() {
    let site = Site::new(&["--nnodes", "2"]);
    let [a, b] = site.two("test $RANK = 0 && exit 3; exec sleep 60");
    for agent in [a, b] {
        let (code, _, said) = agent.end();
        assert_eq!(code, 1, "{said}");
        assert!(said.contains("error: rank 0 (pid ") && said.contains("exited with code 3"), "{said}");
    }
    let site = Site::new(&["--nnodes", "2"]);
    let [a, b] = site.two("exit 0");
    assert_eq!([a.end().0, b.end().0], [0, 0]);
}

/// Kills an agent so that nothing of it is left.
fn crash(agent: &mut Agent) {
    kill("-KILL", &format!("-{}", agent.process.id()));
    agent.process.wait().unwrap();
}

#[test]
fn the_run_goes_on_without_a_node_that_was_killed_if_enough_are_left() {
    // On a busy machine the second may take long to come.
    let flags = ["--nnodes", "1:2", "--rdzv-conf", "last_call_timeout=60", "--exit-code-to", "code"];
    let site = Site::new(&flags);
    assert!(Command::new("mkfifo").arg(site.folder.path().join("go")).status().unwrap().success());
    let [mut a, mut b] = site.two("echo $GROUP_WORLD_SIZE $TORCHELASTIC_RESTART_COUNT; read line < $SITE/go");
    assert_eq!([a.line(), b.line()], ["2 0", "2 0"]);
    let start = Instant::now();
    crash(&mut b);
    // A lost node costs no restart.
    assert_eq!(a.line(), "1 0");
    assert!(start.elapsed() < Duration::from_secs(3), "{:?}", start.elapsed());
    fs::write(site.folder.path().join("go"), "\n").unwrap();
    let (code, _, said) = a.end();
    assert_eq!(code, 0, "{said}");
    assert!(said.contains("on node 1 (") && said.contains("lost: its agent's connection ended"), "{said}");
    assert_eq!(site.exit_code("a").unwrap(), "0\n");
}

#[test]
fn a_run_that_needs_the_node_that_was_killed_ends_and_says_so() {
    let site = Site::new(&["--nnodes", "2"]);
    let [mut a, mut b] = site.two("echo $RANK; exec sleep 60");
    assert_eq!([a.line(), b.line()], ["0", "1"]);
    let start = Instant::now();
    crash(&mut b);
    let (code, _, said) = a.end();
    assert!(start.elapsed() < Duration::from_secs(3), "{:?}", start.elapsed());
    assert_eq!(code, 1, "{said}");
    assert!(
        said.contains("error: node 1 (") && said.contains("was lost: its agent's connection ended"),
        "{said}"
    );
}

/// Two agents with a worker each, as the tasks of a step of Slurm.
fn tasks_of_a_step(site: &Site, script: &str) -> [Agent; 2] {
    site.two_of(|name| {
        let mut command = site.command(name, &[]);
        let set = [
            ("SLURM_STEP_NUM_TASKS", "2"),
            ("SLURM_STEP_NUM_NODES", "2"),
            ("SLURM_STEP_NODELIST", "n[1-2]"),
            ("SLURM_NODEID", if name == "a" { "0" } else { "1" }),
            ("SLURM_JOB_ID", "7"),
            ("SLURM_STEP_ID", "0"),
        ];
        command.envs(set).args(["--", "sh", "-c", script]);
        Agent::of(command)
    })
}

#[test]
fn a_run_that_needs_a_node_that_slurm_does_not_start_again_asks_to_be_started_later() {
    let flags =
        ["--nnodes", "2", "--max-restarts", "3", "--rdzv-conf", "join_timeout=3", "--exit-code-to", "code"];
    let script = "echo $RANK; exec sleep 60";
    // The first is the one that hosts the coordinator: the other leads the run then, to its end.
    for lost in [0, 1] {
        let site = Site::new(&flags);
        let [mut a, mut b] = tasks_of_a_step(&site, script);
        assert_eq!([a.line(), b.line()], ["0", "1"]);
        let (mut gone, left, name) = if lost == 0 { (a, b, "b") } else { (b, a, "a") };
        let start = Instant::now();
        crash(&mut gone);
        let (code, _, said) = left.end();
        assert!(
            code == 75 && start.elapsed() < Duration::from_secs(10),
            "{code}, {:?}: {said}",
            start.elapsed()
        );
        assert!(
            said.contains(&format!("error: node {lost} (")) && said.contains(" was lost: its agent"),
            "{said}"
        );
        assert!(said.contains("not started again: too few nodes are left, 1"), "{said}");
        assert!(!said.contains("restarts: "), "there was none: {said}");
        assert_eq!(site.exit_code(name).unwrap(), "75\n");
    }
}

#[test]
fn who_is_parted_from_the_node_of_the_coordinator_in_a_step_of_slurm_knows_that_all_end() {
    // Whoever has heard how the run ended has said so before.
    for (known, want) in [(None, "75\n"), (Some("0\n"), "0\n")] {
        let site = Site::new(&["--nnodes", "2", "--max-restarts", "3", "--exit-code-to", "code"]);
        let [mut a, mut b] = tasks_of_a_step(&site, "echo $RANK; exec sleep 60");
        assert_eq!([a.line(), b.line()], ["0", "1"]);
        if let Some(code) = known {
            fs::write(site.folder("b").join("code"), code).unwrap();
        }
        a.signal("-STOP");
        let (code, _, said) = b.end();
        assert!(code == 75 && said.contains("0 may be alive and go on without them"), "{code}: {said}");
        assert_eq!(site.exit_code("b").unwrap(), want);
    }
}

#[test]
fn the_run_goes_on_without_the_node_of_the_coordinator_if_enough_are_left() {
    let site = Site::new(&["--nnodes", "1:2", "--shutdown-timeout", "0.5"]);
    // The workers of the one that is left ignore SIGTERM.
    let script = "echo $RANK of $WORLD_SIZE; echo $$; trap '' TERM; while :; do sleep 0.1; done";
    let [mut a, mut b] = site.two(script);
    let [_, first, _, worker] = [a.line(), b.line(), a.line(), b.line()];
    assert_eq!(first, "1 of 2");
    let start = Instant::now();
    crash(&mut a);
    assert_eq!(b.line(), "0 of 1");
    assert!(start.elapsed() < Duration::from_secs(3), "{:?}", start.elapsed());
    assert!(!Path::new(&format!("/proc/{worker}")).exists(), "a worker runs on");
    b.signal("-TERM");
    let (code, _, said) = b.end();
    assert_eq!(code, 143, "{said}");
    assert!(said.contains("this node leads the run on") && said.contains("its agent has ended"), "{said}");
}

#[test]
fn a_run_that_needs_the_node_of_the_coordinator_ends_and_says_so() {
    let site = Site::new(&["--nnodes", "2", "--shutdown-timeout", "0.5"]);
    let [mut a, mut b] = site.two("echo $$; trap '' TERM; while :; do sleep 0.1; done");
    let [_, worker] = [a.line(), b.line()];
    let start = Instant::now();
    crash(&mut a);
    let (code, _, said) = b.end();
    assert!(start.elapsed() < Duration::from_secs(3), "{:?}", start.elapsed());
    assert_eq!(code, 1, "{said}");
    assert!(said.contains("error: node 0 (") && said.contains("was lost: its agent has ended"), "{said}");
    assert!(!Path::new(&format!("/proc/{worker}")).exists(), "a worker runs on");
}

/// It hears where they have gone to, and finds nobody there.
#[test]
fn a_first_node_that_stood_still_until_the_others_had_finished_ends() {
    let site = Site::new(&["--nnodes", "1:3", "--rdzv-conf", "last_call_timeout=5"]);
    let script = "echo $RANK of $WORLD_SIZE; test $WORLD_SIZE = 2 || exec sleep 60";
    let mut a = site.start("a", &[], script);
    a.waits_for_others();
    let [mut b, mut c] = ["b", "c"].map(|name| site.start(name, &[], script));
    let mut lines = [a.line(), b.line(), c.line()];
    lines.sort();
    assert_eq!(lines, ["0 of 3", "1 of 3", "2 of 3"]);
    a.signal("-STOP");
    for agent in [b, c] {
        let (code, out, said) = agent.end();
        assert!(code == 0 && out.ends_with(" of 2\n"), "{code} {out}: {said}");
    }
    let woke = Instant::now();
    a.signal("-CONT");
    let (code, _, said) = a.end();
    assert!(code == 1 && said.contains("error: "), "{code}: {said}");
    assert!(woke.elapsed() < Duration::from_secs(20), "{:?}", woke.elapsed());
}

#[test]
fn a_node_that_comes_makes_the_run_larger_and_one_that_leaves_smaller() {
    let flags = ["--nnodes", "1:2", "--rdzv-conf", "last_call_timeout=0.2", "--exit-code-to", "code"];
    let site = Site::new(&flags);
    let script = "echo $RANK of $WORLD_SIZE, $TORCHELASTIC_RESTART_COUNT; exec sleep 60";
    let mut a = site.start("a", &[], script);
    assert_eq!(a.line(), "0 of 1, 0");
    let mut b = site.start("b", &["--nproc-per-node", "2"], script);
    assert_eq!(a.line(), "0 of 3, 0");
    let mut lines = [b.line(), b.line()];
    lines.sort();
    assert_eq!(lines, ["1 of 3, 0", "2 of 3, 0"]);
    b.signal("-TERM");
    let (code, _, said) = b.end();
    assert_eq!(code, 143, "{said}");
    assert!(site.exit_code("b").is_err(), "the run goes on");
    assert_eq!(a.line(), "0 of 1, 0");
    a.signal("-TERM");
    let (code, _, said) = a.end();
    assert_eq!(code, 143, "{said}");
    assert!(said.contains("has come: stopping the workers") && said.contains(" leaves: stopping"), "{said}");
    assert!(!said.contains("error:"), "{said}");
}

#[test]
fn where_a_node_leaves_too_few_these_wait_for_another() {
    let site = Site::new(&["--nnodes", "2:3", "--rdzv-conf", "last_call_timeout=0.2"]);
    let script = "echo $RANK of $WORLD_SIZE, $TORCHELASTIC_RESTART_COUNT; [ $(cat end) ] || exec sleep 60";
    std::fs::write(site.folder("a").join("end"), "").unwrap();
    let mut a = site.start("a", &[], script);
    a.waits_for_others();
    let mut b = site.start("b", &[], script);
    assert_eq!([a.line(), b.line()], ["0 of 2, 0", "1 of 2, 0"]);
    b.signal("-TERM");
    let (code, _, said) = b.end();
    assert_eq!(code, 143, "{said}");
    a.says(" leaves: stopping the workers");
    for name in ["a", "c"] {
        std::fs::write(site.folder(name).join("end"), "now").unwrap();
    }
    let c = site.start("c", &[], script);
    for (agent, rank) in [(a, 0), (c, 1)] {
        let (code, out, said) = agent.end();
        assert_eq!((code, out), (0, format!("{rank} of 2, 0\n")), "{said}");
    }
}

#[test]
fn who_waits_where_nodes_meet_outlives_the_one_that_hosts_them() {
    let site = Site::new(&["--nnodes", "3"]);
    let a = site.start("a", &[], "exit 0");
    a.waits_for_others();
    let b = site.start("b", &[], "echo $WORLD_SIZE");
    a.says("nodes here: 2 of");
    a.signal("-9");
    b.says("closed the connection; meeting the others again");
    b.waits_for_others();
    let agents = ["c", "d"].map(|name| site.start(name, &[], "echo $WORLD_SIZE"));
    for agent in [b].into_iter().chain(agents) {
        let (code, out, said) = agent.end();
        assert_eq!((code, out.as_str()), (0, "3\n"), "{said}");
    }
}

#[test]
fn a_signal_to_one_node_of_a_fixed_number_ends_all_with_its_code() {
    for which in [0, 1] {
        let site = Site::new(&["--nnodes", "2", "--max-restarts", "3"]);
        let mut agents = site.two("trap 'echo told; exit 9' TERM; echo $RANK; sleep 60 & wait");
        assert_eq!(agents.each_mut().map(Agent::line), ["0", "1"]);
        agents[which].signal("-TERM");
        for agent in agents {
            let (code, out, said) = agent.end();
            assert_eq!((code, out.as_str()), (143, "told\n"), "{said}");
        }
    }
}

#[test]
fn nodes_that_were_given_numbers_have_them_and_meet_at_the_master_address() {
    let site = Site::new(&["--nnodes", "2"]);
    let port = site.endpoint.split_once(':').unwrap().1;
    let start = |name: &str, rank: &str| {
        let mut command = phalanx(&site.folder(name));
        command.env_remove("PHALANX_SECRET_FILE").env("XDG_CONFIG_HOME", site.folder("config"));
        command.args([
            "run",
            "--nnodes=2",
            "--node_rank",
            rank,
            "--master_addr=127.0.0.1",
            "--master_port",
            port,
        ]);
        command.args([
            "--out",
            "out",
            "--no-prefix",
            "--",
            "sh",
            "-c",
            "echo $RANK $GROUP_RANK $MASTER_PORT",
        ]);
        Agent::of(command)
    };
    // The second one comes first, and waits.
    let b = start("b", "1");
    b.says("waiting for the first node at 127.0.0.1:");
    let a = start("a", "0");
    let [(code, one, said), (_, other, _)] = [a.end(), b.end()];
    assert_eq!(code, 0, "{said}");
    let [one, other] = [one, other].map(|out| out.trim().to_owned());
    assert!(one.starts_with("0 0 ") && other.starts_with("1 1 "), "{one}; {other}");
    assert_eq!(one[4..], other[4..]);
    assert_ne!(&one[4..], port, "that is the coordinator's");
}

#[test]
fn a_program_that_is_not_on_one_node_ends_the_run_on_all() {
    let site = Site::new(&["--nnodes", "2"]);
    let start = |name: &str| {
        let mut command = site.command(name, &[]);
        command.args(["--", "./program"]);
        command
    };
    fs::write(site.folder("a").join("program"), "#!/bin/sh\nexec sleep 60\n").unwrap();
    assert!(
        Command::new("chmod").arg("+x").arg(site.folder("a").join("program")).status().unwrap().success()
    );
    let a = Agent::of(start("a"));
    a.waits_for_others();
    let b = Agent::of(start("b"));
    for agent in [a, b] {
        let (code, _, said) = agent.end();
        assert_eq!(code, 1, "{said}");
        assert!(
            said.contains("could not be started") && said.contains("./program: can't be started"),
            "{said}"
        );
    }
}

#[test]
fn what_does_not_belong_to_the_run_is_told_at_once() {
    let site = Site::new(&["--nnodes", "2"]);
    let first = site.start("a", &[], "exit 0");
    first.waits_for_others();
    let check = |mut command: Command, program: &[&str], code: i32, words: &[&str]| {
        let start = Instant::now();
        let (got, _, said) = Agent::of({
            command.args(program);
            command
        })
        .end();
        assert_eq!(got, code, "{said}");
        assert!(words.iter().all(|word| said.contains(word)), "{words:?} in {said}");
        assert!(start.elapsed() < Duration::from_secs(8), "{said}");
    };
    let sh = ["--", "sh", "-c", "exit 0"];
    check(site.command("b", &[]), &["--", "true"], 1, &["this run's program is sh, not true", "--rdzv-id"]);
    check(site.command("b", &["--nnodes", "1:2"]), &sh, 1, &["this run has --nnodes 2:2, not 1:2"]);
    check(site.command("b", &["--max-restarts", "2"]), &sh, 1, &["--max-restarts 0, not 2"]);
    check(site.command("b", &["--node-rank", "2"]), &sh, 2, &["--node-rank 2: must be below"]);
    check(site.command("b", &["--nnodes", "3:2"]), &sh, 2, &["--nnodes 3:2", "must not be above"]);
    check(
        site.command("b", &["--rdzv-id", "other"]),
        &sh,
        1,
        &["has another secret, or is that of another run", "hint:"],
    );
    let secret = site.folder("b").join("secret");
    fs::write(&secret, "00".repeat(32)).unwrap();
    assert!(Command::new("chmod").arg("600").arg(&secret).status().unwrap().success());
    let path = secret.to_str().unwrap();
    check(site.command("b", &["--secret-file", path]), &sh, 1, &["has another secret", "--secret-file"]);
    check(site.command("b", &["--secret-file", "gone"]), &sh, 1, &["the secret file gone"]);
    check(site.command("b", &["--tls"]), &sh, 1, &["the other end has no TLS", "hint: ", "--tls"]);
    check(
        site.command("b", &["--rdzv-endpoint", "nowhere.invalid:29400"]),
        &sh,
        1,
        &["the endpoint nowhere.invalid can't be found", "hint:"],
    );
    check(
        site.command("b", &["--rdzv-endpoint", "192.0.2.1:29400", "--node-rank", "0"]),
        &sh,
        1,
        &["192.0.2.1:29400 is no address of this machine, which is to be the first node"],
    );
    // What listens there is no coordinator.
    let web = TcpListener::bind("127.0.0.1:0").unwrap();
    let place = web.local_addr().unwrap().to_string();
    std::thread::spawn(move || {
        use std::io::Write;
        for mut stream in web.incoming().flatten() {
            let _ = stream
                .write_all(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\nContent-Length: 0\r\n\r\n");
        }
    });
    check(
        site.command("b", &["--rdzv-endpoint", &place]),
        &sh,
        1,
        &["in use by something that isn't phalanx"],
    );
    // None of this has troubled the run.
    let second = site.start("b", &[], "exit 0");
    let (code, _, said) = second.end();
    assert_eq!(code, 0, "{said}");
    assert_eq!(first.end().0, 0);
}

#[test]
fn one_node_too_many_is_refused_and_two_of_one_number_too() {
    let site = Site::new(&["--nnodes", "2"]);
    let start = |name: &str, rank: &str| site.start(name, &["--node-rank", rank], "echo here; exec sleep 60");
    let mut a = start("a", "0");
    a.waits_for_others();
    let (code, _, said) = start("c", "0").end();
    assert_eq!(code, 1, "{said}");
    assert!(said.contains("--node-rank 0 is taken"), "{said}");
    let mut b = start("b", "1");
    assert_eq!([a.line(), b.line()], ["here", "here"]);
    let (code, _, said) = site.start("c", &[], "echo here; exec sleep 60").end();
    assert_eq!(code, 1, "{said}");
    assert!(said.contains("this run has its 2 nodes: "), "{said}");
}

#[test]
fn a_node_that_stands_by_leaves_when_it_is_asked_and_ends_with_the_run() {
    let site = Site::new(&["--nnodes", "1", "--spares", "2"]);
    let start = |name: &str| {
        site.start(name, &[], "echo here; while [ ! -e $SITE/over ]; do sleep 0.05; done; exit 3")
    };
    let mut a = start("a");
    assert_eq!(a.line(), "here");
    let spares = ["b", "c"].map(start);
    spares.iter().for_each(|spare| spare.says(" stands by, in case that a node is lost"));
    let (code, _, said) = start("d").end();
    assert!(code == 1 && said.contains("this run has its node: "), "{code}: {said}");
    let [b, c] = spares;
    b.signal("-TERM");
    assert_eq!(b.end().0, 143);
    fs::write(site.folder.path().join("over"), "").unwrap();
    for agent in [a, c] {
        let (code, _, said) = agent.end();
        assert!(code == 1 && said.contains("exited with code 3"), "{code}: {said}");
    }
}

#[test]
fn too_few_nodes_for_too_long_end_the_run_with_words() {
    let site = Site::new(&["--nnodes", "2", "--rdzv-conf", "join_timeout=0.3"]);
    let (code, _, said) = site.start("a", &[], "exit 0").end();
    assert_eq!(code, 1, "{said}");
    assert!(
        said.contains("nodes here: 1 of 2") && said.contains("error: too few nodes: 1, after 0 s"),
        "{said}"
    );
}

#[test]
fn workers_of_ours_meet_over_two_nodes_and_again_after_one_was_killed() {
    let body = "nodes::workers_of_ours_meet_over_two_nodes_and_again_after_one_was_killed";
    if std::env::var_os("PHALANX_TEST").is_some() {
        let worker = Worker::from_env().unwrap();
        let mut sum = [worker.group().rank().0 as f32];
        worker.group().all_reduce(&mut sum, ReduceOp::Sum).unwrap();
        assert_eq!(sum, [6.0]);
        if std::env::var("TORCHELASTIC_RESTART_COUNT").unwrap() == "0" && worker.group().rank().0 == 3 {
            kill("-KILL", &std::process::id().to_string());
        }
        worker.group().barrier().unwrap();
        println!("rank {} is through", worker.group().rank());
        return;
    }
    let site = Site::new(&["--nnodes", "2", "--nproc-per-node", "2", "--max-restarts", "1"]);
    for (node, agent) in site.two_of_test(body).into_iter().enumerate() {
        let (code, out, said) = agent.end();
        assert_eq!(code, 0, "{said}");
        for rank in [2 * node, 2 * node + 1] {
            assert!(out.contains(&format!("rank {rank} is through")), "{out}{said}");
        }
        assert!(said.contains("  0: rank 3 (pid ") && said.contains("was killed by SIGKILL"), "{said}");
    }
}
