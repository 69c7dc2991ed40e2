//! What a fleet decides, and how its reasons are told.

use super::NodeId;
use phalanx_job::{End, Mishap, Seat, Setback};
use phalanx_wire::{Generation, Rank};
use std::fmt;
use std::ops::Range;
use std::time::Duration;

/// What is to be done.
#[derive(Clone, Debug, PartialEq)]
pub enum Order {
    /// Tell a node that it isn't taken.
    Refuse(NodeId, String),
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
    /// Wait no longer for workers that were started with these ranks: their node has left, or was lost.
    DoWithout(Generation, Range<u32>),
    /// Have these nodes stop their workers of this generation.
    Stop(Generation, Vec<NodeId>, StopWhy),
    /// Give up a node that gives no sign of life, or has said what makes no sense.
    Drop(NodeId),
    /// Tell these nodes that the run is over. It is the last decision.
    End(Vec<NodeId>, End),
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

/// Why a generation is stopped.
#[derive(Clone, Debug, PartialEq)]
pub enum StopWhy {
    /// A worker failed on this node.
    Failed(Setback),
    /// This node was lost.
    Lost(Setback),
    /// This node has come.
    Joined(String),
    /// This one leaves.
    Left(String),
    /// This one was asked, by the signal of that number, to end the run.
    Asked(String, i32),
}

impl StopWhy {
    /// The number of the signal that asked for it, if one did.
    pub fn signal(&self) -> Option<i32> {
        match self {
            StopWhy::Asked(_, signal) => Some(*signal),
            StopWhy::Failed(_) | StopWhy::Lost(_) | StopWhy::Joined(_) | StopWhy::Left(_) => None,
        }
    }
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

impl fmt::Display for StopWhy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            StopWhy::Failed(setback) | StopWhy::Lost(setback) => {
                write!(f, "on node {} ({}): ", setback.node, setback.host)?;
                match &setback.what {
                    Mishap::Worker(failure) => write!(f, "rank {} {}", failure.rank, failure.how),
                    Mishap::Lost(how) => write!(f, "lost: {how}"),
                }
            }
            StopWhy::Joined(host) => write!(f, "node {host} has come"),
            StopWhy::Left(host) => write!(f, "node {host} leaves"),
            StopWhy::Asked(host, signal) => {
                write!(f, "node {host} was asked by signal {signal} to end the run")
            }
        }
    }
}
