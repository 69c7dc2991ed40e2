//! Plays schedules: keeps, for each collective, how far each message of the current round is, and moves bytes.
//!
//! Collectives of a group are played one after the other, in the order in which they were issued.

use crate::common::{Regions, Turn};
use crate::element::{Erased, ReduceOp, Room};
use crate::error::Error;
use crate::mail::{Holder, Mail};
use crate::schedule::{Algorithm, Choice, Round, Schedule, Take};
use crate::signature::{HEADER, Signature};
use crate::transport::{Lost, Transport};
use phalanx_wire::Rank;
use std::ops::Range;
use std::time::Duration;

/// Bytes that are combined at once: so few that they stay in the cache on their way, and a whole number of any elements.
const CHUNK: usize = 128 << 10;

/// How far one message of the current round is, header included.
#[derive(Default)]
struct Progress {
    done: usize,
    /// How much of a chunk is kept aside.
    held: usize,
    /// Where a message that isn't taken in place is kept: all of it, or a chunk.
    aside: Room,
}

/// One collective being played.
pub(crate) struct Play {
    pub(crate) signature: Signature,
    /// The algorithm that was asked for.
    asked: Option<Algorithm>,
    schedule: Schedule,
    element: Erased,
    op: ReduceOp,
    round: usize,
    sends: Vec<Progress>,
    receives: Vec<Progress>,
    /// What is done between the two rounds of an operation in place.
    turn: Option<Turn>,
    /// This rank's own elements, while those of ranks before it take their place.
    own: Room,
}

impl Play {
    pub(crate) fn new(signature: Signature, schedule: Schedule, element: Erased, op: ReduceOp) -> Play {
        let (sends, receives, own) = (Vec::new(), Vec::new(), Room::default());
        let asked = signature.algorithm;
        let signature = Signature { algorithm: Some(schedule.choice.algorithm), ..signature };
        let mut play =
            Play { signature, asked, schedule, element, op, round: 0, sends, receives, turn: None, own };
        play.enter();
        play
    }

    /// The same, with this done between the first round and the second.
    pub(crate) fn with_turn(self, turn: Turn) -> Play {
        Play { turn: Some(turn), ..self }
    }

    /// Whether this is the same operation but for its number.
    pub(crate) fn repeats(&self, signature: &Signature, op: ReduceOp) -> bool {
        Signature { sequence: 0, algorithm: self.asked, ..self.signature }
            == Signature { sequence: 0, ..*signature }
            && self.op == op
            && !self.schedule.uneven
    }

    /// The same once more, under another number, with the memory that it has.
    pub(crate) fn again(mut self: Box<Play>, sequence: u64) -> Box<Play> {
        self.signature.sequence = sequence;
        self.round = 0;
        self.turn.iter_mut().for_each(Turn::restart);
        self.enter();
        self
    }

    fn enter(&mut self) {
        let Some(round) = self.schedule.rounds.get(self.round) else { return };
        self.sends.resize_with(round.sends.len(), Progress::default);
        self.sends.iter_mut().for_each(|progress| progress.done = 0);
        // What was made room for once stays.
        self.receives.resize_with(round.receives.len(), Progress::default);
        for ((_, range, take), progress) in round.receives.iter().zip(&mut self.receives) {
            (progress.done, progress.held) = (0, 0);
            progress.aside.grow(match take {
                Take::Replace => 0,
                Take::Combine => (range.len() * self.element.bytes).min(CHUNK),
                Take::InRankOrder => range.len() * self.element.bytes,
            });
        }
    }

    /// How it is played, and why so.
    pub(crate) fn choice(&self) -> Choice {
        self.schedule.choice
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
        regions: &Regions,
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
            if let Some(turn) = self.turn.as_mut().filter(|turn| !turn.is_done()) {
                mail.took(turn.advance(regions, self.element, self.op));
                if !turn.is_done() {
                    return Ok(false);
                }
            }
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
        let Progress { done, held, aside } = &mut self.receives[i];
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
            let lost = |lost: Lost| lost.into_error(self.signature.describe(), Rank(*from as u32));
            let rest = &mut buffer[bytes.start + came..bytes.end];
            let moved = match take {
                Take::Replace => wires.try_receive(*from, rest).map_err(lost)?,
                Take::InRankOrder => {
                    wires.try_receive(*from, &mut aside.bytes_mut()[came..bytes.len()]).map_err(lost)?
                }
                Take::Combine
                    if *held == 0
                        && let Some(n) =
                            combine_there(wires, *from, rest, self.element, self.op).map_err(lost)? =>
                {
                    n
                }
                Take::Combine => {
                    // The same in two steps: what is kept aside is combined a chunk at a time.
                    let chunk = CHUNK.min(bytes.len() - (came - *held));
                    let moved =
                        wires.try_receive(*from, &mut aside.bytes_mut()[*held..chunk]).map_err(lost)?;
                    *held += moved;
                    if *held == chunk {
                        let into =
                            &mut buffer[bytes.start + came + moved - chunk..bytes.start + came + moved];
                        (self.element.combine)(self.op, into, &aside.bytes()[..chunk]);
                        *held = 0;
                    }
                    moved
                }
            };
            if moved == 0 {
                return Ok(false);
            }
            *done += moved;
            mail.took(moved);
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
            self.own.grow(len);
            self.own.bytes_mut()[..len].copy_from_slice(buffer);
            buffer.copy_from_slice(came(0));
            (1..before).for_each(|i| (self.element.combine)(self.op, buffer, came(i)));
            (self.element.combine)(self.op, buffer, &self.own.bytes()[..len]);
        }
        (before..self.receives.len()).for_each(|i| (self.element.combine)(self.op, buffer, came(i)));
    }

    /// How many bytes of what the current round has for `peer`, or wants from it, have moved, and of how many.
    pub(crate) fn progress(&self, peer: usize) -> (usize, usize) {
        let Some(round) = self.schedule.rounds.get(self.round) else { return (0, 0) };
        let receives =
            round.receives.iter().zip(&self.receives).map(|((from, range, _), p)| (from, range, p));
        let sends = round.sends.iter().zip(&self.sends).map(|((to, range), p)| (to, range, p));
        receives.chain(sends).filter(|(other, ..)| **other == peer).fold(
            (0, 0),
            |(moved, of), (_, range, p)| {
                (moved + p.done.saturating_sub(HEADER), of + range.len() * self.element.bytes)
            },
        )
    }

    /// How many bytes have come and gone, of all rounds.
    pub(crate) fn moved(&self) -> u64 {
        let lengths = |round: &Round| -> usize {
            let receives = round.receives.iter().map(|(_, range, _)| range.len());
            round.sends.iter().map(|(_, range)| range.len()).chain(receives).sum()
        };
        let done = &self.schedule.rounds[..self.round.min(self.schedule.rounds.len())];
        let before: usize = done.iter().map(|round| lengths(round) * self.element.bytes).sum();
        let now =
            self.sends.iter().chain(&self.receives).map(|progress| progress.done.saturating_sub(HEADER));
        (before + if self.is_done() { 0 } else { now.sum::<usize>() }) as u64
    }

    /// The ranks of which the current round wants a message that hasn't begun to come.
    pub(crate) fn lacks(&self) -> Vec<usize> {
        let Some(round) = self.schedule.rounds.get(self.round) else { return Vec::new() };
        let receives = round.receives.iter().zip(&self.receives);
        receives.filter(|(_, progress)| progress.done == 0).map(|((from, ..), _)| *from).collect()
    }

    /// Whether it can go on without anybody else.
    pub(crate) fn is_in_turn(&self) -> bool {
        self.turn.as_ref().is_some_and(Turn::is_under_way)
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

/// Combines what came from a peer where it lies, if the wire can show it and it lies as the elements must; says how many bytes.
fn combine_there(
    wires: &mut dyn Transport,
    from: usize,
    into: &mut [u8],
    element: Erased,
    op: ReduceOp,
) -> Result<Option<usize>, Lost> {
    let Some(there) = wires.look(from)? else { return Ok(None) };
    let n = there.len().min(into.len()).min(CHUNK) / element.bytes * element.bytes;
    if n == 0 || !there.as_ptr().addr().is_multiple_of(element.bytes) {
        return Ok(None);
    }
    (element.combine)(op, &mut into[..n], &there[..n]);
    wires.consume(from, n);
    Ok(Some(n))
}

/// The longest single sleep, after which connections are looked at again.
pub(crate) const LONGEST_SLEEP: Duration = Duration::from_millis(500);
