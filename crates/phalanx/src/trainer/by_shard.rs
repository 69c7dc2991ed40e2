//! Numbers that are summed over passes and ranks: where there are logical shards, those of each are kept apart until all of them
//! are summed in an order of their own, so that the sums have the same bits on any number of ranks.

use crate::error::Error;
use phalanx_parallel::Strategy;

/// `N` sums: a row for each shard of this rank, or a single row.
#[derive(Clone, Debug)]
pub(super) struct ByShard<const N: usize>(Vec<[f64; N]>);

impl<const N: usize> ByShard<N> {
    pub(super) fn of(strategy: &dyn Strategy) -> ByShard<N> {
        ByShard(vec![[0.0; N]; strategy.shards().map_or(1, |shards| shards.held.len())])
    }

    /// Passes of a step take turns in so many rows.
    pub(super) fn rows(&self) -> usize {
        self.0.len()
    }

    /// Adds what pass `pass`, from 0, has shown.
    pub(super) fn add(&mut self, pass: usize, numbers: [f64; N]) {
        let row = pass % self.rows();
        self.0[row].iter_mut().zip(numbers).for_each(|(sum, number)| *sum += number);
    }

    /// The sums over the passes of this rank.
    pub(super) fn own(&self) -> [f64; N] {
        let mut sums = [0.0; N];
        self.0.iter().for_each(|row| sums.iter_mut().zip(row).for_each(|(sum, number)| *sum += number));
        sums
    }

    /// The same, and behind them numbers of this rank that belong to no pass, and whose sums don't depend on the order.
    pub(super) fn beside<const M: usize, const ALL: usize>(&self, numbers: [f64; M]) -> ByShard<ALL> {
        let mut rows = vec![[0.0; ALL]; self.rows()];
        rows.iter_mut().zip(&self.0).for_each(|(all, row)| all[..N].copy_from_slice(row));
        rows[0][N..].copy_from_slice(&numbers);
        ByShard(rows)
    }

    /// The sums over all ranks, which all have to ask.
    pub(super) fn whole(&self, strategy: &mut dyn Strategy) -> Result<[f64; N], Error> {
        let mut sums = [0.0; N];
        strategy.sum_parts(self.0.as_flattened(), &mut sums)?;
        Ok(sums)
    }
}
