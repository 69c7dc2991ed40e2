//! PyTorch's runs, reproduced: the same first values, samples and settings give the same losses, on any number of workers.

use phalanx::cores;
use phalanx::nn::optim::Sgd;
use phalanx::selftest::Golden;
use phalanx::tensor::Device;

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
    check(&[1, 2, 4], &Golden::mnist_adamw());
}

#[test]
fn linear_regression() {
    check(&[1, 2, 4], &Golden::linear_regression());
}

#[test]
fn resnet18_with_sgd() {
    check(&[1, 2], &Golden::resnet18_sgd());
}

#[test]
fn resnet18_with_adam() {
    check(&[1, 2], &Golden::resnet18_adam());
}

#[test]
fn resnet9_with_sgd() {
    check(&[1, 2], &Golden::resnet9_sgd());
}
