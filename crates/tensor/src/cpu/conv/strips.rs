//! Convolution from few channels to many, as the first layer of a network of images. Each row of each image is first laid out
//! as a *strip*: its pixels with the zeros of the padding before and after them, all channels of a pixel side by side. What a
//! kernel row sees for an output pixel is then one stretch of a strip, so the sums of a pixel run over as many stretches as
//! kernels have rows, in the tiles of [`crate::cpu::tile`]. Images lie row-major, as they come from a loader; kernels tap by tap;
//! outputs in pixel order. For the gradient of the kernels, stretches and gradients of some pixels are laid side by side.

use super::Plan;
use super::lowered::sum_over_runs;
use super::pixels::ROWS;
use crate::cpu::copy::transpose;
use crate::cpu::lanes::{Lanes, MOST_LANES};
use crate::cpu::tile::{
    ByPanels, Columns, Turned, add_rows, biased, by_panels, by_tall_panels, in_panels, side_by_side, store,
    sum_blocks,
};
use crate::cpu::window::Slide;
use crate::device::Device;
use crate::storage::Storage;
use pulp::{Simd, WithSimd};
use std::ops::Range;

/// Images of more channels than this come from a layer that leaves them in pixel order.
const MAX_CHANNELS: usize = 15;
/// Longer sums are in better hands where they are cut into chains.
const MAX_DEPTH: usize = 1024;
/// Rows of a tile, at most: stretches are summed in so many numbers at once for the kernel gradient.
const MOST_ROWS: usize = 8;
/// The output pixels fall into this many runs for the kernel gradient, each summed on its own and then together in order, so
/// that the result doesn't depend on the number of threads.
const RUNS: usize = 8;

/// Whether these kernels take a convolution.
pub(super) fn takes(p: &Plan) -> bool {
    has_channels([p.c, p.o], p.options.groups)
        && p.n * p.image() * p.out_image() > 0
        && p.c * p.kh * p.kw <= MAX_DEPTH
        && p.options.dilation[1] == 1
}

/// Whether these kernels take convolutions between so many channels.
pub(super) fn has_channels([inputs, outputs]: [usize; 2], groups: usize) -> bool {
    groups == 1 && (1..=MAX_CHANNELS).contains(&inputs) && outputs > 0 && outputs.is_multiple_of(MOST_LANES)
}

/// Numbers of a strip.
fn strip(p: &Plan) -> usize {
    (p.w + 2 * p.options.padding[1]) * p.c
}

/// Numbers of what a kernel row sees.
fn stretch(p: &Plan) -> usize {
    p.kw * p.c
}

/// The same, to full tiles.
fn padded(p: &Plan) -> usize {
    stretch(p).next_multiple_of(MOST_ROWS)
}

/// Lays out all strips, (H, N, strip), and a few numbers after them that full tiles may look at.
fn lay_out<T: Lanes>(device: &Device, x: &[T], p: &Plan) -> Storage {
    let size = p.h * p.n * strip(p);
    let room = Storage::stale(device, (size + MOST_ROWS) * size_of::<T>());
    {
        let mut strips = room.write::<T>();
        let (strips, after) = strips[..size + MOST_ROWS].split_at_mut(size);
        after.fill(T::ZERO);
        let edge = p.options.padding[1] * p.c;
        device.for_chunks(strips, p.n * strip(p), |row, strips| {
            device.arch().run(
                #[inline(always)]
                || {
                    for (strip, image) in strips.chunks_exact_mut(strip(p)).zip(x.chunks_exact(p.image())) {
                        let (before, rest) = strip.split_at_mut(edge);
                        let (pixels, after) = rest.split_at_mut(p.w * p.c);
                        before.fill(T::ZERO);
                        after.fill(T::ZERO);
                        transpose(&image[row * p.w..], p.h * p.w, [p.c, p.w], pixels, |pixel| pixel * p.c);
                    }
                },
            );
        });
    }
    room
}

/// The kernel rows that an output pixel sees anything with, and where the stretches of its first sample begin.
fn seen(p: &Plan, pixel: usize) -> impl Iterator<Item = (usize, usize)> {
    let slide = Slide { stride: p.options.stride[0], padding: p.options.padding[0] };
    let (row, column) = (pixel / p.ow, pixel % p.ow);
    (0..p.kh).filter_map(move |ky| {
        let row = slide.sees(row, ky * p.options.dilation[0], p.h)?;
        Some((ky, row * p.n * strip(p) + column * p.options.stride[1] * p.c))
    })
}

/// Rows of the output.
struct Forward<'a, T> {
    plan: &'a Plan,
    strips: &'a [T],
    /// (panel, KH, stretch, columns of the panel)
    weights: &'a [T],
    bias: Option<&'a [T]>,
    first: usize,
    out: &'a mut [T],
}

impl<T: Lanes> WithSimd for Forward<'_, T> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(mut self, simd: S) {
        by_tall_panels(simd, self.plan.n, self.plan.o, &mut self, &());
    }
}

impl<T: Lanes> ByPanels<T> for Forward<'_, T> {
    type Pass = ();

    #[inline(always)]
    fn panel<S: Simd, const R: usize, const V: usize>(&mut self, simd: S, (): &(), column: usize) {
        let p = self.plan;
        let columns = V * T::lanes::<S>();
        let panel = &self.weights[column * p.kh * stretch(p)..][..columns * p.kh * stretch(p)];
        let start = biased::<T, S, R, V>(simd, self.bias, column);
        let rows = self.out.len() / p.o;
        let mut row = 0;
        while row < rows {
            let (pixel, sample) = ((self.first + row) / p.n, (self.first + row) % p.n);
            // A short last tile computes its last row again.
            let height = R.min(p.n - sample).min(rows - row);
            let samples: [usize; R] = std::array::from_fn(|i| (sample + i.min(height - 1)) * strip(p));
            let mut sums = start;
            for (ky, first) in seen(p, pixel) {
                let strips = (self.strips, samples.map(|sample| first + sample));
                let weights = (&panel[ky * stretch(p) * columns..], columns);
                add_rows::<T, S, R, V>(simd, &mut sums, strips, weights, stretch(p));
            }
            store::<T, S, R, V>(&sums, &mut self.out[row * p.o..][..height * p.o], p.o, column);
            row += height;
        }
    }
}

/// `x` is (N, C, H, W), `w` (taps, C, O), `out` (OH OW, N, O).
pub(super) fn forward<T: Lanes>(device: &Device, x: &[T], w: &[T], b: Option<&[T]>, p: Plan, out: &mut [T]) {
    let _timer = device.time("convolution by strips");
    let strips = lay_out(device, x, &p);
    let strips = strips.read::<T>();
    let room = Storage::stale(device, size_of_val(w));
    let mut weights = room.write::<T>();
    let weights = &mut weights[..w.len()];
    in_panels(device, w, [p.kh, stretch(&p), p.o], Turned::No, 0, |_| true, weights);
    let weights = &*weights;
    let rows = if device.threads() == 1 { p.oh * p.ow * p.n } else { p.ow * p.n };
    device.for_chunks(out, rows * p.o, |i, out| {
        let first = i * rows;
        device.arch().dispatch(Forward { plan: &p, strips: &strips, weights, bias: b, first, out });
    });
}

/// The kernel gradient over a run of output pixels.
struct Gradient<'a, T> {
    plan: &'a Plan,
    strips: &'a [T],
    grads: &'a [T],
    pixels: Range<usize>,
    /// (KH, padded stretch, O)
    sums: &'a mut [T],
    /// Room for what some pixels see by a kernel row, (block, rows, MOST_ROWS), and for their gradients, (panel, rows, columns of the
    /// panel).
    left: &'a mut [T],
    right: &'a mut [T],
}

/// Output pixels that are summed at once.
fn pixels_at_once(p: &Plan) -> usize {
    (ROWS / p.n).max(1)
}

impl<T: Lanes> WithSimd for Gradient<'_, T> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(mut self, simd: S) {
        self.sums.fill(T::ZERO);
        let Plan { n, o, .. } = *self.plan;
        let panel = Columns::of::<T>().with_simd(simd).panel;
        for first in self.pixels.clone().step_by(pixels_at_once(self.plan)) {
            let pixels = first..(first + pixels_at_once(self.plan)).min(self.pixels.end);
            let rows = pixels.len() * n;
            let grads = &self.grads[first * n * o..][..rows * o];
            for (i, right) in self.right[..rows * o].chunks_mut(rows * panel).enumerate() {
                let columns = right.len() / rows;
                side_by_side(grads, [o, i * panel], right, columns);
            }
            for ky in 0..self.plan.kh {
                self.see(&pixels, ky);
                by_panels(simd, o, &mut self, &Pass { ky, rows });
            }
        }
    }
}

impl<T: Lanes> Gradient<'_, T> {
    /// Lays out what some pixels see by a kernel row; zeros where that is outside.
    #[inline(always)]
    fn see(&mut self, pixels: &Range<usize>, ky: usize) {
        let p = self.plan;
        let rows = pixels.len() * p.n;
        for (block, left) in
            self.left.chunks_exact_mut(rows * MOST_ROWS).take(padded(p) / MOST_ROWS).enumerate()
        {
            for (pixel, left) in pixels.clone().zip(left.chunks_exact_mut(p.n * MOST_ROWS)) {
                match seen(p, pixel).find(|&(at, _)| at == ky) {
                    Some((_, first)) => {
                        for (sample, left) in left.as_chunks_mut::<MOST_ROWS>().0.iter_mut().enumerate() {
                            let strip = &self.strips[first + sample * strip(p) + block * MOST_ROWS..];
                            left.copy_from_slice(&strip[..MOST_ROWS]);
                        }
                    }
                    None => left.fill(T::ZERO),
                }
            }
        }
    }
}

/// A kernel row, and how many rows of gradients.
struct Pass {
    ky: usize,
    rows: usize,
}

impl<T: Lanes> ByPanels<T> for Gradient<'_, T> {
    type Pass = Pass;

    #[inline(always)]
    fn panel<S: Simd, const R: usize, const V: usize>(
        &mut self,
        simd: S,
        &Pass { ky, rows }: &Pass,
        column: usize,
    ) {
        let (p, o) = (self.plan, self.plan.o);
        let right = &self.right[rows * column..];
        let sums = &mut self.sums[ky * padded(p) * o..][..padded(p) * o];
        let left = (&*self.left, rows);
        sum_blocks::<T, S, R, V, MOST_ROWS>(simd, (sums, o, column), left, right);
    }
}

/// `x` is (N, C, H, W), `g` (OH OW, N, O), `out` (taps, C, O).
pub(super) fn kernel_gradient<T: Lanes>(device: &Device, x: &[T], g: &[T], p: Plan, out: &mut [T]) {
    let _timer = device.time("convolution by strips, gradient");
    let strips = lay_out(device, x, &p);
    let strips = strips.read::<T>();
    let size = p.kh * padded(&p) * p.o;
    let room = Storage::stale(device, size * size_of::<T>());
    let mut total = room.write::<T>();
    let total = &mut total[..size];
    sum_over_runs(device, RUNS, p.oh * p.ow, total, |pixels, sums| {
        let rows = pixels_at_once(&p) * p.n;
        let [left, right] =
            [padded(&p), p.o].map(|columns| Storage::stale(device, rows * columns * size_of::<T>()));
        let (mut left, mut right) = (left.write::<T>(), right.write::<T>());
        let (left, right) = (&mut left[..], &mut right[..]);
        device.arch().dispatch(Gradient { plan: &p, strips: &strips, grads: g, pixels, sums, left, right });
    });
    let rows = out.chunks_exact_mut(stretch(&p) * p.o);
    for (out, total) in rows.zip(total.chunks_exact(padded(&p) * p.o)) {
        out.copy_from_slice(&total[..out.len()]);
    }
}
