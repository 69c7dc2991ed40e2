//! What the next coordinator has to know, and how it goes on from there.

use super::{Event, Fleet, Left, Member, NodeId, Order, Patience, Phase, Stopping};
use phalanx_job::{NodeStanding, Return, Stage, Standing, Terms};
use phalanx_wire::Rank;
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

impl Fleet {
    /// How the run stands. Its version is for who tells it.
    pub fn standing(&self, now: Instant) -> Standing {
        let number_of = |id: &NodeId| self.members.get(id).and_then(|member| member.number);
        let phase = match &self.phase {
            Phase::Gathering(_) | Phase::Elsewhere(_) | Phase::Over => phalanx_job::Phase::Gathering,
            Phase::Running => phalanx_job::Phase::Running,
            Phase::Stopping(Stopping { why, failures, lost }) => {
                let failures =
                    failures.iter().map(|(id, setback)| (number_of(id).unwrap_or_default(), setback.clone()));
                let (why, lost) = (why.clone(), lost.clone());
                phalanx_job::Phase::Stopping { why, failures: failures.collect(), lost }
            }
        };
        let node = |member: &Member| NodeStanding {
            node: member.node.clone(),
            number: member.number,
            seats: member.seats.clone(),
            stage: member.stage,
            leaves: member.leaves,
        };
        Standing {
            term: self.term,
            version: 0,
            elapsed_ms: self.since_start(now).as_millis() as u64,
            generation: self.generation,
            phase,
            in_place: self.in_place,
            ranks: self.ranks,
            coming: self.coming.iter().copied().collect(),
            membership: self.membership.clone(),
            drained: self.drained,
            restarts: self.restarts.count as u32,
            setbacks: self.setbacks.clone(),
            nodes: self.members.values().map(node).collect(),
        }
    }

    /// Goes on with what another coordinator has left, with those nodes that have come back to the one of this number: who hasn't
    /// is lost, as one whose agent is known to have ended or as one that is silent.
    pub(crate) fn resume(
        terms: Terms,
        patience: Patience,
        (standing, leader): (&Standing, u32),
        (ended, back): (&BTreeSet<u32>, &[(NodeId, Return)]),
        now: Instant,
        clock_ms: u64,
    ) -> (Fleet, Vec<Order>) {
        let elapsed = Duration::from_millis(standing.elapsed_ms);
        let mut fleet = Fleet::new(terms, patience, now, clock_ms);
        fleet.began = (now.checked_sub(elapsed).unwrap_or(now), clock_ms.saturating_sub(standing.elapsed_ms));
        (fleet.term, fleet.generation) = (standing.term + 1, standing.generation);
        (fleet.in_place, fleet.ranks) = (standing.in_place, standing.ranks);
        (fleet.coming, fleet.membership) =
            (standing.coming.iter().copied().collect(), standing.membership.clone());
        fleet.drained = standing.drained;
        fleet.restarts.count = standing.restarts as usize;
        fleet.setbacks.clone_from(&standing.setbacks);
        let mut todo = Vec::new();
        let mut lost = Vec::new();
        let (mut ids, mut strays) = (BTreeMap::new(), Vec::new());
        for (number, known) in standing.nodes.iter().filter_map(|known| Some((known.number?, known))) {
            let is_it = |(_, there): &&(NodeId, Return)| {
                (there.number, there.standby) == (number, known.node.standby)
            };
            let there = back.iter().find(is_it);
            let found = there.map(|(id, _)| *id);
            let missed = there.filter(|(_, there)| {
                known.stage == Stage::Running && there.generation != standing.generation
            });
            strays.extend(missed.map(|(id, _)| *id));
            // One that isn't there has no connection, and so no number of one.
            let id = found.unwrap_or(NodeId(u64::MAX - u64::from(number)));
            let how =
                if ended.contains(&number) { "its agent has ended" } else { "it gives no sign of life" };
            lost.extend(found.is_none().then_some((id, how)));
            ids.insert(number, id);
            let mut node = known.node.clone();
            node.leads = number == leader;
            let (number, seats) = (known.number, known.seats.clone());
            // Whoever comes back knows of all of them.
            let numbered = Some(fleet.began.0);
            let (stage, leaves) = (known.stage, known.leaves);
            let member = Member { node, heard: now, number, numbered, seats, stage, leaves };
            fleet.members.insert(id, member);
        }
        let id_of = |number: &u32| ids.get(number).copied().unwrap_or(NodeId(u64::MAX));
        fleet.phase = match &standing.phase {
            phalanx_job::Phase::Gathering => fleet.phase,
            phalanx_job::Phase::Running => Phase::Running,
            phalanx_job::Phase::Stopping { why, failures, lost } => {
                let failures = failures.iter().map(|(number, setback)| (id_of(number), setback.clone()));
                let (why, lost) = (why.clone(), lost.clone());
                Phase::Stopping(Stopping { why, failures: failures.collect(), lost })
            }
        };
        if matches!(fleet.phase, Phase::Running) {
            let seats = fleet.members.values().flat_map(|member| member.seats.clone()).collect();
            // Those that were started in the place of others were in no membership.
            let live = back.iter().flat_map(|(_, back)| &back.workers).map(|Rank(rank)| *rank);
            let live = live.filter(|rank| !fleet.coming.contains(rank)).collect();
            let (membership, in_place) = (fleet.membership.clone(), fleet.in_place);
            todo.push(Order::Resume(fleet.generation, Left { membership, seats, live, in_place }));
        }
        for (id, how) in lost {
            fleet.gone(now, id, how.into(), &mut todo);
        }
        fleet.say_again(None, &mut todo);
        fleet.missed(now, &strays, &mut todo);
        todo.extend(fleet.heed(now, Event::Tick));
        (fleet, todo)
    }
}

/// The numbers of the nodes that were led, which decide who leads them next.
pub(crate) fn numbers(standing: &Standing) -> BTreeSet<u32> {
    standing.nodes.iter().filter_map(|node| node.number).collect()
}
