//! Sums, means and largest values along dimensions.

use crate::dtype::DType;
use crate::kernel;
use crate::op::Op;
use crate::ops::{keep, recorded};
use crate::shape::Shape;
use crate::tensor::Tensor;

/// Which way something goes along a dimension.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Toward {
    /// From its first element to its last.
    End,
    /// From its last to its first.
    Beginning,
}

/// Whether a reduced dimension stays, with size 1, or goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keep {
    /// Stays with size 1.
    Yes,
    /// Goes.
    No,
}

impl Tensor {
    /// The sum over dimensions `dims`, which are all different.
    #[track_caller]
    pub fn sum(&self, dims: &[usize], keep: Keep) -> Tensor {
        if self.is_raised() {
            return self.widened().sum(dims, keep);
        }
        self.check_dims("sum", dims);
        let mut kept = *self.shape();
        for &dim in dims {
            kept = kept.with(dim, 1);
        }
        let out = Tensor::stale(self.device(), kept, self.dtype);
        kernel::reduce::sum(self, &out);
        let out = recorded(out, Op::Sum { from: *self.shape(), kept }, &[self], |_| [None]);
        match keep {
            Keep::Yes => out,
            Keep::No => {
                let mut shape = kept;
                for dim in (0..kept.n_dims()).rev().filter(|d| dims.contains(d)) {
                    shape = shape.without(dim);
                }
                out.reshape(shape)
            }
        }
    }

    /// The mean over dimensions `dims`, which are all different.
    #[track_caller]
    pub fn mean(&self, dims: &[usize], keep: Keep) -> Tensor {
        self.check_dims("mean", dims);
        if self.dtype.is_half() {
            // The sum may be larger than any number of the type.
            return self.widened().mean(dims, keep).cast(self.dtype);
        }
        let n: usize = dims.iter().map(|&dim| self.dims()[dim]).product();
        self.sum(dims, keep) / n as f64
    }

    /// The variance over dimensions `dims`: the mean square distance from the mean, of all but `correction` of them. That is 1 for an
    /// estimate from a sample, which is PyTorch's default, and 0 for the variance of the numbers themselves.
    ///
    /// ```
    /// use phalanx_tensor::{Device, Keep, Tensor};
    /// let x = Tensor::from_slice(&Device::cpu(1), &[1.0f64, 2.0, 6.0], [3]);
    /// assert_eq!((x.var(&[0], Keep::No, 1).item(), x.var(&[0], Keep::No, 0).item()), (7.0, 14.0 / 3.0));
    /// ```
    #[track_caller]
    pub fn var(&self, dims: &[usize], keep: Keep, correction: usize) -> Tensor {
        self.check_dims("var", dims);
        if self.dtype.is_half() {
            return self.widened().var(dims, keep, correction).cast(self.dtype);
        }
        let n: usize = dims.iter().map(|&dim| self.dims()[dim]).product();
        let apart = self - self.mean(dims, Keep::Yes);
        apart.square().sum(dims, keep) / n.saturating_sub(correction) as f64
    }

    /// The square root of [`Tensor::var`]; where that is 0 it hands no gradient back, as in PyTorch.
    #[track_caller]
    pub fn std(&self, dims: &[usize], keep: Keep, correction: usize) -> Tensor {
        // Of floats of 16 bits the variance may be no number of the type.
        let var = self.widened().var(dims, keep, correction);
        let none = var.eq(0.0);
        let std = var.masked_fill(&none, 1.0).sqrt().masked_fill(&none, 0.0);
        if self.is_raised() { std } else { std.cast(self.dtype) }
    }

    /// The logarithm of the sum of the exponentials along dimension `dim`, also of large numbers.
    ///
    /// ```
    /// use phalanx_tensor::{Device, Keep, Tensor};
    /// let x = Tensor::from_slice(&Device::cpu(1), &[1000.0f64, 1000.0], [2]);
    /// assert_eq!(x.logsumexp(0, Keep::No).item(), 1000.0 + 2f64.ln());
    /// ```
    #[track_caller]
    pub fn logsumexp(&self, dim: usize, keep: Keep) -> Tensor {
        if self.is_raised() {
            return self.widened().logsumexp(dim, keep);
        }
        self.check_dim("logsumexp", dim);
        if self.dims()[dim] == 0 {
            let kept = Tensor::full(self.device(), self.shape().with(dim, 1), f64::NEG_INFINITY, self.dtype);
            return if keep == Keep::Yes { kept } else { kept.squeeze(dim) };
        }
        let largest = self.detach().max(dim, Keep::Yes);
        // Of nothing but -infinity, or with infinity, that is what the logarithm gives.
        let shift = largest.masked_fill(&largest.abs().eq(f64::INFINITY), 0.0);
        let sum = (self - &shift).exp().sum(&[dim], Keep::Yes).ln() + shift;
        if keep == Keep::Yes { sum } else { sum.squeeze(dim) }
    }

    /// The sums of each element along dimension `dim` and all before it.
    ///
    /// ```
    /// use phalanx_tensor::{Device, Tensor};
    /// let x = Tensor::from_slice(&Device::cpu(1), &[1.0f32, 2.0, 3.0], [3]);
    /// assert_eq!(x.cumsum(0).to_vec::<f32>(), [1.0, 3.0, 6.0]);
    /// ```
    #[track_caller]
    pub fn cumsum(&self, dim: usize) -> Tensor {
        self.check_dim("cumsum", dim);
        if self.is_raised() {
            return self.widened().cumsum(dim);
        }
        let x = self.contiguous();
        let out = Tensor::stale(self.device(), *self.shape(), self.dtype);
        kernel::reduce::running_sums(&x, dim, Toward::End, &out);
        recorded(out, Op::RunningSum { dim }, &[&x], |_| [None])
    }

    #[track_caller]
    fn check_dims(&self, op: &str, dims: &[usize]) {
        for (i, &dim) in dims.iter().enumerate() {
            self.check_dim(op, dim);
            assert!(
                !dims[..i].contains(&dim),
                "{op}: dimension {dim} of shape {} stands twice in {dims:?}: name each once",
                self.shape()
            );
        }
    }

    /// The sum of all elements, as a scalar.
    pub fn sum_all(&self) -> Tensor {
        let flat = self.reshape([self.count()]);
        flat.sum(&[0], Keep::No)
    }

    /// The mean of all elements, as a scalar.
    pub fn mean_all(&self) -> Tensor {
        if self.dtype.is_half() {
            return self.widened().mean_all().cast(self.dtype);
        }
        self.sum_all() / self.count() as f64
    }

    /// The largest along dimension `dim`; the gradient goes to the first of them.
    #[track_caller]
    pub fn max(&self, dim: usize, keep_dim: Keep) -> Tensor {
        let (largest, index) = self.largest("max", dim);
        let op = Op::Max { from: *self.shape(), dim };
        let out = recorded(largest, op, &[self], |_| [keep(&index)]);
        if keep_dim == Keep::Yes { out } else { out.squeeze(dim) }
    }

    /// The smallest along dimension `dim`; the gradient goes to the first of them.
    #[track_caller]
    pub fn min(&self, dim: usize, keep_dim: Keep) -> Tensor {
        self.neg().max(dim, keep_dim).neg()
    }

    /// The `k` largest along dimension `dim`, the largest first, and where they stand, as i64: both have size `k` there. Of equals the first
    /// comes first, and NaN comes before every number. With `k` as large as the dimension that sorts it. A GPU looks for one after the
    /// other, which takes time with `k`.
    ///
    /// ```
    /// use phalanx_tensor::{Device, Tensor};
    /// let scores = Tensor::from_slice(&Device::cpu(1), &[0.5f32, 3.0, -1.0, 2.0], [1, 4]);
    /// let (values, places) = scores.topk(2, 1);
    /// assert_eq!((values.to_vec::<f32>(), places.to_vec::<i64>()), (vec![3.0, 2.0], vec![1, 3]));
    /// ```
    #[track_caller]
    pub fn topk(&self, k: usize, dim: usize) -> (Tensor, Tensor) {
        self.check_dim("topk", dim);
        assert!(self.dtype.is_float(), "topk: needs a tensor of floats, got {}", self.dtype);
        let width = self.dims()[dim];
        assert!(k <= width, "topk: {k} of dimension {dim} of shape {}, which has {width}", self.shape());
        let last = self.shape().n_dims() - 1;
        let rows = self.detach().transpose(dim, last);
        let n = self.count() / width.max(1);
        let index = Tensor::stale(self.device(), [n, k].into(), DType::I64);
        kernel::reduce::top_rows(&rows.reshape([n, width]).contiguous(), &index);
        let index = index.reshape(rows.shape().with(last, k)).transpose(dim, last).contiguous();
        (self.gather(dim, &index), index)
    }

    /// Where the first of the largest along dimension `dim` stands, as i64, without that dimension.
    #[track_caller]
    pub fn argmax(&self, dim: usize) -> Tensor {
        self.largest("argmax", dim).1.squeeze(dim)
    }

    /// Where the first of the smallest along dimension `dim` stands, as i64, without that dimension.
    #[track_caller]
    pub fn argmin(&self, dim: usize) -> Tensor {
        self.neg().argmax(dim)
    }

    /// Largest values and their positions along `dim`, which stays with size 1.
    #[track_caller]
    fn largest(&self, op: &str, dim: usize) -> (Tensor, Tensor) {
        self.check_dim(op, dim);
        assert!(self.dtype.is_float(), "{op}: needs a tensor of floats, got {}", self.dtype);
        let width = self.dims()[dim];
        assert!(width > 0, "{op}: dimension {dim} of shape {} is empty", self.shape());
        let last = self.shape().n_dims() - 1;
        let rows = self.detach().transpose(dim, last).contiguous();
        let shape: Shape = rows.shape().with(last, 1);
        let largest = Tensor::stale(self.device(), shape, self.dtype);
        let index = Tensor::stale(self.device(), shape, DType::I64);
        kernel::reduce::max_rows(&rows, width, &largest, &index);
        (largest.transpose(dim, last).contiguous(), index.transpose(dim, last).contiguous())
    }

    /// The sum over the dimensions that broadcasting from `shape` to this tensor's shape repeated.
    pub(crate) fn sum_to(&self, shape: &Shape) -> Tensor {
        if self.shape() == shape {
            return self.clone();
        }
        let lead = self.shape().n_dims() - shape.n_dims();
        let mut kept = *self.shape();
        for dim in 0..kept.n_dims() {
            if dim < lead || shape.dims()[dim - lead] == 1 {
                kept = kept.with(dim, 1);
            }
        }
        let out = Tensor::stale(self.device(), kept, self.dtype);
        kernel::reduce::sum(self, &out);
        out.reshape(*shape)
    }
}
