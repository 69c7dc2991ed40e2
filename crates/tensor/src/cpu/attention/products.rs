//! The products of a block of scores. A query sees the keys up to its own position, so a tile of such a block is left out, or
//! cut short, where nothing in it is seen.

use crate::cpu::lanes::Lanes;
use crate::cpu::tile::{ByPanels, add_columns, add_rows, add_to, store, zeros};
use pulp::Simd;

/// Rows of `width` numbers that follow each other.
#[derive(Clone, Copy)]
pub(super) struct Rows<'a, T> {
    pub(super) values: &'a [T],
    pub(super) width: usize,
}

/// `scores (rows, keys) = queries keys^T`, as far as they are seen.
pub(super) struct Scores<'a, T> {
    pub(super) scores: &'a mut [T],
    pub(super) width: usize,
    pub(super) rows: usize,
    /// (rows, depth)
    pub(super) queries: Rows<'a, T>,
    /// (depth, keys)
    pub(super) keys: Rows<'a, T>,
    /// How many positions the first query lies behind the first key.
    pub(super) behind: usize,
}

impl<T: Lanes> ByPanels<T> for Scores<'_, T> {
    type Pass = ();

    #[inline(always)]
    fn panel<S: Simd, const R: usize, const V: usize>(&mut self, simd: S, (): &(), column: usize) {
        for first in (0..self.rows).step_by(R) {
            if column >= self.behind + first + R {
                continue;
            }
            let mut tile = zeros::<T, S, R, V>(simd);
            let depth = self.queries.width;
            let keys = (&self.keys.values[column..], self.keys.width);
            add_rows(simd, &mut tile, (self.queries.values, starts(first, depth)), keys, depth);
            store(&tile, &mut self.scores[first * self.width..], self.width, column);
        }
    }
}

/// `sums (rows, D) += shares (rows, keys) values (keys, D)`, of the keys that are seen.
pub(super) struct Gathered<'a, T> {
    pub(super) sums: &'a mut [T],
    pub(super) rows: usize,
    pub(super) shares: Rows<'a, T>,
    pub(super) values: Rows<'a, T>,
    /// How many keys there are.
    pub(super) keys: usize,
    /// How many positions the first query lies behind the first key.
    pub(super) behind: usize,
}

impl<T: Lanes> ByPanels<T> for Gathered<'_, T> {
    type Pass = ();

    #[inline(always)]
    fn panel<S: Simd, const R: usize, const V: usize>(&mut self, simd: S, (): &(), column: usize) {
        let width = self.values.width;
        for first in (0..self.rows).step_by(R) {
            let mut tile = zeros::<T, S, R, V>(simd);
            let seen = self.keys.min(self.behind + first + R);
            let values = (&self.values.values[column..], width);
            add_rows(simd, &mut tile, (self.shares.values, starts(first, self.shares.width)), values, seen);
            add_to(simd, &mut self.sums[first * width..], width, column, &tile);
        }
    }
}

/// `sums (keys, D) += shares (rows, keys)^T values (rows, D)`, of the queries that see a key.
pub(super) struct Scattered<'a, T> {
    pub(super) sums: &'a mut [T],
    pub(super) rows: usize,
    pub(super) shares: Rows<'a, T>,
    pub(super) values: Rows<'a, T>,
    /// How many keys there are.
    pub(super) keys: usize,
    /// How many positions the first query lies behind the first key.
    pub(super) behind: usize,
}

impl<T: Lanes> ByPanels<T> for Scattered<'_, T> {
    type Pass = ();

    #[inline(always)]
    fn panel<S: Simd, const R: usize, const V: usize>(&mut self, simd: S, (): &(), column: usize) {
        let (width, shares) = (self.values.width, self.shares);
        for first in (0..self.keys).step_by(R) {
            let from = first.saturating_sub(self.behind);
            if from >= self.rows {
                continue;
            }
            let mut tile = zeros::<T, S, R, V>(simd);
            let shares = (&shares.values[from * shares.width + first..], shares.width);
            let values = (&self.values.values[from * width + column..], width);
            add_columns(simd, &mut tile, shares, values, self.rows - from);
            add_to(simd, &mut self.sums[first * width..], width, column, &tile);
        }
    }
}

/// Where the rows of a tile begin.
#[inline(always)]
fn starts<const R: usize>(first: usize, width: usize) -> [usize; R] {
    let mut starts = [0; R];
    for (i, start) in starts.iter_mut().enumerate() {
        *start = (first + i) * width;
    }
    starts
}
