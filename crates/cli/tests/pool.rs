//! `phalanx pool` as its users have it: a pool, nodes and jobs as processes, some of which are killed.

mod user;

use serde_json::Value;
use std::fs::{self, File};
use std::io::Write;
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Output};
use std::time::{Duration, Instant};
use user::{LOOK, phalanx, text};

/// How long anything may take on a busy machine.
const LIMIT: Duration = Duration::from_secs(120);

const QUEUES: &str = "[queues.text]\nquota = 1\n\n[queues.vision]\nquota = 1\n";

/// A pool in a folder of its own, with what belongs to it.
struct Pool {
    folder: tempfile::TempDir,
    address: String,
    server: Option<Child>,
    nodes: Vec<(String, Child)>,
}

impl Pool {
    fn new() -> Pool {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("queues.toml"), QUEUES).unwrap();
        let mut pool = Pool { folder, address: "127.0.0.1:0".into(), server: None, nodes: Vec::new() };
        pool.serve();
        pool
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// `phalanx pool WHAT`, to this pool.
    fn command(&self, what: &str) -> Command {
        let mut command = phalanx(self.folder.path());
        command.args(["pool", what]).env("PHALANX_POOL", &self.address);
        command.env("XDG_CONFIG_HOME", self.path("config")).env("XDG_STATE_HOME", self.path("state"));
        command.env_remove("PHALANX_SECRET_FILE");
        command
    }

    fn start(&self, mut command: Command, log: &str) -> Child {
        let log = File::options().create(true).append(true).open(self.path(log)).unwrap();
        // As a shell gives each a group of its own, which Ctrl-C goes to as a whole.
        command.stderr(log).process_group(0).spawn().unwrap()
    }

    /// Has a server there, where the one before was.
    fn serve(&mut self) {
        let mut command = self.command("serve");
        command.args(["--queues", "queues.toml", "--listen", &self.address]);
        let _ = fs::remove_file(self.path("serve.log"));
        self.server = Some(self.start(command, "serve.log"));
        let listens = |line: &str| line.strip_prefix("a pool at ")?.split(',').next().map(str::to_owned);
        self.address = self.await_line("serve.log", listens);
    }

    fn kill_server(&mut self) {
        let mut server = self.server.take().unwrap();
        server.kill().unwrap();
        server.wait().unwrap();
    }

    fn add_node(&mut self, name: &str, slots: u32) {
        let mut command = self.command("node");
        command.args(["--name", name, "--slots", &slots.to_string()]);
        let node = self.start(command, &format!("{name}.log"));
        self.nodes.push((name.into(), node));
        let has_it = |shown: &Value| {
            shown["nodes"]
                .as_array()
                .unwrap()
                .iter()
                .any(|node| node["name"] == name && node["is_there"] == true)
        };
        self.await_shown(has_it);
    }

    fn kill_node(&mut self, name: &str) {
        let at = self.nodes.iter().position(|(known, _)| known == name).unwrap();
        let (_, mut node) = self.nodes.remove(at);
        node.kill().unwrap();
        node.wait().unwrap();
    }

    /// Submits; the number of the job.
    fn submit(&self, words: &[&str]) -> u64 {
        let out = self.command("submit").arg("--json").args(words).output().unwrap();
        assert!(out.status.success(), "{}", text(&out.stderr));
        let told: Value = serde_json::from_str(text(&out.stdout).lines().next().unwrap()).unwrap();
        told["job"].as_u64().unwrap()
    }

    /// A training of mnist-mini that lasts as long as somebody wants it.
    fn train(&self, words: &[&str], steps: &str) -> u64 {
        let work = [
            "mnist-mini",
            "--json",
            "--seed",
            "4",
            "--batch-size",
            "8",
            "--epochs",
            "100000",
            "--steps",
            steps,
        ];
        self.submit(&[words, &work].concat())
    }

    fn wait(&self, job: u64) -> Output {
        self.command("wait").arg(job.to_string()).output().unwrap()
    }

    fn shown(&self) -> Option<Value> {
        let out = self.command("show").arg("--json").output().unwrap();
        out.status.success().then(|| serde_json::from_slice(&out.stdout).unwrap())
    }

    /// Waits until it is so.
    fn await_shown(&self, is_so: impl Fn(&Value) -> bool) -> Value {
        let start = Instant::now();
        loop {
            let shown = self.shown();
            match shown.filter(&is_so) {
                Some(shown) => return shown,
                None if start.elapsed() > LIMIT => panic!("{:?}\n{}", self.shown(), self.told()),
                None => std::thread::sleep(10 * LOOK),
            }
        }
    }

    /// Waits until a job runs on so many agents.
    fn await_agents(&self, job: u64, agents: usize) {
        self.await_shown(|shown| {
            let state = &state(shown, job);
            state["state"] == "runs" && state["nodes"].as_array().is_some_and(|nodes| nodes.len() == agents)
        });
    }

    /// Waits until a job has told of a step that is meant; what it has told until then.
    fn await_step(&self, run: &str, is_meant: impl Fn(&Value) -> bool) -> Vec<Value> {
        let start = Instant::now();
        loop {
            let steps = self.steps(run);
            if steps.iter().any(&is_meant) {
                return steps;
            }
            assert!(start.elapsed() < LIMIT, "{run}: {:?}\n{}", steps.last(), self.told());
            std::thread::sleep(10 * LOOK);
        }
    }

    /// The steps that a run has told of.
    fn steps(&self, run: &str) -> Vec<Value> {
        let events = fs::read_to_string(self.path(run).join("events.jsonl")).unwrap_or_default();
        let events = events.lines().filter_map(|line| serde_json::from_str(line).ok());
        events.filter(|event: &Value| event["event"] == "step").collect()
    }

    /// The last that the pool and the newest agents of its first job have said.
    fn told(&self) -> String {
        let agents = fs::read_dir(self.path("runs")).into_iter().flatten().flatten();
        let logs =
            agents.flat_map(|run| fs::read_dir(run.path().join("agents")).into_iter().flatten().flatten());
        let mut logs: Vec<PathBuf> = logs.map(|entry| entry.path()).collect();
        logs.sort_by_key(|path| fs::metadata(path).and_then(|found| found.modified()).ok());
        let newest = logs.into_iter().rev().take(4).chain([self.path("serve.log")]);
        newest.fold(String::new(), |told, path| {
            let text = fs::read_to_string(&path).unwrap_or_default();
            let lines: Vec<&str> = text.lines().filter(|line| !line.contains("\"event\"")).collect();
            format!("{told}{}:\n{}\n", path.display(), lines[lines.len().saturating_sub(12)..].join("\n"))
        })
    }

    fn log(&self, name: &str) -> String {
        fs::read_to_string(self.path(name)).unwrap_or_default()
    }

    fn await_line<R>(&self, log: &str, find: impl Fn(&str) -> Option<R>) -> R {
        let start = Instant::now();
        loop {
            match self.log(log).lines().find_map(&find) {
                Some(found) => return found,
                None => assert!(start.elapsed() < LIMIT, "{}", self.log(log)),
            }
            std::thread::sleep(LOOK);
        }
    }

    /// Waits until a line with these words is in a log.
    fn await_words(&self, log: &str, words: &str) {
        self.await_line(log, |line| line.contains(words).then_some(()));
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        let all = self.nodes.drain(..).map(|(_, node)| node).chain(self.server.take());
        for mut child in all {
            // One that has ended needs no killing.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn state(shown: &Value, job: u64) -> Value {
    let jobs = shown["jobs"].as_array().unwrap();
    jobs.iter().find(|known| known["job"] == job).map(|job| job["state"].clone()).unwrap_or_default()
}

/// That each step was made once, in order.
fn check_whole(steps: &[Value]) {
    for (i, step) in steps.iter().enumerate() {
        assert_eq!(step["step"], i, "step {i} is told as {step}");
    }
}

#[test]
fn a_job_gives_up_a_worker_for_another_and_loses_no_step() {
    let mut pool = Pool::new();
    pool.add_node("n1", 2);
    let elastic = pool.train(&["--queue", "vision", "--workers", "1:2"], "100000000");
    assert_eq!(elastic, 1);
    let run = "runs/mnist-mini-1";
    pool.await_step(run, |step| step["world_size"] == 2);
    let other = pool
        .command("submit")
        .args(["--queue", "text", "--wait", "--name", "other", "--"])
        .args(["sh", "-c", "echo here"])
        .output()
        .unwrap();
    assert_eq!(other.status.code(), Some(0), "{}", text(&other.stderr));
    assert!(text(&other.stderr).contains("job 2 (other) has ended: done"), "{}", text(&other.stderr));
    assert!(pool.log("runs/other-2/agents/1-0.log").contains("here"));
    // It has the slot again.
    let steps = pool.steps(run).len();
    pool.await_agents(elastic, 2);
    let steps =
        pool.await_step(run, |step| step["world_size"] == 2 && step["step"].as_u64() > Some(steps as u64));
    check_whole(&steps);
    let sizes =
        steps.iter().map(|step| step["world_size"].as_u64().unwrap()).fold(Vec::new(), |mut sizes, size| {
            if sizes.last() != Some(&size) {
                sizes.push(size);
            }
            sizes
        });
    assert!(sizes.ends_with(&[2, 1, 2]), "{sizes:?}");
    assert!(!pool.log("serve.log").contains("makes room"), "nobody was ended: {}", pool.log("serve.log"));
    let canceled = pool.command("cancel").arg("1").output().unwrap();
    assert!(canceled.status.success() && text(&canceled.stderr).contains("job 1 is to end"));
    let waited = pool.wait(elastic);
    assert_eq!(waited.status.code(), Some(1));
    assert!(text(&waited.stderr).contains("has ended: canceled"), "{}", text(&waited.stderr));
}

#[test]
fn a_job_that_cannot_shrink_makes_room_and_goes_on_where_it_was() {
    let mut pool = Pool::new();
    pool.add_node("n1", 1);
    pool.add_node("n2", 1);
    let fixed = pool.train(&["--queue", "vision", "--workers", "2", "--name", "fixed"], "3000");
    let run = "runs/fixed-1";
    pool.await_step(run, |step| step["step"].as_u64() > Some(20));
    // Its queue holds two, and one of these is lent.
    let other = pool.submit(&["--queue", "text", "--", "sh", "-c", "exit 3"]);
    let waited = pool.wait(other);
    assert_eq!(waited.status.code(), Some(1));
    assert!(text(&waited.stderr).contains("has ended: failed with 1"), "{}", text(&waited.stderr));
    assert!(
        pool.log("serve.log").contains("job 1 (fixed): makes room for job 2"),
        "{}",
        pool.log("serve.log")
    );
    let waited = pool.wait(fixed);
    assert_eq!(waited.status.code(), Some(0), "{}\n{}", text(&waited.stderr), pool.log("serve.log"));
    let steps = pool.steps(run);
    check_whole(&steps);
    assert_eq!(steps.len(), 3000);
    assert!(steps.iter().all(|step| step["world_size"] == 2));
    let shown = pool.shown().unwrap();
    assert_eq!(shown["jobs"][0]["attempts"], 2, "{shown}");
    assert!(pool.path(run).join("model.safetensors").exists());
}

#[test]
fn what_runs_goes_on_while_the_pool_is_dead_and_after_a_node_has_died() {
    let mut pool = Pool::new();
    pool.add_node("n1", 1);
    pool.add_node("n2", 1);
    let elastic = pool.train(&["--queue", "vision", "--workers", "1:2"], "100000000");
    let run = "runs/mnist-mini-1";
    pool.await_agents(elastic, 2);
    pool.await_step(run, |step| step["world_size"] == 2);
    // One that waits for a job looks for the next pool.
    let mut waiting = pool.start(
        {
            let mut command = pool.command("wait");
            command.arg(elastic.to_string());
            command
        },
        "wait.log",
    );
    pool.kill_server();
    let steps = pool.steps(run).len() as u64;
    pool.await_step(run, |step| step["step"].as_u64() > Some(steps + 20));
    let asked = pool.command("show").output().unwrap();
    assert_eq!(asked.status.code(), Some(1));
    assert!(text(&asked.stderr).contains("phalanx pool serve starts one"), "{}", text(&asked.stderr));
    pool.serve();
    pool.await_agents(elastic, 2);
    check_whole(&pool.steps(run));
    assert!(!pool.log("serve.log").contains("lost"), "{}", pool.log("serve.log"));
    // A node's agents end with it, and its slots are somebody's again when another of its name comes.
    pool.kill_node("n2");
    pool.await_step(run, |step| step["world_size"] == 1 && step["step"].as_u64() > Some(steps + 20));
    pool.add_node("n2", 1);
    pool.await_words("serve.log", "an agent lost with node n2");
    let steps = pool.steps(run).len() as u64;
    pool.await_agents(elastic, 2);
    let steps = pool.await_step(run, |step| step["world_size"] == 2 && step["step"].as_u64() > Some(steps));
    check_whole(&steps);
    assert!(pool.command("cancel").arg(elastic.to_string()).output().unwrap().status.success());
    assert_eq!(waiting.wait().unwrap().code(), Some(1), "{}", pool.log("wait.log"));
}

#[test]
fn a_node_that_leaves_takes_its_jobs_elsewhere() {
    let mut pool = Pool::new();
    pool.add_node("n1", 1);
    let job = pool.train(&["--queue", "vision", "--name", "moves"], "4000");
    pool.await_step("runs/moves-1", |step| step["step"].as_u64() > Some(20));
    pool.add_node("n2", 1);
    let (_, mut first) = pool.nodes.remove(0);
    let ctrl_c = ["-INT", "--", &format!("-{}", first.id())];
    assert!(Command::new("kill").args(ctrl_c).status().unwrap().success());
    assert_eq!(first.wait().unwrap().code(), Some(0), "{}", pool.log("n1.log"));
    let waited = pool.wait(job);
    assert_eq!(waited.status.code(), Some(0), "{}\n{}", text(&waited.stderr), pool.log("serve.log"));
    let steps = pool.steps("runs/moves-1");
    check_whole(&steps);
    assert_eq!(steps.len(), 4000);
    let log = pool.log("serve.log");
    assert!(log.contains("node n1 has left") && log.contains("begins on n2"), "{log}");
}

#[test]
fn what_makes_no_sense_is_refused_with_words() {
    let mut pool = Pool::new();
    let check = |what: &str, words: &[&str], code: i32, want: &[&str]| {
        let out = pool.command(what).args(words).output().unwrap();
        let said = text(&out.stderr);
        assert_eq!(out.status.code(), Some(code), "{words:?}: {said}");
        want.iter().for_each(|want| assert!(said.contains(want), "{want} in: {said}"));
    };
    check(
        "submit",
        &["--queue", "speech", "--", "sh"],
        1,
        &["there is no queue speech", "queues are text, vision"],
    );
    check(
        "submit",
        &["--queue", "text", "--workers", "0", "--", "sh"],
        2,
        &["--workers 0: must be a number from 1 on"],
    );
    check("submit", &["--queue", "text", "--workers", "3:2", "--", "sh"], 2, &["--workers 3:2"]);
    check(
        "submit",
        &["--queue", "text", "--workers", "4", "--together", "3", "--", "sh"],
        2,
        &["--together 3"],
    );
    check(
        "submit",
        &["--queue", "text", "--forward-env", "NOT_SET_HERE", "--", "sh"],
        2,
        &["NOT_SET_HERE: isn't set here"],
    );
    check(
        "submit",
        &["--queue", "text", "mnist-mini", "--resume"],
        2,
        &["--resume", "the job says where the run is kept"],
    );
    let counted = ["--queue", "text", "mnist-mini", "--nproc-per-node", "2"];
    check("submit", &counted, 2, &["as in phalanx pool submit --workers 2 mnist-mini"]);
    let watched = ["--queue", "text", "mnist-mini", "--hang-timeout", "9"];
    let hint = "PHALANX_HANG_TIMEOUT=9 phalanx pool submit --forward-env PHALANX_HANG_TIMEOUT";
    check("submit", &watched, 2, &[hint]);
    check("submit", &["--queue", "text", "--out", "", "--", "sh"], 2, &["--out \"\": must be a folder"]);
    check("submit", &["--queue", "text", "nothing-like-it"], 2, &["is neither a recipe nor a program"]);
    check("submit", &["--queue", "text", "--name", "a b", "--", "sh"], 2, &["--name \"a b\""]);
    check("cancel", &["7", "8"], 1, &["there is no job 7", "there is no job 8"]);
    check("wait", &["7"], 1, &["there is no job 7"]);
    check("node", &["--slots", "0"], 2, &["--slots 0"]);
    check("node", &["--pool", "nowhere"], 2, &["--pool nowhere"]);
    check("serve", &["--listen", &pool.address, "--dir", "other"], 1, &["can't listen", "--listen"]);
    check("serve", &["--queues", "none.toml"], 1, &["none.toml"]);
    check(
        "serve",
        &["--queues", "queues.toml", "--listen", "127.0.0.1:0"],
        1,
        &["is written by another pool", "--dir"],
    );
    fs::write(pool.path("wrong.toml"), "[queues.a]\nquotta = 1\n").unwrap();
    check("serve", &["--queues", "wrong.toml", "--dir", "other"], 1, &["wrong.toml", "quotta"]);
    // What a terminal would take for a command.
    let sly = pool.submit(&["--queue", "text", "--out", "\u{1b}[31mred", "--", "sh"]);
    for words in [["show", &sly.to_string()], ["cancel", &sly.to_string()]] {
        let out = pool.command(words[0]).arg(words[1]).output().unwrap();
        assert!(out.status.success() && !text(&out.stdout).contains('\u{1b}'), "{}", text(&out.stdout));
    }
    check("cancel", &[&sly.to_string()], 0, &["had ended before: canceled"]);
    // Somebody else's secret.
    let stranger = pool.command("show").env("XDG_CONFIG_HOME", pool.path("other-config")).output().unwrap();
    assert_eq!(stranger.status.code(), Some(1));
    assert!(text(&stranger.stderr).contains("secret"), "{}", text(&stranger.stderr));
    // And somebody who speaks something else.
    let mut stranger = TcpStream::connect(&pool.address).unwrap();
    stranger.write_all(b"GET / HTTP/1.1\r\nHost: pool\r\n\r\n".repeat(10).as_slice()).unwrap();
    pool.await_words("serve.log", "refused a connection from");
    pool.add_node("n1", 1);
    let twin = pool.command("node").args(["--name", "n1", "--slots", "1"]).output().unwrap();
    assert_eq!(twin.status.code(), Some(1));
    assert!(text(&twin.stderr).contains("there is another node n1"), "{}", text(&twin.stderr));
    let gone = pool.path("gone");
    fs::write(&gone, "#!/bin/sh\n").unwrap();
    fs::set_permissions(&gone, fs::Permissions::from_mode(0o755)).unwrap();
    let lost = pool.submit(&["--queue", "text", "--out", "gone/%j", "--", "./gone"]);
    let waited = pool.wait(lost);
    assert_eq!(waited.status.code(), Some(1));
    // Its folder can't be made, since a file is called that.
    assert!(text(&waited.stderr).contains("failed: node n1: "), "{}", text(&waited.stderr));
    // A queue that has jobs can't be taken away.
    pool.nodes.iter_mut().for_each(|(_, node)| drop(node.kill()));
    let waits = pool.submit(&["--queue", "text", "--", "sh"]);
    pool.kill_server();
    fs::write(pool.path("queues.toml"), "[queues.vision]\n").unwrap();
    let out = pool.command("serve").args(["--queues", "queues.toml"]).output().unwrap();
    assert_eq!(out.status.code(), Some(1));
    assert!(text(&out.stderr).contains(&format!("job {waits} is in queue text")), "{}", text(&out.stderr));
}

#[test]
fn agents_have_what_their_job_and_their_slots_say() {
    let mut pool = Pool::new();
    let devices = pool.path("devices");
    fs::write(&devices, "#!/bin/sh\necho \"$RANK of $WORLD_SIZE, $CUDA_VISIBLE_DEVICES, $PHALANX_THREADS threads, $MINE, in $(pwd)\"\n").unwrap();
    fs::set_permissions(&devices, fs::Permissions::from_mode(0o755)).unwrap();
    pool.add_node("n1", 4);
    let out = pool
        .command("submit")
        .args([
            "--queue",
            "text",
            "--workers",
            "4",
            "--together",
            "2",
            "--forward-env",
            "MINE",
            "--out",
            "here-%j",
            "--wait",
            "./devices",
        ])
        .env("MINE", "yes")
        .output()
        .unwrap();
    assert_eq!(out.status.code(), Some(0), "{}\n{}", text(&out.stderr), pool.log("here-1/agents/1-0.log"));
    let logs = [0, 1].map(|agent| pool.log(&format!("here-1/agents/1-{agent}.log")));
    let lines: Vec<&str> =
        logs.iter().flat_map(|log| log.lines()).filter(|line| line.contains(" of 4")).collect();
    assert_eq!(lines.len(), 4, "{logs:?}");
    let folder = pool.folder.path().canonicalize().unwrap();
    for line in lines {
        assert!(line.contains("threads, yes, in") && line.ends_with(folder.to_str().unwrap()), "{line}");
    }
    let mode = fs::metadata(pool.path("state/phalanx/pool/journal.jsonl")).unwrap().permissions().mode();
    assert_eq!(mode & 0o077, 0, "what jobs are is nobody else's affair");
}
