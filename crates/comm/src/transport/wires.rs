//! Ranks in processes: one wire a pair, each of the kind that suits where the peer is.

use super::{Lost, Pulse, Signs, Transport, Waker};
use crate::word::{Why, Word};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::{EfdFlags, EventFd};
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A rank's end of the connection to one other.
pub(crate) trait Wire: Send {
    /// Takes as many bytes as fit now; says how many.
    fn try_send(&mut self, bytes: &[u8]) -> Result<usize, Lost>;

    /// Brings as many bytes as are there now; says how many.
    fn try_receive(&mut self, into: &mut [u8]) -> Result<usize, Lost>;

    /// The next bytes that are there, where they lie, if this wire can show them: as many as lie in one piece.
    fn look(&mut self) -> Result<Option<&[u8]>, Lost> {
        Ok(None)
    }

    /// So many bytes that were looked at are done with.
    fn consume(&mut self, _: usize) {}

    /// Hands the peer a file, whose memory both then see; whether that could be done now. Only for peers of this host.
    fn pass(&mut self, _: &File) -> Result<bool, Lost> {
        Err(Lost::Seen("memory can't be shared with it".into()))
    }

    /// The next file that the peer passed, if there is one.
    fn take_passed(&mut self) -> Result<Option<File>, Lost> {
        Err(Lost::Seen("memory can't be shared with it".into()))
    }

    /// Whether files can be passed.
    fn shares_memory(&self) -> bool {
        false
    }

    /// Gets ready for a sleep until something may be received (or, for `PollFlags::POLLOUT`, sent): the events to sleep
    /// for. None if that is so already.
    fn fall_asleep(&mut self, wanted: PollFlags) -> Option<PollFlags>;

    /// The sleep is over.
    fn wake(&mut self) {}

    /// What the events happen to.
    fn fd(&self) -> BorrowedFd<'_>;

    /// Has `pulse` give signs of life over it, if the peer needs that.
    fn beat_by(&self, _: &Pulse) -> std::io::Result<()> {
        Ok(())
    }

    /// What can be seen of the peer without waiting.
    fn signs(&mut self) -> Signs {
        Signs::Unseen
    }

    /// Whether the peer's host has all that was sent, after this rank has left: what still comes is let go.
    fn is_delivered(&mut self) -> bool {
        true
    }

    /// Tells the peer why this rank leaves, if that goes without waiting, and leaves, so that the peer notices.
    fn part(&mut self, word: &Word);

    /// What this is, for people.
    fn name(&self) -> &'static str;
}

/// How long a rank that leaves waits for the others' hosts to have what it sent: where there may be results in it, and where
/// there is only its word.
const LEAVING: Duration = Duration::from_secs(30);
const LEAVING_FAILED: Duration = Duration::from_millis(500);
/// How long it sleeps before it looks again.
const LEAVING_NAP: Duration = Duration::from_micros(200);

/// A process's end of a group.
pub(crate) struct Wires {
    /// By rank; none for this rank itself.
    wires: Vec<Option<Box<dyn Wire>>>,
    /// Written to by wakers.
    alarm: Arc<EventFd>,
    /// How long what was sent may take to arrive, once this rank has left.
    leaving: Duration,
}

impl Wires {
    /// Over connections that are made and proven already.
    pub(crate) fn new(wires: Vec<Option<Box<dyn Wire>>>) -> std::io::Result<Wires> {
        let alarm = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?;
        Ok(Wires { wires, alarm: Arc::new(alarm), leaving: Duration::ZERO })
    }

    fn wire(&mut self, peer: usize) -> &mut Box<dyn Wire> {
        self.wires[peer].as_mut().expect("a connection to every other rank")
    }
}

impl Transport for Wires {
    fn try_send(&mut self, to: usize, bytes: &[u8]) -> Result<usize, Lost> {
        self.wire(to).try_send(bytes)
    }

    fn try_receive(&mut self, from: usize, into: &mut [u8]) -> Result<usize, Lost> {
        if into.is_empty() { Ok(0) } else { self.wire(from).try_receive(into) }
    }

    fn look(&mut self, from: usize) -> Result<Option<&[u8]>, Lost> {
        self.wire(from).look()
    }

    fn consume(&mut self, from: usize, n: usize) {
        self.wire(from).consume(n)
    }

    fn pass(&mut self, to: usize, file: &File) -> Result<bool, Lost> {
        self.wire(to).pass(file)
    }

    fn take_passed(&mut self, from: usize) -> Result<Option<File>, Lost> {
        self.wire(from).take_passed()
    }

    fn shares_memory(&self) -> bool {
        self.wires.iter().flatten().all(|wire| wire.shares_memory())
    }

    fn park(&mut self, receives: &[usize], sends: &[usize], at_most: Duration) {
        // One entry a peer: a wire falls asleep once.
        let flags = |peer: usize| {
            let mut flags = PollFlags::empty();
            flags.set(PollFlags::POLLIN, receives.contains(&peer));
            flags.set(PollFlags::POLLOUT, sends.contains(&peer));
            (peer, flags)
        };
        let wanted = (0..self.wires.len()).map(flags).filter(|(_, flags)| !flags.is_empty());
        let wanted: Vec<_> = wanted.collect();
        let events: Vec<_> = wanted.iter().map(|&(peer, flag)| self.wire(peer).fall_asleep(flag)).collect();
        if events.iter().all(Option::is_some) {
            let fds = wanted.iter().zip(events).map(|(&(peer, _), events)| {
                let wire = self.wires[peer].as_ref().expect("a connection to every other rank");
                PollFd::new(wire.fd(), events.unwrap_or(PollFlags::empty()))
            });
            let alarm = PollFd::new(self.alarm.as_fd(), PollFlags::POLLIN);
            let mut fds: Vec<PollFd<'_>> = fds.chain([alarm]).collect();
            // Rounded up, so that a wait that is nearly over doesn't become a spin; an error only ends the sleep early.
            let ms = at_most.as_millis().saturating_add(1);
            let _ = poll(&mut fds, PollTimeout::try_from(ms).unwrap_or(PollTimeout::MAX));
        }
        wanted.iter().for_each(|&(peer, _)| self.wire(peer).wake());
        // An alarm that didn't ring has nothing to read.
        let _ = self.alarm.read();
    }

    fn waker(&self) -> Waker {
        let alarm = Arc::clone(&self.alarm);
        // A counter that is full has rung already.
        Box::new(move || {
            let _ = alarm.write(1);
        })
    }

    fn signs(&mut self, peer: usize) -> Signs {
        self.wire(peer).signs()
    }

    fn part(&mut self, word: &Word) {
        let is_done = word.why == Why::Left && !std::thread::panicking();
        self.leaving = if is_done { LEAVING } else { LEAVING_FAILED };
        self.wires.iter_mut().flatten().for_each(|wire| wire.part(word));
    }

    fn name(&self) -> String {
        let mut names: Vec<&str> = self.wires.iter().flatten().map(|wire| wire.name()).collect();
        names.sort_unstable();
        names.dedup();
        names.join(" and ")
    }
}

impl Drop for Wires {
    /// A kernel takes back what a closed connection still has to send as soon as anything comes for it, a beat say.
    fn drop(&mut self) {
        let end = Instant::now() + self.leaving;
        while !self.wires.iter_mut().flatten().all(|wire| wire.is_delivered()) {
            if Instant::now() > end {
                let leaving = self.leaving;
                return tracing::warn!(
                    "a peer hasn't taken what was sent to it within {leaving:?}, and may miss it"
                );
            }
            std::thread::sleep(LEAVING_NAP);
        }
    }
}
