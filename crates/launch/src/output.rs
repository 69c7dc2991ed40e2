//! What the workers write: into their logs, and on to the console in whole lines.

use phalanx_wire::Rank;
use std::collections::VecDeque;
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};

/// What is shown of the workers' output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Console {
    /// Every line, with its rank before it.
    Prefixed,
    /// Every line as it is.
    Plain,
    /// Rank 0 has the terminal itself; the others only write their logs.
    FirstRank,
}

/// Which of the two streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stream {
    Out,
    Err,
}

/// How many of a worker's last lines are kept for the report.
const KEPT_LINES: usize = 12;
/// A longer line is passed on in pieces.
const MAX_LINE: u64 = 1 << 16;

/// Reads a stream to its end: every line goes into the log and to `line`.
pub(crate) fn copy_lines(
    from: impl Read,
    mut log: File,
    mut line: impl FnMut(Vec<u8>),
) -> std::io::Result<()> {
    let mut from = BufReader::new(from);
    loop {
        let mut bytes = Vec::new();
        if (&mut from).take(MAX_LINE).read_until(b'\n', &mut bytes)? == 0 {
            return Ok(());
        }
        // A full disk must not end the run: what can't be written down is still passed on.
        let _ = log.write_all(&bytes);
        if bytes.last() != Some(&b'\n') {
            bytes.push(b'\n');
        }
        line(bytes);
    }
}

/// The last lines of one worker.
#[derive(Clone, Debug, Default)]
pub(crate) struct Tail(VecDeque<String>);

impl Tail {
    pub(crate) fn push(&mut self, line: &[u8]) {
        if self.0.len() == KEPT_LINES {
            self.0.pop_front();
        }
        self.0.push_back(String::from_utf8_lossy(line).trim_end().to_owned());
    }

    pub(crate) fn lines(&self) -> Vec<String> {
        self.0.iter().cloned().collect()
    }
}

/// Shows a line. A console that is gone (a closed pipe) doesn't end the run.
pub(crate) fn show(console: Console, rank: Rank, stream: Stream, line: &[u8]) {
    let prefix = match console {
        Console::Prefixed => format!("[rank{rank}]: "),
        Console::Plain => String::new(),
        Console::FirstRank => return,
    };
    let mut bytes = prefix.into_bytes();
    bytes.extend_from_slice(line);
    let _ = match stream {
        Stream::Out => std::io::stdout().lock().write_all(&bytes),
        Stream::Err => std::io::stderr().lock().write_all(&bytes),
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_whole_and_the_last_ones_are_kept() {
        let folder = tempfile::tempdir().unwrap();
        let log = folder.path().join("log");
        let mut tail = Tail::default();
        let text: String = (0..20).map(|i| format!("line {i}\n")).collect::<String>() + "no end";
        copy_lines(text.as_bytes(), File::create(&log).unwrap(), |line| {
            assert!(line.ends_with(b"\n"));
            tail.push(&line);
        })
        .unwrap();
        assert_eq!(tail.lines().len(), KEPT_LINES);
        assert_eq!(tail.lines().last().unwrap(), "no end");
        assert_eq!(std::fs::read_to_string(&log).unwrap(), text);
    }
}
