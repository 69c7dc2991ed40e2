//! A rank's end of a group: the operations.

use crate::element::{Element, Erased, ReduceOp};
use crate::engine::{Kind, Play, Signature, reduction};
use crate::error::Error;
use crate::queue::{Aside, Engine, Queued};
use crate::schedule::{self, Schedule};
use crate::transport::{Transport, threads};
use crate::work::{AnyBuffer, Buffer, Work};
use phalanx_wire::{Deadline, Generation, Rank};
use std::collections::{HashMap, VecDeque};
use std::marker::PhantomData;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, TryLockError};
use std::time::Duration;

/// A rank's end of a group. Clones are the same end.
#[derive(Clone)]
pub struct Group {
    rank: Rank,
    world_size: usize,
    generation: Generation,
    /// How long a blocking operation waits.
    timeout: Duration,
    /// How long a wait looks again and again before it sleeps.
    spin: Duration,
    engine: Arc<Mutex<Engine>>,
    description: Arc<str>,
    /// Beside the engine, whose lock is held for as long as an operation waits.
    aside: Arc<Aside>,
}

/// How long a wait spins where every rank has a core: some times what falling asleep and being woken cost.
const SPIN: Duration = Duration::from_micros(200);

/// How long to sleep before looking again whether another thread still has the engine.
const BUSY_NAP: Duration = Duration::from_micros(100);

/// How long a blocking operation waits unless the group was made with another time.
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(300);

/// How many ranks there are, and how many of them share this one's host.
#[derive(Clone, Copy)]
pub(crate) struct Neighbours {
    pub(crate) ranks: usize,
    pub(crate) here: usize,
}

impl Group {
    /// A world of one.
    pub fn solo() -> Group {
        Group::over(Rank(0), Neighbours { ranks: 1, here: 1 }, Generation(0), DEFAULT_TIMEOUT, None)
    }

    /// The ends of `n` ranks that are threads of this process.
    pub fn threads(n: usize) -> Vec<Group> {
        let ends = threads(n).into_iter().enumerate();
        ends.map(|(rank, end)| {
            let world = Neighbours { ranks: n, here: n };
            Group::over(Rank(rank as u32), world, Generation(0), DEFAULT_TIMEOUT, Some(Box::new(end)))
        })
        .collect()
    }

    pub(crate) fn over(
        rank: Rank,
        world: Neighbours,
        generation: Generation,
        timeout: Duration,
        wires: Option<Box<dyn Transport>>,
    ) -> Group {
        let description = match &wires {
            Some(wires) => format!("{} ranks over {}", world.ranks, wires.name()),
            None => "a world of one".into(),
        };
        let wake = wires.as_ref().map(|wires| wires.waker());
        let (reason, listener) = (OnceLock::new(), OnceLock::new());
        let aside = Arc::new(Aside { reason, forgotten: Mutex::default(), wake, listener });
        let engine = Engine {
            aside: Arc::clone(&aside),
            wires,
            collectives: 0,
            messages: HashMap::new(),
            tickets: 0,
            queue: VecDeque::new(),
            done: HashMap::new(),
            failed: None,
        };
        // With a core for every rank a peer is probably about to answer; with fewer, it needs the core that looking takes.
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let spin = if world.here <= cores { SPIN } else { Duration::ZERO };
        Group {
            rank,
            world_size: world.ranks,
            generation,
            timeout,
            spin,
            engine: Arc::new(Mutex::new(engine)),
            description: description.into(),
            aside,
        }
    }

    /// The same group with another limit for blocking operations.
    pub fn with_timeout(self, timeout: Duration) -> Group {
        Group { timeout, ..self }
    }

    /// Which rank this end is.
    pub fn rank(&self) -> Rank {
        self.rank
    }

    /// How many ranks there are.
    pub fn world_size(&self) -> usize {
        self.world_size
    }

    /// Which membership of the run the group belongs to.
    pub fn generation(&self) -> Generation {
        self.generation
    }

    /// How long a wait looks again and again before it sleeps.
    pub(crate) fn spin(&self) -> Duration {
        self.spin
    }

    /// How long blocking operations wait.
    pub fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Has `listener` told, once, when the group fails: before the others notice that this rank leaves. The first one stays.
    pub fn on_failure(&self, listener: impl Fn(&Error) + Send + Sync + 'static) {
        let _ = self.aside.listener.set(Box::new(listener));
    }

    /// What this group is, for people.
    pub fn describe(&self) -> &str {
        &self.description
    }

    /// Reduces the ranks' slices elementwise; every rank gets the result. All slices have one length.
    pub fn all_reduce<T: Element>(&self, values: &mut [T], op: ReduceOp) -> Result<(), Error> {
        let schedule = schedule::all_reduce(self.rank.index(), self.world_size, values.len(), size_of::<T>());
        self.run(Kind::AllReduce, reduction(op), schedule, values, op)
    }

    /// Every rank gets the slice of rank `root`.
    #[track_caller]
    pub fn broadcast<T: Element>(&self, values: &mut [T], root: Rank) -> Result<(), Error> {
        self.check_peer("broadcast", root);
        let schedule = schedule::broadcast(self.rank.index(), self.world_size, values.len(), root.index());
        self.run(Kind::Broadcast, root.0, schedule, values, ReduceOp::Sum)
    }

    /// Reduces the ranks' `input`s elementwise; rank r gets part r of `world_size` equal parts.
    #[track_caller]
    pub fn reduce_scatter<T: Element>(
        &self,
        input: &[T],
        output: &mut [T],
        op: ReduceOp,
    ) -> Result<(), Error> {
        let (len, part) = (input.len(), output.len());
        assert!(
            len == part * self.world_size,
            "reduce_scatter: {len} elements in, {part} out, {} ranks",
            self.world_size
        );
        let schedule = schedule::reduce_scatter(self.rank.index(), self.world_size, len);
        let mut all = input.to_vec();
        self.run(Kind::ReduceScatter, reduction(op), schedule, &mut all, op)?;
        output.copy_from_slice(&all[self.rank.index() * part..][..part]);
        Ok(())
    }

    /// Every rank gets all `input`s, one after the other in the order of ranks. All have one length.
    #[track_caller]
    pub fn all_gather<T: Element>(&self, input: &[T], output: &mut [T]) -> Result<(), Error> {
        let (part, len) = (input.len(), output.len());
        assert!(
            len == part * self.world_size,
            "all_gather: {part} elements in, {len} out, {} ranks",
            self.world_size
        );
        output[self.rank.index() * part..][..part].copy_from_slice(input);
        let schedule = schedule::all_gather(self.rank.index(), self.world_size, len);
        self.run(Kind::AllGather, 0, schedule, output, ReduceOp::Sum)
    }

    /// Returns when every rank has called it.
    pub fn barrier(&self) -> Result<(), Error> {
        let schedule = schedule::barrier(self.rank.index(), self.world_size);
        self.run::<u8>(Kind::Barrier, 0, schedule, &mut [], ReduceOp::Sum)
    }

    /// Sends a slice to rank `to`, which receives one of the same length.
    #[track_caller]
    pub fn send<T: Element>(&self, values: &[T], to: Rank) -> Result<(), Error> {
        self.check_peer("send", to);
        let mut copy = values.to_vec();
        self.run_message(to, 0, schedule::send(to.index(), values.len()), &mut copy)
    }

    /// Receives what rank `from` sends into a slice of the same length.
    #[track_caller]
    pub fn receive<T: Element>(&self, values: &mut [T], from: Rank) -> Result<(), Error> {
        self.check_peer("receive", from);
        self.run_message(from, 1, schedule::receive(from.index(), values.len()), values)
    }

    /// Starts an all-reduce of a buffer that comes back, reduced, from [`Work::wait`].
    pub fn start_all_reduce<B: Buffer>(&self, buffer: B, op: ReduceOp) -> Work<B> {
        let (rank, n) = (self.rank.index(), self.world_size);
        let schedule = |count| schedule::all_reduce(rank, n, count, size_of::<B::Item>());
        self.start(Kind::AllReduce, reduction(op), schedule, buffer, op)
    }

    /// Starts a broadcast of rank `root`'s buffer.
    #[track_caller]
    pub fn start_broadcast<B: Buffer>(&self, buffer: B, root: Rank) -> Work<B> {
        self.check_peer("broadcast", root);
        let schedule = |count| schedule::broadcast(self.rank.index(), self.world_size, count, root.index());
        self.start(Kind::Broadcast, root.0, schedule, buffer, ReduceOp::Sum)
    }

    /// Starts a reduce-scatter in place: the buffer is `world_size` equal parts, of which part `rank` comes back reduced; the
    /// others come back with values that mean nothing.
    #[track_caller]
    pub fn start_reduce_scatter<B: Buffer>(&self, buffer: B, op: ReduceOp) -> Work<B> {
        let schedule = |count| {
            self.check_parts("reduce_scatter", count);
            schedule::reduce_scatter(self.rank.index(), self.world_size, count)
        };
        self.start(Kind::ReduceScatter, reduction(op), schedule, buffer, op)
    }

    /// Starts an all-gather in place: the buffer is `world_size` equal parts, of which part `rank` is this rank's.
    #[track_caller]
    pub fn start_all_gather<B: Buffer>(&self, buffer: B) -> Work<B> {
        let schedule = |count| {
            self.check_parts("all_gather", count);
            schedule::all_gather(self.rank.index(), self.world_size, count)
        };
        self.start(Kind::AllGather, 0, schedule, buffer, ReduceOp::Sum)
    }

    /// Queues an operation behind those that were started before.
    fn start<B: Buffer>(
        &self,
        kind: Kind,
        detail: u32,
        schedule: impl FnOnce(usize) -> Schedule,
        buffer: B,
        op: ReduceOp,
    ) -> Work<B> {
        let mut buffer = Box::new(buffer);
        let count = buffer.as_mut_slice().len();
        let schedule = schedule(count);
        let ticket = self.engine(&Deadline::after(self.timeout)).map(|mut engine| {
            let play = engine.collective::<B::Item>(kind, detail, schedule, count, op);
            engine.tickets += 1;
            let ticket = engine.tickets;
            // In a group that failed the buffer is let go at once; `wait` says why.
            if engine.failed.is_none() {
                engine.queue.push_back(Queued { ticket, play, buffer, wanted: true });
                engine.advance(self.rank, self.world_size);
            }
            ticket
        });
        Work { group: self.clone(), ticket, buffer: PhantomData, taken: false }
    }

    /// Moves what can be moved now in operations that were started. Never blocks: where another thread is in an operation of
    /// this group, that one moves them.
    pub fn progress(&self) {
        if let Some(mut engine) = self.free_engine() {
            engine.advance(self.rank, self.world_size);
        }
    }

    /// Ends the group, from any thread: every pending and later operation fails at once, here with this reason, on other ranks
    /// because this one left.
    pub fn abort(&self, reason: &str) {
        // The first reason stays.
        let _ = self.aside.reason.set(reason.to_owned());
        match self.free_engine() {
            Some(engine) => drop(engine),
            // Whoever holds the engine sees the reason when it looks again, which is now.
            None => self.aside.wake.iter().for_each(|wake| wake()),
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
        loop {
            if let Some(engine) = self.free_engine() {
                return Ok(engine);
            }
            if deadline.expired() {
                return Err(Error::Busy { waited: deadline.waited() });
            }
            std::thread::sleep(BUSY_NAP);
        }
    }

    /// The engine, if no other thread has it. A panic inside it would leave an operation half-played, so the group is then
    /// taken as failed.
    fn free_engine(&self) -> Option<MutexGuard<'_, Engine>> {
        let mut engine = match self.engine.try_lock() {
            Ok(engine) => engine,
            Err(TryLockError::WouldBlock) => return None,
            Err(TryLockError::Poisoned(poisoned)) => {
                let mut engine = poisoned.into_inner();
                engine.fail(Error::Aborted { reason: "a thread panicked inside an operation".into() });
                engine
            }
        };
        engine.heed();
        self.aside.forgotten().drain(..).for_each(|ticket| engine.forget(ticket));
        Some(engine)
    }

    fn run<T: Element>(
        &self,
        kind: Kind,
        detail: u32,
        schedule: Schedule,
        values: &mut [T],
        op: ReduceOp,
    ) -> Result<(), Error> {
        let deadline = Deadline::after(self.timeout);
        let mut engine = self.engine(&deadline)?;
        let play = engine.collective::<T>(kind, detail, schedule, values.len(), op);
        engine.run(self, deadline, play, bytemuck::cast_slice_mut(values))
    }

    #[track_caller]
    fn run_message<T: Element>(
        &self,
        peer: Rank,
        direction: usize,
        schedule: Schedule,
        values: &mut [T],
    ) -> Result<(), Error> {
        assert!(peer != self.rank, "a message from rank {peer} to itself");
        let deadline = Deadline::after(self.timeout);
        let mut engine = self.engine(&deadline)?;
        let sequence = &mut engine.messages.entry(peer.index()).or_default()[direction];
        *sequence += 1;
        let signature = Signature {
            kind: Kind::Message,
            sequence: *sequence,
            element: T::KIND,
            count: values.len(),
            detail: 0,
        };
        let play = Play::new(signature, schedule, Erased::of::<T>(), ReduceOp::Sum);
        engine.run(self, deadline, play, bytemuck::cast_slice_mut(values))
    }

    pub(crate) fn finish(&self, ticket: u64, deadline: Deadline) -> Result<Box<dyn AnyBuffer>, Error> {
        let mut engine = match self.engine(&deadline) {
            Ok(engine) => engine,
            Err(error) => {
                self.forget(ticket);
                return Err(error);
            }
        };
        engine.drain(self, deadline, Some(ticket))?;
        Ok(engine.done.remove(&ticket).expect("a drained operation is done"))
    }

    pub(crate) fn is_finished(&self, ticket: u64) -> bool {
        self.free_engine().is_some_and(|engine| engine.failed.is_some() || engine.done.contains_key(&ticket))
    }

    pub(crate) fn forget(&self, ticket: u64) {
        self.aside.forgotten().push(ticket);
        // Whoever has the engine now, or has it next, lets go of the buffer.
        drop(self.free_engine());
    }
}
