//! A coordinator whose links are encrypted: what goes over them in the clear goes over these, and who isn't is told so.

use phalanx_coord::{Coordinator, Fleet, Notice, Patience};
use phalanx_job::store::{Key, Store};
use phalanx_job::{AgentLink, Cause, Error, FromAgent, GoesOn, Link, Node, Terms, ToAgent, clock_ms};
use phalanx_wire::{Deadline, Generation, Pass, Rank, Secret};
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

const LIMIT: Duration = Duration::from_secs(20);
const GENERATION: Generation = Generation(0);

fn soon() -> Deadline {
    Deadline::after(LIMIT)
}

fn any_port() -> SocketAddr {
    (Ipv4Addr::LOCALHOST, 0).into()
}

fn encrypted() -> Pass {
    Pass::encrypted(Secret::from_bytes([7; 32])).unwrap()
}

#[test]
fn workers_meet_speak_to_the_store_and_rejoin() {
    let (sender, notices) = channel();
    let notify = move |_, notice| sender.send(notice).unwrap();
    let coordinator = Coordinator::serve(any_port(), encrypted(), GENERATION, 2, notify).unwrap();
    // Each has a key of its own.
    let connect = |rank| Link::connect(coordinator.address(), encrypted(), Rank(rank), GENERATION, soon());
    let rank = |rank: u32| {
        let mut link = connect(rank).unwrap();
        let (_, roster) = link.join(format!("address of {rank}"), soon()).unwrap();
        assert_eq!(roster.addresses, ["address of 0", "address of 1"]);
        link.goes_on(GoesOn::WithThoseLeft).unwrap();
        assert!(!link.is_change_due());
        let store = connect(rank).unwrap().open_store().unwrap();
        let own: Key = format!("rank/{rank}").parse().unwrap();
        let other: Key = format!("rank/{}", 1 - rank).parse().unwrap();
        // Longer than one record.
        store.set(&own, &vec![rank as u8; 100_000], None).unwrap();
        store.wait(std::slice::from_ref(&other), soon()).unwrap();
        assert_eq!(store.get(&other).unwrap().unwrap().value.len(), 100_000);
        let (_, roster) = link.rejoin(&[], soon()).unwrap();
        assert!(roster.generation > GENERATION);
        link
    };
    let links: Vec<Link> = std::thread::scope(|scope| {
        let ranks = [0, 1].map(|number| scope.spawn(move || rank(number)));
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    let mut links = links.into_iter();
    links.next().unwrap().fail("out of luck".into(), Cause::Own).unwrap();
    let failed = Notice::Failed { rank: Rank(0), message: "out of luck".into(), cause: Cause::Own };
    while notices.recv_timeout(LIMIT).unwrap() != failed {}
}

#[test]
fn agents_and_the_coordinator_hear_each_other() {
    let nobody = |_, notice| panic!("the host was told {notice:?}");
    let coordinator = Coordinator::serve(any_port(), encrypted(), GENERATION, 0, nobody).unwrap();
    let terms =
        Terms { least: 1, most: 1, spares: 0, max_restarts: 0, program: "p".into(), arguments: Vec::new() };
    coordinator.lead(Fleet::new(terms.clone(), Patience::default(), Instant::now(), clock_ms())).unwrap();
    let link = AgentLink::dial(coordinator.address(), encrypted(), soon(), LIMIT).unwrap();
    let address = link.local_ip().unwrap().to_string();
    let (host, role) = ("a".to_owned(), "default".to_owned());
    let (standby, leads) = (([127, 0, 0, 1], 1).into(), false);
    let node = Node {
        host,
        address,
        port: 1,
        standby,
        leads,
        workers: 1,
        role,
        node_rank: None,
        spare: false,
        terms,
        clock_ms: Some(clock_ms()),
    };
    link.say(&FromAgent::Join(node)).unwrap();
    let mut beats = 0;
    loop {
        match link.hear().unwrap() {
            ToAgent::Beat => {
                link.say(&FromAgent::Beat).unwrap();
                beats += 1;
                assert!(beats < 100);
            }
            ToAgent::Begin(_) => break,
            _ => {}
        }
    }
}

#[test]
fn who_has_no_tls_and_who_alone_has_it_are_told_at_once() {
    let clear = Pass::from(Secret::from_bytes([7; 32]));
    for (ours, theirs, want) in [
        (encrypted(), clear.clone(), "the other end wants TLS, which this one has not"),
        (clear, encrypted(), "the other end has no TLS, which this one wants"),
    ] {
        let coordinator = Coordinator::serve(any_port(), ours, GENERATION, 2, |_, _| {}).unwrap();
        let start = Instant::now();
        let worker =
            Link::connect(coordinator.address(), &theirs, Rank(0), GENERATION, soon()).err().unwrap();
        let agent = AgentLink::dial(coordinator.address(), &theirs, soon(), LIMIT).err().unwrap();
        let told = |error: Error| error.to_string();
        for error in [told(worker), told(agent)] {
            assert!(error.contains(want) && error.contains("--tls"), "{error}");
        }
        assert!(start.elapsed() < LIMIT / 4, "{:?}", start.elapsed());
    }
}
