//! Convolution with 3x3 kernels and stride 1 by the minimal filtering of Winograd, in the form of Lavin and Gray
//! (<https://arxiv.org/abs/1509.09308>): F(2x2, 3x3). Images and kernels lie in pixel order, as in [`super::pixels`].
//!
//! Four outputs that form a square are told from the 4x4 pixels that they see. Pixels d, kernel g and outputs y are linked by
//! y = A' ((G g G') * (B' d B)) A, where * multiplies element by element: 16 products instead of 36. The sum over input
//! channels goes inside, so that each of the 16 elements is a matrix product of its own over all squares, samples and channels.
//! B and A hold only 0, 1 and -1: in pixel order both changes are sums of whole rows. They are made for some samples of a row
//! of squares at a time, which stay in the cache while their products are taken.
//!
//! The gradient of the images is the same with the kernel turned around. For the gradient of the kernel the formula is read
//! backwards: dg = G' (sum of (A dy A') * (B' d B)) G.

use super::Plan;
use super::lowered::sum_over_runs;
use super::pixels::{self, BLOCK};
use crate::cpu::gemm::Into;
use crate::cpu::lanes::Lanes;
use crate::cpu::tile::{
    ByPanels, Columns, Turned, VECTORS, add_long_rows, by_panels, by_tall_panels, in_panels, store,
    sum_blocks, zeros,
};
use crate::device::Device;
use crate::storage::Storage;
use pulp::{Simd, WithSimd};
use std::ops::Range;

/// Elements of a changed square.
const ELEMENTS: usize = 16;
/// Rows (squares times samples) that are changed at once.
const ROWS: usize = 64;
/// The rows of squares fall into this many runs for the kernel gradient, each summed on its own and then together in order, so
/// that the result doesn't depend on the number of threads.
const RUNS: usize = 4;
/// Above this many kernels the sums of the runs cost more than is won.
const MAX_KERNELS: usize = 1 << 17;

/// Whether these kernels take a convolution that [`pixels`] takes, too.
pub(super) fn takes(p: &Plan) -> bool {
    let options = p.options;
    let plain = (p.kh, p.kw, options.stride, options.dilation) == (3, 3, [1, 1], [1, 1]);
    let padding = options.padding;
    // On small images most of what is saved is padding, which the sum over links doesn't multiply either.
    plain && padding[0] == padding[1] && padding[0] <= 2 && p.oh.min(p.ow) >= 4 && pixels::takes(p)
}

/// Whether they take its kernel gradient, too.
pub(super) fn takes_kernel_gradient(p: &Plan) -> bool {
    takes(p) && p.o * p.c <= MAX_KERNELS
}

/// Where a sum over squares reads and writes.
#[derive(Clone, Copy)]
struct Sides {
    n: usize,
    /// Height and width of the source, and its channels.
    from: [usize; 2],
    depth: usize,
    /// Height and width of the result, and its channels.
    to: [usize; 2],
    width: usize,
    padding: usize,
}

impl Sides {
    /// Squares in a row.
    fn squares(&self) -> usize {
        self.to[1].div_ceil(2)
    }

    /// Samples that are changed at once.
    fn samples(&self) -> usize {
        (ROWS / self.squares()).clamp(1, self.n)
    }

    /// Some samples after the others.
    fn parts(self) -> impl Iterator<Item = Range<usize>> {
        let some = self.samples();
        (0..self.n).step_by(some).map(move |first| first..(first + some).min(self.n))
    }

    /// The numbers of some samples of a pixel of the source, as vectors; `zeros` if there is no such pixel. The pixel is
    /// that at (y, x) of what the square of the result sees.
    #[inline(always)]
    fn seen<'a, T: Lanes, S: Simd>(
        &self,
        source: &'a [T],
        zeros: &'a [T],
        [row, square]: [usize; 2],
        [y, x]: [usize; 2],
        samples: &Range<usize>,
    ) -> &'a [T::Vector<S>] {
        let y = (2 * row + y).checked_sub(self.padding).filter(|&y| y < self.from[0]);
        let x = (2 * square + x).checked_sub(self.padding).filter(|&x| x < self.from[1]);
        let size = samples.len() * self.depth;
        T::vectors::<S>(match (y, x) {
            (Some(y), Some(x)) => {
                &source[((y * self.from[1] + x) * self.n + samples.start) * self.depth..][..size]
            }
            _ => &zeros[..size],
        })
    }

    /// `B' d B` for the squares of a row and some samples: `out` is (16, panel, squares, samples, columns of the panel), of panels with
    /// so many columns.
    #[inline(always)]
    fn change<T: Lanes, S: Simd>(
        &self,
        simd: S,
        (source, zeros): (&[T], &[T]),
        row: usize,
        samples: &Range<usize>,
        columns: usize,
        out: &mut [T],
    ) {
        let rows = self.squares() * samples.len();
        for square in 0..self.squares() {
            let d: [[&[T::Vector<S>]; 4]; 4] = std::array::from_fn(|y| {
                std::array::from_fn(|x| self.seen::<T, S>(source, zeros, [row, square], [y, x], samples))
            });
            let mut out = planes::<T, S, ELEMENTS>(out, rows * self.depth);
            let first = square * samples.len();
            for (from, to) in
                places([self.depth, columns].map(|count| count / T::lanes::<S>()), rows, first, samples.len())
            {
                let square = d.map(|row| row.map(|d| d[from]));
                let square = transposed(square.map(|row| by_b::<T, S>(simd, row)));
                let square = transposed(square.map(|column| by_b::<T, S>(simd, column)));
                out.iter_mut().zip(square.as_flattened()).for_each(|(out, &value)| out[to] = value);
            }
        }
    }
}

/// Where the numbers of some rows of `width` go that lie side by side, the first of them being row `first` of `rows` in panels of so many
/// `columns`: (panel, rows, columns of the panel).
#[inline(always)]
fn places(
    [width, columns]: [usize; 2],
    rows: usize,
    first: usize,
    count: usize,
) -> impl Iterator<Item = (usize, usize)> {
    (0..count).flat_map(move |row| {
        (0..width).step_by(columns).flat_map(move |column| {
            let columns = columns.min(width - column);
            let (from, to) = (row * width + column, column * rows + (first + row) * columns);
            (0..columns).map(move |i| (from + i, to + i))
        })
    })
}

/// Numbers of a buffer of the device's cache.
macro_rules! room {
    ($device:expr, $count:expr => $storage:ident, $slice:ident) => {
        let $storage = Storage::stale($device, $count * size_of::<T>());
        let mut $slice = $storage.write::<T>();
        let $slice = &mut $slice[..$count];
    };
}

#[inline(always)]
fn transposed<V: Copy, const R: usize, const C: usize>(square: [[V; C]; R]) -> [[V; R]; C] {
    std::array::from_fn(|x| std::array::from_fn(|y| square[y][x]))
}

/// A row of four, times B.
#[inline(always)]
fn by_b<T: Lanes, S: Simd>(simd: S, [a, b, c, d]: [T::Vector<S>; 4]) -> [T::Vector<S>; 4] {
    [T::minus(simd, a, c), T::plus(simd, b, c), T::minus(simd, c, b), T::minus(simd, b, d)]
}

/// A row of four, times A.
#[inline(always)]
fn by_a<T: Lanes, S: Simd>(simd: S, [a, b, c, d]: [T::Vector<S>; 4]) -> [T::Vector<S>; 2] {
    [T::plus(simd, a, T::plus(simd, b, c)), T::minus(simd, T::minus(simd, b, c), d)]
}

/// A row of two, times A'.
#[inline(always)]
fn by_a_back<T: Lanes, S: Simd>(simd: S, [p, q]: [T::Vector<S>; 2]) -> [T::Vector<S>; 4] {
    let zero = T::splat(simd, T::ZERO);
    [p, T::plus(simd, p, q), T::minus(simd, p, q), T::minus(simd, zero, q)]
}

/// `G g G'` for the kernels of a panel: `out` is (16, depth, columns of the panel).
struct ChangeKernels<'a, T> {
    /// From the first of them on.
    kernels: &'a [T],
    /// How far it is from tap to tap and from row to row of the depth.
    tap: usize,
    row: usize,
    depth: usize,
    /// Whether kernels are turned around.
    turned: Turned,
    out: &'a mut [T],
}

impl<T: Lanes> WithSimd for ChangeKernels<'_, T> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let half = T::splat(simd, T::from_f64(0.5));
        let plane = self.out.len() / ELEMENTS;
        let columns = plane / self.depth;
        let by_g = |[a, b, c]: [T::Vector<S>; 3]| {
            let outer = T::times(simd, half, T::plus(simd, a, c));
            let middle = T::times(simd, half, b);
            [a, T::plus(simd, outer, middle), T::minus(simd, outer, middle), c]
        };
        for row in 0..self.depth {
            let taps: [&[T::Vector<S>]; 9] = std::array::from_fn(|tap| {
                let tap = if self.turned == Turned::Yes { 8 - tap } else { tap };
                T::vectors::<S>(&self.kernels[tap * self.tap + row * self.row..][..columns])
            });
            let mut out = planes::<T, S, ELEMENTS>(self.out, plane)
                .map(|out| &mut out[row * columns / T::lanes::<S>()..]);
            for i in 0..columns / T::lanes::<S>() {
                let kernel: [[_; 3]; 3] =
                    std::array::from_fn(|y| std::array::from_fn(|x| taps[3 * y + x][i]));
                let columns = transposed(kernel.map(by_g));
                let square = transposed(columns.map(by_g));
                out.iter_mut().zip(square.as_flattened()).for_each(|(out, &value)| out[i] = value);
            }
        }
    }
}

/// The changed kernels (9, C, O) in panels of columns: (panel, 16, depth, columns of the panel). Columns are outputs, and the depth inputs,
/// or the other way around where kernels are turned.
fn change_kernels<T: Lanes>(device: &Device, w: &[T], [c, o]: [usize; 2], turned: Turned, panels: &mut [T]) {
    let (depth, width) = if turned == Turned::Yes { (o, c) } else { (c, o) };
    let room = if turned == Turned::Yes { w.len() } else { 0 };
    room!(device, room => storage, in_turned_panels);
    if turned == Turned::Yes {
        in_panels(device, w, [9, depth, width], turned, 0, |_| true, in_turned_panels);
    }
    let in_turned_panels = &*in_turned_panels;
    let _timer = device.time("convolution, kernels in panels");
    let panel = device.arch().dispatch(Columns::of::<T>()).panel;
    device.for_chunks(panels, ELEMENTS * depth * panel, |i, out| {
        let (first, columns) = (i * panel, out.len() / (ELEMENTS * depth));
        let (kernels, tap, row) = match turned {
            Turned::No => (&w[first..], depth * width, width),
            Turned::Yes => (&in_turned_panels[9 * depth * first..], depth * columns, columns),
        };
        device.arch().dispatch(ChangeKernels { kernels, tap, row, depth, turned, out });
    });
}

/// `G' u G`, the way back for gradients: `u` is (16, kernels), `out` (9, kernels).
struct ChangeKernelsBack<'a, T> {
    u: &'a [T],
    out: &'a mut [T],
}

impl<T: Lanes> WithSimd for ChangeKernelsBack<'_, T> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let (count, half) = (self.out.len() / 9, T::splat(simd, T::from_f64(0.5)));
        let u: [&[T::Vector<S>]; ELEMENTS] =
            std::array::from_fn(|element| T::vectors::<S>(&self.u[element * count..][..count]));
        let mut out = planes::<T, S, 9>(self.out, count);
        let by_g_back = |[a, b, c, d]: [T::Vector<S>; 4]| {
            let sum = T::times(simd, half, T::plus(simd, b, c));
            let difference = T::times(simd, half, T::minus(simd, b, c));
            [T::plus(simd, a, sum), difference, T::plus(simd, sum, d)]
        };
        for i in 0..count / T::lanes::<S>() {
            let square: [[_; 4]; 4] = std::array::from_fn(|y| std::array::from_fn(|x| u[4 * y + x][i]));
            let columns = transposed(square.map(by_g_back));
            let kernel = transposed(columns.map(by_g_back));
            out.iter_mut().zip(kernel.as_flattened()).for_each(|(out, &value)| out[i] = value);
        }
    }
}

/// The first planes, of `size` numbers, that `values` holds; as vectors.
#[inline(always)]
fn planes<T: Lanes, S: Simd, const N: usize>(values: &mut [T], size: usize) -> [&mut [T::Vector<S>]; N] {
    let mut planes = values.chunks_exact_mut(size);
    std::array::from_fn(|_| T::vectors_mut::<S>(planes.next().expect("as many planes as are asked for")))
}

/// A row of squares of the result.
struct SumSquares<'a, T> {
    sides: Sides,
    source: &'a [T],
    /// Changed kernels, as [`change_kernels`] leaves them.
    weights: &'a [T],
    bias: Option<&'a [T]>,
    row: usize,
    /// Two rows of pixels, or one at the very end.
    result: &'a mut [T],
    zeros: &'a [T],
    changed: &'a mut [T],
    products: &'a mut [T],
}

impl<T: Lanes> WithSimd for SumSquares<'_, T> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(mut self, simd: S) {
        let Sides { depth, width, .. } = self.sides;
        for samples in self.sides.parts() {
            let rows = self.sides.squares() * samples.len();
            let changed = &mut self.changed[..ELEMENTS * rows * depth];
            self.sides.change::<T, S>(simd, (self.source, self.zeros), self.row, &samples, depth, changed);
            for element in 0..ELEMENTS {
                by_tall_panels(simd, rows, width, &mut self, &Product { element, rows });
            }
            self.change_back::<S>(simd, &samples);
        }
    }
}

/// The product of one element, over so many rows.
struct Product {
    element: usize,
    rows: usize,
}

impl<T: Lanes> ByPanels<T> for SumSquares<'_, T> {
    type Pass = Product;

    #[inline(always)]
    fn panel<S: Simd, const R: usize, const V: usize>(&mut self, simd: S, pass: &Product, column: usize) {
        let (&Product { element, rows }, Sides { depth, width, .. }) = (pass, self.sides);
        let columns = V * T::lanes::<S>();
        let weights = (&self.weights[(ELEMENTS * column + element * columns) * depth..], columns);
        let source = &self.changed[element * rows * depth..][..rows * depth];
        let products = &mut self.products[element * rows * width..][..rows * width];
        for row in (0..rows).step_by(R) {
            // A short last tile computes its last row again.
            let height = R.min(rows - row);
            let starts = std::array::from_fn(|i| (row + i.min(height - 1)) * depth);
            let mut sums = zeros::<T, S, R, V>(simd);
            add_long_rows::<T, S, R, V>(simd, &mut sums, (source, starts), weights, depth);
            store::<T, S, R, V>(&sums, &mut products[row * width..][..height * width], width, column);
        }
    }
}

impl<T: Lanes> SumSquares<'_, T> {
    /// `A' m A`, and the bias.
    #[inline(always)]
    fn change_back<S: Simd>(&mut self, simd: S, samples: &Range<usize>) {
        let Sides { n, width, to: [_, w], .. } = self.sides;
        let (size, height) = (samples.len() * width, self.result.len() / (w * n * width));
        let plane = self.sides.squares() * size;
        let bias = self.bias.map(|bias| T::vectors::<S>(&bias[..width]));
        for square in 0..self.sides.squares() {
            let products: [&[T::Vector<S>]; ELEMENTS] = std::array::from_fn(|element| {
                T::vectors::<S>(&self.products[element * plane + square * size..][..size])
            });
            let place = |y: usize, x: usize| {
                let inside = y < height && 2 * square + x < w;
                let start = ((y * w + 2 * square + x) * n + samples.start) * width;
                if inside { start..start + size } else { 0..0 }
            };
            let places = [place(0, 0), place(0, 1), place(1, 0), place(1, 1)];
            let outs = self.result.get_disjoint_mut(places).expect("pixels don't overlap");
            let mut outs = outs.map(T::vectors_mut::<S>);
            for i in 0..size / T::lanes::<S>() {
                let square: [[_; 4]; 4] =
                    std::array::from_fn(|y| std::array::from_fn(|x| products[4 * y + x][i]));
                let columns = transposed(square.map(|row| by_a::<T, S>(simd, row)));
                let pixels = transposed(columns.map(|column| by_a::<T, S>(simd, column)));
                for (out, &pixel) in outs.iter_mut().zip(pixels.as_flattened()) {
                    if let Some(out) = out.get_mut(i) {
                        *out = match bias {
                            Some(bias) => T::plus(simd, pixel, bias[i % bias.len()]),
                            None => pixel,
                        };
                    }
                }
            }
        }
    }
}

fn sum_squares<T: Lanes>(
    device: &Device,
    sides: Sides,
    source: &[T],
    weights: &[T],
    bias: Option<&[T]>,
    result: &mut [T],
) {
    let Sides { n, depth, width, to: [_, w], .. } = sides;
    device.for_chunks(result, 2 * w * n * width, |row, result| {
        let rows = sides.squares() * sides.samples();
        room!(device, sides.samples() * depth => storage, zeros);
        zeros.fill(T::ZERO);
        room!(device, ELEMENTS * rows * depth => storage, changed);
        room!(device, ELEMENTS * rows * width => storage, products);
        let sum = SumSquares { sides, source, weights, bias, row, result, zeros, changed, products };
        device.arch().dispatch(sum);
    });
}

/// `x` is (H W, N, C), `w` (9, C, O), `out` (OH OW, N, O).
pub(super) fn forward<T: Lanes>(device: &Device, x: &[T], w: &[T], b: Option<&[T]>, p: Plan, out: &mut [T]) {
    room!(device, ELEMENTS * p.o * p.c => storage, changed);
    change_kernels(device, w, [p.c, p.o], Turned::No, changed);
    let (from, to) = ([p.h, p.w], [p.oh, p.ow]);
    let sides = Sides { n: p.n, from, depth: p.c, to, width: p.o, padding: p.options.padding[0] };
    sum_squares(device, sides, x, changed, b, out);
}

/// `g` is (OH OW, N, O), `w` (9, C, O), `out` (H W, N, C).
pub(super) fn image_gradient<T: Lanes>(device: &Device, g: &[T], w: &[T], p: Plan, out: &mut [T]) {
    room!(device, ELEMENTS * p.o * p.c => storage, changed);
    change_kernels(device, w, [p.c, p.o], Turned::Yes, changed);
    let (from, to) = ([p.oh, p.ow], [p.h, p.w]);
    let sides = Sides { n: p.n, from, depth: p.o, to, width: p.c, padding: 2 - p.options.padding[0] };
    sum_squares(device, sides, g, changed, None, out);
}

/// The gradient of the changed kernels over some rows of squares.
struct SumOuter<'a, T> {
    /// Of the images and of the outputs' gradient, which are changed as if they were a source.
    inputs: Sides,
    images: &'a [T],
    grads: &'a [T],
    rows: Range<usize>,
    zeros: &'a [T],
    /// (16, block, rows, BLOCK)
    changed_images: &'a mut [T],
    /// (16, panel, rows, columns of the panel)
    changed_grads: &'a mut [T],
    /// (16, C, O)
    sums: &'a mut [T],
}

impl<T: Lanes> WithSimd for SumOuter<'_, T> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(mut self, simd: S) {
        self.sums.fill(T::ZERO);
        let Sides { depth, width, .. } = self.inputs;
        for row in self.rows.clone() {
            for samples in self.inputs.parts() {
                let rows = self.inputs.squares() * samples.len();
                let changed = &mut self.changed_images[..ELEMENTS * rows * depth];
                self.inputs.change::<T, S>(simd, (self.images, self.zeros), row, &samples, BLOCK, changed);
                self.change_grads::<S>(simd, row, &samples);
                for element in 0..ELEMENTS {
                    by_panels(simd, width, &mut self, &Product { element, rows });
                }
            }
        }
    }
}

impl<T: Lanes> SumOuter<'_, T> {
    /// `A dy A'` for the squares of a row and some samples.
    #[inline(always)]
    fn change_grads<S: Simd>(&mut self, simd: S, row: usize, samples: &Range<usize>) {
        let Sides { n, width, to: [h, w], .. } = self.inputs;
        let size = samples.len() * width;
        for square in 0..self.inputs.squares() {
            let pixel = |y: usize, x: usize| {
                let (y, x) = (2 * row + y, 2 * square + x);
                let inside = y < h && x < w;
                let start = ((y * w + x) * n + samples.start) * width;
                T::vectors::<S>(if inside { &self.grads[start..][..size] } else { &self.zeros[..size] })
            };
            let grads = [[pixel(0, 0), pixel(0, 1)], [pixel(1, 0), pixel(1, 1)]];
            let rows = self.inputs.squares() * samples.len();
            let mut out = planes::<T, S, ELEMENTS>(self.changed_grads, rows * width);
            for (from, to) in
                places([width / T::lanes::<S>(), VECTORS], rows, square * samples.len(), samples.len())
            {
                let square = grads.map(|row| row.map(|grad| grad[from]));
                let columns = transposed(square.map(|row| by_a_back::<T, S>(simd, row)));
                let square = transposed(columns.map(|column| by_a_back::<T, S>(simd, column)));
                out.iter_mut().zip(square.as_flattened()).for_each(|(out, &value)| out[to] = value);
            }
        }
    }
}

impl<T: Lanes> ByPanels<T> for SumOuter<'_, T> {
    type Pass = Product;

    #[inline(always)]
    fn panel<S: Simd, const R: usize, const V: usize>(&mut self, simd: S, pass: &Product, column: usize) {
        let (&Product { element, rows }, Sides { depth, width, .. }) = (pass, self.inputs);
        let images = &self.changed_images[element * rows * depth..][..rows * depth];
        let grads = &self.changed_grads[element * rows * width + column * rows..];
        let sums = &mut self.sums[element * width * depth..][..width * depth];
        sum_blocks::<T, S, R, V, BLOCK>(simd, (sums, width, column), (images, rows), grads, Into::Add);
    }
}

/// `x` is (H W, N, C), `g` (OH OW, N, O), `out` (9, C, O).
pub(super) fn kernel_gradient<T: Lanes>(device: &Device, x: &[T], g: &[T], p: Plan, out: &mut [T]) {
    let (from, to) = ([p.h, p.w], [p.oh, p.ow]);
    let inputs = Sides { n: p.n, from, depth: p.c, to, width: p.o, padding: p.options.padding[0] };
    room!(device, ELEMENTS * p.o * p.c => storage, total);
    sum_over_runs(device, RUNS, p.oh.div_ceil(2), total, |rows, sums| {
        let changed = inputs.squares() * inputs.samples();
        room!(device, inputs.samples() * p.c.max(p.o) => storage, zeros);
        zeros.fill(T::ZERO);
        room!(device, ELEMENTS * changed * p.c => storage, changed_images);
        room!(device, ELEMENTS * changed * p.o => storage, changed_grads);
        let (images, grads) = (x, g);
        let sum = SumOuter { inputs, images, grads, rows, zeros, changed_images, changed_grads, sums };
        device.arch().dispatch(sum);
    });
    device.arch().dispatch(ChangeKernelsBack { u: total, out });
}
