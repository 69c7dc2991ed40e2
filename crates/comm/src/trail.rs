//! How far a rank's host is ahead of its GPU, where that waits for other ranks' GPUs.
//!
//! An operation that is joined is waited for by the compute stream alone, so a rank that is gone could keep a GPU waiting for good, and
//! whoever reads from it. Before the host reads anything that lies behind such operations it comes by here, and waits for them in the
//! order in which the GPU comes to them: each with a deadline, and by the group whose operation it is, which finds a rank that is lost.
//!
//! Operations that a stream records are under way only when they are replayed: then they lie behind one point together, for which the
//! groups of all of them look in turn.

use crate::error::Error;
use crate::gpus::{GpuGroup, GpuWork, Mark};
use phalanx_wire::Deadline;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Where the compute stream of a GPU waits for operations, as far as its host hasn't seen them done. Clones are one.
#[derive(Clone, Default)]
pub struct Trail(Arc<Mutex<Points>>);

#[derive(Default)]
struct Points {
    ahead: VecDeque<Point>,
    /// While operations are recorded: the GPUs that have any of them.
    recorded: Option<Vec<Arc<GpuGroup>>>,
}

struct Point {
    /// Behind the operations.
    mark: Mark,
    /// Whose they are: of one group, unless they were recorded.
    among: Vec<Arc<GpuGroup>>,
    what: String,
}

impl Trail {
    /// Has the compute stream wait for an operation among these GPUs, and gives its numbers back. The host waits only for those among
    /// the same GPUs that have more than `most` behind them, and fails as [`Trail::settle`] does.
    pub fn join<L>(&self, gpus: &Arc<GpuGroup>, work: GpuWork<L>, most: usize) -> Result<L, Error> {
        let what = work.operation().to_owned();
        let lent = work.join()?;
        self.note(gpus, &what)?;
        self.keep(gpus, most)?;
        Ok(lent)
    }

    /// Notes that `what` of these GPUs lies behind all that the compute stream has by now.
    pub fn note(&self, gpus: &Arc<GpuGroup>, what: &str) -> Result<(), Error> {
        if let Some(recorded) = &mut self.points().recorded {
            if !recorded.iter().any(|other| Arc::ptr_eq(other, gpus)) {
                recorded.push(gpus.clone());
            }
            return Ok(());
        }
        self.note_all(std::slice::from_ref(gpus), what)
    }

    /// The same of what has operations of several groups in it, as [`Trail::recorded`] gave them. Does nothing without any.
    pub fn note_all(&self, among: &[Arc<GpuGroup>], what: &str) -> Result<(), Error> {
        let Some(first) = among.first() else { return Ok(()) };
        let mark = first.mark()?;
        self.points().ahead.push_back(Point { mark, among: among.to_vec(), what: what.to_owned() });
        Ok(())
    }

    /// Does `work`, which the compute stream records, so that what is joined is under way with none of it, and nobody waits. Gives the
    /// GPUs whose operations these are, too: whoever replays them notes that.
    pub fn recorded<R>(&self, work: impl FnOnce() -> R) -> (R, Vec<Arc<GpuGroup>>) {
        self.points().recorded = Some(Vec::new());
        let recording = Recording(self);
        let done = work();
        (done, recording.end())
    }

    /// Waits until the GPU has all but the last `most` operations among these GPUs behind it, and with them all that come before.
    /// Fails as [`Trail::settle`] does.
    pub fn keep(&self, gpus: &Arc<GpuGroup>, most: usize) -> Result<(), Error> {
        let is_theirs = |point: &&Point| point.among.iter().any(|other| Arc::ptr_eq(other, gpus));
        self.reach_while(|points| points.iter().filter(is_theirs).count() > most)
    }

    /// Waits until the GPU has all operations behind it. A rank that is lost, a failure of NCCL's, and the time limit of the group whose
    /// operation it is, end that group and what the GPU has of all of them: so nothing keeps it, though what it comes to means nothing.
    pub fn settle(&self) -> Result<(), Error> {
        self.reach_while(|points| !points.is_empty())
    }

    /// Forgets what was given up.
    pub fn forget(&self) {
        self.points().ahead.clear();
    }

    fn reach_while(&self, is_ahead: impl Fn(&VecDeque<Point>) -> bool) -> Result<(), Error> {
        let next = || {
            let mut points = self.points();
            // What was noted before a recording lies outside of it, and is waited for afterwards.
            let is_next = points.recorded.is_none() && is_ahead(&points.ahead);
            if is_next { points.ahead.pop_front() } else { None }
        };
        while let Some(point) = next() {
            if let Err(error) = point.reach() {
                point.give_up(&error.to_string());
                self.give_up(&error.to_string());
                return Err(error);
            }
            point.among[0].take_back(point.mark);
        }
        Ok(())
    }

    /// Ends all that the GPU may still wait for, and the groups whose it is, with this reason: who is gone may be missed by several.
    pub fn give_up(&self, because: &str) {
        self.points().ahead.drain(..).for_each(|point| point.give_up(because));
    }

    /// The list is whole between any two statements that could panic.
    fn points(&self) -> MutexGuard<'_, Points> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Sees to it that the GPU is waited for again after a recording, also one that is given up.
struct Recording<'a>(&'a Trail);

impl Recording<'_> {
    fn end(&self) -> Vec<Arc<GpuGroup>> {
        self.0.points().recorded.take().unwrap_or_default()
    }
}

impl Drop for Recording<'_> {
    fn drop(&mut self) {
        self.end();
    }
}

impl Point {
    /// Waits until the GPU has come here. A rank that is lost is missed by some of the groups alone, so they look after theirs in turn.
    fn reach(&self) -> Result<(), Error> {
        let deadline = Deadline::after(self.among[0].group().timeout());
        if let [gpus] = &self.among[..] {
            return gpus.reach(&self.mark, &self.what, deadline);
        }
        for gpus in self.among.iter().cycle() {
            if gpus.reach_in_turn(&self.mark, &self.what, deadline)? {
                break;
            }
        }
        Ok(())
    }

    fn give_up(&self, because: &str) {
        self.among.iter().for_each(|gpus| gpus.abort(because));
    }
}
