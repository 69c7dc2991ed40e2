//! Which workers hang: a pure function of what their pulses showed from look to look, and of what others do meanwhile.
//!
//! A worker makes progress as long as its pulse changes: it enters a section, or a wait for other ranks ends. One that waits for
//! others is never to blame, since where one hangs, the others wait for it; so is one that does what nobody judges. One that
//! does neither, and shows no change for longer than the limit of its section, hangs. One that is stopped neither waits, since
//! nothing that it waits for could wake it, nor does what it likes: the ranks that it would wait for may be lost, and others may
//! wait for it alone. It isn't given longer than ranks that have met give each other, which can't see by themselves who is
//! stopped before that, or alone.

mod limits;

pub use limits::HangLimits;
use limits::{Kind, Limit};
use phalanx_job::{Look, Section};
use phalanx_wire::Rank;
use std::time::{Duration, Instant};

/// How often pulses are looked at.
pub(crate) const LOOK_EVERY: Duration = Duration::from_millis(250);
/// A launcher that didn't get to look for so long was stopped itself, maybe with all workers, and begins anew.
const OWN_PAUSE: Duration = Duration::from_secs(5);

/// How long one may be stopped.
const STOPPED: Duration = Duration::from_millis(1500);

/// What was seen of a worker.
#[derive(Clone, Debug)]
pub(crate) struct Standing {
    look: Look,
    /// Since when it looks like that.
    since: Instant,
    last: Instant,
    /// Since when its process is stopped, if it is.
    stopped: Option<Instant>,
    /// The longest that it took so far without a change, by kind of section.
    longest: [Option<Duration>; Kind::COUNT],
}

/// What follows from all of them.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Verdict {
    /// Nothing.
    Fine,
    /// This one hangs.
    Hangs(Hang),
    /// All wait for others, for longer than any of them may, so none is to blame.
    AllWait(Duration),
}

/// A worker that makes no progress.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Hang {
    pub(crate) rank: Rank,
    pub(crate) section: Section,
    /// For how long.
    pub(crate) still: Duration,
    pub(crate) limit: Duration,
}

impl Standing {
    pub(crate) fn new(look: Look, now: Instant) -> Standing {
        Standing { look, since: now, last: now, stopped: None, longest: Default::default() }
    }

    /// The next look.
    pub(crate) fn see(&mut self, look: Look, now: Instant) {
        let was_stopped = now.saturating_duration_since(self.last) > OWN_PAUSE;
        self.last = now;
        if was_stopped {
            (self.look, self.since) = (look, now);
            self.stopped = self.stopped.map(|_| now);
        }
        if look == self.look {
            return;
        }
        let was_seen = Kind::of(self.look.section).filter(|_| !self.look.is_waiting);
        // Steps may be too short to be seen.
        let came_by = (look.steps > self.look.steps).then_some(Kind::Step);
        for kind in was_seen.into_iter().chain(came_by) {
            let took = Some(now.saturating_duration_since(self.since));
            let longest = &mut self.longest[kind as usize];
            *longest = took.max(*longest);
        }
        (self.look, self.since) = (look, now);
    }

    /// Whether its process is stopped now.
    pub(crate) fn see_stopped(&mut self, is_stopped: bool, now: Instant) {
        self.stopped = is_stopped.then(|| self.stopped.unwrap_or(now));
    }

    fn waits(&self) -> bool {
        self.look.is_waiting && self.stopped.is_none()
    }

    /// What is waited for on the worker's behalf isn't its fault, as when nobody reads what it writes.
    pub(crate) fn excuse(&mut self, now: Instant) {
        self.since = now;
    }

    fn still(&self, now: Instant) -> Duration {
        // Before it was stopped it may have waited, or done what it likes.
        now.saturating_duration_since(self.stopped.map_or(self.since, |stopped| stopped.max(self.since)))
    }

    fn limit(&self, limits: &HangLimits) -> Option<Duration> {
        let is_stopped = self.stopped.is_some();
        // One that is stopped doesn't do what it likes, if it ever says what it does.
        let kind =
            Kind::of(self.look.section).or((is_stopped && self.look.entered > 0).then_some(Kind::Step))?;
        let limit = match *limits.of(kind) {
            Limit::Off => return None,
            Limit::Fixed(limit) => limit,
            Limit::Grows { first, least, times } => {
                let grown = self.longest[kind as usize].map(|longest| least.max(longest * times));
                grown.unwrap_or(first)
            }
        };
        Some(if is_stopped { limit.min(STOPPED) } else { limit })
    }
}

/// Judges the workers that run.
pub(crate) fn judge(now: Instant, workers: &[(Rank, &Standing)], limits: &HangLimits) -> Verdict {
    let over = |standing: &Standing| {
        standing
            .limit(limits)
            .map(|limit| (standing.still(now), limit))
            .filter(|(still, limit)| still > limit)
    };
    let hang = workers.iter().filter(|(_, standing)| !standing.waits()).find_map(|(rank, standing)| {
        let (still, limit) = over(standing)?;
        Some(Hang { rank: *rank, section: standing.look.section, still, limit })
    });
    if let Some(hang) = hang {
        return Verdict::Hangs(hang);
    }
    let waits = |(_, standing): &(Rank, &Standing)| {
        over(standing).filter(|_| standing.waits()).map(|(still, _)| still)
    };
    let all: Option<Vec<Duration>> = workers.iter().map(waits).collect();
    all.and_then(|waits| waits.into_iter().min()).map_or(Verdict::Fine, Verdict::AllWait)
}

impl Hang {
    /// Why, as in "no progress in step 812 for 60.2 s, limit 60 s".
    pub(crate) fn why(&self) -> String {
        let doing = match self.section {
            Section::Free => "what it likes".to_owned(),
            Section::Start => "its start".into(),
            Section::Step(step) => format!("step {step}"),
            Section::Evaluation => "an evaluation".into(),
            Section::Checkpoint => "a checkpoint".into(),
        };
        let (still, limit) = (self.still.as_secs_f64(), self.limit.as_secs_f64());
        format!("no progress in {doing} for {still:.1} s, limit {limit} s")
    }
}

#[cfg(test)]
mod tests;
