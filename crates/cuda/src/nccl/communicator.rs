//! One rank's membership among ranks.

use super::UniqueId;
use super::calls::{Block, Calls};
use super::failure::{Cause, Failure};
use super::foreign::{self, Comm, Config, ForeignId, Functions, Status};
use super::number::Reduction;
use super::operation::{Kind, Operation};
use crate::address::{Address, StreamHandle};
use crate::error::Error;
use std::ffi::c_int;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How often a state is asked for before the thread sleeps in between, and how long it sleeps at most.
const EAGER_POLLS: u32 = 64;
const LONGEST_SLEEP: Duration = Duration::from_millis(1);

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
}

/// Tells that a graph has operations of a communicator, while this is there. The library ends a communicator only behind its graphs.
#[derive(Clone, Debug, Default)]
pub struct InGraph(Arc<()>);

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
        Communicator { functions, rank, n_ranks, patience, state, graphs }
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

    /// Ends it at once, whatever still runs: those who wait on this rank come back with an error, and what its streams have of it
    /// ends. The other ranks don't learn of it from the library. Aborting twice does nothing.
    ///
    /// Where graphs have its operations this returns before that: the library tells the GPU to leave off and then waits for the graphs to
    /// go, which the caller may have.
    pub fn abort(&self) -> Result<(), Error> {
        let (ending, last) = {
            let mut state = self.lock();
            let Some(comm) = state.comm.take() else { return Ok(()) };
            (Ending { functions: self.functions.clone(), comm }, state.last)
        };
        let failed = |code, words| {
            let cause = Cause::Status { call: "ncclCommAbort", code, words };
            Err(self.failure(last, Duration::ZERO, cause))
        };
        if Arc::strong_count(&self.graphs.0) > 1 {
            let thread = std::thread::Builder::new().name("nccl-abort".to_owned());
            // Nobody is left to be told what comes of it.
            return match thread.spawn(move || ending.end()) {
                Ok(_) => Ok(()),
                Err(error) => failed(foreign::SYSTEM_ERROR, error.to_string()),
            };
        }
        match ending.end() {
            foreign::SUCCESS | foreign::IN_PROGRESS => Ok(()),
            status => failed(status, self.functions.words(status, std::ptr::null_mut())),
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
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
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
}

// SAFETY: the library lets any thread abort a communicator, and no other has this one.
unsafe impl Send for Ending {}

impl Ending {
    fn end(self) -> Status {
        // SAFETY: the communicator was open and is nobody's from here on.
        unsafe { (self.functions.abort)(self.comm) }
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
    }
}

impl fmt::Debug for Communicator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Communicator(rank {} of {})", self.rank, self.n_ranks)
    }
}
