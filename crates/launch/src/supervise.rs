//! Starting the workers of a run, and standing by until all have ended.

use crate::console::{Lines, outlet};
use crate::given::{Given, descriptor, master_port};
use crate::guard::Guard;
use crate::news::News;
use crate::report::{Outcome, Report};
use crate::restart::{self, Decision};
use crate::signals;
use crate::spec::{LaunchError, LaunchSpec, MAX_GRACE};
use crate::watch::{Happened, Watch};
use crate::worker::Ties;
use phalanx_coord::{Coordinator, Notice};
use phalanx_job::RunDir;
use phalanx_wire::{Generation, Rank, Secret};
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::sync_channel;
use std::time::Instant;

/// News that wait; they are taken at once.
const QUEUE: usize = 1024;
/// Threads that write to the console: one for the workers' lines, one for reports.
const OUTLETS: usize = 2;
/// How many workers that were replaced may still be ending.
const MAX_BERTHS: usize = 1 << 12;

/// Starts the workers, again after a failure if the run has restarts left, and returns when all have ended and their lines are
/// shown. Call it on the thread that lives longest: a worker is killed when the thread that started it ends.
pub fn run(spec: &LaunchSpec, report: impl FnMut(Report) + Send + 'static) -> Result<Outcome, LaunchError> {
    let start = Instant::now();
    // Before there is a secret that it could hold.
    let guard = Guard::start(spec.workers + spec.max_restarts.min(MAX_BERTHS))?;
    let run_dir = RunDir::create(&spec.run_dir)?;
    let logs = spec.log_dir.as_deref().map(RunDir::create).transpose()?.unwrap_or_else(|| run_dir.clone());
    let _claim = logs.claim_logs()?;
    let secret = Secret::random()?;
    let secret_file = descriptor(&secret)?;
    let (sender, news) = sync_channel(QUEUE);
    let first = Arc::new(AtomicU32::new(0));
    let coordinator = {
        let (sender, first) = (sender.clone(), Arc::clone(&first));
        let any_port = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        Coordinator::serve(any_port, secret, Generation(0), spec.workers, move |generation, notice| {
            // Before it knows itself, so that nothing it writes then is taken for another's.
            if let Notice::Begun { workers, .. } = &notice {
                first.store(workers.first().map_or(0, |rank| rank.0), Ordering::Relaxed);
            }
            // The run is over when nobody listens any more.
            let _ = sender.send(News::Notice(generation, notice));
        })
        .map_err(LaunchError::system("the coordinator can't listen on this machine"))?
    };
    // Signals are taken before the first worker is there, so that none goes astray.
    let signals = signals::take(&spec.ending_signals, &sender)?;
    let lines = Lines::open(spec, &sender)?;
    let reports = outlet("phalanx-reports", &sender, report)?;
    let mut watch = Watch::new(start, spec.grace.min(MAX_GRACE), spec.max_restarts, guard);
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let reason = loop {
        let restarts = watch.failures.len();
        let generation = Generation(restarts as u64);
        if restarts > 0 {
            coordinator.begin(generation, spec.workers);
            watch.begin(generation);
        }
        // Also for those who write no log: the file that a Python worker leaves its exception in lies there.
        logs.logs(generation)?;
        let mut given = Given {
            spec,
            coordinator: coordinator.address(),
            master_port: master_port(spec)?,
            secret: secret_file.as_raw_fd(),
            run_dir: &run_dir,
            logs: &logs,
            generation,
            restarts,
            replaces: false,
            threads: (cores / spec.workers).max(1),
        };
        let (over, until_over) = std::io::pipe().map_err(LaunchError::system("a pipe for the run"))?;
        let (hurry, first) = (Arc::clone(&watch.hurry), Arc::clone(&first));
        let ties = Ties { news: sender.clone(), lines: lines.clone(), over: Arc::new(over), hurry, first };
        if let Err(error) = watch.start_all(&given, &ties) {
            watch.abandon(&news);
            return Err(error);
        }
        // Reports are few; one that finds a full queue would come too late anyway.
        let _ = reports.try_send(Report::Started { pids: watch.pids() });
        while !watch.all_ended() {
            let report = match watch.next(&news) {
                None => continue,
                Some(Happened::Told(report)) => report,
                Some(Happened::Lost(rank)) => {
                    (given.restarts, given.replaces) = (watch.failures.len(), true);
                    replace(&mut watch, &given, &ties, rank)
                }
            };
            let _ = reports.try_send(report);
        }
        drop(until_over);
        match restart::decide(watch.ended()) {
            Decision::End(reason) => break reason,
            Decision::Restart(restart) => {
                // A generation that failed has a cause.
                let failure = watch.failure().expect("a failure");
                watch.failures.push(failure.clone());
                let _ = reports.try_send(Report::Restarting { failure, restart });
            }
        }
    };
    watch.guard.dismiss();
    drop((lines, sender, reports));
    watch.wait_for_console(&news, OUTLETS);
    signals.close();
    let (exit_code, failure) = (watch.exit_code(), watch.failure());
    let restarts = std::mem::take(&mut watch.failures);
    Ok(Outcome { exit_code, failure, restarts, reason, lasted: start.elapsed() })
}

/// Starts another worker in the place of one that was lost. Where that can't be done, the others go on without it.
fn replace(watch: &mut Watch, given: &Given<'_>, ties: &Ties, rank: Rank) -> Report {
    let generation = Generation(given.restarts as u64);
    let started = given.logs.logs(generation).map_err(LaunchError::from);
    match started.and_then(|_| watch.replace(given, ties, rank)) {
        Ok(()) => {
            // What was lost is counted when it is seen.
            let failure = watch.failures.last().expect("one that was lost").clone();
            Report::Replacing { failure, restart: given.restarts }
        }
        Err(error) => Report::NotReplaced { rank, error: error.to_string() },
    }
}
