//! The operations, one call each, and groups of them.

use super::communicator::{Communicator, State};
use super::foreign::{self, Comm, Functions, RedOp, Status};
use super::number::{Number, Reduction};
use super::operation::{Kind, Operation};
use crate::address::{Address, StreamHandle};
use crate::error::Error;
use std::ffi::{c_int, c_void};
use std::sync::MutexGuard;
use std::time::Instant;

/// Numbers in the memory of a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    /// Where the first lies.
    pub at: Address,
    /// How many there are.
    pub count: usize,
    /// What they are.
    pub number: Number,
}

/// A communicator, locked, to issue operations one after another.
///
/// What all of them ask of their caller, under *Safety*: until the stream has done the operation, the addresses are of memory of
/// the communicator's GPU that holds as many numbers as is said, what is written is read and written by nobody else, what is read
/// is written by nobody else, and the stream lives. Operations may be in place: all-reduce, reduce and broadcast with `from` and
/// `to` the same, all-gather with `from` this rank's part of `to`, reduce-scatter with `to` this rank's part of `from`.
pub struct Calls<'a> {
    communicator: &'a Communicator,
    state: MutexGuard<'a, State>,
}

impl<'a> Calls<'a> {
    pub(super) fn of(communicator: &'a Communicator) -> Calls<'a> {
        Calls { communicator, state: communicator.lock() }
    }

    /// `to` is the reduction of all ranks' numbers from `from`, as many as `to` has.
    ///
    /// # Safety
    /// What [`Calls`] says.
    pub unsafe fn all_reduce(
        &mut self,
        from: Address,
        to: Block,
        reduction: Reduction,
        stream: StreamHandle,
    ) -> Result<(), Error> {
        self.reduce_by(Kind::AllReduce, to, reduction, |f, op, comm| {
            // SAFETY: the communicator is open; the rest is the caller's promise.
            unsafe {
                (f.all_reduce)(read(from), write(to.at), to.count, to.number.foreign(), op, comm, stream)
            }
        })
    }

    /// On rank `root`, `to` is the reduction of all ranks' `from`; elsewhere `to` isn't used. Panics if there is no such rank.
    ///
    /// # Safety
    /// What [`Calls`] says.
    pub unsafe fn reduce(
        &mut self,
        from: Block,
        to: Address,
        reduction: Reduction,
        root: usize,
        stream: StreamHandle,
    ) -> Result<(), Error> {
        let number = from.number.foreign();
        self.reduce_by(Kind::Reduce(root), from, reduction, |f, op, comm| {
            // SAFETY: the communicator is open; the rest is the caller's promise.
            unsafe {
                (f.reduce)(read(from.at), write(to), from.count, number, op, root as c_int, comm, stream)
            }
        })
    }

    /// `to` is what rank `root` has from `from`, which elsewhere isn't used. Panics if there is no such rank.
    ///
    /// # Safety
    /// What [`Calls`] says.
    pub unsafe fn broadcast(
        &mut self,
        from: Address,
        to: Block,
        root: usize,
        stream: StreamHandle,
    ) -> Result<(), Error> {
        let number = to.number.foreign();
        self.call(Kind::Broadcast(root), to, |f, comm| {
            // SAFETY: the communicator is open; the rest is the caller's promise.
            unsafe { (f.broadcast)(read(from), write(to.at), to.count, number, root as c_int, comm, stream) }
        })
    }

    /// From `to` on lie all ranks' `from`, in the order of ranks.
    ///
    /// # Safety
    /// What [`Calls`] says.
    pub unsafe fn all_gather(&mut self, from: Block, to: Address, stream: StreamHandle) -> Result<(), Error> {
        self.call(Kind::AllGather, from, |f, comm| {
            // SAFETY: the communicator is open; the rest is the caller's promise.
            unsafe {
                (f.all_gather)(read(from.at), write(to), from.count, from.number.foreign(), comm, stream)
            }
        })
    }

    /// `to` is this rank's part of the reduction of all ranks' numbers from `from`, of which there are as many parts as ranks.
    ///
    /// # Safety
    /// What [`Calls`] says.
    pub unsafe fn reduce_scatter(
        &mut self,
        from: Address,
        to: Block,
        reduction: Reduction,
        stream: StreamHandle,
    ) -> Result<(), Error> {
        let number = to.number.foreign();
        self.reduce_by(Kind::ReduceScatter, to, reduction, |f, op, comm| {
            // SAFETY: the communicator is open; the rest is the caller's promise.
            unsafe { (f.reduce_scatter)(read(from), write(to.at), to.count, number, op, comm, stream) }
        })
    }

    /// Rank `peer`, which must receive as many, has `from`. Panics if there is no such rank.
    ///
    /// # Safety
    /// What [`Calls`] says.
    pub unsafe fn send(&mut self, from: Block, peer: usize, stream: StreamHandle) -> Result<(), Error> {
        let number = from.number.foreign();
        self.call(Kind::Send(peer), from, |f, comm| {
            // SAFETY: the communicator is open; the rest is the caller's promise.
            unsafe { (f.send)(read(from.at), from.count, number, peer as c_int, comm, stream) }
        })
    }

    /// `to` is what rank `peer` sends. Panics if there is no such rank.
    ///
    /// # Safety
    /// What [`Calls`] says.
    pub unsafe fn receive(&mut self, to: Block, peer: usize, stream: StreamHandle) -> Result<(), Error> {
        let number = to.number.foreign();
        self.call(Kind::Receive(peer), to, |f, comm| {
            // SAFETY: the communicator is open; the rest is the caller's promise.
            unsafe { (f.receive)(write(to.at), to.count, number, peer as c_int, comm, stream) }
        })
    }

    /// Issues all operations of `issue` as one, as [`Nccl::group`](super::Nccl::group) does, and doesn't wait for the library, which may
    /// have to reach other ranks first.
    pub(super) fn grouped<R>(
        &mut self,
        issue: impl FnOnce(&mut Calls<'a>) -> Result<R, Error>,
    ) -> Result<R, Error> {
        let functions = &*self.communicator.functions;
        let open = OpenGroup::start(functions)?;
        let result = issue(self);
        ended(functions, open.end(), std::slice::from_mut(self), result)
    }

    fn call(
        &mut self,
        kind: Kind,
        block: Block,
        call: impl FnOnce(&Functions, Comm) -> Status,
    ) -> Result<(), Error> {
        let (operation, comm) = self.next(kind, block)?;
        let status = call(&self.communicator.functions, comm);
        self.state.take(self.communicator, operation, status)
    }

    /// A call with a reduction, which for a factor is made for this one call: the library says that it may end with it.
    fn reduce_by(
        &mut self,
        kind: Kind,
        block: Block,
        reduction: Reduction,
        call: impl FnOnce(&Functions, RedOp, Comm) -> Status,
    ) -> Result<(), Error> {
        let (operation, comm) = self.next(kind, block)?;
        let functions = &self.communicator.functions;
        let Reduction::SumTimes(factor) = reduction else {
            let status = call(functions, built_in(reduction), comm);
            return self.state.take(self.communicator, operation, status);
        };
        let mut factor = block.number.factor(factor);
        let mut op = 0;
        // SAFETY: the communicator is open, and the factor is read, in its type, before the call returns.
        let made = unsafe {
            let factor: *mut c_void = factor.as_mut_ptr().cast();
            (functions.op_create)(&mut op, factor, block.number.foreign(), foreign::HOST_IMMEDIATE, comm)
        };
        self.state.take(self.communicator, operation, made)?;
        let status = call(functions, op, comm);
        // SAFETY: made above and used by no later call.
        let ended = unsafe { (functions.op_destroy)(op, comm) };
        self.state.take(self.communicator, operation, status)?;
        self.state.take(self.communicator, operation, ended)
    }

    fn next(&mut self, kind: Kind, block: Block) -> Result<(Operation, Comm), Error> {
        let n_ranks = self.communicator.n_ranks();
        assert!(kind.peer().is_none_or(|peer| peer < n_ranks), "{kind:?}: there are {n_ranks} ranks");
        let comm = self.state.open(self.communicator, Instant::now())?;
        Ok((self.state.next(kind, Some((block.count, block.number))), comm))
    }
}

fn built_in(reduction: Reduction) -> RedOp {
    match reduction {
        Reduction::Sum => foreign::SUM,
        Reduction::Product => foreign::PRODUCT,
        Reduction::Max => foreign::MAX,
        Reduction::Min => foreign::MIN,
        Reduction::Mean => foreign::AVERAGE,
        Reduction::SumTimes(_) => unreachable!("made for each call"),
    }
}

fn read(address: Address) -> *const c_void {
    address.0 as *const c_void
}

fn write(address: Address) -> *mut c_void {
    address.0 as *mut c_void
}

/// See [`super::Nccl::group`].
#[track_caller]
pub(super) fn group<R>(
    functions: &Functions,
    communicators: &[&Communicator],
    issue: impl FnOnce(&mut [Calls<'_>]) -> Result<R, Error>,
) -> Result<R, Error> {
    for (i, one) in communicators.iter().enumerate() {
        let again = communicators[..i].iter().any(|other| std::ptr::eq(*one, *other));
        assert!(!again, "group: {one:?} is named twice");
    }
    communicators.iter().try_for_each(|communicator| communicator.ready())?;
    let result = {
        let mut calls: Vec<Calls<'_>> = communicators.iter().map(|one| Calls::of(one)).collect();
        let open = OpenGroup::start(functions)?;
        let result = issue(&mut calls);
        ended(functions, open.end(), &mut calls, result)?
    };
    communicators.iter().try_for_each(|communicator| communicator.ready())?;
    Ok(result)
}

/// What becomes of a group whose calls came to `result`, by what its end says.
fn ended<R>(
    functions: &Functions,
    status: Status,
    calls: &mut [Calls<'_>],
    result: Result<R, Error>,
) -> Result<R, Error> {
    match status {
        foreign::SUCCESS => result,
        foreign::IN_PROGRESS => {
            calls.iter_mut().for_each(|calls| calls.state.in_progress = true);
            result
        }
        // The error of a single call comes again at the end: the first to tell it knows more.
        _ => result.and_then(|_| Err(group_failed(functions, status, calls))),
    }
}

fn group_failed(functions: &Functions, status: Status, calls: &[Calls<'_>]) -> Error {
    let what = || {
        let ranks = calls.iter().map(|one| {
            let (rank, n_ranks) = (one.communicator.rank(), one.communicator.n_ranks());
            format!("rank {rank} of {n_ranks} up to {}", one.state.last)
        });
        ranks.collect::<Vec<_>>().join(", ")
    };
    functions.succeeded("ncclGroupEnd", status, what).expect_err("the status is one of failure")
}

/// A group that was started, and ends with this whatever happens.
struct OpenGroup<'a> {
    functions: &'a Functions,
}

impl OpenGroup<'_> {
    fn start(functions: &Functions) -> Result<OpenGroup<'_>, Error> {
        // SAFETY: a call without arguments, which counts for this thread.
        let status = unsafe { (functions.group_start)() };
        functions.succeeded("ncclGroupStart", status, || "a group".to_owned())?;
        Ok(OpenGroup { functions })
    }

    fn end(self) -> Status {
        let functions = self.functions;
        std::mem::forget(self);
        // SAFETY: started on this thread and not ended yet.
        unsafe { (functions.group_end)() }
    }
}

impl Drop for OpenGroup<'_> {
    fn drop(&mut self) {
        // SAFETY: as in `end`; this runs when the caller's function panics.
        unsafe { (self.functions.group_end)() };
    }
}
