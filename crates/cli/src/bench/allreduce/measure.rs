//! All-reduces of one size: timed, and every element of every result held against the exact sum.
//!
//! Rank r brings (r + 1) times a pattern that moves on by one element every round, so a sum is that pattern times
//! 1 + 2 + ... + n. All of these are whole numbers far below 2^24, so the sum is exact in whatever order it is taken, and a
//! slice that was left out, taken twice, shifted, or left over from the round before shows.

use phalanx::comm::{Error, Group, ReduceOp};
use std::fmt;
use std::time::Instant;

/// After how many elements the pattern begins anew: a prime, so that no power of two is a multiple of it.
const PERIOD: usize = 1021;

/// How many all-reduces there are of one size.
#[derive(Clone, Copy)]
pub(super) struct Rounds {
    /// Those that go before.
    pub(super) warm_up: usize,
    pub(super) counted: usize,
}

impl Rounds {
    /// As many as were asked for, or else as many as take a gigabyte.
    pub(super) fn of(bytes: usize, asked: Option<usize>) -> Rounds {
        let counted = asked.unwrap_or(((1 << 30) / bytes).clamp(20, 1000));
        Rounds { warm_up: counted.div_ceil(5), counted }
    }
}

/// What came of them.
pub(super) struct Measured {
    /// Microseconds of the slowest rank in each round that counts, the shortest first; the same on all ranks.
    pub(super) times: Vec<f64>,
    /// Wrong elements of all ranks and rounds.
    pub(super) wrong: u64,
    /// The first one of this rank.
    pub(super) first_wrong: Option<WrongElement>,
    /// The algorithm of the last round, and why it was chosen.
    pub(super) how: String,
    /// As `times`, where the library that sums was left alone.
    pub(super) alone: Option<Vec<f64>>,
}

impl Measured {
    /// The time below or at which so many of a hundred rounds are.
    pub(super) fn percentile(&self, percent: usize) -> f64 {
        percentile(&self.times, percent)
    }
}

/// That of times that are in order.
pub(super) fn percentile(times: &[f64], percent: usize) -> f64 {
    times[(times.len() * percent).div_ceil(100).max(1) - 1]
}

/// The times of the slowest rank in each round, the shortest first; the same on all ranks.
pub(super) fn of_slowest(group: &Group, mut times: Vec<f64>) -> Result<Vec<f64>, Error> {
    group.all_reduce(&mut times, ReduceOp::Max)?;
    times.sort_by(f64::total_cmp);
    Ok(times)
}

/// An element that isn't the sum.
#[derive(Debug, PartialEq)]
pub(super) struct WrongElement {
    rank: usize,
    index: usize,
    len: usize,
    round: usize,
    got: f32,
    want: f32,
}

impl fmt::Display for WrongElement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let WrongElement { rank, index, len, round, got, want } = self;
        write!(
            f,
            "rank {rank}: element {index} of {len} is {got} after all-reduce {round}, want {want}\n\
             hint: please report it, with the command; if it is another element each time, test the memory first"
        )
    }
}

impl std::error::Error for WrongElement {}

/// Calls `reduce`, which is to be the group's sum, on `values`, as long on every rank. Each round begins with a barrier, and neither
/// that nor making and verifying the values is in its time.
pub(super) fn measure(
    group: &Group,
    values: &mut [f32],
    rounds: Rounds,
    mut reduce: impl FnMut(&mut [f32]) -> Result<(), Error>,
) -> Result<Measured, Error> {
    let rank = group.rank().index();
    let mut times = Vec::with_capacity(rounds.counted);
    let (mut wrong, mut first_wrong, mut how) = (0, None, String::new());
    for round in 0..rounds.warm_up + rounds.counted {
        let [own, sum] = brought_and_summed(group, round);
        fill(values, &own);
        group.barrier()?;
        let start = Instant::now();
        reduce(values)?;
        let time = start.elapsed();
        if round >= rounds.warm_up {
            times.push(time.as_secs_f64() * 1e6);
        }
        if round + 1 == rounds.warm_up + rounds.counted {
            how = group.history().pop().map_or(how, |record| record.algorithm);
        }
        let (wrong_here, first_here) = wrong_of(values, &sum, rank, round);
        first_wrong = first_wrong.or(first_here);
        wrong += wrong_here;
    }
    let times = of_slowest(group, times)?;
    let mut everywhere = [wrong];
    group.all_reduce(&mut everywhere, ReduceOp::Sum)?;
    Ok(Measured { times, wrong: everywhere[0], first_wrong, how, alone: None })
}

/// What a rank brings to a round, and what the sum of all is; each repeats itself.
pub(super) fn brought_and_summed(group: &Group, round: usize) -> [Vec<f32>; 2] {
    let n = group.world_size();
    [pattern(round, group.rank().index() + 1), pattern(round, n * (n + 1) / 2)]
}

/// Repeats a pattern all over.
pub(super) fn fill(values: &mut [f32], pattern: &[f32]) {
    values.chunks_mut(PERIOD).for_each(|part| part.copy_from_slice(&pattern[..part.len()]));
}

/// How many elements aren't the sum, and the first of them.
pub(super) fn wrong_of(
    values: &[f32],
    sum: &[f32],
    rank: usize,
    round: usize,
) -> (u64, Option<WrongElement>) {
    let wrong = count_wrong(values, sum);
    let at = |&i: &usize| wrong > 0 && values[i] != sum[i % PERIOD];
    let first = (0..values.len()).find(at).map(|index| {
        let (got, want) = (values[index], sum[index % PERIOD]);
        WrongElement { rank, index, len: values.len(), round, got, want }
    });
    (wrong as u64, first)
}

/// `times` the pattern of a round.
fn pattern(round: usize, times: usize) -> Vec<f32> {
    (0..PERIOD).map(|i| (((i + round) % PERIOD + 1) * times) as f32).collect()
}

fn count_wrong(values: &[f32], want: &[f32]) -> usize {
    let part_wrong = |part: &[f32]| part.iter().zip(want).filter(|(got, want)| got != want).count();
    values.chunks(PERIOD).map(part_wrong).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What three ranks get of three rounds, the first a warm-up, over `len` elements.
    fn results(len: usize, reduce: impl Fn(&Group, &mut [f32]) -> Result<(), Error> + Sync) -> Vec<Measured> {
        let (rounds, reduce) = (Rounds { warm_up: 1, counted: 2 }, &reduce);
        std::thread::scope(|scope| {
            let groups = Group::threads(3).into_iter();
            let ranks: Vec<_> = groups
                .map(|group| {
                    scope.spawn(move || {
                        measure(&group, &mut vec![0.0; len], rounds, |values| reduce(&group, values)).unwrap()
                    })
                })
                .collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    }

    #[test]
    fn sums_of_all_lengths_are_verified() {
        for len in [1, 2, PERIOD - 1, PERIOD, PERIOD + 1, 100_000] {
            for measured in results(len, |group, values| group.all_reduce(values, ReduceOp::Sum)) {
                assert_eq!((measured.wrong, measured.times.len()), (0, 2), "{len} elements");
                assert!(measured.how.contains(": "), "{}", measured.how);
                assert!(measured.first_wrong.is_none() && measured.percentile(50) <= measured.percentile(99));
            }
        }
    }

    #[test]
    fn one_wrong_element_is_counted_on_all_ranks_and_named_on_its_own() {
        let measured = results(5000, |group, values| {
            group.all_reduce(values, ReduceOp::Sum)?;
            values[4321] += if group.rank().index() == 1 { 1.0 } else { 0.0 };
            Ok(())
        });
        assert!(measured.iter().all(|measured| measured.wrong == 3), "one in each of three rounds");
        assert!(measured[0].first_wrong.is_none() && measured[2].first_wrong.is_none());
        let named = measured[1].first_wrong.as_ref().unwrap().to_string();
        let want = (4321 % PERIOD + 1) * 6;
        let text = format!("rank 1: element 4321 of 5000 is {} after all-reduce 0, want {want}", want + 1);
        assert!(named.starts_with(&text), "{named}");
    }

    #[test]
    fn slices_that_were_not_summed_are_wrong_throughout() {
        assert_eq!(results(10, |_, _| Ok(()))[0].wrong, 3 * 3 * 10);
    }

    #[test]
    fn sums_are_exact() {
        // The most ranks that may be asked for.
        let n = 64;
        assert!(PERIOD * n * (n + 1) / 2 < 1 << f32::MANTISSA_DIGITS);
    }

    #[test]
    fn percentiles_are_times_that_were_measured() {
        let measured = |n: usize| Measured {
            times: (1..=n).map(|i| i as f64).collect(),
            wrong: 0,
            first_wrong: None,
            how: String::new(),
            alone: None,
        };
        for (n, percent, want) in
            [(1, 50, 1.0), (1, 99, 1.0), (20, 50, 10.0), (20, 99, 20.0), (1000, 99, 990.0)]
        {
            assert_eq!(measured(n).percentile(percent), want, "{percent} of {n}");
        }
    }
}
