//! What a step is made of: several batches, gradients that are cut, numbers that are none.

use phalanx::data::{LinearRegression, Places, Silent, View, open};
use phalanx::nn::optim::{Clip, Sgd};
use phalanx::nn::{
    Conv2d, ConvTranspose2d, Ctx, GroupNorm, Gru, Linear, Loss, Lstm, Module, Parameters, RecurrentConfig,
    Relu, Sequential, Weights, freeze_all, models::MnistNet, module,
};
use phalanx::{Event, Observer, OnNan, Quiet, State, Trained, Trainer, Worker, spawn};
use std::sync::{Arc, Mutex};

const SGD: Sgd = Sgd { momentum: 0.9, ..Sgd::new(0.05) };

/// The losses and last values of a run of so many workers over the first digits, dropout on.
fn of_workers(workers: usize, trainer: &Trainer) -> (Vec<f64>, Weights) {
    of_network(workers, trainer, || MnistNet::new(0.5))
}

/// The same of another network.
fn of_network<M: Module>(
    workers: usize,
    trainer: &Trainer,
    network: impl Fn() -> M + Sync,
) -> (Vec<f64>, Weights) {
    struct Losses<'a>(&'a Mutex<Vec<f64>>);
    impl Observer for Losses<'_> {
        fn event(&mut self, event: &Event) {
            if let Event::Step { loss, .. } = event {
                self.0.lock().unwrap().push(*loss);
            }
        }
    }
    let (losses, weights) = (Mutex::default(), Mutex::default());
    spawn(workers, |worker| {
        let data = open("mnist-mini", View::default(), &Places::from_env(None), &mut Silent).unwrap();
        let mut net = network();
        let trained = trainer.fit(&worker, &mut net, SGD, data.train, None, &mut Losses(&losses))?;
        if worker.is_first() {
            *weights.lock().unwrap() = trained.parameters.to_weights();
        }
        Ok(())
    })
    .unwrap();
    (losses.into_inner().unwrap(), weights.into_inner().unwrap())
}

#[test]
fn a_step_of_several_batches_is_that_of_a_large_one() {
    // 2000 samples are eight steps of 240 and one of 80, whose last batches are smaller or missing.
    let large = Trainer { batch_size: 240, epochs: 2, ..Trainer::default() };
    let (wanted, _) = of_workers(1, &large);
    assert_eq!(wanted.len(), 18);
    for (workers, accumulate, batch_size) in [(1, 4, 60), (1, 5, 48), (2, 2, 60), (3, 4, 20)] {
        let (losses, _) = of_workers(workers, &Trainer { accumulate, batch_size, ..large.clone() });
        assert_eq!(losses.len(), wanted.len());
        for (step, (got, want)) in losses.iter().zip(&wanted).enumerate() {
            // Float32 sums in another order, growing over eighteen steps.
            let apart = (got - want).abs();
            assert!(
                apart < 1e-4,
                "step {step}: {got} in {accumulate} batches of {workers} workers, {want} in one"
            );
        }
    }
}

/// Their rows one after the other, and what is made of them by convolutions to and fro.
#[test]
fn recurrent_and_transposed_layers_train_alike_on_any_number_of_workers() {
    module! {
        struct Net() {
            small: Conv2d = Conv2d::new(1, 4, 4).stride(2).padding(1),
            norm: GroupNorm = GroupNorm::new(2, 4),
            large: ConvTranspose2d = ConvTranspose2d::new(4, 1, 4).stride(2).padding(1),
            lstm: Lstm = Lstm::new(28, 12, RecurrentConfig { both_ways: true, ..RecurrentConfig::default() }),
            gru: Gru = Gru::new(24, 12, RecurrentConfig { layers: 2, dropout: 0.25, ..RecurrentConfig::default() }),
            fc: Linear = Linear::new(12, 10),
        }

        fn forward(&self, x: &Tensor, ctx: &mut Ctx) -> Tensor {
            let x = self.norm.forward(&self.small.forward(x, ctx), ctx).silu();
            let rows = self.large.forward(&x, ctx).squeeze(1);
            let states = self.gru.forward(&self.lstm.forward(&rows, ctx), ctx);
            self.fc.forward(&states.narrow(1, 27, 1).squeeze(1), ctx).log_softmax(1)
        }
    }
    let trainer = Trainer { batch_size: 120, steps: Some(12), ..Trainer::default() };
    let (wanted, weights) = of_network(1, &trainer, Net::new);
    for (workers, batch_size) in [(2, 60), (3, 40)] {
        let trainer = Trainer { batch_size, ..trainer.clone() };
        let (losses, others) = of_network(workers, &trainer, Net::new);
        // Float32 sums in another order, growing over twelve steps.
        let are_near = losses.iter().zip(&wanted).all(|(a, b)| (a - b).abs() < 1e-4);
        assert!(losses.len() == 12 && are_near, "{workers}: {losses:?}, not {wanted:?}");
        assert!(others.names().eq(weights.names()));
    }
}

#[test]
fn a_loss_of_a_programs_own_trains_as_the_same_one_of_ours() {
    let own = Loss::own(|output, target| {
        let picked = output.gather(1, &target.unsqueeze(1));
        picked.sum_all() * (-1.0 / target.count() as f64)
    });
    for workers in [1, 2] {
        let trainer = Trainer { batch_size: 120, steps: Some(8), ..Trainer::default() };
        let (wanted, _) = of_workers(workers, &trainer);
        let (losses, _) = of_workers(workers, &Trainer { loss: own.clone(), ..trainer });
        // Float32 sums in another order, growing over eight steps.
        let are_near = losses.iter().zip(&wanted).all(|(a, b)| (a - b).abs() < 1e-4);
        assert!(losses.len() == 8 && are_near, "{workers}: {losses:?}, not {wanted:?}");
    }
}

/// A loss that goes through another network, as one that judges what the first makes: its gradients are none of the model's, frozen or not.
#[test]
fn a_loss_may_go_through_another_network() {
    let losses = |workers: usize, trainer: &Trainer, is_frozen: bool| {
        let (told, most) = (Mutex::new(vec![0.0; 6]), Mutex::new(0usize));
        spawn(workers, |worker| {
            let mut judge = Sequential::new().then(Linear::new(10, 16)).then(Relu).then(Linear::new(16, 1));
            if is_frozen {
                freeze_all(&mut judge);
            }
            let own = Parameters::build(&mut judge, worker.device(), 7);
            let before = own.to_weights();
            let loss =
                Loss::own(move |output, _| judge.forward(output, &mut Ctx::eval()).square().mean_all());
            let data = open("mnist-mini", View::default(), &Places::from_env(None), &mut Silent).unwrap();
            let trainer = Trainer { loss, steps: Some(6), ..trainer.clone() };
            let mut net = MnistNet::new(0.0);
            let trained = trainer.fit(&worker, &mut net, SGD, data.train, None, &mut Quiet)?;
            assert_eq!(own.to_weights(), before);
            *most.lock().unwrap() += trained.parameters.names().len();
            if worker.is_first() {
                let norm = |i: usize| trained.parameters.value(i).square().sum_all().item();
                *told.lock().unwrap() = (0..6).map(norm).collect();
            }
            Ok(())
        })
        .unwrap();
        assert_eq!(most.into_inner().unwrap(), 8 * workers);
        told.into_inner().unwrap()
    };
    let alone = Trainer { batch_size: 64, ..Trainer::default() };
    let wanted = losses(1, &alone, false);
    for (workers, shards) in [(1, None), (2, None), (2, Some(4))] {
        let batch_size = 64 / shards.unwrap_or(workers);
        let trainer = Trainer { batch_size, logical_shards: shards, ..Trainer::default() };
        for is_frozen in [false, true] {
            let got = losses(workers, &trainer, is_frozen);
            // Float32 sums in another order, growing over six steps.
            let are_near = got.iter().zip(&wanted).all(|(a, b)| (a - b).abs() < 1e-3 * b.max(1.0));
            assert!(are_near, "{workers} workers, {shards:?} shards: {got:?}, not {wanted:?}");
        }
    }
}

#[test]
fn ranks_with_other_losses_are_told_apart() {
    let refused = spawn(2, |worker| {
        let data = Arc::new(LinearRegression::new(4));
        let squared = Loss::own(|output, target| (output - target).square().mean_all());
        let absolute = Loss::own(|output, target| (output - target).abs().mean_all());
        let loss = if worker.is_first() { squared } else { absolute };
        let trainer = Trainer { loss, ..Trainer::default() };
        trainer.fit(&worker, &mut Linear::new(1, 1), SGD, data, None, &mut Quiet).map(drop)
    });
    let words = refused.unwrap_err().to_string();
    assert!(words.contains("loss is Own(") && words.contains("tests/steps.rs"), "{words}");
}

#[test]
fn a_last_batch_that_is_smaller_may_be_left_out() {
    // 2000 samples are eight batches of 240, and 80 are left: the third step of three passes makes do with two.
    let trainer = Trainer { batch_size: 240, accumulate: 3, epochs: 2, ..Trainer::default() };
    let (losses, _) = of_workers(1, &Trainer { drop_last: true, ..trainer.clone() });
    let (all, _) = of_workers(1, &trainer);
    assert_eq!((losses.len(), all.len()), (6, 6));
    assert_eq!(losses[..2], all[..2]);
    assert_ne!(losses[2], all[2], "80 samples more");
    let (pair, _) = of_workers(2, &Trainer { drop_last: true, batch_size: 120, ..trainer.clone() });
    // Float32 sums in another order, growing over six steps.
    assert!(losses.iter().zip(&pair).all(|(a, b)| (a - b).abs() < 1e-4), "{losses:?} {pair:?}");
    let none = Trainer { drop_last: true, batch_size: 2001, ..Trainer::default() };
    let data = open("mnist-mini", View::default(), &Places::from_env(None), &mut Silent).unwrap();
    let fitted = none.fit(&Worker::alone(1), &mut MnistNet::new(0.5), SGD, data.train, None, &mut Quiet);
    let error = fitted.err().unwrap().to_string();
    assert!(error.contains("2000 samples are less than one batch of 2001 for each of 1 rank,"), "{error}");
}

#[test]
fn clipped_runs_are_the_same_on_any_number_of_workers() {
    let clip = Clip { norm: Some(0.5), value: Some(0.05) };
    let trainer = Trainer { clip, steps: Some(10), batch_size: 60, ..Trainer::default() };
    let (alone, weights) = of_workers(1, &trainer);
    let (again, same) = of_workers(1, &trainer);
    assert!((&alone, &weights) == (&again, &same), "the same bits");
    let (pair, _) = of_workers(2, &Trainer { batch_size: 30, ..trainer.clone() });
    assert!(alone.iter().zip(&pair).all(|(a, b)| (a - b).abs() < 1e-4), "{alone:?} {pair:?}");
    let (free, _) = of_workers(1, &Trainer { clip: Clip::default(), ..trainer });
    assert!(free.iter().zip(&alone).any(|(a, b)| (a - b).abs() > 1e-2), "it makes a difference");
}

#[test]
fn the_norm_of_the_gradients_is_told_where_it_is_known() {
    struct Norms(Vec<Option<f64>>);
    impl Observer for Norms {
        fn event(&mut self, event: &Event) {
            if let Event::Step { grad_norm, .. } = event {
                self.0.push(*grad_norm);
            }
        }
    }
    for (norm, told) in [(None, false), (Some(1.0), true)] {
        let clip = Clip { norm, value: None };
        let trainer = Trainer { loss: Loss::Mse, clip, ..Trainer::default() };
        let mut norms = Norms(Vec::new());
        let points = Arc::new(LinearRegression::new(4));
        trainer
            .fit(&Worker::alone(1), &mut Linear::new(1, 1), Sgd::new(0.1), points, None, &mut norms)
            .unwrap();
        assert_eq!(norms.0.len(), 1);
        assert_eq!(norms.0[0].is_some_and(|norm| norm > 0.0), told);
    }
}

/// A run on four points that starts with this bias.
fn spoilt(on_nan: OnNan, number: f32, lr: f64, clip: Clip) -> Result<Trained, String> {
    let worker = Worker::alone(1);
    let mut net = Linear::new(1, 1);
    let parameters = Parameters::build(&mut net, worker.device(), 0);
    parameters.value(1).fill(f64::from(number));
    let trainer = Trainer { loss: Loss::Mse, epochs: 3, on_nan, clip, ..Trainer::default() };
    let points = Arc::new(LinearRegression::new(4));
    let state = State::start(Sgd::new(lr)).unwrap();
    trainer
        .resume(&worker, &net, parameters, state, points, None, &mut Quiet)
        .map_err(|error| error.to_string())
}

#[test]
fn numbers_that_are_none_stop_a_run_and_are_named() {
    let clip = Clip::default();
    for on_nan in [OnNan::Loss, OnNan::Stop] {
        let error = spoilt(on_nan, f32::NAN, 0.1, clip).err().unwrap();
        assert!(
            error.contains("the loss is NaN at step 0, where bias is NaN at element 0\nhint:"),
            "{error}"
        );
        // The first step throws the weights out of float32.
        let error = spoilt(on_nan, 1.0, 1e300, clip).err().unwrap();
        assert!(error.contains("at step 1, where weight is"), "{error}");
    }
    assert!(spoilt(OnNan::Ignore, f32::NAN, 0.1, clip).is_ok());
}

module! {
    /// The absolute value of a line, by a root whose gradient at 0 is no number.
    struct Root() {
        line: Linear = Linear::new(1, 1),
    }

    fn forward(&self, x: &Tensor, ctx: &mut Ctx) -> Tensor {
        self.line.forward(x, ctx).square().sqrt()
    }
}

#[test]
fn a_gradient_that_is_none_is_found_before_it_moves_a_weight() {
    let norm = Clip { norm: Some(1.0), value: None };
    let rows = [
        (OnNan::Loss, Clip::default(), "the loss is NaN at step 1, where line.weight is NaN at element 0"),
        (OnNan::Stop, Clip::default(), "the gradient of line.weight is NaN at element 0, at step 0"),
        (OnNan::Loss, norm, "the gradient of line.weight is NaN at element 0, at step 0"),
    ];
    for (on_nan, clip, want) in rows {
        let worker = Worker::alone(1);
        let mut net = Root::new();
        let parameters = Parameters::build(&mut net, worker.device(), 0);
        (0..2).for_each(|i| parameters.value(i).fill(0.0));
        let trainer = Trainer { loss: Loss::Mse, epochs: 2, on_nan, clip, ..Trainer::default() };
        let points = Arc::new(LinearRegression::new(4));
        let state = State::start(Sgd::new(0.1)).unwrap();
        let result = trainer.resume(&worker, &net, parameters, state, points, None, &mut Quiet);
        let error = result.err().unwrap().to_string();
        assert!(error.contains(want), "{error}");
    }
}
