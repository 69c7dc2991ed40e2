//! A rank of a simulated world: how far it is in its script, and what became of it.

use super::script::{Started, Step};
use crate::error::Error;
use crate::group::Group;
use crate::queue::Until;
use crate::queue::wait::Wait;
use phalanx_wire::Deadline;
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// What became of a rank.
#[derive(Debug)]
pub(super) enum State {
    Playing,
    /// It came to the end of its script.
    Done,
    /// In this group.
    Failed(usize, Error),
    Dead,
}

/// A rank's clock: what it shows when the world began, and how fast it goes, in hundredths.
pub(super) struct Clock {
    pub(super) began: Instant,
    pub(super) percent: u32,
}

pub(super) struct Player {
    /// Its end of each of the world's groups, where it is a member.
    pub(super) groups: Vec<Option<Group>>,
    pub(super) script: Vec<Step>,
    pub(super) clock: Clock,
    /// How many operations it starts before it waits for the first of them.
    pub(super) ahead: usize,
    /// An operation that not all ranks understand alike: what comes of it, and of later ones of its group, means nothing.
    pub(super) doubtful: Option<Step>,
    next: usize,
    started: VecDeque<Started>,
    /// For the first of those.
    wait: Option<Wait<'static>>,
    pub(super) state: State,
    /// When it goes on, if it is stopped.
    pub(super) stopped: Option<Duration>,
    /// Whether anything happened since it looked.
    pub(super) awake: bool,
}

/// What a look led to.
pub(super) enum Looked {
    Moved,
    Nothing,
    Wrong(String),
}

/// How long an operation may take.
pub(super) const LIMIT: Duration = Duration::from_secs(10);

impl Player {
    pub(super) fn new(groups: Vec<Option<Group>>, script: Vec<Step>, clock: Clock, ahead: usize) -> Player {
        Player {
            groups,
            script,
            clock,
            ahead,
            doubtful: None,
            next: 0,
            started: VecDeque::new(),
            wait: None,
            state: State::Playing,
            stopped: None,
            awake: true,
        }
    }

    pub(super) fn is_playing(&self) -> bool {
        matches!(self.state, State::Playing)
    }

    /// Whether it could move now.
    pub(super) fn is_ready(&self) -> bool {
        self.is_playing() && self.stopped.is_none()
    }

    /// Starts the next operation, or looks once after the first that it waits for.
    pub(super) fn look(&mut self, now: Duration) -> Looked {
        let now = self.clock.began + now * self.clock.percent / 100;
        if self.started.len() < self.ahead
            && let Some(step) = self.script.get(self.next)
        {
            self.next += 1;
            if let Some(group) = &self.groups[step.group] {
                self.started.extend(step.start(group));
            }
            return Looked::Moved;
        }
        let Some(first) = self.started.front() else {
            self.leave(State::Done);
            return Looked::Moved;
        };
        let group = first.step.group;
        match look_after(first, &mut self.wait, now) {
            Ok(Glance::Done) => {
                self.wait = None;
                let Started { step, work, wanted } = self.started.pop_front().expect("looked at above");
                let (came, from) = match work.wait_from(Deadline::after(LIMIT)) {
                    Ok(came) => came,
                    Err(error) => return Looked::Wrong(format!("{step:?} was done, and then: {error}")),
                };
                let means = |doubtful: Step| step.group != doubtful.group || step.number < doubtful.number;
                if !self.doubtful.is_none_or(means) {
                    return Looked::Moved;
                }
                step.judge(&came, from, &wanted).map_or(Looked::Moved, Looked::Wrong)
            }
            Ok(Glance::Moved) => Looked::Moved,
            Ok(Glance::Nothing) => {
                self.awake = false;
                Looked::Nothing
            }
            Err(error) => {
                self.leave(State::Failed(group, error));
                Looked::Moved
            }
        }
    }

    /// Moves its operations in all groups, as a program may that does something else meanwhile.
    pub(super) fn progress(&self) {
        self.groups.iter().flatten().for_each(Group::progress);
    }

    /// Leaves all groups; who failed in one ends them all.
    pub(super) fn leave(&mut self, state: State) {
        if matches!(state, State::Failed(..)) {
            self.groups.iter().flatten().for_each(|group| group.abort("it failed in another group"));
        }
        self.state = state;
        self.started.clear();
        self.wait = None;
        self.groups.clear();
    }

    /// Whether it failed, and with which error if that was in this group; one may not have looked yet what became of that.
    pub(super) fn failure(&self, group: usize) -> Option<Option<Error>> {
        match &self.state {
            State::Failed(at, error) => Some((*at == group).then(|| error.clone())),
            State::Playing => {
                let engine = self.groups[group].as_ref().and_then(Group::free_engine)?;
                engine.failed.clone().map(Some)
            }
            State::Done | State::Dead => None,
        }
    }

    /// The first of the operations that it started.
    pub(super) fn waits_for(&self) -> Option<Step> {
        self.started.front().map(|started| started.step)
    }

    /// Where it is, for people.
    pub(super) fn whereabouts(&self) -> String {
        format!("{:?}, waits for {:?}, stopped: {:?}", self.state, self.waits_for(), self.stopped)
    }
}

enum Glance {
    Done,
    Moved,
    Nothing,
}

/// One look of a wait, as the engine's own loop takes it.
fn look_after(started: &Started, wait: &mut Option<Wait<'static>>, now: Instant) -> Result<Glance, Error> {
    let ticket = started.work.ticket.clone()?;
    let mut engine = started.work.group.free_engine().expect("no other thread has it");
    let wait =
        wait.get_or_insert_with(|| Wait::new(Until::Done(ticket), Deadline::starting(now, LIMIT), None, now));
    let before = engine.mail.moved();
    if engine.look(&mut wait.until)? {
        return Ok(Glance::Done);
    }
    let quiet = engine.quiet(wait, now)?;
    engine.rest(wait, quiet, now);
    Ok(if engine.mail.moved() == before { Glance::Nothing } else { Glance::Moved })
}
