//! How a run stops: by a failure, by a signal, by the end of the launcher, and what it leaves behind.

use super::{run, text};
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const LIMIT: Duration = Duration::from_secs(30);

fn wait(child: &mut Child) -> i32 {
    let start = Instant::now();
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return status.code().unwrap_or(-1);
        }
        assert!(start.elapsed() < LIMIT, "the run doesn't end");
        std::thread::yield_now();
    }
}

fn alive(pid: &str) -> bool {
    // A zombie is dead, only not yet buried.
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit(')').next().is_some_and(|rest| !rest.trim().is_empty() && !rest.trim_start().starts_with('Z'))
}

#[test]
fn the_first_failure_stops_the_others_and_is_reported() {
    let folder = tempfile::tempdir().unwrap();
    let check = |script: &str, words: &[&str]| {
        let start = Instant::now();
        let out = run(folder.path(), "2", &[], script);
        let message = text(&out.stderr);
        assert_eq!(out.status.code(), Some(1), "{message}");
        assert!(words.iter().all(|word| message.contains(word)), "{message}");
        assert!(start.elapsed() < LIMIT, "the other worker was not stopped");
    };
    check(
        "test $RANK = 0 && exec sleep 60; echo the reason >&2; exit 7",
        &["rank 1 (pid", "exited with code 7", "    the reason", "logs: out/logs"],
    );
    check("test $RANK = 1 && exec sleep 60; kill -9 $$", &["rank 0 (pid", "was killed by SIGKILL"]);
    check("test $RANK = 1 && exec sleep 60; kill -SEGV $$", &["rank 0 (pid", "was killed by SIGSEGV"]);
}

#[test]
fn a_worker_that_ignores_sigterm_is_killed_after_the_grace_period() {
    let folder = tempfile::tempdir().unwrap();
    let script =
        "test $RANK = 1 && { read line < go; exit 1; }; trap '' TERM; echo > go; while :; do sleep 1; done";
    assert!(Command::new("mkfifo").arg(folder.path().join("go")).status().unwrap().success());
    let out = run(folder.path(), "2", &["--shutdown-timeout", "0.3"], script);
    let message = text(&out.stderr);
    assert_eq!(out.status.code(), Some(1), "{message}");
    assert!(message.contains("killing: rank 0") && message.contains("rank 1 (pid"), "{message}");
}

/// Starts a launcher of two workers that run this script. Each says the ids of its processes on one line.
fn two(folder: &Path, flags: &[&str], script: &str) -> (Child, Vec<String>) {
    // What started the tests may ignore signals; a run would, too.
    let mut command = Command::new("env");
    command.arg("--default-signal").arg(env!("CARGO_BIN_EXE_phalanx")).current_dir(folder);
    command.args(["run", "--nproc-per-node", "2", "--no-prefix", "--out", "out"]).args(flags);
    command.args(["--", "sh", "-c", script]).env_remove("RANK");
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let lines = BufReader::new(child.stdout.as_mut().unwrap()).lines().take(2);
    let pids =
        lines.flat_map(|line| line.unwrap().split(' ').map(str::to_owned).collect::<Vec<_>>()).collect();
    (child, pids)
}

/// Workers with a process in the background, which only a signal ends.
const WAITING: &str = "sleep 60 & echo $$ $!; wait";

fn kill(child: &Child, signal: &str) {
    assert!(Command::new("kill").args([signal, &child.id().to_string()]).status().unwrap().success());
}

fn all_gone(pids: &[String]) {
    let start = Instant::now();
    while pids.iter().any(|pid| alive(pid)) {
        assert!(start.elapsed() < LIMIT, "orphans: {pids:?}");
        std::thread::yield_now();
    }
}

#[test]
fn signals_reach_the_workers_and_decide_the_exit_code() {
    for (signal, code) in [("-INT", 130), ("-TERM", 143)] {
        let folder = tempfile::tempdir().unwrap();
        let (mut child, pids) = two(folder.path(), &[], WAITING);
        assert_eq!(pids.iter().filter(|pid| alive(pid)).count(), 4);
        // A shell without a terminal ignores SIGINT in what it runs in the background, so a second one is owed to some.
        for _ in 0..2 {
            kill(&child, signal);
        }
        assert_eq!(wait(&mut child), code, "{signal}");
        assert!(!pids.iter().any(|pid| alive(pid)), "{signal} left a worker");
    }
}

#[test]
fn a_launcher_that_nobody_listens_to_still_stops_its_workers() {
    let folder = tempfile::tempdir().unwrap();
    let (mut child, pids) = two(folder.path(), &[], WAITING);
    drop((child.stdout.take(), child.stderr.take()));
    kill(&child, "-TERM");
    assert_eq!(wait(&mut child), 143);
    assert!(!pids.iter().any(|pid| alive(pid)), "SIGTERM left a worker");
}

#[test]
fn no_orphan_is_left_when_the_launcher_is_killed() {
    let folder = tempfile::tempdir().unwrap();
    let (mut child, pids) = two(folder.path(), &[], "echo $$; exec sleep 60");
    child.kill().unwrap();
    child.wait().unwrap();
    all_gone(&pids);
}
