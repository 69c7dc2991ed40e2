//! Attention of several heads, without the scores ever being stored whole. Dao, Fu, Ermon, Rudra and Re,
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
//! blocks of none of them are left out, as are blocks of which no key is seen; the others are the same blocks, so what a query comes to has
//! the same bits. The order of every sum depends on the sizes alone, so the bits don't depend on the number of threads.

mod heads;
mod products;

use crate::cpu::copy::transpose;
use crate::cpu::dropout::threshold;
use crate::cpu::in_lanes::InLanes;
use crate::cpu::lanes::{Lanes, MOST_LANES};
use crate::cpu::tile::by_panels;
use crate::dtype::{Float, with_float};
use crate::ops::attention::{Dropped, Shares, Sight};
use crate::ops::dropout::stream;
use crate::philox::Philox;
use crate::shape::Geometry;
use crate::storage::{Read, Storage};
use crate::tensor::{Elements, Tensor};
use heads::{Head, Heads, Held, Sizes};
use products::{Gathered, Rows, Scattered, Scores};
use pulp::{Simd, WithSimd};
use std::marker::PhantomData;
use std::ops::Range;

/// Queries of a block, and keys.
const BLOCK: usize = 64;

/// `out (B, T, H, D)` = for each head of queries (B, H, T, D), keys and values (B, H, S, D) the values weighed by the shares; `lse (B, H, T)`
/// = the logarithm of the sum of the exponentials of a query's scores, infinite where it sees no key.
pub(crate) fn attention(given: [&Tensor; 3], shares: Shares<'_>, out: &Tensor, lse: &Tensor) {
    let device = out.device();
    let _timer = device.time("attention");
    let sizes = Sizes::of(given, shares);
    if out.count() == 0 {
        return;
    }
    let out = out.by_heads(given[0]);
    with_float!(out.dtype, "attention", T => {
        let sources = Sources::<T>::of(given, shares, sizes);
        let mut lse = lse.write_whole::<T>();
        let mut held = Held::<T, 1>::of([&out]);
        // SAFETY: a whole tensor.
        let outs = unsafe { Heads::new(&mut held, [&out], sizes) };
        device.for_chunks(&mut lse, sizes.asking, |i, lse| {
            let room = Room::<T>::new(device, sizes, Kept { whole: [1, 2], block: [1, 1], numbers: [0, 2] });
            // SAFETY: each index comes once.
            let out = unsafe { outs.head(i) };
            device.arch().dispatch(Forward { given: sources.head(i), room, out, lse });
        });
    });
}

/// `outs` = the gradients of queries, keys and values `given`, from that of the output, `grad (B, T, H, D)`, where forward `came` the output and
/// the logarithms.
pub(crate) fn attention_gradient(
    given: [&Tensor; 3],
    came: [&Tensor; 2],
    shares: Shares<'_>,
    grad: &Tensor,
    outs: [&Tensor; 3],
) {
    let device = grad.device();
    let _timer = device.time("attention, gradient");
    let sizes = Sizes::of(given, shares);
    if sizes.all_heads() * sizes.depth == 0 {
        return;
    }
    let [y, lse] = came;
    let [y, grad] = [y, grad].map(|x| x.by_heads(given[0]));
    with_float!(grad.dtype, "attention", T => {
        let sources = Sources::<T>::of(given, shares, sizes);
        let lse = lse.read_contiguous::<T>("attention");
        let of_output = [&y, &grad].map(|x| (x.read::<T>(), x.geometry));
        let mut held = Held::<T, 3>::of(outs);
        // SAFETY: tensors of their own, or queries, keys and values of one.
        let outs = unsafe { Heads::new(&mut held, outs, sizes) };
        device.parallel_for(sizes.all_heads(), |i| {
            let room = Room::<T>::new(device, sizes, Kept { whole: [3, 5], block: [2, 0], numbers: [2, 0] });
            // SAFETY: each index comes once.
            let out = unsafe { outs.head(i) };
            let lse = &lse[i * sizes.asking..][..sizes.asking];
            let [y, grad] = of_output.each_ref().map(|(values, view)| sizes.rows(i, values, view));
            device.arch().dispatch(Backward { given: sources.head(i), y, grad, lse, room, out });
        });
    });
}

/// What is read of all heads.
struct Sources<'a, T> {
    sizes: Sizes,
    /// Queries, keys and values.
    given: [(Read<'a, T>, Geometry); 3],
    hiding: Option<(Read<'a, f32>, Geometry)>,
    dropped: Option<(Dropped<'a>, [Elements<'a, i64>; 2])>,
}

impl<'a, T: Float> Sources<'a, T> {
    fn of(given: [&'a Tensor; 3], shares: Shares<'a>, sizes: Sizes) -> Sources<'a, T> {
        let key = |dropped: Dropped<'a>| dropped.key.map(|part| part.read_contiguous::<i64>("attention"));
        Sources {
            sizes,
            given: given.map(|x| (x.read(), x.geometry)),
            hiding: shares.mask.map(|mask| (mask.read(), mask.geometry)),
            dropped: shares.dropped.map(|dropped| (dropped, key(dropped))),
        }
    }

    /// Of head `i` of all.
    fn head(&self, i: usize) -> Given<'_, T> {
        let Sources { sizes, given, hiding, dropped } = self;
        Given {
            sizes: *sizes,
            rows: given.each_ref().map(|(values, view)| sizes.rows(i, values, view)),
            hiding: hiding.as_ref().map(|(values, view)| {
                let (first, of_query) = sizes.place(i, view);
                Hiding { values: values.get(first..).unwrap_or_default(), of_query, of_key: view.strides[3] }
            }),
            mask: dropped
                .as_ref()
                .map(|(dropped, [words, samples])| Mask::of(*dropped, [words, samples], *sizes, i)),
        }
    }
}

/// What is read of one head.
struct Given<'a, T> {
    sizes: Sizes,
    /// Queries, keys and values.
    rows: [Source<'a, T>; 3],
    hiding: Option<Hiding<'a>>,
    mask: Option<Mask<T>>,
}

impl<T: Float> Given<'_, T> {
    /// The first keys of a block that query `query` may see by where it stands: how many.
    fn seen(&self, query: usize, key: usize, n_keys: usize) -> usize {
        let until = match self.sizes.sight {
            Sight::All => self.sizes.keys,
            Sight::NotLater { .. } => (query + 1).min(self.sizes.keys),
        };
        until.saturating_sub(key).min(n_keys)
    }

    /// How many positions the first query of a block lies behind its first key; more than a block has where each is seen by all.
    fn behind(&self, query: usize, key: usize) -> usize {
        match self.sizes.sight {
            Sight::All => BLOCK,
            Sight::NotLater { .. } => query - key,
        }
    }

    /// Whether the mask hides all these keys from all these queries, of which some are there.
    fn hides_all(&self, queries: Range<usize>, keys: Range<usize>) -> bool {
        let Some(hiding) = &self.hiding else { return false };
        let mut own = self.own(queries);
        if hiding.of_query == 0 {
            // One is as good as all.
            own.end = own.end.min(own.start + 1);
        }
        own.all(|query| keys.clone().all(|key| hiding.hides(query, key)))
    }

    /// Puts `value` in the place of what belongs to a key that query `query` doesn't see, of the keys from `key` on.
    #[inline(always)]
    fn hide(&self, query: usize, key: usize, numbers: &mut [T], value: T) {
        let asking = self.sizes.queries();
        // What fills up the queries sees nothing.
        let seen = if asking.contains(&query) { self.seen(query, key, numbers.len()) } else { 0 };
        let (seen, rest) = numbers.split_at_mut(seen);
        rest.fill(value);
        if let Some(hiding) = self.hiding.as_ref().filter(|_| !seen.is_empty()) {
            hiding.hide(query - asking.start, key, seen, value);
        }
    }

    /// Those of these positions that ask, counted from the first.
    fn own(&self, queries: Range<usize>) -> Range<usize> {
        let asking = self.sizes.queries();
        queries.start.max(asking.start) - asking.start..queries.end.min(asking.end) - asking.start
    }
}

/// The rows of one head: from the first one's first number on, and how far they are apart.
#[derive(Clone, Copy)]
struct Source<'a, T> {
    values: &'a [T],
    step: usize,
}

impl Sizes {
    /// Those of head `i` of all.
    fn rows<'a, T>(&self, i: usize, values: &'a [T], view: &Geometry) -> Source<'a, T> {
        let (first, step) = self.place(i, view);
        Source { values: values.get(first..).unwrap_or_default(), step }
    }
}

/// Which keys a head's queries don't see: those of which this is 0.
struct Hiding<'a> {
    values: &'a [f32],
    of_query: usize,
    of_key: usize,
}

impl Hiding<'_> {
    #[inline(always)]
    fn hides(&self, own: usize, key: usize) -> bool {
        self.values[own * self.of_query + key * self.of_key] == 0.0
    }

    /// Puts `value` in the place of what belongs to a hidden key, of query `own` of those that ask and the keys from `key` on.
    #[inline(always)]
    fn hide<T: Float>(&self, own: usize, key: usize, numbers: &mut [T], value: T) {
        if self.of_key == 1 {
            // Neighbours, many at a time.
            let seen = &self.values[own * self.of_query + key..][..numbers.len()];
            numbers.iter_mut().zip(seen).for_each(|(x, &seen)| *x = if seen == 0.0 { value } else { *x });
        } else {
            let keys = key..key + numbers.len();
            numbers
                .iter_mut()
                .zip(keys)
                .filter(|(_, key)| self.hides(own, *key))
                .for_each(|(x, _)| *x = value);
        }
    }
}

/// Which shares of one head are dropped.
struct Mask<T> {
    numbers: Philox,
    threshold: u32,
    keep: T,
    /// The position of the head's first share among its sample's.
    start: u64,
    /// How many positions have queries and keys in the mask.
    queries: usize,
    keys: usize,
}

impl<T: Float> Mask<T> {
    fn of(
        Dropped { p, first, .. }: Dropped<'_>,
        [words, samples]: [&[i64]; 2],
        sizes: Sizes,
        i: usize,
    ) -> Mask<T> {
        let ([sample, head], keys) = (sizes.head(i), sizes.keys);
        let queries = sizes.sight.queries(sizes.asking, keys);
        Mask {
            numbers: stream([0, 1, 2].map(|i| words[i] as u64), samples[sample] as u64),
            threshold: threshold(p),
            keep: T::from_f64(1.0 / (1.0 - p)),
            start: ((first + head) * queries * keys) as u64,
            queries,
            keys,
        }
    }

    /// Multiplies the shares that query `query` has of the keys from `key` on: by 0 where they are dropped. What fills up the
    /// positions has no number.
    fn apply(&self, query: usize, key: usize, shares: &mut [T]) {
        if query >= self.queries {
            return;
        }
        let count = shares.len().min(self.keys.saturating_sub(key));
        let start = self.start + (query * self.keys + key) as u64;
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
    /// Positions of queries and of keys and the numbers of a head, filled up.
    queries: usize,
    keys: usize,
    depth: usize,
    of: PhantomData<T>,
}

/// How many arrays a task keeps.
struct Kept {
    /// Of all rows: of queries, and of keys.
    whole: [usize; 2],
    /// Of a block's scores, and of its queries' rows.
    block: [usize; 2],
    /// Of a number of all queries, and of a block's.
    numbers: [usize; 2],
}

impl<T: Float> Room<T> {
    fn new(device: &crate::Device, sizes: Sizes, kept: Kept) -> Room<T> {
        let filled =
            [sizes.queries().end, sizes.keys, sizes.depth].map(|size| size.next_multiple_of(MOST_LANES));
        let [queries, keys, depth] = filled;
        let whole = (kept.whole[0] * queries + kept.whole[1] * keys) * depth;
        let block = BLOCK * (kept.block[0] * BLOCK + kept.block[1] * depth);
        let numbers = kept.numbers[0] * queries + kept.numbers[1] * BLOCK;
        let storage = Storage::stale(device, (whole + block + numbers) * size_of::<T>());
        Room { storage, queries, keys, depth, of: PhantomData }
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

/// Fills `rows` of `width` numbers: at these positions with those of one head, times `scale`, and with zeros elsewhere and behind.
#[inline(always)]
fn fill_rows<T: Float>(
    source: Source<'_, T>,
    at: Range<usize>,
    depth: usize,
    scale: T,
    rows: &mut [T],
    width: usize,
) {
    for (t, row) in rows.chunks_exact_mut(width).enumerate() {
        let taken = if at.contains(&t) { depth } else { 0 };
        if taken > 0 {
            let source = &source.values[(t - at.start) * source.step..][..taken];
            row.iter_mut().zip(source).for_each(|(to, &from)| *to = from * scale);
        }
        row[taken..].fill(T::ZERO);
    }
}

/// Fills `columns`, rows of `width`, with the numbers of one head, a column a key, and zeros behind.
#[inline(always)]
fn fill_columns<T: Float>(source: Source<'_, T>, sizes: Sizes, columns: &mut [T], width: usize) {
    columns.fill(T::ZERO);
    transpose(source.values, source.step, [sizes.keys, sizes.depth], columns, |number| number * width);
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
    given: Given<'a, T>,
    room: Room<T>,
    out: Head<'a, T, 1>,
    /// (T)
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
        let Forward { given, room, mut out, lse } = self;
        let (sizes, &Room { queries: end, keys: time, depth, .. }) = (given.sizes, &room);
        let mut held = room.storage.write::<T>();
        let [queries, keys, values, scores, sums, most, total] = parts(
            &mut held,
            [end * depth, time * depth, time * depth, BLOCK * BLOCK, BLOCK * depth, BLOCK, BLOCK],
        );
        let ([of_queries, of_keys, of_values], asking) = (given.rows, sizes.queries());
        fill_rows(of_queries, asking.clone(), sizes.depth, scale(sizes), queries, depth);
        fill_columns(of_keys, sizes, keys, time);
        fill_rows(of_values, 0..sizes.keys, sizes.depth, T::ONE, values, depth);
        for first in (asking.start / BLOCK * BLOCK..asking.end).step_by(BLOCK) {
            let rows = BLOCK.min(end - first);
            sums[..rows * depth].fill(T::ZERO);
            most.fill(T::NEG_INFINITY);
            total.fill(T::ZERO);
            for key in (0..given.seen(first + rows - 1, 0, sizes.keys)).step_by(BLOCK) {
                let (n_keys, behind) = (BLOCK.min(time - key), given.behind(first, key));
                if given.hides_all(first..first + rows, key..sizes.keys.min(key + n_keys)) {
                    continue;
                }
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
                    given.hide(first + row, key, scores, T::NEG_INFINITY);
                    let above = largest(scores).larger(most[row]);
                    // One that has seen no key yet.
                    let base = if above == T::NEG_INFINITY { T::ZERO } else { above };
                    let fade = (most[row] - base).exp_in_lanes();
                    total[row] = total[row] * fade + exponentials(scores, base);
                    most[row] = above;
                    if fade != T::ONE {
                        sums[row * depth..][..depth].iter_mut().for_each(|sum| *sum *= fade);
                    }
                    if let Some(mask) = &given.mask {
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
                let saw_none = total[row] == T::ZERO && (given.hiding.is_some() || sizes.keys == 0);
                let per = if saw_none { T::ZERO } else { T::ONE / total[row] };
                let sums = &sums[row * depth..][..sizes.depth];
                out.row(own, 0).iter_mut().zip(sums).for_each(|(out, &sum)| *out = sum * per);
                lse[own] = if saw_none { -T::NEG_INFINITY } else { most[row] + total[row].ln() };
            }
        }
    }
}

/// One head of one sample, backward.
struct Backward<'a, T> {
    given: Given<'a, T>,
    /// The output, and its gradient.
    y: Source<'a, T>,
    grad: Source<'a, T>,
    /// (T)
    lse: &'a [T],
    room: Room<T>,
    /// Of queries, keys and values.
    out: Head<'a, T, 3>,
}

impl<T: Lanes + InLanes> WithSimd for Backward<'_, T> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Backward { given, y, grad, lse, room, mut out } = self;
        let (sizes, &Room { queries: end, keys: time, depth, .. }) = (given.sizes, &room);
        let mut held = room.storage.write::<T>();
        let (whole, rest) = held.split_at_mut((3 * end + 5 * time) * depth);
        let (of_end, of_time) = whole.split_at_mut(3 * end * depth);
        let [queries, grads, of_queries] = parts(of_end, [end * depth; 3]);
        let [keys, key_columns, value_columns, of_keys, of_values] = parts(of_time, [time * depth; 5]);
        let [shares, slopes, base, level] = parts(rest, [BLOCK * BLOCK, BLOCK * BLOCK, end, end]);
        let [their_queries, their_keys, their_values] = given.rows;
        let asking = sizes.queries();
        fill_rows(their_queries, asking.clone(), sizes.depth, scale(sizes), queries, depth);
        fill_rows(their_keys, 0..sizes.keys, sizes.depth, T::ONE, keys, depth);
        fill_columns(their_keys, sizes, key_columns, time);
        fill_columns(their_values, sizes, value_columns, time);
        fill_rows(grad, asking.clone(), sizes.depth, T::ONE, grads, depth);
        for sums in [&mut *of_queries, &mut *of_keys, &mut *of_values] {
            sums.fill(T::ZERO);
        }
        base.fill(T::ZERO);
        base[asking.clone()].copy_from_slice(lse);
        // The sum of a query's shares times their slopes is that of its output times the output's gradient.
        level.fill(T::ZERO);
        for (own, level) in level[asking.clone()].iter_mut().enumerate() {
            let [y, grad] = [y, grad].map(|of| &of.values[own * of.step..][..sizes.depth]);
            *level = dot(y, grad);
        }
        for key in (0..sizes.keys).step_by(BLOCK) {
            let n_keys = BLOCK.min(time - key);
            let begin = match sizes.sight {
                Sight::All => 0,
                Sight::NotLater { from } => key.max(from / BLOCK * BLOCK),
            };
            for first in (begin..asking.end).step_by(BLOCK) {
                let (rows, behind) = (BLOCK.min(end - first), given.behind(first, key));
                if given.hides_all(first..first + rows, key..sizes.keys.min(key + n_keys)) {
                    continue;
                }
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
                    let shares = &mut shares[row * BLOCK..][..n_keys];
                    let slopes = &mut slopes[row * BLOCK..][..n_keys];
                    given.hide(first + row, key, shares, T::NEG_INFINITY);
                    given.hide(first + row, key, slopes, T::ZERO);
                    exponentials(shares, base[first + row]);
                    if let Some(mask) = &given.mask {
                        mask.apply(first + row, key, slopes);
                    }
                    let level = level[first + row];
                    slopes
                        .iter_mut()
                        .zip(&*shares)
                        .for_each(|(slope, &share)| *slope = share * (*slope - level));
                    if let Some(mask) = &given.mask {
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
        for (own, t) in asking.enumerate() {
            let sums = &of_queries[t * depth..][..sizes.depth];
            out.row(own, 0).iter_mut().zip(sums).for_each(|(to, &sum)| *to = sum * scale);
        }
        for t in 0..sizes.keys {
            let row = t * depth..t * depth + sizes.depth;
            out.row(t, 1).copy_from_slice(&of_keys[row.clone()]);
            out.row(t, 2).copy_from_slice(&of_values[row]);
        }
    }
}
