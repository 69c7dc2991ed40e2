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
    /// How it goes on from now on when others are lost.
    GoesOn {
        /// With whom.
        with: GoesOn,
    },
    /// It has left the membership at hand, and waits for the next roster.
    Rejoin {
        /// Ranks of that membership which gave no sign of life, though nobody saw them end.
        silent: Vec<u32>,
    },
    /// It was in a membership that another coordinator has made, which is gone; it has left that, and waits for the next roster.
    Return {
        /// As in `Join`.
        address: String,
        /// Which membership.
        generation: Generation,
        /// Its rank there.
        rank: Rank,
        /// As in `GoesOn`.
        with: GoesOn,
        /// As in `Rejoin`.
        silent: Vec<u32>,
    },
    /// It has waited long enough for the roster, and asks who hasn't come.
    WhoIsMissing,
    /// From now on this connection speaks of the store: [`crate::store::FromClient`] and [`crate::store::ToClient`].
    OpenStore,
    /// It can't go on.
    Fail {
        /// Why.
        message: String,
        /// Whose fault it is.
        cause: Cause,
    },
}

/// With whom a worker goes on that loses others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GoesOn {
    /// It doesn't.
    #[default]
    Not,
    /// With those that are left, and later with others in the place of the lost.
    WithThoseLeft,
    /// With as many as are expected: it waits for those that take the place of the lost.
    WithAll,
}

/// What whoever started the workers may want to know of them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Notice {
    /// A membership begins. Workers are named by the rank that they were started with, here and below.
    Begun {
        /// Which.
        generation: Generation,
        /// The workers in the order of their ranks.
        workers: Vec<Rank>,
    },
    /// Whether all members go on in place when others are lost, as far as is known.
    InPlace(bool),
    /// A rank gives no sign of life to others, which go on without it.
    Silent {
        /// Which.
        rank: Rank,
    },
    /// A rank said that it can't go on.
    Failed {
        /// Which.
        rank: Rank,
        /// Why.
        message: String,
        /// Whose fault it is.
        cause: Cause,
    },
}

/// Whose fault it is that a worker can't go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Cause {
    /// Its settings', and whoever is started with them comes to the same, alone or with all others.
    Setting,
    /// Its own, and another in its place would come to the same: bad data, say, or a setting.
    Own,
    /// Its device's, and another in its place would find that as it is: a GPU's memory fails, say.
    Device,
    /// Its own, for a reason that it doesn't know: it panicked, say.
    Unknown,
    /// Another rank's, which it lost.
    Other,
    /// Another rank's, which keeps all from going on in place, so that all begin again.
    Refused,
    /// Nobody's any more: with a rank that was lost before went a part of the run that is nowhere else, so that all begin again.
    PartLost,
}

/// To a worker.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "say", rename_all = "snake_case", deny_unknown_fields)]
pub enum ToWorker {
    /// All are there.
    Roster {
        /// Who it is among them.
        rank: Rank,
        /// Who they are.
        roster: Roster,
    },
    /// Somebody waits to come in: the members are to leave together at the end of their step, and to rejoin.
    Change,
    /// Some of the membership at hand are lost: the others are to leave it now, and to rejoin. No step of it can end any more.
    Loss,
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
