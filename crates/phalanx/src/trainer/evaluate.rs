//! How a model does on samples that it didn't learn from.

use super::run::Run;
use crate::error::Error;
use phalanx_nn::{Average, Ctx};
use phalanx_tensor::no_grad;

/// How a model does on test samples.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Evaluation {
    /// The mean over all samples.
    pub loss: f64,
    /// The share that was told right, if they have labels.
    pub accuracy: Option<f64>,
}

/// How the model does with the running mean of its weights, if there is one, or else with its weights; none without test
/// samples.
pub(super) fn evaluate(
    run: &mut Run<'_>,
    average: &mut Option<Average>,
) -> Result<Option<Evaluation>, Error> {
    match average {
        Some(average) => average.in_place_of(run.parameters, || as_it_is(run)),
        None => as_it_is(run),
    }
}

/// The mean loss and accuracy over all test samples, each counted once, whatever the number of ranks.
fn as_it_is(run: &mut Run<'_>) -> Result<Option<Evaluation>, Error> {
    let Some(test) = &run.test else { return Ok(None) };
    let (loss, device) = (run.trainer.loss, run.worker.device());
    let mut totals = [0.0; 3];
    let mut bad_images = 0;
    for batch in test.epoch(0)? {
        let batch = batch?;
        bad_images += batch.skipped();
        if batch.is_empty() {
            continue;
        }
        no_grad(|| {
            let output = run.model.forward(&batch.input_tensor(device), &mut Ctx::eval());
            totals[0] += loss.of(&output, &batch.target_tensor(device)).item() * batch.len() as f64;
            totals[1] += batch.len() as f64;
            if loss.has_labels() {
                let told = output.argmax(1).to_vec::<i64>();
                totals[2] +=
                    told.iter().zip(batch.labels()).filter(|(told, label)| told == label).count() as f64;
            }
        });
    }
    run.bad_images += bad_images;
    run.strategy.sum(&mut totals)?;
    let [total, samples, right] = totals;
    let accuracy = loss.has_labels().then_some(right / samples);
    Ok(Some(Evaluation { loss: total / samples, accuracy }))
}
