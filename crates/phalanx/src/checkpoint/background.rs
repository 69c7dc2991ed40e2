//! The thread that copies and writes checkpoints while training goes on. The one snapshot travels to it and back, so there is never more
//! than one in memory or on its way, and whoever wants to take another knows that the last one is written.

use super::error::CheckpointError;
use super::manifest::RunFacts;
use super::snapshot::{Contents, Lent, Snapshot};
use super::store::Store;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TryRecvError, sync_channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// The thread, as the training loop sees it.
pub(super) struct Background {
    requests: SyncSender<(Box<Snapshot>, Lent)>,
    news: Receiver<News>,
    /// Here unless it is being written.
    idle: Option<Box<Snapshot>>,
    /// Whether the thread may still read what it was lent.
    lent: bool,
    /// Taken when the thread is found to have panicked.
    thread: Option<JoinHandle<()>>,
}

/// What the thread tells of each request, in this order.
#[expect(clippy::large_enum_variant, reason = "there are two a checkpoint")]
enum News {
    /// What was lent is given back.
    Copied,
    Written(Box<Snapshot>, Written),
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
        let (requests, received) = sync_channel::<(Box<Snapshot>, Lent)>(1);
        let (news_to, news) = sync_channel(2);
        let thread = thread::Builder::new().name("checkpoint".into()).spawn(move || {
            for (mut snapshot, lent) in received {
                snapshot.copy(lent);
                if news_to.send(News::Copied).is_err() {
                    return;
                }
                let written = write(&store, &snapshot, &about);
                if news_to.send(News::Written(snapshot, written)).is_err() {
                    return;
                }
            }
        })?;
        Ok(Background { requests, news, idle: Some(Box::default()), lent: false, thread: Some(thread) })
    }

    /// Whether nothing is being written.
    pub(super) fn is_idle(&self) -> bool {
        self.idle.is_some()
    }

    /// Has a snapshot of this taken and written. Until [`Background::settle`], nobody may write to what is lent. Panics if one
    /// is being written.
    #[track_caller]
    pub(super) fn write(&mut self, lent: Lent) {
        let snapshot = self.idle.take().expect("one snapshot at a time");
        self.lent = true;
        if self.requests.send((snapshot, lent)).is_err() {
            self.panicked();
        }
    }

    /// Waits until nothing is lent; an error if that takes longer.
    pub(super) fn settle(&mut self, patience: Duration) -> Result<(), Late> {
        if self.lent {
            self.next(Instant::now() + patience)?;
        }
        Ok(())
    }

    /// What became of the snapshot, once that is known.
    pub(super) fn poll(&mut self) -> Option<Written> {
        loop {
            match self.news.try_recv() {
                Ok(news) => {
                    if let Some(written) = self.heed(news) {
                        return Some(written);
                    }
                }
                Err(TryRecvError::Empty) => return None,
                Err(TryRecvError::Disconnected) => self.panicked(),
            }
        }
    }

    /// As [`Background::poll`], but waits until then, if anything is being written; an error if that takes longer.
    pub(super) fn wait(&mut self, patience: Duration) -> Result<Option<Written>, Late> {
        let until = Instant::now() + patience;
        while !self.is_idle() {
            if let Some(written) = self.next(until)? {
                return Ok(Some(written));
            }
        }
        Ok(None)
    }

    /// Waits for news, and says what became of the snapshot if they tell.
    fn next(&mut self, until: Instant) -> Result<Option<Written>, Late> {
        match self.news.recv_timeout(until.saturating_duration_since(Instant::now())) {
            Ok(news) => Ok(self.heed(news)),
            Err(RecvTimeoutError::Timeout) => Err(Late),
            Err(RecvTimeoutError::Disconnected) => self.panicked(),
        }
    }

    fn heed(&mut self, news: News) -> Option<Written> {
        self.lent = false;
        match news {
            News::Copied => None,
            News::Written(snapshot, written) => {
                self.idle = Some(snapshot);
                Some(written)
            }
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

/// A run that fails leaves its arenas to whoever began it, and nobody reads them behind their back.
impl Drop for Background {
    fn drop(&mut self) {
        if self.lent {
            // Whether they come or the thread has panicked: nothing is lent then.
            let _ = self.news.recv_timeout(super::PATIENCE);
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
