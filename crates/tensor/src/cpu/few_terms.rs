//! Products of few terms, `a^T b` with few rows of `a` and `b`, as the gradient of a weight is from a micro-batch: each number of the
//! result is a short sum, and to get it to memory is half the work.
//!
//! Both factors are laid out, which is little, `a` in rows of its terms and `b` in panels that a tile's columns need. Then the result is
//! gone through in the order in which it lies, some rows side by side, so that memory sees them come; the `gemm` crate goes through
//! it in tall tiles of a few columns. A tile has all its terms at once, so to be added to what is there costs no second way through it.

use crate::cpu::copy::transpose;
use crate::cpu::gemm::{Into, Mat, parts};
use crate::cpu::lanes::Lanes;
use crate::cpu::tile::{ByPanels, Columns, add_rows, add_to, by_panels, starts, store, zeros};
use crate::device::Device;
use crate::storage::Storage;
use pulp::{Simd, WithSimd};
use std::ops::Range;

/// So many terms are few.
pub(crate) const MOST: usize = 128;
/// Rows of the result that are gone through side by side, and of which a thread has a multiple.
const ROWS: usize = 8;

/// Bytes of panels that stay in a core's cache from some rows of the result to the next.
const CACHED: usize = 512 << 10;

/// Whether these are rows of few terms whose result is worth it, and lies in whole vectors of the machine.
pub(crate) fn takes<T: Lanes>(device: &Device, sizes: [usize; 3], a: &Mat<'_, T>, b: &Mat<'_, T>) -> bool {
    let [m, n, k] = sizes;
    let lie_so = a.row == 1 && b.col == 1 && (1..=MOST).contains(&k) && m >= ROWS && n > 0;
    let stay_near = n * k * size_of::<T>() <= CACHED;
    lie_so && stay_near && n.is_multiple_of(device.arch().dispatch(Columns::of::<T>()).lanes)
}

/// `dst (m, n) = a (m, k) b (k, n)` of sizes that it [`takes`], with `dst` in rows of `n`. The bits don't depend on the number of
/// threads.
pub(crate) fn few_terms<T: Lanes>(
    device: &Device,
    dst: &mut [T],
    [m, n, k]: [usize; 3],
    a: Mat<'_, T>,
    b: Mat<'_, T>,
    into: Into,
) {
    let panel = device.arch().dispatch(Columns::of::<T>()).panel;
    let [left, panels] = [m * k, n * k].map(|count| Storage::stale(device, count * size_of::<T>()));
    {
        let (mut left, mut panels) = (left.write::<T>(), panels.write::<T>());
        device.arch().run(
            #[inline(always)]
            || transpose(a.data, a.col, [k, m], &mut left[..m * k], |row| row * k),
        );
        device.arch().run(
            #[inline(always)]
            || {
                for (i, to) in panels[..n * k].chunks_mut(panel * k).enumerate() {
                    let columns = to.len() / k;
                    // Rows may overlap, or be one: a single row has any stride, and a broadcast one none.
                    for (term, to) in to.chunks_exact_mut(columns).enumerate() {
                        to.copy_from_slice(&b.data[term * b.row + i * panel..][..columns]);
                    }
                }
            },
        );
    }
    let (left, panels) = (left.read::<T>(), panels.read::<T>());
    let (left, panels) = (&left[..m * k], &panels[..n * k]);
    let rows = m.div_ceil(parts(device, [m, n, k])).next_multiple_of(ROWS);
    device.for_chunks(&mut dst[..m * n], rows * n, |i, dst| {
        device.arch().dispatch(Terms { dst, n, left: &left[i * rows * k..], panels, k, into });
    });
}

/// Some rows of the result.
struct Terms<'a, T> {
    dst: &'a mut [T],
    n: usize,
    /// From the first of these rows on: (row, term).
    left: &'a [T],
    /// (panel, term, column).
    panels: &'a [T],
    k: usize,
    into: Into,
}

impl<T: Lanes> WithSimd for Terms<'_, T> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(mut self, simd: S) {
        let rows = self.dst.len() / self.n;
        for first in (0..rows).step_by(ROWS) {
            let pass = first..rows.min(first + ROWS);
            by_panels(simd, self.n, &mut self, &pass);
        }
    }
}

impl<T: Lanes> ByPanels<T> for Terms<'_, T> {
    /// Rows.
    type Pass = Range<usize>;

    #[inline(always)]
    fn panel<S: Simd, const R: usize, const V: usize>(
        &mut self,
        simd: S,
        rows: &Range<usize>,
        column: usize,
    ) {
        let panel = &self.panels[column * self.k..];
        for first in rows.clone().step_by(R) {
            let starts = starts(first, rows.end, self.k);
            let mut tile = zeros::<T, S, R, V>(simd);
            add_rows(simd, &mut tile, (self.left, starts), (panel, V * T::lanes::<S>()), self.k);
            let dst = &mut self.dst[first * self.n..rows.end * self.n];
            match self.into {
                Into::Replace => store(&tile, dst, self.n, column),
                Into::Add => add_to(simd, dst, self.n, column, &tile),
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
        for (m, n, k) in
            [(8, 16, 1), (9, 48, 7), (64, 80, 64), (131, 112, 33), (100, 400, 128), (100, 1040, 48)]
        {
            let values = |count: usize, stream: u64| -> Vec<f64> {
                let random = Philox::new(1, stream);
                (0..count as u64).map(|i| f64::from(random.unit(i)) - 0.5).collect()
            };
            // Rows that lie apart.
            let (x, y) = (values(k * (m + 3), 1), values(k * (n + 5), 2));
            let (a, b) = (Mat::rows(&x, m + 3).t(), Mat::rows(&y, n + 5));
            for into in [Into::Replace, Into::Add] {
                let product = |threads: usize| {
                    let device = Device::cpu(threads);
                    assert!(takes(&device, [m, n, k], &a, &b));
                    let mut dst = vec![2.0; m * n];
                    few_terms(&device, &mut dst, [m, n, k], a, b, into);
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

    #[test]
    fn a_factor_lies_as_a_view_may_have_it() {
        let device = Device::cpu(2);
        let x: Vec<f32> = (0..500).map(|i| (i % 7) as f32).collect();
        let y: Vec<f32> = (0..600).map(|i| (i % 5) as f32).collect();
        // One row, whose stride is that of its column or none; the same row for all terms; rows that overlap.
        for (k, b_row, a_col) in [(1, 1, 1), (1, 0, 0), (7, 0, 64), (3, 5, 0), (3, 5, 64)] {
            let (m, n) = (64, 48);
            let (a, b) = (Mat { data: &x, row: 1, col: a_col }, Mat { data: &y, row: b_row, col: 1 });
            assert!(takes(&device, [m, n, k], &a, &b));
            let (mut dst, mut expected) = (vec![0.0; m * n], vec![0.0; m * n]);
            few_terms(&device, &mut dst, [m, n, k], a, b, Into::Replace);
            gemm(&mut expected, [m, n, k], a, b, Into::Replace);
            assert_eq!(dst, expected, "{k} terms, rows {b_row} apart");
        }
    }

    #[test]
    fn sizes_that_it_would_be_slow_or_wrong_at_are_left_to_others() {
        let device = Device::cpu(1);
        let data = vec![0.0f32; 1 << 16];
        let takes =
            |[m, n, k]: [usize; 3]| takes(&device, [m, n, k], &Mat::rows(&data, m).t(), &Mat::rows(&data, n));
        assert!(takes([64, 64, MOST]) && takes([8, 512, 128]));
        for sizes in
            [[8, 512 << 4, 128], [7, 64, 64], [64, 65, 64], [64, 64, 0], [64, 0, 64], [64, 64, MOST + 1]]
        {
            assert!(!takes(sizes), "{sizes:?}");
        }
    }
}
