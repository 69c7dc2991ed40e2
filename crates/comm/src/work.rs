//! Operations that run while the caller does something else.

use crate::element::Element;
use crate::error::Error;
use crate::group::Group;
use phalanx_wire::Deadline;
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
    fn into_any(self: Box<Self>) -> Box<dyn Any + Send>;
}

impl<B: Buffer> AnyBuffer for B {
    fn bytes(&mut self) -> &mut [u8] {
        bytemuck::cast_slice_mut(self.as_mut_slice())
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any + Send> {
        self
    }
}

/// An operation that was started. Dropping it lets the operation run on; its buffer is freed when it is done.
#[must_use = "an operation's buffer comes back from `wait`"]
pub struct Work<B> {
    pub(crate) group: Group,
    /// Or why it couldn't even be queued.
    pub(crate) ticket: Result<u64, Error>,
    pub(crate) buffer: PhantomData<fn() -> B>,
    pub(crate) taken: bool,
}

impl<B: Buffer> Work<B> {
    /// Plays the group's operations until this one is done; gives its buffer back.
    pub fn wait(mut self, deadline: Deadline) -> Result<B, Error> {
        self.taken = true;
        let buffer = self.group.finish(self.ticket.clone()?, deadline)?;
        Ok(*buffer.into_any().downcast::<B>().expect("the buffer that this work was started with"))
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
