//! Hosts that go on while their GPUs wait for other ranks' GPUs, and find out when these don't come.

use crate::fake::fake;
use crate::mesh::{PIPELINE, TENSOR, on};
use crate::{Count, FakeCuda, RULE, gpu_of, run_of};
use phalanx::comm::Group;
use phalanx::data::{Places, Silent, View, open};
use phalanx::nn::optim::Clip;
use phalanx::nn::{Ctx, Flatten, Linear, Loss, Module, Parameters, Sequential, Visitor};
use phalanx::parallel::pipeline::ScheduleKind;
use phalanx::parallel::{
    Axis, Between, BetweenGpus, Here, ModelParallel, ModelParallelConfig, Pass, Plan, StagesConfig, Strategy,
    Style,
};
use phalanx::tensor::{DType, Device, Tensor};
use phalanx::{Event, Observer, Trainer, Worker};
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, mpsc};
use std::time::Duration;

/// Two of them, each a rank's, by the letters that the ranks have between them or by the parts of its layers.
fn mesh(
    axis: (Axis, usize),
    layers: Range<usize>,
    stages: Vec<Range<usize>>,
    model: impl Fn() -> Sequential + Send + Sync + 'static,
) -> ModelParallelConfig {
    let style = |layer: usize| match layer.is_multiple_of(2) {
        true => Style::Outputs { dim: 0, groups: 1 },
        false => Style::Inputs { dim: 1 },
    };
    let start = layers.start;
    let plan = layers
        .fold(Plan::new(Between::Whole), |plan, layer| plan.with(&layer.to_string(), style(layer - start)));
    let stages = StagesConfig { blocks: stages, kind: ScheduleKind::OneFOneB, micro_batches: 2 };
    let mut mesh = ModelParallelConfig {
        model: Arc::new(move || Box::new(model()) as Box<dyn Module>),
        plan: (axis == TENSOR).then_some(plan),
        stages: (axis == PIPELINE).then_some(stages),
        ..on(&[axis], ScheduleKind::OneFOneB).mesh.unwrap()
    };
    mesh.ddp.between_gpus = BetweenGpus::Nccl;
    mesh
}

/// A place in a model, by which the ranks of other GPUs are kept until the host of one has come to the next such place.
struct Turnstile {
    /// The last step in which that one has.
    passed: Arc<(Mutex<Option<u64>>, Condvar)>,
    /// Which GPU is the one's.
    gpu: u32,
    /// From which step on others are kept here; none where that one passes.
    keeps_from: Option<u64>,
}

impl Module for Turnstile {
    fn forward(&self, x: &Tensor, ctx: &mut Ctx) -> Tensor {
        let ((passed, changed), step) = (&*self.passed, ctx.step());
        let is_one = x.device().gpu().unwrap().index() == self.gpu;
        let mut passed = passed.lock().unwrap();
        match self.keeps_from {
            None if is_one => {
                *passed = Some(step);
                changed.notify_all();
            }
            Some(from) if !is_one && step >= from => {
                let limit = Duration::from_secs(60);
                let wait = changed.wait_timeout_while(passed, limit, |passed| *passed < Some(step)).unwrap();
                assert!(!wait.1.timed_out(), "in step {step} the other host waits for this one's GPU");
            }
            _ => {}
        }
        x.clone()
    }

    fn visit(&mut self, _: &mut Visitor<'_>) {}
}

/// What parts add up to, and letters, are waited for by the GPUs that compute with them: the host gives them the next work meanwhile.
#[test]
fn a_host_goes_on_while_its_gpu_waits_for_other_ranks() {
    let Some(fake) = fake() else { return };
    fake.gpus(2);
    // The second rank begins its pass when the host of the first is through with its forward part; the first stage when that of the second
    // is, but for the first step, in which stages tell each other what they send.
    for (axis, gpu, from) in [(TENSOR, 0, 0), (PIPELINE, 1, 1)] {
        let passed = Arc::new((Mutex::new(None), Condvar::new()));
        let net = move || {
            let turnstile = |keeps_from| Turnstile { passed: passed.clone(), gpu, keeps_from };
            let widths = [(784, 16), (16, 16), (16, 16), (16, 10)];
            let net = Sequential::new().then(Flatten).then(turnstile(Some(from)));
            let net = widths.into_iter().fold(net, |net, (from, to)| net.then(Linear::new(from, to)));
            net.then(turnstile(None))
        };
        let mesh = mesh(axis, 2..6, vec![0..4, 4..7], net.clone());
        let trainer = Trainer {
            clip: Clip::default(),
            ddp: mesh.ddp.clone(),
            mesh: Some(mesh),
            ..on(&[axis], ScheduleKind::OneFOneB)
        };
        let (told, _) = run_of(&net, &trainer, 2, &|rank| gpu_of(&fake, rank));
        assert_eq!(told.losses.len(), 3);
    }
    assert_eq!(fake.damage(), [""; 0]);
}

/// Calls of a GPU's driver and bytes, as they are after each step.
struct Counting<'a>(&'a FakeCuda, Vec<[u64; 5]>);

impl Counting<'_> {
    const WAITS: [&'static str; 3] = ["cuCtxSynchronize", "cuStreamSynchronize", "cuEventSynchronize"];
}

impl Observer for Counting<'_> {
    fn event(&mut self, event: &Event) {
        if let Event::Step { .. } = event {
            let [a, b, c] = Counting::WAITS.map(|call| self.0.calls(call));
            self.1.push([a, b, c, self.0.count(Count::BytesUp), self.0.count(Count::BytesDown)]);
        }
    }
}

/// What is known of parts, labels too, stays on the GPUs.
#[test]
fn a_step_waits_for_its_loss_alone_however_many_blocks_it_has() {
    const STEPS: usize = 8;
    let Some(fake) = fake() else { return };
    fake.gpus(2);
    let counted = |blocks: usize| {
        let net = move || {
            let net = Sequential::new().then(Flatten).then(Linear::new(784, 16));
            let net = (0..blocks).fold(net, |net, _| net.then(Linear::new(16, 16)).then(Linear::new(16, 16)));
            net.then(Linear::new(16, 10).without_bias())
        };
        let mut mesh = mesh(TENSOR, 2..2 + 2 * blocks, Vec::new(), net);
        mesh.plan = mesh.plan.map(|plan| plan.with(&(2 + 2 * blocks).to_string(), Style::Scores));
        let trainer = Trainer {
            clip: Clip::default(),
            steps: Some(STEPS as u64),
            ddp: mesh.ddp.clone(),
            mesh: Some(mesh),
            ..on(&[TENSOR], ScheduleKind::GPipe)
        };
        let run = |group: Group| {
            let worker = Worker::with_device(group.clone(), gpu_of(&fake, group.rank().index()));
            let data = open("mnist-mini", View::default(), &Places::from_env(None), &mut Silent).unwrap();
            let mut counting = Counting(&fake, Vec::new());
            trainer.fit(&worker, &mut net(), RULE, data.train, None, &mut counting).unwrap();
            worker.is_first().then_some(counting.1)
        };
        let counts: Vec<_> = std::thread::scope(|scope| {
            let run = &run;
            let ranks: Vec<_> =
                Group::threads(2).into_iter().map(|group| scope.spawn(move || run(group))).collect();
            ranks.into_iter().filter_map(|rank| rank.join().unwrap()).collect()
        });
        std::array::from_fn::<u64, 5, _>(|i| counts[0][STEPS - 1][i] - counts[0][STEPS - 5][i])
    };
    let (few, many) = (counted(1), counted(6));
    // Two ranks and four steps, of which one of the ranks may count one more or less.
    let [waits_of_few, waits] = [few, many].map(|[a, b, c, ..]| a + b + c);
    let told = format!("{few:?} of one block, {many:?} of six");
    assert!(waits_of_few <= 2 * 4 + 1 && waits <= 2 * 4 + 1, "{told}");
    assert!(few[4] <= 4 * (2 * 4 + 1) && many[4] <= 4 * (2 * 4 + 1), "{told}");
    assert!(many[3] <= few[3] + few[3] / 4, "{told}");
}

/// A GPU that waits for one who never comes is found out, and let go.
#[test]
fn a_pass_that_another_rank_of_the_replica_never_makes_ends_at_its_time_limit() {
    let Some(fake) = fake() else { return };
    fake.gpus(2);
    const OPERATIONS: [&str; 3] = [
        "all-reduce of 1568 float32 by NCCL",
        "receive of 784 float32 by NCCL",
        "send of 784 float32 by NCCL",
    ];
    for (axis, blocks) in [(TENSOR, 1), (TENSOR, 14), (PIPELINE, 14)] {
        let net = move || {
            (0..blocks).fold(Sequential::new().then(Flatten), |net, _| {
                net.then(Linear::new(784, 8)).then(Linear::new(8, 784))
            })
        };
        let config = mesh(axis, 1..1 + 2 * blocks, vec![0..3, 3..1 + 2 * blocks], net);
        let prepared = |group: Group, device: &Device| {
            let whole = Parameters::build(&mut net(), device, 3);
            let mut strategy = ModelParallel::new(&group, &whole, &config).unwrap();
            strategy.prepare(&whole).unwrap();
            strategy.begin(&whole, Here::All).unwrap();
            (strategy, whole)
        };
        let made = |strategy: &mut ModelParallel, whole: &Parameters, device: &Device| {
            let pass = Pass {
                model: &net(),
                parameters: whole,
                loss: Loss::Mse,
                input: Tensor::ones(device, [2, 1, 28, 28], DType::F32),
                target: Tensor::ones(device, [2, 784], DType::F32),
                ctx: Ctx::train(0, 0, vec![0, 1].into()),
                weight: 1.0,
                sync: phalanx::parallel::Sync::Now,
            };
            strategy.pass(&pass).map(drop).and_then(|()| strategy.finish(whole))
        };
        let (done, is_done) = mpsc::channel();
        std::thread::scope(|scope| {
            let mut groups =
                Group::threads(2).into_iter().map(|group| group.with_timeout(Duration::from_secs(4)));
            let (group, other) = (groups.next().unwrap(), groups.next().unwrap());
            let (end, is_end) = mpsc::channel::<()>();
            let (fake, prepared, made) = (&fake, &prepared, &made);
            scope.spawn(move || {
                let device = gpu_of(fake, 1);
                let (mut strategy, whole) = prepared(other, &device);
                made(&mut strategy, &whole, &device).unwrap();
                // It lives, and makes no other.
                is_end.recv().unwrap_err();
            });
            scope.spawn(move || {
                let device = gpu_of(fake, 0);
                let (mut strategy, whole) = prepared(group, &device);
                made(&mut strategy, &whole, &device).unwrap();
                let words = made(&mut strategy, &whole, &device).unwrap_err().to_string();
                strategy.part(&whole, Some("it is late"));
                let own = strategy.own_parameters(&whole);
                assert!(own.values().read_flat::<f32>().len() >= 784 * 8, "values that nobody waits for");
                drop(end);
                done.send(words).unwrap();
            });
            let words = is_done.recv_timeout(Duration::from_secs(90));
            // A thread that hangs would keep the test for good.
            let Ok(words) = words else { std::process::abort() };
            let is_named = OPERATIONS.iter().any(|operation| words.contains(operation));
            assert!(is_named && words.contains("waited"), "{axis:?}, {blocks} blocks: {words}");
        });
    }
}
