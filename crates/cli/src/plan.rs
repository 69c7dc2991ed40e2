//! `phalanx plan`: what a run would hold, send and take, before anybody has the GPUs for it.
//!
//! Its first steps are rehearsed, in each way that workers can share a model, on GPUs that aren't there; all else is arithmetic on what
//! comes of that.

mod tell;
mod time;
mod ways;

use crate::args::{self, PlanArgs, TrainArgs, WrongUsage};
use crate::bar::FetchBar;
use crate::meminfo::Meminfo;
use crate::top::gpus::gib;
use crate::train;
use anyhow::{Result, anyhow};
use phalanx::data::{Places, Split, open};
use phalanx::nn::Parameters;
use phalanx::tensor::{AbsentGpu, Device};
use phalanx::{DeviceSpec, Error, Recipe, Rehearsed, Stage, cores, rehearse};
use tell::Told;
use time::Sends;
use ways::{Way, ways};

/// What came of one way.
pub(super) struct Tried {
    way: Way,
    /// What its workers would hold.
    needs: Rehearsed,
    /// Why that doesn't fit.
    lacks: Option<String>,
    /// The most samples a worker and step that fit, and what bounds them; none where that wasn't tried.
    largest: Option<(usize, Bound)>,
}

/// What bounds the samples of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Bound {
    Memory,
    /// There are no more.
    Samples,
}

/// More workers are threads of one process, each with what its step takes of the host.
const MOST_WORKERS: usize = 512;

pub(crate) fn plan(args: &PlanArgs) -> Result<u8> {
    let mut training = args::parse_train(&args.work)?;
    refuse_what_makes_no_plan(args, &training)?;
    let gpu = args.gpu.map(|kind| AbsentGpu { memory: args.memory.unwrap_or(kind.memory), ..kind });
    training.device = gpu.map(|_| DeviceSpec::Cuda(None));
    let workers = workers(args, training.nproc_per_node.as_deref())?;
    let wrong = |error: Error| WrongUsage(error.to_string());
    let recipe = train::configured(&args.work[0], None, &training).map_err(wrong)?;
    recipe.check_workers(workers).map_err(|error| WrongUsage(error.to_string()))?;
    let places = Places::from_env(training.data.clone());
    let data = open(&recipe.data.name, recipe.view(), &places, &mut FetchBar::new())?;
    silence_workers();
    let stage = gpu.map_or(Stage::Cpu, Stage::Gpus);
    let mut tried = Vec::new();
    let (ways, mut skipped) = ways(&recipe, workers, gpu.is_some());
    for way in ways {
        let asked = way.asked;
        if let Some(why) = too_much_for_here(&way.recipe)? {
            if asked {
                return Err(anyhow!("{}: {why}", way.name));
            }
            skipped.push(format!("{}: {why}", way.name));
            continue;
        }
        let name = way.name.clone();
        match try_way(way, &data, workers, stage) {
            Ok(found) => tried.push(found),
            Err(error) if asked => return Err(error.into()),
            Err(error) => skipped.push(format!("{name}: {error}")),
        }
    }
    let asked = tried.iter().find(|tried| tried.way.asked).expect("the way that was asked for came first");
    // What replicas send is a matter of their number; and who is alone sends nothing, where two would.
    let are_alike = ways::are_replicas(&recipe);
    let with_others = match (gpu, workers) {
        (Some(kind), 1) => rehearse(&recipe, &data, 2, Stage::Gpus(endless(kind))).ok(),
        _ => Some(asked.needs.clone()),
    };
    let sends = with_others.filter(|_| are_alike).and_then(|needs| needs.sent);
    let sends = sends.map(|bytes| Sends::of(bytes, workers));
    let passes = recipe.trainer()?.accumulate as f64;
    let step_ms = args.step_ms.map(|ms| ms * passes).or_else(|| {
        let is_real = gpu.is_none() && workers <= cores();
        is_real.then_some(asked.needs.step.as_secs_f64() * 1e3)
    });
    let told = Told { args, recipe: &recipe, steps: training.steps, workers, gpu, step_ms, sends, skipped };
    told.tell(&tried);
    Ok(u8::from(asked.lacks.is_some()))
}

/// Flags that mean nothing here, or nothing beside each other.
fn refuse_what_makes_no_plan(args: &PlanArgs, training: &TrainArgs) -> Result<(), WrongUsage> {
    if let (None, Some(memory)) = (args.gpu, args.memory) {
        let text = format!("--memory {memory}: is that of a GPU\nhint: --gpu says which");
        return Err(WrongUsage(text));
    }
    if let Some(asked) = training.device.filter(|device| args.gpu.is_some() == (*device == DeviceSpec::Cpu)) {
        let hint = if args.gpu.is_some() { "leave --device out" } else { "--gpu h100, say, plans for those" };
        return Err(WrongUsage(format!("--device {asked}: is told by --gpu here\nhint: {hint}")));
    }
    let asks_for_a_run = [
        ("--resume", training.resume),
        ("--init", training.init.is_some()),
        ("--evaluate", training.evaluate.is_some()),
        ("--out", training.out.is_some()),
        ("--debug-sync", training.debug_sync),
        ("--time-limit", training.time_limit.is_some()),
    ];
    if let Some((flag, _)) = asks_for_a_run.into_iter().find(|(_, asked)| *asked) {
        return Err(WrongUsage(format!("{flag}: is for a run, and a plan makes none\nhint: leave it out")));
    }
    if args.link.is_some() && (args.gpu.is_none() || args.step_ms.is_none()) {
        let text = "--link: says nothing without a step's time\nhint: --gpu KIND and --step-ms MS beside it";
        return Err(WrongUsage(text.into()));
    }
    Ok(())
}

/// Whether a GPU has too little memory.
fn is_lack(error: &Error) -> bool {
    matches!(error, Error::OutOfMemory(_) | Error::Gpu(phalanx::tensor::Error::OutOfMemory { .. }))
}

/// Has panics of workers say nothing from now on: a way that doesn't fit says so by one, as the run would, which is told in its place.
fn silence_workers() {
    let before = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        let is_worker = std::thread::current().name().is_some_and(|name| name.starts_with("rank-"));
        if !is_worker {
            before(info);
        }
    }));
}

/// How many workers there are to be.
fn workers(args: &PlanArgs, of_training: Option<&str>) -> Result<usize, WrongUsage> {
    let number = |text: &str| text.parse().ok().filter(|&n| n > 0);
    let workers = match (args.workers, of_training) {
        (Some(workers), None) => workers,
        (None, None) => 1,
        (None, Some(text)) => number(text).ok_or_else(|| {
            let hint = "--workers 8, say, before the recipe";
            WrongUsage(format!("--nproc-per-node {text}: a plan needs a number\nhint: {hint}"))
        })?,
        (Some(_), Some(text)) => {
            return Err(WrongUsage(format!("--nproc-per-node {text}: --workers says how many there are")));
        }
    };
    if workers == 0 || workers > MOST_WORKERS {
        return Err(WrongUsage(format!("--workers {workers}: must be 1 to {MOST_WORKERS}")));
    }
    Ok(workers)
}

/// What all workers together have in the host's memory of each parameter, where GPUs have none of it: its value, gradient, and state.
const OFFLOADED_BYTES: u64 = 16;

/// Why a way can't be rehearsed here, if it can't: what it keeps in the memory of hosts is real.
fn too_much_for_here(recipe: &Recipe) -> Result<Option<String>> {
    if !recipe.parallel.offload {
        return Ok(None);
    }
    let mut model = recipe.model()?;
    let parameters = Parameters::lay_out(&mut model, &Device::cpu(1), 0).count() as u64;
    let (takes, free) = (OFFLOADED_BYTES * parameters, Meminfo::read().bytes("MemAvailable:").unwrap_or(0));
    let why = || {
        let (takes, free) = (gib(takes), gib(free));
        format!(
            "what its workers keep in hosts' memory takes {takes}, which is too much for the {free} that are free here"
        )
    };
    Ok((takes > free / 2).then(why))
}

/// The same with memory without end.
fn endless(kind: AbsentGpu) -> AbsentGpu {
    AbsentGpu { is_endless: true, ..kind }
}

/// Rehearses a way, and where it doesn't fit the GPU as if that had memory without end, which tells what it needs.
fn try_way(way: Way, data: &Split, workers: usize, stage: Stage) -> Result<Tried, Error> {
    let recipe = &way.recipe;
    let (needs, lacks) = match (rehearse(recipe, data, workers, stage), stage) {
        (Err(lacks), Stage::Gpus(kind)) if is_lack(&lacks) => {
            (rehearse(recipe, data, workers, Stage::Gpus(endless(kind)))?, Some(lacks.to_string()))
        }
        (went, _) => (went?, None),
    };
    let largest = match (stage, &lacks) {
        (Stage::Cpu, _) => None,
        // Each try would move all that lies in hosts' memory.
        (Stage::Gpus(_), _) if recipe.parallel.offload => None,
        (Stage::Gpus(_), lacks) => {
            // As many of a step's samples as one of a batch stands for.
            let each = (needs.step_samples as usize / recipe.train.batch_size).max(1);
            let most = needs.samples / each;
            let fits = |batch: usize| {
                let mut with = recipe.clone();
                with.train.batch_size = batch;
                match rehearse(&with, data, workers, stage) {
                    Ok(_) => Ok(true),
                    Err(error) if is_lack(&error) => Ok(false),
                    Err(error) => Err(error),
                }
            };
            Some(largest(recipe.train.batch_size, lacks.is_none(), most, fits)?)
        }
    };
    Ok(Tried { way, needs, lacks, largest })
}

/// The largest batch that fits, to a sixteenth: `known` is one of which that is known. 0 if none does.
fn largest<E>(
    known: usize,
    known_fits: bool,
    most: usize,
    mut fits: impl FnMut(usize) -> Result<bool, E>,
) -> Result<(usize, Bound), E> {
    let most = most.max(known);
    let (mut fit, mut beyond) = if known_fits { (known, most + 1) } else { (0, known) };
    // Whether there are too few samples or too little memory is always found out.
    while beyond > most && fit < most || beyond - fit > fit / 16 + usize::from(fit > 0) {
        // Upwards in great steps until something is too much.
        let next = match (fit, beyond) {
            (0, beyond) => beyond / 2,
            (fit, beyond) if beyond > most => (2 * fit).min(most),
            (fit, beyond) => fit.midpoint(beyond),
        };
        if next == 0 || next == fit {
            break;
        }
        if fits(next)? { fit = next } else { beyond = next }
    }
    Ok((fit, if beyond > most { Bound::Samples } else { Bound::Memory }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_batch_is_found_wherever_it_lies() {
        for limit in 0..400 {
            for (known, most) in [(1, 1), (1, 300), (64, 64), (64, 1000), (100, 101), (7, 350)] {
                let mut asked = 0;
                let fits = |batch| {
                    asked += 1;
                    assert!((1..=most).contains(&batch), "{batch} of {most}");
                    Ok::<_, ()>(batch <= limit)
                };
                let (found, bound) = largest(known, known <= limit, most, fits).unwrap();
                let want = limit.min(most);
                let about = format!("{known} of {most}, up to {limit}: {found}");
                assert!(found <= want && want <= found + found / 16, "{about}");
                assert!((bound == Bound::Samples) == (limit >= most), "{about}");
                assert!(asked <= 20, "{about} by {asked}");
            }
        }
    }
}
