//! The innermost loops of convolution in pixel order: a tile of sums, [`wide`] vectors for each of a few rows, that stays in
//! registers while what it sums streams by. Nothing is packed but the kernels: rows of pixels lie as the products want them.
//!
//! Per step a tile of R rows and V vectors reads V vectors and R single numbers for R V multiply-adds. With 32 registers 8 x 2
//! tiles reach the peak of the machine; with 16 there is room for 4 x 2.

use crate::cpu::lanes::Lanes;
use pulp::Simd;

/// Vectors a row of a tile, at most.
pub(super) const VECTORS: usize = 2;

/// How many vectors the tile takes whose first column leaves `columns`, itself included.
#[inline(always)]
pub(super) fn wide<T: Lanes, S: Simd>(columns: usize) -> usize {
    if columns >= VECTORS * T::lanes::<S>() { VECTORS } else { 1 }
}

/// R rows of V vectors.
pub(super) type Tile<T, S, const R: usize, const V: usize> = [[<T as Lanes>::Vector<S>; V]; R];

/// `sums[i] += sum over p of a[starts[i] + p] b[p]`; `b` begins at the first row's numbers, and has rows of the width
/// `b_width`.
#[inline(always)]
pub(super) fn add_rows<T: Lanes, S: Simd, const R: usize, const V: usize>(
    simd: S,
    sums: &mut Tile<T, S, R, V>,
    (a, starts): (&[T], [usize; R]),
    (b, b_width): (&[T], usize),
    depth: usize,
) {
    let columns = V * T::lanes::<S>();
    let rows = starts.map(|start| &a[start..][..depth]);
    for (p, b) in b.chunks(b_width).take(depth).enumerate() {
        let b = &T::vectors::<S>(&b[..columns]).as_chunks::<V>().0[0];
        for (sums, row) in sums.iter_mut().zip(&rows) {
            let a = T::splat(simd, row[p]);
            for (sum, &b) in sums.iter_mut().zip(b) {
                *sum = T::multiply_add(simd, b, a, *sum);
            }
        }
    }
}

/// `sums[i] += sum over rows of a[row][i] b[row]`: both slices begin at the first row's numbers, and have rows of the widths
/// `a_width` and `b_width`.
#[inline(always)]
pub(super) fn add_columns<T: Lanes, S: Simd, const R: usize, const V: usize>(
    simd: S,
    sums: &mut Tile<T, S, R, V>,
    (a, a_width): (&[T], usize),
    (b, b_width): (&[T], usize),
    rows: usize,
) {
    let columns = V * T::lanes::<S>();
    for (a, b) in a.chunks(a_width).zip(b.chunks(b_width)).take(rows) {
        let a = a.first_chunk::<R>().expect("a row holds the rows of a tile");
        let b = &T::vectors::<S>(&b[..columns]).as_chunks::<V>().0[0];
        for (sums, &a) in sums.iter_mut().zip(a) {
            let a = T::splat(simd, a);
            for (sum, &b) in sums.iter_mut().zip(b) {
                *sum = T::multiply_add(simd, b, a, *sum);
            }
        }
    }
}
