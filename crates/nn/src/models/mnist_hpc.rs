//! The larger MNIST network of the HPC tutorial.

use crate::{Conv2d, Ctx, Dropout, Linear, MaxPool2d, Module, Visitor};
use phalanx_tensor::Tensor;

/// Two 3x3 convolutions and two dense layers, 1,199,882 parameters: (N, 1, 28, 28) images to (N, 10) log-probabilities.
pub struct MnistHpcNet {
    conv1: Conv2d,
    conv2: Conv2d,
    pool: MaxPool2d,
    drop1: Dropout,
    fc1: Linear,
    drop2: Dropout,
    fc2: Linear,
}

impl MnistHpcNet {
    /// With this dropout before the last layer and half of it after the convolutions; the tutorial takes 0.5.
    pub fn new(dropout: f64) -> MnistHpcNet {
        MnistHpcNet {
            conv1: Conv2d::new(1, 32, 3),
            conv2: Conv2d::new(32, 64, 3),
            pool: MaxPool2d::new(2),
            drop1: Dropout(dropout / 2.0),
            fc1: Linear::new(9216, 128),
            drop2: Dropout(dropout),
            fc2: Linear::new(128, 10),
        }
    }
}

impl Module for MnistHpcNet {
    fn visit(&mut self, v: &mut Visitor<'_>) {
        v.child("conv1", &mut self.conv1);
        v.child("conv2", &mut self.conv2);
        v.child("fc1", &mut self.fc1);
        v.child("fc2", &mut self.fc2);
    }

    fn forward(&self, x: &Tensor, ctx: &mut Ctx) -> Tensor {
        let x = self.conv1.forward(x, ctx).relu(); // (N, 32, 26, 26)
        let x = self.conv2.forward(&x, ctx).relu(); // (N, 64, 24, 24)
        let x = self.pool.forward(&x, ctx); // (N, 64, 12, 12)
        let x = self.drop1.forward(&x, ctx).flatten_from(1); // (N, 9216)
        let x = self.fc1.forward(&x, ctx).relu(); // (N, 128)
        let x = self.drop2.forward(&x, ctx);
        self.fc2.forward(&x, ctx).log_softmax(1) // (N, 10)
    }
}
