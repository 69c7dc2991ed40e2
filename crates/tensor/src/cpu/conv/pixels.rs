//! Convolution pixel by pixel, for many channels.
//!
//! Images lie in pixel order, (H W, N, C), and kernels tap by tap, (KH KW, O, C): see [`crate::Order`]. A pixel of the result is
//! a sum over its *links*: pairs of a kernel tap and the source pixel that it sees. Taps that fall into the padding have no
//! link, so nothing is multiplied with zeros: of the taps of a 3x3 kernel on 2x2 pixels more than half meet padding, on 1x1
//! pixels eight of nine. All links of a result are summed in registers ([`super::tile`]); nothing is laid out anew but the
//! kernels, in panels as wide as a tile.
//!
//! The gradient of the images is the same sum with the links turned around. The gradient of a kernel tap is the sum of outer
//! products over the pairs of pixels that the tap links.

use super::Plan;
use super::tile::{CHAIN, Tile, add, add_columns, add_rows, add_to, wide, zeros};
use crate::cpu::copy::transpose;
use crate::cpu::lanes::{Lanes, MOST_LANES};
use crate::device::Device;
use crate::storage::Storage;
use pulp::{Simd, WithSimd};
use std::marker::PhantomData;
use std::ops::Range;

/// More taps than this don't fit into the list of links.
const MAX_TAPS: usize = 64;
/// With fewer samples the tiles aren't full.
const MIN_SAMPLES: usize = 4;
/// Numbers of one side that a block of rows of the kernel gradient holds: so many that they stay in the second cache.
const BLOCK: usize = 1 << 13;
/// Output channels that one task of the kernel gradient takes.
const TASK_CHANNELS: usize = 32;

/// Whether these kernels take a convolution.
pub(super) fn takes(p: &Plan) -> bool {
    has_channels([p.c, p.o], p.options.groups) && p.n >= MIN_SAMPLES && p.kh * p.kw <= MAX_TAPS
}

/// Whether these kernels take convolutions between so many channels.
pub(crate) fn has_channels([inputs, outputs]: [usize; 2], groups: usize) -> bool {
    let fits = |channels: usize| channels > 0 && channels.is_multiple_of(MOST_LANES);
    groups == 1 && fits(inputs) && fits(outputs)
}

/// Which way a sum goes.
#[derive(Clone, Copy)]
enum Toward {
    Output,
    Input,
}

/// A kernel tap, and the pixel that it sees.
#[derive(Clone, Copy, Default)]
struct Link {
    tap: usize,
    pixel: usize,
}

/// The links of one pixel, in the order of taps.
struct Links {
    list: [Link; MAX_TAPS],
    count: usize,
}

impl Links {
    fn of(p: &Plan, toward: Toward, pixel: usize) -> Links {
        let mut links = Links { list: [Link::default(); MAX_TAPS], count: 0 };
        let ([sy, sx], [py, px], [dy, dx]) = (p.options.stride, p.options.padding, p.options.dilation);
        let seen = |at: usize, tap: usize, stride: usize, padding: usize, size: usize| match toward {
            Toward::Output => (at * stride + tap).checked_sub(padding).filter(|&at| at < size),
            Toward::Input => {
                let at = (at + padding).checked_sub(tap).filter(|at| at.is_multiple_of(stride))?;
                Some(at / stride).filter(|&at| at < size)
            }
        };
        let ([_, to_w], [from_h, from_w]) = match toward {
            Toward::Output => ([p.oh, p.ow], [p.h, p.w]),
            Toward::Input => ([p.h, p.w], [p.oh, p.ow]),
        };
        for ky in 0..p.kh {
            let Some(row) = seen(pixel / to_w, ky * dy, sy, py, from_h) else { continue };
            for kx in 0..p.kw {
                let Some(column) = seen(pixel % to_w, kx * dx, sx, px, from_w) else { continue };
                links.list[links.count] = Link { tap: ky * p.kw + kx, pixel: row * from_w + column };
                links.count += 1;
            }
        }
        links
    }

    fn iter(&self) -> impl Iterator<Item = Link> {
        self.list[..self.count].iter().copied()
    }
}

/// The input pixel that a tap of an output pixel sees.
#[inline(always)]
fn seen_by(p: &Plan, tap: usize, output: usize) -> Option<usize> {
    let seen = |d: usize, at: usize, tap: usize, size: usize| {
        let at = at * p.options.stride[d] + tap * p.options.dilation[d];
        at.checked_sub(p.options.padding[d]).filter(|&at| at < size)
    };
    let row = seen(0, output / p.ow, tap / p.kw, p.h)?;
    Some(row * p.w + seen(1, output % p.ow, tap % p.kw, p.w)?)
}

/// Whether a tap links any pixels at all.
fn is_used(p: &Plan, tap: usize) -> bool {
    (0..p.oh * p.ow).any(|output| seen_by(p, tap, output).is_some())
}

/// A sum over links, for rows of the result that follow each other.
struct SumLinks<'a, T> {
    plan: &'a Plan,
    toward: Toward,
    /// (pixels, N, depth)
    source: &'a [T],
    depth: usize,
    /// Toward the output, panels of columns: (panel, tap, depth, columns of the panel); toward the input, the kernels as they
    /// are: (tap, depth, width).
    weights: &'a [T],
    bias: Option<&'a [T]>,
    /// Rows of (pixels, N, width), from row `first` on.
    result: &'a mut [T],
    width: usize,
    first: usize,
}

impl<T: Lanes> WithSimd for SumLinks<'_, T> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(mut self, simd: S) {
        let mut column = 0;
        while column < self.width {
            let vectors = wide::<T, S>(self.width - column);
            match (S::REGISTER_COUNT >= 32, vectors) {
                (true, 2) => self.panel::<S, 8, 2>(simd, column),
                (true, _) => self.panel::<S, 8, 1>(simd, column),
                (false, 2) => self.panel::<S, 4, 2>(simd, column),
                (false, _) => self.panel::<S, 4, 1>(simd, column),
            }
            column += vectors * T::lanes::<S>();
        }
    }
}

impl<T: Lanes> SumLinks<'_, T> {
    /// The columns of one panel. All rows go by before the next, so that the panel stays in the cache.
    #[inline(always)]
    fn panel<S: Simd, const R: usize, const V: usize>(&mut self, simd: S, column: usize) {
        let (n, width, depth, columns) = (self.plan.n, self.width, self.depth, V * T::lanes::<S>());
        let (panel, b_width) = match self.toward {
            Toward::Output => (&self.weights[self.plan.kh * self.plan.kw * depth * column..], columns),
            Toward::Input => (&self.weights[column..], width),
        };
        let mut start = [T::splat(simd, T::ZERO); V];
        if let Some(bias) = self.bias {
            start.copy_from_slice(&T::vectors::<S>(&bias[column..][..columns])[..V]);
        }
        let rows = self.result.len() / width;
        let mut row = 0;
        while row < rows {
            let (pixel, sample) = ((self.first + row) / n, (self.first + row) % n);
            let links = Links::of(self.plan, self.toward, pixel);
            let samples = (n - sample).min(rows - row);
            for tile in (0..samples).step_by(R) {
                // A short last tile computes its last row again.
                let height = R.min(samples - tile);
                let offsets: [usize; R] =
                    std::array::from_fn(|i| (sample + tile + i.min(height - 1)) * depth);
                let mut sums: Tile<T, S, R, V> = [start; R];
                for link in links.iter() {
                    for from in (0..depth).step_by(CHAIN) {
                        let starts = offsets.map(|offset| link.pixel * n * depth + offset + from);
                        let weights = &panel[(link.tap * depth + from) * b_width..];
                        let mut part = zeros::<T, S, R, V>(simd);
                        let some = CHAIN.min(depth - from);
                        add_rows::<T, S, R, V>(
                            simd,
                            &mut part,
                            (self.source, starts),
                            (weights, b_width),
                            some,
                        );
                        add::<T, S, R, V>(simd, &mut sums, &part);
                    }
                }
                for (i, sums) in sums.iter().enumerate().take(height) {
                    let to = &mut self.result[(row + tile + i) * width + column..][..columns];
                    T::vectors_mut::<S>(to)[..V].copy_from_slice(sums);
                }
            }
            row += samples;
        }
    }
}

/// Rows that one task of a sum takes.
fn rows_per_task(device: &Device, rows: usize) -> usize {
    if device.threads() == 1 { rows } else { rows.div_ceil(4 * device.threads()).next_multiple_of(8) }
}

/// The kernels in panels for a sum toward the output: the transpose of (taps, O, C), panel by panel.
struct Pack<'a, T> {
    plan: &'a Plan,
    weights: &'a [T],
    /// The first column of the panel to fill, and the panel.
    column: usize,
    panel: &'a mut [T],
}

impl<T: Lanes> pulp::NullaryFnOnce for Pack<'_, T> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let Pack { plan: p, weights, column, panel } = self;
        let columns = panel.len() / (p.kh * p.kw * p.c);
        for (tap, panel) in panel.chunks_exact_mut(p.c * columns).enumerate() {
            if is_used(p, tap) {
                let rows = &weights[(tap * p.o + column) * p.c..];
                transpose(rows, p.c, [columns, p.c], panel, |c| c * columns);
            }
        }
    }
}

/// How many columns a panel has on this machine; the last may be narrower.
pub(super) fn columns<T: Lanes>(device: &Device) -> usize {
    device.arch().dispatch(Columns::<T>(PhantomData))
}

struct Columns<T>(PhantomData<T>);

impl<T: Lanes> WithSimd for Columns<T> {
    type Output = usize;

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) -> usize {
        super::tile::VECTORS * T::lanes::<S>()
    }
}

/// `x` is (H W, N, C), `w` (taps, O, C), `out` (OH OW, N, O).
pub(super) fn forward<T: Lanes>(device: &Device, x: &[T], w: &[T], b: Option<&[T]>, p: Plan, out: &mut [T]) {
    let room = Storage::stale(device, size_of_val(w));
    let mut packed = room.write::<T>();
    let packed = &mut packed[..w.len()];
    {
        let _timer = device.time("convolution, kernels in panels");
        let columns = columns::<T>(device);
        device.for_chunks(packed, p.kh * p.kw * p.c * columns, |i, panel| {
            device.arch().dispatch(Pack { plan: &p, weights: w, column: i * columns, panel });
        });
    }
    let (weights, rows) = (&*packed, rows_per_task(device, out.len() / p.o));
    let (plan, toward, depth, width) = (&p, Toward::Output, p.c, p.o);
    device.for_chunks(out, rows * p.o, |i, result| {
        let first = i * rows;
        let sum = SumLinks { plan, toward, source: x, depth, weights, bias: b, result, width, first };
        device.arch().dispatch(sum);
    });
}

/// `g` is (OH OW, N, O), `w` (taps, O, C), `out` (H W, N, C).
pub(super) fn image_gradient<T: Lanes>(device: &Device, g: &[T], w: &[T], p: Plan, out: &mut [T]) {
    let rows = rows_per_task(device, out.len() / p.c);
    let (plan, toward, depth, width) = (&p, Toward::Input, p.o, p.c);
    device.for_chunks(out, rows * p.c, |i, result| {
        let first = i * rows;
        let sum = SumLinks { plan, toward, source: g, depth, weights: w, bias: None, result, width, first };
        device.arch().dispatch(sum);
    });
}

/// The gradient of one tap for some output channels.
struct SumOuter<'a, T> {
    plan: &'a Plan,
    tap: usize,
    inputs: &'a [T],
    grads: &'a [T],
    /// The first of the output channels.
    channel: usize,
    /// (output channels, C)
    sums: &'a mut [T],
}

impl<T: Lanes> WithSimd for SumOuter<'_, T> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(mut self, simd: S) {
        self.sums.fill(T::ZERO);
        let (area, some) =
            (self.plan.oh * self.plan.ow, (BLOCK / (self.plan.n * self.plan.c.max(self.plan.o))).max(1));
        for first in (0..area).step_by(some) {
            let outputs = first..(first + some).min(area);
            if S::REGISTER_COUNT >= 32 {
                self.block::<S, 8>(simd, outputs);
            } else {
                self.block::<S, 4>(simd, outputs);
            }
        }
    }
}

impl<T: Lanes> SumOuter<'_, T> {
    #[inline(always)]
    fn block<S: Simd, const R: usize>(&mut self, simd: S, outputs: Range<usize>) {
        let mut column = 0;
        while column < self.plan.c {
            let vectors = wide::<T, S>(self.plan.c - column);
            match vectors {
                2 => self.panel::<S, R, 2>(simd, outputs.clone(), column),
                _ => self.panel::<S, R, 1>(simd, outputs.clone(), column),
            }
            column += vectors * T::lanes::<S>();
        }
    }

    #[inline(always)]
    fn panel<S: Simd, const R: usize, const V: usize>(
        &mut self,
        simd: S,
        outputs: Range<usize>,
        column: usize,
    ) {
        let p = self.plan;
        for (i, sums) in self.sums.chunks_exact_mut(R * p.c).enumerate() {
            let channel = self.channel + i * R;
            let mut tile = zeros::<T, S, R, V>(simd);
            for output in outputs.clone() {
                let Some(input) = seen_by(p, self.tap, output) else { continue };
                let grads = &self.grads[output * p.n * p.o + channel..];
                let inputs = &self.inputs[input * p.n * p.c + column..];
                add_columns::<T, S, R, V>(simd, &mut tile, (grads, p.o), (inputs, p.c), p.n);
            }
            add_to::<T, S, R, V>(simd, sums, p.c, column, &tile);
        }
    }
}

/// `x` is (H W, N, C), `g` (OH OW, N, O), `out` (taps, O, C).
pub(super) fn kernel_gradient<T: Lanes>(device: &Device, x: &[T], g: &[T], p: Plan, out: &mut [T]) {
    let channels = if p.o.is_multiple_of(TASK_CHANNELS) { TASK_CHANNELS } else { MOST_LANES };
    device.for_chunks(out, channels * p.c, |i, sums| {
        let (tap, channel) = (i * channels / p.o, i * channels % p.o);
        device.arch().dispatch(SumOuter { plan: &p, tap, inputs: x, grads: g, channel, sums });
    });
}
