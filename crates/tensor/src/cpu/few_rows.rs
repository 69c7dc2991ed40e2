//! Few rows through a weight: `x w^T` where `x` has so few rows that to lay out the weight for a product, as the `gemm` crate does
//! with one of both factors, takes longer than it saves: a third to two thirds of the time for 64 to 16 rows.
//!
//! Here the rows of `x` are laid out, side by side, and the weight is read once as it lies: a tile of the transposed result has
//! [`ByPanels`]' rows for outputs and its columns for rows of `x`. A piece of [`DEPTH`] inputs of all rows stays in the second cache,
//! and one of a few outputs in the first, while a tile adds up.

use crate::cpu::gemm::{Into, Mat, work};
use crate::cpu::lanes::Lanes;
use crate::cpu::tile::{ByPanels, Columns, add_rows, add_to, by_panels, store, zeros};
use crate::cpu::{SERIAL_LIMIT, copy};
use crate::device::Device;
use crate::storage::Storage;
use pulp::{Simd, WithSimd};
use std::ops::Range;

/// Above this many rows the `gemm` crate is as fast.
const MOST_ROWS: usize = 128;
/// Inputs of a piece.
const DEPTH: usize = 256;
/// Outputs that are gone through for all rows, as long as their piece of the weight stays in the cache.
const OUTPUTS: usize = 64;
/// Outputs of a thread are a multiple of this: no tile has more.
const TILE_ROWS: usize = 8;

/// Whether these are few rows through a weight that lies in rows.
pub(crate) fn takes<T>([m, n, _]: [usize; 3], a: &Mat<'_, T>, b: &Mat<'_, T>) -> bool {
    (1..=MOST_ROWS).contains(&m) && n >= TILE_ROWS && a.col == 1 && b.row == 1
}

/// `dst (m, n) = a (m, k) b (k, n)` of sizes that it [`takes`], with `dst` in rows of `n`. The bits don't depend on the number of
/// threads.
pub(crate) fn few_rows<T: Lanes>(
    device: &Device,
    dst: &mut [T],
    [m, n, k]: [usize; 3],
    a: Mat<'_, T>,
    b: Mat<'_, T>,
    into: Into,
) {
    let Columns { lanes, panel } = device.arch().dispatch(Columns::of::<T>());
    let width = m.next_multiple_of(lanes);
    let [laid_out, sums] = [width * k, n * width].map(|count| Storage::stale(device, count * size_of::<T>()));
    {
        let mut laid_out = laid_out.write::<T>();
        device.for_chunks(&mut laid_out[..width * k], panel * k, |i, to| {
            let (first, columns) = (i * panel, to.len() / k);
            let rows = columns.min(m - first);
            if rows < columns {
                to.fill(T::ZERO);
            }
            device.arch().dispatch(|| {
                copy::transpose(&a.data[first * a.row..], a.row, [rows, k], to, |input| input * columns);
            });
        });
    }
    let (laid_out, mut sums) = (laid_out.read::<T>(), sums.write::<T>());
    let sums = &mut sums[..n * width];
    let parts = if work([m, n, k]) < 4 * SERIAL_LIMIT { 1 } else { device.threads() };
    let outputs = n.div_ceil(parts).next_multiple_of(TILE_ROWS);
    device.for_chunks(sums, outputs * width, |i, sums| {
        let weight = Mat { data: &b.data[i * outputs * b.col..], ..b };
        device.arch().dispatch(Sums { sums, rows: &laid_out[..width * k], weight, width, k });
    });
    let sums = &*sums;
    device.for_chunks(&mut dst[..m * n], m.div_ceil(parts) * n, |i, dst| {
        let first = i * m.div_ceil(parts);
        device.arch().dispatch(|| put(sums, width, first, dst, n, into));
    });
}

/// The sums of some outputs, (outputs, rows of x), transposed.
struct Sums<'a, T> {
    sums: &'a mut [T],
    /// Rows of x in panels: (panel, input, row).
    rows: &'a [T],
    /// From the first of these outputs on.
    weight: Mat<'a, T>,
    width: usize,
    k: usize,
}

impl<T: Lanes> WithSimd for Sums<'_, T> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(mut self, simd: S) {
        let outputs = self.sums.len() / self.width;
        for from in (0..self.k).step_by(DEPTH) {
            let inputs = from..self.k.min(from + DEPTH);
            for first in (0..outputs).step_by(OUTPUTS) {
                let pass = (inputs.clone(), first..outputs.min(first + OUTPUTS));
                by_panels(simd, self.width, &mut self, &pass);
            }
        }
    }
}

impl<T: Lanes> ByPanels<T> for Sums<'_, T> {
    /// Inputs and outputs.
    type Pass = (Range<usize>, Range<usize>);

    #[inline(always)]
    fn panel<S: Simd, const R: usize, const V: usize>(
        &mut self,
        simd: S,
        (inputs, outputs): &(Range<usize>, Range<usize>),
        column: usize,
    ) {
        let columns = V * T::lanes::<S>();
        let panel = &self.rows[column * self.k + inputs.start * columns..];
        for first in outputs.clone().step_by(R) {
            // A short last tile computes its last output again, which isn't stored.
            let mut starts = [0; R];
            for (i, start) in starts.iter_mut().enumerate() {
                *start = (first + i).min(outputs.end - 1) * self.weight.col + inputs.start;
            }
            let mut tile = zeros::<T, S, R, V>(simd);
            add_rows(simd, &mut tile, (self.weight.data, starts), (panel, columns), inputs.len());
            let sums = &mut self.sums[first * self.width..outputs.end * self.width];
            if inputs.start == 0 {
                store(&tile, sums, self.width, column);
            } else {
                add_to(simd, sums, self.width, column, &tile);
            }
        }
    }
}

/// Puts or adds the sums of rows of x, from `first` on, to rows of `n` outputs.
#[inline(always)]
fn put<T: Lanes>(sums: &[T], width: usize, first: usize, dst: &mut [T], n: usize, into: Into) {
    const SIDE: usize = 16;
    let rows = dst.len() / n;
    for row in (0..rows).step_by(SIDE) {
        for output in (0..n).step_by(SIDE) {
            for i in row..rows.min(row + SIDE) {
                let sums = sums[output * width + first + i..].iter().step_by(width);
                let to = &mut dst[i * n + output..(i + 1) * n];
                for (to, &sum) in to.iter_mut().take(SIDE).zip(sums) {
                    *to = if into == Into::Add { *to + sum } else { sum };
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::gemm::gemm;
    use crate::philox::Philox;

    #[test]
    fn every_size_agrees_with_the_crate_and_has_the_same_bits_on_any_number_of_threads() {
        for (m, n, k) in [(1, 8, 1), (3, 9, 7), (16, 64, 256), (17, 100, 300), (33, 131, 513), (128, 24, 64)]
        {
            let values = |count: usize, stream: u64| -> Vec<f64> {
                let random = Philox::new(1, stream);
                (0..count as u64).map(|i| f64::from(random.unit(i)) - 0.5).collect()
            };
            // Weights of more inputs than are used, and rows that lie apart.
            let (x, w) = (values(m * (k + 3), 1), values(n * (k + 2), 2));
            let (a, b) = (Mat::rows(&x, k + 3), Mat::rows(&w, k + 2).t());
            assert!(takes([m, n, k], &a, &b));
            for into in [Into::Replace, Into::Add] {
                let product = |threads: usize| {
                    let mut dst = vec![2.0; m * n];
                    few_rows(&Device::cpu(threads), &mut dst, [m, n, k], a, b, into);
                    dst
                };
                let mut expected = vec![2.0; m * n];
                gemm(&mut expected, [m, n, k], a, b, into);
                let alone = product(1);
                let close = |(x, y): (&f64, &f64)| (x - y).abs() < 1e-12;
                assert!(alone.iter().zip(&expected).all(close), "({m}, {k}) x ({k}, {n})");
                for threads in [2, 3, 7] {
                    assert!(product(threads) == alone, "({m}, {k}) x ({k}, {n}) on {threads} threads");
                }
            }
        }
    }
}
