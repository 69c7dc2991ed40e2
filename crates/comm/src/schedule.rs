//! Collectives as data: which range of a buffer goes to whom in which round, and what is done with what comes.
//!
//! A schedule is a pure function of (rank, world size, number of elements). It is tested without any I/O by playing the
//! schedules of all ranks against each other. In a round, all sends and receives may run at once; the next round starts when
//! they are done. Ranges are in elements.
//!
//! The order of a sum is fixed by the schedule. The direct exchange adds rank 0 first, then 1, 2 and so on, on every rank.
//! The ring adds each segment along the ring, starting from the rank after the segment's owner, and then passes the finished
//! segment round: all ranks hold the same bits.

use std::ops::Range;

/// What happens to the elements that a receive brings.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Take {
    /// They replace the buffer's range.
    Replace,
    /// They are combined into the buffer's range.
    Combine,
    /// The whole buffer of another rank: kept aside, and combined in the order of ranks when all are there.
    InRankOrder,
}

/// Sends and receives that run at once.
#[derive(Clone, PartialEq, Debug, Default)]
pub(crate) struct Round {
    pub(crate) sends: Vec<(usize, Range<usize>)>,
    pub(crate) receives: Vec<(usize, Range<usize>, Take)>,
}

/// The rounds of one rank, and why they are these.
#[derive(Clone, PartialEq, Debug, Default)]
pub(crate) struct Schedule {
    pub(crate) rounds: Vec<Round>,
    pub(crate) reason: &'static str,
    /// Whether messages have lengths of their own, so that both sides of each must agree on that instead of the operation's.
    pub(crate) uneven: bool,
}

/// Up to this many bytes in all are exchanged directly: one round of latency counts for more than the bytes.
const DIRECT_BYTES: usize = 128 << 10;

/// Segment `i` of `len` elements in `n` nearly equal parts.
pub(crate) fn segment(len: usize, n: usize, i: usize) -> Range<usize> {
    let (size, longer) = (len / n, len % n);
    let start = i * size + i.min(longer);
    start..start + size + usize::from(i < longer)
}

/// Sum (or another reduction) of all ranks' buffers, on all ranks.
pub(crate) fn all_reduce(rank: usize, n: usize, len: usize, element_bytes: usize) -> Schedule {
    if n == 1 {
        return Schedule { reason: "alone", ..Schedule::default() };
    }
    if len * element_bytes * n <= DIRECT_BYTES {
        let others = || (0..n).filter(|&r| r != rank);
        let round = Round {
            sends: others().map(|r| (r, 0..len)).collect(),
            receives: others().map(|r| (r, 0..len, Take::InRankOrder)).collect(),
        };
        return Schedule { rounds: vec![round], reason: "direct exchange: small", uneven: false };
    }
    let mut rounds = ring(rank, n, |i| segment(len, n, i), Take::Combine, 0);
    rounds.extend(ring(rank, n, |i| segment(len, n, i), Take::Replace, 1));
    Schedule { rounds, reason: "ring: large", uneven: false }
}

/// `n - 1` rounds in which every rank hands one segment to the next and takes one from the one before. Rank r starts with
/// the segment `shift` after its own, so with shift 0 the finished segment of rank r is r + 1, where shift 1 starts.
fn ring(
    rank: usize,
    n: usize,
    segment: impl Fn(usize) -> Range<usize>,
    take: Take,
    shift: usize,
) -> Vec<Round> {
    let (next, before) = ((rank + 1) % n, (rank + n - 1) % n);
    (0..n - 1)
        .map(|round| {
            let out = (rank + shift + n - round) % n;
            let into = (rank + shift + 2 * n - round - 1) % n;
            Round { sends: vec![(next, segment(out))], receives: vec![(before, segment(into), take)] }
        })
        .collect()
}

/// Each rank ends with its own segment reduced: segment `rank` of `n` equal ones of `len / n` elements.
pub(crate) fn reduce_scatter(rank: usize, n: usize, len: usize) -> Schedule {
    let size = len / n;
    // Labelled so that the segment a rank finishes is its own.
    let rounds =
        if n == 1 { Vec::new() } else { ring(rank, n, |i| segment_after(i, n, size), Take::Combine, 0) };
    Schedule { rounds, reason: "ring", uneven: false }
}

/// The ring of shift 0 leaves rank r with segment r + 1; under this labelling that is elements r * size and on.
fn segment_after(i: usize, n: usize, size: usize) -> Range<usize> {
    let own = (i + n - 1) % n;
    own * size..(own + 1) * size
}

/// Every rank starts with its own segment of `len / n` elements in place and ends with all.
pub(crate) fn all_gather(rank: usize, n: usize, len: usize) -> Schedule {
    let size = len / n;
    let rounds =
        if n == 1 { Vec::new() } else { ring(rank, n, |i| i * size..(i + 1) * size, Take::Replace, 0) };
    Schedule { rounds, reason: "ring", uneven: false }
}

/// The buffer of `root` on all ranks, down a binomial tree: in each round, whoever has it sends it as far as is halved.
pub(crate) fn broadcast(rank: usize, n: usize, len: usize, root: usize) -> Schedule {
    let place = (rank + n - root) % n;
    let peer = |place: usize| (place + root) % n;
    let mut rounds = Vec::new();
    let mut reach = n.next_power_of_two() / 2;
    while reach > 0 {
        let mut round = Round::default();
        if place.is_multiple_of(2 * reach) && place + reach < n {
            round.sends.push((peer(place + reach), 0..len));
        } else if place % (2 * reach) == reach {
            round.receives.push((peer(place - reach), 0..len, Take::Replace));
        }
        rounds.push(round);
        reach /= 2;
    }
    Schedule { rounds, reason: "binomial tree", uneven: false }
}

/// Nobody leaves before everybody came: in round k, a word to the rank 2^k further and one from the rank 2^k before.
pub(crate) fn barrier(rank: usize, n: usize) -> Schedule {
    let mut rounds = Vec::new();
    let mut distance = 1;
    while distance < n {
        let (to, from) = ((rank + distance) % n, (rank + n - distance) % n);
        rounds.push(Round { sends: vec![(to, 0..0)], receives: vec![(from, 0..0, Take::Replace)] });
        distance *= 2;
    }
    Schedule { rounds, reason: "dissemination", uneven: false }
}

/// Rank 0 hears from everyone, and then tells everyone: what is still to come at rank 0 is who is missing.
pub(crate) fn monitored_barrier(rank: usize, n: usize) -> Schedule {
    let mut rounds = Vec::new();
    if rank == 0 && n > 1 {
        let receives = (1..n).map(|from| (from, 0..0, Take::Replace)).collect();
        rounds.push(Round { sends: Vec::new(), receives });
        rounds.push(Round { sends: (1..n).map(|to| (to, 0..0)).collect(), receives: Vec::new() });
    } else if rank > 0 {
        rounds.push(Round { sends: vec![(0, 0..0)], receives: Vec::new() });
        rounds.push(Round { sends: Vec::new(), receives: vec![(0, 0..0, Take::Replace)] });
    }
    Schedule { rounds, reason: "one that counts", uneven: false }
}

/// Sum (or another reduction) of all ranks' buffers, at rank `root`; what the others' buffers hold then means nothing.
pub(crate) fn reduce(rank: usize, n: usize, len: usize, element_bytes: usize, root: usize) -> Schedule {
    if n == 1 {
        return Schedule { reason: "alone", ..Schedule::default() };
    }
    let others = || (0..n).filter(|&r| r != root);
    if len * element_bytes * n <= DIRECT_BYTES {
        let mut round = Round::default();
        if rank == root {
            round.receives = others().map(|r| (r, 0..len, Take::InRankOrder)).collect();
        } else {
            round.sends.push((root, 0..len));
        }
        return Schedule { rounds: vec![round], reason: "direct: small", uneven: false };
    }
    let mut rounds = ring(rank, n, |i| segment(len, n, i), Take::Combine, 0);
    let finished = |r: usize| segment(len, n, (r + 1) % n);
    let mut last = Round::default();
    if rank == root {
        last.receives = others().map(|r| (r, finished(r), Take::Replace)).collect();
    } else {
        last.sends.push((root, finished(rank)));
    }
    rounds.push(last);
    Schedule { rounds, reason: "ring, then together at the root: large", uneven: false }
}

/// Rank `root` ends with everyone's part, of `len` elements, in the order of ranks; its own is in place. The others' buffers
/// are their parts.
pub(crate) fn gather(rank: usize, n: usize, len: usize, root: usize) -> Schedule {
    let mut round = Round::default();
    if rank == root {
        let part = |r: usize| r * len..(r + 1) * len;
        round.receives = (0..n).filter(|&r| r != root).map(|r| (r, part(r), Take::Replace)).collect();
    } else {
        round.sends.push((root, 0..len));
    }
    Schedule { rounds: vec![round], reason: "direct", uneven: false }
}

/// The way back from [`gather`].
pub(crate) fn scatter(rank: usize, n: usize, len: usize, root: usize) -> Schedule {
    let mut round = Round::default();
    if rank == root {
        round.sends = (0..n).filter(|&r| r != root).map(|r| (r, r * len..(r + 1) * len)).collect();
    } else {
        round.receives.push((root, 0..len, Take::Replace));
    }
    Schedule { rounds: vec![round], reason: "direct", uneven: false }
}

/// Range `sends[r]` goes to rank r, and what rank r sends comes into range `receives[r]`; the two don't overlap. In round k
/// every rank sends to the k-th after it and hears from the k-th before it, so nobody is beset by all at once.
pub(crate) fn all_to_all(rank: usize, sends: &[Range<usize>], receives: &[Range<usize>]) -> Schedule {
    let n = sends.len();
    let rounds = (1..n)
        .map(|k| {
            let (to, from) = ((rank + k) % n, (rank + n - k) % n);
            let receives = vec![(from, receives[from].clone(), Take::Replace)];
            Round { sends: vec![(to, sends[to].clone())], receives }
        })
        .collect();
    Schedule { rounds, reason: "pairs, one after the other", uneven: true }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::{HashMap, VecDeque};

    /// Plays the schedules of all ranks: sends of a round leave at once, a rank's round ends when its receives are done.
    fn play(schedules: &[Schedule], buffers: &mut [Vec<i64>]) {
        let n = schedules.len();
        let mut wires: HashMap<(usize, usize), VecDeque<Vec<i64>>> = HashMap::new();
        let (mut round, mut sent) = (vec![0; n], vec![false; n]);
        loop {
            let mut moved = false;
            for rank in 0..n {
                let Some(now) = schedules[rank].rounds.get(round[rank]) else { continue };
                if !std::mem::replace(&mut sent[rank], true) {
                    for (to, range) in &now.sends {
                        wires
                            .entry((rank, *to))
                            .or_default()
                            .push_back(buffers[rank][range.clone()].to_vec());
                    }
                    moved = true;
                }
                let ready = now
                    .receives
                    .iter()
                    .all(|(from, ..)| wires.get(&(*from, rank)).is_some_and(|w| !w.is_empty()));
                if !ready {
                    continue;
                }
                for (from, range, take) in &now.receives {
                    let came = wires.get_mut(&(*from, rank)).unwrap().pop_front().unwrap();
                    assert_eq!(came.len(), range.len(), "rank {rank} in round {}", round[rank]);
                    for (to, x) in buffers[rank][range.clone()].iter_mut().zip(came) {
                        *to = if *take == Take::Replace { x } else { *to + x };
                    }
                }
                (round[rank], sent[rank], moved) = (round[rank] + 1, false, true);
            }
            if !moved {
                break;
            }
        }
        assert!((0..n).all(|r| round[r] == schedules[r].rounds.len()), "stuck in rounds {round:?}");
        assert!(wires.values().all(VecDeque::is_empty), "something was sent that nobody took");
    }

    fn filled(n: usize, len: usize) -> Vec<Vec<i64>> {
        (0..n).map(|rank| (0..len).map(|i| (rank * 1000 + i) as i64).collect()).collect()
    }

    #[test]
    fn every_rank_ends_with_the_sum() {
        for n in [1, 2, 3, 4, 5, 7, 8, 9] {
            for len in [0, 1, 2, 7, 8, 64] {
                // One byte an element is the direct exchange, a megabyte each is the ring.
                for bytes in [1, 1 << 20] {
                    let schedules: Vec<Schedule> =
                        (0..n).map(|rank| all_reduce(rank, n, len, bytes)).collect();
                    let mut buffers = filled(n, len);
                    play(&schedules, &mut buffers);
                    let want: Vec<i64> =
                        (0..len).map(|i| (0..n).map(|r| (r * 1000 + i) as i64).sum()).collect();
                    assert!(
                        buffers.iter().all(|b| *b == want),
                        "{n} ranks, {len} elements: {}",
                        schedules[0].reason
                    );
                }
            }
        }
    }

    #[test]
    fn segments_and_trees_end_where_they_should() {
        for n in [1, 2, 3, 5, 8, 9] {
            for size in [0, 1, 3] {
                let len = n * size;
                let mut buffers = filled(n, len);
                play(&(0..n).map(|r| reduce_scatter(r, n, len)).collect::<Vec<_>>(), &mut buffers);
                for (rank, buffer) in buffers.iter().enumerate() {
                    for (i, &got) in buffer.iter().enumerate().take((rank + 1) * size).skip(rank * size) {
                        assert_eq!(got, (0..n).map(|r| (r * 1000 + i) as i64).sum::<i64>(), "{n} ranks");
                    }
                }
                let mut buffers = filled(n, len);
                play(&(0..n).map(|r| all_gather(r, n, len)).collect::<Vec<_>>(), &mut buffers);
                let want: Vec<i64> = (0..len).map(|i| (i / size.max(1) * 1000 + i) as i64).collect();
                assert!(buffers.iter().all(|b| *b == want), "{n} ranks");
            }
            for root in 0..n {
                let mut buffers = filled(n, 5);
                let want = buffers[root].clone();
                play(&(0..n).map(|r| broadcast(r, n, 5, root)).collect::<Vec<_>>(), &mut buffers);
                assert!(buffers.iter().all(|b| *b == want), "{n} ranks, root {root}");
            }
            play(&(0..n).map(|r| barrier(r, n)).collect::<Vec<_>>(), &mut filled(n, 0));
            play(&(0..n).map(|r| monitored_barrier(r, n)).collect::<Vec<_>>(), &mut filled(n, 0));
        }
    }

    #[test]
    fn a_root_ends_with_the_sum_or_with_all_parts() {
        for (n, root) in [(1, 0), (2, 1), (3, 0), (5, 4), (8, 3)] {
            for (len, bytes) in [(0, 1), (7, 1), (7, 1 << 20), (64, 1 << 20)] {
                let mut buffers = filled(n, len);
                play(&(0..n).map(|r| reduce(r, n, len, bytes, root)).collect::<Vec<_>>(), &mut buffers);
                let want: Vec<i64> = (0..len).map(|i| (0..n).map(|r| (r * 1000 + i) as i64).sum()).collect();
                assert_eq!(buffers[root], want, "{n} ranks, {len} elements at {root}");
            }
            for len in [0, 1, 5] {
                let whole: Vec<i64> = (0..(n * len) as i64).collect();
                let part = |r: usize| whole[r * len..(r + 1) * len].to_vec();
                let mut buffers: Vec<_> = (0..n).map(part).collect();
                buffers[root] = vec![-1; n * len];
                buffers[root][root * len..(root + 1) * len].copy_from_slice(&part(root));
                play(&(0..n).map(|r| gather(r, n, len, root)).collect::<Vec<_>>(), &mut buffers);
                assert_eq!(buffers[root], whole, "{n} ranks, {len} elements each at {root}");
                let mut buffers: Vec<_> = (0..n).map(|_| vec![-1; len]).collect();
                buffers[root] = whole.clone();
                play(&(0..n).map(|r| scatter(r, n, len, root)).collect::<Vec<_>>(), &mut buffers);
                assert!((0..n).filter(|&r| r != root).all(|r| buffers[r] == part(r)), "{n} ranks");
            }
        }
    }

    #[test]
    fn parts_of_any_size_go_from_all_to_all() {
        for n in [1, 2, 3, 5, 8] {
            // Rank a sends (3a + b) mod 4 elements to rank b.
            let count = |a: usize, b: usize| (3 * a + b) % 4;
            let ranges = |counts: &mut dyn Iterator<Item = usize>, start: usize| -> Vec<Range<usize>> {
                let mut at = start;
                counts.map(|n| (at, at += n).0..at).collect()
            };
            let (mut schedules, mut buffers, mut wants) = (Vec::new(), Vec::new(), Vec::new());
            for rank in 0..n {
                let sends = ranges(&mut (0..n).map(|to| count(rank, to)), 0);
                let split = sends[n - 1].end;
                let receives = ranges(&mut (0..n).map(|from| count(from, rank)), split);
                schedules.push(all_to_all(rank, &sends, &receives));
                let mut buffer = vec![-1; receives[n - 1].end];
                for (to, range) in sends.iter().enumerate() {
                    buffer[range.clone()].fill((rank * 100 + to) as i64);
                }
                let own = buffer[sends[rank].clone()].to_vec();
                buffer[receives[rank].clone()].copy_from_slice(&own);
                buffers.push(buffer);
                wants.push((
                    split,
                    (0..n)
                        .flat_map(|from| vec![(from * 100 + rank) as i64; count(from, rank)])
                        .collect::<Vec<_>>(),
                ));
            }
            play(&schedules, &mut buffers);
            for (rank, (split, want)) in wants.into_iter().enumerate() {
                assert_eq!(buffers[rank][split..], want, "rank {rank} of {n}");
            }
        }
    }

    #[test]
    fn segments_cover_the_buffer() {
        for (len, n) in [(0, 3), (1, 3), (10, 3), (9, 9), (5, 7)] {
            let joined: Vec<usize> = (0..n).flat_map(|i| segment(len, n, i)).collect();
            assert_eq!(joined, (0..len).collect::<Vec<_>>());
        }
    }
}
