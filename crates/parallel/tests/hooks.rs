//! Gradients that travel compressed: ranks stay equal, training converges, and fewer bytes are sent.

use phalanx_comm::{Group, ReduceOp};
use phalanx_nn::optim::{Optimizer, Sgd};
use phalanx_nn::{Ctx, Linear, Module, Parameters, Relu, Sequential};
use phalanx_parallel::{AllReduce, Bf16, Bucket, Ddp, DdpConfig, Fp16, Hook, Pending};
use phalanx_parallel::{PowerSgd, PowerSgdConfig, Strategy, Sync};
use phalanx_tensor::{DType, Device, Philox, Tensor};

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

fn on_rank(group: Group, hook: impl Hook + 'static) -> Run {
    let device = Device::cpu(1);
    let mut net = Sequential::new().then(Linear::new(32, 64)).then(Relu).then(Linear::new(64, 8));
    let parameters = Parameters::build(&mut net, &device, 1);
    // Several buckets.
    let config = DdpConfig { bucket_bytes: 4 << 10, first_bucket_bytes: 1 << 10, ..DdpConfig::default() };
    let mut strategy = Ddp::with(group.clone(), config).with_hook(hook);
    strategy.prepare(&parameters).unwrap();
    let mut optimizer = Optimizer::new(Sgd { momentum: 0.9, ..Sgd::new(0.05) }).unwrap();
    let numbers = |shape: [usize; 2], stream: usize| {
        Tensor::uniform(&device, shape, -1.0, 1.0, DType::F32, Philox::new(3, stream as u64))
    };
    let truth = numbers([32, 8], 0);
    let x = numbers([48, 32], 1 + group.rank().index());
    let y = x.matmul(&truth).square();
    let (mut losses, before) = (Vec::new(), group.bytes_sent().unwrap());
    for _ in 0..STEPS {
        let loss = (&net.forward(&x, &mut Ctx::eval()) - &y).square().mean_all();
        strategy.backward(&parameters, Some(&loss), 1.0 / RANKS as f64, Sync::Now).unwrap();
        strategy.finish(&parameters).unwrap();
        let grads = parameters.grads().arena().flat::<f32>();
        optimizer.step(&mut parameters.values().flat_mut::<f32>(), &grads, 1.0);
        losses.push(f64::from(loss.to_vec::<f32>()[0]));
    }
    let bytes = group.bytes_sent().unwrap() - before;
    let mut ends = [losses[0], losses[STEPS - 1]];
    group.all_reduce(&mut ends, ReduceOp::Average).unwrap();
    let values = parameters.values().flat::<f32>().to_vec();
    Run { first_loss: ends[0], last_loss: ends[1], bytes, values }
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
