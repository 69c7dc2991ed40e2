//! Nodes that stand by, and take the places of others.

use super::{Fleet, NodeId, Order, Phase};
use phalanx_job::{FromAgent, Node, Stage};
use phalanx_wire::Generation;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

/// Those that stand by, the first to come first.
#[derive(Debug, Default)]
pub(super) struct Spares(BTreeMap<NodeId, Spare>);

#[derive(Debug)]
struct Spare {
    node: Node,
    heard: Instant,
}

impl Spares {
    pub(super) fn count(&self) -> usize {
        self.0.len()
    }

    pub(super) fn has(&self, id: NodeId) -> bool {
        self.0.contains_key(&id)
    }

    /// What each of them said of itself.
    #[cfg(test)]
    pub(super) fn node(&self, id: NodeId) -> Option<&Node> {
        self.0.get(&id).map(|spare| &spare.node)
    }

    /// Where their agents listen.
    pub(super) fn addresses(&self) -> Vec<SocketAddr> {
        self.0.values().map(|spare| spare.node.standby).collect()
    }

    /// The one whose agent listens there.
    pub(super) fn at(&self, standby: SocketAddr) -> Option<NodeId> {
        self.0.iter().find(|(_, spare)| spare.node.standby == standby).map(|(id, _)| *id)
    }

    pub(super) fn add(&mut self, now: Instant, id: NodeId, node: Node) {
        self.0.insert(id, Spare { node, heard: now });
    }

    /// Gives whether it was one.
    pub(super) fn remove(&mut self, id: NodeId) -> bool {
        self.0.remove(&id).is_some()
    }

    pub(super) fn clear(&mut self) {
        self.0.clear();
    }

    /// Nothing was heard for so long, since nobody listened.
    pub(super) fn make_up_for(&mut self, missed: Duration) {
        self.0.values_mut().for_each(|spare| spare.heard += missed);
    }

    /// When the next of them is silent, if nothing is heard until then.
    pub(super) fn silent_at(&self, silence: Duration) -> Option<Instant> {
        self.0.values().map(|spare| spare.heard + silence).min()
    }

    /// Gives up those that are silent by now.
    pub(super) fn drop_silent(&mut self, now: Instant, silence: Duration, todo: &mut Vec<Order>) {
        self.0.retain(|id, spare| {
            let hears = now.saturating_duration_since(spare.heard) < silence;
            if !hears {
                todo.push(Order::Drop(*id));
            }
            hears
        });
    }

    /// One of them says something.
    pub(super) fn said(&mut self, now: Instant, id: NodeId, said: &FromAgent, todo: &mut Vec<Order>) {
        let Some(spare) = self.0.get_mut(&id) else { return };
        spare.heard = now;
        match said {
            // Nobody misses it.
            FromAgent::Leave { .. } | FromAgent::Quit { .. } => {
                self.remove(id);
                todo.push(Order::Farewell(id));
            }
            FromAgent::Moved { .. } => _ = self.remove(id),
            _ => {}
        }
    }
}

impl Fleet {
    /// Puts spares where nodes are missing, unless the run is as good as over.
    pub(super) fn call_spares(&mut self, now: Instant, todo: &mut Vec<Order>) {
        while self.has_place(now) {
            let Some((id, spare)) = self.spares.0.pop_first() else { return };
            todo.push(Order::Warn(format!("{} comes in for a node that is missing", spare.node.host)));
            self.take_in(now, id, spare.node, todo);
        }
    }

    /// Whether one more node could take part now.
    pub(super) fn has_place(&self, now: Instant) -> bool {
        let is_open = match self.phase {
            Phase::Gathering(_) => now >= self.spares_called_at(),
            Phase::Running => self.members.values().all(|member| member.stage != Stage::Done),
            // Those that are left come to the next generation, if there is one.
            Phase::Stopping(_) | Phase::Elsewhere(_) | Phase::Over => false,
        };
        is_open && self.members.len() < self.terms.most as usize
    }

    /// When those that stand by take part in a run that hasn't begun: others come first, as long as they may come together.
    pub(super) fn spares_called_at(&self) -> Instant {
        let waits = if self.generation == Generation(0) { self.patience.last_call } else { Duration::ZERO };
        self.began.0 + waits
    }

    pub(super) fn members_and_spares(&self) -> Vec<NodeId> {
        self.members.keys().chain(self.spares.0.keys()).copied().collect()
    }

    /// How many nodes there are for the places of those that stay, and of those that are missing.
    pub(super) fn staying_or_spare(&self) -> usize {
        self.staying() + self.spares.count()
    }
}
