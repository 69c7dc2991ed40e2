//! Every op's gradient against central differences in float64.

use phalanx_tensor::cases::{self, Check, random};
use phalanx_tensor::{DType, Device, Tensor, backward, no_grad};

/// Half the distance of a central difference: its error is about STEP^2 from the formula and 1e-16 / STEP from rounding.
const STEP: f64 = 1e-5;
/// What both errors leave, relative to the largest gradient, with room for functions that bend strongly.
const TOLERANCE: f64 = 1e-7;

/// Compares the gradients of `sum(f(inputs) * weights)` with differences, on one and on two threads.
struct Differences;

impl Check for Differences {
    #[track_caller]
    fn check_at(&self, shift: f64, shapes: &[&[usize]], f: &dyn Fn(&[Tensor]) -> Tensor) {
        for threads in [1, 2] {
            let device = Device::cpu(threads);
            let like = Tensor::zeros(&device, [], DType::F64);
            let values: Vec<Tensor> =
                shapes.iter().enumerate().map(|(i, shape)| random(&like, shape, i as u64) + shift).collect();
            let leaves: Vec<Tensor> = values.iter().map(|v| v.clone().requires_grad()).collect();
            let out = f(&leaves);
            let weights = random(&like, out.dims(), 99);
            let mut grads = phalanx_tensor::Gradients::default();
            backward(&[(&out, Some(&weights))], &mut grads);
            let loss = |values: &[Tensor]| no_grad(|| (f(values) * &weights).sum_all().item());
            for (i, value) in values.iter().enumerate() {
                let got = grads.get(&leaves[i]).unwrap_or_else(|| panic!("input {i} got no gradient"));
                assert_eq!(got.dims(), value.dims(), "shape of the gradient of input {i}");
                let got = got.to_vec::<f64>();
                let plain = value.to_vec::<f64>();
                let scale = got.iter().fold(1.0, |a: f64, g| a.max(g.abs()));
                for j in 0..plain.len() {
                    let moved = |by: f64| {
                        let mut changed = plain.clone();
                        changed[j] += by;
                        let mut values = values.clone();
                        values[i] = Tensor::from_slice(&device, &changed, value.dims());
                        loss(&values)
                    };
                    let want = (moved(STEP) - moved(-STEP)) / (2.0 * STEP);
                    assert!(
                        (got[j] - want).abs() <= TOLERANCE * scale,
                        "input {i}, element {j}: gradient {}, by differences {want}, {threads} threads",
                        got[j]
                    );
                }
            }
        }
    }
}

#[test]
fn arithmetic_broadcasts() {
    cases::arithmetic_broadcasts(&Differences);
}

#[test]
fn functions() {
    cases::functions(&Differences);
}

#[test]
fn reductions() {
    cases::reductions(&Differences);
}

#[test]
fn views() {
    cases::views(&Differences);
}

#[test]
fn products() {
    cases::products(&Differences);
}

#[test]
fn convolutions() {
    cases::convolutions(&Differences);
}

#[test]
fn pooling() {
    cases::pooling(&Differences);
}

#[test]
fn softmaxes() {
    cases::softmaxes(&Differences);
}

#[test]
fn losses() {
    cases::losses(&Differences);
}

#[test]
fn choices() {
    cases::choices::choices(&Differences);
}

#[test]
fn embedding_and_norm() {
    cases::embedding_and_norm(&Differences);
}

#[test]
fn batch_norm() {
    cases::batch_norm(&Differences);
}

#[test]
fn dropouts() {
    cases::dropouts(&Differences);
}

#[test]
fn attention() {
    cases::attention(&Differences);
}

#[test]
fn a_value_used_twice_gets_both_gradients() {
    cases::a_value_used_twice_gets_both_gradients(&Differences);
}
