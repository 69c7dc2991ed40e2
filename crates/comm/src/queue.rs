//! The operations of a group in the order in which they were issued, played one after the other.

use crate::element::{Element, Erased, ReduceOp};
use crate::engine::{Kind, LONGEST_SLEEP, Play, Signature};
use crate::error::Error;
use crate::group::Group;
use crate::schedule::Schedule;
use crate::transport::{Transport, Waker};
use crate::work::AnyBuffer;
use phalanx_wire::{Deadline, Rank};
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};

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
    pub(crate) aside: Arc<Aside>,
    /// None in a world of one.
    pub(crate) wires: Option<Box<dyn Transport>>,
    pub(crate) collectives: u64,
    /// For each peer, how many messages went to it, and how many came from it.
    pub(crate) messages: HashMap<usize, [u64; 2]>,
    pub(crate) tickets: u64,
    pub(crate) queue: VecDeque<Queued>,
    pub(crate) done: HashMap<u64, Box<dyn AnyBuffer>>,
    pub(crate) failed: Option<Error>,
}

pub(crate) struct Queued {
    pub(crate) ticket: u64,
    pub(crate) play: Play,
    pub(crate) buffer: Box<dyn AnyBuffer>,
    pub(crate) wanted: bool,
}

impl Aside {
    /// The list is whole between any two statements that could panic.
    pub(crate) fn forgotten(&self) -> MutexGuard<'_, Vec<u64>> {
        self.forgotten.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

impl Engine {
    pub(crate) fn collective<T: Element>(
        &mut self,
        kind: Kind,
        detail: u32,
        schedule: Schedule,
        count: usize,
        op: ReduceOp,
    ) -> Play {
        self.collectives += 1;
        let signature = Signature { kind, sequence: self.collectives, element: T::KIND, count, detail };
        Play::new(signature, schedule, Erased::of::<T>(), op)
    }

    pub(crate) fn forget(&mut self, ticket: u64) {
        if self.done.remove(&ticket).is_none()
            && let Some(queued) = self.queue.iter_mut().find(|queued| queued.ticket == ticket)
        {
            queued.wanted = false;
        }
    }

    pub(crate) fn fail(&mut self, error: Error) {
        if self.failed.is_none() {
            if let Some(listener) = self.aside.listener.get() {
                listener(&error);
            }
            self.failed = Some(error);
            self.queue.clear();
            if let Some(wires) = &mut self.wires {
                wires.close();
            }
        }
    }

    pub(crate) fn check(&self) -> Result<(), Error> {
        self.failed.clone().map_or(Ok(()), Err)
    }

    /// Plays the queue as far as it goes now.
    pub(crate) fn advance(&mut self, rank: Rank, world_size: usize) {
        while self.failed.is_none()
            && let Some(first) = self.queue.front_mut()
        {
            let result = match &mut self.wires {
                Some(wires) => first.play.advance(rank, first.buffer.bytes(), wires.as_mut()),
                None => Ok(true),
            };
            match result {
                Ok(false) => return,
                Ok(true) => {
                    let mut first = self.queue.pop_front().expect("looked at above");
                    first.play.finish(world_size, first.buffer.bytes());
                    if first.wanted {
                        self.done.insert(first.ticket, first.buffer);
                    }
                }
                Err(error) => self.fail(error),
            }
        }
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

    /// Plays the queue until `ticket` is done, or all of it.
    pub(crate) fn drain(
        &mut self,
        group: &Group,
        deadline: Deadline,
        ticket: Option<u64>,
    ) -> Result<(), Error> {
        loop {
            self.heed();
            self.advance(group.rank(), group.world_size());
            if ticket.is_some_and(|ticket| self.done.contains_key(&ticket)) {
                return Ok(());
            }
            self.check()?;
            let Some(first) = self.queue.front() else { return Ok(()) };
            if deadline.expired() {
                let error = first.play.timeout(&deadline);
                self.fail(error.clone());
                return Err(error);
            }
            if deadline.waited() < group.spin() {
                std::hint::spin_loop();
                continue;
            }
            let (receives, sends) = first.play.waits_for();
            if let Some(wires) = &mut self.wires {
                wires.park(&receives, &sends, deadline.remaining().min(LONGEST_SLEEP));
            }
        }
    }

    /// Plays what was started before, then `play` over a borrowed buffer, to the end.
    pub(crate) fn run(
        &mut self,
        group: &Group,
        deadline: Deadline,
        mut play: Play,
        buffer: &mut [u8],
    ) -> Result<(), Error> {
        self.check()?;
        self.drain(group, deadline, None)?;
        loop {
            self.heed();
            self.check()?;
            let Some(wires) = &mut self.wires else { break };
            match play.advance(group.rank(), buffer, wires.as_mut()) {
                Ok(true) => break,
                Ok(false) => {}
                Err(error) => {
                    self.fail(error.clone());
                    return Err(error);
                }
            }
            if deadline.expired() {
                let error = play.timeout(&deadline);
                self.fail(error.clone());
                return Err(error);
            }
            if deadline.waited() < group.spin() {
                std::hint::spin_loop();
                continue;
            }
            let (receives, sends) = play.waits_for();
            wires.park(&receives, &sends, deadline.remaining().min(LONGEST_SLEEP));
        }
        play.finish(group.world_size(), buffer);
        Ok(())
    }
}
