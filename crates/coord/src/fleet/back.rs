//! Nodes that come back to the one who leads them, and what they may not have heard.

use super::{Fleet, Member, NodeId, Order, Phase, Stopping};
use phalanx_job::{Return, Stage, StopWhy};
use std::time::Instant;

impl Fleet {
    /// A node comes back whose connection was lost, or which took this coordinator for lost.
    pub(super) fn come_back(&mut self, now: Instant, id: NodeId, back: &Return, todo: &mut Vec<Order>) {
        let is_it =
            |member: &Member| member.number == Some(back.number) && member.node.standby == back.standby;
        if let Some(old) = self.spares.at(back.standby).filter(|_| back.stood_by()) {
            todo.push(Order::Drop(old));
            return self.spares.rename(now, old, id);
        }
        let Some(old) = self.members.iter().find(|(_, member)| is_it(member)).map(|(old, _)| *old) else {
            // One that never had a number here means another run, which began before this one and was led from this address.
            if !self.known.contains(&back.standby) {
                return todo.push(Order::Estrange(id));
            }
            return match back.newcomer() {
                Some(node) => self.join(now, id, node.clone(), todo),
                None => todo.push(Order::GoneOn(id)),
            };
        };
        todo.push(Order::Drop(old));
        let Some(mut member) = self.members.remove(&old) else { return };
        member.heard = now;
        self.members.insert(id, member);
        if let Phase::Stopping(Stopping { failures, .. }) = &mut self.phase {
            failures.iter_mut().filter(|(of, _)| *of == old).for_each(|(of, _)| *of = id);
        }
        self.say_again(Some(id), todo);
        if self.members[&id].stage == Stage::Running && back.generation != self.generation {
            self.missed(now, &[id], todo);
        }
    }

    /// These nodes were never told to start their workers of this generation.
    pub(super) fn missed(&mut self, now: Instant, nodes: &[NodeId], todo: &mut Vec<Order>) {
        self.never_began(nodes);
        let Some(first) = nodes.first().filter(|_| matches!(self.phase, Phase::Running)) else { return };
        let others = || self.members.iter().filter(|(id, _)| !nodes.contains(id));
        let others_run = others().all(|(_, member)| member.stage == Stage::Running);
        if !self.in_place || !others_run || others().next().is_none() {
            let why = StopWhy::Missed(self.members[first].node.host.clone());
            return self.stop(why, None, todo);
        }
        for id in nodes {
            if let Some(member) = self.members.get_mut(id) {
                member.number = None;
                todo.push(Order::DoWithout(self.generation, member.seats.clone()));
            }
            self.enlarge(now, *id, todo);
        }
    }

    /// These nodes have no workers of this generation.
    pub(super) fn never_began(&mut self, nodes: &[NodeId]) {
        for id in nodes {
            if let Some(member) = self.members.get_mut(id) {
                member.stage = Stage::Ready;
            }
        }
    }

    /// What the agents, or one of them, may not have heard of the end of a generation.
    pub(super) fn say_again(&self, only: Option<NodeId>, todo: &mut Vec<Order>) {
        let Phase::Stopping(Stopping { why, .. }) = &self.phase else { return };
        let nodes: Vec<NodeId> =
            self.running(None).into_iter().filter(|id| only.is_none_or(|only| only == *id)).collect();
        match why {
            StopWhy::CutOff(..) | StopWhy::Deposed(_) | StopWhy::Elsewhere(..) => {
                todo.extend(nodes.into_iter().map(|id| Order::Release(self.generation, id)));
            }
            _ if nodes.is_empty() => {}
            _ => todo.push(Order::Stop(self.generation, nodes, why.clone())),
        }
    }
}
