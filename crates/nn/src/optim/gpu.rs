//! Steps over arenas, wherever these lie. On a GPU a rule's state lies there too, in arenas of the values' layout.

use super::groups::{Alike, Factors};
use super::{Adam, AdamW, Optimizer, Rule};
use crate::parameters::Parameters;
use crate::shadow::Shadow;
use phalanx_tensor::{Arena, Guard, Layout, NormLimit, Terms, Update, UpdateRun, UpdateStep};
use std::ops::Range;

impl Optimizer {
    /// Moves `values` by one step along `grads`, with the rule's learning rate times `factor`: on a CPU as [`Optimizer::step_on`], on
    /// a GPU by a kernel, to the same bits. All steps of one optimizer are over arenas of one layout on one device.
    #[track_caller]
    pub fn step_arenas(&mut self, values: &Arena, grads: &Arena, factor: f64) {
        self.step_whole(values, grads, None, factor);
    }

    /// The same for all parameters, along their gradients; along zeros where there is none since [`Grads::zero`](phalanx_tensor::Grads::zero). On a GPU what was cast of them to 16 bits stays what they are: the kernel writes
    /// it as it moves them.
    #[track_caller]
    pub fn step_parameters(&mut self, parameters: &Parameters, factor: f64) {
        let (values, grads) = (parameters.values(), parameters.grads());
        grads.settle();
        let casts = grads.casts_of_now(values);
        self.step_whole(values, grads.arena(), casts.as_ref(), factor);
        casts.iter().for_each(|casts| grads.casts_were_moved(values, casts));
    }

    #[track_caller]
    fn step_whole(&mut self, values: &Arena, grads: &Arena, casts: Option<&Arena>, factor: f64) {
        let device = values.device();
        if device.gpu().is_none() {
            return self.step_on(device, &mut values.flat_mut::<f32>(), &grads.flat::<f32>(), factor);
        }
        let all = [HeldPart { of_model: 0..values.layout().len(), value: 0, grad: 0 }];
        self.step_held(&all, [values, grads], casts, values.layout(), factor);
    }

    /// Has the next step over arenas, which lie on a GPU, made behind this guard.
    pub fn guard_next(&mut self, guard: Guard) {
        self.terms.guard = Some(guard);
    }

    /// Has the next step over arenas, which lie on a GPU, take gradients that are limited so.
    pub fn limit_next(&mut self, limit: NormLimit) {
        self.terms.limit = Some(limit);
    }

    /// As [`Optimizer::step_parts`], of elements that lie in arenas on a GPU, where each part may lie anywhere. Panics on a CPU.
    #[track_caller]
    pub fn step_held_parts(&mut self, held: &[HeldPart], values: &Arena, grads: &Arena, factor: f64) {
        let n = held.iter().map(|part| part.of_model.len()).sum::<usize>();
        self.step_held(held, [values, grads], None, &Layout::new(&[[n].into()]), factor);
    }

    /// With a state that lies so; `casts` get the values that move in 16 bits.
    #[track_caller]
    fn step_held(
        &mut self,
        held: &[HeldPart],
        [values, grads]: [&Arena; 2],
        casts: Option<&Arena>,
        of_state: &Layout,
        factor: f64,
    ) {
        let device = values.device();
        if self.steps == 0 {
            self.state = self.rule.state_names().iter().map(|_| Shadow::zeros_of(device, of_state)).collect();
        }
        // Arrays of the host's end with what is held, arenas with the line that this ends in.
        let (n, len) = (held.iter().map(|part| part.of_model.len()).sum::<usize>(), of_state.len());
        let fits = self.state.iter().all(|s| [n, len].contains(&s.count()));
        assert!(fits, "step on a GPU: {n} values, but the steps before had another number");
        self.steps += 1;
        let state: Vec<&Arena> =
            self.state.iter_mut().map(|shadow| shadow.gpu_mut_of(device, of_state)).collect();
        let groups = self.groups.as_deref().unwrap_or(&Alike::ALL);
        // The groups differ in numbers alone, so one launch does for all of them.
        let mut steps: Vec<(Range<usize>, UpdateStep)> = Vec::new();
        let mut runs: Vec<UpdateRun> = Vec::new();
        // Elements held before a part, whose states lie so, and those of them that move, by which steps are counted.
        let (mut before, mut moved) = (0, 0);
        for HeldPart { of_model: range, value, grad } in held {
            for Alike { range: group, factors, rested } in groups {
                let (start, end) = (range.start.max(group.start), range.end.min(group.end));
                if start >= end {
                    continue;
                }
                let (len, at) = (end - start, start - range.start);
                let run = UpdateRun { len, values: value + at, grads: grad + at, states: before + at };
                match runs.last_mut().filter(|last| last.is_before(&run)) {
                    Some(last) => last.len += len,
                    None => runs.push(run),
                }
                let step = self.rule.step(self.steps - rested, factor, *factors);
                let within = moved..moved + len;
                match steps.last_mut().filter(|(_, last)| *last == step) {
                    Some((last, _)) => last.end = within.end,
                    None => steps.push((within, step)),
                }
                moved += len;
            }
            before += range.len();
        }
        let states = self.rule.places().map(|place| place.map(|i| state[i]));
        let terms = Terms { casts: casts.cloned(), ..std::mem::take(&mut self.terms) };
        values.update(&runs, &steps, grads, states, self.rule.update(), &terms);
    }
}

/// Some neighbouring elements of a model that an optimizer moves, and where they lie on a GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeldPart {
    /// Which of all elements of the model.
    pub of_model: Range<usize>,
    /// Where the value of the first lies in the arena of values.
    pub value: usize,
    /// Where its gradient lies in that of gradients.
    pub grad: usize,
}

impl Rule {
    /// The number of each of the kernel's states among [`Rule::state_names`], where it is kept.
    fn places(&self) -> [Option<usize>; 3] {
        match self {
            Rule::RmsProp(r) => {
                let momentum = (r.momentum > 0.0).then_some(1);
                [Some(0), momentum, r.centered.then_some(1 + momentum.unwrap_or(0))]
            }
            _ => std::array::from_fn(|i| (i < self.state_names().len()).then_some(i)),
        }
    }

    /// The kernel of the rule.
    fn update(&self) -> Update {
        match self {
            Rule::Sgd(r) => match (r.momentum == 0.0, r.nesterov) {
                (true, _) => Update::Sgd,
                (false, false) => Update::SgdMomentum,
                (false, true) => Update::SgdNesterov,
            },
            Rule::Adam(_) => Update::Adam,
            Rule::AdamW(_) => Update::AdamW,
            Rule::Adadelta(_) => Update::Adadelta,
            Rule::RmsProp(_) => Update::RmsProp,
        }
    }

    /// What step number `steps` (from 1) is for values that are a group. What is left of 1 is told in double precision and then
    /// rounded, as in `Rule::apply`.
    fn step(&self, steps: u64, factor: f64, group: Factors) -> UpdateStep {
        let lr = self.lr() * factor * group.lr;
        let pair = |keep: f64| [keep as f32, (1.0 - keep) as f32];
        let decay = |weight_decay: f64| (weight_decay * group.weight_decay) as f32;
        let step = |decay: f32,
                    [keep_first, share_first]: [f32; 2],
                    [keep_second, share_second]: [f32; 2],
                    eps: f64| {
            let (lr, eps) = (lr as f32, eps as f32);
            UpdateStep {
                inverse_scale: 1.0,
                lr,
                decay,
                keep_first,
                share_first,
                keep_second,
                share_second,
                root: 1.0,
                eps,
            }
        };
        let none = [0.0; 2];
        match self {
            Rule::Sgd(r) => {
                // The first gradient enters the momentum undampened.
                let share = if steps == 1 { 1.0 } else { (1.0 - r.dampening) as f32 };
                step(decay(r.weight_decay), [r.momentum as f32, share], none, 0.0)
            }
            Rule::Adam(Adam { betas, eps, weight_decay, .. })
            | Rule::AdamW(AdamW { betas, eps, weight_decay, .. }) => {
                let decay = match self {
                    Rule::AdamW(_) => (1.0 - lr * weight_decay * group.weight_decay) as f32,
                    _ => decay(*weight_decay),
                };
                let plain = step(decay, pair(betas.0), pair(betas.1), *eps);
                // After so many steps nothing is left to correct.
                let steps = i32::try_from(steps).unwrap_or(i32::MAX);
                let lr = plain.lr / (1.0 - betas.0.powi(steps)) as f32;
                let root = (1.0 - betas.1.powi(steps)).sqrt() as f32;
                UpdateStep { lr, root, ..plain }
            }
            Rule::Adadelta(r) => step(decay(r.weight_decay), none, pair(r.rho), r.eps),
            Rule::RmsProp(r) => step(decay(r.weight_decay), [r.momentum as f32, 0.0], pair(r.alpha), r.eps),
        }
    }
}
