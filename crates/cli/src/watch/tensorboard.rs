//! Files for TensorBoard: an `events.out.tfevents` for each run, in a folder of its name.
//!
//! Such a file is a row of records: 8 bytes of length, their checksum, the bytes, their checksum; each checksum is a CRC-32C, turned and
//! shifted (TensorFlow's `core/lib/io/record_writer.h`). A record is an `Event` of `core/util/event.proto`, of which five fields are
//! written here; protocol buffers of so few need no compiler.

use super::run::{Epoch, Run, Step};
use super::runs::Runs;
use anyhow::{Context, Result};
use std::collections::HashMap;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

/// The files of all runs.
pub(super) struct Boards {
    folder: PathBuf,
    written: HashMap<String, Board>,
}

/// That of one, as far as it is written.
struct Board {
    file: File,
    /// The last step and the number of epochs.
    step: Option<u64>,
    epochs: usize,
    /// When the run began, in seconds since 1970, as nearly as can be told: runs say how long things took, and not when they were.
    start: f64,
}

impl Boards {
    pub(super) fn open(folder: PathBuf) -> Result<Boards> {
        fs::create_dir_all(&folder).with_context(|| format!("--tensorboard {}", folder.display()))?;
        Ok(Boards { folder, written: HashMap::new() })
    }

    /// Writes what is new of each run.
    pub(super) fn write(&mut self, runs: &Runs) -> Result<()> {
        for run in runs.all() {
            let folder = self.folder.join(&run.name);
            let written = self.write_one(run, &folder);
            written.with_context(|| format!("{} can't be written", folder.display()))?;
        }
        Ok(())
    }

    fn write_one(&mut self, run: &Run, folder: &Path) -> Result<()> {
        let board = self.written.get(&run.name);
        // What was written of steps that are made again is written anew, without them.
        let is_void = board.is_some_and(|board| {
            board.step.is_some_and(|step| step >= run.steps_made()) || board.epochs > run.epochs.len()
        });
        if board.is_none() || is_void {
            self.written.insert(run.name.clone(), Board::create(folder, run)?);
        }
        let board = self.written.get_mut(&run.name).expect("it was made just now");
        board.write(run)
    }
}

impl Board {
    /// A new file in the place of the one before.
    fn create(folder: &Path, run: &Run) -> Result<Board> {
        fs::create_dir_all(folder)?;
        // The end of what is told, less all that it took.
        let took = run.clock().last().unwrap_or(0.0);
        let now = run.written.unwrap_or_else(SystemTime::now).duration_since(UNIX_EPOCH)?.as_secs_f64();
        let (path, new) = (folder.join(FILE), folder.join(format!("{FILE}.new")));
        let mut file = File::create(&new)?;
        let start = now - took;
        file.write_all(&record(&event(start, None, &Field::Bytes(3, b"brain.Event:2".to_vec()))))?;
        fs::rename(&new, &path)?;
        Ok(Board { file, step: None, epochs: 0, start })
    }

    fn write(&mut self, run: &Run) -> Result<()> {
        let mut bytes = Vec::new();
        let new = run.made.partition_point(|made| Some(made.step) <= self.step);
        let at = |clock: Option<f64>| self.start + clock.unwrap_or(0.0);
        for (made, clock) in run.made.iter().zip(run.clock()).skip(new) {
            bytes.extend(record(&event(at(Some(clock)), Some(made.step), &summary(&of_step(made)))));
        }
        let clock = at(run.clock().last());
        for epoch in &run.epochs[self.epochs.min(run.epochs.len())..] {
            bytes.extend(record(&event(clock, Some(epoch.step), &summary(&of_epoch(epoch)))));
        }
        self.file.write_all(&bytes)?;
        self.step = run.made.last().map(|made| made.step).max(self.step);
        self.epochs = run.epochs.len();
        Ok(())
    }
}

/// TensorBoard takes a file for one of its own by the word in the midst.
const FILE: &str = "events.out.tfevents.1.phalanx";

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

fn of_epoch(epoch: &Epoch) -> Vec<(&'static str, f64)> {
    let mut tags = vec![("time/samples_per_s", epoch.samples_per_s)];
    tags.extend(epoch.test_loss.map(|loss| ("test/loss", loss)));
    tags.extend(epoch.test_accuracy.map(|accuracy| ("test/accuracy", accuracy)));
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
fn summary(tags: &[(&str, f64)]) -> Field {
    let value = |(tag, number): &(&str, f64)| {
        Field::Bytes(1, message(&[Field::Bytes(1, tag.as_bytes().to_vec()), Field::Float(2, *number as f32)]))
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
        let path = folder.path().join("a").join(FILE);
        let mut length = |run: &Run| {
            boards.write_one(run, &folder.path().join("a")).unwrap();
            fs::metadata(&path).unwrap().len()
        };
        let empty = length(&run);
        run.hear(&step(0, 1.0));
        let one = length(&run);
        run.hear(&step(1, 1.0));
        let two = length(&run);
        assert!(empty < one && two - one == one - empty, "{empty}, {one}, {two}");
        assert_eq!(length(&run), two);
        run.hear(&phalanx::Event::Resume { step: 1, epoch: 0, path: String::new() });
        assert_eq!(length(&run), one);
    }
}
