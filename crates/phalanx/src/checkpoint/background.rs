//! The thread that copies and writes checkpoints while training goes on. The one snapshot travels to it and back, so there is never more
//! than one in memory or on its way, and whoever wants to take another knows that the last one is written.

use super::error::CheckpointError;
use super::manifest::{FileEntry, Origin, RunFacts};
use super::position::Position;
use super::snapshot::{Contents, Lent, Snapshot};
use super::store::{PartOf, Store};
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TryRecvError, sync_channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// The thread, as the training loop sees it.
pub(super) struct Background {
    requests: SyncSender<(Box<Snapshot>, Job)>,
    news: Receiver<News>,
    /// Here unless it is being written.
    idle: Option<Box<Snapshot>>,
    /// Whether the thread may still read what it was lent.
    lent: bool,
    /// What became of the part that was written last, until it is asked for.
    part: Option<Result<Vec<FileEntry>, CheckpointError>>,
    /// Taken when the thread is found to have panicked.
    thread: Option<JoinHandle<()>>,
}

/// What the thread is asked for.
enum Job {
    /// To copy this and make a checkpoint of it.
    Whole(Lent),
    /// To write a part, which the snapshot holds.
    Part,
    /// To make a checkpoint of the parts that all have written, which they began to then.
    Commit(Position, Result<Vec<FileEntry>, CheckpointError>, Instant),
}

/// What the thread tells of each request, in this order.
enum News {
    /// What was lent is given back.
    Copied,
    Written(Box<Snapshot>, Written),
    /// Of a part.
    Part(Box<Snapshot>, Result<Vec<FileEntry>, CheckpointError>),
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
    /// Of this rank's part.
    pub(super) contents: Contents,
    pub(super) part: PartOf,
    pub(super) run: RunFacts,
    pub(super) origin: Origin,
}

impl Background {
    /// Starts the thread. It ends when this is dropped, once what it writes is written.
    pub(super) fn start(store: Store, about: About) -> std::io::Result<Background> {
        let (requests, received) = sync_channel::<(Box<Snapshot>, Job)>(1);
        let (news_to, news) = sync_channel(2);
        let thread = thread::Builder::new().name("checkpoint".into()).spawn(move || {
            for (mut snapshot, job) in received {
                let start = Instant::now();
                let About { contents, part, run, origin } = &about;
                let news = match job {
                    Job::Whole(lent) => {
                        snapshot.copy(lent);
                        if news_to.send(News::Copied).is_err() {
                            return;
                        }
                        let committed = store.write(&snapshot, contents, *run, origin);
                        let written = Written::of(&store, snapshot.position.step, committed, start);
                        News::Written(snapshot, written)
                    }
                    Job::Part => {
                        let files = store.write_part(&snapshot, contents, *part);
                        // The next one brings its own.
                        *snapshot = Snapshot::default();
                        News::Part(snapshot, files)
                    }
                    Job::Commit(position, files, begun) => {
                        let committed = store.commit(&position, files, *run, origin);
                        News::Written(snapshot, Written::of(&store, position.step, committed, begun))
                    }
                };
                if news_to.send(news).is_err() {
                    return;
                }
            }
        })?;
        let (idle, thread) = (Some(Box::default()), Some(thread));
        Ok(Background { requests, news, idle, lent: false, part: None, thread })
    }

    /// Whether nothing is being written.
    pub(super) fn is_idle(&self) -> bool {
        self.idle.is_some()
    }

    /// Has a snapshot of this taken and written. Until [`Background::settle`], nobody may write to what is lent. Panics if one
    /// is being written.
    #[track_caller]
    pub(super) fn write(&mut self, lent: Lent) {
        self.lent = true;
        self.ask(|_| Job::Whole(lent));
    }

    /// Has a part written, which `take` puts into the snapshot. Panics if anything is being written.
    #[track_caller]
    pub(super) fn write_part(&mut self, take: impl FnOnce(&mut Snapshot)) {
        self.ask(|snapshot| {
            take(snapshot);
            Job::Part
        });
    }

    /// What became of the part, once nothing is being written.
    pub(super) fn take_part(&mut self) -> Option<Result<Vec<FileEntry>, CheckpointError>> {
        self.part.take()
    }

    /// Has a checkpoint made of the parts that were written, from `begun` on. Panics if anything is being written.
    #[track_caller]
    pub(super) fn commit(
        &mut self,
        position: Position,
        files: Result<Vec<FileEntry>, CheckpointError>,
        begun: Instant,
    ) {
        self.ask(|_| Job::Commit(position, files, begun));
    }

    #[track_caller]
    fn ask(&mut self, job: impl FnOnce(&mut Snapshot) -> Job) {
        let mut snapshot = self.idle.take().expect("one snapshot at a time");
        let job = job(&mut snapshot);
        if self.requests.send((snapshot, job)).is_err() {
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
            News::Part(snapshot, files) => {
                (self.idle, self.part) = (Some(snapshot), Some(files));
                None
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

impl Written {
    /// Of the checkpoint after this step: once it is committed, older ones go.
    fn of(store: &Store, step: u64, committed: Result<PathBuf, CheckpointError>, start: Instant) -> Written {
        let pruned = if committed.is_ok() { store.prune(step) } else { Ok(()) };
        Written { step, committed, pruned, took: start.elapsed() }
    }
}
