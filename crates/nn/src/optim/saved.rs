//! The state of an optimizer in a file: arrays `<parameter>.<state>`, as PyTorch names states, and the number of steps.

use super::{BadValue, Optimizer, Rule};
use crate::parameters::{Mismatch, Parameters};
use crate::weights::Weights;
use phalanx_tensor::Shape;
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
    /// The state for a file. The number of steps is a float32, as PyTorch's is: exact up to 2^24 steps, and no rule looks at
    /// the last digits of more.
    pub fn to_weights(&self, parameters: &Parameters) -> Weights {
        let mut weights = Weights::default();
        weights.push(STEP.into(), Shape::new(&[]), &[self.steps as f32]);
        for (state, flat) in self.state() {
            weights.append(flat.with(|flat| parameters.to_weights_from(flat, &format!(".{state}"))));
        }
        weights
    }

    /// An optimizer that goes on from a state that was saved: its next step is the one that the saved one would have made.
    pub fn resume(
        rule: impl Into<Rule>,
        parameters: &Parameters,
        weights: &Weights,
    ) -> Result<Optimizer, ResumeError> {
        let mut optimizer = Optimizer::new(rule)?;
        let Some((_, &[steps])) = weights.get(STEP) else { return Err(ResumeError::NoStep) };
        if !(0.0..1e18).contains(&steps) || steps.fract() != 0.0 {
            return Err(ResumeError::NoStep);
        }
        optimizer.steps = steps as u64;
        if optimizer.steps > 0 {
            for &state in optimizer.rule.state_names() {
                let flat = parameters.flat_from(weights, &format!(".{state}"));
                let flat = flat.map_err(|mismatch| ResumeError::Mismatch { state, mismatch })?;
                optimizer.state.push(flat.into());
            }
        }
        Ok(optimizer)
    }
}
