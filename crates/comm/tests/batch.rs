//! Collectives that are issued as one give what each gives alone, in fewer messages.

mod ranks;

use phalanx_comm::{Complex, Deadline, Element, Error, Group, Rank, ReduceOp, bf16};
use ranks::{LIMIT, meeting::Meeting, on_all};
use std::sync::Arc;
use std::time::{Duration, Instant};

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

/// The same collectives in the same order, in a batch of buffers that is started.
fn started<T: Element>(group: &Group, of: fn(usize) -> T, op: ReduceOp) -> Vec<Vec<T>> {
    let (rank, n, last) = (group.rank().index(), group.world_size(), Rank(group.world_size() as u32 - 1));
    let filled = |len: usize| (0..len).map(|i| of(rank + i % 3)).collect::<Vec<T>>();
    let mut batch = group.owned_batch();
    let (mut all, mut parted) = ([(); 4].map(|()| Vec::new()), Vec::new());
    for len in LENGTHS {
        all[0].push(batch.all_reduce(filled(len), op));
        all[1].push(batch.broadcast(filled(len), Rank(0)));
        all[2].push(batch.broadcast(filled(len), last));
        let mut places = vec![of(0); len * n];
        places[rank * len..][..len].copy_from_slice(&filled(len));
        all[3].push(batch.all_gather(places));
        parted.push(batch.reduce_scatter(filled(len * n), op));
    }
    let mut done = batch.start().wait(Deadline::after(LIMIT)).unwrap();
    let mut came: Vec<Vec<T>> = all.into_iter().flatten().map(|member| done.take(member)).collect();
    came.extend(
        parted.into_iter().zip(LENGTHS).map(|(part, len)| done.take(part)[rank * len..][..len].to_vec()),
    );
    came
}

#[test]
fn a_batch_gives_what_each_collective_gives_alone() {
    fn check<T: Element>(of: fn(usize) -> T, ops: &[ReduceOp]) {
        for n in 1..=5 {
            on_all(n, |group| {
                for &op in ops {
                    let alone = collectives(&group, of, op, false);
                    assert_eq!(collectives(&group, of, op, true), alone, "{op}, {n} ranks");
                    assert_eq!(started(&group, of, op), alone, "{op}, {n} ranks, started");
                    // To the others it is the same thing.
                    let mixed = match group.rank().index() % 2 {
                        0 => started(&group, of, op),
                        _ => collectives(&group, of, op, true),
                    };
                    assert_eq!(mixed, alone, "{op}, {n} ranks, some of which only started");
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
fn ranks_that_multiply_by_other_factors_understand_each_other() {
    on_all(2, |group| {
        // Rank 0 has the same ones twice, rank 1 has not.
        let factors = [[0.5, 0.5], [0.5, 0.25]][group.rank().index()].map(ReduceOp::PremulSum);
        let want = [[2.0f32; 3], [1.5; 3]];
        let mut values = [[2.0f32; 3]; 2];
        let mut batch = group.batch();
        values.iter_mut().zip(factors).for_each(|(values, op)| batch.all_reduce(values, op));
        batch.run().unwrap();
        assert_eq!(values, want);
        let mut batch = group.owned_batch();
        let members = factors.map(|op| batch.all_reduce(vec![2.0f32; 3], op));
        let mut done = batch.start().wait(Deadline::after(LIMIT)).unwrap();
        assert_eq!(members.map(|member| done.take(member)), want);
    });
}

#[test]
fn an_empty_batch_is_nothing() {
    let group = Group::solo();
    group.batch().run().unwrap();
    let mut work = group.owned_batch().start();
    assert!(work.poll());
    work.wait(Deadline::after(LIMIT)).map(drop).unwrap();
    assert!(group.history().is_empty());
}

#[test]
fn a_batch_that_was_started_goes_on_beside_other_operations() {
    for n in 1..=5 {
        on_all(n, |group| {
            let rank = group.rank().0;
            let mut batch = group.owned_batch();
            let sums: Vec<_> =
                (0..3).map(|i| batch.all_reduce(vec![rank + i; 9000], ReduceOp::Max)).collect();
            let small = batch.all_reduce(vec![rank; 2], ReduceOp::Min);
            let mut work = batch.start();
            let mut word = [rank];
            group.broadcast(&mut word, Rank(n as u32 - 1)).unwrap();
            assert_eq!(word, [n as u32 - 1]);
            assert!(work.poll(), "what was started before is done before");
            let mut done = work.wait(Deadline::after(LIMIT)).unwrap();
            assert_eq!(done.take(small), [0; 2]);
            for (i, sum) in sums.into_iter().enumerate() {
                assert_eq!(done.take(sum), vec![(n - 1 + i) as u32; 9000]);
            }
        });
    }
}

/// A buffer that is counted while it lives.
struct Counted(Vec<f32>, #[expect(dead_code, reason = "held, not read")] Arc<()>);

impl phalanx_comm::Buffer for Counted {
    type Item = f32;

    fn as_mut_slice(&mut self) -> &mut [f32] {
        &mut self.0
    }
}

#[test]
fn a_batch_that_nobody_waits_for_runs_on_and_its_buffers_are_freed() {
    on_all(3, |group| {
        let alive = Arc::new(());
        let mut batch = group.owned_batch();
        for len in [1, 2, 9000] {
            batch.all_reduce(Counted(vec![1.0; len], Arc::clone(&alive)), ReduceOp::Sum);
        }
        drop(batch.start());
        group.barrier().unwrap();
        group.progress();
        assert_eq!(Arc::strong_count(&alive), 1);
        assert_eq!(group.history().len(), 3, "two small ones as one, a large one and the barrier");
        let mut never = group.owned_batch();
        never.all_reduce(Counted(vec![1.0], Arc::clone(&alive)), ReduceOp::Sum);
        drop(never);
        assert_eq!((Arc::strong_count(&alive), group.history().len()), (1, 3));
    });
}

/// Starts two large sums as one batch; the last rank takes part in the first of them only, and does `otherwise` once it is done on
/// all ranks. What comes of it at the others, and what the other ranks' history says of both.
fn cut_off(otherwise: impl Fn(&Group) + Sync, limit: Duration, check: impl Fn(&Error) + Sync) {
    for n in 2..=5 {
        // Of each of the transports.
        let (first_is_done, given_up) = (Meeting::of(n), Meeting::of(n));
        on_all(n, |group| {
            let alive = Arc::new(());
            if group.rank().index() == n - 1 {
                group.all_reduce(&mut [1.0f32; 9000], ReduceOp::Sum).unwrap();
                first_is_done.wait();
                otherwise(&group);
            } else {
                let mut batch = group.owned_batch();
                for len in [9000, 9001] {
                    batch.all_reduce(Counted(vec![1.0; len], Arc::clone(&alive)), ReduceOp::Sum);
                }
                let mut both = batch.start();
                let began = Instant::now();
                while group.history().first().is_none_or(|first| first.took.is_none()) {
                    assert!(!both.poll() && began.elapsed() < LIMIT, "{:?}", group.history());
                    std::thread::yield_now();
                }
                first_is_done.wait();
                let error = both.wait(Deadline::after(limit)).err().unwrap();
                check(&error);
                assert_eq!(Arc::strong_count(&alive), 1, "a group that failed holds no buffers");
                let done: Vec<bool> =
                    group.history().iter().take(2).map(|record| record.took.is_some()).collect();
                assert_eq!(done, [true, false]);
            }
            given_up.wait();
        });
    }
}

#[test]
fn a_batch_that_is_aborted_in_the_middle_fails_on_all_ranks() {
    let check = |error: &Error| {
        assert!(matches!(error, Error::Aborted { .. }) && error.to_string().contains("enough"), "{error}");
    };
    cut_off(|group| group.abort("enough"), LIMIT, check);
}

#[test]
fn a_deadline_that_passes_in_a_batch_names_the_operation_that_it_was_in() {
    let check = |error: &Error| {
        let text = error.to_string();
        // Whoever gave up first told the others.
        let is_told = matches!(error, Error::Timeout { .. } | Error::Aborted { .. });
        assert!(is_told && text.contains("all-reduce #2 (9001 x f32, sum): waited"), "{text}");
    };
    cut_off(|_| {}, Duration::from_millis(300), check);
}

#[test]
fn ranks_whose_batches_differ_are_told() {
    for n in 2..=5 {
        on_all(n, |group| {
            let odd = group.rank().index() == n - 1;
            let mut batch = group.owned_batch();
            batch.all_reduce(vec![1.0f32; 3], ReduceOp::Sum);
            batch.all_reduce(vec![1.0f32; if odd { 4 } else { 5 }], ReduceOp::Sum);
            let error = batch.start().wait(Deadline::after(LIMIT)).err().unwrap();
            // Whoever looks second may find the other gone.
            let is_told =
                matches!(error, Error::Mismatch { .. } | Error::PeerLost { .. } | Error::Aborted { .. });
            assert!(is_told, "{error}");
            if let Error::Mismatch { ours, theirs, .. } = error {
                assert!([&ours, &theirs].iter().all(|text| text.contains("x f32, sum)")), "{ours}, {theirs}");
                assert_ne!(ours, theirs);
            }
        });
    }
}

#[test]
#[should_panic(expected = "take: a member of another batch")]
fn a_member_of_another_batch_is_a_bug_of_the_caller() {
    let group = Group::solo();
    let (mut one, mut other) = (group.owned_batch(), group.owned_batch());
    one.broadcast(vec![1u8], Rank(0));
    let member = other.broadcast(vec![2u8], Rank(0));
    one.start().wait(Deadline::after(LIMIT)).unwrap().take(member);
}
