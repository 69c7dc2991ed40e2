//! What comes from a peer: whose message it is, and where it goes.

use super::{Arriving, Delivered, Holder, Letter, Mail, Place, lost_in, weight};
use crate::element::Room;
use crate::error::Error;
use crate::signature::{HEADER, Header};
use crate::transport::Transport;
use phalanx_wire::Rank;

impl Mail {
    /// The header of the next message from a peer that isn't a letter, once all of it is there. Letters before it are
    /// taken in, so many at most.
    pub(super) fn head(
        &mut self,
        from: usize,
        mut letters: usize,
        wires: &mut dyn Transport,
    ) -> Result<Option<Header>, Error> {
        loop {
            let line = &mut self.lines[from];
            if line.arriving.is_some() {
                if !self.take_in(from, wires)? {
                    return Ok(None);
                }
                letters -= 1;
                if letters == 0 {
                    return Ok(None);
                }
                continue;
            }
            if line.reader != Holder::Nobody {
                return Ok(None);
            }
            while line.got < HEADER {
                let moved = match &line.gone {
                    Some(lost) => Err(lost.clone()),
                    None => wires.try_receive(from, &mut line.head.0[line.got..]),
                };
                let moved = moved.map_err(|lost| {
                    line.gone = Some(lost.clone());
                    lost.into_error("a message".into(), Rank(from as u32))
                })?;
                line.got += moved;
                self.moved += moved as u64;
                if moved == 0 {
                    return Ok(None);
                }
            }
            if let Some((header, at)) = line.head.unshelved() {
                (line.head, line.shelf) = (header, Some(at));
            }
            let question = line.head.asked();
            let header = question.unwrap_or(line.head);
            if line.heard.is_none_or(|(heard, _)| heard != header) {
                line.heard = Some((header, self.now));
            }
            if question.is_some() {
                line.asked = question;
                line.got = 0;
                continue;
            }
            if !header.is_message() {
                return Ok(Some(header));
            }
            let wanted = self.wanted.iter().position(|wanted| wanted.takes(from, &header));
            let (into, bytes) = match wanted.and_then(|at| self.wanted.remove(at)) {
                Some(mut wanted) => {
                    self.check(from, &header, &wanted)?;
                    let bytes = wanted.buffer.bytes().len();
                    (Place::Wanted(wanted), bytes)
                }
                None => match self.room_for(&header) {
                    Some(bytes) => (Place::Aside(Room::of(bytes)), bytes),
                    // It stands on the wire until it is asked for, or there is room.
                    None => {
                        self.is_full = true;
                        return Ok(None);
                    }
                },
            };
            let line = &mut self.lines[from];
            line.got = 0;
            line.reader = Holder::Letter;
            let shelf = line.shelf.take();
            line.arriving = Some(Arriving { header, into, shelf, bytes, done: 0 });
        }
    }

    /// Bytes of a letter that nobody asked for, if they may be kept.
    fn room_for(&mut self, header: &Header) -> Option<usize> {
        let size = crate::element::size_of_code(header.element())?;
        let bytes = usize::try_from(header.count()).ok()?.checked_mul(size)?;
        let kept = self.aside_bytes + weight(0);
        let fits = |most: usize| bytes <= most.saturating_sub(kept);
        let fits = fits(self.most_aside) || fits(self.on_their_way());
        fits.then(|| {
            self.aside_bytes += weight(bytes);
            bytes
        })
    }

    /// What it would take to keep the letters that this rank sends.
    fn on_their_way(&mut self) -> usize {
        let letters = self.lines.iter_mut().flat_map(|line| &mut line.outgoing);
        letters.map(|letter| weight(letter.buffer.bytes().len())).sum()
    }

    /// Brings in what is there of the letter that arrives; whether it is whole.
    fn take_in(&mut self, from: usize, wires: &mut dyn Transport) -> Result<bool, Error> {
        let line = &mut self.lines[from];
        let Some(mut arriving) = line.arriving.take() else { return Ok(true) };
        let into = match &mut arriving.into {
            Place::Wanted(wanted) => wanted.buffer.bytes(),
            Place::Aside(room) => &mut room.bytes_mut()[..arriving.bytes],
        };
        while arriving.done < arriving.bytes {
            let moved = match arriving.shelf {
                Some(at) => wires.unshelve(from, at, into).map(|()| arriving.bytes),
                None => wires.try_receive(from, &mut into[arriving.done..]),
            };
            let moved = match moved {
                Ok(moved) => moved,
                Err(lost) => {
                    // It stays one that is waited for.
                    let error = lost_in(&arriving.header, from, lost);
                    line.arriving = Some(arriving);
                    return Err(error);
                }
            };
            arriving.done += moved;
            self.moved += moved as u64;
            if moved == 0 {
                line.arriving = Some(arriving);
                return Ok(false);
            }
        }
        line.reader = Holder::Nobody;
        match arriving.into {
            Place::Wanted(wanted) => {
                self.turn = from + 1;
                self.delivered.push(Delivered { ticket: wanted.ticket, buffer: wanted.buffer, peer: from });
            }
            Place::Aside(room) => {
                let letter = Letter { header: arriving.header, room, bytes: arriving.bytes };
                // Somebody may have asked for it while it came.
                let wanted = self.wanted.iter().position(|wanted| wanted.takes(from, &letter.header));
                match wanted.and_then(|at| self.wanted.remove(at)) {
                    Some(wanted) => {
                        self.aside_bytes -= weight(letter.bytes);
                        self.hand_over(from, letter, wanted)?;
                    }
                    None => self.lines[from].aside.push_back(letter),
                }
            }
        }
        Ok(true)
    }

    /// Opens a collective's message from a peer: true once its header came, and is `expected`. The wire is the collective's from
    /// then on, until it says [`Mail::close`].
    pub(crate) fn open(
        &mut self,
        wires: &mut dyn Transport,
        from: usize,
        holder: Holder,
        expected: &Header,
    ) -> Result<bool, Error> {
        let header = match self.head(from, usize::MAX, wires) {
            Ok(Some(header)) => header,
            Ok(None) => return Ok(false),
            Err(Error::PeerLost { peer, said_by, reason, .. }) => {
                return Err(Error::PeerLost { operation: expected.describe(), peer, said_by, reason });
            }
            Err(error) => return Err(error),
        };
        if header != *expected {
            return Err(self.mismatch(expected, from, &header));
        }
        let line = &mut self.lines[from];
        line.got = 0;
        line.reader = holder;
        Ok(true)
    }

    /// The message that was opened is whole.
    pub(crate) fn close(&mut self, from: usize) {
        self.lines[from].reader = Holder::Nobody;
    }
}
