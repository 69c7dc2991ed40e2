//! The small MNIST network of the PyTorch tutorials.

use crate::{Conv2d, Dropout, Dropout2d, Linear, MaxPool2d, module};

module! {
    /// Two convolutions and two dense layers, 21,840 parameters: (N, 1, 28, 28) images to (N, 10) log-probabilities. The
    /// tutorials take a dropout of 0.5.
    pub struct MnistNet(dropout: f64) {
        conv1: Conv2d = Conv2d::new(1, 10, 5),
        conv2: Conv2d = Conv2d::new(10, 20, 5),
        drop2d: Dropout2d = Dropout2d(dropout),
        pool: MaxPool2d = MaxPool2d::new(2),
        fc1: Linear = Linear::new(320, MnistNet::DENSE),
        drop: Dropout = Dropout::new(dropout),
        fc2: Linear = Linear::new(MnistNet::DENSE, 10),
    }

    blocks(&self, x: &Tensor, ctx: &mut Ctx) -> Tensor {
        // (N, 10, 24, 24), then (N, 10, 12, 12)
        (conv1) => self.pool.forward(&self.conv1.forward(x, ctx), ctx).relu(),
        (conv2, drop2d, pool) => {
            let x = self.conv2.forward(x, ctx); // (N, 20, 8, 8)
            let x = self.drop2d.forward(&x, ctx);
            self.pool.forward(&x, ctx).relu() // (N, 20, 4, 4)
        },
        (fc1, drop) => {
            let x = self.fc1.forward(&x.flatten_from(1), ctx).relu(); // (N, 50)
            self.drop.forward(&x, ctx)
        },
        (fc2) => self.fc2.forward(x, ctx).log_softmax(1), // (N, 10)
    }
}

impl MnistNet {
    /// Numbers between the two dense layers.
    pub const DENSE: usize = 50;
}
