//! Shapes, and how a tensor's elements lie in its buffer.

use crate::device::{Backend, Device};
use std::fmt;

/// The most dimensions a tensor can have.
pub const MAX_DIMS: usize = 6;

/// The most elements a tensor can have: their bytes fit into one allocation, whatever the dtype.
const MAX_COUNT: usize = isize::MAX as usize / 8;

/// The size of each dimension, outermost first; images are (N, C, H, W).
///
/// Invariant **SHAPE-FITS**: the product of the sizes, with 1 in the place of 0, is at most an eighth of `isize::MAX`. So no count and no
/// row-major stride overflows, and a kernel that multiplies sizes of one shape may trust the result.
#[derive(Clone, Copy, Eq)]
pub struct Shape {
    sizes: [usize; MAX_DIMS],
    n_dims: u8,
}

impl Shape {
    /// The shape with these sizes. Panics beyond [`MAX_DIMS`] dimensions, or if no memory could hold a tensor of it.
    #[track_caller]
    pub fn new(dims: &[usize]) -> Shape {
        assert!(
            dims.len() <= MAX_DIMS,
            "shape: {dims:?} has {} dimensions, the most is {MAX_DIMS}",
            dims.len()
        );
        Shape::unchecked(dims).checked()
    }

    /// The shape with these sizes, which come from a file or a peer; `None` where [`Shape::new`] would panic.
    pub fn try_new(dims: &[usize]) -> Option<Shape> {
        (dims.len() <= MAX_DIMS).then(|| Shape::unchecked(dims)).filter(Shape::fits)
    }

    /// At most [`MAX_DIMS`] sizes, whatever their product.
    fn unchecked(dims: &[usize]) -> Shape {
        let mut sizes = [1; MAX_DIMS];
        sizes[..dims.len()].copy_from_slice(dims);
        Shape { sizes, n_dims: dims.len() as u8 }
    }

    /// Whether SHAPE-FITS holds.
    fn fits(&self) -> bool {
        let count = self.dims().iter().try_fold(1usize, |n, &size| n.checked_mul(size.max(1)));
        count.is_some_and(|count| count <= MAX_COUNT)
    }

    /// This shape, once SHAPE-FITS is checked: for whoever made a size larger.
    #[track_caller]
    fn checked(self) -> Shape {
        assert!(self.fits(), "shape: {self} has more elements than memory can hold, the most is {MAX_COUNT}");
        self
    }

    /// The sizes as a slice.
    pub fn dims(&self) -> &[usize] {
        &self.sizes[..self.n_dims as usize]
    }

    pub(crate) fn dims_mut(&mut self) -> &mut [usize] {
        &mut self.sizes[..self.n_dims as usize]
    }

    /// How many dimensions there are.
    pub fn n_dims(&self) -> usize {
        self.n_dims as usize
    }

    /// How many elements a tensor of this shape has (1 for a scalar).
    pub fn count(&self) -> usize {
        self.dims().iter().product()
    }

    /// The strides, in elements, of a row-major tensor of this shape.
    pub(crate) fn row_major(&self) -> [usize; MAX_DIMS] {
        let mut strides = [1; MAX_DIMS];
        let mut next = 1;
        for d in (0..self.n_dims()).rev() {
            strides[d] = next;
            next *= self.sizes[d].max(1);
        }
        strides
    }

    /// The shape that both broadcast to under NumPy's rule, or `None`.
    #[track_caller]
    pub(crate) fn broadcast(&self, other: &Shape) -> Option<Shape> {
        let n = self.n_dims().max(other.n_dims());
        let mut out = Shape::new(&[1; MAX_DIMS][..n]);
        for d in 0..n {
            let a = if d + self.n_dims() >= n { self.sizes[d + self.n_dims() - n] } else { 1 };
            let b = if d + other.n_dims() >= n { other.sizes[d + other.n_dims() - n] } else { 1 };
            out.sizes[d] = match (a, b) {
                (a, b) if a == b => a,
                (1, b) => b,
                (a, 1) => a,
                _ => return None,
            };
        }
        Some(out.checked())
    }

    /// This shape with dimension `dim` set to `size`.
    #[track_caller]
    pub(crate) fn with(mut self, dim: usize, size: usize) -> Shape {
        self.sizes[dim] = size;
        self.checked()
    }

    /// This shape with a new dimension of `size` before dimension `dim`.
    #[track_caller]
    pub(crate) fn insert(mut self, dim: usize, size: usize) -> Shape {
        let n = self.n_dims();
        assert!(n < MAX_DIMS, "shape: {self} has {MAX_DIMS} dimensions already, the most there can be");
        self.sizes.copy_within(dim..n, dim + 1);
        self.sizes[dim] = size;
        self.n_dims += 1;
        self.checked()
    }

    /// This shape without dimension `dim`.
    pub(crate) fn without(&self, dim: usize) -> Shape {
        let mut out = Shape { sizes: [1; MAX_DIMS], n_dims: self.n_dims - 1 };
        for (to, from) in (0..self.n_dims()).filter(|&d| d != dim).enumerate() {
            out.sizes[to] = self.sizes[from];
        }
        out
    }
}

impl PartialEq for Shape {
    fn eq(&self, other: &Shape) -> bool {
        self.dims() == other.dims()
    }
}

impl<const N: usize> From<[usize; N]> for Shape {
    #[track_caller]
    fn from(dims: [usize; N]) -> Shape {
        Shape::new(&dims)
    }
}

impl From<&[usize]> for Shape {
    #[track_caller]
    fn from(dims: &[usize]) -> Shape {
        Shape::new(dims)
    }
}

impl From<&Shape> for Shape {
    fn from(shape: &Shape) -> Shape {
        *shape
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.dims())
    }
}

impl fmt::Debug for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.dims())
    }
}

/// In which order the elements of a tensor lie in memory. Shapes and indices don't depend on it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Order {
    /// The last dimension runs fastest.
    #[default]
    RowMajor,
    /// For images (N, C, H, W): they lie as (H, W, N, C), pixel by pixel, the samples of a batch side by side. What
    /// convolutions of many channels work on.
    Pixels,
    /// For kernels (O, I, KH, KW): they lie as (KH, KW, I, O), tap by tap. What such convolutions multiply images with.
    Taps,
    /// For images (N, C, H, W): they lie as (N, H, W, C), and kernels (O, I, KH, KW) as (O, KH, KW, I). What convolutions and
    /// poolings of GPUs work on.
    ChannelsLast,
}

impl Order {
    /// The order that stands for this one on `device`: what the CPU's convolutions want of images and kernels means nothing to a GPU,
    /// whose own want their channels last.
    pub fn on(self, device: &Device) -> Order {
        match self {
            Order::Pixels | Order::Taps => match device.backend() {
                Backend::Cpu => self,
                Backend::Gpu(_) => Order::ChannelsLast,
            },
            Order::RowMajor | Order::ChannelsLast => self,
        }
    }
}

/// A shape with its strides and first element: where the elements of a view lie in a buffer. Counted in elements.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct Geometry {
    pub(crate) shape: Shape,
    pub(crate) strides: [usize; MAX_DIMS],
    pub(crate) offset: usize,
}

impl Geometry {
    pub(crate) fn row_major(shape: Shape) -> Geometry {
        Geometry { shape, strides: shape.row_major(), offset: 0 }
    }

    /// Behind its last element.
    pub(crate) fn end(&self) -> usize {
        if self.shape.count() == 0 {
            return self.offset;
        }
        let apart = self.shape.dims().iter().zip(&self.strides).map(|(size, stride)| (size - 1) * stride);
        self.offset + apart.sum::<usize>() + 1
    }

    /// Without gaps, in this order. Panics unless the shape has the dimensions that it speaks of.
    #[track_caller]
    pub(crate) fn dense(shape: Shape, order: Order) -> Geometry {
        let &[n, c, h, w] = shape.dims() else {
            assert!(order == Order::RowMajor, "{order:?} order: needs four dimensions, got shape {shape}");
            return Geometry::row_major(shape);
        };
        let of_four = match order {
            Order::RowMajor => return Geometry::row_major(shape),
            Order::Pixels => [c, 1, w * n * c, n * c],
            Order::Taps => [1, n, w * n * c, n * c],
            Order::ChannelsLast => [h * w * c, 1, w * c, c],
        };
        let mut strides = [0; MAX_DIMS];
        strides[..4].copy_from_slice(&of_four);
        Geometry { shape, strides, offset: 0 }
    }

    /// Whether the elements follow each other in this order without gaps.
    pub(crate) fn lies_in(&self, order: Order) -> bool {
        match order {
            Order::RowMajor => self.is_contiguous(),
            Order::Pixels | Order::Taps | Order::ChannelsLast if self.shape.n_dims() != 4 => false,
            Order::Pixels | Order::Taps | Order::ChannelsLast => {
                let dense = Geometry::dense(self.shape, order);
                let same = |d: usize| self.shape.dims()[d] == 1 || self.strides[d] == dense.strides[d];
                self.shape.count() == 0 || (0..4).all(same)
            }
        }
    }

    /// The first of these orders that the elements follow each other in without gaps, if there is one.
    pub(crate) fn order_among(&self, orders: &[Order]) -> Option<Order> {
        orders.iter().copied().find(|&order| self.lies_in(order))
    }

    /// Whether the elements follow each other in row-major order without gaps.
    pub(crate) fn is_contiguous(&self) -> bool {
        let mut next = 1;
        for d in (0..self.shape.n_dims()).rev() {
            let size = self.shape.dims()[d];
            if size != 1 && self.strides[d] != next {
                return self.shape.count() == 0;
            }
            next *= size;
        }
        true
    }

    /// The geometry of the same elements seen as `shape` (which this one broadcasts to): stride 0 where repeated.
    pub(crate) fn broadcast_to(&self, shape: Shape) -> Geometry {
        let lead = shape.n_dims() - self.shape.n_dims();
        let mut strides = [0; MAX_DIMS];
        for d in 0..self.shape.n_dims() {
            if self.shape.dims()[d] == shape.dims()[d + lead] {
                strides[d + lead] = self.strides[d];
            }
        }
        Geometry { shape, strides, offset: self.offset }
    }
}

impl Geometry {
    /// The stretch `start..start + len` of dimension `dim`.
    pub(crate) fn narrow(&self, dim: usize, start: usize, len: usize) -> Geometry {
        let shape = self.shape.with(dim, len);
        // An empty stretch at the very end would begin behind the buffer.
        let start = if shape.count() == 0 { 0 } else { start };
        Geometry { shape, offset: self.offset + start * self.strides[dim], ..*self }
    }

    /// The first elements along dimension `dim`, without that dimension.
    pub(crate) fn without(&self, dim: usize) -> Geometry {
        let mut strides = [0; MAX_DIMS];
        let others = (0..self.shape.n_dims()).filter(|&d| d != dim).map(|d| self.strides[d]);
        strides.iter_mut().zip(others).for_each(|(to, from)| *to = from);
        Geometry { shape: self.shape.without(dim), strides, ..*self }
    }

    /// The same elements where they lie, in a shape that differs from this one by dimensions of size 1 alone.
    pub(crate) fn with_ones(&self, shape: Shape) -> Option<Geometry> {
        let mut own = (0..self.shape.n_dims()).rev().filter(|&d| self.shape.dims()[d] != 1);
        let (mut strides, mut next) = ([0; MAX_DIMS], 1);
        for (d, &size) in shape.dims().iter().enumerate().rev() {
            // One of a single element lies as in rows.
            strides[d] = match size {
                1 => next,
                _ => self.strides[own.next().filter(|&own| self.shape.dims()[own] == size)?],
            };
            next = size * strides[d];
        }
        own.next().is_none().then_some(Geometry { shape, strides, ..*self })
    }

    /// The same elements with dimensions in the order `order`.
    pub(crate) fn permute(&self, order: &[usize]) -> Geometry {
        let mut out = *self;
        for (to, &from) in order.iter().enumerate() {
            out.shape.dims_mut()[to] = self.shape.dims()[from];
            out.strides[to] = self.strides[from];
        }
        out
    }
}

/// Walks several views of one shape together, row by row: `row(offsets, strides, n)` gets, for each view, the position of
/// the row's first element and the step between its elements. Dimensions that every view runs through evenly are joined
/// first, so a walk over contiguous tensors is one row.
pub(crate) fn for_each_row<const V: usize>(
    views: [&Geometry; V],
    mut row: impl FnMut([usize; V], [usize; V], usize),
) {
    let Some(Joined { sizes, steps, inner }) = Joined::of(views) else { return };
    let mut at: [usize; V] = std::array::from_fn(|v| views[v].offset);
    let mut index = [0usize; MAX_DIMS];
    loop {
        row(at, steps[inner], sizes[inner]);
        let mut d = inner;
        loop {
            if d == 0 {
                return;
            }
            d -= 1;
            index[d] += 1;
            for v in 0..V {
                at[v] += steps[d][v];
            }
            if index[d] < sizes[d] {
                break;
            }
            for v in 0..V {
                at[v] -= steps[d][v] * sizes[d];
            }
            index[d] = 0;
        }
    }
}

/// The dimensions of views of one shape, joined where all of them run through evenly; the last is that of a row.
struct Joined<const V: usize> {
    sizes: [usize; MAX_DIMS],
    steps: [[usize; V]; MAX_DIMS],
    inner: usize,
}

impl<const V: usize> Joined<V> {
    /// None of an empty shape. Not part of the kernels that walk, of which there are hundreds, each to be compiled.
    #[inline(never)]
    fn of(views: [&Geometry; V]) -> Option<Joined<V>> {
        let shape = views[0].shape;
        let mut sizes = [1; MAX_DIMS];
        let mut steps = [[1; V]; MAX_DIMS];
        let mut n = 0;
        for d in 0..shape.n_dims() {
            let size = shape.dims()[d];
            if size == 1 {
                continue;
            }
            let step: [usize; V] = std::array::from_fn(|v| views[v].strides[d]);
            let joins = n > 0 && (0..V).all(|v| steps[n - 1][v] == step[v] * size);
            if joins {
                sizes[n - 1] *= size;
                steps[n - 1] = step;
            } else {
                sizes[n] = size;
                steps[n] = step;
                n += 1;
            }
        }
        (shape.count() > 0).then_some(Joined { sizes, steps, inner: n.saturating_sub(1) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn broadcast_follows_numpy() {
        let check = |a: &[usize], b: &[usize], want: Option<&[usize]>| {
            let got = Shape::new(a).broadcast(&Shape::new(b));
            assert_eq!(got.as_ref().map(|s| s.dims()), want, "{a:?} with {b:?}");
        };
        check(&[2, 3], &[3], Some(&[2, 3]));
        check(&[2, 1, 4], &[5, 1], Some(&[2, 5, 4]));
        check(&[], &[7], Some(&[7]));
        check(&[2], &[3], None);
        check(&[0, 3], &[1, 3], Some(&[0, 3]));
    }

    #[test]
    fn a_shape_that_no_memory_holds_is_refused() {
        for dims in [&[MAX_COUNT + 1][..], &[3, usize::MAX / 3 + 1], &[0, usize::MAX], &[1; 7]] {
            assert!(Shape::try_new(dims).is_none(), "{dims:?}");
        }
        assert_eq!(Shape::try_new(&[0, MAX_COUNT]).unwrap().count(), 0);
    }

    #[test]
    fn rows_join_where_views_are_even() {
        let whole = Geometry::row_major(Shape::new(&[4, 3, 2]));
        let mut rows = 0;
        for_each_row([&whole, &whole], |_, _, n| {
            rows += 1;
            assert_eq!(n, 24);
        });
        assert_eq!(rows, 1);
        let mut seen = Vec::new();
        let bias = Geometry::row_major(Shape::new(&[2])).broadcast_to(whole.shape);
        for_each_row([&whole, &bias], |at, step, n| {
            seen.extend((0..n).map(|i| (at[0] + i * step[0], at[1] + i * step[1])))
        });
        assert_eq!(seen, (0..24).map(|i| (i, i % 2)).collect::<Vec<_>>());
    }
}
