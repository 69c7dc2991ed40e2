//! Group normalisation of row-major (N, C, P) tensors, a sample's groups one after the other. With m and s the mean and 1/std of a group,
//! u = (x - m) s, and channel c is w u + b = (w s) x + (b - w s m): one pass once m and s are known.
//!
//! Backward, a channel of a sample sums g and g u. These sums of all samples are the gradients of w and b; weighted by w, those of a group
//! are what its mean and deviation hand back: with h = g w, a gradient is s (h - mean(h) - u mean(h u)).

use crate::cpu::reduce::sum_row;
use crate::cpu::share;
use crate::dtype::with_float;
use crate::tensor::Tensor;

/// Channels of a group, and pixels of a channel.
pub(crate) type Sizes = [usize; 2];

/// How many groups a task takes.
fn groups_of_task(out: &Tensor, [channels, pixels]: Sizes) -> usize {
    (share(out.device(), out.count()) / (channels * pixels).max(1)).max(1)
}

/// `out =` the normalised `x`; keeps each group's mean and 1/std. None has no elements.
pub(crate) fn forward(
    x: &Tensor,
    [weight, bias]: [&Tensor; 2],
    eps: f64,
    [channels, pixels]: Sizes,
    [out, mean, scale]: [&Tensor; 3],
) {
    let _timer = x.device().time("group norm");
    with_float!(x.dtype, "group_norm", T => {
        let (vx, w, b) = (x.read_contiguous::<T>(""), weight.read_contiguous::<T>(""), bias.read_contiguous::<T>(""));
        let (mut vo, mut vm, mut vs) = (out.write_whole::<T>(), mean.write_whole::<T>(), scale.write_whole::<T>());
        let (vx, w, b, size) = (&*vx, &*w, &*b, channels * pixels);
        let (device, groups) = (out.device(), groups_of_task(out, [channels, pixels]));
        let outputs = [(&mut *vo, groups * size), (&mut *vm, groups), (&mut *vs, groups)];
        device.for_chunks3(outputs, |task, [vo, vm, vs]| device.arch().run(#[inline(always)] || {
            for (i, out) in vo.chunks_exact_mut(size).enumerate() {
                let group = task * groups + i;
                let x = &vx[group * size..][..size];
                let mean = T::from_f64(sum_row(x) / size as f64);
                for (o, &x) in out.iter_mut().zip(x) {
                    *o = (x - mean) * (x - mean);
                }
                let scale = T::from_f64(1.0 / (sum_row(out) / size as f64 + eps).sqrt());
                (vm[i], vs[i]) = (mean, scale);
                let first = group * channels % w.len();
                let own = w[first..first + channels].iter().zip(&b[first..first + channels]);
                for ((o, x), (&w, &b)) in out.chunks_exact_mut(pixels).zip(x.chunks_exact(pixels)).zip(own) {
                    let factor = w * scale;
                    for (o, &x) in o.iter_mut().zip(x) {
                        *o = (x - mean).mul_add(factor, b);
                    }
                }
            }
        }));
    });
}

/// `out =` the gradient with respect to `x`, if it is wanted; `sums`, (N, C, 2), gets those of each channel of a sample with respect to bias
/// and weight.
pub(crate) fn gradient(
    [x, mean, scale]: [&Tensor; 3],
    weight: &Tensor,
    grad: &Tensor,
    [channels, pixels]: Sizes,
    [out, sums]: [&Tensor; 2],
) {
    let _timer = x.device().time("group norm, gradient");
    with_float!(x.dtype, "group_norm", T => {
        let (vx, vm, vs) = (x.read_contiguous::<T>(""), mean.read_contiguous::<T>(""), scale.read_contiguous::<T>(""));
        let (w, vg) = (weight.read_contiguous::<T>(""), grad.read_contiguous::<T>(""));
        let (mut vo, mut sums) = (out.write_whole::<T>(), sums.write_whole::<T>());
        let (vx, vm, vs, w, vg, size) = (&*vx, &*vm, &*vs, &*w, &*vg, channels * pixels);
        let (device, groups) = (out.device(), groups_of_task(out, [channels, pixels]));
        let outputs = ((&mut *vo, groups * size), (&mut *sums, groups * channels * 2));
        device.for_chunks2(outputs.0, outputs.1, |task, vo, sums| device.arch().run(#[inline(always)] || {
            for (i, (out, sums)) in vo.chunks_exact_mut(size).zip(sums.chunks_exact_mut(channels * 2)).enumerate() {
                let group = task * groups + i;
                let (x, grad) = (&vx[group * size..][..size], &vg[group * size..][..size]);
                let (mean, scale, first) = (vm[group], vs[group], group * channels % w.len());
                let w = &w[first..first + channels];
                let (mut of_mean, mut of_scale) = (0.0, 0.0);
                let lines = || x.chunks_exact(pixels).zip(grad.chunks_exact(pixels));
                for (((x, grad), o), (sums, &w)) in
                    lines().zip(out.chunks_exact_mut(pixels)).zip(sums.chunks_exact_mut(2).zip(w))
                {
                    for (o, (&x, &g)) in o.iter_mut().zip(x.iter().zip(grad)) {
                        *o = g * ((x - mean) * scale);
                    }
                    let [of_bias, of_weight] = [sum_row(grad), sum_row(o)];
                    sums.copy_from_slice(&[of_bias, of_weight].map(T::from_f64));
                    (of_mean, of_scale) = (of_mean + of_bias * w.to_f64(), of_scale + of_weight * w.to_f64());
                }
                let [of_mean, of_scale] = [of_mean, of_scale].map(|sum| T::from_f64(sum / size as f64));
                for (((x, grad), o), &w) in lines().zip(out.chunks_exact_mut(pixels)).zip(w) {
                    for (o, (&x, &g)) in o.iter_mut().zip(x.iter().zip(grad)) {
                        *o = scale * (g * w - of_mean - (x - mean) * scale * of_scale);
                    }
                }
            }
        }));
    });
}
