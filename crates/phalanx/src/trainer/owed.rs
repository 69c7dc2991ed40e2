//! The losses of a step that nobody has looked at, and the norm of its gradients.
//!
//! A process that trains alone on a GPU gives it each step before it waits for the loss of the one before, so the GPU always has
//! something to do. Until somebody has looked, the loss itself keeps a step from spoiling the weights, on the GPU, and so does a norm
//! ([`phalanx_tensor::Guard`]).

use super::by_shard::ByShard;
use phalanx_parallel::PassLoss;
use phalanx_tensor::{Later, Tensor};

/// See the module.
#[derive(Default)]
pub(super) struct Owed {
    /// Of which pass, and its share in the samples of the step.
    losses: Vec<(usize, f64, Later)>,
    /// A number on the GPU that is finite if all of them are, where that is asked for.
    watched: Option<Tensor>,
    is_watched: bool,
    norm: Option<Later>,
}

impl Owed {
    /// None yet. Who watches wants [`Owed::watched`].
    pub(super) fn new(is_watched: bool) -> Owed {
        Owed { is_watched, ..Owed::default() }
    }

    /// The loss of a pass, one of so many of its step, with this share in the samples: what is known of it goes to `known`.
    pub(super) fn add(
        &mut self,
        (pass, passes): (usize, usize),
        share: f64,
        loss: PassLoss,
        known: &mut ByShard,
    ) {
        match loss {
            PassLoss::Known(loss) => {
                // Losses are added up in the order of their passes. The GPU has come past those before already.
                self.pay(known);
                known.add(pass, &[loss * share]);
            }
            PassLoss::Coming { on_gpu, later } => {
                self.losses.push((pass, share, later));
                if !self.is_watched {
                    return;
                }
                self.watched = Some(match (passes, self.watched.take()) {
                    (1, _) => on_gpu,
                    // The pass after this one may be computed where the loss lies. What is finite becomes 0.
                    (_, None) => on_gpu * 0.0,
                    (_, Some(before)) => on_gpu * 0.0 + before,
                });
            }
        }
    }

    /// The norm of all gradients of the step.
    pub(super) fn add_norm(&mut self, norm: Later) {
        self.norm = Some(norm);
    }

    /// A number on the GPU that is finite if all losses that are owed are; none where none is, or nobody watches.
    pub(super) fn watched(&self) -> Option<&Tensor> {
        self.watched.as_ref()
    }

    /// Whether any loss is owed.
    pub(super) fn is_any(&self) -> bool {
        !self.losses.is_empty()
    }

    /// Waits for the norm, if one is owed.
    pub(super) fn pay_norm(&mut self) -> Option<f64> {
        self.norm.take().map(Later::item)
    }

    /// Waits for the losses that are owed.
    pub(super) fn pay(&mut self, known: &mut ByShard) {
        self.watched = None;
        for (pass, share, loss) in std::mem::take(&mut self.losses) {
            known.add(pass, &[loss.item() * share]);
        }
    }
}
