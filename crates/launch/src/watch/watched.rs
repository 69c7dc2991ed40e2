//! What is known of one worker, from its start until nothing is left of it.

use super::hangs::Vitals;
use crate::blame::End;
use crate::news::{Berth, How};
use crate::report::{Failure, Who};
use crate::worker::Worker;
use nix::sys::signal::Signal;
use phalanx_job::{Cause, WorkerFailure};
use phalanx_wire::Generation;
use std::time::Duration;

/// How much of a text goes to other nodes, in characters.
const MAX_TEXT: usize = 4000;

/// What is known of one worker.
pub(super) struct Watched {
    pub(super) worker: Worker,
    /// When it was started, after the start of the run.
    pub(super) started: Duration,
    pub(super) berth: Berth,
    /// Which folder of the logs has what it wrote.
    pub(super) folder: Generation,
    /// Why it can't go on, as far as somebody said.
    pub(super) reported: Option<(String, Cause)>,
    /// The signals it was sent while it ran.
    pub(super) sent: Vec<Signal>,
    pub(super) exit: Option<Exit>,
    /// Whether nothing is left of it.
    pub(super) ended: bool,
    /// How it gets on, if that is looked at.
    pub(super) vitals: Option<Vitals>,
    /// Whether it was started in the place of one that was lost, and isn't with the others yet.
    pub(super) comes_in: bool,
    /// Whether it was lost, and the others go on although no other is started in its place.
    pub(super) given_up: bool,
}

/// The end of a worker's process.
pub(super) struct Exit {
    pub(super) how: How,
    pub(super) after: Duration,
    pub(super) before_stop: bool,
}

impl Watched {
    /// What is to be told of it once it has exited.
    pub(super) fn failure(&self) -> Option<Failure> {
        let exit = self.exit.as_ref()?;
        let Worker { rank, pid, .. } = self.worker;
        Some(Failure {
            folder: self.folder,
            who: Who::Worker { rank, pid: pid.as_raw(), node: None },
            how: self.vitals.as_ref().and_then(Vitals::how).unwrap_or_else(|| exit.how.to_string()),
            after: exit.after,
            reported: self
                .reported
                .as_ref()
                .map(|(message, _)| message.clone())
                .or_else(|| self.worker.said()),
            last_lines: self.worker.last_lines(),
        })
    }

    /// The same for who leads the nodes of the run.
    pub(super) fn worker_failure(&self, in_place: bool, part_lost: bool) -> Option<WorkerFailure> {
        let Failure { how, reported, last_lines, .. } = self.failure()?;
        let idle =
            self.vitals.as_ref().and_then(Vitals::hung_since).map_or(Duration::ZERO, |since| since.elapsed());
        let cut = |text: String| text.chars().take(MAX_TEXT).collect();
        Some(WorkerFailure {
            rank: self.worker.rank,
            pid: self.worker.pid.as_raw(),
            how,
            idle_ms: idle.as_millis() as u64,
            reported: reported.map(cut),
            last_lines: last_lines.into_iter().map(cut).collect(),
            for_good: self.is_for_good(in_place),
            consequence: self.follows(),
            part_lost: self.misses_a_part(part_lost),
            after_stop: !self.exit.as_ref()?.before_stop,
        })
    }

    /// Whose fault it is that it can't go on, as far as somebody said.
    pub(super) fn cause(&self) -> Option<Cause> {
        self.reported.as_ref().map(|(_, cause)| *cause)
    }

    /// Whether it is known to end because of another.
    pub(super) fn follows(&self) -> bool {
        matches!(self.cause(), Some(Cause::Other | Cause::Refused))
    }

    /// Whether it can't go on without what was lost with another, or with one of which that is known.
    pub(super) fn misses_a_part(&self, others_do: bool) -> bool {
        self.cause() == Some(Cause::PartLost) || (others_do && self.follows())
    }

    /// Whether it is known to end for a reason of its own.
    pub(super) fn has_own_reason(&self) -> bool {
        self.reported.is_some() && !self.follows()
    }

    /// Whether it is known that others would come to the same. What is a worker's own may be another's luck if all begin anew.
    pub(super) fn is_for_good(&self, in_place: bool) -> bool {
        match self.cause() {
            Some(Cause::Setting | Cause::Device) => true,
            Some(Cause::Own) => in_place,
            _ => false,
        }
    }

    /// Whether it has ended in order to be started again later, and not because another has failed.
    pub(super) fn has_drained(&self) -> bool {
        let of_its_own = |exit: &Exit| exit.before_stop || self.sent.contains(&Signal::SIGUSR1);
        self.exit.as_ref().is_some_and(|exit| exit.how.is_drained() && of_its_own(exit))
    }

    /// Its end, as far as blame goes.
    pub(super) fn end(&self) -> Option<End> {
        let exit = self.exit.as_ref()?;
        Some(End {
            rank: self.worker.rank,
            good: exit.how.is_well(),
            before_stop: exit.before_stop,
            // One that gave a reason of its own had failed before the signal came.
            by_launcher: self.sent.iter().any(|signal| exit.how.is_by(*signal)) && !self.has_own_reason(),
            consequence: self.follows(),
        })
    }
}
