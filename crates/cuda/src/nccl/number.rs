//! What buffers hold, and how the ranks' numbers become one.

use super::foreign::{self, DataType};
use crate::element::Element;
use std::fmt;

/// What a buffer holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Number {
    /// A signed whole number of 8 bits.
    I8,
    /// A byte.
    U8,
    /// A signed whole number of 32 bits.
    I32,
    /// A whole number of 32 bits.
    U32,
    /// A signed whole number of 64 bits.
    I64,
    /// A whole number of 64 bits.
    U64,
    /// 16-bit IEEE float.
    F16,
    /// 32-bit IEEE float.
    F32,
    /// 64-bit IEEE float.
    F64,
    /// The upper half of a 32-bit IEEE float.
    Bf16,
    /// 8-bit float with 4 bits of exponent; its sums need a GPU of 9.0 or later.
    F8E4M3,
    /// 8-bit float with 5 bits of exponent; its sums need a GPU of 9.0 or later.
    F8E5M2,
}

impl Number {
    /// All of them.
    pub const ALL: [Number; 12] = [
        Number::I8,
        Number::U8,
        Number::I32,
        Number::U32,
        Number::I64,
        Number::U64,
        Number::F16,
        Number::F32,
        Number::F64,
        Number::Bf16,
        Number::F8E4M3,
        Number::F8E5M2,
    ];

    /// Size in bytes.
    pub const fn bytes(self) -> usize {
        match self {
            Number::I8 | Number::U8 | Number::F8E4M3 | Number::F8E5M2 => 1,
            Number::F16 | Number::Bf16 => 2,
            Number::I32 | Number::U32 | Number::F32 => 4,
            Number::I64 | Number::U64 | Number::F64 => 8,
        }
    }

    pub(super) const fn foreign(self) -> DataType {
        match self {
            Number::I8 => foreign::INT8,
            Number::U8 => foreign::UINT8,
            Number::I32 => foreign::INT32,
            Number::U32 => foreign::UINT32,
            Number::I64 => foreign::INT64,
            Number::U64 => foreign::UINT64,
            Number::F16 => foreign::FLOAT16,
            Number::F32 => foreign::FLOAT32,
            Number::F64 => foreign::FLOAT64,
            Number::Bf16 => foreign::BFLOAT16,
            Number::F8E4M3 => foreign::FLOAT8_E4M3,
            Number::F8E5M2 => foreign::FLOAT8_E5M2,
        }
    }

    /// A factor as this type holds it, in the first bytes of eight. Panics where numbers are none to be multiplied by a fraction.
    #[track_caller]
    pub(super) fn factor(self, factor: f64) -> [u8; 8] {
        let mut bytes = [0; 8];
        match self {
            Number::F64 => bytes = factor.to_ne_bytes(),
            Number::F32 => bytes[..4].copy_from_slice(&(factor as f32).to_ne_bytes()),
            Number::F16 => bytes[..2].copy_from_slice(&half::f16::from_f64(factor).to_ne_bytes()),
            Number::Bf16 => bytes[..2].copy_from_slice(&half::bf16::from_f64(factor).to_ne_bytes()),
            _ => panic!(
                "a sum of products with {factor}: {self} would do as float64, float32, bfloat16 or float16"
            ),
        }
        bytes
    }
}

impl From<Element> for Number {
    fn from(element: Element) -> Number {
        match element {
            Element::F32 => Number::F32,
            Element::Bf16 => Number::Bf16,
            Element::F16 => Number::F16,
        }
    }
}

impl fmt::Display for Number {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Number::I8 => "int8",
            Number::U8 => "uint8",
            Number::I32 => "int32",
            Number::U32 => "uint32",
            Number::I64 => "int64",
            Number::U64 => "uint64",
            Number::F16 => "float16",
            Number::F32 => "float32",
            Number::F64 => "float64",
            Number::Bf16 => "bfloat16",
            Number::F8E4M3 => "float8 e4m3",
            Number::F8E5M2 => "float8 e5m2",
        })
    }
}

/// How the ranks' numbers become one.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Reduction {
    /// Their sum.
    Sum,
    /// Their product.
    Product,
    /// The largest.
    Max,
    /// The smallest.
    Min,
    /// Their sum over the number of ranks; rounded to zero for whole numbers.
    Mean,
    /// The sum of their products with a factor of this rank's own: of floats of 16 bits or more.
    SumTimes(f64),
}
