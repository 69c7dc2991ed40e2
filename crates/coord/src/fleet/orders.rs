//! What a fleet decides, and how its reasons are told.

use super::NodeId;
use phalanx_job::{End, Seat, StopWhy};
use phalanx_wire::{Generation, Rank};
use std::collections::BTreeSet;
use std::fmt;
use std::net::SocketAddr;
use std::ops::Range;
use std::time::Duration;

/// What is to be done.
#[derive(Clone, Debug, PartialEq)]
pub enum Order {
    /// Tell a node that it isn't taken.
    Refuse(NodeId, String),
    /// Tell a node that the others have gone on without it.
    GoneOn(NodeId),
    /// Tell all nodes something that people should know.
    Warn(String),
    /// Tell all nodes what is waited for.
    Wait(Wait),
    /// Start a generation.
    Begin(Generation, Vec<(NodeId, Seat)>),
    /// Take a node that has come into the generation that runs.
    Enlarge(Generation, NodeId, Seat),
    /// Have a node start another worker in the place of the one that was started with this rank, as the restart of that number.
    Replace(Generation, NodeId, Rank, u32),
    /// Have a node that leaves end its workers of this generation, without which the others go on.
    Release(Generation, NodeId),
    /// Tell a node that what it was led in is not known here.
    Estrange(NodeId),
    /// Tell these nodes that the run is led from there.
    Elsewhere(Vec<NodeId>, SocketAddr),
    /// Tell a node that leaves that it has left.
    Farewell(NodeId),
    /// Wait no longer for workers that were started with these ranks: their node has left, or was lost, or starts
    /// no other in the place of one.
    DoWithout(Generation, Range<u32>),
    /// The same while all are to end because of that: whoever has something of the run goes on without them until it does.
    PartFrom(Generation, Range<u32>),
    /// Have these nodes stop their workers of this generation.
    Stop(Generation, Vec<NodeId>, StopWhy),
    /// Give up a node that gives no sign of life, or has said what makes no sense.
    Drop(NodeId),
    /// A worker that was started with this rank has ended: wait for it no longer.
    Forget(Generation, Rank),
    /// Serve the workers of a generation that another coordinator has left.
    Resume(Generation, Left),
    /// Tell these nodes that the run is over. It is the last decision.
    End(Vec<NodeId>, End),
}

/// The workers that a coordinator has left.
#[derive(Clone, Debug, PartialEq)]
pub struct Left {
    /// Their newest membership, if there was one: workers in the order of their ranks.
    pub membership: Option<(Generation, Vec<Rank>)>,
    /// The ranks that workers were started with.
    pub seats: BTreeSet<u32>,
    /// Those of them whose workers run.
    pub live: BTreeSet<u32>,
    /// Whether they go on without those that are lost.
    pub in_place: bool,
}

/// What is waited for before a generation begins.
#[derive(Clone, Debug, PartialEq)]
pub struct Wait {
    /// The names of the nodes that are there.
    pub here: Vec<String>,
    /// The least number of nodes.
    pub least: u32,
    /// The largest.
    pub most: u32,
    /// How long it will last at most.
    pub left: Duration,
}

impl fmt::Display for Wait {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Wait { here, least, most, left } = self;
        let wanted = if least == most { most.to_string() } else { format!("{least} to {most}") };
        let follows = if here.len() < *least as usize { "giving up" } else { "beginning without others" };
        let seconds = left.as_secs_f64();
        write!(f, "nodes here: {} of {wanted} ({}); {follows} in {seconds:.0} s", here.len(), here.join(", "))
    }
}
