//! `phalanx chaos`: a training run that faults are put to, beside one that is left alone. It must make every step once, use every
//! sample of an epoch once, and end with nearly the same weights: with the same bits where the number of workers doesn't decide
//! how sums are rounded.

mod plan;

use crate::args::{ChaosArgs, WrongUsage};
use crate::say::{print, say};
use crate::trial::{Trial, data_for};
use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use phalanx::Event;
use phalanx::nn::Weights;
use plan::{Act, Fault, plan};
use serde::Serialize;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// What a campaign found.
#[derive(Serialize)]
struct ChaosLine<'a> {
    chaos: &'a str,
    seed: u64,
    faults: usize,
    /// How many of each kind.
    kinds: BTreeMap<&'static str, usize>,
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

/// How long a paused worker stands still: less than what makes a silent one lost.
const PAUSE: Duration = Duration::from_millis(300);

pub(crate) fn chaos(args: &ChaosArgs) -> Result<u8> {
    for (flag, number) in [("--faults", args.faults), ("--workers", args.workers)] {
        if number == 0 {
            return Err(WrongUsage(format!("{flag} 0: must be at least 1")).into());
        }
    }
    let steps = args.steps.unwrap_or(args.faults as u64 * STEPS_A_FAULT);
    let folder = tempfile::tempdir().context("no folder for the runs can be made")?;
    let mut campaign = Campaign {
        recipe: &args.recipe,
        args: training(args, steps, folder.path())?,
        out: folder.path().join("disturbed"),
        faults: plan(args.seed, args.faults, args.workers, steps),
        done: 0,
        workers: args.workers,
        quiet: args.json,
    };
    let start = Instant::now();
    let alone = folder.path().join("alone");
    let (status, said) = Trial::start(&args.recipe, &alone, &campaign.args)?.end()?;
    ensure!(status.success(), "the run that is left alone ended with {status}:\n{said}");
    let mut resumed = 0;
    while !campaign.run(resumed > 0)? {
        resumed += 1;
        ensure!(resumed <= args.faults, "the run was gone on with {resumed} times and isn't over");
    }
    let record = Record::read(&campaign.out.join("events.jsonl"))?;
    record.check(steps)?;
    let [wanted, found] = [&alone, &campaign.out].map(|out| Weights::read(&out.join("model.safetensors")));
    let (furthest, same_bits) = distance(&wanted?, &found?)?;
    let mut kinds = BTreeMap::new();
    campaign.faults[..campaign.done]
        .iter()
        .for_each(|fault| *kinds.entry(fault.act.name()).or_insert(0) += 1);
    let line = ChaosLine {
        chaos: &args.recipe,
        seed: args.seed,
        faults: campaign.done,
        kinds,
        steps,
        memberships: record.memberships,
        resumed,
        epochs_each_once: record.epochs,
        furthest,
        same_bits,
        seconds: start.elapsed().as_secs_f64(),
    };
    tell(&line, args.json)?;
    let wants_bits = args.set.iter().any(|set| set.starts_with("parallel.logical_shards="));
    ensure!(!wants_bits || same_bits, "the weights aren't those of the run that was left alone, bit for bit");
    ensure!(furthest < FURTHEST, "a weight is {furthest} away from that of the run that was left alone");
    Ok(0)
}

/// Steps for each fault: enough for most of them to be got over before the next.
const STEPS_A_FAULT: u64 = 40;
/// How far weights may drift apart by sums that were rounded in another order, over some thousand steps.
const FURTHEST: f64 = 0.5;

/// What both runs are told.
fn training(args: &ChaosArgs, steps: u64, folder: &Path) -> Result<Vec<String>> {
    let mut training = data_for(&args.recipe, folder)?;
    let numbers = [
        ("--nproc-per-node", args.workers as u64),
        ("--batch-size", args.batch as u64),
        ("--steps", steps),
        ("--epochs", 1_000_000),
        ("--seed", args.seed),
        ("--max-restarts", 1_000_000),
    ];
    training.extend(numbers.iter().flat_map(|(flag, number)| [(*flag).to_owned(), number.to_string()]));
    let settings = ["train.checkpoint_every=50".to_owned()].into_iter().chain(args.set.clone());
    training.extend(settings.flat_map(|setting| ["--set".to_owned(), setting]));
    Ok(training)
}

/// The run that faults are put to.
struct Campaign<'a> {
    recipe: &'a str,
    args: Vec<String>,
    out: PathBuf,
    faults: Vec<Fault>,
    /// How many of them have been.
    done: usize,
    workers: usize,
    quiet: bool,
}

impl Campaign<'_> {
    /// Starts the run, or goes on with it, until it ends; gives whether it is over.
    fn run(&mut self, resume: bool) -> Result<bool> {
        let mut args = self.args.clone();
        args.extend(resume.then(|| "--resume".to_owned()));
        let trial = Trial::start(self.recipe, &self.out, &args)?;
        let (mut is_over, mut is_ended) = (false, false);
        while let Some((_, event)) = trial.next()? {
            match event {
                Event::Done { .. } => is_over = true,
                Event::Step { step, .. } => {
                    while let Some(fault) =
                        self.faults.get(self.done).filter(|fault| fault.after <= step && !is_ended)
                    {
                        let act = fault.act;
                        self.done += 1;
                        if !self.quiet {
                            say(format_args!(
                                "step {step}: {} ({} of {})",
                                act.name(),
                                self.done,
                                self.faults.len()
                            ));
                        }
                        self.put(&trial, act)?;
                        is_ended = matches!(act, Act::KillAgent | Act::Drain | Act::Ask { .. });
                    }
                }
                _ => {}
            }
        }
        let (status, said) = trial.end()?;
        if !is_over && !is_ended {
            bail!("the run ended with {status} though nobody ended it:\n{said}");
        }
        Ok(is_over)
    }

    /// Does it. A worker that isn't there at the moment has gone by itself, or isn't there yet.
    fn put(&self, trial: &Trial, act: Act) -> Result<()> {
        let signal_to = |worker: Option<Pid>, signal: Signal| {
            // One that ends at this moment isn't hurt by it.
            let _ = worker.map(|pid| kill(pid, signal));
        };
        let send = |rank: usize, signal| signal_to(trial.worker(rank % self.workers), signal);
        match act {
            Act::Kill { rank } => send(rank, Signal::SIGKILL),
            Act::KillTwo { rank } => {
                [rank, rank + 1].into_iter().for_each(|rank| send(rank, Signal::SIGKILL))
            }
            Act::KillAll => (0..self.workers).for_each(|rank| send(rank, Signal::SIGKILL)),
            Act::Stop { rank } => send(rank, Signal::SIGSTOP),
            Act::Pause { rank } => {
                let worker = trial.worker(rank);
                for signal in [Signal::SIGSTOP, Signal::SIGCONT] {
                    signal_to(worker, signal);
                    std::thread::sleep(PAUSE);
                }
            }
            Act::Ask { rank } => send(rank, Signal::SIGTERM),
            Act::Checkpoint => send(0, Signal::SIGUSR2),
            Act::KillAgent => trial.signal(Signal::SIGKILL)?,
            Act::Drain => trial.signal(Signal::SIGTERM)?,
        }
        Ok(())
    }
}

/// What `events.jsonl` says of a run.
struct Record {
    steps: Vec<u64>,
    epochs: usize,
    not_once: Vec<u64>,
    memberships: usize,
}

impl Record {
    fn read(path: &Path) -> Result<Record> {
        let text = fs::read_to_string(path).with_context(|| path.display().to_string())?;
        let mut record = Record { steps: Vec::new(), epochs: 0, not_once: Vec::new(), memberships: 0 };
        for (number, line) in text.lines().enumerate() {
            let event = serde_json::from_str(line);
            match event.with_context(|| format!("{}, line {}", path.display(), number + 1))? {
                Event::Step { step, .. } => record.steps.push(step),
                Event::Members { .. } => record.memberships += 1,
                Event::Epoch { epoch, each_once, .. } => {
                    record.epochs += 1;
                    record.not_once.extend((each_once != Some(true)).then_some(epoch));
                }
                _ => {}
            }
        }
        Ok(record)
    }

    /// Fails unless each step was made once, and each epoch used its samples once.
    fn check(&self, steps: u64) -> Result<()> {
        if let Some((at, step)) = (0..).zip(&self.steps).find(|(at, step)| at != *step) {
            bail!("step {step} was told where step {at} was due");
        }
        ensure!(self.steps.len() as u64 == steps, "{} steps were told of {steps}", self.steps.len());
        ensure!(self.not_once.is_empty(), "not each sample was used once in epochs {:?}", self.not_once);
        Ok(())
    }
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
    print(format_args!("{epochs_each_once} epochs used each sample once"));
    match same_bits {
        true => print("the weights are, bit for bit, those of the run that was left alone"),
        false => print(format_args!(
            "the furthest weight is {furthest:.1e} from that of the run that was left alone"
        )),
    }
    Ok(())
}
