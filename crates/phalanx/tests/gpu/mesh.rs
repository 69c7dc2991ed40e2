//! Replicas that lie on several ranks with GPUs, or on one that they share: parts of matrices, stages, and both.

use crate::fake::fake;
use crate::samples::{Task, images, run, text};
use crate::{Count, Most, RULE, TOLERANCE, check_of, gpu, gpu_of, near, trainer};
use phalanx::comm::Group;
use phalanx::data::{Places, Resident, Silent, View, open};
use phalanx::nn::optim::Clip;
use phalanx::nn::{BatchNorm2d, Conv2d, Dropout2d, Flatten, Linear, MaxPool2d, Module, Relu, Sequential};
use phalanx::parallel::pipeline::ScheduleKind;
use phalanx::parallel::{
    Axis, Between, BetweenGpus, DdpConfig, FsdpConfig, ModelParallelConfig, Plan, Sharded, StagesConfig,
    Style,
};
use phalanx::tensor::Device;
use phalanx::{Trainer, Worker};
use std::sync::Arc;

pub(crate) fn net() -> Sequential {
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
pub(crate) fn on(mesh: &[(Axis, usize)], kind: ScheduleKind) -> Trainer {
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
            blocks: match kind {
                ScheduleKind::Interleaved => vec![0..2, 2..5, 5..7, 7..8],
                _ => vec![0..5, 5..8],
            },
            kind,
            micro_batches: 2,
        }),
        ddp: DdpConfig::default(),
        sharded: None,
        replays: false,
    };
    let clip = Clip { norm: Some(0.5), value: None };
    Trainer { mesh: Some(mesh), clip, batch_size: 8, steps: Some(3), ..trainer() }
}

pub(crate) const TENSOR: (Axis, usize) = (Axis::Tensor, 2);
pub(crate) const PIPELINE: (Axis, usize) = (Axis::Pipeline, 2);
pub(crate) const CONTEXT: (Axis, usize) = (Axis::Context, 2);

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

/// Parts of matrices, and stages, that two ranks each share out; and two ranks that hold again what two others do.
#[test]
fn parts_of_a_model_are_shared_out_among_gpus() {
    let Some(fake) = fake() else { return };
    fake.gpus(4);
    for (mesh, sharded) in [
        (&[TENSOR][..], Sharded::Parameters),
        (&[PIPELINE], Sharded::Gradients),
        (&[PIPELINE], Sharded::Parameters),
        (&[(Axis::Shard, 2)], Sharded::States),
        (&[(Axis::Shard, 2)], Sharded::Parameters),
    ] {
        let config = FsdpConfig { sharded, unit_bytes: 0, ..FsdpConfig::default() };
        let trainer = Trainer { sharded: Some(config), ..on(mesh, ScheduleKind::OneFOneB) };
        check_of(&net, &fake, &trainer, 4, &|_| gpu(&fake));
        check_of(&net, &fake, &trainer, 4, &|rank| gpu_of(&fake, rank));
    }
    assert_eq!(fake.nccl().live(), 0, "communicators that nobody ended");
}

/// Ranks with a stretch of each sequence bring keys and values together; stages that share a table of words share it out, too. By NCCL and
/// by way of the host.
#[test]
fn stretches_and_tied_shards_on_gpus_are_what_a_cpu_has_as_a_whole() {
    let Some(fake) = fake() else { return };
    fake.gpus(4);
    let folder = tempfile::tempdir().unwrap();
    let task = text(folder.path());
    let alone = Trainer { batch_size: 8, steps: Some(3), ..trainer() };
    let want = run(&task, &alone, 1, false, &|_| Device::cpu(1));
    for (mesh, between, ranks, sharded) in [
        (&[CONTEXT][..], Between::Whole, 2, None),
        (&[CONTEXT, TENSOR], Between::Sequence, 4, None),
        (&[CONTEXT], Between::Whole, 2, Some(FsdpConfig::default())),
        (&[PIPELINE], Between::Whole, 4, Some(FsdpConfig::default())),
    ] {
        let stages =
            StagesConfig { blocks: vec![0..2, 2..3], kind: ScheduleKind::OneFOneB, micro_batches: 2 };
        let of_shards = ranks / mesh.iter().map(|(_, size)| size).product::<usize>();
        let batch_size = alone.batch_size / of_shards;
        let mesh = ModelParallelConfig {
            stages: mesh.contains(&PIPELINE).then_some(stages),
            mesh: mesh.to_vec(),
            bounds: Vec::new(),
            model: Arc::new(task.net),
            plan: Some(Plan::of_gpt(2, between)),
            ddp: DdpConfig::default(),
            sharded: None,
            replays: false,
        };
        let trainer = Trainer { mesh: Some(mesh), sharded, batch_size, ..alone.clone() };
        let shared = run(&task, &trainer, ranks, false, &|_| gpu(&fake));
        let gathers = || fake.nccl().calls("ncclAllGather");
        let before = gathers();
        let by_nccl = run(&task, &trainer, ranks, false, &|rank| gpu_of(&fake, rank));
        assert!(gathers() > before);
        for got in [shared, by_nccl] {
            let close = |(got, want): (&f64, &f64)| (got - want).abs() <= TOLERANCE;
            assert_eq!(got.losses.len(), want.losses.len());
            assert!(
                got.losses.iter().zip(&want.losses).all(close),
                "{:?}, not {:?}",
                got.losses,
                want.losses
            );
            let apart = got.tests[0].0.unwrap() - want.tests[0].0.unwrap();
            assert!(apart.abs() <= TOLERANCE, "{:?}, not {:?}", got.tests, want.tests);
            near(&got.weights, &want.weights);
        }
    }
    assert_eq!(fake.damage(), [""; 0]);
    assert_eq!(fake.nccl().live(), 0, "communicators that nobody ended");
}

/// Each rank evaluates with its part, and with the running mean of that; labels are counted wherever scores are.
#[test]
fn evaluations_by_parts_are_those_of_a_whole_model() {
    let Some(fake) = fake() else { return };
    fake.gpus(4);
    let folder = tempfile::tempdir().unwrap();
    let net = || -> Box<dyn Module> {
        let net = Sequential::new().then(Conv2d::new(3, 4, 5)).then(MaxPool2d::new(4)).then(Flatten);
        Box::new(net.then(Linear::new(196, 10).without_bias()))
    };
    let task = Task { net, ..images(folder.path()) };
    let alone = Trainer { batch_size: 8, steps: Some(3), ema: Some(0.5), ..trainer() };
    let want = run(&task, &alone, 1, false, &|_| Device::cpu(1));
    assert!(want.tests[0].1.is_some());
    let blocks = vec![0..2, 2..4];
    let stages = StagesConfig { blocks, kind: ScheduleKind::OneFOneB, micro_batches: 2 };
    for (axes, ranks, sharded) in [
        (&[TENSOR][..], 2, None),
        (&[PIPELINE], 2, None),
        (&[PIPELINE, TENSOR], 4, None),
        (&[PIPELINE], 4, Some(FsdpConfig::default())),
        (&[TENSOR], 4, Some(FsdpConfig { unit_bytes: 0, ..FsdpConfig::default() })),
    ] {
        let batch_size = if sharded.is_some() { 4 } else { 8 };
        let mesh = ModelParallelConfig {
            stages: axes.contains(&PIPELINE).then(|| stages.clone()),
            plan: axes.contains(&TENSOR).then(|| Plan::new(Between::Whole).with("3", Style::Scores)),
            model: Arc::new(net),
            ..on(axes, ScheduleKind::OneFOneB).mesh.unwrap()
        };
        let trainer = Trainer { mesh: Some(mesh), sharded, batch_size, ..alone.clone() };
        let shared = run(&task, &trainer, ranks, false, &|_| gpu(&fake));
        let by_nccl = run(&task, &trainer, ranks, false, &|rank| gpu_of(&fake, rank));
        for got in [shared, by_nccl] {
            let loss = |(loss, _): &(Option<f64>, Option<f64>)| loss.unwrap();
            let apart = (loss(&got.tests[0]) - loss(&want.tests[0])).abs();
            assert!(apart <= TOLERANCE, "{axes:?}: {:?}, not {:?}", got.tests, want.tests);
            assert_eq!(got.tests[0].1, want.tests[0].1, "{axes:?}: labels that come first");
        }
    }
    assert_eq!(fake.damage(), [""; 0]);
    assert_eq!(fake.nccl().live(), 0, "communicators that nobody ended");
}

/// Of what is shared out, too, sums of squares alone come to the host where gradients are cut.
#[test]
fn shards_of_parts_are_cut_where_they_lie() {
    let Some(fake) = fake() else { return };
    fake.gpus(4);
    let down = |clip| {
        let sharded = Some(FsdpConfig { unit_bytes: 0, ..FsdpConfig::default() });
        let trainer = Trainer { clip, sharded, ..on(&[TENSOR], ScheduleKind::GPipe) };
        let before = fake.count(Count::BytesDown);
        check_of(&net, &fake, &trainer, 4, &|rank| gpu_of(&fake, rank));
        fake.count(Count::BytesDown) - before
    };
    let (whole, cut) = (down(Clip::default()), down(on(&[TENSOR], ScheduleKind::GPipe).clip));
    // Four ranks, three steps, eight parameters: of each a number for what is shared out, and one for what is left over.
    assert!(cut > whole && cut <= whole + 4 * 3 * 8 * 2 * 8, "{cut} bytes with a limit, {whole} without");
}

/// What parts add up goes from GPU to GPU where each rank has one: no bytes of it come to the host.
#[test]
fn parts_add_up_from_gpu_to_gpu() {
    let Some(fake) = fake() else { return };
    fake.gpus(2);
    let by = |between_gpus, clip| {
        let mut trainer = Trainer { clip, ..on(&[TENSOR], ScheduleKind::GPipe) };
        trainer.ddp.between_gpus = between_gpus;
        let (sums, down) = (fake.nccl().calls("ncclAllReduce"), fake.count(Count::BytesDown));
        check_of(&net, &fake, &trainer, 2, &|rank| gpu_of(&fake, rank));
        (fake.nccl().calls("ncclAllReduce") - sums, fake.count(Count::BytesDown) - down)
    };
    let (sums, down) = by(BetweenGpus::Nccl, Clip::default());
    let (none, more) = by(BetweenGpus::Host, Clip::default());
    // Two ranks, three steps: the outputs of the second dense layer on the way forward, the gradients of what the first is given
    // on the way back.
    assert_eq!((sums, none), (2 * 3 * 2, 0));
    assert!(more >= down + 2 * 3 * 4 * 8 * (10 + 144), "{down} bytes by NCCL, {more} by way of the host");
    // Gradients are cut where they lie: a sum of squares for each parameter comes to the host, of which there are eight.
    let (_, cut) = by(BetweenGpus::Nccl, on(&[TENSOR], ScheduleKind::GPipe).clip);
    assert!(
        cut > down && cut <= down + 2 * 3 * 8 * 8,
        "{cut} bytes with a limit on the norm, {down} without"
    );
}

/// Letters between stages do, too, whatever the schedule.
#[test]
fn stages_send_each_other_letters_from_gpu_to_gpu() {
    let Some(fake) = fake() else { return };
    fake.gpus(4);
    for kind in ScheduleKind::ALL {
        let trainer = Trainer { clip: Clip::default(), ..on(&[PIPELINE], kind) };
        let by = |between_gpus, ranks| {
            let mut trainer = trainer.clone();
            trainer.ddp.between_gpus = between_gpus;
            let (sent, down) = (fake.nccl().calls("ncclSend"), fake.count(Count::BytesDown));
            check_of(&net, &fake, &trainer, ranks, &|rank| gpu_of(&fake, rank));
            (fake.nccl().calls("ncclSend") - sent, fake.count(Count::BytesDown) - down)
        };
        let (sent, down) = by(BetweenGpus::Nccl, 2);
        let (none, more) = by(BetweenGpus::Host, 2);
        // Three steps of two micro-batches over each border, forth and back, and a word on each lane at first.
        let borders = if kind == ScheduleKind::Interleaved { 3 } else { 1 };
        assert_eq!((sent, none), (3 * 2 * 2 * borders + 2, 0));
        assert!(more >= down + 3 * 4 * 8 * 144, "{kind}: {down} bytes by NCCL, {more} by way of the host");
        // Two replicas, each of two stages.
        assert_eq!(by(BetweenGpus::Nccl, 4).0, 2 * sent);
    }
    assert_eq!(fake.nccl().live(), 0, "communicators that nobody ended");
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
