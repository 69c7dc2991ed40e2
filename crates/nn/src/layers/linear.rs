//! Dense layers.

use crate::module::{Ctx, Module, Visitor};
use crate::param::{Init, Param};
use crate::seam::Seam;
use phalanx_tensor::Tensor;

/// `y = x w^T + b`, rows of `inputs` numbers to rows of `outputs`. Parameters `weight` (outputs, inputs) and `bias`
/// (outputs), both starting evenly in +-1 / sqrt(inputs).
///
/// ```
/// use phalanx_nn::{Ctx, Linear, Module, Parameters};
/// use phalanx_tensor::{DType, Device, Tensor};
///
/// let device = Device::cpu(1);
/// let mut layer = Linear::new(5, 3);
/// let parameters = Parameters::build(&mut layer, &device, 0);
/// assert_eq!(parameters.count(), 3 * 5 + 3);
/// let x = Tensor::ones(&device, [2, 5], DType::F32);
/// assert_eq!(layer.forward(&x, &mut Ctx::eval()).dims(), [2, 3]);
/// ```
pub struct Linear {
    weight: Param,
    bias: Option<Param>,
    seam: Seam,
}

impl Linear {
    /// A layer with a bias.
    pub fn new(inputs: usize, outputs: usize) -> Linear {
        let init = Init::fan_in(inputs);
        let (weight, bias) = (Param::new([outputs, inputs], init), Param::new([outputs], init));
        Linear { weight, bias: Some(bias), seam: Seam::default() }
    }

    /// The same layer with a bias that starts at 0.
    pub(crate) fn with_zero_bias(self) -> Linear {
        let outputs = self.weight.shape.dims()[0];
        Linear { bias: Some(Param::new([outputs], Init::Constant(0.0))), ..self }
    }

    /// The same layer with other first values of its weight.
    pub fn init(mut self, init: Init) -> Linear {
        self.weight.init = init;
        self
    }

    /// The same layer without its bias.
    pub fn without_bias(self) -> Linear {
        Linear { bias: None, ..self }
    }
}

impl Module for Linear {
    /// (..., inputs) to (..., outputs).
    fn forward(&self, x: &Tensor, _: &mut Ctx) -> Tensor {
        let (x, weight) = (self.seam.enter(x), &*self.weight);
        self.seam.leave_product(self.bias.as_deref(), |bias| x.linear(weight, bias))
    }

    fn visit(&mut self, v: &mut Visitor<'_>) {
        v.param("weight", &mut self.weight);
        if let Some(bias) = &mut self.bias {
            v.param("bias", bias);
        }
        v.seam("", &mut self.seam);
    }
}

/// The same with a weight that lies the other way around, `y = x w + b`, as GPT-2's files have it (there it is a `Conv1D`). Parameters
/// `weight` (inputs, outputs), starting normally distributed, and `bias` (outputs), starting at 0.
///
/// ```
/// use phalanx_nn::{Ctx, LinearInOut, Module, Parameters};
/// use phalanx_tensor::{DType, Device, Tensor};
///
/// let device = Device::cpu(1);
/// let mut layer = LinearInOut::new(5, 3, 0.02);
/// let parameters = Parameters::build(&mut layer, &device, 0);
/// assert_eq!(parameters.value(0).dims(), [5, 3]);
/// let x = Tensor::ones(&device, [2, 4, 5], DType::F32);
/// assert_eq!(layer.forward(&x, &mut Ctx::eval()).dims(), [2, 4, 3]);
/// ```
pub struct LinearInOut {
    weight: Param,
    bias: Param,
    seam: Seam,
}

impl LinearInOut {
    /// A layer whose weight starts with this standard deviation.
    pub fn new(inputs: usize, outputs: usize, std: f64) -> LinearInOut {
        LinearInOut {
            weight: Param::new([inputs, outputs], Init::Normal { std }),
            bias: Param::new([outputs], Init::Constant(0.0)),
            seam: Seam::default(),
        }
    }

    /// Where it meets the rest of its model.
    pub(crate) fn seam(&self) -> &Seam {
        &self.seam
    }

    /// This layer, GELU (by the hyperbolic tangent) and `down`, one after the other: as one operation where there is nothing between
    /// them.
    pub(crate) fn gelu_then(&self, down: &LinearInOut, x: &Tensor, ctx: &mut Ctx) -> Tensor {
        if self.seam.leave.is_some() || down.seam.enter.is_some() {
            return down.forward(&self.forward(x, ctx).gelu_tanh(), ctx);
        }
        let (x, up) = (self.seam.enter(x), (&*self.weight, &*self.bias));
        down.seam.leave_product(Some(&down.bias), |bias| x.feed_forward_in_out(up, (&down.weight, bias)))
    }
}

impl Module for LinearInOut {
    /// (..., inputs) to (..., outputs).
    fn forward(&self, x: &Tensor, _: &mut Ctx) -> Tensor {
        let (x, weight) = (self.seam.enter(x), &*self.weight);
        self.seam.leave_product(Some(&self.bias), |bias| x.linear_in_out(weight, bias))
    }

    fn visit(&mut self, v: &mut Visitor<'_>) {
        v.param("weight", &mut self.weight);
        v.param("bias", &mut self.bias);
        v.seam("", &mut self.seam);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Parameters;
    use phalanx_tensor::{Crossing, DType, Device, Philox};
    use std::sync::Arc;

    struct Times(f64);

    impl Crossing for Times {
        fn forth(&self, x: &Tensor) -> Tensor {
            x * self.0
        }

        fn back(&self, grad: &Tensor) -> Tensor {
            grad * self.0
        }
    }

    #[test]
    fn two_layers_with_gelu_between_them_go_through_all_of_their_seams() {
        let device = Device::cpu(1);
        let times = |factor: f64| -> Option<Arc<dyn Crossing>> { Some(Arc::new(Times(factor))) };
        let layer = |[inputs, outputs]: [usize; 2], seam: Seam| {
            let mut layer = LinearInOut { seam, ..LinearInOut::new(inputs, outputs, 0.5) };
            Parameters::build(&mut layer, &device, 1);
            layer.bias.fill(0.25);
            layer
        };
        let (none, enter) = (Seam::default(), Seam { enter: times(3.0), ..Seam::default() });
        let leave = Seam { leave: times(5.0), ..Seam::default() };
        let x = Tensor::uniform(&device, [3, 4], -1.0, 1.0, DType::F32, Philox::new(1, 0));
        let mut seen: Vec<Vec<f32>> = vec![];
        for [up, down] in [[&none, &none], [&enter, &leave], [&leave, &none], [&none, &enter]] {
            let (up, down) = (layer([4, 8], up.clone()), layer([8, 2], down.clone()));
            let ctx = &mut Ctx::eval();
            let want = down.forward(&up.forward(&x, ctx).gelu_tanh(), ctx).to_vec::<f32>();
            assert_eq!(up.gelu_then(&down, &x, ctx).to_vec::<f32>(), want);
            assert!(!seen.contains(&want), "each seam matters");
            seen.push(want);
        }
    }
}
