//! The binary as a user's shell starts it, in a folder of its own and outside of any run.

use serde_json::Value;
use std::path::Path;
use std::process::{Command, Output};

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
