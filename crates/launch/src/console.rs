//! What is shown. A console may stall (a pager, Ctrl-S), so threads of their own write to it: one that stalls holds up the
//! workers' lines, but neither signals nor ends.

use crate::news::News;
use crate::output::{Console, Stream};
use crate::prefix::{Named, Prefix};
use crate::spec::{LaunchError, LaunchSpec};
use nix::sys::stat::fstat;
use phalanx_job::host_name;
use phalanx_wire::Rank;
use std::io::Write;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{SyncSender, TrySendError, sync_channel};

/// What waits to be shown; a worker that writes faster waits.
const QUEUE: usize = 1024;

/// A thread that shows whatever is sent to it. When all senders are dropped and everything is shown, it says so.
pub(crate) fn outlet<T: Send + 'static>(
    name: &str,
    news: &SyncSender<News>,
    mut show: impl FnMut(T) + Send + 'static,
) -> Result<SyncSender<T>, LaunchError> {
    let (sender, items) = sync_channel(QUEUE);
    let news = news.clone();
    let thread = std::thread::Builder::new().name(name.into()).spawn(move || {
        items.iter().for_each(&mut show);
        // Nobody waits for it once the run is over.
        let _ = news.send(News::Shown);
    });
    thread.map_err(LaunchError::system("a thread for the console"))?;
    Ok(sender)
}

/// Whether what is written to these goes to one place, as a terminal.
fn are_one(a: impl AsFd, b: impl AsFd) -> bool {
    let [a, b] = [fstat(a), fstat(b)].map(|stat| stat.map(|stat| (stat.st_dev, stat.st_ino)));
    a.is_ok() && a == b
}

/// Writes so that it is seen, whether or not it ends a line.
fn whole(mut to: impl Write, bytes: &[u8]) -> std::io::Result<()> {
    to.write_all(bytes)?;
    to.flush()
}

/// Where the next character goes of a console, or of the file in its place.
#[derive(Default)]
struct Cursor {
    /// Who has written a line that isn't ended, by what stands before each of its lines.
    open: Option<Arc<str>>,
    /// Whether that is at its beginning again, by a carriage return.
    has_returned: bool,
}

impl Cursor {
    /// A worker's line, or a piece of one, as it is shown: with its prefix at each beginning, and not in another's line.
    fn write(&mut self, prefix: &Arc<str>, piece: &[u8]) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(prefix.len() + piece.len());
        let is_own = self.open.as_ref().is_some_and(|open| Arc::ptr_eq(open, prefix));
        let (mut begins, mut has_returned) = (true, false);
        if is_own {
            (begins, has_returned) = (self.has_returned, self.has_returned);
        } else if self.open.is_some() && !piece.starts_with(b"\r") {
            bytes.push(b'\n');
        }
        for part in piece.split_inclusive(|&byte| byte == b'\n' || byte == b'\r') {
            // A line may end with both, and begin with a return.
            let is_bare = part == b"\r" || (part == b"\n" && has_returned);
            if begins && !is_bare {
                bytes.extend_from_slice(prefix.as_bytes());
            }
            bytes.extend_from_slice(part);
            has_returned = part.ends_with(b"\r");
            begins = has_returned || part.ends_with(b"\n");
        }
        self.open = (!piece.ends_with(b"\n")).then(|| Arc::clone(prefix));
        self.has_returned = has_returned;
        bytes
    }
}

/// The way of the workers' lines to the console.
#[derive(Clone)]
pub(crate) struct Lines {
    queue: SyncSender<(Arc<str>, Stream, Vec<u8>)>,
    template: Option<Prefix>,
    role: String,
    hostname: String,
    backlog: Backlog,
}

/// How many readers of workers' lines wait for the console at the moment.
#[derive(Clone, Default)]
pub(crate) struct Backlog(Arc<AtomicUsize>);

impl Backlog {
    /// Whether the console is why lines are still in the pipes, and workers may wait to write more.
    pub(crate) fn is_there(&self) -> bool {
        self.0.load(Ordering::Relaxed) > 0
    }
}

impl Lines {
    /// Opens it.
    pub(crate) fn open(spec: &LaunchSpec, news: &SyncSender<News>) -> Result<Lines, LaunchError> {
        let template = match &spec.console {
            Console::Lines { prefix, .. } => prefix.clone(),
            Console::FirstRank => None,
        };
        let mut cursors = [Cursor::default(), Cursor::default()];
        let are_one = are_one(std::io::stdout(), std::io::stderr());
        let queue =
            outlet("phalanx-console", news, move |(prefix, stream, line): (Arc<str>, Stream, Vec<u8>)| {
                let cursor = match stream {
                    Stream::Err if !are_one => 1,
                    Stream::Out | Stream::Err => 0,
                };
                let bytes = cursors[cursor].write(&prefix, &line);
                // A console that is gone (a closed pipe) doesn't end the run.
                let _ = match stream {
                    Stream::Out => whole(std::io::stdout().lock(), &bytes),
                    Stream::Err => whole(std::io::stderr().lock(), &bytes),
                };
            })?;
        Ok(Lines {
            queue,
            template,
            role: spec.role.clone(),
            hostname: host_name(),
            backlog: Backlog::default(),
        })
    }

    /// What stands before the lines of a worker.
    pub(crate) fn prefix(&self, local_rank: usize, rank: Rank) -> Arc<str> {
        let Lines { role, hostname, .. } = self;
        let named = Named { role_name: role, local_rank, rank: rank.index(), hostname };
        self.template.as_ref().map_or("".into(), |template| template.of(named).into())
    }

    /// Hands a line over; waits while the console is behind.
    pub(crate) fn show(&self, prefix: &Arc<str>, stream: Stream, line: Vec<u8>) {
        if let Err(TrySendError::Full(line)) = self.queue.try_send((Arc::clone(prefix), stream, line)) {
            self.backlog.0.fetch_add(1, Ordering::Relaxed);
            let _ = self.queue.send(line);
            self.backlog.0.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// What waits for the console.
    pub(crate) fn backlog(&self) -> &Backlog {
        &self.backlog
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_have_their_prefix_and_are_in_no_others() {
        let check = |pieces: &[(usize, &str)], want: &str| {
            let prefixes: [Arc<str>; 2] = ["a: ".into(), "b: ".into()];
            let mut cursor = Cursor::default();
            let shown =
                pieces.iter().flat_map(|(who, piece)| cursor.write(&prefixes[*who], piece.as_bytes()));
            assert_eq!(String::from_utf8(shown.collect()).unwrap(), want, "{pieces:?}");
        };
        check(&[(0, "one\n"), (1, "two\n"), (0, "\n")], "a: one\nb: two\na: \n");
        // A prompt, and its answer.
        check(&[(0, "name? "), (0, "x\n"), (0, "y\n")], "a: name? x\na: y\n");
        check(&[(0, "name? "), (1, "two\n"), (0, "x\n")], "a: name? \nb: two\na: x\n");
        // Bars write over themselves, and over each other, which is what they do without anybody between.
        check(&[(0, "\r 1%"), (0, "\r 2%"), (0, "\n")], "\ra:  1%\ra:  2%\n");
        check(&[(0, " 1%\r"), (0, " 2%\r\n"), (0, "x\n")], "a:  1%\ra:  2%\r\na: x\n");
        check(&[(0, "\r 1%"), (1, "\r 1%"), (0, "x\n")], "\ra:  1%\rb:  1%\na: x\n");
        check(&[(0, "x\r"), (0, "\n"), (0, "x\r\n\r\n")], "a: x\r\na: x\r\n\r\n");
    }
}
