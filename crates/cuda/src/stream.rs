//! Streams: what is given to one is done in order, what is given to two isn't, unless one waits for an event of the other.

use crate::address::StreamHandle;
use crate::calls::Handle;
use crate::codes;
use crate::context::Context;
use crate::error::Error;
use crate::event::Event;
use crate::gpu::DebugSync;
use crate::timing::Timer;
use std::ffi::c_int;
use std::fmt;
use std::ptr;
use std::sync::Arc;

// CU_STREAM_NON_BLOCKING: doesn't wait for the default stream, which nothing of ours uses.
const NON_BLOCKING: u32 = 1;

/// Which stream's work comes first where both have some.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Priority {
    /// What the others wait for: copies and communication, which are short.
    High,
    /// Everything else.
    Low,
}

/// A stream of a GPU. It may be used from any thread.
pub struct Stream {
    context: Arc<Context>,
    handle: Handle,
    timer: Timer,
}

// SAFETY: the driver takes a stream from any thread, and keeps its queue whole by itself.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

impl Stream {
    pub(crate) fn new(context: &Arc<Context>, priority: Priority) -> Result<Stream, Error> {
        let calls = context.enter()?;
        let (mut least, mut greatest) = (0, 0);
        // SAFETY: the call writes two numbers.
        let code = unsafe { (calls.priorities)(&mut least, &mut greatest) };
        context.succeeded("cuCtxGetStreamPriorityRange", code, || "priorities of streams".to_owned())?;
        let number = match priority {
            Priority::High => greatest,
            Priority::Low => least,
        };
        let mut handle = ptr::null_mut();
        // SAFETY: the call writes one handle, which is destroyed with the stream.
        let code = unsafe { (calls.stream_create)(&mut handle, NON_BLOCKING, number) };
        context.succeeded("cuStreamCreateWithPriority", code, || format!("a stream of priority {number}"))?;
        Ok(Stream { context: context.clone(), handle, timer: Timer::default() })
    }

    /// By which the libraries know it. It is as good as this stream.
    pub fn handle(&self) -> StreamHandle {
        StreamHandle(self.handle)
    }

    pub(crate) fn raw(&self) -> Handle {
        self.handle
    }

    pub(crate) fn context(&self) -> &Arc<Context> {
        &self.context
    }

    pub(crate) fn timer(&self) -> &Timer {
        &self.timer
    }

    /// Lets what is given to the stream from now on wait for what `event` stands for. Never recorded, it stands for nothing.
    pub fn wait(&self, event: &Event) -> Result<(), Error> {
        self.of_one_gpu("wait", event.context());
        // SAFETY: both are alive; the flags are none.
        let code = unsafe { (self.context.enter()?.stream_wait)(self.handle, event.raw(), 0) };
        self.context.succeeded("cuStreamWaitEvent", code, || "a stream that waits for an event".to_owned())
    }

    /// Lets `event` stand for all that the stream was given so far, and for nothing that it stood for before.
    pub fn record(&self, event: &Event) -> Result<(), Error> {
        self.of_one_gpu("record", event.context());
        // SAFETY: both are alive.
        let code = unsafe { (self.context.enter()?.event_record)(event.raw(), self.handle) };
        self.context.succeeded("cuEventRecord", code, || "an event in a stream".to_owned())
    }

    /// Lets the thread wait until all is done. Fails where any of it fails, and while the stream is captured.
    pub fn synchronize(&self) -> Result<(), Error> {
        self.synchronize_about(|| "waiting for a stream".to_owned())
    }

    pub(crate) fn synchronize_about(&self, about: impl FnOnce() -> String) -> Result<(), Error> {
        // SAFETY: the stream is alive.
        let code = unsafe { (self.context.enter()?.stream_synchronize)(self.handle) };
        self.context.succeeded("cuStreamSynchronize", code, about)
    }

    /// What is to be done after the stream was given work, also by a library: nothing, or with [`DebugSync::Yes`] to wait for it, unless
    /// it only became part of a graph. A failure tells what the work was about, and so does whoever takes its time.
    pub fn launched(&self, about: impl Fn() -> String) -> Result<(), Error> {
        if self.timer.is_wanted() {
            self.time(about())?;
        }
        match self.context.debug_sync() {
            DebugSync::Yes if !self.is_capturing()? => self.synchronize_about(about),
            _ => Ok(()),
        }
    }

    /// Whether all is done.
    pub fn is_done(&self) -> Result<bool, Error> {
        // SAFETY: the stream is alive.
        let code = unsafe { (self.context.enter()?.stream_query)(self.handle) };
        if code == codes::NOT_READY {
            return Ok(false);
        }
        self.context.succeeded("cuStreamQuery", code, || "asking a stream whether it is done".to_owned())?;
        Ok(true)
    }

    /// Whether what it is given becomes part of a graph, because it is captured or waits for an event of a stream that is.
    pub fn is_capturing(&self) -> Result<bool, Error> {
        let mut status: c_int = 0;
        // SAFETY: the stream is alive; the call writes one number.
        let code = unsafe { (self.context.enter()?.stream_is_capturing)(self.handle, &mut status) };
        self.context
            .succeeded("cuStreamIsCapturing", code, || "asking a stream for its capture".to_owned())?;
        Ok(status != 0)
    }

    /// Panics where something of another GPU is handed to this stream.
    #[track_caller]
    pub(crate) fn of_one_gpu(&self, op: &str, other: &Arc<Context>) {
        assert!(
            Arc::ptr_eq(&self.context, other),
            "{op}: a stream of GPU {} with what was opened for GPU {} at another time or place",
            self.context.gpu(),
            other.gpu()
        );
    }
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Stream({:p} of GPU {})", self.handle, self.context.gpu())
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        let Ok(calls) = self.context.enter() else { return };
        // SAFETY: made in `new`, and used nowhere after this; what it was given is still done.
        unsafe { (calls.stream_destroy)(self.handle) };
    }
}
