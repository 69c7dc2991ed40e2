//! Matrix products of tensors, and rows through a weight.

use crate::cpu::gemm::{Into, Mat, gemm, gemm_on, gemm_onto};
use crate::cpu::lanes::Lanes;
use crate::cpu::{few_terms, reduce};
use crate::dtype::{DType, with_float};
use crate::shape::{Geometry, Shape, for_each_row};
use crate::tensor::Tensor;

/// `out = a b` for every matrix of the batch; `a` and `b` may be any views.
pub(crate) fn matmul(a: &Tensor, b: &Tensor, out: &Tensor) {
    with_float!(out.dtype, "matmul", T => multiply::<T>(a, b, out));
}

/// `out = x w^T + bias`, with rows of `x`; all contiguous but `w`, which may be the transpose of what is.
pub(crate) fn linear(x: &Tensor, w: &Tensor, bias: Option<&Tensor>, out: &Tensor) {
    let (outputs, inputs) = (w.dims()[0], w.dims()[1]);
    let rows = rows_of(x);
    with_float!(out.dtype, "linear", T => {
        let (x, held) = (x.read_contiguous::<T>("linear"), w.read::<T>());
        let (x, w) = (Mat::rows(&x, inputs), matrix(w, &held).t());
        let mut o = out.write_whole::<T>();
        let (device, sizes) = (out.device(), [rows, outputs, inputs]);
        let Some(bias) = bias else { return gemm_on(device, &mut o, sizes, x, w, Into::Replace) };
        let bias = bias.read_contiguous::<T>("linear");
        let bias = &*bias;
        gemm_onto(device, &mut o, sizes, x, w, Into::Add, |rows| {
            rows.chunks_exact_mut(outputs.max(1)).for_each(|row| row.copy_from_slice(bias));
        });
    });
}

/// The matrix that a tensor of two dimensions is, whose buffer is `held`.
fn matrix<'a, T>(tensor: &Tensor, held: &'a [T]) -> Mat<'a, T> {
    let Geometry { strides: [row, col, ..], offset, .. } = tensor.geometry;
    Mat { data: &held[offset..], row, col }
}

/// All sizes but the last.
fn rows_of(x: &Tensor) -> usize {
    x.dims()[..x.shape().n_dims() - 1].iter().product()
}

/// `out = grad w`: the gradient of the rows. `w` may be the transpose of what is contiguous.
pub(crate) fn linear_input_gradient(grad: &Tensor, w: &Tensor, out: &Tensor) {
    let (outputs, inputs) = (w.dims()[0], w.dims()[1]);
    with_float!(out.dtype, "linear", T => {
        let (g, held) = (grad.read_contiguous::<T>("linear"), w.read::<T>());
        let (g, w) = (Mat::rows(&g, outputs), matrix(w, &held));
        let sizes = [rows_of(grad), inputs, outputs];
        gemm_on(out.device(), &mut out.write_whole::<T>(), sizes, g, w, Into::Replace);
    });
}

/// `out = grad^T x`: the gradient of the weight; `bias` gets the sum of the rows of `grad`.
pub(crate) fn linear_weight_gradient(grad: &Tensor, x: &Tensor, bias: Option<&Tensor>, out: &Tensor) {
    rows_times_rows(grad, x, out);
    if let Some(bias) = bias {
        reduce::sum_rows(grad, bias);
    }
}

/// As [`linear_weight_gradient`] for a weight that lies the other way around: `out = x^T grad`.
pub(crate) fn linear_in_out_weight_gradient(grad: &Tensor, x: &Tensor, bias: Option<&Tensor>, out: &Tensor) {
    rows_times_rows(x, grad, out);
    if let Some(bias) = bias {
        reduce::sum_rows(grad, bias);
    }
}

/// `out = a^T b`, with rows of `a` and `b`; all contiguous.
fn rows_times_rows(a: &Tensor, b: &Tensor, out: &Tensor) {
    put_rows_times_rows(a, b, out, Into::Replace);
}

/// So many rows are added up at once, whoever multiplies them: what is added to is touched once.
const ADDED_AT_ONCE: usize = few_terms::MOST;

/// As few rows, and as few columns, have ways of their own in the `gemm` crate, which round what they add to along with a product.
const ADDED_APART: usize = 2;

/// Whether [`add_rows_times_rows`] of as many rows to this comes to the bits of their product, added.
pub(crate) fn adds_rows_times_rows(a: &Tensor, sum: &Tensor) -> bool {
    let rows = ADDED_APART + 1..=ADDED_AT_ONCE;
    let is_wide = sum.dims().iter().all(|&dim| dim > ADDED_APART);
    matches!(a.dtype, DType::F32 | DType::F64) && rows.contains(&rows_of(a)) && is_wide
}

/// `sum += a^T b`, with rows of `a` and `b`; all contiguous.
pub(crate) fn add_rows_times_rows(a: &Tensor, b: &Tensor, sum: &Tensor) {
    put_rows_times_rows(a, b, sum, Into::Add);
}

fn put_rows_times_rows(a: &Tensor, b: &Tensor, out: &Tensor, into: Into) {
    let (m, n) = (out.dims()[0], out.dims()[1]);
    with_float!(out.dtype, "linear", T => {
        let (va, vb) = (a.read_contiguous::<T>("linear"), b.read_contiguous::<T>("linear"));
        let sizes = [m, n, rows_of(a)];
        let (va, vb) = (Mat::rows(&va, m).t(), Mat::rows(&vb, n));
        gemm_on(out.device(), &mut out.write_whole::<T>(), sizes, va, vb, into);
    });
}

/// [`matmul`] of elements of one type.
fn multiply<T: Lanes>(a: &Tensor, b: &Tensor, out: &Tensor) {
    let n_dims = out.shape().n_dims();
    let (m, n) = (out.dims()[n_dims - 2], out.dims()[n_dims - 1]);
    let k = a.dims()[a.shape().n_dims() - 1];
    let batch = Shape::new(&out.dims()[..n_dims - 2]);
    let (a_batch, a_row, a_col) = matrices(a, &batch);
    let (b_batch, b_row, b_col) = matrices(b, &batch);
    let (va, vb, mut vo) = (a.read::<T>(), b.read::<T>(), out.write_whole::<T>());
    if k == 0 || vo.is_empty() {
        return vo.fill(T::ZERO);
    }
    if batch.count() == 1 {
        let (a, b) = (&va[a_batch.offset..], &vb[b_batch.offset..]);
        let (a, b) = (Mat { data: a, row: a_row, col: a_col }, Mat { data: b, row: b_row, col: b_col });
        return gemm_on(out.device(), &mut vo, [m, n, k], a, b, Into::Replace);
    }
    let mut starts = Vec::with_capacity(batch.count());
    for_each_row([&a_batch, &b_batch], |[at, bt], [step_a, step_b], len| {
        starts.extend((0..len).map(|i| (at + i * step_a, bt + i * step_b)));
    });
    let (va, vb) = (&*va, &*vb);
    out.device().for_chunks(&mut vo, m * n, |i, o| {
        let (at, bt) = starts[i];
        let (a, b) = (
            Mat { data: &va[at..], row: a_row, col: a_col },
            Mat { data: &vb[bt..], row: b_row, col: b_col },
        );
        gemm(o, [m, n, k], a, b, Into::Replace);
    });
}

/// The batch dimensions of `t` spread to `batch`, and the strides of its matrices.
fn matrices(t: &Tensor, batch: &Shape) -> (Geometry, usize, usize) {
    let n = t.shape().n_dims();
    let own = Geometry { shape: Shape::new(&t.dims()[..n - 2]), ..t.geometry };
    (own.broadcast_to(*batch), t.geometry.strides[n - 2], t.geometry.strides[n - 1])
}
