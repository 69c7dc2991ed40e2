//! Which jobs run, with how many agents and on which nodes: a pure function of queues, nodes and jobs, which says why each job
//! waits that does.
//!
//! First come **minimums**. The queue that holds the least of its share has its first job looked at, by priority and then by
//! age; jobs of a queue begin in that order, so a large one isn't passed by small ones for ever. If the job fits into free
//! slots it begins, also beyond its queue's share: what nobody asks for is lent. Else room is made for it, if it may be:
//! - agents of its own queue's jobs beyond their minimum, and jobs there of lower priority, give way to it;
//! - as long as its queue stays within its fair share, queues give way to it that keep theirs;
//! - as long as its queue stays within its quota, queues give way to it that hold more than theirs.
//!
//! Agents beyond a minimum go first, which costs their jobs no step; whole jobs only where these don't do, and last those of high
//! priority and the oldest. Whoever turns out not to be in the way stays.
//!
//! Then jobs **grow** into what is left, an agent at a time, that of the queue first which holds the least of its share. For
//! that, too, room is made within fair shares and quotas, but of agents beyond a minimum alone: nobody is ended so that
//! another may be larger.
//!
//! Who was promised slots that others are giving back comes first until it has them, and those that are free by then are kept for it.
//! So jobs don't take slots from each other in turns: who takes one holds no more than its right with it, and who gave it would
//! hold more than its own.

use crate::job::JobId;
use crate::queues::{Queue, Queues};
use crate::share::{Claim, Share, fair_shares, owed};
use serde::{Deserialize, Serialize};
use std::cmp::{Ordering, Reverse};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

/// What a schedule is made for.
pub(crate) struct Scene<'a> {
    pub(crate) queues: &'a Queues,
    /// The slots of each node that is there.
    pub(crate) nodes: &'a BTreeMap<String, u32>,
    /// All jobs that haven't ended, by age.
    pub(crate) jobs: &'a [Demand],
}

/// A job, as far as it matters to a schedule.
#[derive(Clone, Debug)]
pub(crate) struct Demand {
    pub(crate) job: JobId,
    pub(crate) queue: String,
    pub(crate) priority: i32,
    /// The slots that each of its agents takes, on one node.
    pub(crate) workers: u32,
    pub(crate) least: u32,
    pub(crate) most: u32,
    pub(crate) agents: Vec<Placed>,
    pub(crate) state: State,
    /// Whether others were told to give way to it, and it has waited for that since.
    pub(crate) is_promised: bool,
}

/// How a job is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    /// It waits to begin, and has no agents.
    Waits,
    /// It runs.
    Runs {
        /// Whether another agent could join it now.
        can_grow: bool,
    },
    /// All of its agents are being stopped, and hold their slots until they have ended.
    Ends,
}

/// An agent of a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Placed {
    pub(crate) agent: u32,
    pub(crate) node: String,
    /// Whether it is being stopped.
    pub(crate) stops: bool,
}

/// Something to be done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Move {
    /// A job begins, with an agent on each of these, of which one may be named several times.
    Begin { job: JobId, nodes: Vec<String> },
    /// An agent joins a job that runs.
    Grow { job: JobId, node: String },
    /// These agents leave a job that goes on.
    Shrink { job: JobId, agents: Vec<u32>, for_job: JobId },
    /// A job is stopped, to begin again later.
    Evict { job: JobId, for_job: JobId },
}

/// Why a job waits.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "why", rename_all = "snake_case")]
pub enum Why {
    /// The pool looks who is there first.
    Settling,
    /// The nodes that are there couldn't run it if they were empty.
    NotEnough {
        /// How many agents it wants.
        agents: u32,
        /// The slots that each takes.
        workers: u32,
        /// How many of these would fit.
        fit: u32,
    },
    /// Its queue may hold no more.
    Limit {
        /// What it holds.
        used: u32,
        /// What it may.
        limit: u32,
    },
    /// Another one of its queue comes before.
    Behind {
        /// Which.
        job: JobId,
    },
    /// It failed beside an attempt that was lost with its nodes, and is tried again later.
    Resting,
    /// Slots that it is to have are still another's, who gives them back.
    Promised,
    /// All is taken by jobs that needn't give way to it.
    Full {
        /// What it wants.
        wants: u32,
        /// What is free.
        free: u32,
        /// What its queue holds.
        used: u32,
        /// What would be fair.
        share: u32,
    },
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Why::Settling => write!(f, "the pool has just begun, and looks who is there"),
            Why::NotEnough { agents, workers: 1, fit } => {
                write!(f, "it wants {agents} slots, and all nodes together have {fit}")
            }
            Why::NotEnough { agents, workers, fit } => {
                write!(
                    f,
                    "it wants {agents} times {workers} slots of one node, and the nodes have room for {fit}"
                )
            }
            Why::Limit { used, limit } => write!(f, "its queue holds {used} slots, and may hold {limit}"),
            Why::Behind { job } => write!(f, "job {job} of its queue comes first"),
            Why::Resting => write!(f, "nodes were lost under it, and it is tried again soon"),
            Why::Promised => write!(f, "others are giving slots back to it"),
            Why::Full { wants, free, used, share } => {
                write!(
                    f,
                    "it wants {wants} slots where {free} are free; its queue holds {used}, and {share} would be fair"
                )
            }
        }
    }
}

/// What follows from a scene.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Schedule {
    pub(crate) moves: Vec<Move>,
    /// Those that neither run nor begin.
    pub(crate) waits: BTreeMap<JobId, Why>,
}

/// The fair share of each queue, in slots that it can claim.
pub(crate) fn shares(scene: &Scene<'_>) -> BTreeMap<String, u32> {
    let shares = fair_shares(scene.nodes.values().sum(), &claims(scene));
    scene.queues.keys().cloned().zip(shares.iter().map(|share| share.claims)).collect()
}

/// What each queue asks for: as much as its jobs could use of the nodes that are there.
fn claims(scene: &Scene<'_>) -> Vec<Claim> {
    let mut requests: BTreeMap<&String, u32> = BTreeMap::new();
    for job in scene.jobs {
        let fit = could_fit(scene.nodes.values(), job.workers);
        let could_run = job.state != State::Waits || fit >= job.least;
        let most = job.most.min(fit.max(job.agents.len() as u32)).saturating_mul(job.workers);
        let request = requests.entry(&job.queue).or_default();
        *request = request.saturating_add(if could_run { most } else { 0 });
    }
    let claim = |(name, queue): (&String, &Queue)| {
        let request = requests.get(name).copied().unwrap_or_default();
        let limit = queue.limit.unwrap_or(u32::MAX);
        Claim { quota: queue.quota, weight: queue.weight, request: request.min(limit) }
    };
    scene.queues.iter().map(claim).collect()
}

/// How many agents of so many workers there would be room for on empty nodes.
fn could_fit<'a>(slots: impl IntoIterator<Item = &'a u32>, workers: u32) -> u32 {
    slots.into_iter().map(|slots| slots / workers).sum()
}

/// Whether a job is one that others were told to give way to, once this was ordered.
pub(crate) fn is_promised(job: &Demand, moves: &[Move], waits: &BTreeMap<JobId, Why>) -> bool {
    let is_told = |order: &Move| match order {
        Move::Shrink { for_job, .. } | Move::Evict { for_job, .. } => *for_job == job.job,
        Move::Begin { .. } | Move::Grow { .. } => false,
    };
    waits.get(&job.job) == Some(&Why::Promised) && (job.is_promised || moves.iter().any(is_told))
}

/// What is to be done.
pub(crate) fn schedule(scene: &Scene<'_>) -> Schedule {
    let mut plan = Plan::of(scene);
    plan.begin_minimums();
    plan.grow();
    plan.into_schedule()
}

/// An agent in the plan.
#[derive(Clone, Debug)]
struct Held {
    /// Its number; none of one that is to begin.
    agent: Option<u32>,
    node: usize,
}

/// What could give way.
#[derive(Clone, Debug)]
enum Victim {
    /// The last of a job's agents.
    Agent(usize, Held),
    /// All that are left of them.
    Job(usize, Vec<Held>),
}

/// By which right a job takes slots from other queues. It is judged by all that its own queue holds, with what of that gives way to
/// the job too: else a job could be taken slots by one right, and take them back by the other.
#[derive(Clone, Copy)]
struct Right {
    /// Its queue would stay within its fair share.
    is_fair: bool,
    /// It would stay within its quota.
    is_within_quota: bool,
}

/// How things are to be. Jobs, queues and nodes go by their number in the scene.
struct Plan<'a> {
    scene: &'a Scene<'a>,
    names: Vec<&'a String>,
    queues: Vec<&'a Queue>,
    shares: Vec<Share>,
    /// What each queue has by its quota.
    owed: Vec<Share>,
    /// The queue of each job.
    queue_of: Vec<usize>,
    slots: Vec<u32>,
    /// Slots that are left, or will be once all that stop have stopped.
    free: Vec<u32>,
    /// Slots that are left right now.
    vacant: Vec<u32>,
    /// What each queue is to hold.
    used: Vec<u32>,
    /// What it holds right now, which is more while agents of it are being stopped.
    holds: Vec<u32>,
    /// The agents that each job is to have, of those that stay and those that begin.
    held: Vec<Vec<Held>>,
    /// How many more it has, on nodes that are away.
    away: Vec<u32>,
    /// For whom a job lost agents.
    gives_to: BTreeMap<usize, JobId>,
    waits: BTreeMap<JobId, Why>,
    /// The jobs that found room to begin, in that order.
    turns: Vec<usize>,
}

impl<'a> Plan<'a> {
    fn of(scene: &'a Scene<'a>) -> Plan<'a> {
        let names: Vec<&String> = scene.nodes.keys().collect();
        let slots: Vec<u32> = scene.nodes.values().copied().collect();
        let queues: Vec<(&String, &Queue)> = scene.queues.iter().collect();
        let (total, claims) = (slots.iter().sum(), claims(scene));
        let (shares, owed) = (fair_shares(total, &claims), owed(total, &claims));
        let at = |name: &String| queues.iter().position(|(queue, _)| *queue == name);
        let queue_of =
            scene.jobs.iter().map(|job| at(&job.queue).expect("a job has one of the queues")).collect();
        let (free, vacant, used, holds) =
            (slots.clone(), slots.clone(), vec![0; queues.len()], vec![0; queues.len()]);
        let (queues, held) =
            (queues.into_iter().map(|(_, queue)| queue).collect(), vec![Vec::new(); scene.jobs.len()]);
        let (gives_to, waits) = (BTreeMap::new(), BTreeMap::new());
        let mut plan = Plan {
            scene,
            names,
            queues,
            shares,
            owed,
            queue_of,
            slots,
            free,
            vacant,
            used,
            holds,
            held,
            away: vec![0; scene.jobs.len()],
            gives_to,
            waits,
            turns: Vec::new(),
        };
        for (j, job) in scene.jobs.iter().enumerate() {
            plan.holds[plan.queue_of[j]] += job.agents.len() as u32 * job.workers;
            for placed in &job.agents {
                let node = plan.names.iter().position(|name| **name == placed.node);
                // A node that is away has no slots to give, and what is there counts all the same.
                if let Some(node) = node {
                    plan.vacant[node] = plan.vacant[node].saturating_sub(job.workers);
                }
                if !placed.stops && job.state != State::Ends {
                    plan.used[plan.queue_of[j]] += job.workers;
                    if let Some(node) = node {
                        plan.free[node] = plan.free[node].saturating_sub(job.workers);
                        plan.held[j].push(Held { agent: Some(placed.agent), node });
                    } else {
                        plan.away[j] += 1;
                    }
                }
            }
        }
        plan
    }

    fn job(&self, j: usize) -> &'a Demand {
        &self.scene.jobs[j]
    }

    /// Jobs in a state, in the order in which a queue has them.
    fn in_order(&self, is_meant: impl Fn(&Demand) -> bool) -> Vec<usize> {
        let mut found: Vec<usize> = (0..self.scene.jobs.len()).filter(|&j| is_meant(self.job(j))).collect();
        found.sort_by_key(|&j| (!self.job(j).is_promised, Reverse(self.job(j).priority), self.job(j).job));
        found
    }

    /// Whether `a` comes before `b`: whose queue stays within its quota with what it wants, then whose queue holds less of its share,
    /// then who is older.
    fn precedence(&self, a: (usize, u32), b: (usize, u32)) -> Ordering {
        let key = |(j, agents): (usize, u32)| {
            let q = self.queue_of[j];
            let with = self.used[q].saturating_add(agents.saturating_mul(self.job(j).workers));
            (with > self.owed[q].claims, u64::from(with), u64::from(self.shares[q].keeps))
        };
        let ((a_borrows, a_with, a_share), (b_borrows, b_with, b_share)) = (key(a), key(b));
        let by_part = (a_with * b_share).cmp(&(b_with * a_share));
        let first = |j: usize| !self.job(j).is_promised;
        first(a.0)
            .cmp(&first(b.0))
            .then(a_borrows.cmp(&b_borrows))
            .then(by_part)
            .then(self.job(a.0).job.cmp(&self.job(b.0).job))
    }

    fn begin_minimums(&mut self) {
        // Those that never could aren't anybody's turn.
        let (mut waiting, never): (Vec<usize>, Vec<usize>) = self
            .in_order(|job| job.state == State::Waits)
            .into_iter()
            .partition(|&j| self.could_fit(j) >= self.job(j).least);
        for j in never {
            let Demand { job, least, workers, .. } = self.job(j);
            self.waits
                .insert(*job, Why::NotEnough { agents: *least, workers: *workers, fit: self.could_fit(j) });
        }
        while let Some(first) = self.next_of(&waiting, |job| job.least) {
            waiting.retain(|&j| j != first);
            let job = self.job(first);
            if let Err(why) = self.find_room(first, job.least, true) {
                self.waits.insert(job.job, why);
                let (behind, others): (Vec<usize>, Vec<usize>) =
                    waiting.into_iter().partition(|&j| self.queue_of[j] == self.queue_of[first]);
                let why = Why::Behind { job: job.job };
                self.waits.extend(behind.into_iter().map(|j| (self.scene.jobs[j].job, why.clone())));
                waiting = others;
            } else {
                self.turns.push(first);
            }
        }
    }

    fn could_fit(&self, j: usize) -> u32 {
        could_fit(&self.slots, self.job(j).workers)
    }

    /// The first job of the queue whose turn it is. `jobs` are in the order in which queues have them.
    fn next_of(&self, jobs: &[usize], wants: impl Fn(&Demand) -> u32) -> Option<usize> {
        let mut seen = BTreeSet::new();
        let heads = jobs.iter().copied().filter(|&j| seen.insert(self.queue_of[j]));
        heads.min_by(|&a, &b| self.precedence((a, wants(self.job(a))), (b, wants(self.job(b)))))
    }

    /// The limit of a queue that is in the way of so many more agents of a job.
    fn limit_above(&self, j: usize, agents: u32) -> Option<u32> {
        let q = self.queue_of[j];
        let with = self.used[q].saturating_add(agents.saturating_mul(self.job(j).workers));
        self.queues[q].limit.filter(|limit| with > *limit)
    }

    /// Whether so many more agents of a job fit into what is free, and under its queue's limit.
    fn fits(&self, j: usize, agents: u32) -> bool {
        let room: u32 = self.free.iter().map(|free| free / self.job(j).workers).sum();
        room >= agents && self.limit_above(j, agents).is_none()
    }

    /// Gives a job so many more agents, which fit: where others of it are, and on the node where the least is left.
    fn place(&mut self, j: usize, agents: u32) {
        let workers = self.job(j).workers;
        let mut has_some = vec![false; self.free.len()];
        self.held[j].iter().for_each(|held| has_some[held.node] = true);
        for _ in 0..agents {
            let fitting = (0..self.free.len()).filter(|&node| self.free[node] >= workers);
            let node = fitting.min_by_key(|&node| (!has_some[node], self.free[node], node)).expect("it fits");
            self.free[node] -= workers;
            has_some[node] = true;
            self.held[j].push(Held { agent: None, node });
        }
        self.used[self.queue_of[j]] += agents * workers;
    }

    /// Gives a job so many more agents, in what is free or what others give up.
    fn find_room(&mut self, j: usize, agents: u32, is_beginning: bool) -> Result<(), Why> {
        if self.fits(j, agents) {
            self.place(j, agents);
            return Ok(());
        }
        self.make_room(j, agents, is_beginning)
    }

    /// Has others give way to so many more agents of a job. Nothing has changed where that doesn't help.
    fn make_room(&mut self, j: usize, agents: u32, is_beginning: bool) -> Result<(), Why> {
        let (q, job) = (self.queue_of[j], self.job(j));
        let wants = agents * job.workers;
        let used = self.used[q];
        let why = match self.limit_above(j, agents) {
            Some(limit) => Why::Limit { used, limit },
            None => Why::Full { wants, free: self.free.iter().sum(), used, share: self.shares[q].claims },
        };
        let with = used.saturating_add(wants);
        let right =
            Right { is_fair: with <= self.shares[q].claims, is_within_quota: with <= self.owed[q].claims };
        let mut victims = Vec::new();
        while !self.fits(j, agents) {
            let Some(victim) = self.who_gives_way(j, right, is_beginning) else {
                victims.iter().rev().for_each(|victim| self.put_back(victim));
                return Err(why);
            };
            self.take(&victim);
            victims.push(victim);
        }
        self.spare(j, agents, &victims);
        self.place(j, agents);
        Ok(())
    }

    /// Puts those back that aren't in the way of these agents after all.
    fn spare(&mut self, j: usize, agents: u32, victims: &[Victim]) {
        let mut gone = BTreeSet::new();
        for victim in victims.iter().rev() {
            let v = victim.job();
            // Of a job that is stopped nothing can stay.
            if gone.contains(&v) {
                continue;
            }
            self.put_back(victim);
            if !self.fits(j, agents) {
                self.take(victim);
                self.gives_to.insert(v, self.job(j).job);
                if matches!(victim, Victim::Job(..)) {
                    gone.insert(v);
                }
            }
        }
    }

    fn take(&mut self, victim: &Victim) {
        let v = victim.job();
        let held = victim.held();
        for one in held {
            self.free[one.node] += self.job(v).workers;
        }
        self.used[self.queue_of[v]] -= held.len() as u32 * self.job(v).workers;
        let left = self.held[v].len() - held.len();
        self.held[v].truncate(left);
    }

    fn put_back(&mut self, victim: &Victim) {
        let v = victim.job();
        for one in victim.held() {
            self.free[one.node] -= self.job(v).workers;
        }
        self.used[self.queue_of[v]] += victim.held().len() as u32 * self.job(v).workers;
        self.held[v].extend(victim.held().iter().cloned());
    }

    /// The next to give way to a job, if there is one.
    fn who_gives_way(&self, j: usize, right: Right, is_beginning: bool) -> Option<Victim> {
        let (q, job) = (self.queue_of[j], self.job(j));
        let keeps_share =
            |v: usize, slots: u32| self.used[self.queue_of[v]] - slots >= self.shares[self.queue_of[v]].keeps;
        let borrows = |v: usize| self.used[self.queue_of[v]] > self.owed[self.queue_of[v]].keeps;
        let may_take = |v: usize, slots: u32| {
            self.queue_of[v] != q
                && (right.is_fair && keeps_share(v, slots) || right.is_within_quota && borrows(v))
        };
        // Whose queue keeps its share gives way first; of these, whose has most above it; then who matters least; then who came last.
        let order = |v: usize, slots: u32| {
            let of = self.queue_of[v];
            let above = self.used[of].saturating_sub(self.shares[of].keeps);
            (!keeps_share(v, slots), Reverse(above), self.job(v).priority, Reverse(self.job(v).job))
        };
        let running: Vec<usize> = (0..self.scene.jobs.len())
            .filter(|&v| {
                v != j && matches!(self.job(v).state, State::Runs { .. }) && !self.held[v].is_empty()
            })
            .collect();
        let has_extra = |&v: &usize| self.held[v].len() as u32 > self.job(v).least;
        let extra_may_go = |&v: &usize| {
            let is_own = is_beginning && self.queue_of[v] == q && self.job(v).priority <= job.priority;
            is_own || may_take(v, self.job(v).workers)
        };
        let extras = running.iter().copied().filter(has_extra).filter(extra_may_go);
        let extra = extras.min_by_key(|&v| order(v, self.job(v).workers));
        if let Some(v) = extra {
            return Some(Victim::Agent(
                v,
                self.held[v].last().expect("it has one more than the least").clone(),
            ));
        }
        let all_of = |v: usize| self.held[v].len() as u32 * self.job(v).workers;
        let all_may_go = |&v: &usize| {
            let is_own = self.queue_of[v] == q && self.job(v).priority < job.priority;
            is_own || may_take(v, all_of(v))
        };
        let wholes = running.into_iter().filter(|_| is_beginning).filter(all_may_go);
        let whole = wholes.min_by_key(|&v| order(v, all_of(v)));
        whole.map(|v| Victim::Job(v, self.held[v].clone()))
    }

    fn grow(&mut self) {
        let grows = |job: &Demand| matches!(job.state, State::Runs { can_grow: true });
        let mut growing = self.in_order(grows);
        loop {
            growing.retain(|&j| {
                let held = self.held[j].len() as u32;
                held > 0 && held + self.away[j] < self.job(j).most && !self.gives_to.contains_key(&j)
            });
            let Some(next) = self.next_of(&growing, |_| 1) else { return };
            if self.find_room(next, 1, false).is_err() {
                growing.retain(|&j| j != next);
            }
        }
    }

    fn into_schedule(mut self) -> Schedule {
        let mut moves = Vec::new();
        // Who gives slots back is told first.
        for (j, job) in self.scene.jobs.iter().enumerate() {
            let Some(&for_job) = self.gives_to.get(&j) else { continue };
            let kept: BTreeSet<u32> = self.held[j].iter().filter_map(|held| held.agent).collect();
            let leaves = |placed: &&Placed| {
                !placed.stops && !kept.contains(&placed.agent) && self.scene.nodes.contains_key(&placed.node)
            };
            let agents: Vec<u32> = job.agents.iter().filter(leaves).map(|placed| placed.agent).collect();
            match kept.is_empty() {
                true => moves.push(Move::Evict { job: job.job, for_job }),
                // It may have been about to grow, and not do so now.
                false if agents.is_empty() => {}
                false => moves.push(Move::Shrink { job: job.job, agents, for_job }),
            }
        }
        // Whoever has found room first has what is vacant first.
        let turns = std::mem::take(&mut self.turns);
        let known: BTreeSet<usize> = turns.iter().copied().collect();
        for j in turns.into_iter().chain((0..self.scene.jobs.len()).filter(|j| !known.contains(j))) {
            let job = &self.scene.jobs[j];
            let fresh: Vec<usize> =
                self.held[j].iter().filter(|held| held.agent.is_none()).map(|held| held.node).collect();
            if fresh.is_empty() {
                continue;
            }
            let q = self.queue_of[j];
            let limit = self.queues[q].limit.unwrap_or(u32::MAX);
            let (mut vacant, mut holds) = (self.vacant.clone(), self.holds[q]);
            let mut fits = |node: usize| {
                let fits = vacant[node] >= job.workers && holds + job.workers <= limit;
                if fits {
                    vacant[node] -= job.workers;
                    holds += job.workers;
                }
                fits
            };
            let name = |node: &usize| self.names[*node].clone();
            match job.state {
                // All of them at once, or none.
                State::Waits => {
                    if !fresh.iter().all(|&node| fits(node)) {
                        self.waits.insert(job.job, Why::Promised);
                        // What is free by now is kept for it.
                        for &node in &fresh {
                            self.vacant[node] = self.vacant[node].saturating_sub(job.workers);
                        }
                        continue;
                    }
                    moves.push(Move::Begin { job: job.job, nodes: fresh.iter().map(name).collect() });
                }
                _ => {
                    let now: Vec<usize> = fresh.into_iter().filter(|&node| fits(node)).collect();
                    moves.extend(now.iter().map(|node| Move::Grow { job: job.job, node: name(node) }));
                }
            }
            (self.vacant, self.holds[q]) = (vacant, holds);
        }
        Schedule { moves, waits: self.waits }
    }
}

impl Victim {
    fn job(&self) -> usize {
        match self {
            Victim::Agent(j, _) | Victim::Job(j, _) => *j,
        }
    }

    fn held(&self) -> &[Held] {
        match self {
            Victim::Agent(_, one) => std::slice::from_ref(one),
            Victim::Job(_, all) => all,
        }
    }
}

#[cfg(test)]
mod tests;
