//! The running mean of the weights. Where ranks share out a state each has the mean of the values that it keeps, which lies as an array
//! of the optimizer's state does and goes where that goes: to checkpoints, and to those in the place of the lost.

use super::Trainer;
use super::run::Run;
use crate::error::Error;
use phalanx_nn::{Average, Parameters};
use phalanx_parallel::Strategy;

impl Trainer {
    /// Moves the running mean, if there is to be one, towards the values of now.
    pub(super) fn follow(
        &self,
        strategy: &mut dyn Strategy,
        parameters: &Parameters,
        average: &mut Option<Average>,
    ) {
        match (average, self.ema) {
            (Some(average), Some(decay)) => strategy.follow(parameters, average, decay),
            (average, Some(_)) => *average = Some(strategy.mean(parameters)),
            (_, None) => {}
        }
    }
}

impl Run<'_> {
    /// What `f` makes of the model that has the running mean of its weights, if there is one; it has its own weights again then, also
    /// where that fails. All ranks have to come by.
    pub(super) fn with_mean<T>(
        &mut self,
        average: &mut Option<Average>,
        f: impl FnOnce(&mut Self) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let Some(average) = average else { return f(self) };
        let exchanged = self.strategy.exchange(self.parameters, average);
        match exchanged.map_err(Error::from).and_then(|()| f(self)) {
            Ok(made) => {
                self.strategy.exchange(self.parameters, average)?;
                Ok(made)
            }
            Err(error) => {
                // What was on its way is given back first.
                self.strategy.part(self.parameters, Some(&error.to_string()));
                self.strategy.swap(self.parameters, average);
                Err(error)
            }
        }
    }
}
