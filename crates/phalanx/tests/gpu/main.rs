//! Runs on a GPU, against the same on a CPU: on the fake driver. Where there is no C++ compiler, tests say so and pass.

mod ahead;
mod fake;
mod given_up;
mod judged;
mod launches;
mod leaks;
mod lent;
mod memory;
mod mesh;
mod owed;
mod precision;
mod recompute;
mod rehearsed;
mod replays;
mod samples;
mod searched;
mod sharded;
mod shared_batch;

use fake::fake;
use phalanx::checkpoint::{CheckpointConfig, Every};
use phalanx::comm::Group;
use phalanx::data::{Places, Silent, View, open};
use phalanx::nn::optim::{Clip, Sgd};
use phalanx::nn::{
    BatchNorm2d, Conv2d, Ctx, Dropout2d, Flatten, Linear, Loss, MaxPool2d, Module, Parameters, Sequential,
    Visitor, WeightedCrossEntropy, Weights,
};
use phalanx::parallel::{BetweenGpus, Compress, Ddp, DdpConfig, FsdpConfig, Strategy};
use phalanx::tensor::{DType, Device, GpuOptions, Tensor};
use phalanx::{Event, Observer, OnNan, Trainer, Worker};
use phalanx_fake_cuda::{Count, FakeCuda};
use std::path::Path;
use std::sync::{Mutex, mpsc};
use std::time::Duration;

/// What losses and weights may be off by: roundings of float32 in another order, which the steps of a test carry on.
const TOLERANCE: f64 = 2e-4;

/// GPU 0, opened once more.
fn gpu(fake: &FakeCuda) -> Device {
    gpu_of(fake, 0)
}

fn gpu_of(fake: &FakeCuda, number: usize) -> Device {
    let options = GpuOptions { libraries: vec![fake.folder().to_owned()], ..GpuOptions::default() };
    Device::cuda(number as u32, &options).unwrap_or_else(|error| panic!("{error}"))
}

/// Convolutions, a batch norm with its buffers, dropout, and few numbers.
fn net() -> Sequential {
    Sequential::new()
        .then(Conv2d::new(1, 4, 5))
        .then(BatchNorm2d::new(4))
        .then(MaxPool2d::new(4))
        .then(Dropout2d(0.25))
        .then(Flatten)
        .then(Linear::new(144, 10))
}

/// With a state, and without Adam's way of making much of a gradient that is nothing but rounding.
const RULE: Sgd = Sgd { momentum: 0.9, ..Sgd::new(0.02) };

/// A run over the first digits, small enough for a driver that plays a GPU.
fn trainer() -> Trainer {
    Trainer {
        loss: Loss::CrossEntropy { label_smoothing: 0.0 },
        batch_size: 8,
        steps: Some(4),
        ..Trainer::default()
    }
}

#[derive(Default)]
struct Told {
    losses: Vec<f64>,
    norms: Vec<Option<f64>>,
}

impl Observer for Told {
    fn event(&mut self, event: &Event) {
        if let Event::Step { loss, grad_norm, .. } = event {
            self.losses.push(*loss);
            self.norms.push(*grad_norm);
        }
    }
}

/// The most bytes of a device that anything of a run had when a step was done.
struct Most(Device, usize);

impl Observer for Most {
    fn event(&mut self, event: &Event) {
        if let Event::Step { .. } = event {
            self.1 = self.1.max(self.0.held_bytes());
        }
    }
}

/// What a run of so many ranks, each on a device of its own, has told on the first of them, and its weights, its mean weights and
/// the state of its optimizer.
fn run(
    trainer: &Trainer,
    ranks: usize,
    device: &(dyn Fn(usize) -> Device + Sync),
) -> (Told, [Option<Weights>; 3]) {
    run_of(&net, trainer, ranks, device)
}

/// The same of another model.
fn run_of<M: Module>(
    net: &(dyn Fn() -> M + Sync),
    trainer: &Trainer,
    ranks: usize,
    device: &(dyn Fn(usize) -> Device + Sync),
) -> (Told, [Option<Weights>; 3]) {
    let results = Mutex::default();
    std::thread::scope(|scope| {
        for group in Group::threads(ranks) {
            let results = &results;
            scope.spawn(move || {
                let worker = {
                    let rank = group.rank().index();
                    Worker::with_device(group, device(rank))
                };
                let data = open("mnist-mini", View::default(), &Places::from_env(None), &mut Silent).unwrap();
                let mut told = Told::default();
                let trained = trainer.fit(&worker, &mut net(), RULE, data.train, None, &mut told);
                let mut trained = trained.unwrap_or_else(|error| panic!("{error}"));
                if worker.is_first() {
                    let parameters = &trained.parameters;
                    let mean = trained.state.average.as_mut().map(|mean| mean.to_weights(parameters));
                    let state = trained.state.optimizer.to_weights(parameters);
                    *results.lock().unwrap() =
                        Some((told, [Some(parameters.to_weights()), mean, Some(state)]));
                }
            });
        }
    });
    results.into_inner().unwrap().expect("the first rank has left its results")
}

#[track_caller]
fn near(got: &Weights, want: &Weights) {
    for name in want.names() {
        let (got, want) = (got.get(name).unwrap().1, want.get(name).unwrap().1);
        for (i, (got, want)) in got.iter().zip(want).enumerate() {
            assert!(f64::from((got - want).abs()) <= TOLERANCE, "{name}, {i}: {got}, not {want}");
        }
    }
}

#[track_caller]
fn check(trainer: &Trainer, ranks: usize) {
    let Some(fake) = fake() else { return };
    check_on(&fake, trainer, ranks, &|_| gpu(&fake));
}

/// The same, each rank on a GPU that it is given.
#[track_caller]
fn check_on(fake: &FakeCuda, trainer: &Trainer, ranks: usize, device: &(dyn Fn(usize) -> Device + Sync)) {
    check_of(&net, fake, trainer, ranks, device);
}

/// The same of another model.
#[track_caller]
fn check_of(
    net: &(dyn Fn() -> Sequential + Sync),
    fake: &FakeCuda,
    trainer: &Trainer,
    ranks: usize,
    device: &(dyn Fn(usize) -> Device + Sync),
) {
    let (told, left) = run_of(net, trainer, ranks, device);
    let (want, want_left) = run_of(net, trainer, ranks, &|_| Device::cpu(1));
    assert_eq!(told.losses.len(), want.losses.len());
    for (step, (got, want)) in told.losses.iter().zip(&want.losses).enumerate() {
        assert!((got - want).abs() <= TOLERANCE, "step {step}: {got}, not {want}");
    }
    for (step, (got, want)) in told.norms.iter().zip(&want.norms).enumerate() {
        let apart = got.zip(*want).map_or(0.0, |(got, want)| (got - want).abs());
        assert!(got.is_some() == want.is_some() && apart <= TOLERANCE, "step {step}: {got:?}, not {want:?}");
    }
    for (got, want) in left.iter().zip(&want_left) {
        assert_eq!(got.is_some(), want.is_some());
        got.iter().zip(want).for_each(|(got, want)| near(got, want));
    }
    assert_eq!(fake.damage(), [""; 0]);
}

#[test]
fn a_run_is_that_of_a_cpu() {
    check(&trainer(), 1);
}

#[test]
fn passes_that_add_up_cut_gradients_and_a_running_mean_are_those_of_a_cpu() {
    let clip = Clip { norm: Some(0.5), value: Some(0.05) };
    let trainer =
        Trainer { clip, accumulate: 2, ema: Some(0.75), on_nan: OnNan::Stop, steps: Some(3), ..trainer() };
    check(&trainer, 1);
    let clip = Clip { norm: Some(0.5), value: None };
    check(&Trainer { clip, batch_size: 4, steps: Some(3), ..crate::trainer() }, 2);
}

#[test]
fn logical_shards_are_those_of_a_cpu() {
    check(&Trainer { logical_shards: Some(3), batch_size: 4, steps: Some(2), ..trainer() }, 1);
}

#[test]
fn a_run_goes_on_from_a_checkpoint_in_the_same_bits() {
    let Some(fake) = fake() else { return };
    let folder = tempfile::tempdir().unwrap();
    let of = |steps: u64, dir: &Path, resume: bool| {
        let checkpoint =
            CheckpointConfig { every: Every::Steps(2), resume, ..CheckpointConfig::new(dir.to_owned()) };
        let trainer =
            Trainer { checkpoint: Some(checkpoint), ema: Some(0.5), steps: Some(steps), ..trainer() };
        run(&trainer, 1, &|_| gpu(&fake))
    };
    let (whole, left) = of(5, &folder.path().join("whole"), false);
    of(2, &folder.path().join("parts"), false);
    let (rest, rest_left) = of(5, &folder.path().join("parts"), true);
    assert_eq!(whole.losses[2..], rest.losses);
    assert!(left == rest_left, "not the same bits");
    assert_eq!(fake.damage(), [""; 0]);
}

#[test]
fn a_step_waits_once_for_the_loss_and_takes_no_memory() {
    let Some(fake) = fake() else { return };
    struct Counting<'a>(&'a FakeCuda, Vec<[u64; 7]>);
    impl Observer for Counting<'_> {
        fn event(&mut self, event: &Event) {
            if let Event::Step { .. } = event {
                let calls = [
                    "cuMemAlloc_v2",
                    "cuMemHostAlloc",
                    "cuMemFree_v2",
                    "cuCtxSynchronize",
                    "cuStreamSynchronize",
                    "cuEventSynchronize",
                ];
                let [a, b, c, d, e, f] = calls.map(|call| self.0.calls(call));
                self.1.push([a, b, c, d, e, f, self.0.count(Count::BytesDown)]);
            }
        }
    }
    let device = gpu(&fake);
    let worker = Worker::with_device(Group::solo(), device.clone());
    let data = open("mnist-mini", View::default(), &Places::from_env(None), &mut Silent).unwrap();
    let mut counting = Counting(&fake, Vec::new());
    let trainer = Trainer { steps: Some(8), ..trainer() };
    trainer.fit(&worker, &mut net(), RULE, data.train, None, &mut counting).unwrap();
    // What is told of the last step follows what is told of the one before, and nothing is given between.
    for (step, pair) in counting.1[..7].windows(2).enumerate().skip(3) {
        let rose: Vec<u64> = pair[1].iter().zip(pair[0]).map(|(after, before)| after - before).collect();
        assert_eq!((&rose[..4], rose[4] + rose[5], rose[6]), (&[0; 4][..], 1, 4), "step {step}: {rose:?}");
    }
}

#[test]
fn ranks_on_one_gpu_sum_their_gradients_by_way_of_the_host() {
    check(&Trainer { batch_size: 4, ..trainer() }, 2);
}

#[test]
fn ranks_with_a_gpu_each_sum_their_gradients_by_nccl() {
    let Some(fake) = fake() else { return };
    fake.gpus(3);
    // Several buckets a step.
    let ddp = DdpConfig { bucket_bytes: 4096, first_bucket_bytes: 0, ..DdpConfig::default() };
    let by_nccl = DdpConfig { between_gpus: BetweenGpus::Nccl, ..ddp.clone() };
    for ranks in [2, 3] {
        let trainer = Trainer { batch_size: 4, ddp: by_nccl.clone(), ..trainer() };
        let (before, down) = (fake.nccl().calls("ncclAllReduce"), fake.count(Count::BytesDown));
        check_on(&fake, &trainer, ranks, &|rank| gpu_of(&fake, rank));
        let (sums, brought) =
            (fake.nccl().calls("ncclAllReduce") - before, fake.count(Count::BytesDown) - down);
        assert!(sums as usize >= ranks * 4 * 3, "{sums} all-reduces of {ranks} ranks");
        // By way of the host the same run brings its gradients there.
        let trainer =
            Trainer { ddp: DdpConfig { between_gpus: BetweenGpus::Host, ..ddp.clone() }, ..trainer };
        let (before, down) = (fake.nccl().calls("ncclAllReduce"), fake.count(Count::BytesDown));
        check_on(&fake, &trainer, ranks, &|rank| gpu_of(&fake, rank));
        assert_eq!(fake.nccl().calls("ncclAllReduce"), before);
        // Four bytes for each number of the kernels, the norm and the dense layer, a rank and step.
        let gradients = 4 * (104 + 8 + 1450) * ranks as u64 * 4;
        let more = fake.count(Count::BytesDown) - down;
        assert!(more >= brought + gradients / 2, "{more} bytes against {brought}");
    }
    assert_eq!(fake.nccl().live(), 0, "communicators that nobody ended");
}

#[test]
fn gradients_that_are_compressed_go_by_way_of_the_host() {
    let Some(fake) = fake() else { return };
    let ddp = DdpConfig { compress: Compress::Bf16, ..DdpConfig::default() };
    let trainer = Trainer { batch_size: 4, ddp, steps: Some(2), ..trainer() };
    let (told, _) = run(&trainer, 2, &|rank| gpu_of(&fake, rank));
    let (want, _) = run(&trainer, 2, &|_| Device::cpu(1));
    assert!((told.losses[1] - want.losses[1]).abs() < 1e-2, "{:?}, not {:?}", told.losses, want.losses);
    assert_eq!(fake.nccl().calls("ncclAllReduce"), 0);
}

#[test]
fn nccl_that_is_asked_for_and_cannot_be_used_ends_the_run_with_words() {
    let Some(fake) = fake() else { return };
    let ddp = DdpConfig { between_gpus: BetweenGpus::Nccl, ..DdpConfig::default() };
    let trainer = Trainer { batch_size: 4, ddp, ..trainer() };
    std::thread::scope(|scope| {
        for group in Group::threads(2) {
            let (fake, trainer) = (&fake, &trainer);
            scope.spawn(move || {
                let worker = Worker::with_device(group, gpu(fake));
                let data = open("mnist-mini", View::default(), &Places::from_env(None), &mut Silent).unwrap();
                let trained = trainer.fit(&worker, &mut net(), RULE, data.train, None, &mut Told::default());
                let words = trained.err().expect("both are on one GPU").to_string();
                let parts =
                    ["ranks 0 and 1 compute on one GPU", "--nproc-per-node gpu", "parallel.between_gpus"];
                assert!(parts.iter().all(|part| words.contains(part)), "{words}");
            });
        }
    });
}

#[test]
fn replayed_passes_have_the_bits_of_passes_that_are_made() {
    let Some(fake) = fake() else { return };
    let made = run(&Trainer { steps: Some(7), ..trainer() }, 1, &|_| gpu(&fake));
    let before = fake.calls("cuGraphLaunch");
    let replayed = run(&Trainer { steps: Some(7), graphs: true, ..trainer() }, 1, &|_| gpu(&fake));
    assert_eq!(made.0.losses, replayed.0.losses);
    assert!(made.1 == replayed.1, "not the same bits");
    // The first pass is made, the second is recorded.
    assert_eq!((before, fake.calls("cuGraphLaunch")), (0, 5));
    assert_eq!((fake.damage(), fake.count(Count::Graphs), fake.count(Count::Pieces)), (Vec::new(), 0, 0));
}

/// What labels count is known on the host, which divides what the GPU has summed by it.
#[test]
fn labels_that_count_unlike_teach_what_they_teach_on_a_cpu() {
    let Some(fake) = fake() else { return };
    let weights = (1..=10).map(|class| 0.25 * class as f32).collect();
    let weighted = WeightedCrossEntropy { weights, ignored: Some(3), ..Default::default() };
    let clip = Clip { norm: Some(0.5), value: None };
    let loss = Loss::WeightedCrossEntropy(weighted);
    let trainer = Trainer { loss, clip, accumulate: 2, batch_size: 8, steps: Some(6), ..trainer() };
    for ranks in [1, 2] {
        check_on(&fake, &trainer, ranks, &|_| gpu(&fake));
    }
    let sharded = Trainer { sharded: Some(FsdpConfig::default()), ..trainer };
    check_on(&fake, &sharded, 2, &|_| gpu(&fake));
}

/// Weights of classes, and what is chosen by labels, are parts of a graph; so is what a program makes of outputs and targets.
#[test]
fn losses_that_are_made_of_other_operations_are_replayed() {
    let Some(fake) = fake() else { return };
    let weights = (1..=10).map(|class| 0.25 * class as f32).collect();
    let weighted =
        WeightedCrossEntropy { label_smoothing: 0.1, weights, ignored: Some(3), ..Default::default() };
    let own = Loss::own(|output, labels| {
        let (likeliest, _) = output.topk(2, 1);
        let rows = output.log_softmax(1).gather(1, &labels.unsqueeze(1)).squeeze(1);
        let sure = likeliest.narrow(1, 0, 1).gt(&likeliest.narrow(1, 1, 1)).squeeze(1);
        sure.where_cond(&rows.neg(), &rows.square()).mean_all()
    });
    for (i, loss) in [Loss::WeightedCrossEntropy(weighted), own].into_iter().enumerate() {
        let trainer = Trainer { steps: Some(7), loss, ..trainer() };
        let before = fake.calls("cuGraphLaunch");
        let made = run(&trainer, 1, &|_| gpu(&fake));
        let replayed = run(&Trainer { graphs: true, ..trainer }, 1, &|_| gpu(&fake));
        assert_eq!(made.0.losses, replayed.0.losses, "loss {i}");
        assert!(made.1 == replayed.1, "loss {i}: not the same bits");
        assert_eq!(fake.calls("cuGraphLaunch") - before, 5, "loss {i}");
    }
    assert_eq!((fake.damage(), fake.count(Count::Graphs), fake.count(Count::Pieces)), (Vec::new(), 0, 0));
}

/// Each rank's graph has its all-reduces, which begin in the midst of the backward pass, on a stream of their own; the first rank's buffers
/// come behind it.
#[test]
fn ranks_replay_passes_with_the_sums_of_their_gradients_in_them() {
    const STEPS: i64 = 7;
    let Some(fake) = fake() else { return };
    fake.gpus(3);
    // Several buckets a step.
    let ddp = DdpConfig { bucket_bytes: 4096, first_bucket_bytes: 0, ..DdpConfig::default() };
    let ddp = DdpConfig { between_gpus: BetweenGpus::Nccl, ..ddp };
    for (ranks, seed) in [(2, 3), (2, 4), (3, 5)] {
        // Which of the streams goes on where several may.
        fake.seed(seed);
        let trainer = Trainer { batch_size: 4, steps: Some(STEPS as u64), ddp: ddp.clone(), ..trainer() };
        let calls = || {
            let of_nccl = ["ncclAllReduce", "ncclBroadcast"].map(|call| fake.nccl().calls(call));
            [of_nccl[0], of_nccl[1], fake.calls("cuGraphLaunch") as i64]
        };
        let counted = |graphs: bool| {
            let before = calls();
            let trainer = Trainer { graphs, ..trainer.clone() };
            let (told, left) = run(&trainer, ranks, &|rank| gpu_of(&fake, rank));
            let after = calls();
            (told.losses, left, [0, 1, 2].map(|i| after[i] - before[i]))
        };
        let (losses, left, [sums, shared, _]) = counted(false);
        let (replayed_losses, replayed_left, [recorded_sums, recorded_shared, launches]) = counted(true);
        assert_eq!(losses, replayed_losses, "{ranks} ranks");
        assert!(left == replayed_left, "{ranks} ranks: not the same bits");
        // The first step is made, the second is made and recorded.
        assert_eq!(launches, (STEPS - 2) * ranks as i64);
        assert_eq!(recorded_sums * STEPS, sums * 3, "{ranks} ranks");
        assert_eq!([shared, recorded_shared], [ranks as i64 * STEPS; 2], "{ranks} ranks");
        assert!(sums >= ranks as i64 * STEPS * 3, "{sums} all-reduces of {ranks} ranks");
    }
    assert_eq!((fake.damage(), fake.count(Count::Graphs)), (Vec::new(), 0));
    assert_eq!(fake.nccl().live(), 0, "communicators that nobody ended");
}

#[test]
fn a_smaller_batch_between_replays_is_made_as_ever() {
    let Some(fake) = fake() else { return };
    let samples =
        open("mnist-mini", View::default(), &Places::from_env(None), &mut Silent).unwrap().train.len();
    // Two whole batches an epoch, and one of a few samples.
    let batch_size = samples * 9 / 20;
    let net = || {
        Sequential::new()
            .then(BatchNorm2d::new(1))
            .then(Dropout2d(0.25))
            .then(Flatten)
            .then(Linear::new(784, 10))
    };
    let trainer = Trainer { steps: None, epochs: 2, batch_size, ema: Some(0.5), ..trainer() };
    let run = |trainer: &Trainer| run_of(&net, trainer, 1, &|_| gpu(&fake));
    let made = run(&trainer);
    let replayed = run(&Trainer { graphs: true, ..trainer });
    assert_eq!(made.0.losses.len(), 6);
    assert_eq!(made.0.losses, replayed.0.losses);
    assert!(made.1 == replayed.1, "not the same bits");
    assert_eq!((fake.calls("cuGraphLaunch"), fake.damage()), (2, Vec::new()));
}

/// NCCL wants an operation to be part of a graph on all ranks or on none.
#[test]
fn where_the_last_step_leaves_one_rank_as_many_samples_as_ever_all_make_it() {
    let Some(fake) = fake() else { return };
    fake.gpus(3);
    let samples =
        open("mnist-mini", View::default(), &Places::from_env(None), &mut Silent).unwrap().train.len();
    let is_uneven = |batch: &usize| samples / (3 * batch) >= 2 && samples % (3 * batch) >= 3 * batch - 2;
    let batch_size = (2..samples).rev().find(is_uneven).unwrap();
    let steps = samples.div_ceil(3 * batch_size);
    let net = || Sequential::new().then(Flatten).then(Linear::new(784, 10));
    let ddp = DdpConfig { between_gpus: BetweenGpus::Nccl, ..DdpConfig::default() };
    let trainer = Trainer { steps: None, epochs: 2, batch_size, ddp, ..trainer() };
    let run = |trainer: &Trainer| run_of(&net, trainer, 3, &|rank| gpu_of(&fake, rank));
    let made = run(&trainer);
    let replayed = run(&Trainer { graphs: true, ..trainer });
    assert_eq!(made.0.losses.len(), 2 * steps);
    assert_eq!(made.0.losses, replayed.0.losses);
    assert!(made.1 == replayed.1, "not the same bits");
    // The first step is made, the second is made and recorded, and so is the last of each epoch made.
    assert_eq!(fake.calls("cuGraphLaunch") as usize, 3 * (2 * (steps - 1) - 2));
    assert_eq!(fake.damage(), [""; 0]);
}

#[test]
fn a_replayed_step_takes_few_calls_and_no_memory() {
    let Some(fake) = fake() else { return };
    struct Counting<'a>(&'a FakeCuda, Vec<[u64; 5]>);
    impl Observer for Counting<'_> {
        fn event(&mut self, event: &Event) {
            if let Event::Step { .. } = event {
                let calls =
                    ["cuGraphLaunch", "cuLaunchKernel", "cuMemAlloc_v2", "cuMemHostAlloc", "cuMemFree_v2"];
                self.1.push(calls.map(|call| self.0.calls(call)));
            }
        }
    }
    let counted = |graphs: bool| {
        let worker = Worker::with_device(Group::solo(), gpu(&fake));
        let data = open("mnist-mini", View::default(), &Places::from_env(None), &mut Silent).unwrap();
        let mut counting = Counting(&fake, Vec::new());
        let trainer = Trainer { steps: Some(10), graphs, ..trainer() };
        trainer.fit(&worker, &mut net(), RULE, data.train, None, &mut counting).unwrap();
        let steps = counting.1[..9].windows(2).skip(4);
        steps.map(|pair| std::array::from_fn(|i| pair[1][i] - pair[0][i])).collect::<Vec<[u64; 5]>>()
    };
    let (made, replayed) = (counted(false), counted(true));
    for (made, replayed) in made.iter().zip(&replayed) {
        assert_eq!((made[0], replayed[0], &replayed[2..]), (0, 1, &[0; 3][..]));
        // The optimizer's kernel, and what makes the samples and copies them.
        assert!(replayed[1] <= 4 && made[1] > 15, "{replayed:?} against {made:?}");
    }
}

#[test]
fn a_pass_that_brings_something_of_its_own_from_the_host_is_never_replayed() {
    struct Counts;
    impl Module for Counts {
        fn forward(&self, x: &Tensor, ctx: &mut Ctx) -> Tensor {
            // Another number in each step.
            x * Tensor::from_slice(x.device(), &[1.0 / (1 + ctx.step()) as f32], [1])
        }

        fn visit(&mut self, _: &mut Visitor<'_>) {}
    }
    let Some(fake) = fake() else { return };
    let losses = |graphs: bool| {
        let worker = Worker::with_device(Group::solo(), gpu(&fake));
        let data = open("mnist-mini", View::default(), &Places::from_env(None), &mut Silent).unwrap();
        let (mut net, mut told) = (net().then(Counts), Told::default());
        let trainer = Trainer { steps: Some(5), graphs, ..trainer() };
        trainer.fit(&worker, &mut net, RULE, data.train, None, &mut told).unwrap();
        told.losses
    };
    assert_eq!(losses(false), losses(true));
    assert_eq!(fake.calls("cuGraphLaunch"), 0);
}

/// A pass that is given up leaves nothing on the GPU that waits for a rank that never comes.
#[test]
fn gradients_that_no_other_comes_to_sum_keep_no_gpu_waiting() {
    let Some(fake) = fake() else { return };
    fake.gpus(2);
    let (done, is_done) = mpsc::channel();
    std::thread::scope(|scope| {
        let mut groups = Group::threads(2).into_iter();
        let (group, other) = (groups.next().unwrap(), groups.next().unwrap());
        let prepared = |group: Group, device: &Device, net: &mut Sequential| {
            let parameters = Parameters::build(net, device, 3);
            let between_gpus = BetweenGpus::Nccl;
            let mut ddp =
                Ddp::with(group, DdpConfig { first_bucket_bytes: 0, between_gpus, ..DdpConfig::default() });
            ddp.prepare(&parameters).unwrap();
            (ddp, parameters)
        };
        let (end, is_end) = mpsc::channel::<()>();
        let fake = &fake;
        scope.spawn(move || {
            let _ddp = prepared(other, &gpu_of(fake, 1), &mut net());
            // It lives, and makes no pass.
            is_end.recv().unwrap_err();
        });
        scope.spawn(move || {
            let (device, mut net) = (gpu_of(fake, 0), net());
            let (mut ddp, parameters) = prepared(group, &device, &mut net);
            let x = Tensor::ones(&device, [2, 1, 28, 28], DType::F32);
            let out = net.forward(&x, &mut Ctx::eval());
            ddp.backward(&parameters, Some(&out.square().sum_all()), 1.0, phalanx::parallel::Sync::Now)
                .unwrap();
            ddp.part(&parameters, Some("the other is lost"));
            drop(end);
            done.send(parameters.values().read_flat::<f32>().len()).unwrap();
        });
        let read = is_done.recv_timeout(Duration::from_secs(60));
        // A thread that hangs would keep the test for good.
        let Ok(read) = read else { std::process::abort() };
        assert!(read > 1000);
    });
}
