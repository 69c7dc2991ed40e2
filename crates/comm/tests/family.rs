//! Groups that come of a group: parts of it, what is left of it, and what takes its place.

mod ranks;
#[path = "family/succession.rs"]
mod succession;

use phalanx_comm::{Deadline, Error, Generation, Group, Rank, ReduceOp, WaitObserver};
use ranks::{BINDS, LIMIT, connected, on_all};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

fn sum_of(group: &Group, value: u32) -> u32 {
    let mut values = [value];
    group.all_reduce(&mut values, ReduceOp::Sum).unwrap();
    values[0]
}

/// The last that `leaver` does with others: they are behind all that came before then, which it would end by leaving earlier.
fn see_off(group: &Group, leaver: Rank) {
    let mut words = vec![0u8; group.world_size()];
    // Who hears of its end in here has nothing else to lose.
    let seen_off = group.gather(&[0u8], &mut words, leaver);
    assert!(group.rank() != leaver || seen_off.is_ok(), "{seen_off:?}");
}

#[test]
fn a_group_parts_by_color_and_each_part_works_for_itself() {
    on_all(5, |world| {
        let rank = world.rank().0;
        // 0, 2 and 4 in reversed order; 1 alone; 3 nowhere.
        let color = [Some(7), Some(9), Some(7), None, Some(7)][rank as usize];
        let part = world.split(color, 10 - rank).unwrap();
        match rank {
            3 => assert!(part.is_none()),
            1 => assert_eq!(sum_of(&part.unwrap(), 5), 5),
            _ => {
                let part = part.unwrap();
                assert_eq!(part.members(), [Rank(4), Rank(2), Rank(0)]);
                assert_eq!((part.rank().0, part.world_size()), ((4 - rank) / 2, 3));
                assert_eq!(sum_of(&part, rank), 6);
                // Parts of parts, while other parts do other things.
                let pair = part.subgroup(&[Rank(0), Rank(2)]).unwrap();
                if let Some(pair) = pair {
                    assert_eq!(pair.members(), [Rank(4), Rank(0)]);
                    assert_eq!(sum_of(&pair, rank), 4);
                }
            }
        }
        assert_eq!(sum_of(&world, rank), 10, "the world is as it was");
    });
}

#[test]
fn many_groups_at_once_do_not_mix_up_their_messages() {
    on_all(4, |world| {
        let rank = world.rank();
        let pairs: Vec<Group> = [[0, 1], [0, 2], [0, 3], [1, 2], [1, 3], [2, 3]]
            .iter()
            .filter_map(|pair| world.subgroup(&pair.map(Rank)).unwrap())
            .collect();
        assert_eq!(pairs.len(), 3);
        // All started before any is waited for, in an order of each rank's own.
        let order = (0..3).map(|i| (i + rank.index()) % 3);
        let works: Vec<_> =
            order.map(|i| (i, pairs[i].start_all_reduce(vec![rank.0; 20_000], ReduceOp::Sum))).collect();
        for (i, work) in works {
            let want: u32 = pairs[i].members().iter().map(|rank| rank.0).sum();
            assert_eq!(work.wait(Deadline::after(LIMIT)).unwrap(), vec![want; 20_000]);
        }
    });
}

#[test]
fn a_rank_that_waits_in_one_group_moves_its_others() {
    on_all(2, |world| {
        let rank = world.rank();
        let groups: Vec<Group> =
            (0..2).map(|_| world.subgroup(&[Rank(0), Rank(1)]).unwrap().unwrap()).collect();
        // Far more than fits between two ranks, so that each needs the other to go on with both.
        let start = |group: &Group| group.start_all_reduce(vec![rank.0 + 1; 1 << 20], ReduceOp::Sum);
        let [first, second] = [&groups[0], &groups[1]].map(start);
        let [first, second] = if rank == Rank(0) { [first, second] } else { [second, first] };
        for work in [first, second] {
            assert_eq!(work.wait(Deadline::after(LIMIT)).unwrap(), vec![3; 1 << 20]);
        }
        // Nor does it matter whether it waits for something that was started, or for something else.
        let [letter, _] = [&groups[0], &groups[1]]
            .map(|group| (rank == Rank(0)).then(|| group.start_send(vec![7u8; 4 << 20], Rank(1), 0)));
        if rank == Rank(0) {
            groups[1].barrier().unwrap();
            letter.unwrap().wait(Deadline::after(LIMIT)).unwrap();
        } else {
            let mut came = vec![0u8; 4 << 20];
            groups[0].receive(&mut came, Rank(0)).unwrap();
            assert!(came.iter().all(|&byte| byte == 7));
            groups[1].barrier().unwrap();
        }
    });
}

/// How many waits have begun and how many have ended.
#[derive(Default)]
struct Waits([AtomicUsize; 2]);

impl WaitObserver for Waits {
    fn begins(&self) {
        self.0[0].fetch_add(1, Ordering::Relaxed);
    }

    fn ends(&self) {
        self.0[1].fetch_add(1, Ordering::Relaxed);
    }
}

#[test]
fn waits_are_told_of_from_begin_to_end_in_groups_that_come_of_one_too() {
    on_all(2, |world| {
        let waits = Arc::new(Waits::default());
        world.on_wait(Arc::clone(&waits) as Arc<dyn WaitObserver>);
        let seen = || waits.0.each_ref().map(|count| count.load(Ordering::Relaxed));
        sum_of(&world, 1);
        assert_eq!(seen(), [1, 1]);
        let part = world.subgroup(&[Rank(0), Rank(1)]).unwrap().unwrap();
        let before = seen()[0];
        sum_of(&part, 1);
        assert_eq!(seen(), [before + 1; 2]);
        part.abort("enough");
        part.barrier().unwrap_err();
        let [begun, ended] = seen();
        assert_eq!(begun, ended, "a wait that fails ends as well");
    });
}

/// What a rank is told of its group's end, and the group where it is still there then.
type Told = (String, Option<Group>);

fn told(ended: Result<(), Error>) -> String {
    ended.unwrap_err().to_string()
}

/// In the part they are ranks 0 and 1.
#[test]
fn errors_of_a_part_tell_ranks_by_their_numbers_in_the_run() {
    on_all(4, |world| {
        let check = |ends: [fn(Group) -> Told; 2], want: [&str; 2]| {
            let part = world.subgroup(&[Rank(1), Rank(3)]).unwrap();
            let told = part.map(|part| (part.rank().index(), ends[part.rank().index()](part)));
            world.barrier().unwrap();
            if let Some((which, (told, _))) = told {
                assert!(told.contains(want[which]), "rank {}: {told}", world.rank());
            }
        };
        check(
            [|part| (told(part.barrier()), None), |_| (String::new(), None)],
            ["rank 3 is gone: it left", ""],
        );
        check(
            [|part| (told(part.barrier()), None), |part| (told(part.receive(&mut [0u8], Rank(0))), None)],
            [
                "rank 3 ended the group: rank 3 is in message",
                "rank 3 is in message (1 x u8), but rank 1 is in barrier",
            ],
        );
        check(
            [
                |part| (told(part.with_timeout(LIMIT / 100).barrier()), None),
                |part| (String::new(), Some(part)),
            ],
            ["ms for rank 3; rank 3 was last heard", ""],
        );
        check(
            [
                |part| (told(part.barrier()), None),
                |part| {
                    part.abort("enough");
                    (told(part.barrier()), None)
                },
            ],
            ["rank 3 ended the group: enough"; 2],
        );
    });
}

#[test]
fn ranks_that_ask_for_different_subgroups_are_told() {
    on_all(3, |world| {
        let ranks = if world.rank() == Rank(1) { [Rank(0), Rank(1)] } else { [Rank(0), Rank(2)] };
        let error = world.subgroup(&ranks).err().unwrap().to_string();
        assert!(error.contains("asks for a subgroup of other ranks"), "{error}");
    });
}

#[test]
fn survivors_go_on_in_place_under_a_new_generation() {
    let leave_and_rebuild = |world: Group| {
        let rank = world.rank();
        assert_eq!(sum_of(&world, 1), 4);
        see_off(&world, Rank(2));
        if rank == Rank(2) {
            return;
        }
        let start = Instant::now();
        world.all_reduce(&mut [1.0f32], ReduceOp::Sum).unwrap_err();
        let survivors = [Rank(0), Rank(1), Rank(3)];
        let old = Generation(world.generation().0 + 1);
        let group = world.rebuild(&survivors, old).unwrap();
        assert!(start.elapsed() < LIMIT / 4, "{:?}", start.elapsed());
        assert_eq!(group.members(), survivors);
        assert_eq!(sum_of(&group, rank.0), 4);
        // And once more, from the group that was rebuilt, with a member less.
        see_off(&group, Rank(0));
        if rank == Rank(0) {
            return;
        }
        group.barrier().unwrap_err();
        let group = group.rebuild(&[Rank(1), Rank(2)], Generation(old.0 + 5)).unwrap();
        assert_eq!((group.members(), group.generation()), (&[Rank(1), Rank(3)][..], Generation(old.0 + 5)));
        assert_eq!(sum_of(&group, rank.0), 4);
        assert!(world.barrier().is_err(), "what failed stays failed");
    };
    on_all(4, leave_and_rebuild);
}

#[test]
fn survivors_that_do_not_agree_who_they_are_do_not_become_a_group() {
    on_all(3, |world| {
        let world = world.with_timeout(Duration::from_secs(2));
        let rank = world.rank();
        if rank == Rank(1) {
            return;
        }
        let mine = if rank == Rank(0) { [Rank(0), Rank(1)] } else { [Rank(0), Rank(2)] };
        assert!(world.rebuild(&mine, Generation(9)).is_err(), "rank {rank}");
    });
}

#[test]
fn a_survivor_that_comes_late_is_waited_for_and_an_older_generation_is_not_let_in() {
    for bind in BINDS {
        connected(
            bind,
            3,
            |_| {},
            |world| {
                let world = world.unwrap().with_timeout(Duration::from_secs(3));
                match world.rank().0 {
                    // Still thinks that rank 2 belongs to it.
                    2 => {
                        world.rebuild(&[Rank(0), Rank(2)], Generation(4)).err().unwrap();
                    }
                    rank => {
                        if rank == 1 {
                            let late = Deadline::after(Duration::from_millis(300));
                            while !late.expired() {
                                std::thread::yield_now();
                            }
                        }
                        let group = world.rebuild(&[Rank(0), Rank(1)], Generation(5)).unwrap();
                        assert_eq!(sum_of(&group, 1), 2);
                    }
                }
            },
        );
    }
}

#[test]
fn sixty_four_ranks_form_a_group_and_part_it() {
    std::thread::scope(|scope| {
        for world in Group::threads(64) {
            scope.spawn(move || {
                let part = world.split(Some(world.rank().0 % 8), 0).unwrap().unwrap();
                assert_eq!(sum_of(&part, 1), 8);
            });
        }
    });
}
