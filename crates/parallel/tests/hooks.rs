//! Gradients that travel compressed: ranks stay equal, training converges, and fewer bytes are sent.

use phalanx_comm::{Group, ReduceOp};
use phalanx_nn::optim::{Optimizer, Sgd};
use phalanx_nn::{Ctx, Linear, Module, Parameters, Relu, Sequential};
use phalanx_parallel::{AllReduce, Bf16, Bucket, Ddp, DdpConfig, Fp16, Hook, Kept, Pending};
use phalanx_parallel::{PowerSgd, PowerSgdConfig, Strategy, Sync};
use phalanx_tensor::{DType, Device, Philox, Tensor};
use std::sync::{Arc, Mutex};

const RANKS: usize = 3;
const STEPS: usize = 200;

/// What a run comes to.
struct Run {
    first_loss: f64,
    last_loss: f64,
    /// Sent by one rank while training.
    bytes: u64,
    values: Vec<f32>,
}

/// A small net learns a smooth function of 32 numbers, with three ranks that have different samples.
fn trained<H: Hook + 'static>(hook: impl Fn() -> H + std::marker::Sync) -> Run {
    let mut runs: Vec<Run> = std::thread::scope(|scope| {
        let ranks: Vec<_> =
            Group::threads(RANKS).into_iter().map(|group| scope.spawn(|| on_rank(group, hook()))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    for run in &runs {
        assert!(run.values == runs[0].values, "ranks hold the same bits");
    }
    runs.remove(0)
}

/// A rank that learns.
struct Learner {
    group: Group,
    net: Sequential,
    parameters: Parameters,
    optimizer: Optimizer,
    x: Tensor,
    y: Tensor,
}

impl Learner {
    fn new(group: Group) -> Learner {
        let device = Device::cpu(1);
        let mut net = Sequential::new().then(Linear::new(32, 64)).then(Relu).then(Linear::new(64, 8));
        let parameters = Parameters::build(&mut net, &device, 1);
        let optimizer = Optimizer::new(Sgd { momentum: 0.9, ..Sgd::new(0.05) }).unwrap();
        let numbers = |shape: [usize; 2], stream: usize| {
            Tensor::uniform(&device, shape, -1.0, 1.0, DType::F32, Philox::new(3, stream as u64))
        };
        let truth = numbers([32, 8], 0);
        let x = numbers([48, 32], 1 + group.rank().index());
        let y = x.matmul(&truth).square();
        Learner { group, net, parameters, optimizer, x, y }
    }

    fn strategy(&self, hook: impl Hook + 'static) -> Ddp {
        // Several buckets.
        let config = DdpConfig { bucket_bytes: 4 << 10, first_bucket_bytes: 1 << 10, ..DdpConfig::default() };
        let mut strategy = Ddp::with(self.group.clone(), config).with_hook(hook);
        strategy.prepare(&self.parameters).unwrap();
        strategy
    }

    /// One step; gives this rank's loss before it.
    fn step(&mut self, strategy: &mut Ddp) -> Result<f64, phalanx_parallel::Error> {
        let loss = (&self.net.forward(&self.x, &mut Ctx::eval()) - &self.y).square().mean_all();
        strategy.backward(&self.parameters, Some(&loss), 1.0 / RANKS as f64, Sync::Now)?;
        strategy.finish(&self.parameters)?;
        let grads = self.parameters.grads().arena().flat::<f32>();
        self.optimizer.step(&mut self.parameters.values().flat_mut::<f32>(), &grads, 1.0);
        Ok(f64::from(loss.to_vec::<f32>()[0]))
    }

    fn values(&self) -> Vec<f32> {
        self.parameters.values().flat::<f32>().to_vec()
    }
}

fn on_rank(group: Group, hook: impl Hook + 'static) -> Run {
    let mut learner = Learner::new(group.clone());
    let mut strategy = learner.strategy(hook);
    let before = group.bytes_sent().unwrap();
    let losses: Vec<f64> = (0..STEPS).map(|_| learner.step(&mut strategy).unwrap()).collect();
    let bytes = group.bytes_sent().unwrap() - before;
    let mut ends = [losses[0], losses[STEPS - 1]];
    group.all_reduce(&mut ends, ReduceOp::Average).unwrap();
    Run { first_loss: ends[0], last_loss: ends[1], bytes, values: learner.values() }
}

fn power(rank: usize, start_step: u64) -> PowerSgd {
    PowerSgd::new(PowerSgdConfig { rank, start_step, ..PowerSgdConfig::default() })
}

#[test]
fn half_of_the_bits_are_as_good() {
    let whole = trained(|| AllReduce);
    assert!(whole.last_loss < 0.01 * whole.first_loss, "{} to {}", whole.first_loss, whole.last_loss);
    for run in [trained(|| Bf16), trained(|| Fp16)] {
        assert!(run.last_loss < 1.05 * whole.last_loss, "{} against {}", run.last_loss, whole.last_loss);
        assert!(run.values != whole.values && run.bytes * 100 < whole.bytes * 52, "{} bytes", run.bytes);
    }
}

#[test]
fn gradients_of_low_rank_still_train_for_a_fraction_of_the_bytes() {
    let (whole, run) = (trained(|| AllReduce), trained(|| power(2, 5)));
    assert!(run.last_loss < 0.02 * run.first_loss, "{} to {}", run.first_loss, run.last_loss);
    assert!(run.bytes * 5 < whole.bytes, "{} bytes of {}", run.bytes, whole.bytes);
}

#[test]
fn what_a_step_leaves_out_and_what_it_found_help_the_next() {
    let with = |error_feedback, warm_start| {
        let config =
            PowerSgdConfig { start_step: 0, error_feedback, warm_start, ..PowerSgdConfig::default() };
        trained(|| PowerSgd::new(config.clone())).last_loss
    };
    let (both, forgetful, cold) = (with(true, true), with(false, true), with(true, false));
    assert!(both < 0.8 * forgetful, "{both} with error feedback, {forgetful} without");
    assert!(both < 0.8 * cold, "{both} with a warm start, {cold} without");
}

#[test]
fn before_its_first_step_everything_travels() {
    let (whole, run) = (trained(|| AllReduce), trained(|| power(1, STEPS as u64)));
    assert!(run.values == whole.values && run.bytes == whole.bytes);
}

#[test]
fn a_matrix_of_low_rank_comes_out_whole() {
    /// Puts gradients of rank 1 in the place of those that came: the same rows on all ranks, so that their sum is of rank 1.
    struct Made<H>(H);
    impl<H: Hook> Hook for Made<H> {
        fn start(&mut self, mut bucket: Bucket, group: &Group) -> Pending {
            let share = group.rank().index() as f32 + 1.0;
            for part in bucket.parts().to_vec() {
                for (i, x) in bucket[part.range.clone()].iter_mut().enumerate() {
                    *x = share * ((i / part.columns) as f32 - 3.5) * ((i % part.columns % 7) as f32 - 2.0);
                }
            }
            self.0.start(bucket, group)
        }
    }
    let (run, whole) = (trained(|| Made(power(1, 0))), trained(|| Made(AllReduce)));
    for (i, (got, want)) in run.values.iter().zip(&whole.values).enumerate() {
        assert!((got - want).abs() <= 1e-4 * (1.0 + want.abs()), "value {i}: {got}, whole {want}");
    }
    assert!(run.bytes < whole.bytes / 4);
}

/// What the ranks have learned after 20 steps, of which the last ones were made by a new hook: with what the old one of the
/// same rank kept, as rank 0 tells it, or as `hand_over` has it.
fn relayed(at: usize, hand_over: impl Fn(&[Kept]) -> Vec<Kept> + std::marker::Sync) -> Vec<Vec<f32>> {
    let told: Mutex<Vec<Kept>> = Mutex::default();
    let on_rank = |group: Group| {
        let mut learner = Learner::new(group.clone());
        let mut strategy = learner.strategy(power(2, 3));
        for _ in 0..at {
            learner.step(&mut strategy).unwrap();
        }
        assert!(strategy.keeps());
        let kept = strategy.kept().unwrap();
        assert_eq!(kept.len(), if group.rank().index() == 0 { RANKS } else { 0 });
        told.lock().unwrap().extend(kept);
        group.barrier().unwrap();
        let mut strategy = learner.strategy(power(2, 3));
        strategy.go_on(hand_over(&told.lock().unwrap())).unwrap();
        for _ in at..20 {
            learner.step(&mut strategy).unwrap();
        }
        learner.values()
    };
    std::thread::scope(|scope| {
        let ranks: Vec<_> =
            Group::threads(RANKS).into_iter().map(|group| scope.spawn(|| on_rank(group))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

#[test]
fn a_hook_goes_on_from_what_another_kept_bit_for_bit() {
    let whole = relayed(0, |_| vec![Kept::new(); RANKS]);
    // Before the first step that is compressed, just after it, and later.
    for at in [2, 4, 11] {
        assert!(relayed(at, |kept| kept.to_vec()) == whole, "handed over after step {at}");
    }
    // So the test would see it if nothing were handed over, or rank 0's to all.
    assert!(relayed(11, |_| vec![Kept::new(); RANKS]) != whole);
    assert!(relayed(11, |kept| vec![kept[0].clone(); RANKS]) != whole);
}

#[test]
fn another_number_of_ranks_shares_out_what_each_lacked() {
    let kept =
        |error: [f32; 2]| Kept::from([("0.0.q".into(), vec![0.5]), ("0.0.error".into(), error.into())]);
    let shared = power(1, 0).share_out(vec![kept([1.0, -2.0]), kept([0.0, 4.0]), kept([2.0, 1.0])], 2);
    assert_eq!(shared, Some(kept([1.5, 1.5])));
    assert_eq!(AllReduce.share_out(vec![kept([1.0, -2.0])], 2), None);
    // The last step comes to the same, but for rounding, with what twice as many lacked, half of them nothing, and to something else
    // without it.
    let forgotten = |kept: &[Kept]| -> Vec<Kept> {
        let forget = |(name, numbers): (&String, &Vec<f32>)| {
            let numbers = if name.ends_with(".error") { vec![0.0; numbers.len()] } else { numbers.clone() };
            (name.clone(), numbers)
        };
        kept.iter().map(|kept| kept.iter().map(forget).collect()).collect()
    };
    let whole = relayed(0, |_| vec![Kept::new(); RANKS]);
    let off = |hand_over: &(dyn Fn(&[Kept]) -> Vec<Kept> + std::marker::Sync)| {
        let values = relayed(19, hand_over);
        let pairs = values.iter().flatten().zip(whole.iter().flatten());
        pairs.fold(0.0f32, |most, (a, b)| most.max((a - b).abs()))
    };
    let (shared, lost) = (off(&|kept| [kept.to_vec(), forgotten(kept)].concat()), off(&forgotten));
    assert!(shared < 1e-5 && lost > 100.0 * shared, "{shared} with what was shared out, {lost} without");
}

#[test]
fn what_other_settings_kept_is_refused() {
    /// Lends a hook, so that it can be asked afterwards.
    struct Lent(Arc<Mutex<PowerSgd>>);
    impl Hook for Lent {
        fn start(&mut self, bucket: Bucket, group: &Group) -> Pending {
            self.0.lock().unwrap().start(bucket, group)
        }
    }
    std::thread::scope(|scope| {
        for group in Group::threads(RANKS) {
            scope.spawn(|| {
                let mut learner = Learner::new(group);
                let hook = Arc::new(Mutex::new(power(2, 0)));
                let mut strategy = learner.strategy(Lent(Arc::clone(&hook)));
                learner.step(&mut strategy).unwrap();
                let mut other = learner.strategy(power(1, 0));
                other.go_on(vec![hook.lock().unwrap().kept(); RANKS]).unwrap();
                let error = learner.step(&mut other).unwrap_err().to_string();
                assert!(error.contains("numbers as 0.q, and needs"), "{error}");
            });
        }
    });
}
