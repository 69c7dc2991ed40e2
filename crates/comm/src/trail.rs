//! How far a rank's host is ahead of its GPU, where that waits for other ranks' GPUs.
//!
//! An operation that is joined is waited for by the compute stream alone, so a rank that is gone could keep a GPU waiting for good, and
//! whoever reads from it. Before the host reads anything that lies behind such operations it comes by here, and waits for them in the
//! order in which the GPU comes to them: each with a deadline, and by the group whose operation it is, which finds a rank that is lost.

use crate::error::Error;
use crate::gpus::{GpuGroup, GpuWork, Mark};
use phalanx_cuda::nccl::Lent;
use phalanx_wire::Deadline;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Where the compute stream of a GPU waits for operations, as far as its host hasn't seen them done. Clones are one.
#[derive(Clone, Default)]
pub struct Trail {
    points: Arc<Mutex<VecDeque<Point>>>,
}

struct Point {
    /// Behind the operation.
    mark: Mark,
    gpus: Arc<GpuGroup>,
    what: String,
}

impl Trail {
    /// Has the compute stream wait for an operation among these GPUs, and gives its numbers back. The host waits only for those among
    /// the same GPUs that have more than `most` behind them, and fails as [`Trail::settle`] does.
    pub fn join<L: Lent>(&self, gpus: &Arc<GpuGroup>, work: GpuWork<L>, most: usize) -> Result<L, Error> {
        let what = work.operation().to_owned();
        let lent = work.join()?;
        self.note(gpus, &what)?;
        self.keep(gpus, most)?;
        Ok(lent)
    }

    /// Notes that `what` of these GPUs lies behind all that the compute stream has by now.
    pub fn note(&self, gpus: &Arc<GpuGroup>, what: &str) -> Result<(), Error> {
        let mark = gpus.mark()?;
        self.points().push_back(Point { mark, gpus: gpus.clone(), what: what.to_owned() });
        Ok(())
    }

    /// Waits until the GPU has all but the last `most` operations among these GPUs behind it, and with them all that come before.
    /// Fails as [`Trail::settle`] does.
    pub fn keep(&self, gpus: &Arc<GpuGroup>, most: usize) -> Result<(), Error> {
        self.reach_while(|points| points.iter().filter(|point| Arc::ptr_eq(&point.gpus, gpus)).count() > most)
    }

    /// Waits until the GPU has all operations behind it. A rank that is lost, a failure of NCCL's, and the time limit of the group whose
    /// operation it is, end that group and what the GPU has of all of them: so nothing keeps it, though what it comes to means nothing.
    pub fn settle(&self) -> Result<(), Error> {
        self.reach_while(|points| !points.is_empty())
    }

    /// Forgets what was given up.
    pub fn forget(&self) {
        self.points().clear();
    }

    fn reach_while(&self, is_ahead: impl Fn(&VecDeque<Point>) -> bool) -> Result<(), Error> {
        let next = || {
            let mut points = self.points();
            if is_ahead(&points) { points.pop_front() } else { None }
        };
        while let Some(Point { mark, gpus, what }) = next() {
            let reached = gpus.reach(mark, &what, Deadline::after(gpus.group().timeout()));
            reached.inspect_err(|error| self.give_up(&error.to_string()))?;
        }
        Ok(())
    }

    /// Ends all that the GPU may still wait for, and the groups whose it is, with this reason: who is gone may be missed by several.
    pub fn give_up(&self, because: &str) {
        self.points().drain(..).for_each(|point| point.gpus.abort(because));
    }

    /// The list is whole between any two statements that could panic.
    fn points(&self) -> MutexGuard<'_, VecDeque<Point>> {
        self.points.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
