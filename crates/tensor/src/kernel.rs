//! The kernel table: for each piece of work that operations and gradients are made of, a row with what it takes, the family that
//! has it, and by which tensor's device it is decided whose kernel does it: the CPU's (`cpu/`) or the GPU's (`gpu/`). The choice is
//! made once for each call. Nothing that a GPU lacks is done by the CPU in its stead: its kernel panics and says so.

use crate::device::Backend;
use crate::op::{Binary, Form, Unary};
use crate::tensor::Tensor;
use crate::{cpu, gpu};

/// One row a kernel: `family: name(what it takes) on whose device`.
macro_rules! kernels {
    ($($family:ident: $name:ident($($arg:ident: $type:ty),*) on $on:ident;)*) => {$(
        #[track_caller]
        pub(crate) fn $name($($arg: $type),*) {
            match $on.device().backend() {
                Backend::Cpu => cpu::$family::$name($($arg),*),
                Backend::Gpu(engine) => gpu::$family::$name(engine, $($arg),*),
            }
        }
    )*};
}

kernels! {
    copy: fill(out: &Tensor, value: f64) on out;
    copy: copy(from: &Tensor, out: &Tensor) on out;
    elementwise: binary(f: Binary, a: &Tensor, b: &Tensor, out: &Tensor) on out;
    elementwise: unary(f: Unary, x: &Tensor, out: &Tensor) on out;
    elementwise: unary_gradient(f: Unary, kept: &Tensor, grad: &Tensor, out: &Tensor) on out;
    elementwise: winner_gradient(mine: &Tensor, other: &Tensor, grad: &Tensor, sign: f64, out: &Tensor) on out;
    elementwise: add_assign(sum: &Tensor, x: &Tensor) on sum;
    matmul: matmul(a: &Tensor, b: &Tensor, out: &Tensor) on out;
    matmul: linear(x: &Tensor, w: &Tensor, bias: Option<&Tensor>, out: &Tensor) on out;
    matmul: linear_input_gradient(grad: &Tensor, w: &Tensor, out: &Tensor) on out;
    matmul: linear_weight_gradient(grad: &Tensor, x: &Tensor, bias: Option<&Tensor>, out: &Tensor) on out;
    embedding: embedding(table: &Tensor, ids: &Tensor, out: &Tensor) on out;
    embedding: embedding_gradient(grad: &Tensor, ids: &Tensor, out: &Tensor) on out;
    norm: layer_norm(
        x: &Tensor, weight: Option<&Tensor>, bias: Option<&Tensor>, eps: f64, width: usize, out: [&Tensor; 3]
    ) on x;
    norm: layer_norm_gradient(
        stats: [&Tensor; 3], weight: Option<&Tensor>, grad: &Tensor, width: usize, out: &Tensor
    ) on out;
    norm: layer_norm_parameter_gradients(
        stats: [&Tensor; 3], grad: &Tensor, weight: Option<&Tensor>, bias: Option<&Tensor>
    ) on grad;
    reduce: sum(x: &Tensor, out: &Tensor) on out;
    reduce: max_rows(x: &Tensor, width: usize, largest: &Tensor, index: &Tensor) on x;
    reduce: max_gradient(grad: &Tensor, index: &Tensor, dim: usize, out: &Tensor) on out;
    softmax: softmax(form: Form, x: &Tensor, width: usize, out: &Tensor) on out;
    softmax: softmax_gradient(form: Form, y: &Tensor, grad: &Tensor, width: usize, out: &Tensor) on out;
    loss: nll(y: &Tensor, labels: &Tensor, out: &Tensor) on out;
    loss: nll_gradient(labels: &Tensor, grad: &Tensor, out: &Tensor) on out;
    loss: cross_entropy(x: &Tensor, labels: &Tensor, label_smoothing: f64, y: &Tensor, out: &Tensor) on out;
    loss: cross_entropy_gradient(
        y: &Tensor, labels: &Tensor, label_smoothing: f64, grad: &Tensor, out: &Tensor
    ) on out;
    loss: mse(x: &Tensor, t: &Tensor, out: &Tensor) on out;
    loss: mse_gradient(x: &Tensor, t: &Tensor, grad: &Tensor, out: &Tensor) on out;
    loss: bce(x: &Tensor, t: &Tensor, out: &Tensor) on out;
    loss: bce_gradient(x: &Tensor, t: &Tensor, grad: &Tensor, out: &Tensor) on out;
}
