//! `phalanx bench`: what this machine does.

use crate::args::{Bench, BenchArgs, Errand, WrongUsage};
use crate::failure;
use crate::run::{fresh_run_id, tls_is_asked_for};
use crate::say::print;
use anyhow::{Context, Result, ensure};
use phalanx_launch::{Console, LaunchSpec, THIS_PROGRAM};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

mod allreduce;
mod loader;
mod pipeline;
mod readiness;
mod recovery;
mod scaling;
mod step;

pub(crate) use scaling::WORTH;

pub(crate) fn bench(args: &BenchArgs) -> Result<u8> {
    match &args.what {
        Bench::Step(args) => step::step(args)?,
        Bench::Loader(args) => loader::loader(args)?,
        Bench::Allreduce(args) => return allreduce::allreduce(args),
        Bench::Pipeline(args) => return pipeline::pipeline(args),
        Bench::Recovery(args) => recovery::recovery(args)?,
        Bench::Scaling(args) => scaling::scaling(args)?,
        Bench::Launch { errand, workers, runs, json } => launch(*errand, *workers, *runs, *json)?,
        Bench::Hello => hello()?,
    }
    Ok(0)
}

/// How long workers have to end once one has failed.
const GRACE: Duration = Duration::from_secs(2);

/// Starts copies of this process as workers, in a folder that nobody keeps.
fn start_copies(spec: LaunchSpec) -> Result<u8> {
    let folder = tempfile::tempdir().context("no folder for the run can be made")?;
    let spec = LaunchSpec {
        program: THIS_PROGRAM.into(),
        args: std::env::args_os().skip(1).collect(),
        run_id: fresh_run_id()?,
        run_dir: folder.path().to_owned(),
        console: Console::FirstRank,
        grace: GRACE,
        tls: tls_is_asked_for()?,
        ..spec
    };
    let outcome = phalanx_launch::run(&spec, |report| failure::tell(&report, 0))?;
    // The logs are gone in a moment, so nobody is sent there.
    outcome.failure.iter().for_each(failure::blame);
    Ok(failure::exit_code(&outcome))
}

/// Refuses a flag that is 0.
pub(crate) fn at_least_one(flag: &str, number: impl Default + PartialEq) -> Result<(), WrongUsage> {
    if number == Default::default() {
        Err(WrongUsage(format!("{flag} 0: must be at least 1")))
    } else {
        Ok(())
    }
}

fn launch(errand: Errand, workers: usize, runs: usize, json: bool) -> Result<()> {
    at_least_one("--workers", workers)?;
    at_least_one("--runs", runs)?;
    let me = std::env::current_exe().context("the path of this program")?;
    // Nobody else can have made it or know its name, and it goes however this ends.
    let folder = tempfile::tempdir().with_context(|| {
        format!("no folder for the runs can be made in {}", std::env::temp_dir().display())
    })?;
    let mut times = Vec::new();
    for _ in 0..runs {
        let start = Instant::now();
        let mut command = Command::new(&me);
        command.args(["run", "--nproc-per-node", &workers.to_string(), "--out"]).arg(folder.path()).arg("--");
        match errand {
            Errand::AllReduce => command.arg(&me).args(["bench", "hello"]),
            Errand::Nothing => command.arg("true"),
        };
        let status = command.stdout(Stdio::null()).status()?;
        times.push(start.elapsed().as_secs_f64() * 1e3);
        ensure!(status.success(), "a run of {workers} workers failed: {status}");
    }
    times.sort_by(f64::total_cmp);
    let (median, slowest) = (times[runs / 2], times[runs - 1]);
    let (errand, all_reduces) = match errand {
        Errand::AllReduce => ("all-reduce once, exit", 1),
        Errand::Nothing => ("exit", 0),
    };
    if json {
        print(serde_json::json!({
            "bench": "launch", "workers": workers, "all_reduces": all_reduces, "median_ms": median, "max_ms": slowest, "runs": runs
        }));
    } else {
        print(format_args!(
            "launch, {errand}, {workers} workers: median {median:.1} ms, slowest {slowest:.1} ms of {runs} runs"
        ));
    }
    Ok(())
}

fn hello() -> Result<()> {
    let worker = phalanx::Worker::from_environment(Some(1))?;
    let mut ones = [1.0f32];
    worker.group().all_reduce(&mut ones, phalanx::comm::ReduceOp::Sum)?;
    ensure!(ones[0] as usize == worker.group().world_size(), "the all-reduce gave {}", ones[0]);
    Ok(())
}
