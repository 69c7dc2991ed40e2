//! Where the time of a device goes: kernel by kernel, for `phalanx bench step --profile`.
//!
//! A kernel names itself when it is entered and is timed until it returns; what it calls by another name is timed under that
//! name alone. While nobody asked, that costs the reading of one flag. Threads that use one device at once are timed together.
//!
//! A GPU is timed by events around all that its compute stream is given (`phalanx_cuda::Timed`), by what it is and its sizes; a pass that
//! is replayed is one thing.

use crate::lock::lock;
use std::borrow::Cow;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// How often a kernel ran, and how long in all.
#[derive(Clone, Debug, PartialEq)]
pub struct KernelTime {
    /// Which kernel; of a GPU, with its sizes.
    pub name: Cow<'static, str>,
    /// How often it ran.
    pub calls: u64,
    /// How long in all.
    pub total: Duration,
}

/// The times of one device.
#[derive(Default)]
pub(crate) struct Profile {
    wanted: AtomicBool,
    times: Mutex<Times>,
}

#[derive(Default)]
struct Times {
    ended: Vec<KernelTime>,
    /// Kernels that were entered, each within the one before, and since when the last is timed.
    inside: Vec<&'static str>,
    since: Option<Instant>,
}

impl Times {
    /// Credits the time until now to the innermost kernel.
    fn settle(&mut self) {
        let now = Instant::now();
        if let (Some(since), Some(&name)) = (self.since.replace(now), self.inside.last()) {
            self.of(name).total += now - since;
        }
    }

    fn of(&mut self, name: &'static str) -> &mut KernelTime {
        let i = self.ended.iter().position(|time| time.name == name).unwrap_or_else(|| {
            self.ended.push(KernelTime { name: name.into(), calls: 0, total: Duration::ZERO });
            self.ended.len() - 1
        });
        &mut self.ended[i]
    }
}

impl Profile {
    fn times(&self) -> MutexGuard<'_, Times> {
        lock(&self.times)
    }

    /// Forgets all times and takes new ones from now on.
    pub(crate) fn start(&self) {
        *self.times() = Times::default();
        self.wanted.store(true, Ordering::Relaxed);
    }

    /// Takes no more times; those that were taken, the longest first.
    pub(crate) fn stop(&self) -> Vec<KernelTime> {
        self.wanted.store(false, Ordering::Relaxed);
        let mut times = std::mem::take(&mut *self.times()).ended;
        times.sort_by_key(|time| std::cmp::Reverse(time.total));
        times
    }

    pub(crate) fn time(&self, name: &'static str) -> Timer<'_> {
        if !self.wanted.load(Ordering::Relaxed) {
            return Timer(None);
        }
        let mut times = self.times();
        times.settle();
        times.inside.push(name);
        times.of(name).calls += 1;
        Timer(Some(self))
    }
}

/// Ends the time of a kernel when it is dropped.
pub(crate) struct Timer<'a>(Option<&'a Profile>);

impl Drop for Timer<'_> {
    fn drop(&mut self) {
        if let Some(profile) = self.0 {
            let mut times = profile.times();
            times.settle();
            times.inside.pop();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_goes_to_the_innermost_kernel_and_only_while_wanted() {
        let profile = Profile::default();
        drop(profile.time("before"));
        profile.start();
        let wait = || {
            let start = Instant::now();
            while start.elapsed() < Duration::from_millis(2) {}
        };
        {
            let _outer = profile.time("outer");
            let inner = profile.time("inner");
            wait();
            wait();
            drop(inner);
            wait();
        }
        drop(profile.time("inner"));
        let times = profile.stop();
        drop(profile.time("after"));
        // A busy machine may have let any of them wait.
        assert!(times.is_sorted_by(|a, b| a.total >= b.total), "{times:?}");
        let of = |name| {
            let found = times.iter().find(|time| time.name == name);
            found.map(|time| (time.calls, time.total >= Duration::from_millis(2 * time.calls)))
        };
        assert_eq!((times.len(), of("inner"), of("outer")), (2, Some((2, true)), Some((1, true))));
        assert!(profile.stop().is_empty());
    }
}
