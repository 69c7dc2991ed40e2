//! Convolution straight from the image, for few channels and stride 1: the work of the tutorials' MNIST network.
//!
//! Laying out pixels as a matrix multiplies the bytes moved by the kernel's area, which costs more than the arithmetic when a
//! pixel meets only ten or twenty channels. Here a *block* is [`LANES`] neighbouring pixels of an output row. A tile of
//! [`POSITIONS`] blocks times up to [`TAPS`] weights stays in registers while it sums: each block that is loaded meets every
//! weight of the tile, each weight every block.
//!
//! Where the width isn't a multiple of [`LANES`], the last block of a row reaches back over the one before it; the lanes that
//! both cover are its `skip` first, which sums leave out.

use super::lowered::sum_over_runs;
use super::{Plan, lowered};
use crate::device::Device;
use crate::dtype::Float;
use crate::storage::Storage;

/// Pixels in a block: one vector of floats on a machine with AVX2.
const LANES: usize = 8;
/// Blocks in a tile.
const POSITIONS: usize = 4;
/// Weights in a tile: with 4 blocks, 20 sums, 4 blocks and a weight fit the 32 vector registers of AVX-512.
const TAPS: usize = 5;
/// Above this many pairs of channels the matrix product is the faster way.
const MAX_CHANNEL_PAIRS: usize = 512;

type Block<T> = [T; LANES];

/// Whether these kernels take a convolution.
pub(super) fn takes(p: &Plan) -> bool {
    let plain = crate::op::Conv2dOptions::default();
    p.options == plain && p.ow >= LANES && p.c * p.o <= MAX_CHANNEL_PAIRS
}

/// Where a block starts in an image plane of the input and of the output, and how many of its lanes the block before has.
#[derive(Clone, Copy, Default)]
struct Position {
    input: usize,
    output: usize,
    skip: usize,
}

/// How many blocks an output plane has.
fn n_blocks(p: &Plan) -> usize {
    p.oh * p.ow.div_ceil(LANES)
}

/// Block `i` of an output plane.
#[inline(always)]
fn position(p: &Plan, i: usize) -> Position {
    let per_row = p.ow.div_ceil(LANES);
    let (row, at) = (i / per_row, i % per_row * LANES);
    let start = at.min(p.ow - LANES);
    Position { input: row * p.w + start, output: row * p.ow + start, skip: at - start }
}

#[inline(always)]
fn block<T: Float>(values: &[T], at: usize) -> &Block<T> {
    values[at..].first_chunk().expect("a block inside its plane")
}

/// `sum[tap][block] = sum over r of weights[r][tap] * source[base(r) + at[block]]`, for `T_` weights of which each term has
/// a run of its own in `weights`.
#[inline(always)]
fn tile<T: Float, const T_: usize>(
    source: &[T],
    at: [usize; POSITIONS],
    weights: &[T],
    mut bases: impl FnMut(usize) -> usize,
) -> [[Block<T>; POSITIONS]; T_] {
    let mut sums = [[[T::ZERO; LANES]; POSITIONS]; T_];
    for (r, weights) in weights.as_chunks::<T_>().0.iter().enumerate() {
        let base = bases(r);
        let blocks: [&Block<T>; POSITIONS] = std::array::from_fn(|i| block(source, base + at[i]));
        for (sums, &weight) in sums.iter_mut().zip(weights) {
            for (sum, block) in sums.iter_mut().zip(blocks) {
                for (s, &x) in sum.iter_mut().zip(block) {
                    *s = x.mul_add(weight, *s);
                }
            }
        }
    }
    sums
}

/// Visits the blocks of a plane in groups of [`POSITIONS`]; a short last group repeats its last block, which `n` leaves out.
#[inline(always)]
fn for_groups(p: &Plan, mut visit: impl FnMut([Position; POSITIONS], usize)) {
    let blocks = n_blocks(p);
    for first in (0..blocks).step_by(POSITIONS) {
        let n = POSITIONS.min(blocks - first);
        visit(std::array::from_fn(|i| position(p, first + i.min(n - 1))), n);
    }
}

/// Reorders `rows x terms` weights so that the weights of one tile lie together for each term: tiles of up to [`TAPS`] rows,
/// each `terms x rows of the tile`.
fn packed<T: Float>(device: &Device, rows: usize, terms: usize, weight: impl Fn(usize, usize) -> T) -> Storage {
    let room = Storage::stale(device, rows * terms * size_of::<T>());
    let mut out = room.write::<T>();
    let mut at = 0;
    for first in (0..rows).step_by(TAPS) {
        for term in 0..terms {
            for row in first..(first + TAPS).min(rows) {
                out[at] = weight(row, term);
                at += 1;
            }
        }
    }
    drop(out);
    room
}

pub(super) fn forward<T: Float>(device: &Device, x: &[T], w: &[T], b: Option<&[T]>, p: Plan, out: &mut [T]) {
    let terms = p.c * p.kh * p.kw;
    let room = packed(device, p.o, terms, |o, term| w[o * terms + term]);
    let weights = room.read::<T>();
    let weights = &weights[..];
    device.for_chunks(out, p.out_image(), |n, out| {
        let image = &x[n * p.image()..][..p.image()];
        device.arch().dispatch(|| {
            for first in (0..p.o).step_by(TAPS) {
                let weights = &weights[first * terms..];
                match p.o - first {
                    1 => forward_tiles::<T, 1>(image, &weights[..terms], b, p, first, out),
                    2 => forward_tiles::<T, 2>(image, &weights[..2 * terms], b, p, first, out),
                    3 => forward_tiles::<T, 3>(image, &weights[..3 * terms], b, p, first, out),
                    4 => forward_tiles::<T, 4>(image, &weights[..4 * terms], b, p, first, out),
                    _ => forward_tiles::<T, TAPS>(image, &weights[..TAPS * terms], b, p, first, out),
                }
            }
        });
    });
}

/// Output channels `first..first + T_` of one image.
#[inline(always)]
fn forward_tiles<T: Float, const T_: usize>(image: &[T], weights: &[T], b: Option<&[T]>, p: Plan, first: usize, out: &mut [T]) {
    let area = p.oh * p.ow;
    for_groups(&p, |positions, _| {
        // The terms run over channel, kernel row and kernel column, in this order.
        let (mut plane, mut row, mut col) = (0, 0, 0);
        let sums = tile::<T, T_>(image, positions.map(|at| at.input), weights, |_| {
            let base = plane + row * p.w + col;
            col += 1;
            if col == p.kw {
                (row, col) = (row + 1, 0);
                if row == p.kh {
                    (plane, row) = (plane + p.h * p.w, 0);
                }
            }
            base
        });
        for (o, sums) in sums.iter().enumerate() {
            let bias = b.map_or(T::ZERO, |b| b[first + o]);
            let plane = &mut out[(first + o) * area..][..area];
            // Repeated and overlapping blocks write the same values again.
            for (at, sum) in positions.iter().zip(sums) {
                plane[at.output..][..LANES].iter_mut().zip(sum).for_each(|(o, &s)| *o = s + bias);
            }
        }
    });
}

pub(super) fn image_gradient<T: Float>(device: &Device, g: &[T], w: &[T], p: Plan, out: &mut [T]) {
    if p.kw > TAPS {
        return lowered::image_gradient(device, g, w, p, out);
    }
    // For each input channel and kernel row, the kernel's columns for each output channel.
    let terms = p.o * p.kw;
    let room = Storage::stale(device, p.c * p.kh * terms * size_of::<T>());
    {
        let mut weights = room.write::<T>();
        for (i, run) in weights[..p.c * p.kh * terms].chunks_exact_mut(terms).enumerate() {
            for (o, columns) in run.chunks_exact_mut(p.kw).enumerate() {
                columns.copy_from_slice(&w[(o * p.c * p.kh + i) * p.kw..][..p.kw]);
            }
        }
    }
    let weights = room.read::<T>();
    let weights = &weights[..];
    device.for_chunks(out, p.image(), |n, image| {
        let g = &g[n * p.out_image()..][..p.out_image()];
        image.fill(T::ZERO);
        device.arch().dispatch(|| {
            for (i, weights) in weights[..p.c * p.kh * terms].chunks_exact(terms).enumerate() {
                let (channel, ky) = (i / p.kh, i % p.kh);
                let plane = &mut image[channel * p.h * p.w..][..p.h * p.w];
                match p.kw {
                    1 => image_tiles::<T, 1>(g, weights, p, ky, plane),
                    2 => image_tiles::<T, 2>(g, weights, p, ky, plane),
                    3 => image_tiles::<T, 3>(g, weights, p, ky, plane),
                    4 => image_tiles::<T, 4>(g, weights, p, ky, plane),
                    _ => image_tiles::<T, TAPS>(g, weights, p, ky, plane),
                }
            }
        });
    });
}

/// Adds to one input plane what kernel row `ky` sends back from every output channel.
#[inline(always)]
fn image_tiles<T: Float, const T_: usize>(g: &[T], weights: &[T], p: Plan, ky: usize, plane: &mut [T]) {
    let area = p.oh * p.ow;
    for_groups(&p, |positions, n| {
        let sums = tile::<T, T_>(g, positions.map(|at| at.output), weights, |o| o * area);
        for (kx, sums) in sums.iter().enumerate() {
            for (at, sum) in positions.iter().zip(sums).take(n) {
                let start = at.input + ky * p.w + kx;
                let target = &mut plane[start..][..LANES];
                if at.skip == 0 {
                    target.iter_mut().zip(sum).for_each(|(o, &s)| *o += s);
                } else {
                    target.iter_mut().zip(sum).skip(at.skip).for_each(|(o, &s)| *o += s);
                }
            }
        }
    });
}

/// Output channels that share the loaded pixels of one kernel-gradient tile.
const CHANNELS: usize = 4;

pub(super) fn kernel_gradient<T: Float>(device: &Device, x: &[T], g: &[T], p: Plan, out: &mut [T]) {
    if p.kw > TAPS {
        return lowered::kernel_gradient(device, x, g, p, out);
    }
    sum_over_runs(device, p.n, out, |images, sum| {
        let images = || images.clone().map(|n| (&x[n * p.image()..][..p.image()], &g[n * p.out_image()..][..p.out_image()]));
        device.arch().dispatch(|| {
            for first in (0..p.o).step_by(CHANNELS) {
                // A short last tile reaches back over the one before and computes the same values again.
                let first = first.min(p.o.saturating_sub(CHANNELS));
                match (p.kw, p.o < CHANNELS) {
                    (1, false) => kernel_tiles::<T, 1, CHANNELS>(images(), p, first, sum),
                    (2, false) => kernel_tiles::<T, 2, CHANNELS>(images(), p, first, sum),
                    (3, false) => kernel_tiles::<T, 3, CHANNELS>(images(), p, first, sum),
                    (4, false) => kernel_tiles::<T, 4, CHANNELS>(images(), p, first, sum),
                    (_, false) => kernel_tiles::<T, TAPS, CHANNELS>(images(), p, first, sum),
                    (_, true) => {
                        for o in 0..p.o {
                            match p.kw {
                                1 => kernel_tiles::<T, 1, 1>(images(), p, o, sum),
                                2 => kernel_tiles::<T, 2, 1>(images(), p, o, sum),
                                3 => kernel_tiles::<T, 3, 1>(images(), p, o, sum),
                                4 => kernel_tiles::<T, 4, 1>(images(), p, o, sum),
                                _ => kernel_tiles::<T, TAPS, 1>(images(), p, o, sum),
                            }
                        }
                    }
                }
            }
        });
    });
}

/// The gradients of kernels `first..first + C_` over some images, for every input channel and kernel row. A tile keeps one
/// block of sums for each kernel and kernel column; the lanes are added up at the end.
#[inline(always)]
fn kernel_tiles<'a, T: Float, const T_: usize, const C_: usize>(
    images: impl Iterator<Item = (&'a [T], &'a [T])> + Clone,
    p: Plan,
    first: usize,
    out: &mut [T],
) {
    let area = p.oh * p.ow;
    let per_row = p.ow / LANES;
    let rest = p.ow % LANES;
    for channel in 0..p.c {
        for ky in 0..p.kh {
            let mut sums = [[[T::ZERO; LANES]; T_]; C_];
            for (image, g) in images.clone() {
                let plane = &image[channel * p.h * p.w..][..p.h * p.w];
                let g: [&[T]; C_] = std::array::from_fn(|c| &g[(first + c) * area..][..area]);
                for row in 0..p.oh {
                    let pixels = &plane[(row + ky) * p.w..][..p.w];
                    let g: [&[T]; C_] = std::array::from_fn(|c| &g[c][row * p.ow..][..p.ow]);
                    for at in (0..per_row).map(|i| i * LANES) {
                        let pixels: [&Block<T>; T_] = std::array::from_fn(|kx| block(pixels, at + kx));
                        for (sums, g) in sums.iter_mut().zip(g) {
                            add_products(sums, pixels, block(g, at));
                        }
                    }
                    if rest > 0 {
                        let at = p.ow - LANES;
                        let pixels: [&Block<T>; T_] = std::array::from_fn(|kx| block(pixels, at + kx));
                        for (sums, g) in sums.iter_mut().zip(g) {
                            let mut last = *block(g, at);
                            last[..LANES - rest].fill(T::ZERO);
                            add_products(sums, pixels, &last);
                        }
                    }
                }
            }
            for (c, sums) in sums.iter().enumerate() {
                for (kx, lanes) in sums.iter().enumerate() {
                    let total = lanes.iter().fold(T::ZERO, |sum, &x| sum + x);
                    out[(((first + c) * p.c + channel) * p.kh + ky) * p.kw + kx] = total;
                }
            }
        }
    }
}

#[inline(always)]
fn add_products<T: Float, const T_: usize>(sums: &mut [Block<T>; T_], pixels: [&Block<T>; T_], g: &Block<T>) {
    for (sum, pixels) in sums.iter_mut().zip(pixels) {
        for (s, (&x, &g)) in sum.iter_mut().zip(pixels.iter().zip(g)) {
            *s = x.mul_add(g, *s);
        }
    }
}
