//! Sums and largest values along dimensions.

use crate::cpu::{SERIAL_LIMIT, share};
use crate::device::Device;
use crate::dtype::{DType, Float, with_float};
use crate::ops::choice::around;
use crate::ops::reduce::Toward;
use crate::shape::{Geometry, Shape, for_each_row};
use crate::storage::Storage;
use crate::tensor::Tensor;
use std::cmp::Ordering;

/// Independent partial sums in a row: enough for two vectors of the widest kind, and a fixed order for every machine.
const LANES: usize = 32;
/// A row is summed in blocks of this many elements, whose sums are added in double precision.
const BLOCK: usize = 4096;
/// Up to this many elements are added one after the other in the tensor's own precision: as many as a lane of a block adds.
const FEW: usize = BLOCK / LANES;

/// The sum of a slice, in an order that depends on its length alone.
#[inline(always)]
pub(crate) fn sum_row<T: Float>(row: &[T]) -> f64 {
    row.chunks(BLOCK).map(|block| sum_block(block).to_f64()).sum()
}

#[inline(always)]
fn sum_block<T: Float>(block: &[T]) -> T {
    let mut lanes = [T::ZERO; LANES];
    let (whole, rest) = block.as_chunks::<LANES>();
    for chunk in whole {
        for (lane, &x) in lanes.iter_mut().zip(chunk) {
            *lane += x;
        }
    }
    for (lane, &x) in lanes.iter_mut().zip(rest) {
        *lane += x;
    }
    let mut width = LANES / 2;
    while width > 0 {
        for i in 0..width {
            lanes[i] += lanes[i + width];
        }
        width /= 2;
    }
    lanes[0]
}

/// `out = sum of x` over the dimensions in which `kept` (the shape of `out`, dimensions kept) has size 1.
pub(crate) fn sum(x: &Tensor, out: &Tensor) {
    let _timer = out.device().time("sums");
    if x.dtype == DType::I64 {
        return sum_integers(x, out);
    }
    with_float!(x.dtype, "sum", T => sum_elements::<T>(x, out));
}

/// The same of whole numbers, which wrap around.
fn sum_integers(x: &Tensor, out: &Tensor) {
    let (vx, mut sums) = (x.read::<i64>(), out.write_whole::<i64>());
    let spread = Geometry::row_major(*out.shape()).broadcast_to(*x.shape());
    sums.fill(0);
    for_each_row([&x.geometry, &spread], |[at, to], [step, to_step], n| {
        (0..n).for_each(|i| {
            let sum = &mut sums[to + i * to_step];
            *sum = sum.wrapping_add(vx[at + i * step]);
        });
    });
}

fn sum_elements<T: Float>(x: &Tensor, out: &Tensor) {
    let arch = out.device().arch();
    let (vx, mut vo) = (x.read::<T>(), out.write_whole::<T>());
    if let Some(width) = width_of_rows(x, out) {
        // Threads share out the rows.
        let (vx, rows) = (&vx[x.geometry.offset..], (share(out.device(), x.count()) / width).max(1));
        if vo.len() < out.device().threads() && width >= 2 * SERIAL_LIMIT {
            return vo.iter_mut().zip(vx.chunks_exact(width)).for_each(|(sum, row)| {
                *sum = T::from_f64(sum_long_row(out.device(), row));
            });
        }
        return out.device().for_chunks(&mut vo, rows, |task, sums| {
            let rows = vx[task * rows * width..].chunks_exact(width);
            arch.run(
                #[inline(always)]
                || {
                    for (row, sum) in rows.clone().zip(sums.iter_mut()) {
                        *sum = T::from_f64(sum_row(row));
                    }
                },
            );
        });
    }
    if x.count() / vo.len().max(1) <= FEW {
        return add_up(x, &vx, out, &mut vo);
    }
    let room = Storage::stale(out.device(), vo.len() * size_of::<f64>());
    let mut sums = room.write::<f64>();
    let sums = &mut sums[..vo.len()];
    add_up(x, &vx, out, sums);
    vo.iter_mut().zip(sums).for_each(|(o, &mut sum)| *o = T::from_f64(sum));
}

/// The same as [`sum_row`], to the bit, by all threads.
fn sum_long_row<T: Float>(device: &Device, row: &[T]) -> f64 {
    let n = row.len().div_ceil(BLOCK);
    let room = Storage::stale(device, n * size_of::<f64>());
    let mut sums = room.write::<f64>();
    let several = n.div_ceil(device.threads());
    device.for_chunks(&mut sums[..n], several, |task, sums| {
        let blocks = row[task * several * BLOCK..].chunks(BLOCK);
        device.arch().run(
            #[inline(always)]
            || {
                for (sum, block) in sums.iter_mut().zip(blocks.clone()) {
                    *sum = sum_block(block).to_f64();
                }
            },
        );
    });
    sums[..n].iter().sum()
}

/// How long the rows are, if it is whole rows of a tensor without gaps that are summed.
fn width_of_rows(x: &Tensor, out: &Tensor) -> Option<usize> {
    let stay = out.dims().iter().zip(x.dims()).take_while(|(out, x)| out == x).count();
    let width: usize = x.dims()[stay..].iter().product();
    let are_rows = x.geometry.is_contiguous() && out.dims()[stay..].iter().all(|&size| size == 1);
    (are_rows && width > 0).then_some(width)
}

/// The first dimension that stays, and how many of its elements are a thread's; none where one thread has them all.
fn shared_out(x: &Tensor, out: &Tensor) -> Option<(usize, usize)> {
    let dim = out.dims().iter().position(|&size| size > 1)?;
    let size = out.dims()[dim];
    // Columns are summed beside each other.
    let least = if dim + 1 == out.shape().n_dims() { LANES } else { 1 };
    let mut several = size.div_ceil(out.device().threads()).next_multiple_of(least);
    // Without a dimension others may lie as one row does, which is summed in another order: one element is left to nobody.
    while several == 1 || size % several == 1 {
        several += least;
    }
    (several < size && x.count() >= SERIAL_LIMIT).then_some((dim, several))
}

/// Fills `sums`, one for each element of `out`, in the precision of `S`: by however many threads in the same order.
fn add_up<T: Float, S: Float>(x: &Tensor, vx: &[T], out: &Tensor, sums: &mut [S]) {
    let device = out.device();
    let add_up = |x: &Geometry, out: Shape, sums: &mut [S]| {
        device.arch().run(
            #[inline(always)]
            || add_up_part(x, vx, out, sums),
        );
    };
    let Some((dim, several)) = shared_out(x, out) else { return add_up(&x.geometry, *out.shape(), sums) };
    let size = out.dims()[dim];
    device.for_chunks(sums, several * (out.count() / size), |i, sums| {
        let n = several.min(size - i * several);
        add_up(&x.geometry.narrow(dim, i * several, n), out.shape().with(dim, n), sums);
    });
}

#[inline(always)]
fn add_up_part<T: Float, S: Float>(x: &Geometry, vx: &[T], out: Shape, sums: &mut [S]) {
    let wide = |x: T| S::from_f64(x.to_f64());
    let spread = Geometry::row_major(out).broadcast_to(x.shape);
    sums.fill(S::ZERO);
    for_each_row([x, &spread], |[at, to], [step, to_step], n| match (step, to_step) {
        (1, 0) => sums[to] += S::from_f64(sum_row(&vx[at..at + n])),
        (1, 1) => sums[to..to + n].iter_mut().zip(&vx[at..at + n]).for_each(|(o, &x)| *o += wide(x)),
        _ => (0..n).for_each(|i| sums[to + i * to_step] += wide(vx[at + i * step])),
    });
}

/// `out =` the sum of all rows of the contiguous `x`, each as long as `out` is.
pub(crate) fn sum_rows(x: &Tensor, out: &Tensor) {
    let width = out.count();
    sum(&x.reshape([x.count() / width.max(1), width]), &out.reshape([1, width]));
}

/// `out =` the running sums of `x` along dimension `dim`; both contiguous. Sums are in double precision.
pub(crate) fn running_sums(x: &Tensor, dim: usize, toward: Toward, out: &Tensor) {
    let _timer = out.device().time("running sums");
    let [_, size, inner] = around(x.shape(), dim);
    if x.count() == 0 {
        return;
    }
    with_float!(x.dtype, "cumsum", T => {
        let (vx, mut vo) = (x.read_contiguous::<T>("cumsum"), out.write_whole::<T>());
        let (vx, each) = (&*vx, size * inner);
        let several = share(out.device(), x.count()).div_ceil(each);
        out.device().for_chunks(&mut vo, several * each, |chunk, out| {
            let x = &vx[chunk * several * each..][..out.len()];
            if inner == 1 {
                return running_sums_of_rows(x, size, toward, out);
            }
            let mut sums = vec![0.0f64; inner];
            for (x, out) in x.chunks_exact(each).zip(out.chunks_exact_mut(each)) {
                sums.fill(0.0);
                for i in 0..size {
                    let row = match toward { Toward::End => i, Toward::Beginning => size - 1 - i } * inner;
                    let (x, out) = (&x[row..row + inner], &mut out[row..row + inner]);
                    for ((sum, &x), out) in sums.iter_mut().zip(x).zip(out) {
                        *sum += x.to_f64();
                        *out = T::from_f64(*sum);
                    }
                }
            }
        });
    });
}

/// Rows that are summed beside each other: a sum waits for the one before it, and meanwhile there is time for others.
const ROWS: usize = 8;

fn running_sums_of_rows<T: Float>(x: &[T], width: usize, toward: Toward, out: &mut [T]) {
    let (mut x, mut out) = (x, out);
    while !x.is_empty() {
        let rows = ROWS.min(x.len() / width);
        let ((own, later), (to, later_out)) =
            (x.split_at(rows * width), std::mem::take(&mut out).split_at_mut(rows * width));
        let mut sums = [0.0f64; ROWS];
        for i in 0..width {
            let at = match toward {
                Toward::End => i,
                Toward::Beginning => width - 1 - i,
            };
            for (row, sum) in sums[..rows].iter_mut().enumerate() {
                *sum += own[row * width + at].to_f64();
                to[row * width + at] = T::from_f64(*sum);
            }
        }
        (x, out) = (later, later_out);
    }
}

/// The largest of a row; what is no number is larger than any.
#[inline(always)]
pub(crate) fn largest_of<T: Float>(row: &[T]) -> T {
    let mut lanes = [T::NEG_INFINITY; LANES];
    let (whole, rest) = row.as_chunks::<LANES>();
    for some in whole {
        for (lane, &x) in lanes.iter_mut().zip(some) {
            *lane = lane.larger(x);
        }
    }
    for (lane, &x) in lanes.iter_mut().zip(rest) {
        *lane = lane.larger(x);
    }
    lanes.iter().fold(T::NEG_INFINITY, |best, &x| best.larger(x))
}

/// For each row of `width` elements of the contiguous `x`: the largest, and where the first of them stands.
pub(crate) fn max_rows(x: &Tensor, width: usize, largest: &Tensor, index: &Tensor) {
    with_float!(x.dtype, "max", T => {
        let vx = x.read_contiguous::<T>("max");
        let (mut vl, mut vi) = (largest.write_whole::<T>(), index.write_whole::<i64>());
        let (vx, device) = (&*vx, x.device());
        let rows = (share(device, vx.len()) / width).max(1);
        device.for_chunks2((&mut vl, rows), (&mut vi, rows), |task, largest, index| device.arch().run(#[inline(always)] || {
            let rows = vx[task * rows * width..].chunks_exact(width);
            for (row, (l, i)) in rows.zip(largest.iter_mut().zip(index.iter_mut())) {
                let best = largest_of(row);
                // Nothing equals what is no number.
                let is_best = |&x: &T| if best.is_nan() { x.is_nan() } else { x == best };
                (*l, *i) = (best, row.iter().position(is_best).unwrap_or(0) as i64);
            }
        }));
    });
}

/// So many of a row are found by keeping the largest so far in order; of more the row is sorted.
const FEW_OF_MANY: usize = 64;

/// Where the largest of each row of the contiguous `x` (rows, width) stand, the largest first: `index` is (rows, as many as are wanted). The
/// first of equals comes before the others, and what is no number before all.
pub(crate) fn top_rows(x: &Tensor, index: &Tensor) {
    let (width, wanted) = (x.dims()[1], index.dims()[1]);
    let device = x.device();
    with_float!(x.dtype, "topk", T => {
        let (vx, mut vi) = (x.read_contiguous::<T>("topk"), index.write_whole::<i64>());
        let vx = &*vx;
        let rows = share(device, x.count()).div_ceil(width.max(1));
        device.for_chunks(&mut vi, (rows * wanted).max(1), |chunk, places| {
            let mut all: Vec<usize> = Vec::with_capacity(width);
            for (i, places) in places.chunks_exact_mut(wanted).enumerate() {
                let row = &vx[(chunk * rows + i) * width..][..width];
                let order = |&a: &usize, &b: &usize| {
                    let size = |at: usize| (row[at].is_nan(), row[at]);
                    size(b).partial_cmp(&size(a)).unwrap_or(Ordering::Equal).then(a.cmp(&b))
                };
                all.clear();
                if wanted <= FEW_OF_MANY && wanted < width {
                    for at in 0..width {
                        let worst = all.get(wanted - 1).map(|&worst| row[worst]);
                        if worst.is_none_or(|worst| row[at] > worst || row[at].is_nan()) {
                            let place = all.partition_point(|other| order(other, &at) == Ordering::Less);
                            all.insert(place, at);
                            all.truncate(wanted);
                        }
                    }
                } else {
                    all.extend(0..width);
                    all.sort_unstable_by(order);
                }
                places.iter_mut().zip(&all).for_each(|(place, &at)| *place = at as i64);
            }
        });
    });
}

/// `out =` each element of `grad` where `index` says along `dim`, and 0 elsewhere; both have size 1 there.
pub(crate) fn max_gradient(grad: &Tensor, index: &Tensor, dim: usize, out: &Tensor) {
    let inner: usize = out.dims()[dim + 1..].iter().product();
    let size = out.dims()[dim];
    let grad = grad.contiguous();
    with_float!(out.dtype(), "max", T => {
        let (grad, index) = (grad.read_contiguous::<T>("max"), index.read_contiguous::<i64>("max"));
        let mut o = out.write_whole::<T>();
        o.fill(0.0);
        for (i, (&g, &at)) in grad.iter().zip(index.iter()).enumerate() {
            o[(i / inner * size + at as usize) * inner + i % inner] += g;
        }
    });
}
