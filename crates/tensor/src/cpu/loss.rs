//! Losses, each the mean over its batch. Rows are the last dimension of contiguous tensors.

use crate::cpu::elementwise::unary;
use crate::cpu::in_lanes::InLanes;
use crate::cpu::share;
use crate::cpu::softmax::{rows, softmax};
use crate::dtype::{Float, with_float};
use crate::op::{Form, Unary};
use crate::storage::Storage;
use crate::tensor::Tensor;

/// Of `all` classes those from `start` on, (rows, width): 1 on each row's label and 0 on others. Panics if a label is no class.
#[track_caller]
pub(crate) fn one_hot(labels: &Tensor, start: usize, all: usize, out: &Tensor) {
    let width = out.dims()[1];
    with_float!(out.dtype, "one_hot", T => {
        let labels = labels.read_contiguous::<i64>("one_hot");
        if let Some(label) = labels.iter().find(|label| !(0..all as i64).contains(label)) {
            panic!("one_hot: label {label} among {all} classes");
        }
        let mut o = out.write_whole::<T>();
        o.fill(T::ZERO);
        for (row, &label) in o.chunks_exact_mut(width.max(1)).zip(labels.iter()) {
            if let Some(here) = (label as usize).checked_sub(start).and_then(|here| row.get_mut(here)) {
                *here = T::ONE;
            }
        }
    });
}

/// Mean over the rows of -y[label].
pub(crate) fn nll(y: &Tensor, labels: &Tensor, out: &Tensor) {
    mean_nll(y, labels, 0.0, y.dims()[1], out);
}

/// Mean cross entropy of logits `x`, whose log-softmax goes to `y`.
pub(crate) fn cross_entropy(x: &Tensor, labels: &Tensor, label_smoothing: f64, y: &Tensor, out: &Tensor) {
    let width = x.dims()[1];
    softmax(Form::LogSoftmax, x, width, y);
    mean_nll(y, labels, label_smoothing, width, out);
}

/// Mean over the rows of -(1 - s) y[label] - s mean(y): negative log likelihood, and with label smoothing `s` cross entropy.
fn mean_nll(y: &Tensor, labels: &Tensor, label_smoothing: f64, width: usize, out: &Tensor) {
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

/// How many of each row's scores come before its label's, as f32.
pub(crate) fn label_places(x: &Tensor, labels: &Tensor, out: &Tensor) {
    let _timer = out.device().time("losses");
    let width = x.dims()[1];
    with_float!(x.dtype, "label_places", T => {
        let (vx, vl) = (x.read_contiguous::<T>("label_places"), labels.read_contiguous::<i64>("label_places"));
        let mut places = out.write_whole::<f32>();
        for (place, (row, &label)) in places.iter_mut().zip(vx.chunks_exact(width.max(1)).zip(vl.iter())) {
            let own = row[label as usize];
            let is_before = |&(class, &other): &(usize, &T)| other > own || other == own && class < label as usize;
            *place = if own.is_nan() { -1.0 } else { row.iter().enumerate().filter(is_before).count() as f32 };
        }
    });
}

/// The gradient of [`nll`] with respect to `y`, times the scalar `grad`.
pub(crate) fn nll_gradient(labels: &Tensor, grad: &Tensor, out: &Tensor) {
    let (grad, width) = (grad.item(), out.dims()[1]);
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
/// the scalar `grad` over the number of rows. What is taken from logits to come to these is nothing that a CPU keeps.
pub(crate) fn cross_entropy_gradient(
    y: &Tensor,
    _shifts: Option<&Tensor>,
    labels: &Tensor,
    label_smoothing: f64,
    grad: &Tensor,
    out: &Tensor,
) {
    let (grad, width) = (grad.item(), y.dims()[1]);
    let _timer = out.device().time("losses, gradient");
    with_float!(y.dtype, "cross_entropy", T => {
        let (vy, vl) = (y.read_contiguous::<T>("cross_entropy"), labels.read_contiguous::<i64>("cross_entropy"));
        let (vy, vl) = (&*vy, &*vl);
        let each = T::from_f64(grad / vl.len() as f64);
        let spread = T::from_f64(label_smoothing / width as f64);
        let peak = T::from_f64(1.0 - label_smoothing);
        rows::<T>(out, width, #[inline(always)] |i, o| {
            for (o, &y) in o.iter_mut().zip(&vy[i * width..][..width]) {
                *o = (y.exp_in_lanes() - spread) * each;
            }
            let at = &mut o[vl[i] as usize];
            *at -= peak * each;
        });
    });
}

/// Mean over all elements of the binary cross entropy of logits `x` with targets `t` in [0, 1], in the form that can't
/// overflow: max(x, 0) - x t + ln(1 + exp(-|x|)).
pub(crate) fn bce(x: &Tensor, t: &Tensor, out: &Tensor) {
    with_float!(x.dtype, "bce_with_logits", T => {
        mean::<T>(x, t, out, #[inline(always)] |x, t| {
            (T::ZERO.larger(x) - x * t + (-x.abs()).exp_in_lanes().ln_1p_in_lanes()).to_f64()
        });
    });
}

/// The gradient of [`bce`] with respect to `x`, times the scalar `grad`.
pub(crate) fn bce_gradient(x: &Tensor, t: &Tensor, grad: &Tensor, out: &Tensor) {
    let mul = grad.item() / x.count() as f64;
    unary(Unary::Affine { mul, add: 0.0 }, &(x.sigmoid() - t), out);
}

/// Mean over all elements of the squared difference.
pub(crate) fn mse(x: &Tensor, t: &Tensor, out: &Tensor) {
    with_float!(x.dtype, "mse_loss", T => {
        mean::<T>(x, t, out, #[inline(always)] |x, t| {
            let apart = (x - t).to_f64();
            apart * apart
        });
    });
}

/// Independent partial sums of a block, and how many elements that has: its sum is added to those of the others in their order, whoever
/// made it.
const LANES: usize = 16;
const BLOCK: usize = 4096;

/// `out`, a scalar = the mean of `f` over all pairs of elements.
fn mean<T: Float>(x: &Tensor, t: &Tensor, out: &Tensor, f: impl Fn(T, T) -> f64 + Sync) {
    let _timer = out.device().time("losses");
    let device = x.device();
    let (vx, vt) = (x.read_contiguous::<T>("a loss"), t.read_contiguous::<T>("a loss"));
    let (vx, vt, n) = (&*vx, &*vt, vx.len());
    let room = Storage::stale(device, n.div_ceil(BLOCK) * size_of::<f64>());
    let mut sums = room.write::<f64>();
    let sums = &mut sums[..n.div_ceil(BLOCK)];
    let several = (share(device, n) / BLOCK).max(1);
    device.for_chunks(sums, several, |task, sums| {
        device.arch().run(
            #[inline(always)]
            || {
                for (i, sum) in sums.iter_mut().enumerate() {
                    let first = (task * several + i) * BLOCK;
                    let block = first..n.min(first + BLOCK);
                    let ((x, x_rest), (t, t_rest)) =
                        (vx[block.clone()].as_chunks::<LANES>(), vt[block].as_chunks::<LANES>());
                    let mut lanes = [0.0; LANES];
                    for (x, t) in x.iter().zip(t) {
                        for (lane, (&x, &t)) in lanes.iter_mut().zip(x.iter().zip(t)) {
                            *lane += f(x, t);
                        }
                    }
                    for (lane, (&x, &t)) in lanes.iter_mut().zip(x_rest.iter().zip(t_rest)) {
                        *lane += f(x, t);
                    }
                    *sum = lanes.iter().sum();
                }
            },
        );
    });
    let total: f64 = sums.iter().sum();
    out.write::<T>()[out.geometry.offset] = T::from_f64(total / n as f64);
}

/// The gradient of [`mse`] with respect to `x`, times the scalar `grad`.
pub(crate) fn mse_gradient(x: &Tensor, t: &Tensor, grad: &Tensor, out: &Tensor) {
    let mul = 2.0 * grad.item() / x.count() as f64;
    unary(Unary::Affine { mul, add: 0.0 }, &(x - t), out);
}
