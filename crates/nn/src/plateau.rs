//! A learning rate that goes down when evaluations get no better. Unlike a [`crate::Schedule`] it remembers: what it remembers
//! is a plain value, and judging an evaluation gives the next one.

/// PyTorch's `ReduceLROnPlateau`, for a loss.
///
/// ```
/// use phalanx_nn::{Plateau, Plateaued};
///
/// let plateau = Plateau { patience: 1, ..Plateau::default() };
/// let mut state = Plateaued::default();
/// let factors = [3.0, 2.0, 2.0, 2.0, 2.0].map(|loss| {
///     state = plateau.judge(state, loss);
///     state.factor
/// });
/// assert_eq!(factors, [1.0, 1.0, 1.0, 0.1, 0.1]);
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Plateau {
    /// What the learning rate is multiplied by. Default 0.1.
    pub gamma: f64,
    /// How many evaluations in a row may be no better. Default 10.
    pub patience: u64,
    /// The share of the best loss that a better one has to lie below it. Default 0.0001.
    pub threshold: f64,
    /// Evaluations after a change that don't count against the patience. Default 0.
    pub cooldown: u64,
    /// The lowest factor. Default 0.
    pub floor: f64,
}

impl Default for Plateau {
    fn default() -> Plateau {
        Plateau { gamma: 0.1, patience: 10, threshold: 1e-4, cooldown: 0, floor: 0.0 }
    }
}

/// What a [`Plateau`] remembers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Plateaued {
    /// The factor on the learning rate.
    pub factor: f64,
    /// The best loss so far.
    pub best: Option<f64>,
    /// Evaluations in a row that were no better.
    pub waited: u64,
    /// Evaluations that still don't count.
    pub cooling: u64,
}

impl Default for Plateaued {
    fn default() -> Plateaued {
        Plateaued { factor: 1.0, best: None, waited: 0, cooling: 0 }
    }
}

impl Plateau {
    /// What is remembered after an evaluation with this loss. One that is no number is no better than any, and never the best.
    pub fn judge(&self, mut state: Plateaued, loss: f64) -> Plateaued {
        let best = state.best.filter(|best| !best.is_nan());
        if !loss.is_nan() && best.is_none_or(|best| loss < best * (1.0 - self.threshold)) {
            state = Plateaued { best: Some(loss), waited: 0, ..state };
        } else {
            state.waited += 1;
        }
        if state.cooling > 0 {
            state = Plateaued { cooling: state.cooling - 1, waited: 0, ..state };
        }
        if state.waited > self.patience {
            let factor = (state.factor * self.gamma).max(self.floor);
            state = Plateaued { factor, waited: 0, cooling: self.cooldown, ..state };
        }
        state
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_loss_that_is_no_number_is_not_the_best() {
        let plateau = Plateau { patience: 1, gamma: 0.5, ..Plateau::default() };
        let losses = [f64::NAN, 3.0, f64::NAN, 2.0, f64::NAN, f64::NAN];
        let mut state = Plateaued::default();
        let seen = losses.map(|loss| {
            state = plateau.judge(state, loss);
            (state.best, state.factor)
        });
        let best = [None, Some(3.0), Some(3.0), Some(2.0), Some(2.0), Some(2.0)];
        assert_eq!(seen.map(|(best, _)| best), best);
        assert_eq!(seen.map(|(_, factor)| factor), [1.0, 1.0, 1.0, 1.0, 1.0, 0.5]);
        // What an earlier version took for the best.
        let spoilt = Plateaued { best: Some(f64::NAN), ..Plateaued::default() };
        assert_eq!(plateau.judge(spoilt, 4.0).best, Some(4.0));
    }
}
