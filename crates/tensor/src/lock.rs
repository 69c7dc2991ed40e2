//! Taking a lock.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// The locks of this crate guard whole values only, never ones that are half-written, so one that a panic elsewhere has poisoned is taken
/// as it is.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
