//! Batch normalisation of rows of channels, as images are whose channels run fastest. Sums over a batch are merged in float64.

use crate::cpu::batch_norm::Fused;
use crate::dtype::DType;
use crate::gpu::Engine;
use crate::gpu::launch::{Arg, check_float, elements, out_or_null, read_where_written, rows};
use crate::gpu::reduce::{column_parts, columns, pieces};
use crate::tensor::Tensor;
use phalanx_cuda::Work;

/// How many rows there are, and how many channels each has.
fn sizes(x: &Tensor) -> [usize; 2] {
    let channels = x.dims()[1];
    [x.count() / channels.max(1), channels]
}

/// Up to so many rows a block finds all of a channel and goes over it at once: its threads have up to 16 each, which come in four goes.
/// More rows are cut into pieces, for as many blocks as the GPU has room for. Where the one is faster than the other is to be seen on a
/// GPU.
const WHOLE: usize = 1 << 11;

/// A batch normalisation whose channels have a block each.
fn whole(x: &Tensor) -> Option<Work> {
    let [n, channels] = sizes(x);
    let work = Work::WholeColumns { width: channels as u64, bytes: x.dtype.bytes() as u64 };
    (1..=WHOLE).contains(&n).then_some(work)
}

/// Room for a bit of each element of what a ReLU fused to the normalisation of `x` gives, which [`gradients`] reads in the place of all of
/// it: a sixteenth in 16 bits. None where a block holds a channel, whose output is still near, and where rows aren't made of whole packs
/// of 16 bytes, which have a byte each.
pub(crate) fn room_for_bits(x: &Tensor) -> Option<Tensor> {
    let neighbours = 16 / x.dtype.bytes();
    let has_bytes = whole(x).is_none() && sizes(x)[1].is_multiple_of(neighbours) && x.count() > 0;
    has_bytes.then(|| Tensor::stale(x.device(), [x.count() / neighbours].into(), DType::U8))
}

/// What tells which gradients a fused ReLU passes on, as kernels take it: its output, or the bits of [`room_for_bits`].
fn output_and_bits(mask: Option<&Tensor>) -> [Arg<'_>; 2] {
    let is_bits = |mask: &&Tensor| mask.dtype == DType::U8;
    [mask.filter(|mask| !is_bits(mask)), mask.filter(is_bits)].map(Arg::InOrNull)
}

/// Two numbers a channel and piece.
fn parts(x: &Tensor) -> [Tensor; 2] {
    let [n, channels] = sizes(x);
    [0, 1].map(|_| column_parts(x, n, channels))
}

/// Each channel's mean and sum of squared distances from the mean, piece by piece.
#[track_caller]
fn moments_of_pieces(engine: &Engine, x: &Tensor) -> [Tensor; 2] {
    check_float("batch_norm", x.dtype);
    let [n, channels] = sizes(x);
    let [means, squares] = parts(x);
    let [a, b, c] = [n, channels, pieces(n)[0]].map(Arg::Int);
    let args = [Arg::In(x), Arg::Out(&means), Arg::Out(&squares), a, b, c];
    // SAFETY: there are n rows of channels, and a part for each piece of a channel.
    unsafe { engine.launch("batch_moments", columns(x.dtype, n, channels), &args) };
    [means, squares]
}

/// `totals` (1 + 2 C) = how many values a channel has, and each channel's sums of these and of their squares.
#[track_caller]
pub(crate) fn totals(engine: &Engine, x: &Tensor, totals: &Tensor) {
    let [n, channels] = sizes(x);
    let [piece, n_pieces] = pieces(n);
    let [means, squares] = moments_of_pieces(engine, x);
    let [a, b, c] = [n, channels, piece].map(Arg::Int);
    let args = [Arg::In(&means), Arg::In(&squares), Arg::Out(totals), a, b, c];
    // SAFETY: there is a part for each piece of a channel, and two numbers for each channel behind the first.
    unsafe { engine.launch("batch_totals", rows(channels.max(1), n_pieces), &args) };
}

/// The same as [`train`] by the statistics of a larger batch, which these are the totals of.
#[track_caller]
#[expect(clippy::too_many_arguments, reason = "they are what the formula has")]
pub(crate) fn train_shared(
    engine: &Engine,
    x: &Tensor,
    totals: &Tensor,
    affine: [Option<&Tensor>; 2],
    eps: f64,
    fused: Fused<'_>,
    running: Option<([&Tensor; 2], f64)>,
    [out, mean, variance, scale]: [&Tensor; 4],
) {
    let channels = mean.count();
    let [running_mean, running_variance] =
        [0, 1].map(|i| out_or_null(running.map(|(running, _)| running[i])));
    let [mean_out, variance, scale_out] = [mean, variance, scale].map(Arg::Out);
    let (share, width) = (Arg::Double(running.map_or(0.0, |(_, share)| share)), Arg::Int(channels));
    let args = [
        Arg::In(totals),
        mean_out,
        variance,
        scale_out,
        running_mean,
        running_variance,
        width,
        Arg::Double(eps),
        share,
    ];
    // SAFETY: there are two totals for each channel behind the first, and one of all else for each channel.
    unsafe { engine.launch("batch_shared", elements(channels), &args) };
    normalise_by(engine, x, [mean, scale], affine, fused, out);
}

/// All of a batch normalisation in training: statistics of the batch and 1/std, running statistics, and what comes out.
#[track_caller]
pub(crate) fn train(
    engine: &Engine,
    x: &Tensor,
    affine: [Option<&Tensor>; 2],
    eps: f64,
    fused: Fused<'_>,
    running: Option<([&Tensor; 2], f64)>,
    [out, mean, variance, scale]: [&Tensor; 4],
) {
    check_float("batch_norm", x.dtype);
    let [n, channels] = sizes(x);
    let [running_mean, running_variance] =
        [0, 1].map(|i| out_or_null(running.map(|(running, _)| running[i])));
    let share = Arg::Double(running.map_or(0.0, |(_, share)| share));
    let found = [mean, variance, scale].map(Arg::Out);
    let [a, b] = [n, channels].map(Arg::Int);
    let Some(work) = whole(x) else {
        let [piece, n_pieces] = pieces(n);
        let parts = moments_of_pieces(engine, x);
        let [means, squares] = parts.each_ref().map(Arg::In);
        let (piece, eps) = (Arg::Int(piece), Arg::Double(eps));
        let [mean_out, variance, scale_out] = found;
        let args = [
            means,
            squares,
            mean_out,
            variance,
            scale_out,
            running_mean,
            running_variance,
            a,
            b,
            piece,
            eps,
            share,
        ];
        // SAFETY: there is a part for each piece of a channel, and one of all else for each channel.
        unsafe { engine.launch("batch_found", rows(channels, n_pieces), &args) };
        return normalise_by(engine, x, [mean, scale], affine, fused, out);
    };
    let [weight, bias, plus] = [affine[0], affine[1], fused.plus].map(Arg::InOrNull);
    let (relu, eps) = (Arg::Int(usize::from(fused.relu)), Arg::Double(eps));
    let ([mean, variance, scale], x, out) = (found, Arg::In(x), Arg::Out(out));
    let args = [
        x,
        weight,
        bias,
        plus,
        out,
        mean,
        variance,
        scale,
        running_mean,
        running_variance,
        a,
        b,
        relu,
        eps,
        share,
    ];
    // SAFETY: input, output and what is added have n rows of channels in one order, the others one of each channel.
    unsafe { engine.launch("batch_whole", work, &args) }
}

/// `out = (x - mean) scale weight + bias` with `scale = 1 / sqrt(variance + eps)`, which is kept; then what follows.
#[track_caller]
pub(crate) fn normalise(
    engine: &Engine,
    x: &Tensor,
    [mean, variance]: [&Tensor; 2],
    affine: [Option<&Tensor>; 2],
    eps: f64,
    fused: Fused<'_>,
    [out, scale]: [&Tensor; 2],
) {
    let channels = mean.count();
    let args = [Arg::In(variance), Arg::Out(scale), Arg::Int(channels), Arg::Double(eps)];
    // SAFETY: there is one of both for each channel.
    unsafe { engine.launch("batch_scales", elements(channels), &args) };
    normalise_by(engine, x, [mean, scale], affine, fused, out);
}

/// The same by a scale that is known.
#[track_caller]
fn normalise_by(
    engine: &Engine,
    x: &Tensor,
    [mean, scale]: [&Tensor; 2],
    affine: [Option<&Tensor>; 2],
    fused: Fused<'_>,
    out: &Tensor,
) {
    check_float("batch_norm", x.dtype);
    let [n, channels] = sizes(x);
    let [weight, bias] = affine.map(Arg::InOrNull);
    let args = [
        Arg::In(x),
        Arg::In(mean),
        Arg::In(scale),
        weight,
        bias,
        Arg::InOrNull(fused.plus),
        Arg::Out(out),
        out_or_null(fused.bits),
        Arg::Int(n),
        Arg::Int(channels),
        Arg::Int(usize::from(fused.relu)),
    ];
    // SAFETY: input, output and what is added have n rows of channels in one order, the others one of each channel. Where there are bits
    // packs of 16 bytes make up a row, and have a byte each.
    unsafe { engine.launch("batch_normalise", elements(n * channels), &args) };
}

/// `sums` (2, C) = each channel's sum of grad, and of grad (x - mean). With `mask`, the output of a fused ReLU or its bits, only where
/// that passed it on.
#[track_caller]
pub(crate) fn sums(
    engine: &Engine,
    x: &Tensor,
    mean: &Tensor,
    grad: &Tensor,
    mask: Option<&Tensor>,
    sums: &Tensor,
) {
    let [n, channels] = sizes(x);
    let n_pieces = pieces(n)[1];
    let [grads, products] = sums_of_pieces(engine, x, mean, (grad, None), mask);
    let [a, b] = [n_pieces, channels].map(Arg::Int);
    let args = [Arg::In(&grads), Arg::In(&products), Arg::Out(sums), a, b];
    // SAFETY: there is a part for each piece of a channel, and two sums for each channel.
    unsafe { engine.launch("merge_sums", rows(channels, n_pieces), &args) };
}

/// A gradient that may come in two parts, which are to be added up.
type Graded<'a> = (&'a Tensor, Option<&'a Tensor>);

/// The same piece by piece.
#[track_caller]
fn sums_of_pieces(
    engine: &Engine,
    x: &Tensor,
    mean: &Tensor,
    (grad, more): Graded<'_>,
    mask: Option<&Tensor>,
) -> [Tensor; 2] {
    check_float("batch_norm", x.dtype);
    let [n, channels] = sizes(x);
    let ([grads, products], [output, bits]) = (parts(x), output_and_bits(mask));
    let args = [
        Arg::In(x),
        Arg::In(grad),
        Arg::InOrNull(more),
        output,
        bits,
        Arg::In(mean),
        Arg::Out(&grads),
        Arg::Out(&products),
        Arg::Int(n),
        Arg::Int(channels),
        Arg::Int(pieces(n)[0]),
    ];
    // SAFETY: there are n rows of channels, a mean for each, and a part for each piece of a channel; of bits a byte for each pack.
    unsafe { engine.launch("batch_sums", columns(x.dtype, n, channels), &args) };
    [grads, products]
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

/// `out =` the gradient of the input, and of what was added to it, where that is wanted, too, of a part of a batch: by the sums of [`sums`]
/// and the [`totals`] of all of it.
#[track_caller]
#[expect(clippy::too_many_arguments, reason = "they are what the formula has")]
pub(crate) fn input_gradient_shared(
    engine: &Engine,
    x: &Tensor,
    [mean, scale]: [&Tensor; 2],
    weight: Option<&Tensor>,
    grad: &Tensor,
    mask: Option<&Tensor>,
    [sums, totals]: [&Tensor; 2],
    outputs: (&Tensor, Option<&Tensor>),
) {
    let channels = mean.count();
    let factors = factors_of(x);
    let args = [
        Arg::In(sums),
        Arg::In(totals),
        Arg::In(scale),
        Arg::InOrNull(weight),
        Arg::Out(&factors),
        Arg::Int(channels),
    ];
    // SAFETY: there is a first of the totals, and there are two sums, three factors and one of all else for each channel.
    unsafe { engine.launch("batch_factors", elements(channels), &args) };
    input_gradient_by(engine, x, mean, (grad, None), mask, &factors, outputs);
}

/// Room for what the gradient of the input needs of each channel.
fn factors_of(x: &Tensor) -> Tensor {
    Tensor::stale(x.device(), [3, sizes(x)[1]].into(), DType::F32)
}

#[track_caller]
fn input_gradient_by(
    engine: &Engine,
    x: &Tensor,
    mean: &Tensor,
    (grad, more): Graded<'_>,
    mask: Option<&Tensor>,
    factors: &Tensor,
    (out, plus): (&Tensor, Option<&Tensor>),
) {
    check_float("batch_norm", x.dtype);
    let ([n, channels], [output, bits]) = (sizes(x), output_and_bits(mask));
    let args = [
        Arg::In(x),
        read_where_written(Some(grad), [Some(out), plus]),
        read_where_written(more, [Some(out), plus]),
        output,
        bits,
        Arg::In(mean),
        Arg::In(factors),
        Arg::Out(out),
        out_or_null(plus),
        Arg::Int(n),
        Arg::Int(channels),
    ];
    // SAFETY: input, gradients and mask have n rows of channels in one order, and bits a byte for each pack; of what lies in one place a
    // thread reads before it writes.
    unsafe { engine.launch("batch_input_gradient", elements(n * channels), &args) };
}

/// All gradients of a batch normalisation. `count` is how many values a channel its statistics are of, where they are the batch's own.
#[track_caller]
#[expect(clippy::too_many_arguments, reason = "they are what the formula has")]
pub(crate) fn gradients(
    engine: &Engine,
    x: &Tensor,
    [mean, scale]: [&Tensor; 2],
    weight: Option<&Tensor>,
    grad: &Tensor,
    mask: Option<&Tensor>,
    count: Option<f64>,
    outputs: ((&Tensor, Option<&Tensor>), [&Tensor; 2]),
) {
    gradients_of_sum(engine, x, [mean, scale], weight, (grad, None), mask, count, outputs);
}

/// The same, where the gradient of the output may come in two parts.
#[track_caller]
#[expect(clippy::too_many_arguments, reason = "they are what the formula has")]
pub(crate) fn gradients_of_sum(
    engine: &Engine,
    x: &Tensor,
    [mean, scale]: [&Tensor; 2],
    weight: Option<&Tensor>,
    grad: Graded<'_>,
    mask: Option<&Tensor>,
    count: Option<f64>,
    (outputs, [of_bias, of_weight]): ((&Tensor, Option<&Tensor>), [&Tensor; 2]),
) {
    check_float("batch_norm", x.dtype);
    let ([n, channels], factors) = (sizes(x), factors_of(x));
    let count = Arg::Double(count.unwrap_or(0.0));
    let [mean_in, scale_in] = [mean, scale].map(Arg::In);
    let [of_weight, of_bias, factors_out] = [of_weight, of_bias, &factors].map(Arg::Out);
    let Some(work) = whole(x) else {
        let n_pieces = pieces(n)[1];
        let [grads, products] = sums_of_pieces(engine, x, mean, grad, mask);
        let [a, b] = [n_pieces, channels].map(Arg::Int);
        let (grads, products, weight) = (Arg::In(&grads), Arg::In(&products), Arg::InOrNull(weight));
        let args = [grads, products, scale_in, weight, of_weight, of_bias, factors_out, a, b, count];
        // SAFETY: there is a part for each piece of a channel, three factors and one of all else for each channel.
        unsafe { engine.launch("batch_gradients_found", rows(channels, n_pieces), &args) };
        return input_gradient_by(engine, x, mean, grad, mask, &factors, outputs);
    };
    debug_assert!(mask.is_none_or(|mask| mask.dtype == x.dtype), "batch_norm: bits of what a block holds");
    let (out, plus) = (Arg::Out(outputs.0), out_or_null(outputs.1));
    let written = [Some(outputs.0), outputs.1];
    let (grad, more) = (read_where_written(Some(grad.0), written), read_where_written(grad.1, written));
    let (x, [mask, weight]) = (Arg::In(x), [mask, weight].map(Arg::InOrNull));
    let [a, b] = [n, channels].map(Arg::Int);
    let inputs = [x, grad, more, mask, mean_in, scale_in, weight];
    let args = [&inputs[..], &[out, plus, of_weight, of_bias, factors_out, a, b, count]].concat();
    // SAFETY: input, gradients and mask, which is the output, have n rows of channels in one order, since `room_for_bits` has none for
    // what a block holds; there are three factors and one of all else for each channel. Of what lies in one place the block that has its
    // channel has made its sums, and a thread reads, before it writes.
    unsafe { engine.launch("batch_whole_gradient", work, &args) }
}
