//! What the next coordinator has to know, and how it goes on from there.

use super::{Event, Fleet, Left, Member, NodeId, Order, Patience, Phase, Stopping};
use phalanx_job::{FIRST_SPARE, NodeStanding, Return, Stage, Standing, Terms};
use phalanx_wire::Rank;
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

/// How many coordinators that were lost are told who leads, should they go on after all.
const FORMER: usize = 8;

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
            former: self.former.clone(),
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
            nodes: self.members.values().map(node).chain(self.spares.standing()).collect(),
        }
    }

    /// Goes on with what another coordinator has left.
    pub(crate) fn resume(
        terms: Terms,
        patience: Patience,
        left: &Legacy<'_>,
        now: Instant,
        clock_ms: u64,
    ) -> (Fleet, Vec<Order>) {
        let Standing { elapsed_ms, term, generation, .. } = *left.standing;
        let mut fleet = Fleet::new(terms, patience, now, clock_ms);
        fleet.began = now.checked_sub(Duration::from_millis(elapsed_ms)).unwrap_or(now);
        (fleet.term, fleet.generation) = (term + 1, generation);
        fleet.remember(left.standing);
        let ids = fleet.seat_members(left, now);
        fleet.phase = phase(left.standing, &ids).unwrap_or(fleet.phase);
        let mut todo = Vec::new();
        let keeps_steps = fleet.in_place && matches!(fleet.phase, Phase::Stopping(_)) && !fleet.gives_way();
        // Workers that end in place meet once more, and keep what they have.
        if matches!(fleet.phase, Phase::Running) || keeps_steps {
            todo.push(Order::Resume(generation, fleet.workers_of(left.back)));
        }
        let missed = left.back.iter().filter(|(id, back)| {
            let member = fleet.members.get(id);
            back.generation != generation && member.is_some_and(|member| member.stage == Stage::Running)
        });
        let missed: Vec<NodeId> = missed.map(|(id, _)| *id).collect();
        // Before anything is found that all who run are told to stop for.
        fleet.never_began(&missed);
        for (number, id) in &ids {
            let has_ended = left.ended.contains(number);
            if left.find(*number).is_none() {
                let how = if has_ended { "its agent has ended" } else { "it gives no sign of life" };
                fleet.gone(now, *id, how.into(), &mut todo);
            }
        }
        fleet.say_again(None, &mut todo);
        fleet.missed(now, &missed, &mut todo);
        todo.extend(fleet.heed(now, Event::Tick));
        (fleet, todo)
    }

    /// Takes over what isn't about single nodes.
    fn remember(&mut self, standing: &Standing) {
        (self.in_place, self.ranks, self.drained) = (standing.in_place, standing.ranks, standing.drained);
        self.coming = standing.coming.iter().copied().collect();
        self.membership.clone_from(&standing.membership);
        self.restarts.count = standing.restarts as usize;
        self.setbacks.clone_from(&standing.setbacks);
        let last = standing.leader().map(|node| node.node.standby);
        self.former = standing.former.iter().copied().chain(last).collect();
        self.former.drain(..self.former.len().saturating_sub(FORMER));
    }

    /// Takes over the nodes; gives who is who, by number.
    fn seat_members(&mut self, left: &Legacy<'_>, now: Instant) -> BTreeMap<u32, NodeId> {
        let mut ids = BTreeMap::new();
        for known in &left.standing.nodes {
            let Some(number) = known.number else { continue };
            let mut node = known.node.clone();
            node.leads = number == left.leader;
            let found = left.find(number);
            if number >= FIRST_SPARE {
                // Nobody misses one that isn't there.
                found.into_iter().for_each(|id| self.spares.add(now, id, node.clone(), Some(number)));
                self.known.insert(node.standby);
                continue;
            }
            // One that isn't there has no connection, and so no number of one.
            let id = found.unwrap_or(NodeId(u64::MAX - u64::from(number)));
            ids.insert(number, id);
            let member = Member {
                node,
                heard: now,
                number: Some(number),
                // Whoever comes back knows of all of them.
                numbered: Some(self.began),
                seats: known.seats.clone(),
                stage: known.stage,
                leaves: known.leaves,
            };
            self.known.insert(member.node.standby);
            self.members.insert(id, member);
        }
        ids
    }

    /// The workers of a generation that runs.
    fn workers_of(&self, back: &[(NodeId, Return)]) -> Left {
        let live = back.iter().flat_map(|(_, back)| &back.workers).map(|Rank(rank)| *rank);
        Left {
            membership: self.membership.clone(),
            seats: self.members.values().flat_map(|member| member.seats.clone()).collect(),
            // Those that were started in the place of others were in no membership.
            live: live.filter(|rank| !self.coming.contains(rank)).collect(),
            in_place: self.in_place,
        }
    }
}

/// What a coordinator has left, and who has come to the next.
pub(crate) struct Legacy<'a> {
    pub(crate) standing: &'a Standing,
    /// The number of the node that leads now.
    pub(crate) leader: u32,
    /// The nodes whose agents are known to have ended.
    pub(crate) ended: &'a BTreeSet<u32>,
    pub(crate) back: &'a [(NodeId, Return)],
}

impl Legacy<'_> {
    /// The connection of the node that had this number.
    fn find(&self, number: u32) -> Option<NodeId> {
        let known = self.standing.nodes.iter().find(|known| known.number == Some(number))?;
        let is_it =
            |(_, back): &&(NodeId, Return)| (back.number, back.standby) == (number, known.node.standby);
        self.back.iter().find(is_it).map(|(id, _)| *id)
    }
}

/// What was done with the generation; none if it is to begin.
fn phase(standing: &Standing, ids: &BTreeMap<u32, NodeId>) -> Option<Phase> {
    match &standing.phase {
        phalanx_job::Phase::Gathering => None,
        phalanx_job::Phase::Running => Some(Phase::Running),
        phalanx_job::Phase::Stopping { why, failures, lost } => {
            let id_of = |number: &u32| ids.get(number).copied().unwrap_or(NodeId(u64::MAX));
            let failures = failures.iter().map(|(number, setback)| (id_of(number), setback.clone()));
            let (why, lost) = (why.clone(), lost.clone());
            Some(Phase::Stopping(Stopping { why, failures: failures.collect(), lost }))
        }
    }
}
