//! The innermost loops of convolution in pixel order and of attention: a tile of sums, a few vectors for each of a few rows, that
//! stays in registers while what it sums streams by. Rows of pixels and of heads lie as the products want them.
//!
//! Long sums in one register lose digits, so over many channels a tile adds up no more than [`CHAIN`] products and is then
//! added to what was before: on ResNet-18 that makes the losses of a run ten times as exact, for two percent of the time.
//!
//! Per step a tile of R rows and V vectors reads V vectors and R single numbers for R V multiply-adds. With 32 registers there is room
//! for 8 x 2 tiles, with 16 for 6 x 2, and for 4 x 2 where rows come in multiples of 8. They come near the peak of the machine where
//! what they read lies side by side, panel by panel: numbers that are a power of two apart fall into few sets of the first cache.

use crate::cpu::copy::transpose;
use crate::cpu::lanes::Lanes;
use crate::device::Device;
use pulp::{Simd, WithSimd};
use std::marker::PhantomData;

/// Vectors a row of a tile, at most.
pub(crate) const VECTORS: usize = 2;

/// Products of each sum that are added between two looks at whether that was the last. Fewer, and a core spends as long on those looks
/// as on the products.
const STEP: usize = 4;

/// Products that one tile adds up at most.
const CHAIN: usize = 512;

/// A kernel that works on its columns a panel at a time.
pub(crate) trait ByPanels<T: Lanes> {
    /// What a pass over all columns is about, beside what the kernel holds.
    type Pass;

    /// Works on as many columns as V vectors hold, from `column` on, in tiles of R rows.
    fn panel<S: Simd, const R: usize, const V: usize>(&mut self, simd: S, pass: &Self::Pass, column: usize);
}

/// A pass of `kernel` over `columns` columns, with tiles as large as the machine's registers hold, of as many rows as divide 8.
#[inline(always)]
pub(crate) fn by_panels<T: Lanes, S: Simd, K: ByPanels<T>>(
    simd: S,
    columns: usize,
    kernel: &mut K,
    pass: &K::Pass,
) {
    by_panels_of::<T, S, K, 4>(simd, columns, kernel, pass);
}

/// As [`by_panels`], for a kernel that has so many rows to take one after the other, of which a last tile may have fewer: with 16
/// registers tiles of 6 rows are faster by an eighth than those of 4, if not too many of their rows are wasted.
#[inline(always)]
pub(crate) fn by_tall_panels<T: Lanes, S: Simd, K: ByPanels<T>>(
    simd: S,
    rows: usize,
    columns: usize,
    kernel: &mut K,
    pass: &K::Pass,
) {
    if rows.next_multiple_of(6) * 7 <= rows.next_multiple_of(4) * 8 {
        by_panels_of::<T, S, K, 6>(simd, columns, kernel, pass);
    } else {
        by_panels_of::<T, S, K, 4>(simd, columns, kernel, pass);
    }
}

/// With tiles of `FEW` rows where there are 16 registers.
#[inline(always)]
fn by_panels_of<T: Lanes, S: Simd, K: ByPanels<T>, const FEW: usize>(
    simd: S,
    columns: usize,
    kernel: &mut K,
    pass: &K::Pass,
) {
    let mut column = 0;
    while column < columns {
        let vectors = if columns - column >= VECTORS * T::lanes::<S>() { VECTORS } else { 1 };
        match (S::REGISTER_COUNT >= 32, vectors) {
            (true, VECTORS) => kernel.panel::<S, 8, VECTORS>(simd, pass, column),
            (true, _) => kernel.panel::<S, 8, 1>(simd, pass, column),
            (false, VECTORS) => kernel.panel::<S, FEW, VECTORS>(simd, pass, column),
            (false, _) => kernel.panel::<S, FEW, 1>(simd, pass, column),
        }
        column += vectors * T::lanes::<S>();
    }
}

/// The columns of a vector on a machine, and of a panel, of which the last may be narrower.
pub(crate) struct Columns {
    pub(crate) lanes: usize,
    pub(crate) panel: usize,
}

impl Columns {
    /// To be asked of a machine, for vectors of this type.
    pub(crate) fn of<T: Lanes>() -> impl WithSimd<Output = Columns> {
        AskColumns::<T>(PhantomData)
    }
}

struct AskColumns<T>(PhantomData<T>);

impl<T: Lanes> WithSimd for AskColumns<T> {
    type Output = Columns;

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) -> Columns {
        Columns { lanes: T::lanes::<S>(), panel: VECTORS * T::lanes::<S>() }
    }
}

/// Whether a kernel (tap, input, output) is read as it lies, or as that of the gradient of its images: (tap, output, input).
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Turned {
    No,
    Yes,
}

/// Some columns of kernels (taps, depth, width), or (taps, width, depth) if they are turned, in panels: (panel, tap, depth, columns of the
/// panel). Taps that nobody uses are left out.
pub(crate) fn in_panels<T: Lanes>(
    device: &Device,
    kernels: &[T],
    [taps, depth, width]: [usize; 3],
    turned: Turned,
    from: usize,
    is_used: impl Fn(usize) -> bool + Sync,
    panels: &mut [T],
) {
    let _timer = device.time("convolution, kernels in panels");
    let columns = device.arch().dispatch(Columns::of::<T>()).panel;
    device.for_chunks(panels, taps * depth * columns, |i, panel| {
        let (first, columns) = (from + i * columns, panel.len() / (taps * depth));
        device.arch().run(
            #[inline(always)]
            || {
                let used =
                    panel.chunks_exact_mut(depth * columns).enumerate().filter(|(tap, _)| is_used(*tap));
                for (tap, panel) in used {
                    let kernel = &kernels[tap * depth * width..][..depth * width];
                    match turned {
                        Turned::No => side_by_side(kernel, [width, first], panel, columns),
                        Turned::Yes => {
                            transpose(&kernel[first * depth..], depth, [columns, depth], panel, |p| {
                                p * columns
                            });
                        }
                    }
                }
            },
        );
    });
}

/// Some columns of rows of `width` numbers, of which the last may end behind them, from `column` on, to rows of `columns` numbers.
#[inline(always)]
pub(crate) fn side_by_side<T: Lanes>(rows: &[T], [width, column]: [usize; 2], to: &mut [T], columns: usize) {
    for (to, row) in to.chunks_exact_mut(columns).zip(rows.chunks(width)) {
        to.copy_from_slice(&row[column..][..columns]);
    }
}

/// R rows of V vectors.
pub(crate) type Tile<T, S, const R: usize, const V: usize> = [[<T as Lanes>::Vector<S>; V]; R];

/// A tile of zeros.
#[inline(always)]
pub(crate) fn zeros<T: Lanes, S: Simd, const R: usize, const V: usize>(simd: S) -> Tile<T, S, R, V> {
    [[T::splat(simd, T::ZERO); V]; R]
}

/// A tile whose rows are the bias of the columns from `column` on, or zeros.
#[inline(always)]
pub(crate) fn biased<T: Lanes, S: Simd, const R: usize, const V: usize>(
    simd: S,
    bias: Option<&[T]>,
    column: usize,
) -> Tile<T, S, R, V> {
    let mut row = [T::splat(simd, T::ZERO); V];
    if let Some(bias) = bias {
        row.copy_from_slice(&T::vectors::<S>(&bias[column..][..V * T::lanes::<S>()])[..V]);
    }
    [row; R]
}

/// Writes the first rows of a tile to `rows`, which have `width` numbers, from `column` on.
#[inline(always)]
pub(crate) fn store<T: Lanes, S: Simd, const R: usize, const V: usize>(
    tile: &Tile<T, S, R, V>,
    rows: &mut [T],
    width: usize,
    column: usize,
) {
    for (row, tile) in rows.chunks_exact_mut(width).zip(tile) {
        let row = &mut row[column..][..V * T::lanes::<S>()];
        T::vectors_mut::<S>(row)[..V].copy_from_slice(tile);
    }
}

/// `sums += more`.
#[inline(always)]
fn add<T: Lanes, S: Simd, const R: usize, const V: usize>(
    simd: S,
    sums: &mut Tile<T, S, R, V>,
    more: &Tile<T, S, R, V>,
) {
    for (sum, &more) in sums.as_flattened_mut().iter_mut().zip(more.as_flattened()) {
        *sum = T::plus(simd, *sum, more);
    }
}

/// Adds a tile to rows of `width` numbers, the columns of the tile being those from `column` on.
#[inline(always)]
pub(crate) fn add_to<T: Lanes, S: Simd, const R: usize, const V: usize>(
    simd: S,
    sums: &mut [T],
    width: usize,
    column: usize,
    tile: &Tile<T, S, R, V>,
) {
    for (sums, tile) in sums.chunks_exact_mut(width).zip(tile) {
        let sums = &mut T::vectors_mut::<S>(&mut sums[column..])[..V];
        sums.iter_mut().zip(tile).for_each(|(sum, &more)| *sum = T::plus(simd, *sum, more));
    }
}

/// Where the rows of a tile begin, of which there are `count`: a short last tile takes the last one again, whose sums aren't stored.
#[inline(always)]
pub(crate) fn starts<const R: usize>(first: usize, count: usize, step: usize) -> [usize; R] {
    let mut starts = [0; R];
    for (i, start) in starts.iter_mut().enumerate() {
        *start = (first + i).min(count - 1) * step;
    }
    starts
}

/// `sums[i] += sum over p of a[starts[i] + p] b[p]`; `b` begins at the first row's numbers, and has rows of the width
/// `b_width`.
#[inline(always)]
pub(crate) fn add_rows<T: Lanes, S: Simd, const R: usize, const V: usize>(
    simd: S,
    sums: &mut Tile<T, S, R, V>,
    (a, starts): (&[T], [usize; R]),
    (b, b_width): (&[T], usize),
    depth: usize,
) {
    let columns = V * T::lanes::<S>();
    // `map` is a call here, around which all sums would leave their registers.
    let mut rows = [a; R];
    for (row, start) in rows.iter_mut().zip(starts) {
        *row = &a[start..][..depth];
    }
    let mut done = 0;
    if b_width == columns {
        let b = T::vectors::<S>(&b[..depth * columns]).as_chunks::<V>().0.as_chunks::<STEP>().0;
        let mut steps = [a.as_chunks::<STEP>().0; R];
        for (step, row) in steps.iter_mut().zip(rows) {
            *step = &row.as_chunks::<STEP>().0[..b.len()];
        }
        for (p, b) in b.iter().enumerate() {
            for (i, b) in b.iter().enumerate() {
                for (sums, step) in sums.iter_mut().zip(&steps) {
                    let a = T::splat(simd, step[p][i]);
                    for (sum, &b) in sums.iter_mut().zip(b) {
                        *sum = T::multiply_add(simd, b, a, *sum);
                    }
                }
            }
        }
        done = b.len() * STEP;
    }
    // Counted, so that the compiler sees that every row has its number `p`.
    for p in done..depth {
        let b = &T::vectors::<S>(&b[p * b_width..][..columns]).as_chunks::<V>().0[0];
        for (sums, row) in sums.iter_mut().zip(&rows) {
            let a = T::splat(simd, row[p]);
            for (sum, &b) in sums.iter_mut().zip(b) {
                *sum = T::multiply_add(simd, b, a, *sum);
            }
        }
    }
}

/// As [`add_rows`], in chains of at most [`CHAIN`] products.
#[inline(always)]
pub(crate) fn add_long_rows<T: Lanes, S: Simd, const R: usize, const V: usize>(
    simd: S,
    sums: &mut Tile<T, S, R, V>,
    (a, starts): (&[T], [usize; R]),
    (b, b_width): (&[T], usize),
    depth: usize,
) {
    for from in (0..depth).step_by(CHAIN) {
        let (a, b) = ((a, starts.map(|start| start + from)), (&b[from * b_width..], b_width));
        let mut chain = zeros::<T, S, R, V>(simd);
        add_rows::<T, S, R, V>(simd, &mut chain, a, b, CHAIN.min(depth - from));
        add::<T, S, R, V>(simd, sums, &chain);
    }
}

/// Adds to a panel of `sums (depth, width)` the outer products of all rows of two factors: `left` is (block, rows, A), with a
/// depth of A numbers to a block, and `right` (rows, columns of the panel) and maybe more behind.
#[inline(always)]
pub(crate) fn sum_blocks<T: Lanes, S: Simd, const R: usize, const V: usize, const A: usize>(
    simd: S,
    (sums, width, column): (&mut [T], usize, usize),
    (left, rows): (&[T], usize),
    right: &[T],
) {
    let blocks = left.as_chunks::<A>().0.chunks_exact(rows);
    for (sums, block) in sums.chunks_exact_mut(A * width).zip(blocks) {
        for (i, sums) in sums.chunks_exact_mut(R * width).enumerate() {
            let mut tile = zeros::<T, S, R, V>(simd);
            add_outer::<T, S, R, V, A>(simd, &mut tile, (block, i * R), right);
            add_to::<T, S, R, V>(simd, sums, width, column, &tile);
        }
    }
}

/// `sums[i] += sum over rows of a[row][at + i] b[row]`: rows of `b` are as wide as the tile and follow each other.
#[inline(always)]
pub(crate) fn add_outer<T: Lanes, S: Simd, const R: usize, const V: usize, const A: usize>(
    simd: S,
    sums: &mut Tile<T, S, R, V>,
    (a, at): (&[[T; A]], usize),
    b: &[T],
) {
    let b = &T::vectors::<S>(b).as_chunks::<V>().0[..a.len()];
    let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<STEP>(), b.as_chunks::<STEP>());
    for (a, b) in a.iter().zip(b) {
        for (a, b) in a.iter().zip(b) {
            add_product::<T, S, R, V>(simd, sums, &a[at..], b);
        }
    }
    for (a, b) in a_rest.iter().zip(b_rest) {
        add_product::<T, S, R, V>(simd, sums, &a[at..], b);
    }
}

/// `sums[i] += a[i] b`
#[inline(always)]
fn add_product<T: Lanes, S: Simd, const R: usize, const V: usize>(
    simd: S,
    sums: &mut Tile<T, S, R, V>,
    a: &[T],
    b: &[T::Vector<S>; V],
) {
    for (sums, &a) in sums.iter_mut().zip(&a[..R]) {
        let a = T::splat(simd, a);
        for (sum, &b) in sums.iter_mut().zip(b) {
            *sum = T::multiply_add(simd, b, a, *sum);
        }
    }
}

/// `sums[i] += sum over rows of a[row][i] b[row]`: both slices begin at the first row's numbers, and have rows of the widths
/// `a_width` and `b_width`. A tile may look past the end of a row of `a`.
#[inline(always)]
pub(crate) fn add_columns<T: Lanes, S: Simd, const R: usize, const V: usize>(
    simd: S,
    sums: &mut Tile<T, S, R, V>,
    (a, a_width): (&[T], usize),
    (b, b_width): (&[T], usize),
    rows: usize,
) {
    let columns = V * T::lanes::<S>();
    for (start, b) in (0..).step_by(a_width).zip(b.chunks(b_width)).take(rows) {
        let a = a[start..].first_chunk::<R>().expect("a row, and what follows it, holds the rows of a tile");
        let b = &T::vectors::<S>(&b[..columns]).as_chunks::<V>().0[0];
        add_product::<T, S, R, V>(simd, sums, a, b);
    }
}
