//! One node of a run of several: it starts the workers that the coordinator tells it to, stops them when it is told to, and
//! tells how they ended. What follows from that is decided by the coordinator, which one of the agents hosts.

mod meet;
mod search;
mod standstill;
mod succeed;
mod told;

use crate::crew::Crew;
use crate::given::{Given, descriptor, pass, whereabouts};
use crate::news::News;
use crate::nodes::Nodes;
use crate::report::{Outcome, Report};
use crate::restart::EndReason;
use crate::spec::{LaunchError, LaunchSpec, MAX_GRACE};
use crate::supervise::replace;
use crate::watch::Happened;
use crate::worker::Ties;
use meet::{Met, Place, meet};
use phalanx_coord::Coordinator;
use phalanx_job::{
    AGENT_BEAT, AgentLink, Claim, DRAINED, End, Error, FromAgent, Node, Seat, Standing, Terms, ToAgent,
    Whereabouts, WorkerFailure, clock_ms, host_name,
};
use phalanx_wire::{Generation, Pass, Rank};
pub(crate) use search::Found;
use standstill::Beats;
use std::collections::BTreeSet;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsRawFd, RawFd};
use std::sync::mpsc::{RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// How long workers have once the coordinator is gone: others may be told to go on without them soon.
const ALONE: Duration = Duration::from_millis(1500);
/// How long the host of the coordinator waits for the others to hear that the run is over.
const FAREWELL: Duration = Duration::from_secs(2);

/// An agent and its connection to the coordinator.
struct Agent<'a> {
    crew: Crew<'a>,
    nodes: &'a Nodes,
    terms: Terms,
    link: Arc<AgentLink>,
    pass: Pass,
    /// The coordinator, if this agent hosts it.
    coordinator: Option<Coordinator>,
    /// What becomes one, should this agent have to.
    standby: Option<Coordinator>,
    /// How the run stood when that was told last, and when that was.
    standing: Option<(Standing, Instant)>,
    node: Node,
    /// Its number in the last generation that it was in, and which that was; or as one that stands by.
    place: Option<(u32, Generation)>,
    /// The descriptor that holds the secret.
    secret: RawFd,
    /// Where its workers read where the coordinator is, and the descriptor of that.
    whereabouts: Whereabouts,
    whereabouts_fd: RawFd,
    /// As long as it is there, the coordinator hears beats.
    beats: Option<SyncSender<()>>,
    /// When they were.
    beaten: Arc<Beats>,
    /// As long as it is there, nodes that come to the endpoint are told where the run is led from.
    beacon: Option<SyncSender<()>>,
    /// What tells them, if this agent was the first there.
    guide: Option<Coordinator>,
    /// Kept for the program until it needs it.
    port: Option<TcpListener>,
    /// The signal that asked this agent to end.
    asked: Option<i32>,
    /// Lost workers of which the coordinator hasn't said yet what follows.
    undecided: Vec<Rank>,
    /// Whether workers are being stopped for a reason that is only told later.
    stops_early: bool,
    /// Workers that have ended well.
    finished: Vec<Rank>,
    /// Lost workers of this generation in whose place no others are started.
    given_up: Vec<Rank>,
    /// What went wrong first among its workers, if that was said.
    failure: Option<WorkerFailure>,
    /// What was said of the end of its workers, as long as there are no others.
    ended: Option<FromAgent>,
    /// The agents that would lead next and could be reached, and those that were called.
    reached: Arc<Mutex<BTreeSet<SocketAddr>>>,
    scouted: BTreeSet<SocketAddr>,
    /// Nobody else writes to the logs of who leads.
    claim: Option<Claim>,
    /// Whether it has had a part in the run: workers, or a number among those that stand by.
    has_part: bool,
    /// Since when those that it was sent to can't be reached.
    unreached: Option<Instant>,
}

/// What follows for a node without workers.
enum Next {
    Begin(Seat),
    Over(Over),
}

/// Why a node has no part in the run any more.
enum Over {
    /// The run is over.
    Ended(End),
    /// This signal has asked it to leave the run, which goes on or not.
    Left(i32),
    /// The coordinator is gone.
    Alone(Error),
}

/// Runs this node's part. Returns when the run is over, or this node has no part in it any more.
pub(crate) fn run(mut crew: Crew<'_>, nodes: &Nodes) -> Result<Outcome, LaunchError> {
    let secret = nodes.secret.read(&crew.spec.run_id)?;
    let (secret_file, pass) = (descriptor(&secret)?, pass(crew.spec, &secret)?);
    let terms = terms(crew.spec, nodes);
    let place = match meet(&mut crew, nodes, &terms, &pass)? {
        Met::At(place) => place,
        Met::Asked(signal) => return Ok(told::outcome(crew, 128 + signal, EndReason::Left)),
    };
    let (kept, port) = reserve_port(crew.spec, &place.link)?;
    let node = Node {
        host: host_name(),
        address: match &nodes.address {
            Some(address) => address.clone(),
            None => place.link.local_ip()?.to_string(),
        },
        port,
        standby: place.standby(),
        leads: place.coordinator.is_some(),
        workers: crew.spec.workers as u32,
        role: crew.spec.role.clone(),
        node_rank: nodes.node_rank,
        spare: nodes.spare,
        terms: terms.clone(),
        clock_ms: None,
    };
    let Place { link, coordinator, standby, claim } = place;
    let (whereabouts, whereabouts_fd) = whereabouts(link.coordinator())?;
    let mut agent = Agent {
        crew,
        nodes,
        terms,
        link: Arc::new(link),
        pass,
        coordinator,
        standby,
        standing: None,
        node,
        place: None,
        secret: secret_file.as_raw_fd(),
        whereabouts,
        whereabouts_fd,
        beats: None,
        beaten: Arc::new(Beats::new(nodes.patience.silence)),
        beacon: None,
        guide: None,
        port: kept,
        asked: None,
        undecided: Vec::new(),
        failure: None,
        ended: None,
        stops_early: false,
        finished: Vec::new(),
        given_up: Vec::new(),
        reached: Arc::default(),
        scouted: BTreeSet::new(),
        claim,
        has_part: false,
        unreached: None,
    };
    let over = agent.take_part();
    agent.link.close();
    if let Some(coordinator) = &agent.coordinator
        && !matches!(over, Ok(Over::Left(_)))
    {
        coordinator.see_agents_off(FAREWELL);
    }
    let max_restarts = agent.terms.max_restarts;
    let is_lost_to_all = agent.has_part && nodes.need_each_other();
    let outcome = match over? {
        Over::Left(signal) => return Ok(told::outcome(agent.crew, 128 + signal, EndReason::Left)),
        Over::Ended(end) => told::ended(agent.crew, end, max_restarts),
        Over::Alone(error) => told::outcome(agent.crew, 1, EndReason::NoCoordinator(error.to_string())),
    };
    Ok(match is_lost_to_all && !outcome.reason.is_of_the_run() {
        // Those that this node was parted from have too few nodes as well, and end in the same way.
        true => Outcome { exit_code: DRAINED.into(), ..outcome },
        false => outcome,
    })
}

/// What this node takes the run to be.
fn terms(spec: &LaunchSpec, nodes: &Nodes) -> Terms {
    let Nodes { least, most, spares, program, arguments, .. } = nodes.clone();
    let max_restarts = u32::try_from(spec.max_restarts).unwrap_or(u32::MAX);
    Terms { least, most, spares, max_restarts, program, arguments }
}

impl Agent<'_> {
    /// Joins, and goes from generation to generation.
    fn take_part(&mut self) -> Result<Over, LaunchError> {
        self.link.say(&FromAgent::Join(self.newcomer()))?;
        self.beats = Some(self.keep_in_touch()?);
        loop {
            let seat = match self.wait()? {
                Next::Begin(seat) => seat,
                Next::Over(over) => return Ok(over),
            };
            if let Some(error) = self.play(seat)?
                && let Some(over) = self.join_anew(error)?
            {
                return Ok(over);
            }
            if let Some(signal) = self.asked.filter(|_| self.may_go()) {
                return Ok(Over::Left(signal));
            }
        }
    }

    /// Starts the thread that hears the coordinator, and one that beats until what is given is dropped.
    fn keep_in_touch(&self) -> Result<SyncSender<()>, LaunchError> {
        let (link, news) = (Arc::clone(&self.link), self.crew.sender.clone());
        let hear = move || {
            loop {
                let alone = |error| News::Alone(link.coordinator(), error);
                let heard = link.hear().map_or_else(alone, News::Fleet);
                let is_last = matches!(heard, News::Alone(..));
                if news.send(heard).is_err() || is_last {
                    return;
                }
            }
        };
        let failed = || LaunchError::system("a thread for the coordinator");
        std::thread::Builder::new().name("phalanx-orders".into()).spawn(hear).map_err(failed())?;
        let (stop, stopped) = sync_channel::<()>(0);
        let (link, beaten) = (Arc::clone(&self.link), Arc::clone(&self.beaten));
        let beat = move || {
            while stopped.recv_timeout(AGENT_BEAT) == Err(RecvTimeoutError::Timeout) {
                beaten.beat();
                // One that can't be told is gone, which is found out by hearing.
                let _ = link.say(&FromAgent::Beat);
            }
        };
        std::thread::Builder::new().name("phalanx-beats".into()).spawn(beat).map_err(failed())?;
        Ok(stop)
    }

    /// Waits, without workers, for what follows.
    fn wait(&mut self) -> Result<Next, LaunchError> {
        loop {
            // The coordinator's silence is what this wait ends with, if nothing else.
            let news = self.crew.news.recv().expect("this agent holds the other end");
            let mut led = Ok(());
            match news {
                News::Fleet(ToAgent::Begin(seat)) => return Ok(Next::Begin(seat)),
                News::Fleet(ToAgent::End(end)) => return Ok(Next::Over(Over::Ended(end))),
                News::Fleet(ToAgent::Refused { reason }) if self.has_part => {
                    let address = self.link.coordinator();
                    return Ok(Next::Over(Over::Alone(Error::Broken { address, reason })));
                }
                News::Fleet(ToAgent::Refused { reason }) => return Err(LaunchError::Refused { reason }),
                News::Fleet(ToAgent::Told { words }) => self.crew.tell(Report::Told { words }),
                News::Fleet(ToAgent::Standing(standing)) => self.heed_standing(*standing),
                News::Fleet(ToAgent::Elsewhere { address }) => match self.go_elsewhere(address) {
                    Err(error) if self.is_lost_elsewhere() => return Ok(Next::Over(Over::Alone(error))),
                    gone => led = gone,
                },
                News::Fleet(ToAgent::Farewell) => {
                    if let Some(signal) = self.asked {
                        return Ok(Next::Over(Over::Left(signal)));
                    }
                }
                News::Alone(from, error) if from == self.link.coordinator() => led = self.search(error),
                News::Found(found, standby) => led = self.heed_search(found, standby),
                News::Signal(signal) if self.asked.is_some() => return Ok(Next::Over(Over::Left(signal))),
                News::Signal(signal) => {
                    self.crew.watch.asked();
                    self.ask(signal);
                    if self.may_go() {
                        return Ok(Next::Over(Over::Left(signal)));
                    }
                }
                other => drop(self.crew.watch.heed(other)),
            }
            if let Err(lost) = led
                && let Some(over) = self.begin_again(lost)?
            {
                return Ok(Next::Over(over));
            }
        }
    }

    /// This node as it tells of itself where it comes, by its clock of now.
    fn newcomer(&self) -> Node {
        Node { clock_ms: (!self.nodes.unchecked).then(clock_ms), ..self.node.clone() }
    }

    /// Tells the coordinator that a signal asks this node to end.
    fn ask(&mut self, signal: i32) {
        self.asked = Some(signal);
        // Who can't be told will find out.
        let _ = self.link.say(&self.wish(signal));
    }

    /// What a signal makes this node say.
    fn wish(&self, signal: i32) -> FromAgent {
        if self.may_leave() { FromAgent::Leave { signal } } else { FromAgent::Quit { signal } }
    }

    /// Whether the run could go on without this node.
    fn may_leave(&self) -> bool {
        self.terms.least < self.terms.most || self.terms.spares > 0
    }

    /// Whether it may go without being told so: nobody waits for what it says.
    fn may_go(&self) -> bool {
        self.may_leave() && self.coordinator.is_none()
    }

    /// What was said to the coordinator and is to be said to the next, which doesn't know whether it was heeded.
    fn unheeded(&self) -> Vec<FromAgent> {
        let Some((_, generation)) = self.place else { return Vec::new() };
        let lost = self.undecided.iter().filter_map(|rank| self.crew.watch.failure_of(*rank));
        let lost = lost.map(|failure| FromAgent::Lost { generation, failure });
        let failed = self.failure.clone().map(|failure| FromAgent::Failed { generation, failure });
        let wish = self.asked.map(|signal| self.wish(signal));
        let finished = self.finished.iter().map(|rank| FromAgent::Finished { generation, rank: *rank });
        let given_up = self.given_up.iter().map(|rank| FromAgent::GivenUp { generation, rank: *rank });
        finished.chain(given_up).chain(lost).chain(failed).chain(self.ended.clone()).chain(wish).collect()
    }

    /// Runs the workers of a generation to their end, and tells how that was. An error is how the coordinator was lost.
    fn play(&mut self, seat: Seat) -> Result<Option<Error>, LaunchError> {
        let generation = seat.generation;
        self.crew.watch.begin(generation);
        self.has_part = true;
        self.undecided.clear();
        self.finished.clear();
        self.given_up.clear();
        self.stops_early = false;
        (self.place, self.failure, self.ended) = (Some((seat.node, generation)), None, None);
        // From now on it is the program's.
        self.port = None;
        let (run_dir, logs) = (self.crew.run_dir.clone(), self.crew.logs.clone());
        let mut given = Given {
            spec: self.crew.spec,
            coordinator: self.link.coordinator(),
            whereabouts: Some(self.whereabouts_fd),
            secret: self.secret,
            run_dir: &run_dir,
            logs: &logs,
            generation,
            folder: generation,
            restarts: seat.restarts as usize,
            replaces: false,
            threads: self.crew.threads,
            seat,
        };
        let mut alone = None;
        match self.crew.start_all(&given) {
            Ok(started) => {
                if let Some(signal) = self.asked {
                    // The coordinator said so before it knew.
                    self.crew.watch.obey(Some(signal), MAX_GRACE);
                }
                while !self.crew.watch.all_ended() || !self.undecided.is_empty() {
                    alone = alone.or(self.heed_next(&mut given, &started.ties)?);
                    if self.failure.is_none() && self.crew.watch.has_failed() {
                        self.failure = self.crew.watch.worker_failure();
                        if let Some(failure) = self.failure.clone() {
                            let _ = self.link.say(&FromAgent::Failed { generation, failure });
                        }
                    }
                    self.give_up_lost(generation);
                }
                self.failure = self.crew.watch.worker_failure();
            }
            Err(error) => self.failure = Some(not_started(&given, &error)),
        }
        if alone.is_none() {
            let (kept, port) = reserve_port(self.crew.spec, &self.link)?;
            (self.port, self.node.port) = (kept, port);
            let (failure, drained) = (self.failure.take(), self.crew.watch.has_drained());
            let ended = FromAgent::Ended { generation, failure, drained, port };
            let _ = self.link.say(&ended);
            self.ended = Some(ended);
        }
        Ok(alone)
    }

    /// Tells of those for which nobody comes, since this node's workers are to end, so that others don't wait for them until then.
    fn give_up_lost(&mut self, generation: Generation) {
        for rank in self.crew.watch.lost_while_stopping() {
            if !self.given_up.contains(&rank) {
                self.given_up.push(rank);
                // Who can't be told will find out.
                let _ = self.link.say(&FromAgent::GivenUp { generation, rank });
            }
        }
    }

    /// Nobody leads the run on whom this node could go on under.
    fn be_alone(&mut self, error: Error) -> Error {
        self.undecided.clear();
        let watch = &mut self.crew.watch;
        if watch.is_in_place() {
            watch.release(None);
        } else {
            watch.obey(None, ALONE);
        }
        self.crew.tell(Report::Ordered { why: error.to_string() });
        error
    }

    /// Does what is to be done about what happens next while workers run; an error is how the coordinator was lost.
    fn heed_next(&mut self, given: &mut Given<'_>, ties: &Ties) -> Result<Option<Error>, LaunchError> {
        let (watch, own) = (&mut self.crew.watch, given.generation);
        let happened = match self.crew.news.recv_timeout(watch.patience()) {
            Ok(News::Alone(from, error)) if from == self.link.coordinator() => {
                let Err(error) = self.search(error) else {
                    if self.all_stop() && !self.crew.watch.is_stopping() {
                        self.stops_early = true;
                        self.crew.watch.obey(None, ALONE);
                    }
                    return Ok(None);
                };
                return Ok(Some(self.be_alone(error)));
            }
            Ok(News::Found(found, standby)) => {
                let Err(error) = self.heed_search(found, standby) else {
                    given.coordinator = self.link.coordinator();
                    return Ok(None);
                };
                return Ok(Some(self.be_alone(error)));
            }
            Ok(News::Fleet(ToAgent::Standing(standing))) => {
                self.heed_standing(*standing);
                None
            }
            Err(_) => watch.lose_patience().map(Happened::Told),
            Ok(News::Fleet(ToAgent::Stop { generation, why, signal })) if generation == own => {
                self.undecided.clear();
                let is_known = watch.is_stopping() && !std::mem::take(&mut self.stops_early);
                watch.obey(signal, MAX_GRACE);
                (!is_known).then_some(Happened::Told(Report::Ordered { why }))
            }
            Ok(News::Fleet(ToAgent::Release { generation })) if generation == own => {
                self.undecided.clear();
                watch.release(self.asked);
                None
            }
            Ok(News::Fleet(ToAgent::Replace { generation, rank, restarts })) if generation == own => {
                self.undecided.retain(|lost| *lost != rank);
                (given.restarts, given.replaces) = (restarts as usize, true);
                // One that is started while the others are being stopped would hear nothing of that.
                let report =
                    (!watch.is_stopping()).then(|| replace(watch, given, ties, rank, &self.undecided));
                if matches!(report, Some(Report::NotReplaced { .. })) {
                    self.given_up.push(rank);
                    // Who can't be told will find out.
                    let _ = self.link.say(&FromAgent::GivenUp { generation, rank });
                }
                report.map(Happened::Told)
            }
            Ok(News::Fleet(ToAgent::Notice { generation, notice })) => {
                watch.heed(News::Notice(generation, notice))
            }
            Ok(News::Fleet(ToAgent::Refused { reason })) => return Err(LaunchError::Refused { reason }),
            Ok(News::Fleet(ToAgent::Told { words })) => Some(Happened::Told(Report::Told { words })),
            Ok(News::Signal(signal)) => {
                let is_first = self.asked.is_none();
                if is_first {
                    self.ask(signal);
                }
                // Where the others go on without this node's workers, it is told to end them.
                let waits = is_first && self.may_leave() && self.crew.watch.is_in_place();
                if waits {
                    self.crew.watch.asked();
                    None
                } else {
                    self.crew.watch.heed(News::Signal(signal))
                }
            }
            Ok(other) => {
                if let Some(rank) = watch.ends_well(&other) {
                    self.finished.push(rank);
                    // Who can't be told will find out.
                    let _ = self.link.say(&FromAgent::Finished { generation: own, rank });
                }
                watch.heed(other)
            }
        };
        match happened {
            None => {}
            Some(Happened::Told(report)) => self.crew.tell(report),
            Some(Happened::Lost { rank, .. }) => {
                if let Some(failure) = self.crew.watch.failure_of(rank) {
                    // Who can't be told will find out.
                    let _ = self.link.say(&FromAgent::Lost { generation: own, failure });
                    self.undecided.push(rank);
                }
            }
        }
        Ok(None)
    }
}

/// A port for the program, should this node have rank 0: the one that was asked for, or one that is kept free.
fn reserve_port(spec: &LaunchSpec, link: &AgentLink) -> Result<(Option<TcpListener>, u16), LaunchError> {
    if let Some(port) = spec.master.1 {
        return Ok((None, port));
    }
    let failed = || LaunchError::system("a port for the program");
    let kept = TcpListener::bind((link.local_ip()?, 0)).map_err(failed())?;
    let port = kept.local_addr().map_err(failed())?.port();
    Ok((Some(kept), port))
}

/// What is told of workers that couldn't be started.
fn not_started(given: &Given<'_>, error: &LaunchError) -> WorkerFailure {
    WorkerFailure {
        rank: given.rank(0),
        pid: 0,
        how: "could not be started".into(),
        idle_ms: 0,
        reported: Some(error.to_string()),
        last_lines: Vec::new(),
        for_good: false,
        consequence: false,
        part_lost: false,
        after_stop: false,
    }
}
