//! Causal self-attention of several heads, without the scores ever being stored whole. Dao, Fu, Ermon, Rudra and Re,
//! "FlashAttention: Fast and Memory-Efficient Exact Attention with IO-Awareness", <https://arxiv.org/abs/2205.14135>.
//!
//! A task is one head of one sample. It goes through the scores in blocks of [`BLOCK`] queries and as many keys, which stay in
//! the first cache. Forward, each query keeps the largest score so far, the sum of the exponentials of its scores less that, and
//! the sum of values that they weigh; when a larger score comes, both sums are scaled down. What is left of the scores is one
//! number a query, the logarithm of the sum of their exponentials. Backward, the blocks are computed once more, and that number
//! makes shares of them at once.
//!
//! Positions and the numbers of a head are filled up with zeros to whole vectors and tiles. Zeros that stand for queries have no
//! gradient, and keys behind all others are seen by nobody. Where only some positions ask, zeros stand for the other queries, and
//! blocks of none of them are left out; the others are the same blocks, so what a query comes to has the same bits. The order of every sum depends on the sizes alone, so the bits don't
//! depend on the number of threads.

mod heads;
mod products;

use crate::cpu::copy::transpose;
use crate::cpu::dropout::threshold;
use crate::cpu::in_lanes::InLanes;
use crate::cpu::lanes::{Lanes, MOST_LANES};
use crate::cpu::tile::by_panels;
use crate::dtype::{Float, with_float};
use crate::ops::attention::{Asked, Dropped};
use crate::ops::dropout::stream;
use crate::philox::Philox;
use crate::storage::Storage;
use crate::tensor::Tensor;
use heads::{Head, Heads, Sizes};
use products::{Gathered, Rows, Scattered, Scores};
use pulp::{Simd, WithSimd};
use std::marker::PhantomData;
use std::ops::Range;

/// Queries of a block, and keys.
const BLOCK: usize = 64;

/// `out (B, Q, H D)` = for each head of `qkv (B, T, 3 H D)` the values weighed by the softmax of the Q queries that are asked times
/// earlier keys; `lse (B, H, Q)` = the logarithm of the sum of the exponentials of a query's scores.
pub(crate) fn attention(
    qkv: &Tensor,
    asked: Asked,
    dropped: Option<Dropped<'_>>,
    out: &Tensor,
    lse: &Tensor,
) {
    let device = out.device();
    let _timer = device.time("attention");
    let sizes = Sizes::of(qkv, asked);
    if out.count() == 0 {
        return;
    }
    with_float!(out.dtype, "attention", T => {
        let source = qkv.read_contiguous::<T>("attention");
        let key = dropped.map(|dropped| dropped.key.map(|part| part.read_contiguous::<i64>("attention")));
        let key = key.as_ref().map(|[words, samples]| [&**words, &**samples]);
        let (mut out, mut lse) = (out.write_whole::<T>(), lse.write_whole::<T>());
        let out = Heads::new(&mut out, sizes, sizes.asking, 1);
        let source = &*source;
        device.for_chunks(&mut lse, sizes.asking, |i, lse| {
            let room = Room::<T>::new(device, sizes);
            // SAFETY: each index comes once.
            let out = unsafe { out.head(i) };
            let mask = dropped.zip(key).map(|(dropped, key)| Mask::of(dropped, key, sizes, i));
            device.arch().dispatch(Forward { sizes, head: i, source, mask, room, out, lse });
        });
    });
}

/// `out (B, T, 3 H D)` = the gradient of queries, keys and values, which came to the output `y`, from that of `y`, `grad (B, Q, H D)`.
pub(crate) fn attention_gradient(
    forward: [&Tensor; 3],
    asked: Asked,
    dropped: Option<Dropped<'_>>,
    grad: &Tensor,
    out: &Tensor,
) {
    let [qkv, y, lse] = forward;
    let device = out.device();
    let _timer = device.time("attention, gradient");
    let sizes = Sizes::of(qkv, asked);
    if out.count() == 0 {
        return;
    }
    with_float!(out.dtype, "attention", T => {
        let [source, y, lse, grad] = [qkv, y, lse, grad].map(|tensor| tensor.read_contiguous::<T>("attention"));
        let key = dropped.map(|dropped| dropped.key.map(|part| part.read_contiguous::<i64>("attention")));
        let key = key.as_ref().map(|[words, samples]| [&**words, &**samples]);
        let mut out = out.write_whole::<T>();
        if sizes.asking == 0 {
            return out.fill(T::ZERO);
        }
        let out = Heads::new(&mut out, sizes, sizes.time, 3);
        device.parallel_for(sizes.batch * sizes.heads, |i| {
            let room = Room::<T>::new(device, sizes);
            // SAFETY: each index comes once.
            let out = unsafe { out.head(i) };
            let mask = dropped.zip(key).map(|(dropped, key)| Mask::of(dropped, key, sizes, i));
            let lse = &lse[i * sizes.asking..][..sizes.asking];
            let values = Backward { sizes, head: i, source: &source, y: &y, grad: &grad, lse, mask, room, out };
            device.arch().dispatch(values);
        });
    });
}

/// Which shares of one head are dropped.
struct Mask<T> {
    numbers: Philox,
    threshold: u32,
    keep: T,
    /// The position of the head's first share among its sample's.
    start: u64,
    time: usize,
}

impl<T: Float> Mask<T> {
    fn of(
        Dropped { p, first, .. }: Dropped<'_>,
        [words, samples]: [&[i64]; 2],
        sizes: Sizes,
        i: usize,
    ) -> Mask<T> {
        let ([sample, head], time) = (sizes.head(i), sizes.time);
        Mask {
            numbers: stream([0, 1, 2].map(|i| words[i] as u64), samples[sample] as u64),
            threshold: threshold(p),
            keep: T::from_f64(1.0 / (1.0 - p)),
            start: ((first + head) * time * time) as u64,
            time,
        }
    }

    /// Multiplies the shares that query `query` has of the keys from `key` on: by 0 where they are dropped. What fills up the
    /// positions has no number.
    fn apply(&self, query: usize, key: usize, shares: &mut [T]) {
        if query >= self.time {
            return;
        }
        let count = shares.len().min(self.time.saturating_sub(key));
        let start = self.start + (query * self.time + key) as u64;
        let mut left = &mut shares[..count];
        let mut at = start;
        while !left.is_empty() {
            let words = self.numbers.block(at / 4);
            let words = &words[(at % 4) as usize..];
            let (now, later) = left.split_at_mut(words.len().min(left.len()));
            for (share, &word) in now.iter_mut().zip(words) {
                *share *= if word < self.threshold { T::ZERO } else { self.keep };
            }
            (at, left) = (at + words.len() as u64, later);
        }
    }
}

/// Memory of one task, from the device's cache.
struct Room<T> {
    storage: Storage,
    /// Positions and numbers of a head, filled up.
    time: usize,
    depth: usize,
    of: PhantomData<T>,
}

impl<T: Float> Room<T> {
    fn new(device: &crate::Device, sizes: Sizes) -> Room<T> {
        let [time, depth] = [sizes.time, sizes.depth].map(|size| size.next_multiple_of(MOST_LANES));
        let numbers = 8 * time * depth + BLOCK * (BLOCK + BLOCK.max(depth)) + 2 * time.max(BLOCK);
        let storage = Storage::stale(device, numbers * size_of::<T>());
        Room { storage, time, depth, of: PhantomData }
    }
}

/// The first slices of `room`, of these sizes.
fn parts<T, const N: usize>(mut room: &mut [T], sizes: [usize; N]) -> [&mut [T]; N] {
    sizes.map(|size| {
        let (part, rest) = std::mem::take(&mut room).split_at_mut(size);
        room = rest;
        part
    })
}

/// Fills `rows` of `width` numbers: at these positions with those of one head, of which `source` has the first, times `scale`, and
/// with zeros elsewhere and behind.
#[inline(always)]
fn fill_rows<T: Float>(
    (source, stride): (&[T], usize),
    at: Range<usize>,
    sizes: Sizes,
    scale: T,
    rows: &mut [T],
    width: usize,
) {
    for (t, row) in rows.chunks_exact_mut(width).enumerate() {
        let taken = if at.contains(&t) { sizes.depth } else { 0 };
        if taken > 0 {
            let source = &source[(t - at.start) * stride..][..taken];
            row.iter_mut().zip(source).for_each(|(to, &from)| *to = from * scale);
        }
        row[taken..].fill(T::ZERO);
    }
}

/// The same of the queries that are asked, of all of which `source` has those of one head, as scores want them.
#[inline(always)]
fn fill_queries<T: Float>(source: &[T], stride: usize, sizes: Sizes, rows: &mut [T], width: usize) {
    let asking = sizes.queries();
    fill_rows((&source[asking.start * stride..], stride), asking, sizes, scale(sizes), rows, width);
}

/// Fills `columns`, rows of `width`, with the numbers of one head, a column a position, and zeros behind.
#[inline(always)]
fn fill_columns<T: Float>(source: &[T], stride: usize, sizes: Sizes, columns: &mut [T], width: usize) {
    columns.fill(T::ZERO);
    transpose(source, stride, [sizes.time, sizes.depth], columns, |number| number * width);
}

/// The sum of `f` over pairs, in an order that depends on their number alone.
#[inline(always)]
fn dot<T: Float>(a: &[T], b: &[T]) -> T {
    let mut lanes = [T::ZERO; MOST_LANES];
    for (a, b) in a.chunks(MOST_LANES).zip(b.chunks(MOST_LANES)) {
        for (lane, (&a, &b)) in lanes.iter_mut().zip(a.iter().zip(b)) {
            *lane += a * b;
        }
    }
    lanes.iter().fold(T::ZERO, |sum, &lane| sum + lane)
}

/// The largest of a whole number of vectors.
#[inline(always)]
fn largest<T: Float>(row: &[T]) -> T {
    let mut lanes = [T::NEG_INFINITY; MOST_LANES];
    for part in row.as_chunks::<MOST_LANES>().0 {
        for (lane, &x) in lanes.iter_mut().zip(part) {
            *lane = x.larger(*lane);
        }
    }
    lanes.iter().fold(T::NEG_INFINITY, |most, &lane| most.larger(lane))
}

/// Replaces scores by the exponentials of what they are above `base`; gives their sum.
#[inline(always)]
fn exponentials<T: InLanes>(row: &mut [T], base: T) -> T {
    let mut lanes = [T::ZERO; MOST_LANES];
    for part in row.as_chunks_mut::<MOST_LANES>().0 {
        for (lane, x) in lanes.iter_mut().zip(part) {
            *x = (*x - base).exp_in_lanes();
            *lane += *x;
        }
    }
    lanes.iter().fold(T::ZERO, |sum, &lane| sum + lane)
}

/// One head of one sample, forward.
struct Forward<'a, T> {
    sizes: Sizes,
    head: usize,
    /// (B, T, 3, H, D)
    source: &'a [T],
    mask: Option<Mask<T>>,
    room: Room<T>,
    out: Head<'a, T>,
    /// (Q)
    lse: &'a mut [T],
}

/// One over the square root of the numbers of a head, by which scores are scaled.
fn scale<T: Float>(sizes: Sizes) -> T {
    T::from_f64(1.0 / (sizes.depth as f64).sqrt())
}

impl<T: Lanes + InLanes> WithSimd for Forward<'_, T> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Forward { sizes, head, source, mask, room, mut out, lse } = self;
        let ([sample, head], [time, depth]) = (sizes.head(head), [room.time, room.depth]);
        let mut held = room.storage.write::<T>();
        let block = [BLOCK * BLOCK, BLOCK * depth, BLOCK, BLOCK];
        let [queries, keys, values, scores, sums, most, total] = parts(
            &mut held,
            [time * depth, time * depth, time * depth, block[0], block[1], block[2], block[3]],
        );
        let (width, stride) = (sizes.width(), 3 * sizes.width());
        let of = |group: usize| &source[(sample * sizes.time * 3 + group) * width + head * sizes.depth..];
        let asking = sizes.queries();
        fill_queries(of(0), stride, sizes, queries, depth);
        fill_columns(of(1), stride, sizes, keys, time);
        fill_rows((of(2), stride), 0..sizes.time, sizes, T::ONE, values, depth);
        for first in (asking.start / BLOCK * BLOCK..asking.end).step_by(BLOCK) {
            let rows = BLOCK.min(time - first);
            sums[..rows * depth].fill(T::ZERO);
            most.fill(T::NEG_INFINITY);
            total.fill(T::ZERO);
            for key in (0..=first).step_by(BLOCK) {
                let (n_keys, behind) = (BLOCK.min(time - key), first - key);
                let mut product = Scores {
                    scores,
                    width: BLOCK,
                    rows,
                    queries: Rows { values: &queries[first * depth..], width: depth },
                    keys: Rows { values: &keys[key..], width: time },
                    behind,
                };
                by_panels(simd, n_keys, &mut product, &());
                for row in 0..rows {
                    let scores = &mut scores[row * BLOCK..][..n_keys];
                    scores[(behind + row + 1).min(n_keys)..].fill(T::NEG_INFINITY);
                    let above = largest(scores).larger(most[row]);
                    let fade = (most[row] - above).exp_in_lanes();
                    total[row] = total[row] * fade + exponentials(scores, above);
                    most[row] = above;
                    if fade != T::ONE {
                        sums[row * depth..][..depth].iter_mut().for_each(|sum| *sum *= fade);
                    }
                    if let Some(mask) = &mask {
                        mask.apply(first + row, key, scores);
                    }
                }
                let mut product = Gathered {
                    sums,
                    rows,
                    shares: Rows { values: scores, width: BLOCK },
                    values: Rows { values: &values[key * depth..], width: depth },
                    keys: n_keys,
                    behind,
                };
                by_panels(simd, depth, &mut product, &());
            }
            for t in first.max(asking.start)..asking.end.min(first + rows) {
                let (row, own) = (t - first, t - asking.start);
                let per = T::ONE / total[row];
                let sums = &sums[row * depth..][..sizes.depth];
                out.row(own, 0).iter_mut().zip(sums).for_each(|(out, &sum)| *out = sum * per);
                lse[own] = most[row] + total[row].ln();
            }
        }
    }
}

/// One head of one sample, backward.
struct Backward<'a, T> {
    sizes: Sizes,
    head: usize,
    /// (B, T, 3, H, D)
    source: &'a [T],
    /// (B, Q, H, D)
    y: &'a [T],
    /// (B, Q, H, D)
    grad: &'a [T],
    /// (Q)
    lse: &'a [T],
    mask: Option<Mask<T>>,
    room: Room<T>,
    /// (T, 3, D) of (B, T, 3, H, D)
    out: Head<'a, T>,
}

impl<T: Lanes + InLanes> WithSimd for Backward<'_, T> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Backward { sizes, head, source, y, grad, lse, mask, room, mut out } = self;
        let ([sample, head], [time, depth]) = (sizes.head(head), [room.time, room.depth]);
        let mut held = room.storage.write::<T>();
        let (whole, rest) = held.split_at_mut(8 * time * depth);
        let [queries, keys, key_columns, value_columns, grads, of_queries, of_keys, of_values] =
            parts(whole, [time * depth; 8]);
        let [shares, slopes, base, level] = parts(rest, [BLOCK * BLOCK, BLOCK * BLOCK, time, time]);
        let (width, stride) = (sizes.width(), 3 * sizes.width());
        let of = |group: usize| &source[(sample * sizes.time * 3 + group) * width + head * sizes.depth..];
        let (asking, all) = (sizes.queries(), 0..sizes.time);
        let start = sample * sizes.asking * width + head * sizes.depth;
        fill_queries(of(0), stride, sizes, queries, depth);
        fill_rows((of(1), stride), all.clone(), sizes, T::ONE, keys, depth);
        fill_columns(of(1), stride, sizes, key_columns, time);
        fill_columns(of(2), stride, sizes, value_columns, time);
        fill_rows((&grad[start..], width), asking.clone(), sizes, T::ONE, grads, depth);
        for sums in [&mut *of_queries, &mut *of_keys, &mut *of_values] {
            sums.fill(T::ZERO);
        }
        base.fill(T::ZERO);
        base[asking.clone()].copy_from_slice(lse);
        // The sum of a query's shares times their slopes is that of its output times the output's gradient.
        level.fill(T::ZERO);
        for (own, level) in level[asking.clone()].iter_mut().enumerate() {
            let row = start + own * width;
            *level = dot(&y[row..][..sizes.depth], &grad[row..][..sizes.depth]);
        }
        for key in (0..sizes.time).step_by(BLOCK) {
            let n_keys = BLOCK.min(time - key);
            for first in (key.max(asking.start / BLOCK * BLOCK)..asking.end).step_by(BLOCK) {
                let (rows, behind) = (BLOCK.min(time - first), first - key);
                let mut product = Scores {
                    scores: shares,
                    width: BLOCK,
                    rows,
                    queries: Rows { values: &queries[first * depth..], width: depth },
                    keys: Rows { values: &key_columns[key..], width: time },
                    behind,
                };
                by_panels(simd, n_keys, &mut product, &());
                let mut product = Scores {
                    scores: slopes,
                    width: BLOCK,
                    rows,
                    queries: Rows { values: &grads[first * depth..], width: depth },
                    keys: Rows { values: &value_columns[key..], width: time },
                    behind,
                };
                by_panels(simd, n_keys, &mut product, &());
                for row in 0..rows {
                    let seen = (behind + row + 1).min(n_keys);
                    let shares = &mut shares[row * BLOCK..][..n_keys];
                    let slopes = &mut slopes[row * BLOCK..][..n_keys];
                    shares[seen..].fill(T::NEG_INFINITY);
                    slopes[seen..].fill(T::ZERO);
                    exponentials(shares, base[first + row]);
                    if let Some(mask) = &mask {
                        mask.apply(first + row, key, slopes);
                    }
                    let level = level[first + row];
                    slopes
                        .iter_mut()
                        .zip(&*shares)
                        .for_each(|(slope, &share)| *slope = share * (*slope - level));
                    if let Some(mask) = &mask {
                        mask.apply(first + row, key, shares);
                    }
                }
                let (shares, slopes) =
                    (Rows { values: &*shares, width: BLOCK }, Rows { values: &*slopes, width: BLOCK });
                let mut product = Scattered {
                    sums: &mut of_values[key * depth..],
                    rows,
                    shares,
                    values: Rows { values: &grads[first * depth..], width: depth },
                    keys: n_keys,
                    behind,
                };
                by_panels(simd, depth, &mut product, &());
                let mut product = Scattered {
                    sums: &mut of_keys[key * depth..],
                    rows,
                    shares: slopes,
                    values: Rows { values: &queries[first * depth..], width: depth },
                    keys: n_keys,
                    behind,
                };
                by_panels(simd, depth, &mut product, &());
                let mut product = Gathered {
                    sums: &mut of_queries[first * depth..],
                    rows,
                    shares: slopes,
                    values: Rows { values: &keys[key * depth..], width: depth },
                    keys: n_keys,
                    behind,
                };
                by_panels(simd, depth, &mut product, &());
            }
        }
        let scale: T = scale(sizes);
        for t in all {
            let row = t * depth..t * depth + sizes.depth;
            let to = out.row(t, 0);
            to.iter_mut().zip(&of_queries[row.clone()]).for_each(|(to, &sum)| *to = sum * scale);
            out.row(t, 1).copy_from_slice(&of_keys[row.clone()]);
            out.row(t, 2).copy_from_slice(&of_values[row]);
        }
    }
}
