//! Whether this agent stood still for a while, as stopped processes do, so that the others may have taken it for lost. Its beats tell.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The beats of an agent.
pub(super) struct Beats {
    seen: Mutex<Seen>,
    /// So long without one is a standstill.
    limit: Duration,
}

struct Seen {
    last: Instant,
    /// When the last standstill ended.
    woke: Option<Instant>,
}

impl Beats {
    pub(super) fn new(limit: Duration) -> Beats {
        Beats { seen: Mutex::new(Seen { last: Instant::now(), woke: None }), limit }
    }

    /// Here is another one.
    pub(super) fn beat(&self) {
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        if now - seen.last >= self.limit {
            seen.woke = Some(now);
        }
        seen.last = now;
    }

    /// Whether there was a standstill just now: that it is over may have been noticed elsewhere first.
    pub(super) fn stood_still(&self) -> bool {
        let seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        seen.last.elapsed() >= self.limit || seen.woke.is_some_and(|woke| woke.elapsed() < self.limit)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_standstill_shows_before_and_after_the_next_beat_and_not_for_ever() {
        let limit = Duration::from_millis(300);
        let beats = Beats::new(limit);
        beats.beat();
        assert!(!beats.stood_still());
        std::thread::sleep(limit);
        assert!(beats.stood_still());
        beats.beat();
        assert!(beats.stood_still());
        let woke = Instant::now();
        while woke.elapsed() < limit * 2 {
            std::thread::sleep(limit / 30);
            beats.beat();
        }
        assert!(!beats.stood_still());
    }
}
