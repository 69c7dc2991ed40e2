//! How long a GPU is at each thing that a stream is given: an event before it and one behind, which are read when nobody waits for the GPU.

use crate::context::Context;
use crate::error::Error;
use crate::event::{Event, Timing};
use crate::lock::lock;
use crate::stream::Stream;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

/// Pairs of events before they are read, for which the stream is waited for.
const MOST_PAIRS: usize = 1 << 12;

/// What a stream was given of one kind.
#[derive(Clone, Debug, PartialEq)]
pub struct Timed {
    /// What, with its sizes.
    pub what: String,
    /// How often.
    pub calls: u64,
    /// How long in all: from when the GPU could have begun, as far as its stream goes, until it was done.
    pub total: Duration,
}

/// What a stream takes times with.
#[derive(Default)]
pub(crate) struct Timer {
    is_wanted: AtomicBool,
    taken: Mutex<Taken>,
}

#[derive(Default)]
struct Taken {
    /// Before what is being given.
    begun: Option<Event>,
    ended: Vec<(String, [Event; 2])>,
    spare: Vec<Event>,
    all: HashMap<String, (u64, Duration)>,
}

impl Taken {
    fn mark(&mut self, context: &Arc<Context>, stream: &Stream) -> Result<Event, Error> {
        let event = self.spare.pop().map_or_else(|| Event::new(context, Timing::Yes), Ok)?;
        stream.record(&event)?;
        Ok(event)
    }

    /// Reads all events, which have come about.
    fn read(&mut self) -> Result<(), Error> {
        for (what, [begun, ended]) in self.ended.drain(..) {
            let (calls, total) = self.all.entry(what).or_default();
            *calls += 1;
            *total += ended.since(&begun)?;
            self.spare.extend([begun, ended]);
        }
        Ok(())
    }
}

impl Timer {
    pub(crate) fn is_wanted(&self) -> bool {
        self.is_wanted.load(Ordering::Relaxed)
    }

    /// Whatever made a thread panic, the lists are whole.
    fn taken(&self) -> MutexGuard<'_, Taken> {
        lock(&self.taken)
    }
}

impl Stream {
    /// Takes the time of all that the stream is given from now on, by one thread at a time, until [`Stream::stop_timing`]. What is recorded as
    /// a graph is timed when that is launched, as a whole.
    pub fn start_timing(&self) {
        *self.timer().taken() = Taken::default();
        self.timer().is_wanted.store(true, Ordering::Relaxed);
    }

    /// Takes no more times; those that were taken, the longest first. Waits for all that the stream has.
    pub fn stop_timing(&self) -> Result<Vec<Timed>, Error> {
        if !self.timer().is_wanted.swap(false, Ordering::Relaxed) {
            return Ok(Vec::new());
        }
        let mut kept = self.timer().taken();
        self.synchronize()?;
        let mut taken = std::mem::take(&mut *kept);
        drop(kept);
        taken.read()?;
        let all = taken.all.into_iter().map(|(what, (calls, total))| Timed { what, calls, total });
        let mut all: Vec<Timed> = all.collect();
        all.sort_by(|a, b| b.total.cmp(&a.total).then_with(|| a.what.cmp(&b.what)));
        Ok(all)
    }

    /// What is to be done before the stream is given work, also by a library: [`Stream::launched`] comes behind it.
    pub fn launching(&self) -> Result<(), Error> {
        if !self.timer().is_wanted() {
            return Ok(());
        }
        let is_capturing = self.is_capturing()?;
        let mut taken = self.timer().taken();
        // What failed to begin has left its mark.
        taken.begun = None;
        if !is_capturing {
            taken.begun = Some(taken.mark(self.context(), self)?);
        }
        Ok(())
    }

    /// The work that [`Stream::launching`] came before was given.
    pub(crate) fn time(&self, what: String) -> Result<(), Error> {
        let mut taken = self.timer().taken();
        let Some(begun) = taken.begun.take() else { return Ok(()) };
        let ended = taken.mark(self.context(), self)?;
        taken.ended.push((what, [begun, ended]));
        if taken.ended.len() >= MOST_PAIRS {
            self.synchronize()?;
            taken.read()?;
        }
        Ok(())
    }
}
