//! Convolution with 3x3 kernels and stride 1 by the minimal filtering of Winograd, in the form of Lavin and Gray
//! (<https://arxiv.org/abs/1509.09308>): F(2x2, 3x3) and F(4x4, 3x3). Images and kernels lie in pixel order, as in [`super::pixels`].
//!
//! M x M outputs that form a square are told from the N x N pixels that they see, N = M + 2. Pixels d, kernel g and outputs y are linked by
//! y = A' ((G g G') * (B' d B)) A, where * multiplies element by element: 16 products instead of 36, or 36 instead of 144. The sum over
//! input channels goes inside, so that each of the N x N elements is a matrix product of its own over all squares, samples and channels.
//! In pixel order all changes are sums of whole rows, times numbers. They are made for some samples of a row of squares at a time, which stay
//! in the cache while their products are taken.
//!
//! The gradient of the images is the same with the kernel turned around. For the gradient of the kernel the formula is read
//! backwards: dg = G' (sum of (A dy A') * (B' d B)) G.

mod forms;

use super::Plan;
use super::lowered::sum_over_runs;
use super::pixels::{self, BLOCK};
use crate::cpu::lanes::{Lanes, MOST_LANES};
use crate::cpu::tile::{
    ByPanels, Columns, Turned, add_long_rows, by_panels, by_tall_panels, in_panels, starts, store,
    sum_blocks, zeros,
};
use crate::device::Device;
use crate::storage::Storage;
use forms::Matrix;
pub(super) use forms::{Form, Large, Small};
use pulp::{Simd, WithSimd};
use std::marker::PhantomData;
use std::ops::Range;

/// Numbers between the planes of a square's elements: planes of a power of two would fall into the same sets of the caches.
const BETWEEN: usize = MOST_LANES;
/// Vectors of a pixel's samples that are changed at once: so many that squares of them stay in the first cache.
const RUN: usize = 4;
/// The rows of squares fall into at most this many runs for the kernel gradient, each summed on its own and then together in order, so
/// that the result doesn't depend on the number of threads.
const RUNS: usize = 4;
/// Above this many kernels their gradient was measured to be as fast pixel by pixel, or faster.
const MAX_KERNELS: usize = 1 << 15;
/// Above this many kernels, or below this many pixels of all samples, it costs more to change kernels for the large form than is won, or
/// little is won for what it rounds away, which batch norms of few numbers make more of.
const MAX_KERNELS_LARGE: usize = 1 << 14;
const MIN_PIXELS_LARGE: usize = 1 << 11;
/// Below this many pixels of all samples the gradient of kernels is faster pixel by pixel.
const MIN_PIXELS_GRADIENT: usize = 1 << 11;

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
    takes(p) && p.o * p.c <= MAX_KERNELS && p.n * p.oh * p.ow >= MIN_PIXELS_GRADIENT
}

/// Whether the large form is the faster one.
fn is_large(p: &Plan) -> bool {
    // Of images of 5 and 6 pixels the large form's squares are so much wider that they take as many products.
    let products = |side: usize| p.oh.div_ceil(side) * p.ow.div_ceil(side) * (side + 2) * (side + 2);
    p.o * p.c <= MAX_KERNELS_LARGE && p.n * p.oh * p.ow >= MIN_PIXELS_LARGE && products(4) < products(2)
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
    /// Pixels of the result on a side of a square.
    side: usize,
    /// About so many rows (squares times samples) are changed at once.
    rows: usize,
}

/// About how many rows are changed at once where changed kernels are so many numbers. If all of these fit into the second cache, so few rows
/// that they fit there, too. If not, more: each part reads all of them.
fn rows_at_once(numbers: usize) -> usize {
    match numbers {
        0..0x4_0000 => 16,
        0x4_0000..=0x10_0000 => 32,
        _ => 64,
    }
}

impl Sides {
    /// Squares in a row.
    fn squares(&self) -> usize {
        self.to[1].div_ceil(self.side)
    }

    /// Squares and samples that are changed at once: all samples of a square if they aren't too many.
    fn at_once(&self) -> [usize; 2] {
        let samples = self.n.div_ceil(self.n.div_ceil(self.rows)).next_multiple_of(8).min(self.n);
        let some = ((self.rows + samples / 2) / samples).max(1);
        let parts = self.squares().div_ceil(some);
        [self.squares().div_ceil(parts), samples]
    }

    /// Rows that are changed at once, at most.
    fn most_rows(&self) -> usize {
        self.at_once().iter().product()
    }

    /// A row of squares, some squares and samples after the others.
    fn parts(self, row: usize) -> impl Iterator<Item = Part> {
        let some = self.at_once();
        let ranges = move |all: usize, some: usize| {
            (0..all).step_by(some).map(move |first| first..(first + some).min(all))
        };
        ranges(self.squares(), some[0]).flat_map(move |squares| {
            ranges(self.n, some[1]).map(move |samples| Part { row, squares: squares.clone(), samples })
        })
    }
}

/// Some squares of a row, of some samples.
struct Part {
    row: usize,
    squares: Range<usize>,
    samples: Range<usize>,
}

impl Part {
    fn rows(&self) -> usize {
        self.squares.len() * self.samples.len()
    }
}

/// Numbers of a buffer of the device's cache.
macro_rules! room {
    ($device:expr, $count:expr => $storage:ident, $slice:ident) => {
        let $storage = Storage::stale($device, $count * size_of::<T>());
        let mut $slice = $storage.write::<T>();
        let $slice = &mut $slice[..$count];
    };
}

/// N x N planes of `size` numbers, of which each begins so far behind the one before; as vectors.
#[inline(always)]
fn planes<T: Lanes, S: Simd, const N: usize>(
    values: &mut [T],
    size: usize,
    step: usize,
) -> [[&mut [T::Vector<S>]; N]; N] {
    let mut planes = values.chunks_mut(step);
    let mut next = || T::vectors_mut::<S>(&mut planes.next().expect("a plane for each element")[..size]);
    std::array::from_fn(|_| std::array::from_fn(|_| next()))
}

/// Where numbers of rows of `width` go that lie side by side, the first of them being row `row` of `rows` in panels of so many `columns`:
/// (panel, rows, columns of the panel). All in vectors.
struct Places {
    width: usize,
    columns: usize,
    rows: usize,
    /// Where the next one comes from: the row, the first column of the panel, and the one within it.
    row: usize,
    panel: usize,
    column: usize,
}

impl Places {
    fn new([width, columns]: [usize; 2], rows: usize, row: usize) -> Places {
        Places { width, columns, rows, row, panel: 0, column: 0 }
    }

    /// For `width` vectors that go to the beginning.
    fn row(width: usize) -> Places {
        Places::new([width; 2], 1, 0)
    }

    /// Where the next ones go, and how many of them, at most so many, lie side by side there.
    #[inline(always)]
    fn next(&mut self, most: usize) -> (usize, usize) {
        let columns = self.columns.min(self.width - self.panel);
        let count = most.min(columns - self.column);
        let place = self.panel * self.rows + self.row * columns + self.column;
        self.column += count;
        if self.column == columns {
            (self.column, self.panel) = (0, self.panel + self.columns);
            if self.panel >= self.width {
                (self.panel, self.row) = (0, self.row + 1);
            }
        }
        (place, count)
    }
}

/// Vectors that each lie within a line of the first cache.
#[repr(align(64))]
struct Aligned<V>(V);

/// `C d C'` for the numbers of some samples, of squares of I x I pixels to squares of O x O, which go to their places. A pixel of the latter
/// that is empty isn't written.
#[inline(always)]
fn change_square<T: Lanes, S: Simd, C: Matrix<I, O>, const I: usize, const O: usize>(
    simd: S,
    from: &[[&[T::Vector<S>]; I]; I],
    mut places: Places,
    to: &mut [[&mut [T::Vector<S>]; O]; O],
) {
    let zero = T::splat(simd, T::ZERO);
    let mut half = Aligned([[[zero; RUN]; O]; I]);
    let half = &mut half.0;
    let size = from[0][0].len();
    for first in (0..size).step_by(RUN) {
        let count = RUN.min(size - first);
        for (from, half) in from.iter().zip(half.iter_mut()) {
            let mut row = [from[0]; I];
            for (row, from) in row.iter_mut().zip(from) {
                *row = &from[first..][..count];
            }
            for i in 0..count {
                let mut values = [zero; I];
                for (value, row) in values.iter_mut().zip(&row) {
                    *value = row[i];
                }
                let changed = C::times::<T, S>(simd, values);
                for (half, value) in half.iter_mut().zip(changed) {
                    half[i] = value;
                }
            }
        }
        let mut done = 0;
        while done < count {
            let (place, some) = places.next(count - done);
            for x in 0..O {
                let mut column: [&mut [T::Vector<S>]; O] = std::array::from_fn(|_| Default::default());
                for (column, to) in column.iter_mut().zip(to.iter_mut()) {
                    if !to[x].is_empty() {
                        *column = &mut to[x][place..][..some];
                    }
                }
                for i in 0..some {
                    let mut values = [zero; I];
                    for (value, half) in values.iter_mut().zip(half.iter()) {
                        *value = half[x][done + i];
                    }
                    let changed = C::times::<T, S>(simd, values);
                    for (to, value) in column.iter_mut().zip(changed) {
                        if let Some(to) = to.get_mut(i) {
                            *to = value;
                        }
                    }
                }
            }
            done += some;
        }
    }
}

// Each change and each product is a function of its own for the machine (`dispatch`): in one, the numbers of the matrices would lie in
// registers that the products' sums need.

/// `B' d B` for some squares of pixels, or `A dy A'` for some of gradients.
struct Change<'a, T, C, const I: usize, const N: usize> {
    matrix: PhantomData<C>,
    /// Of these, where the squares come from.
    sides: Sides,
    part: &'a Part,
    source: &'a [T],
    /// At least so many zeros as a pixel of the part has numbers.
    zeros: &'a [T],
    /// (N N, panel, squares, samples, columns of the panel), with [`BETWEEN`], of panels with so many columns.
    out: &'a mut [T],
    columns: usize,
}

impl<T: Lanes, C: Matrix<I, N>, const I: usize, const N: usize> WithSimd for Change<'_, T, C, I, N> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Sides { n, from: [h, w], depth, padding, side, .. } = self.sides;
        let Part { row, squares, samples } = self.part;
        let (size, rows) = (samples.len() * depth, self.part.rows());
        for (i, square) in squares.clone().enumerate() {
            let mut seen = [[T::vectors::<S>(&self.zeros[..size]); I]; I];
            for (y, seen) in (side * row..).zip(&mut seen) {
                let Some(y) = y.checked_sub(padding).filter(|&y| y < h) else { continue };
                for (x, seen) in (side * square..).zip(seen) {
                    let Some(x) = x.checked_sub(padding).filter(|&x| x < w) else { continue };
                    let first = ((y * w + x) * n + samples.start) * depth;
                    *seen = T::vectors::<S>(&self.source[first..][..size]);
                }
            }
            let widths = [depth, self.columns].map(|count| count / T::lanes::<S>());
            let places = Places::new(widths, rows, i * samples.len());
            let mut out = planes::<T, S, N>(self.out, rows * depth, rows * depth + BETWEEN);
            change_square::<T, S, C, I, N>(simd, &seen, places, &mut out);
        }
    }
}

/// `G g G'` for the kernels of a panel: `out` is (N N, depth, columns of the panel).
struct ChangeKernels<'a, T, F, const M: usize, const N: usize> {
    form: PhantomData<F>,
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

impl<T: Lanes, F: Form<M, N>, const M: usize, const N: usize> WithSimd for ChangeKernels<'_, T, F, M, N> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let plane = self.out.len() / (N * N);
        let columns = plane / self.depth;
        for row in 0..self.depth {
            let mut taps: [[&[T::Vector<S>]; 3]; 3] = [[&[]; 3]; 3];
            for (tap, numbers) in taps.as_flattened_mut().iter_mut().enumerate() {
                let tap = if self.turned == Turned::Yes { 8 - tap } else { tap };
                *numbers = T::vectors::<S>(&self.kernels[tap * self.tap + row * self.row..][..columns]);
            }
            let mut out = planes::<T, S, N>(&mut self.out[row * columns..], columns, plane);
            let places = Places::row(columns / T::lanes::<S>());
            change_square::<T, S, F::Kernels, 3, N>(simd, &taps, places, &mut out);
        }
    }
}

/// The changed kernels (9, C, O) in panels of columns: (panel, N N, depth, columns of the panel). Columns are outputs, and the depth inputs,
/// or the other way around where kernels are turned.
fn change_kernels<T: Lanes, F: Form<M, N>, const M: usize, const N: usize>(
    device: &Device,
    w: &[T],
    [c, o]: [usize; 2],
    turned: Turned,
    panels: &mut [T],
) {
    let (depth, width) = if turned == Turned::Yes { (o, c) } else { (c, o) };
    let room = if turned == Turned::Yes { w.len() } else { 0 };
    room!(device, room => storage, in_turned_panels);
    if turned == Turned::Yes {
        in_panels(device, w, [9, depth, width], turned, 0, |_| true, in_turned_panels);
    }
    let in_turned_panels = &*in_turned_panels;
    let _timer = device.time("convolution, kernels in panels");
    let panel = device.arch().dispatch(Columns::of::<T>()).panel;
    device.for_chunks(panels, N * N * depth * panel, |i, out| {
        let (first, columns) = (i * panel, out.len() / (N * N * depth));
        let (kernels, tap, row) = match turned {
            Turned::No => (&w[first..], depth * width, width),
            Turned::Yes => (&in_turned_panels[9 * depth * first..], depth * columns, columns),
        };
        let form = PhantomData::<F>;
        device.arch().dispatch(ChangeKernels::<T, F, M, N> { form, kernels, tap, row, depth, turned, out });
    });
}

/// Of each element, some changed rows times the changed kernels.
struct Products<'a, T> {
    elements: usize,
    rows: usize,
    depth: usize,
    width: usize,
    /// (elements, rows, depth), with [`BETWEEN`]
    changed: &'a [T],
    /// As [`change_kernels`] leaves them.
    weights: &'a [T],
    /// (elements, rows, width), with [`BETWEEN`]
    products: &'a mut [T],
}

impl<T: Lanes> WithSimd for Products<'_, T> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(mut self, simd: S) {
        for element in 0..self.elements {
            by_tall_panels(simd, self.rows, self.width, &mut self, &element);
        }
    }
}

impl<T: Lanes> ByPanels<T> for Products<'_, T> {
    /// The element.
    type Pass = usize;

    #[inline(always)]
    fn panel<S: Simd, const R: usize, const V: usize>(&mut self, simd: S, &element: &usize, column: usize) {
        let &mut Products { elements, rows, depth, width, .. } = self;
        let columns = V * T::lanes::<S>();
        let weights = (&self.weights[(elements * column + element * columns) * depth..], columns);
        let source = &self.changed[element * (rows * depth + BETWEEN)..][..rows * depth];
        let products = &mut self.products[element * (rows * width + BETWEEN)..][..rows * width];
        for row in (0..rows).step_by(R) {
            let height = R.min(rows - row);
            let mut sums = zeros::<T, S, R, V>(simd);
            let source = (source, starts::<R>(row, rows, depth));
            add_long_rows::<T, S, R, V>(simd, &mut sums, source, weights, depth);
            store::<T, S, R, V>(&sums, &mut products[row * width..][..height * width], width, column);
        }
    }
}

/// `A' m A` for some squares, and the bias.
struct ChangeBack<'a, T, F, const M: usize, const N: usize> {
    form: PhantomData<F>,
    sides: Sides,
    part: &'a Part,
    /// (N N, squares, samples, width), with [`BETWEEN`]
    products: &'a [T],
    bias: Option<&'a [T]>,
    /// The rows of pixels that the row of squares is of: M, or fewer at the very end.
    result: &'a mut [T],
}

impl<T: Lanes, F: Form<M, N>, const M: usize, const N: usize> WithSimd for ChangeBack<'_, T, F, M, N> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Sides { n, width, to: [_, w], .. } = self.sides;
        let Part { squares, samples, .. } = self.part;
        let (size, pixel) = (samples.len() * width, n * width);
        let bias = self.bias.map(|bias| T::vectors::<S>(&bias[..width]));
        for (i, square) in squares.clone().enumerate() {
            let mut products: [[&[T::Vector<S>]; N]; N] = [[&[]; N]; N];
            let planes = self.products.chunks(self.part.rows() * width + BETWEEN);
            for (product, plane) in products.as_flattened_mut().iter_mut().zip(planes) {
                *product = T::vectors::<S>(&plane[i * size..][..size]);
            }
            let mut outs: [[&mut [T::Vector<S>]; M]; M] =
                std::array::from_fn(|_| std::array::from_fn(|_| Default::default()));
            for (outs, row) in outs.iter_mut().zip(self.result.chunks_exact_mut(w * pixel)) {
                let pixels = row[M * square * pixel..].chunks_exact_mut(pixel);
                for (out, pixel) in outs.iter_mut().zip(pixels) {
                    *out = T::vectors_mut::<S>(&mut pixel[samples.start * width..][..size]);
                }
            }
            let places = Places::row(size / T::lanes::<S>());
            change_square::<T, S, F::Outputs, N, M>(simd, &products, places, &mut outs);
            let Some(bias) = bias else { continue };
            for row in outs.iter_mut().flatten().flat_map(|out| out.chunks_exact_mut(bias.len())) {
                row.iter_mut().zip(bias).for_each(|(out, &bias)| *out = T::plus(simd, *out, bias));
            }
        }
    }
}

fn sum_squares<T: Lanes, F: Form<M, N>, const M: usize, const N: usize>(
    device: &Device,
    sides: Sides,
    source: &[T],
    weights: &[T],
    bias: Option<&[T]>,
    result: &mut [T],
) {
    let Sides { n, depth, width, to: [_, w], .. } = sides;
    device.for_chunks(result, M * w * n * width, |row, result| {
        let (form, rows, arch) = (PhantomData::<F>, sides.most_rows(), device.arch());
        let [_, samples] = sides.at_once();
        room!(device, samples * depth => storage, zeros);
        zeros.fill(T::ZERO);
        room!(device, N * N * (rows * depth + BETWEEN) => storage, changed);
        room!(device, N * N * (rows * width + BETWEEN) => storage, products);
        for part in sides.parts(row) {
            let (part, rows, elements) = (&part, part.rows(), N * N);
            let (matrix, zeros, out, columns) = (PhantomData::<F::Pixels>, &*zeros, &mut *changed, depth);
            arch.dispatch(Change::<T, _, N, N> { matrix, sides, part, source, zeros, out, columns });
            let (changed, products) = (&*changed, &mut *products);
            arch.dispatch(Products { elements, rows, depth, width, changed, weights, products });
            let (products, result) = (&*products, &mut *result);
            arch.dispatch(ChangeBack::<T, F, M, N> { form, sides, part, products, bias, result });
        }
    });
}

/// Of each element, the outer products of some changed rows, added.
struct OuterProducts<'a, T> {
    elements: usize,
    rows: usize,
    depth: usize,
    width: usize,
    /// (elements, block, rows, BLOCK), with [`BETWEEN`]
    images: &'a [T],
    /// (elements, panel, rows, columns of the panel), with [`BETWEEN`]
    grads: &'a [T],
    /// (elements, C, O)
    sums: &'a mut [T],
}

impl<T: Lanes> WithSimd for OuterProducts<'_, T> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(mut self, simd: S) {
        for element in 0..self.elements {
            by_panels(simd, self.width, &mut self, &element);
        }
    }
}

impl<T: Lanes> ByPanels<T> for OuterProducts<'_, T> {
    /// The element.
    type Pass = usize;

    #[inline(always)]
    fn panel<S: Simd, const R: usize, const V: usize>(&mut self, simd: S, &element: &usize, column: usize) {
        let &mut OuterProducts { rows, depth, width, .. } = self;
        let images = &self.images[element * (rows * depth + BETWEEN)..][..rows * depth];
        let grads = &self.grads[element * (rows * width + BETWEEN) + column * rows..];
        let sums = &mut self.sums[element * width * depth..][..width * depth];
        sum_blocks::<T, S, R, V, BLOCK>(simd, (sums, width, column), (images, rows), grads);
    }
}

/// `G' u G`, the way back for gradients: `u` is (N N, kernels), `out` (9, kernels).
struct ChangeKernelsBack<'a, T, F, const M: usize, const N: usize> {
    form: PhantomData<F>,
    u: &'a [T],
    out: &'a mut [T],
}

impl<T: Lanes, F: Form<M, N>, const M: usize, const N: usize> WithSimd for ChangeKernelsBack<'_, T, F, M, N> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let count = self.out.len() / 9;
        let mut u: [[&[T::Vector<S>]; N]; N] = [[&[]; N]; N];
        for (u, plane) in u.as_flattened_mut().iter_mut().zip(self.u.chunks_exact(count)) {
            *u = T::vectors::<S>(plane);
        }
        let mut out = planes::<T, S, 3>(self.out, count, count);
        let places = Places::row(count / T::lanes::<S>());
        change_square::<T, S, F::KernelGrads, N, 3>(simd, &u, places, &mut out);
    }
}

/// `x` is (H W, N, C), `w` (9, C, O), `out` (OH OW, N, O).
pub(super) fn forward<T: Lanes>(device: &Device, x: &[T], w: &[T], b: Option<&[T]>, p: Plan, out: &mut [T]) {
    if is_large(&p) {
        forward_in::<T, Large, 4, 6>(device, x, w, b, p, out);
    } else {
        forward_in::<T, Small, 2, 4>(device, x, w, b, p, out);
    }
}

pub(super) fn forward_in<T: Lanes, F: Form<M, N>, const M: usize, const N: usize>(
    device: &Device,
    x: &[T],
    w: &[T],
    b: Option<&[T]>,
    p: Plan,
    out: &mut [T],
) {
    room!(device, N * N * p.o * p.c => storage, changed);
    change_kernels::<T, F, M, N>(device, w, [p.c, p.o], Turned::No, changed);
    let (from, to) = ([p.h, p.w], [p.oh, p.ow]);
    let (padding, rows) = (p.options.padding[0], rows_at_once(N * N * p.o * p.c));
    let sides = Sides { n: p.n, from, depth: p.c, to, width: p.o, padding, side: M, rows };
    sum_squares::<T, F, M, N>(device, sides, x, changed, b, out);
}

/// `g` is (OH OW, N, O), `w` (9, C, O), `out` (H W, N, C).
pub(super) fn image_gradient<T: Lanes>(device: &Device, g: &[T], w: &[T], p: Plan, out: &mut [T]) {
    if is_large(&p) {
        image_gradient_in::<T, Large, 4, 6>(device, g, w, p, out);
    } else {
        image_gradient_in::<T, Small, 2, 4>(device, g, w, p, out);
    }
}

pub(super) fn image_gradient_in<T: Lanes, F: Form<M, N>, const M: usize, const N: usize>(
    device: &Device,
    g: &[T],
    w: &[T],
    p: Plan,
    out: &mut [T],
) {
    room!(device, N * N * p.o * p.c => storage, changed);
    change_kernels::<T, F, M, N>(device, w, [p.c, p.o], Turned::Yes, changed);
    let (from, to) = ([p.oh, p.ow], [p.h, p.w]);
    let (padding, rows) = (2 - p.options.padding[0], rows_at_once(N * N * p.o * p.c));
    let sides = Sides { n: p.n, from, depth: p.o, to, width: p.c, padding, side: M, rows };
    sum_squares::<T, F, M, N>(device, sides, g, changed, None, out);
}

/// `x` is (H W, N, C), `g` (OH OW, N, O), `out` (9, C, O).
pub(super) fn kernel_gradient<T: Lanes>(device: &Device, x: &[T], g: &[T], p: Plan, out: &mut [T]) {
    if is_large(&p) {
        kernel_gradient_in::<T, Large, 4, 6>(device, x, g, p, out);
    } else {
        kernel_gradient_in::<T, Small, 2, 4>(device, x, g, p, out);
    }
}

pub(super) fn kernel_gradient_in<T: Lanes, F: Form<M, N>, const M: usize, const N: usize>(
    device: &Device,
    x: &[T],
    g: &[T],
    p: Plan,
    out: &mut [T],
) {
    let (from, to) = ([p.h, p.w], [p.oh, p.ow]);
    let Plan { n, c: depth, o: width, .. } = p;
    let padding = p.options.padding[0];
    let rows = rows_at_once(N * N * depth * width);
    let sides = Sides { n, from, depth, to, width, padding, side: M, rows };
    let of_grads = Sides { from: to, depth: width, padding: 0, ..sides };
    let (form, arch) = (PhantomData::<F>, device.arch());
    let panel = arch.dispatch(Columns::of::<T>()).panel;
    room!(device, N * N * depth * width => storage, total);
    sum_over_runs(device, RUNS, p.oh.div_ceil(M), total, |row_range, sums| {
        let ([_, samples], rows) = (sides.at_once(), sides.most_rows());
        room!(device, samples * depth.max(width) => storage, zeros);
        zeros.fill(T::ZERO);
        room!(device, N * N * (rows * depth + BETWEEN) => storage, images);
        room!(device, N * N * (rows * width + BETWEEN) => storage, grads);
        sums.fill(T::ZERO);
        for part in row_range.flat_map(|row| sides.parts(row)) {
            let (part, rows, elements, zeros) = (&part, part.rows(), N * N, &*zeros);
            let (matrix, source, out, columns) = (PhantomData::<F::Pixels>, x, &mut *images, BLOCK);
            arch.dispatch(Change::<T, _, N, N> { matrix, sides, part, source, zeros, out, columns });
            let (matrix, sides) = (PhantomData::<F::OutputGrads>, of_grads);
            let (source, out, columns) = (g, &mut *grads, panel);
            arch.dispatch(Change::<T, _, M, N> { matrix, sides, part, source, zeros, out, columns });
            let (images, grads, sums) = (&*images, &*grads, &mut *sums);
            arch.dispatch(OuterProducts { elements, rows, depth, width, images, grads, sums });
        }
    });
    arch.dispatch(ChangeKernelsBack::<T, F, M, N> { form, u: total, out });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_square_of_each_sample_is_in_one_part() {
        for (n, width, rows) in [1, 4, 7, 15, 16, 17, 24, 33, 64, 65, 130].into_iter().flat_map(|n| {
            [4, 7, 14, 28, 57].into_iter().flat_map(move |width| [16, 32, 64].map(|rows| (n, width, rows)))
        }) {
            let to = [4, width];
            let sides = Sides { n, from: to, depth: 16, to, width: 16, padding: 1, side: 4, rows };
            let mut seen = vec![0; sides.squares() * n];
            for part in sides.parts(3) {
                assert_eq!(part.row, 3);
                assert!(
                    part.rows() <= sides.most_rows() && sides.most_rows() <= 2 * rows,
                    "{n}, {width}, {rows}"
                );
                assert!(part.samples.len() <= sides.at_once()[1]);
                for square in part.squares.clone() {
                    part.samples.clone().for_each(|sample| seen[square * n + sample] += 1);
                }
            }
            assert!(seen.iter().all(|&times| times == 1), "{n} samples, {width} pixels wide, {rows} rows");
        }
    }
}
