//! A job: what somebody wants to have run, and how one of its agents is called.

use crate::queues::{Queues, check_name};
use phalanx_job::Work;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::path::PathBuf;

/// The most slots of a job.
const MOST_SLOTS: u64 = 65_536;
/// The longest name of a folder, in bytes.
const MOST_PATH: usize = 4096;
/// The longest job, as it is written down.
const MOST_BYTES: usize = 65_536;

/// The number of a job; later ones have larger ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct JobId(pub u64);

impl fmt::Display for JobId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// One agent of a job, in one of its starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AgentId {
    /// Whose.
    pub job: JobId,
    /// In which of the job's starts, from 1 on.
    pub attempt: u32,
    /// Which, from 0 on; that one hosts the run's coordinator.
    pub agent: u32,
}

impl fmt::Display for AgentId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "agent {} of job {}", self.agent, self.job)
    }
}

/// What is to be run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct JobSpec {
    /// The queue it waits in.
    pub queue: String,
    /// What people call it.
    pub name: String,
    /// Jobs of a queue begin by priority, those of a high one first.
    pub priority: i32,
    /// The fewest agents it runs with.
    pub least: u32,
    /// The most agents it can use.
    pub most: u32,
    /// The workers of each agent, which are the slots that it takes, on one node.
    pub workers: u32,
    /// Where it runs.
    pub folder: PathBuf,
    /// Where it keeps its files, in that folder if it isn't absolute; with its number where there is `%j`.
    pub out: String,
    /// What the workers do; a recipe goes on from its newest checkpoint when it begins again.
    pub work: Work,
    /// How it is asked to make room.
    pub ending: Ending,
    /// How often workers that fail are started again, within one start of the job.
    pub max_restarts: u32,
    /// Variables of the environment that it is given.
    pub variables: Vec<(String, String)>,
}

/// What agents are sent that are to make room for another job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Ending {
    /// SIGUSR1: the workers keep a checkpoint and end with 75; SIGTERM if they haven't after a while.
    Drain,
    /// SIGTERM.
    Terminate,
}

impl JobSpec {
    /// Whether a pool with these queues could ever run it; if not, why.
    pub fn check(&self, queues: &Queues) -> Result<(), String> {
        check_name(&self.name)?;
        let Some(queue) = queues.get(&self.queue) else {
            let names: Vec<&str> = queues.keys().map(String::as_str).collect();
            return Err(format!("there is no queue {}\nhint: queues are {}", self.queue, names.join(", ")));
        };
        if self.work.words().is_empty() {
            return Err("there is nothing to run".into());
        }
        if self.least == 0 || self.least > self.most || self.workers == 0 {
            let (least, most, workers) = (self.least, self.most, self.workers);
            return Err(format!("from {least} to {most} agents of {workers} workers: that is none"));
        }
        let lengths = [self.folder.as_os_str().len(), self.out.len()];
        if lengths.iter().any(|length| *length > MOST_PATH) {
            return Err(format!("its folders have names of up to {MOST_PATH} bytes"));
        }
        let most = u64::from(self.most) * u64::from(self.workers);
        if most > MOST_SLOTS {
            return Err(format!(
                "it would use {most} slots, where {MOST_SLOTS} are the most that a job takes"
            ));
        }
        let length = serde_json::to_vec(self).map_or(usize::MAX, |text| text.len());
        if length > MOST_BYTES {
            let hint = "hint: have a file say what is too long for its command line";
            return Err(format!("it takes {length} bytes to write down, and may take {MOST_BYTES}\n{hint}"));
        }
        let wants = u64::from(self.least) * u64::from(self.workers);
        match queue.limit {
            Some(limit) if wants > u64::from(limit) => {
                Err(format!("it wants {wants} slots, and queue {} never holds more than {limit}", self.queue))
            }
            _ => Ok(()),
        }
    }

    /// Where a job of this number keeps its files.
    pub fn run_dir(&self, job: JobId) -> PathBuf {
        self.folder.join(self.out.replace("%j", &job.to_string()))
    }
}

/// How a job ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "end", rename_all = "snake_case")]
pub enum End {
    /// It is done.
    Done,
    /// It has failed.
    Failed {
        /// The exit code of the agent that ended last; none where there was no process.
        code: Option<i32>,
        /// What went wrong, where a code doesn't say it.
        words: Option<String>,
    },
    /// Somebody didn't want it any more.
    Canceled,
}

impl fmt::Display for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            End::Done => f.write_str("done"),
            End::Failed { words: Some(words), .. } => write!(f, "failed: {words}"),
            End::Failed { code: Some(code), .. } => write!(f, "failed with {code}"),
            End::Failed { .. } => f.write_str("failed"),
            End::Canceled => f.write_str("canceled"),
        }
    }
}
