//! A rank's end of a group: what it is, and how threads take turns in it.

mod batch;
mod collectives;
mod family;
mod memory;
mod messages;

pub use batch::{Batch, Batched, Member, OwnedBatch};
#[cfg(test)]
pub(crate) use collectives::signature;
pub(crate) use family::{Home, Kin};
pub use messages::{Source, Transfer};

use crate::common::Regions;
use crate::endpoint::PeerAddress;
use crate::error::Error;
use crate::flight::Flight;
use crate::mail::{Delivered, Mail};
use crate::queue::{Aside, Elsewhere, Engine, Patience, WaitObserver};
use crate::recorder::{Record, Recorder};
use crate::schedule::{Algorithm, Choice, Seat};
use crate::siblings::Siblings;
use crate::topology::Topology;
use crate::transport::{Transport, threads};
use crate::watch::{DEFAULT_SILENCE, LEAST_SILENCE};
use crate::work::Work;
use phalanx_wire::{Deadline, Generation, Rank};
use std::collections::{HashMap, VecDeque};
use std::marker::PhantomData;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::Duration;

/// A rank's end of a group. Clones are the same end.
#[derive(Clone)]
pub struct Group {
    rank: Rank,
    world_size: usize,
    topology: Topology,
    generation: Generation,
    /// How long a blocking operation waits.
    timeout: Duration,
    /// How all-reduces are carried out, if not by what is best.
    algorithm: Option<Algorithm>,
    /// The ranks as the run numbers them.
    members: Arc<[Rank]>,
    /// What tells it from other groups of its generation.
    name: u64,
    /// The groups of this rank that come of the same world.
    siblings: Arc<Siblings>,
    kin: Kin,
    patience: Patience,
    engine: Arc<Held>,
    description: Arc<str>,
    /// Beside the engine, whose lock is held for as long as an operation waits.
    aside: Arc<Aside>,
}

/// An engine, for as long as there is an end of its group. Whoever lets go of the last one sees the group off, which may take
/// until all that was sent has arrived; nobody who only moves it for a moment does.
struct Held(Arc<Mutex<Engine>>);

impl Drop for Held {
    fn drop(&mut self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).leave();
    }
}

/// How long a wait spins where every rank has a core: some times what falling asleep and being woken cost.
const SPIN: Duration = Duration::from_micros(200);

/// How long to sleep before looking again whether another thread still has the engine.
const BUSY_NAP: Duration = Duration::from_micros(100);

/// How often an abort tries to close the group itself, where a thread that holds it doesn't.
const ABORT_TRIES: usize = 20;

/// How long a blocking operation waits unless the group was made with another time.
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(300);

/// What a rank's end of a group is, apart from its connections.
pub(crate) struct Place {
    pub(crate) rank: Rank,
    pub(crate) topology: Topology,
    pub(crate) generation: Generation,
    pub(crate) timeout: Duration,
    /// How long a peer may give no sign of life.
    pub(crate) silence: Option<Duration>,
    /// How all-reduces are carried out, if not by what is best.
    pub(crate) algorithm: Option<Algorithm>,
    /// The ranks as the run numbers them.
    pub(crate) members: Vec<Rank>,
    /// What tells it from other groups of its generation: 0 for the world.
    pub(crate) name: u64,
    /// The groups of this rank that come of the same world.
    pub(crate) siblings: Arc<Siblings>,
    pub(crate) kin: Kin,
}

impl Place {
    /// In a group that is the whole world, on one host.
    pub(crate) fn in_world(rank: Rank, n: usize, generation: Generation, timeout: Duration) -> Place {
        let members = (0..n).map(|rank| Rank(rank as u32)).collect();
        let topology = Topology::one_host(n);
        let silence = Some(DEFAULT_SILENCE);
        Place {
            rank,
            topology,
            generation,
            timeout,
            silence,
            algorithm: None,
            members,
            name: 0,
            siblings: Arc::default(),
            kin: Kin::Alone,
        }
    }
}

impl Group {
    /// A world of one.
    pub fn solo() -> Group {
        Group::over(Place::in_world(Rank(0), 1, Generation(0), DEFAULT_TIMEOUT), None)
    }

    /// The ends of `n` ranks that are threads of this process.
    pub fn threads(n: usize) -> Vec<Group> {
        let ends = threads(n).into_iter().enumerate();
        ends.map(|(rank, end)| {
            let place = Place::in_world(Rank(rank as u32), n, Generation(0), DEFAULT_TIMEOUT);
            let place = Place { kin: Kin::Threads(end.shared()), ..place };
            Group::over(place, (n > 1).then(|| Box::new(end) as _))
        })
        .collect()
    }

    pub(crate) fn over(place: Place, wires: Option<Box<dyn Transport>>) -> Group {
        let Place { rank, topology, generation, timeout, silence, algorithm, members, name, siblings, kin } =
            place;
        let n = topology.ranks();
        let description = match &wires {
            Some(wires) => format!("{n} ranks over {}", wires.name()),
            None => "a world of one".into(),
        };
        let wake = wires.as_ref().map(|wires| wires.waker());
        let members: Arc<[Rank]> = members.into();
        let aside = Arc::new(Aside::new(wake, generation, Arc::clone(&members)));
        let engine = Engine {
            rank,
            aside: Arc::clone(&aside),
            wires,
            mail: Mail::new(rank, n),
            collectives: 0,
            recorder: Recorder::default(),
            spare: VecDeque::new(),
            regions: Regions::default(),
            siblings: Arc::clone(&siblings),
            tickets: 0,
            queue: VecDeque::new(),
            done: HashMap::new(),
            failed: None,
        };
        // With a core for every rank a peer is probably about to answer; with fewer, it needs the core that looking takes.
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let spin = if topology.has_cores(rank.index(), cores) { SPIN } else { Duration::ZERO };
        Group {
            rank,
            world_size: n,
            topology,
            generation,
            timeout,
            algorithm,
            members,
            name,
            siblings,
            kin,
            patience: Patience { spin, silence },
            engine: Arc::new(Held(Arc::new(Mutex::new(engine)))),
            description: description.into(),
            aside,
        }
    }

    /// The same group with another limit for blocking operations.
    pub fn with_timeout(self, timeout: Duration) -> Group {
        Group { timeout, ..self }
    }

    /// The same group with another limit for how long a rank that is waited for may give no sign of life before the wait ends with
    /// [`Error::Silent`]: 2 seconds at first, 600 milliseconds at least, which is three signs of life; none for as long as the wait
    /// may last. A process of this host that is stopped, which is known for certain, has three quarters of that. A rank that
    /// computes gives signs of life, however busy its host is. Its parts, and what is rebuilt of it, have the same.
    #[track_caller]
    pub fn with_silence(self, silence: Option<Duration>) -> Group {
        let limit = silence.unwrap_or(Duration::MAX);
        assert!(
            limit >= LEAST_SILENCE,
            "with_silence: {limit:?} is less than {LEAST_SILENCE:?}, in which three signs of life come"
        );
        Group { patience: Patience { silence, ..self.patience }, ..self }
    }

    /// The same group with another way to carry out all-reduces; none is what is best for their size and where the ranks are. Those
    /// of its parts, and of what is rebuilt of it, go the same way. All ranks must say the same.
    #[track_caller]
    pub fn with_algorithm(self, algorithm: Option<Algorithm>) -> Group {
        let can = algorithm.is_none_or(|algorithm| Algorithm::OF_ALL_REDUCE.contains(&algorithm));
        assert!(can, "with_algorithm: {algorithm:?} can't all-reduce");
        Group { algorithm, ..self }
    }

    /// How an all-reduce of so many bytes is carried out, and why so.
    pub fn choice_of_all_reduce(&self, bytes: usize) -> Choice {
        self.seat().all_reduce_choice(bytes)
    }

    /// Which ranks share a host.
    pub(crate) fn topology(&self) -> &Topology {
        &self.topology
    }

    /// Whether what goes over TCP is to be encrypted.
    pub(crate) fn is_encrypted(&self) -> bool {
        matches!(&self.kin, Kin::Processes(home) if home.door.tls().is_some())
    }

    /// What schedules are made for.
    pub(crate) fn seat(&self) -> Seat<'_> {
        Seat { rank: self.rank.index(), topology: &self.topology, asked: self.algorithm }
    }

    /// Which rank this end is.
    pub fn rank(&self) -> Rank {
        self.rank
    }

    /// Which rank this end is, as the run numbers it.
    fn known_as(&self) -> Rank {
        self.members[self.rank.index()]
    }

    /// How many ranks there are.
    pub fn world_size(&self) -> usize {
        self.world_size
    }

    /// How many of them are on this one's host, itself among them.
    pub fn local_world_size(&self) -> usize {
        self.topology.neighbours(self.rank.index()).count()
    }

    /// The group's ranks, as the run numbers them.
    pub fn members(&self) -> &[Rank] {
        &self.members
    }

    /// Which membership of the run the group belongs to.
    pub fn generation(&self) -> Generation {
        self.generation
    }

    /// How long blocking operations wait.
    pub fn timeout(&self) -> Duration {
        self.timeout
    }

    /// How long a rank that is waited for may give no sign of life; none for as long as the wait lasts.
    pub(crate) fn silence(&self) -> Option<Duration> {
        self.patience.silence
    }

    /// Has `listener` told, once, when the group fails: before the others notice that this rank leaves; so have groups that take
    /// the place of this one from now on. The first one stays.
    pub fn on_failure(&self, listener: impl Fn(&Error) + Send + Sync + 'static) {
        let _ = self.aside.listener.set(Arc::new(listener));
    }

    /// Has `keep` given what this rank knows of the group when that fails, before the others are told; so have groups that come
    /// of this one from now on. The first one stays.
    pub fn on_flight(&self, keep: impl Fn(&Flight) + Send + Sync + 'static) {
        let _ = self.aside.keeper.set(Arc::new(keep));
    }

    /// Has `observer` told of each wait for other ranks; so have groups that come of this one from now on. The first one stays.
    pub fn on_wait(&self, observer: Arc<dyn WaitObserver>) {
        let _ = self.aside.observer.set(observer);
    }

    /// Where this rank can be reached by processes, if the group was made by [`Group::connect`], or comes of such a one: by those
    /// that are in it, and by those that [`Group::succeed`] takes in.
    pub fn address(&self) -> Option<&PeerAddress> {
        match &self.kin {
            Kin::Processes(home) => Some(home.door.address()),
            Kin::Alone | Kin::Threads(_) => None,
        }
    }

    /// What this group is, for people.
    pub fn describe(&self) -> &str {
        &self.description
    }

    /// Moves what can be moved now in operations that were started. Never blocks: where another thread is in an operation of
    /// this group, that one moves them.
    pub fn progress(&self) {
        if let Some(mut engine) = self.free_engine() {
            engine.advance();
        }
    }

    /// The last operations that this rank took part in, the oldest first, whether the group has failed or not; none while another
    /// thread waits in one.
    pub fn history(&self) -> Vec<Record> {
        self.free_engine().map_or_else(Vec::new, |engine| engine.recorder.records())
    }

    /// How many bytes this rank has sent in the group, headers included; none while another thread waits in an operation.
    pub fn bytes_sent(&self) -> Option<u64> {
        self.free_engine().map(|engine| engine.mail.sent())
    }

    /// Ends the group, from any thread: every pending and later operation fails at once, on all ranks, with this reason.
    pub fn abort(&self, reason: &str) {
        // The first reason stays.
        let _ = self.aside.reason.set(reason.to_owned());
        for _ in 0..ABORT_TRIES {
            if let Some(engine) = self.free_engine() {
                return drop(engine);
            }
            // Whoever waits in the engine sees the reason now; who is about to leave it may not look again.
            self.aside.wake.iter().for_each(|wake| wake());
            std::thread::sleep(BUSY_NAP);
        }
    }

    #[track_caller]
    fn check_parts(&self, op: &str, count: usize) {
        let n = self.world_size;
        assert!(
            count.is_multiple_of(n),
            "{op}: {count} elements can't be {n} equal parts, one for each rank"
        );
    }

    #[track_caller]
    fn check_peer(&self, op: &str, peer: Rank) {
        assert!(peer.index() < self.world_size, "{op}: rank {peer} in a group of {} ranks", self.world_size);
    }

    /// The engine, unless another thread has it for longer than this wait may last.
    fn engine(&self, deadline: &Deadline) -> Result<MutexGuard<'_, Engine>, Error> {
        if let Some(engine) = self.free_engine() {
            return Ok(engine);
        }
        self.aside.waiting(|| {
            loop {
                if let Some(engine) = self.free_engine() {
                    return Ok(engine);
                }
                if deadline.expired() {
                    return Err(Error::Busy { waited: deadline.waited() });
                }
                std::thread::sleep(BUSY_NAP);
            }
        })
    }

    /// The engine, if no other thread has it. A panic inside it would leave an operation half-played, so the group is then
    /// taken as failed.
    pub(crate) fn free_engine(&self) -> Option<MutexGuard<'_, Engine>> {
        let mut engine = match self.engine.0.try_lock() {
            Ok(engine) => engine,
            Err(TryLockError::WouldBlock) => return None,
            Err(TryLockError::Poisoned(poisoned)) => {
                let mut engine = poisoned.into_inner();
                let reason = "a thread panicked inside an operation".into();
                engine.fail(Error::Aborted { by: self.rank, reason });
                engine
            }
        };
        engine.heed();
        Some(engine)
    }

    /// An operation that `issue` hands to the engine under its ticket. In a group that failed nothing is issued, and a buffer is
    /// let go at once; `wait` says why.
    fn begin<B>(&self, issue: impl FnOnce(&mut Engine, u64) -> Result<(), Error>) -> Work<B> {
        let ticket = self.engine(&Deadline::after(self.timeout)).map(|mut engine| {
            let ticket = engine.next_ticket();
            if engine.failed.is_none() {
                match issue(&mut engine, ticket) {
                    Ok(()) => engine.advance(),
                    Err(error) => engine.fail(error),
                }
                if engine.is_busy() {
                    self.siblings.add(&self.engine.0);
                }
            }
            ticket
        });
        Work { group: self.clone(), ticket, buffer: PhantomData, taken: false }
    }

    pub(crate) fn finish(&self, ticket: u64, deadline: Deadline) -> Result<Delivered, Error> {
        match self.engine(&deadline) {
            Ok(mut engine) => engine.finish(self.patience, deadline, ticket),
            Err(error) => {
                self.forget(ticket);
                Err(error)
            }
        }
    }

    /// Waits for what the ranks of the group do together elsewhere; one that fails, leaves or falls silent meanwhile ends the wait
    /// and the group, as a deadline that passes does.
    pub(crate) fn wait_elsewhere(&self, deadline: Deadline, what: &mut dyn Elsewhere) -> Result<(), Error> {
        self.engine(&deadline)?.wait_elsewhere(self.patience, deadline, what)
    }

    pub(crate) fn is_finished(&self, ticket: u64) -> bool {
        self.free_engine().is_some_and(|engine| engine.failed.is_some() || engine.done.contains_key(&ticket))
    }

    pub(crate) fn forget(&self, ticket: u64) {
        self.aside.forget(ticket);
        // Whoever has the engine now, or has it next, lets go of the buffer.
        self.progress();
    }
}
