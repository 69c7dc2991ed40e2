//! What the workers write: into their logs, and on in whole lines.

use crate::prefix::Prefix;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use std::collections::VecDeque;
use std::fs::File;
use std::io::{BufRead, BufReader, PipeReader, Read, Write};
use std::os::fd::AsFd;
use std::sync::Arc;

/// What is shown of the workers' output; all of it is in the logs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Console {
    /// Whole lines.
    Lines {
        /// What comes before each; nothing if there is none.
        prefix: Option<Prefix>,
        /// Which streams, by local rank; both of those beyond its end.
        shown: Vec<Streams>,
    },
    /// Rank 0 has the terminal itself, and who takes its place has its lines shown; the others only write their logs.
    FirstRank,
}

impl Console {
    /// Whether a stream of a worker is shown.
    pub(crate) fn shows(&self, local_rank: usize, stream: Stream) -> bool {
        match self {
            Console::Lines { shown, .. } => shown.get(local_rank).is_none_or(|streams| streams.has(stream)),
            Console::FirstRank => true,
        }
    }
}

/// Some of a worker's two streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Streams {
    /// Standard output.
    pub out: bool,
    /// Standard error.
    pub err: bool,
}

impl Streams {
    /// Neither.
    pub const NONE: Streams = Streams { out: false, err: false };
    /// Both.
    pub const BOTH: Streams = Streams { out: true, err: true };

    fn has(self, stream: Stream) -> bool {
        match stream {
            Stream::Out => self.out,
            Stream::Err => self.err,
        }
    }
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
/// What is still taken from a stream once the run is over: as much as a pipe holds.
const LAST_BYTES: usize = 1 << 16;

/// One stream of a worker. A process that has left the worker's group may hold it open for ever, so it also ends when the
/// run is over and what was in the pipe by then is read.
pub(crate) struct WorkerStream {
    pipe: PipeReader,
    /// Closed at its other end when the run is over.
    over: Arc<PipeReader>,
    last_bytes: usize,
}

impl WorkerStream {
    pub(crate) fn new(pipe: PipeReader, over: Arc<PipeReader>) -> WorkerStream {
        WorkerStream { pipe, over, last_bytes: LAST_BYTES }
    }
}

impl Read for WorkerStream {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let mut ends = [
            PollFd::new(self.pipe.as_fd(), PollFlags::POLLIN),
            PollFd::new(self.over.as_fd(), PollFlags::empty()),
        ];
        while let Err(error) = poll(&mut ends, PollTimeout::NONE) {
            if error != Errno::EINTR {
                return Err(error.into());
            }
        }
        let [readable, over] = ends.map(|end| end.any().unwrap_or(true));
        if !readable {
            return Ok(0);
        }
        let room = if over { buffer.len().min(self.last_bytes) } else { buffer.len() };
        let read = self.pipe.read(&mut buffer[..room])?;
        self.last_bytes -= if over { read } else { 0 };
        Ok(read)
    }
}

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

    #[test]
    fn a_stream_that_stays_open_ends_with_the_run() {
        let (pipe, mut held_open) = std::io::pipe().unwrap();
        let (over, run) = std::io::pipe().unwrap();
        held_open.write_all(b"last words").unwrap();
        drop(run);
        let mut text = String::new();
        WorkerStream::new(pipe, Arc::new(over)).read_to_string(&mut text).unwrap();
        assert_eq!(text, "last words");
    }
}
