//! Every algorithm between ranks of one host and of several: the same sums, and the same bits on all ranks and in every run.

mod ranks;

use phalanx_comm::{
    Algorithm, Deadline, Endpoint, Error, Generation, Group, GroupConfig, Rank, ReduceOp, Secret,
};
use ranks::{LIMIT, on_all};
use std::sync::Mutex;

/// Runs `f` on every rank of a group in which rank r is on host `hosts[r]`: ranks of different hosts have different addresses of
/// this one, say that it is another, and so talk over TCP, the others through shared memory.
fn on_hosts(hosts: &[u8], f: impl Fn(Group) + Sync) {
    let secret = Secret::from_bytes([7; 32]);
    let bind = |host: &u8| Endpoint::bind([127, 0, 0, 1 + host].into()).unwrap();
    let endpoints: Vec<Endpoint> = hosts.iter().map(bind).collect();
    let mut peers: Vec<_> = endpoints.iter().map(Endpoint::address).collect();
    for (peer, host) in peers.iter_mut().zip(hosts) {
        peer.local.as_mut().expect("shared memory can be had").host = format!("host {host}");
    }
    std::thread::scope(|scope| {
        for (rank, endpoint) in endpoints.into_iter().enumerate() {
            let (secret, peers, f) = (secret.clone(), peers.clone(), &f);
            scope.spawn(move || {
                let (rank, generation) = (Rank(rank as u32), Generation(1));
                let config = GroupConfig { rank, generation, secret, endpoint, peers, timeout: LIMIT };
                f(Group::connect(config).unwrap());
            });
        }
    });
}

/// Worlds on two hosts and on three: in blocks, dealt out in turn, and uneven.
const HOSTS: [&[u8]; 5] =
    [&[0, 0, 1, 1], &[0, 1, 0, 1, 0, 1], &[0, 1, 1, 1, 0], &[0, 1, 2, 2, 1, 0], &[2, 0, 0, 1, 2, 2, 2]];

/// Nothing, one, odd, and more than small messages hold.
const LENGTHS: [usize; 5] = [0, 1, 7, 1009, 60_000];

/// A number in whose sums the order shows.
fn odd(rank: usize, i: usize) -> f32 {
    1.0 / (1 + 7 * rank + i % 100) as f32
}

/// All-reduces by every algorithm; says the bits that came of it, in order.
fn all_reduce_by_all(group: &Group) -> Vec<u32> {
    let (rank, n) = (group.rank().index(), group.world_size());
    let mut bits = Vec::new();
    for algorithm in Algorithm::OF_ALL_REDUCE {
        let group = group.clone().with_algorithm(Some(algorithm));
        for len in LENGTHS {
            let mut whole: Vec<i64> = (0..len).map(|i| (rank * 1000 + i) as i64).collect();
            group.all_reduce(&mut whole, ReduceOp::Sum).unwrap();
            let want = |i: usize| (0..n).map(|rank| (rank * 1000 + i) as i64).sum::<i64>();
            assert!(whole.iter().enumerate().all(|(i, &got)| got == want(i)), "{algorithm} of {len}");
            let mut broken: Vec<f32> = (0..len).map(|i| odd(rank, i)).collect();
            group.all_reduce(&mut broken, ReduceOp::Average).unwrap();
            bits.extend(broken.iter().map(|value| value.to_bits()));
            let started: Vec<f32> = (0..len).map(|i| odd(rank, i)).collect();
            let started = group.start_all_reduce(started, ReduceOp::Average);
            assert!(started.wait(Deadline::after(LIMIT)).unwrap() == broken, "{algorithm} of {len}");
        }
    }
    bits
}

#[test]
fn every_algorithm_gives_all_ranks_the_same_bits() {
    for n in [1, 2, 3, 5, 8] {
        // On all ranks, over all transports.
        let first = Mutex::new(None);
        on_all(n, |group| {
            let bits = all_reduce_by_all(&group);
            assert!(*first.lock().unwrap().get_or_insert(bits.clone()) == bits, "rank {}", group.rank());
        });
    }
}

#[test]
fn every_algorithm_works_between_hosts() {
    for hosts in HOSTS {
        let runs = [(); 2].map(|()| {
            let first = Mutex::new(None);
            on_hosts(hosts, |group| {
                let bits = all_reduce_by_all(&group);
                assert!(*first.lock().unwrap().get_or_insert(bits.clone()) == bits, "rank {}", group.rank());
            });
            first.into_inner().unwrap()
        });
        assert!(runs[0] == runs[1], "another run on hosts {hosts:?}, other bits");
    }
}

#[test]
fn hosts_are_known_to_the_group_and_to_its_parts() {
    on_hosts(&[0, 1, 1, 0, 2], |group| {
        let rank = group.rank();
        assert_eq!(group.choice_of_all_reduce(4).to_string(), "hierarchical: 5 ranks on 3 hosts");
        let middle = group.subgroup(&[Rank(2), Rank(1)]).unwrap();
        if let Some(middle) = middle {
            assert_eq!(
                middle.choice_of_all_reduce(4).to_string(),
                "direct: 4 bytes between 2 ranks, up to 65536"
            );
        }
        for root in 0..5 {
            let mut word = [rank.0];
            group.broadcast(&mut word, Rank(root)).unwrap();
            assert_eq!(word, [root]);
            let mut sum = [1u32; 1009];
            group.reduce(&mut sum, Rank(root), ReduceOp::Sum).unwrap();
            assert!(rank != Rank(root) || sum == [5; 1009]);
        }
        let history = group.history();
        assert!(history.iter().any(|record| record.algorithm == "hierarchical: 5 ranks on 3 hosts"));
    });
}

#[test]
fn ranks_that_go_different_ways_are_told_at_once() {
    on_all(2, |group| {
        let algorithm = [Algorithm::Direct, Algorithm::Doubling][group.rank().index()];
        let error =
            group.with_algorithm(Some(algorithm)).all_reduce(&mut [1f32; 4], ReduceOp::Sum).unwrap_err();
        let message = error.to_string();
        match error {
            Error::Mismatch { .. } => {
                let sides =
                    ["direct", "doubling"].map(|way| format!("all-reduce #1 (4 x f32, sum) by {way}"));
                assert!(sides.iter().all(|side| message.contains(side)), "{message}");
            }
            // Whoever reads the other's header first leaves.
            other => assert!(matches!(other, Error::PeerLost { .. }), "{other}"),
        }
    });
}

#[test]
#[should_panic(expected = "with_algorithm: Some(Dissemination) can't all-reduce")]
fn an_algorithm_that_cannot_all_reduce_is_a_bug_of_the_caller() {
    let _ = Group::solo().with_algorithm(Some(Algorithm::Dissemination));
}
