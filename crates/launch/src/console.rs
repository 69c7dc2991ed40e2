//! What is shown. A console may stall (a pager, Ctrl-S), so threads of their own write to it: one that stalls holds up the
//! workers' lines, but neither signals nor ends.

use crate::news::News;
use crate::output::{Console, Stream};
use crate::prefix::{Named, Prefix};
use crate::spec::{LaunchError, LaunchSpec};
use phalanx_job::host_name;
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
        let queue =
            outlet("phalanx-console", news, |(prefix, stream, line): (Arc<str>, Stream, Vec<u8>)| {
                let mut bytes = prefix.as_bytes().to_vec();
                bytes.extend_from_slice(&line);
                // A console that is gone (a closed pipe) doesn't end the run.
                let _ = match stream {
                    Stream::Out => std::io::stdout().lock().write_all(&bytes),
                    Stream::Err => std::io::stderr().lock().write_all(&bytes),
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
