//! Softmax and its logarithm.

use crate::kernel;
use crate::op::{Form, Op};
use crate::ops::{keep, recorded};
use crate::tensor::Tensor;

impl Tensor {
    /// exp(x) divided by its sum along dimension `dim`, computed so that it can't overflow.
    #[track_caller]
    pub fn softmax(&self, dim: usize) -> Tensor {
        self.normalised("softmax", dim, Form::Softmax)
    }

    /// The logarithm of [`Tensor::softmax`], computed so that it can't overflow or lose small probabilities.
    #[track_caller]
    pub fn log_softmax(&self, dim: usize) -> Tensor {
        self.normalised("log_softmax", dim, Form::LogSoftmax)
    }

    #[track_caller]
    fn normalised(&self, name: &str, dim: usize, form: Form) -> Tensor {
        self.check_dim(name, dim);
        if self.is_raised() {
            return self.widened().normalised(name, dim, form);
        }
        let last = self.shape().n_dims() - 1;
        if dim != last {
            return self.transpose(dim, last).normalised(name, last, form).transpose(dim, last).contiguous();
        }
        let x = self.contiguous();
        let out = Tensor::stale(self.device(), *self.shape(), self.dtype);
        kernel::softmax::softmax(form, &x, self.dims()[dim], &out);
        let op = match form {
            Form::Softmax => Op::Softmax { dim },
            Form::LogSoftmax => Op::LogSoftmax { dim },
        };
        recorded(out, op, &[&x], |out| [keep(out)])
    }
}
