//! Events: points in a stream that others can wait for.

use crate::calls::Handle;
use crate::codes;
use crate::context::Context;
use crate::error::Error;
use std::fmt;
use std::ptr;
use std::sync::Arc;
use std::time::Duration;

// CU_EVENT_DISABLE_TIMING.
const NO_TIMING: u32 = 2;

/// Whether an event knows when it came about; one that doesn't costs less.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Timing {
    /// [`Event::since`] can be asked.
    Yes,
    /// It can't.
    No,
}

/// A point in a stream. [`Stream::record`](crate::Stream::record) says which; until then all is well with it.
pub struct Event {
    context: Arc<Context>,
    handle: Handle,
}

// SAFETY: the driver takes an event from any thread.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    pub(crate) fn new(context: &Arc<Context>, timing: Timing) -> Result<Event, Error> {
        let flags = match timing {
            Timing::Yes => 0,
            Timing::No => NO_TIMING,
        };
        let mut handle = ptr::null_mut();
        // SAFETY: the call writes one handle, which is destroyed with the event.
        let code = unsafe { (context.enter()?.event_create)(&mut handle, flags) };
        context.succeeded("cuEventCreate", code, || "a new event".to_owned())?;
        Ok(Event { context: context.clone(), handle })
    }

    pub(crate) fn raw(&self) -> Handle {
        self.handle
    }

    pub(crate) fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Whether it has come about.
    pub fn is_done(&self) -> Result<bool, Error> {
        // SAFETY: the event is alive.
        let code = unsafe { (self.context.enter()?.event_query)(self.handle) };
        if code == codes::NOT_READY {
            return Ok(false);
        }
        self.context.succeeded("cuEventQuery", code, || "asking an event whether it is done".to_owned())?;
        Ok(true)
    }

    /// Lets the thread wait until it has come about.
    pub fn synchronize(&self) -> Result<(), Error> {
        // SAFETY: the event is alive.
        let code = unsafe { (self.context.enter()?.event_synchronize)(self.handle) };
        self.context.succeeded("cuEventSynchronize", code, || "waiting for an event".to_owned())
    }

    /// As [`Event::synchronize`], but without a wait where it has come about.
    pub(crate) fn settle(&self) -> Result<(), Error> {
        if self.is_done()? { Ok(()) } else { self.synchronize() }
    }

    /// The time from `earlier` to this; both have [`Timing::Yes`] and have come about.
    pub fn since(&self, earlier: &Event) -> Result<Duration, Error> {
        let mut ms = 0.0;
        // SAFETY: both are alive; the call writes one number.
        let code = unsafe { (self.context.enter()?.event_elapsed)(&mut ms, earlier.handle, self.handle) };
        self.context.succeeded("cuEventElapsedTime", code, || "the time between two events".to_owned())?;
        Ok(Duration::from_secs_f32(ms.max(0.0) / 1000.0))
    }
}

impl fmt::Debug for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Event({:p} of GPU {})", self.handle, self.context.gpu())
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        let Ok(calls) = self.context.enter() else { return };
        // SAFETY: made in `new`, and used nowhere after this; streams that wait for it still do.
        unsafe { (calls.event_destroy)(self.handle) };
    }
}
