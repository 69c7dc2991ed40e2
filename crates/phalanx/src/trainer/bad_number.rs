//! Which sample is to blame where the loss of a step is no number: asked once it is, so that nobody looks at samples in steps that go well.

use super::run::{Run, StepAt};
use phalanx_data::Batch;
use std::fmt;

/// A number of a sample that is none.
#[derive(Clone, Debug, PartialEq)]
pub struct BadNumber {
    /// The sample's number in its data set.
    pub sample: u64,
    /// Whether it is in its target, and not in its input.
    pub in_target: bool,
    /// The first such element of that, in row-major order.
    pub element: usize,
    /// What it is: NaN or an infinity.
    pub number: f32,
}

impl fmt::Display for BadNumber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let BadNumber { sample, in_target, element, number } = self;
        let part = if *in_target { "target" } else { "input" };
        write!(f, "the {part} of sample {sample} is {number} at element {element}")
    }
}

impl Run<'_> {
    /// The first one of this rank's samples of a step, which are read once more; none where a device makes them.
    pub(super) fn bad_number(&self, at: StepAt) -> Option<BadNumber> {
        let passes = self.deal.passes_of(self.deal.step());
        let batches = self.train.epoch_from(at.epoch, at.step_in_epoch as usize * passes).ok()?;
        batches.take(passes).find_map(|batch| first_of(&batch.ok()?))
    }
}

fn first_of(batch: &Batch) -> Option<BadNumber> {
    [(false, batch.inputs()), (true, batch.values())].into_iter().find_map(|(in_target, numbers)| {
        let at = numbers.iter().position(|number| !number.is_finite())?;
        let each = numbers.len() / batch.len();
        let (sample, element) = (batch.sample_ids()[at / each], at % each);
        Some(BadNumber { sample, in_target, element, number: numbers[at] })
    })
}
