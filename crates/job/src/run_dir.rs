//! Where a run keeps its files, and what it is called.

use crate::error::Error;
use phalanx_wire::{Generation, Rank};
use std::fs::{self, File, TryLockError};
use std::io::Read as _;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

/// The right to write what a run has only one of, given back when dropped, and by the system when its process dies.
///
/// A process that hangs keeps it. Others of the same run, which go on without that process, take it over: they put a lock of
/// their own in the place of its file. Whoever holds the right looks whether that is still its own before each event that it
/// writes down, and before it keeps what the run leaves.
#[derive(Debug)]
#[must_use = "it is given back when dropped"]
pub struct Claim {
    /// Locked; `None` where the file system has no locks.
    file: Option<File>,
    /// Where it is looked for; `None` where the file system doesn't tell files apart.
    path: Option<PathBuf>,
}

/// How often a lock is taken anew that was taken over meanwhile.
const TRIES: u32 = 10;

impl Claim {
    /// Locks this file, which is made if it isn't there; none where another process has it.
    pub fn take(path: &Path) -> std::io::Result<Option<Claim>> {
        // What it says of who has it stays.
        let mut options = File::options();
        options.write(true).create(true).truncate(false);
        let mut tries = 0..TRIES;
        loop {
            let file = options.open(path)?;
            match file.try_lock() {
                Ok(()) => {
                    let claim = Claim { file: Some(file), path: tries.next().map(|_| path.to_owned()) };
                    // It may have been taken over from one that died just now.
                    if claim.is_held() {
                        return Ok(Some(claim));
                    }
                }
                Err(TryLockError::WouldBlock) => return Ok(None),
                Err(TryLockError::Error(_)) => return Ok(Some(Claim { file: None, path: None })),
            }
        }
    }

    /// Writes down whose it is, so that others of that run may take it over, also on other machines. On a disk that is full they can't.
    fn sign(self, run: &str) -> Claim {
        if let Some(file) = &self.file {
            let written = file.set_len(0).and_then(|()| file.write_all_at(run.as_bytes(), 0));
            let _ = written.and_then(|()| file.sync_data());
        }
        self
    }

    /// Takes it from a process of this run that has it and may hang; none where another run has it, or one that didn't say whose
    /// it is.
    fn take_over(path: &Path, run: &str) -> std::io::Result<Option<Claim>> {
        let mut there = File::options().read(true).write(true).open(path)?;
        let mut name = String::new();
        there.read_to_string(&mut name)?;
        if run.is_empty() || name != run {
            return Ok(None);
        }
        if there.try_lock().is_ok() {
            // It has just ended.
            let claim = Claim { file: Some(there), path: Some(path.to_owned()) };
            return Ok(Some(claim.sign(run)).filter(Claim::is_held));
        }
        // Workers on several machines may have one number.
        let mark = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
        let own = path.with_extension(format!("{}-{mark}", std::process::id()));
        let file = File::create_new(&own)?;
        let put = file.try_lock().map_err(std::io::Error::from).and_then(|()| {
            let claim = Claim { file: Some(file), path: Some(path.to_owned()) }.sign(run);
            fs::rename(&own, path).map(|()| Some(claim))
        });
        put.inspect_err(|_| drop(fs::remove_file(&own)))
    }

    /// Whether nobody else has taken it over.
    pub fn is_held(&self) -> bool {
        let place = |found: fs::Metadata| (found.dev(), found.ino());
        let (Some(file), Some(path)) = (&self.file, &self.path) else { return true };
        // Opened, since a network's file system asks its server then, and may say otherwise what it knows from a minute ago.
        let there = || File::open(path).and_then(|file| file.metadata());
        // A folder that was moved or can't be looked at for now is no other's.
        file.metadata().is_ok_and(|own| there().map_or(true, |there| place(there) == place(own)))
    }
}

/// A run's folder: `spec.toml`, `events.jsonl`, `logs/<generation>/<rank>.{out,err}`, where workers hung `hang/<generation>/rank-<rank>.txt`,
/// and what the program saves.
#[derive(Clone, Debug)]
pub struct RunDir(PathBuf);

impl RunDir {
    /// The folder at this path, made if it isn't there.
    pub fn create(path: &Path) -> Result<RunDir, Error> {
        let failed = |source| Error::RunDir { path: path.to_owned(), source };
        // It is told to processes that may change their folder.
        let absolute = std::path::absolute(path).map_err(failed)?;
        fs::create_dir_all(&absolute).map_err(failed)?;
        Ok(RunDir(absolute))
    }

    /// Its path, which is absolute.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Makes sure that no other process writes events, checkpoints and weights here at the same time; `run` is the run's name.
    pub fn claim(&self, run: &str) -> Result<Claim, Error> {
        self.lock(&self.0.join(".lock"), Claim::take).map(|claim| claim.sign(run))
    }

    /// The same in the place of another process of this run, without which it goes on; that may hang, and finds out when it
    /// doesn't any more.
    pub fn take_over(&self, run: &str) -> Result<Claim, Error> {
        self.lock(&self.0.join(".lock"), |path| Claim::take_over(path, run))
    }

    /// The same for the logs, which are written by who starts the workers. A second one is to find out before it has cut the
    /// first one's.
    pub fn claim_logs(&self) -> Result<Claim, Error> {
        let path = self.0.join("logs");
        fs::create_dir_all(&path).map_err(|source| Error::RunDir { path: path.clone(), source })?;
        self.lock(&path.join(".lock"), Claim::take)
    }

    fn lock(
        &self,
        path: &Path,
        take: impl FnOnce(&Path) -> std::io::Result<Option<Claim>>,
    ) -> Result<Claim, Error> {
        let claim = take(path).map_err(|source| Error::RunDir { path: path.to_owned(), source })?;
        claim.ok_or_else(|| Error::Taken { path: self.0.clone() })
    }

    /// Where what happens is written down.
    pub fn events(&self) -> PathBuf {
        self.0.join("events.jsonl")
    }

    /// What is trained.
    pub fn spec(&self) -> PathBuf {
        self.0.join("spec.toml")
    }

    /// Writes down what is trained, as TOML. Whoever reads it at the same time sees the old text or the new one, whole.
    pub fn write_spec(&self, toml: &str) -> Result<(), Error> {
        let path = self.spec();
        let partial = self.0.join(format!("spec.toml.{}.partial", std::process::id()));
        let written = fs::write(&partial, toml).and_then(|()| fs::rename(&partial, &path));
        written.map_err(|source| {
            // It may not even be there; the error that is told is the first one.
            let _ = fs::remove_file(&partial);
            Error::RunDir { path, source }
        })
    }

    /// The folder of the logs of one generation, made if it isn't there.
    pub fn logs(&self, generation: Generation) -> Result<PathBuf, Error> {
        let path = self.0.join("logs").join(generation.to_string());
        fs::create_dir_all(&path).map_err(|source| Error::RunDir { path: path.clone(), source })?;
        Ok(path)
    }

    /// The log of one rank in the folder of its generation: `out` for its standard output, `err` for its standard error. What an
    /// earlier run in this folder has written there stays.
    pub fn create_log(&self, generation: Generation, rank: Rank, stream: &str) -> Result<File, Error> {
        let path = self.logs(generation)?.join(format!("{rank}.{stream}"));
        let opened = File::options().create(true).append(true).open(&path);
        opened.map_err(|source| Error::RunDir { path, source })
    }
}

/// A short name for a run, from 40 random bits: eight letters and digits that can't be mistaken for each other.
pub fn run_id(random: [u8; 5]) -> String {
    const DIGITS: &[u8; 32] = b"abcdefghjkmnpqrstuvwxyz023456789";
    let bits = random.iter().fold(0u64, |bits, &byte| bits << 8 | u64::from(byte));
    (0..8).map(|i| char::from(DIGITS[(bits >> (5 * i) & 31) as usize])).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;

    #[test]
    fn what_is_trained_is_written_whole_or_not_at_all() {
        let temporary = tempfile::tempdir().unwrap();
        let folder = temporary.path();
        let run_dir = RunDir::create(folder).unwrap();
        run_dir.write_spec("old = 1").unwrap();
        // A reader that came before keeps what it has opened: the file is replaced, not written over.
        let mut reader = File::open(folder.join("spec.toml")).unwrap();
        run_dir.write_spec("new = 1").unwrap();
        let mut seen = String::new();
        reader.read_to_string(&mut seen).unwrap();
        assert_eq!(seen, "old = 1");
        assert_eq!(fs::read_to_string(folder.join("spec.toml")).unwrap(), "new = 1");
        assert_eq!(fs::read_dir(folder).unwrap().count(), 1);
    }

    #[test]
    fn a_folder_is_one_runs_until_it_lets_go() {
        let temporary = tempfile::tempdir().unwrap();
        let run_dir = RunDir::create(temporary.path()).unwrap();
        for claim in [|run_dir: &RunDir| run_dir.claim("a"), RunDir::claim_logs] {
            let held = claim(&run_dir).unwrap();
            let message = claim(&RunDir::create(temporary.path()).unwrap()).unwrap_err().to_string();
            for part in [temporary.path().to_str().unwrap(), "another run", "--out"] {
                assert!(message.contains(part), "{part} in: {message}");
            }
            drop(held);
        }
        // Who writes the logs starts who writes the rest.
        let _both = [run_dir.claim_logs().unwrap(), run_dir.claim("a").unwrap()];
    }

    #[test]
    fn a_folder_is_taken_over_within_its_run() {
        let temporary = tempfile::tempdir().unwrap();
        let run_dir = RunDir::create(temporary.path()).unwrap();
        let is_taken = |claim| matches!(claim, Err(Error::Taken { .. }));
        let hangs = run_dir.claim("a").unwrap();
        assert!(hangs.is_held() && is_taken(run_dir.take_over("b")) && is_taken(run_dir.take_over("")));
        let next = run_dir.take_over("a").unwrap();
        assert!(next.is_held() && !hangs.is_held() && is_taken(run_dir.claim("a")));
        // Nothing but the folder's lock is left of it, and its end is the end of the right.
        assert_eq!(fs::read_dir(temporary.path()).unwrap().count(), 1);
        drop(hangs);
        assert!(next.is_held() && is_taken(run_dir.claim("c")));
        drop(next);
        let other = run_dir.claim("c").unwrap();
        assert!(other.is_held() && is_taken(run_dir.take_over("a")));
    }

    #[test]
    fn run_ids_tell_runs_apart() {
        assert_ne!(run_id([0, 0, 0, 0, 1]), run_id([0, 0, 0, 1, 0]));
        assert!(run_id([255; 5]).chars().all(|c| c.is_ascii_alphanumeric()));
    }
}
