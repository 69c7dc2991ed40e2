//! Groups that take the place of others, with new numbers and new processes, as a run that loses and wins workers needs them.

use crate::ranks::{BINDS, Bind, HOST, LIMIT, connected};
use crate::{see_off, sum_of};
use phalanx_comm::{
    Deadline, Endpoint, Error, Generation, Group, GroupConfig, PeerAddress, Rank, ReduceOp, Secret,
};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// A group of `n` ranks, each of which does what `member` does, and beside it `new` processes that aren't in it. All get
/// everybody's address: first those of the ranks.
fn with_newcomers(
    bind: Bind,
    n: usize,
    new: usize,
    newcomer: impl Fn(Endpoint, &[PeerAddress]) + Sync,
    member: impl Fn(Group, &[PeerAddress]) + Sync,
) {
    let (addresses, newcomer) = (OnceLock::new(), &newcomer);
    std::thread::scope(|scope| {
        let meanwhile = |peers: &[PeerAddress]| {
            let endpoints: Vec<Endpoint> = (0..new).map(|_| bind(HOST).unwrap()).collect();
            let all = peers.iter().cloned().chain(endpoints.iter().map(Endpoint::address)).collect();
            let all: &Vec<PeerAddress> = addresses.get_or_init(|| all);
            endpoints.into_iter().for_each(|endpoint| {
                scope.spawn(move || newcomer(endpoint, all));
            });
        };
        connected(bind, n, meanwhile, |group| member(group.unwrap(), addresses.get().unwrap()));
    });
}

fn pick(addresses: &[PeerAddress], places: &[usize]) -> Vec<PeerAddress> {
    places.iter().map(|&place| addresses[place].clone()).collect()
}

/// What a new process does to come to a group of these.
fn come(endpoint: Endpoint, generation: u64, peers: Vec<PeerAddress>) -> Result<Group, Error> {
    let rank = peers.iter().position(|peer| *peer == endpoint.address()).unwrap();
    let secret = Secret::from_bytes([7; 32]);
    let (rank, generation) = (Rank(rank as u32), Generation(generation));
    Group::connect(GroupConfig { rank, generation, secret, endpoint, peers, timeout: LIMIT })
}

/// What one that is in a group does to go on in the next one.
fn go_on(group: &Group, generation: u64, peers: Vec<PeerAddress>) -> Result<Group, Error> {
    let rank = peers.iter().position(|peer| Some(peer) == group.address()).unwrap();
    group.succeed(Rank(rank as u32), Generation(generation), peers)
}

#[test]
fn survivors_go_on_under_new_numbers() {
    for bind in BINDS {
        let member = |world: Group, addresses: &[PeerAddress]| {
            let rank = world.rank().index();
            assert_eq!(world.address(), Some(&addresses[rank]));
            assert_eq!(sum_of(&world, 1), 4);
            see_off(&world, Rank(1));
            if rank == 1 {
                return;
            }
            let start = Instant::now();
            world.all_reduce(&mut [1.0f32], ReduceOp::Sum).unwrap_err();
            // The last one fills the hole.
            let group = go_on(&world, 4, pick(addresses, &[0, 3, 2])).unwrap();
            assert!(start.elapsed() < LIMIT / 4, "{:?}", start.elapsed());
            assert_eq!((group.rank(), group.world_size()), (Rank([0, 9, 2, 1][rank]), 3));
            assert_eq!(group.members(), [Rank(0), Rank(1), Rank(2)]);
            assert_eq!((group.generation(), group.timeout()), (Generation(4), LIMIT));
            assert_eq!(sum_of(&group, 1 << (8 * group.rank().0)), 0x01_01_01);
            assert_eq!(
                group.split(Some(group.rank().0 / 2), 0).unwrap().unwrap().world_size(),
                [2, 2, 1][group.rank().index()]
            );
        };
        with_newcomers(bind, 4, 0, |_, _| {}, member);
    }
}

#[test]
fn a_group_of_one_takes_in_newcomers_whichever_rank_it_is_then() {
    for (bind, order) in BINDS.into_iter().flat_map(|bind| [(bind, [0, 1, 2]), (bind, [1, 2, 0])]) {
        let peers = |addresses: &[PeerAddress]| pick(addresses, &order);
        with_newcomers(
            bind,
            1,
            2,
            |endpoint, addresses| {
                let group = come(endpoint, 9, peers(addresses)).unwrap();
                assert_eq!(sum_of(&group, 1), 7);
            },
            |alone, addresses| {
                assert_eq!(sum_of(&alone, 5), 5);
                assert_eq!(sum_of(&go_on(&alone, 9, peers(addresses)).unwrap(), 5), 7);
                assert!(alone.barrier().unwrap_err().to_string().contains("generation 9 takes its place"));
            },
        );
    }
}

#[test]
fn a_newcomer_takes_the_place_of_one_that_is_lost() {
    for bind in BINDS {
        let peers = |addresses: &[PeerAddress]| pick(addresses, &[0, 3, 2]);
        with_newcomers(
            bind,
            3,
            1,
            |endpoint, addresses| assert_eq!(sum_of(&come(endpoint, 7, peers(addresses)).unwrap(), 1), 21),
            |world, addresses| {
                if world.rank() != Rank(1) {
                    world.barrier().unwrap_err();
                    assert_eq!(sum_of(&go_on(&world, 7, peers(addresses)).unwrap(), 10), 21);
                }
            },
        );
    }
}

#[test]
fn a_run_that_grows_and_shrinks_is_no_failure_until_a_rank_is_lost() {
    // By address: the first one founds the run, the others are new.
    let rows: [(u64, &[usize]); 3] = [(11, &[0, 1, 2]), (12, &[2, 0]), (19, &[3, 0, 2])];
    for bind in BINDS {
        let live = |mut group: Group, addresses: &[PeerAddress]| {
            let begun = group.generation().0;
            for (generation, row) in rows.into_iter().filter(|(later, _)| *later > begun) {
                assert_eq!(sum_of(&group, 1), group.world_size() as u32);
                let peers = pick(addresses, row);
                if !peers.contains(group.address().unwrap()) {
                    return None;
                }
                group = go_on(&group, generation, peers).unwrap();
            }
            assert_eq!(sum_of(&group, 1), 3);
            Some(group)
        };
        with_newcomers(
            bind,
            1,
            3,
            |endpoint, addresses| {
                let joins = |row: &[usize]| pick(addresses, row).contains(&endpoint.address());
                let (generation, row) = rows.into_iter().find(|(_, row)| joins(row)).unwrap();
                live(come(endpoint, generation, pick(addresses, row)).unwrap(), addresses);
            },
            |founder, addresses| {
                let failures = Arc::new(AtomicUsize::new(0));
                let counted = Arc::clone(&failures);
                founder.on_failure(move |_| {
                    counted.fetch_add(1, Ordering::Relaxed);
                });
                let last = live(founder, addresses).unwrap();
                assert_eq!(failures.load(Ordering::Relaxed), 0);
                last.barrier().unwrap_err();
                assert_eq!(failures.load(Ordering::Relaxed), 1);
            },
        );
    }
}

#[test]
fn ranks_that_are_still_in_the_last_operation_are_not_disturbed() {
    for bind in BINDS {
        with_newcomers(
            bind,
            3,
            0,
            |_, _| {},
            |world, addresses| {
                let mut came = [0u8];
                match world.rank().0 {
                    // Done at once, and on its way.
                    0 => world.send(&[1u8], Rank(1)).unwrap(),
                    1 => {
                        world.receive(&mut came, Rank(2)).unwrap();
                        world.receive(&mut came, Rank(0)).unwrap();
                    }
                    _ => {
                        let late = Deadline::after(Duration::from_millis(300));
                        while !late.expired() {
                            std::thread::yield_now();
                        }
                        world.send(&[2u8], Rank(1)).unwrap();
                    }
                }
                assert_eq!(sum_of(&go_on(&world, 4, addresses.to_vec()).unwrap(), 1), 3);
            },
        );
    }
}

#[test]
fn one_of_an_older_generation_is_turned_away_even_by_a_group_of_one() {
    for bind in BINDS {
        let member = |alone: Group, addresses: &[PeerAddress]| {
            let start = Instant::now();
            let straggler = bind(HOST).unwrap();
            let peers = vec![addresses[0].clone(), straggler.address()];
            let error = come(straggler, 2, peers).err().unwrap().to_string();
            assert!(error.contains("the other end wants") && start.elapsed() < LIMIT / 4, "{error}");
            let group = go_on(&alone, 4, addresses.to_vec()).unwrap();
            assert_eq!((sum_of(&group, 5), group.generation()), (5, Generation(4)));
        };
        with_newcomers(bind, 1, 0, |_, _| {}, member);
    }
}

#[test]
fn who_is_taken_for_another_rank_turns_the_caller_away() {
    for bind in BINDS {
        with_newcomers(
            bind,
            2,
            0,
            |_, _| {},
            |world, addresses| {
                let order = if world.rank() == Rank(0) { [0, 1] } else { [1, 0] };
                let error = go_on(&world.with_timeout(LIMIT / 4), 4, pick(addresses, &order)).err().unwrap();
                assert!(!matches!(error, Error::Timeout { .. }), "{error}");
            },
        );
    }
}

#[test]
fn a_rank_that_can_not_take_part_tells_those_who_come_for_it() {
    with_newcomers(
        Endpoint::tcp,
        2,
        0,
        |_, _| {},
        |world, addresses| {
            let (start, mut peers) = (Instant::now(), addresses.to_vec());
            // One was told something else of the other than that one says of itself.
            peers[1].tls = world.rank() == Rank(0);
            let error = go_on(&world, 4, peers).err().unwrap().to_string();
            assert!(error.contains("rank 1 wants TLS, which this rank has not"), "{error}");
            assert!(start.elapsed() < LIMIT / 4, "{:?}", start.elapsed());
        },
    );
}

#[test]
fn what_can_not_follow_is_told() {
    let refused = |group: &Group, rank: u32, generation, peers: &[PeerAddress], want: &str| {
        let error = group.succeed(Rank(rank), Generation(generation), peers.to_vec()).err().unwrap();
        assert!(matches!(error, Error::Connect { .. }) && error.to_string().contains(want), "{error}");
    };
    with_newcomers(
        Endpoint::bind,
        1,
        0,
        |_, _| {},
        |alone, addresses| {
            let other = Endpoint::bind(HOST).unwrap().address();
            let both = [addresses[0].clone(), other];
            refused(&Group::solo(), 0, 9, &both, "nobody can come to a world of one\nhint: ");
            refused(&Group::threads(2)[0], 0, 9, &both, "nobody can come to 2 ranks over threads\nhint: ");
            refused(&alone, 0, 3, &both, "generation 3 can't follow generation 3");
            refused(&alone, 1, 9, &both, "rank 1 of 2 is at 127.0.0.1");
            refused(&alone, 2, 9, &both, "rank 2 of 2 is nowhere");
            assert_eq!(sum_of(&alone, 5), 5, "it is as it was");
        },
    );
}
