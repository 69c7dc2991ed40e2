//! Why a rank left, as all others report it.

mod ranks;

use phalanx_comm::{Error, Group, Rank, ReduceOp};
use ranks::{LIMIT, meeting::Meeting, on_all};
use std::time::Instant;

/// The next operation of a rank, which fails.
fn failure(group: &Group, len: usize) -> Error {
    let start = Instant::now();
    let mut values = vec![1f32; len];
    let error = (0..1000).find_map(|_| group.all_reduce(&mut values, ReduceOp::Sum).err()).unwrap();
    assert!(start.elapsed() < LIMIT / 2);
    error
}

#[test]
fn every_rank_blames_the_one_that_was_lost_whatever_is_under_way() {
    // Nothing; small messages; those of which a part is still to come when a rank leaves.
    for len in [1, 3 << 20] {
        on_all(4, |group| {
            if group.rank() == Rank(2) {
                group.barrier().unwrap();
                return;
            }
            // The first to find out may tell another one that is still in the barrier.
            let error = group.barrier().err().unwrap_or_else(|| failure(&group, len));
            match &error {
                Error::PeerLost { peer: Rank(2), said_by, .. } => {
                    assert_ne!(*said_by, Some(group.rank()), "{error}");
                }
                _ => panic!("{error}"),
            }
            assert!(
                error.to_string().contains("rank 2 is gone") && error.to_string().contains("left the group")
            );
        });
    }
}

#[test]
fn an_abort_is_told_in_the_middle_of_a_message() {
    let meet = Meeting::of(3);
    on_all(3, |group| {
        let rank = group.rank();
        if rank == Rank(1) {
            // Sends a part of a message that nobody takes yet, and leaves.
            let mut work = group.start_all_reduce(vec![1f32; 20 << 20], ReduceOp::Sum);
            assert!(!work.poll());
            group.abort("had enough of it");
            meet.wait();
            return;
        }
        meet.wait();
        let error = failure(&group, 20 << 20);
        assert!(matches!(error, Error::Aborted { by: Rank(1), .. }), "rank {rank}: {error}");
        assert!(error.to_string().contains("rank 1 ended the group: had enough of it"), "{error}");
    });
}

#[test]
fn a_thread_that_panics_says_so() {
    on_all(2, |group| {
        if group.rank() == Rank(0) {
            let fall = move || {
                let _group = group;
                std::panic::resume_unwind(Box::new("quietly"));
            };
            std::thread::spawn(fall).join().unwrap_err();
            return;
        }
        let error = failure(&group, 1).to_string();
        assert!(error.contains("rank 0 is gone: its thread panicked"), "{error}");
    });
}
