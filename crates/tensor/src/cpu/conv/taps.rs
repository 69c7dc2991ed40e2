//! Convolution tap by tap, for small images of many channels: the deep layers of a residual network.
//!
//! Each kernel tap links every output pixel with one input pixel, unless that lies in the padding. Laid out pixel by pixel
//! with the samples of a batch side by side, (H W, N, C), the pixels that a tap links are long runs of rows, and a convolution
//! is a sum of plain matrix products over those runs: nothing is copied for each tap, and nothing is multiplied with padding.
//! That counts: of the products of a 3x3 kernel on 2x2 pixels more than half meet zeros, on 1x1 pixels eight of nine.
//!
//! Output channels (input channels in the image gradient) fall into at most [`BLOCKS`] blocks, which the threads share.

use super::Plan;
use crate::cpu::gemm::{Into, Mat, gemm};
use crate::device::Device;
use crate::dtype::Float;
use crate::storage::Storage;

/// Blocks of channels, whatever the number of threads, so that the sums don't depend on it.
const BLOCKS: usize = 4;
/// A block has at least this many channels.
const BLOCK_CHANNELS: usize = 32;
/// Images of more pixels than this are laid out as matrices one by one, which then are large enough.
const MAX_AREA: usize = 1024;
/// With fewer samples or channels the products are too thin.
const MIN_SAMPLES: usize = 8;
const MIN_CHANNELS: usize = 16;
/// Rows and columns of a piece that is transposed at once.
const TILE: usize = 16;

/// Whether these kernels take a convolution.
pub(super) fn takes(p: &Plan) -> bool {
    p.options.groups == 1
        && p.n >= MIN_SAMPLES
        && p.c.min(p.o) >= MIN_CHANNELS
        && p.oh * p.ow <= MAX_AREA
        && p.h * p.w <= 4 * MAX_AREA
}

/// A run of pixels that a tap links: `[tap, first input pixel, first output pixel, length]`.
type Run = [i64; 4];

/// Visits every run, tap by tap.
fn each_run(p: &Plan, mut visit: impl FnMut(Run)) {
    let ([sy, sx], [py, px]) = (p.options.stride, p.options.padding);
    for tap in 0..p.kh * p.kw {
        let (dy, dx) = (tap / p.kw * p.options.dilation[0], tap % p.kw * p.options.dilation[1]);
        // The run that may go on: one row's last pixels and the next row's first are neighbours where a row is seen whole.
        let mut run: Run = [tap as i64, 0, 0, 0];
        for y in 0..p.oh {
            let Some(row) = (y * sy + dy).checked_sub(py).filter(|&row| row < p.h) else { continue };
            for x in 0..p.ow {
                let Some(column) = (x * sx + dx).checked_sub(px).filter(|&column| column < p.w) else {
                    continue;
                };
                let (input, output) = ((row * p.w + column) as i64, (y * p.ow + x) as i64);
                if run[3] > 0 && input == run[1] + run[3] && output == run[2] + run[3] {
                    run[3] += 1;
                    continue;
                }
                if run[3] > 0 {
                    visit(run);
                }
                run = [tap as i64, input, output, 1];
            }
        }
        if run[3] > 0 {
            visit(run);
        }
    }
}

/// All runs, in a buffer of the device's cache, and how many there are.
fn runs(device: &Device, p: &Plan) -> (Storage, usize) {
    let mut count = 0;
    each_run(p, |_| count += 1);
    let room = Storage::stale(device, count * size_of::<Run>());
    let mut out = room.write::<i64>();
    let mut at = 0;
    each_run(p, |run| {
        out[at..at + 4].copy_from_slice(&run);
        at += 4;
    });
    drop(out);
    (room, count)
}

/// How many blocks `channels` fall into; all are of one size.
fn blocks(channels: usize) -> usize {
    (1..=BLOCKS).rev().find(|&n| channels.is_multiple_of(n) && channels / n >= BLOCK_CHANNELS).unwrap_or(1)
}

/// `out[place(column) + row] = source[row * stride + column]`, for the columns that have a place.
#[inline(always)]
fn transpose<T: Float>(
    source: &[T],
    stride: usize,
    [rows, columns]: [usize; 2],
    out: &mut [T],
    place: impl Fn(usize) -> Option<usize>,
) {
    for row in (0..rows).step_by(TILE) {
        let height = TILE.min(rows - row);
        for column in (0..columns).step_by(TILE) {
            let width = TILE.min(columns - column);
            let mut tile = [[T::ZERO; TILE]; TILE];
            for (i, line) in tile.iter_mut().take(height).enumerate() {
                line[..width].copy_from_slice(&source[(row + i) * stride + column..][..width]);
            }
            for j in 0..width {
                let Some(start) = place(column + j) else { continue };
                let to = &mut out[start + row..][..height];
                to.iter_mut().zip(&tile).for_each(|(to, line)| *to = line[j]);
            }
        }
    }
}

/// Whether a tap links any pixels; the runs are in the order of taps.
#[inline(always)]
fn is_used(runs: &[Run], tap: usize) -> bool {
    runs.binary_search_by_key(&(tap as i64), |run| run[0]).is_ok()
}

/// (N, C, P) images as (P, N, C) rows.
fn to_rows<T: Float>(device: &Device, images: &[T], [n, channels, pixels]: [usize; 3], rows: &mut [T]) {
    let width = TILE.min(pixels);
    device.for_chunks(rows, width * n * channels, |chunk, rows| {
        let first = chunk * width;
        let width = rows.len() / (n * channels);
        device.arch().dispatch(|| {
            for sample in 0..n {
                let image = &images[sample * channels * pixels + first..];
                let place = |pixel: usize| Some((pixel * n + sample) * channels);
                transpose(image, pixels, [channels, width], rows, place);
            }
        });
    });
}

/// (blocks, P, N, C / blocks) rows as (N, C, P) images.
fn to_images<T: Float>(device: &Device, rows: &[T], [n, channels, pixels]: [usize; 3], images: &mut [T]) {
    let size = channels / blocks(channels);
    device.for_chunks(images, channels * pixels, |sample, image| {
        device.arch().dispatch(|| {
            for (block, image) in image.chunks_exact_mut(size * pixels).enumerate() {
                let rows = &rows[(block * pixels * n + sample) * size..];
                transpose(rows, n * size, [pixels, size], image, |channel| Some(channel * pixels));
            }
        });
    });
}

/// A buffer of the device's cache, as elements.
macro_rules! rows {
    ($device:expr, $count:expr => $room:ident, $slice:ident) => {
        let $room = Storage::stale($device, $count * size_of::<T>());
        let mut $slice = $room.write::<T>();
        let $slice = &mut $slice[..$count];
    };
}

pub(super) fn forward<T: Float>(device: &Device, x: &[T], w: &[T], b: Option<&[T]>, p: Plan, out: &mut [T]) {
    let (area, taps, size) = (p.oh * p.ow, p.kh * p.kw, p.o / blocks(p.o));
    let (room, count) = runs(device, &p);
    let runs = room.read::<i64>();
    let runs = &runs.as_chunks::<4>().0[..count];
    rows!(device, p.n * p.image() => room, source);
    to_rows(device, x, [p.n, p.c, p.h * p.w], source);
    // (blocks, taps, C, size)
    rows!(device, w.len() => room, weights);
    device.for_chunks(weights, taps * p.c * size, |block, part| {
        let place = |i: usize| is_used(runs, i % taps).then(|| (i % taps * p.c + i / taps) * size);
        let columns = p.c * taps;
        device.arch().dispatch(|| {
            transpose(&w[block * size * columns..], columns, [size, columns], part, place);
        });
    });
    rows!(device, p.n * p.out_image() => room, result);
    let source = &*source;
    device.for_chunks(result, area * p.n * size, |block, result| {
        for row in result.chunks_exact_mut(size) {
            match b {
                Some(b) => row.copy_from_slice(&b[block * size..][..size]),
                None => row.fill(T::ZERO),
            }
        }
        for &[tap, input, output, len] in runs {
            let (tap, input, output, rows) =
                (tap as usize, input as usize, output as usize, len as usize * p.n);
            let weights = &weights[(block * taps + tap) * p.c * size..][..p.c * size];
            let (a, b) = (Mat::rows(&source[input * p.n * p.c..], p.c), Mat::rows(weights, size));
            gemm(&mut result[output * p.n * size..], [rows, size, p.c], a, b, Into::Add);
        }
    });
    to_images(device, result, [p.n, p.o, area], out);
}

pub(super) fn image_gradient<T: Float>(device: &Device, g: &[T], w: &[T], p: Plan, out: &mut [T]) {
    let (area, taps, size) = (p.h * p.w, p.kh * p.kw, p.c / blocks(p.c));
    let (room, count) = runs(device, &p);
    let runs = room.read::<i64>();
    let runs = &runs.as_chunks::<4>().0[..count];
    rows!(device, p.n * p.out_image() => room, source);
    to_rows(device, g, [p.n, p.o, p.oh * p.ow], source);
    // (blocks, taps, O, size)
    rows!(device, w.len() => room, weights);
    device.for_chunks(weights, taps * p.o * size, |block, part| {
        for o in 0..p.o {
            let kernels = &w[(o * p.c + block * size) * taps..][..size * taps];
            for tap in (0..taps).filter(|&tap| is_used(runs, tap)) {
                let to = &mut part[(tap * p.o + o) * size..][..size];
                to.iter_mut().zip(kernels.chunks_exact(taps)).for_each(|(to, kernel)| *to = kernel[tap]);
            }
        }
    });
    rows!(device, p.n * p.image() => room, result);
    let source = &*source;
    device.for_chunks(result, area * p.n * size, |block, result| {
        result.fill(T::ZERO);
        for &[tap, input, output, len] in runs {
            let (tap, input, output, rows) =
                (tap as usize, input as usize, output as usize, len as usize * p.n);
            let weights = &weights[(block * taps + tap) * p.o * size..][..p.o * size];
            let (a, b) = (Mat::rows(&source[output * p.n * p.o..], p.o), Mat::rows(weights, size));
            gemm(&mut result[input * p.n * size..], [rows, size, p.o], a, b, Into::Add);
        }
    });
    to_images(device, result, [p.n, p.c, area], out);
}

pub(super) fn kernel_gradient<T: Float>(device: &Device, x: &[T], g: &[T], p: Plan, out: &mut [T]) {
    let (taps, n_blocks) = (p.kh * p.kw, blocks(p.o));
    let size = p.o / n_blocks;
    let (room, count) = runs(device, &p);
    let runs = room.read::<i64>();
    let runs = &runs.as_chunks::<4>().0[..count];
    rows!(device, p.n * p.image() => room, inputs);
    to_rows(device, x, [p.n, p.c, p.h * p.w], inputs);
    rows!(device, p.n * p.out_image() => room, grads);
    to_rows(device, g, [p.n, p.o, p.oh * p.ow], grads);
    // (taps, O, C)
    rows!(device, out.len() => room, sums);
    let (inputs, grads) = (&*inputs, &*grads);
    device.for_chunks(sums, size * p.c, |i, sums| {
        let (tap, block) = (i / n_blocks, i % n_blocks);
        if !is_used(runs, tap) {
            return;
        }
        sums.fill(T::ZERO);
        for &[_, input, output, len] in runs.iter().filter(|run| run[0] == tap as i64) {
            let (input, output, rows) = (input as usize, output as usize, len as usize * p.n);
            let a = Mat::rows(&grads[output * p.n * p.o + block * size..], p.o).t();
            gemm(sums, [size, p.c, rows], a, Mat::rows(&inputs[input * p.n * p.c..], p.c), Into::Add);
        }
    });
    let sums = &*sums;
    device.for_chunks(out, p.c * taps, |o, kernels| {
        kernels.fill(T::ZERO);
        for tap in (0..taps).filter(|&tap| is_used(runs, tap)) {
            let sums = &sums[(tap * p.o + o) * p.c..][..p.c];
            kernels.chunks_exact_mut(taps).zip(sums).for_each(|(kernel, &sum)| kernel[tap] = sum);
        }
    });
}
