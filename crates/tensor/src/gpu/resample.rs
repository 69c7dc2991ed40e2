//! Sums of elements along a dimension by a table: see [`crate::ops::resample`].

use crate::gpu::Engine;
use crate::gpu::launch::{Arg, check_float, elements};
use crate::ops::resample::inner;
use crate::tensor::Tensor;

/// `out` = for each row of `table`, the sum of the elements along `dim` of `x` that it names; both are dense in the same order.
#[track_caller]
pub(crate) fn resample(engine: &Engine, x: &Tensor, dim: usize, table: &Tensor, out: &Tensor) {
    check_float("interpolate", out.dtype);
    let [size, to] = [x, out].map(|tensor| tensor.dims()[dim]);
    let (inner, width) = (inner(x, out, dim), table.dims()[1]);
    let sizes = [out.count(), size, to, inner, width].map(Arg::Int);
    let args = [Arg::In(x), Arg::In(table), Arg::Out(out), sizes[0], sizes[1], sizes[2], sizes[3], sizes[4]];
    // SAFETY: each of the table's `to` rows names elements among `size`; `out` has so many elements, and `x` as many with `size` in the
    // place of `to`.
    unsafe { engine.launch("resample", elements(out.count()), &args) }
}
