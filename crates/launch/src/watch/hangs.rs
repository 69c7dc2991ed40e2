//! What the supervising thread does about workers that hang: it looks at their pulses now and then, has the stack of one that
//! hangs written down by a thread, since a disk may hang too, and then kills it.

use super::{Watch, Watched};
use crate::console::Backlog;
use crate::hang::{Hang, HangLimits, LOOK_EVERY, Standing, Verdict, judge};
use crate::news::{Berth, News};
use crate::report::Report;
use crate::stack;
use nix::sys::signal::Signal;
use nix::unistd::Pid;
use phalanx_job::{Look, Monitor, Section};
use phalanx_wire::Rank;
use std::fs;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::SyncSender;
use std::time::{Duration, Instant};

/// How long it may take to write a stack down.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// What looks for workers that hang.
pub(crate) struct Lookout {
    limits: HangLimits,
    news: SyncSender<News>,
    backlog: Backlog,
    /// Where stacks are written down.
    folder: PathBuf,
    next: Instant,
    /// Whether it was said that all wait.
    all_wait: bool,
}

/// What is known of a worker by its pulse.
pub(super) struct Vitals {
    monitor: Arc<Monitor>,
    standing: Standing,
    end: Option<HungEnd>,
}

/// The end of a worker that hangs.
struct HungEnd {
    why: String,
    /// Since when it should have made progress.
    since: Instant,
    kill_at: Instant,
    file: Option<PathBuf>,
    is_killed: bool,
}

impl Lookout {
    /// None where nobody is ever taken to hang.
    pub(crate) fn new(
        limits: &HangLimits,
        news: &SyncSender<News>,
        backlog: Backlog,
        folder: PathBuf,
    ) -> Option<Lookout> {
        let (limits, news) = (limits.clone(), news.clone());
        limits.any().then(|| Lookout { limits, news, backlog, folder, next: Instant::now(), all_wait: false })
    }

    /// A pulse for a worker that is to be started. Where the system has no memory for it, as under a limit on the size of files,
    /// the worker is not looked at.
    pub(super) fn monitor(&self) -> Option<Arc<Monitor>> {
        let unseen = |error| {
            tracing::warn!("a worker that hangs won't be seen, without memory for its pulse: {error}")
        };
        Monitor::make().map(Arc::new).map_err(unseen).ok()
    }
}

impl Vitals {
    pub(super) fn new(monitor: Arc<Monitor>) -> Vitals {
        Vitals { standing: Standing::new(monitor.look(), Instant::now()), monitor, end: None }
    }

    /// Whether it isn't waited for any longer.
    fn is_due(&self, now: Instant) -> bool {
        self.end.as_ref().is_some_and(|end| !end.is_killed && now >= end.kill_at)
    }

    /// Since when it should have made progress, if it was killed for that.
    pub(super) fn hung_since(&self) -> Option<Instant> {
        self.end.as_ref().filter(|end| end.is_killed).map(|end| end.since)
    }

    /// How it ended, if that was because it hung.
    pub(super) fn how(&self) -> Option<String> {
        let end = self.end.as_ref().filter(|end| end.is_killed)?;
        let file = end.file.as_ref().map_or(String::new(), |file| format!("; its stack: {}", file.display()));
        Some(format!("hung ({}{file})", end.why))
    }
}

impl Watch {
    /// How long the next look may be waited for, if there is to be one.
    pub(super) fn look_in(&self) -> Option<Duration> {
        let lookout = self.lookout.as_ref().filter(|_| self.stop.is_none())?;
        let ends =
            self.workers.iter().filter(|w| w.exit.is_none()).filter_map(|w| w.vitals.as_ref()?.end.as_ref());
        let kills = ends.filter(|end| !end.is_killed).map(|end| end.kill_at);
        Some(kills.fold(lookout.next, Instant::min).saturating_duration_since(Instant::now()))
    }

    /// Looks at the workers' pulses.
    pub(super) fn look(&mut self, now: Instant) -> Option<Report> {
        let running = self.workers.iter_mut().filter(|w| w.exit.is_none());
        running
            .filter(|w| w.vitals.as_ref().is_some_and(|vitals| vitals.is_due(now)))
            .for_each(Watched::kill_hung);
        let lookout = self.lookout.as_mut().filter(|lookout| now >= lookout.next)?;
        lookout.next = now + LOOK_EVERY;
        let (is_held_up, in_place) = (lookout.backlog.is_there(), self.in_place);
        let running = self.workers.iter_mut().filter(|w| w.exit.is_none());
        let mut running: Vec<(Rank, &mut Vitals)> = running
            .filter_map(|w| {
                let vitals = w.vitals.as_mut()?;
                vitals.standing.see_stopped(is_stopped(w.worker.pid), now);
                Some((w.worker.rank, vitals))
            })
            .collect();
        for (_, vitals) in &mut running {
            vitals.standing.see(begun(vitals.monitor.look(), in_place), now);
            if is_held_up {
                vitals.standing.excuse(now);
            }
        }
        // Whoever waits, waits for the one that is about to be killed.
        if running.iter().any(|(_, vitals)| vitals.end.is_some()) {
            return None;
        }
        let standings: Vec<(Rank, &Standing)> =
            running.iter().map(|(rank, vitals)| (*rank, &vitals.standing)).collect();
        let verdict = judge(now, &standings, &lookout.limits);
        let was_said = std::mem::replace(&mut lookout.all_wait, matches!(verdict, Verdict::AllWait(_)));
        match verdict {
            Verdict::Fine => None,
            Verdict::AllWait(long) => (!was_said).then_some(Report::AllWait { long }),
            Verdict::Hangs(hang) => self.take_stack(&hang, now),
        }
    }

    /// Has the stack of a worker written down, which is killed then.
    fn take_stack(&mut self, hang: &Hang, now: Instant) -> Option<Report> {
        let (rank, why) = (hang.rank, hang.why());
        let lookout = self.lookout.as_ref()?;
        let watched = self.workers.iter_mut().find(|w| w.worker.rank == rank)?;
        let (berth, pid) = (watched.berth, watched.worker.pid);
        let vitals = watched.vitals.as_mut()?;
        let path = lookout.folder.join(watched.folder.to_string()).join(format!("rank-{rank}.txt"));
        let title = format!("rank {rank} (pid {pid}) hung ({why})");
        let (monitor, news) = (Arc::clone(&vitals.monitor), lookout.news.clone());
        let write = move || {
            let file = stack::write(&path, &title, &monitor, pid).ok().map(|()| path);
            // Nobody wants to know once the run is over.
            let _ = news.send(News::Stack(berth, file));
        };
        let thread = std::thread::Builder::new().name(format!("phalanx-stack-{rank}")).spawn(write);
        let patience = if thread.is_ok() { LAST_WORDS } else { Duration::ZERO };
        let (since, kill_at) = (now - (hang.still - hang.limit), now + patience);
        vitals.end = Some(HungEnd { why: why.clone(), since, kill_at, file: None, is_killed: false });
        Some(Report::Hung { rank, why })
    }

    /// A stack is written down, or can't be.
    pub(super) fn stack_is_there(&mut self, berth: Berth, file: Option<PathBuf>) {
        let hung = self.workers.iter_mut().find(|w| w.berth == berth && w.exit.is_none());
        let Some(watched) = hung else { return };
        if let Some(end) = watched.vitals.as_mut().and_then(|vitals| vitals.end.as_mut()) {
            end.file = file;
        }
        watched.kill_hung();
    }
}

/// What a worker does that may not have come to say so: where workers go on in place it is a program of ours, in its start.
fn begun(look: Look, in_place: bool) -> Look {
    let section = if in_place && look.entered == 0 { Section::Start } else { look.section };
    Look { section, ..look }
}

/// Whether a process is stopped by a signal, and not by who looks into it.
fn is_stopped(pid: Pid) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // Its name, which may be anything, stands in brackets before.
    stat.rsplit_once(')').is_some_and(|(_, rest)| rest.trim_start().starts_with('T'))
}

impl Watched {
    fn kill_hung(&mut self) {
        if let Some(end) = self.vitals.as_mut().and_then(|vitals| vitals.end.as_mut()) {
            end.is_killed = true;
            self.worker.signal(Signal::SIGKILL);
        }
    }
}
