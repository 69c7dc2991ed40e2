//! What every connection of a run starts with: the run's [`Secret`], the mutual proof of it ([`handshake`]), frames of
//! bounded length, and the ids that both sides speak of.
//!
//! It is a crate of its own because the collectives and the coordinator's messages both need it and may not know each other.
//! It doesn't open sockets, though it says how whoever comes to one is taken in ([`receive`]), and doesn't decide where a secret comes
//! from, nor what is encrypted: [`tls`] is for whoever wants it.
//!
//! ```
//! use phalanx_wire::{Deadline, Generation, Hello, Rank, Secret, Side, handshake};
//! use std::os::unix::net::UnixStream;
//!
//! let secret = Secret::random()?;
//! let hello = |rank| Hello { purpose: "example".into(), rank: Rank(rank), generation: Generation(1) };
//! let deadline = Deadline::after(std::time::Duration::from_secs(5));
//! let (mut dialer, mut accepter) = UnixStream::pair()?;
//! let peer = std::thread::scope(|scope| {
//!     scope.spawn(|| handshake(&mut dialer, &secret, Side::Dialed, &hello(1), &deadline));
//!     handshake(&mut accepter, &secret, Side::Accepted, &hello(0), &deadline)
//! })?;
//! assert_eq!(peer.rank, Rank(1));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![forbid(unsafe_code)]

mod channel;
mod deadline;
mod doubts;
mod frame;
mod handshake;
mod ids;
#[cfg(test)]
mod pair;
mod pass;
mod reception;
mod secret;
mod strangers;
#[cfg_attr(not(feature = "tls"), path = "no_tls.rs")]
pub mod tls;

pub use channel::Channel;
pub use deadline::Deadline;
pub use doubts::Doubts;
pub use frame::{read_frame, why_no_frame, write_frame};
pub use handshake::{HandshakeError, Hello, Side, Socket, handshake, welcome};
pub use ids::{Generation, Rank};
pub use pass::Pass;
pub use reception::{Reception, receive};
pub use secret::{Secret, SecretError};
pub use strangers::Strangers;
