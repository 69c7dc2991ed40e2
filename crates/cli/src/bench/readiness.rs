//! `phalanx bench recovery --by nothing`: what it costs a step to be ready for losses when none happen.
//!
//! In a step of a large model that drowns in the machine's noise. It doesn't depend on the model but for its buffers, which are
//! kept from step to step in runs of either kind, so it is taken in runs of short steps, of which those that are ready for
//! losses and those that end with the first take turns, and told as a part of a step of the recipe.

use super::recovery::part;
use crate::args::RecoveryArgs;
use crate::say::{print, say};
use crate::trial::{Trial, data_for};
use anyhow::{Context, Result};
use phalanx::Event;
use serde::Serialize;
use std::path::Path;

/// A line of `bench recovery --by nothing`.
#[derive(Serialize)]
struct ReadinessLine<'a> {
    bench: &'static str,
    by: &'static str,
    /// Pairs of runs.
    runs: usize,
    /// A short step of runs that end with the first loss: the median over the runs of their medians.
    fixed_us: f64,
    /// The same of runs that go on.
    elastic_us: f64,
    /// The median over the pairs of how much longer a step takes, and between which values half of them lie.
    overhead_us: f64,
    overhead_quarter_us: f64,
    overhead_three_quarters_us: f64,
    /// A step of the recipe.
    step_median_ms: f64,
    /// What part of it that is, in percent.
    overhead_percent: f64,
    recipe: &'a str,
    workers: usize,
    batch: usize,
}

/// What is trained in short steps, and how long.
const SHORT: &str = "mnist-mini";
const SHORT_BATCH: usize = 8;
const SHORT_STEPS: usize = 2_000;
/// Steps of the recipe.
const STEPS: usize = 16;

pub(super) fn readiness(args: &RecoveryArgs) -> Result<()> {
    let folder = tempfile::tempdir().context("no folder for the runs can be made")?;
    let (mut fixed, mut elastic, mut overhead) = (Vec::new(), Vec::new(), Vec::new());
    for run in 0..args.runs {
        let mut pair = [0.0; 2];
        // Who is first changes from pair to pair.
        for i in [run % 2, 1 - run % 2] {
            let restarts = [0, 3][i];
            let sizes = (SHORT_BATCH, SHORT_STEPS, restarts);
            let mut steps =
                steps_of(SHORT, args.workers, sizes, &[], &folder.path().join(format!("{run}-{i}")))?;
            pair[i] = 1e3 * part(&mut steps, 0.5);
        }
        fixed.push(pair[0]);
        elastic.push(pair[1]);
        overhead.push(pair[1] - pair[0]);
        if !args.json {
            say(format_args!("{} of {}: {:.1} us and {:.1} us", run + 1, args.runs, pair[0], pair[1]));
        }
    }
    let data = data_for(&args.recipe, folder.path())?;
    let sizes = (args.batch, STEPS, 3);
    let mut steps = steps_of(&args.recipe, args.workers, sizes, &data, &folder.path().join("recipe"))?;
    let (step_median_ms, overhead_us) = (part(&mut steps, 0.5), part(&mut overhead, 0.5));
    let line = ReadinessLine {
        bench: "recovery",
        by: "nothing",
        runs: args.runs,
        fixed_us: part(&mut fixed, 0.5),
        elastic_us: part(&mut elastic, 0.5),
        overhead_us,
        overhead_quarter_us: part(&mut overhead, 0.25),
        overhead_three_quarters_us: part(&mut overhead, 0.75),
        step_median_ms,
        overhead_percent: overhead_us / step_median_ms / 10.0,
        recipe: &args.recipe,
        workers: args.workers,
        batch: args.batch,
    };
    if args.json {
        print(serde_json::to_string(&line)?);
    } else {
        print(format_args!(
            "being ready for losses costs a step {:.1} us (half of {} pairs between {:.1} and {:.1}; {:.1} us without, {:.1} with)",
            line.overhead_us,
            line.runs,
            line.overhead_quarter_us,
            line.overhead_three_quarters_us,
            line.fixed_us,
            line.elastic_us
        ));
        print(format_args!(
            "of a step of {}, batch {}, {} workers, {:.1} ms: {:.3}%",
            line.recipe, line.batch, line.workers, line.step_median_ms, line.overhead_percent
        ));
    }
    Ok(())
}

/// How long each step of a run took, in milliseconds.
fn steps_of(
    recipe: &str,
    workers: usize,
    (batch, steps, restarts): (usize, usize, usize),
    more: &[String],
    out: &Path,
) -> Result<Vec<f64>> {
    let numbers = [
        ("--nproc-per-node", workers),
        ("--batch-size", batch),
        ("--epochs", 1_000_000),
        ("--steps", steps),
        ("--log-interval", 1),
        ("--max-restarts", restarts),
    ];
    let told = numbers.iter().flat_map(|(flag, number)| [(*flag).to_owned(), number.to_string()]);
    let trial = Trial::start(recipe, out, &more.iter().cloned().chain(told).collect::<Vec<_>>())?;
    let mut taken = Vec::new();
    while let Some((_, event)) = trial.next()? {
        if let Event::Step { ms, .. } = event {
            taken.push(ms);
        }
    }
    let (status, said) = trial.end()?;
    anyhow::ensure!(
        status.success() && taken.len() == steps,
        "a run of {steps} steps ended with {status}: {said}"
    );
    Ok(taken)
}
