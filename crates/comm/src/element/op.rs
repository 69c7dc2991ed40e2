//! The reductions.

use std::fmt;

/// How elements of different ranks become one.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum ReduceOp {
    /// The sum; integers wrap. Of truths: whether any is true.
    Sum,
    /// The sum divided by the number of ranks. Sums are taken in a wider type where a type's own could overflow: those of integers,
    /// whose means are rounded towards zero, and, in single precision, those of floats of less range than that. Then more bytes are
    /// sent than the values have.
    Average,
    /// The product; integers wrap. Of truths: whether all are true.
    Product,
    /// The smallest; NaN if one is.
    Min,
    /// The largest; NaN if one is.
    Max,
    /// The bits that all have.
    And,
    /// The bits that any has.
    Or,
    /// The bits that an odd number have.
    Xor,
    /// The sum of what each rank's elements are after it multiplied them by its own factor; whole for integers, which wrap.
    PremulSum(f64),
}

/// The names, by number.
const NAMES: [&str; 9] =
    ["sum", "average", "product", "min", "max", "and", "or", "xor", "pre-multiplied sum"];

impl ReduceOp {
    /// Its number in messages. Each rank's factor is its own affair.
    pub(crate) fn code(self) -> u8 {
        match self {
            ReduceOp::Sum => 0,
            ReduceOp::Average => 1,
            ReduceOp::Product => 2,
            ReduceOp::Min => 3,
            ReduceOp::Max => 4,
            ReduceOp::And => 5,
            ReduceOp::Or => 6,
            ReduceOp::Xor => 7,
            ReduceOp::PremulSum(_) => 8,
        }
    }

    pub(crate) fn name_of(code: u8) -> &'static str {
        NAMES.get(usize::from(code)).copied().unwrap_or("unknown reduction")
    }
}

impl fmt::Display for ReduceOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(Self::name_of(self.code()))?;
        match self {
            ReduceOp::PremulSum(factor) => write!(f, " by {factor}"),
            _ => Ok(()),
        }
    }
}
