//! Buffers that operations own while they run, with their types forgotten.

use crate::element::{Element, ReduceOp, is_widened, means, widen};
use std::any::Any;

/// A buffer that an operation can own while it runs.
pub trait Buffer: Send + 'static {
    /// The type of its elements.
    type Item: Element;
    /// Its elements.
    fn as_mut_slice(&mut self) -> &mut [Self::Item];
}

impl<T: Element> Buffer for Vec<T> {
    type Item = T;

    fn as_mut_slice(&mut self) -> &mut [T] {
        self
    }
}

/// A buffer with its type forgotten.
pub(crate) trait AnyBuffer: Send {
    fn bytes(&mut self) -> &mut [u8];
    /// Makes of what came what was asked for.
    fn settle(&mut self) {}
    fn into_any(self: Box<Self>) -> Box<dyn Any + Send>;
}

/// A buffer that moves as it is.
pub(crate) struct Plain<B>(pub(crate) B);

impl<B: Buffer> AnyBuffer for Plain<B> {
    fn bytes(&mut self) -> &mut [u8] {
        bytemuck::cast_slice_mut(self.0.as_mut_slice())
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any + Send> {
        Box::new(self.0)
    }
}

/// A buffer that is reduced.
pub(crate) struct Reduced<B: Buffer> {
    buffer: B,
    /// What is reduced in its place, where sums are taken in a wider type.
    wide: Option<Vec<<B::Item as Element>::Wide>>,
    op: ReduceOp,
    ranks: usize,
}

impl<B: Buffer> Reduced<B> {
    /// Makes of a rank's elements what is to be reduced.
    pub(crate) fn new(mut buffer: B, op: ReduceOp, ranks: usize) -> Reduced<B> {
        if let ReduceOp::PremulSum(factor) = op {
            B::Item::scale(buffer.as_mut_slice(), factor);
        }
        let wide = is_widened::<B::Item>(op).then(|| widen(buffer.as_mut_slice()));
        Reduced { buffer, wide, op, ranks }
    }

    /// What came of it, once it is settled.
    pub(crate) fn buffer(&mut self) -> &mut B {
        &mut self.buffer
    }
}

impl<B: Buffer> AnyBuffer for Reduced<B> {
    fn bytes(&mut self) -> &mut [u8] {
        match &mut self.wide {
            Some(wide) => bytemuck::cast_slice_mut(wide),
            None => bytemuck::cast_slice_mut(self.buffer.as_mut_slice()),
        }
    }

    fn settle(&mut self) {
        let (ranks, values) = (self.ranks, self.buffer.as_mut_slice());
        match &self.wide {
            Some(wide) => means(wide, ranks, values),
            None if self.op == ReduceOp::Average => {
                values.iter_mut().for_each(|value| *value = B::Item::mean_of(value.widened(), ranks));
            }
            None => {}
        }
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any + Send> {
        Box::new(self.buffer)
    }
}
