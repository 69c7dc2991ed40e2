//! `phalanx bench`: what this machine does.

use crate::args::{Bench, BenchArgs, StepArgs, StepModel, WrongUsage};
use crate::say::print;
use anyhow::{Context, Result, ensure};
use phalanx::nn::models::{MnistHpcNet, MnistNet};
use phalanx::nn::optim::{Optimizer, Sgd};
use phalanx::nn::{Ctx, Loss, Module, Parameters};
use phalanx::parallel::{SingleDevice, Strategy, Sync};
use phalanx::tensor::{DType, Device, Philox, Tensor, no_grad};
use serde::Serialize;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Instant;

pub(crate) fn bench(args: &BenchArgs) -> Result<u8> {
    match &args.what {
        Bench::Step(args) => step(args)?,
        Bench::Launch { workers, runs, json } => launch(*workers, *runs, *json)?,
        Bench::Hello => hello()?,
    }
    Ok(0)
}

fn at_least_one(flag: &str, number: usize) -> Result<(), WrongUsage> {
    if number == 0 { Err(WrongUsage(format!("{flag} 0: must be at least 1"))) } else { Ok(()) }
}

/// A line of `bench step`.
#[derive(Serialize)]
struct StepLine {
    bench: &'static str,
    model: &'static str,
    batch: usize,
    threads: usize,
    median_ms: f64,
    p95_ms: f64,
    gflops: f64,
}

fn step(args: &StepArgs) -> Result<()> {
    at_least_one("--batch", args.batch)?;
    at_least_one("--steps", args.steps)?;
    at_least_one("--threads", args.threads.unwrap_or(1))?;
    let threads = args.threads.unwrap_or(phalanx::cores());
    let device = Device::cpu(threads);
    // Multiply-adds of the forward pass, an image.
    let (mut model, name, forward): (Box<dyn Module>, _, f64) = match args.model {
        StepModel::Mnist => (Box::new(MnistNet::new(0.5)), "mnist", 144e3 + 320e3 + 16e3 + 0.5e3),
        StepModel::MnistHpc => (
            Box::new(MnistHpcNet::new(0.5)),
            "mnist-hpc",
            9. * 32. * 676. + 288. * 64. * 576. + 9216. * 128. + 1280.,
        ),
    };
    // The first layer needs no gradient of its images.
    let first = if matches!(args.model, StepModel::Mnist) { 144e3 } else { 9. * 32. * 676. };
    let parameters = Parameters::build(&mut model, &device, 0);
    let x = Tensor::uniform(&device, [args.batch, 1, 28, 28], 0.0, 1.0, DType::F32, Philox::new(1, 0));
    let labels: Vec<i64> = (0..args.batch).map(|i| (i % 10) as i64).collect();
    let y = Tensor::from_slice(&device, &labels, [args.batch]);
    let samples: Arc<[u64]> = (0..args.batch as u64).collect();
    let mut optimizer = Optimizer::new(Sgd { momentum: 0.5, ..Sgd::new(0.01) })?;
    let mut strategy = SingleDevice::new();
    let mut times = Vec::new();
    for step in 0..(args.steps + args.steps / 5) as u64 {
        let start = Instant::now();
        let mut ctx = Ctx::train(0, step, Arc::clone(&samples));
        if args.forward_only {
            std::hint::black_box(no_grad(|| model.forward(&x, &mut ctx)).item_of_first());
        } else {
            let loss = Loss::Nll.of(&model.forward(&x, &mut ctx), &y);
            strategy.backward(&parameters, Some(&loss), 1.0, Sync::Now)?;
            strategy.finish(&parameters)?;
            let grads = parameters.grads().arena().flat::<f32>();
            optimizer.step(&mut parameters.values().flat_mut::<f32>(), &grads, 1.0);
            std::hint::black_box(loss.item());
        }
        times.push(start.elapsed().as_secs_f64() * 1e3);
    }
    let mut times = times.split_off(args.steps / 5);
    times.sort_by(f64::total_cmp);
    let at = |share: f64| times[((times.len() - 1) as f64 * share) as usize];
    let per_image = if args.forward_only { forward } else { 3.0 * forward - first };
    let line = StepLine {
        bench: "step",
        model: name,
        batch: args.batch,
        threads,
        median_ms: at(0.5),
        p95_ms: at(0.95),
        gflops: 2.0 * per_image * args.batch as f64 / at(0.5) / 1e6,
    };
    if args.json {
        print(serde_json::to_string(&line)?);
    } else {
        print(format_args!(
            "{name}, batch {}, {threads} threads: median {:.3} ms, 95% below {:.3} ms, {:.1} GFLOP/s ({} steps)",
            args.batch, line.median_ms, line.p95_ms, line.gflops, args.steps
        ));
    }
    Ok(())
}

/// Reads one element, so that a forward pass isn't left out.
trait FirstItem {
    fn item_of_first(&self) -> f64;
}

impl FirstItem for Tensor {
    fn item_of_first(&self) -> f64 {
        self.reshape([self.count()]).narrow(0, 0, 1).item()
    }
}

fn launch(workers: usize, runs: usize, json: bool) -> Result<()> {
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
        command
            .args(["run", "--nproc-per-node", &workers.to_string(), "--out"])
            .arg(folder.path())
            .arg("--")
            .arg(&me);
        let status = command.args(["bench", "hello"]).stdout(Stdio::null()).status()?;
        times.push(start.elapsed().as_secs_f64() * 1e3);
        ensure!(status.success(), "a run of {workers} workers failed: {status}");
    }
    times.sort_by(f64::total_cmp);
    let (median, slowest) = (times[runs / 2], times[runs - 1]);
    if json {
        print(
            serde_json::json!({"bench": "launch", "workers": workers, "median_ms": median, "max_ms": slowest, "runs": runs}),
        );
    } else {
        print(format_args!(
            "launch, all-reduce once, exit, {workers} workers: median {median:.1} ms, slowest {slowest:.1} ms of {runs} runs"
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
