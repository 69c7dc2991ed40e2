//! Parts that lie at their places in one flat buffer: the same bits as from an input to an output.

mod ranks;

use phalanx_comm::{Buffer, Deadline, Element, Endpoint, Error, Group, ReduceOp, Shared, bf16};
use ranks::{LIMIT, connected, on_all};
use std::ops::Range;

/// Elements of a rank's part: none, one, primes, and what goes by other algorithms than small ones.
const LENGTHS: [usize; 6] = [0, 1, 7, 1009, 9973, 40_009];

/// Numbers whose sums depend on the order in which they are taken.
fn uneven(rank: usize, i: usize) -> f32 {
    let number = (rank as u32 * 7919 + i as u32).wrapping_mul(2_654_435_761);
    (number >> 8) as f32 / 1e4 - (rank as f32).exp2()
}

fn bits<T: Element>(values: &[T]) -> &[u8] {
    bytemuck::cast_slice(values)
}

fn check<T: Element>(of: fn(f32) -> T) {
    for n in 1..=9 {
        on_all(n, |group| {
            let rank = group.rank().index();
            for len in LENGTHS.into_iter().filter(|len| len * n < 100_000) {
                let all: Vec<T> = (0..len * n).map(|i| of(uneven(rank, i))).collect();
                let own = group.own_part(all.len());
                assert_eq!(own, rank * len..(rank + 1) * len);
                let mut shared = group.allocate::<T>(all.len()).unwrap();
                for op in [ReduceOp::Sum, ReduceOp::Average, ReduceOp::Max, ReduceOp::PremulSum(0.3)] {
                    let mut part = vec![of(0.0); len];
                    group.reduce_scatter(&all, &mut part, op).unwrap();
                    let mut there = all.clone();
                    group.reduce_scatter_in_place(&mut there, op).unwrap();
                    assert!(bits(&there[own.clone()]) == bits(&part), "{op} of {len}, {n} ranks");
                    // What it left of the other parts is overwritten.
                    group.all_gather_in_place(&mut there).unwrap();
                    let mut gathered = vec![of(0.0); len * n];
                    group.all_gather(&part, &mut gathered).unwrap();
                    assert!(bits(&there) == bits(&gathered), "{op} of {len}, {n} ranks");
                    shared.copy_from_slice(&all);
                    group.reduce_scatter_in_place(&mut shared, op).unwrap();
                    assert!(bits(&shared[own.clone()]) == bits(&part), "shared, {op} of {len}, {n} ranks");
                    group.all_gather_in_place(&mut shared).unwrap();
                    assert!(bits(&shared) == bits(&gathered), "shared, {op} of {len}, {n} ranks");
                }
            }
        });
    }
}

#[test]
fn sums_of_single_precision_have_the_same_bits_in_place() {
    check(|x| x);
}

#[test]
fn sums_of_half_the_bits_have_the_same_bits_in_place() {
    check(bf16::from_f32);
}

#[test]
fn nothing_is_sent_where_all_ranks_see_the_memory() {
    for n in [2, 3, 5] {
        connected(
            Endpoint::bind,
            n,
            |_| {},
            |group| {
                let group = group.unwrap();
                let rank = group.rank().index();
                let mut values = group.allocate::<f32>(20_000 * n).unwrap();
                let own = group.own_part(values.len());
                // A header to each of the others, twice.
                let words = 2 * 32 * (n as u64 - 1);
                let is_in_place = |before: u64| {
                    let history = group.history();
                    let last = history.last().unwrap();
                    assert!(last.algorithm.contains("in place"), "{}", last.algorithm);
                    assert_eq!(group.bytes_sent().unwrap() - before, words, "{}", last.operation);
                };
                group.barrier().unwrap();
                for _ in 0..3 {
                    values.fill(rank as f32);
                    let before = group.bytes_sent().unwrap();
                    group.reduce_scatter_in_place(&mut values, ReduceOp::Sum).unwrap();
                    is_in_place(before);
                    let sum = (n * (n - 1) / 2) as f32;
                    assert!(values[own.clone()].iter().all(|&x| x == sum));
                    values[own.clone()].fill(10.0 + rank as f32);
                    let before = group.bytes_sent().unwrap();
                    values = group.start_all_gather(values).wait(Deadline::after(LIMIT)).unwrap();
                    is_in_place(before);
                    assert!(values.iter().enumerate().all(|(i, &x)| x == 10.0 + (i / 20_000) as f32));
                }
                group.all_gather_in_place(&mut values[..100 * n]).unwrap();
                assert!(!group.history().last().unwrap().algorithm.contains("in place"), "it is small");
            },
        );
    }
}

#[test]
fn a_batch_of_shared_layers_is_carried_out_in_place() {
    on_all(3, |group| {
        let rank = group.rank().index();
        let mut batch = group.owned_batch();
        let layers: Vec<_> = (0..3)
            .map(|layer| {
                let mut values = group.allocate::<f32>(30_000).unwrap();
                let own = group.own_part(values.len());
                values[own].fill((10 * layer + rank) as f32);
                batch.all_gather(values)
            })
            .collect();
        let mut done = batch.start().wait(Deadline::after(LIMIT)).unwrap();
        for (layer, member) in layers.into_iter().enumerate() {
            let values: Shared<f32> = done.take(member);
            assert!(values.iter().enumerate().all(|(i, &x)| x == (10 * layer + i / 10_000) as f32));
        }
    });
}

#[test]
fn ranks_that_mean_different_places_are_told() {
    connected(
        Endpoint::bind,
        2,
        |_| {},
        |group| {
            let group = group.unwrap();
            let mut values = group.allocate::<f32>(100_000).unwrap();
            let start = 50_000 * group.rank().index();
            let error = group.all_gather_in_place(&mut values[start..start + 50_000]).unwrap_err();
            // Whoever looks second may find the other gone.
            let is_told =
                matches!(error, Error::Mismatch { .. } | Error::PeerLost { .. } | Error::Aborted { .. });
            assert!(is_told, "{error}");
            if let Error::Mismatch { ours, theirs, .. } = error {
                assert!(ours.contains("of shared memory 1") && ours != theirs, "{ours}, {theirs}");
            }
        },
    );
}

/// A range of an arena.
struct Lent {
    arena: Vec<f32>,
    range: Range<usize>,
}

impl Buffer for Lent {
    type Item = f32;

    fn as_mut_slice(&mut self) -> &mut [f32] {
        &mut self.arena[self.range.clone()]
    }
}

/// Layers of a flat arena as they are sharded: each is so long that it has an equal part for each rank.
fn layers(n: usize) -> [Range<usize>; 3] {
    [0..10 * n, 10 * n..11 * n, 11 * n..2020 * n]
}

fn is_whole(group: &Group, arena: &[f32], layer: &Range<usize>) {
    let len = layer.len() / group.world_size();
    for (i, &got) in arena[layer.clone()].iter().enumerate() {
        assert_eq!(got, (i / len.max(1) + layer.start) as f32);
    }
}

#[test]
fn layers_of_a_flat_arena_are_gathered_and_scattered_where_they_lie() {
    for n in 1..=5 {
        on_all(n, |group| {
            let (rank, layers) = (group.rank().index(), layers(n));
            let mut arena = vec![f32::NAN; layers[2].end + 1];
            for layer in &layers {
                let values = &mut arena[layer.clone()];
                let own = group.own_part(values.len());
                values[own].fill((rank + layer.start) as f32);
                group.all_gather_in_place(values).unwrap();
                is_whole(&group, &arena, layer);
            }
            for layer in layers {
                let own = group.own_part(layer.len());
                let want: Vec<f32> = arena[layer.clone()][own.clone()].iter().map(|x| x * n as f32).collect();
                let lent = Lent { arena: arena.clone(), range: layer.clone() };
                let started = group.start_reduce_scatter(lent, ReduceOp::Sum);
                group.reduce_scatter_in_place(&mut arena[layer.clone()], ReduceOp::Sum).unwrap();
                assert_eq!(arena[layer.clone()][own.clone()], want);
                let Lent { arena: other, .. } = started.wait(Deadline::after(LIMIT)).unwrap();
                assert_eq!(other[layer][own], want);
            }
            assert!(arena.last().unwrap().is_nan(), "what lies behind the layers is not touched");
        });
    }
}

#[test]
#[should_panic(expected = "reduce_scatter_in_place: 7 elements can't be 2 equal parts")]
fn a_buffer_that_has_no_equal_parts_is_a_bug_of_the_caller() {
    let _ = Group::threads(2)[0].reduce_scatter_in_place(&mut [1.0f32; 7], ReduceOp::Sum);
}
