//! The binary as a user's shell starts it, in a folder of its own and outside of any run.

use serde_json::Value;
use std::path::Path;
use std::process::{Command, Output};
use std::time::{Duration, Instant};
use std::{fs, io};

/// Between two looks at what is waited for.
#[allow(dead_code, reason = "not all who share this file wait")]
pub(crate) const LOOK: Duration = Duration::from_millis(2);

/// `phalanx`, with data sets kept in the folder as well.
pub(crate) fn phalanx(folder: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_phalanx"));
    command.current_dir(folder).env("PHALANX_CACHE", folder.join("cache"));
    for name in ["RANK", "WORLD_SIZE", "OMP_NUM_THREADS"] {
        command.env_remove(name);
    }
    command
}

/// What was written, for people.
pub(crate) fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// What a run that ended well has told under `--json`.
#[allow(dead_code, reason = "not all who share this file train")]
pub(crate) fn events(out: &Output) -> Vec<Value> {
    assert_eq!(out.status.code(), Some(0), "{}", text(&out.stderr));
    let lines = text(&out.stdout);
    lines
        .lines()
        .map(|line| serde_json::from_str(line).expect("nothing but JSON on standard output"))
        .collect()
}

/// Waits until a run has a whole checkpoint; a folder without a manifest is one that is still being written.
#[allow(dead_code, reason = "not all who share this file take checkpoints")]
pub(crate) fn await_checkpoint(out: &Path, limit: Duration) {
    let start = Instant::now();
    let is_whole = |entry: io::Result<fs::DirEntry>| entry.unwrap().path().join("manifest.json").exists();
    while !fs::read_dir(out.join("checkpoints")).is_ok_and(|mut all| all.any(is_whole)) {
        assert!(start.elapsed() < limit, "no checkpoint is there");
        std::thread::sleep(LOOK);
    }
}

/// The newest process that was started as this rank of the run which keeps its files in `out`, a whole path.
#[allow(dead_code, reason = "not all who share this file look for workers")]
pub(crate) fn worker(out: &Path, rank: u32) -> i32 {
    workers(out, &format!("RANK={rank}")).into_iter().max().expect("the run has such a worker")
}

/// The processes that were started with this variable, or one that begins so, as workers of the run which keeps its files in
/// `out`, a whole path.
#[allow(dead_code, reason = "not all who share this file look for workers")]
pub(crate) fn workers(out: &Path, variable: &str) -> Vec<i32> {
    let out = format!("PHALANX_RUN_DIR={}", out.display());
    let is_rank = |given: &[u8]| match variable.ends_with('=') {
        true => given.starts_with(variable.as_bytes()),
        false => given == variable.as_bytes(),
    };
    let is_it = |pid: &i32| {
        let variables = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        let mut variables = variables.split(|&byte| byte == 0);
        variables.clone().any(is_rank) && variables.any(|given| given == out.as_bytes())
    };
    let names = fs::read_dir("/proc").unwrap().map(|entry| entry.unwrap().file_name());
    let pids = names.filter_map(|name| name.to_str().and_then(|name| name.parse::<i32>().ok()));
    pids.filter(is_it).collect()
}
