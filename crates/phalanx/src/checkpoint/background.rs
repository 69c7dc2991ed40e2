//! The thread that writes checkpoints while training goes on. The one snapshot travels to it and back, so there is never more
//! than one in memory or on its way, and whoever wants to take another knows that the last one is written.

use super::error::CheckpointError;
use super::manifest::RunFacts;
use super::snapshot::{Contents, Snapshot};
use super::store::Store;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TryRecvError, sync_channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// The thread, as the training loop sees it.
pub(super) struct Background {
    requests: SyncSender<Box<Snapshot>>,
    results: Receiver<(Box<Snapshot>, Written)>,
    /// Here unless it is being written.
    idle: Option<Box<Snapshot>>,
    /// Taken when the thread is found to have panicked.
    thread: Option<JoinHandle<()>>,
}

/// What became of a snapshot.
pub(super) struct Written {
    pub(super) step: u64,
    /// The folder of the checkpoint.
    pub(super) committed: Result<PathBuf, CheckpointError>,
    /// Whether the older ones could be removed.
    pub(super) pruned: Result<(), CheckpointError>,
    pub(super) took: Duration,
}

/// What stays the same for all checkpoints of a run.
pub(super) struct About {
    pub(super) contents: Contents,
    pub(super) run: RunFacts,
    pub(super) recipe: Option<String>,
}

impl Background {
    /// Starts the thread. It ends when this is dropped, once what it writes is written.
    pub(super) fn start(store: Store, about: About) -> std::io::Result<Background> {
        let (requests, snapshots) = sync_channel::<Box<Snapshot>>(1);
        let (results_to, results) = sync_channel(1);
        let thread = thread::Builder::new().name("checkpoint".into()).spawn(move || {
            for snapshot in snapshots {
                let written = write(&store, &snapshot, &about);
                if results_to.send((snapshot, written)).is_err() {
                    return;
                }
            }
        })?;
        Ok(Background { requests, results, idle: Some(Box::default()), thread: Some(thread) })
    }

    /// Whether nothing is being written.
    pub(super) fn is_idle(&self) -> bool {
        self.idle.is_some()
    }

    /// Lets `take` fill the snapshot, and has it written. Panics if one is being written.
    #[track_caller]
    pub(super) fn write(&mut self, take: impl FnOnce(&mut Snapshot)) {
        let mut snapshot = self.idle.take().expect("one snapshot at a time");
        take(&mut snapshot);
        if self.requests.send(snapshot).is_err() {
            self.panicked();
        }
    }

    /// What became of the snapshot, once that is known.
    pub(super) fn poll(&mut self) -> Option<Written> {
        match self.results.try_recv() {
            Ok((snapshot, written)) => {
                self.idle = Some(snapshot);
                Some(written)
            }
            Err(TryRecvError::Empty) => None,
            Err(TryRecvError::Disconnected) => self.panicked(),
        }
    }

    /// As [`Background::poll`], but waits until then, if anything is being written; an error if that takes longer.
    pub(super) fn wait(&mut self, patience: Duration) -> Result<Option<Written>, Late> {
        if self.is_idle() {
            return Ok(None);
        }
        match self.results.recv_timeout(patience) {
            Ok((snapshot, written)) => {
                self.idle = Some(snapshot);
                Ok(Some(written))
            }
            Err(RecvTimeoutError::Timeout) => Err(Late),
            Err(RecvTimeoutError::Disconnected) => self.panicked(),
        }
    }

    /// The thread only leaves before the sender does if it panics: a bug, which is the training loop's as well.
    fn panicked(&mut self) -> ! {
        match self.thread.take().expect("a thread panics once").join() {
            Err(panic) => std::panic::resume_unwind(panic),
            Ok(()) => unreachable!("the checkpoint thread ended while it was wanted"),
        }
    }
}

/// The patience is over.
#[derive(Debug)]
pub(super) struct Late;

fn write(store: &Store, snapshot: &Snapshot, about: &About) -> Written {
    let (start, step) = (Instant::now(), snapshot.position.step);
    let committed = store.write(snapshot, &about.contents, about.run, about.recipe.as_deref());
    let pruned = if committed.is_ok() { store.prune(step) } else { Ok(()) };
    Written { step, committed, pruned, took: start.elapsed() }
}
