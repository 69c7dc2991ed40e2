//! Runs in bfloat16 and float16, against PyTorch's autocast; the scale of a loss in float16.

use phalanx::data::{BatchBuffers, Dataset, Target};
use phalanx::nn::models::MnistNet;
use phalanx::nn::optim::{Clip, Sgd};
use phalanx::nn::{
    BatchNorm2d, Conv2d, Flatten, Gelu, LayerNorm, Linear, Loss, MaxPool2d, Module, Parameters, Relu,
    Sequential, Weights,
};
use phalanx::parallel::pipeline::ScheduleKind;
use phalanx::parallel::{
    Axis, Compress, DataParallelConfig, DdpConfig, FsdpConfig, LocalConfig, ModelParallelConfig, Sharded,
    StagesConfig,
};
use phalanx::selftest::unit;
use phalanx::tensor::{Device, Tensor};
use phalanx::{Event, LossScale, Observer, OnNan, Precision, Progress, Quiet, State, Trainer, Worker, spawn};
use std::sync::{Arc, Mutex};

/// How far the first loss may be from PyTorch's, measured by how far PyTorch's own run in float64 is. Nothing but roundings of the
/// forward pass is in either: at the same places they leave a tenth at most, at others, or at none, as much as there is.
const FIRST: f64 = 0.25;
/// How far a loss may be from that of the run in float64, measured by the largest distance so far of PyTorch's in 16 bits; as for the
/// golden runs in float32. PyTorch's convolutions on a CPU round in the midst of their sums, these don't, and steps carry on
/// either.
const LATER: f64 = 10.0;
/// What losses of ranks that share a batch may be apart from those of one: a gradient is rounded before ranks add theirs up.
const BF16_SHARED: f64 = 2e-2;
const F16_SHARED: f64 = 5e-3;

/// Images of 1 x 28 x 28 from the hash that first values come from; image j has label j % 10.
struct FormulaImages;

impl Dataset for FormulaImages {
    fn len(&self) -> usize {
        64
    }

    fn input_dims(&self) -> &[usize] {
        &[1, 28, 28]
    }

    fn target(&self) -> Target<'_> {
        Target::Classes(10)
    }

    fn batch(&self, indices: &[usize], into: &mut BatchBuffers) -> phalanx::data::Result<()> {
        let size = 28 * 28;
        for (image, &j) in into.inputs().chunks_exact_mut(size).zip(indices) {
            image.iter_mut().enumerate().for_each(|(i, x)| *x = unit(1000, (j * size + i) as u64) as f32);
        }
        into.labels().iter_mut().zip(indices).for_each(|(label, &j)| *label = (j % 10) as i64);
        Ok(())
    }
}

/// Convolutions with batch norms, a layer norm, dense layers.
fn normed() -> Box<dyn Module> {
    let net = Sequential::new()
        .then(Conv2d::new(1, 16, 3).stride(2))
        .then(BatchNorm2d::new(16))
        .then(Relu)
        .then(Conv2d::new(16, 32, 3).stride(2))
        .then(BatchNorm2d::new(32))
        .then(Relu)
        .then(MaxPool2d::new(2))
        .then(Flatten)
        .then(LayerNorm::new(288))
        .then(Linear::new(288, 64))
        .then(Gelu)
        .then(Linear::new(64, 10));
    Box::new(net)
}

fn mnist() -> Box<dyn Module> {
    Box::new(MnistNet::new(0.0))
}

fn give_first_values(parameters: &Parameters) {
    let layout = parameters.layout();
    for (k, name) in parameters.names().iter().enumerate() {
        let (dims, value) = (layout.shape(k).dims(), parameters.value(k));
        let weight = name.replace("bias", "weight");
        if layout.shape(parameters.index_of(&weight).unwrap()).n_dims() == 1 {
            value.fill(if *name == weight { 1.0 } else { 0.0 });
            continue;
        }
        let fan_in = if dims.len() > 1 { dims[1..].iter().product() } else { 100 };
        let scale = (3.0 / fan_in as f64).sqrt();
        let first: Vec<f32> = (0..value.count() as u64).map(|i| (unit(k as u64, i) * scale) as f32).collect();
        value.copy_from(&Tensor::from_slice(value.device(), &first, value.shape()));
    }
}

/// What is told of each step.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Told {
    loss: f64,
    scale: Option<f64>,
    skipped: bool,
    norm: Option<f64>,
}

/// Keeps it, on the first rank.
struct Steps<'a>(&'a Mutex<Vec<Told>>);

impl Observer for Steps<'_> {
    fn event(&mut self, event: &Event) {
        if let Event::Step { loss, loss_scale, skipped, grad_norm, .. } = event {
            let (loss, scale, skipped, norm) = (*loss, *loss_scale, *skipped, *grad_norm);
            self.0.lock().unwrap().push(Told { loss, scale, skipped, norm });
        }
    }
}

const BATCH: usize = 16;

/// A run of so many workers that share each batch, from `progress` on: what was told, and the weights and progress in the end.
fn run(
    trainer: &Trainer,
    workers: usize,
    model: fn() -> Box<dyn Module>,
    progress: Progress,
) -> (Vec<Told>, Weights, Progress) {
    let (told, ended) = (Mutex::default(), Mutex::new(None));
    // Those that hold a replica together take the same samples.
    let replicas = if trainer.mesh.is_some() { 1 } else { workers };
    let batch_size = BATCH / replicas / trainer.accumulate;
    let trainer = Trainer { batch_size, shuffle: false, epochs: 100, ..trainer.clone() };
    spawn(workers, |worker| {
        let mut net = model();
        let parameters = Parameters::build(&mut net, worker.device(), 0);
        give_first_values(&parameters);
        let state =
            State { progress: progress.clone(), ..State::start(Sgd { momentum: 0.5, ..Sgd::new(0.02) })? };
        let data = Arc::new(FormulaImages);
        let trained = trainer.resume(&worker, &net, parameters, state, data, None, &mut Steps(&told))?;
        if worker.is_first() {
            *ended.lock().unwrap() = Some((trained.parameters.to_weights(), trained.state.progress));
        }
        Ok(())
    })
    .unwrap();
    let (weights, progress) = ended.into_inner().unwrap().unwrap();
    (told.into_inner().unwrap(), weights, progress)
}

fn of(precision: Precision) -> Trainer {
    Trainer {
        precision,
        steps: Some(60),
        loss: Loss::CrossEntropy { label_smoothing: 0.0 },
        ..Trainer::default()
    }
}

/// How far the first loss is from PyTorch's, and all are from those in float64, measured as the constants above say. Scales have to be
/// PyTorch's.
fn apart(told: &[Told], file: &str) -> [f64; 2] {
    let lines: Vec<Vec<f64>> = file
        .lines()
        .filter(|line| !line.starts_with('#'))
        .map(|line| line.split(' ').map(|number| number.parse().unwrap()).collect())
        .collect();
    assert_eq!(told.len(), lines.len());
    let first = (told[0].loss - lines[0][1]).abs() / (lines[0][2] - lines[0][1]).abs();
    let (mut pytorchs, mut worst) = (0.0f64, 0.0f64);
    for (told, line) in told.iter().zip(&lines) {
        assert!(told.scale.is_none_or(|scale| scale == line[3]) && !told.skipped, "{told:?}, {line:?}");
        pytorchs = pytorchs.max((line[1] - line[2]).abs());
        worst = worst.max((told.loss - line[2]).abs() / pytorchs);
    }
    [first, worst]
}

#[test]
fn runs_are_those_of_pytorchs_autocast() {
    let files = [
        (mnist as fn() -> _, Precision::Bfloat16, include_str!("golden/precision_mnist_bf16.txt")),
        (normed, Precision::Bfloat16, include_str!("golden/precision_normed_bf16.txt")),
        (mnist, Precision::Float16, include_str!("golden/precision_mnist_f16.txt")),
        (normed, Precision::Float16, include_str!("golden/precision_normed_f16.txt")),
    ];
    for (model, precision, file) in files {
        let name = file.lines().next().unwrap();
        let loss = if name.starts_with("# mnist") { Loss::Nll } else { of(precision).loss };
        let apart = |precision| {
            apart(
                &run(&Trainer { loss: loss.clone(), ..of(precision) }, 1, model, Progress::default()).0,
                file,
            )
        };
        let ([first, worst], [single, _]) = (apart(precision), apart(Precision::Float32));
        assert!(first <= FIRST && worst <= LATER, "{name}: {first:.3} and {worst:.3}");
        assert!(single > 2.0 * FIRST, "{name}: float32 is as near, {single:.3}");
    }
}

fn scaled(factor: f64, good_steps: u32) -> Progress {
    Progress { loss_scale: Some(LossScale { factor, good_steps }), ..Progress::default() }
}

/// At 2^40 no gradient of a number this size is one of float16.
#[test]
fn steps_that_overflow_are_left_out_on_all_ranks_and_told() {
    for workers in [1, 2, 4] {
        let trainer = |steps| Trainer { steps: Some(steps), ..of(Precision::Float16) };
        let of_steps = |steps, factor| run(&trainer(steps), workers, normed, scaled(factor, 7));
        let (told, left, progress) = of_steps(3, 2f64.powi(40));
        let scales: Vec<Option<f64>> = told.iter().map(|step| step.scale).collect();
        assert_eq!(scales, [40, 39, 38].map(|power| Some(2f64.powi(power))));
        assert!(told.iter().all(|step| step.skipped && step.loss.is_finite()));
        assert_eq!(progress.loss_scale, Some(LossScale { factor: 2f64.powi(37), good_steps: 0 }));
        assert_eq!((progress.step, progress.samples), (3, 48), "their samples are used");
        // Running means follow each pass; nothing else has moved.
        let (_, moved, _) = of_steps(1, 1024.0);
        let first = {
            let mut net = normed();
            let parameters = Parameters::build(&mut net, &Device::cpu(1), 0);
            give_first_values(&parameters);
            parameters.to_weights()
        };
        let learned = |name: &&str| !name.contains("running");
        for name in first.names().filter(learned) {
            assert_eq!(left.get(name), first.get(name), "{name}");
            assert_ne!(moved.get(name), first.get(name), "{name}");
        }
    }
}

#[test]
fn a_scale_that_has_done_well_is_doubled_and_makes_no_difference() {
    let trainer = Trainer { steps: Some(3), ..of(Precision::Float16) };
    let (told, weights, progress) = run(&trainer, 1, mnist, scaled(256.0, 1998));
    let scales: Vec<Option<f64>> = told.iter().map(|step| step.scale).collect();
    assert_eq!(scales, [256.0, 256.0, 512.0].map(Some));
    assert!(told.iter().all(|step| !step.skipped));
    assert_eq!(progress.loss_scale, Some(LossScale { factor: 512.0, good_steps: 1 }));
    // A power of two takes no bits, as long as nothing is too small or too large for the type.
    let (same, same_weights, _) = run(&trainer, 1, mnist, scaled(512.0, 0));
    assert!(told.iter().zip(&same).all(|(a, b)| (a.loss - b.loss).abs() < 1e-3), "{told:?} {same:?}");
    assert!(same_weights.names().eq(weights.names()));
}

#[test]
fn gradients_are_cut_after_the_scale_is_out_of_them() {
    let clip = Clip { norm: Some(0.25), value: None };
    let norms = |precision| {
        let trainer = Trainer { steps: Some(3), clip, ..of(precision) };
        let (told, ..) = run(&trainer, 1, normed, Progress::default());
        told.iter().map(|step| step.norm.unwrap()).collect::<Vec<f64>>()
    };
    let (half, single) = (norms(Precision::Float16), norms(Precision::Float32));
    assert!(
        half.iter().zip(&single).all(|(half, single)| (half / single - 1.0).abs() < 0.02),
        "{half:?} {single:?}"
    );
}

/// Ranks, batches of a step and copies on several devices share the work in any type.
#[test]
fn two_ranks_and_several_passes_are_one_rank_and_one_pass() {
    for (precision, allowed) in [(Precision::Bfloat16, BF16_SHARED), (Precision::Float16, F16_SHARED)] {
        let trainer = Trainer { steps: Some(10), ..of(precision) };
        let losses = |trainer: &Trainer, workers| {
            let (told, ..) = run(trainer, workers, mnist, Progress::default());
            told.iter().map(|step| step.loss).collect::<Vec<f64>>()
        };
        let one = losses(&trainer, 1);
        let others = DataParallelConfig { others: vec![Device::cpu(1)], model: Arc::new(mnist) };
        let shared = [
            ("two ranks", losses(&trainer, 2)),
            ("two shards", losses(&Trainer { logical_shards: Some(2), ..trainer.clone() }, 2)),
            (
                "two devices",
                losses(&Trainer { local: LocalConfig::DataParallel(others), ..trainer.clone() }, 1),
            ),
        ];
        for (what, losses) in shared {
            let apart = one.iter().zip(&losses).fold(0.0, |apart: f64, (a, b)| apart.max((a - b).abs()));
            assert!(losses.len() == 10 && apart <= allowed, "{what} in {precision}: {apart:.2e} apart");
        }
    }
}

const STAGES: [Sharded; 3] = [Sharded::States, Sharded::Gradients, Sharded::Parameters];

/// The same with what belongs to the parameters shared out, a block a unit.
fn shared_out(trainer: &Trainer, sharded: Sharded) -> Trainer {
    Trainer {
        sharded: Some(FsdpConfig { sharded, unit_bytes: 0, ..FsdpConfig::default() }),
        ..trainer.clone()
    }
}

/// Two ranks sum two gradients, in either order to the same bits. The squares of a norm are added up in another order, whose last bits
/// change what float16 makes of a weight now and then.
#[test]
fn what_is_shared_out_among_ranks_learns_what_each_having_all_of_it_learns() {
    for (precision, allowed) in [(Precision::Bfloat16, BF16_SHARED), (Precision::Float16, F16_SHARED)] {
        let trainer = Trainer { steps: Some(8), ..of(precision) };
        let clip = Clip { norm: Some(0.25), value: None };
        for (what, trainer, allowed) in [
            ("as it is", trainer.clone(), 0.0),
            ("in two passes", Trainer { accumulate: 2, ..trainer.clone() }, 0.0),
            ("clipped", Trainer { clip, ..trainer }, allowed),
        ] {
            let (whole, weights, _) = run(&trainer, 2, normed, Progress::default());
            for stage in STAGES {
                let (told, shared, _) = run(&shared_out(&trainer, stage), 2, normed, Progress::default());
                let apart = whole.iter().zip(&told).map(|(a, b)| (a.loss - b.loss).abs()).fold(0.0, f64::max);
                assert!(
                    told.len() == 8 && apart <= allowed,
                    "{precision} {what}, {stage:?}: {apart:.2e} apart"
                );
                let same = weights.names().all(|name| weights.get(name) == shared.get(name));
                assert!(same || allowed > 0.0, "{precision} {what}, {stage:?}: other weights");
            }
        }
    }
}

/// A rank may find that its part of the gradients is well where another's isn't.
#[test]
fn an_overflow_in_the_part_of_one_rank_is_one_of_all() {
    let clip = Clip { norm: Some(0.25), value: Some(0.5) };
    let trainer = Trainer { steps: Some(1), clip, ..of(Precision::Float16) };
    let mut seen = [false; 2];
    for power in 14..30 {
        let from = scaled(2f64.powi(power), 0);
        let told = |trainer: &Trainer| run(trainer, 2, normed, from.clone()).0[0];
        let whole = told(&trainer);
        seen[usize::from(whole.skipped)] = true;
        for stage in STAGES {
            let shared = told(&shared_out(&trainer, stage));
            assert_eq!((shared.skipped, shared.scale), (whole.skipped, whole.scale), "2^{power}, {stage:?}");
            assert_eq!(shared.norm.is_some(), whole.norm.is_some());
        }
    }
    assert_eq!(seen, [true; 2], "some of these scales are too large");
}

/// One replica on two ranks, a stage each, that takes its batch in two parts.
fn in_stages(trainer: &Trainer, kind: ScheduleKind) -> Trainer {
    let mesh = ModelParallelConfig {
        mesh: vec![(Axis::Pipeline, 2)],
        bounds: Vec::new(),
        model: Arc::new(normed),
        plan: None,
        stages: Some(StagesConfig { blocks: vec![0..5, 5..12], kind, micro_batches: 2 }),
        ddp: DdpConfig::default(),
        sharded: None,
        replays: false,
    };
    Trainer { mesh: Some(mesh), ..trainer.clone() }
}

/// PIPE-SUM, with activations that travel in 16 bits; the first stage knows the scale, which the loss of the last one has, by its
/// gradients, and either may be the one that finds an overflow.
#[test]
fn stages_learn_what_one_rank_learns_and_leave_out_the_same_steps() {
    for (precision, kind) in [
        (Precision::Bfloat16, ScheduleKind::OneFOneB),
        (Precision::Float16, ScheduleKind::GPipe),
        (Precision::Float16, ScheduleKind::ZeroBubble),
    ] {
        let trainer = Trainer { steps: Some(6), ..of(precision) };
        let whole = run(&Trainer { accumulate: 2, ..trainer.clone() }, 1, normed, Progress::default());
        let staged = run(&in_stages(&trainer, kind), 2, normed, Progress::default());
        assert_eq!(staged.0, whole.0, "{precision}, {kind}");
        let same = whole.1.names().all(|name| whole.1.get(name) == staged.1.get(name));
        assert!(same && staged.2.loss_scale == whole.2.loss_scale, "{precision}, {kind}: other weights");
    }
    let clip = Clip { norm: Some(0.25), value: None };
    let trainer = Trainer { steps: Some(1), clip, ..of(Precision::Float16) };
    let mut seen = [false; 2];
    for power in 14..30 {
        let from = scaled(2f64.powi(power), 0);
        let whole = run(&Trainer { accumulate: 2, ..trainer.clone() }, 1, normed, from.clone()).0[0];
        let staged = run(&in_stages(&trainer, ScheduleKind::OneFOneB), 2, normed, from).0[0];
        assert_eq!((staged.skipped, staged.scale), (whole.skipped, whole.scale), "2^{power}");
        seen[usize::from(whole.skipped)] = true;
    }
    assert_eq!(seen, [true; 2], "some of these scales are too large");
}

/// One input, whose gradient is beyond float16 whatever the loss is scaled by.
#[test]
fn what_overflows_without_a_scale_ends_the_run_by_name() {
    struct Large;
    impl Dataset for Large {
        fn len(&self) -> usize {
            4
        }
        fn input_dims(&self) -> &[usize] {
            &[1]
        }
        fn target(&self) -> Target<'_> {
            Target::Values(&[1])
        }
        fn batch(&self, _: &[usize], into: &mut BatchBuffers) -> phalanx::data::Result<()> {
            into.inputs().fill(1e4);
            into.values().fill(0.0);
            Ok(())
        }
    }
    let fit = |on_nan| {
        let trainer = Trainer { loss: Loss::Mse, on_nan, epochs: 2, ..of(Precision::Float16) };
        let (worker, mut net) = (Worker::alone(1), Linear::new(1, 1));
        let parameters = Parameters::build(&mut net, worker.device(), 0);
        parameters.value(0).fill(1.0);
        let state = State { progress: scaled(2.0, 0), ..State::start(Sgd::new(0.1)).unwrap() };
        trainer.resume(&worker, &net, parameters, state, Arc::new(Large), None, &mut Quiet)
    };
    let error = fit(OnNan::Loss).err().unwrap().to_string();
    assert!(error.contains("the gradient of weight is inf at element 0, at step 1"), "{error}");
    let ignored = fit(OnNan::Ignore).unwrap();
    assert_eq!(ignored.parameters.value(0).item(), 1.0);
    assert_eq!(ignored.state.progress.step, 2);
}

#[test]
fn a_compression_that_keeps_what_it_left_out_refuses_a_scaled_loss() {
    let refused = |trainer: Trainer| {
        let fitted = trainer.fit(
            &Worker::alone(1),
            &mut MnistNet::new(0.0),
            Sgd::new(0.1),
            Arc::new(FormulaImages),
            None,
            &mut Quiet,
        );
        fitted.err().map(|error| error.to_string())
    };
    let plain = Trainer { steps: Some(1), ..Trainer::default() };
    let compress = Compress::PowerSgd { rank: 1, start_step: 0 };
    let compressed = |precision| Trainer {
        precision,
        ddp: DdpConfig { compress, ..DdpConfig::default() },
        ..plain.clone()
    };
    assert!(refused(compressed(Precision::Float16)).unwrap().contains("keeps what it left out"));
    assert_eq!(refused(compressed(Precision::Bfloat16)), None);
}
