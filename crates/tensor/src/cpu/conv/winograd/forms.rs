//! The matrices of [`super`]'s forms, each as what it does to the vectors of a row or a column.
//!
//! F(M, 3) comes from M + 1 numbers at which two polynomials are multiplied, and infinity. The small form takes 0, 1 and -1. The large one
//! takes 0, 5/8, -5/8, 3/2 and -3/2, the best of the pairs of eighths that were tried: it rounds away half of what it would with the usual 0,
//! 1, -1, 2 and -2. In single precision, over 64 channels, its errors are five times (of outputs) and two and a half times (of kernels'
//! gradients) those of [`crate::cpu::conv::pixels`]' sums, in the mean.

use crate::cpu::lanes::Lanes;
use pulp::Simd;

/// A matrix of O rows and I columns.
pub(in crate::cpu::conv) trait Matrix<const I: usize, const O: usize> {
    /// The matrix times these.
    fn times<T: Lanes, S: Simd>(simd: S, values: [T::Vector<S>; I]) -> [T::Vector<S>; O];
}

/// A form for outputs in squares of M x M, each of which sees N x N pixels.
pub(in crate::cpu::conv) trait Form<const M: usize, const N: usize>:
    Send + Sync
{
    /// B', of pixels.
    type Pixels: Matrix<N, N>;
    /// G, of kernels.
    type Kernels: Matrix<3, N>;
    /// A', to outputs.
    type Outputs: Matrix<N, M>;
    /// A, of outputs' gradients.
    type OutputGrads: Matrix<M, N>;
    /// G', to kernels' gradients.
    type KernelGrads: Matrix<N, 3>;
}

/// F(2, 3)
pub(in crate::cpu::conv) struct Small;

/// F(4, 3)
pub(in crate::cpu::conv) struct Large;

/// The five matrices of a form.
pub(in crate::cpu::conv) struct Pixels<F>(F);
pub(in crate::cpu::conv) struct Kernels<F>(F);
pub(in crate::cpu::conv) struct Outputs<F>(F);
pub(in crate::cpu::conv) struct OutputGrads<F>(F);
pub(in crate::cpu::conv) struct KernelGrads<F>(F);

impl Form<2, 4> for Small {
    type Pixels = Pixels<Small>;
    type Kernels = Kernels<Small>;
    type Outputs = Outputs<Small>;
    type OutputGrads = OutputGrads<Small>;
    type KernelGrads = KernelGrads<Small>;
}

impl Form<4, 6> for Large {
    type Pixels = Pixels<Large>;
    type Kernels = Kernels<Large>;
    type Outputs = Outputs<Large>;
    type OutputGrads = OutputGrads<Large>;
    type KernelGrads = KernelGrads<Large>;
}

impl Matrix<4, 4> for Pixels<Small> {
    #[inline(always)]
    fn times<T: Lanes, S: Simd>(simd: S, [a, b, c, d]: [T::Vector<S>; 4]) -> [T::Vector<S>; 4] {
        [T::minus(simd, a, c), T::plus(simd, b, c), T::minus(simd, c, b), T::minus(simd, b, d)]
    }
}

impl Matrix<3, 4> for Kernels<Small> {
    #[inline(always)]
    fn times<T: Lanes, S: Simd>(simd: S, [a, b, c]: [T::Vector<S>; 3]) -> [T::Vector<S>; 4] {
        let half = T::splat(simd, T::from_f64(0.5));
        let outer = T::times(simd, half, T::plus(simd, a, c));
        let middle = T::times(simd, half, b);
        [a, T::plus(simd, outer, middle), T::minus(simd, outer, middle), c]
    }
}

impl Matrix<4, 2> for Outputs<Small> {
    #[inline(always)]
    fn times<T: Lanes, S: Simd>(simd: S, [a, b, c, d]: [T::Vector<S>; 4]) -> [T::Vector<S>; 2] {
        [T::plus(simd, a, T::plus(simd, b, c)), T::minus(simd, T::minus(simd, b, c), d)]
    }
}

impl Matrix<2, 4> for OutputGrads<Small> {
    #[inline(always)]
    fn times<T: Lanes, S: Simd>(simd: S, [p, q]: [T::Vector<S>; 2]) -> [T::Vector<S>; 4] {
        let zero = T::splat(simd, T::ZERO);
        [p, T::plus(simd, p, q), T::minus(simd, p, q), T::minus(simd, zero, q)]
    }
}

impl Matrix<4, 3> for KernelGrads<Small> {
    #[inline(always)]
    fn times<T: Lanes, S: Simd>(simd: S, [a, b, c, d]: [T::Vector<S>; 4]) -> [T::Vector<S>; 3] {
        let half = T::splat(simd, T::from_f64(0.5));
        let sum = T::times(simd, half, T::plus(simd, b, c));
        let difference = T::times(simd, half, T::minus(simd, b, c));
        [T::plus(simd, a, sum), difference, T::plus(simd, sum, d)]
    }
}

// What the large form is made of: its numbers, which single precision holds exactly with their powers and products, and for each the
// product of its distances to the others, which G divides by.
const P: f64 = 5.0 / 8.0;
const Q: f64 = 3.0 / 2.0;
const P2: f64 = P * P;
const Q2: f64 = Q * Q;
const FROM_0: f64 = P2 * Q2;
const FROM_P: f64 = 2.0 * P2 * (P2 - Q2);
const FROM_Q: f64 = 2.0 * Q2 * (Q2 - P2);

/// `a number + b`
#[inline(always)]
fn add_times<T: Lanes, S: Simd>(simd: S, number: f64, a: T::Vector<S>, b: T::Vector<S>) -> T::Vector<S> {
    T::multiply_add(simd, a, T::splat(simd, T::from_f64(number)), b)
}

/// `a number`
#[inline(always)]
fn by<T: Lanes, S: Simd>(simd: S, number: f64, a: T::Vector<S>) -> T::Vector<S> {
    T::times(simd, a, T::splat(simd, T::from_f64(number)))
}

impl Matrix<6, 6> for Pixels<Large> {
    #[inline(always)]
    fn times<T: Lanes, S: Simd>(simd: S, [a, b, c, d, e, f]: [T::Vector<S>; 6]) -> [T::Vector<S>; 6] {
        let [even_p, odd_p] = [add_times::<T, S>(simd, -Q2, c, e), add_times::<T, S>(simd, -Q2, b, d)];
        let [even_q, odd_q] = [add_times::<T, S>(simd, -P2, c, e), add_times::<T, S>(simd, -P2, b, d)];
        [
            add_times::<T, S>(simd, P2 * Q2, a, add_times::<T, S>(simd, -P2 - Q2, c, e)),
            add_times::<T, S>(simd, P, odd_p, even_p),
            add_times::<T, S>(simd, -P, odd_p, even_p),
            add_times::<T, S>(simd, Q, odd_q, even_q),
            add_times::<T, S>(simd, -Q, odd_q, even_q),
            add_times::<T, S>(simd, P2 * Q2, b, add_times::<T, S>(simd, -P2 - Q2, d, f)),
        ]
    }
}

impl Matrix<3, 6> for Kernels<Large> {
    #[inline(always)]
    fn times<T: Lanes, S: Simd>(simd: S, [a, b, c]: [T::Vector<S>; 3]) -> [T::Vector<S>; 6] {
        let outer_p = by::<T, S>(simd, 1.0 / FROM_P, add_times::<T, S>(simd, P2, c, a));
        let outer_q = by::<T, S>(simd, 1.0 / FROM_Q, add_times::<T, S>(simd, Q2, c, a));
        [
            by::<T, S>(simd, 1.0 / FROM_0, a),
            add_times::<T, S>(simd, P / FROM_P, b, outer_p),
            add_times::<T, S>(simd, -P / FROM_P, b, outer_p),
            add_times::<T, S>(simd, Q / FROM_Q, b, outer_q),
            add_times::<T, S>(simd, -Q / FROM_Q, b, outer_q),
            c,
        ]
    }
}

impl Matrix<6, 4> for Outputs<Large> {
    #[inline(always)]
    fn times<T: Lanes, S: Simd>(simd: S, [a, b, c, d, e, f]: [T::Vector<S>; 6]) -> [T::Vector<S>; 4] {
        let [even_p, odd_p] = [T::plus(simd, b, c), T::minus(simd, b, c)];
        let [even_q, odd_q] = [T::plus(simd, d, e), T::minus(simd, d, e)];
        [
            T::plus(simd, a, T::plus(simd, even_p, even_q)),
            add_times::<T, S>(simd, P, odd_p, by::<T, S>(simd, Q, odd_q)),
            add_times::<T, S>(simd, P2, even_p, by::<T, S>(simd, Q2, even_q)),
            add_times::<T, S>(simd, P * P2, odd_p, add_times::<T, S>(simd, Q * Q2, odd_q, f)),
        ]
    }
}

impl Matrix<4, 6> for OutputGrads<Large> {
    #[inline(always)]
    fn times<T: Lanes, S: Simd>(simd: S, [a, b, c, d]: [T::Vector<S>; 4]) -> [T::Vector<S>; 6] {
        let [even_p, odd_p] = [add_times::<T, S>(simd, P2, c, a), add_times::<T, S>(simd, P2, d, b)];
        let [even_q, odd_q] = [add_times::<T, S>(simd, Q2, c, a), add_times::<T, S>(simd, Q2, d, b)];
        [
            a,
            add_times::<T, S>(simd, P, odd_p, even_p),
            add_times::<T, S>(simd, -P, odd_p, even_p),
            add_times::<T, S>(simd, Q, odd_q, even_q),
            add_times::<T, S>(simd, -Q, odd_q, even_q),
            d,
        ]
    }
}

impl Matrix<6, 3> for KernelGrads<Large> {
    #[inline(always)]
    fn times<T: Lanes, S: Simd>(simd: S, [a, b, c, d, e, f]: [T::Vector<S>; 6]) -> [T::Vector<S>; 3] {
        let [even_p, odd_p] = [T::plus(simd, b, c), T::minus(simd, b, c)];
        let [even_q, odd_q] = [T::plus(simd, d, e), T::minus(simd, d, e)];
        let [p, q] = [by::<T, S>(simd, 1.0 / FROM_P, even_p), by::<T, S>(simd, 1.0 / FROM_Q, even_q)];
        [
            add_times::<T, S>(simd, 1.0 / FROM_0, a, T::plus(simd, p, q)),
            add_times::<T, S>(simd, P / FROM_P, odd_p, by::<T, S>(simd, Q / FROM_Q, odd_q)),
            add_times::<T, S>(simd, P2, p, add_times::<T, S>(simd, Q2, q, f)),
        ]
    }
}
