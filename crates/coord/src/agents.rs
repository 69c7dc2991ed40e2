//! The agents' end of the coordinator: their connections, and a thread that watches the time. What follows from what they say
//! is decided by [`Fleet`] alone; this hands it on.

use crate::fleet::{Event, Fleet, NodeId, Order};
use phalanx_job::{AGENT_BEAT, FromAgent, MAX_FRAME, Notice, ToAgent};
use phalanx_wire::{Channel, Generation, read_frame, write_frame};
use std::collections::BTreeMap;
use std::net::Shutdown;
use std::ops::Range;
use std::sync::mpsc::{Sender, SyncSender, channel, sync_channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// How long a connection may stay without a word: longer than the fleet puts up with silence, so that it is the one who tells.
const READ_LIMIT: Duration = Duration::from_secs(10);
/// How long a message to an agent may take to be handed to the system.
const SAY_LIMIT: Duration = Duration::from_millis(500);

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
}

struct Desk {
    fleet: Fleet,
    links: BTreeMap<NodeId, Channel>,
    last: u64,
    closed: bool,
}

impl Agents {
    /// Starts the thread that watches the time.
    pub(crate) fn open(
        fleet: Fleet,
        change: impl Fn(Change) + Send + Sync + 'static,
    ) -> std::io::Result<Arc<Agents>> {
        let desk = Mutex::new(Desk { fleet, links: BTreeMap::new(), last: 0, closed: false });
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
            let _ = hears.recv();
        }
    }

    fn pass_on(&self, generation: Generation, notice: Notice) {
        let mut desk = self.desk();
        if let Notice::InPlace(yes) = notice {
            self.heed(&mut desk, Event::InPlace(generation, yes));
        }
        if let Notice::Begun { workers, .. } = &notice {
            self.heed(&mut desk, Event::Begun(generation, workers.clone()));
        }
        let node = match &notice {
            Notice::Failed { rank, .. } | Notice::Silent { rank } => Some(desk.fleet.node_of(rank.0)),
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
        let id = {
            let mut desk = self.desk();
            if desk.closed {
                // It came while the run ended.
                return Ok(());
            }
            desk.last += 1;
            let id = NodeId(desk.last);
            desk.links.insert(id, stream.clone());
            id
        };
        let how = loop {
            let said = match read_frame(&mut stream, MAX_FRAME) {
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
            let wake_at = desk.fleet.wake_at().map_or(beat_at, |at| at.min(beat_at));
            let left = wake_at.saturating_duration_since(Instant::now());
            desk = self
                .bell
                .wait_timeout(desk, left)
                .map_or_else(|poisoned| poisoned.into_inner().0, |(desk, _)| desk);
        }
    }

    /// Hands an event to the fleet, and does what it orders.
    fn heed(&self, desk: &mut Desk, event: Event) {
        let orders = desk.fleet.heed(Instant::now(), event);
        let links = &desk.links;
        let tell = |id: &NodeId, message: &ToAgent| {
            if let Some(link) = links.get(id) {
                say(link, message);
            }
        };
        let tell_all = |message: &ToAgent| links.values().for_each(|link| say(link, message));
        for order in orders {
            tracing::debug!(?order, "the fleet decides");
            match order {
                Order::Refuse(id, reason) => {
                    tell(&id, &ToAgent::Refused { reason });
                    // It closes its end once it has read this.
                    links.get(&id).map(|link| link.shutdown(Shutdown::Write));
                }
                Order::Drop(id) => drop(links.get(&id).map(|link| link.shutdown(Shutdown::Both))),
                Order::Warn(words) => tell_all(&ToAgent::Told { words }),
                Order::Wait(wait) => tell_all(&ToAgent::Told { words: wait.to_string() }),
                Order::Begin(generation, seats) => {
                    let world_size = seats.first().map_or(0, |(_, seat)| seat.world_size);
                    (self.change)(Change::Begin(generation, world_size as usize));
                    seats.into_iter().for_each(|(id, seat)| tell(&id, &ToAgent::Begin(seat)));
                }
                Order::Enlarge(generation, id, seat) => {
                    let workers = desk.fleet.seats_of(id);
                    (self.change)(Change::Expect(generation, workers));
                    tell(&id, &ToAgent::Begin(seat));
                    // The others were told when that began.
                    tell(&id, &ToAgent::Notice { generation, notice: Notice::InPlace(true) });
                }
                Order::Replace(generation, id, rank, restarts) => {
                    tell(&id, &ToAgent::Replace { generation, rank, restarts });
                }
                Order::Release(generation, id) => tell(&id, &ToAgent::Release { generation }),
                Order::DoWithout(generation, seats) => {
                    (self.change)(Change::DoWithout(generation, seats));
                }
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

/// An agent that can't be told is cut off: it would miss what it has to do.
fn say(mut link: &Channel, message: &ToAgent) {
    let frame = serde_json::to_vec(message).expect("a message is always JSON");
    if write_frame(&mut link, &frame).is_err() {
        let _ = link.shutdown(Shutdown::Both);
    }
}
