//! What can go wrong between a worker and its run.

use phalanx_wire::{HandshakeError, SecretError};
use std::net::SocketAddr;
use std::path::PathBuf;
use thiserror::Error;

/// Why a worker doesn't find its place.
#[derive(Debug, Error)]
pub enum Error {
    /// A variable of the environment makes no sense.
    #[error("the environment variable {name} is {value:?}: {want}")]
    Variable {
        /// Which.
        name: &'static str,
        /// What it holds; empty if it isn't set.
        value: String,
        /// What it should be.
        want: String,
    },
    /// There is no secret.
    #[error(transparent)]
    Secret(#[from] SecretError),
    /// Nobody told where a secret could be.
    #[error(
        "no secret to prove oneself with: neither HOME nor XDG_CONFIG_HOME says where one is kept\nhint: set one of them, or PHALANX_SECRET_FILE (--secret-file) to a file that all nodes and ranks can read"
    )]
    NoSecret,
    /// The coordinator can't be reached.
    #[error("the coordinator at {address} can't be reached: {reason}")]
    Unreachable {
        /// Where it should be.
        address: String,
        /// What the system said.
        reason: String,
    },
    /// Nobody listens where the coordinator should be.
    #[error("the coordinator at {address} can't be reached: nobody listens there")]
    NobodyListens {
        /// Where it should be.
        address: SocketAddr,
    },
    /// The coordinator, or who poses as it, was refused.
    #[error("the coordinator at {address}: {source}")]
    Handshake {
        /// Where it is.
        address: SocketAddr,
        /// Why it was refused.
        source: HandshakeError,
    },
    /// Something else listens where the coordinator should.
    #[error(
        "port {port} of {ip} is in use by something that isn't phalanx\nhint: choose another port, the same on all nodes, or see there who has it: ss -ltnp 'sport = :{port}'",
        ip = address.ip(), port = address.port()
    )]
    NotOurs {
        /// Where.
        address: SocketAddr,
    },
    /// A run with another secret is there.
    #[error(
        "the coordinator at {address} has another secret, or is that of another run\nhint: give all nodes of a run the same --rdzv-id and the same --secret-file, or let them share the user's folder"
    )]
    OtherSecret {
        /// Where.
        address: SocketAddr,
    },
    /// The coordinator is of another version.
    #[error(
        "the coordinator at {address} speaks `{theirs}`, this agent `{ours}`\nhint: use the same version of phalanx on all nodes"
    )]
    OtherVersion {
        /// Where.
        address: SocketAddr,
        /// What it speaks.
        theirs: String,
        /// What this end speaks.
        ours: String,
    },
    /// The coordinator closed the connection or spoke nonsense.
    #[error("the coordinator at {address}: {reason}")]
    Broken {
        /// Where it is.
        address: SocketAddr,
        /// What happened.
        reason: String,
    },
    /// The others took this agent's node for lost, and have gone on without it.
    #[error("the coordinator at {address}: the others have gone on without this node")]
    GivenUp {
        /// Where they are led from.
        address: SocketAddr,
    },
    /// The coordinator doesn't take this worker.
    #[error("the coordinator at {address} refused this worker: {reason}")]
    Refused {
        /// Where it is.
        address: SocketAddr,
        /// Why.
        reason: String,
    },
    /// Not all ranks came in time.
    #[error("after {seconds:.0} s {} still missing: {}", if .missing.len() == 1 { "a rank is" } else { "ranks are" }, .missing.iter().map(u32::to_string).collect::<Vec<_>>().join(", "))]
    Missing {
        /// How long they were waited for.
        seconds: f64,
        /// Which didn't come.
        missing: Vec<u32>,
    },
    /// Something of the run directory can't be made.
    #[error("{path}: can't be made: {source}\nhint: give a folder that can be written to with --out", path = path.display())]
    RunDir {
        /// The file or folder.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// Another process writes to the run directory.
    #[error("{path}: another run is writing to it\nhint: end that run, or name another folder with --out", path = path.display())]
    Taken {
        /// The run directory.
        path: PathBuf,
    },
    /// A file that can't be read.
    #[error("{path}: {source}", path = path.display())]
    Io {
        /// Which file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
}
