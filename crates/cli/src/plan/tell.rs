//! A plan, for people and for programs.

use super::time::{Pace, Sends, worth};
use super::ways::are_replicas;
use super::{Bound, Tried};
use crate::args::PlanArgs;
use crate::say::{print, say};
use phalanx::tensor::AbsentGpu;
use phalanx::{Held, Recipe};
use serde_json::{Map, Value, json};
use std::path::PathBuf;

/// What a plan is about.
pub(super) struct Told<'a> {
    pub(super) args: &'a PlanArgs,
    pub(super) recipe: &'a Recipe,
    /// The run's own limit.
    pub(super) steps: Option<u64>,
    pub(super) workers: usize,
    pub(super) gpu: Option<AbsentGpu>,
    /// How long a step takes: measured here, or told.
    pub(super) step_ms: Option<f64>,
    /// What workers would send each other.
    pub(super) sends: Option<Sends>,
    /// Ways that weren't tried, and why.
    pub(super) skipped: Vec<String>,
}

/// What memory is for, in the words of the account, as columns.
const COLUMNS: [(&str, &[&str]); 6] = [
    ("values", &["values of parameters"]),
    ("gradients", &["gradients"]),
    ("optimizer", &["the optimizer's state and means"]),
    ("casts", &["casts of parameters"]),
    ("passes", PASSES),
    ("rest", &[]),
];
/// Which of them it is.
const PASSES_AT: usize = 4;
const PASSES: &[&str] = &[
    "activations and temporary values of a pass",
    "buffers of recorded passes",
    "buffers that wait to be used again",
];

/// Bytes of each column, and of the driver with the libraries where there are any.
fn columns(held: &Held) -> [u64; COLUMNS.len()] {
    let of = |words: &[&str]| {
        held.parts.iter().filter(|(what, _)| words.contains(what)).map(|(_, bytes)| bytes).sum::<u64>()
    };
    let mut bytes = COLUMNS.map(|(_, words)| of(words));
    bytes[COLUMNS.len() - 1] = held.bytes() - bytes.iter().sum::<u64>();
    bytes
}

/// The worker that holds most; of replicas, which are alike, the first, which is looked at between two steps.
fn fullest(tried: &Tried) -> &Held {
    let workers = &tried.needs.workers;
    let of = if are_replicas(&tried.way.recipe) { &workers[..1] } else { workers };
    of.iter().max_by_key(|held| held.bytes()).expect("there is a worker")
}

impl Told<'_> {
    pub(super) fn tell(&self, tried: &[Tried]) {
        let asked = tried.iter().find(|tried| tried.way.asked).expect("it is among them");
        if self.args.json {
            self.in_json(tried, asked);
        } else {
            self.in_words(tried, asked);
        }
    }

    fn total_steps(&self, asked: &Tried) -> u64 {
        let all = self.recipe.train.epochs * asked.needs.steps_per_epoch;
        self.steps.map_or(all, |steps| steps.min(all))
    }

    /// Bytes of what lies beside values and gradients: what the optimizer has of each number, and its mean.
    fn beside(&self, asked: &Tried) -> u64 {
        let states = self.recipe.rule().map_or(0, |rule| rule.state_names().len());
        (4 * asked.needs.parameters * (states + usize::from(self.recipe.train.ema.is_some()))) as u64
    }

    /// Bytes of all values.
    fn values(asked: &Tried) -> u64 {
        4 * asked.needs.parameters as u64
    }

    fn checkpoint(&self, asked: &Tried) -> u64 {
        Told::values(asked) + self.beside(asked)
    }

    fn in_words(&self, tried: &[Tried], asked: &Tried) {
        let Recipe { name, train, .. } = self.recipe;
        let needs = &asked.needs;
        let (workers, samples) = (self.workers, needs.step_samples);
        let plural = |n: usize| if n == 1 { "" } else { "s" };
        print(format_args!(
            "{name}: {} numbers to learn, {} samples, {} steps an epoch, {} in all",
            needs.parameters,
            needs.samples,
            needs.steps_per_epoch,
            self.total_steps(asked)
        ));
        let on = match self.gpu {
            Some(gpu) => format!("with a GPU each ({}, {})", gpu.name, amount(gpu.memory)),
            None => "on cores of this machine".to_owned(),
        };
        let precision = train.precision.as_deref().unwrap_or("float32");
        print(format_args!(
            "{workers} worker{} {on}, {samples} samples a step, {precision}\n",
            plural(workers)
        ));
        match self.gpu {
            Some(_) => self.ways_in_words(tried),
            None => print(format_args!(
                "memory: {} of values, gradients and the optimizer's state, {} of a worker's passes, and the program with its data",
                amount(2 * Told::values(asked) + self.beside(asked)),
                amount(columns(fullest(asked))[PASSES_AT])
            )),
        }
        print(format_args!(
            "a checkpoint: {}, of which {} are kept",
            amount(self.checkpoint(asked)),
            self.recipe.checkpoint(PathBuf::new()).keep
        ));
        self.time_in_words(asked);
        if let Some(lacks) = &asked.lacks {
            say(format_args!("error: {} doesn't fit: {lacks}", asked.way.name));
            match tried.iter().find(|tried| tried.lacks.is_none()) {
                Some(fits) => say(format_args!("hint: {} fits: {}", fits.way.name, as_flags(&fits.way.set))),
                None => say("hint: smaller batches, more workers, or GPUs with more memory"),
            }
        }
    }

    /// A line for each way.
    fn ways_in_words(&self, tried: &[Tried]) {
        let head = COLUMNS.iter().map(|(name, _)| *name).chain(["all", "sent"]);
        let cells = head.map(|name| format!("{name:>11}")).collect::<String>();
        let longest = tried.iter().map(|tried| tried.way.name.len() + 2).max().unwrap_or(0).max(26);
        print(format_args!("{:<longest$}{cells}  largest batch", "the fullest worker, a step"));
        for tried in tried {
            let held = fullest(tried);
            let bytes = columns(held).into_iter().chain([held.bytes()]);
            // What goes by way of hosts nobody counts.
            let sent = tried.needs.sent.map_or("?".to_owned(), some);
            let cells = bytes.map(some).chain([sent]);
            let cells = cells.map(|text| format!("{text:>11}")).collect::<String>();
            let mark = if tried.way.asked { ">" } else { " " };
            let fits = match (tried.largest, &tried.lacks) {
                (None, _) => String::new(),
                (Some((0, _)), _) => "  none fits".to_owned(),
                (Some((n, Bound::Samples)), _) => format!("  {n}, as many as there are"),
                (Some((n, Bound::Memory)), None) => format!("  about {n}"),
                (Some((n, Bound::Memory)), Some(_)) => format!("  about {n}, less than was asked for"),
            };
            let name = format!("{mark} {}", tried.way.name);
            print(format_args!("{name:<longest$}{cells}{fits}"));
        }
        self.skipped.iter().for_each(|why| print(format_args!("  {why}")));
        print(
            "\nbeside that: 0.5 GiB of the driver and the libraries, and what convolutions and NCCL want to work with",
        );
    }

    fn time_in_words(&self, asked: &Tried) {
        let Some(step_ms) = self.step_ms else {
            return match self.gpu {
                Some(_) => print(
                    "how long: --step-ms takes what `phalanx bench step --device cuda:0` measures on such a GPU, --link what workers can send",
                ),
                None => print("how long: `phalanx bench scaling` measures more workers than there are cores"),
            };
        };
        let steps = self.total_steps(asked) as f64;
        let Some((pace, sends)) = self.pace(step_ms) else {
            let whole = lasting(steps * step_ms);
            let sent = match (self.gpu, self.workers, asked.needs.sent) {
                (Some(_), 2.., None) => "; what workers send goes by way of their hosts, and isn't counted",
                _ => "",
            };
            return print(format_args!(
                "how long: {} a step, {whole} for {steps} of them{sent}",
                lasting(step_ms)
            ));
        };
        let samples = asked.needs.step_samples as f64;
        let here = pace.on(samples, self.workers, sends);
        let [from, to] = [here.ms_from, here.ms_to].map(|ms| lasting(steps * ms));
        print(format_args!(
            "how long: {:.1} to {:.1} ms a step, {from} to {to} for {steps} of them: all that is sent goes beside the computing, or nothing",
            here.ms_from, here.ms_to
        ));
        let over = pace.over(samples, sends);
        let [most, least] = [worth(&over, |at| at.ms_from), worth(&over, |at| at.ms_to)];
        print(format_args!("steps of {samples} samples on more workers:"));
        for at in &over {
            print(format_args!(
                "{:>6} x {:<8.4} {:>9.2} to {:.2} ms",
                at.workers, at.batch, at.ms_from, at.ms_to
            ));
        }
        let up_to = if least == most { format!("{least}") } else { format!("{least} to {most}") };
        let beyond = match over.last().is_some_and(|last| last.workers == least) {
            true => "a step has no samples for more",
            false => "those beyond do less than half of what one alone does",
        };
        print(format_args!("worth asking for: up to {up_to} workers; {beyond}"));
    }

    fn pace(&self, step_ms: f64) -> Option<(Pace, Sends)> {
        let accumulated = self.recipe.train.batch_size * self.recipe.train.accumulate.unwrap_or(1);
        let link = self.args.link?;
        Some((Pace { step_ms, batch: accumulated as f64, link }, self.sends?))
    }

    fn in_json(&self, tried: &[Tried], asked: &Tried) {
        let needs = &asked.needs;
        print(json!({
            "plan": "run",
            "recipe": self.recipe.name,
            "parameters": needs.parameters,
            "samples": needs.samples,
            "steps_per_epoch": needs.steps_per_epoch,
            "steps": self.total_steps(asked),
            "workers": self.workers,
            "batch": self.recipe.train.batch_size,
            "gpu": self.gpu.map(|gpu| gpu.name),
            "memory": self.gpu.map(|gpu| gpu.memory),
            "step_samples": needs.step_samples,
            "checkpoint_bytes": self.checkpoint(asked),
            "skipped": self.skipped,
        }));
        for tried in tried {
            let held = fullest(tried);
            let parts: Map<String, Value> =
                held.parts.iter().map(|(what, bytes)| ((*what).to_owned(), (*bytes).into())).collect();
            print(json!({
                "plan": "way",
                "way": tried.way.name,
                "set": tried.way.set,
                "asked": tried.way.asked,
                "fits": tried.lacks.is_none(),
                "bytes": held.bytes(),
                "parts": parts,
                "workers_bytes": tried.needs.workers.iter().map(Held::bytes).collect::<Vec<_>>(),
                "sent_bytes": tried.needs.sent,
                "largest_batch": tried.largest.map(|(n, _)| n),
                "lacks": tried.lacks,
            }));
        }
        let Some(step_ms) = self.step_ms else { return };
        let Some((pace, sends)) = self.pace(step_ms) else {
            return print(json!({ "plan": "time", "step_ms": step_ms }));
        };
        let samples = asked.needs.step_samples as f64;
        let over = pace.over(samples, sends);
        print(json!({
            "plan": "time",
            "step_ms": step_ms,
            "here": pace.on(samples, self.workers, sends),
            "over": over,
            "worth_from": worth(&over, |at| at.ms_to),
            "worth_to": worth(&over, |at| at.ms_from),
        }));
    }
}

/// Bytes, as people compare them.
fn amount(bytes: u64) -> String {
    let [mib, gib] = [20, 30].map(|power| bytes as f64 / f64::from(1 << power));
    if gib < 0.95 { format!("{mib:.1} MiB") } else { format!("{gib:.1} GiB") }
}

/// A time, likewise.
fn lasting(ms: f64) -> String {
    let seconds = ms / 1e3;
    match seconds {
        ..1.0 => format!("{ms:.1} ms"),
        ..120.0 => format!("{seconds:.1} s"),
        ..7200.0 => format!("{:.1} min", seconds / 60.0),
        _ => format!("{:.1} h", seconds / 3600.0),
    }
}

/// Bytes, if there are any.
fn some(bytes: u64) -> String {
    if bytes == 0 { "-".to_owned() } else { amount(bytes) }
}

/// Settings as they are typed behind a recipe.
fn as_flags(set: &[&str]) -> String {
    set.iter().map(|set| format!("--set {set}")).collect::<Vec<_>>().join(" ")
}
