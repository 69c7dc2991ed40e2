//! The end of a run of several nodes, as one of them tells it.

use crate::crew::Crew;
use crate::report::{Failure, Outcome, Who};
use crate::restart::EndReason;
use phalanx_job::{End, EndWhy, Mishap, Setback};
use std::time::Duration;

/// What every node tells alike.
pub(super) fn ended(crew: Crew<'_>, end: End, max_restarts: u32) -> Outcome {
    let (exit_code, restarts) = (end.exit_code(), end.restarts as usize);
    let setbacks: Vec<Failure> = end.setbacks.into_iter().map(failure).collect();
    let max_restarts = max_restarts as usize;
    let (reason, failure) = match end.why {
        EndWhy::Drained => (EndReason::Drained, None),
        EndWhy::Done => (EndReason::Done, None),
        EndWhy::NodesLost { here, lost } => (EndReason::NodesLost { here }, lost.map(failure)),
        EndWhy::Asked { .. } => (EndReason::Asked, None),
        EndWhy::CutOff { here, silent } => (EndReason::CutOff { here, silent }, None),
        EndWhy::Deposed => (EndReason::Deposed, None),
        EndWhy::TooFew { here, seconds } => (EndReason::TooFewNodes { here, seconds }, None),
        EndWhy::Failed(setback) if max_restarts == 0 => (EndReason::NoRestarts, Some(failure(setback))),
        EndWhy::Failed(setback) if setback.is_for_good() => (EndReason::ForGood, Some(failure(setback))),
        EndWhy::Failed(setback) => (EndReason::RestartsUsed { max_restarts }, Some(failure(setback))),
    };
    Outcome { failure, restarts, setbacks, ..outcome(crew, exit_code, reason) }
}

/// The end for a node that isn't told how the run ends.
pub(super) fn outcome(crew: Crew<'_>, exit_code: i32, reason: EndReason) -> Outcome {
    let start = crew.start;
    crew.dismiss();
    Outcome { exit_code, failure: None, restarts: 0, setbacks: Vec::new(), reason, lasted: start.elapsed() }
}

fn failure(setback: Setback) -> Failure {
    let Setback { generation, node, host, after_ms, what } = setback;
    let (folder, after) = (generation, Duration::from_millis(after_ms));
    let node = format!("node {node} ({host})");
    match what {
        Mishap::Worker(failure) => Failure {
            folder,
            who: Who::Worker { rank: failure.rank, pid: failure.pid, node: Some(node) },
            how: failure.how,
            after,
            reported: failure.reported,
            last_lines: failure.last_lines,
        },
        Mishap::Lost(how) => Failure {
            folder,
            who: Who::Node(node),
            how: format!("was lost: {how}"),
            after,
            reported: None,
            last_lines: Vec::new(),
        },
    }
}
