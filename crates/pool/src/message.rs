//! What is said to the pool, and what it says, one JSON value a frame: nodes over a connection that lasts, others a question at a
//! time.

use crate::job::{AgentId, End, Ending, JobId, JobSpec};
use crate::queues::Queue;
use crate::schedule::Why;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

/// What the connection of a node says it is for.
pub(crate) const NODE_PURPOSE: &str = concat!("pool node ", env!("CARGO_PKG_VERSION"));
/// What the connection of somebody who asks says it is for.
pub(crate) const ASKER_PURPOSE: &str = concat!("pool asker ", env!("CARGO_PKG_VERSION"));
/// The longest message to a pool: what a node has running, or a job.
pub(crate) const MAX_FRAME: usize = 1 << 20;
/// The longest of a pool: how all jobs are.
pub(crate) const MAX_ANSWER: usize = 64 << 20;
/// How often a node and the pool give each other a sign of life.
pub(crate) const BEAT: Duration = Duration::from_secs(1);
/// How long either may give none.
pub(crate) const SILENCE: Duration = Duration::from_secs(10);

/// From a node.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "say", rename_all = "snake_case", deny_unknown_fields)]
pub(crate) enum FromNode {
    /// It is there. The first message.
    Here(Here),
    /// It is alive.
    Beat,
    /// An agent has been started.
    Began {
        /// Which.
        id: AgentId,
        /// Where the others of its run meet it.
        endpoint: String,
    },
    /// An agent has ended. It is said again until it is noted.
    Ended(Ended),
    /// It takes no more agents, and stops those that it has.
    Leaves,
}

/// What a node says of itself.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Here {
    pub(crate) name: String,
    /// Which process it is: agents end with it.
    pub(crate) process: String,
    /// Where others reach its agents.
    pub(crate) address: String,
    pub(crate) slots: u32,
    /// Whether it takes no more agents, and stops those that it has.
    pub(crate) leaves: bool,
    pub(crate) running: Vec<Running>,
    pub(crate) ended: Vec<Ended>,
}

/// An agent that runs on a node.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Running {
    pub(crate) id: AgentId,
    pub(crate) slots: Vec<u32>,
    pub(crate) endpoint: String,
    /// Whether it was asked to stop.
    pub(crate) stops: bool,
}

/// The end of an agent.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Ended {
    pub(crate) id: AgentId,
    /// As a shell has it; none where it couldn't be started.
    pub(crate) code: Option<i32>,
    /// What went wrong, where a code doesn't say it.
    pub(crate) words: Option<String>,
    /// Whether it was asked to.
    pub(crate) stops: bool,
}

/// To a node.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "say", rename_all = "snake_case", deny_unknown_fields)]
pub(crate) enum ToNode {
    /// It can't be taken.
    Refused {
        /// Why.
        reason: String,
    },
    /// The pool is alive.
    Beat,
    /// An agent is to be started.
    Start(Box<Start>),
    /// One is to be stopped.
    Stop {
        /// Which.
        id: AgentId,
        /// How.
        ending: Ending,
    },
    /// The end of one is known for good.
    Noted {
        /// Which.
        id: AgentId,
    },
}

/// An agent that is to be started.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Start {
    /// What it is called.
    pub id: AgentId,
    /// The node's slots that are its own.
    pub slots: Vec<u32>,
    /// What it is part of.
    pub spec: JobSpec,
    /// Where its run meets; none for the first, which is met.
    pub endpoint: Option<String>,
}

/// What somebody asks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "ask", rename_all = "snake_case", deny_unknown_fields)]
pub enum Ask {
    /// To have this run.
    Submit(Box<JobSpec>),
    /// How all is.
    Show {
        /// Of jobs this one alone, if there is one.
        job: Option<JobId>,
    },
    /// To have a job ended.
    Cancel {
        /// Which.
        job: JobId,
    },
}

/// What is answered.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "answer", rename_all = "snake_case", deny_unknown_fields)]
pub enum Answer {
    /// It has this number, and is written down.
    Submitted {
        /// Which.
        job: JobId,
    },
    /// That is how all is.
    Shown(Box<Shown>),
    /// It ends.
    Canceled {
        /// How it had ended before that, if it had.
        before: Option<End>,
    },
    /// It can't be done.
    Refused {
        /// Why.
        reason: String,
    },
}

/// How a pool is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Shown {
    /// By name; none where one job was asked for.
    pub queues: Vec<ShownQueue>,
    /// By name; none where one job was asked for.
    pub nodes: Vec<ShownNode>,
    /// By number, those that ended not long ago too.
    pub jobs: Vec<ShownJob>,
}

/// How a queue is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ShownQueue {
    /// What it is called.
    pub name: String,
    /// What it may hold.
    #[serde(flatten)]
    pub queue: Queue,
    /// What would be fair, in slots.
    pub share: u32,
    /// What it holds.
    pub used: u32,
}

/// How a node is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ShownNode {
    /// What it is called.
    pub name: String,
    /// Where others reach it.
    pub address: String,
    /// What it has.
    pub slots: u32,
    /// What of that is taken.
    pub used: u32,
    /// Whether it can be given anything.
    pub is_there: bool,
}

/// How a job is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ShownJob {
    /// Its number.
    pub job: JobId,
    /// What people call it.
    pub name: String,
    /// The queue it is in.
    pub queue: String,
    /// Its priority there.
    pub priority: i32,
    /// The fewest and the most agents.
    pub agents: (u32, u32),
    /// The slots of each.
    pub workers: u32,
    /// When it came, in milliseconds since 1970.
    pub submitted_ms: u64,
    /// How often it has begun.
    pub attempts: u32,
    /// Where it keeps its files.
    pub out: String,
    /// How it is.
    pub state: ShownState,
}

/// How a job is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "state", rename_all = "snake_case", deny_unknown_fields)]
pub enum ShownState {
    /// It waits.
    Waits {
        /// For what.
        why: Why,
    },
    /// It runs.
    Runs {
        /// The node of each of its agents.
        nodes: Vec<String>,
    },
    /// It is being stopped.
    Ends {
        /// The nodes of those that are left.
        nodes: Vec<String>,
    },
    /// It has ended.
    Ended {
        /// How.
        how: End,
    },
}

impl fmt::Display for ShownState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ShownState::Waits { why } => write!(f, "waits: {why}"),
            ShownState::Runs { nodes } => write!(f, "runs on {}", counted(nodes)),
            ShownState::Ends { nodes } if nodes.is_empty() => f.write_str("is being stopped"),
            ShownState::Ends { nodes } => write!(f, "is being stopped on {}", counted(nodes)),
            ShownState::Ended { how } => write!(f, "has ended: {how}"),
        }
    }
}

/// Nodes, each once, with how many agents are on it: `a, b x3`.
pub(crate) fn counted(nodes: &[String]) -> String {
    let mut counts: BTreeMap<&String, u32> = BTreeMap::new();
    nodes.iter().for_each(|node| *counts.entry(node).or_default() += 1);
    let one = |(node, n): (&&String, &u32)| if *n == 1 { node.to_string() } else { format!("{node} x{n}") };
    counts.iter().map(one).collect::<Vec<String>>().join(", ")
}
