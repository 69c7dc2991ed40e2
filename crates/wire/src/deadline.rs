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

    /// What is left; zero when it has passed.
    pub fn remaining(&self) -> Duration {
        self.limit.saturating_sub(self.start.elapsed())
    }

    /// How long the wait has lasted.
    pub fn waited(&self) -> Duration {
        self.start.elapsed()
    }

    /// Whether it has passed.
    pub fn expired(&self) -> bool {
        self.remaining().is_zero()
    }
}
