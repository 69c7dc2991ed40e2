//! How a model does on samples that it didn't learn from.
//!
//! A GPU is given each batch before anybody has looked at what the one before came to, so it always has something to do, and it finds each
//! label's place among the scores, so no scores come to the host.

use super::ahead::Ahead;
use super::by_shard::ByShard;
use super::run::Run;
use crate::error::Error;
use phalanx_data::Target;
use phalanx_job::Section;
use phalanx_nn::{Average, Ctx, Loss};
use phalanx_parallel::{EvalPass, Outputs};
use phalanx_tensor::{Later, LaterVec, autocast};
use std::cell::RefCell;
use std::collections::VecDeque;

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
    let (loss, device) = (&run.trainer.loss, run.worker.device());
    let products = run.trainer.precision.products();
    let mut totals = ByShard::<4>::of(&*run.strategy);
    let mut bad_images = 0;
    // Of five classes or less every label is among the first five.
    let more_than_five = matches!(test.dataset().target(), Target::Classes(n) if n > 5);
    // How many bytes of a text are foretold says less than how likely they were; shares of classes have no right one.
    let has_accuracy = loss.has_labels() && matches!(test.dataset().target(), Target::Classes(_));
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
        let pass = EvalPass { model, parameters, input, target, ctx: Ctx::eval() };
        let judge = |outputs: &Outputs<'_>, sums: &mut [f64]| {
            let counted = Counted::of(outputs, loss, has_accuracy)?;
            match outputs.may_be_owed() {
                true => owed.borrow_mut().push_back((number, counted)),
                false => sums.iter_mut().zip(counted.sums()).for_each(|(sum, found)| *sum += found),
            }
            Ok(())
        };
        let mut sums = [0.0; 4];
        autocast(products, || run.strategy.evaluate(&pass, &judge, &mut sums))?;
        totals.add(number, sums);
        batches.look();
        pay(&mut owed.borrow_mut(), &mut totals, (number + 1).saturating_sub(MOST_OWED));
    }
    pay(&mut owed.borrow_mut(), &mut totals, usize::MAX);
    run.bad_images += bad_images;
    let [total, samples, right, among_five] = totals.whole(&mut *run.strategy)?;
    let accuracy = has_accuracy.then_some(right / samples);
    let top5 = (has_accuracy && more_than_five).then_some(among_five / samples);
    Ok(Some(Evaluation { loss: total / samples, accuracy, top5 }))
}

/// Batches whose numbers nobody has looked at: one that a GPU is at, and one that it goes on with.
const MOST_OWED: usize = 2;

/// Waits for what the batches before this one came to.
fn pay(owed: &mut VecDeque<(usize, Counted)>, totals: &mut ByShard<4>, before: usize) {
    while owed.front().is_some_and(|(number, _)| *number < before) {
        let (number, counted) = owed.pop_front().expect("there is a first");
        totals.add(number, counted.sums());
    }
}

/// What some samples came to, which a GPU may have to bring.
struct Counted {
    samples: usize,
    /// Their mean loss.
    loss: Later,
    /// How many classes come before each one's label, if that means anything.
    places: Option<LaterVec<f32>>,
}

impl Counted {
    fn of(
        outputs: &Outputs<'_>,
        loss: &Loss,
        has_accuracy: bool,
    ) -> Result<Counted, phalanx_parallel::Error> {
        let places = if has_accuracy { Some(outputs.label_places()?) } else { None };
        Ok(Counted { samples: outputs.samples(), loss: outputs.loss(loss)?, places })
    }

    /// The sum of the losses, how many samples they are of, and of how many the label came first, and among the first five.
    fn sums(self) -> [f64; 4] {
        let samples = self.samples as f64;
        // Who is told why a loss is none isn't to be told less of places before.
        let total = self.loss.item() * samples;
        let places = self.places.map_or_else(Vec::new, LaterVec::to_vec);
        // That of a score which is no number is less than 0.
        let before = |limit: f32| places.iter().filter(|place| (0.0..limit).contains(*place)).count() as f64;
        [total, samples, before(1.0), before(5.0)]
    }
}
