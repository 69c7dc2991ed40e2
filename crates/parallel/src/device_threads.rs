//! The threads of a worker of several devices: one for each device beside the first, whose work the caller's thread does.
//!
//! They live as long as the worker, since a step of a small network takes two milliseconds: one that waits is at work after 27
//! microseconds, of which the caller is kept for 9, where one that is begun anew took 46 and 20 (2 cores of an AMD EPYC, 2026-11-24).

use crate::error::Error;
use rayon::{ThreadPool, ThreadPoolBuilder};
use std::sync::Mutex;

/// Threads that wait for work.
pub(crate) struct DeviceThreads {
    /// None of no threads, by which a pool understands one a core.
    pool: Option<ThreadPool>,
}

impl DeviceThreads {
    /// So many threads, named `name-1` and on. Fails if the system has none left.
    pub(crate) fn new(threads: usize, name: &'static str) -> Result<DeviceThreads, Error> {
        if threads == 0 {
            return Ok(DeviceThreads { pool: None });
        }
        let builder = ThreadPoolBuilder::new().num_threads(threads);
        let pool = builder.thread_name(move |i| format!("{name}-{}", i + 1)).build();
        let pool = pool.map_err(|why| Error::Threads { threads, why: why.to_string() })?;
        Ok(DeviceThreads { pool: Some(pool) })
    }

    /// Does each of `jobs` on a thread of its own, all at once, and `own` on this one; returns when all are done. They may wait for
    /// each other. Panics if one does, when the others have ended; and if there are more jobs than threads.
    pub(crate) fn run<J: Send, R: Send, O>(
        &self,
        jobs: Vec<J>,
        work: impl Fn(J) -> R + Sync,
        own: impl FnOnce() -> O,
    ) -> (O, Vec<R>) {
        let threads = self.pool.as_ref().map_or(0, ThreadPool::current_num_threads);
        assert!(jobs.len() <= threads, "{} jobs for {threads} threads", jobs.len());
        let Some(pool) = &self.pool else { return (own(), Vec::new()) };
        let places: Vec<Mutex<(Option<J>, Option<R>)>> =
            jobs.into_iter().map(|job| Mutex::new((Some(job), None))).collect();
        let own = pool.in_place_scope(|scope| {
            scope.spawn_broadcast(|_, thread| {
                let Some(place) = places.get(thread.index()) else { return };
                let lock = || place.lock().expect("only this thread has it now");
                let job = lock().0.take().expect("each thread comes once");
                let done = work(job);
                lock().1 = Some(done);
            });
            own()
        });
        let done = places.into_iter().map(|place| {
            let (_, done) = place.into_inner().expect("nobody panicked");
            done.expect("all threads came, and none panicked")
        });
        (own, done.collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Barrier;

    #[test]
    fn jobs_wait_for_each_other_and_for_the_caller() {
        let threads = DeviceThreads::new(3, "test").unwrap();
        let here = std::thread::current().id();
        for jobs in [3, 1, 0, 2] {
            let together = Barrier::new(jobs + 1);
            let work = |job: usize| {
                together.wait();
                (job, std::thread::current().name().map(str::to_owned))
            };
            let (own, done) = threads.run((0..jobs).collect(), work, || {
                together.wait();
                std::thread::current().id()
            });
            assert_eq!(own, here);
            let want = (0..jobs).map(|job| (job, Some(format!("test-{}", job + 1))));
            assert!(done.into_iter().eq(want));
        }
    }

    #[test]
    fn a_crew_of_nobody_leaves_the_caller_alone() {
        let threads = DeviceThreads::new(0, "test").unwrap();
        let (own, done) = threads.run(Vec::<()>::new(), |()| (), || 7);
        assert_eq!((own, done.len()), (7, 0));
    }

    #[test]
    fn a_panic_goes_on_when_the_others_have_ended() {
        let threads = DeviceThreads::new(2, "test").unwrap();
        let ended = Mutex::new(0);
        let whole = || {
            threads.run(
                vec![false, true],
                |panics| {
                    assert!(!panics, "the job that panics");
                    std::thread::sleep(std::time::Duration::from_millis(20));
                    *ended.lock().unwrap() += 1;
                },
                || *ended.lock().unwrap() += 1,
            )
        };
        let panic = std::panic::catch_unwind(std::panic::AssertUnwindSafe(whole)).unwrap_err();
        assert_eq!(panic.downcast_ref::<&str>(), Some(&"the job that panics"));
        assert_eq!(*ended.lock().unwrap(), 2);
        // And works on.
        let (_, done) = threads.run(vec![1, 2], |job| 2 * job, || ());
        assert_eq!(done, [2, 4]);
    }
}
