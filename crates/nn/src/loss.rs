//! Losses by name, for recipes; each is the mean over the batch.

use phalanx_tensor::Tensor;

/// How a model's output is held against its targets.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Loss {
    /// Negative log likelihood of log-probabilities; targets are labels.
    Nll,
    /// Cross entropy of logits; targets are labels.
    CrossEntropy {
        /// How much of the target is spread over all classes, in [0, 1).
        label_smoothing: f64,
    },
    /// Mean squared error; targets have the shape of the output.
    Mse,
    /// Binary cross entropy of logits; targets in [0, 1] have the shape of the output.
    BceWithLogits,
}

impl Loss {
    /// The loss of `output`, a scalar.
    #[track_caller]
    pub fn of(self, output: &Tensor, target: &Tensor) -> Tensor {
        match self {
            Loss::Nll => output.nll_loss(target),
            Loss::CrossEntropy { label_smoothing } => output.cross_entropy(target, label_smoothing),
            Loss::Mse => output.mse_loss(target),
            Loss::BceWithLogits => output.bce_with_logits(target),
        }
    }

    /// Whether targets are class labels, so that accuracy means something.
    pub fn has_labels(self) -> bool {
        matches!(self, Loss::Nll | Loss::CrossEntropy { .. })
    }
}
