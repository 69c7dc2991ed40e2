//! The agents' end of the coordinator: their connections, and a thread that watches the time. What follows from what they say
//! is decided by [`Fleet`] alone; this hands it on.

use crate::fleet::{Event, Fleet, Left, NodeId, Order, Patience};
use crate::succession::{RollCall, Verdict};
use phalanx_job::{AGENT_BEAT, FromAgent, MAX_AGENT_FRAME, Notice, Standing, Terms, ToAgent, clock_ms};
use phalanx_wire::{Channel, Generation, Rank, read_frame, write_frame};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use std::net::Shutdown;
use std::ops::Range;
use std::sync::mpsc::{Sender, SyncSender, channel, sync_channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// How long a connection may stay without a word: longer than any fleet puts up with silence, so that it is the one who tells.
const READ_LIMIT: Duration = Patience::MOST_SILENCE.saturating_add(Duration::from_secs(10));
/// How long a message to an agent may take to be handed to the system.
const SAY_LIMIT: Duration = Duration::from_millis(500);

/// How long it may take until agents were told of a worker: each may need as long as a message may take.
const TELL_LIMIT: Duration = Duration::from_secs(2);

/// The agents of a run.
pub(crate) struct Agents {
    desk: Mutex<Desk>,
    /// Rung when connections end, and for the thread to end.
    bell: Condvar,
    /// Has the workers served as the fleet decides.
    change: Box<dyn Fn(Change) + Send + Sync>,
    /// What is known of workers, on its way to the agents.
    notices: Sender<(Generation, Notice, Option<SyncSender<()>>)>,
}

/// What the fleet decides about the workers that are served.
#[derive(Clone, Debug)]
pub(crate) enum Change {
    /// Those of another generation come: so many.
    Begin(Generation, usize),
    /// Those of this generation that were started with these ranks may come as well.
    Expect(Generation, Range<u32>),
    /// Those are lost.
    DoWithout(Generation, Range<u32>),
    /// Those are lost, and all others are to end because of that.
    PartFrom(Generation, Range<u32>),
    /// The one that was started with this rank has ended.
    Forget(Generation, Rank),
    /// Those of this generation are served from now on, which another coordinator has left.
    Resume(Generation, Left),
}

struct Desk {
    leader: Leader,
    links: BTreeMap<NodeId, Channel>,
    last: u64,
    closed: bool,
    /// How the run stood when it was told last.
    told: Option<Standing>,
}

/// What decides.
enum Leader {
    /// A fleet.
    Fleet(Fleet),
    /// What another coordinator has left, until those that it led have come back.
    Called(RollCall, Setting),
    /// Nobody: too few have come back, and this is what they are told.
    Nobody(String),
}

/// What a fleet is made of, besides what another coordinator has left.
pub(crate) struct Setting {
    pub(crate) terms: Terms,
    pub(crate) patience: Patience,
}

impl Desk {
    fn fleet(&self) -> Option<&Fleet> {
        match &self.leader {
            Leader::Fleet(fleet) => Some(fleet),
            Leader::Called(..) | Leader::Nobody(_) => None,
        }
    }

    /// When the leader wants to hear that time has passed.
    fn wake_at(&self) -> Option<Instant> {
        match &self.leader {
            Leader::Fleet(fleet) => fleet.wake_at(),
            Leader::Called(call, ..) => match call.verdict(Instant::now()) {
                Verdict::Wait(until) => Some(until),
                Verdict::Lead | Verdict::GiveUp(_) => None,
            },
            Leader::Nobody(_) => None,
        }
    }
}

impl Agents {
    /// Starts the thread that watches the time.
    pub(crate) fn open(
        fleet: Fleet,
        change: impl Fn(Change) + Send + Sync + 'static,
    ) -> std::io::Result<Arc<Agents>> {
        Agents::start(Leader::Fleet(fleet), change)
    }

    /// The same in the place of another coordinator, with whoever comes back.
    pub(crate) fn succeed(
        call: RollCall,
        setting: Setting,
        change: impl Fn(Change) + Send + Sync + 'static,
    ) -> std::io::Result<Arc<Agents>> {
        Agents::start(Leader::Called(call, setting), change)
    }

    fn start(
        leader: Leader,
        change: impl Fn(Change) + Send + Sync + 'static,
    ) -> std::io::Result<Arc<Agents>> {
        let desk = Desk { leader, links: BTreeMap::new(), last: 0, closed: false, told: None };
        let desk = Mutex::new(desk);
        let (notices, noticed) = channel();
        let agents = Arc::new(Agents { desk, bell: Condvar::new(), change: Box::new(change), notices });
        let watching = Arc::clone(&agents);
        std::thread::Builder::new().name("phalanx-fleet".into()).spawn(move || watching.watch())?;
        let passing = Arc::downgrade(&agents);
        std::thread::Builder::new().name("phalanx-notices".into()).spawn(move || {
            while let (Ok((generation, notice, heard)), Some(agents)) = (noticed.recv(), passing.upgrade()) {
                agents.pass_on(generation, notice);
                // Whoever waited for it may be gone.
                heard.map(|heard| heard.send(()));
            }
        })?;
        Ok(agents)
    }

    /// Who is waited for before those that came back are led.
    pub(crate) fn missing(&self) -> BTreeSet<u32> {
        match &self.desk().leader {
            Leader::Called(call, _) => call.missing(),
            Leader::Fleet(_) | Leader::Nobody(_) => BTreeSet::new(),
        }
    }

    /// These have ended.
    pub(crate) fn count_out(&self, ended: &BTreeSet<u32>) {
        let mut desk = self.desk();
        if let Leader::Called(call, _) = &mut desk.leader {
            call.count_out(ended);
            self.conclude(&mut desk, Instant::now());
        }
    }

    /// Ends the thread and all connections.
    pub(crate) fn close(&self) {
        let mut desk = self.desk();
        desk.closed = true;
        // A connection that is gone already needs no closing.
        desk.links.values().for_each(|link| drop(link.shutdown(Shutdown::Both)));
        self.bell.notify_all();
    }

    /// Waits until all agents have gone, which they do once they know that the run is over.
    pub(crate) fn wait_until_gone(&self, limit: Duration) {
        let until = Instant::now() + limit;
        let mut desk = self.desk();
        while !desk.links.is_empty() && Instant::now() < until {
            let left = until.saturating_duration_since(Instant::now());
            desk = self
                .bell
                .wait_timeout(desk, left)
                .map_or_else(|poisoned| poisoned.into_inner().0, |(desk, _)| desk);
        }
    }

    /// Tells the agents what there is to know of workers, soon: it may be known while these are held, about whom the fleet decides
    /// while it is held itself.
    pub(crate) fn notice(&self, generation: Generation, notice: Notice) {
        // The thread that takes them lasts as long as this.
        let _ = self.notices.send((generation, notice, None));
    }

    /// As [`Agents::notice`], and waits until they were told.
    pub(crate) fn tell(&self, generation: Generation, notice: Notice) {
        let (heard, hears) = sync_channel(1);
        if self.notices.send((generation, notice, Some(heard))).is_ok() {
            // It ends with the thread, if not before.
            let _ = hears.recv_timeout(TELL_LIMIT);
        }
    }

    fn pass_on(&self, generation: Generation, notice: Notice) {
        let mut desk = self.desk();
        if let Notice::InPlace(yes) = notice {
            self.heed(&mut desk, Event::InPlace(generation, yes));
        }
        if let Notice::Begun { generation: membership, workers } = &notice {
            self.heed(&mut desk, Event::Begun(generation, *membership, workers.clone()));
        }
        let node = match &notice {
            Notice::Failed { rank, .. } | Notice::Silent { rank } => {
                Some(desk.fleet().and_then(|fleet| fleet.node_of(rank.0)))
            }
            Notice::Begun { .. } | Notice::InPlace(_) => None,
        };
        let concerned = desk.links.iter().filter(|(id, _)| node.is_none_or(|node| node == Some(**id)));
        let message = ToAgent::Notice { generation, notice };
        concerned.for_each(|(_, link)| say(link, &message));
    }

    /// Serves an agent to the end of its connection; an error is why it was sent away.
    pub(crate) fn serve(&self, mut stream: &Channel) -> Result<(), String> {
        let text = |error: std::io::Error| error.to_string();
        stream.set_read_timeout(Some(READ_LIMIT)).map_err(text)?;
        stream.set_write_timeout(Some(SAY_LIMIT)).map_err(text)?;
        let seat = {
            let mut desk = self.desk();
            (!desk.closed).then(|| {
                desk.last += 1;
                let id = NodeId(desk.last);
                desk.links.insert(id, stream.clone());
                id
            })
        };
        let Some(id) = seat else {
            // It came while the run ended, and closes its end once it has read this.
            say(stream, &ToAgent::Refused { reason: "the run is over".into() });
            let _ = stream.shutdown(Shutdown::Write);
            while read_frame(&mut stream, MAX_AGENT_FRAME).is_ok() {}
            return Ok(());
        };
        let how = loop {
            let said = match read_frame(&mut stream, MAX_AGENT_FRAME) {
                Ok(frame) => serde_json::from_slice::<FromAgent>(&frame),
                Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => {
                    break Ok("its agent's connection ended".into());
                }
                Err(error) => break Ok(format!("its agent's connection ended: {error}")),
            };
            match said {
                Ok(said) => self.heed(&mut self.desk(), Event::Said(id, said)),
                Err(error) => break Err(format!("an agent said what can't be read: {error}")),
            }
        };
        let mut desk = self.desk();
        desk.links.remove(&id);
        let reason = how.clone().unwrap_or_else(|reason| reason);
        self.heed(&mut desk, Event::Gone(id, reason));
        self.bell.notify_all();
        how.map(drop)
    }

    /// Beats, and has the fleet notice that time passes.
    fn watch(&self) {
        let mut beat_at = Instant::now();
        let mut desk = self.desk();
        while !desk.closed {
            self.heed(&mut desk, Event::Tick);
            let now = Instant::now();
            if now >= beat_at {
                desk.links.values().for_each(|link| say(link, &ToAgent::Beat));
                beat_at = now + AGENT_BEAT;
            }
            let wake_at = desk.wake_at().map_or(beat_at, |at| at.min(beat_at));
            let left = wake_at.saturating_duration_since(Instant::now());
            desk = self
                .bell
                .wait_timeout(desk, left)
                .map_or_else(|poisoned| poisoned.into_inner().0, |(desk, _)| desk);
        }
    }

    /// Hands an event to whoever decides, and does what is ordered.
    fn heed(&self, desk: &mut Desk, event: Event) {
        let now = Instant::now();
        let is_beat = matches!(event, Event::Said(_, FromAgent::Beat));
        let comes = match &event {
            Event::Said(id, FromAgent::Return(_) | FromAgent::Join(_)) => Some(*id),
            _ => None,
        };
        let orders = match &mut desk.leader {
            Leader::Fleet(fleet) => {
                if comes.is_some() {
                    fleet.set_clock(now, clock_ms());
                }
                fleet.heed(now, event)
            }
            Leader::Called(call, ..) => {
                call.heed(event);
                return self.conclude(desk, now);
            }
            Leader::Nobody(reason) => match event {
                Event::Said(id, FromAgent::Return(_) | FromAgent::Join(_)) => {
                    vec![Order::Refuse(id, reason.clone())]
                }
                _ => return,
            },
        };
        self.carry_out(desk, orders, now, !is_beat);
        // One that looks for who leads knows it by this, though nothing may be new to the others.
        if let (Some(link), Some(standing)) = (comes.and_then(|id| desk.links.get(&id)), &desk.told) {
            say(link, &ToAgent::Standing(Box::new(standing.clone())));
        }
    }

    /// Tells how the run stands, if that may be new, and does what is ordered: first what others mustn't wait for, nor come before.
    fn carry_out(&self, desk: &mut Desk, orders: Vec<Order>, now: Instant, is_news: bool) {
        let is_first = |order: &Order| {
            matches!(order, Order::Drop(_) | Order::Resume(..) | Order::Refuse(..) | Order::GoneOn(_))
        };
        let has_orders = !orders.is_empty();
        let (first, then) = orders.into_iter().partition(is_first);
        self.follow(desk, first);
        if is_news || has_orders {
            self.tell_standing(desk, now);
        }
        self.follow(desk, then);
    }

    /// Leads those that have come back, if it is time.
    fn conclude(&self, desk: &mut Desk, now: Instant) {
        let Leader::Called(call, ..) = &desk.leader else { return };
        match call.verdict(now) {
            Verdict::Wait(_) => {}
            Verdict::Lead => {
                let nobody = Leader::Nobody(String::new());
                let Leader::Called(call, setting) = std::mem::replace(&mut desk.leader, nobody) else {
                    return;
                };
                let Setting { terms, patience } = setting;
                let (fleet, orders) = call.lead(terms, patience, now, clock_ms());
                desk.leader = Leader::Fleet(fleet);
                self.carry_out(desk, orders, now, true);
            }
            Verdict::GiveUp(reason) => {
                let all = desk.links.keys().map(|id| Order::Refuse(*id, reason.clone())).collect();
                desk.leader = Leader::Nobody(reason);
                self.follow(desk, all);
            }
        }
    }

    /// Tells all agents how the run stands, if that is new to them: before whatever follows from it.
    fn tell_standing(&self, desk: &mut Desk, now: Instant) {
        let Some(fleet) = desk.fleet().filter(|fleet| !fleet.is_over()) else { return };
        let mut standing = fleet.standing(now);
        if standing.nodes.iter().all(|node| node.number.is_none()) {
            // Nobody could lead it.
            return;
        }
        if let Some(told) = &desk.told {
            let elapsed_ms = std::mem::replace(&mut standing.elapsed_ms, told.elapsed_ms);
            standing.version = told.version;
            if standing == *told {
                return;
            }
            (standing.elapsed_ms, standing.version) = (elapsed_ms, told.version + 1);
        }
        let message = ToAgent::Standing(Box::new(standing.clone()));
        desk.links.values().for_each(|link| say(link, &message));
        desk.told = Some(standing);
    }

    /// Does what is ordered.
    fn follow(&self, desk: &mut Desk, orders: Vec<Order>) {
        let links = &desk.links;
        let tell = |id: &NodeId, message: &ToAgent| {
            if let Some(link) = links.get(id) {
                say(link, message);
            }
        };
        let send_away = |id: &NodeId, message: &ToAgent| {
            tell(id, message);
            // It closes its end once it has read this.
            links.get(id).map(|link| link.shutdown(Shutdown::Write));
        };
        let tell_all = |message: &ToAgent| links.values().for_each(|link| say(link, message));
        for order in orders {
            tracing::debug!(?order, "the fleet decides");
            match order {
                Order::Refuse(id, reason) => send_away(&id, &ToAgent::Refused { reason }),
                Order::GoneOn(id) => send_away(&id, &ToAgent::GoneOn),
                Order::Drop(id) => drop(links.get(&id).map(|link| link.shutdown(Shutdown::Both))),
                Order::Warn(words) => tell_all(&ToAgent::Told { words }),
                Order::Wait(wait) => tell_all(&ToAgent::Told { words: wait.to_string() }),
                Order::Begin(generation, seats) => {
                    let world_size = seats.first().map_or(0, |(_, seat)| seat.world_size);
                    (self.change)(Change::Begin(generation, world_size as usize));
                    seats.into_iter().for_each(|(id, seat)| tell(&id, &ToAgent::Begin(seat)));
                }
                Order::Enlarge(generation, id, seat) => {
                    let workers = desk.fleet().map_or(0..0, |fleet| fleet.seats_of(id));
                    (self.change)(Change::Expect(generation, workers));
                    tell(&id, &ToAgent::Begin(seat));
                    // The others were told when that began.
                    tell(&id, &ToAgent::Notice { generation, notice: Notice::InPlace(true) });
                }
                Order::Replace(generation, id, rank, restarts) => {
                    (self.change)(Change::Forget(generation, rank));
                    tell(&id, &ToAgent::Replace { generation, rank, restarts });
                }
                Order::Forget(generation, rank) => (self.change)(Change::Forget(generation, rank)),
                Order::Resume(generation, left) => (self.change)(Change::Resume(generation, left)),
                Order::Estrange(id) => tell(&id, &ToAgent::Stranger),
                Order::Elsewhere(nodes, address) => {
                    nodes.iter().for_each(|id| tell(id, &ToAgent::Elsewhere { address }));
                }
                Order::Farewell(id) => tell(&id, &ToAgent::Farewell),
                Order::Release(generation, id) => tell(&id, &ToAgent::Release { generation }),
                Order::DoWithout(generation, seats) => {
                    (self.change)(Change::DoWithout(generation, seats));
                }
                Order::PartFrom(generation, seats) => (self.change)(Change::PartFrom(generation, seats)),
                Order::Stop(generation, nodes, why) => {
                    let (why, signal) = (why.to_string(), why.signal());
                    nodes.iter().for_each(|id| {
                        tell(id, &ToAgent::Stop { generation, why: why.clone(), signal });
                    });
                }
                Order::End(nodes, end) => nodes.iter().for_each(|id| tell(id, &ToAgent::End(end.clone()))),
            }
        }
    }

    /// The desk is whole between any two statements that could panic.
    fn desk(&self) -> MutexGuard<'_, Desk> {
        self.desk.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

/// Who can't be told is cut off: an agent would miss what it has to do, and a worker has gone, which whoever started it sees.
pub(crate) fn say(mut link: &Channel, message: &impl Serialize) {
    let frame = serde_json::to_vec(message).expect("a message is always JSON");
    if write_frame(&mut link, &frame).is_err() {
        let _ = link.shutdown(Shutdown::Both);
    }
}
