//! Where the numbers of one head lie among those of all.

use crate::ops::attention::Asked;
use crate::tensor::Tensor;
use std::marker::PhantomData;
use std::ops::Range;

/// The sizes of an attention: B samples of T positions, and H heads of D numbers each, of which some positions ask.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sizes {
    pub(super) batch: usize,
    pub(super) time: usize,
    pub(super) heads: usize,
    pub(super) depth: usize,
    /// The first position that asks.
    from: usize,
    /// How many do.
    pub(super) asking: usize,
}

impl Sizes {
    /// Those of queries, keys and values, (B, T, 3 H D), of which these are asked.
    pub(super) fn of(qkv: &Tensor, asked: Asked) -> Sizes {
        let &[batch, time, width] = qkv.dims() else { unreachable!("the op checked the shape") };
        let Asked { heads, from, asking } = asked;
        Sizes { batch, time, heads, depth: width / (3 * heads), from, asking }
    }

    /// The positions that ask.
    pub(super) fn queries(&self) -> Range<usize> {
        self.from..self.from + self.asking
    }

    /// Numbers of a position in all heads.
    pub(super) fn width(&self) -> usize {
        self.heads * self.depth
    }

    /// Head `i` of all samples' heads: its sample, and its number there.
    pub(super) fn head(&self, i: usize) -> [usize; 2] {
        [i / self.heads, i % self.heads]
    }
}

/// A tensor (B, T, G, H, D) of which threads write different heads.
pub(super) struct Heads<'a, T> {
    start: *mut T,
    sizes: Sizes,
    /// T here: all positions, or those that ask.
    time: usize,
    groups: usize,
    of: PhantomData<&'a mut [T]>,
}

// SAFETY: whoever takes heads promises that they are different ones, so threads never touch the same element.
unsafe impl<T: Send> Sync for Heads<'_, T> {}

impl<'a, T> Heads<'a, T> {
    /// Panics unless `values` are those of so many positions and groups.
    pub(super) fn new(values: &'a mut [T], sizes: Sizes, time: usize, groups: usize) -> Heads<'a, T> {
        assert_eq!(values.len(), sizes.batch * time * groups * sizes.width(), "attention: {sizes:?}");
        Heads { start: values.as_mut_ptr(), sizes, time, groups, of: PhantomData }
    }

    /// Head `i` of all samples' heads.
    ///
    /// # Safety
    /// No head is taken again while it is in somebody's hands.
    pub(super) unsafe fn head(&self, i: usize) -> Head<'_, T> {
        let Sizes { batch, heads, .. } = self.sizes;
        assert!(i < batch * heads, "attention: head {i} of {} in each of {batch} samples", heads);
        Head { all: self, i }
    }
}

/// The part of one head, in somebody's hands.
pub(super) struct Head<'a, T> {
    all: &'a Heads<'a, T>,
    i: usize,
}

impl<T> Head<'_, T> {
    /// The D numbers of group `group` at position `t`.
    pub(super) fn row(&mut self, t: usize, group: usize) -> &mut [T] {
        let Heads { start, sizes, time, groups, .. } = *self.all;
        assert!(t < time && group < groups, "attention: position {t} of {time}, group {group} of {sizes:?}");
        let [sample, head] = sizes.head(self.i);
        let at = ((sample * time + t) * groups + group) * sizes.width() + head * sizes.depth;
        // SAFETY: inside the slice that `Heads::new` measured, by the checks there, in `Heads::head` and above; nobody else has
        // this head, as the caller of `Heads::head` promised, and no two rows overlap.
        unsafe { std::slice::from_raw_parts_mut(start.add(at), sizes.depth) }
    }
}
