//! Rows of a table, and their gradient. Row numbers aren't looked at before: one that the table doesn't have gives NaN, and whoever
//! reads that is told why ([`Engine::check_indices`]).

use crate::dtype::DType;
use crate::gpu::Engine;
use crate::gpu::launch::{Arg, check_float, elements, rows};
use crate::ops::dropout::Within;
use crate::tensor::Tensor;

/// Row `ids[i]` for each id of the table of `within`, of which `table` (rows, width) is a part; all contiguous.
#[track_caller]
pub(crate) fn embedding(engine: &Engine, table: &Tensor, within: Within, ids: &Tensor, out: &Tensor) {
    check_float("embedding", out.dtype);
    let (n_rows, width) = (table.dims()[0], table.dims()[1]);
    let args = [
        Arg::In(table),
        Arg::In(ids),
        Arg::Out(out),
        Arg::Bare(engine.bad_index.address()),
        Arg::Int(ids.count()),
        Arg::Int(n_rows),
        Arg::Int(width),
        Arg::Int(within.start),
        Arg::Int(within.of),
    ];
    // SAFETY: the table has its rows, and there is a row of the output for each id; an id that is none of them reads nothing.
    unsafe { engine.launch("embedding", elements(ids.count() * width), &args) }
}

/// `out` (rows, width), a part of a table from row `start` on = each row of the contiguous `grad` added to the row that it came from.
#[track_caller]
pub(crate) fn embedding_gradient(engine: &Engine, grad: &Tensor, start: usize, ids: &Tensor, out: &Tensor) {
    check_float("embedding", out.dtype);
    let (n, n_rows, width) = (ids.count(), out.dims()[0], out.dims()[1]);
    // Where each row is used first and last.
    let [first, last] = [n as f64, -1.0].map(|value| Tensor::full(out.device(), [n_rows], value, DType::I64));
    let sizes = [n, n_rows, start].map(Arg::Int);
    let spans = [Arg::In(ids), Arg::Out(&first), Arg::Out(&last), sizes[0], sizes[1], sizes[2]];
    // SAFETY: there are n ids, and a first and a last place for each row; an id that is none of them is passed over.
    unsafe { engine.launch("embedding_spans", elements(n), &spans) };
    let inputs = [grad, ids, &first, &last].map(Arg::In);
    let sizes = [n_rows, width, start].map(Arg::Int);
    let args = [inputs[0], inputs[1], inputs[2], inputs[3], Arg::Out(out), sizes[0], sizes[1], sizes[2]];
    // SAFETY: places lie among the n ids, for each of which `grad` has a row.
    unsafe { engine.launch("embedding_gradient", rows(n_rows, width), &args) }
}
