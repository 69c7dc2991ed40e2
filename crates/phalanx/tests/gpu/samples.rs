//! Batches that GPUs make of bytes, against the same runs with batches from the loader, to the bit.

use crate::fake::fake;
use crate::{RULE, Told, gpu, gpu_of, trainer};
use phalanx::checkpoint::{CheckpointConfig, Every};
use phalanx::comm::Group;
use phalanx::data::{
    BadImages, BatchBuffers, Border, Cifar, CifarSet, Dataset, Input, Normalise, Part, Pictures, Pipeline,
    Resident, Result, Target, Text, Transform, write_synthetic_cifar,
};
use phalanx::nn::models::{Gpt, GptConfig};
use phalanx::nn::{BatchNorm2d, Conv2d, Flatten, Linear, MaxPool2d, Module, Sequential, Weights};
use phalanx::parallel::{DdpConfig, ModelParallelConfig};
use phalanx::tensor::Device;
use phalanx::{Event, Observer, Trainer, Worker};
use phalanx_fake_cuda::{Count, FakeCuda};
use std::path::Path;
use std::sync::{Arc, Mutex};

/// Samples that nobody knows to be bytes.
struct Values(Arc<dyn Dataset>);

impl Dataset for Values {
    fn len(&self) -> usize {
        self.0.len()
    }

    fn input_dims(&self) -> &[usize] {
        self.0.input_dims()
    }

    fn input(&self) -> Input {
        self.0.input()
    }

    fn target(&self) -> Target<'_> {
        self.0.target()
    }

    fn batch(&self, indices: &[usize], into: &mut BatchBuffers) -> Result<()> {
        self.0.batch(indices, into)
    }
}

/// What is trained on and judged by, and a model for it.
pub(crate) struct Task {
    pub(crate) train: Arc<dyn Dataset>,
    pub(crate) test: Arc<dyn Dataset>,
    pub(crate) net: fn() -> Box<dyn Module>,
}

/// Colour images that are cropped, mirrored and partly blanked.
pub(crate) fn images(folder: &Path) -> Task {
    more_images(folder, 6)
}

/// The same, five times so many to train on.
fn more_images(folder: &Path, per_file: usize) -> Task {
    write_synthetic_cifar(folder, CifarSet::Ten, per_file).unwrap();
    let part = |part, pipeline| -> Arc<dyn Dataset> {
        let images = Cifar::open(folder, CifarSet::Ten, part, BadImages::Refuse).unwrap();
        Arc::new(Pictures::new(images, pipeline, 3, BadImages::Refuse).unwrap())
    };
    let plain = Pipeline::new(Normalise::CIFAR10);
    let steps = vec![
        Transform::RandomCrop { padding: 4, border: Border::Reflect, size: [32, 32] },
        Transform::Flip { chance: 0.5 },
    ];
    let net = || -> Box<dyn Module> {
        let net = Sequential::new().then(Conv2d::new(3, 4, 5)).then(BatchNorm2d::new(4));
        Box::new(net.then(MaxPool2d::new(4)).then(Flatten).then(Linear::new(196, 10)))
    };
    let changed = Pipeline { steps, cutout: 8, ..plain.clone() };
    Task { train: part(Part::Train, changed), test: part(Part::Test, plain), net }
}

/// A text that a small decoder foretells.
pub(crate) fn text(folder: &Path) -> Task {
    let path = folder.join("text");
    std::fs::write(&path, (0..900).map(|i| (i * i % 251) as u8).collect::<Vec<_>>()).unwrap();
    let part = |part| -> Arc<dyn Dataset> { Arc::new(Text::open(&path, part, 8).unwrap()) };
    let net = || -> Box<dyn Module> {
        let sizes =
            GptConfig { layers: 1, width: 8, heads: 2, context: 8, vocabulary: 256, ..GptConfig::default() };
        Box::new(Gpt::new(sizes))
    };
    Task { train: part(Part::Train), test: part(Part::Test), net }
}

/// Losses, the evaluations, and weights in the end.
#[derive(PartialEq, Debug)]
pub(crate) struct Left {
    pub(crate) losses: Vec<f64>,
    pub(crate) tests: Vec<(Option<f64>, Option<f64>)>,
    pub(crate) weights: Weights,
}

#[derive(Default)]
struct Telling(Told, Vec<(Option<f64>, Option<f64>)>);

impl Observer for Telling {
    fn event(&mut self, event: &Event) {
        self.0.event(event);
        if let Event::Epoch { test, .. } = event {
            self.1.push((test.test_loss, test.test_accuracy));
        }
    }
}

pub(crate) fn run(
    task: &Task,
    trainer: &Trainer,
    ranks: usize,
    values: bool,
    device: &(dyn Fn(usize) -> Device + Sync),
) -> Left {
    let left = Mutex::default();
    std::thread::scope(|scope| {
        for group in Group::threads(ranks) {
            let left = &left;
            scope.spawn(move || {
                let rank = group.rank().index();
                let worker = Worker::with_device(group, device(rank));
                let given = |data: &Arc<dyn Dataset>| -> Arc<dyn Dataset> {
                    if values { Arc::new(Values(data.clone())) } else { data.clone() }
                };
                let (train, test) = (given(&task.train), given(&task.test));
                let mut told = Telling::default();
                let trained = trainer.fit(&worker, &mut *(task.net)(), RULE, train, Some(test), &mut told);
                let trained = trained.unwrap_or_else(|error| panic!("{error}"));
                if worker.is_first() {
                    let Telling(Told { losses, .. }, tests) = told;
                    *left.lock().unwrap() =
                        Some(Left { losses, tests, weights: trained.parameters.to_weights() });
                }
            });
        }
    });
    left.into_inner().unwrap().expect("the first rank has left its results")
}

#[track_caller]
fn check(task: &Task, trainer: &Trainer, ranks: usize, fake: &FakeCuda) {
    let device = |rank: usize| gpu_of(fake, rank);
    let want = run(task, trainer, ranks, true, &device);
    for resident in [Resident::Always, Resident::Never] {
        let got = run(task, &Trainer { resident, ..trainer.clone() }, ranks, false, &device);
        assert_eq!((&got.losses, &got.tests), (&want.losses, &want.tests), "{resident:?}");
        assert!(got == want, "{resident:?}: other weights");
    }
    assert_eq!(fake.damage(), [""; 0]);
}

/// Two epochs, the second in another order with other changes, and with a smaller batch at the end of each.
fn short() -> Trainer {
    Trainer { steps: None, epochs: 2, batch_size: 8, ..trainer() }
}

#[test]
fn runs_are_those_of_batches_from_the_loader() {
    let Some(fake) = fake() else { return };
    let folder = tempfile::tempdir().unwrap();
    check(&images(folder.path()), &short(), 1, &fake);
    let batch_size = 40;
    check(&text(folder.path()), &Trainer { batch_size, ..short() }, 1, &fake);
}

#[test]
fn replays_ranks_and_shards_have_them_too() {
    let Some(fake) = fake() else { return };
    let folder = tempfile::tempdir().unwrap();
    let task = images(folder.path());
    check(&task, &Trainer { graphs: true, ..short() }, 1, &fake);
    check(&task, &Trainer { graphs: true, batch_size: 4, ..short() }, 2, &fake);
    check(&task, &Trainer { logical_shards: Some(3), batch_size: 4, epochs: 1, ..short() }, 1, &fake);
    check(&task, &Trainer { accumulate: 2, batch_size: 4, epochs: 1, ..short() }, 1, &fake);
}

#[test]
fn a_resumed_run_sees_the_changes_that_it_would_have_seen() {
    let Some(fake) = fake() else { return };
    let folder = tempfile::tempdir().unwrap();
    let task = images(folder.path());
    let device = |_| gpu(&fake);
    let whole = run(&task, &short(), 1, true, &device);
    let dir = folder.path().join("run");
    let of = |steps, resume| {
        let checkpoint =
            CheckpointConfig { every: Every::Steps(2), resume, ..CheckpointConfig::new(dir.clone()) };
        let trainer = Trainer { checkpoint: Some(checkpoint), steps, resident: Resident::Always, ..short() };
        run(&task, &trainer, 1, false, &device)
    };
    of(Some(6), false);
    let rest = of(None, true);
    assert_eq!(rest.losses, whole.losses[6..]);
    assert!(rest.weights == whole.weights, "not the same bits");
}

/// Bytes that went to the GPU by the end of each step.
struct Counting<'a>(&'a FakeCuda, Vec<[u64; 2]>);

impl Observer for Counting<'_> {
    fn event(&mut self, event: &Event) {
        if let Event::Step { .. } = event {
            self.1.push([self.0.count(Count::BytesUp), self.0.calls("cuMemAlloc_v2")]);
        }
    }
}

#[test]
fn what_goes_to_the_gpu_in_a_step_is_numbers_or_bytes() {
    let Some(fake) = fake() else { return };
    let folder = tempfile::tempdir().unwrap();
    let up = |task: &Task, values: bool, resident| {
        let worker = Worker::with_device(Group::solo(), gpu(&fake));
        let mut counting = Counting(&fake, Vec::new());
        let trainer = Trainer { steps: Some(7), batch_size: 4, resident, ..trainer() };
        let train: Arc<dyn Dataset> =
            if values { Arc::new(Values(task.train.clone())) } else { task.train.clone() };
        trainer.fit(&worker, &mut *(task.net)(), RULE, train, None, &mut counting).unwrap();
        let steps = counting.1.windows(2).skip(3).map(|pair| [0, 1].map(|i| pair[1][i] - pair[0][i]));
        let mut steps: Vec<[u64; 2]> = steps.collect();
        // Behind the last step nobody wants a batch, and nothing is given between what is told of it and of the one before.
        steps.truncate(steps.len() - 2);
        assert!(steps.iter().all(|step| *step == [steps[0][0], 0]), "{resident:?}: {steps:?}");
        steps[0][0]
    };
    // Beside them there are the optimizer's nine numbers, and the loss's weight.
    let rest = up(&images(folder.path()), true, Resident::Auto) - 4 * (4 * 3072 + 8);
    let words = |n: u64| 8 * (2 + n);
    let task = images(folder.path());
    assert_eq!(up(&task, false, Resident::Auto), words(8) + rest);
    assert_eq!(up(&task, false, Resident::Never), words(8) + 4 * 3072 + rest);
    let task = text(folder.path());
    let rest = up(&task, true, Resident::Auto) - 2 * 4 * 8 * 8;
    assert_eq!(up(&task, false, Resident::Auto), words(4) + rest);
    assert_eq!(up(&task, false, Resident::Never), words(4) + 4 * 9 + rest);
}

#[test]
fn samples_that_do_not_fit_are_brought_batch_by_batch_or_refused() {
    let Some(fake) = fake() else { return };
    let folder = tempfile::tempdir().unwrap();
    let task = more_images(folder.path(), 100);
    let fit = |task: &Task, resident| {
        let worker = Worker::with_device(Group::solo(), gpu(&fake));
        let trainer = Trainer { steps: Some(1), resident, ..trainer() };
        let before = fake.count(Count::BytesUp);
        let ended =
            trainer.fit(&worker, &mut *(task.net)(), RULE, task.train.clone(), None, &mut Told::default());
        (ended.map(drop), fake.count(Count::BytesUp) - before)
    };
    let all = 500 * 3072;
    assert!(fit(&task, Resident::Auto).1 > all);
    // What the engine itself takes is 32 MiB; the samples would fit into the rest, and take more than a quarter of it.
    fake.limit_memory(0, 37 << 20);
    let (ended, up) = fit(&task, Resident::Auto);
    assert!(ended.is_ok() && up < all, "{ended:?}, {up} bytes");
    let values = Task { train: Arc::new(Values(task.train.clone())), ..task };
    let refused = fit(&values, Resident::Always).0.unwrap_err().to_string();
    assert!(refused.contains("data.resident=auto") && refused.contains("bytes"), "{refused}");
}

/// Samples, and what the GPU was given and waited for whenever some are taken.
struct Taken {
    samples: Values,
    fake: Arc<FakeCuda>,
    seen: Arc<Mutex<Vec<[u64; 2]>>>,
}

impl Taken {
    /// Passes that it was given, and waits for it.
    fn now(fake: &FakeCuda) -> [u64; 2] {
        let waits = fake.calls("cuStreamSynchronize") + fake.calls("cuEventSynchronize");
        [fake.calls("cuLaunchKernel") + fake.calls("cuGraphLaunch"), waits]
    }
}

impl Dataset for Taken {
    fn len(&self) -> usize {
        self.samples.len()
    }

    fn input_dims(&self) -> &[usize] {
        self.samples.input_dims()
    }

    fn target(&self) -> Target<'_> {
        self.samples.target()
    }

    fn batch(&self, indices: &[usize], into: &mut BatchBuffers) -> Result<()> {
        self.seen.lock().unwrap().push(Taken::now(&self.fake));
        self.samples.batch(indices, into)
    }
}

/// What the GPU was given and waited for by the end of each step.
struct Ends<'a>(&'a FakeCuda, Vec<[u64; 2]>);

impl Observer for Ends<'_> {
    fn event(&mut self, event: &Event) {
        if let Event::Step { .. } = event {
            self.1.push(Taken::now(self.0));
        }
    }
}

#[test]
fn a_batch_is_taken_and_sent_while_the_gpu_makes_the_pass_before() {
    let Some(fake) = fake() else { return };
    let fake = Arc::new(fake);
    let folder = tempfile::tempdir().unwrap();
    let task = images(folder.path());
    // A replica on one rank, as those on several make their passes.
    let mesh = ModelParallelConfig {
        mesh: Vec::new(),
        bounds: Vec::new(),
        model: Arc::new(task.net),
        plan: None,
        stages: None,
        ddp: DdpConfig::default(),
        sharded: None,
        replays: false,
    };
    for (graphs, mesh) in [(false, None), (true, None), (false, Some(mesh))] {
        let worker = Worker::with_device(Group::solo(), gpu(&fake));
        let seen = Arc::new(Mutex::new(Vec::new()));
        let samples = Values(task.train.clone());
        let train = Arc::new(Taken { samples, fake: fake.clone(), seen: seen.clone() });
        let mut ends = Ends(&fake, Vec::new());
        let (what, is_alone) = (format!("graphs {graphs}, {mesh:?}"), mesh.is_none());
        let trainer = Trainer { steps: Some(7), batch_size: 4, graphs, mesh, ..trainer() };
        trainer.fit(&worker, &mut *(task.net)(), RULE, train, None, &mut ends).unwrap();
        let seen = seen.lock().unwrap();
        // A batch before the first pass, and one in each of seven but the last, behind which nobody wants any.
        assert_eq!(seen.len(), 7);
        // Of one that trains alone a step is told when the next one was given.
        let late = if is_alone { 1 } else { 0 };
        for step in 3..6 {
            let ([given, waited], [given_before, waited_before]) = (seen[step + 1], ends.1[step - 1 - late]);
            let given_after = ends.1[step - late][0];
            assert!(given_before < given && given < given_after, "step {step}, {what}");
            assert_eq!(waited, waited_before, "step {step}, {what}: nobody waits before it is taken");
        }
    }
    assert_eq!(fake.damage(), [""; 0]);
}
