//! Going on from a checkpoint. Rank 0 alone reads it and holds it against its checksums; the others get its bytes from
//! rank 0, so that ranks on nodes that share no file system go on from the same ones.

use super::error::CheckpointError;
use super::manifest::{self, Holds, Manifest, RunFacts};
use super::read;
use super::snapshot::rank_name;
use super::store::folder;
use crate::error::Error;
use crate::trainer::State;
use crate::worker::Worker;
use phalanx_comm::{Group, Rank};
use phalanx_nn::optim::{Optimizer, Rule};
use phalanx_nn::{Average, Parameters, Weights};
use phalanx_parallel::Kept;
use std::path::{Path, PathBuf};

/// A state that was read, the same on all ranks but for what each keeps.
pub(super) struct Resumed {
    pub(super) state: State,
    /// What this rank's compression of gradients kept, if there was any.
    pub(super) kept: Option<Kept>,
    /// The checkpoint.
    pub(super) folder: PathBuf,
    /// The recipe of the run that made it.
    pub(super) recipe: Option<String>,
    /// Why newer ones weren't taken; only rank 0 knows.
    pub(super) passed_over: Vec<CheckpointError>,
}

/// Brings `parameters` to the newest checkpoint in `root` that is whole, and gives the state that goes with them; none if there
/// is no checkpoint. All ranks have to ask.
pub(super) fn resume(
    root: &Path,
    worker: &Worker,
    run: RunFacts,
    parameters: &Parameters,
    rule: Rule,
) -> Result<Option<Resumed>, Error> {
    let (mut own, mut passed_over) = (None, Vec::new());
    if worker.is_first()
        && let Some(mut whole) = read::newest(root)?
    {
        passed_over = std::mem::take(&mut whole.passed_over);
        let mut parts = vec![whole.manifest.to_text().into_bytes()];
        parts.append(&mut whole.files);
        own = Some(parts);
    }
    let Some(mut parts) = share(&worker.group(), own)? else { return Ok(None) };
    let files = parts.split_off(1);
    let manifest = Manifest::parse(&root.join(manifest::FILE), &parts[0])?;
    let folder = folder(root, manifest.position.step);
    let state = restore(&folder, &manifest, &files, run, parameters, rule)?;
    let kept = weights(&folder, &manifest, &files, Holds::Compression)?;
    let kept = kept.map(|kept| own_part(&folder, &kept, worker.group().rank(), &manifest.run, &run));
    let kept = kept.transpose()?;
    Ok(Some(Resumed { state, kept, folder, recipe: manifest.recipe, passed_over }))
}

/// Gives all ranks what rank 0 has.
fn share(group: &Group, own: Option<Vec<Vec<u8>>>) -> Result<Option<Vec<Vec<u8>>>, Error> {
    let mut count = [own.as_ref().map_or(0, Vec::len) as u64];
    group.broadcast(&mut count, Rank(0))?;
    if count == [0] {
        return Ok(None);
    }
    let mut parts = own.unwrap_or_else(|| vec![Vec::new(); count[0] as usize]);
    let mut lengths: Vec<u64> = parts.iter().map(|part| part.len() as u64).collect();
    group.broadcast(&mut lengths, Rank(0))?;
    for (part, length) in parts.iter_mut().zip(lengths) {
        part.resize(length as usize, 0);
        group.broadcast(part, Rank(0))?;
    }
    Ok(Some(parts))
}

fn restore(
    folder: &Path,
    manifest: &Manifest,
    files: &[Vec<u8>],
    run: RunFacts,
    parameters: &Parameters,
    rule: Rule,
) -> Result<State, CheckpointError> {
    let weights = |holds| weights(folder, manifest, files, holds);
    let other_model = |mismatch| CheckpointError::OtherModel { path: folder.to_owned(), mismatch };
    let (Some(model), Some(optimizer)) = (weights(Holds::Model)?, weights(Holds::Optimizer)?) else {
        let reason = "it holds no model, or no optimizer".into();
        return Err(CheckpointError::Broken { path: folder.to_owned(), reason });
    };
    // First what says most: another model mostly comes with other data and batches, too.
    parameters.load(&model).map_err(other_model)?;
    same_run(folder, &manifest.run, &run)?;
    let average = weights(Holds::Average)?.map(|average| Average::resume(parameters, &average));
    let average = average.transpose().map_err(other_model)?;
    let optimizer = Optimizer::resume(rule, parameters, &optimizer)
        .map_err(|source| CheckpointError::OtherOptimizer { path: folder.to_owned(), source })?;
    Ok(State { progress: manifest.position.into(), optimizer, average })
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

/// What a rank kept. Each rank's gradients lack something else, so ranks go on only as many as they were: to share what they
/// lacked out anew would be another run.
fn own_part(
    folder: &Path,
    kept: &Weights,
    rank: Rank,
    then: &RunFacts,
    now: &RunFacts,
) -> Result<Kept, CheckpointError> {
    if then.world_size != now.world_size {
        return Err(CheckpointError::OtherRun {
            path: folder.to_owned(),
            what: "compressed gradients, of which each worker keeps a part, by this many workers:",
            then: then.world_size,
            now: now.world_size,
            hint: format!(
                "go on with {} workers, or start anew from its weights with --init",
                then.world_size
            ),
        });
    }
    let own = rank_name(rank.index(), "");
    let array = |name: &str| Some((name.strip_prefix(&own)?.to_owned(), kept.get(name)?.1.to_vec()));
    Ok(kept.names().filter_map(array).collect())
}

/// The arrays of the file that holds these, if there is one.
fn weights(
    folder: &Path,
    manifest: &Manifest,
    files: &[Vec<u8>],
    holds: Holds,
) -> Result<Option<Weights>, CheckpointError> {
    let Some((file, content)) = manifest.files.iter().zip(files).find(|(file, _)| file.holds == holds) else {
        return Ok(None);
    };
    let weights = Weights::from_bytes(content);
    weights.map(Some).map_err(|reason| CheckpointError::Broken { path: folder.join(&file.name), reason })
}
