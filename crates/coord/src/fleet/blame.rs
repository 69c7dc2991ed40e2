//! Which node's failure is why a generation has failed.

use super::NodeId;
use phalanx_job::{Mishap, Setback};

/// The first of these, in order of time, that followed no other: a worker that only followed says so, and the one that it
/// followed may have been slower to end.
pub(super) fn first(failures: &[(NodeId, Setback)]) -> Option<&Setback> {
    let rank = |setback: &Setback| match &setback.what {
        Mishap::Worker(failure) if failure.consequence => 2,
        Mishap::Worker(failure) if failure.after_stop => 1,
        _ => 0,
    };
    failures.iter().map(|(_, setback)| setback).min_by_key(|setback| rank(setback))
}
