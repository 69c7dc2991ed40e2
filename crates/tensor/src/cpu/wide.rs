//! Kernels on floats of 16 bits: each of the others, on copies of its tensors in f32, whose results are rounded once. That is plain, and
//! the reference for GPUs; it saves a CPU no time.

use crate::cpu::batch_norm::Fused;
use crate::cpu::conv::Plan;
use crate::cpu::copy::{convert, copy};
use crate::cpu::pooling::Planes;
use crate::dtype::DType;
use crate::op::{Binary, CountPadding, Form, Relation, Unary};
use crate::ops::attention::Shares;
use crate::ops::dropout::{DropoutKey, Within};
use crate::ops::recurrent::Step;
use crate::ops::reduce::Toward;
use crate::ops::samples::{SampleImages, SampleOrder};
use crate::shape::{Geometry, Order, Shape};
use crate::tensor::Tensor;
use std::cell::{Cell, OnceCell};

/// The most tensors of a kernel.
const MOST: usize = 10;

/// The copies that one call of a kernel works on.
#[derive(Default)]
pub(crate) struct Wide<'a> {
    copies: [OnceCell<Copy<'a>>; MOST],
    taken: Cell<usize>,
}

/// A copy, and how often it had been written when it was made.
struct Copy<'a> {
    of: &'a Tensor,
    wide: Tensor,
    writes: u64,
}

impl<'a> Wide<'a> {
    /// This tensor, or a copy of it in f32 if it holds floats of 16 bits: in its order where it has no gaps, else in rows.
    fn of<'b>(&'b self, tensor: &'a Tensor) -> &'b Tensor
    where
        'a: 'b,
    {
        if !tensor.dtype.is_half() {
            return tensor;
        }
        let slot = self.taken.replace(self.taken.get() + 1);
        let copy = self.copies[slot].get_or_init(|| {
            let dense = if tensor.order().is_some() { tensor.clone() } else { tensor.detach().contiguous() };
            let wide = Tensor::stale(tensor.device(), *tensor.shape(), DType::F32);
            let wide = wide.seen_as(Geometry { offset: 0, ..dense.geometry });
            convert(&dense, &wide);
            Copy { of: tensor, writes: wide.storage.writes(), wide }
        });
        &copy.wide
    }

    /// Rounds what the kernel wrote to where it belongs.
    pub(crate) fn settle(&self) {
        for Copy { of, wide, writes } in self.copies.iter().filter_map(OnceCell::get) {
            if wide.storage.writes() == *writes {
                continue;
            }
            if of.order().is_some() {
                convert(wide, of);
            } else {
                let rounded = Tensor::stale(of.device(), *of.shape(), of.dtype);
                convert(wide, &rounded);
                copy(&rounded, of);
            }
        }
    }
}

/// What kernels take, seen in f32.
pub(crate) trait Widen<'b> {
    /// Whether it is, or has, a tensor of floats of 16 bits.
    fn is_half(&self) -> bool;

    /// The same on the copies.
    fn in_f32(self, wide: &'b Wide<'b>) -> Self;
}

impl<'b> Widen<'b> for &'b Tensor {
    fn is_half(&self) -> bool {
        self.dtype.is_half()
    }

    fn in_f32(self, wide: &'b Wide<'b>) -> &'b Tensor {
        wide.of(self)
    }
}

impl<'b, T: Widen<'b>> Widen<'b> for Option<T> {
    fn is_half(&self) -> bool {
        self.as_ref().is_some_and(Widen::is_half)
    }

    fn in_f32(self, wide: &'b Wide<'b>) -> Option<T> {
        self.map(|value| value.in_f32(wide))
    }
}

impl<'b, T: Widen<'b>, const N: usize> Widen<'b> for [T; N] {
    fn is_half(&self) -> bool {
        self.iter().any(Widen::is_half)
    }

    fn in_f32(self, wide: &'b Wide<'b>) -> [T; N] {
        self.map(|value| value.in_f32(wide))
    }
}

impl<'b, T: Widen<'b>, U: Widen<'b>> Widen<'b> for (T, U) {
    fn is_half(&self) -> bool {
        self.0.is_half() || self.1.is_half()
    }

    fn in_f32(self, wide: &'b Wide<'b>) -> (T, U) {
        (self.0.in_f32(wide), self.1.in_f32(wide))
    }
}

impl<'b> Widen<'b> for Fused<'b> {
    fn is_half(&self) -> bool {
        self.plus.is_half()
    }

    fn in_f32(self, wide: &'b Wide<'b>) -> Fused<'b> {
        Fused { plus: self.plus.in_f32(wide), ..self }
    }
}

/// What is no tensor stays as it is.
macro_rules! plain {
    ($($t:ty)*) => {$(
        impl<'b> Widen<'b> for $t {
            fn is_half(&self) -> bool { false }
            fn in_f32(self, _: &'b Wide<'b>) -> $t { self }
        }
    )*};
}
plain!(f64 usize Within Unary Binary Relation Form Plan Planes Order CountPadding Toward Step Shares<'b> &'b str &'b Shape &'b DropoutKey &'b SampleImages SampleOrder);
