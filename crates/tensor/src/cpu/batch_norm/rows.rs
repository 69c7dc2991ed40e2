//! Batch normalisation of rows of C channels, as images in pixel order are. What follows it in a residual network, a sum with
//! the shortcut and a ReLU, is done in the same pass, and so is their part of the gradient.
//!
//! Sums over rows are taken block by block, each block's in the tensor's own precision and then together in double precision,
//! so that they depend neither on the number of threads nor much on that of rows.

use crate::device::Device;
use crate::dtype::Float;
use crate::storage::Storage;

/// Rows of a block.
const BLOCK: usize = 128;

/// How many elements of an output one task takes: whole rows, about as many as stay in the second cache.
fn share(device: &Device, count: usize, width: usize) -> usize {
    let rows = (count / width.max(1)).div_ceil(device.threads());
    rows.clamp(1, ((1 << 16) / width).max(1)) * width
}

/// Sums two numbers a channel over all rows: `block(rows, first row, sums)` writes a block's two times C sums, and `merge(rows
/// before, rows of the block, its sums)` takes them in the order of blocks.
fn by_blocks<T: Float>(
    device: &Device,
    [rows, width]: [usize; 2],
    block: impl Fn(usize, usize, &mut [T]) + Sync,
    mut merge: impl FnMut(usize, usize, &[T]),
) {
    let n_blocks = rows.div_ceil(BLOCK);
    let room = Storage::stale(device, n_blocks * 2 * width * size_of::<T>());
    let mut sums = room.write::<T>();
    let sums = &mut sums[..n_blocks * 2 * width];
    let some = |i: usize| BLOCK.min(rows - i * BLOCK);
    device.for_chunks(sums, (2 * width).max(1), |i, sums| {
        device.arch().run(
            #[inline(always)]
            || block(i * BLOCK, some(i), sums),
        );
    });
    device.arch().run(
        #[inline(always)]
        || {
            for (i, sums) in sums.chunks_exact((2 * width).max(1)).enumerate() {
                merge(i * BLOCK, some(i), sums);
            }
        },
    );
}

/// Each channel's mean and sum of squared distances from it; the parts of blocks are merged as Chan, Golub and LeVeque do
/// (<http://i.stanford.edu/pub/cstr/reports/cs/tr/79/773/CS-TR-79-773.pdf>).
pub(super) fn moments<T: Float>(device: &Device, x: &[T], width: usize, [means, squares]: [&mut [f64]; 2]) {
    means.fill(0.0);
    squares.fill(0.0);
    let block = |first: usize, rows: usize, sums: &mut [T]| {
        let (mean, square) = sums.split_at_mut(width);
        let x = &x[first * width..][..rows * width];
        mean.fill(T::ZERO);
        for row in x.chunks_exact(width) {
            mean.iter_mut().zip(row).for_each(|(sum, &x)| *sum += x);
        }
        let share = T::from_f64(1.0 / rows as f64);
        mean.iter_mut().for_each(|mean| *mean *= share);
        square.fill(T::ZERO);
        for row in x.chunks_exact(width) {
            let pairs = row.iter().zip(mean.iter());
            square.iter_mut().zip(pairs).for_each(|(sum, (&x, &mean))| *sum += (x - mean) * (x - mean));
        }
    };
    by_blocks(device, [x.len() / width.max(1), width], block, |before, rows, sums| {
        let (before, rows) = (before as f64, rows as f64);
        let parts = sums[..width].iter().zip(&sums[width..]);
        for ((mean, square), (block_mean, block_square)) in
            means.iter_mut().zip(squares.iter_mut()).zip(parts)
        {
            let distance = block_mean.to_f64() - *mean;
            *mean += distance * rows / (before + rows);
            *square += block_square.to_f64() + distance * distance * before * rows / (before + rows);
        }
    });
}

/// `out = (x - mean) mul + add`, plus `plus`, cut off below zero if `relu`.
pub(super) fn normalise<T: Float>(
    device: &Device,
    x: &[T],
    [mean, mul, add]: [&[T]; 3],
    plus: Option<&[T]>,
    relu: bool,
    out: &mut [T],
) {
    let width = mean.len();
    let chunk = share(device, out.len(), width);
    device.for_chunks(out, chunk, |i, out| {
        let at = i * chunk..i * chunk + out.len();
        let (x, plus) = (&x[at.clone()], plus.map(|plus| &plus[at]));
        device.arch().run(
            #[inline(always)]
            || {
                for (row, out) in out.chunks_exact_mut(width).enumerate() {
                    let x = &x[row * width..][..width];
                    let channels = mean.iter().zip(mul).zip(add);
                    for ((o, &x), ((&mean, &mul), &add)) in out.iter_mut().zip(x).zip(channels) {
                        *o = (x - mean) * mul + add;
                    }
                    if let Some(plus) = plus {
                        out.iter_mut().zip(&plus[row * width..][..width]).for_each(|(o, &plus)| *o += plus);
                    }
                    if relu {
                        out.iter_mut()
                            .for_each(|o| *o = if *o > T::ZERO || o.is_nan() { *o } else { T::ZERO });
                    }
                }
            },
        );
    });
}

/// Each channel's sum of grad, and of grad (x - mean). Where `mask` is given, the gradient counts only where a ReLU gave
/// that and passed it on.
pub(super) fn sums<T: Float>(
    device: &Device,
    [x, grad]: [&[T]; 2],
    mask: Option<&[T]>,
    mean: &[T],
    [sum_g, sum_gx]: [&mut [f64]; 2],
) {
    sum_g.fill(0.0);
    sum_gx.fill(0.0);
    let width = mean.len();
    let block = |first: usize, rows: usize, sums: &mut [T]| {
        sums.fill(T::ZERO);
        let (sum_g, sum_gx) = sums.split_at_mut(width);
        for at in (first * width..(first + rows) * width).step_by(width) {
            let (x, g) = (&x[at..][..width], &grad[at..][..width]);
            let channels = sum_g.iter_mut().zip(sum_gx.iter_mut()).zip(mean);
            match mask {
                None => {
                    for (((sum_g, sum_gx), &mean), (&x, &g)) in channels.zip(x.iter().zip(g)) {
                        *sum_g += g;
                        *sum_gx += g * (x - mean);
                    }
                }
                Some(mask) => {
                    let values = x.iter().zip(g).zip(&mask[at..][..width]);
                    for (((sum_g, sum_gx), &mean), ((&x, &g), &mask)) in channels.zip(values) {
                        let g = g.where_relu_passed(mask);
                        *sum_g += g;
                        *sum_gx += g * (x - mean);
                    }
                }
            }
        }
    };
    by_blocks(device, [x.len() / width.max(1), width], block, |_, _, sums| {
        sum_g.iter_mut().zip(&sums[..width]).for_each(|(total, sum)| *total += sum.to_f64());
        sum_gx.iter_mut().zip(&sums[width..]).for_each(|(total, sum)| *total += sum.to_f64());
    });
}

/// `out = mul (grad - mean_g - (x - mean) slope)`, with the gradient masked as in [`sums`].
pub(super) fn input_gradient<T: Float>(
    device: &Device,
    [x, grad]: [&[T]; 2],
    mask: Option<&[T]>,
    [mean, mul, mean_g, slope]: [&[T]; 4],
    out: &mut [T],
) {
    let width = mean.len();
    let chunk = share(device, out.len(), width);
    device.for_chunks(out, chunk, |i, out| {
        device.arch().run(
            #[inline(always)]
            || {
                for (row, out) in out.chunks_exact_mut(width).enumerate() {
                    let at = i * chunk + row * width;
                    let (x, g) = (&x[at..][..width], &grad[at..][..width]);
                    let channels = mean.iter().zip(mul).zip(mean_g.iter().zip(slope));
                    let values = x.iter().zip(g).zip(channels);
                    match mask {
                        None => {
                            for (o, ((&x, &g), ((&mean, &mul), (&mean_g, &slope)))) in
                                out.iter_mut().zip(values)
                            {
                                *o = mul * (g - mean_g - (x - mean) * slope);
                            }
                        }
                        Some(mask) => {
                            let values = values.zip(&mask[at..][..width]);
                            for (o, (((&x, &g), ((&mean, &mul), (&mean_g, &slope))), &mask)) in
                                out.iter_mut().zip(values)
                            {
                                let g = g.where_relu_passed(mask);
                                *o = mul * (g - mean_g - (x - mean) * slope);
                            }
                        }
                    }
                }
            },
        );
    });
}
