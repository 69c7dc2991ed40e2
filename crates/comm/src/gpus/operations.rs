//! What the ranks of a group have NCCL do with the numbers of their GPUs.

use super::{GpuGroup, GpuWork, Waited};
use crate::element::ReduceOp;
use crate::error::Error;
use phalanx_cuda::nccl::{Lent, Message, Reduction, Way};
use phalanx_wire::{Deadline, Rank};

/// One of the messages of a [`GpuGroup::start_exchange`].
#[derive(Debug)]
pub enum GpuTransfer<L> {
    /// Numbers to send.
    Send {
        /// What is sent.
        values: L,
        /// Who receives it.
        to: Rank,
    },
    /// Numbers to receive into.
    Receive {
        /// Where it goes.
        values: L,
        /// Who sends it.
        from: Rank,
    },
}

impl GpuGroup {
    /// The numbers become the reduction of all ranks' numbers. Panics for a reduction that NCCL doesn't have: those of bits.
    #[track_caller]
    pub fn start_all_reduce<L: Lent>(&self, lent: L, op: ReduceOp) -> Result<GpuWork<L>, Error> {
        let name = named("all-reduce", &lent);
        self.begin(name, Waited::AtOnce, |exchange| exchange.all_reduce(lent, reduction("all-reduce", op)))
    }

    /// The same so many times, with nothing of ours in between: what [`GpuGroup::start_all_reduce`] is measured against.
    #[track_caller]
    pub fn start_all_reduces<L: Lent>(
        &self,
        lent: L,
        op: ReduceOp,
        times: usize,
    ) -> Result<GpuWork<L>, Error> {
        let name = format!("{times} times {}", named("all-reduce", &lent));
        self.begin(name, Waited::AtOnce, |exchange| {
            exchange.all_reduces(lent, reduction("all-reduce", op), times)
        })
    }

    /// On rank `root` the numbers become the reduction of all ranks' numbers; elsewhere they stay as they are. Panics as
    /// [`GpuGroup::start_all_reduce`].
    #[track_caller]
    pub fn start_reduce<L: Lent>(&self, lent: L, op: ReduceOp, root: Rank) -> Result<GpuWork<L>, Error> {
        let name = named("reduce", &lent);
        self.begin(name, Waited::AtOnce, |exchange| {
            exchange.reduce(lent, reduction("reduce", op), root.index())
        })
    }

    /// The numbers become those of rank `root`.
    #[track_caller]
    pub fn start_broadcast<L: Lent>(&self, lent: L, root: Rank) -> Result<GpuWork<L>, Error> {
        self.begin(named("broadcast", &lent), Waited::AtOnce, |exchange| {
            exchange.broadcast(lent, root.index())
        })
    }

    /// The numbers are as many equal parts as there are ranks; each becomes that of its rank. Panics where they aren't.
    #[track_caller]
    pub fn start_all_gather<L: Lent>(&self, lent: L) -> Result<GpuWork<L>, Error> {
        self.begin(named("all-gather", &lent), Waited::AtOnce, |exchange| exchange.all_gather(lent))
    }

    /// The numbers are as many equal parts as there are ranks; this rank's becomes the reduction of all ranks' numbers in that
    /// part, the others mean nothing afterwards. Panics where they aren't, and as [`GpuGroup::start_all_reduce`].
    #[track_caller]
    pub fn start_reduce_scatter<L: Lent>(&self, lent: L, op: ReduceOp) -> Result<GpuWork<L>, Error> {
        let name = named("reduce-scatter", &lent);
        self.begin(name, Waited::AtOnce, |exchange| {
            exchange.reduce_scatter(lent, reduction("reduce-scatter", op))
        })
    }

    /// As [`Group::gather`](crate::Group::gather), in place: on rank `root` the numbers are as many equal parts as there are ranks, of
    /// which this rank's own is there, and the others come; elsewhere they are the rank's part, and stay. Panics where they can't be parts.
    #[track_caller]
    pub fn start_gather<L: Lent>(&self, lent: L, root: Rank) -> Result<GpuWork<L>, Error> {
        self.begin(named("gather", &lent), Waited::AtOnce, |exchange| exchange.gather(lent, root.index()))
    }

    /// As [`Group::scatter`](crate::Group::scatter), in place: on rank `root` the numbers are as many equal parts as there are ranks, and
    /// stay; elsewhere they become that rank's part. Panics where they can't be parts.
    #[track_caller]
    pub fn start_scatter<L: Lent>(&self, lent: L, root: Rank) -> Result<GpuWork<L>, Error> {
        self.begin(named("scatter", &lent), Waited::AtOnce, |exchange| exchange.scatter(lent, root.index()))
    }

    /// Part r of `input` goes to rank r, and part r of `output` comes from there; all parts have one length. Both come back. Panics
    /// where they can't be such parts.
    #[track_caller]
    pub fn start_all_to_all<I: Lent, O: Lent>(&self, input: I, output: O) -> Result<GpuWork<(I, O)>, Error> {
        self.begin(named("all-to-all", &input), Waited::AtOnce, |exchange| exchange.all_to_all(input, output))
    }

    /// As [`GpuGroup::start_all_to_all`], where part r of `input` has `sends[r]` numbers and part r of `output` has `receives[r]`, which
    /// is what rank r sends here. Panics where these aren't all of them.
    #[track_caller]
    pub fn start_all_to_all_uneven<I: Lent, O: Lent>(
        &self,
        input: I,
        sends: &[usize],
        output: O,
        receives: &[usize],
    ) -> Result<GpuWork<(I, O)>, Error> {
        self.begin(named("all-to-all", &input), Waited::AtOnce, |exchange| {
            exchange.all_to_all_uneven(input, sends, output, receives)
        })
    }

    /// Sends and receives messages at once, none of which waits for another, and gives their numbers back in this order. Only the ranks
    /// at their ends take part. Between two of them, the first that is sent is the first that is received, into as many numbers. Panics
    /// of a message between a rank and itself.
    #[track_caller]
    pub fn start_exchange<L: Lent>(&self, transfers: Vec<GpuTransfer<L>>) -> Result<GpuWork<Vec<L>>, Error> {
        let message = |transfer| match transfer {
            GpuTransfer::Send { values, to } => Message { numbers: values, way: Way::To(to.index()) },
            GpuTransfer::Receive { values, from } => {
                Message { numbers: values, way: Way::From(from.index()) }
            }
        };
        let messages: Vec<_> = transfers.into_iter().map(message).collect();
        let name = format!("exchange of {} messages", messages.len());
        self.begin(name, Waited::AtOnce, |exchange| exchange.exchange(messages))
    }

    /// Returns when every rank has called it, and each GPU has done what its compute stream had by then.
    pub fn barrier(&self) -> Result<(), Error> {
        let work = self.begin("barrier".to_owned(), Waited::AtOnce, |exchange| exchange.barrier())?;
        work.wait(Deadline::after(self.group().timeout()))
    }

    /// Rank `peer`, which must receive as many, has the numbers. On the GPU the operation is under way until it does: ranks that send to
    /// each other want [`GpuGroup::start_exchange`].
    #[track_caller]
    pub fn start_send<L: Lent>(&self, lent: L, peer: Rank) -> Result<GpuWork<L>, Error> {
        self.begin(named("send", &lent), Waited::Never, |exchange| exchange.send(lent, peer.index()))
    }

    /// The numbers become what rank `peer` sends.
    #[track_caller]
    pub fn start_receive<L: Lent>(&self, lent: L, peer: Rank) -> Result<GpuWork<L>, Error> {
        self.begin(named("receive", &lent), Waited::WhenJoined, |exchange| {
            exchange.receive(lent, peer.index())
        })
    }
}

fn named(operation: &str, lent: &impl Lent) -> String {
    let block = lent.block();
    format!("{operation} of {} {}", block.count, block.number)
}

#[track_caller]
fn reduction(operation: &str, op: ReduceOp) -> Reduction {
    match op {
        ReduceOp::Sum => Reduction::Sum,
        ReduceOp::Average => Reduction::Mean,
        ReduceOp::Product => Reduction::Product,
        ReduceOp::Min => Reduction::Min,
        ReduceOp::Max => Reduction::Max,
        ReduceOp::PremulSum(factor) => Reduction::SumTimes(factor),
        ReduceOp::And | ReduceOp::Or | ReduceOp::Xor => panic!("{operation}: NCCL has no {op:?}"),
    }
}
