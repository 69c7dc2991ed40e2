//! Learning rate schedules: pure functions of the epoch.

/// The factor on the optimizer's learning rate in an epoch, counted from 0.
///
/// ```
/// use phalanx_nn::Schedule;
///
/// let schedule = Schedule::Step { step_size: 2, gamma: 0.5 };
/// assert_eq!([0, 1, 2, 3, 4].map(|epoch| schedule.factor(epoch)), [1.0, 1.0, 0.5, 0.5, 0.25]);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Default)]
pub enum Schedule {
    /// Always 1.
    #[default]
    Constant,
    /// Multiplied by `gamma` after every `step_size` epochs.
    Step {
        /// Epochs from one change to the next.
        step_size: u64,
        /// The factor of each change.
        gamma: f64,
    },
}

impl Schedule {
    /// The factor in `epoch`.
    pub fn factor(self, epoch: u64) -> f64 {
        match self {
            Schedule::Constant => 1.0,
            Schedule::Step { step_size, gamma } => gamma.powf((epoch / step_size.max(1)) as f64),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_down() {
        let schedule = Schedule::Step { step_size: 2, gamma: 0.5 };
        assert_eq!([0, 1, 2, 3, 4].map(|e| schedule.factor(e)), [1.0, 1.0, 0.5, 0.5, 0.25]);
        assert_eq!(Schedule::Constant.factor(9), 1.0);
    }
}
