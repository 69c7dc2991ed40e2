//! What the first rank does beside training: it shows the run, writes down what happens, and keeps what the run leaves behind.
//! Any rank may become the first while the run goes on, where that is lost; it begins with this when it is told of something.

use crate::args::TrainArgs;
use crate::bar::{JsonLines, TrainBar, bar_steps};
use crate::events::EventsFile;
use crate::run::fresh_run_id;
use crate::say::say;
use crate::train::unnamed_out;
use phalanx::nn::Weights;
use phalanx::{Concluded, Error, Event, Observer, Recipe};
use phalanx_job::{Claim, RunDir, WorkerEnv};
use std::fmt::Display;
use std::path::PathBuf;
use std::time::Instant;

/// The first rank's part, on every rank.
pub(crate) struct First<'a> {
    args: &'a TrainArgs,
    recipe: &'a Recipe,
    /// Where the run keeps its files; none where the first rank makes a name for itself.
    out: Option<PathBuf>,
    run_id: String,
    start: Instant,
    desk: Option<Desk>,
    /// What happened since it should have been opened, and couldn't be: who was the first before may still hold it.
    held: Vec<Event>,
}

/// How much is held, in events: a run whose folder can't be written to doesn't fill the memory with them.
const MAX_HELD: usize = 100_000;

/// What it holds as long as it is the first.
struct Desk {
    run_dir: RunDir,
    /// Nobody else writes there meanwhile.
    _claim: Claim,
    events: EventsFile,
    shown: Box<dyn Observer>,
}

impl<'a> First<'a> {
    /// Nothing is opened yet.
    pub(crate) fn new(args: &'a TrainArgs, recipe: &'a Recipe, env: &WorkerEnv) -> First<'a> {
        let out = args.out.clone().or_else(|| env.run_dir.clone());
        First {
            args,
            recipe,
            out,
            run_id: env.run_id.clone(),
            start: Instant::now(),
            desk: None,
            held: Vec::new(),
        }
    }

    /// Opens what the first rank needs, and gives the run directory.
    pub(crate) fn begin(&mut self) -> Result<RunDir, Error> {
        let failed = |error: &dyn Display| Error::Join(error.to_string());
        let out = match &self.out {
            Some(out) => out.clone(),
            // What torchrun calls a run without a name.
            None if self.run_id == "none" => {
                unnamed_out(self.args, self.recipe, &fresh_run_id().map_err(|error| failed(&error))?)
            }
            None => unnamed_out(self.args, self.recipe, &self.run_id),
        };
        let run_dir = RunDir::create(&out).map_err(|error| failed(&error))?;
        let claim = run_dir.claim().map_err(|error| failed(&error))?;
        run_dir.write_spec(&self.recipe.to_toml()).map_err(|error| failed(&error))?;
        let path = run_dir.events();
        let events = EventsFile::open(&path).map_err(|source| Error::Io { path, source })?;
        let shown: Box<dyn Observer> = match self.args.json {
            true => Box::new(JsonLines),
            false => Box::new(TrainBar::new(self.args.log_interval)),
        };
        self.desk = Some(Desk { run_dir: run_dir.clone(), _claim: claim, events, shown });
        Ok(run_dir)
    }

    fn desk(&mut self) -> Result<&mut Desk, Error> {
        if self.desk.is_none() {
            self.begin()?;
        }
        Ok(self.desk.as_mut().expect("it was opened just now"))
    }
}

impl Observer for First<'_> {
    fn event(&mut self, event: &Event) {
        let held = std::mem::take(&mut self.held);
        match self.desk() {
            Ok(desk) => {
                for event in held.iter().chain([event]) {
                    if desk.events.write(event) {
                        desk.shown.event(event);
                    }
                }
            }
            // The next one tries again, and training goes on.
            Err(error) => {
                if held.is_empty() {
                    say(format_args!("what happens isn't written down for now: {error}"));
                }
                self.held = held;
                if self.held.len() < MAX_HELD {
                    self.held.push(event.clone());
                }
            }
        }
    }

    fn every(&self) -> u64 {
        if self.args.json { 1 } else { bar_steps(self.args.log_interval) }
    }

    fn conclude(&mut self, end: &mut Concluded<'_>) -> Result<(), Error> {
        let (start, save_optimizer) = (self.start, self.args.save_optimizer);
        let keeps_best = self.recipe.train.keep_best == Some(true);
        let desk = self.desk()?;
        let file = |name: &str| desk.run_dir.path().join(name);
        let Concluded { parameters, state, evaluation, stopped_early } = end;
        if let Some(average) = &mut state.average {
            average.to_weights(parameters).save(&file("model_ema.safetensors"))?;
        }
        if save_optimizer {
            let mut weights = Weights::default();
            for (state, flat) in state.optimizer.state() {
                weights.append(parameters.to_weights_from(flat, &format!(".{state}")));
            }
            weights.save(&file("optimizer.safetensors"))?;
        }
        let model = file("model.safetensors");
        parameters.to_weights().save(&model)?;
        let best = state.progress.best;
        let best_model = best.filter(|_| keeps_best).map(|_| file(BEST).display().to_string());
        self.event(&Event::Done {
            steps: state.progress.step,
            epochs: state.progress.epochs_begun(),
            seconds: start.elapsed().as_secs_f64(),
            test_accuracy: evaluation.and_then(|e| e.accuracy),
            model: Some(model.display().to_string()),
            best_epoch: best.map(|best| best.epoch),
            best_model,
            stopped_early: *stopped_early,
        });
        Ok(())
    }
}

/// The file of the best weights.
pub(crate) const BEST: &str = "best.safetensors";
