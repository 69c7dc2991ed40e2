//! Workers that are killed, stopped and fail while `phalanx train` goes on: real processes and real signals.

mod user;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use phalanx_job::RunDir;
use serde_json::Value;
use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};
use user::{LOOK, phalanx, text};

const LIMIT: Duration = Duration::from_secs(60);

/// Two workers.
const TWO: &str = "mnist-mini --nproc-per-node 2 --batch-size 8";

/// A run on the way.
struct Run {
    /// There until its end is waited for.
    agent: Option<Child>,
    out: PathBuf,
    lines: BufReader<std::process::ChildStdout>,
    told: Vec<Value>,
    start: Instant,
}

impl Run {
    /// Of two workers.
    fn start(folder: &Path, args: &[&str]) -> Run {
        Run::of(TWO, folder, args)
    }

    /// Of two workers, where the environment has these variables.
    fn in_environment(variables: &[(&str, &str)], folder: &Path, args: &[&str]) -> Run {
        Run::by(phalanx(folder).envs(variables.iter().copied()), TWO, folder, args)
    }

    /// Of this recipe, with so many workers and samples a step of each.
    fn of(recipe: &str, folder: &Path, args: &[&str]) -> Run {
        Run::by(&mut phalanx(folder), recipe, folder, args)
    }

    fn by(command: &mut Command, recipe: &str, folder: &Path, args: &[&str]) -> Run {
        let out = folder.join("run");
        command.args(["train", "--json"]).args(recipe.split(' '));
        command.args(["--out", out.to_str().unwrap()]).args(args);
        let mut agent = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(agent.stdout.take().unwrap());
        Run { agent: Some(agent), out, lines, told: Vec::new(), start: Instant::now() }
    }

    /// Reads what is told up to the first event that is wanted.
    fn until(&mut self, mut wanted: impl FnMut(&Value) -> bool) -> Value {
        loop {
            let mut line = String::new();
            assert!(
                self.lines.read_line(&mut line).unwrap() > 0,
                "the run has ended: {:?}",
                self.told.last()
            );
            assert!(self.start.elapsed() < LIMIT, "{line}");
            let event: Value = serde_json::from_str(&line).unwrap();
            self.told.push(event.clone());
            if wanted(&event) {
                return event;
            }
        }
    }

    /// Reads until a step is told that so many workers have made, and three more of them.
    fn until_steps_of(&mut self, world_size: u64) {
        for _ in 0..3 {
            self.until(|event| event["event"] == "step" && event["world_size"] == world_size);
        }
    }

    /// The newest process that was started as this rank.
    fn worker(&self, rank: u32) -> Pid {
        Pid::from_raw(user::worker(&self.out, rank))
    }

    /// Kills both workers, neither of which sees the other's end.
    fn kill_both(&self) -> [Pid; 2] {
        let workers = [0, 1].map(|rank| self.worker(rank));
        for signal in [Signal::SIGSTOP, Signal::SIGKILL] {
            workers.iter().for_each(|worker| kill(*worker, signal).unwrap());
        }
        workers
    }

    /// Sends a signal to the agent, or waits for the end where there is none; gives how it ended and what it said.
    fn end(mut self, signal: Option<Signal>) -> (ExitStatus, String, Vec<Value>) {
        let agent = self.agent.take().unwrap();
        signal.into_iter().for_each(|signal| kill(Pid::from_raw(agent.id() as i32), signal).unwrap());
        let mut rest = String::new();
        self.lines.read_to_string(&mut rest).unwrap();
        self.told.extend(rest.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()));
        let out = agent.wait_with_output().unwrap();
        (out.status, text(&out.stderr), std::mem::take(&mut self.told))
    }
}

impl Drop for Run {
    /// A test that fails leaves nothing running.
    fn drop(&mut self) {
        if let Some(mut agent) = self.agent.take() {
            // Its workers end with it.
            let _ = agent.kill();
            let _ = agent.wait();
        }
    }
}

/// Every step was told, once and in order, and used as many samples as any other; every epoch used each sample once.
fn is_whole(told: &[Value], samples_of_step: u64) {
    let of = |kind: &'static str| told.iter().filter(move |event| event["event"] == kind);
    for (i, step) in of("step").enumerate() {
        assert_eq!(step["step"], i as u64, "{step}");
        let epoch = step["epoch"].as_u64().unwrap();
        let steps_per_epoch = told[0]["steps_per_epoch"].as_u64().unwrap();
        assert_eq!(epoch, i as u64 / steps_per_epoch);
        let in_epoch = (i as u64 % steps_per_epoch + 1) * samples_of_step;
        let samples = told[0]["samples"].as_u64().unwrap();
        assert_eq!(step["samples"], epoch * samples + in_epoch.min(samples), "{step}");
    }
    assert!(of("epoch").all(|epoch| epoch["each_once"] == true), "{told:?}");
}

/// What `events.jsonl` says, which is what was told.
fn written(folder: &Path) -> Vec<Value> {
    let text = fs::read_to_string(folder.join("run/events.jsonl")).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Nobody waits for gradients that nobody will use.
#[test]
fn a_step_that_cannot_end_any_more_is_given_up() {
    let folder = tempfile::tempdir().unwrap();
    // Steps of many small passes, after which gradients go to the other rank once.
    let recipe = "mnist-mini --nproc-per-node 2 --batch-size 1 --epochs 1000";
    let long = ["--set", "model.name=mnist-hpc", "--set", "train.accumulate=100"];
    let mut run = Run::of(recipe, folder.path(), &long);
    // No evaluation comes after it, in which a loss is found out by itself.
    let before = run.until(|event| event["event"] == "step" && event["step"] == 2);
    let step = before["ms"].as_f64().unwrap();
    let killed = Instant::now();
    kill(run.worker(1), Signal::SIGKILL).unwrap();
    run.until(|event| event["event"] == "members");
    let took = killed.elapsed().as_secs_f64() * 1e3;
    assert!(took < step / 2.0, "gone on after {took:.0} ms, where a step takes {step:.0}");
    run.until_steps_of(2);
    let (status, said, told) = run.end(Some(Signal::SIGTERM));
    assert_eq!(status.code(), Some(143), "{said}");
    is_whole(&told, 200);
}

#[test]
fn workers_that_are_killed_cost_no_step_and_no_sample() {
    let folder = tempfile::tempdir().unwrap();
    let mut run = Run::start(folder.path(), &["--epochs", "1000"]);
    for rank in [1, 0] {
        run.until_steps_of(2);
        kill(run.worker(rank), Signal::SIGKILL).unwrap();
        // The one that is left goes on alone, whether the other is there already or not.
        for world_size in [1, 2] {
            let members = run.until(|event| event["event"] == "members");
            assert_eq!(members["world_size"], world_size);
        }
    }
    run.until_steps_of(2);
    run.until(|event| event["event"] == "epoch");
    let (status, said, told) = run.end(Some(Signal::SIGTERM));
    assert_eq!(status.code(), Some(143), "{said}");
    is_whole(&told, 16);
    assert_eq!(written(folder.path()), told);
    for (rank, restart) in [(1, 1), (0, 2)] {
        let line = said.lines().find(|line| line.contains(&format!("rank {rank} (pid "))).unwrap();
        let wanted = format!("the others go on, another takes its place (restart {restart} of 3)");
        assert!(line.contains("was killed by SIGKILL") && line.contains(&wanted), "{said}");
    }
    assert!(
        said.contains("SIGTERM: stopped after") && said.contains("--resume goes on from there"),
        "{said}"
    );
}

#[test]
fn workers_that_are_killed_at_once_cost_one_restart() {
    let folder = tempfile::tempdir().unwrap();
    let mut run = Run::of(
        "mnist-mini --nproc-per-node 4 --batch-size 8",
        folder.path(),
        &["--epochs", "1000", "--max-restarts", "1"],
    );
    run.until_steps_of(4);
    for worker in [3, 0, 2].map(|rank| run.worker(rank)) {
        kill(worker, Signal::SIGKILL).unwrap();
    }
    run.until(|event| event["event"] == "members" && event["world_size"] == 4);
    run.until_steps_of(4);
    let (status, said, _) = run.end(Some(Signal::SIGTERM));
    assert_eq!(status.code(), Some(143), "{said}");
    // A step that the lost alone had made was told, and is made and told again; the file has it once.
    is_whole(&written(folder.path()), 32);
    assert_eq!(said.matches("another takes its place (restart 1 of 1)").count(), 3, "{said}");
    assert!(said.contains("restarts: 1; what went wrong each time:"), "{said}");
}

/// A build while a run goes on is no other program in the midst of it.
#[test]
fn a_worker_is_replaced_by_the_program_that_the_run_was_started_with() {
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join("phalanx");
    fs::copy(env!("CARGO_BIN_EXE_phalanx"), &program).unwrap();
    let mut command = Command::new(&program);
    command.current_dir(folder.path()).env("PHALANX_CACHE", folder.path().join("cache"));
    let mut run = Run::by(&mut command, TWO, folder.path(), &["--epochs", "1000"]);
    run.until_steps_of(2);
    fs::remove_file(&program).unwrap();
    fs::write(&program, "no program").unwrap();
    kill(run.worker(1), Signal::SIGKILL).unwrap();
    for world_size in [1, 2] {
        run.until(|event| event["event"] == "members" && event["world_size"] == world_size);
    }
    run.until_steps_of(2);
    let name = fs::read_to_string(format!("/proc/{}/comm", run.worker(1))).unwrap();
    assert_eq!(name.trim(), "phalanx");
    let (status, said, told) = run.end(Some(Signal::SIGTERM));
    assert_eq!(status.code(), Some(143), "{said}");
    is_whole(&told, 16);
}

/// The compute threads of a process beside the one that calls them.
fn helpers(process: Pid) -> usize {
    let threads = fs::read_dir(format!("/proc/{process}/task")).unwrap();
    let names = threads.flatten().map(|thread| fs::read_to_string(thread.path().join("comm")));
    names.flatten().filter(|name| name.starts_with("phalanx-cpu-")).count()
}

/// How many helpers the worker that is left has at first, and how many at most until another comes in the place of the lost.
fn helpers_of_who_is_left(variables: &[(&str, &str)], args: &[&str]) -> (usize, usize) {
    // Another may come before the one that is left has gone on alone.
    let counts = (0..9).find_map(|_| {
        let (first, most) = helpers_through_a_loss(variables, args);
        Some((first, most?))
    });
    counts.expect("the one that is left goes on alone for a while")
}

/// The same; it is not known how many at most where another came at once.
fn helpers_through_a_loss(variables: &[(&str, &str)], args: &[&str]) -> (usize, Option<usize>) {
    let folder = tempfile::tempdir().unwrap();
    let args = [&["--epochs", "1000"], args].concat();
    let mut run = Run::in_environment(variables, folder.path(), &args);
    run.until_steps_of(2);
    let left = run.worker(0);
    let (first, mut most) = (helpers(left), None);
    kill(run.worker(1), Signal::SIGKILL).unwrap();
    run.until(|event| {
        let are_all_there = event["event"] == "members" && event["world_size"] == 2;
        if event["world_size"] == 1 {
            most = most.max(Some(helpers(left)));
        }
        are_all_there
    });
    run.until_steps_of(2);
    assert_eq!(helpers(left), first, "all are there again");
    let (status, said, _) = run.end(Some(Signal::SIGTERM));
    assert_eq!(status.code(), Some(143), "{said}");
    (first, most)
}

#[test]
fn who_is_left_takes_the_threads_of_the_lost_unless_somebody_asked_for_a_number() {
    let cores = std::thread::available_parallelism().unwrap().get();
    let share = (cores / 2).max(1);
    assert_eq!(helpers_of_who_is_left(&[], &[]), (share - 1, (2 * share).min(cores.max(share)) - 1));
    assert_eq!(helpers_of_who_is_left(&[], &["--set", "train.threads=1"]), (0, 0));
    assert_eq!(helpers_of_who_is_left(&[("PHALANX_THREADS", "3")], &[]), (2, 2));
}

#[test]
fn a_worker_that_is_stopped_is_found_out_and_replaced() {
    let folder = tempfile::tempdir().unwrap();
    let mut run = Run::start(folder.path(), &["--epochs", "1000"]);
    run.until_steps_of(2);
    kill(run.worker(1), Signal::SIGSTOP).unwrap();
    run.until(|event| event["event"] == "members");
    run.until_steps_of(2);
    let (status, said, told) = run.end(Some(Signal::SIGTERM));
    assert_eq!(status.code(), Some(143), "{said}");
    assert!(said.contains("rank 1 gives the others no sign of life: killing it"), "{said}");
    is_whole(&told, 16);
}

/// In groups of some ranks, as of those that hold one replica together, it has another number.
#[test]
fn a_worker_of_a_mesh_that_is_stopped_is_told_by_its_number_in_the_run() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("text"), "who is meant is told by name. ".repeat(400)).unwrap();
    // Most of a step is sums of parts.
    let model = "--set model.layers=6 --set model.width=16 --set model.context=8 --batch-size 4";
    let recipe = format!("gpt --data text {model} --nproc-per-node 4 --set parallel.tensor=2");
    let mut run = Run::of(&recipe, folder.path(), &["--epochs", "1000"]);
    run.until_steps_of(4);
    kill(run.worker(3), Signal::SIGSTOP).unwrap();
    run.until(|event| event["event"] == "members");
    run.until_steps_of(4);
    let (status, said, _) = run.end(Some(Signal::SIGTERM));
    assert_eq!(status.code(), Some(143), "{said}");
    assert!(said.contains("rank 3 gives the others no sign of life: killing it"), "{said}");
    assert!(
        !["rank 0 gives", "rank 1 gives", "rank 2 gives"].iter().any(|other| said.contains(other)),
        "{said}"
    );
}

#[test]
fn a_worker_that_is_stopped_and_the_last_one_that_is_left_is_found_out_and_replaced() {
    let folder = tempfile::tempdir().unwrap();
    let mut run = Run::start(folder.path(), &["--epochs", "1000", "--set", "train.checkpoint_every=5"]);
    run.until(|event| event["event"] == "checkpoint");
    // It waits for the other one, and nobody who trains waits for it.
    kill(run.worker(1), Signal::SIGSTOP).unwrap();
    kill(run.worker(0), Signal::SIGKILL).unwrap();
    run.until(|event| event["event"] == "resume");
    run.until_steps_of(2);
    let (status, said, _) = run.end(Some(Signal::SIGTERM));
    assert_eq!(status.code(), Some(143), "{said}");
    assert!(said.contains("rank 1 hangs (no progress in ") && said.contains("limit 1.5 s"), "{said}");
    is_whole(&written(folder.path()), 16);
}

#[test]
fn a_worker_that_is_stopped_before_it_comes_to_anything_is_found_out_and_replaced() {
    let folder = tempfile::tempdir().unwrap();
    let mut run = Run::start(folder.path(), &["--epochs", "1000", "--set", "train.checkpoint_every=5"]);
    run.until(|event| event["event"] == "checkpoint");
    let [_, killed] = run.kill_both();
    // The others that are started wait for it alone.
    let newest = loop {
        assert!(run.start.elapsed() < LIMIT);
        let newest = user::workers(&run.out, "RANK=1").into_iter().map(Pid::from_raw).max();
        if let Some(newest) = newest.filter(|newest| *newest != killed) {
            break newest;
        }
    };
    kill(newest, Signal::SIGSTOP).unwrap();
    run.until(|event| event["event"] == "resume");
    run.until_steps_of(2);
    let (status, said, _) = run.end(Some(Signal::SIGTERM));
    assert_eq!(status.code(), Some(143), "{said}");
    assert!(said.contains("rank 1 hangs (no progress in its start for "), "{said}");
    is_whole(&written(folder.path()), 16);
}

#[test]
fn what_happens_while_another_holds_the_run_directory_is_written_down_afterwards() {
    let folder = tempfile::tempdir().unwrap();
    let mut run = Run::start(folder.path(), &["--epochs", "1000"]);
    run.until_steps_of(2);
    let run_dir = RunDir::create(&run.out).unwrap();
    // The other one isn't to come first.
    let other = run.worker(1);
    kill(other, Signal::SIGSTOP).unwrap();
    kill(run.worker(0), Signal::SIGKILL).unwrap();
    let claim = loop {
        match run_dir.claim("another") {
            Ok(claim) => break claim,
            Err(error) => assert!(run.start.elapsed() < LIMIT, "{error}"),
        }
    };
    kill(other, Signal::SIGCONT).unwrap();
    let log = run.out.join("logs/0/1.err");
    while !fs::read_to_string(&log).unwrap().contains("isn't written down yet") {
        assert!(run.start.elapsed() < LIMIT, "{:?}", run.told.last());
        std::thread::sleep(LOOK);
    }
    drop(claim);
    run.until(|event| event["event"] == "members");
    run.until_steps_of(2);
    let (status, said, told) = run.end(Some(Signal::SIGTERM));
    assert_eq!(status.code(), Some(143), "{said}");
    is_whole(&told, 16);
    assert_eq!(written(folder.path()), told);
}

/// Puts a pipe in the place of a file until somebody reads it: who does, reads for as long as what is returned isn't dropped, and
/// everybody else finds the file.
fn read_for_ever(path: &Path) -> fs::File {
    let [aside, pipe] = ["aside", "pipe"].map(|end| path.with_extension(end));
    fs::copy(path, &aside).unwrap();
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    fs::rename(&pipe, path).unwrap();
    let (start, mut options) = (Instant::now(), fs::File::options());
    options.write(true).custom_flags(nix::libc::O_NONBLOCK);
    loop {
        // A pipe that nobody reads can't be written to.
        if let Ok(writer) = options.open(path) {
            fs::rename(&aside, path).unwrap();
            return writer;
        }
        assert!(start.elapsed() < LIMIT, "nobody reads {}", path.display());
        std::thread::sleep(LOOK);
    }
}

/// Training of two workers on images that are read as they are needed.
fn of_images(folder: &Path) -> Run {
    const PNG: &[u8] = include_bytes!("../../data/tests/golden/bits.png");
    for class in ["train/a", "train/b", "val/a", "val/b"] {
        let class = folder.join("images").join(class);
        fs::create_dir_all(&class).unwrap();
        (0..8).for_each(|i| fs::write(class.join(format!("{i}.png")), PNG).unwrap());
    }
    let args = "--data images --epochs 1000 --hang-timeout step=5 --set data.name=image-folder --set data.size=16 --set model.head=2";
    let recipe = "cifar10-fast --nproc-per-node 2 --batch-size 2";
    Run::of(recipe, folder, &args.split(' ').collect::<Vec<_>>())
}

#[test]
fn a_worker_whose_loader_hangs_is_found_out_and_replaced() {
    let folder = tempfile::tempdir().unwrap();
    let mut run = of_images(folder.path());
    run.until_steps_of(2);
    let _writer = read_for_ever(&folder.path().join("images/train/a/0.png"));
    run.until(|event| event["event"] == "members" && event["world_size"] == 1);
    run.until_steps_of(2);
    run.until(|event| event["event"] == "epoch");
    let (status, said, told) = run.end(Some(Signal::SIGTERM));
    assert_eq!(status.code(), Some(143), "{said}");
    is_whole(&told, 4);
    let line = said.lines().find(|line| line.contains("another takes its place (restart 1 of 3)")).unwrap();
    assert!(
        line.contains(" hung (no progress in step ") && line.contains(" s, limit 5 s; its stack: "),
        "{said}"
    );
    let (_, file) = line.split_once("its stack: ").unwrap();
    let (file, _) = file.split_once(") after").unwrap();
    let stack = fs::read_to_string(file).unwrap();
    // It is a thread of the loader that reads.
    for part in [" hung (no progress in step ", "\"loader-", "in the kernel: "] {
        assert!(stack.contains(part), "{part} in: {stack}");
    }
    assert_eq!(said.matches(" hangs (").count(), 1, "{said}");
}

#[test]
fn a_worker_that_hangs_does_not_keep_a_run_from_making_room() {
    let folder = tempfile::tempdir().unwrap();
    let mut run = of_images(folder.path());
    run.until_steps_of(2);
    let _writer = read_for_ever(&folder.path().join("images/train/a/0.png"));
    // Where it hangs is written down while it waits to be killed: from here on it can't heed anything.
    while !run.out.join("hang/0").exists() {
        assert!(run.start.elapsed() < LIMIT);
        std::thread::sleep(LOOK);
    }
    let (status, said, told) = run.end(Some(Signal::SIGUSR1));
    assert_eq!(status.code(), Some(75), "{said}");
    assert_eq!(said.matches(" hangs (").count(), 1, "{said}");
    assert!(
        said.contains("SIGUSR1: stopped after ") && said.contains("--resume goes on from there"),
        "{said}"
    );
    is_whole(&told, 4);
}

#[test]
fn when_all_are_lost_the_newest_checkpoint_is_gone_on_with() {
    let folder = tempfile::tempdir().unwrap();
    let mut run = Run::start(folder.path(), &["--epochs", "1000", "--set", "train.checkpoint_every=5"]);
    run.until(|event| event["event"] == "checkpoint");
    run.kill_both();
    let resumed = run.until(|event| event["event"] == "resume");
    assert!(resumed["step"].as_u64().unwrap() >= 5, "{resumed}");
    run.until(|event| event["event"] == "epoch");
    let (status, said, _) = run.end(Some(Signal::SIGTERM));
    assert_eq!(status.code(), Some(143), "{said}");
    is_whole(&written(folder.path()), 16);
}

#[test]
fn a_run_that_loses_a_worker_ends_with_the_samples_and_nearly_the_weights_of_one_that_does_not() {
    let folder = tempfile::tempdir().unwrap();
    let mut accuracies = Vec::new();
    for lost in [false, true] {
        let folder = folder.path().join(lost.to_string());
        fs::create_dir(&folder).unwrap();
        let mut run = Run::start(&folder, &["--epochs", "6", "--seed", "3"]);
        if lost {
            run.until_steps_of(2);
            kill(run.worker(1), Signal::SIGKILL).unwrap();
        }
        let (status, said, told) = run.end(None);
        assert_eq!(status.code(), Some(0), "{said}");
        is_whole(&told, 16);
        let done = told.iter().find(|event| event["event"] == "done").unwrap();
        accuracies.push(done["test_accuracy"].as_f64().unwrap());
        assert!(folder.join("run/model.safetensors").exists());
    }
    assert!((accuracies[0] - accuracies[1]).abs() < 0.02, "{accuracies:?}");
}

#[test]
fn what_would_come_again_is_not_tried_again() {
    let folder = tempfile::tempdir().unwrap();
    let run = Run::start(folder.path(), &["--epochs", "2", "--set", "optimizer.lr=1e30"]);
    let (status, said, _) = run.end(None);
    assert_eq!(status.code(), Some(1), "{said}");
    assert!(said.contains("the loss is") && !said.contains("takes its place"), "{said}");
    assert!(said.contains("not started again: another worker would fail in the same way"), "{said}");
}

#[test]
fn without_restarts_a_lost_worker_ends_the_run() {
    let folder = tempfile::tempdir().unwrap();
    let mut run = Run::start(folder.path(), &["--epochs", "1000", "--max-restarts", "0"]);
    run.until_steps_of(2);
    kill(run.worker(1), Signal::SIGKILL).unwrap();
    let (status, said, _) = run.end(None);
    assert_eq!(status.code(), Some(1), "{said}");
    assert!(said.contains("error: rank 1 (pid ") && said.contains("was killed by SIGKILL"), "{said}");
}

/// They would wait for the lost part until they are killed.
#[test]
fn where_a_part_of_the_model_is_lost_for_good_the_others_end_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let sharded = ["--strategy", "fsdp", "--max-restarts", "1", "--epochs", "1000"];
    let args = [&sharded[..], &["--set", "train.checkpoint_every=5"]].concat();
    let mut run = Run::start(folder.path(), &args);
    for _ in 0..2 {
        run.until(|event| event["event"] == "checkpoint");
        run.until_steps_of(2);
        kill(run.worker(1), Signal::SIGKILL).unwrap();
    }
    let killed = Instant::now();
    let (status, said, _) = run.end(None);
    assert_eq!(status.code(), Some(1), "{said}");
    assert!(said.contains("all restarts of --max-restarts 1 are used"), "{said}");
    assert!(!said.contains("still running after the grace period"), "{said}");
    assert!(killed.elapsed() < Duration::from_secs(20), "{:?}: {said}", killed.elapsed());
}

/// A short campaign, which has to end with the bits of a run that is left alone; gives what it found.
fn campaign(args: &str) -> Value {
    let folder = tempfile::tempdir().unwrap();
    let mut command = phalanx(folder.path());
    command.args(["chaos", "--json"]).args(args.split(' '));
    let out = command.output().unwrap();
    assert_eq!(out.status.code(), Some(0), "{}", text(&out.stderr));
    let found: Value = serde_json::from_str(&text(&out.stdout)).unwrap();
    assert_eq!(found["same_bits"], true, "{found}");
    let count = |key: &str| found[key].as_object().unwrap().values().flat_map(Value::as_u64).sum::<u64>();
    // Where this system lets nobody cut the connections of others, that was said.
    assert_eq!((count("kinds") + count("skipped"), found["steps"].as_u64()), (8, Some(320)), "{found}");
    assert!(count("kinds") > count("skipped"), "{found}");
    assert!(
        found["memberships"].as_u64() > Some(0) && found["epochs_each_once"].as_u64() > Some(0),
        "{found}"
    );
    found
}

#[test]
fn a_campaign_of_faults_ends_with_the_bits_of_a_run_that_is_left_alone() {
    campaign("--faults 8 --seed 10");
}

#[test]
fn a_campaign_over_nodes_that_come_and_go_ends_with_the_bits_of_a_run_that_is_left_alone() {
    campaign("--faults 8 --seed 5 --nodes 1:3");
}
