//! A model as a row of blocks: where pipelines, sharding and recomputation cut it.
//!
//! ```
//! use phalanx_nn::{Block, Ctx, Linear, Module, Parameters, Relu, Row};
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
//! // The same in two parts, wherever they are run.
//! let x = Tensor::ones(&device, [1, 3], DType::F32);
//! let middle = row.forward_block(1, &row.forward_block(0, &x, &mut Ctx::eval()), &mut Ctx::eval());
//! let y = row.forward_block(2, &middle, &mut Ctx::eval());
//! assert_eq!(y.to_vec::<f32>(), row.forward(&x, &mut Ctx::eval()).to_vec::<f32>());
//! assert_eq!(row.block_of("last.bias"), 2);
//! ```

use crate::module::{Ctx, Module, Role, Visitor};
use phalanx_tensor::Tensor;

/// Blocks one after the other: the output of each is the input of the next, and what skips something does so within a block. Random
/// layers count anew in each block, so dropout has the same masks whoever runs a block, and whatever was run before it.
#[derive(Default)]
pub struct Row(Vec<Block>);

/// A part of a [`Row`].
pub struct Block {
    name: String,
    /// What the names of its parameters begin with; empty if with nothing of its own.
    prefix: String,
    /// The parameters and buffers that it holds, named as the row names them.
    holds: Vec<String>,
    /// The parameters of blocks before it that it has as well.
    shares: Vec<String>,
    module: Box<dyn Module>,
}

impl Block {
    /// A block whose parameters are named after it.
    pub fn new(name: &str, module: impl Module + 'static) -> Block {
        Block::named(name, name, Box::new(module))
    }

    /// A block whose parameters are named as if they were the row's own.
    pub fn unprefixed(name: &str, module: impl Module + 'static) -> Block {
        Block::named(name, "", Box::new(module))
    }

    fn named(name: &str, prefix: &str, mut module: Box<dyn Module>) -> Block {
        let (mut holds, mut shares) = (Vec::new(), Vec::new());
        let mut found = |name: &str, role: Role, _: &mut crate::Param| {
            let names = if role == Role::Shared { &mut shares } else { &mut holds };
            names.push(name.to_owned());
        };
        Visitor::new(&mut found).child(prefix, &mut module);
        Block { name: name.to_owned(), prefix: prefix.to_owned(), holds, shares, module }
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
    pub fn all(&self) -> &[Block] {
        &self.0
    }
}

impl Module for Row {
    fn forward(&self, x: &Tensor, ctx: &mut Ctx) -> Tensor {
        (0..self.0.len()).fold(x.clone(), |x, block| self.forward_block(block, &x, ctx))
    }

    fn visit(&mut self, v: &mut Visitor<'_>) {
        for block in &mut self.0 {
            v.child(&block.prefix, &mut block.module);
        }
    }

    fn blocks(&self) -> usize {
        self.0.len()
    }

    fn forward_block(&self, block: usize, x: &Tensor, ctx: &mut Ctx) -> Tensor {
        ctx.in_block(block, |ctx| self.0[block].module.forward(x, ctx))
    }

    fn block_of(&self, name: &str) -> usize {
        let holder = self.0.iter().position(|block| block.holds.iter().any(|held| held == name));
        holder.unwrap_or_else(|| panic!("block_of: a row without a parameter {name}"))
    }

    fn shared_by(&self, name: &str) -> Vec<usize> {
        let shares = |block: &Block| block.shares.iter().any(|shared| shared == name);
        (0..self.0.len()).filter(|&i| shares(&self.0[i])).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Dropout, Parameters, Sequential};
    use phalanx_tensor::{DType, Device};

    #[test]
    fn a_block_has_its_masks_whoever_runs_it_and_no_other_has_them() {
        let pair = || Sequential::new().then(Dropout::new(0.5)).then(Dropout::new(0.5));
        let row = Row::new()
            .then(Block::new("a", Dropout::new(0.5)))
            .then(Block::new("b", pair()))
            .then(Block::new("c", Dropout::new(0.5)));
        let ones = Tensor::ones(&Device::cpu(1), [1, 64], DType::F32);
        let fresh = || Ctx::train(1, 2, [3].into());
        let mask = |block, ctx: &mut Ctx| row.forward_block(block, &ones, ctx).to_vec::<f32>();
        let alone: Vec<Vec<f32>> = (0..3).map(|block| mask(block, &mut fresh())).collect();
        let mut one_after_the_other = fresh();
        for (block, alone) in alone.iter().enumerate() {
            assert_eq!(mask(block, &mut one_after_the_other), *alone, "block {block}");
        }
        assert_ne!(alone[0], alone[2]);
        let kept = |i: usize| alone.iter().all(|mask| mask[i] != 0.0);
        let all = row.forward(&ones, &mut fresh()).to_vec::<f32>();
        assert!((0..64).all(|i| (all[i] != 0.0) == kept(i)));
        // Of four independent masks a sixteenth is kept by all, give or take four standard errors.
        assert!((0..64).filter(|&i| kept(i)).count() <= 12);
    }

    #[test]
    fn parameters_of_a_block_without_a_prefix_are_the_rows_own() {
        let mut row = Row::new()
            .then(Block::unprefixed("begin", Sequential::new().then(crate::LayerNorm::new(2))))
            .then(Block::new("end", crate::LayerNorm::new(2)));
        assert_eq!(row.all().iter().map(Block::name).collect::<Vec<_>>(), ["begin", "end"]);
        let parameters = Parameters::build(&mut row, &Device::cpu(1), 0);
        assert_eq!(parameters.names(), ["0.weight", "0.bias", "end.weight", "end.bias"]);
        assert_eq!(["0.bias", "end.weight"].map(|name| row.block_of(name)), [0, 1]);
    }
}
