//! What can be seen of a peer that is waited for and from which nothing comes, and what that means: a pure function, so that
//! dead, stopped, cut off and merely late are told apart in one place.
//!
//! A process of this host is looked up. One elsewhere beats over its connection (`tcp/pulse.rs`), whether it computes or not,
//! so a host that answers for a process that doesn't beat has a stopped one, and a host that doesn't answer is cut off. A peer
//! that only computes for long is none of these.

use std::time::Duration;

/// What can be seen of a peer without waiting.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) enum Signs {
    /// Nothing: it is a thread of this process, or hidden from it.
    Unseen,
    /// It is a process of this host.
    Process(State),
    /// It is elsewhere.
    Network(Traffic),
}

impl Signs {
    /// How long a peer may be silent that may be so for `limit` where nothing comes between.
    fn limit(&self, limit: Duration) -> Duration {
        match self {
            Signs::Network(traffic) => limit.max(traffic.lossy_pause),
            Signs::Unseen | Signs::Process(_) => limit,
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum State {
    Runs,
    Stopped,
    Ended,
}

/// What the kernel knows of a connection.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub(crate) struct Traffic {
    /// For how long nothing came in its turn, a beat neither.
    pub(crate) silent: Duration,
    /// Pieces that came at all: where some are lost on the way, others that do come have to wait for them.
    pub(crate) arrived: u32,
    /// Whether something that came wasn't taken yet: then it is this rank that lets nothing more come.
    pub(crate) unread: bool,
    /// For how long nothing was acknowledged, if something was sent again for that.
    pub(crate) unanswered: Option<Duration>,
    /// How long nothing may come over this link, either way, because something is lost on it now and then.
    pub(crate) lossy_pause: Duration,
    /// Bytes that came, and bytes that were acknowledged, since the connection was made.
    pub(crate) moved: u64,
}

/// What is wrong with a peer.
#[derive(Clone, PartialEq, Debug)]
pub(crate) enum Verdict {
    /// It will never come.
    Lost(String),
    /// It gives no sign of life, and might yet.
    Silent(String),
}

/// What `signs` mean of a peer that has been watched without a pause for so long, and that looked as it does for `lasting` of
/// that, where a rank may be silent for `limit`, and longer where its link is as slow as that. The watch counts because this rank may have been stopped itself.
pub(crate) fn judge(signs: &Signs, watched: Duration, lasting: Duration, limit: Duration) -> Option<Verdict> {
    let limit = signs.limit(limit);
    let over = |time: Duration| time.min(watched) >= limit;
    match *signs {
        Signs::Unseen | Signs::Process(State::Runs) => None,
        // It may have said why it leaves just before.
        Signs::Process(State::Ended) if lasting.is_zero() => None,
        Signs::Process(State::Ended) => {
            let text = "its process ended, though something that it started holds its connection open";
            Some(Verdict::Lost(text.into()))
        }
        Signs::Process(State::Stopped) => (lasting >= stop_limit(limit)).then(|| {
            Verdict::Silent(format!("it is stopped (SIGSTOP or a debugger), for {lasting:.1?} at least"))
        }),
        Signs::Network(Traffic { unanswered: Some(time), .. }) if is_cut_off(signs, watched, limit) => {
            Some(Verdict::Silent(format!("it can't be reached: {time:.1?} without an acknowledgement")))
        }
        Signs::Network(Traffic { silent, unread: false, .. }) if over(silent) => {
            Some(Verdict::Silent(format!(
                "its host answers, but it gave no sign of life for {silent:.1?}: it is stopped (SIGSTOP or a debugger), or its \
             host is overloaded"
            )))
        }
        Signs::Network(_) => None,
    }
}

/// Whether a peer's host left what was sent to it unanswered for `limit`, as far as it was watched.
pub(crate) fn is_cut_off(signs: &Signs, watched: Duration, limit: Duration) -> bool {
    let limit = signs.limit(limit);
    matches!(signs, Signs::Network(Traffic { unanswered: Some(time), .. }) if (*time).min(watched) >= limit)
}

/// How long a process may be stopped where a rank may be silent for `limit`. Beats may be late on a busy host, so they have all
/// of that. That a process is stopped the kernel knows: the time is only for whoever stopped it for a moment.
fn stop_limit(limit: Duration) -> Duration {
    limit / 4 * 3
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_host_that_owes_an_answer_for_long_is_cut_off() {
        let secs = Duration::from_secs;
        let limit = secs(2);
        let owes = |time| Signs::Network(Traffic { unanswered: Some(time), ..Traffic::default() });
        assert!(is_cut_off(&owes(secs(2)), secs(2), limit));
        assert!(!is_cut_off(&owes(secs(1)), secs(9), limit) && !is_cut_off(&owes(secs(9)), secs(1), limit));
        let full = Signs::Network(Traffic { silent: secs(60), ..Traffic::default() });
        for signs in [full, Signs::Unseen, Signs::Process(State::Stopped), Signs::Process(State::Ended)] {
            assert!(!is_cut_off(&signs, secs(60), limit), "{signs:?}");
        }
    }

    #[test]
    fn dead_stopped_cut_off_and_late_are_told_apart() {
        let secs = Duration::from_secs;
        let limit = secs(2);
        let beats = Traffic { silent: Duration::from_millis(200), ..Traffic::default() };
        let quiet = Traffic { silent: secs(3), ..Traffic::default() };
        let cut = Traffic { unanswered: Some(secs(3)), ..quiet };
        // What is seen, for how long it was watched, for how long it looked so, and what the verdict says.
        let rows = [
            (Signs::Unseen, secs(99), secs(99), None),
            (Signs::Process(State::Runs), secs(99), secs(99), None),
            (Signs::Process(State::Ended), secs(99), secs(0), None),
            (Signs::Process(State::Ended), secs(1), Duration::from_millis(1), Some("its process ended")),
            (Signs::Process(State::Stopped), secs(99), secs(1), None),
            (Signs::Process(State::Stopped), secs(99), Duration::from_millis(1499), None),
            (
                Signs::Process(State::Stopped),
                Duration::from_millis(1500),
                Duration::from_millis(1500),
                Some("stopped (SIGSTOP or a debugger), for 1.5s"),
            ),
            (
                Signs::Process(State::Stopped),
                secs(9),
                secs(3),
                Some("stopped (SIGSTOP or a debugger), for 3.0s"),
            ),
            (Signs::Network(beats), secs(99), secs(99), None),
            (Signs::Network(quiet), secs(3), secs(0), Some("no sign of life for 3.0s")),
            // This rank was stopped itself a moment ago.
            (Signs::Network(quiet), secs(1), secs(1), None),
            (Signs::Network(cut), secs(1), secs(1), None),
            // It couldn't send if it wanted to.
            (Signs::Network(Traffic { unread: true, ..quiet }), secs(99), secs(99), None),
            (
                Signs::Network(cut),
                secs(3),
                secs(3),
                Some("can't be reached: 3.0s without an acknowledgement"),
            ),
            (Signs::Network(Traffic { unread: true, ..cut }), secs(3), secs(3), Some("can't be reached")),
            // Over a link that takes so long to make good what it has lost.
            (Signs::Network(Traffic { lossy_pause: secs(5), ..quiet }), secs(99), secs(99), None),
            (Signs::Network(Traffic { lossy_pause: secs(5), ..cut }), secs(99), secs(99), None),
            (
                Signs::Network(Traffic { lossy_pause: secs(3), ..quiet }),
                secs(3),
                secs(3),
                Some("no sign of life"),
            ),
            (
                Signs::Network(Traffic { lossy_pause: secs(3), ..cut }),
                secs(3),
                secs(3),
                Some("can't be reached"),
            ),
            // It is far away, and what it sends still comes.
            (Signs::Network(Traffic { unanswered: Some(secs(1)), ..beats }), secs(99), secs(99), None),
        ];
        for (signs, watched, lasting, want) in rows {
            let verdict = judge(&signs, watched, lasting, limit);
            let text = verdict.as_ref().map(|(Verdict::Lost(text) | Verdict::Silent(text))| text.as_str());
            assert_eq!(text.is_some(), want.is_some(), "{signs:?}, {watched:?}, {lasting:?}: {verdict:?}");
            assert!(text.unwrap_or("").contains(want.unwrap_or("")), "{signs:?}: {verdict:?}");
        }
    }
}
