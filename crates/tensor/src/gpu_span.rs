//! Neighbouring parameters of an arena on a GPU, lent to whoever works on them there beside the compute stream: for ranks that
//! sum gradients from GPU to GPU.

use crate::arena::{Arena, Span};
use crate::device::Backend;
use crate::dtype::{DType, Element};
use phalanx_cuda::nccl::{Block, Lent, Number};
use std::ops::Range;

/// A span of a GPU's arena. The parameters stay borrowed for writing until it is dropped.
pub struct GpuSpan<T: Element>(Span<T>);

impl Arena {
    /// Parameters `params` where they lie on a GPU; none where they lie on a CPU. Panics while anyone uses one of them, or if `T` isn't
    /// the arena's dtype.
    #[track_caller]
    pub fn gpu_span<T: Element>(&self, params: Range<usize>) -> Option<GpuSpan<T>> {
        match self.device().backend() {
            Backend::Cpu => None,
            Backend::Gpu(_) => Some(GpuSpan(self.range_mut(params))),
        }
    }
}

impl<T: Element> GpuSpan<T> {
    /// Which parameters.
    pub fn params(&self) -> Range<usize> {
        self.0.params()
    }
}

/// What NCCL calls it.
pub(crate) fn number(dtype: DType) -> Number {
    match dtype {
        DType::F32 => Number::F32,
        DType::F64 => Number::F64,
        DType::BF16 => Number::Bf16,
        DType::F16 => Number::F16,
        DType::I64 => Number::I64,
        DType::U8 => Number::U8,
    }
}

// SAFETY: the write borrow of every parameter is held as long as the span is there, so nobody else gives a stream work on them
// (S-BORROW), and before and after that all work on them is given to the compute stream (S-STREAM). The memory is one that waits
// for all work before it is given back.
unsafe impl<T: Element> Lent for GpuSpan<T> {
    fn block(&self) -> Block {
        let (bytes, memory) = (self.0.bytes(), self.0.arena().memory().gpu());
        let number = number(T::DTYPE);
        Block { at: memory.address().plus(bytes.start), count: bytes.len() / number.bytes(), number }
    }
}
