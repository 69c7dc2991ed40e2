//! Layers in a row.

use crate::module::{Ctx, Module, Visitor};
use phalanx_tensor::Tensor;

/// Layers one after the other, named "0", "1" and so on, as PyTorch names them.
///
/// ```
/// use phalanx_nn::{Ctx, Flatten, Linear, Module, Parameters, Relu, Sequential};
/// use phalanx_tensor::{DType, Device, Tensor};
///
/// let mut net = Sequential::new().then(Flatten).then(Linear::new(6, 4)).then(Relu).then(Linear::new(4, 1));
/// let device = Device::cpu(1);
/// let parameters = Parameters::build(&mut net, &device, 0);
/// assert_eq!(parameters.names(), ["1.weight", "1.bias", "3.weight", "3.bias"]);
/// let x = Tensor::ones(&device, [2, 1, 2, 3], DType::F32);
/// assert_eq!(net.forward(&x, &mut Ctx::eval()).dims(), [2, 1]);
/// ```
#[derive(Default)]
pub struct Sequential(Vec<Box<dyn Module>>);

impl Sequential {
    /// No layers yet.
    pub fn new() -> Sequential {
        Sequential::default()
    }

    /// These layers and one more.
    pub fn then(mut self, layer: impl Module + 'static) -> Sequential {
        self.0.push(Box::new(layer));
        self
    }
}

impl Module for Sequential {
    fn forward(&self, x: &Tensor, ctx: &mut Ctx) -> Tensor {
        self.0.forward(x, ctx)
    }

    fn visit(&mut self, v: &mut Visitor<'_>) {
        self.0.visit(v);
    }

    /// Each layer is a block.
    fn blocks(&self) -> usize {
        self.0.len()
    }

    fn forward_block(&self, block: usize, x: &Tensor, ctx: &mut Ctx) -> Tensor {
        self.0[block].forward(x, ctx)
    }

    fn block_of(&self, name: &str) -> usize {
        let number = name.split('.').next().and_then(|number| number.parse().ok());
        number.unwrap_or_else(|| panic!("block_of: a row of layers has no parameter {name}"))
    }
}

/// (N, ...) to (N, everything else).
pub struct Flatten;

impl Module for Flatten {
    fn forward(&self, x: &Tensor, _: &mut Ctx) -> Tensor {
        x.flatten_from(1)
    }

    fn visit(&mut self, _: &mut Visitor<'_>) {}
}
