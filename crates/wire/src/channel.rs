//! A blocking connection whose ends have proven themselves, in the clear or in a session of TLS, and that several threads use
//! at once: one reads, others write, and any may end it. Clones are the same connection.
//!
//! What is written with one call arrives in one piece; who writes when is not decided here. Whether a connection is encrypted
//! is for both ends to say: one that wants it and one that doesn't are told so at once.

use crate::deadline::Deadline;
use crate::handshake::{HandshakeError, Hello, Limited, Side, Socket, WANTS_TLS, handshake, welcome};
use crate::pass::Pass;
use crate::tls::Session;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use std::fmt;
use std::io::{Error, ErrorKind, Read, Result, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The connection.
#[derive(Clone)]
pub struct Channel(Arc<Inside>);

struct Inside {
    stream: TcpStream,
    /// With it the stream doesn't block: whoever waits leaves the session to the others meanwhile.
    session: Option<Mutex<Session>>,
    limits: Mutex<Limits>,
    /// Held by whoever writes, so that what two write isn't mixed.
    turn: Mutex<()>,
}

/// How long a read or a write may make no progress; none for ever.
#[derive(Clone, Copy, Default)]
struct Limits {
    read: Option<Duration>,
    write: Option<Duration>,
}

/// What is locked is whole between any two statements that could panic.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What a session of TLS begins with, and what nothing else of ours does.
const SESSION: u8 = 0x16;
/// A record that says, to one who begins a session, that there can be none.
const NO_SESSION: [u8; 7] = [0x15, 3, 1, 0, 2, 2, 70];

/// Looks at how one who dialed begins, and refuses it where that isn't how this end goes on.
fn agree(
    mut stream: &TcpStream,
    pass: &Pass,
    deadline: &Deadline,
) -> std::result::Result<(), HandshakeError> {
    let mut first = [0];
    let peeked = loop {
        match (Limited { socket: &mut stream, deadline }).within(|stream| stream.peek(&mut first)) {
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            peeked => break peeked?,
        }
    };
    if peeked == 0 {
        return Err(std::io::Error::from(ErrorKind::UnexpectedEof).into());
    }
    match (pass.tls(), first[0] == SESSION) {
        (Some(_), true) | (None, false) => Ok(()),
        (None, true) => {
            stream.write_all(&NO_SESSION)?;
            Err(HandshakeError::WantsTls)
        }
        (Some(_), false) => {
            stream.write_all(WANTS_TLS)?;
            Err(HandshakeError::HasNoTls)
        }
    }
}

impl Channel {
    /// Over a connection that this end made, by [`handshake`]; gives what the other end said of itself.
    pub fn dial(
        stream: TcpStream,
        pass: &Pass,
        hello: &Hello,
        deadline: &Deadline,
    ) -> std::result::Result<(Channel, Hello), HandshakeError> {
        let channel = Channel::over(stream, pass.tls().map(|tls| |stream| tls.dial(stream, deadline)))?;
        let theirs = handshake(&mut &channel, pass.secret(), Side::Dialed, hello, deadline)?;
        channel.unlimited(theirs)
    }

    /// As [`Channel::dial`], over one that came, by [`welcome`].
    pub fn accept(
        stream: TcpStream,
        pass: &Pass,
        deadline: &Deadline,
        answer: impl FnOnce(&Hello) -> Hello,
    ) -> std::result::Result<(Channel, Hello), HandshakeError> {
        agree(&stream, pass, deadline)?;
        let channel = Channel::over(stream, pass.tls().map(|tls| |stream| tls.accept(stream, deadline)))?;
        let theirs = welcome(&mut &channel, pass.secret(), deadline, answer)?;
        channel.unlimited(theirs)
    }

    /// Without the limits that a handshake leaves.
    fn unlimited(self, theirs: Hello) -> std::result::Result<(Channel, Hello), HandshakeError> {
        self.set_read_timeout(None)?;
        self.set_write_timeout(None)?;
        Ok((self, theirs))
    }

    fn over(stream: TcpStream, begin: Option<impl FnOnce(TcpStream) -> Result<Session>>) -> Result<Channel> {
        stream.set_nodelay(true)?;
        let session = begin.map(|begin| begin(stream.try_clone()?)).transpose()?;
        if session.is_some() {
            stream.set_nonblocking(true)?;
        }
        let session = session.map(Mutex::new);
        let (limits, turn) = (Mutex::default(), Mutex::default());
        Ok(Channel(Arc::new(Inside { stream, session, limits, turn })))
    }

    /// From now on, a read that brings nothing for so long is an error.
    pub fn set_read_timeout(&self, limit: Option<Duration>) -> Result<()> {
        lock(&self.0.limits).read = limit;
        if self.0.session.is_none() { self.0.stream.set_read_timeout(limit) } else { Ok(()) }
    }

    /// From now on, a write of which nothing is taken for so long is an error.
    pub fn set_write_timeout(&self, limit: Option<Duration>) -> Result<()> {
        lock(&self.0.limits).write = limit;
        if self.0.session.is_none() { self.0.stream.set_write_timeout(limit) } else { Ok(()) }
    }

    /// Ends the connection, whoever is reading or writing.
    pub fn shutdown(&self, how: Shutdown) -> Result<()> {
        self.0.stream.shutdown(how)
    }

    /// The address of this end.
    pub fn local_addr(&self) -> Result<SocketAddr> {
        self.0.stream.local_addr()
    }

    /// Whether a read would bring something at once, or the end.
    pub fn is_readable(&self) -> bool {
        self.is_readable_within(Duration::ZERO)
    }

    /// The same, waiting so long for it, or less where a signal comes.
    pub fn is_readable_within(&self, limit: Duration) -> bool {
        let holds = self.0.session.as_ref().is_some_and(|session| lock(session).holds());
        let mut fds = [PollFd::new(self.0.stream.as_fd(), PollFlags::POLLIN)];
        let limit = PollTimeout::try_from(limit.as_millis()).unwrap_or(PollTimeout::MAX);
        holds || poll(&mut fds, limit).is_ok_and(|n| n > 0)
    }

    /// Does something with the session as soon as the kernel lets it, without keeping the session from others meanwhile.
    fn when<R>(
        &self,
        session: &Mutex<Session>,
        events: PollFlags,
        limit: Option<Duration>,
        mut act: impl FnMut(&mut Session) -> Result<R>,
    ) -> Result<R> {
        // Of what is written something was taken; bytes of a record that isn't whole bring a reader nothing.
        let (since, counts_all) = (Instant::now(), events == PollFlags::POLLIN);
        loop {
            match act(&mut lock(session)) {
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                done => return done,
            }
            let left =
                limit.map(|limit| if counts_all { limit.saturating_sub(since.elapsed()) } else { limit });
            let ms = left.map(|left| PollTimeout::try_from(left.as_millis() + 1).unwrap_or(PollTimeout::MAX));
            match poll(&mut [PollFd::new(self.0.stream.as_fd(), events)], ms.unwrap_or(PollTimeout::NONE)) {
                Ok(0) => return Err(ErrorKind::TimedOut.into()),
                Ok(_) | Err(nix::errno::Errno::EINTR) => {}
                Err(error) => return Err(Error::from(error)),
            }
        }
    }
}

impl Read for &Channel {
    fn read(&mut self, into: &mut [u8]) -> Result<usize> {
        let Some(session) = &self.0.session else { return (&self.0.stream).read(into) };
        let limit = lock(&self.0.limits).read;
        self.when(session, PollFlags::POLLIN, limit, |session| session.read(into))
    }
}

impl Write for &Channel {
    fn write(&mut self, from: &[u8]) -> Result<usize> {
        self.write_all(from).map(|()| from.len())
    }

    fn write_all(&mut self, from: &[u8]) -> Result<()> {
        let _turn = lock(&self.0.turn);
        let Some(session) = &self.0.session else { return (&self.0.stream).write_all(from) };
        let limit = lock(&self.0.limits).write;
        let mut rest = from;
        while !rest.is_empty() {
            let n = self.when(session, PollFlags::POLLOUT, limit, |session| session.write(rest))?;
            rest = &rest[n..];
        }
        // The session has it all, and the kernel perhaps not yet.
        self.when(session, PollFlags::POLLOUT, limit, |session| session.flush())
    }

    fn flush(&mut self) -> Result<()> {
        Ok(())
    }
}

impl Socket for &Channel {
    fn limit(&self, limit: Duration) -> Result<()> {
        self.set_read_timeout(Some(limit))?;
        self.set_write_timeout(Some(limit))
    }

    fn binding(&self) -> Result<Vec<u8>> {
        self.0.session.as_ref().map_or(Ok(Vec::new()), |session| lock(session).binding())
    }
}

impl fmt::Debug for Channel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = if self.0.session.is_some() { "TLS" } else { "TCP" };
        write!(f, "{kind} {:?}", self.0.stream)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frame::{read_frame, write_frame};
    use crate::ids::{Generation, Rank};
    use crate::pair::{pair, soon};
    use crate::secret::Secret;

    /// Has `f` go over both ends of a connection of each kind that this build has.
    fn check(f: impl Fn(Channel, Channel)) {
        let secret = Secret::from_bytes([7; 32]);
        let hello = |rank| Hello { purpose: "test".into(), rank: Rank(rank), generation: Generation(1) };
        for pass in [Pass::from(&secret)].into_iter().chain(Pass::encrypted(secret.clone())) {
            let (dialed, accepted) = pair();
            let (dialer, accepter) = std::thread::scope(|scope| {
                let dialer = scope.spawn(|| Channel::dial(dialed, &pass, &hello(1), &soon()).unwrap());
                (Channel::accept(accepted, &pass, &soon(), |_| hello(0)).unwrap(), dialer.join().unwrap())
            });
            assert_eq!((dialer.1, accepter.1), (hello(1), hello(0)));
            f(dialer.0, accepter.0);
        }
    }

    #[test]
    fn frames_of_many_writers_arrive_whole_while_both_ends_are_full() {
        const FRAMES: usize = 20;
        check(|one, other| {
            for end in [&one, &other] {
                end.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
                end.0.stream.set_write_timeout(Some(Duration::from_secs(20))).unwrap();
            }
            std::thread::scope(|scope| {
                for end in [&one, &other] {
                    for writer in 1..=3u8 {
                        scope.spawn(move || {
                            (0..FRAMES)
                                .for_each(|_| write_frame(&mut &*end, &vec![writer; 100_000]).unwrap());
                        });
                    }
                    scope.spawn(move || {
                        for _ in 0..3 * FRAMES {
                            let frame = read_frame(&mut &*end, 100_000).unwrap();
                            assert!(frame.len() == 100_000 && frame.iter().all(|byte| *byte == frame[0]));
                        }
                    });
                }
            });
        });
    }

    #[test]
    fn whoever_says_nothing_is_told_of_by_the_time_that_was_waited() {
        let secret = Secret::from_bytes([7; 32]);
        for pass in [Pass::from(&secret)].into_iter().chain(Pass::encrypted(secret.clone())) {
            let (_silent, accepted) = pair();
            let hello = Hello { purpose: "test".into(), rank: Rank(0), generation: Generation(1) };
            let deadline = Deadline::after(Duration::from_millis(20));
            let error = Channel::accept(accepted, &pass, &deadline, |_| hello).map(|_| ()).unwrap_err();
            assert!(error.to_string().contains("no proof within"), "{error}");
        }
    }

    #[test]
    fn a_read_ends_with_its_limit_or_with_the_connection() {
        check(|one, other| {
            one.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
            let error = (&one).read(&mut [0]).unwrap_err();
            assert!(matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut), "{error}");
            one.set_read_timeout(None).unwrap();
            assert!(!one.is_readable());
            write_frame(&mut &other, b"hello").unwrap();
            assert_eq!(read_frame(&mut &one, 5).unwrap(), b"hello");
            std::thread::scope(|scope| {
                let reads = scope.spawn(|| (&one).read(&mut [0]));
                one.clone().shutdown(Shutdown::Both).unwrap();
                assert!(matches!(reads.join().unwrap(), Ok(0) | Err(_)));
            });
            assert!(other.is_readable());
            assert!(matches!((&other).read(&mut [0]), Ok(0) | Err(_)), "the other end sees it too");
        });
    }

    #[test]
    fn what_came_with_something_else_is_readable() {
        check(|one, other| {
            write_frame(&mut &one, b"ab").unwrap();
            (&other).read_exact(&mut [0; 5]).unwrap();
            assert!(other.is_readable(), "a byte is left");
            (&other).read_exact(&mut [0]).unwrap();
            assert!(!other.is_readable());
        });
    }

    #[test]
    fn ends_that_do_not_both_want_tls_are_told_at_once() {
        let clear = Pass::from(Secret::from_bytes([7; 32]));
        let Ok(tls) = Pass::encrypted(clear.secret().clone()) else { return };
        let hello = || Hello { purpose: "test".into(), rank: Rank(0), generation: Generation(1) };
        for (dials, accepts, wants) in [
            (&clear, &tls, ["the other end wants TLS", "the other end has no TLS"]),
            (&tls, &clear, ["the other end has no TLS", "the other end wants TLS"]),
        ] {
            let (dialed, accepted) = pair();
            let errors = std::thread::scope(|scope| {
                let dialer = scope.spawn(|| Channel::dial(dialed, dials, &hello(), &soon()).err());
                let accepter = Channel::accept(accepted, accepts, &soon(), |_| hello()).err();
                [dialer.join().unwrap(), accepter]
            });
            for (error, want) in errors.into_iter().zip(wants) {
                let error = error.unwrap().to_string();
                assert!(error.contains(want) && error.contains("hint: "), "{error}");
            }
        }
    }

    #[test]
    fn both_ends_of_an_encrypted_connection_have_the_same_binding() {
        check(|one, other| {
            let is_encrypted = format!("{one:?}").starts_with("TLS");
            let binding = (&one).binding().unwrap();
            assert_eq!(binding, (&other).binding().unwrap());
            assert_eq!(binding.is_empty(), !is_encrypted);
        });
    }
}
