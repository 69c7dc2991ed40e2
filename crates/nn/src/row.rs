//! A model as a row of blocks: where pipelines, sharding and recomputation cut it.
//!
//! ```
//! use phalanx_nn::{Block, Ctx, Linear, Module, Parameters, Relu, Row, Visitor};
//! use phalanx_tensor::{DType, Device, Tensor};
//!
//! let mut row = Row::new()
//!     .then(Block::new("first", Linear::new(3, 4)))
//!     .then(Block::new("between", Relu))
//!     .then(Block::new("last", Linear::new(4, 2)));
//! let device = Device::cpu(1);
//! let parameters = Parameters::build(&mut row, &device, 0);
//! assert_eq!(parameters.names()[2], "last.weight");
//!
//! // The same in two parts.
//! let x = Tensor::ones(&device, [1, 3], DType::F32);
//! let ctx = &mut Ctx::eval();
//! let middle = row.forward_blocks(0..2, &x, ctx);
//! let y = row.forward_blocks(2..3, &middle, ctx);
//! assert_eq!(y.to_vec::<f32>(), row.forward(&x, ctx).to_vec::<f32>());
//! let mut names = Vec::new();
//! row.visit_blocks(2..3, &mut Visitor::new(&mut |name, _, _| names.push(name.to_owned())));
//! assert_eq!(names, ["last.weight", "last.bias"]);
//! ```

use crate::module::{Ctx, Module, Visitor};
use phalanx_tensor::Tensor;
use std::ops::Range;

/// Blocks one after the other: the output of each is the input of the next, and what skips something does so within a block.
#[derive(Default)]
pub struct Row(Vec<Block>);

/// A part of a [`Row`].
pub struct Block {
    name: String,
    /// What the names of its parameters begin with; empty if with nothing of its own.
    prefix: String,
    module: Box<dyn Module>,
}

impl Block {
    /// A block whose parameters are named after it.
    pub fn new(name: &str, module: impl Module + 'static) -> Block {
        Block { name: name.to_owned(), prefix: name.to_owned(), module: Box::new(module) }
    }

    /// A block whose parameters are named as if they were the row's own.
    pub fn unprefixed(name: &str, module: impl Module + 'static) -> Block {
        Block { name: name.to_owned(), prefix: String::new(), module: Box::new(module) }
    }

    /// What it is called.
    pub fn name(&self) -> &str {
        &self.name
    }
}

impl Row {
    /// No blocks yet.
    pub fn new() -> Row {
        Row::default()
    }

    /// These blocks and one more.
    pub fn then(mut self, block: Block) -> Row {
        self.0.push(block);
        self
    }

    /// The blocks.
    pub fn blocks(&self) -> &[Block] {
        &self.0
    }

    /// The output of some of the blocks, for the output of those before them. Dropout has the masks that it has in a pass through
    /// all blocks. Panics if there are no such blocks.
    #[track_caller]
    pub fn forward_blocks(&self, blocks: Range<usize>, x: &Tensor, ctx: &mut Ctx) -> Tensor {
        let first = blocks.start;
        self.0[blocks]
            .iter()
            .enumerate()
            .fold(x.clone(), |x, (i, block)| ctx.in_block(first + i, |ctx| block.module.forward(&x, ctx)))
    }

    /// Names the parts of some of the blocks, as a visit of all of them does. Panics if there are no such blocks.
    #[track_caller]
    pub fn visit_blocks(&mut self, blocks: Range<usize>, v: &mut Visitor<'_>) {
        for block in &mut self.0[blocks] {
            v.child(&block.prefix, &mut block.module);
        }
    }
}

impl Module for Row {
    fn forward(&self, x: &Tensor, ctx: &mut Ctx) -> Tensor {
        self.forward_blocks(0..self.0.len(), x, ctx)
    }

    fn visit(&mut self, v: &mut Visitor<'_>) {
        self.visit_blocks(0..self.0.len(), v);
    }

    fn row(&self) -> Option<&Row> {
        Some(self)
    }

    fn row_mut(&mut self) -> Option<&mut Row> {
        Some(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Dropout, Parameters, Sequential};
    use phalanx_tensor::{DType, Device};

    /// The masks of the dropouts, each laid over a whole sample.
    fn masks(row: &Row, blocks: Range<usize>, ctx: &mut Ctx) -> Vec<f32> {
        row.forward_blocks(blocks, &Tensor::ones(&Device::cpu(1), [1, 64], DType::F32), ctx).to_vec()
    }

    #[test]
    fn a_block_has_its_masks_whoever_runs_it_and_no_other_has_them() {
        let pair = || Sequential::new().then(Dropout(0.5)).then(Dropout(0.5));
        let row = Row::new()
            .then(Block::new("a", Dropout(0.5)))
            .then(Block::new("b", pair()))
            .then(Block::new("c", Dropout(0.5)));
        let fresh = || Ctx::train(1, 2, [3].into());
        let alone: Vec<Vec<f32>> = (0..3).map(|i| masks(&row, i..i + 1, &mut fresh())).collect();
        let mut one_after_the_other = fresh();
        for (i, alone) in alone.iter().enumerate() {
            assert_eq!(masks(&row, i..i + 1, &mut one_after_the_other), *alone, "block {i}");
        }
        assert_ne!(alone[0], alone[2]);
        let kept = |i: usize| alone.iter().all(|mask| mask[i] != 0.0);
        let all = masks(&row, 0..3, &mut fresh());
        assert!((0..64).all(|i| (all[i] != 0.0) == kept(i)));
        // Of four independent masks a sixteenth is kept by all, give or take four standard errors.
        assert!((0..=12).contains(&(0..64).filter(|&i| kept(i)).count()));
    }

    #[test]
    fn parameters_of_a_block_without_a_prefix_are_the_rows_own() {
        let mut row = Row::new()
            .then(Block::unprefixed("begin", Sequential::new().then(crate::LayerNorm::new(2))))
            .then(Block::new("end", crate::LayerNorm::new(2)));
        assert_eq!(row.blocks().iter().map(Block::name).collect::<Vec<_>>(), ["begin", "end"]);
        let parameters = Parameters::build(&mut row, &Device::cpu(1), 0);
        assert_eq!(parameters.names(), ["0.weight", "0.bias", "end.weight", "end.bias"]);
    }
}
