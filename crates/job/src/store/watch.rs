//! Reading the changes of a folder one by one.

use super::{Event, Folder, Revision, Store, StoreError};
use phalanx_wire::Deadline;
use std::collections::VecDeque;

/// A place in the row of changes. It holds nothing open at the store, so a reader may take its time: what it hasn't read
/// waits in the store's history, and if that forgets it first, [`Watch::next`] says so.
pub struct Watch<'a> {
    store: &'a dyn Store,
    folder: Folder,
    read: VecDeque<Event>,
    next: Revision,
}

impl<'a> Watch<'a> {
    /// All changes below `folder` from the revision `from` on, which is included. Nothing is asked yet.
    pub fn new(store: &'a dyn Store, folder: Folder, from: Revision) -> Watch<'a> {
        Watch { store, folder, read: VecDeque::new(), next: from }
    }

    /// The next change; none if the deadline comes first, and then it may be asked for again.
    pub fn next(&mut self, deadline: Deadline) -> Result<Option<Event>, StoreError> {
        loop {
            if let Some(event) = self.read.pop_front() {
                return Ok(Some(event));
            }
            let news = self.store.poll(&self.folder, self.next, deadline)?;
            self.next = news.next;
            self.read.extend(news.events);
            if self.read.is_empty() && deadline.expired() {
                return Ok(None);
            }
        }
    }
}
