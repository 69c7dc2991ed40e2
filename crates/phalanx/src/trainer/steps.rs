//! The steps of a run, from membership to membership.
//!
//! After the gradients of each step, ranks make a tally: which samples they took, what the loss is, whether one of them was
//! asked to stop, and whether somebody waits to come in. So all of them end after the same step, whatever the reason.

use super::alike;
use super::by_shard::ByShard;
use super::evaluate::evaluate;
use super::owed::Owed;
use super::precision::Found;
use super::rebuild::{self, Beginning, Newest, Own};
use super::run::{Run, StepAt, Tally};
use super::settle::{self, Standing, Told};
use super::{Data, Evaluation, Interruption, State, Trainer};
use crate::checkpoint::Checkpoints;
use crate::error::Error;
use crate::event::{Concluded, Event, Observer, Scores};
use crate::worker::Worker;
use phalanx_comm::{Group, Rank};
use phalanx_job::Section;
use phalanx_nn::{Average, Module, Parameters, Plateaued};
use phalanx_parallel::{Here, Strategy};
use phalanx_tensor::{Arena, Guard};
use std::path::Path;
use std::time::Instant;

/// A run on its way, from membership to membership, beside its [`State`].
pub(super) struct Course<'a> {
    trainer: &'a Trainer,
    worker: &'a Worker,
    model: &'a dyn Module,
    parameters: &'a Parameters,
    data: &'a Data,
    observer: &'a mut dyn Observer,
    checkpoints: Option<Checkpoints>,
    /// What this rank has of the run.
    standing: Standing,
    /// The last step or epoch that ended, as it is to be told.
    last: Option<Event>,
    /// Whether this rank has told of the run, and of the last thing in it.
    tells: bool,
    /// What this rank was to tell, and the first is to tell in its place.
    untold: Vec<Event>,
    pub(super) evaluation: Option<Evaluation>,
    /// After which step the last evaluation was told.
    evaluated: Option<u64>,
    /// Whether the run ended with steps that are left, for want of anything better.
    pub(super) stopped_early: bool,
    /// Whether what the run leaves behind was kept here.
    concluded: bool,
    /// Whether the membership at hand goes on with what another had.
    goes_on: bool,
    /// What kept this rank's part in the membership before, where ranks have parts.
    before: Option<Box<dyn Strategy>>,
    /// Whether the parameters had values when the run was asked for, which a second beginning wouldn't find.
    came_with_values: bool,
    /// Whether ranks that share the model out have begun to.
    is_prepared: bool,
    /// The buffers before the step at hand, whose forward passes change them.
    before_step: Arena,
    /// Whether there is such a step, which doesn't count yet.
    in_step: bool,
    /// The factor on the learning rate of that step, once its gradients are whole, and whether they are numbers.
    prepared: Option<(f64, Found)>,
    /// Whether the running mean, where there is one, hasn't followed the last step.
    mean_is_behind: bool,
    /// The step that was made last, until somebody has looked at its loss and it is told.
    made: Option<MadeStep>,
    /// When the step before that was looked at.
    looked: Option<Instant>,
    /// What keeps steps from spoiling the weights whose losses nobody has looked at, as long as there are such.
    guard: Option<Guard>,
    /// Where the epoch at hand began for this rank.
    epoch_start: Option<EpochStart>,
    /// When the membership before was left.
    left: Option<Instant>,
}

/// Where an epoch began.
#[derive(Clone, Copy)]
struct EpochStart {
    epoch: u64,
    at: Instant,
    /// The samples of the run by then.
    samples: u64,
}

/// A step that was made.
struct MadeStep {
    at: StepAt,
    start: Instant,
    /// As it is to be told, but for its time, and for the loss and the norm of the gradients where they are owed.
    told: Event,
    is_wanted: bool,
    loss: ByShard,
    /// See [`Made::counted`](super::run::Made::counted).
    counted: f64,
    owed: Owed,
    /// Whether no other step was begun since.
    is_newest: bool,
}

/// What a rank keeps beside its values, which has all of it for a while.
struct Part {
    /// The optimizer's arrays.
    state: Vec<Vec<f32>>,
    average: Option<Average>,
}

impl Part {
    fn give_back(self, state: &mut State) {
        state.optimizer.hold(self.state);
        state.average = self.average;
    }
}

/// How many memberships in a row may end before they make a step.
const MOST_FUTILE: usize = 50;

/// How a membership ends, if no rank is lost.
enum End {
    /// With the run.
    Over {
        /// Why it ended before all steps were made, if it did.
        interrupted: Option<Interruption>,
    },
    /// Somebody waits to come in.
    Change,
}

impl<'a> Course<'a> {
    pub(super) fn new(
        trainer: &'a Trainer,
        worker: &'a Worker,
        model: &'a dyn Module,
        parameters: &'a Parameters,
        data: &'a Data,
        observer: &'a mut dyn Observer,
    ) -> Course<'a> {
        Course {
            trainer,
            worker,
            model,
            parameters,
            data,
            observer,
            checkpoints: None,
            standing: Standing::Fresh,
            last: None,
            tells: false,
            untold: Vec::new(),
            evaluation: None,
            evaluated: None,
            stopped_early: false,
            concluded: false,
            goes_on: false,
            before: None,
            before_step: parameters.buffers().like(),
            came_with_values: parameters.has_values(),
            is_prepared: false,
            in_step: false,
            prepared: None,
            mean_is_behind: false,
            made: None,
            looked: None,
            guard: None,
            epoch_start: None,
            left: None,
        }
    }

    /// Whether this rank has nothing of the run.
    fn is_new(&self) -> bool {
        self.standing == Standing::Fresh
    }

    /// Makes the steps that are left, with whichever ranks there are. Says why it has left some.
    pub(super) fn go_on(&mut self, state: &mut State) -> Result<Option<Interruption>, Error> {
        let mut futile = 0;
        loop {
            let before = state.progress.step;
            let end = self.go(state);
            let waits = self.is_new() && matches!(end, Err(Error::PartLost));
            let because = match end {
                Ok(End::Over { interrupted }) => return Ok(interrupted),
                Ok(End::Change) => None,
                // Those that have nothing of the run wait for others in the place of those that had.
                Err(_) if waits => None,
                Err(error) => Some(error),
            };
            futile = if state.progress.step == before { futile + 1 } else { 0 };
            self.left = Some(Instant::now());
            match because {
                // What makes all ranks fail at one step, whoever they are, makes them fail again.
                Some(error) if futile > MOST_FUTILE || matches!(error, Error::PartLost) => return Err(error),
                because => self.worker.regroup(because)?,
            }
            // Of a run that ends whoever has nothing begins nothing: it may be alone, since those that had something are lost.
            if waits && self.trainer.requests.interruption().is_some() {
                return Err(Error::PartLost);
            }
        }
    }

    /// Tells the others of this error, unless it was they who told, and waits for the checkpoint that is being written.
    pub(super) fn leave(&mut self, because: &Error) {
        let group = self.worker.group();
        // Who is alone may train again with the same group.
        if group.world_size() > 1 && !because.is_consequence() {
            group.abort(&because.to_string());
        }
        let Some(checkpoints) = &mut self.checkpoints else { return };
        let _checkpoint = self.worker.pulse().enter(Section::Checkpoint);
        checkpoints.end_writing(self.observer);
    }

    /// Makes the steps that are left, as long as the ranks are the same.
    fn go(&mut self, state: &mut State) -> Result<End, Error> {
        let end = self.go_through(state);
        match &end {
            Err(error) if self.is_prepared && self.is_new() => {
                // Of what the parameters held some was given back already.
                self.parameters.count_as_lost();
                if self.came_with_values && error.is_consequence() { Err(Error::ValuesLost) } else { end }
            }
            _ => end,
        }
    }

    fn go_through(&mut self, state: &mut State) -> Result<End, Error> {
        let (mut run, beginning) = self.begin(state)?;
        let ready = self.get_ready(&mut run, state, beginning);
        let end = ready.and_then(|()| self.make_steps(&mut run, state));
        if self.trainer.shares_out() && !matches!(end, Ok(End::Over { .. })) {
            let because = end.as_ref().err().map(Error::to_string);
            run.strategy.part(self.parameters, because.as_deref());
            if std::mem::take(&mut self.mean_is_behind) {
                self.trainer.follow(&mut *run.strategy, self.parameters, &mut state.average);
            }
            self.before = Some(run.strategy);
        }
        end
    }

    fn make_steps(&mut self, run: &mut Run<'a>, state: &mut State) -> Result<End, Error> {
        let (trainer, last, steps_per_epoch) = (self.trainer, run.steps(), run.steps_per_epoch());
        // An epoch whose steps are all made is not over before it was evaluated.
        while state.progress.step < last && !trainer.lost_patience(&state.progress)
            || state.progress.step_in_epoch == steps_per_epoch
            || self.goes_on
                && self.evaluated != Some(state.progress.step)
                && state.progress.step == last
                && state.progress.step_in_epoch > 0
        {
            let tally = self.epoch(run, state, last)?;
            if tally.change && tally.stop.is_none() {
                return Ok(End::Change);
            }
            if tally.stop.is_some() {
                // The epoch isn't over: whoever goes on with the run evaluates it.
                return self.finish(run, state, tally.stop);
            }
            // An epoch that the limit on steps has cut short is at hand still.
            if state.progress.step_in_epoch < steps_per_epoch && state.progress.step_in_epoch > 0 {
                break;
            }
        }
        // A run that has no step left when it is gone on with is judged as it is.
        if self.evaluated != Some(state.progress.step) {
            let _evaluation = self.worker.pulse().enter(Section::Evaluation);
            self.evaluation = evaluate(run, &mut state.average)?;
            self.evaluated = Some(state.progress.step);
        }
        self.finish(run, state, None)
    }

    /// Brings the ranks together, whatever each of them has of the run.
    fn begin(&mut self, state: &mut State) -> Result<(Run<'a>, Beginning), Error> {
        let Course { trainer, worker, model, parameters, data, .. } = *self;
        let _start = worker.pulse().enter(Section::Start);
        let group = worker.group();
        self.settle_checkpoint()?;
        if let Some(checkpoints) = &mut self.checkpoints {
            checkpoints.give_up_parts(self.observer);
        }
        let since = Instant::now();
        alike::check(&group, trainer, state.optimizer.rule(), data)?;
        let mut beginning = match trainer.shares_out() {
            true => self.agree_on_parts(&group, state)?,
            false => self.settle(&group, state)?,
        };
        self.pass_on(&group)?;
        let (standing, speaker) = match &beginning {
            Beginning::Anew => (Standing::Fresh, Rank(0)),
            Beginning::Checkpoint { global_batch } => {
                (Standing::Lost { global_batch: *global_batch }, Rank(0))
            }
            Beginning::Whole { global_batch } => (Standing::Holds { global_batch: *global_batch }, Rank(0)),
            Beginning::Newest(newest) => {
                (Standing::Holds { global_batch: newest.global_batch() }, newest.source)
            }
        };
        let settling = since.elapsed();
        self.is_prepared = trainer.shares_out();
        let run = Run::prepare(trainer, worker, group, model, parameters, data, standing, speaker)?;
        let preparing = since.elapsed() - settling;
        tracing::debug!("the state was settled in {settling:.1?}, the ranks prepared in {preparing:.1?}");
        if let Beginning::Newest(newest) = &beginning {
            let since = Instant::now();
            let before = self.before.as_deref();
            if newest.hand_over(&run.group, before, &*run.strategy, parameters, state)? {
                if newest.own == Own::Nothing {
                    self.take_up(newest, state);
                }
                // Whatever happens from here on, this rank has its part.
                self.standing = standing;
            } else {
                beginning = Beginning::Checkpoint { global_batch: newest.global_batch() };
            }
            tracing::debug!("parts were handed over in {:.1?}", since.elapsed());
        }
        if let Beginning::Checkpoint { global_batch } = beginning
            && !self.is_new()
        {
            self.standing = Standing::Lost { global_batch };
        }
        self.before = None;
        Ok((run, beginning))
    }

    /// Brings all ranks to the newest state that any of them has, where each has all of it.
    fn settle(&mut self, group: &Group, state: &mut State) -> Result<Beginning, Error> {
        // A step that was given up is made again from where it began.
        if std::mem::take(&mut self.in_step) {
            self.parameters.buffers().copy_from(&self.before_step);
        }
        self.prepared = None;
        let mut told = Told { last: self.last.clone(), evaluated: self.evaluated };
        let settled = settle::settle(group, self.standing, self.parameters, state, &mut told);
        self.take_over(told);
        let Some(global_batch) = settled? else { return Ok(Beginning::Anew) };
        // Whatever happens from here on, this rank has all of it.
        self.standing = Standing::Holds { global_batch };
        Ok(Beginning::Whole { global_batch })
    }

    /// Finds out what all ranks begin with, where each has only a part of it; this rank's is as new as any then.
    fn agree_on_parts(&mut self, group: &Group, state: &mut State) -> Result<Beginning, Error> {
        let told = Told { last: self.last.clone(), evaluated: self.evaluated };
        let beginning = rebuild::agree(group, self.standing, self.prepared.is_some(), state, &told)?;
        let (prepared, in_step) = (self.prepared.take(), std::mem::take(&mut self.in_step));
        let Some(before) = &mut self.before else { return Ok(beginning) };
        match &beginning {
            Beginning::Newest(newest) if newest.own == Own::StepBefore => {
                let (factor, found) = prepared.expect("who isn't prepared owes no step");
                if found == Found::Numbers {
                    // What can fail is to bring its result to others, who aren't there any more.
                    let device = self.worker.device();
                    let _ = before.step(&mut state.optimizer, self.parameters, device, factor);
                    before.part(self.parameters, None);
                    self.trainer.follow(&mut **before, self.parameters, &mut state.average);
                }
            }
            // A step that was given up is made again from where it began.
            _ if in_step => before.own_parameters(self.parameters).buffers().copy_from(&self.before_step),
            _ => {}
        }
        if let Beginning::Newest(newest) = &beginning
            && newest.own != Own::Nothing
        {
            self.take_up(newest, state);
        }
        Ok(beginning)
    }

    fn take_up(&mut self, newest: &Newest, state: &mut State) {
        let mut told = Told { last: self.last.clone(), evaluated: self.evaluated };
        newest.take_up(&mut state.progress, &mut told);
        self.take_over(told);
    }

    /// Knows from now on what was told of the run: what another has made without this rank, this one hasn't told.
    fn take_over(&mut self, told: Told) {
        self.tells &= told.last == self.last;
        (self.last, self.evaluated) = (told.last, told.evaluated);
    }

    /// Makes ready for the first step.
    fn get_ready(&mut self, run: &mut Run<'a>, state: &mut State, beginning: Beginning) -> Result<(), Error> {
        let Course { trainer, worker, parameters, .. } = *self;
        let _start = worker.pulse().enter(Section::Start);
        self.goes_on = matches!(beginning, Beginning::Whole { .. } | Beginning::Newest(_));
        let is_lost = matches!(beginning, Beginning::Checkpoint { .. });
        let facts = run.facts();
        let writes_alone = self.checkpoints.as_ref().is_some_and(Checkpoints::writes_alone);
        match &trainer.checkpoint {
            None if is_lost => return Err(Error::PartLost),
            None => {}
            Some(_) if self.goes_on && writes_alone && worker.is_first() => {}
            Some(config) if self.goes_on => {
                let strategy = &*run.strategy;
                let own = Checkpoints::take_over(config, worker, facts, parameters, state, strategy)?;
                self.checkpoints = Some(own);
            }
            Some(config) => {
                // The newest one may be that which is being written.
                if let Some(mut before) = self.checkpoints.take() {
                    before.end_writing(self.observer);
                }
                let (strategy, observer) = (&mut *run.strategy, &mut *self.observer);
                let begun = Checkpoints::begin(
                    config, is_lost, worker, facts, parameters, state, strategy, observer,
                )?;
                self.checkpoints = Some(begun);
                (self.last, self.evaluated, self.epoch_start) = (None, None, None);
            }
        }
        // A checkpoint is newer than what the run began with.
        if matches!(beginning, Beginning::Anew) && state.progress.step == 0 {
            self.take_initial_weights(run)?;
        }
        // A mean that the checkpoint has, and this run doesn't follow, is none of its own.
        state.average = state.average.take().filter(|_| trainer.ema.is_some());
        // Nor is what a plateau has made of the learning rate, where this run follows none.
        if trainer.plateau.is_none() {
            state.progress.plateau = Plateaued::default();
        }
        let own = run.strategy.own_parameters(parameters);
        state.optimizer.group_part(&trainer.groups, parameters, own)?;
        let here = if matches!(beginning, Beginning::Newest(_)) { Here::Portion } else { Here::All };
        run.strategy.begin(parameters, here)?;
        let buffers = run.strategy.own_parameters(parameters).buffers();
        // What fits stays: to give memory back a GPU is waited for, which may wait for that of another rank.
        if self.before_step.layout() != buffers.layout() {
            self.before_step = buffers.like();
        }
        self.standing = Standing::Holds { global_batch: run.deal.step() };
        run.clock.begin();
        self.observer.about(&run.beginning());
        self.tell_beginning(run, state);
        Ok(())
    }

    /// Brings the weights that the run is to begin with, if there are any.
    fn take_initial_weights(&mut self, run: &mut Run<'a>) -> Result<(), Error> {
        let Some(initial) = &self.trainer.initial else { return Ok(()) };
        let fresh = initial.load(&run.group, self.parameters, &mut *run.strategy)?;
        if self.worker.is_first() && !fresh.is_empty() {
            let (path, fresh) = (initial.path.display(), fresh.join(" and "));
            let message = format!("{path}: all its weights but {fresh}, which start anew");
            self.observer.event(&Event::Note { message });
        }
        Ok(())
    }

    /// Hands what a rank that isn't the first any more couldn't tell to the one that is. It may have been the first while the one
    /// before it, which was only taken for lost, still held the run directory.
    fn pass_on(&mut self, group: &Group) -> Result<(), Error> {
        if !self.worker.is_first() {
            self.untold.extend(self.observer.pass_on());
        }
        // Should that fail, they are still here.
        let mut passed = settle::pass_on(group, &self.untold)?;
        let mut own = std::mem::take(&mut self.untold);
        if !self.worker.is_first() || passed.is_empty() && own.is_empty() {
            return Ok(());
        }
        // All of it is told from where it begins, in order: this rank may have told some of it, or not have come to that either.
        own.extend(self.observer.pass_on());
        passed.push(own);
        passed.sort_by_key(|events| events.iter().find_map(Event::step));
        for event in passed.into_iter().flatten() {
            self.observer.event(&event);
            self.tells |= self.last.as_ref() == Some(&event);
        }
        Ok(())
    }

    fn tell_beginning(&mut self, run: &Run<'_>, state: &State) {
        if !self.goes_on {
            self.tell(run.beginning());
        } else {
            // One that takes the place of the first may know of something that the other didn't come to tell.
            if let Some(last) = self.last.clone().filter(|_| !self.tells) {
                self.tell(last);
            }
            self.tell(Event::Members {
                step: state.progress.step,
                epoch: state.progress.epoch,
                generation: run.generation(),
                world_size: run.world_size(),
                ms: self.left.map(|left| left.elapsed().as_secs_f64() * 1e3),
            });
        }
    }

    /// Makes the steps of the epoch at hand that are left, and ends it, unless the ranks are to do something else.
    fn epoch(&mut self, run: &mut Run<'_>, state: &mut State, last: u64) -> Result<Tally, Error> {
        let steps_per_epoch = run.steps_per_epoch();
        let epoch = state.progress.epoch;
        let now = EpochStart { epoch, at: Instant::now(), samples: state.progress.samples };
        // It may have begun with others.
        let start =
            *self.epoch_start.insert(self.epoch_start.filter(|start| start.epoch == epoch).unwrap_or(now));
        let steps = self.steps_of_epoch(run, state, last);
        // However they ended, the loss of the last one is still to be looked at.
        self.look_in_step(run)?;
        let tally = steps?;
        if tally.stop.is_some() || tally.change {
            return Ok(tally);
        }
        let seconds = start.at.elapsed().as_secs_f64();
        let samples_per_s = (state.progress.samples - start.samples) as f64 / seconds;
        self.settle_checkpoint()?;
        let evaluation = self.worker.pulse().enter(Section::Evaluation);
        self.evaluation = evaluate(run, &mut state.average)?;
        let tally = run.exchange_between_steps()?;
        if tally.stop.is_some() {
            return Ok(tally);
        }
        let skipped = run.skipped()?;
        drop(evaluation);
        let scores = |evaluation| Scores::of(evaluation, run.train.dataset(), &self.trainer.loss);
        let told = Event::Epoch {
            epoch,
            seconds,
            samples_per_s,
            test: self.evaluation.as_ref().map(scores).unwrap_or_default(),
            samples: run.samples_in_epoch(&state.progress) as u64,
            each_once: state.progress.used.map(|used| used == run.due(&state.progress)),
            skipped,
        };
        self.last = Some(told.clone());
        self.tell(told);
        self.evaluated = Some(state.progress.step);
        if state.progress.step_in_epoch < steps_per_epoch {
            return Ok(tally);
        }
        let _checkpoint = self.worker.pulse().enter(Section::Checkpoint);
        let mut judged = state.progress.clone();
        // All ranks judge alike, and nobody goes on before the first has the file: the epoch that a run goes on from names it.
        if self.evaluation.as_ref().is_some_and(|evaluation| self.trainer.judge(&mut judged, evaluation)) {
            run.keep_best(state.average.as_ref())?;
        }
        let unjudged = self.evaluation.as_ref().and_then(|evaluation| self.trainer.unjudged(evaluation));
        if let (Some(message), true) = (unjudged, self.worker.is_first()) {
            self.observer.event(&Event::Note { message });
        }
        state.progress = judged;
        state.progress.next_epoch();
        self.after_step(run, state)?;
        Ok(tally)
    }

    /// Makes the steps of the epoch at hand that are left, unless the ranks are to do something else.
    fn steps_of_epoch(&mut self, run: &mut Run<'_>, state: &mut State, last: u64) -> Result<Tally, Error> {
        let (epoch, steps_per_epoch) = (state.progress.epoch, run.steps_per_epoch());
        let mut batches = run.batches(&state.progress)?;
        while state.progress.step < last && state.progress.step_in_epoch < steps_per_epoch {
            let (at, step_start) = (StepAt::of(&state.progress), Instant::now());
            let step = at.step;
            let _step = self.worker.pulse().enter(Section::Step(step));
            self.before_step.copy_from(run.strategy.own_parameters(self.parameters).buffers());
            if self.trainer.graphs {
                // A pass that is recorded takes in all that its stream is given meanwhile, a checkpoint's copies too.
                self.settle_checkpoint()?;
            }
            self.in_step = true;
            self.made.iter_mut().for_each(|made| made.is_newest = false);
            let Some(made) = self.worker.unless_lost(|| run.gradients(&mut batches, state, last)) else {
                run.strategy.part(self.parameters, Some("it has heard that another rank is lost"));
                return Ok(Tally { change: true, ..Tally::default() });
            };
            let made = made?;
            let factor = run.factor(&state.progress);
            self.prepared = Some((factor, made.found));
            let since = Instant::now();
            let tally = run.exchange(&made)?;
            let comm = made.comm + since.elapsed();
            self.in_step = false;
            self.settle_checkpoint()?;
            let device = self.worker.device();
            if !made.owed.is_any() {
                // Nothing would keep this one from spoiling the weights if the step before has.
                self.look(run)?;
            }
            self.guard = made.owed.watched().map(|loss| match &self.guard {
                Some(guard) => guard.behind(loss),
                None => Guard::new(loss),
            });
            self.guard.clone().into_iter().for_each(|guard| state.optimizer.guard_next(guard));
            // Even where it fails the step is made.
            let moved = match tally.overflow {
                true => Ok(()),
                false => run.strategy.step(&mut state.optimizer, self.parameters, device, factor),
            };
            self.prepared = None;
            match (&moved, tally.overflow) {
                (_, true) => {}
                (Ok(()), false) => {
                    self.trainer.follow(&mut *run.strategy, self.parameters, &mut state.average);
                }
                // What is on its way can't be read before the ranks have parted.
                (Err(_), false) => self.mean_is_behind = true,
            }
            let scale = run.loss_scale(&state.progress);
            let found = if tally.overflow { Found::Overflow } else { Found::Numbers };
            state.progress.loss_scale = scale.map(|scale| scale.after(found)).or(state.progress.loss_scale);
            state.progress.stepped(tally.used);
            let lr = state.optimizer.rule().lr() * factor;
            let (loss, samples, world_size) = (tally.loss, state.progress.samples, run.world_size());
            let grad_norm = made.norm;
            let (input_ms, comm_ms) = (made.input.as_secs_f64() * 1e3, comm.as_secs_f64() * 1e3);
            let told = Event::Step {
                step,
                epoch,
                loss,
                samples,
                world_size,
                lr,
                grad_norm,
                loss_scale: scale.map(|scale| scale.factor),
                skipped: tally.overflow,
                ms: 0.0,
                input_ms,
                comm_ms,
            };
            let is_wanted = tally.overflow || step % self.observer.every().max(1) == 0 || step + 1 == last;
            let is_owed = made.owed.is_any();
            // The step before, while the GPU makes this one.
            self.look(run)?;
            let (loss, counted, owed) = (made.loss, made.counted, made.owed);
            let is_newest = true;
            self.made =
                Some(MadeStep { at, start: step_start, told, is_wanted, loss, counted, owed, is_newest });
            if !is_owed {
                self.look(run)?;
            }
            moved?;
            // The last step of an epoch isn't followed by one, but by the end of the epoch.
            if state.progress.step_in_epoch < steps_per_epoch && tally.stop.is_none() {
                self.after_step(run, state)?;
            }
            if tally.stop.is_some() || tally.change {
                return Ok(tally);
            }
        }
        Ok(Tally::default())
    }

    /// As [`Course::look`], where the step that is waited for is over for its host: a GPU that hangs in it is as late as in any.
    fn look_in_step(&mut self, run: &Run<'_>) -> Result<(), Error> {
        let section = self.made.as_ref().map(|made| Section::Step(made.at.step));
        let _step = section.map(|section| self.worker.pulse().enter(section));
        self.look(run)
    }

    /// Waits for what is owed of the last step's loss, and tells of the step.
    fn look(&mut self, run: &Run<'_>) -> Result<(), Error> {
        let Some(made) = self.made.take() else { return Ok(()) };
        let MadeStep { at, start, mut told, is_wanted, mut loss, counted, mut owed, is_newest } = made;
        let is_owed = owed.is_any();
        owed.pay(&mut loss);
        let [own] = loss.own();
        let own = own / counted;
        let owed_norm = owed.pay_norm();
        if is_owed {
            run.check_loss(own, at, is_newest)?;
        }
        if let Some(norm) = owed_norm {
            run.check_owed_norm(norm, at.step, is_newest)?;
        }
        // A step that was given while the GPU had another to make begins where that one ended.
        let now = Instant::now();
        let begin = self.looked.replace(now).map_or(start, |looked| looked.max(start));
        if let Event::Step { loss, grad_norm, ms, .. } = &mut told {
            *ms = (now - begin).as_secs_f64() * 1e3;
            *loss = if is_owed { own } else { *loss };
            *grad_norm = owed_norm.or(*grad_norm);
        }
        self.last = Some(told).filter(|_| is_wanted);
        self.last.clone().into_iter().for_each(|told| self.tell(told));
        Ok(())
    }

    /// Ends the run on all ranks: with a checkpoint, and where it wasn't interrupted with what the run leaves behind.
    fn finish(
        &mut self,
        run: &mut Run<'_>,
        state: &mut State,
        interrupted: Option<Interruption>,
    ) -> Result<End, Error> {
        let _checkpoint = self.worker.pulse().enter(Section::Checkpoint);
        if let Some(checkpoints) = &mut self.checkpoints {
            // Where nobody brings the model together, the last checkpoint has it.
            if interrupted.is_some() || checkpoints.in_parts() && !self.observer.needs_whole() {
                checkpoints.ask();
            }
            checkpoints.finish(state, self.parameters, &mut *run.strategy, self.observer)?;
        }
        let parts =
            self.checkpoints.as_ref().and_then(|checkpoints| checkpoints.of_parts(state.progress.step));
        let parts = parts.filter(|_| !self.observer.needs_whole());
        let part = self.gather(run, state, parts.as_deref())?;
        self.stopped_early = interrupted.is_none()
            && state.progress.step < run.steps()
            && self.trainer.lost_patience(&state.progress);
        if interrupted.is_none() && self.worker.is_first() && !self.concluded {
            let stopped_early = self.stopped_early;
            let (parameters, evaluation) = (self.parameters, self.evaluation.clone());
            self.observer.conclude(&mut Concluded { parameters, state, evaluation, stopped_early, parts })?;
            self.concluded = true;
        }
        // Nobody leaves before the first rank has kept what is to be kept: where it fails in that, another is the first.
        if let Err(error) = run.group.barrier() {
            // The run isn't over, and this rank has a part of it as before.
            part.into_iter().for_each(|part| part.give_back(state));
            return Err(error.into());
        }
        Ok(End::Over { interrupted })
    }

    /// Brings the model and what lies beside it together at the end, unless the first rank has a checkpoint in the place of all that.
    /// Gives this rank's part of what lies beside it where it has all of it now.
    fn gather(
        &self,
        run: &mut Run<'_>,
        state: &mut State,
        parts: Option<&Path>,
    ) -> Result<Option<Part>, Error> {
        // Who writes a part of the checkpoint doesn't need the rest.
        match self.checkpoints.as_ref().is_some_and(Checkpoints::in_parts) {
            true if !run.strategy.any(self.worker.is_first() && parts.is_none())? => return Ok(None),
            true => run.strategy.gather_on_first()?,
            false => run.strategy.gather()?,
        }
        // What lies beside it goes by way of the host, which has nothing of a GPU that isn't there.
        if !self.worker.device().computes() {
            return Ok(None);
        }
        // Whoever goes on with this state may share it out in another way.
        let whole = run.strategy.whole_state(&state.optimizer)?;
        let mean = match &state.average {
            Some(average) => run.strategy.whole_mean(average)?,
            None => None,
        };
        let whole = whole.filter(|_| self.worker.is_first());
        Ok(whole.map(|whole| {
            let own = state.optimizer.state().map(|(_, state)| state.with(<[f32]>::to_vec)).collect();
            state.optimizer.hold(whole);
            Part { state: own, average: std::mem::replace(&mut state.average, mean) }
        }))
    }

    /// Waits until nothing is copied any more from what a step changes.
    fn settle_checkpoint(&mut self) -> Result<(), Error> {
        let Some(checkpoints) = &mut self.checkpoints else { return Ok(()) };
        let _checkpoint = self.worker.pulse().enter(Section::Checkpoint);
        Ok(checkpoints.settle()?)
    }

    fn after_step(&mut self, run: &mut Run<'_>, state: &State) -> Result<(), Error> {
        let Some(checkpoints) = &mut self.checkpoints else { return Ok(()) };
        let _checkpoint = self.worker.pulse().enter(Section::Checkpoint);
        let is_due = checkpoints.is_due(state, &self.trainer.requests, self.observer);
        if is_due {
            // None holds a step whose loss nobody has looked at.
            self.look_in_step(run)?;
        }
        let Some(checkpoints) = &mut self.checkpoints else { return Ok(()) };
        checkpoints.after_step(is_due, state, self.parameters, &mut *run.strategy)?;
        run.clock.checkpoint_took(checkpoints.longest());
        Ok(())
    }

    /// Tells what happened, once for all ranks.
    fn tell(&mut self, event: Event) {
        self.tells = self.worker.is_first();
        if self.tells {
            self.observer.event(&event);
        }
    }
}
