//! Operations of a communicator on memory that is lent to it, in the right order with all else that a GPU does.
//!
//! Work on numbers is given to a GPU's compute stream; what ranks tell each other runs on its comm stream, beside that. An
//! operation begins when the compute stream has come to where it was asked for, and the compute stream waits for its end as soon
//! as whoever lent the numbers has them back. Between the two they are the operation's alone, which is what [`Lent`] promises.

use super::communicator::{Communicator, InGraph};
use super::number::Reduction;
use super::{Block, Calls, Nccl, UniqueId};
use crate::error::Error;
use crate::event::{Event, Timing};
use crate::gpu::Gpu;
use crate::stream::Stream;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// Numbers in the memory of a GPU that whoever has this value holds for himself.
///
/// # Safety
/// The numbers at [`Lent::block`] lie in memory of the GPU, which is given back only after all work that the GPU has. All work on
/// them that was given before this value was made was given to the GPU's compute stream, or lies before [`Lent::behind`]; all that is
/// given after it was dropped will be given to that stream, which waits for the same; and none is given between the two, but by whoever
/// has the value.
pub unsafe trait Lent: Send {
    /// Where they lie.
    fn block(&self) -> Block;

    /// What of another stream's they are there behind, if not behind the compute stream's work alone.
    fn behind(&self) -> Option<&Event> {
        None
    }
}

/// A rank's end of a communicator, with the GPU that it works on.
pub struct Exchange {
    communicator: Communicator,
    gpu: Gpu,
    /// What operations are given to, if not the comm stream.
    own: Option<Stream>,
    /// Events that stand for nothing any more.
    spare: Mutex<Vec<Event>>,
}

/// An operation that was given to a stream, and the numbers that it works on in place.
#[must_use = "the numbers are the operation's until this is finished"]
pub struct Exchanged<L: Lent> {
    /// None once it was finished.
    lent: Option<L>,
    /// Behind the operation, once that is marked. None once it was finished.
    done: Option<Event>,
    /// Whether the event stands for the operation: not before the library has given that to the stream, which may take a while where
    /// ranks meet each other for the first time.
    is_marked: bool,
    /// Whether it was only recorded, so that nothing of it is under way.
    is_recorded: bool,
    exchange: Arc<Exchange>,
}

impl Exchange {
    /// Begins to join the others as `rank` of `n_ranks`, with this GPU, and returns at once; [`Exchange::is_ready`] says whether all
    /// have come. No wait of NCCL's own takes longer than `patience`. Operations go on the comm stream, or on `own`, where they wait
    /// for no other communicator's.
    pub fn join(
        nccl: &Nccl,
        (gpu, own): (&Gpu, Option<Stream>),
        id: &UniqueId,
        (rank, n_ranks): (usize, usize),
        patience: Duration,
    ) -> Result<Arc<Exchange>, Error> {
        gpu.make_current()?;
        let communicator = nccl.join(id, rank, n_ranks, patience)?;
        Ok(Arc::new(Exchange { communicator, gpu: gpu.clone(), own, spare: Mutex::default() }))
    }

    fn stream(&self) -> &Stream {
        self.own.as_ref().unwrap_or_else(|| self.gpu.comm())
    }

    /// Whether all ranks have joined, and the library has given the last operation to the stream. The next one waits for that.
    pub fn is_ready(&self) -> Result<bool, Error> {
        self.communicator.is_at_rest()
    }

    /// Ends it at once, from any thread: see [`Communicator::abort`].
    pub fn abort(&self) -> Result<(), Error> {
        self.gpu.make_current()?;
        self.communicator.abort()
    }

    /// See [`Communicator::in_graph`].
    pub fn in_graph(&self) -> InGraph {
        self.communicator.in_graph()
    }

    /// The GPU that it works on.
    pub fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// The numbers become the reduction of all ranks' numbers.
    #[track_caller]
    pub fn all_reduce<L: Lent>(
        self: &Arc<Self>,
        lent: L,
        reduction: Reduction,
    ) -> Result<Exchanged<L>, Error> {
        // SAFETY: `start` has the streams wait as `Lent` asks.
        self.start(lent, |calls, block, stream| unsafe {
            calls.all_reduce(block.at, block, reduction, stream)
        })
    }

    /// On rank `root` the numbers become the reduction of all ranks' numbers; elsewhere they stay as they are. Panics if there is
    /// no such rank.
    #[track_caller]
    pub fn reduce<L: Lent>(
        self: &Arc<Self>,
        lent: L,
        reduction: Reduction,
        root: usize,
    ) -> Result<Exchanged<L>, Error> {
        // SAFETY: as above.
        self.start(lent, |calls, block, stream| unsafe {
            calls.reduce(block, block.at, reduction, root, stream)
        })
    }

    /// The numbers become those of rank `root`. Panics if there is no such rank.
    #[track_caller]
    pub fn broadcast<L: Lent>(self: &Arc<Self>, lent: L, root: usize) -> Result<Exchanged<L>, Error> {
        // SAFETY: as above.
        self.start(lent, |calls, block, stream| unsafe { calls.broadcast(block.at, block, root, stream) })
    }

    /// The numbers are as many equal parts as there are ranks; each becomes that of its rank. Panics where they aren't.
    #[track_caller]
    pub fn all_gather<L: Lent>(self: &Arc<Self>, lent: L) -> Result<Exchanged<L>, Error> {
        let own = self.own_part("all_gather", lent.block());
        // SAFETY: as above; the part lies within.
        self.start(lent, |calls, block, stream| unsafe { calls.all_gather(own, block.at, stream) })
    }

    /// The numbers are as many equal parts as there are ranks; this rank's becomes the reduction of all ranks' numbers in that
    /// part, the others mean nothing afterwards. Panics where they aren't.
    #[track_caller]
    pub fn reduce_scatter<L: Lent>(
        self: &Arc<Self>,
        lent: L,
        reduction: Reduction,
    ) -> Result<Exchanged<L>, Error> {
        let own = self.own_part("reduce_scatter", lent.block());
        // SAFETY: as above.
        self.start(lent, |calls, block, stream| unsafe {
            calls.reduce_scatter(block.at, own, reduction, stream)
        })
    }

    /// Rank `peer`, which must receive as many, has the numbers. Panics if there is no such rank.
    #[track_caller]
    pub fn send<L: Lent>(self: &Arc<Self>, lent: L, peer: usize) -> Result<Exchanged<L>, Error> {
        // SAFETY: as above.
        self.start(lent, |calls, block, stream| unsafe { calls.send(block, peer, stream) })
    }

    /// The numbers become what rank `peer` sends. Panics if there is no such rank.
    #[track_caller]
    pub fn receive<L: Lent>(self: &Arc<Self>, lent: L, peer: usize) -> Result<Exchanged<L>, Error> {
        // SAFETY: as above.
        self.start(lent, |calls, block, stream| unsafe { calls.receive(block, peer, stream) })
    }

    #[track_caller]
    fn own_part(&self, op: &str, whole: Block) -> Block {
        let n_ranks = self.communicator.n_ranks();
        assert!(
            whole.count.is_multiple_of(n_ranks),
            "{op}: {} numbers can't be {n_ranks} equal parts, one for each rank",
            whole.count
        );
        let count = whole.count / n_ranks;
        let at = whole.at.plus(self.communicator.rank() * count * whole.number.bytes());
        Block { at, count, ..whole }
    }

    /// Gives its stream an operation on lent numbers, behind all that the compute stream has now.
    #[track_caller]
    fn start<L: Lent>(
        self: &Arc<Self>,
        lent: L,
        call: impl FnOnce(&mut Calls<'_>, Block, crate::StreamHandle) -> Result<(), Error>,
    ) -> Result<Exchanged<L>, Error> {
        let (compute, comm) = (self.gpu.compute(), self.stream());
        self.gpu.make_current()?;
        self.communicator.ready()?;
        let is_recorded = compute.is_capturing()?;
        let event = self.event()?;
        compute.record(&event)?;
        comm.wait(&event)?;
        if let Some(event) = lent.behind() {
            comm.wait(event)?;
        }
        let (block, exchange) = (lent.block(), self.clone());
        let mut exchanged =
            Exchanged { lent: Some(lent), done: Some(event), is_marked: false, is_recorded, exchange };
        let called = call(&mut self.communicator.calls(), block, comm.handle());
        if called.is_err() {
            // It may be under way all the same, and nobody else can end it.
            let _ = self.communicator.abort();
        }
        called?;
        if self.is_ready()? {
            exchanged.mark()?;
        }
        Ok(exchanged)
    }

    fn event(&self) -> Result<Event, Error> {
        let spare = self.spare.lock().unwrap_or_else(PoisonError::into_inner).pop();
        spare.map_or_else(|| self.gpu.event(Timing::No), Ok)
    }
}

impl<L: Lent> Exchanged<L> {
    /// Whether it only became part of a graph.
    pub fn is_recorded(&self) -> bool {
        self.is_recorded
    }

    /// Lets its event stand for the operation, which the library has given to the stream.
    fn mark(&mut self) -> Result<(), Error> {
        let event = self.done.as_ref().expect("it has one until it is finished");
        let marked = self.exchange.stream().record(event);
        if marked.is_err() {
            // Nothing stands for the operation, so it is waited for here. Where that fails as well, the GPU is lost.
            let _ = self.exchange.communicator.abort();
            let _ = self.exchange.stream().synchronize();
        }
        self.is_marked = true;
        marked
    }

    /// Whether the operation is done: one look, which fails where the communicator has.
    pub fn is_done(&mut self) -> Result<bool, Error> {
        if !self.exchange.communicator.is_at_rest()? {
            return Ok(false);
        }
        if !self.is_marked {
            self.mark()?;
        }
        self.done.as_ref().map_or(Ok(true), Event::is_done)
    }

    /// The numbers back: what the compute stream is given from now on finds them as the operation leaves them. Waits for nothing but
    /// the library, until it has given the operation to the stream.
    pub fn finish(mut self) -> Result<L, Error> {
        self.order()?;
        Ok(self.lent.take().expect("it is finished once"))
    }

    /// Lets the compute stream wait for the operation, unless that was recorded and the recording is over: then its events stand for
    /// nothing, and no stream may wait for them.
    fn order(&mut self) -> Result<(), Error> {
        if self.is_recorded && !self.exchange.gpu.compute().is_capturing()? {
            self.done = None;
        }
        if self.done.is_some() && !self.is_marked {
            if self.exchange.communicator.ready().is_err() {
                // What it has given to the stream ends with this, and nothing comes after.
                let _ = self.exchange.communicator.abort();
            }
            self.mark()?;
        }
        let Some(event) = self.done.take() else { return Ok(()) };
        self.exchange.gpu.compute().wait(&event)?;
        self.exchange.spare.lock().unwrap_or_else(PoisonError::into_inner).push(event);
        Ok(())
    }
}

impl<L: Lent> Drop for Exchanged<L> {
    fn drop(&mut self) {
        // A recording that can't wait for it fails, and nobody makes what it has.
        if self.order().is_err() && !self.is_recorded {
            // Nobody would wait for it: the numbers stay lent for good. The GPU is lost anyway.
            std::mem::forget(self.lent.take());
        }
    }
}

impl fmt::Debug for Exchange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Exchange({:?} on GPU {})", self.communicator, self.gpu.index())
    }
}

impl<L: Lent> fmt::Debug for Exchanged<L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Exchanged({:?})", self.lent.as_ref().map(Lent::block))
    }
}
