//! `events.jsonl` of a run directory: what happened, a JSON object a line. A run that goes on from a checkpoint goes on in the
//! file, after what is still true of it, and so does a rank that takes the place of the one that has written it.

mod owed;

use crate::say::say;
use owed::Owed;
use phalanx::Event;
use serde_json::Value;
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

/// What the file is called.
pub(crate) const EVENTS: &str = "events.jsonl";

/// The file.
pub(crate) struct EventsFile {
    file: File,
    path: PathBuf,
    /// Whether an event of this process is in it.
    begun: bool,
    owed: Owed,
}

impl EventsFile {
    /// The file at this path, which stays as it is until the first event says what kind of run this is.
    pub(crate) fn open(path: &Path) -> io::Result<EventsFile> {
        // Wherever a look at it has ended: what is written comes last.
        let file = OpenOptions::new().read(true).append(true).create(true).open(path)?;
        Ok(EventsFile { file, path: path.to_owned(), begun: false, owed: Owed::default() })
    }

    /// Appends an event, unless another process has: gives whether this is the first time. A disk that is full doesn't end the
    /// run: that is told, and what it has no room for is written once there is some.
    pub(crate) fn write(&mut self, event: &Event) -> bool {
        // Whoever goes on from a checkpoint tells again what it told after that.
        let is_first = !std::mem::replace(&mut self.begun, true) || matches!(event, Event::Resume { .. });
        let is_new = !is_first
            || self.begin(event).unwrap_or_else(|error| {
                let path = self.path.display();
                say(format_args!("{path}: can't be read: {error}\nwhat happens is added to what it holds"));
                true
            });
        if is_new {
            self.append(event);
        }
        is_new
    }

    fn append(&mut self, event: &Event) {
        let had_room = self.owed.is_paid();
        self.owed.add(&line_of(event));
        if let Err(error) = self.owed.pay(&mut self.file)
            && had_room
        {
            let path = self.path.display();
            say(format_args!("{path}: can't be written: {error}\nwhat happens is added once there is room"));
        }
    }

    /// Cuts what the process that begins, or goes on, with this event will tell again; gives whether the event isn't there itself.
    fn begin(&mut self, first: &Event) -> io::Result<bool> {
        let (mut kept, mut is_new) = (0, true);
        if let Some((step, epoch)) = position(first) {
            let mut text = Vec::new();
            self.file.rewind()?;
            let written = self.file.read_to_end(&mut text)?;
            text.extend_from_slice(self.owed.bytes());
            kept = still_true(&text, step, epoch);
            let next = text[kept..].split_inclusive(|&byte| byte == b'\n').next().unwrap_or_default();
            if next.ends_with(b"\n") && is_same(first, next) {
                (kept, is_new) = (kept + next.len(), false);
            }
            self.owed.keep(kept.saturating_sub(written));
            kept = kept.min(written);
        }
        self.file.set_len(kept as u64)?;
        Ok(is_new)
    }
}

/// The file as another process reads it while a run writes: line by line, from where the look before ended.
pub(crate) struct Tail {
    path: PathBuf,
    read: u64,
    /// The last bytes that were read, by which is known whether they are still there.
    last: Vec<u8>,
    /// Of a line that isn't whole yet; nothing of one that is too long to be an event.
    rest: Vec<u8>,
    is_too_long: bool,
}

/// What came since the look before.
pub(crate) struct Look {
    /// Each with the newline at its end.
    pub(crate) lines: Vec<Vec<u8>>,
    /// Whether the file isn't what was read of it any more: it was cut, by a run that goes on from a checkpoint, and is read on from its end.
    pub(crate) was_cut: bool,
    /// Whether there is more to be read.
    pub(crate) has_more: bool,
}

/// So many bytes are read in a look.
const MOST_AT_ONCE: u64 = 1 << 20;
/// So many are held against what was read before.
const COMPARED: usize = 64;

impl Tail {
    /// The file at this path, from this byte on.
    pub(crate) fn new(path: PathBuf, read: u64) -> Tail {
        Tail { path, read, last: Vec::new(), rest: Vec::new(), is_too_long: false }
    }

    /// What is new; a file that isn't there yet, or not here, tells nothing.
    pub(crate) fn look(&mut self) -> Look {
        let (new, was_cut, has_more) = self.new_bytes().unwrap_or_default();
        if was_cut {
            (self.rest, self.is_too_long) = (Vec::new(), false);
        }
        let mut lines = Vec::new();
        for piece in new.split_inclusive(|&byte| byte == b'\n') {
            self.rest.extend(piece);
            let is_whole = piece.ends_with(b"\n");
            self.is_too_long |= self.rest.len() as u64 > LONGEST;
            if self.is_too_long || is_whole {
                let line = std::mem::take(&mut self.rest);
                lines.extend((!self.is_too_long).then_some(line));
                self.is_too_long &= !is_whole;
            }
        }
        Look { lines, was_cut, has_more }
    }

    /// What came, whether what was read before is gone, and whether there is more.
    fn new_bytes(&mut self) -> io::Result<(Vec<u8>, bool, bool)> {
        let mut file = File::open(&self.path)?;
        let length = file.metadata()?.len();
        let is_as_before = length >= self.read && {
            let mut before = vec![0; self.last.len()];
            file.seek(SeekFrom::Start(self.read - before.len() as u64))?;
            file.read_exact(&mut before)?;
            before == self.last
        };
        if !is_as_before {
            (self.read, self.last) = (length, Vec::new());
            return Ok((Vec::new(), true, false));
        }
        let mut new = Vec::new();
        file.take(MOST_AT_ONCE.min(length - self.read)).read_to_end(&mut new)?;
        self.read += new.len() as u64;
        self.last.extend(&new[new.len().saturating_sub(COMPARED)..]);
        self.last.drain(..self.last.len().saturating_sub(COMPARED));
        let has_more = self.read < length && !new.is_empty();
        Ok((new, false, has_more))
    }
}

/// Whether the last thing that a run has told, in the file at this path, is that it is over.
pub(crate) fn is_over(path: &Path) -> bool {
    let is_done = || -> io::Result<bool> {
        let mut file = File::open(path)?;
        file.seek(SeekFrom::Start(file.metadata()?.len().saturating_sub(LONGEST)))?;
        let mut end = Vec::new();
        file.read_to_end(&mut end)?;
        let last = end.split(|&byte| byte == b'\n').rfind(|line| !line.is_empty());
        Ok(last.is_some_and(|line| matches!(serde_json::from_slice(line), Ok(Event::Done { .. }))))
    };
    is_done().unwrap_or(false)
}

/// More bytes than the last event of a run has.
const LONGEST: u64 = 1 << 16;

/// The first step and epoch that a process tells which begins with this event; none if it begins a run.
fn position(first: &Event) -> Option<(u64, u64)> {
    match *first {
        Event::Resume { step, epoch, .. }
        | Event::Members { step, epoch, .. }
        | Event::Step { step, epoch, .. } => Some((step, epoch)),
        Event::Epoch { epoch, .. } => Some((u64::MAX, epoch)),
        _ => None,
    }
}

/// Whether a line tells of the same step or the same end of an epoch as an event.
fn is_same(event: &Event, line: &[u8]) -> bool {
    match (event, serde_json::from_slice(line)) {
        (Event::Step { step, .. }, Ok(Event::Step { step: told, .. })) => *step == told,
        (Event::Epoch { epoch, .. }, Ok(Event::Epoch { epoch: told, .. })) => *epoch == told,
        _ => false,
    }
}

/// An event as a line.
pub(crate) fn line_of(event: &Event) -> Vec<u8> {
    let mut line = serde_json::to_vec(event).expect("an event is always JSON");
    line.push(b'\n');
    line
}

/// How many bytes of `text` a run leaves that goes on with this step and epoch: all lines before the first one that it will
/// tell again, or that a killed process left half written.
fn still_true(text: &[u8], step: u64, epoch: u64) -> usize {
    let is_true = |line: &&[u8]| {
        let Ok(event) = serde_json::from_slice::<Value>(line) else { return false };
        let at = |key: &str| event[key].as_u64().unwrap_or(0);
        match event["event"].as_str() {
            Some("step") => at("step") < step,
            Some("epoch") => at("epoch") < epoch,
            Some("done") | None => false,
            Some(_) => line.ends_with(b"\n"),
        }
    };
    text.split_inclusive(|&byte| byte == b'\n').take_while(is_true).map(<[u8]>::len).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn who_takes_the_first_place_adds_what_the_one_before_did_not_come_to_tell() {
        let step = |step, epoch| Event::Step {
            step,
            epoch,
            loss: 0.5,
            samples: 8 * (step + 1),
            world_size: 2,
            lr: 0.1,
            grad_norm: None,
            loss_scale: None,
            skipped: false,
            ms: 1.0,
            input_ms: 0.0,
            comm_ms: 0.0,
        };
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("events.jsonl");
        let check = |first: Event, new: bool, lines: usize| {
            let mut before = EventsFile::open(&path).unwrap();
            let start =
                Event::Start { world_size: 2, parameters: 1, steps_per_epoch: 2, steps: 4, samples: 16 };
            [start, step(0, 0), step(1, 0)].iter().for_each(|event| assert!(before.write(event)));
            before.file.write_all(b"{\"event\":\"step\",\"st").unwrap();
            assert_eq!(EventsFile::open(&path).unwrap().write(&first), new, "{first:?}");
            let text = std::fs::read_to_string(&path).unwrap();
            assert!(text.lines().all(|line| serde_json::from_str::<Event>(line).is_ok()), "{text}");
            assert_eq!(text.lines().count(), lines, "{text}");
        };
        check(step(1, 0), false, 3);
        check(step(2, 1), true, 4);
        check(Event::Members { step: 2, epoch: 0, generation: 1, world_size: 1, ms: Some(3.0) }, true, 4);
        check(Event::Note { message: "a run of its own".into() }, true, 1);
    }

    #[test]
    fn what_is_new_is_read_line_by_line_and_what_was_cut_is_not_read_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("events.jsonl");
        let mut tail = Tail::new(path.clone(), 0);
        let mut look = || {
            let Look { lines, was_cut, .. } = tail.look();
            (String::from_utf8(lines.concat()).unwrap(), was_cut)
        };
        assert_eq!(look(), (String::new(), false));
        let write = |text: &str| std::fs::write(&path, text).unwrap();
        write("one\ntw");
        assert_eq!(look(), ("one\n".to_owned(), false));
        write("one\ntwo\n");
        assert_eq!((look(), look()), (("two\n".to_owned(), false), (String::new(), false)));
        write("one\n");
        assert_eq!((look(), look()), ((String::new(), true), (String::new(), false)));
        write("one\nthree\n");
        assert_eq!(look(), ("three\n".to_owned(), false));
        // Cut, and longer than before by the next look.
        write("one\nsix\nseven\neight\n");
        assert_eq!((look(), look()), ((String::new(), true), (String::new(), false)));
        // A line without end is none, and the next one is read again.
        let long = "x".repeat(3 << 20);
        write(&format!("one\nsix\nseven\neight\n{long}"));
        (0..4).for_each(|_| assert_eq!(look(), (String::new(), false)));
        write(&format!("one\nsix\nseven\neight\n{long}\nnine\n"));
        assert_eq!(look(), ("nine\n".to_owned(), false));
    }

    #[test]
    fn who_goes_on_from_a_checkpoint_cuts_what_it_told_after_that() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("events.jsonl");
        let mut file = EventsFile::open(&path).unwrap();
        let resume = |step| Event::Resume { step, epoch: 0, path: "there".into() };
        let members = |step| Event::Members { step, epoch: 0, generation: 1, world_size: 2, ms: None };
        let note = Event::Note { message: "of the first steps".into() };
        [members(0), resume(0), note].iter().for_each(|event| assert!(file.write(event)));
        let step = |step: u64| format!("{{\"event\":\"step\",\"step\":{step},\"epoch\":0}}\n").into_bytes();
        file.file.write_all(&step(0)).unwrap();
        file.file.write_all(&step(1)).unwrap();
        // There was no room for it.
        file.owed.add(&step(2));
        assert!(file.write(&resume(1)));
        let text = std::fs::read_to_string(&path).unwrap();
        let events: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let told: Vec<_> = events.iter().map(|event| event["event"].as_str().unwrap()).collect();
        assert_eq!(told, ["members", "resume", "note", "step", "resume"]);
    }

    #[test]
    fn what_is_told_again_is_cut() {
        let lines = [
            r#"{"event":"start","steps":9}"#,
            r#"{"event":"step","step":0,"epoch":0}"#,
            r#"{"event":"step","step":1,"epoch":0}"#,
            r#"{"event":"epoch","epoch":0}"#,
            r#"{"event":"checkpoint","step":2}"#,
            r#"{"event":"step","step":2,"epoch":1}"#,
            r#"{"event":"done","steps":3}"#,
        ];
        let text = lines.map(|line| format!("{line}\n")).concat();
        let check = |text: &str, step: u64, epoch: u64, lines: usize| {
            let kept = &text[..still_true(text.as_bytes(), step, epoch)];
            assert_eq!(kept.lines().count(), lines, "step {step} of epoch {epoch}: {kept}");
            assert!(kept.is_empty() || kept.ends_with('\n'), "{kept}");
        };
        check(&text, 0, 0, 1);
        check(&text, 1, 0, 2);
        // The steps of the epoch were made, and it was not evaluated.
        check(&text, 2, 0, 3);
        check(&text, 2, 1, 5);
        check(&text, 3, 1, 6);
        check(&text[..text.len() - 40], 3, 1, 5);
        check("", 3, 1, 0);
        check("no events\n", 3, 1, 0);
    }
}
