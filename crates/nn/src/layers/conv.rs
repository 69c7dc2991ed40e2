//! Convolutions of images and of sequences, and transposed ones, which make larger images of small ones.

use crate::layers::pair::Pair;
use crate::module::{Ctx, Module, Visitor};
use crate::param::{Init, Param};
use crate::seam::Seam;
use phalanx_tensor::{Conv2dOptions, Tensor};

/// Convolution of (N, C, H, W) images with kernels of h x w pixels. Parameters `weight` (outputs, inputs / groups, h, w) and `bias`
/// (outputs), both starting evenly in +-1 / sqrt(inputs / groups * h * w).
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
    seam: Seam,
}

impl Conv2d {
    /// A layer with a bias, stride 1 and no padding.
    pub fn new(inputs: usize, outputs: usize, kernel: impl Pair) -> Conv2d {
        let [h, w] = kernel.pair();
        let init = Init::fan_in(inputs * h * w);
        Conv2d {
            weight: weight([outputs, inputs, h, w], init, 1),
            bias: Some(Param::new([outputs], init)),
            init: None,
            options: Conv2dOptions::default(),
            channels: [inputs, outputs],
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
    pub fn stride(mut self, stride: impl Pair) -> Conv2d {
        self.options.stride = stride.pair();
        self
    }

    /// The same layer with `padding` zeros on every side of the image.
    pub fn padding(mut self, padding: impl Pair) -> Conv2d {
        self.options.padding = padding.pair();
        self
    }

    /// The same layer with `dilation` pixels from one tap of the kernel to the next.
    pub fn dilation(mut self, dilation: impl Pair) -> Conv2d {
        self.options.dilation = dilation.pair();
        self
    }

    /// The same layer with its channels in `groups` that don't see each other. Panics if the channels don't divide.
    #[track_caller]
    pub fn groups(mut self, groups: usize) -> Conv2d {
        let [inputs, outputs] = self.channels;
        let &[_, _, h, w] = self.weight.shape.dims() else { unreachable!("as `new` made it") };
        check_groups("Conv2d", [inputs, outputs], groups);
        let init = Init::fan_in(inputs / groups * h * w);
        self.weight = weight([outputs, inputs / groups, h, w], self.init.unwrap_or(init), groups);
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

/// Convolution of (N, C, L) sequences. Parameters `weight` (outputs, inputs / groups, k) and `bias` (outputs), both starting evenly in
/// +-1 / sqrt(inputs / groups * k). It is done as one of images that are one pixel high.
///
/// ```
/// use phalanx_nn::{Conv1d, Ctx, Module, Parameters};
/// use phalanx_tensor::{DType, Device, Tensor};
///
/// let device = Device::cpu(1);
/// let mut layer = Conv1d::new(3, 8, 5).stride(2).padding(2);
/// let _parameters = Parameters::build(&mut layer, &device, 0);
/// let x = Tensor::ones(&device, [2, 3, 32], DType::F32);
/// assert_eq!(layer.forward(&x, &mut Ctx::eval()).dims(), [2, 8, 16]);
/// ```
pub struct Conv1d {
    weight: Param,
    bias: Option<Param>,
    options: Conv2dOptions,
}

impl Conv1d {
    /// A layer with a bias, stride 1 and no padding.
    pub fn new(inputs: usize, outputs: usize, kernel: usize) -> Conv1d {
        let init = Init::fan_in(inputs * kernel);
        Conv1d {
            weight: Param::new([outputs, inputs, kernel], init),
            bias: Some(Param::new([outputs], init)),
            options: Conv2dOptions::default(),
        }
    }

    /// The same layer without its bias.
    pub fn without_bias(self) -> Conv1d {
        Conv1d { bias: None, ..self }
    }

    /// The same layer, moving `stride` positions from one output to the next.
    pub fn stride(mut self, stride: usize) -> Conv1d {
        self.options.stride[1] = stride;
        self
    }

    /// The same layer with `padding` zeros at both ends.
    pub fn padding(mut self, padding: usize) -> Conv1d {
        self.options.padding[1] = padding;
        self
    }

    /// The same layer with `dilation` positions from one tap of the kernel to the next.
    pub fn dilation(mut self, dilation: usize) -> Conv1d {
        self.options.dilation[1] = dilation;
        self
    }

    /// The same layer with its channels in `groups` that don't see each other. Panics if the channels don't divide.
    #[track_caller]
    pub fn groups(mut self, groups: usize) -> Conv1d {
        let &[outputs, held, kernel] = self.weight.shape.dims() else { unreachable!("as `new` made it") };
        let inputs = held * self.options.groups;
        check_groups("Conv1d", [inputs, outputs], groups);
        let init = Init::fan_in(inputs / groups * kernel);
        self.weight = Param::new([outputs, inputs / groups, kernel], init);
        self.bias = self.bias.map(|_| Param::new([outputs], init));
        self.options.groups = groups;
        self
    }
}

#[track_caller]
fn check_groups(layer: &str, [inputs, outputs]: [usize; 2], groups: usize) {
    let divides = groups > 0 && inputs.is_multiple_of(groups) && outputs.is_multiple_of(groups);
    assert!(divides, "{layer}: {inputs} and {outputs} channels don't fall into {groups} groups");
}

impl Module for Conv1d {
    /// (N, inputs, L) to (N, outputs, L').
    fn forward(&self, x: &Tensor, _: &mut Ctx) -> Tensor {
        x.unsqueeze(2)
            .conv2d(&self.weight.unsqueeze(2), self.bias.as_deref(), self.options)
            .squeeze(2)
            .contiguous()
    }

    fn visit(&mut self, v: &mut Visitor<'_>) {
        v.param("weight", &mut self.weight);
        if let Some(bias) = &mut self.bias {
            v.param("bias", bias);
        }
    }
}

/// Transposed convolution of (N, C, H, W) images with kernels of h x w pixels: each pixel adds a kernel times itself to the pixels around it.
/// Parameters `weight` (inputs, outputs / groups, h, w) and `bias` (outputs), both starting evenly in +-1 / sqrt(outputs / groups * h * w),
/// as PyTorch's do.
///
/// ```
/// use phalanx_nn::{ConvTranspose2d, Ctx, Module, Parameters};
/// use phalanx_tensor::{DType, Device, Tensor};
///
/// let device = Device::cpu(1);
/// let mut twice = ConvTranspose2d::new(8, 3, 4).stride(2).padding(1);
/// let _parameters = Parameters::build(&mut twice, &device, 0);
/// let x = Tensor::ones(&device, [2, 8, 16, 16], DType::F32);
/// assert_eq!(twice.forward(&x, &mut Ctx::eval()).dims(), [2, 3, 32, 32]);
/// ```
pub struct ConvTranspose2d {
    weight: Param,
    bias: Option<Param>,
    /// As of a [`Conv2d`].
    init: Option<Init>,
    options: Conv2dOptions,
    more: [usize; 2],
}

impl ConvTranspose2d {
    /// A layer with a bias, stride 1 and no padding.
    pub fn new(inputs: usize, outputs: usize, kernel: impl Pair) -> ConvTranspose2d {
        let weight = transposed_weight([inputs, outputs], kernel.pair(), 1);
        ConvTranspose2d {
            bias: Some(Param::new([outputs], weight.init)),
            weight,
            init: None,
            options: Conv2dOptions::default(),
            more: [0, 0],
        }
    }

    /// The same layer without its bias.
    pub fn without_bias(self) -> ConvTranspose2d {
        ConvTranspose2d { bias: None, ..self }
    }

    /// The same layer with other first values of its weight.
    ///
    /// ```
    /// use phalanx_nn::{ConvTranspose2d, Init, Parameters};
    /// use phalanx_tensor::Device;
    ///
    /// let mut layer = ConvTranspose2d::new(4, 2, 3).init(Init::Constant(0.5)).groups(2);
    /// let parameters = Parameters::build(&mut layer, &Device::cpu(1), 0);
    /// assert_eq!(parameters.value(0).to_vec::<f32>(), [0.5; 4 * 3 * 3]);
    /// assert_ne!(parameters.value(1).to_vec::<f32>(), [0.5; 2]);
    /// ```
    pub fn init(mut self, init: Init) -> ConvTranspose2d {
        self.init = Some(init);
        self.weight.init = init;
        self
    }

    /// The same layer, whose pixels come to lie `stride` apart.
    pub fn stride(mut self, stride: impl Pair) -> ConvTranspose2d {
        self.options.stride = stride.pair();
        self
    }

    /// The same layer, whose images lose `padding` pixels on every side.
    pub fn padding(mut self, padding: impl Pair) -> ConvTranspose2d {
        self.options.padding = padding.pair();
        self
    }

    /// The same layer, whose images get `more` rows and columns at the bottom and on the right: less than the stride.
    pub fn output_padding(mut self, more: impl Pair) -> ConvTranspose2d {
        self.more = more.pair();
        self
    }

    /// The same layer with `dilation` pixels from one tap of the kernel to the next.
    pub fn dilation(mut self, dilation: impl Pair) -> ConvTranspose2d {
        self.options.dilation = dilation.pair();
        self
    }

    /// The same layer with its channels in `groups` that don't see each other. Panics if the channels don't divide.
    #[track_caller]
    pub fn groups(mut self, groups: usize) -> ConvTranspose2d {
        let &[inputs, held, h, w] = self.weight.shape.dims() else { unreachable!("as `new` made it") };
        let outputs = held * self.options.groups;
        check_groups("ConvTranspose2d", [inputs, outputs], groups);
        self.weight = transposed_weight([inputs, outputs], [h, w], groups);
        self.bias = self.bias.map(|_| Param::new([outputs], self.weight.init));
        self.weight.init = self.init.unwrap_or(self.weight.init);
        self.options.groups = groups;
        self
    }
}

/// Kernels lie as the convolution the other way works on them.
fn transposed_weight([inputs, outputs]: [usize; 2], [h, w]: [usize; 2], groups: usize) -> Param {
    let init = Init::fan_in(outputs / groups * h * w);
    let order = Conv2dOptions::kernel_order([outputs, inputs], groups);
    Param::new([inputs, outputs / groups, h, w], init).in_order(order)
}

impl Module for ConvTranspose2d {
    /// (N, inputs, H, W) to (N, outputs, H', W').
    fn forward(&self, x: &Tensor, _: &mut Ctx) -> Tensor {
        x.conv_transpose2d(&self.weight, self.bias.as_deref(), self.options, self.more)
    }

    fn visit(&mut self, v: &mut Visitor<'_>) {
        v.param("weight", &mut self.weight);
        if let Some(bias) = &mut self.bias {
            v.param("bias", bias);
        }
    }
}

/// Transposed convolution of (N, C, L) sequences. Parameters `weight` (inputs, outputs / groups, k) and `bias` (outputs), both starting evenly
/// in +-1 / sqrt(outputs / groups * k). It is done as one of images that are one pixel high.
///
/// ```
/// use phalanx_nn::{ConvTranspose1d, Ctx, Module, Parameters};
/// use phalanx_tensor::{DType, Device, Tensor};
///
/// let device = Device::cpu(1);
/// let mut twice = ConvTranspose1d::new(8, 3, 4).stride(2).padding(1);
/// let _parameters = Parameters::build(&mut twice, &device, 0);
/// let x = Tensor::ones(&device, [2, 8, 16], DType::F32);
/// assert_eq!(twice.forward(&x, &mut Ctx::eval()).dims(), [2, 3, 32]);
/// ```
pub struct ConvTranspose1d {
    weight: Param,
    bias: Option<Param>,
    options: Conv2dOptions,
    more: usize,
}

impl ConvTranspose1d {
    /// A layer with a bias, stride 1 and no padding.
    pub fn new(inputs: usize, outputs: usize, kernel: usize) -> ConvTranspose1d {
        let init = Init::fan_in(outputs * kernel);
        ConvTranspose1d {
            weight: Param::new([inputs, outputs, kernel], init),
            bias: Some(Param::new([outputs], init)),
            options: Conv2dOptions::default(),
            more: 0,
        }
    }

    /// The same layer without its bias.
    pub fn without_bias(self) -> ConvTranspose1d {
        ConvTranspose1d { bias: None, ..self }
    }

    /// The same layer, whose positions come to lie `stride` apart.
    pub fn stride(mut self, stride: usize) -> ConvTranspose1d {
        self.options.stride[1] = stride;
        self
    }

    /// The same layer, whose sequences lose `padding` positions at both ends.
    pub fn padding(mut self, padding: usize) -> ConvTranspose1d {
        self.options.padding[1] = padding;
        self
    }

    /// The same layer, whose sequences get `more` positions at the end: less than the stride.
    pub fn output_padding(mut self, more: usize) -> ConvTranspose1d {
        self.more = more;
        self
    }

    /// The same layer with `dilation` positions from one tap of the kernel to the next.
    pub fn dilation(mut self, dilation: usize) -> ConvTranspose1d {
        self.options.dilation[1] = dilation;
        self
    }

    /// The same layer with its channels in `groups` that don't see each other. Panics if the channels don't divide.
    #[track_caller]
    pub fn groups(mut self, groups: usize) -> ConvTranspose1d {
        let &[inputs, held, kernel] = self.weight.shape.dims() else { unreachable!("as `new` made it") };
        let outputs = held * self.options.groups;
        check_groups("ConvTranspose1d", [inputs, outputs], groups);
        let init = Init::fan_in(outputs / groups * kernel);
        self.weight = Param::new([inputs, outputs / groups, kernel], init);
        self.bias = self.bias.map(|_| Param::new([outputs], init));
        self.options.groups = groups;
        self
    }
}

impl Module for ConvTranspose1d {
    /// (N, inputs, L) to (N, outputs, L').
    fn forward(&self, x: &Tensor, _: &mut Ctx) -> Tensor {
        let (x, weight, more) = (x.unsqueeze(2), self.weight.unsqueeze(2), [0, self.more]);
        x.conv_transpose2d(&weight, self.bias.as_deref(), self.options, more).squeeze(2).contiguous()
    }

    fn visit(&mut self, v: &mut Visitor<'_>) {
        v.param("weight", &mut self.weight);
        if let Some(bias) = &mut self.bias {
            v.param("bias", bias);
        }
    }
}
