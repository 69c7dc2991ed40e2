//! Agents at a real coordinator's socket: what they are told, and who is turned away.

use phalanx_coord::{Coordinator, Fleet, Notice, Patience};
use phalanx_job::{
    AgentLink, Cause, EndWhy, Error, FromAgent, Link, Mishap, Node, Seat, Terms, ToAgent, WorkerFailure,
    clock_ms,
};
use phalanx_wire::{Deadline, Generation, Hello, Rank, Secret, Side, handshake};
use std::io::Write;
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

const SILENCE: Duration = Duration::from_secs(2);

fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(20))
}

fn terms() -> Terms {
    Terms { least: 1, most: 2, spares: 0, max_restarts: 1, program: "p".into(), arguments: Vec::new() }
}

/// A coordinator that leads agents, and its secret.
fn coordinator() -> (Coordinator, Secret) {
    let secret = Secret::random().unwrap();
    let any_port = (Ipv4Addr::LOCALHOST, 0).into();
    let nobody = |_, notice| panic!("the host was told {notice:?}");
    let coordinator = Coordinator::serve(any_port, secret.clone(), Generation(0), 0, nobody).unwrap();
    // Nothing in these tests waits for a last call.
    let patience = Patience { last_call: Duration::from_secs(3600), ..Patience::default() };
    coordinator.lead(Fleet::new(terms(), patience, Instant::now(), clock_ms())).unwrap();
    (coordinator, secret)
}

fn dial(coordinator: &Coordinator, secret: &Secret) -> Result<AgentLink, Error> {
    AgentLink::dial(coordinator.address(), secret, soon(), SILENCE)
}

/// The link of a node with two workers.
fn join(coordinator: &Coordinator, secret: &Secret, host: &str) -> AgentLink {
    let link = dial(coordinator, secret).unwrap();
    let node = Node {
        host: host.into(),
        address: link.local_ip().unwrap().to_string(),
        port: 1,
        // Each has its own, by its name.
        standby: ([127, 0, 0, 1], host.as_bytes()[0].into()).into(),
        leads: false,
        workers: 2,
        role: "default".into(),
        node_rank: None,
        spare: false,
        terms: terms(),
        clock_ms: Some(clock_ms()),
    };
    link.say(&FromAgent::Join(node)).unwrap();
    link
}

/// What comes next but beats and words for people.
fn hear(link: &AgentLink) -> ToAgent {
    let until = soon();
    loop {
        assert!(!until.expired(), "beats alone are heard");
        match link.hear().unwrap() {
            ToAgent::Beat => link.say(&FromAgent::Beat).unwrap(),
            ToAgent::Told { .. } | ToAgent::Standing(_) => {}
            other => return other,
        }
    }
}

fn begin(link: &AgentLink) -> Seat {
    match hear(link) {
        ToAgent::Begin(seat) => seat,
        other => panic!("{other:?}"),
    }
}

fn failure(rank: u32) -> WorkerFailure {
    WorkerFailure {
        rank: Rank(rank),
        pid: 1,
        how: "exited with code 1".into(),
        idle_ms: 0,
        reported: None,
        last_lines: Vec::new(),
        for_good: false,
        consequence: false,
        part_lost: false,
        after_stop: false,
    }
}

#[test]
fn agents_are_told_what_to_start_what_to_stop_and_how_the_run_ended() {
    let (coordinator, secret) = coordinator();
    let [a, b] = ["a", "b"].map(|host| join(&coordinator, &secret, host));
    let seats = [begin(&a), begin(&b)];
    assert_eq!(
        seats.each_ref().map(|seat| (seat.node, seat.first_rank, seat.world_size)),
        [(0, 0, 4), (1, 2, 4)]
    );
    // What a worker says is told to the agent that started it.
    let generation = Generation(0);
    let mut worker = Link::connect(coordinator.address(), &secret, Rank(2), generation, soon()).unwrap();
    worker.fail("the data is gone".into(), Cause::Own).unwrap();
    let notice = Notice::Failed { rank: Rank(2), message: "the data is gone".into(), cause: Cause::Own };
    assert_eq!(hear(&b), ToAgent::Notice { generation, notice });
    b.say(&FromAgent::Failed { generation, failure: failure(2) }).unwrap();
    let why = "on node 1 (b): rank 2 exited with code 1".to_owned();
    assert_eq!(hear(&a), ToAgent::Stop { generation, why, signal: None });
    a.say(&FromAgent::Ended { generation, failure: None, drained: false, port: 7 }).unwrap();
    b.say(&FromAgent::Ended { generation, failure: Some(failure(2)), drained: false, port: 8 }).unwrap();
    for link in [&a, &b] {
        let seat = begin(link);
        assert_eq!((seat.generation, seat.restarts, seat.master.1), (Generation(1), 1, 7));
    }
    // Workers of the generation before come too late.
    assert!(Link::connect(coordinator.address(), &secret, Rank(0), generation, soon()).is_err());
    for link in [&a, &b] {
        link.say(&FromAgent::Ended { generation: Generation(1), failure: None, drained: false, port: 1 })
            .unwrap();
    }
    for link in [&a, &b] {
        let ToAgent::End(end) = hear(link) else { panic!("it isn't over") };
        assert_eq!((end.exit_code(), end.setbacks.len()), (0, 1));
        assert!(matches!(&end.setbacks[0].what, Mishap::Worker(failure) if failure.rank == Rank(2)));
    }
    drop((a, b));
    coordinator.see_agents_off(Duration::from_secs(20));
}

#[test]
fn an_agent_that_is_gone_or_silent_is_lost_and_the_other_told() {
    for is_silent in [false, true] {
        let (coordinator, secret) = coordinator();
        let [a, b] = ["a", "b"].map(|host| join(&coordinator, &secret, host));
        begin(&a);
        begin(&b);
        let start = Instant::now();
        let silent = Some(b).filter(|_| is_silent);
        let ToAgent::Stop { why, .. } = hear(&a) else { panic!("it goes on") };
        assert!(why.starts_with("on node 1 (b): lost: "), "{why}");
        assert!(start.elapsed() < Duration::from_secs(3), "{:?}", start.elapsed());
        a.say(&FromAgent::Ended { generation: Generation(0), failure: None, drained: false, port: 1 })
            .unwrap();
        assert_eq!(begin(&a).world_size, 2);
        a.say(&FromAgent::Quit { signal: 15 }).unwrap();
        assert!(matches!(hear(&a), ToAgent::Stop { signal: Some(15), .. }), "it is told when to stop");
        a.say(&FromAgent::Ended { generation: Generation(1), failure: None, drained: false, port: 1 })
            .unwrap();
        let ToAgent::End(end) = hear(&a) else { panic!("it isn't over") };
        assert_eq!(end.why, EndWhy::Asked { signal: 15 });
        drop(silent);
    }
}

#[test]
fn a_coordinator_that_is_gone_is_noticed() {
    let (coordinator, secret) = coordinator();
    let link = join(&coordinator, &secret, "a");
    drop(coordinator);
    let error = std::iter::repeat_with(|| link.hear()).find_map(Result::err).unwrap().to_string();
    assert!(error.contains("it closed the connection"), "{error}");
}

#[test]
fn who_is_no_agent_of_this_run_hears_why() {
    let (coordinator, secret) = coordinator();
    let message = |error: Option<Error>| error.unwrap().to_string();
    let check =
        |said: String, words: &[&str]| assert!(words.iter().all(|word| said.contains(word)), "{said}");
    let stranger = dial(&coordinator, &Secret::random().unwrap()).err();
    check(message(stranger), &["another secret, or is that of another run", "hint: ", "--rdzv-id"]);
    // Another version of the coordinator, as far as one can be had here.
    let other = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let place = other.local_addr().unwrap();
    let theirs = secret.clone();
    let served = std::thread::spawn(move || {
        let (mut stream, _) = other.accept().unwrap();
        let hello = Hello { purpose: "agent 99.0".into(), rank: Rank(0), generation: Generation(0) };
        handshake(&mut stream, &theirs, Side::Accepted, &hello, &soon()).is_err()
    });
    let said = message(AgentLink::dial(place, &secret, soon(), SILENCE).err());
    check(said, &["speaks `agent 99.0`", "same version of phalanx on all nodes"]);
    assert!(served.join().unwrap());
    // The other way round.
    let mut stream = TcpStream::connect(coordinator.address()).unwrap();
    let hello = Hello { purpose: "agent 99.0".into(), rank: Rank(0), generation: Generation(0) };
    let refused = handshake(&mut stream, &secret, Side::Dialed, &hello, &soon());
    assert!(refused.unwrap_err().to_string().contains("wants agent 0."));
    // Not phalanx at all.
    let web = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let place = web.local_addr().unwrap();
    let answer = b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\nContent-Length: 0\r\n\r\n";
    let served = std::thread::spawn(move || web.accept().unwrap().0.write_all(answer).unwrap());
    let said = message(AgentLink::dial(place, &secret, soon(), SILENCE).err());
    check(
        said,
        &[
            &format!("port {} of 127.0.0.1 is in use by something that isn't phalanx", place.port()),
            "ss -ltnp",
        ],
    );
    served.join().unwrap();
    // A second run under the same name.
    let link = dial(&coordinator, &secret).unwrap();
    let first = join(&coordinator, &secret, "a");
    let node = Node {
        host: "b".into(),
        address: "b".into(),
        port: 1,
        standby: ([127, 0, 0, 1], b'b'.into()).into(),
        leads: false,
        workers: 1,
        role: "default".into(),
        node_rank: None,
        spare: false,
        terms: Terms { program: "q".into(), ..terms() },
        clock_ms: Some(clock_ms()),
    };
    link.say(&FromAgent::Join(node)).unwrap();
    let ToAgent::Refused { reason } = hear(&link) else { panic!("it was taken") };
    check(reason, &["program is p, not q", "another --rdzv-id"]);
    drop(first);
}
