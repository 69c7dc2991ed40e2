//! Room for connections that are yet to prove themselves.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard};

/// At most so many strangers at once: the oldest makes room for a newcomer, so that silent ones keep nobody out. `S` is a
/// handle with which a connection can be closed.
pub struct Strangers<S> {
    limit: usize,
    inside: Mutex<(u64, VecDeque<(u64, S)>)>,
}

impl<S> Strangers<S> {
    /// Room for `limit`, at least one.
    pub fn new(limit: usize) -> Strangers<S> {
        Strangers { limit: limit.max(1), inside: Mutex::default() }
    }

    /// Lets a newcomer in: its number for [`Strangers::leave`], and whom it drove out, who is to be closed.
    pub fn enter(&self, handle: S) -> (u64, Option<S>) {
        let mut inside = self.inside();
        let (last, strangers) = &mut *inside;
        let evicted = if strangers.len() >= self.limit { strangers.pop_front() } else { None };
        *last += 1;
        strangers.push_back((*last, handle));
        (*last, evicted.map(|(_, handle)| handle))
    }

    /// Whoever entered with this number has proven itself, or is gone.
    pub fn leave(&self, number: u64) {
        self.inside().1.retain(|(n, _)| *n != number);
    }

    /// Whether nobody is inside.
    pub fn is_empty(&self) -> bool {
        self.inside().1.is_empty()
    }

    /// The queue is whole between any two statements that could panic.
    fn inside(&self) -> MutexGuard<'_, (u64, VecDeque<(u64, S)>)> {
        self.inside.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_makes_room() {
        let strangers = Strangers::new(2);
        let (a, none) = strangers.enter('a');
        assert_eq!(none, None);
        assert_eq!(strangers.enter('b').1, None);
        assert_eq!(strangers.enter('c').1, Some('a'));
        strangers.leave(a);
        let (d, evicted) = strangers.enter('d');
        assert_eq!(evicted, Some('b'));
        strangers.leave(d);
        assert_eq!(strangers.enter('e').1, None);
        assert!(!strangers.is_empty());
    }
}
