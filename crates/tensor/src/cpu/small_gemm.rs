//! Small matrix products. The `gemm` crate takes fresh memory for its packed operands on every call, which a small product
//! doesn't win back; this kernel packs one operand into a buffer of the device's cache and keeps a tile of the result in
//! registers.

use crate::cpu::gemm::{Into, Mat, work};
use crate::device::Device;
use crate::dtype::Float;
use crate::storage::Storage;

/// Rows of a tile.
const ROWS: usize = 6;
/// Columns of a tile: one or two vectors.
const COLS: usize = 16;
/// Above this many multiply-adds the `gemm` crate is faster.
const LARGEST: usize = 1 << 21;

/// Whether a product of these sizes is small, and not empty.
pub(crate) fn takes(sizes: [usize; 3]) -> bool {
    (1..=LARGEST).contains(&work(sizes))
}

/// `dst (m, n) = a (m, k) b (k, n)`, with `dst` in rows of `n`; the rows are shared out over the threads.
pub(crate) fn small_gemm<T: Float>(
    device: &Device,
    dst: &mut [T],
    [m, n, k]: [usize; 3],
    a: Mat<'_, T>,
    b: Mat<'_, T>,
    into: Into,
) {
    // b in panels of COLS columns, filled up with zeros: panel, row, column.
    let panels = n.div_ceil(COLS);
    let room = Storage::stale(device, panels * k * COLS * size_of::<T>());
    {
        let mut packed = room.write::<T>();
        let packed = &mut packed[..panels * k * COLS];
        device.arch().dispatch(Pack { b, n, k, packed });
    }
    let packed = room.read::<T>();
    let packed = &packed[..panels * k * COLS];
    let rows =
        crate::cpu::share(device, m * n * k).div_ceil((n * k).max(1)).clamp(1, m).next_multiple_of(ROWS);
    device.for_chunks(&mut dst[..m * n], rows * n, |i, dst| {
        let a = Mat { data: &a.data[i * rows * a.row..], ..a };
        device.arch().dispatch(Product { dst, n, k, a, packed, into });
    });
}

struct Pack<'a, T> {
    b: Mat<'a, T>,
    n: usize,
    k: usize,
    packed: &'a mut [T],
}

impl<T: Float> pulp::NullaryFnOnce for Pack<'_, T> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let Pack { b, n, k, packed } = self;
        for (panel, to) in packed.chunks_exact_mut((k * COLS).max(1)).enumerate() {
            let cols = COLS.min(n - panel * COLS);
            for (row, to) in to.as_chunks_mut::<COLS>().0.iter_mut().enumerate() {
                let start = row * b.row + panel * COLS * b.col;
                if b.col == 1 && cols == COLS {
                    to.copy_from_slice(&b.data[start..start + COLS]);
                } else {
                    to.fill(T::ZERO);
                    to[..cols].iter_mut().enumerate().for_each(|(j, to)| *to = b.data[start + j * b.col]);
                }
            }
        }
    }
}

struct Product<'a, T> {
    dst: &'a mut [T],
    n: usize,
    k: usize,
    a: Mat<'a, T>,
    packed: &'a [T],
    into: Into,
}

impl<T: Float> pulp::NullaryFnOnce for Product<'_, T> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let Product { dst, n, k, a, packed, into } = self;
        let m = dst.len() / n.max(1);
        for (panel, b) in packed.chunks_exact((k * COLS).max(1)).enumerate() {
            let cols = COLS.min(n - panel * COLS);
            for first in (0..m).step_by(ROWS) {
                let rows = ROWS.min(m - first);
                // A short last tile computes its last row again; only `rows` of them are kept.
                let mut starts = [0; ROWS];
                starts
                    .iter_mut()
                    .enumerate()
                    .for_each(|(i, start)| *start = (first + i.min(rows - 1)) * a.row);
                let sums = tile(a.data, starts, a.col, b);
                for (i, sums) in sums.iter().enumerate().take(rows) {
                    let to = &mut dst[(first + i) * n + panel * COLS..][..cols];
                    match into {
                        Into::Replace => to.copy_from_slice(&sums[..cols]),
                        Into::Add => to.iter_mut().zip(sums).for_each(|(to, &sum)| *to += sum),
                    }
                }
            }
        }
    }
}

/// `sum[i] = sum over p of a[starts[i] + p * step] * b[p]`.
#[inline(always)]
fn tile<T: Float>(a: &[T], starts: [usize; ROWS], step: usize, b: &[T]) -> [[T; COLS]; ROWS] {
    let mut sums = [[T::ZERO; COLS]; ROWS];
    for (p, b) in b.as_chunks::<COLS>().0.iter().enumerate() {
        for (sums, start) in sums.iter_mut().zip(starts) {
            let a = a[start + p * step];
            for (s, &b) in sums.iter_mut().zip(b) {
                *s = b.mul_add(a, *s);
            }
        }
    }
    sums
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
