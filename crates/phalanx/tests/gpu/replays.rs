//! Replays of passes that are one of several in a step, and of those in which ranks exchange more than gradients.

use crate::fake::fake;
use crate::mesh::{CONTEXT, TENSOR, on};
use crate::samples::text;
use crate::sharded::STAGES;
use crate::{RULE, gpu_of, mesh, run, run_of, samples, trainer};
use phalanx::comm::Group;
use phalanx::data::{BatchBuffers, Dataset, Places, Silent, Target, View, open};
use phalanx::nn::{Ctx, Loss, Parameters, Weights};
use phalanx::parallel::pipeline::ScheduleKind;
use phalanx::parallel::{
    Between, BetweenGpus, DdpConfig, FsdpConfig, Here, ModelParallel, ModelParallelConfig, Pass, Plan,
    Sharded, Strategy,
};
use phalanx::tensor::{DType, Device, Tensor};
use phalanx::{Event, LossScale, Observer, Precision, Progress, State, Trainer, Worker};
use phalanx_fake_cuda::{Count, FakeCuda};
use std::ops::Range;
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

/// Runs `run` without replays and with them, and expects the same of both; gives the graphs that were launched.
#[track_caller]
pub(crate) fn launches<T: PartialEq>(fake: &FakeCuda, what: &str, run: impl Fn(bool) -> T) -> u64 {
    let before = fake.calls("cuGraphLaunch");
    let made = run(false);
    assert_eq!(fake.calls("cuGraphLaunch"), before);
    assert!(run(true) == made, "{what}: not the same bits");
    assert_eq!((fake.damage(), fake.count(Count::Graphs)), (Vec::new(), 0), "{what}");
    fake.calls("cuGraphLaunch") - before
}

/// The first pass of a step, those that add to its gradients, and the last, which has them summed, are graphs of their own.
#[test]
fn passes_that_add_up_are_replayed_alone_and_on_two_gpus() {
    const STEPS: u64 = 6;
    let Some(fake) = fake() else { return };
    fake.gpus(2);
    let ddp = DdpConfig { bucket_bytes: 4096, first_bucket_bytes: 0, ..DdpConfig::default() };
    let ddp = DdpConfig { between_gpus: BetweenGpus::Nccl, ..ddp };
    for (ranks, precision, seed) in
        [(1, Precision::Float32, 1), (1, Precision::Bfloat16, 2), (2, Precision::Float32, 3)]
    {
        fake.seed(seed);
        let trainer = Trainer { batch_size: 4, accumulate: 4, steps: Some(STEPS), precision, ..trainer() };
        let launched = launches(&fake, &format!("{precision} on {ranks}"), |graphs| {
            let trainer = Trainer { graphs, ddp: ddp.clone(), ..trainer.clone() };
            let (told, left) = run(&trainer, ranks, &|rank| gpu_of(&fake, rank));
            (told.losses, left)
        });
        // Of each kind one is made and one recorded; of those in the midst of a step there are two.
        assert_eq!(launched, ranks as u64 * ((STEPS - 2) + (2 * STEPS - 2) + (STEPS - 2)));
    }
    assert_eq!(fake.nccl().live(), 0, "communicators that nobody ended");
}

/// Sums of parts, and keys and values of stretches, are in the graphs, and in those of replicas their gradients' sums.
#[test]
fn ranks_that_compute_a_replica_together_replay_their_passes() {
    const STEPS: u64 = 6;
    let Some(fake) = fake() else { return };
    fake.gpus(4);
    let shards = FsdpConfig { unit_bytes: 0, ..FsdpConfig::default() };
    for (ranks, accumulate, sharded, seed) in
        [(2, 1, None, 1), (4, 1, None, 2), (2, 2, None, 3), (4, 1, Some(shards), 4)]
    {
        fake.seed(seed);
        let (steps, batch_size) = (Some(STEPS), 4);
        let trainer = on(&[TENSOR], ScheduleKind::GPipe);
        let trainer = Trainer { steps, batch_size, accumulate, sharded, ..trainer };
        let launched =
            launches(&fake, &format!("{ranks} ranks, {accumulate} passes, {sharded:?}"), |graphs| {
                let trainer = Trainer { graphs, ..trainer.clone() };
                let (told, left) = run_of(&mesh::net, &trainer, ranks, &|rank| gpu_of(&fake, rank));
                (told.losses, told.norms, left)
            });
        assert_eq!(launched, ranks as u64 * accumulate as u64 * (STEPS - 2));
    }
    let folder = tempfile::tempdir().unwrap();
    let task = text(folder.path());
    for (mesh, between, ranks) in
        [(&[CONTEXT][..], Between::Whole, 2), (&[CONTEXT, TENSOR], Between::Sequence, 4)]
    {
        let mesh = ModelParallelConfig {
            mesh: mesh.to_vec(),
            model: Arc::new(task.net),
            plan: Some(Plan::of_gpt(2, between)),
            ..on(mesh, ScheduleKind::GPipe).mesh.unwrap()
        };
        let trainer = Trainer { mesh: Some(mesh), steps: Some(STEPS), batch_size: 8, ..trainer() };
        let launched = launches(&fake, &format!("{between:?}"), |graphs| {
            let trainer = Trainer { graphs, ..trainer.clone() };
            samples::run(&task, &trainer, ranks, false, &|rank| gpu_of(&fake, rank))
        });
        assert_eq!(launched, ranks as u64 * (STEPS - 2));
    }
    assert_eq!(fake.nccl().live(), 0, "communicators that nobody ended");
}

/// A rank's replay waits for others in the tensor group and among replicas at once: whichever of them never comes, and whether it is late
/// or gone, is found out.
#[test]
fn a_replay_that_another_rank_never_comes_to_ends() {
    let Some(fake) = fake() else { return };
    fake.gpus(4);
    let mut config =
        ModelParallelConfig { replays: true, ..on(&[TENSOR], ScheduleKind::GPipe).mesh.unwrap() };
    config.ddp.between_gpus = BetweenGpus::Nccl;
    let passes = |strategy: &mut ModelParallel, whole: &Parameters, device: &Device, steps: Range<u64>| {
        steps.into_iter().try_for_each(|step| {
            let pass = Pass {
                model: &mesh::net(),
                parameters: whole,
                loss: Loss::Mse,
                input: Tensor::ones(device, [2, 1, 28, 28], DType::F32),
                target: Tensor::ones(device, [2, 10], DType::F32),
                ctx: Ctx::train(0, step, vec![0, 1].into()),
                weight: 1.0,
                sync: phalanx::parallel::Sync::Now,
            };
            strategy.pass(&pass)?;
            strategy.finish(whole)
        })
    };
    for (ranks, is_gone, timeout) in [(2, false, 4), (4, true, 90)] {
        let (done, is_done) = mpsc::channel();
        let before = fake.calls("cuGraphLaunch");
        std::thread::scope(|scope| {
            let (end, is_end) = mpsc::channel::<()>();
            let mut is_end = Some(is_end);
            for group in Group::threads(ranks) {
                let group = group.with_timeout(Duration::from_secs(timeout));
                let is_last = group.rank().index() + 1 == ranks;
                let is_end = is_end.take_if(|_| is_last);
                let (fake, config, passes, done, end) = (&fake, &config, &passes, done.clone(), end.clone());
                scope.spawn(move || {
                    let device = gpu_of(fake, group.rank().index());
                    let whole = Parameters::build(&mut mesh::net(), &device, 3);
                    let mut strategy = ModelParallel::new(&group, &whole, config).unwrap();
                    strategy.prepare(&whole).unwrap();
                    strategy.begin(&whole, Here::All).unwrap();
                    passes(&mut strategy, &whole, &device, 0..3).unwrap();
                    if let Some(is_end) = is_end {
                        drop(end);
                        // It lives, or doesn't, and makes no other.
                        return if is_gone {
                            drop((strategy, group))
                        } else {
                            is_end.recv().unwrap_err();
                        };
                    }
                    let words = passes(&mut strategy, &whole, &device, 3..4).unwrap_err().to_string();
                    strategy.part(&whole, Some("it is late"));
                    let own = strategy.own_parameters(&whole);
                    assert!(own.values().read_flat::<f32>().len() > 1000, "values that nobody waits for");
                    done.send(words).unwrap();
                });
            }
            drop(end);
            let told: Vec<_> = (1..ranks).map(|_| is_done.recv_timeout(Duration::from_secs(60))).collect();
            // A thread that hangs would keep the test for good.
            if told.iter().any(Result::is_err) {
                std::process::abort();
            }
            let is_named =
                |words: &Result<String, _>| words.as_ref().unwrap().contains("a pass that is replayed");
            assert!(told.iter().any(is_named), "{told:?}");
        });
        assert_eq!(fake.calls("cuGraphLaunch") - before, 2 * ranks as u64 - 1);
    }
}

/// Gathers of units and sums of their gradients are in the graphs, in memory that units use in turn.
#[test]
fn units_that_come_and_go_are_replayed() {
    const STEPS: u64 = 7;
    let Some(fake) = fake() else { return };
    fake.gpus(3);
    let rows = [
        (2, Precision::Float32, 1, 1),
        (3, Precision::Float32, 1, 2),
        (2, Precision::Bfloat16, 1, 3),
        (2, Precision::Float32, 2, 4),
    ];
    for (sharded, row) in STAGES.into_iter().flat_map(|stage| rows.map(|row| (stage, row))) {
        let (ranks, precision, accumulate, seed) = row;
        fake.seed(seed);
        let config = FsdpConfig { sharded, unit_bytes: 0, ..FsdpConfig::default() };
        let trainer = Trainer { batch_size: 4, steps: Some(STEPS), precision, accumulate, ..trainer() };
        let what = format!("{sharded:?}, {precision} on {ranks}, {accumulate} passes");
        let launched = launches(&fake, &what, |graphs| {
            let trainer = Trainer { graphs, sharded: Some(config), ..trainer.clone() };
            let (told, left) = run(&trainer, ranks, &|rank| gpu_of(&fake, rank));
            (told.losses, left)
        });
        // Where units come in 16 bits, the first pass finds out what is wanted so.
        let first = if sharded == Sharded::Parameters && precision == Precision::Bfloat16 { 3 } else { 2 };
        // Gradients that are shared out have no memory of their own from one pass to the next.
        let each = if sharded > Sharded::States && accumulate > 1 { 0 } else { accumulate as u64 };
        assert_eq!(launched, ranks as u64 * each * (STEPS - first), "{what}");
    }
    assert_eq!(fake.nccl().live(), 0, "communicators that nobody ended");
}

/// What is told of each step and epoch that doesn't depend on the time.
#[derive(Default, PartialEq)]
struct Told {
    /// The loss, the scale that it was made with, and whether the step was left out.
    steps: Vec<(f64, Option<f64>, bool)>,
    tests: Vec<Option<f64>>,
}

impl Observer for Told {
    fn event(&mut self, event: &Event) {
        match event {
            Event::Step { loss, loss_scale, skipped, .. } => {
                self.steps.push((*loss, *loss_scale, *skipped));
            }
            Event::Epoch { test, .. } => self.tests.push(test.test_loss),
            _ => {}
        }
    }
}

/// A run with evaluations, from a loss scale on that is too large at first; and the weights, and their means, that it left.
fn evaluated(
    fake: &FakeCuda,
    trainer: &Trainer,
    ranks: usize,
    samples: usize,
) -> (Told, [Option<Weights>; 2]) {
    let results = Mutex::default();
    let run = |group: Group| {
        let worker = Worker::with_device(group.clone(), gpu_of(fake, group.rank().index()));
        let data = open("mnist-mini", View::default(), &Places::from_env(None), &mut Silent).unwrap();
        let mut net = mesh::net();
        let parameters = Parameters::build(&mut net, worker.device(), 3);
        let loss_scale = Some(LossScale { factor: (1u64 << 18) as f64, good_steps: 0 });
        let progress = Progress { loss_scale, ..Progress::default() };
        let state = State { progress, ..State::start(RULE).unwrap() };
        let (train, test) = (Arc::new(First(data.train, samples)), Arc::new(First(data.test, 50)));
        let mut told = Told::default();
        let trained = trainer.resume(&worker, &net, parameters, state, train, Some(test), &mut told);
        let mut trained = trained.unwrap_or_else(|error| panic!("{error}"));
        if worker.is_first() {
            let parameters = &trained.parameters;
            let mean = trained.state.average.as_mut().map(|mean| mean.to_weights(parameters));
            *results.lock().unwrap() = Some((told, [Some(parameters.to_weights()), mean]));
        }
    };
    std::thread::scope(|scope| {
        Group::threads(ranks).into_iter().for_each(|group| drop(scope.spawn(|| run(group))));
    });
    results.into_inner().unwrap().expect("the first rank has left its results")
}

/// The first of a data set's samples.
struct First(Arc<dyn Dataset>, usize);

impl Dataset for First {
    fn len(&self) -> usize {
        self.1
    }

    fn input_dims(&self) -> &[usize] {
        self.0.input_dims()
    }

    fn target(&self) -> Target<'_> {
        self.0.target()
    }

    fn batch(&self, samples: &[usize], into: &mut BatchBuffers) -> phalanx::data::Result<()> {
        self.0.batch(samples, into)
    }
}

/// Each epoch ends with a step that one rank alone could replay, and is followed by an evaluation of the weights' means.
#[test]
fn between_replays_come_uneven_steps_evaluations_and_steps_that_are_left_out() {
    let Some(fake) = fake() else { return };
    fake.gpus(4);
    let ddp = DdpConfig { between_gpus: BetweenGpus::Nccl, ..DdpConfig::default() };
    let two_passes = Trainer { ddp, accumulate: 2, ..trainer() };
    let parts = on(&[TENSOR], ScheduleKind::GPipe);
    let shared = STAGES.map(|sharded| {
        let config = FsdpConfig { sharded, unit_bytes: 0, ..FsdpConfig::default() };
        Trainer { sharded: Some(config), ..trainer() }
    });
    let rows = [(two_passes, 2), (parts, 4)].into_iter().chain(shared.map(|trainer| (trainer, 2)));
    for (trainer, ranks) in rows {
        for precision in [Precision::Float32, Precision::Float16] {
            let (passes, steps, batch_size) = (trainer.accumulate, 5, 4);
            // Two ranks share a batch, of which the last one lacks a sample.
            let samples = (steps - 1) * passes * 2 * batch_size + 2 * batch_size - 1;
            let trainer =
                Trainer { steps: None, epochs: 2, batch_size, precision, ema: Some(0.5), ..trainer.clone() };
            let what = format!("{:?}, {precision} on {ranks}, {passes} passes", trainer.sharded);
            let launched = launches(&fake, &what, |graphs| {
                let trainer = Trainer { graphs, ..trainer.clone() };
                let (told, left) = evaluated(&fake, &trainer, ranks, samples);
                assert_eq!((told.steps.len(), told.tests.len()), (2 * steps, 2), "{what}");
                let left_out = told.steps.iter().filter(|step| step.2).count();
                assert_eq!(left_out > 0, precision == Precision::Float16, "{what}: {left_out} left out");
                (told, left)
            });
            // Where units come in 16 bits, the first pass finds out what is wanted so.
            let comes_in_16_bits = precision == Precision::Float16
                && trainer.sharded.is_some_and(|config| config.sharded == Sharded::Parameters);
            let first = if comes_in_16_bits { 3 } else { 2 };
            assert_eq!(launched as usize, ranks * passes * (2 * (steps - 1) - first), "{what}");
        }
    }
    assert_eq!(fake.nccl().live(), 0, "communicators that nobody ended");
}
