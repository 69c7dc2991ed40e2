//! Matrix products.

use crate::autocast::lowers;
use crate::graph::{self, Made};
use crate::kernel;
use crate::op::Op;
use crate::ops::{keep, recorded};
use crate::shape::Shape;
use crate::tensor::Tensor;

impl Tensor {
    /// The matrix product of the last two dimensions, (..., m, k) with (..., k, n) to (..., m, n); those before broadcast.
    #[track_caller]
    pub fn matmul(&self, other: &Tensor) -> Tensor {
        if let Some(dtype) = lowers([self, other]) {
            return self.cast(dtype).matmul(&other.cast(dtype));
        }
        self.check_partner("matmul", other);
        let Some(shape) = product_shape(self.shape(), other.shape()) else {
            panic!(
                "matmul: shapes {} and {} don't multiply: (..., m, k) with (..., k, n) would",
                self.shape(),
                other.shape()
            );
        };
        let out = Tensor::stale(self.device(), shape, self.dtype);
        kernel::matmul::matmul(self, other, &out);
        recorded(out, Op::Matmul(*self.shape(), *other.shape()), &[self, other], |_| {
            [
                if other.needs_grad() { keep(self) } else { None },
                if self.needs_grad() { keep(other) } else { None },
            ]
        })
    }

    /// `self weight^T + bias`: rows (..., in) with a weight of (out, in) and a bias of (out) to rows (..., out).
    #[track_caller]
    pub fn linear(&self, weight: &Tensor, bias: Option<&Tensor>) -> Tensor {
        if let Some(dtype) = lowers([self, weight].into_iter().chain(bias)) {
            let bias = bias.map(|bias| bias.cast(dtype));
            return self.cast(dtype).linear(&weight.cast(dtype), bias.as_ref());
        }
        self.check_partner("linear", weight);
        let n = self.shape().n_dims();
        let fits = n >= 1 && weight.shape().n_dims() == 2 && self.dims()[n - 1] == weight.dims()[1];
        assert!(
            fits,
            "linear: rows of shape {} with a weight of shape {}: (..., in) with (out, in) would do",
            self.shape(),
            weight.shape()
        );
        let outputs = weight.dims()[0];
        self.check_bias("linear", weight, outputs, bias);
        let (x, w) = (self.contiguous(), weight.contiguous());
        let out = Tensor::stale(self.device(), self.shape().with(n - 1, outputs), self.dtype);
        let bias = bias.map(Tensor::contiguous);
        kernel::matmul::linear(&x, &w, bias.as_ref(), &out);
        self.recorded_linear(Op::Linear(*self.shape(), *weight.shape()), [&x, &w], bias.as_ref(), out)
    }

    /// `self weight + bias`: as [`Tensor::linear`], with a weight of (in, out), which is how GPT-2's files hold it.
    #[track_caller]
    pub fn linear_in_out(&self, weight: &Tensor, bias: Option<&Tensor>) -> Tensor {
        if let Some(dtype) = lowers([self, weight].into_iter().chain(bias)) {
            let bias = bias.map(|bias| bias.cast(dtype));
            return self.cast(dtype).linear_in_out(&weight.cast(dtype), bias.as_ref());
        }
        self.check_partner("linear_in_out", weight);
        let n = self.shape().n_dims();
        let fits = n >= 1 && weight.shape().n_dims() == 2 && self.dims()[n - 1] == weight.dims()[0];
        assert!(
            fits,
            "linear_in_out: rows of shape {} with a weight of shape {}: (..., in) with (in, out) would do",
            self.shape(),
            weight.shape()
        );
        let outputs = weight.dims()[1];
        self.check_bias("linear_in_out", weight, outputs, bias);
        let (x, w) = (self.contiguous(), weight.contiguous());
        let out = Tensor::stale(self.device(), self.shape().with(n - 1, outputs), self.dtype);
        let bias = bias.map(Tensor::contiguous);
        kernel::matmul::linear(&x, &w.detach().t(), bias.as_ref(), &out);
        self.recorded_linear(Op::LinearInOut(*self.shape(), *weight.shape()), [&x, &w], bias.as_ref(), out)
    }

    /// The output of a product of rows `x` with a weight, as one of `self` with it and with a bias.
    fn recorded_linear(&self, op: Op, [x, w]: [&Tensor; 2], bias: Option<&Tensor>, out: Tensor) -> Tensor {
        let mut sources = [x, w, w];
        let n_sources = match bias {
            Some(bias) => {
                sources[2] = bias;
                3
            }
            None => 2,
        };
        let is_wanted = w.needs_grad() && graph::is_recording();
        let made = if is_wanted && !graph::keeps_cheap() { Made::of(x) } else { None };
        let how = made.as_ref().map(|(how, _)| *how);
        let out = recorded(out, op, &sources[..n_sources], |_| {
            let w = if x.needs_grad() { keep(w) } else { None };
            match made {
                Some((_, [first, second, third])) => [first, w, second, third],
                None => [if is_wanted { keep(x) } else { None }, w, None, None],
            }
        });
        if let Some(node) = &out.node {
            node.body().made = how;
        }
        out
    }

    #[track_caller]
    fn check_bias(&self, op: &str, weight: &Tensor, outputs: usize, bias: Option<&Tensor>) {
        let Some(bias) = bias else { return };
        self.check_partner(op, bias);
        assert!(
            bias.dims() == [outputs],
            "{op}: a bias of shape {} with a weight of shape {}",
            bias.shape(),
            weight.shape()
        );
    }
}

fn product_shape(a: &Shape, b: &Shape) -> Option<Shape> {
    let (na, nb) = (a.n_dims(), b.n_dims());
    if na < 2 || nb < 2 || a.dims()[na - 1] != b.dims()[nb - 2] {
        return None;
    }
    let batch = Shape::new(&a.dims()[..na - 2]).broadcast(&Shape::new(&b.dims()[..nb - 2]))?;
    let n = batch.n_dims();
    Some(batch.insert(n, a.dims()[na - 2]).insert(n + 1, b.dims()[nb - 1]))
}
