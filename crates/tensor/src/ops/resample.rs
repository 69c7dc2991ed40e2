//! Images of another size: each of their pixels is a sum of some that there are, along one dimension after the other.
//!
//! Which ones, and what each of them counts, is a table that follows from both sizes. A gradient goes back by the same table turned round,
//! and so through the same kernel.

use crate::device::{Backend, Device};
use crate::dtype::DType;
use crate::kernel;
use crate::op::Op;
use crate::ops::recorded;
use crate::tensor::Tensor;

/// How pixels are made of those that there are: the modes of PyTorch's `interpolate`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Interpolation {
    /// Each is a copy of the one that it begins in (`nearest`).
    #[default]
    Nearest,
    /// Each lies on the straight line between its neighbours (`linear`, `bilinear`, `trilinear`).
    Linear {
        /// Whether the middles of the first and of the last pixels stay where they are, and not the edges of the image.
        align_corners: bool,
    },
    /// Each lies on the cubic curve through two neighbours on either side (`bicubic`), which may go beyond them: of Keys' (1981), with
    /// a = -0.75.
    Cubic {
        /// As of [`Interpolation::Linear`].
        align_corners: bool,
    },
    /// Each is the mean of those that it covers, in part or whole (`area`).
    Area,
}

impl Tensor {
    /// The last dimensions with these sizes in their place: images (N, C, H, W) with two. Floats of 16 bits are rounded once a dimension.
    ///
    /// ```
    /// use phalanx_tensor::{Device, Interpolation, Tensor};
    /// let x = Tensor::from_slice(&Device::cpu(1), &[0.0f32, 4.0], [1, 1, 1, 2]);
    /// let y = x.interpolate(&[1, 4], Interpolation::Linear { align_corners: false });
    /// assert_eq!(y.to_vec::<f32>(), [0.0, 1.0, 3.0, 4.0]);
    /// ```
    #[track_caller]
    pub fn interpolate(&self, sizes: &[usize], how: Interpolation) -> Tensor {
        let dims = self.dims();
        let before = dims.len().checked_sub(sizes.len()).filter(|_| !sizes.is_empty()).unwrap_or_else(|| {
            panic!("interpolate: shape {} can't have {sizes:?} in the place of its last", self.shape())
        });
        let are_some =
            sizes.iter().zip(&dims[before..]).all(|(to, from)| SOME.contains(to) && SOME.contains(from));
        assert!(are_some, "interpolate: {} pixels of shape {} to {sizes:?}", sizes.len(), self.shape());
        let grows = sizes.iter().product::<usize>() > dims[before..].iter().product::<usize>();
        let resampled = |x: Tensor, i: usize| x.resampled(before + i, sizes[i], how);
        // The last dimension takes longest for each element, and is done where there are fewer of them.
        match grows {
            true => (0..sizes.len()).rev().fold(self.clone(), resampled),
            false => (0..sizes.len()).fold(self.clone(), resampled),
        }
    }

    #[track_caller]
    fn resampled(&self, dim: usize, to: usize, how: Interpolation) -> Tensor {
        let from = self.dims()[dim];
        if from == to {
            return self.clone();
        }
        let (x, sums) = (self.dense(), how.sums(from, to));
        let table = |sums: &[Sum], of: usize| table(x.device(), sums, of, x.dtype);
        let out = Tensor::stale_in(x.dense_order(), x.device(), x.shape().with(dim, to), x.dtype);
        kernel::resample::resample(&x, dim, &table(&sums, from), &out);
        recorded(out, Op::Resample { from: *x.shape(), dim }, &[&x], |_| {
            [Some(table(&turned(&sums, from), to))]
        })
    }
}

/// How many elements lie between two neighbours along `dim` in two tensors that are dense in the same order and of the same sizes but for
/// that one. Where a tensor has a single element along it its stride says nothing.
pub(crate) fn inner(x: &Tensor, out: &Tensor, dim: usize) -> usize {
    let longer = if x.dims()[dim] > 1 { x } else { out };
    longer.geometry.strides[dim]
}

/// How many pixels there may be along a dimension: their numbers are floats in a table.
const SOME: std::ops::Range<usize> = 1..1 << 24;

/// What an element is the sum of.
#[derive(Clone, Debug, PartialEq)]
struct Sum {
    /// The first that counts.
    first: usize,
    /// What it counts, and those behind it.
    weights: Vec<f64>,
}

impl Interpolation {
    /// What each of `to` elements is the sum of, where there are `from`.
    fn sums(self, from: usize, to: usize) -> Vec<Sum> {
        // Where the middle of element i lies among those that there are, if that of their first is 0.
        let place = |i: usize, align_corners: bool| match align_corners {
            true => (i * (from - 1)) as f64 / (to - 1).max(1) as f64,
            false => (i as f64 + 0.5) * from as f64 / to as f64 - 0.5,
        };
        let sum = |i: usize| match self {
            Interpolation::Nearest => Sum { first: i * from / to, weights: vec![1.0] },
            Interpolation::Linear { align_corners } => {
                let at = place(i, align_corners).clamp(0.0, (from - 1) as f64);
                let rest = at - at.floor();
                clamped(at.floor() as isize, &[1.0 - rest, rest], from)
            }
            Interpolation::Cubic { align_corners } => {
                let at = place(i, align_corners);
                let rest = at - at.floor();
                clamped(at.floor() as isize - 1, &[1.0 + rest, rest, 1.0 - rest, 2.0 - rest].map(cubic), from)
            }
            Interpolation::Area => {
                let (first, end) = (i * from / to, ((i + 1) * from).div_ceil(to));
                Sum { first, weights: vec![1.0 / (end - first) as f64; end - first] }
            }
        };
        (0..to).map(sum).collect()
    }
}

/// What an element at this distance from another counts for it.
fn cubic(distance: f64) -> f64 {
    const A: f64 = -0.75;
    match distance {
        d if d <= 1.0 => ((A + 2.0) * d - (A + 3.0)) * d * d + 1.0,
        d => ((A * d - 5.0 * A) * d + 8.0 * A) * d - 4.0 * A,
    }
}

/// The sum by these weights of as many elements from `first` on, where those beyond the edges of `of` stand for the ones at the edge.
fn clamped(first: isize, weights: &[f64], of: usize) -> Sum {
    let inside = |at: isize| at.clamp(0, of as isize - 1) as usize;
    let begin = inside(first);
    let mut sum =
        Sum { first: begin, weights: vec![0.0; inside(first + weights.len() as isize - 1) - begin + 1] };
    (first..).zip(weights).for_each(|(at, weight)| sum.weights[inside(at) - begin] += weight);
    sum
}

/// The sums of the other way: for each of `from` elements, those that it counts for, which lie side by side, and how much.
fn turned(sums: &[Sum], from: usize) -> Vec<Sum> {
    let mut turned = vec![Sum { first: 0, weights: Vec::new() }; from];
    for (i, sum) in sums.iter().enumerate() {
        for (&weight, back) in sum.weights.iter().zip(&mut turned[sum.first..]) {
            if back.weights.is_empty() {
                back.first = i;
            }
            back.weights.resize(i - back.first, 0.0);
            back.weights.push(weight);
        }
    }
    turned
}

/// As kernels read it: for each sum a row of numbers, the first element and the weights from it on, of which those that are too many are 0;
/// all within `of` elements.
fn table(device: &Device, sums: &[Sum], of: usize, dtype: DType) -> Tensor {
    let most = sums.iter().map(|sum| sum.weights.len()).max().unwrap_or_default();
    let mut numbers = Vec::with_capacity(sums.len() * (1 + most));
    for Sum { first, weights } in sums {
        let begin = (*first).min(of - most);
        numbers.push(begin as f64);
        numbers.extend(std::iter::repeat_n(0.0, first - begin));
        numbers.extend(weights);
        numbers.resize(numbers.len().next_multiple_of(1 + most), 0.0);
    }
    let shape = [sums.len(), 1 + most];
    match (dtype, device.backend()) {
        (DType::F64, Backend::Cpu) => Tensor::constant(device, &numbers, shape),
        _ => Tensor::constant(device, &numbers.iter().map(|&x| x as f32).collect::<Vec<_>>(), shape),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [Interpolation; 6] = [
        Interpolation::Nearest,
        Interpolation::Linear { align_corners: false },
        Interpolation::Linear { align_corners: true },
        Interpolation::Cubic { align_corners: false },
        Interpolation::Cubic { align_corners: true },
        Interpolation::Area,
    ];

    /// Weights of 1 in all, of elements that there are; and turned round each stands where it stood.
    #[test]
    fn tables_are_means_and_can_be_turned() {
        for (from, to) in [(1, 1), (1, 5), (5, 1), (2, 3), (3, 2), (4, 8), (8, 4), (7, 23), (23, 7), (5, 64)]
        {
            for how in ALL {
                let (sums, what) = (how.sums(from, to), format!("{how:?} of {from} to {to}"));
                let back = turned(&sums, from);
                assert!(sums.len() == to && back.len() == from, "{what}");
                for (i, sum) in sums.iter().enumerate() {
                    assert!(sum.first + sum.weights.len() <= from, "{what}: {sum:?}");
                    assert!((sum.weights.iter().sum::<f64>() - 1.0).abs() < 1e-12, "{what}: {sum:?}");
                    for (j, weight) in (sum.first..).zip(&sum.weights) {
                        assert_eq!(back[j].weights[i - back[j].first], *weight, "{what}: {j} in {i}");
                    }
                }
                let count =
                    |sums: &[Sum]| sums.iter().flat_map(|sum| &sum.weights).filter(|w| **w != 0.0).count();
                assert_eq!(count(&sums), count(&back), "{what}");
            }
        }
    }

    #[test]
    #[should_panic(expected = "interpolate: shape [4] can't have [2, 2] in the place of its last")]
    fn sizes_of_other_dimensions_are_named() {
        Tensor::zeros(&Device::cpu(1), [4], DType::F32).interpolate(&[2, 2], Interpolation::Nearest);
    }

    #[test]
    #[should_panic(expected = "interpolate: 2 pixels of shape [1, 4, 0] to [2, 2]")]
    fn images_without_pixels_are_named() {
        Tensor::zeros(&Device::cpu(1), [1, 4, 0], DType::F32).interpolate(&[2, 2], Interpolation::Area);
    }
}
