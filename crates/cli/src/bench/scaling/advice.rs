//! How many workers are worth asking for.
//!
//! The rule: doubling is worth it as long as the workers that are added do at least half of what a lone one does. Of counts that double,
//! the last one for which that holds, all before it included, is the answer.

use super::model::{At, Model, Predicted};
use serde::Serialize;

/// What workers that are added have to do, of what a lone one does.
pub(crate) const WORTH: f64 = 0.5;

/// What grows with the workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Mode {
    /// The samples of a step: each worker has as many.
    Weak,
    /// Nothing: a step's samples are dealt to more.
    Strong,
}

impl Mode {
    pub(super) fn name(self) -> &'static str {
        match self {
            Mode::Weak => "weak",
            Mode::Strong => "strong",
        }
    }

    /// Samples of each worker.
    pub(super) fn batch(self, batch: usize, workers: usize) -> f64 {
        match self {
            Mode::Weak => batch as f64,
            Mode::Strong => batch as f64 / workers as f64,
        }
    }
}

/// A count of workers, and what comes of it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(super) struct Expected {
    pub(super) workers: usize,
    #[serde(flatten)]
    pub(super) step: Predicted,
    /// How often faster than one worker, samples for samples.
    pub(super) speed_up: f64,
    /// The least and the most that the uncertainty allows.
    pub(super) speed_up_from: f64,
    pub(super) speed_up_to: f64,
    /// What each of the workers does, of what a lone one does.
    pub(super) efficiency: f64,
    /// What those do that were added to half as many; the whole for one worker.
    pub(super) marginal: f64,
}

/// What comes of 1, 2, 4 and so on, up to so many workers that share these cores, or have one each where none are given.
pub(super) fn expected(
    model: &Model,
    mode: Mode,
    batch: usize,
    cores: Option<f64>,
    most: usize,
) -> Vec<Expected> {
    let at = |workers: usize| {
        // With a core each, all neighbours are busy.
        let cores = cores.unwrap_or(workers as f64).max(1.0);
        At { workers, batch: mode.batch(batch, workers), cores }
    };
    let rate = |workers: usize, ms: f64| workers as f64 * mode.batch(batch, workers) / ms.max(1e-9);
    let alone = rate(1, model.predict(at(1)).ms);
    let mut all: Vec<Expected> = Vec::new();
    let mut workers = 1;
    while workers <= most {
        let step = model.predict(at(workers));
        let speed_up = rate(workers, step.ms) / alone;
        let added = all.last().map_or(speed_up, |half| speed_up - half.speed_up);
        let of = if workers == 1 { 1.0 } else { (workers / 2) as f64 };
        all.push(Expected {
            workers,
            step,
            speed_up,
            speed_up_from: rate(workers, step.ms + step.within_ms) / alone,
            speed_up_to: rate(workers, (step.ms - step.within_ms).max(0.05 * step.ms)) / alone,
            efficiency: speed_up / workers as f64,
            marginal: added / of,
        });
        workers *= 2;
    }
    all
}

/// The last count that is worth it.
pub(super) fn worth(all: &[Expected]) -> usize {
    let good = all.iter().take_while(|expected| expected.marginal >= WORTH - 1e-9);
    good.last().map_or(1, |expected| expected.workers)
}

#[cfg(test)]
mod tests {
    use super::super::model::{Measured, Parts};
    use super::*;
    use proptest::prelude::*;

    /// Steps of a machine with a core for each worker whose communication takes this long by doubling.
    fn model(compute_ms: f64, comm_ms: f64) -> Model {
        let point = |workers: usize| {
            let (at, n) = (At { workers, batch: 64.0, cores: 1024.0 }, workers as f64);
            let parts = Parts { compute_ms, comm_ms: comm_ms * n.log2(), input_ms: 0.0 };
            Measured { at, parts, step_ms: parts.sum(), spread_ms: 0.0 }
        };
        Model::fit(&[1, 2, 4, 8].map(point))
    }

    #[test]
    fn the_rule_is_about_those_that_are_added() {
        // A step of n workers takes 1 + 0.1 log2 n, so 16 do 11.4 times the work of one and 32 do 21.3: 0.62 for each that is added.
        let all = expected(&model(10.0, 1.0), Mode::Weak, 64, None, 64);
        assert_eq!(all.iter().map(|e| e.workers).collect::<Vec<_>>(), [1, 2, 4, 8, 16, 32, 64]);
        assert!((all[4].speed_up - 16.0 / 1.4).abs() < 0.01, "{:?}", all[4]);
        assert!((all[4].efficiency - 1.0 / 1.4).abs() < 0.001);
        let marginal = (16.0 / 1.4 - 8.0 / 1.3) / 8.0;
        assert!((all[4].marginal - marginal).abs() < 0.001);
        // Communication that takes as long as computing isn't worth a second worker; none at all is worth any.
        assert_eq!(worth(&expected(&model(10.0, 10.0), Mode::Weak, 64, None, 64)), 1);
        assert_eq!(worth(&expected(&model(10.0, 0.0), Mode::Weak, 64, None, 64)), 64);
    }

    proptest! {
        /// One worker is what all else is measured by, and slower communication never makes more of them worth it.
        #[test]
        fn less_communication_is_never_worse(compute in 1.0f64..100.0, comm in 0.0f64..50.0, more in 0.0f64..50.0) {
            let quick = expected(&model(compute, comm), Mode::Weak, 64, None, 256);
            let slow = expected(&model(compute, comm + more), Mode::Weak, 64, None, 256);
            prop_assert!((quick[0].speed_up - 1.0).abs() < 1e-9 && (quick[0].marginal - 1.0).abs() < 1e-9);
            prop_assert!(worth(&slow) <= worth(&quick));
            for all in [&quick, &slow] {
                prop_assert!(all.iter().all(|e| e.speed_up_from <= e.speed_up && e.speed_up <= e.speed_up_to + 1e-9));
                prop_assert!(all.iter().all(|e| e.efficiency <= 1.0 + 1e-6), "{all:?}");
            }
        }

        /// Cores that are shared make no more of anything.
        #[test]
        fn shared_cores_are_worth_no_more_workers(compute in 1.0f64..100.0, comm in 0.0f64..20.0) {
            let all = expected(&model(compute, comm), Mode::Weak, 64, Some(2.0), 64);
            prop_assert!(worth(&all) <= 2, "{all:?}");
        }
    }
}
