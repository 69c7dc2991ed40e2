//! Layer normalisation over rows of contiguous tensors. Rows without elements are no rows: nothing is computed of them.

use crate::cpu::reduce::{sum_row, sum_rows};
use crate::cpu::share;
use crate::dtype::{Float, with_float};
use crate::tensor::Tensor;

/// Products that are made before they are summed, and the fewest columns of a thread.
const PRODUCTS: usize = 64;

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
        let (vx, weight, bias) = (&*vx, weight.as_deref(), bias.as_deref());
        let (device, rows) = (out.device(), rows_of_task(out, width));
        let outputs = [(&mut *vo, rows * width), (&mut *vm, rows), (&mut *vs, rows)];
        device.for_chunks3(outputs, |task, [vo, vm, vs]| device.arch().run(#[inline(always)] || {
            let vx = &vx[task * rows * width..][..vo.len()];
            for (i, (x, o)) in vx.chunks_exact(width).zip(vo.chunks_exact_mut(width)).enumerate() {
                let mean = T::from_f64(sum_row(x) / width as f64);
                o.iter_mut().zip(x).for_each(|(o, &x)| *o = (x - mean) * (x - mean));
                let scale = T::from_f64(1.0 / (sum_row(o) / width as f64 + eps).sqrt());
                (vm[i], vs[i]) = (mean, scale);
                o.iter_mut().zip(x).for_each(|(o, &x)| *o = (x - mean) * scale);
                if let Some(w) = weight {
                    o.iter_mut().zip(w).for_each(|(o, &w)| *o *= w);
                }
                if let Some(b) = bias {
                    o.iter_mut().zip(b).for_each(|(o, &b)| *o += b);
                }
            }
        }));
    });
}

/// How many rows a task takes.
fn rows_of_task(out: &Tensor, width: usize) -> usize {
    (share(out.device(), out.count()) / width).max(1)
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
        let (vx, vg, vm, vs, weight) = (&*vx, &*vg, &*vm, &*vs, weight.as_deref());
        let (device, rows) = (out.device(), rows_of_task(out, width));
        device.for_chunks(&mut vo, rows * width, |task, part| device.arch().run(#[inline(always)] || {
            for (i, o) in (task * rows..).zip(part.chunks_exact_mut(width)) {
                let (x, g, mean, scale) = (&vx[i * width..][..width], &vg[i * width..][..width], vm[i], vs[i]);
                match weight {
                    Some(w) => o.iter_mut().zip(g.iter().zip(w)).for_each(|(o, (&g, &w))| *o = g * w),
                    None => o.copy_from_slice(g),
                }
                let mean_h = T::from_f64(sum_row(o)) / n;
                let mean_hu = T::from_f64(sum_of_products(o, x, mean)) * scale / n;
                o.iter_mut().zip(x).for_each(|(o, &x)| *o = scale * (*o - mean_h - (x - mean) * scale * mean_hu));
            }
        }));
    });
}

/// The sum of `h (x - mean)`, in an order that depends on the length alone.
#[inline(always)]
fn sum_of_products<T: Float>(h: &[T], x: &[T], mean: T) -> f64 {
    let mut products = [T::ZERO; PRODUCTS];
    h.chunks(PRODUCTS)
        .zip(x.chunks(PRODUCTS))
        .map(|(h, x)| {
            let products = &mut products[..h.len()];
            products.iter_mut().zip(h.iter().zip(x)).for_each(|(p, (&h, &x))| *p = h * (x - mean));
            sum_row(products)
        })
        .sum()
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
        let (vx, vg, vm, vs) = (&*vx, &*vg, &*vm, &*vs);
        let device = out.device();
        // Threads share out the columns: each is summed as by one of them.
        let columns = width.div_ceil(device.threads()).next_multiple_of(PRODUCTS).min(width);
        device.for_chunks(&mut out.write_whole::<T>(), columns, |i, part| device.arch().run(#[inline(always)] || {
            part.fill(T::ZERO);
            let of_part = i * columns..i * columns + part.len();
            for (i, (x, g)) in vx.chunks_exact(width).zip(vg.chunks_exact(width)).enumerate() {
                let (mean, scale) = (vm[i], vs[i]);
                let pairs = x[of_part.clone()].iter().zip(&g[of_part.clone()]);
                part.iter_mut().zip(pairs).for_each(|(o, (&x, &g))| *o += g * (x - mean) * scale);
            }
        }));
    });
}
