//! Batch normalisation of contiguous (N, C, L) tensors: a channel is N rows of L values, C rows apart.

use crate::cpu::reduce::sum_row;
use crate::dtype::{Float, with_float};
use crate::tensor::Tensor;

/// (N, C, L).
fn dims(x: &Tensor) -> [usize; 3] {
    let dims = x.dims();
    [dims[0], dims[1], dims[2..].iter().product()]
}

/// The rows of channel `c`.
#[inline(always)]
fn rows<T>(values: &[T], [n, channels, len]: [usize; 3], c: usize) -> impl Iterator<Item = &[T]> {
    (0..n).map(move |i| &values[(i * channels + c) * len..][..len])
}

/// Each channel's mean and variance, in two passes.
pub(crate) fn stats(x: &Tensor, [mean, variance]: [&Tensor; 2]) {
    with_float!(x.dtype, "batch_norm", T => {
        let vx = x.read_contiguous::<T>("batch_norm");
        let (mut vm, mut vv) = (mean.write_whole::<T>(), variance.write_whole::<T>());
        let (dims, device) = (dims(x), x.device());
        let count = (dims[0] * dims[2]) as f64;
        device.for_chunks2((&mut vm[..], 1), (&mut vv[..], 1), |c, mean, variance| {
            device.arch().dispatch(|| {
                mean[0] = T::from_f64(rows(&vx, dims, c).map(sum_row).sum::<f64>() / count);
                variance[0] = T::from_f64(rows(&vx, dims, c).map(|row| sum_squares(row, mean[0])).sum::<f64>() / count);
            });
        });
    });
}

/// Values that are summed in a row before a sum goes on in double precision.
const BLOCK: usize = 1024;
/// Sums that run side by side.
const LANES: usize = 32;

/// The sum of (x - mean)^2.
#[inline(always)]
fn sum_squares<T: Float>(row: &[T], mean: T) -> f64 {
    sum_pairs(row, row, |x, _| (x - mean) * (x - mean))
}

/// The sum of f over pairs of elements, in an order that depends on the length alone.
#[inline(always)]
fn sum_pairs<T: Float>(a: &[T], b: &[T], f: impl Fn(T, T) -> T) -> f64 {
    let mut total = 0.0;
    for (a, b) in a.chunks(BLOCK).zip(b.chunks(BLOCK)) {
        let mut lanes = [T::ZERO; LANES];
        let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
        for (a, b) in a.iter().zip(b) {
            for (lane, (&a, &b)) in lanes.iter_mut().zip(a.iter().zip(b)) {
                *lane += f(a, b);
            }
        }
        for (lane, (&a, &b)) in lanes.iter_mut().zip(a_rest.iter().zip(b_rest)) {
            *lane += f(a, b);
        }
        total += sum_row(&lanes);
    }
    total
}

/// `out = (x - mean) scale weight + bias` with `scale = 1 / sqrt(variance + eps)`, which is kept.
pub(crate) fn normalise(
    [x, mean, variance]: [&Tensor; 3],
    [weight, bias]: [Option<&Tensor>; 2],
    eps: f64,
    [out, scale]: [&Tensor; 2],
) {
    with_float!(x.dtype, "batch_norm", T => {
        let vx = x.read_contiguous::<T>("batch_norm");
        let (vm, vv) = (mean.read_contiguous::<T>("batch_norm"), variance.read_contiguous::<T>("batch_norm"));
        let weight = weight.map(|w| w.read_contiguous::<T>("batch_norm"));
        let bias = bias.map(|b| b.read_contiguous::<T>("batch_norm"));
        let (mut vo, mut vs) = (out.write_whole::<T>(), scale.write_whole::<T>());
        for (s, v) in vs.iter_mut().zip(vv.iter()) {
            *s = T::from_f64(1.0 / (v.to_f64() + eps).sqrt());
        }
        let ([_, channels, len], device) = (dims(x), x.device());
        device.for_chunks(&mut vo, channels * len, |i, image| {
            let x = &vx[i * channels * len..][..channels * len];
            device.arch().dispatch(|| {
                for (c, (x, o)) in x.chunks_exact(len).zip(image.chunks_exact_mut(len)).enumerate() {
                    let mul = weight.as_ref().map_or(vs[c], |w| vs[c] * w[c]);
                    let (mean, add) = (vm[c], bias.as_ref().map_or(T::ZERO, |b| b[c]));
                    o.iter_mut().zip(x).for_each(|(o, &x)| *o = (x - mean) * mul + add);
                }
            });
        });
    });
}

/// Each channel's sum of grad, and of grad (x - mean) scale: the gradients of the bias and of the weight.
pub(crate) fn channel_gradients([x, mean, scale]: [&Tensor; 3], grad: &Tensor, [bias, weight]: [&Tensor; 2]) {
    with_float!(x.dtype, "batch_norm", T => {
        let (vx, vg) = (x.read_contiguous::<T>("batch_norm"), grad.read_contiguous::<T>("batch_norm"));
        let (vm, vs) = (mean.read_contiguous::<T>("batch_norm"), scale.read_contiguous::<T>("batch_norm"));
        let (mut vb, mut vw) = (bias.write_whole::<T>(), weight.write_whole::<T>());
        let (dims, device) = (dims(x), x.device());
        device.for_chunks2((&mut vb[..], 1), (&mut vw[..], 1), |c, bias, weight| {
            device.arch().dispatch(|| {
                let (mean, scale) = (vm[c], vs[c]);
                bias[0] = T::from_f64(rows(&vg, dims, c).map(sum_row).sum());
                let products = rows(&vg, dims, c).zip(rows(&vx, dims, c));
                let total: f64 = products.map(|(g, x)| sum_pairs(g, x, |g, x| g * (x - mean))).sum();
                weight[0] = T::from_f64(total * scale.to_f64());
            });
        });
    });
}

/// `out =` the gradient of the input. With u = (x - mean) scale it is weight scale (grad - mean(grad) - u mean(grad u)) where
/// mean and scale are the batch's own, whose sums over the batch are in `sums`; else weight scale grad.
pub(crate) fn input_gradient(
    [x, mean, scale]: [&Tensor; 3],
    weight: Option<&Tensor>,
    grad: &Tensor,
    sums: Option<[&Tensor; 2]>,
    out: &Tensor,
) {
    with_float!(x.dtype, "batch_norm", T => {
        let (vx, vg) = (x.read_contiguous::<T>("batch_norm"), grad.read_contiguous::<T>("batch_norm"));
        let (vm, vs) = (mean.read_contiguous::<T>("batch_norm"), scale.read_contiguous::<T>("batch_norm"));
        let weight = weight.map(|w| w.read_contiguous::<T>("batch_norm"));
        let sums = sums.map(|sums| sums.map(|sum| sum.read_contiguous::<T>("batch_norm")));
        let ([n, channels, len], device) = (dims(x), x.device());
        let count = T::from_f64((n * len) as f64);
        let mut vo = out.write_whole::<T>();
        device.for_chunks(&mut vo, channels * len, |i, image| {
            let at = i * channels * len;
            let (x, g) = (&vx[at..][..channels * len], &vg[at..][..channels * len]);
            device.arch().dispatch(|| {
                let rows = x.chunks_exact(len).zip(g.chunks_exact(len)).zip(image.chunks_exact_mut(len));
                for (c, ((x, g), o)) in rows.enumerate() {
                    let (mean, scale) = (vm[c], vs[c]);
                    let mul = weight.as_ref().map_or(scale, |w| scale * w[c]);
                    match &sums {
                        Some([sum_g, sum_gu]) => {
                            let (mean_g, slope) = (sum_g[c] / count, sum_gu[c] / count * scale);
                            let pairs = x.iter().zip(g);
                            o.iter_mut().zip(pairs).for_each(|(o, (&x, &g))| *o = mul * (g - mean_g - (x - mean) * slope));
                        }
                        None => o.iter_mut().zip(g).for_each(|(o, &g)| *o = mul * g),
                    }
                }
            });
        });
    });
}
