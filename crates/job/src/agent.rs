//! What an agent and the coordinator say to each other in a run of several nodes, one JSON value a frame.
//!
//! An agent comes with what it knows of its node, is told which workers to start, tells how they ended, and is told what
//! follows, until the run is over. Both ends beat, so each finds out when the other is silent. What follows from what is
//! decided by the coordinator alone. It tells all agents how the run stands, so that one of them can take its place.

mod link;
mod standing;

pub use link::{AGENT_BEAT, AgentLink, MAX_AGENT_FRAME};
pub use standing::{FIRST_SPARE, NodeStanding, Phase, Stage, Standing, StopWhy};

use crate::drain::DRAINED;
use crate::message::Notice;
use phalanx_wire::{Generation, Rank};
use serde::{Deserialize, Serialize};
use std::net::SocketAddr;

/// What the handshake of an agent's connection says it is for: the version too, so that agents of two versions are told at once.
pub const AGENT_PURPOSE: &str = concat!("agent ", env!("CARGO_PKG_VERSION"));

/// From an agent.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "say", rename_all = "snake_case", deny_unknown_fields)]
pub enum FromAgent {
    /// It is there and could start workers. The first message.
    Join(Node),
    /// It was led by a coordinator that is gone. The first message to the next.
    Return(Box<Return>),
    /// It is alive.
    Beat,
    /// It is led by another coordinator from now on.
    Moved {
        /// From there, after so many coordinators, where that goes on with the run.
        to: Option<(SocketAddr, u32)>,
    },
    /// The run is led from there. The only message of who leads it, to where nodes that come look for the first.
    Elsewhere {
        /// Where.
        address: SocketAddr,
        /// How many coordinators there were before that one.
        term: u32,
    },
    /// A worker has ended well.
    Finished {
        /// In which generation.
        generation: Generation,
        /// The rank that it was started with.
        rank: Rank,
    },
    /// A worker has failed, and the agent stops its others; that all of them have ended is said later.
    Failed {
        /// In which generation.
        generation: Generation,
        /// What is known of it by now.
        failure: WorkerFailure,
    },
    /// A worker has failed, and its others go on without it: another may take its place.
    Lost {
        /// In which generation.
        generation: Generation,
        /// What is known of it.
        failure: WorkerFailure,
    },
    /// No other is started in the place of a worker that was lost, since its device is at fault or the workers of this node are to end:
    /// the others go on without it, or don't wait for it until they end.
    GivenUp {
        /// In which generation.
        generation: Generation,
        /// The rank that it was started with.
        rank: Rank,
    },
    /// All of its workers have ended.
    Ended {
        /// In which generation.
        generation: Generation,
        /// What went wrong first on this node, if anything did.
        failure: Option<WorkerFailure>,
        /// Whether one of them has ended in order to be started again later.
        drained: bool,
        /// A port that is free for the program in the next generation.
        port: u16,
    },
    /// Its node is taken away: the run may go on without.
    Leave {
        /// The number of the signal that said so.
        signal: i32,
    },
    /// The run is to end.
    Quit {
        /// The number of the signal that said so.
        signal: i32,
    },
}

/// To an agent.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "say", rename_all = "snake_case", deny_unknown_fields)]
pub enum ToAgent {
    /// The node can't be taken.
    Refused {
        /// Why.
        reason: String,
    },
    /// The others took its node for lost, and have gone on without it. It may come anew.
    GoneOn,
    /// What was led before is not known here.
    Stranger,
    /// The coordinator is alive.
    Beat,
    /// How the run stands, in case that this agent is to lead it.
    Standing(Box<Standing>),
    /// Something that people should know.
    Told {
        /// In words.
        words: String,
    },
    /// The run is led from there, where this agent is to come instead.
    Elsewhere {
        /// Where.
        address: SocketAddr,
    },
    /// Workers are to be started.
    Begin(Seat),
    /// They are to be stopped.
    Stop {
        /// Those of this generation.
        generation: Generation,
        /// Why, in words.
        why: String,
        /// The signal that asked for the end of the run, if one did: the workers are sent the same.
        signal: Option<i32>,
    },
    /// All workers of the node are to be ended at once, since it leaves while the others go on.
    Release {
        /// Those of this generation.
        generation: Generation,
    },
    /// The node that leaves has left.
    Farewell,
    /// Another worker is to be started in the place of one that was lost.
    Replace {
        /// In which generation.
        generation: Generation,
        /// The rank that it was started with.
        rank: Rank,
        /// How often workers were started again after a failure by now.
        restarts: u32,
    },
    /// What there is to know of the workers.
    Notice {
        /// In which generation.
        generation: Generation,
        /// What.
        notice: Notice,
    },
    /// The run is over.
    End(End),
}

/// What an agent says that comes back to its run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Return {
    /// The number of its node.
    pub number: u32,
    /// Where its agent listens: a number may become another's.
    pub standby: SocketAddr,
    /// The last generation that it has heard of.
    pub generation: Generation,
    /// The ranks that those of its workers were started with that run.
    pub workers: Vec<Rank>,
    /// How the run stood when it heard of that last.
    pub standing: Standing,
}

impl Return {
    /// Whether its node stood by when it heard of that last.
    pub fn stood_by(&self) -> bool {
        self.number >= FIRST_SPARE
    }

    /// What such a node said of itself as it came: it can come anew with that, whatever it hasn't heard.
    pub fn newcomer(&self) -> Option<&Node> {
        self.standing.at(self.standby).filter(|_| self.stood_by()).map(|known| &known.node)
    }
}

/// What an agent says of its node.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Node {
    /// What people call it.
    pub host: String,
    /// Where other nodes reach its programs.
    pub address: String,
    /// A port that is free there.
    pub port: u16,
    /// Where its agent listens, should it have to lead the run.
    pub standby: SocketAddr,
    /// Whether it leads the run.
    pub leads: bool,
    /// How many workers it starts.
    pub workers: u32,
    /// Their role.
    pub role: String,
    /// The number that it was given among the nodes, if it was given one.
    pub node_rank: Option<u32>,
    /// Whether others come first, as long as there are enough.
    pub spare: bool,
    /// What it takes the run to be.
    pub terms: Terms,
    /// Its wall clock, in milliseconds since 1970; none where it doesn't matter how that goes.
    pub clock_ms: Option<u64>,
}

/// What all nodes of a run have to agree in.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Terms {
    /// The least number of nodes.
    pub least: u32,
    /// The largest.
    pub most: u32,
    /// How many more may stand by, in case that one is lost.
    pub spares: u32,
    /// How often the workers are started again after a failure.
    pub max_restarts: u32,
    /// The program, without the folder that it lies in.
    pub program: String,
    /// Its arguments; nodes may differ in these.
    pub arguments: Vec<String>,
}

/// A node's place in a generation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Seat {
    /// Which generation.
    pub generation: Generation,
    /// How often workers were started again after a failure.
    pub restarts: u32,
    /// The node's number.
    pub node: u32,
    /// How many nodes there are.
    pub nodes: u32,
    /// The rank of its first worker; the others follow.
    pub first_rank: u32,
    /// How many workers there are on all nodes.
    pub world_size: u32,
    /// The number of its first worker among those of its role; the others follow.
    pub first_role_rank: u32,
    /// How many workers of its role there are.
    pub role_world_size: u32,
    /// Where the program may listen: host and port, on the node of rank 0.
    pub master: (String, u16),
}

impl Seat {
    /// That of the only node of a run.
    pub fn alone(generation: Generation, workers: u32, master: (String, u16)) -> Seat {
        Seat {
            generation,
            restarts: 0,
            node: 0,
            nodes: 1,
            first_rank: 0,
            world_size: workers,
            first_role_rank: 0,
            role_world_size: workers,
            master,
        }
    }
}

/// How a worker failed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WorkerFailure {
    /// Which.
    pub rank: Rank,
    /// Its process id.
    pub pid: i32,
    /// "exited with code 3" or "was killed by SIGKILL".
    pub how: String,
    /// For how long it had been of no use by then, in milliseconds: one that hangs is killed later.
    pub idle_ms: u64,
    /// What it said to the coordinator, if it did.
    pub reported: Option<String>,
    /// The last lines it wrote.
    pub last_lines: Vec<String>,
    /// Whether another in its place would come to the same.
    pub for_good: bool,
    /// Whether it said that it only followed another.
    pub consequence: bool,
    /// Whether it could not go on since a part of the run was lost with another before ([`Cause::PartLost`](crate::Cause::PartLost)).
    pub part_lost: bool,
    /// Whether its agent was stopping its workers by then.
    pub after_stop: bool,
}

/// What went wrong first in a generation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Setback {
    /// Which generation.
    pub generation: Generation,
    /// The number of the node.
    pub node: u32,
    /// Its name.
    pub host: String,
    /// How long after the run began, in milliseconds.
    pub after_ms: u64,
    /// What happened there.
    pub what: Mishap,
}

impl Setback {
    /// Whether a worker failed that was being stopped.
    pub fn is_after_stop(&self) -> bool {
        matches!(&self.what, Mishap::Worker(failure) if failure.after_stop)
    }

    /// Whether workers that are started again would come to the same.
    pub fn is_for_good(&self) -> bool {
        matches!(&self.what, Mishap::Worker(failure) if failure.for_good)
    }

    /// Whether a node was lost.
    pub fn is_of_a_node(&self) -> bool {
        matches!(self.what, Mishap::Lost(_))
    }

    /// Whether workers couldn't go on without what was lost with another before.
    pub fn is_of_a_lost_part(&self) -> bool {
        matches!(&self.what, Mishap::Worker(failure) if failure.part_lost)
    }
}

/// What can happen to a node.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Mishap {
    /// One of its workers failed.
    Worker(WorkerFailure),
    /// It was lost, and this is how that was seen.
    Lost(String),
}

/// How a run ended.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct End {
    /// Why.
    pub why: EndWhy,
    /// How often workers were started again after a failure. Those that were lost at once are one.
    pub restarts: u32,
    /// What that was for, in order.
    pub setbacks: Vec<Setback>,
}

/// Why a run is over.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum EndWhy {
    /// All workers ended well.
    Done,
    /// Workers ended before their work was done, and want to be started again later.
    Drained,
    /// This signal asked one of the nodes for it.
    Asked {
        /// Its number.
        signal: i32,
    },
    /// Something went wrong, and no restart is left.
    Failed(Setback),
    /// Too few nodes are left, and no others come: the run can go on where it is started again.
    NodesLost {
        /// How many are left.
        here: u32,
        /// How one was lost, where they haven't all left by themselves.
        lost: Option<Setback>,
    },
    /// The nodes that were left were less than half, and the others may go on without them.
    CutOff {
        /// How many were left.
        here: u32,
        /// How many fell silent.
        silent: u32,
    },
    /// Others took this coordinator for lost, and go on under another.
    Deposed,
    /// There were too few nodes for too long.
    TooFew {
        /// How many there were.
        here: u32,
        /// How long they waited for others, in seconds.
        seconds: u64,
    },
}

impl End {
    /// For the shell: 0, 1, 75 if it is to be started again, or 128 and the number of the signal.
    pub fn exit_code(&self) -> i32 {
        match self.why {
            EndWhy::Done => 0,
            EndWhy::Drained | EndWhy::NodesLost { .. } => DRAINED.into(),
            EndWhy::Asked { signal } => 128 + signal,
            EndWhy::Failed(_) | EndWhy::TooFew { .. } | EndWhy::CutOff { .. } | EndWhy::Deposed => 1,
        }
    }
}
