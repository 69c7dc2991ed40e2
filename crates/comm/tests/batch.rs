//! Collectives that are issued as one give what each gives alone, in fewer messages.

mod ranks;

use phalanx_comm::{Complex, Element, Group, Rank, ReduceOp, bf16};
use ranks::on_all;

/// Lengths of the slices of a batch: nothing, small ones that are packed, and one that isn't.
const LENGTHS: [usize; 5] = [0, 1, 3, 500, 9000];

/// The collectives of all kinds on slices of all lengths, in a batch or one by one; what came of them, in order.
fn collectives<T: Element>(group: &Group, of: fn(usize) -> T, op: ReduceOp, in_batch: bool) -> Vec<Vec<T>> {
    let (rank, n, last) = (group.rank().index(), group.world_size(), Rank(group.world_size() as u32 - 1));
    let filled = |len: usize| (0..len).map(|i| of(rank + i % 3)).collect::<Vec<T>>();
    let mut sums = LENGTHS.map(filled);
    let (mut from_first, mut from_last) = (LENGTHS.map(filled), LENGTHS.map(filled));
    let (inputs, wholes) = (LENGTHS.map(filled), LENGTHS.map(|len| filled(len * n)));
    let (mut gathered, mut parts) =
        (LENGTHS.map(|len| vec![of(0); len * n]), LENGTHS.map(|len| vec![of(0); len]));
    let mut batch = group.batch();
    // Of each length one after the other, so that what belongs together doesn't stand together.
    let moves = sums.iter_mut().zip(&mut from_first).zip(&mut from_last);
    let parted = inputs.iter().zip(&mut gathered).zip(wholes.iter().zip(&mut parts));
    for (((sum, first), last_one), ((input, all), (whole, part))) in moves.zip(parted) {
        if in_batch {
            batch.all_reduce(sum, op);
            batch.broadcast(first, Rank(0));
            batch.broadcast(last_one, last);
            batch.all_gather(input, all);
            batch.reduce_scatter(whole, part, op);
        } else {
            group.all_reduce(sum, op).unwrap();
            group.broadcast(first, Rank(0)).unwrap();
            group.broadcast(last_one, last).unwrap();
            group.all_gather(input, all).unwrap();
            group.reduce_scatter(whole, part, op).unwrap();
        }
    }
    batch.run().unwrap();
    [sums, from_first, from_last, gathered, parts].into_iter().flatten().collect()
}

#[test]
fn a_batch_gives_what_each_collective_gives_alone() {
    fn check<T: Element>(of: fn(usize) -> T, ops: &[ReduceOp]) {
        for n in 1..=5 {
            on_all(n, |group| {
                for &op in ops {
                    let alone = collectives(&group, of, op, false);
                    assert_eq!(collectives(&group, of, op, true), alone, "{op}, {n} ranks");
                }
            });
        }
    }
    check(|i| i as f32, &[ReduceOp::Sum, ReduceOp::Average, ReduceOp::PremulSum(0.5)]);
    check(|i| i as u8, &[ReduceOp::Average, ReduceOp::Xor]);
    check(|i| bf16::from_f32(i as f32), &[ReduceOp::Max]);
    check(|i| Complex::new(i as f32, 1.0), &[ReduceOp::Product]);
}

#[test]
fn small_collectives_of_a_kind_travel_as_one() {
    on_all(3, |group| {
        let (mut a, mut b, mut c, mut d) = ([1.0f32; 3], [2.0f32; 5], [3u64], vec![4.0f32; 5000]);
        let mut batch = group.batch();
        batch.all_reduce(&mut a, ReduceOp::Sum);
        batch.all_reduce(&mut c, ReduceOp::Sum);
        batch.all_reduce(&mut b, ReduceOp::Sum);
        batch.all_reduce(&mut d, ReduceOp::Sum);
        batch.run().unwrap();
        assert_eq!((a, b, c), ([3.0; 3], [6.0; 5], [9]));
        assert!(d.iter().all(|&x| x == 12.0));
        let operations: Vec<String> = group.history().into_iter().map(|record| record.operation).collect();
        let want = [
            "all-reduce #1 (8 x f32, sum)",
            "all-reduce #2 (1 x u64, sum)",
            "all-reduce #3 (5000 x f32, sum)",
        ];
        assert_eq!(operations, want);
    });
}

#[test]
fn an_empty_batch_is_nothing() {
    let group = Group::solo();
    group.batch().run().unwrap();
    assert!(group.history().is_empty());
}
