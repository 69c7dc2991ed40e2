//! Starting the workers of a run, and standing by until all have ended.

use crate::console::{Lines, outlet};
use crate::given::{Given, descriptor, master_port};
use crate::guard::Guard;
use crate::news::News;
use crate::report::{Outcome, Report};
use crate::restart::{self, Decision};
use crate::signals;
use crate::spec::{LaunchError, LaunchSpec, MAX_GRACE};
use crate::watch::Watch;
use crate::worker::Ties;
use phalanx_coord::Coordinator;
use phalanx_job::RunDir;
use phalanx_wire::{Generation, Secret};
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::mpsc::sync_channel;
use std::time::Instant;

/// News that wait; they are taken at once.
const QUEUE: usize = 1024;

/// Starts the workers, again after a failure if the run has restarts left, and returns when all have ended and their lines are
/// shown. Call it on the thread that lives longest: a worker is killed when the thread that started it ends.
pub fn run(spec: &LaunchSpec, report: impl FnMut(Report) + Send + 'static) -> Result<Outcome, LaunchError> {
    let start = Instant::now();
    // Before there is a secret that it could hold.
    let guard = Guard::start(spec.workers)?;
    let run_dir = RunDir::create(&spec.run_dir)?;
    let _claim = run_dir.claim_logs()?;
    let secret = Secret::random()?;
    let secret_file = descriptor(&secret)?;
    let (sender, news) = sync_channel(QUEUE);
    let coordinator = {
        let sender = sender.clone();
        let any_port = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        Coordinator::serve(any_port, secret, Generation(0), spec.workers, move |generation, notice| {
            // The run is over when nobody listens any more.
            let _ = sender.send(News::Notice(generation, notice));
        })
        .map_err(LaunchError::system("the coordinator can't listen on this machine"))?
    };
    // Signals are taken before the first worker is there, so that none goes astray.
    let signals = signals::take(&sender)?;
    let lines = Lines::open(spec.console, &sender)?;
    let outlets = if lines.is_some() { 2 } else { 1 };
    let reports = outlet("phalanx-reports", &sender, report)?;
    let mut watch = Watch::new(start, spec.grace.min(MAX_GRACE), guard);
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let mut failures = Vec::new();
    let reason = loop {
        let restarts = failures.len();
        let generation = Generation(restarts as u64);
        if restarts > 0 {
            coordinator.begin(generation, spec.workers);
            watch.begin(generation);
        }
        // Also for those who write no log: the file that a Python worker leaves its exception in lies there.
        run_dir.logs(generation)?;
        let given = Given {
            spec,
            coordinator: coordinator.address(),
            master_port: master_port(spec)?,
            secret: secret_file.as_raw_fd(),
            run_dir: &run_dir,
            generation,
            restarts,
            threads: (cores / spec.workers).max(1),
        };
        let (over, until_over) = std::io::pipe().map_err(LaunchError::system("a pipe for the run"))?;
        let hurry = Arc::clone(&watch.hurry);
        let ties = Ties { news: sender.clone(), lines: lines.clone(), over: Arc::new(over), hurry };
        if let Err(error) = watch.start_all(&given, &ties) {
            watch.abandon(&news);
            return Err(error);
        }
        // Reports are few; one that finds a full queue would come too late anyway.
        let _ = reports.try_send(Report::Started { pids: watch.pids() });
        while !watch.all_ended() {
            if let Some(report) = watch.next(&news) {
                let _ = reports.try_send(report);
            }
        }
        drop(until_over);
        match restart::decide(watch.ended(restarts, spec.max_restarts)) {
            Decision::End(reason) => break reason,
            Decision::Restart(restart) => {
                // A generation that failed has a cause.
                let failure = watch.failure().expect("a failure");
                failures.push(failure.clone());
                let _ = reports.try_send(Report::Restarting { failure, restart });
            }
        }
    };
    watch.guard.dismiss();
    drop((lines, sender, reports));
    watch.wait_for_console(&news, outlets);
    signals.close();
    let (exit_code, failure) = (watch.exit_code(), watch.failure());
    Ok(Outcome { exit_code, failure, restarts: failures, reason, lasted: start.elapsed() })
}
