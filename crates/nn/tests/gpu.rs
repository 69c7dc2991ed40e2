//! Models and optimizers on a GPU, against the same on a CPU: on the fake driver, or on the real GPU whose number
//! `PHALANX_TEST_GPU` is. Without either, where there is no C++ compiler, tests say so and pass.

use phalanx_cuda::{KERNELS, Source};
use phalanx_fake_cuda::{FakeCuda, Module as Kernels};
use phalanx_nn::models::{BasicBlock, Gpt, GptConfig, MnistNet};
use phalanx_nn::optim::{Adadelta, Adam, AdamW, Clip, Group, Members, Optimizer, RmsProp, Rule, Sgd};
use phalanx_nn::{
    AdaptiveAvgPool2d, BatchNorm2d, Conv2d, Ctx, Flatten, Linear, Module, Parameters, Sequential, Weights,
    freeze,
};
use phalanx_tensor::{DType, Device, GpuOptions, GradSink, LeafId, Philox, Tensor, autocast, backward};
use std::path::Path;
use std::sync::Arc;

/// What losses may be off by: roundings of float32, which steps carry on and rarely make larger.
const TOLERANCE: f64 = 2e-4;

/// A GPU, and the driver that it is of unless that is the real one; none, said aloud, where there is none to be had.
fn gpu() -> Option<(Device, Option<FakeCuda>)> {
    if let Ok(named) = std::env::var("PHALANX_TEST_GPU") {
        let libraries = std::env::var_os("PHALANX_TEST_CUDA_LIBRARIES");
        let libraries = libraries.iter().flat_map(std::env::split_paths).collect();
        let index = named.parse().expect("PHALANX_TEST_GPU: the number of a GPU would do");
        let options = GpuOptions { libraries, ..GpuOptions::default() };
        return Some((Device::cuda(index, &options).unwrap_or_else(|error| panic!("{error}")), None));
    }
    let modules = Source::ALL.into_iter().flat_map(|source| {
        source.elements().iter().map(move |element| Kernels {
            file: source.file(),
            element: element.in_source(),
            kernels: KERNELS
                .iter()
                .filter(|kernel| kernel.source == source)
                .map(|kernel| kernel.name)
                .collect(),
        })
    });
    let kernels = Path::new(env!("CARGO_MANIFEST_DIR")).join("../cuda/kernels");
    let fake = FakeCuda::new(Path::new(env!("CARGO_TARGET_TMPDIR")), &kernels, &modules.collect::<Vec<_>>())?;
    let options = GpuOptions { libraries: vec![fake.folder().to_owned()], ..GpuOptions::default() };
    let device = Device::cuda(0, &options).unwrap_or_else(|error| panic!("{error}"));
    Some((device, Some(fake)))
}

struct Nobody;

impl GradSink for Nobody {
    fn finished(&mut self, _: LeafId, _: Tensor) {}
}

/// Losses of four steps, and what the parameters are after them.
fn trained(net: &mut dyn Module, image: [usize; 3], device: &Device) -> (Vec<f64>, Vec<f32>) {
    const BATCH: usize = 4;
    let parameters = Parameters::build(net, device, 0);
    let mut optimizer = Optimizer::new(Sgd { momentum: 0.5, ..Sgd::new(0.05) }).unwrap();
    let undecayed = Group { of: Members::NormsAndBiases, lr: 1.0, weight_decay: 0.0 };
    optimizer.group(&[undecayed], &parameters).unwrap();
    let [c, h, w] = image;
    let x = Tensor::uniform(device, [BATCH, c, h, w], 0.0, 1.0, DType::F32, Philox::new(1, 0));
    let labels = Tensor::from_slice(device, &(0..BATCH as i64).collect::<Vec<_>>(), [BATCH]);
    let samples: Arc<[u64]> = (0..BATCH as u64).collect();
    let losses: Vec<Tensor> = (0..4)
        .map(|step| {
            let out = net.forward(&x, &mut Ctx::train(0, step, Arc::clone(&samples)));
            let loss = out.cross_entropy(&labels, 0.0);
            parameters.grads().zero();
            backward(&[(&loss, None)], &mut Nobody);
            parameters.grads().settle();
            optimizer.step_arenas(parameters.values(), parameters.grads().arena(), 1.0);
            loss.detach()
        })
        .collect();
    let weights = parameters.to_weights();
    let after = parameters.names().iter().flat_map(|name| weights.get(name).unwrap().1.to_vec()).collect();
    (losses.iter().map(Tensor::item).collect(), after)
}

#[track_caller]
fn check(net: impl Fn() -> Box<dyn Module>, image: [usize; 3]) {
    let Some((device, fake)) = gpu() else { return };
    let (losses, after) = trained(&mut *net(), image, &device);
    let (want, want_after) = trained(&mut *net(), image, &Device::cpu(1));
    for (got, want) in losses.iter().zip(&want) {
        assert!((got - want).abs() <= TOLERANCE * want, "losses {losses:?}, not {want}");
    }
    for (got, want) in after.iter().zip(&want_after) {
        assert!(f64::from((got - want).abs()) <= TOLERANCE, "a parameter is {got}, not {want}");
    }
    assert_eq!(after.len(), want_after.len());
    drop(device);
    fake.into_iter().for_each(|fake| assert_eq!(fake.damage(), [""; 0]));
}

#[test]
fn a_step_of_many_groups_is_one_copy_and_one_launch() {
    let Some((device, Some(fake))) = gpu() else { return };
    let mut net = Sequential::new().then(Linear::new(3, 4)).then(Linear::new(4, 5)).then(Linear::new(5, 2));
    let parameters = Parameters::build(&mut net, &device, 0);
    let mut optimizer = Optimizer::new(AdamW::default()).unwrap();
    let undecayed = Group { of: Members::NormsAndBiases, lr: 1.0, weight_decay: 0.0 };
    optimizer.group(&[undecayed], &parameters).unwrap();
    parameters.grads().zero();
    parameters.grads().settle();
    let calls = || ["cuLaunchKernel", "cuMemcpyHtoDAsync_v2"].map(|call| fake.calls(call));
    for step in 0..3 {
        let before = calls();
        optimizer.step_arenas(parameters.values(), parameters.grads().arena(), 1.0);
        assert_eq!(calls(), before.map(|calls| calls + 1), "step {step} of six ranges");
    }
}

/// The first, one in the middle and the last, of which the decay would move each; groups of other factors lie between.
#[test]
fn what_is_frozen_stays_and_the_rest_moves_as_on_a_cpu() {
    let Some((gpu, fake)) = gpu() else { return };
    let undecayed = Group { of: Members::NormsAndBiases, lr: 0.5, weight_decay: 0.0 };
    for (groups, frozen) in [
        (&[][..], &["0.*", "1.bias", "3.*"][..]),
        (&[undecayed][..], &["0.weight", "1.*", "3.bias"]),
        (&[][..], &["0.*"]),
        (&[][..], &["1.weight", "2.weight"]),
    ] {
        let moved = |device: &Device| {
            let mut net = Sequential::new().then(Linear::new(3, 40)).then(Linear::new(40, 5));
            net = net.then(Linear::new(5, 7)).then(Linear::new(7, 2));
            freeze(&mut net, frozen).unwrap();
            let parameters = Parameters::build(&mut net, device, 0);
            let rule = AdamW { weight_decay: 0.3, ..AdamW::default() };
            let mut optimizer = Optimizer::new(rule).unwrap();
            optimizer.group(groups, &parameters).unwrap();
            let first = parameters.to_weights();
            // Squares that add up alike in any order, so that the norm has the same bits.
            let grads: Vec<f32> =
                (0..parameters.layout().len()).map(|i| if i % 3 == 0 { 0.5 } else { -0.25 }).collect();
            for clip in [None, Some(0.5), Some(1e6)] {
                parameters.grads().zero();
                parameters.grads().settle();
                if clip.is_some() {
                    parameters.grads().arena().write_flat(&grads);
                    let norm = Clip { norm: clip, value: None }
                        .apply_to(parameters.grads().arena(), &mut optimizer)
                        .expect("it is limited");
                    assert!(norm.item() > 1.0);
                }
                optimizer.step_arenas(parameters.values(), parameters.grads().arena(), 1.0);
            }
            let (last, moments) = (parameters.to_weights(), optimizer.to_weights(&parameters));
            for name in parameters.names() {
                let is_frozen = parameters.is_frozen(parameters.index_of(name).unwrap());
                assert_eq!(first.get(name) == last.get(name), is_frozen, "{frozen:?}: {name}");
            }
            let all = |weights: &Weights| -> Vec<(String, Vec<f32>)> {
                weights.names().map(|name| (name.to_owned(), weights.get(name).unwrap().1.to_vec())).collect()
            };
            (all(&last), all(&moments))
        };
        assert_eq!(moved(&gpu), moved(&Device::cpu(1)), "{frozen:?}");
    }
    drop(gpu);
    fake.into_iter().for_each(|fake| assert_eq!(fake.damage(), [""; 0]));
}

#[test]
fn the_tutorials_network_trains_as_on_a_cpu() {
    check(|| Box::new(MnistNet::new(0.5)), [1, 28, 28]);
}

#[test]
fn residual_blocks_train_as_on_a_cpu() {
    let net = || -> Box<dyn Module> {
        Box::new(
            Sequential::new()
                .then(Conv2d::new(3, 16, 3).padding(1))
                .then(BatchNorm2d::new(16))
                .then(BasicBlock::new(16, 16, 1))
                .then(BasicBlock::new(16, 32, 2))
                .then(AdaptiveAvgPool2d([1, 1]))
                .then(Flatten)
                .then(Linear::new(32, 10)),
        )
    };
    check(net, [3, 8, 8]);
}

#[test]
fn every_rule_comes_to_the_bits_of_a_cpu_and_goes_on_from_its_state() {
    let Some((device, fake)) = gpu() else { return };
    let rules: [Rule; 9] = [
        Sgd { weight_decay: 0.01, ..Sgd::new(0.1) }.into(),
        Sgd { momentum: 0.9, dampening: 0.1, ..Sgd::new(0.1) }.into(),
        Sgd { momentum: 0.9, nesterov: true, ..Sgd::new(0.1) }.into(),
        Adam { weight_decay: 0.01, ..Adam::default() }.into(),
        AdamW::default().into(),
        Adadelta { weight_decay: 0.01, ..Adadelta::default() }.into(),
        RmsProp::default().into(),
        RmsProp { momentum: 0.5, ..RmsProp::default() }.into(),
        RmsProp { momentum: 0.5, centered: true, ..RmsProp::default() }.into(),
    ];
    for rule in rules {
        let run = |device: &Device| {
            let parameters = Parameters::build(&mut Linear::new(7, 5), device, 3);
            let mut optimizer = Optimizer::new(rule).unwrap();
            let n = parameters.layout().len();
            for step in 0..4u64 {
                if step == 2 {
                    // As from a checkpoint.
                    let weights = optimizer.to_weights(&parameters);
                    optimizer = Optimizer::resume(rule, &parameters, &weights).unwrap();
                }
                let grads: Vec<f32> = (0..n).map(|i| Philox::new(4, step).unit(i as u64) - 0.5).collect();
                parameters.grads().arena().write_flat(&grads);
                optimizer.step_arenas(parameters.values(), parameters.grads().arena(), 0.5);
            }
            let weights = parameters.to_weights();
            parameters
                .names()
                .iter()
                .flat_map(|name| weights.get(name).unwrap().1.to_vec())
                .collect::<Vec<f32>>()
        };
        assert_eq!(run(&device), run(&Device::cpu(1)), "{rule:?}");
    }
    drop(device);
    fake.into_iter().for_each(|fake| assert_eq!(fake.damage(), [""; 0]));
}

/// Whatever moves, by whichever rule: what products are made of is the weights as they are, without a launch of its own.
#[test]
fn casts_of_weights_move_with_them() {
    let Some((device, fake)) = gpu() else { return };
    let rules: [Rule; 4] = [
        Sgd::new(0.1).into(),
        AdamW::default().into(),
        RmsProp::default().into(),
        Adadelta::default().into(),
    ];
    for (rule, dtype) in rules.into_iter().zip([DType::BF16, DType::F16].into_iter().cycle()) {
        let mut net =
            Sequential::new().then(Linear::new(9, 7)).then(Linear::new(7, 5)).then(Linear::new(5, 3));
        freeze(&mut net, &["1.*"]).unwrap();
        let parameters = Parameters::build(&mut net, &device, 0);
        let mut optimizer = Optimizer::new(rule).unwrap();
        let undecayed = Group { of: Members::NormsAndBiases, lr: 2.0, weight_decay: 0.0 };
        optimizer.group(&[undecayed], &parameters).unwrap();
        let x = Tensor::uniform(&device, [4, 9], -1.0, 1.0, DType::F32, Philox::new(1, 0));
        let casts = || {
            fake.iter()
                .map(|fake| fake.log().iter().filter(|l| *l == "launch from_f32").count())
                .sum::<usize>()
        };
        let mut made = Vec::new();
        for step in 0..4 {
            let before = casts();
            parameters.grads().zero();
            let loss = autocast(dtype, || net.forward(&x, &mut Ctx::eval()).square().mean_all());
            backward(&[(&loss, None)], &mut Nobody);
            parameters.grads().settle();
            made.push(casts() - before);
            let (values, grads) = (parameters.values(), parameters.grads());
            assert!(grads.casts_of_now(values).is_some(), "the pass wanted them");
            optimizer.step_parameters(&parameters, 1.0);
            assert!(
                grads.is_cast(0, values) && grads.casts_of_now(values).is_none(),
                "nobody wants them yet"
            );
            let of_now = parameters.grads().casts().unwrap();
            let same = (0..parameters.layout().count()).all(|i| {
                let value = parameters.values().tensor(i);
                let value = Tensor::from_slice(&Device::cpu(1), &value.to_vec::<f32>(), *value.shape());
                let want = value.cast(dtype).cast(DType::F32).to_vec::<f32>();
                of_now.tensor(i).cast(DType::F32).to_vec::<f32>() == want
            });
            assert!(same, "{rule:?} after step {step}");
            // Somebody who writes a weight himself has it cast when it is wanted.
            if step == 2 {
                parameters.values().tensor(0).fill(0.5);
            }
        }
        // Once nobody does, they aren't written any more.
        optimizer.step_parameters(&parameters, 1.0);
        assert!(!parameters.grads().is_cast(0, parameters.values()), "{rule:?}");
        if fake.is_some() {
            assert_eq!(made, [made[1] + 1, made[1], made[1], made[1] + 1], "{rule:?}");
        }
    }
    drop(device);
    fake.into_iter().for_each(|fake| assert_eq!(fake.damage(), [""; 0]));
}

#[test]
fn a_steady_step_of_a_model_takes_no_memory_and_waits_for_nothing() {
    let Some((device, fake)) = gpu() else { return };
    let Some(fake) = fake else { return eprintln!("skipped: a real GPU counts nothing") };
    let costs = || {
        ["cuMemAlloc_v2", "cuMemHostAlloc", "cuStreamSynchronize", "cuCtxSynchronize", "cuEventSynchronize"]
            .map(|call| fake.calls(call))
    };
    let mut net = MnistNet::new(0.5);
    let parameters = Parameters::build(&mut net, &device, 0);
    let mut optimizer = Optimizer::new(AdamW::default()).unwrap();
    let x = Tensor::uniform(&device, [2, 1, 28, 28], 0.0, 1.0, DType::F32, Philox::new(1, 0));
    let labels = Tensor::from_slice(&device, &[3i64, 4], [2]);
    let samples: Arc<[u64]> = Arc::from([7, 8]);
    for step in 0..6 {
        let before = costs();
        let out = net.forward(&x, &mut Ctx::train(0, step, Arc::clone(&samples)));
        parameters.grads().zero();
        backward(&[(&out.cross_entropy(&labels, 0.0), None)], &mut Nobody);
        optimizer.step_arenas(parameters.values(), parameters.grads().arena(), 1.0);
        if step >= 3 {
            assert_eq!(costs(), before, "step {step}");
        }
        // A GPU would have got on meanwhile.
        device.gpu().unwrap().synchronize().unwrap();
    }
}

/// The loss of a decoder in bfloat16, and the sum of squares of its gradients.
fn decoded(device: &Device) -> [f64; 2] {
    let config = GptConfig {
        layers: 2,
        width: 16,
        heads: 2,
        context: 8,
        vocabulary: 32,
        dropout: 0.0,
        ..GptConfig::default()
    };
    let mut gpt = Gpt::new(config);
    let parameters = Parameters::build(&mut gpt, device, 0);
    let ids: Vec<i64> = (0..24).map(|i| i * i % 31).collect();
    let [x, labels] = [[3, 8].as_slice(), &[24]].map(|shape| Tensor::from_slice(device, &ids, shape));
    let of_pass = || {
        gpt.forward(&x, &mut Ctx::train(0, 0, [0, 1, 2].into())).reshape([24, 32]).cross_entropy(&labels, 0.0)
    };
    let loss = autocast(DType::BF16, of_pass);
    parameters.grads().zero();
    backward(&[(&loss, None)], &mut Nobody);
    parameters.grads().settle();
    let squares =
        (0..parameters.names().len()).map(|i| parameters.grads().arena().tensor(i).square().sum_all().item());
    [loss.item(), squares.sum()]
}

#[test]
fn a_decoders_gelu_is_part_of_its_products_in_16_bits() {
    let Some((device, fake)) = gpu() else { return };
    let want = decoded(&Device::cpu(1));
    for (got, want) in decoded(&device).into_iter().zip(want) {
        // A few roundings of bfloat16.
        assert!((got - want).abs() <= 0.02 * want, "{got}, not {want}");
    }
    let Some(fake) = fake else { return };
    assert!(!fake.log().iter().any(|line| line.starts_with("launch gelu")), "{:?}", fake.log());
    // Forth and back, in each of the blocks.
    let given = |epilogue| fake.cublaslt().log().iter().filter(|line| line.ends_with(epilogue)).count();
    assert_eq!([given("epilogue=164"), given("epilogue=192")], [2, 2]);
}
