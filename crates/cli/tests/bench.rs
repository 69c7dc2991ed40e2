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
        ["loader", "--batch", "0"],
        ["loader", "--passes", "0"],
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

#[test]
fn a_loader_is_measured_on_images_that_are_made_up_where_there_are_none() {
    let folder = tempfile::tempdir().unwrap();
    let measure = |args: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_phalanx"));
        command.args(["bench", "loader", "--json", "--passes", "1"]).args(args);
        let out = command.env("TMPDIR", folder.path()).env("PHALANX_CACHE", folder.path()).output().unwrap();
        assert_eq!(out.status.code(), Some(0), "{}", String::from_utf8_lossy(&out.stderr));
        serde_json::from_slice::<serde_json::Value>(&out.stdout).unwrap()
    };
    let line = measure(&["--threads", "2", "--batch", "100"]);
    assert!(line["bench"] == "loader" && line["images_per_s"].as_f64().unwrap() > 0.0, "{line}");
    assert_eq!((line["images"].as_u64(), line["data"].as_str()), (Some(50_000), Some("cifar10")));
    assert!(
        ["synthetic", "/usr/share/datasets/cifar10"].contains(&line["location"].as_str().unwrap()),
        "{line}"
    );
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0, "what was made up is gone");
    let line = measure(&["--data-name", "mnist-mini"]);
    assert_eq!(
        (line["images"].as_u64(), line["location"].as_str()),
        (Some(2000), Some("inside this program"))
    );
    let wrong = bench(folder.path(), &["loader", "--set", "data.flop=true"]);
    let message = String::from_utf8_lossy(&wrong.stderr).into_owned();
    assert!(wrong.status.code() == Some(2) && message.contains("did you mean data.flip?"), "{message}");
}
