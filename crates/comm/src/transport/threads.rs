//! Ranks that are threads of one process: a bounded queue of bytes a direction, and a bell a rank.

use super::{Lost, Transport, Waker};
use crate::word::Word;
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;

/// Bytes that a queue holds before its sender must wait.
const QUEUE_BYTES: usize = 1 << 20;

#[derive(Default)]
struct Queue {
    bytes: VecDeque<u8>,
    closed: bool,
}

/// Rung whenever something changed for a rank; the number counts the rings.
#[derive(Default)]
struct Bell {
    rings: Mutex<u64>,
    changed: Condvar,
}

pub(crate) struct Shared {
    n: usize,
    /// Queue from rank a to rank b at `a * n + b`.
    queues: Vec<Mutex<Queue>>,
    bells: Vec<Bell>,
    /// What each rank said when it left.
    words: Vec<Mutex<Option<Word>>>,
    /// Ends of groups among these threads that their owners haven't taken yet.
    ends: Mutex<HashMap<Name, Vec<Option<Threads>>>>,
}

/// What tells a group among the threads of another from all others: whether it takes that one's place, a number, and its first
/// member.
pub(crate) type Name = (bool, u64, usize);

impl Shared {
    fn queue(&self, from: usize, to: usize) -> MutexGuard<'_, Queue> {
        lock(&self.queues[from * self.n + to])
    }

    /// A rank has left.
    fn lost(&self, rank: usize) -> Lost {
        lock(&self.words[rank])
            .clone()
            .map_or_else(|| Lost::Seen("its thread left the group".into()), Lost::Told)
    }

    fn ring(&self, rank: usize) {
        *lock(&self.bells[rank].rings) += 1;
        self.bells[rank].changed.notify_all();
    }
}

/// A queue is whole between any two statements that could panic.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// End `index` of a group of `n` threads; whoever asks first makes all of them.
pub(crate) fn end_of(shared: &Shared, name: Name, n: usize, index: usize) -> Option<Threads> {
    let mut all = lock(&shared.ends);
    let ends = all.entry(name).or_insert_with(|| threads(n).into_iter().map(Some).collect());
    if ends.len() != n {
        return None;
    }
    let end = ends.get_mut(index).and_then(Option::take);
    if ends.iter().all(Option::is_none) {
        all.remove(&name);
    }
    end
}

/// A thread's end.
pub(crate) struct Threads {
    shared: Arc<Shared>,
    rank: usize,
    heard: u64,
}

/// The ends of `n` threads.
pub(crate) fn threads(n: usize) -> Vec<Threads> {
    let shared = Arc::new(Shared {
        n,
        queues: (0..n * n).map(|_| Mutex::default()).collect(),
        bells: (0..n).map(|_| Bell::default()).collect(),
        words: (0..n).map(|_| Mutex::default()).collect(),
        ends: Mutex::default(),
    });
    (0..n).map(|rank| Threads { shared: Arc::clone(&shared), rank, heard: 0 }).collect()
}

impl Threads {
    pub(crate) fn shared(&self) -> Arc<Shared> {
        Arc::clone(&self.shared)
    }
}

impl Transport for Threads {
    fn try_send(&mut self, to: usize, bytes: &[u8]) -> Result<usize, Lost> {
        let mut queue = self.shared.queue(self.rank, to);
        if queue.closed {
            return Err(self.shared.lost(to));
        }
        let n = bytes.len().min(QUEUE_BYTES - queue.bytes.len());
        queue.bytes.extend(&bytes[..n]);
        drop(queue);
        if n > 0 {
            self.shared.ring(to);
        }
        Ok(n)
    }

    fn try_receive(&mut self, from: usize, into: &mut [u8]) -> Result<usize, Lost> {
        let mut queue = self.shared.queue(from, self.rank);
        let n = into.len().min(queue.bytes.len());
        let (first, second) = queue.bytes.as_slices();
        let split = first.len().min(n);
        into[..split].copy_from_slice(&first[..split]);
        into[split..n].copy_from_slice(&second[..n - split]);
        queue.bytes.drain(..n);
        if n == 0 && queue.closed {
            return Err(self.shared.lost(from));
        }
        drop(queue);
        if n > 0 {
            self.shared.ring(from);
        }
        Ok(n)
    }

    fn park(&mut self, _: &[usize], _: &[usize], at_most: Duration) {
        let bell = &self.shared.bells[self.rank];
        let heard = self.heard;
        let rings = lock(&bell.rings);
        let waited = bell.changed.wait_timeout_while(rings, at_most, |rings| *rings == heard);
        self.heard = *waited.unwrap_or_else(|poisoned| poisoned.into_inner()).0;
    }

    fn waker(&self) -> Waker {
        let (shared, rank) = (Arc::clone(&self.shared), self.rank);
        Box::new(move || shared.ring(rank))
    }

    fn part(&mut self, word: &Word) {
        lock(&self.shared.words[self.rank]).get_or_insert_with(|| word.clone());
        self.close();
    }

    fn name(&self) -> String {
        "threads".into()
    }
}

impl Threads {
    fn close(&mut self) {
        for peer in (0..self.shared.n).filter(|&peer| peer != self.rank) {
            self.shared.queue(self.rank, peer).closed = true;
            self.shared.queue(peer, self.rank).closed = true;
            self.shared.ring(peer);
        }
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.close();
    }
}
