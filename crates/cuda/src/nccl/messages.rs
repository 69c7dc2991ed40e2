//! Operations that are made of messages: gathers, scatters, all-to-alls, and messages themselves, several at once.
//!
//! A message of NCCL's is under way until both of its ranks have come to it, and the next one on a stream waits for that. So all that a
//! rank sends and receives in an operation is issued as one group, within which no message waits for another. Since 2.28 the library has
//! functions of its own for these operations, which it makes of the same messages; groups of them are there in every version.
//!
//! What a rank has for itself in an all-to-all is a message of the group like any other, which the library allows there and does as a
//! copy: beside the others, where a copy of ours on the stream would come before them. In a gather and a scatter it stays where it is.
//! Parts without numbers are no messages: both of their ranks know that they are empty.

use super::exchange::{Exchange, Exchanged, Lent};
use super::{Block, Calls};
use crate::address::StreamHandle;
use crate::error::Error;
use std::sync::Arc;

/// One of several messages that are under way at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Message<T> {
    /// What is sent, or what it comes to.
    pub numbers: T,
    /// Which rank is at the other end.
    pub way: Way,
}

/// The way of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// To this rank.
    To(usize),
    /// From this rank.
    From(usize),
}

impl Way {
    const fn peer(self) -> usize {
        let (Way::To(peer) | Way::From(peer)) = self;
        peer
    }
}

impl Exchange {
    /// On rank `root` the numbers are as many equal parts as there are ranks, each of which becomes what its rank has, this rank's own
    /// being there already; elsewhere they are what the rank has, and stay. Panics where they can't be parts, and if there is no such
    /// rank.
    #[track_caller]
    pub fn gather<L: Lent>(self: &Arc<Self>, lent: L, root: usize) -> Result<Exchanged<L>, Error> {
        self.around("gather", lent, root, [Way::From, Way::To])
    }

    /// On rank `root` the numbers are as many equal parts as there are ranks, and stay; elsewhere they become the part of that rank.
    /// Panics as [`Exchange::gather`].
    #[track_caller]
    pub fn scatter<L: Lent>(self: &Arc<Self>, lent: L, root: usize) -> Result<Exchanged<L>, Error> {
        self.around("scatter", lent, root, [Way::To, Way::From])
    }

    /// Messages between rank `root`, which has a part for each other rank, and these: the ways that they take for `root`, and for the
    /// others.
    #[track_caller]
    fn around<L: Lent>(
        self: &Arc<Self>,
        op: &str,
        lent: L,
        root: usize,
        [of_root, of_others]: [fn(usize) -> Way; 2],
    ) -> Result<Exchanged<L>, Error> {
        self.check_rank(op, root);
        let whole = lent.block();
        let messages: Vec<_> = if self.rank() == root {
            let others = (0..self.n_ranks()).filter(|rank| *rank != root);
            others.map(|rank| Message { numbers: self.part(op, whole, rank), way: of_root(rank) }).collect()
        } else {
            vec![Message { numbers: whole, way: of_others(root) }]
        };
        let beginning = self.behind(&[&lent])?;
        // SAFETY: the messages are of lent numbers alone, each of which is in one of them; `behind` and `begin` have the streams wait as
        // `Lent` asks.
        self.begin(beginning, lent, |calls, stream| unsafe { give(calls, &messages, stream) })
    }

    /// Part r of `input` goes to rank r, and part r of `output` comes from there; all parts have one length. Panics where they can't
    /// have, and where the two aren't as long as each other, and of one type.
    #[track_caller]
    pub fn all_to_all<I: Lent, O: Lent>(
        self: &Arc<Self>,
        input: I,
        output: O,
    ) -> Result<Exchanged<(I, O)>, Error> {
        let (n_ranks, from, to) = (self.n_ranks(), input.block(), output.block());
        assert!(
            from.count == to.count && from.count.is_multiple_of(n_ranks),
            "all_to_all: {} numbers in, {} out, {n_ranks} ranks",
            from.count,
            to.count
        );
        let lengths = vec![from.count / n_ranks; n_ranks];
        self.all_to_all_uneven(input, &lengths, output, &lengths)
    }

    /// As [`Exchange::all_to_all`], where part r of `input` has `sends[r]` numbers and part r of `output` has `receives[r]`, which is
    /// what rank r sends here. Panics where these aren't all of them, a length for each rank, and where a rank would send itself what
    /// it doesn't expect.
    #[track_caller]
    pub fn all_to_all_uneven<I: Lent, O: Lent>(
        self: &Arc<Self>,
        input: I,
        sends: &[usize],
        output: O,
        receives: &[usize],
    ) -> Result<Exchanged<(I, O)>, Error> {
        let (rank, from, to) = (self.rank(), input.block(), output.block());
        assert!(from.number == to.number, "all_to_all: {} in, {} out", from.number, to.number);
        let sent = self.uneven_parts("in", from, sends);
        let received = self.uneven_parts("out", to, receives);
        assert!(
            sends[rank] == receives[rank],
            "all_to_all: rank {rank} sends itself {} numbers and expects {}",
            sends[rank],
            receives[rank]
        );
        let to = sent.into_iter().enumerate().map(|(rank, numbers)| Message { numbers, way: Way::To(rank) });
        let from = received.into_iter().enumerate();
        let from = from.map(|(rank, numbers)| Message { numbers, way: Way::From(rank) });
        let messages: Vec<_> = to.chain(from).collect();
        let beginning = self.behind(&[&input, &output])?;
        // SAFETY: as in `around`.
        self.begin(beginning, (input, output), |calls, stream| unsafe { give(calls, &messages, stream) })
    }

    /// Sends and receives all of these at once, and gives their numbers back in this order. Of several between the same two ranks the
    /// first that is sent is the first that is received. Panics if there is no such rank, and of a message between a rank and itself.
    #[track_caller]
    pub fn exchange<L: Lent>(
        self: &Arc<Self>,
        messages: Vec<Message<L>>,
    ) -> Result<Exchanged<Vec<L>>, Error> {
        for peer in messages.iter().map(|message| message.way.peer()) {
            self.check_rank("exchange", peer);
            assert!(peer != self.rank(), "exchange: a message between rank {peer} and itself");
        }
        let lent: Vec<&dyn Lent> = messages.iter().map(|message| &message.numbers as &dyn Lent).collect();
        let beginning = self.behind(&lent)?;
        let block_of = |&Message { ref numbers, way }: &Message<L>| Message { numbers: numbers.block(), way };
        let blocks: Vec<_> = messages.iter().map(block_of).collect();
        let lent = messages.into_iter().map(|message| message.numbers).collect();
        // SAFETY: as in `around`.
        self.begin(beginning, lent, |calls, stream| unsafe { give(calls, &blocks, stream) })
    }

    #[track_caller]
    fn check_rank(&self, op: &str, rank: usize) {
        assert!(rank < self.n_ranks(), "{op}: rank {rank} among {} ranks", self.n_ranks());
    }

    /// Parts of these lengths, one after the other, which are the whole.
    #[track_caller]
    fn uneven_parts(&self, what: &str, whole: Block, lengths: &[usize]) -> Vec<Block> {
        let sum = lengths.iter().try_fold(0usize, |sum, length| sum.checked_add(*length));
        assert!(
            lengths.len() == self.n_ranks() && sum == Some(whole.count),
            "all_to_all: parts of {lengths:?} numbers of {} {what}, {} ranks",
            whole.count,
            self.n_ranks()
        );
        let mut at = whole.at;
        let mut next = |&count: &usize| {
            let part = Block { at, count, ..whole };
            at = at.plus(count * whole.number.bytes());
            part
        };
        lengths.iter().map(&mut next).collect()
    }
}

/// Sends and receives all of these at once.
///
/// # Safety
/// What [`Calls`] says.
unsafe fn give(
    calls: &mut Calls<'_>,
    messages: &[Message<Block>],
    stream: StreamHandle,
) -> Result<(), Error> {
    let mut messages = messages.iter().filter(|message| message.numbers.count > 0).peekable();
    if messages.peek().is_none() {
        return Ok(());
    }
    calls.grouped(|calls| {
        messages.try_for_each(|&Message { numbers, way }| match way {
            // SAFETY: the caller's promise.
            Way::To(rank) => unsafe { calls.send(numbers, rank, stream) },
            // SAFETY: the caller's promise.
            Way::From(rank) => unsafe { calls.receive(numbers, rank, stream) },
        })
    })
}
