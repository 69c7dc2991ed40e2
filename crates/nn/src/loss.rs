//! Losses by name, for recipes; each is the mean over the batch.

use crate::module::Ctx;
use phalanx_tensor::{DType, Tensor};

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
    /// Negative log likelihood of log-probabilities; targets are labels, or shares of the classes (N, C).
    Nll,
    /// Cross entropy of logits; targets are labels, or shares of the classes (N, C) as mixup makes them.
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
    /// The loss of `output`, a scalar. Scores (N, T, C) of sequences with labels (N, T) are those of N T samples.
    #[track_caller]
    pub fn of(self, output: &Tensor, target: &Tensor) -> Tensor {
        if let (&[n, t, classes], 2, DType::I64) = (output.dims(), target.dims().len(), target.dtype()) {
            return self.of(&output.reshape([n * t, classes]), &target.reshape([target.count()]));
        }
        let labels = target.dtype() == DType::I64;
        match self {
            Loss::Nll if !labels => shared(output, target, 0.0),
            Loss::CrossEntropy { label_smoothing } if !labels => {
                shared(&output.log_softmax(1), target, label_smoothing)
            }
            Loss::Nll => output.nll_loss(target),
            Loss::CrossEntropy { label_smoothing } => output.cross_entropy(target, label_smoothing),
            Loss::Mse => output.mse_loss(target),
            Loss::BceWithLogits => output.bce_with_logits(target),
        }
    }

    /// As [`Loss::of`], of the output that a pass came to, which may have the scores of some classes alone
    /// ([`Ctx::with_classes_in_parts`]): then only the cross entropy with labels can be taken.
    #[track_caller]
    pub fn of_pass(self, output: &Tensor, target: &Tensor, ctx: &Ctx) -> Tensor {
        let Some(in_parts) = ctx.classes_in_parts() else { return self.of(output, target) };
        let Loss::CrossEntropy { label_smoothing } = self else {
            panic!("loss: {self:?} of the scores of some classes alone: the cross entropy can be taken");
        };
        let (labels, classes) = (target.count(), output.dims()[output.dims().len() - 1]);
        assert!(
            target.dtype() == DType::I64 && output.count() == labels * classes,
            "loss: scores of shape {} of some classes alone, with targets of shape {}: a label a row would do",
            output.shape(),
            target.shape()
        );
        in_parts(&output.reshape([labels, classes]), &target.reshape([labels]), label_smoothing)
    }

    /// Whether targets are class labels, so that accuracy means something.
    pub fn has_labels(self) -> bool {
        matches!(self, Loss::Nll | Loss::CrossEntropy { .. })
    }
}

/// The cross entropy of log-probabilities and shares of the classes, both (N, C).
#[track_caller]
fn shared(log: &Tensor, shares: &Tensor, label_smoothing: f64) -> Tensor {
    let &[n, classes] = log.dims() else { panic!("loss: scores of shape {}: (N, C) would do", log.shape()) };
    assert!(
        shares.dims() == log.dims(),
        "loss: scores of shape {} with shares of {}",
        log.shape(),
        shares.shape()
    );
    assert!(
        (0.0..1.0).contains(&label_smoothing),
        "loss: label smoothing must lie in [0, 1), got {label_smoothing}"
    );
    let shares = shares * (1.0 - label_smoothing) + label_smoothing / classes as f64;
    (log * shares).sum_all() * (-1.0 / n as f64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use phalanx_tensor::Device;

    const SMOOTHED: Loss = Loss::CrossEntropy { label_smoothing: 0.1 };
    const PLAIN: Loss = Loss::CrossEntropy { label_smoothing: 0.0 };

    /// The loss and its gradient for logits of two samples and three classes.
    fn of(loss: Loss, target: &Tensor) -> (f64, Vec<f32>) {
        let logits = Tensor::from_slice(target.device(), &[0.5f32, -1.0, 2.0, 0.0, 3.0, 1.0], [2, 3]);
        let logits = logits.requires_grad();
        let input = if loss == Loss::Nll { logits.log_softmax(1) } else { logits.clone() };
        let value = loss.of(&input, target);
        let grads = value.backward();
        (value.item(), grads.get(&logits).unwrap().to_vec::<f32>())
    }

    #[test]
    fn whole_shares_are_labels() {
        let device = Device::cpu(1);
        let labels = Tensor::from_slice(&device, &[2i64, 0], [2]);
        let shares = Tensor::from_slice(&device, &[0.0f32, 0.0, 1.0, 1.0, 0.0, 0.0], [2, 3]);
        for loss in [Loss::Nll, PLAIN, SMOOTHED] {
            let ((value, grads), (expected, expected_grads)) = (of(loss, &shares), of(loss, &labels));
            assert!((value - expected).abs() < 1e-6, "{loss:?}: {value}, not {expected}");
            assert!(
                grads.iter().zip(&expected_grads).all(|(a, b)| (a - b).abs() < 1e-6),
                "{loss:?}: {grads:?}"
            );
        }
    }

    /// `F.cross_entropy(logits, shares, label_smoothing=s)` in PyTorch, float64.
    #[test]
    fn shares_give_pytorchs_loss() {
        let shares = [0.7f32, 0.3, 0.0, 0.0, 0.25, 0.75];
        let shares = Tensor::from_slice(&Device::cpu(1), &shares, [2, 3]);
        for (loss, expected) in [(PLAIN, PLAIN_LOSS), (SMOOTHED, SMOOTHED_LOSS)] {
            let (value, _) = of(loss, &shares);
            assert!((value - expected).abs() < 1e-6, "{loss:?}: {value}, not {expected}");
        }
    }

    const PLAIN_LOSS: f64 = 1.930_578_667;
    const SMOOTHED_LOSS: f64 = 1.916_411_999;
}
