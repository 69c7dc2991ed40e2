//! Barriers: messages that carry nothing but that somebody came.

use super::circle::Circle;
use super::{Round, Take};

/// Nobody leaves before everybody came, and each rank talks with as few others as can be: up a binomial tree, and down again.
pub(super) fn assembly(circle: Circle<'_>) -> Vec<Round> {
    let Circle { n, me, .. } = circle;
    let reach = if me == 0 { n.next_power_of_two() } else { 1 << me.trailing_zeros() };
    let distances =
        (0..usize::BITS).map(|k| 1 << k).take_while(|&distance| distance < reach && me + distance < n);
    let below: Vec<usize> = distances.map(|distance| circle.rank(me + distance)).collect();
    let above: Vec<usize> = (me > 0).then(|| circle.rank(me - reach)).into_iter().collect();
    let hear = |ranks: &[usize]| Round {
        receives: ranks.iter().map(|&rank| (rank, 0..0, Take::Replace)).collect(),
        ..Round::default()
    };
    let tell = |ranks: &[usize]| Round {
        sends: ranks.iter().map(|&rank| (rank, 0..0)).collect(),
        ..Round::default()
    };
    vec![hear(&below), tell(&above), hear(&above), tell(&below)]
}

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
    let receives = |ranks: &mut dyn Iterator<Item = usize>| Round {
        receives: ranks.map(|rank| (rank, 0..0, Take::Replace)).collect(),
        ..Round::default()
    };
    let sends = |ranks: &mut dyn Iterator<Item = usize>| Round {
        sends: ranks.map(|rank| (rank, 0..0)).collect(),
        ..Round::default()
    };
    match circle.me {
        0 => vec![receives(&mut circle.others()), sends(&mut circle.others())],
        _ => vec![sends(&mut std::iter::once(0)), receives(&mut std::iter::once(0))],
    }
}
