//! Losses by name, for recipes; each is the mean over the batch.

use phalanx_tensor::Tensor;

/// How a model's output is held against its targets.
///
/// ```
/// use phalanx_nn::Loss;
/// use phalanx_tensor::{Device, Tensor};
///
/// let device = Device::cpu(1);
/// let logits = Tensor::from_slice(&device, &[0.0f32, 0.0, 0.0, 0.0], [2, 2]);
/// let labels = Tensor::from_slice(&device, &[0i64, 1], [2]);
/// let loss = Loss::CrossEntropy { label_smoothing: 0.0 }.of(&logits, &labels);
/// assert!((loss.item() - 2f64.ln()).abs() < 1e-6);
/// ```
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
