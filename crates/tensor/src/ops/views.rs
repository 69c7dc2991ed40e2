//! Views: other geometries over the same buffer, without a copy except where [`Tensor::reshape`] must.

use crate::dtype::DType;
use crate::kernel;
use crate::op::Op;
use crate::ops::choice::check_number;
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
        self.with_ones(self.shape().without(dim))
    }

    /// With a new dimension of size 1 before dimension `dim`.
    #[track_caller]
    pub fn unsqueeze(&self, dim: usize) -> Tensor {
        assert!(
            dim <= self.shape().n_dims(),
            "unsqueeze: dimension {dim} of a tensor of shape {}",
            self.shape()
        );
        self.with_ones(self.shape().insert(dim, 1))
    }

    /// This in a shape that differs by dimensions of size 1 alone, where it lies.
    fn with_ones(&self, shape: Shape) -> Tensor {
        let geometry = self.geometry.with_ones(shape).expect("dimensions of size 1 alone come and go");
        recorded(self.seen_as(geometry), Op::Reshape(*self.shape()), &[self], |_| [None])
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
        let first = tensors.first().unwrap_or_else(|| panic!("cat: needs at least one tensor"));
        first.check_dim("cat", dim);
        if tensors.len() == 1 {
            return (*first).clone();
        }
        let widest = tensors.iter().map(|x| x.dtype).reduce(|a, b| if a == b { a } else { a.wide() });
        let dtype = widest.unwrap_or(first.dtype);
        let like =
            |x: &&Tensor| if x.dtype.is_half() && dtype == DType::F32 { x.widened() } else { (*x).clone() };
        let tensors: Vec<Tensor> = tensors.iter().map(like).collect();
        let (first, mut len) = (&tensors[0], 0);
        for next in &tensors {
            first.check_partner("cat", next);
            let size = next.dims().get(dim).copied().unwrap_or(0);
            let fits =
                next.shape().n_dims() > dim && next.shape().with(dim, first.dims()[dim]) == *first.shape();
            assert!(
                fits,
                "cat: shapes {} and {} differ outside of dimension {dim}",
                first.shape(),
                next.shape()
            );
            len += size;
        }
        let out = Tensor::stale(first.device(), first.shape().with(dim, len), dtype);
        Tensor::lined_up(&tensors, dim, out)
    }

    /// The tensors, of one shape, side by side along a new dimension before dimension `dim`.
    ///
    /// ```
    /// use phalanx_tensor::{Device, Tensor};
    /// let device = Device::cpu(1);
    /// let [a, b] = [[1.0f32, 2.0], [3.0, 4.0]].map(|x| Tensor::from_slice(&device, &x, [2]));
    /// assert_eq!(Tensor::stack(&[&a, &b], 0).to_vec::<f32>(), [1.0, 2.0, 3.0, 4.0]);
    /// assert_eq!(Tensor::stack(&[&a, &b], 1).to_vec::<f32>(), [1.0, 3.0, 2.0, 4.0]);
    /// ```
    #[track_caller]
    pub fn stack(tensors: &[&Tensor], dim: usize) -> Tensor {
        let first = tensors.first().unwrap_or_else(|| panic!("stack: needs at least one tensor"));
        let line = |tensor: &&Tensor| {
            assert!(
                tensor.shape() == first.shape(),
                "stack: shapes {} and {} differ",
                first.shape(),
                tensor.shape()
            );
            tensor.unsqueeze(dim)
        };
        let lines: Vec<Tensor> = tensors.iter().map(line).collect();
        Tensor::cat(&lines.iter().collect::<Vec<_>>(), dim)
    }

    /// The stretches of `len` of dimension `dim`, the last of which may be shorter.
    #[track_caller]
    pub fn split(&self, len: usize, dim: usize) -> Vec<Tensor> {
        self.check_dim("split", dim);
        assert!(len > 0, "split: into stretches of 0 of dimension {dim} of shape {}", self.shape());
        let all = self.dims()[dim];
        // Nothing is one stretch of nothing.
        (0..all.max(1)).step_by(len).map(|start| self.narrow(dim, start, len.min(all - start))).collect()
    }

    /// Dimension `dim` in `n` stretches of the same length, but that the last may be shorter, or fewer where there isn't enough for so many.
    #[track_caller]
    pub fn chunk(&self, n: usize, dim: usize) -> Vec<Tensor> {
        self.check_dim("chunk", dim);
        assert!(n > 0, "chunk: dimension {dim} of shape {} into 0 stretches", self.shape());
        self.split(self.dims()[dim].div_ceil(n).max(1), dim)
    }

    /// This tensor with so many times `value` before and after what there is along dimension `dim`.
    ///
    /// ```
    /// use phalanx_tensor::{Device, Tensor};
    /// let x = Tensor::from_slice(&Device::cpu(1), &[1.0f32, 2.0], [2]);
    /// assert_eq!(x.pad(0, [1, 2], 0.5).to_vec::<f32>(), [0.5, 1.0, 2.0, 0.5, 0.5]);
    /// ```
    #[track_caller]
    pub fn pad(&self, dim: usize, [before, after]: [usize; 2], value: f64) -> Tensor {
        self.check_dim("pad", dim);
        check_number(self, value);
        let len = self.dims()[dim];
        let Some(all) = before.checked_add(len).and_then(|all| all.checked_add(after)) else {
            panic!("pad: {before} and {after} beside dimension {dim} of shape {}", self.shape())
        };
        let out = Tensor::full(self.device(), self.shape().with(dim, all), value, self.dtype);
        kernel::copy::copy(self, &out.seen_as(out.geometry.narrow(dim, before, len)));
        recorded(out, Op::Pad { dim, start: before, len }, &[self], |_| [None])
    }

    /// Dimension `dim` from its end to its beginning.
    #[track_caller]
    pub fn flip(&self, dim: usize) -> Tensor {
        self.check_dim("flip", dim);
        let x = self.contiguous();
        let out = Tensor::stale(self.device(), *self.shape(), self.dtype);
        kernel::copy::flip(&x, dim, &out);
        recorded(out, Op::Flip { dim }, &[&x], |_| [None])
    }

    /// The last two dimensions, rows and columns, with 0 above the diagonal that is this far right of the main one, or left of it.
    ///
    /// ```
    /// use phalanx_tensor::{DType, Device, Tensor};
    /// let x = Tensor::ones(&Device::cpu(1), [2, 3], DType::F32);
    /// assert_eq!(x.tril(0).to_vec::<f32>(), [1.0, 0.0, 0.0, 1.0, 1.0, 0.0]);
    /// assert_eq!(x.triu(1).to_vec::<f32>(), [0.0, 1.0, 1.0, 0.0, 0.0, 1.0]);
    /// ```
    #[track_caller]
    pub fn tril(&self, diagonal: i64) -> Tensor {
        self.masked_fill(&self.right_of_diagonal("tril").gt(diagonal as f64), 0.0)
    }

    /// The same with 0 below that diagonal.
    #[track_caller]
    pub fn triu(&self, diagonal: i64) -> Tensor {
        self.masked_fill(&self.right_of_diagonal("triu").lt(diagonal as f64), 0.0)
    }

    /// How far right of the main diagonal each element of the last two dimensions stands.
    #[track_caller]
    fn right_of_diagonal(&self, op: &str) -> Tensor {
        let &[.., rows, columns] = self.dims() else {
            panic!("{op}: needs rows and columns, got shape {}", self.shape())
        };
        let along = |n: usize| Tensor::arange(self.device(), 0..n as i64);
        along(columns) - along(rows).reshape([rows, 1])
    }

    /// `out`, filled with the tensors one after the other. In the graph halves are put together, and their halves, as an operation knows two
    /// tensors; nothing is copied twice.
    fn lined_up(tensors: &[Tensor], dim: usize, out: Tensor) -> Tensor {
        if let [one] = tensors {
            kernel::copy::copy(one, &out);
            return Tensor { node: one.node.clone(), ..out };
        }
        let (left, right) = tensors.split_at(tensors.len() / 2);
        let middle = left.iter().map(|x| x.dims()[dim]).sum();
        let stretch = |start: usize, len: usize| out.seen_as(out.geometry.narrow(dim, start, len));
        let halves = [
            Tensor::lined_up(left, dim, stretch(0, middle)),
            Tensor::lined_up(right, dim, stretch(middle, out.dims()[dim] - middle)),
        ];
        recorded(out, Op::Cat { dim, middle }, &halves.each_ref(), |_| [None])
    }
}
