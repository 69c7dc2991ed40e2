//! How a model does on samples that it didn't learn from.
//!
//! A GPU is given each batch before anybody has looked at what the one before came to, so it always has something to do, and it finds each
//! label's place among the scores, so no scores come to the host.

use super::ahead::Ahead;
use super::by_shard::ByShard;
use super::run::Run;
use crate::error::Error;
use phalanx_data::{Dataset, Input, Target};
use phalanx_job::Section;
use phalanx_nn::{Average, Ctx, Loss, Metric};
use phalanx_parallel::{EvalPass, Outputs};
use phalanx_tensor::{Later, LaterVec, autocast};
use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

/// How a model does on test samples.
#[derive(Clone, Debug, PartialEq)]
pub struct Evaluation {
    /// The mean over all samples, or over their labels by what these count.
    pub loss: f64,
    /// The share of the labels that count that was told right, unless they are the words of a text.
    pub accuracy: Option<f64>,
    /// The share whose label was among the five that were thought most likely, if there are more than five.
    pub top5: Option<f64>,
    /// What else is asked for, by its name ([`Trainer::metrics`](crate::Trainer::metrics)).
    pub metrics: BTreeMap<String, f64>,
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
    let (loss, metrics, device) = (&run.trainer.loss, &run.trainer.metrics[..], run.worker.device());
    let products = run.trainer.precision.products();
    let width = BASIC + metrics.iter().map(Metric::n_sums).sum::<usize>();
    let mut totals = ByShard::of(&*run.strategy, width);
    let mut bad_images = 0;
    // Of five classes or less every label is among the first five.
    let more_than_five = classes(test.dataset()).is_some_and(|classes| classes > 5);
    let has_accuracy = has_accuracy(test.dataset(), loss);
    // Batches that were given to a GPU, by number, the first first.
    let owed = RefCell::new(VecDeque::new());
    let mut batches = Ahead::of(test.epoch(0)?, device);
    for number in 0.. {
        let (Some(batch), _) = batches.take() else { break };
        // Ranks may hold different numbers of shards, and all ask each other once a step.
        if number % totals.rows() == 0 && run.exchange_between_steps()?.stop.is_some() {
            return Ok(None);
        }
        // Each batch has its time.
        let _batch = run.worker.pulse().enter(Section::Evaluation);
        let mut batch = batch?;
        bad_images += batch.skipped();
        // Ranks may need each other for it, with samples or without.
        let [input, target] = batch.take_tensors(device);
        let (model, parameters) = (run.model, run.parameters);
        let ctx = Ctx::eval_on(run.trainer.seed, Arc::clone(batch.sample_ids()));
        let pass = EvalPass { model, parameters, input, target, ctx };
        let judge = |outputs: &Outputs<'_>, sums: &mut [f64]| {
            let counted = Counted::of(outputs, loss, metrics, has_accuracy)?;
            match outputs.may_be_owed() {
                true => owed.borrow_mut().push_back((number, counted)),
                false => counted.add_to(sums),
            }
            Ok(())
        };
        let mut sums = vec![0.0; width];
        autocast(products, || run.strategy.evaluate(&pass, &judge, &mut sums))?;
        totals.add(number, &sums);
        batches.look();
        pay(&mut owed.borrow_mut(), &mut totals, (number + 1).saturating_sub(MOST_OWED));
    }
    pay(&mut owed.borrow_mut(), &mut totals, usize::MAX);
    run.bad_images += bad_images;
    let mut whole = vec![0.0; width];
    totals.whole_into(&mut *run.strategy, &mut whole)?;
    let (basic, mut own) = whole.split_first_chunk().expect("there are those");
    let [total, counted, labels, right, among_five]: [f64; BASIC] = *basic;
    let accuracy = has_accuracy.then_some(right / labels);
    let top5 = (has_accuracy && more_than_five).then_some(among_five / labels);
    let metrics = metrics.iter().map(|metric| {
        let sums = own.split_off(..metric.n_sums()).expect("each has its sums");
        (metric.name().to_owned(), metric.value(sums))
    });
    Ok(Some(Evaluation { loss: total / counted, accuracy, top5, metrics: metrics.collect() }))
}

/// Whether a share of right labels is told: of classes, but not of the words of a text. How many of these are foretold says less than how
/// likely they were; and shares of classes have no right one.
pub(super) fn has_accuracy(dataset: &dyn Dataset, loss: &Loss) -> bool {
    let of_text =
        matches!(dataset.input(), Input::Ids(words) if of_words(dataset) && classes(dataset) == Some(words));
    loss.has_labels() && classes(dataset).is_some() && !of_text
}

/// Whether each word has a label: of those a perplexity is told.
pub(crate) fn of_words(dataset: &dyn Dataset) -> bool {
    matches!((dataset.input(), dataset.target()), (Input::Ids(_), Target::Sequence { .. }))
}

/// How many classes there are, if labels are such.
fn classes(dataset: &dyn Dataset) -> Option<usize> {
    match dataset.target() {
        Target::Classes(classes) | Target::Sequence { classes, .. } => Some(classes),
        Target::Values(_) => None,
    }
}

/// Batches whose numbers nobody has looked at: one that a GPU is at, and one that it goes on with.
const MOST_OWED: usize = 2;

/// Waits for what the batches before this one came to.
fn pay(owed: &mut VecDeque<(usize, Counted<'_>)>, totals: &mut ByShard, before: usize) {
    while owed.front().is_some_and(|(number, _)| *number < before) {
        let (number, counted) = owed.pop_front().expect("there is a first");
        let mut sums = vec![0.0; totals.width()];
        counted.add_to(&mut sums);
        totals.add(number, &sums);
    }
}

/// The sums that losses and shares of right labels are made of; behind them come those of the metrics.
const BASIC: usize = 5;

/// What some samples came to, which a GPU may have to bring.
struct Counted<'a> {
    loss_of: &'a Loss,
    samples: usize,
    /// Their mean loss: over all labels, where some count more than others.
    loss: Later,
    /// What they count, by their number, where targets tell.
    weight: Option<Later>,
    /// Their labels, if it matters which they are.
    labels: Option<LaterVec<i64>>,
    /// How many classes come before each one's label, if that means anything.
    places: Option<LaterVec<f32>>,
    /// Each with what it adds to its sums.
    metrics: Vec<(&'a Metric, LaterVec<f32>)>,
}

impl<'a> Counted<'a> {
    fn of(
        outputs: &Outputs<'_>,
        loss: &'a Loss,
        metrics: &'a [Metric],
        has_accuracy: bool,
    ) -> Result<Counted<'a>, phalanx_parallel::Error> {
        let weight = loss.weight(outputs.target()).map(|weight| weight.item_later());
        let matters = weight.is_none() && loss.weighs() || has_accuracy && loss.ignored().is_some();
        let labels = matters.then(|| outputs.target().to_vec_later());
        let places = if has_accuracy { Some(outputs.label_places(loss.ignored())?) } else { None };
        let metrics = metrics
            .iter()
            .map(|metric| outputs.parts_of(metric, loss.ignored()).map(|parts| (metric, parts)));
        let metrics = metrics.collect::<Result<_, _>>()?;
        let samples = outputs.samples();
        let of_all = outputs.loss(&loss.over_all())?;
        Ok(Counted { loss_of: loss, samples, loss: of_all, weight, labels, places, metrics })
    }

    /// Adds to the sum of the losses, and to what it is to be divided by; to how many labels were to be told, and of how many of them the
    /// right one came first, and among the first five; and to the sums of the metrics.
    fn add_to(self, sums: &mut [f64]) {
        let samples = self.samples as f64;
        // Who is told why a loss is none isn't to be told less of places before.
        let total = self.loss.item() * samples;
        let labels = self.labels.map(LaterVec::to_vec);
        let counted = match (self.weight, &labels) {
            (Some(weight), _) => samples * weight.item(),
            (None, Some(labels)) => samples * self.loss_of.counts(labels) / labels.len().max(1) as f64,
            (None, None) => samples,
        };
        let mut places = self.places.map_or_else(Vec::new, LaterVec::to_vec);
        if let (Some(ignored), Some(labels)) = (self.loss_of.ignored(), &labels) {
            let mut labels = labels.iter();
            places.retain(|_| labels.next() != Some(&ignored));
        }
        // That of a score which is no number is less than 0.
        let before = |limit: f32| places.iter().filter(|place| (0.0..limit).contains(*place)).count() as f64;
        let basic: [f64; BASIC] = [total, counted, places.len() as f64, before(1.0), before(5.0)];
        let (sums, mut own) = sums.split_at_mut(BASIC);
        sums.iter_mut().zip(basic).for_each(|(sum, found)| *sum += found);
        for (metric, parts) in self.metrics {
            metric.add(&parts.to_vec(), own.split_off_mut(..metric.n_sums()).expect("each has its sums"));
        }
    }
}
