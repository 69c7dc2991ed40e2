//! The pool's sockets, its file, and its clock. What follows from what it hears is decided by [`Pool`] alone.
//!
//! One thread hears everything and does what is ordered, in order; each connection has a thread that reads. What is to be written
//! down is, before anybody is told anything that follows from the same event. A pool whose file can't be written ends: agents go
//! on without it, and nodes wait for the next.

use crate::error::Error;
use crate::journal::{Entry, Journal};
use crate::message::{ASKER_PURPOSE, Answer, Ask, BEAT, FromNode, MAX_FRAME, NODE_PURPOSE, SILENCE, ToNode};
use crate::pool::{Event, Now, Order, Pool};
use crate::queues::Queues;
use phalanx_job::clock_ms;
use phalanx_wire::{
    Channel, Deadline, Generation, HandshakeError, Hello, Pass, Rank, Reception, Secret, Strangers,
    read_frame, receive, write_frame,
};
use serde::Serialize;
use std::collections::HashMap;
use std::io::ErrorKind;
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

/// How long a newcomer may take to prove itself.
const NEWCOMER_LIMIT: Duration = Duration::from_secs(10);
/// How long a message may take to be handed to the system.
const SAY_LIMIT: Duration = Duration::from_millis(500);
/// How long an answer may take.
pub(crate) const ANSWER_LIMIT: Duration = Duration::from_secs(30);
/// Unproven connections at once.
const STRANGERS: usize = 64;
/// What was heard and not heeded yet; whoever says more waits.
const INBOX: usize = 1024;

/// What a pool is made of.
pub struct ServerConfig {
    /// Where it listens; port 0 for a free one.
    pub listen: SocketAddr,
    /// What lets nodes in, and those who ask; made for nothing else, as [`Secret::bind`] does.
    pub secret: Secret,
    /// Whose slots they are.
    pub queues: Queues,
    /// Where it keeps its journal.
    pub folder: PathBuf,
    /// What happens, in lines for people.
    pub say: Box<dyn Fn(&str)>,
}

/// A pool that listens.
pub struct Server {
    address: SocketAddr,
    front: Arc<Front>,
    inbox: Receiver<Heard>,
    pool: Pool,
    journal: Journal,
    links: HashMap<u64, Channel>,
    say: Box<dyn Fn(&str)>,
}

/// Ends a pool from another thread.
#[derive(Clone)]
pub struct Stopper(SyncSender<Heard>);

impl Stopper {
    /// Ends it; what its nodes do goes on.
    pub fn stop(&self) {
        // One that has ended needs no telling.
        let _ = self.0.send(Heard::Stop);
    }
}

/// What the thread hears that decides.
enum Heard {
    Came(u64, Channel),
    Said(u64, FromNode),
    Gone(u64),
    Asked(Ask, SyncSender<Answer>),
    Stop,
}

/// Where whoever comes proves itself.
struct Front {
    pass: Pass,
    strangers: Strangers<TcpStream>,
    is_closed: AtomicBool,
    last: AtomicU64,
    inbox: SyncSender<Heard>,
}

impl Server {
    /// Reads what an earlier one has left, and listens.
    pub fn open(config: ServerConfig) -> Result<Server, Error> {
        let ServerConfig { listen, secret, queues, folder, say } = config;
        let (journal, entries) = Journal::open(&folder, Pool::of_use)?;
        let pool = Pool::restore(queues, entries, now());
        if let Some((job, queue)) = pool.strays() {
            return Err(Error::Stray { job, queue: queue.to_owned() });
        }
        let failed = |source| Error::Listen { address: listen, source };
        let listener = TcpListener::bind(listen).map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        let (heard, inbox) = sync_channel(INBOX);
        let front = Arc::new(Front {
            pass: secret.into(),
            strangers: Strangers::new(STRANGERS),
            is_closed: AtomicBool::new(false),
            last: AtomicU64::new(0),
            inbox: heard,
        });
        let receiving = Arc::clone(&front);
        thread::Builder::new()
            .name("phalanx-pool".into())
            .spawn(move || receive(&listener, &receiving))
            .map_err(|source| Error::System { what: "a thread for the pool", source })?;
        Ok(Server { address, front, inbox, pool, journal, links: HashMap::new(), say })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Ends it.
    pub fn stopper(&self) -> Stopper {
        Stopper(self.front.inbox.clone())
    }

    /// Goes on until it is stopped.
    pub fn run(mut self) -> Result<(), Error> {
        let mut beat_at = Instant::now() + BEAT;
        loop {
            let wake_at = self.pool.wake_at().map_or(beat_at, |at| at.min(beat_at));
            match self.inbox.recv_timeout(wake_at.saturating_duration_since(Instant::now())) {
                Ok(Heard::Came(link, channel)) => drop(self.links.insert(link, channel)),
                Ok(Heard::Said(link, said)) => self.heed(Event::Said(link, said))?,
                Ok(Heard::Gone(link)) => {
                    self.links.remove(&link);
                    self.heed(Event::Gone(link))?;
                }
                Ok(Heard::Asked(ask, answers)) => {
                    let (answer, orders) = self.pool.ask(now(), ask);
                    self.follow(orders)?;
                    // Whoever asked may have gone.
                    let _ = answers.try_send(answer);
                }
                Ok(Heard::Stop) => return Ok(()),
                Err(RecvTimeoutError::Timeout) => {}
                // The front holds the other end.
                Err(RecvTimeoutError::Disconnected) => {
                    unreachable!("the front is as long there as the server")
                }
            }
            // Also where so much is said that no wait comes to its end.
            if self.pool.wake_at().is_some_and(|at| Instant::now() >= at) {
                self.heed(Event::Tick)?;
            }
            if Instant::now() >= beat_at {
                self.links.values().for_each(|link| tell(link, &ToNode::Beat));
                beat_at = Instant::now() + BEAT;
            }
        }
    }

    fn heed(&mut self, event: Event) -> Result<(), Error> {
        let orders = self.pool.heed(now(), event);
        self.follow(orders)
    }

    fn follow(&mut self, orders: Vec<Order>) -> Result<(), Error> {
        let written = orders.iter().filter_map(|order| match order {
            Order::Write(entry) => Some(entry.clone()),
            _ => None,
        });
        let entries: Vec<Entry> = written.collect();
        if !entries.is_empty() {
            self.journal.write(&entries)?;
        }
        for order in orders {
            match order {
                Order::Write(_) => {}
                Order::Say(line) => (self.say)(&line),
                Order::Tell(link, message) => {
                    if let Some(link) = self.links.get(&link) {
                        tell(link, &message);
                    }
                }
                // It closes its end once it has read what was said.
                Order::Close(link) => drop(self.links.get(&link).map(|link| link.shutdown(Shutdown::Write))),
            }
        }
        Ok(())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.front.is_closed.store(true, Ordering::Relaxed);
        // A connection that is gone already needs no closing.
        self.links.values().for_each(|link| drop(link.shutdown(Shutdown::Both)));
        // A connection to itself wakes the thread that accepts; if none can be made, nothing is listening any more.
        let _ = TcpStream::connect_timeout(&self.address, Duration::from_secs(1));
    }
}

fn now() -> Now {
    Now { at: Instant::now(), ms: clock_ms() }
}

/// A node that can't be told is cut off: it comes back, and says what it knows.
fn tell(link: &Channel, message: &ToNode) {
    if say(link, message).is_err() {
        let _ = link.shutdown(Shutdown::Both);
    }
}

/// Hands a message to the system.
pub(crate) fn say(mut link: &Channel, message: &impl Serialize) -> std::io::Result<()> {
    write_frame(&mut link, &serde_json::to_vec(message).expect("a message is always JSON"))
}

/// Who has proven itself.
enum Guest {
    Node,
    Asker,
}

impl Reception for Front {
    type Guest = (Channel, Guest);

    const THREAD: &'static str = "phalanx-pool-in";

    fn strangers(&self) -> &Strangers<TcpStream> {
        &self.strangers
    }

    fn is_closed(&self) -> bool {
        self.is_closed.load(Ordering::Relaxed)
    }

    fn prove(&self, stream: TcpStream) -> Result<(Channel, Guest), HandshakeError> {
        let mut guest = Guest::Asker;
        let answer = |theirs: &Hello| {
            let is_node = theirs.purpose == NODE_PURPOSE;
            if is_node {
                guest = Guest::Node;
            }
            hello(if is_node { NODE_PURPOSE } else { ASKER_PURPOSE })
        };
        let (channel, _) = Channel::accept(stream, &self.pass, &Deadline::after(NEWCOMER_LIMIT), answer)?;
        channel.set_write_timeout(Some(SAY_LIMIT))?;
        channel.set_read_timeout(Some(SILENCE))?;
        Ok((channel, guest))
    }

    fn serve(&self, (channel, guest): (Channel, Guest)) -> Result<(), String> {
        match guest {
            Guest::Node => {
                let link = self.last.fetch_add(1, Ordering::Relaxed);
                // The pool is over where nobody takes it.
                let pass_on = |heard| self.inbox.send(heard).map_err(|_| "the pool has ended".to_owned());
                pass_on(Heard::Came(link, channel.clone()))?;
                let how = loop {
                    match hear(&channel) {
                        Ok(Some(said)) => pass_on(Heard::Said(link, said))?,
                        Ok(None) => break Ok(()),
                        Err(reason) => break Err(reason),
                    }
                };
                let _ = channel.shutdown(Shutdown::Both);
                pass_on(Heard::Gone(link))?;
                how
            }
            Guest::Asker => {
                while let Some(ask) = hear(&channel)? {
                    let (answers, answered) = sync_channel(1);
                    let ended = |_| "the pool has ended".to_owned();
                    self.inbox.send(Heard::Asked(ask, answers)).map_err(|_| ended(()))?;
                    let answer = answered.recv_timeout(ANSWER_LIMIT).map_err(|_| ended(()))?;
                    say(&channel, &answer).map_err(|error| error.to_string())?;
                }
                Ok(())
            }
        }
    }
}

/// What either end of a pool's connection says first.
pub(crate) fn hello(purpose: &str) -> Hello {
    Hello { purpose: purpose.into(), rank: Rank(0), generation: Generation(0) }
}

/// The next that is said, or the end of the connection.
fn hear<T: serde::de::DeserializeOwned>(mut channel: &Channel) -> Result<Option<T>, String> {
    match read_frame(&mut channel, MAX_FRAME) {
        Ok(frame) => serde_json::from_slice(&frame).map(Some).map_err(|error| error.to_string()),
        Err(error) if error.kind() == ErrorKind::InvalidData => Err(error.to_string()),
        Err(_) => Ok(None),
    }
}
