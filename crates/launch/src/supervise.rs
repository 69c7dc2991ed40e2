//! Starting the workers of a run, and standing by until all have ended.

use crate::console::{Lines, outlet};
use crate::given::{Given, descriptor, master_port};
use crate::guard::Guard;
use crate::news::News;
use crate::report::{Outcome, Report};
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

/// Starts the workers and returns when all have ended and their lines are shown. Call it on the thread that lives longest: a
/// worker is killed when the thread that started it ends.
pub fn run(spec: &LaunchSpec, report: impl FnMut(Report) + Send + 'static) -> Result<Outcome, LaunchError> {
    let start = Instant::now();
    // Before there is a secret that it could hold.
    let guard = Guard::start(spec.workers)?;
    let run_dir = RunDir::create(&spec.run_dir)?;
    let _claim = run_dir.claim_logs()?;
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
