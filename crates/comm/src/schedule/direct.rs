//! Straight from whoever has it to whoever needs it: one round, and a message for every pair that has something to say.
//!
//! Sums are taken in the order of ranks, rank 0 first, wherever they are taken.

use super::circle::{Circle, Parts};
use super::{Round, Take};
use std::ops::Range;

/// Everyone sends all to everyone, and each rank sums by itself.
pub(super) fn all_reduce(circle: Circle<'_>, whole: Range<usize>) -> Vec<Round> {
    vec![with_all(circle, whole, Take::InRankOrder)]
}

/// A word from everyone to everyone.
pub(super) fn words(circle: Circle<'_>) -> Round {
    with_all(circle, 0..0, Take::Replace)
}

fn with_all(circle: Circle<'_>, whole: Range<usize>, take: Take) -> Round {
    let Round { sends, .. } = Round::tell(circle.others(), |_| whole.clone());
    Round { sends, ..Round::hear(circle.others(), |_| whole.clone(), take) }
}

/// Everyone sends all to the first rank, which sums and tells the others.
pub(super) fn all_reduce_by_one(circle: Circle<'_>, whole: Range<usize>) -> Vec<Round> {
    let mut rounds = reduce(circle, 0, whole.clone());
    rounds.extend(scatter(circle, 0, whole.clone(), |_| whole.clone()));
    rounds
}

/// Rank `root` is sent all buffers, and sums.
pub(super) fn reduce(circle: Circle<'_>, root: usize, whole: Range<usize>) -> Vec<Round> {
    to_root(circle, root, whole.clone(), |_| whole.clone(), Take::InRankOrder)
}

/// Place p begins with part p, and everyone sends theirs to everyone.
pub(super) fn all_gather(circle: Circle<'_>, parts: &Parts) -> Vec<Round> {
    let Circle { n, me, .. } = circle;
    let (mut sends, mut receives) = (Vec::with_capacity(n - 1), Vec::with_capacity(n - 1));
    // Each begins with the one after it, so nobody is beset by all at once.
    for place in (1..n).map(|k| (me + k) % n) {
        sends.push((circle.rank(place), parts.part(me)));
        receives.push((circle.rank(place), parts.part(place), Take::Replace));
    }
    vec![Round { sends, receives }]
}

/// Rank `root` ends with everyone's part where `at_root` says; the others' buffers are their parts, `whole`.
pub(super) fn gather(
    circle: Circle<'_>,
    root: usize,
    whole: Range<usize>,
    at_root: impl Fn(usize) -> Range<usize>,
) -> Vec<Round> {
    to_root(circle, root, whole, at_root, Take::Replace)
}

/// Everyone sends `whole` to rank `root`, where it is taken into the range that `at_root` says.
fn to_root(
    circle: Circle<'_>,
    root: usize,
    whole: Range<usize>,
    at_root: impl Fn(usize) -> Range<usize>,
    take: Take,
) -> Vec<Round> {
    vec![match circle.me == root {
        true => Round::hear(circle.others(), at_root, take),
        false => Round::tell([root], |_| whole.clone()),
    }]
}

/// The way back from [`gather`].
pub(super) fn scatter(
    circle: Circle<'_>,
    root: usize,
    whole: Range<usize>,
    at_root: impl Fn(usize) -> Range<usize>,
) -> Vec<Round> {
    vec![match circle.me == root {
        true => Round::tell(circle.others(), at_root),
        false => Round::hear([root], |_| whole.clone(), Take::Replace),
    }]
}

/// Range `sends[r]` goes to rank r, and what rank r sends comes into range `receives[r]`. In round k every rank sends to the
/// k-th after it and hears from the k-th before it.
pub(super) fn all_to_all(
    circle: Circle<'_>,
    sends: &[Range<usize>],
    receives: &[Range<usize>],
) -> Vec<Round> {
    let Circle { n, me, .. } = circle;
    let round = |k: usize| {
        let (to, from) = ((me + k) % n, (me + n - k) % n);
        let receives = vec![(from, receives[from].clone(), Take::Replace)];
        Round { sends: vec![(to, sends[to].clone())], receives }
    };
    (1..n).map(round).collect()
}
