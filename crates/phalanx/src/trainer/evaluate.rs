//! How a model does on samples that it didn't learn from.

use super::by_shard::ByShard;
use super::run::Run;
use crate::error::Error;
use phalanx_data::Target;
use phalanx_job::Section;
use phalanx_nn::{Average, Ctx, Loss};
use phalanx_parallel::{EvalPass, Outputs};
use phalanx_tensor::autocast;

/// How a model does on test samples.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Evaluation {
    /// The mean over all samples.
    pub loss: f64,
    /// The share that was told right, if they have a label each.
    pub accuracy: Option<f64>,
    /// The share whose label was among the five that were thought most likely, if there are more than five.
    pub top5: Option<f64>,
}

/// How the model does with the running mean of its weights, if there is one, or else with its weights; none without test
/// samples.
pub(super) fn evaluate(
    run: &mut Run<'_>,
    average: &mut Option<Average>,
) -> Result<Option<Evaluation>, Error> {
    if run.test.is_none() {
        return Ok(None);
    }
    run.with_mean(average, as_it_is)
}

/// The mean loss and accuracy over all test samples, each counted once, whatever the number of ranks.
fn as_it_is(run: &mut Run<'_>) -> Result<Option<Evaluation>, Error> {
    let Some(test) = &run.test else { return Ok(None) };
    let (loss, device) = (run.trainer.loss, run.worker.device());
    let products = run.trainer.precision.products();
    let mut totals = ByShard::<4>::of(&*run.strategy);
    let mut bad_images = 0;
    // Of five classes or less every label is among the first five.
    let more_than_five = matches!(test.dataset().target(), Target::Classes(n) if n > 5);
    // How many bytes of a text are foretold says less than how likely they were; shares of classes have no right one.
    let has_accuracy = loss.has_labels() && matches!(test.dataset().target(), Target::Classes(_));
    let judge = |outputs: &Outputs<'_>, sums: &mut [f64]| {
        let found = counted(outputs, loss, has_accuracy)?;
        sums.iter_mut().zip(found).for_each(|(sum, found)| *sum += found);
        Ok(())
    };
    for (number, batch) in test.epoch(0)?.enumerate() {
        // Ranks may hold different numbers of shards, and all ask each other once a step.
        if number % totals.rows() == 0 && run.exchange_between_steps()?.stop.is_some() {
            return Ok(None);
        }
        // Each batch has its time.
        let _batch = run.worker.pulse().enter(Section::Evaluation);
        let batch = batch?;
        bad_images += batch.skipped();
        // Ranks may need each other for it, with samples or without.
        let [input, target] = batch.tensors(device);
        let (model, parameters) = (run.model, run.parameters);
        let pass = EvalPass { model, parameters, input, target, ctx: Ctx::eval() };
        let mut sums = [0.0; 4];
        autocast(products, || run.strategy.evaluate(&pass, &judge, &mut sums))?;
        totals.add(number, sums);
    }
    run.bad_images += bad_images;
    let [total, samples, right, among_five] = totals.whole(&mut *run.strategy)?;
    let accuracy = has_accuracy.then_some(right / samples);
    let top5 = (has_accuracy && more_than_five).then_some(among_five / samples);
    Ok(Some(Evaluation { loss: total / samples, accuracy, top5 }))
}

/// The sum of the losses of some samples, how many they are, and of how many the label came first, and among the first five, if that means
/// anything.
fn counted(
    outputs: &Outputs<'_>,
    loss: Loss,
    has_accuracy: bool,
) -> Result<[f64; 4], phalanx_parallel::Error> {
    let samples = outputs.samples();
    let total = outputs.loss(loss)? * samples as f64;
    let [mut right, mut among_five] = [0.0; 2];
    if has_accuracy {
        let (scores, labels) = (outputs.to_vec()?, outputs.target().to_vec::<i64>());
        for (scores, &label) in scores.chunks_exact(scores.len() / samples).zip(&labels) {
            let place = place(scores, label as usize);
            right += f64::from(place.is_some_and(|place| place < 1));
            among_five += f64::from(place.is_some_and(|place| place < 5));
        }
    }
    Ok([total, samples as f64, right, among_five])
}

/// How many classes come before `label` when the likeliest is first, and of equals the one that is listed first; none if its
/// score is no number.
fn place(scores: &[f32], label: usize) -> Option<usize> {
    let own = scores[label];
    let before = |&(class, &score): &(usize, &f32)| score > own || score == own && class < label;
    (!own.is_nan()).then(|| scores.iter().enumerate().filter(before).count())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_label_has_a_place_among_the_scores() {
        let check = |scores: &[f32], places: &[Option<usize>]| {
            let got: Vec<_> = (0..scores.len()).map(|label| place(scores, label)).collect();
            assert_eq!(got, places, "{scores:?}");
        };
        check(&[0.1, 0.7, -3.0], &[Some(1), Some(0), Some(2)]);
        check(&[2.0, 2.0, 5.0, 2.0], &[Some(1), Some(2), Some(0), Some(3)]);
        check(&[f32::NAN, 1.0, f32::INFINITY], &[None, Some(1), Some(0)]);
    }
}
