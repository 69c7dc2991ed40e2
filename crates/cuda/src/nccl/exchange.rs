//! Operations of a communicator on memory that is lent to it, in the right order with all else that a GPU does.
//!
//! Work on numbers is given to a GPU's compute stream; what ranks tell each other runs on its comm stream, beside that. An
//! operation begins when the compute stream has come to where it was asked for, and the compute stream waits for its end as soon
//! as whoever lent the numbers has them back. Between the two they are the operation's alone, which is what [`Lent`] promises.

use super::communicator::{Communicator, InGraph};
use super::number::Reduction;
use super::{Block, Calls, Nccl, Number, UniqueId};
use crate::address::StreamHandle;
use crate::error::Error;
use crate::event::{Event, Timing};
use crate::gpu::Gpu;
use crate::lock::lock;
use crate::memory::DeviceMemory;
use crate::stream::Stream;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError, Weak};
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
    /// The end of the last operation, while somebody waits for it.
    last: Mutex<Weak<Mutex<End>>>,
    /// What barriers sum, once there was one. They go on one stream, one after the other, and nobody else has it.
    word: Mutex<Option<DeviceMemory>>,
}

/// Where an operation begins: its stream waits for all that it lies behind.
pub(super) struct Beginning {
    /// It stands for nothing any more.
    event: Event,
    is_recorded: bool,
}

/// An operation that was given to a stream, and what was lent to it.
#[must_use = "the numbers are the operation's until this is finished"]
pub struct Exchanged<L> {
    /// None once it was finished.
    lent: Option<L>,
    /// None once it was finished.
    end: Option<Arc<Mutex<End>>>,
    /// Whether it was only recorded, so that nothing of it is under way.
    is_recorded: bool,
    exchange: Arc<Exchange>,
}

/// Where an operation ends in its stream.
struct End {
    event: Event,
    /// Whether the event stands for the operation: not before the library has given that to the stream, in a thread of its own, which takes
    /// it some time, and a long one where ranks meet each other for the first time.
    is_marked: bool,
}

impl End {
    /// Lets the event stand for all that the stream has by now.
    fn mark(&mut self, stream: &Stream) -> Result<(), Error> {
        if !self.is_marked {
            stream.record(&self.event)?;
            self.is_marked = true;
        }
        Ok(())
    }
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
        let mut communicator = nccl.join(id, rank, n_ranks, patience)?;
        communicator.on(gpu);
        let (spare, last, word) = (Mutex::default(), Mutex::default(), Mutex::default());
        Ok(Arc::new(Exchange { communicator, gpu: gpu.clone(), own, spare, last, word }))
    }

    /// This rank.
    pub(super) fn rank(&self) -> usize {
        self.communicator.rank()
    }

    /// How many ranks there are.
    pub(super) fn n_ranks(&self) -> usize {
        self.communicator.n_ranks()
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

    /// The same so many times, at least once, one given as soon as the library has taken the one before, with no event in between: what
    /// whoever measures holds the operations here against. Waits for the library, not for the GPU.
    #[track_caller]
    pub fn all_reduces<L: Lent>(
        self: &Arc<Self>,
        lent: L,
        reduction: Reduction,
        times: usize,
    ) -> Result<Exchanged<L>, Error> {
        let (beginning, block) = (self.behind(&[&lent])?, lent.block());
        for _ in 1..times {
            // SAFETY: `behind` has had the streams wait as `Lent` asks; what fails keeps the numbers for good, as others may be under way.
            let called =
                unsafe { self.communicator.all_reduce(block.at, block, reduction, self.stream().handle()) };
            if let Err(error) = called.and_then(|()| self.communicator.ready_soon()) {
                let _ = self.communicator.abort();
                std::mem::forget(lent);
                return Err(error);
            }
        }
        // SAFETY: as above.
        self.begin(beginning, lent, |calls, stream| unsafe {
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

    /// An operation that is done once all ranks' streams have come to it, each behind what its compute stream had before.
    pub fn barrier(self: &Arc<Self>) -> Result<Exchanged<()>, Error> {
        let word = self.word()?;
        let beginning = self.behind(&[])?;
        // SAFETY: the word is the barriers' alone, which go one after the other, and is as long-lived as the exchange.
        self.begin(beginning, (), |calls, stream| unsafe {
            calls.all_reduce(word.at, word, Reduction::Max, stream)
        })
    }

    fn word(&self) -> Result<Block, Error> {
        self.gpu.make_current()?;
        let mut kept = lock(&self.word);
        let at = match &*kept {
            Some(word) => word.address(),
            None => kept.insert(self.gpu.alloc(self.gpu.compute(), 1)?).address(),
        };
        Ok(Block { at, count: 1, number: Number::U8 })
    }

    #[track_caller]
    fn own_part(&self, op: &str, whole: Block) -> Block {
        self.part(op, whole, self.rank())
    }

    /// Part `rank` of as many equal ones as there are ranks. Panics where the numbers can't be these.
    #[track_caller]
    pub(super) fn part(&self, op: &str, whole: Block, rank: usize) -> Block {
        let n_ranks = self.n_ranks();
        assert!(
            whole.count.is_multiple_of(n_ranks),
            "{op}: {} numbers can't be {n_ranks} equal parts, one for each rank",
            whole.count
        );
        let count = whole.count / n_ranks;
        Block { at: whole.at.plus(rank * count * whole.number.bytes()), count, ..whole }
    }

    /// Gives its stream an operation on lent numbers, behind all that the compute stream has now.
    #[track_caller]
    fn start<L: Lent>(
        self: &Arc<Self>,
        lent: L,
        call: impl FnOnce(&mut Calls<'_>, Block, StreamHandle) -> Result<(), Error>,
    ) -> Result<Exchanged<L>, Error> {
        let beginning = self.behind(&[&lent])?;
        let block = lent.block();
        self.begin(beginning, lent, |calls, stream| call(calls, block, stream))
    }

    /// Has its stream wait for all that the compute stream has now, and for what else these numbers are there behind.
    pub(super) fn behind(&self, lent: &[&dyn Lent]) -> Result<Beginning, Error> {
        let (compute, comm) = (self.gpu.compute(), self.stream());
        self.gpu.make_current()?;
        self.communicator.ready()?;
        // What comes now lies behind the operation before, and who waits for that waits for nothing more.
        let last = lock(&self.last).upgrade();
        last.map_or(Ok(()), |last| lock(&last).mark(comm))?;
        let is_recorded = compute.is_capturing()?;
        let event = self.event()?;
        compute.record(&event)?;
        comm.wait(&event)?;
        lent.iter().filter_map(|lent| lent.behind()).try_for_each(|event| comm.wait(event))?;
        Ok(Beginning { event, is_recorded })
    }

    /// Gives its stream an operation on what was lent, from where it begins.
    #[track_caller]
    pub(super) fn begin<L>(
        self: &Arc<Self>,
        Beginning { event, is_recorded }: Beginning,
        lent: L,
        call: impl FnOnce(&mut Calls<'_>, StreamHandle) -> Result<(), Error>,
    ) -> Result<Exchanged<L>, Error> {
        let exchange = self.clone();
        let end = Arc::new(Mutex::new(End { event, is_marked: false }));
        *lock(&self.last) = Arc::downgrade(&end);
        let mut exchanged = Exchanged { lent: Some(lent), end: Some(end), is_recorded, exchange };
        let called = call(&mut self.communicator.calls(), self.stream().handle());
        if called.is_err() {
            // It may be under way all the same, and nobody else can end it.
            let _ = self.communicator.abort();
        }
        called?;
        exchanged.settle()?;
        Ok(exchanged)
    }

    fn event(&self) -> Result<Event, Error> {
        let spare = lock(&self.spare).pop();
        spare.map_or_else(|| self.gpu.event(Timing::No), Ok)
    }
}

impl<L> Exchanged<L> {
    /// Whether it only became part of a graph.
    pub fn is_recorded(&self) -> bool {
        self.is_recorded
    }

    /// Whether the library has given the operation to its stream, which it does in a thread of its own: one look. Until then nothing else
    /// may be given to a graph that the operation becomes a part of, which only one thread changes at a time.
    pub fn settle(&mut self) -> Result<bool, Error> {
        let is_settled = self.is_marked() || self.exchange.is_ready()?;
        if is_settled {
            self.mark()?;
        }
        Ok(is_settled)
    }

    fn is_marked(&self) -> bool {
        self.end.as_ref().is_none_or(|end| lock(end).is_marked)
    }

    /// Lets its event stand for the operation, which the library has given to the stream.
    fn mark(&mut self) -> Result<(), Error> {
        let Some(end) = &self.end else { return Ok(()) };
        let mut end = lock(end);
        let marked = end.mark(self.exchange.stream());
        if marked.is_err() {
            // Nothing stands for the operation, so it is waited for here. Where that fails as well, the GPU is lost.
            let _ = self.exchange.communicator.abort();
            let _ = self.exchange.stream().synchronize();
            end.is_marked = true;
        }
        marked
    }

    /// Whether the operation is done: one look, which fails where the communicator has.
    pub fn is_done(&mut self) -> Result<bool, Error> {
        if !self.exchange.communicator.is_at_rest()? || !self.settle()? {
            return Ok(false);
        }
        self.end.as_ref().map_or(Ok(true), |end| lock(end).event.is_done())
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
            self.end = None;
        }
        if !self.is_marked() {
            if self.exchange.communicator.ready().is_err() {
                // What it has given to the stream ends with this, and nothing comes after.
                let _ = self.exchange.communicator.abort();
            }
            self.mark()?;
        }
        let Some(end) = &self.end else { return Ok(()) };
        // Where this fails the operation still has its end, and nothing that was lent goes back.
        self.exchange.gpu.compute().wait(&lock(end).event)?;
        // Nobody else has it but for a moment, in which another operation finds it marked.
        if let Some(end) = self.end.take().and_then(Arc::into_inner) {
            let event = end.into_inner().unwrap_or_else(PoisonError::into_inner).event;
            lock(&self.exchange.spare).push(event);
        }
        Ok(())
    }
}

impl<L> Drop for Exchanged<L> {
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

impl<L> fmt::Debug for Exchanged<L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Exchanged(of {:?})", self.exchange)
    }
}
