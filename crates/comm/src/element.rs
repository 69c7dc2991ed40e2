//! Element types, and what a reduction does with two of them.

use bytemuck::{Pod, cast_slice, cast_slice_mut};
use std::fmt;

/// How elements of different ranks become one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ReduceOp {
    /// The sum; integers wrap.
    Sum,
    /// The sum divided by the world size; integers round towards zero.
    Average,
    /// The product; integers wrap.
    Product,
    /// The smallest.
    Min,
    /// The largest.
    Max,
}

/// A type that collectives work on.
pub trait Element: Pod + Send + Sync + PartialEq + fmt::Debug {
    /// Its name and its number in messages.
    const KIND: ElementKind;
    #[doc(hidden)]
    fn combine(op: ReduceOp, into: &mut [Self], from: &[Self]);
    #[doc(hidden)]
    fn divide(values: &mut [Self], by: usize);
}

/// What a message says of its elements.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ElementKind {
    pub(crate) code: u8,
    pub(crate) name: &'static str,
}

impl ElementKind {
    pub(crate) fn name_of(code: u8) -> &'static str {
        NAMES.get(usize::from(code)).copied().unwrap_or("an unknown type")
    }
}

fn zip<T: Copy>(into: &mut [T], from: &[T], f: impl Fn(T, T) -> T) {
    into.iter_mut().zip(from).for_each(|(a, &b)| *a = f(*a, b));
}

/// One row a type: its number in messages, and its sum, product and quotient.
macro_rules! elements {
    ($($code:literal $t:ident, $add:expr, $mul:expr, $div:expr;)*) => {
        const NAMES: &[&str] = &[$(stringify!($t)),*];
        $(impl Element for $t {
            const KIND: ElementKind = ElementKind { code: $code, name: stringify!($t) };

            fn combine(op: ReduceOp, into: &mut [Self], from: &[Self]) {
                match op {
                    ReduceOp::Sum | ReduceOp::Average => zip(into, from, $add),
                    ReduceOp::Product => zip(into, from, $mul),
                    ReduceOp::Min => zip(into, from, |a, b| if b < a { b } else { a }),
                    ReduceOp::Max => zip(into, from, |a, b| if b > a { b } else { a }),
                }
            }

            fn divide(values: &mut [Self], by: usize) {
                values.iter_mut().for_each(|v| *v = $div(*v, by));
            }
        })*
    };
}
elements! {
    0 f32, |a, b| a + b, |a, b| a * b, |a: f32, n| a / n as f32;
    1 f64, |a, b| a + b, |a, b| a * b, |a: f64, n| a / n as f64;
    2 i8, i8::wrapping_add, i8::wrapping_mul, |a: i8, n| (i128::from(a) / n as i128) as i8;
    3 i16, i16::wrapping_add, i16::wrapping_mul, |a: i16, n| (i128::from(a) / n as i128) as i16;
    4 i32, i32::wrapping_add, i32::wrapping_mul, |a: i32, n| (i128::from(a) / n as i128) as i32;
    5 i64, i64::wrapping_add, i64::wrapping_mul, |a: i64, n| (i128::from(a) / n as i128) as i64;
    6 u8, u8::wrapping_add, u8::wrapping_mul, |a: u8, n| (u128::from(a) / n as u128) as u8;
    7 u16, u16::wrapping_add, u16::wrapping_mul, |a: u16, n| (u128::from(a) / n as u128) as u16;
    8 u32, u32::wrapping_add, u32::wrapping_mul, |a: u32, n| (u128::from(a) / n as u128) as u32;
    9 u64, u64::wrapping_add, u64::wrapping_mul, |a: u64, n| (u128::from(a) / n as u128) as u64;
}

/// An element type with its type forgotten: what the engine needs to know to work on bytes. Both slices it is given start
/// on eight bytes.
#[derive(Clone, Copy)]
pub(crate) struct Erased {
    pub(crate) bytes: usize,
    pub(crate) combine: fn(ReduceOp, &mut [u8], &[u8]),
    pub(crate) divide: fn(&mut [u8], usize),
}

impl Erased {
    pub(crate) fn of<T: Element>() -> Erased {
        Erased {
            bytes: size_of::<T>(),
            combine: |op, into, from| T::combine(op, cast_slice_mut(into), cast_slice(from)),
            divide: |values, by| T::divide(cast_slice_mut(values), by),
        }
    }
}
