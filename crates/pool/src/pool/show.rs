//! How a pool is, for whoever asks.

use super::{Agent, Fate, Job, Node, Phase, Pool};
use crate::job::JobId;
use crate::message::{Shown, ShownJob, ShownNode, ShownQueue, ShownState};
use crate::queues::Queue;
use crate::schedule::{Scene, Why, shares};

impl Pool {
    pub(super) fn shown(&self, job: Option<JobId>) -> Shown {
        if let Some(id) = job {
            let jobs = self.jobs.get(&id).map(|job| self.shown_job(id, job)).into_iter().collect();
            return Shown { queues: Vec::new(), nodes: Vec::new(), jobs };
        }
        let (demands, slots) = (self.demands(), self.slots());
        let shares = shares(&Scene { queues: &self.queues, nodes: &slots, jobs: &demands });
        let used = |is_meant: &dyn Fn(&Job, &Agent) -> bool| -> u32 {
            let of = |job: &Job| {
                job.agents.values().filter(|agent| is_meant(job, agent)).count() as u32 * job.spec.workers
            };
            self.jobs.values().map(of).sum()
        };
        let queue = |(name, queue): (&String, &Queue)| ShownQueue {
            name: name.clone(),
            queue: queue.clone(),
            share: shares[name],
            used: used(&|job, _| job.spec.queue == *name),
        };
        let node = |(name, node): (&String, &Node)| ShownNode {
            name: name.clone(),
            address: node.address.clone(),
            slots: node.slots,
            used: used(&|_, agent| agent.node == *name),
            is_there: slots.contains_key(name),
        };
        Shown {
            queues: self.queues.iter().map(queue).collect(),
            nodes: self.nodes.iter().map(node).collect(),
            jobs: self.jobs.iter().map(|(id, job)| self.shown_job(*id, job)).collect(),
        }
    }

    fn shown_job(&self, id: JobId, job: &Job) -> ShownJob {
        let spec = &job.spec;
        let nodes = || job.agents.values().map(|agent| agent.node.clone()).collect();
        let state = match &job.phase {
            Phase::Waits => ShownState::Waits { why: self.waits.get(&id).cloned().unwrap_or(Why::Settling) },
            Phase::Runs if job.fate == Fate::Own => ShownState::Runs { nodes: nodes() },
            Phase::Runs => ShownState::Ends { nodes: nodes() },
            Phase::Ended(how) => ShownState::Ended { how: how.clone() },
        };
        ShownJob {
            job: id,
            name: spec.name.clone(),
            queue: spec.queue.clone(),
            priority: spec.priority,
            agents: (spec.least, spec.most),
            workers: spec.workers,
            submitted_ms: job.submitted_ms,
            attempts: job.attempt,
            out: spec.run_dir(id).to_string_lossy().into_owned(),
            state,
        }
    }
}
