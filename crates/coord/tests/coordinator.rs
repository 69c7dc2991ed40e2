//! Workers, strangers and a coordinator over real sockets.

use phalanx_coord::{Coordinator, Notice, rendezvous};
use phalanx_job::store::Store;
use phalanx_job::{Cause, Error, GoesOn, Link, Roster, WorkerEnv};
use phalanx_wire::{Deadline, Generation, HandshakeError, Rank, Secret};
use std::io::Write;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(20);

fn soon() -> Deadline {
    Deadline::after(LIMIT)
}

fn local() -> SocketAddr {
    "127.0.0.1:0".parse().unwrap()
}

/// A coordinator of so many workers, its secret, and what it gives notice of.
fn serve(generation: u64, workers: usize) -> (Secret, Coordinator, Receiver<Notice>) {
    let secret = Secret::random().unwrap();
    let (sender, notices) = channel();
    let notify = move |_, notice| sender.send(notice).unwrap();
    let coordinator =
        Coordinator::serve(local(), secret.clone(), Generation(generation), workers, notify).unwrap();
    (secret, coordinator, notices)
}

/// That a membership of workers with these numbers begins.
fn begun(generation: u64, workers: &[u32]) -> Notice {
    Notice::Begun { generation: Generation(generation), workers: workers.iter().copied().map(Rank).collect() }
}

#[test]
fn all_ranks_get_the_roster_and_a_failure_is_told() {
    let (secret, coordinator, notices) = serve(2, 3);
    // A port scan, a silent one and a babbler, all before the ranks.
    drop(TcpStream::connect(coordinator.address()).unwrap());
    let _silent = TcpStream::connect(coordinator.address()).unwrap();
    TcpStream::connect(coordinator.address()).unwrap().write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
    std::thread::scope(|scope| {
        for rank in 0..3 {
            let (secret, address) = (&secret, coordinator.address());
            scope.spawn(move || {
                let mut link = Link::connect(address, secret, Rank(rank), Generation(2), soon()).unwrap();
                let (given, roster) = link.join(format!("address of {rank}"), soon()).unwrap();
                assert_eq!(given, Rank(rank));
                assert_eq!(roster.addresses, ["address of 0", "address of 1", "address of 2"]);
                if rank == 1 {
                    link.fail("out of luck".into(), Cause::Own).unwrap();
                }
            });
        }
    });
    assert_eq!(notices.recv_timeout(LIMIT).unwrap(), begun(2, &[0, 1, 2]));
    let failed = Notice::Failed { rank: Rank(1), message: "out of luck".into(), cause: Cause::Own };
    assert_eq!(notices.recv_timeout(LIMIT).unwrap(), failed);
}

#[test]
fn a_machine_with_several_addresses_is_found_at_the_one_that_answers() {
    let (secret, coordinator, _notices) = serve(0, 1);
    let nobody = TcpListener::bind(local()).unwrap().local_addr().unwrap();
    // Nothing is ever sent there, and nothing comes from there.
    let nowhere = "[100::7]:9".parse().unwrap();
    let places = [nobody, nowhere, coordinator.address()];
    let link = Link::connect_following(&places, &secret, Rank(0), Generation(0), None, soon());
    assert_eq!(link.unwrap().join("here".into(), soon()).unwrap().0, Rank(0));
}

#[test]
fn members_that_go_on_in_place_leave_together_and_let_others_in() {
    let (secret, coordinator, notices) = serve(0, 3);
    let connect =
        |rank| Link::connect(coordinator.address(), &secret, Rank(rank), Generation(0), soon()).unwrap();
    let next = || notices.recv_timeout(LIMIT).unwrap();
    /// All of them at once.
    fn all(links: Vec<&mut Link>, act: impl Fn(&mut Link) -> (Rank, Roster) + Sync) -> Vec<(Rank, Roster)> {
        let act = &act;
        std::thread::scope(|scope| {
            let threads: Vec<_> = links.into_iter().map(|link| scope.spawn(move || act(link))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }
    let mut links = [0, 1, 2].map(connect);
    all(links.iter_mut().collect(), |link| link.join("old".into(), soon()).unwrap());
    assert_eq!(next(), begun(0, &[0, 1, 2]));
    links.iter_mut().for_each(|link| link.goes_on(GoesOn::WithThoseLeft).unwrap());
    let [mut a, b, c] = links;
    assert_eq!(next(), Notice::InPlace(true));
    // One ends, another gives no sign of life: the host is told, and ends it.
    drop(b);
    std::thread::scope(|scope| {
        let rejoin = scope.spawn(|| a.rejoin(&[Rank(2)], soon()).unwrap());
        assert_eq!(next(), Notice::Silent { rank: Rank(2) });
        drop(c);
        let (rank, roster) = rejoin.join().unwrap();
        assert_eq!((rank, roster.generation, roster.addresses.len()), (Rank(0), Generation(1), 1));
    });
    assert_eq!(next(), begun(1, &[0]));
    assert!(!a.is_change_due());
    let mut newcomer = connect(2);
    std::thread::scope(|scope| {
        let joins = scope.spawn(|| newcomer.join("new".into(), soon()).unwrap());
        let start = soon();
        while !a.is_change_due() {
            assert!(!start.expired());
            std::thread::yield_now();
        }
        assert!(!a.is_loss_told(), "all of its membership are there");
        let (rank, roster) = a.rejoin(&[], soon()).unwrap();
        assert_eq!((rank, &roster.addresses[..]), (Rank(0), &["old".to_owned(), "new".to_owned()][..]));
        assert_eq!(joins.join().unwrap(), (Rank(1), roster));
    });
    assert_eq!(next(), begun(2, &[0, 2]));
    assert!(!a.is_change_due() && !a.is_loss_told(), "it has heard of them");
    drop(newcomer);
    let start = soon();
    while !a.is_loss_told() {
        assert!(!start.expired());
        std::thread::yield_now();
    }
    assert!(a.is_change_due());
    assert_eq!(a.rejoin(&[], soon()).unwrap().1.addresses.len(), 1);
    assert!(!a.is_loss_told());
}

#[test]
fn a_member_that_cannot_go_on_without_another_is_told_to_have_followed_it() {
    let (secret, coordinator, notices) = serve(0, 2);
    let connect =
        |rank| Link::connect(coordinator.address(), &secret, Rank(rank), Generation(0), soon()).unwrap();
    let [mut a, mut b] = [0, 1].map(connect);
    std::thread::scope(|scope| {
        scope.spawn(|| a.join("first".into(), soon()).unwrap());
        b.join("second".into(), soon()).unwrap();
    });
    assert_eq!(notices.recv_timeout(LIMIT).unwrap(), begun(0, &[0, 1]));
    // The first is there still, and has said nothing of going on.
    b.goes_on(GoesOn::WithThoseLeft).unwrap();
    let why = "the ranks that are left can't go on in place, so that all begin again";
    let error = b.rejoin(&[], soon()).unwrap_err().to_string();
    assert!(error.contains(why), "{error}");
    let failed = Notice::Failed { rank: Rank(1), message: why.into(), cause: Cause::Refused };
    assert_eq!(notices.recv_timeout(LIMIT).unwrap(), failed);
}

#[test]
fn a_generation_that_has_begun_has_a_roster_of_its_own_and_the_store_of_the_one_before() {
    let secret = Secret::random().unwrap();
    let (sender, notices) = channel();
    let notify = move |generation, notice| sender.send((generation, notice)).unwrap();
    let coordinator = Coordinator::serve(local(), secret.clone(), Generation(0), 2, notify).unwrap();
    let connect = |rank, generation| {
        Link::connect(coordinator.address(), &secret, Rank(rank), Generation(generation), soon())
    };
    let store = connect(0, 0).unwrap().open_store().unwrap();
    store.add(&"visits".parse().unwrap(), 1).unwrap();
    let mut late = connect(0, 0).unwrap();
    let mut waiting = connect(1, 0).unwrap();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(move || waiting.join("old".into(), soon()));
        coordinator.begin(Generation(1), 1);
        assert!(
            waiting.join().unwrap().is_err(),
            "who waits for the old roster is let go, and who comes for it refused"
        );
    });
    let error = late.join("late".into(), soon()).unwrap_err().to_string();
    assert!(error.contains("generation 0 is over, 1 has begun"), "{error}");
    assert!(connect(0, 0).is_err());
    let mut link = connect(0, 1).unwrap();
    let (_, roster) = link.join("new".into(), soon()).unwrap();
    assert_eq!((roster.generation, roster.addresses), (Generation(1), vec!["new".to_owned()]));
    let store = connect(0, 1).unwrap().open_store().unwrap();
    assert_eq!(store.add(&"visits".parse().unwrap(), 1).unwrap(), 2);
    assert_eq!(notices.recv_timeout(LIMIT).unwrap(), (Generation(1), begun(1, &[0])));
}

#[test]
fn a_wrong_secret_a_stale_generation_and_a_second_rank_0_are_refused() {
    let secret = Secret::random().unwrap();
    let coordinator = Coordinator::serve(local(), secret.clone(), Generation(2), 2, |_, _| {}).unwrap();
    let connect = |secret: &Secret, generation| {
        Link::connect(coordinator.address(), secret, Rank(0), Generation(generation), soon())
    };
    let wrong = connect(&Secret::random().unwrap(), 2).err().unwrap();
    assert!(matches!(wrong, Error::Handshake { source: HandshakeError::WrongSecret, .. }), "{wrong}");
    let stale = connect(&secret, 1).err().unwrap();
    assert!(matches!(stale, Error::Handshake { source: HandshakeError::Disagreement { .. }, .. }), "{stale}");
    let mut first = connect(&secret, 2).unwrap();
    let mut second = connect(&secret, 2).unwrap();
    let mut last = Link::connect(coordinator.address(), &secret, Rank(1), Generation(2), soon()).unwrap();
    std::thread::scope(|scope| {
        let joins = [
            scope.spawn(move || first.join("a".into(), soon())),
            scope.spawn(move || second.join("a".into(), soon())),
        ];
        let refused = || joins.iter().position(|join| join.is_finished());
        let start = soon();
        while refused().is_none() {
            assert!(!start.expired());
            std::thread::yield_now();
        }
        // Whichever of the two came first was taken; the other is told why it wasn't.
        assert_eq!(last.join("b".into(), soon()).unwrap().1.addresses, ["a", "b"]);
        let [a, b] = joins.map(|join| join.join().unwrap());
        let error = a.and(b).unwrap_err().to_string();
        assert!(error.contains("refused this worker: rank 0 has joined already"), "{error}");
    });
}

#[test]
fn those_who_wait_are_told_who_is_missing_and_may_come_again() {
    let secret = Secret::random().unwrap();
    let coordinator = Coordinator::serve(local(), secret.clone(), Generation(0), 3, |_, _| {}).unwrap();
    let connect =
        |rank| Link::connect(coordinator.address(), &secret, Rank(rank), Generation(0), soon()).unwrap();
    let mut link = connect(1);
    let message = link.join("b".into(), Deadline::after(Duration::from_millis(50))).unwrap_err().to_string();
    assert_eq!(message, "after 0 s ranks are still missing: 0, 2");
    drop(link);
    std::thread::scope(|scope| {
        for rank in [0, 2] {
            let mut link = connect(rank);
            scope.spawn(move || link.join("here".into(), soon()).unwrap());
        }
        // Its place is free as soon as the coordinator has noticed that it left.
        let start = soon();
        let (_, roster) = loop {
            match connect(1).join("again".into(), soon()) {
                Ok(roster) => break roster,
                Err(error) => {
                    assert!(!start.expired() && error.to_string().contains("joined already"), "{error}")
                }
            }
        };
        assert_eq!(roster.addresses, ["here", "again", "here"]);
    });
}

#[test]
fn any_number_of_strangers_keeps_no_rank_out() {
    let secret = Secret::random().unwrap();
    let coordinator = Coordinator::serve(local(), secret.clone(), Generation(0), 1, |_, _| {}).unwrap();
    let silent: Vec<_> = (0..200).map(|_| TcpStream::connect(coordinator.address()).unwrap()).collect();
    let start = soon();
    let mut link = Link::connect(coordinator.address(), &secret, Rank(0), Generation(0), soon()).unwrap();
    assert_eq!(link.join("a".into(), soon()).unwrap().1.addresses, ["a"]);
    assert!(start.waited() < LIMIT / 4);
    drop(silent);
}

#[test]
fn without_an_agent_rank_0_hosts_the_meeting() {
    let folder = std::env::temp_dir().join(format!("phalanx-coord-test-{}", std::process::id()));
    let port = TcpListener::bind(local()).unwrap().local_addr().unwrap().port();
    std::thread::scope(|scope| {
        for rank in [1, 0] {
            let (folder, port) = (&folder, port);
            scope.spawn(move || {
                let variables = |name: &str| match name {
                    "RANK" => Some(rank.to_string()),
                    "WORLD_SIZE" => Some("2".into()),
                    "MASTER_ADDR" => Some("127.0.0.1".into()),
                    "MASTER_PORT" => Some(port.to_string()),
                    "HOME" => Some(folder.to_str().unwrap().into()),
                    _ => None,
                };
                let env = WorkerEnv::from_variables(variables).unwrap().unwrap();
                let meeting = rendezvous(&env, soon(), |ip| Ok(format!("{ip} {rank}"))).unwrap();
                assert_eq!(meeting.roster.addresses, ["127.0.0.1 0", "127.0.0.1 1"]);
                assert_eq!(meeting.host.is_some(), rank == 0);
            });
        }
    });
    std::fs::remove_dir_all(folder).unwrap();
}
