//! Two-dimensional convolution over (N, C, H, W) images with (O, I / groups, KH, KW) kernels.
//!
//! Six ways, chosen by [`Plan::way`]: the general one lays the pixels under each kernel tap out as a matrix and multiplies
//! ([`lowered`]); the [`direct`] one keeps a few output rows in registers, for few channels; the one of [`pixels`] sums over
//! all that a pixel sees, for many channels; that of [`winograd`] needs fewer
//! products for that where kernels are 3x3; the one of [`channels`] has a kernel for each channel by itself; the one of [`strips`] leads
//! from few channels to many. The latter four work in pixel order: [`Plan::orders`]. [`reference`] is the definition written as loops; the tests hold the others against it.

mod channels;
pub(crate) mod direct;
pub(crate) mod lowered;
mod pixels;
#[cfg(test)]
mod reference;
mod strips;
#[cfg(test)]
mod tests;
mod winograd;

use crate::cpu::lanes::Lanes;
use crate::cpu::reduce;
use crate::dtype::with_float;
use crate::op::Conv2dOptions;
use crate::shape::{Geometry, Order};
use crate::tensor::Tensor;

/// All sizes of one convolution.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Plan {
    pub(crate) n: usize,
    /// Input channels, image height and width.
    pub(crate) c: usize,
    pub(crate) h: usize,
    pub(crate) w: usize,
    /// Output channels, height and width.
    pub(crate) o: usize,
    pub(crate) oh: usize,
    pub(crate) ow: usize,
    /// Kernel height and width.
    pub(crate) kh: usize,
    pub(crate) kw: usize,
    pub(crate) options: Conv2dOptions,
}

impl Plan {
    /// Elements of one input image.
    pub(crate) fn image(&self) -> usize {
        self.c * self.h * self.w
    }

    /// Elements of one output image.
    pub(crate) fn out_image(&self) -> usize {
        self.o * self.oh * self.ow
    }

    fn way(&self) -> Way {
        match self {
            _ if direct::takes(self) => Way::Direct,
            _ if winograd::takes(self) => Way::Winograd,
            _ if pixels::takes(self) => Way::Pixels,
            _ if channels::takes(self) => Way::Channels,
            _ if strips::takes(self) => Way::Strips,
            _ => Way::Lowered,
        }
    }

    /// The orders in which the CPU's kernels want images, kernels and outputs to lie.
    pub(crate) fn orders(&self) -> [Order; 3] {
        match self.way() {
            Way::Direct | Way::Lowered => [Order::RowMajor; 3],
            Way::Pixels | Way::Winograd | Way::Channels => [Order::Pixels, Order::Taps, Order::Pixels],
            Way::Strips => [Order::RowMajor, Order::Taps, Order::Pixels],
        }
    }
}

/// The order that kernels between so many (input, output) channels are usually wanted in.
pub(crate) fn kernel_order(between: [usize; 2], groups: usize) -> Order {
    let tiled = [pixels::has_channels, strips::has_channels, channels::has_channels]
        .iter()
        .any(|has| has(between, groups));
    if tiled { Order::Taps } else { Order::RowMajor }
}

/// How a convolution is computed.
enum Way {
    Direct,
    Pixels,
    Winograd,
    Channels,
    Strips,
    Lowered,
}

/// `out = x * w + b`; all lie as [`Plan::orders`] says, here and below.
pub(crate) fn forward(x: &Tensor, w: &Tensor, b: Option<&Tensor>, plan: Plan, out: &Tensor) {
    let _timer = out.device().time("convolution");
    with_float!(x.dtype, "conv2d", T => forward_as::<T>(x, w, b, plan, out));
}

fn forward_as<T: Lanes>(x: &Tensor, w: &Tensor, b: Option<&Tensor>, plan: Plan, out: &Tensor) {
    let (x, w) = (x.read_dense::<T>(), w.read_dense::<T>());
    let b = b.map(|b| b.read_contiguous::<T>("conv2d"));
    let mut o = out.write_whole::<T>();
    let kernel = match plan.way() {
        Way::Direct => direct::forward,
        Way::Pixels => pixels::forward,
        Way::Winograd => winograd::forward,
        Way::Channels => channels::forward,
        Way::Strips => strips::forward,
        Way::Lowered => lowered::forward,
    };
    kernel(out.device(), &x, &w, b.as_deref(), plan, &mut o);
}

/// `out =` the gradient with respect to the images.
pub(crate) fn image_gradient(grad: &Tensor, w: &Tensor, plan: Plan, out: &Tensor) {
    let _timer = out.device().time("convolution, gradient of images");
    // Few channels are a network's input, whose gradient is seldom asked for: no kernel for that.
    let by_strips = matches!(plan.way(), Way::Strips);
    let (grad, w) = if by_strips { (&grad.contiguous(), &w.contiguous()) } else { (grad, w) };
    with_float!(out.dtype, "conv2d", T => {
        let (g, w) = (grad.read_dense::<T>(), w.read_dense::<T>());
        let mut o = out.write_whole::<T>();
        let kernel = match plan.way() {
            Way::Direct => direct::image_gradient,
            Way::Pixels => pixels::image_gradient,
            Way::Winograd => winograd::image_gradient,
            Way::Channels => channels::image_gradient,
            Way::Strips | Way::Lowered => lowered::image_gradient,
        };
        kernel(out.device(), &g, &w, plan, &mut o);
    });
}

/// `out =` the gradient with respect to the kernels.
pub(crate) fn kernel_gradient(x: &Tensor, grad: &Tensor, plan: Plan, out: &Tensor) {
    let _timer = out.device().time("convolution, gradient of kernels");
    with_float!(out.dtype, "conv2d", T => {
        let (x, g) = (x.read_dense::<T>(), grad.read_dense::<T>());
        let mut o = out.write_whole::<T>();
        let kernel = match plan.way() {
            Way::Direct => direct::kernel_gradient,
            Way::Winograd if winograd::takes_kernel_gradient(&plan) => winograd::kernel_gradient,
            Way::Pixels | Way::Winograd => pixels::kernel_gradient,
            Way::Channels => channels::kernel_gradient,
            Way::Strips => strips::kernel_gradient,
            Way::Lowered => lowered::kernel_gradient,
        };
        kernel(out.device(), &x, &g, plan, &mut o);
    });
}

/// `out =` the gradient with respect to the bias: the sum over images and pixels.
pub(crate) fn bias_gradient(grad: &Tensor, plan: Plan, out: &Tensor) {
    let _timer = out.device().time("convolution, gradient of bias");
    if plan.orders()[2] == Order::Pixels {
        let rows = Geometry::row_major([plan.oh * plan.ow * plan.n, plan.o].into());
        let rows = grad.seen_as(Geometry { offset: grad.geometry.offset, ..rows });
        return reduce::sum(&rows, &out.reshape([1, plan.o]));
    }
    with_float!(out.dtype, "conv2d", T => {
        let g = grad.read_contiguous::<T>("conv2d");
        let mut o = out.write_whole::<T>();
        let area = plan.oh * plan.ow;
        out.device().arch().run(#[inline(always)] || {
            let mut sums = [0.0f64; 64];
            for first in (0..plan.o).step_by(sums.len()) {
                let part = first..(first + sums.len()).min(plan.o);
                sums.fill(0.0);
                for image in g.chunks_exact(plan.out_image().max(1)) {
                    for (sum, plane) in sums.iter_mut().zip(image[part.start * area..part.end * area].chunks_exact(area.max(1))) {
                        *sum += reduce::sum_row(plane);
                    }
                }
                o[part].iter_mut().zip(&sums).for_each(|(o, &sum)| *o = T::from_f64(sum));
            }
        });
    });
}
