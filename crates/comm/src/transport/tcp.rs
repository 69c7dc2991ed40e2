//! A peer anywhere: a TCP connection, over which [`frames`] go, encrypted or not.

mod frames;
mod info;
mod pulse;

pub(crate) use pulse::{BEAT, Pulse};

use super::signs::Traffic;
use super::{Lost, Signs, Wire};
use crate::word::Word;
use frames::{End, Receiver, Sender};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{setsockopt, sockopt};
use phalanx_wire::tls::Session;
use std::io::{ErrorKind, IoSlice, IoSliceMut, Read, Result, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Mutex, MutexGuard};

/// A process's end.
pub(crate) struct Tcp {
    line: Arc<Line>,
    receiver: Receiver,
    /// Whether the last sleep is over and nothing was looked at since.
    is_awake: bool,
    /// Whether this rank has left, and its word hasn't: there was no room for it.
    is_parting: bool,
}

/// What the thread that beats shares with the one that sends.
struct Line {
    stream: Arc<TcpStream>,
    /// What is locked before `session`.
    sender: Mutex<Sender>,
    session: Option<Mutex<Session>>,
}

/// What frames go through.
enum Channel<'a> {
    Plain(&'a TcpStream),
    Tls(MutexGuard<'a, Session>),
}

/// The peer has closed its end: an event that `nix` has no name for.
const LEFT: PollFlags = PollFlags::from_bits_retain(nix::libc::POLLRDHUP);
/// How much the kernel may keep of what is sent: asked for when a rank parts, so that there is room for its word. A system may allow
/// less (`net.core.wmem_max`), and then the word waits until the peer takes some of what lies before it.
const ROOM_TO_PART: usize = 4 << 20;
/// After so many of the times in which what is lost is sent again nothing is missing any more that was lost twice: the second time is
/// twice as long as the first.
const LOSSY_PAUSE: u32 = 4;
/// Bytes that came in too late and are let go, so that the kernel doesn't take back what it still has to send.
const MAX_LATE: u64 = 64 << 20;

impl Tcp {
    /// Over a connection that is made and proven already.
    pub(crate) fn new(stream: TcpStream, pulse: &Pulse) -> Result<Tcp> {
        Tcp::over(Arc::new(stream), None, pulse)
    }

    /// The same, in a session.
    pub(crate) fn with_tls(session: Session, pulse: &Pulse) -> Result<Tcp> {
        Tcp::over(Arc::clone(session.stream()), Some(Mutex::new(session)), pulse)
    }

    fn over(stream: Arc<TcpStream>, session: Option<Mutex<Session>>, pulse: &Pulse) -> Result<Tcp> {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        let line = Arc::new(Line { stream, sender: Mutex::default(), session });
        pulse.keep(&line)?;
        Ok(Tcp { line, receiver: Receiver::default(), is_awake: false, is_parting: false })
    }

    /// Whether the peer has closed its end.
    fn is_left(&self) -> bool {
        let mut fds = [PollFd::new(self.line.stream.as_fd(), LEFT)];
        poll(&mut fds, PollTimeout::ZERO).is_ok_and(|n| n > 0)
    }

    /// Whether something came that the kernel doesn't have any more.
    fn holds(&mut self) -> bool {
        self.receiver.holds() || self.line.channel().holds()
    }

    /// Takes what came, for nobody. A connection that broke meanwhile has nothing more.
    fn let_go(&mut self) {
        let _ = std::io::copy(&mut (&*self.line.stream).take(MAX_LATE), &mut std::io::sink());
    }

    /// Ends the connection behind the last word, unless that has still to be said. Where it can't be, the end says enough.
    fn close(&mut self, said: Result<bool>) {
        self.is_parting = matches!(said, Ok(false));
        if !self.is_parting {
            // Not both directions: the kernel would answer what still comes by taking back what it didn't send yet.
            let _ = self.line.stream.shutdown(Shutdown::Write);
        }
    }

    /// Why a peer is lost that takes nothing any more: it may have said so.
    fn farewell(&mut self, seen: &str) -> Lost {
        match self.receiver.last_word(&mut self.line.channel()) {
            Some(End::Word(word)) => Lost::Told(word),
            _ => Lost::Seen(seen.into()),
        }
    }
}

impl Line {
    /// A sign of life; whether there can be another. Whoever sends something now gives one.
    fn beat(&self) -> bool {
        self.sender.try_lock().map_or(true, |mut sender| sender.beat(&mut self.channel()).is_ok())
    }

    /// A sender is whole between any two statements that could panic.
    fn sender(&self) -> MutexGuard<'_, Sender> {
        self.sender.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// One who panicked in a session has left it where no record begins, as the other end finds out.
    fn channel(&self) -> Channel<'_> {
        match &self.session {
            None => Channel::Plain(&self.stream),
            Some(session) => Channel::Tls(session.lock().unwrap_or_else(|poisoned| poisoned.into_inner())),
        }
    }
}

impl Channel<'_> {
    /// Whether something came that the kernel doesn't have any more.
    fn holds(&self) -> bool {
        match self {
            Channel::Plain(_) => false,
            Channel::Tls(session) => session.holds(),
        }
    }
}

impl Read for Channel<'_> {
    fn read(&mut self, into: &mut [u8]) -> Result<usize> {
        self.read_vectored(&mut [IoSliceMut::new(into)])
    }

    fn read_vectored(&mut self, slices: &mut [IoSliceMut<'_>]) -> Result<usize> {
        match self {
            Channel::Plain(stream) => stream.read_vectored(slices),
            Channel::Tls(session) => session.read_vectored(slices),
        }
    }
}

impl Write for Channel<'_> {
    fn write(&mut self, from: &[u8]) -> Result<usize> {
        self.write_vectored(&[IoSlice::new(from)])
    }

    fn write_vectored(&mut self, slices: &[IoSlice<'_>]) -> Result<usize> {
        match self {
            Channel::Plain(stream) => stream.write_vectored(slices),
            Channel::Tls(session) => session.write_vectored(slices),
        }
    }

    fn flush(&mut self) -> Result<()> {
        match self {
            Channel::Plain(_) => Ok(()),
            Channel::Tls(session) => session.flush(),
        }
    }
}

impl From<End> for Lost {
    fn from(end: End) -> Lost {
        match end {
            End::Word(word) => Lost::Told(word),
            End::Closed(reason) => Lost::Seen(reason),
            End::Mad => Lost::Seen("it sent something that isn't a frame".into()),
        }
    }
}

impl Wire for Tcp {
    fn try_send(&mut self, bytes: &[u8]) -> std::result::Result<usize, Lost> {
        let sent = self.line.sender().send(&mut self.line.channel(), bytes);
        match sent {
            // Who has left takes nothing, and doesn't say so in this direction.
            Ok(0) if std::mem::take(&mut self.is_awake) && self.is_left() => {
                Err(self.farewell("its connection closed"))
            }
            Ok(n) => Ok(n),
            Err(error) => Err(self.farewell(&error.to_string())),
        }
    }

    fn try_receive(&mut self, into: &mut [u8]) -> std::result::Result<usize, Lost> {
        Ok(self.receiver.receive(&mut self.line.channel(), into)?)
    }

    fn fall_asleep(&mut self, wanted: PollFlags) -> Option<PollFlags> {
        if wanted.contains(PollFlags::POLLIN) && self.holds() {
            return None;
        }
        Some(if wanted.contains(PollFlags::POLLOUT) { wanted | LEFT } else { wanted })
    }

    fn wake(&mut self) {
        self.is_awake = true;
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.line.stream.as_fd()
    }

    fn signs(&mut self) -> Signs {
        let Ok(known) = info::info(&self.line.stream) else { return Signs::Unseen };
        // An end is something to be met too.
        let unread = self.holds()
            || !matches!(self.line.stream.peek(&mut [0]), Err(error) if error.kind() == ErrorKind::WouldBlock);
        Signs::Network(Traffic {
            silent: known.silent,
            arrived: known.arrived,
            unread,
            unanswered: known.is_owed_answer().then_some(known.unanswered),
            lossy_pause: LOSSY_PAUSE * known.is_resent_after(),
            moved: known.acknowledged + known.received,
        })
    }

    fn is_delivered(&mut self) -> bool {
        self.let_go();
        if self.is_parting {
            let said = self.line.sender().flush(&mut self.line.channel());
            self.close(said);
            if self.is_parting {
                return false;
            }
        }
        info::info(&self.line.stream).map_or(true, |known| known.unacknowledged == 0 && known.unsent == 0)
    }

    fn part(&mut self, word: &Word) {
        let _ = setsockopt(&self.line.stream, sockopt::SndBuf, &ROOM_TO_PART);
        let said = self.line.sender().part(&mut self.line.channel(), word);
        self.close(said);
    }
}

impl Drop for Tcp {
    fn drop(&mut self) {
        // For the same reason nothing is left unread.
        self.let_go();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::word::Why;
    use phalanx_wire::Rank;
    use std::net::{Ipv4Addr, TcpListener};
    use std::time::{Duration, Instant};

    /// Two ends, which give no signs of life.
    fn pair() -> [Tcp; 2] {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let dialed = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        [dialed, listener.accept().unwrap().0].map(|stream| Tcp::new(stream, &Pulse::default()).unwrap())
    }

    #[test]
    fn a_word_that_finds_no_room_is_said_when_there_is_some() {
        let [mut a, mut b] = pair();
        // It can be no more when the rank parts, as where a system allows little.
        setsockopt(&a.line.stream, sockopt::SndBuf, &ROOM_TO_PART).unwrap();
        let mut bytes = vec![7; 1 << 20];
        while a.try_send(&bytes).unwrap() > 0 {}
        let word = Word { by: Rank(3), why: Why::Ended, text: "enough".into() };
        a.part(&word);
        let until = Instant::now() + Duration::from_secs(20);
        let lost = loop {
            a.is_delivered();
            match b.try_receive(&mut bytes) {
                Ok(_) => assert!(Instant::now() < until, "nothing more comes"),
                Err(lost) => break lost,
            }
        };
        assert!(matches!(&lost, Lost::Told(told) if *told == word), "{lost:?}");
    }
}
