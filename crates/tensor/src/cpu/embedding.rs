//! Rows of a table, and their gradient.

use crate::dtype::with_float;
use crate::ops::dropout::Within;
use crate::tensor::Tensor;

/// Row `ids[i]` for each id of the table of `within`, of which `table` (rows, width) is a part; all contiguous. Panics if there is no
/// such row.
#[track_caller]
pub(crate) fn embedding(table: &Tensor, within: Within, ids: &Tensor, out: &Tensor) {
    let width = table.dims()[1];
    let wanted = ids.read_contiguous::<i64>("embedding");
    if let Some(id) = wanted.iter().find(|id| !(0..within.of as i64).contains(id)) {
        panic!("embedding: id {id} in a table of shape {}", table.shape().with(0, within.of));
    }
    with_float!(out.dtype, "embedding", T => {
        let table = table.read_contiguous::<T>("embedding");
        let mut o = out.write_whole::<T>();
        for (row, &id) in o.chunks_exact_mut(width.max(1)).zip(wanted.iter()) {
            match (id as usize).checked_sub(within.start).and_then(|id| table.get(id * width..(id + 1) * width)) {
                Some(here) => row.copy_from_slice(here),
                None => row.fill(0.0),
            }
        }
    });
}

/// `out` (rows, width), a part of a table from row `start` on = each row of the contiguous `grad` added to the row that it came from.
pub(crate) fn embedding_gradient(grad: &Tensor, start: usize, ids: &Tensor, out: &Tensor) {
    let width = out.dims()[1];
    with_float!(out.dtype, "embedding", T => {
        let (grad, ids) = (grad.read_contiguous::<T>("embedding"), ids.read_contiguous::<i64>("embedding"));
        let mut o = out.write_whole::<T>();
        o.fill(0.0);
        for (row, &id) in grad.chunks_exact(width.max(1)).zip(ids.iter()) {
            let here = (id as usize).checked_sub(start).and_then(|id| o.get_mut(id * width..(id + 1) * width));
            here.into_iter().flatten().zip(row).for_each(|(o, &g)| *o += g);
        }
    });
}
