//! Nodes that stand by, and take the places of others.

use super::{Fleet, NodeId, Order, Phase};
use phalanx_job::{FIRST_SPARE, FromAgent, Node, NodeStanding, Stage};
use phalanx_wire::Generation;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

/// Those that stand by, the first to come first.
#[derive(Debug, Default)]
pub(super) struct Spares {
    all: BTreeMap<NodeId, Spare>,
    /// How many numbers were given so far.
    numbers: u32,
}

#[derive(Debug)]
struct Spare {
    node: Node,
    heard: Instant,
    number: u32,
    /// Since when the others know of it; not before the run has begun.
    numbered: Option<Instant>,
}

impl Spares {
    pub(super) fn count(&self) -> usize {
        self.all.len()
    }

    pub(super) fn has(&self, id: NodeId) -> bool {
        self.all.contains_key(&id)
    }

    /// What each of them said of itself.
    #[cfg(test)]
    pub(super) fn node(&self, id: NodeId) -> Option<&Node> {
        self.all.get(&id).map(|spare| &spare.node)
    }

    /// The one whose agent listens there.
    pub(super) fn at(&self, standby: SocketAddr) -> Option<NodeId> {
        self.all.iter().find(|(_, spare)| spare.node.standby == standby).map(|(id, _)| *id)
    }

    /// One that has this number already is known to the others.
    pub(super) fn add(&mut self, now: Instant, id: NodeId, node: Node, number: Option<u32>) {
        let (numbered, next) = (number.map(|_| now), FIRST_SPARE.saturating_add(self.numbers));
        let number = number.unwrap_or(next);
        self.numbers = (number - FIRST_SPARE + 1).max(self.numbers);
        self.all.insert(id, Spare { node, heard: now, number, numbered });
    }

    /// The others know of all of them.
    pub(super) fn known_from(&mut self, now: Instant) {
        self.all.values_mut().for_each(|spare| _ = spare.numbered.get_or_insert(now));
    }

    /// It has another connection.
    pub(super) fn rename(&mut self, now: Instant, old: NodeId, id: NodeId) {
        if let Some(spare) = self.all.remove(&old) {
            self.all.insert(id, Spare { heard: now, ..spare });
        }
    }

    pub(super) fn remove(&mut self, id: NodeId) {
        self.all.remove(&id);
    }

    pub(super) fn clear(&mut self) {
        self.all.clear();
    }

    /// Nothing was heard for so long, since nobody listened.
    pub(super) fn make_up_for(&mut self, missed: Duration) {
        self.all.values_mut().for_each(|spare| spare.heard += missed);
    }

    /// When the next of them is silent, if nothing is heard until then.
    pub(super) fn silent_at(&self, silence: Duration) -> Option<Instant> {
        self.all.values().map(|spare| spare.heard + silence).min()
    }

    /// Those that are silent by now.
    pub(super) fn silent(&self, now: Instant, silence: Duration) -> Vec<NodeId> {
        let is_silent = |spare: &Spare| now.saturating_duration_since(spare.heard) >= silence;
        self.all.iter().filter(|(_, spare)| is_silent(spare)).map(|(id, _)| *id).collect()
    }

    /// Where it listens, when it was heard last, and since when the others know of it.
    pub(super) fn known(&self, id: NodeId) -> Option<(SocketAddr, Instant, Option<Instant>)> {
        self.all.get(&id).map(|spare| (spare.node.standby, spare.heard, spare.numbered))
    }

    /// Since when the others know of each.
    pub(super) fn numbered(&self) -> impl Iterator<Item = Instant> {
        self.all.values().filter_map(|spare| spare.numbered)
    }

    pub(super) fn standing(&self) -> impl Iterator<Item = NodeStanding> {
        self.all.values().map(|spare| NodeStanding {
            node: spare.node.clone(),
            number: spare.numbered.map(|_| spare.number),
            seats: 0..0,
            stage: Stage::Ready,
            leaves: false,
        })
    }
}

impl Fleet {
    /// Puts spares where nodes are missing, unless the run is as good as over.
    pub(super) fn call_spares(&mut self, now: Instant, todo: &mut Vec<Order>) {
        while self.has_place(now) {
            let Some((id, Spare { node, heard, .. })) = self.spares.all.pop_first() else { return };
            todo.push(Order::Warn(format!("{} comes in for a node that is missing", node.host)));
            self.take_in(heard, now, id, node, todo);
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
        self.began + waits
    }

    pub(super) fn members_and_spares(&self) -> Vec<NodeId> {
        self.members.keys().chain(self.spares.all.keys()).copied().collect()
    }

    /// How many nodes there are for the places of those that stay, and of those that are missing.
    pub(super) fn staying_or_spare(&self) -> usize {
        self.staying() + self.spares.count()
    }

    /// One that stands by says something.
    pub(super) fn said_by_spare(
        &mut self,
        now: Instant,
        id: NodeId,
        said: &FromAgent,
        todo: &mut Vec<Order>,
    ) {
        if let Some(spare) = self.spares.all.get_mut(&id) {
            spare.heard = now;
        }
        match said {
            FromAgent::Leave { .. } | FromAgent::Quit { .. } => {
                self.spare_goes(id, "leaves", todo);
                todo.push(Order::Farewell(id));
            }
            FromAgent::Moved { .. } => self.spares.remove(id),
            _ => {}
        }
    }

    /// One that stands by does so no longer, and nobody takes its place.
    pub(super) fn spare_goes(&mut self, id: NodeId, how: &str, todo: &mut Vec<Order>) {
        let Some(spare) = self.spares.all.remove(&id) else { return };
        let left = match self.spares.count() {
            0 => "none stands by now".to_owned(),
            1 => "one stands by now".to_owned(),
            n => format!("{n} stand by now"),
        };
        todo.push(Order::Warn(format!("{}, which stood by, {how}; {left}", spare.node.host)));
    }
}
