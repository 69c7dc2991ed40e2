//! Residual networks: He, Zhang, Ren and Sun, "Deep Residual Learning for Image Recognition", <https://arxiv.org/abs/1512.03385>,
//! with the names of torchvision, so that its files of weights fit.

use crate::{BatchNorm2d, Conv2d, Ctx, Init, Linear, MaxPool2d, Module, Sequential, Visitor};
use phalanx_tensor::Tensor;

/// A convolution that a batch norm follows: no bias, and first values for layers before a ReLU (He et al., 2015).
fn conv(inputs: usize, outputs: usize, kernel: usize, stride: usize) -> Conv2d {
    let std = (2.0 / (outputs * kernel * kernel) as f64).sqrt();
    let conv = Conv2d::new(inputs, outputs, kernel).without_bias().init(Init::Normal { std });
    conv.stride(stride).padding(kernel / 2)
}

/// Where a block changes the shape, its input is brought to the new one too.
fn shortcut(inputs: usize, outputs: usize, stride: usize) -> Option<Sequential> {
    let changes = stride != 1 || inputs != outputs;
    changes.then(|| Sequential::new().then(conv(inputs, outputs, 1, stride)).then(BatchNorm2d::new(outputs)))
}

/// Two 3x3 convolutions beside the input.
pub struct BasicBlock {
    conv1: Conv2d,
    bn1: BatchNorm2d,
    conv2: Conv2d,
    bn2: BatchNorm2d,
    downsample: Option<Sequential>,
}

impl BasicBlock {
    /// From `inputs` channels to `outputs`, with images `stride` times smaller.
    pub fn new(inputs: usize, outputs: usize, stride: usize) -> BasicBlock {
        BasicBlock {
            conv1: conv(inputs, outputs, 3, stride),
            bn1: BatchNorm2d::new(outputs),
            conv2: conv(outputs, outputs, 3, 1),
            bn2: BatchNorm2d::new(outputs),
            downsample: shortcut(inputs, outputs, stride),
        }
    }
}

impl Module for BasicBlock {
    fn visit(&mut self, v: &mut Visitor<'_>) {
        v.child("conv1", &mut self.conv1);
        v.child("bn1", &mut self.bn1);
        v.child("conv2", &mut self.conv2);
        v.child("bn2", &mut self.bn2);
        v.optional("downsample", &mut self.downsample);
    }

    fn forward(&self, x: &Tensor, ctx: &mut Ctx) -> Tensor {
        let y = self.bn1.forward(&self.conv1.forward(x, ctx), ctx).relu();
        let y = self.bn2.forward(&self.conv2.forward(&y, ctx), ctx);
        let x = self.downsample.as_ref().map_or_else(|| x.clone(), |down| down.forward(x, ctx));
        (y + x).relu()
    }
}

/// A 1x1, a 3x3 and a 1x1 convolution beside the input; the stride is the 3x3's, as in torchvision.
pub struct Bottleneck {
    conv1: Conv2d,
    bn1: BatchNorm2d,
    conv2: Conv2d,
    bn2: BatchNorm2d,
    conv3: Conv2d,
    bn3: BatchNorm2d,
    downsample: Option<Sequential>,
}

impl Bottleneck {
    /// Its output has this many times the channels of its middle.
    pub const EXPANSION: usize = 4;

    /// From `inputs` channels through `middle` to four times as many, with images `stride` times smaller.
    pub fn new(inputs: usize, middle: usize, stride: usize) -> Bottleneck {
        let outputs = middle * Bottleneck::EXPANSION;
        Bottleneck {
            conv1: conv(inputs, middle, 1, 1),
            bn1: BatchNorm2d::new(middle),
            conv2: conv(middle, middle, 3, stride),
            bn2: BatchNorm2d::new(middle),
            conv3: conv(middle, outputs, 1, 1),
            bn3: BatchNorm2d::new(outputs),
            downsample: shortcut(inputs, outputs, stride),
        }
    }
}

impl Module for Bottleneck {
    fn visit(&mut self, v: &mut Visitor<'_>) {
        v.child("conv1", &mut self.conv1);
        v.child("bn1", &mut self.bn1);
        v.child("conv2", &mut self.conv2);
        v.child("bn2", &mut self.bn2);
        v.child("conv3", &mut self.conv3);
        v.child("bn3", &mut self.bn3);
        v.optional("downsample", &mut self.downsample);
    }

    fn forward(&self, x: &Tensor, ctx: &mut Ctx) -> Tensor {
        let y = self.bn1.forward(&self.conv1.forward(x, ctx), ctx).relu();
        let y = self.bn2.forward(&self.conv2.forward(&y, ctx), ctx).relu();
        let y = self.bn3.forward(&self.conv3.forward(&y, ctx), ctx);
        let x = self.downsample.as_ref().map_or_else(|| x.clone(), |down| down.forward(x, ctx));
        (y + x).relu()
    }
}

/// Which network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ResNetDepth {
    /// Basic blocks 2, 2, 2, 2.
    D18,
    /// Basic blocks 3, 4, 6, 3.
    D34,
    /// Bottlenecks 3, 4, 6, 3.
    D50,
    /// Bottlenecks 3, 4, 23, 3.
    D101,
    /// Bottlenecks 3, 8, 36, 3.
    D152,
}

/// The first layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ResNetStem {
    /// A 7x7 convolution of stride 2 and a max-pooling of stride 2: torchvision's.
    Imagenet,
    /// A 3x3 convolution: keeps small images large.
    Small,
}

/// (N, 3, H, W) images to (N, classes) logits.
pub struct ResNet {
    conv1: Conv2d,
    bn1: BatchNorm2d,
    pool: Option<MaxPool2d>,
    layers: [Sequential; 4],
    fc: Linear,
}

impl ResNet {
    /// The network of this depth; torchvision's with [`ResNetStem::Imagenet`].
    pub fn new(depth: ResNetDepth, stem: ResNetStem, classes: usize) -> ResNet {
        let (blocks, expansion) = match depth {
            ResNetDepth::D18 => ([2, 2, 2, 2], 1),
            ResNetDepth::D34 => ([3, 4, 6, 3], 1),
            ResNetDepth::D50 => ([3, 4, 6, 3], Bottleneck::EXPANSION),
            ResNetDepth::D101 => ([3, 4, 23, 3], Bottleneck::EXPANSION),
            ResNetDepth::D152 => ([3, 8, 36, 3], Bottleneck::EXPANSION),
        };
        let layers = std::array::from_fn(|i| {
            let width = 64 << i;
            let first_inputs = if i == 0 { 64 } else { width / 2 * expansion };
            (0..blocks[i]).fold(Sequential::new(), |layer, block| {
                let inputs = if block == 0 { first_inputs } else { width * expansion };
                let stride = if block == 0 && i > 0 { 2 } else { 1 };
                if expansion == 1 {
                    layer.then(BasicBlock::new(inputs, width, stride))
                } else {
                    layer.then(Bottleneck::new(inputs, width, stride))
                }
            })
        });
        let (conv1, pool) = match stem {
            ResNetStem::Imagenet => (conv(3, 64, 7, 2), Some(MaxPool2d::new(3).stride(2).padding(1))),
            ResNetStem::Small => (conv(3, 64, 3, 1), None),
        };
        ResNet { conv1, bn1: BatchNorm2d::new(64), pool, layers, fc: Linear::new(512 * expansion, classes) }
    }
}

impl Module for ResNet {
    fn visit(&mut self, v: &mut Visitor<'_>) {
        v.child("conv1", &mut self.conv1);
        v.child("bn1", &mut self.bn1);
        for (name, layer) in ["layer1", "layer2", "layer3", "layer4"].into_iter().zip(&mut self.layers) {
            v.child(name, layer);
        }
        v.child("fc", &mut self.fc);
    }

    fn forward(&self, x: &Tensor, ctx: &mut Ctx) -> Tensor {
        let x = self.bn1.forward(&self.conv1.forward(x, ctx), ctx).relu();
        let x = self.pool.as_ref().map_or_else(|| x.clone(), |pool| pool.forward(&x, ctx));
        let x = self.layers.iter().fold(x, |x, layer| layer.forward(&x, ctx));
        let x = x.adaptive_avg_pool2d([1, 1]).flatten_from(1);
        self.fc.forward(&x, ctx)
    }
}
