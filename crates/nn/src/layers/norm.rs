//! Normalisation layers.

use crate::module::{Ctx, Module, Visitor};
use crate::param::{Init, Param};
use phalanx_tensor::Tensor;

/// Normalises each row to mean 0 and variance 1, then scales and shifts. Parameters `weight` (ones) and `bias` (zeros).
///
/// ```
/// use phalanx_nn::{Ctx, LayerNorm, Module, Parameters};
/// use phalanx_tensor::{Device, Tensor};
///
/// let device = Device::cpu(1);
/// let mut layer = LayerNorm::new(2);
/// let _parameters = Parameters::build(&mut layer, &device, 0);
/// let x = Tensor::from_slice(&device, &[3.0f32, 7.0], [1, 2]);
/// let y = layer.forward(&x, &mut Ctx::eval()).to_vec::<f32>();
/// assert!((y[0] + 1.0).abs() < 1e-5 && (y[1] - 1.0).abs() < 1e-5);
/// ```
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
