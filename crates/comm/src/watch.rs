//! What a wait sees of the ranks that it waits for: it looks at them now and then, so that one that is dead, stopped or cut off
//! is told apart from one that is late, and one that is slow is known by its pace. What the signs mean is decided in
//! `transport/signs.rs`; the time comes from outside.

use crate::transport::{BEAT, Signs, Verdict, judge};
use std::time::{Duration, Instant};

/// How long a peer may give no sign of life, unless the group says otherwise.
pub(crate) const DEFAULT_SILENCE: Duration = Duration::from_secs(2);
/// The shortest that it may be said to be: a beat may be late, and one that is missed is no death.
pub(crate) const LEAST_SILENCE: Duration = BEAT.saturating_mul(3);
/// The longest time between two looks: what comes on top of the silence until it is found. A look costs some 20 microseconds.
const LOOK_EVERY: Duration = Duration::from_millis(125);
/// A wait that didn't get to look for so long was stopped itself, and begins anew.
const OWN_PAUSE: Duration = Duration::from_secs(1);

pub(crate) struct Watch {
    /// How long a peer may be silent.
    limit: Duration,
    /// Since when it has gone on without a pause, and until when.
    since: Instant,
    until: Instant,
    next: Instant,
    peers: Vec<Watched>,
}

struct Watched {
    peer: usize,
    signs: Signs,
    /// Since when it has looked alike.
    alike_since: Instant,
    /// What had come of it, and since when no more did.
    heard: (u32, Instant),
    /// Bytes that had moved when it was first looked at, and when that was.
    first: (u64, Instant),
    last: Instant,
}

impl Watch {
    /// None as the limit means that silence is no error.
    pub(crate) fn new(limit: Option<Duration>, now: Instant) -> Watch {
        let limit = limit.unwrap_or(Duration::MAX);
        Watch { limit, since: now, until: now, next: now + every(limit), peers: Vec::new() }
    }

    /// Whether it is time to look.
    pub(crate) fn is_due(&mut self, now: Instant) -> bool {
        if now.saturating_duration_since(self.until) > OWN_PAUSE {
            self.since = now;
            self.peers.clear();
        }
        self.until = now;
        let is_due = now >= self.next;
        if is_due {
            self.next = now + every(self.limit);
        }
        is_due
    }

    /// How long until then.
    pub(crate) fn due_in(&self, now: Instant) -> Duration {
        self.next.saturating_duration_since(now)
    }

    /// A look at a peer: what is wrong with it, if that is known.
    pub(crate) fn see(&mut self, peer: usize, mut signs: Signs, now: Instant) -> Option<Verdict> {
        let watched = match self.peers.iter().position(|watched| watched.peer == peer) {
            Some(at) => &mut self.peers[at],
            None => {
                let first = (moved(&signs), now);
                let heard = (arrived(&signs), self.since);
                self.peers.push(Watched { peer, signs, alike_since: now, heard, first, last: now });
                self.peers.last_mut().expect("it was added just now")
            }
        };
        if !are_alike(&watched.signs, &signs) {
            watched.alike_since = now;
        }
        if watched.heard.0 != arrived(&signs) {
            watched.heard = (arrived(&signs), now);
        }
        if let Signs::Network(traffic) = &mut signs {
            traffic.silent = traffic.silent.min(now.saturating_duration_since(watched.heard.1));
        }
        (watched.signs, watched.last) = (signs, now);
        let lasting = now.saturating_duration_since(watched.alike_since);
        judge(&signs, now.saturating_duration_since(self.since), lasting, self.limit)
    }

    /// How many bytes a second moved between this rank and a peer, if some did since it was first looked at.
    pub(crate) fn pace(&self, peer: usize) -> Option<f64> {
        let watched = self.peers.iter().find(|watched| watched.peer == peer)?;
        let (first, since) = watched.first;
        let time = watched.last.saturating_duration_since(since).as_secs_f64();
        let bytes = moved(&watched.signs).saturating_sub(first);
        (bytes > 0 && time > 0.0).then(|| bytes as f64 / time)
    }
}

/// Many looks within what a peer may be silent.
fn every(limit: Duration) -> Duration {
    (limit / 16).min(LOOK_EVERY)
}

fn moved(signs: &Signs) -> u64 {
    if let Signs::Network(traffic) = signs { traffic.moved } else { 0 }
}

fn arrived(signs: &Signs) -> u32 {
    if let Signs::Network(traffic) = signs { traffic.arrived } else { 0 }
}

/// Whether a process is in the same state; what a network shows has times of its own.
fn are_alike(before: &Signs, now: &Signs) -> bool {
    matches!((before, now), (Signs::Network(_), Signs::Network(_))) || before == now
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transport::{State, Traffic};

    const STEP: Duration = Duration::from_millis(500);

    /// The verdict of each look at one peer, half a second apart.
    fn verdicts(rows: &[Signs]) -> Vec<bool> {
        let start = Instant::now();
        let mut watch = Watch::new(Some(DEFAULT_SILENCE), start);
        let look = |(i, &signs): (usize, &Signs)| {
            let now = start + STEP * i as u32;
            watch.is_due(now);
            watch.see(7, signs, now).is_some()
        };
        rows.iter().enumerate().map(look).collect()
    }

    #[test]
    fn a_stopped_process_is_silent_once_it_was_stopped_for_long() {
        let (runs, stopped) = (Signs::Process(State::Runs), Signs::Process(State::Stopped));
        assert_eq!(
            verdicts(&[runs, stopped, stopped, stopped, stopped, stopped]),
            [false, false, false, false, true, true]
        );
        assert!(!verdicts(&[stopped, stopped, stopped, runs, stopped, stopped, stopped]).contains(&true));
    }

    #[test]
    fn a_rank_that_was_stopped_itself_begins_anew() {
        let start = Instant::now();
        let mut watch = Watch::new(Some(DEFAULT_SILENCE), start);
        let silent = Signs::Network(Traffic { silent: Duration::from_secs(60), ..Traffic::default() });
        let late = start + Duration::from_secs(60);
        assert!(watch.is_due(late));
        assert_eq!(watch.see(1, silent, late), None);
        let looks = (1..=4).map(|i| late + STEP * i);
        let found: Vec<bool> =
            looks.map(|now| watch.is_due(now) && watch.see(1, silent, now).is_some()).collect();
        assert_eq!(found, [false, false, false, true]);
    }

    #[test]
    fn looks_come_many_times_within_a_silence() {
        let start = Instant::now();
        for (limit, every) in [(None, 125_000), (Some(2000), 125_000), (Some(600), 37_500)] {
            let mut watch = Watch::new(limit.map(Duration::from_millis), start);
            let every = Duration::from_micros(every);
            assert_eq!(watch.due_in(start), every);
            let now = start + every;
            assert!(!watch.is_due(start) && watch.is_due(now) && !watch.is_due(now));
            assert_eq!(watch.due_in(now), every);
        }
    }

    /// When a wait for a rank that is stopped already, or silent since the wait began, knows it.
    fn found_after(signs: impl Fn(Duration) -> Signs) -> Duration {
        let start = Instant::now();
        let mut watch = Watch::new(Some(DEFAULT_SILENCE), start);
        let mut now = start;
        loop {
            now += watch.due_in(now);
            assert!(watch.is_due(now) && now < start + 2 * DEFAULT_SILENCE);
            if watch.see(7, signs(now - start), now).is_some() {
                return now - start;
            }
        }
    }

    #[test]
    fn a_stop_is_found_within_two_seconds_and_silence_soon_after() {
        let ms = Duration::from_millis;
        assert_eq!(found_after(|_| Signs::Process(State::Stopped)), ms(1625));
        let silent = |silent| Signs::Network(Traffic { silent, ..Traffic::default() });
        assert_eq!(found_after(silent), ms(2000));
        // Its last beat came while it was waited for.
        assert_eq!(found_after(|waited| silent(waited.saturating_sub(ms(100)))), ms(2125));
    }

    #[test]
    fn a_link_that_loses_some_of_what_is_sent_is_not_a_stopped_peer() {
        let start = Instant::now();
        // Nothing comes in its turn; what comes out of it says that somebody sends, until that ends, too.
        let mut looks = (0..30).map(|i| {
            let silent = STEP * i;
            (start + silent, Signs::Network(Traffic { silent, arrived: i.min(20), ..Traffic::default() }))
        });
        let mut watch = Watch::new(Some(DEFAULT_SILENCE), start);
        let found = looks.find(|(now, signs)| watch.is_due(*now) && watch.see(7, *signs, *now).is_some());
        assert_eq!(found.map(|(now, _)| now - start), Some(STEP * 20 + DEFAULT_SILENCE));
    }

    #[test]
    fn a_pace_is_known_of_what_moved() {
        let start = Instant::now();
        let mut watch = Watch::new(None, start);
        let moved = |moved| Signs::Network(Traffic { moved, ..Traffic::default() });
        watch.see(1, moved(1000), start);
        assert_eq!(watch.pace(1), None);
        watch.see(1, moved(3000), start + Duration::from_secs(4));
        assert_eq!((watch.pace(1), watch.pace(2)), (Some(500.0), None));
    }
}
