//! Which worker's end is why a run has failed: a pure function of how all of them ended.

use phalanx_wire::Rank;

/// The end of one worker, as far as blame goes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct End {
    pub(crate) rank: Rank,
    /// Whether it ended well.
    pub(crate) good: bool,
    /// Whether it ended before the launcher began to stop the others.
    pub(crate) before_stop: bool,
    /// Whether a signal that the launcher had sent it ended it.
    pub(crate) by_launcher: bool,
    /// Whether it said that it only followed another.
    pub(crate) consequence: bool,
}

/// The cause among `ends`, which are in order of time. It is the first that failed before the stop. If those only followed
/// another, that one has been slower to end (it wrote a core file, say) and comes after the stop; but a worker is never blamed
/// for a signal that the launcher sent it.
pub(crate) fn cause(ends: &[End]) -> Option<Rank> {
    let first = |wanted: &dyn Fn(&End) -> bool| ends.iter().find(|end| !end.good && wanted(end));
    first(&|end| end.before_stop && !end.consequence)
        .or_else(|| first(&|end| !end.before_stop && !end.consequence && !end.by_launcher))
        .or_else(|| first(&|end| end.before_stop))
        .map(|end| end.rank)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_that_failed_of_its_own_is_to_blame() {
        let rank = |n| End {
            rank: Rank(n),
            good: false,
            before_stop: false,
            by_launcher: false,
            consequence: false,
        };
        let early = |n| End { before_stop: true, ..rank(n) };
        let follower = |end| End { consequence: true, ..end };
        let stopped = |n| End { by_launcher: true, ..rank(n) };
        let check = |ends: &[End], want: Option<u32>| assert_eq!(cause(ends).map(|r| r.0), want, "{ends:?}");
        check(&[], None);
        check(&[End { good: true, ..early(0) }], None);
        check(&[early(1), stopped(0)], Some(1));
        check(&[early(1), rank(0)], Some(1));
        check(&[follower(early(1)), stopped(2), rank(0)], Some(0));
        check(&[follower(early(1)), early(0)], Some(0));
        check(&[follower(early(1)), stopped(0), follower(rank(2))], Some(1));
    }
}
