//! What every agent is told of its run, so that each could lead it if who does is lost.

use super::{Mishap, Node, Setback};
use phalanx_wire::{Generation, Rank};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;
use std::ops::Range;

/// A run of several nodes, as far as who leads it knows more than each node does of itself.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Standing {
    /// How many coordinators there were before this one.
    pub term: u32,
    /// Where they listened, the last of them last: should one go on after all, it is told who leads.
    pub former: Vec<SocketAddr>,
    /// Counts what is told in a term.
    pub version: u64,
    /// How long the run has lasted, in milliseconds.
    pub elapsed_ms: u64,
    /// The generation that runs, or comes next.
    pub generation: Generation,
    /// What is done with it.
    pub phase: Phase,
    /// Whether its workers go on without those that are lost.
    pub in_place: bool,
    /// The end of the ranks that its workers were started with.
    pub ranks: u32,
    /// Those of them that haven't come in yet, though the others have begun.
    pub coming: Vec<u32>,
    /// The newest membership of its workers, named by the rank that they were started with, in the order of their ranks.
    pub membership: Option<(Generation, Vec<Rank>)>,
    /// Whether some of its workers have ended in order to be started again later.
    pub drained: bool,
    /// How often workers were started again after a failure.
    pub restarts: u32,
    /// What that was for.
    pub setbacks: Vec<Setback>,
    /// The nodes, and those that stand by.
    pub nodes: Vec<NodeStanding>,
}

/// What is done with a generation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Phase {
    /// It is to begin.
    Gathering,
    /// It runs.
    Running,
    /// It is being stopped.
    Stopping {
        /// Why.
        why: StopWhy,
        /// What went wrong on which node, in order of time.
        failures: Vec<(u32, Setback)>,
        /// The nodes that were lost.
        lost: Vec<Setback>,
    },
}

/// Numbers from here on are of nodes that stand by, and no others: they are told apart by them, and tried after all others where
/// somebody has to lead the run.
pub const FIRST_SPARE: u32 = 1 << 31;

/// What is known of a node.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NodeStanding {
    /// What it said of itself.
    pub node: Node,
    /// Its number in the last generation that it was in; of one that stands by, one from [`FIRST_SPARE`] on.
    pub number: Option<u32>,
    /// The ranks that its workers were started with in that.
    pub seats: Range<u32>,
    /// What these do.
    pub stage: Stage,
    /// Whether it goes as soon as its workers have ended.
    pub leaves: bool,
}

/// What a node's workers do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Stage {
    /// There are none.
    Ready,
    /// They run, or are being stopped.
    Running,
    /// All of this generation have ended well.
    Done,
}

/// Why a generation is stopped.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum StopWhy {
    /// A worker failed on this node.
    Failed(Setback),
    /// This node was lost.
    Lost(Setback),
    /// This node has come.
    Joined(String),
    /// This one leaves.
    Left(String),
    /// This one hasn't heard of it.
    Missed(String),
    /// This one was asked, by the signal of that number, to end the run.
    Asked(String, i32),
    /// So many nodes are left, which is less than half: so many fell silent, and may go on without these.
    CutOff(u32, u32),
    /// This node is led by another coordinator, which took this one for lost.
    Deposed(String),
    /// The run is led from there by now, in that term.
    Elsewhere(SocketAddr, u32),
}

impl Standing {
    /// Whether it was told after the other.
    pub fn is_newer(&self, other: &Standing) -> bool {
        (self.term, self.version) > (other.term, other.version)
    }

    /// The node that leads it, if that is one of them.
    pub fn leader(&self) -> Option<&NodeStanding> {
        self.nodes.iter().find(|node| node.node.leads)
    }

    /// The node whose agent listens there.
    pub fn at(&self, standby: SocketAddr) -> Option<&NodeStanding> {
        self.nodes.iter().find(|node| node.node.standby == standby)
    }

    /// The nodes that have a number, by that, with where their agents listen.
    pub fn numbered(&self) -> BTreeMap<u32, SocketAddr> {
        self.nodes.iter().filter_map(|node| Some((node.number?, node.node.standby))).collect()
    }
}

impl StopWhy {
    /// The number of the signal that asked for it, if one did.
    pub fn signal(&self) -> Option<i32> {
        match self {
            StopWhy::Asked(_, signal) => Some(*signal),
            _ => None,
        }
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
            StopWhy::Missed(host) => write!(f, "node {host} missed their start"),
            StopWhy::Asked(host, signal) => {
                write!(f, "node {host} was asked by signal {signal} to end the run")
            }
            StopWhy::CutOff(here, silent) => {
                write!(f, "{here} of {} nodes are left, the others fell silent", here + silent)
            }
            StopWhy::Deposed(host) => {
                write!(f, "node {host} took this coordinator for lost, and goes on with another")
            }
            StopWhy::Elsewhere(address, _) => write!(f, "the run goes on elsewhere, led from {address}"),
        }
    }
}
