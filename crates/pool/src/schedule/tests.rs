use super::*;
use proptest::prelude::*;

/// Queues and nodes, and jobs that come and go; what is ordered happens at once, but for stops, which the next round sees.
struct World {
    queues: Queues,
    nodes: BTreeMap<String, u32>,
    jobs: Vec<Demand>,
    waits: BTreeMap<JobId, Why>,
    /// Whether agents stop one after the other, and not all at once.
    is_slow: bool,
}

fn world(queues: &[(&str, u32, Option<u32>)], nodes: &[u32]) -> World {
    let queue = |&(name, quota, limit): &(&str, u32, Option<u32>)| {
        (name.to_owned(), Queue { quota, limit, weight: 1 })
    };
    let node = |(i, slots): (usize, &u32)| (format!("n{i}"), *slots);
    World {
        queues: queues.iter().map(queue).collect(),
        nodes: nodes.iter().enumerate().map(node).collect(),
        jobs: Vec::new(),
        waits: BTreeMap::new(),
        is_slow: false,
    }
}

impl World {
    /// A job of agents with a slot each, and its number.
    fn submit(&mut self, queue: &str, least: u32, most: u32) -> JobId {
        self.submit_wide(queue, least, most, 1, 0)
    }

    fn submit_wide(&mut self, queue: &str, least: u32, most: u32, workers: u32, priority: i32) -> JobId {
        let job = JobId(self.jobs.last().map_or(1, |job| job.job.0 + 1));
        let (queue, agents, state) = (queue.into(), Vec::new(), State::Waits);
        let is_promised = false;
        self.jobs.push(Demand { job, queue, priority, workers, least, most, agents, state, is_promised });
        job
    }

    fn at(&mut self, job: JobId) -> &mut Demand {
        self.jobs.iter_mut().find(|known| known.job == job).unwrap()
    }

    fn end(&mut self, job: JobId) {
        self.jobs.retain(|known| known.job != job);
    }

    fn plan(&self) -> Schedule {
        schedule(&Scene { queues: &self.queues, nodes: &self.nodes, jobs: &self.jobs })
    }

    /// Does what is ordered, and gives it.
    fn step(&mut self) -> Vec<Move> {
        // One that was told to stop has done so by now, or all have.
        let mut left = if self.is_slow { 1 } else { usize::MAX };
        for job in &mut self.jobs {
            job.agents.retain(|placed| {
                let ends = placed.stops && left > 0;
                left -= usize::from(ends);
                !ends
            });
            if job.state == State::Ends && job.agents.is_empty() {
                job.state = State::Waits;
            }
        }
        let Schedule { moves, waits } = self.plan();
        for job in &mut self.jobs {
            job.is_promised = crate::schedule::is_promised(job, &moves, &waits);
        }
        self.waits = waits;
        for order in &moves {
            match order.clone() {
                Move::Begin { job, nodes } => {
                    let job = self.at(job);
                    assert_eq!((job.state, nodes.len() as u32), (State::Waits, job.least));
                    let agents = nodes.into_iter().enumerate();
                    job.agents =
                        agents.map(|(i, node)| Placed { agent: i as u32, node, stops: false }).collect();
                    job.state = State::Runs { can_grow: true };
                }
                Move::Grow { job, node } => {
                    let job = self.at(job);
                    let agent = job.agents.iter().map(|placed| placed.agent + 1).max().unwrap();
                    job.agents.push(Placed { agent, node, stops: false });
                }
                Move::Shrink { job, agents, .. } => {
                    for placed in
                        self.at(job).agents.iter_mut().filter(|placed| agents.contains(&placed.agent))
                    {
                        placed.stops = true;
                    }
                }
                Move::Evict { job, .. } => {
                    let job = self.at(job);
                    job.state = State::Ends;
                    job.agents.iter_mut().for_each(|placed| placed.stops = true);
                }
            }
        }
        self.check();
        moves
    }

    /// Until nothing more happens; all that was ordered.
    fn settle(&mut self) -> Vec<Move> {
        let mut all = Vec::new();
        for _ in 0..200 {
            let moves = self.step();
            let stops = self.jobs.iter().any(|job| job.agents.iter().any(|placed| placed.stops));
            if moves.is_empty() && !stops {
                return all;
            }
            all.extend(moves);
        }
        let again: Vec<Vec<Move>> = (0..4).map(|_| self.step()).collect();
        panic!("it never comes to rest: {again:?} {:?} {:?} {:?}", self.queues, self.nodes, self.jobs);
    }

    /// The slots that each job has, with those that it is giving back.
    fn held(&self) -> Vec<u32> {
        self.jobs.iter().map(|job| job.agents.len() as u32 * job.workers).collect()
    }

    /// What holds whatever happens.
    fn check(&self) {
        for (node, slots) in &self.nodes {
            let on_it = self
                .jobs
                .iter()
                .map(|job| job.workers * job.agents.iter().filter(|p| p.node == *node).count() as u32);
            assert!(on_it.sum::<u32>() <= *slots, "{node} is full: {:?}", self.jobs);
        }
        for (name, queue) in &self.queues {
            let used: u32 = self
                .jobs
                .iter()
                .zip(self.held())
                .filter(|(job, _)| job.queue == *name)
                .map(|(_, held)| held)
                .sum();
            assert!(queue.limit.is_none_or(|limit| used <= limit), "{name} holds {used}");
        }
        for job in self.jobs.iter().filter(|job| matches!(job.state, State::Runs { .. })) {
            let stay = job.agents.iter().filter(|placed| !placed.stops).count() as u32;
            assert!((job.least..=job.most).contains(&stay), "{job:?}");
        }
    }
}

#[test]
fn what_nobody_asks_for_is_lent_and_given_back() {
    // The scenario of Run:ai's manual: of two that borrow, the one goes whose queue keeps its quota without it.
    let mut world = world(&[("a", 2, None), ("b", 2, None)], &[2, 2]);
    let (small, _large) = (world.submit("a", 1, 1), world.submit_wide("a", 1, 1, 2, 0));
    world.submit("b", 1, 1);
    world.settle();
    assert_eq!(world.held(), [1, 2, 1]);
    let last = world.submit("b", 1, 1);
    assert_eq!(world.step(), [Move::Evict { job: small, for_job: last }]);
    assert_eq!(world.waits, BTreeMap::from([(last, Why::Promised)]));
    world.settle();
    assert_eq!(world.held(), [0, 2, 1, 1]);
    assert_eq!(world.waits[&small], Why::Full { wants: 1, free: 0, used: 2, share: 2 });
}

#[test]
fn jobs_that_can_shrink_do_and_nobody_is_ended() {
    let mut world = world(&[("a", 2, None), ("b", 2, None)], &[4]);
    let first = world.submit("a", 1, 4);
    world.settle();
    assert_eq!(world.held(), [4]);
    let second = world.submit("b", 1, 4);
    let moves = world.settle();
    assert_eq!(world.held(), [2, 2]);
    assert!(!moves.iter().any(|order| matches!(order, Move::Evict { .. })), "{moves:?}");
    world.end(second);
    world.settle();
    assert_eq!(world.held(), [4]);
    // In its own queue a minimum comes before what is beyond one, and ages don't matter then.
    world.submit("a", 3, 3);
    world.settle();
    assert_eq!(world.held(), [1, 3]);
    assert!(world.jobs[0].job == first);
}

#[test]
fn priority_counts_within_a_queue_and_age_after_it() {
    let mut world = world(&[("a", 2, None)], &[2]);
    let low = world.submit_wide("a", 2, 2, 1, 0);
    world.settle();
    let (later, high) = (world.submit_wide("a", 1, 1, 1, 0), world.submit_wide("a", 1, 1, 1, 5));
    assert_eq!(world.step(), [Move::Evict { job: low, for_job: high }]);
    world.settle();
    // The one that was stopped is the oldest, but doesn't fit, and isn't passed by those that came later.
    assert_eq!(world.held(), [0, 0, 1]);
    assert_eq!(
        world.waits,
        BTreeMap::from([
            (low, Why::Full { wants: 2, free: 1, used: 1, share: 2 }),
            (later, Why::Behind { job: low }),
        ])
    );
}

#[test]
fn agents_of_several_slots_lie_on_one_node() {
    let mut world = world(&[("a", 0, None)], &[3, 3]);
    let wide = world.submit_wide("a", 2, 3, 2, 0);
    world.submit("a", 2, 2);
    assert_eq!(world.step()[0], Move::Begin { job: wide, nodes: vec!["n0".into(), "n1".into()] });
    assert_eq!(world.held(), [4, 2]);
    let never = world.submit_wide("a", 1, 1, 4, 0);
    let also = world.submit_wide("a", 3, 3, 2, 0);
    world.settle();
    assert_eq!(world.waits[&never], Why::NotEnough { agents: 1, workers: 4, fit: 0 });
    assert_eq!(world.waits[&also], Why::NotEnough { agents: 3, workers: 2, fit: 2 });
}

#[test]
fn limits_hold_and_a_queue_at_its_limit_makes_room_for_itself() {
    let mut world = world(&[("a", 1, Some(2)), ("b", 0, None)], &[4]);
    world.submit("a", 1, 4);
    world.settle();
    assert_eq!(world.held(), [2]);
    world.submit("a", 1, 1);
    world.settle();
    assert_eq!(world.held(), [1, 1]);
    let third = world.submit("a", 1, 1);
    world.settle();
    assert_eq!(world.waits, BTreeMap::from([(third, Why::Limit { used: 2, limit: 2 })]));
}

#[test]
fn whoever_is_not_in_the_way_stays() {
    // Both extras of the queue that holds too much could go; one has to, on the node where two slots are wanted.
    let mut world = world(&[("a", 0, None), ("b", 2, None)], &[2, 2]);
    let one = world.submit("a", 1, 2);
    world.settle();
    let two = world.submit("a", 1, 2);
    world.settle();
    assert_eq!(world.held(), [2, 2]);
    world.submit_wide("b", 1, 1, 2, 0);
    let moves = world.settle();
    let held = world.held();
    assert_eq!(held.iter().sum::<u32>(), 4, "{moves:?}");
    assert_eq!(held[2], 2);
    let evicted: Vec<&Move> = moves.iter().filter(|order| matches!(order, Move::Evict { .. })).collect();
    assert!(evicted.len() <= 1, "{one} {two} {moves:?}");
}

#[test]
fn who_was_promised_slots_has_them() {
    // Without that, the jobs of b would make room for that of a, and for each other, for ever.
    let mut world = world(&[("a", 4, None), ("b", 2, None)], &[3, 2, 1]);
    world.submit_wide("b", 1, 1, 1, 0);
    world.submit_wide("b", 1, 1, 1, 1);
    world.settle();
    let owed = world.submit_wide("a", 2, 2, 2, 0);
    world.submit_wide("b", 4, 4, 1, 1);
    world.settle();
    assert_eq!(world.held()[owed.0 as usize - 1], 4, "{:?}", world.jobs);
}

#[test]
fn a_job_that_never_could_run_takes_nobodys_share() {
    let mut world = world(&[("a", 0, None), ("b", 0, None), ("c", 0, None)], &[9]);
    world.submit("a", 1, 1);
    world.submit("c", 1, 9);
    world.settle();
    world.submit("a", 100, 100);
    world.submit("b", 4, 4);
    world.settle();
    assert_eq!(world.held(), [1, 4, 0, 4]);
}

#[test]
fn nodes_that_are_away_give_nothing_and_take_nothing() {
    let mut world = world(&[("a", 0, None)], &[1, 1]);
    world.submit("a", 1, 2);
    world.settle();
    assert_eq!(world.held(), [2]);
    world.nodes.remove("n1");
    assert_eq!(world.plan(), Schedule::default());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]
    #[test]
    fn whatever_comes_and_goes_it_comes_to_rest(
        queues in proptest::collection::vec((0u32..9, 0u32..8, 1u32..5), 1..5),
        nodes in proptest::collection::vec(1u32..9, 1..6),
        is_slow: bool,
        acts in proptest::collection::vec((0u32..9, 0usize..5, 1u32..5, 0u32..9, 1u32..5, 0i32..4), 1..40),
    ) {
        let mut world = world(&[], &nodes);
        world.is_slow = is_slow;
        for (i, (quota, above, weight)) in queues.iter().enumerate() {
            let limit = (*above > 0).then_some(quota + above);
            world.queues.insert(format!("q{i}"), Queue { quota: *quota, limit, weight: *weight });
        }
        for (act, q, least, more, workers, priority) in acts {
            match act {
                0..6 => drop(world.submit_wide(&format!("q{}", q % queues.len()), least, least + more, workers, priority)),
                6 | 7 if !world.jobs.is_empty() => drop(world.jobs.remove(q % world.jobs.len())),
                _ => {}
            }
            let before = world.jobs.len();
            if act % 3 == 0 {
                world.settle();
                // Nobody waits beside slots that it could have, unless another of its queue comes first.
                let free: BTreeMap<&String, u32> = world.nodes.iter().map(|(node, slots)| {
                    let taken = |job: &Demand| job.workers * job.agents.iter().filter(|p| p.node == **node).count() as u32;
                    (node, slots - world.jobs.iter().map(taken).sum::<u32>())
                }).collect();
                for (job, why) in &world.waits {
                    let job = world.jobs.iter().find(|known| known.job == *job).unwrap();
                    let fit: u32 = free.values().map(|free| free / job.workers).sum();
                    prop_assert!(fit < job.least || matches!(why, Why::Behind { .. } | Why::Limit { .. }), "{job:?}: {why:?}");
                }
                let waiting = world.jobs.iter().filter(|job| job.state == State::Waits).count();
                prop_assert_eq!(waiting, world.waits.len());
            } else {
                world.step();
            }
            prop_assert_eq!(before, world.jobs.len());
        }
    }
}
