//! What an evaluation means for the rest of a run: whether it is the best so far, and whether there is hope left.

use super::{Evaluation, Progress, Trainer};
use phalanx_nn::Metric;

/// The number of an evaluation that is to get better.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub enum Watch {
    /// The test loss, downwards.
    #[default]
    Loss,
    /// The test accuracy, upwards.
    Accuracy,
    /// That of the [`Trainer::metrics`] with this name, to where it is better.
    Metric(String),
}

/// The best epoch so far.
#[derive(Clone, Debug, PartialEq)]
pub struct Best {
    /// From 0.
    pub epoch: u64,
    /// How it did.
    pub evaluation: Evaluation,
}

impl Watch {
    /// The number of an evaluation, if it has it.
    fn of(&self, evaluation: &Evaluation) -> Option<f64> {
        let found = match self {
            Watch::Loss => Some(evaluation.loss),
            Watch::Accuracy => evaluation.accuracy,
            Watch::Metric(name) => evaluation.metrics.get(name).copied(),
        };
        found.filter(|number| number.is_finite())
    }

    fn name(&self) -> &str {
        match self {
            Watch::Loss => "loss",
            Watch::Accuracy => "accuracy",
            Watch::Metric(name) => name,
        }
    }
}

impl Trainer {
    /// Notes the evaluation of the epoch at hand, which is whole; says whether it is the best so far.
    pub(super) fn judge(&self, progress: &mut Progress, evaluation: &Evaluation) -> bool {
        if let Some(plateau) = &self.plateau {
            progress.plateau = plateau.judge(progress.plateau, evaluation.loss);
        }
        let best = progress.best.as_ref().and_then(|best| self.watch.of(&best.evaluation));
        let better = match (self.watch.of(evaluation), best) {
            (Some(new), Some(best)) => self.prefers(new, best),
            (new, _) => new.is_some(),
        };
        if better {
            progress.best = Some(Best { epoch: progress.epoch, evaluation: evaluation.clone() });
        }
        better
    }

    /// What to tell where something goes by a number that this evaluation doesn't have.
    pub(super) fn unjudged(&self, evaluation: &Evaluation) -> Option<String> {
        let is_watched = self.patience.is_some() || self.best_file.is_some() || self.watch != Watch::Loss;
        let name = self.watch.name();
        (is_watched && self.watch.of(evaluation).is_none())
            .then(|| format!("the test {name}, which is watched, is no number: this epoch can't be the best"))
    }

    /// Whether the number that is watched is better if it is `new` than if it is `best`.
    fn prefers(&self, new: f64, best: f64) -> bool {
        match &self.watch {
            Watch::Loss => new < best,
            Watch::Accuracy => new > best,
            Watch::Metric(name) => self.metric(name).is_some_and(|metric| metric.prefers(new, best)),
        }
    }

    /// That of the metrics with this name.
    pub(super) fn metric(&self, name: &str) -> Option<&Metric> {
        self.metrics.iter().find(|metric| metric.name() == name)
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

    /// The best epoch, and after how many epochs a run with these losses and accuracies ends. The errors are the accuracies.
    fn judged(trainer: &Trainer, all: &[(f64, f64)]) -> (Option<u64>, u64) {
        let mut progress = Progress::default();
        for &(loss, accuracy) in all {
            if trainer.lost_patience(&progress) {
                break;
            }
            let metrics = [("error".to_owned(), accuracy)].into();
            trainer.judge(&mut progress, &Evaluation { loss, accuracy: Some(accuracy), top5: None, metrics });
            progress.next_epoch();
        }
        (progress.best.map(|best| best.epoch), progress.epoch)
    }

    #[test]
    fn patience_ends_after_so_many_epochs_that_were_no_better() {
        let all = [(1.0, 0.5), (0.9, 0.6), (0.9, 0.7), (f64::NAN, 0.7), (0.5, 0.6), (0.6, 0.6)];
        let error = || Watch::Metric("error".into());
        let rows = [
            (Watch::Loss, None, (Some(4), 6)),
            (Watch::Loss, Some(1), (Some(1), 3)),
            (Watch::Loss, Some(2), (Some(1), 4)),
            (Watch::Loss, Some(3), (Some(4), 6)),
            (Watch::Accuracy, Some(2), (Some(2), 5)),
            (Watch::Accuracy, Some(3), (Some(2), 6)),
            (error(), Some(6), (Some(0), 6)),
            (error(), Some(2), (Some(0), 3)),
        ];
        for (watch, patience, want) in rows {
            let metrics = vec![Metric::mean_absolute_error().named("error")];
            let trainer = Trainer { watch, patience, metrics, ..Trainer::default() };
            assert_eq!(judged(&trainer, &all), want, "{:?} with a patience of {patience:?}", trainer.watch);
        }
        let trainer = Trainer { patience: Some(2), ..Trainer::default() };
        assert_eq!(judged(&trainer, &[(f64::NAN, 0.0); 5]), (None, 2), "never a number");
    }
}
