//! What the controller says of a job: where it stands, why it waits, how it ended.

use phalanx_job::slurm::{AskError, ask, ask_outside};
use std::fmt;
use std::time::Duration;

/// How long the controller is waited for.
const PATIENCE: Duration = Duration::from_secs(30);

/// A job as the controller knows it, or one of an array.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct JobView {
    /// Its number, as `7`, or `7_3` for one of an array.
    pub job: String,
    /// `PENDING`, `RUNNING`, `COMPLETED` and others.
    pub state: String,
    /// Why it is in that state, in a word of Slurm's; none where there is no reason.
    pub reason: Option<String>,
    /// Its exit code, once it has one.
    pub exit_code: i32,
    /// The signal that ended its script, or 0.
    pub signal: i32,
    /// The nodes that it has.
    pub nodes: Option<String>,
    /// Where its script's output goes.
    pub output: Option<String>,
    /// How often it was started again.
    pub restarts: u32,
    /// When it starts, or has started, as Slurm writes it.
    pub start: Option<String>,
    /// Where it runs its script.
    pub folder: Option<String>,
}

impl JobView {
    /// Whether it waits for its turn.
    pub fn is_pending(&self) -> bool {
        ["PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT"].contains(&self.state.as_str())
    }

    /// Whether it is over, so that nothing more will come of it.
    pub fn is_over(&self) -> bool {
        let over = [
            "BOOT_FAIL",
            "CANCELLED",
            "COMPLETED",
            "DEADLINE",
            "FAILED",
            "NODE_FAIL",
            "OUT_OF_MEMORY",
            "PREEMPTED",
            "REVOKED",
            "TIMEOUT",
        ];
        over.contains(&self.state.as_str())
    }
}

/// A node that takes no jobs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unfit {
    /// Which.
    pub node: String,
    /// `drained`, `down` or the like.
    pub state: String,
    /// What whoever did that wrote.
    pub reason: String,
}

impl fmt::Display for Unfit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} is {} ({})", self.node, self.state, self.reason)
    }
}

/// Submits a script, and gives the job's number.
pub fn submit(script: &str) -> Result<String, AskError> {
    let said = ask_outside("sbatch", &["--parsable"], script, PATIENCE)?;
    // On a cluster among several its name follows the number.
    let job = said.trim().split(';').next().unwrap_or_default().to_owned();
    match job.is_empty() || !job.bytes().all(|byte| byte.is_ascii_digit()) {
        true => {
            Err(AskError::Refused { command: "sbatch".into(), said: format!("gave no job number: {said:?}") })
        }
        false => Ok(job),
    }
}

/// What the controller knows of a job; all of an array. None if it doesn't know it any more: some minutes after its end it forgets.
pub fn look(job: &str) -> Result<Vec<JobView>, AskError> {
    match ask("scontrol", &["show", "job", job, "--oneliner"], "", PATIENCE) {
        Ok(said) => Ok(said.lines().filter_map(view).collect()),
        Err(AskError::Refused { said, .. }) if said.contains("Invalid job id") => Ok(Vec::new()),
        Err(error) => Err(error),
    }
}

/// The script of a job of this user's; of an array's, too.
pub fn script(job: &str) -> Result<String, AskError> {
    ask("scontrol", &["write", "batch_script", job, "-"], "", PATIENCE)
}

/// Cancels a job.
pub fn cancel(job: &str) -> Result<(), AskError> {
    ask("scancel", &[job], "", PATIENCE).map(drop)
}

/// The nodes that take no jobs.
pub fn unfit_nodes() -> Result<Vec<Unfit>, AskError> {
    let said = ask("sinfo", &["--noheader", "--Node", "--list-reasons", "--format=%N|%T|%E"], "", PATIENCE)?;
    let node = |line: &str| {
        let mut parts = line.splitn(3, '|').map(|part| part.trim().to_owned());
        Some(Unfit { node: parts.next()?, state: parts.next()?, reason: parts.next()? })
    };
    Ok(said.lines().filter_map(node).collect())
}

/// One line of `scontrol show job --oneliner`: `Key=value` with spaces between, values without quotes.
fn view(line: &str) -> Option<JobView> {
    let get = |key: &str| {
        let begin = format!("{key}=");
        let start = if line.starts_with(&begin) {
            begin.len()
        } else {
            line.find(&format!(" {begin}"))? + begin.len() + 1
        };
        let rest = &line[start..];
        // A value may hold spaces; the next key is what ends it.
        let is_key = |word: &str| {
            word.split_once('=').is_some_and(|(key, _)| {
                !key.is_empty() && key.chars().all(|c| c.is_ascii_alphanumeric() || "/:_".contains(c))
            })
        };
        let mut end = rest.len();
        for (at, _) in rest.match_indices(' ') {
            if is_key(rest[at + 1..].split(' ').next().unwrap_or_default()) {
                end = at;
                break;
            }
        }
        let value = rest[..end].trim();
        (!["", "(null)", "None", "Unknown", "N/A"].contains(&value)).then(|| value.to_owned())
    };
    let number = get("JobId")?;
    let (code, signal) = get("ExitCode")
        .and_then(|code| {
            code.split_once(':').and_then(|(code, signal)| Some((code.parse().ok()?, signal.parse().ok()?)))
        })
        .unwrap_or((0, 0));
    let job = match (get("ArrayJobId"), get("ArrayTaskId")) {
        (Some(array), Some(task)) => format!("{array}_{task}"),
        _ => number,
    };
    Some(JobView {
        job,
        state: get("JobState")?,
        reason: get("Reason"),
        exit_code: code,
        signal,
        nodes: get("NodeList"),
        output: get("StdOut"),
        restarts: get("Restarts").and_then(|n| n.parse().ok()).unwrap_or(0),
        start: get("StartTime"),
        folder: get("WorkDir"),
    })
}

/// What a reason means, and what can be done about it, in words; none for one that says all itself.
pub fn meaning(reason: &str) -> Option<&'static str> {
    // What Slurm puts behind it is for this one job.
    let word = reason.split([',', '(', ' ']).next().unwrap_or_default();
    Some(match word {
        "Resources" => "it is next, as soon as enough nodes are free",
        "Priority" => "others are before it in the queue",
        "BeginTime" => "not before its time; a job that was requeued waits two minutes",
        "Dependency" => "it waits for another job to end",
        "DependencyNeverSatisfied" => "the job that it waits for has failed: it will never start; cancel it",
        "JobArrayTaskLimit" => "as many of the array run as may at once",
        "JobHeldUser" | "JobHoldMaxRequeue" => "it is held; let it go: scontrol release JOB",
        "JobHeldAdmin" => "an administrator holds it; ask there",
        "PartitionTimeLimit" => {
            "it asks for more time than the partition gives: sinfo -o '%P %l', and a smaller --time"
        }
        "PartitionNodeLimit" => {
            "it asks for more nodes than the partition gives: sinfo -o '%P %D', and fewer --nodes"
        }
        "PartitionConfig" => "the partition doesn't give what it asks for: scontrol show partition",
        "PartitionDown" | "PartitionInactive" => {
            "the partition takes no jobs: choose another with --partition"
        }
        "ReqNodeNotAvail" => "nodes that it needs are down, drained or reserved: sinfo -R",
        word if word.starts_with("Nodes") => "nodes that it needs are down or drained: sinfo -R",
        "BadConstraints" => "no node has what it asks for: scontrol show nodes, and other options",
        "AssociationJobLimit" | "AssocMaxJobsLimit" | "QOSMaxJobsPerUserLimit" => {
            "as many of your jobs run as may at once"
        }
        "InvalidAccount" => {
            "the account isn't known: sacctmgr show assoc user=$USER, and --sbatch=--account=..."
        }
        "InvalidQOS" => "the quality of service isn't known: sacctmgr show qos",
        "Licenses" => "it waits for a licence",
        "Reservation" => "it waits for its reservation",
        "launch" => "its start failed on a node: see the node's slurmd log",
        word if word.starts_with("Assoc") || word.starts_with("QOS") => {
            "a limit of your account or quality of service: sacctmgr show assoc user=$USER"
        }
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_scontrol_says_is_read() {
        let line = "JobId=7 JobName=a b c=d UserId=root(0) GroupId=root(0) Priority=429 JobState=PENDING Reason=Resources Dependency=(null) \
                    Requeue=1 Restarts=2 BatchFlag=1 ExitCode=75:9 StartTime=2026-11-22T12:00:00 NodeList=n[1-2] TRES=cpu=2,node=2 \
                    Command=(null) WorkDir=/home/u/some place StdErr=/x StdOut=/home/u/some place/out-7.txt Power=";
        let job = view(line).unwrap();
        assert_eq!(
            (job.job.as_str(), job.state.as_str(), job.exit_code, job.signal, job.restarts),
            ("7", "PENDING", 75, 9, 2)
        );
        assert_eq!(job.reason.as_deref(), Some("Resources"));
        assert_eq!(job.nodes.as_deref(), Some("n[1-2]"));
        assert_eq!(job.output.as_deref(), Some("/home/u/some place/out-7.txt"));
        assert_eq!(job.folder.as_deref(), Some("/home/u/some place"));
        assert!(job.is_pending() && !job.is_over());
        let one = view("JobId=9 ArrayJobId=8 ArrayTaskId=3 JobState=COMPLETED Reason=None NodeList=(null)")
            .unwrap();
        assert_eq!((one.job.as_str(), one.reason, one.nodes), ("8_3", None, None));
        assert_eq!(view("slurm_load_jobs error: Invalid job id specified"), None);
        assert_eq!(view(""), None);
    }

    #[test]
    fn reasons_are_told_in_words() {
        assert!(meaning("Resources").unwrap().contains("free"));
        assert!(meaning("ReqNodeNotAvail, UnavailableNodes:n2").unwrap().contains("sinfo -R"));
        assert!(meaning("QOSMaxCpuPerUserLimit").unwrap().contains("limit"));
        assert!(meaning("Nodes_required_for_job_are_DOWN,_DRAINED_or_reserved").unwrap().contains("drained"));
        assert_eq!(meaning("Cleaning"), None);
    }
}
