//! Whatever happens to a run's nodes: random lists of events, and agents that obey. Checks F-ONE, F-SEATS, F-END and that a
//! restart is only spent on a mishap.

use super::*;
use crate::succession::{RollCall, Verdict};
use phalanx_job::{FIRST_SPARE, Return};
use proptest::prelude::*;

/// Something that may happen to a node.
#[derive(Clone, Copy, Debug)]
enum Act {
    Come(u64),
    Fail(u64),
    Finish(u64),
    Vanish(u64),
    FallSilent(u64),
    Leave(u64),
    Quit(u64),
    /// The workers go on without those that are lost, or don't any more.
    InPlace(bool),
    /// A worker is lost, and its agent waits to be told what to do.
    Lose(u64),
    /// The node with the lowest number is lost, which hosts the coordinator, and the next leads the run.
    Succeed,
    /// The same just after a worker of a node was lost, a node was lost, has come, or asks for the end, before anybody has heard what
    /// follows; and how the run stands then was told, or wasn't.
    Interrupt(u8, u64, bool),
    Pass(u64),
}

fn acts() -> impl Strategy<Value = Vec<Act>> {
    let node = 1..7u64;
    let act = prop_oneof![
        4 => node.clone().prop_map(Act::Come),
        3 => node.clone().prop_map(Act::Fail),
        3 => node.clone().prop_map(Act::Finish),
        2 => node.clone().prop_map(Act::Vanish),
        1 => node.clone().prop_map(Act::FallSilent),
        2 => node.clone().prop_map(Act::Leave),
        1 => node.clone().prop_map(Act::Quit),
        2 => proptest::bool::weighted(0.8).prop_map(Act::InPlace),
        2 => node.clone().prop_map(Act::Lose),
        1 => Just(Act::Succeed),
        2 => (0..4u8, node.clone(), any::<bool>()).prop_map(|(what, node, told)| Act::Interrupt(what, node, told)),
        3 => (0..5000u64).prop_map(Act::Pass),
    ];
    proptest::collection::vec(act, 0..60)
}

/// Agents that do what they are told, when they are asked to, and what was seen of the run.
struct World {
    play: Play,
    /// The generation whose workers run on a node.
    running: BTreeMap<u64, u64>,
    here: Vec<u64>,
    next_id: u64,
    /// Who is whom: a node that comes again has another connection.
    ids: BTreeMap<u64, u64>,
    last: Option<u64>,
    last_numbers: BTreeMap<u64, u32>,
    restarts: usize,
    /// Nodes whose agents know that the generation is being stopped.
    stopping: BTreeSet<u64>,
    /// Nodes whose agents wait to be told what to do about a worker.
    lost: Vec<u64>,
    /// Whether something has failed or was lost since the last generation began.
    mishap: bool,
    over: bool,
}

impl World {
    fn obey(&mut self, orders: Vec<Order>) {
        let (least, most) = (self.play.terms.least as usize, self.play.terms.most as usize);
        for order in orders {
            let is_late = matches!(order, Order::Refuse(..) | Order::GoneOn(_));
            assert!(!self.over || is_late, "an order after the end: {order:?}");
            match order {
                Order::Begin(generation, seats) => {
                    self.stopping.clear();
                    assert!(self.running.is_empty(), "two generations at once: {:?}", self.running);
                    assert!(self.last.is_none_or(|last| generation.0 > last), "{generation} again");
                    assert!((least..=most).contains(&seats.len()), "{} nodes", seats.len());
                    self.last = Some(generation.0);
                    let restarts = seats[0].1.restarts as usize;
                    assert!(restarts == self.restarts || restarts == self.restarts + 1 && self.mishap);
                    assert!(restarts <= self.play.terms.max_restarts as usize);
                    // One that is silent may not have been found out yet.
                    let is_silent = |(id, _): &(NodeId, Seat)| !self.play.beating.contains(id);
                    (self.restarts, self.mishap) = (restarts, seats.iter().any(is_silent));
                    let mut first_rank = 0;
                    for (number, (id, seat)) in seats.iter().enumerate() {
                        assert!(self.here.contains(&id.0), "a node that isn't there begins");
                        assert_eq!((seat.node as usize, seat.first_rank), (number, first_rank));
                        first_rank += self.play.fleet.members[id].node.workers;
                        self.running.insert(id.0, generation.0);
                    }
                    assert!(seats.iter().all(|(_, seat)| seat.world_size == first_rank));
                    let numbers: BTreeMap<u64, u32> =
                        seats.iter().map(|(id, seat)| (id.0, seat.node)).collect();
                    for (id, number) in &numbers {
                        let before = self.last_numbers.get(id).filter(|before| **before < seats.len() as u32);
                        assert!(before.is_none_or(|before| before == number), "a survivor was renumbered");
                    }
                    self.last_numbers = numbers;
                }
                Order::Stop(generation, nodes, _) => {
                    for id in nodes {
                        // One that has fallen silent hears nothing.
                        let is_silent = !self.play.beating.contains(&id);
                        let runs = self.running.get(&id.0).is_some_and(|running| *running == generation.0);
                        assert!(is_silent || runs, "who is stopped runs");
                        self.stopping.insert(id.0);
                        self.lost.retain(|lost| *lost != id.0);
                    }
                }
                Order::Enlarge(generation, id, seat) => {
                    assert!(self.here.contains(&id.0) && !self.running.contains_key(&id.0));
                    assert!(self.running.values().all(|running| *running == generation.0));
                    assert!(self.play.fleet.members.len() <= most);
                    let ranks = self.play.fleet.seats_of(id);
                    assert_eq!(seat.first_rank, ranks.start);
                    let others = self.play.fleet.members.iter().filter(|(other, _)| **other != id);
                    let apart = |other: &Range<u32>| other.end <= ranks.start || other.start >= ranks.end;
                    assert!(others.clone().all(|(_, other)| apart(&other.seats)), "a rank twice");
                    assert!(ranks.end <= seat.world_size);
                    assert!(
                        others.clone().all(|(_, other)| other.number != Some(seat.node)),
                        "a number twice"
                    );
                    self.running.insert(id.0, generation.0);
                    self.last_numbers.insert(id.0, seat.node);
                }
                Order::Replace(generation, id, rank, restarts) => {
                    assert!(self.lost.contains(&id.0) && self.running.get(&id.0) == Some(&generation.0));
                    assert!(self.play.fleet.seats_of(id).contains(&rank.0));
                    let added = restarts as usize - self.restarts;
                    assert!(added <= 1 && restarts <= self.play.terms.max_restarts);
                    self.restarts += added;
                    self.lost.retain(|lost| *lost != id.0);
                }
                Order::Release(generation, id) => {
                    if self.play.beating.contains(&id) {
                        assert_eq!(self.running.get(&id.0), Some(&generation.0));
                        let orders = self.finish(id.0);
                        self.obey(orders);
                    }
                }
                Order::DoWithout(_, seats) | Order::PartFrom(_, seats) => {
                    let run = |id: &u64| self.play.fleet.seats_of(NodeId(*id));
                    let is_apart = |id: &u64| run(id).start >= seats.end || run(id).end <= seats.start;
                    assert!(self.running.keys().all(is_apart));
                }
                Order::Refuse(id, _) | Order::GoneOn(id) | Order::Drop(id) => self.forget(id.0),
                Order::End(_, end) => {
                    assert!(self.running.is_empty(), "over, and workers run: {:?}", self.running);
                    assert_eq!(end.setbacks.len(), self.play.fleet.setbacks.len());
                    self.over = true;
                }
                Order::Warn(..) | Order::Wait(_) | Order::Forget(..) | Order::Farewell(_) => {}
                Order::Estrange(..) | Order::Elsewhere(..) => panic!("there is one coordinator"),
                Order::Resume(generation, left) => {
                    assert!(self.running.values().all(|running| *running == generation.0));
                    let seats = |id: &u64| self.play.fleet.seats_of(NodeId(*id));
                    let comes = |seat: &u32| self.play.fleet.coming.contains(seat);
                    let mut seats = self.running.keys().flat_map(seats);
                    assert!(seats.all(|seat| left.live.contains(&seat) || comes(&seat)));
                    assert!(left.live.is_subset(&left.seats));
                }
            }
        }
    }

    fn forget(&mut self, id: u64) {
        self.lost.retain(|lost| *lost != id);
        self.running.remove(&id);
        self.here.retain(|here| *here != id);
        self.play.beating.retain(|here| here.0 != id);
    }

    fn act(&mut self, act: Act) {
        let id_of = |node: &u64| self.ids.get(node).copied().filter(|id| self.here.contains(id));
        let orders = match act {
            Act::Come(node) if id_of(&node).is_none() => {
                self.next_id += 1;
                self.ids.insert(node, self.next_id);
                self.here.push(self.next_id);
                let newcomer =
                    super::node(&format!("n{}", self.next_id), 1 + node as u32 % 3, &self.play.terms);
                self.play.come_as(self.next_id, Node { spare: node > 4, ..newcomer })
            }
            Act::Fail(node) => match id_of(&node).and_then(|id| Some((id, *self.running.get(&id)?))) {
                Some((id, generation)) => {
                    self.mishap = true;
                    self.stopping.insert(id);
                    let rank = self.play.fleet.seats_of(NodeId(id)).start;
                    let orders = self.play.failed(id, generation, rank);
                    self.obey(orders);
                    self.running.remove(&id);
                    self.play.ended(id, generation, Some(failure(rank)))
                }
                None => Vec::new(),
            },
            Act::Finish(node) => match id_of(&node) {
                Some(id) => self.finish(id),
                None => Vec::new(),
            },
            Act::Vanish(node) => match id_of(&node) {
                Some(id) => {
                    self.mishap |= self.running.contains_key(&id);
                    self.forget(id);
                    self.play.gone(id)
                }
                None => Vec::new(),
            },
            Act::FallSilent(node) => {
                if let Some(id) = id_of(&node) {
                    // Its workers end in some way that nobody hears of.
                    self.mishap |= self.running.remove(&id).is_some();
                    self.play.beating.retain(|here| here.0 != id);
                }
                Vec::new()
            }
            Act::Leave(node) | Act::Quit(node) => match id_of(&node) {
                Some(id) if matches!(act, Act::Leave(_)) => {
                    self.play.said(id, FromAgent::Leave { signal: 15 })
                }
                Some(id) => self.play.said(id, FromAgent::Quit { signal: 2 }),
                None => Vec::new(),
            },
            Act::InPlace(yes) => match self.last {
                Some(generation) => self.play.heed(Event::InPlace(Generation(generation), yes)),
                None => Vec::new(),
            },
            Act::Lose(node) => match id_of(&node)
                .filter(|id| self.play.beating.contains(&NodeId(*id)))
                .and_then(|id| Some((id, *self.running.get(&id)?)))
            {
                Some((id, generation)) => {
                    self.mishap = true;
                    self.lost.push(id);
                    let rank = self.play.fleet.seats_of(NodeId(id)).start;
                    let generation = Generation(generation);
                    self.play.said(id, FromAgent::Lost { generation, failure: failure(rank) })
                }
                None => Vec::new(),
            },
            Act::Succeed => {
                let standing = self.play.fleet.standing(self.play.at());
                self.succeed(standing)
            }
            Act::Interrupt(what, node, told) => self.interrupt(what, node, told),
            Act::Pass(ms) => self.play.pass(ms),
            Act::Come(_) => Vec::new(),
        };
        self.obey(orders);
    }

    fn interrupt(&mut self, what: u8, node: u64, told: bool) -> Vec<Order> {
        let before = self.play.fleet.standing(self.play.at());
        let id = self.ids.get(&node).copied().filter(|id| self.here.contains(id));
        let beats = id.filter(|id| self.play.beating.contains(&NodeId(*id)));
        let runs = beats.and_then(|id| Some((id, Generation(*self.running.get(&id)?))));
        // What follows goes unheard.
        let mut asks = None;
        match (what, id, runs) {
            (0, _, Some((id, generation))) => {
                self.mishap = true;
                self.lost.push(id);
                let rank = self.play.fleet.seats_of(NodeId(id)).start;
                self.play.said(id, FromAgent::Lost { generation, failure: failure(rank) });
            }
            (1, Some(id), _) => {
                self.mishap |= self.running.contains_key(&id);
                self.forget(id);
                self.play.gone(id);
            }
            (2, None, _) => {
                self.next_id += 1;
                self.ids.insert(node, self.next_id);
                self.here.push(self.next_id);
                self.play.come(self.next_id, 1 + node as u32 % 3);
            }
            (3, _, Some((id, _))) => {
                asks = Some(id);
                self.play.said(id, FromAgent::Quit { signal: 2 });
            }
            _ => {}
        }
        if told {
            let counted = self.play.fleet.restarts.count;
            assert!(counted <= self.restarts + 1);
            self.restarts = counted;
        }
        let standing = if told { self.play.fleet.standing(self.play.at()) } else { before };
        let mut orders = self.succeed(standing);
        if let Some(id) = asks.filter(|id| self.here.contains(id) && !self.over) {
            orders.extend(self.play.said(id, FromAgent::Quit { signal: 2 }));
        }
        orders
    }

    /// Where nobody is left who could lead, the run is over.
    fn succeed(&mut self, standing: phalanx_job::Standing) -> Vec<Order> {
        let now = self.play.at();
        let is_numbered = |number: &u32| standing.nodes.iter().any(|node| node.number == Some(*number));
        let terms = self.play.terms.clone();
        let standby = |id: u64| node(&format!("n{id}"), 1, &terms).standby;
        // One that stands by knows its number as it knows how the run stands, and one that hasn't heard that it was taken in has some.
        let number = |id: u64| match (self.last_numbers.get(&id), standing.at(standby(id))) {
            (Some(number), _) => Some(*number).filter(is_numbered),
            (None, Some(known)) if known.number < Some(FIRST_SPARE) => {
                known.number.filter(|_| known.node.spare).map(|_| FIRST_SPARE + 99)
            }
            (None, known) => known?.number,
        };
        // Their numbers as they know them.
        let mut numbered: Vec<(u32, u64)> = self
            .here
            .iter()
            .filter(|id| self.play.beating.contains(&NodeId(**id)))
            .filter_map(|id| Some((number(*id)?, *id)))
            .collect();
        numbered.sort_unstable();
        let ([(leader, leads), heirs @ ..], false) = (&numbered[..], self.play.fleet.is_over()) else {
            self.over = true;
            return Vec::new();
        };
        let Some((own, _)) = heirs.first() else {
            self.over = true;
            return Vec::new();
        };
        self.mishap |= self.running.contains_key(leads);
        self.forget(*leads);
        let mut call = RollCall::new(standing.clone(), *own, BTreeSet::from([*leader]), now);
        for (number, id) in heirs {
            let running = self.running.get(id).map(|generation| Generation(*generation));
            let seats = running.map_or(0..0, |_| self.play.fleet.seats_of(NodeId(*id)));
            let back = Return {
                number: *number,
                standby: standby(*id),
                generation: running.or(self.last.map(Generation)).unwrap_or_default(),
                workers: seats.map(Rank).collect(),
                standing: standing.clone(),
            };
            call.heed(Event::Said(NodeId(*id), FromAgent::Return(Box::new(back))));
        }
        if call.verdict(now) != Verdict::Lead {
            // Too many are silent.
            self.over = true;
            return Vec::new();
        }
        let silent: Vec<u64> =
            self.here.iter().copied().filter(|id| !self.play.beating.contains(&NodeId(*id))).collect();
        silent.into_iter().for_each(|id| self.forget(id));
        let (fleet, mut orders) = call.lead(self.play.terms.clone(), self.play.fleet.patience, now, 0);
        let before = std::mem::replace(&mut self.play.fleet, fleet);
        for id in self.here.clone() {
            let member = before.members.get(&NodeId(id)).map(|member| &member.node);
            let Some(node) = member.or_else(|| before.spares.node(NodeId(id))) else {
                // It has left.
                self.forget(id);
                continue;
            };
            if numbered.iter().all(|(_, known)| *known != id) {
                orders.extend(self.play.said(id, FromAgent::Join(node.clone())));
            }
        }
        for id in self.lost.clone() {
            let (generation, rank) = (Generation(self.running[&id]), before.seats_of(NodeId(id)).start);
            orders.extend(self.play.said(id, FromAgent::Lost { generation, failure: failure(rank) }));
        }
        orders
    }

    /// An agent that has lost a worker was told what to do about it, or that all are to stop.
    fn nobody_waits_in_vain(&mut self) {
        let stops = matches!(self.play.fleet.phase, Phase::Stopping(_) | Phase::Over);
        assert!(stops || self.over || self.lost.is_empty(), "{:?} wait", self.lost);
        self.lost.clear();
        if let Phase::Stopping(_) = self.play.fleet.phase {
            let beats = |id: &&u64| self.play.beating.contains(&NodeId(**id));
            let mut running = self.running.keys().filter(beats);
            assert!(self.over || running.all(|id| self.stopping.contains(id)), "some never stop");
        }
    }

    fn finish(&mut self, id: u64) -> Vec<Order> {
        let Some(generation) = self.running.remove(&id) else { return Vec::new() };
        self.play.ended(id, generation, None)
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]
    #[test]
    fn whatever_happens_there_is_one_generation_at_a_time_and_an_end(
        least in 1..4u32, more in 0..3u32, spares in 0..3u32, max_restarts in 0..4u32, others_come in any::<bool>(),
        acts in acts(),
    ) {
        let mut play = Play::with_spares(least, least + more, spares, max_restarts);
        play.fleet.patience.anew = (!others_come).then_some(Duration::from_millis(ANEW));
        let mut world = World {
            play, running: BTreeMap::new(), here: Vec::new(), next_id: 0, ids: BTreeMap::new(), last: None,
            last_numbers: BTreeMap::new(), restarts: 0, stopping: BTreeSet::new(), lost: Vec::new(), mishap: false, over: false,
        };
        for act in acts {
            world.act(act);
            world.nobody_waits_in_vain();
            assert!(!world.play.fleet.has_place(world.play.at()) || world.play.fleet.spares.count() == 0, "a spare is left out");
            if world.over {
                return Ok(());
            }
        }
        // When nothing happens any more but that workers end, the run does.
        for _ in 0..1000 {
            if let Some(id) = world.running.keys().next().copied() {
                let orders = world.finish(id);
                world.obey(orders);
            }
            if !world.over {
                let orders = world.play.pass(1000);
                world.obey(orders);
            }
            if world.over {
                break;
            }
        }
        assert!(world.over, "it doesn't end: {:?}", world.play.fleet);
    }
}
