//! The operations of a group: collectives in the order in which they were issued, one after the other, and letters beside
//! them.

use crate::buffer::AnyBuffer;
use crate::element::{Erased, ReduceOp};
use crate::engine::{LONGEST_SLEEP, Play};
use crate::error::Error;
use crate::mail::{Delivered, Mail};
use crate::recorder::Recorder;
use crate::schedule::Schedule;
use crate::signature::Signature;
use crate::transport::{Transport, Waker};
use phalanx_wire::{Deadline, Rank};
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::{Duration, Instant};

/// What other threads can do while one has the engine.
pub(crate) struct Aside {
    /// Why the group was aborted.
    pub(crate) reason: OnceLock<String>,
    /// Operations whose buffers nobody wants any more.
    pub(crate) forgotten: Mutex<Vec<u64>>,
    /// Ends the sleep of an operation that waits.
    pub(crate) wake: Option<Waker>,
    /// Told when the group fails.
    pub(crate) listener: OnceLock<Listener>,
}

pub(crate) type Listener = Box<dyn Fn(&Error) + Send + Sync>;

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
}

pub(crate) struct Queued {
    pub(crate) ticket: u64,
    pub(crate) play: Play,
    pub(crate) buffer: Box<dyn AnyBuffer>,
}

impl Aside {
    /// The list is whole between any two statements that could panic.
    pub(crate) fn forgotten(&self) -> MutexGuard<'_, Vec<u64>> {
        self.forgotten.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

/// Looks at what moved between two looks at the clock, which cost as much.
const LOOKS_PER_CLOCK: u32 = 16;
/// How long nothing moves before a wait takes in letters of ranks that it doesn't wait for.
const LISTEN_AFTER: Duration = Duration::from_millis(2);
/// How long a wait that spins keeps its core to itself.
const ALONE: Duration = Duration::from_micros(20);

/// What a thread waits for inside the engine.
enum Until<'a> {
    /// An operation that was started.
    Done(u64),
    /// All collectives that were started.
    Drained,
    /// This one, over a borrowed buffer.
    Played(&'a mut Play, &'a mut [u8]),
}

impl Engine {
    pub(crate) fn next_ticket(&mut self) -> u64 {
        self.tickets += 1;
        self.tickets
    }

    pub(crate) fn fail(&mut self, error: Error) {
        if self.failed.is_none() {
            if let Some(listener) = self.aside.listener.get() {
                listener(&error);
            }
            self.failed = Some(error);
            // What came before is there all the same.
            self.done.extend(self.mail.delivered().map(|letter| (letter.ticket, letter)));
            self.queue.clear();
            self.mail.clear();
            if let Some(wires) = &mut self.wires {
                wires.close();
            }
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
                && !first.play.advance(self.rank, first.buffer.bytes(), &mut self.mail, wires.as_mut())?
            {
                break;
            }
            let Queued { ticket, play, mut buffer } = self.queue.pop_front().expect("looked at above");
            self.recorder.done(play.signature.sequence);
            buffer.settle();
            self.done.insert(ticket, Delivered { ticket, buffer, peer: self.rank.index() });
        }
        if let Some(wires) = &mut self.wires
            && self.failed.is_none()
        {
            if self.mail.is_busy() {
                self.mail.advance(wires.as_mut())?;
            }
            self.done.extend(self.mail.delivered().map(|letter| (letter.ticket, letter)));
        }
        // Nobody comes for these.
        let Engine { aside, done, mail, .. } = self;
        aside.forgotten().retain(|ticket| done.remove(ticket).is_none() && !mail.cancel(*ticket));
        Ok(())
    }

    /// Fails if the group was aborted.
    pub(crate) fn heed(&mut self) {
        if self.failed.is_none()
            && let Some(reason) = self.aside.reason.get()
        {
            let reason = reason.clone();
            self.fail(Error::Aborted { reason });
        }
    }

    /// Waits for an operation that was started.
    pub(crate) fn finish(
        &mut self,
        spin: Duration,
        deadline: Deadline,
        ticket: u64,
    ) -> Result<Delivered, Error> {
        self.wait(spin, deadline, Until::Done(ticket))?;
        Ok(self.done.remove(&ticket).expect("an operation that was waited for is done"))
    }

    /// Plays what was started before, then `play` over a borrowed buffer, to the end.
    pub(crate) fn run(
        &mut self,
        spin: Duration,
        deadline: Deadline,
        mut play: Play,
        buffer: &mut [u8],
    ) -> Result<(), Error> {
        self.check()?;
        if !self.queue.is_empty() {
            self.wait(spin, deadline, Until::Drained)?;
        }
        self.wait(spin, deadline, Until::Played(&mut play, buffer))?;
        self.recorder.done(play.signature.sequence);
        Ok(())
    }

    /// Plays until something is done; looks again and again while something moved in the last `spin`, and then sleeps. The group
    /// fails with the wait.
    fn wait(&mut self, spin: Duration, deadline: Deadline, until: Until<'_>) -> Result<(), Error> {
        let result = self.play_until(spin, deadline, until);
        self.mail.listen(false);
        result
    }

    fn play_until(&mut self, spin: Duration, deadline: Deadline, mut until: Until<'_>) -> Result<(), Error> {
        let (mut looks, mut moved, mut since) = (0u32, self.mail.moved(), Instant::now());
        loop {
            self.heed();
            self.advance();
            match &mut until {
                Until::Done(ticket) if self.done.contains_key(ticket) => return Ok(()),
                Until::Done(ticket) if self.failed.is_none() && self.queue.is_empty() => {
                    if let Some(error) = self.mail.stuck(*ticket) {
                        self.fail(error);
                    }
                }
                Until::Drained if self.failed.is_none() && self.queue.is_empty() => return Ok(()),
                Until::Played(play, buffer) if self.failed.is_none() => {
                    let Some(wires) = &mut self.wires else { return Ok(()) };
                    match play.advance(self.rank, buffer, &mut self.mail, wires.as_mut()) {
                        Ok(true) => return Ok(()),
                        Ok(false) => {}
                        Err(error) => self.fail(error),
                    }
                }
                _ => {}
            }
            self.check()?;
            looks = looks.wrapping_add(1);
            if spin > Duration::ZERO && !looks.is_multiple_of(LOOKS_PER_CLOCK) {
                std::hint::spin_loop();
                continue;
            }
            if deadline.expired() {
                let error = self.timeout(&deadline, &until);
                self.fail(error.clone());
                return Err(error);
            }
            if self.mail.moved() != moved {
                (moved, since) = (self.mail.moved(), Instant::now());
            }
            let quiet = since.elapsed();
            if quiet < spin {
                // The peer may need this very core.
                if quiet > ALONE {
                    std::thread::yield_now()
                } else {
                    std::hint::spin_loop()
                }
                continue;
            }
            // Whoever sends a letter may be what the others wait for; but to be woken by all costs more than by some.
            let listens = quiet >= LISTEN_AFTER;
            self.mail.listen(listens);
            let (mut receives, mut sends) = self.mail.waits_for();
            for play in self.playing(&until) {
                let (more_receives, more_sends) = play.waits_for();
                receives.extend(more_receives);
                sends.extend(more_sends);
            }
            receives.sort_unstable();
            receives.dedup();
            sends.sort_unstable();
            sends.dedup();
            if let Some(wires) = &mut self.wires {
                let nap = if listens { LONGEST_SLEEP } else { LISTEN_AFTER - quiet };
                wires.park(&receives, &sends, deadline.remaining().min(nap));
            }
        }
    }

    /// The collectives that want to be moved now.
    fn playing<'a>(&'a self, until: &'a Until<'_>) -> impl Iterator<Item = &'a Play> {
        let borrowed = match until {
            Until::Played(play, _) => Some(&**play),
            _ => None,
        };
        self.queue.front().map(|queued| &queued.play).into_iter().chain(borrowed)
    }

    /// The error of a wait that was given up.
    fn timeout(&self, deadline: &Deadline, until: &Until<'_>) -> Error {
        let letter = match until {
            Until::Done(ticket) => self.mail.find(*ticket),
            _ => None,
        };
        let (operation, (receives, sends)) = match (letter, self.playing(until).next()) {
            (Some((operation, peers)), _) => (operation, (peers, Vec::new())),
            (None, Some(play)) => (play.signature.describe(), play.waits_for()),
            (None, None) => ("a message".into(), self.mail.waits_for()),
        };
        let mut missing: Vec<Rank> = receives.into_iter().chain(sends).map(|r| Rank(r as u32)).collect();
        missing.sort_unstable();
        missing.dedup();
        let heard = self.mail.heard(&missing);
        Error::Timeout { operation, waited: deadline.waited(), missing, heard }
    }

    /// A collective that is issued now.
    pub(crate) fn collective(
        &mut self,
        mut signature: Signature,
        schedule: Schedule,
        element: Erased,
        op: ReduceOp,
    ) -> Play {
        self.collectives += 1;
        signature.sequence = self.collectives;
        signature.algorithm = Some(schedule.choice.algorithm);
        self.recorder.issued(signature, schedule.choice);
        Play::new(signature, schedule, element, op)
    }
}
