//! Neighbouring parameters of an arena on a GPU, lent to whoever works on them there beside the compute stream: for ranks that
//! sum gradients from GPU to GPU.

use crate::arena::{Arena, Span};
use crate::dtype::{DType, Element};
use crate::transit::Transit;
use phalanx_cuda::Event;
use phalanx_cuda::nccl::{Block, Lent, Number};
use std::ops::Range;

/// A span of a GPU's arena, of which some elements are lent. The parameters stay borrowed for writing until it is dropped.
pub struct GpuSpan<T: Element> {
    /// What is on its way is there for whoever it is lent to.
    span: Transit<T>,
    /// Counted from the start of the span.
    lent: Range<usize>,
}

impl Arena {
    /// Parameters `params` where they lie on a GPU; none where they lie on a CPU. Panics while anyone uses one of them, or if `T` isn't
    /// the arena's dtype.
    #[track_caller]
    pub fn gpu_span<T: Element>(&self, params: Range<usize>) -> Option<GpuSpan<T>> {
        self.device().gpu().and_then(|_| self.range_mut(params).on_gpu())
    }
}

impl<T: Element> Span<T> {
    /// The same to be lent out where it lies on a GPU; none on a CPU.
    pub fn on_gpu(self) -> Option<GpuSpan<T>> {
        self.arena().device().gpu()?;
        Some(Transit::from(self).on_gpu())
    }
}

impl<T: Element> Transit<T> {
    /// The same to be lent out, with what is on its way: whoever works on it there waits for that.
    pub fn on_gpu(self) -> GpuSpan<T> {
        let lent = 0..self.span().count();
        GpuSpan { span: self, lent }
    }
}

impl<T: Element> GpuSpan<T> {
    /// Which parameters.
    pub fn params(&self) -> Range<usize> {
        self.span.span().params()
    }

    /// The same with these elements, counted from the start of the span, the only ones that are lent. Panics if it hasn't got them.
    #[track_caller]
    pub fn lending(self, elements: Range<usize>) -> GpuSpan<T> {
        let len = self.span.span().count();
        assert!(
            elements.start <= elements.end && elements.end <= len,
            "elements {elements:?} of a span of {len}"
        );
        GpuSpan { lent: elements, ..self }
    }

    /// The span, for one who works on it as anyone does.
    #[track_caller]
    pub fn into_span(self) -> Span<T> {
        self.span.into_span()
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
// (S-BORROW), and before and after that all work on them is given to the compute stream (S-STREAM), but for what is on its way, whose
// event is told. The memory is one that waits for all work before it is given back.
unsafe impl<T: Element> Lent for GpuSpan<T> {
    fn block(&self) -> Block {
        let span = self.span.span();
        let (bytes, number) = (span.bytes_of(&self.lent), number(T::DTYPE));
        Block { at: span.arena().memory().gpu(bytes).address(), count: self.lent.len(), number }
    }

    fn behind(&self) -> Option<&Event> {
        self.span.passed()
    }
}
