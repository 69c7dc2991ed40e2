//! What the first rank does beside training: it shows the run, writes down what happens, and keeps what the run leaves behind.
//! Any rank may become the first while the run goes on, where that is lost; it begins with this when it is told of something.

use crate::args::TrainArgs;
use crate::bar::{JsonLines, TrainBar, bar_steps};
use crate::events::EventsFile;
use crate::run::fresh_run_id;
use crate::say::say;
use crate::train::unnamed_out;
use phalanx::{Concluded, Error, Event, Observer, Recipe};
use phalanx_job::{Claim, RunDir, WorkerEnv};
use std::fmt::Display;
use std::io;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Events that are kept as long as they can't be told.
const MOST_UNTOLD: usize = 100_000;
/// How long the end of a run waits for what is needed to keep what it leaves behind: longer than a process that hangs lives.
const PATIENCE: Duration = Duration::from_secs(90);
/// How long one may take to end that was killed, or given up and not killed yet.
const LEAVING: Duration = Duration::from_secs(20);
/// How long it may take then to take its place.
const TAKING: Duration = Duration::from_secs(1);
const RETRY: Duration = Duration::from_millis(50);
/// What torchrun calls a run without a name.
const UNNAMED: &str = "none";

/// The first rank's part, on every rank.
pub(crate) struct First<'a> {
    args: &'a TrainArgs,
    recipe: &'a Recipe,
    /// Where the run keeps its files; none where the first rank makes a name for itself.
    out: Option<PathBuf>,
    run_id: String,
    start: Instant,
    desk: Option<Desk>,
    /// Since when that can't be opened.
    refused: Option<Instant>,
    /// What happened meanwhile.
    untold: Vec<Event>,
    /// How the run begins.
    about: Option<Event>,
}

/// What it holds as long as it is the first.
struct Desk {
    run_dir: RunDir,
    /// Nobody else writes there as long as it is held.
    claim: Claim,
    events: EventsFile,
    shown: Box<dyn Observer>,
    /// What is trained, where the folder tells of an earlier run as long as this one may still be refused.
    spec: Option<String>,
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
            refused: None,
            untold: Vec::new(),
            about: None,
        }
    }

    /// Opens what the first rank needs, and gives the run directory.
    pub(crate) fn begin(&mut self) -> Result<RunDir, Error> {
        self.open(RunDir::claim)
    }

    fn open(
        &mut self,
        claim: impl FnOnce(&RunDir, &str) -> Result<Claim, phalanx_job::Error>,
    ) -> Result<RunDir, Error> {
        let failed = |error: &dyn Display| Error::Join(error.to_string());
        let out = match &self.out {
            Some(out) => out.clone(),
            None if self.run_id == UNNAMED => {
                unnamed_out(self.args, self.recipe, &fresh_run_id().map_err(|error| failed(&error))?)
            }
            None => unnamed_out(self.args, self.recipe, &self.run_id),
        };
        let run_dir = RunDir::create(&out).map_err(|error| failed(&error))?;
        let claim = claim(&run_dir, &self.run_id).map_err(|error| failed(&error))?;
        let mut spec = Some(self.recipe.to_toml());
        if !run_dir.spec().exists() {
            spec.take().map_or(Ok(()), |spec| run_dir.write_spec(&spec)).map_err(|error| failed(&error))?;
        }
        let path = run_dir.events();
        let events = EventsFile::open(&path).map_err(|source| unwritable(path, source))?;
        let shown = shown(self.args, self.about.as_ref());
        self.desk = Some(Desk { run_dir: run_dir.clone(), claim, events, shown, spec });
        Ok(run_dir)
    }

    /// The same in a run that has begun: the one before may not have ended yet.
    pub(crate) fn begin_again(&mut self) -> Result<RunDir, Error> {
        Ok(self.desk_within(LEAVING + TAKING)?.run_dir.clone())
    }

    /// What it holds, waited for as long as that may help.
    fn desk_within(&mut self, limit: Duration) -> Result<&mut Desk, Error> {
        let until = Instant::now() + limit;
        loop {
            match self.reopen() {
                Ok(()) => return Ok(self.desk.as_mut().expect("it was opened just now")),
                Err(error) if Instant::now() >= until || matches!(error, Error::Untold(_)) => {
                    return Err(error);
                }
                Err(_) => std::thread::sleep(RETRY),
            }
        }
    }

    /// Opens what isn't open in a run that has begun. From a worker that was lost, and still holds it, it is taken once the run has gone
    /// on without that for long enough.
    fn reopen(&mut self) -> Result<(), Error> {
        self.desk.take_if(|desk| !desk.claim.is_held());
        if self.desk.is_none() {
            let since = *self.refused.get_or_insert_with(Instant::now);
            self.begin().or_else(|error| {
                if since.elapsed() < LEAVING || self.run_id == UNNAMED {
                    return Err(error);
                }
                let run_dir = self.open(RunDir::take_over).map_err(|_| error)?;
                let folder = run_dir.path().display();
                say(format_args!("{folder}: taken over from a worker of this run that was lost, and hangs"));
                Ok(run_dir)
            })?;
        }
        self.refused = None;
        Ok(())
    }
}

/// What can't be opened, and where it may not be, neither later nor by others in this one's place, says so.
fn unwritable(path: PathBuf, source: io::Error) -> Error {
    use io::ErrorKind::{IsADirectory, PermissionDenied, ReadOnlyFilesystem};
    if !matches!(source.kind(), IsADirectory | PermissionDenied | ReadOnlyFilesystem) {
        return Error::Io { path, source };
    }
    let hint =
        "what happens in the run is written there: make it writable, or name another folder with --out";
    Error::Untold(format!("{}: {source}\nhint: {hint}", path.display()))
}

impl Desk {
    /// Writes all of it down before any of it is shown, which may take its time.
    fn tell<'e>(&mut self, events: impl Iterator<Item = &'e Event>) {
        if let Some(Err(error)) = self.spec.take().map(|spec| self.run_dir.write_spec(&spec)) {
            say(format_args!("{error}\nwhat is there tells of an earlier run"));
        }
        let new: Vec<&Event> = events.filter(|event| self.events.write(event)).collect();
        new.into_iter().for_each(|event| self.shown.event(event));
    }
}

/// Who shows what happens, of a run that began like this if it has begun.
pub(crate) fn shown(args: &TrainArgs, about: Option<&Event>) -> Box<dyn Observer> {
    match args.json {
        true => Box::new(JsonLines),
        false => Box::new(TrainBar::new(args.log_interval, about)),
    }
}

impl Observer for First<'_> {
    fn event(&mut self, event: &Event) {
        let untold = std::mem::take(&mut self.untold);
        match self.desk_within(Duration::ZERO) {
            Ok(desk) => desk.tell(untold.iter().chain([event])),
            // The one before may be stopped, and still hold what this needs until it is killed. Training goes on.
            Err(error) => {
                if untold.is_empty() {
                    say(format_args!("what happens isn't written down yet: {error}"));
                }
                self.untold = untold;
                if self.untold.len() < MOST_UNTOLD {
                    self.untold.push(event.clone());
                }
            }
        }
    }

    fn about(&mut self, start: &Event) {
        self.about = Some(start.clone());
    }

    fn every(&self) -> u64 {
        if self.args.json { 1 } else { bar_steps(self.args.log_interval) }
    }

    fn pass_on(&mut self) -> Vec<Event> {
        // The other one claims the folder, and goes on in the file.
        self.desk = None;
        std::mem::take(&mut self.untold)
    }

    fn needs_whole(&self) -> bool {
        false
    }

    fn conclude(&mut self, end: &mut Concluded<'_>) -> Result<(), Error> {
        let (start, save_optimizer) = (self.start, self.args.save_optimizer);
        let keeps_best = self.recipe.train.keep_best == Some(true);
        let untold = std::mem::take(&mut self.untold);
        let desk = self.desk_within(PATIENCE)?;
        desk.tell(untold.iter());
        let file = |name: &str| desk.run_dir.path().join(name);
        // What a run is for comes first, should the disk have room for no more.
        let model = file(MODEL);
        end.save_model(&model)?;
        end.save_average(&file("model_ema.safetensors"))?;
        if save_optimizer {
            end.save_optimizer(&file("optimizer.safetensors"))?;
        }
        let Concluded { state, evaluation, stopped_early, .. } = end;
        let best = &state.progress.best;
        // A run that has only kept it since its best epoch has none.
        let best_model = Some(file(BEST)).filter(|path| best.is_some() && keeps_best && path.exists());
        let best_model = best_model.map(|path| path.display().to_string());
        self.event(&Event::Done {
            steps: state.progress.step,
            epochs: state.progress.epochs_begun(),
            seconds: start.elapsed().as_secs_f64(),
            test_accuracy: evaluation.as_ref().and_then(|e| e.accuracy),
            model: Some(model.display().to_string()),
            best_epoch: best.as_ref().map(|best| best.epoch),
            best_model,
            stopped_early: *stopped_early,
        });
        Ok(())
    }
}

/// The file of the weights that a run ends with.
pub(crate) const MODEL: &str = "model.safetensors";

/// The file of the best weights.
pub(crate) const BEST: &str = "best.safetensors";
