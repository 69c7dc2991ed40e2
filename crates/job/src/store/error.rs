//! Why a store didn't do what it was asked.

use super::{BadKey, Key, LeaseId, MAX_VALUE, MAX_WAIT_KEYS, Revision};
use serde::{Deserialize, Serialize};
use std::time::Duration;
use thiserror::Error;

/// What a store itself says no to; it stays as it was.
#[derive(Clone, PartialEq, Debug, Error, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Refusal {
    /// The value is too long.
    #[error(
        "a value of {bytes} bytes, where at most {limit} are taken\nhint: put it into a file and the file's name into the store"
    )]
    ValueTooLong {
        /// How long it is.
        bytes: usize,
        /// How long it may be.
        limit: usize,
    },
    /// There is no room.
    #[error("there is no room: it would take more than {limit} {what}")]
    Full {
        /// What there is too much of.
        what: String,
        /// How much there may be.
        limit: usize,
    },
    /// It isn't a counter.
    #[error("it doesn't hold a whole number of 64 bits")]
    NotANumber,
    /// The sum doesn't fit.
    #[error("{value} and {by} add up to more than 64 bits hold")]
    Overflow {
        /// What it holds.
        value: i64,
        /// What was to be added.
        by: i64,
    },
    /// The lease has ended, or was granted to somebody else.
    #[error("lease {lease} has ended, or was granted to another client")]
    NoLease {
        /// Which.
        lease: LeaseId,
    },
    /// A lease can't be as short or as long as that.
    #[error("a lease of {asked_ms} ms, where {min_ms} to {max_ms} are granted")]
    TimeToLive {
        /// What was asked for.
        asked_ms: u64,
        /// The shortest.
        min_ms: u64,
        /// The longest.
        max_ms: u64,
    },
    /// The changes that a watch wants are forgotten already, so it would lose some.
    #[error(
        "changes from revision {from} on are wanted, and those before {first} are forgotten: the reader is too slow, or the store was started anew\nhint: list the folder, and watch from the listing's revision on"
    )]
    Lagged {
        /// From where they are wanted.
        from: Revision,
        /// The first that is still known.
        first: Revision,
    },
    /// A watch wants changes of a future that this store hasn't promised.
    #[error(
        "changes from revision {from} on are wanted, and the store is at {now}: that revision is another store's\nhint: list the folder, and watch from the listing's revision on"
    )]
    NotYet {
        /// From where they are wanted.
        from: Revision,
        /// The last change.
        now: Revision,
    },
}

impl Refusal {
    /// Every store's bound on a value.
    pub fn unless_value_fits(value: &[u8]) -> Result<(), Refusal> {
        let (bytes, limit) = (value.len(), MAX_VALUE);
        if bytes <= limit { Ok(()) } else { Err(Refusal::ValueTooLong { bytes, limit }) }
    }

    /// Every store's bound on the keys of a wait.
    pub fn unless_wait_fits(keys: &[Key]) -> Result<(), Refusal> {
        let limit = MAX_WAIT_KEYS;
        if keys.len() <= limit {
            Ok(())
        } else {
            Err(Refusal::Full { what: "keys in one wait".into(), limit })
        }
    }
}

/// What can go wrong with a store.
#[derive(Debug, Error)]
pub enum StoreError {
    /// A name that isn't one.
    #[error(transparent)]
    BadKey(#[from] BadKey),
    /// The store says no.
    #[error("the store refused to {operation}: {refusal}")]
    Refused {
        /// What it was asked, with the key.
        operation: String,
        /// Why not.
        refusal: Refusal,
    },
    /// Not all keys came in time.
    #[error("after {:.1} s in the store {} still missing: {}", .waited.as_secs_f64(), if .keys.len() == 1 { "a key is" } else { "keys are" }, .keys.iter().map(Key::as_str).collect::<Vec<_>>().join(", "))]
    Missing {
        /// Which didn't come.
        keys: Vec<Key>,
        /// How long they were waited for.
        waited: Duration,
    },
    /// The store didn't answer in time; it may have done what it was asked, or not.
    #[error("the store at {address} gave no answer in {:.1} s when asked to {operation}: it may have been done or not", .waited.as_secs_f64())]
    Late {
        /// Where it is.
        address: String,
        /// What it was asked, with the key.
        operation: String,
        /// How long the answer was waited for.
        waited: Duration,
    },
    /// The connection to the store has ended, or it speaks nonsense. What was under way may have been done or not; leases
    /// of a connection end with it.
    #[error("the store at {address} when asked to {operation}: {reason}")]
    Broken {
        /// Where it is.
        address: String,
        /// What it was asked, with the key.
        operation: String,
        /// What happened.
        reason: String,
    },
}

impl StoreError {
    /// The store says no to an operation on a key.
    pub fn refused(operation: impl Into<String>, refusal: Refusal) -> StoreError {
        StoreError::Refused { operation: operation.into(), refusal }
    }

    /// Why the store said no, if that is what it was.
    pub fn refusal(&self) -> Option<&Refusal> {
        if let StoreError::Refused { refusal, .. } = self { Some(refusal) } else { None }
    }
}
