//! DDP against the plain run, over threads.

#[path = "../../comm/tests/ranks/meeting.rs"]
mod meeting;

use meeting::Meeting;
use phalanx_comm::{Deadline, Endpoint, Generation, Group, GroupConfig, Rank, Secret};
use phalanx_nn::optim::{Optimizer, Sgd};
use phalanx_nn::{Ctx, Init, Linear, Module, Param, Parameters, Sequential, Tanh, Visitor, models::MnistNet};
use phalanx_parallel::{
    BetweenGpus, Compress, Ddp, DdpConfig, Error, SingleDevice, Strategy, Sync, gathered,
};
use phalanx_tensor::{DType, Device, Philox, Tensor};
use std::io::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};
use std::time::Duration;

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

/// A loss over the rows of all ranks has the gradients of one process that has all of them, whatever share each rank's is of it.
#[test]
fn rows_of_all_ranks_have_the_gradients_of_a_whole() {
    const ROWS: usize = 3;
    let net = || Sequential::new().then(Linear::new(4, 5)).then(Tanh);
    // Each row against all others, of all ranks.
    let loss = |own: &Tensor, all: &Tensor, first: usize| {
        let labels: Vec<i64> = (0..own.dim(0)).map(|i| (first + i) as i64).collect();
        own.matmul(&all.t()).cross_entropy(&Tensor::from_slice(own.device(), &labels, [own.dim(0)]), 0.0)
    };
    let gradients = |group: Option<Group>| {
        let device = Device::cpu(1);
        let mut net = net();
        let parameters = Parameters::build(&mut net, &device, 0);
        let all = Tensor::uniform(&device, [2 * ROWS, 4], -1.0, 1.0, DType::F32, Philox::new(5, 5));
        match group {
            None => {
                SingleDevice::new().prepare(&parameters).unwrap();
                parameters.grads().zero();
                let out = net.forward(&all, &mut Ctx::eval());
                loss(&out, &out, 0).backward();
            }
            Some(group) => {
                let mut strategy = Ddp::new(group.clone());
                strategy.prepare(&parameters).unwrap();
                let first = group.rank().index() * ROWS;
                let out = net.forward(&all.narrow(0, first, ROWS), &mut Ctx::eval());
                let loss = loss(&out, &gathered(&group, &out), first);
                strategy.backward(&parameters, Some(&loss), 0.5, Sync::Now).unwrap();
                strategy.finish(&parameters).unwrap();
            }
        }
        parameters.grads().arena().flat::<f32>().to_vec()
    };
    let want = gradients(None);
    let got: Vec<_> = std::thread::scope(|scope| {
        let gradients = &gradients;
        let ranks: Vec<_> =
            Group::threads(2).into_iter().map(|group| scope.spawn(move || gradients(Some(group)))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    assert!(want.iter().any(|gradient| gradient.abs() > 1e-2));
    for got in got {
        assert!(got.iter().zip(&want).all(|(a, b)| (a - b).abs() < 1e-6), "{got:?}, not {want:?}");
    }
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

/// A penalty on the weights beside what the layers do with them.
#[test]
fn a_parameter_may_be_read_twice_by_its_leaf() {
    let penalised = |mut strategy: Box<dyn Strategy>| {
        let device = Device::cpu(1);
        let mut net = Linear::new(3, 2);
        let parameters = Parameters::build(&mut net, &device, 0);
        strategy.prepare(&parameters).unwrap();
        let x = Tensor::ones(&device, [4, 3], DType::F32);
        let weight = parameters.grads().leaf(0, parameters.values());
        let loss = net.forward(&x, &mut Ctx::eval()).square().mean_all() + weight.square().sum_all() * 0.1;
        let share = 1.0 / strategy.place().world_size as f64;
        strategy.backward(&parameters, Some(&loss), share, Sync::Now).unwrap();
        strategy.finish(&parameters).unwrap();
        parameters.grads().arena().flat::<f32>().to_vec()
    };
    let alone = penalised(Box::new(SingleDevice::new()));
    for of_two in on_ranks(2, |group| penalised(Box::new(Ddp::with(group, DdpConfig::default())))) {
        assert!(of_two.iter().zip(&alone).all(|(got, want)| (got - want).abs() < TOLERANCE), "{of_two:?}");
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

/// The gradients of a step.
fn half_used(strategy: &mut impl Strategy) -> Result<Vec<f32>, Error> {
    let device = Device::cpu(1);
    let mut model = Half { used: Linear::new(2, 1), idle: Linear::new(2, 1) };
    let parameters = Parameters::build(&mut model, &device, 0);
    strategy.prepare(&parameters)?;
    let loss = model.forward(&Tensor::ones(&device, [1, 2], DType::F32), &mut Ctx::eval()).sum_all();
    let share = 1.0 / strategy.place().world_size as f64;
    strategy.backward(&parameters, Some(&loss), share, Sync::Now)?;
    strategy.finish(&parameters)?;
    let grads = parameters.to_weights_from(&parameters.grads().arena().flat::<f32>(), "");
    Ok(parameters.names().iter().flat_map(|name| grads.get(name).unwrap().1.to_vec()).collect())
}

#[test]
fn unused_parameters_are_named_or_count_as_zero() {
    let ddp = |group, find_unused| Ddp::with(group, DdpConfig { find_unused, ..DdpConfig::default() });
    for result in on_ranks(2, |group| half_used(&mut ddp(group, false))) {
        let message = result.unwrap_err().to_string();
        assert!(message.contains("idle.weight, idle.bias") && message.contains("find_unused"), "{message}");
    }
    for result in on_ranks(2, |group| half_used(&mut ddp(group, true))) {
        assert_eq!(result.unwrap(), [1.0, 1.0, 1.0, 0.0, 0.0, 0.0]);
    }
}

/// What is logged.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[test]
fn one_process_warns_once_of_parameters_without_a_gradient() {
    let said = |mut strategy: SingleDevice| {
        let log = Log::default();
        let writer = log.clone();
        let subscriber =
            tracing_subscriber::fmt().with_writer(move || writer.clone()).with_ansi(false).finish();
        tracing::subscriber::with_default(subscriber, || {
            for _ in 0..3 {
                assert_eq!(half_used(&mut strategy).unwrap(), [1.0, 1.0, 1.0, 0.0, 0.0, 0.0]);
            }
        });
        let said = log.0.lock().unwrap();
        String::from_utf8_lossy(&said).into_owned()
    };
    let warning = said(SingleDevice::new());
    assert!(warning.contains("idle.weight, idle.bias; use them in the loss"), "{warning}");
    assert_eq!(warning.matches("WARN").count(), 1, "{warning}");
    assert_eq!(said(SingleDevice::new().find_unused(true)), "");
}

/// A layer on each of two paths, and a buffer that counts.
struct Paths {
    first: Linear,
    second: Linear,
    seen: Param,
}

impl Paths {
    fn new() -> Paths {
        let seen = Param::new([3], Init::Constant(0.0));
        Paths { first: Linear::new(2, 1), second: Linear::new(2, 1), seen }
    }

    /// The sum of the outputs of the paths in `order` (0 is the first layer, 1 the second).
    fn through(&self, order: &[usize], x: &Tensor) -> Tensor {
        let layers = [&self.first, &self.second];
        let outputs = order.iter().map(|&i| layers[i].forward(x, &mut Ctx::eval()).sum_all());
        outputs.reduce(|a, b| &a + &b).unwrap()
    }
}

impl Module for Paths {
    fn visit(&mut self, v: &mut Visitor<'_>) {
        v.child("first", &mut self.first);
        v.child("second", &mut self.second);
        v.buffer("seen", &mut self.seen);
    }

    /// Both paths; counts passes in training.
    fn forward(&self, x: &Tensor, ctx: &mut Ctx) -> Tensor {
        if ctx.training() {
            self.seen.copy_from(&self.seen.affine(1.0, 1.0));
        }
        self.through(&[0, 1], x)
    }
}

/// Every parameter a bucket of its own.
const SMALL: DdpConfig = DdpConfig {
    bucket_bytes: 0,
    first_bucket_bytes: 0,
    find_unused: false,
    sync_batch_norm: false,
    compress: Compress::Nothing,
    between_gpus: BetweenGpus::Best,
};

/// The gradients of `Paths`: two weights and a bias for each path.
fn gradients(parameters: &Parameters) -> Vec<f32> {
    (0..4).flat_map(|i| parameters.grads().arena().tensor(i).to_vec::<f32>()).collect()
}

/// One step over `Paths`, of which rank r takes the paths `orders[r]` on an input full of r + 1.
fn paths(group: Group, orders: &[&[usize]], config: DdpConfig) -> Result<Vec<f32>, Error> {
    let device = Device::cpu(1);
    let mut model = Paths::new();
    let parameters = Parameters::build(&mut model, &device, 0);
    let rank = group.rank().index();
    let mut ddp = Ddp::with(group, config);
    ddp.prepare(&parameters)?;
    let x = Tensor::full(&device, [1, 2], rank as f64 + 1.0, DType::F32);
    ddp.backward(&parameters, Some(&model.through(orders[rank], &x)), 1.0, Sync::Now)?;
    ddp.finish(&parameters)?;
    Ok(gradients(&parameters))
}

#[test]
fn gradients_may_arrive_in_another_order_on_each_rank() {
    let orders: [&[usize]; 3] = [&[0, 1], &[1, 0], &[0, 1]];
    for result in on_ranks(3, |group| paths(group, &orders, SMALL)) {
        assert_eq!(result.unwrap(), [6.0, 6.0, 3.0, 6.0, 6.0, 3.0]);
    }
}

#[test]
fn a_parameter_may_be_unused_on_some_ranks_if_that_is_allowed() {
    let orders: [&[usize]; 3] = [&[0], &[1], &[1, 0]];
    let config = DdpConfig { find_unused: true, ..SMALL };
    for result in on_ranks(3, |group| paths(group, &orders, config.clone())) {
        // Rank 0 gives 1 to the first path, rank 1 gives 2 to the second, rank 2 gives 3 to both.
        assert_eq!(result.unwrap(), [4.0, 4.0, 2.0, 5.0, 5.0, 2.0]);
    }
}

#[test]
fn a_parameter_unused_on_one_rank_ends_the_step_on_all() {
    let orders: [&[usize]; 3] = [&[0, 1], &[1], &[0, 1]];
    let results = on_ranks(3, |group| paths(group, &orders, SMALL));
    for (rank, result) in results.into_iter().enumerate() {
        let error = result.unwrap_err();
        match rank {
            1 => assert!(error.to_string().contains("first.weight, first.bias"), "{error}"),
            _ => assert!(matches!(error, Error::Comm(_)), "{error}"),
        }
    }
}

#[test]
fn a_parameter_used_in_one_pass_of_a_step_is_used() {
    let steps = on_ranks(2, |group| {
        let device = Device::cpu(1);
        let mut model = Paths::new();
        let parameters = Parameters::build(&mut model, &device, 0);
        let mut ddp = Ddp::with(group, SMALL);
        ddp.prepare(&parameters).unwrap();
        let x = Tensor::ones(&device, [1, 2], DType::F32);
        // Twice, so that the second step shows whether the first left anything behind.
        (0..2)
            .map(|_| {
                for (path, sync) in [(0, Sync::Later), (1, Sync::Now)] {
                    ddp.backward(&parameters, Some(&model.through(&[path], &x)), 0.5, sync).unwrap();
                }
                ddp.finish(&parameters).unwrap();
                gradients(&parameters)
            })
            .collect::<Vec<_>>()
    });
    assert_eq!(steps, [[[1.0; 6], [1.0; 6]], [[1.0; 6], [1.0; 6]]]);
}

#[test]
fn buffers_are_rank_0s_after_every_step() {
    let results = on_ranks(3, |group| {
        let device = Device::cpu(1);
        let mut model = Paths::new();
        let parameters = Parameters::build(&mut model, &device, 0);
        let rank = group.rank().index();
        parameters.buffers().tensor(0).fill(10.0 * (rank as f64 + 1.0));
        let mut ddp = Ddp::new(group);
        ddp.prepare(&parameters).unwrap();
        let mut seen = vec![model.seen.to_vec::<f32>()];
        let x = Tensor::ones(&device, [1, 2], DType::F32);
        for step in 0..2 {
            // Rank r makes r + 1 passes, so that counts move apart.
            for pass in 0..=rank {
                let loss = model.forward(&x, &mut Ctx::train(0, step, [0].into()));
                let sync = if pass == rank { Sync::Now } else { Sync::Later };
                ddp.backward(&parameters, Some(&loss), 0.1, sync).unwrap();
            }
            ddp.finish(&parameters).unwrap();
            seen.push(model.seen.to_vec::<f32>());
        }
        seen
    });
    assert_eq!(results, vec![vec![[10.0; 3], [11.0; 3], [12.0; 3]]; 3]);
}

/// One step over both paths.
fn step(ddp: &mut Ddp, model: &Paths, parameters: &Parameters) -> Result<(), Error> {
    let x = Tensor::ones(parameters.value(0).device(), [1, 2], DType::F32);
    let loss = model.forward(&x, &mut Ctx::eval());
    let started = ddp.backward(parameters, Some(&loss), 1.0, Sync::Now);
    started.and_then(|()| ddp.finish(parameters))
}

#[test]
fn gradients_that_are_shared_anew_are_summed_where_they_now_are() {
    let endpoints: Vec<Endpoint> = (0..2).map(|_| Endpoint::bind([127, 0, 0, 1].into()).unwrap()).collect();
    let peers: Vec<_> = endpoints.iter().map(Endpoint::address).collect();
    let train = |rank: usize, endpoint: Endpoint| {
        let group = Group::connect(GroupConfig {
            rank: Rank(rank as u32),
            generation: Generation(1),
            secret: Secret::from_bytes([7; 32]),
            endpoint,
            peers: peers.clone(),
            timeout: Duration::from_secs(20),
        });
        let (group, device) = (group.unwrap(), Device::cpu(1));
        let mut net = Linear::new(128, 128);
        let parameters = Parameters::build(&mut net, &device, 0);
        // As one who trains twice does: another strategy over the same group and parameters.
        for times in 1..=3 {
            let mut ddp = Ddp::new(group.clone());
            ddp.prepare(&parameters).unwrap();
            let x = Tensor::full(&device, [1, 128], (times * (rank + 1)) as f64, DType::F32);
            let loss = net.forward(&x, &mut Ctx::eval()).sum_all();
            ddp.backward(&parameters, Some(&loss), 1.0, Sync::Now).unwrap();
            ddp.finish(&parameters).unwrap();
            let weights = parameters.grads().arena().flat::<f32>()[..128 * 128].to_vec();
            assert!(weights.iter().all(|&x| x == 3.0 * times as f32), "time {times}: {}", weights[0]);
        }
        let last = group.history().into_iter().map(|record| record.algorithm.to_string());
        assert_eq!(last.filter(|algorithm| algorithm.contains("in place")).count(), 3);
    };
    std::thread::scope(|scope| {
        endpoints.into_iter().enumerate().for_each(|(rank, endpoint)| {
            let train = &train;
            scope.spawn(move || train(rank, endpoint));
        });
    });
}

#[test]
fn a_rank_that_leaves_is_an_error_on_the_others_and_no_hang() {
    let all_stepped = Meeting::of(3);
    let results = on_ranks(3, |group| {
        let mut model = Paths::new();
        let parameters = Parameters::build(&mut model, &Device::cpu(1), 0);
        let rank = group.rank().index();
        let mut ddp = Ddp::with(group, SMALL);
        ddp.prepare(&parameters).unwrap();
        step(&mut ddp, &model, &parameters).unwrap();
        all_stepped.wait();
        if rank == 2 {
            return None;
        }
        let error = step(&mut ddp, &model, &parameters).unwrap_err();
        // Nothing holds the gradients any more.
        parameters.grads().arena().flat_mut::<f32>().fill(0.0);
        Some(error.to_string())
    });
    assert!(results[2].is_none());
    for error in results.into_iter().flatten() {
        assert!(error.contains("is gone"), "{error}");
    }
}

#[test]
fn a_rank_that_does_not_come_is_named_when_the_time_is_up() {
    let (told, heard) = std::sync::mpsc::channel::<()>();
    let heard = std::sync::Mutex::new(heard);
    let results = on_ranks(2, |group| {
        let mut model = Paths::new();
        let parameters = Parameters::build(&mut model, &Device::cpu(1), 0);
        let rank = group.rank().index();
        let mut ddp = Ddp::new(group.with_timeout(Duration::from_secs(1)));
        ddp.prepare(&parameters).unwrap();
        if rank == 1 {
            // Stays in the group, and out of the step, until the other has given up.
            heard.lock().unwrap().recv_timeout(Duration::from_secs(60)).unwrap();
            return None;
        }
        let error = step(&mut ddp, &model, &parameters).unwrap_err().to_string();
        told.send(()).unwrap();
        Some(error)
    });
    let error = results[0].as_ref().unwrap();
    assert!(error.contains("waited") && error.contains("rank 1"), "{error}");
}

#[test]
fn gradients_are_let_go_where_another_thread_keeps_the_group() {
    let soon = Duration::from_secs(20);
    let mut groups = Group::threads(2).into_iter();
    let (group, other) = (groups.next().unwrap(), groups.next().unwrap());
    std::thread::scope(|scope| {
        // The other rank is there, and takes no part in the step.
        let prepared = scope.spawn(move || {
            let parameters = Parameters::build(&mut Paths::new(), &Device::cpu(1), 0);
            Ddp::new(other.clone()).prepare(&parameters).unwrap();
            other
        });
        let mut model = Paths::new();
        let parameters = Parameters::build(&mut model, &Device::cpu(1), 0);
        let mut ddp = Ddp::new(group.clone().with_timeout(Duration::from_millis(200)));
        ddp.prepare(&parameters).unwrap();
        let _other = prepared.join().unwrap();
        let x = Tensor::ones(parameters.value(0).device(), [1, 2], DType::F32);
        let loss = model.forward(&x, &mut Ctx::eval());
        ddp.backward(&parameters, Some(&loss), 1.0, Sync::Now).unwrap();
        let waits = group.clone().with_timeout(soon);
        let waiting = scope.spawn(move || waits.receive(&mut [0u8], Rank(1)));
        let in_time = Deadline::after(soon);
        while group.bytes_sent().is_some() {
            assert!(!in_time.expired(), "nobody waits");
            std::thread::yield_now();
        }
        let error = ddp.finish(&parameters).unwrap_err().to_string();
        assert!(error.contains("another thread"), "{error}");
        let ended = waiting.join().unwrap().unwrap_err().to_string();
        assert!(ended.contains("rank 0 ended the group"), "{ended}");
        parameters.grads().arena().flat_mut::<f32>().fill(0.0);
    });
}

#[test]
fn calls_in_a_wrong_order_are_bugs_that_say_so() {
    let message = |f: &mut dyn FnMut()| {
        let panic = catch_unwind(AssertUnwindSafe(f)).unwrap_err();
        panic.downcast::<&str>().map_or_else(|p| *p.downcast::<String>().unwrap(), |p| p.to_string())
    };
    let device = Device::cpu(1);
    let mut model = Paths::new();
    let parameters = Parameters::build(&mut model, &device, 0);
    let loss = || model.forward(&Tensor::ones(&device, [1, 2], DType::F32), &mut Ctx::eval());
    let mut ddp = Ddp::new(Group::solo());
    let early = message(&mut || drop(ddp.backward(&parameters, Some(&loss()), 1.0, Sync::Now)));
    assert!(early.contains("prepare comes before the first backward pass"), "{early}");
    ddp.prepare(&parameters).unwrap();
    ddp.backward(&parameters, Some(&loss()), 1.0, Sync::Now).unwrap();
    for sync in [Sync::Now, Sync::Later] {
        let twice = message(&mut || drop(ddp.backward(&parameters, Some(&loss()), 1.0, sync)));
        assert!(twice.contains("nobody called finish"), "{twice}");
    }
    ddp.finish(&parameters).unwrap();
}

#[test]
fn different_models_are_told_apart_on_every_rank() {
    /// Model `other` on rank 2 and `usual` on the others.
    fn check(usual: fn() -> Box<dyn Module>, other: fn() -> Box<dyn Module>, want: &str) {
        let results = on_ranks(3, |group| {
            let mut model = if group.rank().0 == 2 { other() } else { usual() };
            let parameters = Parameters::build(&mut model, &Device::cpu(1), 0);
            Ddp::new(group).prepare(&parameters)
        });
        for result in results {
            let message = result.unwrap_err().to_string();
            assert!(message.contains(want), "{message}, expected {want}");
        }
    }
    /// Two layers and no buffer.
    fn plain() -> Box<dyn Module> {
        Box::new(Half { used: Linear::new(2, 1), idle: Linear::new(2, 1) })
    }
    check(
        || Box::new(Linear::new(3, 5)),
        || Box::new(Linear::new(3, 4)),
        "rank 2 has weight of shape [4, 3] where rank 0 has weight of shape [5, 3]",
    );
    check(
        || Box::new(Linear::new(3, 5)),
        || Box::new(Linear::new(3, 5).without_bias()),
        "rank 2 has only 1 parameters and buffers where rank 0 has bias of shape [5]",
    );
    check(
        plain,
        || Box::new(Paths::new()),
        "rank 2 has first.weight of shape [1, 2] where rank 0 has used.weight",
    );
}
