//! Batch norms over the batch of all ranks, whose sums go from GPU to GPU.

use crate::fake::fake;
use crate::replays::launches;
use crate::{TOLERANCE, check_of, check_on, gpu_of, net, run, run_of, trainer};
use phalanx::comm::Group;
use phalanx::nn::{
    AdaptiveAvgPool2d, BatchNorm2d, Conv2d, Ctx, Flatten, Linear, Loss, Parameters, Sequential,
};
use phalanx::parallel::{BetweenGpus, Ddp, DdpConfig, Error, Pass, Recomputed, Strategy};
use phalanx::tensor::{DType, Device, Philox, Tensor};
use phalanx::{Precision, Trainer};
use std::ops::Range;
use std::sync::mpsc;
use std::time::Duration;

fn shared(between_gpus: BetweenGpus) -> DdpConfig {
    DdpConfig { sync_batch_norm: true, between_gpus, bucket_bytes: 4096, ..DdpConfig::default() }
}

/// Two batch norms, one behind the other, so that gradients of the one want those of the other.
fn deep() -> Sequential {
    Sequential::new()
        .then(Conv2d::new(1, 4, 5).stride(3))
        .then(BatchNorm2d::new(4))
        .then(Conv2d::new(4, 3, 3).without_bias())
        .then(BatchNorm2d::new(3))
        .then(AdaptiveAvgPool2d([1, 1]))
        .then(Flatten)
        .then(Linear::new(3, 10))
}

/// With GPUs of their own, ranks sum by NCCL, and never look; with one of all, by way of the host.
#[test]
fn a_batch_of_all_ranks_is_normalised_as_on_cpus() {
    let Some(fake) = fake() else { return };
    fake.gpus(3);
    for (ranks, between, seed) in
        [(2, BetweenGpus::Nccl, 1), (3, BetweenGpus::Nccl, 2), (2, BetweenGpus::Host, 3)]
    {
        fake.seed(seed);
        let trainer = Trainer { ddp: shared(between), batch_size: 4, steps: Some(3), ..trainer() };
        let exchanged = || fake.nccl().calls("ncclAllReduce");
        let sums = exchanged();
        let launched = || fake.log().iter().filter(|line| **line == "launch batch_shared").count();
        let before = launched();
        check_on(&fake, &trainer, ranks, &|rank| gpu_of(&fake, rank));
        assert_eq!(launched() - before, 3 * ranks);
        // Once forward and once backward in each step, beside the buckets of gradients.
        let by_nccl = (exchanged() - sums) as usize;
        assert_eq!(by_nccl >= 2 * 3 * ranks + 3 * ranks, between == BetweenGpus::Nccl, "{by_nccl}");
        check_of(&deep, &fake, &trainer, ranks, &|rank| gpu_of(&fake, rank));
    }
    let trainer = Trainer { ddp: shared(BetweenGpus::Best), batch_size: 4, ..trainer() };
    check_on(&fake, &trainer, 2, &|_| gpu_of(&fake, 0));
    assert_eq!(fake.nccl().live(), 0, "communicators that nobody ended");
    // A bucket of every gradient, so that some are whole before the last sum over the batch.
    let ddp = DdpConfig { bucket_bytes: 0, first_bucket_bytes: 0, ..shared(BetweenGpus::Host) };
    check_of(&deep, &fake, &Trainer { ddp, ..trainer }, 2, &|rank| gpu_of(&fake, rank));
}

/// Their sums are part of the graphs.
#[test]
fn passes_over_a_batch_of_all_ranks_are_replayed() {
    const STEPS: u64 = 6;
    let Some(fake) = fake() else { return };
    fake.gpus(2);
    for (precision, accumulate, seed) in [
        (Precision::Float32, 1, 1),
        (Precision::Bfloat16, 1, 2),
        (Precision::Float32, 2, 3),
        (Precision::Float16, 1, 4),
    ] {
        fake.seed(seed);
        let (ddp, batch_size, steps) = (shared(BetweenGpus::Nccl), 4, Some(STEPS));
        let trainer = Trainer { ddp, batch_size, accumulate, steps, precision, ..trainer() };
        let what = format!("{precision}, {accumulate} passes");
        let launched = launches(&fake, &what, |graphs| {
            let trainer = Trainer { graphs, ..trainer.clone() };
            let (told, left) = run(&trainer, 2, &|rank| gpu_of(&fake, rank));
            (told.losses, left)
        });
        assert_eq!(launched, 2 * accumulate as u64 * (STEPS - 2), "{what}");
    }
    assert_eq!(fake.nccl().live(), 0, "communicators that nobody ended");
}

/// What is made again asks for the same sums again, on all ranks alike, and moves running statistics once.
#[test]
fn what_is_computed_again_has_the_sums_of_all_ranks() {
    let Some(fake) = fake() else { return };
    fake.gpus(2);
    let blocks = || Recomputed::all_but_the_last(Box::new(deep()));
    let trainer = Trainer { ddp: shared(BetweenGpus::Nccl), batch_size: 4, steps: Some(4), ..trainer() };
    let (kept, left) = run_of(&deep, &trainer, 2, &|rank| gpu_of(&fake, rank));
    for (graphs, seed) in [(false, 1), (true, 2)] {
        fake.seed(seed);
        let (trainer, before) = (Trainer { graphs, ..trainer.clone() }, fake.calls("cuGraphLaunch"));
        let again = run_of(&blocks, &trainer, 2, &|rank| gpu_of(&fake, rank));
        assert_eq!(again.0.losses, kept.losses, "replayed: {graphs}");
        assert!(again.1 == left, "replayed: {graphs}: not the same bits");
        assert_eq!(fake.calls("cuGraphLaunch") > before, graphs);
    }
    assert_eq!((fake.damage(), fake.nccl().live()), (Vec::new(), 0));
}

/// A rank without samples has no values, and is part of the batch all the same.
#[test]
fn a_part_of_the_batch_may_be_empty() {
    let Some(fake) = fake() else { return };
    fake.gpus(3);
    for (between, seed) in [(BetweenGpus::Nccl, 1), (BetweenGpus::Host, 2)] {
        fake.seed(seed);
        let of = |device: &(dyn Fn(usize) -> Device + Sync)| -> Vec<Vec<Vec<f32>>> {
            let ranks = |group: Group| {
                let (rank, device) = (group.rank().index(), device(group.rank().index()));
                let mut net = deep();
                let parameters = Parameters::build(&mut net, &device, 3);
                let mut ddp = Ddp::with(group.clone(), shared(between));
                ddp.prepare(&parameters).unwrap();
                // Two samples for the first rank, one for the second, none for the third, who then has all three.
                let parts = [vec![2, 1, 0], vec![0, 0, 3]];
                let each = |(step, parts): (usize, &Vec<usize>)| {
                    let first: usize = parts[..rank].iter().sum();
                    let samples: Vec<u64> = (first..first + parts[rank]).map(|i| i as u64).collect();
                    let all = Tensor::uniform(
                        &device,
                        [3, 1, 28, 28],
                        -1.0,
                        1.0,
                        DType::F32,
                        Philox::new(5, step as u64),
                    );
                    let pass = Pass {
                        model: &net,
                        parameters: &parameters,
                        loss: Loss::Mse,
                        input: all.narrow(0, first, parts[rank]),
                        target: Tensor::ones(&device, [parts[rank], 10], DType::F32),
                        weight: parts[rank] as f64 / 3.0,
                        ctx: Ctx::train(0, step as u64, samples.into()),
                        sync: phalanx::parallel::Sync::Now,
                    };
                    parameters.grads().zero();
                    ddp.pass(&pass).unwrap();
                    ddp.finish(&parameters).unwrap();
                    let grads = parameters.grads().arena().read_flat::<f32>();
                    [grads, parameters.buffers().read_flat::<f32>()].concat()
                };
                let made = parts.iter().enumerate().map(each).collect();
                ddp.part(&parameters, None);
                made
            };
            std::thread::scope(|scope| {
                let all: Vec<_> =
                    Group::threads(3).into_iter().map(|group| scope.spawn(|| ranks(group))).collect();
                all.into_iter().map(|rank| rank.join().unwrap()).collect()
            })
        };
        let (got, want) = (of(&|rank| gpu_of(&fake, rank)), of(&|_| Device::cpu(1)));
        for (rank, (got, want)) in got.iter().zip(&want).enumerate() {
            for (step, (got, want)) in got.iter().zip(want).enumerate() {
                assert_eq!(got.len(), want.len());
                let is_near = |(got, want): (&f32, &f32)| f64::from((got - want).abs()) <= TOLERANCE;
                assert!(got.iter().zip(want).all(is_near), "{between:?}, rank {rank}, step {step}: {got:?}");
            }
        }
    }
    assert_eq!((fake.damage(), fake.nccl().live()), (Vec::new(), 0));
}

/// A rank that never comes to a pass, whether it is late or gone, ends it for the others: also one in which only layers wait for it.
#[test]
fn a_pass_that_another_rank_never_comes_to_ends() {
    let Some(fake) = fake() else { return };
    fake.gpus(3);
    let passes = |ddp: &mut Ddp, (net, parameters): (&Sequential, &Parameters), steps: Range<u64>| {
        let device = parameters.values().device();
        steps.into_iter().try_for_each(|step| -> Result<(), Error> {
            let pass = Pass {
                model: net,
                parameters,
                loss: Loss::Mse,
                input: Tensor::ones(device, [2, 1, 28, 28], DType::F32),
                target: Tensor::ones(device, [2, 10], DType::F32),
                ctx: Ctx::train(0, step, vec![0, 1].into()),
                weight: 1.0,
                sync: phalanx::parallel::Sync::Now,
            };
            ddp.pass(&pass)?;
            // Whoever comes to nothing is missed by layers already.
            assert!(step < 2, "a pass that nobody waits for in");
            ddp.finish(parameters)
        })
    };
    for (ranks, is_gone, timeout) in [(2, false, 4), (3, true, 90)] {
        let (done, is_done) = mpsc::channel();
        std::thread::scope(|scope| {
            let (end, is_end) = mpsc::channel::<()>();
            let mut is_end = Some(is_end);
            for group in Group::threads(ranks) {
                let group = group.with_timeout(Duration::from_secs(timeout));
                let is_end = is_end.take_if(|_| group.rank().index() + 1 == ranks);
                let (fake, passes, done, end) = (&fake, &passes, done.clone(), end.clone());
                scope.spawn(move || {
                    let device = gpu_of(fake, group.rank().index());
                    let mut net = net();
                    let parameters = Parameters::build(&mut net, &device, 3);
                    let model = (&net, &parameters);
                    let mut ddp = Ddp::with(group.clone(), shared(BetweenGpus::Nccl));
                    ddp.prepare(&parameters).unwrap();
                    passes(&mut ddp, model, 0..2).unwrap();
                    if let Some(is_end) = is_end {
                        drop(end);
                        // It lives, or doesn't, and makes no other.
                        return if is_gone {
                            drop((ddp, group))
                        } else {
                            is_end.recv().unwrap_err();
                        };
                    }
                    let words = passes(&mut ddp, model, 2..3).unwrap_err().to_string();
                    ddp.part(&parameters, Some("it is late"));
                    let values = parameters.values().read_flat::<f32>();
                    assert!(values.len() > 1000, "values that nobody waits for");
                    done.send(words).unwrap();
                });
            }
            drop(end);
            let told: Vec<_> = (1..ranks).map(|_| is_done.recv_timeout(Duration::from_secs(60))).collect();
            // A thread that hangs would keep the test for good.
            if told.iter().any(Result::is_err) {
                std::process::abort();
            }
            let is_named = |words: &Result<String, _>| {
                let words = words.as_ref().unwrap();
                if is_gone { words.contains("rank 2") } else { words.contains("all-reduce") }
            };
            assert!(told.iter().any(is_named), "{told:?}");
        });
    }
    assert_eq!(fake.nccl().live(), 0, "communicators that nobody ended");
}
