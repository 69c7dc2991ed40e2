//! Pooling layers.

use crate::module::{Ctx, Module, Visitor};
use phalanx_tensor::{CountPadding, PoolOptions, Tensor};

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
    /// Windows of k x k that touch but don't overlap.
    pub fn new(k: usize) -> MaxPool2d {
        MaxPool2d(PoolOptions::square(k))
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
    /// Windows of k x k that touch but don't overlap.
    pub fn new(k: usize) -> AvgPool2d {
        AvgPool2d(PoolOptions::square(k))
    }
}

impl Module for AvgPool2d {
    /// (N, C, H, W) to (N, C, H', W').
    fn forward(&self, x: &Tensor, _: &mut Ctx) -> Tensor {
        x.avg_pool2d(self.0, CountPadding::Yes)
    }

    fn visit(&mut self, _: &mut Visitor<'_>) {}
}
