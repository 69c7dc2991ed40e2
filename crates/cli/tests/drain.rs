//! Runs of `phalanx train` that end before their machine is taken away, and go on later: by a signal, or by themselves when their
//! time is nearly up.

mod user;

use serde_json::Value;
use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};
use user::{LOOK, phalanx, text};

/// Training of a thousand epochs, or to step `steps`, whose checkpoints are only those that are asked for.
fn training(folder: &Path, out: &str, steps: Option<u64>) -> Command {
    let mut command = phalanx(folder);
    command.args(["train", "mnist-mini", "--json", "--seed", "4", "--batch-size", "10", "--epochs", "1000"]);
    command.args(["--set", "train.checkpoint_every=1000000", "--resume", "--out", out]);
    command.args(steps.map(|steps| format!("--steps={steps}")));
    ["PHALANX_END_TIME", "SLURM_JOB_END_TIME", "SLURM_JOB_ID"].iter().for_each(|name| {
        command.env_remove(name);
    });
    command
}

/// Every step and epoch that `events.jsonl` tells of, but for times.
fn told(run: &Path) -> Vec<[String; 3]> {
    let text = fs::read_to_string(run.join("events.jsonl")).unwrap();
    let told = |line: &str| {
        let event: Value = serde_json::from_str(line).unwrap();
        let keys = match event["event"].as_str() {
            Some("step") => ["step", "loss", "samples"],
            Some("epoch") => ["epoch", "test_loss", "test_accuracy"],
            _ => return None,
        };
        Some(keys.map(|key| event[key].to_string()))
    };
    text.lines().filter_map(told).collect()
}

/// How a run has ended: with the code that says so, after how many steps, and where its files are.
fn drained(folder: &Path, status: ExitStatus, said: &str, why: &str) -> (u64, PathBuf) {
    assert_eq!(status.code(), Some(75), "{said}");
    let words = format!("{why}: stopped after ");
    let line = said.lines().find_map(|line| line.strip_prefix(&words)).unwrap_or_else(|| panic!("{said}"));
    let steps = line.strip_suffix(" steps; --resume goes on from there").unwrap_or_else(|| panic!("{said}"));
    assert!(!said.contains("error") && !said.contains("restart"), "{said}");
    let run = folder.join("drained");
    assert!(run.join(format!("checkpoints/step-{steps}/manifest.json")).exists());
    assert!(!run.join("model.safetensors").exists());
    (steps.parse().unwrap(), run)
}

/// Goes on with it, and holds it against one that was left alone.
fn goes_on(folder: &Path, (steps, run): (u64, PathBuf)) {
    for out in ["drained", "whole"] {
        let out = training(folder, out, Some(steps + 5)).output().unwrap();
        assert!(out.status.success(), "{}", text(&out.stderr));
    }
    assert!(told(&run).len() as u64 >= steps + 5);
    assert_eq!(told(&run), told(&folder.join("whole")));
}

/// Seconds since 1970, so many from now.
fn end(seconds: u64) -> String {
    (std::time::UNIX_EPOCH.elapsed().unwrap().as_secs() + seconds).to_string()
}

#[test]
fn a_run_whose_time_is_nearly_up_keeps_its_last_step_and_asks_to_be_started_again() {
    let folder = tempfile::tempdir().unwrap();
    let out = training(folder.path(), "drained", None)
        .args(["--time-limit", "3s", "--time-margin", "1s"])
        .output()
        .unwrap();
    let steps = drained(folder.path(), out.status, &text(&out.stderr), "the time is nearly up");
    goes_on(folder.path(), steps);
}

#[test]
fn the_end_of_the_time_is_heard_from_the_environment_and_from_slurm() {
    // A command as an old Slurm has it, which tells its jobs nothing.
    let bin = tempfile::tempdir().unwrap();
    let squeue = bin.path().join("squeue");
    fs::write(&squeue, "#!/bin/sh\ntest \"$*\" = '--noheader --format=%L --jobs 7' && echo 0:03\n").unwrap();
    fs::set_permissions(&squeue, fs::Permissions::from_mode(0o755)).unwrap();
    let path = format!("{}:{}", bin.path().display(), std::env::var("PATH").unwrap());
    let later = end(1000);
    let own = [("RANK", "0"), ("WORLD_SIZE", "1")];
    let ways = |soon: &str| {
        [
            vec![("PHALANX_END_TIME", soon.to_owned()), ("SLURM_JOB_END_TIME", later.clone())],
            vec![("SLURM_JOB_END_TIME", soon.to_owned())],
            vec![("SLURM_JOB_ID", "7".to_owned()), ("PATH", path.clone())],
        ]
    };
    for (way, workers) in [(0, 2), (1, 2), (2, 2), (1, 1), (2, 1)] {
        let folder = tempfile::tempdir().unwrap();
        let mut command = training(folder.path(), "drained", None);
        command.args(["--time-margin", "1s"]).envs(ways(&end(3))[way].clone());
        if workers == 1 {
            // A worker without an agent of ours.
            command.envs(own);
        }
        let out = command.output().unwrap();
        drained(folder.path(), out.status, &text(&out.stderr), "the time is nearly up");
    }
}

/// The time of a run isn't begun anew with workers that take the place of others.
#[test]
fn a_limit_counts_from_the_start_of_the_launcher() {
    let folder = tempfile::tempdir().unwrap();
    let mut command = training(folder.path(), "drained", None);
    command.envs([("RANK", "0"), ("WORLD_SIZE", "1")]).env("PHALANX_START_TIME", end(0));
    let begun = Instant::now();
    std::thread::sleep(Duration::from_secs(4));
    let out = command.args(["--time-limit", "8s", "--time-margin", "1s"]).output().unwrap();
    let took = begun.elapsed();
    drained(folder.path(), out.status, &text(&out.stderr), "the time is nearly up");
    assert!(took < Duration::from_secs(10), "{took:?}");

    let mut command = phalanx(folder.path());
    command.args(["run", "--no-prefix", "--", "sh", "-c", "echo $PHALANX_START_TIME"]);
    let [before, told, after] =
        [end(0), text(&command.output().unwrap().stdout), end(0)].map(|s| s.trim().parse::<u64>());
    assert!((before.unwrap()..=after.unwrap()).contains(&told.unwrap()));
}

/// A run that has told of step 3, with the rest of what it prints.
fn begun(mut command: Command) -> (Child, BufReader<std::process::ChildStdout>) {
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    while !line.starts_with("{\"event\":\"step\",\"step\":3,") {
        line.clear();
        assert!(lines.read_line(&mut line).unwrap() > 0, "the run has ended");
    }
    (child, lines)
}

#[test]
fn sigusr1_to_the_agent_or_to_any_worker_ends_all_and_asks_to_be_started_again() {
    // To the agent, as in `--signal=B:USR1@90` and a script that passes it on; to one that has no agent; to one of two workers.
    for (workers, to) in [(2, None), (1, None), (2, Some(1))] {
        let folder = tempfile::tempdir().unwrap();
        let mut command = training(folder.path(), "drained", None);
        if workers == 1 {
            command.envs([("RANK", "0"), ("WORLD_SIZE", "1")]);
        }
        let (child, mut lines) = begun(command);
        let pid = match to {
            None => child.id().to_string(),
            Some(rank) => user::worker(&folder.path().join("drained"), rank).to_string(),
        };
        assert!(Command::new("kill").args(["-USR1", &pid]).status().unwrap().success());
        lines.read_to_end(&mut Vec::new()).unwrap();
        let out = child.wait_with_output().unwrap();
        let steps = drained(folder.path(), out.status, &text(&out.stderr), "SIGUSR1");
        if to.is_some() {
            goes_on(folder.path(), steps);
        }
    }
}

#[test]
fn sigterm_to_a_worker_ends_the_run_whatever_the_others_have_heard_by_then() {
    for rank in [0, 1, 1] {
        let folder = tempfile::tempdir().unwrap();
        let (child, mut lines) = begun(training(folder.path(), "ended", None));
        let pid = user::worker(&folder.path().join("ended"), rank).to_string();
        assert!(Command::new("kill").args(["-TERM", &pid]).status().unwrap().success());
        lines.read_to_end(&mut Vec::new()).unwrap();
        let out = child.wait_with_output().unwrap();
        let said = text(&out.stderr);
        assert!(out.status.code() == Some(1) && said.contains("SIGTERM: stopped after"), "{said}");
        assert!(
            !said.contains("starting all workers again") && !said.contains("another takes its place"),
            "{said}"
        );
    }
}

#[test]
fn sigusr1_that_comes_before_workers_are_ready_is_not_lost() {
    let folder = tempfile::tempdir().unwrap();
    let child = training(folder.path(), "drained", None)
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // The first log is opened right before the worker it belongs to is started.
    let log = folder.path().join("drained/logs/0/1.out");
    let began = Instant::now();
    while !log.exists() {
        assert!(began.elapsed() < Duration::from_secs(60), "no worker is started");
        std::thread::sleep(LOOK);
    }
    assert!(Command::new("kill").args(["-USR1", &child.id().to_string()]).status().unwrap().success());
    let out = child.wait_with_output().unwrap();
    drained(folder.path(), out.status, &text(&out.stderr), "SIGUSR1");
}
