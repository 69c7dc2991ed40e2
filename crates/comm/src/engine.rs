//! Plays schedules: keeps, for each collective, how far each message of the current round is, and moves bytes.
//!
//! Collectives of a group are played one after the other, in the order in which they were issued.

use crate::element::{Erased, ReduceOp, Room};
use crate::error::Error;
use crate::mail::{Holder, Mail};
use crate::schedule::{Schedule, Take};
use crate::signature::{HEADER, Signature};
use crate::transport::Transport;
use phalanx_wire::Rank;
use std::ops::Range;
use std::time::Duration;

/// Bytes that are combined at once: so few that they stay in the cache on their way, and a whole number of any elements.
const CHUNK: usize = 128 << 10;

/// How far one message of the current round is, header included.
#[derive(Default)]
struct Progress {
    done: usize,
    /// Where a message that isn't taken in place is kept: all of it, or a chunk.
    aside: Room,
}

/// One collective being played.
pub(crate) struct Play {
    pub(crate) signature: Signature,
    schedule: Schedule,
    element: Erased,
    op: ReduceOp,
    round: usize,
    sends: Vec<Progress>,
    receives: Vec<Progress>,
}

impl Play {
    pub(crate) fn new(signature: Signature, schedule: Schedule, element: Erased, op: ReduceOp) -> Play {
        let mut play =
            Play { signature, schedule, element, op, round: 0, sends: Vec::new(), receives: Vec::new() };
        play.enter();
        play
    }

    fn enter(&mut self) {
        let Some(round) = self.schedule.rounds.get(self.round) else { return };
        self.sends.clear();
        self.sends.resize_with(round.sends.len(), Progress::default);
        // What was made room for once stays.
        self.receives.resize_with(round.receives.len(), Progress::default);
        for ((_, range, take), progress) in round.receives.iter().zip(&mut self.receives) {
            progress.done = 0;
            progress.aside.grow(match take {
                Take::Replace => 0,
                Take::Combine => (range.len() * self.element.bytes).min(CHUNK),
                Take::InRankOrder => range.len() * self.element.bytes,
            });
        }
    }

    fn is_done(&self) -> bool {
        self.round >= self.schedule.rounds.len()
    }

    /// The count that a message's header says.
    fn counted(&self, range: &Range<usize>) -> usize {
        if self.schedule.uneven { range.len() } else { self.signature.count }
    }

    /// Where elements lie in the buffer.
    fn bytes(&self, range: &Range<usize>) -> Range<usize> {
        range.start * self.element.bytes..range.end * self.element.bytes
    }

    /// Moves what can be moved now; true when the operation is done.
    pub(crate) fn advance(
        &mut self,
        rank: Rank,
        buffer: &mut [u8],
        mail: &mut Mail,
        wires: &mut dyn Transport,
    ) -> Result<bool, Error> {
        while !self.is_done() {
            let mut whole = true;
            for i in 0..self.sends.len() {
                whole &= self.send(i, buffer, mail, wires)?;
            }
            for i in 0..self.receives.len() {
                whole &= self.receive(i, buffer, mail, wires)?;
            }
            if !whole {
                return Ok(false);
            }
            self.combine_in_order(rank, buffer);
            self.round += 1;
            self.enter();
        }
        Ok(true)
    }

    /// Sends message `i` of the round as far as it goes now; whether it is whole.
    fn send(
        &mut self,
        i: usize,
        buffer: &[u8],
        mail: &mut Mail,
        wires: &mut dyn Transport,
    ) -> Result<bool, Error> {
        let (to, range) = &self.schedule.rounds[self.round].sends[i];
        let header = self.signature.header(self.counted(range));
        let message = (&header, &buffer[self.bytes(range)]);
        mail.send_part(wires, *to, Holder::Collective(i), message, &mut self.sends[i].done)
    }

    /// Receives message `i` of the round as far as it goes now; whether it is whole.
    fn receive(
        &mut self,
        i: usize,
        buffer: &mut [u8],
        mail: &mut Mail,
        wires: &mut dyn Transport,
    ) -> Result<bool, Error> {
        let (from, range, take) = &self.schedule.rounds[self.round].receives[i];
        let bytes = self.bytes(range);
        let count = self.counted(range);
        let Progress { done, aside } = &mut self.receives[i];
        if *done == HEADER + bytes.len() {
            return Ok(true);
        }
        if *done == 0 {
            let header = self.signature.header(count);
            if !mail.open(wires, *from, Holder::Collective(i), &header)? {
                return Ok(false);
            }
            *done = HEADER;
        }
        while *done < HEADER + bytes.len() {
            let came = *done - HEADER;
            let chunk = came - came % CHUNK;
            let to = match take {
                Take::Replace => &mut buffer[bytes.start + came..bytes.end],
                Take::Combine => &mut aside.bytes_mut()[came - chunk..CHUNK.min(bytes.len() - chunk)],
                Take::InRankOrder => &mut aside.bytes_mut()[came..bytes.len()],
            };
            let moved = wires.try_receive(*from, to).map_err(|lost| Error::PeerLost {
                operation: self.signature.describe(),
                peer: Rank(*from as u32),
                reason: lost.0,
            })?;
            if moved == 0 {
                return Ok(false);
            }
            *done += moved;
            mail.took(moved);
            let end = came + moved;
            if *take == Take::Combine && (end - chunk == CHUNK || end == bytes.len()) {
                let into = &mut buffer[bytes.start + chunk..bytes.start + end];
                (self.element.combine)(self.op, into, &aside.bytes()[..end - chunk]);
            }
        }
        mail.close(*from);
        Ok(true)
    }

    /// Combines what the finished round brought of the ranks' whole buffers: rank 0 first, then 1, 2 and so on, this rank's own
    /// in between.
    fn combine_in_order(&mut self, rank: Rank, buffer: &mut [u8]) {
        let round = &self.schedule.rounds[self.round];
        if round.receives.iter().all(|(.., take)| *take != Take::InRankOrder) {
            return;
        }
        let len = buffer.len();
        let before = round.receives.iter().filter(|(from, ..)| *from < rank.index()).count();
        let came = |i: usize| &self.receives[i].aside.bytes()[..len];
        if before > 0 {
            let mut own = Room::of(len);
            let own = &mut own.bytes_mut()[..len];
            own.copy_from_slice(buffer);
            buffer.copy_from_slice(came(0));
            (1..before).for_each(|i| (self.element.combine)(self.op, buffer, came(i)));
            (self.element.combine)(self.op, buffer, own);
        }
        (before..self.receives.len()).for_each(|i| (self.element.combine)(self.op, buffer, came(i)));
    }

    /// Which ranks the current round still wants something from, and which must still take something.
    pub(crate) fn waits_for(&self) -> (Vec<usize>, Vec<usize>) {
        let Some(round) = self.schedule.rounds.get(self.round) else { return Default::default() };
        let unfinished = |done: usize, len: usize| done < HEADER + len * self.element.bytes;
        let receives = round.receives.iter().zip(&self.receives);
        let sends = round.sends.iter().zip(&self.sends);
        (
            receives
                .filter(|((_, range, _), p)| unfinished(p.done, range.len()))
                .map(|((from, ..), _)| *from)
                .collect(),
            sends.filter(|((_, range), p)| unfinished(p.done, range.len())).map(|((to, _), _)| *to).collect(),
        )
    }
}

/// The longest single sleep, after which connections are looked at again.
pub(crate) const LONGEST_SLEEP: Duration = Duration::from_millis(500);
