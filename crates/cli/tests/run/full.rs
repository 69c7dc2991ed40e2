//! A run that may write no more, and one that may start no more processes or threads. Root has no limit of those, so a user without any other process is made up for
//! it; where this process may not become another user, the test says that it was skipped.

use super::user::text;
use std::fs;
use std::os::unix::fs::{PermissionsExt, chown};
use std::process::Command;

/// Nobody else's.
const USER: u32 = 61_234;

/// The processes of that user.
fn processes() -> Vec<String> {
    let entries = fs::read_dir("/proc").unwrap().map(|entry| entry.unwrap());
    let own = entries.filter(|entry| {
        let status = fs::read_to_string(entry.path().join("status")).unwrap_or_default();
        status.lines().any(|line| line.starts_with(&format!("Uid:\t{USER}\t")))
    });
    own.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}

#[test]
fn a_full_process_table_is_told_at_once_and_nothing_is_left_running() {
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join("phalanx");
    fs::copy(env!("CARGO_BIN_EXE_phalanx"), &program).unwrap();
    if chown(folder.path(), Some(USER), Some(USER)).is_err() {
        println!("skipped: this user can't become another one");
        return;
    }
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let run = |most: u32| {
        let (user, limit) = (USER.to_string(), format!("--nproc={most}"));
        let mut command = Command::new("setpriv");
        command.args(["--reuid", &user, "--regid", &user, "--clear-groups", "prlimit", &limit]).arg(&program);
        command.args(["run", "--nproc-per-node", "4", "--out", "out", "sleep", "0.1"]);
        command.current_dir(folder.path()).env_remove("RANK").output().unwrap()
    };
    // From the guard, the first that is started, to the last worker.
    let mut told = 0;
    for most in 1.. {
        let out = run(most);
        let message = text(&out.stderr);
        assert_eq!(processes(), [] as [String; 0], "{most}: {message}");
        if out.status.success() {
            break;
        }
        assert_eq!(out.status.code(), Some(1), "{most}: {message}");
        let words =
            format!("no more processes or threads can be started: this user may have {most} (ulimit -u)");
        for words in [words.as_str(), "hint: each worker takes four", "start fewer workers"] {
            assert!(message.contains(words), "{most}: {message}");
        }
        told += 1;
        assert!(most < 60, "{message}");
    }
    assert!(told > 12, "{told}");
}

/// As on a full disk, what workers say is shown all the same, and the gap in the log is told of.
#[test]
fn logs_that_can_not_be_written_are_told_of_and_end_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let mut command = Command::new("prlimit");
    command.args([
        "--fsize=100000",
        env!("CARGO_BIN_EXE_phalanx"),
        "run",
        "--nproc-per-node",
        "1",
        "--out",
        "out",
    ]);
    command.args(["sh", "-c", "yes | head -n 100000; echo over"]).current_dir(folder.path());
    let out = command.env_remove("RANK").output().unwrap();
    let message = text(&out.stderr);
    assert_eq!(out.status.code(), Some(0), "{message}");
    assert_eq!(message.matches("logs of workers can't be written").count(), 1, "{message}");
    assert!(message.contains("hint:") && text(&out.stdout).trim_end().ends_with("over"), "{message}");
}
