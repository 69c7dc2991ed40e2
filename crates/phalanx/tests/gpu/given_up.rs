//! Recordings that end before they are whole, as those of a rank do that hears of another's end.

use crate::fake::fake;
use crate::mesh::{TENSOR, on};
use crate::sharded::STAGES;
use crate::{RULE, gpu_of};
use phalanx::comm::{Generation, Group, Rank};
use phalanx::nn::optim::Optimizer;
use phalanx::nn::{Ctx, Flatten, Linear, Loss, Module, Parameters, Sequential, Visitor};
use phalanx::parallel::pipeline::ScheduleKind;
use phalanx::parallel::{
    Between, BetweenGpus, Ddp, DdpConfig, Fsdp, FsdpConfig, Here, ModelParallel, ModelParallelConfig, Pass,
    Plan, Sharded, Strategy, Style,
};
use phalanx::tensor::{Crossing, DType, Device, Tensor};
use phalanx_fake_cuda::Count;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// A layer through which so many gradients come; the one after them is given up there.
struct Gate(Arc<AtomicUsize>);

struct GivenUp;

/// A gate that all gradients come through.
const OPEN: usize = usize::MAX;

impl Crossing for Gate {
    fn forth(&self, x: &Tensor) -> Tensor {
        x.clone()
    }

    fn back(&self, grad: &Tensor) -> Tensor {
        if self.0.fetch_sub(1, Ordering::Relaxed) == 0 {
            resume_unwind(Box::new(GivenUp));
        }
        grad.clone()
    }
}

impl Module for Gate {
    fn forward(&self, x: &Tensor, _: &mut Ctx) -> Tensor {
        let crossing: Arc<dyn Crossing> = Arc::new(Gate(self.0.clone()));
        x.across(&crossing)
    }

    fn visit(&mut self, _: &mut Visitor<'_>) {}
}

/// Layers on both sides of a gate.
fn net(gate: &Arc<AtomicUsize>) -> Sequential {
    let gate = Gate(gate.clone());
    let [first, second] = [Linear::new(784, 16), Linear::new(16, 16)];
    Sequential::new().then(Flatten).then(first).then(second).then(gate).then(Linear::new(16, 10))
}

#[derive(Clone, Copy, Debug)]
enum Among {
    Replicas,
    Shares(Sharded),
    Parts,
}

fn strategy(
    among: Among,
    group: &Group,
    (net, gate): (&Sequential, &Arc<AtomicUsize>),
    parameters: &Parameters,
    replays: bool,
) -> Box<dyn Strategy> {
    let ddp = DdpConfig { bucket_bytes: 0, first_bucket_bytes: 0, ..DdpConfig::default() };
    let ddp = DdpConfig { between_gpus: BetweenGpus::Nccl, ..ddp };
    match among {
        Among::Replicas => {
            let ddp = Ddp::with(group.clone(), ddp);
            Box::new(if replays { ddp.with_replays() } else { ddp })
        }
        Among::Shares(sharded) => {
            let config = FsdpConfig { sharded, unit_bytes: 0, ..FsdpConfig::default() };
            let fsdp = Fsdp::new(group.clone(), net, parameters, config).unwrap();
            Box::new(if replays { fsdp.with_replays() } else { fsdp })
        }
        Among::Parts => {
            let up = Style::Outputs { dim: 0, groups: 1 };
            let plan = Plan::new(Between::Whole).with("2", up).with("4", Style::Inputs { dim: 1 });
            let gate = gate.clone();
            let config = ModelParallelConfig {
                model: Arc::new(move || Box::new(self::net(&gate)) as Box<dyn Module>),
                plan: Some(plan),
                ddp,
                replays,
                ..on(&[TENSOR], ScheduleKind::GPipe).mesh.unwrap()
            };
            Box::new(ModelParallel::new(group, parameters, &config).unwrap())
        }
    }
}

/// A rank with a model.
struct Own {
    gate: Arc<AtomicUsize>,
    net: Sequential,
    device: Device,
    parameters: Parameters,
    strategy: Box<dyn Strategy>,
    optimizer: Optimizer,
}

impl Own {
    /// With first values.
    fn of(among: Among, group: &Group, device: &Device, replays: bool) -> Own {
        let gate = Arc::new(AtomicUsize::new(OPEN));
        let mut net = net(&gate);
        let parameters = Parameters::build(&mut net, device, 3);
        let strategy = strategy(among, group, (&net, &gate), &parameters, replays);
        let optimizer = Optimizer::new(RULE).unwrap();
        Own { gate, net, device: device.clone(), parameters, strategy, optimizer }.begun()
    }

    /// The same with other ranks, and these values.
    fn again(self, among: Among, group: &Group, values: &[f32]) -> Own {
        let Own { gate, net, device, parameters, strategy: parted, .. } = self;
        drop(parted);
        parameters.values().join();
        parameters.grads().arena().join();
        parameters.values().write_flat(values);
        gate.store(OPEN, Ordering::Relaxed);
        let strategy = strategy(among, group, (&net, &gate), &parameters, true);
        let optimizer = Optimizer::new(RULE).unwrap();
        Own { gate, net, device, parameters, strategy, optimizer }.begun()
    }

    fn begun(mut self) -> Own {
        self.strategy.prepare(&self.parameters).unwrap();
        self.strategy.begin(&self.parameters, Here::All).unwrap();
        self
    }

    /// The losses of these steps.
    fn made(&mut self, steps: Range<u64>) -> Vec<f64> {
        let Own { net, device, parameters, strategy, optimizer, .. } = self;
        let (net, device, parameters) = (&*net, &*device, &*parameters);
        let each = |step| {
            let pass = Pass {
                model: net,
                parameters,
                loss: Loss::Mse,
                input: Tensor::full(device, [2, 1, 28, 28], 0.01 * (step + 1) as f64, DType::F32),
                target: Tensor::ones(device, [2, 10], DType::F32),
                ctx: Ctx::train(0, step, vec![0, 1].into()),
                weight: 0.5,
                sync: phalanx::parallel::Sync::Now,
            };
            let loss = strategy.pass(&pass).unwrap();
            strategy.finish(parameters).unwrap();
            strategy.step(optimizer, parameters, device, 1.0).unwrap();
            loss
        };
        steps.map(each).collect()
    }
}

/// Nothing that was to be part of it is lent for good, keeps the GPU's streams, or is waited for: the same memory trains again, with
/// recordings of its own.
#[test]
fn a_recording_that_is_given_up_leaves_nothing_behind() {
    const STEPS: u64 = 5;
    let Some(fake) = fake() else { return };
    fake.gpus(4);
    let rows = [(2, Among::Replicas), (4, Among::Parts)];
    for (ranks, among) in rows.into_iter().chain(STAGES.map(|stage| (2, Among::Shares(stage)))) {
        let before = fake.calls("cuGraphLaunch");
        let (parting, deadline) = (AtomicU32::new(0), Instant::now() + Duration::from_secs(120));
        let run = |group: Group| {
            let device = gpu_of(&fake, group.rank().index());
            let want = Own::of(among, &group, &device, false).made(0..STEPS);

            let first = Parameters::build(&mut net(&Arc::default()), &device, 3).values().read_flat::<f32>();
            let mut own = Own::of(among, &group, &device, true);
            own.made(0..1);
            // The second pass is made, and given up as it is recorded.
            own.gate.store(1, Ordering::Relaxed);
            let given_up = catch_unwind(AssertUnwindSafe(|| own.made(1..2))).unwrap_err();
            assert!(given_up.is::<GivenUp>(), "{among:?}");
            // One that parts ends what another may still be at.
            parting.fetch_add(1, Ordering::SeqCst);
            while parting.load(Ordering::SeqCst) < ranks {
                assert!(Instant::now() < deadline, "{among:?}: not all gave up");
                std::thread::yield_now();
            }
            own.strategy.part(&own.parameters, Some("given up"));

            let all: Vec<Rank> = (0..ranks).map(Rank).collect();
            let group = group.rebuild(&all, Generation(1)).unwrap();
            let got = own.again(among, &group, &first).made(0..STEPS);
            assert_eq!(got, want, "{among:?}");
        };
        std::thread::scope(|scope| {
            Group::threads(ranks as usize).into_iter().for_each(|group| drop(scope.spawn(|| run(group))));
        });
        let launched = fake.calls("cuGraphLaunch") - before;
        assert_eq!(launched, u64::from(ranks) * (STEPS - 2), "{among:?}");
        assert_eq!((fake.damage(), fake.count(Count::Graphs)), (Vec::new(), 0), "{among:?}");
    }
    assert_eq!(fake.nccl().live(), 0, "communicators that nobody ended");
}
