//! The step of an optimizer on a GPU: one pass of a kernel over the values of an arena. On a CPU values are slices, and a step is
//! whatever its owner does with them.

use crate::arena::Arena;
use crate::device::Backend;
use crate::dtype::bytes_of;
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

impl Arena {
    /// Moves elements by one step along `grads`, in one launch: each of these ranges, which follow each other without a gap, by a step of
    /// its own. All arenas are of one layout on one GPU and hold f32. Panics on a CPU, while anyone uses any parameter, or where a state
    /// is missing that the rule needs.
    #[track_caller]
    pub fn update(
        &self,
        steps: &[(Range<usize>, UpdateStep)],
        grads: &Arena,
        states: [Option<&Arena>; 3],
        rule: Update,
    ) {
        let Backend::Gpu(engine) = self.device().backend() else {
            panic!("update: the arena lies on a CPU, where its values are slices: flat_mut lends them")
        };
        let (Some((first, _)), Some((last, _))) = (steps.first(), steps.last()) else { return };
        let in_order = steps.iter().all(|(range, _)| range.start <= range.end)
            && steps.windows(2).all(|pair| pair[0].0.end == pair[1].0.start);
        let all = first.start..last.end;
        assert!(
            in_order && all.end <= self.layout().len(),
            "update: elements {all:?} in {} ranges of an arena of {}, or ranges that don't follow each other",
            steps.len(),
            self.layout().len()
        );
        for other in states.into_iter().flatten().chain([grads]) {
            let alike = other.layout() == self.layout() && other.device() == self.device();
            assert!(alike, "update: values, gradients and states of different layouts or devices");
        }
        let start = all.start;
        let steps: Vec<_> =
            steps.iter().map(|(range, step)| (range.start - start..range.end - start, *step)).collect();
        let run = UpdateRun { len: all.len(), values: start, grads: start, states: start };
        engine.update(self, &[run], &steps, grads, states, rule);
    }

    /// As [`Arena::update`], of elements that lie in several runs, which may be elsewhere in each of the arenas; `steps` are of
    /// elements counted through all runs, from 0. Panics where one of the arenas ends before a run, and as [`Arena::update`] does.
    #[track_caller]
    pub fn update_runs(
        &self,
        runs: &[UpdateRun],
        steps: &[(Range<usize>, UpdateStep)],
        grads: &Arena,
        states: [Option<&Arena>; 3],
        rule: Update,
    ) {
        let Backend::Gpu(engine) = self.device().backend() else {
            panic!("update_runs: the arena lies on a CPU, where its values are slices: flat_mut lends them")
        };
        let len: usize = runs.iter().map(|run| run.len).sum();
        let in_order = steps.iter().all(|(range, _)| range.start <= range.end)
            && steps.windows(2).all(|pair| pair[0].0.end == pair[1].0.start)
            && steps.first().map_or(0, |(first, _)| first.start) == 0
            && steps.last().map_or(0, |(last, _)| last.end) == len;
        assert!(in_order, "update_runs: steps that aren't of {len} elements, one range after the other");
        for run in runs {
            let fits = |arena: &Arena, start: usize| {
                start + run.len <= arena.layout().len() && arena.device() == self.device()
            };
            let fit = fits(self, run.values)
                && fits(grads, run.grads)
                && states.into_iter().flatten().all(|state| fits(state, run.states));
            assert!(fit, "update_runs: {run:?} of arenas that end before, or of another device");
        }
        engine.update(self, runs, steps, grads, states, rule);
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
