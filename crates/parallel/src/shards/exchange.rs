//! Sums over the ranks along the tree of shards, where a rank holds the sums of several nodes.
//!
//! The arena is summed chunk by chunk. Of each chunk every rank has one part: it gets all ranks' sums of that part, adds them
//! in the tree's order, and hands the result to all. So each rank sends what it holds once, and gets the result once.

use super::tree;
use crate::error::Error;
use phalanx_comm::{Group, ReduceOp};
use std::ops::Range;

/// Numbers of a chunk: large enough that messages cost little beside their bytes, small enough for the cache.
const CHUNK: usize = 1 << 18;

/// Who holds the sums of which nodes, and room for the parts of a chunk.
pub(super) struct Exchange {
    /// By rank, and of all ranks one after the other those of the whole tree.
    nodes: Vec<Vec<Range<usize>>>,
    sent: Vec<f32>,
    received: Vec<f32>,
    summed: Vec<f32>,
}

impl Exchange {
    pub(super) fn new(shards: usize, world_size: usize) -> Exchange {
        let nodes = |rank| tree::whole_nodes(0..shards, &tree::held(shards, world_size, rank));
        let nodes = (0..world_size).map(nodes).collect();
        Exchange { nodes, sent: Vec::new(), received: Vec::new(), summed: Vec::new() }
    }

    /// Makes `last` the sum over all ranks, of which this one holds those of its nodes: `others` in order, and `last`.
    pub(super) fn sum(&mut self, group: &Group, others: &[Vec<f32>], last: &mut [f32]) -> Result<(), Error> {
        match self.nodes.as_slice() {
            [_] => Ok(()),
            // One addition a number, which any all-reduce makes, and the ones in place fastest.
            [first, second] if first.len() + second.len() == 2 => Ok(group.all_reduce(last, ReduceOp::Sum)?),
            _ => (0..last.len()).step_by(CHUNK).try_for_each(|start| {
                let chunk = start..last.len().min(start + CHUNK);
                let others: Vec<&[f32]> = others.iter().map(|other| &other[chunk.clone()]).collect();
                self.sum_chunk(group, &others, &mut last[chunk])
            }),
        }
    }

    fn sum_chunk(&mut self, group: &Group, others: &[&[f32]], last: &mut [f32]) -> Result<(), Error> {
        let (n, rank) = (group.world_size(), group.rank().index());
        let size = last.len().div_ceil(n);
        let part = |rank: usize| (rank * size).min(last.len())..((rank + 1) * size).min(last.len());
        self.sent.clear();
        for to in 0..n {
            others.iter().for_each(|other| self.sent.extend_from_slice(&other[part(to)]));
            self.sent.extend_from_slice(&last[part(to)]);
        }
        let own = part(rank).len();
        let sends: Vec<usize> = (0..n).map(|to| (others.len() + 1) * part(to).len()).collect();
        let receives: Vec<usize> = self.nodes.iter().map(|nodes| nodes.len() * own).collect();
        self.received.resize(receives.iter().sum(), 0.0);
        group.all_to_all_uneven(&self.sent, &sends, &mut self.received, &receives)?;
        tree::add_up(&mut self.received, own, &self.nodes.concat());
        // Equal parts, of which the last ones may be short.
        self.received.resize(size.max(own), 0.0);
        self.summed.resize(n * size, 0.0);
        group.all_gather(&self.received[..size], &mut self.summed)?;
        last.copy_from_slice(&self.summed[..last.len()]);
        Ok(())
    }
}
