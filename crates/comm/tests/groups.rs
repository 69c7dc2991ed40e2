//! The collectives over both transports, and what they do when a rank is missing, wrong, or a stranger.

mod ranks;
#[path = "groups/strangers.rs"]
mod strangers;

use phalanx_comm::{
    Buffer, Deadline, Endpoint, Error, Generation, Group, GroupConfig, PeerAddress, Rank, ReduceOp, Secret,
    Source,
};
use phalanx_wire::{Hello, Side, Socket, handshake};
use ranks::{BINDS, Bind, HOST, LIMIT, connected, meeting::Meeting, on_all, tls};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixStream};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

#[test]
fn every_collective_at_every_size() {
    for n in [1, 2, 3, 5, 8] {
        on_all(n, |group| {
            let rank = group.rank().index();
            // Direct and by the ring; empty, fewer elements than ranks, a prime, more than a socket's buffer.
            for len in [0, 1, 7, 997, 300_007] {
                let sum = |i: usize| (0..n).map(|r| (r * 31 + i % 1000) as f32).sum::<f32>();
                let original: Vec<f32> = (0..len).map(|i| (rank * 31 + i % 1000) as f32).collect();
                let mut values = original.clone();
                group.all_reduce(&mut values, ReduceOp::Sum).unwrap();
                assert!(
                    values.iter().enumerate().all(|(i, &v)| v == sum(i)),
                    "all-reduce, {n} ranks, {len} elements"
                );

                let root = Rank((len % n) as u32);
                let mut values = original.clone();
                group.broadcast(&mut values, root).unwrap();
                assert!(values.iter().enumerate().all(|(i, &v)| v == (root.index() * 31 + i % 1000) as f32));

                let mut gathered = vec![0.0; len * n];
                group.all_gather(&original, &mut gathered).unwrap();
                assert!(
                    gathered.iter().enumerate().all(|(i, &v)| v == (i / len * 31 + i % len % 1000) as f32)
                );

                let mut part = vec![0.0; len];
                let repeated: Vec<f32> = (0..n).flat_map(|_| original.iter().copied()).collect();
                group.reduce_scatter(&repeated, &mut part, ReduceOp::Sum).unwrap();
                assert!(
                    part.iter().enumerate().all(|(i, &v)| v == sum(i)),
                    "reduce-scatter, {n} ranks, {len}"
                );
            }
            group.barrier().unwrap();
            if n > 1 && rank < 2 {
                let mut word = [rank as i64; 3];
                if rank == 0 {
                    group.send(&word, Rank(1)).unwrap();
                    group.receive(&mut word, Rank(1)).unwrap();
                } else {
                    let mut came = [9i64; 3];
                    group.receive(&mut came, Rank(0)).unwrap();
                    assert_eq!(came, [0; 3]);
                    group.send(&word, Rank(0)).unwrap();
                }
                assert_eq!(word, [1; 3]);
            }
            group.barrier().unwrap();
        });
    }
}

#[test]
fn started_operations_come_back_in_order_with_the_same_bits() {
    on_all(3, |group| {
        let rank = group.rank().index();
        let values =
            |k: usize| (0..1000).map(|i| ((i * 7 + k * 13 + rank * 17) as f32).sin()).collect::<Vec<f32>>();
        let works: Vec<_> = (0..5).map(|k| group.start_all_reduce(values(k), ReduceOp::Sum)).collect();
        group.barrier().unwrap();
        for (k, mut work) in works.into_iter().enumerate() {
            assert!(work.poll(), "a later blocking operation finishes the earlier ones");
            let got = work.wait(Deadline::after(LIMIT)).unwrap();
            let mut again = values(k);
            group.all_reduce(&mut again, ReduceOp::Sum).unwrap();
            assert_eq!(got, again);
            let mut all = vec![0.0; 3000];
            group.all_gather(&got, &mut all).unwrap();
            assert!(all.chunks(1000).all(|other| other == got), "the same bits on every rank");
        }
        group.barrier().unwrap();
    });
}

#[test]
fn every_started_operation_gives_what_the_blocking_one_gives() {
    for n in [1, 2, 3, 5] {
        on_all(n, |group| {
            let rank = group.rank().index();
            for size in [0, 1, 997] {
                let input: Vec<f32> = (0..n * size).map(|i| ((i * 7 + rank * 17) as f32).sin()).collect();
                let own = rank * size..(rank + 1) * size;
                let root = Rank((size % n) as u32);
                let reduced = group.start_all_reduce(input.clone(), ReduceOp::Sum);
                let cast = group.start_broadcast(input.clone(), root);
                let scattered = group.start_reduce_scatter(input.clone(), ReduceOp::Max);
                let gathered = group.start_all_gather(input.clone());
                // Waited for in another order than they were started in.
                let gathered = gathered.wait(Deadline::after(LIMIT)).unwrap();
                let scattered = scattered.wait(Deadline::after(LIMIT)).unwrap();
                let cast = cast.wait(Deadline::after(LIMIT)).unwrap();
                let reduced = reduced.wait(Deadline::after(LIMIT)).unwrap();

                let mut want = input.clone();
                group.all_reduce(&mut want, ReduceOp::Sum).unwrap();
                assert_eq!(reduced, want);
                let mut want = input.clone();
                group.broadcast(&mut want, root).unwrap();
                assert_eq!(cast, want);
                let mut part = vec![0.0; size];
                group.reduce_scatter(&input, &mut part, ReduceOp::Max).unwrap();
                assert_eq!(scattered[own.clone()], part);
                let mut want = vec![0.0; n * size];
                group.all_gather(&input[own], &mut want).unwrap();
                assert_eq!(gathered, want);
            }
        });
    }
}

#[test]
fn ranks_in_different_operations_say_so_at_once() {
    on_all(2, |group| {
        let start = Instant::now();
        let error = if group.rank() == Rank(0) {
            group.all_reduce(&mut [1f32; 4], ReduceOp::Sum).unwrap_err()
        } else {
            group.all_reduce(&mut [1f64; 5], ReduceOp::Max).unwrap_err()
        };
        // Whoever reads the other's header first names both sides, and says so to the other.
        let message = error.to_string();
        let sides = ["all-reduce #1 (4 x f32, sum)", "all-reduce #1 (5 x f64, max)"];
        assert!(sides.iter().all(|side| message.contains(side)), "{message}");
        let other = Rank(1 - group.rank().0);
        assert!(matches!(error, Error::Mismatch { .. }) || is_by(&error, other), "{message}");
        assert!(start.elapsed() < LIMIT / 2);
        assert!(group.barrier().is_err(), "a group that failed stays failed");
    });
}

#[test]
fn ranks_that_name_different_roots_say_so_at_once() {
    /// What a rank does that takes itself, or rank 0, for the root.
    type Act = fn(&Group, Rank) -> Result<(), Error>;
    let acts: [(&str, Act); 4] = [
        ("broadcast", |group, root| group.broadcast(&mut [1u32; 3], root)),
        ("scatter", |group, root| group.scatter(&[1u32; 3], &mut [0], root)),
        ("gather", |group, root| group.gather(&[1u32], &mut [0; 3], root)),
        ("reduce", |group, root| group.reduce(&mut [1u32; 3], root, ReduceOp::Sum)),
    ];
    for (name, act) in acts {
        on_all(3, |group| {
            let start = Instant::now();
            let root = if group.rank() == Rank(2) { Rank(1) } else { Rank(0) };
            // Some have only sent, and are done with it.
            let error = act(&group, root).and_then(|()| group.barrier()).unwrap_err();
            // Whoever finds out tells the others.
            let told = error.to_string();
            assert!(
                told.contains(name) && told.contains("rank 2 is in") && told.contains("but rank"),
                "{told}"
            );
            assert!(start.elapsed() < LIMIT / 4);
        });
    }
}

#[test]
fn a_missing_rank_is_named_when_the_deadline_passes() {
    let groups = Group::threads(3);
    let groups: Vec<Group> = groups.into_iter().map(|g| g.with_timeout(Duration::from_millis(200))).collect();
    let both = Meeting::of(2);
    std::thread::scope(|scope| {
        for group in &groups[..2] {
            scope.spawn(|| {
                both.wait();
                let error = group.all_reduce(&mut [1f32; 4], ReduceOp::Sum).unwrap_err();
                match &error {
                    Error::Timeout { missing, waited, .. } => {
                        assert_eq!(missing, &[Rank(2)]);
                        assert!(*waited >= Duration::from_millis(200));
                        assert!(
                            error.to_string().contains("all-reduce #1 (4 x f32, sum): waited"),
                            "{error}"
                        );
                    }
                    // The first to give up says so.
                    other => {
                        assert!(is_by(other, Rank(1 - group.rank().0)), "{other}");
                        assert!(other.to_string().contains("for rank 2"), "{other}");
                    }
                }
            });
        }
    });
}

#[test]
fn an_error_tells_what_the_late_ones_did_last_and_the_history_tells_the_rest() {
    let (leave, go) = (Meeting::of(3), &Meeting::of(3));
    std::thread::scope(|scope| {
        for group in Group::threads(3) {
            let leave = &leave;
            scope.spawn(move || {
                let rank = group.rank();
                // Rank 2 sends nothing in a gather to another.
                group.broadcast(&mut [1u8], Rank(1)).unwrap();
                if rank == Rank(1) {
                    group.start_send(vec![1u8], Rank(0), 3).wait(Deadline::after(LIMIT)).unwrap();
                }
                go.wait();
                if rank == Rank(0) {
                    group.receive_tagged(&mut [0u8], Source::Rank(Rank(1)), 3).unwrap();
                    let group = group.clone().with_timeout(Duration::from_millis(100));
                    let error = group.all_reduce(&mut [1f32; 4], ReduceOp::Sum).unwrap_err().to_string();
                    assert!(error.contains("for ranks 1, 2; rank 1 was last heard in message #1"), "{error}");
                    assert!(error.contains("nothing was ever heard of rank 2"), "{error}");
                    let history = group.history();
                    let done: Vec<bool> = history.iter().map(|record| record.took.is_some()).collect();
                    assert_eq!(done, [true, false]);
                    assert_eq!(history[1].operation, "all-reduce #2 (4 x f32, sum)");
                    assert_eq!(history[1].algorithm, "doubling: 16 bytes between 3 ranks, up to 8192");
                }
                leave.wait();
            });
        }
    });
}

#[test]
fn a_rank_that_leaves_is_noticed_at_once() {
    on_all(3, |group| {
        let start = Instant::now();
        if group.rank() == Rank(1) {
            group.abort("enough");
            assert!(group.barrier().unwrap_err().to_string().contains("enough"));
            return;
        }
        let error = group.all_reduce(&mut [1f32; 4], ReduceOp::Sum).unwrap_err();
        assert!(is_by(&error, Rank(1)) && error.to_string().contains("enough"), "{error}");
        assert!(start.elapsed() < LIMIT / 2);
    });
}

/// Whether a rank says by it that another one ended the group.
fn is_by(error: &Error, rank: Rank) -> bool {
    matches!(error, Error::Aborted { by, .. } if *by == rank)
}

#[test]
fn another_thread_can_abort_and_is_never_held_up() {
    for end in [Some(Endpoint::bind as Bind), Some(Endpoint::tcp), Some(tls), None] {
        let (done, until_done) = std::sync::mpsc::channel::<()>();
        let (done, until_done) = (Mutex::new(Some(done)), Mutex::new(until_done));
        let rank = |group: Group| {
            if group.rank() == Rank(1) {
                // Is there, and in no operation, until rank 0 is done or has panicked.
                let _ = until_done.lock().unwrap().recv_timeout(LIMIT);
                return;
            }
            let _done = done.lock().unwrap().take();
            std::thread::scope(|scope| {
                let blocked = scope.spawn(|| group.barrier());
                // Small messages need nobody who takes them; they go out until the barrier has begun.
                let impatient = group.clone().with_timeout(Duration::ZERO);
                let busy = (0..1000).find_map(|_| {
                    std::thread::sleep(Duration::from_millis(1));
                    impatient.send(&[0u8], Rank(1)).err()
                });
                assert!(matches!(busy, Some(Error::Busy { .. })), "{busy:?}");
                group.progress();
                group.abort("enough");
                let error = blocked.join().unwrap().unwrap_err();
                assert!(error.to_string().contains("enough"), "{error}");
            });
        };
        match end {
            Some(bind) => connected(bind, 2, |_| {}, |group| rank(group.unwrap())),
            None => std::thread::scope(|scope| {
                Group::threads(2).into_iter().for_each(|group| drop(scope.spawn(|| rank(group))));
            }),
        }
    }
}

#[test]
fn messages_in_both_directions_may_cross() {
    on_all(2, |group| {
        let other = Rank(1 - group.rank().0);
        let mut came = [9u32];
        // Both send first; then one is a message ahead of the other, as the stages of a pipeline are.
        group.send(&[group.rank().0], other).unwrap();
        if group.rank() == Rank(0) {
            group.send(&[7u32], other).unwrap();
            group.receive(&mut came, other).unwrap();
            assert_eq!(came, [1]);
            group.receive(&mut came, other).unwrap();
            assert_eq!(came, [8]);
        } else {
            group.receive(&mut came, other).unwrap();
            assert_eq!(came, [0]);
            group.send(&[8u32], other).unwrap();
            group.receive(&mut came, other).unwrap();
            assert_eq!(came, [7]);
        }
        group.barrier().unwrap();
    });
}

#[test]
fn a_failed_group_holds_no_buffers() {
    /// A buffer that is counted while it lives.
    struct Counted(Vec<f32>, #[expect(dead_code, reason = "held, not read")] Arc<()>);

    impl Buffer for Counted {
        type Item = f32;

        fn as_mut_slice(&mut self) -> &mut [f32] {
            &mut self.0
        }
    }

    let alive = Arc::new(());
    let groups = Group::threads(2);
    let start = || groups[0].start_all_reduce(Counted(vec![1.0; 4], Arc::clone(&alive)), ReduceOp::Sum);
    let pending = start();
    assert_eq!(Arc::strong_count(&alive), 2);
    groups[0].abort("enough");
    let late = start();
    assert_eq!(Arc::strong_count(&alive), 1, "neither what was pending nor what came later is held");
    for work in [pending, late] {
        let error = work.wait(Deadline::after(LIMIT)).err().unwrap();
        assert!(error.to_string().contains("enough"), "{error}");
    }
}

#[test]
fn strangers_are_refused_and_the_group_is_made() {
    let strangers = |peers: &[PeerAddress]| {
        // The highest rank only dials; all others listen.
        for (whom, peer) in peers[..peers.len() - 1].iter().enumerate() {
            let tcp = peer.tcp;
            bother(whom, move || TcpStream::connect(tcp).unwrap());
            if let Some(local) = peer.local.clone() {
                let dial = move || {
                    let name = SocketAddr::from_abstract_name(&local.name).unwrap();
                    UnixStream::connect_addr(&name).unwrap()
                };
                bother(whom, dial);
            }
        }
    };
    for bind in BINDS {
        connected(bind, 3, strangers, |group| {
            let mut values = [1i32];
            group.unwrap().all_reduce(&mut values, ReduceOp::Sum).unwrap();
            assert_eq!(values, [3]);
        });
    }
}

/// All that a stranger might do to an ear: say nothing, talk nonsense, leave, know another secret, be of another generation,
/// know the secret and bring no memory.
fn bother<S: Socket + Send + 'static>(whom: usize, dial: impl Fn() -> S + Send + 'static) {
    let silent = dial();
    let mut garbage = dial();
    garbage.write_all(&[0x42; 500]).unwrap();
    drop(dial());
    let stranger = move |secret: [u8; 32], generation| {
        let mut stream = dial();
        let purpose = format!("comm/{whom}");
        let hello = Hello { purpose, rank: Rank(2), generation: Generation(generation) };
        let secret = Secret::from_bytes(secret);
        assert!(handshake(&mut stream, &secret, Side::Dialed, &hello, &Deadline::after(LIMIT)).is_err());
        stream.limit(LIMIT).unwrap();
        // Refused means closed, not left open.
        assert!(matches!(stream.read(&mut [0; 64]), Ok(0) | Err(_)));
    };
    std::thread::spawn(move || {
        stranger([8; 32], 3);
        stranger([7; 32], 2);
        drop((silent, garbage));
    });
}

#[test]
fn a_rank_that_can_not_reach_another_is_reached_by_it() {
    for bind in BINDS {
        let (secret, generation, timeout) = (Secret::from_bytes([7; 32]), Generation(3), LIMIT);
        // Rank 1 looks for rank 0 where nobody is.
        let (endpoints, nobody) = ([bind(HOST).unwrap(), bind(HOST).unwrap()], bind(HOST).unwrap().address());
        let peers = endpoints.each_ref().map(Endpoint::address);
        let known = [peers.to_vec(), vec![nobody, peers[1].clone()]];
        std::thread::scope(|scope| {
            for (rank, (endpoint, peers)) in endpoints.into_iter().zip(known).enumerate() {
                let (rank, secret) = (Rank(rank as u32), secret.clone());
                let config = GroupConfig { rank, generation, secret, endpoint, peers, timeout };
                scope.spawn(|| {
                    let mut values = [1i32];
                    Group::connect(config).unwrap().all_reduce(&mut values, ReduceOp::Sum).unwrap();
                    assert_eq!(values, [2]);
                });
            }
        });
    }
}

#[test]
fn a_peer_that_brings_no_memory_is_refused() {
    let endpoint = Endpoint::bind(HOST).unwrap();
    let peers = vec![endpoint.address(); 2];
    let local = peers[0].local.clone().unwrap();
    let secret = Secret::from_bytes([7; 32]);
    let (theirs, generation) = (secret.clone(), Generation(0));
    let liar = std::thread::spawn(move || {
        let name = SocketAddr::from_abstract_name(&local.name).unwrap();
        let mut stream = UnixStream::connect_addr(&name).unwrap();
        let hello = Hello { purpose: "comm/0".into(), rank: Rank(1), generation };
        handshake(&mut stream, &theirs, Side::Dialed, &hello, &Deadline::after(LIMIT)).unwrap();
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        // It is let in, and then says something else than it should.
        stream.read_exact(&mut [0]).unwrap();
        stream.write_all(&[1]).unwrap();
        stream.read(&mut [0]).unwrap()
    });
    let timeout = Duration::from_millis(300);
    let config = GroupConfig { rank: Rank(0), generation, secret, endpoint, peers, timeout };
    let error = Group::connect(config).err().unwrap().to_string();
    assert!(error.contains("rank 1"), "{error}");
    assert_eq!(liar.join().unwrap(), 0, "the connection was closed");
}

#[test]
fn ranks_of_one_host_share_memory_unless_told_otherwise() {
    for (bind, want) in BINDS.into_iter().zip(["shared memory", "TCP", "TCP with TLS"]) {
        let want = format!("2 ranks over {want}");
        connected(bind, 2, |_| {}, |group| assert_eq!(group.unwrap().describe(), want));
    }
    let binds: [Bind; 3] = [Endpoint::bind, Endpoint::tcp, Endpoint::bind];
    let endpoints = binds.map(|bind| bind(HOST).unwrap());
    let peers: Vec<_> = endpoints.iter().map(Endpoint::address).collect();
    std::thread::scope(|scope| {
        for (rank, endpoint) in endpoints.into_iter().enumerate() {
            let (rank, peers) = (Rank(rank as u32), peers.clone());
            scope.spawn(move || {
                let (generation, secret) = (Generation(0), Secret::from_bytes([7; 32]));
                let config = GroupConfig { rank, generation, secret, endpoint, peers, timeout: LIMIT };
                let group = Group::connect(config).unwrap();
                let over = ["TCP and shared memory", "TCP", "TCP and shared memory"][rank.index()];
                assert_eq!(group.describe(), format!("3 ranks over {over}"));
                let mut values = vec![1i64; 100_000];
                group.all_reduce(&mut values, ReduceOp::Sum).unwrap();
                assert_eq!(values, [3; 100_000]);
            });
        }
    });
}

#[test]
fn ranks_with_and_without_tls_are_told_so_at_once() {
    let rows = [
        ([tls as Bind, Endpoint::tcp], "rank 1 has no TLS, which this rank wants"),
        ([Endpoint::tcp, tls], "rank 1 wants TLS, which this rank has not"),
    ];
    for (binds, want) in rows {
        let endpoints = binds.map(|bind| bind(HOST).unwrap());
        let mut peers = endpoints.each_ref().map(Endpoint::address).to_vec();
        let [endpoint, _other] = endpoints;
        // What others make of this rank's address changes nothing.
        peers[0].tls = peers[1].tls;
        let (secret, generation) = (Secret::from_bytes([7; 32]), Generation(0));
        let config = GroupConfig { rank: Rank(0), generation, secret, endpoint, peers, timeout: LIMIT };
        let error = Group::connect(config).err().unwrap().to_string();
        assert!(
            error.contains(want) && error.contains("hint: give all ranks of a run TLS, or none"),
            "{error}"
        );
    }
}

#[test]
fn with_tls_ranks_of_one_host_still_share_memory() {
    let bind = |ip| Endpoint::bind(ip)?.with_tls();
    connected(bind, 2, |_| {}, |group| assert_eq!(group.unwrap().describe(), "2 ranks over shared memory"));
}

#[test]
fn a_group_that_lacks_a_rank_names_it() {
    let [endpoint, second, third] = [0; 3].map(|_| Endpoint::bind(HOST).unwrap());
    // Those are listening, and nobody answers.
    let peers = [&endpoint, &second, &third].map(Endpoint::address).to_vec();
    let (secret, timeout) = (Secret::from_bytes([1; 32]), Duration::from_millis(100));
    let config = GroupConfig { rank: Rank(0), generation: Generation(0), secret, endpoint, peers, timeout };
    let error = Group::connect(config).err().unwrap().to_string();
    assert!(error.contains("making the group: waited") && error.contains("ranks 1, 2"), "{error}");
}

#[test]
fn a_rank_that_was_told_to_wait_hears_when_the_other_can_not_come() {
    // Takes connections, and says nothing.
    let silent = std::net::TcpListener::bind((HOST, 0)).unwrap();
    let endpoints: Vec<Endpoint> = (0..2).map(|_| Endpoint::tcp(HOST).unwrap()).collect();
    let peers: Vec<PeerAddress> = endpoints.iter().map(Endpoint::address).collect();
    std::thread::scope(|scope| {
        for (rank, endpoint) in endpoints.into_iter().enumerate() {
            let (mut peers, silent) = (peers.clone(), &silent);
            scope.spawn(move || {
                // Rank 1 dials what isn't rank 0, and turns rank 0 away meanwhile, which dials it.
                let timeout = if rank == 1 {
                    peers[0].tcp = silent.local_addr().unwrap();
                    Duration::from_millis(500)
                } else {
                    2 * LIMIT
                };
                let start = Instant::now();
                let group = Group::connect(GroupConfig {
                    rank: Rank(rank as u32),
                    generation: Generation(3),
                    secret: Secret::from_bytes([7; 32]),
                    endpoint,
                    peers,
                    timeout,
                });
                let error = group.err().unwrap();
                assert!(start.elapsed() < LIMIT, "rank {rank}: {:?}, {error}", start.elapsed());
            });
        }
    });
}
