//! What a test and its processes say to each other: a line of JSON each.

use phalanx_comm::{Generation, PeerAddress, Rank};
use serde::{Deserialize, Serialize};

/// The environment variable that makes a process of the test binary, and says over what.
pub(crate) const CHILD: &str = "PHALANX_COMM_TEST_PROCESS";
/// Stands before what a process says.
pub(crate) const MARK: &str = "@said ";

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) enum Transport {
    /// Shared memory, and TCP to those who have none.
    Memory,
    Tcp,
}

/// To a process.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Order {
    /// Make an endpoint and say where.
    Listen,
    /// Become a rank of a group and play.
    Join { rank: Rank, generation: Generation, peers: Vec<PeerAddress> },
    /// Go on with the ranks that are left of the last group, and play.
    Rebuild { survivors: Vec<Rank>, generation: Generation },
    /// Have all ranks come to the end of the play.
    Rest,
    /// Abort the group, from another thread.
    Abort,
    /// Cut the connection to a rank, if this process made it.
    Cut(usize),
}

/// From a process.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Said {
    Here(PeerAddress),
    Playing,
    Failed(Blame),
    /// The play came to its end.
    Resting,
    /// A sum wasn't right, or an order couldn't be carried out.
    Wrong(String),
}

/// Whom an error blames, as the processes are numbered.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Blame {
    pub(crate) lost: Option<usize>,
    pub(crate) ended_by: Option<usize>,
    pub(crate) silent: Option<usize>,
    pub(crate) text: String,
}
