//! A device's results beside a CPU's in f64.

use crate::cases::random;
use crate::{DType, Device, Gradients, Tensor, backward};

/// How far a result was from what it should be.
#[derive(Clone, Debug, PartialEq)]
pub struct Apart {
    /// The output, or the gradient of an input.
    pub what: String,
    /// The largest distance of two numbers, relative to the largest of those that should be and 1; infinite where one is no number and the
    /// other is, or where there are more or fewer than there should be.
    pub by: f64,
}

/// What a result in this type may be off by, relative to the largest number that takes part: in f32 a hundred roundings, which the
/// sums of the cases stay far below; in floats of 16 bits eight, since all that is in between is f32, and a case is a few
/// operations with a rounding each.
pub fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::F32 => 100.0 * f64::from(f32::EPSILON),
        DType::BF16 => 8.0 / f64::from(1 << 8),
        DType::F16 => 8.0 / f64::from(1 << 11),
        DType::F64 | DType::I64 | DType::U8 => 0.0,
    }
}

/// The output and the gradients of `f` on `device` in `dtype` beside those of a CPU in f64, at random inputs between -1 and 1 that are moved
/// by `shift` and rounded to `dtype`.
#[track_caller]
pub fn beside(
    device: &Device,
    dtype: DType,
    shift: f64,
    shapes: &[&[usize]],
    f: &dyn Fn(&[Tensor]) -> Tensor,
) -> Vec<Apart> {
    let cpu = Device::cpu(1);
    let single = Tensor::zeros(&cpu, [], DType::F32);
    let values: Vec<Tensor> = (0..)
        .zip(shapes)
        .map(|(i, shape)| (random(&single, shape, i) + shift).cast(dtype).cast(DType::F64))
        .collect();
    let single_of = |x: &Tensor| x.cast(DType::F32).to_vec::<f32>();
    let ours = values.iter().map(|x| Tensor::from_slice(device, &single_of(x), *x.shape()).cast(dtype));
    let ours = results(ours.collect(), f, |out| random(out, out.dims(), 99));
    let theirs = results(values, f, |out| random(out, out.dims(), 99).cast(dtype).cast(DType::F64));
    let names = (0..).map(|i| match i {
        0 => "the output".to_owned(),
        _ => format!("the gradient of input {}", i - 1),
    });
    let of_two = |(ours, theirs): (&Tensor, &Tensor)| {
        let wide = |x: &Tensor| single_of(x).into_iter().map(f64::from).collect::<Vec<f64>>();
        if ours.dims() == theirs.dims() { apart(&wide(ours), &theirs.to_vec()) } else { f64::INFINITY }
    };
    let pairs = ours.iter().zip(&theirs).map(of_two);
    names.zip(pairs).map(|(what, by)| Apart { what, by }).collect()
}

/// The output of `f`, and the gradients of its inputs, each in its input's type.
fn results(
    inputs: Vec<Tensor>,
    f: &dyn Fn(&[Tensor]) -> Tensor,
    weights: impl Fn(&Tensor) -> Tensor,
) -> Vec<Tensor> {
    let leaves: Vec<Tensor> = inputs.into_iter().map(Tensor::requires_grad).collect();
    let out = f(&leaves);
    let mut grads = Gradients::default();
    backward(&[(&out, Some(&weights(&out.detach())))], &mut grads);
    let of_leaves = leaves.iter().map(|leaf| {
        let grad = grads.get(leaf).expect("each input gets a gradient").clone();
        assert_eq!(grad.dtype(), leaf.dtype(), "the type of a gradient");
        grad
    });
    [out.detach()].into_iter().chain(of_leaves).collect()
}

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
    fn a_wrong_operation_is_found_in_every_type() {
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            let apart = |off: f64| {
                let all = beside(&Device::cpu(1), dtype, 0.0, &[&[3], &[2]], &|x| {
                    // The side that is tried is moved.
                    let by = if x[0].dtype() == dtype { off } else { 0.0 };
                    Tensor::cat(&[&(&x[0] + by), &x[1]], 0)
                });
                assert_eq!(all.len(), 3);
                all[0].by
            };
            assert!(apart(0.0) <= tolerance(dtype), "{dtype}");
            assert!(apart(2.0 * tolerance(dtype)) > tolerance(dtype), "{dtype}");
        }
    }
}
