//! Whole models, with PyTorch's names for their parameters.

mod autoencoder;
mod gpt;
mod mnist;
mod mnist_hpc;
mod resnet;
mod resnet9;

pub use autoencoder::Autoencoder;
pub use gpt::{Decoder, Gpt, GptConfig, Head};
pub use mnist::MnistNet;
pub use mnist_hpc::MnistHpcNet;
pub use resnet::{BasicBlock, Bottleneck, ResNet, ResNetDepth, ResNetStem};
pub use resnet9::{ConvNormRelu, ResNet9};
