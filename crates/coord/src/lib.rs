//! The coordinator: who is in a run, where they are, and the rendezvous store that they share.
//!
//! It waits until every rank has joined and then gives each the roster. It is hosted by the agent that started the ranks,
//! or by rank 0 itself where there is none. What it decides is a pure function ([`Membership`]); threads around it do the
//! I/O. It knows no tensors and starts no processes.
//!
//! ```
//! use phalanx_coord::Coordinator;
//! use phalanx_job::{Link, store::Store};
//! use phalanx_wire::{Deadline, Generation, Rank, Secret};
//! use std::time::Duration;
//!
//! let secret = Secret::random()?;
//! let coordinator = Coordinator::serve("127.0.0.1:0".parse()?, secret.clone(), Generation(0), 1, |_, _| {})?;
//! let soon = || Deadline::after(Duration::from_secs(5));
//! let mut link = Link::connect(coordinator.address(), &secret, Rank(0), Generation(0), soon())?;
//! let (rank, roster) = link.join("me".into(), soon())?;
//! assert_eq!((rank, roster.addresses), (Rank(0), vec!["me".to_owned()]));
//!
//! let store = Link::connect(coordinator.address(), &secret, Rank(0), Generation(0), soon())?.open_store()?;
//! assert_eq!(store.add(&"visits".parse()?, 1)?, 1);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![forbid(unsafe_code)]

mod agents;
mod etcd;
mod fleet;
mod membership;
mod rendezvous;
mod restarts;
mod server;
mod store;
mod succession;

pub use etcd::{EtcdConfig, EtcdStore};
pub use fleet::{Event, Fleet, Left, NodeId, Order, Patience, Wait};
pub use membership::{Decision, Member, Membership};
pub use phalanx_job::{Notice, StopWhy};
pub use rendezvous::{Meeting, rendezvous};
pub use restarts::Restarts;
pub use server::Coordinator;
pub use store::{Client, Ledger, Limits, Sent};
pub use succession::{RollCall, Verdict, quorum};
