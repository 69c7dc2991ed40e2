//! Neighbouring parameters of an arena, lent to the host for writing, wherever they lie: for whoever sums gradients over ranks, or
//! takes values from them, without a GPU's help.

use crate::arena::{Arena, Span};
use crate::device::Backend;
use crate::dtype::{Element, elements_in, elements_in_mut};
use crate::gpu::Engine;
use phalanx_cuda::Pinned;
use std::ops::{Deref, DerefMut, Range};

/// A span as the host's slice. On a CPU it is the span itself; on a GPU a copy in pinned memory, which is on its way from the
/// moment that it is asked for, and goes back when this is dropped. The parameters stay borrowed for writing that long.
pub struct HostSpan<T: Element> {
    /// None where the span lies on a CPU.
    copy: Option<Pinned>,
    /// None only once it was taken out.
    span: Option<Span<T>>,
}

impl Arena {
    /// Parameters `params` for the host to write. Panics while anyone uses one of them, or if `T` isn't the arena's dtype.
    #[track_caller]
    pub fn host_span<T: Element>(&self, params: Range<usize>) -> HostSpan<T> {
        self.range_mut::<T>(params).on_host()
    }
}

impl<T: Element> Span<T> {
    /// The same for the host to write.
    #[track_caller]
    pub fn on_host(self) -> HostSpan<T> {
        let copy = match self.arena().device().backend() {
            Backend::Cpu => None,
            Backend::Gpu(engine) => Some(engine.bring(self.arena().memory(), self.bytes())),
        };
        HostSpan { copy, span: Some(self) }
    }
}

impl<T: Element> HostSpan<T> {
    /// Which parameters.
    pub fn params(&self) -> Range<usize> {
        self.span().params()
    }

    /// The span, once the values are back where they belong, in the compute stream's order: for one who works on it as anyone does.
    #[track_caller]
    pub fn into_span(mut self) -> Span<T> {
        self.put_back();
        self.span.take().expect("it has one until it is dropped")
    }

    /// Whether the values are here, so that nobody who looks at them has to wait.
    pub fn is_here(&self) -> bool {
        self.copy.as_ref().is_none_or(Engine::is_here)
    }
}

impl<T: Element> HostSpan<T> {
    fn span(&self) -> &Span<T> {
        self.span.as_ref().expect("it has one until it is dropped")
    }

    #[track_caller]
    fn put_back(&mut self) {
        if let (Some(copy), Some(span)) = (self.copy.take(), &self.span)
            && let Backend::Gpu(engine) = span.arena().device().backend()
        {
            engine.put_back(copy, span.arena().memory(), span.bytes());
        }
    }
}

impl<T: Element> Deref for HostSpan<T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        match &self.copy {
            None => self.span(),
            Some(copy) => &elements_in(Engine::here(copy))[..self.span().count()],
        }
    }
}

impl<T: Element> DerefMut for HostSpan<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        let n = self.span().count();
        match &mut self.copy {
            None => self.span.as_mut().expect("it has one until it is dropped"),
            Some(copy) => &mut elements_in_mut(Engine::here_mut(copy))[..n],
        }
    }
}

impl<T: Element> Drop for HostSpan<T> {
    fn drop(&mut self) {
        // Whatever makes the thread panic, the values are of no use to anybody any more, and the GPU may be what has failed.
        if !std::thread::panicking() {
            self.put_back();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DType, Device, Layout};

    #[test]
    fn on_a_cpu_it_is_the_span_itself() {
        let layout = Layout::new(&[[2].into(), [3].into()]);
        let arena = Arena::new(&Device::cpu(1), DType::F32, &layout);
        let mut span = arena.host_span::<f32>(1..2);
        assert!(span.is_here());
        let at = span.as_ptr();
        span[2] = 5.0;
        drop(span);
        assert_eq!(arena.tensor(1).to_vec::<f32>(), [0.0, 0.0, 5.0]);
        assert_eq!(arena.flat::<f32>()[layout.span(1..2)].as_ptr(), at);
    }
}
