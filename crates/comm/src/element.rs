//! Element types, and what a reduction does with the elements of different ranks.
//!
//! Types of less than four bytes that aren't integers are combined in single precision and rounded to the nearest after each
//! step, but for means of those whose sums could overflow. Smallest and largest of numbers, of which one is NaN, are NaN: whatever
//! the order is, all ranks get the same.

mod kinds;
mod op;

pub use kinds::Boolean;
pub use op::ReduceOp;

use bytemuck::{Pod, cast_slice, cast_slice_mut};
use std::fmt;

/// A type that collectives work on.
pub trait Element: Pod + Send + Sync + PartialEq + fmt::Debug {
    /// Its name, its number in messages, and the reductions that it takes.
    const KIND: ElementKind;
    /// What holds the sum of as many values as there are ranks, for averages; itself where it has the range.
    #[doc(hidden)]
    type Wide: Element;
    /// `into = into op from`, element by element. Panics for a reduction that the type doesn't take.
    #[doc(hidden)]
    fn combine(op: ReduceOp, into: &mut [Self], from: &[Self]);
    /// Multiplies in place.
    #[doc(hidden)]
    fn scale(values: &mut [Self], factor: f64);
    #[doc(hidden)]
    fn widened(self) -> Self::Wide;
    #[doc(hidden)]
    fn mean_of(sum: Self::Wide, ranks: usize) -> Self;
}

/// What a message says of its elements.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ElementKind {
    pub(crate) code: u8,
    pub(crate) name: &'static str,
    class: Class,
}

/// Types that take the same reductions.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Class {
    Integer,
    Float,
    Complex,
    Boolean,
}

impl ElementKind {
    pub(crate) fn name_of(code: u8) -> &'static str {
        kinds::NAMES.get(usize::from(code)).copied().unwrap_or("an unknown type")
    }

    /// Whether the type takes a reduction: numbers have no bits, complex numbers no order, truth no mean.
    pub fn takes(&self, op: ReduceOp) -> bool {
        match op {
            ReduceOp::Sum | ReduceOp::Product => true,
            ReduceOp::Average => self.class != Class::Boolean,
            ReduceOp::Min | ReduceOp::Max => self.class != Class::Complex,
            ReduceOp::And | ReduceOp::Or | ReduceOp::Xor => {
                matches!(self.class, Class::Integer | Class::Boolean)
            }
            ReduceOp::PremulSum(factor) => match self.class {
                Class::Integer => factor.fract() == 0.0,
                Class::Float | Class::Complex => true,
                Class::Boolean => false,
            },
        }
    }
}

/// The bytes of an element, by the number of its type.
pub(crate) fn size_of_code(code: u8) -> Option<usize> {
    kinds::SIZES.get(usize::from(code)).copied()
}

/// Memory of any length that any element type is aligned in.
#[derive(Clone, Default)]
pub(crate) struct Room(Vec<u128>);

impl Room {
    /// Of at least so many bytes, zeros.
    pub(crate) fn of(bytes: usize) -> Room {
        Room(vec![0; bytes.div_ceil(size_of::<u128>())])
    }

    /// Makes room for so many bytes.
    pub(crate) fn grow(&mut self, bytes: usize) {
        let words = bytes.div_ceil(size_of::<u128>());
        if self.0.len() < words {
            self.0.resize(words, 0);
        }
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        cast_slice(&self.0)
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        cast_slice_mut(&mut self.0)
    }
}

/// An element type with its type forgotten: what the engine needs to know to work on bytes, which lie as the type is aligned.
#[derive(Clone, Copy)]
pub(crate) struct Erased {
    pub(crate) bytes: usize,
    pub(crate) combine: fn(ReduceOp, &mut [u8], &[u8]),
}

impl Erased {
    pub(crate) fn of<T: Element>() -> Erased {
        Erased {
            bytes: size_of::<T>(),
            combine: |op, into, from| T::combine(op, cast_slice_mut(into), cast_slice(from)),
        }
    }
}

/// What holds the sums of a mean.
pub(crate) fn widen<T: Element>(values: &[T]) -> Vec<T::Wide> {
    values.iter().map(|value| value.widened()).collect()
}

/// The means of so many ranks' sums.
pub(crate) fn means<T: Element>(sums: &[T::Wide], ranks: usize, values: &mut [T]) {
    values.iter_mut().zip(sums).for_each(|(value, &sum)| *value = T::mean_of(sum, ranks));
}

/// Whether means of a type are taken of sums of another.
pub(crate) fn is_widened<T: Element>(op: ReduceOp) -> bool {
    op == ReduceOp::Average && T::KIND != T::Wide::KIND
}
