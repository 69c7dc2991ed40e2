//! Several buffers that travel as one.

use crate::buffer::{AnyBuffer, Reduced};
use crate::element::{Element, ReduceOp};
use bytemuck::{cast_slice, cast_slice_mut};
use std::any::Any;

/// How buffers lie in one: part 0 of each, then part 1 of each, and so on.
#[derive(Clone, Copy)]
pub(super) struct Layout {
    pub(super) parts: usize,
    /// What is done with it, and by how many ranks.
    pub(super) op: ReduceOp,
    pub(super) ranks: usize,
}

/// One buffer in the place of its members, which get their elements back when it is settled.
pub(super) struct Joined<T: Element> {
    all: Reduced<Vec<T>>,
    parts: usize,
    members: Vec<Box<dyn AnyBuffer>>,
}

impl<T: Element> Joined<T> {
    pub(super) fn new(mut members: Vec<Box<dyn AnyBuffer>>, layout: Layout) -> Joined<T> {
        let mut all = Vec::new();
        for part in 0..layout.parts {
            for member in &mut members {
                let values: &[T] = cast_slice(member.bytes());
                let len = values.len() / layout.parts;
                all.extend_from_slice(&values[part * len..(part + 1) * len]);
            }
        }
        Joined { all: Reduced::new(all, layout.op, layout.ranks), parts: layout.parts, members }
    }
}

impl<T: Element> AnyBuffer for Joined<T> {
    fn bytes(&mut self) -> &mut [u8] {
        self.all.bytes()
    }

    fn settle(&mut self) {
        self.all.settle();
        let mut rest = &self.all.buffer()[..];
        for part in 0..self.parts {
            for member in &mut self.members {
                let values: &mut [T] = cast_slice_mut(member.bytes());
                let len = values.len() / self.parts;
                let (these, after) = rest.split_at(len);
                values[part * len..(part + 1) * len].copy_from_slice(these);
                rest = after;
            }
        }
    }

    /// The members.
    fn into_any(self: Box<Self>) -> Box<dyn Any + Send> {
        let members: Vec<_> = self.members.into_iter().map(AnyBuffer::into_any).collect();
        Box::new(members)
    }
}
