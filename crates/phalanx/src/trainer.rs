//! The training loop. It knows samples, a model, a loss and an optimizer; who shares the work is the strategy's business.

use crate::error::Error;
use crate::event::{Event, Observer};
use crate::worker::Worker;
use phalanx_data::{Batch, Dataset, ExactSampler, Loader, LoaderOptions, Order};
use phalanx_nn::optim::{Optimizer, Rule};
use phalanx_nn::{Ctx, Loss, Module, Parameters, Schedule};
use phalanx_parallel::{Ddp, DdpConfig, Place, SingleDevice, Strategy, Sync};
use phalanx_tensor::no_grad;
use std::sync::Arc;
use std::time::Instant;

/// How a model is trained.
#[derive(Clone, Debug)]
pub struct Trainer {
    /// How outputs are held against targets. Default: negative log likelihood.
    pub loss: Loss,
    /// How often all samples are seen. Default 1.
    pub epochs: u64,
    /// Ends the run after this many steps, if the epochs don't end before. Default: no such end.
    pub steps: Option<u64>,
    /// Samples a step and worker. Default 64.
    pub batch_size: usize,
    /// What first values, orders and dropout masks are functions of. Default 0.
    pub seed: u64,
    /// Whether samples are mixed anew each epoch. Default yes.
    pub shuffle: bool,
    /// How the learning rate changes from epoch to epoch. Default: not at all.
    pub schedule: Schedule,
    /// How gradients are brought together where there is more than one rank.
    pub ddp: DdpConfig,
}

impl Default for Trainer {
    fn default() -> Trainer {
        Trainer {
            loss: Loss::Nll,
            epochs: 1,
            steps: None,
            batch_size: 64,
            seed: 0,
            shuffle: true,
            schedule: Schedule::Constant,
            ddp: DdpConfig::default(),
        }
    }
}

/// What a run leaves.
pub struct Trained {
    /// The parameters; the model shares them.
    pub parameters: Parameters,
    /// The optimizer with its state.
    pub optimizer: Optimizer,
    /// The last evaluation, if there were test samples.
    pub evaluation: Option<Evaluation>,
    /// How many steps were made.
    pub steps: u64,
    /// How many epochs were begun.
    pub epochs: u64,
    /// How long it took, in seconds.
    pub seconds: f64,
}

/// How a model does on test samples.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Evaluation {
    /// The mean over all samples.
    pub loss: f64,
    /// The share that was told right, if they have labels.
    pub accuracy: Option<f64>,
}

/// Test samples a step and worker: enough to keep the kernels busy, few enough to stay in the cache.
const TEST_BATCH: usize = 200;

impl Trainer {
    /// Trains `model` from its first values.
    pub fn fit(
        &self,
        worker: &Worker,
        model: &mut dyn Module,
        rule: impl Into<Rule>,
        train: Arc<dyn Dataset>,
        test: Option<Arc<dyn Dataset>>,
        observer: &mut dyn Observer,
    ) -> Result<Trained, Error> {
        let parameters = Parameters::build(model, worker.device(), self.seed);
        self.fit_from(worker, model, parameters, rule.into(), train, test, observer)
    }

    /// Trains `model` from the values that `parameters`, which were built for it, hold now.
    #[allow(clippy::too_many_arguments)]
    pub fn fit_from(
        &self,
        worker: &Worker,
        model: &dyn Module,
        parameters: Parameters,
        rule: Rule,
        train: Arc<dyn Dataset>,
        test: Option<Arc<dyn Dataset>>,
        observer: &mut dyn Observer,
    ) -> Result<Trained, Error> {
        let start = Instant::now();
        for (what, data) in [("train", Some(&train)), ("test", test.as_ref())] {
            if data.is_some_and(|data| data.is_empty()) {
                return Err(Error::NoSamples { what });
            }
        }
        let mut optimizer = Optimizer::new(rule)?;
        let mut strategy: Box<dyn Strategy> = match worker.group().world_size() {
            1 => Box::new(SingleDevice::new()),
            _ => Box::new(Ddp::with(worker.group().clone(), self.ddp.clone())),
        };
        strategy.prepare(&parameters)?;
        let place = strategy.place();
        let order = if self.shuffle { Order::Shuffled { seed: self.seed } } else { Order::Stored };
        let loader = self.loader(Arc::clone(&train), place, self.batch_size, order);
        let test = test.map(|test| self.loader(test, place, TEST_BATCH, Order::Stored));
        let per_epoch = loader.steps_per_epoch() as u64;
        let last = self.steps.unwrap_or(u64::MAX).min(self.epochs.saturating_mul(per_epoch));
        if worker.is_first() {
            observer.event(&Event::Start {
                world_size: place.world_size,
                parameters: parameters.count(),
                steps_per_epoch: per_epoch,
                steps: last,
                samples: train.len(),
            });
        }
        let (mut step, mut epoch, mut samples, mut evaluation) = (0, 0, 0, None);
        while step < last {
            let (epoch_start, samples_before) = (Instant::now(), samples);
            let factor = self.schedule.factor(epoch);
            for batch in loader.epoch(epoch)?.take((last - step) as usize) {
                let step_start = Instant::now();
                let batch = batch?;
                samples += batch.global_samples() as u64;
                let ctx = Ctx::train(self.seed, step, Arc::clone(batch.sample_ids()));
                let loss = self.step(worker, model, &parameters, strategy.as_mut(), &batch, ctx)?;
                let grads = parameters.grads().arena().flat::<f32>();
                optimizer.step(&mut parameters.values().flat_mut::<f32>(), &grads, factor);
                if step % observer.every().max(1) == 0 || step + 1 == last {
                    let mut total = [loss];
                    strategy.sum(&mut total)?;
                    let [loss] = total;
                    if !loss.is_finite() {
                        return Err(Error::Diverged { loss, step });
                    }
                    if worker.is_first() {
                        let (world_size, ms) = (place.world_size, step_start.elapsed().as_secs_f64() * 1e3);
                        observer.event(&Event::Step { step, epoch, loss, samples, world_size, ms });
                    }
                }
                step += 1;
            }
            let seconds = epoch_start.elapsed().as_secs_f64();
            if let Some(test) = &test {
                evaluation = Some(self.evaluate(worker, model, strategy.as_mut(), test)?);
            }
            if worker.is_first() {
                observer.event(&Event::Epoch {
                    epoch,
                    seconds,
                    samples_per_s: (samples - samples_before) as f64 / seconds,
                    test_loss: evaluation.map(|e| e.loss),
                    test_accuracy: evaluation.and_then(|e| e.accuracy),
                });
            }
            epoch += 1;
        }
        let seconds = start.elapsed().as_secs_f64();
        Ok(Trained { parameters, optimizer, evaluation, steps: step, epochs: epoch, seconds })
    }

    fn loader(&self, dataset: Arc<dyn Dataset>, place: Place, batch_size: usize, order: Order) -> Loader {
        let Place { rank, world_size } = place;
        let sampler = ExactSampler { len: dataset.len(), world_size, rank, batch_size, order };
        Loader::new(dataset, sampler, LoaderOptions::default())
    }

    /// Makes the gradients of one step; gives this rank's part of the loss.
    fn step(
        &self,
        worker: &Worker,
        model: &dyn Module,
        parameters: &Parameters,
        strategy: &mut dyn Strategy,
        batch: &Batch,
        mut ctx: Ctx,
    ) -> Result<f64, Error> {
        let weight = batch.len() as f64 / batch.global_samples() as f64;
        let loss = (!batch.is_empty()).then(|| {
            let output = model.forward(&batch.input_tensor(worker.device()), &mut ctx);
            self.loss.of(&output, &batch.target_tensor(worker.device()))
        });
        strategy.backward(parameters, loss.as_ref(), weight, Sync::Now)?;
        strategy.finish(parameters)?;
        Ok(loss.map_or(0.0, |loss| loss.item() * weight))
    }

    /// The mean loss and accuracy over all test samples, each counted once, whatever the number of ranks.
    fn evaluate(
        &self,
        worker: &Worker,
        model: &dyn Module,
        strategy: &mut dyn Strategy,
        test: &Loader,
    ) -> Result<Evaluation, Error> {
        let mut totals = [0.0; 3];
        for batch in test.epoch(0)? {
            let batch = batch?;
            if batch.is_empty() {
                continue;
            }
            no_grad(|| {
                let output = model.forward(&batch.input_tensor(worker.device()), &mut Ctx::eval());
                totals[0] +=
                    self.loss.of(&output, &batch.target_tensor(worker.device())).item() * batch.len() as f64;
                totals[1] += batch.len() as f64;
                if self.loss.has_labels() {
                    let told = output.argmax(1).to_vec::<i64>();
                    totals[2] +=
                        told.iter().zip(batch.labels()).filter(|(told, label)| told == label).count() as f64;
                }
            });
        }
        strategy.sum(&mut totals)?;
        let [loss, samples, right] = totals;
        Ok(Evaluation { loss: loss / samples, accuracy: self.loss.has_labels().then_some(right / samples) })
    }
}
