//! A checkpoint in another number of parts: as one file of each kind, or as several.

use super::arrays::{ArrayEntry, ArrayFile, arrays_of};
use super::disk::{Disk, SystemDisk};
use super::error::CheckpointError;
use super::manifest::{CHUNK, FileEntry, Holds, Manifest};
use super::shares;
use super::store::{self, PartOf, Store};
use super::tensors::{self, Chunks};
use std::path::{Path, PathBuf};

/// What [`convert`] has made.
#[derive(Clone, Debug, PartialEq)]
pub struct Converted {
    /// The checkpoint.
    pub folder: PathBuf,
    /// What it holds.
    pub manifest: Manifest,
}

/// Writes the checkpoint in `folder` into `root` once more, in this many parts: with 1 the model is one file of weights. Bytes of
/// arrays are copied as they are, a MiB at a time, so it may be larger than memory. A checkpoint of the same step that is there
/// already is an error.
pub fn convert(folder: &Path, parts: usize, root: &Path) -> Result<Converted, CheckpointError> {
    let manifest = Manifest::read(folder)?;
    manifest.verify(folder)?;
    let step = manifest.position.step;
    let made = store::folder(root, step);
    if made.exists() {
        return Err(CheckpointError::Taken { path: made });
    }
    let store = Store::new(Box::new(SystemDisk), root.to_owned(), usize::MAX);
    store.begin(&made)?;
    let files = [Holds::Model, Holds::Optimizer, Holds::Average, Holds::Compression];
    let files = files.into_iter().map(|holds| {
        let sources: Vec<&FileEntry> = manifest.files.iter().filter(|file| file.holds == holds).collect();
        // What each rank keeps isn't shared out.
        let parts = if holds == Holds::Compression { 1 } else { parts };
        if sources.is_empty() { Ok(Vec::new()) } else { rewrite(folder, &sources, parts, &made) }
    });
    let files = files.collect::<Result<Vec<_>, _>>().map(|files| files.concat());
    store.commit(manifest.position, files, manifest.run, manifest.recipe.as_deref())?;
    Ok(Converted { manifest: Manifest::read(&made)?, folder: made })
}

/// Writes the arrays of these files into others.
fn rewrite(
    folder: &Path,
    sources: &[&FileEntry],
    parts: usize,
    into: &Path,
) -> Result<Vec<FileEntry>, CheckpointError> {
    let (mut open, mut arrays) = (Vec::new(), Vec::new());
    for (number, entry) in sources.iter().enumerate() {
        let mut file = ArrayFile::open(folder, entry)?;
        let own = arrays_of(&file.take_header(), entry, folder)?;
        arrays.extend(own.into_iter().map(|array| (number, array)));
        open.push(file);
    }
    let sizes: Vec<u64> = arrays.iter().map(|(_, array)| array.bytes()).collect();
    let mut files = Vec::new();
    let mut bytes = vec![0; CHUNK];
    for (number, range) in shares::split(&sizes, parts).into_iter().enumerate() {
        let name = store::file_name(sources[0].holds, PartOf { number, of: parts });
        let path = into.join(&name);
        let written = |source| CheckpointError::Io { path: path.clone(), action: "can't be written", source };
        let mut file = SystemDisk.create(&path).map_err(written)?;
        let arrays: &[(usize, ArrayEntry)] = &arrays[range];
        let shapes = arrays.iter().map(|(_, array)| (array.name.as_str(), &array.shape));
        let mut chunks = Chunks::begin(&mut *file, &tensors::header(shapes)).map_err(written)?;
        for (source, array) in arrays {
            let mut left = array.bytes();
            while left > 0 {
                let now = left.min(bytes.len() as u64);
                let piece = &mut bytes[..now as usize];
                open[*source].read_bytes(folder, sources[*source], piece)?;
                chunks.put(piece).map_err(written)?;
                left -= now;
            }
        }
        let tensors::Sums { bytes, crc32 } = chunks.finish().map_err(written)?;
        files.push(FileEntry { name, holds: sources[0].holds, bytes, chunk: CHUNK as u64, crc32 });
    }
    Ok(files)
}
