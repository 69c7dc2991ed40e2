//! Parameters of layers: a shape and a recipe for first values at first, a tensor once a device is known.

use crate::seam::Cut;
use phalanx_tensor::{Device, Order, Philox, Shape, Tensor};
use std::ops::Deref;

/// How a parameter gets its first values.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Init {
    /// Evenly distributed in [-bound, bound).
    Uniform {
        /// The largest absolute value.
        bound: f64,
    },
    /// Normally distributed around 0.
    Normal {
        /// Standard deviation.
        std: f64,
    },
    /// All the same.
    Constant(f64),
}

impl Init {
    /// PyTorch's default for weights and biases of linear and convolution layers: even in +-1 / sqrt(fan_in).
    pub fn fan_in(fan_in: usize) -> Init {
        Init::Uniform { bound: 1.0 / (fan_in.max(1) as f64).sqrt() }
    }

    /// Fills `values` on the threads of `device`; element `i` is a function of `key` and `i` alone.
    pub(crate) fn fill(self, device: &Device, values: &mut [f32], key: Philox) {
        match self {
            Init::Uniform { bound } => device.for_pieces([values], PIECE, |start, [piece]| {
                for (block, values) in (start as u64 / 4..).zip(piece.chunks_mut(4)) {
                    for (v, unit) in values.iter_mut().zip(key.units(block)) {
                        *v = (bound * (2.0 * f64::from(unit) - 1.0)) as f32;
                    }
                }
            }),
            Init::Normal { std } => key.fill_normal(device, std, values),
            Init::Constant(value) => values.fill(value as f32),
        }
    }
}

/// How many elements a thread fills at a time: whole blocks of random numbers, and more work than the handing over is.
const PIECE: usize = 1 << 12;

/// A parameter of a layer, or a buffer, as [`crate::Visitor`] is told. It stands for its [`Tensor`] once
/// [`crate::Parameters::build`] has seen it; before, reading it panics.
pub struct Param {
    pub(crate) shape: Shape,
    pub(crate) init: Init,
    pub(crate) order: Order,
    /// Which part of it is to lie anywhere, if not all of it.
    pub(crate) cut: Option<Cut>,
    /// Whether training leaves it as it is.
    pub(crate) frozen: bool,
    pub(crate) tensor: Option<Tensor>,
}

impl Param {
    /// A parameter of this shape that will start as `init` says.
    pub fn new(shape: impl Into<Shape>, init: Init) -> Param {
        Param { shape: shape.into(), init, order: Order::RowMajor, cut: None, frozen: false, tensor: None }
    }

    /// Its shape, which it has before it has values.
    pub fn declared_shape(&self) -> &Shape {
        &self.shape
    }

    /// From now on it is a part of what was declared; whoever lays it out gives that a place alone, with the first values that the part
    /// has in the whole, in the order in which the whole would lie.
    pub fn hold_part(&mut self, cut: Cut) {
        self.cut = Some(cut);
    }

    /// The shape of what is held of it.
    pub(crate) fn held_shape(&self) -> Shape {
        self.cut.map_or(self.shape, |cut| cut.shape(&self.shape))
    }

    /// The same parameter, lying in memory in this order. Its shape, its values and what files say of it stay the same.
    pub fn in_order(self, order: Order) -> Param {
        Param { order, ..self }
    }
}

impl Deref for Param {
    type Target = Tensor;

    #[track_caller]
    fn deref(&self) -> &Tensor {
        let Some(tensor) = &self.tensor else {
            panic!("a parameter of shape {} is used before Parameters::build gave it values", self.shape);
        };
        tensor
    }
}
