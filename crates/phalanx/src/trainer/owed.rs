//! The losses of a step that nobody has looked at.
//!
//! A process that trains alone on a GPU gives it each step before it waits for the loss of the one before, so the GPU always has
//! something to do. Until somebody has looked, the loss itself keeps a step from spoiling the weights, on the GPU
//! ([`phalanx_tensor::Guard`]).

use super::by_shard::ByShard;
use phalanx_parallel::PassLoss;
use phalanx_tensor::{Later, Tensor};

/// See the module.
#[derive(Default)]
pub(super) struct Owed {
    /// Of which pass, and its share in the samples of the step.
    losses: Vec<(usize, f64, Later)>,
    /// Where their sum lies.
    sum: Option<Tensor>,
}

impl Owed {
    /// The loss of a pass with this share in the samples: what is known of it goes to `known`.
    pub(super) fn add(&mut self, pass: usize, share: f64, loss: PassLoss, known: &mut ByShard<1>) {
        match loss {
            PassLoss::Known(loss) => known.add(pass, [loss * share]),
            PassLoss::Coming { on_gpu, later } => {
                self.losses.push((pass, share, later));
                // The pass after this one may be computed where the loss lies.
                self.sum = Some(self.sum.take().map_or(on_gpu.clone(), |sum| sum + on_gpu));
            }
        }
    }

    /// A number on the GPU that is finite if all losses are; none where none is owed.
    pub(super) fn sum(&self) -> Option<&Tensor> {
        self.sum.as_ref()
    }

    /// Waits for what is owed.
    pub(super) fn pay(&mut self, known: &mut ByShard<1>) {
        self.sum = None;
        for (pass, share, loss) in std::mem::take(&mut self.losses) {
            known.add(pass, [loss.item() * share]);
        }
    }
}
