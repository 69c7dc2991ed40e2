//! The threads of a worker of several devices: one for each device beside the first, whose work the caller's thread does.
//!
//! They live as long as the worker, since a step of a small network takes two milliseconds: one that waits is at work after 27
//! microseconds, of which the caller is kept for 9, where one that is begun anew took 46 and 20 (2 cores of an AMD EPYC, 2026-11-24).

use crate::error::Error;
use phalanx_tensor::Team;
use std::sync::Mutex;

/// Threads that wait for work.
pub(crate) struct DeviceThreads(Team);

impl DeviceThreads {
    /// So many threads, named `name-1` and on. Fails if the system has none left.
    pub(crate) fn new(threads: usize, name: &str) -> Result<DeviceThreads, Error> {
        let team = Team::new(threads, name);
        team.map(DeviceThreads).map_err(|why| Error::Threads { threads, why: why.to_string() })
    }

    /// Does each of `jobs` on a thread of its own, all at once, and `own` on this one; returns when all are done. They may wait for
    /// each other. Panics if one does, when the others have ended; and if there are more jobs than threads.
    pub(crate) fn run<J: Send, R: Send, O>(
        &mut self,
        jobs: Vec<J>,
        work: impl Fn(J) -> R + Sync,
        own: impl FnOnce() -> O,
    ) -> (O, Vec<R>) {
        let n = jobs.len();
        let jobs: Vec<Mutex<Option<J>>> = jobs.into_iter().map(|job| Mutex::new(Some(job))).collect();
        let done: Vec<Mutex<Option<R>>> = (0..n).map(|_| Mutex::new(None)).collect();
        let task = |i: usize| {
            let job = jobs[i].lock().expect("nobody else has it").take();
            let result = work(job.expect("each is done once"));
            *done[i].lock().expect("nobody else has it") = Some(result);
        };
        let own = self.0.run(n, &task, own);
        let result =
            |done: Mutex<Option<R>>| done.into_inner().expect("no task panicked").expect("all are done");
        (own, done.into_iter().map(result).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jobs_come_back_in_their_order() {
        let mut threads = DeviceThreads::new(3, "test").unwrap();
        for n in [3, 0, 2] {
            let (own, done) = threads.run((0..n).collect(), |job: usize| 2 * job, || "own");
            assert_eq!((own, done), ("own", (0..n).map(|job| 2 * job).collect()));
        }
        let (own, done) = DeviceThreads::new(0, "test").unwrap().run(Vec::<()>::new(), |()| (), || 7);
        assert_eq!((own, done.len()), (7, 0));
    }
}
