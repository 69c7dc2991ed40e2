//! Layer normalisation over rows of contiguous tensors. Rows without elements are no rows: nothing is computed of them.

use crate::cpu::reduce::{sum_row, sum_rows};
use crate::dtype::with_float;
use crate::tensor::Tensor;

/// Normalises each row of `width` to mean 0 and variance 1, then scales by `weight` and shifts by `bias` where given; keeps
/// each row's mean and 1/std.
pub(crate) fn layer_norm(
    x: &Tensor,
    weight: Option<&Tensor>,
    bias: Option<&Tensor>,
    eps: f64,
    width: usize,
    [out, mean, scale]: [&Tensor; 3],
) {
    let _timer = x.device().time("layer norm");
    if width == 0 {
        return;
    }
    with_float!(x.dtype, "layer_norm", T => {
        let vx = x.read_contiguous::<T>("layer_norm");
        let weight = weight.map(|w| w.read_contiguous::<T>("layer_norm"));
        let bias = bias.map(|b| b.read_contiguous::<T>("layer_norm"));
        let (mut vo, mut vm, mut vs) = (out.write_whole::<T>(), mean.write_whole::<T>(), scale.write_whole::<T>());
        out.device().arch().dispatch(|| {
            for (i, (x, o)) in vx.chunks_exact(width).zip(vo.chunks_exact_mut(width)).enumerate() {
                let mean = T::from_f64(sum_row(x) / width as f64);
                o.iter_mut().zip(x).for_each(|(o, &x)| *o = (x - mean) * (x - mean));
                let scale = T::from_f64(1.0 / (sum_row(o) / width as f64 + eps).sqrt());
                (vm[i], vs[i]) = (mean, scale);
                o.iter_mut().zip(x).for_each(|(o, &x)| *o = (x - mean) * scale);
                if let Some(w) = &weight {
                    o.iter_mut().zip(w.iter()).for_each(|(o, &w)| *o *= w);
                }
                if let Some(b) = &bias {
                    o.iter_mut().zip(b.iter()).for_each(|(o, &b)| *o += b);
                }
            }
        });
    });
}

/// `out =` the gradient with respect to the input. With u = (x - mean) scale and h = grad weight, a row's gradient is
/// scale (h - mean(h) - u mean(h u)).
pub(crate) fn layer_norm_gradient(
    [x, mean, scale]: [&Tensor; 3],
    weight: Option<&Tensor>,
    grad: &Tensor,
    width: usize,
    out: &Tensor,
) {
    let _timer = x.device().time("layer norm, gradient");
    if width == 0 {
        return;
    }
    with_float!(x.dtype, "layer_norm", T => {
        let (vx, vg) = (x.read_contiguous::<T>("layer_norm"), grad.read_contiguous::<T>("layer_norm"));
        let (vm, vs) = (mean.read_contiguous::<T>("layer_norm"), scale.read_contiguous::<T>("layer_norm"));
        let weight = weight.map(|w| w.read_contiguous::<T>("layer_norm"));
        let mut vo = out.write_whole::<T>();
        let n = T::from_f64(width as f64);
        for (i, o) in vo.chunks_exact_mut(width).enumerate() {
            let (x, g, mean, scale) = (&vx[i * width..][..width], &vg[i * width..][..width], vm[i], vs[i]);
            match &weight {
                Some(w) => o.iter_mut().zip(g.iter().zip(w.iter())).for_each(|(o, (&g, &w))| *o = g * w),
                None => o.copy_from_slice(g),
            }
            let mean_h = T::from_f64(sum_row(o)) / n;
            let mean_hu = o.iter().zip(x).fold(T::ZERO, |s, (&h, &x)| s + h * (x - mean) * scale) / n;
            o.iter_mut().zip(x).for_each(|(o, &x)| *o = scale * (*o - mean_h - (x - mean) * scale * mean_hu));
        }
    });
}

/// The gradients of weight and bias, where they are wanted.
pub(crate) fn layer_norm_parameter_gradients(
    stats: [&Tensor; 3],
    grad: &Tensor,
    weight: Option<&Tensor>,
    bias: Option<&Tensor>,
) {
    if let Some(out) = weight {
        weight_gradient(stats, grad, out.count(), out);
    }
    if let Some(out) = bias {
        sum_rows(grad, out);
    }
}

/// `out = sum over rows of grad (x - mean) scale`: the gradient of the weight.
fn weight_gradient([x, mean, scale]: [&Tensor; 3], grad: &Tensor, width: usize, out: &Tensor) {
    let _timer = x.device().time("layer norm, gradient");
    if width == 0 {
        return;
    }
    with_float!(x.dtype, "layer_norm", T => {
        let (vx, vg) = (x.read_contiguous::<T>("layer_norm"), grad.read_contiguous::<T>("layer_norm"));
        let (vm, vs) = (mean.read_contiguous::<T>("layer_norm"), scale.read_contiguous::<T>("layer_norm"));
        let mut vo = out.write_whole::<T>();
        vo.fill(T::ZERO);
        for (i, (x, g)) in vx.chunks_exact(width).zip(vg.chunks_exact(width)).enumerate() {
            let (mean, scale) = (vm[i], vs[i]);
            vo.iter_mut().zip(x.iter().zip(g)).for_each(|(o, (&x, &g))| *o += g * (x - mean) * scale);
        }
    });
}
