//! Every way in which writing a checkpoint can end, and every way in which one can be wrong.

mod machine;
mod walk;

use super::background::{About, Background};
use super::disk::{Disk, DiskFile, SystemDisk};
use super::manifest;
use super::snapshot::{Beside, Contents, Lent, Snapshot};
use super::store::{PartOf, Store};
use super::*;
use machine::{After, Fault, Machine};
use phalanx_nn::optim::{Adam, Rule, Sgd};
use phalanx_nn::{Linear, Weights};
use phalanx_parallel::{Collected, SingleDevice};
use phalanx_tensor::Device;
use std::fs;
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

const RULE: Sgd = Sgd { lr: 0.1, momentum: 0.9, dampening: 0.0, nesterov: false, weight_decay: 0.0 };
const RUN: RunFacts = RunFacts {
    seed: 1,
    shuffle: true,
    dataset: 1000,
    samples_per_epoch: 1000,
    global_batch: 10,
    world_size: 1,
    logical_shards: 0,
};

/// A model whose files have two chunks each.
struct Run {
    parameters: Parameters,
    state: State,
    contents: Contents,
}

impl Run {
    fn new() -> Run {
        let parameters = Parameters::build(&mut Linear::new(700, 400), &Device::cpu(1), 0);
        let contents = Contents::of(&parameters);
        let mut state = State::start(RULE).unwrap();
        let grads = vec![0.5; parameters.layout().len()];
        state.optimizer.step(&mut parameters.values().flat_mut::<f32>(), &grads, 1.0);
        Run { parameters, state, contents }
    }

    /// The run after `step` steps, which its values tell.
    fn at(&mut self, step: u64) -> Snapshot {
        (0..2).for_each(|i| self.parameters.value(i).fill(step as f64));
        let mut snapshot = Snapshot::default();
        let (epoch, step_in_epoch, samples) = (step / 100, step % 100, 10 * step);
        self.state.progress = Progress { step, epoch, step_in_epoch, samples, ..Progress::default() };
        snapshot.copy(Lent::of(&self.parameters, &self.state, Beside::default()));
        snapshot
    }

    fn write(&mut self, store: &Store, step: u64) -> Result<(), CheckpointError> {
        store.write(&self.at(step), &self.contents, RUN, &Origin::default())?;
        store.prune(step)
    }

    /// As [`Run::write`], by two ranks that have a parameter each.
    fn write_together(&mut self, store: &Store, step: u64) -> Result<(), CheckpointError> {
        self.at(step);
        let mut files = Vec::new();
        for (number, params) in [0..1, 1..2].into_iter().enumerate() {
            let span = self.parameters.layout().span(params.clone());
            let states = self.state.optimizer.state();
            let part = Collected {
                values: self.parameters.values().flat::<f32>()[span.clone()].to_vec(),
                beside: states.map(|(_, state)| state.with(|s| s[span.clone()].to_vec())).collect(),
            };
            let mut snapshot = Snapshot::default();
            snapshot.take(&self.state, part, Vec::new(), None);
            let contents = self.contents.part(params, number == 0);
            files.extend(store.write_part(&snapshot, &contents, PartOf { number, of: 2 })?);
        }
        store.commit(&Position::from(&self.state.progress), Ok(files), RUN, &Origin::default())?;
        store.prune(step)
    }

    /// The step that a run in this folder would go on from.
    fn resume(&self, root: &Path) -> Result<Option<u64>, Error> {
        let resumed = resumed(root, RUN, &self.parameters, RULE.into())?;
        Ok(resumed.map(|resumed| {
            let step = resumed.state.progress.step;
            let values = self.parameters.values().flat::<f32>();
            assert!(
                (0..2).all(|i| values[self.parameters.layout().range(i)].iter().all(|&v| v == step as f32))
            );
            let (then, now) = (self.state.optimizer.to_weights(&self.parameters), resumed.state.optimizer);
            assert!(now.to_weights(&self.parameters) == then, "the optimizer's state");
            step
        }))
    }
}

/// What a run of one rank goes on with.
fn resumed(
    root: &Path,
    run: RunFacts,
    parameters: &Parameters,
    rule: Rule,
) -> Result<Option<resume::Resumed>, Error> {
    resume::resume(root, Wanted::Newest, &Worker::alone(1), run, parameters, rule, &mut SingleDevice::new())
}

fn store(root: &Path) -> Store {
    Store::new(Box::new(SystemDisk), root.to_owned(), 2).of_part(0)
}

/// The names in a folder, but for the writer's.
fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap();
    let mut names: Vec<_> = entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.retain(|name| !name.starts_with(".writer"));
    names.sort();
    names
}

const EVERY_END: [After; 4] =
    [After::Kill, After::PowerLoss, After::PowerLossThatKeptNames, After::PowerLossThatKeptTheLastName];

#[test]
fn a_whole_checkpoint_remains_wherever_the_writer_is_killed() {
    let mut run = Run::new();
    let mut kills = 0;
    loop {
        let machine = Machine::default();
        let store = Store::new(Box::new(machine.clone()), "run/checkpoints".into(), 2).of_part(0);
        for step in [10, 20] {
            run.write(&store, step).unwrap();
        }
        machine.fault_at(kills, Fault::Kill);
        let committed = store.write(&run.at(30), &run.contents, RUN, &Origin::default()).is_ok();
        let all = committed && store.prune(30).is_ok();
        for after in EVERY_END {
            let folder = tempfile::tempdir().unwrap();
            machine.leaves(after, folder.path());
            let root = folder.path().join("run/checkpoints");
            for step in checkpoints(&root).unwrap() {
                let folder = store::folder(&root, step);
                let whole = Manifest::read(&folder).and_then(|manifest| manifest.verify(&folder));
                whole.unwrap_or_else(|error| panic!("C-COMMIT: {kills}, {after:?}: {error}"));
            }
            let step = run.resume(&root).unwrap_or_else(|error| panic!("{kills}, {after:?}: {error}"));
            assert!(step == Some(30) || (step == Some(20) && !committed), "{kills}, {after:?}: {step:?}");
            // The next start cleans up, and goes on as ever.
            let store = self::store(&root);
            store.clean().unwrap();
            run.write(&store, 40).unwrap();
            assert_eq!(
                names(&root),
                [format!("step-{}", step.unwrap()), "step-40".into()],
                "{kills}, {after:?}"
            );
            let files = ["manifest.json", "model.safetensors", "optimizer.safetensors"];
            assert_eq!(names(&root.join("step-40")), files);
        }
        if all {
            break;
        }
        kills += 1;
    }
    assert!(kills > 25, "killed {kills} times: the test doesn't reach the writer's requests");
}

#[test]
fn parts_are_a_checkpoint_once_all_are_there_wherever_a_writer_is_killed() {
    let mut run = Run::new();
    for kills in 0.. {
        let machine = Machine::default();
        let store = Store::new(Box::new(machine.clone()), "run/checkpoints".into(), 2).of_part(0);
        run.write(&store, 10).unwrap();
        run.write_together(&store, 20).unwrap();
        machine.fault_at(kills, Fault::Kill);
        let all = run.write_together(&store, 30).is_ok();
        for after in EVERY_END {
            let folder = tempfile::tempdir().unwrap();
            machine.leaves(after, folder.path());
            let root = folder.path().join("run/checkpoints");
            let step = run.resume(&root).unwrap_or_else(|error| panic!("{kills}, {after:?}: {error}"));
            assert!(step == Some(30) || (step == Some(20) && !all), "{kills}, {after:?}: {step:?}");
        }
        if all {
            assert!(kills > 20, "killed {kills} times: the test doesn't reach the writers' requests");
            return;
        }
    }
}

#[test]
fn a_part_that_is_not_here_or_was_not_written_is_named_and_nothing_is_left() {
    let mut run = Run::new();
    let folder = tempfile::tempdir().unwrap();
    let store = store(folder.path());
    run.write_together(&store, 20).unwrap();
    let files = Manifest::read(&folder.path().join("step-20")).unwrap().files;
    let position = Position { step: 30, ..Position::default() };
    let error = store.commit(&position, Ok(files), RUN, &Origin::default()).unwrap_err().to_string();
    assert!(
        error.contains("step-30/model-00001-of-00002.safetensors: a rank has written its part"),
        "{error}"
    );
    let said = [br#"{"Ok":[]}"#.to_vec(), br#"{"Err":"the disk is full"}"#.to_vec()];
    let error = store.commit(&position, together(&said), RUN, &Origin::default()).unwrap_err().to_string();
    assert_eq!(error, "rank 1: the disk is full");
    assert_eq!(names(folder.path()), ["step-20"]);
}

#[test]
fn a_checkpoint_is_the_same_in_any_number_of_parts() {
    let mut run = Run::new();
    let folder = tempfile::tempdir().unwrap();
    run.write(&store(&folder.path().join("1")), 7).unwrap();
    let mut from = folder.path().join("1/step-7");
    let first = Manifest::read(&from).unwrap();
    for (parts, files) in [(2, 4), (5, 10), (3, 6), (1, 2)] {
        let root = folder.path().join(format!("to-{parts}"));
        let converted = convert(&from, parts, &root).unwrap();
        assert_eq!(converted.manifest.files.len(), files);
        assert_eq!(run.resume(&root).unwrap(), Some(7), "{parts}");
        let error = convert(&from, parts, &root).unwrap_err().to_string();
        assert!(error.contains("step-7: there is something of this name already"), "{error}");
        from = converted.folder;
    }
    assert_eq!(Manifest::read(&from).unwrap(), first, "back to the very bytes");
    fs::write(from.join("model.safetensors"), "short").unwrap();
    assert!(convert(&from, 2, &folder.path().join("broken")).is_err());
    assert!(!folder.path().join("broken").exists());
}

/// Two files of 5 GB.
#[test]
#[ignore = "writes 20 GB; alone, in release mode: cargo test --release -p phalanx --lib ten_gigabytes -- --ignored --nocapture"]
fn a_checkpoint_of_ten_gigabytes_is_converted_within_little_memory() {
    let folder = tempfile::tempdir_in(".").unwrap();
    let root = folder.path().join("one");
    let (step, rows) = (store::folder(&root, 3), 1 << 20);
    let store = store(&root);
    store.begin(&step).unwrap();
    let mut files = Vec::new();
    let shape = phalanx_tensor::Shape::new(&[rows, 64]);
    for (holds, suffix, count) in [(Holds::Model, "", 20), (Holds::Optimizer, ".momentum_buffer", 20)] {
        let name = store::file_name(holds, PartOf::WHOLE);
        let names: Vec<String> = (0..count).map(|i| format!("{i:02}.weight{suffix}")).collect();
        let mut file = disk::Disk::create(&SystemDisk, &step.join(&name)).unwrap();
        let header = tensors::header(names.iter().map(|name| (name.as_str(), &shape)));
        let mut chunks = tensors::Chunks::begin(&mut *file, &header).unwrap();
        for i in 0..count * 256 {
            chunks.put(&[i as u8; 1 << 20]).unwrap();
        }
        let tensors::Sums { bytes, crc32 } = chunks.finish().unwrap();
        files.push(FileEntry { name, holds, bytes, chunk: manifest::CHUNK as u64, crc32 });
    }
    store.commit(&Position { step: 3, ..Position::default() }, Ok(files), RUN, &Origin::default()).unwrap();
    let start = Instant::now();
    let converted = convert(&step, 8, &folder.path().join("eight")).unwrap();
    let bytes: u64 = converted.manifest.files.iter().map(|file| file.bytes).sum();
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let most = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap().trim();
    println!("{bytes} bytes in {:.1?}, at most {most} in memory", start.elapsed());
    let kib: u64 = most.strip_suffix(" kB").unwrap().parse().unwrap();
    assert!(bytes > 10_000_000_000 && kib < 64 << 10, "{bytes} bytes, {most}");
}

#[test]
fn a_broken_checkpoint_that_is_written_again_leaves_the_one_before_wherever_the_writer_is_killed() {
    let mut run = Run::new();
    for kills in 0.. {
        let machine = Machine::default();
        let store = Store::new(Box::new(machine.clone()), "run/checkpoints".into(), 2).of_part(0);
        for step in [10, 20] {
            run.write(&store, step).unwrap();
        }
        machine.flip_a_byte(Path::new("run/checkpoints/step-20/model.safetensors"));
        machine.fault_at(kills, Fault::Kill);
        let all = run.write(&store, 20).is_ok();
        for after in EVERY_END {
            let folder = tempfile::tempdir().unwrap();
            machine.leaves(after, folder.path());
            let step = run.resume(&folder.path().join("run/checkpoints")).unwrap();
            assert!(step == Some(20) || (step == Some(10) && !all), "{kills}, {after:?}: {step:?}");
        }
        if all {
            return;
        }
    }
}

#[test]
fn a_disk_that_fails_once_leaves_no_trace_and_the_next_checkpoint_is_written() {
    // In its first one, too.
    let all = [&[][..], &[10, 20]].into_iter().flat_map(|before| (0..60).map(move |at| (before, at)));
    let (mut run, mut failures) = (Run::new(), 0);
    for (before, at) in all {
        let machine = Machine::default();
        let store = Store::new(Box::new(machine.clone()), "run/checkpoints".into(), 2).of_part(0);
        for &step in before {
            run.write(&store, step).unwrap();
        }
        machine.fault_at(at, Fault::Full);
        let result = run.write(&store, 30);
        let spared = machine.is_spared();
        if let Err(error) = &result {
            failures += 1;
            let message = error.to_string();
            assert!(message.contains("No space left on device") && message.starts_with("run"), "{message}");
        }
        run.write(&store, 40).unwrap();
        let folder = tempfile::tempdir().unwrap();
        machine.leaves(After::Kill, folder.path());
        let root = folder.path().join("run/checkpoints");
        assert_eq!(checkpoints(&root).unwrap()[0], 40, "{at}");
        let older = names(&root).len() - 1;
        let is_first = before.is_empty() && result.is_err();
        assert!(older == 1 || (older == 0 && is_first), "{at} after {before:?}: {:?}", names(&root));
        assert!(!spared || at > 15, "{at} after {before:?}");
    }
    assert!(failures > 40, "{failures} failures: the test doesn't reach the writer's requests");
}

#[test]
fn a_failed_checkpoint_is_told_and_the_next_one_is_written_from_the_same_thread() {
    struct Notes(Mutex<Vec<Event>>);
    impl Observer for Notes {
        fn event(&mut self, event: &Event) {
            self.0.get_mut().unwrap().push(event.clone());
        }
    }
    let Run { parameters, mut state, contents } = Run::new();
    let machine = Machine::default();
    let store = Store::new(Box::new(machine.clone()), "run/checkpoints".into(), 2).of_part(0);
    let background = Background::start(
        store,
        About { contents, part: PartOf::WHOLE, run: RUN, origin: Origin::default() },
    )
    .unwrap();
    let last = (0, Instant::now());
    let (stall, longest) = (Duration::ZERO, Duration::ZERO);
    let mut writer = Writer { background, last, any: false, asked: false, newest: None, stall, longest };
    let mut notes = Notes(Mutex::default());
    machine.fault_at(18, Fault::Full);
    for step in [5, 10] {
        state.progress.step = step;
        writer.take(&state, &parameters, Beside::default());
        assert!(!writer.background.is_idle(), "one snapshot at a time");
        writer.wait(Path::new("run/checkpoints"), &mut notes);
    }
    let [Event::Note { message }, Event::Checkpoint { step: 10, path, .. }] = &notes.0.get_mut().unwrap()[..]
    else {
        panic!("{:?}", notes.0)
    };
    assert!(message.starts_with("no checkpoint after step 5: run/checkpoints/step-5/"), "{message}");
    assert!(message.contains("No space left on device") && message.ends_with("the run goes on"), "{message}");
    assert_eq!(path, "run/checkpoints/step-10");
}

#[test]
fn a_flipped_byte_is_found_in_every_chunk_of_every_file_and_the_one_before_is_taken() {
    let mut run = Run::new();
    let folder = tempfile::tempdir().unwrap();
    let (root, store) = (folder.path(), store(folder.path()));
    for step in [10, 20] {
        run.write(&store, step).unwrap();
    }
    let mut chunks = 0;
    for entry in Manifest::read(&root.join("step-20")).unwrap().files {
        let path = root.join("step-20").join(&entry.name);
        let good = fs::read(&path).unwrap();
        for (chunk, start) in (0..good.len()).step_by(entry.chunk as usize).enumerate() {
            let mut bad = good.clone();
            bad[start + 77] ^= 4;
            fs::write(&path, bad).unwrap();
            let error =
                Manifest::read(&root.join("step-20")).unwrap().verify(&root.join("step-20")).unwrap_err();
            let words = format!("step-20/{}: the checkpoint is broken: chunk {} of 2", entry.name, chunk + 1);
            assert!(error.to_string().contains(&words), "{error}");
            let resumed = resumed(root, RUN, &run.parameters, RULE.into());
            let resumed = resumed.unwrap().unwrap();
            assert_eq!(resumed.state.progress.step, 10);
            assert!(resumed.passed_over[0].to_string().contains(&words));
            chunks += 1;
        }
        fs::write(&path, &good[..good.len() - 1]).unwrap();
        assert_eq!(run.resume(root).unwrap(), Some(10), "cut by a byte");
        fs::remove_file(&path).unwrap();
        assert_eq!(run.resume(root).unwrap(), Some(10), "missing");
        fs::write(&path, good).unwrap();
    }
    assert_eq!((chunks, run.resume(root).unwrap()), (4, Some(20)));
}

#[test]
fn a_run_whose_checkpoints_are_all_broken_is_not_begun_anew_in_silence() {
    let mut run = Run::new();
    let folder = tempfile::tempdir().unwrap();
    assert_eq!(run.resume(&folder.path().join("missing")).unwrap(), None);
    assert_eq!(run.resume(folder.path()).unwrap(), None);
    let store = store(folder.path());
    for step in [1, 2] {
        run.write(&store, step).unwrap();
        fs::write(folder.path().join(format!("step-{step}/manifest.json")), "{").unwrap();
    }
    let error = run.resume(folder.path()).unwrap_err().to_string();
    let words =
        ["none of its checkpoints can be read", "step-1/manifest.json", "step-2/manifest.json", "hint:"];
    assert!(words.iter().all(|word| error.contains(word)), "{error}");
}

#[test]
fn a_run_that_is_started_again_goes_on_from_its_own_checkpoints_alone() {
    let mut run = Run::new();
    let folder = tempfile::tempdir().unwrap();
    let store = store(folder.path());
    let origin = |id: &str| Origin { run_id: Some(id.into()), ..Origin::default() };
    store.write(&run.at(5), &run.contents, RUN, &origin("own")).unwrap();
    store.write(&run.at(7), &run.contents, RUN, &origin("other")).unwrap();
    run.write(&store, 9).unwrap();
    let step = |wanted: Wanted| {
        let found = read::newest(folder.path(), &wanted, &AtomicU64::new(0)).unwrap();
        found.map(|whole| whole.manifest.position.step)
    };
    assert_eq!(step(Wanted::Newest), Some(9));
    assert_eq!(
        [step(Wanted::Of("own".into())), step(Wanted::Of("other".into()))],
        [None, Some(7)],
        "two are kept"
    );
    assert_eq!([step(Wanted::Of("third".into())), step(Wanted::Nothing)], [None, None]);
}

#[test]
fn a_checkpoint_that_cannot_be_read_for_now_is_not_passed_over() {
    let mut run = Run::new();
    let folder = tempfile::tempdir().unwrap();
    let store = store(folder.path());
    for step in [1, 2] {
        run.write(&store, step).unwrap();
    }
    // A link to itself is one that even root can't follow.
    let path = folder.path().join("step-2/model.safetensors");
    fs::remove_file(&path).unwrap();
    std::os::unix::fs::symlink("model.safetensors", &path).unwrap();
    let error = run.resume(folder.path()).unwrap_err().to_string();
    assert!(error.contains("step-2/model.safetensors: can't be read: Too many levels"), "{error}");
    assert!(error.contains("hint: mend that and go on"), "{error}");
}

/// A disk whose current folder is this one.
struct In(PathBuf);

impl In {
    fn path(&self, path: &Path) -> PathBuf {
        assert!(!path.as_os_str().is_empty(), "a system knows no folder without a name");
        self.0.join(path)
    }
}

/// The same, where something happens before one of the requests.
struct Interrupted {
    disk: In,
    /// How many requests are left until then, and none after it; more than there are where nothing is to happen.
    left: Arc<AtomicUsize>,
    by: Box<dyn Fn() + Send>,
}

impl Interrupted {
    fn request(&self) -> &In {
        if self.left.fetch_sub(1, Ordering::Relaxed) == 0 {
            (self.by)();
        }
        &self.disk
    }
}

impl Disk for Interrupted {
    fn create_dir(&self, path: &Path) -> io::Result<()> {
        self.request().create_dir(path)
    }

    fn create(&self, path: &Path) -> io::Result<Box<dyn DiskFile>> {
        self.request().create(path)
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.request().rename(from, to)
    }

    fn remove_file(&self, path: &Path) -> io::Result<()> {
        self.request().remove_file(path)
    }

    fn remove_dir(&self, path: &Path) -> io::Result<()> {
        self.request().remove_dir(path)
    }

    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        self.request().sync_dir(path)
    }

    fn list(&self, path: &Path) -> io::Result<Vec<String>> {
        self.request().list(path)
    }
}

#[test]
fn a_writer_that_stood_still_leaves_alone_what_is_of_those_who_went_on_wherever_it_stood() {
    const NEVER: usize = usize::MAX / 2;
    // In its first one, too.
    for (before, at) in [&[][..], &[5, 10]].into_iter().flat_map(|before| (0..70).map(move |at| (before, at)))
    {
        let mut run = Run::new();
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().join("checkpoints");
        let left = Arc::new(AtomicUsize::new(NEVER));
        let others = root.clone();
        let by = move || {
            let (next, mut run) = (store(&others), Run::new());
            next.enter().unwrap();
            next.clean().unwrap();
            for step in [20, 30, 40] {
                run.write(&next, step).unwrap();
            }
        };
        let disk = Interrupted { disk: In(folder.path().to_owned()), left: left.clone(), by: Box::new(by) };
        let first = Store::new(Box::new(disk), "checkpoints".into(), 2).of_part(0);
        for &step in before {
            run.write(&first, step).unwrap();
        }
        left.store(at, Ordering::Relaxed);
        let written = run.write(&first, 20);
        if left.load(Ordering::Relaxed) < NEVER {
            assert!(
                at > 15 && written.is_ok(),
                "stopped at {at} requests: the test doesn't reach the writer's"
            );
            continue;
        }
        left.store(NEVER, Ordering::Relaxed);
        assert!(at < 69, "the test doesn't reach the writer's end");
        assert_eq!(run.resume(&root).unwrap(), Some(40), "{at}");
        let error = run.write(&first, 50).unwrap_err();
        assert!(matches!(error, CheckpointError::TakenOver { .. }), "{at}: {error}");
        assert!(first.prune(20).is_err() && first.clean().is_err(), "{at}");
        let committed = checkpoints(&root).unwrap();
        assert_eq!(committed[..2], [40, 30], "{at} after {before:?}");
        for &step in &committed[..2] {
            let folder = store::folder(&root, step);
            Manifest::read(&folder).and_then(|manifest| manifest.verify(&folder)).unwrap();
        }
    }
}

impl Disk for In {
    fn create_dir(&self, path: &Path) -> io::Result<()> {
        SystemDisk.create_dir(&self.path(path))
    }

    fn create(&self, path: &Path) -> io::Result<Box<dyn DiskFile>> {
        SystemDisk.create(&self.path(path))
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        SystemDisk.rename(&self.path(from), &self.path(to))
    }

    fn remove_file(&self, path: &Path) -> io::Result<()> {
        SystemDisk.remove_file(&self.path(path))
    }

    fn remove_dir(&self, path: &Path) -> io::Result<()> {
        SystemDisk.remove_dir(&self.path(path))
    }

    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        SystemDisk.sync_dir(&self.path(path))
    }

    fn list(&self, path: &Path) -> io::Result<Vec<String>> {
        SystemDisk.list(&self.path(path))
    }
}

#[test]
fn a_folder_of_the_current_one_is_set_aside_again_and_again_and_one_without_a_name_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let mut run = Run::new();
    let store = |root: &str| Store::new(Box::new(In(folder.path().to_owned())), root.into(), 2);
    let relative = store("checkpoints");
    for aside in ["checkpoints.1", "checkpoints.2"] {
        run.write(&relative, 3).unwrap();
        assert!(relative.set_aside().unwrap().is_some_and(|path| path.ends_with(aside)));
        assert_eq!(relative.set_aside().unwrap(), None);
    }
    let nameless = store(".");
    run.write(&nameless, 3).unwrap();
    let error = nameless.set_aside().unwrap_err().to_string();
    assert!(error.contains(".: ") && error.contains("hint: name another folder"), "{error}");
}

#[test]
fn checkpoints_of_other_models_optimizers_and_runs_are_refused_and_say_why() {
    let mut run = Run::new();
    let folder = tempfile::tempdir().unwrap();
    run.write(&store(folder.path()), 7).unwrap();
    let refused = |facts: RunFacts, parameters: &Parameters, rule: Rule, words: &[&str]| {
        let error = resumed(folder.path(), facts, parameters, rule);
        let message = error.err().expect("it doesn't fit").to_string();
        assert!(message.contains("step-7: ") && words.iter().all(|word| message.contains(word)), "{message}");
    };
    let own = &run.parameters;
    let narrow = Parameters::build(&mut Linear::new(700, 300), &Device::cpu(1), 0);
    let rule = Rule::from(RULE);
    refused(
        RUN,
        &narrow,
        rule,
        &["of another model", "weight is [400, 700] in the file and [300, 700] in the model"],
    );
    refused(RUN, own, Adam::default().into(), &["exp_avg", "missing: weight.exp_avg"]);
    refused(
        RunFacts { seed: 2, ..RUN },
        own,
        rule,
        &["the seed 1, and this run has 2", "hint: go on with the seed 1"],
    );
    refused(
        RunFacts { global_batch: 16, world_size: 4, ..RUN },
        own,
        rule,
        &["a global batch of 10, and this run has 16", "with 1 worker a --batch-size of 10"],
    );
    refused(
        RunFacts { global_batch: 20, world_size: 5, ..RUN },
        own,
        rule,
        &["a global batch of 10, and this run has 20", "with 5 workers a --batch-size of 2"],
    );
    refused(RunFacts { dataset: 5, ..RUN }, own, rule, &["1000, and this run has 5"]);
    refused(
        RunFacts { shuffle: false, ..RUN },
        own,
        rule,
        &["shuffle 1, and this run has 0", "--no-shuffle"],
    );
    refused(
        RunFacts { logical_shards: 5, global_batch: 15, ..RUN },
        own,
        rule,
        &["logical shards: 0, and this run has 5", "hint: go on without --logical-shards"],
    );
    refused(
        RunFacts { samples_per_epoch: 990, ..RUN },
        own,
        rule,
        &["trains on this many samples: 1000, and this run has 990", "train.accumulate as before"],
    );
    let elsewhere = RunFacts { world_size: 5, ..RUN };
    let resumed = resumed(folder.path(), elsewhere, own, rule).unwrap();
    assert_eq!(resumed.expect("another number of ranks is fine").state.progress.step, 7);
}

#[test]
fn a_checkpoint_from_the_future_is_not_passed_over() {
    let mut run = Run::new();
    let folder = tempfile::tempdir().unwrap();
    let store = store(folder.path());
    for step in [1, 2] {
        run.write(&store, step).unwrap();
    }
    let newest = folder.path().join("step-2");
    let manifest = Manifest { version: VERSION + 1, ..Manifest::read(&newest).unwrap() };
    fs::write(newest.join(manifest::FILE), manifest.to_text()).unwrap();
    let error = run.resume(folder.path()).unwrap_err().to_string();
    assert!(error.contains("step-2/manifest.json: a checkpoint of format 5"), "{error}");
}

#[test]
fn the_files_are_what_pytorch_and_the_rest_of_the_library_read() {
    let mut run = Run::new();
    let folder = tempfile::tempdir().unwrap();
    run.write(&store(folder.path()), 3).unwrap();
    let read = |name: &str| Weights::read(&folder.path().join("step-3").join(name)).unwrap();
    assert!(read("model.safetensors") == run.parameters.to_weights());
    let (saved, wanted) = (read("optimizer.safetensors"), run.state.optimizer.to_weights(&run.parameters));
    assert!(saved.names().all(|name| saved.get(name) == wanted.get(name)));
    assert_eq!(saved.names().count(), wanted.names().count());
}

#[test]
fn a_run_that_begins_anew_sets_the_checkpoints_of_the_one_before_aside() {
    let mut run = Run::new();
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().join("checkpoints");
    let store = store(&root);
    assert_eq!(store.set_aside().unwrap(), None, "there is none");
    for (i, step) in [(1, 30), (2, 20)] {
        run.write(&store, step).unwrap();
        let aside = folder.path().join(format!("checkpoints.{i}"));
        assert_eq!(store.set_aside().unwrap(), Some(aside.clone()));
        assert_eq!((checkpoints(&aside).unwrap(), checkpoints(&root).unwrap()), (vec![step], vec![]));
    }
}

#[test]
fn only_folders_that_a_writer_names_are_checkpoints() {
    let folder = tempfile::tempdir().unwrap();
    for name in
        ["step-", "step-01", "step-+1", "step--1", "step-1x", "steps-1", "best", "step-99999999999999999999"]
    {
        fs::create_dir(folder.path().join(name)).unwrap();
        fs::write(folder.path().join(name).join(manifest::FILE), "").unwrap();
    }
    assert_eq!(checkpoints(folder.path()).unwrap(), Vec::<u64>::new());
    store(folder.path()).clean().unwrap();
    assert_eq!(names(folder.path()).len(), 8, "what isn't the writer's stays");
}

#[test]
fn checkpoints_are_due_by_steps_or_by_the_clock_and_sooner_at_the_end_of_an_epoch() {
    let secs = Duration::from_secs;
    let check = |every: Every, steps: u64, time: u64, epoch_over: bool, due: bool| {
        assert_eq!(
            every.is_due(steps, secs(time), epoch_over),
            due,
            "{every:?}: {steps} steps, {time} s, {epoch_over}"
        );
    };
    check(Every::Steps(5), 4, 1000, true, false);
    check(Every::Steps(5), 5, 0, false, true);
    check(Every::Steps(0), 1, 0, false, true);
    check(Every::Time(secs(60)), 10_000, 59, false, false);
    check(Every::Time(secs(60)), 1, 60, false, true);
    check(Every::Time(secs(60)), 1, 9, true, false);
    check(Every::Time(secs(60)), 1, 10, true, true);
    check(Every::Time(secs(3)), 1, 3, true, true);
}

#[test]
fn a_snapshot_is_taken_into_the_memory_of_the_one_before() {
    let mut run = Run::new();
    let mut snapshot = run.at(1);
    let places = |snapshot: &Snapshot| -> Vec<*const f32> {
        let files = snapshot.files(&run.contents);
        files.iter().flat_map(|(_, arrays)| arrays.iter().map(|array| array.flat.as_ptr())).collect()
    };
    let before = places(&snapshot);
    snapshot.copy(Lent::of(&run.parameters, &run.state, Beside::default()));
    assert_eq!(places(&snapshot), before);
}
