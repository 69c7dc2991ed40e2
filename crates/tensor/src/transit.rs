//! Elements on their way between a GPU's arena and pinned memory of the host, on streams of their own: beside what is computed,
//! without a buffer between the two, and in no turn with the samples that come up meanwhile. A GPU does what comes up and what goes down at
//! once, so each has a stream.

use crate::arena::{Arena, Span};
use crate::device::Backend;
use crate::dtype::Element;
use crate::gpu::{Engine, succeeded};
use crate::storage::OnGpu;
use phalanx_cuda::{Error, Event};
use std::fmt;
use std::ops::Range;

/// A span of a GPU, some of whose elements may be on their way. It stays borrowed for writing; given up, it is the compute stream that
/// waits for them, as whoever uses the memory next does.
#[must_use = "the elements are on their way until the span is taken"]
pub struct Transit<T: Element> {
    /// None only once it was taken out.
    span: Option<Span<T>>,
    /// Behind the copies, if there are any.
    passed: Option<Event>,
}

/// One that nothing is under way of.
impl<T: Element> From<Span<T>> for Transit<T> {
    fn from(span: Span<T>) -> Transit<T> {
        Transit { span: Some(span), passed: None }
    }
}

impl<T: Element> Span<T> {
    /// Overwrites elements of a GPU's span with some of a pinned arena's, beside what the GPU computes: of each pair the elements from
    /// the first on with those of the second, counted from the start of the span and of the arena. Nobody waits; the arena can be read
    /// meanwhile, and whoever writes there waits first. Panics while somebody writes there, if it isn't pinned ([`Arena::pinned`]) or of
    /// this type, if there are fewer elements, or on a CPU.
    #[track_caller]
    pub fn come_up(self, from: &Arena, runs: &[(usize, Range<usize>)]) -> Transit<T> {
        let _borrowed = from.hold::<T>();
        let engine = self.engine("come_up");
        let passed = {
            let here = self.arena().memory();
            // Memory that was given back comes anew with this, before the copies' stream is told what to wait for.
            let of = |(at, elements): &(usize, Range<usize>)| {
                let target = self.bytes_of(&(*at..*at + elements.len()));
                (bytes_in::<T>(from, elements), here.gpu(target))
            };
            let copies: Vec<_> = runs.iter().map(of).collect();
            engine.beside(engine.up(), |stream| {
                let mut pinned = from.memory().copied_by_gpu();
                let up = |(bytes, to): (Range<usize>, OnGpu<'_>)| {
                    stream.upload(&mut pinned, bytes, to.memory(), to.at)
                };
                copies.into_iter().try_for_each(up)
            })
        };
        Transit { span: Some(self), passed: Some(passed) }
    }

    /// Overwrites elements of a pinned arena with some of a GPU's span, beside what the GPU computes: of each pair the elements from the
    /// second on with those of the first, counted from the start of the arena and of the span. Nobody waits but who looks at the arena.
    /// Panics while somebody uses that, and as [`Span::come_up`] does.
    #[track_caller]
    pub fn go_down(self, runs: &[(Range<usize>, usize)], to: &Arena) -> Transit<T> {
        let _borrowed = to.flat_mut::<T>();
        let engine = self.engine("go_down");
        let passed = {
            let here = self.arena().memory();
            let of = |(elements, at): &(Range<usize>, usize)| {
                let target = bytes_in::<T>(to, &(*at..*at + elements.len()));
                (here.gpu(self.bytes_of(elements)), target)
            };
            let copies: Vec<_> = runs.iter().map(of).collect();
            engine.beside(engine.down(), |stream| {
                let mut pinned = to.memory().copied_by_gpu();
                let down = |(from, target): (OnGpu<'_>, Range<usize>)| {
                    let bytes = from.at..from.at + target.len();
                    stream.download(from.memory(), bytes, &mut pinned, target.start)
                };
                copies.into_iter().try_for_each(down)
            })
        };
        Transit { span: Some(self), passed: Some(passed) }
    }

    #[track_caller]
    fn engine(&self, op: &str) -> &Engine {
        match self.arena().device().backend() {
            Backend::Gpu(engine) => engine,
            Backend::Cpu => panic!("{op}: the span lies on a CPU, where nothing is under way by itself"),
        }
    }
}

/// Where these elements lie in an arena.
#[track_caller]
fn bytes_in<T: Element>(arena: &Arena, elements: &Range<usize>) -> Range<usize> {
    let (len, size) = (arena.layout().len(), T::DTYPE.bytes());
    assert!(elements.end <= len, "elements {elements:?} of an arena of {len}");
    elements.start * size..elements.end * size
}

impl<T: Element> Transit<T> {
    /// The span, for one who works on it as anyone does: the compute stream waits for what is on its way.
    #[track_caller]
    pub fn into_span(mut self) -> Span<T> {
        succeeded(self.join());
        self.span.take().expect("it has one until it is taken out")
    }

    pub(crate) fn span(&self) -> &Span<T> {
        self.span.as_ref().expect("it has one until it is taken out")
    }

    pub(crate) fn passed(&self) -> Option<&Event> {
        self.passed.as_ref()
    }

    fn join(&mut self) -> Result<(), Error> {
        let (Some(passed), Some(span)) = (&self.passed, &self.span) else { return Ok(()) };
        if let Backend::Gpu(engine) = span.arena().device().backend() {
            engine.gpu().compute().wait(passed)?;
            self.passed.take().into_iter().for_each(|passed| engine.spare_event(passed));
        }
        Ok(())
    }
}

impl<T: Element> Drop for Transit<T> {
    fn drop(&mut self) {
        if self.join().is_err() {
            // Nobody would wait for the copies: the span stays borrowed for good. The GPU is lost anyway.
            std::mem::forget(self.span.take());
        }
    }
}

impl<T: Element> fmt::Debug for Transit<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let params = self.span.as_ref().map(Span::params);
        write!(f, "Transit({params:?}, {})", if self.passed.is_some() { "under way" } else { "here" })
    }
}
