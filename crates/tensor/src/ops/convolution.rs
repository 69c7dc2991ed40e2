//! Convolution and pooling over (N, C, H, W) images.

use crate::autocast::{autocast, lowers};
use crate::cpu::conv::Plan;
use crate::cpu::pooling::Planes;
use crate::device::Device;
use crate::dtype::DType;
use crate::kernel;
use crate::op::{Conv2dOptions, CountPadding, Op, PoolOptions};
use crate::ops::reduce::Keep;
use crate::ops::{keep, recorded};
use crate::shape::{Order, Shape};
use crate::tensor::Tensor;

impl Tensor {
    /// The cross-correlation of images (N, I, H, W) with kernels (O, I / groups, KH, KW), plus a bias of (O): (N, O, OH, OW)
    /// with OH = (H + 2 padding - dilation (KH - 1) - 1) / stride + 1.
    #[track_caller]
    pub fn conv2d(&self, weight: &Tensor, bias: Option<&Tensor>, options: Conv2dOptions) -> Tensor {
        if let Some(dtype) = lowers([self, weight].into_iter().chain(bias)) {
            let bias = bias.map(|bias| bias.cast(dtype));
            return self.cast(dtype).conv2d(&weight.cast(dtype), bias.as_ref(), options);
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

    /// The largest of each window of an (N, C, H, W) image.
    #[track_caller]
    pub fn max_pool2d(&self, options: PoolOptions) -> Tensor {
        let (planes, shape) = pool_planes("max_pool2d", self.shape(), options);
        assert!(
            options.kernel[0] * options.kernel[1] <= 256,
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

/// The matrix that takes `from` pixels to `to` means, as PyTorch cuts them: window i goes from floor(i from / to) to
/// ceil((i + 1) from / to).
fn means(device: &Device, from: usize, to: usize, dtype: DType) -> Tensor {
    let out = Tensor::zeros(device, [to, from], dtype);
    for i in 0..to {
        let window = i * from / to..((i + 1) * from).div_ceil(to);
        let row = out.narrow(0, i, 1).narrow(1, window.start, window.len());
        row.fill(1.0 / window.len() as f64);
    }
    out
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
        // Two products, and one rounding, whatever type products are made in.
        let wide = self.widened();
        let rows = means(self.device(), h, size[0], wide.dtype);
        let columns = means(self.device(), w, size[1], wide.dtype).t();
        autocast(DType::F32, || rows.matmul(&wide.matmul(&columns))).cast(self.dtype)
    }
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
        let reach = options.dilation[d] * (kernel.max(1) - 1) + 1;
        let padded = image + 2 * options.padding[d];
        assert!(
            kernel > 0 && padded >= reach,
            "conv2d: kernels of shape {w} with {options:?} don't fit into images of shape {x}"
        );
        (padded - reach) / options.stride[d] + 1
    };
    Plan { n, c, h, w: wide, o, oh: size(0, h, kh), ow: size(1, wide, kw), kh, kw, options }
}

#[track_caller]
pub(crate) fn pool_planes(op: &str, x: &Shape, options: PoolOptions) -> (Planes, Shape) {
    let &[n, c, h, w] = x.dims() else { panic!("{op}: images must be (N, C, H, W), got shape {x}") };
    let size = |d: usize, image: usize| {
        let (kernel, stride, padding) = (options.kernel[d], options.stride[d], options.padding[d]);
        let fits =
            image > 0 && stride > 0 && kernel > 0 && padding <= kernel / 2 && image + 2 * padding >= kernel;
        assert!(fits, "{op}: windows of {options:?} don't fit into images of shape {x}");
        (image + 2 * padding - kernel) / stride + 1
    };
    let (oh, ow) = (size(0, h), size(1, w));
    (Planes { h, w, oh, ow, options }, [n, c, oh, ow].into())
}
