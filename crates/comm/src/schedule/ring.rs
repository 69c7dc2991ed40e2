//! Round the ring: every rank hands one part to the next and takes one from the one before, so each byte goes to each rank once
//! and no wire carries more than another. As many rounds as there are other ranks.
//!
//! The sum of part p begins at the rank after place p, goes round, and ends at place p.

use super::circle::{Circle, Parts};
use super::{Round, Take};

/// Place p ends with part p reduced.
pub(super) fn reduce_scatter(circle: Circle<'_>, parts: &Parts) -> Vec<Round> {
    // The part that is at home at a place is the last to come there.
    rounds(circle, parts, circle.n - 1, Take::Combine)
}

/// Place p begins with part p and ends with all.
pub(super) fn all_gather(circle: Circle<'_>, parts: &Parts) -> Vec<Round> {
    rounds(circle, parts, 0, Take::Replace)
}

/// Every place begins by handing on the part that is `shift` further than its own.
fn rounds(circle: Circle<'_>, parts: &Parts, shift: usize, take: Take) -> Vec<Round> {
    let Circle { n, me, .. } = circle;
    let (next, before) = (circle.rank(me + 1), circle.rank(me + n - 1));
    (0..n - 1)
        .map(|round| {
            let out = parts.part(me + shift + n - round);
            let into = parts.part(me + shift + n - round - 1);
            Round { sends: vec![(next, out)], receives: vec![(before, into, take)] }
        })
        .collect()
}
