//! Starting the workers of a run, and standing by until all have ended.

use crate::agent;
use crate::crew::Crew;
use crate::given::{Given, descriptor, master_port, pass};
use crate::news::News;
use crate::report::{Failure, Outcome, Report, Who};
use crate::restart::{self, Decision};
use crate::spec::{LaunchError, LaunchSpec};
use crate::watch::{Happened, Watch};
use crate::worker::Ties;
use phalanx_coord::{Coordinator, Notice};
use phalanx_job::Seat;
use phalanx_wire::{Generation, Rank, Secret};
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Starts the workers, again after a failure if the run has restarts left, and returns when all have ended and their lines are
/// shown. Call it on the thread that lives longest: a worker is killed when the thread that started it ends.
pub fn run(spec: &LaunchSpec, report: impl FnMut(Report) + Send + 'static) -> Result<Outcome, LaunchError> {
    let crew = Crew::gather(spec, report)?;
    match &spec.nodes {
        None => alone(crew),
        Some(nodes) => agent::run(crew, nodes),
    }
}

/// A run of this machine alone, whose coordinator only its own workers know.
fn alone(mut crew: Crew<'_>) -> Result<Outcome, LaunchError> {
    let spec = crew.spec;
    let _claim = crew.logs.claim_logs()?;
    let secret = Secret::random()?;
    let (secret_file, pass) = (descriptor(&secret)?, pass(spec, &secret)?);
    let coordinator = {
        let (sender, first) = (crew.sender.clone(), Arc::clone(&crew.first));
        let any_port = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        Coordinator::serve(any_port, pass, Generation(0), spec.workers, move |generation, notice| {
            // Before it knows itself, so that nothing it writes then is taken for another's.
            if let Notice::Begun { workers, .. } = &notice {
                first.store(workers.first().map_or(0, |rank| rank.0), Ordering::Relaxed);
            }
            // The run is over when nobody listens any more.
            let _ = sender.send(News::Notice(generation, notice));
        })
        .map_err(LaunchError::system("the coordinator can't listen on this machine"))?
    };
    let (run_dir, logs) = (crew.run_dir.clone(), crew.logs.clone());
    let reason = loop {
        let restarts = crew.watch.restarts;
        let generation = Generation(restarts.starts() as u64);
        if restarts.starts() > 0 {
            coordinator.begin(generation, spec.workers);
            crew.watch.begin(generation);
        }
        let master = (spec.master.0.clone(), master_port(spec)?);
        let mut given = Given {
            spec,
            coordinator: coordinator.address(),
            whereabouts: None,
            seat: Seat::alone(generation, spec.workers as u32, master),
            secret: secret_file.as_raw_fd(),
            run_dir: &run_dir,
            logs: &logs,
            generation,
            folder: generation,
            restarts: restarts.count,
            replaces: false,
            threads: crew.threads,
        };
        let started = crew.start_all(&given)?;
        let mut parted = Vec::new();
        while !crew.watch.all_ended() {
            let happened = crew.watch.next(&crew.news);
            // As agents tell of it where there are several nodes.
            for rank in crew.watch.lost_while_stopping() {
                if !parted.contains(&rank) {
                    parted.push(rank);
                    coordinator.part_from(rank);
                }
            }
            let report = match happened {
                None => continue,
                Some(Happened::Told(report)) => report,
                Some(Happened::Lost { rank, restart }) => {
                    (given.restarts, given.replaces) = (restart, true);
                    given.folder = Generation(crew.watch.restarts.starts() as u64);
                    let report = replace(&mut crew.watch, &given, &started.ties, rank, &[]);
                    if matches!(report, Report::NotReplaced { .. }) {
                        coordinator.do_without(rank);
                    }
                    report
                }
            };
            crew.tell(report);
        }
        drop(started);
        match restart::decide(crew.watch.ended()) {
            Decision::End(reason) => break reason,
            Decision::Restart(restarts) => {
                // A generation that failed has a cause.
                let failure = crew.watch.failure().expect("a failure");
                crew.watch.failures.push(failure.clone());
                crew.watch.restarts = restarts;
                crew.tell(Report::Restarting { failure, restart: restarts.count });
            }
        }
    };
    let start = crew.start;
    let mut watch = crew.dismiss();
    let (exit_code, failure) = (watch.exit_code(), watch.failure());
    let (restarts, setbacks) = (watch.restarts.count, std::mem::take(&mut watch.failures));
    Ok(Outcome { exit_code, failure, restarts, setbacks, reason, lasted: start.elapsed() })
}

/// Starts another worker in the place of one that was lost. Where that can't be done, or another would find the same device at fault,
/// the others go on without it: those that are left, and those that may be started in the place of `undecided` ones.
pub(crate) fn replace(
    watch: &mut Watch,
    given: &Given<'_>,
    ties: &Ties,
    rank: Rank,
    undecided: &[Rank],
) -> Report {
    let error = match watch.fault_of_device(rank) {
        Some(error) => error,
        None => {
            let started = given.logs.logs(given.folder).map_err(LaunchError::from);
            match started.and_then(|_| watch.replace(given, ties, rank)) {
                Ok(()) => {
                    // What was lost is counted when it is seen.
                    let is_of = |failure: &&Failure| matches!(&failure.who, Who::Worker { rank: of, .. } if *of == rank);
                    let failure = watch.failures.iter().rev().find(is_of).expect("one that was lost").clone();
                    return Report::Replacing { failure, restart: given.restarts };
                }
                Err(error) => error.to_string(),
            }
        }
    };
    let left = watch.not_replaced(rank, undecided);
    Report::NotReplaced { rank, error, left }
}
