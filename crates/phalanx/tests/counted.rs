//! Labels of which some count more than others, or not at all: they count as in one batch of all samples of a step, however these are
//! shared out.

mod losses;

use losses::Losses;
use phalanx::data::{BatchBuffers, Dataset, Input, Target};
use phalanx::nn::optim::{Clip, Optimizer, Sgd};
use phalanx::nn::{
    Ctx, Linear, Loss, MeanOver, Metric, Module, Parameters, Relu, Sequential, WeightedCrossEntropy, Weights,
};
use phalanx::parallel::pipeline::ScheduleKind;
use phalanx::parallel::{
    Axis, Between, DataParallelConfig, DdpConfig, FsdpConfig, LocalConfig, ModelParallelConfig, Plan,
    StagesConfig, Style,
};
use phalanx::tensor::{DType, Device, Tensor};
use phalanx::{Error, Evaluation, OnNan, Quiet, Trainer, Worker, spawn};
use std::sync::{Arc, Mutex};

const PAD: i64 = -100;
const PLACES: usize = 6;
const CLASSES: usize = 5;
const STEP: usize = 12;
const LR: f64 = 0.5;
/// The first half of a feed-forward layer, as ranks cut it.
const UP: Style = Style::Outputs { dim: 0, groups: 1 };

/// Sequences of 1 to 6 places, filled up to 6: those of some ranks are all short. The last samples have no label at all.
struct Sequences {
    len: usize,
    unlabelled: usize,
}

impl Sequences {
    fn sample(&self, index: usize) -> ([f32; 3 * PLACES], [i64; PLACES]) {
        let number = |k: usize| ((index * 37 + k * 53) % 101) as f32 / 50.0 - 1.0;
        let length = if index + self.unlabelled >= self.len { 0 } else { 1 + index * index % PLACES };
        let label = |t: usize| ((index * 7 + t * t) % CLASSES) as i64;
        (std::array::from_fn(number), std::array::from_fn(|t| if t < length { label(t) } else { PAD }))
    }
}

impl Dataset for Sequences {
    fn len(&self) -> usize {
        self.len
    }

    fn input_dims(&self) -> &[usize] {
        &[PLACES, 3]
    }

    fn input(&self) -> Input {
        Input::Values
    }

    fn target(&self) -> Target<'_> {
        Target::Sequence { len: PLACES, classes: CLASSES }
    }

    fn batch(&self, indices: &[usize], into: &mut BatchBuffers) -> phalanx::data::Result<()> {
        for (slot, &index) in indices.iter().enumerate() {
            let (numbers, labels) = self.sample(index);
            into.inputs()[slot * 3 * PLACES..][..3 * PLACES].copy_from_slice(&numbers);
            into.labels()[slot * PLACES..][..PLACES].copy_from_slice(&labels);
        }
        Ok(())
    }
}

fn net() -> Sequential {
    Sequential::new().then(Linear::new(3, 16)).then(Relu).then(Linear::new(16, CLASSES))
}

fn weighted(weights: &[f32]) -> WeightedCrossEntropy {
    WeightedCrossEntropy { weights: weights.to_vec(), ignored: Some(PAD), ..WeightedCrossEntropy::default() }
}

/// 40 samples: three steps and one of four.
const TRAIN: Sequences = Sequences { len: 40, unlabelled: 0 };
const TEST: Sequences = Sequences { len: 23, unlabelled: 2 };

fn trainer(loss: &WeightedCrossEntropy) -> Trainer {
    let loss = Loss::WeightedCrossEntropy(loss.clone());
    Trainer { loss, batch_size: STEP, epochs: 2, shuffle: false, metrics: metrics(), ..Trainer::default() }
}

/// Metrics of labels that count, and how many labels there are at all, which is no share of anything.
fn metrics() -> Vec<Metric> {
    let labels = |_: &Tensor, labels: &Tensor| labels.ge(-1000.0).cast(DType::F32).sum_all().reshape([1]);
    let labels = Metric::own("labels", 1, labels, |sums| sums[0]);
    vec![Metric::macro_f1(CLASSES), Metric::balanced_accuracy(CLASSES), Metric::mean_iou(CLASSES), labels]
}

struct Left {
    losses: Vec<f64>,
    weights: Weights,
    evaluation: Evaluation,
}

fn of_ranks(ranks: usize, trainer: &Trainer) -> Left {
    let left = Mutex::new(None);
    spawn(ranks, |worker| {
        let mut losses = Losses::default();
        let (train, test, mut net) = (Arc::new(TRAIN), Arc::new(TEST), net());
        let trained = trainer.fit(&worker, &mut net, Sgd::new(LR), train, Some(test.clone()), &mut losses)?;
        // What was learned is judged alike once more.
        let again = trainer.evaluate(&worker, &net, &trained.parameters, test)?;
        assert_eq!(Some(&again), trained.evaluation.as_ref());
        if worker.is_first() {
            let (weights, evaluation) = (trained.parameters.to_weights(), trained.evaluation.unwrap());
            *left.lock().unwrap() = Some(Left { losses: losses.0, weights, evaluation });
        }
        Ok(())
    })
    .unwrap();
    left.into_inner().unwrap().unwrap()
}

/// The same, each step one batch and one loss.
fn plainly(loss: &WeightedCrossEntropy) -> Left {
    let (device, mut net) = (Device::cpu(1), net());
    let parameters = Parameters::build(&mut net, &device, 0);
    let tensors = |data: &Sequences, samples: std::ops::Range<usize>| {
        let (inputs, labels): (Vec<_>, Vec<_>) = samples.map(|i| data.sample(i)).unzip();
        let n = inputs.len() * PLACES;
        (
            Tensor::from_slice(&device, inputs.as_flattened(), [n, 3]),
            Tensor::from_slice(&device, labels.as_flattened(), [n]),
        )
    };
    let (mut losses, mut optimizer) = (Vec::new(), Optimizer::new(Sgd::new(LR)).unwrap());
    for _ in 0..2 {
        for from in (0..TRAIN.len).step_by(STEP) {
            let (x, y) = tensors(&TRAIN, from..TRAIN.len.min(from + STEP));
            let value = loss.of(&net.forward(&x, &mut Ctx::eval()), &y);
            losses.push(value.item());
            // Into the parameters' slots.
            parameters.grads().zero();
            value.backward();
            optimizer.step_parameters(&parameters, 1.0);
        }
    }
    let (x, y) = tensors(&TEST, 0..TEST.len);
    let scores = net.forward(&x, &mut Ctx::eval());
    let told = scores.argmax(1).to_vec::<i64>();
    let pairs = || y.to_vec::<i64>().into_iter().zip(told.iter().copied()).filter(|(label, _)| *label != PAD);
    let right = pairs().filter(|(label, told)| label == told).count() as f64;
    let accuracy = Some(right / pairs().count() as f64);
    let metrics = metrics().into_iter().map(|metric| {
        let name = metric.name().to_owned();
        (name, metric.ignoring(PAD).of(&scores, &y))
    });
    let metrics = metrics.collect();
    let evaluation = Evaluation { loss: loss.of(&scores, &y).item(), accuracy, top5: None, metrics };
    Left { losses, weights: parameters.to_weights(), evaluation }
}

#[track_caller]
fn assert_alike(what: &str, got: &Left, want: &Left) {
    assert_eq!(got.losses.len(), want.losses.len(), "{what}");
    // Float32 sums in another order, growing over eight steps.
    let near = |a: f64, b: f64| (a - b).abs() < 2e-5;
    assert!(got.losses.iter().zip(&want.losses).all(|(a, b)| near(*a, *b)), "{what}: {:?}", got.losses);
    let (a, b) = (&got.evaluation, &want.evaluation);
    // What is counted is the same, and so is what is made of it.
    let shares = |e: &Evaluation| (e.accuracy, e.top5, e.metrics.clone());
    assert!(near(a.loss, b.loss) && shares(a) == shares(b), "{what}: {a:?}, not {b:?}");
    assert_eq!(a.metrics["labels"], (TEST.len * PLACES) as f64, "{what}");
    for name in want.weights.names() {
        let of = |left: &Left| left.weights.get(name).unwrap().1.to_vec();
        assert!(of(got).iter().zip(&of(want)).all(|(a, b)| near((*a).into(), (*b).into())), "{what}: {name}");
    }
}

#[test]
fn labels_count_as_in_one_batch() {
    for weights in [&[][..], &[0.5, 2.0, 0.0, 1.0, 3.0]] {
        let loss = weighted(weights);
        let want = plainly(&loss);
        assert_eq!(want.losses.len(), 8);
        in_all_ways(&trainer(&loss), &want);
    }
}

#[test]
fn what_a_loss_of_ones_own_says_counts_does_so_as_in_one_batch() {
    let counts = |labels: &Tensor| labels.ne(PAD as f64);
    let loss = Loss::own_by_weight(
        move |scores, labels| {
            let [scores, labels] = &Loss::rows(scores, labels);
            let zero = Tensor::scalar(scores.device(), 0.0, DType::I64);
            let some = counts(labels).where_cond(labels, &zero);
            let told = scores.log_softmax(1).gather(1, &some.unsqueeze(1)).squeeze(1);
            counts(labels).where_cond(&told, &zero.cast(DType::F32)).sum_all().neg()
        },
        move |labels| counts(labels).cast(DType::F32).sum_all(),
    );
    let mut want = plainly(&weighted(&[]));
    // It doesn't say which labels these are, nor that they are of classes.
    want.evaluation.accuracy = None;
    want.evaluation.metrics.retain(|name, _| name == "labels");
    let metrics = metrics().split_off(3);
    in_all_ways(&Trainer { loss, metrics, ..trainer(&weighted(&[])) }, &want);
}

/// However the samples are shared out, it comes to the same.
#[track_caller]
fn in_all_ways(usual: &Trainer, want: &Left) {
    // The means of parts would be others.
    let halves = of_ranks(2, &Trainer { batch_size: STEP / 2, ..usual.clone() });
    assert_alike("two ranks", &halves, want);
    assert_alike("a rank", &of_ranks(1, usual), want);
    let several = Trainer { batch_size: 2, accumulate: 3, ..usual.clone() };
    assert_alike("two ranks, three batches each", &of_ranks(2, &several), want);
    let sharded = Trainer { batch_size: STEP / 2, sharded: Some(FsdpConfig::default()), ..usual.clone() };
    assert_alike("two ranks with half of it each", &of_ranks(2, &sharded), want);
    let model = Arc::new(|| Box::new(net()) as Box<dyn Module>);
    let (others, of_model) = (vec![Device::cpu(1); 2], Arc::clone(&model));
    let local = LocalConfig::DataParallel(DataParallelConfig { others, model: of_model });
    assert_alike("three copies", &of_ranks(1, &Trainer { local, ..usual.clone() }), want);
    let mesh = ModelParallelConfig {
        mesh: vec![(Axis::Tensor, 2)],
        bounds: Vec::new(),
        model,
        plan: Some(Plan::new(Between::Whole).with("0", UP).with("2", Style::Inputs { dim: 1 })),
        stages: None,
        ddp: DdpConfig::default(),
        sharded: None,
        replays: false,
    };
    let halves = Trainer { mesh: Some(mesh.clone()), batch_size: STEP / 2, ..usual.clone() };
    assert_alike("two halves of each matrix, twice", &of_ranks(4, &halves), want);
    let kind = ScheduleKind::OneFOneB;
    let stages = StagesConfig { blocks: vec![0..2, 2..3], kind, micro_batches: 3 };
    let mesh =
        ModelParallelConfig { mesh: vec![(Axis::Pipeline, 2)], plan: None, stages: Some(stages), ..mesh };
    let stages = Trainer { mesh: Some(mesh), batch_size: STEP / 2, ..usual.clone() };
    assert_alike("two stages, twice", &of_ranks(4, &stages), want);
    // Shards have the same bits on any number of ranks.
    let shards = Trainer { batch_size: STEP / 4, logical_shards: Some(4), ..usual.clone() };
    let [one, two] = [1, 2].map(|ranks| of_ranks(ranks, &shards));
    assert_alike("four shards", &one, want);
    assert_eq!(one.losses, two.losses);
    assert!(one.weights == two.weights, "not the same bits");
    // Where gradients are cut, it's those of the mean that was asked for.
    let clip = Clip { norm: Some(0.1), ..Clip::default() };
    let cut = Trainer { clip, ..usual.clone() };
    let want = of_ranks(1, &cut);
    assert_alike("cut", &of_ranks(2, &Trainer { batch_size: STEP / 2, ..cut }), &want);
}

/// Without a mean by what labels count, short sequences teach less than long ones.
#[test]
fn a_mean_over_all_labels_is_left_as_it_is() {
    let loss = WeightedCrossEntropy { mean: MeanOver::All, ..weighted(&[]) };
    let want = plainly(&loss);
    let usual = trainer(&loss);
    assert_alike("two ranks", &of_ranks(2, &Trainer { batch_size: STEP / 2, ..usual }), &want);
    assert!(want.losses[0] < plainly(&weighted(&[])).losses[0]);
}

#[test]
fn a_step_without_a_label_that_counts_is_named() {
    let loss = weighted(&[]);
    let data = || Arc::new(Sequences { len: 24, unlabelled: 12 });
    for ranks in [1, 2] {
        let batch_size = STEP / ranks;
        let fit = |worker: &Worker, on_nan: OnNan| {
            let trainer = Trainer { on_nan, batch_size, epochs: 1, metrics: Vec::new(), ..trainer(&loss) };
            trainer.fit(worker, &mut net(), Sgd::new(LR), data(), None, &mut Quiet)
        };
        let told = Mutex::new(Vec::new());
        let ended = spawn(ranks, |worker| {
            fit(&worker, OnNan::Loss)
                .map(drop)
                .inspect_err(|error| told.lock().unwrap().push(error.to_string()))
        });
        assert!(matches!(ended, Err(Error::NoLabelCounts { step: 1 })), "{ended:?}");
        let told = told.into_inner().unwrap();
        assert!(told.iter().all(|error| error.contains("no label counts of those of step 1: ")), "{told:?}");
        spawn(ranks, |worker| {
            let trained = fit(&worker, OnNan::Ignore)?;
            assert!(
                trained.state.progress.step == 2 && trained.parameters.first_value_not_finite().is_none()
            );
            Ok(())
        })
        .unwrap();
    }
}
