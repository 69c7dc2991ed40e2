//! Where the threads of a test meet.

use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

/// How long one waits for the others.
const PATIENCE: Duration = Duration::from_secs(60);

/// A barrier that fails a test where one of its threads has failed and will never come, instead of waiting for it.
pub(crate) struct Meeting {
    all: usize,
    came: Mutex<usize>,
    more: Condvar,
}

impl Meeting {
    /// Of so many threads, which may meet any number of times.
    pub(crate) fn of(all: usize) -> Self {
        Self { all, came: Mutex::new(0), more: Condvar::new() }
    }

    /// Waits until all are here.
    #[track_caller]
    pub(crate) fn wait(&self) {
        // Others may have failed here, and each says how many are missing.
        let mut came = self.came.lock().unwrap_or_else(PoisonError::into_inner);
        *came += 1;
        let everybody = came.next_multiple_of(self.all);
        self.more.notify_all();
        let waited = self.more.wait_timeout_while(came, PATIENCE, |came| *came < everybody);
        let (came, _) = waited.unwrap_or_else(PoisonError::into_inner);
        assert!(*came >= everybody, "{} of {} didn't come within {PATIENCE:?}", everybody - *came, self.all);
    }
}
