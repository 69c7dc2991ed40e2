//! A peer on the same host: a ring of bytes in shared memory for each direction, and a Unix socket that is the bell.
//!
//! Whoever dials makes the memory, an unnamed file that can no longer shrink, and passes it through the socket once both
//! sides have proven themselves. The other one answers when it has mapped it: either may have no room for that, and then neither takes
//! it that they are connected. The memory dies with the last process that maps it, so nothing is left after any death, and
//! the socket closes with its process, so a death is noticed at once.
//!
//! Each ring has one writer and one reader. `written` and `read` count the bytes since the start and only grow; byte `i` lies
//! at `i % RING`.
//!
//! A ring goes on only while both sides look after it, and a letter that is longer than a ring would wait for that, with both at work
//! on something else. Beside each ring lies a larger *shelf*: who writes the ring puts a long letter there whole and says where, and who
//! reads it takes it from there whenever it comes to it. Letters lie one behind the other, and at the start again once all
//! were taken; what finds no room goes through the ring. Pages of a shelf take memory once they were used; the file of a pair of ranks
//! is as long as two rings and two shelves, 32.5 MiB, which a limit on the length of files (`ulimit -f`) has to allow.
//!
//! Each line of memory that the other side wrote costs as much as all else that a small message takes, so each side keeps what
//! it last saw of the other's count and looks again only when it needs more, and `read` is said only every now and then: a
//! writer needs it when its ring is full, and then there is more to read.
//!
//! - **M-ORDER**: bytes are in place before `written` says so, and are taken before `read` says so. Between the two counts
//!   only the reader touches the ring, outside them only the writer. A letter is on its shelf before the ring says where, and is the
//!   reader's until that one has counted it as taken.
//! - **M-WAKE**: who is about to sleep says so, and for what, first and looks at the counts once more; who changes a count looks
//!   afterwards whether the other sleeps for that and then rings. Fences between the two make sure that at least one sees the
//!   other.
#![allow(unsafe_code, reason = "shared memory; every block has its note")]

use super::process::Process;
use super::{Lost, Signs, Wire};
use crate::word::{MAX_WORD, Word};
use nix::errno::Errno;
use nix::poll::PollFlags;
use nix::sys::socket::{ControlMessage, ControlMessageOwned, MsgFlags, recvmsg, sendmsg};
use nix::sys::socket::{getsockopt, sockopt};
use phalanx_memory::{Region, unnamed_file};
use phalanx_wire::Side;
use std::collections::VecDeque;
use std::fs::File;
use std::io::{Error, ErrorKind, IoSlice, IoSliceMut, Read, Result, Write};
use std::net::Shutdown;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU64, Ordering, fence};

/// Bytes of a ring: small enough to stay in the cache that both cores share.
const RING: usize = 256 << 10;
/// Bytes of a shelf: what a stage of a pipeline sends the next, several times.
const SHELF: usize = 16 << 20;
/// Where the rings start, and the shelves behind them; before them each word has a cache line of its own.
const HEAD: usize = 4096;
const LINE: usize = 64;
/// Words of the head: two for each ring, one for each sleeper and one for each shelf.
const WRITTEN: usize = 0;
const READ: usize = 2;
const ASLEEP: usize = 4;
/// Bytes that were taken off each shelf.
const TAKEN: usize = 6;
/// Where each side leaves its parting word, in the second half of the head: eight bytes that count it, and then it.
const PARTING: usize = HEAD / 2;
const PARTING_LEN: usize = HEAD / 4;
const _: () = assert!(8 + MAX_WORD <= PARTING_LEN);
/// Bytes of the memory of a pair.
const BYTES: usize = HEAD + 2 * (RING + SHELF);
/// How much passed memory may wait to be asked for.
const MAX_PASSED: usize = 16;
/// What a sleeper waits for.
const FOR_BYTES: u64 = 1;
const FOR_ROOM: u64 = 2;
/// So many bytes are taken before the writer is told.
const TOLD_EVERY: u64 = RING as u64 / 4;
/// How many looks that found nothing pass between two looks at whether the peer lives.
const LOOKS_PER_PULSE: u32 = 256;

/// A process's end.
pub(crate) struct Memory {
    bell: UnixStream,
    map: Region,
    /// Memory that the peer passed and nobody asked for yet.
    passed: VecDeque<Result<File>>,
    /// Which ring this end writes, 0 or 1; it reads the other.
    own: usize,
    /// How much this end wrote and read: its own counts, which nobody else may change.
    written: u64,
    read: u64,
    /// How much of `read` the peer was told.
    told: u64,
    /// What the peer's counts were when they were last looked at: how much it took of what this end wrote, and how much it wrote.
    taken: u64,
    came: u64,
    /// Bytes that this end put on its shelf and took off the other, and where its next letter goes.
    shelved: u64,
    unshelved: u64,
    shelf_end: usize,
    looks: u32,
    /// None if it can't be seen from here.
    peer: Option<Process>,
}

impl Memory {
    /// Over a socket whose peer is proven: the dialer makes the memory, the accepter takes it. Either fails where one of them does.
    pub(crate) fn new(bell: UnixStream, side: Side) -> Result<Memory> {
        let (map, own) = match side {
            Side::Dialed => {
                let file = unnamed_file("phalanx-ring", BYTES)?;
                let map = Region::open(file.try_clone()?, BYTES)?;
                send_file(&bell, &file)?;
                // More than this byte may be there already.
                (&bell).read_exact(&mut [0]).map_err(|error| match error.kind() {
                    ErrorKind::UnexpectedEof => Error::other("it doesn't take it"),
                    _ => error,
                })?;
                (map, 0)
            }
            Side::Accepted => {
                let file = read_bell(&bell, MsgFlags::empty())?.1.pop();
                let file =
                    file.ok_or_else(|| Error::new(ErrorKind::InvalidData, "it passed no memory"))??;
                let map = Region::open(file, BYTES)?;
                (&bell).write_all(&[1])?;
                (map, 1)
            }
        };
        bell.set_nonblocking(true)?;
        let passed = VecDeque::new();
        let peer = getsockopt(&bell, sockopt::PeerCredentials).ok().and_then(|peer| Process::of(peer.pid()));
        Ok(Memory {
            bell,
            map,
            passed,
            own,
            written: 0,
            read: 0,
            told: 0,
            taken: 0,
            came: 0,
            shelved: 0,
            unshelved: 0,
            shelf_end: 0,
            looks: 0,
            peer,
        })
    }

    /// Whether this process may make such memory: a limit on the size of files counts for it too.
    pub(crate) fn probe() -> Result<()> {
        unnamed_file("phalanx-ring", BYTES).map(drop)
    }

    fn word(&self, word: usize, side: usize) -> &AtomicU64 {
        let at = (word + side) * LINE;
        assert!(at + LINE <= PARTING);
        self.atom(at)
    }

    fn atom(&self, at: usize) -> &AtomicU64 {
        assert!(at.is_multiple_of(8) && at + 8 <= HEAD);
        // SAFETY: the eight bytes lie in the map, which lives as long as `self`; maps start on a page, so they are aligned;
        // both processes touch the head only through such atomics.
        unsafe { AtomicU64::from_ptr(self.map.start().as_ptr().add(at).cast()) }
    }

    /// Where `side` leaves its parting word: how long it is, and eight bytes each.
    fn parting(&self, side: usize) -> (&AtomicU64, impl Iterator<Item = &AtomicU64>) {
        let start = PARTING + side * PARTING_LEN;
        (self.atom(start), (start + 8..start + PARTING_LEN).step_by(8).map(|at| self.atom(at)))
    }

    /// Why nothing comes of the peer any more.
    fn lost(&self) -> Lost {
        let (len, bytes) = self.parting(1 - self.own);
        // Nobody who is sane says nothing, or more than fits.
        let len = len.load(Ordering::Acquire).min(MAX_WORD as u64) as usize;
        let bytes = bytes.flat_map(|eight| eight.load(Ordering::Relaxed).to_le_bytes());
        let word = Word::decode(&bytes.take(len).collect::<Vec<u8>>());
        word.map_or_else(|| Lost::Seen("its process is gone".into()), Lost::Told)
    }

    /// Where byte `count` of a ring lies, and how many of `n` bytes follow there without a turn.
    fn place(&self, ring: usize, count: u64, n: usize) -> (*mut u8, usize) {
        let at = (count % RING as u64) as usize;
        // SAFETY: ring is 0 or 1 and `at` less than RING, so the place lies in the map.
        (unsafe { self.map.start().as_ptr().add(HEAD + ring * RING + at) }, n.min(RING - at))
    }

    /// Where byte `at` of a shelf lies, if `n` bytes from there on are the shelf's.
    fn on_shelf(&self, shelf: usize, at: usize, n: usize) -> Option<*mut u8> {
        at.checked_add(n).filter(|&end| end <= SHELF)?;
        // SAFETY: shelf is 0 or 1 and `at` at most SHELF, so the place lies in the map, or at its end.
        Some(unsafe { self.map.start().as_ptr().add(HEAD + 2 * RING + shelf * SHELF + at) })
    }

    /// How many of `wanted` bytes this end could write now.
    fn room(&mut self, wanted: usize) -> std::result::Result<usize, Lost> {
        if RING - ((self.written - self.taken) as usize) < wanted {
            let taken = self.word(READ, self.own).load(Ordering::Acquire);
            if taken < self.taken || taken > self.written {
                return Err(damaged());
            }
            self.taken = taken;
        }
        Ok(wanted.min(RING - (self.written - self.taken) as usize))
    }

    /// How many of `wanted` bytes this end could read now.
    fn held(&mut self, wanted: usize) -> std::result::Result<usize, Lost> {
        if ((self.came - self.read) as usize) < wanted {
            let came = self.word(WRITTEN, 1 - self.own).load(Ordering::Acquire);
            if came < self.came || came - self.read > RING as u64 {
                return Err(damaged());
            }
            self.came = came;
        }
        Ok(wanted.min((self.came - self.read) as usize))
    }

    /// As `held`, where nothing at all may mean that nothing will come any more.
    fn held_or_gone(&mut self, wanted: usize) -> std::result::Result<usize, Lost> {
        let n = self.held(wanted)?;
        if n > 0 || !self.has_died() {
            return Ok(n);
        }
        // What it wrote last may have come between the two looks.
        match self.held(wanted)? {
            0 => Err(self.lost()),
            n => Ok(n),
        }
    }

    /// `n` bytes were taken out of the peer's ring.
    fn took(&mut self, n: usize) {
        self.read += n as u64;
        let sleeper = self.word(ASLEEP, 1 - self.own).load(Ordering::Relaxed);
        if self.read - self.told >= TOLD_EVERY || sleeper & FOR_ROOM != 0 {
            self.word(READ, 1 - self.own).store(self.read, Ordering::Release);
            self.told = self.read;
            self.ring_bell(FOR_ROOM);
        }
    }

    /// After a change of a count (M-WAKE), which a sleeper may wait for.
    fn ring_bell(&mut self, change: u64) {
        fence(Ordering::SeqCst);
        let asleep = self.word(ASLEEP, 1 - self.own);
        if asleep.load(Ordering::Relaxed) & change != 0 && asleep.swap(0, Ordering::Relaxed) != 0 {
            // A bell that is full has been rung; one that is broken is noticed by the next look for a pulse.
            let _ = self.bell.write(&[1]);
        }
    }

    /// Whether the peer's end of the bell is closed, which its death does too.
    fn is_gone(&mut self) -> bool {
        match read_bell(&self.bell, MsgFlags::MSG_DONTWAIT) {
            Ok((rings, files)) => {
                let room = MAX_PASSED.saturating_sub(self.passed.len());
                self.passed.extend(files.into_iter().take(room));
                rings == 0
            }
            Err(Errno::EAGAIN | Errno::EINTR) => false,
            Err(_) => true,
        }
    }

    /// After a look that found nothing: whether it is time to look for a pulse, and there is none.
    fn has_died(&mut self) -> bool {
        self.looks = self.looks.wrapping_add(1);
        self.looks.is_multiple_of(LOOKS_PER_PULSE) && self.is_gone()
    }
}

fn damaged() -> Lost {
    Lost::Seen("the memory shared with it is damaged".into())
}

/// Hands a file to the peer; the byte that goes with it is a ring.
fn send_file(bell: &UnixStream, file: &File) -> nix::Result<()> {
    let fds = [file.as_raw_fd()];
    let passed = [ControlMessage::ScmRights(&fds)];
    sendmsg::<()>(bell.as_raw_fd(), &[IoSlice::new(&[1])], &passed, MsgFlags::MSG_NOSIGNAL, None).map(drop)
}

/// How often the bell was rung, 0 if the peer closed it, and the files that came with the rings; an error in the place of one
/// that this process couldn't take.
fn read_bell(bell: &UnixStream, flags: MsgFlags) -> nix::Result<(usize, Vec<Result<File>>)> {
    let (mut rings, mut space) = ([0; 64], nix::cmsg_space!([i32; 1]));
    let mut bytes = [IoSliceMut::new(&mut rings)];
    let flags = flags | MsgFlags::MSG_CMSG_CLOEXEC;
    let message = recvmsg::<()>(bell.as_raw_fd(), &mut bytes, Some(&mut space), flags)?;
    let mut files = Vec::new();
    let Ok(parts) = message.cmsgs() else {
        files.push(Err(Error::other("it was passed, but this process has no descriptor left for it")));
        return Ok((message.bytes, files));
    };
    for part in parts {
        if let ControlMessageOwned::ScmRights(fds) = part {
            // SAFETY: the kernel made these descriptors for this process just now; nothing else owns them.
            files.extend(fds.into_iter().map(|fd| Ok(File::from(unsafe { OwnedFd::from_raw_fd(fd) }))));
        }
    }
    Ok((message.bytes, files))
}

impl Wire for Memory {
    fn try_send(&mut self, bytes: &[u8]) -> std::result::Result<usize, Lost> {
        let n = self.room(bytes.len())?;
        if n == 0 {
            return if self.has_died() { Err(self.lost()) } else { Ok(0) };
        }
        let (to, first) = self.place(self.own, self.written, n);
        let (start, _) = self.place(self.own, 0, 0);
        // SAFETY: `n` bytes from `written` on are outside what the peer may touch (M-ORDER), in two pieces that lie in the
        // map; a peer that breaks the order can spoil bytes, and nothing else. No reference to the map exists.
        unsafe {
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, first);
            std::ptr::copy_nonoverlapping(bytes[first..].as_ptr(), start, n - first);
        }
        self.written += n as u64;
        self.word(WRITTEN, self.own).store(self.written, Ordering::Release);
        self.ring_bell(FOR_BYTES);
        Ok(n)
    }

    fn try_receive(&mut self, into: &mut [u8]) -> std::result::Result<usize, Lost> {
        let n = self.held_or_gone(into.len())?;
        let (from, first) = self.place(1 - self.own, self.read, n);
        let (start, _) = self.place(1 - self.own, 0, 0);
        // SAFETY: as in `try_send`; the reader owns the bytes between the two counts.
        unsafe {
            std::ptr::copy_nonoverlapping(from, into.as_mut_ptr(), first);
            std::ptr::copy_nonoverlapping(start, into[first..].as_mut_ptr(), n - first);
        }
        self.took(n);
        Ok(n)
    }

    fn look(&mut self) -> std::result::Result<Option<&[u8]>, Lost> {
        let n = self.held_or_gone(RING)?;
        let (from, first) = self.place(1 - self.own, self.read, n);
        // SAFETY: the bytes between the two counts are the reader's, lie in the map, and stay as they are until `took`, which
        // needs `&mut self` (M-ORDER); a peer that breaks the order can spoil what is read, and nothing else.
        Ok(Some(unsafe { std::slice::from_raw_parts(from, first) }))
    }

    fn consume(&mut self, n: usize) {
        assert!(n as u64 <= self.came - self.read);
        self.took(n);
    }

    fn shelve(&mut self, letter: &[u8]) -> std::result::Result<Option<u32>, Lost> {
        let taken = self.word(TAKEN, self.own).load(Ordering::Acquire);
        if taken > self.shelved {
            return Err(damaged());
        }
        let at = if taken == self.shelved { 0 } else { self.shelf_end };
        let Some(to) = self.on_shelf(self.own, at, letter.len()) else { return Ok(None) };
        // SAFETY: the bytes from `at` on are this end's: all were taken, or none of these was given since that was so (M-ORDER). No
        // reference to the map exists.
        unsafe { std::ptr::copy_nonoverlapping(letter.as_ptr(), to, letter.len()) };
        self.shelved += letter.len() as u64;
        self.shelf_end = at + letter.len();
        Ok(Some(at as u32))
    }

    fn unshelve(&mut self, at: u32, into: &mut [u8]) -> std::result::Result<(), Lost> {
        let from = self.on_shelf(1 - self.own, at as usize, into.len()).ok_or_else(damaged)?;
        // SAFETY: the bytes lie in the map, and the peer leaves them as they are until they are counted (M-ORDER); one that breaks
        // the order can spoil what is read, and nothing else.
        unsafe { std::ptr::copy_nonoverlapping(from, into.as_mut_ptr(), into.len()) };
        self.unshelved += into.len() as u64;
        self.word(TAKEN, 1 - self.own).store(self.unshelved, Ordering::Release);
        Ok(())
    }

    fn process(&self) -> Option<Process> {
        self.peer
    }

    fn pass(&mut self, file: &File) -> std::result::Result<bool, Lost> {
        match send_file(&self.bell, file) {
            Ok(()) => Ok(true),
            // The bell is full: the peer will look at it.
            Err(Errno::EAGAIN | Errno::EINTR) => Ok(false),
            Err(error) => Err(Lost::Seen(error.to_string())),
        }
    }

    fn take_passed(&mut self) -> std::result::Result<Option<Result<File>>, Lost> {
        let gone = self.passed.is_empty() && self.is_gone();
        match self.passed.pop_front() {
            None if gone => Err(self.lost()),
            file => Ok(file),
        }
    }

    fn fall_asleep(&mut self, wanted: PollFlags) -> Option<PollFlags> {
        let (for_bytes, for_room) = (wanted.contains(PollFlags::POLLIN), wanted.contains(PollFlags::POLLOUT));
        let sleeps = if for_bytes { FOR_BYTES } else { 0 } | if for_room { FOR_ROOM } else { 0 };
        self.word(ASLEEP, self.own).store(sleeps, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        // Old rings are taken out of the bell, or they would end the sleep. A peer that is gone or mad is no reason to sleep.
        let gone = self.is_gone();
        self.looks = LOOKS_PER_PULSE.wrapping_sub(1);
        let nothing = |n: std::result::Result<usize, Lost>| n.is_ok_and(|n| n == 0);
        let idle = (!for_bytes || nothing(self.held(1))) && (!for_room || nothing(self.room(1)));
        (!gone && idle).then_some(PollFlags::POLLIN)
    }

    fn wake(&mut self) {
        self.word(ASLEEP, self.own).store(0, Ordering::Relaxed);
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }

    fn signs(&mut self) -> Signs {
        self.peer.as_ref().map_or(Signs::Unseen, |peer| Signs::Process(peer.state()))
    }

    fn part(&mut self, word: &Word) {
        let bytes = word.encode();
        let (len, place) = self.parting(self.own);
        for (eight, chunk) in place.zip(bytes.chunks(8)) {
            let mut value = [0; 8];
            value[..chunk.len()].copy_from_slice(chunk);
            eight.store(u64::from_le_bytes(value), Ordering::Relaxed);
        }
        len.store(bytes.len() as u64, Ordering::Release);
        // A connection that is gone already needs no closing.
        let _ = self.bell.shutdown(Shutdown::Both);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{Duration, Instant};

    fn pair() -> (Memory, Memory) {
        let (a, b) = UnixStream::pair().unwrap();
        std::thread::scope(|scope| {
            let accepted = scope.spawn(|| Memory::new(b, Side::Accepted).unwrap());
            (Memory::new(a, Side::Dialed).unwrap(), accepted.join().unwrap())
        })
    }

    #[test]
    fn bytes_arrive_in_order_over_many_turns_of_the_ring() {
        let (mut a, mut b) = pair();
        let byte = |i: usize| (i * 7 + i / 251) as u8;
        let total = 5 * RING + 13;
        let until = Instant::now() + Duration::from_secs(60);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut sent = 0;
                for n in [1, 97, 4096, RING + 1].into_iter().cycle() {
                    let piece: Vec<u8> = (sent..total.min(sent + n)).map(byte).collect();
                    sent += a.try_send(&piece).unwrap();
                    assert!(Instant::now() < until, "{sent} bytes are sent");
                    if sent == total {
                        break;
                    }
                }
            });
            let (mut got, mut into) = (0, [0; 1009]);
            while got < total {
                let n = b.try_receive(&mut into).unwrap();
                assert!(into[..n].iter().enumerate().all(|(i, &x)| x == byte(got + i)), "after {got} bytes");
                got += n;
                assert!(Instant::now() < until, "{got} bytes arrived");
            }
        });
    }

    #[test]
    fn letters_lie_on_their_shelf_until_they_are_taken() {
        let (mut a, mut b) = pair();
        let third = vec![7; SHELF / 3];
        let places: Vec<u32> = (0..3).map(|_| a.shelve(&third).unwrap().unwrap()).collect();
        assert_eq!(places, [0, 1, 2].map(|i| i * third.len() as u32));
        assert_eq!(a.shelve(&third).unwrap(), None, "the shelf is full");
        assert_eq!(b.shelve(&[1]).unwrap(), Some(0), "the other one isn't");
        let mut got = vec![0; third.len()];
        for &at in &places {
            assert_eq!(a.shelve(&third).unwrap(), None, "what lies there isn't moved");
            b.unshelve(at, &mut got).unwrap();
            assert!(got == third);
        }
        // All were taken.
        let whole: Vec<u8> = (0..SHELF).map(|i| (i * 7 + i / 251) as u8).collect();
        assert_eq!(a.shelve(&whole).unwrap(), Some(0));
        assert_eq!(a.shelve(&[1]).unwrap(), None);
        let mut got = vec![0; SHELF];
        b.unshelve(0, &mut got).unwrap();
        assert!(got == whole);
        assert_eq!(a.shelve(&vec![0; SHELF + 1]).unwrap(), None, "nothing is longer than a shelf");
    }

    #[test]
    fn places_that_cannot_be_are_an_error() {
        let (mut a, mut b) = pair();
        for (at, n) in [(SHELF as u32, 1), (0, SHELF + 1), (u32::MAX, 9)] {
            let lost = b.unshelve(at, &mut vec![0; n]).unwrap_err();
            assert!(matches!(lost, Lost::Seen(reason) if reason.contains("damaged")), "{at}, {n}");
        }
        a.word(TAKEN, 0).store(1, Ordering::Release);
        assert!(a.shelve(&[1]).is_err(), "more was taken than there was");
    }

    #[test]
    fn what_was_sent_before_a_death_arrives_and_then_the_death() {
        let (mut a, mut b) = pair();
        assert_eq!(a.try_send(&[1, 2, 3]).unwrap(), 3);
        drop(a);
        let mut into = [0; 8];
        assert_eq!(b.try_receive(&mut into).unwrap(), 3);
        let lost = (0..=LOOKS_PER_PULSE).find_map(|_| b.try_receive(&mut into).err());
        assert!(matches!(lost, Some(Lost::Seen(reason)) if reason.contains("gone")));
        assert!(b.fall_asleep(PollFlags::POLLIN).is_none(), "nobody sleeps waiting for the dead");
    }

    #[test]
    fn a_sleeper_is_woken_and_a_full_ring_is_no_reason_to_hang() {
        let (mut a, mut b) = pair();
        assert!(b.fall_asleep(PollFlags::POLLIN).is_some());
        a.try_send(&[1]).unwrap();
        assert!(b.is_rung(), "the bell was rung");
        b.wake();
        assert!(b.fall_asleep(PollFlags::POLLIN).is_none(), "there is something to receive");
        let full = vec![0; 2 * RING];
        assert_eq!(a.try_send(&full).unwrap(), RING - 1);
        assert_eq!(a.try_send(&full).unwrap(), 0);
        assert!(a.fall_asleep(PollFlags::POLLOUT).is_some());
        b.try_receive(&mut [0; 9]).unwrap();
        assert!(a.is_rung(), "the bell was rung");
        assert_eq!(a.try_send(&full).unwrap(), 9);
    }

    #[test]
    fn counts_that_cannot_be_are_an_error() {
        let (mut a, mut b) = pair();
        a.word(WRITTEN, 0).store(RING as u64 + 1, Ordering::Release);
        let is_damaged = |lost| matches!(lost, Lost::Seen(reason) if reason.contains("damaged"));
        assert!(is_damaged(b.try_receive(&mut [0; 8]).unwrap_err()));
        b.word(READ, 0).store(77, Ordering::Release);
        assert!(is_damaged(a.try_send(&[0; 2 * RING]).unwrap_err()));
    }

    #[test]
    fn a_parting_word_arrives_behind_what_was_sent() {
        let text = "x".repeat(crate::word::MAX_TEXT);
        let word = Word { by: phalanx_wire::Rank(3), why: crate::word::Why::Ended, text };
        let (mut a, mut b) = pair();
        assert_eq!(a.try_send(&[1, 2, 3]).unwrap(), 3);
        a.part(&word);
        assert_eq!(b.try_receive(&mut [0; 8]).unwrap(), 3);
        let lost = (0..=LOOKS_PER_PULSE).find_map(|_| b.try_receive(&mut [0; 8]).err());
        assert!(matches!(lost, Some(Lost::Told(told)) if told == word));
    }

    #[test]
    fn a_file_that_cannot_be_taken_is_an_error_and_no_death() {
        let (a, mut b) = pair();
        let file = File::open("/dev/null").unwrap();
        // More than there is room for, as if there were no descriptor for one.
        let fds = [file.as_raw_fd(); 3];
        let passed = [ControlMessage::ScmRights(&fds)];
        let bytes = [IoSlice::new(&[1])];
        sendmsg::<()>(a.bell.as_raw_fd(), &bytes, &passed, MsgFlags::MSG_NOSIGNAL, None).unwrap();
        assert!(
            matches!(b.take_passed(), Ok(Some(Err(error))) if error.to_string().contains("no descriptor"))
        );
        assert!(matches!(b.take_passed(), Ok(None)));
        send_file(&a.bell, &file).unwrap();
        assert!(matches!(b.take_passed(), Ok(Some(Ok(_)))));
    }

    #[test]
    fn a_parting_word_that_cannot_be_is_none() {
        let (a, b) = pair();
        for len in [1, 11, u64::MAX] {
            a.parting(0).1.for_each(|eight| eight.store(u64::MAX, Ordering::Relaxed));
            a.parting(0).0.store(len, Ordering::Release);
            assert!(matches!(b.lost(), Lost::Seen(_)), "{len} bytes");
        }
    }

    impl Memory {
        fn is_rung(&mut self) -> bool {
            read_bell(&self.bell, MsgFlags::MSG_DONTWAIT).is_ok_and(|(rings, _)| rings == 1)
        }
    }
}
