//! The rendezvous store: small values under names, shared by the processes of a run.
//!
//! [`Store`] is what a program speaks to; a [`LinkStore`] asks the coordinator, and other crates may ask others. All of them
//! keep to the same words:
//!
//! - Every change has a [`Revision`], and later changes have greater ones. A value's revision is that of its last change.
//!   So [`Store::compare_and_set`] is exact: it can't take a value for an earlier one that looked the same.
//! - A [`Lease`] must be kept alive by who took it. When it ends, all keys under it are gone, in one change.
//! - [`Watch`] tells every change below a folder, in order, from a revision on. It loses none: a reader that comes after the
//!   store has forgotten what it wants is told so ([`Refusal::Lagged`]).
//! - Every wait has a deadline, and so has every answer.
//!
//! Runs that share a store, and the generations of a run, must not meet in it: see [`Scoped`].
//! The store is for rendezvous, not for tensors: values have at most [`MAX_VALUE`] bytes.

mod error;
mod key;
mod link;
mod message;
mod scoped;
mod watch;

pub use error::{Refusal, StoreError};
pub use key::{BadKey, Folder, Key, MAX_KEY};
pub use link::LinkStore;
pub use message::{Answer, Ask, FromClient, MAX_STORE_FRAME, ToClient, Value};
pub use scoped::Scoped;
pub use watch::Watch;

use phalanx_wire::Deadline;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::time::Duration;

/// The longest value in bytes.
pub const MAX_VALUE: usize = 1 << 20;
/// The most keys that one listing tells.
pub const MAX_LISTING: usize = 4096;
/// The longest lease.
pub const MAX_TIME_TO_LIVE: Duration = Duration::from_secs(24 * 3600);
/// The most keys that one wait may name.
pub const MAX_WAIT_KEYS: usize = 1024;

/// When a change came: a number that grows with every change of the store.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Revision(pub u64);

impl Revision {
    /// The first that comes after this one.
    pub fn next(self) -> Revision {
        Revision(self.0 + 1)
    }
}

impl fmt::Display for Revision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// The name of a lease.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(transparent)]
pub struct LeaseId(pub u64);

impl fmt::Display for LeaseId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// A promise to say again and again that one is alive.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Lease {
    /// Its name.
    pub id: LeaseId,
    /// How long it lasts after it was granted or last kept alive; a store may give more than it was asked for.
    pub time_to_live: Duration,
}

/// What a key holds.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Entry {
    /// The value.
    pub value: Value,
    /// When it was last changed.
    pub revision: Revision,
}

/// What a key must be like for [`Store::compare_and_set`] to change it.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Expect {
    /// There is no such key.
    Absent,
    /// It was last changed then.
    Revision(Revision),
}

/// What came of [`Store::compare_and_set`].
#[derive(Clone, PartialEq, Debug)]
pub enum Swap {
    /// The key holds the new value since then.
    Done(Revision),
    /// It was something else than expected, and still is.
    Conflict(Option<Entry>),
}

/// The keys of a folder at one moment.
#[derive(Clone, PartialEq, Debug)]
pub struct Listing {
    /// That moment: a watch from the one after it tells all that changes later.
    pub revision: Revision,
    /// The keys in their order, and when each was last changed.
    pub keys: Vec<(Key, Revision)>,
}

/// A change of the store.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Event {
    /// When.
    pub revision: Revision,
    /// What.
    pub change: Change,
}

/// What changed at once.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Change {
    /// A key has this value now.
    Set {
        /// Which.
        key: Key,
        /// What it holds.
        value: Value,
    },
    /// These keys are gone: one that was deleted, or all of a lease that ended.
    Gone {
        /// Which.
        keys: Vec<Key>,
    },
}

/// What a poll brought.
#[derive(Clone, PartialEq, Debug)]
pub struct News {
    /// The changes in order; empty if none came in time.
    pub events: Vec<Event>,
    /// From where to ask on: all changes before it have been told.
    pub next: Revision,
}

/// A store as one process sees it; threads may share it, and none holds up another.
pub trait Store: Send + Sync {
    /// What a key holds now.
    fn get(&self, key: &Key) -> Result<Option<Entry>, StoreError>;

    /// Gives a key a value, and to a lease; without one the key stays until it is deleted, whatever it belonged to before.
    fn set(&self, key: &Key, value: &[u8], lease: Option<LeaseId>) -> Result<Revision, StoreError>;

    /// Adds to the number that a key holds as decimal digits, 0 where there is no key; gives the sum. The key stays with its
    /// lease.
    fn add(&self, key: &Key, by: i64) -> Result<i64, StoreError>;

    /// Does what [`Store::set`] does if the key is as expected.
    fn compare_and_set(
        &self,
        key: &Key,
        expect: Expect,
        value: &[u8],
        lease: Option<LeaseId>,
    ) -> Result<Swap, StoreError>;

    /// Deletes a key; says whether there was one.
    fn delete(&self, key: &Key) -> Result<bool, StoreError>;

    /// The keys below a folder, at most [`MAX_LISTING`].
    fn list(&self, folder: &Folder) -> Result<Listing, StoreError>;

    /// Waits until all of these keys, at most [`MAX_WAIT_KEYS`], are there at one moment. When the deadline comes first, the
    /// error names the missing ones.
    fn wait(&self, keys: &[Key], deadline: Deadline) -> Result<(), StoreError>;

    /// Some of the changes below a folder, from a revision on, waiting for the first until the deadline. [`Watch`] calls this.
    fn poll(&self, folder: &Folder, from: Revision, deadline: Deadline) -> Result<News, StoreError>;

    /// A lease that ends after this time, unless it is kept alive before.
    fn grant(&self, time_to_live: Duration) -> Result<Lease, StoreError>;

    /// Starts a lease's time anew; only who was granted it can.
    fn keep_alive(&self, lease: LeaseId) -> Result<(), StoreError>;

    /// Ends a lease at once.
    fn revoke(&self, lease: LeaseId) -> Result<(), StoreError>;

    /// What a key holds, once it is there.
    fn get_when_there(&self, key: &Key, deadline: Deadline) -> Result<Entry, StoreError> {
        loop {
            self.wait(std::slice::from_ref(key), deadline)?;
            // It may be gone again already.
            if let Some(entry) = self.get(key)? {
                return Ok(entry);
            }
        }
    }
}
