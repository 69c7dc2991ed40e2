//! Layers in a row.

use crate::module::{Ctx, Module, Visitor};
use crate::row::{Block, Row};
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
pub struct Sequential(Row);

impl Sequential {
    /// No layers yet.
    pub fn new() -> Sequential {
        Sequential::default()
    }

    /// These layers and one more.
    pub fn then(self, layer: impl Module + 'static) -> Sequential {
        let name = self.0.blocks().len().to_string();
        Sequential(self.0.then(Block::new(&name, layer)))
    }
}

impl Module for Sequential {
    fn forward(&self, x: &Tensor, ctx: &mut Ctx) -> Tensor {
        self.0.forward(x, ctx)
    }

    fn visit(&mut self, v: &mut Visitor<'_>) {
        self.0.visit(v);
    }

    fn row(&self) -> Option<&Row> {
        Some(&self.0)
    }

    fn row_mut(&mut self) -> Option<&mut Row> {
        Some(&mut self.0)
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
