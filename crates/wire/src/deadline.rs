//! A point in time that a wait ends at.

use std::time::{Duration, Instant};

/// When a wait is given up.
#[derive(Clone, Copy, Debug)]
pub struct Deadline {
    start: Instant,
    limit: Duration,
}

impl Deadline {
    /// `limit` from now.
    pub fn after(limit: Duration) -> Deadline {
        Deadline { start: Instant::now(), limit }
    }

    /// When the wait began.
    pub fn begun(&self) -> Instant {
        self.start
    }

    /// `limit` from a point in time.
    pub fn starting(start: Instant, limit: Duration) -> Deadline {
        Deadline { start, limit }
    }

    /// What is left; zero when it has passed.
    pub fn remaining(&self) -> Duration {
        self.remaining_at(Instant::now())
    }

    /// What is left at a point in time.
    pub fn remaining_at(&self, now: Instant) -> Duration {
        self.limit.saturating_sub(self.waited_at(now))
    }

    /// How long the wait has lasted.
    pub fn waited(&self) -> Duration {
        self.waited_at(Instant::now())
    }

    /// How long the wait has lasted at a point in time.
    pub fn waited_at(&self, now: Instant) -> Duration {
        now.saturating_duration_since(self.start)
    }

    /// Whether it has passed.
    pub fn expired(&self) -> bool {
        self.remaining().is_zero()
    }
}
