//! Workers that make no progress, in programs with a loop of their own.

use super::nodes::Site;
use super::run;
use super::user::{phalanx, text};
use phalanx::comm::{Rank, ReduceOp};
use phalanx::{Section, Worker};
use std::fs;
use std::path::Path;
use std::process::{Command, Output};
use std::time::Duration;

/// Runs a test of this file as two workers, each of which finds its name in the environment.
fn as_workers(folder: &Path, body: &str, flags: &[&str]) -> Output {
    let mut command: Command = phalanx(folder);
    command.args(["run", "--nproc-per-node", "2", "--out", "out", "--no-python"]).args(flags).arg("--");
    command.arg(std::env::current_exe().unwrap()).args(["--exact", body, "--nocapture"]);
    command.env("PHALANX_TEST", body).env("RUST_BACKTRACE", "0").output().unwrap()
}

fn is_worker() -> bool {
    std::env::var_os("PHALANX_TEST").is_some()
}

#[inline(never)]
fn spins_for_ever() {
    while std::hint::black_box(true) {}
}

/// Five steps of two workers, of which rank 1 never ends the fourth when it is started first.
fn five_steps() {
    let worker = Worker::from_env().unwrap();
    let (group, restarts) = (worker.group(), std::env::var("TORCHELASTIC_RESTART_COUNT").unwrap());
    for step in 0..5 {
        let step_goes_on = worker.pulse().enter(Section::Step(step));
        if step == 3 && restarts == "0" && group.rank().0 == 1 {
            spins_for_ever();
        }
        if group.all_reduce(&mut [1.0f32], ReduceOp::Sum).is_err() {
            // Whoever only loses the other waits for the end that the launcher brings, which is no step: on a busy machine the
            // other node's agent may take longer than a step may to say what it has found.
            drop(step_goes_on);
            std::thread::sleep(Duration::from_secs(60));
        }
    }
    println!("rank {} made 5 steps", group.rank());
}

#[test]
fn a_worker_that_spins_is_killed_with_its_stack_and_all_are_started_again() {
    if is_worker() {
        return five_steps();
    }
    let folder = tempfile::tempdir().unwrap();
    let body = "hang::a_worker_that_spins_is_killed_with_its_stack_and_all_are_started_again";
    let out = as_workers(folder.path(), body, &["--max-restarts", "1", "--hang-timeout", "step=1"]);
    let message = text(&out.stderr);
    assert_eq!(out.status.code(), Some(0), "{message}");
    assert_eq!(text(&out.stdout).matches("made 5 steps").count(), 2, "{message}");
    assert!(message.contains("rank 1 hangs (no progress in step 3 for "), "{message}");
    let path = folder.path().canonicalize().unwrap().join("out/hang/0/rank-1.txt");
    let end = format!("limit 1 s; its stack: {}) after", path.display());
    assert!(
        message.lines().any(|line| line.starts_with("  0: rank 1 (pid") && line.contains(&end)),
        "{message}"
    );
    let stack = fs::read_to_string(path).unwrap();
    // On a busy machine a program with as many symbols as this one may be too late.
    let has_answered = stack.contains(" trains:\n\nthread ");
    assert!(!has_answered || stack.contains("spins_for_ever"), "{stack}");
    assert!(stack.contains(": R (running)"), "{stack}");
}

#[test]
fn a_worker_that_spins_on_another_node_is_found_there_and_told_to_all() {
    if is_worker() {
        return five_steps();
    }
    let body = "hang::a_worker_that_spins_on_another_node_is_found_there_and_told_to_all";
    let site = Site::new(&["--nnodes", "2", "--max-restarts", "1", "--hang-timeout", "step=1"]);
    for (rank, agent) in site.two_of_test(body).into_iter().enumerate() {
        let (code, out, said) = agent.end();
        assert_eq!(code, 0, "{said}");
        assert!(out.contains(&format!("rank {rank} made 5 steps")), "{out}{said}");
        assert!(
            said.contains("  0: rank 1 (pid ") && said.contains(" hung (no progress in step 3 for "),
            "{said}"
        );
        assert_eq!(said.contains("rank 1 hangs ("), rank == 1, "{said}");
        assert!(!said.contains("rank 0 hangs"), "{said}");
    }
    assert!(site.folder("b").join("out/hang/0/rank-1.txt").exists());
}

#[test]
fn where_workers_wait_for_each_other_none_is_killed() {
    if is_worker() {
        let worker = Worker::from_env().unwrap();
        let _step = worker.pulse().enter(Section::Step(0));
        let other = Rank(1 - worker.group().rank().0);
        let group = worker.group().with_timeout(Duration::from_secs(3));
        let error = group.receive(&mut [0u8; 4], other).unwrap_err();
        println!("{error}");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let body = "hang::where_workers_wait_for_each_other_none_is_killed";
    let out = as_workers(folder.path(), body, &["--hang-timeout", "1"]);
    let message = text(&out.stderr);
    assert_eq!(out.status.code(), Some(0), "{message}");
    assert_eq!(message.matches("all workers here wait for other ranks for ").count(), 1, "{message}");
}

#[test]
fn programs_that_are_not_ours_are_never_judged() {
    let folder = tempfile::tempdir().unwrap();
    let out = run(folder.path(), "2", &["--hang-timeout", "0.3"], "sleep 1.5; test -n \"$PHALANX_PULSE_FD\"");
    assert_eq!(out.status.code(), Some(0), "{}", text(&out.stderr));
    let out = run(folder.path(), "2", &["--hang-timeout", "off"], "test -z \"$PHALANX_PULSE_FD\"");
    assert_eq!(out.status.code(), Some(0), "{}", text(&out.stderr));
}
