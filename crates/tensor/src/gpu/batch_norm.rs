//! Batch normalisation of rows of channels, as images are whose channels run fastest. Sums over a batch are merged in float64.

use crate::cpu::batch_norm::Fused;
use crate::dtype::DType;
use crate::gpu::Engine;
use crate::gpu::launch::{Arg, check_float, elements, rows};
use crate::gpu::reduce::pieces;
use crate::tensor::Tensor;
use phalanx_cuda::Work;

/// How many rows there are, and how many channels each has.
fn sizes(x: &Tensor) -> [usize; 2] {
    let channels = x.dims()[1];
    [x.count() / channels.max(1), channels]
}

/// Two sums a channel and piece.
fn parts(x: &Tensor) -> [Tensor; 2] {
    let [n, channels] = sizes(x);
    let [_, n_pieces] = pieces(n);
    [0, 1].map(|_| Tensor::stale(x.device(), [n_pieces, channels].into(), DType::F32))
}

fn columns(x: &Tensor) -> Work {
    let [n, channels] = sizes(x);
    Work::Columns { pieces: pieces(n)[1] as u64, width: channels as u64 }
}

/// `moments` (2, C) = each channel's mean, and its sum of squared distances from the mean.
#[track_caller]
pub(crate) fn moments(engine: &Engine, x: &Tensor, moments: &Tensor) {
    check_float("batch_norm", x.dtype);
    let [n, channels] = sizes(x);
    let [piece, n_pieces] = pieces(n);
    let [means, squares] = parts(x);
    let sizes = [n, channels, piece].map(Arg::Int);
    let args = [Arg::In(x), Arg::Out(&means), Arg::Out(&squares), sizes[0], sizes[1], sizes[2]];
    // SAFETY: there are n rows of channels, and a part for each piece of a channel.
    unsafe { engine.launch("batch_moments", columns(x), &args) };
    let args = [Arg::In(&means), Arg::In(&squares), Arg::Out(moments), sizes[0], sizes[1], sizes[2]];
    // SAFETY: as above, and two numbers for each channel.
    unsafe { engine.launch("merge_moments", rows(channels, n_pieces), &args) };
}

/// Each channel's mean and variance, from the moments of `count` values.
#[track_caller]
pub(crate) fn statistics(engine: &Engine, moments: &Tensor, count: f64, [mean, variance]: [&Tensor; 2]) {
    let channels = mean.count();
    // The kernel tells 1/std as well, which `normalise` makes of whatever variance it is given.
    let scale = mean.stale_like();
    let args = [
        Arg::In(moments),
        Arg::Out(mean),
        Arg::Out(variance),
        Arg::Out(&scale),
        Arg::Int(channels),
        Arg::Double(count),
        Arg::Double(0.0),
    ];
    // SAFETY: there are two moments and one of all else for each channel.
    unsafe { engine.launch("batch_statistics", elements(channels), &args) };
}

/// `out = (x - mean) scale weight + bias` with `scale = 1 / sqrt(variance + eps)`, which is kept; then what follows.
#[track_caller]
pub(crate) fn normalise(
    engine: &Engine,
    x: &Tensor,
    [mean, variance]: [&Tensor; 2],
    [weight, bias]: [Option<&Tensor>; 2],
    eps: f64,
    fused: Fused<'_>,
    [out, scale]: [&Tensor; 2],
) {
    check_float("batch_norm", x.dtype);
    let [n, channels] = sizes(x);
    let args = [Arg::In(variance), Arg::Out(scale), Arg::Int(channels), Arg::Double(eps)];
    // SAFETY: there is one of both for each channel.
    unsafe { engine.launch("batch_scales", elements(channels), &args) };
    let args = [
        Arg::In(x),
        Arg::In(mean),
        Arg::In(scale),
        Arg::InOrNull(weight),
        Arg::InOrNull(bias),
        Arg::InOrNull(fused.plus),
        Arg::Out(out),
        Arg::Int(n),
        Arg::Int(channels),
        Arg::Int(usize::from(fused.relu)),
    ];
    // SAFETY: input, output and what is added have n rows of channels in one order, the others one of each channel.
    unsafe { engine.launch("batch_normalise", elements(n * channels), &args) };
}

/// `sums` (2, C) = each channel's sum of grad, and of grad (x - mean). With `mask`, the output of a fused ReLU, only where that
/// passed it on.
#[track_caller]
pub(crate) fn sums(
    engine: &Engine,
    x: &Tensor,
    mean: &Tensor,
    grad: &Tensor,
    mask: Option<&Tensor>,
    sums: &Tensor,
) {
    check_float("batch_norm", x.dtype);
    let [n, channels] = sizes(x);
    let [piece, n_pieces] = pieces(n);
    let [grads, products] = parts(x);
    let args = [
        Arg::In(x),
        Arg::In(grad),
        Arg::InOrNull(mask),
        Arg::In(mean),
        Arg::Out(&grads),
        Arg::Out(&products),
        Arg::Int(n),
        Arg::Int(channels),
        Arg::Int(piece),
    ];
    // SAFETY: there are n rows of channels, a mean for each, and a part for each piece of a channel.
    unsafe { engine.launch("batch_sums", columns(x), &args) };
    let sizes = [n_pieces, channels].map(Arg::Int);
    let args = [Arg::In(&grads), Arg::In(&products), Arg::Out(sums), sizes[0], sizes[1]];
    // SAFETY: as above, and two sums for each channel.
    unsafe { engine.launch("merge_sums", rows(channels, n_pieces), &args) };
}

/// The gradients of the bias and of the weight, from the sums of [`sums`].
#[track_caller]
pub(crate) fn channel_gradients(
    engine: &Engine,
    sums: &Tensor,
    scale: &Tensor,
    [bias, weight]: [&Tensor; 2],
) {
    let channels = scale.count();
    let args = [Arg::In(sums), Arg::In(scale), Arg::Out(weight), Arg::Out(bias), Arg::Int(channels)];
    // SAFETY: there are two sums and one of all else for each channel.
    unsafe { engine.launch("batch_channel_gradients", elements(channels), &args) };
}

/// `out =` the gradient of the input, and of what was added to it, where that is wanted, too. `batch` are the sums of [`sums`] and of how many values a channel they were, where mean and
/// scale are the batch's own.
#[track_caller]
#[expect(clippy::too_many_arguments, reason = "they are what the formula has")]
pub(crate) fn input_gradient(
    engine: &Engine,
    x: &Tensor,
    [mean, scale]: [&Tensor; 2],
    weight: Option<&Tensor>,
    grad: &Tensor,
    mask: Option<&Tensor>,
    batch: Option<(&Tensor, f64)>,
    (out, plus): (&Tensor, Option<&Tensor>),
) {
    check_float("batch_norm", x.dtype);
    let [n, channels] = sizes(x);
    let factors = Tensor::stale(x.device(), [3, channels].into(), DType::F32);
    let args = [
        Arg::InOrNull(batch.map(|(sums, _)| sums)),
        Arg::In(scale),
        Arg::InOrNull(weight),
        Arg::Out(&factors),
        Arg::Int(channels),
        Arg::Double(batch.map_or(1.0, |(_, count)| count)),
    ];
    // SAFETY: there are two sums, three factors and one of all else for each channel.
    unsafe { engine.launch("batch_factors", elements(channels), &args) };
    let args = [
        Arg::In(x),
        Arg::In(grad),
        Arg::InOrNull(mask),
        Arg::In(mean),
        Arg::In(&factors),
        Arg::Out(out),
        plus.map_or(Arg::InOrNull(None), Arg::Out),
        Arg::Int(n),
        Arg::Int(channels),
    ];
    // SAFETY: input, gradients and mask have n rows of channels in one order.
    unsafe { engine.launch("batch_input_gradient", elements(n * channels), &args) };
}
