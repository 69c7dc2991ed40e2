//! `phalanx bench recovery`: workers of a real run are killed, or stopped, one after the other, and the time to the next finished
//! step is taken, as the run tells of it. Every step is looked for: none may be lost, and none made twice. What it costs to be
//! ready for that is measured next door (`readiness.rs`).

use super::at_least_one;
use super::readiness::readiness;
use crate::args::{Loss, RecoveryArgs, WrongUsage};
use crate::say::print;
use crate::trial::{Trial, data_for};
use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::{Signal, kill};
use phalanx::Event;
use serde::Serialize;
use std::time::Instant;

/// A line of `bench recovery`. Times are in seconds.
#[derive(Serialize)]
struct RecoveryLine<'a> {
    bench: &'static str,
    runs: usize,
    /// From the signal to the next finished step.
    median_s: f64,
    p99_s: f64,
    /// Steps that were made again, or never.
    steps_lost: u64,
    /// How long training stood still when another came in the place of the lost.
    join_stall_median_s: f64,
    join_stall_p99_s: f64,
    /// From the signal to the first step of all workers again.
    whole_median_s: f64,
    /// A step when nothing happens.
    step_median_s: f64,
    recipe: &'a str,
    workers: usize,
    batch: usize,
    by: &'static str,
}

/// Steps of all workers before one of them is lost.
const CALM: u64 = 5;

pub(super) fn recovery(args: &RecoveryArgs) -> Result<()> {
    at_least_one("--runs", args.runs)?;
    at_least_one("--batch", args.batch)?;
    if args.workers < 2 {
        let text =
            format!("--workers {}: a worker is lost to others, so there must be at least 2", args.workers);
        return Err(WrongUsage(text).into());
    }
    let signal = match args.by {
        Loss::Kill => Signal::SIGKILL,
        Loss::Stop => Signal::SIGSTOP,
        Loss::Nothing => return readiness(args),
    };
    let folder = tempfile::tempdir().context("no folder for the run can be made")?;
    let mut training = data_for(&args.recipe, folder.path())?;
    let numbers = [
        ("--nproc-per-node", args.workers),
        ("--batch-size", args.batch),
        ("--epochs", 1_000_000),
        ("--max-restarts", 1_000_000),
    ];
    training.extend(numbers.iter().flat_map(|(flag, number)| [(*flag).to_owned(), number.to_string()]));
    let mut trial = Trial::start(&args.recipe, &folder.path().join("run"), &training)?;
    let mut found = Found::default();
    let lost = lose_all(&mut trial, args, signal, &mut found);
    // Whatever came of it, nothing is left running.
    trial.signal(Signal::SIGTERM)?;
    let ended = trial.end();
    lost?;
    ended?;
    let line = RecoveryLine {
        bench: "recovery",
        runs: args.runs,
        median_s: part(&mut found.lost, 0.5),
        p99_s: part(&mut found.lost, 0.99),
        steps_lost: found.steps_lost,
        join_stall_median_s: part(&mut found.stalls, 0.5),
        join_stall_p99_s: part(&mut found.stalls, 0.99),
        whole_median_s: part(&mut found.whole, 0.5),
        step_median_s: part(&mut found.steps, 0.5),
        recipe: &args.recipe,
        workers: args.workers,
        batch: args.batch,
        by: signal.as_str(),
    };
    if args.json {
        print(serde_json::to_string(&line)?);
    } else {
        let RecoveryLine { runs, median_s, p99_s, steps_lost, recipe, workers, batch, by, .. } = &line;
        print(format_args!(
            "{by} of one of {workers} workers of {recipe}, batch {batch}: median {:.0} ms to the next finished step, p99 {:.0} ms of {runs}; \
             steps lost: {steps_lost}",
            1e3 * median_s,
            1e3 * p99_s
        ));
        print(format_args!(
            "another in its place: stands still {:.0} ms for it (p99 {:.0}), whole again after {:.2} s; a step takes {:.0} ms",
            1e3 * line.join_stall_median_s,
            1e3 * line.join_stall_p99_s,
            line.whole_median_s,
            1e3 * line.step_median_s
        ));
    }
    Ok(())
}

/// What was measured, in seconds.
#[derive(Default)]
struct Found {
    lost: Vec<f64>,
    stalls: Vec<f64>,
    whole: Vec<f64>,
    steps: Vec<f64>,
    steps_lost: u64,
}

/// Loses a worker as often as that is wanted, each time another one.
fn lose_all(trial: &mut Trial, args: &RecoveryArgs, signal: Signal, found: &mut Found) -> Result<()> {
    let mut next = trial.step_of(args.workers, CALM)? + 1;
    for run in 0..args.runs {
        next = lose_one(trial, args, (run % args.workers, signal), next, found)?;
        print_progress(args, run, found);
    }
    Ok(())
}

/// Loses a worker and waits until all are there again; gives the step after the last that was seen.
fn lose_one(
    trial: &mut Trial,
    args: &RecoveryArgs,
    (rank, signal): (usize, Signal),
    mut next: u64,
    found: &mut Found,
) -> Result<u64> {
    let worker = trial.worker(rank).with_context(|| format!("rank {rank} has no process"))?;
    let (calm, start) = (next + CALM, Instant::now());
    let mut lost_at: Option<Instant> = None;
    let (mut has_changed, mut recovered, mut stall, mut again) = (false, false, None, 0);
    loop {
        let Some((at, event)) = trial.next()? else {
            bail!("the run has ended before all workers were lost")
        };
        match event {
            Event::Members { world_size, ms, .. } => {
                has_changed = true;
                // Where another came before the loss was noticed there is no membership without it, and no stall to tell of.
                stall = if world_size == args.workers { ms } else { stall };
            }
            Event::Step { step, world_size, ms, .. } => {
                // One that is told again, or out of order, was lost.
                found.steps_lost += u64::from(step != next);
                next = step + 1;
                match lost_at {
                    None if step >= calm => {
                        lost_at = Some(Instant::now());
                        kill(worker, signal)
                            .with_context(|| format!("rank {rank} can't be sent {signal}"))?;
                    }
                    None => found.steps.push(ms / 1e3),
                    // What was on its way when the signal was sent doesn't count.
                    Some(lost) if !recovered && has_changed => {
                        recovered = true;
                        found.lost.push(at.duration_since(lost).as_secs_f64());
                    }
                    Some(_) => {}
                }
                again = if recovered && world_size == args.workers { again + 1 } else { 0 };
                if let (1, Some(lost)) = (again, lost_at) {
                    found.whole.push(at.duration_since(lost).as_secs_f64());
                }
                if again > CALM {
                    found.stalls.extend(stall.map(|ms| ms / 1e3));
                    return Ok(next);
                }
            }
            _ => {}
        }
        ensure!(start.elapsed() < LIMIT, "no recovery within {LIMIT:.0?}");
    }
}

/// How long one loss may take.
const LIMIT: std::time::Duration = std::time::Duration::from_secs(120);

fn print_progress(args: &RecoveryArgs, run: usize, found: &Found) {
    if let Some(last) = found.lost.last().filter(|_| !args.json) {
        crate::say::say(format_args!("{} of {}: {:.0} ms", run + 1, args.runs, 1e3 * last));
    }
}

/// The value below which this part of them lies.
pub(super) fn part(values: &mut [f64], part: f64) -> f64 {
    values.sort_by(f64::total_cmp);
    let place = ((values.len() as f64 * part).ceil() as usize).clamp(1, values.len().max(1)) - 1;
    values.get(place).copied().unwrap_or(f64::NAN)
}
