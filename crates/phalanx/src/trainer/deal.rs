//! How samples are dealt: which of a step's this rank takes, and in which passes. It is settled when the ranks are known, and the
//! samplers do it.

use phalanx_data::{ExactSampler, Loader, LoaderOptions, Order, PassSampler, ShardSampler, Supply};
use phalanx_parallel::{Place, Strategy};

/// Samples that are to be taken.
pub(super) struct Wanted {
    /// How many the dataset has.
    pub(super) len: usize,
    /// How many of an epoch's are taken.
    pub(super) samples: usize,
    /// Samples of a step of all ranks.
    pub(super) step: usize,
    /// The most that a rank takes in a pass, where there are no shards that say so.
    pub(super) batch_size: usize,
    /// The order within an epoch.
    pub(super) order: Order,
}

/// How they are dealt.
#[derive(Clone, Debug)]
pub(super) enum Deal {
    /// All ranks take a part of every pass.
    Passes(PassSampler),
    /// Each pass is a shard of the step.
    Shards(ShardSampler),
}

impl Deal {
    pub(super) fn of(wanted: Wanted, strategy: &dyn Strategy) -> Deal {
        let Wanted { len, samples, step, batch_size, order } = wanted;
        let Place { rank, world_size } = strategy.place();
        match strategy.shards() {
            None => {
                let ranks = ExactSampler { len, world_size, rank, batch_size, order };
                Deal::Passes(PassSampler { ranks, step, samples })
            }
            Some(shards) => {
                Deal::Shards(ShardSampler { len, shards: shards.of, held: shards.held, step, samples, order })
            }
        }
    }

    /// Samples of a step of all ranks, but for the last of an epoch.
    pub(super) fn step(&self) -> usize {
        match self {
            Deal::Passes(passes) => passes.step,
            Deal::Shards(shards) => shards.step,
        }
    }

    /// How many samples an epoch takes.
    pub(super) fn samples(&self) -> usize {
        match self {
            Deal::Passes(passes) => passes.samples,
            Deal::Shards(shards) => shards.samples,
        }
    }

    /// The order within an epoch.
    pub(super) fn order(&self) -> Order {
        match self {
            Deal::Passes(passes) => passes.ranks.order,
            Deal::Shards(shards) => shards.order,
        }
    }

    /// In how many passes of this rank so many samples, a step's or fewer, are taken.
    pub(super) fn passes_of(&self, samples: usize) -> usize {
        match self {
            Deal::Passes(passes) => passes.passes_of(samples),
            // Also those without samples.
            Deal::Shards(shards) => shards.held.len(),
        }
    }

    /// Samples that are dealt at a time, but for the last of a step.
    pub(super) fn pass(&self) -> usize {
        match self {
            Deal::Passes(passes) => passes.pass(),
            Deal::Shards(shards) => shards.step,
        }
    }

    /// Whether a step of so many samples is like most: as large, with samples for each rank in each pass.
    pub(super) fn is_usual(&self, samples: usize) -> bool {
        let in_the_last_pass = samples % self.pass();
        samples == self.step() && (in_the_last_pass == 0 || in_the_last_pass >= self.parts())
    }

    /// To how many these are dealt: ranks, or shards. A batch norm sees the samples of one.
    pub(super) fn parts(&self) -> usize {
        match self {
            Deal::Passes(passes) => passes.ranks.world_size,
            Deal::Shards(shards) => shards.shards,
        }
    }

    /// The same in words.
    pub(super) fn to(&self) -> String {
        let (parts, what) =
            (self.parts(), if matches!(self, Deal::Passes(_)) { "rank" } else { "logical shard" });
        format!("{parts} {what}{}", if parts == 1 { "" } else { "s" })
    }

    /// This rank's passes over the samples of `supply`.
    pub(super) fn loader(&self, supply: &Supply, options: LoaderOptions) -> Loader {
        let supply = supply.clone();
        match self {
            Deal::Passes(passes) => Loader::of(supply, *passes, options),
            Deal::Shards(shards) => Loader::of(supply, shards.clone(), options),
        }
    }
}
