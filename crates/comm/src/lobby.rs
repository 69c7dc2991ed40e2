//! Where the connections of a group arrive, and how far its ranks are with each other until they do.

use crate::transport::{LEAVING_FAILED, Lost, Process, Signs, Traffic, Waker, Wire, deliver};
use crate::word::Word;
use phalanx_wire::Rank;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// How long one who said that it comes may take before it is dialed again, and one who can't be reached may take to come itself.
const PROMISE: Duration = Duration::from_secs(1);

/// Where the connections of a group arrive. Ranks are those of the run.
#[derive(Default)]
pub(crate) struct Lobby {
    meetings: Mutex<HashMap<Rank, Meeting>>,
    news: AtomicBool,
    wake: OnceLock<Waker>,
    /// Why nobody looks any more.
    over: OnceLock<Word>,
}

/// A connection, or why there can be none.
pub(crate) type Outcome = Result<Box<dyn Wire>, Lost>;

/// How dialing ended, where it didn't fail for good.
pub(crate) enum Way {
    /// At a connection.
    Through(Box<dyn Wire>),
    /// The other one comes itself, or has come.
    Crossed,
    /// Nobody could be reached, though the way in the other direction may be open.
    Blocked(Lost),
}

/// How far dialing is.
#[derive(Clone, Copy)]
pub(crate) struct Dialing {
    /// When something was last heard of the other side, or when it began.
    pub(crate) since: Instant,
    /// Whether there is a connection, though nothing is proven yet.
    pub(crate) is_connected: bool,
    /// The process that was at its other end, where that can be known.
    pub(crate) process: Option<Process>,
}

impl Dialing {
    /// From the start.
    pub(crate) fn begun(since: Instant) -> Dialing {
        Dialing { since, is_connected: false, process: None }
    }

    /// What is seen of one who doesn't answer.
    fn signs(&self, now: Instant) -> Signs {
        if let Some(process) = self.process {
            return Signs::Process(process.state());
        }
        let silent = now.saturating_duration_since(self.since);
        let unanswered = (!self.is_connected).then_some(silent);
        Signs::Network(Traffic { silent, unanswered, ..Traffic::default() })
    }
}

/// How far this rank and another one are with each other; not at all, where there is none.
enum Meeting {
    /// This one dials.
    Dials(Dialing),
    /// This one dialed, and heard that the other one comes itself: since then.
    Promised(Instant),
    /// This one dialed in vain, and the other one may come itself: since then.
    Blocked(Lost, Instant),
    /// The other one was let in.
    Comes,
    Arrived(Box<dyn Wire>),
    Failed(Lost),
    /// The group has its connection.
    Taken,
}

impl Lobby {
    fn meetings(&self) -> MutexGuard<'_, HashMap<Rank, Meeting>> {
        self.meetings.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// From now on `wake` is called when somebody arrives; the first one stays.
    pub(crate) fn ring(&self, wake: Waker) {
        let _ = self.wake.set(wake);
    }

    /// Whether this rank may dial that one now. One who promised to come and doesn't is asked again: it may have failed. One who
    /// can't be reached and doesn't come is given up.
    pub(crate) fn begin(&self, peer: Rank, now: Instant) -> bool {
        let mut meetings = self.meetings();
        let is_over = |since: &Instant| now.saturating_duration_since(*since) >= PROMISE;
        let may = match meetings.get(&peer) {
            None => true,
            Some(Meeting::Promised(since)) => is_over(since),
            Some(Meeting::Blocked(lost, since)) if is_over(since) => {
                let lost = lost.clone();
                meetings.insert(peer, Meeting::Failed(lost));
                self.news.store(true, Ordering::Release);
                false
            }
            Some(_) => false,
        };
        if may {
            meetings.insert(peer, Meeting::Dials(Dialing::begun(now)));
        }
        may
    }

    /// Whether this rank still dials that one, being so far now, and hasn't met it otherwise.
    pub(crate) fn still_dials(&self, peer: Rank, so_far: Dialing) -> bool {
        match self.meetings().get_mut(&peer) {
            Some(Meeting::Dials(dialing)) => {
                *dialing = so_far;
                true
            }
            _ => false,
        }
    }

    /// What is seen of a rank that is dialed and doesn't answer.
    pub(crate) fn signs(&self, peer: Rank, now: Instant) -> Signs {
        match self.meetings().get(&peer) {
            Some(Meeting::Dials(dialing)) => dialing.signs(now),
            _ => Signs::Unseen,
        }
    }

    /// Whether that rank, which knocks, is let in.
    pub(crate) fn admit(&self, own: Rank, peer: Rank) -> bool {
        let mut meetings = self.meetings();
        let may = match meetings.get(&peer) {
            None | Some(Meeting::Promised(_) | Meeting::Blocked(..)) => true,
            // As long as this one reaches nobody, it doesn't say that it comes.
            Some(Meeting::Dials(dialing)) => peer > own || !dialing.is_connected,
            Some(_) => false,
        };
        if may {
            meetings.insert(peer, Meeting::Comes);
        }
        may
    }

    /// The end of a meeting.
    pub(crate) fn settle(&self, peer: Rank, outcome: Outcome) {
        let mut meetings = self.meetings();
        if let Some(word) = self.over.get() {
            drop(meetings);
            return outcome.into_iter().for_each(|wire| send_away(wire, word));
        }
        meetings.insert(peer, outcome.map_or_else(Meeting::Failed, Meeting::Arrived));
        // Before anyone can say that the group is over: whoever then asks what is new finds it.
        self.news.store(true, Ordering::Release);
        drop(meetings);
        self.wake.get().into_iter().for_each(|wake| wake());
    }

    /// How this rank's dialing ended.
    pub(crate) fn dialed(&self, peer: Rank, outcome: Result<Way, Lost>, now: Instant) {
        let mut meetings = self.meetings();
        if !matches!(meetings.get(&peer), Some(Meeting::Dials(_))) {
            return;
        }
        let outcome = match outcome {
            Ok(Way::Through(wire)) => Ok(wire),
            Err(lost) => Err(lost),
            Ok(Way::Crossed) => {
                meetings.insert(peer, Meeting::Promised(now));
                return;
            }
            Ok(Way::Blocked(lost)) => {
                meetings.insert(peer, Meeting::Blocked(lost, now));
                return;
            }
        };
        drop(meetings);
        self.settle(peer, outcome);
    }

    /// One who was let in didn't arrive.
    pub(crate) fn turn_back(&self, peer: Rank) {
        self.meetings().remove(&peer);
    }

    /// The group is over: whoever still arrives hears why.
    pub(crate) fn close(&self, word: &Word) {
        let _meetings = self.meetings();
        // The first word stays.
        let _ = self.over.set(word.clone());
    }

    /// The group is over before it looked: whoever arrived hears why, too.
    pub(crate) fn turn_away(&self, word: &Word) {
        self.close(word);
        let arrived = self.take().into_iter().filter_map(|(_, outcome)| outcome.ok());
        arrived.for_each(|wire| send_away(wire, word));
    }

    /// What arrived since it was last asked for.
    pub(crate) fn take(&self) -> Vec<(Rank, Outcome)> {
        if !self.news.load(Ordering::Relaxed) || !self.news.swap(false, Ordering::Acquire) {
            return Vec::new();
        }
        let mut meetings = self.meetings();
        let settled = |meeting: &Meeting| matches!(meeting, Meeting::Arrived(_) | Meeting::Failed(_));
        let ranks: Vec<Rank> =
            meetings.iter().filter(|(_, meeting)| settled(meeting)).map(|(&rank, _)| rank).collect();
        let take = |rank: Rank| match meetings.insert(rank, Meeting::Taken) {
            Some(Meeting::Arrived(wire)) => Some((rank, Ok(wire))),
            Some(Meeting::Failed(lost)) => Some((rank, Err(lost))),
            _ => None,
        };
        ranks.into_iter().filter_map(take).collect()
    }
}

/// One who arrives when the group is over hears why.
fn send_away(mut wire: Box<dyn Wire>, word: &Word) {
    wire.part(word);
    // Who doesn't hear it in time finds the connection closed.
    let _ = deliver(&mut [wire], LEAVING_FAILED);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_two_that_dial_each_other_the_higher_one_comes_through() {
        let (low, high) = (Rank(1), Rank(2));
        let (at_low, at_high) = (Lobby::default(), Lobby::default());
        let now = Instant::now();
        assert!(at_low.begin(high, now) && at_high.begin(low, now));
        let connected = Dialing { is_connected: true, ..Dialing::begun(now) };
        assert!(at_low.still_dials(high, connected) && at_high.still_dials(low, connected));
        assert!(!at_low.begin(high, now), "one dials once");
        assert!(at_low.admit(low, high), "the higher one is let in");
        assert!(!at_high.admit(high, low), "the lower one is not");
        assert!(!at_low.admit(low, high), "nor is anyone a second time");
        // Who dials finds out whether the other comes itself.
        at_low.dialed(high, Ok(Way::Crossed), now);
        assert!(at_low.take().is_empty());
    }

    #[test]
    fn one_who_promised_to_come_and_does_not_is_dialed_again() {
        for (own, peer) in [(Rank(1), Rank(2)), (Rank(2), Rank(1))] {
            let lobby = Lobby::default();
            let now = Instant::now();
            assert!(lobby.begin(peer, now));
            lobby.dialed(peer, Ok(Way::Crossed), now);
            assert!(!lobby.begin(peer, now), "it is on its way");
            assert!(lobby.begin(peer, now + PROMISE));
            lobby.dialed(peer, Ok(Way::Crossed), now + PROMISE);
            assert!(lobby.admit(own, peer), "and let in, whichever is higher");
        }
    }

    #[test]
    fn one_who_knocks_first_is_not_dialed() {
        let lobby = Lobby::default();
        assert!(lobby.admit(Rank(5), Rank(3)));
        assert!(!lobby.begin(Rank(3), Instant::now()));
        lobby.turn_back(Rank(3));
        assert!(lobby.begin(Rank(3), Instant::now()));
        lobby.dialed(Rank(3), Err(Lost::Seen("refused".into())), Instant::now());
        assert_eq!(lobby.take().len(), 1);
        assert!(lobby.take().is_empty());
    }

    #[test]
    fn one_who_can_not_be_reached_may_come_itself_for_a_while() {
        let (low, high, now) = (Rank(1), Rank(2), Instant::now());
        let blocked = || {
            let lobby = Lobby::default();
            assert!(lobby.begin(low, now));
            lobby.dialed(low, Ok(Way::Blocked(Lost::Seen("refused".into()))), now);
            assert!(!lobby.begin(low, now) && lobby.take().is_empty());
            lobby
        };
        let lobby = blocked();
        assert!(lobby.admit(high, low), "it comes");
        assert!(!lobby.begin(low, now + PROMISE) && lobby.take().is_empty());
        let lobby = blocked();
        assert!(!lobby.begin(low, now + PROMISE));
        assert!(matches!(&lobby.take()[..], [(Rank(1), Err(Lost::Seen(_)))]), "it doesn't");
    }

    #[test]
    fn who_has_reached_nobody_yet_lets_in_whoever_knocks_and_gives_up_its_own_way() {
        let (low, high, now) = (Rank(1), Rank(2), Instant::now());
        let lobby = Lobby::default();
        assert!(lobby.begin(low, now));
        assert!(lobby.admit(high, low));
        let connected = Dialing { is_connected: true, ..Dialing::begun(now) };
        assert!(!lobby.still_dials(low, connected));
    }
}
