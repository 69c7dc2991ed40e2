//! Sums in memory that all ranks see.

mod ranks;

use phalanx_comm::{Buffer, Deadline, Endpoint, Error, Generation, Group, Rank, ReduceOp, Shared, bf16};
use ranks::{BINDS, LIMIT, connected, meeting::Meeting, on_all};
use std::time::Duration;

/// How the last operation of a group was carried out.
fn algorithm(group: &Group) -> String {
    group.history().last().unwrap().algorithm.to_string()
}

fn fill(values: &mut [f32], rank: usize) {
    values.iter_mut().enumerate().for_each(|(i, x)| *x = (rank * 31 + i % 1000) as f32);
}

fn is_sum(values: &[f32], n: usize) -> bool {
    let sum = |i: usize| (0..n).map(|r| (r * 31 + i % 1000) as f32).sum::<f32>();
    values.iter().enumerate().all(|(i, &x)| x == sum(i))
}

#[test]
fn slices_in_shared_memory_are_summed_on_every_transport() {
    for n in [1, 2, 3, 5] {
        on_all(n, |group| {
            let rank = group.rank().index();
            for len in [0, 1, 997, 8192, 300_007] {
                let mut values: Shared<f32> = group.allocate(len).unwrap();
                assert!(values.iter().all(|&x| x == 0.0));
                for _ in 0..3 {
                    fill(&mut values, rank);
                    group.all_reduce(&mut values, ReduceOp::Sum).unwrap();
                    assert!(is_sum(&values, n), "{n} ranks, {len} elements");
                }
            }
        });
    }
}

#[test]
fn all_types_and_reductions_come_out_the_same_in_place_and_by_messages() {
    connected(
        Endpoint::bind,
        3,
        |_| {},
        |group| {
            let group = group.unwrap();
            let rank = group.rank().index();
            macro_rules! check {
            ($($element:ty: $($op:ident)*;)*) => {$($({
                let of = |i: usize| -> $element { <$element as From<u8>>::from((i * 7 + rank * 3) as u8 % 5 + 1) };
                let mut shared = group.allocate::<$element>(20_011).unwrap();
                shared.iter_mut().enumerate().for_each(|(i, x)| *x = of(i));
                let mut plain = shared.to_vec();
                group.all_reduce(&mut shared, ReduceOp::$op).unwrap();
                group.all_reduce(&mut plain, ReduceOp::$op).unwrap();
                assert_eq!(shared[..], plain[..], "{}, {}", stringify!($element), stringify!($op));
                // Large enough in bytes, too, for parts not to go by messages.
                let mut shared = group.allocate::<$element>(90_000).unwrap();
                shared.iter_mut().enumerate().for_each(|(i, x)| *x = of(i));
                let (mut plain, own) = (shared.to_vec(), group.own_part(90_000));
                group.reduce_scatter_in_place(&mut shared, ReduceOp::$op).unwrap();
                group.reduce_scatter_in_place(&mut plain, ReduceOp::$op).unwrap();
                assert_eq!(shared[own.clone()], plain[own], "{}, {}", stringify!($element), stringify!($op));
                group.all_gather_in_place(&mut shared).unwrap();
                group.all_gather_in_place(&mut plain).unwrap();
                assert_eq!(shared[..], plain[..], "{}, gathered", stringify!($element));
            })*)*};
        }
            check! {
                f32: Sum Average Product Min Max;
                f64: Sum Average Max;
                bf16: Sum Min;
                i64: Sum Average Min Xor;
                u16: Sum Product And Or;
                u8: Sum Max;
            }
        },
    );
}

#[test]
fn in_place_is_what_it_is_and_small_ones_go_by_messages() {
    connected(
        Endpoint::bind,
        2,
        |_| {},
        |group| {
            let group = group.unwrap();
            let mut values = group.allocate::<f32>(100_000).unwrap();
            group.all_reduce(&mut values, ReduceOp::Sum).unwrap();
            assert!(algorithm(&group).contains("in place"), "{}", algorithm(&group));
            let before = group.bytes_sent().unwrap();
            group.all_reduce(&mut values, ReduceOp::Sum).unwrap();
            assert_eq!(group.bytes_sent().unwrap() - before, 64, "two headers, and no elements");
            group.all_reduce(&mut values[..100], ReduceOp::Sum).unwrap();
            assert!(!algorithm(&group).contains("in place"));
            let mut elsewhere = values.to_vec();
            group.all_reduce(&mut elsewhere, ReduceOp::Sum).unwrap();
            assert!(!algorithm(&group).contains("in place"));
        },
    );
}

#[test]
fn parts_are_summed_beside_what_the_owner_does_with_the_rest() {
    /// The first half of a shared slice, as an arena lends its ranges.
    struct Half(Shared<f32>);
    impl Buffer for Half {
        type Item = f32;
        fn as_mut_slice(&mut self) -> &mut [f32] {
            let len = self.0.len();
            &mut self.0[len / 2..]
        }
    }
    for bind in BINDS {
        connected(
            bind,
            4,
            |_| {},
            |group| {
                let group = group.unwrap();
                let rank = group.rank().index();
                let works: Vec<_> = (0..5)
                    .map(|_| {
                        let mut values = group.allocate::<f32>(60_000).unwrap();
                        values[..30_000].fill(rank as f32);
                        fill(&mut values[30_000..], rank);
                        group.start_all_reduce(Half(values), ReduceOp::Sum)
                    })
                    .collect();
                for work in works {
                    let Half(values) = work.wait(Deadline::after(LIMIT)).unwrap();
                    assert!(values[..30_000].iter().all(|&x| x == rank as f32));
                    assert!(is_sum(&values[30_000..], 4));
                }
            },
        );
    }
}

#[test]
fn ranks_that_mean_different_places_find_out_at_once() {
    connected(
        Endpoint::bind,
        2,
        |_| {},
        |group| {
            let group = group.unwrap();
            let mut values = group.allocate::<f32>(100_000).unwrap();
            let start = 50 * group.rank().index();
            let error = group.all_reduce(&mut values[start..start + 50_000], ReduceOp::Sum).unwrap_err();
            // Whoever looks second may find the other gone.
            let told =
                matches!(error, Error::Mismatch { .. } | Error::PeerLost { .. } | Error::Aborted { .. });
            assert!(told, "{error}");
            if let Error::Mismatch { ours, theirs, .. } = error {
                assert_ne!(ours, theirs);
                assert!(ours.contains("of shared memory 1"), "{ours}");
            }
        },
    );
}

#[test]
fn regions_of_different_sizes_are_refused_on_all_ranks() {
    connected(
        Endpoint::bind,
        3,
        |_| {},
        |group| {
            let group = group.unwrap();
            let len = if group.rank() == Rank(1) { 100_000 } else { 10 };
            let error = group.allocate::<u8>(len).err().unwrap().to_string();
            assert!(error.contains("shared memory of"), "{error}");
        },
    );
}

#[test]
fn a_rank_that_has_no_memory_says_so_to_all() {
    on_all(3, |group| {
        let rank = group.rank();
        let len = if rank == Rank(1) { 1 << 60 } else { 10 };
        let error = group.allocate::<u8>(len).err().unwrap();
        assert!(matches!(error, Error::Aborted { by: Rank(1), .. }), "rank {rank}: {error}");
        assert!(
            error.to_string().contains("has no memory for 1152921504606846976 x u8"),
            "rank {rank}: {error}"
        );
    });
}

#[test]
fn survivors_go_on_in_memory_of_their_own() {
    let summed = Meeting::of(3);
    connected(
        Endpoint::bind,
        3,
        |_| {},
        |group| {
            let group = group.unwrap();
            let rank = group.rank().index();
            let mut values = group.allocate::<f32>(50_000).unwrap();
            fill(&mut values, rank);
            group.all_reduce(&mut values, ReduceOp::Sum).unwrap();
            assert!(is_sum(&values, 3));
            // It leaves when all have their sums.
            summed.wait();
            if rank == 1 {
                return group.abort("leaves");
            }
            let group = group.with_timeout(Duration::from_secs(10));
            assert!(group.all_reduce(&mut values, ReduceOp::Sum).is_err());
            let group = group.rebuild(&[Rank(0), Rank(2)], Generation(9)).unwrap();
            let mut values = group.allocate::<f32>(50_000).unwrap();
            fill(&mut values, group.rank().index());
            group.all_reduce(&mut values, ReduceOp::Sum).unwrap();
            assert!(is_sum(&values, 2));
            assert!(algorithm(&group).contains("in place"));
        },
    );
}
