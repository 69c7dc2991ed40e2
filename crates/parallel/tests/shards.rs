//! Logical shards: the same bits on any number of ranks, over threads.

use phalanx_comm::Group;
use phalanx_nn::optim::{Optimizer, Sgd};
use phalanx_nn::{
    AdaptiveAvgPool2d, BatchNorm2d, Conv2d, Ctx, Dropout, Flatten, Init, Linear, Module, Param, Parameters,
    Relu, Sequential, Visitor,
};
use phalanx_parallel::{Ddp, Error, LogicalShards, LogicalShardsConfig, Strategy, Sync};
use phalanx_tensor::{DType, Device, Philox, Tensor};
use std::ops::Range;

/// What every rank of a group of threads makes of `f`, by rank.
fn on_ranks<R: Send>(n: usize, f: impl Fn(Group) -> R + std::marker::Sync) -> Vec<R> {
    std::thread::scope(|scope| {
        let ranks: Vec<_> = Group::threads(n).into_iter().map(|group| scope.spawn(|| f(group))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

fn sharded(group: Group, shards: usize) -> LogicalShards {
    LogicalShards::new(group, LogicalShardsConfig::new(shards)).unwrap()
}

fn net() -> Sequential {
    Sequential::new()
        .then(Conv2d::new(2, 16, 3).padding(1))
        .then(BatchNorm2d::new(16))
        .then(Relu)
        .then(Conv2d::new(16, 16, 3).stride(2).without_bias())
        .then(BatchNorm2d::new(16))
        .then(AdaptiveAvgPool2d([1, 1]))
        .then(Flatten)
        .then(Dropout::new(0.3))
        .then(Linear::new(16, 3))
}

/// The samples of a part of a step: consecutive ones, the first parts being longer by one where they must.
fn part(samples: usize, parts: usize, i: usize) -> Range<usize> {
    let (size, larger) = (samples / parts, samples % parts);
    let start = i * size + i.min(larger);
    start..start + size + usize::from(i < larger)
}

/// The losses, values and buffers of three steps over `samples` samples, which fall into the strategy's parts.
fn trained(mut strategy: impl Strategy, samples: usize) -> (Vec<f64>, Vec<f32>) {
    let (place, device) = (strategy.place(), Device::cpu(1));
    let (parts, own) = match strategy.shards() {
        Some(shards) => (shards.of, shards.held),
        None => (place.world_size, place.rank..place.rank + 1),
    };
    let mut net = net();
    // Different seeds: `prepare` must make the ranks equal.
    let parameters = Parameters::build(&mut net, &device, place.rank as u64);
    strategy.prepare(&parameters).unwrap();
    let mut optimizer = Optimizer::new(Sgd { momentum: 0.5, ..Sgd::new(0.05) }).unwrap();
    let images = Tensor::uniform(&device, [samples, 2, 6, 5], -1.0, 1.0, DType::F32, Philox::new(1, 1));
    let mut losses = Vec::new();
    for step in 0..3 {
        let mut of_parts = Vec::new();
        for i in own.clone() {
            let ids = part(samples, parts, i);
            let weight = ids.len() as f64 / samples as f64;
            let labels: Vec<i64> = ids.clone().map(|i| (i * 7 % 3) as i64).collect();
            strategy.begin_pass(&parameters);
            let loss = (!ids.is_empty()).then(|| {
                let mut ctx = Ctx::train(9, step, ids.clone().map(|i| i as u64).collect());
                let out = net.forward(&images.narrow(0, ids.start, ids.len()).contiguous(), &mut ctx);
                out.cross_entropy(&Tensor::from_slice(&device, &labels, [ids.len()]), 0.0)
            });
            of_parts.push(loss.as_ref().map_or(0.0, |loss| loss.item() * weight));
            let sync = if i + 1 == own.end { Sync::Now } else { Sync::Later };
            strategy.backward(&parameters, loss.as_ref(), weight, sync).unwrap();
        }
        strategy.finish(&parameters).unwrap();
        let mut sum = [0.0];
        strategy.sum_parts(&of_parts, &mut sum).unwrap();
        losses.push(sum[0]);
        let grads = parameters.grads().arena().flat::<f32>();
        optimizer.step(&mut parameters.values().flat_mut::<f32>(), &grads, 1.0);
    }
    let mut numbers = parameters.values().flat::<f32>().to_vec();
    numbers.extend_from_slice(&parameters.buffers().flat::<f32>());
    (losses, numbers)
}

/// In bits 0 and -0 differ.
fn float_bits(numbers: &[f32]) -> Vec<u32> {
    numbers.iter().map(|x| x.to_bits()).collect()
}

fn bits((losses, numbers): &(Vec<f64>, Vec<f32>)) -> (Vec<u64>, Vec<u32>) {
    (losses.iter().map(|x| x.to_bits()).collect(), float_bits(numbers))
}

#[test]
fn any_number_of_ranks_gives_the_same_bits() {
    // Even and uneven shards, shards without samples, and numbers of ranks that don't divide that of the shards.
    for (shards, samples) in [(1, 4), (2, 9), (4, 16), (4, 11), (5, 13), (7, 15), (6, 8), (8, 16), (5, 3)] {
        let alone = trained(sharded(Group::solo(), shards), samples);
        for ranks in (1..=shards).filter(|&ranks| ranks <= 5) {
            for got in on_ranks(ranks, |group| trained(sharded(group, shards), samples)) {
                assert!(bits(&got) == bits(&alone), "{shards} shards of {samples} samples on {ranks} ranks");
            }
        }
    }
}

#[test]
fn a_shard_is_what_a_rank_is_to_ddp() {
    // Of two numbers there is one sum, so the bits are the same; of more, the order differs.
    let ddp = on_ranks(2, |group| trained(Ddp::new(group), 9));
    assert_eq!(bits(&trained(sharded(Group::solo(), 2), 9)), bits(&ddp[0]));
    /// Float32 sums in another order, through two normalisations and a few steps, on values of about 1.
    const TOLERANCE: f32 = 2e-5;
    let ddp = on_ranks(4, |group| trained(Ddp::new(group), 16));
    let (_, got) = trained(sharded(Group::solo(), 4), 16);
    let apart = got.iter().zip(&ddp[0].1).map(|(got, want)| (got - want).abs()).fold(0.0, f32::max);
    assert!(apart < TOLERANCE, "{apart}");
}

/// Three layers, of which each pass uses some, and a buffer that training passes read and change.
struct Paths {
    layers: [Linear; 3],
    seen: Param,
}

impl Paths {
    fn new() -> Paths {
        Paths { layers: [(); 3].map(|()| Linear::new(2, 1)), seen: Param::new([1], Init::Constant(1.0)) }
    }

    fn through(&self, layers: &[usize], x: &Tensor) -> Tensor {
        self.seen.copy_from(&self.seen.affine(1.0, 1.0));
        let x = x * &self.seen.broadcast_to(*x.shape()).contiguous();
        let outputs = layers.iter().map(|&i| self.layers[i].forward(&x, &mut Ctx::eval()).sum_all());
        outputs.reduce(|a, b| &a + &b).unwrap()
    }
}

impl Module for Paths {
    fn visit(&mut self, v: &mut Visitor<'_>) {
        v.child("first", &mut self.layers[0]);
        v.child("second", &mut self.layers[1]);
        v.child("third", &mut self.layers[2]);
        v.buffer("seen", &mut self.seen);
    }

    fn forward(&self, x: &Tensor, _: &mut Ctx) -> Tensor {
        self.through(&[0, 1, 2], x)
    }
}

/// The gradients and the buffer after two steps, in which shard s uses layers `used[s]` on an input full of s - 3.
fn paths(group: Group, used: &[&[usize]], find_unused: bool) -> Result<Vec<f32>, Error> {
    let mut model = Paths::new();
    let device = Device::cpu(1);
    let parameters = Parameters::build(&mut model, &device, 0);
    let mut strategy = LogicalShards::new(group, LogicalShardsConfig { shards: used.len(), find_unused })?;
    strategy.prepare(&parameters)?;
    for _ in 0..2 {
        for shard in strategy.shards().unwrap().held {
            strategy.begin_pass(&parameters);
            let x = Tensor::full(&device, [1, 2], shard as f64 - 3.0, DType::F32);
            strategy.backward(&parameters, Some(&model.through(used[shard], &x)), 1.0, Sync::Later)?;
        }
        strategy.finish(&parameters)?;
    }
    let mut numbers: Vec<f32> =
        (0..6).flat_map(|i| parameters.grads().arena().tensor(i).to_vec::<f32>()).collect();
    numbers.extend(model.seen.to_vec::<f32>());
    Ok(numbers)
}

#[test]
fn parameters_that_a_shard_does_not_use_count_as_zero_if_that_is_allowed() {
    let used: [&[usize]; 5] = [&[0], &[0, 1], &[1], &[0], &[0, 1]];
    for ranks in 1..=5 {
        for got in on_ranks(ranks, |group| paths(group, &used, true)) {
            // In the second step every shard sees the buffer at 3, on whichever rank it is.
            let want = [-12.0, -12.0, 4.0, -6.0, -6.0, 3.0, 0.0, 0.0, 0.0, 3.0];
            assert_eq!(float_bits(&got.unwrap()), float_bits(&want), "on {ranks} ranks");
        }
    }
}

#[test]
fn parameters_that_a_shard_does_not_use_end_the_step_on_all_ranks() {
    let used: [&[usize]; 4] = [&[0, 1, 2], &[0, 1, 2], &[0, 1, 2], &[0, 2]];
    for ranks in 1..=4 {
        let results = on_ranks(ranks, |group| paths(group, &used, false));
        for (rank, result) in results.into_iter().enumerate() {
            let error = result.unwrap_err();
            if rank + 1 == ranks {
                assert!(error.to_string().contains("second.weight, second.bias"), "{error}");
            } else {
                assert!(matches!(error, Error::Comm(_)), "{error}");
            }
        }
    }
}

#[test]
fn sums_of_parts_have_the_same_bits_on_any_number_of_ranks() {
    let random = Philox::new(4, 4);
    let rows: Vec<f64> = (0..14).map(|i| f64::from(random.unit(i)).powi(9)).collect();
    let sums = |group: Group| {
        let mut strategy = sharded(group, 7);
        let held = strategy.shards().unwrap().held;
        let mut sum = [0.0; 2];
        strategy.sum_parts(&rows[2 * held.start..2 * held.end], &mut sum).unwrap();
        sum
    };
    let alone = sums(Group::solo());
    assert!((alone[0] - rows.iter().step_by(2).sum::<f64>()).abs() < 1e-12);
    for ranks in 2..=7 {
        assert_eq!(on_ranks(ranks, sums), vec![alone; ranks]);
    }
}

#[test]
fn fewer_shards_than_ranks_are_refused() {
    let refused = |ranks: usize, shards: usize| {
        let group = Group::threads(ranks).pop().unwrap();
        LogicalShards::new(group, LogicalShardsConfig::new(shards)).err().unwrap().to_string()
    };
    let message = refused(3, 2);
    assert!(
        message.contains("shards: 2 for 3 workers") && message.ends_with("hint: take 3 or more"),
        "{message}"
    );
    let message = refused(1, 0);
    assert!(
        message.contains("shards: 0 for 1 worker,") && message.ends_with("hint: take 1 or more"),
        "{message}"
    );
}
