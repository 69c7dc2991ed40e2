//! Vectors of a float type as wide as the machine has them: what kernels that keep sums in registers are written in. Plain
//! loops over slices become vectors by themselves; a block of sums that must not leave the registers does not.

use crate::cpu::gemm::Multiplied;
use pulp::Simd;

/// A float type with its vectors.
pub(crate) trait Lanes: Multiplied {
    /// As many numbers as one register holds.
    type Vector<S: Simd>: Copy;

    /// How many that is: a power of two, at most [`MOST_LANES`].
    fn lanes<S: Simd>() -> usize;
    /// The same number in all lanes.
    fn splat<S: Simd>(simd: S, value: Self) -> Self::Vector<S>;
    /// `a + b`.
    fn plus<S: Simd>(simd: S, a: Self::Vector<S>, b: Self::Vector<S>) -> Self::Vector<S>;
    /// `a - b`.
    fn minus<S: Simd>(simd: S, a: Self::Vector<S>, b: Self::Vector<S>) -> Self::Vector<S>;
    /// `a * b`.
    fn times<S: Simd>(simd: S, a: Self::Vector<S>, b: Self::Vector<S>) -> Self::Vector<S>;
    /// `a * b + c`, rounded once where the machine can.
    fn multiply_add<S: Simd>(
        simd: S,
        a: Self::Vector<S>,
        b: Self::Vector<S>,
        c: Self::Vector<S>,
    ) -> Self::Vector<S>;
    /// The whole vectors at the start of `values`.
    fn vectors<S: Simd>(values: &[Self]) -> &[Self::Vector<S>];
    /// The whole vectors at the start of `values`, to write.
    fn vectors_mut<S: Simd>(values: &mut [Self]) -> &mut [Self::Vector<S>];
}

/// Lanes of the widest vectors: 64 bytes of f32.
pub(crate) const MOST_LANES: usize = 16;

/// One row a type: its vectors and what pulp calls them.
macro_rules! lanes {
    ($($t:ty, $vector:ident, $lanes:ident, $splat:ident, $add:ident, $sub:ident, $mul:ident, $fma:ident, $read:ident, $write:ident;)*) => {$(
        impl Lanes for $t {
            type Vector<S: Simd> = S::$vector;

            #[inline(always)]
            fn lanes<S: Simd>() -> usize {
                S::$lanes
            }
            #[inline(always)]
            fn splat<S: Simd>(simd: S, value: $t) -> S::$vector {
                simd.$splat(value)
            }
            #[inline(always)]
            fn plus<S: Simd>(simd: S, a: S::$vector, b: S::$vector) -> S::$vector {
                simd.$add(a, b)
            }
            #[inline(always)]
            fn minus<S: Simd>(simd: S, a: S::$vector, b: S::$vector) -> S::$vector {
                simd.$sub(a, b)
            }
            #[inline(always)]
            fn times<S: Simd>(simd: S, a: S::$vector, b: S::$vector) -> S::$vector {
                simd.$mul(a, b)
            }
            #[inline(always)]
            fn multiply_add<S: Simd>(simd: S, a: S::$vector, b: S::$vector, c: S::$vector) -> S::$vector {
                simd.$fma(a, b, c)
            }
            #[inline(always)]
            fn vectors<S: Simd>(values: &[$t]) -> &[S::$vector] {
                S::$read(values).0
            }
            #[inline(always)]
            fn vectors_mut<S: Simd>(values: &mut [$t]) -> &mut [S::$vector] {
                S::$write(values).0
            }
        }
    )*};
}
lanes! {
    f32, f32s, F32_LANES, splat_f32s, add_f32s, sub_f32s, mul_f32s, mul_add_e_f32s, as_simd_f32s, as_mut_simd_f32s;
    f64, f64s, F64_LANES, splat_f64s, add_f64s, sub_f64s, mul_f64s, mul_add_e_f64s, as_simd_f64s, as_mut_simd_f64s;
}
