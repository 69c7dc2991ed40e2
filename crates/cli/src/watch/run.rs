//! What a run has told so far.

use phalanx::Event;
use serde::Serialize;
use std::collections::BTreeMap;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// So many steps of a run are kept at most; where there are more, every second one is forgotten, again and again.
const MOST_STEPS: usize = 1 << 14;
/// Numbers of a program's own that an evaluation tells, and the bytes of their names.
const MOST_METRICS: usize = 32;
const LONGEST_NAME: usize = 100;
/// What is told of a run beside its numbers.
const MOST_MARKS: usize = 1000;

/// A step that was made.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Step {
    pub(super) step: u64,
    pub(super) loss: f64,
    pub(super) lr: f64,
    pub(super) ms: f64,
    pub(super) input_ms: f64,
    pub(super) comm_ms: f64,
    pub(super) grad_norm: Option<f64>,
    pub(super) world_size: usize,
    /// Since the start.
    pub(super) samples: u64,
}

/// An epoch that is over.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Epoch {
    pub(super) epoch: u64,
    /// How many steps were made by then.
    pub(super) step: u64,
    pub(super) samples_per_s: f64,
    pub(super) test_loss: Option<f64>,
    pub(super) test_accuracy: Option<f64>,
    /// The first few.
    pub(super) test_metrics: BTreeMap<String, f64>,
}

/// Something that happened between two steps.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Mark {
    pub(super) step: u64,
    pub(super) what: String,
}

/// How a run stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum State {
    /// It has told of a step, and not of its end.
    Going,
    /// It has told nothing for long.
    Silent,
    Done,
}

impl State {
    pub(super) fn name(self) -> &'static str {
        match self {
            State::Going => "going",
            State::Silent => "silent",
            State::Done => "done",
        }
    }
}

/// Forgets every second one.
fn halve<T>(kept: &mut Vec<T>) {
    let mut is_kept = false;
    kept.retain(|_| {
        is_kept = !is_kept;
        is_kept
    });
}

/// How long a run may tell nothing: an evaluation or a checkpoint may take a while.
const SILENT: Duration = Duration::from_secs(120);

/// A run.
#[derive(Clone, Debug, Default)]
pub(super) struct Run {
    pub(super) name: String,
    /// When its files were written last.
    pub(super) written: Option<SystemTime>,
    pub(super) parameters: usize,
    pub(super) steps_per_epoch: u64,
    /// Steps of the whole run.
    pub(super) steps: u64,
    pub(super) world_size: usize,
    pub(super) made: Vec<Step>,
    /// The newest, which may be none of these.
    pub(super) last: Option<Step>,
    pub(super) epochs: Vec<Epoch>,
    pub(super) marks: Vec<Mark>,
    pub(super) checkpoints: u64,
    pub(super) memberships: u64,
    pub(super) is_over: bool,
    /// How often what it had told became void.
    pub(super) beginnings: u64,
    /// Of so many steps that it tells of one is kept, and how many those were.
    stride: u64,
    heard: u64,
}

/// A run in a few numbers.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Summary {
    pub(super) name: String,
    pub(super) state: State,
    /// Steps that were made.
    pub(super) made: u64,
    pub(super) steps: u64,
    pub(super) epoch: u64,
    pub(super) parameters: usize,
    pub(super) world_size: usize,
    pub(super) loss: Option<f64>,
    pub(super) lr: Option<f64>,
    pub(super) ms: Option<f64>,
    pub(super) samples_per_s: Option<f64>,
    pub(super) test_loss: Option<f64>,
    pub(super) test_accuracy: Option<f64>,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub(super) test_metrics: BTreeMap<String, f64>,
    pub(super) checkpoints: u64,
    pub(super) memberships: u64,
    /// When it told something last, in seconds since 1970.
    pub(super) told_at: Option<f64>,
}

impl Run {
    pub(super) fn new(name: String) -> Run {
        Run { name, stride: 1, ..Run::default() }
    }

    /// All that it has told is void.
    pub(super) fn begin_anew(&mut self) {
        let beginnings = self.beginnings + 1;
        *self = Run { beginnings, ..Run::new(std::mem::take(&mut self.name)) };
    }

    /// It has told this.
    pub(super) fn hear(&mut self, event: &Event) {
        self.is_over = matches!(event, Event::Done { .. });
        match event {
            Event::Start { world_size, parameters, steps_per_epoch, steps, .. } => {
                (self.world_size, self.parameters) = (*world_size, *parameters);
                (self.steps_per_epoch, self.steps) = (*steps_per_epoch, *steps);
            }
            &Event::Step {
                step, loss, samples, world_size, lr, grad_norm, ms, input_ms, comm_ms, ..
            } => {
                self.world_size = world_size;
                if self.last.is_some_and(|last| step <= last.step) {
                    self.go_back_to(step);
                }
                let made = Step { step, loss, lr, ms, input_ms, comm_ms, grad_norm, world_size, samples };
                self.last = Some(made);
                if self.heard.is_multiple_of(self.stride) {
                    self.made.push(made);
                }
                self.heard += 1;
                if self.made.len() > MOST_STEPS {
                    self.stride *= 2;
                    halve(&mut self.made);
                }
            }
            &Event::Epoch { epoch, samples_per_s, ref test, .. } => {
                let named = test.test_metrics.iter().filter(|(name, _)| name.len() <= LONGEST_NAME);
                let few = named.take(MOST_METRICS);
                let test_metrics = few.map(|(name, value)| (name.clone(), *value)).collect();
                // Not each step is told of.
                let end = self.steps_per_epoch.saturating_mul(epoch.saturating_add(1)).min(self.steps);
                let step = self.steps_made().max(end);
                self.epochs.push(Epoch {
                    epoch,
                    step,
                    samples_per_s,
                    test_loss: test.test_loss,
                    test_accuracy: test.test_accuracy,
                    test_metrics,
                });
                if self.epochs.len() > MOST_STEPS {
                    halve(&mut self.epochs);
                }
            }
            Event::Members { step, world_size, generation, .. } => {
                (self.world_size, self.memberships) = (*world_size, *generation);
                let plural = if *world_size == 1 { "" } else { "s" };
                self.mark(*step, format!("goes on with {world_size} worker{plural}"));
            }
            Event::Resume { step, .. } => {
                self.go_back_to(*step);
                self.mark(*step, "goes on from a checkpoint".to_owned());
            }
            Event::Checkpoint { .. } => self.checkpoints += 1,
            Event::Note { message } => self.mark(self.steps_made(), message.clone()),
            Event::Evaluation { .. } | Event::Done { .. } => {}
        }
    }

    /// What was told of this step and later ones is void.
    fn go_back_to(&mut self, step: u64) {
        self.made.retain(|made| made.step < step);
        self.epochs.retain(|epoch| epoch.step <= step);
        self.last = self.made.last().copied();
        self.beginnings += 1;
    }

    fn mark(&mut self, step: u64, what: String) {
        if self.marks.len() == MOST_MARKS {
            self.marks.remove(0);
        }
        self.marks.push(Mark { step, what });
    }

    /// When each of the kept steps was done, in seconds since the first: of those between them it is taken that they took as long.
    pub(super) fn clock(&self) -> impl Iterator<Item = f64> {
        let mut before = None;
        self.made.iter().scan(0.0, move |clock, made| {
            let steps = before.replace(made.step).map_or(1, |before| made.step.saturating_sub(before));
            *clock += made.ms / 1e3 * steps as f64;
            Some(*clock)
        })
    }

    pub(super) fn steps_made(&self) -> u64 {
        self.last.map_or(0, |last| last.step.saturating_add(1))
    }

    pub(super) fn summary(&self) -> Summary {
        let last = self.last;
        let age = self.written.and_then(|written| written.elapsed().ok()).unwrap_or_default();
        let judged = self.epochs.iter().rev().find(|epoch| epoch.test_loss.is_some());
        Summary {
            name: self.name.clone(),
            state: match (self.is_over, age > SILENT) {
                (true, _) => State::Done,
                (false, true) => State::Silent,
                (false, false) => State::Going,
            },
            made: self.steps_made(),
            steps: self.steps,
            epoch: last.map_or(0, |last| last.step / self.steps_per_epoch.max(1)),
            parameters: self.parameters,
            world_size: self.world_size,
            loss: last.map(|last| last.loss),
            lr: last.map(|last| last.lr),
            ms: last.map(|last| last.ms),
            samples_per_s: self.samples_per_s(),
            test_loss: judged.and_then(|epoch| epoch.test_loss),
            test_accuracy: judged.and_then(|epoch| epoch.test_accuracy),
            test_metrics: judged.map(|epoch| epoch.test_metrics.clone()).unwrap_or_default(),
            checkpoints: self.checkpoints,
            memberships: self.memberships,
            told_at: self.written.and_then(|at| Some(at.duration_since(UNIX_EPOCH).ok()?.as_secs_f64())),
        }
    }

    /// Of the last epoch; of a step in the first one.
    fn samples_per_s(&self) -> Option<f64> {
        let of_step = || {
            let [.., before, last] = self.made[..] else { return None };
            let steps = last.step.saturating_sub(before.step).max(1) as f64;
            let samples = last.samples.saturating_sub(before.samples) as f64 / steps;
            (last.ms > 0.0).then_some(1e3 * samples / last.ms)
        };
        self.epochs.last().map(|epoch| epoch.samples_per_s).or_else(of_step)
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use phalanx::Scores;

    pub(in crate::watch) fn step(step: u64, loss: f64) -> Event {
        Event::Step {
            step,
            epoch: step / 10,
            loss,
            samples: 8 * (step + 1),
            world_size: 2,
            lr: 0.1,
            grad_norm: None,
            loss_scale: None,
            skipped: false,
            ms: 4.0,
            input_ms: 0.5,
            comm_ms: 1.0,
        }
    }

    /// The first one, judged by these.
    pub(in crate::watch) fn epoch(metrics: &[(&str, f64)]) -> Event {
        let metrics = metrics.iter().map(|(name, value)| ((*name).to_owned(), *value));
        Event::Epoch {
            epoch: 0,
            seconds: 1.0,
            samples_per_s: 80.0,
            test: Scores { test_loss: Some(0.25), test_metrics: metrics.collect(), ..Scores::default() },
            samples: 80,
            each_once: None,
            skipped: 0,
        }
    }

    #[test]
    fn a_run_of_any_length_is_kept_in_bounds_with_its_first_and_last_step() {
        let mut run = Run::new("long".into());
        // Each tenth is told of.
        (0..100_000).for_each(|i| run.hear(&step(10 * i, 1.0 / (i + 1) as f64)));
        assert!((MOST_STEPS / 2..=MOST_STEPS).contains(&run.made.len()), "{}", run.made.len());
        assert_eq!((run.made[0].step, run.steps_made()), (0, 999_991));
        let gaps: Vec<u64> = run.made.windows(2).map(|two| two[1].step - two[0].step).collect();
        assert!(gaps.iter().all(|&gap| gap == gaps[0]), "{gaps:?}");
        assert_eq!(run.summary().samples_per_s, Some(2000.0));
        // Nonsense ends nothing.
        run.hear(&step(u64::MAX / 16, f64::NAN));
        run.hear(&step(3, 1.0));
        assert_eq!((run.steps_made(), run.beginnings), (4, 1));
        assert!(run.clock().all(f64::is_finite));
    }

    #[test]
    fn the_numbers_of_the_last_evaluation_are_told_up_to_a_bound() {
        let mut run = Run::new("judged".into());
        run.hear(&step(9, 1.0));
        run.hear(&epoch(&[("mean_iou", 0.5), ("dice", 0.75)]));
        let summary = run.summary();
        assert_eq!(summary.test_metrics, BTreeMap::from([("mean_iou".into(), 0.5), ("dice".into(), 0.75)]));
        let many: Vec<String> = (0..1000).map(|i| i.to_string()).collect();
        run.hear(&epoch(&many.iter().map(|name| (&name[..], 0.0)).collect::<Vec<_>>()));
        assert_eq!(run.summary().test_metrics.len(), MOST_METRICS);
        run.hear(&epoch(&[(&"long".repeat(LONGEST_NAME), 1.0)]));
        assert!(run.summary().test_metrics.is_empty());
    }

    #[test]
    fn what_was_told_of_steps_that_are_made_again_is_void() {
        let mut run = Run::new("resumed".into());
        (0..20).for_each(|i| run.hear(&step(i, 2.0)));
        run.hear(&Event::Resume { step: 12, epoch: 1, path: "there".into() });
        assert_eq!((run.steps_made(), run.marks[0].step), (12, 12));
        run.hear(&step(12, 1.0));
        assert_eq!((run.made.len(), run.summary().loss), (13, Some(1.0)));
        assert_eq!(run.summary().state, State::Going);
        run.written = Some(SystemTime::now() - 2 * SILENT);
        assert_eq!(run.summary().state, State::Silent);
    }
}
