//! One point: a training run of so many workers, on this machine, as a step in an allocation of Slurm, or as a job of its own.

use super::model::Parts;
use crate::say::say;
use crate::slurm::wait_for;
use crate::trial::{Agent, Heard, LIMIT, QUEUE, Trial, program};
use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::Signal;
use phalanx::Event;
use phalanx_job::Work;
use phalanx_launch::slurm::{Submission, queue, script};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::time::Duration;

/// Where runs take place.
pub(super) enum Place {
    /// On this machine.
    Here,
    /// In the allocation that this process is in, with so many workers of each node at most.
    Allocation { per_node: usize },
    /// As jobs.
    Jobs(Box<Jobs>),
}

/// What all jobs have in common.
pub(super) struct Jobs {
    pub(super) per_node: usize,
    pub(super) gpus: bool,
    pub(super) cores_per_worker: u32,
    pub(super) partition: Option<String>,
    pub(super) time: Option<Duration>,
    pub(super) options: Vec<String>,
    /// How long a job may wait and run.
    pub(super) patience: Duration,
}

/// What is run.
pub(super) struct Sort<'a> {
    pub(super) recipe: &'a str,
    /// More arguments of `phalanx train`.
    pub(super) more: &'a [String],
    pub(super) threads: usize,
    /// Steps before those that count, and those.
    pub(super) warm_up: usize,
    pub(super) steps: usize,
    /// Where runs keep their files.
    pub(super) folder: &'a Path,
}

/// A step of one run, without those that took longest and shortest, in milliseconds.
#[derive(Clone, Copy, Debug)]
pub(super) struct Middle {
    pub(super) step_ms: f64,
    pub(super) parts: Parts,
}

/// One run of so many workers with so many samples each.
pub(super) fn measure(
    sort: &Sort<'_>,
    place: &Place,
    workers: usize,
    batch: usize,
    run: usize,
) -> Result<Middle> {
    let out = sort.folder.join(format!("{workers}x{batch}-{run}"));
    let all = sort.warm_up + sort.steps;
    let numbers = [("--batch-size", batch), ("--epochs", 1_000_000), ("--log-interval", 1)];
    let mut args: Vec<String> =
        numbers.iter().flat_map(|(flag, n)| [(*flag).to_owned(), n.to_string()]).collect();
    args.extend(["--set".into(), format!("train.threads={}", sort.threads)]);
    args.extend(["--set".into(), "train.checkpoint_minutes=1e9".into()]);
    args.extend(sort.more.iter().cloned());
    let told = match place {
        Place::Here => {
            args.extend(["--nproc-per-node".into(), workers.to_string()]);
            args.extend(["--max-restarts".into(), "0".into()]);
            here(sort.recipe, &out, &args, all)
        }
        Place::Allocation { per_node } => {
            args.extend(["--steps".into(), all.to_string()]);
            // A lone task isn't a rank among others, but starts its worker.
            args.extend(["--nproc-per-node".into(), "1".into(), "--max-restarts".into(), "0".into()]);
            in_allocation(sort, &out, &args, (workers, *per_node))
        }
        Place::Jobs(jobs) => {
            args.extend(["--steps".into(), all.to_string()]);
            as_job(sort, jobs, &out, &args, workers)
        }
    };
    let told = told.with_context(|| format!("the run of {workers} workers with {batch} samples each"))?;
    ensure!(
        told.len() >= all && told.iter().all(|step| step.workers == workers),
        "the run of {workers} workers made {} of {all} steps, not all of them by as many",
        told.len()
    );
    Ok(middle(&mut told[sort.warm_up..all].to_vec()))
}

/// The mean of the middle half of these steps, by how long they took. Unlike medians of its own, its parts are those of the same steps, and
/// add up to the whole; where workers take turns a step's parts vary more than the step.
fn middle(steps: &mut [Told]) -> Middle {
    steps.sort_by(|a, b| a.ms.total_cmp(&b.ms));
    let cut = steps.len() / 4;
    let steps = &steps[cut..steps.len() - cut];
    let of = |value: fn(&Told) -> f64| steps.iter().map(value).sum::<f64>() / steps.len() as f64;
    let parts = Parts {
        compute_ms: of(|told| (told.ms - told.input_ms - told.comm_ms).max(0.0)),
        comm_ms: of(|told| told.comm_ms),
        input_ms: of(|told| told.input_ms),
    };
    Middle { step_ms: of(|told| told.ms), parts }
}

/// A step, as the run told of it.
#[derive(Clone, Copy, Debug)]
struct Told {
    workers: usize,
    ms: f64,
    input_ms: f64,
    comm_ms: f64,
}

fn told(event: &Event) -> Option<Told> {
    match *event {
        Event::Step { world_size, ms, input_ms, comm_ms, .. } => {
            Some(Told { workers: world_size, ms, input_ms, comm_ms })
        }
        _ => None,
    }
}

/// Runs on this machine until there are enough steps.
fn here(recipe: &str, out: &Path, args: &[String], steps: usize) -> Result<Vec<Told>> {
    let trial = Trial::start(recipe, out, args)?;
    let mut all = Vec::new();
    while let Some((_, event)) = trial.next()? {
        all.extend(told(&event));
        if all.len() == steps {
            // What a run does at its end isn't what is measured. Who was put into the background by a script ignores SIGINT.
            trial.signal(Signal::SIGTERM)?;
            break;
        }
    }
    let (status, said) = trial.end()?;
    ensure!(all.len() == steps, "it ended with {status}: {said}");
    Ok(all)
}

/// Runs as a step of the allocation: a task each.
fn in_allocation(
    sort: &Sort<'_>,
    out: &Path,
    args: &[String],
    (workers, per_node): (usize, usize),
) -> Result<Vec<Told>> {
    let (nodes, each) = dealt(workers, per_node)?;
    let mut command = Command::new("srun");
    command.args([
        format!("--nodes={nodes}"),
        format!("--ntasks={workers}"),
        format!("--ntasks-per-node={each}"),
    ]);
    command.args([format!("--cpus-per-task={}", sort.threads), "--kill-on-bad-exit=1".into()]);
    command.arg(program()?).args(["train", sort.recipe, "--json", "--out"]).arg(out).args(args);
    let (sender, events) = sync_channel(QUEUE);
    let hear = move |heard| match heard {
        Heard::Event(_, event) => sender.send(event).is_ok(),
        Heard::End => false,
    };
    let step = Agent::start(command, out.to_owned(), hear)?;
    let mut all = Vec::new();
    loop {
        match events.recv_timeout(LIMIT) {
            Ok(event) => all.extend(told(&event)),
            Err(RecvTimeoutError::Disconnected) => break,
            Err(RecvTimeoutError::Timeout) => bail!("the step has told nothing for {LIMIT:.0?}"),
        }
    }
    let (status, said) = step.end()?;
    ensure!(status.success(), "srun ended with {status}: {said}");
    Ok(all)
}

/// Runs as a job, and reads what it leaves.
fn as_job(sort: &Sort<'_>, jobs: &Jobs, out: &Path, args: &[String], workers: usize) -> Result<Vec<Told>> {
    let (nodes, each) = dealt(workers, jobs.per_node)?;
    let nodes = u32::try_from(nodes)?;
    let mut typed = vec![sort.recipe.to_owned()];
    typed.extend(args.iter().cloned());
    if jobs.gpus {
        typed.extend(["--device".into(), "cuda".into()]);
    }
    let out = out.to_string_lossy().into_owned();
    let job = Submission {
        name: format!("scaling-{workers}"),
        nodes: (nodes, nodes),
        spares: 0,
        workers: each.to_string(),
        gpus: if jobs.gpus { u32::try_from(each)? } else { 0 },
        cores: Some(jobs.cores_per_worker * u32::try_from(each)?),
        time: jobs.time,
        partition: jobs.partition.clone(),
        array: None,
        options: jobs.options.clone(),
        out: Some(out.clone()),
        max_restarts: 0,
        phalanx: program()?.to_string_lossy().into_owned(),
        work: Work::Train(typed),
    };
    let number = queue::submit(&script(&job))?;
    say(format_args!("{workers} workers on {nodes} nodes: job {number}"));
    wait_for(&number, jobs.patience)?;
    let path = PathBuf::from(&out).join("events.jsonl");
    let text = fs::read_to_string(&path).with_context(|| format!("{}: job {number} has left no events\nhint: see its output, and whether this folder is on a file system that its nodes share", path.display()))?;
    let events = text.lines().filter_map(|line| serde_json::from_str::<Event>(line).ok());
    Ok(events.filter_map(|event| told(&event)).collect())
}

/// Nodes, and workers of each.
pub(super) fn dealt(workers: usize, per_node: usize) -> Result<(usize, usize)> {
    if workers <= per_node {
        return Ok((1, workers));
    }
    ensure!(
        workers.is_multiple_of(per_node),
        "{workers} workers aren't shared evenly by nodes of {per_node}\nhint: give counts that are multiples of --nproc-per-node, or smaller"
    );
    Ok((workers / per_node, per_node))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_a_step_add_up_to_it_whatever_disturbs_some() {
        let step = |ms, comm_ms| Told { workers: 4, ms, input_ms: 1.0, comm_ms };
        // Of some the workers waited, of others they computed; the median of neither is that of the whole.
        let mut steps = vec![
            step(90.0, 80.0),
            step(10.0, 1.0),
            step(10.0, 7.0),
            step(12.0, 9.0),
            step(2.0, 0.0),
            step(9.0, 1.0),
        ];
        let Middle { step_ms, parts } = middle(&mut steps);
        assert!(
            (step_ms - 41.0 / 4.0).abs() < 1e-9 && (parts.sum() - step_ms).abs() < 1e-9,
            "{step_ms} {parts:?}"
        );
        assert!((parts.comm_ms - 18.0 / 4.0).abs() < 1e-9, "{parts:?}");
        let one = middle(&mut [step(5.0, 1.0)]);
        assert!((one.step_ms - 5.0).abs() < 1e-9);
    }

    #[test]
    fn workers_are_dealt_to_nodes() {
        let check = |workers, per_node, want: Option<(usize, usize)>| {
            assert_eq!(dealt(workers, per_node).ok(), want, "{workers} {per_node}");
        };
        check(1, 8, Some((1, 1)));
        check(8, 8, Some((1, 8)));
        check(16, 8, Some((2, 8)));
        check(3, 1, Some((3, 1)));
        check(12, 8, None);
    }
}
