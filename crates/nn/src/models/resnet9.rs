//! A small residual network for small images: wide where they are small, with no strides, so that few epochs teach it much.
//!
//! The shape of it is that of the fast entries of DAWNBench, <https://dawn.cs.stanford.edu/benchmark/CIFAR10/train.html>: plain
//! convolutions that double the channels, a pooling after each, a residual block after the first and the last, and the
//! largest of each channel at the end. The residual blocks are ResNet-18's, whose sum is part of the batch norm.

use super::resnet::{BasicBlock, conv};
use crate::{BatchNorm2d, Conv2d, Linear, MaxPool2d, module};
use phalanx_tensor::Keep;

/// What the last layer's outputs are scaled by: the largest of each channel are large, and softmax of large numbers learns
/// from few samples.
const LOGIT_SCALE: f64 = 0.125;

module! {
    /// A 3x3 convolution, normalised and cut off below zero: (N, inputs, H, W) to (N, outputs, H, W).
    pub struct ConvNormRelu(inputs: usize, outputs: usize) {
        conv: Conv2d = conv(inputs, outputs, 3, 1),
        norm: BatchNorm2d = BatchNorm2d::new(outputs),
    }

    fn forward(&self, x: &Tensor, ctx: &mut Ctx) -> Tensor {
        self.norm.forward_relu(&self.conv.forward(x, ctx), ctx)
    }
}

module! {
    /// (N, 3, H, W) images to (N, classes) logits, with 6,568,000 parameters and 513 a class; H and W are at least
    /// [`ResNet9::SMALLEST`]. The shapes below are those of 32x32 images.
    pub struct ResNet9(classes: usize) {
        prep: ConvNormRelu = ConvNormRelu::new(3, 64),
        layer1: ConvNormRelu = ConvNormRelu::new(64, 128),
        residual1: BasicBlock = BasicBlock::new(128, 128, 1),
        layer2: ConvNormRelu = ConvNormRelu::new(128, 256),
        layer3: ConvNormRelu = ConvNormRelu::new(256, 512),
        residual3: BasicBlock = BasicBlock::new(512, 512, 1),
        pool: MaxPool2d = MaxPool2d::new(2),
        fc: Linear = Linear::new(512, classes),
    }

    blocks(&self, x: &Tensor, ctx: &mut Ctx) -> Tensor {
        (prep) => self.prep.forward(x, ctx), // (N, 64, 32, 32)
        (layer1) => self.pool.forward(&self.layer1.forward(x, ctx), ctx), // (N, 128, 16, 16)
        (residual1) => self.residual1.forward(x, ctx),
        (layer2) => self.pool.forward(&self.layer2.forward(x, ctx), ctx), // (N, 256, 8, 8)
        (layer3) => self.pool.forward(&self.layer3.forward(x, ctx), ctx), // (N, 512, 4, 4)
        (residual3) => self.residual3.forward(x, ctx),
        (fc, pool) => {
            let x = x.flatten_from(2).max(2, Keep::No); // (N, 512)
            self.fc.forward(&x, ctx) * LOGIT_SCALE // (N, classes)
        },
    }
}

impl ResNet9 {
    /// The shortest side of an image that three poolings leave a pixel of.
    pub const SMALLEST: usize = 8;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Ctx, Module, Parameters};
    use phalanx_tensor::{DType, Device, Tensor};

    #[test]
    fn it_takes_images_of_any_size_from_its_smallest() {
        let device = Device::cpu(1);
        for (classes, height, width) in [(10, 32, 32), (3, ResNet9::SMALLEST, 9), (1, 11, 40)] {
            let mut net = ResNet9::new(classes);
            let parameters = Parameters::build(&mut net, &device, 0);
            assert_eq!(parameters.count(), 6_568_000 + 513 * classes);
            let x = Tensor::ones(&device, [2, 3, height, width], DType::F32);
            assert_eq!(net.forward(&x, &mut Ctx::eval()).dims(), [2, classes]);
        }
    }
}
