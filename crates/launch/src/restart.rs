//! Whether workers are started again: pure functions of how one, or all of them, have ended.

use phalanx_coord::Restarts;
use phalanx_job::{Cause, DRAINED};
use std::fmt;

/// A worker has failed while others run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Lost {
    /// Whether the others go on without it.
    pub(crate) in_place: bool,
    /// Whose fault it said it was, if it said anything.
    pub(crate) cause: Option<Cause>,
    /// Whether another has ended well, or to be started again later, so that the run is as good as over.
    pub(crate) any_done: bool,
    /// The restarts with one for this loss, if it needs one of its own.
    pub(crate) restarts: Restarts,
    /// How many there may be.
    pub(crate) max_restarts: usize,
}

/// Whether another takes its place; else all are to be stopped.
pub(crate) fn is_replaced(lost: Lost) -> bool {
    let Lost { in_place, cause, any_done, restarts, max_restarts } = lost;
    // Another would come to the same, or nobody goes on that it could join.
    let is_in_vain = matches!(cause, Some(Cause::Own | Cause::Setting | Cause::Refused));
    in_place && !any_done && !is_in_vain && restarts.count <= max_restarts
}

/// How a generation of workers ended, and what came before.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ended {
    /// Whether one of them failed.
    pub(crate) failed: bool,
    /// Whether it is known that others would come to the same.
    pub(crate) for_good: bool,
    /// Whether they couldn't go on without what was lost with one of them.
    pub(crate) part_lost: bool,
    /// Whether a signal has asked for the end of the run.
    pub(crate) asked: bool,
    /// Whether a worker has ended in order to be started again later.
    pub(crate) drained: bool,
    /// How often workers were started again before.
    pub(crate) restarts: Restarts,
    /// How often they may be.
    pub(crate) max_restarts: usize,
}

/// What follows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Decision {
    /// All workers are started again, since one has failed, and so many restarts there are then.
    Restart(Restarts),
    /// The run is over.
    End(EndReason),
}

/// Why a run is over.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EndReason {
    /// All workers ended well.
    Done,
    /// A signal asked for it.
    Asked,
    /// A signal asked this node to leave, and didn't wait for what becomes of the run.
    Left,
    /// Workers ended before their work was done, and want to be started again later.
    Drained,
    /// A worker failed, and there are no restarts in this run.
    NoRestarts,
    /// A worker failed in a way in which others in its place would fail too.
    ForGood,
    /// A worker failed, and all restarts are used.
    RestartsUsed {
        /// How many there were.
        max_restarts: usize,
    },
    /// There were too few nodes for too long.
    TooFewNodes {
        /// How many there were.
        here: u32,
        /// How long they waited for others, in seconds.
        seconds: u64,
    },
    /// Too few nodes are left, and no others come: the run can go on where it is started again.
    NodesLost {
        /// How many are left.
        here: u32,
    },
    /// Less than half of the nodes were left, and the others may go on without them.
    CutOff {
        /// How many were left.
        here: u32,
        /// How many fell silent.
        silent: u32,
    },
    /// Other nodes took this one, which led the run, for lost, and go on under another.
    Deposed,
    /// Who leads the nodes of the run is gone.
    NoCoordinator(String),
}

impl EndReason {
    /// Whether the whole run is over for this reason, and not only this node's part of it.
    pub fn is_of_the_run(&self) -> bool {
        use EndReason::{CutOff, Deposed, Left, NoCoordinator};
        !matches!(self, Left | CutOff { .. } | Deposed | NoCoordinator(_))
    }
}

impl fmt::Display for EndReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            EndReason::Done => f.write_str("all workers ended well"),
            EndReason::Asked => f.write_str("a signal asked for the end"),
            EndReason::Left => f.write_str("a signal asked this node to leave"),
            EndReason::Drained => f.write_str("the run is to be started again later"),
            EndReason::NoRestarts => f.write_str("a worker failed"),
            EndReason::ForGood => f.write_str("another worker would fail in the same way"),
            EndReason::TooFewNodes { here, seconds } => {
                write!(
                    f,
                    "too few nodes: {here}, after {seconds} s\nhint: start `phalanx run` on the others with the same --nnodes and --rdzv-endpoint, or let --nnodes MIN:MAX begin with fewer"
                )
            }
            EndReason::NodesLost { here } => {
                let left = format!("too few nodes are left, {here}, and Slurm starts no others in this step");
                write!(f, "{left}: the run goes on where the job is started again (exit code {DRAINED})")
            }
            EndReason::CutOff { here, silent } => {
                let all = here + silent;
                write!(
                    f,
                    "only {here} of {all} nodes are left: the others fell silent, and may go on without them"
                )
            }
            EndReason::Deposed => {
                let why = "this node gave no sign of life, and the others have gone on without it";
                write!(f, "{why}, under another coordinator")
            }
            EndReason::NoCoordinator(error) => write!(f, "{error}"),
            EndReason::RestartsUsed { max_restarts } => {
                write!(f, "a worker failed, and all restarts of --max-restarts {max_restarts} are used")
            }
        }
    }
}

/// Decides. Who asked for the end gets it, also if a worker has failed by then, and so do workers that make room for others.
pub(crate) fn decide(ended: Ended) -> Decision {
    let Ended { failed, for_good, part_lost, asked, drained, restarts, max_restarts } = ended;
    let next = restarts.anew(part_lost);
    match (asked, failed) {
        (true, _) => Decision::End(EndReason::Asked),
        (false, _) if drained => Decision::End(EndReason::Drained),
        (false, false) => Decision::End(EndReason::Done),
        (false, true) if max_restarts == 0 => Decision::End(EndReason::NoRestarts),
        (false, true) if for_good => Decision::End(EndReason::ForGood),
        (false, true) if next.count > max_restarts => Decision::End(EndReason::RestartsUsed { max_restarts }),
        (false, true) => Decision::Restart(next),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn only_a_failure_that_nobody_asked_for_is_followed_by_a_restart_while_there_are_any() {
        let after = |count| (0..count).fold(Restarts::default(), |restarts, _| restarts.anew(false));
        let check = |failed, asked, restarts, max_restarts, want| {
            let (for_good, part_lost, drained, restarts) = (false, false, false, after(restarts));
            let ended = Ended { failed, for_good, part_lost, asked, drained, restarts, max_restarts };
            assert_eq!(decide(ended), want, "{ended:?}");
        };
        let (well, bad) = (false, true);
        let (unasked, asked) = (false, true);
        check(well, unasked, 0, 0, Decision::End(EndReason::Done));
        check(well, unasked, 2, 3, Decision::End(EndReason::Done));
        check(well, asked, 0, 3, Decision::End(EndReason::Asked));
        check(bad, asked, 0, 3, Decision::End(EndReason::Asked));
        check(bad, unasked, 0, 0, Decision::End(EndReason::NoRestarts));
        check(bad, unasked, 0, 1, Decision::Restart(after(1)));
        check(bad, unasked, 2, 3, Decision::Restart(after(3)));
        check(bad, unasked, 3, 3, Decision::End(EndReason::RestartsUsed { max_restarts: 3 }));
        let failed = Ended {
            failed: true,
            for_good: false,
            part_lost: false,
            asked: false,
            drained: false,
            restarts: after(1),
            max_restarts: 3,
        };
        let for_good = Ended { for_good: true, ..failed };
        assert_eq!(decide(for_good), Decision::End(EndReason::ForGood));
        for failed in [failed, Ended { failed: false, ..failed }] {
            assert_eq!(decide(Ended { drained: true, ..failed }), Decision::End(EndReason::Drained));
        }
    }

    #[test]
    fn who_begins_again_for_what_was_lost_with_another_uses_no_restart_beside_that_of_the_loss() {
        let at = Duration::from_secs(5);
        let lost = Restarts::default().with(Duration::ZERO, at, at);
        let ended = Ended {
            failed: true,
            for_good: false,
            part_lost: true,
            asked: false,
            drained: false,
            restarts: lost.got_over(),
            max_restarts: 1,
        };
        let Decision::Restart(after) = decide(ended) else { panic!("{:?}", decide(ended)) };
        assert_eq!([lost.starts(), after.count, after.starts()], [1, 1, 2]);
        // Not for nothing again, and not for any other reason.
        let used = Decision::End(EndReason::RestartsUsed { max_restarts: 1 });
        assert_eq!(decide(Ended { restarts: after, ..ended }), used);
        assert_eq!(decide(Ended { part_lost: false, ..ended }), used);
    }

    #[test]
    fn one_is_replaced_where_the_others_go_on_and_it_may_do_better() {
        let mut restarts = Restarts::default();
        restarts.count = 3;
        let lost = Lost { in_place: true, cause: None, any_done: false, restarts, max_restarts: 3 };
        let check = |lost, want| assert_eq!(is_replaced(lost), want, "{lost:?}");
        check(lost, true);
        check(Lost { cause: Some(Cause::Other), ..lost }, true);
        check(Lost { cause: Some(Cause::Unknown), ..lost }, true);
        check(Lost { cause: Some(Cause::Own), ..lost }, false);
        check(Lost { cause: Some(Cause::Setting), ..lost }, false);
        check(Lost { cause: Some(Cause::Refused), ..lost }, false);
        check(Lost { cause: Some(Cause::PartLost), ..lost }, true);
        check(Lost { in_place: false, ..lost }, false);
        check(Lost { any_done: true, ..lost }, false);
        check(Lost { max_restarts: 2, ..lost }, false);
    }
}
