//! The threads of one device: a fork-join pool whose regions cost about a microsecond.
//!
//! A training step runs dozens of short parallel regions one after the other, so a worker that ran out of tasks spins a
//! little before it sleeps, and the caller always works along. Tasks are claimed from one counter. Results must not depend
//! on who ran a task, so a kernel that sums keeps one partial result a task, never one a thread.

use crate::lock::lock;
use std::any::Any;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;

/// How often an idle worker looks for work before it sleeps: some tens of microseconds, longer than the serial stretches
/// inside a step and shorter than anything a user would notice.
const SPINS_BEFORE_SLEEP: u32 = 4_000;
/// How often the caller looks whether the others have finished before it gives its core away between looks.
const SPINS_BEFORE_YIELD: u32 = 4_000;

type Task<'a> = dyn Fn(usize) + Sync + 'a;
type Panic = Box<dyn Any + Send>;

/// A region in progress: the task function, how many tasks there are, how many were claimed.
#[derive(Clone, Copy)]
struct Region {
    task: *const Task<'static>,
    n_tasks: usize,
}

// SAFETY: the pointer is only followed between the start of a region and its end, while `Team::run` keeps the function
// alive on the caller's stack; the function itself is `Sync`.
unsafe impl Send for Region {}

struct Shared {
    /// Bumped once for each region, after `region` was written.
    epoch: AtomicUsize,
    region: Mutex<Option<Region>>,
    wake: Condvar,
    next_task: AtomicUsize,
    /// Whether the region may be come to ([`OPEN`]), and [`ONE`] for each worker that is in it. While it is 0 what the region points to may
    /// be gone.
    gate: AtomicUsize,
    sleepers: AtomicUsize,
    /// What the first task of the region that panicked did so with.
    panicked: Mutex<Option<Panic>>,
    stop: AtomicBool,
}

const OPEN: usize = 1;
const ONE: usize = 2;

/// Threads that run the tasks of one parallel region at a time.
pub(crate) struct Pool {
    /// Held for the length of a region; a second caller runs its tasks alone instead of waiting.
    team: Mutex<Team>,
    threads: AtomicUsize,
}

/// A fixed set of threads, which wait for work beside a caller's.
///
/// ```
/// use phalanx_tensor::Team;
/// use std::sync::atomic::{AtomicUsize, Ordering};
///
/// let (mut team, sum) = (Team::new(2, "adder")?, AtomicUsize::new(0));
/// let add = |i: usize| {
///     sum.fetch_add(i + 1, Ordering::Relaxed);
/// };
/// let own = team.run(2, &add, || 7);
/// assert_eq!((own, sum.into_inner()), (7, 3));
/// # Ok::<(), std::io::Error>(())
/// ```
pub struct Team {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
}

impl Pool {
    /// A pool of `threads` threads, the caller being one of them; 0 counts as 1.
    pub(crate) fn new(threads: usize) -> Pool {
        let threads = threads.max(1);
        Pool { team: Mutex::new(compute(threads)), threads: AtomicUsize::new(threads) }
    }

    /// Another number of threads from the next region on.
    pub(crate) fn resize(&self, threads: usize) {
        let threads = threads.max(1);
        if threads == self.threads() {
            return;
        }
        // Should the system refuse one, the others go on as they are.
        let other = compute(threads);
        *lock(&self.team) = other;
        self.threads.store(threads, Ordering::Relaxed);
    }

    pub(crate) fn threads(&self) -> usize {
        self.threads.load(Ordering::Relaxed)
    }

    /// Calls `task(0..n_tasks)`, each index once, on all threads; returns when all have returned.
    pub(crate) fn run(&self, n_tasks: usize, task: &Task<'_>) {
        let alone = n_tasks <= 1 || self.threads() == 1;
        let Some(team) = (if alone { None } else { self.team.try_lock().ok() }) else {
            (0..n_tasks).for_each(task);
            return;
        };
        let went = team.during(n_tasks, task, || claim(&team.shared, n_tasks, task));
        // Before a panic goes on, which would poison the lock: then every later caller would work alone.
        drop(team);
        went.unwrap_or_else(|panic| resume_unwind(panic));
    }
}

/// Those of a pool, beside the caller's.
fn compute(threads: usize) -> Team {
    Team::new(threads - 1, "phalanx-cpu").expect("the system refused a thread for the compute pool")
}

impl Team {
    /// So many threads, named `name-1` and on. Fails if the system refuses one.
    pub fn new(threads: usize, name: &str) -> io::Result<Team> {
        let shared = Arc::new(Shared {
            epoch: AtomicUsize::new(0),
            region: Mutex::new(None),
            wake: Condvar::new(),
            next_task: AtomicUsize::new(0),
            gate: AtomicUsize::new(0),
            sleepers: AtomicUsize::new(0),
            panicked: Mutex::new(None),
            stop: AtomicBool::new(false),
        });
        // Should a thread be refused, those before it end with the team.
        let mut team = Team { shared, workers: Vec::with_capacity(threads) };
        for i in 1..=threads {
            let shared = Arc::clone(&team.shared);
            let thread = std::thread::Builder::new().name(format!("{name}-{i}"));
            team.workers.push(thread.spawn(move || work(&shared))?);
        }
        Ok(team)
    }

    /// Calls `task(0..n_tasks)`, each index once and all at once, on these threads, and `own` on the caller's; returns when all have
    /// returned. Tasks may wait for each other and for `own`. Where some of them panic, the caller's panic goes on, or else the first;
    /// panics if there are more tasks than threads.
    pub fn run<O>(&mut self, n_tasks: usize, task: &(dyn Fn(usize) + Sync), own: impl FnOnce() -> O) -> O {
        let threads = self.workers.len();
        assert!(n_tasks <= threads, "Team::run: {n_tasks} tasks for {threads} threads");
        self.during(n_tasks, task, own).unwrap_or_else(|panic| resume_unwind(panic))
    }

    /// Has the threads do these tasks while the caller does `own`, which may claim some of them.
    fn during<O>(&self, n_tasks: usize, task: &Task<'_>, own: impl FnOnce() -> O) -> std::thread::Result<O> {
        let shared = &*self.shared;
        // SAFETY: only the lifetime is changed. Before this function returns or unwinds the region is closed, so that no worker comes to it
        // any more, and those that came have left (the gate is 0): the pointer is never followed after `task` is gone.
        let task_ptr: *const Task<'static> = unsafe { std::mem::transmute(task as *const Task<'_>) };
        {
            let mut region = lock(&shared.region);
            shared.next_task.store(0, Ordering::Relaxed);
            *region = Some(Region { task: task_ptr, n_tasks });
            shared.gate.store(OPEN, Ordering::Release);
            shared.epoch.fetch_add(1, Ordering::Release);
        }
        if shared.sleepers.load(Ordering::SeqCst) > 0 {
            shared.wake.notify_all();
        }
        let own = catch_unwind(AssertUnwindSafe(own));
        wait_until(|| shared.next_task.load(Ordering::Relaxed) >= n_tasks);
        // Nobody waits for those that didn't come before there was nothing left to do.
        shared.gate.fetch_and(!OPEN, Ordering::AcqRel);
        wait_until(|| shared.gate.load(Ordering::Acquire) == 0);
        let theirs = lock(&shared.panicked).take();
        own.and_then(|own| theirs.map_or(Ok(own), Err))
    }
}

fn wait_until(is_so: impl Fn() -> bool) {
    let mut looks = 0u32;
    while !is_so() {
        looks += 1;
        if looks < SPINS_BEFORE_YIELD { std::hint::spin_loop() } else { std::thread::yield_now() }
    }
}

fn claim(shared: &Shared, n_tasks: usize, task: &Task<'_>) {
    loop {
        let i = shared.next_task.fetch_add(1, Ordering::Relaxed);
        if i >= n_tasks {
            return;
        }
        task(i);
    }
}

/// Comes to the region, if one is open.
fn come(shared: &Shared) -> Option<Region> {
    let come = |gate: usize| (gate & OPEN != 0).then_some(gate + ONE);
    shared.gate.fetch_update(Ordering::Acquire, Ordering::Relaxed, come).ok()?;
    *lock(&shared.region)
}

fn work(shared: &Shared) {
    let mut seen = 0;
    loop {
        let mut looks = 0;
        while shared.epoch.load(Ordering::Acquire) == seen {
            looks += 1;
            if looks < SPINS_BEFORE_SLEEP {
                std::hint::spin_loop();
                continue;
            }
            let mut region = lock(&shared.region);
            shared.sleepers.fetch_add(1, Ordering::SeqCst);
            while shared.epoch.load(Ordering::Acquire) == seen && !shared.stop.load(Ordering::Relaxed) {
                region = shared.wake.wait(region).unwrap_or_else(|poisoned| poisoned.into_inner());
            }
            shared.sleepers.fetch_sub(1, Ordering::SeqCst);
            break;
        }
        if shared.stop.load(Ordering::Relaxed) {
            return;
        }
        seen = shared.epoch.load(Ordering::Acquire);
        let Some(region) = come(shared) else { continue };
        // SAFETY: the gate counts this worker until it leaves below, and `Team::during` waits for that before it lets `task` go.
        let task = unsafe { &*region.task };
        // One that panics leaves other tasks to be done.
        while let Err(panic) = catch_unwind(AssertUnwindSafe(|| claim(shared, region.n_tasks, task))) {
            lock(&shared.panicked).get_or_insert(panic);
        }
        shared.gate.fetch_sub(ONE, Ordering::Release);
    }
}

impl Drop for Team {
    fn drop(&mut self) {
        {
            let _region = lock(&self.shared.region);
            self.shared.stop.store(true, Ordering::Relaxed);
            self.shared.epoch.fetch_add(1, Ordering::Release);
        }
        self.shared.wake.notify_all();
        for worker in self.workers.drain(..) {
            // A worker never panics: tasks are caught. The device may be dropped by the worker's own thread at exit.
            if worker.thread().id() != std::thread::current().id() {
                let _ = worker.join();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{Duration, Instant};

    #[test]
    fn where_threads_are_refused_those_before_go_on_together() {
        let pool = Pool::new(2);
        assert!(catch_unwind(AssertUnwindSafe(|| pool.resize(usize::MAX))).is_err());
        assert_eq!(pool.threads(), 2);
        // Each waits for the other.
        let here = AtomicUsize::new(0);
        let deadline = Instant::now() + Duration::from_secs(60);
        pool.run(2, &|_| {
            here.fetch_add(1, Ordering::SeqCst);
            while here.load(Ordering::SeqCst) < 2 {
                assert!(Instant::now() < deadline, "it works alone");
                std::thread::yield_now();
            }
        });
    }

    #[test]
    fn every_task_runs_once() {
        for threads in [1, 2, 3, 7] {
            let pool = Pool::new(threads);
            for n in [0, 1, 2, 3, 100] {
                let runs: Vec<AtomicUsize> = (0..n).map(|_| AtomicUsize::new(0)).collect();
                for _ in 0..50 {
                    pool.run(n, &|i| {
                        runs[i].fetch_add(1, Ordering::Relaxed);
                    });
                }
                assert!(runs.iter().all(|r| r.load(Ordering::Relaxed) == 50), "{threads} threads, {n} tasks");
            }
        }
    }

    #[test]
    fn a_panicking_task_reaches_the_caller_and_the_pool_goes_on() {
        let pool = Pool::new(2);
        let result = catch_unwind(AssertUnwindSafe(|| pool.run(8, &|i| assert_ne!(i, 5, "task 5"))));
        assert!(result.is_err());
        let sum = AtomicUsize::new(0);
        pool.run(8, &|i| {
            sum.fetch_add(i, Ordering::Relaxed);
        });
        assert_eq!(sum.into_inner(), 28);
    }

    #[test]
    fn has_another_number_of_threads_from_the_next_region_on() {
        let pool = Pool::new(1);
        for threads in [3, 2, 2, 1, 0, 4] {
            pool.resize(threads);
            assert_eq!(pool.threads(), threads.max(1));
            // None ends before all have begun one, so each has one of its own.
            let (begun, who) = (AtomicUsize::new(0), Mutex::new(std::collections::HashSet::new()));
            let deadline = Instant::now() + Duration::from_secs(20);
            pool.run(threads, &|_| {
                lock(&who).insert(std::thread::current().id());
                begun.fetch_add(1, Ordering::SeqCst);
                while begun.load(Ordering::SeqCst) < threads {
                    assert!(Instant::now() < deadline, "not all of them came");
                    std::thread::yield_now();
                }
            });
            assert_eq!(lock(&who).len(), threads);
        }
    }

    #[test]
    fn after_a_caught_panic_all_threads_work_again() {
        let pool = Pool::new(2);
        let result = catch_unwind(AssertUnwindSafe(|| pool.run(2, &|_| panic!("both tasks panic"))));
        assert!(result.is_err());
        let (here, deadline) = (AtomicUsize::new(0), Instant::now() + Duration::from_secs(20));
        // Each task waits for the other: one thread alone never ends the first.
        pool.run(2, &|_| {
            here.fetch_add(1, Ordering::SeqCst);
            while here.load(Ordering::SeqCst) < 2 {
                assert!(Instant::now() < deadline, "one thread works alone");
                std::thread::yield_now();
            }
        });
    }

    #[test]
    fn a_team_and_its_caller_may_wait_for_each_other() {
        let (mut team, here) = (Team::new(3, "test").unwrap(), std::thread::current().id());
        for tasks in [3, 1, 0, 2] {
            let (begun, names) = (AtomicUsize::new(0), Mutex::new(std::collections::BTreeMap::new()));
            let deadline = Instant::now() + Duration::from_secs(20);
            let meet = || {
                begun.fetch_add(1, Ordering::SeqCst);
                while begun.load(Ordering::SeqCst) < tasks + 1 {
                    assert!(Instant::now() < deadline, "not all of them came");
                    std::thread::yield_now();
                }
            };
            let task = |i: usize| {
                lock(&names).insert(i, std::thread::current().name().map(str::to_owned));
                meet();
            };
            let own = team.run(tasks, &task, || {
                meet();
                std::thread::current().id()
            });
            assert_eq!(own, here);
            let names = names.into_inner().unwrap();
            assert!(names.keys().copied().eq(0..tasks));
            assert!(names.values().flatten().all(|name| name.starts_with("test-")), "{names:?}");
        }
    }

    #[test]
    fn what_a_team_panics_with_reaches_the_caller_when_all_have_ended() {
        let (mut team, ended) = (Team::new(2, "test").unwrap(), AtomicUsize::new(0));
        let mut run = |own: fn()| {
            let task = |i: usize| {
                assert!(i != 0, "the task that panics");
                ended.fetch_add(1, Ordering::SeqCst);
            };
            let panic = catch_unwind(AssertUnwindSafe(|| team.run(2, &task, own))).unwrap_err();
            *panic.downcast::<&str>().unwrap()
        };
        assert_eq!(run(|| ()), "the task that panics");
        assert_eq!(run(|| panic!("the caller's own")), "the caller's own");
        assert_eq!(ended.load(Ordering::SeqCst), 2);
        assert_eq!(team.run(2, &|_| (), || 3), 3, "it works on");
    }

    /// More threads than cores come to regions that are done before they do, and to none when its tasks are gone.
    #[test]
    fn who_comes_late_finds_nothing_left_and_touches_nothing() {
        let pool = Pool::new(6);
        for round in 0..5000usize {
            let (n, base) = (2 + round % 7, round);
            let done: Vec<AtomicUsize> = (0..n).map(|_| AtomicUsize::new(base)).collect();
            pool.run(n, &|i| {
                assert_eq!(
                    done[i].fetch_add(1, Ordering::Relaxed),
                    base,
                    "a task of another region, or done before"
                );
            });
            assert!(done.iter().all(|done| done.load(Ordering::Relaxed) == base + 1));
        }
    }

    #[test]
    fn a_nested_region_runs_on_its_caller() {
        let pool = Pool::new(2);
        let sum = AtomicUsize::new(0);
        pool.run(4, &|_| {
            pool.run(4, &|i| {
                sum.fetch_add(i, Ordering::Relaxed);
            })
        });
        assert_eq!(sum.into_inner(), 24);
    }
}
