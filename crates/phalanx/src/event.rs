//! What a run tells whoever listens: one JSON object a line for programs, a bar for people.

use crate::checkpoint::{self, Holds};
use crate::error::Error;
use crate::trainer::{Evaluation, State, of_words};
use phalanx_data::{Dataset, Input};
use phalanx_nn::{Loss, Parameters};
use serde::{Deserialize, Deserializer, Serialize};
use std::collections::BTreeMap;
use std::f64::consts::LN_2;
use std::path::{Path, PathBuf};

/// How many bytes there are.
const BYTES: usize = 1 << 8;

/// Something that happened in training. The names are a contract.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "lowercase")]
pub enum Event {
    /// The run begins.
    Start {
        /// How many ranks train.
        world_size: usize,
        /// How many numbers the model learns.
        parameters: usize,
        /// Steps of an epoch.
        steps_per_epoch: u64,
        /// Steps of the whole run.
        steps: u64,
        /// Samples of the data set.
        samples: usize,
    },
    /// A step was made. Where one process trains on a GPU this is told once the GPU was given the next one, too, or at the end of an
    /// epoch or before a checkpoint.
    Step {
        /// From 0, over the whole run.
        step: u64,
        /// From 0.
        epoch: u64,
        /// The mean over the samples of all ranks, before the step; in JSON null if it is no number.
        #[serde(deserialize_with = "number")]
        loss: f64,
        /// Samples since the start, of all ranks.
        samples: u64,
        /// How many ranks train.
        world_size: usize,
        /// The learning rate.
        lr: f64,
        /// The norm of all gradients before they were clipped by it, if they are.
        #[serde(skip_serializing_if = "Option::is_none")]
        grad_norm: Option<f64>,
        /// What the loss was scaled by, in float16.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        loss_scale: Option<f64>,
        /// Whether the weights stayed as they were, since some gradients were too large for float16.
        #[serde(default, skip_serializing_if = "is_false")]
        skipped: bool,
        /// How long the step took, in milliseconds: where the next one is given meanwhile, from the end of the one before.
        ms: f64,
        /// How much of that the first rank waited for samples; the most that it can be on a GPU, which is asked now and then.
        #[serde(default)]
        input_ms: f64,
        /// And for the other ranks: what of the exchange of gradients wasn't hidden behind the backward pass, and how far it was
        /// ahead of the slowest. Where parameters are shared out, what is gathered in the midst of a pass counts as computing.
        #[serde(default)]
        comm_ms: f64,
    },
    /// An epoch is over.
    Epoch {
        /// From 0.
        epoch: u64,
        /// How long its training took, in seconds.
        seconds: f64,
        /// Samples a second, of all ranks.
        samples_per_s: f64,
        /// How the model does on test samples, if there are any.
        #[serde(flatten)]
        test: Scores,
        /// How many samples the ranks have trained on.
        samples: u64,
        /// Whether these were all samples that were to be trained on, each once, by what the ranks say that they took. Not known
        /// after a checkpoint that doesn't say.
        #[serde(skip_serializing_if = "Option::is_none")]
        each_once: Option<bool>,
        /// Bad images that others took the place of, if there were any.
        #[serde(default, skip_serializing_if = "is_zero")]
        skipped: u64,
    },
    /// A model was judged that was not trained.
    Evaluation {
        /// How many ranks have judged it.
        world_size: usize,
        /// On so many test samples.
        samples: usize,
        /// How long it took, in seconds.
        seconds: f64,
        /// How it does.
        #[serde(flatten)]
        test: Scores,
    },
    /// Ranks were lost, or came, and the run goes on with those that there are now.
    Members {
        /// The first step that they will make.
        step: u64,
        /// Its epoch.
        epoch: u64,
        /// Which membership.
        generation: u64,
        /// How many ranks train now.
        world_size: usize,
        /// How long training stood still, in milliseconds; not known to one that has come anew.
        #[serde(skip_serializing_if = "Option::is_none")]
        ms: Option<f64>,
    },
    /// The run goes on from a checkpoint: told before anything else of it. What was told of later steps is void.
    Resume {
        /// The first step that will be made.
        step: u64,
        /// Its epoch.
        epoch: u64,
        /// The checkpoint.
        path: String,
    },
    /// A checkpoint is whole and on the disk.
    Checkpoint {
        /// How many steps had been made.
        step: u64,
        /// Its folder.
        path: String,
        /// How long training stood still for it, in milliseconds.
        stall_ms: f64,
        /// How long it took to write, while training went on.
        write_ms: f64,
    },
    /// Something that a person should know, and that doesn't end the run.
    Note {
        /// What it is.
        message: String,
    },
    /// The run is over.
    Done {
        /// How many steps were made.
        steps: u64,
        /// How many epochs were begun.
        epochs: u64,
        /// How long it took, in seconds.
        seconds: f64,
        /// As in the last epoch.
        #[serde(skip_serializing_if = "Option::is_none")]
        test_accuracy: Option<f64>,
        /// The file of weights, if one was written.
        #[serde(skip_serializing_if = "Option::is_none")]
        model: Option<String>,
        /// The best epoch, from 0, where evaluations were judged.
        #[serde(skip_serializing_if = "Option::is_none")]
        best_epoch: Option<u64>,
        /// The file of its weights, if one was written.
        #[serde(skip_serializing_if = "Option::is_none")]
        best_model: Option<String>,
        /// Whether the run ended before its epochs, for want of anything better.
        stopped_early: bool,
    },
}

/// How a model does on test samples, by the names of [`Event`]s.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Scores {
    /// The mean loss on the test samples, if there are any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub test_loss: Option<f64>,
    /// The share of the labels of test samples that was told right, if they have such, and not the words of a text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub test_accuracy: Option<f64>,
    /// The share of test samples whose label was among the five likeliest, if there are more than five.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub test_top5: Option<f64>,
    /// The mean loss on the test samples in bits, where these are windows of a text: what each of its bytes would take if it were
    /// compressed with the model. Only of a loss that says how likely words were ([`Loss::is_likelihood`]).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub test_bits_per_byte: Option<f64>,
    /// The mean loss as a perplexity, e to its power, where samples are words with a label each: of so many equally likely ones the choice
    /// would be as hard. Only of such a loss, too.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub test_perplexity: Option<f64>,
    /// What else test samples are judged by, by name ([`crate::Trainer::metrics`]); without those that are no numbers.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub test_metrics: BTreeMap<String, f64>,
}

impl Scores {
    /// Those of an evaluation on samples of this data set, with this loss.
    pub fn of(evaluation: &Evaluation, dataset: &dyn Dataset, loss: &Loss) -> Scores {
        let of_words = of_words(dataset) && loss.is_likelihood();
        // Labels may be other things than the bytes of a text.
        let of_bytes = of_words && dataset.input() == Input::Ids(BYTES);
        let numbers = evaluation.metrics.iter().filter(|(_, value)| value.is_finite());
        Scores {
            test_loss: Some(evaluation.loss),
            test_accuracy: evaluation.accuracy,
            test_top5: evaluation.top5,
            test_bits_per_byte: of_bytes.then_some(evaluation.loss / LN_2),
            test_perplexity: of_words.then(|| evaluation.loss.exp()),
            test_metrics: numbers.map(|(name, value)| (name.clone(), *value)).collect(),
        }
    }
}

/// JSON has no other word than null for what is no number.
fn number<'de, D: Deserializer<'de>>(from: D) -> Result<f64, D::Error> {
    Option::deserialize(from).map(|number| number.unwrap_or(f64::NAN))
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde hands over a reference")]
fn is_false(flag: &bool) -> bool {
    !flag
}

fn is_zero(count: &u64) -> bool {
    *count == 0
}

impl Event {
    /// The step that it tells of, or that comes after it, if it says that.
    pub(crate) fn step(&self) -> Option<u64> {
        match *self {
            Event::Step { step, .. } | Event::Members { step, .. } | Event::Resume { step, .. } => Some(step),
            _ => None,
        }
    }
}

/// Listens to a run. Only rank 0's is told what happens.
pub trait Observer {
    /// Something happened.
    fn event(&mut self, event: &Event);

    /// Called on every rank before it trains, with what [`Event::Start`] tells: for one that becomes the first later, and shows a run whose
    /// beginning it wasn't told.
    fn about(&mut self, _start: &Event) {}

    /// How many steps lie between two [`Event::Step`]s that this one wants.
    fn every(&self) -> u64 {
        1
    }

    /// Called when another rank becomes the first, or is again: gives what this one was told and couldn't pass on, which the first
    /// is told then, and lets go of what only the first has.
    fn pass_on(&mut self) -> Vec<Event> {
        Vec::new()
    }

    /// Whether [`Observer::conclude`], or who asked for the run, needs all values and the optimizer's whole state in memory. Where ranks
    /// hold parts and write checkpoints in parts, they are brought to rank 0 then; else the run takes a last checkpoint, and
    /// [`Concluded::save_model`] and the like make files of it. Only rank 0's is asked.
    fn needs_whole(&self) -> bool {
        true
    }

    /// Called when all steps are made, while all ranks are still there: what the run is to leave behind is kept here. Where the
    /// first rank is lost meanwhile, it is called again on the one that takes its place.
    fn conclude(&mut self, end: &mut Concluded<'_>) -> Result<(), Error> {
        let _ = end;
        Ok(())
    }
}

/// The end of a run that was not interrupted.
pub struct Concluded<'a> {
    /// The parameters: all of their values, unless the observer doesn't need them ([`Observer::needs_whole`]).
    pub parameters: &'a Parameters,
    /// Where the run ended.
    pub state: &'a State,
    /// The last evaluation, if there were test samples.
    pub evaluation: Option<Evaluation>,
    /// Whether it ended because [`crate::Trainer::patience`] did.
    pub stopped_early: bool,
    /// The checkpoint of the last step, where nobody has what it holds.
    pub(crate) parts: Option<PathBuf>,
}

impl Concluded<'_> {
    /// Writes the model's weights as a safetensors file, whole or not at all: from memory, or from the checkpoint where only that
    /// has all of them, a piece at a time.
    pub fn save_model(&self, path: &Path) -> Result<(), Error> {
        match &self.parts {
            Some(folder) => Ok(checkpoint::save(folder, Holds::Model, path)?),
            None => Ok(self.parameters.to_weights().save(path)?),
        }
    }

    /// The same for the running mean of the weights; does nothing if there is none.
    pub fn save_average(&self, path: &Path) -> Result<(), Error> {
        match (&self.state.average, &self.parts) {
            (None, _) => Ok(()),
            (Some(_), Some(folder)) => Ok(checkpoint::save(folder, Holds::Average, path)?),
            (Some(average), None) => Ok(average.to_weights(self.parameters).save(path)?),
        }
    }

    /// The same for the optimizer's state, as checkpoints have it: arrays that are named after a parameter and what they are of it, such as
    /// `0.weight.exp_avg`, and the number of steps.
    pub fn save_optimizer(&self, path: &Path) -> Result<(), Error> {
        match &self.parts {
            Some(folder) => Ok(checkpoint::save(folder, Holds::Optimizer, path)?),
            None => Ok(self.state.optimizer.to_weights(self.parameters).save(path)?),
        }
    }
}

/// Passes over everything but notes, such as of a checkpoint that can't be written, which go to the standard error.
pub struct Quiet;

impl Observer for Quiet {
    fn event(&mut self, event: &Event) {
        if let Event::Note { message } = event {
            eprintln!("phalanx: {message}");
        }
    }

    fn every(&self) -> u64 {
        100
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_loss_that_is_no_number_is_told_and_read() {
        let line = r#"{"event":"step","step":3,"epoch":0,"loss":null,"samples":8,"world_size":2,"lr":0.1,"ms":1.0,"input_ms":0.0,"comm_ms":0.0}"#;
        let told: Event = serde_json::from_str(line).unwrap();
        assert!(matches!(told, Event::Step { step: 3, loss, .. } if loss.is_nan()), "{told:?}");
        assert_eq!(serde_json::to_string(&told).unwrap(), line);
    }
}
