//! Frames, cut in every way, mad, and followed by a word.

use super::*;
use std::collections::VecDeque;

/// A kernel's buffer, which takes and gives so many bytes a call, over and over.
struct Pipe {
    bytes: VecDeque<u8>,
    /// What lies before it, where something does that takes all and brings it there bit by bit, as encryption does.
    kept: Option<VecDeque<u8>>,
    takes: VecDeque<usize>,
    gives: VecDeque<usize>,
    is_closed: bool,
}

fn step(steps: &mut VecDeque<usize>) -> usize {
    steps.rotate_left(1);
    *steps.back().expect("there is a step")
}

impl Write for Pipe {
    fn write(&mut self, bytes: &[u8]) -> Result<usize> {
        self.write_vectored(&[IoSlice::new(bytes)])
    }

    fn write_vectored(&mut self, slices: &[IoSlice<'_>]) -> Result<usize> {
        if self.kept.is_some() {
            self.flush()?;
            let new = slices.iter().flat_map(|slice| slice.iter());
            self.kept.as_mut().into_iter().for_each(|kept| kept.extend(new.clone()));
            return Ok(slices.iter().map(|slice| slice.len()).sum());
        }
        let step = step(&mut self.takes);
        if step == 0 {
            return Err(ErrorKind::WouldBlock.into());
        }
        let before = self.bytes.len();
        self.bytes.extend(slices.iter().flat_map(|slice| slice.iter()).take(step));
        Ok(self.bytes.len() - before)
    }

    fn flush(&mut self) -> Result<()> {
        let Some(kept) = self.kept.as_mut().filter(|kept| !kept.is_empty()) else { return Ok(()) };
        let step = step(&mut self.takes).min(kept.len());
        self.bytes.extend(kept.drain(..step));
        if kept.is_empty() { Ok(()) } else { Err(ErrorKind::WouldBlock.into()) }
    }
}

impl Read for Pipe {
    fn read(&mut self, into: &mut [u8]) -> Result<usize> {
        self.read_vectored(&mut [IoSliceMut::new(into)])
    }

    fn read_vectored(&mut self, slices: &mut [IoSliceMut<'_>]) -> Result<usize> {
        let room = slices.iter().map(|slice| slice.len()).sum();
        let step = step(&mut self.gives).min(self.bytes.len()).min(room);
        if step == 0 {
            let waits = !self.is_closed || !self.bytes.is_empty();
            return if waits { Err(ErrorKind::WouldBlock.into()) } else { Ok(0) };
        }
        let places = slices.iter_mut().flat_map(|slice| slice.iter_mut());
        Ok(places.zip(self.bytes.drain(..step)).map(|(place, byte)| *place = byte).count())
    }
}

fn pipe(steps: &[usize]) -> Pipe {
    let takes: VecDeque<usize> = steps.iter().copied().collect();
    Pipe { bytes: VecDeque::new(), kept: None, gives: takes.clone(), takes, is_closed: false }
}

fn word() -> Word {
    Word { by: phalanx_wire::Rank(2), why: crate::word::Why::Ended, text: "enough".into() }
}

fn stream(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 7 + i / 251) as u8).collect()
}

/// Sends messages of these lengths with beats when nothing goes, then a word, and reads pieces of this size; once right into the
/// kernel, and once with something in between.
fn check(lens: &[usize], steps: &[usize], piece: usize) {
    go(lens, steps, piece, pipe(steps));
    go(lens, steps, piece, Pipe { kept: Some(VecDeque::new()), ..pipe(steps) });
}

fn go(lens: &[usize], steps: &[usize], piece: usize, mut pipe: Pipe) {
    let (mut sender, mut receiver) = (Sender::default(), Receiver::default());
    let bytes = stream(lens.iter().sum());
    let (mut sent, mut got, mut into, mut idle) = (0, Vec::new(), vec![0; piece], 0);
    for len in lens {
        let end = sent + len;
        while sent < end {
            let n = sender.send(&mut pipe, &bytes[sent..end]).unwrap();
            sent += n;
            idle += usize::from(n == 0);
            if n == 0 && idle.is_multiple_of(4) {
                sender.beat(&mut pipe).unwrap();
            }
            let n = receiver.receive(&mut pipe, &mut into).unwrap();
            got.extend_from_slice(&into[..n]);
        }
        // What counts as sent is the kernel's.
        assert!(pipe.kept.iter().all(VecDeque::is_empty), "lens {lens:?}, steps {steps:?}, piece {piece}");
    }
    while sender.untold > 0 || sender.at < sender.rest.len() {
        sender.beat(&mut pipe).unwrap();
        let is_free = sender.flush(&mut pipe).unwrap();
        sender.tell(is_free, usize::MAX);
    }
    sender.part(&mut pipe, &word()).unwrap();
    while !sender.flush(&mut pipe).unwrap() {}
    pipe.is_closed = true;
    let end = loop {
        match receiver.receive(&mut pipe, &mut into) {
            Ok(n) => got.extend_from_slice(&into[..n]),
            Err(end) => break end,
        }
    };
    assert!(got == bytes, "lens {lens:?}, steps {steps:?}, piece {piece}");
    assert_eq!(end, End::Word(word()), "lens {lens:?}, steps {steps:?}, piece {piece}");
}

#[test]
fn data_beats_and_a_word_arrive_however_they_are_cut() {
    for lens in [&[1][..], &[36, 36, 1], &[MAX_DATA], &[MAX_DATA + 1, 5], &[32, 3 * MAX_DATA, 40]] {
        for steps in [&[usize::MAX][..], &[1, 0], &[3, 0, 7, 1000], &[MAX_DATA + HEAD, 0], &[60_000, 0, 2]] {
            for piece in [1, 32, 100_000] {
                check(lens, steps, piece);
            }
        }
    }
}

proptest::proptest! {
    #![proptest_config(proptest::test_runner::Config::with_cases(64))]

    #[test]
    fn any_cuts(
        lens in proptest::collection::vec(1usize..100_000, 1..4),
        steps in proptest::collection::vec(0usize..70_000, 1..5),
        piece in 1usize..100_000,
    ) {
        // A kernel that never takes anything ends no test.
        let steps = [&steps[..], &[5000]].concat();
        check(&lens, &steps, piece);
    }

    #[test]
    fn garbage_is_named_or_awaited_and_never_more_than_came(
        bytes in proptest::collection::vec(0u8.., 0..3000),
        kind in proptest::sample::select(vec![Kind::Data as u8, Kind::Beat as u8, Kind::Word as u8]),
    ) {
        let mut pipe = pipe(&[usize::MAX]);
        pipe.bytes = [&[kind], &bytes[..]].concat().into();
        pipe.is_closed = true;
        let (mut receiver, mut got, mut into) = (Receiver::default(), 0, [0; 100]);
        while let Ok(n) = receiver.receive(&mut pipe, &mut into) {
            got += n;
        }
        assert!(got < 1 + bytes.len());
    }
}

#[test]
fn a_mad_head_is_no_frame() {
    let rows = [
        [0; HEAD],
        *b"GET ",
        head(Kind::Data, 0),
        head(Kind::Data, MAX_DATA + 1),
        head(Kind::Beat, 1),
        head(Kind::Word, 0),
        head(Kind::Word, MAX_WORD + 1),
    ];
    for first in rows {
        let mut pipe = pipe(&[usize::MAX]);
        pipe.bytes = first.into();
        let mut receiver = Receiver::default();
        assert_eq!(receiver.receive(&mut pipe, &mut [0; 8]), Err(End::Mad), "{first:?}");
        assert!(receiver.holds());
    }
}

#[test]
fn what_came_before_an_end_comes_first() {
    let mut pipe = pipe(&[usize::MAX]);
    let mut sender = Sender::default();
    sender.send(&mut pipe, &[1, 2, 3]).unwrap();
    sender.beat(&mut pipe).unwrap();
    assert_eq!(pipe.bytes.len(), HEAD + 3, "what was sent is sign enough");
    sender.beat(&mut pipe).unwrap();
    assert_eq!(pipe.bytes.len(), HEAD + 3 + HEAD);
    pipe.is_closed = true;
    let (mut receiver, mut into) = (Receiver::default(), [0; 8]);
    assert_eq!(receiver.receive(&mut pipe, &mut into), Ok(3));
    assert_eq!(receiver.receive(&mut pipe, &mut into), Err(End::Closed("its connection closed".into())));
}

#[test]
fn a_frame_that_was_begun_is_finished_without_the_caller() {
    let bytes = stream(1000);
    let mut pipe = pipe(&[500, 0, usize::MAX]);
    pipe.gives = [usize::MAX].into();
    let (mut sender, mut receiver) = (Sender::default(), Receiver::default());
    assert_eq!(sender.send(&mut pipe, &bytes).unwrap(), 500 - HEAD);
    assert_eq!(sender.send(&mut pipe, &bytes[500 - HEAD..]).unwrap(), 0);
    sender.part(&mut pipe, &word()).unwrap();
    let mut into = [0; 2000];
    assert_eq!(receiver.receive(&mut pipe, &mut into), Ok(1000));
    assert!(into[..1000] == bytes);
    assert_eq!(receiver.receive(&mut pipe, &mut into), Err(End::Word(word())));
    assert_eq!(
        sender.send(&mut pipe, &bytes[500 - HEAD..]).unwrap(),
        500 + HEAD,
        "the caller is told in the end"
    );
}
