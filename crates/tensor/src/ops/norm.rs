//! Layer and batch normalisation.

use crate::cpu;
use crate::op::Op;
use crate::ops::{keep, recorded};
use crate::shape::Shape;
use crate::tensor::Tensor;

/// Each channel's mean and variance, (C) each.
#[derive(Clone, Debug)]
pub struct ChannelStats {
    /// The mean.
    pub mean: Tensor,
    /// The mean squared distance from the mean: divided by the number of values, not by one less.
    pub variance: Tensor,
}

impl Tensor {
    /// Normalises each channel of (N, C, ...) to mean 0 and variance 1 over all else (with `eps` added to the variance), then
    /// multiplies by `weight` and adds `bias`, both (C). Gives what it found too.
    #[track_caller]
    pub fn batch_norm(
        &self,
        weight: Option<&Tensor>,
        bias: Option<&Tensor>,
        eps: f64,
    ) -> (Tensor, ChannelStats) {
        let [_, channels, _] = self.channel_dims("batch_norm");
        let stale = || Tensor::stale(self.device(), [channels].into(), self.dtype);
        let stats = ChannelStats { mean: stale(), variance: stale() };
        let x = self.contiguous();
        cpu::batch_norm::stats(&x, [&stats.mean, &stats.variance]);
        (x.batch_normalised(weight, bias, &stats, eps, true), stats)
    }

    /// As [`Tensor::batch_norm`], with means and variances from elsewhere, which are taken as constants.
    #[track_caller]
    pub fn batch_norm_with(
        &self,
        stats: &ChannelStats,
        weight: Option<&Tensor>,
        bias: Option<&Tensor>,
        eps: f64,
    ) -> Tensor {
        self.channel_dims("batch_norm");
        self.contiguous().batch_normalised(weight, bias, stats, eps, false)
    }

    /// `self` is contiguous.
    #[track_caller]
    fn batch_normalised(
        &self,
        weight: Option<&Tensor>,
        bias: Option<&Tensor>,
        stats: &ChannelStats,
        eps: f64,
        own: bool,
    ) -> Tensor {
        let channels = self.dims()[1];
        for part in [weight, bias, Some(&stats.mean), Some(&stats.variance)].into_iter().flatten() {
            self.check_partner("batch_norm", part);
            assert!(
                part.dims() == [channels],
                "batch_norm: a weight, bias, mean or variance of shape {} for {channels} channels",
                part.shape()
            );
        }
        assert!(weight.is_some() || bias.is_none(), "batch_norm: a bias without a weight");
        let (weight, bias) = (weight.map(Tensor::contiguous), bias.map(Tensor::contiguous));
        let out = Tensor::stale(self.device(), *self.shape(), self.dtype);
        let scale = Tensor::stale(self.device(), [channels].into(), self.dtype);
        let mean = stats.mean.contiguous();
        cpu::batch_norm::normalise(
            [self, &mean, &stats.variance.contiguous()],
            [weight.as_ref(), bias.as_ref()],
            eps,
            [&out, &scale],
        );
        let mut inputs = [self, self, self];
        let n_inputs = 1 + [&weight, &bias]
            .into_iter()
            .flatten()
            .zip(&mut inputs[1..])
            .map(|(from, to)| *to = from)
            .count();
        recorded(out, Op::BatchNorm { own }, &inputs[..n_inputs], |_| {
            [keep(self), weight.as_ref().and_then(keep), keep(&mean), keep(&scale)]
        })
    }

    /// (N, C, everything else).
    #[track_caller]
    fn channel_dims(&self, op: &str) -> [usize; 3] {
        let dims = self.dims();
        assert!(dims.len() >= 2, "{op}: a shape of (N, C, ...) is needed, not {}", self.shape());
        [dims[0], dims[1], dims[2..].iter().product()]
    }

    /// Normalises over the last `n_dims` dimensions to mean 0 and variance 1 (with `eps` added to the variance), then
    /// multiplies by `weight` and adds `bias`, both of those dimensions' shape.
    #[track_caller]
    pub fn layer_norm(
        &self,
        n_dims: usize,
        weight: Option<&Tensor>,
        bias: Option<&Tensor>,
        eps: f64,
    ) -> Tensor {
        let all = self.shape().n_dims();
        assert!(
            n_dims >= 1 && n_dims <= all,
            "layer_norm: over {n_dims} dimensions of shape {}",
            self.shape()
        );
        let row = Shape::new(&self.dims()[all - n_dims..]);
        for part in [weight, bias].into_iter().flatten() {
            self.check_partner("layer_norm", part);
            assert!(
                *part.shape() == row,
                "layer_norm: a weight or bias of shape {} for rows of shape {row}",
                part.shape()
            );
        }
        assert!(weight.is_some() || bias.is_none(), "layer_norm: a bias without a weight");
        let width = row.count();
        let (x, weight, bias) =
            (self.contiguous(), weight.map(Tensor::contiguous), bias.map(Tensor::contiguous));
        let out = Tensor::stale(self.device(), *self.shape(), self.dtype);
        let rows: Shape = [self.count() / width.max(1)].into();
        let (mean, scale) =
            (Tensor::stale(self.device(), rows, self.dtype), Tensor::stale(self.device(), rows, self.dtype));
        cpu::norm::layer_norm(&x, weight.as_ref(), bias.as_ref(), eps, width, [&out, &mean, &scale]);
        let mut inputs = [&x, &x, &x];
        let n_inputs = 1 + [&weight, &bias]
            .into_iter()
            .flatten()
            .zip(&mut inputs[1..])
            .map(|(from, to)| *to = from)
            .count();
        recorded(out, Op::LayerNorm { row: width }, &inputs[..n_inputs], |_| {
            [keep(&x), weight.as_ref().and_then(keep), keep(&mean), keep(&scale)]
        })
    }
}
