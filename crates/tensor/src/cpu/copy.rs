//! Copies between views, and between the orders in which tensors lie in memory.

use crate::cpu::share;
use crate::device::Device;
use crate::dtype::{Element, with_element};
use crate::ops::choice::around;
use crate::shape::{Geometry, Order, for_each_row};
use crate::tensor::Tensor;

/// Sets every element of the dense `out`.
pub(crate) fn fill(out: &Tensor, value: f64) {
    with_element!(out.dtype, T => out.write_whole::<T>().fill(T::from_f64(value)));
}

/// Fills `out` with the elements of `from`, which has the same shape and dtype. Either may be any view.
pub(crate) fn copy(from: &Tensor, out: &Tensor) {
    let _timer = out.device().time("copies");
    with_element!(out.dtype, T => copy_elements::<T>(from, out));
}

/// `out` = `from` with dimension `dim` from its end to its beginning; both contiguous.
pub(crate) fn flip(from: &Tensor, dim: usize, out: &Tensor) {
    let _timer = out.device().time("copies");
    let [_, size, inner] = around(from.shape(), dim);
    if out.count() == 0 {
        return;
    }
    with_element!(out.dtype, T => {
        let (from, mut out_all) = (from.read_contiguous::<T>("flip"), out.write_whole::<T>());
        let lines = share(out.device(), out.count()).div_ceil(inner);
        out.device().for_chunks(&mut out_all, lines * inner, |i, out| {
            // Where a line of `inner` neighbours comes from: its place counted from the end.
            let source = |line: usize| ((line / size + 1) * size - 1 - line % size) * inner;
            let (first, n) = (i * lines, out.len() / inner);
            if inner > 1 {
                let lines = out.chunks_exact_mut(inner).enumerate();
                return lines.for_each(|(j, to)| to.copy_from_slice(&from[source(first + j)..][..inner]));
            }
            let mut done = 0;
            while done < n {
                let at = first + done;
                let some = (size - at % size).min(n - done);
                let end = source(at) + 1;
                let row = out[done..done + some].iter_mut().zip(from[end - some..end].iter().rev());
                row.for_each(|(to, from)| *to = *from);
                done += some;
            }
        });
    });
}

/// Fills `out` with the elements of `from` in its own type, each rounded once; both lie in one order without gaps.
pub(crate) fn convert(from: &Tensor, out: &Tensor) {
    let _timer = out.device().time("conversions");
    with_element!(from.dtype, T => {
        let from = from.read_dense::<T>();
        with_element!(out.dtype, U => convert_elements::<T, U>(out.device(), &from, &mut out.write_whole::<U>()));
    });
}

/// The same for slices, of which `from` is at least as long.
pub(crate) fn convert_elements<T: Element, U: Element>(device: &Device, from: &[T], out: &mut [U]) {
    let share = share(device, out.len());
    device.for_chunks(out, share, |i, out| {
        out.iter_mut().zip(&from[i * share..]).for_each(|(to, &from)| *to = U::from_f64(from.to_f64()));
    });
}

fn copy_elements<T: Element>(from: &Tensor, out: &Tensor) {
    let (source, mut target) = (from.read::<T>(), out.write::<T>());
    let of = |tensor: &Tensor| tensor.geometry.offset..tensor.geometry.offset + tensor.count();
    if let &[n, c, h, w] = out.dims() {
        let shuffle = match (from.order(), out.order()) {
            (Some(Order::RowMajor), Some(Order::Pixels)) => to_pixels_on,
            (Some(Order::Pixels), Some(Order::RowMajor)) => from_pixels_on,
            (Some(Order::RowMajor), Some(Order::Taps)) => to_taps_on,
            (Some(Order::Taps), Some(Order::RowMajor)) => from_taps_on,
            _ => return copy_views(from, &source, out, &mut target),
        };
        return shuffle(out.device(), &source[of(from)], [n, c, h * w], &mut target[of(out)]);
    }
    copy_views(from, &source, out, &mut target);
}

/// Copies any view to any other. Where the output has no gaps, threads share out its first dimension.
fn copy_views<T: Element>(from: &Tensor, source: &[T], out: &Tensor, target: &mut [T]) {
    let (device, shape, from) = (out.device(), *out.shape(), &from.geometry);
    let first = shape.dims().iter().position(|&size| size > 1);
    let Some(first) = first.filter(|_| out.geometry.is_contiguous()) else {
        return copy_part(device, from, source, &out.geometry, target);
    };
    let rest = shape.dims()[first + 1..].iter().product::<usize>().max(1);
    let rows = share(device, shape.count()).div_ceil(rest);
    let start = out.geometry.offset;
    device.for_chunks(&mut target[start..start + shape.count()], rows * rest, |i, target| {
        let from = from.narrow(first, i * rows, target.len() / rest);
        copy_part(device, &from, source, &Geometry::row_major(from.shape), target);
    });
}

fn copy_part<T: Element>(device: &Device, from: &Geometry, source: &[T], out: &Geometry, target: &mut [T]) {
    let shape = from.shape;
    // Along which dimensions elements are neighbours here and there.
    let neighbours =
        |view: &Geometry| (0..shape.n_dims()).find(|&d| shape.dims()[d] > 1 && view.strides[d] == 1);
    if let (Some(row), Some(column)) = (neighbours(out), neighbours(from))
        && row != column
        && from.strides[row] > 0
        && [row, column].iter().all(|&d| shape.dims()[d] >= FEW)
    {
        let sizes = [row, column].map(|d| shape.dims()[d]);
        let others = [out, from].map(|view| view.without(row.max(column)).without(row.min(column)));
        return for_each_row(others.each_ref(), |[to, at], [to_step, step], n| {
            for i in 0..n {
                let (source, target) = (&source[at + i * step..], &mut target[to + i * to_step..]);
                device.arch().run(
                    #[inline(always)]
                    || {
                        transpose(
                            source,
                            from.strides[row],
                            sizes,
                            target,
                            #[inline(always)]
                            |line| line * out.strides[column],
                        );
                    },
                );
            }
        });
    }
    for_each_row([out, from], |[to, at], [to_step, step], n| match (to_step, step) {
        (1, 1) => target[to..to + n].copy_from_slice(&source[at..at + n]),
        (1, 0) => target[to..to + n].fill(source[at]),
        _ => (0..n).for_each(|i| target[to + i * to_step] = source[at + i * step]),
    });
}

/// With fewer neighbours than this a piece at a time is no gain.
const FEW: usize = 4;

/// Rows and columns of a piece that is transposed at once.
const TILE: usize = 16;
/// Rows whose pieces follow each other.
const BLOCK: usize = 256;

/// `out[place(column) + row] = source[row * stride + column]`.
#[inline(always)]
pub(crate) fn transpose<T: Element>(
    source: &[T],
    stride: usize,
    [rows, columns]: [usize; 2],
    out: &mut [T],
    place: impl Fn(usize) -> usize,
) {
    // As many rows at a time as have their part of a tile's columns in pages that the processor still knows; what is written lies in few.
    for first in (0..rows).step_by(BLOCK) {
        let block = first..rows.min(first + BLOCK);
        for column in (0..columns).step_by(TILE) {
            let width = TILE.min(columns - column);
            for row in block.clone().step_by(TILE) {
                let height = TILE.min(block.end - row);
                let mut tile = [[T::default(); TILE]; TILE];
                for (i, line) in tile.iter_mut().take(height).enumerate() {
                    line[..width].copy_from_slice(&source[(row + i) * stride + column..][..width]);
                }
                for j in 0..width {
                    let to = &mut out[place(column + j) + row..][..height];
                    to.iter_mut().zip(&tile).for_each(|(to, line)| *to = line[j]);
                }
            }
        }
    }
}

/// (N, C, P) as (P, N, C).
pub(crate) fn to_pixels<T: Element>(from: &[T], [n, channels, pixels]: [usize; 3], out: &mut [T]) {
    for (sample, image) in from.chunks_exact((channels * pixels).max(1)).enumerate() {
        transpose(image, pixels, [channels, pixels], out, |pixel| (pixel * n + sample) * channels);
    }
}

/// As [`to_pixels`], a few pixels a task.
fn to_pixels_on<T: Element>(device: &Device, from: &[T], [n, channels, pixels]: [usize; 3], out: &mut [T]) {
    let width = TILE.min(pixels.max(1));
    device.for_chunks(out, width * n * channels, |chunk, rows| {
        let first = chunk * width;
        let width = rows.len() / (n * channels);
        device.arch().run(
            #[inline(always)]
            || {
                for sample in 0..n {
                    let image = &from[sample * channels * pixels + first..];
                    transpose(image, pixels, [channels, width], rows, |pixel| {
                        (pixel * n + sample) * channels
                    });
                }
            },
        );
    });
}

/// (O, I, P) as (P, I, O).
pub(crate) fn to_taps<T: Element>(from: &[T], [outputs, inputs, taps]: [usize; 3], out: &mut [T]) {
    // A few inputs for all outputs: what lies side by side in `out` is written one after the other.
    for input in (0..inputs).step_by(TILE) {
        let columns = TILE.min(inputs - input) * taps;
        for first in (0..outputs).step_by(TILE) {
            let height = TILE.min(outputs - first);
            let kernels = &from[(first * inputs + input) * taps..];
            let place = |column| ((column % taps) * inputs + input + column / taps) * outputs + first;
            transpose(kernels, inputs * taps, [height, columns], out, place);
        }
    }
}

fn to_taps_on<T: Element>(device: &Device, from: &[T], dims: [usize; 3], out: &mut [T]) {
    device.arch().run(
        #[inline(always)]
        || to_taps(from, dims, out),
    );
}

/// (P, I, O) as (O, I, P).
pub(crate) fn from_taps<T: Element>(from: &[T], [outputs, inputs, taps]: [usize; 3], out: &mut [T]) {
    for some in (0..inputs).step_by(TILE) {
        for first in (0..outputs).step_by(TILE) {
            let width = TILE.min(outputs - first);
            for input in some..inputs.min(some + TILE) {
                let row = &from[input * outputs + first..];
                let place = |output| ((first + output) * inputs + input) * taps;
                transpose(row, inputs * outputs, [taps, width], out, place);
            }
        }
    }
}

fn from_taps_on<T: Element>(device: &Device, from: &[T], dims: [usize; 3], out: &mut [T]) {
    device.arch().run(
        #[inline(always)]
        || from_taps(from, dims, out),
    );
}

/// (N, C, P) as (N, P, C).
pub(crate) fn to_channels_last<T: Element>(from: &[T], [_, channels, pixels]: [usize; 3], out: &mut [T]) {
    let size = (channels * pixels).max(1);
    for (image, out) in from.chunks_exact(size).zip(out.chunks_exact_mut(size)) {
        transpose(image, pixels, [channels, pixels], out, |pixel| pixel * channels);
    }
}

/// (N, P, C) as (N, C, P).
pub(crate) fn from_channels_last<T: Element>(from: &[T], [n, channels, pixels]: [usize; 3], out: &mut [T]) {
    to_channels_last(from, [n, pixels, channels], out);
}

/// (P, N, C) as (N, C, P).
pub(crate) fn from_pixels<T: Element>(from: &[T], [n, channels, pixels]: [usize; 3], out: &mut [T]) {
    for (sample, image) in out.chunks_exact_mut((channels * pixels).max(1)).enumerate() {
        one_from_pixels(from, [n, channels, pixels], sample, image);
    }
}

/// As [`from_pixels`], a sample a task.
fn from_pixels_on<T: Element>(device: &Device, from: &[T], dims: [usize; 3], out: &mut [T]) {
    device.for_chunks(out, dims[1] * dims[2], |sample, image| {
        device.arch().run(
            #[inline(always)]
            || one_from_pixels(from, dims, sample, image),
        );
    });
}

#[inline(always)]
fn one_from_pixels<T: Element>(
    from: &[T],
    [n, channels, pixels]: [usize; 3],
    sample: usize,
    image: &mut [T],
) {
    let rows = &from[sample * channels..];
    transpose(rows, n * channels, [pixels, channels], image, |channel| channel * pixels);
}
