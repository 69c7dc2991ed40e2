//! Batch norm over the batch of all ranks: any number of them, however uneven their parts, trains as one would.

#[path = "../../comm/tests/ranks/meeting.rs"]
mod meeting;

use meeting::Meeting;
use phalanx_comm::Group;
use phalanx_nn::optim::{Optimizer, Sgd};
use phalanx_nn::{
    AdaptiveAvgPool2d, BatchNorm2d, Conv2d, Ctx, Flatten, Linear, Module, Parameters, Relu, Sequential,
};
use phalanx_parallel::{Ddp, DdpConfig, Error, SingleDevice, Strategy, Sync};
use phalanx_tensor::{DType, Device, Philox, Tensor};

/// Float32 sums in another order, through two normalisations and a few steps, on values of about 1.
const TOLERANCE: f32 = 2e-5;

fn net() -> Sequential {
    Sequential::new()
        .then(Conv2d::new(2, 16, 3).padding(1))
        .then(BatchNorm2d::new(16))
        .then(Relu)
        .then(Conv2d::new(16, 16, 3).stride(2).without_bias())
        .then(BatchNorm2d::new(16))
        .then(AdaptiveAvgPool2d([1, 1]))
        .then(Flatten)
        .then(Linear::new(16, 3))
}

/// The values and the buffers after some steps of SGD over `samples` samples, dealt in stretches.
fn trained(mut strategy: impl Strategy, samples: usize) -> (Vec<f32>, Vec<f32>) {
    let device = Device::cpu(1);
    let mut net = net();
    let place = strategy.place();
    let parameters = Parameters::build(&mut net, &device, 0);
    strategy.prepare(&parameters).unwrap();
    let mut optimizer = Optimizer::new(Sgd { momentum: 0.5, ..Sgd::new(0.05) }).unwrap();
    let images = Tensor::uniform(&device, [samples, 2, 6, 5], -1.0, 1.0, DType::F32, Philox::new(1, 1));
    for step in 0..4 {
        let bound = |rank: usize| samples * rank / place.world_size;
        let (from, n) = (bound(place.rank), bound(place.rank + 1) - bound(place.rank));
        let mut ctx = Ctx::train(9, step, (from as u64..(from + n) as u64).collect());
        if let Some(sum) = strategy.shared_batch() {
            ctx = ctx.sharing(sum);
        }
        let out = net.forward(&images.narrow(0, from, n), &mut ctx);
        let labels: Vec<i64> = (from..from + n).map(|i| (i * 7 % 3) as i64).collect();
        let loss = match n {
            0 => out.sum_all(),
            _ => out.cross_entropy(&Tensor::from_slice(&device, &labels, [n]), 0.0),
        };
        strategy.backward(&parameters, Some(&loss), n as f64 / samples as f64, Sync::Now).unwrap();
        strategy.finish(&parameters).unwrap();
        let grads = parameters.grads().arena().flat::<f32>();
        optimizer.step(&mut parameters.values().flat_mut::<f32>(), &grads, 1.0);
    }
    let buffers = parameters.buffers().flat::<f32>().to_vec();
    (parameters.values().flat::<f32>().to_vec(), buffers)
}

fn ddp(group: Group) -> Ddp {
    Ddp::with(group, DdpConfig { sync_batch_norm: true, ..DdpConfig::default() })
}

#[test]
fn any_number_of_ranks_trains_as_one() {
    for (ranks, samples) in [(1, 8), (2, 8), (2, 5), (3, 7), (5, 3)] {
        let alone = trained(SingleDevice::new(), samples);
        let all: Vec<_> = std::thread::scope(|scope| {
            let ranks: Vec<_> = Group::threads(ranks)
                .into_iter()
                .map(|group| scope.spawn(|| trained(ddp(group), samples)))
                .collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        });
        assert!(all.iter().all(|result| *result == all[0]), "all ranks hold the same bits");
        for (what, got, want) in [("values", &all[0].0, &alone.0), ("buffers", &all[0].1, &alone.1)] {
            let is_near = |(got, want): (&f32, &f32)| (got - want).abs() < TOLERANCE;
            assert!(got.iter().zip(want).all(is_near), "{ranks} ranks, {samples} samples: {what}: {got:?}");
        }
    }
}

#[test]
fn each_rank_for_itself_is_another_thing() {
    let alone = trained(SingleDevice::new(), 8);
    let apart = std::thread::scope(|scope| {
        let ranks: Vec<_> =
            Group::threads(2).into_iter().map(|group| scope.spawn(|| trained(Ddp::new(group), 8))).collect();
        let all: Vec<_> = ranks.into_iter().map(|rank| rank.join().unwrap()).collect();
        all[0].0.iter().zip(&alone.0).map(|(got, want)| (got - want).abs()).fold(0.0, f32::max)
    });
    assert!(apart > 10.0 * TOLERANCE, "{apart}");
}

/// Batch norms that nobody told would go by each rank's samples, in silence.
#[test]
fn passes_that_arent_told_and_parameters_of_another_model_are_errors() {
    let device = Device::cpu(1);
    let ([mut net, mut other], images) = ([net(), net()], Tensor::ones(&device, [4, 2, 6, 5], DType::F32));
    let [parameters, others] = [&mut net, &mut other].map(|net| Parameters::build(net, &device, 0));
    let ran = |shared: bool, parameters: &Parameters, given: &Parameters| {
        let mut strategy = ddp(Group::threads(1).remove(0));
        strategy.prepare(parameters).unwrap();
        let ctx = Ctx::train(0, 0, (0..4).collect());
        let mut ctx = match shared {
            true => ctx.sharing(strategy.shared_batch().unwrap()),
            false => ctx,
        };
        let loss = net.forward(&images, &mut ctx).square().sum_all();
        strategy.backward(given, Some(&loss), 1.0, Sync::Now).and_then(|()| strategy.finish(given))
    };
    ran(true, &parameters, &parameters).unwrap();
    let untold = ran(false, &parameters, &parameters).unwrap_err();
    assert!(matches!(untold, Error::NotShared), "{untold}");
    // Which has the same layout.
    let mixed_up = ran(true, &others, &parameters).unwrap_err();
    assert!(matches!(mixed_up, Error::OtherParameters { .. }), "{mixed_up}");
    assert!(format!("{mixed_up:?}").contains("hint: each model has a strategy of its own"), "{mixed_up:?}");
}

/// What a rank is told whose other one leaves before the first forward pass.
fn left_alone(net: fn() -> Sequential, images: [usize; 4]) -> Error {
    let mut groups = Group::threads(2);
    let leaving = groups.pop().unwrap();
    let (device, prepared) = (Device::cpu(1), Meeting::of(2));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut net = net();
            let parameters = Parameters::build(&mut net, &Device::cpu(1), 0);
            ddp(leaving.clone()).prepare(&parameters).unwrap();
            prepared.wait();
            leaving.abort("it was told to");
        });
        let mut strategy = ddp(groups.pop().unwrap());
        let mut net = net();
        let parameters = Parameters::build(&mut net, &device, 0);
        strategy.prepare(&parameters).unwrap();
        prepared.wait();
        let ctx = Ctx::train(0, 0, (0..images[0] as u64).collect());
        let mut ctx = ctx.sharing(strategy.shared_batch().unwrap());
        let loss = net.forward(&Tensor::ones(&device, images, DType::F32), &mut ctx).sum_all();
        strategy.backward(&parameters, Some(&loss), 0.5, Sync::Now).unwrap();
        strategy.finish(&parameters).unwrap_err()
    })
}

#[test]
fn a_rank_that_leaves_in_a_forward_pass_is_an_error_of_the_step() {
    // The second has one value a channel, which would be a mistake if it were the whole batch.
    let small = || Sequential::new().then(BatchNorm2d::new(2)).then(Flatten).then(Linear::new(2, 3));
    for error in [left_alone(net, [4, 2, 6, 5]), left_alone(small, [1, 2, 1, 1])] {
        assert!(matches!(error, Error::Comm(_)), "{error}");
        assert!(error.to_string().contains("rank 1"), "{error}");
    }
}
