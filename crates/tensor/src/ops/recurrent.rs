//! Recurrent layers: what goes from one position of a sequence to the next, in one operation for all of them.
//!
//! Shapes: T positions, B samples, H numbers of state. Positions come first, so that a step's numbers lie side by side. What the inputs
//! add to the gates is made before, for all positions at once, by a plain product; the operation is the rest: in each step a product of
//! the state before with a weight, and one pass that makes the gates and the state after of it. States lie in T + 1 places, the one to
//! begin with among them; a step goes from one place to the next, in either direction.
//!
//! Going back, a step's gradient needs that of the step after; only the gradient of the weight is put off to the end, where it is one
//! product of all gates' gradients with all states.

use crate::dtype::DType;
use crate::kernel;
use crate::op::Op;
use crate::ops::reduce::Toward;
use crate::ops::{keep, recorded, recorded_where};
use crate::shape::Shape;
use crate::tensor::Tensor;

/// A step: the position, and the places of the states before and after it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Step {
    pub(crate) position: usize,
    pub(crate) before: usize,
    pub(crate) after: usize,
}

impl Step {
    /// Of `n` positions, in the order in which they are gone through.
    pub(crate) fn all(n: usize, toward: Toward) -> impl DoubleEndedIterator<Item = Step> {
        (0..n).map(move |i| match toward {
            Toward::End => Step { position: i, before: i, after: i + 1 },
            Toward::Beginning => Step { position: n - 1 - i, before: n - i, after: n - 1 - i },
        })
    }
}

/// The first of the places of states after each position.
pub(crate) fn first_after(toward: Toward) -> usize {
    usize::from(toward == Toward::End)
}

/// The first of those before each, and the place of the state to begin with.
pub(crate) fn befores(n: usize, toward: Toward) -> [usize; 2] {
    match toward {
        Toward::End => [0, 0],
        Toward::Beginning => [1, n],
    }
}

/// Place `i` along the first dimension, without that.
pub(crate) fn place(of: &Tensor, i: usize) -> Tensor {
    of.narrow(0, i, 1).reshape(of.shape().without(0))
}

impl Tensor {
    /// A long short-term memory: Hochreiter and Schmidhuber, "Long Short-Term Memory", 1997, with the forget gate of Gers, Schmidhuber and
    /// Cummins, as in PyTorch.
    ///
    /// This tensor, (T, B, 4 H), is what the inputs add to the gates, input, forget, cell and output gate side by side; `weight`, (4 H, H),
    /// leads there from the hidden state before. With their sums i, f, g and o a step makes the cell c sigmoid(f) + sigmoid(i) tanh(g) of
    /// the one before, c, and the hidden state sigmoid(o) tanh of that. `state` is the hidden state and the cell to begin with, (B, H)
    /// each. Gives the hidden state after each position, (T, B, H), and the last cell, (B, H).
    ///
    /// With [`Toward::Beginning`] positions are gone through from the last one to the first. Where what is given differs in type, and some of
    /// it has 16 bits, it is done in f32.
    #[track_caller]
    pub fn lstm(&self, weight: &Tensor, state: [&Tensor; 2], toward: Toward) -> [Tensor; 2] {
        if let Some(dtype) = self.done_wide(&[weight, state[0], state[1]]) {
            let [hidden, cell] = state.map(Tensor::widened);
            let wide = self.widened().lstm(&weight.widened(), [&hidden, &cell], toward);
            return wide.map(|x| x.cast(dtype));
        }
        let [n, batch, width] = self.check_gates("lstm", 4, weight, &state);
        let device = self.device();
        let (x, w) = (self.contiguous(), weight.contiguous());
        let stale = |dims: [usize; 3], dtype| Tensor::stale(device, dims.into(), dtype);
        // The last cell lies behind the hidden states.
        let out = stale([n + 2, batch, width], self.dtype);
        // Cells add up over all positions.
        let cells = stale([n + 1, batch, width], self.dtype.wide());
        let gates = stale([n, batch, 4 * width], self.dtype);
        let product = Tensor::stale(device, [batch, 4 * width].into(), self.dtype);
        let (hidden, [_, start]) = (out.narrow(0, 0, n + 1), befores(n, toward));
        kernel::copy::copy(state[0], &place(&hidden, start));
        kernel::copy::copy(&state[1].detach().widened(), &place(&cells, start));
        let mut last = start;
        for step in Step::all(n, toward) {
            kernel::matmul::linear(&place(&hidden, step.before), &w, None, &product);
            kernel::recurrent::lstm_step(&x, &product, step, &gates, &cells, &hidden);
            last = step.after;
        }
        kernel::copy::copy(&place(&cells, last).cast(self.dtype), &place(&out, n + 1));
        let op = Op::Lstm { toward };
        let out = recorded(out, op, &[&x, &w, state[0], state[1]], |out| {
            [keep(out), keep(&w), keep(&gates), keep(&cells)]
        });
        [out.narrow(0, first_after(toward), n), place(&out, n + 1)]
    }

    /// A gated recurrent unit: Cho, van Merrienboer, Gulcehre, Bahdanau, Bougares, Schwenk and Bengio, "Learning Phrase Representations
    /// using RNN Encoder-Decoder for Statistical Machine Translation", 2014, in PyTorch's form.
    ///
    /// This tensor, (T, B, 3 H), is what the inputs add to the gates, reset, update and new gate side by side; `weight`, (3 H, H), and
    /// `bias`, (3 H), lead there from the state before. With r and z the sigmoids of the first two sums, and n = tanh(x + r h) of the two
    /// parts of the third, a step makes (1 - z) n + z s of the state before, s. `state` is the one to begin with, (B, H). Gives the state
    /// after each position, (T, B, H). The rest is as in [`Tensor::lstm`].
    #[track_caller]
    pub fn gru(&self, weight: &Tensor, bias: Option<&Tensor>, state: &Tensor, toward: Toward) -> Tensor {
        if let Some(dtype) = self.done_wide(&[weight, state, bias.unwrap_or(weight)]) {
            let bias = bias.map(Tensor::widened);
            let wide = self.widened().gru(&weight.widened(), bias.as_ref(), &state.widened(), toward);
            return wide.cast(dtype);
        }
        let [n, batch, width] = self.check_gates("gru", 3, weight, &[state]);
        if let Some(bias) = bias {
            self.check_partner("gru", bias);
            assert!(
                bias.dims() == [3 * width],
                "gru: a bias of shape {} for a state of {width} numbers",
                bias.shape()
            );
        }
        let device = self.device();
        let (x, w, b) = (self.contiguous(), weight.contiguous(), bias.map(Tensor::contiguous));
        let stale = |dims: &[usize]| Tensor::stale(device, Shape::new(dims), self.dtype);
        let out = stale(&[n + 1, batch, width]);
        let (gates, product) = (stale(&[n, batch, 4 * width]), stale(&[batch, 3 * width]));
        kernel::copy::copy(state, &place(&out, befores(n, toward)[1]));
        for step in Step::all(n, toward) {
            kernel::matmul::linear(&place(&out, step.before), &w, b.as_ref(), &product);
            kernel::recurrent::gru_step(&x, &product, step, &gates, &out);
        }
        let inputs = [Some(&x), Some(&w), b.as_ref(), Some(state)];
        let out = recorded_where(out, Op::Gru { toward }, inputs, |out| [keep(out), keep(&w), keep(&gates)]);
        out.narrow(0, first_after(toward), n)
    }

    /// The type of the results, where it is done in f32: of several types with one of 16 bits among them, and of 16 bits on a CPU, which
    /// would else make copies in f32 of all positions for each of them.
    fn done_wide(&self, others: &[&Tensor]) -> Option<DType> {
        let is_of_one_type = others.iter().all(|other| other.dtype == self.dtype);
        if is_of_one_type {
            return (self.dtype.is_half() && self.device().gpu().is_none()).then_some(self.dtype);
        }
        let has_half = self.dtype.is_half() || others.iter().any(|other| other.dtype.is_half());
        has_half.then_some(DType::F32)
    }

    /// T, B and H of so many gates.
    #[track_caller]
    fn check_gates(&self, op: &str, gates: usize, weight: &Tensor, states: &[&Tensor]) -> [usize; 3] {
        let (&[n, batch, all], &[to, width]) = (self.dims(), weight.dims()) else {
            panic!(
                "{op}: inputs of shape {} with a weight of shape {}: (T, B, {gates} H) with ({gates} H, H) would do",
                self.shape(),
                weight.shape()
            )
        };
        assert!(
            all == to && to == gates * width,
            "{op}: inputs of shape {} with a weight of shape {}: (T, B, {gates} H) with ({gates} H, H) would do",
            self.shape(),
            weight.shape()
        );
        self.check_partner(op, weight);
        for state in states {
            self.check_partner(op, state);
            assert!(
                state.dims() == [batch, width],
                "{op}: a state of shape {} for {batch} samples of {width} numbers",
                state.shape()
            );
        }
        [n, batch, width]
    }
}
