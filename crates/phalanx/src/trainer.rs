//! The training loop. It knows samples, a model, a loss and an optimizer; who shares the work is the strategy's business.
//!
//! What a run carries from step to step is a [`State`], so that it can begin at any: [`Trainer::fit`] begins at the first
//! step, [`Trainer::resume`] where another run was.
//!
//! A run is a row of memberships, each of ranks that make steps together (`trainer/steps.rs`). Where a rank is lost, or comes,
//! the others regroup, settle whose state is the newest (`trainer/settle.rs`), and go on with it: the samples of a step are
//! the same, only shared out anew.

mod ahead;
mod alike;
mod bad_number;
mod by_shard;
mod deal;
mod evaluate;
mod judge;
mod listener;
mod mean;
mod owed;
mod precision;
mod rebuild;
mod requests;
mod run;
mod settle;
mod small_batch;
mod state;
mod steps;
mod strategy;
mod time_limit;
mod used;

pub use bad_number::BadNumber;
pub use evaluate::Evaluation;
pub(crate) use evaluate::of_words;
pub use judge::{Best, Watch};
pub use precision::{LossScale, Precision};
pub use requests::Requests;
pub use state::{Progress, State};
#[cfg(test)]
pub(crate) use strategy::strategy;
pub use time_limit::{Interruption, TimeLimit};
pub use used::Used;

use crate::checkpoint::{CheckpointConfig, InitialWeights};
use crate::error::Error;
use crate::event::{Observer, Quiet};
use crate::worker::Worker;
use listener::Listener;
use phalanx_data::{Dataset, LoaderOptions, Resident, Supply};
use phalanx_job::GoesOn;
use phalanx_nn::optim::{Clip, Group, Rule, Sgd};
use phalanx_nn::{Loss, Metric, Module, Parameters, Plateau, Schedule};
use phalanx_parallel::{DdpConfig, FsdpConfig, LocalConfig, ModelParallelConfig};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;
use steps::Course;

/// How a model is trained.
#[derive(Clone, Debug)]
pub struct Trainer {
    /// How outputs are held against targets. Default: negative log likelihood. Where some targets count more than others, or not at all
    /// ([`Loss::WeightedCrossEntropy`], [`Loss::own_by_weight`]), they do so as in one batch of all samples of a step, however these are
    /// shared out.
    pub loss: Loss,
    /// How often all samples are seen; 0 evaluates the model as it is, if there are test samples. Default 1.
    pub epochs: u64,
    /// Ends the run after this many steps, if the epochs don't end before. Default: no such end.
    pub steps: Option<u64>,
    /// Samples a worker and backward pass; with logical shards, samples a shard. Default 64.
    pub batch_size: usize,
    /// Into how many shards each step is cut, whatever the number of workers, which may not be larger: the results then have
    /// the same bits on any number of them ([`phalanx_parallel::LogicalShards`]). Default: ranks share each step.
    pub logical_shards: Option<usize>,
    /// Backward passes a step: so many batches make one step, as one large batch would (but for batch norm, which sees each
    /// by itself). The last step of an epoch makes do with those that are left. Default 1.
    pub accumulate: usize,
    /// Whether the last batch of an epoch is left out where it is smaller than the others, so that its samples, which are
    /// others in each shuffled epoch, aren't trained on. Default no.
    pub drop_last: bool,
    /// Whether GPUs record the passes of a step as graphs and replay them: the same bits with fewer calls. What ranks exchange by NCCL is
    /// part of them. Ranks that exchange anything by way of the host, and stages, make theirs as ever. Default no.
    pub graphs: bool,
    /// Whether GPUs measure what NVIDIA's libraries propose for products and convolutions, and take the fastest
    /// ([`Device::set_search`](phalanx_tensor::Device::set_search)). Not where ranks have to compute some of the same numbers, to the same
    /// bits: beside parts of matrices, stretches of sequences and logical shards. Default no.
    pub search: bool,
    /// What products are made in. Weights, gradients and the optimizer's state are float32 in any case. Default: float32.
    pub precision: Precision,
    /// How large gradients may be. Default: as they are.
    pub clip: Clip,
    /// Parameters that the optimizer treats in their own way. Default: none.
    pub groups: Vec<Group>,
    /// What is done about numbers that are none. Default: the loss is watched.
    pub on_nan: OnNan,
    /// What first values, orders and dropout masks are functions of. Default 0.
    pub seed: u64,
    /// Whether samples are mixed anew each epoch. Default yes.
    pub shuffle: bool,
    /// How the learning rate changes as time goes by. Default: not at all.
    pub schedule: Schedule,
    /// How it goes down, beside that, when the test loss gets no better. Default: not at all.
    pub plateau: Option<Plateau>,
    /// How much of the running mean of the weights each step keeps, in [0, 1). With it, evaluations go by the mean, which
    /// [`State::average`] holds in the end. Default: there is no mean.
    pub ema: Option<f64>,
    /// What test samples are judged by, beside the loss and the accuracy. Default: nothing.
    pub metrics: Vec<Metric>,
    /// Which number of an evaluation is to get better. Default: the loss.
    pub watch: Watch,
    /// Ends the run after so many epochs in a row that were no better than the best before. Default: no such end.
    pub patience: Option<u64>,
    /// The file in which rank 0 keeps the weights of the best epoch, those that were evaluated: whole on its machine when any rank is done
    /// ([`Progress::best`] says which epoch that was). Default: nowhere.
    pub best_file: Option<PathBuf>,
    /// How batches are prepared. Default: in the training loop.
    pub loader: LoaderOptions,
    /// Whether samples that are bytes lie in the GPU's memory, which makes batches of them. Default: if they take little of it.
    pub resident: Resident,
    /// How gradients are brought together where there is more than one rank.
    pub ddp: DdpConfig,
    /// What ranks share out among themselves, so that a model fits that doesn't fit on each: [`phalanx_parallel::Fsdp`]. What a lost
    /// rank had comes from those that have it as well, or else from the newest checkpoint. Default: each has everything.
    pub sharded: Option<FsdpConfig>,
    /// How each rank makes its passes: in one go, through a pipeline, or on copies of the model. Default: in one go.
    pub local: LocalConfig,
    /// How each replica lies on several ranks, if it does: as stages, as parts of every matrix, or both. `ddp` and `sharded` say how
    /// replicas are brought together, and `batch_size` is a replica's. What a lost rank had comes from another replica, or else from
    /// the newest checkpoint. Default: each rank has a replica.
    pub mesh: Option<ModelParallelConfig>,
    /// The weights that a run begins with which doesn't go on from a checkpoint. Rank 0 reads them. Default: what the parameters hold, or
    /// first values.
    pub initial: Option<InitialWeights>,
    /// Where and when the run is saved, and whether it goes on from what was saved. Default: not at all.
    pub checkpoint: Option<CheckpointConfig>,
    /// What may be asked of the run while it goes on. Default: nobody else holds it, so nothing is.
    pub requests: Requests,
    /// When its time is up. Default: never.
    pub time_limit: Option<TimeLimit>,
}

impl Default for Trainer {
    fn default() -> Trainer {
        Trainer {
            loss: Loss::Nll,
            epochs: 1,
            steps: None,
            batch_size: 64,
            logical_shards: None,
            accumulate: 1,
            drop_last: false,
            graphs: false,
            search: false,
            precision: Precision::default(),
            clip: Clip::default(),
            groups: Vec::new(),
            on_nan: OnNan::Loss,
            seed: 0,
            shuffle: true,
            schedule: Schedule::default(),
            plateau: None,
            ema: None,
            metrics: Vec::new(),
            watch: Watch::Loss,
            patience: None,
            best_file: None,
            loader: LoaderOptions::default(),
            resident: Resident::default(),
            ddp: DdpConfig::default(),
            sharded: None,
            local: LocalConfig::default(),
            mesh: None,
            initial: None,
            checkpoint: None,
            requests: Requests::default(),
            time_limit: None,
        }
    }
}

/// What is done about a NaN or an infinity.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum OnNan {
    /// The loss of each step is watched, and the norm of its gradients where they are clipped by it. Where it is none, the run
    /// stops and names the first parameter that is spoilt, or gradient as long as no other step's has come.
    #[default]
    Loss,
    /// The same, and every gradient is looked at before it moves the weights: a pass over all of them in each step.
    Stop,
    /// Nothing: the run goes on.
    Ignore,
}

/// What a run leaves.
pub struct Trained {
    /// The parameters, with the values that they had in the end; the model shares them. Those of the best epoch are in
    /// [`Trainer::best_file`]. Where ranks hold a part each and write checkpoints in parts, all of their values are on
    /// rank 0 alone, or nowhere ([`Observer::needs_whole`]).
    pub parameters: Parameters,
    /// Where the run ended; what another one can go on from. Where ranks share out the optimizer's state, rank 0 has all of it and the
    /// others have their parts, as it does where nobody has all values.
    pub state: State,
    /// The last evaluation, if there were test samples.
    pub evaluation: Option<Evaluation>,
    /// Whether it ended because [`Trainer::patience`] did.
    pub stopped_early: bool,
    /// Why it ended before all its steps were made, so that it can be gone on with, if it did.
    pub interrupted: Option<Interruption>,
    /// How long it took, in seconds.
    pub seconds: f64,
}

impl Trainer {
    /// Refuses what can't be, with its name.
    fn check(&self) -> Result<(), Error> {
        let wrong = |name: &'static str, value: &dyn std::fmt::Debug, want: &'static str, is_right: bool| {
            if is_right { Ok(()) } else { Err(Error::Setting { name, value: format!("{value:?}"), want }) }
        };
        let share = |value: f64| (0.0..1.0).contains(&value);
        let (ema, Clip { norm, value }, warmup) = (self.ema, self.clip, self.schedule.warmup);
        let of = |limit: Option<f64>| limit.unwrap_or(f64::INFINITY);
        wrong("batch_size", &self.batch_size, "at least 1", self.batch_size > 0)?;
        wrong("accumulate", &self.accumulate, "at least 1", self.accumulate > 0)?;
        wrong("logical_shards", &0, "at least 1, or None", self.logical_shards != Some(0))?;
        wrong("patience", &0, "at least 1, or None", self.patience != Some(0))?;
        wrong("ema", &ema.unwrap_or_default(), "at least 0 and below 1", ema.is_none_or(share))?;
        wrong("clip.norm", &of(norm), "above 0", of(norm) > 0.0)?;
        wrong("clip.value", &of(value), "above 0", of(value) > 0.0)?;
        let is_time = warmup.epochs >= 0.0 && warmup.epochs.is_finite();
        wrong("schedule.warmup.epochs", &warmup.epochs, "0 or more", is_time)?;
        let names: Vec<&str> = self.metrics.iter().map(Metric::name).collect();
        let is_new = |(i, name): (usize, &&str)| {
            !["", "loss", "accuracy"].contains(name) && !names[..i].contains(name)
        };
        let are_new = names.iter().enumerate().all(is_new);
        wrong("metrics", &names, "names, each once, and neither loss nor accuracy", are_new)?;
        if let Watch::Metric(name) = &self.watch {
            let told = format!("{name:?} beside metrics {names:?}");
            wrong("watch", &format_args!("{told}"), "the name of one of these", self.metric(name).is_some())?;
        }
        let (label_smoothing, weights) = match &self.loss {
            Loss::CrossEntropy { label_smoothing } => (*label_smoothing, &[][..]),
            Loss::WeightedCrossEntropy(of_some) => (of_some.label_smoothing, &of_some.weights[..]),
            _ => return Ok(()),
        };
        let smooths = share(label_smoothing);
        wrong("loss.label_smoothing", &label_smoothing, "at least 0 and below 1", smooths)?;
        let count = weights.iter().all(|&weight| weight >= 0.0 && weight.is_finite());
        wrong("loss.weights", &weights, "numbers of at least 0", count)
    }

    /// Into how many parts the samples of a pass of each rank fall, each of which a batch norm sees by itself.
    fn parts(&self) -> usize {
        self.local.parts() * self.mesh.as_ref().map_or(1, ModelParallelConfig::parts)
    }

    /// Whether ranks hold parts of a state.
    fn shares_out(&self) -> bool {
        self.sharded.is_some() || self.mesh.is_some()
    }

    /// With whom ranks go on that lose others.
    fn goes_on(&self) -> GoesOn {
        // What each rank keeps for itself would be lost with it.
        match (self.ddp.compress.keeps(), self.shares_out()) {
            (true, _) => GoesOn::Not,
            (false, true) => GoesOn::WithAll,
            (false, false) => GoesOn::WithThoseLeft,
        }
    }

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
        let parameters = Parameters::lay_out(model, worker.device(), self.seed);
        self.resume(worker, model, parameters, State::start(rule)?, train, test, observer)
    }

    /// Trains `model` from `state` on, and from the values that `parameters`, which were laid out for it, hold now: from first ones
    /// if they hold none, and nobody else does.
    #[allow(clippy::too_many_arguments)]
    pub fn resume(
        &self,
        worker: &Worker,
        model: &dyn Module,
        parameters: Parameters,
        mut state: State,
        train: Arc<dyn Dataset>,
        test: Option<Arc<dyn Dataset>>,
        observer: &mut dyn Observer,
    ) -> Result<Trained, Error> {
        self.check()?;
        let start = Instant::now();
        let supply = |data| Supply::for_device(data, worker.device(), self.resident);
        let data = Data { train: supply(train)?, test: test.map(supply).transpose()? };
        if worker.device().gpu().is_some() {
            tracing::debug!("training samples: {:?}", data.train);
        }
        let goes_on = self.goes_on();
        let _in_place = if goes_on == GoesOn::Not { None } else { worker.go_on_in_place(goes_on) };
        let (interrupted, evaluation, stopped_early) =
            self.run(worker, model, &parameters, &mut state, &data, observer)?;
        let seconds = start.elapsed().as_secs_f64();
        Ok(Trained { parameters, state, evaluation, stopped_early, interrupted, seconds })
    }

    /// How the model does with the values that its parameters, those of rank 0, hold now, on samples that it doesn't learn from; first
    /// values if they hold none. All ranks have to call it, and share the samples out; if one is lost, it fails.
    ///
    /// ```no_run
    /// use phalanx::data::{Places, Silent, View, open};
    /// use phalanx::nn::models::MnistNet;
    /// use phalanx::nn::{Parameters, Weights};
    /// use phalanx::{Trainer, Worker};
    ///
    /// let worker = Worker::from_env()?;
    /// let mut model = MnistNet::new(0.5);
    /// let parameters = Parameters::build(&mut model, worker.device(), 0);
    /// parameters.load(&Weights::read("best.safetensors".as_ref())?)?;
    /// let digits = open("mnist", View::default(), &Places::from_env(None), &mut Silent)?;
    /// let found = Trainer::default().evaluate(&worker, &model, &parameters, digits.test)?;
    /// println!("{:.2}% of {} digits", 100.0 * found.accuracy.unwrap_or(0.0), 10_000);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn evaluate(
        &self,
        worker: &Worker,
        model: &dyn Module,
        parameters: &Parameters,
        test: Arc<dyn Dataset>,
    ) -> Result<Evaluation, Error> {
        self.evaluate_with(None, worker, model, parameters, test)
    }

    /// The same of weights in a file, or in several, which the parameters take first: where ranks share out a model, none ever holds all
    /// of them.
    ///
    /// # Errors
    /// As those of [`Trainer::evaluate`], and where the weights can't be read or are of another model.
    pub fn evaluate_file(
        &self,
        weights: InitialWeights,
        worker: &Worker,
        model: &dyn Module,
        parameters: &Parameters,
        test: Arc<dyn Dataset>,
    ) -> Result<Evaluation, Error> {
        self.evaluate_with(Some(weights), worker, model, parameters, test)
    }

    fn evaluate_with(
        &self,
        initial: Option<InitialWeights>,
        worker: &Worker,
        model: &dyn Module,
        parameters: &Parameters,
        test: Arc<dyn Dataset>,
    ) -> Result<Evaluation, Error> {
        // As a run of no steps, which nothing cuts short.
        let run = Trainer {
            epochs: 0,
            drop_last: false,
            ema: None,
            initial,
            checkpoint: None,
            requests: Requests::default(),
            time_limit: None,
            ..self.clone().without_judgement()
        };
        run.check()?;
        let supply = |resident| Supply::for_device(test.clone(), worker.device(), resident);
        let data = Data { train: supply(Resident::Never)?, test: Some(supply(self.resident)?) };
        let mut state = State::start(Sgd::new(0.0))?;
        let (_, evaluation, _) = run.run(worker, model, parameters, &mut state, &data, &mut Quiet)?;
        Ok(evaluation.expect("there are test samples"))
    }

    /// The same, in which nothing goes by how test samples do.
    pub(crate) fn without_judgement(self) -> Trainer {
        Trainer { plateau: None, patience: None, best_file: None, ..self }
    }

    /// Makes the steps that are left: why it has left some, the last evaluation, and whether it has left some for want of anything better.
    fn run(
        &self,
        worker: &Worker,
        model: &dyn Module,
        parameters: &Parameters,
        state: &mut State,
        data: &Data,
        observer: &mut dyn Observer,
    ) -> Result<(Option<Interruption>, Option<Evaluation>, bool), Error> {
        let mut listener = Listener { observer, pulse: worker.pulse() };
        let mut course = Course::new(self, worker, model, parameters, data, &mut listener);
        // Whoever begins a run after one that failed finds nobody at its checkpoints.
        let interrupted = course.go_on(state).inspect_err(|error| course.leave(error))?;
        Ok((interrupted, course.evaluation.take(), course.stopped_early))
    }
}

/// The samples of a run, which lie where they are from membership to membership.
struct Data {
    train: Supply,
    test: Option<Supply>,
}
