//! Recursive halving and doubling, for any number of ranks.
//!
//! With two to the k ranks, a rank's place has k binary digits, and in each of k steps it talks to the one whose place differs
//! in one digit. Where the number of ranks is another, places are written in mixed radix: the bases are its prime factors, and in
//! the step of a digit the ranks that differ in nothing else all talk to each other ("recursive multiplying", Ruefenacht, Bull
//! and Booth 2017, <https://doi.org/10.1016/j.parco.2017.08.004>). The usual way, which folds the surplus ranks into others first
//! and tells them the result at last, sends their whole buffers twice more; this one sends no byte more than the ring does.
//! A prime number of ranks has one digit, and gains nothing.
//!
//! *Doubling* exchanges whole buffers: few rounds, for small ones. *Halving* reduces ever smaller parts and then gathers them, for
//! larger ones. Whatever the digit, a sum is the own one so far, joined by those of the others: in the order of ranks when
//! doubling; when halving, first by that of the next smaller digit, then the one before that and so on.

use super::circle::{Circle, Parts};
use super::{Round, Take};
use std::ops::Range;

/// A digit of a place: how many values it has, and by how many places two differ that differ in it by one.
#[derive(Clone, Copy, PartialEq, Debug)]
struct Digit {
    base: usize,
    stride: usize,
}

/// The digits of places below `n`, the least significant first.
fn digits(n: usize) -> Vec<Digit> {
    let (mut digits, mut stride) = (Vec::new(), 1);
    while stride < n {
        let rest = n / stride;
        let base = (2..).find(|base| rest.is_multiple_of(*base)).expect("every number divides itself");
        digits.push(Digit { base, stride });
        stride *= base;
    }
    digits
}

impl Digit {
    fn of(self, place: usize) -> usize {
        place / self.stride % self.base
    }

    /// The place that has `value` for this digit and else is this one.
    fn with(self, place: usize, value: usize) -> usize {
        place - self.of(place) * self.stride + value % self.base * self.stride
    }

    /// The places that differ from this one in no other digit, in their order, but for itself.
    fn others(self, place: usize) -> impl Iterator<Item = usize> {
        (0..self.base).filter(move |&value| value != self.of(place)).map(move |value| self.with(place, value))
    }

    /// The parts of the places that differ from this one only in less significant digits.
    fn block(self, place: usize, parts: &Parts) -> Range<usize> {
        parts.span(place - place % self.stride, self.stride)
    }
}

/// Everyone ends with everything reduced, by exchanging whole buffers; places must be in the order of ranks.
pub(super) fn doubling(circle: Circle<'_>, whole: Range<usize>) -> Vec<Round> {
    let round = |digit: Digit| {
        let others = || digit.others(circle.me).map(|place| circle.rank(place));
        Round {
            sends: others().map(|rank| (rank, whole.clone())).collect(),
            receives: others().map(|rank| (rank, whole.clone(), Take::InRankOrder)).collect(),
        }
    };
    digits(circle.n).into_iter().map(round).collect()
}

/// Place p ends with part p reduced.
pub(super) fn reduce_scatter(circle: Circle<'_>, parts: &Parts) -> Vec<Round> {
    let mut rounds = Vec::new();
    for digit in digits(circle.n).into_iter().rev() {
        let (me, value) = (circle.me, digit.of(circle.me));
        // One after the other, since what comes at once is combined in the order in which it comes.
        for shift in 1..digit.base {
            let to = digit.with(me, value + shift);
            let from = digit.with(me, value + digit.base - shift);
            rounds.push(Round {
                sends: vec![(circle.rank(to), digit.block(to, parts))],
                receives: vec![(circle.rank(from), digit.block(me, parts), Take::Combine)],
            });
        }
    }
    rounds
}

/// Place p begins with part p and ends with all.
pub(super) fn all_gather(circle: Circle<'_>, parts: &Parts) -> Vec<Round> {
    let round = |digit: Digit| {
        let own = digit.block(circle.me, parts);
        let others = || digit.others(circle.me);
        let receive = |place: usize| (circle.rank(place), digit.block(place, parts), Take::Replace);
        Round {
            sends: others().map(|place| (circle.rank(place), own.clone())).collect(),
            receives: others().map(receive).collect(),
        }
    };
    digits(circle.n).into_iter().map(round).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_written_in_the_prime_factors_of_their_number() {
        let rows: [(usize, &[usize]); 7] =
            [(1, &[]), (2, &[2]), (7, &[7]), (8, &[2, 2, 2]), (12, &[2, 2, 3]), (15, &[3, 5]), (17, &[17])];
        for (n, bases) in rows {
            let digits = digits(n);
            assert_eq!(digits.iter().map(|digit| digit.base).collect::<Vec<_>>(), bases, "{n}");
            for place in 0..n {
                let value: usize = digits.iter().map(|digit| digit.of(place) * digit.stride).sum();
                assert_eq!(value, place, "{n}");
            }
        }
    }
}
