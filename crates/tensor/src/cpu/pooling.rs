//! Max and average pooling over (N, C, H, W) images. Of row-major images each plane is worked on alone; of images in pixel
//! order, all samples and channels of a pixel at once.

use crate::cpu::SERIAL_LIMIT;
use crate::cpu::window::Slide;
use crate::dtype::{Float, with_float};
use crate::op::{CountPadding, PoolOptions};
use crate::shape::Order;
use crate::tensor::Tensor;
use std::ops::Range;

/// The sizes that a pooling kernel works with: planes of `h * w` become planes of `oh * ow`.
#[derive(Clone, Copy)]
pub(crate) struct Planes {
    pub(crate) h: usize,
    pub(crate) w: usize,
    pub(crate) oh: usize,
    pub(crate) ow: usize,
    pub(crate) options: PoolOptions,
}

impl Planes {
    /// The rows and columns of the image that the window at (y, x) covers.
    #[inline(always)]
    fn window(&self, y: usize, x: usize) -> (Range<usize>, Range<usize>) {
        let span = |at: usize, d: usize, size: usize| {
            let start = at * self.options.stride[d];
            let end = (start + self.options.kernel[d]).saturating_sub(self.options.padding[d]).min(size);
            start.saturating_sub(self.options.padding[d])..end
        };
        (span(y, 0, self.h), span(x, 1, self.w))
    }

    /// How windows move along dimension `d`.
    fn slide(&self, d: usize) -> Slide {
        Slide { stride: self.options.stride[d], padding: self.options.padding[d] }
    }

    /// The pixels that the window of an output pixel covers, each after its number in the window.
    fn seen(&self, output: usize) -> impl Iterator<Item = (u8, usize)> {
        let (p, [kh, kw]) = (*self, self.options.kernel);
        (0..kh * kw).filter_map(move |k| {
            let y = p.slide(0).sees(output / p.ow, k / kw, p.h)?;
            let x = p.slide(1).sees(output % p.ow, k % kw, p.w)?;
            Some((k as u8, y * p.w + x))
        })
    }

    /// The output pixels whose windows cover a pixel, each after the pixel's number in the window.
    fn seen_by(&self, pixel: usize) -> impl Iterator<Item = (u8, usize)> {
        let (p, [kh, kw]) = (*self, self.options.kernel);
        (0..kh * kw).filter_map(move |k| {
            let y = p.slide(0).seen_by(pixel / p.w, k / kw, p.oh)?;
            let x = p.slide(1).seen_by(pixel % p.w, k % kw, p.ow)?;
            Some((k as u8, y * p.ow + x))
        })
    }

    /// Windows of 2x2 that tile the image: the common case, which has a kernel of its own.
    fn is_two_by_two(&self) -> bool {
        self.options == PoolOptions::square(2)
    }

    fn per_task(&self, device: &crate::Device, planes: usize) -> usize {
        if planes * self.h * self.w < SERIAL_LIMIT {
            planes.max(1)
        } else {
            planes.div_ceil(device.threads())
        }
    }
}

/// Max-pooling of images that lie in `order`.
pub(crate) fn max_pool(x: &Tensor, p: Planes, order: Order, out: &Tensor, position: &Tensor) {
    match order {
        Order::Pixels => max_pool_pixels(x, p, out, position),
        _ => max_pool_planes(x, p, out, position),
    }
}

/// The gradient of [`max_pool`].
pub(crate) fn max_pool_gradient(position: &Tensor, grad: &Tensor, p: Planes, order: Order, out: &Tensor) {
    match order {
        Order::Pixels => max_pool_pixels_gradient(position, grad, p, out),
        _ => max_pool_planes_gradient(position, grad, p, out),
    }
}

/// Max-pooling; `position` gets, for each output, where in its window the first largest element, or else the last NaN,
/// stands, counted row by row from the window's first pixel inside the image.
fn max_pool_planes(x: &Tensor, p: Planes, out: &Tensor, position: &Tensor) {
    let _timer = out.device().time("max pooling");
    with_float!(x.dtype, "max_pool2d", T => {
        let device = out.device();
        let arch = device.arch();
        let vx = x.read_contiguous::<T>("max_pool2d");
        let vx = &*vx;
        let (mut vo, mut vp) = (out.write_whole::<T>(), position.write_whole::<u8>());
        let (plane, out_plane) = (p.h * p.w, p.oh * p.ow);
        let n = p.per_task(device, vo.len() / out_plane.max(1));
        device.for_chunks2((&mut vo, n * out_plane), (&mut vp, n * out_plane), |task, o, pos| {
            let x = &vx[task * n * plane..];
            if p.is_two_by_two() {
                return arch.dispatch(MaxPlanes2x2 { x, p, out: o, position: pos });
            }
            let planes = x.chunks_exact(plane).zip(o.chunks_exact_mut(out_plane).zip(pos.chunks_exact_mut(out_plane)));
            for (x, (out, position)) in planes {
                max_plane(x, p, out, position);
            }
        });
    });
}

fn max_plane<T: Float>(x: &[T], p: Planes, out: &mut [T], position: &mut [u8]) {
    for y in 0..p.oh {
        for xx in 0..p.ow {
            let (rows, cols) = p.window(y, xx);
            let (mut best, mut at, mut i) = (T::NEG_INFINITY, 0usize, 0);
            for r in rows {
                for c in cols.clone() {
                    let v = x[r * p.w + c];
                    if v > best || v.is_nan() {
                        (best, at) = (v, i);
                    }
                    i += 1;
                }
            }
            out[y * p.ow + xx] = best;
            // A window has at most 256 pixels, which `max_pool2d` checks.
            position[y * p.ow + xx] = at as u8;
        }
    }
}

/// Rows of fewer numbers are put behind each other before they are pooled: a few windows are no loop for vectors.
const SHORT: usize = 24;
/// Numbers of so many rows at once.
const AT_ONCE: usize = 512;

/// The largest of each 2x2 window of planes. A struct, so that it is sure to be inlined where its vectors are known.
struct MaxPlanes2x2<'a, T> {
    x: &'a [T],
    p: Planes,
    out: &'a mut [T],
    position: &'a mut [u8],
}

impl<T: Float> pulp::NullaryFnOnce for MaxPlanes2x2<'_, T> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let MaxPlanes2x2 { x, p, out, position } = self;
        if out.is_empty() {
            return;
        }
        let row = 2 * p.ow;
        let pair = |i: usize| {
            let start = (i / p.oh * p.h + 2 * (i % p.oh)) * p.w;
            (&x[start..][..row], &x[start + p.w..][..row])
        };
        if row >= SHORT {
            let rows = out.chunks_exact_mut(p.ow).zip(position.chunks_exact_mut(p.ow));
            for (i, (out, position)) in rows.enumerate() {
                max_windows(pair(i), out, position);
            }
            return;
        }
        let pairs = AT_ONCE / row;
        let (mut upper, mut lower) = ([T::ZERO; AT_ONCE], [T::ZERO; AT_ONCE]);
        let blocks = out.chunks_mut(pairs * p.ow).zip(position.chunks_mut(pairs * p.ow));
        for (block, (out, position)) in blocks.enumerate() {
            let rows = upper.chunks_exact_mut(row).zip(lower.chunks_exact_mut(row));
            for (i, (upper, lower)) in rows.enumerate().take(out.len() / p.ow) {
                let (above, below) = pair(block * pairs + i);
                upper.copy_from_slice(above);
                lower.copy_from_slice(below);
            }
            max_windows((&upper[..2 * out.len()], &lower[..2 * out.len()]), out, position);
        }
    }
}

/// The largest of each two neighbours and the two below them.
#[inline(always)]
fn max_windows<T: Float>((upper, lower): (&[T], &[T]), out: &mut [T], position: &mut [u8]) {
    let windows = upper.as_chunks::<2>().0.iter().zip(lower.as_chunks::<2>().0);
    for ((&above, &below), (out, position)) in windows.zip(out.iter_mut().zip(position)) {
        (*out, *position) = largest_of_four(above, below);
    }
}

/// The largest of a window, and its number, as in the general kernel: a NaN wins. Without a branch, of which real images would have a
/// machine guess every other one wrong.
#[inline(always)]
fn largest_of_four<T: Float>([a, b]: [T; 2], [c, d]: [T; 2]) -> (T, u8) {
    let is_second = |first: T, second: T| (second > first) | second.is_nan();
    let (above, below) = (is_second(a, b), is_second(c, d));
    let (u, v) = (if above { b } else { a }, if below { d } else { c });
    let is_lower = is_second(u, v);
    let at = if is_lower { 2 + u8::from(below) } else { u8::from(above) };
    (if is_lower { v } else { u }, at)
}

/// The gradient of [`max_pool`]: each output's gradient goes to the pixel it came from.
fn max_pool_planes_gradient(position: &Tensor, grad: &Tensor, p: Planes, out: &Tensor) {
    let _timer = out.device().time("max pooling, gradient");
    with_float!(out.dtype, "max_pool2d", T => {
        let device = out.device();
        let arch = device.arch();
        let (vp, vg) = (position.read_contiguous::<u8>("max_pool2d"), grad.read_contiguous::<T>("max_pool2d"));
        let (vp, vg) = (&*vp, &*vg);
        let mut vo = out.write_whole::<T>();
        let (plane, out_plane) = (p.h * p.w, p.oh * p.ow);
        let n = p.per_task(device, vo.len() / plane.max(1));
        device.for_chunks(&mut vo, n * plane, |task, o| {
            let (pos, g) = (&vp[task * n * out_plane..], &vg[task * n * out_plane..]);
            let planes = o.chunks_exact_mut(plane).zip(pos.chunks_exact(out_plane).zip(g.chunks_exact(out_plane)));
            for (out, (position, grad)) in planes {
                if p.is_two_by_two() {
                    arch.dispatch(SpreadPlane2x2 { position, grad, p, out });
                } else {
                    spread_plane(position, grad, p, out);
                }
            }
        });
    });
}

fn spread_plane<T: Float>(position: &[u8], grad: &[T], p: Planes, out: &mut [T]) {
    out.fill(T::ZERO);
    for y in 0..p.oh {
        for x in 0..p.ow {
            let (rows, cols) = p.window(y, x);
            let at = position[y * p.ow + x] as usize;
            out[(rows.start + at / cols.len()) * p.w + cols.start + at % cols.len()] += grad[y * p.ow + x];
        }
    }
}

/// Sends the gradients of one plane of 2x2 windows to the pixels they came from.
struct SpreadPlane2x2<'a, T> {
    position: &'a [u8],
    grad: &'a [T],
    p: Planes,
    out: &'a mut [T],
}

impl<T: Float> pulp::NullaryFnOnce for SpreadPlane2x2<'_, T> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let SpreadPlane2x2 { position, grad, p, out } = self;
        // Zeros first, then one store a window: fewer bytes than choosing for each pixel.
        out.fill(T::ZERO);
        for (y, pair) in out.chunks_mut(2 * p.w).take(p.oh).enumerate() {
            let (position, grad) = (&position[y * p.ow..][..p.ow], &grad[y * p.ow..][..p.ow]);
            for (x, (&at, &g)) in position.iter().zip(grad).enumerate() {
                let at = usize::from(at);
                pair[(at >> 1) * p.w + 2 * x + (at & 1)] = g;
            }
        }
    }
}

/// Max-pooling of images in pixel order; `position` gets the number of the largest pixel in its window, padding included.
fn max_pool_pixels(x: &Tensor, p: Planes, out: &Tensor, position: &Tensor) {
    let _timer = out.device().time("max pooling");
    with_float!(x.dtype, "max_pool2d", T => {
        let device = out.device();
        let vx = x.read_dense::<T>();
        let (mut vo, mut vp) = (out.write_whole::<T>(), position.write_whole::<u8>());
        let width = x.dims()[0] * x.dims()[1];
        device.for_chunks2((&mut vo, width), (&mut vp, width), |pixel, out, position| {
            device.arch().run(#[inline(always)] || {
                let mut seen = p.seen(pixel);
                let (first, from) = seen.next().expect("a window covers a pixel of the image");
                out.copy_from_slice(&vx[from * width..][..width]);
                position.fill(first);
                for (at, from) in seen {
                    let x = &vx[from * width..][..width];
                    // First where the pixel wins, then what that changes: bytes and floats of one loop make poor vectors.
                    for ((&x, &best), position) in x.iter().zip(out.iter()).zip(position.iter_mut()) {
                        *position = if x > best || x.is_nan() { at } else { *position };
                    }
                    out.iter_mut().zip(x).for_each(|(best, &x)| *best = x.larger(*best));
                }
            });
        });
    });
}

/// The gradient of [`max_pool_pixels`]: each pixel of the image takes from the windows that it was the largest of.
fn max_pool_pixels_gradient(position: &Tensor, grad: &Tensor, p: Planes, out: &Tensor) {
    let _timer = out.device().time("max pooling, gradient");
    with_float!(out.dtype, "max_pool2d", T => {
        let device = out.device();
        let (vp, vg) = (position.read_dense::<u8>(), grad.read_dense::<T>());
        let mut vo = out.write_whole::<T>();
        let width = out.dims()[0] * out.dims()[1];
        device.for_chunks(&mut vo, width, |pixel, out| {
            device.arch().run(#[inline(always)] || {
                out.fill(T::ZERO);
                for (at, to) in p.seen_by(pixel) {
                    let (position, grad) = (&vp[to * width..][..width], &vg[to * width..][..width]);
                    for ((&position, &grad), out) in position.iter().zip(grad).zip(out.iter_mut()) {
                        *out += if position == at { grad } else { T::ZERO };
                    }
                }
            });
        });
    });
}

/// Average pooling.
pub(crate) fn avg_pool(x: &Tensor, p: Planes, padding: CountPadding, out: &Tensor) {
    let _timer = out.device().time("average pooling");
    with_float!(x.dtype, "avg_pool2d", T => {
        let vx = x.read_contiguous::<T>("avg_pool2d");
        let mut vo = out.write_whole::<T>();
        let (plane, out_plane) = (p.h * p.w, p.oh * p.ow);
        for (x, o) in vx.chunks_exact(plane).zip(vo.chunks_exact_mut(out_plane)) {
            for y in 0..p.oh {
                for xx in 0..p.ow {
                    let (rows, cols) = p.window(y, xx);
                    let share = share::<T>(p, padding, rows.len() * cols.len(), y, xx);
                    let sum = rows.flat_map(|r| x[r * p.w..][cols.clone()].iter()).fold(T::ZERO, |s, &v| s + v);
                    o[y * p.ow + xx] = sum * share;
                }
            }
        }
    });
}

/// What one pixel counts in the window at (y, x), of which `inside` pixels lie in the image. PyTorch's whole window ends
/// where the padded image ends.
fn share<T: Float>(p: Planes, padding: CountPadding, inside: usize, y: usize, x: usize) -> T {
    let whole = |at: usize, d: usize, size: usize| {
        let start = at * p.options.stride[d];
        (start + p.options.kernel[d]).min(size + 2 * p.options.padding[d]) - start
    };
    let n = match padding {
        CountPadding::Yes => whole(y, 0, p.h) * whole(x, 1, p.w),
        CountPadding::No => inside,
    };
    T::from_f64(1.0 / n as f64)
}

/// The gradient of [`avg_pool`].
pub(crate) fn avg_pool_gradient(grad: &Tensor, p: Planes, padding: CountPadding, out: &Tensor) {
    let _timer = out.device().time("average pooling, gradient");
    with_float!(out.dtype, "avg_pool2d", T => {
        let vg = grad.read_contiguous::<T>("avg_pool2d");
        let mut vo = out.write_whole::<T>();
        vo.fill(T::ZERO);
        let (plane, out_plane) = (p.h * p.w, p.oh * p.ow);
        for (g, o) in vg.chunks_exact(out_plane).zip(vo.chunks_exact_mut(plane)) {
            for y in 0..p.oh {
                for x in 0..p.ow {
                    let (rows, cols) = p.window(y, x);
                    let g = g[y * p.ow + x] * share::<T>(p, padding, rows.len() * cols.len(), y, x);
                    rows.for_each(|r| o[r * p.w..][cols.clone()].iter_mut().for_each(|o| *o += g));
                }
            }
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Device;

    /// Short rows behind each other, in several blocks, and long ones, with a pixel left over and without.
    #[test]
    fn windows_of_four_are_those_of_the_general_kernel() {
        let device = Device::cpu(1);
        for [planes, h, w] in
            [[1, 2, 2], [3, 4, 5], [40, 9, 8], [7, 23, 22], [2, 4, 24], [2, 7, 35], [1, 3, 300]]
        {
            let p = Planes { h, w, oh: h / 2, ow: w / 2, options: PoolOptions::square(2) };
            // Many are alike, and some no number.
            let of = |i: usize| if i * 7 % 11 == 3 { f32::NAN } else { (i * 5 % 7) as f32 - 3.0 };
            let x: Vec<f32> = (0..planes * h * w).map(of).collect();
            let n = p.oh * p.ow;
            let (mut want, mut want_at) = (vec![0.0; planes * n], vec![0; planes * n]);
            let outputs = want.chunks_exact_mut(n).zip(want_at.chunks_exact_mut(n));
            x.chunks_exact(h * w).zip(outputs).for_each(|(x, (out, at))| max_plane(x, p, out, at));
            let (mut out, mut position) = (vec![9.0; planes * n], vec![9; planes * n]);
            device.arch().dispatch(MaxPlanes2x2 { x: &x, p, out: &mut out, position: &mut position });
            let same = |(a, b): (&f32, &f32)| a == b || a.is_nan() && b.is_nan();
            assert!(out.iter().zip(&want).all(same), "{planes} planes of {h} x {w}: {out:?}, not {want:?}");
            assert_eq!(position, want_at, "{planes} planes of {h} x {w}");
        }
    }
}
