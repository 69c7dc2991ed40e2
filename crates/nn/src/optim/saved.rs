//! The state of an optimizer in a file: arrays `<parameter>.<state>`, as PyTorch names states, and the number of steps; of
//! a parameter that made fewer, which was frozen for a while, also `<parameter>.step`.

use super::groups::{Factors, ranges};
use super::rested::{Rest, Rested};
use super::{BadValue, Optimizer, Rule};
use crate::parameters::{Mismatch, Parameters};
use crate::weights::Weights;
use phalanx_tensor::{Layout, Shape};
use std::borrow::Cow;
use std::iter;
use std::ops::Range;
use thiserror::Error;

/// The name of the number of steps. No parameter's state is named so: theirs have a dot.
const STEP: &str = "step";

/// Why an optimizer can't go on from a file.
#[derive(Clone, Debug, PartialEq, Error)]
pub enum ResumeError {
    /// The rule is wrong by itself.
    #[error(transparent)]
    Rule(#[from] BadValue),
    /// There is no count of steps, or it isn't one.
    #[error(
        "the optimizer's state has no count of steps under the name step: it wasn't saved by Optimizer::to_weights"
    )]
    NoStep,
    /// That of a parameter makes no sense.
    #[error("{name} is {value} in the optimizer's state: must be a whole number from 0 to its step, {steps}")]
    BadStep {
        /// The array.
        name: String,
        /// What it holds.
        value: f32,
        /// The optimizer's steps.
        steps: u64,
    },
    /// The state belongs to another model or another rule.
    #[error("the optimizer's {state} doesn't fit: {mismatch}")]
    Mismatch {
        /// Which state.
        state: &'static str,
        /// What is missing or has another shape.
        mismatch: Mismatch,
    },
}

impl Optimizer {
    /// The state for a file. Panics if it is of a part of the parameters, as under FSDP, whose strategy gives the whole one.
    #[track_caller]
    pub fn to_weights(&self, parameters: &Parameters) -> Weights {
        let mut weights = Weights::default();
        let whole = parameters.layout().len();
        for (name, steps) in self.counts() {
            weights.push(name, Shape::new(&[]), &[steps]);
        }
        for (state, flat) in self.state() {
            let append = |flat: &[f32]| {
                assert!(
                    flat.len() == whole,
                    "Optimizer::to_weights: {state} is of {} of the {whole} numbers of the model: `Strategy::whole_state` gives that of all",
                    flat.len()
                );
                weights.append(parameters.to_weights_from(flat, &format!(".{state}")));
            };
            flat.with(append);
        }
        weights
    }

    /// The number of steps, and those of parameters that made fewer, as a file names them: float32, as PyTorch's are, exact up to
    /// 2^24 steps, and no rule looks at the last digits of more.
    pub fn counts(&self) -> Vec<(String, f32)> {
        let of_rested =
            self.rested().into_iter().map(|(name, rested)| (format!("{name}.{STEP}"), self.steps - rested));
        let counts = iter::once((STEP.to_owned(), self.steps)).chain(of_rested);
        counts.map(|(name, steps)| (name, steps as f32)).collect()
    }

    /// An optimizer that goes on from a state that was saved: its next step is the one that the saved one would have made.
    pub fn resume(
        rule: impl Into<Rule>,
        parameters: &Parameters,
        weights: &Weights,
    ) -> Result<Optimizer, ResumeError> {
        let mut resuming = Resuming::new(rule, parameters, parameters, None)?;
        for (name, shape) in weights.shapes() {
            let (_, values) = weights.get(name).expect("a name of its own");
            resuming.take(name, shape, values, |_, values| Some(Cow::Borrowed(values)));
        }
        resuming.finish()
    }
}

/// An optimizer's state on its way in from a file, array by array, in any order. The file has that of a whole model, of which some may be
/// wanted alone.
pub struct Resuming<'a> {
    optimizer: Optimizer,
    whole: &'a Parameters,
    /// How what is wanted lies, and where parameters of the whole model are there.
    own: Layout,
    places: Vec<Option<usize>>,
    /// The elements of that arena that are wanted, and where those of each range begin in an array of the state.
    held: Vec<(Range<usize>, usize)>,
    /// By state, with the parameters that it has been given for.
    states: Vec<(Vec<f32>, Vec<bool>)>,
    misshaped: Vec<(usize, (String, Shape, Shape))>,
    steps: Option<f32>,
    /// By the names of parameters.
    steps_of: Vec<(String, f32)>,
}

impl<'a> Resuming<'a> {
    /// Of the state of the parameters `whole`, that of `own`, which are parts of some of them under their names, or all of them: of all
    /// elements, or of these ranges of their arena alone.
    pub fn new(
        rule: impl Into<Rule>,
        whole: &'a Parameters,
        own: &Parameters,
        held: Option<Vec<Range<usize>>>,
    ) -> Result<Resuming<'a>, ResumeError> {
        let optimizer = Optimizer::new(rule)?;
        let all = 0..own.layout().len();
        let mut len = 0;
        let held = held.unwrap_or_else(|| vec![all]).into_iter().map(|range| {
            len += range.len();
            (range.clone(), len - range.len())
        });
        let held = held.collect();
        let state = |_| (vec![0.0; len], vec![false; whole.names().len()]);
        let states = optimizer.rule.state_names().iter().map(state).collect();
        let places = whole.names().iter().map(|name| own.index_of(name)).collect();
        let (own, misshaped) = (own.layout().clone(), Vec::new());
        let (steps, steps_of) = (None, Vec::new());
        Ok(Resuming { optimizer, whole, own, places, held, states, misshaped, steps, steps_of })
    }

    /// Takes an array of the file, its values in row-major order; one that this optimizer has no use for is passed over. `part` gives, of an
    /// array of the parameter with this name, the part that is wanted, likewise; it isn't asked for those of which nothing is.
    pub fn take<'v>(
        &mut self,
        name: &str,
        shape: &Shape,
        values: &'v [f32],
        part: impl FnOnce(&str, &'v [f32]) -> Option<Cow<'v, [f32]>>,
    ) {
        if name == STEP {
            self.steps = values.first().copied();
            return;
        }
        let names = self.optimizer.rule.state_names();
        let Some((parameter, state)) = name.rsplit_once('.') else { return };
        if state == STEP && self.whole.index_of(parameter).is_some() {
            self.steps_of.extend(values.first().map(|&steps| (parameter.to_owned(), steps)));
            return;
        }
        let Some(state) = names.iter().position(|name| *name == state) else { return };
        let Some(i) = self.whole.index_of(parameter) else { return };
        let whole = self.whole.layout().shape(i);
        if whole != shape {
            self.misshaped.push((state, (name.to_owned(), *shape, *whole)));
            return;
        }
        let (into, given) = &mut self.states[state];
        given[i] = true;
        let Some(own) = self.places[i] else { return };
        let Some(values) = part(parameter, values) else { return };
        let (at, values) = (self.own.range(own), self.own.laid(own, &values));
        for (held, start) in &self.held {
            let (first, last) = (at.start.max(held.start), at.end.min(held.end));
            if first < last {
                into[start + first - held.start..][..last - first]
                    .copy_from_slice(&values[first - at.start..last - at.start]);
            }
        }
    }

    /// The optimizer, once everything was given.
    pub fn finish(self) -> Result<Optimizer, ResumeError> {
        let Resuming { mut optimizer, whole, own, places, states, misshaped, steps, steps_of, .. } = self;
        let steps = steps.filter(|steps| (0.0..1e18).contains(steps) && steps.fract() == 0.0);
        optimizer.steps = steps.ok_or(ResumeError::NoStep)? as u64;
        if optimizer.steps == 0 {
            return Ok(optimizer);
        }
        let mut rested = Rested::new();
        for (parameter, value) in steps_of {
            let steps = optimizer.steps;
            // What a float32 can't tell apart is no fewer.
            if !(0.0..=steps as f32).contains(&value) || value.fract() != 0.0 {
                return Err(ResumeError::BadStep { name: format!("{parameter}.{STEP}"), value, steps });
            }
            rested.insert(parameter, steps.saturating_sub(value as u64));
        }
        if !rested.is_empty() {
            let names = whole.names().iter().zip(&places);
            let held =
                names.filter_map(|(name, place)| Some((name.as_str(), own.span((*place)?..(*place)? + 1))));
            let mut held: Vec<_> = held.map(|(name, span)| (name, span, Factors::NONE)).collect();
            held.sort_by_key(|(_, span, _)| span.start);
            optimizer.groups = Some(ranges(held.into_iter(), &rested));
        }
        optimizer.rest = Rest { then: rested, since: optimizer.steps, frozen: Vec::new() };
        for (number, (flat, given)) in states.into_iter().enumerate() {
            let state = optimizer.rule.state_names()[number];
            let misshaped = misshaped.iter().filter(|(of, _)| *of == number).map(|(_, found)| found.clone());
            let mut mismatch = Mismatch { misshaped: misshaped.collect(), ..Mismatch::default() };
            let names = whole.names().iter().zip(given).filter(|(_, given)| !given);
            let names = names.map(|(name, _)| format!("{name}.{state}"));
            let is_there = |name: &String| mismatch.misshaped.iter().any(|(other, ..)| other == name);
            mismatch.missing = names.filter(|name| !is_there(name)).collect();
            if !mismatch.is_empty() {
                return Err(ResumeError::Mismatch { state, mismatch });
            }
            optimizer.state.push(flat.into());
        }
        Ok(optimizer)
    }
}
