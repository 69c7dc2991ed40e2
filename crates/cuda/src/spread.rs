//! Runs of elements that lie apart, and that one launch goes over.

/// One of them. Where it begins is counted in elements from a place that the launch names, and may lie before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// Where its elements come from.
    pub from: i64,
    /// Where they go to.
    pub to: i64,
    /// How many there are: at least one.
    pub len: usize,
}

/// Up to [`Spread::MOST`] runs, as kernels take them; the same bytes as `Spread` in `kernels/convert.cu`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Spread(Vec<Run>);

impl Spread {
    /// How many runs a launch goes over at most.
    pub const MOST: usize = 32;
    /// How many bytes a launch hands over.
    pub const BYTES: usize = Spread::MOST * 4 * size_of::<i64>();
    /// Elements of a run that a block takes at a time.
    pub const CHUNK: usize = 2048;

    /// These runs. Panics if there are more than a launch can take, or one is empty.
    #[track_caller]
    pub fn new(runs: Vec<Run>) -> Spread {
        assert!(
            runs.len() <= Spread::MOST,
            "{} runs for a launch, of which it takes {}",
            runs.len(),
            Spread::MOST
        );
        assert!(runs.iter().all(|run| run.len > 0), "an empty run");
        Spread(runs)
    }

    /// How many runs there are.
    pub fn runs(&self) -> usize {
        self.0.len()
    }

    /// The chunks of all runs; the last one of each may be short.
    pub fn chunks(&self) -> usize {
        self.0.iter().map(|run| run.len.div_ceil(Spread::CHUNK)).sum()
    }

    /// The bytes that a launch hands over.
    pub fn to_bytes(&self) -> [u8; Spread::BYTES] {
        let mut bytes = [0; Spread::BYTES];
        let (mut first, mut places) = (0, bytes.chunks_exact_mut(size_of::<i64>()));
        for run in &self.0 {
            for (number, place) in
                [run.from, run.to, run.len as i64, first as i64].into_iter().zip(&mut places)
            {
                place.copy_from_slice(&number.to_ne_bytes());
            }
            first += run.len.div_ceil(Spread::CHUNK);
        }
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_run_begins_with_a_chunk_of_its_own() {
        let run = |len| Run { from: -3, to: 5, len };
        let spread = Spread::new(vec![run(1), run(Spread::CHUNK), run(Spread::CHUNK + 1), run(7)]);
        assert_eq!((spread.runs(), spread.chunks()), (4, 5));
        let numbers: Vec<i64> =
            spread.to_bytes().as_chunks::<8>().0.iter().map(|bytes| i64::from_ne_bytes(*bytes)).collect();
        let chunk = Spread::CHUNK as i64;
        assert_eq!(numbers[..16], [-3, 5, 1, 0, -3, 5, chunk, 1, -3, 5, chunk + 1, 2, -3, 5, 7, 4]);
        assert!(numbers[16..].iter().all(|number| *number == 0));
    }

    #[test]
    #[should_panic(expected = "33 runs for a launch, of which it takes 32")]
    fn more_than_a_launch_can_take_is_refused() {
        Spread::new(vec![Run { from: 0, to: 0, len: 1 }; 33]);
    }
}
