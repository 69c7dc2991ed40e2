//! A model whose activations are computed again learns the same bits with less memory, whoever trains it.

use phalanx_comm::Group;
use phalanx_nn::models::{Gpt, GptConfig, Head, MnistNet, ResNet, ResNetDepth, ResNetStem};
use phalanx_nn::optim::{Adam, Optimizer};
use phalanx_nn::{Ctx, Loss, Module, Parameters};
use phalanx_parallel::pipeline::{PipelineConfig, Pipelined, ScheduleKind};
use phalanx_parallel::{
    DataParallel, DataParallelConfig, Ddp, DdpConfig, Fsdp, FsdpConfig, LogicalShards, LogicalShardsConfig,
    Pass, Placed, Recomputed, SingleDevice, Strategy, Sync,
};
use phalanx_tensor::{Device, Philox, Tensor};
use std::sync::Arc;

/// A model, and the loss and the form of a sample that it is trained with.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Job {
    Mnist,
    ResNet,
    Gpt(Head),
}

const GPT: GptConfig =
    GptConfig { layers: 3, width: 32, heads: 4, context: 16, vocabulary: 32, dropout: 0.2, head: Head::Own };

impl Job {
    fn model(self) -> Box<dyn Module> {
        match self {
            Job::Mnist => Box::new(MnistNet::new(0.5)),
            Job::ResNet => Box::new(ResNet::new(ResNetDepth::D18, ResNetStem::Small, 10)),
            Job::Gpt(head) => Box::new(Gpt::new(GptConfig { head, ..GPT })),
        }
    }

    fn loss(self) -> Loss {
        if self == Job::Mnist { Loss::Nll } else { Loss::CrossEntropy { label_smoothing: 0.0 } }
    }

    /// Samples that are functions of their numbers.
    fn samples(self, device: &Device, ids: &[u64]) -> (Tensor, Tensor) {
        let words = |stream: u64, count: usize, of: i64| -> Vec<i64> {
            let word = |id: u64, i: usize| i64::from(Philox::new(id, stream).word(i as u64)) % of;
            ids.iter().flat_map(|&id| (0..count).map(move |i| word(id, i))).collect()
        };
        let n = ids.len();
        let image = |dims: [usize; 3]| {
            let values: Vec<f32> =
                words(1, dims.iter().product(), 1000).iter().map(|&word| word as f32 / 500.0 - 1.0).collect();
            Tensor::from_slice(device, &values, [n, dims[0], dims[1], dims[2]])
        };
        let labels = || Tensor::from_slice(device, &words(2, 1, 10), [n]);
        match self {
            Job::Mnist => (image([1, 28, 28]), labels()),
            Job::ResNet => (image([3, 8, 8]), labels()),
            Job::Gpt(_) => {
                let text = |stream| Tensor::from_slice(device, &words(stream, 16, 32), [n, 16]);
                (text(1), text(2))
            }
        }
    }
}

/// What is computed again.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Again {
    Nothing,
    Cheap,
    Blocks,
}

fn wrapped(model: Box<dyn Module>, again: Again) -> Box<dyn Module> {
    match again {
        Again::Nothing => model,
        Again::Cheap => Box::new(Recomputed::cheap(model)),
        Again::Blocks => Box::new(Recomputed::all_but_the_last(model)),
    }
}

const STEPS: u64 = 3;
const BATCH: u64 = 6;

/// The bits that training leaves: losses, values and buffers.
fn train(job: Job, model: &dyn Module, parameters: &Parameters, strategy: &mut dyn Strategy) -> Vec<u64> {
    let device = parameters.values().device().clone();
    let place = strategy.place();
    strategy.prepare(parameters).unwrap();
    let mut optimizer = Optimizer::new(Adam::default()).unwrap();
    let mut bits = Vec::new();
    for step in 0..STEPS {
        let passes = strategy.shards().map_or(1, |shards| shards.held.len());
        for pass in 0..passes {
            let of = place.world_size * passes;
            let part = place.rank * passes + pass;
            let ids: Vec<u64> =
                (0..BATCH).filter(|i| *i as usize % of == part).map(|i| step * BATCH + i).collect();
            let (input, target) = job.samples(&device, &ids);
            let weight = ids.len() as f64 / BATCH as f64;
            let (ctx, sync) = (Ctx::train(3, step, Arc::from(ids)), Sync::Now);
            let loss = job.loss();
            let pass = Pass { model, parameters, loss, input, target, ctx, weight, sync };
            bits.push(strategy.pass(&pass).unwrap().to_bits());
        }
        strategy.finish(parameters).unwrap();
        strategy.step(&mut optimizer, parameters, &device, 1.0).unwrap();
    }
    strategy.gather().unwrap();
    for arena in [parameters.values(), parameters.buffers()] {
        bits.extend(arena.read_flat::<f32>().iter().map(|x| u64::from(x.to_bits())));
    }
    bits
}

/// As each of `n` ranks, with a strategy that is made of the group, the model and its parameters.
fn ranks(
    n: usize,
    job: Job,
    again: Again,
    strategy: impl Fn(Group, &dyn Module, &Parameters) -> Box<dyn Strategy> + std::marker::Sync,
) -> Vec<u64> {
    std::thread::scope(|scope| {
        let threads: Vec<_> = Group::threads(n)
            .into_iter()
            .map(|group| {
                let strategy = &strategy;
                scope.spawn(move || {
                    let mut model = wrapped(job.model(), again);
                    let parameters = Parameters::build(&mut model, &Device::cpu(1), 7);
                    let mut strategy = strategy(group, &model, &parameters);
                    train(job, &model, &parameters, &mut *strategy)
                })
            })
            .collect();
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    })
}

fn check(job: Job, what: &str, run: impl Fn(Again) -> Vec<u64>) {
    let plain = run(Again::Nothing);
    // Only a language model has what costs little.
    let cheap = matches!(job, Job::Gpt(_)).then_some(Again::Cheap);
    for again in cheap.into_iter().chain([Again::Blocks]) {
        let got = run(again);
        let apart = plain.iter().zip(&got).filter(|(a, b)| a != b).count();
        assert!(
            plain.len() == got.len() && apart == 0,
            "{job:?}, {what}, {again:?}: {apart} of {}",
            plain.len()
        );
    }
}

#[test]
fn one_device_learns_the_same_bits() {
    for job in [Job::Mnist, Job::ResNet, Job::Gpt(Head::Own), Job::Gpt(Head::Tied)] {
        check(job, "alone", |again| ranks(1, job, again, |_, _, _| Box::new(SingleDevice::new())));
    }
}

#[test]
fn ranks_learn_the_same_bits_whatever_they_share() {
    // A bucket a parameter: leaves that are told too early or twice would be found.
    let config = DdpConfig { bucket_bytes: 0, first_bucket_bytes: 0, ..DdpConfig::default() };
    for job in [Job::Mnist, Job::Gpt(Head::Tied)] {
        check(job, "ddp", |again| {
            ranks(2, job, again, |group, _, _| Box::new(Ddp::with(group, config.clone())))
        });
        check(job, "fsdp", |again| {
            ranks(2, job, again, |group, model, parameters| {
                let config = FsdpConfig { unit_bytes: 0, ..FsdpConfig::default() };
                Box::new(Fsdp::new(group, model, parameters, config).unwrap())
            })
        });
        check(job, "logical shards", |again| {
            ranks(2, job, again, |group, _, _| {
                Box::new(LogicalShards::new(group, LogicalShardsConfig::new(4)).unwrap())
            })
        });
    }
    // Batch norms that sum over ranks, twice forward.
    let config = DdpConfig { sync_batch_norm: true, ..config };
    check(Job::ResNet, "ddp with a batch for all", |again| {
        ranks(2, Job::ResNet, again, |group, _, _| Box::new(Ddp::with(group, config.clone())))
    });
}

#[test]
fn several_devices_learn_the_same_bits() {
    for job in [Job::Mnist, Job::Gpt(Head::Own)] {
        let devices = [Device::cpu(1), Device::cpu(1)];
        let blocks = job.model().blocks();
        let cut = [0..2, 2..blocks];
        let places = || cut.iter().cloned().zip(devices.iter().cloned()).collect::<Vec<_>>();
        let on_both = |again: Again, strategy: &dyn Fn() -> Box<dyn Strategy>| {
            let mut model = Placed::new(job.model(), places()).unwrap();
            let parameters = model.build(7);
            let model = wrapped(Box::new(model), again);
            train(job, &model, &parameters, &mut *strategy())
        };
        check(job, "placed", |again| on_both(again, &|| Box::new(SingleDevice::new())));
        for kind in [ScheduleKind::OneFOneB, ScheduleKind::ZeroBubble] {
            let config =
                PipelineConfig { blocks: cut.to_vec(), devices: devices.to_vec(), kind, micro_batches: 3 };
            let pipeline = || Pipelined::new(config.clone()).unwrap();
            check(job, "pipelined", |again| {
                on_both(again, &|| Box::new(SingleDevice::with_local(pipeline())))
            });
        }
        check(job, "copied", |again| {
            let config = DataParallelConfig {
                others: vec![devices[1].clone()],
                model: Arc::new(move || wrapped(job.model(), again)),
            };
            ranks(1, job, again, |_, _, _| {
                Box::new(SingleDevice::with_local(DataParallel::new(&config).unwrap()))
            })
        });
    }
}

/// Bytes that are alive at a time in a training step, at most, without parameters.
fn most_alive(job: Job, samples: u64, model: Box<dyn Module>) -> usize {
    let (device, mut model) = (Device::cpu(1), model);
    let parameters = Parameters::build(&mut model, &device, 0);
    let ids: Vec<u64> = (0..samples).collect();
    let (input, target) = job.samples(&device, &ids);
    let mut strategy = SingleDevice::new();
    let (ctx, weight, sync) = (Ctx::train(0, 0, Arc::from(ids)), 1.0, Sync::Now);
    let pass =
        Pass { model: &model, parameters: &parameters, loss: job.loss(), input, target, ctx, weight, sync };
    device.take_most_live_bytes();
    strategy.pass(&pass).unwrap();
    device.take_most_live_bytes()
}

#[test]
fn activations_take_less_memory_by_what_blocks_keep() {
    let job = Job::Gpt(Head::Own);
    let deep = || -> Box<dyn Module> { Box::new(Gpt::new(GptConfig { layers: 12, ..GPT })) };
    let plain = most_alive(job, 16, deep());
    let again = most_alive(job, 16, Box::new(Recomputed::all_but_the_last(deep())));
    let half = most_alive(job, 16, Box::new(Recomputed::new(deep(), 0..7)));
    let cheap = most_alive(job, 16, Box::new(Recomputed::cheap(deep())));
    // A block keeps some 18 times its input: of 12 blocks 12 inputs are left, and what one block keeps.
    let input = 16 * 16 * GPT.width * 4;
    assert!(plain > 12 * 15 * input, "{plain} bytes, {input} an input");
    assert!(again < (12 + 30) * input, "{again} bytes, {input} an input");
    assert!(again < half && half < plain * 2 / 3, "{again}, {half} and {plain} bytes");
    // Without the results of two norms and a GELU, 6 times the input.
    assert!((5 * 12 * input..7 * 12 * input).contains(&(plain - cheap)), "{cheap} and {plain} bytes");
}
