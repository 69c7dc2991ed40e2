//! `phalanx bench scaling`: a job at several counts of workers, what its steps are made of, and what that says of other counts.

mod advice;
mod busy;
mod draw;
mod measure;
mod model;
mod sharing;

use super::at_least_one;
use crate::args::{ScalingArgs, WrongUsage};
use crate::run::fresh_run_id;
use crate::say::{print, say};
use crate::trial::data_for;
pub(crate) use advice::WORTH;
use advice::{Expected, Mode, expected, worth};
use anyhow::{Context, Result};
use draw::Curve;
use measure::{Jobs, Middle, Place, Sort, measure};
use model::{At, Measured, Model, Parts, Predicted};
use phalanx::cores;
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::PathBuf;

/// The result, as JSON.
#[derive(Serialize)]
struct ScalingLine<'a> {
    bench: &'static str,
    recipe: &'a str,
    /// Samples of each worker (weak), or of all (strong).
    batch: usize,
    threads: usize,
    /// Cores of this machine, or none where each worker had its own by the word of Slurm.
    cores: Option<usize>,
    /// The share of these that others used when it began, from 0 to 1.
    busy: Option<f64>,
    steps: usize,
    runs: usize,
    points: &'a [PointFields],
    /// Milliseconds; see the text for what they belong to.
    coefficients: BTreeMap<&'static str, f64>,
    modes: Vec<ModeFields<'a>>,
}

/// What was measured at a count.
#[derive(Serialize)]
struct PointFields {
    mode: Mode,
    workers: usize,
    batch: usize,
    step_ms: f64,
    spread_ms: f64,
    #[serde(flatten)]
    parts: Parts,
    samples_per_s: f64,
    speed_up: f64,
    efficiency: f64,
    /// Whether workers took turns on the cores.
    shares_cores: bool,
    /// Whether the model was kept from it, and what it said then.
    #[serde(skip_serializing_if = "Option::is_none")]
    held_out: Option<HeldOut>,
}

/// What was foretold of a count that the model was kept from.
#[derive(Clone, Copy, Serialize)]
struct HeldOut {
    predicted: Predicted,
    /// How far off, relative to what was measured.
    error: f64,
}

/// What is said of a mode.
#[derive(Serialize)]
struct ModeFields<'a> {
    mode: Mode,
    /// How many workers are worth it on the cores that there are, where they are known.
    #[serde(skip_serializing_if = "Option::is_none")]
    worth_here: Option<usize>,
    /// And where each worker has cores of its own, as this one's.
    worth: usize,
    here: &'a [Expected],
    expected: &'a [Expected],
}

/// What others use of a machine that is worth a word.
const BUSY: f64 = 0.1;
/// How far the model is asked beyond what was measured.
const BEYOND: usize = 16;

pub(super) fn scaling(args: &ScalingArgs) -> Result<()> {
    for (flag, number) in [
        ("--batch", args.batch),
        ("--steps", args.steps),
        ("--runs", args.runs),
        ("--threads", args.threads),
        ("--nproc-per-node", args.nproc_per_node.unwrap_or(1)),
    ] {
        at_least_one(flag, number)?;
    }
    let counts = counts(args)?;
    let modes: Vec<Mode> = match (args.strong, args.weak) {
        (true, false) => vec![Mode::Strong],
        (false, true) => vec![Mode::Weak],
        _ => vec![Mode::Weak, Mode::Strong],
    };
    let asked = points(args, &modes, &counts)?;
    let place = place(args)?;
    let kept = tempfile::tempdir().context("no folder for the runs can be made")?;
    let folder = match place {
        Place::Here => kept.path().to_owned(),
        // Nodes have to see it.
        _ => PathBuf::from(format!("runs/scaling-{}", fresh_run_id()?)),
    };
    let mut more = data_for(&args.recipe, &folder)?;
    more.extend(args.set.iter().flat_map(|set| ["--set".to_owned(), set.clone()]));
    let (recipe, threads, warm_up, steps) = (args.recipe.as_str(), args.threads, args.warm_up, args.steps);
    let sort = Sort { recipe, more: &more, threads, warm_up, steps, folder: &folder };
    let machine = matches!(place, Place::Here).then(cores);
    let busy = tell_beginning(args, &counts, machine);
    let mut middles: Vec<Vec<Middle>> = vec![Vec::new(); asked.len()];
    // In turns, so that what comes and goes on the machine meets all of them.
    for run in 0..args.runs {
        for (which, &(workers, batch)) in asked.iter().enumerate() {
            let measured = measure(&sort, &place, workers, batch, run)?;
            let Parts { compute_ms, comm_ms, input_ms } = measured.parts;
            say(format_args!(
                "run {} of {}, {workers} workers, {batch} samples each: {:.2} ms a step ({compute_ms:.2} computing, {comm_ms:.2} communication, {input_ms:.2} input)",
                run + 1,
                args.runs,
                measured.step_ms
            ));
            middles[which].push(measured);
        }
    }
    let measured: Vec<Measured> =
        asked.iter().zip(&middles).map(|(&point, runs)| summed(args, machine, point, runs)).collect();
    conclude(args, &modes, (machine, busy), &measured)
}

/// The counts that were typed, in order.
fn counts(args: &ScalingArgs) -> Result<Vec<usize>, WrongUsage> {
    let text = &args.workers;
    let wrong = |why: &str| WrongUsage(format!("--workers {text}: {why}"));
    let number = |word: &str| word.trim().parse::<usize>().ok().filter(|n| (1..=4096).contains(n));
    let counts: Option<Vec<usize>> = text.split(',').map(number).collect();
    let mut counts = counts.ok_or_else(|| wrong("must be counts from 1 to 4096, as in 1,2,4"))?;
    counts.sort_unstable();
    counts.dedup();
    if counts.len() < 2 {
        return Err(wrong("takes two counts or more: one says nothing of others"));
    }
    if counts[0] != 1 {
        counts.insert(0, 1);
        say("a run of 1 worker is measured too: all others are compared with it");
    }
    for held_out in &args.hold_out {
        if !counts.contains(held_out) || *held_out == 1 {
            let why = "is none of the counts above 1 that are measured";
            return Err(WrongUsage(format!("--hold-out {held_out}: {why}, --workers {text}")));
        }
    }
    if counts.iter().filter(|count| !args.hold_out.contains(count)).count() < 2 {
        return Err(wrong("leaves less than two counts to the model: measure more, or hold out fewer"));
    }
    Ok(counts)
}

/// Workers and samples of each, every pair once.
fn points(args: &ScalingArgs, modes: &[Mode], counts: &[usize]) -> Result<Vec<(usize, usize)>, WrongUsage> {
    let mut all = Vec::new();
    for mode in modes {
        for &workers in counts {
            if *mode == Mode::Strong && !args.batch.is_multiple_of(workers) {
                let least = counts.iter().fold(1, |all, &n| all * n / gcd(all, n));
                let next = args.batch.div_ceil(least) * least;
                return Err(WrongUsage(format!(
                    "--batch {}: isn't dealt evenly to {workers} workers\nhint: --batch {next}, or --weak alone",
                    args.batch
                )));
            }
            let batch = mode.batch(args.batch, workers) as usize;
            all.push((workers, batch));
            if !args.hold_out.contains(&workers) {
                // What so few samples take is best seen where nobody shares anything.
                all.push((1, batch));
            }
        }
    }
    all.sort_unstable();
    all.dedup();
    Ok(all)
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// Where runs take place.
fn place(args: &ScalingArgs) -> Result<Place> {
    let per_node = args.nproc_per_node.unwrap_or(usize::MAX);
    let in_allocation = std::env::var("SLURM_JOB_ID").is_ok_and(|job| !job.is_empty());
    if args.slurm {
        return Ok(Place::Jobs(Box::new(Jobs {
            per_node,
            gpus: args.gpus,
            cores_per_worker: u32::try_from(args.threads)?,
            partition: args.partition.clone(),
            time: args.time,
            options: args.sbatch.clone(),
            patience: args.patience,
        })));
    }
    Ok(if in_allocation { Place::Allocation { per_node } } else { Place::Here })
}

/// Says what is to be known of the machine; gives how busy others keep it.
fn tell_beginning(args: &ScalingArgs, counts: &[usize], machine: Option<usize>) -> Option<f64> {
    let cores = machine?;
    let (threads, most) = (args.threads, counts[counts.len() - 1]);
    let fit = cores / threads;
    if most * threads > cores {
        say(format_args!(
            "this machine has {cores} cores, so more than {fit} workers of {threads} threads take turns: what is measured there is how they share, which the model knows, and not what more cores would do"
        ));
    }
    let busy = busy::busy();
    if let Some(busy) = busy.filter(|&busy| busy > BUSY) {
        say(format_args!(
            "others use {:.0}% of this machine's cores now: what is measured beside them says little of a machine of one's own",
            100.0 * busy
        ));
    }
    busy
}

/// One point, of its runs: the middle one of them, and how far the others are from it. Where workers share cores the fastest has only been
/// lucky, and one that was disturbed moves neither.
fn summed(
    args: &ScalingArgs,
    machine: Option<usize>,
    (workers, batch): (usize, usize),
    runs: &[Middle],
) -> Measured {
    let mut sorted = runs.to_vec();
    sorted.sort_by(|a, b| a.step_ms.total_cmp(&b.step_ms));
    let Middle { step_ms, parts } = sorted[(sorted.len() - 1) / 2];
    let mut off: Vec<f64> = runs.iter().map(|run| (run.step_ms - step_ms).abs()).collect();
    off.sort_by(f64::total_cmp);
    let spread_ms = DEVIATIONS * (off[(off.len() - 1) / 2] + off[off.len() / 2]) / 2.0;
    Measured { at: at(args, machine, workers, batch as f64), parts, step_ms, spread_ms }
}

/// How many median deviations are a standard deviation, of values that are spread as errors are.
const DEVIATIONS: f64 = 1.4826;

fn at(args: &ScalingArgs, machine: Option<usize>, workers: usize, batch: f64) -> At {
    let cores = machine.map_or(workers as f64, |cores| cores as f64 / args.threads as f64);
    At { workers, batch, cores: cores.max(1.0) }
}

/// Fits, foretells, advises and draws.
fn conclude(
    args: &ScalingArgs,
    modes: &[Mode],
    (machine, busy): (Option<usize>, Option<f64>),
    measured: &[Measured],
) -> Result<()> {
    let fitted: Vec<Measured> =
        measured.iter().filter(|point| !args.hold_out.contains(&point.at.workers)).copied().collect();
    let model = Model::fit(&fitted);
    let most = measured.iter().map(|point| point.at.workers).max().unwrap_or(1);
    let beyond = most.next_power_of_two() * BEYOND;
    let cores = machine.map(|cores| (cores as f64 / args.threads as f64).max(1.0));
    let mut points = Vec::new();
    let (mut here, mut there, mut drawn) = (Vec::new(), Vec::new(), Vec::new());
    for &mode in modes {
        let of_mode = fields(args, mode, &model, measured);
        drawn.push(of_mode.iter().map(|p| (p.workers, p.speed_up, p.held_out.is_some())).collect::<Vec<_>>());
        points.extend(of_mode);
        let known = if cores.is_some() { most.next_power_of_two() } else { 0 };
        here.push(expected(&model, mode, args.batch, cores, known));
        there.push(expected(&model, mode, args.batch, None, beyond));
    }
    // What was measured lies on the cores that there are, so that is what is drawn beside it.
    let lines = modes.iter().enumerate().map(|(i, &mode)| {
        let expected = if here[i].is_empty() { &there[i] } else { &here[i] };
        Curve { mode, expected, measured: &drawn[i] }
    });
    let curves: Vec<Curve<'_>> = lines.collect();
    let title =
        format!("{} on {}", args.recipe, machine.map_or("Slurm".into(), |cores| format!("{cores} cores")));
    if let Some(file) = &args.svg {
        std::fs::write(file, draw::svg(&curves, &title)).with_context(|| format!("{}", file.display()))?;
    }
    if args.json {
        let of_mode = |(i, &mode): (usize, &Mode)| ModeFields {
            mode,
            worth_here: (!here[i].is_empty()).then(|| worth(&here[i])),
            worth: worth(&there[i]),
            here: &here[i],
            expected: &there[i],
        };
        let line = ScalingLine {
            bench: "scaling",
            recipe: &args.recipe,
            batch: args.batch,
            threads: args.threads,
            cores: machine,
            busy,
            steps: args.steps,
            runs: args.runs,
            points: &points,
            coefficients: model.coefficients().into_iter().collect(),
            modes: modes.iter().enumerate().map(of_mode).collect(),
        };
        print(serde_json::to_string(&line)?);
        return Ok(());
    }
    table(&points);
    curves.iter().for_each(|curve| print(draw::text(curve).trim_end()));
    tell_model(&model);
    for point in &points {
        let Some(HeldOut { predicted, error }) = point.held_out else { continue };
        let (mode, workers, ms) = (point.mode.name(), point.workers, point.step_ms);
        print(format_args!(
            "{mode}, {workers} workers, which the model was kept from: {:.2} ms foretold, give or take {:.2}, and {ms:.2} measured: {:+.1}%",
            predicted.ms,
            predicted.within_ms,
            100.0 * error
        ));
    }
    for (i, &mode) in modes.iter().enumerate() {
        advise(mode, &here[i], &there[i], machine);
    }
    Ok(())
}

/// What was measured in this mode, beside one worker.
fn fields(args: &ScalingArgs, mode: Mode, model: &Model, measured: &[Measured]) -> Vec<PointFields> {
    let is_of = |point: &&Measured| (point.at.batch - mode.batch(args.batch, point.at.workers)).abs() < 0.5;
    let rate = |point: &Measured| 1e3 * point.at.workers as f64 * point.at.batch / point.step_ms.max(1e-9);
    // Others of one worker have fewer samples.
    let alone = measured.iter().filter(is_of).find(|point| point.at.workers == 1).map_or(1.0, rate);
    let of = |point: &Measured| {
        let Measured { at, parts, step_ms, spread_ms } = *point;
        let predicted = model.predict(at);
        let held_out = args.hold_out.contains(&at.workers);
        let held_out = held_out.then(|| HeldOut { predicted, error: predicted.ms / step_ms - 1.0 });
        let speed_up = rate(point) / alone;
        PointFields {
            mode,
            workers: at.workers,
            batch: at.batch as usize,
            step_ms,
            spread_ms,
            parts,
            samples_per_s: rate(point),
            speed_up,
            efficiency: speed_up / at.workers as f64,
            shares_cores: at.workers as f64 > at.cores,
            held_out,
        }
    };
    measured.iter().filter(is_of).map(of).collect()
}

fn table(points: &[PointFields]) {
    print(
        "mode    workers  samples each  step ms (spread)  computing  communication  input  samples/s  speed-up  efficiency",
    );
    for point in points {
        let Parts { compute_ms, comm_ms, input_ms } = point.parts;
        let shared = if point.shares_cores { "  (cores shared)" } else { "" };
        print(format_args!(
            "{:<7} {:>7}  {:>12}  {:>7.2} ({:>5.2})   {compute_ms:>9.2}  {comm_ms:>13.2}  {input_ms:>5.2}  {:>9.0}  {:>8.2}  {:>9.0}%{shared}",
            point.mode.name(),
            point.workers,
            point.batch,
            point.step_ms,
            point.spread_ms,
            point.samples_per_s,
            point.speed_up,
            100.0 * point.efficiency
        ));
    }
}

fn tell_model(model: &Model) {
    let used: Vec<String> = model
        .coefficients()
        .into_iter()
        .filter(|(_, value)| *value > 0.0)
        .map(|(name, value)| format!("{name} = {value:.4}"))
        .collect();
    print(
        "model: a step of n workers with B samples each takes s (a B + b + g B u + e B + c log2 m + d (m-1)/m), in ms;",
    );
    print(
        "  where s > 1, those on cores with a worker more are late by q at most, and each waits w (s-1) for turns;",
    );
    print(format_args!(
        "  s: workers for each core, or 1 where each has its own, m: n, or as many as run at once, u: how many of the others are busy; {}, all else 0",
        used.join(", ")
    ));
}

fn advise(mode: Mode, here: &[Expected], there: &[Expected], machine: Option<usize>) {
    let name = mode.name();
    if let Some(cores) = machine.filter(|_| !here.is_empty()) {
        let n = worth(here);
        print(format_args!("{name}: on the {cores} cores of this machine ask for {n} worker{}", s(n)));
    }
    let (n, last) = (worth(there), there.len() - 1);
    let rule =
        format!("the workers that doubling adds do at least {:.0}% of what a lone one does", 100.0 * WORTH);
    match there.iter().position(|expected| expected.workers == n) {
        Some(at) if at < last => {
            let (this, next) = (&there[at], &there[at + 1]);
            print(format_args!(
                "{name}: with cores of their own ask for {n} worker{}: so far {rule}; they are {:.1} times as fast as one ({:.1} to {:.1}), and of {} those that are added would do {:.0}%",
                s(n),
                this.speed_up,
                this.speed_up_from,
                this.speed_up_to,
                next.workers,
                100.0 * next.marginal.max(0.0)
            ));
        }
        _ => print(format_args!(
            "{name}: with cores of their own {n} workers, the most that the model was asked about, are still worth it: {rule}; they are {:.1} times as fast as one ({:.1} to {:.1})",
            there[last].speed_up, there[last].speed_up_from, there[last].speed_up_to
        )),
    }
    print(
        "  (what lies beyond the counts that were measured holds as far as the model does: the same machines, connected alike)",
    );
}

fn s(n: usize) -> &'static str {
    if n == 1 { "" } else { "s" }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Typed {
        #[command(flatten)]
        args: ScalingArgs,
    }

    #[test]
    fn counts_and_batches_are_checked() {
        let check = |flags: &[&str], want: Result<&[(usize, usize)], &str>| {
            let args = Typed::parse_from(["scaling"].iter().chain(flags)).args;
            let modes = [Mode::Weak, Mode::Strong];
            let got = counts(&args).and_then(|counts| points(&args, &modes, &counts));
            match (got, want) {
                (Ok(got), Ok(want)) => assert_eq!(got, want, "{flags:?}"),
                (Err(error), Err(want)) => assert!(error.0.contains(want), "{error}"),
                (got, want) => panic!("{flags:?}: {got:?} and not {want:?}"),
            }
        };
        check(&["--workers", "1,2"], Ok(&[(1, 32), (1, 64), (2, 32), (2, 64)]));
        check(&["--workers", "2,4"], Ok(&[(1, 16), (1, 32), (1, 64), (2, 32), (2, 64), (4, 16), (4, 64)]));
        // What a count that is held out would have is left to the model.
        check(
            &["--workers", "1,2,4", "--hold-out", "4"],
            Ok(&[(1, 32), (1, 64), (2, 32), (2, 64), (4, 16), (4, 64)]),
        );
        check(
            &["--workers", "1,2,3,4"],
            Err("--batch 64: isn't dealt evenly to 3 workers\nhint: --batch 72"),
        );
        check(&["--workers", "1"], Err("two counts"));
        check(&["--workers", "0,1"], Err("from 1 to 4096"));
        check(&["--workers", "1,x"], Err("from 1 to 4096"));
        check(&["--workers", "1,2,4", "--hold-out", "3"], Err("--hold-out 3: is none"));
        check(&["--workers", "1,2,4", "--hold-out", "1"], Err("--hold-out 1: is none"));
        check(&["--workers", "1,2", "--hold-out", "2"], Err("less than two counts"));
    }

    #[test]
    fn a_count_is_its_middle_run_and_one_that_was_disturbed_changes_nothing() {
        let args = Typed::parse_from(["scaling"]).args;
        let run = |step_ms| Middle { step_ms, parts: Parts { compute_ms: step_ms, ..Parts::default() } };
        let check = |runs: &[f64], step_ms: f64, spread_ms: f64| {
            let runs: Vec<Middle> = runs.iter().map(|&ms| run(ms)).collect();
            let got = summed(&args, Some(2), (4, 8), &runs);
            assert_eq!((got.step_ms, got.parts.compute_ms), (step_ms, step_ms), "{runs:?}");
            assert!((got.spread_ms - DEVIATIONS * spread_ms).abs() < 1e-9, "{runs:?}: {got:?}");
        };
        check(&[7.0], 7.0, 0.0);
        check(&[7.0, 9.0], 7.0, 1.0);
        check(&[10.0, 11.0, 9.0], 10.0, 1.0);
        check(&[10.0, 11.0, 9.0, 9.5, 500.0], 10.0, 1.0);
    }
}
