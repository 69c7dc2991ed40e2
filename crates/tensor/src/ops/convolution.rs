//! Convolution and pooling over (N, C, H, W) images.

use crate::autocast::lowers;
use crate::cpu::conv::Plan;
use crate::cpu::pooling::Planes;
use crate::dtype::DType;
use crate::kernel;
use crate::op::{Conv2dOptions, CountPadding, Op, PoolOptions};
use crate::ops::reduce::Keep;
use crate::ops::resample::Interpolation;
use crate::ops::{keep, recorded};
use crate::shape::{Order, Shape};
use crate::tensor::Tensor;

impl Tensor {
    /// The cross-correlation of images (N, I, H, W) with kernels (O, I / groups, KH, KW), plus a bias of (O): (N, O, OH, OW)
    /// with OH = (H + 2 padding - dilation (KH - 1) - 1) / stride + 1.
    #[track_caller]
    pub fn conv2d(&self, weight: &Tensor, bias: Option<&Tensor>, options: Conv2dOptions) -> Tensor {
        if let Some(dtype) = lowers([self, weight].into_iter().chain(bias)) {
            let bias = bias.map(|bias| bias.lowered(dtype));
            return self.lowered(dtype).conv2d(&weight.lowered(dtype), bias.as_ref(), options);
        }
        self.check_partner("conv2d", weight);
        let plan = conv_plan(self.shape(), weight.shape(), options);
        if let Some(bias) = bias {
            self.check_partner("conv2d", bias);
            assert!(
                bias.dims() == [plan.o],
                "conv2d: a bias of shape {} with kernels of shape {}",
                bias.shape(),
                weight.shape()
            );
        }
        let [images, kernels, outputs] = self.device().conv_orders(&plan);
        let (x, w) = (self.arranged(images), weight.arranged(kernels));
        let shape = [plan.n, plan.o, plan.oh, plan.ow].into();
        let out = Tensor::stale_in(outputs, self.device(), shape, self.dtype);
        let b = bias.map(Tensor::contiguous);
        kernel::conv::forward(&x, &w, b.as_ref(), plan, &out);
        let inputs = [&x, &w, b.as_ref().unwrap_or(&w)];
        recorded(out, Op::Conv2d(options), &inputs[..2 + usize::from(b.is_some())], |_| [keep(&x), keep(&w)])
    }

    /// The transposed convolution of images (N, I, H, W) with kernels (I, O / groups, KH, KW), plus a bias of (O): (N, O, OH, OW) with OH =
    /// (H - 1) stride - 2 padding + dilation (KH - 1) + 1 + `more`. It is the map by which [`Tensor::conv2d`] with these options, from O
    /// channels to I, sends gradients back: each pixel adds a kernel times itself to the pixels around it, `stride` apart. Of the sizes
    /// that such a convolution makes the same of, `more`, which is less than the stride, says by how much it is larger than the smallest
    /// (PyTorch's `output_padding`).
    ///
    /// ```
    /// use phalanx_tensor::{Conv2dOptions, Device, Tensor};
    /// let device = Device::cpu(1);
    /// let x = Tensor::from_slice(&device, &[1.0f32, 2.0], [1, 1, 1, 2]);
    /// let kernel = Tensor::from_slice(&device, &[1.0f32, 1.0, 0.5], [1, 1, 1, 3]);
    /// let options = Conv2dOptions { stride: [1, 2], ..Conv2dOptions::default() };
    /// let y = x.conv_transpose2d(&kernel, None, options, [0, 0]);
    /// assert_eq!(y.to_vec::<f32>(), [1.0, 1.0, 2.5, 2.0, 1.0]);
    /// ```
    #[track_caller]
    pub fn conv_transpose2d(
        &self,
        weight: &Tensor,
        bias: Option<&Tensor>,
        options: Conv2dOptions,
        more: [usize; 2],
    ) -> Tensor {
        if let Some(dtype) = lowers([self, weight].into_iter().chain(bias)) {
            let bias = bias.map(|bias| bias.lowered(dtype));
            return self.lowered(dtype).conv_transpose2d(
                &weight.lowered(dtype),
                bias.as_ref(),
                options,
                more,
            );
        }
        self.check_partner("conv_transpose2d", weight);
        let shape = transposed_shape(self.shape(), weight.shape(), options, more);
        let plan = conv_plan(&shape, weight.shape(), options);
        let [images, kernels, outputs] = self.device().conv_orders(&plan);
        let (x, w) = (self.arranged(outputs), weight.arranged(kernels));
        let out = Tensor::stale_in(images, self.device(), shape, self.dtype);
        kernel::conv::image_gradient(&x, &w, plan, &out);
        let out = recorded(out, Op::ConvTranspose2d(options), &[&x, &w], |_| [keep(&x), keep(&w)]);
        let Some(bias) = bias else { return out };
        self.check_partner("conv_transpose2d", bias);
        assert!(
            bias.dims() == [plan.c],
            "conv_transpose2d: a bias of shape {} with kernels of shape {} in {} groups",
            bias.shape(),
            weight.shape(),
            options.groups
        );
        // Channels are the columns of a matrix where they lie last.
        let [last, back] = match out.order() {
            Some(Order::ChannelsLast) => [[0, 2, 3, 1], [0, 3, 1, 2]],
            Some(Order::Pixels) => [[2, 3, 0, 1], [2, 3, 0, 1]],
            _ => return out.add(&bias.reshape([plan.c, 1, 1])),
        };
        out.permute(&last).add(bias).permute(&back)
    }

    /// The largest of each window of an (N, C, H, W) image.
    #[track_caller]
    pub fn max_pool2d(&self, options: PoolOptions) -> Tensor {
        let (planes, shape) = pool_planes("max_pool2d", self.shape(), options);
        assert!(
            options.kernel[0].saturating_mul(options.kernel[1]) <= 256,
            "max_pool2d: a window of {:?} has more than 256 pixels",
            options.kernel
        );
        // Pixels are what a CPU's convolutions leave.
        let order = match self.device().image_order() {
            Order::RowMajor if self.geometry.lies_in(Order::Pixels) => Order::Pixels,
            order => order,
        };
        let x = self.arranged(order);
        let out = Tensor::stale_in(order, self.device(), shape, self.dtype);
        let position = Tensor::stale_in(order, self.device(), shape, DType::U8);
        kernel::pooling::max_pool(&x, planes, order, &out, &position);
        recorded(out, Op::MaxPool2d { from: *self.shape(), order, options }, &[&x], |_| [keep(&position)])
    }

    /// The mean of each window of an (N, C, H, W) image.
    #[track_caller]
    pub fn avg_pool2d(&self, options: PoolOptions, padding: CountPadding) -> Tensor {
        let (planes, shape) = pool_planes("avg_pool2d", self.shape(), options);
        let order = self.device().image_order();
        let x = self.arranged(order);
        let out = Tensor::stale_in(order, self.device(), shape, self.dtype);
        kernel::pooling::avg_pool(&x, planes, padding, &out);
        recorded(out, Op::AvgPool2d { from: *self.shape(), options, padding }, &[&x], |_| [None])
    }
}

impl Tensor {
    /// (N, C, H, W) images to (N, C, size) by means over windows that cover the image evenly, overlapping by a pixel where the
    /// sizes don't divide.
    #[track_caller]
    pub fn adaptive_avg_pool2d(&self, size: [usize; 2]) -> Tensor {
        let &[_, _, h, w] = self.dims() else {
            panic!("adaptive_avg_pool2d: images must be (N, C, H, W), got shape {}", self.shape())
        };
        let fits = size.iter().zip([h, w]).all(|(&to, from)| to > 0 && from > 0);
        assert!(fits, "adaptive_avg_pool2d: shape {} can't become {size:?}", self.shape());
        if size == [1, 1] {
            return self.mean(&[2, 3], Keep::Yes);
        }
        // One rounding, whatever the type.
        let wide = self.widened();
        let [rows, columns] = size;
        let means = match h % rows == 0 && w % columns == 0 {
            true => {
                let window = [h / rows, w / columns];
                let options = PoolOptions { kernel: window, stride: window, padding: [0, 0] };
                wide.avg_pool2d(options, CountPadding::Yes)
            }
            false => wide.interpolate(&size, Interpolation::Area),
        };
        means.cast(self.dtype)
    }
}

/// Pixels with as many zeros on each side, as far as that can be counted.
fn padded(image: usize, padding: usize) -> Option<usize> {
    padding.checked_mul(2)?.checked_add(image)
}

#[track_caller]
pub(crate) fn conv_plan(x: &Shape, w: &Shape, options: Conv2dOptions) -> Plan {
    let (&[n, c, h, wide], &[o, ci, kh, kw]) = (x.dims(), w.dims()) else {
        panic!(
            "conv2d: images of shape {x} with kernels of shape {w}: (N, I, H, W) with (O, I / groups, KH, KW) would do"
        );
    };
    let groups = options.groups;
    let grouped = groups > 0 && c % groups == 0 && o % groups == 0 && ci == c / groups;
    assert!(
        grouped,
        "conv2d: images of shape {x} with kernels of shape {w} in {groups} groups: the channels don't fit"
    );
    let steps = options.stride.iter().chain(&options.dilation).all(|&s| s > 0);
    assert!(
        steps,
        "conv2d: stride {:?} and dilation {:?} must be at least 1",
        options.stride, options.dilation
    );
    let size = |d: usize, image: usize, kernel: usize| {
        let reach = options.dilation[d].checked_mul(kernel.max(1) - 1).and_then(|reach| reach.checked_add(1));
        let left = padded(image, options.padding[d])
            .zip(reach)
            .and_then(|(padded, reach)| padded.checked_sub(reach));
        let fits = left.filter(|_| kernel > 0);
        let Some(left) = fits else {
            panic!("conv2d: kernels of shape {w} with {options:?} don't fit into images of shape {x}")
        };
        left / options.stride[d] + 1
    };
    Plan { n, c, h, w: wide, o, oh: size(0, h, kh), ow: size(1, wide, kw), kh, kw, options }
}

/// The shape that images become by a transposed convolution.
#[track_caller]
fn transposed_shape(x: &Shape, w: &Shape, options: Conv2dOptions, more: [usize; 2]) -> Shape {
    let (&[n, c, h, wide], &[inputs, outputs, kh, kw]) = (x.dims(), w.dims()) else {
        panic!(
            "conv_transpose2d: images of shape {x} with kernels of shape {w}: (N, I, H, W) with (I, O / groups, KH, KW) would do"
        );
    };
    assert!(
        c == inputs && options.groups > 0 && inputs % options.groups == 0,
        "conv_transpose2d: images of shape {x} with kernels of shape {w} in {} groups: the channels don't fit",
        options.groups
    );
    let size = |d: usize, image: usize, kernel: usize| {
        assert!(
            more[d] < options.stride[d],
            "conv_transpose2d: {more:?} more pixels with a stride of {:?}: fewer than that would do",
            options.stride
        );
        let reach = image.checked_sub(1).zip(kernel.checked_sub(1)).and_then(|(pixels, taps)| {
            let reach = options.dilation[d].checked_mul(taps)?.checked_add(1 + more[d])?;
            let whole = pixels.checked_mul(options.stride[d])?.checked_add(reach)?;
            whole.checked_sub(options.padding[d].checked_mul(2)?)
        });
        reach.filter(|&size| size > 0).unwrap_or_else(|| {
            panic!("conv_transpose2d: images of shape {x} with kernels of shape {w} and {options:?} become nothing")
        })
    };
    let Some(channels) = outputs.checked_mul(options.groups) else {
        panic!("conv_transpose2d: kernels of shape {w} in {} groups", options.groups)
    };
    [n, channels, size(0, h, kh), size(1, wide, kw)].into()
}

#[track_caller]
pub(crate) fn pool_planes(op: &str, x: &Shape, options: PoolOptions) -> (Planes, Shape) {
    let &[n, c, h, w] = x.dims() else { panic!("{op}: images must be (N, C, H, W), got shape {x}") };
    let size = |d: usize, image: usize| {
        let (kernel, stride, padding) = (options.kernel[d], options.stride[d], options.padding[d]);
        let fits = image > 0 && stride > 0 && kernel > 0 && padding <= kernel / 2;
        let left = padded(image, padding).and_then(|padded| padded.checked_sub(kernel)).filter(|_| fits);
        let Some(left) = left else {
            panic!("{op}: windows of {options:?} don't fit into images of shape {x}")
        };
        left / stride + 1
    };
    let (oh, ow) = (size(0, h), size(1, w));
    (Planes { h, w, oh, ow, options }, [n, c, oh, ow].into())
}
