//! What a schedule comes to: agents with slots of their own, told to start and to stop.

use super::{Agent, Fate, Job, Now, Order, Phase, Pool, Stage};
use crate::job::{AgentId, Ending, JobId};
use crate::journal::{Entry, What};
use crate::message::{Start, ToNode, counted};
use crate::schedule::{Demand, Move, Placed, Scene, State, Why, is_promised, schedule};
use std::collections::{BTreeMap, BTreeSet};

impl Pool {
    /// Has jobs begin, grow, shrink and make room.
    pub(super) fn arrange(&mut self, now: Now, orders: &mut Vec<Order>) {
        let demands = self.demands();
        if self.settles.is_some() {
            let waiting = demands.iter().filter(|demand| demand.state == State::Waits);
            self.waits = waiting.map(|demand| (demand.job, Why::Settling)).collect();
            return;
        }
        let nodes = self.slots();
        let plan = schedule(&Scene { queues: &self.queues, nodes: &nodes, jobs: &demands });
        for demand in &demands {
            let is_promised = is_promised(demand, &plan.moves, &plan.waits);
            self.jobs.get_mut(&demand.job).expect("it is in the scene").is_promised = is_promised;
        }
        self.waits = plan.waits;
        let rest = self.jobs.iter().filter(|(_, job)| job.begins_at.is_some());
        self.waits.extend(rest.map(|(id, _)| (*id, Why::Resting)));
        for order in plan.moves {
            match order {
                Move::Begin { job, nodes } => {
                    let known = self.jobs.get_mut(&job).expect("it was in the scene");
                    (known.phase, known.attempt, known.next_agent, known.failures) =
                        (Phase::Runs, known.attempt + 1, 0, 0);
                    let what = What::Began { attempt: known.attempt };
                    orders.push(Order::Write(Entry { at_ms: now.ms, job, what }));
                    let on = counted(&nodes);
                    orders.push(Order::Say(format!("job {job} ({}): begins on {on}", known.spec.name)));
                    for node in nodes {
                        self.keep_slots(job, node);
                    }
                    self.tell_to_start(job, 0, orders);
                }
                Move::Grow { job, node } => {
                    let name = &self.jobs[&job].spec.name;
                    orders.push(Order::Say(format!("job {job} ({name}): grows on {node}")));
                    let agent = self.keep_slots(job, node);
                    self.tell_to_start(job, agent, orders);
                }
                Move::Shrink { job, agents, for_job } => {
                    let (name, left) = (&self.jobs[&job].spec.name, agents.len());
                    orders.push(Order::Say(format!(
                        "job {job} ({name}): gives {left} of its agents up for job {for_job}"
                    )));
                    self.stop_these(job, &agents, Ending::Terminate, orders);
                }
                Move::Evict { job, for_job } => {
                    let known = self.jobs.get_mut(&job).expect("it was in the scene");
                    known.fate = Fate::Evicted;
                    orders.push(Order::Say(format!(
                        "job {job} ({}): makes room for job {for_job}",
                        known.spec.name
                    )));
                    let ending = known.spec.ending;
                    self.stop(job, ending, orders);
                    self.conclude(now, job, orders);
                }
            }
        }
    }

    pub(super) fn demands(&self) -> Vec<Demand> {
        let is_living = |job: &Job| !matches!(job.phase, Phase::Ended(_)) && job.begins_at.is_none();
        let living = self.jobs.iter().filter(|(_, job)| is_living(job));
        living.map(|(id, job)| job.demand(*id)).collect()
    }

    /// The slots of nodes that can be given something.
    pub(super) fn slots(&self) -> BTreeMap<String, u32> {
        let left_over = |name: &str| {
            let on_it = self.leftovers.values().filter(|agent| agent.node == name);
            on_it.map(|agent| agent.slots.len() as u32).sum::<u32>()
        };
        let there =
            self.nodes.iter().filter(|(_, node)| node.link.is_ok() && !node.leaves && node.shunned.is_none());
        there.map(|(name, node)| (name.clone(), node.slots.saturating_sub(left_over(name)))).collect()
    }

    /// Gives a job another agent there, which holds the first slots that nobody else holds; its number.
    fn keep_slots(&mut self, id: JobId, node: String) -> u32 {
        let all = self.jobs.values().flat_map(|job| job.agents.values()).chain(self.leftovers.values());
        let taken: BTreeSet<u32> =
            all.filter(|agent| agent.node == node).flat_map(|agent| agent.slots.iter().copied()).collect();
        let free = (0..self.nodes[&node].slots).filter(|slot| !taken.contains(slot));
        let job = self.jobs.get_mut(&id).expect("it was in the scene");
        let slots = free.take(job.spec.workers as usize).collect();
        let number = job.next_agent;
        job.next_agent += 1;
        job.agents.insert(number, Agent { node, slots, stage: Stage::Kept });
        number
    }

    pub(super) fn tell_to_start(&mut self, id: JobId, n: u32, orders: &mut Vec<Order>) {
        let job = self.jobs.get_mut(&id).expect("it runs");
        let agent = job.agents.get_mut(&n).expect("it is one of its agents");
        agent.stage = Stage::Told;
        // A node that has just gone says when it comes back that it never heard of it.
        if let Some(Ok(link)) = self.nodes.get(&agent.node).map(|node| node.link) {
            let id = AgentId { job: id, attempt: job.attempt, agent: n };
            let (slots, spec, endpoint) = (agent.slots.clone(), job.spec.clone(), job.endpoint.clone());
            orders.push(Order::Tell(link, ToNode::Start(Box::new(Start { id, slots, spec, endpoint }))));
        }
    }
}

impl Job {
    fn demand(&self, job: JobId) -> Demand {
        let spec = &self.spec;
        let (least, most, workers, priority) = (spec.least, spec.most, spec.workers, spec.priority);
        let is_met =
            self.endpoint.is_some() && self.agents.get(&0).is_some_and(|first| first.stage == Stage::Runs);
        let can_grow = is_met && !self.is_over() && self.grows_at.is_none();
        let state = match (&self.phase, self.fate) {
            (Phase::Waits | Phase::Ended(_), _) => State::Waits,
            (Phase::Runs, Fate::Own) if self.short.is_none() => State::Runs { can_grow },
            (Phase::Runs, _) => State::Ends,
        };
        let placed = |(n, agent): (&u32, &Agent)| Placed {
            agent: *n,
            node: agent.node.clone(),
            stops: agent.stage == Stage::Stops,
        };
        let agents = self.agents.iter().map(placed).collect();
        Demand {
            job,
            queue: spec.queue.clone(),
            priority,
            workers,
            least,
            most,
            agents,
            state,
            is_promised: self.is_promised,
        }
    }
}
