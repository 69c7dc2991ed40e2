//! Convolution of each channel by itself (depthwise), in pixel order.
//!
//! All channels of a pixel lie side by side, so a vector of them is multiplied with as many weights at once, and nothing is laid out
//! anew: images are (H W, N, C) and kernels (KH KW, C). A tile of [`crate::cpu::tile`] holds the sums of a few rows that see the same taps,
//! as in [`super::pixels`], whose links these sums go by as well; each weight that is read meets all rows of the tile. The gradient of the
//! images is the same with the links turned round. That of the kernels sums, tap by tap, what a stretch of a row of pixels links: as many
//! pixels as stay in the first cache while all taps go by.

use super::Plan;
use super::lowered::sum_over_runs;
use super::pixels::{MAX_TAPS, Toward, for_tiles, rows_per_task, slide};
use crate::cpu::lanes::{Lanes, MOST_LANES};
use crate::cpu::tile::{ByPanels, biased, by_panels, store, zeros};
use crate::device::Device;
use pulp::{Simd, WithSimd};
use std::ops::Range;

/// Rows of images and gradients that all taps of the kernel gradient go over in turn.
const ROWS: usize = 128;
/// Sums of the kernel gradient that are made beside each other: a multiply-add takes the time of a few.
const CHAINS: usize = 4;
/// The rows of output pixels fall into this many runs for the kernel gradient, each summed on its own and then together in order, so that
/// the result doesn't depend on the number of threads.
const RUNS: usize = 16;

/// Whether these kernels take a convolution.
pub(super) fn takes(p: &Plan) -> bool {
    has_channels([p.c, p.o], p.options.groups)
        && p.kh * p.kw <= MAX_TAPS
        && p.n * p.image() * p.out_image() > 0
}

/// Whether these kernels take convolutions between so many channels.
pub(super) fn has_channels([inputs, outputs]: [usize; 2], groups: usize) -> bool {
    groups > 1 && groups == inputs && inputs == outputs && inputs.is_multiple_of(MOST_LANES)
}

/// A sum over links, for rows of the result that follow each other.
struct SumTaps<'a, T> {
    plan: &'a Plan,
    toward: Toward,
    /// (pixels, N, C)
    source: &'a [T],
    /// (taps, C)
    weights: &'a [T],
    bias: Option<&'a [T]>,
    /// Rows of (pixels, N, C), from row `first` on.
    result: &'a mut [T],
    first: usize,
}

impl<T: Lanes> WithSimd for SumTaps<'_, T> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(mut self, simd: S) {
        by_panels(simd, self.plan.c, &mut self, &());
    }
}

impl<T: Lanes> ByPanels<T> for SumTaps<'_, T> {
    type Pass = ();

    #[inline(always)]
    fn panel<S: Simd, const R: usize, const V: usize>(&mut self, simd: S, (): &(), column: usize) {
        let (n, c, columns) = (self.plan.n, self.plan.c, V * T::lanes::<S>());
        let start = biased::<T, S, R, V>(simd, self.bias, column);
        let rows = self.first..self.first + self.result.len() / c;
        let (source, weights) = (self.source, self.weights);
        for_tiles::<R>(
            self.plan,
            self.toward,
            rows,
            #[inline(always)]
            |row, height, links, behind| {
                let mut sums = start;
                for link in links.iter() {
                    let weights = row_of::<T, S, V>(&weights[link.tap * c + column..][..columns]);
                    for (sums, behind) in sums.iter_mut().zip(behind) {
                        let source = &source[(link.pixel * n + behind) * c + column..][..columns];
                        for ((sum, &x), &weight) in
                            sums.iter_mut().zip(row_of::<T, S, V>(source)).zip(weights)
                        {
                            *sum = T::multiply_add(simd, x, weight, *sum);
                        }
                    }
                }
                let to = &mut self.result[(row - self.first) * c..][..height * c];
                store::<T, S, R, V>(&sums, to, c, column);
            },
        );
    }
}

/// V vectors of numbers.
#[inline(always)]
fn row_of<T: Lanes, S: Simd, const V: usize>(numbers: &[T]) -> &[T::Vector<S>; V] {
    &T::vectors::<S>(numbers).as_chunks::<V>().0[0]
}

fn sum_taps<T: Lanes>(
    device: &Device,
    (plan, toward): (&Plan, Toward),
    source: &[T],
    weights: &[T],
    bias: Option<&[T]>,
    out: &mut [T],
) {
    let rows = rows_per_task(device, out.len() / plan.c);
    device.for_chunks(out, rows * plan.c, |i, result| {
        let first = i * rows;
        device.arch().dispatch(SumTaps { plan, toward, source, weights, bias, result, first });
    });
}

/// `x` is (H W, N, C), `w` (taps, C), `out` (OH OW, N, C).
pub(super) fn forward<T: Lanes>(device: &Device, x: &[T], w: &[T], b: Option<&[T]>, p: Plan, out: &mut [T]) {
    sum_taps(device, (&p, Toward::Output), x, w, b, out);
}

/// `g` is (OH OW, N, C), `w` (taps, C), `out` (H W, N, C).
pub(super) fn image_gradient<T: Lanes>(device: &Device, g: &[T], w: &[T], p: Plan, out: &mut [T]) {
    sum_taps(device, (&p, Toward::Input), g, w, None, out);
}

/// Adds to the sums of all taps what some rows of output pixels link.
struct SumLinked<'a, T> {
    plan: &'a Plan,
    /// (H W, N, C)
    images: &'a [T],
    /// (OH OW, N, C)
    grads: &'a [T],
    output_rows: Range<usize>,
    /// (taps, C)
    sums: &'a mut [T],
}

impl<T: Lanes> WithSimd for SumLinked<'_, T> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(mut self, simd: S) {
        by_panels(simd, self.plan.c, &mut self, &());
    }
}

impl<T: Lanes> ByPanels<T> for SumLinked<'_, T> {
    type Pass = ();

    #[inline(always)]
    fn panel<S: Simd, const R: usize, const V: usize>(&mut self, simd: S, (): &(), column: usize) {
        let p = self.plan;
        let pixels = (ROWS / p.n).max(1);
        for row in self.output_rows.clone() {
            for first in (0..p.ow).step_by(pixels) {
                let outputs = first..p.ow.min(first + pixels);
                for tap in 0..p.kh * p.kw {
                    let below = tap / p.kw * p.options.dilation[0];
                    let Some(from) = slide(p, 0).sees(row, below, p.h) else { continue };
                    self.tap::<S, V>(simd, column, tap, [row, from], outputs.clone());
                }
            }
        }
    }
}

impl<T: Lanes> SumLinked<'_, T> {
    /// What tap `tap` links to pixels `outputs` of row `to`, all in row `from`.
    #[inline(always)]
    fn tap<S: Simd, const V: usize>(
        &mut self,
        simd: S,
        column: usize,
        tap: usize,
        [to, from]: [usize; 2],
        outputs: Range<usize>,
    ) {
        let (p, columns) = (self.plan, V * T::lanes::<S>());
        let (n, c, aside) = (p.n, p.c, tap % p.kw * p.options.dilation[1]);
        let sees = |output: usize| slide(p, 1).sees(output, aside, p.w);
        let Some(begin) = outputs.clone().find(|&output| sees(output).is_some()) else { return };
        let end = outputs.rev().find(|&output| sees(output).is_some()).map_or(begin, |last| last + 1);
        // Pixels that follow each other are seen as one where their images' do.
        let together = if p.options.stride[1] == 1 { end - begin } else { 1 };
        let mut chains = zeros::<T, S, CHAINS, V>(simd);
        for output in (begin..end).step_by(together) {
            let input = from * p.w + sees(output).expect("between two that see one");
            let rows = |all: &'_ [T], pixel: usize| pixel * n * c + column..all.len();
            let grads = &self.grads[rows(self.grads, to * p.ow + output)];
            let images = &self.images[rows(self.images, input)];
            for i in 0..together * n {
                let [g, x] = [grads, images].map(|all| row_of::<T, S, V>(&all[i * c..][..columns]));
                for ((sum, &g), &x) in chains[i % CHAINS].iter_mut().zip(g).zip(x) {
                    *sum = T::multiply_add(simd, g, x, *sum);
                }
            }
        }
        let sums = &mut T::vectors_mut::<S>(&mut self.sums[tap * c + column..][..columns])[..V];
        for chain in &chains {
            sums.iter_mut().zip(chain).for_each(|(sum, &more)| *sum = T::plus(simd, *sum, more));
        }
    }
}

/// `x` is (H W, N, C), `g` (OH OW, N, C), `out` (taps, C).
pub(super) fn kernel_gradient<T: Lanes>(device: &Device, x: &[T], g: &[T], p: Plan, out: &mut [T]) {
    sum_over_runs(device, RUNS, p.oh, out, |output_rows, sums| {
        sums.fill(T::ZERO);
        device.arch().dispatch(SumLinked { plan: &p, images: x, grads: g, output_rows, sums });
    });
}
