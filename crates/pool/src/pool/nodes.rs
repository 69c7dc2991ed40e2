//! Nodes that come, are away, leave and are lost.

use super::{Agent, Fate, Node, Now, Order, PATIENCE, Phase, Pool, Stage};
use crate::job::{AgentId, Ending};
use crate::message::{Here, Running, ToNode};
use crate::queues::check_name;
use std::collections::BTreeSet;
use std::net::IpAddr;

/// The most slots of a node.
const MOST_SLOTS: u32 = 4096;

impl Pool {
    /// A node is there, for the first time or again.
    pub(super) fn come(&mut self, now: Now, link: u64, here: Here, orders: &mut Vec<Order>) {
        if let Err(reason) = self.may_come(&here) {
            orders.push(Order::Say(format!("node {} isn't taken: {reason}", here.name)));
            orders.extend([Order::Tell(link, ToNode::Refused { reason }), Order::Close(link)]);
            return;
        }
        let Here { name, process, address, slots, leaves, running, ended } = here;
        let fresh = Node { process, address, slots, link: Ok(link), leaves, shunned: None };
        let count = if slots == 1 { "slot" } else { "slots" };
        orders.push(Order::Say(format!("node {name} is there, with {slots} {count}")));
        if let Some(Node { link: Ok(old), .. }) = self.nodes.insert(name.clone(), fresh) {
            orders.push(Order::Close(old));
        }
        let mut known: BTreeSet<AgentId> = BTreeSet::new();
        for Running { id, slots, endpoint, stops } in running {
            known.insert(id);
            let is_at_hand = self.is_at_hand(id);
            let job = self.jobs.get_mut(&id.job).filter(|_| is_at_hand);
            // Another attempt has begun, or none is to, or another has its number.
            let Some(job) =
                job.filter(|job| job.agents.get(&id.agent).is_none_or(|agent| agent.node == name))
            else {
                orders.push(Order::Tell(link, ToNode::Stop { id, ending: Ending::Terminate }));
                let agent = Agent { node: name.clone(), slots, stage: Stage::Stops };
                self.leftovers.insert((name.clone(), id), agent);
                continue;
            };
            let stage = if stops { Stage::Stops } else { Stage::Runs };
            let agent =
                job.agents.entry(id.agent).or_insert_with(|| Agent { node: name.clone(), slots, stage });
            job.next_agent = job.next_agent.max(id.agent.saturating_add(1));
            if agent.stage == Stage::Stops && !stops {
                // It was away when it was told.
                let ending = if job.fate == Fate::Own { Ending::Terminate } else { job.spec.ending };
                orders.push(Order::Tell(link, ToNode::Stop { id, ending }));
            }
            self.began(&name, id, endpoint, orders);
        }
        for ended in ended {
            known.insert(ended.id);
            self.ended(now, &name, &ended, orders);
        }
        // What it doesn't know of has never begun there, or has ended with the process before this one.
        self.lose(now, &name, &known, orders);
        if leaves {
            self.leave(&name, orders);
        }
    }

    fn may_come(&self, here: &Here) -> Result<(), String> {
        check_name(&here.name)?;
        if !(1..=MOST_SLOTS).contains(&here.slots) {
            return Err(format!("it has {} slots, and nodes have 1 to {MOST_SLOTS}", here.slots));
        }
        if here.address.parse::<IpAddr>().is_err() {
            check_name(&here.address)?;
        }
        if self.nodes.get(&here.name).is_some_and(|node| node.link.is_ok() && node.process != here.process) {
            return Err(format!(
                "there is another node {}\nhint: give this one a name of its own: --name",
                here.name
            ));
        }
        let is_local = |address: &str| address.parse::<IpAddr>().is_ok_and(|address| address.is_loopback());
        let others = self.nodes.iter().filter(|(name, node)| **name != here.name && node.link.is_ok());
        match others
            .map(|(_, node)| &node.address)
            .find(|address| is_local(address) != is_local(&here.address))
        {
            Some(other) => Err(format!(
                "it is at {}, and another node at {other}, where they can't reach each other\nhint: nodes on the pool's own machine are to reach it at the address that others use: --pool ADDRESS",
                here.address
            )),
            None => Ok(()),
        }
    }

    /// A node is taken away: it stops what it has by itself.
    pub(super) fn leave(&mut self, node: &str, orders: &mut Vec<Order>) {
        self.node(node).leaves = true;
        orders.push(Order::Say(format!("node {node} leaves, and stops what runs there")));
        for id in self.ids(|job| job.phase == Phase::Runs) {
            let job = self.jobs.get_mut(&id).expect("it is one of them");
            let on_it =
                job.agents.values_mut().filter(|agent| agent.node == node && agent.stage != Stage::Kept);
            on_it.for_each(|agent| agent.stage = Stage::Stops);
            if job.fate == Fate::Own && job.lacks_agents() {
                job.fate = Fate::Evicted;
                let ending = job.spec.ending;
                self.stop(id, ending, orders);
            }
        }
    }

    /// The connection of a node has ended.
    pub(super) fn gone(&mut self, now: Now, link: u64, orders: &mut Vec<Order>) {
        let Some(name) = self.name_of(link) else { return };
        let node = self.node(&name);
        node.link = Err(now.at);
        let (is_done, leaves) = (!self.has_agents(&name), self.node(&name).leaves);
        if leaves && is_done {
            self.nodes.remove(&name);
            orders.push(Order::Say(format!("node {name} has left")));
        } else {
            let limit = PATIENCE.as_secs();
            orders.push(Order::Say(format!(
                "node {name} is away; what ran there is taken for lost in {limit} s"
            )));
        }
    }

    fn has_agents(&self, node: &str) -> bool {
        self.jobs.values().flat_map(|job| job.agents.values()).any(|agent| agent.node == node)
    }

    /// The agents of a node are lost, but for those that it knows.
    pub(super) fn lose(&mut self, now: Now, node: &str, known: &BTreeSet<AgentId>, orders: &mut Vec<Order>) {
        self.leftovers.retain(|(on, id), _| on != node || known.contains(id));
        let is_gone = !self.nodes.contains_key(node);
        for id in self.ids(|job| job.phase == Phase::Runs) {
            let job = self.jobs.get_mut(&id).expect("it is one of them");
            let attempt = job.attempt;
            let is_lost = |n: u32, agent: &Agent| {
                let id = AgentId { job: id, attempt, agent: n };
                agent.node == node && (agent.stage != Stage::Kept || is_gone) && !known.contains(&id)
            };
            let lost: Vec<u32> =
                job.agents.iter().filter(|(n, agent)| is_lost(**n, agent)).map(|(n, _)| *n).collect();
            if lost.is_empty() {
                continue;
            }
            lost.iter().for_each(|n| drop(job.agents.remove(n)));
            if lost.contains(&0) {
                job.part_from_first();
            }
            // A process that is known to have ended has taken its agents with it.
            job.is_haunted |= is_gone;
            let agents =
                if lost.len() == 1 { "an agent".to_owned() } else { format!("{} agents", lost.len()) };
            orders.push(Order::Say(format!("job {id} ({}): {agents} lost with node {node}", job.spec.name)));
            if job.fate == Fate::Own && job.lacks_agents() {
                self.lose_job(id, orders);
            }
            self.conclude(now, id, orders);
        }
    }
}
