//! A dense autoencoder of small images.

use crate::{Ctx, Flatten, Linear, Module, Relu, Sequential, Sigmoid, Visitor};
use phalanx_tensor::Tensor;

/// 784 numbers squeezed to 32 and spread again: (N, 1, 28, 28) images in [0, 1] to (N, 784) numbers in [0, 1].
pub struct Autoencoder {
    encoder: Sequential,
    decoder: Sequential,
}

impl Autoencoder {
    /// Numbers that an image is squeezed to.
    pub const NARROWEST: usize = 32;

    /// The layers 784-128-64-32 and back.
    pub fn new() -> Autoencoder {
        let encoder = Sequential::new().then(Flatten).then(Linear::new(784, 128)).then(Relu);
        let encoder = encoder.then(Linear::new(128, 64)).then(Relu).then(Linear::new(64, Self::NARROWEST));
        let decoder = Sequential::new()
            .then(Linear::new(Self::NARROWEST, 64))
            .then(Relu)
            .then(Linear::new(64, 128))
            .then(Relu);
        Autoencoder { encoder, decoder: decoder.then(Linear::new(128, 784)).then(Sigmoid) }
    }
}

impl Default for Autoencoder {
    fn default() -> Autoencoder {
        Autoencoder::new()
    }
}

impl Module for Autoencoder {
    fn visit(&mut self, v: &mut Visitor<'_>) {
        v.child("encoder", &mut self.encoder);
        v.child("decoder", &mut self.decoder);
    }

    fn forward(&self, x: &Tensor, ctx: &mut Ctx) -> Tensor {
        self.decoder.forward(&self.encoder.forward(x, ctx), ctx)
    }

    /// The layers of both halves.
    fn blocks(&self) -> usize {
        self.encoder.blocks() + self.decoder.blocks()
    }

    fn forward_block(&self, block: usize, x: &Tensor, ctx: &mut Ctx) -> Tensor {
        match block.checked_sub(self.encoder.blocks()) {
            None => self.encoder.forward_block(block, x, ctx),
            Some(block) => self.decoder.forward_block(block, x, ctx),
        }
    }

    fn block_of(&self, name: &str) -> usize {
        match name.split_once('.') {
            Some(("encoder", layer)) => self.encoder.block_of(layer),
            Some(("decoder", layer)) => self.encoder.blocks() + self.decoder.block_of(layer),
            _ => panic!("block_of: an autoencoder has no parameter {name}"),
        }
    }
}
