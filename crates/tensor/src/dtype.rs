//! Element types. A tensor's dtype is a run-time value; kernels are generic over [`Element`] or [`Float`] and are
//! chosen once per operation.

use std::fmt;

/// The type of a tensor's elements.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum DType {
    /// 32-bit IEEE float: what models compute in.
    F32,
    /// 64-bit IEEE float: what gradients are checked in.
    F64,
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
            DType::U8 => 1,
        }
    }

    /// Whether values of this type can carry a gradient.
    pub const fn is_float(self) -> bool {
        matches!(self, DType::F32 | DType::F64)
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            DType::F32 => "f32",
            DType::F64 => "f64",
            DType::I64 => "i64",
            DType::U8 => "u8",
        })
    }
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for f64 {}
    impl Sealed for i64 {}
    impl Sealed for u8 {}
}

/// A Rust type that a tensor can hold: plain old data of which every bit pattern is a value.
pub trait Element: sealed::Sealed + Copy + PartialOrd + Default + Send + Sync + fmt::Debug + 'static {
    /// The run-time value that stands for this type.
    const DTYPE: DType;
    /// The nearest value of this type (integers truncate).
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
    /// ln(1 + self), exact near zero.
    fn ln_1p(self) -> Self;
    /// Square root.
    fn sqrt(self) -> Self;
    /// Hyperbolic tangent.
    fn tanh(self) -> Self;
    /// Gauss error function.
    fn erf(self) -> Self;
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

/// One row a float type: the type, and the function that gives its error function.
macro_rules! floats {
    ($($t:ident, $erf:path);*) => {$(
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
            fn ln_1p(self) -> Self { $t::ln_1p(self) }
            #[inline(always)]
            fn sqrt(self) -> Self { $t::sqrt(self) }
            #[inline(always)]
            fn tanh(self) -> Self { $t::tanh(self) }
            #[inline(always)]
            fn erf(self) -> Self { $erf(self) }
            #[inline(always)]
            fn abs(self) -> Self { $t::abs(self) }
            #[inline(always)]
            fn powf(self, p: Self) -> Self { $t::powf(self, p) }
            #[inline(always)]
            fn is_nan(self) -> bool { $t::is_nan(self) }
        }
    )*};
}
floats!(f32, libm::erff; f64, libm::erf);

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
            other => panic!("{}: needs a float tensor, got {other}", $what),
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
