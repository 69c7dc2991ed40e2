//! Normalisation layers.

use crate::module::{Ctx, Module, Visitor};
use crate::param::{Init, Param};
use phalanx_tensor::Tensor;

/// Normalises each row to mean 0 and variance 1, then scales and shifts. Parameters `weight` (ones) and `bias` (zeros).
pub struct LayerNorm {
    weight: Param,
    bias: Param,
    eps: f64,
}

impl LayerNorm {
    /// Over the last dimension, of `width` numbers, with PyTorch's eps of 1e-5.
    pub fn new(width: usize) -> LayerNorm {
        let part = |value| Param::new([width], Init::Constant(value));
        LayerNorm { weight: part(1.0), bias: part(0.0), eps: 1e-5 }
    }
}

impl Module for LayerNorm {
    /// (..., width) to the same.
    fn forward(&self, x: &Tensor, _: &mut Ctx) -> Tensor {
        x.layer_norm(1, Some(&self.weight), Some(&self.bias), self.eps)
    }

    fn visit(&mut self, v: &mut Visitor<'_>) {
        v.param("weight", &mut self.weight);
        v.param("bias", &mut self.bias);
    }
}
