//! Nodes and workers that come and are lost while the others go on.

use super::{Fleet, NodeId, Order, Phase, is_of};
use phalanx_job::{Mishap, Node, Seat, Stage, WorkerFailure};
use std::ops::Range;
use std::time::{Duration, Instant};

impl Fleet {
    /// Whether the workers that run go on when some are lost, and with others that come.
    pub(super) fn goes_on(&self) -> bool {
        let all_run = self.members.values().all(|member| member.stage == Stage::Running);
        matches!(self.phase, Phase::Running) && self.in_place && all_run
    }

    /// Whether none of a node's workers has come in yet.
    pub(super) fn is_coming(&self, id: NodeId) -> bool {
        self.members[&id].seats.clone().all(|rank| self.coming.contains(&rank))
    }

    /// The run is as good as over, and who comes now would wait for those that have ended.
    pub(super) fn release_late_comers(&mut self, todo: &mut Vec<Order>) {
        let is_late = |id: &NodeId| self.runs(*id, self.generation) && self.is_coming(*id);
        let late: Vec<NodeId> = self.members.keys().copied().filter(is_late).collect();
        todo.extend(late.into_iter().map(|id| Order::Release(self.generation, id)));
        self.coming.clear();
    }

    /// A node whose workers fail before any of them has come in is no reason to stop the others.
    pub(super) fn do_without(&mut self, id: NodeId, failure: &WorkerFailure, todo: &mut Vec<Order>) {
        let Some(member) = self.members.remove(&id) else { return };
        let why = failure.reported.as_ref().map_or(String::new(), |reported| format!(": {reported}"));
        let when = if failure.for_good { ", and no other is started" } else { " before it came in" };
        let reason = format!("rank {} {}{when}{why}", failure.rank, failure.how);
        todo.push(Order::Warn(format!("on {}: {reason}; the others go on", member.node.host)));
        todo.push(Order::Refuse(id, reason));
        todo.push(Order::DoWithout(self.generation, member.seats));
    }

    /// Has those that are left, which others are lost for and which are to end because of that, go on without these until they do: they
    /// would wait in vain for who is lost, and keep nothing. Not where others lead the run on: nothing that these still do is wanted then.
    pub(super) fn part_from(&self, seats: Range<u32>, todo: &mut Vec<Order>) {
        if self.in_place && !self.gives_way() && !self.running(None).is_empty() {
            todo.push(Order::PartFrom(self.generation, seats));
        }
    }

    /// A worker was lost that the others of its node go on without.
    pub(super) fn lost(&mut self, now: Instant, id: NodeId, failure: WorkerFailure, todo: &mut Vec<Order>) {
        let member = &self.members[&id];
        if member.leaves {
            return;
        }
        let (rank, at) = (failure.rank, self.since_start(now));
        let started = self.started.get(&rank.0).copied().unwrap_or_default();
        let lost_at = at.saturating_sub(Duration::from_millis(failure.idle_ms));
        let is_known = self.setbacks.iter().any(|setback| is_of(setback, &failure, member));
        // Another coordinator has counted it, and couldn't say so any more.
        // Nor is another started where it would come to the same.
        let is_free = is_known || failure.for_good;
        let restarts = match failure.part_lost {
            _ if is_free => self.restarts,
            true => self.restarts.with_part_lost(started, at),
            false => self.restarts.with(started, lost_at, at),
        };
        if !self.goes_on() || restarts.count > self.terms.max_restarts as usize {
            let was_running = matches!(self.phase, Phase::Running);
            self.failed(now, id, failure, todo);
            if let Some(Order::Stop(_, nodes, _)) = todo.last_mut().filter(|_| was_running) {
                // Its agent waits to be told.
                nodes.push(id);
            }
            return;
        }
        if !is_known {
            self.setbacks.push(self.setback(now, member, Mishap::Worker(failure)));
        }
        self.restarts = restarts;
        self.started.insert(rank.0, at);
        self.coming.insert(rank.0);
        todo.push(Order::Replace(self.generation, id, rank, restarts.count as u32));
    }

    /// Takes a node that has come into the generation that runs.
    pub(super) fn enlarge(&mut self, now: Instant, id: NodeId, todo: &mut Vec<Order>) {
        let taken: Vec<u32> = self.members.values().filter_map(|member| member.number).collect();
        let wanted = self.members[&id].node.node_rank.into_iter();
        let number = wanted.chain(0..).find(|number| !taken.contains(number)).unwrap_or_default();
        // None that anybody has had: whoever had it may be late.
        let ranks = self.ranks..self.ranks + self.members[&id].node.workers;
        self.ranks = ranks.end;
        self.coming.extend(ranks.clone());
        let Node { workers, role, address, port, .. } = &self.members[&id].node;
        let here = || self.members.values().map(|member| &member.node);
        let role_world_size = here().filter(|node| node.role == *role).map(|node| node.workers).sum();
        let seat = Seat {
            generation: self.generation,
            restarts: self.restarts.count as u32,
            node: number,
            nodes: self.members.len() as u32,
            first_rank: ranks.start,
            // Ranks go further than there are workers where nodes are gone.
            world_size: here().map(|node| node.workers).sum::<u32>().max(ranks.end),
            first_role_rank: role_world_size - workers,
            role_world_size,
            // Who is rank 0 of those that run changes as they come and go; they find each other by their coordinator.
            master: (address.clone(), *port),
        };
        let Some(member) = self.members.get_mut(&id) else { return };
        (member.number, member.stage, member.seats) = (Some(number), Stage::Running, ranks.clone());
        member.numbered.get_or_insert(now);
        self.known.insert(member.node.standby);
        let at = self.since_start(now);
        self.started.extend(ranks.map(|rank| (rank, at)));
        todo.push(Order::Enlarge(self.generation, id, seat));
    }
}
