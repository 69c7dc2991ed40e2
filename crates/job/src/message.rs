//! What a worker and the coordinator say to each other, one JSON value a frame. Inner types never go over a wire: these are
//! plain, and a change of meaning is a new variant.

use phalanx_wire::{Generation, Rank};
use serde::{Deserialize, Serialize};

/// From a worker.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "say", rename_all = "snake_case", deny_unknown_fields)]
pub enum FromWorker {
    /// It is there, and its peers reach it at this address, whose form is theirs.
    Join {
        /// Not looked at by the coordinator.
        address: String,
    },
    /// It has waited long enough for the roster, and asks who hasn't come.
    WhoIsMissing,
    /// From now on this connection speaks of the store: [`crate::store::FromClient`] and [`crate::store::ToClient`].
    OpenStore,
    /// It can't go on.
    Fail {
        /// Why.
        message: String,
        /// Whether it only fails because another rank did.
        consequence: bool,
    },
}

/// To a worker.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "say", rename_all = "snake_case", deny_unknown_fields)]
pub enum ToWorker {
    /// All are there.
    Roster(Roster),
    /// These ranks haven't come yet.
    Missing {
        /// Which.
        missing: Vec<u32>,
    },
    /// The worker can't be taken.
    Refused {
        /// Why.
        reason: String,
    },
    /// The store listens.
    StoreOpen,
    /// What the worker said was heard, and told to whoever started it.
    Heard,
}

/// Who is in a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Roster {
    /// Which membership.
    pub generation: Generation,
    /// The workers' addresses, by rank.
    pub addresses: Vec<String>,
}

impl Roster {
    /// The rank with this index.
    pub fn ranks(&self) -> impl Iterator<Item = Rank> {
        (0..self.addresses.len() as u32).map(Rank)
    }
}
