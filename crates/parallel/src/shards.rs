//! Logical shards: a step is computed as by so many imaginary ranks, whatever number of real ones computes it.
//!
//! A step's samples are cut into shards. Each shard is a forward and backward pass by itself, so that its batch norms see its
//! samples alone; gradients and losses are summed over shards along a fixed tree ([`tree`]); and buffers are what shard 0 makes
//! of those of the step before, as they are rank 0's under DDP. So the number of ranks decides who computes a shard, and no
//! number at all:
//!
//! - **L-SAME**: after `finish` gradients and buffers are functions of the step's shards, the same bits on any number of ranks.
//!
//! What a shard without samples contributes, and what a parameter gets in a shard that doesn't use it, is zero, and it is added
//! as any other number is.
//!
//! How samples are cut into shards isn't decided here, nor how kernels come by the same bits on any number of threads.

mod exchange;
mod tree;

use crate::ddp::{bring_together, share_buffers, share_values};
use crate::error::Error;
use crate::local::{names_of_learned, weighted};
use crate::strategy::{Place, Shards, Strategy, Sync};
use exchange::Exchange;
use phalanx_comm::{Group, ReduceOp};
use phalanx_nn::Parameters;
use phalanx_tensor::{Arena, GradSink, HostSpan, LeafId, Tensor};
use std::ops::Range;

/// How [`LogicalShards`] works.
#[derive(Clone, Debug)]
pub struct LogicalShardsConfig {
    /// Into how many shards a step is cut; at least as many as there are ranks.
    pub shards: usize,
    /// Whether a shard may leave parameters without a gradient. Default no.
    pub find_unused: bool,
}

impl LogicalShardsConfig {
    /// So many shards, and the defaults.
    pub fn new(shards: usize) -> LogicalShardsConfig {
        LogicalShardsConfig { shards, find_unused: false }
    }
}

/// The strategy. Each pass of a step is a shard of this rank, in order; a shard without samples is a pass without a loss.
pub struct LogicalShards {
    group: Group,
    config: LogicalShardsConfig,
    held: Range<usize>,
    /// Passes of the step at hand.
    passes: usize,
    /// Sums of nodes that wait for their siblings, in order; that of the newest node lies in the gradient arena.
    waiting: Vec<Vec<f32>>,
    /// Memory of those that wait no longer.
    spare: Vec<Vec<f32>>,
    exchange: Exchange,
    /// Buffers before the step.
    before: Vec<f32>,
    /// Those that shard 0 left, on the rank that holds it.
    after: Vec<f32>,
}

impl LogicalShards {
    /// Fails if there are no shards, or fewer than ranks.
    pub fn new(group: Group, config: LogicalShardsConfig) -> Result<LogicalShards, Error> {
        let (shards, world_size) = (config.shards, group.world_size());
        if shards < world_size {
            return Err(Error::FewShards { shards, world_size });
        }
        Ok(LogicalShards {
            held: tree::held(shards, world_size, group.rank().index()),
            exchange: Exchange::new(shards, world_size),
            group,
            config,
            passes: 0,
            waiting: Vec::new(),
            spare: Vec::new(),
            before: Vec::new(),
            after: Vec::new(),
        })
    }

    fn root(&self) -> Range<usize> {
        0..self.config.shards
    }

    /// Makes room in the arena for the gradient of a shard that isn't the sibling of what lies there.
    fn set_aside(&mut self, parameters: &Parameters) {
        let mut room = self.spare.pop().unwrap_or_default();
        parameters.grads().arena().read_into(&mut room);
        self.waiting.push(room);
    }

    /// Adds the newest of the sums that wait, a left child, to its sibling in the arena.
    fn add_sibling(&mut self, parameters: &Parameters) {
        let left = self.waiting.pop().expect("a right child has a left one");
        let mut sum = all(parameters.grads().arena());
        sum.iter_mut().zip(&left).for_each(|(sum, &left)| *sum += left);
        self.spare.push(left);
    }

    /// Adds zero to what the pass didn't come by.
    fn add_zeros(parameters: &Parameters, missing: &[usize]) {
        // Slots that hold nothing yet become zero.
        parameters.grads().settle();
        for &i in missing {
            parameters.grads().arena().host_span::<f32>(i..i + 1).iter_mut().for_each(|x| *x += 0.0);
        }
    }
}

/// The whole of an arena, lent to the host.
fn all(arena: &Arena) -> HostSpan<f32> {
    arena.host_span(0..arena.layout().count())
}

/// Notes which parameters got a gradient in a pass.
struct Seen<'a> {
    of: &'a Arena,
    seen: Vec<bool>,
}

impl GradSink for Seen<'_> {
    fn finished(&mut self, leaf: LeafId, _: Tensor) {
        if let Some(parameter) = leaf.slot_of(self.of) {
            self.seen[parameter] = true;
        }
    }
}

impl Strategy for LogicalShards {
    fn place(&self) -> Place {
        Place { rank: self.group.rank().index(), world_size: self.group.world_size() }
    }

    fn shards(&self) -> Option<Shards> {
        Some(Shards { of: self.config.shards, held: self.held.clone() })
    }

    fn prepare(&mut self, parameters: &Parameters) -> Result<(), Error> {
        parameters.give_first_values();
        self.prepare_alike(parameters)?;
        share_values(&self.group, parameters)
    }

    fn prepare_alike(&mut self, parameters: &Parameters) -> Result<(), Error> {
        bring_together(&self.group, parameters)
    }

    /// Every shard begins with the buffers that the step began with.
    fn begin_pass(&mut self, parameters: &Parameters) {
        if self.passes == 0 {
            parameters.buffers().read_into(&mut self.before);
        } else {
            parameters.buffers().write_flat(&self.before);
        }
    }

    fn backward(
        &mut self,
        parameters: &Parameters,
        loss: Option<&Tensor>,
        weight: f64,
        _: Sync,
    ) -> Result<(), Error> {
        let shard = self.held.start + self.passes;
        assert!(self.held.contains(&shard), "LogicalShards::backward: a pass beyond shards {:?}", self.held);
        let sums = tree::sums_after(self.root(), &self.held, &(shard..shard + 1));
        // Otherwise its left sibling lies in the arena, and the pass adds to it: the first of the sums.
        if sums == 0 {
            if self.passes > 0 {
                self.set_aside(parameters);
            }
            parameters.grads().zero();
        }
        let mut sink = Seen { of: parameters.values(), seen: vec![false; parameters.names().len()] };
        if let Some(loss) = loss {
            weighted(loss, weight, &mut sink);
        }
        let seen = sink.seen;
        let missing: Vec<usize> = (0..seen.len()).filter(|&i| !seen[i]).collect();
        let names = names_of_learned(parameters, &missing);
        if loss.is_some() && !names.is_empty() && !self.config.find_unused {
            self.group.abort("a rank left parameters without a gradient");
            return Err(Error::Unused { names });
        }
        LogicalShards::add_zeros(parameters, &missing);
        (1..sums).for_each(|_| self.add_sibling(parameters));
        if shard == 0 {
            parameters.buffers().read_into(&mut self.after);
        }
        self.passes += 1;
        Ok(())
    }

    fn finish(&mut self, parameters: &Parameters) -> Result<(), Error> {
        let passes = std::mem::take(&mut self.passes);
        assert!(passes == self.held.len(), "LogicalShards: {passes} passes for shards {:?}", self.held);
        let mut last = all(parameters.grads().arena());
        let summed = self.exchange.sum(&self.group, &self.waiting, &mut last);
        drop(last);
        self.spare.append(&mut self.waiting);
        summed?;
        if self.held.start == 0 {
            parameters.buffers().write_flat(&self.after);
        }
        share_buffers(&self.group, parameters)
    }

    fn sum(&mut self, numbers: &mut [f64]) -> Result<(), Error> {
        Ok(self.group.all_reduce(numbers, ReduceOp::Sum)?)
    }

    fn sum_parts(&mut self, parts: &[f64], sum: &mut [f64]) -> Result<(), Error> {
        let (width, n) = (sum.len(), self.group.world_size());
        assert!(
            parts.len() == width * self.held.len(),
            "sum_parts: {} numbers for {width} sums",
            parts.len()
        );
        // Every rank sends as many rows as the one that holds most.
        let size = width * self.config.shards.div_ceil(n);
        let (mut own, mut all) = (parts.to_vec(), vec![0.0; n * size]);
        own.resize(size, 0.0);
        self.group.all_gather(&own, &mut all)?;
        let held = |rank| tree::held(self.config.shards, n, rank).len();
        let rows = all.chunks_exact(size.max(1)).enumerate();
        let mut rows: Vec<f64> = rows.flat_map(|(rank, rows)| &rows[..width * held(rank)]).copied().collect();
        let shards: Vec<Range<usize>> = self.root().map(|shard| shard..shard + 1).collect();
        tree::add_up(&mut rows, width, &shards);
        sum.copy_from_slice(&rows[..width]);
        Ok(())
    }
}
