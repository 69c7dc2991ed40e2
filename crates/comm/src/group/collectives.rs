//! The operations that all ranks of a group take part in.

use super::Group;
use crate::buffer::{AnyBuffer, Buffer, Plain, Reduced};
use crate::element::{Element, Erased, ReduceOp, is_widened, means, widen};
use crate::engine::Play;
use crate::error::Error;
use crate::queue::{Engine, Queued};
use crate::schedule::Schedule;
use crate::signature::{Kind, Signature};
use crate::work::Work;
use bytemuck::{cast_slice, cast_slice_mut};
use phalanx_wire::{Deadline, Rank};
use std::ops::Range;
use std::sync::MutexGuard;
use std::time::{Duration, Instant};

/// How much longer than rank 0 the others wait in a monitored barrier, at most.
const LONGEST_PATIENCE: Duration = Duration::from_secs(2);

/// The signature of an operation that isn't counted yet.
pub(crate) fn signature<T: Element>(
    kind: Kind,
    op: Option<ReduceOp>,
    detail: u32,
    count: usize,
) -> Signature {
    Signature {
        kind,
        op: op.map(Into::into),
        algorithm: None,
        detail,
        at: 0,
        sequence: 0,
        element: T::KIND,
        count,
    }
}

/// That there is such a reduction.
#[track_caller]
pub(super) fn check_op<T: Element>(name: &str, op: ReduceOp) {
    assert!(T::KIND.takes(op), "{name}: there is no {op} of {}", T::KIND.name);
}

/// Parts of these lengths, one after the other from `start` on.
fn parts(lengths: &[usize], start: usize) -> Vec<Range<usize>> {
    let mut end = start;
    lengths
        .iter()
        .map(|length| {
            let start = end;
            end += length;
            start..end
        })
        .collect()
}

impl Group {
    /// Reduces the ranks' slices elementwise; every rank gets the result. All slices have one length.
    #[track_caller]
    pub fn all_reduce<T: Element>(&self, values: &mut [T], op: ReduceOp) -> Result<(), Error> {
        check_op::<T>("all_reduce", op);
        let len = values.len();
        let schedule = |bytes| self.seat().all_reduce(len, bytes);
        let signature = self.all_reduce_signature::<T>(op, len);
        self.reduce_by(signature, schedule, values, op)
    }

    /// Reduces the ranks' slices elementwise; rank `root` gets the result, what the others' slices hold then means nothing.
    #[track_caller]
    pub fn reduce<T: Element>(&self, values: &mut [T], root: Rank, op: ReduceOp) -> Result<(), Error> {
        check_op::<T>("reduce", op);
        self.check_peer("reduce", root);
        let len = values.len();
        let schedule = |bytes| self.seat().reduce(len, bytes, root.index());
        self.reduce_by(signature::<T>(Kind::Reduce, Some(op), root.0, len), schedule, values, op)
    }

    /// Every rank gets the slice of rank `root`.
    #[track_caller]
    pub fn broadcast<T: Element>(&self, values: &mut [T], root: Rank) -> Result<(), Error> {
        self.check_peer("broadcast", root);
        let schedule = self.seat().broadcast(values.len(), root.index());
        self.move_by(signature::<T>(Kind::Broadcast, None, root.0, values.len()), schedule, values)
    }

    /// Reduces the ranks' `input`s elementwise; rank r gets part r of `world_size` equal parts.
    #[track_caller]
    pub fn reduce_scatter<T: Element>(
        &self,
        input: &[T],
        output: &mut [T],
        op: ReduceOp,
    ) -> Result<(), Error> {
        check_op::<T>("reduce_scatter", op);
        self.check_all("reduce_scatter", ["in", "out"], [input.len(), output.len()]);
        let mut all = input.to_vec();
        self.reduce_scatter_in_place(&mut all, op)?;
        output.copy_from_slice(&all[self.own_part(all.len())]);
        Ok(())
    }

    /// As [`Group::reduce_scatter`] of `values`, whose part at [`Group::own_part`] is the result, to the same bits: nothing is
    /// copied aside. What the other parts hold then means nothing.
    #[track_caller]
    pub fn reduce_scatter_in_place<T: Element>(&self, values: &mut [T], op: ReduceOp) -> Result<(), Error> {
        check_op::<T>("reduce_scatter_in_place", op);
        let len = values.len();
        self.check_parts("reduce_scatter_in_place", len);
        let schedule = |bytes| self.seat().reduce_scatter(len, bytes);
        self.reduce_by(signature::<T>(Kind::ReduceScatter, Some(op), 0, len), schedule, values, op)
    }

    /// Every rank gets all `input`s, one after the other in the order of ranks. All have one length.
    #[track_caller]
    pub fn all_gather<T: Element>(&self, input: &[T], output: &mut [T]) -> Result<(), Error> {
        self.check_all("all_gather", ["out", "in"], [output.len(), input.len()]);
        let own = self.own_part(output.len());
        output[own].copy_from_slice(input);
        self.all_gather_in_place(output)
    }

    /// As [`Group::all_gather`] into `values`, where this rank's part is in its place, at [`Group::own_part`], already.
    #[track_caller]
    pub fn all_gather_in_place<T: Element>(&self, values: &mut [T]) -> Result<(), Error> {
        let len = values.len();
        self.check_parts("all_gather_in_place", len);
        let schedule = self.seat().all_gather(len, size_of::<T>());
        self.move_by(signature::<T>(Kind::AllGather, None, 0, len), schedule, values)
    }

    /// Where this rank's part lies in a buffer of so many elements, which has an equal part for each rank, in their order.
    #[track_caller]
    pub fn own_part(&self, len: usize) -> Range<usize> {
        self.check_parts("own_part", len);
        let part = len / self.world_size;
        self.rank.index() * part..(self.rank.index() + 1) * part
    }

    /// Rank `root` gets all `input`s, one after the other in the order of ranks. All have one length; the other ranks' `output`
    /// is not looked at.
    #[track_caller]
    pub fn gather<T: Element>(&self, input: &[T], output: &mut [T], root: Rank) -> Result<(), Error> {
        self.check_peer("gather", root);
        let part = input.len();
        let schedule = self.seat().gather(part, root.index());
        let signature = signature::<T>(Kind::Gather, None, root.0, part);
        if self.rank != root {
            return self.move_by(signature, schedule, &mut input.to_vec());
        }
        self.check_all("gather", ["out", "in"], [output.len(), part]);
        output[root.index() * part..][..part].copy_from_slice(input);
        self.move_by(signature, schedule, output)
    }

    /// Rank r gets part r of `world_size` equal parts of rank `root`'s `input`; the other ranks' is not looked at.
    #[track_caller]
    pub fn scatter<T: Element>(&self, input: &[T], output: &mut [T], root: Rank) -> Result<(), Error> {
        self.check_peer("scatter", root);
        let part = output.len();
        let schedule = self.seat().scatter(part, root.index());
        let signature = signature::<T>(Kind::Scatter, None, root.0, part);
        if self.rank != root {
            return self.move_by(signature, schedule, output);
        }
        self.check_all("scatter", ["in", "out"], [input.len(), part]);
        output.copy_from_slice(&input[root.index() * part..][..part]);
        self.move_by(signature, schedule, &mut input.to_vec())
    }

    /// Part r of this rank's `input` goes to rank r, and part r of `output` comes from there; all parts have one length.
    #[track_caller]
    pub fn all_to_all<T: Element>(&self, input: &[T], output: &mut [T]) -> Result<(), Error> {
        let n = self.world_size;
        assert!(
            input.len() == output.len() && input.len().is_multiple_of(n),
            "all_to_all: {} elements in, {} out, {n} ranks",
            input.len(),
            output.len()
        );
        let lengths = vec![input.len() / n; n];
        self.all_to_all_uneven(input, &lengths, output, &lengths)
    }

    /// As [`Group::all_to_all`], where part r of `input` has `sends[r]` elements and part r of `output` has `receives[r]`, which
    /// is what rank r sends here.
    #[track_caller]
    pub fn all_to_all_uneven<T: Element>(
        &self,
        input: &[T],
        sends: &[usize],
        output: &mut [T],
        receives: &[usize],
    ) -> Result<(), Error> {
        for (what, lengths, len) in [("in", sends, input.len()), ("out", receives, output.len())] {
            assert!(
                lengths.len() == self.world_size && lengths.iter().sum::<usize>() == len,
                "all_to_all: parts of {lengths:?} elements of {len} {what}, {} ranks",
                self.world_size
            );
        }
        let rank = self.rank.index();
        let (sends, receives) = (parts(sends, 0), parts(receives, input.len()));
        assert!(
            sends[rank].len() == receives[rank].len(),
            "all_to_all: rank {rank} sends itself {} elements and expects {}",
            sends[rank].len(),
            receives[rank].len()
        );
        let mut both = [input, &*output].concat();
        both.copy_within(sends[rank].clone(), receives[rank].start);
        let schedule = self.seat().all_to_all(&sends, &receives);
        self.move_by(signature::<T>(Kind::AllToAll, None, 0, input.len()), schedule, &mut both)?;
        output.copy_from_slice(&both[input.len()..]);
        Ok(())
    }

    /// Returns when every rank has called it.
    pub fn barrier(&self) -> Result<(), Error> {
        let schedule = self.seat().barrier();
        self.move_by::<u8>(signature::<u8>(Kind::Barrier, None, 0, 0), schedule, &mut [])
    }

    /// Waits until all ranks have come, before anything else: they must all mean the same ranks.
    pub(crate) fn assemble(&self) -> Result<(), Error> {
        let deadline = Deadline::after(self.timeout);
        let ranks = self.members.iter().fold(self.world_size as u32, |sum, rank| {
            sum.wrapping_mul(0x9e37_79b1).wrapping_add(rank.0).rotate_left(7)
        });
        // Operations are counted from 1.
        let signature = signature::<u8>(Kind::Barrier, None, ranks, 0);
        let play = Play::new(signature, self.seat().assembly(), Erased::of::<u8>(), ReduceOp::Sum);
        let mut engine = self.engine(&deadline)?;
        let result = engine.run(self.patience, deadline, Box::new(play), &mut []);
        result.map_err(|error| error.in_making(self.known_as()))?;
        engine.wires.iter_mut().for_each(|wires| wires.have_met());
        Ok(())
    }

    /// A barrier by way of rank 0, whose error names all ranks that didn't come within `timeout`.
    pub fn monitored_barrier(&self, timeout: Duration) -> Result<(), Error> {
        let schedule = self.seat().monitored_barrier();
        // Rank 0 knows who is missing, so the others let it speak first.
        let patience =
            if self.rank.index() == 0 { Duration::ZERO } else { (timeout / 4).min(LONGEST_PATIENCE) };
        let group = self.clone().with_timeout(timeout.saturating_add(patience));
        group.move_by::<u8>(signature::<u8>(Kind::MonitoredBarrier, None, 0, 0), schedule, &mut [])
    }

    /// Starts an all-reduce of a buffer that comes back, reduced, from [`Work::wait`].
    #[track_caller]
    pub fn start_all_reduce<B: Buffer>(&self, mut buffer: B, op: ReduceOp) -> Work<B> {
        check_op::<B::Item>("start_all_reduce", op);
        let count = buffer.as_mut_slice().len();
        let signature = self.all_reduce_signature::<B::Item>(op, count);
        self.start_reduction(signature, |bytes| self.seat().all_reduce(count, bytes), buffer, op)
    }

    /// Starts a broadcast of rank `root`'s buffer.
    #[track_caller]
    pub fn start_broadcast<B: Buffer>(&self, mut buffer: B, root: Rank) -> Work<B> {
        self.check_peer("start_broadcast", root);
        let count = buffer.as_mut_slice().len();
        let schedule = self.seat().broadcast(count, root.index());
        self.start_move(signature::<B::Item>(Kind::Broadcast, None, root.0, count), schedule, buffer)
    }

    /// Starts a [`Group::reduce_scatter_in_place`] of a buffer, a range of an arena say, that comes back from [`Work::wait`].
    #[track_caller]
    pub fn start_reduce_scatter<B: Buffer>(&self, mut buffer: B, op: ReduceOp) -> Work<B> {
        check_op::<B::Item>("start_reduce_scatter", op);
        let count = buffer.as_mut_slice().len();
        self.check_parts("start_reduce_scatter", count);
        let signature = signature::<B::Item>(Kind::ReduceScatter, Some(op), 0, count);
        self.start_reduction(signature, |bytes| self.seat().reduce_scatter(count, bytes), buffer, op)
    }

    /// Starts a [`Group::all_gather_in_place`] of a buffer that comes back from [`Work::wait`].
    #[track_caller]
    pub fn start_all_gather<B: Buffer>(&self, mut buffer: B) -> Work<B> {
        let count = buffer.as_mut_slice().len();
        self.check_parts("start_all_gather", count);
        let schedule = self.seat().all_gather(count, size_of::<B::Item>());
        self.start_move(signature::<B::Item>(Kind::AllGather, None, 0, count), schedule, buffer)
    }

    fn all_reduce_signature<T: Element>(&self, op: ReduceOp, count: usize) -> Signature {
        Signature { algorithm: self.algorithm, ..signature::<T>(Kind::AllReduce, Some(op), 0, count) }
    }

    /// Plays a reduction over a borrowed buffer to the end. The schedule may depend on the bytes of what is summed.
    fn reduce_by<T: Element>(
        &self,
        signature: Signature,
        schedule: impl FnOnce(usize) -> Schedule,
        values: &mut [T],
        op: ReduceOp,
    ) -> Result<(), Error> {
        let deadline = Deadline::after(self.timeout);
        let mut engine = self.engine(&deadline)?;
        engine.check()?;
        // Values are touched only where the operation begins.
        if let ReduceOp::PremulSum(factor) = op {
            T::scale(values, factor);
        }
        if is_widened::<T>(op) {
            let mut wide = widen(values);
            self.play(engine, deadline, signature, || schedule(size_of::<T::Wide>()), &mut wide, op)?;
            means(&wide, self.world_size, values);
            return Ok(());
        }
        let (element, slice) = (Erased::of::<T>(), cast_slice(values));
        let schedule = || schedule(element.bytes);
        let play = engine.collective(signature, element, op, deadline.begun(), slice, schedule);
        engine.run(self.patience, deadline, play, cast_slice_mut(values))?;
        if op == ReduceOp::Average {
            values.iter_mut().for_each(|value| *value = T::mean_of(value.widened(), self.world_size));
        }
        Ok(())
    }

    /// Plays an operation that only moves over a borrowed buffer to the end.
    fn move_by<T: Element>(
        &self,
        signature: Signature,
        schedule: Schedule,
        values: &mut [T],
    ) -> Result<(), Error> {
        let deadline = Deadline::after(self.timeout);
        self.play(self.engine(&deadline)?, deadline, signature, || schedule, values, ReduceOp::Sum)
    }

    fn play<T: Element>(
        &self,
        mut engine: MutexGuard<'_, Engine>,
        deadline: Deadline,
        signature: Signature,
        schedule: impl FnOnce() -> Schedule,
        values: &mut [T],
        op: ReduceOp,
    ) -> Result<(), Error> {
        let (element, slice) = (Erased::of::<T>(), cast_slice(values));
        let play = engine.collective(signature, element, op, deadline.begun(), slice, schedule);
        engine.run(self.patience, deadline, play, cast_slice_mut(values))
    }

    fn start_reduction<B: Buffer>(
        &self,
        signature: Signature,
        schedule: impl FnOnce(usize) -> Schedule,
        buffer: B,
        op: ReduceOp,
    ) -> Work<B> {
        type Wide<B> = <<B as Buffer>::Item as Element>::Wide;
        let element =
            if is_widened::<B::Item>(op) { Erased::of::<Wide<B>>() } else { Erased::of::<B::Item>() };
        let mut buffer = Box::new(Reduced::new(buffer, op, self.world_size));
        self.begin(|engine, ticket| {
            let (now, schedule) = (Instant::now(), || schedule(element.bytes));
            let play = engine.collective(signature, element, op, now, buffer.bytes(), schedule);
            engine.queue.push_back(Queued::one(ticket, play, buffer));
            Ok(())
        })
    }

    fn start_move<B: Buffer>(&self, signature: Signature, schedule: Schedule, buffer: B) -> Work<B> {
        let element = Erased::of::<B::Item>();
        self.start(signature, || schedule, element, Box::new(Plain(buffer)), ReduceOp::Sum)
    }

    /// Queues an operation behind those that were started before.
    pub(crate) fn start<B>(
        &self,
        signature: Signature,
        schedule: impl FnOnce() -> Schedule,
        element: Erased,
        mut buffer: Box<dyn AnyBuffer>,
        op: ReduceOp,
    ) -> Work<B> {
        self.begin(|engine, ticket| {
            let play = engine.collective(signature, element, op, Instant::now(), buffer.bytes(), schedule);
            engine.queue.push_back(Queued::one(ticket, play, buffer));
            Ok(())
        })
    }

    /// That one side has as many elements as all ranks' other sides.
    #[track_caller]
    pub(super) fn check_all(&self, op: &str, [all, one]: [&str; 2], [len, part]: [usize; 2]) {
        let n = self.world_size;
        assert!(len == part * n, "{op}: {len} elements {all}, {part} {one}, {n} ranks");
    }
}
