//! Nodes that differ in what they should have alike: one whose clock is wrong, and one that doesn't share the file system.

use super::cluster::Cluster;
use super::user::text;
use super::{PHALANX, TRAIN, losses, srun};
use std::path::Path;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

/// Moves the wall clock of the process that it is loaded into.
const CLOCK: &str = r#"
#define _GNU_SOURCE
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
int clock_gettime(clockid_t which, struct timespec *time) {
    const int failed = (int)syscall(SYS_clock_gettime, which, time);
    if (!failed && which == CLOCK_REALTIME) time->tv_sec += atol(getenv("CLOCK_AHEAD"));
    return failed;
}
"#;

/// Nobody waits for what can be told at once.
const AT_ONCE: Duration = Duration::from_secs(30);

/// A command that runs this on the second node, where `"$@"` is what it runs elsewhere.
fn on_second(script: &str) -> String {
    format!("if [ $SLURM_NODEID = 1 ]; then {script}; fi; exec \"$@\"")
}

/// Runs a step of a task each on two nodes, through a script.
fn run(cluster: &Cluster, folder: &Path, script: &str, unchecked: bool, command: &[&str]) -> Output {
    let mut step =
        srun(cluster, folder, &["-N2", "--ntasks-per-node=1", "--wait=5", "sh", "-c", script, "sh"]);
    if unchecked {
        step.env("PHALANX_UNCHECKED", "1");
    }
    cluster.attempt(step.arg(PHALANX).args(command))
}

#[track_caller]
fn refused(out: &Output, begun: Instant, want: &[&str]) {
    let said = text(&out.stderr);
    assert_ne!(out.status.code(), Some(0), "{said}");
    assert!(want.iter().all(|word| said.contains(word)), "{said}");
    assert!(begun.elapsed() < AT_ONCE, "after {:.0?}: {said}", begun.elapsed());
}

/// So many seconds are told, but for the time that it takes to compare two clocks on a busy machine.
#[track_caller]
fn is_apart(out: &Output, seconds: u64) {
    let said = text(&out.stderr);
    let (_, told) = said.split_once("the clock of n2 is ").unwrap_or_else(|| panic!("{said}"));
    let told: u64 = told.split(' ').next().unwrap().parse().unwrap();
    assert!(told.abs_diff(seconds) < 10, "{said}");
}

#[test]
fn clocks_that_differ_are_refused_at_once_with_the_line_to_change() {
    let Some(cluster) = Cluster::start(2) else { return };
    let folder = tempfile::tempdir().unwrap();
    let (source, library) = (folder.path().join("clock.c"), folder.path().join("clock.so"));
    std::fs::write(&source, CLOCK).unwrap();
    let built = Command::new("cc").args(["-shared", "-fPIC", "-o"]).args([&library, &source]).status();
    let Ok(built) = built else {
        return eprintln!("skipped: there is no C compiler here");
    };
    assert!(built.success());
    let script =
        |ahead: i32| on_second(&format!("export CLOCK_AHEAD={ahead} LD_PRELOAD={}", library.display()));
    let want = ["s ahead of the first node's", "timedatectl", "#SBATCH --exclude=n2"];
    let agent = ["run", "--out", "logs", "--", "true"];
    for command in [&TRAIN[..], &agent] {
        let begun = Instant::now();
        let out = run(&cluster, folder.path(), &script(3600), false, command);
        refused(&out, begun, &want);
        is_apart(&out, 3600);
        // A few seconds are nothing, and who knows of more may say so.
        for (ahead, unchecked) in [(5, false), (3600, true)] {
            let out = run(&cluster, folder.path(), &script(ahead), unchecked, command);
            assert_eq!(out.status.code(), Some(0), "{command:?}: {}", text(&out.stderr));
        }
    }
    let begun = Instant::now();
    let out = run(&cluster, folder.path(), &script(-100), false, &TRAIN);
    refused(&out, begun, &["s behind the first node's"]);
    is_apart(&out, 100);
    let all = ["run", "--unchecked", "--out", "logs", "--", PHALANX];
    let all = [&all, &TRAIN[..], &["--out", "flag"]].concat();
    let out = run(&cluster, folder.path(), &script(3600), false, &all);
    assert_eq!(out.status.code(), Some(0), "{}", text(&out.stderr));
    assert_eq!(losses(&folder.path().join("flag")).len(), 6);
}

#[test]
fn a_file_system_that_is_not_shared_is_refused_at_once_with_the_line_to_change() {
    let Some(cluster) = Cluster::start(2) else { return };
    if !Command::new("unshare").args(["--mount", "true"]).status().is_ok_and(|status| status.success()) {
        return eprintln!("skipped: this user may not give a process mounts of its own");
    }
    let folder = tempfile::tempdir().unwrap();
    let kept = folder.path().join("run");
    std::fs::create_dir(&kept).unwrap();
    // A folder of the same name, which is another one.
    let mount = format!("mount -t tmpfs none {} && exec \"$@\"", kept.display());
    let script = on_second(&format!("exec unshare --mount sh -c '{mount}' sh \"$@\""));
    let want = [
        &format!("rank 1 on n2 doesn't see {} of rank 0 on n1", kept.display()),
        "that file system isn't shared",
        "--out /shared/run",
        "#SBATCH --chdir=/shared/folder",
    ];
    let train = [&TRAIN[..], &["--out", "run"]].concat();
    let agents = [&["run", "--out", "logs", "--", PHALANX], &train[..]].concat();
    for command in [&train, &agents] {
        let begun = Instant::now();
        refused(&run(&cluster, folder.path(), &script, false, command), begun, &want);
        let out = run(&cluster, folder.path(), &script, true, command);
        let said = text(&out.stderr);
        assert_eq!(out.status.code(), Some(0), "{said}");
        assert!(said.contains(&format!("note: {}", want[0])), "{said}");
        assert_eq!(losses(&kept).len(), 6);
        // Nothing of the look is left.
        let names = std::fs::read_dir(&kept).unwrap().map(|entry| entry.unwrap().file_name());
        assert!(names.into_iter().all(|name| !name.to_string_lossy().starts_with(".seen")));
    }
    // One that is shared is no news.
    let out = run(&cluster, folder.path(), &on_second(":"), false, &train);
    assert_eq!(out.status.code(), Some(0), "{}", text(&out.stderr));
}
