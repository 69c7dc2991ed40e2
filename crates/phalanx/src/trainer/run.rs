//! Who works on what in one run: the model, its parameters, the strategy that shares them, and the samples of this rank.

use super::ahead::Ahead;
use super::by_shard::ByShard;
use super::deal::{Deal, Wanted};
use super::evaluate::has_accuracy;
use super::owed::Owed;
use super::precision::Found;
use super::settle::Standing;
use super::strategy::strategy;
use super::time_limit::Clock;
use super::used::{Used, WORDS};
use super::{Data, Interruption, LossScale, OnNan, Progress, State, Trainer, Watch, small_batch};
use crate::checkpoint::RunFacts;
use crate::error::Error;
use crate::event::Event;
use crate::worker::Worker;
use phalanx_comm::{Group, Rank, ReduceOp};
use phalanx_data::{Batch, Dataset, Loader, Order, Supply, Target};
use phalanx_nn::{Average, Ctx, Loss, Module, Moment, Parameters};
use phalanx_parallel::{Pass, PassLoss, Strategy, Sync};
use phalanx_tensor::{DType, Device, Later, Tensor, autocast};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Which step: of the run, and of which epoch.
#[derive(Clone, Copy)]
pub(super) struct StepAt {
    pub(super) step: u64,
    pub(super) epoch: u64,
    pub(super) step_in_epoch: u64,
}

impl StepAt {
    /// The next one.
    pub(super) fn of(&Progress { step, epoch, step_in_epoch, .. }: &Progress) -> StepAt {
        StepAt { step, epoch, step_in_epoch }
    }
}

/// A run as long as one membership lasts, ready for its first step.
pub(super) struct Run<'a> {
    pub(super) trainer: &'a Trainer,
    pub(super) worker: &'a Worker,
    pub(super) group: Group,
    pub(super) model: &'a dyn Module,
    pub(super) parameters: &'a Parameters,
    pub(super) strategy: Box<dyn Strategy>,
    /// How the samples of a step are dealt.
    pub(super) deal: Deal,
    pub(super) train: Loader,
    pub(super) test: Option<Loader>,
    /// Bad images of this rank in this epoch that others took the place of.
    pub(super) bad_images: usize,
    /// How much time is left.
    pub(super) clock: Clock,
}

/// What the making of a step's gradients leaves beside them.
pub(super) struct Made {
    /// This rank's part of the loss, as far as it is known: of a mean over all labels, whatever they count.
    pub(super) loss: ByShard,
    /// The share that counts of all ranks' labels: the loss divided by it is the one that was asked for.
    pub(super) counted: f64,
    /// The rest.
    pub(super) owed: Owed,
    /// The norm of the gradients before they are cut by it, if they are and it isn't owed.
    pub(super) norm: Option<f64>,
    /// Whether some were too large for float16.
    pub(super) found: Found,
    /// The samples that this rank took.
    pub(super) used: Used,
    /// How long it waited for them, and then for the gradients of the other ranks.
    pub(super) input: Duration,
    pub(super) comm: Duration,
}

/// What a pass of a step leaves.
struct PassMade {
    /// Its share in the samples of the step.
    share: f64,
    /// That of what its labels count in all labels of the step.
    counted: f64,
    /// The mean over its labels.
    loss: PassLoss,
}

/// The share of these labels that counts. Those that a device has made lie there alone.
fn counted(loss: &Loss, labels: &[i64], target: &Tensor) -> f64 {
    if !loss.weighs() || target.count() == 0 {
        return 1.0;
    }
    if let Some(weight) = loss.weight(target) {
        return weight.item();
    }
    // What else the loss makes of such targets it says itself.
    if target.dtype() != DType::I64 {
        return 1.0;
    }
    let made = if labels.is_empty() { target.to_vec::<i64>() } else { Vec::new() };
    let labels = if labels.is_empty() { &made } else { labels };
    loss.counts(labels) / labels.len() as f64
}

/// What ranks tell each other after each step, of all of them together.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Tally {
    /// Why the run is to end, as far as one of them knows.
    pub(super) stop: Option<Interruption>,
    /// Whether one knows of somebody who waits to come in.
    pub(super) change: bool,
    /// Whether one of them found gradients that were too large for float16.
    pub(super) overflow: bool,
    /// The loss.
    pub(super) loss: f64,
    /// The samples that they took.
    pub(super) used: Used,
}

/// Test samples a step and worker, or logical shard: enough to keep the kernels busy, few enough to stay in the cache.
const TEST_BATCH: usize = 200;
/// As many scores of sequences are enough, too.
const TEST_SCORES: usize = 1 << 19;
/// So many times as many samples as are learned from at once take no more memory where nothing is kept for a way back.
const TEST_SHARE: usize = 4;
/// Where small samples leave a GPU idle it takes more of them at once: up to so many, of so many numbers together.
const MOST_TEST_BATCH: usize = 1000;
const TEST_NUMBERS: usize = 1 << 20;

/// How many test samples a rank, or a logical shard, takes at once. What a GPU has room to learn from it has room to judge.
fn test_batch(test: &dyn Dataset, device: &Device, batch_size: usize) -> usize {
    let numbers = test.input_dims().iter().product::<usize>().max(1);
    let (few, many) = match test.target() {
        Target::Sequence { len, classes } => ((TEST_SCORES / (len * classes).max(1)).clamp(1, TEST_BATCH), 0),
        Target::Classes(_) | Target::Values(_) => (TEST_BATCH, (TEST_NUMBERS / numbers).min(MOST_TEST_BATCH)),
    };
    let most = batch_size.saturating_mul(TEST_SHARE);
    match (test.target(), device.gpu()) {
        (Target::Sequence { .. }, _) => few.clamp(batch_size, most),
        (_, Some(_)) => few.max(many).max(batch_size),
        (_, None) => few.min(most),
    }
}

impl<'a> Run<'a> {
    /// Brings the ranks together. Unless they hold a state, which is the same on all then, or are to take one over, their values and
    /// buffers become those of rank 0, and how many they are says how many samples a step has. What ranks may have measured otherwise is
    /// as `speaker` has it.
    #[allow(clippy::too_many_arguments)]
    pub(super) fn prepare(
        trainer: &'a Trainer,
        worker: &'a Worker,
        group: Group,
        model: &'a dyn Module,
        parameters: &'a Parameters,
        data: &Data,
        standing: Standing,
        speaker: Rank,
    ) -> Result<Run<'a>, Error> {
        let Data { train, test } = data;
        for (what, data) in [("test", test.as_ref()), ("train", Some(train))] {
            if data.is_some_and(|data| data.dataset().is_empty()) {
                return Err(Error::NoSamples { what });
            }
        }
        let Trainer { plateau, patience, best_file, watch, metrics, .. } = trainer;
        assert!(trainer.accumulate > 0, "Trainer: a step of 0 batches");
        let going_by_tests = [
            ("a schedule that follows the test loss", plateau.is_some()),
            ("patience", patience.is_some()),
            ("keeping the best weights", best_file.is_some()),
            ("a metric", !metrics.is_empty()),
        ];
        if let (None, Some((what, _))) = (test, going_by_tests.iter().find(|(_, asked)| *asked)) {
            return Err(Error::NothingToJudge { what });
        }
        // What is watched is told by the test samples: training ones may be mixed.
        let watched = test.as_ref().unwrap_or(train);
        if *watch == Watch::Accuracy && !has_accuracy(watched.dataset(), &trainer.loss) {
            return Err(Error::NoAccuracy);
        }
        let strategy = strategy(trainer, &group, model, parameters, speaker)?;
        let global_batch = match standing {
            Standing::Fresh => fresh_batch(trainer, worker, &group, &*strategy)?,
            Standing::Lost { global_batch } | Standing::Holds { global_batch } => global_batch,
        };
        let order = if trainer.shuffle { Order::Shuffled { seed: trainer.seed } } else { Order::Stored };
        // What is left out doesn't depend on how many ranks there happen to be.
        let batch_of_all = (global_batch / trainer.accumulate).max(1);
        let (len, batch_size) = (train.dataset().len(), trainer.batch_size);
        let samples = len - if trainer.drop_last { len % batch_of_all } else { 0 };
        let deal = Deal::of(Wanted { len, samples, step: global_batch, batch_size, order }, &*strategy);
        let test_batch = |test: &Supply| test_batch(test.dataset(), worker.device(), batch_size) as u64;
        // Ranks on other devices may want to take fewer at once.
        let mut of_all = [test.as_ref().map_or(u64::MAX, test_batch)];
        group.all_reduce(&mut of_all, ReduceOp::Min)?;
        let train = deal.loader(train, trainer.loader);
        let test = test.as_ref().map(|test| {
            let batch_size = of_all[0] as usize;
            let (len, step, order) = (test.dataset().len(), deal.parts() * batch_size, Order::Stored);
            let wanted = Wanted { len, samples: len, step, batch_size, order };
            Deal::of(wanted, &*strategy).loader(test, trainer.loader)
        });
        let (bad_images, clock) = (0, Clock::new(trainer.time_limit));
        let mut run =
            Run { trainer, worker, group, model, parameters, strategy, deal, train, test, bad_images, clock };
        if run.samples_per_epoch() == 0 {
            return Err(Error::NoFullBatch { samples: len, batch_size, dealt_to: run.deal.to() });
        }
        small_batch::check(&run)?;
        match standing {
            Standing::Fresh => run.strategy.prepare(parameters)?,
            Standing::Lost { .. } | Standing::Holds { .. } => run.strategy.prepare_alike(parameters)?,
        }
        Ok(run)
    }

    /// How many ranks train.
    pub(super) fn world_size(&self) -> usize {
        self.group.world_size()
    }

    /// Which membership it is.
    pub(super) fn generation(&self) -> u64 {
        self.group.generation().0
    }

    /// How many samples an epoch trains on.
    pub(super) fn samples_per_epoch(&self) -> usize {
        self.deal.samples()
    }

    /// How many steps an epoch has.
    pub(super) fn steps_per_epoch(&self) -> u64 {
        self.samples_per_epoch().div_ceil(self.deal.step()) as u64
    }

    /// How many samples of the epoch at hand were trained on.
    pub(super) fn samples_in_epoch(&self, progress: &Progress) -> usize {
        (progress.step_in_epoch as usize).saturating_mul(self.deal.step()).min(self.samples_per_epoch())
    }

    /// The samples that the steps of the epoch at hand were to take.
    pub(super) fn due(&self, progress: &Progress) -> Used {
        let order = self.deal.order().epoch(self.train.dataset().len(), progress.epoch);
        Used::of((0..self.samples_in_epoch(progress)).map(|position| order.index(position) as u64))
    }

    /// The batches of the epoch at hand that weren't trained on yet.
    pub(super) fn batches(&self, progress: &Progress) -> Result<Ahead, Error> {
        let first = progress.step_in_epoch as usize * self.deal.passes_of(self.deal.step());
        Ok(Ahead::of(self.train.epoch_from(progress.epoch, first)?, self.worker.device()))
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
            samples_per_epoch: self.samples_per_epoch() as u64,
            global_batch: self.deal.step() as u64,
            // Those that share the batch.
            world_size: self.strategy.place().world_size as u64,
            logical_shards: self.trainer.logical_shards.unwrap_or(0) as u64,
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

    /// Makes the gradients of the next step, which takes one batch or several of `batches`; behind step `last` nobody wants any.
    ///
    /// The weight of each batch is its share in the samples of the whole step, so that the gradients are those of the mean
    /// over all of them, also where an epoch ends with fewer or smaller batches. Where some labels count more than others, that holds of
    /// means over all labels ([`Loss::over_all`](phalanx_nn::Loss::over_all)), and what they count together, which is known once the batches
    /// of all ranks are, divides the sum.
    pub(super) fn gradients(
        &mut self,
        batches: &mut Ahead,
        State { progress, optimizer, .. }: &mut State,
        last: u64,
    ) -> Result<Made, Error> {
        let left = self.samples_per_epoch() - self.samples_in_epoch(progress);
        let samples = self.deal.step().min(left);
        let passes = self.deal.passes_of(samples);
        let (mut used, mut input) = (Used::default(), Duration::ZERO);
        let mut owed = Owed::new(self.may_owe() && self.trainer.on_nan != OnNan::Ignore);
        let [mut loss, mut counts] = [(); 2].map(|()| ByShard::of(&*self.strategy, 1));
        for pass in 0..passes {
            let (batch, waited) = batches.take();
            let Some(batch) = batch else { break };
            input += waited;
            let (batch, sync) = (batch?, if pass + 1 == passes { Sync::Now } else { Sync::Later });
            used.add(Used::of(batch.sample_ids().iter().copied()));
            batches.want_another(pass + 1 < passes || progress.step + 1 < last);
            let PassMade { share, counted, loss: made } =
                self.pass(batch, batches, progress, samples, sync)?;
            counts.add(pass, &[counted]);
            owed.add((pass, passes), share, made, &mut loss);
            if !self.may_owe() {
                owed.pay(&mut loss);
            }
            input += batches.take_waited();
        }
        let since = Instant::now();
        self.strategy.finish(self.parameters)?;
        let counted = self.count_labels(&counts, progress.step)?;
        let comm = since.elapsed();
        let found = self.unscale(progress)?;
        let clipped = match found {
            Found::Numbers => self.strategy.clip(&self.trainer.clip, self.parameters, optimizer)?,
            Found::Overflow => None,
        };
        let [known] = loss.own();
        self.check_loss(known, StepAt::of(progress), true)?;
        let norm = match clipped {
            Some(later) if owed.is_any() => {
                owed.add_norm(later);
                None
            }
            later => later.map(Later::item),
        };
        self.check_gradients(norm, progress, found)?;
        Ok(Made { loss, counted, owed, norm, found, used, input, comm })
    }

    /// The share that counts of all ranks' labels, by which their gradients are divided; `own` is that of this rank's. Where all labels
    /// count alike nobody is asked.
    fn count_labels(&mut self, own: &ByShard, step: u64) -> Result<f64, Error> {
        if !self.trainer.loss.weighs() {
            return Ok(1.0);
        }
        let [counted] = own.whole(&mut *self.strategy)?;
        if counted > 0.0 {
            self.strategy.multiply_gradients(self.parameters, (1.0 / counted) as f32);
            return Ok(counted);
        }
        match self.trainer.on_nan {
            OnNan::Loss | OnNan::Stop => Err(Error::NoLabelCounts { step }),
            // Its gradients are zeros.
            OnNan::Ignore => Ok(1.0),
        }
    }

    /// Whether a step may be given to a GPU before anyone has looked at its loss. Where ranks make it together, each says that it has
    /// come so far, and so waits for its own; and what looks at all gradients waits for these.
    fn may_owe(&self) -> bool {
        let Trainer { on_nan, precision, .. } = self.trainer;
        self.world_size() == 1 && *on_nan != OnNan::Stop && !precision.is_scaled()
    }

    /// One forward and backward pass of a step of so many samples. Meanwhile the batch after it is taken.
    fn pass(
        &mut self,
        mut batch: Batch,
        batches: &mut Ahead,
        progress: &Progress,
        samples: usize,
        sync: Sync,
    ) -> Result<PassMade, Error> {
        self.bad_images += batch.skipped();
        let share = batch.len() as f64 / samples as f64;
        let scale = self.loss_scale(progress).map_or(1.0, |scale| scale.factor);
        let device = self.worker.device();
        let [input, target] = batch.take_tensors(device);
        let counted = share * counted(&self.trainer.loss, batch.labels(), &target);
        let ctx = Ctx::train(self.trainer.seed, progress.step, Arc::clone(batch.sample_ids()));
        let ctx = if self.deal.is_usual(samples) { ctx } else { ctx.one_off() };
        let pass = Pass {
            model: self.model,
            parameters: self.parameters,
            loss: self.trainer.loss.over_all(),
            input,
            target,
            ctx,
            weight: share * scale,
            sync,
        };
        let products = self.trainer.precision.products();
        let loss = autocast(products, || self.strategy.pass_ahead(&pass, &mut || batches.look()))?;
        Ok(PassMade { share, counted, loss })
    }

    /// What the loss of the next step is scaled by, if it is.
    pub(super) fn loss_scale(&self, progress: &Progress) -> Option<LossScale> {
        self.trainer.precision.is_scaled().then(|| progress.loss_scale.unwrap_or_default())
    }

    /// Takes the loss scale out of the gradients, which are whole; says whether it was too large.
    fn unscale(&mut self, progress: &Progress) -> Result<Found, Error> {
        let Some(scale) = self.loss_scale(progress) else { return Ok(Found::Numbers) };
        let is_finite = self.strategy.unscale(self.parameters, scale.factor)?;
        Ok(if is_finite { Found::Numbers } else { Found::Overflow })
    }

    /// Fails if the loss of a step is no number any more, while the weights still are what they were before it. Gradients tell where only as long as they are that step's own.
    pub(super) fn check_loss(&self, loss: f64, at: StepAt, has_gradients: bool) -> Result<(), Error> {
        if self.trainer.on_nan == OnNan::Ignore || loss.is_finite() {
            return Ok(());
        }
        // What of the values is on other ranks isn't asked for: they may not have noticed.
        let here = !self.strategy.is_sharded();
        let first = || match has_gradients {
            true => self.parameters.first_not_finite(),
            false => self.parameters.first_value_not_finite(),
        };
        let place = here.then(first).flatten();
        Err(Error::Diverged { loss, step: at.step, sample: self.bad_number(at), place })
    }

    /// The same of its gradients.
    fn check_gradients(&self, norm: Option<f64>, progress: &Progress, found: Found) -> Result<(), Error> {
        let (on_nan, step) = (self.trainer.on_nan, progress.step);
        // A norm that is at hand tells as much about the gradients as looking at each.
        let look = match norm {
            // The step is left out, and the next one has a smaller scale, as long as there is one.
            None if found == Found::Overflow => {
                on_nan != OnNan::Ignore && self.loss_scale(progress).is_some_and(LossScale::is_least)
            }
            Some(norm) => on_nan != OnNan::Ignore && !norm.is_finite(),
            None => on_nan == OnNan::Stop,
        };
        match look.then(|| self.strategy.first_gradient_not_finite(self.parameters)).flatten() {
            None => Ok(()),
            place => Err(Error::BadGradient { step, place }),
        }
    }

    /// Fails if the gradients of a step had a norm that is no number, while the weights still are what they were before it. They tell where
    /// only as long as they are that step's own.
    pub(super) fn check_owed_norm(&self, norm: f64, step: u64, has_gradients: bool) -> Result<(), Error> {
        if self.trainer.on_nan == OnNan::Ignore || norm.is_finite() {
            return Ok(());
        }
        let place = has_gradients.then(|| self.parameters.first_gradient_not_finite()).flatten();
        Err(Error::BadGradient { step, place })
    }

    /// Has the first rank save the weights that were evaluated, if they are to be kept. All ranks have to ask, and none goes on before the
    /// file is there.
    pub(super) fn keep_best(&mut self, average: Option<&Average>) -> Result<(), Error> {
        let Some(file) = &self.trainer.best_file else { return Ok(()) };
        let mut whole = None;
        match average {
            Some(average) => whole = self.strategy.whole_mean(average)?,
            None => self.strategy.gather_on_first()?,
        }
        if self.worker.is_first() {
            let weights = match whole.as_ref().or(average) {
                Some(average) => average.to_weights(self.parameters),
                None => self.parameters.to_weights(),
            };
            if let Some(folder) = file.parent() {
                // Where that fails, so does what comes next, and says why.
                let _ = std::fs::create_dir_all(folder);
            }
            weights.save(file)?;
        }
        self.strategy.any(false)?;
        Ok(())
    }

    /// How many bad images of all ranks others took the place of since this was asked for last. All ranks have to ask.
    pub(super) fn skipped(&mut self) -> Result<u64, Error> {
        let mut total = [std::mem::take(&mut self.bad_images) as f64];
        self.strategy.sum(&mut total)?;
        Ok(total[0] as u64)
    }

    /// Tells the others of this rank's part of a step, and gives what all ranks told.
    pub(super) fn exchange(&mut self, made: &Made) -> Result<Tally, Error> {
        let change = f64::from(self.worker.is_change_due());
        let is_near = self.clock.tick(u32::from(made.owed.is_any()));
        let own = self.trainer.requests.interruption().or(is_near.then_some(Interruption::TimeLimit));
        let [asked, drain, limit] = Interruption::words(own);
        let overflow = f64::from(u8::from(made.found == Found::Overflow));
        let [samples, high, low] = made.used.words();
        let words = made.loss.beside(&[asked, drain, limit, change, overflow, samples, high, low]);
        let [loss, asked, drain, limit, change, overflow, used @ ..]: [f64; 6 + WORDS] =
            words.whole(&mut *self.strategy)?;
        let loss = loss / made.counted;
        let (used, stop): ([f64; WORDS], _) = (used, Interruption::of_words([asked, drain, limit]));
        let (change, overflow) = (change > 0.0, overflow > 0.0);
        Ok(Tally { stop, change, overflow, loss, used: Used::from_words(used) })
    }

    /// The same where there was no step.
    pub(super) fn exchange_between_steps(&mut self) -> Result<Tally, Error> {
        let (loss, none) = (ByShard::of(&*self.strategy, 1), Duration::ZERO);
        let (owed, norm, found, used) = (Owed::default(), None, Found::Numbers, Used::default());
        self.exchange(&Made { loss, counted: 1.0, owed, norm, found, used, input: none, comm: none })
    }
}

/// The samples of a step of a run that nobody has anything of yet: those of all ranks that there were to be, though some may be lost
/// already, and where the number of ranks is left to chance those of the checkpoint that it goes on from.
fn fresh_batch(
    trainer: &Trainer,
    worker: &Worker,
    group: &Group,
    strategy: &dyn Strategy,
) -> Result<usize, Error> {
    let of_one = trainer.batch_size.saturating_mul(trainer.accumulate);
    if let Some(shards) = trainer.logical_shards {
        return Ok(of_one.saturating_mul(shards));
    }
    if let Some(config) = trainer.checkpoint.as_ref().filter(|config| config.resume) {
        let mut told = [match worker.is_first() && worker.varies() {
            true => config.global_batch_before().unwrap_or(0),
            false => 0,
        }];
        group.broadcast(&mut told, Rank(0))?;
        let told = usize::try_from(told[0]).unwrap_or(0);
        if told > 0 && told.is_multiple_of(of_one) {
            return Ok(told);
        }
    }
    let mut launched = [worker.launched() as u64];
    group.all_reduce(&mut launched, ReduceOp::Max)?;
    let replicas = replicas_of_all(strategy.place().world_size, group.world_size(), launched[0] as usize);
    Ok(of_one.saturating_mul(replicas))
}

/// Who would share a step, if all ranks that were launched had come, where `replicas` of `ranks` that are here do.
fn replicas_of_all(replicas: usize, ranks: usize, launched: usize) -> usize {
    replicas * launched.max(ranks) / ranks
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_that_are_lost_before_the_first_step_count() {
        // Replicas and ranks that are here, ranks that were launched: one a replica, two and four.
        for (replicas, ranks, launched, want) in
            [(2, 2, 2, 2), (1, 1, 2, 2), (2, 2, 3, 3), (3, 3, 1, 3), (1, 2, 4, 2), (2, 8, 8, 2), (1, 4, 8, 2)]
        {
            assert_eq!(
                replicas_of_all(replicas, ranks, launched),
                want,
                "{replicas} of {ranks} of {launched}"
            );
        }
    }
}
