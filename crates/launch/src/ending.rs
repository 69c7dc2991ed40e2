//! How the end of a worker is waited for, and what it has left behind is ended.
//!
//! The news comes twice: that the process itself has exited, at once, and that nothing of it is left. In between its filters
//! (`exec > >(tee log)`) may still have lines to pass on. The process stays a zombie until the second news is handled, so
//! that its id, which is its group's, belongs to nobody else while signals are sent to it.

use crate::console::Lines;
use crate::foreground::Foreground;
use crate::news::{Berth, How, News};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{Signal, killpg};
use nix::sys::wait::{Id, WaitPidFlag, waitid};
use nix::unistd::Pid;
use std::convert::Infallible;
use std::io::PipeReader;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender};
use std::time::{Duration, Instant};

/// How long what a worker has started may outlive it: filters need it for their last lines.
const FLUSH: Duration = Duration::from_secs(1);
/// From SIGTERM to SIGKILL for what is left then.
const MANNERS: Duration = Duration::from_millis(500);
/// How long the killed have to be gone. What isn't has left the group, and is let go.
const LAST: Duration = Duration::from_millis(100);

/// What is needed to wait for the end of one worker.
pub(crate) struct Ending {
    pub(crate) berth: Berth,
    /// Held open by the worker and all it has started, unless they close descriptors that they don't know.
    pub(crate) life: PipeReader,
    /// Held open by those who read the worker's streams.
    pub(crate) streams: Receiver<Infallible>,
    /// If it has the terminal.
    pub(crate) foreground: Option<Arc<Foreground>>,
    pub(crate) lines: Lines,
    /// Whether somebody waits for the run to end.
    pub(crate) hurry: Arc<AtomicBool>,
    pub(crate) news: SyncSender<News>,
}

impl Ending {
    /// Waits for the process to exit and ends its group.
    pub(crate) fn attend(mut self, pid: Pid) {
        let status = loop {
            match waitid(Id::Pid(pid), WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT) {
                Err(Errno::EINTR) => {}
                status => break status,
            }
        };
        // Before anybody hears of its end, who may be gone right after that.
        drop(self.foreground.take());
        // The queue is read until every worker has ended.
        let _ = self.news.send(News::Exited(self.berth, How::of(status)));
        let mut gone = self.gone_within(FLUSH);
        while !gone && self.held_up() {
            gone = self.gone_within(FLUSH);
        }
        for (signal, patience) in [(Signal::SIGTERM, MANNERS), (Signal::SIGKILL, LAST)] {
            if !gone {
                let _ = killpg(pid, signal);
                gone = self.gone_within(patience);
            }
        }
        // Who closed all that could be seen of it is still in the group.
        let _ = killpg(pid, Signal::SIGKILL);
        let _ = self.news.send(News::Ended(self.berth));
    }

    /// Whether a slow console, and not the worker, is why there are lines left.
    fn held_up(&self) -> bool {
        self.lines.backlog().is_there() && !self.hurry.load(Ordering::Relaxed)
    }

    fn gone_within(&self, patience: Duration) -> bool {
        let until = Instant::now() + patience;
        let left = || until.saturating_duration_since(Instant::now());
        let mut life = [PollFd::new(self.life.as_fd(), PollFlags::empty())];
        let closed = loop {
            match poll(&mut life, PollTimeout::try_from(left()).unwrap_or(PollTimeout::MAX)) {
                Err(Errno::EINTR) => {}
                closed => break closed.is_ok_and(|n| n > 0),
            }
        };
        closed && self.streams.recv_timeout(left()) == Err(RecvTimeoutError::Disconnected)
    }
}
