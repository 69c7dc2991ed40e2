//! The update rules of optimizers, over flat arenas.

use crate::arena::Arena;
use crate::gpu::Engine;
use crate::gpu::launch::{Arg, element, elements, out_or_null};
use crate::tensor::Tensor;
use crate::update::{Terms, Update, UpdateRun, UpdateStep};
use phalanx_cuda::Element;
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
    /// One step of these runs, whose arenas lie on this GPU. What the step is goes up in one copy, and a launch a run does it.
    #[track_caller]
    #[expect(clippy::too_many_arguments, reason = "they are what a step is made of")]
    pub(crate) fn update(
        &self,
        values: &Arena,
        runs: &[UpdateRun],
        steps: &[(Range<usize>, UpdateStep)],
        grads: &Arena,
        states: [Option<&Arena>; 3],
        rule: Update,
        Terms { limit, guard, casts }: &Terms,
    ) {
        let (name, [least, most]) = named(rule);
        assert!(states[..least].iter().all(Option::is_some), "update: {rule:?} has {least} states");
        // The steps of each run, one run after the other.
        let (mut settings, mut of_runs, mut before) = (Vec::new(), Vec::with_capacity(runs.len()), 0);
        for run in runs {
            let (start, end) = (before, before + run.len);
            let first = settings.len();
            for (range, step) in steps.iter().filter(|(range, _)| range.start < end && range.end > start) {
                settings.extend(step.to_bytes(range.end.min(end) - start));
            }
            of_runs.push((run, first..settings.len()));
            before = end;
        }
        let settings = Tensor::from_slice(values.device(), &settings, [settings.len()]);
        // Arenas are borrowed as a whole for the time of giving.
        let _written = (values.flat_mut::<f32>(), states.map(|state| state.map(Arena::flat_mut::<f32>)));
        let _read = grads.hold::<f32>();
        let _cast = casts.as_ref().map(Arena::write);
        let element = casts.as_ref().map_or(Element::F32, |casts| element(casts.dtype()));
        for (run, steps) in of_runs.into_iter().filter(|(run, _)| run.len > 0) {
            let at = |arena: &Arena, start: usize| {
                let size = arena.dtype().bytes();
                arena.memory().gpu(start * size..(start + run.len) * size).address()
            };
            let state = |arena: &Option<&Arena>| {
                arena.map_or(Arg::InOrNull(None), |arena| Arg::Bare(at(arena, run.states)))
            };
            let steps = settings.narrow(0, steps.start, steps.len());
            let mut args = vec![
                Arg::Bare(at(values, run.values)),
                Arg::BareIn(at(grads, run.grads)),
                casts.as_ref().map_or(Arg::InOrNull(None), |casts| Arg::Bare(at(casts, run.values))),
            ];
            args.extend(states[..most].iter().map(state));
            args.push(Arg::In(&steps));
            args.push(Arg::InOrNull(limit.as_ref().map(|limit| &limit.norm)));
            args.push(Arg::Double(limit.as_ref().map_or(0.0, |limit| limit.limit)));
            args.push(Arg::InOrNull(guard.as_ref().map(|guard| &guard.loss)));
            args.push(out_or_null(guard.as_ref().map(|guard| &guard.spoilt)));
            args.push(Arg::Int(run.len));
            // SAFETY: the last of the steps ends with the run, and all arenas have it, as the caller checked, and stay until the stream
            // has come to it, since their memory is given back after all work.
            unsafe { self.launch_for(element, name, elements(run.len), &args) }
        }
    }
}
