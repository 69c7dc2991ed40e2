//! Handshakes and frames as strangers would have them: cut, changed, replayed, reflected, stale, or of another run. All of them
//! are refused, before the deadline, without a proof for who has none.

use phalanx_wire::{
    Deadline, Generation, HandshakeError, Hello, Rank, Secret, Side, Socket, handshake, read_frame,
    write_frame,
};
use proptest::prelude::*;
use std::io::{Read, Result as IoResult, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

/// Bytes that say what is spoken, the nonce, and who speaks for what.
const GREETING: usize = 8 + 32 + 1 + "comm".len() + 12;
const PROOF: usize = 32;
const LIMIT: Duration = Duration::from_secs(20);
/// Who lacks a byte waits so long for it.
const SHORT: Duration = Duration::from_millis(300);

fn hello(rank: u32, generation: u64) -> Hello {
    Hello { purpose: "comm".into(), rank: Rank(rank), generation: Generation(generation) }
}

fn secret() -> Secret {
    Secret::from_bytes([3; 32])
}

/// A stranger's words that were prepared, to a party that writes what it likes.
struct Prepared<'a> {
    words: &'a [u8],
    answers: Vec<u8>,
}

impl Read for Prepared<'_> {
    fn read(&mut self, into: &mut [u8]) -> IoResult<usize> {
        self.words.read(into)
    }
}

impl Write for Prepared<'_> {
    fn write(&mut self, from: &[u8]) -> IoResult<usize> {
        self.answers.write(from)
    }

    fn flush(&mut self) -> IoResult<()> {
        Ok(())
    }
}

impl Socket for Prepared<'_> {
    fn limit(&self, _: Duration) -> IoResult<()> {
        Ok(())
    }
}

/// What a party makes of prepared words, and what it answers.
fn told(words: &[u8], side: Side) -> (Result<Hello, HandshakeError>, Vec<u8>) {
    let mut prepared = Prepared { words, answers: Vec::new() };
    let result = handshake(&mut prepared, &secret(), side, &hello(0, 7), &Deadline::after(LIMIT));
    (result, prepared.answers)
}

/// Changes what passes from the dialer to the accepter: the byte at a place.
struct Meddler<'a> {
    stream: &'a mut UnixStream,
    passed: usize,
    at: usize,
    flip: u8,
    recorded: Vec<u8>,
}

impl Read for Meddler<'_> {
    fn read(&mut self, into: &mut [u8]) -> IoResult<usize> {
        let n = self.stream.read(into)?;
        for byte in &mut into[..n] {
            if self.passed == self.at {
                *byte ^= self.flip;
            }
            self.passed += 1;
            self.recorded.push(*byte);
        }
        Ok(n)
    }
}

impl Write for Meddler<'_> {
    fn write(&mut self, from: &[u8]) -> IoResult<usize> {
        self.stream.write(from)
    }

    fn flush(&mut self) -> IoResult<()> {
        Ok(())
    }
}

impl Socket for Meddler<'_> {
    fn limit(&self, limit: Duration) -> IoResult<()> {
        self.stream.limit(limit)
    }
}

/// What the accepter makes of a dialer whose byte `at` is changed by the bits of `flip` on its way, and all that came.
fn meddled(at: usize, flip: u8) -> (Result<Hello, HandshakeError>, Vec<u8>) {
    let (mut dialer, mut accepter) = UnixStream::pair().unwrap();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            // What it thinks of that is its own affair.
            let _ = handshake(&mut dialer, &secret(), Side::Dialed, &hello(1, 7), &Deadline::after(SHORT));
        });
        let mut meddler = Meddler { stream: &mut accepter, passed: 0, at, flip, recorded: Vec::new() };
        let deadline = Deadline::after(SHORT);
        let result = handshake(&mut meddler, &secret(), Side::Accepted, &hello(0, 7), &deadline);
        let recorded = meddler.recorded;
        drop(accepter);
        (result, recorded)
    })
}

/// All that a dialer says.
fn conversation() -> Vec<u8> {
    let (result, recorded) = meddled(usize::MAX, 0);
    assert_eq!(result.unwrap(), hello(1, 7));
    recorded
}

#[test]
fn a_handshake_with_any_byte_changed_is_refused() {
    let len = conversation().len();
    for at in 0..len {
        for flip in [1, 0x80, 0xff] {
            let (result, _) = meddled(at, flip);
            assert!(result.is_err(), "byte {at} of {len}, changed by {flip:#x}: {result:?}");
        }
    }
}

#[test]
fn a_recording_is_refused_whoever_plays_it_and_wherever_it_ends() {
    let recorded = conversation();
    for len in 0..=recorded.len() {
        for side in [Side::Accepted, Side::Dialed] {
            let (result, answers) = told(&recorded[..len], side);
            assert!(result.is_err(), "{len} bytes to who {side:?}");
            // A dialer proves itself first: to these nonces, so that the proof is good for nobody else.
            let proof = if side == Side::Dialed { PROOF } else { 0 };
            assert!(answers.len() <= GREETING + proof, "{} bytes", answers.len());
        }
    }
}

#[test]
fn a_mirror_proves_nothing() {
    /// Says what it hears.
    struct Mirror(Vec<u8>, usize);
    impl Read for Mirror {
        fn read(&mut self, into: &mut [u8]) -> IoResult<usize> {
            let n = (&self.0[self.1..]).read(into)?;
            self.1 += n;
            Ok(n)
        }
    }
    impl Write for Mirror {
        fn write(&mut self, from: &[u8]) -> IoResult<usize> {
            self.0.write(from)
        }
        fn flush(&mut self) -> IoResult<()> {
            Ok(())
        }
    }
    impl Socket for Mirror {
        fn limit(&self, _: Duration) -> IoResult<()> {
            Ok(())
        }
    }
    for side in [Side::Dialed, Side::Accepted] {
        let mut mirror = Mirror(Vec::new(), 0);
        let result = handshake(&mut mirror, &secret(), side, &hello(0, 7), &Deadline::after(LIMIT));
        assert!(result.is_err(), "{side:?}: {result:?}");
    }
}

#[test]
fn neither_a_stale_nor_a_future_generation_is_let_in() {
    for (generation, own) in [(6, 7), (8, 7), (0, u64::MAX), (u64::MAX, 0)] {
        let (mut a, mut b) = UnixStream::pair().unwrap();
        std::thread::scope(|scope| {
            let ours = hello(1, generation);
            let there = scope.spawn(move || {
                handshake(&mut a, &secret(), Side::Dialed, &ours, &Deadline::after(LIMIT)).unwrap_err()
            });
            let ours = hello(0, own);
            let here = handshake(&mut b, &secret(), Side::Accepted, &ours, &Deadline::after(LIMIT));
            assert!(
                matches!(here, Err(HandshakeError::Disagreement { .. })),
                "{generation}, {own}: {here:?}"
            );
            assert!(matches!(there.join().unwrap(), HandshakeError::Disagreement { .. }));
        });
    }
}

proptest! {
    #[test]
    fn nonsense_is_refused_and_gets_no_proof(words in prop::collection::vec(any::<u8>(), 0..400)) {
        let (result, answers) = told(&words, Side::Accepted);
        prop_assert!(result.is_err());
        prop_assert_eq!(answers.len(), GREETING);
    }

    #[test]
    fn a_greeting_that_goes_on_as_it_likes_is_refused(rest in prop::collection::vec(any::<u8>(), 0..400)) {
        let mut words = b"phalanx1".to_vec();
        words.extend(rest);
        for side in [Side::Accepted, Side::Dialed] {
            prop_assert!(told(&words, side).0.is_err());
        }
    }

    #[test]
    fn a_frame_comes_out_as_it_went_in_or_not_at_all(
        payload in prop::collection::vec(any::<u8>(), 0..300),
        limit in 0usize..300,
        cut in 0usize..400,
        at in 0usize..400,
        flip in any::<u8>(),
    ) {
        let mut bytes = Vec::new();
        write_frame(&mut bytes, &payload).unwrap();
        match read_frame(&mut &bytes[..], limit) {
            Ok(read) => prop_assert_eq!(&read, &payload),
            Err(_) => prop_assert!(payload.len() > limit),
        }
        let cut = &bytes[..cut.min(bytes.len())];
        prop_assert_eq!(read_frame(&mut &*cut, 300).is_ok(), cut.len() == bytes.len());
        // A length that was changed is believed only up to the limit, and only if so much came.
        if let Some(byte) = bytes.get_mut(at) {
            *byte ^= flip;
        }
        if let Ok(read) = read_frame(&mut &bytes[..], limit) {
            prop_assert!(read.len() <= limit && read.len() + 4 <= bytes.len());
        }
    }
}
