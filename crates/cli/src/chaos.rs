//! `phalanx chaos`: a training run that faults are put to, beside one that is left alone. It must make every step once, use every
//! sample of an epoch once, and end with the same bits where the number of workers decides nothing, which it doesn't with
//! logical shards. Without these other workers drop out other activations and round sums in another order, so that weights may be
//! anywhere after some thousand steps: how far they are apart is told.

mod campaign;
mod cut;
mod full;
mod leader;
mod plan;
mod record;
mod site;

use crate::args::{ChaosArgs, WrongUsage};
use crate::bench::at_least_one;
use crate::first::MODEL;
use crate::say::print;
use crate::trial::{Trial, data_for};
use anyhow::{Context, Result, bail, ensure};
use campaign::Campaign;
use phalanx::nn::Weights;
use plan::{Nodes, plan};
use record::Record;
use serde::Serialize;
use site::Setup;
use std::collections::BTreeMap;
use std::path::Path;
use std::time::Instant;

/// What a campaign found.
#[derive(Serialize)]
struct ChaosLine<'a> {
    chaos: &'a str,
    seed: u64,
    faults: usize,
    /// How many of each kind.
    kinds: BTreeMap<&'static str, usize>,
    /// How many more there were to be of each kind, which couldn't be put to it.
    skipped: BTreeMap<&'static str, usize>,
    steps: u64,
    /// How often the ranks became others.
    memberships: usize,
    /// How often the run was gone on with from a checkpoint.
    resumed: usize,
    epochs_each_once: usize,
    /// How far the furthest weight is from that of the run that was left alone.
    furthest: f64,
    same_bits: bool,
    seconds: f64,
}

/// Workers of a machine, and of each of several nodes, unless told.
const WORKERS: [usize; 2] = [3, 1];
/// Steps for each fault: enough for most of them to be got over before the next.
const STEPS_A_FAULT: u64 = 40;
/// What makes the weights the same bits whatever happens to the run.
const SHARDS: &str = "parallel.logical_shards=";

pub(crate) fn chaos(args: &ChaosArgs) -> Result<u8> {
    let nodes = args.nodes.as_deref().map(nodes).transpose()?;
    let workers = args.workers.unwrap_or(WORKERS[usize::from(nodes.is_some())]);
    at_least_one("--faults", args.faults)?;
    at_least_one("--workers", workers)?;
    let steps = args.steps.unwrap_or(args.faults as u64 * STEPS_A_FAULT);
    at_least_one("--steps", steps)?;
    let folder = tempfile::tempdir().context("no folder for the runs can be made")?;
    let all = workers * nodes.map_or(1, |nodes| nodes.most);
    let settings = settings(args, all);
    let training = training(args, &settings, steps, folder.path())?;
    let start = Instant::now();
    let alone = folder.path().join("alone");
    let of_all = [&training[..], &["--nproc-per-node".into(), all.to_string()]].concat();
    let (status, said) = Trial::start(&args.recipe, &alone, &of_all)?.end()?;
    ensure!(status.success(), "the run that is left alone ended with {status}:\n{said}");
    let setup = Setup {
        recipe: args.recipe.clone(),
        args: training,
        folder: folder.path().to_owned(),
        workers,
        nodes,
    };
    let faults = plan(args.seed, args.faults, nodes, steps);
    let mut campaign = Campaign { faults, done: 0, put: Vec::new(), skipped: Vec::new(), quiet: args.json };
    let found = go_through(&mut campaign, &setup).and_then(|resumed| {
        let record = Record::read(&setup.events())?;
        record.check(steps)?;
        Ok((resumed, record))
    });
    let (resumed, record) = match found {
        Ok(found) => found,
        Err(error) => {
            let folder = folder.keep();
            return Err(error.context(format!("its files are in {}", folder.display())));
        }
    };
    let [wanted, found] = [&alone, &setup.out()].map(|out| Weights::read(&out.join(MODEL)));
    let (furthest, same_bits) = distance(&wanted?, &found?)?;
    let line = ChaosLine {
        chaos: &args.recipe,
        seed: args.seed,
        faults: campaign.put.len(),
        kinds: counted(&campaign.put),
        skipped: counted(&campaign.skipped),
        steps,
        memberships: record.memberships,
        resumed,
        epochs_each_once: record.epochs,
        furthest,
        same_bits,
        seconds: start.elapsed().as_secs_f64(),
    };
    tell(&line, args.json)?;
    let wants_bits = settings.iter().any(|set| set.starts_with(SHARDS) && *set != format!("{SHARDS}0"));
    ensure!(!wants_bits || same_bits, "the weights aren't those of the run that was left alone, bit for bit");
    ensure!(furthest.is_finite(), "there are weights that are no numbers");
    Ok(0)
}

/// What of the recipe is changed: what was asked for, and shards for all workers where that says nothing of how they share the work.
fn settings(args: &ChaosArgs, workers: usize) -> Vec<String> {
    let shards =
        (!args.set.iter().any(|set| set.starts_with("parallel."))).then(|| format!("{SHARDS}{workers}"));
    args.set.iter().cloned().chain(shards).collect()
}

/// Puts all faults to the run; gives how often it was gone on with.
fn go_through(campaign: &mut Campaign, setup: &Setup) -> Result<usize> {
    let mut resumed = 0;
    while !campaign.run(setup, resumed > 0)? {
        resumed += 1;
        let most = campaign.faults.len();
        ensure!(resumed <= most, "the run was gone on with {resumed} times and isn't over");
    }
    Ok(resumed)
}

/// MIN:MAX.
fn nodes(text: &str) -> Result<Nodes> {
    let number = |text: &str| text.parse::<usize>().ok();
    let nodes = text
        .split_once(':')
        .and_then(|(least, most)| Some(Nodes { least: number(least)?, most: number(most)? }));
    let nodes = nodes.filter(|nodes| nodes.least > 0 && nodes.most > 1 && nodes.least <= nodes.most);
    let wrong = || {
        WrongUsage(format!("--nodes {text}: must be the least number and the most, of 2 or more, as in 1:3"))
    };
    Ok(nodes.ok_or_else(wrong)?)
}

/// How often there is each.
fn counted(names: &[&'static str]) -> BTreeMap<&'static str, usize> {
    let mut counts = BTreeMap::new();
    names.iter().for_each(|name| *counts.entry(*name).or_insert(0) += 1);
    counts
}

/// What both runs are told, beside how many workers they have.
fn training(args: &ChaosArgs, settings: &[String], steps: u64, folder: &Path) -> Result<Vec<String>> {
    let mut training = data_for(&args.recipe, folder)?;
    let numbers = [
        ("--batch-size", args.batch as u64),
        ("--steps", steps),
        ("--epochs", 1_000_000),
        ("--seed", args.seed),
    ];
    training.extend(numbers.iter().flat_map(|(flag, number)| [(*flag).to_owned(), number.to_string()]));
    let settings = ["train.checkpoint_every=50".to_owned()].into_iter().chain(settings.iter().cloned());
    training.extend(settings.flat_map(|setting| ["--set".to_owned(), setting]));
    Ok(training)
}

/// How far the furthest number of two sets of weights is apart, and whether all are the same bits.
fn distance(wanted: &Weights, found: &Weights) -> Result<(f64, bool)> {
    let (mut furthest, mut same) = (0f64, true);
    for name in wanted.names() {
        let (Some((_, wanted)), Some((_, found))) = (wanted.get(name), found.get(name)) else {
            bail!("{name} is missing in the weights");
        };
        for (a, b) in wanted.iter().zip(found) {
            same &= a.to_bits() == b.to_bits();
            furthest = furthest.max(f64::from((a - b).abs()));
        }
    }
    Ok((furthest, same))
}

fn tell(line: &ChaosLine<'_>, json: bool) -> Result<()> {
    if json {
        print(serde_json::to_string(line)?);
        return Ok(());
    }
    let ChaosLine {
        chaos, faults, steps, memberships, resumed, epochs_each_once, furthest, same_bits, ..
    } = line;
    print(format_args!(
        "{chaos}: {steps} steps, each made once, through {faults} faults, {memberships} changes of ranks and {resumed} new starts, in {:.0} s",
        line.seconds
    ));
    line.kinds.iter().for_each(|(kind, count)| print(format_args!("  {count:>4}  {kind}")));
    line.skipped.iter().for_each(|(kind, count)| print(format_args!("  {count:>4}  {kind}: skipped")));
    print(format_args!("{epochs_each_once} epochs used each sample once"));
    match same_bits {
        true => print("the weights are, bit for bit, those of the run that was left alone"),
        false => print(format_args!(
            "the furthest weight is {furthest:.1e} from that of the run that was left alone"
        )),
    }
    Ok(())
}
