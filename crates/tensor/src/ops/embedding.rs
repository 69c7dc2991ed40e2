//! Rows of a table.

use crate::dtype::DType;
use crate::kernel;
use crate::op::Op;
use crate::ops::{keep, recorded};
use crate::shape::Shape;
use crate::tensor::Tensor;

impl Tensor {
    /// Row `ids[i]` of this (rows, width) table for each id: i64 of any shape (...) to (..., width).
    #[track_caller]
    pub fn embedding(&self, ids: &Tensor) -> Tensor {
        let &[_, width] = self.dims() else {
            panic!("embedding: the table must be (rows, width), got shape {}", self.shape())
        };
        assert!(ids.dtype() == DType::I64, "embedding: ids must be i64, got {}", ids.dtype());
        let (table, ids) = (self.contiguous(), ids.contiguous());
        let shape: Shape = ids.shape().insert(ids.shape().n_dims(), width);
        let out = Tensor::stale(self.device(), shape, self.dtype);
        kernel::embedding::embedding(&table, &ids, &out);
        recorded(out, Op::Embedding { table: *self.shape() }, &[&table], |_| [keep(&ids)])
    }
}
