//! Which rank takes which samples at which step: functions of (seed, epoch, position), so that any step of any epoch can be
//! planned by anyone at any time.
//!
//! Invariants, for both samplers: all ranks have the same number of steps; the plans of all ranks of one step name the same
//! [`StepPlan::global_samples`], and that is the number of samples that they hold together.

use crate::order::Order;
use std::ops::Range;

/// The samples of one rank in one step.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StepPlan {
    /// This rank's samples, in order; possibly none.
    pub indices: Vec<usize>,
    /// How many samples all ranks take together: what the mean of the loss divides by.
    pub global_samples: usize,
}

/// Splits epochs into steps and steps among ranks.
pub trait Sampler: Send + Sync {
    /// How many steps an epoch has, on every rank.
    fn steps_per_epoch(&self) -> usize;

    /// Writes the plan of a step over `into`, without allocating once `into` has its size. Panics if there is no such step.
    #[track_caller]
    fn plan(&self, epoch: u64, step: usize, into: &mut StepPlan);

    /// The plan of a step. Panics if there is no such step.
    #[track_caller]
    fn step(&self, epoch: u64, step: usize) -> StepPlan {
        let mut plan = StepPlan::default();
        self.plan(epoch, step, &mut plan);
        plan
    }
}

/// Every sample exactly once an epoch, whatever the number of ranks.
///
/// The order of the epoch is cut into global batches of `world_size * batch_size` consecutive samples, and each of them into
/// consecutive parts for ranks 0, 1, 2 and so on. The last global batch may be smaller: its parts differ in size by at most
/// one, and may be empty. One rank with batches of 2B and two ranks with batches of B so see the same global batches.
///
/// ```
/// use phalanx_data::{ExactSampler, Order, Sampler};
/// let ranks = [0, 1].map(|rank| ExactSampler { len: 7, world_size: 2, rank, batch_size: 2, order: Order::Stored });
/// assert_eq!(ranks[0].steps_per_epoch(), 2);
/// assert_eq!(ranks.map(|rank| rank.step(0, 1).indices), [vec![4, 5], vec![6]]);
/// assert_eq!(ranks[0].step(0, 1).global_samples, 3);
/// ```
#[derive(Clone, Copy, Debug)]
pub struct ExactSampler {
    /// How many samples the dataset has.
    pub len: usize,
    /// How many ranks share them; at least 1.
    pub world_size: usize,
    /// This rank, below `world_size`.
    pub rank: usize,
    /// Samples per rank and step; at least 1.
    pub batch_size: usize,
    /// The order within an epoch.
    pub order: Order,
}

impl ExactSampler {
    /// Writes the plan of the global batch that begins after the first `position` samples of the epoch. A run whose world
    /// size changes in mid-epoch goes on from here, at a position that is no multiple of the new global batch.
    /// Panics if no sample is left.
    #[track_caller]
    pub fn plan_at(&self, epoch: u64, position: usize, into: &mut StepPlan) {
        assert!(position < self.len, "ExactSampler: position {position} of {} samples", self.len);
        let end = self.len.min(position.saturating_add(self.global_batch()));
        self.plan_within(epoch, position..end, into);
    }

    /// Writes the plan of a batch of these positions of the epoch, which all ranks share.
    pub(crate) fn plan_within(&self, epoch: u64, positions: Range<usize>, into: &mut StepPlan) {
        check("ExactSampler", self.world_size, self.rank, self.batch_size);
        let (position, global) = (positions.start, positions.len());
        let (size, larger) = (global / self.world_size, global % self.world_size);
        let start = position + self.rank * size + self.rank.min(larger);
        let size = size + usize::from(self.rank < larger);
        let order = self.order.epoch(self.len, epoch);
        into.indices.clear();
        into.indices.extend((start..start + size).map(|position| order.index(position)));
        into.global_samples = global;
    }

    /// How many samples all ranks take in a full step. A batch size that stands for the whole dataset may be any number.
    fn global_batch(&self) -> usize {
        self.world_size.saturating_mul(self.batch_size)
    }
}

impl Sampler for ExactSampler {
    fn steps_per_epoch(&self) -> usize {
        check("ExactSampler", self.world_size, self.rank, self.batch_size);
        self.len.div_ceil(self.global_batch())
    }

    fn plan(&self, epoch: u64, step: usize, into: &mut StepPlan) {
        self.plan_at(epoch, step.saturating_mul(self.global_batch()), into);
    }
}

/// Every sample exactly once an epoch in steps of a fixed number of samples, which any number of ranks take in as many passes
/// as they need: a run whose world size changes keeps its steps.
///
/// The passes of a step take consecutive samples, and are as long as each other but for the last. Of each, ranks take parts as
/// in [`ExactSampler`]; what is a step there is a pass here.
///
/// ```
/// use phalanx_data::{ExactSampler, Order, PassSampler, Sampler};
/// let of = |world_size| {
///     let ranks = ExactSampler { len: 20, world_size, rank: 0, batch_size: 2, order: Order::Stored };
///     PassSampler { ranks, step: 8, samples: 20 }
/// };
/// // Four ranks make a step of eight samples in one pass, and three need two.
/// assert_eq!([of(4).passes(), of(3).passes()], [1, 2]);
/// assert_eq!(of(4).step(0, 1).indices, [8, 9]);
/// assert_eq!([of(3).step(0, 2).indices, of(3).step(0, 3).indices], [[8, 9], [12, 13]]);
/// ```
#[derive(Clone, Copy, Debug)]
pub struct PassSampler {
    /// Who shares a pass, and the most that each takes of it.
    pub ranks: ExactSampler,
    /// Samples of a step of all ranks; at least 1.
    pub step: usize,
    /// How many samples of the epoch's order are taken: all, or fewer where its end is left out.
    pub samples: usize,
}

impl PassSampler {
    /// In how many passes a full step is taken.
    pub fn passes(&self) -> usize {
        self.step.div_ceil(self.ranks.global_batch())
    }

    /// Samples of all ranks in a pass, but for the last of a step.
    pub fn pass(&self) -> usize {
        self.step.div_ceil(self.passes())
    }

    /// In how many passes so many samples, a step's or fewer, are taken.
    pub fn passes_of(&self, samples: usize) -> usize {
        samples.div_ceil(self.pass())
    }
}

impl Sampler for PassSampler {
    fn steps_per_epoch(&self) -> usize {
        let (full, left) = (self.samples / self.step, self.samples % self.step);
        full * self.passes_of(self.step) + self.passes_of(left)
    }

    fn plan(&self, epoch: u64, pass: usize, into: &mut StepPlan) {
        let passes = self.passes_of(self.step);
        let start = (pass / passes).saturating_mul(self.step);
        let step_end = self.samples.min(start.saturating_add(self.step));
        let start = start.saturating_add((pass % passes).saturating_mul(self.pass()));
        assert!(start < step_end, "PassSampler: pass {pass} of {}", self.steps_per_epoch());
        self.ranks.plan_within(epoch, start..step_end.min(start + self.pass()), into);
    }
}

/// The rules of PyTorch's `DistributedSampler`, fed to a `DataLoader` without `drop_last`.
///
/// The order of an epoch is a function of `seed + epoch`. It is made divisible by the number of ranks: by samples from its
/// head, repeated as often as needed, or with `drop_last` by leaving out its tail. Rank r takes positions r, r + world size,
/// r + 2 * world size and so on. (The shuffle itself is ours: PyTorch's generator isn't imitated.)
/// Source: <https://docs.pytorch.org/docs/stable/data.html#torch.utils.data.distributed.DistributedSampler>
///
/// ```
/// use phalanx_data::{DistributedSampler, Order, Sampler};
/// let ranks = [0, 1].map(|rank| DistributedSampler {
///     len: 5, world_size: 2, rank, batch_size: 3, order: Order::Stored, drop_last: false,
/// });
/// assert_eq!(ranks.map(|rank| rank.step(0, 0).indices), [vec![0, 2, 4], vec![1, 3, 0]]);
/// ```
#[derive(Clone, Copy, Debug)]
pub struct DistributedSampler {
    /// How many samples the dataset has.
    pub len: usize,
    /// How many ranks share them; at least 1.
    pub world_size: usize,
    /// This rank, below `world_size`.
    pub rank: usize,
    /// Samples per rank and step; at least 1.
    pub batch_size: usize,
    /// The order within an epoch.
    pub order: Order,
    /// Whether the tail is left out instead of the head repeated, so that some samples are not seen in an epoch.
    pub drop_last: bool,
}

impl DistributedSampler {
    /// How many samples each rank takes in an epoch.
    pub fn samples_per_rank(&self) -> usize {
        check("DistributedSampler", self.world_size, self.rank, self.batch_size);
        if self.drop_last { self.len / self.world_size } else { self.len.div_ceil(self.world_size) }
    }
}

impl Sampler for DistributedSampler {
    fn steps_per_epoch(&self) -> usize {
        self.samples_per_rank().div_ceil(self.batch_size)
    }

    fn plan(&self, epoch: u64, step: usize, into: &mut StepPlan) {
        let n = self.samples_per_rank();
        let start = step.saturating_mul(self.batch_size);
        assert!(start < n, "DistributedSampler: step {step} of {}", self.steps_per_epoch());
        let end = n.min(start.saturating_add(self.batch_size));
        let order = match self.order {
            Order::Stored => self.order.epoch(self.len, epoch),
            Order::Shuffled { seed } => Order::Shuffled { seed: seed.wrapping_add(epoch) }.epoch(self.len, 0),
        };
        into.indices.clear();
        into.indices.extend((start..end).map(|k| order.index((self.rank + k * self.world_size) % self.len)));
        into.global_samples = (end - start) * self.world_size;
    }
}

#[track_caller]
fn check(name: &str, world_size: usize, rank: usize, batch_size: usize) {
    assert!(rank < world_size, "{name}: rank {rank} in a world of size {world_size}");
    assert!(batch_size > 0, "{name}: batches of 0 samples");
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn ranks<S: Sampler>(world_size: usize, make: impl Fn(usize) -> S, epoch: u64) -> Vec<Vec<StepPlan>> {
        let samplers: Vec<S> = (0..world_size).map(make).collect();
        let steps = samplers[0].steps_per_epoch();
        assert!(
            samplers.iter().all(|sampler| sampler.steps_per_epoch() == steps),
            "all ranks have the same steps"
        );
        (0..steps)
            .map(|step| {
                let plans: Vec<StepPlan> = samplers.iter().map(|sampler| sampler.step(epoch, step)).collect();
                let together: usize = plans.iter().map(|plan| plan.indices.len()).sum();
                assert!(plans.iter().all(|plan| plan.global_samples == together), "{plans:?}");
                plans
            })
            .collect()
    }

    fn exact(
        len: usize,
        world_size: usize,
        batch_size: usize,
        order: Order,
        epoch: u64,
    ) -> Vec<Vec<StepPlan>> {
        ranks(world_size, |rank| ExactSampler { len, world_size, rank, batch_size, order }, epoch)
    }

    fn flat(plans: &[StepPlan]) -> Vec<usize> {
        plans.iter().flat_map(|plan| plan.indices.iter().copied()).collect()
    }

    /// PyTorch's documented rules, spelled out with lists.
    fn pytorch(order: &[usize], world_size: usize, rank: usize, drop_last: bool) -> Vec<usize> {
        let mut indices = order.to_vec();
        if drop_last {
            indices.truncate(order.len() / world_size * world_size);
        } else {
            while !indices.len().is_multiple_of(world_size) {
                let missing = world_size - indices.len() % world_size;
                indices.extend_from_slice(&order[..missing.min(order.len())]);
            }
        }
        indices.into_iter().skip(rank).step_by(world_size).collect()
    }

    const WORLDS: [usize; 5] = [1, 2, 3, 7, 20];

    #[test]
    fn distributed_follows_pytorch() {
        for world_size in WORLDS {
            for len in [1, 2, 5, 13, 64] {
                for (drop_last, order) in
                    [(false, Order::Stored), (true, Order::Stored), (false, Order::Shuffled { seed: 5 })]
                {
                    let make =
                        |rank| DistributedSampler { len, world_size, rank, batch_size: 4, order, drop_last };
                    let epoch = 3;
                    let permutation = match order {
                        Order::Stored => order.epoch(len, epoch),
                        Order::Shuffled { seed } => Order::Shuffled { seed: seed + epoch }.epoch(len, 0),
                    };
                    let global: Vec<usize> = (0..len).map(|position| permutation.index(position)).collect();
                    let steps = ranks(world_size, make, epoch);
                    for rank in 0..world_size {
                        let mine: Vec<usize> =
                            steps.iter().flat_map(|step| step[rank].indices.clone()).collect();
                        assert_eq!(
                            mine,
                            pytorch(&global, world_size, rank, drop_last),
                            "{len} samples, rank {rank} of {world_size}"
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn a_tail_shorter_than_the_world_may_be_dropped_whole() {
        let sampler = DistributedSampler {
            len: 3,
            world_size: 5,
            rank: 4,
            batch_size: 1,
            order: Order::Stored,
            drop_last: true,
        };
        assert_eq!(sampler.steps_per_epoch(), 0);
    }

    #[test]
    fn seed_and_epoch_add_up() {
        let sampler = |seed| DistributedSampler {
            len: 50,
            world_size: 2,
            rank: 1,
            batch_size: 25,
            order: Order::Shuffled { seed },
            drop_last: false,
        };
        assert_eq!(sampler(3).step(1, 0), sampler(4).step(0, 0));
        assert_ne!(sampler(3).step(1, 0), sampler(3).step(0, 0));
    }

    proptest! {
        #[test]
        fn exact_takes_every_sample_once(len in 0usize..400, world in 0..WORLDS.len(), batch_size in 1usize..9, seed in any::<u64>(), epoch in 0u64..5) {
            let world_size = WORLDS[world];
            let order = Order::Shuffled { seed };
            let steps = exact(len, world_size, batch_size, order, epoch);
            let mut seen: Vec<usize> = steps.iter().flat_map(|step| flat(step)).collect();
            let permutation = order.epoch(len, epoch);
            prop_assert!(seen.iter().copied().eq((0..len).map(|position| permutation.index(position))), "in the epoch's order");
            seen.sort_unstable();
            prop_assert!(seen.into_iter().eq(0..len));
            for step in &steps {
                let sizes = step.iter().map(|plan| plan.indices.len());
                prop_assert!(sizes.clone().max().unwrap() - sizes.min().unwrap() <= 1);
            }
        }

        #[test]
        fn global_batches_do_not_depend_on_the_world(len in 1usize..300, world in 0..WORLDS.len(), batch_size in 1usize..5, seed in any::<u64>()) {
            let world_size = WORLDS[world];
            let order = Order::Shuffled { seed };
            let many: Vec<Vec<usize>> = exact(len, world_size, batch_size, order, 1).iter().map(|step| flat(step)).collect();
            let one: Vec<Vec<usize>> = exact(len, 1, world_size * batch_size, order, 1).iter().map(|step| flat(step)).collect();
            prop_assert_eq!(many, one);
        }

        #[test]
        fn a_run_that_changes_its_world_size_loses_nothing(len in 1usize..200, worlds in proptest::collection::vec(1usize..8, 1..6), batch_size in 1usize..5, seed in any::<u64>()) {
            let order = Order::Shuffled { seed };
            let (mut position, mut seen, mut change) = (0, Vec::new(), worlds.iter().cycle());
            while position < len {
                let world_size = *change.next().unwrap();
                let mut plan = StepPlan::default();
                let mut taken = 0;
                for rank in 0..world_size {
                    ExactSampler { len, world_size, rank, batch_size, order }.plan_at(2, position, &mut plan);
                    taken += plan.indices.len();
                    seen.extend_from_slice(&plan.indices);
                }
                prop_assert_eq!(taken, plan.global_samples);
                position += taken;
            }
            let permutation = order.epoch(len, 2);
            prop_assert!(seen.into_iter().eq((0..len).map(|position| permutation.index(position))));
        }
    }

    proptest! {
        #[test]
        fn steps_stay_the_same_whatever_the_world_size(len in 1usize..300, step in 1usize..40, batch_size in 1usize..9, short in 0usize..5, seed in any::<u64>()) {
            let samples = len.saturating_sub(short).max(1);
            let order = Order::Shuffled { seed };
            let permutation = order.epoch(len, 1);
            for world_size in WORLDS {
                let make = |rank| PassSampler { ranks: ExactSampler { len, world_size, rank, batch_size, order }, step, samples };
                let passes = ranks(world_size, make, 1);
                let sampler = make(0);
                prop_assert!(passes.iter().flatten().all(|plan| plan.indices.len() <= batch_size));
                let seen: Vec<usize> = passes.iter().flat_map(|pass| flat(pass)).collect();
                prop_assert!(seen.iter().copied().eq((0..samples).map(|position| permutation.index(position))), "in the epoch's order");
                // Whole passes make each step.
                let (mut pass, mut position) = (0, 0);
                while position < samples {
                    let left = (samples - position).min(step);
                    let of_step = &passes[pass..][..sampler.passes_of(left)];
                    prop_assert_eq!(of_step.iter().map(|plans| plans[0].global_samples).sum::<usize>(), left);
                    (pass, position) = (pass + of_step.len(), position + left);
                }
                prop_assert_eq!(pass, passes.len());
            }
        }

        #[test]
        fn a_step_of_one_pass_is_that_of_the_exact_sampler(len in 1usize..300, world in 0..WORLDS.len(), batch_size in 1usize..9) {
            let world_size = WORLDS[world];
            for rank in 0..world_size {
                let exact = ExactSampler { len, world_size, rank, batch_size, order: Order::Stored };
                let passes = PassSampler { ranks: exact, step: world_size * batch_size, samples: len };
                prop_assert_eq!(passes.steps_per_epoch(), exact.steps_per_epoch());
                for step in 0..exact.steps_per_epoch() {
                    prop_assert_eq!(passes.step(0, step), exact.step(0, step));
                }
            }
        }
    }

    #[test]
    fn more_ranks_than_samples_leaves_some_without() {
        let steps = exact(3, 7, 4, Order::Stored, 0);
        let sizes: Vec<usize> = steps[0].iter().map(|plan| plan.indices.len()).collect();
        assert_eq!((steps.len(), sizes), (1, vec![1, 1, 1, 0, 0, 0, 0]));
    }

    #[test]
    fn a_batch_size_beyond_all_numbers_takes_the_whole_dataset() {
        for batch_size in [1 << (usize::BITS - 2), usize::MAX] {
            let steps = exact(10, 4, batch_size, Order::Stored, 0);
            assert_eq!((steps.len(), flat(&steps[0])), (1, (0..10).collect()));
            let padded = DistributedSampler {
                len: 10,
                world_size: 4,
                rank: 3,
                batch_size,
                order: Order::Stored,
                drop_last: false,
            };
            assert_eq!((padded.steps_per_epoch(), padded.step(0, 0).indices), (1, vec![3, 7, 1]));
        }
    }

    #[test]
    fn file_order_is_the_order_of_the_file() {
        assert!(exact(100, 3, 8, Order::Stored, 9).iter().flat_map(|step| flat(step)).eq(0..100));
    }

    #[test]
    #[should_panic(expected = "rank 2 in a world of size 2")]
    fn a_rank_outside_of_the_world_is_a_bug() {
        ExactSampler { len: 3, world_size: 2, rank: 2, batch_size: 1, order: Order::Stored }
            .steps_per_epoch();
    }
}
