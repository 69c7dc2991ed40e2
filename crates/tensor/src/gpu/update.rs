//! The update rules of optimizers, over flat arenas.

use crate::arena::Arena;
use crate::gpu::Engine;
use crate::gpu::launch::{Arg, elements};
use crate::tensor::Tensor;
use crate::update::{Update, UpdateStep};
use std::ops::Range;

/// The kernel of a rule, and how many states it takes at least and at most.
fn named(rule: Update) -> (&'static str, [usize; 2]) {
    match rule {
        Update::Sgd => ("sgd", [0, 0]),
        Update::SgdMomentum => ("sgd_momentum", [1, 1]),
        Update::SgdNesterov => ("sgd_nesterov", [1, 1]),
        Update::Adam => ("adam", [2, 2]),
        Update::AdamW => ("adamw", [2, 2]),
        Update::Adadelta => ("adadelta", [2, 2]),
        Update::RmsProp => ("rmsprop", [1, 3]),
    }
}

impl Engine {
    /// One step of these ranges, which follow each other; the arenas are of one layout on this GPU. What the step is goes up in one copy,
    /// and one launch does it.
    #[track_caller]
    pub(crate) fn update(
        &self,
        values: &Arena,
        steps: &[(Range<usize>, UpdateStep)],
        grads: &Arena,
        states: [Option<&Arena>; 3],
        rule: Update,
    ) {
        let (name, [least, most]) = named(rule);
        assert!(states[..least].iter().all(Option::is_some), "update: {rule:?} has {least} states");
        let range = steps[0].0.start..steps[steps.len() - 1].0.end;
        let settings: Vec<u8> =
            steps.iter().flat_map(|(part, step)| step.to_bytes(part.end - range.start)).collect();
        let settings = Tensor::from_slice(values.device(), &settings, [settings.len()]);
        // Arenas are borrowed as a whole for the time of giving.
        let _written = (values.flat_mut::<f32>(), states.map(|state| state.map(Arena::flat_mut::<f32>)));
        let _read = grads.hold::<f32>();
        let at = |arena: &Arena| arena.memory().gpu().address().plus(range.start * size_of::<f32>());
        let mut args = vec![Arg::Bare(at(values)), Arg::BareIn(at(grads)), Arg::InOrNull(None)];
        args.extend(
            states[..most].iter().map(|state| state.map_or(Arg::InOrNull(None), |s| Arg::Bare(at(s)))),
        );
        args.extend([Arg::In(&settings), Arg::InOrNull(None), Arg::Int(range.len())]);
        // SAFETY: the last of the steps ends with the range, and all arenas have it, as the caller checked, and stay until the stream has come to it, since their memory is
        // given back after all work.
        unsafe { self.launch(name, elements(range.len()), &args) }
    }
}
