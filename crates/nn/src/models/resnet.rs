//! Residual networks: He, Zhang, Ren and Sun, "Deep Residual Learning for Image Recognition", <https://arxiv.org/abs/1512.03385>,
//! with the names of torchvision, so that its files of weights fit.

use crate::{BatchNorm2d, Conv2d, Init, Linear, MaxPool2d, Sequential, module};

/// A convolution that a batch norm follows: no bias, and first values for layers before a ReLU (He et al., 2015).
pub(super) fn conv(inputs: usize, outputs: usize, kernel: usize, stride: usize) -> Conv2d {
    let std = (2.0 / (outputs * kernel * kernel) as f64).sqrt();
    let conv = Conv2d::new(inputs, outputs, kernel).without_bias().init(Init::Normal { std });
    conv.stride(stride).padding(kernel / 2)
}

/// Where a block changes the shape, its input is brought to the new one too.
fn shortcut(inputs: usize, outputs: usize, stride: usize) -> Option<Sequential> {
    let changes = stride != 1 || inputs != outputs;
    changes.then(|| Sequential::new().then(conv(inputs, outputs, 1, stride)).then(BatchNorm2d::new(outputs)))
}

module! {
    /// Two 3x3 convolutions beside the input: from `inputs` channels to `outputs`, images `stride` times smaller.
    pub struct BasicBlock(inputs: usize, outputs: usize, stride: usize) {
        conv1: Conv2d = conv(inputs, outputs, 3, stride),
        bn1: BatchNorm2d = BatchNorm2d::new(outputs),
        conv2: Conv2d = conv(outputs, outputs, 3, 1),
        bn2: BatchNorm2d = BatchNorm2d::new(outputs),
        downsample: Option<Sequential> = shortcut(inputs, outputs, stride),
    }

    fn forward(&self, x: &Tensor, ctx: &mut Ctx) -> Tensor {
        let y = self.bn1.forward_relu(&self.conv1.forward(x, ctx), ctx);
        let y = self.conv2.forward(&y, ctx);
        self.bn2.forward_add_relu(&y, &self.downsample.forward(x, ctx), ctx)
    }
}

/// The output of a bottleneck has this many times the channels of its middle.
const EXPANSION: usize = 4;

module! {
    /// A 1x1, a 3x3 and a 1x1 convolution beside the input: from `inputs` channels through `middle` to four times as many, images
    /// `stride` times smaller. The stride is the 3x3's, as in torchvision.
    pub struct Bottleneck(inputs: usize, middle: usize, stride: usize) {
        conv1: Conv2d = conv(inputs, middle, 1, 1),
        bn1: BatchNorm2d = BatchNorm2d::new(middle),
        conv2: Conv2d = conv(middle, middle, 3, stride),
        bn2: BatchNorm2d = BatchNorm2d::new(middle),
        conv3: Conv2d = conv(middle, middle * EXPANSION, 1, 1),
        bn3: BatchNorm2d = BatchNorm2d::new(middle * EXPANSION),
        downsample: Option<Sequential> = shortcut(inputs, middle * EXPANSION, stride),
    }

    fn forward(&self, x: &Tensor, ctx: &mut Ctx) -> Tensor {
        let y = self.bn1.forward_relu(&self.conv1.forward(x, ctx), ctx);
        let y = self.bn2.forward_relu(&self.conv2.forward(&y, ctx), ctx);
        let y = self.conv3.forward(&y, ctx);
        self.bn3.forward_add_relu(&y, &self.downsample.forward(x, ctx), ctx)
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

impl ResNetDepth {
    /// How many blocks each of the four layers has.
    pub fn blocks(self) -> [usize; 4] {
        match self {
            ResNetDepth::D18 => [2, 2, 2, 2],
            ResNetDepth::D34 | ResNetDepth::D50 => [3, 4, 6, 3],
            ResNetDepth::D101 => [3, 4, 23, 3],
            ResNetDepth::D152 => [3, 8, 36, 3],
        }
    }

    /// How many times wider the output of a block is than its middle: 1 for basic blocks, 4 for bottlenecks.
    pub fn expansion(self) -> usize {
        if matches!(self, ResNetDepth::D18 | ResNetDepth::D34) { 1 } else { EXPANSION }
    }

    /// Row `i` of blocks, of width 64, 128, 256 and 512; all but the first halve the image.
    fn layer(self, i: usize) -> Sequential {
        let (width, expansion) = (64 << i, self.expansion());
        (0..self.blocks()[i]).fold(Sequential::new(), |layer, block| {
            let (inputs, stride) = match (block, i) {
                (0, 0) => (64, 1),
                (0, _) => (width / 2 * expansion, 2),
                _ => (width * expansion, 1),
            };
            match expansion {
                1 => layer.then(BasicBlock::new(inputs, width, stride)),
                _ => layer.then(Bottleneck::new(inputs, width, stride)),
            }
        })
    }
}

/// The first layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ResNetStem {
    /// A 7x7 convolution of stride 2 and a max-pooling of stride 2: torchvision's.
    Imagenet,
    /// A 3x3 convolution, which keeps small images large.
    Small,
}

impl ResNetStem {
    fn conv(self) -> Conv2d {
        match self {
            ResNetStem::Imagenet => conv(3, 64, 7, 2),
            ResNetStem::Small => conv(3, 64, 3, 1),
        }
    }

    fn pool(self) -> Option<MaxPool2d> {
        (self == ResNetStem::Imagenet).then(|| MaxPool2d::new(3).stride(2).padding(1))
    }
}

module! {
    /// (N, 3, H, W) images to (N, classes) logits; torchvision's network with [`ResNetStem::Imagenet`].
    pub struct ResNet(depth: ResNetDepth, stem: ResNetStem, classes: usize) {
        conv1: Conv2d = stem.conv(),
        bn1: BatchNorm2d = BatchNorm2d::new(64),
        maxpool: Option<MaxPool2d> = stem.pool(),
        layer1: Sequential = depth.layer(0),
        layer2: Sequential = depth.layer(1),
        layer3: Sequential = depth.layer(2),
        layer4: Sequential = depth.layer(3),
        fc: Linear = Linear::new(512 * depth.expansion(), classes),
    }

    blocks(&self, x: &Tensor, ctx: &mut Ctx) -> Tensor {
        (conv1, bn1, maxpool) => {
            let x = self.bn1.forward_relu(&self.conv1.forward(x, ctx), ctx);
            self.maxpool.forward(&x, ctx)
        },
        (layer1) => self.layer1.forward(x, ctx),
        (layer2) => self.layer2.forward(x, ctx),
        (layer3) => self.layer3.forward(x, ctx),
        (layer4) => self.layer4.forward(x, ctx),
        (fc) => self.fc.forward(&x.adaptive_avg_pool2d([1, 1]).flatten_from(1), ctx),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Module, Role, Visitor};

    /// How many numbers torchvision's networks of 1000 classes learn, from its documentation of the pretrained weights.
    #[test]
    fn the_networks_are_torchvisions() {
        for (depth, count, last) in [
            (ResNetDepth::D18, 11_689_512, "layer4.1.bn2.bias"),
            (ResNetDepth::D34, 21_797_672, "layer4.2.bn2.bias"),
            (ResNetDepth::D50, 25_557_032, "layer4.2.bn3.bias"),
            (ResNetDepth::D101, 44_549_160, "layer4.2.bn3.bias"),
            (ResNetDepth::D152, 60_192_808, "layer4.2.bn3.bias"),
        ] {
            let mut net = ResNet::new(depth, ResNetStem::Imagenet, 1000);
            let (mut names, mut found) = (Vec::new(), 0);
            net.visit(&mut Visitor::new(&mut |name, role, param| {
                if role == Role::Learned {
                    names.push(name.to_owned());
                    found += param.shape.count();
                }
            }));
            assert_eq!(found, count, "{depth:?}");
            assert_eq!(names[..3], ["conv1.weight", "bn1.weight", "bn1.bias"]);
            assert_eq!(names[names.len() - 3..], [last, "fc.weight", "fc.bias"]);
            assert!(names.iter().any(|name| name == "layer2.0.downsample.1.weight"));
        }
    }
}
