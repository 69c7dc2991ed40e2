//! Small matrix products. The `gemm` crate takes fresh memory for its packed operands on every call, which a small product
//! doesn't win back; this kernel packs both into buffers of the device's cache, as a tile of sums reads them, and keeps that in
//! registers.

use crate::cpu::gemm::{Into, Mat, work};
use crate::cpu::lanes::{Lanes, MOST_LANES};
use crate::cpu::tile::{Columns, VECTORS, add_outer, starts, zeros};
use crate::device::Device;
use crate::storage::Storage;
use pulp::{Simd, WithSimd};

/// Rows of a tile, at most, on a machine of 32 registers; half as many on others.
const ROWS: usize = 8;
/// Above this many multiply-adds the `gemm` crate is faster.
const LARGEST: usize = 1 << 21;

/// Whether a product of these sizes is small, and not empty.
pub(crate) fn takes(sizes: [usize; 3]) -> bool {
    (1..=LARGEST).contains(&work(sizes))
}

/// `dst (m, n) = a (m, k) b (k, n)`, with `dst` in rows of `n`; the rows are shared out over the threads.
pub(crate) fn small_gemm<T: Lanes>(
    device: &Device,
    dst: &mut [T],
    [m, n, k]: [usize; 3],
    a: Mat<'_, T>,
    b: Mat<'_, T>,
    into: Into,
) {
    let Columns { lanes, panel } = device.arch().dispatch(Columns::of::<T>());
    // b in panels of columns, filled up with zeros to whole vectors: panel, row, column.
    let held = n.next_multiple_of(lanes) * k;
    let room = Storage::stale(device, held * size_of::<T>());
    {
        let mut packed = room.write::<T>();
        let packed = &mut packed[..held];
        device.arch().run(
            #[inline(always)]
            || pack_columns(b, [n, k], panel, packed),
        );
    }
    let packed = room.read::<T>();
    let packed = &packed[..held];
    let rows =
        crate::cpu::share(device, m * n * k).div_ceil((n * k).max(1)).clamp(1, m).next_multiple_of(ROWS);
    device.for_chunks(&mut dst[..m * n], rows * n, |i, dst| {
        let a = Mat { data: &a.data[i * rows * a.row..], ..a };
        let room = Storage::stale(device, ROWS * k * size_of::<T>());
        let strip = &mut room.write::<T>()[..ROWS * k];
        device.arch().dispatch(Product { dst, n, k, a, packed, panel, strip, into });
    });
}

/// `b` in panels of columns; the last one may be narrower.
#[inline(always)]
fn pack_columns<T: Lanes>(b: Mat<'_, T>, [n, k]: [usize; 2], panel: usize, packed: &mut [T]) {
    for (i, to) in packed.chunks_mut(k * panel).enumerate() {
        let (column, width) = (i * panel, to.len() / k);
        let cols = width.min(n - column);
        for (row, to) in to.chunks_exact_mut(width).enumerate() {
            let start = row * b.row + column * b.col;
            if b.col == 1 {
                to[..cols].copy_from_slice(&b.data[start..start + cols]);
            } else {
                to[..cols].iter_mut().enumerate().for_each(|(j, to)| *to = b.data[start + j * b.col]);
            }
            to[cols..].fill(T::ZERO);
        }
    }
}

struct Product<'a, T> {
    dst: &'a mut [T],
    n: usize,
    k: usize,
    a: Mat<'a, T>,
    /// The columns of b, in panels of as many.
    packed: &'a [T],
    panel: usize,
    /// Room for the rows of a tile.
    strip: &'a mut [T],
    into: Into,
}

impl<T: Lanes> WithSimd for Product<'_, T> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        if S::REGISTER_COUNT >= 32 && self.dst.len() > self.n * (ROWS / 2) {
            self.by_rows::<S, ROWS>(simd);
        } else {
            self.by_rows::<S, { ROWS / 2 }>(simd);
        }
    }
}

impl<T: Lanes> Product<'_, T> {
    #[inline(always)]
    fn by_rows<S: Simd, const R: usize>(self, simd: S) {
        let Product { dst, n, k, a, packed, panel, strip, into } = self;
        let (lanes, m) = (T::lanes::<S>(), dst.len() / n);
        for (i, dst) in dst.chunks_mut(R * n).enumerate() {
            let starts = starts::<R>(i * R, m, a.row);
            for (p, to) in strip.as_chunks_mut::<R>().0.iter_mut().enumerate().take(k) {
                for (to, start) in to.iter_mut().zip(starts) {
                    *to = a.data[start + p * a.col];
                }
            }
            for (column, b) in (0..n).step_by(panel).zip(packed.chunks(k * panel)) {
                let to = Place { dst, n, columns: column..n.min(column + panel), into };
                if b.len() > k * lanes {
                    to.fill::<S, R, VECTORS>(simd, strip, b, k);
                } else {
                    to.fill::<S, R, 1>(simd, strip, b, k);
                }
            }
        }
    }
}

/// The place of a tile.
struct Place<'a, T> {
    dst: &'a mut [T],
    n: usize,
    columns: std::ops::Range<usize>,
    into: Into,
}

impl<T: Lanes> Place<'_, T> {
    /// `sum over p of strip[p] b[p]`.
    #[inline(always)]
    fn fill<S: Simd, const R: usize, const V: usize>(self, simd: S, strip: &[T], b: &[T], k: usize) {
        let mut sums = zeros::<T, S, R, V>(simd);
        add_outer::<T, S, R, V, R>(simd, &mut sums, (&strip.as_chunks::<R>().0[..k], 0), b);
        for (row, sums) in self.dst.chunks_exact_mut(self.n).zip(&sums) {
            let mut found = [T::ZERO; VECTORS * MOST_LANES];
            T::vectors_mut::<S>(&mut found)[..V].copy_from_slice(sums);
            let to = &mut row[self.columns.clone()];
            match self.into {
                Into::Replace => to.copy_from_slice(&found[..to.len()]),
                Into::Add => to.iter_mut().zip(found).for_each(|(to, sum)| *to += sum),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_shape_and_layout_agrees_with_the_definition() {
        for threads in [1, 3] {
            let device = Device::cpu(threads);
            for (m, n, k) in
                [(1, 1, 1), (5, 3, 7), (6, 16, 4), (7, 17, 9), (13, 33, 2), (64, 50, 80), (2, 40, 1)]
            {
                let values = |len: usize, by: usize| {
                    (0..len).map(|i| ((i * by) % 11) as f64 - 5.0).collect::<Vec<f64>>()
                };
                let (a, b) = (values(m * k, 3), values(k * n, 7));
                for (ta, tb) in [(false, false), (true, false), (false, true), (true, true)] {
                    let a = if ta { Mat::rows(&a, m).t() } else { Mat::rows(&a, k) };
                    let b = if tb { Mat::rows(&b, k).t() } else { Mat::rows(&b, n) };
                    for into in [Into::Replace, Into::Add] {
                        let mut dst = vec![2.0; m * n];
                        small_gemm(&device, &mut dst, [m, n, k], a, b, into);
                        for (i, &got) in dst.iter().enumerate() {
                            let product = |p: usize| {
                                a.data[i / n * a.row + p * a.col] * b.data[p * b.row + i % n * b.col]
                            };
                            let before = if into == Into::Add { 2.0 } else { 0.0 };
                            assert_eq!(
                                got,
                                before + (0..k).map(product).sum::<f64>(),
                                "({m}, {k}) x ({k}, {n}), element {i}"
                            );
                        }
                    }
                }
            }
        }
    }
}
