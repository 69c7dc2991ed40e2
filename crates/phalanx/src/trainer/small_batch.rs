//! Batches that are too small for a batch norm: a channel with a single value has no variance. Which batches a run has is
//! known before its first step, and which model minds is found by showing it a sample.

use super::Trainer;
use super::run::Run;
use crate::error::Error;
use phalanx_data::Input;
use phalanx_nn::Ctx;
use phalanx_tensor::{DType, Tensor, no_grad};

/// Refuses a run in which a batch norm will see one value a channel.
pub(super) fn check(run: &Run<'_>) -> Result<(), Error> {
    let Trainer { batch_size, .. } = *run.trainer;
    let samples = run.samples_per_epoch();
    let parts = run.deal.parts() * run.trainer.parts();
    let (step, pass) = (run.deal.step(), run.deal.pass());
    let sharing = run.strategy.shared_batch().map_or(Sharing::Apart, |_| Sharing::Together);
    let reaches_last = run.steps() >= run.steps_per_epoch();
    let sizes = Sizes { samples, step, pass, parts, sharing };
    let trains = run.steps() > 0;
    if !trains || sizes.fewest(reaches_last) > 1 || fewest_values(run) != Some(1) {
        return Ok(());
    }
    let (in_all, own_parts) = (sizes.fewest(false) <= 1, run.trainer.parts());
    let larger = format!("take a --batch-size of at least {}", 2 * own_parts);
    let mut ways = match in_all {
        true => vec![larger.as_str()],
        false => vec!["take another --batch-size", "leave such a batch out with --set train.drop_last=true"],
    };
    let batch = if in_all { "each batch" } else { "the last batch of an epoch" };
    let which = match own_parts {
        1 => batch.to_owned(),
        parts => format!("one of the {parts} parts that {batch} falls into"),
    };
    let can_share = run.strategy.shards().is_none();
    if can_share && (Sizes { sharing: Sharing::Together, ..sizes }).fewest(reaches_last) > 1 {
        ways.push("let batch norm go by the batch of all ranks with --set parallel.sync_batch_norm=true");
    }
    let (dealt_to, hint) = (run.deal.to(), ways.join(", or "));
    Err(Error::SingleValue { samples, batch_size, dealt_to, which, hint })
}

/// The fewest values that a batch norm of the model has of a channel of one sample, if the model has a batch norm.
fn fewest_values(run: &Run<'_>) -> Option<usize> {
    let dims = [&[1], run.train.dataset().input_dims()].concat();
    let dtype = match run.train.dataset().input() {
        Input::Values => DType::F32,
        Input::Ids(_) => DType::I64,
    };
    let sample = Tensor::zeros(run.worker.device(), dims.as_slice(), dtype);
    // As in an evaluation, which leaves the running statistics alone. The values don't matter: there may be none yet.
    let mut ctx = Ctx::eval();
    no_grad(|| run.model.forward(&sample, &mut ctx));
    ctx.fewest_normalised()
}

/// What decides how large the parts of an epoch's batches are.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    samples: usize,
    /// Samples of a step of all ranks.
    step: usize,
    /// Samples of a pass of all ranks, or shards, but for the last of a step.
    pass: usize,
    /// How many of these there are.
    parts: usize,
    sharing: Sharing,
}

/// Whose samples a batch norm goes by.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Sharing {
    /// Each rank's own, or each shard's.
    Apart,
    /// Those of all ranks.
    Together,
}

impl Sizes {
    /// The fewest samples that a batch norm goes by in any batch of an epoch: in the last one only if that is reached.
    fn fewest(self, reaches_last: bool) -> usize {
        let Sizes { samples, step, pass, parts, sharing } = self;
        let part = |of_all: usize| match sharing {
            Sharing::Together => of_all,
            // The first parts have one more, and where there are fewer samples than parts, the others have none.
            Sharing::Apart => (of_all / parts).max(1),
        };
        let full = (samples >= step).then_some(step);
        let last = Some(samples % step).filter(|_| reaches_last);
        let steps = full.into_iter().chain(last);
        let passes = steps.flat_map(|step| [if step < pass { 0 } else { pass }, step % pass]);
        passes.filter(|&pass| pass > 0).map(part).min().unwrap_or(usize::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use phalanx_data::{ExactSampler, Order, PassSampler, Sampler};

    /// The same by looking at every batch.
    fn counted(sizes: Sizes) -> usize {
        let Sizes { samples: len, step, pass: batch_size, parts: world_size, sharing } = sizes;
        let parts = (0..world_size).flat_map(|rank| {
            let batch_size = batch_size.div_ceil(world_size);
            let ranks = ExactSampler { len, world_size, rank, batch_size, order: Order::Stored };
            let sampler = PassSampler { ranks, step, samples: len };
            (0..sampler.steps_per_epoch()).map(move |step| sampler.step(0, step))
        });
        let size = |plan: phalanx_data::StepPlan| match sharing {
            Sharing::Together => plan.global_samples,
            Sharing::Apart => plan.indices.len(),
        };
        parts.map(size).filter(|&size| size > 0).min().unwrap()
    }

    #[test]
    fn the_smallest_batch_is_the_one_that_the_sampler_makes() {
        for samples in 1..40 {
            for batch_size in [1, 2, 5, 64, usize::MAX] {
                for world_size in [1, 2, 3, 7, 50] {
                    for sharing in [Sharing::Apart, Sharing::Together] {
                        for passes in [1, 2, 3] {
                            let pass = usize::saturating_mul(batch_size, world_size);
                            let step = pass.saturating_mul(passes);
                            let sizes = Sizes { samples, step, pass, parts: world_size, sharing };
                            assert_eq!(sizes.fewest(true), counted(sizes), "{sizes:?}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn a_last_batch_that_is_not_reached_does_not_count() {
        let sizes = Sizes { samples: 65, step: 64, pass: 64, parts: 2, sharing: Sharing::Apart };
        assert_eq!((sizes.fewest(true), sizes.fewest(false)), (1, 32));
        assert_eq!(Sizes { step: 2, pass: 2, ..sizes }.fewest(false), 1);
    }
}
