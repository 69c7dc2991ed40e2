//! Runs under a real Slurm of several nodes, which the tests start on this machine; without Slurm they say that they are skipped.
//! What needs no cluster is tested here as well.

mod cluster;
mod ends;
#[path = "../../../phalanx/tests/gpu/fake.rs"]
mod fake;
mod gpus;
mod lint;
mod nodes;
mod scaling;
mod trouble;
#[path = "../user/mod.rs"]
mod user;

use cluster::Cluster;
use serde_json::Value;
use std::fmt::Display;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};
use user::{phalanx, text};

/// `phalanx` by its path, as nodes start it.
const PHALANX: &str = env!("CARGO_BIN_EXE_phalanx");

/// `srun` in this folder, with the user's own secret and data there.
fn srun(cluster: &Cluster, folder: &Path, args: &[&str]) -> std::process::Command {
    let mut command = cluster.command("srun");
    command
        .current_dir(folder)
        .env("XDG_CONFIG_HOME", folder.join("config"))
        .env("PHALANX_CACHE", folder.join("cache"));
    ["RANK", "WORLD_SIZE", "OMP_NUM_THREADS", "PHALANX_SECRET_FILE"].iter().for_each(|name| {
        command.env_remove(name);
    });
    command.args(args);
    command
}

/// A training run of a few steps.
const TRAIN: [&str; 9] =
    ["train", "mnist-mini", "--json", "--steps", "6", "--batch-size", "8", "--seed", "3"];

/// The loss of each step that `events.jsonl` tells of.
fn losses(run: &Path) -> Vec<String> {
    let text = fs::read_to_string(run.join("events.jsonl")).unwrap_or_default();
    let events = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    events.filter(|event| event["event"] == "step").map(|event| event["loss"].to_string()).collect()
}

#[test]
fn tasks_of_a_step_are_ranks_of_a_run() {
    let Some(cluster) = Cluster::start(3) else { return };
    let folder = tempfile::tempdir().unwrap();
    // Three nodes, with an agent each, and with a task each: the same ranks.
    let mut step = srun(&cluster, folder.path(), &["-N3", "--ntasks-per-node=1", PHALANX]);
    let out = cluster.attempt(step.args(TRAIN).args(["--out", "three"]));
    assert_eq!(out.status.code(), Some(0), "{}\n{}", text(&out.stderr), cluster.logs());
    let start: Value = serde_json::from_str(text(&out.stdout).lines().next().unwrap()).unwrap();
    assert_eq!(start["world_size"].as_u64(), Some(3));
    let mut step = srun(&cluster, folder.path(), &["-N3", "--ntasks-per-node=1", PHALANX]);
    step.args(["run", "--out", "three-logs", "--", PHALANX]).args(TRAIN).args(["--out", "three-agents"]);
    let out = cluster.attempt(&mut step);
    assert_eq!(out.status.code(), Some(0), "{}\n{}", text(&out.stderr), cluster.logs());
    assert_eq!(losses(&folder.path().join("three")).len(), 6);
    assert_eq!(losses(&folder.path().join("three")), losses(&folder.path().join("three-agents")));
    // A step of tasks: each is a worker, and the first of them serves the coordinator.
    let mut step = srun(&cluster, folder.path(), &["-N2", "--ntasks-per-node=2", PHALANX]);
    step.args(TRAIN).args(["--out", "tasks"]);
    let out = cluster.attempt(&mut step);
    assert_eq!(out.status.code(), Some(0), "{}\n{}", text(&out.stderr), cluster.logs());
    let start: Value = serde_json::from_str(text(&out.stdout).lines().next().unwrap()).unwrap();
    assert_eq!((start["event"].as_str(), start["world_size"].as_u64()), (Some("start"), Some(4)));
    // A step of agents, each of which starts two workers.
    let mut step = srun(&cluster, folder.path(), &["-N2", "--ntasks-per-node=1", PHALANX]);
    step.args(["run", "--nproc-per-node", "2", "--out", "agents-logs", "--", PHALANX]).args(TRAIN);
    let out = cluster.attempt(step.args(["--out", "agents"]));
    assert_eq!(out.status.code(), Some(0), "{}\n{}", text(&out.stderr), cluster.logs());
    // The same ranks make the same steps.
    assert_eq!(losses(&folder.path().join("tasks")).len(), 6);
    assert_eq!(losses(&folder.path().join("tasks")), losses(&folder.path().join("agents")));

    // Several agents a node would each start all workers.
    let mut step = srun(&cluster, folder.path(), &["-N2", "--ntasks-per-node=2", PHALANX]);
    let out = cluster.attempt(step.args(["run", "--nproc-per-node", "2", "--", "true"]));
    let said = text(&out.stderr);
    assert!(said.contains("hint: srun --ntasks-per-node=1 phalanx run --nproc-per-node 2"), "{said}");
    assert_eq!(out.status.code(), Some(2), "{said}");
    // So would more nodes than the step has be waited for.
    let mut step = srun(&cluster, folder.path(), &["-N2", "--ntasks-per-node=1", PHALANX]);
    let out = cluster.attempt(step.args(["run", "--nnodes", "3", "--", "true"]));
    assert!(
        text(&out.stderr).contains("--nnodes 3: this step of Slurm has 2 nodes"),
        "{}",
        text(&out.stderr)
    );

    // A port that somebody else has is told at once, with what to set.
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let begun = Instant::now();
    let mut step = srun(&cluster, folder.path(), &["-N2", "--ntasks-per-node=1", "--wait=3", PHALANX]);
    let out = cluster.attempt(step.env("MASTER_PORT", &port).args(TRAIN).args(["--out", "taken"]));
    let said = text(&out.stderr);
    assert!(
        said.contains(&port) && said.contains("MASTER_PORT") && begun.elapsed() < Duration::from_secs(60),
        "{said}"
    );
}

/// Waits until `done` says so; `what` is asked only where it doesn't in time.
fn until<W: Display>(what: impl Fn() -> W, cluster: &Cluster, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(
            start.elapsed() < Duration::from_secs(120),
            "{}: {}\n{}",
            what(),
            cluster.run("squeue", &[]),
            cluster.logs()
        );
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// Steps of a job that is disturbed twice.
const STEPS: &str = "1500";

#[test]
fn a_job_is_drained_requeued_and_goes_on_to_its_end() {
    let Some(cluster) = Cluster::start(2) else { return };
    let folder = tempfile::tempdir().unwrap();
    let submit = |args: &[&str]| {
        let mut command = cluster.command(PHALANX);
        command.current_dir(folder.path()).env("XDG_CONFIG_HOME", folder.path().join("config"));
        command.args(["slurm", "submit", "--nodes", "2", "--nproc-per-node", "1", "--cpus-per-node", "2"]);
        command.args(["--out", "run", "--json", "--time", "1h"]).args(args);
        command.args(["mnist-mini", "--batch-size", "8", "--steps", STEPS, "--seed", "3"]);
        command.args(["--set", "train.checkpoint_every=1000000"]);
        command
    };
    let mut following = submit(&[]).stdout(std::process::Stdio::piped()).spawn().unwrap();
    let events = || fs::read_to_string(folder.path().join("run/events.jsonl")).unwrap_or_default();
    let last = || told_steps(&events()).last().copied().unwrap_or(0);
    until(
        || "the job doesn't begin",
        &cluster,
        || {
            let job = cluster.run("squeue", &["-h", "-o", "%A"]).trim().to_owned();
            let file = fs::read_to_string(folder.path().join(format!("mnist-mini-{job}.out")));
            let file = file.unwrap_or_default();
            assert!(!file.contains("error: "), "{file}");
            last() > 20
        },
    );
    let job = cluster.run("squeue", &["-h", "-o", "%A"]).trim().to_owned();
    // What Slurm sends ahead of the end, and whoever takes the machine back.
    cluster.run("scancel", &["--signal=USR1", &job]);
    until(
        || "the job isn't requeued",
        &cluster,
        || cluster.run("scontrol", &["show", "job", &job]).contains("Restarts=1"),
    );
    // A machine that is wanted back: SIGTERM, and SIGKILL five seconds later.
    until(|| "the job isn't started again", &cluster, || events().contains("\"event\":\"resume\""));
    let resumed = last();
    until(|| "the job doesn't go on", &cluster, || last() > resumed + 20);
    cluster.run("scontrol", &["requeue", &job]);
    let status = following.wait().unwrap();
    let mut told = String::new();
    std::io::Read::read_to_string(&mut following.stdout.take().unwrap(), &mut told).unwrap();
    let output = fs::read_to_string(folder.path().join(format!("mnist-mini-{job}.out"))).unwrap();
    assert_eq!(status.code(), Some(0), "{told}\n{output}\n{}", cluster.logs());
    assert!(output.contains("--resume goes on from there"), "{output}");
    assert!(told.contains("\"submitted\"") && told.contains("after 2 restarts"), "{told}");
    assert!(
        events().contains("\"event\":\"resume\"") && events().contains("\"event\":\"done\""),
        "{}",
        events()
    );
    // Nothing was lost, and nothing made twice: it has come to the bits of one that was left alone.
    let mut whole = phalanx(folder.path());
    whole.args([
        "train",
        "mnist-mini",
        "--batch-size",
        "8",
        "--steps",
        STEPS,
        "--seed",
        "3",
        "--out",
        "whole",
    ]);
    let out = whole.output().unwrap();
    assert_eq!(out.status.code(), Some(0), "{}", text(&out.stderr));
    let model = |run: &str| fs::read(folder.path().join(run).join("model.safetensors")).unwrap();
    assert!(model("run") == model("whole"), "the weights differ");
    let numbers: Vec<u64> = told_steps(&events());
    assert!(numbers.is_sorted_by(|a, b| a < b), "{numbers:?}");
}

/// Which steps `events.jsonl` tells of.
fn told_steps(events: &str) -> Vec<u64> {
    let events = events.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    events.filter(|event| event["event"] == "step").map(|event| event["step"].as_u64().unwrap()).collect()
}

#[test]
fn a_job_that_waits_says_why_and_one_that_is_gone_too() {
    let Some(cluster) = Cluster::start(2) else { return };
    let folder = tempfile::tempdir().unwrap();
    cluster.run("scontrol", &["update", "node=n2", "state=drain", "reason=bad disk"]);
    let mut command = cluster.command(PHALANX);
    command.current_dir(folder.path()).args(["slurm", "submit", "--nodes", "2", "--no-follow", "sleep", "1"]);
    let out = cluster.attempt(&mut command);
    assert_eq!(out.status.code(), Some(0), "{}", text(&out.stderr));
    let job = cluster.run("squeue", &["-h", "-o", "%A"]).trim().to_owned();
    let mut follow = cluster.command(PHALANX);
    follow.args(["slurm", "follow", &job, "--cancel"]).stderr(std::process::Stdio::piped());
    let mut follow = follow.spawn().unwrap();
    let mut said = std::io::BufReader::new(follow.stderr.take().unwrap());
    let mut all = String::new();
    while !all.contains("n2 is drained (bad disk): scontrol update node=n2 state=resume") {
        let more = std::io::BufRead::read_line(&mut said, &mut all).unwrap();
        assert!(more > 0, "{all}");
    }
    assert!(all.contains(&format!("job {job}: waits")), "{all}");
    // Ctrl-C cancels where that was asked for.
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(follow.id() as i32), nix::sys::signal::Signal::SIGINT)
        .unwrap();
    assert_eq!(follow.wait().unwrap().code(), Some(130));
    assert_eq!(cluster.run("squeue", &["-h", "-o", "%A"]), "");
    let out = cluster.command(PHALANX).args(["slurm", "follow", "9999"]).output().unwrap();
    assert!(
        text(&out.stderr).contains("job 9999 isn't known to the controller\nhint: sacct"),
        "{}",
        text(&out.stderr)
    );
    // What no node has is told with where to look.
    let mut command = cluster.command(PHALANX);
    let out = cluster.attempt(command.args(["slurm", "submit", "--partition", "no-such", "sleep", "1"]));
    assert_eq!(out.status.code(), Some(1));
    assert!(
        text(&out.stderr).contains("sbatch: ")
            && text(&out.stderr).contains("hint: sinfo -s names the partitions"),
        "{}",
        text(&out.stderr)
    );
}

#[test]
fn a_dry_run_prints_the_script_and_needs_no_slurm() {
    let folder = tempfile::tempdir().unwrap();
    let check = |args: &[&str], code: i32, words: &[&str]| {
        let mut command = phalanx(folder.path());
        let out = command.env("PATH", "/usr/bin:/bin").args(["slurm", "submit"]).args(args).output().unwrap();
        let said = text(&out.stdout) + &text(&out.stderr);
        assert_eq!(out.status.code(), Some(code), "{args:?}: {said}");
        assert!(words.iter().all(|word| said.contains(word)), "{args:?}: {said}");
    };
    let dry = |more: &[&'static str]| [&["--dry-run"], more].concat();
    check(
        &dry(&["--nodes", "2", "--gpus-per-node", "8", "--time", "8h", "mnist", "--epochs", "3"]),
        0,
        &[
            "#SBATCH --nodes=2\n",
            "#SBATCH --gpus-per-node=8\n",
            "#SBATCH --time=08:00:00\n",
            "--nproc-per-node=8",
            "train mnist --epochs 3 --device=cuda --resume",
        ],
    );
    check(
        &dry(&["--gpus-per-node", "2", "mnist", "--set", "parallel.strategy=place"]),
        2,
        &["--gpus-per-node 2: --device cuda: the strategy place", "hint: take --strategy"],
    );
    check(&dry(&["--elastic", "1:4", "sleep", "9"]), 0, &["--nodes=1-4", "run --nnodes=1:4", "    sleep 9"]);
    check(&dry(&["--json", "mnist"]), 0, &["{\"script\":\"#!/bin/bash\\n"]);
    check(&dry(&["no-such-thing"]), 2, &["neither a recipe nor a program", "mnist-mini"]);
    check(&dry(&["mnist", "--out", "x"]), 2, &["--out: ", "before the recipe"]);
    check(
        &dry(&["mnist", "--nproc-per-node", "4"]),
        2,
        &["hint: give it before the recipe", "submit --nproc-per-node 4 mnist"],
    );
    check(&dry(&["mnist", "--max_restarts=0"]), 2, &["--max-restarts 0: ", "before the recipe"]);
    check(&dry(&["mnist", "--hang-timeout", "off"]), 2, &["PHALANX_HANG_TIMEOUT=off phalanx slurm submit"]);
    check(&dry(&["--elastic", "4:1", "mnist"]), 2, &["--elastic 4:1"]);
    check(&dry(&["--nodes", "0", "mnist"]), 2, &["--nodes 0", "at least one node"]);
    check(&dry(&["--elastic", "0:2", "mnist"]), 2, &["--elastic 0:2", "at least one node"]);
    check(&dry(&["--time", "0s", "mnist"]), 2, &["--time 0s", "no limit"]);
    check(&dry(&["mnist", "--epochs", "x"]), 2, &["'x'", "--epochs"]);
    check(&dry(&["mnist", "--set", "optimizer.lr=nan"]), 2, &["optimizer.lr"]);
    check(&dry(&["--time", "8", "mnist"]), 2, &["90s, 1h30m or 2d"]);
    check(&dry(&["--array", "a-b", "mnist"]), 2, &["--array a-b"]);
    check(&dry(&["--nproc-per-node", "0", "mnist"]), 2, &["--nproc-per-node 0"]);
    check(&dry(&["--name", "a b", "mnist"]), 2, &["--name \"a b\""]);
    check(&dry(&["--array", "", "mnist"]), 2, &["--array : "]);
    check(&dry(&["--out", "", "mnist"]), 2, &["--out \"\": must be a folder"]);
    check(&dry(&["--sbatch=--test-only", "mnist"]), 2, &["hint: phalanx slurm submit --dry-run"]);
    check(&dry(&["--partition", "a\nrm", "mnist"]), 2, &["--partition \"a\\nrm\"", "hint: sinfo -s"]);
    check(&dry(&["--sbatch", "account=lab", "mnist"]), 2, &["with its dashes"]);
}

#[test]
fn without_slurm_its_commands_are_missing_and_that_is_said() {
    let folder = tempfile::tempdir().unwrap();
    for args in [&["slurm", "submit", "/bin/sleep", "1"][..], &["slurm", "follow", "7"]] {
        let out = phalanx(folder.path()).env("PATH", folder.path()).args(args).output().unwrap();
        let said = text(&out.stderr);
        assert_eq!(out.status.code(), Some(1), "{said}");
        assert!(said.contains("is not on this machine\nhint: this takes the commands of Slurm"), "{said}");
    }
}
