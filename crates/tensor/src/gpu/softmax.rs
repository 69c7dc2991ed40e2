//! Softmax and its logarithm. Rows are the last dimension of contiguous tensors.

use crate::gpu::Engine;
use crate::gpu::launch::{Arg, check_float, rows};
use crate::op::Form;
use crate::tensor::Tensor;

/// `out = softmax(x)` or its logarithm, along rows of `width`.
#[track_caller]
pub(crate) fn softmax(engine: &Engine, form: Form, x: &Tensor, width: usize, out: &Tensor) {
    let name = match form {
        Form::Softmax => "softmax",
        Form::LogSoftmax => "log_softmax",
    };
    check_float(name, x.dtype);
    let n = x.count() / width.max(1);
    let args = [Arg::In(x), Arg::Out(out), Arg::Int(n), Arg::Int(width)];
    // SAFETY: both have n rows of `width` elements.
    unsafe { engine.launch(name, rows(n, width), &args) }
}

/// `out =` the gradient with respect to the input, told from the output `y`.
#[track_caller]
pub(crate) fn softmax_gradient(
    engine: &Engine,
    form: Form,
    y: &Tensor,
    grad: &Tensor,
    width: usize,
    out: &Tensor,
) {
    let name = match form {
        Form::Softmax => "softmax_gradient",
        Form::LogSoftmax => "log_softmax_gradient",
    };
    check_float(name, y.dtype);
    let n = y.count() / width.max(1);
    let args = [Arg::In(y), Arg::In(grad), Arg::Out(out), Arg::Int(n), Arg::Int(width)];
    // SAFETY: all have n rows of `width` elements.
    unsafe { engine.launch(name, rows(n, width), &args) }
}
