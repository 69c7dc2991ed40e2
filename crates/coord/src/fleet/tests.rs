//! Runs of nodes, told event by event.

mod world;

use super::*;
use phalanx_job::{Return, Seat};
use phalanx_wire::Rank;

const LAST_CALL: u64 = 3000;
const JOIN: u64 = 60_000;
const SILENCE: u64 = 2000;
const ANEW: u64 = 15_000;
const PATIENCE: Patience = Patience {
    last_call: Duration::from_millis(LAST_CALL),
    join: Duration::from_millis(JOIN),
    silence: Duration::from_millis(SILENCE),
    anew: None,
};

fn terms(least: u32, most: u32, max_restarts: u32) -> Terms {
    Terms {
        least,
        most,
        spares: 0,
        max_restarts,
        program: "train.py".into(),
        arguments: vec!["--lr".into(), "1".into()],
    }
}

fn node(host: &str, workers: u32, terms: &Terms) -> Node {
    Node {
        host: host.into(),
        address: format!("{host}.lan"),
        port: 1000 + workers as u16,
        // Each has its own, by its name.
        standby: ([127, 0, 0, 1], host.trim_start_matches('n').parse().unwrap_or(1)).into(),
        leads: false,
        workers,
        role: "default".into(),
        node_rank: None,
        spare: false,
        terms: terms.clone(),
        clock_ms: Some(0),
    }
}

fn failure(rank: u32) -> WorkerFailure {
    WorkerFailure {
        rank: Rank(rank),
        pid: 7,
        how: "exited with code 3".into(),
        idle_ms: 0,
        reported: None,
        last_lines: Vec::new(),
        for_good: false,
        consequence: false,
        part_lost: false,
        after_stop: false,
    }
}

/// A fleet whose clock is moved by hand. Its nodes beat as long as they are there.
struct Play {
    fleet: Fleet,
    start: Instant,
    now: Duration,
    terms: Terms,
    beating: Vec<NodeId>,
}

impl Play {
    fn new(least: u32, most: u32, max_restarts: u32) -> Play {
        Play::with_spares(least, most, 0, max_restarts)
    }

    fn with_spares(least: u32, most: u32, spares: u32, max_restarts: u32) -> Play {
        let (terms, start) = (Terms { spares, ..terms(least, most, max_restarts) }, Instant::now());
        let fleet = Fleet::new(terms.clone(), PATIENCE, start, 0);
        Play { fleet, start, now: Duration::ZERO, terms, beating: Vec::new() }
    }

    fn at(&self) -> Instant {
        self.start + self.now
    }

    fn heed(&mut self, event: Event) -> Vec<Order> {
        let orders = self.fleet.heed(self.at(), event);
        self.beating.retain(|id| {
            !orders.iter().any(|order| matches!(order, Order::Refuse(of, _) | Order::GoneOn(of) if of == id))
        });
        orders
    }

    fn come(&mut self, id: u64, workers: u32) -> Vec<Order> {
        let node = node(&format!("n{id}"), workers, &self.terms);
        self.come_as(id, node)
    }

    fn come_as(&mut self, id: u64, node: Node) -> Vec<Order> {
        self.beating.push(NodeId(id));
        self.heed(Event::Said(NodeId(id), FromAgent::Join(node)))
    }

    fn said(&mut self, id: u64, said: FromAgent) -> Vec<Order> {
        self.heed(Event::Said(NodeId(id), said))
    }

    fn failed(&mut self, id: u64, generation: u64, rank: u32) -> Vec<Order> {
        self.said(id, FromAgent::Failed { generation: Generation(generation), failure: failure(rank) })
    }

    fn ended(&mut self, id: u64, generation: u64, failure: Option<WorkerFailure>) -> Vec<Order> {
        self.said(
            id,
            FromAgent::Ended {
                generation: Generation(generation),
                failure,
                drained: false,
                port: 2000 + id as u16,
            },
        )
    }

    fn gone(&mut self, id: u64) -> Vec<Order> {
        self.beating.retain(|beating| beating.0 != id);
        self.heed(Event::Gone(NodeId(id), "its connection ended".into()))
    }

    /// Lets time pass, as far as until there are orders.
    fn pass(&mut self, ms: u64) -> Vec<Order> {
        let until = self.now + Duration::from_millis(ms);
        while self.now < until {
            self.now = (self.now + Duration::from_millis(200)).min(until);
            let mut orders = Vec::new();
            for id in self.beating.clone() {
                orders.extend(self.said(id.0, FromAgent::Beat));
            }
            orders.extend(self.heed(Event::Tick));
            if !orders.is_empty() {
                return orders;
            }
        }
        Vec::new()
    }
}

/// The numbers and first ranks of the nodes in the generation that begins with these orders.
fn begun(orders: &[Order], generation: u64) -> Vec<(u64, u32, u32)> {
    let seats = orders.iter().find_map(|order| match order {
        Order::Begin(begun, seats) if begun.0 == generation => Some(seats),
        _ => None,
    });
    let seats = seats.unwrap_or_else(|| panic!("generation {generation} doesn't begin: {orders:?}"));
    seats.iter().map(|(id, seat)| (id.0, seat.node, seat.first_rank)).collect()
}

/// Whom these orders have stop, and why.
fn stopped(orders: &[Order]) -> (Vec<u64>, String) {
    let stop = orders.iter().find_map(|order| match order {
        Order::Stop(_, nodes, why) => Some((nodes.iter().map(|id| id.0).collect(), why.to_string())),
        _ => None,
    });
    stop.unwrap_or_else(|| panic!("nobody stops: {orders:?}"))
}

fn end(orders: &[Order]) -> EndWhy {
    match orders.last() {
        Some(Order::End(_, end)) => end.why.clone(),
        _ => panic!("it isn't over: {orders:?}"),
    }
}

fn refused(orders: &[Order]) -> &str {
    match orders {
        [Order::Refuse(_, reason)] => reason,
        // Those that are there hear of it, too.
        [Order::Warn(told), Order::Refuse(_, reason)] if told.ends_with(reason) => reason,
        _ => panic!("not refused: {orders:?}"),
    }
}

#[test]
fn a_run_of_a_fixed_number_begins_with_the_last_node_and_ends_with_the_last_worker() {
    let mut play = Play::new(2, 2, 0);
    let waiting = play.come(1, 3);
    assert_eq!(
        waiting.iter().find_map(|order| if let Order::Wait(wait) = order {
            Some(wait.to_string())
        } else {
            None
        }),
        Some("nodes here: 1 of 2 (n1); giving up in 60 s".into())
    );
    let orders = play.come(2, 2);
    assert_eq!(begun(&orders, 0), [(1, 0, 0), (2, 1, 3)]);
    let Some(Order::Begin(_, seats)) = orders.last() else { panic!("{orders:?}") };
    let seat = Seat {
        generation: Generation(0),
        restarts: 0,
        node: 1,
        nodes: 2,
        first_rank: 3,
        world_size: 5,
        first_role_rank: 3,
        role_world_size: 5,
        master: ("n1.lan".into(), 1003),
    };
    assert_eq!(seats[1].1, seat);
    assert_eq!([0, 2, 3, 4].map(|rank| play.fleet.node_of(rank).unwrap().0), [1, 1, 2, 2]);
    assert_eq!(play.fleet.node_of(5), None);
    assert_eq!(play.ended(2, 0, None), []);
    assert_eq!(play.pass(600_000), [], "the others may take as long as they like");
    assert_eq!(end(&play.ended(1, 0, None)), EndWhy::Done);
    assert_eq!(refused(&play.come(3, 1)), "the run is over");
}

#[test]
fn an_elastic_run_waits_for_a_last_call_once_the_least_number_is_there() {
    let mut play = Play::new(2, 3, 0);
    play.come(1, 1);
    assert_eq!(play.pass(10_000), []);
    play.come(2, 1);
    assert_eq!(play.pass(LAST_CALL - 200), []);
    assert_eq!(begun(&play.pass(200), 0), [(1, 0, 0), (2, 1, 1)]);
    let mut play = Play::new(1, 2, 0);
    play.come(1, 1);
    assert_eq!(begun(&play.come(2, 1), 0), [(1, 0, 0), (2, 1, 1)], "nobody else can come");
}

#[test]
fn too_few_nodes_for_too_long_end_the_run() {
    let mut play = Play::new(2, 2, 0);
    play.come(1, 1);
    assert_eq!(end(&play.pass(JOIN)), EndWhy::TooFew { here: 1, seconds: 60 });
}

#[test]
fn a_failed_worker_stops_all_nodes_and_costs_a_restart() {
    let mut play = Play::new(2, 2, 1);
    play.come(1, 2);
    play.come(2, 2);
    let orders = play.failed(2, 0, 3);
    assert_eq!(stopped(&orders), (vec![1], "on node 1 (n2): rank 3 exited with code 3".into()));
    assert_eq!(play.ended(1, 0, None), []);
    let orders = play.ended(2, 0, Some(failure(3)));
    assert_eq!(begun(&orders, 1), [(1, 0, 0), (2, 1, 2)]);
    let Some(Order::Begin(_, seats)) = orders.last() else { panic!("{orders:?}") };
    assert_eq!((seats[0].1.restarts, seats[0].1.master.1), (1, 2001));
    // What is said of the generation before is late.
    assert_eq!(play.failed(1, 0, 0), []);
    play.failed(1, 1, 0);
    play.ended(1, 1, Some(failure(0)));
    let orders = play.ended(2, 1, None);
    let EndWhy::Failed(setback) = end(&orders) else { panic!("{orders:?}") };
    assert_eq!((setback.generation, setback.node, setback.host.as_str()), (Generation(1), 0, "n1"));
    let Some(Order::End(nodes, end)) = orders.last() else { unreachable!() };
    assert_eq!((nodes.len(), end.setbacks.len(), end.exit_code()), (2, 1, 1));
}

#[test]
fn the_first_failure_of_its_own_is_to_blame_wherever_it_was() {
    let check = |first: WorkerFailure, second: WorkerFailure, want: u32| {
        let mut play = Play::new(2, 2, 0);
        play.come(1, 1);
        play.come(2, 1);
        play.said(1, FromAgent::Failed { generation: Generation(0), failure: first.clone() });
        play.ended(1, 0, Some(first));
        let EndWhy::Failed(setback) = end(&play.ended(2, 0, Some(second))) else { panic!() };
        assert_eq!(setback.node, want);
    };
    let follows = |rank| WorkerFailure { consequence: true, ..failure(rank) };
    let late = |rank| WorkerFailure { after_stop: true, ..failure(rank) };
    check(failure(0), failure(1), 0);
    check(follows(0), failure(1), 1);
    check(follows(0), late(1), 1);
    check(failure(0), late(1), 0);
    check(follows(0), follows(1), 0);
}

#[test]
fn the_run_goes_on_without_a_lost_node_if_enough_are_left() {
    // Whether its connection ends or it is silent.
    for is_silent in [false, true] {
        let mut play = Play::new(2, 3, 0);
        (1..=3).for_each(|id| drop(play.come(id, id as u32)));
        let (orders, how) = if is_silent {
            play.beating.retain(|id| id.0 != 1);
            (play.pass(SILENCE), "gave no sign of life for 2.0 s")
        } else {
            (play.gone(1), "its connection ended")
        };
        assert_eq!(stopped(&orders), (vec![2, 3], format!("on node 0 (n1): lost: {how}")));
        assert_eq!(orders.contains(&Order::Drop(NodeId(1))), is_silent);
        // Those who survive may fail over it before they are stopped, which is no failure of theirs.
        play.failed(2, 0, 1);
        play.ended(2, 0, Some(failure(1)));
        // The second node keeps its number, and the third takes the first one's.
        assert_eq!(begun(&play.ended(3, 0, None), 1), [(3, 0, 0), (2, 1, 3)]);
    }
}

#[test]
fn a_coordinator_that_stood_still_takes_nobody_for_silent() {
    let mut play = Play::new(2, 2, 0);
    play.come(1, 1);
    play.come(2, 1);
    play.now += 10 * Duration::from_millis(SILENCE);
    assert_eq!(play.heed(Event::Tick), []);
    // From then on whoever is silent is found.
    play.beating.retain(|id| id.0 != 1);
    assert!(play.pass(SILENCE - 200).is_empty());
    assert!(stopped(&play.pass(200)).1.contains("n1"));
}

#[test]
fn too_few_nodes_after_a_loss_are_a_failure() {
    let mut play = Play::new(2, 2, 0);
    play.come(1, 1);
    play.come(2, 1);
    play.gone(2);
    let EndWhy::Failed(setback) = end(&play.ended(1, 0, None)) else { panic!() };
    assert_eq!((setback.node, setback.what), (1, Mishap::Lost("its connection ended".into())));
    // With a restart, another may come in its place.
    let mut play = Play::new(2, 2, 1);
    play.come(1, 1);
    play.come(2, 1);
    play.gone(2);
    assert!(matches!(play.ended(1, 0, None)[..], [Order::Wait(_)]));
    play.pass(JOIN / 2);
    assert_eq!(begun(&play.come(3, 1), 1), [(1, 0, 0), (3, 1, 1)]);
    play.gone(3);
    assert!(matches!(end(&play.ended(1, 1, None)), EndWhy::Failed(_)));
}

/// A run under way of two nodes that both are needed, where no others come.
fn of_two(max_restarts: u32) -> Play {
    let mut play = Play::new(2, 2, max_restarts);
    play.fleet.patience.anew = Some(Duration::from_millis(ANEW));
    play.come(1, 1);
    begun(&play.come(2, 1), 0);
    play
}

#[test]
fn a_lost_node_in_whose_place_none_comes_is_waited_for_briefly_and_the_run_is_to_go_on_later() {
    let wait = |orders: &[Order]| match orders.last() {
        Some(Order::Wait(wait)) => wait.to_string(),
        _ => panic!("nobody is waited for: {orders:?}"),
    };
    let mut play = of_two(3);
    play.gone(2);
    assert_eq!(wait(&play.ended(1, 0, None)), "nodes here: 1 of 2 (n1); giving up in 15 s");
    // One that only stood still is there again by then, for a restart.
    play.pass(ANEW - 1000);
    assert_eq!(begun(&play.come(3, 1), 1), [(1, 0, 0), (3, 1, 1)]);
    play.gone(3);
    wait(&play.ended(1, 1, None));
    let orders = play.pass(ANEW);
    let Some(Order::End(nodes, over)) = orders.last() else { panic!("{orders:?}") };
    assert_eq!((nodes.as_slice(), over.exit_code()), ([NodeId(1)].as_slice(), 75));
    let EndWhy::NodesLost { here: 1, lost: Some(lost) } = &over.why else { panic!("{:?}", over.why) };
    assert_eq!((lost.host.as_str(), lost.generation, lost.is_of_a_node()), ("n3", Generation(1), true));
    // The loss that was got over is told beside it, and counted alone.
    assert_eq!((over.restarts, over.setbacks.len(), over.setbacks[0].host.as_str()), (1, 1, "n2"));
}

#[test]
fn who_would_be_waited_for_in_vain_is_not_waited_for() {
    // No restart is left for one that would come.
    let mut play = of_two(0);
    play.gone(2);
    assert!(matches!(end(&play.ended(1, 0, None)), EndWhy::NodesLost { here: 1, lost: Some(_) }));
    // A worker that fails by itself fails again.
    let mut play = of_two(0);
    play.failed(2, 0, 1);
    play.ended(2, 0, Some(failure(1)));
    assert!(matches!(end(&play.ended(1, 0, None)), EndWhy::Failed(_)));
    // Those that come at first may take their time.
    let mut play = Play::new(2, 2, 0);
    play.fleet.patience.anew = Some(Duration::from_millis(ANEW));
    play.come(1, 1);
    assert_eq!(play.pass(JOIN - 200), []);
    assert_eq!(end(&play.pass(200)), EndWhy::TooFew { here: 1, seconds: 60 });
}

#[test]
fn who_comes_is_taken_in_and_who_leaves_let_go_at_no_cost() {
    let mut play = Play::new(1, 3, 0);
    play.come(1, 1);
    play.pass(LAST_CALL);
    assert_eq!(stopped(&play.come(2, 1)), (vec![1], "node n2 has come".into()));
    assert_eq!(begun(&play.ended(1, 0, None), 1), [(1, 0, 0), (2, 1, 1)]);
    let orders = play.said(1, FromAgent::Leave { signal: 15 });
    assert_eq!(stopped(&orders), (vec![1, 2], "node n1 leaves".into()));
    play.ended(2, 1, None);
    assert_eq!(begun(&play.ended(1, 1, None), 2), [(2, 0, 0)]);
    assert_eq!(play.gone(1), []);
    // The last one can't leave without ending the run.
    let orders = play.said(2, FromAgent::Leave { signal: 15 });
    assert_eq!(stopped(&orders).0, [2]);
    assert_eq!(end(&play.ended(2, 2, None)), EndWhy::Asked { signal: 15 });
}

#[test]
fn where_too_few_are_left_by_those_that_leave_others_are_waited_for_at_no_cost() {
    for goes_on in [false, true] {
        let mut play = Play::new(2, 3, 0);
        play.come(1, 1);
        play.come(2, 1);
        begun(&play.pass(LAST_CALL), 0);
        play.heed(Event::InPlace(Generation(0), goes_on));
        let orders = play.said(2, FromAgent::Leave { signal: 15 });
        assert_eq!(stopped(&orders), (vec![1, 2], "node n2 leaves".into()));
        play.ended(1, 0, None);
        let orders = play.ended(2, 0, None);
        let [Order::Farewell(NodeId(2)), Order::Wait(wait)] = &orders[..] else { panic!("{orders:?}") };
        assert_eq!(
            (&wait.here[..], wait.least, wait.left),
            (&["n1".to_owned()][..], 2, Duration::from_millis(JOIN))
        );
        play.gone(2);
        play.come(3, 1);
        assert_eq!(begun(&play.pass(LAST_CALL), 1), [(1, 0, 0), (3, 1, 1)]);
        // Who waits alone ends the run by leaving.
        play.heed(Event::InPlace(Generation(1), goes_on));
        play.said(3, FromAgent::Leave { signal: 15 });
        play.ended(1, 1, None);
        play.ended(3, 1, None);
        play.gone(3);
        assert_eq!(end(&play.said(1, FromAgent::Leave { signal: 2 })), EndWhy::Asked { signal: 2 });
    }
    // All leave at once.
    let mut play = Play::new(2, 3, 0);
    play.come(1, 1);
    play.come(2, 1);
    begun(&play.pass(LAST_CALL), 0);
    play.said(1, FromAgent::Leave { signal: 15 });
    play.said(2, FromAgent::Leave { signal: 15 });
    play.ended(1, 0, None);
    assert_eq!(end(&play.ended(2, 0, None)), EndWhy::Asked { signal: 15 });
}

/// A run of three nodes, the last of them with two workers, that go on in place.
fn in_place(least: u32, max_restarts: u32) -> Play {
    let mut play = Play::new(least, 4, max_restarts);
    play.come(1, 1);
    play.come(2, 1);
    play.come(3, 2);
    begun(&play.pass(LAST_CALL), 0);
    assert_eq!(play.heed(Event::InPlace(Generation(0), true)), []);
    play.now += Duration::from_millis(100);
    play
}

#[test]
fn a_worker_is_replaced_where_the_others_go_on_without_it_as_long_as_there_are_restarts() {
    let mut play = in_place(2, 1);
    let lost = |rank| FromAgent::Lost { generation: Generation(0), failure: failure(rank) };
    // Two that are lost at once are one restart.
    assert_eq!(play.said(3, lost(3)), [Order::Replace(Generation(0), NodeId(3), Rank(3), 1)]);
    assert_eq!(play.said(1, lost(0)), [Order::Replace(Generation(0), NodeId(1), Rank(0), 1)]);
    assert_eq!(play.heed(Event::Begun(Generation(0), Generation(0), (0..4).map(Rank).collect())), []);
    let orders = play.said(2, lost(1));
    assert_eq!(stopped(&orders), (vec![1, 3, 2], "on node 1 (n2): rank 1 exited with code 3".into()));
    // Others of that node may be lost before they hear of it.
    assert_eq!(play.said(3, lost(2)), []);
    play.ended(1, 0, None);
    play.ended(2, 0, Some(failure(1)));
    let orders = play.ended(3, 0, None);
    let EndWhy::Failed(setback) = end(&orders) else { panic!("{orders:?}") };
    let Some(Order::End(_, end)) = orders.last() else { unreachable!() };
    assert_eq!((setback.node, end.restarts, end.setbacks.len()), (1, 1, 2));
    // Where not all go on, or some are done, all are stopped.
    let mut play = in_place(2, 3);
    play.heed(Event::InPlace(Generation(0), false));
    assert_eq!(stopped(&play.said(1, lost(0))).0, [2, 3, 1]);
    let mut play = in_place(2, 3);
    play.ended(1, 0, None);
    assert_eq!(stopped(&play.said(2, lost(1))).0, [3, 2]);
}

#[test]
fn a_loss_after_which_all_begin_again_is_one_restart() {
    let mut play = in_place(2, 1);
    let lost = FromAgent::Lost { generation: Generation(0), failure: failure(3) };
    assert_eq!(play.said(3, lost), [Order::Replace(Generation(0), NodeId(3), Rank(3), 1)]);
    play.heed(Event::Begun(Generation(0), Generation(0), (0..4).map(Rank).collect()));
    let fail = |play: &mut Play, generation: u64| {
        let failure = WorkerFailure { part_lost: true, ..failure(1) };
        let said = FromAgent::Failed { generation: Generation(generation), failure: failure.clone() };
        play.said(2, said);
        play.ended(1, generation, None);
        play.ended(2, generation, Some(failure));
        play.ended(3, generation, None)
    };
    let orders = fail(&mut play, 0);
    let Some(Order::Begin(Generation(1), seats)) = orders.last() else { panic!("{orders:?}") };
    assert!(seats.len() == 3 && seats.iter().all(|(_, seat)| seat.restarts == 1), "{seats:?}");
    // None of these was lost, so it is another event.
    let orders = fail(&mut play, 1);
    assert!(matches!(end(&orders), EndWhy::Failed(_)), "{orders:?}");
}

#[test]
fn the_others_do_without_a_worker_that_is_not_replaced_and_without_a_node_that_has_no_other() {
    let mut play = in_place(2, 1);
    let at_fault = |rank| WorkerFailure { for_good: true, ..failure(rank) };
    let lost = |rank| FromAgent::Lost { generation: Generation(0), failure: at_fault(rank) };
    let given_up = |rank| FromAgent::GivenUp { generation: Generation(0), rank: Rank(rank) };
    // Nobody is started, so it uses up no restart.
    assert_eq!(play.said(3, lost(3)), [Order::Replace(Generation(0), NodeId(3), Rank(3), 0)]);
    assert_eq!(play.said(3, given_up(3)), [Order::DoWithout(Generation(0), 3..4)]);
    play.now += Duration::from_secs(10);
    assert_eq!(play.said(1, lost(0)), [Order::Replace(Generation(0), NodeId(1), Rank(0), 0)]);
    assert_eq!(play.said(1, given_up(0)), [Order::DoWithout(Generation(0), 0..1)]);
    let failed = FromAgent::Failed { generation: Generation(0), failure: at_fault(0) };
    let orders = play.said(1, failed);
    assert!(
        matches!(&orders[..], [Order::Warn(_), Order::Refuse(NodeId(1), reason), Order::DoWithout(_, seats)]
        if reason == "rank 0 exited with code 3, and no other is started" && *seats == (0..1)),
        "{orders:?}"
    );
    assert_eq!(play.ended(2, 0, None), []);
    assert!(matches!(end(&play.ended(3, 0, None)), EndWhy::Done));
}

#[test]
fn nodes_come_and_go_while_the_others_go_on() {
    let mut play = in_place(2, 0);
    let orders = play.come(4, 2);
    let [Order::Enlarge(Generation(0), NodeId(4), seat)] = &orders[..] else { panic!("{orders:?}") };
    assert_eq!((seat.node, seat.nodes, seat.first_rank, seat.world_size), (3, 4, 4, 6));
    assert_eq!(play.fleet.node_of(5), Some(NodeId(4)));
    // One that is lost costs nothing, and nobody has its ranks any more.
    let orders = play.gone(1);
    assert!(matches!(&orders[..], [Order::Warn(words), Order::DoWithout(Generation(0), seats)]
        if words.contains("node 0 (n1) was lost: its connection ended; the others go on") && *seats == (0..1)));
    assert_eq!(play.fleet.node_of(0), None);
    // One that leaves ends its workers first.
    let orders = play.said(3, FromAgent::Leave { signal: 15 });
    assert_eq!(orders, [Order::Release(Generation(0), NodeId(3))]);
    let lost = FromAgent::Lost { generation: Generation(0), failure: failure(2) };
    assert_eq!(play.said(3, lost), []);
    let left = [Order::DoWithout(Generation(0), 2..4), Order::Farewell(NodeId(3))];
    assert_eq!(play.ended(3, 0, None), left);
    assert_eq!(play.gone(3), []);
    // Another takes the number that is free, and ranks that nobody has had.
    let orders = play.come(5, 1);
    let [Order::Enlarge(_, _, seat)] = &orders[..] else { panic!("{orders:?}") };
    assert_eq!((seat.node, seat.nodes, seat.first_rank, seat.world_size), (0, 3, 6, 7));
    // One whose worker fails before it has come in is sent away.
    let failed = FromAgent::Failed { generation: Generation(0), failure: failure(6) };
    let orders = play.said(5, failed);
    assert!(
        matches!(&orders[..], [Order::Warn(_), Order::Refuse(NodeId(5), reason), Order::DoWithout(_, seats)]
        if reason == "rank 6 exited with code 3 before it came in" && *seats == (6..7)),
        "{orders:?}"
    );
    // One that hasn't come in when others are done comes too late.
    let mut late = in_place(2, 0);
    late.come(4, 1);
    assert_eq!(late.ended(1, 0, None), [Order::Release(Generation(0), NodeId(4))]);
    // With fewer than the least number all have to wait.
    assert!(stopped(&play.gone(2)).1.contains("lost"));
    assert!(matches!(end(&play.ended(4, 0, None)), EndWhy::Failed(_)));
}

#[test]
fn who_comes_when_some_are_done_disturbs_nobody() {
    let mut play = Play::new(2, 3, 0);
    play.come(1, 1);
    play.come(2, 1);
    play.pass(LAST_CALL);
    play.ended(1, 0, None);
    assert_eq!(play.come(3, 1), []);
    // Who is done may also be lost.
    assert_eq!(play.gone(1), []);
    assert_eq!(end(&play.ended(2, 0, None)), EndWhy::Done);
}

#[test]
fn a_run_that_is_asked_to_end_ends_everywhere() {
    for max_restarts in [0, 3] {
        let mut play = Play::new(1, 2, max_restarts);
        play.come(1, 1);
        play.come(2, 1);
        let orders = play.said(1, FromAgent::Quit { signal: 2 });
        assert_eq!(stopped(&orders), (vec![1, 2], "node n1 was asked by signal 2 to end the run".into()));
        // However badly the workers take it.
        play.ended(2, 0, Some(failure(1)));
        assert_eq!(end(&play.ended(1, 0, None)), EndWhy::Asked { signal: 2 });
    }
    let mut play = Play::new(2, 2, 0);
    play.come(1, 1);
    assert_eq!(end(&play.said(1, FromAgent::Quit { signal: 2 })), EndWhy::Asked { signal: 2 });
}

#[test]
fn who_does_not_fit_is_refused_at_once() {
    let ours = terms(2, 2, 3);
    let fits = || node("n9", 1, &ours);
    let check = |here: &[u64], newcomer: Node, words: &[&str]| {
        let mut play = Play::new(2, 2, 3);
        for id in here {
            play.come_as(*id, Node { node_rank: Some(*id as u32), ..node(&format!("n{id}"), 1, &ours) });
        }
        let orders = play.come_as(9, newcomer);
        let reason = refused(&orders);
        assert!(words.iter().all(|word| reason.contains(word)), "{reason}");
    };
    let with = |change: &dyn Fn(&mut Terms)| {
        let mut node = fits();
        change(&mut node.terms);
        node
    };
    check(&[], with(&|terms| terms.program = "other.py".into()), &["is train.py, not other.py", "--rdzv-id"]);
    check(&[], with(&|terms| terms.most = 3), &["--nnodes 2:2, not 2:3"]);
    check(&[], with(&|terms| terms.max_restarts = 0), &["--max-restarts 3, not 0"]);
    check(&[], Node { workers: 0, ..fits() }, &["at least one worker"]);
    let far = ["the clock of n9 is 3600 s ahead of the first node's", "hint: set it right", "--exclude=n9"];
    check(&[], Node { clock_ms: Some(3_600_000), ..fits() }, &far);
    check(&[], Node { node_rank: Some(2), ..fits() }, &["--node-rank 2: must be below --nnodes, which is 2"]);
    check(&[1], Node { node_rank: Some(1), ..fits() }, &["--node-rank 1 is taken, by n1"]);
    check(&[0, 1], fits(), &["this run has its 2 nodes", "n0, n1"]);
}

#[test]
fn clocks_are_held_against_each_other_as_they_are_by_now() {
    let mut play = Play::new(2, 2, 0);
    // After an hour the first node's is set by two minutes.
    let now = 3_600_000;
    play.now = Duration::from_millis(now);
    play.fleet.set_clock(play.at(), now + 120_000);
    let ours = terms(2, 2, 0);
    let is_refused = |orders: Vec<Order>| orders.iter().any(|order| matches!(order, Order::Refuse(..)));
    assert!(!is_refused(play.come_as(1, Node { clock_ms: Some(now + 120_000), ..node("n1", 1, &ours) })));
    assert!(is_refused(play.come_as(2, Node { clock_ms: Some(now), ..node("n2", 1, &ours) })));
}

#[test]
fn what_is_odd_is_said() {
    let check = |newcomer: Node, want: Option<&str>| {
        let mut play = Play::new(2, 2, 0);
        play.now = Duration::from_secs(10);
        let said = play.come_as(1, newcomer).into_iter().find_map(|order| match order {
            Order::Warn(text) => Some(text),
            _ => None,
        });
        match (&said, want) {
            (None, None) => {}
            (Some(text), Some(want)) => assert!(text.contains(want), "{text}"),
            _ => panic!("{said:?} and not {want:?}"),
        }
    };
    let ours = terms(2, 2, 0);
    let usual = || Node { clock_ms: Some(10_000), ..node("n1", 1, &ours) };
    check(usual(), None);
    check(Node { clock_ms: Some(39_000), ..usual() }, None);
    check(Node { clock_ms: None, ..usual() }, None);
    check(Node { clock_ms: Some(3_610_000), ..usual() }, Some("n1 was refused: the clock of n1 is 3600 s"));
    let mut other = usual();
    other.terms.arguments.pop();
    check(other, Some("`--lr`, not `--lr 1`"));
}

#[test]
fn numbers_that_were_given_are_kept() {
    let mut play = Play::new(3, 3, 0);
    let ours = terms(3, 3, 0);
    let given = |host: &str, number| Node { node_rank: number, ..node(host, 2, &ours) };
    play.come_as(1, given("n1", Some(2)));
    play.come_as(2, given("n2", None));
    assert_eq!(begun(&play.come_as(3, given("n3", Some(0))), 0), [(3, 0, 0), (2, 1, 2), (1, 2, 4)]);
}

#[test]
fn who_leads_is_the_first_of_those_that_are_new() {
    let leads = |play: &Play| Node { leads: true, ..node("n2", 2, &play.terms) };
    let mut play = Play::new(2, 3, 0);
    play.come(1, 2);
    play.come_as(2, leads(&play));
    assert_eq!(begun(&play.come(3, 2), 0), [(2, 0, 0), (1, 1, 2), (3, 2, 4)]);
    // It takes no number from another that goes on.
    let mut play = Play::new(1, 2, 0);
    play.come(1, 2);
    assert_eq!(begun(&play.pass(LAST_CALL), 0), [(1, 0, 0)]);
    play.come_as(2, leads(&play));
    assert_eq!(begun(&play.ended(1, 0, None), 1), [(1, 0, 0), (2, 1, 2)]);
}

#[test]
fn a_node_that_stands_by_takes_the_place_of_one_that_is_lost() {
    let warned = |orders: &[Order]| -> Vec<String> {
        orders
            .iter()
            .filter_map(|order| if let Order::Warn(words) = order { Some(words.clone()) } else { None })
            .collect()
    };
    // Where all begin again.
    let mut play = Play::with_spares(2, 2, 2, 0);
    (1..=2).for_each(|id| drop(play.come(id, 1)));
    assert_eq!(warned(&play.come(3, 1)), ["n3 stands by, in case that a node is lost"]);
    play.come(4, 1);
    let reason = play.come(5, 1);
    assert!(refused(&reason).contains("n1, n2, and 2 that stand by\nhint: "), "{reason:?}");
    assert_eq!(stopped(&play.gone(1)).0, [2]);
    // It is no failure, and nobody waits.
    let orders = play.ended(2, 0, None);
    assert_eq!(warned(&orders), ["n3 comes in for a node that is missing"]);
    assert_eq!(begun(&orders, 1), [(3, 0, 0), (2, 1, 1)]);
    // Those that stand by go as they like, by their end, their silence, or a signal.
    let goes = |words: &str| Order::Warn(words.into());
    let farewell = [goes("n4, which stood by, leaves; none stands by now"), Order::Farewell(NodeId(4))];
    assert_eq!(play.said(4, FromAgent::Leave { signal: 15 }), farewell);
    play.gone(4);
    play.come(9, 1);
    play.come(6, 1);
    let lost = goes("n6, which stood by, was lost: its connection ended; one stands by now");
    assert_eq!(play.gone(6), [lost]);
    play.gone(9);
    play.come(7, 1);
    play.beating.retain(|id| id.0 != 7);
    let silent = goes("n7, which stood by, was lost: gave no sign of life for 2.0 s; none stands by now");
    assert_eq!(play.pass(SILENCE), [Order::Drop(NodeId(7)), silent]);
    // They hear of the end.
    play.come(8, 1);
    play.ended(2, 1, None);
    let orders = play.ended(3, 1, None);
    assert!(
        matches!(&orders[..], [Order::End(nodes, _)] if *nodes == [NodeId(2), NodeId(3), NodeId(8)]),
        "{orders:?}"
    );
}

#[test]
fn those_that_are_to_stand_by_come_after_the_others() {
    let spare = |play: &Play, host: &str| Node { spare: true, ..node(host, 1, &play.terms) };
    let mut play = Play::with_spares(2, 2, 1, 0);
    play.come(1, 1);
    play.come_as(2, spare(&play, "n2"));
    assert_eq!(begun(&play.come(3, 1), 0), [(1, 0, 0), (3, 1, 1)]);
    // Where others don't come in time these take part.
    let mut play = Play::with_spares(2, 2, 1, 0);
    play.come_as(1, spare(&play, "n1"));
    play.come(2, 1);
    assert!(play.fleet.wake_at().is_some_and(|at| at <= play.at() + PATIENCE.last_call));
    assert_eq!(begun(&play.pass(LAST_CALL), 0), [(1, 0, 0), (2, 1, 1)]);
    // So do those for which there is no other place.
    let mut play = Play::with_spares(2, 2, 1, 0);
    play.come_as(1, spare(&play, "n1"));
    play.come_as(2, spare(&play, "n2"));
    assert_eq!(begun(&play.come(3, 1), 0), [(2, 0, 0), (3, 1, 1)]);
}

#[test]
fn the_others_go_on_in_place_with_a_node_that_stood_by() {
    let mut play = Play::with_spares(2, 2, 1, 0);
    (1..=3).for_each(|id| drop(play.come(id, 1)));
    play.heed(Event::InPlace(Generation(0), true));
    // There are as many as there have to be at every moment.
    let orders = play.gone(1);
    let [
        Order::Warn(lost),
        Order::DoWithout(_, seats),
        Order::Warn(comes),
        Order::Enlarge(_, NodeId(3), seat),
    ] = &orders[..]
    else {
        panic!("{orders:?}")
    };
    assert!(lost.ends_with("; the others go on") && comes.starts_with("n3 comes in"), "{lost} {comes}");
    assert_eq!((seats.clone(), seat.node, seat.first_rank, seat.nodes), (0..1, 0, 2, 2));
    // One that comes anew has lost its place, and stands by.
    let anew = node("n1", 1, &play.terms);
    assert!(matches!(&play.come_as(4, anew)[..], [Order::Warn(words)] if words.starts_with("n1 stands by")));
    // One that leaves is replaced as well, as soon as its workers have ended.
    assert_eq!(play.said(2, FromAgent::Leave { signal: 15 }), [Order::Release(Generation(0), NodeId(2))]);
    let orders = play.ended(2, 0, None);
    let is_taken_in = |order: &Order| matches!(order, Order::Enlarge(_, NodeId(4), seat) if seat.node == 1);
    assert!(orders.iter().any(is_taken_in), "{orders:?}");
    // With none that stands by the run can't be done without another.
    assert_eq!(stopped(&play.gone(4)).0, [3]);
}

/// Nodes of a fixed number, of which so many more stand by, whose workers go on in place.
fn guarded(nodes: u32, spares: u32) -> Play {
    let mut play = Play::with_spares(nodes, nodes, spares, 0);
    (1..=u64::from(nodes + spares)).for_each(|id| drop(play.come(id, 1)));
    play.heed(Event::InPlace(Generation(0), true));
    play
}

#[test]
fn a_node_that_stood_by_and_fails_is_done_without_where_another_stands_by() {
    let mut play = guarded(2, 2);
    play.gone(2);
    // It was taken in, and its worker fails before it comes in.
    let orders = play.said(3, FromAgent::Failed { generation: Generation(0), failure: failure(2) });
    assert!(!orders.iter().any(|order| matches!(order, Order::Stop(..))), "{orders:?}");
    assert!(orders.iter().any(|order| matches!(order, Order::Enlarge(_, NodeId(4), _))), "{orders:?}");
}

#[test]
fn a_node_that_is_asked_to_leave_is_replaced_where_one_stands_by_and_else_ends_the_run() {
    let leave = FromAgent::Leave { signal: 15 };
    let mut play = guarded(2, 1);
    assert_eq!(play.said(2, leave.clone()), [Order::Release(Generation(0), NodeId(2))]);
    // The one that was to come instead is lost meanwhile.
    play.gone(3);
    assert_eq!(stopped(&play.ended(2, 0, None)).0, [1]);
    let mut play = guarded(2, 1);
    play.gone(3);
    assert_eq!(stopped(&play.said(2, leave)).1, "node n2 was asked by signal 15 to end the run");
}

/// The others count them, so this side does.
#[test]
fn nodes_that_stand_by_count_among_those_of_whom_half_are_left() {
    let falls_silent = |play: &mut Play, silent: &[u64]| {
        play.beating.retain(|id| !silent.contains(&id.0));
        (0..10)
            .map(|_| play.pass(SILENCE))
            .find(|orders| orders.iter().any(|order| !matches!(order, Order::Drop(_))))
    };
    let is_cut = |orders: &[Order]| orders.iter().any(|order| matches!(order, Order::Release(..)));
    let mut play = guarded(2, 1);
    let orders = falls_silent(&mut play, &[2, 3]).unwrap();
    assert!(is_cut(&orders), "{orders:?}");
    let mut play = guarded(2, 1);
    let orders = falls_silent(&mut play, &[2]).unwrap();
    assert!(!is_cut(&orders) && orders.iter().any(|order| matches!(order, Order::Enlarge(..))), "{orders:?}");
}

/// What a node of that number comes back with.
fn comes_back(play: &Play, id: u64, standing: &phalanx_job::Standing) -> Return {
    let standby = node(&format!("n{id}"), 1, &play.terms).standby;
    let known = standing.at(standby).unwrap();
    let runs = known.stage == Stage::Running;
    Return {
        number: known.number.unwrap(),
        standby,
        generation: Generation(0),
        workers: known.seats.clone().filter(|_| runs).map(Rank).collect(),
        standing: standing.clone(),
    }
}

/// What the first of those that come back decides, where the nodes of these numbers are known to have ended.
fn succeeded(play: &Play, ended: &[u32], back: &[u64]) -> Result<Vec<Order>, crate::succession::Verdict> {
    use crate::succession::{RollCall, Verdict};
    let (standing, now) = (play.fleet.standing(play.at()), play.at());
    let own = comes_back(play, back[0], &standing).number;
    let mut call = RollCall::new(standing.clone(), own, ended.iter().copied().collect(), now);
    for id in back {
        call.heed(Event::Said(NodeId(*id), FromAgent::Return(Box::new(comes_back(play, *id, &standing)))));
    }
    match call.verdict(now) {
        Verdict::Lead => Ok(call.lead(play.terms.clone(), PATIENCE, now, 0).1),
        other => Err(other),
    }
}

#[test]
fn those_that_stand_by_come_back_to_whoever_leads_the_run_on_and_may_be_that() {
    let enlarges = |orders: &[Order]| orders.iter().any(|order| matches!(order, Order::Enlarge(..)));
    // The coordinator's machine is silent, and two of three are here.
    let orders = succeeded(&guarded(2, 1), &[], &[2, 3]).unwrap();
    assert!(enlarges(&orders) && !orders.iter().any(|order| matches!(order, Order::Stop(..))), "{orders:?}");
    let why = succeeded(&guarded(2, 1), &[], &[2]).unwrap_err();
    let why = format!("{why:?}");
    assert!(why.contains("only 1 of 3 nodes are here: 0, one that stands by may be alive"), "{why}");
    // Nobody else is left, so the workers begin again.
    let orders = succeeded(&guarded(1, 1), &[0], &[2]).unwrap();
    assert_eq!(begun(&orders, 1), [(2, 0, 0)]);
    assert!(succeeded(&guarded(1, 1), &[], &[2]).is_err());
}

#[test]
fn one_that_stands_by_keeps_its_place_when_its_connection_is_lost_and_finds_one_when_it_was_given_up() {
    let mut play = guarded(1, 1);
    let standing = play.fleet.standing(play.at());
    let back = |play: &Play| FromAgent::Return(Box::new(comes_back(play, 2, &standing)));
    assert_eq!(play.said(5, back(&play)), [Order::Drop(NodeId(2))]);
    assert_eq!((play.gone(2), play.fleet.spares.count()), (Vec::new(), 1));
    play.gone(5);
    assert!(
        matches!(&play.said(6, back(&play))[..], [Order::Warn(words)] if words.starts_with("n2 stands by"))
    );
    // Another run's has no place here.
    let mut other = Play::with_spares(1, 1, 1, 0);
    other.come(1, 1);
    assert_eq!(other.said(6, back(&play)), [Order::Estrange(NodeId(6))]);
}

#[test]
fn ranks_of_a_role_are_counted_apart() {
    let mut play = Play::new(3, 3, 0);
    let ours = terms(3, 3, 0);
    let mut come = |id: u64, role: &str, workers| {
        play.come_as(id, Node { role: role.into(), ..node(&format!("n{id}"), workers, &ours) })
    };
    come(1, "trainer", 2);
    come(2, "reader", 1);
    let orders = come(3, "trainer", 3);
    let Some(Order::Begin(_, seats)) = orders.last() else { panic!("{orders:?}") };
    let roles: Vec<_> = seats.iter().map(|(_, seat)| (seat.first_role_rank, seat.role_world_size)).collect();
    assert_eq!(roles, [(0, 5), (0, 1), (2, 5)]);
}

#[test]
fn who_comes_anew_before_its_end_was_heard_of_takes_its_own_place() {
    let mut play = Play::new(2, 2, 0);
    play.come(1, 1);
    let anew = |play: &Play| node("n1", 1, &play.terms);
    let orders = play.come_as(5, anew(&play));
    assert_eq!(orders[0], Order::Drop(NodeId(1)));
    play.gone(1);
    assert_eq!(begun(&play.come(2, 1), 0), [(2, 0, 0), (5, 1, 1)]);
    // What it ran is lost.
    let mut play = in_place(1, 0);
    let orders = play.come_as(5, anew(&play));
    assert_eq!(orders[0], Order::Drop(NodeId(1)));
    assert!(
        matches!(&orders[1], Order::Warn(words) if words.ends_with("its agent came anew; the others go on"))
    );
    assert!(matches!(&orders[2], Order::DoWithout(_, ranks) if *ranks == (0..1)), "{orders:?}");
    assert!(matches!(&orders[3], Order::Enlarge(_, NodeId(5), _)), "{orders:?}");
}

#[test]
fn who_speaks_before_it_has_joined_is_dropped() {
    let mut play = Play::new(1, 1, 0);
    assert_eq!(play.said(1, FromAgent::Beat), [Order::Drop(NodeId(1))]);
}

#[test]
fn less_than_half_of_the_nodes_give_way_to_those_that_fell_silent() {
    let begun_of = |nodes: u64| {
        let mut play = Play::new(1, nodes as u32, 0);
        (1..=nodes).for_each(|id| drop(play.come(id, 1)));
        play
    };
    // Half may go on, since the coordinator is among them.
    let mut play = begun_of(4);
    play.beating.retain(|id| id.0 < 3);
    let orders = play.pass(2 * SILENCE);
    let (_, why) = stopped(&orders);
    assert!(why.contains("gave no sign of life"), "{orders:?}");
    play.ended(1, 0, None);
    assert_eq!(begun(&play.ended(2, 0, None), 1), [(1, 0, 0), (2, 1, 1)]);
    // One after the other, but less than half at last.
    let mut play = begun_of(3);
    play.heed(Event::InPlace(Generation(0), true));
    play.beating.retain(|id| id.0 != 2);
    assert!(play.pass(2 * SILENCE).contains(&Order::DoWithout(Generation(0), 1..2)));
    play.beating.retain(|id| id.0 != 3);
    let orders = play.pass(2 * SILENCE);
    assert!(orders.contains(&Order::Release(Generation(0), NodeId(1))), "{orders:?}");
    let orders = play.ended(1, 0, None);
    let end = EndWhy::CutOff { here: 1, silent: 2 };
    assert!(matches!(&orders[..], [Order::End(_, found)] if found.why == end), "{orders:?}");
    // Long after the first, which is known to stand still then, the second is one of two.
    let mut play = begun_of(3);
    play.heed(Event::InPlace(Generation(0), true));
    play.beating.retain(|id| id.0 != 2);
    play.pass(2 * SILENCE);
    assert_eq!(play.pass(CUT.as_millis() as u64), []);
    play.beating.retain(|id| id.0 != 3);
    assert!(play.pass(2 * SILENCE).contains(&Order::DoWithout(Generation(0), 2..3)));
}

#[test]
fn a_coordinator_that_was_taken_for_lost_gives_way() {
    let mut play = Play::new(1, 2, 0);
    (1..=2).for_each(|id| drop(play.come(id, 1)));
    let release = |id| Order::Release(Generation(0), NodeId(id));
    assert_eq!(play.said(2, FromAgent::Moved { to: None }), [release(1)]);
    let orders = play.ended(1, 0, None);
    assert!(matches!(&orders[..], [Order::End(_, found)] if found.why == EndWhy::Deposed), "{orders:?}");
    // Where it is told who leads the run on, its nodes go there.
    let there = std::net::SocketAddr::from(([127, 0, 0, 1], 1));
    let mut play = Play::new(1, 2, 0);
    (1..=2).for_each(|id| drop(play.come(id, 1)));
    assert_eq!(play.said(2, FromAgent::Moved { to: Some((there, 1)) }), [release(1)]);
    assert_eq!(play.ended(1, 0, None), [Order::Elsewhere(vec![NodeId(1)], there)]);
}

#[test]
fn nodes_that_begin_beside_a_run_that_is_led_elsewhere_join_that() {
    let here = |port: u16| std::net::SocketAddr::from(([127, 0, 0, 1], port));
    let elsewhere = |port, term| FromAgent::Elsewhere { address: here(port), term };
    let mut play = Play::new(2, 2, 0);
    (1..=2).for_each(|id| drop(play.come(id, 1)));
    let release = |id| Order::Release(Generation(0), NodeId(id));
    assert_eq!(play.said(9, elsewhere(1, 1)), [release(1), release(2)]);
    // It is said again and again, and by another one that took over meanwhile; one that did so before doesn't know.
    for (port, term) in [(1, 1), (2, 2), (1, 1)] {
        assert_eq!(play.said(9, elsewhere(port, term)), []);
    }
    assert_eq!(play.ended(1, 0, None), []);
    let sent = |ids: &[u64]| Order::Elsewhere(ids.iter().copied().map(NodeId).collect(), here(2));
    assert_eq!(play.ended(2, 0, None), [sent(&[1, 2])]);
    // Whoever comes later is sent there as well, and asks again where nobody leads it yet.
    for _ in 0..2 {
        assert_eq!(play.come(3, 1), [sent(&[3])]);
        assert_eq!(play.said(3, FromAgent::Beat), []);
    }
}

#[test]
fn who_comes_back_to_a_run_that_it_never_was_in_looks_for_its_own() {
    let mut play = Play::new(1, 2, 0);
    let back = |host: &str, play: &Play| {
        let standby = node(host, 1, &play.terms).standby;
        let (number, generation, workers) = (1, Generation(0), vec![Rank(1)]);
        let standing = play.fleet.standing(play.at());
        FromAgent::Return(Box::new(Return { number, standby, generation, workers, standing }))
    };
    let strange = back("n9", &play);
    // Whether this one has begun yet or not.
    assert_eq!(play.said(7, strange.clone()), [Order::Estrange(NodeId(7))]);
    (1..=2).for_each(|id| drop(play.come(id, 1)));
    assert_eq!(play.said(8, strange), [Order::Estrange(NodeId(8))]);
    // One of its own that it has gone on without.
    play.heed(Event::InPlace(Generation(0), true));
    play.heed(Event::Gone(NodeId(2), "its agent's connection ended".into()));
    let late = back("n2", &play);
    assert_eq!(play.said(9, late), [Order::GoneOn(NodeId(9))]);
}

#[test]
fn who_fails_while_others_make_room_ends_no_other_way_than_they() {
    let ended = |id: u64, failure: Option<WorkerFailure>, drained: bool, play: &mut Play| {
        play.said(id, FromAgent::Ended { generation: Generation(0), failure, drained, port: 1 })
    };
    for failure in [None, Some(failure(1))] {
        let mut play = Play::new(2, 2, 3);
        (1..=2).for_each(|id| drop(play.come(id, 1)));
        assert_eq!(ended(1, None, true, &mut play), []);
        let orders = ended(2, failure.clone(), failure.is_none(), &mut play);
        let Some(Order::End(_, end)) = orders.last() else { panic!("{orders:?}") };
        assert_eq!((&end.why, end.exit_code()), (&EndWhy::Drained, 75));
    }
}

#[test]
fn workers_that_hang_at_once_on_two_nodes_use_up_one_restart() {
    let mut play = Play::new(2, 2, 3);
    (1..=2).for_each(|id| drop(play.come(id, 1)));
    play.heed(Event::InPlace(Generation(0), true));
    play.pass(60_000);
    let hung = |rank: u32, idle_ms| FromAgent::Lost {
        generation: Generation(0),
        failure: WorkerFailure { idle_ms, ..failure(rank) },
    };
    let replace = |id, rank, restarts| Order::Replace(Generation(0), NodeId(id), Rank(rank), restarts);
    assert_eq!(play.said(1, hung(0, 10_000)), [replace(1, 0, 1)]);
    play.pass(4000);
    assert_eq!(play.said(2, hung(1, 14_500)), [replace(2, 1, 1)]);
}

#[test]
fn a_worker_that_would_fail_again_ends_the_run_whatever_restarts_are_left() {
    let mut play = Play::new(2, 2, 3);
    (1..=2).for_each(|id| drop(play.come(id, 1)));
    let own = WorkerFailure { for_good: true, ..failure(1) };
    play.said(2, FromAgent::Failed { generation: Generation(0), failure: own.clone() });
    play.ended(1, 0, None);
    let orders = play.ended(2, 0, Some(own));
    let Some(Order::End(_, end)) = orders.last() else { panic!("{orders:?}") };
    assert!(matches!(&end.why, EndWhy::Failed(cause) if cause.is_for_good()), "{:?}", end.why);
}

/// They would wait for it as long as they may, and end without having kept anything.
#[test]
fn who_is_stopped_because_another_is_lost_goes_on_without_it_until_then() {
    let begun_of = |least| {
        let mut play = Play::new(least, 3, 0);
        (1..=3).for_each(|id| drop(play.come(id, 2)));
        play.heed(Event::InPlace(Generation(0), true));
        play
    };
    let begun = || begun_of(3);
    let without = |seats| Order::PartFrom(Generation(0), seats);
    let mut play = begun();
    let given_up = |rank| FromAgent::GivenUp { generation: Generation(0), rank: Rank(rank) };
    assert_eq!(stopped(&play.failed(2, 0, 3)).0, [1, 3]);
    // Each that ends badly while its node is stopped, the first among them.
    assert_eq!(play.said(2, given_up(3)), [without(3..4)]);
    assert_eq!(play.said(2, given_up(2)), [without(2..3)]);
    assert_eq!(play.ended(2, 0, Some(failure(3))), []);
    assert_eq!(play.gone(3), [without(4..6)]);
    let mut play = begun();
    let orders = play.gone(1);
    assert!(matches!(&orders[..], [first, Order::Stop(..)] if *first == without(0..2)), "{orders:?}");
    // A node that leaves, and was told to end its workers before.
    let mut play = begun_of(2);
    assert_eq!(play.said(2, FromAgent::Leave { signal: 15 }), [Order::Release(Generation(0), NodeId(2))]);
    stopped(&play.said(1, FromAgent::Quit { signal: 2 }));
    assert_eq!(play.ended(2, 0, None), [without(2..4)]);
    // Whose workers don't go on in place are only stopped: those that wait for each other at the start would begin without.
    let mut play = begun();
    play.heed(Event::InPlace(Generation(0), false));
    let orders = play.gone(1);
    assert!(matches!(&orders[..], [Order::Stop(..)]), "{orders:?}");
    assert_eq!(play.said(2, given_up(2)), []);
    // Nor do those that others go on without.
    let mut play = begun();
    let orders = play.said(2, FromAgent::Moved { to: None });
    assert!(matches!(&orders[..], [Order::Release(..), ..]), "{orders:?}");
    assert_eq!(play.said(3, given_up(4)), []);
    assert_eq!(play.gone(1), []);
}

/// They keep the step that they have made once they have found each other again.
#[test]
fn workers_that_are_to_end_in_place_meet_under_the_next_coordinator_and_no_others_do() {
    let resumed = |says: FromAgent, goes_on: bool| {
        let mut play = Play::new(2, 2, 0);
        (1..=2).for_each(|id| drop(play.come(id, 1)));
        play.heed(Event::InPlace(Generation(0), goes_on));
        play.said(2, says);
        let (standing, now) = (play.fleet.standing(play.at()), play.at());
        assert!(matches!(standing.phase, phalanx_job::Phase::Stopping { .. }), "{:?}", standing.phase);
        let back = Return {
            number: 1,
            standby: node("n2", 1, &play.terms).standby,
            generation: Generation(0),
            workers: vec![Rank(1)],
            standing: standing.clone(),
        };
        let (ended, back) = (BTreeSet::from([0]), [(NodeId(2), back)]);
        let left = Legacy { standing: &standing, leader: 1, ended: &ended, back: &back };
        let (_, orders) = Fleet::resume(play.terms, PATIENCE, &left, now, 0);
        orders
    };
    let asked = || FromAgent::Quit { signal: 15 };
    let orders = resumed(asked(), true);
    let [Order::Resume(Generation(0), left), Order::PartFrom(Generation(0), seats), ..] = &orders[..] else {
        panic!("{orders:?}")
    };
    assert!(left.in_place && left.live == BTreeSet::from([1]) && *seats == (0..1), "{orders:?}");
    for orders in [resumed(asked(), false), resumed(FromAgent::Moved { to: None }, true)] {
        assert!(!orders.iter().any(|order| matches!(order, Order::Resume(..))), "{orders:?}");
    }
}
