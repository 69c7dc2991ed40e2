//! Convolution from few channels to many, as the first layer of a network of images: what a pixel of the output sees, all taps
//! of all input channels, is first gathered into a patch, a row of I KH KW numbers. The patches of a few pixels, all samples of
//! each, then meet the kernels in the tiles of [`super::tile`]. Images lie row-major, as they come from a loader; outputs in
//! pixel order.

use super::Plan;
use super::lowered::sum_over_runs;
use super::tile::{ByPanels, add_columns, add_rows, add_to, biased, by_panels, in_panels, store, zeros};
use crate::cpu::copy::transpose;
use crate::cpu::lanes::{Lanes, MOST_LANES};
use crate::device::Device;
use crate::dtype::Float;
use crate::storage::Storage;
use pulp::{Simd, WithSimd};
use std::ops::Range;

/// Images of more channels than this come from a layer that leaves them in pixel order.
const MAX_CHANNELS: usize = 15;
/// Longer patches make a matrix that is large enough by itself.
const MAX_PATCH: usize = 1024;
/// Numbers of patches that are gathered at once: they stay in the second cache.
const BLOCK: usize = 1 << 15;
/// The output pixels fall into this many runs for the kernel gradient, each summed on its own and then together in order, so
/// that the result doesn't depend on the number of threads.
const RUNS: usize = 8;

/// Whether these kernels take a convolution.
pub(super) fn takes(p: &Plan) -> bool {
    p.options.groups == 1
        && p.n * p.image() * p.out_image() > 0
        && p.c <= MAX_CHANNELS
        && p.o.is_multiple_of(MOST_LANES)
        && p.c * p.kh * p.kw <= MAX_PATCH
}

/// Numbers of a patch.
fn depth(p: &Plan) -> usize {
    p.c * p.kh * p.kw
}

/// Numbers of a patch and the zeros after it, so that tiles of the kernel gradient are full.
fn padded(p: &Plan) -> usize {
    depth(p).next_multiple_of(8)
}

/// Fills `patches`, rows of [`padded`] numbers, with those of the rows of the output from `first` on.
#[inline(always)]
fn gather<T: Float>(x: &[T], p: &Plan, first: usize, patches: &mut [T]) {
    let ([sy, sx], [py, px], [dy, dx]) = (p.options.stride, p.options.padding, p.options.dilation);
    for (i, patch) in patches.chunks_exact_mut(padded(p)).enumerate() {
        let (pixel, sample) = ((first + i) / p.n, (first + i) % p.n);
        let (top, left) = (pixel / p.ow * sy, pixel % p.ow * sx);
        let image = &x[sample * p.image()..][..p.image()];
        // The taps whose column lies in the image.
        let from = px.saturating_sub(left).div_ceil(dx).min(p.kw);
        let to = (p.w + px).saturating_sub(left).div_ceil(dx).clamp(from, p.kw);
        let mut lines = patch.chunks_exact_mut(p.kw);
        for plane in image.chunks_exact(p.h * p.w) {
            for (ky, line) in (0..p.kh).zip(&mut lines) {
                let row = (top + ky * dy).checked_sub(py).filter(|&row| row < p.h);
                let Some(row) = row.filter(|_| from < to) else {
                    line.fill(T::ZERO);
                    continue;
                };
                let seen = &plane[row * p.w + left + from * dx - px..];
                if to - from == p.kw && dx == 1 {
                    // The usual case, in the usual widths: a copy of known length is a move or two.
                    match p.kw {
                        7 => line[..7].copy_from_slice(&seen[..7]),
                        5 => line[..5].copy_from_slice(&seen[..5]),
                        3 => line[..3].copy_from_slice(&seen[..3]),
                        _ => line.copy_from_slice(&seen[..line.len()]),
                    }
                } else {
                    line.fill(T::ZERO);
                    line[from..to].iter_mut().zip(seen.iter().step_by(dx)).for_each(|(to, &from)| *to = from);
                }
            }
        }
        patch[depth(p)..].fill(T::ZERO);
    }
}

/// Rows of patches that are gathered at once.
fn block_rows(p: &Plan) -> usize {
    (BLOCK / padded(p)).next_multiple_of(8)
}

/// Rows of the output.
struct Forward<'a, T> {
    plan: &'a Plan,
    x: &'a [T],
    /// (patch, O)
    weights: &'a [T],
    bias: Option<&'a [T]>,
    patches: &'a mut [T],
    first: usize,
    out: &'a mut [T],
}

impl<T: Lanes> WithSimd for Forward<'_, T> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(mut self, simd: S) {
        gather(self.x, self.plan, self.first, self.patches);
        by_panels(simd, self.plan.o, &mut self, &());
    }
}

impl<T: Lanes> ByPanels<T> for Forward<'_, T> {
    type Pass = ();

    #[inline(always)]
    fn panel<S: Simd, const R: usize, const V: usize>(&mut self, simd: S, (): &(), column: usize) {
        let (width, depth, columns) = (self.plan.o, depth(self.plan), V * T::lanes::<S>());
        let panel = &self.weights[depth * column..][..depth * columns];
        let start = biased::<T, S, R, V>(simd, self.bias, column);
        let rows = self.out.len() / width;
        for row in (0..rows).step_by(R) {
            // A short last tile computes its last row again.
            let height = R.min(rows - row);
            let starts = std::array::from_fn(|i| (row + i.min(height - 1)) * padded(self.plan));
            let mut sums = start;
            add_rows::<T, S, R, V>(simd, &mut sums, (self.patches, starts), (panel, columns), depth);
            store::<T, S, R, V>(&sums, &mut self.out[row * width..][..height * width], width, column);
        }
    }
}

/// `x` is (N, C, H, W), `w` (O, C, KH, KW), `out` (OH OW, N, O).
pub(super) fn forward<T: Lanes>(device: &Device, x: &[T], w: &[T], b: Option<&[T]>, p: Plan, out: &mut [T]) {
    let _timer = device.time("convolution by patches");
    let room = Storage::stale(device, size_of_val(w));
    in_panels(device, w, [1, p.o, depth(&p)], |_| true, &mut room.write::<T>()[..w.len()]);
    let packed = room.read::<T>();
    let rows = block_rows(&p);
    device.for_chunks(out, rows * p.o, |i, out| {
        let size = out.len() / p.o * padded(&p);
        let room = Storage::stale(device, size * size_of::<T>());
        let patches = &mut room.write::<T>()[..size];
        let weights = &packed[..w.len()];
        device.arch().dispatch(Forward { plan: &p, x, weights, bias: b, patches, first: i * rows, out });
    });
}

/// The kernel gradient over a run of rows of the output.
struct Gradient<'a, T> {
    plan: &'a Plan,
    x: &'a [T],
    grads: &'a [T],
    rows: Range<usize>,
    patches: &'a mut [T],
    /// (padded patch, O)
    sums: &'a mut [T],
}

impl<T: Lanes> WithSimd for Gradient<'_, T> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(mut self, simd: S) {
        self.sums.fill(T::ZERO);
        let some = block_rows(self.plan);
        for first in self.rows.clone().step_by(some) {
            let rows = some.min(self.rows.end - first);
            gather(self.x, self.plan, first, &mut self.patches[..rows * padded(self.plan)]);
            by_panels(simd, self.plan.o, &mut self, &(first..first + rows));
        }
    }
}

impl<T: Lanes> ByPanels<T> for Gradient<'_, T> {
    /// The rows of the output whose patches were gathered.
    type Pass = Range<usize>;

    #[inline(always)]
    fn panel<S: Simd, const R: usize, const V: usize>(
        &mut self,
        simd: S,
        rows: &Range<usize>,
        column: usize,
    ) {
        let width = self.plan.o;
        let grads = (&self.grads[rows.start * width + column..], width);
        for (i, sums) in self.sums.chunks_exact_mut(R * width).enumerate() {
            let mut tile = zeros::<T, S, R, V>(simd);
            let patches = (&self.patches[i * R..], padded(self.plan));
            add_columns::<T, S, R, V>(simd, &mut tile, patches, grads, rows.len());
            add_to::<T, S, R, V>(simd, sums, width, column, &tile);
        }
    }
}

/// `x` is (N, C, H, W), `g` (OH OW, N, O), `out` (O, C, KH, KW).
pub(super) fn kernel_gradient<T: Lanes>(device: &Device, x: &[T], g: &[T], p: Plan, out: &mut [T]) {
    let _timer = device.time("convolution by patches, gradient");
    let size = padded(&p) * p.o;
    let room = Storage::stale(device, size * size_of::<T>());
    let mut total = room.write::<T>();
    let total = &mut total[..size];
    sum_over_runs(device, RUNS, p.oh * p.ow * p.n, total, |rows, sums| {
        let size = block_rows(&p) * padded(&p);
        let room = Storage::stale(device, size * size_of::<T>());
        let patches = &mut room.write::<T>()[..size];
        device.arch().dispatch(Gradient { plan: &p, x, grads: g, rows, patches, sums });
    });
    device.arch().dispatch(|| transpose(total, p.o, [depth(&p), p.o], out, |o| o * depth(&p)));
}
