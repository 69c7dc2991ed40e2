//! What can go wrong.

use crate::journal::JournalError;
use crate::message::NODE_PURPOSE;
use phalanx_wire::HandshakeError;
use std::net::SocketAddr;
use thiserror::Error;

/// Why a pool, or somebody who talks to one, can't go on.
#[derive(Debug, Error)]
pub enum Error {
    /// It can't listen.
    #[error(
        "a pool can't listen at {address}: {source}\nhint: another may be there already (phalanx pool show), or choose another place with --listen"
    )]
    Listen {
        /// Where.
        address: SocketAddr,
        /// What the system said.
        source: std::io::Error,
    },
    /// Nobody is there.
    #[error(
        "no pool answers at {address}: {reason}\nhint: phalanx pool serve starts one; --pool ADDRESS or PHALANX_POOL says where it is"
    )]
    Unreachable {
        /// Where.
        address: SocketAddr,
        /// What the system said.
        reason: String,
    },
    /// It proved something else.
    #[error("the pool at {address}: {source}{}", hint(source))]
    Handshake {
        /// Where.
        address: SocketAddr,
        /// What was wrong.
        source: Box<HandshakeError>,
    },
    /// It hung up.
    #[error("the connection to the pool at {address} broke: {reason}")]
    Broken {
        /// Where.
        address: SocketAddr,
        /// How.
        reason: String,
    },
    /// It doesn't take this node.
    #[error("the pool doesn't take this node: {reason}")]
    Refused {
        /// Why.
        reason: String,
    },
    /// What mustn't be forgotten can't be kept.
    #[error(transparent)]
    Journal(#[from] JournalError),
    /// A job is in a queue that isn't one.
    #[error(
        "job {job} is in queue {queue}, which isn't one of the queues any more\nhint: leave it among them until its jobs have ended"
    )]
    Stray {
        /// Which.
        job: crate::JobId,
        /// Where it is.
        queue: String,
    },
    /// The system refused something else.
    #[error("{what}: {source}")]
    System {
        /// What was wanted.
        what: &'static str,
        /// What the system said.
        source: std::io::Error,
    },
}

fn hint(source: &HandshakeError) -> &'static str {
    match source {
        HandshakeError::WrongSecret => {
            "\nhint: --secret-file, or PHALANX_SECRET_FILE, names a file that the pool, its nodes and whoever asks have alike"
        }
        HandshakeError::Disagreement { theirs, .. } if theirs.purpose != NODE_PURPOSE => {
            "\nhint: is it a pool, of the same version as this?"
        }
        _ => "",
    }
}
