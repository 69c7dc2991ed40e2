//! Whether the nodes that are left may go on, while others may be alive elsewhere.

use super::{CUT, Fleet, Member, NodeId, Order, Phase, Silent, Stopping};
use phalanx_job::{EndWhy, StopWhy};
use std::net::SocketAddr;
use std::time::Instant;

impl Fleet {
    pub(super) fn find_silent(&mut self, now: Instant, todo: &mut Vec<Order>) {
        let silence = self.patience.silence;
        let is_silent = |member: &Member| now.saturating_duration_since(member.heard) >= silence;
        let silent: Vec<NodeId> =
            self.members.iter().filter(|(_, member)| is_silent(member)).map(|(id, _)| *id).collect();
        // Those first that stand by: nobody is done without for one that isn't there either.
        for id in self.spares.silent(now, silence).into_iter().chain(silent) {
            todo.push(Order::Drop(id));
            self.count_silent(now, id);
            self.gone(now, id, format!("gave no sign of life for {:.1} s", silence.as_secs_f64()), todo);
        }
    }

    /// This node may be alive elsewhere.
    pub(super) fn count_silent(&mut self, now: Instant, id: NodeId) {
        let known = self.members.get(&id).filter(|member| !member.leaves);
        let known = known.map(|member| (member.node.standby, member.heard, member.numbered));
        // With its number it was told of all others that have one.
        let silent = known.or_else(|| self.spares.known(id)).and_then(|(standby, heard, numbered)| {
            Some(Silent { standby, found: now, knew_at: heard.max(numbered?) })
        });
        self.silent.extend(silent);
    }

    /// Whoever is left with less than half of the nodes doesn't go on: the others may do so without these.
    pub(super) fn find_cut(&mut self, now: Instant, todo: &mut Vec<Order>) {
        self.silent.retain(|silent| now.saturating_duration_since(silent.found) < CUT);
        let Some(cut_at) = self.silent.iter().map(|silent| silent.knew_at).min() else { return };
        // Those that fell silent may not know who has come since.
        let members = self.members.values().filter_map(|member| member.numbered);
        let here = members.chain(self.spares.numbered()).filter(|numbered| *numbered <= cut_at).count();
        let (here, silent) = (here as u32, self.silent.len() as u32);
        if here >= silent {
            return;
        }
        let why = StopWhy::CutOff(here, silent);
        match &self.phase {
            Phase::Stopping(Stopping {
                why: StopWhy::CutOff(..) | StopWhy::Deposed(_) | StopWhy::Elsewhere(..),
                ..
            })
            | Phase::Elsewhere(_)
            | Phase::Over => {}
            Phase::Running | Phase::Stopping(_) => self.give_way(why, todo),
            Phase::Gathering(_) => self.end(EndWhy::CutOff { here, silent }, todo),
        }
    }

    /// A node has gone on without this coordinator, which must not go on as well.
    pub(super) fn depose(&mut self, id: NodeId, to: Option<(SocketAddr, u32)>, todo: &mut Vec<Order>) {
        let Some(member) = self.members.remove(&id) else { return };
        if let Some((address, term)) = to.filter(|(_, term)| *term > self.term) {
            return self.give_up(address, term, todo);
        }
        match &self.phase {
            Phase::Stopping(Stopping { why: StopWhy::Elsewhere(..), .. }) => {}
            Phase::Running | Phase::Stopping(_) => self.give_way(StopWhy::Deposed(member.node.host), todo),
            Phase::Gathering(_) => self.end(EndWhy::Deposed, todo),
            Phase::Elsewhere(_) | Phase::Over => {}
        }
    }

    /// Another coordinator leads this run from there. The nodes that are led from here go there, once their workers have ended.
    pub(super) fn give_up(&mut self, address: SocketAddr, term: u32, todo: &mut Vec<Order>) {
        if term <= self.term {
            return;
        }
        match &mut self.phase {
            Phase::Elsewhere(known) => (*known, self.term) = (address, term),
            Phase::Gathering(_) => self.send_elsewhere(address, term, todo),
            Phase::Stopping(Stopping { why: StopWhy::Elsewhere(known, since), .. }) if *since <= term => {
                (*known, *since) = (address, term);
            }
            Phase::Stopping(Stopping { why: StopWhy::Elsewhere(..), .. }) => {}
            Phase::Running | Phase::Stopping(_) => self.give_way(StopWhy::Elsewhere(address, term), todo),
            Phase::Over => {}
        }
    }

    /// Tells all nodes, which have no workers, where the run is led from.
    pub(super) fn send_elsewhere(&mut self, address: SocketAddr, term: u32, todo: &mut Vec<Order>) {
        todo.push(Order::Elsewhere(self.members_and_spares(), address));
        self.members.clear();
        self.spares.clear();
        (self.phase, self.term) = (Phase::Elsewhere(address), term);
    }

    /// Whether its workers end because others go on with the run.
    pub(super) fn gives_way(&self) -> bool {
        let Phase::Stopping(Stopping { why, .. }) = &self.phase else { return false };
        matches!(why, StopWhy::CutOff(..) | StopWhy::Deposed(_) | StopWhy::Elsewhere(..))
    }

    /// Ends all workers at once, as long as others may go on with the run: nothing that these still do is wanted.
    pub(super) fn give_way(&mut self, why: StopWhy, todo: &mut Vec<Order>) {
        let running = self.running(None).into_iter();
        todo.retain(|order| !matches!(order, Order::DoWithout(..) | Order::PartFrom(..)));
        todo.extend(running.map(|id| Order::Release(self.generation, id)));
        self.phase = Phase::Stopping(Stopping { why, failures: Vec::new(), lost: Vec::new() });
    }
}
