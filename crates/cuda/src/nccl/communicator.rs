//! One rank's membership among ranks.

use super::UniqueId;
use super::calls::{Block, Calls};
use super::failure::{Cause, Failure};
use super::foreign::{self, Comm, Config, ForeignId, Functions, Status};
use super::number::Reduction;
use super::operation::{Kind, Operation};
use crate::address::{Address, StreamHandle};
use crate::error::Error;
use crate::gpu::Gpu;
use crate::lock::lock;
use std::ffi::c_int;
use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// How often a state is asked for before the thread sleeps in between, and how long it sleeps at most.
const EAGER_POLLS: u32 = 64;
const LONGEST_SLEEP: Duration = Duration::from_millis(1);
/// How long who drops a communicator waits for the library to end it.
const LONGEST_END: Duration = Duration::from_secs(5);

/// One rank among ranks that work together. Ended by [`finalize`](Communicator::finalize), or by being dropped, which aborts what
/// still runs.
///
/// All threads may use it; operations have the order in which they were issued, which must be the same on all ranks.
pub struct Communicator {
    pub(super) functions: Arc<Functions>,
    rank: usize,
    n_ranks: usize,
    patience: Duration,
    state: Mutex<State>,
    graphs: InGraph,
    /// Its GPU, where somebody has said which.
    gpu: Option<Gpu>,
    ended: Ended,
}

/// Tells that a graph has operations of a communicator, while this is there. The library ends a communicator only behind its graphs.
#[derive(Clone, Debug, Default)]
pub struct InGraph(Arc<()>);

/// How far a communicator's abort is.
#[derive(Clone, Default)]
struct Ended(Arc<(Mutex<Abort>, Condvar)>);

#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Abort {
    #[default]
    None,
    UnderWay,
    Over,
}

/// What changes in a communicator's life.
pub(super) struct State {
    /// None once it has ended.
    pub(super) comm: Option<Comm>,
    /// Whether the library still works on the last call.
    pub(super) in_progress: bool,
    pub(super) last: Operation,
}

// SAFETY: the library allows a communicator to be used by any thread, one at a time, which the mutex sees to.
unsafe impl Send for State {}

impl Communicator {
    pub(super) fn join(
        functions: &Arc<Functions>,
        id: &UniqueId,
        rank: usize,
        n_ranks: usize,
        patience: Duration,
    ) -> Result<Communicator, Error> {
        let id = ForeignId { internal: id.0.map(|byte| byte as std::ffi::c_char) };
        let mut comm = std::ptr::null_mut();
        let mut config = Config::not_blocking();
        // SAFETY: the call writes the communicator and reads the rest; it copies what it keeps.
        let status = unsafe { (functions.init)(&mut comm, n_ranks as c_int, id, rank as c_int, &mut config) };
        let first = Operation { kind: Kind::Join, numbers: None, sequence: 0 };
        let communicator = Communicator::of(functions, comm, rank, n_ranks, patience, first);
        communicator.lock().take(&communicator, first, status)?;
        Ok(communicator)
    }

    fn of(
        functions: &Arc<Functions>,
        comm: Comm,
        rank: usize,
        n_ranks: usize,
        patience: Duration,
        last: Operation,
    ) -> Communicator {
        let comm = (!comm.is_null()).then_some(comm);
        let state = Mutex::new(State { comm, in_progress: false, last });
        let (functions, graphs) = (functions.clone(), InGraph::default());
        let (gpu, ended) = (None, Ended::default());
        Communicator { functions, rank, n_ranks, patience, state, graphs, gpu, ended }
    }

    /// Keeps its GPU open until the library has ended it, which threads other than the caller's may have to do.
    pub(super) fn on(&mut self, gpu: &Gpu) {
        self.gpu = Some(gpu.clone());
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// How many ranks there are.
    pub fn n_ranks(&self) -> usize {
        self.n_ranks
    }

    /// Waits until all ranks have joined, or until the library is done with the last call.
    pub fn ready(&self) -> Result<(), Error> {
        if !self.lock().in_progress {
            return Ok(());
        }
        self.wait(self.patience, || Ok(true))
    }

    /// The same, looking again and again and never asleep: for whoever measures.
    pub(super) fn ready_soon(&self) -> Result<(), Error> {
        let start = Instant::now();
        while !self.poll(start)? {
            if start.elapsed() >= self.patience {
                return Err(self.failure(self.lock().last, start.elapsed(), Cause::Deadline));
            }
            std::hint::spin_loop();
        }
        Ok(())
    }

    /// Whether all is well as far as the library knows: one look, without waiting.
    pub fn check(&self) -> Result<(), Error> {
        self.poll(Instant::now()).map(|_| ())
    }

    /// Whether all ranks have joined and the library has taken the last call: one look, without waiting.
    pub fn is_at_rest(&self) -> Result<bool, Error> {
        self.poll(Instant::now())
    }

    /// To issue operations one after another; nobody else does so meanwhile.
    pub(super) fn calls(&self) -> Calls<'_> {
        Calls::of(self)
    }

    /// Watches over what was issued until `finished` says so, which usually asks an event of the stream, and the library is at
    /// rest. Fails as soon as the library knows of an error, when another thread aborts, and after `patience`.
    pub fn wait(
        &self,
        patience: Duration,
        mut finished: impl FnMut() -> Result<bool, Error>,
    ) -> Result<(), Error> {
        let start = Instant::now();
        for poll in 0.. {
            if self.poll(start)? && finished()? {
                return Ok(());
            }
            if start.elapsed() >= patience {
                return Err(self.failure(self.lock().last, start.elapsed(), Cause::Deadline));
            }
            pause(poll);
        }
        unreachable!("the loop ends by returning")
    }

    /// Whether the library is at rest.
    fn poll(&self, start: Instant) -> Result<bool, Error> {
        let mut state = self.lock();
        let comm = state.open(self, start)?;
        let mut now = foreign::SUCCESS;
        // SAFETY: the communicator is open, and the call writes one number.
        let status = unsafe { (self.functions.async_error)(comm, &mut now) };
        let found = if status == foreign::SUCCESS { now } else { status };
        match found {
            foreign::SUCCESS => state.in_progress = false,
            foreign::IN_PROGRESS => return Ok(false),
            code => {
                let call = match state.in_progress {
                    true => state.last.kind.call(),
                    false => "ncclCommGetAsyncError",
                };
                let words = self.functions.words(code, comm);
                let cause = Cause::Status { call, code, words };
                return Err(self.failure(state.last, start.elapsed(), cause));
            }
        }
        Ok(true)
    }

    /// Ends it, whatever still runs: those who wait on this rank come back with an error, and what its streams have of it ends. The other
    /// ranks don't learn of it from the library. Aborting twice does nothing.
    ///
    /// This returns before the library has ended it, which goes on in a thread: the library tells the GPU to leave off, and then waits for
    /// all that the GPU has, which may be another communicator's that is still to be ended, and for graphs with its operations to go, which the
    /// caller may have or be recording. Who drops it waits for the end, for some seconds at most.
    pub fn abort(&self) -> Result<(), Error> {
        let (ending, last) = {
            let mut state = self.lock();
            let Some(comm) = state.comm.take() else { return Ok(()) };
            let (functions, gpu, ended) = (self.functions.clone(), self.gpu.clone(), self.ended.clone());
            (Ending { functions, comm, gpu, ended }, state.last)
        };
        self.ended.tell(Abort::UnderWay);
        let thread = std::thread::Builder::new().name("nccl-abort".to_owned());
        match thread.spawn(move || ending.end()) {
            Ok(_) => Ok(()),
            Err(error) => {
                self.ended.tell(Abort::Over);
                let (call, code) = ("ncclCommAbort", foreign::SYSTEM_ERROR);
                let cause = Cause::Status { call, code, words: error.to_string() };
                Err(self.failure(last, Duration::ZERO, cause))
            }
        }
    }

    /// To be held by whoever has a graph of its operations, for as long as that is there. While such a graph is under way nobody issues
    /// operations, nor launches another: the library is told so, and orders nothing by itself.
    pub fn in_graph(&self) -> InGraph {
        self.graphs.clone()
    }

    /// Waits for all that was issued, on all ranks, and ends it. All ranks must do so.
    pub fn finalize(self) -> Result<(), Error> {
        self.ready()?;
        {
            let mut state = self.lock();
            let comm = state.open(&self, Instant::now())?;
            let operation = state.next(Kind::Finalize, None);
            // SAFETY: the communicator is open and at rest.
            let status = unsafe { (self.functions.finalize)(comm) };
            state.take(&self, operation, status)?;
        }
        self.ready()?;
        let mut state = self.lock();
        let comm = state.open(&self, Instant::now())?;
        state.comm = None;
        // SAFETY: the communicator is finalized and is nobody's from here on.
        let status = unsafe { (self.functions.destroy)(comm) };
        let operation = state.last;
        state.take(&self, operation, status)
    }

    /// New communicators among those of one `color` each, ranked by `key` and then by their rank here; none for a rank without a
    /// color. All ranks must ask for it.
    pub fn split(&self, color: Option<u32>, key: u32) -> Result<Option<Communicator>, Error> {
        self.ready()?;
        // The library writes there when the split is done, which may be after it was given up here: then the slot stays where it
        // is for good, and what came of the split ends with the process.
        let slot = Box::into_raw(Box::new(std::ptr::null_mut()));
        {
            let mut state = self.lock();
            let parent = state.open(self, Instant::now())?;
            let operation = state.next(Kind::Split, None);
            let color = color.map_or(foreign::NO_COLOR, |color| color as c_int);
            // SAFETY: the communicator is open and at rest; the slot stays until the library is done; without a config the new
            // one is as this one.
            let status =
                unsafe { (self.functions.split)(parent, color, key as c_int, slot, std::ptr::null_mut()) };
            state.take(self, operation, status)?;
        }
        self.ready()?;
        // SAFETY: made above, and the library, which is done with the split, doesn't know it any more.
        let comm = *unsafe { Box::from_raw(slot) };
        self.child(comm)
    }

    /// The communicator that came of a split, once its own ranks have met.
    fn child(&self, comm: Comm) -> Result<Option<Communicator>, Error> {
        if comm.is_null() {
            return Ok(None);
        }
        let child = self.child_of(comm, self.rank, self.n_ranks);
        child.lock().in_progress = true;
        child.ready()?;
        let (mut rank, mut n_ranks) = (0, 0);
        // SAFETY: the new communicator is open and ready, and each call writes one number.
        let statuses = unsafe {
            [(self.functions.comm_rank)(comm, &mut rank), (self.functions.comm_count)(comm, &mut n_ranks)]
        };
        for status in statuses {
            let last = child.lock().last;
            child.lock().take(&child, last, status)?;
        }
        let mut child = child;
        (child.rank, child.n_ranks) = (rank as usize, n_ranks as usize);
        Ok(Some(child))
    }

    fn child_of(&self, comm: Comm, rank: usize, n_ranks: usize) -> Communicator {
        let first = Operation { kind: Kind::Join, numbers: None, sequence: 0 };
        Communicator::of(&self.functions, comm, rank, n_ranks, self.patience, first)
    }

    /// See [`Calls::all_reduce`].
    ///
    /// # Safety
    /// As there.
    pub unsafe fn all_reduce(
        &self,
        from: Address,
        to: Block,
        reduction: Reduction,
        stream: StreamHandle,
    ) -> Result<(), Error> {
        // SAFETY: the caller's promise.
        self.issue(|calls| unsafe { calls.all_reduce(from, to, reduction, stream) })
    }

    /// See [`Calls::reduce`].
    ///
    /// # Safety
    /// As there.
    pub unsafe fn reduce(
        &self,
        from: Block,
        to: Address,
        reduction: Reduction,
        root: usize,
        stream: StreamHandle,
    ) -> Result<(), Error> {
        // SAFETY: the caller's promise.
        self.issue(|calls| unsafe { calls.reduce(from, to, reduction, root, stream) })
    }

    /// See [`Calls::broadcast`].
    ///
    /// # Safety
    /// As there.
    pub unsafe fn broadcast(
        &self,
        from: Address,
        to: Block,
        root: usize,
        stream: StreamHandle,
    ) -> Result<(), Error> {
        // SAFETY: the caller's promise.
        self.issue(|calls| unsafe { calls.broadcast(from, to, root, stream) })
    }

    /// See [`Calls::all_gather`].
    ///
    /// # Safety
    /// As there.
    pub unsafe fn all_gather(&self, from: Block, to: Address, stream: StreamHandle) -> Result<(), Error> {
        // SAFETY: the caller's promise.
        self.issue(|calls| unsafe { calls.all_gather(from, to, stream) })
    }

    /// See [`Calls::reduce_scatter`].
    ///
    /// # Safety
    /// As there.
    pub unsafe fn reduce_scatter(
        &self,
        from: Address,
        to: Block,
        reduction: Reduction,
        stream: StreamHandle,
    ) -> Result<(), Error> {
        // SAFETY: the caller's promise.
        self.issue(|calls| unsafe { calls.reduce_scatter(from, to, reduction, stream) })
    }

    /// See [`Calls::send`].
    ///
    /// # Safety
    /// As there.
    pub unsafe fn send(&self, from: Block, peer: usize, stream: StreamHandle) -> Result<(), Error> {
        // SAFETY: the caller's promise.
        self.issue(|calls| unsafe { calls.send(from, peer, stream) })
    }

    /// See [`Calls::receive`].
    ///
    /// # Safety
    /// As there.
    pub unsafe fn receive(&self, to: Block, peer: usize, stream: StreamHandle) -> Result<(), Error> {
        // SAFETY: the caller's promise.
        self.issue(|calls| unsafe { calls.receive(to, peer, stream) })
    }

    /// One operation: after what came before, and until the library has taken it.
    #[track_caller]
    fn issue(&self, call: impl FnOnce(&mut Calls<'_>) -> Result<(), Error>) -> Result<(), Error> {
        self.ready()?;
        call(&mut Calls::of(self))?;
        self.ready()
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    pub(super) fn failure(&self, operation: Operation, waited: Duration, cause: Cause) -> Error {
        let (rank, n_ranks) = (self.rank, self.n_ranks);
        Error::Nccl(Box::new(Failure { rank, n_ranks, operation, waited, cause }))
    }
}

impl State {
    /// The library's handle; an error once the communicator has ended.
    pub(super) fn open(&self, of: &Communicator, start: Instant) -> Result<Comm, Error> {
        self.comm.ok_or_else(|| of.failure(self.last, start.elapsed(), Cause::Aborted))
    }

    /// The next operation.
    pub(super) fn next(&mut self, kind: Kind, numbers: Option<(usize, super::Number)>) -> Operation {
        self.last = Operation { kind, numbers, sequence: self.last.sequence + 1 };
        self.last
    }

    /// Takes note of what a call said.
    pub(super) fn take(
        &mut self,
        of: &Communicator,
        operation: Operation,
        status: Status,
    ) -> Result<(), Error> {
        match status {
            foreign::SUCCESS => Ok(()),
            foreign::IN_PROGRESS => {
                self.in_progress = true;
                Ok(())
            }
            code => {
                let words = of.functions.words(code, self.comm.unwrap_or(std::ptr::null_mut()));
                let cause = Cause::Status { call: operation.kind.call(), code, words };
                Err(of.failure(operation, Duration::ZERO, cause))
            }
        }
    }
}

/// A communicator that nobody else knows any more.
struct Ending {
    functions: Arc<Functions>,
    comm: Comm,
    gpu: Option<Gpu>,
    ended: Ended,
}

// SAFETY: the library lets any thread abort a communicator, and no other has this one.
unsafe impl Send for Ending {}

impl Ending {
    /// Nobody is left to be told what comes of it.
    fn end(self) {
        // The library goes back to the GPU that is current, and without one would begin to use the first.
        let _ = self.gpu.as_ref().map(Gpu::make_current);
        // SAFETY: the communicator was open and is nobody's from here on.
        unsafe { (self.functions.abort)(self.comm) };
        self.ended.tell(Abort::Over);
    }
}

impl Ended {
    fn tell(&self, stage: Abort) {
        let (abort, told) = &*self.0;
        *lock(abort) = stage;
        told.notify_all();
    }

    /// Waits for the end of an abort that is under way.
    fn wait(&self, at_most: Duration) {
        let (abort, told) = &*self.0;
        let abort = lock(abort);
        drop(told.wait_timeout_while(abort, at_most, |abort| *abort == Abort::UnderWay));
    }
}

/// Between two looks: first not at all, then for longer and longer.
fn pause(poll: u32) {
    match poll.checked_sub(EAGER_POLLS) {
        None => std::thread::yield_now(),
        Some(late) => std::thread::sleep(Duration::from_micros(10 << late.min(10)).min(LONGEST_SLEEP)),
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        // There is nobody left to tell.
        let _ = self.abort();
        // A graph that goes later than this is waited for by the thread alone.
        if Arc::strong_count(&self.graphs.0) == 1 {
            self.ended.wait(LONGEST_END);
        }
    }
}

impl fmt::Debug for Communicator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Communicator(rank {} of {})", self.rank, self.n_ranks)
    }
}
