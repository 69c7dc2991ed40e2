//! Whether the workers are started again when all of them have ended: a pure function of how that came.

use std::fmt;

/// How a generation of workers ended, and what came before.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ended {
    /// Whether one of them failed.
    pub(crate) failed: bool,
    /// Whether a signal has asked for the end of the run.
    pub(crate) asked: bool,
    /// How often the workers were started again before.
    pub(crate) restarts: usize,
    /// How often they may be.
    pub(crate) max_restarts: usize,
}

/// What follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Decision {
    /// All workers are started again, since one has failed and this is the restart of that number, from 1.
    Restart(usize),
    /// The run is over.
    End(EndReason),
}

/// Why a run is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EndReason {
    /// All workers ended well.
    Done,
    /// A signal asked for it.
    Asked,
    /// A worker failed, and there are no restarts in this run.
    NoRestarts,
    /// A worker failed, and all restarts are used.
    RestartsUsed {
        /// How many there were.
        max_restarts: usize,
    },
}

impl fmt::Display for EndReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            EndReason::Done => f.write_str("all workers ended well"),
            EndReason::Asked => f.write_str("a signal asked for the end"),
            EndReason::NoRestarts => f.write_str("a worker failed"),
            EndReason::RestartsUsed { max_restarts } => {
                write!(f, "a worker failed, and the {max_restarts} restarts of --max-restarts are used")
            }
        }
    }
}

/// Decides. Who asked for the end gets it, also if a worker has failed by then.
pub(crate) fn decide(ended: Ended) -> Decision {
    let Ended { failed, asked, restarts, max_restarts } = ended;
    match (asked, failed) {
        (true, _) => Decision::End(EndReason::Asked),
        (false, false) => Decision::End(EndReason::Done),
        (false, true) if max_restarts == 0 => Decision::End(EndReason::NoRestarts),
        (false, true) if restarts >= max_restarts => Decision::End(EndReason::RestartsUsed { max_restarts }),
        (false, true) => Decision::Restart(restarts + 1),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_failure_that_nobody_asked_for_is_followed_by_a_restart_while_there_are_any() {
        let check = |failed, asked, restarts, max_restarts, want| {
            let ended = Ended { failed, asked, restarts, max_restarts };
            assert_eq!(decide(ended), want, "{ended:?}");
        };
        let (well, bad) = (false, true);
        let (unasked, asked) = (false, true);
        check(well, unasked, 0, 0, Decision::End(EndReason::Done));
        check(well, unasked, 2, 3, Decision::End(EndReason::Done));
        check(well, asked, 0, 3, Decision::End(EndReason::Asked));
        check(bad, asked, 0, 3, Decision::End(EndReason::Asked));
        check(bad, unasked, 0, 0, Decision::End(EndReason::NoRestarts));
        check(bad, unasked, 0, 1, Decision::Restart(1));
        check(bad, unasked, 2, 3, Decision::Restart(3));
        check(bad, unasked, 3, 3, Decision::End(EndReason::RestartsUsed { max_restarts: 3 }));
    }
}
