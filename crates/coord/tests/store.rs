//! The coordinator's store over real sockets, with clients that break the rules.

mod conformance;

use conformance::{LIMIT, folder, keeps_its_promises, key, now, soon};
use phalanx_coord::Coordinator;
use phalanx_job::Link;
use phalanx_job::store::{Change, LinkStore, Refusal, Store, StoreError, Watch};
use phalanx_wire::{Deadline, Generation, Hello, Rank, Secret, Side, handshake, read_frame, write_frame};
use std::net::TcpStream;

const GENERATION: Generation = Generation(3);

fn coordinator(secret: &Secret) -> Coordinator {
    Coordinator::serve("127.0.0.1:0".parse().unwrap(), secret.clone(), GENERATION, 2, |_, _| {}).unwrap()
}

fn connect(coordinator: &Coordinator, secret: &Secret) -> LinkStore {
    let link = Link::connect(coordinator.address(), secret, Rank(1), GENERATION, soon()).unwrap();
    link.open_store().unwrap()
}

/// A proven connection to the store, to say on it what a [`LinkStore`] wouldn't.
fn raw(coordinator: &Coordinator, secret: &Secret) -> TcpStream {
    let mut stream = TcpStream::connect(coordinator.address()).unwrap();
    let hello = Hello { purpose: Link::purpose().into(), rank: Rank(0), generation: GENERATION };
    handshake(&mut stream, secret, Side::Dialed, &hello, &soon()).unwrap();
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    write_frame(&mut stream, br#"{"say":"open_store"}"#).unwrap();
    assert_eq!(read_frame(&mut stream, 100).unwrap(), br#"{"say":"store_open"}"#);
    stream
}

#[test]
fn the_coordinators_store_keeps_its_promises() {
    let secret = Secret::random().unwrap();
    let coordinator = coordinator(&secret);
    keeps_its_promises(|| connect(&coordinator, &secret));
}

#[test]
fn a_client_that_speaks_nonsense_is_hung_up_on_and_the_others_go_on() {
    let secret = Secret::random().unwrap();
    let coordinator = coordinator(&secret);
    let store = connect(&coordinator, &secret);
    let long = [0xff; 4];
    let frames: [&[u8]; 4] =
        [b"", b"\xff\x00", br#"{"id":1,"ask":{"get":{"key":"/"}}}"#, br#"{"id":1,"ask":{"eval":"1"}}"#];
    for frame in frames {
        let mut mad = raw(&coordinator, &secret);
        write_frame(&mut mad, frame).unwrap();
        assert!(read_frame(&mut mad, 100).is_err(), "{}", frame.escape_ascii());
    }
    let mut mad = raw(&coordinator, &secret);
    std::io::Write::write_all(&mut mad, &long).unwrap();
    assert!(read_frame(&mut mad, 100).is_err(), "a frame of 4 GiB");
    // One that dies in the middle of a frame.
    std::io::Write::write_all(&mut raw(&coordinator, &secret), &[9, 0, 0, 0, b'{']).unwrap();
    assert_eq!(store.add(&key("n"), 1).unwrap(), 1);
}

#[test]
fn a_client_that_reads_no_answers_is_asked_for_no_more_questions() {
    let secret = Secret::random().unwrap();
    let coordinator = coordinator(&secret);
    let store = connect(&coordinator, &secret);
    store.set(&key("long"), &vec![1; 1 << 20], None).unwrap();
    let mut deaf = raw(&coordinator, &secret);
    deaf.set_write_timeout(Some(std::time::Duration::from_millis(100))).unwrap();
    // Each of these questions would take more than a MiB to answer: 256 GiB, if the store kept the answers.
    let asked = (0..1 << 18).take_while(|id| {
        let ask = format!(r#"{{"id":{id},"ask":{{"get":{{"key":"long"}}}}}}"#);
        write_frame(&mut deaf, ask.as_bytes()).is_ok()
    });
    assert!(asked.count() < 1 << 18);
    let start = soon();
    assert_eq!(store.get(&key("long")).unwrap().unwrap().value.len(), 1 << 20);
    assert!(start.waited() < LIMIT / 4);
}

#[test]
fn the_keys_of_a_client_that_dies_are_gone_at_once() {
    let secret = Secret::random().unwrap();
    let coordinator = coordinator(&secret);
    let (store, mut dying) = (connect(&coordinator, &secret), raw(&coordinator, &secret));
    let mut say = |text: &str, want: &str| {
        write_frame(&mut dying, text.as_bytes()).unwrap();
        let answer = String::from_utf8(read_frame(&mut dying, 200).unwrap()).unwrap();
        assert!(answer.contains(want), "{answer}");
    };
    say(r#"{"id":1,"ask":{"grant":{"time_to_live_ms":86400000}}}"#, r#"{"granted":1}"#);
    say(r#"{"id":2,"ask":{"set":{"key":"alive/0","value":"MQ==","lease":1}}}"#, "done");
    let listing = store.list(&folder("alive/")).unwrap();
    assert_eq!(listing.keys.len(), 1);
    drop(dying);
    let start = soon();
    let gone = Watch::new(&store, folder("alive/"), listing.revision.next()).next(soon()).unwrap().unwrap();
    assert_eq!(gone.change, Change::Gone { keys: vec![key("alive/0")] });
    assert!(start.waited() < LIMIT / 4);
}

#[test]
fn the_end_of_the_coordinator_ends_every_wait_and_another_one_knows_no_old_revision() {
    let secret = Secret::random().unwrap();
    let first = coordinator(&secret);
    let store = connect(&first, &secret);
    let old = store.set(&key("a"), b"", None).unwrap();
    let mut parked = raw(&first, &secret);
    write_frame(&mut parked, br#"{"id":1,"ask":{"wait":{"keys":["never"],"limit_ms":86400000}}}"#).unwrap();
    write_frame(&mut parked, br#"{"id":2,"ask":{"get":{"key":"never"}}}"#).unwrap();
    assert_eq!(read_frame(&mut parked, 100).unwrap(), br#"{"id":2,"answer":{"entry":null}}"#);
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| store.wait(&[key("never")], Deadline::after(LIMIT * 100)));
        let watching = scope.spawn(|| store.poll(&folder("f/"), old.next(), Deadline::after(LIMIT * 100)));
        let start = soon();
        drop(first);
        assert!(read_frame(&mut parked, 100).is_err() && start.waited() < LIMIT / 4);
        for error in [waiting.join().unwrap().unwrap_err(), watching.join().unwrap().unwrap_err()] {
            assert!(matches!(error, StoreError::Broken { .. }), "{error}");
        }
    });
    let error = store.get(&key("a")).unwrap_err().to_string();
    assert!(error.contains("get a: it closed the connection; its leases have ended"), "{error}");
    let second = coordinator(&secret);
    let store = connect(&second, &secret);
    assert_eq!(store.get(&key("a")).unwrap(), None);
    let error = Watch::new(&store, folder("f/"), old.next()).next(now()).unwrap_err();
    assert!(matches!(error.refusal(), Some(Refusal::Lagged { .. })), "{error}");
}

#[test]
fn a_worker_that_has_joined_connects_once_more_for_the_store() {
    let secret = Secret::random().unwrap();
    let coordinator = coordinator(&secret);
    let mut link = Link::connect(coordinator.address(), &secret, Rank(0), GENERATION, soon()).unwrap();
    link.join("a".into(), now()).unwrap_err();
    let error = link.open_store().err().unwrap().to_string();
    assert!(error.contains("a connection that has joined can't be one to the store"), "{error}");
    assert_eq!(connect(&coordinator, &secret).add(&key("n"), 1).unwrap(), 1);
}
