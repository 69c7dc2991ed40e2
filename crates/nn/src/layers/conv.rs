//! Two-dimensional convolution.

use crate::module::{Ctx, Module, Visitor};
use crate::param::{Init, Param};
use crate::seam::Seam;
use phalanx_tensor::{Conv2dOptions, Tensor};

/// Convolution of (N, C, H, W) images with square kernels. Parameters `weight` (outputs, inputs / groups, k, k) and `bias`
/// (outputs), both starting evenly in +-1 / sqrt(inputs / groups * k * k).
///
/// ```
/// use phalanx_nn::{Ctx, Conv2d, Module, Parameters};
/// use phalanx_tensor::{DType, Device, Tensor};
///
/// let device = Device::cpu(1);
/// let mut layer = Conv2d::new(3, 8, 3).stride(2).padding(1);
/// let _parameters = Parameters::build(&mut layer, &device, 0);
/// let x = Tensor::ones(&device, [2, 3, 32, 32], DType::F32);
/// assert_eq!(layer.forward(&x, &mut Ctx::eval()).dims(), [2, 8, 16, 16]);
/// ```
pub struct Conv2d {
    weight: Param,
    bias: Option<Param>,
    /// First values of the weight that were asked for; else its fan-in gives them, as always the bias's.
    init: Option<Init>,
    options: Conv2dOptions,
    channels: [usize; 2],
    kernel: usize,
    seam: Seam,
}

impl Conv2d {
    /// A layer with a bias, stride 1 and no padding.
    pub fn new(inputs: usize, outputs: usize, kernel: usize) -> Conv2d {
        let init = Init::fan_in(inputs * kernel * kernel);
        Conv2d {
            weight: weight([outputs, inputs, kernel, kernel], init, 1),
            bias: Some(Param::new([outputs], init)),
            init: None,
            options: Conv2dOptions::default(),
            channels: [inputs, outputs],
            kernel,
            seam: Seam::default(),
        }
    }

    /// The same layer without its bias.
    pub fn without_bias(self) -> Conv2d {
        Conv2d { bias: None, ..self }
    }

    /// The same layer with other first values of its weight.
    pub fn init(mut self, init: Init) -> Conv2d {
        self.init = Some(init);
        self.weight.init = init;
        self
    }

    /// The same layer, moving `stride` pixels from one output to the next.
    pub fn stride(mut self, stride: usize) -> Conv2d {
        self.options.stride = [stride, stride];
        self
    }

    /// The same layer with `padding` zeros on every side of the image.
    pub fn padding(mut self, padding: usize) -> Conv2d {
        self.options.padding = [padding, padding];
        self
    }

    /// The same layer with `dilation` pixels from one tap of the kernel to the next.
    pub fn dilation(mut self, dilation: usize) -> Conv2d {
        self.options.dilation = [dilation, dilation];
        self
    }

    /// The same layer with its channels in `groups` that don't see each other. Panics if the channels don't divide.
    #[track_caller]
    pub fn groups(mut self, groups: usize) -> Conv2d {
        let [inputs, outputs] = self.channels;
        let divides = groups > 0 && inputs.is_multiple_of(groups) && outputs.is_multiple_of(groups);
        assert!(divides, "Conv2d: {inputs} and {outputs} channels don't fall into {groups} groups");
        let (k, init) = (self.kernel, Init::fan_in(inputs / groups * self.kernel * self.kernel));
        self.weight = weight([outputs, inputs / groups, k, k], self.init.unwrap_or(init), groups);
        self.bias = self.bias.map(|_| Param::new([outputs], init));
        self.options.groups = groups;
        self.seam.groups = if groups > 1 { groups } else { 0 };
        self
    }
}

/// Kernels lie as the convolution of so many channels works on them.
fn weight(shape: [usize; 4], init: Init, groups: usize) -> Param {
    Param::new(shape, init).in_order(Conv2dOptions::kernel_order([shape[1] * groups, shape[0]], groups))
}

impl Module for Conv2d {
    /// (N, inputs, H, W) to (N, outputs, H', W').
    fn forward(&self, x: &Tensor, _: &mut Ctx) -> Tensor {
        let x = self.seam.enter(x);
        let Some(bias) = self.bias.as_deref().filter(|_| self.seam.leave.is_some()) else {
            return self.seam.leave(x.conv2d(&self.weight, self.bias.as_deref(), self.options));
        };
        self.seam.leave(x.conv2d(&self.weight, None, self.options)) + bias.reshape([bias.count(), 1, 1])
    }

    fn visit(&mut self, v: &mut Visitor<'_>) {
        v.param("weight", &mut self.weight);
        if let Some(bias) = &mut self.bias {
            v.param("bias", bias);
        }
        v.seam("", &mut self.seam);
    }
}
