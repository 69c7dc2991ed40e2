//! Rows of a table.

use crate::dtype::{DType, with_float};
use crate::op::Op;
use crate::ops::{keep, recorded};
use crate::shape::Shape;
use crate::tensor::Tensor;

impl Tensor {
    /// Row `ids[i]` of this (rows, width) table for each id: i64 of any shape (...) to (..., width).
    #[track_caller]
    pub fn embedding(&self, ids: &Tensor) -> Tensor {
        let &[rows, width] = self.dims() else {
            panic!("embedding: the table must be (rows, width), got shape {}", self.shape())
        };
        assert!(ids.dtype() == DType::I64, "embedding: ids must be i64, got {}", ids.dtype());
        let (table, ids) = (self.contiguous(), ids.contiguous());
        let shape: Shape = ids.shape().insert(ids.shape().n_dims(), width);
        let out = Tensor::stale(self.device(), shape, self.dtype);
        let wanted = ids.read_contiguous::<i64>("embedding");
        if let Some(id) = wanted.iter().find(|id| !(0..rows as i64).contains(id)) {
            panic!("embedding: id {id} in a table of shape {}", self.shape());
        }
        with_float!(self.dtype, "embedding", T => {
            let table = table.read_contiguous::<T>("embedding");
            let mut o = out.write_whole::<T>();
            for (row, &id) in o.chunks_exact_mut(width.max(1)).zip(wanted.iter()) {
                row.copy_from_slice(&table[id as usize * width..][..width]);
            }
        });
        drop(wanted);
        recorded(out, Op::Embedding { table: *self.shape() }, &[&table], |_| [keep(&ids)])
    }

    /// The gradient of [`Tensor::embedding`]: each row of `self` added to the row of `out` that it came from.
    pub(crate) fn scatter_rows(&self, ids: &Tensor, out: &Tensor) {
        let width = out.dims()[1];
        let grad = self.contiguous();
        with_float!(out.dtype, "embedding", T => {
            let (grad, ids) = (grad.read_contiguous::<T>("embedding"), ids.read_contiguous::<i64>("embedding"));
            let mut o = out.write_whole::<T>();
            o.fill(0.0);
            for (row, &id) in grad.chunks_exact(width.max(1)).zip(ids.iter()) {
                o[id as usize * width..][..width].iter_mut().zip(row).for_each(|(o, &g)| *o += g);
            }
        });
    }
}
