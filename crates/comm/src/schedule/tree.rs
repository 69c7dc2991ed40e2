//! Up and down a binomial tree: few messages, of the whole buffer each.
//!
//! Places are counted from the root on. Place p hangs below the place that lacks its lowest binary digit, so the root has the
//! places 1, 2, 4 and so on below it. A place adds to its own buffer that of the nearest place below it, then of the next.

use super::circle::Circle;
use super::{Round, Take};
use std::ops::Range;

/// Everyone ends with everything reduced, by way of the first place.
pub(super) fn all_reduce(circle: Circle<'_>, whole: Range<usize>) -> Vec<Round> {
    let mut rounds = reduce(circle, 0, whole.clone());
    rounds.extend(broadcast(circle, 0, whole));
    rounds
}

/// Place `root` ends with everything reduced.
pub(super) fn reduce(circle: Circle<'_>, root: usize, whole: Range<usize>) -> Vec<Round> {
    let tree = Tree { circle, root };
    let receive = |rank: usize| Round::hear([rank], |_| whole.clone(), Take::Combine);
    let mut rounds: Vec<Round> = tree.below().map(receive).collect();
    rounds.extend(tree.above().map(|rank| Round::tell([rank], |_| whole.clone())));
    rounds
}

/// Everyone ends with the buffer of place `root`.
pub(super) fn broadcast(circle: Circle<'_>, root: usize, whole: Range<usize>) -> Vec<Round> {
    let tree = Tree { circle, root };
    let from_above = tree.above().map(|rank| Round::hear([rank], |_| whole.clone(), Take::Replace));
    let mut rounds: Vec<Round> = from_above.into_iter().collect();
    // The farthest first: most others hang below it.
    let below: Vec<usize> = tree.below().collect();
    rounds.extend(below.into_iter().rev().map(|rank| Round::tell([rank], |_| whole.clone())));
    rounds
}

/// Nobody leaves before everybody came: a word up the tree and one down again. Those below are heard all at once, so that who is
/// missing is known.
pub(super) fn assembly(circle: Circle<'_>) -> Vec<Round> {
    let tree = Tree { circle, root: 0 };
    vec![
        Round::hear(tree.below(), |_| 0..0, Take::Replace),
        Round::tell(tree.above(), |_| 0..0),
        Round::hear(tree.above(), |_| 0..0, Take::Replace),
        Round::tell(tree.below(), |_| 0..0),
    ]
}

#[derive(Clone, Copy)]
struct Tree<'a> {
    circle: Circle<'a>,
    root: usize,
}

impl Tree<'_> {
    /// This rank's place, counted from the root on.
    fn place(&self) -> usize {
        (self.circle.me + self.circle.n - self.root) % self.circle.n
    }

    /// The rank above this one.
    fn above(&self) -> Option<usize> {
        let place = self.place();
        let lowest = 1 << place.trailing_zeros().min(usize::BITS - 1);
        (place > 0).then(|| self.circle.rank(place - lowest + self.root))
    }

    /// The ranks below this one, the nearest first.
    fn below(&self) -> impl Iterator<Item = usize> {
        let (place, Tree { circle, root }) = (self.place(), *self);
        (0..usize::BITS - 1)
            .map(|bit| 1 << bit)
            .take_while(move |step| place.is_multiple_of(2 * step) && place + step < circle.n)
            .map(move |step| circle.rank(place + step + root))
    }
}
