//! Graphs: what streams were given once, to be done again and again at the cost of one call.

use crate::calls::{Code, Handle};
use crate::context::Context;
use crate::error::Error;
use crate::stream::Stream;
use std::ffi::c_int;
use std::fmt;
use std::ptr;
use std::sync::Arc;

// CU_STREAM_CAPTURE_MODE_THREAD_LOCAL: other threads, a loader's above all, may do meanwhile what this one mustn't.
const THREAD_LOCAL: c_int = 1;

/// A piece of work with fixed addresses and numbers, ready to be launched. What changes from launch to launch lies in device
/// memory.
pub struct Graph {
    context: Arc<Context>,
    handle: Handle,
}

// SAFETY: the driver takes an instantiated graph from any thread; launches of one graph take `&mut self`, one after the other.
unsafe impl Send for Graph {}
// SAFETY: nothing can be done behind a shared reference.
unsafe impl Sync for Graph {}

impl Stream {
    /// Records what `work` gives to this stream, and to streams that wait for its events, as a graph; none of it is done. A stream
    /// that joins in this way must be waited for by this one before the end.
    ///
    /// While it records, this thread can neither allocate, nor wait, nor copy from or to the host; what it drops is given back
    /// afterwards. Other threads can. However `work` ends, the stream is as usable after as it was before.
    pub fn capture<T, E: From<Error>>(&self, work: impl FnOnce() -> Result<T, E>) -> Result<(Graph, T), E> {
        let mut recording = Recording::begin(self)?;
        let given = work()?;
        let graph = recording.end()?;
        Ok((graph.instantiate()?, given))
    }
}

/// A capture, which ends with this also when the work fails or panics.
struct Recording<'a> {
    stream: &'a Stream,
    is_open: bool,
}

impl<'a> Recording<'a> {
    fn begin(stream: &'a Stream) -> Result<Recording<'a>, Error> {
        let context = stream.context();
        let calls = context.enter()?;
        // Before it begins, so that nothing is given back any more.
        context.capture_begins();
        // SAFETY: the stream is alive.
        let code = unsafe { (calls.capture_begin)(stream.raw(), THREAD_LOCAL) };
        let about = || "a stream whose work is to become a graph".to_owned();
        context.succeeded("cuStreamBeginCapture", code, about).inspect_err(|_| context.capture_ended())?;
        Ok(Recording { stream, is_open: true })
    }

    fn end(&mut self) -> Result<Recorded, Error> {
        let (code, graph) = self.close()?;
        let context = self.stream.context();
        context.succeeded("cuStreamEndCapture", code, || "work that was to become a graph".to_owned())?;
        Ok(graph)
    }

    fn close(&mut self) -> Result<(Code, Recorded), Error> {
        let context = self.stream.context();
        let mut recorded = Recorded { context: context.clone(), handle: ptr::null_mut() };
        self.is_open = false;
        let code = context.enter().map(|calls| {
            // SAFETY: begun on this stream by this thread, since `Recording` is local to one call; the call writes one handle, or
            // null.
            unsafe { (calls.capture_end)(self.stream.raw(), &mut recorded.handle) }
        });
        context.capture_ended();
        Ok((code?, recorded))
    }
}

impl Drop for Recording<'_> {
    fn drop(&mut self) {
        if self.is_open {
            let _ = self.close();
        }
    }
}

/// A graph as it was recorded.
struct Recorded {
    context: Arc<Context>,
    handle: Handle,
}

impl Recorded {
    fn instantiate(&self) -> Result<Graph, Error> {
        let mut handle = ptr::null_mut();
        // SAFETY: the graph is alive; the call writes one handle, which is destroyed with `Graph`. There are no flags.
        let code = unsafe { (self.context.enter()?.graph_instantiate)(&mut handle, self.handle, 0) };
        self.context.succeeded("cuGraphInstantiate", code, || "making a graph ready".to_owned())?;
        Ok(Graph { context: self.context.clone(), handle })
    }
}

impl Drop for Recorded {
    fn drop(&mut self) {
        if self.handle.is_null() {
            return;
        }
        let Ok(calls) = self.context.enter() else { return };
        // SAFETY: made at the end of a capture, and used nowhere after this.
        unsafe { (calls.graph_destroy)(self.handle) };
    }
}

impl Graph {
    /// Gives the stream all of the graph's work. It waits until an earlier launch of the same graph is done.
    ///
    /// # Safety
    /// All memory that its work was captured with is still there and nobody else's until it is done, and kernels find in it what
    /// they need not to leave their buffers. The [`Gpu`](crate::Gpu) that it was captured on is still open: its kernels are unloaded
    /// with the last handle to it.
    #[track_caller]
    pub unsafe fn launch(&mut self, stream: &Stream) -> Result<(), Error> {
        stream.of_one_gpu("launch of a graph", &self.context);
        stream.launching()?;
        // SAFETY: both are alive; the memory is the caller's promise.
        let code = unsafe { (self.context.enter()?.graph_launch)(self.handle, stream.raw()) };
        self.context.succeeded("cuGraphLaunch", code, || "launching a graph".to_owned())?;
        stream.launched(|| "running a graph".to_owned())
    }
}

impl fmt::Debug for Graph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Graph({:p} of GPU {})", self.handle, self.context.gpu())
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        let Ok(calls) = self.context.enter() else { return };
        // SAFETY: made in `instantiate`, and used nowhere after this; a launch that is under way is still done.
        unsafe { (calls.executable_destroy)(self.handle) };
    }
}
