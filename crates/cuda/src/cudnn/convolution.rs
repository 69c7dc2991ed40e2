//! A convolution as a description.

use super::foreign::{self, AttributeType};
use std::fmt;

/// What images and kernels hold; sums are of float32.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Numbers {
    /// Float32 throughout.
    F32,
    /// Float32, whose factors are rounded to 10 bits of fraction: several times faster.
    Tf32,
    /// Bfloat16.
    Bf16,
    /// Float16.
    F16,
}

impl Numbers {
    pub(super) const fn foreign(self) -> AttributeType {
        match self {
            Numbers::F32 | Numbers::Tf32 => foreign::DATA_FLOAT,
            Numbers::Bf16 => foreign::DATA_BFLOAT16,
            Numbers::F16 => foreign::DATA_HALF,
        }
    }
}

/// How images and kernels lie in memory, without gaps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Layout {
    /// Pixel after pixel, each with all of its channels: images (N, H, W, C), kernels (O, KH, KW, I). The fast one.
    Nhwc,
    /// Channel after channel: images (N, C, H, W), kernels (O, I, KH, KW).
    Nchw,
}

impl Layout {
    /// The steps in elements along (N, C, H, W) of something of these sizes.
    pub(super) fn strides(self, [_, c, h, w]: [i64; 4]) -> [i64; 4] {
        match self {
            Layout::Nhwc => [h * w * c, 1, w * c, c],
            Layout::Nchw => [c * h * w, h * w, w, 1],
        }
    }
}

/// What is computed from what.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Pass {
    /// Outputs from images and kernels.
    Forward,
    /// Outputs from images and kernels, plus a bias for each output channel.
    ForwardBias,
    /// Outputs from images and kernels, plus a bias for each output channel, then ReLU.
    ForwardBiasRelu,
    /// The images' gradient from the outputs' and kernels.
    BackwardData,
    /// The kernels' gradient from the outputs' and images.
    BackwardFilter,
}

/// The cross-correlation of images (N, C, H, W) with kernels (O, C / groups, KH, KW), or a gradient of it. Sizes are given in this
/// order whatever the layout is, pairs as (height, width).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Convolution {
    /// What is computed.
    pub pass: Pass,
    /// What all tensors hold.
    pub numbers: Numbers,
    /// How all tensors lie.
    pub layout: Layout,
    /// N, C, H and W of the images.
    pub images: [usize; 4],
    /// O: channels of the outputs.
    pub outputs: usize,
    /// KH and KW.
    pub kernel: [usize; 2],
    /// Pixels from one output to the next.
    pub stride: [usize; 2],
    /// Zeros added on each side.
    pub padding: [usize; 2],
    /// Pixels between the taps of a kernel.
    pub dilation: [usize; 2],
    /// Groups of channels that don't see each other.
    pub groups: usize,
}

impl Convolution {
    /// A forward pass in NHWC with stride 1, no padding, no dilation and one group.
    pub const fn new(
        numbers: Numbers,
        images: [usize; 4],
        outputs: usize,
        kernel: [usize; 2],
    ) -> Convolution {
        Convolution {
            pass: Pass::Forward,
            numbers,
            layout: Layout::Nhwc,
            images,
            outputs,
            kernel,
            stride: [1; 2],
            padding: [0; 2],
            dilation: [1; 2],
            groups: 1,
        }
    }

    /// Height and width of the outputs. Panics where kernels don't fit into images, or channels not into groups.
    #[track_caller]
    pub fn output(&self) -> [usize; 2] {
        let [n, c, h, w] = self.images;
        let counts = [n, c, h, w, self.outputs, self.groups].into_iter().chain(self.kernel);
        let steps = self.stride.into_iter().chain(self.dilation);
        let grouped =
            self.groups > 0 && c.is_multiple_of(self.groups) && self.outputs.is_multiple_of(self.groups);
        let size = |d: usize, image: usize| {
            let reach = self.dilation[d] * self.kernel[d].saturating_sub(1) + 1;
            (image + 2 * self.padding[d]).checked_sub(reach).map(|room| room / self.stride[d].max(1) + 1)
        };
        match (size(0, h), size(1, w)) {
            (Some(h), Some(w)) if grouped && counts.chain(steps).all(|count| count > 0) => [h, w],
            _ => panic!("{self}: kernels don't fit into images, or channels not into groups"),
        }
    }

    /// (N, C, H, W) of images, kernels and outputs.
    pub(super) fn sizes(&self) -> [[i64; 4]; 3] {
        let ([n, c, _, _], [kh, kw], [oh, ow]) = (self.images, self.kernel, self.output());
        let sizes = [self.images, [self.outputs, c / self.groups, kh, kw], [n, self.outputs, oh, ow]];
        sizes.map(|sizes| sizes.map(|size| size as i64))
    }
}

impl fmt::Display for Convolution {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Convolution { pass, numbers, layout, images, outputs, kernel, .. } = self;
        let [kh, kw] = kernel;
        write!(
            f,
            "{pass:?} of images {images:?} with {outputs} kernels of {kh} x {kw} in {numbers:?} {layout:?}"
        )?;
        let pairs =
            [("stride", self.stride, 1), ("padding", self.padding, 0), ("dilation", self.dilation, 1)];
        for (name, pair, usual) in pairs {
            if pair != [usual; 2] {
                write!(f, ", {name} {pair:?}")?;
            }
        }
        match self.groups {
            1 => Ok(()),
            groups => write!(f, ", {groups} groups"),
        }
    }
}
