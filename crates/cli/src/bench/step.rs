//! `phalanx bench step`: how long a training step takes.

use super::at_least_one;
use crate::args::{BenchPrecision, StepArgs, StepModel, WrongUsage};
use crate::meminfo::kib;
use crate::say::{print, say};
use anyhow::{Result, anyhow};
use phalanx::data::BYTES;
use phalanx::nn::models::{
    Gpt, GptConfig, Head, MnistHpcNet, MnistNet, ResNet, ResNet9, ResNetDepth, ResNetStem,
};
use phalanx::nn::optim::{Adam, AdamW, Optimizer, Rule, Sgd};
use phalanx::nn::{Ctx, Loss, Module, Parameters};
use phalanx::parallel::{Pass, SingleDevice, Strategy, Sync};
use phalanx::tensor::{DType, DebugSync, Device, KernelTime, Philox, Search, Tensor, autocast, no_grad};
use phalanx::{DeviceSpec, Precision};
use serde::Serialize;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A line of `bench step`.
#[derive(Serialize)]
struct StepLine {
    bench: &'static str,
    model: &'static str,
    batch: usize,
    threads: usize,
    device: String,
    precision: String,
    /// Whether passes were to be recorded once and replayed; a warning says where they couldn't be.
    graphs: bool,
    /// Whether the fastest ways were searched for.
    search: bool,
    median_ms: f64,
    p95_ms: f64,
    gflops: f64,
    /// The most memory that the process ever had, where the system says that.
    #[serde(skip_serializing_if = "Option::is_none")]
    peak_mb: Option<f64>,
    /// What of its GPU's memory was taken at the end, by whomever.
    #[serde(skip_serializing_if = "Option::is_none")]
    gpu_mb: Option<f64>,
}

impl From<BenchPrecision> for Precision {
    fn from(asked: BenchPrecision) -> Precision {
        match asked {
            BenchPrecision::Float32 => Precision::Float32,
            BenchPrecision::Tf32 => Precision::Tf32,
            BenchPrecision::Bfloat16 => Precision::Bfloat16,
        }
    }
}

/// A step as training makes it, of samples that are on the device already: passes as a strategy makes them, recorded ones too, and the
/// loss read, so that what a GPU has left to do of a step's update counts in the step after it.
pub(super) fn step(args: &StepArgs) -> Result<()> {
    at_least_one("--batch", args.batch)?;
    at_least_one("--steps", args.steps)?;
    at_least_one("--threads", args.threads.unwrap_or(1))?;
    let threads = args.threads.unwrap_or(phalanx::cores());
    let on_cpu = args.device == DeviceSpec::Cpu;
    let precision = Precision::from(args.precision);
    if precision == Precision::Tf32 && on_cpu {
        let text = "--precision tf32: a CPU makes products in float32 all the same\nhint: add --device cuda";
        return Err(WrongUsage(text.into()).into());
    }
    if args.graphs && (on_cpu || args.forward_only) {
        let hint = if on_cpu { "add --device cuda" } else { "leave --forward-only out" };
        let text = format!("--graphs: only whole steps of a GPU are recorded\nhint: {hint}");
        return Err(WrongUsage(text).into());
    }
    if args.search && on_cpu {
        let text =
            "--search: there are several ways to compute the same on a GPU only\nhint: add --device cuda";
        return Err(WrongUsage(text.into()).into());
    }
    let job = job(args)?;
    let device = args.device.open(threads, |_| 0, DebugSync::No)?;
    if matches!(job.sample, Sample::Image { .. }) {
        device.prepare_convolutions()?;
    }
    device.set_factors(precision.factors());
    device.set_search(if args.search { Search::Yes } else { Search::No });
    let Job { name, mut model, sample, loss, rule, forward, first } = job;
    let parameters = Parameters::build(&mut model, &device, 0);
    let [x, y] = sample.batch(args.batch, &device);
    let samples: Arc<[u64]> = (0..args.batch as u64).collect();
    let mut optimizer = Optimizer::new(rule)?;
    let strategy = SingleDevice::new();
    let mut strategy = if args.graphs { strategy.with_replays() } else { strategy };
    let (mut times, warm_up) = (Vec::new(), args.steps / 5);
    let mut updates = Duration::ZERO;
    for step in 0..(args.steps + warm_up) as u64 {
        if args.profile && step == warm_up as u64 {
            device.start_profile();
            updates = Duration::ZERO;
        }
        let start = Instant::now();
        let mut ctx = Ctx::train(0, step, Arc::clone(&samples));
        if args.forward_only {
            let output = || no_grad(|| model.forward(&x, &mut ctx));
            std::hint::black_box(autocast(precision.products(), output).item_of_first());
        } else {
            let (input, target) = (x.clone(), y.clone());
            let (model, parameters) = (&*model, &parameters);
            let pass = Pass {
                model,
                parameters,
                loss: loss.clone(),
                input,
                target,
                ctx,
                weight: 1.0,
                sync: Sync::Now,
            };
            let loss = autocast(precision.products(), || strategy.pass(&pass))?;
            strategy.finish(parameters)?;
            if !loss.is_finite() {
                return Err(anyhow!(
                    "step {step}: a loss of {loss}: this device doesn't compute as it should\nhint: phalanx selftest --device {}",
                    args.device
                ));
            }
            let update = Instant::now();
            optimizer.step_parameters(parameters, 1.0);
            // A GPU is only given it, and takes its time itself.
            updates += if on_cpu { update.elapsed() } else { Duration::ZERO };
        }
        times.push(start.elapsed().as_secs_f64() * 1e3);
    }
    let mut times = times.split_off(warm_up);
    let whole = Duration::from_secs_f64(times.iter().sum::<f64>() / 1e3);
    let kernels = device.stop_profile();
    times.sort_by(f64::total_cmp);
    let at = |share: f64| times[((times.len() - 1) as f64 * share) as usize];
    let per_image = if args.forward_only { forward } else { 3.0 * forward - first };
    let line = StepLine {
        bench: "step",
        model: name,
        batch: args.batch,
        threads,
        device: args.device.to_string(),
        precision: precision.to_string(),
        graphs: args.graphs,
        search: args.search,
        median_ms: at(0.5),
        p95_ms: at(0.95),
        gflops: 2.0 * per_image * args.batch as f64 / at(0.5) / 1e6,
        peak_mb: peak_mb(),
        gpu_mb: device.gpu().map(|gpu| gpu.memory()).transpose()?.map(|m| (m.total - m.free) as f64 / 1e6),
    };
    if args.profile {
        let updates = KernelTime { name: "optimizer".into(), calls: args.steps as u64, total: updates };
        profile(kernels, updates, whole, args.steps);
    }
    if args.json {
        print(serde_json::to_string(&line)?);
    } else {
        let peak = line.peak_mb.map_or(String::new(), |mb| format!(", {mb:.0} MB at most"));
        let gpu = line.gpu_mb.map_or(String::new(), |mb| format!(", {mb:.0} MB of the GPU"));
        let with = match (args.graphs, args.search) {
            (true, true) => ", with graphs and a search",
            (true, false) => ", with graphs",
            (false, true) => ", with a search",
            (false, false) => "",
        };
        let on = match args.device {
            DeviceSpec::Cpu if precision == Precision::Float32 => format!("{threads} threads"),
            DeviceSpec::Cpu => format!("{threads} threads, {precision}"),
            device => format!("{device}, {precision}{with}"),
        };
        print(format_args!(
            "{name}, batch {}, {on}: median {:.3} ms, 95% below {:.3} ms, {:.1} GFLOP/s{peak}{gpu} ({} steps)",
            args.batch, line.median_ms, line.p95_ms, line.gflops, args.steps
        ));
    }
    Ok(())
}

/// Tells people where the time went, the longest first.
fn profile(mut kernels: Vec<KernelTime>, updates: KernelTime, whole: Duration, steps: usize) {
    if !updates.total.is_zero() {
        kernels.push(updates);
    }
    let known = kernels.iter().map(|kernel| kernel.total).sum();
    kernels.sort_by_key(|kernel| std::cmp::Reverse(kernel.total));
    let rest = whole.saturating_sub(known);
    kernels.push(KernelTime { name: "the rest".into(), calls: steps as u64, total: rest });
    let longest = kernels.iter().map(|kernel| kernel.name.len()).max().unwrap_or_default().max(34);
    say(format_args!("{:<longest$} {:>11} {:>11} {:>7}", "", "calls/step", "ms/step", "share"));
    for KernelTime { name, calls, total } in kernels {
        let (calls, ms) = (calls as f64 / steps as f64, total.as_secs_f64() * 1e3 / steps as f64);
        // What doesn't come once a step, as where a pass is recorded first.
        let digits = if calls.fract() == 0.0 { 0 } else { 1 };
        let share = 100.0 * total.as_secs_f64() / whole.as_secs_f64();
        say(format_args!("{name:<longest$} {calls:>11.digits$} {ms:>11.3} {share:>6.1}%"));
    }
}

/// What a step is made of.
struct Job {
    name: &'static str,
    model: Box<dyn Module>,
    sample: Sample,
    loss: Loss,
    rule: Rule,
    /// Multiply-adds of the forward pass, a sample.
    forward: f64,
    /// Those of the first layer, which needs no gradient of its images.
    first: f64,
}

/// What one sample is.
enum Sample {
    /// An image of one of ten classes.
    Image { channels: usize, side: usize },
    /// Words, each with the one behind it, of so many different ones.
    Words { count: usize, of: usize },
}

impl Sample {
    /// Inputs and targets.
    fn batch(&self, batch: usize, device: &Device) -> [Tensor; 2] {
        match *self {
            Sample::Image { channels, side } => {
                let labels: Vec<i64> = (0..batch).map(|i| (i % 10) as i64).collect();
                let uniform = |dims| Tensor::uniform(device, dims, 0.0, 1.0, DType::F32, Philox::new(1, 0));
                // As they come from the trainer: on a GPU with channels last.
                let images = match device.gpu() {
                    Some(_) => uniform([batch, side, side, channels]).permute(&[0, 3, 1, 2]),
                    None => uniform([batch, channels, side, side]),
                };
                [images, Tensor::from_slice(device, &labels, [batch])]
            }
            Sample::Words { count, of } => {
                let numbers = Philox::new(1, 0);
                let word = |i: usize| i64::from(numbers.word(i as u64)) % of as i64;
                [0, 1].map(|ahead| {
                    let words: Vec<i64> = (ahead..batch * count + ahead).map(word).collect();
                    Tensor::from_slice(device, &words, [batch, count])
                })
            }
        }
    }
}

/// The most memory that this process ever had, in MB.
fn peak_mb() -> Option<f64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    Some(kib(&status, "VmHWM:")? as f64 * 1024.0 / 1e6)
}

fn job(args: &StepArgs) -> Result<Job, WrongUsage> {
    let StepArgs { model, image, .. } = *args;
    let digits = |name, model, count: Count, first| {
        if image.is_some_and(|image| image != 28) {
            return Err(WrongUsage(format!("--image: the model {name} takes images of 28 pixels only")));
        }
        let (loss, rule) = (Loss::Nll, Sgd { momentum: 0.5, ..Sgd::new(0.01) }.into());
        let sample = Sample::Image { channels: 1, side: 28 };
        Ok(Job { name, model, sample, loss, rule, forward: count.total, first })
    };
    match model {
        StepModel::Mnist => {
            let first = Count::of(1, 28).conv(10, 5, 1, 0);
            let count = first.pool(2).conv(20, 5, 1, 0).pool(2).dense(50).dense(10);
            digits("mnist", Box::new(MnistNet::new(0.5)), count, first.total)
        }
        StepModel::MnistHpc => {
            let first = Count::of(1, 28).conv(32, 3, 1, 0);
            let count = first.conv(64, 3, 1, 0).pool(2).dense(128).dense(10);
            digits("mnist-hpc", Box::new(MnistHpcNet::new(0.5)), count, first.total)
        }
        StepModel::Gpt => gpt(args),
        StepModel::Resnet18 => Ok(resnet("resnet18", ResNetDepth::D18, image)),
        StepModel::Resnet34 => Ok(resnet("resnet34", ResNetDepth::D34, image)),
        StepModel::Resnet50 => Ok(resnet("resnet50", ResNetDepth::D50, image)),
        StepModel::Resnet101 => Ok(resnet("resnet101", ResNetDepth::D101, image)),
        StepModel::Resnet152 => Ok(resnet("resnet152", ResNetDepth::D152, image)),
        StepModel::Resnet9 => {
            let image = image.unwrap_or(32);
            if image < ResNet9::SMALLEST {
                let least = ResNet9::SMALLEST;
                return Err(WrongUsage(format!(
                    "--image: the model resnet9 takes images of at least {least} pixels"
                )));
            }
            let first = Count::of(3, image).conv(64, 3, 1, 1);
            let count = first.conv(128, 3, 1, 1).pool(2).conv(128, 3, 1, 1).conv(128, 3, 1, 1);
            let count = count.conv(256, 3, 1, 1).pool(2).conv(512, 3, 1, 1).pool(2);
            let count = count.conv(512, 3, 1, 1).conv(512, 3, 1, 1);
            Ok(pictures("resnet9", Box::new(ResNet9::new(10)), image, count, first))
        }
    }
}

fn gpt(args: &StepArgs) -> Result<Job, WrongUsage> {
    let StepArgs { layers, width, heads, seq, tied, .. } = *args;
    let vocabulary = args.vocabulary.unwrap_or(BYTES);
    [("--width", width), ("--heads", heads), ("--seq", seq), ("--vocabulary", vocabulary)]
        .into_iter()
        .try_for_each(|(flag, number)| at_least_one(flag, number))?;
    if !width.is_multiple_of(heads) {
        return Err(WrongUsage(format!("--heads {heads}: a width of {width} doesn't fall into so many")));
    }
    let head = if tied { Head::Tied } else { Head::Own };
    let config = GptConfig { layers, width, heads, context: seq, vocabulary, dropout: 0.0, head };
    let (time, width) = (seq as f64, width as f64);
    // Of the scores half are needed, and each twice: for itself and for what it weighs.
    let block = 12.0 * time * width * width + time * time * width;
    Ok(Job {
        name: "gpt",
        model: Box::new(Gpt::new(config)),
        sample: Sample::Words { count: seq, of: vocabulary },
        loss: Loss::CrossEntropy { label_smoothing: 0.0 },
        rule: AdamW { lr: 3e-4, ..AdamW::default() }.into(),
        forward: layers as f64 * block + time * width * vocabulary as f64,
        first: 0.0,
    })
}

fn resnet(name: &'static str, depth: ResNetDepth, image: Option<usize>) -> Job {
    let image = image.unwrap_or(32);
    let model = Box::new(ResNet::new(depth, ResNetStem::Imagenet, 10));
    let first = Count::of(3, image).conv(64, 7, 2, 3);
    let mut count = Count { side: first.side.div_ceil(2), ..first };
    for (i, blocks) in depth.blocks().into_iter().enumerate() {
        for block in 0..blocks {
            let (width, stride, before) = (64 << i, if block == 0 && i > 0 { 2 } else { 1 }, count);
            count = match depth.expansion() {
                1 => count.conv(width, 3, stride, 1).conv(width, 3, 1, 1),
                more => count.conv(width, 1, 1, 0).conv(width, 3, stride, 1).conv(more * width, 1, 1, 0),
            };
            if block == 0 && (count.channels, count.side) != (before.channels, before.side) {
                count.total += before.conv(count.channels, 1, stride, 0).total - before.total;
            }
        }
    }
    pictures(name, model, image, count, first)
}

/// A classifier of ten classes of colour images, whose convolutions, all of them and the first, are these.
fn pictures(name: &'static str, model: Box<dyn Module>, image: usize, all: Count, first: Count) -> Job {
    let count = Count { side: 1, ..all }.dense(10);
    let (loss, rule) = (Loss::CrossEntropy { label_smoothing: 0.0 }, Adam::default().into());
    let sample = Sample::Image { channels: 3, side: image };
    Job { name, model, sample, loss, rule, forward: count.total, first: first.total }
}

/// Counts multiply-adds layer by layer, for square images.
#[derive(Clone, Copy)]
struct Count {
    channels: usize,
    side: usize,
    total: f64,
}

impl Count {
    fn of(channels: usize, side: usize) -> Count {
        Count { channels, side, total: 0.0 }
    }

    fn conv(self, outputs: usize, kernel: usize, stride: usize, padding: usize) -> Count {
        let side = (self.side + 2 * padding).saturating_sub(kernel) / stride + 1;
        let more = (outputs * side * side * self.channels * kernel * kernel) as f64;
        Count { channels: outputs, side, total: self.total + more }
    }

    fn pool(self, kernel: usize) -> Count {
        Count { side: self.side / kernel, ..self }
    }

    fn dense(self, outputs: usize) -> Count {
        let more = (self.channels * self.side * self.side * outputs) as f64;
        Count { channels: outputs, side: 1, total: self.total + more }
    }
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
