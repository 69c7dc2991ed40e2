//! Optimizers: a [`Rule`] is data, an [`Optimizer`] is a rule with its state. Both see flat slices, so a step over a whole
//! model, a bucket or a shard is the same pass. Formulas and defaults are PyTorch's.
//!
//! ```
//! use phalanx_nn::optim::{Optimizer, Sgd};
//!
//! let mut optimizer = Optimizer::new(Sgd { momentum: 0.5, ..Sgd::new(0.1) })?;
//! let mut values = [1.0];
//! optimizer.step(&mut values, &[1.0], 1.0);
//! // Half the learning rate; the direction is now 1 + 0.5.
//! optimizer.step(&mut values, &[1.0], 0.5);
//! assert!((values[0] - (1.0 - 0.1 - 0.05 * 1.5f32)).abs() < 1e-6);
//! # Ok::<(), phalanx_nn::optim::BadValue>(())
//! ```

mod clip;
mod gpu;
mod groups;
mod rested;
mod rule;
mod saved;

pub use clip::Clip;
pub use gpu::HeldPart;
pub(crate) use groups::matches;
pub use groups::{BadGroup, Group, Members};
pub use rested::Rested;
pub use rule::{Adadelta, Adam, AdamW, BadValue, RmsProp, Rule, Sgd};
pub use saved::{ResumeError, Resuming};

use crate::parameters::Parameters;
use crate::shadow::Shadow;
use groups::Alike;
use phalanx_tensor::{Device, Terms, bring_in};
use rested::Rest;
use rule::MAX_STATES;

/// A rule with its state.
pub struct Optimizer {
    rule: Rule,
    /// One for each name of [`Rule::state_names`], as long as the values; empty before the first step.
    state: Vec<Shadow>,
    /// Arrays of zeros that the state is to lie in, made before it is needed.
    room: Vec<Vec<f32>>,
    steps: u64,
    /// The values that move, in order, cut into groups; none where all move alike.
    groups: Option<Vec<Alike>>,
    rest: Rest,
    /// Of the next step on a GPU.
    terms: Terms,
}

impl Optimizer {
    /// An optimizer that has made no step. Fails if a value of the rule makes no sense.
    pub fn new(rule: impl Into<Rule>) -> Result<Optimizer, BadValue> {
        let rule = rule.into();
        rule.check()?;
        let (rest, terms) = (Rest::default(), Terms::default());
        Ok(Optimizer { rule, state: Vec::new(), room: Vec::new(), steps: 0, groups: None, rest, terms })
    }

    /// The rule.
    pub fn rule(&self) -> &Rule {
        &self.rule
    }

    /// How many steps were made.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// The state, by name; empty before the first step. What was cloned of it stays as it is: if it is still held when the next step
    /// is made, the step goes on with a copy.
    pub fn state(&self) -> impl Iterator<Item = (&'static str, &Shadow)> {
        self.rule.state_names().iter().copied().zip(&self.state)
    }

    /// Takes over the state of another optimizer of the same rule: its steps, who made fewer, and its arrays in their order. Which
    /// parameters move, and how, is to be told anew ([`Optimizer::group`]).
    #[track_caller]
    pub fn take_over(&mut self, steps: u64, rested: Rested, state: Vec<Vec<f32>>) {
        (self.steps, self.groups) = (steps, None);
        self.rest = Rest { then: rested, since: steps, frozen: Vec::new() };
        self.hold(state);
    }

    /// Goes on with other arrays of its state, in their order: those of other parts of a model, after the same steps.
    #[track_caller]
    pub fn hold(&mut self, state: Vec<Vec<f32>>) {
        let (steps, want) = (self.steps, if self.steps == 0 { 0 } else { self.rule.state_names().len() });
        assert!(state.len() == want, "{} arrays of state after {steps} steps, {want} wanted", state.len());
        self.state = state.into_iter().map(Shadow::from).collect();
        self.room.clear();
    }

    /// Makes room for the state beside `len` values, on a CPU: memory that is there, where a new array is only promised by the system,
    /// which brings in its pages when they are first touched. Whoever will be handed a state, or make a first step, while others
    /// wait, had better do this before.
    pub fn make_room(&mut self, len: usize) {
        let array = || {
            let mut array = vec![0.0; len];
            bring_in(&mut array);
            array
        };
        self.room = self.rule.state_names().iter().map(|_| array()).collect();
    }

    /// An array of `len` zeros for [`Optimizer::take_over`], out of the room if there is such.
    pub fn take_room(&mut self, len: usize) -> Vec<f32> {
        self.room.pop().filter(|array| array.len() == len).unwrap_or_else(|| vec![0.0; len])
    }

    /// Treats some of `parameters`, over all of whose values every step then goes, in their own way. Without groups all are
    /// treated alike, in one pass. Those that are frozen ([`crate::freeze`]) stay as they are from now on, and go on one day as if the
    /// steps in between hadn't been.
    ///
    /// # Errors
    /// A group has no member, or a factor that is none.
    pub fn group(&mut self, groups: &[Group], parameters: &Parameters) -> Result<(), BadGroup> {
        self.group_part(groups, parameters, parameters)
    }

    /// The same of a part of a model, in which a group may have no member that has one in the whole.
    ///
    /// # Errors
    /// As [`Optimizer::group`], by the whole model.
    pub fn group_part(
        &mut self,
        groups: &[Group],
        whole: &Parameters,
        parameters: &Parameters,
    ) -> Result<(), BadGroup> {
        groups::check(groups, whole)?;
        // Of the whole, so that whoever writes a checkpoint of it knows of all.
        let frozen = whole.names().iter().enumerate().filter(|(i, _)| whole.is_frozen(*i));
        let frozen: Vec<String> = frozen.map(|(_, name)| name.clone()).collect();
        self.rest = Rest { then: self.rested(), since: self.steps, frozen };
        let differ = !(groups.is_empty() && self.rest.frozen.is_empty() && self.rest.then.is_empty());
        let ranges = || groups::ranges(groups::moving(groups, parameters), &self.rest.then);
        self.groups = differ.then(ranges);
        Ok(())
    }

    /// Moves `values` by one step along `grads`, with the rule's learning rate times `factor`. All steps of one optimizer are
    /// over slices of one length.
    #[track_caller]
    pub fn step(&mut self, values: &mut [f32], grads: &[f32], factor: f64) {
        self.step_in_pieces(None, values, grads, factor);
    }

    /// As [`Optimizer::step`], to the same bits, with the work shared out over the threads of `device`.
    #[track_caller]
    pub fn step_on(&mut self, device: &Device, values: &mut [f32], grads: &[f32], factor: f64) {
        self.step_in_pieces(Some(device), values, grads, factor);
    }

    /// As [`Optimizer::step_on`] over some of the values alone, to the same bits: the state has arrays as long as these parts together,
    /// one after the other. All steps of one optimizer are over the same parts.
    ///
    /// ```
    /// use phalanx_nn::optim::{Optimizer, Part, Sgd};
    /// use phalanx_tensor::Device;
    ///
    /// let mut optimizer = Optimizer::new(Sgd::new(0.5))?;
    /// let (mut second, mut last) = ([2.0], [4.0]);
    /// let parts = [Part { at: 1, values: &mut second, grads: &[1.0] }, Part { at: 3, values: &mut last, grads: &[2.0] }];
    /// optimizer.step_parts(&Device::cpu(1), parts, 1.0);
    /// assert_eq!((second, last), ([1.5], [3.0]));
    /// # Ok::<(), phalanx_nn::optim::BadValue>(())
    /// ```
    #[track_caller]
    pub fn step_parts<'a>(
        &mut self,
        device: &Device,
        parts: impl IntoIterator<Item = Part<'a>>,
        factor: f64,
    ) {
        self.step_all(Some(device), &mut parts.into_iter().collect::<Vec<_>>(), factor);
    }

    #[track_caller]
    fn step_in_pieces(&mut self, device: Option<&Device>, values: &mut [f32], grads: &[f32], factor: f64) {
        self.step_all(device, &mut [Part { at: 0, values, grads }], factor);
    }

    #[track_caller]
    fn step_all(&mut self, device: Option<&Device>, parts: &mut [Part<'_>], factor: f64) {
        for Part { values, grads, .. } in &*parts {
            assert!(
                values.len() == grads.len(),
                "step: {} values with {} gradients",
                values.len(),
                grads.len()
            );
        }
        let len = parts.iter().map(|part| part.values.len()).sum();
        if self.steps == 0 {
            let names = self.rule.state_names().iter();
            self.state = names.map(|_| Shadow::from(self.take_room(len))).collect();
            self.room.clear();
        }
        let fits = self.state.iter().all(|s| s.count() == len);
        assert!(fits, "step: {len} values, but the steps before had another number");
        self.steps += 1;
        let ranges = self.groups.as_deref().unwrap_or(&Alike::ALL);
        let mut before = 0;
        for Part { at, values, grads } in parts {
            for Alike { range, factors, rested } in ranges {
                let (start, end) = (range.start.max(*at), range.end.min(*at + values.len()));
                if start >= end {
                    continue;
                }
                let (within, kept) = (start - *at..end - *at, before + start - *at..before + end - *at);
                let (values, grads) = (&mut values[within.clone()], &grads[within]);
                let mut state: [&mut [f32]; MAX_STATES] = Default::default();
                for (part, array) in state.iter_mut().zip(&mut self.state) {
                    *part = &mut array.host_mut()[kept.clone()];
                }
                let (rule, steps) = (&self.rule, self.steps - rested);
                match device {
                    Some(device) if device.threads() > 1 && values.len() > PIECE => {
                        let [a, b, c] = state;
                        device.for_pieces([values, a, b, c], PIECE, |start, [values, a, b, c]| {
                            let grads = &grads[start..start + values.len()];
                            rule.apply(values, grads, [a, b, c], steps, factor, *factors);
                        });
                    }
                    _ => rule.apply(values, grads, state, steps, factor, *factors),
                }
            }
            before += values.len();
        }
    }
}

/// Some of the values of a model, beside their gradients.
#[derive(Debug)]
pub struct Part<'a> {
    /// Where in the arena it begins.
    pub at: usize,
    /// The values.
    pub values: &'a mut [f32],
    /// Their gradients.
    pub grads: &'a [f32],
}

/// Values that one thread moves at a time: some ten microseconds of work.
const PIECE: usize = 1 << 15;

#[cfg(test)]
mod tests;
