//! `phalanx bench` as a user has it.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

fn bench(temporary: &Path, args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_phalanx"));
    command.arg("bench").args(args).env("TMPDIR", temporary);
    command.env_remove("RANK").output().unwrap()
}

#[test]
fn what_cannot_be_measured_is_wrong_usage() {
    let folder = tempfile::tempdir().unwrap();
    let rows = [
        ["step", "--batch", "0"],
        ["step", "--steps", "0"],
        ["step", "--threads", "0"],
        ["launch", "--workers", "0"],
        ["launch", "--runs", "0"],
    ];
    for args in rows {
        let out = bench(folder.path(), &args);
        let message = String::from_utf8_lossy(&out.stderr).into_owned();
        assert_eq!(out.status.code(), Some(2), "{args:?}: {message}");
        assert!(message.contains(&format!("{} 0: must be at least 1", args[1])), "{message}");
    }
}

#[test]
fn launching_leaves_nothing_in_the_temporary_folder() {
    let folder = tempfile::tempdir().unwrap();
    // With so few descriptors the run can't even begin.
    for (limit, code) in [("unlimited", 0), ("8", 1)] {
        let script = format!("ulimit -n {limit} 2>/dev/null; exec \"$0\" bench launch --runs 1");
        let mut command = Command::new("bash");
        command.args(["-c", &script, env!("CARGO_BIN_EXE_phalanx")]).env("TMPDIR", folder.path());
        let out = command.env_remove("RANK").output().unwrap();
        assert_eq!(out.status.code(), Some(code), "{}", String::from_utf8_lossy(&out.stderr));
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0, "ulimit -n {limit}");
    }
}
