//! Who plays a part of a schedule, and the parts that a buffer is cut into for that.

use std::ops::Range;

/// Ranks in an order of their own, and which of them this one is. Algorithms number ranks by their places in it, so that they
/// serve a whole group as well as the ranks of one host.
#[derive(Clone, Copy)]
pub(super) struct Circle<'a> {
    pub(super) n: usize,
    pub(super) me: usize,
    /// The ranks by place; none where that is the rank.
    ranks: Option<&'a [usize]>,
}

impl<'a> Circle<'a> {
    /// All ranks of a group.
    pub(super) fn all(rank: usize, n: usize) -> Circle<'static> {
        Circle { n, me: rank, ranks: None }
    }

    /// These ranks, of which this must be one.
    pub(super) fn of(rank: usize, ranks: &'a [usize]) -> Circle<'a> {
        let me = ranks.iter().position(|&other| other == rank);
        Circle { n: ranks.len(), me: me.expect("a rank plays in circles that it is in"), ranks: Some(ranks) }
    }

    /// The rank at a place, counted round.
    pub(super) fn rank(&self, place: usize) -> usize {
        let place = place % self.n;
        self.ranks.map_or(place, |ranks| ranks[place])
    }

    /// All ranks but this one.
    pub(super) fn others(&self) -> impl Iterator<Item = usize> {
        (0..self.n).filter(|&place| place != self.me).map(|place| self.rank(place))
    }
}

/// A range in so many nearly equal parts; the first ones are longer by one where it doesn't come out even.
#[derive(Clone)]
pub(super) struct Parts {
    range: Range<usize>,
    n: usize,
}

impl Parts {
    pub(super) fn of(range: Range<usize>, n: usize) -> Parts {
        Parts { range, n }
    }

    /// Part `i`, counted round.
    pub(super) fn part(&self, i: usize) -> Range<usize> {
        self.span(i % self.n, 1)
    }

    /// So many parts from `first` on.
    pub(super) fn span(&self, first: usize, count: usize) -> Range<usize> {
        let (size, longer) = (self.range.len() / self.n, self.range.len() % self.n);
        let start = |i: usize| self.range.start + i * size + i.min(longer);
        start(first)..start(first + count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_cover_their_range() {
        for (start, len, n) in [(0, 0, 3), (5, 1, 3), (0, 10, 3), (7, 9, 9), (0, 5, 7)] {
            let parts = Parts::of(start..start + len, n);
            let joined: Vec<usize> = (0..n).flat_map(|i| parts.part(i)).collect();
            assert_eq!(joined, (start..start + len).collect::<Vec<_>>());
            assert!((0..n).all(|i| parts.part(i).len().abs_diff(len / n) <= 1));
            assert_eq!(parts.span(1, n - 1), parts.part(1).start..start + len);
        }
    }
}
