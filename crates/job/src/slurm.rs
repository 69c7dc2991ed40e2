//! A worker's place as Slurm gives it to the tasks of a step.

mod hostlist;

pub use hostlist::{Hostlist, HostlistError, MAX_HOSTS};

use crate::error::Error;
use std::process::Command;
use std::sync::mpsc::channel;
use std::thread;
use std::time::Duration;

/// A task of a step of several: what `srun` sets. In a batch script, which is no step, there is none.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Step {
    pub(crate) rank: usize,
    pub(crate) world_size: usize,
    pub(crate) local_rank: usize,
    pub(crate) local_world_size: usize,
    /// The host of rank 0.
    pub(crate) first_node: String,
    job: String,
    step: String,
}

impl Step {
    /// The place that these variables give, if they are those of a task of several.
    pub(crate) fn from_variables(get: impl Fn(&str) -> Option<String>) -> Result<Option<Step>, Error> {
        let number = |name: &'static str| -> Result<Option<usize>, Error> {
            let Some(value) = get(name) else { return Ok(None) };
            let want = "must be a number from 0, as srun sets it".into();
            value.parse().map(Some).map_err(|_| Error::Variable { name, value, want })
        };
        let missing = |name: &'static str| Error::Variable {
            name,
            value: String::new(),
            want: "must be set in a step of several tasks, as srun does".into(),
        };
        let Some(world_size) = number("SLURM_STEP_NUM_TASKS")?.filter(|&n| n > 1) else { return Ok(None) };
        let rank = number("SLURM_PROCID")?.ok_or_else(|| missing("SLURM_PROCID"))?;
        let local_rank = number("SLURM_LOCALID")?.ok_or_else(|| missing("SLURM_LOCALID"))?;
        let text = |name: &'static str| get(name).ok_or_else(|| missing(name));
        let (counts, node) = (text("SLURM_STEP_TASKS_PER_NODE")?, number("SLURM_NODEID")?.unwrap_or(0));
        let local_world_size = tasks_of_node(&counts, node).ok_or_else(|| Error::Variable {
            name: "SLURM_STEP_TASKS_PER_NODE",
            value: counts.clone(),
            want: format!("must give the tasks of each node, such as 2(x3),1, also of node {node}"),
        })?;
        let nodes = text("SLURM_STEP_NODELIST")?;
        let (job, step) = (text("SLURM_JOB_ID")?, text("SLURM_STEP_ID")?);
        let first_node = first_of(&nodes);
        Ok(Some(Step { rank, world_size, local_rank, local_world_size, first_node, job, step }))
    }

    /// The same for all tasks of the step, and for no other step of the cluster.
    pub(crate) fn run_id(&self) -> String {
        format!("slurm-{}.{}", self.job, self.step)
    }
}

/// The address that Slurm itself reaches a node at, for clusters whose node names nobody else resolves.
pub fn node_address(node: &str) -> Option<String> {
    let output = Command::new("scontrol").args(["show", "node", node, "--oneliner"]).output().ok()?;
    address_in(&String::from_utf8_lossy(&output.stdout))
}

/// How long a controller that doesn't answer is waited for.
const PATIENCE: Duration = Duration::from_secs(10);

/// How long this job may still run, if its time is limited and Slurm tells.
pub(crate) fn time_left(job: &str) -> Option<Duration> {
    let mut squeue = Command::new("squeue");
    squeue.args(["--noheader", "--format=%L", "--jobs", job]);
    let (sender, answer) = channel();
    let ask = move || drop(sender.send(squeue.output().ok()));
    thread::Builder::new().name("phalanx-squeue".into()).spawn(ask).ok()?;
    let output = answer.recv_timeout(PATIENCE).ok()??;
    duration(String::from_utf8_lossy(&output.stdout).trim())
}

/// A time as Slurm prints it: `[[days-]hours:]minutes:seconds`.
fn duration(text: &str) -> Option<Duration> {
    let (days, clock) = text.split_once('-').unwrap_or(("0", text));
    let parts: Vec<u64> = clock.split(':').map(|part| part.parse().ok()).collect::<Option<_>>()?;
    let (hours, minutes, seconds) = match parts[..] {
        [minutes, seconds] => (0, minutes, seconds),
        [hours, minutes, seconds] => (hours, minutes, seconds),
        _ => return None,
    };
    let hours = days.parse::<u64>().ok()?.checked_mul(24)?.checked_add(hours)?;
    let minutes = hours.checked_mul(60)?.checked_add(minutes)?;
    Some(Duration::from_secs(minutes.checked_mul(60)?.checked_add(seconds)?))
}

fn address_in(description: &str) -> Option<String> {
    let mut words = description.split_whitespace();
    words.find_map(|word| word.strip_prefix("NodeAddr=")).map(str::to_owned)
}

/// How many tasks node `node` has, of counts such as `2(x3),1`.
fn tasks_of_node(counts: &str, node: usize) -> Option<usize> {
    let mut before = 0;
    for part in counts.split(',') {
        let (tasks, nodes) = match part.split_once("(x") {
            Some((tasks, nodes)) => (tasks, nodes.strip_suffix(')')?.parse().ok()?),
            None => (part, 1),
        };
        before += nodes;
        if node < before {
            return tasks.parse().ok();
        }
    }
    None
}

/// The first host of a list such as `gpu[07-09,12]-a,login`.
fn first_of(hosts: &str) -> String {
    let (mut first, mut rest) = (String::new(), hosts);
    while let Some(at) = rest.find(['[', ',']) {
        first.push_str(&rest[..at]);
        if rest[at..].starts_with(',') {
            return first;
        }
        let inside = &rest[at + 1..];
        let close = inside.find(']').unwrap_or(inside.len());
        first.push_str(inside[..close].split(['-', ',']).next().unwrap_or_default());
        rest = inside.get(close + 1..).unwrap_or_default();
    }
    first + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_place_of_a_task() {
        let variables = [
            ("SLURM_STEP_NUM_TASKS", "7"),
            ("SLURM_PROCID", "6"),
            ("SLURM_LOCALID", "0"),
            ("SLURM_NODEID", "3"),
            ("SLURM_STEP_TASKS_PER_NODE", "2(x3),1"),
            ("SLURM_STEP_NODELIST", "n[01-03],m"),
            ("SLURM_JOB_ID", "55"),
            ("SLURM_STEP_ID", "2"),
        ];
        let step = |leave_out: &str| {
            Step::from_variables(|name| {
                let found = variables.iter().find(|(n, _)| *n == name && *n != leave_out);
                found.map(|(_, value)| value.to_string())
            })
        };
        let whole = step("").unwrap().unwrap();
        assert_eq!((whole.rank, whole.world_size, whole.local_rank, whole.local_world_size), (6, 7, 0, 1));
        assert_eq!((whole.first_node.as_str(), whole.run_id().as_str()), ("n01", "slurm-55.2"));
        assert_eq!(step("SLURM_STEP_NUM_TASKS").unwrap(), None, "a batch script is no task");
        let error = step("SLURM_LOCALID").unwrap_err().to_string();
        assert!(error.contains("SLURM_LOCALID is \"\": must be set"), "{error}");
    }

    #[test]
    fn the_address_in_what_scontrol_says() {
        let said = "NodeName=n1 Arch=x86_64 CPUAlloc=0 NodeAddr=10.0.0.7 NodeHostName=box Port=17001";
        assert_eq!(address_in(said).as_deref(), Some("10.0.0.7"));
        assert_eq!(address_in("slurm_load_node error: Invalid node name specified"), None);
    }

    #[test]
    fn times_are_read_as_slurm_prints_them() {
        let check = |text: &str, want: Option<u64>| {
            assert_eq!(duration(text), want.map(Duration::from_secs), "{text}")
        };
        check("0:07", Some(7));
        check("59:30", Some(3570));
        check("1:00:00", Some(3600));
        check("2-03:00:01", Some(183_601));
        ["UNLIMITED", "NOT_SET", "INVALID", "", "7", "1-2", "x-1:00", "18446744073709551615-0:00"]
            .iter()
            .for_each(|text| check(text, None));
    }

    #[test]
    fn counts_and_hosts() {
        for (counts, node, want) in [
            ("4", 0, Some(4)),
            ("2(x3),1", 2, Some(2)),
            ("2(x3),1", 3, Some(1)),
            ("2(x3),1", 4, None),
            ("2(x", 0, None),
        ] {
            assert_eq!(tasks_of_node(counts, node), want, "{counts}");
        }
        for (hosts, want) in [
            ("a", "a"),
            ("a,b", "a"),
            ("n[01-03,7],m", "n01"),
            ("n[7,9]", "n7"),
            ("r[1-2]n[3-4].x", "r1n3.x"),
            ("n[", "n"),
            ("", ""),
        ] {
            assert_eq!(first_of(hosts), want, "{hosts}");
        }
    }
}
