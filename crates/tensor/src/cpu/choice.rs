//! Comparisons, and elements that are chosen by a mask or by their places.

use crate::cpu::share;
use crate::device::Device;
use crate::dtype::{Element, with_element, with_float};
use crate::op::Relation;
use crate::ops::choice::around;
use crate::shape::{Geometry, Shape, for_each_row};
use crate::tensor::Tensor;

/// `mask`, row-major f32 = 1 where the relation holds between elements of `a` and `b`, which spread to its shape, else 0.
pub(crate) fn compare(relation: Relation, a: &Tensor, b: &Tensor, mask: &Tensor) {
    let _timer = mask.device().time("comparisons");
    with_element!(a.dtype, T => match relation {
        Relation::Less => marked::<T>(a, b, mask, |x, y| x < y),
        Relation::AtMost => marked::<T>(a, b, mask, |x, y| x <= y),
        Relation::Equal => marked::<T>(a, b, mask, |x, y| x == y),
    });
}

fn marked<T: Element>(a: &Tensor, b: &Tensor, mask: &Tensor, holds: impl Fn(T, T) -> bool + Copy + Sync) {
    let (va, vb) = (a.read::<T>(), b.read::<T>());
    let (va, vb) = (&*va, &*vb);
    let mark = |x: T, y: T| if holds(x, y) { 1.0 } else { 0.0 };
    fill_rows(mask, [a, b], |row: &mut [f32], [x, y], [dx, dy]| match [dx, dy] {
        [1, 1] => row.iter_mut().zip(va[x..].iter().zip(&vb[y..])).for_each(|(o, (&x, &y))| *o = mark(x, y)),
        [1, 0] => row.iter_mut().zip(&va[x..]).for_each(|(o, &x)| *o = mark(x, vb[y])),
        _ => row.iter_mut().enumerate().for_each(|(i, o)| *o = mark(va[x + i * dx], vb[y + i * dy])),
    });
}

/// `out`, row-major = `yes` where `mask` isn't 0, else `no`; all three spread to its shape.
pub(crate) fn choose(mask: &Tensor, yes: &Tensor, no: &Tensor, out: &Tensor) {
    let _timer = out.device().time("choices");
    with_element!(out.dtype, T => {
        let (vm, vy, vn) = (mask.read::<f32>(), yes.read::<T>(), no.read::<T>());
        let (vm, vy, vn) = (&*vm, &*vy, &*vn);
        let pick = |m: f32, y: T, n: T| if m == 0.0 { n } else { y };
        fill_rows(out, [mask, yes, no], |row: &mut [T], [m, y, n], steps| {
            let len = row.len();
            let (of_row, ones) = (row.iter_mut().enumerate(), |from: usize| from..from + len);
            match steps {
                [1, 1, 1] => {
                    let (m, y, n) = (&vm[ones(m)], &vy[ones(y)], &vn[ones(n)]);
                    of_row.for_each(|(i, o)| *o = pick(m[i], y[i], n[i]));
                }
                [1, 0, 1] => {
                    let (m, y, n) = (&vm[ones(m)], vy[y], &vn[ones(n)]);
                    of_row.for_each(|(i, o)| *o = pick(m[i], y, n[i]));
                }
                [1, 1, 0] => {
                    let (m, y, n) = (&vm[ones(m)], &vy[ones(y)], vn[n]);
                    of_row.for_each(|(i, o)| *o = pick(m[i], y[i], n));
                }
                [dm, dy, dn] => {
                    of_row.for_each(|(i, o)| *o = pick(vm[m + i * dm], vy[y + i * dy], vn[n + i * dn]));
                }
            }
        });
    });
}

/// Has `fill` fill each row of the row-major `out`, given where the row's elements begin in each of the tensors, which spread to its shape,
/// and the steps between them. Threads share out the first dimension.
fn fill_rows<T: Element, const V: usize>(
    out: &Tensor,
    tensors: [&Tensor; V],
    fill: impl Fn(&mut [T], [usize; V], [usize; V]) + Sync,
) {
    let shape = if out.shape().n_dims() == 0 { [1].into() } else { *out.shape() };
    let views = tensors.map(|tensor| tensor.geometry.broadcast_to(shape));
    let device = out.device();
    let rest = shape.count() / shape.dims()[0].max(1);
    let rows = share(device, shape.count()).div_ceil(rest.max(1));
    let mut all = out.write_whole::<T>();
    device.for_chunks(&mut all, (rows * rest).max(1), |chunk, out| {
        let part = |view: &Geometry| view.narrow(0, chunk * rows, out.len() / rest);
        let parts = views.each_ref().map(part);
        let mut left = &mut *out;
        device.arch().run(
            #[inline(always)]
            || {
                for_each_row(parts.each_ref(), |from, steps, n| {
                    let (row, others) = std::mem::take(&mut left).split_at_mut(n);
                    fill(row, from, steps);
                    left = others;
                });
            },
        );
    });
}

/// `out` = the elements of `x` along `dim` that `index` says; all contiguous. Panics if there is no such place.
#[track_caller]
pub(crate) fn gather(x: &Tensor, index: &Tensor, dim: usize, out: &Tensor) {
    let _timer = out.device().time("choices");
    let ([_, size, inner], [_, taken, _]) = (around(x.shape(), dim), around(out.shape(), dim));
    check_places("gather", index, dim, x.shape());
    let places = index.read_contiguous::<i64>("gather");
    let (places, device) = (&*places, out.device());
    with_element!(x.dtype, T => {
        let (vx, mut vo) = (x.read_contiguous::<T>("gather"), out.write_whole::<T>());
        let vx = &*vx;
        let several = lines(device, out.count(), taken * inner);
        device.for_chunks(&mut vo, (several * taken * inner).max(1), |chunk, out| {
            let first = chunk * several;
            for (line, out) in (first..).zip(out.chunks_exact_mut((taken * inner).max(1))) {
                let (x, places) =
                    (&vx[line * size * inner..][..size * inner], &places[line * taken * inner..]);
                if inner == 1 {
                    out.iter_mut().zip(places).for_each(|(o, &place)| *o = x[place as usize]);
                    continue;
                }
                for (out, places) in out.chunks_exact_mut(inner).zip(places.chunks_exact(inner)) {
                    let each = out.iter_mut().zip(places).enumerate();
                    each.for_each(|(i, (o, &place))| *o = x[place as usize * inner + i]);
                }
            }
        });
    });
}

/// Panics if one of these, contiguous, is no place along dimension `dim` of this shape.
#[track_caller]
pub(crate) fn check_places(op: &str, index: &Tensor, dim: usize, of: &Shape) {
    let (places, size) = (index.read_contiguous::<i64>(op), of.dims()[dim]);
    // All of them at once, which takes less time than to stop at the first.
    if places.iter().fold(false, |wrong, &place| wrong | (place as u64 >= size as u64)) {
        let wrong = places.iter().find(|place| !(0..size as i64).contains(place));
        panic!("{op}: place {} along dimension {dim} of shape {of}", wrong.unwrap_or(&0));
    }
}

/// `out` = the sum of those elements of the contiguous `grad` that [`gather`] took from each element.
pub(crate) fn gather_gradient(grad: &Tensor, index: &Tensor, dim: usize, out: &Tensor) {
    let _timer = out.device().time("choices, gradient");
    let ([_, size, inner], [_, taken, _]) = (around(out.shape(), dim), around(grad.shape(), dim));
    let device = out.device();
    with_float!(out.dtype, "gather", T => {
        let (grad, places) = (grad.read_contiguous::<T>("gather"), index.read_contiguous::<i64>("gather"));
        let (grad, places) = (&*grad, &*places);
        let mut vo = out.write_whole::<T>();
        let several = lines(device, out.count(), size * inner);
        device.for_chunks(&mut vo, (several * size * inner).max(1), |chunk, out| {
            out.fill(0.0);
            let first = chunk * several;
            for (line, out) in (first..).zip(out.chunks_exact_mut((size * inner).max(1))) {
                let taken = line * taken * inner..(line + 1) * taken * inner;
                let rows = grad[taken.clone()].chunks_exact(inner).zip(places[taken].chunks_exact(inner));
                for (grad, places) in rows {
                    let each = grad.iter().zip(places).enumerate();
                    each.for_each(|(i, (&g, &place))| out[place as usize * inner + i] += g);
                }
            }
        });
    });
}

/// How many lines of `each` elements a thread does at a time, of `all` elements.
fn lines(device: &Device, all: usize, each: usize) -> usize {
    share(device, all).div_ceil(each.max(1)).max(1)
}
