//! How many launches a pass takes. Where a GPU is faster than what it is given, this is what a step costs: each is a node of a replayed
//! graph, or a call of the driver.

use crate::fake::fake;
use crate::gpu;
use phalanx::nn::models::{Gpt, GptConfig, ResNet, ResNetDepth, ResNetStem};
use phalanx::nn::{Ctx, Loss, Module, Parameters};
use phalanx::parallel::{Pass, SingleDevice, Strategy, Sync};
use phalanx::tensor::{DType, Device, Tensor, autocast};
use phalanx_fake_cuda::FakeCuda;
use std::collections::BTreeMap;

/// What the second pass of a model in 16 bits gives the driver: launches and copies by name, and work of NVIDIA's libraries as
/// `library`.
fn given(
    fake: &FakeCuda,
    net: &mut dyn Module,
    samples: impl Fn(&Device) -> [Tensor; 2],
) -> BTreeMap<String, usize> {
    let device = gpu(fake);
    let parameters = Parameters::build(net, &device, 3);
    let mut strategy = SingleDevice::new();
    strategy.prepare(&parameters).unwrap();
    let mut pass = |step| {
        parameters.grads().zero();
        let [input, target] = samples(&device);
        let ctx = Ctx::train(0, step, vec![0, 1].into());
        let pass = Pass {
            model: &*net,
            parameters: &parameters,
            loss: Loss::CrossEntropy { label_smoothing: 0.0 },
            input,
            target,
            ctx,
            weight: 1.0,
            sync: Sync::Now,
        };
        let before = fake.log().len();
        autocast(DType::BF16, || strategy.pass(&pass)).unwrap();
        before
    };
    pass(0);
    let before = pass(1);
    let mut given = BTreeMap::new();
    for line in &fake.log()[before..] {
        let name = match line.as_str() {
            "phalanx_fake_enqueue" => "library",
            line if line.starts_with("cuMemcpy") || line.starts_with("cuMemset") => line,
            line => line.strip_prefix("launch ").unwrap_or("other"),
        };
        *given.entry(name.to_owned()).or_insert(0) += 1;
    }
    given.remove("other");
    given
}

/// The most launches and copies of a pass, by name, that a limit is set to, and of all together.
#[track_caller]
fn check(what: &str, given: &BTreeMap<String, usize>, most: &[(&str, usize)], most_of_all: usize) {
    for (name, most) in most {
        assert!(given.get(*name).copied().unwrap_or(0) <= *most, "{what}, {name}: {given:#?}");
    }
    let all: usize = given.values().sum();
    assert!(all <= most_of_all, "{what}: {all} of {most_of_all}: {given:#?}");
}

#[test]
fn a_pass_takes_few_launches() {
    let Some(fake) = fake() else { return };
    let mut net = ResNet::new(ResNetDepth::D18, ResNetStem::Imagenet, 10);
    let of_resnet = given(&fake, &mut net, |device| {
        let images = Tensor::ones(device, [2, 3, 32, 32], DType::F32);
        [images, Tensor::from_slice(device, &[1i64, 2], [2])]
    });
    // Twenty convolutions and one product, forward and back to both of their inputs; a batch norm takes one launch each way.
    let most = [
        ("batch_whole", 20),
        ("batch_whole_gradient", 20),
        ("library", 62),
        ("affine", 0),
        // What is made in 16 bits for the weights goes to where it belongs with few launches.
        ("from_bf16", 2),
        // Where a shortcut begins behind a batch norm that reads both gradients.
        ("add_assign", 1),
        ("spread_from_bf16", 2),
    ];
    check("ResNet-18", &of_resnet, &most, 121);
    let mut net = Gpt::new(GptConfig {
        layers: 2,
        heads: 2,
        width: 32,
        vocabulary: 64,
        context: 16,
        dropout: 0.0,
        ..GptConfig::default()
    });
    let of_gpt = given(&fake, &mut net, |device| {
        let ids: Vec<i64> = (0..32).collect();
        [0, 1].map(|_| Tensor::from_slice(device, &ids, [2, 16]))
    });
    check("a GPT of two blocks", &of_gpt, &[("library", 27), ("sum_in_float", 2)], 67);
}
