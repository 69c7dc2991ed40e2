//! Convolution pixel by pixel, for many channels.
//!
//! Images lie in pixel order, (H W, N, C), and kernels tap by tap, (KH KW, C, O): see [`crate::Order`]. A pixel of the result is
//! a sum over its *links*: pairs of a kernel tap and the source pixel that it sees. Taps that fall into the padding have no
//! link, so nothing is multiplied with zeros: of the taps of a 3x3 kernel on 2x2 pixels more than half meet padding, on 1x1
//! pixels eight of nine. All links of a result are summed in registers ([`crate::cpu::tile`]), of all samples of a pixel, and of the pixels
//! behind it in its row that see as many taps. Images are read as they lie; kernels are laid out in panels as wide as a tile, some at a
//! time, which stay in the second cache while they are summed with.
//!
//! The gradient of the images is the same sum with the links and the kernels turned around. The gradient of a kernel tap is the sum of
//! outer products over the pairs of pixels that the tap links. The gradients of a few pixels at a time are laid side by side, and multiplied
//! with what each of the taps links to them, for so many channels that all sums stay in the second cache.

use super::Plan;
use crate::cpu::gemm::Into;
use crate::cpu::lanes::{Lanes, MOST_LANES};
use crate::cpu::tile::{
    ByPanels, Columns, Turned, add_long_rows, add_outer, add_to, biased, by_panels, by_tall_panels,
    in_panels, side_by_side, store, zeros,
};
use crate::cpu::window::Slide;
use crate::device::Device;
use crate::op::Conv2dOptions;
use crate::storage::Storage;
use pulp::{Simd, WithSimd};
use std::ops::Range;

/// More taps than this don't fit into the list of links.
pub(super) const MAX_TAPS: usize = 64;
/// With fewer rows that see the same taps, samples of a pixel or of several, the tiles aren't full.
const MIN_SAMPLES: usize = 4;
/// Numbers of kernels, for each thread, that are laid out in panels before they are summed with: so many that they are still in the second
/// cache then.
const LAID_OUT: usize = 1 << 17;
/// Rows of images and gradients that the kernel gradient takes at once: so many that a block of the one and a panel of the other stay in
/// the first cache.
pub(super) const ROWS: usize = 128;
/// Channels of a block.
pub(super) const BLOCK: usize = MOST_LANES;
/// Sums that one task of the kernel gradient takes, as far as they aren't of one block: so many that they stay in the second cache.
const MOST_SUMS: usize = 3 << 16;

/// Whether these kernels take a convolution.
pub(super) fn takes(p: &Plan) -> bool {
    let fills_tiles = || {
        [Toward::Output, Toward::Input]
            .into_iter()
            .all(|toward| rows_alike(&in_one_row(*p), toward) >= MIN_SAMPLES)
    };
    has_channels([p.c, p.o], p.options.groups) && p.kh * p.kw <= MAX_TAPS && fills_tiles()
}

/// Whether these kernels take convolutions between so many channels.
pub(super) fn has_channels([inputs, outputs]: [usize; 2], groups: usize) -> bool {
    let fits = |channels: usize| channels > 0 && channels.is_multiple_of(MOST_LANES);
    groups == 1 && fits(inputs) && fits(outputs)
}

/// Which way a sum goes.
#[derive(Clone, Copy)]
pub(super) enum Toward {
    Output,
    Input,
}

/// A kernel tap, and the pixel that it sees.
#[derive(Clone, Copy, Default)]
pub(super) struct Link {
    pub(super) tap: usize,
    pub(super) pixel: usize,
}

/// The links of one pixel, in the order of taps.
pub(super) struct Links {
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

    pub(super) fn iter(&self) -> impl Iterator<Item = Link> {
        self.list[..self.count].iter().copied()
    }
}

/// The pixels of a row of the result that all taps of a kernel row see, and how many pixels of the source lie between those that they see:
/// what one of them is linked to lies so far before what the next is.
fn alike(p: &Plan, toward: Toward) -> (Range<usize>, usize) {
    let (stride, padding, reach) =
        (p.options.stride[1], p.options.padding[1], (p.kw - 1) * p.options.dilation[1]);
    match toward {
        Toward::Output => {
            let end = (p.w + padding).checked_sub(reach).map_or(0, |room| room.div_ceil(stride));
            (padding.div_ceil(stride)..end.min(p.ow), stride)
        }
        // Of a stride each pixel is seen by other taps than the next.
        Toward::Input if stride > 1 => (0..0, 1),
        Toward::Input => (reach.saturating_sub(padding)..p.ow.saturating_sub(padding).min(p.w), 1),
    }
}

/// Rows of the result that follow each other and see the same taps, mostly.
fn rows_alike(p: &Plan, toward: Toward) -> usize {
    p.n * alike(p, toward).0.len().max(1)
}

/// The same convolution where kernels of a pixel take all pixels of an image as one row.
fn in_one_row(p: Plan) -> Plan {
    let Conv2dOptions { stride, padding, .. } = p.options;
    if [p.kh, p.kw, stride[0], stride[1]] != [1; 4] || padding != [0; 2] {
        return p;
    }
    Plan { h: 1, w: p.h * p.w, oh: 1, ow: p.oh * p.ow, ..p }
}

/// How the kernels move along dimension `d`.
#[inline(always)]
pub(super) fn slide(p: &Plan, d: usize) -> Slide {
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
    /// Some columns, in panels: (panel, tap, depth, columns of the panel).
    weights: &'a [T],
    columns: Range<usize>,
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
        let rows = rows_alike(self.plan, self.toward);
        by_tall_panels(simd, rows, self.columns.len(), &mut self, &());
    }
}

impl<T: Lanes> ByPanels<T> for SumLinks<'_, T> {
    type Pass = ();

    /// All rows go by before the next panel, so that the panel stays in the cache.
    #[inline(always)]
    fn panel<S: Simd, const R: usize, const V: usize>(&mut self, simd: S, (): &(), column: usize) {
        let (n, width, depth) = (self.plan.n, self.width, self.depth);
        let columns = V * T::lanes::<S>();
        let panel = &self.weights[self.plan.kh * self.plan.kw * depth * column..];
        let column = self.columns.start + column;
        let start = biased::<T, S, R, V>(simd, self.bias, column);
        let rows = self.first..self.first + self.result.len() / width;
        for_tiles::<R>(
            self.plan,
            self.toward,
            rows,
            #[inline(always)]
            |row, height, links, behind| {
                let mut sums = start;
                for link in links.iter() {
                    let source = (self.source, behind.map(|behind| (link.pixel * n + behind) * depth));
                    let weights = (&panel[link.tap * depth * columns..], columns);
                    add_long_rows::<T, S, R, V>(simd, &mut sums, source, weights, depth);
                }
                let to = &mut self.result[(row - self.first) * width..][..height * width];
                store::<T, S, R, V>(&sums, to, width, column);
            },
        );
    }
}

/// Calls `each` for tiles of up to R of these rows of the result, samples of pixels: with the first row of one, how many it has, the
/// links of its first pixel, and how many rows of the source each row's lie behind the first sample of those. A short tile has its last
/// row again.
#[inline(always)]
pub(super) fn for_tiles<const R: usize>(
    p: &Plan,
    toward: Toward,
    rows: Range<usize>,
    mut each: impl FnMut(usize, usize, &Links, [usize; R]),
) {
    let (n, (alike, apart)) = (p.n, alike(p, toward));
    let result_w = if matches!(toward, Toward::Output) { p.ow } else { p.w };
    let mut row = rows.start;
    while row < rows.end {
        let (pixel, sample) = (row / n, row % n);
        let links = Links::of(p, toward, pixel);
        let at = pixel % result_w;
        let pixels = if alike.contains(&at) { alike.end - at } else { 1 };
        let samples = (pixels * n - sample).min(rows.end - row);
        for tile in (0..samples).step_by(R) {
            let height = R.min(samples - tile);
            let behind = std::array::from_fn(|i| {
                let behind = sample + tile + i.min(height - 1);
                if apart == 1 { behind } else { behind / n * apart * n + behind % n }
            });
            each(row + tile, height, &links, behind);
        }
        row += samples;
    }
}

/// A sum over links, for the whole result.
struct Sum<'a, T> {
    plan: &'a Plan,
    toward: Toward,
    source: &'a [T],
    /// (taps, C, O)
    kernels: &'a [T],
    bias: Option<&'a [T]>,
}

impl<T: Lanes> Sum<'_, T> {
    fn onto(self, device: &Device, out: &mut [T]) {
        let Sum { plan, toward, source, kernels, bias } = self;
        let plan = &in_one_row(*plan);
        let (turned, depth, width) = match toward {
            Toward::Output => (Turned::No, plan.c, plan.o),
            Toward::Input => (Turned::Yes, plan.o, plan.c),
        };
        let sizes = [plan.kh * plan.kw, depth, width];
        let panel = device.arch().dispatch(Columns::of::<T>()).panel;
        let some =
            (LAID_OUT * device.threads() / (sizes[0] * depth)).max(1).next_multiple_of(panel).min(width);
        let rows = rows_per_task(device, out.len() / width);
        let room = Storage::stale(device, sizes[0] * depth * some * size_of::<T>());
        for from in (0..width).step_by(some) {
            let columns = from..width.min(from + some);
            let mut weights = room.write::<T>();
            let weights = &mut weights[..sizes[0] * depth * columns.len()];
            in_panels(device, kernels, sizes, turned, from, |tap| is_used(plan, tap), weights);
            let weights = &*weights;
            device.for_chunks(out, rows * width, |i, result| {
                let (columns, first) = (columns.clone(), i * rows);
                device.arch().dispatch(SumLinks {
                    plan,
                    toward,
                    source,
                    depth,
                    weights,
                    columns,
                    bias,
                    result,
                    width,
                    first,
                });
            });
        }
    }
}

/// Rows that one task of a sum takes: whole tiles of 4, 6 and 8.
pub(super) fn rows_per_task(device: &Device, rows: usize) -> usize {
    if device.threads() == 1 { rows } else { rows.div_ceil(4 * device.threads()).next_multiple_of(24) }
}

/// `x` is (H W, N, C), `w` (taps, C, O), `out` (OH OW, N, O).
pub(super) fn forward<T: Lanes>(device: &Device, x: &[T], w: &[T], b: Option<&[T]>, p: Plan, out: &mut [T]) {
    let sum = Sum { plan: &p, toward: Toward::Output, source: x, kernels: w, bias: b };
    sum.onto(device, out);
}

/// `g` is (OH OW, N, O), `w` (taps, C, O), `out` (H W, N, C).
pub(super) fn image_gradient<T: Lanes>(device: &Device, g: &[T], w: &[T], p: Plan, out: &mut [T]) {
    let sum = Sum { plan: &p, toward: Toward::Input, source: g, kernels: w, bias: None };
    sum.onto(device, out);
}

/// Samples of some output pixels, whose gradients are laid out at once.
struct Part {
    outputs: Range<usize>,
    samples: Range<usize>,
}

impl Part {
    /// Each a row of the gradients.
    fn rows(&self) -> usize {
        self.outputs.len() * self.samples.len()
    }

    /// Output pixels and samples that one is of: at most [`ROWS`] rows, of some pixels or, where there are more samples, of some of these.
    fn sizes(p: &Plan) -> [usize; 2] {
        [(ROWS / p.n).max(1), p.n.div_ceil(p.n.div_ceil(ROWS))]
    }

    fn all(p: &Plan) -> impl Iterator<Item = Part> {
        let (area, n, [outputs, samples]) = (p.oh * p.ow, p.n, Part::sizes(p));
        (0..n).step_by(samples).flat_map(move |sample| {
            (0..area).step_by(outputs).map(move |output| Part {
                outputs: output..area.min(output + outputs),
                samples: sample..n.min(sample + samples),
            })
        })
    }
}

/// The gradients of a part in panels: (panel, rows, columns of the panel).
fn lay_out_grads<T: Lanes>(device: &Device, grads: &[T], p: &Plan, part: &Part, panels: &mut [T]) {
    let (rows, panel) = (part.rows(), device.arch().dispatch(Columns::of::<T>()).panel);
    device.arch().run(
        #[inline(always)]
        || {
            for column in (0..p.o).step_by(panel) {
                let columns = panel.min(p.o - column);
                let panel = &mut panels[rows * column..][..rows * columns];
                // What has all samples of a pixel is followed by those of the next.
                let pixels = if part.samples.len() == p.n { part.outputs.len() } else { 1 };
                let to = panel.chunks_mut(pixels * part.samples.len() * columns);
                for (to, output) in to.zip(part.outputs.clone().step_by(pixels)) {
                    let from = &grads[(output * p.n + part.samples.start) * p.o..];
                    side_by_side(from, [p.o, column], to, columns);
                }
            }
        },
    );
}

/// What a tap links to a part: the input pixel, and to which of the output pixels it is linked.
struct Linked {
    list: [[usize; 2]; ROWS],
    count: usize,
}

impl Linked {
    fn of(p: &Plan, tap: usize, part: &Part) -> Linked {
        let mut linked = Linked { list: [[0; 2]; ROWS], count: 0 };
        for (i, output) in part.outputs.clone().enumerate() {
            if let Some(input) = seen_by(p, tap, output) {
                linked.list[linked.count] = [input, i];
                linked.count += 1;
            }
        }
        linked
    }

    fn pixels(&self) -> &[[usize; 2]] {
        &self.list[..self.count]
    }
}

/// Some channels of what is linked to a part: (block, rows that are linked, BLOCK).
fn lay_out_inputs<T: Lanes>(
    device: &Device,
    inputs: &[T],
    p: &Plan,
    (part, linked): (&Part, &Linked),
    channels: Range<usize>,
    blocks: &mut [T],
) {
    let (row, is_whole) = (part.samples.len() * BLOCK, part.samples.len() == p.n);
    device.arch().run(
        #[inline(always)]
        || {
            let blocks = blocks.chunks_exact_mut(linked.count * row);
            for (block, channel) in blocks.zip(channels.clone().step_by(BLOCK)) {
                let mut left = block;
                for run in linked.pixels().chunk_by(|one, next| is_whole && one[0] + 1 == next[0]) {
                    let (to, others) = left.split_at_mut(run.len() * row);
                    let from = &inputs[(run[0][0] * p.n + part.samples.start) * p.c..];
                    side_by_side(from, [p.c, channel], to, BLOCK);
                    left = others;
                }
            }
        },
    );
}

/// Adds what a tap links to a part to its gradient, or begins with it.
struct SumOuter<'a, T> {
    linked: &'a Linked,
    /// Samples of the part, and its rows.
    samples: usize,
    rows: usize,
    /// (block, rows that are linked, BLOCK)
    left: &'a [T],
    /// (panel, rows, columns of the panel)
    right: &'a [T],
    /// (some of C, O)
    sums: &'a mut [T],
    into: Into,
    width: usize,
}

impl<T: Lanes> WithSimd for SumOuter<'_, T> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(mut self, simd: S) {
        by_panels(simd, self.width, &mut self, &());
    }
}

impl<T: Lanes> ByPanels<T> for SumOuter<'_, T> {
    type Pass = ();

    #[inline(always)]
    fn panel<S: Simd, const R: usize, const V: usize>(&mut self, simd: S, (): &(), column: usize) {
        let &mut SumOuter { linked, samples, rows, left, right, width, .. } = self;
        let columns = V * T::lanes::<S>();
        let right = &right[rows * column..][..rows * columns];
        let blocks = left.as_chunks::<BLOCK>().0.chunks_exact(linked.count * samples);
        for (sums, block) in self.sums.chunks_exact_mut(BLOCK * width).zip(blocks) {
            for (i, sums) in sums.chunks_exact_mut(R * width).enumerate() {
                let mut tile = zeros::<T, S, R, V>(simd);
                let mut done = 0;
                // Output pixels that follow each other are summed in one go.
                for run in linked.pixels().chunk_by(|one, next| one[1] + 1 == next[1]) {
                    let (first, rows) = (run[0][1] * samples, run.len() * samples);
                    let (left, right) = (&block[done..][..rows], &right[first * columns..][..rows * columns]);
                    add_outer::<T, S, R, V, BLOCK>(simd, &mut tile, (left, i * R), right);
                    done += rows;
                }
                match self.into {
                    Into::Replace => store::<T, S, R, V>(&tile, sums, width, column),
                    Into::Add => add_to::<T, S, R, V>(simd, sums, width, column, &tile),
                }
            }
        }
    }
}

/// Taps and input channels whose gradients one task sums: as many blocks of channels as keep their sums in the second cache, or one, and as
/// many tasks as threads or a multiple of that, as far as there are as many taps. Each number is summed in the same order however they are
/// shared out.
fn task_sizes(p: &Plan, threads: usize) -> [usize; 2] {
    let (taps, blocks) = (p.kh * p.kw, p.c / BLOCK);
    let most = (MOST_SUMS / (taps * p.o * BLOCK)).clamp(1, blocks.div_ceil(threads));
    let some = (1..=most).rev().find(|&some| blocks.is_multiple_of(some)).unwrap_or(1);
    // The fewest parts of the taps that make so many tasks.
    let parts = (1..threads).find(|parts| (blocks / some * parts).is_multiple_of(threads)).unwrap_or(threads);
    [taps.div_ceil(parts), some * BLOCK]
}

/// `x` is (H W, N, C), `g` (OH OW, N, O), `out` (taps, C, O).
pub(super) fn kernel_gradient<T: Lanes>(device: &Device, x: &[T], g: &[T], p: Plan, out: &mut [T]) {
    let (p, width) = (&in_one_row(p), p.o);
    let [taps, channels] = task_sizes(p, device.threads());
    // A row is a tap, its numbers are some of (C, O).
    device.for_blocks(out, p.c * width, [taps, channels * width], |mut sums| {
        let channels = sums.columns().start / width..sums.columns().end / width;
        let most_rows: usize = Part::sizes(p).iter().product();
        let [left, right] = [channels.len(), width]
            .map(|columns| Storage::stale(device, most_rows * columns * size_of::<T>()));
        let (mut left, mut right) = (left.write::<T>(), right.write::<T>());
        let mut is_begun = [false; MAX_TAPS];
        for part in Part::all(p) {
            lay_out_grads(device, g, p, &part, &mut right);
            for tap in sums.rows() {
                let linked = &Linked::of(p, tap, &part);
                if linked.count == 0 {
                    continue;
                }
                lay_out_inputs(device, x, p, (&part, linked), channels.clone(), &mut left);
                let (samples, rows) = (part.samples.len(), part.rows());
                let (left, right, sums) = (&left[..], &right[..], sums.row_mut(tap));
                let into = if is_begun[tap] { Into::Add } else { Into::Replace };
                device.arch().dispatch(SumOuter { linked, samples, rows, left, right, sums, into, width });
                is_begun[tap] = true;
            }
        }
        for tap in sums.rows().filter(|&tap| !is_begun[tap]) {
            sums.row_mut(tap).fill(T::ZERO);
        }
    });
}
