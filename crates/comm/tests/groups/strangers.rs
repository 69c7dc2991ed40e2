//! A group that is made while its ears are beset: port scanners, browsers, those who drip bytes, who play recordings, who have
//! another secret or generation, and a thousand who say nothing. They are refused and logged with their address; the group is
//! made, in time, and works.

use crate::ranks::{HOST, LIMIT, connected};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use phalanx_comm::{Deadline, Endpoint, Generation, PeerAddress, Rank, ReduceOp, Secret};
use phalanx_wire::{Hello, Side, Socket, handshake};
use std::collections::HashSet;
use std::io::{Read, Result as IoResult, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

/// How long the strangers may hold up a group.
const PATIENCE: Duration = Duration::from_secs(10);
const SILENT: usize = 1000;
/// So many of a tenth of them come before the group does.
const FIRST: usize = 8;
/// How long one tries to come in.
const SOON: Duration = Duration::from_millis(200);
/// How long a slow one lets others wait for its next byte.
const DRIP: Duration = Duration::from_millis(5);

/// The addresses that warnings name.
static NAMED: OnceLock<Arc<Mutex<HashSet<String>>>> = OnceLock::new();

struct Log(Arc<Mutex<HashSet<String>>>);

impl Subscriber for Log {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        struct Address<'a>(&'a Mutex<HashSet<String>>);
        impl Visit for Address<'_> {
            fn record_str(&mut self, field: &Field, value: &str) {
                if field.name() == "address" {
                    self.0.lock().unwrap().insert(value.to_owned());
                }
            }
            fn record_debug(&mut self, _: &Field, _: &dyn std::fmt::Debug) {}
        }
        event.record(&mut Address(&self.0));
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

/// The addresses that were refused so far, of all tests of this file.
fn named() -> &'static Mutex<HashSet<String>> {
    NAMED.get_or_init(|| {
        let named = Arc::new(Mutex::default());
        tracing::subscriber::set_global_default(Log(Arc::clone(&named))).unwrap();
        named
    })
}

/// Makes a group of four over TCP while `strangers` do what they like, who get its addresses first, and all-reduces in it.
fn beset(strangers: impl FnOnce(&[SocketAddr])) {
    named();
    let start = Instant::now();
    let addresses = |peers: &[PeerAddress]| strangers(&peers.iter().map(|peer| peer.tcp).collect::<Vec<_>>());
    connected(Endpoint::tcp, 4, addresses, |group| {
        let (group, mut values) = (group.unwrap(), [1u32; 100]);
        group.all_reduce(&mut values, ReduceOp::Sum).unwrap();
        assert_eq!(values, [4; 100]);
    });
    assert!(start.elapsed() < PATIENCE, "the group took {:?}", start.elapsed());
}

/// That these were refused, and by their address, before long: who refuses may still be about to say so.
fn assert_logged(strangers: &[SocketAddr]) {
    let soon = Deadline::after(LIMIT);
    let unnamed = || strangers.iter().find(|who| !named().lock().unwrap().contains(&who.to_string()));
    while let Some(who) = unnamed() {
        assert!(!soon.expired(), "{who} isn't logged");
        std::thread::yield_now();
    }
}

/// A connection to each ear but the last rank's, which only dials, with what `act` does on it.
fn each(ears: &[SocketAddr], act: impl Fn(&mut TcpStream) -> IoResult<()>) -> Vec<TcpStream> {
    let dial = |ear: &SocketAddr| {
        let mut stream = TcpStream::connect(ear).unwrap();
        // A stranger that was thrown out already has been refused.
        let _ = act(&mut stream);
        stream
    };
    ears[..ears.len() - 1].iter().map(dial).collect()
}

/// What a connection to one of the ears is for, in the words of the protocol.
fn whom(ears: &[SocketAddr], stream: &TcpStream) -> String {
    let peer = stream.peer_addr().unwrap();
    format!("comm/{}", ears.iter().position(|ear| *ear == peer).unwrap())
}

#[test]
fn port_scanners_and_browsers_are_refused_and_logged_by_address() {
    let logged = Mutex::new(Vec::new());
    let held = Mutex::new(Vec::new());
    beset(|ears| {
        let words: [&[u8]; 4] = [
            b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
            b"SSH-2.0-scan\r\n",
            &[0; 64],
            b"phalanx2AAAAAAAA",
        ];
        for words in words {
            let strangers = each(ears, |stream| stream.write_all(&[words, &[b'x'; 64]].concat()));
            logged.lock().unwrap().extend(strangers.iter().map(|who| who.local_addr().unwrap()));
            held.lock().unwrap().extend(strangers);
        }
        // Gone before anybody asked.
        drop(each(ears, |_| Ok(())));
    });
    assert_logged(&logged.lock().unwrap());
}

#[test]
fn those_with_another_secret_or_generation_are_refused_and_logged_by_address() {
    let (logged, provers) = (Mutex::new(Vec::new()), Mutex::new(Vec::new()));
    // The group's are 7 and generation 3. Who has the secret and comes for a later generation is early, and waits.
    let comers = [([8; 32], 3, true), ([7; 32], 2, true), ([7; 32], 4, false), ([7; 32], u64::MAX, false)];
    beset(|ears| {
        for (secret, generation, is_refused) in comers {
            for mut stream in each(ears, |_| Ok(())) {
                if is_refused {
                    logged.lock().unwrap().push(stream.local_addr().unwrap());
                }
                let purpose = whom(ears, &stream);
                provers.lock().unwrap().push(std::thread::spawn(move || {
                    let hello = Hello { purpose, rank: Rank(3), generation: Generation(generation) };
                    let secret = Secret::from_bytes(secret);
                    let met = handshake(&mut stream, &secret, Side::Dialed, &hello, &Deadline::after(LIMIT));
                    met.is_err() || !is_refused
                }));
            }
        }
    });
    for prover in provers.into_inner().unwrap() {
        assert!(prover.join().unwrap(), "let in");
    }
    assert_logged(&logged.lock().unwrap());
}

#[test]
fn a_recording_of_a_rank_that_was_let_in_opens_nothing() {
    /// Keeps what it sends.
    struct Recorder(TcpStream, Vec<u8>);
    impl Read for Recorder {
        fn read(&mut self, into: &mut [u8]) -> IoResult<usize> {
            self.0.read(into)
        }
    }
    impl Write for Recorder {
        fn write(&mut self, from: &[u8]) -> IoResult<usize> {
            self.1.extend_from_slice(from);
            self.0.write(from)
        }
        fn flush(&mut self) -> IoResult<()> {
            Ok(())
        }
    }
    impl Socket for Recorder {
        fn limit(&self, limit: Duration) -> IoResult<()> {
            self.0.limit(limit)
        }
    }
    let ear = std::net::TcpListener::bind((HOST, 0)).unwrap();
    let address = ear.local_addr().unwrap();
    let secret = || Secret::from_bytes([7; 32]);
    let hello = |rank| Hello { purpose: "comm/0".into(), rank: Rank(rank), generation: Generation(3) };
    let recorded = std::thread::scope(|scope| {
        let dialer = scope.spawn(move || {
            let mut recorder = Recorder(TcpStream::connect(address).unwrap(), Vec::new());
            handshake(&mut recorder, &secret(), Side::Dialed, &hello(3), &Deadline::after(LIMIT)).unwrap();
            recorder.1
        });
        let mut accepted = ear.accept().unwrap().0;
        handshake(&mut accepted, &secret(), Side::Accepted, &hello(0), &Deadline::after(LIMIT)).unwrap();
        dialer.join().unwrap()
    });
    let logged = Mutex::new(Vec::new());
    let held = Mutex::new(Vec::new());
    beset(|ears| {
        let strangers = each(ears, |stream| stream.write_all(&recorded));
        logged.lock().unwrap().extend(strangers.iter().map(|who| who.local_addr().unwrap()));
        held.lock().unwrap().extend(strangers);
    });
    assert_logged(&logged.lock().unwrap());
}

#[test]
fn a_thousand_who_say_nothing_or_drip_keep_nobody_out() {
    let (_, most) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    setrlimit(Resource::RLIMIT_NOFILE, most, most).unwrap();
    std::thread::scope(|scope| {
        // Dropped at the end, however that comes.
        let mut until_over = Vec::new();
        beset(|ears| {
            let ears = &ears[..ears.len() - 1];
            let (some, first) = channel();
            for part in 0..10 {
                let (ears, some, (keep, over)) = (ears.to_vec(), some.clone(), channel::<()>());
                until_over.push(keep);
                scope.spawn(move || {
                    // While nobody accepts them, only so many find room to wait.
                    let dial = |i: usize| TcpStream::connect_timeout(&ears[i % ears.len()], SOON).ok();
                    let mut silent: Vec<TcpStream> = (0..FIRST).filter_map(|i| dial(i + part)).collect();
                    some.send(silent.len()).unwrap();
                    silent.extend((FIRST..SILENT / 10).filter_map(|i| dial(i + part)));
                    // A byte now and then of what might become a proof.
                    let mut drip = b"phalanx1".iter().cycle();
                    while over.recv_timeout(DRIP) == Err(RecvTimeoutError::Timeout) {
                        let byte = [*drip.next().unwrap()];
                        silent.iter_mut().for_each(|stream| drop(stream.write(&byte)));
                    }
                });
            }
            let there: usize = first.iter().take(10).sum();
            assert!(there > 0, "strangers came before the group");
        });
    });
}
