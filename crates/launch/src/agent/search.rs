//! Looking for who leads the run on once its coordinator is gone, beside the agent, which watches its workers meanwhile. It may
//! be this agent.

use super::standstill::Beats;
use phalanx_coord::{Coordinator, Patience, RollCall};
use phalanx_job::{AgentLink, Error, FromAgent, Node, Return, Standing, Terms, ToAgent};
use phalanx_wire::{Deadline, Pass};
use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How long a machine may take to answer a call.
pub(super) const CALL_LIMIT: Duration = Duration::from_secs(1);
/// How much longer than silence may last the others may take to find out, and to come.
const COMING: Duration = Duration::from_millis(1500);
/// How long to wait before who didn't answer is called again.
const RETRY: Duration = Duration::from_millis(20);
/// How often one that doesn't answer is called before the next takes its place.
const CALLS: u32 = 2;
/// How many are called at once.
const AT_ONCE: usize = 8;
/// How often those that are missing when the roll is called are called themselves.
const ROLL: Duration = Duration::from_millis(200);
/// How many times the length of silence that makes a coordinator lost the search may take.
pub(super) const PATIENCE: u32 = 4;

/// What a search begins with.
pub(super) struct Search {
    pub(super) pass: Pass,
    pub(super) patience: Patience,
    pub(super) terms: Terms,
    pub(super) node: Node,
    pub(super) standing: Standing,
    /// What this agent comes back with; none if its node has no number yet, and joins.
    pub(super) back: Option<Return>,
    /// Where the coordinator was.
    pub(super) old: SocketAddr,
    /// Whether it may be this agent that gave no sign of life, so that the others have gone on without it, and may be done by now: where
    /// nobody listens then says nothing of the run.
    pub(super) stood_still: bool,
    /// Which tell whether it does so later.
    pub(super) beaten: Arc<Beats>,
    /// What becomes the coordinator, should this agent have to lead.
    pub(super) standby: Option<Coordinator>,
    /// The agents that could be reached once: where nobody listens now, these have ended.
    pub(super) reached: BTreeSet<SocketAddr>,
}

/// What a search finds.
pub(crate) struct Found {
    pub(super) link: AgentLink,
    pub(super) standing: Standing,
    /// The coordinator, if it is this agent that leads.
    pub(super) coordinator: Option<Coordinator>,
    pub(super) standby: Option<Coordinator>,
}

/// What calling an agent comes to.
enum Called {
    There(AgentLink),
    Ended,
    Silent,
}

/// Why an agent isn't led there.
enum NotLed {
    /// This node has no part in the run any more.
    GivenUp(Error),
    /// Whoever is there knows nothing of the run.
    Stranger,
    /// It was lost, or was called in vain.
    Lost,
}

impl Search {
    /// Finds who leads; the error is why this node has no part in the run any more. Gives also what would have become the coordinator,
    /// where it is still there and not with who was found.
    pub(super) fn run(mut self, lost: Error) -> (Result<Found, Error>, Option<Coordinator>) {
        let found = self.find(lost);
        (found, self.standby)
    }

    fn find(&mut self, lost: Error) -> Result<Found, Error> {
        let until = Instant::now() + self.patience.silence * PATIENCE;
        let mut ended = BTreeSet::new();
        let leader = self.standing.leader().and_then(|node| node.number);
        let others = self.standing.numbered().into_keys().filter(|number| Some(*number) != leader).count();
        // With one other node nobody leads the run on as long as the one that did may be alive.
        let mut is_over = others != 1;
        loop {
            if let Some(found) = self.recall(leader, &mut ended)? {
                return Ok(found);
            }
            is_over |= !ended.is_empty() || Instant::now() >= until;
            if is_over {
                break;
            }
            std::thread::sleep(RETRY);
        }
        if others == 0 {
            return Err(lost);
        }
        let mut calls = BTreeMap::new();
        loop {
            if let Some(found) = self.round(leader, &mut ended, &mut calls)? {
                return Ok(found);
            }
            if Instant::now() >= until {
                return Err(lost);
            }
            std::thread::sleep(RETRY);
        }
    }

    fn has_stood_still(&self) -> bool {
        self.stood_still || self.beaten.stood_still()
    }

    /// Calls who has led so far, and may only have stood still for a while.
    fn recall(&mut self, leader: Option<u32>, ended: &mut BTreeSet<u32>) -> Result<Option<Found>, Error> {
        // Also one that is over by now.
        self.stood_still = self.has_stood_still();
        match self.call(self.old) {
            Called::Ended => ended.extend(leader),
            Called::Silent => {}
            Called::There(link) => match self.come_back(link) {
                Ok((link, standing)) => return Ok(Some(self.found(link, standing, None))),
                Err(NotLed::GivenUp(error)) => return Err(error),
                Err(NotLed::Stranger) if !self.has_stood_still() => ended.extend(leader),
                Err(NotLed::Stranger | NotLed::Lost) => {}
            },
        }
        Ok(None)
    }

    /// Tries the nodes in the order of their numbers, and no other before one that was called too rarely.
    fn round(
        &mut self,
        leader: Option<u32>,
        ended: &mut BTreeSet<u32>,
        calls: &mut BTreeMap<u32, u32>,
    ) -> Result<Option<Found>, Error> {
        let heirs: Vec<(u32, SocketAddr)> =
            self.standing.numbered().into_iter().filter(|(number, _)| Some(*number) != leader).collect();
        let own = self.back.as_ref().map(|back| back.number);
        for some in heirs.chunks(AT_ONCE) {
            for ((number, _), called) in some.iter().zip(self.call_all(some, own)) {
                if Some(*number) == own {
                    return self.lead(ended.clone());
                }
                match called {
                    Called::Ended => drop(ended.insert(*number)),
                    Called::There(link) => match self.come_back(link) {
                        Ok((link, standing)) => return Ok(Some(self.found(link, standing, None))),
                        Err(NotLed::GivenUp(error)) => return Err(error),
                        Err(NotLed::Stranger | NotLed::Lost) => return Ok(None),
                    },
                    Called::Silent => {
                        let calls = calls.entry(*number).or_default();
                        *calls += 1;
                        if *calls < CALLS {
                            return Ok(None);
                        }
                    }
                }
            }
        }
        Ok(None)
    }

    /// What each of them says, asked at the same time, as far as the system has threads for that: others are asked one after the other.
    fn call_all(&self, some: &[(u32, SocketAddr)], own: Option<u32>) -> Vec<Called> {
        std::thread::scope(|scope| {
            let call = |&(number, address): &(u32, SocketAddr)| {
                let thread = std::thread::Builder::new().name("phalanx-call".into());
                (Some(number) != own)
                    .then(|| thread.spawn_scoped(scope, move || self.call(address)).map_err(|_| address))
            };
            let calls: Vec<_> = some.iter().map(call).collect();
            let answer =
                |call: Option<Result<std::thread::ScopedJoinHandle<'_, Called>, SocketAddr>>| match call {
                    Some(Ok(call)) => call.join().unwrap_or(Called::Silent),
                    Some(Err(address)) => self.call(address),
                    None => Called::Silent,
                };
            calls.into_iter().map(answer).collect()
        })
    }

    fn call(&self, address: SocketAddr) -> Called {
        // An agent that waits to hear whether it leads says nothing yet.
        let silence = self.patience.silence + CALL_LIMIT + COMING;
        let deadline = Deadline::after(CALL_LIMIT);
        loop {
            match AgentLink::dial(address, &self.pass, deadline, silence) {
                Ok(link) => return Called::There(link),
                // A firewall may say the same of one that could never be reached.
                Err(Error::NobodyListens { .. })
                    if !self.has_stood_still()
                        && (address == self.old || self.reached.contains(&address)) =>
                {
                    return Called::Ended;
                }
                // One that is ending right now will have ended soon.
                Err(Error::Broken { .. }) if !deadline.expired() => std::thread::sleep(RETRY),
                Err(_) => return Called::Silent,
            }
        }
    }

    /// Leads the run on, with those that come to this agent.
    fn lead(&mut self, ended: BTreeSet<u32>) -> Result<Option<Found>, Error> {
        let (Some(coordinator), Some(back)) = (self.standby.take(), &self.back) else { return Ok(None) };
        let address = coordinator.address();
        let broken = |error: std::io::Error| Error::Broken { address, reason: error.to_string() };
        let until = Instant::now() + self.patience.silence + COMING;
        let call = RollCall::new(self.standing.clone(), back.number, ended, until);
        coordinator.succeed(call, self.terms.clone(), self.patience).map_err(broken)?;
        let is_over = AtomicBool::new(false);
        let led = std::thread::scope(|scope| {
            let look = || {
                while !is_over.load(Ordering::Relaxed) {
                    self.look_for_missing(&coordinator);
                    std::thread::sleep(ROLL);
                }
            };
            // Where no thread can be had those that have ended are waited for like others.
            let _ = std::thread::Builder::new().name("phalanx-roll".into()).spawn_scoped(scope, look);
            let link =
                AgentLink::dial(address, &self.pass, Deadline::after(CALL_LIMIT), self.patience.silence);
            let led = link.map_err(|_| NotLed::Lost).and_then(|link| self.come_back(link));
            is_over.store(true, Ordering::Relaxed);
            led
        });
        match led {
            Ok((link, standing)) => Ok(Some(self.found(link, standing, Some(coordinator)))),
            Err(NotLed::GivenUp(error)) => Err(error),
            Err(NotLed::Stranger | NotLed::Lost) => {
                Err(Error::Broken { address, reason: "this agent can't reach itself".into() })
            }
        }
    }

    /// Those that have ended are waited for in vain.
    fn look_for_missing(&self, coordinator: &Coordinator) {
        let missing = coordinator.missing();
        let heirs: Vec<_> =
            self.standing.numbered().into_iter().filter(|(number, _)| missing.contains(number)).collect();
        for some in heirs.chunks(AT_ONCE) {
            let called = some.iter().zip(self.call_all(some, None));
            let ended = called.filter(|(_, called)| matches!(called, Called::Ended));
            coordinator.count_out(ended.map(|((number, _), _)| *number).collect());
        }
    }

    /// Says what this agent comes back with, and waits until it is led.
    fn come_back(&self, link: AgentLink) -> Result<(AgentLink, Standing), NotLed> {
        let said = link.say(&match self.back.clone() {
            Some(back) => FromAgent::Return(Box::new(back)),
            None => FromAgent::Join(self.node.clone()),
        });
        said.map_err(|_| NotLed::Lost)?;
        let (address, until) = (link.coordinator(), Instant::now() + self.patience.silence * PATIENCE);
        // Beats are heard all the time.
        while Instant::now() < until {
            match link.hear().map_err(|_| NotLed::Lost)? {
                ToAgent::Standing(standing) => return Ok((link, *standing)),
                ToAgent::Stranger => return Err(NotLed::Stranger),
                ToAgent::GoneOn => return Err(NotLed::GivenUp(Error::GivenUp { address })),
                ToAgent::Refused { reason } => {
                    return Err(NotLed::GivenUp(Error::Broken { address, reason }));
                }
                _ => {}
            }
        }
        Err(NotLed::Lost)
    }

    fn found(&mut self, link: AgentLink, standing: Standing, coordinator: Option<Coordinator>) -> Found {
        Found { link, standing, coordinator, standby: self.standby.take() }
    }
}
