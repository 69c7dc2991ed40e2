//! What goes over a TCP connection: a row of small frames, so that signs of life and a parting word fit between the data.
//!
//! A frame is a kind, a length in three bytes, and so many bytes of its kind:
//!
//! - *data*, 1 to [`MAX_DATA`] bytes of the stream between two ranks; what they mean is not known here;
//! - *beat*, nothing: whoever sends it lives;
//! - *word*, why the sender leaves; nothing comes after it.
//!
//! Bytes go from the caller's slice to the kernel and back without a copy, but for two edges. What the kernel didn't take of a
//! frame that was begun is kept, so that the frame can be finished, and something else follow it, without the caller; he is
//! still asked to go on where he was, so a message counts as sent only when the kernel has all of it. And a reader looks
//! [`AHEAD`] bytes further than it was asked to, so a small message, with its frame, is one read.

use crate::word::{MAX_WORD, Word};
use std::io::{Error, ErrorKind, IoSlice, IoSliceMut, Read, Result, Write};

/// The most data in a frame: what a word or a beat may have to wait for.
const MAX_DATA: usize = 64 << 10;
const HEAD: usize = 4;
/// Frames that one write offers.
const BATCH: usize = 16;
/// Bytes that are read beyond what was asked for.
const AHEAD: usize = 2 << 10;
/// Bytes of data that a search for the last word passes over: more than a kernel buffers.
const MAX_UNWANTED: usize = 64 << 20;
// A word is taken when all of it lies there.
const _: () = assert!(HEAD + MAX_WORD <= AHEAD);

#[derive(Clone, Copy, PartialEq, Debug)]
enum Kind {
    Data = 0xd1,
    Beat = 0xb2,
    Word = 0xa3,
}

fn head(kind: Kind, len: usize) -> [u8; HEAD] {
    let [a, b, c, _] = (len as u32).to_le_bytes();
    [kind as u8, a, b, c]
}

/// None if no frame begins so.
fn parse([kind, a, b, c]: [u8; HEAD]) -> Option<(Kind, usize)> {
    let len = u32::from_le_bytes([a, b, c, 0]) as usize;
    let (kind, lens) = [(Kind::Data, 1..=MAX_DATA), (Kind::Beat, 0..=0), (Kind::Word, 1..=MAX_WORD)]
        .into_iter()
        .find(|(known, _)| *known as u8 == kind)?;
    lens.contains(&len).then_some((kind, len))
}

/// Makes frames of what is to be sent.
#[derive(Default)]
pub(super) struct Sender {
    /// What the kernel is still to take of frames that were begun, from `at` on.
    rest: Vec<u8>,
    at: usize,
    /// Where the data in `rest` ends, which frames of other kinds may follow.
    data_end: usize,
    /// Bytes of data that lie in `rest`, or went out of it, and that the caller hasn't been told of.
    untold: usize,
    /// Whether anything went out since [`Sender::beat`] was called last.
    moved: bool,
    /// Whether the last word was said, which nothing follows.
    has_parted: bool,
}

impl Sender {
    /// Sends as much as goes now of `bytes`, which go on where the last call ended; says how much.
    pub(super) fn send(&mut self, to: &mut impl Write, bytes: &[u8]) -> Result<usize> {
        let mut taken = 0;
        loop {
            let is_free = self.flush(to)?;
            taken += self.tell(is_free, bytes.len() - taken);
            let more = &bytes[taken..];
            if !is_free || more.is_empty() {
                return Ok(taken);
            }
            let offered = &more[..more.len().min(BATCH * MAX_DATA)];
            let went = self.begin(to, offered)?;
            taken += went;
            if went < offered.len() {
                return Ok(taken);
            }
        }
    }

    /// Offers new frames to the kernel, and keeps what it doesn't take of one; says how many bytes of data it took.
    fn begin(&mut self, to: &mut impl Write, bytes: &[u8]) -> Result<usize> {
        let mut heads = [[0; HEAD]; BATCH];
        heads
            .iter_mut()
            .zip(bytes.chunks(MAX_DATA))
            .for_each(|(it, data)| *it = head(Kind::Data, data.len()));
        let mut slices = [IoSlice::new(&[]); 2 * BATCH];
        let frames = heads.iter().zip(bytes.chunks(MAX_DATA));
        slices.as_chunks_mut().0.iter_mut().zip(frames).for_each(|(pair, (head, data))| {
            *pair = [IoSlice::new(head), IoSlice::new(data)];
        });
        let n = 2 * bytes.len().div_ceil(MAX_DATA);
        let written = accepted(to.write_vectored(&slices[..n]))?;
        self.moved |= written > 0;
        // All frames but the last are full.
        let (whole, part) = (written / (HEAD + MAX_DATA), written % (HEAD + MAX_DATA));
        let (begun, data) = (part.min(HEAD), part.saturating_sub(HEAD));
        if part > 0
            && let Some(frame) = bytes.chunks(MAX_DATA).nth(whole)
            && data < frame.len()
        {
            (self.at, self.untold) = (0, frame.len() - data);
            self.rest.clear();
            self.rest.extend_from_slice(&heads[whole][begun..]);
            self.rest.extend_from_slice(&frame[data..]);
            self.data_end = self.rest.len();
        }
        let went = whole * MAX_DATA + data;
        if went > 0 && self.untold == 0 && !is_flushed(to)? {
            self.untold = 1;
            return Ok(went - 1);
        }
        Ok(went)
    }

    /// How many bytes of data went out since the caller was last told, so many at most: not the last of them, unless all is
    /// free.
    fn tell(&mut self, is_free: bool, limit: usize) -> usize {
        let inside = self.data_end.saturating_sub(self.at).max(usize::from(!is_free)).min(self.untold);
        let told = (self.untold - inside).min(limit);
        self.untold -= told;
        told
    }

    /// Finishes what was begun, as far as it goes now; whether that is all.
    pub(super) fn flush(&mut self, to: &mut impl Write) -> Result<bool> {
        while self.at < self.rest.len() {
            let written = accepted(to.write(&self.rest[self.at..]))?;
            if written == 0 {
                return Ok(false);
            }
            self.at += written;
            self.moved = true;
        }
        is_flushed(to)
    }

    /// Says that this process lives, between two frames, unless other things that went out since the last call say so.
    pub(super) fn beat(&mut self, to: &mut impl Write) -> Result<()> {
        let is_free = self.flush(to)?;
        if is_free && !self.moved && !self.has_parted {
            self.append(to, &head(Kind::Beat, 0))?;
        }
        self.moved = false;
        Ok(())
    }

    /// Says why this rank leaves, once the frame that was begun is whole: as far as that goes without waiting; whether that is all
    /// of it.
    pub(super) fn part(&mut self, to: &mut impl Write, word: &Word) -> Result<bool> {
        let word = word.encode();
        self.has_parted = true;
        self.append(to, &[&head(Kind::Word, word.len()), &word[..]].concat())
    }

    /// A frame that isn't data goes after what was begun.
    fn append(&mut self, to: &mut impl Write, frame: &[u8]) -> Result<bool> {
        if self.at == self.rest.len() {
            self.rest.clear();
            (self.at, self.data_end) = (0, 0);
        }
        self.rest.extend_from_slice(frame);
        self.flush(to)
    }
}

/// What came instead of data.
#[derive(Debug, PartialEq)]
pub(super) enum End {
    Word(Word),
    /// The connection ended without one.
    Closed(String),
    /// No frame begins like that.
    Mad,
}

/// Takes data out of frames.
pub(super) struct Receiver {
    ahead: [u8; AHEAD],
    /// What lies there.
    from: usize,
    to: usize,
    /// Bytes of the current frame's data that are still to be handed out.
    left: usize,
    /// What was met behind the last data; it stays so.
    end: Option<String>,
}

impl Default for Receiver {
    fn default() -> Receiver {
        Receiver { ahead: [0; AHEAD], from: 0, to: 0, left: 0, end: None }
    }
}

impl Receiver {
    /// Brings as many bytes as are there now; says how many.
    pub(super) fn receive(
        &mut self,
        source: &mut impl Read,
        into: &mut [u8],
    ) -> std::result::Result<usize, End> {
        let (mut got, mut has_more) = (0, self.end.is_none());
        loop {
            match self.enter() {
                Ok(true) if got < into.len() => {
                    got += self.take(&mut into[got..]);
                    continue;
                }
                // An end is met again by the next call.
                Ok(true) | Err(_) if got > 0 => return Ok(got),
                Err(end) => return Err(end),
                Ok(_) => {}
            }
            if got == into.len() || !has_more {
                return match &self.end {
                    Some(reason) if got == 0 => Err(End::Closed(reason.clone())),
                    _ => Ok(got),
                };
            }
            let (direct, more) = self.read(source, &mut into[got..]);
            (got, has_more) = (got + direct, more);
        }
    }

    /// Whether there is something to be met without a look at the connection.
    pub(super) fn holds(&mut self) -> bool {
        self.end.is_some() || self.enter() != Ok(false)
    }

    /// Why nothing comes any more, once that is known of the connection: what comes before it is let go.
    pub(super) fn last_word(&mut self, source: &mut impl Read) -> Option<End> {
        let mut unwanted = vec![0; MAX_DATA];
        (0..MAX_UNWANTED / MAX_DATA).find_map(|_| self.receive(source, &mut unwanted).err())
    }

    /// Opens the frame that lies ahead; whether some of its data lies there too.
    fn enter(&mut self) -> std::result::Result<bool, End> {
        while self.left == 0 {
            let Some((first, rest)) = self.ahead[self.from..self.to].split_first_chunk() else {
                return Ok(false);
            };
            let (kind, len) = parse(*first).ok_or(End::Mad)?;
            match kind {
                Kind::Data => self.left = len,
                Kind::Beat => {}
                Kind::Word if rest.len() < len => return Ok(false),
                // Left where it is.
                Kind::Word => return Err(Word::decode(&rest[..len]).map_or(End::Mad, End::Word)),
            }
            self.from += HEAD;
        }
        Ok(self.from < self.to)
    }

    /// Hands out data that lies ahead.
    fn take(&mut self, into: &mut [u8]) -> usize {
        let n = self.left.min(self.to - self.from).min(into.len());
        into[..n].copy_from_slice(&self.ahead[self.from..self.from + n]);
        (self.from, self.left) = (self.from + n, self.left - n);
        n
    }

    /// Reads the rest of the current frame into place, and beyond it; says how much of it came, and whether there may be more.
    fn read(&mut self, source: &mut impl Read, into: &mut [u8]) -> (usize, bool) {
        self.ahead.copy_within(self.from..self.to, 0);
        (self.from, self.to) = (0, self.to - self.from);
        let direct = self.left.min(into.len());
        let room = AHEAD - self.to;
        let mut slices = [IoSliceMut::new(&mut into[..direct]), IoSliceMut::new(&mut self.ahead[self.to..])];
        match source.read_vectored(&mut slices) {
            Ok(0) => self.end = Some("its connection closed".into()),
            Ok(n) => {
                let came = n.min(direct);
                (self.left, self.to) = (self.left - came, self.to + n - came);
                return (came, n == direct + room);
            }
            Err(error) if is_passing(&error) => {}
            Err(error) => self.end = Some(error.to_string()),
        }
        (0, false)
    }
}

/// Whether the kernel only can't now.
fn is_passing(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted)
}

/// Whether the kernel has all that was written, where something lies in between.
fn is_flushed(to: &mut impl Write) -> Result<bool> {
    match to.flush() {
        Err(error) if is_passing(&error) => Ok(false),
        other => other.map(|()| true),
    }
}

fn accepted(result: Result<usize>) -> Result<usize> {
    match result {
        Err(error) if is_passing(&error) => Ok(0),
        other => other,
    }
}

#[cfg(test)]
mod tests;
