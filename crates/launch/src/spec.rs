//! What is to be started.

use crate::full::{is_full, limits};
use crate::hang::HangLimits;
use crate::nodes::Nodes;
use crate::output::Console;
use crate::prefix::Prefix;
use crate::signals::EndingSignals;
use crate::stamp::LogTimes;
use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;
use thiserror::Error;

/// The longest grace period: a day.
pub const MAX_GRACE: Duration = Duration::from_secs(24 * 60 * 60);

/// The most workers that one machine starts: each has a process, threads of its launcher's and pipes.
pub const MOST_WORKERS: usize = 4096;

/// The program of this very process, as it was when that was started: whatever lies at its path by the time a worker is started again.
pub const THIS_PROGRAM: &str = "/proc/self/exe";

/// The workers of a run.
#[derive(Clone, Debug)]
pub struct LaunchSpec {
    /// The program: a path, a name that is looked for in PATH, or [`THIS_PROGRAM`].
    pub program: OsString,
    /// Its arguments.
    pub args: Vec<OsString>,
    /// How many copies; at least 1.
    pub workers: usize,
    /// What the run is called.
    pub run_id: String,
    /// The folder of its files; made if it isn't there.
    pub run_dir: PathBuf,
    /// torchrun's role name.
    pub role: String,
    /// Where the program may listen: `MASTER_ADDR`, and `MASTER_PORT` unless a free one will do.
    pub master: (String, Option<u16>),
    /// More variables for every worker.
    pub variables: Vec<(String, String)>,
    /// Where the folder `logs` lies [default: in the run directory].
    pub log_dir: Option<PathBuf>,
    /// What the workers are told of their number on this machine.
    pub local_rank: LocalRank,
    /// Where `--local-rank=N` is put between the arguments; for programs of torch.distributed.launch.
    pub local_rank_argument: Option<usize>,
    /// The processors that each worker keeps to, by local rank; any where there are none.
    pub processors: Vec<Vec<usize>>,
    /// The signals that end the run.
    pub ending_signals: EndingSignals,
    /// Those that are passed on and must not be lost, for workers that know it: each begins with them blocked, until it is ready
    /// for them, and gets those that were passed on before it was started.
    pub held_signals: Vec<i32>,
    /// The local rank of the worker that reads this process's standard input, and has the terminal where that is one; others have nothing
    /// to read.
    pub stdin: Option<usize>,
    /// What is shown of the workers' output.
    pub console: Console,
    /// Where the time stands before each line of theirs.
    pub log_times: LogTimes,
    /// How often workers are started again after one has failed: all of them, or where the others go on those that were lost,
    /// which count once if they were lost at once.
    pub max_restarts: usize,
    /// The other nodes of the run, if it has any.
    pub nodes: Option<Nodes>,
    /// Whether what goes over TCP is encrypted, as far as the workers are programs of ours.
    pub tls: bool,
    /// How long workers may make no progress, as far as they are programs of ours.
    pub hang_limits: HangLimits,
    /// From SIGTERM to SIGKILL; what is above [`MAX_GRACE`] counts as that.
    pub grace: Duration,
}

impl Default for LaunchSpec {
    /// One worker of no program: who names one and its run directory has the rest as torchrun has it.
    fn default() -> LaunchSpec {
        LaunchSpec {
            program: OsString::new(),
            args: Vec::new(),
            workers: 1,
            run_id: "none".into(),
            run_dir: PathBuf::new(),
            role: "default".into(),
            master: ("127.0.0.1".into(), None),
            variables: Vec::new(),
            log_dir: None,
            local_rank: LocalRank::Counted,
            local_rank_argument: None,
            processors: Vec::new(),
            ending_signals: EndingSignals::default(),
            held_signals: Vec::new(),
            stdin: None,
            console: Console::Lines { prefix: Some(Prefix::default()), shown: Vec::new() },
            log_times: LogTimes::Logs,
            max_restarts: 0,
            nodes: None,
            tls: false,
            hang_limits: HangLimits::default(),
            grace: Duration::from_secs(30),
        }
    }
}

impl LaunchSpec {
    /// Whether the run goes on when workers are lost, or with others that come, if they can.
    pub(crate) fn is_elastic(&self) -> bool {
        self.max_restarts > 0
            || self.nodes.as_ref().is_some_and(|nodes| nodes.least < nodes.most || nodes.spares > 0)
    }
}

/// What the workers are told of their number on their machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LocalRank {
    /// The number itself, from 0 on.
    Counted,
    /// 0, with a device each that alone it sees.
    Virtual {
        /// The variable that says which devices are seen.
        variable: &'static str,
        /// What it is set to, by local rank.
        devices: Vec<String>,
    },
}

/// Why no worker was started, or why they had to be stopped again.
#[derive(Debug, Error)]
pub enum LaunchError {
    /// The program isn't there or can't be run.
    #[error("{program}: can't be started: {source}\nhint: give the path of an executable file, or of a .py script, or any file of Python's behind --run-path", program = program.display())]
    Program {
        /// What was to be started.
        program: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// There are as many processes and threads as there may be.
    #[error(
        "{what}: no more processes or threads can be started: {limits}\nhint: each worker takes four, and its own threads: start fewer workers, end other processes, or raise the limit"
    )]
    Full {
        /// What was to be started.
        what: String,
        /// How many there may be, as far as that is known.
        limits: String,
    },
    /// The port of the program is taken.
    #[error(
        "port {port} of {host} is in use\nhint: leave --master-port out for a free one, or see who has it: ss -ltnp 'sport = :{port}'"
    )]
    PortInUse {
        /// The host.
        host: String,
        /// The port.
        port: u16,
    },
    /// The name of the endpoint means nothing here.
    #[error(
        "the endpoint {host} can't be found: {why}\nhint: give the address or a name of the first node, the same on all nodes"
    )]
    Endpoint {
        /// Its host.
        host: String,
        /// What the system said.
        why: String,
    },
    /// The first node isn't where the endpoint is.
    #[error(
        "the endpoint {host}:{port} is no address of this machine, which is to be the first node (--node-rank 0, or is_host)\nhint: give this machine's address, the same on all nodes"
    )]
    NotHere {
        /// The endpoint's host.
        host: String,
        /// Its port.
        port: u16,
    },
    /// The run doesn't take this node.
    #[error("this node isn't taken: {reason}")]
    Refused {
        /// Why.
        reason: String,
    },
    /// Something else that the system refused.
    #[error("{what}: {source}")]
    System {
        /// What was tried.
        what: String,
        /// What it said.
        source: std::io::Error,
    },
    /// The run directory.
    #[error(transparent)]
    Job(#[from] phalanx_job::Error),
    /// There is no secret to give.
    #[error(transparent)]
    Secret(#[from] phalanx_wire::SecretError),
}

impl LaunchError {
    pub(crate) fn system(what: impl Into<String>) -> impl FnOnce(std::io::Error) -> LaunchError {
        let what = what.into();
        move |source| match is_full(&source) {
            true => LaunchError::full(what),
            false => LaunchError::System { what, source },
        }
    }

    /// This couldn't be started beside all that is there.
    pub(crate) fn full(what: impl Into<String>) -> LaunchError {
        LaunchError::Full { what: what.into(), limits: limits() }
    }
}
