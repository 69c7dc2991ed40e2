//! Activations that aren't kept: blocks of a model whose forward pass is made once more in the backward pass.
//!
//! A [`Recomputed`] model is the model that it was made of, with the same parameters, outputs and gradients to the bit. Of a block
//! nothing stays in memory but its input, from its forward to its backward pass ([`Tensor::recomputed`]); that then computes the
//! block again, with the same dropout masks, as these are functions of the seed, the step and the sample, and without batch norms
//! moving their running statistics twice ([`Ctx::again`]). It takes the time of another forward pass.
//!
//! [`Recomputed::cheap`] chooses by operation in the place of blocks: products don't keep the results of norms and activation functions
//! that they are given, which are made again of what these keep anyway ([`without_cheap`]). It takes hardly any time, and saves less. On
//! a GPU in 16 bits GELU is computed of its rounded input then, and not within the product before it, so bits may differ.
//!
//! Since it is a model like any other, it goes with every strategy: each cuts it at its blocks and walks back through what it left.

use phalanx_nn::{Ctx, Module, Visitor};
use phalanx_tensor::{Tensor, without_cheap};
use std::ops::Range;
use std::sync::Arc;

/// A model that computes some of its activations again.
///
/// ```
/// use phalanx_nn::{Ctx, Linear, Module, Parameters, Relu, Sequential};
/// use phalanx_parallel::Recomputed;
/// use phalanx_tensor::{DType, Device, Tensor};
///
/// let device = Device::cpu(1);
/// let net = Sequential::new().then(Linear::new(4, 8)).then(Relu).then(Linear::new(8, 2));
/// let mut net = Recomputed::all_but_the_last(Box::new(net));
/// let parameters = Parameters::build(&mut net, &device, 0);
/// let y = net.forward(&Tensor::ones(&device, [3, 4], DType::F32), &mut Ctx::eval());
/// y.sum_all().backward(); // computes the first two blocks once more
/// assert!(parameters.grads().settle().is_empty());
/// ```
pub struct Recomputed {
    /// A graph that waits for its backward pass has it too.
    model: Arc<dyn Module>,
    what: What,
}

/// What is computed again.
enum What {
    /// These blocks.
    Blocks(Range<usize>),
    /// What costs little, in all blocks.
    Cheap,
}

impl Recomputed {
    /// With these blocks computed again. Panics if there aren't so many.
    #[track_caller]
    pub fn new(model: Box<dyn Module>, blocks: Range<usize>) -> Recomputed {
        let count = model.blocks();
        assert!(blocks.end <= count, "Recomputed: the blocks {blocks:?} of a model of {count}");
        Recomputed { model: Arc::from(model), what: What::Blocks(blocks) }
    }

    /// With what costs little computed again: the results of layer norms and of activation functions that keep their input, such as
    /// GELU, where dense layers would keep them once more.
    pub fn cheap(model: Box<dyn Module>) -> Recomputed {
        Recomputed { model: Arc::from(model), what: What::Cheap }
    }

    /// With all blocks computed again but the last, whose backward pass comes right after its forward pass: what that keeps is
    /// there in that moment either way.
    pub fn all_but_the_last(model: Box<dyn Module>) -> Recomputed {
        let blocks = 0..model.blocks().saturating_sub(1);
        Recomputed::new(model, blocks)
    }
}

impl Module for Recomputed {
    fn forward(&self, x: &Tensor, ctx: &mut Ctx) -> Tensor {
        (0..self.blocks()).fold(x.clone(), |x, block| self.forward_block(block, &x, ctx))
    }

    /// Panics while a graph of this model waits for its backward pass.
    fn visit(&mut self, v: &mut Visitor<'_>) {
        let model = Arc::get_mut(&mut self.model);
        model.expect("Recomputed: visited while a backward pass is still to compute its blocks").visit(v);
    }

    fn blocks(&self) -> usize {
        self.model.blocks()
    }

    fn forward_block(&self, block: usize, x: &Tensor, ctx: &mut Ctx) -> Tensor {
        match &self.what {
            What::Cheap => return without_cheap(|| self.model.forward_block(block, x, ctx)),
            What::Blocks(blocks) if !blocks.contains(&block) => {
                return self.model.forward_block(block, x, ctx);
            }
            What::Blocks(_) => {}
        }
        let (model, again) = (Arc::clone(&self.model), ctx.again());
        x.recomputed(
            |x| self.model.forward_block(block, x, ctx),
            move |x| model.forward_block(block, x, &mut again.clone()),
        )
    }

    fn block_of(&self, name: &str) -> usize {
        self.model.block_of(name)
    }

    fn shared_by(&self, name: &str) -> Vec<usize> {
        self.model.shared_by(name)
    }
}
