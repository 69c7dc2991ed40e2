//! Files for TensorBoard: an `events.out.tfevents` for each run, in a folder of its name.
//!
//! Such a file is a row of records: 8 bytes of length, their checksum, the bytes, their checksum; each checksum is a CRC-32C, turned and
//! shifted (TensorFlow's `core/lib/io/record_writer.h`). A record is an `Event` of `core/util/event.proto`, of which some fields are
//! written here; protocol buffers of so few need no compiler.

use super::run::{Epoch, Run, Step};
use super::runs::Runs;
use anyhow::{Context, Result};
use std::collections::HashMap;
use std::fs::{self, OpenOptions};
use std::io::{Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

/// The files of all runs.
pub(super) struct Boards {
    folder: PathBuf,
    written: HashMap<String, Board>,
}

/// That of one, as far as it is written.
struct Board {
    path: PathBuf,
    /// So many of its bytes are whole records.
    length: u64,
    /// The last step and the number of epochs, and of which beginning of the run.
    step: Option<u64>,
    epochs: usize,
    beginnings: u64,
    /// When the run began, in seconds since 1970, as nearly as can be told: runs say how long things took, and not when they were.
    start: f64,
}

impl Boards {
    pub(super) fn open(folder: PathBuf) -> Result<Boards> {
        fs::create_dir_all(&folder).with_context(|| format!("--tensorboard {}", folder.display()))?;
        Ok(Boards { folder, written: HashMap::new() })
    }

    /// Writes what is new of each run. One that can't be written keeps no other from it; the first error is given.
    pub(super) fn write(&mut self, runs: &Runs) -> Result<()> {
        let mut all = Ok(());
        for run in runs.all() {
            let folder = self.folder.join(&run.name);
            let written = self.write_one(run, &folder);
            all = all.and(written.with_context(|| format!("{} can't be written", folder.display())));
        }
        all
    }

    fn write_one(&mut self, run: &Run, folder: &Path) -> Result<()> {
        let board = self.written.get(&run.name);
        if board.is_none_or(|board| board.beginnings != run.beginnings || !board.path.exists()) {
            self.written.insert(run.name.clone(), Board::create(folder, run)?);
        }
        let board = self.written.get_mut(&run.name).expect("it was made just now");
        board.write(run)
    }
}

/// What the names of our files begin and end with. TensorBoard takes a file for one of its own by the word in the midst, and reads files in
/// the order of their names, which have the time between.
const BEGIN: &str = "events.out.tfevents.";
const END: &str = ".phalanx";
/// So many files of a run there are at most.
const KEPT: usize = 2;
/// That a program begins, of `SessionLog`: what was written before of this step and later ones is void.
const STARTED: u64 = 1;

impl Board {
    /// A new file, which says that those before are void.
    fn create(folder: &Path, run: &Run) -> Result<Board> {
        fs::create_dir_all(folder)?;
        let since_1970 = |time: SystemTime| time.duration_since(UNIX_EPOCH).unwrap_or_default();
        // The end of what is told, less all that it took.
        let now = SystemTime::now();
        let told = since_1970(run.written.unwrap_or(now)).as_secs_f64();
        let start = told - run.clock().last().unwrap_or(0.0);
        let path = folder.join(format!("{BEGIN}{:020}{END}", since_1970(now).as_nanos()));
        let mut bytes = record(&event(start, None, &Field::Bytes(3, b"brain.Event:2".to_vec())));
        let started = Field::Bytes(7, message(&[Field::Integer(1, STARTED)]));
        bytes.extend(record(&event(start, Some(0), &started)));
        fs::write(&path, &bytes)?;
        // One that is being read can't go, or its reader finds no way to this one.
        let is_ours = |path: &PathBuf| {
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            name.starts_with(BEGIN) && name.ends_with(END)
        };
        let mut ours: Vec<PathBuf> = fs::read_dir(folder)?.flatten().map(|entry| entry.path()).collect();
        ours.retain(is_ours);
        ours.sort();
        for old in ours.iter().rev().skip(KEPT) {
            fs::remove_file(old)?;
        }
        let (length, beginnings) = (bytes.len() as u64, run.beginnings);
        Ok(Board { path, length, step: None, epochs: 0, beginnings, start })
    }

    fn write(&mut self, run: &Run) -> Result<()> {
        let new = run.made.partition_point(|made| Some(made.step) <= self.step);
        if new == run.made.len() && self.epochs >= run.epochs.len() {
            return Ok(());
        }
        let mut bytes = Vec::new();
        let at = |clock: Option<f64>| self.start + clock.unwrap_or(0.0);
        for (made, clock) in run.made.iter().zip(run.clock()).skip(new) {
            bytes.extend(record(&event(at(Some(clock)), Some(made.step), &summary(&of_step(made)))));
        }
        let clock = at(run.clock().last());
        for epoch in &run.epochs[self.epochs.min(run.epochs.len())..] {
            bytes.extend(record(&event(clock, Some(epoch.step), &summary(&of_epoch(epoch)))));
        }
        let mut file = OpenOptions::new().write(true).open(&self.path)?;
        // Of a record that the disk had no room for a part may be there.
        file.set_len(self.length)?;
        file.seek(SeekFrom::End(0))?;
        file.write_all(&bytes)?;
        self.length += bytes.len() as u64;
        self.step = run.made.last().map(|made| made.step).max(self.step);
        self.epochs = run.epochs.len();
        Ok(())
    }
}

fn of_step(made: &Step) -> Vec<(&'static str, f64)> {
    let mut tags = vec![
        ("train/loss", made.loss),
        ("train/learning_rate", made.lr),
        ("time/step_ms", made.ms),
        ("time/input_ms", made.input_ms),
        ("time/comm_ms", made.comm_ms),
        ("run/workers", made.world_size as f64),
    ];
    tags.extend(made.grad_norm.map(|norm| ("train/grad_norm", norm)));
    tags
}

fn of_epoch(epoch: &Epoch) -> Vec<(String, f64)> {
    let mut tags = vec![("time/samples_per_s".to_owned(), epoch.samples_per_s)];
    tags.extend(epoch.test_loss.map(|loss| ("test/loss".to_owned(), loss)));
    tags.extend(epoch.test_accuracy.map(|accuracy| ("test/accuracy".to_owned(), accuracy)));
    tags.extend(epoch.test_metrics.iter().map(|(name, value)| (format!("test/{name}"), *value)));
    tags
}

/// A field of a protocol buffer, by its number.
enum Field {
    Double(u8, f64),
    Float(u8, f32),
    Integer(u8, u64),
    Bytes(u8, Vec<u8>),
}

impl Field {
    fn put(&self, into: &mut Vec<u8>) {
        // A number and a type of the wire.
        match self {
            Field::Integer(number, value) => {
                into.push(number << 3);
                varint(*value, into);
            }
            Field::Double(number, value) => {
                into.push(number << 3 | 1);
                into.extend(value.to_le_bytes());
            }
            Field::Bytes(number, value) => {
                into.push(number << 3 | 2);
                varint(value.len() as u64, into);
                into.extend(value);
            }
            Field::Float(number, value) => {
                into.push(number << 3 | 5);
                into.extend(value.to_le_bytes());
            }
        }
    }
}

fn varint(mut value: u64, into: &mut Vec<u8>) {
    while value >= 0x80 {
        into.push(value as u8 | 0x80);
        value >>= 7;
    }
    into.push(value as u8);
}

fn message(fields: &[Field]) -> Vec<u8> {
    let mut bytes = Vec::new();
    fields.iter().for_each(|field| field.put(&mut bytes));
    bytes
}

/// An `Event`: when, after which step, and what.
fn event(clock: f64, step: Option<u64>, what: &Field) -> Vec<u8> {
    let mut bytes = message(&[Field::Double(1, clock)]);
    step.into_iter().for_each(|step| Field::Integer(2, step).put(&mut bytes));
    what.put(&mut bytes);
    bytes
}

/// A `Summary`: a `Value` for each tag.
fn summary<Tag: AsRef<str>>(tags: &[(Tag, f64)]) -> Field {
    let value = |(tag, number): &(Tag, f64)| {
        Field::Bytes(
            1,
            message(&[Field::Bytes(1, tag.as_ref().as_bytes().to_vec()), Field::Float(2, *number as f32)]),
        )
    };
    Field::Bytes(5, message(&tags.iter().map(value).collect::<Vec<_>>()))
}

fn record(bytes: &[u8]) -> Vec<u8> {
    let length = (bytes.len() as u64).to_le_bytes();
    [&length[..], &masked(&length), bytes, &masked(bytes)].concat()
}

/// A checksum, so that one of bytes with checksums in them is none of theirs.
fn masked(bytes: &[u8]) -> [u8; 4] {
    crc32c::crc32c(bytes).rotate_right(15).wrapping_add(0xa282_ead8).to_le_bytes()
}

#[cfg(test)]
mod tests {
    use super::super::run::tests::step;
    use super::*;

    /// What TensorFlow writes as the first record of each file, but for the time.
    #[test]
    fn a_record_has_the_bytes_of_tensorflow_s() {
        let first = record(&event(0.0, None, &Field::Bytes(3, b"brain.Event:2".to_vec())));
        assert_eq!(first[..12], [24, 0, 0, 0, 0, 0, 0, 0, 0xa3, 0x7f, 0x4b, 0x22]);
        assert_eq!(first[12..22], [9, 0, 0, 0, 0, 0, 0, 0, 0, 0x1a]);
        assert_eq!(first.len(), 8 + 4 + 24 + 4);
    }

    #[test]
    fn numbers_are_written_in_as_few_bytes_as_they_need() {
        let put = |value| {
            let mut bytes = Vec::new();
            varint(value, &mut bytes);
            bytes
        };
        assert_eq!(
            [put(0), put(127), put(128), put(300)],
            [vec![0], vec![127], vec![0x80, 1], vec![0xac, 2]]
        );
        assert_eq!(put(u64::MAX).len(), 10);
    }

    #[test]
    fn a_file_grows_with_its_run_and_is_begun_anew_when_that_is_cut() {
        let folder = tempfile::tempdir().unwrap();
        let mut run = Run::new("a".into());
        let mut boards = Boards::open(folder.path().to_owned()).unwrap();
        let mut length = |run: &Run| {
            boards.write_one(run, &folder.path().join("a")).unwrap();
            let files: Vec<_> = fs::read_dir(folder.path().join("a")).unwrap().collect();
            let newest = files.into_iter().map(Result::unwrap).max_by_key(|file| file.file_name()).unwrap();
            newest.metadata().unwrap().len()
        };
        let empty = length(&run);
        run.hear(&step(0, 1.0));
        let one = length(&run);
        run.hear(&step(1, 1.0));
        let two = length(&run);
        assert!(empty < one && one < two, "{empty}, {one}, {two}");
        assert_eq!(length(&run), two);
        run.hear(&phalanx::Event::Resume { step: 1, epoch: 0, path: String::new() });
        assert_eq!(length(&run), one);
        (0..5).for_each(|_| {
            run.begin_anew();
            assert_eq!(length(&run), empty);
        });
        assert_eq!(fs::read_dir(folder.path().join("a")).unwrap().count(), KEPT);
        run.hear(&step(0, 1.0));
        // Whoever deletes them has them written again.
        fs::remove_dir_all(folder.path().join("a")).unwrap();
        assert_eq!(length(&run), one);
    }
}
