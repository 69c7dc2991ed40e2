//! How a model does on samples that it didn't learn from.

use super::run::Run;
use crate::error::Error;
use phalanx_nn::Ctx;
use phalanx_tensor::no_grad;

/// How a model does on test samples.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Evaluation {
    /// The mean over all samples.
    pub loss: f64,
    /// The share that was told right, if they have labels.
    pub accuracy: Option<f64>,
}

/// The mean loss and accuracy over all test samples, each counted once, whatever the number of ranks; none without such.
pub(super) fn evaluate(run: &mut Run<'_>) -> Result<Option<Evaluation>, Error> {
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
