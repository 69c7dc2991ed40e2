//! What holds for all models that can be cut.

use super::{Autoencoder, MnistHpcNet, MnistNet, ResNet, ResNet9, ResNetDepth, ResNetStem};
use crate::{Ctx, Module, Parameters};
use phalanx_tensor::{DType, Device, Philox, Tensor};

fn models() -> Vec<(Box<dyn Module>, Vec<usize>, usize)> {
    vec![
        (Box::new(MnistNet::new(0.5)), vec![3, 1, 28, 28], 4),
        (Box::new(MnistHpcNet::new(0.5)), vec![3, 1, 28, 28], 4),
        (Box::new(Autoencoder::new()), vec![3, 1, 28, 28], 12),
        (Box::new(ResNet::new(ResNetDepth::D18, ResNetStem::Small, 10)), vec![2, 3, 8, 8], 6),
        (Box::new(ResNet9::new(10)), vec![2, 3, 8, 8], 7),
    ]
}

#[test]
fn a_model_is_its_blocks_in_order() {
    let device = Device::cpu(1);
    for (mut model, dims, blocks) in models() {
        let parameters = Parameters::build(&mut model, &device, 0);
        assert_eq!(model.blocks(), blocks, "{:?}", parameters.names().first());
        let x = Tensor::uniform(&device, dims.as_slice(), 0.0, 1.0, DType::F32, Philox::new(0, 0));
        let ctx = Ctx::train(1, 2, (0..dims[0] as u64).collect());
        let whole = model.forward(&x, &mut ctx.clone());
        // As a pipeline does it: each block knows of those before it only how many random layers there were.
        let in_blocks = (0..blocks).fold((x, 0), |(x, layers), block| {
            let mut ctx = ctx.clone().after_layers(layers);
            (model.forward_block(block, &x, &mut ctx), ctx.layers())
        });
        assert_eq!(in_blocks.0.to_vec::<f32>(), whole.to_vec::<f32>());
    }
}

#[test]
fn a_block_needs_its_own_parameters_alone() {
    let device = Device::cpu(1);
    for (mut model, dims, blocks) in models() {
        let whole = Parameters::build(&mut model, &device, 3);
        let x = Tensor::uniform(&device, dims.as_slice(), 0.0, 1.0, DType::F32, Philox::new(0, 0));
        let want = model.forward(&x, &mut Ctx::eval());
        let mut held = 0;
        let got = (0..blocks).fold(x, |x, block| {
            let part = Parameters::build_part(&mut model, &device, |own| own == block, 3);
            held += part.names().len() + part.buffer_names().len();
            model.forward_block(block, &x, &mut Ctx::eval())
        });
        assert_eq!(held, whole.names().len() + whole.buffer_names().len());
        assert_eq!(got.to_vec::<f32>(), want.to_vec::<f32>(), "with the first values of the whole model");
    }
}
