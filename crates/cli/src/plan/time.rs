//! How long steps take on other numbers of workers, by what they compute and what they send.

use crate::bench::WORTH;
use serde::Serialize;

/// Nobody asks for more.
const MOST_WORKERS: usize = 1024;

/// What each worker sends in a step. In rings that is a share of all gradients or values which grows with the workers, up to the whole.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Sends {
    /// Bytes that endlessly many would each send.
    whole: f64,
}

impl Sends {
    /// By what each of so many, at least two, sends.
    pub(super) fn of(bytes: u64, workers: usize) -> Sends {
        let n = workers.max(2) as f64;
        Sends { whole: bytes as f64 * n / (n - 1.0) }
    }

    fn by_each_of(self, workers: usize) -> f64 {
        let n = workers as f64;
        self.whole * (n - 1.0) / n
    }
}

/// A step of so many workers.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(super) struct Expected {
    pub(super) workers: usize,
    /// Samples of each.
    pub(super) batch: f64,
    /// Where all that is sent goes beside the computing, as far as that lasts.
    pub(super) ms_from: f64,
    /// Where nothing does.
    pub(super) ms_to: f64,
}

/// A measured step, and the way between workers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Pace {
    /// How long a step of one worker takes.
    pub(super) step_ms: f64,
    /// With so many samples.
    pub(super) batch: f64,
    /// GB a second that each can send.
    pub(super) link: f64,
}

impl Pace {
    /// A step of `samples` samples in all, dealt to so many workers.
    pub(super) fn on(self, samples: f64, workers: usize, sends: Sends) -> Expected {
        let batch = samples / workers as f64;
        let compute = self.step_ms * batch / self.batch;
        let sending = sends.by_each_of(workers) / self.link / 1e6;
        Expected { workers, batch, ms_from: compute.max(sending), ms_to: compute + sending }
    }

    /// The same samples on 1, 2, 4 and so on workers, as long as each has one.
    pub(super) fn over(self, samples: f64, sends: Sends) -> Vec<Expected> {
        let counts = std::iter::successors(Some(1), |n| Some(2 * n));
        counts
            .take_while(|&n| n <= MOST_WORKERS && n as f64 <= samples)
            .map(|n| self.on(samples, n, sends))
            .collect()
    }
}

/// The last count that is worth asking for, all before it being so: those that are added to half as many do at least half of what a lone
/// worker does.
pub(super) fn worth(expected: &[Expected], ms: impl Fn(&Expected) -> f64) -> usize {
    let speed_up = |i: usize| ms(&expected[0]) / ms(&expected[i]).max(f64::MIN_POSITIVE);
    let is_worth = |&i: &usize| {
        let added = (expected[i].workers - expected[i - 1].workers) as f64;
        speed_up(i) - speed_up(i - 1) >= WORTH * added
    };
    let last = (1..expected.len()).take_while(is_worth).last().unwrap_or(0);
    expected[last].workers
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_sent_grows_up_to_the_whole() {
        // An all-reduce of 100 bytes: twice the share of the others.
        let sends = Sends::of(150, 4);
        assert_eq!([1, 2, 4].map(|n| sends.by_each_of(n)), [0.0, 100.0, 150.0]);
    }

    #[test]
    fn more_workers_are_worth_it_until_sending_takes_as_long_as_computing() {
        let pace = Pace { step_ms: 100.0, batch: 64.0, link: 1.0 };
        // 10 MB in all of a GB a second are 10 ms, where 64 samples take 100.
        let over = pace.over(256.0, Sends { whole: 1e7 });
        assert_eq!((over.len(), over[0].ms_to, over[2].batch), (9, 400.0, 64.0));
        let at = |n: usize| over.iter().find(|expected| expected.workers == n).unwrap();
        assert_eq!((at(4).ms_from, at(4).ms_to), (100.0, 107.5));
        // With 16, 25 ms of computing and 9.4 of sending: 11.6 times as fast; with 32, 12.5 and 9.7: 18; with 64, 6.25 and 9.8: 24.9.
        assert_eq!(worth(&over, |expected| expected.ms_to), 16);
        // Sent beside it, it counts once it takes longer: 40 times at best.
        assert_eq!(worth(&over, |expected| expected.ms_from), 32);
        assert_eq!(worth(&over[..1], |expected| expected.ms_to), 1);
        // Who sends nothing is always worth it.
        assert_eq!(worth(&pace.over(8.0, Sends { whole: 0.0 }), |expected| expected.ms_to), 8);
    }
}
