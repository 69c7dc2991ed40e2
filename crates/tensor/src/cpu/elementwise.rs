//! Elementwise kernels. The inner loops are plain code over slices, compiled for the machine's vectors at run time. Those of whole numbers
//! wrap around, as processors do.

use crate::cpu::in_lanes::InLanes;
use crate::cpu::share;
use crate::dtype::{DType, Element, with_float};
use crate::op::{Binary, Unary, WholeUnary};
use crate::shape::{Geometry, Order, for_each_row};
use crate::tensor::Tensor;

/// `out = f(a, b)`; `a` and `b` broadcast to the shape of `out`, which is contiguous.
pub(crate) fn binary(f: Binary, a: &Tensor, b: &Tensor, out: &Tensor) {
    let _timer = out.device().time("arithmetic");
    if out.dtype == DType::I64 {
        return of_integers(f, a, b, out);
    }
    with_float!(out.dtype, "arithmetic", T => match f {
        Binary::Add => zip::<T>(a, b, out, |x, y| x + y),
        Binary::Sub => zip::<T>(a, b, out, |x, y| x - y),
        Binary::Mul => zip::<T>(a, b, out, |x, y| x * y),
        Binary::Div => zip::<T>(a, b, out, |x, y| x / y),
        Binary::Maximum => zip::<T>(a, b, out, |x, y| x.larger(y)),
        Binary::Minimum => zip::<T>(a, b, out, |x, y| -(-x).larger(-y)),
        Binary::FloorDiv | Binary::Remainder => unreachable!("of whole numbers alone"),
    });
}

/// The same of whole numbers. Panics if one is divided by zero.
fn of_integers(f: Binary, a: &Tensor, b: &Tensor, out: &Tensor) {
    if matches!(f, Binary::FloorDiv | Binary::Remainder) {
        assert!(out.count() == 0 || !b.to_vec::<i64>().contains(&0), "a division of whole numbers by 0");
    }
    match f {
        Binary::Add => zip(a, b, out, i64::wrapping_add),
        Binary::Sub => zip(a, b, out, i64::wrapping_sub),
        Binary::Mul => zip(a, b, out, i64::wrapping_mul),
        Binary::Maximum => zip(a, b, out, i64::max),
        Binary::Minimum => zip(a, b, out, i64::min),
        Binary::FloorDiv => zip(a, b, out, floor_div),
        Binary::Remainder => zip(a, b, out, |x: i64, y| x.wrapping_sub(floor_div(x, y).wrapping_mul(y))),
        Binary::Div => panic!("div: a quotient of whole numbers may be none: cast to floats, or `floor_div`"),
    }
}

/// The quotient, rounded down.
fn floor_div(x: i64, y: i64) -> i64 {
    let quotient = x.wrapping_div(y);
    let is_above = x.wrapping_rem(y) != 0 && (x < 0) != (y < 0);
    quotient - i64::from(is_above)
}

/// `out = f(a, b)` for each element.
fn zip<T: Element>(a: &Tensor, b: &Tensor, out: &Tensor, f: impl Fn(T, T) -> T + Copy + Sync) {
    let shape = *out.shape();
    let (ga, gb) = (a.geometry.broadcast_to(shape), b.geometry.broadcast_to(shape));
    let device = out.device();
    let arch = device.arch();
    let order = out.dense_order();
    let even = ga.lies_in(order) && gb.lies_in(order);
    if !even && order != Order::RowMajor {
        // Seldom: operands that lie in different orders.
        let rows = Tensor::stale(device, shape, out.dtype);
        zip(a, b, &rows, f);
        return out.copy_from(&rows);
    }
    let (va, vb, mut vo) = (a.read::<T>(), b.read::<T>(), out.write_whole::<T>());
    let (va, vb) = (&*va, &*vb);
    if even {
        let (va, vb) = (&va[ga.offset..], &vb[gb.offset..]);
        let chunk = share(device, vo.len());
        device.for_chunks(&mut vo, chunk, |i, o| {
            let (x, y) = (&va[i * chunk..][..o.len()], &vb[i * chunk..][..o.len()]);
            arch.run(
                #[inline(always)]
                || {
                    // A loop, since a closure that is handed on isn't compiled for the instruction set unless it happens to be inlined.
                    for (o, (&x, &y)) in o.iter_mut().zip(x.iter().zip(y)) {
                        *o = f(x, y);
                    }
                },
            );
        });
        return;
    }
    // Threads share out the first dimension.
    let first = shape.dims()[0];
    let rest = shape.count() / first.max(1);
    let rows = share(device, shape.count()).div_ceil(rest.max(1));
    device.for_chunks(&mut vo, (rows * rest).max(1), |i, o| {
        let part = |g: &Geometry| g.narrow(0, i * rows, o.len() / rest);
        let (ga, gb) = (part(&ga), part(&gb));
        let go = Geometry::row_major(ga.shape);
        arch.run(
            #[inline(always)]
            || {
                for_each_row([&go, &ga, &gb], |[at, x, y], [_, sx, sy], n| {
                    let o = &mut o[at..at + n];
                    match (sx, sy) {
                        (1, 1) => o
                            .iter_mut()
                            .zip(va[x..x + n].iter().zip(&vb[y..y + n]))
                            .for_each(|(o, (&x, &y))| *o = f(x, y)),
                        (1, 0) => {
                            let y = vb[y];
                            o.iter_mut().zip(&va[x..x + n]).for_each(|(o, &x)| *o = f(x, y));
                        }
                        (0, 1) => {
                            let x = va[x];
                            o.iter_mut().zip(&vb[y..y + n]).for_each(|(o, &y)| *o = f(x, y));
                        }
                        _ => {
                            o.iter_mut().enumerate().for_each(|(i, o)| *o = f(va[x + i * sx], vb[y + i * sy]))
                        }
                    }
                });
            },
        );
    });
}

/// `out = f(x)` for each element; both contiguous.
fn map<T: Element>(x: &Tensor, out: &Tensor, f: impl Fn(T) -> T + Copy + Sync) {
    let device = out.device();
    let arch = device.arch();
    let (vx, mut vo) = (x.read_dense::<T>(), out.write_whole::<T>());
    let vx = &*vx;
    let chunk = share(device, vo.len());
    device.for_chunks(&mut vo, chunk, |i, o| {
        let x = &vx[i * chunk..][..o.len()];
        arch.run(
            #[inline(always)]
            || {
                for (o, &x) in o.iter_mut().zip(x) {
                    *o = f(x);
                }
            },
        );
    });
}

/// Whether a power is one as an f32 as well.
fn is_number(p: f64) -> bool {
    p.abs() <= f64::from(f32::MAX)
}

/// `out = f(x)`; `x` is contiguous.
pub(crate) fn unary(f: Unary, x: &Tensor, out: &Tensor) {
    let _timer = out.device().time("functions");
    if out.dtype == DType::I64 {
        return of_integer(f, x, out);
    }
    with_float!(out.dtype, "an elementwise function", T => match f {
        Unary::Neg => map::<T>(x, out, #[inline(always)] |x| -x),
        Unary::Exp => map::<T>(x, out, #[inline(always)] |x| x.exp_in_lanes()),
        Unary::Ln => map::<T>(x, out, #[inline(always)] |x| x.ln_in_lanes()),
        Unary::Sqrt => map::<T>(x, out, #[inline(always)] |x| x.sqrt()),
        Unary::Tanh => map::<T>(x, out, #[inline(always)] |x| x.tanh_in_lanes()),
        Unary::Sigmoid => map::<T>(x, out, #[inline(always)] |x| T::ONE / (T::ONE + (-x).exp_in_lanes())),
        Unary::Relu => map::<T>(x, out, #[inline(always)] |x| if x > T::ZERO || x.is_nan() { x } else { T::ZERO }),
        Unary::Gelu => map::<T>(x, out, #[inline(always)] |x| x * normal_cdf(x)),
        Unary::GeluTanh => map::<T>(x, out, #[inline(always)] |x| x * gelu_tanh_share(x)),
        Unary::Silu => map::<T>(x, out, #[inline(always)] |x| x / (T::ONE + (-x).exp_in_lanes())),
        Unary::Softplus => map::<T>(x, out, #[inline(always)] |x| {
            let above = if x > T::ZERO { x } else { T::ZERO };
            above + (-x.abs()).exp_in_lanes().ln_1p_in_lanes()
        }),
        Unary::LeakyRelu(slope) => {
            let slope = T::from_f64(slope);
            map::<T>(x, out, #[inline(always)] move |x| if x > T::ZERO { x } else { slope * x })
        }
        Unary::Elu(alpha) => {
            let alpha = T::from_f64(alpha);
            map::<T>(x, out, #[inline(always)] move |x| if x > T::ZERO { x } else { alpha * x.exp_m1_in_lanes() })
        }
        Unary::Sin if are_far::<T>(x) => map::<T>(x, out, |x| if x.is_far() { x.sin() } else { x.sin_in_lanes() }),
        Unary::Sin => map::<T>(x, out, #[inline(always)] |x| x.sin_in_lanes()),
        Unary::Cos if are_far::<T>(x) => map::<T>(x, out, |x| if x.is_far() { x.cos() } else { x.cos_in_lanes() }),
        Unary::Cos => map::<T>(x, out, #[inline(always)] |x| x.cos_in_lanes()),
        Unary::Abs => map::<T>(x, out, #[inline(always)] |x| x.abs()),
        Unary::Square => map::<T>(x, out, #[inline(always)] |x| x * x),
        Unary::Powf(p) if !is_number(p) => map::<T>(x, out, |x| x.powf(T::from_f64(p))),
        Unary::Powf(p) => {
            let p = T::from_f64(p);
            map::<T>(x, out, #[inline(always)] move |x| x.pow_in_lanes(p))
        }
        Unary::Over(d) => map::<T>(x, out, #[inline(always)] |x| x / T::from_f64(d)),
        Unary::Clamp { least, most } => {
            let (least, most) = (T::from_f64(least), T::from_f64(most));
            map::<T>(x, out, #[inline(always)] move |x| {
                // Comparisons with a NaN are false, so it stays.
                let above = if x < least { least } else { x };
                if above > most { most } else { above }
            })
        }
        Unary::Affine { mul, add } => {
            let (mul, add) = (T::from_f64(mul), T::from_f64(add));
            map::<T>(x, out, #[inline(always)] |x| x.mul_add(mul, add))
        }
    });
}

/// The same of whole numbers.
fn of_integer(f: Unary, x: &Tensor, out: &Tensor) {
    match f.of_whole_numbers() {
        WholeUnary::Affine { mul, add } => map(x, out, |x: i64| x.wrapping_mul(mul).wrapping_add(add)),
        WholeUnary::Clamp { least, most } => map(x, out, |x: i64| x.clamp(least, most)),
        WholeUnary::Abs => map(x, out, i64::wrapping_abs),
        WholeUnary::Square => map(x, out, |x: i64| x.wrapping_mul(x)),
    }
}

/// Whether one of these angles is so large that only the system's functions are exact. The others have the same bits beside it as without
/// it.
fn are_far<T: InLanes>(x: &Tensor) -> bool {
    let x = x.read_dense::<T>();
    // All of them at once, which takes less time than to stop at the first.
    x.iter().fold(false, |far, x| far | x.is_far())
}

/// The share of a standard normal below x.
#[inline(always)]
fn normal_cdf<T: InLanes>(x: T) -> T {
    T::from_f64(0.5) * (T::ONE + (x * T::from_f64(std::f64::consts::FRAC_1_SQRT_2)).erf_in_lanes())
}

/// sqrt(2 / pi)
const ROOT_2_OVER_PI: f64 = 0.797_884_560_802_865_4;
/// How strongly the cube enters.
const CUBE: f64 = 0.044_715;

/// (1 + tanh u) / 2 = 1 / (1 + e^-2u) with u = sqrt(2 / pi) (x + 0.044715 x^3): nearly the share of a standard normal below x.
#[inline(always)]
fn gelu_tanh_share<T: InLanes>(x: T) -> T {
    let u = x * (T::from_f64(-2.0 * ROOT_2_OVER_PI * CUBE) * x * x + T::from_f64(-2.0 * ROOT_2_OVER_PI));
    T::ONE / (T::ONE + u.exp_in_lanes())
}

/// The derivative of x times [`gelu_tanh_share`]: with s the share, s + x s (1 - s) 2 u'.
#[inline(always)]
fn gelu_tanh_slope<T: InLanes>(x: T) -> T {
    let share = gelu_tanh_share(x);
    let twice_u = T::from_f64(6.0 * ROOT_2_OVER_PI * CUBE) * x * x + T::from_f64(2.0 * ROOT_2_OVER_PI);
    share + x * share * (T::ONE - share) * twice_u
}

/// `out = grad * f'`, with f' told from the kept value: the output for those that keep it, else the input. All contiguous.
pub(crate) fn unary_gradient(f: Unary, kept: &Tensor, grad: &Tensor, out: &Tensor) {
    let _timer = out.device().time("functions, gradient");
    with_float!(out.dtype, "an elementwise gradient", T => match f {
        Unary::Neg => map::<T>(grad, out, #[inline(always)] |g| -g),
        Unary::Exp => zip::<T>(kept, grad, out, #[inline(always)] |y, g| g * y),
        Unary::Ln => zip::<T>(kept, grad, out, #[inline(always)] |x, g| g / x),
        Unary::Sqrt => zip::<T>(kept, grad, out, #[inline(always)] |y, g| T::from_f64(0.5) * g / y),
        Unary::Tanh => zip::<T>(kept, grad, out, #[inline(always)] |y, g| g * (T::ONE - y * y)),
        Unary::Sigmoid => zip::<T>(kept, grad, out, #[inline(always)] |y, g| g * y * (T::ONE - y)),
        Unary::Relu => zip::<T>(kept, grad, out, #[inline(always)] |y, g| g.where_relu_passed(y)),
        Unary::Gelu => zip::<T>(kept, grad, out, #[inline(always)] |x, g| {
            // d/dx [x F(x)] = F(x) + x f(x), with f the normal density.
            let density = T::from_f64(0.398_942_280_401_432_7) * (T::from_f64(-0.5) * x * x).exp_in_lanes();
            g * (normal_cdf(x) + x * density)
        }),
        Unary::GeluTanh => zip::<T>(kept, grad, out, #[inline(always)] |x, g| g * gelu_tanh_slope(x)),
        Unary::Silu => zip::<T>(kept, grad, out, #[inline(always)] |x, g| {
            let share = T::ONE / (T::ONE + (-x).exp_in_lanes());
            g * share * (T::ONE + x * (T::ONE - share))
        }),
        Unary::Softplus => zip::<T>(kept, grad, out, #[inline(always)] |x, g| g / (T::ONE + (-x).exp_in_lanes())),
        Unary::LeakyRelu(slope) => {
            let slope = T::from_f64(slope);
            zip::<T>(kept, grad, out, #[inline(always)] move |x, g| if x > T::ZERO { g } else { g * slope })
        }
        Unary::Elu(alpha) => {
            let alpha = T::from_f64(alpha);
            zip::<T>(kept, grad, out, #[inline(always)] move |x, g| if x > T::ZERO { g } else { g * alpha * x.exp_in_lanes() })
        }
        Unary::Sin if are_far::<T>(kept) => {
            zip::<T>(kept, grad, out, |x, g| g * if x.is_far() { x.cos() } else { x.cos_in_lanes() });
        }
        Unary::Sin => zip::<T>(kept, grad, out, #[inline(always)] |x, g| g * x.cos_in_lanes()),
        Unary::Cos if are_far::<T>(kept) => {
            zip::<T>(kept, grad, out, |x, g| -g * if x.is_far() { x.sin() } else { x.sin_in_lanes() });
        }
        Unary::Cos => zip::<T>(kept, grad, out, #[inline(always)] |x, g| -g * x.sin_in_lanes()),
        Unary::Abs => zip::<T>(kept, grad, out, #[inline(always)] |x, g| {
            if x > T::ZERO { g } else if x < T::ZERO { -g } else { T::ZERO }
        }),
        Unary::Square => zip::<T>(kept, grad, out, #[inline(always)] |x, g| T::from_f64(2.0) * g * x),
        // x^0 is 1 everywhere; the formula would give 0 times infinity at 0.
        Unary::Powf(0.0) => map::<T>(grad, out, #[inline(always)] |_| T::ZERO),
        Unary::Powf(p) if !is_number(p) => zip::<T>(kept, grad, out, |x, g| g * T::from_f64(p) * x.powf(T::from_f64(p - 1.0))),
        Unary::Powf(p) => {
            let (p, less) = (T::from_f64(p), T::from_f64(p - 1.0));
            zip::<T>(kept, grad, out, #[inline(always)] move |x, g| g * p * x.pow_in_lanes(less))
        }
        Unary::Over(d) => map::<T>(grad, out, #[inline(always)] |g| g / T::from_f64(d)),
        Unary::Affine { mul, .. } => map::<T>(grad, out, #[inline(always)] |g| g * T::from_f64(mul)),
        Unary::Clamp { least, most } => {
            let (least, most) = (T::from_f64(least), T::from_f64(most));
            zip::<T>(kept, grad, out, #[inline(always)] |x, g| if (least < x) & (x < most) { g } else { T::ZERO })
        }
    });
}

/// `out = grad` where `mine` beats `other` or either is NaN, half of it at a tie, else 0. `sign` is 1 for a maximum, -1 for a
/// minimum.
pub(crate) fn winner_gradient(mine: &Tensor, other: &Tensor, grad: &Tensor, sign: f64, out: &Tensor) {
    let _timer = out.device().time("maximum, gradient");
    with_float!(out.dtype, "maximum", T => {
        let sign = T::from_f64(sign);
        zip::<T>(mine, other, out, |x, y| {
            let (x, y) = (x * sign, y * sign);
            if x == y { T::from_f64(0.5) } else if x < y { T::ZERO } else { T::ONE }
        });
        let weight = out.contiguous();
        let scaled = Tensor::stale(out.device(), *out.shape(), out.dtype);
        // The loser gets nothing of a gradient that is no number either.
        zip::<T>(&weight, grad, &scaled, |w, g| if w == T::ZERO { w } else { w * g });
        out.copy_from(&scaled);
    });
}

/// `sum += x`; both contiguous.
pub(crate) fn add_assign(sum: &Tensor, x: &Tensor) {
    let _timer = sum.device().time("sums of gradients");
    with_float!(sum.dtype, "add", T => {
        let device = sum.device();
        let arch = device.arch();
        let (vx, mut vo) = (x.read_dense::<T>(), sum.write_whole::<T>());
        let vx = &*vx;
        let chunk = share(device, vo.len());
        device.for_chunks(&mut vo, chunk, |i, o| {
            let x = &vx[i * chunk..][..o.len()];
            arch.run(#[inline(always)] || o.iter_mut().zip(x).for_each(|(o, &x)| *o += x));
        });
    });
}
