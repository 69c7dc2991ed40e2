//! What a pool knows, and what follows from what it hears: a state machine without sockets, files or clocks.
//!
//! A job **waits**, **runs** as agents on nodes, and **has ended**. It may be stopped to make room, or because a node was lost under
//! it, and then waits again; each start is an attempt of its own, so that what is said of an earlier one is known for that. Its
//! first agent is told to start alone; when that says where its run meets, the others are.
//!
//! What mustn't be forgotten is an [`Entry`], ordered to be written before anything that others hear of. Where agents run is
//! not among it: nodes say that when they come back, to a pool that has begun again too.
//!
//! Invariants, each with its test:
//! - **Q-SLOT**: a slot of a node is one agent's until that is known to have ended, or its node is taken for lost.
//! - **Q-ONCE**: of a job no two attempts run at once, as far as nodes are heard.
//! - **Q-KEPT**: a pool that begins again from its journal, wherever that was cut, has all jobs whose numbers were told.

mod arrange;
mod nodes;
mod show;

use crate::job::{AgentId, End, Ending, JobId, JobSpec};
use crate::journal::{Entry, What};
use crate::message::{Answer, Ask, Ended, FromNode, ToNode};
use crate::queues::Queues;
use crate::schedule::Why;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::{Duration, Instant};

/// How long a node may be away before what ran there is taken for lost.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);
/// How long a pool that has begun again waits, before it decides anything, for nodes to come back with what ran.
pub(crate) const SETTLING: Duration = PATIENCE;
/// How long the other agents of a job may go on after one has failed without which they are too few: they end by themselves
/// where that isn't a program that never notices.
const SHORT: Duration = Duration::from_secs(60);
/// How often nodes may be lost under a job before it counts as one that loses them.
const MOST_LOSSES: u32 = 3;
/// How long a node that could start nothing is given nothing.
const SHUNNED: Duration = Duration::from_secs(60);
/// A job one of whose agents has failed grows again after two seconds, then four, and so on up to two to this power.
const MOST_DOUBLINGS: u32 = 9;
/// How often a job may end by itself in order to begin again.
const MOST_DRAINS: u32 = 100;
/// So many jobs may wait and run.
const MOST_JOBS: usize = 10_000;
/// So many jobs that have ended are still shown.
const REMEMBERED: usize = 200;
/// What an agent ends with whose workers have kept a checkpoint, to begin again.
const DRAINED: i32 = phalanx_job::DRAINED as i32;

/// The time: as it passes, and as people have it, in milliseconds since 1970.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Now {
    pub(crate) at: Instant,
    pub(crate) ms: u64,
}

/// Something that a pool hears.
#[derive(Debug)]
pub(crate) enum Event {
    /// A node says something, over this connection.
    Said(u64, FromNode),
    /// The connection of a node has ended.
    Gone(u64),
    /// Time has passed.
    Tick,
}

/// Something to be done, in this order.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Order {
    /// To be written down first.
    Write(Entry),
    /// To be said over a connection.
    Tell(u64, ToNode),
    /// A connection that is to end once it has what was said.
    Close(u64),
    /// For people.
    Say(String),
}

/// A pool.
pub(crate) struct Pool {
    queues: Queues,
    nodes: BTreeMap<String, Node>,
    jobs: BTreeMap<JobId, Job>,
    last: u64,
    /// Until then nodes may come back that know more.
    settles: Option<Instant>,
    waits: BTreeMap<JobId, Why>,
    /// Agents of attempts that are over for the pool, by their node, which hold their slots until they have ended.
    leftovers: BTreeMap<(String, AgentId), Agent>,
    /// Jobs that have ended, in that order.
    over: VecDeque<JobId>,
}

struct Node {
    process: String,
    address: String,
    slots: u32,
    /// None while it is away, since then.
    link: Result<u64, Instant>,
    leaves: bool,
    /// Until then it is given nothing, since it could start nothing.
    shunned: Option<Instant>,
}

struct Job {
    spec: JobSpec,
    submitted_ms: u64,
    phase: Phase,
    attempt: u32,
    losses: u32,
    /// How often it has ended by itself in order to begin again.
    drains: u32,
    agents: BTreeMap<u32, Agent>,
    /// Agents of this attempt that have ended, and their nodes, which go on saying so until it has.
    buried: BTreeSet<(u32, String)>,
    /// Numbers of agents aren't used twice in an attempt.
    next_agent: u32,
    endpoint: Option<String>,
    fate: Fate,
    /// What the last agent to end by itself ended with.
    last: Option<Ended>,
    /// Since when it has had too few agents, though none was lost.
    short: Option<Instant>,
    /// How many of its agents have failed in this attempt.
    failures: u32,
    /// It doesn't grow before: what fails again and again isn't to do so all the time.
    grows_at: Option<Instant>,
    /// Whether an attempt was lost with its nodes, and may go on where nobody hears of it.
    is_haunted: bool,
    /// It doesn't begin before.
    begins_at: Option<Instant>,
    /// Whether others were told to give way to it, and it has waited for that since.
    is_promised: bool,
}

#[derive(Clone, Debug, PartialEq)]
enum Phase {
    Waits,
    Runs,
    Ended(End),
}

/// What becomes of a job once its agents have ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    /// What they make of it.
    Own,
    /// It makes room for another, and begins again.
    Evicted,
    /// A node was lost under it, and it begins again.
    Lost,
    /// That was it.
    Canceled,
}

struct Agent {
    node: String,
    slots: Vec<u32>,
    stage: Stage,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// Its slots are kept for it until it is known where its run meets.
    Kept,
    /// Its node was told to start it.
    Told,
    Runs,
    /// It was told to stop.
    Stops,
}

impl Job {
    /// The agents that may go on.
    fn staying(&self) -> u32 {
        self.agents.values().filter(|agent| agent.stage != Stage::Stops).count() as u32
    }

    /// Whether one has ended well: then its run is over, and the others are about to end.
    fn is_over(&self) -> bool {
        self.last.as_ref().is_some_and(|last| matches!(last.code, Some(0 | DRAINED)))
    }

    /// Whether those that may go on are too few.
    fn lacks_agents(&self) -> bool {
        self.staying() < self.spec.least && !self.is_over()
    }

    /// Its first agent is gone: nobody comes to where it was, and nobody is told to.
    fn part_from_first(&mut self) {
        self.endpoint = None;
        self.agents.retain(|_, agent| agent.stage != Stage::Kept);
    }
}

impl Pool {
    /// From what an earlier one has written down.
    pub(crate) fn restore(queues: Queues, entries: Vec<Entry>, now: Now) -> Pool {
        let mut pool = Pool {
            queues,
            nodes: BTreeMap::new(),
            jobs: BTreeMap::new(),
            last: 0,
            settles: None,
            waits: BTreeMap::new(),
            leftovers: BTreeMap::new(),
            over: VecDeque::new(),
        };
        for Entry { at_ms, job, what } in entries {
            pool.last = pool.last.max(job.0);
            if let What::Submitted { spec } = what {
                pool.jobs.insert(job, fresh(*spec, at_ms));
                continue;
            }
            // Of a job that was over for long its end alone may be left.
            let Some(known) = pool.jobs.get_mut(&job) else { continue };
            match what {
                What::Submitted { .. } => {}
                What::Began { attempt } => (known.phase, known.attempt) = (Phase::Runs, attempt),
                What::Waits { losses } => (known.phase, known.losses) = (Phase::Waits, losses),
                What::Canceled => known.fate = Fate::Canceled,
                What::Ended { how } => {
                    known.phase = Phase::Ended(how);
                    pool.over.push_back(job);
                }
            }
        }
        // Whoever canceled one that waited was told so.
        for (id, job) in &mut pool.jobs {
            if job.phase == Phase::Waits && job.fate == Fate::Canceled {
                job.phase = Phase::Ended(End::Canceled);
                pool.over.push_back(*id);
            }
        }
        let is_running = |job: &Job| job.phase == Phase::Runs;
        pool.settles = pool.jobs.values().any(is_running).then(|| now.at + SETTLING);
        pool
    }

    /// The entries that are still of use: those of jobs that haven't ended, and of the last that have.
    pub(crate) fn of_use(entries: Vec<Entry>) -> Vec<Entry> {
        let is_end = |entry: &&Entry| matches!(entry.what, What::Ended { .. });
        let over: Vec<JobId> = entries.iter().filter(is_end).map(|entry| entry.job).collect();
        let forgotten: BTreeSet<JobId> =
            over[..over.len().saturating_sub(REMEMBERED)].iter().copied().collect();
        // The last number is never given again.
        let last = entries.iter().map(|entry| entry.job).max();
        entries
            .into_iter()
            .filter(|entry| !forgotten.contains(&entry.job) || Some(entry.job) == last)
            .collect()
    }

    /// Jobs in queues that are no more, which are why the pool can't begin.
    pub(crate) fn strays(&self) -> Option<(JobId, &str)> {
        let mut living = self.jobs.iter().filter(|(_, job)| !matches!(job.phase, Phase::Ended(_)));
        living
            .find(|(_, job)| !self.queues.contains_key(&job.spec.queue))
            .map(|(id, job)| (*id, job.spec.queue.as_str()))
    }

    /// What follows from an event.
    pub(crate) fn heed(&mut self, now: Now, event: Event) -> Vec<Order> {
        let mut orders = Vec::new();
        match event {
            Event::Said(link, FromNode::Here(here)) => self.come(now, link, here, &mut orders),
            Event::Said(_, FromNode::Beat) => return orders,
            Event::Said(link, said) => {
                // Whoever says more before it has said who it is, isn't one of ours.
                let Some(name) = self.name_of(link) else { return vec![Order::Close(link)] };
                match said {
                    FromNode::Began { id, endpoint } => self.began(&name, id, endpoint, &mut orders),
                    FromNode::Ended(ended) => self.ended(now, &name, &ended, &mut orders),
                    FromNode::Leaves => self.leave(&name, &mut orders),
                    FromNode::Here(_) | FromNode::Beat => {}
                }
            }
            Event::Gone(link) => self.gone(now, link, &mut orders),
            Event::Tick => {}
        }
        self.pass_time(now, &mut orders);
        self.arrange(now, &mut orders);
        orders
    }

    /// What is answered, and what follows.
    pub(crate) fn ask(&mut self, now: Now, ask: Ask) -> (Answer, Vec<Order>) {
        let mut orders = Vec::new();
        let answer = match ask {
            Ask::Show { job } => return (Answer::Shown(Box::new(self.shown(job))), orders),
            Ask::Submit(spec) => match spec.check(&self.queues).and_then(|()| self.has_room()) {
                Err(reason) => Answer::Refused { reason },
                Ok(()) => {
                    self.last += 1;
                    let job = JobId(self.last);
                    orders.push(Order::Write(Entry {
                        at_ms: now.ms,
                        job,
                        what: What::Submitted { spec: spec.clone() },
                    }));
                    orders.push(Order::Say(format!("job {job} ({}) is in queue {}", spec.name, spec.queue)));
                    self.jobs.insert(job, fresh(*spec, now.ms));
                    Answer::Submitted { job }
                }
            },
            Ask::Cancel { job } => match self.jobs.get_mut(&job) {
                None => Answer::Refused {
                    reason: format!("there is no job {job}\nhint: phalanx pool show lists them"),
                },
                Some(Job { phase: Phase::Ended(how), .. }) => Answer::Canceled { before: Some(how.clone()) },
                Some(Job { fate: Fate::Canceled, .. }) => Answer::Canceled { before: None },
                Some(known) => {
                    known.fate = Fate::Canceled;
                    orders.push(Order::Write(Entry { at_ms: now.ms, job, what: What::Canceled }));
                    self.stop(job, Ending::Terminate, &mut orders);
                    self.conclude(now, job, &mut orders);
                    Answer::Canceled { before: None }
                }
            },
        };
        if !orders.is_empty() {
            self.arrange(now, &mut orders);
        }
        (answer, orders)
    }

    /// Whether another job may come; if not, why.
    fn has_room(&self) -> Result<(), String> {
        let living = self.jobs.values().filter(|job| !matches!(job.phase, Phase::Ended(_))).count();
        match living < MOST_JOBS {
            true => Ok(()),
            false => Err(format!(
                "{living} jobs wait or run, which is all that a pool takes\nhint: phalanx pool cancel ends some"
            )),
        }
    }

    /// When a tick is wanted.
    pub(crate) fn wake_at(&self) -> Option<Instant> {
        let away = self.nodes.values().filter_map(|node| node.link.err()).map(|since| since + PATIENCE);
        let short = self.jobs.values().filter_map(|job| job.short).map(|since| since + SHORT);
        let later = self.jobs.values().flat_map(|job| [job.grows_at, job.begins_at]).flatten();
        let shunned = self.nodes.values().filter_map(|node| node.shunned);
        away.chain(short).chain(later).chain(shunned).chain(self.settles).min()
    }

    fn node(&mut self, name: &str) -> &mut Node {
        self.nodes.get_mut(name).expect("it has a connection")
    }

    fn name_of(&self, link: u64) -> Option<String> {
        self.nodes.iter().find(|(_, node)| node.link == Ok(link)).map(|(name, _)| name.clone())
    }

    /// Whether that is an agent of the attempt that is under way.
    fn is_at_hand(&self, id: AgentId) -> bool {
        self.jobs.get(&id.job).is_some_and(|job| job.phase == Phase::Runs && job.attempt == id.attempt)
    }

    fn began(&mut self, node: &str, id: AgentId, endpoint: String, orders: &mut Vec<Order>) {
        if !self.is_at_hand(id) {
            return;
        }
        let job = self.jobs.get_mut(&id.job).expect("it is at hand");
        match job.agents.get_mut(&id.agent) {
            Some(agent) if agent.node == node && agent.stage == Stage::Told => agent.stage = Stage::Runs,
            Some(agent) if agent.node == node => {}
            _ => return,
        }
        if job.endpoint.is_none() {
            job.endpoint = Some(endpoint);
            let kept: Vec<u32> =
                job.agents.iter().filter(|(_, agent)| agent.stage == Stage::Kept).map(|(n, _)| *n).collect();
            kept.into_iter().for_each(|agent| self.tell_to_start(id.job, agent, orders));
        }
    }

    fn ended(&mut self, now: Now, node: &str, ended: &Ended, orders: &mut Vec<Order>) {
        let id = ended.id;
        self.leftovers.remove(&(node.to_owned(), id));
        if ended.code.is_none() && !ended.stops {
            let words = ended.words.as_deref().unwrap_or("it has no words for it");
            let seconds = SHUNNED.as_secs();
            orders.push(Order::Say(format!(
                "node {node} can't start agents, and is given none for {seconds} s: {words}"
            )));
            self.node(node).shunned = Some(now.at + SHUNNED);
        }
        let is_at_hand = self.is_at_hand(id);
        let job = self.jobs.get_mut(&id.job).filter(|_| is_at_hand);
        // Of one that this pool doesn't know, an earlier one did.
        let Some(job) = job.filter(|job| job.agents.get(&id.agent).is_none_or(|agent| agent.node == node))
        else {
            let link = self.node(node).link;
            orders.extend(link.map(|link| Order::Tell(link, ToNode::Noted { id })));
            return;
        };
        if !job.buried.insert((id.agent, node.to_owned())) {
            return;
        }
        job.agents.remove(&id.agent);
        job.next_agent = job.next_agent.max(id.agent.saturating_add(1));
        if !ended.stops || ended.code == Some(0) {
            job.last = Some(ended.clone());
        }
        if id.agent == 0 {
            job.part_from_first();
        }
        let has_failed = !ended.stops && ended.code.is_none_or(|code| code != 0 && code != DRAINED);
        if has_failed && job.fate == Fate::Own {
            job.failures += 1;
            if !job.lacks_agents() {
                job.grows_at = Some(now.at + Duration::from_secs(1 << job.failures.min(MOST_DOUBLINGS)));
            } else if ended.code.is_none() {
                // That is its node's fault.
                self.lose_job(id.job, orders);
            } else {
                job.short.get_or_insert(now.at);
            }
        }
        self.conclude(now, id.job, orders);
    }

    /// A job can't go on, since its nodes have let it down.
    fn lose_job(&mut self, id: JobId, orders: &mut Vec<Order>) {
        let job = self.jobs.get_mut(&id).expect("it is known");
        job.fate = Fate::Lost;
        let ending = job.spec.ending;
        self.stop(id, ending, orders);
    }

    /// Tells all agents of a job to stop.
    fn stop(&mut self, id: JobId, ending: Ending, orders: &mut Vec<Order>) {
        let Some(job) = self.jobs.get_mut(&id) else { return };
        job.agents.retain(|_, agent| agent.stage != Stage::Kept);
        let agents: Vec<u32> = job.agents.keys().copied().collect();
        self.stop_these(id, &agents, ending, orders);
    }

    fn stop_these(&mut self, id: JobId, agents: &[u32], ending: Ending, orders: &mut Vec<Order>) {
        let Some(job) = self.jobs.get_mut(&id) else { return };
        for n in agents {
            let Some(agent) = job.agents.get_mut(n) else { continue };
            agent.stage = Stage::Stops;
            if let Some(Ok(link)) = self.nodes.get(&agent.node).map(|node| node.link) {
                let id = AgentId { job: id, attempt: job.attempt, agent: *n };
                orders.push(Order::Tell(link, ToNode::Stop { id, ending }));
            }
        }
    }

    /// What has become of a job all of whose agents have ended.
    fn conclude(&mut self, now: Now, id: JobId, orders: &mut Vec<Order>) {
        let job = self.jobs.get_mut(&id).expect("it is known");
        let may_be_over = match job.phase {
            // Until nodes have come back there may be agents that nobody here knows.
            Phase::Runs => self.settles.is_none() || job.fate == Fate::Canceled,
            Phase::Waits => job.fate == Fate::Canceled,
            Phase::Ended(_) => false,
        };
        if !job.agents.is_empty() || !may_be_over {
            return;
        }
        let last = job.last.take();
        let code = last.as_ref().and_then(|last| last.code);
        // What fails beside an attempt that is lost, and may go on, may fail because of that.
        let is_lost = job.fate == Fate::Lost
            || job.fate == Fate::Own
                && job.is_haunted
                && code.is_some_and(|code| code != 0 && code != DRAINED);
        let losses = job.losses + u32::from(is_lost);
        let how = match (job.fate, last) {
            (_, Some(_)) if code == Some(0) => Some(End::Done),
            (Fate::Canceled, _) => Some(End::Canceled),
            (_, last) if is_lost && losses > MOST_LOSSES => {
                let lost = || format!("nodes were lost under it {losses} times");
                Some(End::Failed { code, words: last.and_then(|last| last.words).or_else(|| Some(lost())) })
            }
            (Fate::Evicted | Fate::Lost, _) | (Fate::Own, None) => None,
            (Fate::Own, Some(_)) if is_lost => {
                job.begins_at = Some(now.at + PATIENCE * losses);
                None
            }
            (Fate::Own, Some(_)) if code == Some(DRAINED) && job.drains < MOST_DRAINS => {
                job.drains += 1;
                None
            }
            (Fate::Own, Some(last)) => Some(End::Failed { code, words: last.words }),
        };
        let name = &job.spec.name;
        let (phase, what, words) = match how {
            Some(how) => (Phase::Ended(how.clone()), What::Ended { how: how.clone() }, format!("{how}")),
            None => (Phase::Waits, What::Waits { losses }, "has stopped, and waits to go on".into()),
        };
        orders.push(Order::Write(Entry { at_ms: now.ms, job: id, what }));
        orders.push(Order::Say(format!("job {id} ({name}): {words}")));
        (job.phase, job.losses, job.endpoint, job.short, job.grows_at) = (phase, losses, None, None, None);
        job.is_haunted &= is_lost;
        if job.fate != Fate::Canceled {
            job.fate = Fate::Own;
        }
        for (agent, node) in std::mem::take(&mut job.buried) {
            let id = AgentId { job: id, attempt: job.attempt, agent };
            let link = self.nodes.get(&node).and_then(|node| node.link.ok());
            orders.extend(link.map(|link| Order::Tell(link, ToNode::Noted { id })));
        }
        if matches!(self.jobs[&id].phase, Phase::Ended(_)) {
            self.over.push_back(id);
        }
        while self.over.len() > REMEMBERED {
            self.over.pop_front().map(|id| self.jobs.remove(&id));
        }
    }

    /// The numbers of the jobs that are meant.
    fn ids(&self, is_meant: impl Fn(&Job) -> bool) -> Vec<JobId> {
        self.jobs.iter().filter(|(_, job)| is_meant(job)).map(|(id, _)| *id).collect()
    }

    fn pass_time(&mut self, now: Now, orders: &mut Vec<Order>) {
        let is_up = |since: Instant, limit: Duration| now.at.saturating_duration_since(since) >= limit;
        let is_lost = |node: &Node| node.link.is_err_and(|since| is_up(since, PATIENCE));
        let lost = self.nodes.iter().filter(|(_, node)| is_lost(node)).map(|(name, _)| name.clone());
        for name in lost.collect::<Vec<String>>() {
            self.nodes.remove(&name);
            orders.push(Order::Say(format!("node {name} is taken for lost")));
            self.lose(now, &name, &BTreeSet::new(), orders);
        }
        for id in self.ids(|job| job.short.is_some_and(|since| is_up(since, SHORT))) {
            self.jobs.get_mut(&id).expect("it is one of them").short = None;
            self.stop(id, Ending::Terminate, orders);
        }
        let is_ahead = |at: &Instant| now.at < *at;
        for job in self.jobs.values_mut() {
            (job.grows_at, job.begins_at) = (job.grows_at.filter(is_ahead), job.begins_at.filter(is_ahead));
        }
        self.nodes.values_mut().for_each(|node| node.shunned = node.shunned.filter(is_ahead));
        let is_whole = |job: &Job| job.staying() + job.buried.len() as u32 >= job.spec.least;
        let all_are_back = self.jobs.values().all(|job| job.phase != Phase::Runs || is_whole(job));
        if self.settles.is_some_and(|until| now.at >= until || all_are_back) {
            self.settle(now, orders);
        }
    }

    /// What nodes haven't come back with by now is lost.
    fn settle(&mut self, now: Now, orders: &mut Vec<Order>) {
        self.settles = None;
        for id in self.ids(|job| job.phase == Phase::Runs) {
            let job = self.jobs.get_mut(&id).expect("it is one of them");
            if job.fate != Fate::Own {
                self.stop(id, Ending::Terminate, orders);
            } else if job.lacks_agents() {
                job.is_haunted = true;
                self.lose_job(id, orders);
            }
            self.conclude(now, id, orders);
        }
    }
}

/// A job that has just come.
fn fresh(spec: JobSpec, submitted_ms: u64) -> Job {
    Job {
        spec,
        submitted_ms,
        phase: Phase::Waits,
        attempt: 0,
        losses: 0,
        drains: 0,
        agents: BTreeMap::new(),
        buried: BTreeSet::new(),
        next_agent: 0,
        endpoint: None,
        fate: Fate::Own,
        last: None,
        short: None,
        failures: 0,
        grows_at: None,
        is_haunted: false,
        begins_at: None,
        is_promised: false,
    }
}

#[cfg(test)]
mod tests;
