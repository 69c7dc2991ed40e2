//! The trainer: what it says of things that can't be trained, and that a run can go on from wherever another one was.

use phalanx::checkpoint::CheckpointConfig;
use phalanx::data::{BatchBuffers, Dataset, LinearRegression, Places, Silent, Target, View, open};
use phalanx::nn::models::MnistNet;
use phalanx::nn::optim::{Clip, Optimizer, Sgd};
use phalanx::nn::{
    Average, BatchNorm1d, Curve, Linear, Loss, Metric, OneCycle, Parameters, Plateau, Plateaued, Schedule,
    Sequential, Warmup, WeightedCrossEntropy, Weights,
};
use phalanx::{Event, Observer, Progress, Quiet, State, Trained, Trainer, Watch, Worker, spawn};
use std::sync::{Arc, Mutex};

struct Empty;

impl Dataset for Empty {
    fn len(&self) -> usize {
        0
    }

    fn input_dims(&self) -> &[usize] {
        &[1]
    }

    fn target(&self) -> Target<'_> {
        Target::Values(&[1])
    }

    fn batch(&self, _: &[usize], _: &mut BatchBuffers) -> phalanx::data::Result<()> {
        unreachable!("there is no sample to ask for")
    }
}

#[test]
fn data_sets_without_samples_are_named() {
    let points: Arc<dyn Dataset> = Arc::new(LinearRegression::new(4));
    let trainer = Trainer { loss: Loss::Mse, ..Trainer::default() };
    let empty: Arc<dyn Dataset> = Arc::new(Empty);
    for (train, test, what) in [(&empty, &points, "train"), (&points, &empty, "test")] {
        let (train, test) = (Arc::clone(train), Some(Arc::clone(test)));
        let worker = Worker::alone(1);
        let result = trainer.fit(&worker, &mut Linear::new(1, 1), Sgd::new(0.1), train, test, &mut Quiet);
        let error = result.err().expect("nothing to go by").to_string();
        assert!(error.contains(&format!("no samples to {what} on")), "{error}");
    }
    let (worker, mut model) = (Worker::alone(1), Linear::new(1, 1));
    let parameters = Parameters::build(&mut model, worker.device(), 0);
    let error = trainer.evaluate(&worker, &model, &parameters, empty).unwrap_err().to_string();
    assert!(error.contains("no samples to test on"), "{error}");
}

#[test]
fn settings_that_cannot_be_are_named() {
    let refused = |trainer: Trainer| {
        let points: Arc<dyn Dataset> = Arc::new(LinearRegression::new(4));
        let (worker, mut model) = (Worker::alone(1), Linear::new(1, 1));
        let test = Some(points.clone());
        let result = trainer.fit(&worker, &mut model, Sgd::new(0.1), points, test, &mut Quiet);
        result.err().expect("it can't be").to_string()
    };
    let usual = || Trainer { loss: Loss::Mse, ..Trainer::default() };
    let clip = |norm, value| Trainer { clip: Clip { norm, value }, ..usual() };
    let warmup = Warmup { epochs: f64::NAN, ..Warmup::default() };
    let late = Schedule { warmup, ..Schedule::default() };
    let smoothed = Loss::CrossEntropy { label_smoothing: 7.0 };
    let weighted = |label_smoothing, weights: &[f32]| {
        let loss = WeightedCrossEntropy { label_smoothing, weights: weights.to_vec(), ..Default::default() };
        Trainer { loss: Loss::WeightedCrossEntropy(loss), ..usual() }
    };
    let metrics = |names: &[&str]| {
        let named = |name: &&str| Metric::mean_absolute_error().named(name);
        Trainer { metrics: names.iter().map(named).collect(), ..usual() }
    };
    let rows = [
        (Trainer { batch_size: 0, ..usual() }, "batch_size is 0: must be at least 1"),
        (Trainer { accumulate: 0, ..usual() }, "accumulate is 0: must be at least 1"),
        (Trainer { logical_shards: Some(0), ..usual() }, "logical_shards is 0: must be at least 1, or None"),
        (Trainer { patience: Some(0), ..usual() }, "patience is 0: must be at least 1, or None"),
        (Trainer { ema: Some(1.0), ..usual() }, "ema is 1.0: must be at least 0 and below 1"),
        (Trainer { ema: Some(f64::NAN), ..usual() }, "ema is NaN: must be at least 0 and below 1"),
        (clip(Some(-1.0), None), "clip.norm is -1.0: must be above 0"),
        (clip(None, Some(f64::NAN)), "clip.value is NaN: must be above 0"),
        (Trainer { schedule: late, ..usual() }, "schedule.warmup.epochs is NaN: must be 0 or more"),
        (
            Trainer { loss: smoothed, ..usual() },
            "loss.label_smoothing is 7.0: must be at least 0 and below 1",
        ),
        (weighted(7.0, &[]), "loss.label_smoothing is 7.0: must be at least 0 and below 1"),
        (
            metrics(&["mine", "mine"]),
            r#"metrics is ["mine", "mine"]: must be names, each once, and neither loss nor accuracy"#,
        ),
        (
            metrics(&["loss"]),
            r#"metrics is ["loss"]: must be names, each once, and neither loss nor accuracy"#,
        ),
        (
            Trainer { watch: Watch::Metric("yours".into()), ..metrics(&["mine"]) },
            r#"watch is "yours" beside metrics ["mine"]: must be the name of one of these"#,
        ),
        (weighted(0.0, &[1.0, -1.0]), "loss.weights is [1.0, -1.0]: must be numbers of at least 0"),
    ];
    for (trainer, want) in rows {
        assert_eq!(refused(trainer), want);
    }
}

#[test]
fn ranks_with_other_optimizers_are_told_so() {
    let points: Arc<dyn Dataset> = Arc::new(LinearRegression::new(8));
    let trainer = Trainer { loss: Loss::Mse, batch_size: 2, ..Trainer::default() };
    let fit = |worker: Worker| {
        let lr = 0.1 * f64::from(1 + worker.group().rank().0);
        let points = Arc::clone(&points);
        trainer.fit(&worker, &mut Linear::new(1, 1), Sgd::new(lr), points, None, &mut Quiet).map(drop)
    };
    let error = spawn(2, fit).unwrap_err().to_string();
    assert!(error.contains("optimizer is Sgd") && error.contains("lr: 0.2"), "{error}");
}

#[test]
fn a_rank_that_panics_says_why() {
    let error = spawn(1, |_| panic!("no {}", "number")).unwrap_err().to_string();
    assert_eq!(error, "rank 0 panicked: no number");
}

/// A sample whose target is shares of two classes.
struct Soft;

impl Dataset for Soft {
    fn len(&self) -> usize {
        4
    }

    fn input_dims(&self) -> &[usize] {
        &[1]
    }

    fn target(&self) -> Target<'_> {
        Target::Values(&[2])
    }

    fn batch(&self, _: &[usize], into: &mut BatchBuffers) -> phalanx::data::Result<()> {
        into.inputs().fill(1.0);
        into.values().fill(0.5);
        Ok(())
    }
}

#[test]
fn shares_of_classes_have_a_loss_and_no_accuracy() {
    let soft: Arc<dyn Dataset> = Arc::new(Soft);
    let trainer = Trainer { loss: Loss::CrossEntropy { label_smoothing: 0.0 }, ..Trainer::default() };
    let fit = |trainer: &Trainer, told: &mut Told| {
        let (worker, test) = (Worker::alone(1), Some(Arc::clone(&soft)));
        trainer.fit(&worker, &mut Linear::new(1, 2), Sgd::new(0.1), Arc::clone(&soft), test, told).map(drop)
    };
    let mut told = Told::default();
    fit(&trainer, &mut told).unwrap();
    let last = told.0.last().unwrap();
    assert!(last.starts_with("epoch 0: Some(") && last.ends_with("None"), "{last}");
    let watching = Trainer { watch: Watch::Accuracy, ..trainer };
    assert!(fit(&watching, &mut told).unwrap_err().to_string().contains("accuracy"));
}

/// Keeps what can't differ between two runs that are the same: all but times.
#[derive(Default)]
struct Told(Vec<String>);

impl Observer for Told {
    fn event(&mut self, event: &Event) {
        match event {
            Event::Step { step, epoch, loss, samples, lr, .. } => {
                self.0.push(format!("step {step} of epoch {epoch}: {loss:?} after {samples} at {lr:?}"));
            }
            Event::Epoch { epoch, test, .. } => {
                self.0.push(format!("epoch {epoch}: {:?} {:?}", test.test_loss, test.test_accuracy));
            }
            _ => {}
        }
    }
}

/// The digits in batches of 200: ten steps an epoch.
fn digits(trainer: &Trainer, saved: Option<(&Weights, State)>, told: &mut Told) -> Trained {
    let worker = Worker::alone(1);
    let mut net = MnistNet::new(0.5);
    let parameters = Parameters::build(&mut net, worker.device(), trainer.seed);
    let state = match saved {
        Some((weights, state)) => {
            parameters.load(weights).unwrap();
            state
        }
        None => State::start(SGD).unwrap(),
    };
    let data = open("mnist-mini", View::default(), &Places::from_env(None), &mut Silent).unwrap();
    trainer.resume(&worker, &net, parameters, state, data.train, Some(data.test), told).unwrap()
}

const SGD: Sgd = Sgd { momentum: 0.9, ..Sgd::new(0.05) };

/// Everything switched on that remembers something.
fn remembering() -> Trainer {
    // Never good enough: every epoch but the first lowers the rate.
    let plateau = Plateau { patience: 0, threshold: 0.99, gamma: 0.5, ..Plateau::default() };
    Trainer {
        schedule: Curve::OneCycle(OneCycle::default()).into(),
        plateau: Some(plateau),
        ema: Some(0.9),
        ..Trainer::default()
    }
}

#[test]
fn a_run_goes_on_from_where_another_was_and_takes_the_same_steps() {
    let whole = Trainer { epochs: 3, batch_size: 200, ..remembering() };
    let mut all = Told::default();
    let Trained { parameters, state: mut end, .. } = digits(&whole, None, &mut all);
    let wanted = parameters.to_weights();
    let mean = end.average.as_mut().unwrap().to_weights(&parameters);
    assert!(mean != wanted && end.progress.best.is_some());
    assert_eq!((end.progress.step, end.progress.epoch, end.progress.samples), (30, 3, 6000));
    assert_ne!(end.progress.plateau, Plateaued::default());
    // Before the first step, within an epoch, at its end, within the last.
    for made in [0, 7, 10, 25] {
        let mut told = Told::default();
        let first = digits(&Trainer { steps: Some(made), ..whole.clone() }, None, &mut told);
        // The evaluation of an epoch that was cut short is none of the whole run.
        told.0.retain(|line| all.0.contains(line));
        let State { progress, optimizer, average } = first.state;
        let (weights, parameters) = (first.parameters.to_weights(), first.parameters);
        let optimizer = Optimizer::resume(SGD, &parameters, &optimizer.to_weights(&parameters)).unwrap();
        let saved = average.map(|average| average.to_weights(&parameters));
        let average = saved.map(|saved| Average::resume(&parameters, &saved).unwrap());
        let state = State { progress, optimizer, average };
        let mut rest = digits(&whole, Some((&weights, state)), &mut told);
        assert_eq!(rest.parameters.to_weights(), wanted, "after {made} steps");
        assert_eq!(told.0, all.0, "after {made} steps");
        assert_eq!(
            rest.state.average.as_mut().unwrap().to_weights(&rest.parameters),
            mean,
            "after {made} steps"
        );
        assert_eq!(rest.state.progress, end.progress, "after {made} steps");
    }
}

#[test]
fn every_step_has_the_learning_rate_of_the_schedule() {
    let warmup = Warmup { epochs: 0.5, from: 0.0, ..Warmup::default() };
    let curve = Curve::Step { size: 1.0, gamma: 0.1 };
    let schedule = Schedule { warmup, ..curve.into() };
    let trainer = Trainer { epochs: 2, batch_size: 200, schedule, ..Trainer::default() };
    let mut told = Told::default();
    digits(&trainer, None, &mut told);
    let rates: Vec<f64> =
        told.0.iter().filter_map(|line| line.split_once(" at ").map(|(_, lr)| lr.parse().unwrap())).collect();
    let wanted = [0.0, 0.01, 0.02, 0.03, 0.04].into_iter().chain([0.05; 10]).chain([0.005; 5]);
    for (got, want) in rates.iter().zip(wanted) {
        assert!((got - want).abs() < 1e-12, "{rates:?}");
    }
    assert_eq!(rates.len(), 20);
}

#[test]
fn what_goes_by_evaluations_needs_test_samples() {
    let trainer = Trainer { loss: Loss::Mse, plateau: Some(Plateau::default()), ..Trainer::default() };
    let points = Arc::new(LinearRegression::new(4));
    let result =
        trainer.fit(&Worker::alone(1), &mut Linear::new(1, 1), Sgd::new(0.1), points, None, &mut Quiet);
    let error = result.err().expect("nothing to judge").to_string();
    assert!(error.contains("a schedule that follows the test loss needs test samples"), "{error}");
}

#[test]
fn the_weights_that_did_best_are_the_ones_that_are_kept() {
    let folder = tempfile::tempdir().unwrap();
    let best_file = Some(folder.path().join("made/for/it/best.safetensors"));
    // So fast that it gets worse again.
    let curve = Curve::MultiStep { milestones: vec![1.0], gamma: 10.0 };
    for ema in [None, Some(0.5)] {
        let trainer = Trainer {
            ema,
            best_file: best_file.clone(),
            patience: Some(2),
            epochs: 20,
            batch_size: 200,
            schedule: curve.clone().into(),
            ..Trainer::default()
        };
        let mut told = Told::default();
        let trained = digits(&trainer, None, &mut told);
        let best = trained.state.progress.best.unwrap();
        assert_eq!(
            (best.epoch, trained.state.progress.epoch, trained.stopped_early),
            (0, 3, true),
            "{:?}",
            told.0
        );
        assert!(trained.evaluation.unwrap().loss > best.evaluation.loss);
        let weights = Weights::read(best_file.as_ref().unwrap()).unwrap();
        // What was kept does as well as it did.
        let mut again = Told::default();
        let state = State {
            progress: Progress { step_in_epoch: 10, ..Progress::default() },
            ..State::start(SGD).unwrap()
        };
        let evaluated = digits(&Trainer { epochs: 0, ..trainer }, Some((&weights, state)), &mut again);
        assert_eq!(evaluated.evaluation.unwrap(), best.evaluation);
    }
}

#[test]
fn what_is_watched_and_is_no_number_is_told() {
    let metrics = vec![Metric::own("none", 1, |y, _| y.sum_all().reshape([1]), |_| f64::NEG_INFINITY)];
    let watch = Watch::Metric("none".into());
    let trainer =
        Trainer { loss: Loss::Mse, metrics, watch, patience: Some(2), epochs: 9, ..Trainer::default() };
    let points: Arc<dyn Dataset> = Arc::new(LinearRegression::new(4));
    let (worker, mut model, mut told) = (Worker::alone(1), Linear::new(1, 1), Notes::default());
    let (train, test) = (points.clone(), Some(points));
    let trained = trainer.fit(&worker, &mut model, Sgd::new(0.01), train, test, &mut told).unwrap();
    assert!(trained.stopped_early && trained.state.progress.best.is_none());
    let want = "the test none, which is watched, is no number: this epoch can't be the best";
    assert_eq!(told.0, [want, want]);
}

#[derive(Default)]
struct Notes(Vec<String>);

impl Observer for Notes {
    fn event(&mut self, event: &Event) {
        if let Event::Note { message } = event {
            self.0.push(message.clone());
        }
    }
}

/// Points of which the sixth is spoilt, in its input or its target.
struct Spoilt {
    /// Of its target, or of its input; of neither.
    of: Option<bool>,
}

impl Dataset for Spoilt {
    fn len(&self) -> usize {
        12
    }

    fn input_dims(&self) -> &[usize] {
        &[3]
    }

    fn target(&self) -> Target<'_> {
        Target::Values(&[1])
    }

    fn batch(&self, indices: &[usize], into: &mut BatchBuffers) -> phalanx::data::Result<()> {
        let batch = into.split();
        let rows = batch.inputs.chunks_exact_mut(3).zip(batch.values);
        for (&index, (input, value)) in indices.iter().zip(rows) {
            let is_spoilt = |in_target: bool| self.of == Some(in_target) && index == 5;
            input.fill(0.1);
            input[2] = if is_spoilt(false) { f32::NAN } else { 0.2 };
            *value = if is_spoilt(true) { f32::INFINITY } else { 1.0 };
        }
        Ok(())
    }
}

#[test]
fn the_sample_whose_numbers_spoil_a_loss_is_named() {
    let trainer = Trainer { loss: Loss::Mse, batch_size: 2, ..Trainer::default() };
    for (in_target, want) in [
        (false, "the input of sample 5 is NaN at element 2"),
        (true, "the target of sample 5 is inf at element 0"),
    ] {
        for ranks in [1, 2] {
            let told = Mutex::new(Vec::new());
            let fit = |worker: Worker| {
                let data = Arc::new(Spoilt { of: Some(in_target) });
                let fitted =
                    trainer.fit(&worker, &mut Linear::new(3, 1), Sgd::new(0.1), data, None, &mut Quiet);
                fitted.map(drop).inspect_err(|error| told.lock().unwrap().push(error.to_string()))
            };
            spawn(ranks, fit).unwrap_err();
            let told = told.into_inner().unwrap();
            let named = |error: &String| error.contains(want) && error.contains("mend such samples");
            assert!(told.iter().any(named), "{told:?}");
        }
    }
}

/// On any number of ranks, with the values of the first one; and nothing of them changes.
#[test]
fn a_model_is_judged_as_it_is() {
    let trainer =
        Trainer { loss: Loss::Mse, metrics: vec![Metric::mean_absolute_error()], ..Trainer::default() };
    let of_rank = |worker: &Worker, seed: u64| {
        let mut model = Linear::new(1, 1);
        let parameters = Parameters::build(&mut model, worker.device(), seed);
        let before = parameters.to_weights();
        let found =
            trainer.evaluate(worker, &model, &parameters, Arc::new(LinearRegression::new(9))).unwrap();
        assert!(!worker.is_first() || parameters.to_weights() == before);
        found
    };
    let alone = of_rank(&Worker::alone(1), 7);
    assert!(alone.metrics["mean_absolute_error"] > 0.0 && alone.accuracy.is_none());
    spawn(3, |worker| {
        let found = of_rank(&worker, 7 + u64::from(worker.group().rank().0));
        assert!((found.loss - alone.loss).abs() < 1e-6 * alone.loss, "{found:?}, not {alone:?}");
        Ok(())
    })
    .unwrap();
}

/// What is told of batches that can't be trained on doesn't matter where nothing is.
#[test]
fn any_number_of_samples_can_be_judged() {
    let net = || Sequential::new().then(Linear::new(3, 4)).then(BatchNorm1d::new(4)).then(Linear::new(4, 1));
    let trainer = Trainer { loss: Loss::Mse, batch_size: 11, drop_last: true, ..Trainer::default() };
    for batch_size in [11, 64] {
        let (worker, mut model) = (Worker::alone(1), net());
        let parameters = Parameters::build(&mut model, worker.device(), 0);
        let trainer = Trainer { batch_size, ..trainer.clone() };
        let found = trainer.evaluate(&worker, &model, &parameters, Arc::new(Spoilt { of: None })).unwrap();
        assert!(found.loss.is_finite());
    }
}

#[test]
fn a_run_that_has_no_step_left_is_judged_when_it_is_gone_on_with() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = CheckpointConfig { resume: true, ..CheckpointConfig::new(folder.path().to_owned()) };
    let trainer = Trainer { batch_size: 200, checkpoint: Some(checkpoint), ..Trainer::default() };
    let [first, again] = [(); 2].map(|()| digits(&trainer, None, &mut Told::default()));
    assert_eq!((first.state.progress.step, again.state.progress.step), (10, 10));
    assert!(first.evaluation.is_some() && again.evaluation == first.evaluation);
}

#[test]
fn an_epoch_that_was_trained_and_not_evaluated_is_evaluated_first() {
    let trainer = Trainer { batch_size: 200, ..Trainer::default() };
    let mut told = Told::default();
    let Trained { parameters, mut state, .. } = digits(&trainer, None, &mut told);
    state.progress = Progress { epoch: 0, step_in_epoch: 10, ..state.progress };
    let mut again = Told::default();
    digits(&trainer, Some((&parameters.to_weights(), state)), &mut again);
    assert_eq!(again.0[..], told.0[10..]);
}
