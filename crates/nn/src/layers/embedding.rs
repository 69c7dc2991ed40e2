//! A table of vectors.

use crate::module::{Ctx, Module, Visitor};
use crate::param::{Init, Param};
use phalanx_tensor::Tensor;

/// Row `id` of a table for each id. Parameter `weight` (rows, width), starting normally distributed with std 1.
pub struct Embedding {
    weight: Param,
}

impl Embedding {
    /// A table of `rows` vectors of `width` numbers.
    pub fn new(rows: usize, width: usize) -> Embedding {
        Embedding { weight: Param::new([rows, width], Init::Normal { std: 1.0 }) }
    }
}

impl Module for Embedding {
    /// Ids, i64 of (...), to (..., width).
    fn forward(&self, ids: &Tensor, _: &mut Ctx) -> Tensor {
        self.weight.embedding(ids)
    }

    fn visit(&mut self, v: &mut Visitor<'_>) {
        v.param("weight", &mut self.weight);
    }
}
