//! PyTorch's runs, reproduced: the same first values, samples and settings give the same losses, on any number of workers.

use phalanx::cores;
use phalanx::data::{BatchBuffers, Dataset, Places, Silent, Target, View, open};
use phalanx::nn::models::{MnistNet, ResNet, ResNet9, ResNetDepth, ResNetStem};
use phalanx::nn::optim::{Adam, AdamW, Rule, Sgd};
use phalanx::nn::{Linear, Loss, Module};
use phalanx::selftest::{Golden, unit};
use phalanx::tensor::Device;
use std::sync::Arc;

/// Images of 3 x side x side from the hash that first values come from; image j has label j % 10.
struct FormulaImages<const N: usize, const SIDE: usize>;

impl<const N: usize, const SIDE: usize> Dataset for FormulaImages<N, SIDE> {
    fn len(&self) -> usize {
        N
    }

    fn input_dims(&self) -> &[usize] {
        &[3, SIDE, SIDE]
    }

    fn target(&self) -> Target<'_> {
        Target::Classes(10)
    }

    fn batch(&self, indices: &[usize], into: &mut BatchBuffers) -> phalanx::data::Result<()> {
        let size = 3 * SIDE * SIDE;
        for (image, &j) in into.inputs().chunks_exact_mut(size).zip(indices) {
            image.iter_mut().enumerate().for_each(|(i, x)| *x = unit(1000, (j * size + i) as u64) as f32);
        }
        into.labels().iter_mut().zip(indices).for_each(|(label, &j)| *label = (j % 10) as i64);
        Ok(())
    }
}

fn named(data: &str) -> Arc<dyn Dataset> {
    open(data, View::default(), &Places::from_env(None), &mut Silent).unwrap().train
}

/// Trains on so many workers with the same global batch and holds every loss against PyTorch's.
#[track_caller]
fn check(all_workers: &[usize], golden: &Golden) {
    for &workers in all_workers {
        let device = |ranks: usize| Ok(Device::cpu((cores() / ranks).max(1)));
        let nearness = golden.run(workers, golden.steps(), &device).unwrap();
        assert_eq!(nearness.failure(), None, "on {workers} workers");
        assert!(nearness.norms.is_some(), "all steps were made");
    }
}

#[test]
fn mnist_with_sgd() {
    check(&[1, 2, 4], &Golden::mnist_sgd());
}

#[test]
fn a_run_that_is_another_is_found() {
    let golden = Golden { rule: Sgd { momentum: 0.4, ..Sgd::new(0.01) }.into(), ..Golden::mnist_sgd() };
    let nearness = golden.run(1, 5, &|_| Ok(Device::cpu(1))).unwrap();
    let failure = nearness.failure().unwrap();
    assert!(failure.contains("PyTorch's") && nearness.norms.is_none(), "{failure}");
}

#[test]
fn mnist_with_adamw() {
    let losses = include_str!("golden/mnist_adamw.txt");
    let (rule, data) = (AdamW::default().into(), named("mnist-mini"));
    check(
        &[1, 2, 4],
        &Golden { losses, rule, loss: Loss::Nll, batch: 64, data, model: || Box::new(MnistNet::new(0.0)) },
    );
}

#[test]
fn linear_regression() {
    let losses = include_str!("golden/linear_regression.txt");
    let (rule, data) = (Sgd::new(0.1).into(), named("linear-regression"));
    check(
        &[1, 2, 4],
        &Golden { losses, rule, loss: Loss::Mse, batch: 64, data, model: || Box::new(Linear::new(1, 1)) },
    );
}

/// One worker: with more, each normalises by its own share of the batch, as PyTorch's would.
fn check_resnet(losses: &'static str, rule: Rule) {
    let model: fn() -> Box<dyn Module> = || Box::new(ResNet::new(ResNetDepth::D18, ResNetStem::Imagenet, 10));
    let loss = Loss::CrossEntropy { label_smoothing: 0.0 };
    check(
        &[1, 2],
        &Golden { losses, rule, loss, batch: 16, data: Arc::new(FormulaImages::<128, 64>), model },
    );
}

#[test]
fn resnet18_with_sgd() {
    let rule = Sgd { momentum: 0.9, weight_decay: 0.0005, ..Sgd::new(0.001) };
    check_resnet(include_str!("golden/resnet18_sgd.txt"), rule.into());
}

#[test]
fn resnet18_with_adam() {
    check_resnet(include_str!("golden/resnet18_adam.txt"), Adam { lr: 1e-5, ..Adam::default() }.into());
}

/// `golden/resnet9.py` made the figures.
#[test]
fn resnet9_with_sgd() {
    let losses = include_str!("golden/resnet9_sgd.txt");
    let rule = Sgd { momentum: 0.9, nesterov: true, weight_decay: 0.0005, ..Sgd::new(0.0005) }.into();
    let loss = Loss::CrossEntropy { label_smoothing: 0.1 };
    let data = Arc::new(FormulaImages::<32, 32>);
    check(&[1, 2], &Golden { losses, rule, loss, batch: 4, data, model: || Box::new(ResNet9::new(10)) });
}
