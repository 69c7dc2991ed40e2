//! Where the numbers of one head lie among those of all.

use crate::dtype::Float;
use crate::ops::attention::{Shares, Sight};
use crate::shape::Geometry;
use crate::storage::Write;
use crate::tensor::Tensor;
use std::marker::PhantomData;
use std::ops::Range;

/// The sizes of an attention: B samples of H heads of D numbers each, and the positions of queries and of keys.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sizes {
    batch: usize,
    pub(super) heads: usize,
    pub(super) depth: usize,
    /// How many queries are asked.
    pub(super) asking: usize,
    /// How many keys there are.
    pub(super) keys: usize,
    pub(super) sight: Sight,
}

impl Sizes {
    /// Those of queries (B, H, T, D) to keys (B, H, S, D).
    pub(super) fn of([queries, keys, _]: [&Tensor; 3], shares: Shares<'_>) -> Sizes {
        let &[batch, heads, asking, depth] = queries.dims() else { unreachable!("the op checked the shape") };
        Sizes { batch, heads, depth, asking, keys: keys.dims()[2], sight: shares.sight }
    }

    /// The positions that ask.
    pub(super) fn queries(&self) -> Range<usize> {
        self.sight.from()..self.sight.from() + self.asking
    }

    /// The heads of all samples.
    pub(super) fn all_heads(&self) -> usize {
        self.batch * self.heads
    }

    /// Head `i` of all samples' heads: its sample, and its number there.
    pub(super) fn head(&self, i: usize) -> [usize; 2] {
        [i / self.heads, i % self.heads]
    }

    /// What head `i` of all has of a view (B, H, T, D): where its first number lies, and how far apart its rows.
    pub(super) fn place(&self, i: usize, view: &Geometry) -> (usize, usize) {
        let ([sample, head], strides) = (self.head(i), &view.strides);
        (view.offset + sample * strides[0] + head * strides[1], strides[2])
    }
}

/// The buffers of some views, to be written; several views may be of one, which the first of them holds.
pub(super) struct Held<'a, T, const N: usize>([Option<Write<'a, T>>; N]);

impl<'a, T: Float, const N: usize> Held<'a, T, N> {
    pub(super) fn of(views: [&'a Tensor; N]) -> Held<'a, T, N> {
        Held(std::array::from_fn(|i| (holder(views, i) == i).then(|| views[i].write())))
    }
}

/// The first view of the same buffer.
fn holder<const N: usize>(views: [&Tensor; N], of: usize) -> usize {
    let same = |view: &Tensor| view.storage.is(&views[of].storage);
    views.into_iter().position(same).expect("it is itself one")
}

/// Views (B, H, T, D), the numbers of a row neighbours, of which threads write different heads.
pub(super) struct Heads<'a, T, const N: usize> {
    starts: [*mut T; N],
    views: [&'a Tensor; N],
    sizes: Sizes,
    of: PhantomData<&'a mut [T]>,
}

// SAFETY: whoever takes heads promises that they are different ones, so threads never touch the same element.
unsafe impl<T: Send, const N: usize> Sync for Heads<'_, T, N> {}

impl<'a, T: Float, const N: usize> Heads<'a, T, N> {
    /// Panics unless the views have these heads, and their rows lie in their buffers.
    ///
    /// # Safety
    /// The buffers are those of these views, of which no two rows overlap, and the numbers of a row are neighbours.
    pub(super) unsafe fn new(
        held: &'a mut Held<'_, T, N>,
        views: [&'a Tensor; N],
        sizes: Sizes,
    ) -> Heads<'a, T, N> {
        let buffers = held.0.each_mut().map(|held| held.as_mut().map(|held| (held.as_mut_ptr(), held.len())));
        let starts = std::array::from_fn(|i| {
            let (start, len) = buffers[holder(views, i)].expect("the first view of a buffer holds it");
            let end = views[i].geometry.end();
            let is_of =
                views[i].dims()[..2] == [sizes.batch, sizes.heads] && views[i].dims()[3] == sizes.depth;
            assert!(
                is_of && end <= len,
                "attention: a view of shape {} up to {end} of {len} numbers",
                views[i].shape()
            );
            start
        });
        Heads { starts, views, sizes, of: PhantomData }
    }

    /// Head `i` of all samples' heads.
    ///
    /// # Safety
    /// No head is taken again while it is in somebody's hands.
    pub(super) unsafe fn head(&self, i: usize) -> Head<'_, T, N> {
        assert!(i < self.sizes.all_heads(), "attention: head {i} of {:?}", self.sizes);
        Head { all: self, i }
    }
}

/// The part of one head, in somebody's hands.
pub(super) struct Head<'a, T, const N: usize> {
    all: &'a Heads<'a, T, N>,
    i: usize,
}

impl<T, const N: usize> Head<'_, T, N> {
    /// The D numbers of view `view` at position `t`.
    pub(super) fn row(&mut self, t: usize, view: usize) -> &mut [T] {
        let Heads { starts, views, sizes, .. } = *self.all;
        let dims = views[view].dims();
        assert!(t < dims[2], "attention: position {t} of a view of shape {}", views[view].shape());
        let (first, step) = sizes.place(self.i, &views[view].geometry);
        // SAFETY: inside the buffer that `Heads::new` measured, by the checks in `Heads::head` and above; nobody else has this head, as
        // the caller of `Heads::head` promised, and no two rows overlap, as the caller of `Heads::new` did.
        unsafe { std::slice::from_raw_parts_mut(starts[view].add(first + t * step), sizes.depth) }
    }
}
