//! A run's folder of checkpoints, as its writer keeps it:
//!
//! ```text
//! checkpoints/step-1200/model.safetensors
//! checkpoints/step-1200/optimizer.safetensors
//! checkpoints/step-1200/manifest.json
//! ```
//!
//! Where ranks write a checkpoint together, each has files of its own, such as `model-00001-of-00004.safetensors`, with some of the
//! arrays; the first rank writes the manifest once all others have said that theirs are on the disk.
//!
//! Invariants, which hold at every moment, so that the process or the machine may end at any:
//! - **C-COMMIT**: a folder that holds a manifest under its name is a whole checkpoint. The manifest gets its name last, when
//!   everything that it names is on the disk, and loses it first when a checkpoint is removed.
//! - **C-LAST**: the last checkpoint is removed only after a newer one is committed.
//! - **C-WRITER**: whoever writes has put an empty file there whose name says since when, as `.writer.1764496807123456789-4711`, and looks whether
//!   there is a later one before each file that it makes, before it commits, and before it removes anything. So a process that stood still
//!   while others went on with the run, which have put theirs there, finds that out, and leaves alone what is theirs now. Names are never
//!   written over, so whenever it wakes its own changes nothing for them.

use super::disk::Disk;
use super::error::CheckpointError;
use super::manifest::{self, CHUNK, FileEntry, Holds, Manifest, Origin, RunFacts};
use super::position::Position;
use super::snapshot::{Contents, Snapshot};
use super::tensors;
use std::cmp::Reverse;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

/// What a manifest is called before it gets its name.
const UNNAMED: &str = "manifest.json.partial";

/// The writer's view of a folder of checkpoints.
pub(super) struct Store {
    disk: Box<dyn Disk>,
    root: PathBuf,
    /// How many checkpoints stay.
    keep: usize,
    /// Whose writes these are (C-WRITER); nobody's in a folder that nobody else writes to.
    name: Option<WriterName>,
}

/// The name of a writer.
struct WriterName {
    /// What those of the same part begin with.
    start: String,
    /// Since when it writes: nanoseconds since 1970, or just more than all that were there.
    since: u128,
}

impl WriterName {
    fn file(&self) -> String {
        format!("{}{}-{}", self.start, self.since, std::process::id())
    }

    /// Since when the writer of this name writes, if it is one of the same part.
    fn since(&self, name: &str) -> Option<u128> {
        name.strip_prefix(&self.start)?.split_once('-')?.0.parse().ok()
    }
}

/// Which part of a checkpoint that several write together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PartOf {
    /// From 0.
    pub(super) number: usize,
    pub(super) of: usize,
}

impl PartOf {
    /// All of it.
    pub(super) const WHOLE: PartOf = PartOf { number: 0, of: 1 };
}

/// The name of the file that holds this: what a finished run calls it, and a number where it is one of several, as files of
/// weights have it that are too large for one.
pub(super) fn file_name(holds: Holds, part: PartOf) -> String {
    let name = match holds {
        Holds::Model => "model",
        Holds::Optimizer => "optimizer",
        Holds::Average => "model_ema",
        Holds::Compression => "compression",
    };
    match part {
        PartOf::WHOLE => format!("{name}.safetensors"),
        PartOf { number, of } => format!("{name}-{:05}-of-{of:05}.safetensors", number + 1),
    }
}

/// The folder of the checkpoint after this step.
pub(super) fn folder(root: &Path, step: u64) -> PathBuf {
    root.join(format!("step-{step}"))
}

/// The step whose checkpoint a folder with this name holds.
pub(super) fn step_of(name: &str) -> Option<u64> {
    let digits = name.strip_prefix("step-")?;
    let step = digits.parse().ok()?;
    // One name a step: none with a sign or leading zeros.
    (format!("step-{step}") == name).then_some(step)
}

impl Store {
    pub(super) fn new(disk: Box<dyn Disk>, root: PathBuf, keep: usize) -> Store {
        Store { disk, root, keep: keep.max(1), name: None }
    }

    /// The same for who writes this part of a run's checkpoints, in the place of whoever has until now (C-WRITER).
    pub(super) fn of_part(self, number: usize) -> Store {
        let start = if number == 0 { ".writer.".to_owned() } else { format!(".writer-{:05}.", number + 1) };
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
        let name = WriterName { start, since: now };
        // Clocks differ. What can't be listed now is looked at again before anything is written.
        let latest =
            self.names(&self.root).unwrap_or_default().iter().filter_map(|other| name.since(other)).max();
        let since = latest.map_or(now, |latest| now.max(latest.saturating_add(1)));
        Store { name: Some(WriterName { since, ..name }), ..self }
    }

    /// Puts the writer's name there, if it isn't. An error if another has taken its place (C-WRITER).
    pub(super) fn enter(&self) -> Result<(), CheckpointError> {
        let Some(name) = &self.name else { return Ok(()) };
        let before = self.check()?;
        let own = name.file();
        if before.contains(&own) {
            return Ok(());
        }
        let path = self.root.join(own);
        done(&self.root, WRITE, self.disk.create_dir(&self.root))?;
        done(&path, WRITE, self.disk.create(&path))?;
        // Those of earlier ones are of no more use, and in nobody's way.
        before.iter().for_each(|name| drop(self.disk.remove_file(&self.root.join(name))));
        Ok(())
    }

    /// The names of this part's writers that are there, its own among them. An error if another has taken its place.
    fn check(&self) -> Result<Vec<String>, CheckpointError> {
        let Some(own) = &self.name else { return Ok(Vec::new()) };
        let mut names = self.names(&self.root)?;
        names.retain(|name| own.since(name).is_some());
        if names.iter().filter_map(|name| own.since(name)).any(|since| since > own.since) {
            return Err(CheckpointError::TakenOver { path: self.root.clone() });
        }
        Ok(names)
    }

    /// Writes a checkpoint and commits it (C-COMMIT). After an error the folder holds the checkpoints that it held before,
    /// but for a broken one of the same step.
    pub(super) fn write(
        &self,
        snapshot: &Snapshot,
        contents: &Contents,
        run: RunFacts,
        origin: &Origin,
    ) -> Result<PathBuf, CheckpointError> {
        self.enter()?;
        let folder = folder(&self.root, snapshot.position.step);
        // What a killed writer left. Or a whole one of this step: the run has passed it over as broken, and was here before.
        self.remove(&folder)?;
        let files = self.write_files(&folder, snapshot, contents, PartOf::WHOLE);
        self.conclude(folder, files, &snapshot.position, run, origin)
    }

    /// Writes one of the parts of a checkpoint, which is none before [`Store::commit`].
    pub(super) fn write_part(
        &self,
        snapshot: &Snapshot,
        contents: &Contents,
        part: PartOf,
    ) -> Result<Vec<FileEntry>, CheckpointError> {
        self.enter()?;
        let folder = folder(&self.root, snapshot.position.step);
        let named = folder.join(manifest::FILE);
        if part.number == 0 && self.names(&folder)?.iter().any(|name| name == manifest::FILE) {
            // Of one that the run has passed over as broken (C-COMMIT).
            done(&named, REMOVE, self.disk.remove_file(&named))?;
        }
        self.write_files(&folder, snapshot, contents, part)
    }

    /// Makes a checkpoint of the parts that were written of it, or removes them if one couldn't be.
    pub(super) fn commit(
        &self,
        position: &Position,
        files: Result<Vec<FileEntry>, CheckpointError>,
        run: RunFacts,
        origin: &Origin,
    ) -> Result<PathBuf, CheckpointError> {
        self.enter()?;
        let folder = folder(&self.root, position.step);
        let files = files.and_then(|files| self.check_there(&folder, &files).map(|()| files));
        self.conclude(folder, files, position, run, origin)
    }

    /// That files which others have written are here, and nothing else is.
    fn check_there(&self, folder: &Path, files: &[FileEntry]) -> Result<(), CheckpointError> {
        let names = self.names(folder)?;
        if let Some(file) = files.iter().find(|file| !names.contains(&file.name)) {
            return Err(CheckpointError::Apart { path: folder.join(&file.name) });
        }
        let is_other = |name: &&String| !files.iter().any(|file| file.name == **name);
        names
            .iter()
            .filter(is_other)
            .map(|name| folder.join(name))
            .try_for_each(|path| done(&path, REMOVE, self.disk.remove_file(&path)))
    }

    /// Commits what was written, or removes it.
    fn conclude(
        &self,
        folder: PathBuf,
        files: Result<Vec<FileEntry>, CheckpointError>,
        position: &Position,
        run: RunFacts,
        origin: &Origin,
    ) -> Result<PathBuf, CheckpointError> {
        let committed = files.and_then(|files| self.commit_files(&folder, files, position, run, origin));
        if committed.is_err() && self.check().is_ok() {
            // The first error is the one to tell; what is left has no manifest, and the next start removes it.
            let _ = self.remove(&folder);
        }
        committed.map(|()| folder)
    }

    /// Makes the folder of a checkpoint.
    pub(super) fn begin(&self, folder: &Path) -> Result<(), CheckpointError> {
        let disk = &*self.disk;
        let above = self.above();
        done(&self.root, WRITE, disk.create_dir(&self.root))?;
        done(above, WRITE, disk.sync_dir(above))?;
        done(folder, WRITE, disk.create_dir(folder))?;
        done(&self.root, WRITE, disk.sync_dir(&self.root))
    }

    /// The folder that the root is in.
    fn above(&self) -> &Path {
        self.root.parent().filter(|above| !above.as_os_str().is_empty()).unwrap_or(Path::new("."))
    }

    fn write_files(
        &self,
        folder: &Path,
        snapshot: &Snapshot,
        contents: &Contents,
        part: PartOf,
    ) -> Result<Vec<FileEntry>, CheckpointError> {
        let disk = &*self.disk;
        self.begin(folder)?;
        let mut files = Vec::new();
        for (holds, arrays) in snapshot.files(contents) {
            let name = file_name(holds, part);
            let path = folder.join(&name);
            self.check()?;
            let sums = disk.create(&path).and_then(|mut file| tensors::write(&mut *file, &arrays));
            let tensors::Sums { bytes, crc32 } = done(&path, WRITE, sums)?;
            files.push(FileEntry { name, holds, bytes, chunk: CHUNK as u64, crc32 });
        }
        Ok(files)
    }

    fn commit_files(
        &self,
        folder: &Path,
        files: Vec<FileEntry>,
        position: &Position,
        run: RunFacts,
        origin: &Origin,
    ) -> Result<(), CheckpointError> {
        let disk = &*self.disk;
        let (version, position, origin) =
            (manifest::version_of(&files, &run), position.clone(), origin.clone());
        self.check()?;
        let manifest = Manifest { version, position, run, origin, files };
        let (unnamed, named) = (folder.join(UNNAMED), folder.join(manifest::FILE));
        let written = disk.create(&unnamed).and_then(|mut file| {
            file.write(manifest.to_text().as_bytes())?;
            file.sync()
        });
        done(&named, WRITE, written)?;
        // The names of all files, before that of the manifest.
        done(folder, WRITE, disk.sync_dir(folder))?;
        self.check()?;
        done(&named, WRITE, disk.rename(&unnamed, &named))?;
        done(folder, WRITE, disk.sync_dir(folder))
    }

    /// Removes what is no longer wanted once a checkpoint of step `newest` is committed (C-LAST): all but the newest ones
    /// up to it, and those of later steps, which the run has passed over as broken and will write again.
    pub(super) fn prune(&self, newest: u64) -> Result<(), CheckpointError> {
        let (mut committed, left) = self.steps()?;
        committed.sort_by_key(|&step| Reverse(step));
        let (steps, later): (Vec<u64>, Vec<u64>) = committed.into_iter().partition(|&step| step <= newest);
        let unwanted = later.into_iter().chain(steps.into_iter().skip(self.keep));
        self.remove_all(unwanted.chain(left))
    }

    /// Removes what a writer left that was killed, or that the disk failed.
    pub(super) fn clean(&self) -> Result<(), CheckpointError> {
        let (_, left) = self.steps()?;
        self.remove_all(left)
    }

    /// Removes the checkpoints of these steps, or what there is of them; nothing if another has taken this one's place since they were
    /// looked for.
    fn remove_all(&self, steps: impl IntoIterator<Item = u64>) -> Result<(), CheckpointError> {
        self.check()?;
        steps.into_iter().try_for_each(|step| self.remove(&folder(&self.root, step)))
    }

    /// The steps of which there is a checkpoint, and those of which there is something that is none.
    fn steps(&self) -> Result<(Vec<u64>, Vec<u64>), CheckpointError> {
        let (mut committed, mut left) = (Vec::new(), Vec::new());
        for step in self.names(&self.root)?.iter().filter_map(|name| step_of(name)) {
            let is_whole = self.names(&folder(&self.root, step))?.iter().any(|name| name == manifest::FILE);
            if is_whole { committed.push(step) } else { left.push(step) }
        }
        Ok((committed, left))
    }

    /// Gives the folder another name, if it holds checkpoints: they are of another run than the one that begins. Says which.
    pub(super) fn set_aside(&self) -> Result<Option<PathBuf>, CheckpointError> {
        if self.steps()?.0.is_empty() {
            return Ok(None);
        }
        let Some(name) = self.root.file_name() else {
            return Err(CheckpointError::Taken { path: self.root.clone() });
        };
        let (parent, name) = (self.above(), name.to_string_lossy());
        let taken = self.names(parent)?;
        let mut free = (1..).map(|i| format!("{name}.{i}")).filter(|name| !taken.contains(name));
        let aside = parent.join(free.next().expect("numbers don't end"));
        done(&self.root, "can't be set aside", self.disk.rename(&self.root, &aside))?;
        done(parent, "can't be set aside", self.disk.sync_dir(parent))?;
        Ok(Some(aside))
    }

    fn names(&self, folder: &Path) -> Result<Vec<String>, CheckpointError> {
        done(folder, "can't be listed", self.disk.list(folder))
    }

    /// Removes a checkpoint, its manifest first (C-COMMIT), or what there is of one.
    fn remove(&self, folder: &Path) -> Result<(), CheckpointError> {
        let names = self.names(folder)?;
        if names.iter().any(|name| name == manifest::FILE) {
            let named = folder.join(manifest::FILE);
            done(&named, REMOVE, self.disk.remove_file(&named))?;
            done(folder, REMOVE, self.disk.sync_dir(folder))?;
        }
        let gone = |removed: io::Result<()>| match removed {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            removed => removed,
        };
        for path in names.iter().filter(|name| *name != manifest::FILE).map(|name| folder.join(name)) {
            done(&path, REMOVE, gone(self.disk.remove_file(&path)))?;
        }
        done(folder, REMOVE, gone(self.disk.remove_dir(folder)))
    }
}

const WRITE: &str = "can't be written";
const REMOVE: &str = "can't be removed";

fn done<T>(path: &Path, action: &'static str, result: io::Result<T>) -> Result<T, CheckpointError> {
    result.map_err(|source| CheckpointError::Io { path: path.to_owned(), action, source })
}
