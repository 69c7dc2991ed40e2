//! Sums of elements along a dimension by a table: see [`crate::ops::resample`].

use crate::cpu::share;
use crate::dtype::{Float, with_float};
use crate::ops::resample::inner;
use crate::tensor::Tensor;

/// `out` = for each row of `table`, the sum of the elements along `dim` of `x` that it names; both are dense in the same order. What counts
/// nothing isn't looked at.
pub(crate) fn resample(x: &Tensor, dim: usize, table: &Tensor, out: &Tensor) {
    let _timer = out.device().time("interpolation");
    let [size, to] = [x, out].map(|tensor| tensor.dims()[dim]);
    let inner = inner(x, out, dim);
    if out.count() == 0 {
        return;
    }
    with_float!(out.dtype, "interpolate", T => {
        let (vx, mut vo) = (x.read_dense::<T>(), out.write_whole::<T>());
        let (vx, sums) = (&*vx, Sums::read(&table.read_contiguous::<T>("interpolate"), to));
        let device = out.device();
        // A line has all elements along the dimension of those that run faster.
        let (line, lines) = (to * inner, out.count() / (to * inner));
        let several = share(device, out.count()).div_ceil(inner);
        let rows = if inner == 1 { several.next_multiple_of(to) } else { several.min(lines * to) };
        device.for_chunks(&mut vo, rows * inner, |chunk, out| {
            let first = chunk * rows;
            device.arch().run(
                #[inline(always)]
                || match inner {
                    1 => {
                        let of_lines = vx[first / to * size..].chunks_exact(size);
                        of_lines.zip(out.chunks_exact_mut(line)).for_each(|(x, out)| sums.of_line(x, out));
                    }
                    _ => {
                        for (row, out) in (first..).zip(out.chunks_exact_mut(inner)) {
                            let (x, sum) = (&vx[row / to * size * inner..][..size * inner], row % to);
                            let weights = &sums.weights[sum * sums.taps..][..sums.taps];
                            sum_of_rows(&x[sums.firsts[sum] * inner..], weights, inner, out);
                        }
                    }
                },
            );
        });
    });
}

/// A table that was read.
struct Sums<T> {
    /// The first element that counts, for each sum.
    firsts: Vec<usize>,
    /// As many weights for each.
    weights: Vec<T>,
    taps: usize,
}

impl<T: Float> Sums<T> {
    fn read(table: &[T], sums: usize) -> Sums<T> {
        let rows = || table.chunks_exact(table.len() / sums);
        Sums {
            firsts: rows().map(|row| row[0].to_f64() as usize).collect(),
            weights: rows().flat_map(|row| &row[1..]).copied().collect(),
            taps: table.len() / sums - 1,
        }
    }

    /// The sums of single elements of a line.
    #[inline(always)]
    fn of_line(&self, x: &[T], out: &mut [T]) {
        match self.taps {
            1 => self.of_few::<1>(x, out),
            2 => self.of_few::<2>(x, out),
            4 => self.of_few::<4>(x, out),
            taps => {
                let weights = self.weights.chunks_exact(taps);
                for ((&first, weights), out) in self.firsts.iter().zip(weights).zip(out) {
                    *out = x[first..].iter().zip(weights).fold(T::ZERO, plus);
                }
            }
        }
    }

    #[inline(always)]
    fn of_few<const TAPS: usize>(&self, x: &[T], out: &mut [T]) {
        for ((&first, weights), out) in self.firsts.iter().zip(self.weights.as_chunks::<TAPS>().0).zip(out) {
            *out = x[first..first + TAPS].iter().zip(weights).fold(T::ZERO, plus);
        }
    }
}

#[inline(always)]
fn plus<T: Float>(sum: T, (&x, &weight): (&T, &T)) -> T {
    sum + if weight == T::ZERO { T::ZERO } else { x * weight }
}

/// The sum of rows of `inner` elements.
#[inline(always)]
fn sum_of_rows<T: Float>(x: &[T], weights: &[T], inner: usize, out: &mut [T]) {
    let rows = x.chunks_exact(inner).zip(weights);
    let mut counted = rows.filter(|(_, weight)| **weight != T::ZERO);
    let Some((a, &by)) = counted.next() else { return out.fill(T::ZERO) };
    match counted.next() {
        None => out.iter_mut().zip(a).for_each(|(out, &a)| *out = a * by),
        Some((b, &and)) => {
            out.iter_mut().zip(a.iter().zip(b)).for_each(|(out, (&a, &b))| *out = a * by + b * and);
        }
    }
    for (x, &by) in counted {
        out.iter_mut().zip(x).for_each(|(out, &x)| *out += x * by);
    }
}
