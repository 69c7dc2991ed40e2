//! One worker process: how it is started, so that it never outlives this process.

use crate::output::{Console, Stream, copy_lines};
use crate::spec::{LaunchError, LaunchSpec};
use crate::supervise::Happening;
use nix::sys::prctl::set_pdeathsig;
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use phalanx_job::{RunDir, names};
use phalanx_wire::{Generation, Rank};
use std::fs::File;
use std::net::SocketAddr;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::sync::mpsc::SyncSender;

/// What every worker of a run is told.
pub(crate) struct Given<'a> {
    pub(crate) spec: &'a LaunchSpec,
    pub(crate) coordinator: SocketAddr,
    pub(crate) master_port: u16,
    /// The number of the inherited descriptor that holds the secret.
    pub(crate) secret: i32,
    pub(crate) run_dir: &'a RunDir,
    pub(crate) generation: Generation,
    /// Compute threads of each worker.
    pub(crate) threads: usize,
}

/// A worker that runs, or ran.
pub(crate) struct Worker {
    pub(crate) rank: Rank,
    pub(crate) pid: Pid,
}

impl Worker {
    /// Starts rank `rank`; its lines and its end arrive through `happenings`.
    pub(crate) fn start(
        given: &Given<'_>,
        rank: Rank,
        happenings: &SyncSender<Happening>,
    ) -> Result<Worker, LaunchError> {
        let spec = given.spec;
        let own_terminal = spec.console == Console::FirstRank && rank == Rank(0);
        let mut command = Command::new(&spec.program);
        command
            .args(&spec.args)
            .envs(variables(given, rank))
            .envs(spec.variables.iter().cloned())
            .stdin(Stdio::null());
        if !own_terminal {
            command.stdout(Stdio::piped()).stderr(Stdio::piped());
        }
        // A group of its own, so that signals reach whatever the worker starts, and the terminal's Ctrl-C only this process.
        command.process_group(0);
        let parent = std::process::id();
        // SAFETY: between fork and exec only async-signal-safe calls are made: prctl, getppid, and building an error
        // from a number.
        unsafe {
            command.pre_exec(move || {
                // The kernel kills the worker when the thread that started it ends, however it ends. If that has happened
                // before this line, the parent is another one by now.
                set_pdeathsig(Signal::SIGKILL)?;
                if std::os::unix::process::parent_id() != parent {
                    return Err(std::io::Error::from_raw_os_error(nix::errno::Errno::ESRCH as i32));
                }
                Ok(())
            });
        }
        let program = || LaunchError::program(&spec.program);
        let mut child = command.spawn().map_err(|source| program()(source))?;
        let pid = Pid::from_raw(child.id() as i32);
        let [out_log, err_log] = given.run_dir.log_files(given.generation, rank)?;
        let streams = [
            (child.stdout.take().map(|s| Box::new(s) as Box<dyn std::io::Read + Send>), out_log, Stream::Out),
            (child.stderr.take().map(|s| Box::new(s) as Box<dyn std::io::Read + Send>), err_log, Stream::Err),
        ];
        let mut readers = Vec::new();
        for (from, log, stream) in streams {
            let Some(from) = from else { continue };
            let log =
                File::create(&log).map_err(LaunchError::system(format!("the log {}", log.display())))?;
            let happenings = happenings.clone();
            let copy = move || {
                // The receiver lives until every reader has ended.
                let _ =
                    copy_lines(from, log, |line| drop(happenings.send(Happening::Line(rank, stream, line))));
            };
            let thread = std::thread::Builder::new().name(format!("phalanx-log-{rank}")).spawn(copy);
            readers.push(thread.map_err(LaunchError::system("a thread for a log"))?);
        }
        let happenings = happenings.clone();
        let wait = move || {
            let status = child.wait();
            // What the worker wrote last comes before the news of its end. A grandchild that holds the pipe open must not
            // hold up that news for ever, and is ended with its group.
            let _ = killpg(pid, Signal::SIGKILL);
            for reader in readers {
                let _ = reader.join();
            }
            let _ = happenings.send(Happening::Ended(rank, status));
        };
        let waiter = std::thread::Builder::new().name(format!("phalanx-wait-{rank}")).spawn(wait);
        waiter.map_err(LaunchError::system("a thread to wait for a worker"))?;
        Ok(Worker { rank, pid })
    }

    /// Sends a signal to the worker and everything it started; one that has ended needs none.
    pub(crate) fn signal(&self, signal: Signal) {
        let _ = killpg(self.pid, signal);
    }
}

impl LaunchError {
    fn program(program: &std::ffi::OsStr) -> impl FnOnce(std::io::Error) -> LaunchError {
        let program = program.into();
        move |source| LaunchError::Program { program, source }
    }
}

/// The environment contract.
fn variables(given: &Given<'_>, rank: Rank) -> Vec<(&'static str, String)> {
    let spec = given.spec;
    let (rank, world) = (rank.to_string(), spec.workers.to_string());
    let error_file = given
        .run_dir
        .path()
        .join("logs")
        .join(given.generation.to_string())
        .join(format!("{rank}.error.json"));
    let mut variables = vec![
        (names::RANK, rank.clone()),
        (names::LOCAL_RANK, rank.clone()),
        (names::WORLD_SIZE, world.clone()),
        (names::LOCAL_WORLD_SIZE, world.clone()),
        (names::GROUP_RANK, "0".into()),
        (names::GROUP_WORLD_SIZE, "1".into()),
        (names::ROLE_NAME, spec.role.clone()),
        (names::ROLE_RANK, rank),
        (names::ROLE_WORLD_SIZE, world),
        (names::MASTER_ADDR, spec.master.0.clone()),
        (names::MASTER_PORT, given.master_port.to_string()),
        (names::RESTART_COUNT, "0".into()),
        (names::MAX_RESTARTS, "0".into()),
        (names::RUN_ID, spec.run_id.clone()),
        (names::ERROR_FILE, error_file.display().to_string()),
        (names::COORDINATOR, given.coordinator.to_string()),
        (names::SECRET_FD, given.secret.to_string()),
        (names::GENERATION, given.generation.to_string()),
        (names::RUN_DIR, given.run_dir.path().display().to_string()),
        (names::THREADS, given.threads.to_string()),
    ];
    if std::env::var_os(names::OMP_NUM_THREADS).is_none() {
        variables.push((names::OMP_NUM_THREADS, given.threads.to_string()));
    }
    variables
}
