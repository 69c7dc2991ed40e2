//! `events.jsonl` of a run directory: what happened, a JSON object a line. A run that goes on from a checkpoint goes on in the
//! file, after what is still true of it.

use phalanx::Event;
use serde_json::Value;
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::Path;

/// The file.
pub(crate) struct EventsFile {
    file: File,
    /// Whether an event of this process is in it.
    begun: bool,
}

impl EventsFile {
    /// The file at this path, which stays as it is until the first event says what kind of run this is.
    pub(crate) fn open(path: &Path) -> io::Result<EventsFile> {
        let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path)?;
        Ok(EventsFile { file, begun: false })
    }

    /// Appends an event. A disk that is full doesn't end the run.
    pub(crate) fn write(&mut self, event: &Event) {
        if !std::mem::replace(&mut self.begun, true) {
            let _ = self.begin(event);
        }
        write_event(&mut self.file, event);
    }

    /// Cuts what the run that begins with this event will tell again.
    fn begin(&mut self, first: &Event) -> io::Result<()> {
        let kept = match *first {
            Event::Resume { step, epoch, .. } => {
                let mut text = Vec::new();
                self.file.read_to_end(&mut text)?;
                still_true(&text, step, epoch)
            }
            _ => 0,
        };
        self.file.set_len(kept as u64)?;
        self.file.seek(SeekFrom::End(0)).map(drop)
    }
}

/// Writes an event as a line. A listener that is gone doesn't end the run.
pub(crate) fn write_event(out: &mut dyn Write, event: &Event) {
    let mut line = serde_json::to_vec(event).expect("an event is always JSON");
    line.push(b'\n');
    let _ = out.write_all(&line);
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
