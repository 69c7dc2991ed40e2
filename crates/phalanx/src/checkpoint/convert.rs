//! A checkpoint in another number of parts: as one file of each kind, or as several.

use super::arrays::{ArrayEntry, ArrayFile, Wholes, arrays_of};
use super::disk::{Disk, SystemDisk};
use super::error::CheckpointError;
use super::manifest::{CHUNK, FileEntry, Holds, Manifest};
use super::shares;
use super::store::{self, PartOf, Store};
use super::tensors::{self, Chunks};
use std::ops::Range;
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
        // What each rank keeps isn't shared out.
        let parts = if holds == Holds::Compression { 1 } else { parts };
        Sources::open(folder, &manifest, holds)?.map_or_else(|| Ok(Vec::new()), |it| it.rewrite(parts, &made))
    });
    let files = files.collect::<Result<Vec<_>, _>>().map(|files| files.concat());
    store.commit(&manifest.position, files, manifest.run, &manifest.origin)?;
    Ok(Converted { manifest: Manifest::read(&made)?, folder: made })
}

/// Writes what the checkpoint in `folder` holds of a kind into one file, which has its name once it is whole. No more than a MiB of it is in memory at a time.
pub(crate) fn save(folder: &Path, holds: Holds, path: &Path) -> Result<(), CheckpointError> {
    let manifest = Manifest::read(folder)?;
    let Some(mut sources) = Sources::open(folder, &manifest, holds)? else {
        let reason = format!("it holds no {}", store::file_name(holds, PartOf::WHOLE));
        return Err(CheckpointError::Broken { path: folder.to_owned(), reason });
    };
    // Others wrote most of it.
    sources.entries.iter().try_for_each(|entry| entry.check_chunks(folder, |_| ()))?;
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let partial = path.with_file_name(format!(".{name}.{}.partial", std::process::id()));
    let above = path.parent().filter(|above| !above.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let written = |source| CheckpointError::Io { path: path.to_owned(), action: WRITE, source };
    let copied = sources.copy(0..sources.arrays.len(), &partial);
    let named = copied.and_then(|_| SystemDisk.rename(&partial, path).map_err(written));
    if named.is_err() {
        // The first error is the one to tell.
        let _ = SystemDisk.remove_file(&partial);
    }
    named?;
    SystemDisk.sync_dir(above).map_err(written)
}

const WRITE: &str = "can't be written";

/// The files of a checkpoint that hold one kind of thing together, each of which is read once, from its beginning.
struct Sources<'a> {
    folder: &'a Path,
    entries: Vec<&'a FileEntry>,
    files: Vec<ArrayFile>,
    /// All arrays in order, each with its file.
    arrays: Vec<(usize, ArrayEntry)>,
}

impl<'a> Sources<'a> {
    /// None if the checkpoint has no such files.
    fn open(
        folder: &'a Path,
        manifest: &'a Manifest,
        holds: Holds,
    ) -> Result<Option<Sources<'a>>, CheckpointError> {
        let entries: Vec<&FileEntry> = manifest.files.iter().filter(|file| file.holds == holds).collect();
        let mut sources = Sources { folder, entries, files: Vec::new(), arrays: Vec::new() };
        for (number, entry) in sources.entries.iter().enumerate() {
            let mut file = ArrayFile::open(folder, entry)?;
            let own = arrays_of(&file.take_header(), entry, folder, Wholes::Refused)?;
            sources.arrays.extend(own.into_iter().map(|array| (number, array)));
            sources.files.push(file);
        }
        Ok((!sources.entries.is_empty()).then_some(sources))
    }

    /// Writes all arrays into this many files.
    fn rewrite(mut self, parts: usize, into: &Path) -> Result<Vec<FileEntry>, CheckpointError> {
        let sizes: Vec<u64> = self.arrays.iter().map(|(_, array)| array.bytes()).collect();
        let holds = self.entries[0].holds;
        let mut files = Vec::new();
        for (number, range) in shares::split(&sizes, parts).into_iter().enumerate() {
            let name = store::file_name(holds, PartOf { number, of: parts });
            let tensors::Sums { bytes, crc32 } = self.copy(range, &into.join(&name))?;
            files.push(FileEntry { name, holds, bytes, chunk: CHUNK as u64, crc32 });
        }
        Ok(files)
    }

    /// Copies the arrays that come next into a file.
    fn copy(&mut self, next: Range<usize>, path: &Path) -> Result<tensors::Sums, CheckpointError> {
        let Sources { folder, entries, files, arrays } = self;
        let written = |source| CheckpointError::Io { path: path.to_owned(), action: WRITE, source };
        let mut file = SystemDisk.create(path).map_err(written)?;
        let arrays = &arrays[next];
        let shapes = arrays.iter().map(|(_, array)| (array.name.as_str(), &array.shape));
        let header = tensors::header(shapes);
        let mut chunks = Chunks::begin(&mut *file, &header).map_err(written)?;
        let mut bytes = vec![0; CHUNK];
        for (source, array) in arrays {
            let mut left = array.bytes();
            while left > 0 {
                let now = left.min(bytes.len() as u64);
                let piece = &mut bytes[..now as usize];
                files[*source].read_bytes(folder, entries[*source], piece)?;
                chunks.put(piece).map_err(written)?;
                left -= now;
            }
        }
        chunks.finish().map_err(written)
    }
}
