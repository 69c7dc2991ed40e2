//! Layer normalisation.

use crate::cpu;
use crate::op::Op;
use crate::ops::{keep, recorded};
use crate::shape::Shape;
use crate::tensor::Tensor;

impl Tensor {
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
