//! Gradients that are too large, cut before the optimizer sees them. Under DDP gradients are those of the global batch by
//! then, the same bits on all ranks, so all ranks cut alike without asking each other.

use super::Optimizer;
use phalanx_tensor::{Arena, Later, NormLimit};

/// How gradients are cut: each number by itself first, then all together.
///
/// ```
/// use phalanx_nn::optim::Clip;
///
/// let mut grads = [3.0, 4.0];
/// assert_eq!(Clip { norm: Some(2.5), value: None }.apply(&mut grads), Some(5.0));
/// assert!((grads[0] - 1.5).abs() < 1e-5 && (grads[1] - 2.0).abs() < 1e-5);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Default)]
pub struct Clip {
    /// The largest norm of all gradients together: PyTorch's `clip_grad_norm_`. Default: any.
    pub norm: Option<f64>,
    /// The largest absolute value of each number: PyTorch's `clip_grad_value_`. Default: any.
    pub value: Option<f64>,
}

/// Sums that go on beside each other, so that the machine can add several numbers at once. Their order is fixed, and so are
/// the bits of the result.
const LANES: usize = 16;

impl Clip {
    /// As [`Clip::apply`], wherever the gradients lie. On a GPU their squares are added up in another order, which sizes alone decide,
    /// and gradients that are too large together are cut by the next step of `optimizer`, which is to be by them, so that nobody waits.
    pub fn apply_to(&self, grads: &Arena, optimizer: &mut Optimizer) -> Option<Later> {
        if grads.device().gpu().is_none() {
            let norm = if *self == Clip::default() { None } else { self.apply(&mut grads.flat_mut::<f32>()) };
            return norm.map(Later::here);
        }
        if let Some(limit) = self.value {
            grads.clip_value(limit as f32);
        }
        let limit = self.norm?;
        let norm = grads.norm();
        optimizer.limit_next(NormLimit::new(&norm, limit));
        Some(norm.item_later())
    }

    /// Cuts `grads`; gives their norm before it was cut, if it is to be. Where that is no finite number, there is nothing to
    /// scale by, and they stay as they are.
    pub fn apply(&self, grads: &mut [f32]) -> Option<f64> {
        if let Some(limit) = self.value.map(|limit| limit as f32) {
            grads.iter_mut().for_each(|g| *g = g.clamp(-limit, limit));
        }
        let limit = self.norm?;
        let norm = sum_of_squares(grads).sqrt();
        scale(&mut [grads], limit, norm);
        Some(norm)
    }

    /// The first half of [`Clip::apply`], of some of the gradients: cuts each number, and gives the sum of their squares.
    pub fn cut(&self, grads: &mut [f32]) -> f64 {
        if let Some(limit) = self.value.map(|limit| limit as f32) {
            grads.iter_mut().for_each(|g| *g = g.clamp(-limit, limit));
        }
        if self.norm.is_some() { sum_of_squares(grads) } else { 0.0 }
    }

    /// The second half: what gradients are to be multiplied with, if at all, where the norm of all of them is this.
    pub fn factor(&self, norm: f64) -> Option<f32> {
        factor(self.norm?, norm)
    }

    /// As [`Clip::apply`] to gradients that are spread over ranks, of which these are this rank's: the first `counted` of them count
    /// here, the others on another rank that has them too. `sum` adds up a number over all ranks; it is asked only if there is a
    /// limit on the norm.
    pub fn apply_parts<E>(
        &self,
        parts: &mut [&mut [f32]],
        counted: usize,
        sum: impl FnOnce(f64) -> Result<f64, E>,
    ) -> Result<Option<f64>, E> {
        if let Some(limit) = self.value.map(|limit| limit as f32) {
            parts.iter_mut().flat_map(|part| part.iter_mut()).for_each(|g| *g = g.clamp(-limit, limit));
        }
        let Some(limit) = self.norm else { return Ok(None) };
        let norm = sum(parts[..counted].iter().map(|part| sum_of_squares(part)).sum())?.sqrt();
        scale(parts, limit, norm);
        Ok(Some(norm))
    }
}

/// Makes gradients of this norm have one of at most `limit`.
fn scale(parts: &mut [&mut [f32]], limit: f64, norm: f64) {
    if let Some(factor) = factor(limit, norm) {
        parts.iter_mut().flat_map(|part| part.iter_mut()).for_each(|g| *g *= factor);
    }
}

fn factor(limit: f64, norm: f64) -> Option<f32> {
    // What PyTorch divides by.
    let factor = limit / (norm + 1e-6);
    (factor < 1.0 && norm.is_finite()).then_some(factor as f32)
}

/// In float64: no gradient is too large or too many to be squared and added.
fn sum_of_squares(values: &[f32]) -> f64 {
    let square = |x: f32| f64::from(x) * f64::from(x);
    let (chunks, rest) = values.as_chunks::<LANES>();
    let mut sums = [0.0; LANES];
    for chunk in chunks {
        sums.iter_mut().zip(chunk).for_each(|(sum, &x)| *sum += square(x));
    }
    sums.iter().sum::<f64>() + rest.iter().map(|&x| square(x)).sum::<f64>()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rounding of float32.
    const TOLERANCE: f64 = 1e-6;

    fn numbers(value: &serde_json::Value) -> Vec<f64> {
        value.as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect()
    }

    #[test]
    fn gradients_are_cut_as_pytorch_cuts_them() {
        let golden: serde_json::Value =
            serde_json::from_str(include_str!("../../tests/golden/clip.json")).unwrap();
        let start = numbers(&golden["grads"]);
        for case in golden["cases"].as_array().unwrap() {
            let clip = Clip { norm: case["norm"].as_f64(), value: case["value"].as_f64() };
            let mut grads: Vec<f32> = start.iter().map(|&g| g as f32).collect();
            let total = clip.apply(&mut grads);
            assert_eq!(total.is_some(), clip.norm.is_some());
            if let Some(total) = total {
                let want = case["total"].as_f64().unwrap();
                assert!((total - want).abs() <= TOLERANCE * want, "{clip:?}: {total}, PyTorch {want}");
            }
            for (got, want) in grads.iter().zip(numbers(&case["grads"])) {
                assert!((f64::from(*got) - want).abs() <= TOLERANCE, "{clip:?}: {got}, PyTorch {want}");
            }
        }
    }

    #[test]
    fn a_norm_is_found_beyond_the_range_of_float32() {
        let mut grads = [3e38f32; 40];
        let total = Clip { norm: Some(1.0), value: None }.apply(&mut grads).unwrap();
        assert!((total / (40f64.sqrt() * 3e38) - 1.0).abs() < TOLERANCE);
        assert!((sum_of_squares(&grads).sqrt() - 1.0).abs() < TOLERANCE);
    }

    #[test]
    fn what_is_no_number_is_left_and_told() {
        for bad in [f32::NAN, f32::INFINITY] {
            let mut grads = [1.0, bad, 0.0];
            let total = Clip { norm: Some(0.5), value: None }.apply(&mut grads).unwrap();
            assert!(!total.is_finite() && (grads[0], grads[2]) == (1.0, 0.0));
        }
    }
}
