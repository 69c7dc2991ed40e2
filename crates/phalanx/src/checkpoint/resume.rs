//! Going on from a checkpoint. Rank 0 alone reads it and holds it against its checksums; the others get its bytes from
//! rank 0, so that ranks on nodes that share no file system go on from the same ones.

use super::arrays::{ArrayEntry, ArrayFile, Wholes, arrays_of};
use super::error::CheckpointError;
use super::manifest::{self, FileEntry, Holds, Manifest, RunFacts};
use super::read::{self, Wanted, Whole};
use super::snapshot::rank_name;
use super::store::folder;
use crate::error::Error;
use crate::trainer::State;
use crate::worker::{Worker, share};
use phalanx_comm::{Group, Rank};
use phalanx_job::Section;
use phalanx_nn::optim::{Resuming, Rule};
use phalanx_nn::{Parameters, Weights};
use phalanx_parallel::{Kept, Strategy};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::Duration;

/// A state that was read, the same on all ranks but for what each keeps.
pub(super) struct Resumed {
    pub(super) state: State,
    /// What the compression of gradients kept of each rank that there was, if any.
    pub(super) kept: Option<Vec<Kept>>,
    /// The checkpoint.
    pub(super) folder: PathBuf,
    /// The recipe of the run that made it.
    pub(super) recipe: Option<String>,
    /// Why newer ones weren't taken; only rank 0 knows.
    pub(super) passed_over: Vec<CheckpointError>,
}

/// Brings `parameters` to the newest checkpoint in `root` that is whole and wanted by rank 0, and gives the state that goes with them;
/// none if there is no such checkpoint. Of values, and of the optimizer's state, this rank takes what `strategy` keeps; of what
/// compressed gradients lacked, all parts, if it keeps such. All ranks have to ask. No more than one array of the files is held at a time,
/// beside what becomes of them.
pub(super) fn resume(
    root: &Path,
    wanted: Wanted,
    worker: &Worker,
    run: RunFacts,
    parameters: &Parameters,
    rule: Rule,
    strategy: &mut dyn Strategy,
) -> Result<Option<Resumed>, Error> {
    let group = worker.group();
    let (mut own, mut passed_over) = (None, Vec::new());
    if let Some(whole) = newest(root, wanted, worker)? {
        passed_over = whole.passed_over;
        own = Some((whole.manifest.to_text().into_bytes(), whole.folder));
    }
    let (text, own) = own.unzip();
    let text = share(&group, Rank(0), text.unwrap_or_default())?;
    if text.is_empty() {
        return Ok(None);
    }
    let manifest = Manifest::parse(&root.join(manifest::FILE), &text)?;
    // A folder that was given another name is what it holds all the same.
    let folder = own.clone().unwrap_or_else(|| folder(root, manifest.position.step));
    let mut files = Vec::new();
    for entry in &manifest.files {
        let mut file = own.as_ref().map(|folder| ArrayFile::open(folder, entry)).transpose()?;
        let header =
            share(&group, Rank(0), file.as_mut().map(|file| file.take_header()).unwrap_or_default())?;
        let arrays = arrays_of(&header, entry, &folder, Wholes::Refused)?;
        files.push(Shared { entry, arrays, file });
    }
    let has = |holds| files.iter().any(|file| file.entry.holds == holds);
    if !has(Holds::Model) || !has(Holds::Optimizer) {
        let reason = "it holds no model, or no optimizer".into();
        return Err(CheckpointError::Broken { path: folder, reason }.into());
    }
    // First what says most: another model mostly comes with other data and batches, too.
    let other_model = |mismatch| CheckpointError::OtherModel { path: folder.clone(), mismatch };
    for holds in [Holds::Model, Holds::Average].into_iter().filter(|&holds| has(holds)) {
        let arrays = files.iter().filter(|file| file.entry.holds == holds).flat_map(|file| &file.arrays);
        let mismatch = parameters.compare_shapes(arrays.map(|array| (array.name.as_str(), &array.shape)));
        if !mismatch.is_empty() {
            return Err(other_model(mismatch).into());
        }
    }
    same_run(&folder, &manifest.run, &run)?;
    let other_optimizer = |source| CheckpointError::OtherOptimizer { path: folder.clone(), source };
    let own = strategy.own_parameters(parameters);
    let mut optimizer = Resuming::new(rule, parameters, own, strategy.held()).map_err(other_optimizer)?;
    let (mut average, mut kept) = (None, None);
    // The running mean comes to the places of the values, which come there after it.
    let (means, files): (Vec<_>, Vec<_>) = files.into_iter().partition(|it| it.entry.holds == Holds::Average);
    if !means.is_empty() {
        for file in means {
            file.read(&group, &folder, |array, values| strategy.load_one(parameters, &array.name, values))?;
        }
        average = Some(strategy.mean(parameters));
    }
    for file in files {
        match file.entry.holds {
            Holds::Model | Holds::Average => file
                .read(&group, &folder, |array, values| strategy.load_one(parameters, &array.name, values))?,
            Holds::Optimizer => {
                file.read(&group, &folder, |array, values| {
                    optimizer.take(&array.name, &array.shape, values, |name, values| {
                        strategy.part_of(parameters, name, values)
                    });
                })?;
            }
            Holds::Compression if strategy.keeps() => {
                file.read_all(&group, &folder, kept.get_or_insert_default())?;
            }
            Holds::Compression => {}
        }
    }
    let optimizer = optimizer.finish().map_err(other_optimizer)?;
    let kept = kept.map(|kept| by_rank(&kept, manifest.run.world_size));
    let state = State { progress: manifest.position.into(), optimizer, average };
    Ok(Some(Resumed { state, kept, folder, recipe: manifest.origin.recipe, passed_over }))
}

/// How often the first rank says that it is still reading.
const WORD: Duration = Duration::from_secs(5);

/// What the first rank finds of what it wants; nothing on the others. Checkpoints may be large and disks slow, and ranks don't wait for
/// each other for ever: so the others are told now and then that there is more to read, and the launcher is as long as more is read.
fn newest(root: &Path, wanted: Wanted, worker: &Worker) -> Result<Option<Whole>, Error> {
    let group = worker.group();
    let say = |more: bool| {
        let mut word = [u8::from(more)];
        group.broadcast(&mut word, Rank(0)).map(|()| word[0] != 0)
    };
    if !worker.is_first() {
        while say(true)? {}
        return Ok(None);
    }
    let chunks = Arc::new(AtomicU64::new(0));
    let (found, finds) = channel();
    let (folder, counted) = (root.to_owned(), Arc::clone(&chunks));
    let reader = thread::Builder::new().name("resume".into()).spawn(move || {
        // Nobody listens any more where a rank is lost.
        let _ = found.send(read::newest(&folder, &wanted, &counted));
    });
    let reader = reader.map_err(|source| Error::Io { path: root.to_owned(), source })?;
    let mut before = 0;
    loop {
        match finds.recv_timeout(WORD) {
            Ok(found) => {
                let found = found?;
                say(false)?;
                return Ok(found);
            }
            Err(RecvTimeoutError::Timeout) => {
                let now = chunks.load(Relaxed);
                if std::mem::replace(&mut before, now) != now {
                    drop(worker.pulse().enter(Section::Start));
                }
                say(true)?;
            }
            Err(RecvTimeoutError::Disconnected) => match reader.join() {
                Err(panic) => std::panic::resume_unwind(panic),
                Ok(()) => unreachable!("it ends once it has said what it found"),
            },
        }
    }
}

/// A file of a checkpoint, as a rank reads it: from the disk on rank 0, and from rank 0 elsewhere.
struct Shared<'a> {
    entry: &'a FileEntry,
    arrays: Vec<ArrayEntry>,
    file: Option<ArrayFile>,
}

impl Shared<'_> {
    /// Gives every array on, in the order of the file.
    fn read(
        mut self,
        group: &Group,
        folder: &Path,
        mut take: impl FnMut(&ArrayEntry, &[f32]),
    ) -> Result<(), Error> {
        let mut values = Vec::new();
        for array in &self.arrays {
            values.clear();
            values.resize(array.shape.count(), 0.0);
            if let Some(file) = &mut self.file {
                file.read(folder, self.entry, &mut values)?;
            }
            group.broadcast(&mut values, Rank(0))?;
            take(array, &values);
        }
        Ok(())
    }

    fn read_all(self, group: &Group, folder: &Path, into: &mut Weights) -> Result<(), Error> {
        self.read(group, folder, |array, values| into.push(array.name.clone(), array.shape, values))
    }
}

/// Refuses a checkpoint after which the steps of this run would not be those that its own run would have taken. How many ranks
/// share a global batch is no such thing.
fn same_run(folder: &Path, then: &RunFacts, now: &RunFacts) -> Result<(), CheckpointError> {
    // Where this many workers can't share the batch evenly, those that made it can.
    let workers =
        [now.world_size, then.world_size].into_iter().find(|&n| n > 0 && then.global_batch.is_multiple_of(n));
    let workers = workers.unwrap_or(1);
    let batch = match now.logical_shards {
        0 => format!(
            "a step must see as many samples as before: with {workers} worker{} a --batch-size of {}, or less and train.accumulate",
            if workers == 1 { "" } else { "s" },
            then.global_batch / workers,
        ),
        shards => format!(
            "a step must see as many samples as before: a --batch-size of {}, which is a shard's",
            then.global_batch / shards
        ),
    };
    let shards = match then.logical_shards {
        0 => "go on without --logical-shards".to_owned(),
        shards => format!("go on with --logical-shards {shards}"),
    };
    let facts = [
        ("logical shards:", then.logical_shards, now.logical_shards, shards),
        ("a global batch of", then.global_batch, now.global_batch, batch),
        ("the seed", then.seed, now.seed, format!("go on with the seed {}", then.seed)),
        (
            "a data set of this many samples:",
            then.dataset,
            now.dataset,
            "go on with the data that it was trained on, or start anew from its weights with --init".into(),
        ),
        // Earlier versions didn't tell.
        (
            "an epoch that trains on this many samples:",
            then.samples_per_epoch,
            if then.samples_per_epoch == 0 { 0 } else { now.samples_per_epoch },
            "what train.drop_last leaves out goes by a batch of all workers: take it, --batch-size and train.accumulate as before".into(),
        ),
        (
            "shuffle",
            u64::from(then.shuffle),
            u64::from(now.shuffle),
            "shuffle as it did (see --no-shuffle)".into(),
        ),
    ];
    match facts.into_iter().find(|(_, then, now, _)| then != now) {
        Some((what, then, now, hint)) => {
            Err(CheckpointError::OtherRun { path: folder.to_owned(), what, then, now, hint })
        }
        None => Ok(()),
    }
}

/// What each of so many ranks kept, in their order.
fn by_rank(kept: &Weights, ranks: u64) -> Vec<Kept> {
    let of = |rank| {
        let own = rank_name(rank, "");
        let array = |name: &str| Some((name.strip_prefix(&own)?.to_owned(), kept.get(name)?.1.to_vec()));
        kept.names().filter_map(array).collect()
    };
    (0..ranks as usize).map(of).collect()
}
