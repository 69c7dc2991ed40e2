//! Steps cut into a fixed number of shards, whatever the number of ranks: which samples each pass of a rank takes. Which shards
//! a rank holds isn't decided here.

use crate::order::Order;
use crate::sampler::{ExactSampler, Sampler, StepPlan};
use std::ops::Range;

/// Every sample exactly once an epoch, in steps of a fixed number of samples. A step falls into shards as it would into ranks
/// under [`ExactSampler`]: consecutive parts whose sizes differ by at most one, and which may be empty. Each pass is a shard,
/// and a rank's passes are the shards that it holds, step by step; so ranks may differ in their number of passes.
///
/// ```
/// use phalanx_data::{Order, Sampler, ShardSampler};
/// let of = |held| ShardSampler { len: 10, shards: 3, held, step: 6, samples: 10, order: Order::Stored };
/// let passes = |sampler: ShardSampler| (0..4).map(|pass| sampler.step(0, pass).indices).collect::<Vec<_>>();
/// assert_eq!(passes(of(0..2)), [vec![0, 1], vec![2, 3], vec![6, 7], vec![8]]);
/// assert_eq!(of(2..3).step(0, 1).indices, [9]);
/// ```
#[derive(Clone, Debug)]
pub struct ShardSampler {
    /// How many samples the dataset has.
    pub len: usize,
    /// Into how many shards a step falls; at least 1.
    pub shards: usize,
    /// This rank's; at least one.
    pub held: Range<usize>,
    /// Samples of a step; at least 1.
    pub step: usize,
    /// How many samples of the epoch's order are taken: all, or fewer where its end is left out.
    pub samples: usize,
    /// The order within an epoch.
    pub order: Order,
}

impl Sampler for ShardSampler {
    /// How many passes this rank makes.
    fn steps_per_epoch(&self) -> usize {
        self.samples.div_ceil(self.step) * self.held.len()
    }

    fn plan(&self, epoch: u64, pass: usize, into: &mut StepPlan) {
        let passes = self.steps_per_epoch();
        assert!(pass < passes, "ShardSampler: pass {pass} of {passes}");
        let (len, order, n) = (self.len, self.order, self.held.len());
        let start = pass / n * self.step;
        let end = self.samples.min(start.saturating_add(self.step));
        let (rank, batch_size) = (self.held.start + pass % n, self.step.div_ceil(self.shards));
        ExactSampler { len, world_size: self.shards, rank, batch_size, order }.plan_within(
            epoch,
            start..end,
            into,
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn shards_are_the_same_whoever_holds_them(samples in 1usize..200, left_out in 0usize..3, step in 1usize..40, shards in 1usize..9, cut in 0usize..9, seed in any::<u64>()) {
            let (len, cut, order) = (samples + left_out, cut.min(shards), Order::Shuffled { seed });
            let of = |held| ShardSampler { len, shards, held, step, samples, order };
            let plans = |held: Range<usize>| {
                let sampler = of(held.clone());
                let plan = move |pass| sampler.step(2, pass);
                move |at: usize, shard: usize| plan(at * held.len() + shard - held.start)
            };
            let (whole, first, second) = (plans(0..shards), plans(0..cut), plans(cut..shards));
            let mut seen = Vec::new();
            for at in 0..samples.div_ceil(step) {
                let mut sizes = Vec::new();
                for shard in 0..shards {
                    let plan = whole(at, shard);
                    prop_assert_eq!(&plan, &if shard < cut { first(at, shard) } else { second(at, shard) });
                    prop_assert_eq!(plan.global_samples, step.min(samples - at * step));
                    sizes.push(plan.indices.len());
                    seen.extend(plan.indices);
                }
                prop_assert!(sizes.is_sorted_by(|a, b| a >= b) && sizes[0] - sizes[shards - 1] <= 1);
            }
            let order = order.epoch(len, 2);
            prop_assert!(seen.into_iter().eq((0..samples).map(|position| order.index(position))), "in the epoch's order");
        }
    }
}
