//! Element types. A tensor's dtype is a run-time value; kernels are generic over [`Element`] or [`Float`] and are
//! chosen once per operation.

use half::{bf16, f16};
use std::fmt;

/// The type of a tensor's elements.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum DType {
    /// 32-bit IEEE float: what models compute in.
    F32,
    /// 64-bit IEEE float: what gradients are checked in.
    F64,
    /// The upper half of a 32-bit IEEE float: its range, with 8 bits of precision.
    BF16,
    /// 16-bit IEEE float: 11 bits of precision, and nothing beyond 65504.
    F16,
    /// 64-bit signed integer: class labels and indices.
    I64,
    /// 8-bit unsigned integer: pixels and small positions.
    U8,
}

impl DType {
    /// Size of one element in bytes.
    pub const fn bytes(self) -> usize {
        match self {
            DType::F32 => 4,
            DType::F64 | DType::I64 => 8,
            DType::BF16 | DType::F16 => 2,
            DType::U8 => 1,
        }
    }

    /// Whether values of this type can carry a gradient.
    pub const fn is_float(self) -> bool {
        matches!(self, DType::F32 | DType::F64) || self.is_half()
    }

    /// Whether it is one of the two floats of 16 bits. Values are kept in these, and computed with in f32.
    pub const fn is_half(self) -> bool {
        matches!(self, DType::BF16 | DType::F16)
    }

    /// What values of this type are computed with: f32 for floats of 16 bits, else the type itself. Statistics, and weights of norms,
    /// are kept in it.
    pub(crate) const fn wide(self) -> DType {
        if self.is_half() { DType::F32 } else { self }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            DType::F32 => "f32",
            DType::F64 => "f64",
            DType::BF16 => "bf16",
            DType::F16 => "f16",
            DType::I64 => "i64",
            DType::U8 => "u8",
        })
    }
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for f64 {}
    impl Sealed for half::bf16 {}
    impl Sealed for half::f16 {}
    impl Sealed for i64 {}
    impl Sealed for u8 {}
}

/// A Rust type that a tensor can hold: plain old data of which every bit pattern is a value.
pub trait Element: sealed::Sealed + Copy + PartialOrd + Default + Send + Sync + fmt::Debug + 'static {
    /// The run-time value that stands for this type.
    const DTYPE: DType;
    /// The nearest value of this type (integers truncate); of floats of 16 bits the one that is nearest to the nearest f32.
    fn from_f64(value: f64) -> Self;
    /// This value as a double.
    fn to_f64(self) -> f64;
}

/// One row an element type.
macro_rules! elements {
    ($($t:ty => $dtype:ident),*) => {$(
        impl Element for $t {
            const DTYPE: DType = DType::$dtype;
            #[inline(always)]
            fn from_f64(value: f64) -> Self { value as $t }
            #[inline(always)]
            fn to_f64(self) -> f64 { self as f64 }
        }
    )*};
}
elements!(f32 => F32, f64 => F64, i64 => I64, u8 => U8);

/// One row a float of 16 bits.
macro_rules! halves {
    ($($t:ty => $dtype:ident),*) => {$(
        impl Element for $t {
            const DTYPE: DType = DType::$dtype;
            // The crate's own way from a double cuts off bits before it rounds.
            #[inline(always)]
            fn from_f64(value: f64) -> Self { <$t>::from_f32(value as f32) }
            #[inline(always)]
            fn to_f64(self) -> f64 { f64::from(self.to_f32()) }
        }
    )*};
}
halves!(bf16 => BF16, f16 => F16);

/// The bytes of some elements.
pub(crate) fn bytes_of<T: Element>(values: &[T]) -> &[u8] {
    // SAFETY: elements are plain old data without padding, so all of their bytes are initialised.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) }
}

/// The bytes of some elements, to be written.
pub(crate) fn bytes_of_mut<T: Element>(values: &mut [T]) -> &mut [u8] {
    // SAFETY: as above, and every bit pattern is an element.
    unsafe { std::slice::from_raw_parts_mut(values.as_mut_ptr().cast(), size_of_val(values)) }
}

/// The whole elements that these bytes are. Panics unless the first lies where one may.
#[track_caller]
pub(crate) fn elements_in<T: Element>(bytes: &[u8]) -> &[T] {
    assert!(bytes.as_ptr().cast::<T>().is_aligned(), "bytes that don't lie as {} does", T::DTYPE);
    // SAFETY: the bytes are borrowed as long, lie as elements do, and every bit pattern is one.
    unsafe { std::slice::from_raw_parts(bytes.as_ptr().cast(), bytes.len() / size_of::<T>()) }
}

/// The same, to be written.
#[track_caller]
pub(crate) fn elements_in_mut<T: Element>(bytes: &mut [u8]) -> &mut [T] {
    assert!(bytes.as_ptr().cast::<T>().is_aligned(), "bytes that don't lie as {} does", T::DTYPE);
    // SAFETY: as above, and nobody else has them.
    unsafe { std::slice::from_raw_parts_mut(bytes.as_mut_ptr().cast(), bytes.len() / size_of::<T>()) }
}

/// The arithmetic that float kernels need.
pub trait Float:
    Element
    + std::ops::Add<Output = Self>
    + std::ops::Sub<Output = Self>
    + std::ops::Mul<Output = Self>
    + std::ops::Div<Output = Self>
    + std::ops::Neg<Output = Self>
    + std::ops::AddAssign
    + std::ops::SubAssign
    + std::ops::MulAssign
{
    /// 0.
    const ZERO: Self;
    /// 1.
    const ONE: Self;
    /// The smallest value, for a running maximum.
    const NEG_INFINITY: Self;
    /// `self * a + b`, rounded once.
    fn mul_add(self, a: Self, b: Self) -> Self;
    /// e to the power of `self`.
    fn exp(self) -> Self;
    /// Natural logarithm.
    fn ln(self) -> Self;
    /// Square root.
    fn sqrt(self) -> Self;
    /// Sine of an angle in radians.
    fn sin(self) -> Self;
    /// Cosine of an angle in radians.
    fn cos(self) -> Self;
    /// Absolute value.
    fn abs(self) -> Self;
    /// `self` to the power of `p`.
    fn powf(self, p: Self) -> Self;
    /// The larger of two; a NaN on either side wins, as in PyTorch.
    #[inline(always)]
    fn larger(self, other: Self) -> Self {
        if self > other || self.is_nan() { self } else { other }
    }
    /// This gradient where a ReLU that gave `output` passes it on: above zero, and for a NaN, as in PyTorch, so that it is seen in
    /// the gradients too.
    #[inline(always)]
    fn where_relu_passed(self, output: Self) -> Self {
        if output <= Self::ZERO { Self::ZERO } else { self }
    }
    /// Whether this is not a number.
    fn is_nan(self) -> bool;
}

/// One row a float type.
macro_rules! floats {
    ($($t:ident),*) => {$(
        impl Float for $t {
            const ZERO: Self = 0.0;
            const ONE: Self = 1.0;
            const NEG_INFINITY: Self = $t::NEG_INFINITY;
            #[inline(always)]
            fn mul_add(self, a: Self, b: Self) -> Self { $t::mul_add(self, a, b) }
            #[inline(always)]
            fn exp(self) -> Self { $t::exp(self) }
            #[inline(always)]
            fn ln(self) -> Self { $t::ln(self) }
            #[inline(always)]
            fn sqrt(self) -> Self { $t::sqrt(self) }
            #[inline(always)]
            fn sin(self) -> Self { $t::sin(self) }
            #[inline(always)]
            fn cos(self) -> Self { $t::cos(self) }
            #[inline(always)]
            fn abs(self) -> Self { $t::abs(self) }
            #[inline(always)]
            fn powf(self, p: Self) -> Self { $t::powf(self, p) }
            #[inline(always)]
            fn is_nan(self) -> bool { $t::is_nan(self) }
        }
    )*};
}
floats!(f32, f64);

/// Runs the body with `$T` bound to the float type that the dtype stands for, so that a kernel is chosen in one line.
/// A closure can't be generic, hence a macro.
macro_rules! with_float {
    ($dtype:expr, $what:expr, $T:ident => $body:expr) => {
        match $dtype {
            $crate::DType::F32 => {
                #[allow(unused_imports)]
                use $crate::dtype::{Element as _, Float as _};
                type $T = f32;
                $body
            }
            $crate::DType::F64 => {
                #[allow(unused_imports)]
                use $crate::dtype::{Element as _, Float as _};
                type $T = f64;
                $body
            }
            other => panic!("{}: needs a tensor of floats, got {other}", $what),
        }
    };
}

/// As [`with_float`], for every element type.
macro_rules! with_element {
    ($dtype:expr, $T:ident => $body:expr) => {
        match $dtype {
            $crate::DType::F32 => {
                #[allow(unused_imports)]
                use $crate::dtype::{Element as _, Float as _};
                type $T = f32;
                $body
            }
            $crate::DType::F64 => {
                #[allow(unused_imports)]
                use $crate::dtype::{Element as _, Float as _};
                type $T = f64;
                $body
            }
            $crate::DType::BF16 => {
                #[allow(unused_imports)]
                use $crate::dtype::{Element as _, Float as _};
                type $T = half::bf16;
                $body
            }
            $crate::DType::F16 => {
                #[allow(unused_imports)]
                use $crate::dtype::{Element as _, Float as _};
                type $T = half::f16;
                $body
            }
            $crate::DType::I64 => {
                #[allow(unused_imports)]
                use $crate::dtype::{Element as _, Float as _};
                type $T = i64;
                $body
            }
            $crate::DType::U8 => {
                #[allow(unused_imports)]
                use $crate::dtype::{Element as _, Float as _};
                type $T = u8;
                $body
            }
        }
    };
}
pub(crate) use {with_element, with_float};

#[cfg(test)]
mod tests {
    use super::*;

    /// The nearest, and of two that are as near the even one; what is too large becomes infinite.
    #[test]
    fn halves_round_once_and_to_even() {
        let bits =
            |x: f64| (<bf16 as Element>::from_f64(x).to_bits(), <f16 as Element>::from_f64(x).to_bits());
        let rows = [
            (1.0, 0x3f80, 0x3c00),
            (1.0 + 2f64.powi(-9), 0x3f80, 0x3c02),
            // Just above half of a last place of bf16, by a bit that is the last of an f32.
            (1.0 + 2f64.powi(-8), 0x3f80, 0x3c04),
            (1.0 + 2f64.powi(-8) + 2f64.powi(-23), 0x3f81, 0x3c04),
            (1.0 + 3.0 * 2f64.powi(-8), 0x3f82, 0x3c0c),
            (1.0 + 2f64.powi(-11), 0x3f80, 0x3c00),
            (1.0 + 2f64.powi(-11) + 2f64.powi(-23), 0x3f80, 0x3c01),
            (65519.0, 0x4780, 0x7bff),
            (65520.0, 0x4780, 0x7c00),
            (2f64.powi(-24), 0x3380, 0x0001),
            (2f64.powi(-25), 0x3300, 0x0000),
            (f64::from(f32::MAX), 0x7f80, 0x7c00),
            (-0.0, 0x8000, 0x8000),
        ];
        for (x, low, half) in rows {
            assert_eq!(bits(x), (low, half), "{x:e}");
        }
        assert_eq!(
            [<bf16 as Element>::from_f64(f64::NAN).is_nan(), <f16 as Element>::from_f64(f64::NAN).is_nan()],
            [true; 2]
        );
    }
}
