//! What the workers write: into their logs, and on in whole lines, or what there is of one that isn't ended at once, as a progress bar or a
//! prompt.

use crate::prefix::Prefix;
use crate::stamp::{LogTimes, Stamper, stamp};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use std::collections::VecDeque;
use std::fs::File;
use std::io::{ErrorKind, PipeReader, Read, Write};
use std::os::fd::AsFd;
use std::sync::{Arc, Once};
use std::time::{Duration, Instant, SystemTime};

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
/// How many bytes of each, the last.
const MOST_KEPT: usize = 1 << 14;
/// How much is read at once.
const READ: usize = 1 << 16;
/// A longer line is passed on in pieces, between which others may be shown.
const MAX_LINE: usize = 1 << 18;
/// What has no end by then is passed on as it is.
const LINE_TIME: Duration = Duration::from_millis(100);
/// What is still taken from a stream once the run is over: as much as a pipe holds.
const LAST_BYTES: usize = 1 << 16;

/// One stream of a worker. A process that has left the worker's group may hold it open for ever, so it also ends when the
/// run is over and what was in the pipe by then is read.
pub(crate) struct WorkerStream {
    pipe: PipeReader,
    /// Closed at its other end when the run is over.
    over: Arc<PipeReader>,
    last_bytes: usize,
    /// Whether it hasn't been said that nothing more came at once.
    is_new: bool,
}

impl WorkerStream {
    pub(crate) fn new(pipe: PipeReader, over: Arc<PipeReader>) -> WorkerStream {
        WorkerStream { pipe, over, last_bytes: LAST_BYTES, is_new: false }
    }
}

/// Where nothing follows what was read for [`LINE_TIME`], that is said once by an error, `WouldBlock`.
impl Read for WorkerStream {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let mut ends = [
            PollFd::new(self.pipe.as_fd(), PollFlags::POLLIN),
            PollFd::new(self.over.as_fd(), PollFlags::empty()),
        ];
        loop {
            let limit = PollTimeout::try_from(LINE_TIME).ok().filter(|_| self.is_new);
            match poll(&mut ends, limit.unwrap_or(PollTimeout::NONE)) {
                Ok(0) => {
                    self.is_new = false;
                    return Err(ErrorKind::WouldBlock.into());
                }
                Err(Errno::EINTR) => {}
                Err(error) => return Err(error.into()),
                Ok(_) => break,
            }
        }
        self.is_new = true;
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

/// Reads a stream to its end: what comes goes into the log at once, and each line to `show`, whole where it comes at once. The last has an
/// end in any case.
pub(crate) fn copy_lines(
    mut from: impl Read,
    mut log: File,
    times: LogTimes,
    mut show: impl FnMut(Vec<u8>),
) -> std::io::Result<()> {
    let (mut buffer, mut logged, mut shown) = (vec![0; READ], Vec::new(), Vec::new());
    let (mut of_log, mut of_shown) = (Stamper::default(), Stamper::default());
    let (mut is_open, mut since) = (false, Instant::now());
    let mut line = |shown: &mut Vec<u8>| {
        let is_open = !shown.ends_with(b"\n");
        show(std::mem::take(shown));
        is_open
    };
    loop {
        let read = match from.read(&mut buffer) {
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                if !shown.is_empty() {
                    is_open = line(&mut shown);
                }
                continue;
            }
            read => read?,
        };
        let (piece, time) = (&buffer[..read], stamp(SystemTime::now()));
        if shown.is_empty() || piece.contains(&b'\n') {
            since = Instant::now();
        }
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
                is_open = line(&mut shown);
            }
        }
        if read == 0 {
            if is_open || !shown.is_empty() {
                shown.push(b'\n');
                line(&mut shown);
            }
            return Ok(());
        }
        let rest = piece.rsplit(|&byte| byte == b'\n').next().unwrap_or_default();
        // A bar writes its line again and again, and dots may come one by one.
        let is_due = shown.len() >= MAX_LINE || rest.contains(&b'\r') || since.elapsed() >= LINE_TIME;
        if is_due && !shown.is_empty() {
            is_open = line(&mut shown);
        }
    }
}

/// The last lines of one worker.
#[derive(Clone, Debug, Default)]
pub(crate) struct Tail {
    lines: VecDeque<String>,
    /// Whether the last one isn't ended.
    is_open: bool,
}

impl Tail {
    /// Adds a line, or a piece of one.
    pub(crate) fn push(&mut self, piece: &[u8]) {
        let text = String::from_utf8_lossy(piece);
        let line = match std::mem::replace(&mut self.is_open, !piece.ends_with(b"\n")) {
            true => self.lines.pop_back().unwrap_or_default() + &text,
            false => text.into_owned(),
        };
        // What stands before a carriage return is written over by what follows.
        let written = line.trim_end_matches(['\n', '\r']).rfind('\r').map_or(0, |at| at + 1);
        let most = line.len().saturating_sub(MOST_KEPT);
        let from = (written.max(most)..).find(|&at| line.is_char_boundary(at)).unwrap_or(line.len());
        if self.lines.len() == KEPT_LINES {
            self.lines.pop_front();
        }
        self.lines.push_back(line[from..].to_owned());
    }

    pub(crate) fn lines(&self) -> Vec<String> {
        self.lines.iter().map(|line| line.trim_end().to_owned()).collect()
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
            assert!(line.ends_with(b"\n") || line == b"no end");
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
    fn what_is_written_over_is_no_line_and_pieces_are_one() {
        let mut tail = Tail::default();
        ["one\n", "\r 10%", "\r 20%", "\n", "name? ", "Ann\n", "\n", "1%\r", "2%\r", "\n", "50%\r"]
            .iter()
            .for_each(|piece| tail.push(piece.as_bytes()));
        assert_eq!(tail.lines(), ["one", " 20%", "name? Ann", "", "2%", "50%"]);
        (0..2 * MOST_KEPT).for_each(|_| tail.push("ä".as_bytes()));
        assert_eq!(tail.lines()[5].chars().count(), MOST_KEPT / 2);
    }

    #[test]
    fn a_line_that_has_no_end_yet_is_passed_on() {
        let folder = tempfile::tempdir().unwrap();
        let log = File::create(folder.path().join("log")).unwrap();
        let (pipe, mut worker) = std::io::pipe().unwrap();
        let (over, _run) = std::io::pipe().unwrap();
        let (pieces, shown) = std::sync::mpsc::channel();
        let from = WorkerStream::new(pipe, Arc::new(over));
        let reader = std::thread::spawn(move || {
            copy_lines(from, log, LogTimes::Logs, |piece| pieces.send(piece).unwrap())
        });
        let next = || shown.recv_timeout(Duration::from_secs(30)).unwrap();
        for (written, wanted) in
            [("name? ", "name? "), ("Ann\n", "Ann\n"), ("\r 1%", "\r 1%"), ("\r 2%", "\r 2%")]
        {
            worker.write_all(written.as_bytes()).unwrap();
            assert_eq!(next(), wanted.as_bytes());
        }
        drop(worker);
        assert_eq!(next(), b"\n");
        reader.join().unwrap().unwrap();
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
