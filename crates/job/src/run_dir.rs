//! Where a run keeps its files, and what it is called.

use crate::error::Error;
use phalanx_wire::{Generation, Rank};
use std::fs::{self, File, TryLockError};
use std::path::{Path, PathBuf};

/// The right to write what a run has only one of, given back when dropped.
#[derive(Debug)]
#[must_use = "it is given back when dropped"]
pub struct Claim {
    /// Locked; `None` where the file system has no locks.
    _file: Option<File>,
}

impl Claim {
    /// Locks this file, which is made if it isn't there; none where another process has it.
    pub fn take(path: &Path) -> std::io::Result<Option<Claim>> {
        let file = File::create(path)?;
        match file.try_lock() {
            Ok(()) => Ok(Some(Claim { _file: Some(file) })),
            Err(TryLockError::WouldBlock) => Ok(None),
            Err(TryLockError::Error(_)) => Ok(Some(Claim { _file: None })),
        }
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

    /// Makes sure that no other process writes events, checkpoints and weights here at the same time. The system takes the
    /// right back from a process that dies.
    pub fn claim(&self) -> Result<Claim, Error> {
        self.lock(self.0.join(".lock"))
    }

    /// The same for the logs, which are written by who starts the workers. A second one is to find out before it has cut the
    /// first one's.
    pub fn claim_logs(&self) -> Result<Claim, Error> {
        let path = self.0.join("logs");
        fs::create_dir_all(&path).map_err(|source| Error::RunDir { path: path.clone(), source })?;
        self.lock(path.join(".lock"))
    }

    fn lock(&self, path: PathBuf) -> Result<Claim, Error> {
        let claim = Claim::take(&path).map_err(|source| Error::RunDir { path, source })?;
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
        for claim in [RunDir::claim, RunDir::claim_logs] {
            let held = claim(&run_dir).unwrap();
            let message = claim(&RunDir::create(temporary.path()).unwrap()).unwrap_err().to_string();
            for part in [temporary.path().to_str().unwrap(), "another run", "--out"] {
                assert!(message.contains(part), "{part} in: {message}");
            }
            drop(held);
        }
        // Who writes the logs starts who writes the rest.
        let _both = [run_dir.claim_logs().unwrap(), run_dir.claim().unwrap()];
    }

    #[test]
    fn run_ids_tell_runs_apart() {
        assert_ne!(run_id([0, 0, 0, 0, 1]), run_id([0, 0, 0, 1, 0]));
        assert!(run_id([255; 5]).chars().all(|c| c.is_ascii_alphanumeric()));
    }
}
