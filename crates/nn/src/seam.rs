//! Where a layer meets the rest of its model.
//!
//! Somebody may hold only a part of a layer's parameters ([`Cut`]): some of its outputs, some rows of a table, some heads. The layer
//! computes with what is there, as ever; what comes in and what goes out is completed at its seam, by maps that whoever cut the
//! parameters puts there ([`crate::Visitor::of_seams`]). The layer itself knows of no more than that there may be something.

use phalanx_tensor::{Crossing, Shape, Tensor, Within};
use std::ops::Range;
use std::sync::Arc;

/// What is done around a layer. Nothing, unless somebody says so.
#[derive(Clone, Default)]
pub struct Seam {
    /// Where what comes in goes through first.
    pub enter: Option<Arc<dyn Crossing>>,
    /// Where what goes out goes through, before a bias is added.
    pub leave: Option<Arc<dyn Crossing>>,
    /// Which stretch of each sequence is here, where it has several.
    pub stretch: Option<Stretch>,
    /// Which part of the whole is here: of the rows of a table along dimension 0, of an attention's heads along dimension 1, or of what
    /// a dropout is given.
    pub within: Option<Within>,
    /// Into how many groups, which don't see each other, the channels of a convolution fall: told by the layer, 0 where there is one.
    pub groups: usize,
}

/// One of the equal stretches that each sequence falls into.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stretch {
    /// Which, from 0.
    pub number: usize,
    /// How many there are.
    pub of: usize,
}

impl Stretch {
    /// The positions of a stretch of so many.
    pub fn positions(&self, len: usize) -> Range<usize> {
        self.number * len..(self.number + 1) * len
    }
}

impl Seam {
    /// The positions of a stretch of so many, which are the first unless there are others before it.
    pub(crate) fn positions(&self, len: usize) -> Range<usize> {
        self.stretch.map_or(0..len, |stretch| stretch.positions(len))
    }

    pub(crate) fn enter(&self, x: &Tensor) -> Tensor {
        self.enter.as_ref().map_or_else(|| x.clone(), |enter| x.across(enter))
    }

    pub(crate) fn leave(&self, y: Tensor) -> Tensor {
        self.leave.as_ref().map_or_else(|| y.clone(), |leave| y.across(leave))
    }

    /// A product that leaves, plus a bias; one that goes nowhere has its bias in the same pass over memory.
    pub(crate) fn leave_product(
        &self,
        bias: Option<&Tensor>,
        product: impl FnOnce(Option<&Tensor>) -> Tensor,
    ) -> Tensor {
        match (&self.leave, bias) {
            (None, bias) => product(bias),
            (Some(_), None) => self.leave(product(None)),
            (Some(_), Some(bias)) => self.leave(product(None)) + bias,
        }
    }
}

/// Which part of a parameter is held: of a dimension that falls into `groups` stretches, the `part`th of `of` equal parts of each. A
/// weight that makes queries, keys and values side by side has three groups.
///
/// ```
/// use phalanx_nn::Cut;
/// let cut = Cut { dim: 1, groups: 2, part: 1, of: 2 };
/// let whole = [2, 8].into();
/// assert_eq!(cut.shape(&whole).dims(), [2, 4]);
/// let numbers: Vec<f32> = (0..16).map(|i| i as f32).collect();
/// assert_eq!(cut.take(&whole, &numbers), [2.0, 3.0, 6.0, 7.0, 10.0, 11.0, 14.0, 15.0]);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cut {
    /// Which dimension is cut.
    pub dim: usize,
    /// Into how many stretches it falls, each of which is cut.
    pub groups: usize,
    /// Which part is held.
    pub part: usize,
    /// How many there are.
    pub of: usize,
}

impl Cut {
    /// The shape of the part. Panics if the dimension doesn't fall into equal parts.
    #[track_caller]
    pub fn shape(&self, whole: &Shape) -> Shape {
        let (len, parts) = (whole.dims()[self.dim], self.groups * self.of);
        assert!(
            self.part < self.of && len.is_multiple_of(parts),
            "dimension {} of a parameter of shape {whole} doesn't fall into {parts} equal parts",
            self.dim
        );
        let mut dims = whole.dims().to_vec();
        dims[self.dim] = len / self.of;
        Shape::new(&dims)
    }

    /// Where the elements of the part lie among those of the whole, both row by row, in the part's order.
    fn runs(&self, whole: &Shape) -> impl Iterator<Item = Range<usize>> {
        let Cut { dim, groups, part, of } = *self;
        let dims = whole.dims();
        let behind: usize = dims[dim + 1..].iter().product();
        let (len, rows) = (dims[dim], dims[..dim].iter().product::<usize>());
        let (group, run) = (len / groups, len / groups / of);
        (0..rows * groups).map(move |i| {
            let start = (i / groups * len + i % groups * group + part * run) * behind;
            start..start + run * behind
        })
    }

    /// The part's elements, of those of the whole.
    pub fn take(&self, whole: &Shape, from: &[f32]) -> Vec<f32> {
        self.runs(whole).flat_map(|run| from[run].iter().copied()).collect()
    }

    /// The way back: puts the part's elements to their places.
    #[track_caller]
    pub fn put(&self, whole: &Shape, part: &[f32], into: &mut [f32]) {
        let mut left = part;
        for run in self.runs(whole) {
            let (now, later) = left.split_at(run.len());
            into[run].copy_from_slice(now);
            left = later;
        }
        assert!(left.is_empty(), "a part of {} elements of a parameter of shape {whole}", part.len());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_parts_together_are_the_whole() {
        for (dims, dim, groups) in [
            (vec![12], 0, 1),
            (vec![12], 0, 3),
            (vec![4, 6], 0, 1),
            (vec![4, 12], 1, 3),
            (vec![3, 4, 5], 1, 2),
        ] {
            let whole = Shape::new(&dims);
            let numbers: Vec<f32> = (0..whole.count()).map(|i| i as f32).collect();
            let mut back = vec![-1.0; whole.count()];
            for part in 0..2 {
                let cut = Cut { dim, groups, part, of: 2 };
                let taken = cut.take(&whole, &numbers);
                assert_eq!(taken.len(), cut.shape(&whole).count());
                cut.put(&whole, &taken, &mut back);
            }
            assert_eq!(back, numbers, "{dims:?} along {dim} in {groups} groups");
        }
    }
}
