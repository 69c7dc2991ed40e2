//! Losses: each is the mean over its batch, as a scalar.

use crate::device::Backend;
use crate::dtype::DType;
use crate::kernel;
use crate::op::Op;
use crate::ops::{keep, recorded};
use crate::tensor::Tensor;
use std::ops::Range;

impl Tensor {
    /// Labels, i64 of (N), as targets of some of `all` classes, (N, `classes.len()`): 1 on each row's label, if that is one of them, and 0
    /// elsewhere. A label that isn't one of all panics on a CPU; a GPU makes its row NaN.
    #[track_caller]
    pub fn one_hot(&self, classes: Range<usize>, all: usize, dtype: DType) -> Tensor {
        assert!(self.dtype() == DType::I64, "one_hot: labels must be i64, got {}", self.dtype());
        let &[n] = self.dims() else { panic!("one_hot: labels of shape {}: (N) would do", self.shape()) };
        assert!(classes.start <= classes.end && classes.end <= all, "one_hot: {classes:?} of {all} classes");
        let out = Tensor::stale(self.device(), [n, classes.len()].into(), dtype);
        kernel::loss::one_hot(&self.contiguous(), classes.start, all, &out);
        out
    }

    /// Negative log likelihood: minus the mean of the log-probability that each row of (N, C) gives its label, i64 of (N).
    #[track_caller]
    pub fn nll_loss(&self, labels: &Tensor) -> Tensor {
        if self.is_raised() {
            return self.widened().nll_loss(labels);
        }
        self.check_labels("nll_loss", labels);
        let (y, labels) = (self.contiguous(), labels.contiguous());
        let out = Tensor::stale(self.device(), [].into(), self.dtype);
        kernel::loss::nll(&y, &labels, &out);
        recorded(out, Op::NllLoss { from: *self.shape() }, &[&y], |_| [keep(&labels)])
    }

    /// How many classes come before each label, i64 of (N), where the scores (N, C) are sorted with the largest first, and of equals the one
    /// that is listed first: f32 of (N), and -1 where the label's score is no number. So accuracy is the share of places 0.
    ///
    /// ```
    /// use phalanx_tensor::{Device, Tensor};
    /// let device = Device::cpu(1);
    /// let scores = Tensor::from_slice(&device, &[0.1f32, 0.7, -3.0, 2.0, 2.0, 5.0], [2, 3]);
    /// let labels = Tensor::from_slice(&device, &[1i64, 1], [2]);
    /// assert_eq!(scores.label_places(&labels).to_vec::<f32>(), [0.0, 2.0]);
    /// ```
    #[track_caller]
    pub fn label_places(&self, labels: &Tensor) -> Tensor {
        self.check_labels("label_places", labels);
        let (x, labels) = (self.detach().contiguous(), labels.contiguous());
        let out = Tensor::stale(self.device(), [x.dims()[0]].into(), DType::F32);
        kernel::loss::label_places(&x, &labels, &out);
        out
    }

    /// Cross entropy of logits (N, C) with labels, i64 of (N): `log_softmax` and `nll_loss` in one. With `label_smoothing` s
    /// in [0, 1) the target is 1 - s on the label and s / C on every class.
    #[track_caller]
    pub fn cross_entropy(&self, labels: &Tensor, label_smoothing: f64) -> Tensor {
        // A GPU computes in f32 whatever it reads, and needs no copies for that.
        let on_gpu = matches!(self.device().backend(), Backend::Gpu(_));
        if self.is_raised() && !on_gpu {
            return self.widened().cross_entropy(labels, label_smoothing);
        }
        self.check_labels("cross_entropy", labels);
        assert!(
            (0.0..1.0).contains(&label_smoothing),
            "cross_entropy: label smoothing must lie in [0, 1), got {label_smoothing}"
        );
        let (x, labels) = (self.contiguous(), labels.contiguous());
        let dtype = if self.is_raised() { DType::F32 } else { self.dtype };
        let out = Tensor::stale(self.device(), [].into(), dtype);
        // The log-softmax, or what leads to it from the logits.
        let kept = match on_gpu {
            true => Tensor::stale(self.device(), [x.dims()[0], 2].into(), self.dtype.wide()),
            false => Tensor::stale(self.device(), *self.shape(), self.dtype),
        };
        kernel::loss::cross_entropy(&x, &labels, label_smoothing, &kept, &out);
        recorded(out, Op::CrossEntropy { label_smoothing }, &[&x], |_| match on_gpu {
            true => [keep(&x), keep(&labels), keep(&kept)],
            false => [keep(&kept), keep(&labels), None],
        })
    }

    /// The mean over all elements of the squared difference; same shapes.
    #[track_caller]
    pub fn mse_loss(&self, target: &Tensor) -> Tensor {
        if self.is_raised() || target.is_raised() {
            return self.widened().mse_loss(&target.widened());
        }
        self.check_like("mse_loss", target);
        let (x, t) = (self.contiguous(), target.contiguous());
        let out = Tensor::stale(self.device(), [].into(), self.dtype);
        kernel::loss::mse(&x, &t, &out);
        recorded(out, Op::MseLoss, &[&x, &t], |_| [keep(&x), keep(&t)])
    }

    /// The mean over all elements of the binary cross entropy of logits with targets in [0, 1]; same shapes. The targets
    /// get no gradient.
    #[track_caller]
    pub fn bce_with_logits(&self, target: &Tensor) -> Tensor {
        if self.is_raised() || target.is_raised() {
            return self.widened().bce_with_logits(&target.widened());
        }
        self.check_like("bce_with_logits", target);
        let (x, t) = (self.contiguous(), target.contiguous());
        let out = Tensor::stale(self.device(), [].into(), self.dtype);
        kernel::loss::bce(&x, &t, &out);
        recorded(out, Op::BceWithLogits, &[&x], |_| [keep(&x), keep(&t)])
    }

    /// Panics unless the labels, i64 of (N), fit these scores (N, C), and on a CPU unless each is one of the C classes.
    #[track_caller]
    pub fn check_labels(&self, op: &str, labels: &Tensor) {
        let (x, l) = (self.shape(), labels.shape());
        assert!(labels.dtype() == DType::I64, "{op}: labels must be i64, got {}", labels.dtype());
        let fits = x.n_dims() == 2 && l.n_dims() == 1 && x.dims()[0] == l.dims()[0];
        assert!(fits, "{op}: scores of shape {x} with labels of shape {l}: (N, C) with (N) would do");
        // A GPU's kernels look at each label themselves, so that nobody waits for them here.
        if matches!(self.device().backend(), Backend::Gpu(_)) {
            return;
        }
        let classes = x.dims()[1] as i64;
        let labels = labels.contiguous();
        let wrong =
            labels.read_contiguous::<i64>(op).iter().copied().find(|label| !(0..classes).contains(label));
        if let Some(label) = wrong {
            let why = if label < 0 { ", unless the loss is told to leave one out" } else { "" };
            panic!("{op}: label {label} with scores of shape {x}: labels must lie in 0..{classes}{why}");
        }
    }
}
