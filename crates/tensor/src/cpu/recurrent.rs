//! The steps of recurrent layers: gates, and states of them. All tensors are contiguous; those of several positions or places are handed
//! over whole.

use crate::cpu::in_lanes::InLanes;
use crate::cpu::share;
use crate::dtype::with_float;
use crate::ops::recurrent::Step;
use crate::tensor::Tensor;

#[inline(always)]
fn sigmoid<T: InLanes>(x: T) -> T {
    T::ONE / (T::ONE + (-x).exp_in_lanes())
}

/// What inputs and the state before add to gate `k` of a sample.
#[inline(always)]
fn both<'a, T>(x: &'a [T], product: &'a [T], k: usize, width: usize) -> impl Iterator<Item = (&'a T, &'a T)> {
    x[k * width..][..width].iter().zip(&product[k * width..][..width])
}

/// The samples of a task, of states of `width` numbers.
fn samples(of: &Tensor, batch: usize, width: usize) -> usize {
    (share(of.device(), batch * width * 8) / (8 * width.max(1))).max(1)
}

/// Two places of `all`, of `size` elements each: the one that is read, and the one that is written.
fn two<T>(all: &mut [T], size: usize, read: usize, written: usize) -> (&[T], &mut [T]) {
    let (left, right) = all.split_at_mut(read.max(written) * size);
    let (low, high) = (&mut left[read.min(written) * size..][..size], &mut right[..size]);
    if read < written { (low, high) } else { (high, low) }
}

/// One step of [`Tensor::lstm`]: gates (T, B, 4 H), cells and hidden states after it.
pub(crate) fn lstm_step(
    x: &Tensor,
    product: &Tensor,
    step: Step,
    gates: &Tensor,
    cells: &Tensor,
    hidden: &Tensor,
) {
    let _timer = x.device().time("lstm");
    let &[_, batch, width] = hidden.dims() else { unreachable!("the op checks its shapes") };
    let size = batch * width;
    if size == 0 {
        return;
    }
    with_float!(x.dtype, "lstm", T => {
        let (vx, vp) = (x.read_contiguous::<T>("lstm"), product.read_contiguous::<T>("lstm"));
        let (mut vg, mut vc, mut vh) = (gates.write_whole::<T>(), cells.write_whole::<T>(), hidden.write_whole::<T>());
        let vx = &vx[step.position * 4 * size..][..4 * size];
        let vg = &mut vg[step.position * 4 * size..][..4 * size];
        let (before, after) = two(&mut vc[..], size, step.before, step.after);
        let vh = &mut vh[step.after * size..][..size];
        let (device, several, vp) = (x.device(), samples(x, batch, width), &*vp);
        let outputs = [(vg, several * 4 * width), (after, several * width), (vh, several * width)];
        device.for_chunks3(outputs, |task, [gates, cells, hidden]| device.arch().run(#[inline(always)] || {
            let from = task * several;
            for (i, gates) in gates.chunks_exact_mut(4 * width).enumerate() {
                let row = (from + i) * width;
                let (x, p) = (&vx[4 * row..][..4 * width], &vp[4 * row..][..4 * width]);
                let [gi, gf, gg, go] = quarters(gates).map(|gate| &mut gate[..width]);
                for (g, (&x, &p)) in gi.iter_mut().zip(both(x, p, 0, width)) {
                    *g = sigmoid(x + p);
                }
                for (g, (&x, &p)) in gf.iter_mut().zip(both(x, p, 1, width)) {
                    *g = sigmoid(x + p);
                }
                for (g, (&x, &p)) in gg.iter_mut().zip(both(x, p, 2, width)) {
                    *g = (x + p).tanh_in_lanes();
                }
                for (g, (&x, &p)) in go.iter_mut().zip(both(x, p, 3, width)) {
                    *g = sigmoid(x + p);
                }
                let before = &before[row..][..width];
                let (cells, hidden) = (&mut cells[i * width..][..width], &mut hidden[i * width..][..width]);
                for j in 0..width {
                    let cell = gf[j] * before[j] + gi[j] * gg[j];
                    (cells[j], hidden[j]) = (cell, go[j] * cell.tanh_in_lanes());
                }
            }
        }));
    });
}

/// Four equal parts.
fn quarters<T>(all: &mut [T]) -> [&mut [T]; 4] {
    let quarter = all.len() / 4;
    let (left, right) = all.split_at_mut(2 * quarter);
    let ((a, b), (c, d)) = (left.split_at_mut(quarter), right.split_at_mut(quarter));
    [a, b, c, d]
}

/// The way back: `of_gates` gets the gradients of what the gates were made of, at the step's position, and `of_cell`, those of the cell
/// after, those of the cell before. The hidden state after has the gradients `grad` (in its place) and `later`.
pub(crate) fn lstm_step_gradient(
    gates: &Tensor,
    cells: &Tensor,
    step: Step,
    [grad, later]: [&Tensor; 2],
    of_cell: &Tensor,
    of_gates: &Tensor,
) {
    let _timer = gates.device().time("lstm, gradient");
    let &[_, batch, width] = cells.dims() else { unreachable!("the op checks its shapes") };
    let size = batch * width;
    if size == 0 {
        return;
    }
    with_float!(gates.dtype, "lstm", T => {
        let (vg, vc) = (gates.read_contiguous::<T>("lstm"), cells.read_contiguous::<T>("lstm"));
        let (grad, later) = (grad.read_contiguous::<T>("lstm"), later.read_contiguous::<T>("lstm"));
        let (mut vo, mut of_cell) = (of_gates.write_whole::<T>(), of_cell.write_whole::<T>());
        let vg = &vg[step.position * 4 * size..][..4 * size];
        let (before, after) = (&vc[step.before * size..][..size], &vc[step.after * size..][..size]);
        let (grad, later) = (&grad[step.after * size..][..size], &*later);
        let vo = &mut vo[step.position * 4 * size..][..4 * size];
        let (device, several) = (gates.device(), samples(gates, batch, width));
        let outputs = ((vo, several * 4 * width), (&mut of_cell[..], several * width));
        device.for_chunks2(outputs.0, outputs.1, |task, out, of_cell| device.arch().run(#[inline(always)] || {
            for (i, out) in out.chunks_exact_mut(4 * width).enumerate() {
                let row = (task * several + i) * width;
                let gates = &vg[4 * row..][..4 * width];
                let part = |k: usize| &gates[k * width..][..width];
                let (gi, gf, gg, go) = (part(0), part(1), part(2), part(3));
                let (before, after) = (&before[row..][..width], &after[row..][..width]);
                let (grad, later) = (&grad[row..][..width], &later[row..][..width]);
                let of_cell = &mut of_cell[i * width..][..width];
                let [oi, of, og, oo] = quarters(out).map(|gate| &mut gate[..width]);
                for j in 0..width {
                    let (of_hidden, seen) = (grad[j] + later[j], after[j].tanh_in_lanes());
                    let cell = of_cell[j] + of_hidden * go[j] * (T::ONE - seen * seen);
                    oi[j] = cell * gg[j] * gi[j] * (T::ONE - gi[j]);
                    of[j] = cell * before[j] * gf[j] * (T::ONE - gf[j]);
                    og[j] = cell * gi[j] * (T::ONE - gg[j] * gg[j]);
                    oo[j] = of_hidden * seen * go[j] * (T::ONE - go[j]);
                    of_cell[j] = cell * gf[j];
                }
            }
        }));
    });
}

/// One step of [`Tensor::gru`]: the state after it, and what the gradient needs (T, B, 4 H): the three gates, and the state's part of the
/// third.
pub(crate) fn gru_step(x: &Tensor, product: &Tensor, step: Step, gates: &Tensor, states: &Tensor) {
    let _timer = x.device().time("gru");
    let &[_, batch, width] = states.dims() else { unreachable!("the op checks its shapes") };
    let size = batch * width;
    if size == 0 {
        return;
    }
    with_float!(x.dtype, "gru", T => {
        let (vx, vp) = (x.read_contiguous::<T>("gru"), product.read_contiguous::<T>("gru"));
        let (mut vg, mut vs) = (gates.write_whole::<T>(), states.write_whole::<T>());
        let vx = &vx[step.position * 3 * size..][..3 * size];
        let vg = &mut vg[step.position * 4 * size..][..4 * size];
        let (before, after) = two(&mut vs[..], size, step.before, step.after);
        let (device, several, vp) = (x.device(), samples(x, batch, width), &*vp);
        device.for_chunks2((vg, several * 4 * width), (after, several * width), |task, gates, after| device.arch().run(#[inline(always)] || {
            for (i, (gates, after)) in gates.chunks_exact_mut(4 * width).zip(after.chunks_exact_mut(width)).enumerate() {
                let row = (task * several + i) * width;
                let (x, p) = (&vx[3 * row..][..3 * width], &vp[3 * row..][..3 * width]);
                let (before, [gr, gz, gn, gp]) = (&before[row..][..width], quarters(gates).map(|gate| &mut gate[..width]));
                for (g, (&x, &p)) in gr.iter_mut().zip(both(x, p, 0, width)) {
                    *g = sigmoid(x + p);
                }
                for (g, (&x, &p)) in gz.iter_mut().zip(both(x, p, 1, width)) {
                    *g = sigmoid(x + p);
                }
                gp.copy_from_slice(&p[2 * width..]);
                for j in 0..width {
                    gn[j] = (x[2 * width + j] + gr[j] * gp[j]).tanh_in_lanes();
                    after[j] = gn[j] + gz[j] * (before[j] - gn[j]);
                }
            }
        }));
    });
}

/// The way back: `of_x` and `of_product`, (T, B, 3 H), get the gradients of what the gates were made of, at the step's position, and `later`,
/// a gradient of the state after beside that in `grad`, gets what goes to the state before without the product.
pub(crate) fn gru_step_gradient(
    gates: &Tensor,
    states: &Tensor,
    step: Step,
    [grad, later]: [&Tensor; 2],
    [of_x, of_product]: [&Tensor; 2],
) {
    let _timer = gates.device().time("gru, gradient");
    let &[_, batch, width] = states.dims() else { unreachable!("the op checks its shapes") };
    let size = batch * width;
    if size == 0 {
        return;
    }
    with_float!(gates.dtype, "gru", T => {
        let (vg, vs) = (gates.read_contiguous::<T>("gru"), states.read_contiguous::<T>("gru"));
        let (grad, mut later) = (grad.read_contiguous::<T>("gru"), later.write_whole::<T>());
        let (mut of_x, mut of_product) = (of_x.write_whole::<T>(), of_product.write_whole::<T>());
        let vg = &vg[step.position * 4 * size..][..4 * size];
        let (before, grad) = (&vs[step.before * size..][..size], &grad[step.after * size..][..size]);
        let at = step.position * 3 * size..(step.position + 1) * 3 * size;
        let (device, several) = (gates.device(), samples(gates, batch, width));
        let outputs = [
            (&mut of_x[at.clone()], several * 3 * width),
            (&mut of_product[at], several * 3 * width),
            (&mut later[..], several * width),
        ];
        device.for_chunks3(outputs, |task, [of_x, of_product, later]| device.arch().run(#[inline(always)] || {
            for (i, later) in later.chunks_exact_mut(width).enumerate() {
                let row = (task * several + i) * width;
                let gates = &vg[4 * row..][..4 * width];
                let part = |k: usize| &gates[k * width..][..width];
                let (gr, gz, gn, gp) = (part(0), part(1), part(2), part(3));
                let (before, grad) = (&before[row..][..width], &grad[row..][..width]);
                let own = i * 3 * width..(i + 1) * 3 * width;
                let (of_x, of_product) = (&mut of_x[own.clone()], &mut of_product[own]);
                for j in 0..width {
                    let of_state = grad[j] + later[j];
                    let new = of_state * (T::ONE - gz[j]) * (T::ONE - gn[j] * gn[j]);
                    let reset = new * gp[j] * gr[j] * (T::ONE - gr[j]);
                    let update = of_state * (before[j] - gn[j]) * gz[j] * (T::ONE - gz[j]);
                    (of_x[j], of_x[width + j], of_x[2 * width + j]) = (reset, update, new);
                    (of_product[j], of_product[width + j], of_product[2 * width + j]) = (reset, update, new * gr[j]);
                    later[j] = of_state * gz[j];
                }
            }
        }));
    });
}
