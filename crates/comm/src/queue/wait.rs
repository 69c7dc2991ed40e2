//! Waits inside the engine: how often one looks, when it sleeps, what it looks out for, and what it says when it is given up.
use super::Engine;
use crate::engine::{LONGEST_SLEEP, Play};
use crate::error::{Error, Pace};
use crate::siblings::Others;
use crate::transport::Verdict;
use crate::watch::Watch;
use phalanx_wire::{Deadline, Rank};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Looks at what moved between two looks at the clock, which cost as much.
const LOOKS_PER_CLOCK: u32 = 16;
/// How long nothing moves before a wait takes in letters of ranks that it doesn't wait for.
const LISTEN_AFTER: Duration = Duration::from_millis(2);
/// How long nothing moves before a wait asks the ranks that it waits for what they are in. Long, since a rank that was asked
/// after it left cuts off what TCP hasn't brought of its last words.
const ASK_AFTER: Duration = Duration::from_millis(100);
/// How long a wait that spins keeps its core to itself.
const ALONE: Duration = Duration::from_micros(20);

/// How long a wait sleeps while another group of this rank has something under way, which may go on any moment.
const OTHERS_NAP: Duration = Duration::from_millis(1);

/// What a thread waits for inside the engine.
pub(crate) enum Until<'a> {
    /// An operation that was started.
    Done(u64),
    /// All collectives that were started.
    Drained,
    /// This one, over a borrowed buffer.
    Played(&'a mut Play, &'a mut [u8]),
    /// What all ranks do together elsewhere.
    Elsewhere(&'a mut dyn Elsewhere),
}

/// What the ranks of a group do together by other ways than its own.
pub(crate) trait Elsewhere {
    /// What it is, for people.
    fn describe(&self) -> String;

    /// Whether it is done: one look.
    fn is_done(&mut self) -> Result<bool, Error>;

    /// How long such a wait takes as a rule, if that is known.
    fn usual(&self) -> Option<Duration> {
        None
    }

    /// What it comes to that a rank has taken its leave, as this error tells: if it has done its part, nothing.
    fn left(&mut self, error: Error) -> Option<Error>;
}

/// How long a wait for something elsewhere, of which nobody wakes it, sleeps between two looks: at first, and at most. A GPU that is done
/// stands still meanwhile, for a sixteenth of the wait then.
const FIRST_NAP: Duration = Duration::from_micros(20);
const LAST_NAP: Duration = Duration::from_micros(250);
/// A wait that spins does so again about where such a wait usually ends, so that the GPU stands still no longer than a look takes: a
/// sixteenth of the wait before and behind that, at least as long as it may take to wake up, and at most so long.
const LEAST_ABOUT: Duration = Duration::from_micros(100);
const MOST_ABOUT: Duration = Duration::from_micros(500);

/// A wait, between two looks at what it waits for. The time comes from outside.
pub(crate) struct Wait<'a> {
    pub(crate) until: Until<'a>,
    deadline: Deadline,
    begun: Instant,
    /// What [`Mail::moved`] said when something moved last, and when that was.
    moved: u64,
    since: Instant,
    watch: Watch,
}

/// How a group waits.
#[derive(Clone, Copy)]
pub(crate) struct Patience {
    /// How long a wait looks again and again before it sleeps.
    pub(crate) spin: Duration,
    /// How long a peer may give no sign of life; none for as long as the wait lasts.
    pub(crate) silence: Option<Duration>,
}

/// A sleep: for these ranks to send something, or to take something, or for the time to pass.
pub(crate) struct Rest {
    receives: Vec<usize>,
    sends: Vec<usize>,
    at_most: Duration,
}

impl<'a> Wait<'a> {
    pub(crate) fn new(
        until: Until<'a>,
        deadline: Deadline,
        silence: Option<Duration>,
        now: Instant,
    ) -> Wait<'a> {
        Wait { until, deadline, begun: now, moved: 0, since: now, watch: Watch::new(silence, now) }
    }

    /// Of a wait for something elsewhere that usually ends at some time, how far off the time about that is: nothing while it lasts,
    /// none once it is over.
    fn until_due(&self, now: Instant) -> Option<Duration> {
        let Until::Elsewhere(what) = &self.until else { return None };
        let usual = what.usual()?;
        let about = (usual / 16).clamp(LEAST_ABOUT, MOST_ABOUT);
        let waited = now.saturating_duration_since(self.begun);
        (waited <= usual + about).then(|| (usual.saturating_sub(about)).saturating_sub(waited))
    }
}

impl Engine {
    /// Plays until something is done; looks again and again while something moved in the last `spin`, and then sleeps. The group
    /// fails with the wait.
    pub(super) fn wait(
        &mut self,
        patience: Patience,
        deadline: Deadline,
        until: Until<'_>,
        now: Instant,
    ) -> Result<(), Error> {
        self.mail.clock(now);
        let wait = Wait::new(until, deadline, patience.silence, now);
        let aside = Arc::clone(&self.aside);
        let result = aside.waiting(|| self.play_until(patience.spin, wait));
        self.mail.listen(false);
        result
    }

    fn play_until(&mut self, spin: Duration, mut wait: Wait<'_>) -> Result<(), Error> {
        let mut looks = 0u32;
        loop {
            if self.look(&mut wait.until)? {
                return Ok(());
            }
            looks = looks.wrapping_add(1);
            if spin > Duration::ZERO && !looks.is_multiple_of(LOOKS_PER_CLOCK) {
                std::hint::spin_loop();
                continue;
            }
            let now = Instant::now();
            let quiet = self.quiet(&mut wait, now)?;
            let is_due = || wait.until_due(now) == Some(Duration::ZERO);
            if quiet < spin || spin > Duration::ZERO && is_due() {
                // The peer may need this very core.
                if quiet > ALONE {
                    std::thread::yield_now()
                } else {
                    std::hint::spin_loop()
                }
                continue;
            }
            let mut rest = self.rest(&wait, quiet, now);
            match self.siblings.advance() {
                Others::Idle => {}
                Others::Waiting => rest.at_most = rest.at_most.min(OTHERS_NAP),
                Others::Moved => continue,
            }
            if self.playing(&wait.until).any(Play::is_in_turn) {
                continue;
            }
            if let Some(wires) = &mut self.wires {
                wires.park(&rest.receives, &rest.sends, rest.at_most);
            }
        }
    }

    /// Moves what can be moved now; whether what is waited for is done.
    pub(crate) fn look(&mut self, until: &mut Until<'_>) -> Result<bool, Error> {
        self.heed();
        self.advance();
        match until {
            Until::Done(ticket) if self.done.contains_key(ticket) => return Ok(true),
            Until::Done(ticket) if self.failed.is_none() && self.queue.is_empty() => {
                if let Some(error) = self.mail.stuck(*ticket, self.collectives) {
                    self.fail(error);
                }
            }
            Until::Drained if self.failed.is_none() && self.queue.is_empty() => return Ok(true),
            Until::Played(play, buffer) if self.failed.is_none() => {
                let Some(wires) = &mut self.wires else { return Ok(true) };
                match play.advance(self.rank, buffer, &mut self.mail, wires.as_mut(), &self.regions) {
                    Ok(true) => return Ok(true),
                    Ok(false) => {}
                    Err(error) => {
                        self.recorder.failed_in(play.signature.sequence, play.moved());
                        self.fail(error);
                    }
                }
            }
            Until::Elsewhere(what) if self.failed.is_none() => {
                match what.is_done() {
                    Ok(true) => return Ok(true),
                    Ok(false) => {}
                    Err(error) => self.fail(error),
                }
                // It concerns all of them.
                let lost = match self.mail.left(&what.describe()) {
                    Some((error, true)) => what.left(error),
                    lost => lost.map(|(error, _)| error),
                };
                lost.into_iter().for_each(|error| self.fail(error));
            }
            _ => {}
        }
        if self.mail.is_full()
            && let Some(error) = self.overrun(until)
        {
            self.fail(error);
        }
        if self.mail.is_listening()
            && let Some(error) = self.disagreement(until)
        {
            self.fail(error);
        }
        self.check().map(|()| false)
    }

    /// That a letter that there is no room for stands before what the collective of now waits for: nobody can ask for it as
    /// long as that lasts.
    fn overrun(&self, until: &Until<'_>) -> Option<Error> {
        let awaited = self.playing(until).flat_map(|play| play.waits_for().0);
        awaited.into_iter().find_map(|peer| self.mail.overrun(peer))
    }

    /// That another rank is in an operation that this one is in, too, or is done with, and understands otherwise.
    fn disagreement(&self, until: &Until<'_>) -> Option<Error> {
        let first = self.playing(until).next().map(|play| play.signature);
        // They are played one after the other.
        let next = first.map_or(self.collectives + 1, |first| first.sequence);
        self.mail.operations().find_map(|(peer, theirs)| {
            let ours = match theirs.sequence() {
                number if number > next => None,
                number if number == next => first,
                number => self.recorder.signature(number),
            };
            ours.filter(|ours| !ours.agrees(&theirs))
                .map(|ours| self.mail.mismatch(&ours.header(ours.count), peer, &theirs))
        })
    }

    /// How long nothing moved; a wait that lasted too long is the end of the group.
    pub(crate) fn quiet(&mut self, wait: &mut Wait<'_>, now: Instant) -> Result<Duration, Error> {
        self.mail.clock(now);
        if wait.deadline.remaining_at(now).is_zero() {
            let error = self.timeout(wait, now);
            if let Until::Played(play, _) = &wait.until {
                self.recorder.failed_in(play.signature.sequence, play.moved());
            }
            self.fail(error);
            return self.check().map(|()| Duration::ZERO);
        }
        if self.mail.moved() != wait.moved {
            (wait.moved, wait.since) = (self.mail.moved(), now);
        }
        if wait.watch.is_due(now) {
            let (operation, missing) = self.awaited(&wait.until);
            self.watch(&mut wait.watch, operation, &missing, now)?;
        }
        Ok(now.saturating_duration_since(wait.since))
    }

    /// Looks at the ranks that are waited for; one that is known not to come is the end of the group.
    pub(crate) fn watch(
        &mut self,
        watch: &mut Watch,
        operation: String,
        missing: &[Rank],
        now: Instant,
    ) -> Result<(), Error> {
        for &peer in missing {
            // What comes of that was found when it was heard; its process may have ended since.
            if self.mail.took_leave(peer.index()) {
                continue;
            }
            let Some(wires) = &mut self.wires else { return Ok(()) };
            let signs = wires.signs(peer.index());
            let error = match watch.see(peer.index(), signs, now) {
                None => continue,
                Some(Verdict::Lost(reason)) => Error::PeerLost { operation, peer, said_by: None, reason },
                Some(Verdict::Silent(reason)) => Error::Silent { operation, peer, reason },
            };
            self.fail(error);
            return self.check();
        }
        Ok(())
    }

    /// What to sleep for, after it was quiet for a while.
    pub(crate) fn rest(&mut self, wait: &Wait<'_>, quiet: Duration, now: Instant) -> Rest {
        // Whoever sends a letter may be what the others wait for; but to be woken by all costs more than by some.
        let listens = quiet >= LISTEN_AFTER;
        self.mail.listen(listens);
        let (mut receives, mut sends) = self.mail.waits_for();
        if quiet >= ASK_AFTER {
            self.ask(&wait.until);
        }
        for play in self.playing(&wait.until) {
            let (more_receives, more_sends) = play.waits_for();
            receives.extend(more_receives);
            sends.extend(more_sends);
        }
        receives.sort_unstable();
        receives.dedup();
        sends.sort_unstable();
        sends.dedup();
        let most = match &wait.until {
            Until::Elsewhere(_) => {
                let until_due = wait.until_due(now).filter(|left| !left.is_zero());
                (quiet / 16).clamp(FIRST_NAP, LAST_NAP).min(until_due.unwrap_or(LAST_NAP))
            }
            _ => LONGEST_SLEEP,
        };
        let nap = match quiet {
            quiet if quiet < LISTEN_AFTER => LISTEN_AFTER - quiet,
            quiet if quiet < ASK_AFTER => ASK_AFTER - quiet,
            _ => LONGEST_SLEEP,
        };
        Rest {
            receives,
            sends,
            at_most: wait.deadline.remaining_at(now).min(nap).min(most).min(wait.watch.due_in(now)),
        }
    }

    /// Asks the ranks of which the collective of now lacks a message, from its first byte on, whether they understand it alike:
    /// some may have nothing to send here, or may be done with it. Whoever understands it otherwise fails.
    fn ask(&mut self, until: &Until<'_>) {
        let first = self.playing(until).next();
        let Some((operation, silent)) = first.map(|play| (play.signature, play.lacks())) else { return };
        silent.into_iter().for_each(|peer| self.mail.ask(peer, &operation));
    }

    /// The collectives that want to be moved now.
    fn playing<'a>(&'a self, until: &'a Until<'_>) -> impl Iterator<Item = &'a Play> {
        let borrowed = match until {
            Until::Played(play, _) => Some(&**play),
            _ => None,
        };
        self.queue.front().map(|queued| &*queued.play).into_iter().chain(borrowed)
    }

    /// The error of a wait that was given up.
    fn timeout(&self, wait: &Wait<'_>, now: Instant) -> Error {
        let (operation, missing) = self.awaited(&wait.until);
        let mut heard = self.mail.heard(&missing);
        let play = self.playing(&wait.until).next();
        for heard in &mut heard {
            let peer = heard.rank.index();
            heard.pace = play.zip(wait.watch.pace(peer)).map(|(play, bytes_per_s)| {
                let (moved, of) = play.progress(peer);
                Pace { bits_per_s: 8.0 * bytes_per_s, moved, of }
            });
        }
        Error::Timeout { operation, waited: wait.deadline.waited_at(now), missing, heard }
    }

    /// The operation that a wait is in, and the ranks that it waits for.
    fn awaited(&self, until: &Until<'_>) -> (String, Vec<Rank>) {
        let letter = match until {
            Until::Done(ticket) => self.mail.find(*ticket),
            Until::Elsewhere(what) => Some((what.describe(), self.mail.others().collect())),
            _ => None,
        };
        let (operation, (receives, sends)) = match (letter, self.playing(until).next()) {
            (Some((operation, peers)), _) => (operation, (peers, Vec::new())),
            (None, Some(play)) => (play.signature.describe(), play.waits_for()),
            (None, None) => ("a message".into(), self.mail.waits_for()),
        };
        let mut missing: Vec<Rank> = receives.into_iter().chain(sends).map(|r| Rank(r as u32)).collect();
        missing.sort_unstable();
        missing.dedup();
        (operation, missing)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::endpoint::{Endpoint, GroupConfig};
    use crate::group::Group;
    use phalanx_wire::{Generation, Secret};
    use std::net::Ipv4Addr;

    /// Something that is done at a time, and how long that takes as a rule; when it was looked at.
    struct At {
        done: Instant,
        usual: Option<Duration>,
        looks: Vec<Instant>,
    }

    impl Elsewhere for At {
        fn describe(&self) -> String {
            "a point in time".into()
        }

        fn is_done(&mut self) -> Result<bool, Error> {
            self.looks.push(Instant::now());
            Ok(self.looks.last() >= Some(&self.done))
        }

        fn left(&mut self, error: Error) -> Option<Error> {
            Some(error)
        }

        fn usual(&self) -> Option<Duration> {
            self.usual
        }
    }

    #[test]
    fn a_wait_that_usually_ends_at_some_time_is_due_about_then() {
        let (now, limit) = (Instant::now(), Duration::from_secs(9));
        let ms = |ms: f64| Duration::from_secs_f64(ms / 1e3);
        let until_due = |usual: Option<f64>, waited: f64| {
            let mut at = At { done: now, usual: usual.map(ms), looks: Vec::new() };
            let wait = Wait::new(Until::Elsewhere(&mut at), Deadline::starting(now, limit), None, now);
            wait.until_due(now + ms(waited)).map(|left| left.as_secs_f64() * 1e3)
        };
        assert_eq!(until_due(None, 1.0), None);
        for (usual, about) in [(0.8, 0.1), (4.0, 0.25), (100.0, 0.5)] {
            assert_eq!(until_due(Some(usual), usual - about), Some(0.0), "{usual} ms");
            assert_eq!(until_due(Some(usual), usual + about), Some(0.0), "{usual} ms");
            assert_eq!(until_due(Some(usual), usual + about + 0.01), None, "{usual} ms");
            let early = until_due(Some(usual), 0.5).unwrap();
            assert!((early - (usual - about - 0.5).max(0.0)).abs() < 1e-6, "{usual} ms: {early}");
        }
        assert_eq!(until_due(Some(0.05), 0.0), Some(0.0));
    }

    /// Of processes, each with its own memory.
    fn two_ranks() -> [Group; 2] {
        let endpoints = [(); 2].map(|()| Endpoint::bind(Ipv4Addr::LOCALHOST.into()).unwrap());
        let peers: Vec<_> = endpoints.iter().map(Endpoint::address).collect();
        let (secret, mut rank) = (Secret::random().unwrap(), 0..);
        let ranks = endpoints.map(|endpoint| {
            let (rank, generation) = (Rank(rank.next().unwrap()), Generation(0));
            let (secret, peers, timeout) = (secret.clone(), peers.clone(), Duration::from_secs(60));
            let config = GroupConfig { rank, generation, secret, endpoint, peers, timeout };
            std::thread::spawn(|| Group::connect(config).unwrap())
        });
        ranks.map(|rank| rank.join().unwrap())
    }

    #[test]
    fn a_nap_is_as_short_as_it_is_meant_to_be() {
        let [group, _other] = two_ranks();
        let shortest = (0..50).filter_map(|_| {
            let (begun, after) = (Instant::now(), Duration::from_millis(4));
            let mut at = At { done: begun + after, usual: None, looks: Vec::new() };
            group.wait_elsewhere(Deadline::after(Duration::from_secs(60)), &mut at).unwrap();
            // Behind the time in which it may spin.
            let naps = at.looks.windows(2).filter(|pair| pair[0] - begun > Duration::from_millis(1));
            // One that others kept from its core has none there.
            naps.map(|pair| pair[1] - pair[0]).min()
        });
        // Rounded up to milliseconds none would be shorter than one.
        assert!(shortest.min().unwrap() < Duration::from_micros(900));
    }

    #[test]
    fn what_is_done_when_it_usually_is_is_found_sooner_than_by_naps() {
        if std::thread::available_parallelism().map_or(1, usize::from) < 2 {
            // Nobody spins where ranks have no core each.
            return;
        }
        let [group, _other] = two_ranks();
        let late = |usual: Option<Duration>| {
            let deadline = Deadline::after(Duration::from_secs(60));
            let done = deadline.begun() + Duration::from_millis(3);
            let mut at = At { done, usual, looks: Vec::new() };
            group.wait_elsewhere(deadline, &mut at).unwrap();
            at.looks.last().unwrap().duration_since(done)
        };
        // In turns, and the best quarter of each. Beside other tests whoever spins is kept from it, so again until they are through.
        let round = || {
            let mut late = [(); 61].map(|()| [late(None), late(Some(Duration::from_millis(3)))]);
            [0, 1].map(|which| {
                late.sort_unstable_by_key(|late| late[which]);
                late[15][which]
            })
        };
        let (mut rounds, deadline) = (Vec::new(), Deadline::after(Duration::from_secs(120)));
        let is_sooner = loop {
            let [by_naps, at_once] = round();
            rounds.push([by_naps, at_once]);
            if 4 * at_once < by_naps || deadline.expired() {
                break 4 * at_once < by_naps;
            }
        };
        assert!(is_sooner, "late by naps, and where it usually is: {rounds:?}");
    }
}
