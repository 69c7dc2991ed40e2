//! The types: one row each.

use super::{Class, Element, ElementKind, ReduceOp};
use bytemuck::{Pod, Zeroable};
use float8::{F8E4M3, F8E5M2};
use half::{bf16, f16};
use num_complex::Complex;

/// By number.
pub(super) const NAMES: &[&str] = &[
    "f32",
    "f64",
    "i8",
    "i16",
    "i32",
    "i64",
    "u8",
    "u16",
    "u32",
    "u64",
    "f16",
    "bf16",
    "f8e4m3",
    "f8e5m2",
    "bool",
    "complex64",
    "i128",
    "u128",
];

/// By number, in bytes.
pub(super) const SIZES: [usize; NAMES.len()] = [4, 8, 1, 2, 4, 8, 1, 2, 4, 8, 2, 2, 1, 1, 1, 8, 16, 16];

/// A truth that any byte may hold: 0 is false, all others are true. What `bool` is in memory is too narrow for bytes that come
/// from elsewhere.
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
#[repr(transparent)]
pub struct Boolean(u8);

impl Boolean {
    /// Whether it is true.
    pub fn get(self) -> bool {
        self.0 != 0
    }
}

impl From<bool> for Boolean {
    fn from(value: bool) -> Boolean {
        Boolean(u8::from(value))
    }
}

impl PartialEq for Boolean {
    fn eq(&self, other: &Boolean) -> bool {
        self.get() == other.get()
    }
}

fn zip<T: Copy>(into: &mut [T], from: &[T], f: impl Fn(T, T) -> T) {
    into.iter_mut().zip(from).for_each(|(a, &b)| *a = f(*a, b));
}

const fn kind(code: u8, class: Class) -> ElementKind {
    ElementKind { code, name: NAMES[code as usize], class }
}

/// Whoever calls asked [`ElementKind::takes`] first.
fn refuse<T: Element>(op: ReduceOp) -> ! {
    panic!("{op} of {}: there is no such reduction", T::KIND.name)
}

macro_rules! integers {
    ($($code:literal $t:ident, sums in $wide:ident;)*) => {
        $(impl Element for $t {
            const KIND: ElementKind = kind($code, Class::Integer);
            type Wide = $wide;

            fn combine(op: ReduceOp, into: &mut [Self], from: &[Self]) {
                match op {
                    ReduceOp::Sum | ReduceOp::Average | ReduceOp::PremulSum(_) => zip(into, from, $t::wrapping_add),
                    ReduceOp::Product => zip(into, from, $t::wrapping_mul),
                    ReduceOp::Min => zip(into, from, Ord::min),
                    ReduceOp::Max => zip(into, from, Ord::max),
                    ReduceOp::And => zip(into, from, |a, b| a & b),
                    ReduceOp::Or => zip(into, from, |a, b| a | b),
                    ReduceOp::Xor => zip(into, from, |a, b| a ^ b),
                }
            }

            fn scale(values: &mut [Self], factor: f64) {
                // Through the widest type, so that a negative factor of an unsigned type wraps as a product would.
                let factor = factor as i128 as $t;
                values.iter_mut().for_each(|value| *value = value.wrapping_mul(factor));
            }

            fn widened(self) -> $wide {
                self.into()
            }

            fn mean_of(sum: $wide, ranks: usize) -> Self {
                // The mean of values of a type is one; only a sum of 128-bit integers can have wrapped.
                (sum / ranks as $wide) as $t
            }
        })*
    };
}
integers! {
    2 i8, sums in i64;
    3 i16, sums in i64;
    4 i32, sums in i64;
    5 i64, sums in i128;
    6 u8, sums in u64;
    7 u16, sums in u64;
    8 u32, sums in u64;
    9 u64, sums in u128;
    16 i128, sums in i128;
    17 u128, sums in u128;
}

/// A row: the number, the type, the type it is computed in, the type that holds the sums of means, the way there and back.
macro_rules! floats {
    ($($code:literal $t:ident, in $in:ident, sums in $wide:ident: $there:expr, $back:expr;)*) => {
        $(impl Element for $t {
            const KIND: ElementKind = kind($code, Class::Float);
            type Wide = $wide;

            fn combine(op: ReduceOp, into: &mut [Self], from: &[Self]) {
                let with = |f: fn($in, $in) -> $in| move |a: $t, b: $t| -> $t { ($back)(f(($there)(a), ($there)(b))) };
                match op {
                    ReduceOp::Sum | ReduceOp::Average | ReduceOp::PremulSum(_) => {
                        zip(into, from, |a, b| ($back)(($there)(a) + ($there)(b)));
                    }
                    ReduceOp::Product => zip(into, from, |a, b| ($back)(($there)(a) * ($there)(b))),
                    ReduceOp::Min => zip(into, from, with(|a, b| if a < b || a.is_nan() { a } else { b })),
                    ReduceOp::Max => zip(into, from, with(|a, b| if a > b || a.is_nan() { a } else { b })),
                    ReduceOp::And | ReduceOp::Or | ReduceOp::Xor => refuse::<$t>(op),
                }
            }

            fn scale(values: &mut [Self], factor: f64) {
                values.iter_mut().for_each(|value| *value = ($back)(($there)(*value) * factor as $in));
            }

            fn widened(self) -> $wide {
                self.into()
            }

            fn mean_of(sum: $wide, ranks: usize) -> Self {
                ($back)($in::from(sum) / ranks as $in)
            }
        })*
    };
}
floats! {
    0 f32, in f32, sums in f32: |x: f32| x, |x: f32| x;
    1 f64, in f64, sums in f64: |x: f64| x, |x: f64| x;
    10 f16, in f32, sums in f32: f16::to_f32, f16::from_f32;
    11 bf16, in f32, sums in bf16: bf16::to_f32, bf16::from_f32;
    12 F8E4M3, in f32, sums in f32: |x: F8E4M3| x.to_f32(), F8E4M3::from_f32;
    13 F8E5M2, in f32, sums in f32: |x: F8E5M2| x.to_f32(), F8E5M2::from_f32;
}

impl Element for Boolean {
    const KIND: ElementKind = kind(14, Class::Boolean);
    type Wide = Boolean;

    fn combine(op: ReduceOp, into: &mut [Self], from: &[Self]) {
        let with = |f: fn(bool, bool) -> bool| move |a: Self, b: Self| f(a.get(), b.get()).into();
        match op {
            ReduceOp::Sum | ReduceOp::Max | ReduceOp::Or => zip(into, from, with(|a, b| a | b)),
            ReduceOp::Product | ReduceOp::Min | ReduceOp::And => zip(into, from, with(|a, b| a & b)),
            ReduceOp::Xor => zip(into, from, with(|a, b| a ^ b)),
            ReduceOp::Average | ReduceOp::PremulSum(_) => refuse::<Self>(op),
        }
    }

    fn scale(_: &mut [Self], factor: f64) {
        refuse::<Self>(ReduceOp::PremulSum(factor))
    }

    fn widened(self) -> Boolean {
        self
    }

    fn mean_of(_: Boolean, _: usize) -> Self {
        refuse::<Self>(ReduceOp::Average)
    }
}

impl Element for Complex<f32> {
    const KIND: ElementKind = kind(15, Class::Complex);
    type Wide = Complex<f32>;

    fn combine(op: ReduceOp, into: &mut [Self], from: &[Self]) {
        match op {
            ReduceOp::Sum | ReduceOp::Average | ReduceOp::PremulSum(_) => zip(into, from, |a, b| a + b),
            ReduceOp::Product => zip(into, from, |a, b| a * b),
            _ => refuse::<Self>(op),
        }
    }

    fn scale(values: &mut [Self], factor: f64) {
        values.iter_mut().for_each(|value| *value *= factor as f32);
    }

    fn widened(self) -> Self {
        self
    }

    fn mean_of(sum: Self, ranks: usize) -> Self {
        sum / ranks as f32
    }
}
