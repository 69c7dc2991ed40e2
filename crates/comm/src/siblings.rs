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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::element::ReduceOp;
    use crate::group::{Group, Place};
    use crate::transport::{Lost, Transport, Waker};
    use crate::word::Word;
    use phalanx_wire::{Generation, Rank};
    use std::sync::mpsc::{Receiver, Sender, channel};
    use std::thread::ThreadId;
    use std::time::Duration;

    const LIMIT: Duration = Duration::from_secs(20);
    const WHILE: Duration = Duration::from_millis(100);

    /// Connections that keep whoever looks at them, but for their owner, and that say who let go of them.
    struct Keeping {
        owner: ThreadId,
        looked_at: Sender<()>,
        let_go: Receiver<()>,
        dropped_by: Sender<ThreadId>,
    }

    impl Transport for Keeping {
        fn try_send(&mut self, _: usize, _: &[u8]) -> Result<usize, Lost> {
            if std::thread::current().id() != self.owner {
                self.looked_at.send(()).unwrap();
                // Nobody says so: the owner lets go of its group meanwhile.
                let _ = self.let_go.recv_timeout(WHILE);
            }
            Ok(0)
        }

        fn try_receive(&mut self, _: usize, _: &mut [u8]) -> Result<usize, Lost> {
            Ok(0)
        }

        fn park(&mut self, _: &[usize], _: &[usize], _: Duration) {}

        fn waker(&self) -> Waker {
            Box::new(|| {})
        }

        fn part(&mut self, _: &Word) {}

        fn name(&self) -> String {
            "nothing".into()
        }
    }

    impl Drop for Keeping {
        fn drop(&mut self) {
            self.dropped_by.send(std::thread::current().id()).unwrap();
        }
    }

    #[test]
    fn who_lets_go_of_a_group_sees_it_off_and_nobody_who_only_moves_it() {
        let owner = std::thread::current().id();
        let ((looked_at, looks), (_quiet, let_go), (dropped_by, drops)) = (channel(), channel(), channel());
        let wires = Keeping { owner, looked_at, let_go, dropped_by };
        let place = Place::in_world(Rank(0), 2, Generation(0), LIMIT);
        let siblings = Arc::clone(&place.siblings);
        let group = Group::over(place, Some(Box::new(wires)));
        drop(group.start_all_reduce(vec![1u8], ReduceOp::Sum));
        std::thread::scope(|scope| {
            scope.spawn(move || siblings.advance());
            looks.recv_timeout(LIMIT).unwrap();
            drop(group);
        });
        assert_eq!(drops.recv_timeout(LIMIT).unwrap(), owner);
    }
}
