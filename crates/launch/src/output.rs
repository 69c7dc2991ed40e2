//! What the workers write: into their logs, and on in whole lines.

use crate::prefix::Prefix;
use crate::stamp::{LogTimes, Stamper, stamp};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use std::collections::VecDeque;
use std::fs::File;
use std::io::{PipeReader, Read, Write};
use std::os::fd::AsFd;
use std::sync::{Arc, Once};
use std::time::SystemTime;

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
const MAX_LINE: usize = 1 << 16;
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

/// Whether it was said that a log can't be written.
static UNWRITTEN: Once = Once::new();

/// Reads a stream to its end: what comes goes into the log at once, and each line, when it is whole, to `line`.
pub(crate) fn copy_lines(
    mut from: impl Read,
    mut log: File,
    times: LogTimes,
    mut line: impl FnMut(Vec<u8>),
) -> std::io::Result<()> {
    let (mut buffer, mut logged, mut shown) = (vec![0; MAX_LINE], Vec::new(), Vec::new());
    let (mut of_log, mut of_shown) = (Stamper::default(), Stamper::default());
    loop {
        let read = from.read(&mut buffer)?;
        let (piece, time) = (&buffer[..read], stamp(SystemTime::now()));
        if times != LogTimes::Nowhere {
            logged.clear();
            of_log.add(piece, &time, &mut logged);
        }
        // A full disk must not end the run: what can't be written down is still passed on, and that is said once.
        if let Err(error) = log.write_all(if times == LogTimes::Nowhere { piece } else { &logged }) {
            UNWRITTEN.call_once(|| {
                tracing::warn!("logs of workers can't be written, and have gaps from here on: {error}\nhint: is the disk full?");
            });
        }
        for part in piece.split_inclusive(|&byte| byte == b'\n') {
            match times {
                LogTimes::Everywhere => of_shown.add(part, &time, &mut shown),
                LogTimes::Logs | LogTimes::Nowhere => shown.extend_from_slice(part),
            }
            if part.ends_with(b"\n") {
                line(std::mem::take(&mut shown));
            }
        }
        if shown.len() >= MAX_LINE || (read == 0 && !shown.is_empty()) {
            shown.push(b'\n');
            line(std::mem::take(&mut shown));
        }
        if read == 0 {
            return Ok(());
        }
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
        copy_lines(text.as_bytes(), File::create(&log).unwrap(), LogTimes::Nowhere, |line| {
            assert!(line.ends_with(b"\n"));
            tail.push(&line);
        })
        .unwrap();
        assert_eq!(tail.lines().len(), KEPT_LINES);
        assert_eq!(tail.lines().last().unwrap(), "no end");
        assert_eq!(std::fs::read_to_string(&log).unwrap(), text);
    }

    #[test]
    fn what_is_written_is_kept_whatever_it_is_and_times_go_where_they_are_asked_for() {
        let folder = tempfile::tempdir().unwrap();
        let long = vec![b'x'; 3 * MAX_LINE];
        let binary: Vec<u8> = (0..=u8::MAX).chain(0..=u8::MAX).collect();
        let texts = [b"one\n10%\r20%\ntwo".to_vec(), long, binary];
        // What a time is taken for, and found by.
        let time = |text: &[u8]| text.len() == 25 && text.starts_with(b"2") && text.ends_with(b"Z ");
        for times in [LogTimes::Logs, LogTimes::Everywhere, LogTimes::Nowhere] {
            for text in &texts {
                let log = folder.path().join("log");
                let mut shown = Vec::new();
                copy_lines(text.as_slice(), File::create(&log).unwrap(), times, |line| shown.push(line))
                    .unwrap();
                let log = std::fs::read(&log).unwrap();
                let begins = |at: usize| at == 0 || matches!(log[at - 1], b'\n' | b'\r');
                let (mut bare, mut at) = (Vec::new(), 0);
                while at < log.len() {
                    let is_time = begins(at) && log.get(at..at + 25).is_some_and(time);
                    if is_time {
                        at += 25;
                    } else {
                        assert!(!begins(at) || times == LogTimes::Nowhere || log[at] == b'\n');
                        bare.push(log[at]);
                        at += 1;
                    }
                }
                assert_eq!(&bare, text);
                let stamped = shown.iter().filter(|line| line.get(..25).is_some_and(time)).count();
                assert_eq!(stamped > 0, times == LogTimes::Everywhere);
            }
        }
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
