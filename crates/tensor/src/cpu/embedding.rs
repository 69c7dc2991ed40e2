//! Rows of a table, and their gradient.

use crate::dtype::with_float;
use crate::tensor::Tensor;

/// Row `ids[i]` of `table` (rows, width) for each id; all contiguous. Panics if there is no such row.
#[track_caller]
pub(crate) fn embedding(table: &Tensor, ids: &Tensor, out: &Tensor) {
    let (rows, width) = (table.dims()[0], table.dims()[1]);
    let wanted = ids.read_contiguous::<i64>("embedding");
    if let Some(id) = wanted.iter().find(|id| !(0..rows as i64).contains(id)) {
        panic!("embedding: id {id} in a table of shape {}", table.shape());
    }
    with_float!(out.dtype, "embedding", T => {
        let table = table.read_contiguous::<T>("embedding");
        let mut o = out.write_whole::<T>();
        for (row, &id) in o.chunks_exact_mut(width.max(1)).zip(wanted.iter()) {
            row.copy_from_slice(&table[id as usize * width..][..width]);
        }
    });
}

/// `out` (rows, width) = each row of the contiguous `grad` added to the row that it came from.
pub(crate) fn embedding_gradient(grad: &Tensor, ids: &Tensor, out: &Tensor) {
    let width = out.dims()[1];
    with_float!(out.dtype, "embedding", T => {
        let (grad, ids) = (grad.read_contiguous::<T>("embedding"), ids.read_contiguous::<i64>("embedding"));
        let mut o = out.write_whole::<T>();
        o.fill(0.0);
        for (row, &id) in grad.chunks_exact(width.max(1)).zip(ids.iter()) {
            o[id as usize * width..][..width].iter_mut().zip(row).for_each(|(o, &g)| *o += g);
        }
    });
}
