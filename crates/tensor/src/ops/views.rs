//! Views: other geometries over the same buffer, without a copy except where [`Tensor::reshape`] must.

use crate::dtype::DType;
use crate::kernel;
use crate::op::Op;
use crate::ops::recorded;
use crate::shape::{Geometry, MAX_DIMS, Shape};
use crate::tensor::Tensor;

impl Tensor {
    /// The row-major elements in another shape; a copy only if they don't lie in row-major order.
    #[track_caller]
    pub fn reshape(&self, shape: impl Into<Shape>) -> Tensor {
        let shape = shape.into();
        assert!(
            shape.count() == self.count(),
            "reshape: shape {} has {} elements, {shape} has {}",
            self.shape(),
            self.count(),
            shape.count()
        );
        let source = self.contiguous();
        let out = source.seen_as(Geometry { offset: source.geometry.offset, ..Geometry::row_major(shape) });
        recorded(out, Op::Reshape(*self.shape()), &[&source], |_| [None])
    }

    /// Dimensions `dim` and later joined into one.
    #[track_caller]
    pub fn flatten_from(&self, dim: usize) -> Tensor {
        assert!(
            dim <= self.shape().n_dims(),
            "flatten_from: dimension {dim} of a tensor of shape {}",
            self.shape()
        );
        let joined = self.dims()[dim..].iter().product();
        self.reshape(Shape::new(&self.dims()[..dim]).insert(dim, joined))
    }

    /// The dimensions in the order `order`, which names each once.
    #[track_caller]
    pub fn permute(&self, order: &[usize]) -> Tensor {
        let n = self.shape().n_dims();
        let complete = order.len() == n && (0..n).all(|d| order.contains(&d));
        assert!(complete, "permute: {order:?} doesn't name each dimension of shape {} once", self.shape());
        let mut back = [0u8; MAX_DIMS];
        order.iter().enumerate().for_each(|(to, &from)| back[from] = to as u8);
        let out = self.seen_as(self.geometry.permute(order));
        recorded(out, Op::Permute(back), &[self], |_| [None])
    }

    /// Dimensions `a` and `b` exchanged.
    #[track_caller]
    pub fn transpose(&self, a: usize, b: usize) -> Tensor {
        self.check_dim("transpose", a);
        self.check_dim("transpose", b);
        let mut order: [usize; MAX_DIMS] = std::array::from_fn(|d| d);
        order.swap(a, b);
        self.permute(&order[..self.shape().n_dims()])
    }

    /// The last two dimensions exchanged.
    #[track_caller]
    pub fn t(&self) -> Tensor {
        let n = self.shape().n_dims();
        assert!(n >= 2, "t: needs two dimensions, got shape {}", self.shape());
        self.transpose(n - 2, n - 1)
    }

    /// The stretch `start..start + len` of dimension `dim`.
    #[track_caller]
    pub fn narrow(&self, dim: usize, start: usize, len: usize) -> Tensor {
        self.check_dim("narrow", dim);
        assert!(
            start.checked_add(len).is_some_and(|end| end <= self.dims()[dim]),
            "narrow: {len} from {start} on in dimension {dim} of shape {}: there are {}",
            self.shape(),
            self.dims()[dim]
        );
        let out = self.seen_as(self.geometry.narrow(dim, start, len));
        recorded(out, Op::Narrow { from: *self.shape(), dim, start }, &[self], |_| [None])
    }

    /// Without dimension `dim`, which has size 1.
    #[track_caller]
    pub fn squeeze(&self, dim: usize) -> Tensor {
        self.check_dim("squeeze", dim);
        assert!(self.dims()[dim] == 1, "squeeze: dimension {dim} of shape {} isn't 1", self.shape());
        self.reshape(self.shape().without(dim))
    }

    /// With a new dimension of size 1 before dimension `dim`.
    #[track_caller]
    pub fn unsqueeze(&self, dim: usize) -> Tensor {
        assert!(
            dim <= self.shape().n_dims(),
            "unsqueeze: dimension {dim} of a tensor of shape {}",
            self.shape()
        );
        self.reshape(self.shape().insert(dim, 1))
    }

    /// This tensor repeated to `shape`, without a copy.
    #[track_caller]
    pub fn broadcast_to(&self, shape: impl Into<Shape>) -> Tensor {
        let shape = shape.into();
        let fits = self.shape().broadcast(&shape) == Some(shape);
        assert!(fits, "broadcast_to: shape {} doesn't broadcast to {shape}", self.shape());
        let out = self.seen_as(self.geometry.broadcast_to(shape));
        recorded(out, Op::Broadcast(*self.shape()), &[self], |_| [None])
    }

    /// The tensors one after the other along `dim`; their other dimensions agree.
    #[track_caller]
    pub fn cat(tensors: &[&Tensor], dim: usize) -> Tensor {
        let [first, rest @ ..] = tensors else { panic!("cat: needs at least one tensor") };
        first.check_dim("cat", dim);
        rest.iter().fold((*first).clone(), |joined, next| joined.joined(next, dim))
    }

    #[track_caller]
    fn joined(&self, other: &Tensor, dim: usize) -> Tensor {
        if self.dtype != other.dtype && [self.dtype, other.dtype].map(DType::wide) == [DType::F32; 2] {
            return self.widened().joined(&other.widened(), dim);
        }
        self.check_partner("cat", other);
        let middle = self.dims()[dim];
        let fits = other.shape().n_dims() > dim && other.shape().with(dim, middle) == *self.shape();
        assert!(fits, "cat: shapes {} and {} differ outside of dimension {dim}", self.shape(), other.shape());
        let len = other.dims()[dim];
        let out = Tensor::stale(self.device(), self.shape().with(dim, middle + len), self.dtype);
        kernel::copy::copy(self, &out.seen_as(out.geometry.narrow(dim, 0, middle)));
        kernel::copy::copy(other, &out.seen_as(out.geometry.narrow(dim, middle, len)));
        recorded(out, Op::Cat { dim, middle }, &[self, other], |_| [None])
    }
}
