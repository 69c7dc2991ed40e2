//! Convolution by matrix products: the pixels under each kernel tap are laid out as a matrix of (I KH KW, OH OW), a few
//! images of it at a time so that it stays in the cache.

use super::Plan;
use crate::cpu::gemm::{Into, Mat, Multiplied, gemm};
use crate::device::Device;
use crate::dtype::Float;
use crate::storage::Storage;

/// The taps of one group: rows and columns of the laid-out matrix.
fn matrix(p: &Plan) -> (usize, usize) {
    (p.c / p.options.groups * p.kh * p.kw, p.oh * p.ow)
}

/// For each output column of a row of the image, which part of it a tap sees: outputs `first..last`, from pixel `start`.
fn inside(out: usize, size: usize, stride: usize, padding: usize, offset: usize) -> (usize, usize) {
    let first = padding.saturating_sub(offset).div_ceil(stride);
    let last = if size + padding > offset { (size + padding - offset).div_ceil(stride) } else { 0 };
    (first.min(out), last.clamp(first.min(out), out))
}

/// Visits the matrix row by row: `visit(position in the matrix, position in the image, step in the image, length, zeros
/// before, zeros after)` for each output row of each tap; a length of 0 is a row of zeros.
fn taps(p: &Plan, group: usize, mut visit: impl FnMut(usize, usize, usize, usize, usize, usize)) {
    let ig = p.c / p.options.groups;
    let [sy, sx] = p.options.stride;
    let [py, px] = p.options.padding;
    let mut at = 0;
    for channel in group * ig..(group + 1) * ig {
        for ky in 0..p.kh {
            for kx in 0..p.kw {
                let (dy, dx) = (ky * p.options.dilation[0], kx * p.options.dilation[1]);
                let (first, last) = inside(p.ow, p.w, sx, px, dx);
                for y in 0..p.oh {
                    let row = (y * sy + dy).checked_sub(py).filter(|&row| row < p.h);
                    match row {
                        Some(row) if first < last => {
                            let start = (channel * p.h + row) * p.w + first * sx + dx - px;
                            visit(at, start, sx, last - first, first, p.ow - last);
                        }
                        _ => visit(at, 0, 1, 0, p.ow, 0),
                    }
                    at += p.ow;
                }
            }
        }
    }
}

/// Lays one image out as the matrix.
fn lower<T: Float>(image: &[T], p: &Plan, group: usize, out: &mut [T]) {
    taps(p, group, |at, start, step, len, before, after| {
        let row = &mut out[at..at + before + len + after];
        row[..before].fill(T::ZERO);
        let middle = &mut row[before..before + len];
        if step == 1 {
            middle.copy_from_slice(&image[start..start + len]);
        } else {
            middle.iter_mut().zip(image[start..].iter().step_by(step)).for_each(|(o, &x)| *o = x);
        }
        row[before + len..].fill(T::ZERO);
    });
}

/// Adds the matrix back onto one image: the transpose of [`lower`].
fn raise<T: Float>(matrix: &[T], p: &Plan, group: usize, image: &mut [T]) {
    taps(p, group, |at, start, step, len, before, _| {
        let row = &matrix[at + before..at + before + len];
        if step == 1 {
            image[start..start + len].iter_mut().zip(row).for_each(|(o, &x)| *o += x);
        } else {
            image[start..].iter_mut().step_by(step).zip(row).for_each(|(o, &x)| *o += x);
        }
    });
}

/// Room for `elements` from the device's cache.
fn room<T: Float>(device: &Device, elements: usize) -> Storage {
    Storage::stale(device, elements * size_of::<T>())
}

pub(super) fn forward<T: Multiplied>(
    device: &Device,
    x: &[T],
    w: &[T],
    b: Option<&[T]>,
    p: Plan,
    out: &mut [T],
) {
    let (taps, area) = matrix(&p);
    let og = p.o / p.options.groups;
    device.for_chunks(out, p.out_image().max(1), |n, out| {
        let image = &x[n * p.image()..][..p.image()];
        let room = room::<T>(device, taps * area);
        let mut matrix = room.write::<T>();
        for (o, plane) in out.chunks_exact_mut(area.max(1)).enumerate() {
            plane.fill(b.map_or(T::ZERO, |b| b[o]));
        }
        for group in 0..p.options.groups {
            device.arch().run(
                #[inline(always)]
                || lower(image, &p, group, &mut matrix),
            );
            let w = Mat::rows(&w[group * og * taps..], taps);
            gemm(&mut out[group * og * area..], [og, area, taps], w, Mat::rows(&matrix, area), Into::Add);
        }
    });
}

pub(super) fn image_gradient<T: Multiplied>(device: &Device, g: &[T], w: &[T], p: Plan, out: &mut [T]) {
    let (taps, area) = matrix(&p);
    let og = p.o / p.options.groups;
    device.for_chunks(out, p.image().max(1), |n, image| {
        let g = &g[n * p.out_image()..][..p.out_image()];
        let room = room::<T>(device, taps * area);
        let mut matrix = room.write::<T>();
        image.fill(T::ZERO);
        for group in 0..p.options.groups {
            let w = Mat::rows(&w[group * og * taps..], taps).t();
            gemm(&mut matrix, [taps, area, og], w, Mat::rows(&g[group * og * area..], area), Into::Replace);
            device.arch().run(
                #[inline(always)]
                || raise(&matrix, &p, group, image),
            );
        }
    });
}

/// The images of a batch fall into at most this many runs, each summed on its own and then together in order, so the result
/// doesn't depend on how many threads there are.
pub(super) const RUNS: usize = 4;

/// Sums `each(parts, partial sum)` into `out`, over `parts` parts of what is summed, which fall into at most `runs` runs.
pub(super) fn sum_over_runs<T: Float>(
    device: &Device,
    runs: usize,
    parts: usize,
    out: &mut [T],
    each: impl Fn(std::ops::Range<usize>, &mut [T]) + Sync,
) {
    let per_run = parts.div_ceil(runs).max(1);
    let runs = parts.div_ceil(per_run).max(1);
    let size = out.len();
    let room = room::<T>(device, size * runs);
    let mut partial = room.write::<T>();
    let partial = &mut partial[..size * runs];
    device.for_chunks(partial, size.max(1), |run, sum| {
        each(run * per_run..((run + 1) * per_run).min(parts), sum);
    });
    device.arch().run(
        #[inline(always)]
        || {
            out.copy_from_slice(&partial[..size]);
            for run in partial.chunks_exact(size.max(1)).skip(1) {
                out.iter_mut().zip(run).for_each(|(o, &x)| *o += x);
            }
        },
    );
}

pub(super) fn kernel_gradient<T: Multiplied>(device: &Device, x: &[T], g: &[T], p: Plan, out: &mut [T]) {
    let (taps, area) = matrix(&p);
    let og = p.o / p.options.groups;
    sum_over_runs(device, RUNS, p.n, out, |images, sum| {
        sum.fill(T::ZERO);
        let room = room::<T>(device, taps * area);
        let mut matrix = room.write::<T>();
        for n in images {
            let (image, g) = (&x[n * p.image()..][..p.image()], &g[n * p.out_image()..][..p.out_image()]);
            for group in 0..p.options.groups {
                device.arch().run(
                    #[inline(always)]
                    || lower(image, &p, group, &mut matrix),
                );
                let g = Mat::rows(&g[group * og * area..], area);
                gemm(
                    &mut sum[group * og * taps..],
                    [og, taps, area],
                    g,
                    Mat::rows(&matrix, area).t(),
                    Into::Add,
                );
            }
        }
    });
}
