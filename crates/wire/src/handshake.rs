//! The mutual proof that both ends of a connection know the run's secret.
//!
//! Both sides send a fresh nonce and say who they are; then the dialer proves itself, and only when its proof was right does
//! the accepter answer with its own. A proof is an HMAC over the side, both nonces, both hellos and the [`Socket::binding`], so
//! it can't be reflected, replayed, or moved to another claim or to another connection that has a binding. Nothing else is read from a connection before this; every length is bounded, and so is
//! the time of the whole, however slowly the bytes come.

use crate::deadline::Deadline;
use crate::ids::{Generation, Rank};
use crate::secret::Secret;
use std::fmt;
use std::io::{Error, ErrorKind, Read, Result as IoResult, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::time::Duration;
use subtle::ConstantTimeEq;
use thiserror::Error;

const MAGIC: &[u8; 8] = b"phalanx1";
/// What one who begins in the clear hears where that isn't wanted, in place of an opening.
pub(crate) const WANTS_TLS: &[u8; MAGIC.len() + NONCE] = b"phalanx+TLS is wanted here, and nothing.";
const NONCE: usize = 32;
const PROOF: usize = 32;
/// The longest purpose in bytes.
const MAX_PURPOSE: usize = 64;

/// What one side says of itself; its proof covers it.
#[derive(Clone, Debug, PartialEq)]
pub struct Hello {
    /// What the connection is for; both sides must say the same.
    pub purpose: String,
    /// Who speaks.
    pub rank: Rank,
    /// In which membership of the run; both sides must say the same.
    pub generation: Generation,
}

/// A blocking connection whose reads and writes can be limited.
pub trait Socket: Read + Write {
    /// From now on, a read or write that makes no progress for so long is an error.
    fn limit(&self, limit: Duration) -> IoResult<()>;

    /// What only the two ends of this very connection have in common, where it is encrypted; nothing else is like it.
    /// Both proofs cover it, so one who is in between, with an encrypted connection to each end, can't pass them on.
    fn binding(&self) -> IoResult<Vec<u8>> {
        Ok(Vec::new())
    }
}

impl Socket for TcpStream {
    fn limit(&self, limit: Duration) -> IoResult<()> {
        self.set_read_timeout(Some(limit))?;
        self.set_write_timeout(Some(limit))
    }
}

impl Socket for &TcpStream {
    fn limit(&self, limit: Duration) -> IoResult<()> {
        (*self).limit(limit)
    }
}

impl Socket for UnixStream {
    fn limit(&self, limit: Duration) -> IoResult<()> {
        self.set_read_timeout(Some(limit))?;
        self.set_write_timeout(Some(limit))
    }
}

/// A socket until a deadline.
pub(crate) struct Limited<'a, S> {
    pub(crate) socket: &'a mut S,
    pub(crate) deadline: &'a Deadline,
}

impl<S: Socket> Limited<'_, S> {
    pub(crate) fn within<R>(&mut self, act: impl FnOnce(&mut S) -> IoResult<R>) -> IoResult<R> {
        let late =
            || Error::new(ErrorKind::TimedOut, format!("no proof within {:.1?}", self.deadline.waited()));
        if self.deadline.expired() {
            return Err(late());
        }
        self.socket.limit(self.deadline.remaining().max(Duration::from_millis(1)))?;
        act(self.socket).map_err(|error| match error.kind() {
            ErrorKind::WouldBlock | ErrorKind::TimedOut => late(),
            _ => error,
        })
    }
}

impl<S: Socket> Read for Limited<'_, S> {
    fn read(&mut self, into: &mut [u8]) -> IoResult<usize> {
        self.within(|socket| socket.read(into))
    }
}

impl<S: Socket> Write for Limited<'_, S> {
    fn write(&mut self, from: &[u8]) -> IoResult<usize> {
        self.within(|socket| socket.write(from))
    }

    fn flush(&mut self) -> IoResult<()> {
        self.socket.flush()
    }
}

/// Which end of the connection this is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Side {
    /// The end that made the connection.
    Dialed,
    /// The end that was listening.
    Accepted,
}

pub(crate) const TLS_HINT: &str = "\nhint: give the whole run TLS, or nothing of it: --tls, or PHALANX_TLS=1";

/// Why a peer was refused.
#[derive(Debug, Error)]
pub enum HandshakeError {
    /// The connection ended or stalled.
    #[error("the connection broke during the handshake: {0}")]
    Io(Error),
    /// The other end speaks something else.
    #[error("the other end doesn't speak this protocol")]
    NotOurs,
    /// The other end doesn't know the secret.
    #[error("the other end doesn't have this run's secret")]
    WrongSecret,
    /// The other end encrypts.
    #[error("the other end wants TLS, which this one has not{}", TLS_HINT)]
    WantsTls,
    /// The other end doesn't encrypt.
    #[error("the other end has no TLS, which this one wants{}", TLS_HINT)]
    HasNoTls,
    /// Both know the secret, but want different things.
    #[error("the other end wants {theirs}, this end {ours}")]
    Disagreement {
        /// What the other end said.
        theirs: Box<Hello>,
        /// What this end said.
        ours: Box<Hello>,
    },
}

impl From<Error> for HandshakeError {
    /// What a session of TLS couldn't begin for is told in an error of I/O, as everything else of it.
    fn from(error: Error) -> HandshakeError {
        error.downcast().unwrap_or_else(HandshakeError::Io)
    }
}

impl fmt::Display for Hello {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of generation {}", self.purpose, self.generation)
    }
}

impl Hello {
    fn encode(&self) -> Vec<u8> {
        assert!(self.purpose.len() <= MAX_PURPOSE, "a purpose of {} bytes", self.purpose.len());
        let mut bytes = vec![self.purpose.len() as u8];
        bytes.extend_from_slice(self.purpose.as_bytes());
        bytes.extend_from_slice(&self.rank.0.to_le_bytes());
        bytes.extend_from_slice(&self.generation.0.to_le_bytes());
        bytes
    }

    /// Reads an encoded hello; gives its bytes too, as the proofs cover them.
    fn read(stream: &mut impl Read) -> Result<(Hello, Vec<u8>), HandshakeError> {
        let mut len = [0];
        stream.read_exact(&mut len)?;
        let n = usize::from(len[0]);
        if n > MAX_PURPOSE {
            return Err(HandshakeError::NotOurs);
        }
        let mut rest = vec![0; n + 12];
        stream.read_exact(&mut rest)?;
        let purpose = String::from_utf8(rest[..n].to_vec()).map_err(|_| HandshakeError::NotOurs)?;
        let rank = Rank(u32::from_le_bytes(rest[n..n + 4].try_into().expect("four bytes")));
        let generation = Generation(u64::from_le_bytes(rest[n + 4..].try_into().expect("eight bytes")));
        rest.insert(0, len[0]);
        Ok((Hello { purpose, rank, generation }, rest))
    }
}

/// Proves to the other end that this one knows the secret, and has it proven, all before the deadline; gives what the other
/// end said of itself. Leaves limits on the socket, which the caller sets as it wants them from then on.
pub fn handshake<S: Socket>(
    socket: &mut S,
    secret: &Secret,
    side: Side,
    hello: &Hello,
    deadline: &Deadline,
) -> Result<Hello, HandshakeError> {
    let stream = &mut Limited { socket, deadline };
    let ours = Opening::say(stream, hello)?;
    let theirs = Opening::hear(stream)?;
    prove(stream, secret, side, ours, theirs)
}

/// As [`handshake`] of the side that was listening, which may be there for several things: what it says of itself is `answer`
/// to what the dialer says, of which nothing is proven yet.
pub fn welcome<S: Socket>(
    socket: &mut S,
    secret: &Secret,
    deadline: &Deadline,
    answer: impl FnOnce(&Hello) -> Hello,
) -> Result<Hello, HandshakeError> {
    let stream = &mut Limited { socket, deadline };
    let theirs = Opening::hear(stream)?;
    let ours = Opening::say(stream, &answer(&theirs.hello))?;
    prove(stream, secret, Side::Accepted, ours, theirs)
}

/// What one side begins with.
struct Opening {
    nonce: [u8; NONCE],
    hello: Hello,
    encoded: Vec<u8>,
}

impl Opening {
    fn say<S: Socket>(stream: &mut Limited<'_, S>, hello: &Hello) -> Result<Opening, HandshakeError> {
        let mut nonce = [0; NONCE];
        getrandom::fill(&mut nonce).map_err(|error| std::io::Error::other(error.to_string()))?;
        let encoded = hello.encode();
        stream.write_all(&[&MAGIC[..], &nonce, &encoded].concat())?;
        stream.flush()?;
        Ok(Opening { nonce, hello: hello.clone(), encoded })
    }

    fn hear<S: Socket>(stream: &mut Limited<'_, S>) -> Result<Opening, HandshakeError> {
        let mut start = [0; MAGIC.len() + NONCE];
        stream.read_exact(&mut start)?;
        let (magic, nonce) = start.split_at(MAGIC.len());
        if start == *WANTS_TLS {
            return Err(HandshakeError::WantsTls);
        }
        if magic != MAGIC {
            return Err(HandshakeError::NotOurs);
        }
        let nonce = nonce.try_into().expect("a nonce is what is left");
        let (hello, encoded) = Hello::read(stream)?;
        Ok(Opening { nonce, hello, encoded })
    }
}

/// The proofs of both sides, after their openings.
fn prove<S: Socket>(
    stream: &mut Limited<'_, S>,
    secret: &Secret,
    side: Side,
    ours: Opening,
    theirs: Opening,
) -> Result<Hello, HandshakeError> {
    let (dialer, accepter) = if side == Side::Dialed { (&ours, &theirs) } else { (&theirs, &ours) };
    let binding = stream.socket.binding()?;
    let proof = |label: &[u8]| {
        let (from, to) = (dialer, accepter);
        secret.sign(&[label, &from.nonce, &from.encoded, &to.nonce, &to.encoded, &binding])
    };
    let verify = |stream: &mut Limited<'_, S>, label: &[u8]| -> Result<(), HandshakeError> {
        let mut got = [0; PROOF];
        stream.read_exact(&mut got)?;
        if bool::from(got.ct_eq(&proof(label))) { Ok(()) } else { Err(HandshakeError::WrongSecret) }
    };
    match side {
        Side::Dialed => {
            stream.write_all(&proof(b"dialed"))?;
            stream.flush()?;
            verify(stream, b"accepted").map_err(|error| match error {
                // An accepter that hangs up instead of answering didn't like the proof.
                HandshakeError::Io(e) if e.kind() == std::io::ErrorKind::UnexpectedEof => {
                    HandshakeError::WrongSecret
                }
                other => other,
            })?;
        }
        Side::Accepted => {
            verify(stream, b"dialed")?;
            stream.write_all(&proof(b"accepted"))?;
            stream.flush()?;
        }
    }
    let (ours, theirs) = (ours.hello, theirs.hello);
    if theirs.purpose != ours.purpose || theirs.generation != ours.generation {
        return Err(HandshakeError::Disagreement { theirs: Box::new(theirs), ours: Box::new(ours) });
    }
    Ok(theirs)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Cursor;
    use std::os::unix::net::UnixStream;

    fn hello(purpose: &str, rank: u32, generation: u64) -> Hello {
        Hello { purpose: purpose.into(), rank: Rank(rank), generation: Generation(generation) }
    }

    fn soon() -> Deadline {
        Deadline::after(Duration::from_secs(20))
    }

    type Ends = (Result<Hello, HandshakeError>, Result<Hello, HandshakeError>);

    /// What the dialer and the accepter make of each other.
    fn meet(secrets: [&Secret; 2], hellos: [&Hello; 2]) -> Ends {
        let (mut a, mut b) = UnixStream::pair().unwrap();
        std::thread::scope(|scope| {
            let dialer = scope.spawn(move || handshake(&mut a, secrets[0], Side::Dialed, hellos[0], &soon()));
            let accepter = handshake(&mut b, secrets[1], Side::Accepted, hellos[1], &soon());
            drop(b);
            (dialer.join().unwrap(), accepter)
        })
    }

    #[test]
    fn both_ends_learn_who_the_other_is() {
        let secret = Secret::random().unwrap();
        let (a, b) = (hello("comm", 3, 7), hello("comm", 1, 7));
        let (dialer, accepter) = meet([&secret, &secret], [&a, &b]);
        assert_eq!((dialer.unwrap(), accepter.unwrap()), (b, a));
    }

    #[test]
    fn a_wrong_secret_a_stale_generation_and_another_purpose_are_refused() {
        let (secret, other) = (Secret::random().unwrap(), Secret::random().unwrap());
        let ours = hello("comm", 0, 7);
        let (dialer, accepter) = meet([&other, &secret], [&hello("comm", 1, 7), &ours]);
        assert!(
            matches!(dialer, Err(HandshakeError::WrongSecret))
                && matches!(accepter, Err(HandshakeError::WrongSecret))
        );
        for strange in [hello("comm", 1, 6), hello("coord", 1, 7)] {
            let (dialer, accepter) = meet([&secret, &secret], [&strange, &ours]);
            assert!(matches!(dialer, Err(HandshakeError::Disagreement { .. })));
            assert!(matches!(accepter, Err(HandshakeError::Disagreement { .. })));
        }
    }

    /// A connection with a binding.
    struct Bound(UnixStream, Vec<u8>);

    impl Read for Bound {
        fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
            self.0.read(into)
        }
    }

    impl Write for Bound {
        fn write(&mut self, from: &[u8]) -> std::io::Result<usize> {
            self.0.write(from)
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    impl Socket for Bound {
        fn limit(&self, limit: Duration) -> std::io::Result<()> {
            self.0.limit(limit)
        }
        fn binding(&self) -> std::io::Result<Vec<u8>> {
            Ok(self.1.clone())
        }
    }

    #[test]
    fn proofs_that_went_through_another_connection_are_refused() {
        let rows: [(&[u8], &[u8], bool); 4] =
            [(b"x", b"x", true), (b"", b"", true), (b"x", b"y", false), (b"x", b"", false)];
        for (dialers, accepters, is_good) in rows {
            let secret = Secret::from_bytes([1; 32]);
            let (a, b) = UnixStream::pair().unwrap();
            let (mut a, mut b) = (Bound(a, dialers.into()), Bound(b, accepters.into()));
            let (a, b) = std::thread::scope(|scope| {
                let theirs = &secret;
                let dialer = scope
                    .spawn(move || handshake(&mut a, theirs, Side::Dialed, &hello("comm", 1, 7), &soon()));
                let accepter = handshake(&mut b, &secret, Side::Accepted, &hello("comm", 0, 7), &soon());
                drop(b);
                (dialer.join().unwrap(), accepter)
            });
            for end in [a, b] {
                let is_refused = matches!(end, Err(HandshakeError::WrongSecret));
                assert!(
                    end.is_ok() == is_good && is_refused != is_good,
                    "{dialers:?} {accepters:?}: {end:?}"
                );
            }
        }
    }

    /// Reads from one place and writes to another.
    struct Half<'a>(Cursor<&'a [u8]>, Vec<u8>);

    impl Read for Half<'_> {
        fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
            self.0.read(into)
        }
    }

    impl Write for Half<'_> {
        fn write(&mut self, from: &[u8]) -> std::io::Result<usize> {
            self.1.write(from)
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    impl Socket for Half<'_> {
        fn limit(&self, _: Duration) -> std::io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn one_who_drips_bytes_is_not_waited_for_longer_than_the_rest() {
        struct Drip(usize);
        impl Read for Drip {
            fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
                self.0 += 1;
                std::thread::sleep(Duration::from_millis(1));
                into[0] = MAGIC.get(self.0 - 1).copied().unwrap_or(0);
                Ok(1)
            }
        }
        impl Write for Drip {
            fn write(&mut self, from: &[u8]) -> std::io::Result<usize> {
                Ok(from.len())
            }
            fn flush(&mut self) -> std::io::Result<()> {
                Ok(())
            }
        }
        impl Socket for Drip {
            fn limit(&self, _: Duration) -> std::io::Result<()> {
                Ok(())
            }
        }
        let deadline = Deadline::after(Duration::from_millis(10));
        let (secret, hello) = (Secret::from_bytes([1; 32]), hello("comm", 0, 1));
        let mut drip = Drip(0);
        let error = handshake(&mut drip, &secret, Side::Accepted, &hello, &deadline).unwrap_err();
        assert!(error.to_string().contains("no proof within"), "{error}");
        assert!(drip.0 <= 11, "{} bytes were waited for", drip.0);
    }

    #[test]
    fn a_replayed_handshake_is_refused() {
        let secret = Secret::random().unwrap();
        // What a dialer sent once, recorded.
        let (mut a, mut b) = UnixStream::pair().unwrap();
        let recorded = std::thread::scope(|scope| {
            scope.spawn(|| handshake(&mut b, &secret, Side::Accepted, &hello("comm", 0, 1), &soon()));
            struct Tap<'a>(&'a mut UnixStream, Vec<u8>);
            impl Read for Tap<'_> {
                fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
                    self.0.read(into)
                }
            }
            impl Write for Tap<'_> {
                fn write(&mut self, from: &[u8]) -> std::io::Result<usize> {
                    self.1.extend_from_slice(from);
                    self.0.write(from)
                }
                fn flush(&mut self) -> std::io::Result<()> {
                    Ok(())
                }
            }
            impl Socket for Tap<'_> {
                fn limit(&self, limit: Duration) -> std::io::Result<()> {
                    self.0.limit(limit)
                }
            }
            let mut tap = Tap(&mut a, Vec::new());
            handshake(&mut tap, &secret, Side::Dialed, &hello("comm", 1, 1), &soon()).unwrap();
            tap.1
        });
        let mut replay = Half(Cursor::new(&recorded), Vec::new());
        let result = handshake(&mut replay, &secret, Side::Accepted, &hello("comm", 0, 1), &soon());
        assert!(matches!(result, Err(HandshakeError::WrongSecret)), "{result:?}");
        // Cut at every byte: an error, and never a proof of our own.
        let sent_before_proof = MAGIC.len() + NONCE + hello("comm", 0, 1).encode().len();
        for len in 0..recorded.len() {
            let mut cut = Half(Cursor::new(&recorded[..len]), Vec::new());
            assert!(handshake(&mut cut, &secret, Side::Accepted, &hello("comm", 0, 1), &soon()).is_err());
            assert_eq!(cut.1.len(), sent_before_proof);
        }
    }

    proptest::proptest! {
        #[test]
        fn garbage_is_refused(bytes in proptest::collection::vec(0u8.., 0..300)) {
            let mut garbage = Half(Cursor::new(&bytes), Vec::new());
            let secret = Secret::from_bytes([1; 32]);
            assert!(handshake(&mut garbage, &secret, Side::Accepted, &hello("comm", 0, 1), &soon()).is_err());
        }
    }
}
