//! The operations of a group: collectives in the order in which they were issued, one after the other, and letters beside
//! them.

pub(crate) mod wait;

pub(crate) use wait::{Elsewhere, Patience, Until};

use crate::buffer::AnyBuffer;
use crate::common::{Regions, Turn, Way};
use crate::element::{Erased, ReduceOp};
use crate::engine::Play;
use crate::error::Error;
use crate::flight::{Flight, Peer};
use crate::mail::{Delivered, Mail};
use crate::recorder::Recorder;
use crate::schedule::{self, Schedule};
use crate::siblings::Siblings;
use crate::signature::Signature;
use crate::transport::{Transport, Waker};
use crate::word::Word;
use phalanx_wire::{Deadline, Generation, Rank};
use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::Instant;

/// What other threads can do while one has the engine.
pub(crate) struct Aside {
    /// Why the group was aborted.
    pub(crate) reason: OnceLock<String>,
    /// Operations whose buffers nobody wants any more.
    forgotten: Mutex<Vec<u64>>,
    /// Whether there are any: a look at the list itself costs as much as a small message.
    forgets: AtomicBool,
    /// Ends the sleep of an operation that waits.
    pub(crate) wake: Option<Waker>,
    /// Told when the group fails.
    pub(crate) listener: OnceLock<Listener>,
    /// Given what this rank knows of the group when that fails.
    pub(crate) keeper: OnceLock<Keeper>,
    /// Told of waits.
    pub(crate) observer: OnceLock<Arc<dyn WaitObserver>>,
    pub(crate) generation: Generation,
    /// The ranks as the run numbers them.
    pub(crate) members: Arc<[Rank]>,
}

pub(crate) type Listener = Arc<dyn Fn(&Error) + Send + Sync>;
pub(crate) type Keeper = Arc<dyn Fn(&Flight) + Send + Sync>;

/// Is told, on the thread that waits, of its waits for other ranks: from when it looks out for them to when it has what it waits
/// for, or is given up. Each blocking operation has at least one, so telling must cost next to nothing.
pub trait WaitObserver: Send + Sync {
    /// A wait begins.
    fn begins(&self);

    /// The wait is over.
    fn ends(&self);
}

pub(crate) struct Engine {
    pub(crate) rank: Rank,
    pub(crate) aside: Arc<Aside>,
    /// None in a world of one.
    pub(crate) wires: Option<Box<dyn Transport>>,
    pub(crate) mail: Mail,
    pub(crate) collectives: u64,
    pub(crate) recorder: Recorder,
    pub(crate) tickets: u64,
    pub(crate) queue: VecDeque<Queued>,
    pub(crate) done: HashMap<u64, Delivered>,
    pub(crate) failed: Option<Error>,
    /// Operations that are done, the oldest first: one that comes again finds its schedule and its memory here.
    pub(crate) spare: VecDeque<Box<Play>>,
    /// Memory that all ranks see.
    pub(crate) regions: Regions,
    pub(crate) siblings: Arc<Siblings>,
}

pub(crate) struct Queued {
    pub(crate) ticket: u64,
    pub(crate) play: Box<Play>,
    /// What is played after that, over what the buffer shows once it was settled again.
    pub(crate) then: VecDeque<Box<Play>>,
    pub(crate) buffer: Box<dyn AnyBuffer>,
}

impl Queued {
    /// A single collective.
    pub(crate) fn one(ticket: u64, play: Box<Play>, buffer: Box<dyn AnyBuffer>) -> Queued {
        Queued { ticket, play, then: VecDeque::new(), buffer }
    }
}

impl Aside {
    pub(crate) fn new(wake: Option<Waker>, generation: Generation, members: Arc<[Rank]>) -> Aside {
        Aside {
            reason: OnceLock::new(),
            forgotten: Mutex::default(),
            forgets: AtomicBool::new(false),
            wake,
            listener: OnceLock::new(),
            keeper: OnceLock::new(),
            observer: OnceLock::new(),
            generation,
            members,
        }
    }

    /// The list is whole between any two statements that could panic.
    fn forgotten(&self) -> MutexGuard<'_, Vec<u64>> {
        self.forgotten.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Goes through with a wait, of which whoever wants to know is told.
    pub(crate) fn waiting<T>(&self, wait: impl FnOnce() -> T) -> T {
        let observer = self.observer.get();
        observer.inspect(|observer| observer.begins());
        let waited = wait();
        observer.inspect(|observer| observer.ends());
        waited
    }

    /// Nobody wants the buffer of this operation any more.
    pub(crate) fn forget(&self, ticket: u64) {
        let mut forgotten = self.forgotten();
        forgotten.push(ticket);
        self.forgets.store(true, Ordering::Relaxed);
    }
}

/// How many different operations are kept: as many as a training step has, and more.
const SPARE: usize = 16;

impl Engine {
    pub(crate) fn next_ticket(&mut self) -> u64 {
        self.tickets += 1;
        self.tickets
    }

    /// Whether something was started that isn't done.
    pub(crate) fn is_busy(&self) -> bool {
        self.failed.is_none() && !(self.queue.is_empty() && self.mail.is_idle())
    }

    /// Bytes that went in or out.
    pub(crate) fn moved(&self) -> u64 {
        self.mail.moved() + self.mail.sent()
    }

    pub(crate) fn fail(&mut self, error: Error) {
        if self.failed.is_none() {
            if let Some(first) = self.queue.front() {
                self.recorder.failed_in(first.play.signature.sequence, first.play.moved());
            }
            let word = Word::of(self.rank, &error, &self.aside.members);
            let error = error.in_run(&self.aside.members);
            if let Some(keep) = self.aside.keeper.get() {
                keep(&self.flight(&error));
            }
            if let Some(listener) = self.aside.listener.get() {
                listener(&error);
            }
            self.end(&word, error);
        }
    }

    /// Nobody has the group any more: lets go of it, and of its connections.
    pub(crate) fn leave(&mut self) {
        self.retire(Error::Aborted { by: self.rank, reason: "it left the group".into() });
        self.wires = None;
    }

    /// Ends a group that isn't needed any more, which is no failure and told to nobody; later operations have this error.
    pub(crate) fn retire(&mut self, error: Error) {
        if self.failed.is_none() {
            self.end(&Word::farewell(self.rank), error.in_run(&self.aside.members));
        }
    }

    fn end(&mut self, word: &Word, error: Error) {
        // What came before is there all the same.
        self.done.extend(self.mail.delivered().map(|letter| (letter.ticket, letter)));
        self.queue.clear();
        self.mail.clear();
        if let Some(wires) = &mut self.wires {
            wires.part(word);
        }
        self.failed = Some(error);
    }

    /// What is known of the group, which fails with this error.
    fn flight(&self, error: &Error) -> Flight {
        let run = |rank: usize| self.aside.members[rank].0;
        let own = self.rank.index();
        let others: Vec<Rank> =
            (0..self.mail.ranks()).filter(|&r| r != own).map(|r| Rank(r as u32)).collect();
        let peers = self.mail.heard(&others).into_iter().map(|heard| Peer {
            rank: run(heard.rank.index()),
            sent: self.mail.sent_to(heard.rank.index()),
            heard: heard.operation,
            ago: heard.ago,
        });
        Flight {
            generation: self.aside.generation.0,
            members: self.aside.members.iter().map(|rank| rank.0).collect(),
            rank: run(own),
            error: error.to_string(),
            operations: self.recorder.records(),
            peers: peers.collect(),
        }
    }

    pub(crate) fn check(&self) -> Result<(), Error> {
        self.failed.clone().map_or(Ok(()), Err)
    }

    /// Plays what was started as far as it goes now.
    pub(crate) fn advance(&mut self) {
        let Err(error) = self.try_advance() else { return };
        self.fail(error);
    }

    fn try_advance(&mut self) -> Result<(), Error> {
        while self.failed.is_none()
            && let Some(first) = self.queue.front_mut()
        {
            if let Some(wires) = &mut self.wires
                && !first.play.advance(
                    self.rank,
                    first.buffer.bytes(),
                    &mut self.mail,
                    wires.as_mut(),
                    &self.regions,
                )?
            {
                break;
            }
            first.buffer.settle();
            if let Some(next) = first.then.pop_front() {
                let play = std::mem::replace(&mut first.play, next);
                self.played(play);
                continue;
            }
            let Queued { ticket, play, buffer, .. } = self.queue.pop_front().expect("looked at above");
            self.played(play);
            self.done.insert(ticket, Delivered { ticket, buffer, peer: self.rank.index() });
        }
        if let Some(wires) = &mut self.wires
            && self.failed.is_none()
        {
            if self.mail.is_busy() {
                self.mail.advance(wires.as_mut())?;
            }
            if self.mail.has_delivered() {
                self.done.extend(self.mail.delivered().map(|letter| (letter.ticket, letter)));
            }
        }
        // Nobody comes for these.
        let Engine { aside, done, mail, .. } = self;
        if aside.forgets.load(Ordering::Relaxed) {
            let mut forgotten = aside.forgotten();
            forgotten.retain(|ticket| done.remove(ticket).is_none() && !mail.cancel(*ticket));
            aside.forgets.store(!forgotten.is_empty(), Ordering::Relaxed);
        }
        Ok(())
    }

    /// Fails if the group was aborted.
    pub(crate) fn heed(&mut self) {
        if self.failed.is_none()
            && let Some(reason) = self.aside.reason.get()
        {
            let reason = reason.clone();
            self.fail(Error::Aborted { by: self.rank, reason });
        }
    }

    /// Waits for an operation that was started.
    pub(crate) fn finish(
        &mut self,
        patience: Patience,
        deadline: Deadline,
        ticket: u64,
    ) -> Result<Delivered, Error> {
        self.wait(patience, deadline, Until::Done(ticket), Instant::now())?;
        Ok(self.done.remove(&ticket).expect("an operation that was waited for is done"))
    }

    /// Waits for what the ranks do elsewhere, and looks after them meanwhile.
    pub(crate) fn wait_elsewhere(
        &mut self,
        patience: Patience,
        deadline: Deadline,
        what: &mut dyn Elsewhere,
    ) -> Result<(), Error> {
        self.check()?;
        self.wait(patience, deadline, Until::Elsewhere(what), deadline.begun())
    }

    /// Plays what was started before, then `play` over a borrowed buffer, to the end.
    pub(crate) fn run(
        &mut self,
        patience: Patience,
        deadline: Deadline,
        mut play: Box<Play>,
        buffer: &mut [u8],
    ) -> Result<(), Error> {
        self.check()?;
        if !self.queue.is_empty() {
            self.wait(patience, deadline, Until::Drained, Instant::now())?;
        }
        self.wait(patience, deadline, Until::Played(&mut play, buffer), deadline.begun())?;
        self.played(play);
        Ok(())
    }

    /// A collective is done.
    fn played(&mut self, play: Box<Play>) {
        self.recorder.done(play.signature.sequence, self.mail.now());
        if self.spare.len() == SPARE {
            self.spare.pop_front();
        }
        self.spare.push_back(play);
    }

    /// A collective of a slice that is issued now, of which only the number is new if there was one like it: in place where the
    /// slice lies in memory that all ranks see, if nobody asked for another way.
    pub(crate) fn collective(
        &mut self,
        mut signature: Signature,
        element: Erased,
        op: ReduceOp,
        now: Instant,
        slice: &[u8],
        schedule: impl FnOnce() -> Schedule,
    ) -> Box<Play> {
        let way = Way::of(&signature);
        let Some((way, place)) = way.and_then(|way| Some((way, self.regions.find(slice, way.least())?)))
        else {
            return self.issue(signature, op, now, |signature| Play::new(signature, schedule(), element, op));
        };
        let (rank, n) = (self.rank.index(), self.mail.ranks());
        [signature.detail, signature.at] = place.words();
        self.issue(signature, op, now, |signature| {
            let turn = Turn::new(way, place, slice.len(), n, rank);
            Play::new(signature, schedule::in_place(rank, n), element, op).with_turn(turn)
        })
    }

    fn issue(
        &mut self,
        signature: Signature,
        op: ReduceOp,
        now: Instant,
        make: impl FnOnce(Signature) -> Play,
    ) -> Box<Play> {
        self.collectives += 1;
        let sequence = self.collectives;
        let known = self.spare.iter().rposition(|play| play.repeats(&signature, op));
        let play = match known.and_then(|at| self.spare.remove(at)) {
            Some(play) => play.again(sequence),
            None => Box::new(make(Signature { sequence, ..signature })),
        };
        self.recorder.issued(play.signature, play.choice(), now);
        play
    }
}
