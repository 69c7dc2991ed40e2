//! Operations that run while the caller does something else.

use crate::element::{Element, ReduceOp, is_widened, means, widen};
use crate::error::Error;
use crate::group::Group;
use phalanx_wire::{Deadline, Rank};
use std::any::Any;
use std::marker::PhantomData;

/// A buffer that an operation can own while it runs.
pub trait Buffer: Send + 'static {
    /// The type of its elements.
    type Item: Element;
    /// Its elements.
    fn as_mut_slice(&mut self) -> &mut [Self::Item];
}

impl<T: Element> Buffer for Vec<T> {
    type Item = T;

    fn as_mut_slice(&mut self) -> &mut [T] {
        self
    }
}

/// A buffer with its type forgotten.
pub(crate) trait AnyBuffer: Send {
    fn bytes(&mut self) -> &mut [u8];
    /// Makes of what came what was asked for.
    fn settle(&mut self) {}
    fn into_any(self: Box<Self>) -> Box<dyn Any + Send>;
}

/// A buffer that moves as it is.
pub(crate) struct Plain<B>(pub(crate) B);

impl<B: Buffer> AnyBuffer for Plain<B> {
    fn bytes(&mut self) -> &mut [u8] {
        bytemuck::cast_slice_mut(self.0.as_mut_slice())
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any + Send> {
        Box::new(self.0)
    }
}

/// A buffer that is reduced.
pub(crate) struct Reduced<B: Buffer> {
    buffer: B,
    /// What is reduced in its place, where sums are taken in a wider type.
    wide: Option<Vec<<B::Item as Element>::Wide>>,
    op: ReduceOp,
    ranks: usize,
}

impl<B: Buffer> Reduced<B> {
    /// Makes of a rank's elements what is to be reduced.
    pub(crate) fn new(mut buffer: B, op: ReduceOp, ranks: usize) -> Reduced<B> {
        if let ReduceOp::PremulSum(factor) = op {
            B::Item::scale(buffer.as_mut_slice(), factor);
        }
        let wide = is_widened::<B::Item>(op).then(|| widen(buffer.as_mut_slice()));
        Reduced { buffer, wide, op, ranks }
    }
}

impl<B: Buffer> AnyBuffer for Reduced<B> {
    fn bytes(&mut self) -> &mut [u8] {
        match &mut self.wide {
            Some(wide) => bytemuck::cast_slice_mut(wide),
            None => bytemuck::cast_slice_mut(self.buffer.as_mut_slice()),
        }
    }

    fn settle(&mut self) {
        let (ranks, values) = (self.ranks, self.buffer.as_mut_slice());
        match &self.wide {
            Some(wide) => means(wide, ranks, values),
            None if self.op == ReduceOp::Average => {
                values.iter_mut().for_each(|value| *value = B::Item::mean_of(value.widened(), ranks));
            }
            None => {}
        }
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any + Send> {
        Box::new(self.buffer)
    }
}

/// An operation that was started. It moves while somebody waits in its group, polls, or calls [`Group::progress`], and not
/// while its owner waits in another group: of several groups, ranks should wait in one order.
///
/// Dropping it lets the operation run on for as long as the group is there; its buffer is freed when it is done. A message
/// that was asked for and hasn't begun to come is then no longer asked for.
#[must_use = "an operation's buffer comes back from `wait`"]
pub struct Work<B> {
    pub(crate) group: Group,
    /// Or why it couldn't even be queued.
    pub(crate) ticket: Result<u64, Error>,
    pub(crate) buffer: PhantomData<fn() -> B>,
    pub(crate) taken: bool,
}

impl<B: Buffer> Work<B> {
    /// Plays the group's operations until this one is done; gives its buffer back. A deadline that passes is the end of the
    /// group, as any time-out is; [`Work::poll`] only looks.
    pub fn wait(self, deadline: Deadline) -> Result<B, Error> {
        self.wait_from(deadline).map(|(buffer, _)| buffer)
    }

    /// As [`Work::wait`]; says which rank a message came from, or went to. Of a collective, that is this rank itself.
    pub fn wait_from(mut self, deadline: Deadline) -> Result<(B, Rank), Error> {
        self.taken = true;
        let done = self.group.finish(self.ticket.clone()?, deadline)?;
        let buffer = done.buffer.into_any().downcast::<B>();
        Ok((*buffer.expect("the buffer that this work was started with"), Rank(done.peer as u32)))
    }

    /// Moves what can be moved now; whether the operation is done or has failed. Never blocks.
    pub fn poll(&mut self) -> bool {
        self.group.progress();
        self.ticket.as_ref().map_or(true, |&ticket| self.group.is_finished(ticket))
    }
}

impl<B> Drop for Work<B> {
    fn drop(&mut self) {
        if let Ok(ticket) = self.ticket
            && !self.taken
        {
            self.group.forget(ticket);
        }
    }
}
