//! The wires of a simulated group: what is sent is in flight until the world lets it arrive, byte by byte if it likes.
//!
//! A wire keeps its bytes in order; different wires know nothing of each other. A connection ends as real ones do: whoever
//! is at its other end learns of it behind what was still in flight, with the parting word of a rank that leaves; of what a
//! rank sent that dies, and of what was on a connection that is cut, a part is lost.

use super::chance::Chance;
use crate::transport::{Lost, Transport, Waker};
use crate::word::{Why, Word};
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

/// One direction of a wire.
#[derive(Default)]
struct Stream {
    flight: VecDeque<u8>,
    arrived: VecDeque<u8>,
    /// Why nothing comes behind what is in flight.
    ending: Option<Lost>,
    /// Whether its receiver was told so.
    ended: bool,
    /// Why its sender can't send any more, since it was told.
    shut: Option<Lost>,
    /// Nothing arrives, and nobody is told.
    silent: bool,
}

/// All wires of a group.
pub(super) struct Network {
    n: usize,
    /// From rank a to rank b at `a * n + b`.
    streams: Vec<Stream>,
    /// Who closed its end, or had it closed, and how.
    left: Vec<Option<Leave>>,
    /// Pairs, the lower rank first, whose connection was cut.
    cut: Vec<(usize, usize)>,
    /// Bytes that a direction holds.
    pub(super) room: usize,
    /// Ranks for which something changed since the world last asked.
    pub(super) touched: Vec<usize>,
}

/// How a rank left.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) enum Leave {
    Killed,
    /// At its end, with a farewell.
    Done,
    /// With its group.
    Failed,
}

pub(super) type Shared = Arc<Mutex<Network>>;

pub(super) fn lock(network: &Shared) -> MutexGuard<'_, Network> {
    network.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

impl Network {
    pub(super) fn new(n: usize, room: usize) -> Network {
        let streams = (0..n * n).map(|_| Stream::default()).collect();
        Network { n, streams, left: vec![None; n], cut: Vec::new(), room, touched: Vec::new() }
    }

    fn stream(&mut self, from: usize, to: usize) -> &mut Stream {
        &mut self.streams[from * self.n + to]
    }

    /// Whether a rank may rightly say that it lost another: one that failed would have told it why.
    pub(super) fn lost(&self, rank: usize, peer: usize) -> bool {
        matches!(self.left[peer], Some(Leave::Killed | Leave::Done))
            || self.cut.contains(&(rank.min(peer), rank.max(peer)))
    }

    /// How a rank left, if it did.
    pub(super) fn left(&self, rank: usize) -> Option<Leave> {
        self.left[rank]
    }

    /// Lets some of what is under way arrive; false if nothing is.
    pub(super) fn deliver(&mut self, chance: &mut Chance, at_most: usize) -> bool {
        let (n, first) = (self.n, chance.below(self.n * self.n));
        let under_way = |stream: &Stream| {
            !stream.silent && (!stream.flight.is_empty() || stream.ending.is_some() && !stream.ended)
        };
        let all = self.streams.len();
        let Some(at) = (0..all).map(|i| (first + i) % all).find(|&at| under_way(&self.streams[at])) else {
            return false;
        };
        let (from, to) = (at / n, at % n);
        let nobody = self.left[to].is_some();
        let stream = &mut self.streams[at];
        let bytes = stream.flight.len().min(1 + chance.below(at_most));
        let came = stream.flight.drain(..bytes);
        if nobody {
            drop(came);
        } else {
            stream.arrived.extend(came);
        }
        if stream.flight.is_empty()
            && let Some(lost) = stream.ending.clone()
        {
            stream.ended = true;
            self.stream(to, from).shut = Some(lost);
        }
        self.touched.extend([from, to]);
        true
    }

    /// Ends what one rank sends another, behind what is in flight or some of that.
    fn end(&mut self, from: usize, to: usize, lost: Lost, chance: Option<&mut Chance>) {
        let stream = self.stream(from, to);
        if stream.ending.is_none() {
            stream.ending = Some(lost);
            if let Some(chance) = chance {
                let kept = chance.below(stream.flight.len() + 1);
                stream.flight.truncate(kept);
            }
        }
        self.touched.extend([from, to]);
    }

    /// A rank dies; what it sent may be lost.
    pub(super) fn kill(&mut self, rank: usize, chance: &mut Chance) {
        if self.left[rank].is_none() {
            self.left[rank] = Some(Leave::Killed);
            for peer in (0..self.n).filter(|&peer| peer != rank) {
                self.end(rank, peer, Lost::Seen("its connection closed".into()), Some(chance));
            }
        }
    }

    /// A rank leaves with a word, behind all that it sent.
    fn part(&mut self, rank: usize, word: &Word) {
        if self.left[rank].is_none() {
            self.left[rank] = Some(if word.why == Why::Left { Leave::Done } else { Leave::Failed });
            for peer in (0..self.n).filter(|&peer| peer != rank) {
                self.end(rank, peer, Lost::Told(word.clone()), None);
            }
        }
    }

    /// Cuts the connection of two ranks, which both learn.
    pub(super) fn cut(&mut self, a: usize, b: usize, chance: &mut Chance) {
        self.cut.push((a.min(b), a.max(b)));
        self.end(a, b, Lost::Seen("connection reset".into()), Some(chance));
        self.end(b, a, Lost::Seen("connection reset".into()), Some(chance));
    }

    /// Nothing reaches a rank or comes from it any more, and nobody is told; or all that was held back goes on.
    pub(super) fn silence(&mut self, rank: usize, silent: bool) {
        for peer in 0..self.n {
            self.stream(rank, peer).silent = silent;
            self.stream(peer, rank).silent = silent;
        }
    }
}

/// A rank's end.
pub(super) struct Wires {
    pub(super) rank: usize,
    pub(super) network: Shared,
}

impl Transport for Wires {
    fn try_send(&mut self, to: usize, bytes: &[u8]) -> Result<usize, Lost> {
        let mut network = lock(&self.network);
        let room = network.room;
        if network.left[self.rank].is_some() {
            return Err(Lost::Seen("closed here".into()));
        }
        let stream = network.stream(self.rank, to);
        if let Some(lost) = &stream.shut {
            return Err(lost.clone());
        }
        let moved = bytes.len().min(room - (stream.flight.len() + stream.arrived.len()).min(room));
        if stream.ending.is_none() {
            stream.flight.extend(&bytes[..moved]);
        }
        Ok(moved)
    }

    fn try_receive(&mut self, from: usize, into: &mut [u8]) -> Result<usize, Lost> {
        let mut network = lock(&self.network);
        if network.left[self.rank].is_some() {
            return Err(Lost::Seen("closed here".into()));
        }
        let stream = network.stream(from, self.rank);
        let moved = into.len().min(stream.arrived.len());
        if moved == 0 {
            let ended = stream.ending.clone().filter(|_| stream.ended && !into.is_empty());
            return ended.map_or(Ok(0), Err);
        }
        into.iter_mut().zip(stream.arrived.drain(..moved)).for_each(|(to, byte)| *to = byte);
        network.touched.push(from);
        Ok(moved)
    }

    fn park(&mut self, _: &[usize], _: &[usize], _: Duration) {
        panic!("nobody sleeps in a simulated world: it moves its ranks itself");
    }

    fn waker(&self) -> Waker {
        Box::new(|| {})
    }

    fn part(&mut self, word: &Word) {
        lock(&self.network).part(self.rank, word);
    }

    fn name(&self) -> String {
        "a simulated network".into()
    }
}
