//! A replica that lies on several ranks, as stages, as parts of every matrix, or both, learns what a model on one device learns.

use phalanx_comm::{Group, Rank};
use phalanx_nn::models::{Autoencoder, BasicBlock, Gpt, GptConfig, Head, MnistNet, ResNet9, ResNetDepth};
use phalanx_nn::optim::{Clip, Optimizer, Resuming, Sgd};
use phalanx_nn::{BatchNorm2d, Conv2d, Ctx, Dropout, Linear, Loss, Module, Parameters, Sequential, module};
use phalanx_parallel::pipeline::ScheduleKind;
use phalanx_parallel::{
    Axis, Between, Bound, By, DdpConfig, EvalPass, FsdpConfig, Here, ModelParallel, ModelParallelConfig,
    Outputs, Pass, Plan, Recomputed, Sharded, SingleDevice, StagesConfig, Strategy, Style, Sync,
};
use phalanx_tensor::{DType, Device, Later, Philox, Shape, Tensor, autocast};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

const RULE: Sgd = Sgd { momentum: 0.9, ..Sgd::new(0.1) };
const STEPS: u64 = 4;
/// Samples of the steps: the second has fewer than some replicas have micro-batches, and the last leaves replicas without any.
const BATCHES: [u64; STEPS as usize] = [8, 5, 8, 1];
/// Backward passes of a step, each of about a half of its samples.
const PASSES: u64 = 2;
/// Sums in another order, in float32, over four steps on losses and norms of about 3.
const TOLERANCE: f64 = 1e-5;
/// The same of values and momenta, of which the largest are about 1.
const OF_VALUES: f32 = 1e-4;

/// Channels of the first layers of the residual network.
const WIDTH: usize = 16;

const GPT: GptConfig =
    GptConfig { layers: 2, width: 16, heads: 4, context: 8, vocabulary: 32, dropout: 0.2, head: Head::Tied };

#[derive(Clone, Copy, Debug)]
enum Job {
    Gpt(Head),
    Mnist,
    ResNet,
    ResNet9,
    Autoencoder,
    Net,
}

module! {
    /// A pair of layers beside what comes in, and one that nobody cuts.
    struct Net() {
        up: Linear = Linear::new(12, 24),
        down: Linear = Linear::new(24, 12),
        drop: Dropout = Dropout::new(0.3),
        out: Linear = Linear::new(12, 3),
    }

    fn forward(&self, x: &Tensor, ctx: &mut Ctx) -> Tensor {
        let y = self.down.forward(&self.up.forward(x, ctx).gelu(), ctx);
        self.out.forward(&(x + self.drop.forward(&y, ctx)), ctx)
    }
}

/// Two blocks, the first of which brings `inputs` channels to `outputs`.
fn layer(inputs: usize, outputs: usize, stride: usize) -> Sequential {
    Sequential::new()
        .then(BasicBlock::new(inputs, outputs, stride))
        .then(BasicBlock::new(outputs, outputs, 1))
}

module! {
    /// A ResNet-18 of small images with a fraction of its channels: up to eight ranks have a copy each.
    struct NarrowResNet() {
        conv1: Conv2d = Conv2d::new(3, WIDTH, 3).without_bias().padding(1),
        bn1: BatchNorm2d = BatchNorm2d::new(WIDTH),
        layer1: Sequential = layer(WIDTH, WIDTH, 1),
        layer2: Sequential = layer(WIDTH, 2 * WIDTH, 2),
        layer3: Sequential = layer(2 * WIDTH, 4 * WIDTH, 2),
        layer4: Sequential = layer(4 * WIDTH, 8 * WIDTH, 2),
        fc: Linear = Linear::new(8 * WIDTH, 10),
    }

    blocks(&self, x: &Tensor, ctx: &mut Ctx) -> Tensor {
        (conv1, bn1) => self.bn1.forward_relu(&self.conv1.forward(x, ctx), ctx),
        (layer1) => self.layer1.forward(x, ctx),
        (layer2) => self.layer2.forward(x, ctx),
        (layer3) => self.layer3.forward(x, ctx),
        (layer4) => self.layer4.forward(x, ctx),
        (fc) => self.fc.forward(&x.adaptive_avg_pool2d([1, 1]).flatten_from(1), ctx),
    }
}

impl Job {
    fn loss(self) -> Loss {
        if matches!(self, Job::Net | Job::Autoencoder) {
            Loss::Mse
        } else {
            Loss::CrossEntropy { label_smoothing: 0.1 }
        }
    }

    fn plan(self, between: Between) -> Option<Plan> {
        match self {
            Job::Gpt(_) => Some(Plan::of_gpt(GPT.heads, between)),
            Job::Net => {
                let up = Style::Outputs { dim: 0, groups: 1 };
                Some(Plan::new(between).with("up", up).with("down", Style::Inputs { dim: 1 }))
            }
            Job::Mnist => Some(Plan::of_mnist()),
            Job::ResNet => Some(Plan::of_resnet(ResNetDepth::D18)),
            Job::ResNet9 => Some(Plan::of_resnet9()),
            Job::Autoencoder => Some(Plan::of_autoencoder()),
        }
    }

    fn model(self) -> Box<dyn Module> {
        match self {
            Job::Gpt(head) => Box::new(Gpt::new(GptConfig { head, ..GPT })),
            Job::Mnist => Box::new(MnistNet::new(0.5)),
            Job::ResNet => Box::new(NarrowResNet::new()),
            Job::ResNet9 => Box::new(ResNet9::new(10)),
            Job::Autoencoder => Box::new(Autoencoder::new()),
            Job::Net => Box::new(Net::new()),
        }
    }

    /// Samples that are functions of their numbers.
    fn samples(self, device: &Device, ids: &[u64]) -> (Tensor, Tensor) {
        let words = |stream: u64, count: usize, of: i64| -> Vec<i64> {
            let word = |id: u64, i: usize| i64::from(Philox::new(id, stream).word(i as u64)) % of;
            ids.iter().flat_map(|&id| (0..count).map(move |i| word(id, i))).collect()
        };
        let n = ids.len();
        let image = |dims: [usize; 3]| {
            let values: Vec<f32> =
                words(1, dims.iter().product(), 1000).iter().map(|&word| word as f32 / 500.0 - 1.0).collect();
            (
                Tensor::from_slice(device, &values, [n, dims[0], dims[1], dims[2]]),
                Tensor::from_slice(device, &words(2, 1, 10), [n]),
            )
        };
        match self {
            Job::Gpt(_) => {
                let text = |stream| Tensor::from_slice(device, &words(stream, 8, 32), [n, 8]);
                (text(1), text(2))
            }
            Job::Net => {
                let numbers = |stream, count| {
                    let values: Vec<f32> =
                        words(stream, count, 1000).iter().map(|&word| word as f32 / 500.0 - 1.0).collect();
                    Tensor::from_slice(device, &values, [n, count])
                };
                (numbers(1, 12), numbers(2, 3))
            }
            Job::Mnist => image([1, 28, 28]),
            Job::ResNet | Job::ResNet9 => image([3, 16, 16]),
            Job::Autoencoder => {
                let (images, _) = image([1, 28, 28]);
                let numbers = images.reshape([n, 28 * 28]);
                (images, numbers)
            }
        }
    }
}

/// What training leaves.
#[derive(Clone, Debug)]
struct Outcome {
    losses: Vec<f64>,
    norms: Vec<f64>,
    values: Vec<f32>,
    buffers: Vec<f32>,
    /// The momentum of all values, on rank 0.
    state: Vec<f32>,
}

struct Run<'a> {
    job: Job,
    model: &'a dyn Module,
    parameters: &'a Parameters,
    strategy: &'a mut dyn Strategy,
}

impl Run<'_> {
    /// One pass over this rank's samples of a step, of which each pass takes every other one: sample `i` of a pass is the one of
    /// rank `i % world`.
    fn pass(&mut self, step: u64, pass: u64, sync: Sync) -> f64 {
        let (device, place) = (self.parameters.values().device().clone(), self.strategy.place());
        let batch = BATCHES[step as usize];
        let all = (0..batch).filter(|i| i % PASSES == pass).map(|i| step * 100 + i);
        let ids: Vec<u64> = all.skip(place.rank).step_by(place.world_size).collect();
        let (input, target) = self.job.samples(&device, &ids);
        let weight = ids.len() as f64 / batch as f64;
        let ctx = Ctx::train(3, step, Arc::from(ids));
        let (model, parameters) = (self.model, self.parameters);
        let pass = Pass { model, parameters, loss: self.job.loss(), input, target, ctx, weight, sync };
        self.strategy.pass(&pass).unwrap() * weight
    }

    /// The mean loss over evaluated samples, and the mean size of their outputs, over all ranks, which take every other one of each batch in
    /// turn.
    fn evaluate(&mut self) -> [f64; 2] {
        let loss = self.job.loss();
        let judge = |outputs: &Outputs<'_>, sums: &mut [f64]| {
            sums[0] += outputs.loss(&loss)?.item() * outputs.samples() as f64;
            let outputs = (outputs.samples() as f64, outputs.to_vec()?);
            let size: f64 = outputs.1.iter().map(|&output| f64::from(output.abs())).sum();
            sums[1] += size / outputs.1.len() as f64 * outputs.0;
            sums[2] += outputs.0;
            Ok(())
        };
        let (device, place) = (self.parameters.values().device().clone(), self.strategy.place());
        let mut sums = [0.0; 3];
        for (step, batch) in (0..).zip(BATCHES) {
            let ids = (0..batch).map(|i| 1000 + step * 100 + i).skip(place.rank).step_by(place.world_size);
            let (input, target) = self.job.samples(&device, &ids.collect::<Vec<_>>());
            let (model, parameters) = (self.model, self.parameters);
            let pass = EvalPass { model, parameters, input, target, ctx: Ctx::eval() };
            self.strategy.evaluate(&pass, &judge, &mut sums).unwrap();
        }
        self.strategy.sum(&mut sums).unwrap();
        assert_eq!(sums[2], BATCHES.iter().sum::<u64>() as f64, "each sample counts once");
        [sums[0] / sums[2], sums[1] / sums[2]]
    }

    /// Makes steps, beginning with `state`, of which each rank keeps its part.
    fn train(mut self, steps: std::ops::Range<u64>, state: Option<&[f32]>) -> Outcome {
        let mut optimizer = match state {
            Some(state) => part_of_optimizer(self.strategy, self.parameters, steps.start, state),
            None => Optimizer::new(RULE).unwrap(),
        };
        self.steps(steps, &mut optimizer)
    }

    /// What the first step leaves, and what all leave: the others go on from what was gathered behind the first.
    fn train_and_look_behind_a_step(mut self) -> [Outcome; 2] {
        let optimizer = &mut Optimizer::new(RULE).unwrap();
        let first = self.steps(0..1, optimizer);
        let rest = self.steps(1..STEPS, optimizer);
        let [losses, norms] = [[&first.losses, &rest.losses], [&first.norms, &rest.norms]]
            .map(|of| of.into_iter().flatten().copied().collect());
        let all = Outcome { losses, norms, ..rest };
        [first, all]
    }

    fn steps(&mut self, steps: std::ops::Range<u64>, optimizer: &mut Optimizer) -> Outcome {
        let parameters = self.parameters;
        let device = parameters.values().device().clone();
        let clip = Clip { norm: Some(0.5), value: None };
        let (mut losses, mut norms) = (Vec::new(), Vec::new());
        for step in steps {
            let mut loss = [self.pass(step, 0, Sync::Later) + self.pass(step, 1, Sync::Now)];
            self.strategy.finish(parameters).unwrap();
            norms.extend(self.strategy.clip(&clip, parameters, optimizer).unwrap().map(Later::item));
            self.strategy.step(optimizer, parameters, &device, 1.0).unwrap();
            self.strategy.sum(&mut loss).unwrap();
            losses.push(loss[0]);
        }
        self.strategy.gather().unwrap();
        let whole = self.strategy.whole_state(optimizer).unwrap();
        let own = || optimizer.state().map(|(_, state)| state.with(<[f32]>::to_vec)).collect();
        let state = whole.unwrap_or_else(own).pop().unwrap_or_default();
        let [values, buffers] = [parameters.values(), parameters.buffers()].map(|arena| arena.read_flat());
        Outcome { losses, norms, values, buffers, state }
    }
}

/// On one device; with the micro-batches of a pipeline, which a batch norm sees one by one, as several passes are.
fn alone(job: Job) -> Outcome {
    run_alone(job, |run| run.train(0..STEPS, None))
}

fn run_alone<R>(job: Job, f: impl FnOnce(Run<'_>) -> R) -> R {
    let mut model = job.model();
    let parameters = Parameters::build(&mut model, &Device::cpu(1), 7);
    let (model, parameters) = (&*model, &parameters);
    let strategy = &mut SingleDevice::new();
    strategy.prepare(parameters).unwrap();
    f(Run { job, model, parameters, strategy })
}

/// A mesh of so many ranks, and how the model lies there.
#[derive(Clone)]
struct On {
    ranks: usize,
    mesh: Vec<(Axis, usize)>,
    between: Between,
    sharded: Option<Sharded>,
    kind: ScheduleKind,
    again: bool,
}

impl On {
    fn new(ranks: usize, mesh: &[(Axis, usize)]) -> On {
        On {
            ranks,
            mesh: mesh.to_vec(),
            between: Between::Whole,
            sharded: None,
            kind: ScheduleKind::OneFOneB,
            again: false,
        }
    }

    fn config(&self, job: Job) -> ModelParallelConfig {
        let pipeline =
            self.mesh.iter().find(|(axis, _)| *axis == Axis::Pipeline).map_or(1, |(_, size)| *size);
        let blocks = job.model().blocks();
        let chunks = if self.kind == ScheduleKind::Interleaved { 2 } else { 1 };
        let stages = pipeline * chunks;
        let cut = |stage: usize| stage * blocks / stages..(stage + 1) * blocks / stages;
        let again = self.again;
        let model = move || -> Box<dyn Module> {
            if again { Box::new(Recomputed::all_but_the_last(job.model())) } else { job.model() }
        };
        ModelParallelConfig {
            mesh: self.mesh.clone(),
            bounds: vec![Bound { axis: Axis::Tensor, by: By::Divides(GPT.heads), what: "heads" }],
            model: Arc::new(model),
            plan: job.plan(self.between),
            stages: (pipeline > 1).then(|| StagesConfig {
                blocks: (0..stages).map(cut).collect(),
                kind: self.kind,
                micro_batches: 4,
            }),
            ddp: DdpConfig::default(),
            sharded: self.sharded.map(|sharded| FsdpConfig {
                sharded,
                unit_bytes: 0,
                ..FsdpConfig::default()
            }),
            replays: false,
        }
    }

    /// Runs `f` as each rank, whose model's first values are those of another seed than rank 0's, which count.
    fn each<R: Send>(
        &self,
        job: Job,
        f: impl Fn(Group, Box<dyn Module>, &Parameters, &mut ModelParallel) -> R + std::marker::Sync,
    ) -> Vec<R> {
        std::thread::scope(|scope| {
            let threads: Vec<_> = Group::threads(self.ranks)
                .into_iter()
                .map(|group| {
                    let f = &f;
                    scope.spawn(move || {
                        let mut model = job.model();
                        let seed = if group.rank() == Rank(0) { 7 } else { 8 };
                        let whole = Parameters::build(&mut model, &Device::cpu(1), seed);
                        let mut strategy = ModelParallel::new(&group, &whole, &self.config(job)).unwrap();
                        strategy.prepare(&whole).unwrap();
                        f(group, model, &whole, &mut strategy)
                    })
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    fn train(&self, job: Job) -> Vec<Outcome> {
        self.each(job, |_, model, parameters, strategy| {
            Run { job, model: &model, parameters, strategy }.train(0..STEPS, None)
        })
    }

    fn what(&self) -> String {
        let On { ranks, mesh, between, sharded, kind, again } = self;
        format!("{ranks} ranks, {mesh:?}, {between:?}, {sharded:?}, {kind}, again: {again}")
    }
}

fn check_close(what: &str, of: &str, got: &[f32], want: &[f32]) {
    let worst = got.iter().zip(want).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(got.len() == want.len() && worst < OF_VALUES, "{what}: {of} are {worst} apart");
}

fn check(outcomes: &[Outcome], want: &Outcome, what: &str) {
    for (rank, got) in outcomes.iter().enumerate() {
        let bits = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        assert!(bits(&got.values) == bits(&outcomes[0].values), "{what}: rank {rank} has other values");
        assert!(got.losses == outcomes[0].losses && got.norms == outcomes[0].norms, "{what}: rank {rank}");
        for (of, got, want) in [("losses", &got.losses, &want.losses), ("norms", &got.norms, &want.norms)] {
            let close = got.iter().zip(want).all(|(got, want)| (got - want).abs() < TOLERANCE);
            assert!(got.len() == want.len() && close, "{what}: {of} {got:?}, not {want:?}");
        }
        check_close(what, "values", &got.values, &want.values);
        check_close(what, "running statistics", &got.buffers, &want.buffers);
    }
    check_close(what, "momenta", &outcomes[0].state, &want.state);
}

use Axis::{Context, Pipeline, Replica, Shard, Tensor as Across};

/// Each rank rounds its part of a product, and gradients are rounded before they are added up: over four steps, on losses of about 3.5.
const APART_BF16: f64 = 2e-2;
const APART_F16: f64 = 3e-3;

#[test]
fn products_of_16_bits_are_those_of_one_device_but_for_what_is_rounded_by_part() {
    for (dtype, allowed) in [(DType::BF16, APART_BF16), (DType::F16, APART_F16)] {
        let check = |job: Job, on: &On, want: &Outcome| {
            let outcomes = on.each(job, |_, model, parameters, strategy| {
                let run = Run { job, model: &model, parameters, strategy };
                autocast(dtype, || run.train(0..STEPS, None))
            });
            let what = format!("{dtype}, {}", on.what());
            for got in &outcomes {
                assert!(got.values == outcomes[0].values && got.losses == outcomes[0].losses, "{what}");
                let apart = got.losses.iter().zip(&want.losses).map(|(a, b)| (a - b).abs());
                let apart = apart.fold(0.0, f64::max);
                assert!(
                    got.losses.len() == want.losses.len() && apart < allowed,
                    "{what}: {apart:.1e} apart"
                );
            }
        };
        let job = Job::Gpt(Head::Own);
        let (want, single) = (autocast(dtype, || alone(job)), alone(job));
        assert_ne!(want.losses, single.losses);
        for between in [Between::Whole, Between::Sequence] {
            check(job, &On { between, ..On::new(2, &[(Across, 2)]) }, &want);
            let on = On { between, sharded: Some(Sharded::Parameters), ..On::new(4, &[(Across, 2)]) };
            check(job, &on, &want);
        }
        for kind in [ScheduleKind::OneFOneB, ScheduleKind::ZeroBubble] {
            check(job, &On { kind, ..On::new(4, &[(Pipeline, 2), (Across, 2)]) }, &want);
        }
        check(job, &On { again: true, ..On::new(2, &[(Pipeline, 2)]) }, &want);
        for sharded in [Sharded::States, Sharded::Parameters] {
            check(job, &On { sharded: Some(sharded), ..On::new(4, &[(Pipeline, 2)]) }, &want);
        }
    }
}

/// With what each rank holds of the model; the whole one comes nowhere.
#[test]
fn an_evaluation_by_parts_is_that_of_one_device() {
    let sharded = Some(Sharded::Parameters);
    let (tied, own) = (Job::Gpt(Head::Tied), Job::Gpt(Head::Own));
    let sequence = Between::Sequence;
    let all = [
        (tied, On::new(2, &[(Across, 2)])),
        (tied, On { between: sequence, sharded, ..On::new(4, &[(Across, 2)]) }),
        (tied, On::new(4, &[(Pipeline, 2), (Across, 2)])),
        (tied, On { sharded, ..On::new(4, &[(Pipeline, 2)]) }),
        (own, On { sharded: Some(Sharded::States), ..On::new(4, &[(Pipeline, 2)]) }),
        (own, On { kind: ScheduleKind::Interleaved, ..On::new(4, &[(Pipeline, 2)]) }),
        (own, On { kind: ScheduleKind::ZeroBubble, ..On::new(3, &[(Pipeline, 3)]) }),
        (tied, On { between: sequence, ..On::new(4, &[(Context, 2), (Across, 2)]) }),
        (tied, On { sharded, ..On::new(4, &[(Context, 2), (Shard, 2)]) }),
        (own, On::new(4, &[(Context, 2), (Pipeline, 2)])),
        (own, On { again: true, ..On::new(2, &[(Pipeline, 2)]) }),
        // With running statistics.
        (Job::ResNet9, On::new(2, &[(Across, 2)])),
        (Job::ResNet9, On::new(4, &[(Pipeline, 2), (Across, 2)])),
        (Job::Net, On { sharded, ..On::new(4, &[(Shard, 2), (Replica, 2)]) }),
    ];
    for (job, on) in all {
        check_evaluation(job, &on, DType::F32, TOLERANCE);
    }
    for on in [On::new(4, &[(Pipeline, 2), (Across, 2)]), On { sharded, ..On::new(4, &[(Across, 2)]) }] {
        check_evaluation(own, &on, DType::BF16, APART_BF16);
    }
}

/// Holds evaluations before and after a step, with products of this type, against those of the whole model on one device.
fn check_evaluation(job: Job, on: &On, products: DType, allowed: f64) {
    let found = on.each(job, |_, model, parameters, strategy| {
        let mut run = Run { job, model: &model, parameters, strategy };
        let first = autocast(products, || run.evaluate());
        autocast(products, || run.pass(0, 0, Sync::Now));
        run.strategy.finish(parameters).unwrap();
        let mut optimizer = Optimizer::new(Sgd::new(0.1)).unwrap();
        run.strategy.step(&mut optimizer, parameters, &Device::cpu(1), 1.0).unwrap();
        let second = autocast(products, || run.evaluate());
        let there = parameters.values().region().expect("an arena of its own").resident().unwrap();
        assert!(there <= 4096, "{}: {there} bytes of the whole model are here", on.what());
        run.strategy.gather().unwrap();
        let mut run = Run { job, model: &model, parameters, strategy: &mut SingleDevice::new() };
        (first, second, autocast(products, || run.evaluate()))
    });
    for (first, second, want) in &found {
        let apart = second.iter().zip(want).map(|(got, want)| (got - want).abs()).fold(0.0, f64::max);
        assert!(apart < allowed, "{}, {products}: {second:?}, not {want:?}", on.what());
        assert!(first != second && *first == found[0].0 && *second == found[0].1, "{}", on.what());
    }
}

/// Casts of the values that came together before are of no use to the next ones.
#[test]
fn a_pass_in_16_bits_has_the_values_that_came_together_for_it() {
    let job = Job::Gpt(Head::Own);
    On::new(2, &[(Across, 2)]).each(job, |_, model, parameters, strategy| {
        let device = Device::cpu(1);
        let (input, _) = job.samples(&device, &[1, 2]);
        let outputs = |model: &dyn Module| {
            let forward = || model.forward(&input, &mut Ctx::eval()).cast(DType::F32).to_vec::<f32>();
            autocast(DType::BF16, forward)
        };
        let rounds = [0..1, 1..2].map(|steps| {
            Run { job, model: &model, parameters, strategy: &mut *strategy }.train(steps, None);
            let mut fresh = job.model();
            let same = Parameters::build(&mut fresh, &device, 0);
            same.values().write_flat(&parameters.values().read_flat::<f32>());
            let got = outputs(&model);
            assert!(got == outputs(&fresh), "the weights of before");
            got
        });
        assert!(rounds[0] != rounds[1]);
    });
}

#[test]
fn parts_of_every_matrix_learn_what_the_whole_learns() {
    for head in [Head::Tied, Head::Own] {
        let job = Job::Gpt(head);
        let want = alone(job);
        for ranks in [2, 4] {
            for between in [Between::Whole, Between::Sequence] {
                for again in [false, true] {
                    let on = On { between, again, ..On::new(ranks, &[(Across, ranks)]) };
                    check(&on.train(job), &want, &on.what());
                }
            }
        }
    }
}

#[test]
fn products_of_two_axes_learn_what_one_device_learns() {
    let tied = Job::Gpt(Head::Tied);
    let want = alone(tied);
    for between in [Between::Whole, Between::Sequence] {
        let ddp = On { between, ..On::new(4, &[(Across, 2)]) };
        check(&ddp.train(tied), &want, &ddp.what());
        for sharded in [Sharded::States, Sharded::Gradients, Sharded::Parameters] {
            let fsdp = On { sharded: Some(sharded), ..ddp.clone() };
            check(&fsdp.train(tied), &want, &fsdp.what());
        }
    }
    let hybrid = On { sharded: Some(Sharded::Parameters), ..On::new(4, &[(Shard, 2), (Replica, 2)]) };
    check(&hybrid.train(tied), &want, &hybrid.what());

    let own = Job::Gpt(Head::Own);
    let want = alone(own);
    for kind in
        [ScheduleKind::GPipe, ScheduleKind::OneFOneB, ScheduleKind::ZeroBubble, ScheduleKind::Interleaved]
    {
        for mesh in [&[(Pipeline, 2)][..], &[(Pipeline, 2), (Across, 2)]] {
            let on = On { kind, ..On::new(4, mesh) };
            check(&on.train(own), &want, &on.what());
        }
    }
    let on = On { between: Between::Sequence, again: true, ..On::new(4, &[(Pipeline, 2), (Across, 2)]) };
    check(&on.train(own), &want, &on.what());
    for sharded in [Sharded::States, Sharded::Gradients, Sharded::Parameters] {
        for kind in [ScheduleKind::OneFOneB, ScheduleKind::Interleaved] {
            let on = On { kind, sharded: Some(sharded), ..On::new(4, &[(Pipeline, 2)]) };
            check(&on.train(own), &want, &on.what());
        }
    }
}

/// MP-TIED: the first stage has the table of words, and the last one multiplies with it.
#[test]
fn what_stages_share_stays_the_same_bits_on_each_and_learns_what_it_learns_alone() {
    let job = Job::Gpt(Head::Tied);
    let want = alone(job);
    for mesh in [&[(Pipeline, 2)][..], &[(Pipeline, 4)], &[(Pipeline, 2), (Across, 2)]] {
        for kind in [ScheduleKind::OneFOneB, ScheduleKind::ZeroBubble] {
            let on = On { kind, ..On::new(4, mesh) };
            check(&on.train(job), &want, &on.what());
        }
    }
    // Each rank has other elements of the table, on each of the stages that have it.
    for sharded in [Sharded::States, Sharded::Gradients, Sharded::Parameters] {
        for mesh in [&[(Pipeline, 2)][..], &[(Pipeline, 2), (Context, 2)]] {
            let on = On { sharded: Some(sharded), ..On::new(4, mesh) };
            check(&on.train(job), &want, &on.what());
        }
        let on = On { sharded: Some(sharded), ..On::new(8, &[(Replica, 2), (Pipeline, 2), (Shard, 2)]) };
        check(&on.train(job), &want, &on.what());
    }
    let on = On::new(4, &[(Pipeline, 4)]);
    let tables = on.each(job, |_, model, whole, strategy| {
        Run { job, model: &model, parameters: whole, strategy }.train(0..STEPS, None);
        let own = strategy.own_parameters(whole);
        own.index_of("wte.weight").map(|i| own.value(i).to_vec::<f32>())
    });
    assert!(tables[0].is_some() && tables[0] == tables[3], "the first stage and the last");
    assert!(tables[1].is_none() && tables[2].is_none());
}

/// Dropout, of stretches as well as of shares, is that of whole sequences, which the losses show.
#[test]
fn stretches_of_sequences_learn_what_whole_ones_teach() {
    let (tied, own) = (Job::Gpt(Head::Tied), Job::Gpt(Head::Own));
    let want = alone(tied);
    let sharded = Some(Sharded::Parameters);
    for again in [false, true] {
        for ranks in [2, 4, 8] {
            let on = On { again, ..On::new(ranks, &[(Context, ranks)]) };
            check(&on.train(tied), &want, &on.what());
        }
    }
    for on in [
        On::new(4, &[(Context, 2)]),
        On::new(4, &[(Context, 2), (Across, 2)]),
        On { between: Between::Sequence, ..On::new(4, &[(Context, 2), (Across, 2)]) },
        On::new(4, &[(Context, 2), (Pipeline, 2)]),
        On { between: Between::Sequence, ..On::new(8, &[(Context, 2), (Pipeline, 2), (Across, 2)]) },
        // Both axes share the model out.
        On { sharded, ..On::new(2, &[(Context, 2)]) },
        On { sharded: Some(Sharded::States), ..On::new(4, &[(Context, 2)]) },
        On { sharded, ..On::new(8, &[(Replica, 2), (Shard, 2), (Context, 2)]) },
        On { sharded, between: Between::Sequence, ..On::new(8, &[(Context, 2), (Across, 2)]) },
    ] {
        check(&on.train(tied), &want, &on.what());
    }
    let want = alone(own);
    for kind in [ScheduleKind::OneFOneB, ScheduleKind::ZeroBubble, ScheduleKind::Interleaved] {
        let on = On { kind, sharded, ..On::new(8, &[(Context, 2), (Pipeline, 2)]) };
        check(&on.train(own), &want, &on.what());
    }
}

/// What is between layers is a stretch, so activations are; keys and values are whole.
#[test]
fn a_rank_with_a_stretch_keeps_less_than_one_with_whole_sequences() {
    let held = |ranks: usize| {
        let on = On { ranks, mesh: vec![(Context, ranks)], ..On::new(ranks, &[]) };
        let peaks = on.each(Job::Gpt(Head::Tied), |_, _, whole, strategy| {
            let device = whole.values().device().clone();
            let text = Tensor::from_slice(&device, &[1i64; 64 * 8], [64, 8]);
            let before = device.live_bytes();
            device.take_most_live_bytes();
            let pass = Pass {
                model: &Linear::new(1, 1),
                parameters: whole,
                loss: Job::Gpt(Head::Tied).loss(),
                input: text.clone(),
                target: text,
                ctx: Ctx::train(3, 0, Arc::from((0..64).collect::<Vec<u64>>())),
                weight: 1.0,
                sync: Sync::Now,
            };
            strategy.pass(&pass).unwrap();
            device.take_most_live_bytes() - before
        });
        peaks.into_iter().max().unwrap()
    };
    let (whole, part) = (held(1), held(4));
    assert!(part * 2 < whole, "{part} of {whole} bytes");
}

#[test]
fn products_of_three_axes_learn_what_one_device_learns() {
    let own = Job::Gpt(Head::Own);
    let want = alone(own);
    for between in [Between::Whole, Between::Sequence] {
        let on = On { between, ..On::new(8, &[(Pipeline, 2), (Across, 2)]) };
        check(&on.train(own), &want, &on.what());
    }
    let tied = Job::Gpt(Head::Tied);
    let sharded = Some(Sharded::Parameters);
    let on =
        On { sharded, between: Between::Sequence, ..On::new(8, &[(Replica, 2), (Shard, 2), (Across, 2)]) };
    check(&on.train(tied), &alone(tied), &on.what());
    for mesh in [[(Pipeline, 2), (Shard, 2), (Across, 2)], [(Replica, 2), (Pipeline, 2), (Shard, 2)]] {
        let on = On { sharded, ..On::new(8, &mesh) };
        check(&on.train(own), &want, &on.what());
    }
    for mesh in [[(Replica, 2), (Context, 2), (Across, 2)], [(Replica, 2), (Pipeline, 2), (Context, 2)]] {
        let on = On::new(8, &mesh);
        check(&on.train(own), &want, &on.what());
    }
    for kind in [ScheduleKind::Interleaved, ScheduleKind::ZeroBubble] {
        let on = On { kind, ..On::new(8, &[(Replica, 2), (Pipeline, 2), (Across, 2)]) };
        check(&on.train(own), &want, &on.what());
    }
}

#[test]
fn products_of_four_and_of_all_axes_learn_what_one_device_learns() {
    let own = Job::Gpt(Head::Own);
    let want = alone(own);
    let all = [(Replica, 2), (Shard, 2), (Pipeline, 2), (Context, 2), (Across, 2)];
    for mesh in [&all[1..], &all] {
        let on = On { sharded: Some(Sharded::Parameters), ..On::new(1 << mesh.len(), mesh) };
        check(&on.train(own), &want, &on.what());
    }
}

#[test]
fn a_model_of_ones_own_is_cut_by_a_plan_of_ones_own() {
    let want = alone(Job::Net);
    for mesh in [&[(Across, 2)][..], &[(Across, 4)]] {
        for sharded in [None, Some(Sharded::Parameters)] {
            let on = On { sharded, ..On::new(4, mesh) };
            check(&on.train(Job::Net), &want, &on.what());
        }
    }
}

#[test]
fn images_go_through_pipelines_of_replicas() {
    let want = alone(Job::Mnist);
    let on = On::new(4, &[(Pipeline, 2)]);
    check(&on.train(Job::Mnist), &want, &on.what());
    let on = On { again: true, ..On::new(4, &[(Pipeline, 4)]) };
    check(&on.train(Job::Mnist), &want, &on.what());
    let on = On { sharded: Some(Sharded::Parameters), ..On::new(4, &[(Pipeline, 2)]) };
    check(&on.train(Job::Mnist), &want, &on.what());
    for kind in [ScheduleKind::GPipe, ScheduleKind::Interleaved, ScheduleKind::ZeroBubble] {
        let on = On { kind, ..On::new(2, &[(Pipeline, 2)]) };
        check(&on.train(Job::Mnist), &want, &on.what());
    }
}

#[test]
fn images_teach_a_network_that_is_shared_out_what_they_teach_a_whole_one() {
    let want = alone(Job::Mnist);
    for sharded in [Sharded::States, Sharded::Gradients, Sharded::Parameters] {
        for on in [On::new(2, &[]), On::new(4, &[(Replica, 2), (Shard, 2)])] {
            let on = On { sharded: Some(sharded), ..on };
            check(&on.train(Job::Mnist), &want, &on.what());
        }
    }
}

/// Dropout lies between the two layers that are cut.
#[test]
fn dense_layers_behind_convolutions_are_cut_with_the_dropout_between_them() {
    let want = alone(Job::Mnist);
    let sharded = Some(Sharded::Parameters);
    for on in [
        On::new(2, &[(Across, 2)]),
        On { sharded, ..On::new(4, &[(Across, 2)]) },
        On::new(4, &[(Pipeline, 2), (Across, 2)]),
        On::new(8, &[(Replica, 2), (Pipeline, 2), (Across, 2)]),
        On { sharded, ..On::new(8, &[(Pipeline, 2), (Across, 2)]) },
    ] {
        check(&on.train(Job::Mnist), &want, &on.what());
    }
}

/// What roundings come to in a residual network, whose ReLUs have a kink and whose last batch norms go by four numbers of an image: of
/// the losses of all steps, of the momenta that the first leaves, and of the norm of its gradients as a share of it. From first values
/// of which some are off by their last bits, losses come out 1e-6 apart as a rule, and 1e-3 where a kink lies between.
const APART_RESNET: f64 = 5e-3;

/// Losses of all steps and the gradients of the first.
fn check_resnet(outcomes: &[[Outcome; 2]], [want, want_all]: &[Outcome; 2], what: &str) {
    for [got, got_all] in outcomes {
        let of =
            |got: &[f64], want: &[f64]| got.iter().zip(want).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        assert!(got.values == outcomes[0][0].values && got_all.values == outcomes[0][1].values, "{what}");
        let (losses, want_losses) = (&got_all.losses, &want_all.losses);
        assert!(of(losses, want_losses) < APART_RESNET, "{what}: losses {losses:?}, not {want_losses:?}");
        assert!(of(&got.losses, &want.losses) < TOLERANCE, "{what}: {:?}, not {:?}", got.losses, want.losses);
        let (norms, want_norms) = (&got.norms, &want.norms);
        let share = of(norms, want_norms) / want_norms[0];
        assert!(share < APART_RESNET, "{what}: norms {norms:?}, not {want_norms:?}");
        check_close(what, "values after a step", &got.values, &want.values);
        let close = |(got, want): (&f32, &f32)| {
            f64::from((got - want).abs()) < APART_RESNET * f64::from(1.0 + want.abs())
        };
        assert!(got_all.buffers.iter().zip(&want_all.buffers).all(close), "{what}: running statistics");
        assert!(got_all.buffers.iter().any(|x| *x != 0.0 && *x != 1.0), "{what}: they have moved");
    }
    let momenta =
        outcomes[0][0].state.iter().zip(&want.state).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    let same = outcomes[0][0].state.len() == want.state.len();
    assert!(same && f64::from(momenta) < APART_RESNET, "{what}: momenta after a step are {momenta} apart");
}

impl On {
    fn train_resnet(&self) -> Vec<[Outcome; 2]> {
        self.each(Job::ResNet, |_, model, parameters, strategy| {
            Run { job: Job::ResNet, model: &model, parameters, strategy }.train_and_look_behind_a_step()
        })
    }
}

/// Batch norms lie between the two convolutions of a block: each rank has some of their channels.
#[test]
fn convolutions_are_cut_with_the_batch_norm_between_them() {
    let want = run_alone(Job::ResNet, |run| run.train_and_look_behind_a_step());
    for on in [On::new(2, &[(Across, 2)]), On { again: true, ..On::new(4, &[(Across, 4)]) }] {
        check_resnet(&on.train_resnet(), &want, &on.what());
    }
    let staged = On::new(4, &[(Pipeline, 2), (Across, 2)]);
    let want = On::new(2, &[(Pipeline, 2)]).train_resnet();
    check_resnet(&staged.train_resnet(), &want[0], &staged.what());
    // Each replica has other samples, and its batch norms see these.
    let want = On::new(2, &[(Replica, 2)]).train_resnet();
    for sharded in [None, Some(Sharded::Parameters)] {
        let on = On { sharded, ..On::new(4, &[(Across, 2)]) };
        check_resnet(&on.train_resnet(), &want[0], &on.what());
    }
}

/// As many replicas of as many stages have batch norms that see the same samples.
#[test]
fn residual_networks_are_shared_out_and_lie_along_three_axes() {
    let want = On::new(2, &[(Replica, 2)]).train_resnet();
    for sharded in [Sharded::States, Sharded::Gradients, Sharded::Parameters] {
        let on = On { sharded: Some(sharded), ..On::new(2, &[]) };
        check_resnet(&on.train_resnet(), &want[0], &on.what());
    }
    let want = On::new(4, &[(Replica, 2), (Pipeline, 2)]).train_resnet();
    let sharded = Some(Sharded::Parameters);
    for on in [
        On { sharded, ..On::new(4, &[(Shard, 2), (Pipeline, 2)]) },
        On::new(8, &[(Replica, 2), (Pipeline, 2), (Across, 2)]),
        On { sharded, ..On::new(8, &[(Shard, 2), (Pipeline, 2), (Across, 2)]) },
    ] {
        check_resnet(&on.train_resnet(), &want[0], &on.what());
    }
}

#[test]
fn pairs_of_convolutions_and_of_dense_layers_are_cut_all_along_a_model() {
    let want = alone(Job::Autoencoder);
    for on in [On::new(4, &[(Across, 2)]), On::new(4, &[(Pipeline, 2), (Across, 2)])] {
        check(&on.train(Job::Autoencoder), &want, &on.what());
    }
    let want = run_alone(Job::ResNet9, |run| run.train(0..1, None));
    let got = On::new(2, &[(Across, 2)]).each(Job::ResNet9, |_, model, parameters, strategy| {
        Run { job: Job::ResNet9, model: &model, parameters, strategy }.train(0..1, None)
    });
    for got in got {
        let apart = (got.losses[0] - want.losses[0]).abs();
        assert!(apart < TOLERANCE, "{apart} apart");
        check_close("resnet9", "values after a step", &got.values, &want.values);
    }
}

/// Batch norms see micro-batches, so a pipeline is held against another cut of itself; and every rank has all buffers in the end.
#[test]
fn batch_norms_on_any_stage_come_to_the_same_buffers() {
    let [two, three] = [2, 3].map(|n| On::new(n, &[(Pipeline, n)]).train(Job::ResNet));
    for got in two.iter().chain(&three) {
        assert_eq!(got.buffers, two[0].buffers);
        assert!(got.buffers.iter().any(|x| *x != 0.0 && *x != 1.0), "running statistics have moved");
        assert_eq!(got.losses, two[0].losses);
    }
}

/// What is taken apart and brought together has the same bits, whatever the mesh.
#[test]
fn values_and_states_go_to_any_mesh_and_back_bit_for_bit() {
    let sharded = Some(Sharded::Parameters);
    let (tied, own) = (Job::Gpt(Head::Tied), Job::Gpt(Head::Own));
    let all = [
        (tied, On::new(2, &[(Across, 2)])),
        (tied, On { sharded, ..On::new(4, &[(Across, 2)]) }),
        (own, On::new(4, &[(Pipeline, 4)])),
        (own, On::new(8, &[(Pipeline, 2), (Across, 2)])),
        (own, On { sharded, ..On::new(4, &[(Pipeline, 2)]) }),
        (tied, On::new(4, &[(Pipeline, 2), (Across, 2)])),
        (tied, On::new(4, &[(Context, 2), (Across, 2)])),
        (tied, On { sharded, ..On::new(4, &[(Context, 2), (Shard, 2)]) }),
        (tied, On { sharded, ..On::new(8, &[(Replica, 2), (Shard, 2), (Across, 2)]) }),
        (own, On { sharded, ..On::new(8, &[(Pipeline, 2), (Shard, 2), (Across, 2)]) }),
        (own, On { sharded, kind: ScheduleKind::Interleaved, ..On::new(8, &[(Pipeline, 2), (Context, 2)]) }),
        (Job::Mnist, On::new(2, &[(Across, 2)])),
        (Job::Mnist, On::new(4, &[(Pipeline, 4)])),
        (Job::Mnist, On { sharded, ..On::new(8, &[(Pipeline, 2), (Across, 2)]) }),
        // Whose kernels lie tap by tap.
        (Job::ResNet, On::new(2, &[(Across, 2)])),
        (Job::ResNet, On::new(4, &[(Pipeline, 2), (Across, 2)])),
    ];
    for (job, on) in all {
        let backs = on.each(job, |_, model, whole, strategy| {
            let before = whole.values().read_flat::<f32>();
            let state = padded_randomly(whole);
            let optimizer = part_of_optimizer(strategy, whole, 1, &state);
            let held = optimizer.state().next().map(|(_, state)| state.with(<[f32]>::len));
            assert_eq!(held, Some(strategy.portion(whole).count()), "{}: a part of the state", on.what());
            Run { job, model: &model, parameters: whole, strategy }.pass(0, 0, Sync::Now);
            strategy.finish(whole).unwrap();
            // In between they are away, and whoever uses them finds out.
            assert!(catch_unwind(AssertUnwindSafe(|| whole.value(0).to_vec::<f32>())).is_err());
            strategy.gather().unwrap();
            let states = strategy.whole_state(&optimizer).unwrap().unwrap();
            (whole.values().read_flat::<f32>() == before, states, state)
        });
        assert!(backs.iter().all(|(same, ..)| *same), "{}: values", on.what());
        assert!(backs[0].1 == [backs[0].2.clone()], "{}: states", on.what());
    }
}

/// Each rank has the mean of its part, of which the whole one comes again, and which the whole model has meanwhile.
#[test]
fn the_mean_of_the_parts_is_that_of_the_whole() {
    let own = Job::Gpt(Head::Own);
    let sharded = Some(Sharded::Parameters);
    let all = [
        (Job::Gpt(Head::Tied), On::new(4, &[(Across, 2)])),
        (own, On { sharded, ..On::new(4, &[(Across, 2)]) }),
        (own, On { sharded, ..On::new(4, &[(Pipeline, 2)]) }),
        (Job::Gpt(Head::Tied), On::new(4, &[(Pipeline, 2), (Across, 2)])),
        // Which has buffers.
        (Job::ResNet, On::new(2, &[(Across, 2)])),
    ];
    for (job, on) in all {
        let backs = on.each(job, |_, model, whole, strategy| {
            let arrays = || [whole.values(), whole.buffers()].map(|arena| arena.read_flat::<f32>());
            let before = arrays();
            let mut mean = strategy.mean(whole);
            Run { job, model: &model, parameters: whole, strategy }.pass(0, 0, Sync::Now);
            strategy.finish(whole).unwrap();
            let mut optimizer = Optimizer::new(Sgd::new(0.1)).unwrap();
            strategy.step(&mut optimizer, whole, whole.values().device(), 1.0).unwrap();
            strategy.follow(whole, &mut mean, 0.5);
            strategy.gather().unwrap();
            let after = arrays();
            strategy.exchange(whole, &mut mean).unwrap();
            strategy.gather().unwrap();
            let exchanged = arrays();
            strategy.exchange(whole, &mut mean).unwrap();
            strategy.gather().unwrap();
            assert!(arrays() == after, "{}", on.what());
            let brought = strategy.whole_mean(&mean).unwrap();
            let brought =
                brought.map(|it| [it.values(), it.buffers()].map(|shadow| shadow.with(<[f32]>::to_vec)));
            let mean = |i: usize| -> Vec<f32> {
                before[i].iter().zip(&after[i]).map(|(then, now)| then + 0.5 * (now - then)).collect()
            };
            assert!(exchanged == [mean(0), mean(1)], "{}", on.what());
            (brought, exchanged)
        });
        let (brought, exchanged) = &backs[0];
        assert!(brought.as_ref() == Some(exchanged), "{}", on.what());
    }
}

/// Each rank has what it asks for of all parts, in whichever order ranks ask.
#[test]
fn ranks_bring_whole_parameters_together_from_the_parts_of_others() {
    let own = Job::Gpt(Head::Own);
    let sharded = Some(Sharded::Parameters);
    let all = [
        (Job::Gpt(Head::Tied), On::new(4, &[(Across, 2)])),
        (own, On { sharded, ..On::new(4, &[(Across, 2)]) }),
        (own, On { sharded: Some(Sharded::States), ..On::new(4, &[(Pipeline, 2)]) }),
        (own, On { kind: ScheduleKind::Interleaved, ..On::new(2, &[(Pipeline, 2)]) }),
        (Job::Gpt(Head::Tied), On::new(8, &[(Pipeline, 2), (Across, 2)])),
        (Job::Gpt(Head::Tied), On::new(4, &[(Context, 2), (Across, 2)])),
        (own, On { sharded, ..On::new(4, &[(Context, 2)]) }),
        (Job::ResNet, On::new(2, &[(Across, 2)])),
    ];
    for (job, on) in all {
        let numbers = on.each(job, |_, model, whole, strategy| {
            let state = padded_randomly(whole);
            let optimizer = part_of_optimizer(strategy, whole, 1, &state);
            Run { job, model: &model, parameters: whole, strategy }.pass(0, 0, Sync::Now);
            strategy.finish(whole).unwrap();
            let place = strategy.writes().unwrap();
            assert_eq!(place.world_size, on.ranks);
            let count = whole.layout().count();
            // Shares of about the same size, others than these, and nothing for some.
            let fair = |rank: usize| rank * count / on.ranks..(rank + 1) * count / on.ranks;
            let backwards = fair(on.ranks - 1 - place.rank);
            let first = if place.rank == 0 { 0..count } else { 0..0 };
            let states: Vec<_> = optimizer.state().map(|(_, state)| state.clone()).collect();
            let states: Vec<_> = states.iter().collect();
            let asked = [fair(place.rank), backwards, first];
            let parts = asked.map(|asked| {
                let part = strategy.collect(whole, &states, asked.clone()).unwrap().unwrap();
                (whole.layout().span(asked), part)
            });
            let buffers = strategy.own_parameters(whole).buffers().read_flat::<f32>();
            let buffers = strategy.whole_buffers(&buffers).unwrap();
            strategy.gather().unwrap();
            assert!(buffers == whole.buffers().read_flat::<f32>(), "{}: buffers", on.what());
            let values = whole.values().read_flat::<f32>();
            for (span, part) in parts {
                assert!(part.values == values[span.clone()], "{}: values of {span:?}", on.what());
                assert!(part.beside == [state[span.clone()].to_vec()], "{}: state of {span:?}", on.what());
            }
            place.rank
        });
        let mut numbers = numbers;
        assert_eq!(numbers[0], 0, "who leads writes the first share");
        numbers.sort_unstable();
        assert!(numbers.into_iter().eq(0..on.ranks), "{}: each share is somebody's", on.what());
    }
}

/// Without the whole model anywhere.
#[test]
fn first_values_and_files_come_to_each_rank_in_parts() {
    let own = Job::Gpt(Head::Own);
    let sharded = Some(Sharded::Parameters);
    let all = [
        (Job::Gpt(Head::Tied), On::new(4, &[(Pipeline, 2), (Across, 2)])),
        (own, On { sharded, ..On::new(4, &[(Across, 2)]) }),
        (own, On { sharded, ..On::new(4, &[(Pipeline, 2)]) }),
        (own, On { sharded, ..On::new(4, &[(Context, 2)]) }),
        (Job::ResNet, On::new(2, &[(Across, 2)])),
    ];
    for (job, on) in all {
        let mut model = job.model();
        let plain = Parameters::build(&mut model, &Device::cpu(1), 7);
        let first = [plain.values(), plain.buffers()].map(|arena| arena.read_flat::<f32>());
        let names = || plain.names().iter().chain(plain.buffer_names());
        let numbers = |name: &str| -> Vec<f32> {
            let weights = plain.to_weights();
            (0..weights.get(name).unwrap().1.len()).map(|i| (i + name.len()) as f32).collect()
        };
        names().for_each(|name| plain.load_one(name, &numbers(name)));
        let read = [plain.values(), plain.buffers()].map(|arena| arena.read_flat::<f32>());
        let rank = |group: Group| {
            let mut model = job.model();
            let whole = Parameters::lay_out(&mut model, &Device::cpu(1), 7);
            let mut strategy = ModelParallel::new(&group, &whole, &on.config(job)).unwrap();
            let arrays = || [whole.values(), whole.buffers()].map(|arena| arena.read_flat::<f32>());
            let in_memory = || whole.values().region().expect("an arena of its own").resident().unwrap();
            strategy.prepare(&whole).unwrap();
            assert_eq!(in_memory(), 0, "{}: first values", on.what());
            strategy.gather().unwrap();
            assert!(arrays() == first, "{}: first values", on.what());
            strategy.begin(&whole, Here::All).unwrap();
            names().for_each(|name| strategy.load_one(&whole, name, &numbers(name)));
            // What doesn't fill a page stays of what was brought together.
            assert!(in_memory() <= 4096, "{}: a file", on.what());
            strategy.gather().unwrap();
            assert!(arrays() == read, "{}: a file", on.what());
        };
        std::thread::scope(|scope| {
            Group::threads(on.ranks).into_iter().for_each(|group| {
                scope.spawn(|| rank(group));
            });
        });
    }
}

/// A rank that owes others the first step makes it once they have parted, and its running mean begins with what it has then.
#[test]
fn a_mean_that_begins_behind_the_end_of_a_membership_is_that_of_what_was_kept() {
    let job = Job::Gpt(Head::Own);
    let sharded = Some(Sharded::Parameters);
    for on in [On::new(2, &[(Across, 2)]), On { sharded, ..On::new(4, &[(Across, 2)]) }] {
        on.each(job, |_, model, whole, strategy| {
            let mut optimizer = Optimizer::new(Sgd::new(0.1)).unwrap();
            Run { job, model: &model, parameters: whole, strategy }.pass(0, 0, Sync::Now);
            strategy.finish(whole).unwrap();
            strategy.part(whole, None);
            strategy.step(&mut optimizer, whole, &Device::cpu(1), 1.0).unwrap();
            strategy.part(whole, None);
            let mean = strategy.mean(whole).values().with(<[f32]>::to_vec);
            let held: Vec<f32> = strategy
                .portion(whole)
                .elements
                .into_iter()
                .flat_map(|elements| {
                    let mut held = vec![0.0; elements.len()];
                    strategy.read_held(whole, elements, &mut held);
                    held
                })
                .collect();
            assert!(mean == held && held.iter().any(|value| *value != 0.0), "{}", on.what());
        });
    }
}

/// The optimizer of a rank that goes on after so many steps from the momentum of the whole model, an array of which comes at a time, as from
/// a file.
fn part_of_optimizer(strategy: &dyn Strategy, whole: &Parameters, steps: u64, momentum: &[f32]) -> Optimizer {
    let own = strategy.own_parameters(whole);
    let mut resuming = Resuming::new(RULE, whole, own, strategy.held()).unwrap();
    let mut take = |name: &str, shape: &Shape, values: &[f32]| {
        resuming.take(name, shape, values, |name, values| strategy.part_of(whole, name, values));
    };
    take("step", &Shape::new(&[]), &[steps as f32]);
    let layout = whole.layout();
    for (i, name) in whole.names().iter().enumerate() {
        take(&format!("{name}.momentum_buffer"), layout.shape(i), &layout.row_major(i, momentum));
    }
    resuming.finish().unwrap()
}

/// An array as an optimizer has it, of other numbers everywhere but in the padding.
fn padded_randomly(whole: &Parameters) -> Vec<f32> {
    let (layout, random) = (whole.layout(), Philox::new(5, 5));
    let mut array = vec![0.0; layout.len()];
    for i in 0..layout.count() {
        array[layout.range(i)]
            .iter_mut()
            .zip(layout.range(i))
            .for_each(|(x, at)| *x = random.unit(at as u64));
    }
    array
}

#[test]
fn a_run_goes_on_with_another_mesh() {
    let job = Job::Gpt(Head::Own);
    let want = alone(job);
    let first = On::new(4, &[(Across, 2), (Pipeline, 2)]).each(job, |_, model, parameters, strategy| {
        Run { job, model: &model, parameters, strategy }.train(0..2, None)
    });
    let Outcome { values, state, .. } = &first[0];
    let sharded = Some(Sharded::Parameters);
    for on in [On { sharded, ..On::new(4, &[(Across, 2)]) }, On::new(2, &[(Pipeline, 2)])] {
        let second = on.each(job, |_, model, parameters, strategy| {
            parameters.values().write_flat(values);
            Run { job, model: &model, parameters, strategy }.train(2..STEPS, Some(state))
        });
        for got in &second {
            let close = got.losses.iter().zip(&want.losses[2..]).all(|(a, b)| (a - b).abs() < TOLERANCE);
            assert!(close, "{}: {:?}, not {:?}", on.what(), got.losses, want.losses);
            check_close(&on.what(), "values", &got.values, &want.values);
        }
    }
}

/// T-SAME: nobody brings them together again.
#[test]
fn what_is_not_cut_is_the_same_bits_on_all_ranks() {
    let job = Job::Gpt(Head::Tied);
    for between in [Between::Whole, Between::Sequence] {
        let on = On { between, ..On::new(4, &[(Across, 2)]) };
        let uncut = on.each(job, |_, model, whole, strategy| {
            Run { job, model: &model, parameters: whole, strategy }.train(0..STEPS, None);
            let own = strategy.own_parameters(whole);
            let whole_shape = |name: &str| *whole.layout().shape(whole.index_of(name).unwrap());
            let is_uncut = |&i: &usize| *own.layout().shape(i) == whole_shape(&own.names()[i]);
            let values = |i: usize| (own.names()[i].clone(), own.value(i).to_vec::<f32>());
            (0..own.names().len()).filter(is_uncut).map(values).collect::<Vec<_>>()
        });
        assert_eq!(uncut[0].len(), 1 + 2 * 6 + 2, "positions, norms and biases");
        assert!(uncut.iter().all(|values| *values == uncut[0]), "{}", on.what());
    }
}

#[test]
fn a_rank_holds_its_part_and_no_more() {
    let wide = |head| GptConfig { layers: 4, width: 128, head, ..GPT };
    let resident = On::new(4, &[(Across, 2), (Pipeline, 2)]);
    let job = Job::Gpt(Head::Own);
    let config = resident.config(job);
    let model = move || -> Box<dyn Module> { Box::new(Gpt::new(wide(Head::Own))) };
    let blocks = vec![0..3, 3..6];
    let stages = config.stages.clone().map(|stages| StagesConfig { blocks, ..stages });
    let config = ModelParallelConfig { model: Arc::new(model), stages, ..config };
    std::thread::scope(|scope| {
        for group in Group::threads(4) {
            let config = &config;
            scope.spawn(move || {
                let mut whole_model = model();
                let whole = Parameters::build(&mut whole_model, &Device::cpu(1), 7);
                let mut strategy = ModelParallel::new(&group, &whole, config).unwrap();
                strategy.prepare(&whole).unwrap();
                let own = strategy.own_parameters(&whole).count();
                Run { job, model: &whole_model, parameters: &whole, strategy: &mut strategy }.pass(
                    0,
                    0,
                    Sync::Now,
                );
                strategy.finish(&whole).unwrap();
                // Half of the blocks, half of each matrix; norms, biases and positions are whole.
                assert!(own * 10 < whole.count() * 3, "{own} of {}", whole.count());
                let there = whole.values().region().expect("an arena of its own").resident().unwrap();
                assert!(there < 2 * 4096, "{there} bytes of the whole model's values are here");
            });
        }
    });
}

#[test]
fn what_cannot_be_is_refused_with_the_nearest_that_can() {
    let refused_with = |job: Job, on: &On, plan: Option<&Plan>| {
        let mut model = job.model();
        let whole = Parameters::build(&mut model, &Device::cpu(1), 0);
        let mut errors = Vec::new();
        std::thread::scope(|scope| {
            let groups = Group::threads(on.ranks).into_iter();
            let threads: Vec<_> = groups
                .map(|group| {
                    let whole = &whole;
                    scope.spawn(move || {
                        let config = ModelParallelConfig { plan: plan.cloned(), ..on.config(job) };
                        ModelParallel::new(&group, whole, &config).err().unwrap().to_string()
                    })
                })
                .collect();
            errors.extend(threads.into_iter().map(|thread| thread.join().unwrap()));
        });
        assert!(errors.iter().all(|error| *error == errors[0]), "{errors:?}");
        errors.remove(0)
    };
    let refused = |job: Job, on: &On| refused_with(job, on, job.plan(on.between).as_ref());
    let tied = Job::Gpt(Head::Tied);
    assert_eq!(
        refused(tied, &On::new(4, &[(Across, 3)])),
        "parallel.tensor: 3, where there are 4 heads\nhint: the nearest that works for 4 ranks is tensor=4"
    );
    assert_eq!(
        refused(tied, &On::new(3, &[(Across, 2)])),
        "parallel.tensor=2 are 2 ranks, and 3 are there, which is no multiple\nhint: the nearest that works for 3 ranks is replica=3, or take 2 or 4 ranks"
    );
    let said = refused_with(Job::ResNet, &On::new(2, &[(Across, 2)]), None);
    assert!(said.starts_with("the mesh has an axis tensor, and nothing says how the model is cut"), "{said}");
    let said = refused_with(tied, &On::new(2, &[(Context, 2)]), None);
    assert!(
        said.starts_with("the mesh has an axis context, and nothing says how the model is cut"),
        "{said}"
    );
    // Stages with gaps and overlaps, and one that nobody has.
    let whole = Parameters::build(&mut Job::Gpt(Head::Tied).model(), &Device::cpu(1), 0);
    let staged = |blocks: &[std::ops::Range<usize>]| {
        let blocks = blocks.to_vec();
        let stages = StagesConfig { blocks, kind: ScheduleKind::GPipe, micro_batches: 2 };
        let config =
            ModelParallelConfig { stages: Some(stages), ..On::new(2, &[(Pipeline, 2)]).config(tied) };
        let new = |group: Group| ModelParallel::new(&group, &whole, &config).err().unwrap().to_string();
        let said: Vec<String> = std::thread::scope(|scope| {
            let threads = Group::threads(2).into_iter().map(|group| scope.spawn(|| new(group)));
            let threads: Vec<_> = threads.collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert_eq!(said[0], said[1]);
        said[0].clone()
    };
    for blocks in [&[0..2, 3..4], &[0..3, 2..4], &[1..2, 2..4]] {
        let said = staged(blocks);
        assert!(said.contains("are placed, and the model has the blocks 0..4"), "{said}");
    }
    let said = staged(&[0..1, 1..2, 2..4]);
    assert!(said.starts_with("3 stages for a pipeline of 2 ranks\nhint: "), "{said}");
    let said = refused(Job::Mnist, &On::new(2, &[(Context, 2)]));
    assert!(said.starts_with("the plan has no sequences that could be cut\nhint: "), "{said}");
}
