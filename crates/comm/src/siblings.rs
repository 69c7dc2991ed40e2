//! Groups that come of one world, on one rank: those of them that have something under way are moved by whoever waits in any.
//!
//! A rank may start operations in several groups and wait for them in whatever order; what it doesn't wait for now goes on all
//! the same, so ranks that wait in different orders don't wait for each other for ever.

use crate::queue::Engine;
use std::sync::{Arc, Mutex, PoisonError, TryLockError, Weak};

/// The groups of a rank that may have something under way.
#[derive(Default)]
pub(crate) struct Siblings(Mutex<Vec<Weak<Mutex<Engine>>>>);

/// What became of those that were moved.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Others {
    /// None has anything under way.
    Idle,
    /// Some have, and nothing moved.
    Waiting,
    Moved,
}

impl Siblings {
    /// A group has started something that it isn't done with.
    pub(crate) fn add(&self, engine: &Arc<Mutex<Engine>>) {
        let mut busy = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if !busy.iter().any(|other| other.as_ptr() == Arc::as_ptr(engine)) {
            busy.push(Arc::downgrade(engine));
        }
    }

    /// Moves what can be moved now in all that have something under way, but for those that a thread is in.
    pub(crate) fn advance(&self) -> Others {
        let mut busy = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let engines: Vec<_> = busy.iter().filter_map(Weak::upgrade).collect();
        busy.retain(|engine| engine.strong_count() > 0);
        drop(busy);
        let mut others = Others::Idle;
        for engine in engines {
            match engine.try_lock() {
                Ok(mut engine) if engine.is_busy() => {
                    let before = engine.moved();
                    engine.heed();
                    engine.advance();
                    let moved = engine.moved() != before || !engine.is_busy();
                    others = if moved || others == Others::Moved { Others::Moved } else { Others::Waiting };
                }
                Ok(_) => self.remove(&engine),
                // That thread moves it; one that panicked left nothing to move.
                Err(TryLockError::WouldBlock | TryLockError::Poisoned(_)) => {}
            }
        }
        others
    }

    fn remove(&self, engine: &Arc<Mutex<Engine>>) {
        let mut busy = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        busy.retain(|other| other.as_ptr() != Arc::as_ptr(engine));
    }
}
