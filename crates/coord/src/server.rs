//! The coordinator's sockets. Every connection has a thread of its own and proves the secret before anything else is read;
//! a stranger is logged, refused, and holds up nobody.

use crate::agents::{Agents, Change, Setting, say};
use crate::fleet::{Fleet, Left, Patience};
use crate::membership::{Decision, Leave, Member, Membership};
use crate::store::Desk;
use crate::succession::RollCall;
use phalanx_job::{AGENT_PURPOSE, Cause, FromWorker, Link, MAX_FRAME, Notice, Terms, ToWorker};
use phalanx_wire::{
    Channel, Deadline, Generation, HandshakeError, Hello, Pass, Rank, Reception, Strangers, read_frame,
    receive,
};
use std::collections::{BTreeSet, HashMap};
use std::io::Result;
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::{Duration, Instant};

/// How long a newcomer may take to prove itself.
const NEWCOMER_LIMIT: Duration = Duration::from_secs(10);
/// How long an agent may wait to be led from here: others may find out later than it that their coordinator is gone.
const STAND_BY_LIMIT: Duration = Duration::from_secs(5);
/// How often to look whether it is.
const LOOK: Duration = Duration::from_millis(5);
/// What the purpose of an agent's connection begins with, whatever its version.
const AGENT: &str = "agent ";
/// Unproven connections at once, above one a rank; and where nobody knows yet how many ranks there will be.
const SURPLUS: usize = 64;
const ROOM: usize = 256;
/// How long a worker may take to take in what it is told, before it is taken for lost: others wait for what comes after that.
const SAY_LIMIT: Duration = Duration::from_secs(5);

/// A running coordinator; dropping it closes its sockets, and the store with all of its connections.
pub struct Coordinator {
    address: SocketAddr,
    shared: Arc<Shared>,
}

struct Shared {
    pass: Pass,
    stop: AtomicBool,
    strangers: Strangers<TcpStream>,
    connections: AtomicU64,
    state: Mutex<State>,
    store: Arc<Desk>,
    /// There in a run of several nodes.
    agents: OnceLock<Arc<Agents>>,
    /// Whether agents are to wait until they are led from here.
    stands_by: bool,
    notify: Box<dyn Fn(Generation, Notice) + Send + Sync>,
}

struct State {
    /// Whose workers are served: it changes when all are started again.
    generation: Generation,
    members: Membership,
    /// Those who have joined, with the rank that they were started with.
    links: HashMap<Member, (Rank, Channel)>,
    /// Whether all members were known to go on in place.
    in_place: bool,
}

impl State {
    fn new(generation: Generation, members: Membership) -> State {
        State { generation, members, links: HashMap::new(), in_place: false }
    }

    /// Whether those of this generation may still come; if not, why.
    fn fence(&self, generation: Generation) -> std::result::Result<(), String> {
        let now = self.generation;
        let over = || format!("generation {generation} is over, {now} has begun");
        if generation == now { Ok(()) } else { Err(over()) }
    }
}

impl Coordinator {
    /// Listens at `address` (port 0 for a free one) for `world_size` ranks; `notify` is called from its threads, with the
    /// generation of the ranks that it is about.
    pub fn serve(
        address: SocketAddr,
        pass: impl Into<Pass>,
        generation: Generation,
        world_size: usize,
        notify: impl Fn(Generation, Notice) + Send + Sync + 'static,
    ) -> Result<Coordinator> {
        Coordinator::open(address, pass.into(), (generation, world_size), false, notify)
    }

    /// Listens for agents that may have to be led from here one day; until then they wait.
    pub fn stand_by(address: SocketAddr, pass: impl Into<Pass>) -> Result<Coordinator> {
        Coordinator::open(address, pass.into(), (Generation(0), 0), true, |_, _| {})
    }

    fn open(
        address: SocketAddr,
        pass: Pass,
        (generation, world_size): (Generation, usize),
        stands_by: bool,
        notify: impl Fn(Generation, Notice) + Send + Sync + 'static,
    ) -> Result<Coordinator> {
        let listener = TcpListener::bind(address)?;
        let address = listener.local_addr()?;
        let state = State::new(generation, Membership::new(generation, world_size));
        let shared = Arc::new(Shared {
            pass,
            stop: AtomicBool::new(false),
            strangers: Strangers::new(if stands_by { ROOM } else { world_size + SURPLUS }),
            connections: AtomicU64::new(0),
            state: Mutex::new(state),
            store: Desk::open()?,
            agents: OnceLock::new(),
            stands_by,
            notify: Box::new(notify),
        });
        let serving = Arc::clone(&shared);
        std::thread::Builder::new()
            .name("phalanx-coord".into())
            .spawn(move || receive(&listener, &serving))?;
        Ok(Coordinator { address, shared })
    }

    /// Takes agents too, from now on: the run has several nodes, whose generations `fleet` decides. What would be told to the
    /// host of the coordinator is told to the agents that it concerns.
    pub fn lead(&self, fleet: Fleet) -> Result<()> {
        self.take(Agents::open(fleet, self.changes())?);
        Ok(())
    }

    /// The same in the place of a coordinator that is gone: for those of its agents that come back, if they are enough.
    pub fn succeed(&self, call: RollCall, terms: Terms, patience: Patience) -> Result<()> {
        self.take(Agents::succeed(call, Setting { terms, patience }, self.changes())?);
        Ok(())
    }

    /// The numbers of nodes that are waited for before their run is led on from here.
    pub fn missing(&self) -> BTreeSet<u32> {
        self.shared.agents.get().map_or_else(BTreeSet::new, |agents| agents.missing())
    }

    /// The agents of these are known to have ended.
    pub fn count_out(&self, ended: BTreeSet<u32>) {
        self.shared.agents.get().into_iter().for_each(|agents| agents.count_out(&ended));
    }

    fn changes(&self) -> impl Fn(Change) + Send + Sync + 'static {
        let shared = Arc::downgrade(&self.shared);
        move |change| {
            if let Some(shared) = shared.upgrade() {
                shared.change(change);
            }
        }
    }

    fn take(&self, agents: Arc<Agents>) {
        assert!(self.shared.agents.set(agents).is_ok(), "a run has one fleet");
    }

    /// Waits until all agents have left, but no longer than so.
    pub fn see_agents_off(&self, limit: Duration) {
        self.shared.agents.get().into_iter().for_each(|agents| agents.wait_until_gone(limit));
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Waits no longer for the worker of the generation at hand that was started with this rank: no other takes its place.
    pub fn do_without(&self, rank: Rank) {
        let generation = self.shared.state().generation;
        self.shared.change(Change::DoWithout(generation, rank.0..rank.0 + 1));
    }

    /// The same while all workers are to end because of that: whoever has something of the run goes on without it until it does.
    pub fn part_from(&self, rank: Rank) {
        let generation = self.shared.state().generation;
        self.shared.change(Change::PartFrom(generation, rank.0..rank.0 + 1));
    }

    /// Waits for the ranks of another generation from now on, all of which are started anew. The store stays; whoever is left of
    /// the one before is let go, and whoever comes late for it is refused.
    pub fn begin(&self, generation: Generation, world_size: usize) {
        self.shared.begin(generation, world_size);
    }
}

impl Drop for Coordinator {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        self.shared.store.close();
        self.shared.agents.get().into_iter().for_each(|agents| agents.close());
        // A connection to itself wakes the thread that accepts; if none can be made, nothing is listening any more.
        let _ = TcpStream::connect_timeout(&self.address, Duration::from_secs(1));
    }
}

impl Shared {
    fn begin(&self, generation: Generation, world_size: usize) {
        let mut state = self.state();
        // Memberships may have been more than generations, where workers went on in place.
        let first = generation.max(state.members.next_generation());
        let before =
            std::mem::replace(&mut *state, State::new(generation, Membership::new(first, world_size)));
        for (_, stream) in before.links.values() {
            // A connection that is gone already needs no closing.
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    /// Takes leave of those of the generation, if it is the one at hand, whom its members part from.
    fn part(&self, generation: Generation, from: impl FnOnce(&mut Membership) -> (Vec<Member>, Decision)) {
        let mut state = self.state();
        if state.generation == generation {
            let (lost, decision) = from(&mut state.members);
            self.lose(&mut state, &lost, decision);
        }
    }

    /// Does with the workers what the fleet has decided about their nodes.
    fn change(&self, change: Change) {
        match change {
            Change::Begin(generation, world_size) => self.begin(generation, world_size),
            Change::Expect(generation, seats) => {
                let mut state = self.state();
                if state.generation == generation {
                    state.members.expect(seats);
                }
            }
            Change::DoWithout(generation, seats) => {
                self.part(generation, |members| members.do_without(seats))
            }
            Change::PartFrom(generation, seats) => self.part(generation, |members| members.part_from(seats)),
            Change::Forget(generation, rank) => self.part(generation, |members| members.end(rank)),
            Change::Resume(generation, Left { membership, seats, live, in_place }) => {
                let mut state = self.state();
                let members = match membership.filter(|_| in_place) {
                    Some((first, workers)) => Membership::resume(first, &workers, seats, &live),
                    None => Membership::of(generation, seats),
                };
                *state = State::new(generation, members);
                state.in_place = in_place;
            }
        }
    }

    /// These are lost, and this follows from it.
    fn lose(&self, state: &mut State, lost: &[Member], decision: Decision) {
        for (_, link) in lost.iter().filter_map(|member| state.links.remove(member)) {
            // A connection that is gone already needs no closing.
            let _ = link.shutdown(Shutdown::Both);
        }
        self.follow(state, decision);
    }

    /// Tells whoever started the workers.
    fn notice(&self, generation: Generation, notice: Notice) {
        match self.agents.get() {
            Some(agents) => agents.notice(generation, notice),
            None => (self.notify)(generation, notice),
        }
    }

    /// Who leads the agents, once that is somebody here.
    fn leads(&self) -> Option<&Arc<Agents>> {
        let until = Instant::now() + STAND_BY_LIMIT;
        while self.agents.get().is_none() && !self.stop.load(Ordering::Relaxed) && Instant::now() < until {
            std::thread::sleep(LOOK);
        }
        self.agents.get()
    }

    /// The connection of a worker has ended, and so has the worker where nobody would tell.
    fn forget(&self, member: Member) {
        let mut state = self.state();
        if state.links.remove(&member).is_some() {
            let members = &mut state.members;
            let decision =
                if self.agents.get().is_some() { members.cut(member) } else { members.leave(member) };
            self.follow(&mut state, decision);
        }
    }

    /// Does what was decided. Whatever is told to the host is told in the order in which it came to be, so with the state held.
    fn follow(&self, state: &mut State, decision: Decision) {
        let generation = state.generation;
        let in_place = state.members.is_in_place();
        if std::mem::replace(&mut state.in_place, in_place) != in_place {
            self.notice(generation, Notice::InPlace(in_place));
        }
        match decision {
            Decision::Wait { .. } | Decision::Refuse { .. } => {}
            Decision::Recall { members, leave } => {
                let word = if leave == Leave::Now { ToWorker::Loss } else { ToWorker::Change };
                let links = members.iter().filter_map(|member| state.links.get(member));
                links.for_each(|(_, link)| say(link, &word));
            }
            Decision::Begin { mut ranks, roster } => {
                ranks.sort_by_key(|(_, rank)| *rank);
                let workers = ranks.iter().map(|(member, _)| state.links[member].0).collect();
                // Told first, so that nothing a rank does afterwards can be told before it.
                self.notice(generation, Notice::Begun { generation: roster.generation, workers });
                for (member, rank) in ranks {
                    say(&state.links[&member].1, &ToWorker::Roster { rank, roster: roster.clone() });
                }
                let next = state.members.settle();
                self.follow(state, next);
            }
        }
    }

    /// The state is whole between any two statements that could panic.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

/// Who has proven itself.
enum Newcomer {
    Agent,
    /// A worker of this rank and generation.
    Worker(Rank, Generation),
}

impl Reception for Shared {
    type Guest = (Channel, Newcomer);

    const THREAD: &'static str = "phalanx-member";

    fn strangers(&self) -> &Strangers<TcpStream> {
        &self.strangers
    }

    fn is_closed(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    fn prove(&self, stream: TcpStream) -> std::result::Result<(Channel, Newcomer), HandshakeError> {
        let generation = self.state().generation;
        let mut is_agent = false;
        // The coordinator is no rank; it speaks as rank 0 of the same generation.
        let answer = |theirs: &Hello| {
            is_agent = theirs.purpose.starts_with(AGENT) && (self.stands_by || self.agents.get().is_some());
            let (purpose, generation) = match is_agent {
                true => (AGENT_PURPOSE, theirs.generation),
                false => (Link::purpose(), generation),
            };
            Hello { purpose: purpose.into(), rank: Rank(0), generation }
        };
        let deadline = Deadline::after(NEWCOMER_LIMIT);
        let (channel, peer) = Channel::accept(stream, &self.pass, &deadline, answer)?;
        channel.set_write_timeout(Some(SAY_LIMIT))?;
        let newcomer = if is_agent { Newcomer::Agent } else { Newcomer::Worker(peer.rank, generation) };
        Ok((channel, newcomer))
    }

    fn serve(&self, (stream, newcomer): (Channel, Newcomer)) -> std::result::Result<(), String> {
        match newcomer {
            Newcomer::Agent => match self.leads() {
                Some(agents) => agents.serve(&stream),
                // Those whom it came to be led by are led by another, or it came too early, and will come again.
                None => Ok(()),
            },
            Newcomer::Worker(rank, generation) => {
                let member = Member(self.connections.fetch_add(1, Ordering::Relaxed));
                let result = serve(&stream, member, rank, generation, self);
                self.forget(member);
                result
            }
        }
    }
}

/// Serves one worker to the end of its connection; an error is why it was refused.
fn serve(
    mut stream: &Channel,
    member: Member,
    rank: Rank,
    generation: Generation,
    shared: &Shared,
) -> std::result::Result<(), String> {
    // Who is refused says why, and whoever started it tells people.
    let refuse = |reason: String| {
        tracing::debug!("rank {rank} is refused: {reason}");
        say(stream, &ToWorker::Refused { reason });
        let _ = stream.shutdown(Shutdown::Both);
        Ok(())
    };
    // It may end as soon as it was heard, and its agent is to know why.
    let failed = |message: String, cause| {
        let failed = Notice::Failed { rank, message, cause };
        match shared.agents.get() {
            Some(agents) => agents.tell(generation, failed),
            None => (shared.notify)(generation, failed),
        }
    };
    loop {
        // Whether that is the end of the worker is seen better by whoever started it.
        let Ok(frame) = read_frame(&mut stream, MAX_FRAME) else { return Ok(()) };
        match serde_json::from_slice(&frame).map_err(|error| format!("rank {rank}: {error}"))? {
            FromWorker::Join { .. } if shared.state().links.contains_key(&member) => {
                return refuse("it has joined already".into());
            }
            FromWorker::Join { address } => {
                let mut state = shared.state();
                if let Err(reason) = state.fence(generation) {
                    return refuse(reason);
                }
                let decision = state.members.join(member, rank, address);
                if let Decision::Refuse { reason } = decision {
                    return refuse(reason);
                }
                state.links.insert(member, (rank, stream.clone()));
                shared.follow(&mut state, decision);
            }
            FromWorker::Return { .. } if shared.state().links.contains_key(&member) => {
                return refuse("it has joined already".into());
            }
            FromWorker::Return { address, generation: before, rank: held, with, silent } => {
                let mut state = shared.state();
                if let Err(reason) = state.fence(generation) {
                    return refuse(reason);
                }
                let seats = state.members.seats_of(&silent);
                let decision = state.members.come_back(member, rank, address, (before, held), with);
                if let Decision::Refuse { reason } = decision {
                    return refuse(reason);
                }
                state.links.insert(member, (rank, stream.clone()));
                seats.into_iter().for_each(|rank| shared.notice(generation, Notice::Silent { rank }));
                shared.follow(&mut state, decision);
            }
            FromWorker::GoesOn { with } => {
                let mut state = shared.state();
                let decision = state.members.goes_on(member, with);
                shared.follow(&mut state, decision);
            }
            FromWorker::Rejoin { silent } => {
                let mut state = shared.state();
                let seats = state.members.seats_of(&silent);
                let decision = state.members.rejoin(member);
                if let Decision::Refuse { reason } = decision {
                    // One of those it was with doesn't go on, so it can't either, and can't say so on a connection that ends here.
                    drop(state);
                    failed(reason.clone(), Cause::Refused);
                    return refuse(reason);
                }
                seats.into_iter().for_each(|rank| shared.notice(generation, Notice::Silent { rank }));
                shared.follow(&mut state, decision);
            }
            FromWorker::WhoIsMissing => {
                let state = shared.state();
                // Whoever doesn't wait any more has the roster on its way.
                if state.members.waits(member) {
                    say(stream, &ToWorker::Missing { missing: state.members.missing() });
                }
            }
            FromWorker::OpenStore if shared.state().links.contains_key(&member) => {
                return refuse("a connection that has joined can't be one to the store".into());
            }
            FromWorker::OpenStore => {
                shared.state().fence(generation)?;
                say(stream, &ToWorker::StoreOpen);
                return shared.store.serve(stream, rank);
            }
            FromWorker::Fail { message, cause } => {
                failed(message, cause);
                say(stream, &ToWorker::Heard);
            }
        }
    }
}
