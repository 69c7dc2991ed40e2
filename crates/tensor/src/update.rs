//! The step of an optimizer on a GPU: one pass of a kernel over the values of an arena. On a CPU values are slices, and a step is
//! whatever its owner does with them.

use crate::arena::Arena;
use crate::device::Backend;
use std::ops::Range;

/// Which rule. The formulas are PyTorch's; states stand in the order of [`Arena::update`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Update {
    /// Plain descent, without a state.
    Sgd,
    /// Descent with momentum: the momentum.
    SgdMomentum,
    /// Descent that looks ahead along its momentum: the momentum.
    SgdNesterov,
    /// Adam: the mean of the gradients, that of their squares.
    Adam,
    /// AdamW: the same.
    AdamW,
    /// Adadelta: the mean of the squares of gradients, that of moves.
    Adadelta,
    /// RMSprop: the mean of squares; the momentum, if there is one; the mean of the gradients, if it is centered.
    RmsProp,
}

/// What changes from step to step. Rules look at what they need.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct UpdateStep {
    /// Takes the loss scale out of the gradients.
    pub inverse_scale: f32,
    /// The learning rate; Adam's is corrected for the start of its first mean.
    pub lr: f32,
    /// The factor of a value that is added to its gradient; AdamW's is the one that the value itself is multiplied by.
    pub decay: f32,
    /// How much of the first state stays: SGD's momentum, Adam's mean.
    pub keep_first: f32,
    /// How much of what is new enters the first state.
    pub share_first: f32,
    /// How much of the mean of squares stays.
    pub keep_second: f32,
    /// How much of what is new enters the mean of squares.
    pub share_second: f32,
    /// What Adam divides the root of the squares by.
    pub root: f32,
    /// Added to, or under, a root.
    pub eps: f32,
}

impl UpdateStep {
    /// In the order of the kernels' struct.
    pub(crate) fn words(&self) -> [f32; 9] {
        [
            self.inverse_scale,
            self.lr,
            self.decay,
            self.keep_first,
            self.share_first,
            self.keep_second,
            self.share_second,
            self.root,
            self.eps,
        ]
    }
}

impl Arena {
    /// Moves elements `range` by one step along `grads`; all arenas are of one layout on one GPU and hold f32. Panics on a CPU, while
    /// anyone uses any parameter, or where a state is missing that the rule needs.
    #[track_caller]
    pub fn update(
        &self,
        range: Range<usize>,
        grads: &Arena,
        states: [Option<&Arena>; 3],
        rule: Update,
        step: &UpdateStep,
    ) {
        let Backend::Gpu(engine) = self.device().backend() else {
            panic!("update: the arena lies on a CPU, where its values are slices: flat_mut lends them")
        };
        assert!(
            range.start <= range.end && range.end <= self.layout().len(),
            "update: elements {range:?} of an arena of {}",
            self.layout().len()
        );
        for other in states.into_iter().flatten().chain([grads]) {
            let alike = other.layout() == self.layout() && other.device() == self.device();
            assert!(alike, "update: values, gradients and states of different layouts or devices");
        }
        engine.update(self, range, grads, states, rule, step);
    }
}
