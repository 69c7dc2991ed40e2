//! What the caller of [`crate::run`] is told.

use crate::restart::EndReason;
use phalanx_wire::{Generation, Rank};
use std::fmt;
use std::time::Duration;

/// What the caller may want to show.
#[derive(Clone, Debug)]
pub enum Report {
    /// All workers were started.
    Started {
        /// Their process ids, by rank.
        pids: Vec<i32>,
    },
    /// A worker has failed and the others are being stopped.
    Stopping {
        /// Which has failed.
        rank: Rank,
    },
    /// All workers have ended after a failure, and are started again.
    Restarting {
        /// What went wrong first.
        failure: Failure,
        /// Which restart this is, from 1.
        restart: usize,
    },
    /// A worker has failed, the others go on, and another is started in its place.
    Replacing {
        /// What went wrong.
        failure: Failure,
        /// Which restart this is, from 1.
        restart: usize,
    },
    /// A worker has failed, and no other is started in its place: none could be, or its device is at fault.
    NotReplaced {
        /// Which.
        rank: Rank,
        /// Why.
        error: String,
        /// How many of this machine go on, or may come in the place of others that were lost.
        left: usize,
    },
    /// A worker gives no sign of life to the others, and is killed.
    Silent {
        /// Which.
        rank: Rank,
    },
    /// A worker hangs: where it does is written down, and then it is killed.
    Hung {
        /// Which.
        rank: Rank,
        /// How that was seen, in words.
        why: String,
    },
    /// All workers of this machine wait for other ranks, for longer than their limits, so none of them is to blame.
    AllWait {
        /// For how long, at least.
        long: Duration,
    },
    /// Something that who leads the nodes of the run wants people to know.
    Told {
        /// In words.
        words: String,
    },
    /// The workers of this node are stopped because of something elsewhere.
    Ordered {
        /// Why, in words.
        why: String,
    },
    /// A signal is passed on to the workers.
    Signalled {
        /// Its name.
        signal: &'static str,
        /// Whether they have had it already, from who leads the nodes of the run.
        is_known: bool,
    },
    /// The grace period is over and workers are still there.
    Killing {
        /// Which.
        ranks: Vec<Rank>,
    },
}

/// How a run ended.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// For the shell: 0, 1, 75 if it is to be started again later, or 128 and the number of the signal that ended it.
    pub exit_code: i32,
    /// What went wrong first in the last generation, if anything did.
    pub failure: Option<Failure>,
    /// How many restarts the run has used. Workers that were lost at once are one.
    pub restarts: usize,
    /// What went wrong each time that workers were started again, one or all.
    pub setbacks: Vec<Failure>,
    /// Why the run ended here.
    pub reason: EndReason,
    /// How long the run took.
    pub lasted: Duration,
}

/// What ended a run, or a generation of it.
#[derive(Clone, Debug)]
pub struct Failure {
    /// Which folder of the logs is that generation's.
    pub folder: Generation,
    /// Whose it is.
    pub who: Who,
    /// "exited with code 3" or "was killed by SIGKILL".
    pub how: String,
    /// How long after the start of the run.
    pub after: Duration,
    /// What it told the coordinator, if it came to that.
    pub reported: Option<String>,
    /// The last lines it wrote to standard error, or to standard output if there were none.
    pub last_lines: Vec<String>,
}

/// Who can fail.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Who {
    /// A worker.
    Worker {
        /// Which.
        rank: Rank,
        /// Its process id.
        pid: i32,
        /// The node that it was on, where there are several.
        node: Option<String>,
    },
    /// A node with all that was on it.
    Node(String),
}

impl Who {
    /// The worker's rank, if it was one.
    pub fn rank(&self) -> Option<Rank> {
        match self {
            Who::Worker { rank, .. } => Some(*rank),
            Who::Node(_) => None,
        }
    }
}

impl fmt::Display for Who {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Who::Worker { rank, pid, node: None } => write!(f, "rank {rank} (pid {pid})"),
            Who::Worker { rank, pid, node: Some(node) } => write!(f, "rank {rank} (pid {pid} on {node})"),
            Who::Node(node) => f.write_str(node),
        }
    }
}
