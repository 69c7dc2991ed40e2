//! Batch normalisation, forward and backward, over tensors that are dense in either order: images in pixel order are [`rows`]
//! of channels, row-major ones are [`planes`] of pixels. Statistics and sums over a batch are in double precision.

mod planes;
mod rows;

use crate::cpu::{copy, elementwise};
use crate::dtype::{DType, Float, with_float};
use crate::op::Unary;
use crate::shape::Order;
use crate::tensor::Tensor;

/// Whether `x` is rows of channels, which can take in what follows the normalisation.
pub(crate) fn is_rows(x: &Tensor) -> bool {
    let dims = x.dims();
    dims[2..].iter().all(|&size| size == 1) || x.geometry.lies_in(Order::Pixels)
}

/// Both rows of a (2, C) tensor of doubles.
macro_rules! halves {
    ($tensor:expr => $guard:ident, $halves:ident) => {
        let mut $guard = $tensor.write_whole::<f64>();
        let middle = $guard.len() / 2;
        let $halves: [&mut [f64]; 2] = $guard.split_at_mut(middle).into();
    };
}

/// `moments` (2, C) = each channel's mean, and its sum of squared distances from the mean.
fn moments(x: &Tensor, moments: &Tensor) {
    let _timer = x.device().time("batch norm, statistics");
    halves!(moments => guard, halves);
    with_float!(x.dtype, "batch_norm", T => {
        if is_rows(x) {
            rows::moments(x.device(), &x.read_dense::<T>(), x.dims()[1], halves);
        } else {
            planes::moments::<T>(x, halves);
        }
    });
}

/// How many values a channel has.
fn values_a_channel(x: &Tensor) -> f64 {
    let dims = x.dims();
    (dims[0] * dims[2..].iter().product::<usize>()) as f64
}

/// `totals` (1 + 2 C) = how many values a channel has, and each channel's sums of these and of their squares.
pub(crate) fn totals(x: &Tensor, totals: &Tensor) {
    let (channels, count) = (x.dims()[1], values_a_channel(x));
    let found = Tensor::stale(x.device(), [2, channels].into(), DType::F64);
    moments(x, &found);
    let found = found.read_contiguous::<f64>("batch_norm");
    let (means, squares) = found.split_at(channels);
    let mut totals = totals.write_whole::<f64>();
    totals[0] = count;
    let (sums, sums_of_squares) = totals[1..].split_at_mut(channels);
    if count == 0.0 {
        // Nothing has no mean.
        sums.fill(0.0);
        sums_of_squares.fill(0.0);
        return;
    }
    sums.iter_mut().zip(means).for_each(|(sum, mean)| *sum = mean * count);
    for ((sum, mean), square) in sums_of_squares.iter_mut().zip(means).zip(squares) {
        *sum = square + mean * mean * count;
    }
}

/// The moments that totals tell of, and of how many values.
fn moments_of(totals: &Tensor) -> (Tensor, f64) {
    let channels = (totals.count() - 1) / 2;
    let moments = Tensor::stale(totals.device(), [2, channels].into(), DType::F64);
    let totals = totals.read_contiguous::<f64>("batch_norm");
    let (count, (sums, sums_of_squares)) = (totals[0], totals[1..].split_at(channels));
    {
        halves!(moments => guard, halves);
        let [means, squares] = halves;
        means.iter_mut().zip(sums).for_each(|(mean, sum)| *mean = sum / count);
        for ((square, mean), (sum, all)) in
            squares.iter_mut().zip(means).zip(sums.iter().zip(sums_of_squares))
        {
            *square = (all - sum * *mean).max(0.0);
        }
    }
    (moments, count)
}

/// Each channel's mean and variance, from the moments of `count` values.
fn statistics(moments: &Tensor, count: f64, [mean, variance]: [&Tensor; 2]) {
    let moments = moments.read_contiguous::<f64>("batch_norm");
    let (means, squares) = moments.split_at(mean.count());
    with_float!(mean.dtype, "batch_norm", T => {
        mean.write_whole::<T>().iter_mut().zip(means).for_each(|(to, &mean)| *to = T::from_f64(mean));
        variance.write_whole::<T>().iter_mut().zip(squares).for_each(|(to, &square)| *to = T::from_f64(square / count));
    });
}

/// Moves running statistics by a share of the way to those of a batch of `count` values, the variance to that of what the batch is a
/// sample of.
fn follow(
    mean: &Tensor,
    variance: &Tensor,
    count: f64,
    ([running_mean, running_variance], share): ([&Tensor; 2], f64),
) {
    let unbiased = share * (count / (count - 1.0));
    for (running, found, share_of) in [(running_mean, mean, share), (running_variance, variance, unbiased)] {
        with_float!(found.dtype, "batch_norm", T => {
            let (kept, share_of) = (T::from_f64(1.0 - share), T::from_f64(share_of));
            let found = found.read_contiguous::<T>("batch_norm");
            running.write_whole::<T>().iter_mut().zip(found.iter()).for_each(|(r, &f)| *r = *r * kept + f * share_of);
        });
    }
}

/// All of a batch normalisation in training: statistics of the batch and 1/std, running statistics, and what comes out.
pub(crate) fn train(
    x: &Tensor,
    affine: [Option<&Tensor>; 2],
    eps: f64,
    fused: Fused<'_>,
    running: Option<([&Tensor; 2], f64)>,
    [out, mean, variance, scale]: [&Tensor; 4],
) {
    let found = Tensor::stale(x.device(), [2, mean.count()].into(), DType::F64);
    moments(x, &found);
    train_by((&found, values_a_channel(x)), x, affine, eps, fused, running, [out, mean, variance, scale]);
}

/// The same by the statistics of a larger batch, which these are the totals of.
pub(crate) fn train_shared(
    x: &Tensor,
    totals: &Tensor,
    affine: [Option<&Tensor>; 2],
    eps: f64,
    fused: Fused<'_>,
    running: Option<([&Tensor; 2], f64)>,
    outputs: [&Tensor; 4],
) {
    let (found, count) = moments_of(totals);
    train_by((&found, count), x, affine, eps, fused, running, outputs);
}

fn train_by(
    (moments, count): (&Tensor, f64),
    x: &Tensor,
    affine: [Option<&Tensor>; 2],
    eps: f64,
    fused: Fused<'_>,
    running: Option<([&Tensor; 2], f64)>,
    [out, mean, variance, scale]: [&Tensor; 4],
) {
    statistics(moments, count, [mean, variance]);
    // A batch that others have parts of, who are gone, has shown nothing.
    if let Some(running) = running.filter(|_| !count.is_nan()) {
        follow(mean, variance, count, running);
    }
    normalise(x, [mean, variance], affine, eps, fused, [out, scale]);
}

/// What follows a normalisation in the same pass; for rows only.
#[derive(Clone, Copy, Default)]
pub(crate) struct Fused<'a> {
    /// Added to the result, before anything is cut off; lies as the result does.
    pub(crate) plus: Option<&'a Tensor>,
    /// Whether what is below zero becomes zero.
    pub(crate) relu: bool,
    /// On a GPU, where what that passes on is written, beside the result.
    pub(crate) bits: Option<&'a Tensor>,
}

/// `out = (x - mean) scale weight + bias` with `scale = 1 / sqrt(variance + eps)`, which is kept.
pub(crate) fn normalise(
    x: &Tensor,
    [mean, variance]: [&Tensor; 2],
    [weight, bias]: [Option<&Tensor>; 2],
    eps: f64,
    fused: Fused<'_>,
    [out, scale]: [&Tensor; 2],
) {
    let _timer = x.device().time("batch norm");
    let channels = mean.count();
    let factors = Tensor::stale(x.device(), [2, channels].into(), x.dtype);
    with_float!(x.dtype, "batch_norm", T => {
        let (vm, vv) = (mean.read_contiguous::<T>("batch_norm"), variance.read_contiguous::<T>("batch_norm"));
        let mut vs = scale.write_whole::<T>();
        for (s, v) in vs.iter_mut().zip(vv.iter()) {
            *s = T::from_f64(1.0 / (v.to_f64() + eps).sqrt());
        }
        let mut factors = factors.write_whole::<T>();
        let (mul, add) = factors.split_at_mut(channels);
        times(&vs, weight, mul);
        match bias {
            Some(bias) => add.copy_from_slice(&bias.read_contiguous::<T>("batch_norm")),
            None => add.fill(T::ZERO),
        }
        let factors = [&*vm, &*mul, &*add];
        if is_rows(x) {
            let plus = fused.plus.map(Tensor::read_dense::<T>);
            let mut vo = out.write_whole::<T>();
            rows::normalise(x.device(), &x.read_dense::<T>(), factors, plus.as_deref(), fused.relu, &mut vo);
        } else {
            planes::normalise::<T>(x, factors, out);
        }
    });
}

/// `mul = scale weight`.
fn times<T: Float>(scale: &[T], weight: Option<&Tensor>, mul: &mut [T]) {
    mul.copy_from_slice(scale);
    if let Some(weight) = weight {
        let weight = weight.read_contiguous::<T>("batch_norm");
        mul.iter_mut().zip(weight.iter()).for_each(|(mul, &weight)| *mul *= weight);
    }
}

/// `sums` (2, C) = each channel's sum of grad, and of grad (x - mean). With `mask`, the output of a fused ReLU, only where that
/// passed it on.
pub(crate) fn sums(x: &Tensor, mean: &Tensor, grad: &Tensor, mask: Option<&Tensor>, sums: &Tensor) {
    let _timer = x.device().time("batch norm, sums of gradients");
    halves!(sums => guard, halves);
    with_float!(x.dtype, "batch_norm", T => {
        let mean = mean.read_contiguous::<T>("batch_norm");
        if is_rows(x) {
            let mask = mask.map(Tensor::read_dense::<T>);
            let values = [&*x.read_dense::<T>(), &*grad.read_dense::<T>()];
            rows::sums(x.device(), values, mask.as_deref(), &mean, halves);
        } else {
            planes::sums::<T>(x, grad, &mean, halves);
        }
    });
}

/// The gradients of the bias and of the weight, from the sums of [`sums`].
pub(crate) fn channel_gradients(sums: &Tensor, scale: &Tensor, [bias, weight]: [&Tensor; 2]) {
    halves!(sums => guard, halves);
    with_float!(scale.dtype, "batch_norm", T => {
        let scale = scale.read_contiguous::<T>("batch_norm");
        let [sum_g, sum_gx] = halves;
        bias.write_whole::<T>().iter_mut().zip(sum_g).for_each(|(b, &mut g)| *b = T::from_f64(g));
        let pairs = sum_gx.iter().zip(scale.iter());
        weight.write_whole::<T>().iter_mut().zip(pairs).for_each(|(w, (&gx, s))| *w = T::from_f64(gx * s.to_f64()));
    });
}

/// `out =` the gradient of the input. With u = (x - mean) scale it is weight scale (grad - mean(grad) - u mean(grad u)) where
/// mean and scale are those of a batch of `count` values a channel, over which [`sums`] were taken; else weight scale grad. `plus` is that
/// of what was added to it, where that is wanted, too.
fn input_gradient(
    x: &Tensor,
    [mean, scale]: [&Tensor; 2],
    weight: Option<&Tensor>,
    grad: &Tensor,
    mask: Option<&Tensor>,
    batch: Option<(&Tensor, f64)>,
    (out, plus): (&Tensor, Option<&Tensor>),
) {
    if let Some(plus) = plus {
        match mask {
            Some(mask) => elementwise::unary_gradient(Unary::Relu, mask, grad, plus),
            None => copy::copy(grad, plus),
        }
    }
    let _timer = x.device().time("batch norm, gradient of input");
    let channels = mean.count();
    let factors = Tensor::stale(x.device(), [3, channels].into(), x.dtype);
    with_float!(x.dtype, "batch_norm", T => {
        let (mean, scale) = (mean.read_contiguous::<T>("batch_norm"), scale.read_contiguous::<T>("batch_norm"));
        let mut factors = factors.write_whole::<T>();
        let (mul, rest) = factors.split_at_mut(channels);
        let (mean_g, slope) = rest.split_at_mut(channels);
        times(&scale, weight, mul);
        match batch {
            None => rest.fill(T::ZERO),
            Some((sums, count)) => {
                halves!(sums => guard, halves);
                let [sum_g, sum_gx] = halves;
                mean_g.iter_mut().zip(sum_g).for_each(|(mean, &mut sum)| *mean = T::from_f64(sum / count));
                for ((slope, &mut sum), scale) in slope.iter_mut().zip(sum_gx).zip(scale.iter()) {
                    *slope = T::from_f64(sum / count * scale.to_f64() * scale.to_f64());
                }
            }
        }
        let (mean_g, slope) = rest.split_at(channels);
        let factors = [&*mean, &*mul, mean_g, slope];
        if is_rows(x) {
            let mask = mask.map(Tensor::read_dense::<T>);
            let values = [&*x.read_dense::<T>(), &*grad.read_dense::<T>()];
            rows::input_gradient(x.device(), values, mask.as_deref(), factors, &mut out.write_whole::<T>());
        } else {
            planes::input_gradient::<T>(x, grad, factors, out);
        }
    });
}

/// The same of a part of a batch, by the sums and the totals of all of it.
pub(crate) fn input_gradient_shared(
    x: &Tensor,
    stats: [&Tensor; 2],
    weight: Option<&Tensor>,
    grad: &Tensor,
    mask: Option<&Tensor>,
    [sums, totals]: [&Tensor; 2],
    outputs: (&Tensor, Option<&Tensor>),
) {
    let count = totals.read_contiguous::<f64>("batch_norm")[0];
    input_gradient(x, stats, weight, grad, mask, Some((sums, count)), outputs);
}

/// All gradients of a batch normalisation. `count` is how many values a channel its statistics are of, where they are the batch's own.
pub(crate) fn gradients(
    x: &Tensor,
    [mean, scale]: [&Tensor; 2],
    weight: Option<&Tensor>,
    grad: &Tensor,
    mask: Option<&Tensor>,
    count: Option<f64>,
    (outputs, of_parameters): ((&Tensor, Option<&Tensor>), [&Tensor; 2]),
) {
    let found = Tensor::stale(x.device(), [2, mean.count()].into(), DType::F64);
    sums(x, mean, grad, mask, &found);
    channel_gradients(&found, scale, of_parameters);
    input_gradient(x, [mean, scale], weight, grad, mask, count.map(|count| (&found, count)), outputs);
}
