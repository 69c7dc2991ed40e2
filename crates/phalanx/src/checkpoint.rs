//! Checkpoints: a run that ends at any moment goes on from the last one as if it hadn't.
//!
//! At the end of a step rank 0 lends everything that a step changes (values, the optimizer's state) to a thread, which copies
//! it into memory that it keeps, while the passes of the next step go on, which only read it; that step waits for the copy
//! before it moves the weights. Then the thread writes the copy while training goes on. What is random in training is a function of the
//! seed, the step and the sample, so beside these arrays a position is all there is to keep. A checkpoint is a folder of
//! safetensors files with PyTorch's names and a manifest with a checksum for every MiB of them; the manifest gets its name last
//! (`checkpoint/store.rs`), so a checkpoint is whole or none. While one is being written no other is begun: training
//! never waits for the disk, except at its end, for the last one. A checkpoint that can't be written is told, and the next
//! one is tried when it is due.
//!
//! Where ranks hold a part of the model each they may write a part of the checkpoint each ([`CheckpointConfig::parts`]), which rank 0
//! makes a checkpoint once all are on the disk.
//!
//! Which samples and weights a run has is decided elsewhere: [`Trainer::checkpoint`] takes a config and does the rest.
//!
//! ```
//! use phalanx::data::LinearRegression;
//! use phalanx::nn::{Linear, Loss, optim::Sgd};
//! use phalanx::checkpoint::{CheckpointConfig, Every};
//! use phalanx::{Quiet, Trainer, Worker};
//! use std::sync::Arc;
//!
//! let folder = tempfile::tempdir()?;
//! let train = |steps, resume| {
//!     let checkpoint =
//!         CheckpointConfig { every: Every::Steps(5), resume, ..CheckpointConfig::new(folder.path().join("checkpoints")) };
//!     let trainer = Trainer { loss: Loss::Mse, epochs: 9, steps, checkpoint: Some(checkpoint), ..Trainer::default() };
//!     let data = Arc::new(LinearRegression::new(256)); // four steps an epoch
//!     trainer.fit(&Worker::alone(1), &mut Linear::new(1, 1), Sgd::new(0.1), data, None, &mut Quiet)
//! };
//! train(Some(7), false)?; // ends in the second epoch
//! let resumed = train(Some(20), true)?.parameters.to_weights();
//! let whole = train(Some(20), false)?.parameters.to_weights();
//! assert_eq!(resumed, whole);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! [`Trainer::checkpoint`]: crate::Trainer::checkpoint

mod arrays;
mod background;
mod convert;
mod disk;
mod error;
mod initial;
mod manifest;
mod position;
mod read;
mod resume;
mod shares;
mod snapshot;
mod store;
mod tensors;
#[cfg(test)]
mod tests;

pub(crate) use convert::save;
pub use convert::{Converted, convert};
pub use error::CheckpointError;
pub use initial::{Head, InitialWeights, Spoilt};
pub use manifest::{FileEntry, Holds, Manifest, Origin, RunFacts, VERSION};
pub use position::{BestPosition, Exact, PlateauPosition, Position, UsedPosition};
pub use read::checkpoints;

use crate::error::Error;
use crate::event::{Event, Observer};
use crate::recipe::changes;
use crate::trainer::{Progress, Requests, State};
use crate::worker::Worker;
use background::{About, Background, Late, Written};
use disk::SystemDisk;
use phalanx_nn::{Average, Parameters, Shadow};
use phalanx_parallel::{Place, Strategy};
use read::Wanted;
use snapshot::{Beside, Contents, Lent};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use store::{PartOf, Store};

/// Where and when a run takes checkpoints.
#[derive(Clone, Debug)]
pub struct CheckpointConfig {
    /// The folder that holds them, made when it is needed. Rank 0's alone counts.
    pub dir: PathBuf,
    /// When one is taken. Default: once a minute. A run that took any, or takes them by steps, takes one at its end, too.
    pub every: Every,
    /// How many stay; at least 1. Default 2.
    pub keep: usize,
    /// Whether to go on from the newest one that is whole, or from the first step if there is none. Else the run begins at its
    /// first step, and a folder that holds checkpoints is set aside under a name with a number. Default no.
    pub resume: bool,
    /// The run's id, which stands in its checkpoints. Default none.
    pub run_id: Option<String>,
    /// Whether `resume` is for the checkpoints of this run alone, by its id, as where it was started again before it had any: those of
    /// another run are set aside then. Default no.
    pub own_only: bool,
    /// Whether ranks that hold a part of the model each write a part of the checkpoint each, all into this folder, which they must
    /// share; else rank 0 brings all of it together. It makes no difference where each rank has everything. Default no.
    pub parts: bool,
    /// The recipe as TOML, for whoever looks at the checkpoint, or goes on from it: where it differs, a note says so. Default
    /// none.
    pub recipe: Option<String>,
}

/// When a checkpoint is taken.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Every {
    /// After so many steps.
    Steps(u64),
    /// After so long; at the end of an epoch already after ten seconds.
    Time(Duration),
}

impl CheckpointConfig {
    /// The defaults, in this folder.
    pub fn new(dir: PathBuf) -> CheckpointConfig {
        let every = Every::Time(Duration::from_secs(60));
        CheckpointConfig {
            dir,
            every,
            keep: 2,
            resume: false,
            run_id: None,
            own_only: false,
            parts: false,
            recipe: None,
        }
    }

    /// The samples of a step of the run that it goes on with, by the newest checkpoint; none where that has none, or can't be read: who
    /// reads it whole will tell.
    pub(crate) fn global_batch_before(&self) -> Option<u64> {
        let step = *checkpoints(&self.dir).ok()?.first()?;
        let manifest = Manifest::read(&store::folder(&self.dir, step)).ok()?;
        let is_wanted = !self.own_only || manifest.origin.run_id == self.run_id;
        is_wanted.then_some(manifest.run.global_batch)
    }
}

/// The end of an epoch is a good place for a checkpoint, but not every second.
const EPOCH: Duration = Duration::from_secs(10);

impl Every {
    /// Whether one is due so many steps and so long after the last one.
    fn is_due(self, steps: u64, time: Duration, epoch_over: bool) -> bool {
        match self {
            Every::Steps(every) => steps >= every.max(1),
            Every::Time(every) => time >= if epoch_over { every.min(EPOCH) } else { every },
        }
    }
}

/// The folder as this rank writes there.
fn store_of(config: &CheckpointConfig, parts: Option<&Parts>) -> Store {
    let store = Store::new(Box::new(SystemDisk), config.dir.clone(), config.keep);
    store.of_part(parts.map_or(0, |parts| parts.part.number))
}

/// How long a run waits for its last checkpoint, or for a copy.
const PATIENCE: Duration = Duration::from_secs(600);

/// The checkpoints of one run.
pub(crate) struct Checkpoints {
    dir: PathBuf,
    every: Every,
    /// On rank 0, which writes for all; where they write together, on all of them.
    writer: Option<Writer>,
    /// Where they write together.
    parts: Option<Parts>,
}

/// A rank's share in checkpoints that ranks write together.
struct Parts {
    part: PartOf,
    /// Which parameters it writes.
    params: Range<usize>,
    /// Where the run was when the parts were taken that are being written, or are and wait for others.
    underway: Option<Position>,
}

struct Writer {
    background: Background,
    /// Step and time of the last snapshot, or of the beginning.
    last: (u64, Instant),
    /// Whether there is any checkpoint of this run.
    any: bool,
    /// Whether one is due whatever the time.
    asked: bool,
    /// The newest that was made, and after which step.
    newest: Option<(u64, PathBuf)>,
    /// How long the last snapshot has kept the training loop.
    stall: Duration,
    /// How long it has taken at most to take one and to write it.
    longest: Duration,
}

impl Checkpoints {
    /// Takes `parameters` and `state` to where the run was, if it is to go on, and gets ready for checkpoints. Whether it is to, rank
    /// 0 says, unless parts of what ranks had are lost: then it is, and fails if there is no checkpoint.
    #[allow(clippy::too_many_arguments)]
    pub(crate) fn begin(
        config: &CheckpointConfig,
        is_lost: bool,
        worker: &Worker,
        run: RunFacts,
        parameters: &Parameters,
        state: &mut State,
        strategy: &mut dyn Strategy,
        observer: &mut dyn Observer,
    ) -> Result<Checkpoints, Error> {
        let CheckpointConfig { dir, every, resume, parts, recipe, .. } = config.clone();
        let rule = *state.optimizer.rule();
        let wanted = match &config.run_id {
            _ if !(resume || is_lost) => Wanted::Nothing,
            Some(id) if config.own_only => Wanted::Of(id.clone()),
            _ => Wanted::Newest,
        };
        let resumed = resume::resume(&dir, wanted, worker, run, parameters, rule, strategy)
            .map_err(|error| with_changes(error, recipe.as_deref()))?;
        if is_lost && resumed.is_none() {
            return Err(Error::PartLost);
        }
        let parts = Parts::of(parts, parameters, strategy);
        let mut writer = None;
        if worker.is_first() || parts.is_some() {
            let store = store_of(config, parts.as_ref());
            if worker.is_first() {
                match &resumed {
                    Some(resumed) => tell_resumed(resumed, recipe.as_deref(), observer),
                    None => set_aside(&store, &dir, observer)?,
                }
            }
            if resume || resumed.is_some() {
                // What can't be written will be told when a checkpoint is.
                let _ = store.enter();
            }
            if worker.is_first() {
                clean(&store, observer);
                if resume && resumed.is_none() {
                    let message =
                        format!("{} holds no checkpoint: starting from the first step", dir.display());
                    note(observer, message);
                }
            }
            let any = worker.is_first() && resumed.is_some();
            writer = Some(Writer::start(config, store, run, parameters, any, parts.as_ref())?);
        }
        if let Some(resumed) = resumed {
            *state = resumed.state;
            resumed.kept.map_or(Ok(()), |kept| strategy.go_on(kept))?;
        }
        if let Some(writer) = &mut writer {
            writer.last.0 = state.progress.step;
        }
        Ok(Checkpoints { dir, every, writer, parts })
    }

    /// Goes on with the checkpoints of a run which this rank holds `state` of: if it is the first now, it writes them from now
    /// on; where ranks write together, all do.
    pub(crate) fn take_over(
        config: &CheckpointConfig,
        worker: &Worker,
        run: RunFacts,
        parameters: &Parameters,
        state: &State,
        strategy: &dyn Strategy,
    ) -> Result<Checkpoints, Error> {
        let CheckpointConfig { dir, every, parts, .. } = config.clone();
        let parts = Parts::of(parts, parameters, strategy);
        let mut writer = None;
        if worker.is_first() || parts.is_some() {
            let store = store_of(config, parts.as_ref());
            let mut any = false;
            let _ = store.enter();
            if worker.is_first() {
                // What the rank before has left half written. What can't be removed is in nobody's way.
                let _ = store.clean();
                any = !checkpoints(&dir)?.is_empty();
            }
            let mut own = Writer::start(config, store, run, parameters, any, parts.as_ref())?;
            own.last.0 = state.progress.step;
            writer = Some(own);
        }
        Ok(Checkpoints { dir, every, writer, parts })
    }

    /// Whether ranks write them together.
    pub(crate) fn in_parts(&self) -> bool {
        self.parts.is_some()
    }

    /// The checkpoint after this step, if ranks have written it together; on rank 0 only.
    pub(crate) fn of_parts(&self, step: u64) -> Option<PathBuf> {
        self.parts.as_ref()?;
        let (_, path) = self.writer.as_ref()?.newest.as_ref().filter(|(of, _)| *of == step)?;
        Some(path.clone())
    }

    /// Whether this rank says when one is taken, and makes it.
    fn leads(&self) -> bool {
        self.writer.is_some() && self.parts.as_ref().is_none_or(|parts| parts.part.number == 0)
    }

    /// Whether this rank writes them, and goes on doing so with whoever the others are.
    pub(crate) fn writes_alone(&self) -> bool {
        self.writer.is_some() && self.parts.is_none()
    }

    /// Called when ranks part. Of parts that are under way nobody knows whether all of them will be written, so nothing comes of
    /// them; but who comes next is to find nobody at it.
    pub(crate) fn give_up_parts(&mut self, observer: &mut dyn Observer) {
        let Some(parts) = &mut self.parts else { return };
        parts.underway = None;
        self.end_writing(observer);
    }

    /// Waits until nothing is being written.
    pub(crate) fn end_writing(&mut self, observer: &mut dyn Observer) {
        if let Some(writer) = &mut self.writer {
            writer.wait(&self.dir, observer);
        }
    }

    /// Whether this rank says that a checkpoint is to be taken after this step: where one is due or asked for and the one before is
    /// written. Only rank 0 knows.
    pub(crate) fn is_due(&mut self, state: &State, requests: &Requests, observer: &mut dyn Observer) -> bool {
        if requests.take_checkpoint() {
            self.ask();
        }
        let leads = self.leads();
        let Some(writer) = self.writer.as_mut().filter(|_| leads) else { return false };
        if let Some(written) = writer.background.poll() {
            writer.tell(written, observer);
        }
        let (progress, (step, time)) = (&state.progress, writer.last);
        let epoch_over = progress.step_in_epoch == 0;
        (writer.asked || self.every.is_due(progress.step - step, time.elapsed(), epoch_over))
            && progress.step > step
            && writer.background.is_idle()
    }

    /// Takes a checkpoint after this step if rank 0 finds that it is `due`. Called on all ranks; those that aren't rank 0 have a part in
    /// it only where they keep something of their own.
    pub(crate) fn after_step(
        &mut self,
        due: bool,
        state: &State,
        parameters: &Parameters,
        strategy: &mut dyn Strategy,
    ) -> Result<(), Error> {
        if self.parts.is_some() {
            return self.after_step_together(due, state, parameters, strategy);
        }
        self.take_if(due, state, parameters, strategy)
    }

    /// Where ranks write together: takes this rank's part if rank 0 says that one is due, and has a checkpoint made of the parts
    /// once all of them are written. Whether they are is asked for after every step, so that nobody waits for a disk.
    fn after_step_together(
        &mut self,
        due: bool,
        state: &State,
        parameters: &Parameters,
        strategy: &mut dyn Strategy,
    ) -> Result<(), Error> {
        let leads = self.leads();
        let (Some(writer), Some(parts)) = (&mut self.writer, &mut self.parts) else { return Ok(()) };
        if !leads {
            let nothing = writer.background.poll();
            debug_assert!(nothing.is_none(), "only rank 0 commits");
        }
        let is_underway = parts.underway.is_some();
        let writing = is_underway && !writer.background.is_idle();
        let mut says = [due && !is_underway, writing].map(|says| f64::from(u8::from(says)));
        strategy.sum(&mut says)?;
        match (is_underway, says.map(|says| says > 0.0)) {
            (true, [_, false]) => self.commit(strategy),
            (false, [true, _]) => self.take_part(state, parameters, strategy),
            _ => Ok(()),
        }
    }

    /// Takes this rank's part, which is written while training goes on.
    fn take_part(
        &mut self,
        state: &State,
        parameters: &Parameters,
        strategy: &mut dyn Strategy,
    ) -> Result<(), Error> {
        let (Some(writer), Some(parts)) = (&mut self.writer, &mut self.parts) else { return Ok(()) };
        let (start, params) = (Instant::now(), parts.params.clone());
        let mut beside: Vec<&Shadow> = state.optimizer.state().map(|(_, array)| array).collect();
        beside.extend(state.average.as_ref().map(Average::values));
        let part = strategy.collect(parameters, &beside, params)?;
        let part = part.expect("ranks that hold a part each give it");
        let buffers = strategy.own_parameters(parameters).buffers().read_flat::<f32>();
        let buffers = strategy.whole_buffers(&buffers)?;
        let mean = state.average.as_ref().map(|mean| mean.buffers().with(|own| strategy.whole_buffers(own)));
        let mean = mean.transpose()?;
        // One that was late is still being written: that is told when all parts are asked for.
        if writer.background.is_idle() {
            writer.background.write_part(|snapshot| snapshot.take(state, part, buffers, mean));
        }
        (writer.last, writer.asked) = ((state.progress.step, Instant::now()), false);
        writer.stall = start.elapsed();
        parts.underway = Some((&state.progress).into());
        Ok(())
    }

    /// Has rank 0 make a checkpoint of the parts, which all ranks have written, or failed to.
    fn commit(&mut self, strategy: &mut dyn Strategy) -> Result<(), Error> {
        let (Some(writer), Some(parts)) = (&mut self.writer, &mut self.parts) else { return Ok(()) };
        let late = || Err(CheckpointError::Late { path: self.dir.clone(), waited: PATIENCE });
        let own: Said = writer.background.take_part().unwrap_or_else(late).map_err(|error| error.to_string());
        let said = strategy.report(serde_json::to_vec(&own).expect("a list of files is always JSON"))?;
        let position = parts.underway.take();
        if let Some(position) = position.filter(|_| parts.part.number == 0) {
            // One that is late is still at it, and the run ends without.
            if writer.background.is_idle() {
                writer.background.commit(position, together(&said), writer.last.1);
            }
        }
        Ok(())
    }

    /// As [`Checkpoints::finish`], where ranks write together.
    fn finish_together(
        &mut self,
        state: &State,
        parameters: &Parameters,
        strategy: &mut dyn Strategy,
        observer: &mut dyn Observer,
    ) -> Result<(), Error> {
        self.end_parts(strategy, observer)?;
        let step = state.progress.step;
        let due =
            self.writer.as_ref().is_some_and(|writer| self.leads() && writer.owes_last(self.every, step));
        if strategy.any(due)? {
            self.take_part(state, parameters, strategy)?;
            self.end_parts(strategy, observer)?;
        }
        Ok(())
    }

    /// Waits until the parts that are under way are a checkpoint.
    fn end_parts(&mut self, strategy: &mut dyn Strategy, observer: &mut dyn Observer) -> Result<(), Error> {
        let is_underway = self.parts.as_ref().is_some_and(|parts| parts.underway.is_some());
        if let Some(writer) = self.writer.as_mut() {
            writer.wait(&self.dir, observer);
        }
        if is_underway {
            self.commit(strategy)?;
            let leads = self.leads();
            if let Some(writer) = self.writer.as_mut().filter(|_| leads) {
                writer.wait(&self.dir, observer);
            }
        }
        Ok(())
    }

    /// Takes a checkpoint if rank 0 says so, with what all ranks keep.
    fn take_if(
        &mut self,
        due: bool,
        state: &State,
        parameters: &Parameters,
        strategy: &mut dyn Strategy,
    ) -> Result<(), Error> {
        let (mut kept, mut states, mut average) = (Vec::new(), None, None);
        if (strategy.keeps() || strategy.is_sharded()) && strategy.any(due)? {
            strategy.gather_on_first()?;
            (kept, states) = (strategy.kept()?, strategy.whole_state(&state.optimizer)?);
            if let Some(own) = &state.average {
                average = strategy.whole_mean(own)?;
            }
        }
        if let Some(writer) = self.writer.as_mut().filter(|_| due) {
            writer.take(state, parameters, Beside { states, average, kept });
        }
        // The next pass gives values back.
        if strategy.is_sharded() { Ok(self.settle()?) } else { Ok(()) }
    }

    /// How long one has taken at most, as far as this rank knows.
    pub(crate) fn longest(&self) -> Duration {
        self.writer.as_ref().map_or(Duration::ZERO, |writer| writer.longest)
    }

    /// Makes one due, whatever the time and the steps.
    pub(crate) fn ask(&mut self) {
        if let Some(writer) = &mut self.writer {
            writer.asked = true;
        }
    }

    /// Waits until the checkpoint at hand has its copy. Called on all ranks before anything writes to the values, the
    /// optimizer's state or the running mean, and does nothing but on rank 0.
    pub(crate) fn settle(&mut self) -> Result<(), CheckpointError> {
        let Some(writer) = &mut self.writer else { return Ok(()) };
        let start = Instant::now();
        let settled = writer.background.settle(PATIENCE);
        writer.stall += start.elapsed();
        settled.map_err(|Late| CheckpointError::Late { path: self.dir.clone(), waited: PATIENCE })
    }

    /// Waits for the checkpoint at hand, and takes the last one of a run that took any, takes them by steps, or is asked for one. Called on
    /// all ranks, as [`Checkpoints::after_step`] is.
    pub(crate) fn finish(
        &mut self,
        state: &State,
        parameters: &Parameters,
        strategy: &mut dyn Strategy,
        observer: &mut dyn Observer,
    ) -> Result<(), Error> {
        if self.parts.is_some() {
            return self.finish_together(state, parameters, strategy, observer);
        }
        let mut due = false;
        if let Some(writer) = &mut self.writer {
            writer.wait(&self.dir, observer);
            due = writer.owes_last(self.every, state.progress.step);
        }
        self.take_if(due, state, parameters, strategy)?;
        if let Some(writer) = &mut self.writer {
            writer.wait(&self.dir, observer);
        }
        Ok(())
    }
}

impl Parts {
    /// This rank's, if they are `asked` for and ranks hold parts each.
    fn of(asked: bool, parameters: &Parameters, strategy: &dyn Strategy) -> Option<Parts> {
        let Place { rank, world_size } = strategy.writes().filter(|_| asked)?;
        Some(Parts {
            part: PartOf { number: rank, of: world_size },
            params: shares::of(parameters.layout(), world_size)[rank].clone(),
            underway: None,
        })
    }
}

impl Writer {
    fn start(
        config: &CheckpointConfig,
        store: Store,
        run: RunFacts,
        parameters: &Parameters,
        any: bool,
        parts: Option<&Parts>,
    ) -> Result<Writer, Error> {
        let (mut contents, mut part) = (Contents::of(parameters), PartOf::WHOLE);
        if let Some(parts) = parts {
            part = parts.part;
            contents = contents.part(parts.params.clone(), part.number == 0);
        }
        let origin = Origin { recipe: config.recipe.clone(), run_id: config.run_id.clone() };
        let about = About { contents, part, run, origin };
        let background = Background::start(store, about)
            .map_err(|source| Error::Io { path: config.dir.clone(), source })?;
        let last = (0, Instant::now());
        let (stall, longest) = (Duration::ZERO, Duration::ZERO);
        Ok(Writer { background, last, any, asked: false, newest: None, stall, longest })
    }

    /// Whether the run, which ends after this step, is to take a last one.
    fn owes_last(&self, every: Every, step: u64) -> bool {
        let by_steps = matches!(every, Every::Steps(_));
        (self.any || self.asked || by_steps) && self.last.0 < step && self.background.is_idle()
    }

    fn take(&mut self, state: &State, parameters: &Parameters, beside: Beside) {
        let start = Instant::now();
        self.background.write(Lent::of(parameters, state, beside));
        self.last = (state.progress.step, Instant::now());
        self.asked = false;
        self.stall = start.elapsed();
    }

    fn wait(&mut self, dir: &Path, observer: &mut dyn Observer) {
        match self.background.wait(PATIENCE) {
            Ok(None) => {}
            Ok(Some(written)) => self.tell(written, observer),
            Err(Late) => {
                note(observer, CheckpointError::Late { path: dir.to_owned(), waited: PATIENCE }.to_string());
            }
        }
    }

    fn tell(&mut self, written: Written, observer: &mut dyn Observer) {
        let Written { step, committed, pruned, took } = written;
        self.longest = self.longest.max(self.stall + took);
        let ms = |time: Duration| time.as_secs_f64() * 1e3;
        match committed {
            Ok(path) => {
                self.any = true;
                self.newest = Some((step, path.clone()));
                let (path, stall_ms) = (path.display().to_string(), ms(self.stall));
                observer.event(&Event::Checkpoint { step, path, stall_ms, write_ms: ms(took) });
            }
            Err(error) => {
                note(observer, format!("no checkpoint after step {step}: {error}\nthe run goes on"));
            }
        }
        if let Err(error) = pruned {
            note(observer, format!("an old checkpoint stays: {error}"));
        }
    }
}

/// What a rank says of its part: the files, or why there are none.
type Said = Result<Vec<FileEntry>, String>;

/// The files that all ranks have written, in the order of ranks.
fn together(said: &[Vec<u8>]) -> Result<Vec<FileEntry>, CheckpointError> {
    let mut files = Vec::new();
    for (rank, said) in said.iter().enumerate() {
        let said: Said = serde_json::from_slice(said).unwrap_or_else(|error| Err(error.to_string()));
        files.extend(said.map_err(|reason| CheckpointError::OfRank { rank, reason })?);
    }
    Ok(files)
}

/// Tells where a run goes on, and with what: `recipe` is the one that it goes on with.
fn tell_resumed(resumed: &resume::Resumed, recipe: Option<&str>, observer: &mut dyn Observer) {
    let Progress { step, epoch, .. } = resumed.state.progress;
    observer.event(&Event::Resume { step, epoch, path: resumed.folder.display().to_string() });
    for error in &resumed.passed_over {
        note(observer, format!("a newer checkpoint was passed over: {error}"));
    }
    let recipes = resumed.recipe.as_deref().zip(recipe);
    let changes = recipes.map_or_else(Vec::new, |(then, now)| changes(then, now));
    if !changes.is_empty() {
        note(observer, format!("the recipe isn't that of the checkpoint: {}", changes.join(", ")));
    }
}

/// What doesn't fit, with what was set otherwise in the run that made the checkpoint: `recipe` is the one that was to go on.
fn with_changes(error: Error, recipe: Option<&str>) -> Error {
    use CheckpointError::{OtherModel, OtherOptimizer, OtherRecipe};
    let (Error::Checkpoint(OtherModel { path, .. } | OtherOptimizer { path, .. }), Some(now)) =
        (&error, recipe)
    else {
        return error;
    };
    let then = Manifest::read(path).ok().and_then(|manifest| manifest.origin.recipe);
    let changes = then.map_or_else(Vec::new, |then| changes(&then, now));
    match error {
        Error::Checkpoint(error) if !changes.is_empty() => {
            OtherRecipe { error: Box::new(error), changes: changes.join(", ") }.into()
        }
        other => other,
    }
}

/// Gives checkpoints of another run another name, if there are any.
fn set_aside(store: &Store, dir: &Path, observer: &mut dyn Observer) -> Result<(), Error> {
    if let Some(aside) = store.set_aside()? {
        let (dir, aside) = (dir.display(), aside.display());
        note(observer, format!("{dir} held checkpoints of another run: they are in {aside} now"));
    }
    Ok(())
}

/// Removes what a writer left that was killed. What can't be removed is in nobody's way.
fn clean(store: &Store, observer: &mut dyn Observer) {
    if let Err(error) = store.clean() {
        note(observer, format!("what is left of an old checkpoint stays: {error}"));
    }
}

fn note(observer: &mut dyn Observer, message: String) {
    observer.event(&Event::Note { message });
}
