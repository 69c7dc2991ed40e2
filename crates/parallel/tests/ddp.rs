//! DDP against the plain run, over threads.

use phalanx_comm::Group;
use phalanx_nn::optim::{Optimizer, Sgd};
use phalanx_nn::{Ctx, Linear, Module, Parameters, Visitor, models::MnistNet};
use phalanx_parallel::{Ddp, DdpConfig, Error, SingleDevice, Strategy, Sync};
use phalanx_tensor::{DType, Device, Philox, Tensor};

/// Float32 sums in another order, over a few steps on values of about 1.
const TOLERANCE: f32 = 2e-6;

fn images(device: &Device, from: usize, n: usize) -> Tensor {
    let all = Tensor::uniform(device, [32, 1, 28, 28], -1.0, 1.0, DType::F32, Philox::new(1, 1));
    all.narrow(0, from, n).contiguous()
}

fn labels(device: &Device, from: usize, n: usize) -> Tensor {
    let values: Vec<i64> = (from..from + n).map(|i| (i * 7 % 10) as i64).collect();
    Tensor::from_slice(device, &values, [n])
}

/// Three steps of SGD over `samples` samples dealt in stretches, dropout on; `passes` backward passes a step.
fn trained(mut strategy: impl Strategy, samples: usize, passes: usize) -> Vec<f32> {
    let device = Device::cpu(1);
    let mut net = MnistNet::new(0.5);
    let place = strategy.place();
    // Different seeds: `prepare` must make the ranks equal.
    let parameters = Parameters::build(&mut net, &device, place.rank as u64);
    strategy.prepare(&parameters).unwrap();
    let mut optimizer = Optimizer::new(Sgd { momentum: 0.5, ..Sgd::new(0.05) }).unwrap();
    for step in 0..3 {
        let bounds = |part: usize| samples * part / (place.world_size * passes);
        for pass in 0..passes {
            let part = place.rank * passes + pass;
            let (from, n) = (bounds(part), bounds(part + 1) - bounds(part));
            let loss = (n > 0).then(|| {
                let ids = (from as u64..(from + n) as u64).collect();
                net.forward(&images(&device, from, n), &mut Ctx::train(9, step, ids))
                    .nll_loss(&labels(&device, from, n))
            });
            let sync = if pass + 1 == passes { Sync::Now } else { Sync::Later };
            strategy.backward(&parameters, loss.as_ref(), n as f64 / samples as f64, sync).unwrap();
        }
        strategy.finish(&parameters).unwrap();
        let grads = parameters.grads().arena().flat::<f32>();
        optimizer.step(&mut parameters.values().flat_mut::<f32>(), &grads, 1.0);
    }
    parameters.values().flat::<f32>().to_vec()
}

/// What every rank of a group of threads makes of `f`, by rank.
fn on_ranks<R: Send>(n: usize, f: impl Fn(Group) -> R + std::marker::Sync) -> Vec<R> {
    std::thread::scope(|scope| {
        let ranks: Vec<_> = Group::threads(n).into_iter().map(|group| scope.spawn(|| f(group))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

#[test]
fn any_number_of_ranks_equals_one() {
    // Even and uneven shares, fewer samples than ranks, one bucket and many, one pass a step and two.
    for (ranks, samples, passes) in [(1, 8, 1), (2, 8, 1), (2, 8, 2), (3, 10, 1), (5, 3, 1)] {
        let alone = trained(SingleDevice::new(), samples, 1);
        for bucket_bytes in [1 << 20, 100] {
            let config = DdpConfig { bucket_bytes, first_bucket_bytes: bucket_bytes, ..DdpConfig::default() };
            let all = on_ranks(ranks, |group| trained(Ddp::with(group, config.clone()), samples, passes));
            assert!(all.iter().all(|values| *values == all[0]), "all ranks hold the same bits");
            for (got, want) in all[0].iter().zip(&alone) {
                assert!(
                    (got - want).abs() < TOLERANCE,
                    "{ranks} ranks, {samples} samples: {got}, alone {want}"
                );
            }
        }
    }
}

/// Two layers of which a pass uses one.
struct Half {
    used: Linear,
    idle: Linear,
}

impl Module for Half {
    fn visit(&mut self, v: &mut Visitor<'_>) {
        v.child("used", &mut self.used);
        v.child("idle", &mut self.idle);
    }

    fn forward(&self, x: &Tensor, ctx: &mut Ctx) -> Tensor {
        self.used.forward(x, ctx)
    }
}

fn half_used(group: Group, find_unused: bool) -> Result<Vec<f32>, Error> {
    let device = Device::cpu(1);
    let mut model = Half { used: Linear::new(2, 1), idle: Linear::new(2, 1) };
    let parameters = Parameters::build(&mut model, &device, 0);
    let mut ddp = Ddp::with(group, DdpConfig { find_unused, ..DdpConfig::default() });
    ddp.prepare(&parameters)?;
    let loss = model.forward(&Tensor::ones(&device, [1, 2], DType::F32), &mut Ctx::eval()).sum_all();
    ddp.backward(&parameters, Some(&loss), 0.5, Sync::Now)?;
    ddp.finish(&parameters)?;
    let grads = parameters.to_weights_from(&parameters.grads().arena().flat::<f32>(), "");
    Ok(parameters.names().iter().flat_map(|name| grads.get(name).unwrap().1.to_vec()).collect())
}

#[test]
fn unused_parameters_are_named_or_count_as_zero() {
    for result in on_ranks(2, |group| half_used(group, false)) {
        let message = result.unwrap_err().to_string();
        assert!(message.contains("idle.weight, idle.bias") && message.contains("find_unused"), "{message}");
    }
    for result in on_ranks(2, |group| half_used(group, true)) {
        assert_eq!(result.unwrap(), [1.0, 1.0, 1.0, 0.0, 0.0, 0.0]);
    }
}

#[test]
fn different_models_are_told_apart_on_every_rank() {
    let results = on_ranks(3, |group| {
        let outputs = if group.rank().0 == 2 { 4 } else { 5 };
        let parameters = Parameters::build(&mut Linear::new(3, outputs), &Device::cpu(1), 0);
        Ddp::new(group).prepare(&parameters)
    });
    for result in results {
        let message = result.unwrap_err().to_string();
        let want = "rank 2 has weight of shape [4, 3] where rank 0 has weight of shape [5, 3]";
        assert!(message.contains(want), "{message}");
    }
}
