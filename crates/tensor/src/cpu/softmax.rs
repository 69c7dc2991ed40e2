//! Softmax, its logarithm, and the losses that stand on them. Rows are the last dimension of contiguous tensors.

use crate::cpu::share;
use crate::dtype::{Float, with_float};
use crate::tensor::Tensor;

/// Which of the two a kernel computes.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Form {
    Softmax,
    LogSoftmax,
}

/// Applies `f` to each row of `width` of the inputs and the output, spread over the threads.
fn rows<T: Float>(out: &Tensor, width: usize, f: impl Fn(usize, &mut [T]) + Sync) {
    let device = out.device();
    let arch = device.arch();
    let mut vo = out.write_whole::<T>();
    let per_task = (share(device, vo.len()) / width.max(1)).max(1);
    device.for_chunks(&mut vo, per_task * width, |task, part| {
        arch.dispatch(|| {
            for (i, row) in part.chunks_exact_mut(width).enumerate() {
                f(task * per_task + i, row);
            }
        });
    });
}

/// The largest of a row and the sum of exp(x - largest).
fn normaliser<T: Float>(x: &[T]) -> (T, T) {
    let largest = x.iter().fold(T::NEG_INFINITY, |a, &b| a.larger(b));
    let sum = x.iter().fold(T::ZERO, |sum, &x| sum + (x - largest).exp());
    (largest, sum)
}

/// `out = softmax(x)` or its logarithm, along rows of `width`.
pub(crate) fn softmax(form: Form, x: &Tensor, width: usize, out: &Tensor) {
    let _timer = out.device().time("softmax");
    with_float!(x.dtype, "softmax", T => {
        let vx = x.read_contiguous::<T>("softmax");
        let vx = &*vx;
        rows::<T>(out, width, |i, o| {
            let x = &vx[i * width..][..width];
            let (largest, sum) = normaliser(x);
            match form {
                Form::Softmax => {
                    let scale = T::ONE / sum;
                    o.iter_mut().zip(x).for_each(|(o, &x)| *o = (x - largest).exp() * scale);
                }
                Form::LogSoftmax => {
                    let shift = largest + sum.ln();
                    o.iter_mut().zip(x).for_each(|(o, &x)| *o = x - shift);
                }
            }
        });
    });
}

/// `out =` the gradient with respect to the input, told from the output `y`.
pub(crate) fn softmax_gradient(form: Form, y: &Tensor, grad: &Tensor, width: usize, out: &Tensor) {
    let _timer = out.device().time("softmax, gradient");
    with_float!(y.dtype, "softmax", T => {
        let (vy, vg) = (y.read_contiguous::<T>("softmax"), grad.read_contiguous::<T>("softmax"));
        let (vy, vg) = (&*vy, &*vg);
        rows::<T>(out, width, |i, o| {
            let (y, g) = (&vy[i * width..][..width], &vg[i * width..][..width]);
            match form {
                // dx = y (g - sum(g y))
                Form::Softmax => {
                    let dot = y.iter().zip(g).fold(T::ZERO, |s, (&y, &g)| s + y * g);
                    o.iter_mut().zip(y.iter().zip(g)).for_each(|(o, (&y, &g))| *o = y * (g - dot));
                }
                // dx = g - exp(y) sum(g)
                Form::LogSoftmax => {
                    let sum = g.iter().fold(T::ZERO, |s, &g| s + g);
                    o.iter_mut().zip(y.iter().zip(g)).for_each(|(o, (&y, &g))| *o = g - y.exp() * sum);
                }
            }
        });
    });
}

/// Mean over the rows of -(1 - s) y[label] - s mean(y): negative log likelihood, and with label smoothing `s` cross entropy.
pub(crate) fn nll(y: &Tensor, labels: &Tensor, label_smoothing: f64, width: usize, out: &Tensor) {
    let _timer = out.device().time("losses");
    with_float!(y.dtype, "nll_loss", T => {
        let (vy, vl) = (y.read_contiguous::<T>("nll_loss"), labels.read_contiguous::<i64>("nll_loss"));
        let total: f64 = vy.chunks_exact(width.max(1)).zip(vl.iter()).map(|(y, &label)| {
            let picked = y[label as usize].to_f64();
            let mean = if label_smoothing == 0.0 { 0.0 } else { y.iter().map(|y| y.to_f64()).sum::<f64>() / width as f64 };
            (1.0 - label_smoothing) * picked + label_smoothing * mean
        }).sum();
        out.write::<T>()[out.geometry.offset] = T::from_f64(-total / vl.len() as f64);
    });
}

/// The gradient of [`nll`] with respect to `y`, times the scalar `grad`.
pub(crate) fn nll_gradient(labels: &Tensor, grad: f64, width: usize, out: &Tensor) {
    let _timer = out.device().time("losses, gradient");
    with_float!(out.dtype, "nll_loss", T => {
        let vl = labels.read_contiguous::<i64>("nll_loss");
        let mut vo = out.write_whole::<T>();
        vo.fill(T::ZERO);
        let each = T::from_f64(-grad / vl.len() as f64);
        vo.chunks_exact_mut(width.max(1)).zip(vl.iter()).for_each(|(row, &label)| row[label as usize] = each);
    });
}

/// The gradient of cross entropy with respect to the logits, told from their log-softmax `y`: softmax minus target, times
/// the scalar `grad` over the number of rows.
pub(crate) fn cross_entropy_gradient(
    y: &Tensor,
    labels: &Tensor,
    label_smoothing: f64,
    grad: f64,
    width: usize,
    out: &Tensor,
) {
    let _timer = out.device().time("losses, gradient");
    with_float!(y.dtype, "cross_entropy", T => {
        let (vy, vl) = (y.read_contiguous::<T>("cross_entropy"), labels.read_contiguous::<i64>("cross_entropy"));
        let (vy, vl) = (&*vy, &*vl);
        let each = T::from_f64(grad / vl.len() as f64);
        let spread = T::from_f64(label_smoothing / width as f64);
        let peak = T::from_f64(1.0 - label_smoothing);
        rows::<T>(out, width, |i, o| {
            o.iter_mut().zip(&vy[i * width..][..width]).for_each(|(o, &y)| *o = (y.exp() - spread) * each);
            let at = &mut o[vl[i] as usize];
            *at -= peak * each;
        });
    });
}

/// Mean over all elements of the binary cross entropy of logits `x` with targets `t` in [0, 1], in the form that can't
/// overflow: max(x, 0) - x t + ln(1 + exp(-|x|)).
pub(crate) fn bce(x: &Tensor, t: &Tensor, out: &Tensor) {
    let _timer = out.device().time("losses");
    with_float!(x.dtype, "bce_with_logits", T => {
        let (vx, vt) = (x.read_contiguous::<T>("bce_with_logits"), t.read_contiguous::<T>("bce_with_logits"));
        let total: f64 = vx.iter().zip(vt.iter()).map(|(&x, &t)| {
            (T::ZERO.larger(x) - x * t + (-x.abs()).exp().ln_1p()).to_f64()
        }).sum();
        out.write::<T>()[out.geometry.offset] = T::from_f64(total / vx.len() as f64);
    });
}
