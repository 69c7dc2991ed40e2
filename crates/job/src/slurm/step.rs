//! The place of a process among the tasks of a step, from what `srun` sets. In a batch script, which is no step, there is none.

use super::hostlist::Hostlist;
use crate::error::Error;

/// A task of a step of several, each of which is a worker.
#[derive(Clone, Debug, PartialEq)]
pub struct Step {
    /// Among all tasks.
    pub rank: usize,
    /// How many tasks there are.
    pub world_size: usize,
    /// Among those of this node.
    pub local_rank: usize,
    /// How many of them are on this node.
    pub local_world_size: usize,
    /// The node of rank 0.
    pub first_node: String,
    /// Cores of this task, where Slurm binds tasks to cores of their own.
    pub share: Option<usize>,
    /// GPUs that the job has on this node.
    pub devices_on_node: Option<usize>,
    /// What to change where cores of the job lie idle.
    pub advice: Option<String>,
    id: String,
}

/// A task of a step of one a node, each of which is an agent that starts the workers of its node.
#[derive(Clone, Debug, PartialEq)]
pub struct AgentPlace {
    /// This node, among those of the step.
    pub node: usize,
    /// How many there are.
    pub nodes: usize,
    /// The first of them.
    pub first_node: String,
    /// The same for all tasks of the step, and for no other step of the cluster.
    pub run_id: String,
}

impl AgentPlace {
    /// The place that these variables give, if they are those of a task of a step of several nodes. One of several tasks a node is
    /// an error.
    pub fn from_variables(get: impl Fn(&str) -> Option<String>) -> Result<Option<AgentPlace>, Error> {
        let told = Told(&get);
        let Some(tasks) = told.number("SLURM_STEP_NUM_TASKS")?.filter(|&n| n > 1) else { return Ok(None) };
        let nodes = told.needed("SLURM_STEP_NUM_NODES")?;
        if tasks != nodes {
            let each = told.tasks_of_node(told.number("SLURM_NODEID")?.unwrap_or(0))?;
            let want = format!(
                "must be {nodes}, one task a node, where each is an agent that starts workers\nhint: srun --ntasks-per-node=1 phalanx run --nproc-per-node {each} ..., or start the program itself: srun PROGRAM"
            );
            return Err(Error::Variable { name: "SLURM_STEP_NUM_TASKS", value: tasks.to_string(), want });
        }
        let (node, first_node) = (told.needed("SLURM_NODEID")?, told.first_node()?);
        Ok(Some(AgentPlace { node, nodes, first_node, run_id: told.id()? }))
    }
}

impl Step {
    /// The place that these variables give, if they are those of a task of several, to a process that may run on `cores` cores.
    pub fn from_variables(get: impl Fn(&str) -> Option<String>, cores: usize) -> Result<Option<Step>, Error> {
        let told = Told(&get);
        let Some(world_size) = told.number("SLURM_STEP_NUM_TASKS")?.filter(|&n| n > 1) else {
            return Ok(None);
        };
        let (rank, local_rank) = (told.needed("SLURM_PROCID")?, told.needed("SLURM_LOCALID")?);
        let local_world_size = told.tasks_of_node(told.number("SLURM_NODEID")?.unwrap_or(0))?;
        if local_rank >= local_world_size {
            let want = format!("must be below the tasks of its node, of which there are {local_world_size}");
            return Err(Error::Variable { name: "SLURM_LOCALID", value: local_rank.to_string(), want });
        }
        let (on_node, per_task) = (told.number("SLURM_CPUS_ON_NODE")?, told.number("SLURM_CPUS_PER_TASK")?);
        Ok(Some(Step {
            rank,
            world_size,
            local_rank,
            local_world_size,
            first_node: told.first_node()?,
            share: share(cores, on_node, per_task),
            devices_on_node: told.number("SLURM_GPUS_ON_NODE")?,
            advice: advice(cores, on_node, per_task, local_world_size),
            id: told.id()?,
        }))
    }

    /// The same for all tasks of the step, and for no other step of the cluster.
    pub fn run_id(&self) -> String {
        self.id.clone()
    }
}

/// The cores of a task, which may run on `cores`, of those that the job has on the node; none where tasks run on all of these
/// alike, and have to share them.
///
/// What a task may run on is what counts: since Slurm 22.05 `srun` doesn't take `--cpus-per-task` over from the job, and a task is
/// bound to one core while `SLURM_CPUS_PER_TASK` says eight.
fn share(cores: usize, on_node: Option<usize>, per_task: Option<usize>) -> Option<usize> {
    let is_bound = on_node.is_some_and(|on_node| cores < on_node);
    match per_task {
        Some(per_task) => Some(per_task.clamp(1, cores.max(1))),
        None => is_bound.then_some(cores),
    }
}

/// What to say where cores that the job has are out of reach of its tasks.
fn advice(cores: usize, on_node: Option<usize>, per_task: Option<usize>, tasks: usize) -> Option<String> {
    let may = format!("each rank may run on {cores} {}", if cores == 1 { "core" } else { "cores" });
    if let Some(per_task) = per_task.filter(|&per_task| per_task > cores) {
        return Some(format!(
            "{may}, and SLURM_CPUS_PER_TASK is {per_task}: srun doesn't take --cpus-per-task over from the job\nhint: srun --cpus-per-task=$SLURM_CPUS_PER_TASK ..."
        ));
    }
    let on_node = on_node.filter(|&on_node| cores < on_node && cores.saturating_mul(tasks) < on_node)?;
    let each = on_node / tasks.max(1);
    Some(format!(
        "{may}, and the job has {on_node} on this node for {tasks}\nhint: srun --cpus-per-task={each} ..."
    ))
}

/// What Slurm has told.
struct Told<'a, F>(&'a F);

impl<F: Fn(&str) -> Option<String>> Told<'_, F> {
    fn text(&self, name: &'static str) -> Result<String, Error> {
        let want = || "must be set in a step of several tasks, as srun does".to_owned();
        (self.0)(name).ok_or_else(|| Error::Variable { name, value: String::new(), want: want() })
    }

    fn number(&self, name: &'static str) -> Result<Option<usize>, Error> {
        let Some(value) = (self.0)(name) else { return Ok(None) };
        let want = "must be a number from 0, as srun sets it".into();
        value.parse().map(Some).map_err(|_| Error::Variable { name, value, want })
    }

    fn needed(&self, name: &'static str) -> Result<usize, Error> {
        self.text(name)?;
        Ok(self.number(name)?.expect("it is set"))
    }

    fn tasks_of_node(&self, node: usize) -> Result<usize, Error> {
        let name = "SLURM_STEP_TASKS_PER_NODE";
        let counts = self.text(name)?;
        tasks_of_node(&counts, node).ok_or_else(|| Error::Variable {
            name,
            value: counts.clone(),
            want: format!("must give the tasks of each node, such as 2(x3),1, also of node {node}"),
        })
    }

    fn first_node(&self) -> Result<String, Error> {
        let name = "SLURM_STEP_NODELIST";
        let value = self.text(name)?;
        let wrong = |want| Error::Variable { name, value: value.clone(), want };
        let hosts: Hostlist =
            value.parse().map_err(|error: super::HostlistError| wrong(error.to_string()))?;
        hosts.first().map(str::to_owned).ok_or_else(|| wrong("must name the nodes of the step".into()))
    }

    fn id(&self) -> Result<String, Error> {
        Ok(format!("slurm-{}.{}", self.text("SLURM_JOB_ID")?, self.text("SLURM_STEP_ID")?))
    }
}

/// How many tasks node `node` has, of counts such as `2(x3),1`.
fn tasks_of_node(counts: &str, node: usize) -> Option<usize> {
    let mut before = 0usize;
    for part in counts.split(',') {
        let (tasks, nodes) = match part.split_once("(x") {
            Some((tasks, nodes)) => (tasks, nodes.strip_suffix(')')?.parse().ok()?),
            None => (part, 1),
        };
        before = before.checked_add(nodes)?;
        if node < before {
            return tasks.parse().ok();
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The variables of the last of seven tasks on four nodes, with others in the place of some; empty ones are not set.
    fn variables<'a>(others: &'a [(&str, &str)]) -> impl Fn(&str) -> Option<String> + 'a {
        let usual = [
            ("SLURM_STEP_NUM_TASKS", "7"),
            ("SLURM_STEP_NUM_NODES", "4"),
            ("SLURM_PROCID", "6"),
            ("SLURM_LOCALID", "0"),
            ("SLURM_NODEID", "3"),
            ("SLURM_STEP_TASKS_PER_NODE", "2(x3),1"),
            ("SLURM_STEP_NODELIST", "n[01-03],m"),
            ("SLURM_JOB_ID", "55"),
            ("SLURM_STEP_ID", "2"),
        ];
        move |name| {
            let found = others.iter().chain(&usual).find(|(n, _)| *n == name);
            found.map(|(_, value)| value.to_string()).filter(|value| !value.is_empty())
        }
    }

    #[test]
    fn the_place_of_a_task() {
        let step = |others: &[(&str, &str)]| Step::from_variables(variables(others), 8);
        let whole = step(&[]).unwrap().unwrap();
        assert_eq!((whole.rank, whole.world_size, whole.local_rank, whole.local_world_size), (6, 7, 0, 1));
        assert_eq!((whole.first_node.as_str(), whole.run_id().as_str()), ("n01", "slurm-55.2"));
        assert_eq!(step(&[("SLURM_STEP_NUM_TASKS", "")]).unwrap(), None, "a batch script is no task");
        assert_eq!(step(&[("SLURM_STEP_NUM_TASKS", "1")]).unwrap(), None);
        let wrong = |name: &str, value: &str, want: &str| {
            let error = step(&[(name, value)]).unwrap_err().to_string();
            assert!(error.contains(&format!("{name} is {value:?}: ")) && error.contains(want), "{error}");
        };
        wrong("SLURM_LOCALID", "", "must be set in a step of several tasks");
        wrong("SLURM_LOCALID", "1", "below the tasks of its node, of which there are 1");
        wrong("SLURM_PROCID", "x", "must be a number");
        wrong("SLURM_STEP_NODELIST", "n[01-", "never closed");
        wrong("SLURM_STEP_NODELIST", ",", "must name the nodes");
        wrong("SLURM_STEP_TASKS_PER_NODE", "2(x3)", "also of node 3");
        wrong("SLURM_STEP_TASKS_PER_NODE", "2(x2),1(x18446744073709551615)", "such as 2(x3),1");
    }

    #[test]
    fn an_agent_is_the_only_task_of_its_node() {
        let place = |others: &[(&str, &str)]| AgentPlace::from_variables(variables(others));
        let four = place(&[("SLURM_STEP_NUM_TASKS", "4")]).unwrap().unwrap();
        assert_eq!((four.node, four.nodes, four.first_node.as_str()), (3, 4, "n01"));
        assert_eq!(four.run_id, "slurm-55.2");
        assert_eq!(place(&[("SLURM_STEP_NUM_TASKS", "1")]).unwrap(), None, "a run of one machine");
        assert_eq!(place(&[("SLURM_STEP_NUM_TASKS", "")]).unwrap(), None);
        let error = place(&[("SLURM_NODEID", "1")]).unwrap_err().to_string();
        let hint = "hint: srun --ntasks-per-node=1 phalanx run --nproc-per-node 2 ...";
        assert!(
            error.contains("SLURM_STEP_NUM_TASKS is \"7\": must be 4") && error.contains(hint),
            "{error}"
        );
    }

    #[test]
    fn a_task_computes_on_what_it_may_run_on() {
        for (cores, on_node, per_task, want) in [
            // Not bound: all tasks of the node run on all of its cores.
            (64, Some(64), None, None),
            (64, None, None, None),
            (2, Some(2), None, None),
            // In a control group with all cores that the job has there.
            (16, Some(16), None, None),
            // Bound, each to its own.
            (16, Some(64), None, Some(16)),
            (16, Some(64), Some(16), Some(16)),
            // Not bound, but told.
            (64, Some(64), Some(16), Some(16)),
            // Told eight, and bound to one.
            (1, Some(64), Some(8), Some(1)),
            (8, Some(8), Some(0), Some(1)),
        ] {
            assert_eq!(share(cores, on_node, per_task), want, "{cores} {on_node:?} {per_task:?}");
        }
    }

    #[test]
    fn cores_out_of_reach_are_told_with_what_to_change() {
        let check = |cores, on_node, per_task, tasks, want: Option<&str>| {
            let said = advice(cores, on_node, per_task, tasks);
            assert_eq!(said.is_some(), want.is_some(), "{said:?}");
            assert!(said.unwrap_or_default().contains(want.unwrap_or_default()), "{want:?}");
        };
        check(1, Some(64), Some(8), 8, Some("hint: srun --cpus-per-task=$SLURM_CPUS_PER_TASK"));
        check(
            1,
            Some(64),
            None,
            4,
            Some("on 1 core, and the job has 64 on this node for 4\nhint: srun --cpus-per-task=16"),
        );
        check(16, Some(64), None, 4, None);
        check(64, Some(64), None, 4, None);
        check(8, Some(64), Some(8), 8, None);
        check(2, None, None, 4, None);
    }

    #[test]
    fn tasks_are_counted_node_by_node() {
        for (counts, node, want) in [
            ("4", 0, Some(4)),
            ("2(x3),1", 2, Some(2)),
            ("2(x3),1", 3, Some(1)),
            ("2(x3),1", 4, None),
            ("2(x", 0, None),
            ("", 0, None),
        ] {
            assert_eq!(tasks_of_node(counts, node), want, "{counts}");
        }
    }
}
