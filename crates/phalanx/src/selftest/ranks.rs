//! Ranks that share a device, each a thread: two have the losses of one, however they share the work; and one has them however it makes
//! its steps.

use super::{Extent, Finding, Open, apart, sheltered};
use crate::error::Error;
use crate::event::{Event, Observer};
use crate::trainer::{Precision, Trainer};
use crate::worker::{Worker, on_threads};
use phalanx_data::{Places, Silent, View, open};
use phalanx_nn::Module;
use phalanx_nn::models::MnistNet;
use phalanx_nn::optim::Sgd;
use phalanx_parallel::pipeline::ScheduleKind;
use phalanx_parallel::{Axis, DdpConfig, FsdpConfig, ModelParallelConfig, Plan, Sharded, StagesConfig};
use std::sync::{Arc, Mutex};

/// What losses may be off by: roundings of float32 in another order, growing from step to step.
const TOLERANCE: f64 = 1e-4;
/// Samples of a step of all ranks together.
const BATCH: usize = 16;

/// Runs `f` as `n` ranks, each with a device of its own. The first error, by rank, is returned when all have ended.
pub(super) fn on_ranks(
    n: usize,
    open: Open<'_>,
    f: impl Fn(Worker) -> Result<(), Error> + Sync,
) -> Result<(), Error> {
    on_threads(n, |group| f(Worker::with_device(group, open(n)?)))
}

/// Notes the losses of a run.
pub(super) struct Losses<'a>(pub(super) &'a Mutex<Vec<f64>>);

impl Observer for Losses<'_> {
    fn event(&mut self, event: &Event) {
        if let Event::Step { loss, .. } = event {
            self.0.lock().expect("nobody panics while it holds this").push(*loss);
        }
    }
}

/// How two ranks share the work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// Each has a whole model, and half of the samples.
    Replicas,
    /// Each has half of the samples, and a part of what belongs to each parameter: of the optimizer's state, of that and the gradients, or of
    /// all.
    Shards(Sharded),
    /// Each has a part of the matrices.
    Parts,
    /// Each has a stage.
    Stages,
}

impl Way {
    const ALL: [Way; 6] = [
        Way::Replicas,
        Way::Shards(Sharded::States),
        Way::Shards(Sharded::Gradients),
        Way::Shards(Sharded::Parameters),
        Way::Parts,
        Way::Stages,
    ];

    fn name(self) -> &'static str {
        match self {
            Way::Replicas => "two ranks on the device, against one",
            Way::Shards(Sharded::States) => "two ranks that share states out, against one",
            Way::Shards(Sharded::Gradients) => "two ranks that share gradients out, against one",
            Way::Shards(Sharded::Parameters) => "two ranks that share a model out, against one",
            Way::Parts => "two ranks with parts of matrices, against one",
            Way::Stages => "two ranks with a stage each, against one",
        }
    }

    /// The run of two ranks.
    fn trainer(self, steps: usize) -> Trainer {
        let mesh = |axis: Axis, stages: Option<StagesConfig>| ModelParallelConfig {
            mesh: vec![(axis, 2)],
            bounds: Vec::new(),
            model: Arc::new(|| Box::new(net()) as Box<dyn Module>),
            plan: (axis == Axis::Tensor).then(Plan::of_mnist),
            stages,
            ddp: DdpConfig::default(),
            sharded: None,
            replays: false,
        };
        let half = Trainer { batch_size: BATCH / 2, ..trainer(steps) };
        match self {
            Way::Replicas => half,
            Way::Shards(sharded) => {
                let config = FsdpConfig { sharded, unit_bytes: 0, ..FsdpConfig::default() };
                Trainer { sharded: Some(config), ..half }
            }
            Way::Parts => Trainer { mesh: Some(mesh(Axis::Tensor, None)), ..trainer(steps) },
            Way::Stages => {
                let blocks = net().blocks();
                let stages = StagesConfig {
                    blocks: vec![0..blocks / 2, blocks / 2..blocks],
                    kind: ScheduleKind::OneFOneB,
                    micro_batches: 4,
                };
                Trainer { mesh: Some(mesh(Axis::Pipeline, Some(stages))), ..trainer(steps) }
            }
        }
    }
}

/// With dropout, whose masks are the same wherever samples and layers are.
fn net() -> MnistNet {
    MnistNet::new(0.5)
}

/// The run of one rank.
fn trainer(steps: usize) -> Trainer {
    Trainer { steps: Some(steps as u64), batch_size: BATCH, ..Trainer::default() }
}

/// Another way to make the steps of one rank, and what its losses may be from those of `against`, or else of the plain way.
struct Another {
    name: &'static str,
    trainer: Trainer,
    against: Option<Trainer>,
    tolerance: f64,
}

/// What products of 16 bits may move a loss by in a few steps.
const OF_HALVES: f64 = 0.1;

/// Those that a GPU knows, or a CPU.
fn others(steps: usize, is_gpu: bool) -> Vec<Another> {
    let plain = || trainer(steps);
    let half = Trainer { precision: Precision::Bfloat16, ..plain() };
    let beside_plain = |name, trainer, tolerance| Another { name, trainer, against: None, tolerance };
    let float16 = Trainer { precision: Precision::Float16, ..plain() };
    let mut others = vec![
        beside_plain("one rank in bfloat16, against float32", half.clone(), OF_HALVES),
        beside_plain("one rank in float16, against float32", float16, OF_HALVES),
    ];
    if is_gpu {
        let offload = FsdpConfig { offload: true, unit_bytes: 0, ..FsdpConfig::default() };
        let offloaded = Trainer { sharded: Some(offload), ..plain() };
        let replayed = Trainer { graphs: true, ..plain() };
        let searched = Trainer { search: true, ..plain() };
        others.extend([
            beside_plain("replayed passes, against those made", replayed, 0.0),
            Another {
                name: "the same in bfloat16",
                trainer: Trainer { graphs: true, ..half.clone() },
                against: Some(half),
                tolerance: 0.0,
            },
            beside_plain("what the host's memory holds, against none", offloaded, TOLERANCE),
            beside_plain("ways that were searched for, against others", searched, TOLERANCE),
        ]);
    }
    others
}

/// The losses of a run, or why there are none.
type Ran = Result<Vec<f64>, String>;

/// Tells of each way.
pub(super) fn equality(open: Open<'_>, extent: Extent, is_gpu: bool, tell: &mut dyn FnMut(Finding)) {
    let steps = match extent {
        Extent::Whole => 20,
        // So many that one is replayed.
        Extent::Quick => 3,
    };
    let run = |ranks: usize, trainer: &Trainer| match sheltered(|| losses(ranks, trainer, open)) {
        Ok(Ok(losses)) => Ok(losses),
        Ok(Err(error)) => Err(error.to_string()),
        Err(words) => Err(words),
    };
    let mut beside = |name: &str, want: &Ran, got: Ran, tolerance: f64| {
        let (apart, failure) = match (want, got) {
            (Ok(want), Ok(got)) => {
                let apart = apart(&got, want);
                let is_near = apart <= tolerance;
                (apart, (!is_near).then(|| format!("the losses are {got:?}, and should be {want:?}")))
            }
            (Err(words), _) => (0.0, Some(words.clone())),
            (_, Err(words)) => (0.0, Some(words)),
        };
        tell(Finding::Run { name: name.to_owned(), steps, apart, tolerance, failure });
    };
    let one = run(1, &trainer(steps));
    for way in Way::ALL {
        beside(way.name(), &one, run(2, &way.trainer(steps)), TOLERANCE);
    }
    for Another { name, trainer, against, tolerance } in others(steps, is_gpu) {
        let other = against.map(|against| run(1, &against));
        beside(name, other.as_ref().unwrap_or(&one), run(1, &trainer), tolerance);
    }
}

/// Those of a run over the first digits.
fn losses(ranks: usize, trainer: &Trainer, device: Open<'_>) -> Result<Vec<f64>, Error> {
    let losses = Mutex::default();
    on_ranks(ranks, device, |worker| {
        let data = open("mnist-mini", View::default(), &Places::from_env(None), &mut Silent)?;
        let sgd = Sgd { momentum: 0.5, ..Sgd::new(0.05) };
        trainer.fit(&worker, &mut net(), sgd, data.train, None, &mut Losses(&losses)).map(drop)
    })?;
    Ok(losses.into_inner().expect("nobody panics while it holds this"))
}
