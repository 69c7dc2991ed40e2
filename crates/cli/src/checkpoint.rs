//! `phalanx checkpoint`: what checkpoints of a run there are, and whether they are whole.

use crate::args::{Checkpoint, CheckpointArgs, WrongUsage};
use crate::runs::checkpoints_of;
use crate::say::{harmless, print, say};
use anyhow::{Result, bail};
use phalanx::checkpoint::{CheckpointError, Converted, Manifest, Position, RunFacts, checkpoints, convert};
use serde_json::json;
use std::path::{Path, PathBuf};

/// The numbers in the names of files have five digits.
const MOST_PARTS: usize = 99_999;

pub(crate) fn checkpoint(args: &CheckpointArgs) -> Result<u8> {
    match &args.what {
        Checkpoint::Show { dir, json } => Ok(show(&found(dir)?, *json)),
        Checkpoint::Convert { dir, parts, out, json } => {
            if !(1..=MOST_PARTS).contains(parts) {
                let text = format!("--parts {parts}: must be from 1 to {MOST_PARTS}");
                return Err(WrongUsage(text).into());
            }
            let Converted { folder, manifest } = convert(&found(dir)?[0], *parts, out)?;
            if *json {
                print(json!({ "checkpoint": folder.display().to_string(), "manifest": manifest }));
            } else {
                print(describe(&folder, &manifest));
            }
            Ok(0)
        }
        Checkpoint::Verify { dir, json } => Ok(verify(&found(dir)?, *json)),
    }
}

/// The checkpoints that a user means with a folder, newest first: a run's own, then those that lie beside them.
fn found(dir: &Path) -> Result<Vec<PathBuf>> {
    if dir.join("manifest.json").exists() {
        return Ok(vec![dir.to_owned()]);
    }
    let mut all = Vec::new();
    for root in [checkpoints_of(dir), dir.to_owned()] {
        let folder = |step| Some(Manifest::path(&root, step).parent()?.to_owned());
        all.extend(checkpoints(&root)?.into_iter().filter_map(folder));
    }
    if !all.is_empty() {
        return Ok(all);
    }
    bail!(
        "{}: there is no checkpoint\nhint: give a run directory, its folder checkpoints, or a step-N in that",
        dir.display()
    )
}

/// Tells what the manifest of each checkpoint says, or why it can't be believed. The exit code says whether all can.
fn show(folders: &[PathBuf], json: bool) -> u8 {
    let mut code = 0;
    for folder in folders {
        match (Manifest::read(folder), json) {
            (Ok(manifest), true) => {
                print(json!({ "checkpoint": folder.display().to_string(), "manifest": manifest }))
            }
            (Ok(manifest), false) => print(describe(folder, &manifest)),
            (Err(error), json) => {
                code = 1;
                if json {
                    print(json!({ "checkpoint": folder.display().to_string(), "error": error.to_string() }));
                } else {
                    say(format_args!("error: {error}"));
                }
            }
        }
    }
    code
}

fn describe(folder: &Path, manifest: &Manifest) -> String {
    let Position { step, epoch, step_in_epoch, samples, plateau, best, .. } = &manifest.position;
    let RunFacts { seed, shuffle, dataset, global_batch, world_size, logical_shards, .. } = manifest.run;
    let mut text = format!("{}\n", folder.display());
    text +=
        &format!("  {step} steps, {samples} samples: epoch {epoch}, after {step_in_epoch} of its steps\n");
    let order = if shuffle { "shuffled" } else { "in stored order" };
    text += &format!("  {dataset} samples {order}, {global_batch} a step, seed {seed}, {world_size} ranks");
    text +=
        &if logical_shards == 0 { "\n".to_owned() } else { format!(", {logical_shards} logical shards\n") };
    if let Some(best) = best {
        text += &format!("  best epoch {} with loss {:.4}", best.epoch, best.loss.0);
        text +=
            &best.accuracy.map_or_else(String::new, |share| format!(", accuracy {:.2}%", 100.0 * share.0));
        for (name, value) in &best.metrics {
            text += &format!(", {} {:.4}", harmless(name), value.0);
        }
        text.push('\n');
    }
    if let Some(plateau) = plateau {
        text += &format!("  learning rate times {} by the plateau\n", plateau.factor.0);
    }
    for file in &manifest.files {
        text += &format!("  {:<36} {:>14} bytes\n", file.name, file.bytes);
    }
    text.trim_end().to_owned()
}

/// Reads every byte; says of each checkpoint whether it is whole. The exit code says it of all.
fn verify(folders: &[PathBuf], json: bool) -> u8 {
    let mut code = 0;
    for folder in folders {
        let whole = Manifest::read(folder).and_then(|manifest| manifest.verify(folder).map(|()| manifest));
        if whole.is_err() {
            code = 1;
        }
        tell(folder, &whole, json);
    }
    code
}

fn tell(folder: &Path, whole: &Result<Manifest, CheckpointError>, json: bool) {
    let error = whole.as_ref().err().map(ToString::to_string);
    match (whole, json) {
        (_, true) => print(
            json!({ "checkpoint": folder.display().to_string(), "whole": error.is_none(), "error": error }),
        ),
        (Ok(manifest), false) => {
            let bytes: u64 = manifest.files.iter().map(|file| file.bytes).sum();
            print(format_args!(
                "{}: whole ({} files, {bytes} bytes)",
                folder.display(),
                manifest.files.len()
            ));
        }
        (Err(error), false) => say(format_args!("error: {error}")),
    }
}
