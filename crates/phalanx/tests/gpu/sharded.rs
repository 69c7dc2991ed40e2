//! What ranks with GPUs share out among themselves: each stage of ZeRO, on a GPU a rank or on one that they share.

use crate::fake::fake;
use crate::{Most, RULE, TOLERANCE, Told, check_of, gpu, gpu_of, near, net, run_of, trainer};
use phalanx::checkpoint::{CheckpointConfig, Every};
use phalanx::comm::Group;
use phalanx::data::{Places, Silent, View, open};
use phalanx::nn::optim::{AdamW, Clip};
use phalanx::nn::{Ctx, Dropout, Flatten, Linear, Loss, Module, Parameters, Relu, Sequential, Visitor};
use phalanx::parallel::{BetweenGpus, Fsdp, FsdpConfig, Here, Pass, Sharded, Strategy};
use phalanx::tensor::{DType, Device, Tensor};
use phalanx::{Event, Observer, OnNan, Precision, Trainer, Worker};
use phalanx_fake_cuda::{Count, FakeCuda};
use std::sync::{Mutex, mpsc};
use std::time::Duration;

pub(crate) const STAGES: [Sharded; 3] = [Sharded::States, Sharded::Gradients, Sharded::Parameters];

fn sharded(sharded: Sharded, between_gpus: BetweenGpus) -> Trainer {
    let clip = Clip { norm: Some(0.5), value: Some(0.05) };
    let config = FsdpConfig { sharded, unit_bytes: 0, between_gpus, offload: false };
    Trainer { sharded: Some(config), clip, steps: Some(3), ..trainer() }
}

/// Learns the same whichever rank has which samples.
pub(crate) fn dense() -> Sequential {
    Sequential::new().then(Flatten).then(Linear::new(784, 32)).then(Relu).then(Linear::new(32, 10))
}

/// Among three ranks a few elements of each unit can't be shared out evenly.
#[test]
fn what_is_shared_out_learns_what_it_learns_on_cpus() {
    let Some(fake) = fake() else { return };
    fake.gpus(3);
    for stage in STAGES {
        let trainer = sharded(stage, BetweenGpus::Best);
        for ranks in [2, 3] {
            check_of(&net, &fake, &trainer, ranks, &|_| gpu(&fake));
            check_of(&net, &fake, &trainer, ranks, &|rank| gpu_of(&fake, rank));
        }
        // Several passes a step, whose gradients add up before they are summed.
        let trainer = Trainer { accumulate: 2, ..trainer };
        check_of(&net, &fake, &trainer, 2, &|rank| gpu_of(&fake, rank));
    }
    assert_eq!(fake.nccl().live(), 0, "communicators that nobody ended");
}

/// Values and gradients go from GPU to GPU where each rank has one.
#[test]
fn units_come_and_are_summed_from_gpu_to_gpu() {
    let Some(fake) = fake() else { return };
    fake.gpus(2);
    let calls = || ["ncclAllGather", "ncclReduceScatter"].map(|call| fake.nccl().calls(call));
    for (stage, gathers) in STAGES.into_iter().zip([3 * 3, 3 * 3, 3 * (3 + 2) + 3]) {
        let by = |between_gpus| {
            let trainer = Trainer { clip: Clip::default(), ..sharded(stage, between_gpus) };
            let (before, down) = (calls(), fake.count(Count::BytesDown));
            check_of(&net, &fake, &trainer, 2, &|rank| gpu_of(&fake, rank));
            let calls = calls();
            ([calls[0] - before[0], calls[1] - before[1]], fake.count(Count::BytesDown) - down)
        };
        let (called, down) = by(BetweenGpus::Nccl);
        let (none, more) = by(BetweenGpus::Host);
        // Two ranks, three steps, three units with parameters: values come once a step where they stay, else forward, backward but for
        // the last, which is here, and in the end.
        assert_eq!((called, none), ([2 * gathers, 2 * 3 * 3], [0, 0]), "{stage:?}");
        assert!(more > down + 2 * 3 * 4 * 1440, "{stage:?}: {down} bytes by NCCL, {more} by way of the host");
    }
}

/// Each stage leaves a rank less of the model: that of the optimizer's state, of gradients, of values.
#[test]
fn a_rank_has_no_more_memory_than_its_stage_needs() {
    const WIDE: usize = 128;
    const RANKS: usize = 4;
    let Some(fake) = fake() else { return };
    fake.gpus(RANKS as u32);
    let net = || {
        let first = Sequential::new().then(Flatten).then(Linear::new(784, 16)).then(Relu);
        let first = first.then(Linear::new(16, WIDE));
        (0..12).fold(first, |net, _| net.then(Relu).then(Linear::new(WIDE, WIDE))).then(Linear::new(WIDE, 10))
    };
    let most = |(sharded, offload): (Option<Sharded>, bool), graphs| {
        let config = |sharded| FsdpConfig { sharded, unit_bytes: 0, offload, ..FsdpConfig::default() };
        let config = sharded.map(config);
        let trainer = Trainer { sharded: config, steps: Some(4), graphs, ..trainer() };
        let found = Mutex::new(0);
        std::thread::scope(|scope| {
            for group in Group::threads(RANKS) {
                let (fake, found, trainer, net) = (&fake, &found, &trainer, &net);
                scope.spawn(move || {
                    let device = gpu_of(fake, group.rank().index());
                    let mut most = Most(device.clone(), 0);
                    let worker = Worker::with_device(group, device);
                    let data =
                        open("mnist-mini", View::default(), &Places::from_env(None), &mut Silent).unwrap();
                    let trained =
                        trainer.fit(&worker, &mut net(), AdamW::default(), data.train, None, &mut most);
                    trained.map(drop).unwrap_or_else(|error| panic!("{error}"));
                    if worker.is_first() {
                        *found.lock().unwrap() = most.1;
                    }
                });
            }
        });
        found.into_inner().unwrap()
    };
    let model = 4 * (784 * 16 + 16 * WIDE + 12 * WIDE * WIDE + 10 * WIDE);
    let [states, gradients, parameters] = STAGES.map(|stage| most((Some(stage), false), false));
    let (whole, offloaded) = (most((None, false), false), most((Some(Sharded::Parameters), true), false));
    let replayed = most((Some(Sharded::Parameters), false), true);
    // Of each of four arenas as long as the model, one rank of four has a quarter where it is shared out; of values and gradients beside
    // that a few units, each a thirteenth of the model, in buffers that are at most a quarter too large.
    let others = 3 * model / 4;
    let told =
        format!("model {model}: {whole} bytes, {states}, {gradients}, {parameters}, {offloaded}, {replayed}");
    assert!(states + 2 * others * 9 / 10 < whole, "{told}");
    assert!(gradients + others / 2 < states && parameters + others / 2 < gradients, "{told}");
    // A quarter of each arena more lies in the host's memory.
    assert!(offloaded + model * 9 / 10 < parameters, "{told}");
    // Units of a pass that is replayed use the same buffers in turn.
    assert!(replayed < parameters + model / 10, "{told}");
}

/// Nobody waits for a unit, and what comes and goes is in buffers that are used again.
#[test]
fn a_step_of_units_takes_no_memory_and_waits_for_the_loss_and_the_sums() {
    let Some(fake) = fake() else { return };
    fake.gpus(2);
    const CALLS: [&str; 4] = ["cuMemAlloc_v2", "cuMemHostAlloc", "cuMemFree_v2", "cuCtxSynchronize"];
    struct Counting<'a>(&'a FakeCuda, Vec<[u64; 5]>);
    impl Observer for Counting<'_> {
        fn event(&mut self, event: &Event) {
            if let Event::Step { .. } = event {
                let [a, b, c, d] = CALLS.map(|call| self.0.calls(call));
                self.1.push([a, b, c, d, self.0.count(Count::BytesDown)]);
            }
        }
    }
    // Several units, and one.
    for (stage, unit_bytes) in STAGES.into_iter().flat_map(|stage| [(stage, 0), (stage, 1 << 20)]) {
        let trainer = sharded(stage, BetweenGpus::Nccl);
        let config = trainer.sharded.map(|config| FsdpConfig { unit_bytes, ..config });
        let trainer =
            Trainer { steps: Some(8), clip: Clip::default(), batch_size: 4, sharded: config, ..trainer };
        let counted = Mutex::new(Vec::new());
        std::thread::scope(|scope| {
            for group in Group::threads(2) {
                let (fake, trainer, counted) = (&fake, &trainer, &counted);
                scope.spawn(move || {
                    let worker = Worker::with_device(group.clone(), gpu_of(fake, group.rank().index()));
                    let data =
                        open("mnist-mini", View::default(), &Places::from_env(None), &mut Silent).unwrap();
                    let mut counting = Counting(fake, Vec::new());
                    let trained = trainer.fit(&worker, &mut dense(), RULE, data.train, None, &mut counting);
                    trained.map(drop).unwrap_or_else(|error| panic!("{error}"));
                    if worker.is_first() {
                        *counted.lock().unwrap() = counting.1;
                    }
                });
            }
        });
        let counted = counted.into_inner().unwrap();
        // Ranks are at most a step apart, so what both count over the last steps is of about as many.
        let rose: Vec<u64> = (0..5).map(|i| counted[7][i] - counted[4][i]).collect();
        assert_eq!(&rose[..4], [0; 4], "{stage:?}, {unit_bytes}: {rose:?}");
        assert!(rose[4] <= 2 * 4 * 4, "{stage:?}: {} bytes came to the host, where losses have 4", rose[4]);
    }
}

/// Gradients are added up in zeros; values are overwritten whole by the gather that brings them.
#[test]
fn no_memory_is_cleared_for_what_a_gather_overwrites() {
    let Some(fake) = fake() else { return };
    fake.gpus(2);
    let cleared = |steps: u64| {
        let trainer = Trainer { steps: Some(steps), ..sharded(Sharded::Parameters, BetweenGpus::Nccl) };
        let before = fake.calls("cuMemsetD8Async");
        run_of(&dense, &trainer, 2, &|rank| gpu_of(&fake, rank));
        fake.calls("cuMemsetD8Async") - before
    };
    // Two ranks and two units, each of which is gathered twice in a step but for the last, and has its gradients once.
    let (few, many) = (cleared(4), cleared(8));
    assert_eq!(many - few, 4 * 2 * 2, "{few} in 4 steps, {many} in 8");
    assert_eq!(fake.damage(), [""; 0]);
}

/// Each rank writes what it holds; another number of ranks goes on with it.
#[test]
fn a_run_goes_on_from_the_parts_of_others() {
    let Some(fake) = fake() else { return };
    fake.gpus(3);
    for stage in STAGES {
        let folder = tempfile::tempdir().unwrap();
        let of = |steps: u64, dir: &str, resume: bool, ranks: usize| {
            let checkpoint = CheckpointConfig {
                every: Every::Steps(2),
                resume,
                parts: true,
                ..CheckpointConfig::new(folder.path().join(dir))
            };
            let trainer = Trainer { ema: Some(0.5), steps: Some(steps), ..sharded(stage, BetweenGpus::Best) };
            let trainer = Trainer { checkpoint: Some(checkpoint), batch_size: 24 / ranks, ..trainer };
            run_of(&dense, &trainer, ranks, &|rank| gpu_of(&fake, rank))
        };
        let (whole, left) = of(4, "whole", false, 2);
        of(2, "parts", false, 2);
        let (rest, rest_left) = of(4, "parts", true, 2);
        assert_eq!(whole.losses[2..], rest.losses, "{stage:?}");
        assert!(left == rest_left, "{stage:?}: not the same bits");
        of(2, "others", false, 3);
        let (rest, rest_left) = of(4, "others", true, 2);
        assert!((whole.losses[3] - rest.losses[1]).abs() <= TOLERANCE, "{stage:?}");
        for (got, want) in rest_left.iter().zip(&left) {
            assert_eq!(got.is_some(), want.is_some());
            got.iter().zip(want).for_each(|(got, want)| near(got, want));
        }
    }
    assert_eq!(fake.damage(), [""; 0]);
}

/// What ranks hold lies in the host's memory, where the optimizer moves it.
#[test]
fn what_is_held_in_the_hosts_memory_learns_the_same() {
    let Some(fake) = fake() else { return };
    fake.gpus(3);
    let ways = [
        (BetweenGpus::Nccl, Precision::Float32),
        (BetweenGpus::Nccl, Precision::Bfloat16),
        (BetweenGpus::Host, Precision::Float32),
        (BetweenGpus::Host, Precision::Float16),
    ];
    for (between_gpus, precision) in ways {
        let trainer = Trainer { accumulate: 2, precision, ..sharded(Sharded::Parameters, between_gpus) };
        let config = trainer.sharded.map(|config| FsdpConfig { offload: true, ..config });
        let offloaded = Trainer { sharded: config, ..trainer.clone() };
        // A rank alone shares nothing out, and has as little on its GPU.
        for ranks in [1, 2, 3] {
            let of = |trainer: &Trainer| run_of(&net, trainer, ranks, &|rank| gpu_of(&fake, rank));
            let ((want, want_left), (got, left)) = (of(&trainer), of(&offloaded));
            let apart = |got: f64, want: f64| (got - want).abs() <= TOLERANCE;
            assert!(got.losses.iter().zip(&want.losses).all(|(got, want)| apart(*got, *want)));
            assert!(got.norms.iter().zip(&want.norms).all(|(got, want)| apart(got.unwrap(), want.unwrap())));
            for (got, want) in left.iter().zip(&want_left) {
                assert_eq!(got.is_some(), want.is_some());
                got.iter().zip(want).for_each(|(got, want)| near(got, want));
            }
        }
    }
    assert_eq!(fake.damage(), [""; 0]);
    let refused = |trainer: Trainer, device: &(dyn Fn() -> Device + Sync)| {
        let config = trainer.sharded.map(|config| FsdpConfig { offload: true, ..config });
        let trainer = Trainer { sharded: config, ..trainer };
        let words = Mutex::new(String::new());
        std::thread::scope(|scope| {
            for group in Group::threads(2) {
                let (trainer, words) = (&trainer, &words);
                scope.spawn(move || {
                    let worker = Worker::with_device(group, device());
                    let data =
                        open("mnist-mini", View::default(), &Places::from_env(None), &mut Silent).unwrap();
                    let trained =
                        trainer.fit(&worker, &mut net(), RULE, data.train, None, &mut Told::default());
                    *words.lock().unwrap() = trained.map(drop).unwrap_err().to_string();
                });
            }
        });
        words.into_inner().unwrap()
    };
    let words = refused(sharded(Sharded::Parameters, BetweenGpus::Host), &|| Device::cpu(1));
    assert!(words.contains("parallel.offload: the model lies in the host's memory"), "{words}");
    let words = refused(sharded(Sharded::Gradients, BetweenGpus::Host), &|| gpu(&fake));
    assert!(words.contains("parallel.offload: parameters aren't shared out"), "{words}");
}

/// What is held comes up and goes down beside what is computed, from memory and to memory that is there, where products are made in
/// 16 bits as half the bytes; and the host waits for nothing between.
#[test]
fn what_is_held_in_the_hosts_memory_comes_and_goes_beside_what_is_computed() {
    let Some(fake) = fake() else { return };
    fake.gpus(2);
    const CALLS: [&str; 3] = ["cuMemAlloc_v2", "cuMemHostAlloc", "cuEventCreate"];
    for ranks in [1, 2] {
        let of = |precision: Precision, steps: u64| {
            let trainer =
                Trainer { clip: Clip::default(), ..sharded(Sharded::Parameters, BetweenGpus::Nccl) };
            let config = trainer.sharded.map(|config| FsdpConfig { offload: true, ..config });
            let trainer =
                Trainer { sharded: config, precision, steps: Some(steps), batch_size: 4, ..trainer };
            let counts = || {
                let [a, b, c] = CALLS.map(|call| fake.calls(call));
                let beside = fake.count(Count::BytesBeside);
                [a, b, c, beside, fake.count(Count::BytesUp) + fake.count(Count::BytesDown) - beside]
            };
            let before = counts();
            run_of(&dense, &trainer, ranks, &|rank| gpu_of(&fake, rank));
            let after = counts();
            std::array::from_fn::<u64, 5, _>(|i| after[i] - before[i])
        };
        let [first, last] = [784 * 32 + 32, 32 * 10 + 10].map(|n: u64| n.next_multiple_of(64));
        for (precision, up) in [(Precision::Float32, 4), (Precision::Bfloat16, 2)] {
            let (few, many) = (of(precision, 4), of(precision, 12));
            // How many are out at a time differs a little from run to run.
            let rose: [u64; 5] = std::array::from_fn(|i| many[i].saturating_sub(few[i]));
            assert!(rose[..3].iter().all(|&calls| calls <= 8), "{ranks} ranks, {precision:?}: {rose:?}");
            // All ranks together have of each unit what comes up twice, but of the last, and goes down once; and samples come up.
            let moved = 8 * (up * (2 * first + last) + 4 * (first + last));
            let samples = 8 * ranks as u64 * 4 * (784 * 4 + 8);
            assert!((moved..moved + samples).contains(&rose[3]), "{ranks}, {precision:?}: {rose:?}, {moved}");
            // Losses, and few numbers of a batch.
            assert!(rose[4] <= moved / 100, "{ranks} ranks, {precision:?}: {rose:?}");
        }
    }
}

/// From the second step on a unit comes as what products make of it, but for what is read in float32.
#[test]
fn units_come_in_16_bits_where_products_are_made_in_them() {
    let Some(fake) = fake() else { return };
    fake.gpus(2);
    let gathered = |steps: u64| {
        let trainer = sharded(Sharded::Parameters, BetweenGpus::Nccl);
        let trainer = Trainer { precision: Precision::Bfloat16, steps: Some(steps), ..trainer };
        let before = fake.nccl().log().len();
        run_of(&dense, &trainer, 2, &|rank| gpu_of(&fake, rank));
        let log = fake.nccl().log();
        let of = |dtype: &str| {
            let gathers = log[before..].iter().filter(|line| line.starts_with("ncclAllGather"));
            gathers.filter(|line| line.contains(dtype)).count()
        };
        [of("type=7"), of("type=9")]
    };
    let (one, three) = (gathered(1), gathered(3));
    // Two ranks, two units: forward, backward the first alone, since the last is here, and in the end both, whole.
    assert_eq!(one, [2 * (3 + 2), 0]);
    assert_eq!(three, [2 * (3 + 2), 2 * 2 * 3]);
}

/// Gradients that are no numbers are found where a rank holds them, and named.
#[test]
fn a_gradient_that_is_no_number_is_found_in_a_ranks_part() {
    let Some(fake) = fake() else { return };
    fake.gpus(2);
    // Its loss is a number, and the gradient of what is before it isn't.
    struct Root;
    impl Module for Root {
        fn forward(&self, x: &Tensor, _: &mut Ctx) -> Tensor {
            x + &(x - x).sqrt()
        }

        fn visit(&mut self, _: &mut Visitor<'_>) {}
    }
    let found = |stage: Sharded, on_nan: OnNan, clip: Clip, spoilt: bool| {
        let trainer = Trainer { on_nan, clip, ..sharded(stage, BetweenGpus::Nccl) };
        let words = Mutex::new(Vec::new());
        std::thread::scope(|scope| {
            for group in Group::threads(2) {
                let (fake, trainer, words) = (&fake, &trainer, &words);
                scope.spawn(move || {
                    let worker = Worker::with_device(group.clone(), gpu_of(fake, group.rank().index()));
                    let data =
                        open("mnist-mini", View::default(), &Places::from_env(None), &mut Silent).unwrap();
                    let mut net = if spoilt { dense().then(Root) } else { dense() };
                    let trained =
                        trainer.fit(&worker, &mut net, RULE, data.train, None, &mut Told::default());
                    let error = trained.map(drop).err().map(|error| error.to_string());
                    words.lock().unwrap().push(error.unwrap_or_default());
                });
            }
        });
        words.into_inner().unwrap()
    };
    let clip = Clip { norm: Some(0.5), value: None };
    for stage in STAGES {
        for (on_nan, clip) in [(OnNan::Stop, Clip::default()), (OnNan::Loss, clip)] {
            assert_eq!(found(stage, on_nan, clip, false), ["", ""], "{stage:?}");
            let words = found(stage, on_nan, clip, true);
            assert!(
                words.iter().any(|words| words.contains("the gradient of 1.weight is NaN")),
                "{stage:?}: {words:?}"
            );
        }
    }
}

/// However much a pass would give its GPU to do behind a gather that never comes, it finds out.
#[test]
fn a_pass_that_another_rank_never_makes_ends_at_its_time_limit() {
    let Some(fake) = fake() else { return };
    fake.gpus(2);
    let net = || {
        (0..14).fold(Sequential::new().then(Flatten), |net, _| {
            net.then(Linear::new(784, 784)).then(Dropout::new(0.5))
        })
    };
    for stage in STAGES {
        let (done, is_done) = mpsc::channel();
        std::thread::scope(|scope| {
            let mut groups =
                Group::threads(2).into_iter().map(|group| group.with_timeout(Duration::from_secs(2)));
            let (group, other) = (groups.next().unwrap(), groups.next().unwrap());
            let prepared = |group: Group, device: &Device, net: &mut Sequential| {
                let parameters = Parameters::build(net, device, 3);
                let config = FsdpConfig { sharded: stage, unit_bytes: 0, ..FsdpConfig::default() };
                let mut fsdp = Fsdp::new(group, net, &parameters, config).unwrap();
                fsdp.prepare(&parameters).unwrap();
                fsdp.begin(&parameters, Here::All).unwrap();
                (fsdp, parameters)
            };
            let (end, is_end) = mpsc::channel::<()>();
            let (fake, net) = (&fake, &net);
            scope.spawn(move || {
                let _fsdp = prepared(other, &gpu_of(fake, 1), &mut net());
                // It lives, and makes no pass.
                is_end.recv().unwrap_err();
            });
            scope.spawn(move || {
                let (device, mut net) = (gpu_of(fake, 0), net());
                let (mut fsdp, parameters) = prepared(group, &device, &mut net);
                let pass = Pass {
                    model: &net,
                    parameters: &parameters,
                    loss: Loss::Mse,
                    input: Tensor::ones(&device, [1, 1, 28, 28], DType::F32),
                    target: Tensor::ones(&device, [1, 784], DType::F32),
                    ctx: Ctx::train(0, 0, vec![0].into()),
                    weight: 0.5,
                    sync: phalanx::parallel::Sync::Now,
                };
                let made = fsdp.pass(&pass).map(drop).and_then(|()| fsdp.finish(&parameters));
                fsdp.part(&parameters, Some("it is late"));
                drop(end);
                done.send(made.unwrap_err().to_string()).unwrap();
            });
            let words = is_done.recv_timeout(Duration::from_secs(90));
            // A thread that hangs would keep the test for good.
            let Ok(words) = words else { std::process::abort() };
            assert!(words.contains("rank 1") || words.contains("2 s"), "{stage:?}: {words}");
        });
    }
}

/// Events that stand for gathers and sums are used again.
#[test]
fn a_step_leaves_no_events_behind() {
    let Some(fake) = fake() else { return };
    fake.gpus(2);
    for (stage, unit_bytes) in STAGES.into_iter().flat_map(|stage| [(stage, 0), (stage, 1 << 20)]) {
        let made = |steps: u64| {
            let trainer = sharded(stage, BetweenGpus::Nccl);
            let config = trainer.sharded.map(|config| FsdpConfig { unit_bytes, ..config });
            let trainer = Trainer { steps: Some(steps), batch_size: 4, sharded: config, ..trainer };
            let before = fake.calls("cuEventCreate");
            run_of(&dense, &trainer, 2, &|rank| gpu_of(&fake, rank));
            fake.calls("cuEventCreate") - before
        };
        let (few, many) = (made(4), made(12));
        // How many are out at a time differs a little from run to run.
        assert!(few > 0 && many <= few + 8, "{stage:?}, {unit_bytes}: {few} events in 4 steps, {many} in 12");
    }
}
