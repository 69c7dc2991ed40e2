//! What is to be started.

use crate::output::Console;
use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;
use thiserror::Error;

/// The longest grace period: a day.
pub const MAX_GRACE: Duration = Duration::from_secs(24 * 60 * 60);

/// The workers of a run.
#[derive(Clone, Debug)]
pub struct LaunchSpec {
    /// The program: a path, or a name that is looked for in PATH.
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
    /// What is shown of the workers' output.
    pub console: Console,
    /// How often all workers are started again after one has failed.
    pub max_restarts: usize,
    /// From SIGTERM to SIGKILL; what is above [`MAX_GRACE`] counts as that.
    pub grace: Duration,
}

/// Why no worker was started, or why they had to be stopped again.
#[derive(Debug, Error)]
pub enum LaunchError {
    /// The program isn't there or can't be run.
    #[error("{program}: can't be started: {source}\nhint: give the path of an executable file, or of a .py script", program = program.display())]
    Program {
        /// What was to be started.
        program: PathBuf,
        /// What the system said.
        source: std::io::Error,
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
        move |source| LaunchError::System { what, source }
    }
}
