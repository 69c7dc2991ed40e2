//! Every family of operations on a device, against a CPU in float64.

use super::{Finding, sheltered};
use phalanx_tensor::cases::{self, Check, edges, random};
use phalanx_tensor::{DType, Device, Gradients, Tensor, backward};
use std::cell::RefCell;

/// What a result in float32 may be off by: a hundred roundings of the largest number that takes part, which the sums of the cases
/// stay far below.
pub const TOLERANCE: f64 = 100.0 * f32::EPSILON as f64;

pub(super) fn all(device: &Device, tell: &mut dyn FnMut(Finding)) {
    for (name, family) in cases::families::<Beside>() {
        let beside = Beside { device: device.clone(), seen: RefCell::default() };
        let panicked = sheltered(|| family(&beside)).err();
        let Seen { cases, apart, failure } = beside.seen.into_inner();
        tell(finding(name, cases, apart, failure.or(panicked)));
    }
    for (name, edge) in edges::ALL {
        tell(finding(name, 1, 0.0, sheltered(|| edge(device)).err()));
    }
}

fn finding(name: &str, cases: usize, apart: f64, failure: Option<String>) -> Finding {
    let (name, dtype, tolerance) = (name.to_owned(), "f32", TOLERANCE);
    Finding::Operations { name, dtype, cases, apart, tolerance, failure }
}

/// Holds the device beside a CPU.
struct Beside {
    device: Device,
    seen: RefCell<Seen>,
}

/// What was seen of a family.
#[derive(Default)]
struct Seen {
    cases: usize,
    apart: f64,
    /// The first.
    failure: Option<String>,
}

impl Check for Beside {
    fn check_at(&self, shift: f64, shapes: &[&[usize]], f: impl Fn(&[Tensor]) -> Tensor) {
        let cpu = Device::cpu(1);
        let single = Tensor::zeros(&cpu, [], DType::F32);
        let values: Vec<Vec<f32>> =
            (0..).zip(shapes).map(|(i, shape)| (random(&single, shape, i) + shift).to_vec()).collect();
        let ours: Vec<Tensor> =
            values.iter().zip(shapes).map(|(v, shape)| Tensor::from_slice(&self.device, v, *shape)).collect();
        let wide = |values: &Vec<f32>| values.iter().map(|&x| f64::from(x)).collect::<Vec<f64>>();
        let theirs: Vec<Tensor> =
            values.iter().zip(shapes).map(|(v, shape)| Tensor::from_slice(&cpu, &wide(v), *shape)).collect();
        let (got, want) = (results(ours, &f), results(theirs, &f));
        let mut seen = self.seen.borrow_mut();
        seen.cases += 1;
        for (i, (got, want)) in got.iter().zip(&want).enumerate() {
            let what =
                if i == 0 { "the output".to_owned() } else { format!("the gradient of input {}", i - 1) };
            let apart = apart(&wide(&got.to_vec()), &want.to_vec());
            seen.apart = seen.apart.max(apart);
            if !(got.dims() == want.dims() && apart <= TOLERANCE) {
                let off = if apart.is_infinite() {
                    "is no number, or of another shape".to_owned()
                } else {
                    format!("is {apart:.1e} off")
                };
                seen.failure.get_or_insert_with(|| format!("{what} {off}, at shapes {shapes:?}"));
            }
        }
    }
}

/// The output of `f`, and the gradients of its inputs.
fn results(inputs: Vec<Tensor>, f: impl Fn(&[Tensor]) -> Tensor) -> Vec<Tensor> {
    let leaves: Vec<Tensor> = inputs.into_iter().map(Tensor::requires_grad).collect();
    let out = f(&leaves);
    let weights = random(&out, out.dims(), 99);
    let mut grads = Gradients::default();
    backward(&[(&out, Some(&weights))], &mut grads);
    let of_leaves = leaves.iter().map(|leaf| grads.get(leaf).expect("each input gets a gradient").clone());
    [out.detach()].into_iter().chain(of_leaves).collect()
}

/// The largest distance of two numbers, relative to the largest of `want` and 1; infinite where one is no number and the other is.
fn apart(got: &[f64], want: &[f64]) -> f64 {
    if got.len() != want.len() {
        return f64::INFINITY;
    }
    let scale = want.iter().filter(|x| x.is_finite()).fold(1.0, |scale: f64, x| scale.max(x.abs()));
    let of_two = |(got, want): (&f64, &f64)| match (got == want || got.is_nan() && want.is_nan(), got - want)
    {
        (true, _) => 0.0,
        (_, off) if off.is_finite() => off.abs() / scale,
        _ => f64::INFINITY,
    };
    got.iter().zip(want).map(of_two).fold(0.0, f64::max)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distances_are_relative_to_what_is_large() {
        assert_eq!(apart(&[1.0, 1002.0], &[1.0, 1000.0]), 0.002);
        assert_eq!(apart(&[0.5], &[0.25]), 0.25);
        assert_eq!(apart(&[f64::NAN, f64::INFINITY], &[f64::NAN, f64::INFINITY]), 0.0);
        for (got, want) in [([f64::NAN], [1.0]), ([1.0], [f64::NAN]), ([f64::INFINITY], [1.0])] {
            assert_eq!(apart(&got, &want), f64::INFINITY);
        }
        assert_eq!(apart(&[1.0], &[1.0, 2.0]), f64::INFINITY);
    }

    #[test]
    fn a_wrong_operation_is_found_and_named() {
        let beside = Beside { device: Device::cpu(1), seen: RefCell::default() };
        beside.check(&[&[3]], |x| x[0].square());
        assert!(beside.seen.borrow().failure.is_none());
        // The single-precision side is moved.
        beside.check(&[&[3], &[2]], |x| {
            let by = if x[0].dtype() == DType::F32 { 1e-3 } else { 0.0 };
            Tensor::cat(&[&(&x[0] + by), &x[1]], 0)
        });
        let failure = beside.seen.borrow().failure.clone().unwrap();
        assert!(
            ["the output", "1.0e-3", "[[3], [2]]"].iter().all(|part| failure.contains(part)),
            "{failure}"
        );
    }
}
