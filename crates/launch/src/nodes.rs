//! How an agent finds the other nodes of a run.

pub use phalanx_coord::Patience;
use phalanx_job::SecretSource;

/// A run of several nodes, as one of them sees it.
#[derive(Clone, Debug)]
pub struct Nodes {
    /// Where they meet: the host and the port of the coordinator.
    pub endpoint: (String, u16),
    /// The number of this node, where it is given one.
    pub node_rank: Option<u32>,
    /// Whether it stands by as long as there are enough others.
    pub spare: bool,
    /// Whether it hosts the coordinator, where that is said; else whoever listens at the endpoint first does.
    pub hosts: Option<bool>,
    /// The least number of nodes.
    pub least: u32,
    /// The largest.
    pub most: u32,
    /// How many more may stand by, in case that one is lost.
    pub spares: u32,
    /// How long what is waited for.
    pub patience: Patience,
    /// Where the secret is that all nodes share.
    pub secret: SecretSource,
    /// Where other nodes reach this one [default: the address from which it reaches the coordinator].
    pub address: Option<String>,
    /// The program as it was typed, by which nodes see that they belong together.
    pub program: String,
    /// Its arguments.
    pub arguments: Vec<String>,
    /// Whether it doesn't matter that the clocks of nodes differ.
    pub unchecked: bool,
}

impl Nodes {
    /// Whether the run is over for all of them once more are lost for good than stand by: no others come.
    pub(crate) fn need_each_other(&self) -> bool {
        self.least == self.most && self.patience.anew.is_some()
    }
}
