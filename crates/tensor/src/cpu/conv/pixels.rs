//! Convolution pixel by pixel, for many channels.
//!
//! Images lie in pixel order, (H W, N, C), and kernels tap by tap, (KH KW, C, O): see [`crate::Order`]. A pixel of the result is
//! a sum over its *links*: pairs of a kernel tap and the source pixel that it sees. Taps that fall into the padding have no
//! link, so nothing is multiplied with zeros: of the taps of a 3x3 kernel on 2x2 pixels more than half meet padding, on 1x1
//! pixels eight of nine. All links of a result are summed in registers ([`crate::cpu::tile`]), and nothing is laid out anew.
//!
//! The gradient of the images is the same sum with the links turned around; it needs the kernels turned around too, in panels
//! as wide as a tile. The gradient of a kernel tap is the sum of outer
//! products over the pairs of pixels that the tap links.

use super::Plan;
use crate::cpu::lanes::{Lanes, MOST_LANES};
use crate::cpu::tile::{
    ByPanels, VECTORS, add_columns, add_long_rows, add_to, biased, by_panels, in_panels, store, zeros,
};
use crate::cpu::window::Slide;
use crate::device::Device;
use crate::storage::Storage;
use pulp::{Simd, WithSimd};
use std::ops::Range;

/// More taps than this don't fit into the list of links.
const MAX_TAPS: usize = 64;
/// With fewer samples the tiles aren't full.
const MIN_SAMPLES: usize = 4;
/// Numbers of one side that a block of rows of the kernel gradient holds: so many that they stay in the second cache.
const BLOCK: usize = 1 << 13;
/// Gradients of more channels than this lie so far apart that few of a column fit into the first cache: they are laid side by
/// side first, so many rows of them, or one pixel's.
const FAR_APART: usize = 255;
const PACKED_ROWS: usize = 256;
/// Input channels that one task of the kernel gradient takes.
const TASK_CHANNELS: usize = 32;

/// Whether these kernels take a convolution.
pub(super) fn takes(p: &Plan) -> bool {
    has_channels([p.c, p.o], p.options.groups) && p.n >= MIN_SAMPLES && p.kh * p.kw <= MAX_TAPS
}

/// Whether these kernels take convolutions between so many channels.
pub(super) fn has_channels([inputs, outputs]: [usize; 2], groups: usize) -> bool {
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
        let seen = |d: usize, at: usize, tap: usize, size: usize| match toward {
            Toward::Output => slide(p, d).sees(at, tap * p.options.dilation[d], size),
            Toward::Input => slide(p, d).seen_by(at, tap * p.options.dilation[d], size),
        };
        let (to_w, [from_h, from_w]) = match toward {
            Toward::Output => (p.ow, [p.h, p.w]),
            Toward::Input => (p.w, [p.oh, p.ow]),
        };
        for ky in 0..p.kh {
            let Some(row) = seen(0, pixel / to_w, ky, from_h) else { continue };
            for kx in 0..p.kw {
                let Some(column) = seen(1, pixel % to_w, kx, from_w) else { continue };
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

/// How the kernels move along dimension `d`.
#[inline(always)]
fn slide(p: &Plan, d: usize) -> Slide {
    Slide { stride: p.options.stride[d], padding: p.options.padding[d] }
}

/// The input pixel that a tap of an output pixel sees.
#[inline(always)]
fn seen_by(p: &Plan, tap: usize, output: usize) -> Option<usize> {
    let [dy, dx] = p.options.dilation;
    let row = slide(p, 0).sees(output / p.ow, tap / p.kw * dy, p.h)?;
    Some(row * p.w + slide(p, 1).sees(output % p.ow, tap % p.kw * dx, p.w)?)
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
    /// Toward the output, the kernels as they are: (tap, depth, width); toward the input, panels of columns: (panel, tap, depth,
    /// columns of the panel).
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
        by_panels(simd, self.width, &mut self, &());
    }
}

impl<T: Lanes> ByPanels<T> for SumLinks<'_, T> {
    type Pass = ();

    /// All rows go by before the next panel, so that the panel stays in the cache.
    #[inline(always)]
    fn panel<S: Simd, const R: usize, const V: usize>(&mut self, simd: S, (): &(), column: usize) {
        let (n, width, depth) = (self.plan.n, self.width, self.depth);
        let (panel, b_width) = match self.toward {
            Toward::Output => (&self.weights[column..], width),
            Toward::Input => {
                (&self.weights[self.plan.kh * self.plan.kw * depth * column..], V * T::lanes::<S>())
            }
        };
        let start = biased::<T, S, R, V>(simd, self.bias, column);
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
                let mut sums = start;
                for link in links.iter() {
                    let source = (self.source, offsets.map(|offset| link.pixel * n * depth + offset));
                    let weights = (&panel[link.tap * depth * b_width..], b_width);
                    add_long_rows::<T, S, R, V>(simd, &mut sums, source, weights, depth);
                }
                let to = &mut self.result[(row + tile) * width..][..height * width];
                store::<T, S, R, V>(&sums, to, width, column);
            }
            row += samples;
        }
    }
}

/// Rows that one task of a sum takes.
fn rows_per_task(device: &Device, rows: usize) -> usize {
    if device.threads() == 1 { rows } else { rows.div_ceil(4 * device.threads()).next_multiple_of(8) }
}

/// `x` is (H W, N, C), `w` (taps, C, O), `out` (OH OW, N, O).
pub(super) fn forward<T: Lanes>(device: &Device, x: &[T], w: &[T], b: Option<&[T]>, p: Plan, out: &mut [T]) {
    let rows = rows_per_task(device, out.len() / p.o);
    let (plan, toward, depth, width) = (&p, Toward::Output, p.c, p.o);
    device.for_chunks(out, rows * p.o, |i, result| {
        let first = i * rows;
        let sum = SumLinks { plan, toward, source: x, depth, weights: w, bias: b, result, width, first };
        device.arch().dispatch(sum);
    });
}

/// `g` is (OH OW, N, O), `w` (taps, C, O), `out` (H W, N, C).
pub(super) fn image_gradient<T: Lanes>(device: &Device, g: &[T], w: &[T], p: Plan, out: &mut [T]) {
    let room = Storage::stale(device, size_of_val(w));
    let mut turned = room.write::<T>();
    let turned = &mut turned[..w.len()];
    {
        let _timer = device.time("convolution, kernels in panels");
        in_panels(device, w, [p.kh * p.kw, p.c, p.o], |tap| is_used(&p, tap), turned);
    }
    let (weights, rows) = (&*turned, rows_per_task(device, out.len() / p.c));
    let (plan, toward, depth, width) = (&p, Toward::Input, p.o, p.c);
    device.for_chunks(out, rows * p.c, |i, result| {
        let first = i * rows;
        let sum = SumLinks { plan, toward, source: g, depth, weights, bias: None, result, width, first };
        device.arch().dispatch(sum);
    });
}

/// The gradient of one tap for some input channels.
struct SumOuter<'a, T> {
    plan: &'a Plan,
    tap: usize,
    inputs: &'a [T],
    grads: &'a [T],
    /// The first of the input channels.
    channel: usize,
    /// (input channels, O)
    sums: &'a mut [T],
    /// Room for the columns of a panel, if they are laid side by side.
    packed: Option<&'a mut [T]>,
}

/// Rows that are laid side by side.
fn packed_rows(p: &Plan) -> usize {
    PACKED_ROWS.next_multiple_of(p.n)
}

impl<T: Lanes> WithSimd for SumOuter<'_, T> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(mut self, simd: S) {
        self.sums.fill(T::ZERO);
        let Plan { n, c, o, oh, ow, .. } = *self.plan;
        let area = oh * ow;
        let some = if self.packed.is_some() { packed_rows(self.plan) / n } else { BLOCK / (n * c.max(o)) };
        let some = some.max(1);
        for first in (0..area).step_by(some) {
            by_panels(simd, self.plan.o, &mut self, &(first..(first + some).min(area)));
        }
    }
}

impl<T: Lanes> ByPanels<T> for SumOuter<'_, T> {
    /// The output pixels.
    type Pass = Range<usize>;

    #[inline(always)]
    fn panel<S: Simd, const R: usize, const V: usize>(
        &mut self,
        simd: S,
        outputs: &Range<usize>,
        column: usize,
    ) {
        let p = self.plan;
        let columns = V * T::lanes::<S>();
        let size = outputs.len() * p.n * columns;
        if let Some(packed) = &mut self.packed {
            let rows = self.grads[outputs.start * p.n * p.o + column..].chunks(p.o);
            for (packed, row) in packed[..size].chunks_exact_mut(columns).zip(rows) {
                packed.copy_from_slice(&row[..columns]);
            }
        }
        for (i, sums) in self.sums.chunks_exact_mut(R * p.o).enumerate() {
            let channel = self.channel + i * R;
            let mut tile = zeros::<T, S, R, V>(simd);
            for output in outputs.clone() {
                let Some(input) = seen_by(p, self.tap, output) else { continue };
                let inputs = (&self.inputs[input * p.n * p.c + channel..], p.c);
                let grads = match &self.packed {
                    Some(packed) => (&packed[(output - outputs.start) * p.n * columns..size], columns),
                    None => (&self.grads[output * p.n * p.o + column..], p.o),
                };
                add_columns::<T, S, R, V>(simd, &mut tile, inputs, grads, p.n);
            }
            add_to::<T, S, R, V>(simd, sums, p.o, column, &tile);
        }
    }
}

/// `x` is (H W, N, C), `g` (OH OW, N, O), `out` (taps, C, O).
pub(super) fn kernel_gradient<T: Lanes>(device: &Device, x: &[T], g: &[T], p: Plan, out: &mut [T]) {
    let channels = if p.c.is_multiple_of(TASK_CHANNELS) { TASK_CHANNELS } else { MOST_LANES };
    device.for_chunks(out, channels * p.o, |i, sums| {
        let (tap, channel) = (i * channels / p.c, i * channels % p.c);
        let room = (p.o > FAR_APART)
            .then(|| Storage::stale(device, packed_rows(&p) * VECTORS * MOST_LANES * size_of::<T>()));
        let mut packed = room.as_ref().map(|room| room.write::<T>());
        let packed = packed.as_deref_mut();
        device.arch().dispatch(SumOuter { plan: &p, tap, inputs: x, grads: g, channel, sums, packed });
    });
}
