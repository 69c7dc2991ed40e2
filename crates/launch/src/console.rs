//! What is shown. A console may stall (a pager, Ctrl-S), so threads of their own write to it: one that stalls holds up the
//! workers' lines, but neither signals nor ends.

use crate::news::News;
use crate::output::{Console, Stream};
use crate::prefix::Named;
use crate::spec::{LaunchError, LaunchSpec};
use nix::unistd::gethostname;
use phalanx_wire::Rank;
use std::io::Write;
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

/// The way of the workers' lines to the console.
#[derive(Clone)]
pub(crate) struct Lines {
    queue: SyncSender<(Rank, Stream, Vec<u8>)>,
    /// How many readers wait for the console at the moment.
    waiting: Arc<AtomicUsize>,
}

impl Lines {
    /// Opens it.
    pub(crate) fn open(spec: &LaunchSpec, news: &SyncSender<News>) -> Result<Lines, LaunchError> {
        let prefix = match &spec.console {
            Console::Lines { prefix, .. } => prefix.as_ref(),
            Console::FirstRank => None,
        };
        let host = gethostname().ok().and_then(|name| name.into_string().ok()).unwrap_or_default();
        let hostname = host.split('.').next().unwrap_or_default();
        let of = |rank| Named { role_name: &spec.role, local_rank: rank, rank, hostname };
        let prefixes: Vec<String> =
            (0..spec.workers).map(|rank| prefix.map_or(String::new(), |p| p.of(of(rank)))).collect();
        let queue = outlet("phalanx-console", news, move |(rank, stream, line): (Rank, Stream, Vec<u8>)| {
            let mut bytes = prefixes[rank.index()].clone().into_bytes();
            bytes.extend_from_slice(&line);
            // A console that is gone (a closed pipe) doesn't end the run.
            let _ = match stream {
                Stream::Out => std::io::stdout().lock().write_all(&bytes),
                Stream::Err => std::io::stderr().lock().write_all(&bytes),
            };
        })?;
        Ok(Lines { queue, waiting: Arc::default() })
    }

    /// Hands a line over; waits while the console is behind.
    pub(crate) fn show(&self, rank: Rank, stream: Stream, line: Vec<u8>) {
        if let Err(TrySendError::Full(line)) = self.queue.try_send((rank, stream, line)) {
            self.waiting.fetch_add(1, Ordering::Relaxed);
            let _ = self.queue.send(line);
            self.waiting.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Whether the console is why lines are still in the pipes.
    pub(crate) fn held_up(&self) -> bool {
        self.waiting.load(Ordering::Relaxed) > 0
    }
}
