//! The step of an optimizer on a GPU: one pass of a kernel over the values of an arena. On a CPU values are slices, and a step is
//! whatever its owner does with them.

use crate::arena::Arena;
use crate::device::Backend;
use crate::dtype::{DType, bytes_of};
use crate::tensor::Tensor;
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

/// Bytes of a step as kernels find it.
pub(crate) const STEP_BYTES: usize = 48;

impl UpdateStep {
    /// The kernels' struct, of the elements before `end`.
    pub(crate) fn to_bytes(self, end: usize) -> [u8; STEP_BYTES] {
        let numbers = [
            self.inverse_scale,
            self.lr,
            self.decay,
            self.keep_first,
            self.share_first,
            self.keep_second,
            self.share_second,
            self.root,
            self.eps,
        ];
        let mut bytes = [0; STEP_BYTES];
        bytes[..8].copy_from_slice(&(end as i64).to_ne_bytes());
        bytes[8..44].copy_from_slice(bytes_of(&numbers));
        bytes
    }
}

/// How large the gradients of a step may be together, where a GPU knows how large they are.
#[derive(Clone)]
pub struct NormLimit {
    /// Their norm: f64, as [`Arena::norm`] gives it.
    pub(crate) norm: Tensor,
    pub(crate) limit: f64,
}

impl NormLimit {
    /// Gradients of this norm, a single f64 on a GPU, are to have one of at most `limit`.
    #[track_caller]
    pub fn new(norm: &Tensor, limit: f64) -> NormLimit {
        NormLimit { norm: single("limit of a norm", norm, DType::F64), limit }
    }
}

/// What lets steps be given to a GPU before anyone has looked at the losses that they follow. Behind a loss that is no number, or a norm
/// of gradients that is to be limited and is none, no step changes anything, until there is another guard.
#[derive(Clone)]
pub struct Guard {
    /// The loss of the step to come: f32.
    pub(crate) loss: Tensor,
    /// A number that isn't 0 from the first bad loss on.
    pub(crate) spoilt: Tensor,
}

impl Guard {
    /// One that has let through everything so far, of a step behind this loss: a single f32 on a GPU.
    #[track_caller]
    pub fn new(loss: &Tensor) -> Guard {
        Guard {
            loss: single("guard", loss, DType::F32),
            spoilt: Tensor::zeros(loss.device(), [1], DType::I64),
        }
    }

    /// The same guard, of a step behind this loss.
    #[track_caller]
    pub fn behind(&self, loss: &Tensor) -> Guard {
        Guard { loss: single("guard", loss, DType::F32), spoilt: self.spoilt.clone() }
    }
}

/// What of a step only the GPU knows, and what it does along the way.
#[derive(Clone, Default)]
pub struct Terms {
    /// How large its gradients may be together. Default: as they are.
    pub limit: Option<NormLimit>,
    /// What may keep it from changing anything. Default: nothing.
    pub guard: Option<Guard>,
    /// An arena of 16 bits of the values' layout, on their GPU, that gets those that move as they are then. Default: none.
    pub casts: Option<Arena>,
}

impl Terms {
    fn numbers(&self) -> impl Iterator<Item = &Tensor> {
        let of_guard = self.guard.iter().flat_map(|guard| [&guard.loss, &guard.spoilt]);
        self.limit.iter().map(|limit| &limit.norm).chain(of_guard)
    }
}

/// A number that lies alone on a GPU.
#[track_caller]
fn single(what: &str, number: &Tensor, dtype: DType) -> Tensor {
    assert!(
        number.count() == 1 && number.dtype() == dtype && number.device().gpu().is_some(),
        "{what}: shape {} and {}, wanted a single {dtype} on a GPU",
        number.shape(),
        number.dtype()
    );
    number.detach()
}

impl Arena {
    /// Moves elements, which lie in several runs, by one step along `grads`, a launch a run; `steps` are of elements counted through all
    /// runs, from 0, one range after the other. All arenas hold f32 on one GPU, and a run may lie elsewhere in each. A limit on
    /// gradients is one on what [`UpdateStep::inverse_scale`] leaves of them. Panics on a CPU, while anyone uses any parameter, where an
    /// arena ends before a run, or where a state is missing that the rule needs.
    #[track_caller]
    pub fn update(
        &self,
        runs: &[UpdateRun],
        steps: &[(Range<usize>, UpdateStep)],
        grads: &Arena,
        states: [Option<&Arena>; 3],
        rule: Update,
        terms: &Terms,
    ) {
        let Backend::Gpu(engine) = self.device().backend() else {
            panic!("update: the arena lies on a CPU, where its values are slices: flat_mut lends them")
        };
        let len: usize = runs.iter().map(|run| run.len).sum();
        let in_order = steps.iter().all(|(range, _)| range.start <= range.end)
            && steps.windows(2).all(|pair| pair[0].0.end == pair[1].0.start)
            && steps.first().map_or(0, |(first, _)| first.start) == 0
            && steps.last().map_or(0, |(last, _)| last.end) == len;
        assert!(in_order, "update: steps that aren't of {len} elements, one range after the other");
        let is_here = |number: &Tensor| number.device() == self.device();
        assert!(terms.numbers().all(is_here), "update: terms of another device");
        for run in runs {
            let fits = |arena: &Arena, start: usize| {
                start + run.len <= arena.layout().len() && arena.device() == self.device()
            };
            let fit = fits(self, run.values)
                && fits(grads, run.grads)
                && states.into_iter().flatten().all(|state| fits(state, run.states));
            assert!(fit, "update: {run:?} of arenas that end before, or of another device");
        }
        let are_casts = |casts: &Arena| {
            casts.dtype().is_half() && casts.layout() == self.layout() && casts.device() == self.device()
        };
        assert!(
            terms.casts.as_ref().is_none_or(are_casts),
            "update: casts that aren't these values' in 16 bits"
        );
        engine.update(self, runs, steps, grads, states, rule, terms);
    }
}

/// Elements that lie beside each other in each of the arenas of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UpdateRun {
    /// How many.
    pub len: usize,
    /// Where the first lies among the values.
    pub values: usize,
    /// Where among the gradients.
    pub grads: usize,
    /// Where in each state.
    pub states: usize,
}

impl UpdateRun {
    /// Whether another begins where this one ends, everywhere.
    pub fn is_before(&self, other: &UpdateRun) -> bool {
        let ends = [self.values, self.grads, self.states].map(|start| start + self.len);
        ends == [other.values, other.grads, other.states]
    }
}
