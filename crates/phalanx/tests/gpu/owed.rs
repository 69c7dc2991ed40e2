//! Steps that a GPU is given before anyone has looked at the losses of those before.

use crate::fake::fake;
use crate::{RULE, Told, gpu};
use phalanx::checkpoint::{CheckpointConfig, Every};
use phalanx::comm::Group;
use phalanx::data::{BatchBuffers, Dataset, Target};
use phalanx::nn::optim::Clip;
use phalanx::nn::{Linear, Loss, Parameters};
use phalanx::{Event, Observer, OnNan, State, Trainer, Worker};
use phalanx_fake_cuda::FakeCuda;
use std::sync::Arc;

/// So many samples of one number, of which one may be another one than it should be.
struct Samples(usize, Option<(usize, f32)>);

impl Dataset for Samples {
    fn len(&self) -> usize {
        self.0
    }

    fn input_dims(&self) -> &[usize] {
        &[1]
    }

    fn target(&self) -> Target<'_> {
        Target::Values(&[1])
    }

    fn batch(&self, samples: &[usize], into: &mut BatchBuffers) -> phalanx::data::Result<()> {
        for (i, sample) in samples.iter().enumerate() {
            let other = self.1.filter(|(at, _)| at == sample);
            into.inputs()[i] = other.map_or(*sample as f32 / 16.0, |(_, number)| number);
        }
        into.values().fill(1.0);
        Ok(())
    }
}

/// Steps of two samples each.
fn trainer() -> Trainer {
    Trainer { loss: Loss::Mse, batch_size: 2, shuffle: false, ..Trainer::default() }
}

/// The loss of each step, and how many steps more than that the optimizer was given when it was told.
struct Ahead<'a>(&'a FakeCuda, Vec<f64>, Vec<usize>);

impl Observer for Ahead<'_> {
    fn event(&mut self, event: &Event) {
        if let Event::Step { step, loss, ms, .. } = event {
            assert!(*ms > 0.0);
            let moved = self.0.log().iter().filter(|line| *line == "launch sgd_momentum").count();
            self.1.push(*loss);
            self.2.push(moved - *step as usize - 1);
        }
    }
}

/// A run on these samples: how it ended, and the weights that it left.
fn run(
    fake: &FakeCuda,
    trainer: &Trainer,
    samples: Samples,
    told: &mut dyn Observer,
) -> (Result<(), String>, Vec<f32>) {
    let worker = Worker::with_device(Group::solo(), gpu(fake));
    let mut net = Linear::new(1, 1);
    let parameters = Parameters::build(&mut net, worker.device(), 3);
    let values = parameters.values().clone();
    let state = State::start(RULE).unwrap();
    let end = trainer.resume(&worker, &net, parameters, state, Arc::new(samples), None, told);
    (end.map(drop).map_err(|error| error.to_string()), values.read_flat::<f32>())
}

#[test]
fn a_gpu_is_given_a_step_before_anyone_waits_for_the_loss_of_the_one_before() {
    let (clip, looks) = (Clip { norm: Some(1e9), value: None }, Trainer { on_nan: OnNan::Stop, ..trainer() });
    let mut losses: Vec<Vec<f64>> = Vec::new();
    for (seed, trainer, want) in [
        (1, trainer(), [1, 1, 1, 1, 1, 1, 1, 0]),
        (5, Trainer { clip, ..trainer() }, [1, 1, 1, 1, 1, 1, 1, 0]),
        (2, Trainer { on_nan: OnNan::Ignore, ..trainer() }, [1, 1, 1, 1, 1, 1, 1, 0]),
        // The second step is the one that is recorded, which waits for its loss.
        (3, Trainer { graphs: true, ..trainer() }, [0, 0, 1, 1, 1, 1, 1, 0]),
        // All gradients are looked at.
        (4, looks, [0; 8]),
    ] {
        let Some(fake) = fake() else { return };
        fake.seed(seed);
        let mut told = Ahead(&fake, Vec::new(), Vec::new());
        run(&fake, &trainer, Samples(16, None), &mut told).0.unwrap();
        assert_eq!(told.2, want, "seed {seed}");
        losses.push(told.1);
        assert_eq!(fake.damage(), [""; 0]);
    }
    losses.dedup();
    assert_eq!(losses.len(), 1, "{losses:?}");
    let Some(fake) = fake() else { return };
    let mut told = Ahead(&fake, Vec::new(), Vec::new());
    run(&fake, &Trainer { accumulate: 2, ..trainer() }, Samples(16, None), &mut told).0.unwrap();
    assert_eq!(told.2, [1, 1, 1, 0]);
}

/// The norm of the gradients of each step.
struct Norms(Vec<Option<f64>>);

impl Observer for Norms {
    fn event(&mut self, event: &Event) {
        if let Event::Step { grad_norm, .. } = event {
            self.0.push(*grad_norm);
        }
    }
}

#[test]
fn gradients_are_cut_by_a_norm_that_nobody_has_seen_as_on_a_cpu() {
    let (clip, mut norms) = (Clip { norm: Some(0.2), value: None }, Norms(Vec::new()));
    let worker = Worker::alone(1);
    let mut net = Linear::new(1, 1);
    let parameters = Parameters::build(&mut net, worker.device(), 3);
    let values = parameters.values().clone();
    let (plain, state) = (Trainer { clip, ..trainer() }, State::start(RULE).unwrap());
    plain.resume(&worker, &net, parameters, state, Arc::new(Samples(16, None)), None, &mut norms).unwrap();
    let want = values.read_flat::<f32>();
    let is_cut = |norm: &Option<f64>| norm.is_some_and(|norm| norm > 0.2);
    assert!(norms.0.iter().filter(|norm| is_cut(norm)).count() > 3, "{:?}", norms.0);
    for (seed, graphs, accumulate) in [(1, false, 1), (2, true, 1), (3, true, 2)] {
        let Some(fake) = fake() else { return };
        fake.seed(seed);
        let mut on_gpu = Norms(Vec::new());
        let trainer = Trainer { batch_size: 2 / accumulate, accumulate, graphs, ..plain.clone() };
        let (end, weights) = run(&fake, &trainer, Samples(16, None), &mut on_gpu);
        end.unwrap();
        let near = |got: f64, want: f64| (got - want).abs() <= 1e-5 * want.abs();
        for (got, want) in on_gpu.0.iter().zip(&norms.0) {
            assert!(near(got.unwrap(), want.unwrap()), "{seed}: {:?}, not {:?}", on_gpu.0, norms.0);
        }
        assert_eq!(on_gpu.0.len(), 8);
        for (got, want) in weights.iter().zip(&want) {
            assert!(near((*got).into(), (*want).into()), "{seed}: {weights:?}, not {want:?}");
        }
        assert_eq!(fake.damage(), [""; 0]);
    }
}

#[test]
fn a_step_behind_a_norm_that_is_none_leaves_weights_alone() {
    let Some(fake) = fake() else { return };
    let clip = Clip { norm: Some(1.0), value: None };
    for (seed, graphs, accumulate) in [(1, false, 1), (2, true, 1), (3, false, 2)] {
        fake.seed(seed);
        let trainer = Trainer { clip, graphs, accumulate, batch_size: 2 / accumulate, ..trainer() };
        let end = |samples: Samples, trainer: &Trainer| {
            let mut told = Told::default();
            let (end, weights) = run(&fake, trainer, samples, &mut told);
            (end, weights, told.losses)
        };
        for step in [2, 5] {
            let until = Trainer { steps: Some(step as u64), ..trainer.clone() };
            let (wanted, want_weights, told) = end(Samples(16, None), &until);
            wanted.unwrap();
            // Large enough for a gradient to be infinite where the loss still is a number.
            let large = 1.8e19 / want_weights[0].abs();
            let (error, weights, losses) = end(Samples(16, Some((2 * step, large))), &trainer);
            let error = error.unwrap_err();
            let want =
                format!("a gradient is no number (train.on_nan=stop says which), at step {step}\nhint: ");
            assert!(error.starts_with(&want), "{error}");
            assert!(
                weights == want_weights,
                "step {step}, graphs {graphs}: {weights:?}, not {want_weights:?}"
            );
            assert_eq!(losses, told, "step {step}");
        }
    }
    assert_eq!(fake.damage(), [""; 0]);
}

#[test]
fn a_step_behind_a_loss_that_is_none_was_given_and_leaves_weights_alone() {
    let Some(fake) = fake() else { return };
    for (seed, accumulate, graphs) in
        [(1, 1, false), (2, 1, true), (3, 2, false), (4, 2, true), (5, 5, true), (6, 5, false)]
    {
        fake.seed(seed);
        let folder = tempfile::tempdir().unwrap();
        let checkpoint =
            CheckpointConfig { every: Every::Steps(3), ..CheckpointConfig::new(folder.path().join("c")) };
        let trainer = Trainer { accumulate, graphs, epochs: 3, checkpoint: Some(checkpoint), ..trainer() };
        // In the first pass of a step, or in its second.
        // Eight steps, or four of five passes.
        let len = if accumulate == 5 { 40 } else { 16 };
        let samples: &[usize] = if accumulate == 5 { &[20, 22, 29, 30] } else { &[2, 4, 6, 9, 14] };
        for &sample in samples {
            let step = (sample / (2 * accumulate)) as u64;
            let what = format!("sample {sample}, {accumulate} passes, graphs {graphs}");
            let (mut told, mut want) = (Told::default(), Told::default());
            let (end, weights) = run(&fake, &trainer, Samples(len, Some((sample, f32::NAN))), &mut told);
            let error = end.unwrap_err();
            assert!(error.contains(&format!("the loss is NaN at step {step}")), "{what}: {error}");
            // Gradients tell where only as long as no other step's have come, as before a checkpoint.
            if let Some(is_own) =
                [(4, true), (6, false)].into_iter().find_map(|(at, own)| (at == sample).then_some(own))
                && accumulate == 1
            {
                assert_eq!(error.contains("where the gradient of weight"), is_own, "{what}: {error}");
            }
            if step > 0 {
                let until = Trainer { steps: Some(step), ..trainer.clone() };
                let (end, want_weights) = run(&fake, &until, Samples(len, None), &mut want);
                end.unwrap();
                assert!(weights == want_weights, "{what}: {weights:?}, not {want_weights:?}");
            }
            assert_eq!(told.losses, want.losses, "{what}");
        }
        // Who wants it so has steps made whatever the loss is.
        let ignored = Trainer { on_nan: OnNan::Ignore, checkpoint: None, ..trainer };
        let (end, weights) = run(&fake, &ignored, Samples(16, Some((6, f32::NAN))), &mut Told::default());
        end.unwrap();
        assert!(weights[0].is_nan());
    }
    assert_eq!(fake.damage(), [""; 0]);
}
