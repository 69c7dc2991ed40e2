//! Losses: a number a row or piece, then their mean. The gradient of a loss is a scalar in the GPU's memory, and stays there.
//! Labels aren't looked at before: one that is no class makes the loss and the gradients of its scores NaN, and whoever reads the loss
//! is told why ([`Engine::check_indices`]).

use crate::dtype::DType;
use crate::gpu::Engine;
use crate::gpu::launch::{Arg, check_float, elements, read_where_written, rows};
use crate::gpu::reduce::sum_parts;
use crate::tensor::Tensor;

/// Elements that a block adds up.
const PIECE: usize = 1 << 12;

fn room(like: &Tensor, n: usize) -> Tensor {
    Tensor::stale(like.device(), [n].into(), DType::F32)
}

/// Of `all` classes those from `start` on, (rows, width): 1 on each row's label and 0 on others.
#[track_caller]
pub(crate) fn one_hot(engine: &Engine, labels: &Tensor, start: usize, all: usize, out: &Tensor) {
    check_float("one_hot", out.dtype);
    let (n, width) = (out.dims()[0], out.dims()[1]);
    let bad = Arg::Bare(engine.bad_index.address());
    let sizes = [n, width, start, all].map(Arg::Int);
    let args = [Arg::In(labels), Arg::Out(out), bad, sizes[0], sizes[1], sizes[2], sizes[3]];
    // SAFETY: there are n labels, n rows of `width` elements, and one number for what is bad.
    unsafe { engine.launch("one_hot", elements(n * width), &args) }
}

/// Mean over the rows of -y[label].
#[track_caller]
pub(crate) fn nll(engine: &Engine, y: &Tensor, labels: &Tensor, out: &Tensor) {
    check_float("nll_loss", y.dtype);
    let (n, width) = (y.dims()[0], y.dims()[1]);
    let losses = room(y, n);
    let bad = Arg::Bare(engine.bad_index.address());
    let args = [Arg::In(y), Arg::In(labels), Arg::Out(&losses), bad, Arg::Int(n), Arg::Int(width)];
    // SAFETY: there are n rows of `width` scores, n labels and n losses, and one number for what is bad.
    unsafe { engine.launch("nll", elements(n), &args) };
    sum_parts(engine, &losses, [1, n], 1.0 / n as f64, out);
}

/// How many of each row's scores come before its label's, as f32.
#[track_caller]
pub(crate) fn label_places(engine: &Engine, x: &Tensor, labels: &Tensor, out: &Tensor) {
    check_float("label_places", x.dtype);
    let (n, width) = (x.dims()[0], x.dims()[1]);
    let args = [Arg::In(x), Arg::In(labels), Arg::Out(out), Arg::Int(n), Arg::Int(width)];
    // SAFETY: there are n rows of `width` scores, n labels and n places.
    unsafe { engine.launch("label_places", rows(n, width), &args) }
}

/// The gradient of [`nll`] with respect to `y`, times the scalar `grad`.
#[track_caller]
pub(crate) fn nll_gradient(engine: &Engine, labels: &Tensor, grad: &Tensor, out: &Tensor) {
    check_float("nll_loss", out.dtype);
    let (n, width) = (out.dims()[0], out.dims()[1]);
    let sizes = [n, width].map(Arg::Int);
    let args =
        [Arg::In(labels), Arg::In(grad), Arg::Out(out), sizes[0], sizes[1], Arg::Float(1.0 / n as f64)];
    // SAFETY: there are n labels, a scalar, and n rows of `width` elements.
    unsafe { engine.launch("nll_gradient", elements(n * width), &args) }
}

/// Mean cross entropy of logits `x`, as f32 or in their own type. What is taken from each row of them to make it its log-softmax goes to
/// `shifts`, two numbers a row.
#[track_caller]
pub(crate) fn cross_entropy(
    engine: &Engine,
    x: &Tensor,
    labels: &Tensor,
    label_smoothing: f64,
    shifts: &Tensor,
    out: &Tensor,
) {
    check_float("cross_entropy", x.dtype);
    let (n, width) = (x.dims()[0], x.dims()[1]);
    let losses = room(x, n);
    let args = [
        Arg::In(x),
        Arg::In(labels),
        Arg::Out(shifts),
        Arg::Out(&losses),
        Arg::Bare(engine.bad_index.address()),
        Arg::Int(n),
        Arg::Int(width),
        Arg::Float(label_smoothing),
    ];
    // SAFETY: there are n rows of `width` logits, n labels, losses and pairs of shifts, and one number for what is bad.
    unsafe { engine.launch("cross_entropy", rows(n, width), &args) };
    sum_parts(engine, &losses, [1, n], 1.0 / n as f64, out);
}

/// The gradient of [`cross_entropy`] with respect to the logits, told from these and their shifts, times the scalar `grad`. It may go
/// where the logits lie.
#[track_caller]
pub(crate) fn cross_entropy_gradient(
    engine: &Engine,
    x: &Tensor,
    shifts: Option<&Tensor>,
    labels: &Tensor,
    label_smoothing: f64,
    grad: &Tensor,
    out: &Tensor,
) {
    check_float("cross_entropy", x.dtype);
    let (n, width) = (x.dims()[0], x.dims()[1]);
    let shifts = shifts.expect("a GPU keeps them");
    let grad = grad.widened();
    let args = [
        read_where_written(Some(x), [Some(out), None]),
        Arg::In(shifts),
        Arg::In(labels),
        Arg::In(&grad),
        Arg::Out(out),
        Arg::Int(n),
        Arg::Int(width),
        Arg::Float(label_smoothing),
        Arg::Float(1.0 / n as f64),
    ];
    // SAFETY: there are n rows of `width` elements in `x` and `out`, n pairs of shifts and labels, and a scalar; of what lies in one place a thread
    // reads before it writes.
    unsafe { engine.launch("cross_entropy_gradient", elements(n * width), &args) }
}

/// The mean over all elements of what the kernel makes of a pair.
#[track_caller]
fn mean_of_pairs(engine: &Engine, name: &str, [x, t]: [&Tensor; 2], out: &Tensor) {
    check_float(name, x.dtype);
    let n = x.count();
    let pieces = n.div_ceil(PIECE);
    let losses = room(x, pieces);
    let args = [Arg::In(x), Arg::In(t), Arg::Out(&losses), Arg::Int(n), Arg::Int(PIECE)];
    // SAFETY: both have n elements without gaps, and there is a number for each piece of them.
    unsafe { engine.launch(name, rows(pieces, PIECE), &args) };
    sum_parts(engine, &losses, [1, pieces], 1.0 / n as f64, out);
}

/// `out = factor grad / n` times the kernel's slope at each pair.
#[track_caller]
fn slopes(engine: &Engine, name: &str, [x, t]: [&Tensor; 2], grad: &Tensor, factor: f64, out: &Tensor) {
    check_float(name, x.dtype);
    let n = x.count();
    let factor = Arg::Float(factor / n as f64);
    let args = [Arg::In(x), Arg::In(t), Arg::In(grad), Arg::Out(out), Arg::Int(n), factor];
    // SAFETY: all have n elements without gaps, but for the gradient, which is a scalar.
    unsafe { engine.launch(name, elements(n), &args) }
}

/// Mean over all elements of the squared difference.
#[track_caller]
pub(crate) fn mse(engine: &Engine, x: &Tensor, t: &Tensor, out: &Tensor) {
    mean_of_pairs(engine, "squared_error", [x, t], out);
}

/// The gradient of [`mse`] with respect to `x`, times the scalar `grad`.
#[track_caller]
pub(crate) fn mse_gradient(engine: &Engine, x: &Tensor, t: &Tensor, grad: &Tensor, out: &Tensor) {
    slopes(engine, "squared_error_gradient", [x, t], grad, 2.0, out);
}

/// Mean over all elements of the binary cross entropy of logits `x` with targets `t`.
#[track_caller]
pub(crate) fn bce(engine: &Engine, x: &Tensor, t: &Tensor, out: &Tensor) {
    mean_of_pairs(engine, "binary_cross_entropy", [x, t], out);
}

/// The gradient of [`bce`] with respect to `x`, times the scalar `grad`.
#[track_caller]
pub(crate) fn bce_gradient(engine: &Engine, x: &Tensor, t: &Tensor, grad: &Tensor, out: &Tensor) {
    slopes(engine, "binary_cross_entropy_gradient", [x, t], grad, 1.0, out);
}
