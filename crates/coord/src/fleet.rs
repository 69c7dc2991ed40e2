//! Which nodes a run has, and what follows from what happens to them: a state machine without I/O and without a clock.
//!
//! Invariants. F-ONE: a generation begins when no node that is heard of has workers of another. F-SEATS: it has between the
//! least and the largest number of nodes, whose ranks are dense when it begins, and no two workers are started with one; nodes
//! that stay keep their numbers. F-END: when nothing more
//! happens than that workers end and time passes, the run ends.
//!
//! A generation is a time in which the nodes and their workers stay the same. It begins when all nodes that may come are
//! there, or the least number is and the last call is over. It is stopped when a worker fails, when a node is lost, leaves or
//! comes; once no worker of it is left, the next one begins, or the run is over. Of two nodes that are there in two
//! generations both keep their numbers, where these are below the number of nodes.
//!
//! Where workers go on without those that are lost, and with others that come, the generation goes on too: a lost worker is
//! replaced, a lost node done without, one that comes taken in and one that leaves let go, and nobody else is stopped. Which
//! ranks they have among themselves then is not decided here.
//!
//! A failed worker costs a restart, and so do several that are lost at once. So does a lost node if fewer than the least number are left, and then others are waited
//! for, briefly where none come that weren't there before; otherwise the run goes on with those that there are. Who comes or leaves costs nothing, and where fewer than the least
//! number are left then, they wait for others, too.
//!
//! More nodes than the largest number may stand by, as many as was said. One of them takes the place of one that is missing at
//! once, so that the others don't come to be too few. They have numbers of their own from [`phalanx_job::FIRST_SPARE`] on, by which
//! they count among those of whom half have to be left, and come back to whoever leads the run on, or lead it.

mod admit;
mod back;
mod blame;
mod cut;
mod gather;
mod in_place;
mod orders;
mod seats;
mod spares;
mod standing;
#[cfg(test)]
mod tests;

pub use orders::{Left, Order, Wait};
pub(crate) use standing::Legacy;

use crate::restarts::Restarts;
use phalanx_job::{End, EndWhy, FromAgent, Mishap, Node, Setback, Stage, StopWhy, Terms, WorkerFailure};
use phalanx_wire::{Generation, Rank};
use spares::Spares;
use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::ops::Range;
use std::time::{Duration, Instant};

/// Nothing was heeded for so long: this end was deaf. In a run of nodes something is heard all the time.
const DEAF: Duration = Duration::from_millis(500);

/// How long nodes that fell silent count among those of whom half have to be left: whoever is cut off from others loses them
/// one after the other, and they may go on without it.
const CUT: Duration = Duration::from_secs(10);

/// A node, by the number of its agent's connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeId(pub u64);

/// How long what is waited for.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    /// For more nodes than the least number.
    pub last_call: Duration,
    /// For the least number.
    pub join: Duration,
    /// For a sign of life from a node.
    pub silence: Duration,
    /// For the least number once the run has begun, where only those can come that were there before, as after a standstill; none where
    /// others may come, which are waited for as at first.
    pub anew: Option<Duration>,
}

impl Patience {
    /// The longest silence that may be put up with.
    pub const MOST_SILENCE: Duration = Duration::from_secs(300);
}

impl Default for Patience {
    /// 3 seconds, 10 minutes, 2 seconds; others may come at any time.
    fn default() -> Patience {
        Patience {
            last_call: Duration::from_secs(3),
            join: Duration::from_secs(600),
            silence: Duration::from_secs(2),
            anew: None,
        }
    }
}

/// What happens.
#[derive(Clone, Debug)]
pub enum Event {
    /// The agent of a node said something.
    Said(NodeId, FromAgent),
    /// A node's connection has ended, and how.
    Gone(NodeId, String),
    /// Whether the workers of a generation go on without those that are lost.
    InPlace(Generation, bool),
    /// These workers of a generation have begun a membership, which has a generation of its own, in the order of their ranks.
    Begun(Generation, Generation, Vec<Rank>),
    /// Nothing but time has passed.
    Tick,
}

/// The nodes of a run.
#[derive(Debug)]
pub struct Fleet {
    terms: Terms,
    patience: Patience,
    /// When something was heeded last.
    heeded: Instant,
    began: Instant,
    /// What this machine's wall clock showed last, in milliseconds, and when.
    clock: (Instant, u64),
    members: BTreeMap<NodeId, Member>,
    spares: Spares,
    /// Where those listen that ever had a number in this run, in case that they are to lead it: nobody else ever does there.
    known: BTreeSet<SocketAddr>,
    /// The one that begins next, or runs.
    generation: Generation,
    phase: Phase,
    /// Whether the workers of the generation that runs go on without those that are lost.
    in_place: bool,
    /// Whether some of its workers have ended in order to be started again later.
    drained: bool,
    /// The end of the ranks that its workers were started with.
    ranks: u32,
    /// Those of them that haven't come in yet, though the others have begun.
    coming: BTreeSet<u32>,
    /// The newest membership of its workers.
    membership: Option<(Generation, Vec<Rank>)>,
    /// How many coordinators there were before, and where the last of them listened.
    term: u32,
    former: Vec<SocketAddr>,
    silent: Vec<Silent>,
    /// After this end was deaf for long, until when those that are gone may have gone to another coordinator.
    deaf_until: Option<Instant>,
    /// When each of its workers was started, after the run began, by the rank that it was started with.
    started: BTreeMap<u32, Duration>,
    /// How often workers were started again after a failure.
    restarts: Restarts,
    setbacks: Vec<Setback>,
}

#[derive(Debug)]
struct Member {
    node: Node,
    heard: Instant,
    /// Its number in the last generation that it was in.
    number: Option<u32>,
    /// Since when it has had one.
    numbered: Option<Instant>,
    /// The ranks that its workers were started with in the last generation.
    seats: Range<u32>,
    stage: Stage,
    /// Whether it goes as soon as its workers have ended.
    leaves: bool,
}

/// A node that fell silent.
#[derive(Debug)]
struct Silent {
    /// By which it is known.
    standby: SocketAddr,
    found: Instant,
    /// When it last knew of the others.
    knew_at: Instant,
}

#[derive(Debug)]
enum Phase {
    Gathering(Gathering),
    Running,
    Stopping(Stopping),
    /// The run is led from there: nobody is led from here.
    Elsewhere(SocketAddr),
    Over,
}

/// Between two generations.
#[derive(Debug)]
struct Gathering {
    /// Since when there are too few.
    since: Instant,
    /// When those that are enough have waited long enough for others.
    last_call: Option<Instant>,
}

#[derive(Debug)]
struct Stopping {
    why: StopWhy,
    /// What went wrong on which node, in order of time; a node says it again when it knows better.
    failures: Vec<(NodeId, Setback)>,
    lost: Vec<Setback>,
}

impl Fleet {
    /// No node has come yet. `clock_ms` is this machine's wall clock, in milliseconds since 1970.
    pub fn new(terms: Terms, patience: Patience, now: Instant, clock_ms: u64) -> Fleet {
        let phase = Phase::Gathering(Gathering { since: now, last_call: None });
        let (generation, setbacks) = (Generation(0), Vec::new());
        Fleet {
            terms,
            patience,
            heeded: now,
            began: now,
            clock: (now, clock_ms),
            members: BTreeMap::new(),
            spares: Spares::default(),
            known: BTreeSet::new(),
            generation,
            phase,
            in_place: false,
            drained: false,
            ranks: 0,
            coming: BTreeSet::new(),
            membership: None,
            term: 0,
            former: Vec::new(),
            silent: Vec::new(),
            deaf_until: None,
            started: BTreeMap::new(),
            restarts: Restarts::default(),
            setbacks,
        }
    }

    /// Whether the run is over.
    pub fn is_over(&self) -> bool {
        matches!(self.phase, Phase::Over)
    }

    /// The node whose worker was started with this rank in the generation that runs.
    pub fn node_of(&self, rank: u32) -> Option<NodeId> {
        let has =
            |(_, member): &(&NodeId, &Member)| member.stage != Stage::Ready && member.seats.contains(&rank);
        self.members.iter().find(has).map(|(id, _)| *id)
    }

    /// The ranks that the workers of a node were started with.
    pub fn seats_of(&self, id: NodeId) -> Range<u32> {
        self.members.get(&id).map_or(0..0, |member| member.seats.clone())
    }

    /// When it wants to hear that time has passed.
    pub fn wake_at(&self) -> Option<Instant> {
        let silent = self.members.values().map(|member| member.heard + self.patience.silence).min();
        let gathered = match &self.phase {
            Phase::Gathering(Gathering { last_call: Some(at), .. }) => Some(*at),
            Phase::Gathering(_) if self.spares.count() > 0 => Some(self.spares_called_at()),
            Phase::Gathering(Gathering { since, .. }) => Some(*since + self.join_limit()),
            _ => None,
        };
        let spares = self.spares.silent_at(self.patience.silence);
        if self.is_over() { None } else { silent.into_iter().chain(spares).chain(gathered).min() }
    }

    /// Takes notice of what happens; gives what is to be done, in this order.
    pub fn heed(&mut self, now: Instant, event: Event) -> Vec<Order> {
        let mut todo = Vec::new();
        if self.is_over() {
            if let Event::Said(id, FromAgent::Join(_) | FromAgent::Return(_)) = event {
                todo.push(Order::Refuse(id, "the run is over".into()));
            }
            return todo;
        }
        // Whoever didn't listen, as on a machine that stood still, can't say that others were silent meanwhile.
        let missed = now.saturating_duration_since(std::mem::replace(&mut self.heeded, now));
        if missed > DEAF {
            self.members.values_mut().for_each(|member| member.heard += missed);
            self.spares.make_up_for(missed);
        }
        if missed >= self.patience.silence {
            self.deaf_until = Some(now + CUT);
        }
        match event {
            Event::Said(id, FromAgent::Join(node)) => self.join(now, id, node, &mut todo),
            Event::Said(id, FromAgent::Return(back)) => self.come_back(now, id, &back, &mut todo),
            Event::Said(_, FromAgent::Elsewhere { address, term }) => self.give_up(address, term, &mut todo),
            Event::Said(id, said) => self.said(now, id, said, &mut todo),
            Event::Gone(id, how) => {
                if self.deaf_until.is_some_and(|until| now < until) {
                    self.count_silent(now, id);
                }
                self.gone(now, id, how, &mut todo);
            }
            Event::InPlace(generation, yes) if generation == self.generation => self.in_place = yes,
            Event::Begun(generation, membership, workers) if generation == self.generation => {
                let all: u32 = self.members.values().map(|member| member.node.workers).sum();
                workers.iter().for_each(|rank| _ = self.coming.remove(&rank.0));
                if workers.len() == all as usize {
                    self.restarts = self.restarts.got_over();
                }
                self.membership = Some((membership, workers));
            }
            Event::InPlace(..) | Event::Begun(..) | Event::Tick => {}
        }
        self.find_silent(now, &mut todo);
        self.find_cut(now, &mut todo);
        self.call_spares(now, &mut todo);
        self.go_on(now, &mut todo);
        todo
    }

    fn join(&mut self, now: Instant, id: NodeId, node: Node, todo: &mut Vec<Order>) {
        if let Phase::Elsewhere(address) = self.phase {
            return todo.push(Order::Elsewhere(vec![id], address));
        }
        if self.members.contains_key(&id) || self.spares.has(id) {
            return todo.push(Order::Refuse(id, "it has joined already".into()));
        }
        // One whose connection was lost may come anew before that is heard of.
        let before = self.members.iter().find(|(_, member)| member.node.standby == node.standby);
        if let Some(before) = before.map(|(before, _)| *before) {
            todo.push(Order::Drop(before));
            self.gone(now, before, "its agent came anew".into(), todo);
        }
        if let Some(before) = self.spares.at(node.standby) {
            todo.push(Order::Drop(before));
            self.spares.remove(before);
        }
        // Who comes anew goes on nowhere else.
        self.silent.retain(|silent| silent.standby != node.standby);
        let here: Vec<&Node> = self.members.values().map(|member| &member.node).collect();
        let clock_ms = self.clock.1 + now.saturating_duration_since(self.clock.0).as_millis() as u64;
        if let Err(reason) = admit::admit(&self.terms, &here, self.spares.count(), clock_ms, &node) {
            // Those that wait for it would wait in vain.
            todo.push(Order::Warn(format!("{} was refused: {reason}", node.host)));
            return todo.push(Order::Refuse(id, reason));
        }
        todo.extend(admit::doubts(&self.terms, &node).map(Order::Warn));
        let has_room = self.members.len() < self.terms.most as usize;
        if has_room && (!node.spare || self.spares.count() >= self.terms.spares as usize) {
            return self.take_in(now, now, id, node, todo);
        }
        todo.push(Order::Warn(format!("{} stands by, in case that a node is lost", node.host)));
        self.known.insert(node.standby);
        self.spares.add(now, id, node, None);
        if self.members.values().any(|member| member.numbered.is_some()) {
            self.spares.known_from(now);
        }
    }

    /// A node that was heard of then gets a place.
    fn take_in(&mut self, heard: Instant, now: Instant, id: NodeId, node: Node, todo: &mut Vec<Order>) {
        let host = node.host.clone();
        let (number, numbered, stage, seats) = (None, None, Stage::Ready, 0..0);
        let goes_on = self.goes_on();
        self.members.insert(id, Member { node, heard, number, numbered, seats, stage, leaves: false });
        // One that comes while some have done all their work comes too late to help.
        let is_open = self.members.values().all(|member| member.stage != Stage::Done);
        match &self.phase {
            Phase::Running if goes_on => self.enlarge(now, id, todo),
            Phase::Running if is_open => self.stop(StopWhy::Joined(host), None, todo),
            Phase::Gathering(_) => self.tell_wait(now, todo),
            _ => {}
        }
    }

    fn said(&mut self, now: Instant, id: NodeId, said: FromAgent, todo: &mut Vec<Order>) {
        if self.spares.has(id) {
            return self.said_by_spare(now, id, &said, todo);
        }
        let Some(member) = self.members.get_mut(&id) else {
            // One that was told where to go may have to ask again, where it finds nobody yet.
            if !matches!((&self.phase, &said), (Phase::Elsewhere(_), FromAgent::Beat)) {
                todo.push(Order::Drop(id));
            }
            return;
        };
        member.heard = now;
        match said {
            FromAgent::Join(_) | FromAgent::Return(_) | FromAgent::Elsewhere { .. } | FromAgent::Beat => {}
            FromAgent::Moved { to } => self.depose(id, to, todo),
            FromAgent::Finished { generation, rank } if self.runs(id, generation) => {
                todo.push(Order::Forget(generation, rank));
            }
            // It counts as one that comes in all the same: a node without any other is one that the others do without. Where all are to
            // end it is one that they don't wait for.
            FromAgent::GivenUp { generation, rank } if self.runs(id, generation) => {
                let seat = rank.0..rank.0 + 1;
                match self.phase {
                    Phase::Running => todo.push(Order::DoWithout(generation, seat)),
                    _ => self.part_from(seat, todo),
                }
            }
            FromAgent::Failed { generation, failure } if self.runs(id, generation) => {
                self.failed(now, id, failure, todo);
            }
            FromAgent::Lost { generation, failure } if self.runs(id, generation) => {
                self.lost(now, id, failure, todo);
            }
            FromAgent::Ended { generation, failure, drained, port } if self.runs(id, generation) => {
                let failed = failure.is_some();
                self.drained |= drained;
                if let Some(failure) = failure {
                    self.failed(now, id, failure, todo);
                }
                let is_running = matches!(self.phase, Phase::Running) && !failed;
                let Some(member) = self.members.get_mut(&id) else { return };
                member.node.port = port;
                member.stage = if is_running { Stage::Done } else { Stage::Ready };
                let seats = member.seats.clone();
                match (is_running, member.leaves) {
                    // It was told to end them before the others were to end, too.
                    (false, true) => self.part_from(seats, todo),
                    (true, true) => {
                        todo.push(Order::DoWithout(generation, seats));
                        let left = self.members.remove(&id);
                        todo.push(Order::Farewell(id));
                        let is_too_few = self.staying_or_spare() < self.least();
                        if let Some(left) = left.filter(|_| is_too_few && self.staying() > 0) {
                            // One that was to take its place is gone as well.
                            self.stop(StopWhy::Left(left.node.host), None, todo);
                        }
                    }
                    (true, false) if self.in_place => self.release_late_comers(todo),
                    _ => {}
                }
            }
            // Of a generation that is over for this node.
            FromAgent::Failed { .. }
            | FromAgent::Lost { .. }
            | FromAgent::Finished { .. }
            | FromAgent::GivenUp { .. }
            | FromAgent::Ended { .. } => {}
            FromAgent::Leave { signal } => self.leave(id, signal, todo),
            FromAgent::Quit { signal } => self.quit(id, signal, todo),
        }
    }

    /// Whether a node's workers of this generation run.
    fn runs(&self, id: NodeId, generation: Generation) -> bool {
        let stage = self.members.get(&id).map(|member| member.stage);
        generation == self.generation && stage == Some(Stage::Running)
    }

    fn failed(&mut self, now: Instant, id: NodeId, failure: WorkerFailure, todo: &mut Vec<Order>) {
        let others = self.members.len() + self.spares.count() - 1;
        if self.goes_on() && self.is_coming(id) && self.members.len() > 1 && others >= self.least() {
            return self.do_without(id, &failure, todo);
        }
        let setback = self.setback(now, &self.members[&id], Mishap::Worker(failure));
        if matches!(self.phase, Phase::Running) {
            // Its agent stops the others of that node without being told.
            self.stop(StopWhy::Failed(setback.clone()), Some(id), todo);
        }
        if let Phase::Stopping(Stopping { failures, .. }) = &mut self.phase {
            match failures.iter_mut().find(|(other, _)| *other == id) {
                Some((_, known)) => *known = setback,
                None => failures.push((id, setback)),
            }
        }
    }

    /// What this machine's wall clock shows: it may have been set, or the machine have slept, since it was told before.
    pub(crate) fn set_clock(&mut self, now: Instant, clock_ms: u64) {
        self.clock = (now, clock_ms);
    }

    fn since_start(&self, now: Instant) -> Duration {
        now.saturating_duration_since(self.began)
    }

    fn setback(&self, now: Instant, member: &Member, what: Mishap) -> Setback {
        let (generation, node) = (self.generation, member.number.unwrap_or_default());
        let after_ms = self.since_start(now).as_millis() as u64;
        Setback { generation, node, host: member.node.host.clone(), after_ms, what }
    }

    fn leave(&mut self, id: NodeId, signal: i32, todo: &mut Vec<Order>) {
        let Some(member) = self.members.get_mut(&id) else { return };
        member.leaves = true;
        let (host, stage) = (member.node.host.clone(), member.stage);
        let has_begun = !matches!(self.phase, Phase::Gathering(_)) || self.generation > Generation(0);
        let is_missed = self.terms.least == self.terms.most && self.staying_or_spare() < self.least();
        match (&self.phase, stage) {
            // Nobody would be left whom others could come to, or none can be missed.
            (_, Stage::Ready | Stage::Running) if has_begun && (self.staying() == 0 || is_missed) => {
                self.quit(id, signal, todo);
            }
            (_, Stage::Ready | Stage::Done) => {
                self.members.remove(&id);
                todo.push(Order::Farewell(id));
            }
            (Phase::Running, Stage::Running) if self.goes_on() && self.staying_or_spare() >= self.least() => {
                todo.push(Order::Release(self.generation, id));
            }
            (Phase::Running, Stage::Running) => self.stop(StopWhy::Left(host), None, todo),
            (_, Stage::Running) => {}
        }
    }

    /// Ends the run, however many are left.
    fn quit(&mut self, id: NodeId, signal: i32, todo: &mut Vec<Order>) {
        let host = self.members[&id].node.host.clone();
        let why = StopWhy::Asked(host, signal);
        match &mut self.phase {
            // Its agent may wait to be told.
            Phase::Running => self.stop(why, None, todo),
            Phase::Stopping(stopping) => {
                let is_new = !matches!(stopping.why, StopWhy::Asked(..));
                if is_new {
                    stopping.why = why.clone();
                    todo.push(Order::Stop(self.generation, self.running(None), why));
                }
            }
            Phase::Gathering(_) | Phase::Elsewhere(_) | Phase::Over => {
                self.end(EndWhy::Asked { signal }, todo);
            }
        }
    }

    fn gone(&mut self, now: Instant, id: NodeId, how: String, todo: &mut Vec<Order>) {
        if self.spares.has(id) {
            return self.spare_goes(id, &format!("was lost: {how}"), todo);
        }
        let stays = |(other, member): (&NodeId, &Member)| *other != id && !member.leaves;
        let staying = self.members.iter().filter(|member| stays(*member)).count();
        let goes_on = self.goes_on() && staying > 0 && staying + self.spares.count() >= self.least();
        let Some(member) = self.members.remove(&id) else { return };
        if member.stage == Stage::Running && goes_on {
            if !member.leaves {
                let (number, host) = (member.number.unwrap_or_default(), &member.node.host);
                todo.push(Order::Warn(format!("node {number} ({host}) was lost: {how}; the others go on")));
            }
            return todo.push(Order::DoWithout(self.generation, member.seats));
        }
        if member.stage == Stage::Running {
            self.part_from(member.seats.clone(), todo);
        }
        // One that leaves goes when it likes, and one that has nothing to do is no loss.
        if member.leaves || member.stage != Stage::Running {
            return;
        }
        let loss = self.setback(now, &member, Mishap::Lost(how));
        if matches!(self.phase, Phase::Running) {
            self.stop(StopWhy::Lost(loss.clone()), None, todo);
        }
        if let Phase::Stopping(Stopping { failures, lost, .. }) = &mut self.phase {
            // That it failed before it was lost is known already.
            if failures.iter().all(|(failed, _)| *failed != id) {
                lost.push(loss);
            }
        }
    }

    /// What follows of itself once an event was heeded.
    fn go_on(&mut self, now: Instant, todo: &mut Vec<Order>) {
        let runs = self.members.values().any(|member| member.stage == Stage::Running);
        match &self.phase {
            Phase::Running if !runs && self.drained => self.end(EndWhy::Drained, todo),
            Phase::Running if !runs => self.end(EndWhy::Done, todo),
            Phase::Stopping(_) if !runs => self.conclude(now, todo),
            _ => {}
        }
        if let Phase::Gathering(_) = self.phase {
            self.gather(now, todo);
        }
    }

    /// Stops the generation; `aware` is the node that knows it already.
    fn stop(&mut self, why: StopWhy, aware: Option<NodeId>, todo: &mut Vec<Order>) {
        todo.push(Order::Stop(self.generation, self.running(aware), why.clone()));
        self.phase = Phase::Stopping(Stopping { why, failures: Vec::new(), lost: Vec::new() });
    }

    fn running(&self, but: Option<NodeId>) -> Vec<NodeId> {
        let runs = |(id, member): &(&NodeId, &Member)| member.stage == Stage::Running && Some(**id) != but;
        self.members.iter().filter(runs).map(|(id, _)| *id).collect()
    }

    fn end(&mut self, why: EndWhy, todo: &mut Vec<Order>) {
        self.phase = Phase::Over;
        let (restarts, setbacks) = (self.restarts.count as u32, self.setbacks.clone());
        let end = End { why, restarts, setbacks };
        todo.push(Order::End(self.members_and_spares(), end));
    }

    /// How many nodes there are that don't leave.
    fn staying(&self) -> usize {
        self.members.values().filter(|member| !member.leaves).count()
    }
}

/// Whether it is of this loss of a worker.
fn is_of(setback: &Setback, failure: &WorkerFailure, member: &Member) -> bool {
    let Mishap::Worker(known) = &setback.what else { return false };
    (known.rank, known.pid) == (failure.rank, failure.pid) && setback.host == member.node.host
}
