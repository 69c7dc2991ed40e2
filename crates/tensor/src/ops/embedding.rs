//! Rows of a table.

use crate::dtype::DType;
use crate::kernel;
use crate::op::Op;
use crate::ops::dropout::Within;
use crate::ops::{keep, recorded};
use crate::shape::Shape;
use crate::tensor::Tensor;

impl Tensor {
    /// Row `ids[i]` of this (rows, width) table for each id: i64 of any shape (...) to (..., width). Panics on a CPU if there is no
    /// such row; a GPU takes one of NaN.
    #[track_caller]
    pub fn embedding(&self, ids: &Tensor) -> Tensor {
        let rows = self.dims().first().copied().unwrap_or(0);
        self.embedding_within(Within { dim: 0, start: 0, of: rows }, ids)
    }

    /// The same of a table of which this one, (rows, width), is a part: zeros where a row is in another part. Panics if it isn't one.
    #[track_caller]
    pub fn embedding_within(&self, within: Within, ids: &Tensor) -> Tensor {
        let &[rows, width] = self.dims() else {
            panic!("embedding: the table must be (rows, width), got shape {}", self.shape())
        };
        let Within { dim, start, of } = within;
        assert!(
            dim == 0 && start.checked_add(rows).is_some_and(|end| end <= of),
            "embedding: {rows} rows from {start} on of a table of {of}"
        );
        assert!(ids.dtype() == DType::I64, "embedding: ids must be i64, got {}", ids.dtype());
        let (table, ids) = (self.contiguous(), ids.contiguous());
        let shape: Shape = ids.shape().insert(ids.shape().n_dims(), width);
        let out = Tensor::stale(self.device(), shape, self.dtype);
        kernel::embedding::embedding(&table, within, &ids, &out);
        recorded(out, Op::Embedding { table: *self.shape(), start }, &[&table], |_| [keep(&ids)])
    }
}
