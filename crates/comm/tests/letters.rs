//! Messages beside collectives: what overtakes what, what a loss costs, and what is forgotten.

mod ranks;

use phalanx_comm::{Deadline, Endpoint, Group, Rank, ReduceOp, Source, Work};
use ranks::{LIMIT, connected, meeting::Meeting, on_all};
use std::time::{Duration, Instant};

#[test]
fn a_sender_that_dies_in_the_middle_of_a_message_is_noticed_at_once() {
    let begun = Meeting::of(2);
    on_all(2, |group| {
        if group.rank() == Rank(0) {
            // Dropped with the group when only a part has gone: nobody takes any of it until then.
            drop(group.start_send(vec![7u8; 64 << 20], Rank(1), 0));
            begun.wait();
            return;
        }
        begun.wait();
        let start = Instant::now();
        let error = group.receive(&mut vec![0u8; 64 << 20], Rank(0)).unwrap_err().to_string();
        assert!(start.elapsed() < LIMIT / 4, "{:?}", start.elapsed());
        assert!(error.contains("rank 0 is gone"), "{error}");
    });
}

#[test]
fn a_long_letter_is_gone_at_once_where_memory_is_shared() {
    const LEN: u32 = 300_000;
    let letter = |n: u32| -> Vec<u32> { (0..LEN).map(|i| i * 7 + n).collect() };
    let all_sent = Meeting::of(2);
    connected(
        Endpoint::bind,
        2,
        |_| {},
        |group| {
            let group = group.unwrap();
            if group.rank() == Rank(0) {
                let mut sent = [0, 1, 2].map(|n| group.start_send(letter(n), Rank(1), n));
                assert!(sent.iter_mut().all(Work::poll), "rank 1 looks after nothing yet");
                all_sent.wait();
            } else {
                all_sent.wait();
                // Two are set aside while the third is looked for.
                for n in [2, 0, 1] {
                    let mut got = vec![0; LEN as usize];
                    group.receive_tagged(&mut got, Source::Rank(Rank(0)), n).unwrap();
                    assert!(got == letter(n), "letter {n}");
                }
            }
        },
    );
}

#[test]
fn a_collective_does_not_overtake_messages_that_were_sent_before_it() {
    for _ in 0..30 {
        on_all(2, |group| {
            // Together more than lies between two ranks, in pieces that end everywhere.
            let sizes = [700_000, 348_512, 99, 1 << 20, 262_112];
            if group.rank() == Rank(1) {
                let works: Vec<_> = sizes.map(|size| group.start_send(vec![1u8; size], Rank(0), 0)).into();
                group.all_reduce(&mut [1.0f32], ReduceOp::Sum).unwrap();
                works.into_iter().for_each(|work| {
                    work.wait(Deadline::after(LIMIT)).unwrap();
                });
            } else {
                sizes.iter().for_each(|&size| group.receive(&mut vec![0u8; size], Rank(1)).unwrap());
                group.all_reduce(&mut [1.0f32], ReduceOp::Sum).unwrap();
            }
        });
    }
}

#[test]
fn a_rank_in_a_collective_takes_in_messages_of_ranks_that_it_waits_for_in_no_other_way() {
    on_all(3, |group| {
        let mut large = vec![0u8; 4 << 20];
        match group.rank().0 {
            0 => group.send(&vec![5u8; 4 << 20], Rank(2)).unwrap(),
            2 => {
                // By way of rank 1 in a tree from there; rank 0 comes when its message has gone.
                group.broadcast(&mut [0u8], Rank(1)).unwrap();
                group.receive(&mut large, Rank(0)).unwrap();
                assert!(large.iter().all(|&x| x == 5));
                return;
            }
            _ => {}
        }
        group.broadcast(&mut [0u8], Rank(1)).unwrap();
    });
}

#[test]
fn what_came_before_a_loss_is_there_all_the_same() {
    on_all(2, |group| {
        if group.rank() == Rank(1) {
            return group.send_tagged(&[3u8], Rank(0), 1).unwrap();
        }
        let a = group.start_receive(vec![0u8], Source::Rank(Rank(1)), 1);
        let b = group.start_receive(vec![0u8], Source::Rank(Rank(1)), 2);
        b.wait(Deadline::after(LIMIT)).unwrap_err();
        assert_eq!(a.wait(Deadline::after(LIMIT)).unwrap(), [3]);
    });
}

#[test]
fn a_receive_that_was_dropped_takes_no_message() {
    on_all(2, |group| {
        if group.rank() == Rank(0) {
            let mut unwanted = group.start_receive(vec![0u8], Source::Rank(Rank(1)), 0);
            assert!(!unwanted.poll());
            drop(unwanted);
            group.barrier().unwrap();
            let mut word = [0u8];
            group.receive(&mut word, Rank(1)).unwrap();
            assert_eq!(word, [8]);
        } else {
            group.barrier().unwrap();
            group.send(&[8u8], Rank(0)).unwrap();
        }
        group.barrier().unwrap();
    });
}

#[test]
fn no_sender_is_passed_over_by_who_takes_from_any() {
    on_all(3, |group| {
        if group.rank() != Rank(0) {
            (0..50).for_each(|_| group.send(&[1u8], Rank(0)).unwrap());
            return group.barrier().unwrap();
        }
        // All of them are there, since both came here after they had sent them.
        group.barrier().unwrap();
        let mut seen = [0; 3];
        for _ in 0..40 {
            seen[group.receive_tagged(&mut [0u8], Source::Any, 0).unwrap().index()] += 1;
        }
        assert_eq!(seen, [0, 20, 20]);
        for _ in 0..60 {
            group.receive_tagged(&mut [0u8], Source::Any, 0).unwrap();
        }
    });
}

#[test]
fn a_group_that_another_thread_is_in_leaves_values_alone() {
    let mut groups = Group::threads(2);
    let other = groups.pop().unwrap();
    let group = groups.pop().unwrap();
    std::thread::scope(|scope| {
        let waiting = group.clone().with_timeout(LIMIT);
        let inside = scope.spawn(move || waiting.barrier());
        let mut values = [1.0f32];
        // Until the other thread is inside, this one would be.
        let soon = Deadline::after(LIMIT);
        while group.bytes_sent().is_some() {
            assert!(!soon.expired(), "the other thread isn't inside");
            std::thread::yield_now();
        }
        let short = group.clone().with_timeout(Duration::from_millis(20));
        assert!(short.all_reduce(&mut values, ReduceOp::PremulSum(3.0)).is_err());
        assert_eq!(values, [1.0]);
        other.barrier().unwrap();
        inside.join().unwrap().unwrap();
    });
}
