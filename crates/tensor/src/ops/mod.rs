//! The operations of a [`crate::Tensor`], by family. Each checks its shapes, runs its kernel, and records its row of the op
//! table where someone wants a gradient. A wrong shape is a bug of the program: it panics with the op and both shapes.

pub(crate) mod across;
pub(crate) mod again;
pub(crate) mod attention;
pub(crate) mod cast;
pub(crate) mod choice;
pub(crate) mod convolution;
pub(crate) mod dropout;
pub(crate) mod elementwise;
pub(crate) mod embedding;
pub(crate) mod loss;
pub(crate) mod matmul;
pub(crate) mod norm;
pub(crate) mod recurrent;
pub(crate) mod reduce;
pub(crate) mod resample;
pub(crate) mod samples;
pub(crate) mod softmax;
pub(crate) mod transfer;
pub(crate) mod views;

use crate::graph::{self, record};
use crate::op::Op;
use crate::tensor::Tensor;

/// A value kept for a gradient formula, outside of the graph.
pub(crate) fn keep(tensor: &Tensor) -> Option<Tensor> {
    Some(tensor.detach())
}

/// As [`recorded`], where some inputs may be missing: those after them keep their places.
pub(crate) fn recorded_where<const S: usize>(
    out: Tensor,
    op: Op,
    inputs: [Option<&Tensor>; graph::MAX_INPUTS],
    saved: impl FnOnce(&Tensor) -> [Option<Tensor>; S],
) -> Tensor {
    let given = || inputs.iter().flatten();
    if !given().any(|input| graph::records(&[input])) {
        return out;
    }
    // A missing input is one that needs no gradient.
    let nothing = out.detach();
    let inputs = inputs.map(|input| input.unwrap_or(&nothing));
    recorded(out, op, &inputs, saved)
}

/// `out` with `op` recorded on `inputs` where one of them needs a gradient; `saved` is only asked then.
pub(crate) fn recorded<const S: usize>(
    out: Tensor,
    op: Op,
    inputs: &[&Tensor],
    saved: impl FnOnce(&Tensor) -> [Option<Tensor>; S],
) -> Tensor {
    if !graph::records(inputs) {
        return out;
    }
    let kept = saved(&out);
    let node = record(out.device(), op, inputs, kept);
    Tensor { node: Some(node), ..out }
}
