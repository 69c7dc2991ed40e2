//! The small MNIST network of the PyTorch tutorials.

use crate::{Conv2d, Ctx, Dropout, Dropout2d, Linear, MaxPool2d, Module, Visitor};
use phalanx_tensor::Tensor;

/// Two convolutions and two dense layers, 21,840 parameters: (N, 1, 28, 28) images to (N, 10) log-probabilities.
pub struct MnistNet {
    conv1: Conv2d,
    conv2: Conv2d,
    drop2d: Dropout2d,
    pool: MaxPool2d,
    fc1: Linear,
    drop: Dropout,
    fc2: Linear,
}

impl MnistNet {
    /// With this dropout probability; the tutorials take 0.5.
    pub fn new(dropout: f64) -> MnistNet {
        MnistNet {
            conv1: Conv2d::new(1, 10, 5),
            conv2: Conv2d::new(10, 20, 5),
            drop2d: Dropout2d(dropout),
            pool: MaxPool2d::new(2),
            fc1: Linear::new(320, 50),
            drop: Dropout(dropout),
            fc2: Linear::new(50, 10),
        }
    }
}

impl Module for MnistNet {
    fn visit(&mut self, v: &mut Visitor<'_>) {
        v.child("conv1", &mut self.conv1);
        v.child("conv2", &mut self.conv2);
        v.child("fc1", &mut self.fc1);
        v.child("fc2", &mut self.fc2);
    }

    fn forward(&self, x: &Tensor, ctx: &mut Ctx) -> Tensor {
        let x = self.conv1.forward(x, ctx); // (N, 10, 24, 24)
        let x = self.pool.forward(&x, ctx).relu(); // (N, 10, 12, 12)
        let x = self.conv2.forward(&x, ctx); // (N, 20, 8, 8)
        let x = self.drop2d.forward(&x, ctx);
        let x = self.pool.forward(&x, ctx).relu(); // (N, 20, 4, 4)
        let x = self.fc1.forward(&x.flatten_from(1), ctx).relu(); // (N, 50)
        let x = self.drop.forward(&x, ctx);
        self.fc2.forward(&x, ctx).log_softmax(1) // (N, 10)
    }
}
