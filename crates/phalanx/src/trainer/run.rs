//! Who works on what in one run: the model, its parameters, the strategy that shares them, and the samples of this rank.

use super::{OnNan, Progress, Trainer, Watch, small_batch};
use crate::checkpoint::RunFacts;
use crate::error::Error;
use crate::event::{Event, Observer};
use crate::worker::Worker;
use phalanx_data::{Batch, Batches, Dataset, ExactSampler, Loader, LoaderOptions, Order};
use phalanx_nn::{Average, Ctx, Module, Moment, Parameters};
use phalanx_parallel::{Ddp, Place, SingleDevice, Strategy, Sync};
use std::sync::Arc;

/// One run, ready for its first step.
pub(super) struct Run<'a> {
    pub(super) trainer: &'a Trainer,
    pub(super) worker: &'a Worker,
    pub(super) model: &'a dyn Module,
    pub(super) parameters: &'a Parameters,
    pub(super) strategy: Box<dyn Strategy>,
    pub(super) train: Loader,
    pub(super) test: Option<Loader>,
    /// Bad images of this rank in this epoch that others took the place of.
    pub(super) bad_images: usize,
}

/// What the making of a step's gradients leaves beside them.
pub(super) struct Made {
    /// This rank's part of the loss.
    pub(super) loss: f64,
    /// The norm of the gradients before they were cut by it, if they are.
    pub(super) norm: Option<f64>,
    /// Samples of all ranks.
    pub(super) samples: u64,
}

/// Test samples a step and worker: enough to keep the kernels busy, few enough to stay in the cache.
const TEST_BATCH: usize = 200;

impl<'a> Run<'a> {
    /// Brings the ranks together: they start from the values and buffers of rank 0.
    pub(super) fn prepare(
        trainer: &'a Trainer,
        worker: &'a Worker,
        model: &'a dyn Module,
        parameters: &'a Parameters,
        train: Arc<dyn Dataset>,
        test: Option<Arc<dyn Dataset>>,
    ) -> Result<Run<'a>, Error> {
        for (what, data) in [("train", Some(&train)), ("test", test.as_ref())] {
            if data.is_some_and(|data| data.is_empty()) {
                return Err(Error::NoSamples { what });
            }
        }
        let Trainer { plateau, patience, best_file, watch, .. } = trainer;
        assert!(trainer.accumulate > 0, "Trainer: a step of 0 batches");
        let going_by_tests = [
            ("a schedule that follows the test loss", plateau.is_some()),
            ("patience", patience.is_some()),
            ("keeping the best weights", best_file.is_some()),
        ];
        if let (None, Some((what, _))) = (&test, going_by_tests.iter().find(|(_, asked)| *asked)) {
            return Err(Error::NothingToJudge { what });
        }
        if *watch == Watch::Accuracy && !trainer.loss.has_labels() {
            return Err(Error::NoAccuracy);
        }
        let mut strategy: Box<dyn Strategy> = match worker.group().world_size() {
            1 => Box::new(SingleDevice::new()),
            _ => Box::new(Ddp::with(worker.group().clone(), trainer.ddp.clone())),
        };
        strategy.prepare(parameters)?;
        let order = if trainer.shuffle { Order::Shuffled { seed: trainer.seed } } else { Order::Stored };
        let (place, options) = (strategy.place(), trainer.loader);
        let train = loader(place, train, trainer.batch_size, order, options);
        let test = test.map(|test| loader(place, test, TEST_BATCH, Order::Stored, options));
        let run = Run { trainer, worker, model, parameters, strategy, train, test, bad_images: 0 };
        if run.samples_per_epoch() == 0 {
            let (samples, batch_size) = (run.train.dataset().len(), trainer.batch_size);
            return Err(Error::NoFullBatch { samples, batch_size, world_size: run.world_size() });
        }
        small_batch::check(&run)?;
        Ok(run)
    }

    /// How many ranks train.
    pub(super) fn world_size(&self) -> usize {
        self.strategy.place().world_size
    }

    /// Samples of all ranks in a full batch. A batch size that stands for the whole data set may be any number.
    fn batch_of_all(&self) -> usize {
        self.world_size().saturating_mul(self.trainer.batch_size)
    }

    /// How many samples an epoch trains on.
    pub(super) fn samples_per_epoch(&self) -> usize {
        let samples = self.train.dataset().len();
        if self.trainer.drop_last { samples - samples % self.batch_of_all() } else { samples }
    }

    /// How many steps an epoch has.
    pub(super) fn steps_per_epoch(&self) -> u64 {
        self.samples_per_epoch().div_ceil(self.batch_of_all()).div_ceil(self.trainer.accumulate) as u64
    }

    /// The batches of the epoch at hand that weren't trained on yet.
    pub(super) fn batches(&self, progress: &Progress) -> Result<Batches, Error> {
        let first = progress.step_in_epoch as usize * self.trainer.accumulate;
        Ok(self.train.epoch_from(progress.epoch, first)?)
    }

    /// How many steps the run has, from its first.
    pub(super) fn steps(&self) -> u64 {
        let Trainer { steps, epochs, .. } = *self.trainer;
        steps.unwrap_or(u64::MAX).min(epochs.saturating_mul(self.steps_per_epoch()))
    }

    /// What a checkpoint has to tell of the run.
    pub(super) fn facts(&self) -> RunFacts {
        RunFacts {
            seed: self.trainer.seed,
            shuffle: self.trainer.shuffle,
            dataset: self.train.dataset().len() as u64,
            global_batch: self.batch_of_all().saturating_mul(self.trainer.accumulate) as u64,
            world_size: self.world_size() as u64,
        }
    }

    /// The factor on the learning rate of the next step.
    pub(super) fn factor(&self, progress: &Progress) -> f64 {
        let (steps_per_epoch, epochs) = (self.steps_per_epoch(), self.trainer.epochs);
        let at = Moment { step: progress.step, steps_per_epoch, epochs };
        self.trainer.schedule.factor(at) * progress.plateau.factor
    }

    /// What is told before the first step.
    pub(super) fn beginning(&self) -> Event {
        Event::Start {
            world_size: self.world_size(),
            parameters: self.parameters.count(),
            steps_per_epoch: self.steps_per_epoch(),
            steps: self.steps(),
            samples: self.train.dataset().len(),
        }
    }

    /// Makes the gradients of the next step, which takes one batch or several of `batches`, cut as the trainer says.
    ///
    /// The weight of each batch is its share in the samples of the whole step, so that the gradients are those of the mean
    /// over all of them, also where an epoch ends with fewer or smaller batches.
    pub(super) fn gradients(&mut self, batches: &mut Batches, progress: &Progress) -> Result<Made, Error> {
        let (accumulate, batch_of_all) = (self.trainer.accumulate, self.batch_of_all());
        let seen = (progress.step_in_epoch as usize).saturating_mul(accumulate).saturating_mul(batch_of_all);
        let left = self.samples_per_epoch().saturating_sub(seen);
        let samples = batch_of_all.saturating_mul(accumulate).min(left);
        let passes = samples.div_ceil(batch_of_all);
        let mut loss = 0.0;
        for (pass, batch) in batches.take(passes).enumerate() {
            let sync = if pass + 1 == passes { Sync::Now } else { Sync::Later };
            loss += self.pass(&batch?, progress.step, samples, sync)?;
        }
        self.strategy.finish(self.parameters)?;
        let norm = self.trainer.clip.apply(&mut self.parameters.grads().arena().flat_mut::<f32>());
        self.check(loss, norm, progress.step)?;
        Ok(Made { loss, norm, samples: samples as u64 })
    }

    /// One forward and backward pass of a step of so many samples; gives this batch's part of the loss.
    fn pass(&mut self, batch: &Batch, step: u64, samples: usize, sync: Sync) -> Result<f64, Error> {
        self.bad_images += batch.skipped();
        let mut ctx = Ctx::train(self.trainer.seed, step, Arc::clone(batch.sample_ids()));
        let weight = batch.len() as f64 / samples as f64;
        let shared = self.strategy.shared_batch();
        let takes_part = !batch.is_empty() || shared.is_some();
        if let Some(sum) = shared {
            ctx = ctx.sharing(sum);
        }
        let loss = takes_part.then(|| {
            let output = self.model.forward(&batch.input_tensor(self.worker.device()), &mut ctx);
            if batch.is_empty() {
                // No sample has no loss, but the others wait for its part of their statistics.
                return output.sum_all();
            }
            self.trainer.loss.of(&output, &batch.target_tensor(self.worker.device()))
        });
        self.strategy.backward(self.parameters, loss.as_ref(), weight, sync)?;
        Ok(loss.map_or(0.0, |loss| loss.item() * weight))
    }

    /// Fails if the numbers of a step are none any more, while the weights still are what they were before it.
    fn check(&self, loss: f64, norm: Option<f64>, step: u64) -> Result<(), Error> {
        let on_nan = self.trainer.on_nan;
        if on_nan != OnNan::Ignore && !loss.is_finite() {
            return Err(Error::Diverged { loss, step, place: self.parameters.first_not_finite() });
        }
        // A norm that is at hand tells as much about the gradients as looking at each.
        let look = match norm {
            Some(norm) => on_nan != OnNan::Ignore && !norm.is_finite(),
            None => on_nan == OnNan::Stop,
        };
        match look.then(|| self.parameters.first_gradient_not_finite()).flatten() {
            Some(place) => Err(Error::BadGradient { step, place }),
            None => Ok(()),
        }
    }

    /// Moves the running mean, if there is to be one, towards the weights of now.
    pub(super) fn follow(&self, average: &mut Option<Average>) {
        match (average, self.trainer.ema) {
            (Some(average), Some(decay)) => average.update(self.parameters, decay),
            (average, Some(_)) => *average = Some(Average::of(self.parameters)),
            (_, None) => {}
        }
    }

    /// Saves the weights that were evaluated.
    pub(super) fn keep_best(&self, average: &mut Option<Average>) -> Result<(), Error> {
        let Some(file) = self.trainer.best_file.as_ref().filter(|_| self.worker.is_first()) else {
            return Ok(());
        };
        let weights = match average {
            Some(average) => average.to_weights(self.parameters),
            None => self.parameters.to_weights(),
        };
        Ok(weights.save(file)?)
    }

    /// The loss of a step over all ranks, of which this one's part is `part`. All ranks have to ask.
    pub(super) fn whole_loss(&mut self, part: f64) -> Result<f64, Error> {
        let mut total = [part];
        self.strategy.sum(&mut total)?;
        let [loss] = total;
        Ok(loss)
    }

    /// How many bad images of all ranks others took the place of since this was asked for last. All ranks have to ask.
    pub(super) fn skipped(&mut self) -> Result<u64, Error> {
        let mut total = [std::mem::take(&mut self.bad_images) as f64];
        self.strategy.sum(&mut total)?;
        Ok(total[0] as u64)
    }

    /// Whether this rank is to end the run after the step at hand. All ranks have to ask: where they keep something, the last
    /// checkpoint needs them, and they end together.
    pub(super) fn is_to_stop(&mut self) -> Result<bool, Error> {
        let asked = self.is_asked_to_stop();
        Ok(if self.strategy.keeps() { self.strategy.any(asked)? } else { asked })
    }

    /// Whether this rank is to end the run at once, whatever the others do.
    pub(super) fn stops_alone(&self) -> bool {
        self.is_asked_to_stop() && !self.strategy.keeps()
    }

    fn is_asked_to_stop(&self) -> bool {
        self.worker.is_first() && self.trainer.requests.stop()
    }

    /// Tells what happened, once for all ranks.
    pub(super) fn tell(&self, observer: &mut dyn Observer, event: Event) {
        if self.worker.is_first() {
            observer.event(&event);
        }
    }
}

/// This rank's batches of `dataset`.
fn loader(
    place: Place,
    dataset: Arc<dyn Dataset>,
    batch_size: usize,
    order: Order,
    options: LoaderOptions,
) -> Loader {
    let Place { rank, world_size } = place;
    let sampler = ExactSampler { len: dataset.len(), world_size, rank, batch_size, order };
    Loader::new(dataset, sampler, options)
}
