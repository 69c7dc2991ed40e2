//! Softmax and its logarithm. Rows are the last dimension of contiguous tensors.

use crate::cpu::in_lanes::InLanes;
use crate::cpu::reduce::largest_of;
use crate::cpu::share;
use crate::dtype::{Float, with_float};
use crate::op::Form;
use crate::tensor::Tensor;

/// Applies `f` to each row of `width` of the inputs and the output, spread over the threads.
pub(super) fn rows<T: Float>(out: &Tensor, width: usize, f: impl Fn(usize, &mut [T]) + Sync) {
    let device = out.device();
    let arch = device.arch();
    let mut vo = out.write_whole::<T>();
    let per_task = (share(device, vo.len()) / width.max(1)).max(1);
    device.for_chunks(&mut vo, per_task * width, |task, part| {
        arch.run(
            #[inline(always)]
            || {
                for (i, row) in part.chunks_exact_mut(width).enumerate() {
                    f(task * per_task + i, row);
                }
            },
        );
    });
}

/// Independent largest values and partial sums of a row, so that they become vectors.
const LANES: usize = 16;

/// Adds, or whatever `f` does, some numbers to those of the lanes.
#[inline(always)]
fn add_in_lanes<T: InLanes>(lanes: &mut [T; LANES], some: &[T], f: impl Fn(T, T) -> T) {
    for (lane, &x) in lanes.iter_mut().zip(some) {
        *lane = f(*lane, x);
    }
}

/// The sum of a row's numbers, in an order that its length alone decides.
#[inline(always)]
fn sum_in_lanes<T: InLanes>(numbers: impl ExactSizeIterator<Item = T>) -> T {
    let (mut sums, mut numbers) = ([T::ZERO; LANES], numbers);
    for _ in 0..numbers.len() / LANES {
        for sum in &mut sums {
            *sum += numbers.next().unwrap_or(T::ZERO);
        }
    }
    for (sum, x) in sums.iter_mut().zip(numbers) {
        *sum += x;
    }
    sums.iter().fold(T::ZERO, |sum, &x| sum + x)
}

/// The largest of a row and the sum of exp(x - largest), in an order that the row's length alone decides.
#[inline(always)]
fn normaliser<T: InLanes>(x: &[T]) -> (T, T) {
    let (whole, rest) = x.as_chunks::<LANES>();
    let largest = largest_of(x);
    let mut sums = [T::ZERO; LANES];
    for some in whole {
        add_in_lanes(
            &mut sums,
            some,
            #[inline(always)]
            |sum, x| sum + (x - largest).exp_in_lanes(),
        );
    }
    add_in_lanes(
        &mut sums,
        rest,
        #[inline(always)]
        |sum, x| sum + (x - largest).exp_in_lanes(),
    );
    (largest, sums.iter().fold(T::ZERO, |sum, &x| sum + x))
}

/// `out = softmax(x)` or its logarithm, along rows of `width`.
pub(crate) fn softmax(form: Form, x: &Tensor, width: usize, out: &Tensor) {
    let _timer = out.device().time("softmax");
    with_float!(x.dtype, "softmax", T => {
        let vx = x.read_contiguous::<T>("softmax");
        let vx = &*vx;
        rows::<T>(out, width, #[inline(always)] |i, o| {
            let x = &vx[i * width..][..width];
            let (largest, sum) = normaliser(x);
            match form {
                Form::Softmax => {
                    let scale = T::ONE / sum;
                    for (o, &x) in o.iter_mut().zip(x) {
                        *o = (x - largest).exp_in_lanes() * scale;
                    }
                }
                Form::LogSoftmax => {
                    // One after the other: beside a large number the second would be lost.
                    let log = sum.ln();
                    o.iter_mut().zip(x).for_each(|(o, &x)| *o = (x - largest) - log);
                }
            }
        });
    });
}

/// `out =` the gradient with respect to the input, told from the output `y`.
pub(crate) fn softmax_gradient(form: Form, y: &Tensor, grad: &Tensor, width: usize, out: &Tensor) {
    let _timer = out.device().time("softmax, gradient");
    with_float!(y.dtype, "softmax", T => {
        let (vy, vg) = (y.read_contiguous::<T>("softmax"), grad.read_contiguous::<T>("softmax"));
        let (vy, vg) = (&*vy, &*vg);
        rows::<T>(out, width, #[inline(always)] |i, o| {
            let (y, g) = (&vy[i * width..][..width], &vg[i * width..][..width]);
            match form {
                // dx = y (g - sum(g y))
                Form::Softmax => {
                    let dot = sum_in_lanes(y.iter().zip(g).map(#[inline(always)] |(&y, &g)| y * g));
                    o.iter_mut().zip(y.iter().zip(g)).for_each(|(o, (&y, &g))| *o = y * (g - dot));
                }
                // dx = g - exp(y) sum(g)
                Form::LogSoftmax => {
                    let sum = sum_in_lanes(g.iter().copied());
                    for (o, (&y, &g)) in o.iter_mut().zip(y.iter().zip(g)) {
                        *o = g - y.exp_in_lanes() * sum;
                    }
                }
            }
        });
    });
}
