//! Matrix products, by the crates behind `gemm`, and by kernels of our own where it loses its time with laying out factors: small ones
//! ([`small_gemm`]), few rows through a weight ([`few_rows`]) and products of few terms ([`few_terms`]).

use crate::cpu::lanes::Lanes;
use crate::cpu::{SERIAL_LIMIT, few_rows, few_terms, small_gemm};
use crate::device::Device;
use crate::dtype::Float;
use gemm_common::Parallelism;

/// A matrix in a slice: element (i, j) lies at `i * row + j * col`.
#[derive(Clone, Copy)]
pub(crate) struct Mat<'a, T> {
    pub(crate) data: &'a [T],
    pub(crate) row: usize,
    pub(crate) col: usize,
}

impl<'a, T> Mat<'a, T> {
    pub(crate) fn rows(data: &'a [T], width: usize) -> Mat<'a, T> {
        Mat { data, row: width, col: 1 }
    }

    pub(crate) fn t(self) -> Mat<'a, T> {
        Mat { data: self.data, row: self.col, col: self.row }
    }

    fn below(self, row: usize) -> Mat<'a, T> {
        Mat { data: &self.data[row * self.row..], ..self }
    }

    fn holds(&self, rows: usize, cols: usize) -> bool {
        let last = |rows: usize, cols: usize| {
            (rows - 1).checked_mul(self.row)?.checked_add((cols - 1).checked_mul(self.col)?)
        };
        rows == 0 || cols == 0 || last(rows, cols).is_some_and(|last| last < self.data.len())
    }
}

/// `dst (m, n) = alpha dst + beta lhs (m, k) rhs (k, n)`, of sizes m, n and k: a pointer and the strides of columns and of rows for each
/// matrix, behind the first whether there is anything in it, which of the three is conjugate, and how many threads take part.
type Product<T> = unsafe fn(
    usize,
    usize,
    usize,
    *mut T,
    isize,
    isize,
    bool,
    *const T,
    isize,
    isize,
    *const T,
    isize,
    isize,
    T,
    T,
    bool,
    bool,
    bool,
    Parallelism,
);

/// A type that there are products for.
pub(crate) trait Multiplied: Float {
    /// The one for this machine, which is fastest where the columns of the destination are contiguous.
    fn product() -> Product<Self>;
}

impl Multiplied for f32 {
    fn product() -> Product<f32> {
        gemm_f32::gemm::f32::get_gemm_fn()
    }
}

impl Multiplied for f64 {
    fn product() -> Product<f64> {
        gemm_f64::gemm::f64::get_gemm_fn()
    }
}

/// Whether a product replaces its destination or is added to it.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Into {
    Replace,
    Add,
}

/// Panics if the product would read or write outside of its slices, whatever the sizes.
#[track_caller]
fn check<T>(dst: &[T], [m, n, k]: [usize; 3], a: Mat<'_, T>, b: Mat<'_, T>) {
    let written = Mat::rows(dst, n).holds(m, n);
    assert!(
        written && a.holds(m, k) && b.holds(k, n),
        "gemm: ({m}, {k}) x ({k}, {n}) leaves its slices of {}, {} and {} elements",
        dst.len(),
        a.data.len(),
        b.data.len()
    );
}

/// `dst (m, n) = a (m, k) b (k, n)`, with `dst` in rows of `n`; on the calling thread.
pub(crate) fn gemm<T: Multiplied>(
    dst: &mut [T],
    [m, n, k]: [usize; 3],
    a: Mat<'_, T>,
    b: Mat<'_, T>,
    into: Into,
) {
    check(dst, [m, n, k], a, b);
    if m == 0 || n == 0 {
        return;
    }
    if k == 0 {
        if into == Into::Replace {
            dst[..m * n].fill(T::ZERO);
        }
        return;
    }
    // Rows that are contiguous are the columns of the transposed: of b' a'. A single column is contiguous already.
    let ([m, n], [row, col], [lhs, rhs]) =
        if n > 1 { ([n, m], [1, n], [b.t(), a.t()]) } else { ([m, n], [n, 1], [a, b]) };
    // SAFETY: every element the product reads or writes lies inside the three slices (`check`, above), and `dst` is
    // borrowed exclusively, so it overlaps neither input.
    unsafe {
        T::product()(
            m,
            n,
            k,
            dst.as_mut_ptr(),
            col as isize,
            row as isize,
            into == Into::Add,
            lhs.data.as_ptr(),
            lhs.col as isize,
            lhs.row as isize,
            rhs.data.as_ptr(),
            rhs.col as isize,
            rhs.row as isize,
            T::ONE,
            T::ONE,
            false,
            false,
            false,
            Parallelism::None,
        );
    }
}

/// How many multiply-adds a product takes: views of stride 0 may make it more than a number holds.
pub(crate) fn work([m, n, k]: [usize; 3]) -> usize {
    m.saturating_mul(n).saturating_mul(k)
}

/// How many threads share a product.
pub(crate) fn parts(device: &Device, sizes: [usize; 3]) -> usize {
    if work(sizes) < 4 * SERIAL_LIMIT { 1 } else { device.threads() }
}

/// How many of `m` rows of `n` elements a thread takes, so that the bits don't depend on the number of threads. The crate adds
/// up in another order for results of one row, for those of up to 256 elements and for those of up to 64 rows and columns, so
/// a part must not be one of these where the whole is none.
fn rows_per_thread(m: usize, n: usize, threads: usize) -> usize {
    let least = if n > 64 { 2.max(256 / n + 1) } else { 65.max(256 / n + 1) };
    let rows_of = |parts: usize| m.div_ceil(parts);
    let last = |rows: usize| (m - 1) % rows + 1;
    (2..=threads).rev().map(rows_of).find(|&rows| last(rows) >= least).unwrap_or(m)
}

/// As [`gemm`], with the rows of `dst` shared out over the device's threads.
pub(crate) fn gemm_on<T: Lanes>(
    device: &Device,
    dst: &mut [T],
    sizes: [usize; 3],
    a: Mat<'_, T>,
    b: Mat<'_, T>,
    into: Into,
) {
    gemm_onto(device, dst, sizes, a, b, into, |_| ());
}

/// As [`gemm_on`]; whichever thread computes some rows of `dst` hands them to `prepare` first.
pub(crate) fn gemm_onto<T: Lanes>(
    device: &Device,
    dst: &mut [T],
    [m, n, k]: [usize; 3],
    a: Mat<'_, T>,
    b: Mat<'_, T>,
    into: Into,
    prepare: impl Fn(&mut [T]) + Sync,
) {
    let _timer = device.time("matrix products");
    if small_gemm::takes([m, n, k]) {
        check(dst, [m, n, k], a, b);
        prepare(&mut dst[..m * n]);
        return small_gemm::small_gemm(device, dst, [m, n, k], a, b, into);
    }
    if few_rows::takes([m, n, k], &a, &b) {
        check(dst, [m, n, k], a, b);
        prepare(&mut dst[..m * n]);
        return few_rows::few_rows(device, dst, [m, n, k], a, b, into);
    }
    if few_terms::takes(device, [m, n, k], &a, &b) {
        check(dst, [m, n, k], a, b);
        prepare(&mut dst[..m * n]);
        return few_terms::few_terms(device, dst, [m, n, k], a, b, into);
    }
    let parts = parts(device, [m, n, k]);
    if parts == 1 || n == 0 {
        prepare(&mut dst[..m * n]);
        return gemm(dst, [m, n, k], a, b, into);
    }
    let rows = rows_per_thread(m, n, parts);
    device.for_chunks(&mut dst[..m * n], rows * n, |i, part| {
        prepare(part);
        gemm(part, [part.len() / n, n, k], a.below(i * rows), b, into);
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::philox::Philox;

    #[test]
    fn sizes_whose_product_wraps_around_are_not_held() {
        let half = 1 << (usize::BITS - 1);
        for (row, col) in [(half, 1), (1, half), (usize::MAX, usize::MAX)] {
            assert!(!Mat { data: &[0.0; 4], row, col }.holds(3, 3), "strides {row} and {col}");
        }
        assert!(Mat { data: &[0.0; 4], row: 2, col: 1 }.holds(2, 2));
    }

    /// Values whose sums round differently in another order.
    fn values(count: usize, stream: u64) -> Vec<f32> {
        let random = Philox::new(1, stream);
        (0..count as u64).map(|i| random.unit(i) - 0.5).collect()
    }

    #[test]
    fn the_bits_do_not_depend_on_the_number_of_threads() {
        let check = |m: usize, n: usize, k: usize| {
            let (a, b) = (values(m * k, 1), values(k * n, 2));
            for (ta, tb) in [(false, false), (true, false), (false, true), (true, true)] {
                let a = if ta { Mat::rows(&a, m).t() } else { Mat::rows(&a, k) };
                let b = if tb { Mat::rows(&b, k).t() } else { Mat::rows(&b, n) };
                let product = |threads: usize| {
                    let mut dst = vec![0.0; m * n];
                    gemm_on(&Device::cpu(threads), &mut dst, [m, n, k], a, b, Into::Replace);
                    dst
                };
                let alone = product(1);
                for threads in [2, 3, 7] {
                    assert!(product(threads) == alone, "({m}, {k}) x ({k}, {n}) on {threads} threads");
                }
            }
        };
        // The borders at which the crate changes its order, from both sides.
        for (m, n, k) in [
            (64, 128, 9216),
            (100, 64, 1000),
            (70, 40, 3000),
            (130, 64, 600),
            (131, 64, 1700),
            (300, 2, 9000),
            (3, 100, 9000),
            (2, 2000, 600),
            (7, 300, 1100),
            (600, 1, 9000),
            (1, 600, 9000),
            (16, 17, 9000),
            (20, 20, 9000),
            (2048, 40, 700),
        ] {
            check(m, n, k);
        }
    }
}
