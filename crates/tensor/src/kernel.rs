//! The kernel table: for each piece of work that operations and gradients are made of, a row with what it takes and by which
//! tensor's device it is decided whose kernel does it: the CPU's (`cpu/`) or the GPU's (`gpu/`). The choice is made once for each
//! call. A CPU computes with floats of 16 bits as with copies in f32 ([`crate::cpu::wide`]). Nothing that a GPU lacks is done by the CPU in its stead: its kernel panics and says so.

use crate::cpu::batch_norm::Fused;
use crate::cpu::conv::Plan;
use crate::cpu::pooling::Planes;
use crate::cpu::wide::{Wide, Widen};
use crate::device::Backend;
use crate::op::{Binary, CountPadding, Form, Relation, Unary};
use crate::ops::attention::Shares;
use crate::ops::dropout::{DropoutKey, Within};
use crate::ops::recurrent::Step;
use crate::ops::reduce::Toward;
use crate::ops::samples::{SampleImages, SampleOrder};
use crate::shape::{Order, Shape};
use crate::tensor::Tensor;

/// Whether a kernel that moves elements, whatever they stand for, has to be handed copies in f32.
fn elements(_: &[bool]) -> bool {
    false
}

/// The same of one that computes, if some of what it takes holds floats of 16 bits.
fn numbers(halves: &[bool]) -> bool {
    halves.contains(&true)
}

/// Families as `cpu` and `gpu` have them, and what they are of; one row a kernel: `name(what it takes) on whose device`.
macro_rules! kernels {
    ($($family:ident of $kind:ident { $($name:ident($($arg:ident: $type:ty),*) on $on:ident;)* })*) => {$(
        pub(crate) mod $family {
            #[allow(unused_imports, reason = "not every family takes everything")]
            use super::*;
            $(
                #[track_caller]
                pub(crate) fn $name($($arg: $type),*) {
                    match $on.device().backend() {
                        Backend::Cpu if $kind(&[$($arg.is_half()),*]) => {
                            let wide = Wide::default();
                            crate::cpu::$family::$name($($arg.in_f32(&wide)),*);
                            wide.settle();
                        }
                        Backend::Cpu => crate::cpu::$family::$name($($arg),*),
                        Backend::Gpu(engine) => crate::gpu::$family::$name(engine, $($arg),*),
                    }
                }
            )*
        }
    )*};
}

kernels! {
    copy of elements {
        fill(out: &Tensor, value: f64) on out;
        copy(from: &Tensor, out: &Tensor) on out;
        convert(from: &Tensor, out: &Tensor) on out;
        flip(from: &Tensor, dim: usize, out: &Tensor) on out;
    }
    elementwise of numbers {
        binary(f: Binary, a: &Tensor, b: &Tensor, out: &Tensor) on out;
        unary(f: Unary, x: &Tensor, out: &Tensor) on out;
        unary_gradient(f: Unary, kept: &Tensor, grad: &Tensor, out: &Tensor) on out;
        winner_gradient(mine: &Tensor, other: &Tensor, grad: &Tensor, sign: f64, out: &Tensor) on out;
        add_assign(sum: &Tensor, x: &Tensor) on sum;
    }
    choice of numbers {
        compare(relation: Relation, a: &Tensor, b: &Tensor, mask: &Tensor) on mask;
        choose(mask: &Tensor, yes: &Tensor, no: &Tensor, out: &Tensor) on out;
        gather(x: &Tensor, index: &Tensor, dim: usize, out: &Tensor) on out;
        gather_gradient(grad: &Tensor, index: &Tensor, dim: usize, out: &Tensor) on out;
        check_places(op: &str, index: &Tensor, dim: usize, of: &Shape) on index;
    }
    reduce of numbers {
        sum(x: &Tensor, out: &Tensor) on out;
        max_rows(x: &Tensor, width: usize, largest: &Tensor, index: &Tensor) on x;
        top_rows(x: &Tensor, index: &Tensor) on x;
        max_gradient(grad: &Tensor, index: &Tensor, dim: usize, out: &Tensor) on out;
        running_sums(x: &Tensor, dim: usize, toward: Toward, out: &Tensor) on out;
    }
    resample of numbers {
        resample(x: &Tensor, dim: usize, table: &Tensor, out: &Tensor) on out;
    }
    softmax of numbers {
        softmax(form: Form, x: &Tensor, width: usize, out: &Tensor) on out;
        softmax_gradient(form: Form, y: &Tensor, grad: &Tensor, width: usize, out: &Tensor) on out;
    }
    loss of numbers {
        one_hot(labels: &Tensor, start: usize, all: usize, out: &Tensor) on out;
        nll(y: &Tensor, labels: &Tensor, out: &Tensor) on out;
        label_places(x: &Tensor, labels: &Tensor, out: &Tensor) on out;
        nll_gradient(labels: &Tensor, grad: &Tensor, out: &Tensor) on out;
        cross_entropy(x: &Tensor, labels: &Tensor, label_smoothing: f64, kept: &Tensor, out: &Tensor) on out;
        cross_entropy_gradient(
        from: &Tensor, shifts: Option<&Tensor>, labels: &Tensor, label_smoothing: f64, grad: &Tensor, out: &Tensor
    ) on out;
        mse(x: &Tensor, t: &Tensor, out: &Tensor) on out;
        mse_gradient(x: &Tensor, t: &Tensor, grad: &Tensor, out: &Tensor) on out;
        bce(x: &Tensor, t: &Tensor, out: &Tensor) on out;
        bce_gradient(x: &Tensor, t: &Tensor, grad: &Tensor, out: &Tensor) on out;
    }
    matmul of numbers {
        matmul(a: &Tensor, b: &Tensor, out: &Tensor) on out;
        linear(x: &Tensor, w: &Tensor, bias: Option<&Tensor>, out: &Tensor) on out;
        linear_input_gradient(grad: &Tensor, w: &Tensor, out: &Tensor) on out;
        linear_weight_gradient(grad: &Tensor, x: &Tensor, bias: Option<&Tensor>, out: &Tensor) on out;
        linear_in_out_weight_gradient(grad: &Tensor, x: &Tensor, bias: Option<&Tensor>, out: &Tensor) on out;
    }
    attention of numbers {
        attention(given: [&Tensor; 3], shares: Shares<'_>, out: &Tensor, lse: &Tensor) on out;
        attention_gradient(
            given: [&Tensor; 3], came: [&Tensor; 2], shares: Shares<'_>, grad: &Tensor, outs: [&Tensor; 3]
        ) on grad;
    }
    recurrent of numbers {
        lstm_step(x: &Tensor, product: &Tensor, step: Step, gates: &Tensor, cells: &Tensor, hidden: &Tensor) on x;
        lstm_step_gradient(
            gates: &Tensor, cells: &Tensor, step: Step, grads: [&Tensor; 2], of_cell: &Tensor, of_gates: &Tensor
        ) on gates;
        gru_step(x: &Tensor, product: &Tensor, step: Step, gates: &Tensor, states: &Tensor) on x;
        gru_step_gradient(gates: &Tensor, states: &Tensor, step: Step, grads: [&Tensor; 2], outs: [&Tensor; 2]) on gates;
    }
    embedding of numbers {
        embedding(table: &Tensor, within: Within, ids: &Tensor, out: &Tensor) on out;
        embedding_gradient(grad: &Tensor, start: usize, ids: &Tensor, out: &Tensor) on out;
    }
    norm of numbers {
        layer_norm(
        x: &Tensor, weight: Option<&Tensor>, bias: Option<&Tensor>, eps: f64, width: usize, out: [&Tensor; 3]
    ) on x;
        layer_norm_gradient(
        stats: [&Tensor; 3], weight: Option<&Tensor>, grad: &Tensor, width: usize, out: &Tensor
    ) on out;
        layer_norm_parameter_gradients(
        stats: [&Tensor; 3], grad: &Tensor, weight: Option<&Tensor>, bias: Option<&Tensor>
    ) on grad;
    }
    batch_norm of numbers {
        train(
            x: &Tensor, affine: [Option<&Tensor>; 2], eps: f64, fused: Fused<'_>, running: Option<([&Tensor; 2], f64)>,
            out: [&Tensor; 4]
        ) on x;
        totals(x: &Tensor, totals: &Tensor) on x;
        train_shared(
            x: &Tensor, totals: &Tensor, affine: [Option<&Tensor>; 2], eps: f64, fused: Fused<'_>,
            running: Option<([&Tensor; 2], f64)>, out: [&Tensor; 4]
        ) on x;
        normalise(
            x: &Tensor, stats: [&Tensor; 2], affine: [Option<&Tensor>; 2], eps: f64, fused: Fused<'_>, out: [&Tensor; 2]
        ) on x;
        sums(x: &Tensor, mean: &Tensor, grad: &Tensor, mask: Option<&Tensor>, sums: &Tensor) on x;
        channel_gradients(sums: &Tensor, scale: &Tensor, out: [&Tensor; 2]) on sums;
        input_gradient_shared(
            x: &Tensor, stats: [&Tensor; 2], weight: Option<&Tensor>, grad: &Tensor, mask: Option<&Tensor>,
            shared: [&Tensor; 2], out: (&Tensor, Option<&Tensor>)
        ) on x;
        gradients(
            x: &Tensor, stats: [&Tensor; 2], weight: Option<&Tensor>, grad: &Tensor, mask: Option<&Tensor>,
            count: Option<f64>, out: ((&Tensor, Option<&Tensor>), [&Tensor; 2])
        ) on x;
    }
    pooling of numbers {
        max_pool(x: &Tensor, planes: Planes, order: Order, out: &Tensor, position: &Tensor) on x;
        max_pool_gradient(position: &Tensor, grad: &Tensor, planes: Planes, order: Order, out: &Tensor) on out;
        avg_pool(x: &Tensor, planes: Planes, padding: CountPadding, out: &Tensor) on x;
        avg_pool_gradient(grad: &Tensor, planes: Planes, padding: CountPadding, out: &Tensor) on out;
    }
    conv of numbers {
        forward(x: &Tensor, w: &Tensor, b: Option<&Tensor>, plan: Plan, out: &Tensor) on out;
        image_gradient(grad: &Tensor, w: &Tensor, plan: Plan, out: &Tensor) on out;
        kernel_gradient(x: &Tensor, grad: &Tensor, plan: Plan, out: &Tensor) on out;
        bias_gradient(grad: &Tensor, plan: Plan, out: &Tensor) on out;
    }
    dropout of numbers {
        mask(p: f64, key: &DropoutKey, mask: &Tensor) on mask;
    }
    samples of elements {
        images(
            bytes: &Tensor, words: &Tensor, table: &Tensor, how: &SampleImages, order: SampleOrder, out: &Tensor
        ) on out;
        windows(bytes: &Tensor, words: &Tensor, stride: usize, order: SampleOrder, out: [&Tensor; 2]) on bytes;
    }
}
