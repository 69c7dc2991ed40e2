//! Placement: a row of blocks on several devices of one process.
//!
//! A [`Placed`] model is the model that it was made of: the same parameters under the same names, and the same outputs. What goes
//! from block to block is brought to the device of the next block, and gradients go back the same way, since moving a
//! tensor is an operation like any other. One device computes at a time; [`crate::pipeline`] changes that.

use crate::error::Error;
use phalanx_nn::{Ctx, Module, Parameters, Visitor};
use phalanx_tensor::{Device, Tensor};
use std::ops::Range;

/// A model whose blocks lie on devices.
///
/// ```
/// use phalanx_nn::{Ctx, Linear, Module, Relu, Sequential};
/// use phalanx_parallel::Placeable;
/// use phalanx_tensor::{DType, Device, Tensor};
///
/// let (first, second) = (Device::cpu(1), Device::cpu(1));
/// let net = Sequential::new().then(Linear::new(4, 8)).then(Relu).then(Linear::new(8, 2));
/// let mut net = net.place([(0..2, first.clone()), (2..3, second.clone())])?;
/// let parameters = net.build(0);
/// let y = net.forward(&Tensor::ones(&first, [3, 4], DType::F32), &mut Ctx::eval());
/// assert!(y.device() == &second);
/// y.sum_all().backward(); // the gradients of all four parameters, on their devices
/// # Ok::<(), phalanx_parallel::Error>(())
/// ```
pub struct Placed {
    model: Box<dyn Module>,
    places: Vec<(Range<usize>, Device)>,
    /// The place of each block.
    of: Vec<usize>,
}

/// Models that can be placed: all of them.
pub trait Placeable: Module + Sized + 'static {
    /// The model with its blocks on these devices.
    ///
    /// # Errors
    /// The ranges aren't all blocks of the model in order, or several devices are to hold them and one is a GPU.
    fn place(self, places: impl IntoIterator<Item = (Range<usize>, Device)>) -> Result<Placed, Error> {
        Placed::new(Box::new(self), places.into_iter().collect())
    }
}

impl<M: Module + 'static> Placeable for M {}

impl Placed {
    /// As [`Placeable::place`].
    pub fn new(model: Box<dyn Module>, places: Vec<(Range<usize>, Device)>) -> Result<Placed, Error> {
        let blocks = model.blocks();
        let follows = places.windows(2).all(|pair| pair[0].0.end == pair[1].0.start);
        let whole = places.first().map(|place| place.0.start) == Some(0)
            && places.last().map(|place| place.0.end) == Some(blocks);
        if !follows || !whole || places.iter().any(|(range, _)| range.is_empty()) {
            let placed = places.iter().map(|(range, _)| format!("{range:?}")).collect();
            return Err(Error::Places { placed, blocks });
        }
        if let Some((_, gpu)) = places.iter().find(|(_, device)| device.gpu().is_some())
            && places.iter().any(|(_, device)| device != gpu)
        {
            return Err(Error::PlacedGpu { device: format!("{gpu:?}") });
        }
        let of =
            places.iter().enumerate().flat_map(|(i, (range, _))| range.clone().map(move |_| i)).collect();
        Ok(Placed { model, places, of })
    }

    /// The parameters, each on the device of its block, with the first values of the model that isn't placed.
    pub fn build(&mut self, seed: u64) -> Parameters {
        let parameters = self.lay_out(seed);
        parameters.give_first_values();
        parameters
    }

    /// The same without values, as [`Parameters::lay_out`].
    pub fn lay_out(&mut self, seed: u64) -> Parameters {
        let Placed { model, places, of } = self;
        let devices: Vec<Device> = places.iter().map(|(_, device)| device.clone()).collect();
        Parameters::lay_out_on(model, &devices, |block| of[block], seed)
    }

    /// Which blocks lie where.
    pub fn places(&self) -> &[(Range<usize>, Device)] {
        &self.places
    }
}

impl Module for Placed {
    fn forward(&self, x: &Tensor, ctx: &mut Ctx) -> Tensor {
        (0..self.blocks()).fold(x.clone(), |x, block| self.forward_block(block, &x, ctx))
    }

    fn visit(&mut self, v: &mut Visitor<'_>) {
        self.model.visit(v);
    }

    fn blocks(&self) -> usize {
        self.model.blocks()
    }

    fn forward_block(&self, block: usize, x: &Tensor, ctx: &mut Ctx) -> Tensor {
        let (_, device) = &self.places[self.of[block]];
        self.model.forward_block(block, &x.to(device), ctx)
    }

    fn block_of(&self, name: &str) -> usize {
        self.model.block_of(name)
    }

    fn shared_by(&self, name: &str) -> Vec<usize> {
        self.model.shared_by(name)
    }
}
