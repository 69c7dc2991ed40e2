//! Starting the workers of a run, and standing by until all have ended.

use crate::console::{Lines, outlet};
use crate::given::{Given, descriptor, master_port};
use crate::guard::Guard;
use crate::signals;
use crate::spec::{LaunchError, LaunchSpec, MAX_GRACE};
use crate::watch::Watch;
use crate::worker::Ties;
use phalanx_coord::{Coordinator, Notice};
use phalanx_job::RunDir;
use phalanx_wire::{Generation, Rank, Secret};
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::mpsc::sync_channel;
use std::time::{Duration, Instant};

/// What the caller may want to show.
#[derive(Clone, Debug)]
pub enum Report {
    /// All workers were started.
    Started {
        /// Their process ids, by rank.
        pids: Vec<i32>,
    },
    /// A worker has failed and the others are being stopped.
    Stopping {
        /// Which has failed.
        rank: Rank,
    },
    /// A signal is passed on to the workers.
    Signalled {
        /// Its name.
        signal: &'static str,
    },
    /// The grace period is over and workers are still there.
    Killing {
        /// Which.
        ranks: Vec<Rank>,
    },
}

/// How a run ended.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// For the shell: 0, 1, or 128 and the number of the signal that ended the run.
    pub exit_code: i32,
    /// What went wrong first, if anything did.
    pub failure: Option<Failure>,
    /// How long the run took.
    pub lasted: Duration,
}

/// The worker that ended a run.
#[derive(Clone, Debug)]
pub struct Failure {
    /// Which.
    pub rank: Rank,
    /// Its process id.
    pub pid: i32,
    /// "exited with code 3" or "was killed by SIGKILL".
    pub how: String,
    /// How long after the start of the run.
    pub after: Duration,
    /// What it told the coordinator, if it came to that.
    pub reported: Option<String>,
    /// The last lines it wrote to standard error, or to standard output if there were none.
    pub last_lines: Vec<String>,
}

/// Everything that arrives.
pub(crate) enum News {
    /// A worker's process is over, and whether that was well.
    Exited(Rank, bool),
    /// Nothing is left of it.
    Ended(Rank),
    /// This process was sent a signal.
    Signal(i32),
    /// From the coordinator.
    Notice(Notice),
    /// One of the threads that write to the console has written everything.
    Shown,
}

/// News that wait; they are taken at once.
const QUEUE: usize = 1024;

/// Starts the workers and returns when all have ended and their lines are shown. Call it on the thread that lives longest: a
/// worker is killed when the thread that started it ends.
pub fn run(spec: &LaunchSpec, report: impl FnMut(Report) + Send + 'static) -> Result<Outcome, LaunchError> {
    let start = Instant::now();
    // Before there is a secret that it could hold.
    let guard = Guard::start(spec.workers)?;
    let run_dir = RunDir::create(&spec.run_dir)?;
    let generation = Generation(0);
    // Also for those who write no log: the file that a Python worker leaves its exception in lies there.
    run_dir.logs(generation)?;
    let secret = Secret::random()?;
    let secret_file = descriptor(&secret)?;
    let (sender, news) = sync_channel(QUEUE);
    let coordinator = {
        let sender = sender.clone();
        let any_port = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        Coordinator::serve(any_port, secret, generation, spec.workers, move |notice| {
            // The run is over when nobody listens any more.
            let _ = sender.send(News::Notice(notice));
        })
        .map_err(LaunchError::system("the coordinator can't listen on this machine"))?
    };
    // Signals are taken before the first worker is there, so that none goes astray.
    let signals = signals::take(&sender)?;
    let lines = Lines::open(spec.console, &sender)?;
    let outlets = if lines.is_some() { 2 } else { 1 };
    let (over, until_over) = std::io::pipe().map_err(LaunchError::system("a pipe for the run"))?;
    let mut watch = Watch::new(start, spec.grace.min(MAX_GRACE), guard);
    let ties = Ties { news: sender, lines, over: Arc::new(over), hurry: Arc::clone(&watch.hurry) };
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let given = Given {
        spec,
        coordinator: coordinator.address(),
        master_port: master_port(spec)?,
        secret: secret_file.as_raw_fd(),
        run_dir: &run_dir,
        generation,
        threads: (cores / spec.workers).max(1),
    };
    let started = watch.start_all(&given, &ties);
    let reports = match started.and_then(|()| outlet("phalanx-reports", &ties.news, report)) {
        Ok(reports) => reports,
        Err(error) => {
            watch.abandon(&news);
            return Err(error);
        }
    };
    drop(ties);
    // Reports are few; one that finds a full queue would come too late anyway.
    let _ = reports.try_send(Report::Started { pids: watch.pids() });
    while !watch.all_ended() {
        if let Some(report) = watch.next(&news) {
            let _ = reports.try_send(report);
        }
    }
    watch.guard.dismiss();
    drop((until_over, reports));
    watch.wait_for_console(&news, outlets);
    signals.close();
    Ok(watch.outcome())
}
