//! What the ranks of a simulated world do: the same list of operations on each, and what must come of them.

use super::chance::{Chance, scrambled};
use crate::buffer::Plain;
use crate::element::{Erased, ReduceOp};
use crate::group::{Group, Source};
use crate::schedule::Schedule;
use crate::signature::Kind;
use crate::work::Work;
use phalanx_wire::Rank;

/// An operation of a script.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) struct Step {
    /// Its number, which its values and tags follow from.
    pub(super) number: usize,
    /// In which of the world's groups.
    pub(super) group: usize,
    pub(super) what: What,
    /// Elements: of the whole buffer, or of one rank's part.
    pub(super) len: usize,
}

/// Ranks are those of the group.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) enum What {
    AllReduce(ReduceOp),
    Broadcast(usize),
    ReduceScatter(ReduceOp),
    AllGather,
    Barrier,
    MonitoredBarrier,
    Reduce(usize, ReduceOp),
    Gather(usize),
    Scatter(usize),
    AllToAll,
    /// From one rank to another, which names its sender.
    Letter(usize, usize),
    /// All others send to one, which takes them as they come.
    FanIn(usize),
}

/// What must come of an operation.
#[derive(Debug)]
pub(super) enum Wanted {
    /// That it ends.
    Nothing,
    /// From there on the buffer holds this; the rest means nothing.
    At(usize, Vec<u64>),
    /// What the rank that it came from brought.
    OfItsSender,
}

/// An operation of one rank that was started.
pub(super) struct Started {
    pub(super) step: Step,
    pub(super) work: Work<Vec<u64>>,
    pub(super) wanted: Wanted,
}

fn value(step: &Step, rank: usize, i: usize) -> u64 {
    scrambled(((step.number as u64) << 40) ^ ((rank as u64) << 32) ^ i as u64)
}

/// What a rank brings.
fn brought(step: &Step, rank: usize, len: usize) -> Vec<u64> {
    (0..len).map(|i| value(step, rank, i)).collect()
}

fn combined(op: ReduceOp, a: u64, b: u64) -> u64 {
    match op {
        ReduceOp::Sum => a.wrapping_add(b),
        ReduceOp::Product => a.wrapping_mul(b),
        ReduceOp::Min => a.min(b),
        ReduceOp::Max => a.max(b),
        ReduceOp::And => a & b,
        ReduceOp::Or => a | b,
        ReduceOp::Xor => a ^ b,
        ReduceOp::Average | ReduceOp::PremulSum(_) => unreachable!("scripts have no scaled sums"),
    }
}

fn reduced(step: &Step, op: ReduceOp, n: usize, len: usize) -> Vec<u64> {
    let of = |i| (1..n).fold(value(step, 0, i), |sum, rank| combined(op, sum, value(step, rank, i)));
    (0..len).map(of).collect()
}

fn at_root(is_root: bool, all: impl FnOnce() -> Vec<u64>) -> Wanted {
    if is_root { Wanted::At(0, all()) } else { Wanted::Nothing }
}

const OPS: [ReduceOp; 4] = [ReduceOp::Sum, ReduceOp::Product, ReduceOp::Max, ReduceOp::Xor];

impl Step {
    /// Any operation of a group of `n` ranks, at least two.
    pub(super) fn random(chance: &mut Chance, number: usize, group: usize, n: usize) -> Step {
        let (root, op) = (chance.below(n), chance.pick(&OPS));
        let other = (root + 1 + chance.below(n - 1)) % n;
        let what = chance.pick(&[
            What::AllReduce(op),
            What::Broadcast(root),
            What::ReduceScatter(op),
            What::AllGather,
            What::Barrier,
            What::MonitoredBarrier,
            What::Reduce(root, op),
            What::Gather(root),
            What::Scatter(root),
            What::AllToAll,
            What::Letter(root, other),
            What::Letter(root, other),
            What::FanIn(root),
        ]);
        let len = match what {
            What::Barrier | What::MonitoredBarrier => 0,
            // Large enough for the other algorithm.
            What::AllReduce(_) | What::Reduce(..) if chance.once_in(40) => 20_000 / n,
            _ => chance.pick(&[0, 1, 2, 7, 30, 100]),
        };
        Step { number, group, what, len }
    }

    /// Whether it is worth the algorithms for much.
    pub(super) fn is_large(&self) -> bool {
        self.len > 1000
    }

    /// Whether all ranks of the group take part.
    pub(super) fn is_collective(&self) -> bool {
        !matches!(self.what, What::Letter(..) | What::FanIn(_))
    }

    /// The same operation as another rank might understand it: with another root, length, reduction or kind.
    pub(super) fn misunderstood(mut self, chance: &mut Chance, n: usize) -> Step {
        let before = self;
        while self == before {
            match chance.below(3) {
                0 => self.len = if self.len == 0 { 0 } else { self.len + 1 },
                1 => self = Step::random(chance, self.number, self.group, n),
                _ => {
                    let root = chance.below(n);
                    self.what = match self.what {
                        What::Broadcast(_) => What::Broadcast(root),
                        What::Reduce(_, op) => What::Reduce(root, op),
                        What::Gather(_) => What::Gather(root),
                        What::Scatter(_) => What::Scatter(root),
                        What::Barrier => What::MonitoredBarrier,
                        What::MonitoredBarrier => What::Barrier,
                        other => other,
                    };
                }
            }
            if !self.is_collective() {
                self = before;
            }
        }
        self
    }

    /// Starts this rank's part of it.
    pub(super) fn start(&self, group: &Group) -> Vec<Started> {
        let (rank, n, len) = (group.rank().index(), group.world_size(), self.len);
        let own = |len| brought(self, rank, len);
        // Parts of `len` elements, of which this rank brings its own.
        let parts =
            || (0..n * len).map(|i| if i / len == rank { value(self, rank, i % len) } else { 0 }).collect();
        let one = |work, wanted| vec![Started { step: *self, work, wanted }];
        match self.what {
            What::AllReduce(op) => {
                one(group.start_all_reduce(own(len), op), Wanted::At(0, reduced(self, op, n, len)))
            }
            What::Broadcast(root) => one(
                group.start_broadcast(own(len), Rank(root as u32)),
                Wanted::At(0, brought(self, root, len)),
            ),
            What::ReduceScatter(op) => {
                let all = reduced(self, op, n, n * len);
                let wanted = all[rank * len..][..len].to_vec();
                one(group.start_reduce_scatter(own(n * len), op), Wanted::At(rank * len, wanted))
            }
            What::AllGather => {
                let all = (0..n).flat_map(|rank| brought(self, rank, len)).collect();
                one(group.start_all_gather(parts()), Wanted::At(0, all))
            }
            What::Barrier => one(
                self.played(group, Kind::Barrier, None, 0, group.seat().barrier(), Vec::new()),
                Wanted::Nothing,
            ),
            What::MonitoredBarrier => {
                let schedule = group.seat().monitored_barrier();
                one(
                    self.played(group, Kind::MonitoredBarrier, None, 0, schedule, Vec::new()),
                    Wanted::Nothing,
                )
            }
            What::Reduce(root, op) => {
                let schedule = group.seat().reduce(len, size_of::<u64>(), root);
                let work = self.played(group, Kind::Reduce, Some(op), root, schedule, own(len));
                one(work, at_root(rank == root, || reduced(self, op, n, len)))
            }
            What::Gather(root) => {
                let schedule = group.seat().gather(len, root);
                let buffer = if rank == root { parts() } else { own(len) };
                let all = || (0..n).flat_map(|rank| brought(self, rank, len)).collect();
                let work = self.played(group, Kind::Gather, None, root, schedule, buffer);
                one(work, at_root(rank == root, all))
            }
            What::Scatter(root) => {
                let schedule = group.seat().scatter(len, root);
                let all = brought(self, root, n * len);
                let wanted = all[rank * len..][..len].to_vec();
                let buffer = if rank == root { all } else { vec![0; len] };
                let at = if rank == root { rank * len } else { 0 };
                one(self.played(group, Kind::Scatter, None, root, schedule, buffer), Wanted::At(at, wanted))
            }
            What::AllToAll => {
                let parts = |start: usize| -> Vec<_> {
                    (0..n).map(|part| start + part * len..start + (part + 1) * len).collect()
                };
                let schedule = group.seat().all_to_all(&parts(0), &parts(n * len));
                let mut both = own(n * len);
                both.extend(std::iter::repeat_n(0, n * len));
                both.copy_within(rank * len..(rank + 1) * len, n * len + rank * len);
                let came = |from| (0..len).map(move |i| value(self, from, rank * len + i));
                let wanted = (0..n).flat_map(came).collect();
                one(self.played(group, Kind::AllToAll, None, 0, schedule, both), Wanted::At(n * len, wanted))
            }
            What::Letter(from, to) if rank == from => {
                one(group.start_send(own(len), Rank(to as u32), self.tag()), Wanted::Nothing)
            }
            What::Letter(from, to) if rank == to => {
                let source = Source::Rank(Rank(from as u32));
                let wanted = Wanted::At(0, brought(self, from, len));
                one(group.start_receive(vec![0; len], source, self.tag()), wanted)
            }
            What::Letter(..) => Vec::new(),
            What::FanIn(root) if rank == root => {
                let receive = |_| Started {
                    step: *self,
                    work: group.start_receive(vec![0; len], Source::Any, self.tag()),
                    wanted: Wanted::OfItsSender,
                };
                (1..n).map(receive).collect()
            }
            What::FanIn(root) => {
                one(group.start_send(own(len), Rank(root as u32), self.tag()), Wanted::Nothing)
            }
        }
    }

    /// Letters of few tags, which overtake each other or may not; those that anyone may send have one of their own.
    fn tag(&self) -> u32 {
        match self.what {
            What::FanIn(_) => 1000 + self.number as u32,
            _ => self.number as u32 % 3,
        }
    }

    fn played(
        &self,
        group: &Group,
        kind: Kind,
        op: Option<ReduceOp>,
        root: usize,
        schedule: Schedule,
        buffer: Vec<u64>,
    ) -> Work<Vec<u64>> {
        let signature = crate::group::signature::<u64>(kind, op, root as u32, self.len);
        let buffer = Box::new(Plain(buffer));
        group.start(signature, || schedule, Erased::of::<u64>(), buffer, op.unwrap_or(ReduceOp::Sum))
    }

    /// What is wrong with what came of it.
    pub(super) fn judge(&self, came: &[u64], from: Rank, wanted: &Wanted) -> Option<String> {
        let letter;
        let (at, wanted) = match wanted {
            Wanted::Nothing => return None,
            Wanted::At(at, wanted) => (*at, wanted),
            Wanted::OfItsSender => {
                letter = brought(self, from.index(), self.len);
                (0, &letter)
            }
        };
        let right = came.get(at..at + wanted.len()).is_some_and(|came| came == wanted);
        (!right).then(|| format!("{self:?} gave {came:?} where {wanted:?} belong from {at} on"))
    }
}
