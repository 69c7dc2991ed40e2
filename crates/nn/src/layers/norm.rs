//! Normalisation layers.

use crate::module::{Ctx, Module, Visitor};
use crate::param::{Init, Param};
use crate::seam::Seam;
use phalanx_tensor::{ChannelStats, DType, Running, Tensor, Then, autocast_dtype};

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

    /// The same layer with another number added to the variance.
    pub fn eps(self, eps: f64) -> LayerNorm {
        LayerNorm { eps, ..self }
    }
}

impl LayerNorm {
    /// The same of rows that are for products alone, which they enter at this seam: in the type that these are made in, where nobody
    /// else sees them.
    pub(crate) fn for_products(&self, x: &Tensor, seam: &Seam) -> Tensor {
        let (weight, bias) = (Some(&*self.weight), Some(&*self.bias));
        match half_of_products(x, seam) {
            Some(half) => x.layer_norm_in(half, 1, weight, bias, self.eps),
            None => x.layer_norm(1, weight, bias, self.eps),
        }
    }

    /// The sum of `x` and a branch, and that as [`LayerNorm::for_products`] has it.
    pub(crate) fn sum_for_products(&self, x: &Tensor, branch: &Tensor, seam: &Seam) -> [Tensor; 2] {
        if let Some(half) = half_of_products(x, seam) {
            return x.sum_layer_norm_in(branch, half, 1, Some(&self.weight), Some(&self.bias), self.eps);
        }
        let sum = x + branch;
        let rows = self.for_products(&sum, seam);
        [sum, rows]
    }
}

/// The 16 bits of the products that rows enter at this seam, if nobody else sees them.
fn half_of_products(x: &Tensor, seam: &Seam) -> Option<DType> {
    let half = autocast_dtype();
    (half.is_half() && x.dtype() != DType::F64 && seam.enter.is_none()).then_some(half)
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

/// Normalises each channel of (N, C, H, W) images over the batch and all pixels, then scales and shifts. Parameters `weight`
/// (ones) and `bias` (zeros); buffers `running_mean` (zeros) and `running_var` (ones), which training moves towards what each
/// batch showed, and which evaluation goes by, as in PyTorch. Where the batch is shared ([`Ctx::sharing`]), it is the whole
/// batch that counts.
///
/// ```
/// use phalanx_nn::{BatchNorm2d, Ctx, Module, Parameters};
/// use phalanx_tensor::{Device, Tensor};
///
/// let device = Device::cpu(1);
/// let mut layer = BatchNorm2d::new(1);
/// let parameters = Parameters::build(&mut layer, &device, 0);
/// let x = Tensor::from_slice(&device, &[3.0f32, 7.0], [2, 1, 1, 1]);
/// let y = layer.forward(&x, &mut Ctx::train(0, 0, [0, 1].into())).to_vec::<f32>();
/// assert!((y[0] + 1.0).abs() < 1e-5 && (y[1] - 1.0).abs() < 1e-5);
/// // A tenth of the way from 0 to the mean 5, and from 1 to the variance 8.
/// assert_eq!(parameters.buffers().tensor(0).to_vec::<f32>(), [0.5]);
/// assert_eq!(parameters.buffers().tensor(1).to_vec::<f32>(), [1.7]);
/// ```
pub struct BatchNorm2d {
    weight: Param,
    bias: Param,
    running_mean: Param,
    running_var: Param,
    eps: f64,
    momentum: f64,
}

impl BatchNorm2d {
    /// For `channels` channels, with PyTorch's eps of 1e-5 and momentum of 0.1.
    pub fn new(channels: usize) -> BatchNorm2d {
        let part = |value| Param::new([channels], Init::Constant(value));
        BatchNorm2d {
            weight: part(1.0),
            bias: part(0.0),
            running_mean: part(0.0),
            running_var: part(1.0),
            eps: 1e-5,
            momentum: 0.1,
        }
    }

    /// The same layer with a weight that starts at 0: a residual branch that ends with it starts as nothing.
    pub fn starting_at_zero(self) -> BatchNorm2d {
        let weight = Param::new(self.weight.shape, Init::Constant(0.0));
        BatchNorm2d { weight, ..self }
    }

    /// The same layer, whose running statistics move by this share of the way in every training pass.
    pub fn momentum(self, momentum: f64) -> BatchNorm2d {
        BatchNorm2d { momentum, ..self }
    }

    /// The same layer with another number added to the variance.
    pub fn eps(self, eps: f64) -> BatchNorm2d {
        BatchNorm2d { eps, ..self }
    }
}

impl BatchNorm2d {
    /// (N, C, H, W) to the same: normalised, then cut off below zero.
    pub fn forward_relu(&self, x: &Tensor, ctx: &mut Ctx) -> Tensor {
        self.forward_then(x, ctx, Then::Relu)
    }

    /// (N, C, H, W) to the same: normalised, plus `shortcut`, then cut off below zero.
    pub fn forward_add_relu(&self, x: &Tensor, shortcut: &Tensor, ctx: &mut Ctx) -> Tensor {
        self.forward_then(x, ctx, Then::AddRelu(shortcut))
    }

    fn forward_then(&self, x: &Tensor, ctx: &mut Ctx, then: Then<'_>) -> Tensor {
        let (weight, bias) = (Some(&*self.weight), Some(&*self.bias));
        ctx.normalises(x.count() / self.weight.count());
        if !ctx.training() {
            let (mean, variance) = (self.running_mean.clone(), self.running_var.clone());
            return x.batch_norm_with(&ChannelStats { mean, variance }, weight, bias, self.eps, then);
        }
        let (mean, variance) = (&*self.running_mean, &*self.running_var);
        let running = Running { mean, variance, share: self.momentum };
        let running = (!ctx.is_again()).then_some(running);
        x.batch_norm(weight, bias, self.eps, then, ctx.shared(), running).out
    }
}

impl Module for BatchNorm2d {
    /// (N, C, H, W) to the same. A training pass over a single value a channel panics.
    fn forward(&self, x: &Tensor, ctx: &mut Ctx) -> Tensor {
        self.forward_then(x, ctx, Then::Nothing)
    }

    fn visit(&mut self, v: &mut Visitor<'_>) {
        v.param("weight", &mut self.weight);
        v.param("bias", &mut self.bias);
        v.buffer("running_mean", &mut self.running_mean);
        v.buffer("running_var", &mut self.running_var);
    }
}

/// As [`BatchNorm2d`], of rows (N, C) or sequences (N, C, L).
///
/// ```
/// use phalanx_nn::{BatchNorm1d, Ctx, Module, Parameters};
/// use phalanx_tensor::{Device, Tensor};
///
/// let device = Device::cpu(1);
/// let mut layer = BatchNorm1d::new(1);
/// let _parameters = Parameters::build(&mut layer, &device, 0);
/// let x = Tensor::from_slice(&device, &[3.0f32, 7.0], [2, 1]);
/// let y = layer.forward(&x, &mut Ctx::train(0, 0, [0, 1].into())).to_vec::<f32>();
/// assert!((y[0] + 1.0).abs() < 1e-5 && (y[1] - 1.0).abs() < 1e-5);
/// ```
pub struct BatchNorm1d(BatchNorm2d);

impl BatchNorm1d {
    /// For `channels` channels, with PyTorch's eps of 1e-5 and momentum of 0.1.
    pub fn new(channels: usize) -> BatchNorm1d {
        BatchNorm1d(BatchNorm2d::new(channels))
    }

    /// The same layer, whose running statistics move by this share of the way in every training pass.
    pub fn momentum(self, momentum: f64) -> BatchNorm1d {
        BatchNorm1d(self.0.momentum(momentum))
    }

    /// The same layer with another number added to the variance.
    pub fn eps(self, eps: f64) -> BatchNorm1d {
        BatchNorm1d(self.0.eps(eps))
    }
}

impl Module for BatchNorm1d {
    /// (N, C) or (N, C, L) to the same. A training pass over a single value a channel panics.
    fn forward(&self, x: &Tensor, ctx: &mut Ctx) -> Tensor {
        let (n, channels, len) = match *x.dims() {
            [n, channels] => (n, channels, 1),
            [n, channels, len] => (n, channels, len),
            _ => panic!("BatchNorm1d: of shape {}: (N, C) or (N, C, L) would do", x.shape()),
        };
        self.0.forward(&x.reshape([n, channels, 1, len]), ctx).reshape(*x.shape())
    }

    fn visit(&mut self, v: &mut Visitor<'_>) {
        self.0.visit(v);
    }
}

/// Normalises the channels of each sample in groups, each group over all of its pixels, to mean 0 and variance 1, then scales and shifts each
/// channel: Wu and He, "Group Normalization", 2018. It knows of no other samples, so it is the same with batches of any size. Parameters
/// `weight` (ones) and `bias` (zeros), of (C). With as many groups as channels it normalises each channel of a sample by itself (PyTorch's
/// `InstanceNorm2d(affine=True)`).
///
/// ```
/// use phalanx_nn::{Ctx, GroupNorm, Module, Parameters};
/// use phalanx_tensor::{Device, Tensor};
///
/// let device = Device::cpu(1);
/// let mut layer = GroupNorm::new(2, 4);
/// let _parameters = Parameters::build(&mut layer, &device, 0);
/// let x = Tensor::from_slice(&device, &[3.0f32, 7.0, 100.0, 300.0], [1, 4, 1, 1]);
/// let y = layer.forward(&x, &mut Ctx::eval()).to_vec::<f32>();
/// assert!(y.iter().zip([-1.0, 1.0, -1.0, 1.0]).all(|(y, want)| (y - want).abs() < 1e-5));
/// ```
pub struct GroupNorm {
    weight: Param,
    bias: Param,
    groups: usize,
    eps: f64,
}

impl GroupNorm {
    /// Of `channels` channels in `groups` groups, with PyTorch's eps of 1e-5. Panics unless they divide.
    #[track_caller]
    pub fn new(groups: usize, channels: usize) -> GroupNorm {
        let divides = groups > 0 && channels.is_multiple_of(groups);
        assert!(divides, "GroupNorm: {channels} channels don't fall into {groups} groups");
        let part = |value| Param::new([channels], Init::Constant(value));
        GroupNorm { weight: part(1.0), bias: part(0.0), groups, eps: 1e-5 }
    }

    /// The same layer with another number added to the variance.
    pub fn eps(self, eps: f64) -> GroupNorm {
        GroupNorm { eps, ..self }
    }
}

impl Module for GroupNorm {
    /// (N, C, ...) to the same.
    fn forward(&self, x: &Tensor, _: &mut Ctx) -> Tensor {
        x.group_norm(self.groups, &self.weight, &self.bias, self.eps)
    }

    fn visit(&mut self, v: &mut Visitor<'_>) {
        v.param("weight", &mut self.weight);
        v.param("bias", &mut self.bias);
    }
}

/// Divides each row by the root of its mean square, then scales: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.
/// Parameter `weight` (ones).
///
/// ```
/// use phalanx_nn::{Ctx, Module, Parameters, RmsNorm};
/// use phalanx_tensor::{Device, Tensor};
///
/// let device = Device::cpu(1);
/// let mut layer = RmsNorm::new(2);
/// let _parameters = Parameters::build(&mut layer, &device, 0);
/// let x = Tensor::from_slice(&device, &[1.0f32, 7.0], [1, 2]);
/// let y = layer.forward(&x, &mut Ctx::eval()).to_vec::<f32>();
/// assert!((y[0] - 0.2).abs() < 1e-6 && (y[1] - 1.4).abs() < 1e-6);
/// ```
pub struct RmsNorm {
    weight: Param,
    eps: f64,
}

impl RmsNorm {
    /// Over the last dimension, of `width` numbers, with PyTorch's eps, the distance of 1 and the next number of float32.
    pub fn new(width: usize) -> RmsNorm {
        RmsNorm { weight: Param::new([width], Init::Constant(1.0)), eps: f64::from(f32::EPSILON) }
    }

    /// The same layer with another number added to the mean square.
    pub fn eps(self, eps: f64) -> RmsNorm {
        RmsNorm { eps, ..self }
    }
}

impl Module for RmsNorm {
    /// (..., width) to the same.
    fn forward(&self, x: &Tensor, _: &mut Ctx) -> Tensor {
        x.rms_norm(&self.weight, self.eps)
    }

    fn visit(&mut self, v: &mut Visitor<'_>) {
        v.param("weight", &mut self.weight);
    }
}
