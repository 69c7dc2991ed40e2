//! Convolution straight from the image, for few channels and stride 1: the work of the tutorials' MNIST network.
//!
//! Laying out pixels as a matrix multiplies the bytes moved by the kernel's area, which costs more than the arithmetic when a
//! pixel meets only ten or twenty channels. Here a *block* is [`LANES`] neighbouring pixels of an output row. A tile of
//! [`POSITIONS`] blocks times up to [`TAPS`] weights stays in registers while it sums: each block that is loaded meets every
//! weight of the tile, each weight every block.
//!
//! Where the width isn't a multiple of [`LANES`], the last block of a row reaches back over the one before it; the lanes that
//! both cover are its `skip` first, which sums leave out.

use super::lowered::{RUNS, sum_over_runs};
use super::{Plan, lowered};
use crate::cpu::gemm::Multiplied;
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
/// a run of its own in `weights`, and `P_` blocks.
#[inline(always)]
fn tile<T: Float, const T_: usize, const P_: usize>(
    source: &[T],
    at: [usize; P_],
    weights: &[T],
    bases: &[i64],
) -> [[Block<T>; P_]; T_] {
    let mut sums = [[[T::ZERO; LANES]; P_]; T_];
    for (weights, &base) in weights.as_chunks::<T_>().0.iter().zip(bases) {
        let mut blocks = [[T::ZERO; LANES]; P_];
        for (to, &at) in blocks.iter_mut().zip(&at) {
            *to = *block(source, at.wrapping_add_signed(base as isize));
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
        let sums = tile::<T, T_, POSITIONS>(image, positions.map(|at| at.input), weights, bases);
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

pub(super) fn image_gradient<T: Multiplied>(device: &Device, g: &[T], w: &[T], p: Plan, out: &mut [T]) {
    if p.kw > TAPS {
        return lowered::image_gradient(device, g, w, p, out);
    }
    // A term is a kernel row and an output channel; for each input channel and term, the kernel's columns.
    let terms = p.kh * p.o;
    let room = Storage::stale(device, p.c * terms * p.kw * size_of::<T>());
    {
        let mut weights = room.write::<T>();
        for (i, columns) in weights[..p.c * terms * p.kw].chunks_exact_mut(p.kw).enumerate() {
            let (channel, ky, o) = (i / terms, i % terms / p.o, i % p.o);
            columns.copy_from_slice(&w[((o * p.c + channel) * p.kh + ky) * p.kw..][..p.kw]);
        }
    }
    let weights = room.read::<T>();
    let weights = &weights[..];
    // Input row y meets kernel row ky at output row y - ky.
    let room = Storage::stale(device, terms * size_of::<i64>());
    room.write::<i64>()[..terms].iter_mut().enumerate().for_each(|(i, to)| {
        *to = (i % p.o * p.oh * p.ow) as i64 - (i / p.o * p.ow) as i64;
    });
    let bases = room.read::<i64>();
    let bases = &bases[..terms];
    device.for_chunks(out, POSITIONS * p.image(), |chunk, images| {
        let g = &g[chunk * POSITIONS * p.out_image()..][..images.len() / p.image() * p.out_image()];
        device.arch().dispatch(BackImages { g, weights, p, bases, images });
    });
}

/// The gradients of up to [`POSITIONS`] images.
struct BackImages<'a, T> {
    g: &'a [T],
    weights: &'a [T],
    p: Plan,
    bases: &'a [i64],
    images: &'a mut [T],
}

impl<T: Float> pulp::NullaryFnOnce for BackImages<'_, T> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let BackImages { g, weights, p, bases, images } = self;
        match p.kw {
            1 => back_images::<T, 1>(g, weights, p, bases, images),
            2 => back_images::<T, 2>(g, weights, p, bases, images),
            3 => back_images::<T, 3>(g, weights, p, bases, images),
            4 => back_images::<T, 4>(g, weights, p, bases, images),
            _ => back_images::<T, TAPS>(g, weights, p, bases, images),
        }
    }
}

#[inline(always)]
fn back_images<T: Float, const T_: usize>(g: &[T], weights: &[T], p: Plan, bases: &[i64], images: &mut [T]) {
    images.fill(T::ZERO);
    if images.len() == POSITIONS * p.image() {
        return image_rows::<T, T_, POSITIONS>(g, weights, p, bases, images);
    }
    for (g, image) in g.chunks_exact(p.out_image()).zip(images.chunks_exact_mut(p.image())) {
        image_rows::<T, T_, 1>(g, weights, p, bases, image);
    }
}

/// The gradients of `P_` images. A tile sums, for one row of one channel and for each kernel column, what all output channels
/// and kernel rows send back to it; the blocks that meet each weight are the same block of each image.
#[inline(always)]
fn image_rows<T: Float, const T_: usize, const P_: usize>(
    g: &[T],
    weights: &[T],
    p: Plan,
    bases: &[i64],
    images: &mut [T],
) {
    for (channel, weights) in weights[..p.c * bases.len() * T_].chunks_exact(bases.len() * T_).enumerate() {
        for y in 0..p.h {
            let terms = (y + 1).saturating_sub(p.oh) * p.o..(y + 1).min(p.kh) * p.o;
            let (weights, bases) = (&weights[terms.start * T_..terms.end * T_], &bases[terms]);
            for i in 0..p.ow.div_ceil(LANES) {
                let Position { output: x, skip, .. } = position(&p, i);
                let at: [usize; P_] = std::array::from_fn(|image| image * p.out_image() + y * p.ow + x);
                let sums = tile::<T, T_, P_>(g, at, weights, bases);
                for (kx, sums) in sums.iter().enumerate() {
                    for (image, sum) in images.chunks_exact_mut(p.image()).zip(sums) {
                        let target = &mut image[(channel * p.h + y) * p.w + x + kx..][..LANES];
                        if skip == 0 {
                            target.iter_mut().zip(sum).for_each(|(o, &s)| *o += s);
                        } else {
                            target.iter_mut().zip(sum).skip(skip).for_each(|(o, &s)| *o += s);
                        }
                    }
                }
            }
        }
    }
}

/// One block of sums for each kernel and kernel column of a tile.
type Sums<T, const T_: usize, const C_: usize> = [[Block<T>; T_]; C_];

/// Output pixels of a run of images, as far as there are as many: their products are summed lane by lane, which has to be worth the
/// sums over lanes at the end.
const LEAST_PIXELS: usize = 512;

/// Output channels that share the loaded pixels of one kernel-gradient tile.
const CHANNELS: usize = 4;

pub(super) fn kernel_gradient<T: Multiplied>(device: &Device, x: &[T], g: &[T], p: Plan, out: &mut [T]) {
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
    let runs = (p.n * p.oh * p.ow / LEAST_PIXELS).clamp(1, RUNS);
    sum_over_runs(device, runs, p.n, out, |images, out| {
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
    let skip = LANES - p.ow % LANES;
    for channel in 0..p.c {
        for ky in 0..p.kh {
            let start = [(channel * p.h + ky) * p.w, first * p.oh * p.ow];
            let mut total: Sums<T, T_, C_> = products(x, g, p, start, whole);
            if !rest.is_empty() {
                rest_products(&mut total, x, g, p, start, rest, skip);
            }
            for (c, sums) in total.iter().enumerate() {
                for (kx, lanes) in sums.iter().enumerate() {
                    out[(((first + c) * p.c + channel) * p.kh + ky) * p.kw + kx] = sum_of(lanes);
                }
            }
        }
    }
}

/// The sum of the lanes, half by half.
#[inline(always)]
fn sum_of<T: Float>(lanes: &Block<T>) -> T {
    let four: [T; 4] = std::array::from_fn(|i| lanes[i] + lanes[i + 4]);
    let two: [T; 2] = std::array::from_fn(|i| four[i] + four[i + 2]);
    two[0] + two[1]
}

/// `sums[c][kx] = sum over images and blocks of x[start.0 + at.0 + kx] * g[start.1 + c * area + at.1]`, lane by lane, where
/// places count from the start of an image.
#[inline(always)]
fn products<T: Float, const T_: usize, const C_: usize>(
    x: &[T],
    g: &[T],
    p: Plan,
    start: [usize; 2],
    blocks: &[[i64; 2]],
) -> Sums<T, T_, C_> {
    // The columns overlap. Told so, the compiler loads each pixel once and builds the vectors by shuffling, at half the speed;
    // so it isn't told.
    let mut shifts: [usize; T_] = [0; T_];
    shifts.iter_mut().enumerate().for_each(|(kx, shift)| *shift = std::hint::black_box(kx).min(T_ - 1));
    // All blocks are checked before the loop instead of eighteen bounds in every turn of it, which cost a third of the time.
    let area = p.oh * p.ow;
    for &[at, at_g] in blocks {
        let end = start[0] + at as usize + T_ - 1 + LANES;
        let end_g = start[1] + (C_ - 1) * area + at_g as usize + LANES;
        assert!(
            at >= 0 && at_g >= 0 && end <= p.image() && end_g <= p.out_image(),
            "a block outside of its image"
        );
    }
    // SAFETY: for each element of `blocks`, the assertion above puts `start.0 + at + shift + LANES` (a shift being below T_)
    // inside an image of `p.image()` elements, and `start.1 + c * area + at_g + LANES` for each c below C_ inside one of
    // `p.out_image()`; the loads below are from such images, which `chunks_exact` made.
    let load = |values: &[T], at: usize| -> Block<T> { unsafe { *values.as_ptr().add(at).cast() } };
    let mut sums = [[[T::ZERO; LANES]; T_]; C_];
    for (image, g) in x.chunks_exact(p.image()).zip(g.chunks_exact(p.out_image())) {
        for &[at, at_g] in blocks {
            let mut columns = [[T::ZERO; LANES]; T_];
            for (to, shift) in columns.iter_mut().zip(shifts) {
                *to = load(image, start[0] + at as usize + shift);
            }
            for (c, sums) in sums.iter_mut().enumerate() {
                let g = load(g, start[1] + c * area + at_g as usize);
                for (sum, pixels) in sums.iter_mut().zip(&columns) {
                    for ((s, &x), &g) in sum.iter_mut().zip(pixels).zip(&g) {
                        *s = x.mul_add(g, *s);
                    }
                }
            }
        }
    }
    sums
}

/// Adds to `sums` what [`products`] would give for blocks whose first `skip` lanes don't count.
#[inline(always)]
fn rest_products<T: Float, const T_: usize, const C_: usize>(
    sums: &mut Sums<T, T_, C_>,
    x: &[T],
    g: &[T],
    p: Plan,
    start: [usize; 2],
    blocks: &[[i64; 2]],
    skip: usize,
) {
    let area = p.oh * p.ow;
    for (image, g) in x.chunks_exact(p.image()).zip(g.chunks_exact(p.out_image())) {
        for &[at, at_g] in blocks {
            for (c, sums) in sums.iter_mut().enumerate() {
                let g = block(g, start[1] + c * area + at_g as usize);
                for (kx, sum) in sums.iter_mut().enumerate() {
                    let pixels = block(image, start[0] + at as usize + kx);
                    for ((s, &x), &g) in sum.iter_mut().zip(pixels).zip(g).skip(skip) {
                        *s = x.mul_add(g, *s);
                    }
                }
            }
        }
    }
}
