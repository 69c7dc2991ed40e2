//! Few rows through a weight: products whose left factor has so few rows that to lay out the right one for them, as the `gemm` crate
//! does, takes longer than it saves: a third to two thirds of the time for 64 to 16 rows.
//!
//! Where the weight lies in rows, one an output, as in `x w^T` on the way forward, the rows of `x` are laid out, side by side, and the
//! weight is read once as it lies: a tile of the transposed result has [`ByPanels`]' rows for outputs and its columns for rows of
//! `x`. A piece of [`DEPTH`] inputs of all rows stays in the second cache, and one of a few outputs in the first, while a tile
//! adds up.
//!
//! Where it lies in columns, as in `g w` on the way back, as many of them as a tile has and [`DEPTH`] of its rows are laid out at a
//! time, into the first cache, where all rows of `g` find them.

use crate::cpu::copy;
use crate::cpu::gemm::{Into, Mat, parts};
use crate::cpu::lanes::Lanes;
use crate::cpu::tile::{ByPanels, Columns, add_rows, add_to, by_panels, starts, store, zeros};
use crate::device::Device;
use crate::storage::Storage;
use pulp::{Simd, WithSimd};
use std::ops::Range;

/// Above so many rows the `gemm` crate is as fast, by how the weight lies.
const MOST_THROUGH_ROWS: usize = 128;
const MOST_THROUGH_COLUMNS: usize = 48;
/// Inputs of a piece.
const DEPTH: usize = 256;
/// Outputs that are gone through for all rows, as long as their piece of the weight stays in the cache.
const OUTPUTS: usize = 64;
/// Outputs of a thread are a multiple of this: no tile has more.
const TILE_ROWS: usize = 8;

/// Whether these are few rows through a weight that lies in rows or in columns, and there is something to add up.
pub(crate) fn takes<T>([m, n, k]: [usize; 3], a: &Mat<'_, T>, b: &Mat<'_, T>) -> bool {
    let most = match (b.row, b.col) {
        (1, _) => MOST_THROUGH_ROWS,
        (_, 1) => MOST_THROUGH_COLUMNS,
        _ => 0,
    };
    (1..=most).contains(&m) && n >= TILE_ROWS && k > 0 && a.col == 1
}

/// `dst (m, n) = a (m, k) b (k, n)` of sizes that it [`takes`], with `dst` in rows of `n`. The bits don't depend on the number of
/// threads.
pub(crate) fn few_rows<T: Lanes>(
    device: &Device,
    dst: &mut [T],
    sizes: [usize; 3],
    a: Mat<'_, T>,
    b: Mat<'_, T>,
    into: Into,
) {
    if b.row == 1 {
        through_rows(device, dst, sizes, a, b, into);
    } else {
        through_columns(device, dst, sizes, a, b, into);
    }
}

/// [`few_rows`] through a weight in columns: each thread has some rows.
fn through_columns<T: Lanes>(
    device: &Device,
    dst: &mut [T],
    [m, n, k]: [usize; 3],
    a: Mat<'_, T>,
    b: Mat<'_, T>,
    into: Into,
) {
    let Columns { lanes, panel } = device.arch().dispatch(Columns::of::<T>());
    let rows = m.div_ceil(parts(device, [m, n, k]));
    device.for_chunks(&mut dst[..m * n], rows * n, |i, dst| {
        let own = dst.len() / n;
        let room = Storage::stale(device, panel * (DEPTH + own) * size_of::<T>());
        let mut room = room.write::<T>();
        let (laid_out, sums) = room[..panel * (DEPTH + own)].split_at_mut(panel * DEPTH);
        for first in (0..n).step_by(panel) {
            let columns = panel.min(n - first);
            let width = columns.next_multiple_of(lanes);
            for from in (0..k).step_by(DEPTH) {
                let depth = DEPTH.min(k - from);
                for (row, to) in laid_out.chunks_exact_mut(width).take(depth).enumerate() {
                    to[..columns].copy_from_slice(&b.data[(from + row) * b.row + first..][..columns]);
                    to[columns..].fill(T::ZERO);
                }
                let a = Mat { data: &a.data[i * rows * a.row + from..], ..a };
                let (sums, is_first) = (&mut sums[..own * width], from == 0);
                let panel = Panel { sums, width, a, laid_out, depth, is_first };
                device.arch().dispatch(panel);
            }
            for (dst, sums) in dst.chunks_exact_mut(n).zip(sums.chunks_exact(width)) {
                put(&mut dst[first..first + columns], sums.iter(), into);
            }
        }
    });
}

/// Adds a piece of a weight's columns, laid out, to the sums of some rows, (rows, columns).
struct Panel<'a, T> {
    sums: &'a mut [T],
    width: usize,
    a: Mat<'a, T>,
    laid_out: &'a [T],
    depth: usize,
    /// Whether there are no sums yet.
    is_first: bool,
}

impl<T: Lanes> WithSimd for Panel<'_, T> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(mut self, simd: S) {
        by_panels(simd, self.width, &mut self, &());
    }
}

impl<T: Lanes> ByPanels<T> for Panel<'_, T> {
    type Pass = ();

    #[inline(always)]
    fn panel<S: Simd, const R: usize, const V: usize>(&mut self, simd: S, (): &(), column: usize) {
        let rows = self.sums.len() / self.width;
        for first in (0..rows).step_by(R) {
            let mut tile = zeros::<T, S, R, V>(simd);
            let starts = starts(first, rows, self.a.row);
            add_rows(simd, &mut tile, (self.a.data, starts), (self.laid_out, self.width), self.depth);
            let sums = &mut self.sums[first * self.width..];
            if self.is_first {
                store(&tile, sums, self.width, column);
            } else {
                add_to(simd, sums, self.width, column, &tile);
            }
        }
    }
}

/// [`few_rows`] through a weight in rows.
fn through_rows<T: Lanes>(
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
            device.arch().run(
                #[inline(always)]
                || {
                    copy::transpose(&a.data[first * a.row..], a.row, [rows, k], to, |input| input * columns);
                },
            );
        });
    }
    let (laid_out, mut sums) = (laid_out.read::<T>(), sums.write::<T>());
    let sums = &mut sums[..n * width];
    let parts = parts(device, [m, n, k]);
    let outputs = n.div_ceil(parts).next_multiple_of(TILE_ROWS);
    device.for_chunks(sums, outputs * width, |i, sums| {
        let weight = Mat { data: &b.data[i * outputs * b.col..], ..b };
        device.arch().dispatch(Sums { sums, rows: &laid_out[..width * k], weight, width, k });
    });
    let sums = &*sums;
    device.for_chunks(&mut dst[..m * n], m.div_ceil(parts) * n, |i, dst| {
        let first = i * m.div_ceil(parts);
        device.arch().run(
            #[inline(always)]
            || put_transposed(sums, width, first, dst, n, into),
        );
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
            let starts = starts(first, outputs.end, self.weight.col);
            let mut tile = zeros::<T, S, R, V>(simd);
            let weight = &self.weight.data[inputs.start..];
            add_rows(simd, &mut tile, (weight, starts), (panel, columns), inputs.len());
            let sums = &mut self.sums[first * self.width..outputs.end * self.width];
            if inputs.start == 0 {
                store(&tile, sums, self.width, column);
            } else {
                add_to(simd, sums, self.width, column, &tile);
            }
        }
    }
}

#[inline(always)]
fn put<'a, T: Lanes>(to: &mut [T], sums: impl Iterator<Item = &'a T>, into: Into) {
    for (to, &sum) in to.iter_mut().zip(sums) {
        *to = if into == Into::Add { *to + sum } else { sum };
    }
}

/// Puts or adds the sums of rows of x, from `first` on, to rows of `n` outputs.
#[inline(always)]
fn put_transposed<T: Lanes>(sums: &[T], width: usize, first: usize, dst: &mut [T], n: usize, into: Into) {
    const SIDE: usize = 16;
    let rows = dst.len() / n;
    for row in (0..rows).step_by(SIDE) {
        for output in (0..n).step_by(SIDE) {
            for i in row..rows.min(row + SIDE) {
                let sums = sums[output * width + first + i..].iter().step_by(width);
                put(&mut dst[i * n + output..i * n + n.min(output + SIDE)], sums, into);
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
            // Weights of more inputs or outputs than are used, and rows that lie apart.
            let (x, w) = (values(m * (k + 3), 1), values((n + 2) * (k + 2), 2));
            let (a, rows, columns) = (Mat::rows(&x, k + 3), Mat::rows(&w, k + 2).t(), Mat::rows(&w, n + 2));
            for (b, into) in
                [(rows, Into::Replace), (rows, Into::Add), (columns, Into::Replace), (columns, Into::Add)]
            {
                assert_eq!(takes([m, n, k], &a, &b), b.row == 1 || m <= MOST_THROUGH_COLUMNS);

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
