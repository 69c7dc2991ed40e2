//! What this command and its other half on a host tell each other over the ssh session: a line of JSON each, orders on standard
//! input and answers on standard output. Both are the same version, which is the first thing that is checked.

use super::super::flags::RunArgs;
use serde::{Deserialize, Serialize};
use std::ffi::OsString;
use std::path::PathBuf;

/// What an answer begins with: before it, the shell's own files may print anything.
pub(super) const ANSWER: &str = "phalanx-host ";
/// Longer lines are none of these.
pub(super) const MOST_BYTES: u64 = 4 << 20;

/// What a host is told.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Order {
    /// Say what is there.
    Tell(Box<Asked>),
    /// Say what the clock shows.
    Clock,
    /// Make this file in the folder.
    Leave(String),
    /// Say whether it is there.
    Look(String),
    /// Take it away.
    Take(String),
    /// Start the agent.
    Run(Box<Start>),
    /// Hand a signal to the agent.
    Signal(i32),
    /// Nothing: whoever orders is there.
    Here,
}

/// What is to be looked at.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Asked {
    /// How long nothing may be heard, in seconds.
    pub(super) patience: f64,
    /// Where the program runs.
    pub(super) folder: PathBuf,
    /// What is to be started, and other files that it needs, as a Python script.
    pub(super) programs: Vec<OsString>,
    /// Where the run keeps its files.
    pub(super) out: PathBuf,
    /// Its data, if the command line says where that is.
    pub(super) data: Option<PathBuf>,
}

/// What is to be started.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Start {
    /// As it was typed, with what this host is told beside.
    pub(super) args: RunArgs,
    /// The run's secret, in hexadecimal digits.
    pub(super) secret: String,
    /// Variables of the workers.
    pub(super) variables: Vec<(String, String)>,
}

/// What a host answers.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Answer {
    /// What is there.
    Facts(Box<Facts>),
    /// Milliseconds since 1970.
    Clock(f64),
    /// It is done, or why not.
    Done(Option<String>),
    /// Whether it is there.
    There(bool),
}

/// What is on a host.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
// Another version may say less, and is to be told from this by its number.
#[serde(default)]
pub(super) struct Facts {
    /// The version of the binary, and its SHA-256.
    pub(super) version: String,
    pub(super) binary: String,
    /// What the machine calls itself, with what differs at each of its starts.
    pub(super) machine: String,
    pub(super) cores: usize,
    /// Bytes of memory, and those that are free or can be made so.
    pub(super) memory: u64,
    pub(super) free: u64,
    pub(super) gpus: usize,
    /// The address at which this session reached it, if sshd says so.
    pub(super) address: Option<String>,
    /// A port that is free.
    pub(super) port: u16,
    /// Why the folder can't be used, if so.
    pub(super) no_folder: Option<String>,
    /// Why the run's files can't be kept, if so.
    pub(super) no_out: Option<String>,
    pub(super) programs: Vec<Seen>,
    pub(super) data: Option<Seen>,
}

/// What is where a file or a folder is looked for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Seen {
    /// Nothing that can be used, and why.
    Absent(String),
    /// A file with this SHA-256.
    File { path: PathBuf, bytes: u64, digest: String },
    /// A folder; the digest is of names and lengths.
    Folder { path: PathBuf, files: usize, bytes: u64, digest: String },
}
