//! Plays schedules: keeps, for each operation, how far each message of the current round is, and moves bytes.
//!
//! Every message begins with a header that says which operation it belongs to. Two ranks in different operations find out
//! with the first header, not by hanging. A message's length is known from the operation, so no length from outside is ever
//! trusted. Operations of a group are played one after the other, in the order in which they were issued.

use crate::element::{ElementKind, Erased, ReduceOp};
use crate::error::Error;
use crate::schedule::{Schedule, Take};
use crate::transport::{Lost, Transport};
use phalanx_wire::{Deadline, Rank};
use std::time::Duration;

/// What an operation is, apart from its buffer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    AllReduce,
    Broadcast,
    ReduceScatter,
    AllGather,
    Barrier,
    /// Point to point: both ends call it a message.
    Message,
}

const KINDS: [(Kind, &str); 6] = [
    (Kind::AllReduce, "all-reduce"),
    (Kind::Broadcast, "broadcast"),
    (Kind::ReduceScatter, "reduce-scatter"),
    (Kind::AllGather, "all-gather"),
    (Kind::Barrier, "barrier"),
    (Kind::Message, "message"),
];

/// The words of an operation that both sides must agree on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Signature {
    pub(crate) kind: Kind,
    /// Collectives of a group are counted together, messages for each pair.
    pub(crate) sequence: u64,
    pub(crate) element: ElementKind,
    pub(crate) count: usize,
    /// The reduction, or the root of a broadcast.
    pub(crate) detail: u32,
}

const HEADER: usize = 32;
const MAGIC: [u8; 4] = *b"plx1";

impl Signature {
    fn encode(&self) -> [u8; HEADER] {
        let mut header = [0; HEADER];
        header[..4].copy_from_slice(&MAGIC);
        header[4] = self.kind as u8;
        header[5] = self.element.code;
        header[8..12].copy_from_slice(&self.detail.to_le_bytes());
        header[16..24].copy_from_slice(&self.sequence.to_le_bytes());
        header[24..].copy_from_slice(&(self.count as u64).to_le_bytes());
        header
    }

    /// What a header from another rank says, for people.
    fn describe_header(header: &[u8; HEADER]) -> String {
        if header[..4] != MAGIC {
            return "something that isn't an operation".into();
        }
        let word = |at: usize| u64::from_le_bytes(header[at..at + 8].try_into().expect("eight bytes"));
        let kind = KINDS.get(usize::from(header[4])).map_or("an unknown operation", |(_, name)| name);
        let detail = u32::from_le_bytes(header[8..12].try_into().expect("four bytes"));
        describe(kind, word(16), word(24), ElementKind::name_of(header[5]), detail)
    }

    pub(crate) fn describe(&self) -> String {
        let name = KINDS[self.kind as usize].1;
        describe(name, self.sequence, self.count as u64, self.element.name, self.detail)
    }
}

fn describe(kind: &str, sequence: u64, count: u64, element: &str, detail: u32) -> String {
    let detail = match kind {
        "all-reduce" | "reduce-scatter" => {
            format!(", {}", OPS.get(detail as usize).copied().unwrap_or("unknown reduction"))
        }
        "broadcast" => format!(" from rank {detail}"),
        _ => String::new(),
    };
    format!("{kind} #{sequence} ({count} x {element}{detail})")
}

const OPS: [&str; 5] = ["sum", "average", "product", "min", "max"];

/// The number of a reduction in a header.
pub(crate) fn reduction(op: ReduceOp) -> u32 {
    match op {
        ReduceOp::Sum => 0,
        ReduceOp::Average => 1,
        ReduceOp::Product => 2,
        ReduceOp::Min => 3,
        ReduceOp::Max => 4,
    }
}

/// How far one message of the current round is, header included.
#[derive(Clone, Default)]
struct Progress {
    done: usize,
    header: [u8; HEADER],
    /// Where a message that isn't taken in place is kept: eight-byte words, so that any element type is aligned in it.
    aside: Vec<u64>,
}

/// One operation being played.
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
        if let Some(round) = self.schedule.rounds.get(self.round) {
            let size = self.element.bytes;
            self.sends = vec![Progress::default(); round.sends.len()];
            self.receives.clear();
            for (_, range, take) in &round.receives {
                let words = if *take == Take::Replace { 0 } else { (range.len() * size).div_ceil(8) };
                self.receives.push(Progress { aside: vec![0; words], ..Progress::default() });
            }
        }
    }

    fn is_done(&self) -> bool {
        self.round >= self.schedule.rounds.len()
    }

    /// Moves what can be moved now; true when the operation is done.
    pub(crate) fn advance(
        &mut self,
        rank: Rank,
        buffer: &mut [u8],
        wires: &mut dyn Transport,
    ) -> Result<bool, Error> {
        while !self.is_done() {
            let lost = |peer: usize, lost: Lost, signature: &Signature| Error::PeerLost {
                operation: signature.describe(),
                peer: Rank(peer as u32),
                reason: lost.0,
            };
            let size = self.element.bytes;
            let round = &self.schedule.rounds[self.round];
            let header = self.signature.encode();
            let mut whole = true;
            for ((to, range), progress) in round.sends.iter().zip(&mut self.sends) {
                let payload = &buffer[range.start * size..range.end * size];
                loop {
                    let rest = match progress.done {
                        n if n < HEADER => &header[n..],
                        n => &payload[n - HEADER..],
                    };
                    if rest.is_empty() {
                        break;
                    }
                    let moved = wires.try_send(*to, rest).map_err(|l| lost(*to, l, &self.signature))?;
                    progress.done += moved;
                    if moved == 0 {
                        whole = false;
                        break;
                    }
                }
            }
            for ((from, range, take), progress) in round.receives.iter().zip(&mut self.receives) {
                let bytes = range.start * size..range.end * size;
                loop {
                    let n = progress.done;
                    let into = if n < HEADER {
                        &mut progress.header[n..]
                    } else if *take == Take::Replace {
                        &mut buffer[bytes.clone()][n - HEADER..]
                    } else {
                        &mut bytemuck::cast_slice_mut::<u64, u8>(&mut progress.aside)[..bytes.len()]
                            [n - HEADER..]
                    };
                    if into.is_empty() {
                        break;
                    }
                    let moved =
                        wires.try_receive(*from, into).map_err(|l| lost(*from, l, &self.signature))?;
                    progress.done += moved;
                    if n < HEADER && progress.done >= HEADER && progress.header != header {
                        return Err(Error::Mismatch {
                            rank,
                            ours: self.signature.describe(),
                            peer: Rank(*from as u32),
                            theirs: Signature::describe_header(&progress.header),
                        });
                    }
                    if moved == 0 {
                        whole = false;
                        break;
                    }
                }
            }
            if !whole {
                return Ok(false);
            }
            self.take(rank, buffer);
            self.round += 1;
            self.enter();
        }
        Ok(true)
    }

    /// Combines what the finished round brought.
    fn take(&mut self, rank: Rank, buffer: &mut [u8]) {
        let size = self.element.bytes;
        let round = &self.schedule.rounds[self.round];
        let in_order = round.receives.iter().any(|(.., take)| *take == Take::InRankOrder);
        if !in_order {
            for ((_, range, take), progress) in round.receives.iter().zip(&self.receives) {
                let bytes = range.start * size..range.end * size;
                if *take == Take::Combine {
                    let from = &bytemuck::cast_slice::<u64, u8>(&progress.aside)[..bytes.len()];
                    (self.element.combine)(self.op, &mut buffer[bytes], from);
                }
            }
            return;
        }
        // Rank 0 first, then 1, 2 and so on: what came stands in the order of ranks, this rank's own buffer in between.
        let len = buffer.len();
        let before = round.receives.iter().filter(|(from, ..)| *from < rank.index()).count();
        let came = |i: usize| &bytemuck::cast_slice::<u64, u8>(&self.receives[i].aside)[..len];
        if before > 0 {
            let mut own = vec![0u64; len.div_ceil(8)];
            let own = &mut bytemuck::cast_slice_mut::<u64, u8>(&mut own)[..len];
            own.copy_from_slice(buffer);
            buffer.copy_from_slice(came(0));
            (1..before).for_each(|i| (self.element.combine)(self.op, buffer, came(i)));
            (self.element.combine)(self.op, buffer, own);
        }
        (before..self.receives.len()).for_each(|i| (self.element.combine)(self.op, buffer, came(i)));
    }

    /// Finishes an average.
    pub(crate) fn finish(&self, world_size: usize, buffer: &mut [u8]) {
        if self.op == ReduceOp::Average {
            (self.element.divide)(buffer, world_size);
        }
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

    /// The error of a wait that was given up.
    pub(crate) fn timeout(&self, deadline: &Deadline) -> Error {
        let (receives, sends) = self.waits_for();
        let mut missing: Vec<Rank> = receives.into_iter().chain(sends).map(|r| Rank(r as u32)).collect();
        missing.sort_unstable();
        missing.dedup();
        Error::Timeout { operation: self.signature.describe(), waited: deadline.waited(), missing }
    }
}

/// The longest single sleep, after which connections are looked at again.
pub(crate) const LONGEST_SLEEP: Duration = Duration::from_millis(500);
