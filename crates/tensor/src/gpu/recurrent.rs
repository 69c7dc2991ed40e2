//! The steps of recurrent layers: gates, and states of them. All tensors are contiguous; those of several positions or places are handed
//! over whole.

use crate::gpu::Engine;
use crate::gpu::launch::{Arg, check_float, elements};
use crate::ops::recurrent::Step;
use crate::tensor::Tensor;

/// How many samples there are, how wide a state is, and where the step stands.
fn sizes(states: &Tensor, step: Step) -> [Arg<'static>; 5] {
    let &[_, batch, width] = states.dims() else { unreachable!("the op checks its shapes") };
    [batch, width, step.position, step.before, step.after].map(Arg::Int)
}

/// One step of [`Tensor::lstm`]: gates (T, B, 4 H), cells and hidden states after it.
#[track_caller]
pub(crate) fn lstm_step(
    engine: &Engine,
    x: &Tensor,
    product: &Tensor,
    step: Step,
    gates: &Tensor,
    cells: &Tensor,
    hidden: &Tensor,
) {
    check_float("lstm", x.dtype);
    let [batch, width, position, before, after] = sizes(hidden, step);
    let (ins, outs) = ([x, product].map(Arg::In), [gates, cells, hidden].map(Arg::Out));
    let args = [ins[0], ins[1], outs[0], outs[1], outs[2], batch, width, position, before, after];
    // SAFETY: `x` and the gates have four times a state at each position, the others a state in each place.
    unsafe { engine.launch("lstm_step", elements(hidden.count() / hidden.dims()[0]), &args) }
}

/// The way back: as the CPU's.
#[track_caller]
pub(crate) fn lstm_step_gradient(
    engine: &Engine,
    gates: &Tensor,
    cells: &Tensor,
    step: Step,
    [grad, later]: [&Tensor; 2],
    of_cell: &Tensor,
    of_gates: &Tensor,
) {
    check_float("lstm", gates.dtype);
    let [batch, width, position, before, after] = sizes(cells, step);
    let ins = [gates, cells, grad, later].map(Arg::In);
    let outs = [of_cell, of_gates].map(Arg::Out);
    let args = [ins[0], ins[1], ins[2], ins[3], outs[0], outs[1], batch, width, position, before, after];
    // SAFETY: as above; `later` and the cell's gradient have one state.
    unsafe { engine.launch("lstm_step_gradient", elements(of_cell.count()), &args) }
}

/// One step of [`Tensor::gru`].
#[track_caller]
pub(crate) fn gru_step(
    engine: &Engine,
    x: &Tensor,
    product: &Tensor,
    step: Step,
    gates: &Tensor,
    states: &Tensor,
) {
    check_float("gru", x.dtype);
    let [batch, width, position, before, after] = sizes(states, step);
    let (ins, outs) = ([x, product].map(Arg::In), [gates, states].map(Arg::Out));
    let args = [ins[0], ins[1], outs[0], outs[1], batch, width, position, before, after];
    // SAFETY: as above, with three times a state at each position of `x`.
    unsafe { engine.launch("gru_step", elements(states.count() / states.dims()[0]), &args) }
}

/// The way back: as the CPU's.
#[track_caller]
pub(crate) fn gru_step_gradient(
    engine: &Engine,
    gates: &Tensor,
    states: &Tensor,
    step: Step,
    [grad, later]: [&Tensor; 2],
    [of_x, of_product]: [&Tensor; 2],
) {
    check_float("gru", gates.dtype);
    let [batch, width, position, before, after] = sizes(states, step);
    let (ins, outs) = ([gates, states, grad].map(Arg::In), [later, of_x, of_product].map(Arg::Out));
    let args = [ins[0], ins[1], ins[2], outs[0], outs[1], outs[2], batch, width, position, before, after];
    // SAFETY: as above.
    unsafe { engine.launch("gru_step_gradient", elements(later.count()), &args) }
}
