//! Pooling layers, and those that make images larger.

use crate::layers::pair::Pair;
use crate::module::{Ctx, Module, Visitor};
use phalanx_tensor::{CountPadding, Interpolation, PoolOptions, Tensor};

/// The largest of each window.
///
/// ```
/// use phalanx_nn::{Ctx, MaxPool2d, Module};
/// use phalanx_tensor::{Device, Tensor};
///
/// let x = Tensor::from_slice(&Device::cpu(1), &[1.0f32, 2.0, 3.0, 4.0], [1, 1, 2, 2]);
/// let y = MaxPool2d::new(2).forward(&x, &mut Ctx::eval());
/// assert_eq!((y.dims(), y.item()), (&[1, 1, 1, 1][..], 4.0));
/// ```
pub struct MaxPool2d(pub PoolOptions);

impl MaxPool2d {
    /// Windows of so many pixels that touch but don't overlap.
    pub fn new(kernel: impl Pair) -> MaxPool2d {
        let kernel = kernel.pair();
        MaxPool2d(PoolOptions { kernel, stride: kernel, padding: [0, 0] })
    }

    /// The same layer, moving `stride` pixels from one window to the next.
    pub fn stride(mut self, stride: impl Pair) -> MaxPool2d {
        self.0.stride = stride.pair();
        self
    }

    /// The same layer with `padding` pixels on every side that are never the largest.
    pub fn padding(mut self, padding: impl Pair) -> MaxPool2d {
        self.0.padding = padding.pair();
        self
    }
}

impl Module for MaxPool2d {
    /// (N, C, H, W) to (N, C, H', W').
    fn forward(&self, x: &Tensor, _: &mut Ctx) -> Tensor {
        x.max_pool2d(self.0)
    }

    fn visit(&mut self, _: &mut Visitor<'_>) {}
}

/// The mean of each window, padding counted as zeros.
///
/// ```
/// use phalanx_nn::{Ctx, AvgPool2d, Module};
/// use phalanx_tensor::{Device, Tensor};
///
/// let x = Tensor::from_slice(&Device::cpu(1), &[1.0f32, 2.0, 3.0, 4.0], [1, 1, 2, 2]);
/// let y = AvgPool2d::new(2).forward(&x, &mut Ctx::eval());
/// assert_eq!((y.dims(), y.item()), (&[1, 1, 1, 1][..], 2.5));
/// ```
pub struct AvgPool2d(pub PoolOptions);

impl AvgPool2d {
    /// Windows of so many pixels that touch but don't overlap.
    pub fn new(kernel: impl Pair) -> AvgPool2d {
        let kernel = kernel.pair();
        AvgPool2d(PoolOptions { kernel, stride: kernel, padding: [0, 0] })
    }

    /// The same layer, moving `stride` pixels from one window to the next.
    pub fn stride(mut self, stride: impl Pair) -> AvgPool2d {
        self.0.stride = stride.pair();
        self
    }

    /// The same layer with `padding` zeros on every side, which count.
    pub fn padding(mut self, padding: impl Pair) -> AvgPool2d {
        self.0.padding = padding.pair();
        self
    }
}

impl Module for AvgPool2d {
    /// (N, C, H, W) to (N, C, H', W').
    fn forward(&self, x: &Tensor, _: &mut Ctx) -> Tensor {
        x.avg_pool2d(self.0, CountPadding::Yes)
    }

    fn visit(&mut self, _: &mut Visitor<'_>) {}
}

/// The means of windows that cover the image evenly.
///
/// ```
/// use phalanx_nn::{AdaptiveAvgPool2d, Ctx, Module};
/// use phalanx_tensor::{Device, Tensor};
///
/// let x = Tensor::from_slice(&Device::cpu(1), &[1.0f32, 2.0, 3.0, 4.0], [1, 1, 2, 2]);
/// let y = AdaptiveAvgPool2d([1, 2]).forward(&x, &mut Ctx::eval());
/// assert_eq!((y.dims(), y.to_vec::<f32>()), (&[1, 1, 1, 2][..], vec![2.0, 3.0]));
/// ```
pub struct AdaptiveAvgPool2d(pub [usize; 2]);

impl Module for AdaptiveAvgPool2d {
    /// (N, C, H, W) to (N, C, the size).
    fn forward(&self, x: &Tensor, _: &mut Ctx) -> Tensor {
        x.adaptive_avg_pool2d(self.0)
    }

    fn visit(&mut self, _: &mut Visitor<'_>) {}
}

/// The largest of each window of a sequence, of at most 256 positions: [`Tensor::max`] has the largest of all.
///
/// ```
/// use phalanx_nn::{Ctx, MaxPool1d, Module};
/// use phalanx_tensor::{Device, Tensor};
///
/// let x = Tensor::from_slice(&Device::cpu(1), &[1.0f32, 2.0, 4.0, 3.0], [1, 1, 4]);
/// assert_eq!(MaxPool1d::new(2).forward(&x, &mut Ctx::eval()).to_vec::<f32>(), [2.0, 4.0]);
/// ```
pub struct MaxPool1d(PoolOptions);

/// The mean of each window of a sequence, padding counted as zeros.
///
/// ```
/// use phalanx_nn::{AvgPool1d, Ctx, Module};
/// use phalanx_tensor::{Device, Tensor};
///
/// let x = Tensor::from_slice(&Device::cpu(1), &[1.0f32, 2.0, 4.0, 3.0], [1, 1, 4]);
/// assert_eq!(AvgPool1d::new(2).forward(&x, &mut Ctx::eval()).to_vec::<f32>(), [1.5, 3.5]);
/// ```
pub struct AvgPool1d(PoolOptions);

/// One row a layer of sequences: its name, and what it does with images that are one pixel high.
macro_rules! of_sequences {
    ($($name:ident, |$x:ident, $options:ident| $pool:expr;)*) => {$(
        impl $name {
            /// Windows of k positions that touch but don't overlap.
            pub fn new(k: usize) -> $name {
                $name(PoolOptions { kernel: [1, k], stride: [1, k], padding: [0, 0] })
            }

            /// The same layer, moving `stride` positions from one window to the next.
            pub fn stride(mut self, stride: usize) -> $name {
                self.0.stride[1] = stride;
                self
            }

            /// The same layer with `padding` positions at both ends.
            pub fn padding(mut self, padding: usize) -> $name {
                self.0.padding[1] = padding;
                self
            }
        }

        impl Module for $name {
            /// (N, C, L) to (N, C, L').
            fn forward(&self, x: &Tensor, _: &mut Ctx) -> Tensor {
                let ($x, $options) = (x.unsqueeze(2), self.0);
                $pool.squeeze(2).contiguous()
            }

            fn visit(&mut self, _: &mut Visitor<'_>) {}
        }
    )*};
}
of_sequences! {
    MaxPool1d, |x, options| x.max_pool2d(options);
    AvgPool1d, |x, options| x.avg_pool2d(options, CountPadding::Yes);
}

/// Images, or sequences or volumes, that are so many times as large in each direction, as PyTorch's `Upsample(scale_factor=scale)`.
///
/// ```
/// use phalanx_nn::{Ctx, Module, Upsample};
/// use phalanx_tensor::{Device, Interpolation, Tensor};
///
/// let x = Tensor::from_slice(&Device::cpu(1), &[1.0f32, 2.0], [1, 1, 1, 2]);
/// let y = Upsample::new(2).forward(&x, &mut Ctx::eval());
/// assert_eq!(y.to_vec::<f32>(), [1.0, 1.0, 2.0, 2.0, 1.0, 1.0, 2.0, 2.0]);
/// let bilinear = Upsample::new(2).mode(Interpolation::Linear { align_corners: false });
/// assert_eq!(bilinear.forward(&x, &mut Ctx::eval()).to_vec::<f32>()[..4], [1.0, 1.25, 1.75, 2.0]);
/// ```
pub struct Upsample {
    scale: usize,
    mode: Interpolation,
}

impl Upsample {
    /// So many times as large; each pixel is a copy of the nearest.
    #[track_caller]
    pub fn new(scale: usize) -> Upsample {
        assert!(scale > 0, "Upsample: images {scale} times as large");
        Upsample { scale, mode: Interpolation::Nearest }
    }

    /// With pixels made in another way.
    pub fn mode(self, mode: Interpolation) -> Upsample {
        Upsample { mode, ..self }
    }
}

impl Module for Upsample {
    /// (N, C, H, W) to (N, C, H scale, W scale), and likewise with one or three dimensions after the channels.
    fn forward(&self, x: &Tensor, _: &mut Ctx) -> Tensor {
        assert!(x.dims().len() > 2, "Upsample: images must be (N, C, H, W), got shape {}", x.shape());
        let sizes: Vec<usize> = x.dims()[2..].iter().map(|size| size * self.scale).collect();
        x.interpolate(&sizes, self.mode)
    }

    fn visit(&mut self, _: &mut Visitor<'_>) {}
}
