//! What is there before the first worker and after the last: the queue of news, signals, the console, logs.

use crate::console::{Lines, outlet};
use crate::given::Given;
use crate::guard::Guard;
use crate::news::News;
use crate::report::Report;
use crate::signals;
use crate::spec::{LaunchError, LaunchSpec};
use crate::watch::{Lookout, Watch};
use crate::worker::Ties;
use phalanx_job::RunDir;
use signal_hook::iterator::Handle;
use std::io::PipeWriter;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::Instant;

/// News that wait; they are taken at once.
const QUEUE: usize = 1024;
/// Threads that write to the console: one for the workers' lines, one for reports.
const OUTLETS: usize = 2;
/// How many workers that were replaced may still be ending.
const MAX_BERTHS: usize = 1 << 12;

/// The workers of this machine and all that belongs to them.
pub(crate) struct Crew<'a> {
    pub(crate) spec: &'a LaunchSpec,
    pub(crate) start: Instant,
    pub(crate) run_dir: RunDir,
    /// Where their logs lie: the run directory, or another folder that is like one.
    pub(crate) logs: RunDir,
    pub(crate) watch: Watch,
    pub(crate) news: Receiver<News>,
    /// The other end of the queue.
    pub(crate) sender: SyncSender<News>,
    /// Compute threads of each worker.
    pub(crate) threads: usize,
    /// The rank that the first of the workers was started with.
    pub(crate) first: Arc<AtomicU32>,
    /// Whether a signal has asked for the end.
    is_asked: Arc<AtomicBool>,
    lines: Lines,
    reports: SyncSender<Report>,
    signals: Handle,
}

/// A generation of workers that was started: the streams that they leave open end when this is dropped.
pub(crate) struct Started {
    pub(crate) ties: Ties,
    _until_over: PipeWriter,
}

impl<'a> Crew<'a> {
    /// Signals are taken from now on, so that none goes astray before the first worker is there.
    pub(crate) fn gather(
        spec: &'a LaunchSpec,
        report: impl FnMut(Report) + Send + 'static,
    ) -> Result<Crew<'a>, LaunchError> {
        let start = Instant::now();
        // Before there is a secret that it could hold.
        let others = spec.workers.saturating_mul(spec.max_restarts).min(MAX_BERTHS);
        let guard = Guard::start(spec.workers + others)?;
        let run_dir = RunDir::create(&spec.run_dir)?;
        let logs =
            spec.log_dir.as_deref().map(RunDir::create).transpose()?.unwrap_or_else(|| run_dir.clone());
        let (sender, news) = sync_channel(QUEUE);
        let is_asked = Arc::default();
        let signals = signals::take(&spec.ending_signals, &sender, &is_asked)?;
        let lines = Lines::open(spec, &sender)?;
        let reports = outlet("phalanx-reports", &sender, report)?;
        let (backlog, hangs) = (lines.backlog().clone(), run_dir.path().join("hang"));
        let lookout = Lookout::new(&spec.hang_limits, &sender, backlog, hangs);
        let watch = Watch::new(start, spec, guard, lookout);
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let threads = (cores / spec.workers).max(1);
        let first = Arc::default();
        Ok(Crew {
            spec,
            start,
            run_dir,
            logs,
            watch,
            news,
            sender,
            threads,
            first,
            is_asked,
            lines,
            reports,
            signals,
        })
    }

    /// Starts the workers of a generation; no more of them once a signal has asked for the end.
    pub(crate) fn start_all(&mut self, given: &Given<'_>) -> Result<Started, LaunchError> {
        // Also for those who write no log: the file that a Python worker leaves its exception in lies there.
        self.logs.logs(given.folder)?;
        let (over, until_over) = std::io::pipe().map_err(LaunchError::system("a pipe for the run"))?;
        let (hurry, first) = (Arc::clone(&self.watch.hurry), Arc::clone(&self.first));
        let (news, lines) = (self.sender.clone(), self.lines.clone());
        let ties = Ties { news, lines, over: Arc::new(over), hurry, first };
        if let Err(error) = self.watch.start_all(given, &ties, &self.is_asked) {
            self.watch.abandon(&self.news);
            return Err(error);
        }
        self.tell(Report::Started { pids: self.watch.pids() });
        Ok(Started { ties, _until_over: until_over })
    }

    /// Tells whoever runs this what happens.
    pub(crate) fn tell(&self, report: Report) {
        // Reports are few; one that finds a full queue would come too late anyway.
        let _ = self.reports.try_send(report);
    }

    /// Lets everything go, once what was written is shown; gives what is known of the workers.
    pub(crate) fn dismiss(self) -> Watch {
        let Crew { mut watch, news, sender, lines, reports, signals, .. } = self;
        watch.guard.dismiss();
        drop((lines, sender, reports));
        watch.wait_for_console(&news, OUTLETS);
        signals.close();
        watch
    }
}
