//! Ranks that are killed, stopped, late or mad, as the others report them: each by what it is.

mod network;
mod processes;
#[path = "../ranks/mod.rs"]
mod ranks;

use nix::sys::signal::{Signal, raise};
use phalanx_comm::{
    Deadline, Endpoint, Error, Generation, Group, GroupConfig, Rank, ReduceOp, Secret, Source,
};
use phalanx_wire::{Hello, Side, handshake};
use processes::{Processes, connect, own_rank, say};
use ranks::{BINDS, Bind, HOST, LIMIT, connected, on_all, tls};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

/// Which of the transports the ranks of a test use, in the environment.
const WAY: &str = "PHALANX_TEST_WAY";

/// Of memory that ranks share: a page.
const BYTES: usize = 4096;

fn bind() -> Bind {
    BINDS[std::env::var(WAY).unwrap().parse::<usize>().unwrap()]
}

/// Sums of so many elements until one fails, which is then said.
fn work(group: &Group, len: usize) {
    let mut values = vec![1f32; len];
    group.all_reduce(&mut values, ReduceOp::Max).unwrap();
    say("works");
    let error = (0u64..).find_map(|_| group.all_reduce(&mut values, ReduceOp::Max).err()).unwrap();
    say(&error.to_string());
}

/// What the ranks but `hurt` say when that one gets a signal in the middle of their work, and how long that took.
fn survivors(test: &str, n: usize, way: usize, hurt: usize, signal: &str) -> (Vec<String>, Duration) {
    let ranks = Processes::start(test, n, &[(WAY, &way.to_string())]);
    (0..n).for_each(|rank| assert_eq!(ranks.line(rank), "works"));
    let start = Instant::now();
    ranks.signal(hurt, signal);
    let said = (0..n).filter(|&rank| rank != hurt).map(|rank| ranks.line(rank)).collect();
    (said, start.elapsed())
}

#[test]
fn all_ranks_blame_the_one_that_is_killed() {
    if let Some(rank) = own_rank() {
        return work(&connect(rank, bind()).unwrap(), 300_000);
    }
    for way in 0..BINDS.len() {
        let (said, took) = survivors("all_ranks_blame_the_one_that_is_killed", 4, way, 2, "KILL");
        assert!(said.iter().all(|error| error.contains("rank 2 is gone")), "{said:?}");
        assert!(took < LIMIT / 4, "{took:?}");
    }
}

#[test]
fn a_rank_that_is_stopped_is_told_from_a_dead_one() {
    if let Some(rank) = own_rank() {
        return work(&connect(rank, bind()).unwrap(), 1000);
    }
    // A process of this host is given less time, since it is known for certain.
    let wants = [
        ("it is stopped (SIGSTOP or a debugger), for 1.", 1500),
        ("no sign of life for 2", 2000),
        ("no sign of life for 2", 2000),
    ];
    for (way, (want, least)) in wants.into_iter().enumerate() {
        let (said, took) = survivors("a_rank_that_is_stopped_is_told_from_a_dead_one", 3, way, 1, "STOP");
        for error in &said {
            assert!(
                error.contains("rank 1 is silent") || error.contains("rank 1 is gone, says rank"),
                "{said:?}"
            );
            assert!(error.contains(want), "{said:?}");
        }
        assert!(Duration::from_millis(least) < took && took < LIMIT / 4, "{took:?}");
    }
}

#[test]
fn a_rank_that_is_stopped_before_another_needs_it_is_told_as_soon() {
    if let Some(rank) = own_rank() {
        let group = connect(rank, bind()).unwrap();
        let (mut pid, mut nothing) = ([std::process::id()], [0u8]);
        // Ranks 1 and 2 have only met rank 0 so far.
        match rank.0 {
            0 => {
                group.receive(&mut pid, Rank(1)).unwrap();
                group.send(&pid, Rank(2)).unwrap();
                let _ = group.receive(&mut nothing, Rank(2));
            }
            1 => {
                group.send(&pid, Rank(0)).unwrap();
                raise(Signal::SIGSTOP).unwrap();
            }
            _ => {
                group.receive(&mut pid, Rank(0)).unwrap();
                let (stat, soon) = (format!("/proc/{}/stat", pid[0]), Deadline::after(LIMIT));
                while !std::fs::read_to_string(&stat).unwrap().contains(") T ") {
                    assert!(!soon.expired(), "rank 1 goes on");
                    std::thread::yield_now();
                }
                say("stopped");
                say(&group.receive(&mut nothing, Rank(1)).unwrap_err().to_string());
            }
        }
        return;
    }
    for (way, want) in ["it is stopped", "no sign of life for 2", "no sign of life for 2"].iter().enumerate()
    {
        let test = "a_rank_that_is_stopped_before_another_needs_it_is_told_as_soon";
        let ranks = Processes::start(test, 3, &[(WAY, &way.to_string())]);
        assert_eq!(ranks.line(2), "stopped");
        let start = Instant::now();
        let (error, took) = (ranks.line(2), start.elapsed());
        assert!(error.contains("rank 1 is silent") && error.contains(want), "{error}");
        assert!(took < LIMIT / 4, "{took:?}");
    }
}

#[test]
fn a_rank_that_is_stopped_before_it_shares_its_memory_is_told_as_soon() {
    let test = "a_rank_that_is_stopped_before_it_shares_its_memory_is_told_as_soon";
    if let Some(rank) = own_rank() {
        let group = connect(rank, bind()).unwrap();
        if rank == Rank(1) {
            // As if it were about to.
            group.all_gather(&[BYTES as u64], &mut [0u64; 2]).unwrap();
            raise(Signal::SIGSTOP).unwrap();
        }
        let shared = group.allocate::<u8>(BYTES).map(drop);
        return say(&shared.unwrap_err().to_string());
    }
    let (ranks, start) = (Processes::start(test, 2, &[(WAY, "0")]), Instant::now());
    let (error, took) = (ranks.line(0), start.elapsed());
    assert!(error.contains("sharing memory: rank 1 is silent: it is stopped"), "{error}");
    assert!(took < LIMIT / 4, "{took:?}");
}

#[test]
fn a_rank_that_left_and_ended_keeps_nobody_from_hearing_of_others() {
    let test = "a_rank_that_left_and_ended_keeps_nobody_from_hearing_of_others";
    if let Some(rank) = own_rank() {
        let group = connect(rank, bind()).unwrap();
        let mut came = [0u8];
        match rank.0 {
            0 => {
                for _ in 0..2 {
                    group.receive_tagged(&mut came, Source::Any, 1).unwrap();
                }
                say("heard of both");
            }
            1 => {
                group.send_tagged(&[1u8], Rank(0), 1).unwrap();
                // The others were looked at some times by then.
                compute(Duration::from_secs(1));
                group.send_tagged(&[1u8], Rank(0), 1).unwrap();
            }
            _ => group.send_tagged(&[1u8], Rank(0), 2).unwrap(),
        }
        return;
    }
    for way in 0..BINDS.len() {
        let ranks = Processes::start(test, 3, &[(WAY, &way.to_string())]);
        assert_eq!(ranks.line(0), "heard of both");
    }
}

#[test]
fn a_rank_that_computes_is_alive() {
    let silence = Duration::from_millis(600);
    on_all(2, |group| {
        let group = group.with_silence(Some(silence));
        if group.rank() == Rank(1) {
            compute(4 * silence);
        }
        // More than the kernel keeps, so both directions are stuck meanwhile.
        let mut values = vec![1f32; 8 << 20];
        group.all_reduce(&mut values, ReduceOp::Sum).unwrap();
        assert!(values.iter().all(|&value| value == 2.0));
    });
}

#[test]
#[should_panic(expected = "with_silence: 599ms is less than 600ms")]
fn a_silence_in_which_a_living_rank_may_not_beat_is_refused() {
    let _ = Group::solo().with_silence(Some(Duration::from_millis(599)));
}

/// Is busy with something else for so long.
fn compute(time: Duration) {
    let busy = Deadline::after(time);
    while !busy.expired() {
        std::hint::spin_loop();
    }
}

#[test]
fn what_was_sent_before_a_rank_left_arrives_however_late_it_is_taken() {
    let late = Duration::from_millis(700);
    let rank = |group: Group| {
        let len = 3 << 20;
        if group.rank() == Rank(0) {
            let sent = group.start_send(vec![7u8; len], Rank(1), 0);
            // What the kernel doesn't take at once goes when the other begins to take it.
            sent.wait(Deadline::after(LIMIT)).unwrap();
            return;
        }
        // Beats go the other way meanwhile.
        compute(late);
        let mut came = vec![0u8; len];
        group.receive(&mut came, Rank(0)).unwrap();
        assert!(came.iter().all(|&byte| byte == 7));
    };
    for bind in [Endpoint::tcp, tls] {
        connected(bind, 2, |_| {}, |group| rank(group.unwrap()));
    }
}

#[test]
fn garbage_is_named_as_garbage() {
    // Not a frame at all, and a frame whose data is no operation.
    let rows: [(&[u8], &str); 2] = [
        (b"GET / HTTP/1.1\r\n\r\n", "rank 1 is gone: it sent something that isn't a frame"),
        (&[&[0xd1, 32, 0, 0][..], &[0x42; 32]].concat(), "rank 1 is in something that isn't an operation"),
    ];
    for (garbage, want) in rows {
        let endpoint = Endpoint::tcp(HOST).unwrap();
        let peers = vec![endpoint.address(); 2];
        let (secret, generation, address) = (Secret::from_bytes([7; 32]), Generation(0), peers[0].tcp);
        let error = std::thread::scope(|scope| {
            let theirs = secret.clone();
            let mad = scope.spawn(move || {
                let mut stream = TcpStream::connect(address).unwrap();
                let hello = Hello { purpose: "comm/0".into(), rank: Rank(1), generation };
                handshake(&mut stream, &theirs, Side::Dialed, &hello, &Deadline::after(LIMIT)).unwrap();
                // It is let in, and then says something else than it should.
                stream.read_exact(&mut [0]).unwrap();
                stream.write_all(garbage).unwrap();
                stream
            });
            let config = GroupConfig { rank: Rank(0), generation, secret, endpoint, peers, timeout: LIMIT };
            let error = Group::connect(config).err().unwrap();
            let _open = mad.join().unwrap();
            error
        });
        assert!(!matches!(error, Error::Timeout { .. }) && error.to_string().contains(want), "{error}");
    }
}
