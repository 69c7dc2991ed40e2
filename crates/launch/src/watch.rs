//! The workers of a generation while they run: what each piece of news asks for, and how it all ends.

mod hangs;
mod watched;

pub(crate) use hangs::Lookout;

use crate::blame::{self, End};
use crate::given::Given;
use crate::guard::Guard;
use crate::news::{Berth, How, News};
use crate::report::{Failure, Report};
use crate::restart::{self, Ended, Lost};
use crate::spec::{LaunchError, LaunchSpec, MAX_GRACE};
use crate::worker::{Ties, Worker};
use hangs::Vitals;
use nix::sys::signal::Signal;
use phalanx_coord::{Notice, Restarts};
use phalanx_job::{Cause, DRAINED, WorkerFailure};
use phalanx_wire::{Generation, Rank};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};
use watched::{Exit, Watched};

/// Without anything to wait for, the queue is still looked at this often.
const IDLE: Duration = Duration::from_secs(3600);
/// Where a worker fails that only followed another, so long that one has to end by itself, with its reason, before all are asked to.
const FOLLOWED: Duration = Duration::from_secs(2);
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
    max_restarts: usize,
    /// By the rank that they were started with.
    workers: Vec<Watched>,
    /// Those whose rank another has taken over, until nothing is left of them.
    former: Vec<Watched>,
    pub(crate) guard: Guard,
    /// What looks for those that hang; gone when the run is over.
    lookout: Option<Lookout>,
    stop: Option<Stop>,
    /// Whether they were ended at once, since others go on without them.
    released: bool,
    /// Whether whoever is lost can be replaced while the others go on.
    in_place: bool,
    /// When that ended last: with the first of those that fail, or with their training.
    left_place: Option<Instant>,
    /// What went wrong each time that workers were started again.
    pub(crate) failures: Vec<Failure>,
    /// How often that was, as far as it counts.
    pub(crate) restarts: Restarts,
    /// Whether a worker couldn't go on without what was lost with another, so that whoever ends because of it can't either.
    part_lost: bool,
    /// The signals that were passed on and that those who come later get, too.
    held: Vec<Signal>,
    /// Which those are.
    holds: Vec<i32>,
    /// How many signals have asked for the end.
    signals: u32,
    /// The signal that workers were asked to end by, since others say so.
    told: Option<Signal>,
    /// Whether somebody waits for the end: lines that nobody reads are no reason to stay then.
    pub(crate) hurry: Arc<AtomicBool>,
}

/// The end of all of them.
struct Stop {
    why: StopWhy,
    since: Instant,
    /// When workers are asked to end, if they haven't been, and because of which rank.
    ask_at: Option<(Instant, Rank)>,
    kill_at: Instant,
}

impl Stop {
    /// Workers are asked to end now, and have so long.
    fn new(why: StopWhy, grace: Duration) -> Stop {
        let since = Instant::now();
        Stop { why, since, ask_at: None, kill_at: since + grace }
    }
}

/// What ends all of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum StopWhy {
    /// A worker has failed.
    Failure,
    /// This signal asked for it.
    Signal(i32),
    /// Who leads the nodes of the run asked for it.
    Order,
    /// All that made steps have ended well, and those that were to come in come too late.
    Done,
}

/// What the supervising thread has to know of.
pub(crate) enum Happened {
    /// The caller may want to show it.
    Told(Report),
    /// A worker has failed, and another is to take its place.
    Lost {
        /// The rank that it was started with.
        rank: Rank,
        /// Which restart that is, from 1.
        restart: usize,
    },
}

impl Watch {
    pub(crate) fn new(start: Instant, spec: &LaunchSpec, guard: Guard, lookout: Option<Lookout>) -> Watch {
        // Where nodes are led, who leads them counts.
        let is_led = spec.nodes.is_some() && spec.max_restarts > 0;
        let max_restarts = if is_led { usize::MAX } else { spec.max_restarts };
        Watch {
            start,
            generation: Generation(0),
            grace: spec.grace.min(MAX_GRACE),
            max_restarts,
            workers: Vec::new(),
            former: Vec::new(),
            guard,
            lookout,
            stop: None,
            released: false,
            in_place: false,
            left_place: None,
            failures: Vec::new(),
            restarts: Restarts::default(),
            part_lost: false,
            held: Vec::new(),
            holds: spec.held_signals.clone(),
            signals: 0,
            told: None,
            hurry: Arc::default(),
        }
    }

    /// Another generation is watched from now on; all of the one before have ended.
    pub(crate) fn begin(&mut self, generation: Generation) {
        self.workers.clear();
        self.former.clear();
        // A hurry of the one before, whose stop took too long, isn't this one's.
        let hurry = Arc::new(AtomicBool::new(self.signals > 0));
        (self.generation, self.stop, self.hurry) = (generation, None, hurry);
        (self.in_place, self.left_place, self.released, self.told) = (false, None, false, None);
        self.part_lost = false;
    }

    /// How this generation ended, for who decides what follows.
    pub(crate) fn ended(&self) -> Ended {
        Ended {
            failed: self.has_failed(),
            for_good: self.cause().is_some_and(|watched| watched.is_for_good(self.was_in_place())),
            asked: self.signals > 0,
            part_lost: self.cause().is_some_and(|watched| watched.misses_a_part(self.part_lost)),
            drained: self.has_drained(),
            restarts: self.restarts,
            max_restarts: self.max_restarts,
        }
    }

    /// Whether a worker's failure has stopped the others.
    pub(crate) fn has_failed(&self) -> bool {
        self.stop.as_ref().is_some_and(|stop| stop.why == StopWhy::Failure)
    }

    /// Whether a worker has ended in order to be started again later, and not because another has failed.
    pub(crate) fn has_drained(&self) -> bool {
        self.workers.iter().any(Watched::has_drained)
    }

    /// Whether whoever was lost could be replaced until the others were stopped. That ends as soon as one that fails says so, whose
    /// reason may only come behind.
    fn was_in_place(&self) -> bool {
        let until = self.stop.as_ref().map_or_else(Instant::now, |stop| stop.since);
        self.in_place || self.left_place.is_some_and(|left| left + FOLLOWED > until)
    }

    pub(crate) fn pids(&self) -> Vec<i32> {
        self.workers.iter().map(|w| w.worker.pid.as_raw()).collect()
    }

    pub(crate) fn start_all(
        &mut self,
        given: &Given<'_>,
        ties: &Ties,
        is_asked: &AtomicBool,
    ) -> Result<(), LaunchError> {
        for local in 0..given.spec.workers {
            // The first is started in any case, since a run without workers has no end to tell.
            if local > 0 && is_asked.load(Ordering::Relaxed) {
                break;
            }
            let watched = self.start(given, ties, local)?;
            self.workers.push(watched);
        }
        Ok(())
    }

    /// Starts another in the place of a worker that has failed.
    pub(crate) fn replace(&mut self, given: &Given<'_>, ties: &Ties, rank: Rank) -> Result<(), LaunchError> {
        let Some(place) = self.workers.iter().position(|w| w.worker.rank == rank) else { return Ok(()) };
        let other = self.start(given, ties, place)?;
        self.former.push(std::mem::replace(&mut self.workers[place], other));
        self.former.retain(|former| !former.ended);
        Ok(())
    }

    fn start(&mut self, given: &Given<'_>, ties: &Ties, local: usize) -> Result<Watched, LaunchError> {
        let taken: BTreeSet<u32> = self.all().filter(|w| !w.ended).map(|w| w.berth.0).collect();
        let berth =
            Berth((0..).find(|berth| !taken.contains(berth)).expect("there is always another number"));
        let monitor = self.lookout.as_ref().and_then(Lookout::monitor);
        let started = self.start.elapsed();
        match Worker::start(given, ties, &self.guard, berth, local, monitor.clone()) {
            Ok(worker) => {
                self.held.iter().for_each(|signal| worker.signal(*signal));
                let (folder, sent, vitals) = (given.folder, Vec::new(), monitor.map(Vitals::new));
                let (reported, exit, ended, given_up) = (None, None, false, false);
                let comes_in = given.replaces;
                Ok(Watched {
                    worker,
                    started,
                    berth,
                    folder,
                    reported,
                    sent,
                    exit,
                    ended,
                    vitals,
                    comes_in,
                    given_up,
                })
            }
            Err(error) => {
                self.guard.forget(berth);
                Err(error)
            }
        }
    }

    fn all(&self) -> impl Iterator<Item = &Watched> {
        self.workers.iter().chain(&self.former)
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
        self.all().all(|w| w.ended)
    }

    /// The ranks whose process runs.
    pub(crate) fn running(&self) -> Vec<Rank> {
        self.workers.iter().filter(|w| w.exit.is_none()).map(|w| w.worker.rank).collect()
    }

    /// Signals everything that is left of the workers.
    fn send(&mut self, signal: Signal) {
        self.send_to(signal, |_| true);
    }

    fn send_to(&mut self, signal: Signal, wanted: impl Fn(&Watched) -> bool) {
        let all = self.workers.iter_mut().chain(&mut self.former);
        for watched in all.filter(|w| !w.ended && wanted(w)) {
            watched.worker.signal(signal);
            if watched.exit.is_none() {
                watched.sent.push(signal);
            }
        }
    }

    /// Waits for what happens next and does what is to be done about it.
    pub(crate) fn next(&mut self, news: &Receiver<News>) -> Option<Happened> {
        match news.recv_timeout(self.patience()) {
            Ok(news) => self.heed(news),
            Err(_) => self.lose_patience().map(Happened::Told),
        }
    }

    /// How long news may be waited for before [`Watch::lose_patience`] is due.
    pub(crate) fn patience(&self) -> Duration {
        let due = self.stop.as_ref().map(|stop| stop.ask_at.map_or(stop.kill_at, |(at, _)| at));
        let due_in = due.map(|due| due.saturating_duration_since(Instant::now()));
        due_in.or_else(|| self.look_in()).unwrap_or(IDLE)
    }

    /// Stops all workers since others say so, who may have been asked to by a signal: they have so long.
    pub(crate) fn obey(&mut self, signal: Option<i32>, grace: Duration) {
        // Those that are being stopped know it.
        if self.stop.as_ref().is_none_or(|stop| stop.ask_at.is_some()) {
            let signal = signal.and_then(|number| Signal::try_from(number).ok()).unwrap_or(Signal::SIGTERM);
            self.told = Some(signal);
            self.send(signal);
            self.send(Signal::SIGCONT);
        }
        let order = Stop::new(StopWhy::Order, grace.min(self.grace));
        let kill_at = order.kill_at;
        let stop = self.stop.get_or_insert(order);
        (stop.ask_at, stop.kill_at) = (None, stop.kill_at.min(kill_at));
    }

    /// Ends all workers at once, since the others of the run go on without them: anything else would have them end, too. It may be
    /// a signal that this is for.
    pub(crate) fn release(&mut self, signal: Option<i32>) {
        self.released = true;
        // The others wait to hear that nothing is left of them.
        self.hurry.store(true, Ordering::Relaxed);
        self.send(Signal::SIGKILL);
        let why = signal.map_or(StopWhy::Order, StopWhy::Signal);
        self.stop.get_or_insert(Stop::new(why, self.grace)).ask_at = None;
    }

    /// A signal asks for the end, which is heeded elsewhere: somebody waits for it now.
    pub(crate) fn asked(&mut self) {
        self.signals += 1;
        self.hurry.store(true, Ordering::Relaxed);
    }

    /// Those that have ended badly while others that go on in place were to end, too, and to keep what they have: these don't wait for them
    /// any more.
    pub(crate) fn lost_while_stopping(&self) -> Vec<Rank> {
        if self.stop.is_none() || self.released || !self.in_place {
            return Vec::new();
        }
        let lost = |w: &&Watched| w.exit.as_ref().is_some_and(|exit| !exit.how.is_well());
        self.workers.iter().filter(lost).map(|w| w.worker.rank).collect()
    }

    /// Whether all workers are to end.
    pub(crate) fn is_stopping(&self) -> bool {
        self.stop.is_some()
    }

    /// What the device of a worker has met that was lost for it.
    pub(crate) fn fault_of_device(&self, rank: Rank) -> Option<String> {
        let watched = self.workers.iter().find(|w| w.worker.rank == rank)?;
        let (why, cause) = watched.reported.as_ref()?;
        (*cause == Cause::Device).then(|| why.clone())
    }

    /// No other is started in the place of a worker that was lost: where none is left that goes on without it, and none may come for
    /// one of these, all have failed. Gives how many are left.
    pub(crate) fn not_replaced(&mut self, rank: Rank, undecided: &[Rank]) -> usize {
        let left = self.running().len() + undecided.len();
        if left == 0 {
            self.stop.get_or_insert(Stop::new(StopWhy::Failure, self.grace));
        } else if let Some(watched) = self.worker(rank) {
            watched.given_up = true;
        }
        left
    }

    /// Whether whoever is lost can be replaced while the others go on.
    pub(crate) fn is_in_place(&self) -> bool {
        self.in_place && self.stop.is_none()
    }

    /// Does what is to be done about what happened.
    pub(crate) fn heed(&mut self, news: News) -> Option<Happened> {
        match news {
            News::Exited(berth, how) => self.exited(berth, how),
            News::Ended(berth) => {
                self.guard.forget(berth);
                let all = self.workers.iter_mut().chain(&mut self.former);
                for watched in all.filter(|w| w.berth == berth && !w.ended) {
                    watched.worker.reap();
                    watched.ended = true;
                }
                None
            }
            News::PassOn(number) => {
                let signal = Signal::try_from(number).ok()?;
                if self.holds.contains(&number) && !self.held.contains(&signal) {
                    self.held.push(signal);
                }
                self.send(signal);
                None
            }
            News::Signal(number) => {
                let signal = Signal::try_from(number).unwrap_or(Signal::SIGTERM);
                self.asked();
                // The second one means it, and one that they had from others they needn't have twice.
                let is_known = self.signals == 1 && self.told == Some(signal);
                if !is_known {
                    self.send(if self.signals > 1 { Signal::SIGKILL } else { signal });
                }
                self.send(Signal::SIGCONT);
                self.stop.get_or_insert(Stop::new(StopWhy::Signal(number), self.grace)).ask_at = None;
                Some(Happened::Told(Report::Signalled { signal: signal.as_str(), is_known }))
            }
            // One of an earlier generation may only now have been heard.
            News::Notice(generation, _) if generation != self.generation => None,
            News::Notice(_, Notice::Failed { rank, message, cause }) => {
                self.worker(rank)?.reported = Some((message, cause));
                None
            }
            News::Notice(_, Notice::Begun { workers, .. }) => {
                // Those that went on have got over whomever they lost.
                for watched in self.workers.iter_mut().filter(|w| workers.contains(&w.worker.rank)) {
                    (watched.reported, watched.comes_in) = (None, false);
                }
                if self.workers.iter().all(|w| workers.contains(&w.worker.rank)) {
                    self.restarts = self.restarts.got_over();
                    self.part_lost = false;
                }
                None
            }
            News::Notice(_, Notice::InPlace(in_place)) => {
                if std::mem::replace(&mut self.in_place, in_place) && !in_place {
                    self.left_place = Some(Instant::now());
                }
                None
            }
            News::Notice(_, Notice::Silent { rank }) => {
                let watched = self.worker(rank).filter(|w| w.exit.is_none())?;
                watched.reported =
                    Some(("it gave no sign of life to the others, and was killed".into(), Cause::Unknown));
                watched.worker.signal(Signal::SIGKILL);
                Some(Happened::Told(Report::Silent { rank }))
            }
            News::Stack(berth, file) => {
                self.stack_is_there(berth, file);
                None
            }
            News::Fleet(_) | News::Alone(..) | News::Found(..) | News::Shown => None,
        }
    }

    /// The rank of the worker that ends well, if this news is of one.
    pub(crate) fn ends_well(&self, news: &News) -> Option<Rank> {
        let News::Exited(berth, how) = news else { return None };
        let watched = self.workers.iter().find(|w| w.berth == *berth).filter(|_| how.is_well());
        watched.map(|w| w.worker.rank)
    }

    fn worker(&mut self, rank: Rank) -> Option<&mut Watched> {
        self.workers.iter_mut().find(|w| w.worker.rank == rank)
    }

    /// A process is over: if that was no good end, another takes its place, or all others are stopped.
    fn exited(&mut self, berth: Berth, how: How) -> Option<Happened> {
        let before_stop = self.stop.is_none();
        let well = how.is_well();
        let after = self.start.elapsed();
        let exit = Exit { how, after, before_stop };
        let place = self.workers.iter().position(|w| w.berth == berth && w.exit.is_none())?;
        self.workers[place].exit = Some(exit);
        if well && before_stop {
            self.end_late_comers();
        }
        if well {
            return None;
        }
        let watched = &self.workers[place];
        let rank = watched.worker.rank;
        let follows = watched.follows();
        if !before_stop {
            // That of whoever was waited for is the reason.
            let waits = self.stop.as_ref().is_some_and(|stop| stop.ask_at.is_some());
            return (waits && !follows).then(|| self.ask_to_end(rank)).flatten().map(Happened::Told);
        }
        let hung = watched.vitals.as_ref().and_then(Vitals::hung_since);
        let lost_at = hung.map_or(after, |since| since.saturating_duration_since(self.start));
        let cause = watched.cause();
        self.part_lost |= cause == Some(Cause::PartLost);
        // In the place of one whose device is at fault none is started, where others go on.
        let restarts = match cause {
            Some(Cause::Device) => self.restarts,
            Some(Cause::PartLost) => self.restarts.with_part_lost(watched.started, after),
            _ => self.restarts.with(watched.started, lost_at, after),
        };
        let lost = Lost {
            in_place: self.in_place,
            cause,
            any_done: self.workers.iter().any(|w| w.exit.as_ref().is_some_and(|exit| exit.how.is_well())),
            restarts,
            max_restarts: self.max_restarts,
        };
        if restart::is_replaced(lost) {
            self.failures.extend(watched.failure());
            self.restarts = lost.restarts;
            return Some(Happened::Lost { rank, restart: lost.restarts.count });
        }
        if follows {
            let ask_at = Some((Instant::now() + FOLLOWED, rank));
            self.stop = Some(Stop { ask_at, ..Stop::new(StopWhy::Failure, FOLLOWED + self.grace) });
            return None;
        }
        self.stop = Some(Stop::new(StopWhy::Failure, self.grace));
        self.ask_to_end(rank).map(Happened::Told)
    }

    /// Asks those that run to end because of this rank.
    fn ask_to_end(&mut self, rank: Rank) -> Option<Report> {
        self.stop.iter_mut().for_each(|stop| stop.ask_at = None);
        if self.running().is_empty() {
            return None;
        }
        // One that has said why it fails is on its way out and may finish its words.
        let ends = |watched: &Watched| !watched.has_own_reason();
        self.send_to(Signal::SIGTERM, ends);
        // One that is stopped would only heed it once it goes on.
        self.send_to(Signal::SIGCONT, ends);
        Some(Report::Stopping { rank })
    }

    /// Where only such are left as never came in, there is nobody any more whom they could meet, and nothing to do. They have
    /// nothing to keep either.
    fn end_late_comers(&mut self) {
        let mut running = self.workers.iter().filter(|w| w.exit.is_none()).peekable();
        if running.peek().is_some() && running.all(|w| w.comes_in) {
            self.stop = Some(Stop::new(StopWhy::Done, IDLE));
            self.send(Signal::SIGKILL);
        }
    }

    /// Those that were waited for, or their grace period, have had their time, if there was one; else it is time to look who hangs.
    pub(crate) fn lose_patience(&mut self) -> Option<Report> {
        if let Some((_, rank)) = self.stop.as_ref().and_then(|stop| stop.ask_at) {
            return self.ask_to_end(rank);
        }
        let Some(stop) = &mut self.stop else { return self.look(Instant::now()) };
        stop.kill_at = Instant::now() + IDLE;
        self.hurry.store(true, Ordering::Relaxed);
        self.send(Signal::SIGKILL);
        Some(Report::Killing { ranks: self.running() }).filter(|_| !self.running().is_empty())
    }

    /// Lets the console catch up. A pager may be read for as long as its reader likes, so only a signal bounds this wait.
    pub(crate) fn wait_for_console(&mut self, news: &Receiver<News>, outlets: usize) {
        // No worker is left, and its end of the queue mustn't keep that open.
        self.lookout = None;
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

    /// For the shell: 0, 1, 75 for a run that is to be started again, or 128 and the number of the signal that ended it.
    pub(crate) fn exit_code(&self) -> i32 {
        match self.stop.as_ref().map(|stop| stop.why) {
            Some(StopWhy::Signal(number)) => 128 + number,
            Some(StopWhy::Failure) if self.signals > 0 => 1,
            // Whoever fails while others make room is no reason not to start them again later.
            _ if self.has_drained() => DRAINED.into(),
            None | Some(StopWhy::Done) => 0,
            Some(StopWhy::Failure | StopWhy::Order) => 1,
        }
    }

    /// What went wrong first, unless nothing did or a signal asked for the end before.
    pub(crate) fn failure(&self) -> Option<Failure> {
        self.cause()?.failure()
    }

    /// The same for who leads the nodes of the run.
    pub(crate) fn worker_failure(&self) -> Option<WorkerFailure> {
        self.cause()?.worker_failure(self.was_in_place(), self.part_lost)
    }

    /// How the worker has failed that was started with this rank.
    pub(crate) fn failure_of(&self, rank: Rank) -> Option<WorkerFailure> {
        self.workers
            .iter()
            .find(|w| w.worker.rank == rank)?
            .worker_failure(self.was_in_place(), self.part_lost)
    }

    fn cause(&self) -> Option<&Watched> {
        self.stop.as_ref().filter(|stop| !matches!(stop.why, StopWhy::Signal(_) | StopWhy::Done))?;
        let blamed = |given_up: bool| {
            let workers = self.workers.iter().filter(|w| w.given_up == given_up);
            let ended = workers.filter_map(|w| Some((w.exit.as_ref()?.after, w.end()?)));
            let mut ended: Vec<(Duration, End)> = ended.collect();
            ended.sort_by_key(|(after, _)| *after);
            blame::cause(&ended.into_iter().map(|(_, end)| end).collect::<Vec<_>>())
        };
        // Those that went on without a lost worker have got over it.
        let rank = blamed(false).or_else(|| blamed(true))?;
        self.workers.iter().find(|w| w.worker.rank == rank)
    }
}
