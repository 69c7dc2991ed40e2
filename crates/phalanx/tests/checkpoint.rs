//! A run that was stopped anywhere goes on as if it hadn't been.

use phalanx::checkpoint::{CheckpointConfig, Every, Manifest, checkpoints};
use phalanx::comm::Group;
use phalanx::data::{BatchBuffers, Dataset, Places, Silent, Target, View, open};
use phalanx::nn::models::MnistNet;
use phalanx::nn::optim::{Adam, Clip, Rule, Sgd};
use phalanx::nn::{
    BatchNorm2d, Conv2d, Flatten, Linear, LogSoftmax, Loss, Module, Parameters, Plateau, Relu, Sequential,
    Weights, freeze,
};
use phalanx::parallel::{Compress, DdpConfig, FsdpConfig, Sharded};
use phalanx::tensor::Device;
use phalanx::{Concluded, Error, Event, Observer, Requests, State, Trainer, Worker, spawn};
use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Keeps what can't differ between two runs that are the same: all but times.
#[derive(Default)]
struct Told {
    lines: Vec<String>,
    resumed: Option<u64>,
    checkpoint: Option<u64>,
    notes: Vec<String>,
}

impl Observer for Told {
    fn event(&mut self, event: &Event) {
        match event {
            Event::Step { step, epoch, loss, samples, lr, .. } => {
                self.lines.push(format!("step {step} of epoch {epoch}: {loss:?} after {samples}, at {lr:?}"));
            }
            Event::Epoch { epoch, test, .. } => {
                self.lines.push(format!("epoch {epoch}: {:?} {:?}", test.test_loss, test.test_accuracy));
            }
            Event::Resume { step, .. } => self.resumed = Some(*step),
            Event::Checkpoint { step, .. } => self.checkpoint = Some(*step),
            Event::Note { message } => self.notes.push(message.clone()),
            _ => {}
        }
    }
}

/// What is left of a run: weights, the optimizer's state, the running mean, where it was; and what was told.
struct Left {
    weights: Vec<Option<Weights>>,
    position: String,
    told: Told,
}

/// Trains the network of the tutorials, with dropout.
fn train(ranks: usize, trainer: &Trainer, rule: Rule) -> Result<Left, Error> {
    train_net(ranks, mnist_net, trainer, rule)
}

fn mnist_net() -> Box<dyn Module> {
    Box::new(MnistNet::new(0.5))
}

/// A network with buffers, and with kernels of so many channels that they don't lie in row-major order.
fn batch_norm_net() -> Box<dyn Module> {
    let net = Sequential::new().then(Conv2d::new(1, 16, 5).stride(3)).then(BatchNorm2d::new(16)).then(Relu);
    let net = net.then(Conv2d::new(16, 16, 3).stride(2)).then(BatchNorm2d::new(16)).then(Relu);
    Box::new(net.then(Flatten).then(Linear::new(16 * 3 * 3, 10)).then(LogSoftmax))
}

/// Trains on the digits, shuffled, as so many ranks: ten steps an epoch.
fn train_net(
    ranks: usize,
    net: fn() -> Box<dyn Module>,
    trainer: &Trainer,
    rule: Rule,
) -> Result<Left, Error> {
    let left = Mutex::new(None);
    let trainer = Trainer { batch_size: 200 / ranks, ..trainer.clone() };
    spawn(ranks, |worker| {
        let mut net = net();
        let parameters = Parameters::build(&mut net, worker.device(), trainer.seed);
        let data = open("mnist-mini", View::default(), &Places::from_env(None), &mut Silent)?;
        let (mut told, state) = (Told::default(), State::start(rule)?);
        let trained =
            trainer.resume(&worker, &net, parameters, state, data.train, Some(data.test), &mut told)?;
        if worker.is_first() {
            let (parameters, state) = (trained.parameters, trained.state);
            let average = state.average.map(|average| average.to_weights(&parameters));
            let optimizer = state.optimizer.to_weights(&parameters);
            let weights = vec![Some(parameters.to_weights()), Some(optimizer), average];
            *left.lock().unwrap() = Some(Left { weights, position: format!("{:?}", state.progress), told });
        }
        Ok(())
    })?;
    Ok(left.into_inner().unwrap().expect("rank 0 has trained"))
}

fn every(steps: u64, folder: &Path, resume: bool) -> Option<CheckpointConfig> {
    Some(CheckpointConfig { every: Every::Steps(steps), resume, ..CheckpointConfig::new(folder.to_owned()) })
}

#[test]
fn a_resumed_run_takes_the_steps_of_the_whole_run_bit_for_bit() {
    let sgd = Sgd { momentum: 0.9, nesterov: true, ..Sgd::new(0.05) };
    let adam = Adam { lr: 0.002, ..Adam::default() };
    // A loss that must halve to be better makes the plateau count.
    let plateau = Some(Plateau { patience: 0, threshold: 0.5, ..Plateau::default() });
    let plain = Trainer { epochs: 3, seed: 5, ..Trainer::default() };
    let rich = Trainer { ema: Some(0.9), plateau, ..plain.clone() };
    for (ranks, trainer, rule) in [(1, &plain, sgd.into()), (1, &rich, adam.into()), (2, &rich, sgd.into())] {
        // Within an epoch, on its border, and in the last one.
        check_that_it_goes_on(ranks, mnist_net, trainer, rule, &[7, 10, 26]);
    }
}

#[test]
fn a_run_that_takes_them_by_steps_takes_one_at_its_end_however_short_it_is() {
    for (checkpoint_every, there) in
        [(Every::Steps(100), vec!["step-4"]), (Every::Time(Duration::from_secs(60)), vec![])]
    {
        let folder = tempfile::tempdir().unwrap();
        let checkpoint =
            CheckpointConfig { every: checkpoint_every, ..CheckpointConfig::new(folder.path().to_owned()) };
        let trainer = Trainer { steps: Some(4), checkpoint: Some(checkpoint), ..Trainer::default() };
        train_net(1, mnist_net, &trainer, Sgd::new(0.05).into()).unwrap();
        let names =
            fs::read_dir(folder.path()).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap());
        let steps: Vec<String> = names.filter(|name| name.starts_with("step-")).collect();
        assert_eq!(steps, there);
    }
}

/// Its first layer stays as it is.
fn headed_net() -> Box<dyn Module> {
    let mut net = MnistNet::new(0.0);
    freeze(&mut net, &["conv1.*"]).unwrap();
    Box::new(net)
}

/// A first step of Adam moves nothing by more than its learning rate, however long the others have been at it.
#[test]
fn what_was_frozen_begins_young_whoever_holds_it() {
    let rule: Rule = Adam { lr: 0.002, ..Adam::default() }.into();
    let fsdp = Trainer { sharded: Some(FsdpConfig::default()), ..Trainer::default() };
    for (ranks, trainer) in [(1, Trainer::default()), (2, Trainer::default()), (2, fsdp)] {
        let folder = tempfile::tempdir().unwrap();
        let until = |steps: u64, net, resume| {
            let checkpoint = every(1, folder.path(), resume);
            let trainer = Trainer { steps: Some(steps), epochs: 3, checkpoint, ..trainer.clone() };
            train_net(ranks, net, &trainer, rule).unwrap().weights
        };
        let first_layer = |weights: &[Option<Weights>]| {
            weights[0].as_ref().unwrap().get("conv1.weight").unwrap().1.to_vec()
        };
        let age = |weights: &[Option<Weights>]| {
            weights[1].as_ref().unwrap().get("conv1.weight.step").map(|(_, steps)| steps[0])
        };
        let frozen = until(12, headed_net, false);
        assert_eq!(age(&frozen), Some(0.0));
        let freed = until(13, || Box::new(MnistNet::new(0.0)), true);
        assert_eq!(age(&freed), Some(1.0));
        let (before, after) = (first_layer(&frozen), first_layer(&freed));
        let most = before.iter().zip(&after).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!((0.0019..0.00201).contains(&most), "{ranks} ranks: {most}");
        // And off again.
        let again = until(15, headed_net, true);
        assert_eq!((first_layer(&again), age(&again)), (after, Some(1.0)));
    }
}

#[test]
fn what_ranks_keep_of_compressed_gradients_goes_on_bit_for_bit() {
    let compress = Compress::PowerSgd { rank: 2, start_step: 4 };
    let ddp = DdpConfig { compress, first_bucket_bytes: 4 << 10, ..DdpConfig::default() };
    let trainer = Trainer { epochs: 3, seed: 5, ddp, ..Trainer::default() };
    let sgd = Sgd { momentum: 0.9, ..Sgd::new(0.05) };
    for ranks in [1, 2, 4] {
        // Before the first step that is compressed, within an epoch, on its border.
        check_that_it_goes_on(ranks, mnist_net, &trainer, sgd.into(), &[3, 7, 10]);
    }
}

#[test]
fn what_ranks_share_out_goes_on_bit_for_bit() {
    let adam = Adam { lr: 0.002, ..Adam::default() };
    let clip = Clip { norm: Some(1.0), value: None };
    for (ranks, sharded) in [(2, Sharded::Parameters), (4, Sharded::Parameters), (2, Sharded::States)] {
        let sharded = Some(FsdpConfig { sharded, unit_bytes: 1 << 10, ..FsdpConfig::default() });
        let trainer = Trainer { epochs: 3, seed: 5, clip, sharded, ema: Some(0.9), ..Trainer::default() };
        check_that_it_goes_on(ranks, mnist_net, &trainer, adam.into(), &[7, 10]);
        let whole = in_parts(ranks, &trainer, adam.into(), None);
        assert!(whole == in_parts(ranks, &trainer, adam.into(), Some(3)), "parts change no bit");
        check_that_it_goes_on(ranks, batch_norm_net, &trainer, adam.into(), &[26]);
    }
}

/// What is left of a run whose checkpoints are of a part each, and that is interrupted after every so many steps.
fn in_parts(ranks: usize, trainer: &Trainer, rule: Rule, stop_every: Option<u64>) -> Vec<Option<Weights>> {
    let folder = tempfile::tempdir().unwrap();
    let mut at = 0;
    loop {
        let until = stop_every.map(|steps| at + steps).filter(|&step| step < 12).unwrap_or(12);
        let checkpoint = every(2, folder.path(), at > 0).map(|it| CheckpointConfig { parts: true, ..it });
        let left =
            train(ranks, &Trainer { steps: Some(until), checkpoint, ..trainer.clone() }, rule).unwrap();
        if until == 12 {
            return left.weights;
        }
        at = until;
        let manifest = Manifest::read(&folder.path().join(format!("step-{at}"))).unwrap();
        assert_eq!(manifest.files.len(), 3 * ranks);
    }
}

/// Keeps what a run leaves behind in this folder, and says whether all values were in memory then.
struct Keeper<'a>(&'a Path, Option<bool>);

impl Observer for Keeper<'_> {
    fn event(&mut self, _: &Event) {}

    fn needs_whole(&self) -> bool {
        false
    }

    fn conclude(&mut self, end: &mut Concluded<'_>) -> Result<(), Error> {
        // What is away is borrowed for writing.
        let read = catch_unwind(AssertUnwindSafe(|| end.parameters.to_weights()));
        self.1 = Some(read.is_ok());
        end.save_model(&self.0.join("model.safetensors"))?;
        end.save_average(&self.0.join("model_ema.safetensors"))?;
        end.save_optimizer(&self.0.join("optimizer.safetensors"))
    }
}

#[test]
fn what_a_run_in_parts_leaves_behind_comes_from_its_last_checkpoint() {
    let sharded =
        Some(FsdpConfig { sharded: Sharded::Parameters, unit_bytes: 1 << 10, ..FsdpConfig::default() });
    let trainer = Trainer { epochs: 1, seed: 5, ema: Some(0.9), sharded, ..Trainer::default() };
    let rule: Rule = Adam::default().into();
    let whole = train_net(2, batch_norm_net, &trainer, rule).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let best = folder.path().join("best.safetensors");
    // A run that goes on from its end has no checkpoint to take.
    for (resume, is_whole) in [(false, false), (true, true)] {
        let checkpoint = every(1000, &folder.path().join("checkpoints"), resume);
        let checkpoint = checkpoint.map(|config| CheckpointConfig { parts: true, ..config });
        let best_file = Some(best.clone());
        let trainer = Trainer { checkpoint, best_file, batch_size: 100, ..trainer.clone() };
        spawn(2, |worker| {
            let mut net = batch_norm_net();
            let data = open("mnist-mini", View::default(), &Places::from_env(None), &mut Silent)?;
            let mut keeper = Keeper(folder.path(), None);
            trainer.fit(&worker, &mut *net, rule, data.train, Some(data.test), &mut keeper)?;
            assert_eq!(keeper.1, worker.is_first().then_some(is_whole), "resumed: {resume}");
            Ok(())
        })
        .unwrap();
        for (file, want) in ["model", "optimizer", "model_ema"].iter().zip(&whole.weights) {
            let want = want.as_ref().unwrap();
            let path = folder.path().join(format!("{file}.safetensors"));
            let found = Weights::read(&path).unwrap();
            let mut wanted: Vec<&str> = want.names().collect();
            let mut names: Vec<&str> = found.names().collect();
            wanted.sort_unstable();
            names.sort_unstable();
            assert_eq!(names, wanted, "{file}");
            names.iter().for_each(|name| assert_eq!(found.get(name), want.get(name), "{name}"));
            fs::remove_file(path).unwrap();
        }
    }
    // The only epoch is the best, and its weights were evaluated in parts, too: those of the mean.
    let (found, want) = (Weights::read(&best).unwrap(), whole.weights[2].as_ref().unwrap());
    assert!(want.names().all(|name| found.get(name) == want.get(name)), "the best weights");
    fs::remove_file(best).unwrap();
    let left = fs::read_dir(folder.path()).unwrap().count();
    assert_eq!(left, 1, "nothing but the checkpoints is left");
}

#[test]
fn a_run_goes_on_with_other_parts_or_whole_as_if_it_had_always_been_so() {
    let adam = Adam { lr: 0.002, ..Adam::default() };
    let shared_out = |sharded| Some(FsdpConfig { sharded, unit_bytes: 1 << 10, ..FsdpConfig::default() });
    let ema = Some(0.9);
    let of = |sharded, steps| Trainer { epochs: 3, steps, seed: 5, ema, sharded, ..Trainer::default() };
    let whole = train(1, &of(None, None), adam.into()).unwrap();
    // Values, and the mean of them.
    let values = |left: &Left| -> Vec<f32> {
        let kept = [0, 2].into_iter().filter_map(|i| left.weights[i].as_ref());
        kept.flat_map(|weights| weights.names().flat_map(|name| weights.get(name).unwrap().1.to_vec()))
            .collect()
    };
    let [all, most] = [Some(Sharded::Parameters), Some(Sharded::Gradients)].map(|it| it.and_then(shared_out));
    let cases = [[(4, all), (2, most)], [(2, all), (4, None)], [(1, None), (4, all)]];
    for ([before, after], parts) in cases.into_iter().flat_map(|case| [(case, false), (case, true)]) {
        let folder = tempfile::tempdir().unwrap();
        let checkpoint = |resume| every(8, folder.path(), resume).map(|it| CheckpointConfig { parts, ..it });
        let stopped = Trainer { checkpoint: checkpoint(false), ..of(before.1, Some(8)) };
        train(before.0, &stopped, adam.into()).unwrap();
        let manifest = Manifest::read(&folder.path().join("step-8")).unwrap();
        let files = if parts && before.1.is_some() { 3 * before.0 } else { 3 };
        assert_eq!(manifest.files.len(), files, "{before:?}");
        let resumed = Trainer { checkpoint: checkpoint(true), ..of(after.1, None) };
        let resumed = train(after.0, &resumed, adam.into()).unwrap();
        assert_eq!(resumed.told.resumed, Some(8));
        let (got, want) = (values(&resumed), values(&whole));
        let worst = got.iter().zip(&want).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        // Adam makes much of the rounding of gradients that are nearly 0: a step moves a weight by up to 0.002.
        assert!(got.len() == want.len() && worst < 0.01, "{before:?} {after:?}: {worst}");
    }
}

#[test]
fn what_cannot_be_had_where_ranks_hold_parts_is_refused() {
    let sharded = Some(FsdpConfig::default());
    let ddp = DdpConfig { sync_batch_norm: true, ..DdpConfig::default() };
    let asked = [
        (Trainer { logical_shards: Some(4), ..Trainer::default() }, "logical shards"),
        (Trainer { ddp, ..Trainer::default() }, "statistics over the batch of all ranks"),
    ];
    for (trainer, what) in asked {
        let error = train(2, &Trainer { sharded, ..trainer }, Sgd::new(0.1).into()).err().unwrap();
        assert_eq!(
            error.to_string(),
            format!(
                "{what} can't be had where the model is shared out among ranks\nhint: take --strategy ddp, or leave it out"
            )
        );
    }
}

#[test]
fn compressed_gradients_go_on_compressed_alike_by_any_number_of_ranks() {
    let folder = tempfile::tempdir().unwrap();
    let trainer = |rank, steps, resume| {
        let ddp = DdpConfig { compress: Compress::PowerSgd { rank, start_step: 0 }, ..DdpConfig::default() };
        let checkpoint = every(2, folder.path(), resume);
        Trainer { steps: Some(steps), seed: 5, ddp, checkpoint, ..Trainer::default() }
    };
    let sgd = Sgd::new(0.05);
    train(2, &trainer(2, 2, false), sgd.into()).unwrap();
    let manifest = Manifest::read(&folder.path().join("step-2")).unwrap();
    let names: Vec<&str> = manifest.files.iter().map(|file| &*file.name).collect();
    assert_eq!(names, ["model.safetensors", "optimizer.safetensors", "compression.safetensors"]);
    assert_eq!(manifest.version, 2);
    let error = train(2, &trainer(3, 4, true), sgd.into()).err().unwrap().to_string();
    assert!(error.contains("gradients were compressed with other settings"), "{error}");
    // What each lacked is shared out among any number of ranks; whoever goes on alone, or without any compression, does without it.
    for (ranks, rank) in [(1, 2), (4, 2), (2, 0), (1, 0)] {
        let mut other = trainer(rank, 4, true);
        if rank == 0 {
            other.ddp = DdpConfig::default();
        }
        assert_eq!(train(ranks, &other, sgd.into()).unwrap().told.resumed, Some(2), "{ranks} ranks");
        fs::remove_dir_all(folder.path().join("step-4")).unwrap();
    }
}

#[test]
fn ranks_that_keep_something_end_together_when_the_first_is_asked_to() {
    let folder = tempfile::tempdir().unwrap();
    let requests = Requests::default();
    requests.stop.store(true, Ordering::Relaxed);
    let ddp = DdpConfig { compress: Compress::PowerSgd { rank: 1, start_step: 0 }, ..DdpConfig::default() };
    let checkpoint = every(100, folder.path(), false);
    let trainer = Trainer { epochs: 3, requests, ddp, checkpoint, ..Trainer::default() };
    train(3, &trainer, Sgd::new(0.05).into()).unwrap();
    let manifest = Manifest::read(&folder.path().join("step-1")).unwrap();
    assert_eq!(manifest.files.len(), 3);
}

#[test]
fn batch_norms_and_kernels_go_on_bit_for_bit_and_lie_in_files_as_pytorch_has_them() {
    let adam = Adam { lr: 0.002, ..Adam::default() };
    let plain = Trainer { epochs: 3, seed: 5, ema: Some(0.9), ..Trainer::default() };
    let ddp = DdpConfig { sync_batch_norm: true, ..DdpConfig::default() };
    let synced = Trainer { ddp, ..plain.clone() };
    for (ranks, trainer) in [(1, &plain), (2, &plain), (2, &synced)] {
        check_that_it_goes_on(ranks, batch_norm_net, trainer, adam.into(), &[7, 10]);
    }
}

/// Holds a run of thirty steps against those that are stopped after so many and resumed.
fn check_that_it_goes_on(
    ranks: usize,
    net: fn() -> Box<dyn Module>,
    trainer: &Trainer,
    rule: Rule,
    stops: &[u64],
) {
    let whole = train_net(ranks, net, trainer, rule).unwrap();
    assert_eq!(whole.told.lines.len(), 33);
    for &made in stops {
        let folder = tempfile::tempdir().unwrap();
        // Longer than until the checkpoint that counts, so that this one is taken while steps go on.
        let stopped = Trainer {
            steps: Some(made + 2),
            checkpoint: every(made, folder.path(), false),
            ..trainer.clone()
        };
        train_net(ranks, net, &stopped, rule).unwrap();
        for later in checkpoints(folder.path()).unwrap().into_iter().filter(|&step| step > made) {
            fs::remove_dir_all(folder.path().join(format!("step-{later}"))).unwrap();
        }
        let resumed = Trainer { checkpoint: every(4, folder.path(), true), ..trainer.clone() };
        let resumed = train_net(ranks, net, &resumed, rule).unwrap();
        let what = format!("{ranks} ranks, {trainer:?}, {rule:?}, after {made} steps");
        assert_eq!(resumed.told.resumed, Some(made), "{what}");
        assert!(resumed.weights == whole.weights, "{what}");
        assert_eq!(resumed.position, whole.position, "{what}");
        let told = &mut resumed.told.lines.iter();
        let rest = whole.told.lines.len() - told.len();
        assert!(whole.told.lines[rest..].iter().eq(told), "{what}: {:?}", resumed.told.lines);
        assert_eq!(checkpoints(folder.path()).unwrap()[0], 30, "the last one is taken at the end, too");
        let files = ["model.safetensors", "optimizer.safetensors", "model_ema.safetensors"];
        for (file, want) in files.iter().zip(&whole.weights) {
            let Some(want) = want else { continue };
            let file = Weights::read(&folder.path().join("step-30").join(file)).unwrap();
            assert!(file.names().all(|name| file.get(name) == want.get(name)), "{what}");
            assert_eq!(file.names().count(), want.names().count(), "{what}");
        }
    }
}

/// Asks for the end of a run when its test samples are looked at.
struct Asking {
    samples: Arc<dyn Dataset>,
    requests: Requests,
}

impl Dataset for Asking {
    fn len(&self) -> usize {
        self.samples.len()
    }

    fn input_dims(&self) -> &[usize] {
        self.samples.input_dims()
    }

    fn target(&self) -> Target<'_> {
        self.samples.target()
    }

    fn batch(&self, indices: &[usize], into: &mut BatchBuffers) -> phalanx::data::Result<()> {
        self.requests.stop.store(true, Ordering::Relaxed);
        self.samples.batch(indices, into)
    }
}

/// The same after a step.
struct AskingAfter<'a> {
    step: Option<u64>,
    requests: Requests,
    told: &'a mut Told,
}

impl Observer for AskingAfter<'_> {
    fn event(&mut self, event: &Event) {
        self.told.event(event);
        if let Event::Step { step, .. } = event
            && self.step == Some(*step)
        {
            self.requests.stop.store(true, Ordering::Relaxed);
        }
    }
}

#[test]
fn a_run_that_is_asked_to_stop_does_so_after_the_step_at_hand_and_goes_on_bit_for_bit() {
    let plain = Trainer { epochs: 2, batch_size: 200, ema: Some(0.9), ..Trainer::default() };
    let run = |trainer: &Trainer, step: Option<u64>, evaluating: bool, told: &mut Told| {
        let mut net = MnistNet::new(0.5);
        let data = open("mnist-mini", View::default(), &Places::from_env(None), &mut Silent).unwrap();
        let requests = trainer.requests.clone();
        let asking = Asking { samples: Arc::clone(&data.test), requests: requests.clone() };
        let test: Arc<dyn Dataset> = if evaluating { Arc::new(asking) } else { data.test };
        let mut observer = AskingAfter { step, requests, told };
        let worker = Worker::alone(1);
        let trained = trainer.fit(&worker, &mut net, Sgd::new(0.05), data.train, Some(test), &mut observer);
        trained.map(|trained| (trained.parameters.to_weights(), trained.interrupted.is_some())).unwrap()
    };
    let mut whole = Told::default();
    let (wanted, interrupted) = run(&plain, None, false, &mut whole);
    assert!(!interrupted && whole.lines.len() == 22);
    // Within an epoch, at its end, in its evaluation: an epoch that wasn't evaluated is again, and none is told twice. What is
    // asked when the ranks have made their tally of a step is heard with the next one.
    for (step, evaluating, made) in [(Some(6), false, 8), (Some(9), false, 10), (None, true, 10)] {
        let folder = tempfile::tempdir().unwrap();
        let kept = |resume| Trainer {
            checkpoint: every(1_000_000, folder.path(), resume),
            requests: Requests::default(),
            ..plain.clone()
        };
        let mut told = Told::default();
        let (_, interrupted) = run(&kept(false), step, evaluating, &mut told);
        assert_eq!((interrupted, told.lines.len()), (true, made), "{:?}", told.lines);
        assert_eq!(checkpoints(folder.path()).unwrap(), [made as u64]);
        let (weights, interrupted) = run(&kept(true), None, false, &mut told);
        assert!(!interrupted && weights == wanted, "after {made} steps");
        assert_eq!(told.lines, whole.lines);
    }
}

#[test]
fn a_run_goes_on_with_another_number_of_ranks_if_the_global_batch_stays() {
    let folder = tempfile::tempdir().unwrap();
    let trainer = Trainer { epochs: 2, ..Trainer::default() };
    let sgd = Sgd::new(0.05);
    let stopped = Trainer { steps: Some(13), checkpoint: every(13, folder.path(), false), ..trainer.clone() };
    train(2, &stopped, sgd.into()).unwrap();
    let resumed = Trainer { checkpoint: every(100, folder.path(), true), ..trainer.clone() };
    let resumed = train(1, &resumed, sgd.into()).unwrap();
    assert_eq!(resumed.told.resumed, Some(13));
    let whole = train(1, &trainer, sgd.into()).unwrap();
    // One rank and two add their gradients up in another order, so bits differ.
    let (a, b) = (whole.weights[0].as_ref().unwrap(), resumed.weights[0].as_ref().unwrap());
    for name in a.names() {
        let pairs = a.get(name).unwrap().1.iter().zip(b.get(name).unwrap().1);
        let furthest = pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(furthest < 1e-4, "{name}: {furthest}");
    }
    let larger = Trainer { batch_size: 100, checkpoint: every(5, folder.path(), true), ..trainer };
    let mut net = MnistNet::new(0.5);
    let data = open("mnist-mini", View::default(), &Places::from_env(None), &mut Silent).unwrap();
    let refused = larger.fit(&Worker::alone(1), &mut net, sgd, data.train, None, &mut Told::default());
    let error = refused.err().expect("another global batch").to_string();
    assert!(error.contains("a global batch of 200, and this run has 100\nhint: "), "{error}");
}

#[test]
fn only_the_newest_checkpoints_stay_and_they_tell_what_they_are_of() {
    let folder = tempfile::tempdir().unwrap();
    let config = CheckpointConfig {
        keep: 3,
        recipe: Some("[model]".into()),
        ..every(5, folder.path(), false).unwrap()
    };
    let trainer = Trainer { epochs: 3, checkpoint: Some(config), ..Trainer::default() };
    train(1, &trainer, Sgd::new(0.05).into()).unwrap();
    let steps = checkpoints(folder.path()).unwrap();
    // While one is written none is begun, so which ones there are beside the last is the disk's affair.
    assert!(steps.len() <= 3 && steps[0] == 30, "{steps:?}");
    let manifest = Manifest::read(Manifest::path(folder.path(), 30).parent().unwrap()).unwrap();
    assert_eq!((manifest.position.epoch, manifest.run.global_batch, manifest.run.world_size), (3, 200, 1));
    assert_eq!(manifest.origin.recipe.as_deref(), Some("[model]"));
}

/// Single numbers, the ninth of which is none.
struct Numbers;

impl Dataset for Numbers {
    fn len(&self) -> usize {
        12
    }

    fn input_dims(&self) -> &[usize] {
        &[1]
    }

    fn target(&self) -> Target<'_> {
        Target::Values(&[1])
    }

    fn batch(&self, indices: &[usize], into: &mut BatchBuffers) -> phalanx::data::Result<()> {
        for (i, &index) in indices.iter().enumerate() {
            into.inputs()[i] = if index == 8 { f32::NAN } else { 0.1 };
        }
        into.values().fill(1.0);
        Ok(())
    }
}

/// What a run on them tells, one a step and rank, which takes a checkpoint every so many steps, and how it fails. The model is so large
/// that it does while one is written.
fn fail(worker: &Worker, steps: u64, folder: &Path) -> (Told, Error) {
    let trainer = Trainer {
        loss: Loss::Mse,
        batch_size: 1,
        shuffle: false,
        checkpoint: every(steps, folder, false),
        ..Trainer::default()
    };
    let mut net = Sequential::new().then(Linear::new(1, 500_000)).then(Linear::new(500_000, 1));
    let mut told = Told::default();
    let run = trainer.fit(worker, &mut net, Sgd::new(1e-9), Arc::new(Numbers), None, &mut told);
    (told, run.err().expect("a loss is no number"))
}

#[test]
fn a_run_that_fails_leaves_a_whole_checkpoint_and_nobody_at_it() {
    let folder = tempfile::tempdir().unwrap();
    let worker = Worker::alone(1);
    for again in 0..3 {
        let (told, error) = fail(&worker, 8, folder.path());
        let error = error.to_string();
        assert!(error.contains("the loss is NaN at step 8"), "{error}");
        assert_eq!((told.lines.len(), told.checkpoint), (8, Some(8)), "{:?}", told.notes);
        assert_eq!(checkpoints(folder.path()).unwrap(), [8]);
        assert_eq!(told.notes.len(), usize::from(again > 0), "{:?}", told.notes);
    }
}

#[test]
fn a_rank_that_fails_tells_the_others_why_before_it_ends_its_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    let errors = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for group in Group::threads(2) {
            let (folder, errors) = (folder.path(), &errors);
            scope.spawn(move || {
                // The ninth number is the first rank's.
                let worker = Worker::with_device(group, Device::cpu(1));
                let (_, error) = fail(&worker, 4, folder);
                errors.lock().unwrap().push((worker.is_first(), error));
            });
        }
    });
    for (is_first, error) in errors.into_inner().unwrap() {
        assert_eq!(error.is_consequence(), !is_first, "{error}");
        assert!(error.to_string().contains("the loss is NaN at step 4"), "{error}");
    }
    assert_eq!(checkpoints(folder.path()).unwrap(), [4]);
}

#[test]
fn a_run_says_where_it_begins() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().join("checkpoints");
    let trainer =
        |resume| Trainer { steps: Some(2), checkpoint: every(1, &root, resume), ..Trainer::default() };
    let told = |resume| train(1, &trainer(resume), Sgd::new(0.05).into()).unwrap().told;
    let fresh = told(true);
    assert_eq!(fresh.resumed, None);
    assert!(
        fresh.notes[0].ends_with("checkpoints holds no checkpoint: starting from the first step"),
        "{:?}",
        fresh.notes
    );
    let done = told(true);
    assert_eq!((done.resumed, done.lines.len(), done.notes.len()), (Some(2), 0, 0), "{:?}", done.notes);
    let again = told(false);
    assert_eq!(again.resumed, None);
    assert!(again.notes[0].ends_with("checkpoints.1 now"), "{:?}", again.notes);
    assert_eq!(checkpoints(&folder.path().join("checkpoints.1")).unwrap()[0], 2);
}
