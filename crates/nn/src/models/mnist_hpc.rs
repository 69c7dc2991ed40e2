//! The larger MNIST network of the HPC tutorial.

use crate::{Conv2d, Dropout, Linear, MaxPool2d, module};

module! {
    /// Two 3x3 convolutions and two dense layers, 1,199,882 parameters: (N, 1, 28, 28) images to (N, 10) log-probabilities.
    /// `dropout` is before the last layer, half of it after the convolutions; the tutorial takes 0.5.
    pub struct MnistHpcNet(dropout: f64) {
        conv1: Conv2d = Conv2d::new(1, 32, 3),
        conv2: Conv2d = Conv2d::new(32, 64, 3),
        pool: MaxPool2d = MaxPool2d::new(2),
        drop1: Dropout = Dropout::new(dropout / 2.0),
        fc1: Linear = Linear::new(9216, MnistHpcNet::DENSE),
        drop2: Dropout = Dropout::new(dropout),
        fc2: Linear = Linear::new(MnistHpcNet::DENSE, 10),
    }

    blocks(&self, x: &Tensor, ctx: &mut Ctx) -> Tensor {
        (conv1) => self.conv1.forward(x, ctx).relu(), // (N, 32, 26, 26)
        (conv2, pool, drop1) => {
            let x = self.conv2.forward(x, ctx).relu(); // (N, 64, 24, 24)
            let x = self.pool.forward(&x, ctx); // (N, 64, 12, 12)
            self.drop1.forward(&x, ctx).flatten_from(1) // (N, 9216)
        },
        (fc1, drop2) => {
            let x = self.fc1.forward(x, ctx).relu(); // (N, 128)
            self.drop2.forward(&x, ctx)
        },
        (fc2) => self.fc2.forward(x, ctx).log_softmax(1), // (N, 10)
    }
}

impl MnistHpcNet {
    /// Numbers between the two dense layers.
    pub const DENSE: usize = 128;
}
