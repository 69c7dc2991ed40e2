//! What the writer of checkpoints asks of a file system: few enough requests that a test can stand in for it and end the
//! process, or the machine, at each of them. It does not decide what is written where.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;

/// A file system.
pub(super) trait Disk: Send {
    /// Makes a folder and those above it; one that is there already is fine.
    fn create_dir(&self, path: &Path) -> io::Result<()>;
    /// Makes an empty file, in place of one that may be there.
    fn create(&self, path: &Path) -> io::Result<Box<dyn DiskFile>>;
    /// Gives a file or folder another name in the same folder, in one step.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;
    /// Removes a file.
    fn remove_file(&self, path: &Path) -> io::Result<()>;
    /// Removes an empty folder.
    fn remove_dir(&self, path: &Path) -> io::Result<()>;
    /// Returns when what was made, renamed and removed in a folder would outlive the machine.
    fn sync_dir(&self, path: &Path) -> io::Result<()>;
    /// The names in a folder; none if it isn't there.
    fn list(&self, path: &Path) -> io::Result<Vec<String>>;
}

/// A file that is being written.
pub(super) trait DiskFile {
    /// Appends all of `bytes`.
    fn write(&mut self, bytes: &[u8]) -> io::Result<()>;
    /// Returns when the content would outlive the machine.
    fn sync(&mut self) -> io::Result<()>;
}

/// The file system of this machine.
pub(super) struct SystemDisk;

impl Disk for SystemDisk {
    fn create_dir(&self, path: &Path) -> io::Result<()> {
        fs::create_dir_all(path)
    }

    fn create(&self, path: &Path) -> io::Result<Box<dyn DiskFile>> {
        Ok(Box::new(File::create(path)?))
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs::rename(from, to)
    }

    fn remove_file(&self, path: &Path) -> io::Result<()> {
        fs::remove_file(path)
    }

    fn remove_dir(&self, path: &Path) -> io::Result<()> {
        fs::remove_dir(path)
    }

    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        File::open(path)?.sync_all()
    }

    fn list(&self, path: &Path) -> io::Result<Vec<String>> {
        let entries = match fs::read_dir(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries?,
        };
        entries.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned())).collect()
    }
}

impl DiskFile for File {
    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.write_all(bytes)
    }

    fn sync(&mut self) -> io::Result<()> {
        self.sync_all()
    }
}
