//! The coordinator's rendezvous store; `phalanx_job::store` says what a store promises.
//!
//! What it decides is a pure state machine, the [`Ledger`]: questions and the time go in, answers come out. [`Desk`] puts
//! threads and sockets around it. All is kept in memory and ends with the coordinator; revisions begin at the clock's
//! microseconds, so a client that comes back to a coordinator that was started anew finds its old revisions forgotten and
//! not taken for new ones.
//!
//! A watch is a row of polls, each with the revision that it wants to go on from. So the ledger keeps nothing for a reader
//! but the history that all share, and a slow one costs no memory: it finds the history trimmed, and is told.

mod desk;
mod history;
mod leases;
mod ledger;
mod parked;

pub(crate) use desk::Desk;
pub use ledger::{Client, Ledger, Limits, Sent};
