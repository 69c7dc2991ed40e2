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
use crate::param::{Init, Param};
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

/// x where it is above 0, and elsewhere a multiple of it that is learned: one for all, or one a channel of (N, C, ...). Parameter `weight`
/// (channels), starting at 0.25.
///
/// ```
/// use phalanx_nn::{Ctx, Module, PRelu, Parameters};
/// use phalanx_tensor::{Device, Tensor};
///
/// let device = Device::cpu(1);
/// let mut layer = PRelu::new(2);
/// let _parameters = Parameters::build(&mut layer, &device, 0);
/// let x = Tensor::from_slice(&device, &[-1.0f32, 2.0], [1, 2]);
/// assert_eq!(layer.forward(&x, &mut Ctx::eval()).to_vec::<f32>(), [-0.25, 2.0]);
/// ```
pub struct PRelu {
    weight: Param,
}

impl PRelu {
    /// With so many multiples: 1, or one a channel.
    pub fn new(channels: usize) -> PRelu {
        PRelu { weight: Param::new([channels], Init::Constant(0.25)) }
    }
}

impl Module for PRelu {
    /// To the same shape.
    fn forward(&self, x: &Tensor, _: &mut Ctx) -> Tensor {
        // As many dimensions of 1 behind the channels as there are.
        let mut by = vec![1; x.dims().len().saturating_sub(1).max(1)];
        by[0] = self.weight.count();
        x.gt(0.0).where_cond(x, &(x * self.weight.reshape(by.as_slice())))
    }

    fn visit(&mut self, v: &mut Visitor<'_>) {
        v.param("weight", &mut self.weight);
    }
}
