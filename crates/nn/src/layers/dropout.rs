//! Dropout layers: they act in training only.

use crate::module::{Ctx, Module, Visitor};
use phalanx_tensor::Tensor;

/// Zeroes each element with this probability and divides the rest by one minus it.
pub struct Dropout(pub f64);

impl Module for Dropout {
    fn forward(&self, x: &Tensor, ctx: &mut Ctx) -> Tensor {
        if ctx.training() { x.dropout(self.0, &ctx.dropout_key()) } else { x.clone() }
    }

    fn visit(&mut self, _: &mut Visitor<'_>) {}
}

/// Zeroes each channel of an image as a whole with this probability and divides the rest by one minus it.
pub struct Dropout2d(pub f64);

impl Module for Dropout2d {
    fn forward(&self, x: &Tensor, ctx: &mut Ctx) -> Tensor {
        if ctx.training() { x.dropout2d(self.0, &ctx.dropout_key()) } else { x.clone() }
    }

    fn visit(&mut self, _: &mut Visitor<'_>) {}
}
