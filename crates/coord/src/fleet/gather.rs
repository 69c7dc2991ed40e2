//! What comes between two generations: whether there is another, who is waited for, and its beginning.

use super::{Fleet, Gathering, Order, Phase, Wait, blame, seats};
use phalanx_job::{EndWhy, Setback, Stage, StopWhy, Terms};
use phalanx_wire::Generation;
use seats::Seated;
use std::collections::BTreeSet;
use std::time::{Duration, Instant};

impl Fleet {
    /// All workers of a generation that was stopped have ended.
    pub(super) fn conclude(&mut self, now: Instant, todo: &mut Vec<Order>) {
        let since = Gathering { since: now, last_call: Some(now) };
        let Phase::Stopping(stopping) = std::mem::replace(&mut self.phase, Phase::Gathering(since)) else {
            return;
        };
        let left = self.members.iter().filter(|(_, member)| member.leaves);
        todo.extend(left.map(|(id, _)| Order::Farewell(*id)));
        self.members.retain(|_, member| !member.leaves);
        for member in self.members.values_mut() {
            member.stage = Stage::Ready;
        }
        self.generation.0 += 1;
        match stopping.why {
            StopWhy::Asked(_, signal) => return self.end(EndWhy::Asked { signal }, todo),
            StopWhy::CutOff(here, silent) => return self.end(EndWhy::CutOff { here, silent }, todo),
            StopWhy::Deposed(_) => return self.end(EndWhy::Deposed, todo),
            StopWhy::Elsewhere(address, term) => return self.send_elsewhere(address, term, todo),
            // Whoever fails while others make room is not started again either.
            _ if self.drained => {
                // Nothing is started again for it, so it is told at the end alone.
                let cause = stopping.lost.into_iter().next();
                let cause = cause.or_else(|| blame::first(&stopping.failures).cloned());
                let is_new = |cause: &Setback| !cause.is_after_stop() && !self.setbacks.contains(cause);
                let cause = cause.filter(is_new);
                self.setbacks.extend(cause);
                return self.end(EndWhy::Drained, todo);
            }
            _ => {}
        }
        self.call_spares(now, todo);
        let is_enough = self.members.len() >= self.least();
        let cause = match (stopping.lost.into_iter().next(), stopping.why) {
            (Some(_), _) if is_enough => None,
            (Some(loss), _) => Some(loss),
            (None, StopWhy::Failed(_)) => blame::first(&stopping.failures).cloned(),
            (None, _) => None,
        };
        if let Some(cause) = cause {
            let restarts = self.restarts.anew(cause.is_of_a_lost_part());
            if cause.is_for_good() || restarts.count > self.terms.max_restarts as usize {
                let why = match self.patience.anew {
                    Some(_) if cause.is_of_a_node() => self.nodes_lost(Some(cause)),
                    _ => EndWhy::Failed(cause),
                };
                self.end(why, todo);
            } else {
                self.restarts = restarts;
                self.setbacks.push(cause);
            }
        }
        if !self.is_over() && !is_enough {
            self.tell_wait(now, todo);
        }
    }

    /// Begins a generation, or ends the run, if it is time.
    pub(super) fn gather(&mut self, now: Instant, todo: &mut Vec<Order>) {
        let (here, least, most) = (self.members.len(), self.least(), self.terms.most as usize);
        let (last_call, limit) = (self.patience.last_call, self.join_limit());
        let Phase::Gathering(gathering) = &mut self.phase else { return };
        if here < least {
            if gathering.last_call.take().is_some() {
                gathering.since = now;
            }
            let waited = now.saturating_duration_since(gathering.since);
            if waited < limit {
                return;
            }
            let why = match self.waits_for_known() {
                true => {
                    let lost = self.take_back_loss();
                    self.nodes_lost(lost)
                }
                false => EndWhy::TooFew { here: here as u32, seconds: waited.as_secs() },
            };
            return self.end(why, todo);
        }
        let until = *gathering.last_call.get_or_insert(now + last_call);
        if here == most || now >= until {
            self.begin(now, todo);
        }
    }

    pub(super) fn begin(&mut self, now: Instant, todo: &mut Vec<Order>) {
        let seated = self.members.iter().map(|(id, member)| Seated {
            id: *id,
            node: &member.node,
            number: member.number,
        });
        let seats = seats::deal(self.generation, self.restarts.count as u32, seated.collect());
        let at = self.since_start(now);
        let world_size = seats.first().map_or(0, |(_, seat)| seat.world_size);
        self.started = (0..world_size).map(|rank| (rank, at)).collect();
        (self.ranks, self.coming) = (world_size, BTreeSet::new());
        self.restarts = self.restarts.begun();
        for (id, seat) in &seats {
            let member = self.members.get_mut(id).expect("a seat is a member's");
            let seats = seat.first_rank..seat.first_rank + member.node.workers;
            (member.number, member.stage, member.seats) = (Some(seat.node), Stage::Running, seats);
            member.numbered.get_or_insert(now);
            self.known.insert(member.node.standby);
        }
        self.spares.known_from(now);
        (self.phase, self.in_place, self.membership) = (Phase::Running, false, None);
        self.drained = false;
        todo.push(Order::Begin(self.generation, seats));
    }

    pub(super) fn tell_wait(&self, now: Instant, todo: &mut Vec<Order>) {
        let here: Vec<String> = self.members.values().map(|member| member.node.host.clone()).collect();
        let Phase::Gathering(gathering) = &self.phase else { return };
        let Terms { least, most, .. } = self.terms;
        if here.len() == most as usize {
            return;
        }
        let left = match here.len() {
            n if n < self.least() => (gathering.since + self.join_limit()).saturating_duration_since(now),
            _ => gathering.last_call.map_or(self.patience.last_call, |at| at.saturating_duration_since(now)),
        };
        todo.push(Order::Wait(Wait { here, least, most, left }));
    }

    /// How long the least number is waited for.
    pub(super) fn join_limit(&self) -> Duration {
        self.patience.anew.filter(|_| self.waits_for_known()).unwrap_or(self.patience.join)
    }

    /// Whether only nodes can come that were there before.
    fn waits_for_known(&self) -> bool {
        self.patience.anew.is_some() && self.generation > Generation(0)
    }

    /// The loss of a node for which all were to begin again, if that was the last: they don't.
    fn take_back_loss(&mut self) -> Option<Setback> {
        let generation = self.generation;
        let is_last =
            |setback: &mut Setback| setback.is_of_a_node() && setback.generation.0 + 1 == generation.0;
        let loss = self.setbacks.pop_if(is_last);
        self.restarts.count -= usize::from(loss.is_some());
        loss
    }

    fn nodes_lost(&self, lost: Option<Setback>) -> EndWhy {
        EndWhy::NodesLost { here: self.members.len() as u32, lost }
    }

    pub(super) fn least(&self) -> usize {
        self.terms.least as usize
    }
}
