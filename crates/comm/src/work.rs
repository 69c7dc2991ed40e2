//! Operations that run while the caller does something else.

use crate::error::Error;
use crate::group::Group;
use phalanx_wire::{Deadline, Rank};
use std::marker::PhantomData;

/// An operation that was started. It moves while somebody waits in its group, or in another one that comes of the same world,
/// polls, or calls [`Group::progress`].
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

impl<B: Send + 'static> Work<B> {
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
