//! Every operation with every element type that takes it, in worlds of 1 to 9, at lengths that are nothing, one, odd, and more
//! than one message holds; over slices that start anywhere.

mod ranks;

use phalanx_comm::{
    Algorithm, Boolean, Complex, Deadline, Element, F8E4M3, F8E5M2, Group, Rank, ReduceOp, Source, Transfer,
    bf16, f16,
};
use ranks::{LIMIT, on_all};

const OPS: [ReduceOp; 9] = [
    ReduceOp::Sum,
    ReduceOp::Average,
    ReduceOp::Product,
    ReduceOp::Min,
    ReduceOp::Max,
    ReduceOp::And,
    ReduceOp::Or,
    ReduceOp::Xor,
    ReduceOp::PremulSum(2.0),
];

/// Of each rank, numbers so small that even eight bits hold all sums of them.
fn number(op: ReduceOp, rank: usize, i: usize) -> i64 {
    match op {
        ReduceOp::Product => 1 + i64::from((rank + i).is_multiple_of(4)),
        _ => ((rank + i) % 2) as i64,
    }
}

/// What comes of the numbers by definition, as a quotient.
fn reduced(op: ReduceOp, numbers: impl Iterator<Item = i64> + Clone, ranks: usize) -> (i64, usize) {
    let all = |f: fn(i64, i64) -> i64| numbers.clone().reduce(f).unwrap();
    match op {
        ReduceOp::Sum => (all(|a, b| a + b), 1),
        ReduceOp::Average => (all(|a, b| a + b), ranks),
        ReduceOp::Product => (all(|a, b| a * b), 1),
        ReduceOp::Min => (all(i64::min), 1),
        ReduceOp::Max => (all(i64::max), 1),
        ReduceOp::And => (all(|a, b| a & b), 1),
        ReduceOp::Or => (all(|a, b| a | b), 1),
        ReduceOp::Xor => (all(|a, b| a ^ b), 1),
        ReduceOp::PremulSum(factor) => (factor as i64 * all(|a, b| a + b), 1),
    }
}

/// On every rank of a group of threads, for all sizes of worlds.
fn in_worlds(f: impl Fn(Group) + Sync) {
    for n in 1..=9 {
        std::thread::scope(|scope| {
            for group in Group::threads(n) {
                scope.spawn(|| f(group.with_timeout(LIMIT)));
            }
        });
    }
}

/// Lengths: the last is more than is exchanged directly, which is less than half a megabyte in all.
fn lengths<T>(n: usize) -> [usize; 5] {
    [0, 1, 7, 1009, (512 << 10) / size_of::<T>() / n + 13]
}

fn check<T: Element>(quotient: fn(i64, usize) -> T) {
    in_worlds(|group| {
        let (rank, n) = (group.rank().index(), group.world_size());
        for op in OPS.into_iter().filter(|&op| T::KIND.takes(op)) {
            for len in lengths::<T>(n) {
                let of = |rank: usize, i: usize| number(op, rank, i);
                let want = |i: usize| {
                    let (a, b) = reduced(op, (0..n).map(|rank| of(rank, i)), n);
                    quotient(a, b)
                };
                let mine = |len: usize| (0..len).map(|i| quotient(of(rank, i), 1));
                let is = |got: &[T], from: usize, what: &str| {
                    for (i, &got) in got.iter().enumerate() {
                        assert_eq!(got, want(from + i), "{what}, {op} of element {i} of {len}, {n} ranks");
                    }
                };
                // One further than where buffers usually start.
                let mut values: Vec<T> = mine(1).chain(mine(len)).collect();
                group.all_reduce(&mut values[1..], op).unwrap();
                is(&values[1..], 0, "all-reduce");
                for algorithm in Algorithm::OF_ALL_REDUCE.into_iter().filter(|_| len < 10_000) {
                    let mut values: Vec<T> = mine(len).collect();
                    group.clone().with_algorithm(Some(algorithm)).all_reduce(&mut values, op).unwrap();
                    is(&values, 0, &format!("all-reduce by {algorithm}"));
                }
                let mut values: Vec<T> = mine(len).collect();
                let root = Rank((len % n) as u32);
                group.reduce(&mut values, root, op).unwrap();
                if group.rank() == root {
                    is(&values, 0, "reduce");
                }
                if len < 10_000 {
                    let all: Vec<T> = mine(len * n).collect();
                    let mut part: Vec<T> = mine(len).collect();
                    group.reduce_scatter(&all, &mut part, op).unwrap();
                    is(&part, rank * len, "reduce-scatter");
                    let (own, mut there) = (group.own_part(all.len()), all.clone());
                    group.reduce_scatter_in_place(&mut there, op).unwrap();
                    assert_eq!(there[own.clone()], part, "in place, {op} of {len}, {n} ranks");
                    let started = group.start_reduce_scatter(all, op);
                    let there = started.wait(Deadline::after(LIMIT)).unwrap();
                    assert_eq!(there[own], part, "started, {op} of {len}, {n} ranks");
                }
            }
        }
    });
}

/// A row a type: how a quotient of small numbers is written in it.
macro_rules! reductions {
    ($($name:ident: $quotient:expr;)*) => {
        $(#[test]
        fn $name() {
            check($quotient);
        })*
    };
}
reductions! {
    every_reduction_of_f32: |a, b| a as f32 / b as f32;
    every_reduction_of_f64: |a, b| a as f64 / b as f64;
    every_reduction_of_f16: |a, b| f16::from_f32(a as f32 / b as f32);
    every_reduction_of_bf16: |a, b| bf16::from_f32(a as f32 / b as f32);
    every_reduction_of_f8e4m3: |a, b| F8E4M3::from_f32(a as f32 / b as f32);
    every_reduction_of_f8e5m2: |a, b| F8E5M2::from_f32(a as f32 / b as f32);
    every_reduction_of_i8: |a, b| (a / b as i64) as i8;
    every_reduction_of_i16: |a, b| (a / b as i64) as i16;
    every_reduction_of_i32: |a, b| (a / b as i64) as i32;
    every_reduction_of_i64: |a, b| a / b as i64;
    every_reduction_of_i128: |a, b| i128::from(a) / b as i128;
    every_reduction_of_u8: |a, b| (a / b as i64) as u8;
    every_reduction_of_u16: |a, b| (a / b as i64) as u16;
    every_reduction_of_u32: |a, b| (a / b as i64) as u32;
    every_reduction_of_u64: |a, b| (a / b as i64) as u64;
    every_reduction_of_u128: |a, b| (a / b as i64) as u128;
    every_reduction_of_bool: |a, _| Boolean::from(a != 0);
    every_reduction_of_complex64: |a, b| Complex::new(a as f32 / b as f32, 0.0);
}

#[test]
fn numbers_of_many_bits_and_both_signs_are_reduced_by_definition() {
    fn check<T: Element>(of: fn(i64) -> T) {
        on_all(4, |group| {
            let (rank, n) = (group.rank().index(), group.world_size());
            let of_rank = |rank: usize, i: usize| (rank * 37 + i * 11) as i64 % 101 - 50;
            for op in OPS.into_iter().filter(|&op| T::KIND.takes(op) && op != ReduceOp::Average) {
                let mut values: Vec<T> = (0..300).map(|i| of(of_rank(rank, i))).collect();
                group.all_reduce(&mut values, op).unwrap();
                let want = |i| of(reduced(op, (0..n).map(|rank| of_rank(rank, i)), n).0);
                assert_eq!(values, (0..300).map(want).collect::<Vec<T>>(), "{op}");
            }
        });
    }
    check(|x| x);
    check(|x| x as i32);
    check(|x| x as f64);
    check(i128::from);
}

#[test]
fn means_of_integers_do_not_wrap_and_are_rounded_towards_zero() {
    on_all(3, |group| {
        let rank = group.rank().index();
        let mut small = [[100i8, -100, 7, -7], [100, -100, 0, 0], [101, -101, 1, -1]][rank];
        group.all_reduce(&mut small, ReduceOp::Average).unwrap();
        assert_eq!(small, [100, -100, 2, -2]);
        let mut large = [i64::MAX, i64::MIN, i64::MAX - rank as i64];
        group.all_reduce(&mut large, ReduceOp::Average).unwrap();
        assert_eq!(large, [i64::MAX, i64::MIN, i64::MAX - 1]);
        let mut unsigned = vec![u64::MAX; 3];
        unsigned = group
            .start_all_reduce(unsigned, ReduceOp::Average)
            .wait(phalanx_comm::Deadline::after(LIMIT))
            .unwrap();
        assert_eq!(unsigned, [u64::MAX; 3]);
    });
}

#[test]
fn means_of_small_floats_do_not_overflow() {
    fn check<T: Element>(of: fn(f32) -> T, largest: f32) {
        on_all(3, |group| {
            let mut values = [largest, -largest, 1.0].map(of);
            let mut pair = [values; 2];
            let started = group.start_all_reduce(values.to_vec(), ReduceOp::Average);
            group.all_reduce(&mut values, ReduceOp::Average).unwrap();
            assert_eq!(values, [largest, -largest, 1.0].map(of));
            assert_eq!(started.wait(Deadline::after(LIMIT)).unwrap(), values);
            let mut batch = group.batch();
            pair.iter_mut().for_each(|values| batch.all_reduce(values, ReduceOp::Average));
            batch.run().unwrap();
            assert_eq!(pair, [values; 2]);
        });
    }
    check(f16::from_f32, 65504.0);
    check(F8E4M3::from_f32, 448.0);
    check(F8E5M2::from_f32, 57344.0);
}

#[test]
fn each_rank_may_have_a_factor_of_its_own() {
    on_all(3, |group| {
        let rank = group.rank().index();
        let mut values = [1.0f32, 10.0];
        group.all_reduce(&mut values, ReduceOp::PremulSum([0.5, 2.0, -1.0][rank])).unwrap();
        assert_eq!(values, [1.5, 15.0]);
        let mut turned = [Complex::new(0.0f32, 1.0)];
        group.all_reduce(&mut turned, ReduceOp::Product).unwrap();
        assert_eq!(turned, [Complex::new(0.0, -1.0)]);
    });
}

#[test]
fn not_a_number_is_the_smallest_and_the_largest() {
    on_all(3, |group| {
        for odd in 0..3 {
            for op in [ReduceOp::Min, ReduceOp::Max] {
                let mut values = [if group.rank().index() == odd { f32::NAN } else { 1.0 }, 2.0];
                group.all_reduce(&mut values, op).unwrap();
                assert!(values[0].is_nan() && values[1] == 2.0, "{op} with NaN at rank {odd}: {values:?}");
            }
        }
    });
}

#[test]
#[should_panic(expected = "all_reduce: there is no xor of f32")]
fn a_reduction_that_a_type_does_not_take_is_a_bug_of_the_caller() {
    let _ = Group::solo().all_reduce(&mut [1.0f32], ReduceOp::Xor);
}

fn check_moves<T: Element>(of: fn(usize) -> T) {
    in_worlds(|group| {
        let (rank, n) = (group.rank().index(), group.world_size());
        for len in lengths::<T>(n) {
            let piece = |from: usize, to: usize| (0..len).map(move |i| of(31 * from + 7 * to + i));
            let root = Rank(((len + 1) % n) as u32);
            let (mine, nothing): (Vec<T>, Vec<T>) = (piece(rank, 0).collect(), vec![of(99); len]);

            let mut whole = vec![of(99); len * n];
            group.gather(&mine, &mut whole, root).unwrap();
            let all: Vec<T> = (0..n).flat_map(|from| piece(from, 0)).collect();
            assert_eq!(whole, if group.rank() == root { all.clone() } else { vec![of(99); len * n] });

            let mut part = nothing.clone();
            let source = if group.rank() == root { &all[..] } else { &[] };
            group.scatter(source, &mut part, root).unwrap();
            assert_eq!(part, mine, "scatter of {len}, {n} ranks");

            let mut whole = vec![of(99); len * n];
            group.all_gather(&mine, &mut whole).unwrap();
            assert_eq!(whole, all, "all-gather of {len}, {n} ranks");
            let alone = || {
                let mut whole = vec![of(99); len * n];
                whole[group.own_part(len * n)].copy_from_slice(&mine);
                whole
            };
            let mut whole = alone();
            group.all_gather_in_place(&mut whole).unwrap();
            assert_eq!(whole, all, "all-gather in place of {len}, {n} ranks");
            let whole = group.start_all_gather(alone()).wait(Deadline::after(LIMIT)).unwrap();
            assert_eq!(whole, all, "all-gather of {len} that was started, {n} ranks");

            let outgoing: Vec<T> = (0..n).flat_map(|to| piece(rank, to)).collect();
            let mut incoming = vec![of(99); len * n];
            group.all_to_all(&outgoing, &mut incoming).unwrap();
            let want: Vec<T> = (0..n).flat_map(|from| piece(from, rank)).collect();
            assert_eq!(incoming, want, "all-to-all of {len}, {n} ranks");

            let mut values = mine.clone();
            group.broadcast(&mut values, root).unwrap();
            assert_eq!(values, piece(root.index(), 0).collect::<Vec<T>>(), "broadcast of {len}, {n} ranks");
        }
    });
}

#[test]
fn every_move_of_one_two_four_eight_and_sixteen_bytes() {
    check_moves(|i| i as u8);
    check_moves(|i| f16::from_f32(i as f32));
    check_moves(|i| i as f32);
    check_moves(|i| Complex::new(i as f32, -(i as f32)));
    check_moves(|i| i as i128);
    check_moves(|i| Boolean::from(i % 3 == 0));
}

#[test]
fn parts_of_different_lengths_go_where_they_belong() {
    on_all(4, |group| {
        let (rank, n) = (group.rank().index(), group.world_size());
        let length = |from: usize, to: usize| (5 * from + 3 * to) % 7 * 10_000;
        let (sends, receives): (Vec<_>, Vec<_>) = (0..n).map(|r| (length(rank, r), length(r, rank))).unzip();
        let input: Vec<u32> = (0..n).flat_map(|to| vec![(10 * rank + to) as u32; sends[to]]).collect();
        let mut output = vec![0; receives.iter().sum()];
        group.all_to_all_uneven(&input, &sends, &mut output, &receives).unwrap();
        let want: Vec<u32> =
            (0..n).flat_map(|from| vec![(10 * from + rank) as u32; receives[from]]).collect();
        assert!(output == want, "rank {rank}");
    });
}

#[test]
fn messages_are_taken_by_tag_and_by_anyone() {
    on_all(4, |group| {
        let rank = group.rank().index();
        if rank == 0 {
            // The last tag first; what came before it waits, whatever its size.
            let mut large = vec![0u8; 300_000];
            for tag in [2, 1] {
                group.receive_tagged(&mut large, Source::Rank(Rank(1)), tag).unwrap();
                assert!(large.iter().all(|&x| x == tag as u8), "tag {tag}");
            }
            // A collective in between takes no message.
            group.barrier().unwrap();
            let mut seen = [false; 4];
            for _ in 1..4 {
                let mut word = [0u32];
                let from = group.receive_tagged(&mut word, Source::Any, 9).unwrap();
                assert_eq!(word[0], from.0 * 11);
                assert!(!std::mem::replace(&mut seen[from.index()], true), "rank {from} twice");
            }
        } else {
            if rank == 1 {
                group.send_tagged(&vec![1u8; 300_000], Rank(0), 1).unwrap();
                group.send_tagged(&vec![2u8; 300_000], Rank(0), 2).unwrap();
            }
            group.send_tagged(&[rank as u32 * 11], Rank(0), 9).unwrap();
            group.barrier().unwrap();
        }
        group.barrier().unwrap();
    });
}

#[test]
fn ranks_send_to_each_other_at_once_whatever_the_size() {
    on_all(3, |group| {
        let (rank, n) = (group.rank().index(), group.world_size());
        let (next, before) = (Rank(((rank + 1) % n) as u32), Rank(((rank + n - 1) % n) as u32));
        // More than all that lies between two ranks holds.
        let mine = vec![rank as u64; 600_000];
        let mut came = vec![99u64; 600_000];
        group.send(&mine, next).unwrap();
        group.receive(&mut came, before).unwrap();
        assert!(came.iter().all(|&x| x == u64::from(before.0)));

        let (mut left, mut right) = ([0u64], [0u64]);
        let peers = group
            .exchange(&mut [
                Transfer::Receive { values: &mut left, from: Source::Rank(before), tag: 5 },
                Transfer::Receive { values: &mut right, from: Source::Rank(next), tag: 6 },
                Transfer::Send { values: &[10 + rank as u64], to: next, tag: 5 },
                Transfer::Send { values: &[20 + rank as u64], to: before, tag: 6 },
            ])
            .unwrap();
        assert_eq!(peers, [before, next, next, before]);
        assert_eq!((left[0], right[0]), (10 + u64::from(before.0), 20 + u64::from(next.0)));
    });
}

#[test]
fn a_message_of_another_length_or_type_is_no_message() {
    on_all(2, |group| {
        if group.rank() == Rank(1) {
            group.send_tagged(&[1.0f32, 2.0], Rank(0), 4).unwrap();
        } else {
            let error = group.receive_tagged(&mut [0.0f64; 2], Source::Any, 4).unwrap_err().to_string();
            assert!(error.contains("message") && error.contains("2 x f32, tag 4"), "{error}");
        }
    });
}

#[test]
fn a_message_that_a_collective_stands_before_is_told_at_once() {
    on_all(2, |group| {
        let start = std::time::Instant::now();
        let error = match group.rank() {
            Rank(0) => group.receive(&mut [0u8], Rank(1)).unwrap_err(),
            _ => group.all_reduce(&mut [1.0f32], ReduceOp::Sum).unwrap_err(),
        };
        assert!(start.elapsed() < LIMIT / 4);
        if group.rank() == Rank(0) {
            assert!(error.to_string().contains("rank 1 is in all-reduce #1 (1 x f32, sum)"), "{error}");
        }
    });
}

#[test]
fn a_monitored_barrier_names_all_that_did_not_come() {
    on_all(5, |group| {
        group.monitored_barrier(LIMIT).unwrap();
        if [0, 2, 4].contains(&group.rank().index()) {
            let error =
                group.monitored_barrier(std::time::Duration::from_millis(1500)).unwrap_err().to_string();
            if group.rank() == Rank(0) {
                assert!(
                    error.contains("monitored barrier #2 (0 x u8): waited")
                        && error.contains("for ranks 1, 3;"),
                    "{error}"
                );
            }
        } else {
            // Does something else until the others gave up.
            let mut never = group.start_receive(vec![0u8], Source::Rank(Rank(0)), 0);
            while !never.poll() {
                std::thread::yield_now();
            }
            assert!(never.wait(Deadline::after(LIMIT)).is_err());
        }
    });
}
