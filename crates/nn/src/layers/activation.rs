//! Activations as layers, for rows of layers; in a `forward` the methods of a tensor are shorter.
//!
//! ```
//! use phalanx_nn::{Ctx, Module, Relu};
//! use phalanx_tensor::{Device, Tensor};
//!
//! let x = Tensor::from_slice(&Device::cpu(1), &[-1.0f32, 2.0], [2]);
//! assert_eq!(Relu.forward(&x, &mut Ctx::eval()).to_vec::<f32>(), x.relu().to_vec::<f32>());
//! ```

use crate::module::{Ctx, Module, Visitor};
use phalanx_tensor::Tensor;

/// One row a layer: its doc, its name, what it does to a tensor.
macro_rules! activations {
    ($($doc:literal $name:ident => |$x:ident| $f:expr;)*) => {$(
        #[doc = $doc]
        pub struct $name;

        impl Module for $name {
            fn forward(&self, $x: &Tensor, _: &mut Ctx) -> Tensor {
                $f
            }

            fn visit(&mut self, _: &mut Visitor<'_>) {}
        }
    )*};
}
activations! {
    "max(x, 0)." Relu => |x| x.relu();
    "x times the normal distribution function of x." Gelu => |x| x.gelu();
    "x / (1 + exp(-x)), also known as swish." Silu => |x| x.silu();
    "ln(1 + exp(x))." Softplus => |x| x.softplus();
    "Hyperbolic tangent." Tanh => |x| x.tanh();
    "1 / (1 + exp(-x))." Sigmoid => |x| x.sigmoid();
    "Logarithm of softmax along the last dimension." LogSoftmax => |x| x.log_softmax(x.shape().n_dims() - 1);
}

/// x where it is above 0, and elsewhere this multiple of it (0.01 unless PyTorch is told otherwise).
pub struct LeakyRelu(pub f64);

impl Module for LeakyRelu {
    fn forward(&self, x: &Tensor, _: &mut Ctx) -> Tensor {
        x.leaky_relu(self.0)
    }

    fn visit(&mut self, _: &mut Visitor<'_>) {}
}

/// x where it is above 0, and elsewhere this multiple of e^x - 1 (1 unless PyTorch is told otherwise).
pub struct Elu(pub f64);

impl Module for Elu {
    fn forward(&self, x: &Tensor, _: &mut Ctx) -> Tensor {
        x.elu(self.0)
    }

    fn visit(&mut self, _: &mut Visitor<'_>) {}
}
