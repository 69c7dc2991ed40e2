//! What an evaluation means for the rest of a run: whether it is the best so far, and whether there is hope left.

use super::{Evaluation, Progress, Trainer};

/// The number of an evaluation that is to get better.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Watch {
    /// The test loss, downwards.
    #[default]
    Loss,
    /// The test accuracy, upwards.
    Accuracy,
}

/// The best epoch so far.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Best {
    /// From 0.
    pub epoch: u64,
    /// How it did.
    pub evaluation: Evaluation,
}

impl Watch {
    /// Whether `new` is better than `best`. What is no number is never better.
    fn prefers(self, new: &Evaluation, best: &Evaluation) -> bool {
        match self {
            Watch::Loss => new.loss < best.loss,
            Watch::Accuracy => new.accuracy > best.accuracy,
        }
    }

    fn is_number(self, evaluation: &Evaluation) -> bool {
        match self {
            Watch::Loss => !evaluation.loss.is_nan(),
            Watch::Accuracy => evaluation.accuracy.is_some(),
        }
    }
}

impl Trainer {
    /// Notes the evaluation of the epoch at hand, which is whole; says whether it is the best so far.
    pub(super) fn judge(&self, progress: &mut Progress, evaluation: Evaluation) -> bool {
        if let Some(plateau) = &self.plateau {
            progress.plateau = plateau.judge(progress.plateau, evaluation.loss);
        }
        let better = match &progress.best {
            Some(best) => self.watch.prefers(&evaluation, &best.evaluation),
            None => self.watch.is_number(&evaluation),
        };
        if better {
            progress.best = Some(Best { epoch: progress.epoch, evaluation });
        }
        better
    }

    /// Whether so many epochs in a row were no better than the best that the run is to end.
    pub(super) fn lost_patience(&self, progress: &Progress) -> bool {
        let waited = match &progress.best {
            Some(best) => progress.epoch.saturating_sub(best.epoch + 1),
            None => progress.epoch,
        };
        self.patience.is_some_and(|patience| waited >= patience)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The best epoch, and after how many epochs a run with these losses and accuracies ends.
    fn judged(trainer: &Trainer, all: &[(f64, f64)]) -> (Option<u64>, u64) {
        let mut progress = Progress::default();
        for &(loss, accuracy) in all {
            if trainer.lost_patience(&progress) {
                break;
            }
            trainer.judge(&mut progress, Evaluation { loss, accuracy: Some(accuracy), top5: None });
            progress.next_epoch();
        }
        (progress.best.map(|best| best.epoch), progress.epoch)
    }

    #[test]
    fn patience_ends_after_so_many_epochs_that_were_no_better() {
        let all = [(1.0, 0.5), (0.9, 0.6), (0.9, 0.7), (f64::NAN, 0.7), (0.5, 0.6), (0.6, 0.6)];
        let rows = [
            (Watch::Loss, None, (Some(4), 6)),
            (Watch::Loss, Some(1), (Some(1), 3)),
            (Watch::Loss, Some(2), (Some(1), 4)),
            (Watch::Loss, Some(3), (Some(4), 6)),
            (Watch::Accuracy, Some(2), (Some(2), 5)),
            (Watch::Accuracy, Some(3), (Some(2), 6)),
        ];
        for (watch, patience, want) in rows {
            let trainer = Trainer { watch, patience, ..Trainer::default() };
            assert_eq!(judged(&trainer, &all), want, "{watch:?} with a patience of {patience:?}");
        }
        let trainer = Trainer { patience: Some(2), ..Trainer::default() };
        assert_eq!(judged(&trainer, &[(f64::NAN, 0.0); 5]), (None, 2), "never a number");
    }
}
