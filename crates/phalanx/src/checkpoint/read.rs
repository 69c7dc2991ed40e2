//! Finding and reading checkpoints. What a file holds is believed after its checksums are found right, and no length from
//! outside is, before the file has it.

use super::error::CheckpointError;
use super::manifest::{self, FileEntry, Manifest};
use super::store::{folder, step_of};
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// A manifest of a checkpoint of ten terabytes is shorter.
const MAX_MANIFEST: u64 = 256 << 20;

/// The steps of the checkpoints in a folder, newest first. A folder that isn't there has none.
pub fn checkpoints(root: &Path) -> Result<Vec<u64>, CheckpointError> {
    let entries = match fs::read_dir(root) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(unreadable(root))?,
    };
    let mut steps = Vec::new();
    for entry in entries {
        let entry = entry.map_err(unreadable(root))?;
        if let Some(step) = step_of(&entry.file_name().to_string_lossy())
            && entry.path().join(manifest::FILE).exists()
        {
            steps.push(step);
        }
    }
    steps.sort_unstable_by(|a, b| b.cmp(a));
    Ok(steps)
}

impl Manifest {
    /// Where the manifest of the checkpoint after `step` is, in the folder `root` of a run's checkpoints.
    pub fn path(root: &Path, step: u64) -> PathBuf {
        folder(root, step).join(manifest::FILE)
    }

    /// Reads the manifest of the checkpoint in `folder`.
    pub fn read(folder: &Path) -> Result<Manifest, CheckpointError> {
        let path = folder.join(manifest::FILE);
        let mut text = Vec::new();
        let file = open(&path)?;
        file.take(MAX_MANIFEST).read_to_end(&mut text).map_err(unreadable(&path))?;
        Manifest::parse(&path, &text)
    }

    /// Reads every file of the checkpoint in `folder` and holds it against its checksums.
    pub fn verify(&self, folder: &Path) -> Result<(), CheckpointError> {
        self.files.iter().try_for_each(|file| file.check_chunks(folder, |_| ()))
    }
}

impl FileEntry {
    /// Hands every chunk on, in order, after its checksum was found right.
    pub(super) fn check_chunks(
        &self,
        folder: &Path,
        mut good: impl FnMut(&[u8]),
    ) -> Result<(), CheckpointError> {
        let path = folder.join(&self.name);
        let mut file = open(&path)?;
        let length = file.metadata().map_err(unreadable(&path))?.len();
        let broken = |reason: String| CheckpointError::Broken { path: path.clone(), reason };
        if length != self.bytes {
            return Err(broken(format!("it has {length} bytes and was written with {}", self.bytes)));
        }
        let mut chunk = Vec::new();
        for (i, &sum) in self.crc32.iter().enumerate() {
            let start = i as u64 * self.chunk;
            let bytes = self.chunk.min(self.bytes - start);
            chunk.clear();
            (&mut file).take(bytes).read_to_end(&mut chunk).map_err(unreadable(&path))?;
            if chunk.len() as u64 != bytes || crc32fast::hash(&chunk) != sum {
                let (of, end) = (self.crc32.len(), start + bytes);
                return Err(broken(format!(
                    "chunk {} of {of} (bytes {start} to {end}) isn't what was written",
                    i + 1
                )));
            }
            good(&chunk);
        }
        Ok(())
    }
}

/// A checkpoint that was found whole.
pub(super) struct Whole {
    pub(super) manifest: Manifest,
    pub(super) folder: PathBuf,
    /// Why newer ones weren't taken.
    pub(super) passed_over: Vec<CheckpointError>,
}

/// Whose checkpoints a run goes on from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Wanted {
    /// Nobody's.
    Nothing,
    /// Anybody's.
    Newest,
    /// Those of the run of this id alone.
    Of(String),
}

/// The newest checkpoint in `root` that is wanted and whole, every byte of which was read for that, of which `read` counts the chunks;
/// none if there are none at all.
pub(super) fn newest(
    root: &Path,
    wanted: &Wanted,
    read: &AtomicU64,
) -> Result<Option<Whole>, CheckpointError> {
    let mut passed_over = Vec::new();
    for step in if *wanted == Wanted::Nothing { Vec::new() } else { checkpoints(root)? } {
        let folder = folder(root, step);
        let whole = Manifest::read(&folder).and_then(|manifest| {
            if let Wanted::Of(id) = wanted
                && manifest.origin.run_id.as_ref() != Some(id)
            {
                return Ok(None);
            }
            let count = |_: &[u8]| {
                read.fetch_add(1, Relaxed);
            };
            manifest.files.iter().try_for_each(|file| file.check_chunks(&folder, count))?;
            Ok(Some(manifest))
        });
        match whole {
            Ok(Some(manifest)) => return Ok(Some(Whole { manifest, folder, passed_over })),
            Ok(None) => {}
            Err(error) if error.is_damage() => passed_over.push(error),
            Err(CheckpointError::Io { path, source, .. }) => {
                return Err(CheckpointError::Unreadable { path, source });
            }
            Err(error) => return Err(error),
        }
    }
    if passed_over.is_empty() {
        return Ok(None);
    }
    // Starting anew would be the silent loss of a run.
    let reasons = passed_over.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ");
    Err(CheckpointError::NoneLeft { path: root.to_owned(), reasons })
}

/// Opens a file for reading. A pipe of its name would have whoever opens it wait.
pub(super) fn open(path: &Path) -> Result<File, CheckpointError> {
    let found = fs::metadata(path).map_err(unreadable(path))?;
    if !found.is_file() {
        return Err(unreadable(path)(io::Error::other("it is no file, but a folder, a pipe or a device")));
    }
    File::open(path).map_err(unreadable(path))
}

pub(super) fn unreadable(path: &Path) -> impl FnOnce(io::Error) -> CheckpointError {
    let path = path.to_owned();
    move |source| CheckpointError::Io { path, action: "can't be read", source }
}
