//! Losses: each is the mean over its batch, as a scalar.

use crate::cpu;
use crate::cpu::softmax::Form;
use crate::dtype::{DType, with_float};
use crate::op::Op;
use crate::ops::{keep, recorded};
use crate::tensor::Tensor;

impl Tensor {
    /// Negative log likelihood: minus the mean of the log-probability that each row of (N, C) gives its label, i64 of (N).
    #[track_caller]
    pub fn nll_loss(&self, labels: &Tensor) -> Tensor {
        self.check_labels("nll_loss", labels);
        let (y, labels) = (self.contiguous(), labels.contiguous());
        let out = Tensor::stale(self.device(), [].into(), self.dtype);
        cpu::softmax::nll(&y, &labels, 0.0, self.dims()[1], &out);
        recorded(out, Op::NllLoss { from: *self.shape() }, &[&y], |_| [keep(&labels)])
    }

    /// Cross entropy of logits (N, C) with labels, i64 of (N): `log_softmax` and `nll_loss` in one. With `label_smoothing` s
    /// in [0, 1) the target is 1 - s on the label and s / C on every class.
    #[track_caller]
    pub fn cross_entropy(&self, labels: &Tensor, label_smoothing: f64) -> Tensor {
        self.check_labels("cross_entropy", labels);
        assert!(
            (0.0..1.0).contains(&label_smoothing),
            "cross_entropy: label smoothing must lie in [0, 1), got {label_smoothing}"
        );
        let (x, labels) = (self.contiguous(), labels.contiguous());
        let width = self.dims()[1];
        let y = Tensor::stale(self.device(), *self.shape(), self.dtype);
        cpu::softmax::softmax(Form::LogSoftmax, &x, width, &y);
        let out = Tensor::stale(self.device(), [].into(), self.dtype);
        cpu::softmax::nll(&y, &labels, label_smoothing, width, &out);
        recorded(out, Op::CrossEntropy { label_smoothing }, &[&x], |_| [keep(&y), keep(&labels)])
    }

    /// The mean over all elements of the squared difference; same shapes.
    #[track_caller]
    pub fn mse_loss(&self, target: &Tensor) -> Tensor {
        self.check_like("mse_loss", target);
        let (x, t) = (self.contiguous(), target.contiguous());
        let out = Tensor::stale(self.device(), [].into(), self.dtype);
        with_float!(self.dtype, "mse_loss", T => {
            let (vx, vt) = (x.read_contiguous::<T>("mse_loss"), t.read_contiguous::<T>("mse_loss"));
            let total: f64 = vx.iter().zip(vt.iter()).map(|(&x, &t)| { let d = (x - t).to_f64(); d * d }).sum();
            out.write::<T>()[0] = (total / vx.len() as f64) as T;
        });
        recorded(out, Op::MseLoss, &[&x, &t], |_| [keep(&x), keep(&t)])
    }

    /// The mean over all elements of the binary cross entropy of logits with targets in [0, 1]; same shapes. The targets
    /// get no gradient.
    #[track_caller]
    pub fn bce_with_logits(&self, target: &Tensor) -> Tensor {
        self.check_like("bce_with_logits", target);
        let (x, t) = (self.contiguous(), target.contiguous());
        let out = Tensor::stale(self.device(), [].into(), self.dtype);
        cpu::softmax::bce(&x, &t, &out);
        recorded(out, Op::BceWithLogits, &[&x], |_| [keep(&x), keep(&t)])
    }

    #[track_caller]
    fn check_labels(&self, op: &str, labels: &Tensor) {
        let (x, l) = (self.shape(), labels.shape());
        assert!(labels.dtype() == DType::I64, "{op}: labels must be i64, got {}", labels.dtype());
        let fits = x.n_dims() == 2 && l.n_dims() == 1 && x.dims()[0] == l.dims()[0];
        assert!(fits, "{op}: scores of shape {x} with labels of shape {l}: (N, C) with (N) would do");
        let classes = x.dims()[1] as i64;
        let labels = labels.contiguous();
        let wrong =
            labels.read_contiguous::<i64>(op).iter().copied().find(|label| !(0..classes).contains(label));
        if let Some(label) = wrong {
            panic!("{op}: label {label} with scores of shape {x}: labels must lie in 0..{classes}");
        }
    }
}
