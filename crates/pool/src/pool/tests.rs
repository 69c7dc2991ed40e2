use super::*;
use crate::message::{Here, Running, ShownState};
use crate::queues::Queue;
use phalanx_job::Work;
use proptest::prelude::*;

/// A pool, nodes that do what they are told, and what was written down.
struct World {
    pool: Pool,
    queues: Queues,
    now: Now,
    links: u64,
    nodes: BTreeMap<String, SimNode>,
    journal: Vec<Entry>,
    said: Vec<String>,
}

/// A node: what it runs, and whether it can be heard.
#[derive(Default)]
struct SimNode {
    process: u32,
    slots: u32,
    link: Option<u64>,
    running: BTreeMap<AgentId, Running>,
    ended: BTreeMap<AgentId, Ended>,
    /// What it was told and hasn't done yet, in order.
    told: Vec<ToNode>,
}

fn spec(queue: &str, least: u32, most: u32) -> JobSpec {
    JobSpec {
        queue: queue.into(),
        name: "job".into(),
        priority: 0,
        least,
        most,
        workers: 1,
        folder: "/f".into(),
        out: "runs/%j".into(),
        work: Work::Program(vec!["x".into()]),
        ending: Ending::Terminate,
        max_restarts: 0,
        variables: Vec::new(),
    }
}

fn world(nodes: &[(&str, u32)]) -> World {
    let queue = |quota| Queue { quota, limit: None, weight: 1 };
    let queues = Queues::from([("a".to_owned(), queue(1)), ("b".to_owned(), queue(1))]);
    let now = Now { at: Instant::now(), ms: 0 };
    let pool = Pool::restore(queues.clone(), Vec::new(), now);
    let (nodes_of, journal, said) = (BTreeMap::new(), Vec::new(), Vec::new());
    let mut world = World { pool, queues, now, links: 0, nodes: nodes_of, journal, said };
    for (name, slots) in nodes {
        world.nodes.insert((*name).into(), SimNode { slots: *slots, ..SimNode::default() });
        world.connect(name);
    }
    world
}

impl World {
    fn follow(&mut self, orders: Vec<Order>) {
        for order in orders {
            match order {
                Order::Write(entry) => self.journal.push(entry),
                Order::Say(line) => self.said.push(line),
                Order::Tell(link, message) => {
                    if let Some(node) = self.nodes.values_mut().find(|node| node.link == Some(link)) {
                        node.told.push(message);
                    }
                }
                Order::Close(link) => {
                    self.nodes
                        .values_mut()
                        .filter(|node| node.link == Some(link))
                        .for_each(|node| node.link = None);
                }
            }
        }
        self.check();
    }

    /// Q-SLOT and Q-ONCE.
    fn check(&self) {
        for (name, node) in &self.nodes {
            let mut taken = BTreeSet::new();
            for running in node.running.values() {
                for slot in &running.slots {
                    assert!(
                        taken.insert(*slot) && *slot < node.slots,
                        "slot {slot} of {name}: {:?}",
                        node.running
                    );
                }
            }
        }
        let mut attempts: BTreeMap<JobId, u32> = BTreeMap::new();
        for node in self.nodes.values().filter(|node| node.link.is_some()) {
            let is_stopped = |id: &AgentId| {
                node.running[id].stops
                    || node
                        .told
                        .iter()
                        .any(|told| matches!(told, ToNode::Stop { id: told, .. } if told == id))
            };
            for id in node.running.keys().filter(|id| !is_stopped(id)) {
                let before = attempts.insert(id.job, id.attempt);
                assert!(before.is_none_or(|before| before == id.attempt), "job {} runs twice", id.job);
            }
        }
    }

    fn heed(&mut self, event: Event) {
        let orders = self.pool.heed(self.now, event);
        self.follow(orders);
    }

    fn node(&mut self, name: &str) -> &mut SimNode {
        self.nodes.get_mut(name).unwrap()
    }

    fn connect(&mut self, name: &str) {
        self.links += 1;
        let link = self.links;
        let node = self.node(name);
        (node.link, node.told) = (Some(link), Vec::new());
        let here = Here {
            name: name.into(),
            process: node.process.to_string(),
            address: "10.0.0.1".into(),
            slots: node.slots,
            leaves: false,
            running: node.running.values().cloned().collect(),
            ended: node.ended.values().cloned().collect(),
        };
        self.heed(Event::Said(link, FromNode::Here(here)));
    }

    fn cut(&mut self, name: &str) {
        let node = self.node(name);
        node.told.clear();
        if let Some(link) = node.link.take() {
            self.heed(Event::Gone(link));
        }
    }

    /// Its process dies, and its agents with it.
    fn kill(&mut self, name: &str) {
        let node = self.node(name);
        node.process += 1;
        (node.running, node.ended) = (BTreeMap::new(), BTreeMap::new());
        self.cut(name);
    }

    /// The pool dies and begins again from the first lines of its journal.
    fn begin_again(&mut self, lines: usize) {
        self.journal.truncate(lines);
        self.pool = Pool::restore(self.queues.clone(), Pool::of_use(self.journal.clone()), self.now);
        self.nodes.values_mut().for_each(|node| (node.link, node.told) = (None, Vec::new()));
    }

    fn submit(&mut self, spec: JobSpec) -> JobId {
        let (answer, orders) = self.pool.ask(self.now, Ask::Submit(Box::new(spec)));
        self.follow(orders);
        let Answer::Submitted { job } = answer else { panic!("{answer:?}") };
        job
    }

    fn cancel(&mut self, job: JobId) -> Answer {
        let (answer, orders) = self.pool.ask(self.now, Ask::Cancel { job });
        self.follow(orders);
        answer
    }

    fn pass(&mut self, time: Duration) {
        self.now = Now { at: self.now.at + time, ms: self.now.ms + time.as_millis() as u64 };
        self.heed(Event::Tick);
    }

    /// A node does the first thing that it was told; whether there was one.
    fn act(&mut self, name: &str) -> bool {
        let node = self.node(name);
        let Some(link) = node.link.filter(|_| !node.told.is_empty()) else { return false };
        match node.told.remove(0) {
            ToNode::Start(start) => {
                let (id, slots) = (start.id, start.slots);
                assert_eq!(slots.len() as u32, start.spec.workers);
                assert_eq!(start.endpoint.is_none(), id.agent == 0, "the first is met, the others meet it");
                let endpoint = start.endpoint.unwrap_or_else(|| format!("{name}:1"));
                let running = Running { id, slots, endpoint: endpoint.clone(), stops: false };
                node.running.insert(id, running);
                self.heed(Event::Said(link, FromNode::Began { id, endpoint }));
            }
            ToNode::Stop { id, .. } => {
                let Some(running) = node.running.get_mut(&id) else { return true };
                running.stops = true;
                self.end(id, 143);
            }
            ToNode::Noted { id } => drop(node.ended.remove(&id)),
            ToNode::Beat | ToNode::Refused { .. } => {}
        }
        true
    }

    /// All nodes do what they were told, until nobody is told anything.
    fn settle(&mut self) {
        let names: Vec<String> = self.nodes.keys().cloned().collect();
        for _ in 0..1000 {
            if names.iter().filter(|name| self.act(name)).count() == 0 {
                return;
            }
        }
        let (last, demands) = (&self.said[self.said.len().saturating_sub(4)..], self.pool.demands());
        panic!("it never comes to rest: {last:?} {:?} {demands:?}", self.pool.slots());
    }

    /// An agent ends.
    fn end(&mut self, id: AgentId, code: i32) {
        let node = self.nodes.values_mut().find(|node| node.running.contains_key(&id)).unwrap();
        let stops = node.running.remove(&id).unwrap().stops;
        let ended = Ended { id, code: Some(code), words: None, stops };
        node.ended.insert(id, ended.clone());
        if let Some(link) = node.link {
            self.heed(Event::Said(link, FromNode::Ended(ended)));
        }
    }

    /// The agents of a job that run.
    fn agents(&self, job: JobId) -> Vec<AgentId> {
        let all = self.nodes.values().flat_map(|node| node.running.keys());
        let mut of_it: Vec<AgentId> = all.filter(|id| id.job == job).copied().collect();
        of_it.sort();
        of_it
    }

    fn end_all(&mut self, job: JobId, code: i32) {
        self.agents(job).into_iter().for_each(|id| self.end(id, code));
        self.settle();
    }

    fn state(&self, job: JobId) -> ShownState {
        self.pool.shown(Some(job)).jobs.into_iter().find(|known| known.job == job).unwrap().state
    }

    fn ended(&self, job: JobId) -> Option<End> {
        match self.state(job) {
            ShownState::Ended { how } => Some(how),
            _ => None,
        }
    }
}

fn canceled(before: Option<End>) -> Answer {
    Answer::Canceled { before }
}

fn agent(job: JobId, attempt: u32, agent: u32) -> AgentId {
    AgentId { job, attempt, agent }
}

#[test]
fn the_first_agent_is_met_by_the_others() {
    let mut world = world(&[("n1", 1), ("n2", 1)]);
    let job = world.submit(spec("a", 2, 2));
    assert_eq!((world.node("n1").told.len(), world.node("n2").told.len()), (1, 0));
    world.settle();
    assert_eq!(world.agents(job), [agent(job, 1, 0), agent(job, 1, 1)]);
    assert_eq!(world.node("n2").running[&agent(job, 1, 1)].endpoint, "n1:1");
    world.end(agent(job, 1, 1), 0);
    world.settle();
    // Its run is over, so nobody else comes to it.
    assert_eq!(world.agents(job), [agent(job, 1, 0)]);
    world.end_all(job, 0);
    assert_eq!(world.ended(job), Some(End::Done));
    assert!(world.nodes.values().all(|node| node.ended.is_empty()), "each end is noted");
}

#[test]
fn a_job_that_makes_room_goes_on_later() {
    let mut world = world(&[("n1", 2)]);
    let (large, small) = (world.submit(spec("a", 2, 2)), spec("b", 1, 1));
    world.settle();
    let small = world.submit(small);
    world.settle();
    assert_eq!((world.agents(large), world.agents(small).len()), (vec![], 1));
    assert!(matches!(world.state(large), ShownState::Waits { why: Why::Full { .. } }));
    world.end_all(small, 0);
    assert_eq!(world.agents(large), [agent(large, 2, 0), agent(large, 2, 1)]);
    world.end_all(large, 0);
    assert_eq!(world.ended(large), Some(End::Done));
}

#[test]
fn a_job_that_can_shrink_goes_on() {
    let mut world = world(&[("n1", 2)]);
    let elastic = world.submit(spec("a", 1, 2));
    world.settle();
    assert_eq!(world.agents(elastic).len(), 2);
    let other = world.submit(spec("b", 1, 1));
    world.settle();
    assert_eq!(world.agents(elastic), [agent(elastic, 1, 0)]);
    world.end_all(other, 0);
    assert_eq!(world.agents(elastic), [agent(elastic, 1, 0), agent(elastic, 1, 2)]);
    // One that crashes is replaced, as long as the run goes on.
    world.end(agent(elastic, 1, 2), 137);
    world.settle();
    assert_eq!(world.agents(elastic), [agent(elastic, 1, 0)]);
    assert_eq!(world.pool.wake_at(), Some(world.now.at + Duration::from_secs(2)));
    world.pass(Duration::from_secs(2));
    world.settle();
    assert_eq!(world.agents(elastic), [agent(elastic, 1, 0), agent(elastic, 1, 3)]);
    world.end_all(elastic, 0);
    assert_eq!(world.ended(elastic), Some(End::Done));
}

#[test]
fn codes_say_what_becomes_of_a_job() {
    for (code, want) in
        [(0, Some(End::Done)), (3, Some(End::Failed { code: Some(3), words: None })), (75, None)]
    {
        let mut world = world(&[("n1", 1)]);
        let job = world.submit(spec("a", 1, 1));
        world.settle();
        world.end_all(job, code);
        assert_eq!(world.ended(job), want, "{code}");
        assert_eq!(world.agents(job).len(), usize::from(want.is_none()), "{code}");
    }
    // One that does nothing but begin again isn't let do so for ever.
    let mut world = world(&[("n1", 1)]);
    let job = world.submit(spec("a", 1, 1));
    world.settle();
    (0..=MOST_DRAINS).for_each(|_| world.end_all(job, 75));
    assert_eq!(world.ended(job), Some(End::Failed { code: Some(75), words: None }));
}

#[test]
fn others_of_a_job_that_fails_have_some_time_to_end() {
    let mut world = world(&[("n1", 2)]);
    let job = world.submit(spec("a", 2, 2));
    world.settle();
    world.end(agent(job, 1, 1), 3);
    world.settle();
    assert_eq!(world.agents(job), [agent(job, 1, 0)]);
    assert_eq!(world.pool.wake_at(), Some(world.now.at + SHORT));
    world.pass(SHORT);
    world.settle();
    assert_eq!(world.ended(job), Some(End::Failed { code: Some(3), words: None }));
}

#[test]
fn a_node_that_is_lost_takes_its_agents_with_it() {
    let mut world = world(&[("n1", 2), ("n2", 2)]);
    let (fixed, elastic) = (world.submit(spec("a", 2, 2)), world.submit(spec("b", 1, 2)));
    world.settle();
    world.kill("n1");
    world.settle();
    // It may only be away.
    assert!(matches!(world.state(fixed), ShownState::Runs { .. }));
    world.pass(PATIENCE);
    world.settle();
    assert!(!world.pool.nodes.contains_key("n1"));
    assert!(
        matches!(world.state(elastic), ShownState::Runs { nodes } if nodes == ["n2"] || nodes == ["n2", "n2"])
    );
    for losses in 2..=MOST_LOSSES + 1 {
        world.connect("n1");
        world.settle();
        assert_eq!(world.agents(fixed).len(), 2, "after {losses}");
        world.kill("n1");
        world.kill("n2");
        world.connect("n2");
        world.settle();
        world.pass(PATIENCE);
        world.settle();
    }
    let words = format!("nodes were lost under it {} times", MOST_LOSSES + 1);
    assert_eq!(world.ended(fixed), Some(End::Failed { code: None, words: Some(words) }));
}

#[test]
fn a_node_that_was_only_away_goes_on() {
    let mut world = world(&[("n1", 2)]);
    let (job, other) = (world.submit(spec("a", 1, 2)), spec("b", 1, 1));
    world.settle();
    world.cut("n1");
    let other = world.submit(other);
    world.pass(PATIENCE - Duration::from_secs(1));
    world.end(agent(job, 1, 1), 9);
    world.connect("n1");
    assert_eq!(world.agents(job), [agent(job, 1, 0)]);
    world.settle();
    assert_eq!(world.agents(other).len(), 1);
    // One that was to stop while its node was away is told when that is back.
    world.end_all(other, 0);
    world.cut("n1");
    world.cancel(job);
    world.connect("n1");
    world.settle();
    assert_eq!((world.ended(job), world.agents(job)), (Some(End::Canceled), vec![]));
    assert!(world.node("n1").ended.is_empty());
}

#[test]
fn a_node_that_leaves_is_not_a_failure() {
    let mut world = world(&[("n1", 1), ("n2", 1)]);
    let (fixed, elastic) = (world.submit(spec("a", 1, 1)), world.submit(spec("b", 1, 1)));
    world.settle();
    let link = world.node("n1").link.unwrap();
    world.heed(Event::Said(link, FromNode::Leaves));
    assert!(matches!(world.state(fixed), ShownState::Ends { .. }));
    // It asks its agents by itself.
    world.node("n1").running.values_mut().for_each(|running| running.stops = true);
    world.end_all(fixed, 143);
    assert!(matches!(world.state(fixed), ShownState::Waits { .. }));
    assert!(matches!(world.state(elastic), ShownState::Runs { .. }));
    world.cut("n1");
    assert!(!world.pool.nodes.contains_key("n1"));
    world.end_all(elastic, 0);
    assert_eq!(world.agents(fixed), [agent(fixed, 2, 0)]);
}

#[test]
fn what_is_not_wanted_ends_whatever_it_does() {
    let mut world = world(&[("n1", 1)]);
    let (runs, waits) = (world.submit(spec("a", 1, 1)), world.submit(spec("a", 1, 1)));
    world.settle();
    assert_eq!(world.cancel(waits), canceled(None));
    assert_eq!(world.ended(waits), Some(End::Canceled));
    assert_eq!(world.cancel(runs), canceled(None));
    assert_eq!(world.cancel(runs), canceled(None));
    world.settle();
    assert_eq!((world.ended(runs), world.agents(runs)), (Some(End::Canceled), vec![]));
    assert_eq!(world.cancel(runs), canceled(Some(End::Canceled)));
    assert!(matches!(world.cancel(JobId(9)), Answer::Refused { reason } if reason.contains("no job 9")));
}

#[test]
fn strangers_among_nodes_are_refused() {
    let mut world = world(&[("n1", 1)]);
    let mut check = |here: Here, want: &str| {
        let orders = world.pool.heed(world.now, Event::Said(99, FromNode::Here(here)));
        let refused = orders.iter().any(
            |order| matches!(order, Order::Tell(99, ToNode::Refused { reason }) if reason.contains(want)),
        );
        assert!(refused && orders.contains(&Order::Close(99)), "{want}: {orders:?}");
    };
    let here = |name: &str, address: &str, slots| Here {
        name: name.into(),
        process: "other".into(),
        address: address.into(),
        slots,
        leaves: false,
        running: Vec::new(),
        ended: Vec::new(),
    };
    check(here("n1", "10.0.0.2", 1), "another node n1");
    check(here("n2", "127.0.0.1", 1), "can't reach each other");
    check(here("n2", "10.0.0.2", 0), "it has 0 slots");
    check(here("n2", "10.0.0.2", u32::MAX), "nodes have 1 to 4096");
    check(here("n2", "\u{1b}[31m", 1), "a name is up to");
    check(here("a b", "10.0.0.2", 1), "a name is up to");
    let orders = world.pool.heed(world.now, Event::Said(98, FromNode::Leaves));
    assert_eq!(orders, [Order::Close(98)]);
}

#[test]
fn jobs_that_never_could_run_are_refused() {
    let world = world(&[]);
    let check = |spec: JobSpec, want: &str| {
        let why = spec.check(&world.queues).unwrap_err();
        assert!(why.contains(want), "{want} in: {why}");
    };
    check(spec("c", 1, 1), "no queue c\nhint: queues are a, b");
    check(spec("a", 0, 1), "that is none");
    check(spec("a", 2, 1), "that is none");
    check(JobSpec { workers: 0, ..spec("a", 1, 1) }, "that is none");
    check(JobSpec { name: "x y".into(), ..spec("a", 1, 1) }, "a name is up to");
    check(JobSpec { work: Work::Train(Vec::new()), ..spec("a", 1, 1) }, "nothing to run");
    check(JobSpec { variables: vec![("X".into(), "x".repeat(70_000))], ..spec("a", 1, 1) }, "70");
    check(JobSpec { most: u32::MAX, workers: u32::MAX, ..spec("a", 1, 1) }, "65536");
    let queues = Queues::from([("a".to_owned(), Queue { quota: 0, limit: Some(3), weight: 1 })]);
    assert!(
        JobSpec { workers: 2, ..spec("a", 2, 2) }
            .check(&queues)
            .unwrap_err()
            .contains("never holds more than 3")
    );
}

#[test]
fn a_pool_that_begins_again_knows_what_it_told() {
    let mut whole = world(&[("n1", 2)]);
    let first = whole.submit(spec("a", 1, 2));
    whole.settle();
    let second = whole.submit(spec("b", 1, 1));
    whole.settle();
    let third = whole.submit(spec("b", 1, 1));
    whole.end_all(second, 0);
    whole.cancel(first);
    whole.settle();
    whole.end_all(third, 4);
    let ends = [End::Canceled, End::Done, End::Failed { code: Some(4), words: None }];
    assert_eq!([first, second, third].map(|job| whole.ended(job).unwrap()), ends);
    for lines in 0..=whole.journal.len() {
        let mut world = world(&[("n1", 2)]);
        world.journal = whole.journal.clone();
        world.begin_again(lines);
        let told = whole.journal[..lines]
            .iter()
            .filter(|entry| matches!(entry.what, What::Submitted { .. }))
            .count();
        assert_eq!(world.pool.jobs.len(), told, "after {lines} lines");
        world.connect("n1");
        world.pass(SETTLING);
        world.settle();
        for _ in 0..3 {
            [first, second, third].into_iter().for_each(|job| world.end_all(job, 0));
        }
        assert!(
            world.pool.jobs.keys().all(|job| world.ended(*job).is_some()),
            "after {lines} lines: {:#?}",
            world.said
        );
    }
}

#[test]
fn agents_go_on_while_the_pool_is_away() {
    let mut world = world(&[("n1", 1), ("n2", 1)]);
    let job = world.submit(spec("a", 2, 2));
    world.settle();
    let waiting = world.submit(spec("b", 2, 2));
    world.begin_again(usize::MAX);
    assert!(matches!(world.state(waiting), ShownState::Waits { why: Why::Settling }));
    world.connect("n1");
    world.settle();
    world.connect("n2");
    world.pass(SETTLING);
    world.settle();
    assert_eq!(world.agents(job), [agent(job, 1, 0), agent(job, 1, 1)]);
    // A node that doesn't come back in time is lost, and what runs there of an earlier attempt is stopped when it is back.
    world.begin_again(usize::MAX);
    world.connect("n1");
    world.pass(SETTLING);
    world.settle();
    assert!(matches!(world.state(job), ShownState::Waits { .. }));
    world.connect("n2");
    world.settle();
    assert_eq!(world.agents(job), [agent(job, 2, 0), agent(job, 2, 1)]);
    world.end_all(job, 0);
    assert_eq!(world.agents(waiting).len(), 2);
}

#[test]
fn what_is_over_for_long_is_forgotten_and_its_number_is_not() {
    let mut world = world(&[("n1", 1)]);
    let jobs: Vec<JobId> = (0..REMEMBERED + 10)
        .map(|_| {
            let job = world.submit(spec("a", 1, 1));
            world.settle();
            world.end_all(job, 0);
            job
        })
        .collect();
    assert_eq!(world.pool.jobs.len(), REMEMBERED);
    world.begin_again(usize::MAX);
    assert_eq!(world.pool.jobs.len(), REMEMBERED);
    world.connect("n1");
    let next = world.submit(spec("a", 1, 1));
    assert_eq!(next.0, jobs.last().unwrap().0 + 1);
}

#[test]
fn one_that_was_canceled_stays_so_wherever_the_journal_was_cut() {
    let mut world = world(&[("n1", 1)]);
    let first = world.submit(spec("a", 1, 1));
    world.settle();
    let waits = world.submit(spec("a", 1, 1));
    world.cancel(waits);
    world.end_all(first, 0);
    let cut = world.journal.iter().position(|entry| entry.what == What::Canceled).unwrap() + 1;
    world.begin_again(cut);
    assert_eq!(world.ended(waits), Some(End::Canceled));
}

#[test]
fn a_number_that_was_given_twice_is_no_slot_twice() {
    let mut world = world(&[("n1", 1), ("n2", 1)]);
    let job = world.submit(spec("a", 1, 2));
    world.settle();
    world.begin_again(usize::MAX);
    world.nodes.insert("n3".into(), SimNode { slots: 1, ..SimNode::default() });
    world.connect("n1");
    world.connect("n3");
    world.settle();
    assert_eq!(world.node("n3").running.len(), 1);
    world.connect("n2");
    // What it has is another's number, and is stopped before its slot is somebody else's.
    assert!(!world.pool.slots().contains_key("n2") || world.pool.slots()["n2"] == 0);
    let other = world.submit(spec("b", 1, 1));
    world.settle();
    assert_eq!((world.agents(other).len(), world.agents(job).len()), (1, 2));
}

#[test]
fn an_agent_that_never_began_is_lost_with_its_node() {
    let mut world = world(&[("n1", 1), ("n2", 1)]);
    let job = world.submit(spec("a", 2, 2));
    // The first hasn't begun yet.
    world.cut("n2");
    world.pass(PATIENCE);
    world.settle();
    assert!(matches!(world.state(job), ShownState::Waits { .. }), "{:?}", world.said);
    world.connect("n2");
    world.settle();
    assert_eq!(world.agents(job), [agent(job, 2, 0), agent(job, 2, 1)]);
}

#[test]
fn no_more_agents_than_were_wanted_and_none_away_are_told() {
    let mut world = world(&[("n1", 1), ("n2", 1)]);
    let job = world.submit(spec("a", 1, 2));
    world.settle();
    world.nodes.insert("n3".into(), SimNode { slots: 1, ..SimNode::default() });
    world.connect("n3");
    world.cut("n2");
    world.settle();
    assert_eq!(world.agents(job).len(), 2, "one is only away");
    world.nodes.insert("n4".into(), SimNode { slots: 1, ..SimNode::default() });
    let elastic = world.submit(spec("b", 1, 3));
    world.settle();
    assert_eq!(world.agents(elastic).len(), 1);
    world.cut("n3");
    world.connect("n2");
    assert!(world.said.iter().all(|line| !line.contains("gives")), "{:?}", world.said);
}

#[test]
fn a_run_whose_first_agent_ended_well_is_not_begun_again_by_a_new_pool() {
    let mut world = world(&[("n1", 2)]);
    let job = world.submit(spec("a", 2, 2));
    world.settle();
    world.end(agent(job, 1, 0), 0);
    world.settle();
    world.begin_again(usize::MAX);
    world.connect("n1");
    world.settle();
    world.pass(SETTLING);
    world.settle();
    assert_eq!(world.agents(job), [agent(job, 1, 1)]);
    world.end_all(job, 0);
    assert_eq!(world.ended(job), Some(End::Done));
    assert!(world.node("n1").ended.is_empty());
}

#[test]
fn what_fails_beside_an_attempt_that_was_lost_is_tried_again_later() {
    let mut world = world(&[("n1", 1)]);
    let job = world.submit(spec("a", 1, 1));
    world.settle();
    world.nodes.insert("n2".into(), SimNode { slots: 1, ..SimNode::default() });
    world.connect("n2");
    // It can't be heard, and goes on.
    world.cut("n1");
    world.pass(PATIENCE);
    world.settle();
    assert_eq!(world.node("n2").running.keys().copied().collect::<Vec<_>>(), [agent(job, 2, 0)]);
    world.end(agent(job, 2, 0), 1);
    assert!(matches!(world.state(job), ShownState::Waits { why: Why::Resting }));
    world.connect("n1");
    world.settle();
    assert_eq!(world.agents(job), []);
    world.pass(3 * PATIENCE);
    world.settle();
    assert_eq!(world.agents(job), [agent(job, 3, 0)]);
    world.end_all(job, 0);
    assert_eq!(world.ended(job), Some(End::Done));
}

#[test]
fn a_node_that_can_start_nothing_is_given_nothing_for_a_while() {
    let mut world = world(&[("n1", 1)]);
    let job = world.submit(spec("a", 1, 1));
    let told = std::mem::take(&mut world.node("n1").told);
    assert!(matches!(&told[..], [ToNode::Start(_)]));
    let link = world.node("n1").link.unwrap();
    let ended = Ended { id: agent(job, 1, 0), code: None, words: Some("no memory".into()), stops: false };
    world.heed(Event::Said(link, FromNode::Ended(ended)));
    assert!(matches!(world.state(job), ShownState::Waits { why: Why::NotEnough { .. } }));
    assert!(world.said.iter().any(|line| line.contains("no memory")), "{:?}", world.said);
    world.pass(SHUNNED);
    world.settle();
    assert_eq!(world.agents(job), [agent(job, 2, 0)]);
}

#[test]
fn the_end_of_a_long_job_is_remembered() {
    let mut world = world(&[("n1", 2)]);
    let long = world.submit(spec("a", 1, 1));
    world.settle();
    for _ in 0..REMEMBERED + 5 {
        let job = world.submit(spec("b", 1, 1));
        world.settle();
        world.end_all(job, 0);
    }
    world.end_all(long, 0);
    assert_eq!(world.ended(long), Some(End::Done));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]
    #[test]
    fn whatever_breaks_all_jobs_end(acts in proptest::collection::vec((0u32..12, 0usize..8, 1u32..3), 1..80)) {
        let mut world = world(&[("n1", 2), ("n2", 3)]);
        for (act, which, more) in acts {
            let name = ["n1", "n2"][which % 2];
            let jobs: Vec<JobId> = world.pool.jobs.keys().copied().collect();
            match act {
                0 | 1 => drop(world.submit(spec(["a", "b"][which % 2], more, more + which as u32 % 3))),
                2 => world.cut(name),
                3 => world.kill(name),
                4 | 5 if world.node(name).link.is_none() => world.connect(name),
                6 => world.pass(Duration::from_secs(which as u64 * 4)),
                7 => world.begin_again(usize::MAX),
                8 if !jobs.is_empty() => drop(world.cancel(jobs[which % jobs.len()])),
                9 => {
                    let running: Vec<AgentId> = jobs.iter().flat_map(|job| world.agents(*job)).collect();
                    if !running.is_empty() {
                        world.end(running[which % running.len()], [0, 1, 75, 137][which % 4]);
                    }
                }
                _ => drop(world.act(name)),
            }
        }
        for name in ["n1", "n2"] {
            if world.node(name).link.is_none() {
                world.connect(name);
            }
        }
        world.settle();
        world.pass(SETTLING);
        for _ in 0..100 {
            world.settle();
            let jobs: Vec<JobId> = world.pool.jobs.keys().copied().collect();
            if jobs.iter().all(|job| world.ended(*job).is_some()) {
                break;
            }
            jobs.into_iter().for_each(|job| world.end_all(job, 0));
            world.pass(PATIENCE * 4);
        }
        for job in world.pool.jobs.keys() {
            prop_assert!(world.ended(*job).is_some(), "job {job}: {:?} {:#?}", world.state(*job), world.said);
        }
        prop_assert!(world.nodes.values().all(|node| node.running.is_empty()));
    }
}
