//! Comparisons, and what is chosen by them or by places. A mask is f32: 1 where something holds and 0 where not, so that a product of
//! two is "and", their maximum "or", and a sum counts.

use crate::dtype::DType;
use crate::kernel;
use crate::op::{Op, Relation, Unary};
use crate::ops::{keep, recorded};
use crate::shape::Shape;
use crate::tensor::Tensor;

mod sealed {
    pub trait Sealed {}
    impl Sealed for &crate::Tensor {}
    impl Sealed for f64 {}
}

/// What a tensor is compared with: another tensor, or a number.
pub trait Comparand: sealed::Sealed {
    /// As a tensor that spreads to `like`, of its type.
    #[doc(hidden)]
    fn beside(self, like: &Tensor) -> Tensor;
}

impl Comparand for &Tensor {
    fn beside(self, _: &Tensor) -> Tensor {
        self.detach()
    }
}

impl Comparand for f64 {
    #[track_caller]
    fn beside(self, like: &Tensor) -> Tensor {
        check_number(like, self);
        Tensor::scalar(like.device(), self, like.dtype())
    }
}

/// Panics if this can't be among the numbers of such a tensor.
#[track_caller]
pub(crate) fn check_number(like: &Tensor, number: f64) {
    if !like.dtype().is_float() {
        whole(like.dtype(), number);
    }
}

/// A number for a tensor of whole numbers. Panics unless it is one.
#[track_caller]
pub(crate) fn whole(dtype: DType, number: f64) -> i64 {
    let fits = number.fract() == 0.0 && (-MOST_WHOLE..MOST_WHOLE).contains(&number);
    assert!(fits, "a tensor of {dtype} with the number {number}: a whole number of 64 bits would do");
    number as i64
}

/// Whole numbers are below this: 2^63.
const MOST_WHOLE: f64 = 9_223_372_036_854_775_808.0;

/// Comparisons with another tensor or a number, broadcasting. Nothing holds of a NaN but that it isn't equal; masks have no gradient.
///
/// ```
/// use phalanx_tensor::{Device, Tensor};
/// let device = Device::cpu(1);
/// let ids = Tensor::from_slice(&device, &[7i64, 0, 3], [3]);
/// assert_eq!(ids.ne(0.0).to_vec::<f32>(), [1.0, 0.0, 1.0]);
/// let x = Tensor::from_slice(&device, &[-2.0f32, 0.5, 4.0], [3]);
/// assert_eq!(x.masked_fill(&x.gt(1.0), 1.0).to_vec::<f32>(), [-2.0, 0.5, 1.0]);
/// ```
impl Tensor {
    /// Where `self < other`.
    #[track_caller]
    pub fn lt(&self, other: impl Comparand) -> Tensor {
        compared("lt", Relation::Less, [self, &other.beside(self)])
    }

    /// Where `self <= other`.
    #[track_caller]
    pub fn le(&self, other: impl Comparand) -> Tensor {
        compared("le", Relation::AtMost, [self, &other.beside(self)])
    }

    /// Where `self > other`.
    #[track_caller]
    pub fn gt(&self, other: impl Comparand) -> Tensor {
        compared("gt", Relation::Less, [&other.beside(self), self])
    }

    /// Where `self >= other`.
    #[track_caller]
    pub fn ge(&self, other: impl Comparand) -> Tensor {
        compared("ge", Relation::AtMost, [&other.beside(self), self])
    }

    /// Where `self == other`.
    #[track_caller]
    pub fn eq(&self, other: impl Comparand) -> Tensor {
        compared("eq", Relation::Equal, [self, &other.beside(self)])
    }

    /// Where `self != other`.
    #[track_caller]
    pub fn ne(&self, other: impl Comparand) -> Tensor {
        compared("ne", Relation::Equal, [self, &other.beside(self)]).affine(-1.0, 1.0)
    }
}

/// Where the relation holds.
#[track_caller]
fn compared(op: &str, relation: Relation, [a, b]: [&Tensor; 2]) -> Tensor {
    let [a, b] = of_one_type(op, [&a.detach(), &b.detach()]);
    let mask = Tensor::stale(a.device(), spread(op, &[&a, &b]), DType::F32);
    kernel::choice::compare(relation, &a, &b, &mask);
    mask
}

/// Both in f32 where one is of 16 bits and the other of another float. Panics if they are on two devices or of types that don't go together.
#[track_caller]
fn of_one_type(op: &str, [a, b]: [&Tensor; 2]) -> [Tensor; 2] {
    let both_f32 = a.dtype != b.dtype && [a.dtype, b.dtype].map(DType::wide) == [DType::F32; 2];
    let both = [a, b].map(|x| if both_f32 { x.widened() } else { x.clone() });
    both[0].check_partner(op, &both[1]);
    both
}

/// The shape that all of these spread to.
#[track_caller]
fn spread(op: &str, tensors: &[&Tensor]) -> Shape {
    let shapes = || tensors.iter().map(|x| *x.shape());
    let spread = shapes().try_fold(Shape::new(&[]), |all, shape| all.broadcast(&shape));
    spread.unwrap_or_else(|| panic!("{op}: shapes {:?} don't broadcast", shapes().collect::<Vec<_>>()))
}

impl Tensor {
    /// This as a mask in f32, which comparisons give.
    pub(crate) fn as_mask(&self) -> Tensor {
        if self.dtype == DType::F32 { self.detach() } else { self.detach().ne(0.0) }
    }

    /// What `yes` has where this mask, f32, isn't 0, and what `no` has elsewhere, broadcasting. What isn't chosen has no part in the gradient,
    /// even where it is no number.
    #[track_caller]
    pub fn where_cond(&self, yes: &Tensor, no: &Tensor) -> Tensor {
        assert!(
            self.dtype == DType::F32,
            "where_cond: a mask is f32, as comparisons give it, got {}: `.ne(0.0)` makes it one",
            self.dtype
        );
        let [yes, no] = of_one_type("where_cond", [yes, no]);
        let out = Tensor::stale(yes.device(), spread("where_cond", &[self, &yes, &no]), yes.dtype);
        kernel::choice::choose(self, &yes, &no, &out);
        recorded(out, Op::Choose(*yes.shape(), *no.shape()), &[&yes, &no], |_| [keep(self)])
    }

    /// `value` where the mask, of a shape that spreads to this tensor's, isn't 0, and this tensor elsewhere.
    #[track_caller]
    pub fn masked_fill(&self, mask: &Tensor, value: f64) -> Tensor {
        let spread = mask.shape().broadcast(self.shape());
        assert!(
            spread == Some(*self.shape()),
            "masked_fill: a mask of shape {} for a tensor of shape {}",
            mask.shape(),
            self.shape()
        );
        mask.as_mask().where_cond(&value.beside(self), self)
    }

    /// Each element, or the bound beyond which it lies; what is no number stays. The gradient is that of what lies between the bounds, as in
    /// PyTorch.
    #[track_caller]
    pub fn clamp(&self, least: f64, most: f64) -> Tensor {
        assert!(least <= most, "clamp: to no less than {least} and no more than {most}");
        self.mapped(Unary::Clamp { least, most })
    }

    /// The elements along dimension `dim` that `index`, i64, says: it has this tensor's shape but for that dimension, and so has the
    /// result. The gradient of an element is the sum of those that were taken from it. Panics on a CPU if there is no such place; a
    /// GPU takes NaN.
    ///
    /// ```
    /// use phalanx_tensor::{Device, Tensor};
    /// let device = Device::cpu(1);
    /// let x = Tensor::from_slice(&device, &[1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0], [2, 3]);
    /// let index = Tensor::from_slice(&device, &[2i64, 0], [2, 1]);
    /// assert_eq!(x.gather(1, &index).to_vec::<f32>(), [3.0, 4.0]);
    /// ```
    #[track_caller]
    pub fn gather(&self, dim: usize, index: &Tensor) -> Tensor {
        self.check_dim("gather", dim);
        self.check_index("gather", index);
        assert!(
            index.shape().n_dims() == self.shape().n_dims()
                && *index.shape() == self.shape().with(dim, index.dims()[dim]),
            "gather: an index of shape {} along dimension {dim} of shape {}: all other dimensions are the same",
            index.shape(),
            self.shape()
        );
        let (x, index) = (self.contiguous(), index.contiguous());
        let out = Tensor::stale(self.device(), *index.shape(), self.dtype);
        kernel::choice::gather(&x, &index, dim, &out);
        recorded(out, Op::Gather { from: *self.shape(), dim }, &[&x], |_| [keep(&index)])
    }

    /// This tensor with each element of `src` added to the one along dimension `dim` that `index`, i64, says: `index` has the shape of
    /// `src`, and that is this tensor's but for that dimension. Places that aren't there are as in [`Tensor::gather`], but that no
    /// number of what a GPU gives is one then.
    ///
    /// ```
    /// use phalanx_tensor::{DType, Device, Tensor};
    /// let device = Device::cpu(1);
    /// // How often each of 3 words stands in a text.
    /// let text = Tensor::from_slice(&device, &[2i64, 0, 2, 2], [4]);
    /// let ones = Tensor::ones(&device, [4], DType::F32);
    /// let counts = Tensor::zeros(&device, [3], DType::F32).scatter_add(0, &text, &ones);
    /// assert_eq!(counts.to_vec::<f32>(), [1.0, 0.0, 3.0]);
    /// ```
    #[track_caller]
    pub fn scatter_add(&self, dim: usize, index: &Tensor, src: &Tensor) -> Tensor {
        self.check_dim("scatter_add", dim);
        self.check_partner("scatter_add", src);
        self.check_index("scatter_add", index);
        let (n, fits) =
            (self.shape().n_dims(), |x: &Tensor| *x.shape() == self.shape().with(dim, x.dims()[dim]));
        assert!(
            src.shape().n_dims() == n && index.shape() == src.shape() && fits(src),
            "scatter_add: {} at places {} along dimension {dim} of shape {}: all other dimensions are the same",
            src.shape(),
            index.shape(),
            self.shape()
        );
        let (src, index) = (src.contiguous(), index.contiguous());
        kernel::choice::check_places("scatter_add", &index, dim, self.shape());
        let out = Tensor::stale(self.device(), *self.shape(), self.dtype);
        kernel::choice::gather_gradient(&src, &index, dim, &out);
        self + recorded(out, Op::Scatter { dim }, &[&src], |_| [keep(&index)])
    }

    #[track_caller]
    fn check_index(&self, op: &str, index: &Tensor) {
        assert!(index.dtype() == DType::I64, "{op}: the index must be i64, got {}", index.dtype());
        assert!(index.device() == self.device(), "{op}: the index lives on another device");
    }

    /// The slices along dimension `dim` that `ids`, i64 of (n), says, in that order; else as [`Tensor::gather`].
    #[track_caller]
    pub fn index_select(&self, dim: usize, ids: &Tensor) -> Tensor {
        self.check_dim("index_select", dim);
        let &[n] = ids.dims() else { panic!("index_select: ids of shape {}: (n) would do", ids.shape()) };
        if !self.dtype.is_float() {
            let mut line = Shape::new(&[]);
            for d in 0..self.shape().n_dims() {
                line = line.insert(d, if d == dim { n } else { 1 });
            }
            return self.gather(dim, &ids.reshape(line).broadcast_to(self.shape().with(dim, n)));
        }
        // As rows of a table.
        let first = self.transpose(0, dim);
        let (size, shape) = (first.dims()[0], first.shape().with(0, n));
        let table = first.reshape([size, self.count() / size.max(1)]);
        table.embedding(ids).reshape(shape).transpose(0, dim)
    }
}

/// How many elements come before dimension `dim` of a shape, along it and after it.
pub(crate) fn around(shape: &Shape, dim: usize) -> [usize; 3] {
    let dims = shape.dims();
    [dims[..dim].iter().product(), dims[dim], dims[dim + 1..].iter().product()]
}
