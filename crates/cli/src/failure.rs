//! Telling how a run ended.

use crate::say::say;
use phalanx_launch::{EndReason, Failure, Outcome, Report};
use std::path::Path;

/// What happens while a run goes on that may have so many restarts.
pub(crate) fn tell(report: &Report, max_restarts: usize) {
    match report {
        Report::Started { .. } => {}
        Report::Stopping { rank } => say(format_args!("rank {rank} failed: stopping the other workers")),
        Report::Restarting { failure, restart } => {
            let cause = why(failure);
            say(format_args!("{cause}: starting all workers again (restart {restart} of {max_restarts})"));
        }
        Report::Told { words } => say(words),
        Report::Ordered { why } => say(format_args!("{why}: stopping the workers of this node")),
        Report::Replacing { failure, restart } => {
            let cause = why(failure);
            let what = "the others go on, another takes its place";
            say(format_args!("{cause}: {what} (restart {restart} of {max_restarts})"));
        }
        Report::NotReplaced { rank, error, left: 0 } => {
            say(format_args!("no other is started for rank {rank}: {error}"));
        }
        Report::NotReplaced { rank, error, .. } => {
            say(format_args!("no other is started for rank {rank}, the others go on: {error}"));
        }
        Report::Silent { rank } => {
            say(format_args!("rank {rank} gives the others no sign of life: killing it"));
        }
        Report::Hung { rank, why } => say(format_args!("rank {rank} hangs ({why}): killing it")),
        Report::AllWait { long } => {
            let long = long.as_secs_f64();
            say(format_args!("all workers here wait for other ranks for {long:.0} s: none is to blame"));
        }
        Report::Signalled { signal, is_known } => {
            let what = if *is_known { "the workers have had it" } else { "passing it on to the workers" };
            say(format_args!("{signal}: {what} (again to kill them)"));
        }
        Report::Killing { ranks } => {
            let ranks: Vec<String> = ranks.iter().map(ToString::to_string).collect();
            say(format_args!("still running after the grace period, killing: rank {}", ranks.join(", ")));
        }
    }
}

/// The report of a failed run whose folder `logs` lies there, and the exit code for any.
pub(crate) fn conclude(outcome: &Outcome, run_dir: &Path, logs: &Path) -> u8 {
    let Outcome { restarts, setbacks, reason, .. } = outcome;
    if !setbacks.is_empty() {
        match restarts {
            0 => say("what went wrong:"),
            _ => say(format_args!("restarts: {restarts}; what went wrong each time:")),
        }
        let all = setbacks.iter().chain(&outcome.failure);
        all.for_each(|failure| say(format_args!("  {}: {}", failure.folder, why(failure))));
    }
    use EndReason::{CutOff, Deposed, ForGood, NoCoordinator, NodesLost, RestartsUsed, TooFewNodes};
    let is_of_nodes =
        matches!(reason, TooFewNodes { .. } | NodesLost { .. } | NoCoordinator(_) | CutOff { .. } | Deposed);
    if is_of_nodes && outcome.failure.is_none() {
        say(format_args!("error: {reason}"));
    }
    if let Some(failure) = &outcome.failure {
        blame(failure);
        if matches!(reason, RestartsUsed { .. } | ForGood | NodesLost { .. }) {
            say(format_args!("  not started again: {reason}"));
        }
        say(format_args!("  logs: {}", logs.join("logs").display()));
        if let Some(records) = phalanx::flight::folder(run_dir) {
            let run_dir = run_dir.display();
            say(format_args!("  flight records: {}\nhint: phalanx flight {run_dir}", records.display()));
        }
    }
    exit_code(outcome)
}

/// Says which worker failed, and how.
pub(crate) fn blame(failure: &Failure) {
    let Failure { reported, last_lines, .. } = failure;
    say(format_args!("error: {}", cause(failure)));
    if let Some(message) = reported {
        say(format_args!("  it said: {}", message.replace('\n', "\n  ")));
    }
    // What it told the launcher it has mostly written too.
    let told_twice = |message: &String| last_lines.iter().any(|line| line.contains(first_line(message)));
    if !last_lines.is_empty() && !reported.as_ref().is_some_and(told_twice) {
        say("  its last lines:");
        last_lines.iter().for_each(|line| say(format_args!("    {line}")));
    }
}

/// The failure in a line.
fn cause(failure: &Failure) -> String {
    let Failure { who, how, after, .. } = failure;
    format!("{who} {how} after {:.1} s", after.as_secs_f64())
}

/// The same with what it said about that, as far as it goes on a line.
fn why(failure: &Failure) -> String {
    let cause = cause(failure);
    match failure.reported.as_deref().map(first_line) {
        Some(said) if !said.is_empty() => format!("{cause} ({said})"),
        _ => cause,
    }
}

/// The exit code for any run.
pub(crate) fn exit_code(outcome: &Outcome) -> u8 {
    u8::try_from(outcome.exit_code).unwrap_or(1)
}

fn first_line(text: &str) -> &str {
    text.lines().next().unwrap_or_default()
}
