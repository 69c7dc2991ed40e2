//! A step of training gives the same bits on any number of threads, so that workers with other shares of a machine can hold
//! the same model.

use phalanx_nn::models::{Autoencoder, MnistHpcNet, MnistNet, ResNet, ResNet9, ResNetDepth, ResNetStem};
use phalanx_nn::optim::{AdamW, Clip, Optimizer};
use phalanx_nn::{Ctx, Loss, Module, Parameters};
use phalanx_tensor::{DType, Device, Philox, Tensor};

/// The losses, values and buffers of two steps over `batch` images of (C, H, W).
fn trained(net: &mut dyn Module, batch: usize, image: [usize; 3], threads: usize) -> Vec<f32> {
    let device = Device::cpu(threads);
    let parameters = Parameters::build(net, &device, 0);
    let mut optimizer = Optimizer::new(AdamW::default()).unwrap();
    let [c, h, w] = image;
    let x = Tensor::uniform(&device, [batch, c, h, w], 0.0, 1.0, DType::F32, Philox::new(1, 0));
    let labels: Vec<i64> = (0..batch as i64).map(|i| i % 10).collect();
    let mut bits = Vec::new();
    for step in 0..2 {
        let output = net.forward(&x, &mut Ctx::train(0, step, (0..batch as u64).collect()));
        let loss = match output.dims()[1] {
            10 => {
                let labels = Tensor::from_slice(&device, &labels, [batch]);
                Loss::CrossEntropy { label_smoothing: 0.1 }.of(&output, &labels)
            }
            _ => Loss::Mse.of(&output, &x.flatten_from(1)),
        };
        parameters.grads().zero();
        loss.backward();
        bits.push(loss.item() as f32);
        Clip { norm: Some(1.0), value: None }.apply(&mut parameters.grads().arena().flat_mut::<f32>());
        let grads = parameters.grads().arena().flat::<f32>();
        optimizer.step_on(&device, &mut parameters.values().flat_mut::<f32>(), &grads, 1.0);
    }
    bits.extend_from_slice(&parameters.values().flat::<f32>());
    bits.extend_from_slice(&parameters.buffers().flat::<f32>());
    bits
}

#[test]
fn a_step_is_the_same_bits_on_any_number_of_threads() {
    let check = |name: &str, net: &dyn Fn() -> Box<dyn Module>, batch: usize, image: [usize; 3]| {
        let alone = trained(&mut net(), batch, image, 1);
        for threads in [2, 3] {
            let bits = trained(&mut net(), batch, image, threads);
            assert!(bits == alone, "{name}, batch {batch}, on {threads} threads");
        }
    };
    let digits = [1, 28, 28];
    for batch in [64, 13] {
        check("mnist", &|| Box::new(MnistNet::new(0.5)), batch, digits);
        check("mnist-hpc", &|| Box::new(MnistHpcNet::new(0.5)), batch, digits);
        check("autoencoder", &|| Box::new(Autoencoder::new()), batch, digits);
    }
    let resnet = || Box::new(ResNet::new(ResNetDepth::D18, ResNetStem::Small, 10)) as Box<dyn Module>;
    let imagenet = || Box::new(ResNet::new(ResNetDepth::D18, ResNetStem::Imagenet, 10)) as Box<dyn Module>;
    check("resnet9", &|| Box::new(ResNet9::new(10)), 10, [3, 32, 32]);
    check("resnet18", &resnet, 5, [3, 16, 16]);
    check("resnet18 for large images", &imagenet, 2, [3, 64, 64]);
}
