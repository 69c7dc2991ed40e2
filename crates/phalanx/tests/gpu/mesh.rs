//! Replicas that lie on several ranks with GPUs, or on one that they share: parts of matrices, stages, and both.

use crate::fake::fake;
use crate::{RULE, check_of, gpu, gpu_of, trainer};
use phalanx::comm::Group;
use phalanx::data::{Places, Resident, Silent, View, open};
use phalanx::nn::optim::Clip;
use phalanx::nn::{BatchNorm2d, Conv2d, Dropout2d, Flatten, Linear, MaxPool2d, Module, Relu, Sequential};
use phalanx::parallel::pipeline::ScheduleKind;
use phalanx::parallel::{Axis, Between, DdpConfig, ModelParallelConfig, Plan, StagesConfig, Style};
use phalanx::tensor::Device;
use phalanx::{Event, Observer, Trainer, Worker};
use std::sync::Arc;

fn net() -> Sequential {
    Sequential::new()
        .then(Conv2d::new(1, 4, 5))
        .then(BatchNorm2d::new(4))
        .then(MaxPool2d::new(4))
        .then(Dropout2d(0.25))
        .then(Flatten)
        .then(Linear::new(144, 32))
        .then(Relu)
        .then(Linear::new(32, 10))
}

/// Its first part, up to what is flat, and the rest; the two dense layers are cut together.
fn on(mesh: &[(Axis, usize)], kind: ScheduleKind) -> Trainer {
    let is_cut = |axis| mesh.iter().any(|(used, _)| *used == axis);
    let plan = || {
        let up = Style::Outputs { dim: 0, groups: 1 };
        Plan::new(Between::Whole).with("5", up).with("7", Style::Inputs { dim: 1 })
    };
    let mesh = ModelParallelConfig {
        mesh: mesh.to_vec(),
        bounds: Vec::new(),
        model: Arc::new(|| Box::new(net()) as Box<dyn Module>),
        plan: is_cut(Axis::Tensor).then(plan),
        stages: is_cut(Axis::Pipeline).then(|| StagesConfig {
            blocks: vec![0..5, 5..8],
            kind,
            micro_batches: 2,
        }),
        ddp: DdpConfig::default(),
        sharded: None,
    };
    let clip = Clip { norm: Some(0.5), value: None };
    Trainer { mesh: Some(mesh), clip, batch_size: 8, steps: Some(3), ..trainer() }
}

const TENSOR: (Axis, usize) = (Axis::Tensor, 2);
const PIPELINE: (Axis, usize) = (Axis::Pipeline, 2);

#[test]
fn replicas_on_several_ranks_are_those_of_cpus_whichever_gpus_they_have() {
    let Some(fake) = fake() else { return };
    fake.gpus(4);
    for (mesh, kind, ranks) in [
        (&[TENSOR][..], ScheduleKind::GPipe, 2),
        (&[PIPELINE], ScheduleKind::OneFOneB, 2),
        (&[PIPELINE, TENSOR], ScheduleKind::ZeroBubble, 4),
        // Two replicas.
        (&[TENSOR], ScheduleKind::GPipe, 4),
        (&[PIPELINE], ScheduleKind::GPipe, 4),
    ] {
        let trainer = on(mesh, kind);
        check_of(&net, &fake, &trainer, ranks, &|_| gpu(&fake));
        check_of(&net, &fake, &trainer, ranks, &|rank| gpu_of(&fake, rank));
    }
    assert_eq!(fake.nccl().live(), 0, "communicators that nobody ended");
}

/// The most bytes of a device that anything of a run had when a step was done.
struct Most(Device, usize);

impl Observer for Most {
    fn event(&mut self, event: &Event) {
        if let Event::Step { .. } = event {
            self.1 = self.1.max(self.0.held_bytes());
        }
    }
}

/// Nothing of the whole model is left on the GPU while steps are made.
#[test]
fn a_rank_holds_its_part_of_a_model_and_no_more() {
    const HIDDEN: usize = 64;
    let Some(fake) = fake() else { return };
    let wide = || {
        Sequential::new()
            .then(Flatten)
            .then(Linear::new(784, HIDDEN))
            .then(Relu)
            .then(Linear::new(HIDDEN, 10))
    };
    let mut mesh = on(&[TENSOR], ScheduleKind::GPipe).mesh.unwrap();
    let up = Style::Outputs { dim: 0, groups: 1 };
    mesh.plan = Some(Plan::new(Between::Whole).with("1", up).with("3", Style::Inputs { dim: 1 }));
    mesh.model = Arc::new(move || Box::new(wide()) as Box<dyn Module>);
    // Samples on the GPU would be as many for each.
    let resident = Resident::Never;
    let trainer = Trainer { batch_size: 2, steps: Some(2), resident, ..trainer() };
    let held = |trainer: &Trainer, ranks: usize| {
        let run = |group: Group| {
            let device = gpu(&fake);
            let worker = Worker::with_device(group, device.clone());
            let data = open("mnist-mini", View::default(), &Places::from_env(None), &mut Silent).unwrap();
            let mut most = Most(device, 0);
            trainer.fit(&worker, &mut wide(), RULE, data.train, None, &mut most).unwrap();
            most.1
        };
        std::thread::scope(|scope| {
            let ranks: Vec<_> =
                Group::threads(ranks).into_iter().map(|group| scope.spawn(|| run(group))).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).max().unwrap()
        })
    };
    let (alone, together) = (held(&trainer, 1), held(&Trainer { mesh: Some(mesh), ..trainer.clone() }, 2));
    // Buffers that wait to be used again count, and some are as large as the whole model's first values; with its values and
    // gradients a rank would hold more than one that is alone.
    assert!(together <= alone * 2 / 3, "{together} bytes against {alone}");
}
