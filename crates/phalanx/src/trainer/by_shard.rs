//! Numbers that are summed over passes and ranks: where there are logical shards, those of each are kept apart until all of them
//! are summed in an order of their own, so that the sums have the same bits on any number of ranks.

use crate::error::Error;
use phalanx_parallel::Strategy;

/// Some sums: a row for each shard of this rank, or a single row.
#[derive(Clone, Debug)]
pub(super) struct ByShard {
    /// Sums of a row.
    width: usize,
    /// Row after row.
    sums: Vec<f64>,
}

impl ByShard {
    pub(super) fn of(strategy: &dyn Strategy, width: usize) -> ByShard {
        let rows = strategy.shards().map_or(1, |shards| shards.held.len());
        ByShard { width, sums: vec![0.0; rows * width] }
    }

    /// Passes of a step take turns in so many rows.
    pub(super) fn rows(&self) -> usize {
        self.sums.len() / self.width
    }

    /// How many sums there are.
    pub(super) fn width(&self) -> usize {
        self.width
    }

    /// Adds what pass `pass`, from 0, has shown: a number for each sum.
    pub(super) fn add(&mut self, pass: usize, numbers: &[f64]) {
        let begin = pass % self.rows() * self.width;
        add(&mut self.sums[begin..begin + self.width], numbers);
    }

    /// The sums over the passes of this rank, all of them.
    pub(super) fn own<const N: usize>(&self) -> [f64; N] {
        let mut own = [0.0; N];
        self.sums.chunks_exact(self.width).for_each(|row| add(&mut own, row));
        own
    }

    /// The same, and behind them numbers of this rank that belong to no pass, and whose sums don't depend on the order.
    pub(super) fn beside(&self, numbers: &[f64]) -> ByShard {
        let width = self.width + numbers.len();
        let mut sums = vec![0.0; self.rows() * width];
        let rows = sums.chunks_exact_mut(width).zip(self.sums.chunks_exact(self.width));
        rows.for_each(|(all, row)| all[..self.width].copy_from_slice(row));
        sums[self.width..width].copy_from_slice(numbers);
        ByShard { width, sums }
    }

    /// The sums over all ranks, all of them; every rank has to ask.
    pub(super) fn whole<const N: usize>(&self, strategy: &mut dyn Strategy) -> Result<[f64; N], Error> {
        let mut whole = [0.0; N];
        self.whole_into(strategy, &mut whole)?;
        Ok(whole)
    }

    /// The same of as many as there are.
    pub(super) fn whole_into(&self, strategy: &mut dyn Strategy, whole: &mut [f64]) -> Result<(), Error> {
        debug_assert_eq!(whole.len(), self.width);
        Ok(strategy.sum_parts(&self.sums, whole)?)
    }
}

/// Adds numbers to as many sums.
fn add(sums: &mut [f64], numbers: &[f64]) {
    debug_assert_eq!(sums.len(), numbers.len());
    sums.iter_mut().zip(numbers).for_each(|(sum, number)| *sum += number);
}
