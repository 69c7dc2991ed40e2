//! What the pool must not forget, in a file: an entry a line, written and synced before anybody is told of it.
//!
//! A line that was cut off by a crash is what nobody was told of, and is dropped; one that can't be read anywhere else is an
//! error. When a pool begins, the file is written anew without what is over for long.

use crate::job::{End, JobId, JobSpec};
use phalanx_job::Claim;
use serde::{Deserialize, Serialize};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use thiserror::Error;

/// Something that has happened.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Entry {
    /// When, in milliseconds since 1970.
    pub(crate) at_ms: u64,
    pub(crate) job: JobId,
    #[serde(flatten)]
    pub(crate) what: What,
}

/// What.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "what", rename_all = "snake_case")]
pub(crate) enum What {
    /// A job has come.
    Submitted { spec: Box<JobSpec> },
    /// It begins, for the so-manieth time.
    Began { attempt: u32 },
    /// It has stopped, and is to begin again; nodes were lost under it so often.
    Waits { losses: u32 },
    /// It is to end.
    Canceled,
    /// It has ended.
    Ended { how: End },
}

/// Why there is no journal.
#[derive(Debug, Error)]
pub enum JournalError {
    /// The system refused.
    #[error("the pool's journal {path}: {source}", path = path.display())]
    Io {
        /// Which file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// Another pool writes it.
    #[error("the pool's journal {path} is written by another pool\nhint: give this one a folder of its own: --dir DIR", path = path.display())]
    Taken {
        /// Which file.
        path: PathBuf,
    },
    /// A line makes no sense.
    #[error("the pool's journal {path}, line {line}: {reason}\nhint: take the line out, or move the file away to begin with no jobs", path = path.display())]
    Unreadable {
        /// Which file.
        path: PathBuf,
        /// Which line, from 1 on.
        line: usize,
        /// What is wrong with it.
        reason: String,
    },
}

/// The file.
pub(crate) struct Journal {
    path: PathBuf,
    file: File,
    _claim: Claim,
}

impl Journal {
    /// Opens the journal of a folder, which is made if it isn't there; gives what it holds, which is only ever as much as `keeps` leaves
    /// of it.
    pub(crate) fn open(
        folder: &Path,
        keeps: impl FnOnce(Vec<Entry>) -> Vec<Entry>,
    ) -> Result<(Journal, Vec<Entry>), JournalError> {
        let path = folder.join("journal.jsonl");
        let failed = |source| JournalError::Io { path: path.clone(), source };
        fs::create_dir_all(folder).map_err(failed)?;
        // Where a file system has no locks, a pool is kept from a second one by its address alone.
        let claim = Claim::take(&folder.join(".lock")).map_err(failed)?;
        let Some(claim) = claim else { return Err(JournalError::Taken { path }) };
        let text = match fs::read(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
            Err(error) => return Err(failed(error)),
        };
        let entries = keeps(parse(&text).map_err(|(line, reason)| JournalError::Unreadable {
            path: path.clone(),
            line,
            reason,
        })?);
        let partial = folder.join("journal.jsonl.partial");
        let file = write_anew(&partial, &entries)
            .and_then(|file| fs::rename(&partial, &path).map(|()| file))
            .map_err(failed)?;
        File::open(folder).and_then(|folder| folder.sync_all()).map_err(failed)?;
        Ok((Journal { path, file, _claim: claim }, entries))
    }

    /// Writes these, to stay.
    pub(crate) fn write(&mut self, entries: &[Entry]) -> Result<(), JournalError> {
        let failed = |source| JournalError::Io { path: self.path.clone(), source };
        self.file.write_all(&lines(entries)).and_then(|()| self.file.sync_data()).map_err(failed)
    }
}

/// What jobs are may be nobody else's affair.
fn write_anew(path: &Path, entries: &[Entry]) -> io::Result<File> {
    let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(path)?;
    file.write_all(&lines(entries))?;
    file.sync_all()?;
    Ok(file)
}

fn lines(entries: &[Entry]) -> Vec<u8> {
    entries.iter().fold(Vec::new(), |mut lines, entry| {
        serde_json::to_writer(&mut lines, entry).expect("an entry is always JSON");
        lines.push(b'\n');
        lines
    })
}

/// The entries of a file, or the line that is none.
fn parse(text: &[u8]) -> Result<Vec<Entry>, (usize, String)> {
    let whole = text.iter().rposition(|byte| *byte == b'\n').map_or(0, |last| last + 1);
    let lines = text[..whole].split(|byte| *byte == b'\n').enumerate().filter(|(_, line)| !line.is_empty());
    lines.map(|(n, line)| serde_json::from_slice(line).map_err(|error| (n + 1, error.to_string()))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(job: u64, what: What) -> Entry {
        Entry { at_ms: 7, job: JobId(job), what }
    }

    #[test]
    fn what_was_written_is_there_whatever_the_end_was() {
        let folder = tempfile::tempdir().unwrap();
        let written = [entry(1, What::Began { attempt: 1 }), entry(1, What::Ended { how: End::Canceled })];
        let (mut journal, before) = Journal::open(folder.path(), |all| all).unwrap();
        assert_eq!(before, []);
        assert!(matches!(Journal::open(folder.path(), |all| all), Err(JournalError::Taken { .. })));
        journal.write(&written[..1]).unwrap();
        journal.write(&written[1..]).unwrap();
        drop(journal);
        let path = folder.path().join("journal.jsonl");
        let text = fs::read(&path).unwrap();
        // Cut at each byte: the lines that are whole, and nothing else.
        let first = text.iter().position(|byte| *byte == b'\n').unwrap() + 1;
        for len in 0..=text.len() {
            fs::write(&path, &text[..len]).unwrap();
            let (_, found) = Journal::open(folder.path(), |all| all).unwrap();
            let whole = if len < first {
                0
            } else if len < text.len() {
                1
            } else {
                2
            };
            assert_eq!(found, written[..whole], "cut to {len}");
        }
        fs::write(&path, &text).unwrap();
        drop(Journal::open(folder.path(), |all| all.into_iter().skip(1).collect()).unwrap());
        assert_eq!(fs::read(&path).unwrap(), text[first..]);
    }

    #[test]
    fn a_line_that_makes_no_sense_is_named() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("journal.jsonl"), "{\"at_ms\":1,\"job\":1,\"what\":\"canceled\"}\n{}\n")
            .unwrap();
        let why = Journal::open(folder.path(), |all| all).map(drop).unwrap_err().to_string();
        assert!(why.contains("line 2: missing field"), "{why}");
    }

    proptest::proptest! {
        #[test]
        fn garbage_is_entries_or_an_error(bytes in proptest::collection::vec(0u8.., 0..300)) {
            let _ = parse(&bytes);
        }
    }
}
