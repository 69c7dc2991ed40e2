//! Whether an error is right: what it says must have happened, to the rank that it names.

use super::network::{Leave, Network};
use crate::error::Error;
use phalanx_wire::Rank;

/// What happened in a generation that an error may speak of.
#[derive(Default, Debug)]
pub(super) struct Hurt {
    /// Whether ranks were stopped or cut off for longer than an operation may take.
    pub(super) silent: bool,
    /// Who misunderstood an operation.
    pub(super) deviant: Option<usize>,
    /// Who was told to abort a group.
    pub(super) aborted: Vec<usize>,
    /// How often anything was done that may fail an operation.
    pub(super) times: usize,
}

/// What an error of the group's `rank` says that isn't so. `members` are the ranks of the world that the group has; `failed`
/// says of one of them whether it failed, and with which error if that was in this group.
pub(super) fn wrong_with(
    error: &Error,
    rank: usize,
    members: &[usize],
    network: &Network,
    hurt: &Hurt,
    failed: impl Fn(usize) -> Option<Option<Error>>,
) -> Option<&'static str> {
    let told_to = |rank: usize| hurt.aborted.contains(&members[rank]);
    // The group's number of one that the error names by that of the world.
    let place = |named: &Rank| {
        members.iter().position(|&member| member == named.index()).expect("errors name members")
    };
    let said = match error {
        Error::PeerLost { peer, said_by, .. } => {
            let lost = network.lost(said_by.as_ref().map_or(rank, place), place(peer));
            (!lost).then_some("that rank isn't the one that was lost")
        }
        Error::Aborted { by, .. } if told_to(place(by)) => None,
        Error::Aborted { by, .. } => match failed(place(by)) {
            _ if place(by) == rank => Some("nobody told it to"),
            // It may have died since.
            None => (network.left(place(by)) != Some(Leave::Failed)).then_some("that rank didn't fail"),
            Some(Some(Error::PeerLost { .. } | Error::Aborted { .. })) => Some("that rank wasn't the first"),
            Some(_) => None,
        },
        Error::Mismatch { rank: own, .. } if place(own) != rank => Some("this isn't that rank"),
        Error::Mismatch { peer, .. } => {
            let sides = [members[rank], members[place(peer)]];
            let met = hurt.deviant.is_some_and(|deviant| sides.contains(&deviant));
            (!met).then_some("both ranks understood the same")
        }
        Error::Timeout { missing, .. } if missing.is_empty() => Some("nobody is missing"),
        Error::Timeout { missing, .. } if missing.iter().any(|r| place(r) == rank) => {
            Some("a rank doesn't wait for itself")
        }
        Error::Timeout { .. } => (!hurt.silent).then_some("nobody was kept from answering"),
        Error::Silent { .. }
        | Error::Overrun { .. }
        | Error::Busy { .. }
        | Error::Connect { .. }
        | Error::Gpu { .. } => Some("nothing like it happened"),
    };
    said.or_else(|| (hurt.times == 0).then_some("nobody was hurt"))
}
