//! Going on under another coordinator.

use super::meet::{Met, Place, meet};
use super::search::{CALL_LIMIT, Found, PATIENCE, Search};
use super::{Agent, Over, reserve_port};
use crate::news::News;
use crate::report::Report;
use crate::spec::LaunchError;
use phalanx_coord::Coordinator;
use phalanx_job::{AgentLink, Error, FIRST_SPARE, FromAgent, Return, Stage, Standing};
use phalanx_wire::{Deadline, Pass};
use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::mpsc::{RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

/// How often nodes that come are looked for where they meet at first, and the coordinator that was lost.
const ANNOUNCE: Duration = Duration::from_millis(100);
/// How many of the nodes that would lead next are called in time, so that it is known later that they could be reached.
const SCOUTED: usize = 3;

impl Agent<'_> {
    /// Starts the search for who leads the run on, which ends as news; the error is how the last one was lost, where none can be
    /// found.
    pub(super) fn search(&mut self, lost: Error) -> Result<(), Error> {
        let Some((standing, told)) = self.standing.clone() else { return Err(lost) };
        self.crew.tell(Report::Told { words: format!("{lost}; looking for who leads the run on") });
        let elapsed_ms = standing.elapsed_ms + told.elapsed().as_millis() as u64;
        let standing = Standing { elapsed_ms, ..standing };
        let back = self.place.map(|(number, generation)| Return {
            number,
            standby: self.node.standby,
            generation,
            workers: self.crew.watch.running(),
            standing: standing.clone(),
        });
        let search = Search {
            pass: self.pass.clone(),
            patience: self.nodes.patience,
            terms: self.terms.clone(),
            node: self.newcomer(),
            standing,
            back,
            old: self.link.coordinator(),
            stood_still: self.beaten.stood_still(),
            beaten: Arc::clone(&self.beaten),
            standby: self.standby.take(),
            reached: self.reached.lock().unwrap_or_else(PoisonError::into_inner).clone(),
        };
        let address = self.link.coordinator();
        let news = self.crew.sender.clone();
        // Nobody wants to know once the run is over.
        let look = move || {
            let (found, standby) = search.run(lost);
            drop(news.send(News::Found(found.map(Box::new), standby)));
        };
        let thread = std::thread::Builder::new().name("phalanx-search".into()).spawn(look);
        thread.map(drop).map_err(|error| Error::Broken { address, reason: error.to_string() })
    }

    /// Whether the run's workers are stopped anyway because its coordinator's node is lost.
    pub(super) fn all_stop(&self) -> bool {
        let leads_workers =
            |standing: &Standing| standing.leader().is_some_and(|node| node.stage == Stage::Running);
        let is_lost = self.standing.as_ref().is_none_or(|(standing, _)| leads_workers(standing));
        is_lost && !self.crew.watch.is_in_place()
    }

    /// Heeds what a search has come to.
    pub(super) fn heed_search(
        &mut self,
        found: Result<Box<Found>, Error>,
        standby: Option<Coordinator>,
    ) -> Result<(), Error> {
        // Others are not to take this node for one that could lead them, unless it is led itself.
        self.standby = standby.filter(|_| matches!(found, Err(Error::GivenUp { .. })));
        self.follow(*found?)
    }

    /// Goes on under the coordinator that was found.
    fn follow(&mut self, found: Found) -> Result<(), Error> {
        let Found { link, standing, coordinator, standby } = found;
        let old = self.link.coordinator();
        let words = match (&coordinator, link.coordinator() == old) {
            (Some(_), _) => "this node leads the run on",
            (None, true) => "the coordinator is there again",
            (None, false) => "another node leads the run on",
        };
        let term = standing.term;
        let mut former = standing.former.clone();
        if !former.contains(&old) {
            former.push(old);
        }
        self.heed_standing(standing);
        (self.coordinator, self.standby) = (coordinator, standby);
        let address = link.coordinator();
        self.adopt(link, words)?;
        if self.coordinator.is_some() {
            // Nobody else writes there now; one that is silent may still hold it.
            self.claim = self.claim.take().or_else(|| self.crew.logs.claim_logs().ok());
            let beacon = self.announce(address, term, former);
            self.beacon = Some(beacon.map_err(|error| Error::Broken { address, reason: error.to_string() })?);
        }
        Ok(())
    }

    /// Joins where the run is led from, which isn't where nodes meet at first. Where that is gone by now, whoever said so is asked
    /// again, as long as a search may take.
    pub(super) fn go_elsewhere(&mut self, address: SocketAddr) -> Result<(), Error> {
        self.forget_place();
        if let Some(coordinator) = self.coordinator.take() {
            // It tells others who come.
            self.guide = Some(coordinator);
            self.stand_by(address)?;
        }
        match self.dial(address) {
            Ok(link) => self.join_over(link, "the run goes on elsewhere: joining it"),
            Err(error) => {
                self.unreached.get_or_insert_with(Instant::now);
                if self.is_lost_elsewhere() {
                    return Err(error);
                }
                std::thread::sleep(ANNOUNCE);
                self.link.say(&FromAgent::Join(self.newcomer()))
            }
        }
    }

    /// Whether those that this node was sent to are gone as well.
    pub(super) fn is_lost_elsewhere(&self) -> bool {
        let limit = self.nodes.patience.silence * PATIENCE;
        self.unreached.is_some_and(|since| since.elapsed() >= limit)
    }

    fn dial(&self, address: SocketAddr) -> Result<AgentLink, Error> {
        AgentLink::dial(address, &self.pass, Deadline::after(CALL_LIMIT), self.nodes.patience.silence)
    }

    /// Is led over this link from now on, as a node that has only just come.
    fn join_over(&mut self, link: AgentLink, words: &str) -> Result<(), Error> {
        link.say(&FromAgent::Join(self.newcomer()))?;
        self.unreached = None;
        self.link.close();
        self.adopt(link, words)
    }

    /// Listens in case that it has to lead those whom it joins there: where it did, if it does, since by that it is known.
    fn stand_by(&mut self, address: SocketAddr) -> Result<(), Error> {
        let standby = self.standby.take().map_or_else(|| stand_by(&self.link, &self.pass), Ok);
        let standby = standby.map_err(|error| Error::Broken { address, reason: error.to_string() })?;
        (self.node.standby, self.node.leads) = (standby.address(), false);
        self.standby = Some(standby);
        Ok(())
    }

    /// What it was among others is nothing to those that it joins now.
    fn forget_place(&mut self) {
        (self.place, self.standing, self.failure, self.ended) = (None, None, None, None);
        self.finished.clear();
        self.given_up.clear();
    }

    /// Joins those anew who took this node for lost and have gone on without it, once it has no workers any more. Gives why it has no part
    /// in the run where it can't.
    pub(super) fn join_anew(&mut self, lost: Error) -> Result<Option<Over>, LaunchError> {
        if let Some(signal) = self.asked {
            // Who asked for the end gets it, whoever is gone by then.
            return Ok(Some(Over::Left(signal)));
        }
        let Error::GivenUp { address } = lost else { return Ok(Some(Over::Alone(lost))) };
        if self.port.is_none() {
            let (kept, port) = reserve_port(self.crew.spec, &self.link)?;
            (self.port, self.node.port) = (kept, port);
        }
        self.forget_place();
        let link = self.stand_by(address).and_then(|()| self.dial(address));
        let led = link.and_then(|link| self.join_over(link, "joining the run anew"));
        Ok(led.err().map(|_| Over::Alone(lost)))
    }

    /// Meets the others again, if this node never had a part in the run that anybody could miss.
    pub(super) fn begin_again(&mut self, lost: Error) -> Result<Option<Over>, LaunchError> {
        if let Some(signal) = self.asked {
            self.crew.tell(Report::Told { words: lost.to_string() });
            return Ok(Some(Over::Left(signal)));
        }
        if self.place.is_some() {
            return self.join_anew(lost);
        }
        self.crew.tell(Report::Told { words: format!("{lost}; meeting the others again") });
        // Nobody is to be sent to whoever is gone.
        (self.guide, self.coordinator, self.standing, self.claim) = (None, None, None, None);
        let mut place = match meet(&mut self.crew, self.nodes, &self.terms, &self.pass)? {
            Met::At(place) => place,
            Met::Asked(signal) => return Ok(Some(Over::Left(signal))),
        };
        if place.coordinator.is_none() && self.standby.is_some() {
            // By it others know this agent.
            place.standby = self.standby.take();
        }
        (self.node.standby, self.node.leads) = (place.standby(), place.coordinator.is_some());
        let Place { link, coordinator, standby, claim } = place;
        (self.coordinator, self.standby, self.claim) = (coordinator, standby, claim);
        self.adopt(link, "joining the run")?;
        self.link.say(&FromAgent::Join(self.newcomer()))?;
        Ok(None)
    }

    /// Is led over this link from now on.
    fn adopt(&mut self, link: AgentLink, words: &str) -> Result<(), Error> {
        let address = link.coordinator();
        let broken = |reason: String| Error::Broken { address, reason };
        if address != self.link.coordinator() {
            // Should the one before go on after all, it finds that it leads nobody any more.
            let to = self.standing.as_ref().map(|(standing, _)| (address, standing.term));
            let _ = self.link.say(&FromAgent::Moved { to });
        }
        self.link = Arc::new(link);
        self.whereabouts.write(address).map_err(|error| broken(error.to_string()))?;
        self.beats = Some(self.keep_in_touch().map_err(|error| broken(error.to_string()))?);
        self.crew.tell(Report::Told { words: format!("{words}, at {address}") });
        // What the one before may not have heeded.
        for said in self.unheeded() {
            self.link.say(&said)?;
        }
        Ok(())
    }

    /// Remembers how the run stands, and finds out whether those that would lead it next can be reached.
    pub(super) fn heed_standing(&mut self, standing: Standing) {
        let own = self.node.standby;
        let number = standing.at(own).and_then(|node| node.number);
        if let Some(number) = number.filter(|number| *number >= FIRST_SPARE) {
            (self.place, self.has_part) = (Some((number, standing.generation)), true);
        }
        let leads = standing.leader().map(|node| node.node.standby);
        let news: Vec<SocketAddr> = standing
            .numbered()
            .into_values()
            .filter(|address| *address != own && Some(*address) != leads)
            .take(SCOUTED)
            .filter(|address| self.scouted.insert(*address))
            .collect();
        if !news.is_empty() {
            let (pass, reached) = (self.pass.clone(), Arc::clone(&self.reached));
            let call = move || {
                for address in news {
                    if AgentLink::dial(address, &pass, Deadline::after(CALL_LIMIT), CALL_LIMIT).is_ok() {
                        reached.lock().unwrap_or_else(PoisonError::into_inner).insert(address);
                    }
                }
            };
            // Without it those count as silent later.
            let _ = std::thread::Builder::new().name("phalanx-scout".into()).spawn(call);
        }
        self.standing = Some((standing, Instant::now()));
    }

    /// Starts a thread that tells whoever hosts a coordinator where nodes meet at first, and those that were lost, should they go on
    /// after all, that the run is led from here.
    fn announce(
        &self,
        address: SocketAddr,
        term: u32,
        former: Vec<SocketAddr>,
    ) -> Result<SyncSender<()>, std::io::Error> {
        let (stop, stopped) = sync_channel::<()>(0);
        let ((host, port), pass) = (self.nodes.endpoint.clone(), self.pass.clone());
        let call = move || {
            // The last is the likeliest to be there. A machine that is off takes a while not to answer, so others take turns.
            let mut turn = former.iter().rev().copied().cycle();
            while stopped.recv_timeout(ANNOUNCE) == Err(RecvTimeoutError::Timeout) {
                // A name that stands for nothing now may do so later.
                let places = (host.as_str(), port).to_socket_addrs().into_iter().flatten();
                let mut places: Vec<SocketAddr> = places.filter(|place| *place != address).collect();
                let next = turn.next().filter(|place| !places.contains(place));
                places.extend(next);
                for place in places {
                    let link = AgentLink::dial(place, &pass, Deadline::after(CALL_LIMIT), CALL_LIMIT);
                    // Mostly nobody is there.
                    let _ = link.and_then(|link| link.say(&FromAgent::Elsewhere { address, term }));
                }
            }
        };
        std::thread::Builder::new().name("phalanx-beacon".into()).spawn(call)?;
        Ok(stop)
    }
}

/// Where an agent listens in case that it has to lead the run.
pub(super) fn stand_by(link: &AgentLink, pass: &Pass) -> Result<Coordinator, std::io::Error> {
    let ip = link.local_ip().map_err(std::io::Error::other)?;
    Coordinator::stand_by((ip, 0).into(), pass)
}
