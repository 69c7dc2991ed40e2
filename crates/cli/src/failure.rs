//! Telling how a run ended.

use phalanx_launch::{Failure, Outcome, Report};
use std::path::Path;

/// What happens while a run goes on.
pub(crate) fn tell(report: &Report) {
    match report {
        Report::Started { .. } => {}
        Report::Stopping { rank } => eprintln!("rank {rank} failed: stopping the other workers"),
        Report::Signalled { signal } => {
            eprintln!("{signal}: passing it on to the workers (again to kill them)")
        }
        Report::Killing { ranks } => {
            let ranks: Vec<String> = ranks.iter().map(ToString::to_string).collect();
            eprintln!("still running after the grace period, killing: rank {}", ranks.join(", "));
        }
    }
}

/// The report of a failed run, and the exit code for any.
pub(crate) fn conclude(outcome: &Outcome, run_dir: &Path) -> u8 {
    if let Some(Failure { rank, pid, how, after, reported, last_lines }) = &outcome.failure {
        eprintln!("error: rank {rank} (pid {pid}) {how} after {:.1} s", after.as_secs_f64());
        if let Some(message) = reported {
            eprintln!("  it said: {}", message.replace('\n', "\n  "));
        } else if !last_lines.is_empty() {
            eprintln!("  its last lines:");
            last_lines.iter().for_each(|line| eprintln!("    {line}"));
        }
        eprintln!("  logs: {}", run_dir.join("logs").display());
    }
    u8::try_from(outcome.exit_code).unwrap_or(1)
}
