//! `phalanx bench pipeline`: schedules drawn, and a row of equal blocks trained through them.
//!
//! With a rank in its environment this process is a stage and measures with the others of its run; without one it is an agent that
//! starts a copy of itself a stage, or with `--devices` it is all stages, a thread and a device each.

use super::{at_least_one, start_copies};
use crate::args::{PipelineArgs, WrongUsage};
use crate::say::{print, tabulate};
use anyhow::{Context, Result};
use phalanx::Worker;
use phalanx::nn::optim::{Optimizer, Sgd};
use phalanx::nn::{Ctx, Init, Linear, Loss, Module, Param, Parameters, Relu, Sequential, Visitor};
use phalanx::parallel::pipeline::{
    Action, Done, PipelineConfig, Pipelined, RankPipeline, Schedule, ScheduleKind, Shape, Timeline, Times,
    Work, chart, check, parts,
};
use phalanx::parallel::{Local, Pass, Sync};
use phalanx::tensor::{Crossing, DType, Device, Gradients, Philox, Tensor};
use phalanx_job::WorkerEnv;
use phalanx_launch::LaunchSpec;
use serde::Serialize;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A line of `bench pipeline`.
#[derive(Serialize)]
struct PipelineLine {
    bench: &'static str,
    schedule: &'static str,
    stages: usize,
    chunks: usize,
    micro_batches: usize,
    /// The share of the stages' time that passes idly, by formula and by playing the schedule: with the parts of a stage's work as
    /// long as they were measured, or equally long where nothing was.
    bubble_theory: f64,
    bubble_simulated: f64,
    /// The most micro-batches that each rank holds activations of, counted a stage.
    alive: Vec<usize>,
    /// Messages between stages in a step.
    messages: usize,
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    measured: Option<MeasuredFields>,
    /// What each rank does.
    #[serde(skip_serializing_if = "Option::is_none")]
    actions: Option<Vec<Vec<String>>>,
}

/// What was measured.
#[derive(Clone, Serialize)]
struct MeasuredFields {
    bubble_measured: f64,
    /// What of it comes of stages' work that took longer now and then, and would stay if messages took no time.
    bubble_of_work: f64,
    median_ms: f64,
    p95_ms: f64,
    steps: usize,
    blocks: usize,
    /// How long each waits in the place of computing.
    #[serde(skip_serializing_if = "Option::is_none")]
    block_ms: Option<f64>,
    width: usize,
    batch: usize,
    /// The largest resident memory of a process, and that of all together.
    rss_mb: f64,
    rss_all_mb: f64,
    loss: f64,
}

/// Columns of a drawing.
const COLUMNS: usize = 160;
/// The longest that a block may wait.
const MOST_BLOCK_MS: f64 = 1000.0;
/// Steps before those that count.
const WARM_UP: usize = 2;

pub(super) fn pipeline(args: &PipelineArgs) -> Result<u8> {
    for (flag, number) in [
        ("--stages", args.stages),
        ("--micro-batches", args.micro_batches),
        ("--steps", args.steps),
        ("--width", args.width),
        ("--batch", args.batch),
    ] {
        at_least_one(flag, number)?;
    }
    if let Some(ms) = args.block_ms.filter(|ms| !(0.0..=MOST_BLOCK_MS).contains(ms)) {
        let text = format!("--block-ms {ms}: a block waits for 0 to {MOST_BLOCK_MS} ms");
        return Err(WrongUsage(text).into());
    }
    let schedule = asked(args).map_err(|error| WrongUsage(error.to_string()))?;
    if args.draw {
        return draw(args, &schedule);
    }
    if let Some(file) = args.svg.as_ref().filter(|_| !args.devices) {
        let text = format!(
            "--svg {}: what ranks did isn't drawn\nhint: add --draw for the schedule, or --devices to measure devices of one process",
            file.display()
        );
        return Err(WrongUsage(text).into());
    }
    if args.blocks < schedule.stages() {
        let (blocks, stages) = (args.blocks, schedule.stages());
        let text =
            format!("--blocks {blocks}: each of {stages} stages needs one\nhint: take {stages} or more");
        return Err(WrongUsage(text).into());
    }
    if args.batch < args.micro_batches {
        let (batch, micro_batches) = (args.batch, args.micro_batches);
        let text = format!(
            "--batch {batch}: each of {micro_batches} micro-batches needs a sample\nhint: take {micro_batches} or more"
        );
        return Err(WrongUsage(text).into());
    }
    if args.devices {
        let measured = on_devices(args, &schedule)?;
        report(args, &schedule, &measured);
        return Ok(0);
    }
    if WorkerEnv::from_env()?.is_none() {
        return start_copies(LaunchSpec { workers: args.stages, ..LaunchSpec::default() });
    }
    let worker = Worker::from_environment(Some(1))?;
    if let Some(measured) = on_ranks(args, &schedule, &worker)? {
        report(args, &schedule, &measured);
    }
    Ok(0)
}

fn asked(args: &PipelineArgs) -> Result<Schedule, phalanx::parallel::Error> {
    let usual = if args.schedule == ScheduleKind::Interleaved { 2 } else { 1 };
    let chunks = args.chunks.unwrap_or(usual);
    let shape = Shape { ranks: args.stages, chunks, micro_batches: args.micro_batches };
    Ok(Schedule::new(args.schedule, shape)?)
}

/// Draws the schedule by equal times.
fn draw(args: &PipelineArgs, schedule: &Schedule) -> Result<u8> {
    let timeline = Timeline::simulate(schedule, Times::EQUAL, 0.0);
    let title = line(schedule, Times::EQUAL, None);
    if args.json {
        let actions = |rank| schedule.actions(rank).iter().map(|action| format!("{action}@{}", action.stage));
        let actions = (0..schedule.shape().ranks).map(|rank| actions(rank).collect()).collect();
        let with_actions = PipelineLine { actions: Some(actions), ..title };
        print(serde_json::to_string(&with_actions).expect("numbers and words are always JSON"));
    } else {
        print(told(&title));
        print(chart::text(&timeline, COLUMNS).trim_end());
    }
    svg(args, schedule, &timeline)?;
    Ok(0)
}

fn svg(args: &PipelineArgs, schedule: &Schedule, timeline: &Timeline) -> Result<()> {
    let Some(file) = &args.svg else { return Ok(()) };
    let Shape { ranks, micro_batches, .. } = schedule.shape();
    let title = format!("{}: {ranks} ranks, {micro_batches} micro-batches", schedule.kind());
    std::fs::write(file, chart::svg(timeline, &title)).with_context(|| format!("{}", file.display()))
}

fn line(schedule: &Schedule, times: Times, measured: Option<MeasuredFields>) -> PipelineLine {
    let Shape { ranks, chunks, micro_batches } = schedule.shape();
    let played = check(schedule).expect("every schedule that is made plays to its end");
    PipelineLine {
        bench: "pipeline",
        schedule: schedule.kind().name(),
        stages: ranks,
        chunks,
        micro_batches,
        bubble_theory: schedule.bubble(times),
        bubble_simulated: Timeline::simulate(schedule, times, 0.0).bubble(),
        alive: played.alive,
        messages: played.messages,
        measured,
        actions: None,
    }
}

fn told(line: &PipelineLine) -> String {
    let PipelineLine { schedule, stages, chunks, micro_batches, bubble_theory, bubble_simulated, .. } = line;
    let chunks = if *chunks > 1 { format!(" of {chunks} chunks") } else { String::new() };
    format!(
        "{schedule}: {stages} ranks{chunks}, {micro_batches} micro-batches: a bubble of {:.1}% in theory, {:.1}% simulated; alive {:?}",
        100.0 * bubble_theory,
        100.0 * bubble_simulated,
        line.alive
    )
}

/// What one process or all of them measured.
struct Measured {
    times: Times,
    fields: MeasuredFields,
}

fn report(args: &PipelineArgs, schedule: &Schedule, measured: &Measured) {
    let fields = &measured.fields;
    let line = line(schedule, measured.times, Some(fields.clone()));
    tabulate(args.json, told(&line));
    tabulate(
        args.json,
        format_args!(
            "{:.1}% measured, {:.1}% by the lengths of what stages did; a step takes {:.1} ms, in 95 of 100 at most {:.1} ms; {:.0} MB resident in all, {:.0} MB at most in one process",
            100.0 * fields.bubble_measured,
            100.0 * fields.bubble_of_work,
            fields.median_ms,
            fields.p95_ms,
            fields.rss_all_mb,
            fields.rss_mb
        ),
    );
    if args.json {
        print(serde_json::to_string(&line).expect("numbers and words are always JSON"));
    }
}

/// A row of equal blocks.
fn row(args: &PipelineArgs) -> Sequential {
    (0..args.blocks).fold(Sequential::new(), |row, _| match args.block_ms {
        Some(ms) => row.then(Waiting::new(args.width, Duration::from_secs_f64(1e-3 * ms))),
        None => row.then(Sequential::new().then(Linear::new(args.width, args.width)).then(Relu)),
    })
}

/// A block that takes a known time: it adds a bias to what comes in, and waits forward, on the way back of the input's gradient, and on
/// that of the bias'.
struct Waiting {
    bias: Param,
    with_input: Arc<dyn Crossing>,
    with_bias: Arc<dyn Crossing>,
}

impl Waiting {
    fn new(width: usize, time: Duration) -> Waiting {
        let [with_input, with_bias] =
            [time, Duration::ZERO].map(|forth| Arc::new(Wait { forth, back: time }) as Arc<dyn Crossing>);
        Waiting { bias: Param::new([width], Init::Constant(0.0)), with_input, with_bias }
    }
}

impl Module for Waiting {
    fn forward(&self, x: &Tensor, _: &mut Ctx) -> Tensor {
        x.across(&self.with_input) + self.bias.across(&self.with_bias)
    }

    fn visit(&mut self, v: &mut Visitor<'_>) {
        v.param("bias", &mut self.bias);
    }
}

/// What goes through it stays as it is, and is late.
struct Wait {
    forth: Duration,
    back: Duration,
}

impl Crossing for Wait {
    fn forth(&self, x: &Tensor) -> Tensor {
        std::thread::sleep(self.forth);
        x.clone()
    }

    fn back(&self, grad: &Tensor) -> Tensor {
        std::thread::sleep(self.back);
        grad.clone()
    }
}

fn cut(args: &PipelineArgs, schedule: &Schedule) -> Vec<Range<usize>> {
    parts(args.blocks, schedule.stages()).collect()
}

/// What every step works on.
struct Job<'a> {
    args: &'a PipelineArgs,
    model: &'a dyn Module,
    parameters: &'a Parameters,
    input: Tensor,
    target: Tensor,
    optimizer: Optimizer,
}

impl<'a> Job<'a> {
    fn new(args: &'a PipelineArgs, model: &'a dyn Module, parameters: &'a Parameters) -> Result<Job<'a>> {
        let device = parameters.values().device();
        let random = |stream| {
            let key = Philox::new(1, stream);
            Tensor::uniform(device, [args.batch, args.width], 0.0, 1.0, DType::F32, key)
        };
        let optimizer = Optimizer::new(Sgd::new(1e-3))?;
        // The first stage makes a gradient of its input as all others do, or its work wouldn't equal theirs.
        let input = random(0).requires_grad();
        Ok(Job { args, model, parameters, input, target: random(1), optimizer })
    }

    /// One step: gives the mean loss, where this process has it.
    fn step(&mut self, local: &mut dyn Local, step: u64) -> Result<f64> {
        let parameters = self.parameters;
        let pass = Pass {
            model: self.model,
            parameters,
            loss: Loss::Mse,
            input: self.input.clone(),
            target: self.target.clone(),
            ctx: Ctx::train(0, step, (0..self.args.batch as u64).collect()),
            weight: 1.0,
            sync: Sync::Now,
        };
        parameters.grads().zero();
        let loss = local.pass(&pass, &mut Gradients::default())?;
        parameters.grads().settle();
        let grads = parameters.grads().arena().flat::<f32>();
        let device = parameters.values().device();
        self.optimizer.step_on(device, &mut parameters.values().flat_mut::<f32>(), &grads, 1.0);
        Ok(loss)
    }
}

/// Sums over steps and ranks of what stages did, and for how long.
#[derive(Clone, Copy, Default)]
struct Spent([f64; 6]);

impl Spent {
    fn add(&mut self, timeline: &Timeline) {
        for done in timeline.ranks.iter().flatten() {
            let place = match done.action.work {
                Work::Forward => 0,
                Work::Backward | Work::BackwardInput => 2,
                Work::BackwardWeight => 4,
            };
            self.0[place] += done.end - done.start;
            self.0[place + 1] += 1.0;
        }
    }

    fn times(&self) -> Times {
        let mean = |place: usize| self.0[place] / self.0[place + 1].max(1.0);
        Times { forward: mean(0), input: mean(2), weight: mean(4) }
    }
}

/// The median, and what 95 of 100 aren't above.
fn spread(mut times: Vec<f64>) -> (f64, f64) {
    times.sort_by(f64::total_cmp);
    let at = |percent: usize| times[(times.len() * percent / 100).min(times.len() - 1)];
    (at(50), at(95))
}

fn on_devices(args: &PipelineArgs, schedule: &Schedule) -> Result<Measured> {
    let devices: Vec<Device> = (0..args.stages).map(|_| Device::cpu(1)).collect();
    let blocks = cut(args, schedule);
    let mut model = row(args);
    let of = |block: usize| blocks.iter().position(|blocks| blocks.contains(&block)).unwrap_or(0);
    let parameters = Parameters::build_on(&mut model, &devices, |block| of(block) % devices.len(), 0);
    let (kind, micro_batches) = (schedule.kind(), args.micro_batches);
    let config = PipelineConfig { blocks: blocks.clone(), devices: devices.clone(), kind, micro_batches };
    let mut local = Pipelined::new(config)?;
    let mut job = Job::new(args, &model, &parameters)?;
    let (mut times, mut bubbles, mut of_work) = (Vec::new(), Vec::new(), Vec::new());
    let (mut spent, mut loss) = (Spent::default(), 0.0);
    for step in 0..args.steps + WARM_UP {
        let start = Instant::now();
        loss = job.step(&mut local, step as u64)?;
        let took = start.elapsed().as_secs_f64();
        if let Some(timeline) = local.timeline().filter(|_| step >= WARM_UP) {
            times.push(1e3 * took);
            bubbles.push(timeline.bubble());
            of_work.push(timeline.without_waits(schedule).bubble());
            spent.add(timeline);
        }
    }
    if let Some(timeline) = local.timeline() {
        svg(args, schedule, timeline)?;
    }
    let rss = peak_rss_mb();
    let ((median_ms, p95_ms), [(bubble_measured, _), (bubble_of_work, _)]) =
        (spread(times), [bubbles, of_work].map(spread));
    let fields = fields(args, [bubble_measured, bubble_of_work, median_ms, p95_ms, rss, rss, loss]);
    Ok(Measured { times: spent.times(), fields })
}

fn fields(args: &PipelineArgs, numbers: [f64; 7]) -> MeasuredFields {
    let [bubble_measured, bubble_of_work, median_ms, p95_ms, rss_mb, rss_all_mb, loss] = numbers;
    let PipelineArgs { steps, blocks, block_ms, width, batch, .. } = *args;
    MeasuredFields {
        bubble_measured,
        bubble_of_work,
        median_ms,
        p95_ms,
        steps,
        blocks,
        block_ms,
        width,
        batch,
        rss_mb,
        rss_all_mb,
        loss,
    }
}

/// Measures as one stage; rank 0 gives what all of them measured.
fn on_ranks(args: &PipelineArgs, schedule: &Schedule, worker: &Worker) -> Result<Option<Measured>> {
    let (group, device) = (worker.group(), worker.device());
    let mut model = row(args);
    let mut local = RankPipeline::new(group.clone(), schedule.clone(), cut(args, schedule), device.clone());
    let parameters = Parameters::build_part(&mut model, device, |block| local.holds(block), 0);
    let mut job = Job::new(args, &model, &parameters)?;
    let (mut times, mut passes, mut lengths) = (Vec::new(), Vec::new(), Vec::new());
    let (mut spent, mut loss) = (Spent::default(), 0.0);
    group.barrier()?;
    for step in 0..args.steps + WARM_UP {
        let start = Instant::now();
        loss = job.step(&mut local, step as u64)?;
        group.barrier()?;
        if step >= WARM_UP {
            times.push(1e3 * start.elapsed().as_secs_f64());
            let own = Timeline { ranks: vec![local.last().done.clone()] };
            passes.push(local.last().done.iter().map(|done| done.end).fold(0.0, f64::max));
            lengths.extend(own.ranks[0].iter().map(|done| done.end - done.start));
            spent.add(&own);
        }
    }
    use phalanx::comm::ReduceOp;
    // A pass is as long as its slowest rank took.
    group.all_reduce(&mut passes, ReduceOp::Max)?;
    let mut all_lengths = vec![0.0; lengths.len() * group.world_size()];
    group.all_gather(&lengths, &mut all_lengths)?;
    let mut sums = spent.0.to_vec();
    sums.extend([loss, peak_rss_mb()]);
    group.all_reduce(&mut sums, ReduceOp::Sum)?;
    let mut most = [peak_rss_mb()];
    group.all_reduce(&mut most, ReduceOp::Max)?;
    if !worker.is_first() {
        return Ok(None);
    }
    let steps =
        || passes.iter().enumerate().map(|(step, pass)| (pass, lasting(schedule, &all_lengths, step)));
    let bubble = |(pass, row): (&f64, Timeline)| 1.0 - row.busy() / (pass * group.world_size() as f64);
    let (bubble_measured, _) = spread(steps().map(bubble).collect());
    let (bubble_of_work, _) = spread(steps().map(|(_, row)| row.without_waits(schedule).bubble()).collect());
    let (median_ms, p95_ms) = spread(times);
    spent.0.copy_from_slice(&sums[..6]);
    let fields =
        fields(args, [bubble_measured, bubble_of_work, median_ms, p95_ms, most[0], sums[7], sums[6]]);
    Ok(Some(Measured { times: spent.times(), fields }))
}

/// What ranks did in a step, by the lengths of all actions: of each rank, of each step, in the schedule's order.
fn lasting(schedule: &Schedule, lengths: &[f64], step: usize) -> Timeline {
    let ranks = schedule.shape().ranks;
    let of_rank = lengths.len() / ranks;
    let row = |rank: usize| {
        let actions = schedule.actions(rank);
        let lengths = &lengths[rank * of_rank + step * actions.len()..];
        let done = |(&action, &end): (&Action, &f64)| Done { action, start: 0.0, end };
        actions.iter().zip(lengths).map(done).collect()
    };
    Timeline { ranks: (0..ranks).map(row).collect() }
}

/// The most memory that this process had resident, in MB; 0 where the system doesn't tell.
fn peak_rss_mb() -> f64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kb = line.and_then(|line| line.split_whitespace().next()?.parse::<f64>().ok());
    kb.unwrap_or(0.0) * 1024.0 / 1e6
}
