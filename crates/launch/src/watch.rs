//! The workers of a generation while they run: what each piece of news asks for, and how it all ends.

use crate::blame::{self, End};
use crate::given::Given;
use crate::guard::Guard;
use crate::news::News;
use crate::report::{Failure, Report};
use crate::restart::Ended;
use crate::signals;
use crate::spec::LaunchError;
use crate::worker::{Ties, Worker};
use nix::sys::signal::Signal;
use phalanx_coord::Notice;
use phalanx_wire::{Generation, Rank};
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

/// Without anything to wait for, the queue is still looked at this often.
const IDLE: Duration = Duration::from_secs(3600);
/// How long workers have to be gone when not all could be started.
const ABANDON: Duration = Duration::from_secs(5);
/// How long the console has for what is left once somebody waits for the end.
const LAST_LINES: Duration = Duration::from_secs(1);

/// The workers of a generation, and what has become of them.
pub(crate) struct Watch {
    /// When the run began.
    start: Instant,
    generation: Generation,
    grace: Duration,
    workers: Vec<Watched>,
    pub(crate) guard: Guard,
    stop: Option<Stop>,
    /// How many signals have asked for the end.
    signals: u32,
    /// Whether somebody waits for the end: lines that nobody reads are no reason to stay then.
    pub(crate) hurry: Arc<AtomicBool>,
}

/// What is known of one worker.
struct Watched {
    worker: Worker,
    reported: Option<String>,
    consequence: bool,
    /// The signals it was sent while it ran.
    sent: Vec<Signal>,
    exit: Option<Exit>,
    /// How it ended; there once nothing is left of it.
    status: Option<std::io::Result<ExitStatus>>,
}

/// The end of a worker's process.
struct Exit {
    good: bool,
    after: Duration,
    before_stop: bool,
}

/// The end of all of them.
struct Stop {
    /// The signal that asked for it; none if a worker has failed.
    signal: Option<i32>,
    kill_at: Instant,
}

impl Watch {
    pub(crate) fn new(start: Instant, grace: Duration, guard: Guard) -> Watch {
        let generation = Generation(0);
        Watch {
            start,
            generation,
            grace,
            workers: Vec::new(),
            guard,
            stop: None,
            signals: 0,
            hurry: Arc::default(),
        }
    }

    /// Another generation is watched from now on; all of the one before have ended.
    pub(crate) fn begin(&mut self, generation: Generation) {
        self.workers.clear();
        // A hurry of the one before, whose stop took too long, isn't this one's.
        (self.generation, self.stop, self.hurry) = (generation, None, Arc::default());
    }

    /// How this generation ended, for who decides what follows.
    pub(crate) fn ended(&self, restarts: usize, max_restarts: usize) -> Ended {
        let failed = self.stop.as_ref().is_some_and(|stop| stop.signal.is_none());
        Ended { failed, asked: self.signals > 0, restarts, max_restarts }
    }

    pub(crate) fn pids(&self) -> Vec<i32> {
        self.workers.iter().map(|w| w.worker.pid.as_raw()).collect()
    }

    pub(crate) fn start_all(&mut self, given: &Given<'_>, ties: &Ties) -> Result<(), LaunchError> {
        for rank in (0..given.spec.workers as u32).map(Rank) {
            let worker = match Worker::start(given, ties, &self.guard, rank) {
                Ok(worker) => worker,
                Err(error) => {
                    self.guard.forget(rank);
                    return Err(error);
                }
            };
            let (sent, exit, status) = (Vec::new(), None, None);
            self.workers.push(Watched { worker, reported: None, consequence: false, sent, exit, status });
        }
        Ok(())
    }

    /// Kills those that were started before one couldn't be.
    pub(crate) fn abandon(&mut self, news: &Receiver<News>) {
        self.hurry.store(true, Ordering::Relaxed);
        self.send(Signal::SIGKILL);
        let until = Instant::now() + ABANDON;
        while !self.all_ended() {
            match news.recv_timeout(until.saturating_duration_since(Instant::now())) {
                Ok(news) => drop(self.heed(news)),
                Err(_) => return,
            }
        }
    }

    pub(crate) fn all_ended(&self) -> bool {
        self.workers.iter().all(|w| w.status.is_some())
    }

    /// The ranks whose process runs.
    fn running(&self) -> Vec<Rank> {
        self.workers.iter().filter(|w| w.exit.is_none()).map(|w| w.worker.rank).collect()
    }

    /// Signals everything that is left of the workers.
    fn send(&mut self, signal: Signal) {
        self.send_to(signal, |_| true);
    }

    fn send_to(&mut self, signal: Signal, wanted: impl Fn(&Watched) -> bool) {
        for watched in self.workers.iter_mut().filter(|w| w.status.is_none() && wanted(w)) {
            watched.worker.signal(signal);
            if watched.exit.is_none() {
                watched.sent.push(signal);
            }
        }
    }

    /// Waits for what happens next and does what is to be done about it.
    pub(crate) fn next(&mut self, news: &Receiver<News>) -> Option<Report> {
        let kill_at = self.stop.as_ref().map(|stop| stop.kill_at);
        let patience = kill_at.map_or(IDLE, |kill_at| kill_at.saturating_duration_since(Instant::now()));
        match news.recv_timeout(patience) {
            Ok(news) => self.heed(news),
            Err(_) => self.lose_patience(),
        }
    }

    fn heed(&mut self, news: News) -> Option<Report> {
        match news {
            News::Exited(rank, good) => {
                let before_stop = self.stop.is_none();
                self.workers[rank.index()].exit =
                    Some(Exit { good, after: self.start.elapsed(), before_stop });
                if good || !before_stop {
                    return None;
                }
                self.stop = Some(Stop { signal: None, kill_at: Instant::now() + self.grace });
                if self.running().is_empty() {
                    return None;
                }
                // One that has said why it fails is on its way out and may finish its words.
                let ends = |watched: &Watched| watched.reported.is_none() || watched.consequence;
                self.send_to(Signal::SIGTERM, ends);
                // One that is stopped would only heed it once it goes on.
                self.send_to(Signal::SIGCONT, ends);
                Some(Report::Stopping { rank })
            }
            News::Ended(rank) => {
                self.guard.forget(rank);
                let watched = &mut self.workers[rank.index()];
                watched.status = Some(watched.worker.reap());
                None
            }
            News::Signal(number) => {
                let signal = Signal::try_from(number).unwrap_or(Signal::SIGTERM);
                if signals::is_passed_on(number) {
                    self.send(signal);
                    return None;
                }
                self.signals += 1;
                self.hurry.store(true, Ordering::Relaxed);
                // The second one means it.
                self.send(if self.signals > 1 { Signal::SIGKILL } else { signal });
                self.send(Signal::SIGCONT);
                let kill_at = Instant::now() + self.grace;
                self.stop.get_or_insert(Stop { signal: Some(number), kill_at });
                Some(Report::Signalled { signal: signal.as_str() })
            }
            // One of an earlier generation may only now have been heard.
            News::Notice(generation, _) if generation != self.generation => None,
            News::Notice(_, Notice::Failed { rank, message, consequence }) => {
                let watched = self.workers.get_mut(rank.index())?;
                (watched.reported, watched.consequence) = (Some(message), consequence);
                None
            }
            News::Notice(_, Notice::Complete) | News::Shown => None,
        }
    }

    /// The grace period is over, if there was one.
    fn lose_patience(&mut self) -> Option<Report> {
        let stop = self.stop.as_mut()?;
        stop.kill_at = Instant::now() + IDLE;
        self.hurry.store(true, Ordering::Relaxed);
        self.send(Signal::SIGKILL);
        Some(Report::Killing { ranks: self.running() }).filter(|_| !self.running().is_empty())
    }

    /// Lets the console catch up. A pager may be read for as long as its reader likes, so only a signal bounds this wait.
    pub(crate) fn wait_for_console(&mut self, news: &Receiver<News>, outlets: usize) {
        let mut open = outlets;
        while open > 0 {
            match news.recv_timeout(if self.signals > 0 { LAST_LINES } else { IDLE }) {
                Ok(News::Shown) => open -= 1,
                Ok(news) => drop(self.heed(news)),
                Err(RecvTimeoutError::Timeout) if self.signals == 0 => {}
                Err(_) => return,
            }
        }
    }

    /// For the shell: 0, 1, or 128 and the number of the signal that ended the run.
    pub(crate) fn exit_code(&self) -> i32 {
        match self.stop {
            None => 0,
            Some(Stop { signal: Some(number), .. }) => 128 + number,
            Some(Stop { signal: None, .. }) => 1,
        }
    }

    /// What went wrong first, unless nothing did or a signal asked for the end before.
    pub(crate) fn failure(&self) -> Option<Failure> {
        self.stop.as_ref().filter(|stop| stop.signal.is_none())?;
        let mut ended: Vec<(&Watched, &Exit)> =
            self.workers.iter().filter_map(|w| Some((w, w.exit.as_ref()?))).collect();
        ended.sort_by_key(|(_, exit)| exit.after);
        let end = |(watched, exit): &(&Watched, &Exit)| End {
            rank: watched.worker.rank,
            good: exit.good,
            before_stop: exit.before_stop,
            // One that gave a reason of its own had failed before the signal came.
            by_launcher: watched.ended_by_launcher() && (watched.reported.is_none() || watched.consequence),
            consequence: watched.consequence,
        };
        let rank = blame::cause(&ended.iter().map(end).collect::<Vec<_>>())?;
        let watched = &self.workers[rank.index()];
        Some(Failure {
            rank,
            pid: watched.worker.pid.as_raw(),
            how: describe(watched.status.as_ref()?),
            after: watched.exit.as_ref()?.after,
            reported: watched.reported.clone(),
            last_lines: watched.worker.last_lines(),
        })
    }
}

impl Watched {
    /// Whether a signal it was sent ended it: as a signal, or as the code that a shell makes of it.
    fn ended_by_launcher(&self) -> bool {
        let Some(Ok(status)) = &self.status else { return false };
        let sent = |number: i32| self.sent.iter().any(|signal| *signal as i32 == number);
        status.signal().is_some_and(sent) || status.code().is_some_and(|code| sent(code - 128))
    }
}

/// How a process ended, in words.
fn describe(status: &std::io::Result<ExitStatus>) -> String {
    let status = match status {
        Ok(status) => status,
        Err(error) => return format!("was lost: {error}"),
    };
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exited with code {code}"),
        (None, Some(number)) => {
            let name = Signal::try_from(number)
                .map_or_else(|_| format!("signal {number}"), |s| s.as_str().to_owned());
            format!("was killed by {name}")
        }
        (None, None) => format!("ended: {status}"),
    }
}
