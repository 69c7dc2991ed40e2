//! Messages between two ranks, and who has a wire when.
//!
//! A wire carries whole messages, one after the other: those of collectives, and *letters*, which ranks send each other under
//! a tag. A collective that looks for its message takes in the letters that come before it; one that nobody asked for yet is
//! set aside, up to [`MAX_ASIDE`], or to as much as this rank sends itself. What is more than that stays on its wire, and its sender
//! waits, until it is asked for; only where this rank waits for what comes behind it that is an error. Between two ranks, letters
//! with the same tag are received in the order in which they were sent. Whoever waits for a letter of its own to be taken reads
//! what all others send, so ranks may send to each other at once, in a ring too, whatever the size: of those that wait for each other
//! in a ring, one at least gets no more than it sends.
//!
//! Letters that are to go out have no bound: they are the caller's own buffers, and one more is there only because the caller
//! made it; to hold up whoever starts to send would take from it what starting is for.

mod reading;
mod told;

use crate::buffer::{AnyBuffer, Plain};
use crate::element::Room;
use crate::error::Error;
use crate::signature::{HEADER, Header, Signature};
use crate::transport::{Lost, Transport};
use crate::word::Why;
use phalanx_wire::Rank;
use std::collections::VecDeque;
use std::time::Instant;

/// Bytes of letters that may wait to be asked for, of a rank that sends less itself.
const MAX_ASIDE: usize = 1 << 30;

/// Letters of more bytes are put on a shelf, where the transport has one: what is shorter goes through at once.
const LONG: usize = 64 << 10;

/// Bytes of a message that are worth a copy beside its header.
const SMALL: usize = 256;

/// What has a direction of a wire, from the first byte of a message to its last.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) enum Holder {
    Nobody,
    /// A message of the current round of the collective that is being played.
    Collective(usize),
    Letter,
}

/// The wire to one peer.
struct Line {
    sender: Holder,
    reader: Holder,
    /// The header that comes next, and how much of it came.
    head: Header,
    got: usize,
    /// Where the elements of the letter lie that it announces, if not behind it.
    shelf: Option<u32>,
    outgoing: VecDeque<Outgoing>,
    arriving: Option<Arriving>,
    /// Letters that came and that nobody asked for yet.
    aside: VecDeque<Letter>,
    /// Letters that were sent.
    letters: u64,
    /// Bytes that went out, headers included.
    sent: u64,
    /// Why nothing comes any more, once that was seen: a transport may say it only now and then.
    gone: Option<Lost>,
    /// The last header that came, and when.
    heard: Option<(Header, Instant)>,
    /// The operation that the peer asked about last, and waits in.
    asked: Option<Header>,
    /// The number of the last operation that the peer was asked about.
    questioned: u64,
}

struct Outgoing {
    /// None for a question, which nobody waits for.
    ticket: Option<u64>,
    header: Header,
    buffer: Box<dyn AnyBuffer>,
    /// Whether the elements lie on a shelf, and the header says where.
    is_shelved: bool,
    done: usize,
}

/// A letter that was asked for.
pub(crate) struct Wanted {
    pub(crate) ticket: u64,
    /// From this rank, or from any.
    pub(crate) from: Option<usize>,
    /// Of which the sequence number means nothing where it may come from any rank.
    pub(crate) signature: Signature,
    pub(crate) buffer: Box<dyn AnyBuffer>,
}

/// A letter of which some bytes came.
struct Arriving {
    header: Header,
    into: Place,
    /// Where it lies, if it doesn't come behind its header.
    shelf: Option<u32>,
    bytes: usize,
    done: usize,
}

enum Place {
    Wanted(Wanted),
    Aside(Room),
}

struct Letter {
    header: Header,
    room: Room,
    bytes: usize,
}

/// A letter that was sent or received.
pub(crate) struct Delivered {
    pub(crate) ticket: u64,
    pub(crate) buffer: Box<dyn AnyBuffer>,
    pub(crate) peer: usize,
}

/// A rank's letters, and its wires' state.
pub(crate) struct Mail {
    rank: Rank,
    lines: Vec<Line>,
    wanted: VecDeque<Wanted>,
    aside_bytes: usize,
    /// Bytes of letters that may wait to be asked for.
    most_aside: usize,
    /// Whether there was a letter for which there was no room.
    is_full: bool,
    delivered: Vec<Delivered>,
    /// Bytes that came in, except those that collectives take themselves.
    moved: u64,
    /// Whose letters are looked at first, so that nobody is passed over.
    turn: usize,
    /// Whether letters of all ranks are taken in whatever is waited for.
    listening: bool,
    /// When somebody last looked at the clock: near enough for people.
    now: Instant,
}

/// What keeping a letter of so many bytes takes.
fn weight(bytes: usize) -> usize {
    bytes + size_of::<Letter>()
}

fn lost_in(header: &Header, peer: usize, lost: Lost) -> Error {
    lost.into_error(header.describe(), Rank(peer as u32))
}

impl Line {
    /// Whether a header came of something that can't be taken now.
    fn stands(&self) -> bool {
        self.reader == Holder::Nobody && self.got == HEADER
    }

    /// Sends a letter as far as it goes now, one that is long by way of the shelf if there is room; whether it is whole.
    fn send_letter(
        &mut self,
        wires: &mut dyn Transport,
        to: usize,
        letter: &mut Outgoing,
    ) -> Result<bool, Lost> {
        let payload = &*letter.buffer.bytes();
        let is_new = letter.done == 0 && !letter.is_shelved;
        if is_new
            && payload.len() > LONG
            && let Some(at) = wires.shelve(to, payload)?
        {
            letter.header = letter.header.shelved(at);
            letter.is_shelved = true;
            self.sent += payload.len() as u64;
        }
        let follows = if letter.is_shelved { &[] } else { payload };
        self.send(wires, to, Holder::Letter, (&letter.header, follows), &mut letter.done)
    }

    /// Sends a message as far as it goes now; whether it is whole.
    fn send(
        &mut self,
        wires: &mut dyn Transport,
        to: usize,
        holder: Holder,
        (header, payload): (&Header, &[u8]),
        done: &mut usize,
    ) -> Result<bool, Lost> {
        while *done < HEADER + payload.len() {
            if self.sender != Holder::Nobody && self.sender != holder {
                return Ok(false);
            }
            let moved = if *done == 0 && payload.len() <= SMALL {
                // In one piece, which over TCP is one segment.
                let mut both = [0; HEADER + SMALL];
                both[..HEADER].copy_from_slice(&header.0);
                both[HEADER..][..payload.len()].copy_from_slice(payload);
                wires.try_send(to, &both[..HEADER + payload.len()])?
            } else {
                let rest = if *done < HEADER { &header.0[*done..] } else { &payload[*done - HEADER..] };
                wires.try_send(to, rest)?
            };
            if moved == 0 {
                return Ok(false);
            }
            *done += moved;
            self.sent += moved as u64;
            self.sender = if *done == HEADER + payload.len() { Holder::Nobody } else { holder };
        }
        Ok(true)
    }
}

impl Wanted {
    fn takes(&self, from: usize, header: &Header) -> bool {
        self.from.is_none_or(|rank| rank == from) && self.signature.detail == header.detail()
    }
}

impl Mail {
    pub(crate) fn new(rank: Rank, n: usize) -> Mail {
        let line = || Line {
            sender: Holder::Nobody,
            reader: Holder::Nobody,
            head: Header([0; HEADER]),
            got: 0,
            shelf: None,
            outgoing: VecDeque::new(),
            arriving: None,
            aside: VecDeque::new(),
            letters: 0,
            sent: 0,
            gone: None,
            heard: None,
            asked: None,
            questioned: 0,
        };
        Mail {
            rank,
            lines: (0..n).map(|_| line()).collect(),
            wanted: VecDeque::new(),
            aside_bytes: 0,
            most_aside: MAX_ASIDE,
            is_full: false,
            delivered: Vec::new(),
            moved: 0,
            turn: 0,
            listening: false,
            now: Instant::now(),
        }
    }

    /// Whether nothing is being sent, arrives, or is waited for.
    pub(crate) fn is_idle(&self) -> bool {
        let is_idle = |line: &Line| line.outgoing.is_empty() && line.arriving.is_none();
        self.wanted.is_empty() && self.lines.iter().all(is_idle)
    }

    /// Whether there is anything to take.
    pub(crate) fn has_delivered(&self) -> bool {
        !self.delivered.is_empty()
    }

    /// Takes what was sent and received since it was last asked.
    pub(crate) fn delivered(&mut self) -> impl Iterator<Item = Delivered> {
        std::mem::take(&mut self.delivered).into_iter()
    }

    /// A number that grows with every byte that a message moves on.
    pub(crate) fn moved(&self) -> u64 {
        self.moved + self.sent()
    }

    /// A collective took so many bytes itself.
    pub(crate) fn took(&mut self, bytes: usize) {
        self.moved += bytes as u64;
    }

    /// How many ranks there are.
    pub(crate) fn ranks(&self) -> usize {
        self.lines.len()
    }

    /// What time it is.
    pub(crate) fn clock(&mut self, now: Instant) {
        self.now = now;
    }

    /// When the clock was last looked at.
    pub(crate) fn now(&self) -> Instant {
        self.now
    }

    /// From now on letters of all ranks are taken in, or not.
    pub(crate) fn listen(&mut self, to_all: bool) {
        self.listening = to_all;
    }

    /// Whether letters are to be moved.
    pub(crate) fn is_busy(&self) -> bool {
        self.listening || !self.is_idle()
    }

    /// Takes back what was asked for, if nothing of it came yet.
    pub(crate) fn cancel(&mut self, ticket: u64) -> bool {
        let before = self.wanted.len();
        self.wanted.retain(|wanted| wanted.ticket != ticket);
        self.wanted.len() < before
    }

    /// Bytes that went out, headers included.
    pub(crate) fn sent(&self) -> u64 {
        self.lines.iter().map(|line| line.sent).sum()
    }

    /// Lets go of everything, since the group failed.
    pub(crate) fn clear(&mut self) {
        self.wanted.clear();
        for line in &mut self.lines {
            line.outgoing.clear();
            line.aside.clear();
            line.arriving = None;
        }
        self.aside_bytes = 0;
    }

    /// Queues a letter; `signature` lacks its sequence number.
    pub(crate) fn send(
        &mut self,
        ticket: u64,
        to: usize,
        mut signature: Signature,
        buffer: Box<dyn AnyBuffer>,
    ) {
        let line = &mut self.lines[to];
        line.letters += 1;
        signature.sequence = line.letters;
        let header = signature.header(signature.count);
        line.outgoing.push_back(Outgoing {
            ticket: Some(ticket),
            header,
            buffer,
            is_shelved: false,
            done: 0,
        });
    }

    /// Asks a peer, once, whether it understands an operation of this number as this rank does, which waits for it.
    pub(crate) fn ask(&mut self, peer: usize, operation: &Signature) {
        let line = &mut self.lines[peer];
        if line.questioned != operation.sequence {
            line.questioned = operation.sequence;
            let header = operation.header(operation.count).question();
            let buffer = Box::new(Plain(Vec::<u8>::new()));
            line.outgoing.push_back(Outgoing { ticket: None, header, buffer, is_shelved: false, done: 0 });
        }
    }

    /// Whether letters of all ranks are taken in.
    pub(crate) fn is_listening(&self) -> bool {
        self.listening
    }

    /// Why nothing that stands behind it can come from a peer: a letter that there is no room for.
    pub(crate) fn overrun(&self, peer: usize) -> Option<Error> {
        let line = &self.lines[peer];
        (self.is_full && line.stands() && line.head.is_message()).then(|| Error::Overrun {
            rank: self.rank,
            peer: Rank(peer as u32),
            letter: line.head.describe(),
            limit: self.most_aside,
        })
    }

    /// Whether letters may stand on their wires because there is no room for them.
    pub(crate) fn is_full(&self) -> bool {
        self.is_full
    }

    /// The operations that other ranks are in, as far as is known: what they ask about, and what stands on their wires.
    pub(crate) fn operations(&self) -> impl Iterator<Item = (usize, Header)> {
        self.lines.iter().enumerate().flat_map(|(peer, line)| {
            let standing = line.stands().then_some(line.head).filter(|head| !head.is_message());
            line.asked.into_iter().chain(standing).map(move |header| (peer, header))
        })
    }

    /// Asks for a letter, which may be there already.
    pub(crate) fn want(&mut self, wanted: Wanted) -> Result<(), Error> {
        let n = self.lines.len();
        let ranks: Vec<usize> = match wanted.from {
            Some(from) => vec![from],
            None => (0..n).map(|i| (self.turn + i) % n).collect(),
        };
        for from in ranks {
            let line = &mut self.lines[from];
            if let Some(at) = line.aside.iter().position(|letter| wanted.takes(from, &letter.header)) {
                let letter = line.aside.remove(at).expect("the position was found");
                self.aside_bytes -= weight(letter.bytes);
                return self.hand_over(from, letter, wanted);
            }
        }
        self.wanted.push_back(wanted);
        Ok(())
    }

    /// A letter that was set aside goes to whoever wants it.
    fn hand_over(&mut self, from: usize, letter: Letter, mut wanted: Wanted) -> Result<(), Error> {
        self.check(from, &letter.header, &wanted)?;
        self.turn = from + 1;
        wanted.buffer.bytes().copy_from_slice(&letter.room.bytes()[..letter.bytes]);
        self.delivered.push(Delivered { ticket: wanted.ticket, buffer: wanted.buffer, peer: from });
        Ok(())
    }

    /// That a letter is what its receiver thinks it is.
    fn check(&self, from: usize, header: &Header, wanted: &Wanted) -> Result<(), Error> {
        let ours = wanted.signature;
        let fits = (u64::try_from(ours.count), ours.element.code) == (Ok(header.count()), header.element());
        if fits { Ok(()) } else { Err(self.mismatch(&ours.header(ours.count), from, header)) }
    }

    /// That a peer is in another operation than this rank.
    pub(crate) fn mismatch(&self, ours: &Header, from: usize, theirs: &Header) -> Error {
        Error::Mismatch {
            rank: self.rank,
            ours: ours.describe_beside(theirs),
            peer: Rank(from as u32),
            theirs: theirs.describe_beside(ours),
        }
    }

    /// Moves letters as far as they go now.
    pub(crate) fn advance(&mut self, wires: &mut dyn Transport) -> Result<(), Error> {
        let (mut gone, mut others) = (None, 0);
        let (own, n, first) = (self.rank.index(), self.lines.len(), self.turn);
        for peer in (0..n).map(|i| (first + i) % n).filter(|&peer| peer != own) {
            self.post(peer, wires)?;
            // Ranks that may have nothing to say aren't connected for that.
            let asks = self.needs(peer) || self.wanted.iter().any(|wanted| wanted.from.is_none());
            let listens = asks || self.reads_all() && wires.reaches(peer);
            if !listens {
                continue;
            }
            // A collective's message stays where it is until that is played.
            match self.head(peer, 1, wires) {
                // It may have left after all that was wanted of it, and others may still do what is wanted of any.
                Err(error @ Error::PeerLost { said_by: None, .. })
                    if !self.needs(peer) && (self.took_leave(peer) || !self.wants_any()) =>
                {
                    gone = Some(error);
                }
                Err(error) => return Err(error),
                Ok(_) => others += 1,
            }
        }
        gone.filter(|_| others == 0 && !self.is_idle()).map_or(Ok(()), Err)
    }

    /// Whether something is to come from this rank and no other, or to go there.
    fn needs(&self, peer: usize) -> bool {
        let line = &self.lines[peer];
        line.arriving.is_some()
            || !line.outgoing.is_empty()
            || self.wanted.iter().any(|wanted| wanted.from == Some(peer))
    }

    /// Whether a letter is wanted of any rank.
    fn wants_any(&self) -> bool {
        self.wanted.iter().any(|wanted| wanted.from.is_none())
    }

    /// Whether a rank is known to have left because it had nothing more to do.
    pub(crate) fn took_leave(&self, peer: usize) -> bool {
        matches!(&self.lines[peer].gone, Some(Lost::Told(word)) if word.why == Why::Left)
    }

    /// Whether letters of all ranks are taken in.
    fn reads_all(&self) -> bool {
        self.listening || self.wants_any() || self.lines.iter().any(|line| !line.outgoing.is_empty())
    }

    /// Sends what can be sent to a peer now.
    fn post(&mut self, peer: usize, wires: &mut dyn Transport) -> Result<(), Error> {
        let line = &mut self.lines[peer];
        while let Some(mut letter) = line.outgoing.pop_front() {
            let sent = line.send_letter(wires, peer, &mut letter);
            let sent = match (sent, letter.ticket) {
                // Whoever is asked may have left after all that is waited for. Others are to find the wire dead, not held.
                (Err(_), None) => {
                    line.sender = Holder::Nobody;
                    continue;
                }
                (sent, _) => sent.map_err(|lost| lost_in(&letter.header, peer, lost))?,
            };
            if sent {
                let buffer = letter.buffer;
                self.delivered.extend(letter.ticket.map(|ticket| Delivered { ticket, buffer, peer }));
            } else {
                line.outgoing.push_front(letter);
                break;
            }
        }
        Ok(())
    }

    /// Sends a message of a collective as far as it goes now; whether it is whole.
    pub(crate) fn send_part(
        &mut self,
        wires: &mut dyn Transport,
        to: usize,
        holder: Holder,
        (header, payload): (&Header, &[u8]),
        done: &mut usize,
    ) -> Result<bool, Error> {
        if *done == 0 && !self.lines[to].outgoing.is_empty() {
            // Letters that were issued before go first.
            return Ok(false);
        }
        let sent = self.lines[to].send(wires, to, holder, (header, payload), done);
        sent.map_err(|lost| lost_in(header, to, lost))
    }
}

#[cfg(test)]
mod tests;
