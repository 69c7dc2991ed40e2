//! What a run hands from each step to the next, beside the parameters: plain values that a checkpoint can take and give back.
//! It does not decide what is done with them.

use super::used::Used;
use super::{Best, LossScale};
use phalanx_nn::optim::{BadValue, Optimizer, Rule};
use phalanx_nn::{Average, Parameters, Plateaued};

/// Where a run is, and what it remembers. A run that [`crate::Trainer::resume`] goes on with from any state, with the
/// parameters and buffers of that moment, takes the steps that the whole run takes; but for a compression of gradients that
/// keeps something on each rank, which only checkpoints hold.
pub struct State {
    /// How far it is.
    pub progress: Progress,
    /// What the optimizer remembers of each parameter.
    pub optimizer: Optimizer,
    /// The running mean of the weights, after the first step of a run that has [`crate::Trainer::ema`].
    pub average: Option<Average>,
}

impl State {
    /// Makes room for what another rank may hand to this one, the values of `parameters` among it, and for the first step. Where a run
    /// has begun, the others stand still from the moment that this rank joins them until all of that is here, and memory that is
    /// new takes longer to come than the numbers do.
    pub fn make_room(&mut self, parameters: &Parameters) {
        if parameters.values().device().gpu().is_none() {
            parameters.make_room();
            self.optimizer.make_room(parameters.layout().len());
        }
    }

    /// Before the first step. Fails if a value of the rule makes no sense.
    pub fn start(rule: impl Into<Rule>) -> Result<State, BadValue> {
        Ok(State { progress: Progress::default(), optimizer: Optimizer::new(rule)?, average: None })
    }
}

/// How far a run is.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Progress {
    /// Steps that were made, and so the number of the next one.
    pub step: u64,
    /// The epoch at hand, from 0. It moves on when the epoch was evaluated.
    pub epoch: u64,
    /// Steps of this epoch that were made.
    pub step_in_epoch: u64,
    /// Samples that all ranks have seen together.
    pub samples: u64,
    /// Which samples of this epoch were used; none after a checkpoint that doesn't say.
    pub used: Option<Used>,
    /// What [`crate::Trainer::plateau`] made of the epochs so far.
    pub plateau: Plateaued,
    /// The best epoch so far by [`crate::Trainer::watch`].
    pub best: Option<Best>,
    /// What the loss of the next step is scaled by, after the first step of a run in float16.
    pub loss_scale: Option<LossScale>,
}

impl Progress {
    /// A step was made on samples of which ranks say that they used these.
    pub(super) fn stepped(&mut self, used: Used) {
        if self.step_in_epoch == 0 {
            self.used = Some(Used::default());
        }
        self.step += 1;
        self.step_in_epoch += 1;
        self.samples += used.samples;
        if let Some(so_far) = &mut self.used {
            so_far.add(used);
        }
    }

    /// The epoch is over and was evaluated.
    pub(super) fn next_epoch(&mut self) {
        self.epoch += 1;
        self.step_in_epoch = 0;
    }

    /// How many epochs were begun.
    pub fn epochs_begun(&self) -> u64 {
        self.epoch + u64::from(self.step_in_epoch > 0)
    }
}
