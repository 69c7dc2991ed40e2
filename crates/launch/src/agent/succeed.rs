//! Finding who leads the run on once its coordinator is gone; it may be this agent.

use super::Agent;
use super::meet::clock_ms;
use crate::report::Report;
use phalanx_coord::{Coordinator, RollCall};
use phalanx_job::{AgentLink, Error, FromAgent, NodeStanding, Return, Standing, ToAgent};
use phalanx_wire::{Deadline, Pass};
use std::collections::BTreeSet;
use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, SyncSender, sync_channel};
use std::time::{Duration, Instant};

/// How long a machine may take to answer a call.
const CALL_LIMIT: Duration = Duration::from_secs(1);
/// How much longer than silence may last the others may take to find out, and to come.
const COMING: Duration = Duration::from_millis(1500);
/// How often nodes that come are looked for where they meet at first.
const ANNOUNCE: Duration = Duration::from_millis(500);
/// How long to wait before all are tried again.
const RETRY: Duration = Duration::from_millis(20);
/// How often all are tried within the time after which a coordinator counts as silent.
const PATIENCE: u32 = 3;

/// How many machines said what.
struct Search {
    standing: Standing,
    /// Those whose agent has ended.
    ended: BTreeSet<u32>,
    until: Instant,
}

/// What calling an agent comes to.
enum Called {
    There(AgentLink),
    Ended,
    Silent,
}

impl Agent<'_> {
    /// Goes on under another coordinator, if one is found; else the error is how the last one was lost.
    pub(super) fn succeed(&mut self, lost: Error) -> Result<(), Error> {
        let Some(standing) = self.standing.clone() else { return Err(lost) };
        self.crew.tell(Report::Told { words: format!("{lost}; looking for who leads the run on") });
        let until = Instant::now() + self.nodes.patience.silence * PATIENCE;
        let mut search = Search { standing, ended: BTreeSet::new(), until };
        let old = self.link.coordinator();
        let leader = search.standing.nodes.iter().find(|node| node.node.leads);
        let leader = leader.and_then(|node| node.number);
        match self.call(old) {
            // It is there, so it is this agent that was given up.
            Called::There(_) => return Err(lost),
            Called::Ended => search.ended.extend(leader),
            Called::Silent => {}
        }
        loop {
            if let Some(link) = self.try_all(&mut search, leader)? {
                let who = if self.coordinator.is_some() { "this node leads" } else { "another node leads" };
                return self.adopt(link, &format!("{who} the run on"));
            }
            if Instant::now() > search.until {
                return Err(lost);
            }
            std::thread::sleep(RETRY);
        }
    }

    /// Tries the nodes in the order of their numbers. An error is why this node has no part in the run any more.
    fn try_all(&mut self, search: &mut Search, leader: Option<u32>) -> Result<Option<AgentLink>, Error> {
        let numbered = |node: &NodeStanding| node.number.map(|number| (number, node.node.standby));
        let mut heirs: Vec<(u32, SocketAddr)> = search.standing.nodes.iter().filter_map(numbered).collect();
        heirs.sort_unstable();
        let own = self.place.map(|(number, _)| number);
        for (number, address) in heirs.iter().copied().filter(|(number, _)| Some(*number) != leader) {
            if Some(number) == own {
                return self.lead(search, &heirs).map(Some);
            }
            match self.call(address) {
                Called::Ended => drop(search.ended.insert(number)),
                Called::Silent => {}
                Called::There(link) => match self.come_back(link) {
                    Err(refused @ Error::Refused { .. }) => return Err(refused),
                    // It was lost, or has found nobody either.
                    Err(_) => {}
                    Ok(link) => return Ok(Some(link)),
                },
            }
        }
        Ok(None)
    }

    fn call(&self, address: SocketAddr) -> Called {
        // An agent that waits to hear whether it leads says nothing yet.
        let silence = self.nodes.patience.silence + CALL_LIMIT + COMING;
        let deadline = Deadline::after(CALL_LIMIT);
        loop {
            match AgentLink::dial(address, &self.pass, deadline, silence) {
                Ok(link) => return Called::There(link),
                Err(Error::NobodyListens { .. }) => return Called::Ended,
                // One that is ending right now will have ended soon.
                Err(Error::Broken { .. }) if !deadline.expired() => std::thread::sleep(RETRY),
                Err(_) => return Called::Silent,
            }
        }
    }

    /// Leads the run on, with those that come to this agent.
    fn lead(&mut self, search: &Search, heirs: &[(u32, SocketAddr)]) -> Result<AgentLink, Error> {
        let own = self.place.map_or(0, |(number, _)| number);
        let Some(coordinator) = self.standby.take() else {
            let reason = "this agent has led it once".into();
            return Err(Error::Broken { address: self.link.coordinator(), reason });
        };
        let mut ended = search.ended.clone();
        // Those that have ended as well are waited for in vain.
        for (number, address) in heirs.iter().filter(|(number, _)| *number > own) {
            if matches!(self.call(*address), Called::Ended) {
                ended.insert(*number);
            }
        }
        let until = Instant::now() + self.nodes.patience.silence + COMING;
        let call = RollCall::new(search.standing.clone(), own, ended, until);
        let (terms, patience) = (self.terms.clone(), self.nodes.patience);
        let address = coordinator.address();
        let broken = |error: std::io::Error| Error::Broken { address, reason: error.to_string() };
        coordinator.succeed(call, terms, patience, clock_ms()).map_err(broken)?;
        self.coordinator = Some(coordinator);
        let silence = self.nodes.patience.silence;
        let link = AgentLink::dial(address, &self.pass, Deadline::after(CALL_LIMIT), silence)?;
        self.come_back(link)
    }

    /// Says what this agent comes back with, and waits until it is led.
    fn come_back(&mut self, link: AgentLink) -> Result<AgentLink, Error> {
        let standing = self.standing.clone().expect("it was led before");
        link.say(&match (self.place, &self.node) {
            (Some((number, generation)), _) => {
                let workers = self.crew.watch.running();
                FromAgent::Return(Box::new(Return { number, generation, workers, standing }))
            }
            (None, node) => FromAgent::Join(node.clone()),
        })?;
        loop {
            match link.hear()? {
                ToAgent::Standing(standing) => {
                    self.standing = Some(*standing);
                    return Ok(link);
                }
                ToAgent::Refused { reason } => {
                    return Err(Error::Refused { address: link.coordinator(), reason });
                }
                _ => {}
            }
        }
    }

    /// Joins where the run is led from, which isn't where nodes meet at first.
    pub(super) fn go_elsewhere(&mut self, address: SocketAddr) -> Result<(), Error> {
        if let Some(coordinator) = self.coordinator.take() {
            // It tells others who come.
            self.guide = Some(coordinator);
            let broken = |error: std::io::Error| Error::Broken { address, reason: error.to_string() };
            let standby = stand_by(&self.link, &self.pass).map_err(broken)?;
            (self.node.standby, self.node.leads) = (standby.address(), false);
            self.standby = Some(standby);
        }
        let (deadline, silence) = (Deadline::after(CALL_LIMIT), self.nodes.patience.silence);
        let link = AgentLink::dial(address, &self.pass, deadline, silence)?;
        link.say(&FromAgent::Join(self.node.clone()))?;
        self.link.close();
        self.adopt(link, "the run goes on elsewhere: joining it")
    }

    /// Starts a thread that tells whoever hosts a coordinator where nodes meet at first that the run is led from here.
    fn announce(&self, address: SocketAddr, term: u32) -> Result<SyncSender<()>, std::io::Error> {
        let (stop, stopped) = sync_channel::<()>(0);
        let ((host, port), pass) = (self.nodes.endpoint.clone(), self.pass.clone());
        let call = move || {
            while stopped.recv_timeout(ANNOUNCE) == Err(RecvTimeoutError::Timeout) {
                // A name that stands for nothing now may do so later.
                let places = (host.as_str(), port).to_socket_addrs().into_iter().flatten();
                for place in places.filter(|place| *place != address) {
                    let link = AgentLink::dial(place, &pass, Deadline::after(CALL_LIMIT), CALL_LIMIT);
                    // Mostly nobody is there.
                    let _ = link.and_then(|link| link.say(&FromAgent::Elsewhere { address, term }));
                }
            }
        };
        std::thread::Builder::new().name("phalanx-beacon".into()).spawn(call)?;
        Ok(stop)
    }

    /// Is led over this link from now on.
    fn adopt(&mut self, link: AgentLink, words: &str) -> Result<(), Error> {
        let address = link.coordinator();
        let broken = |reason: String| Error::Broken { address, reason };
        // Should the one before go on after all, it finds that it leads nobody any more.
        let _ = self.link.say(&FromAgent::Moved);
        self.link = Arc::new(link);
        self.whereabouts.write(address).map_err(|error| broken(error.to_string()))?;
        self.beats = Some(self.keep_in_touch().map_err(|error| broken(error.to_string()))?);
        self.crew.tell(Report::Told { words: format!("{words}, at {address}") });
        if let (Some(_), Some(standing)) = (&self.coordinator, &self.standing) {
            let beacon = self.announce(address, standing.term);
            self.beacon = Some(beacon.map_err(|error| broken(error.to_string()))?);
        }
        // What the one before may not have heeded.
        for said in self.unheeded() {
            self.link.say(&said)?;
        }
        Ok(())
    }
}

/// Where an agent listens in case that it has to lead the run.
pub(super) fn stand_by(link: &AgentLink, pass: &Pass) -> Result<Coordinator, std::io::Error> {
    let ip = link.local_ip().map_err(std::io::Error::other)?;
    Coordinator::stand_by((ip, 0).into(), pass)
}
