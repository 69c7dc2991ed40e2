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

/// `sum[tap][block] = sum over r of weights[r][tap] * source[bases[r] + at[block]]`, for `T_` weights of which each term has
/// a run of its own in `weights`.
#[inline(always)]
fn tile<T: Float, const T_: usize>(
    source: &[T],
    at: [usize; POSITIONS],
    weights: &[T],
    bases: &[i64],
) -> [[Block<T>; POSITIONS]; T_] {
    let mut sums = [[[T::ZERO; LANES]; POSITIONS]; T_];
    for (weights, &base) in weights.as_chunks::<T_>().0.iter().zip(bases) {
        let mut blocks = [[T::ZERO; LANES]; POSITIONS];
        for (to, &at) in blocks.iter_mut().zip(&at) {
            *to = *block(source, base as usize + at);
        }
        for (sums, &weight) in sums.iter_mut().zip(weights) {
            for (sum, block) in sums.iter_mut().zip(&blocks) {
                for (s, &x) in sum.iter_mut().zip(block) {
                    *s = x.mul_add(weight, *s);
                }
            }
        }
    }
    sums
}

/// The [`POSITIONS`] blocks of a plane from block `first` on, and how many of them there are: a short last group repeats its
/// last block.
#[inline(always)]
fn group(p: &Plan, first: usize) -> ([Position; POSITIONS], usize) {
    let n = POSITIONS.min(n_blocks(p) - first);
    let mut positions = [Position::default(); POSITIONS];
    for (i, at) in positions.iter_mut().enumerate() {
        *at = position(p, first + i.min(n - 1));
    }
    (positions, n)
}

/// Reorders `rows x terms` weights so that the weights of one tile lie together for each term: tiles of up to [`TAPS`] rows,
/// each `terms x rows of the tile`.
fn packed<T: Float>(
    device: &Device,
    rows: usize,
    terms: usize,
    weight: impl Fn(usize, usize) -> T,
) -> Storage {
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

/// `position(0..n)` in a buffer of the device's cache.
fn numbered(device: &Device, n: usize, position: impl Fn(usize) -> usize) -> Storage {
    let room = Storage::stale(device, n * size_of::<i64>());
    room.write::<i64>()[..n].iter_mut().enumerate().for_each(|(i, to)| *to = position(i) as i64);
    room
}

pub(super) fn forward<T: Float>(device: &Device, x: &[T], w: &[T], b: Option<&[T]>, p: Plan, out: &mut [T]) {
    let terms = p.c * p.kh * p.kw;
    let room = packed(device, p.o, terms, |o, term| w[o * terms + term]);
    let weights = room.read::<T>();
    let weights = &weights[..];
    let room = numbered(device, terms, |i| (i / (p.kh * p.kw) * p.h + i / p.kw % p.kh) * p.w + i % p.kw);
    let bases = room.read::<i64>();
    let bases = &bases[..];
    device.for_chunks(out, p.out_image(), |n, out| {
        let image = &x[n * p.image()..][..p.image()];
        device.arch().dispatch(ForwardImage { image, weights, b, p, bases, out });
    });
}

/// All output channels of one image. A struct rather than a closure, because only a function that is always inlined is sure
/// to be compiled for the vectors that `dispatch` found; that holds for every kernel of this file.
struct ForwardImage<'a, T> {
    image: &'a [T],
    weights: &'a [T],
    b: Option<&'a [T]>,
    p: Plan,
    bases: &'a [i64],
    out: &'a mut [T],
}

impl<T: Float> pulp::NullaryFnOnce for ForwardImage<'_, T> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let ForwardImage { image, weights, b, p, bases, out } = self;
        let terms = p.c * p.kh * p.kw;
        for first in (0..p.o).step_by(TAPS) {
            let weights = &weights[first * terms..];
            match p.o - first {
                1 => forward_tiles::<T, 1>(image, &weights[..terms], b, p, first, bases, out),
                2 => forward_tiles::<T, 2>(image, &weights[..2 * terms], b, p, first, bases, out),
                3 => forward_tiles::<T, 3>(image, &weights[..3 * terms], b, p, first, bases, out),
                4 => forward_tiles::<T, 4>(image, &weights[..4 * terms], b, p, first, bases, out),
                _ => forward_tiles::<T, TAPS>(image, &weights[..TAPS * terms], b, p, first, bases, out),
            }
        }
    }
}

/// Output channels `first..first + T_` of one image.
#[inline(always)]
fn forward_tiles<T: Float, const T_: usize>(
    image: &[T],
    weights: &[T],
    b: Option<&[T]>,
    p: Plan,
    first: usize,
    bases: &[i64],
    out: &mut [T],
) {
    let area = p.oh * p.ow;
    for first_block in (0..n_blocks(&p)).step_by(POSITIONS) {
        let (positions, _) = group(&p, first_block);
        let sums = tile::<T, T_>(image, positions.map(|at| at.input), weights, bases);
        for (o, sums) in sums.iter().enumerate() {
            let bias = b.map_or(T::ZERO, |b| b[first + o]);
            let plane = &mut out[(first + o) * area..][..area];
            // Repeated and overlapping blocks write the same values again.
            for (at, sum) in positions.iter().zip(sums) {
                plane[at.output..][..LANES].iter_mut().zip(sum).for_each(|(o, &s)| *o = s + bias);
            }
        }
    }
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
    let room = numbered(device, p.o, |o| o * p.oh * p.ow);
    let bases = room.read::<i64>();
    let bases = &bases[..];
    device.for_chunks(out, p.image(), |n, image| {
        let g = &g[n * p.out_image()..][..p.out_image()];
        device.arch().dispatch(BackImage { g, weights, p, bases, image });
    });
}

/// The gradient of one image.
struct BackImage<'a, T> {
    g: &'a [T],
    weights: &'a [T],
    p: Plan,
    bases: &'a [i64],
    image: &'a mut [T],
}

impl<T: Float> pulp::NullaryFnOnce for BackImage<'_, T> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let BackImage { g, weights, p, bases, image } = self;
        let terms = p.o * p.kw;
        image.fill(T::ZERO);
        for (i, weights) in weights[..p.c * p.kh * terms].chunks_exact(terms).enumerate() {
            let (channel, ky) = (i / p.kh, i % p.kh);
            let plane = &mut image[channel * p.h * p.w..][..p.h * p.w];
            match p.kw {
                1 => image_tiles::<T, 1>(g, weights, p, ky, bases, plane),
                2 => image_tiles::<T, 2>(g, weights, p, ky, bases, plane),
                3 => image_tiles::<T, 3>(g, weights, p, ky, bases, plane),
                4 => image_tiles::<T, 4>(g, weights, p, ky, bases, plane),
                _ => image_tiles::<T, TAPS>(g, weights, p, ky, bases, plane),
            }
        }
    }
}

/// Adds to one input plane what kernel row `ky` sends back from every output channel.
#[inline(always)]
fn image_tiles<T: Float, const T_: usize>(
    g: &[T],
    weights: &[T],
    p: Plan,
    ky: usize,
    bases: &[i64],
    plane: &mut [T],
) {
    for first_block in (0..n_blocks(&p)).step_by(POSITIONS) {
        let (positions, n) = group(&p, first_block);
        let sums = tile::<T, T_>(g, positions.map(|at| at.output), weights, bases);
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
    }
}

/// One block of sums for each kernel and kernel column of a tile.
type Sums<T, const T_: usize, const C_: usize> = [[Block<T>; T_]; C_];

/// Output channels that share the loaded pixels of one kernel-gradient tile.
const CHANNELS: usize = 4;

pub(super) fn kernel_gradient<T: Float>(device: &Device, x: &[T], g: &[T], p: Plan, out: &mut [T]) {
    if p.kw > TAPS {
        return lowered::kernel_gradient(device, x, g, p, out);
    }
    // Where each block starts in a plane of the input and of the output: whole blocks, then the last ones of rows.
    let per_row = p.ow / LANES;
    let at = |i: usize| [i / per_row * p.w + i % per_row * LANES, i / per_row * p.ow + i % per_row * LANES];
    let whole = numbered(device, 2 * p.oh * per_row, |i| at(i / 2)[i % 2]);
    let whole = whole.read::<i64>();
    let whole = &whole.as_chunks::<2>().0[..p.oh * per_row];
    let n_rest = if p.ow.is_multiple_of(LANES) { 0 } else { p.oh };
    let rest =
        numbered(device, 2 * n_rest, |i| [i / 2 * p.w + p.ow - LANES, i / 2 * p.ow + p.ow - LANES][i % 2]);
    let rest = rest.read::<i64>();
    let rest = &rest.as_chunks::<2>().0[..n_rest];
    sum_over_runs(device, p.n, out, |images, out| {
        let x = &x[images.start * p.image()..images.end * p.image()];
        let g = &g[images.start * p.out_image()..images.end * p.out_image()];
        device.arch().dispatch(KernelSums { x, g, p, whole, rest, out });
    });
}

/// The gradients of all kernels over a run of images.
struct KernelSums<'a, T> {
    x: &'a [T],
    g: &'a [T],
    p: Plan,
    whole: &'a [[i64; 2]],
    rest: &'a [[i64; 2]],
    out: &'a mut [T],
}

impl<T: Float> pulp::NullaryFnOnce for KernelSums<'_, T> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let KernelSums { x, g, p, whole, rest, out } = self;
        match p.kw {
            1 => all_kernels::<T, 1>(x, g, p, whole, rest, out),
            2 => all_kernels::<T, 2>(x, g, p, whole, rest, out),
            3 => all_kernels::<T, 3>(x, g, p, whole, rest, out),
            4 => all_kernels::<T, 4>(x, g, p, whole, rest, out),
            _ => all_kernels::<T, TAPS>(x, g, p, whole, rest, out),
        }
    }
}

#[inline(always)]
fn all_kernels<T: Float, const T_: usize>(
    x: &[T],
    g: &[T],
    p: Plan,
    whole: &[[i64; 2]],
    rest: &[[i64; 2]],
    out: &mut [T],
) {
    let tiled = p.o / CHANNELS * CHANNELS;
    for first in (0..tiled).step_by(CHANNELS) {
        kernel_tiles::<T, T_, CHANNELS>(x, g, p, first, whole, rest, out);
    }
    for first in tiled..p.o {
        kernel_tiles::<T, T_, 1>(x, g, p, first, whole, rest, out);
    }
}

/// The gradients of kernels `first..first + C_` over some images, for every input channel and kernel row. A tile keeps one
/// block of sums for each kernel and kernel column; the lanes are added up at the end.
#[inline(always)]
fn kernel_tiles<T: Float, const T_: usize, const C_: usize>(
    x: &[T],
    g: &[T],
    p: Plan,
    first: usize,
    whole: &[[i64; 2]],
    rest: &[[i64; 2]],
    out: &mut [T],
) {
    let area = p.oh * p.ow;
    let skip = LANES - p.ow % LANES;
    for channel in 0..p.c {
        for ky in 0..p.kh {
            let mut total = [[[T::ZERO; LANES]; T_]; C_];
            for (image, g) in x.chunks_exact(p.image()).zip(g.chunks_exact(p.out_image())) {
                let pixels = &image[channel * p.h * p.w + ky * p.w..];
                let g = &g[first * area..][..C_ * area];
                total = products(total, pixels, g, area, whole);
                if !rest.is_empty() {
                    total = rest_products(total, pixels, g, area, rest, skip);
                }
            }
            for (c, sums) in total.iter().enumerate() {
                for (kx, lanes) in sums.iter().enumerate() {
                    let total = lanes.iter().fold(T::ZERO, |sum, &x| sum + x);
                    out[(((first + c) * p.c + channel) * p.kh + ky) * p.kw + kx] = total;
                }
            }
        }
    }
}

/// `sums[c][kx] += sum over blocks of pixels[at.0 + kx] * g[c * area + at.1]`, lane by lane.
#[inline(always)]
fn products<T: Float, const T_: usize, const C_: usize>(
    mut sums: Sums<T, T_, C_>,
    pixels: &[T],
    g: &[T],
    area: usize,
    blocks: &[[i64; 2]],
) -> Sums<T, T_, C_> {
    // The columns overlap. Told so, the compiler loads each pixel once and builds the vectors by shuffling, at half the speed;
    // so it isn't told.
    let mut shifts: [usize; T_] = [0; T_];
    shifts.iter_mut().enumerate().for_each(|(kx, shift)| *shift = std::hint::black_box(kx).min(T_ - 1));
    // All blocks are checked before the loop instead of eighteen bounds in every turn of it, which cost a third of the time.
    for &[at, at_g] in blocks {
        let (end, end_g) = (at as usize + T_ - 1 + LANES, (C_ - 1) * area + at_g as usize + LANES);
        assert!(
            at >= 0 && at_g >= 0 && end <= pixels.len() && end_g <= g.len(),
            "a block outside of its plane"
        );
    }
    // SAFETY: for each element of `blocks`, the assertion above puts `at + shift + LANES` (a shift being below T_) inside
    // `pixels`, and `c * area + at_g + LANES` for each c below C_ inside `g`.
    let load = |values: &[T], at: usize| -> Block<T> { unsafe { *values.as_ptr().add(at).cast() } };
    for &[at, at_g] in blocks {
        let mut columns = [[T::ZERO; LANES]; T_];
        for (to, shift) in columns.iter_mut().zip(shifts) {
            *to = load(pixels, at as usize + shift);
        }
        for (c, sums) in sums.iter_mut().enumerate() {
            let g = load(g, c * area + at_g as usize);
            for (sum, pixels) in sums.iter_mut().zip(&columns) {
                for ((s, &x), &g) in sum.iter_mut().zip(pixels).zip(&g) {
                    *s = x.mul_add(g, *s);
                }
            }
        }
    }
    sums
}

/// As [`products`], for blocks whose first `skip` lanes don't count.
#[inline(always)]
fn rest_products<T: Float, const T_: usize, const C_: usize>(
    mut sums: Sums<T, T_, C_>,
    pixels: &[T],
    g: &[T],
    area: usize,
    blocks: &[[i64; 2]],
    skip: usize,
) -> Sums<T, T_, C_> {
    for &[at, at_g] in blocks {
        for (c, sums) in sums.iter_mut().enumerate() {
            let g = block(g, c * area + at_g as usize);
            for (kx, sum) in sums.iter_mut().enumerate() {
                let pixels = block(pixels, at as usize + kx);
                for ((s, &x), &g) in sum.iter_mut().zip(pixels).zip(g).skip(skip) {
                    *s = x.mul_add(g, *s);
                }
            }
        }
    }
    sums
}
