//! Barriers: messages that carry nothing but that somebody came.

use super::circle::Circle;
use super::{Round, Take};

/// Nobody leaves before everybody came: in round k, a word to the rank 2^k further and one from the rank 2^k before.
pub(super) fn dissemination(circle: Circle<'_>) -> Vec<Round> {
    let Circle { n, me, .. } = circle;
    let distances = (0..usize::BITS).map(|k| 1 << k).take_while(|&distance| distance < n);
    distances
        .map(|distance| Round {
            sends: vec![(circle.rank(me + distance), 0..0)],
            receives: vec![(circle.rank(me + n - distance), 0..0, Take::Replace)],
        })
        .collect()
}

/// Rank 0 hears from everyone, and then tells everyone: what is still to come at rank 0 is who is missing.
pub(super) fn counted(circle: Circle<'_>) -> Vec<Round> {
    let (hear, tell) =
        (|ranks| Round::hear(ranks, |_| 0..0, Take::Replace), |ranks| Round::tell(ranks, |_| 0..0));
    let others: Vec<usize> = circle.others().collect();
    match circle.me {
        0 => vec![hear(others.clone()), tell(others)],
        _ => vec![tell(vec![0]), hear(vec![0])],
    }
}
