//! Batch normalisation of row-major (N, C, L) tensors: a channel is N rows of L values, C rows apart.

use crate::cpu::reduce::sum_row;
use crate::dtype::Float;
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

/// Each channel's mean and sum of squared distances from it, in two passes.
pub(super) fn moments<T: Float>(x: &Tensor, [means, squares]: [&mut [f64]; 2]) {
    let vx = x.read_contiguous::<T>("batch_norm");
    let (dims, device) = (dims(x), x.device());
    let count = (dims[0] * dims[2]) as f64;
    device.for_chunks2((means, 1), (squares, 1), |c, mean, square| {
        device.arch().run(
            #[inline(always)]
            || {
                mean[0] = rows(&vx, dims, c).map(sum_row).sum::<f64>() / count;
                let mean = T::from_f64(mean[0]);
                square[0] = rows(&vx, dims, c).map(|row| sum_squares(row, mean)).sum::<f64>();
            },
        );
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

/// `out = (x - mean) mul + add`.
pub(super) fn normalise<T: Float>(x: &Tensor, [mean, mul, add]: [&[T]; 3], out: &Tensor) {
    let (vx, mut vo) = (x.read_contiguous::<T>("batch_norm"), out.write_whole::<T>());
    let ([_, channels, len], device) = (dims(x), x.device());
    device.for_chunks(&mut vo, channels * len, |i, image| {
        let x = &vx[i * channels * len..][..channels * len];
        device.arch().run(
            #[inline(always)]
            || {
                for (c, (x, o)) in x.chunks_exact(len).zip(image.chunks_exact_mut(len)).enumerate() {
                    let (mean, mul, add) = (mean[c], mul[c], add[c]);
                    o.iter_mut().zip(x).for_each(|(o, &x)| *o = (x - mean) * mul + add);
                }
            },
        );
    });
}

/// Each channel's sum of grad, and of grad (x - mean).
pub(super) fn sums<T: Float>(x: &Tensor, grad: &Tensor, mean: &[T], [sum_g, sum_gx]: [&mut [f64]; 2]) {
    let (vx, vg) = (x.read_contiguous::<T>("batch_norm"), grad.read_contiguous::<T>("batch_norm"));
    let (dims, device) = (dims(x), x.device());
    device.for_chunks2((sum_g, 1), (sum_gx, 1), |c, sum_g, sum_gx| {
        device.arch().run(
            #[inline(always)]
            || {
                let mean = mean[c];
                sum_g[0] = rows(&vg, dims, c).map(sum_row).sum();
                let pairs = rows(&vg, dims, c).zip(rows(&vx, dims, c));
                sum_gx[0] = pairs.map(|(g, x)| sum_pairs(g, x, |g, x| g * (x - mean))).sum();
            },
        );
    });
}

/// `out = mul (grad - mean_g - (x - mean) slope)`.
pub(super) fn input_gradient<T: Float>(
    x: &Tensor,
    grad: &Tensor,
    [mean, mul, mean_g, slope]: [&[T]; 4],
    out: &Tensor,
) {
    let (vx, vg) = (x.read_contiguous::<T>("batch_norm"), grad.read_contiguous::<T>("batch_norm"));
    let ([_, channels, len], device) = (dims(x), x.device());
    let mut vo = out.write_whole::<T>();
    device.for_chunks(&mut vo, channels * len, |i, image| {
        let at = i * channels * len;
        let (x, g) = (&vx[at..][..channels * len], &vg[at..][..channels * len]);
        device.arch().run(
            #[inline(always)]
            || {
                let rows = x.chunks_exact(len).zip(g.chunks_exact(len)).zip(image.chunks_exact_mut(len));
                for (c, ((x, g), o)) in rows.enumerate() {
                    let (mean, mul, mean_g, slope) = (mean[c], mul[c], mean_g[c], slope[c]);
                    let pairs = x.iter().zip(g);
                    o.iter_mut()
                        .zip(pairs)
                        .for_each(|(o, (&x, &g))| *o = mul * (g - mean_g - (x - mean) * slope));
                }
            },
        );
    });
}
