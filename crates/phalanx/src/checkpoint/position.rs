//! How far a run was, in the words of the manifest. They are apart from [`Progress`], so that a change there is no silent
//! change of the format.

use crate::trainer::{Best, Evaluation, LossScale, Progress, Used};
use phalanx_nn::Plateaued;
use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::collections::BTreeMap;

/// How far a run was.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Position {
    /// Steps that were made.
    pub step: u64,
    /// The epoch at hand, from 0.
    pub epoch: u64,
    /// Steps of this epoch that were made.
    pub step_in_epoch: u64,
    /// Samples that all ranks had seen together.
    pub samples: u64,
    /// Which samples of this epoch were used. Checkpoints of before it was counted have none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub used: Option<UsedPosition>,
    /// What a plateau remembers, after the first evaluation that it judged.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub plateau: Option<PlateauPosition>,
    /// The best epoch so far, if any was evaluated.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub best: Option<BestPosition>,
    /// The scale of the loss, of runs in float16.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loss_scale: Option<LossScalePosition>,
}

/// See [`LossScale`].
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the fields are those of LossScale")]
pub struct LossScalePosition {
    pub factor: Exact,
    pub good_steps: u32,
}

/// See [`Used`].
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the fields are those of Used")]
pub struct UsedPosition {
    pub samples: u64,
    pub digest: u64,
}

/// See [`Plateaued`].
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the fields are those of Plateaued")]
pub struct PlateauPosition {
    pub factor: Exact,
    pub best: Option<Exact>,
    pub waited: u64,
    pub cooling: u64,
}

/// See [`Best`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the fields are those of Best")]
pub struct BestPosition {
    pub epoch: u64,
    pub loss: Exact,
    pub accuracy: Option<Exact>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub top5: Option<Exact>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub metrics: BTreeMap<String, Exact>,
}

/// A number as a text that gives the same bits back. JSON has no infinity, and its readers may round.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Exact(pub f64);

impl Serialize for Exact {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(&self.0.to_string())
    }
}

impl<'de> Deserialize<'de> for Exact {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Exact, D::Error> {
        let text = String::deserialize(from)?;
        text.parse().map(Exact).map_err(|_| D::Error::custom(format!("{text:?} is no number")))
    }
}

impl From<&Progress> for Position {
    fn from(progress: &Progress) -> Position {
        let &Progress { step, epoch, step_in_epoch, samples, used, plateau, ref best, loss_scale } = progress;
        let Plateaued { factor, best: lowest, waited, cooling } = plateau;
        let judged = PlateauPosition { factor: Exact(factor), best: lowest.map(Exact), waited, cooling };
        Position {
            step,
            epoch,
            step_in_epoch,
            samples,
            used: used.map(|Used { samples, digest }| UsedPosition { samples, digest }),
            plateau: (plateau != Plateaued::default()).then_some(judged),
            best: best.as_ref().map(|&Best { epoch, ref evaluation }| BestPosition {
                epoch,
                loss: Exact(evaluation.loss),
                accuracy: evaluation.accuracy.map(Exact),
                top5: evaluation.top5.map(Exact),
                metrics: evaluation
                    .metrics
                    .iter()
                    .map(|(name, value)| (name.clone(), Exact(*value)))
                    .collect(),
            }),
            loss_scale: loss_scale.map(|LossScale { factor, good_steps }| LossScalePosition {
                factor: Exact(factor),
                good_steps,
            }),
        }
    }
}

impl From<Position> for Progress {
    fn from(position: Position) -> Progress {
        let Position { step, epoch, step_in_epoch, samples, used, plateau, best, loss_scale } = position;
        let used = used.map(|UsedPosition { samples, digest }| Used { samples, digest });
        let plateau = plateau.map_or_else(Plateaued::default, |judged| Plateaued {
            factor: judged.factor.0,
            best: judged.best.map(|best| best.0),
            waited: judged.waited,
            cooling: judged.cooling,
        });
        let best = best.map(|best| Best {
            epoch: best.epoch,
            evaluation: Evaluation {
                loss: best.loss.0,
                accuracy: best.accuracy.map(|share| share.0),
                top5: best.top5.map(|share| share.0),
                metrics: best.metrics.into_iter().map(|(name, value)| (name, value.0)).collect(),
            },
        });
        let loss_scale = loss_scale
            .map(|LossScalePosition { factor, good_steps }| LossScale { factor: factor.0, good_steps });
        Progress { step, epoch, step_in_epoch, samples, used, plateau, best, loss_scale }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn progress_survives_the_manifest_to_the_last_bit() {
        for loss in [0.1 + 0.2, f64::MIN_POSITIVE / 3.0, 1e300, f64::INFINITY] {
            let metrics =
                [("macro_f1".to_owned(), 1.0 / 7.0), ("of \"mine\"".to_owned(), f64::INFINITY)].into();
            let evaluation = Evaluation { loss, accuracy: Some(1.0 / 3.0), top5: Some(0.7), metrics };
            let plateau = Plateaued { factor: 0.1f64.powi(3), best: Some(loss), waited: 2, cooling: 1 };
            let best = Some(Best { epoch: 4, evaluation });
            let used = Some(Used { samples: 640, digest: u64::MAX - 1 });
            let loss_scale = Some(LossScale { factor: 0.5f64.powi(3) * 1e9, good_steps: 1999 });
            let (step, epoch, step_in_epoch, samples) = (70, 6, 1, 640);
            let progress = Progress { step, epoch, step_in_epoch, samples, used, plateau, best, loss_scale };
            let text = serde_json::to_string(&Position::from(&progress)).unwrap();
            assert_eq!(Progress::from(serde_json::from_str::<Position>(&text).unwrap()), progress);
        }
        let start = serde_json::to_string(&Position::from(&Progress::default())).unwrap();
        assert_eq!(start, r#"{"step":0,"epoch":0,"step_in_epoch":0,"samples":0}"#);
        assert!(serde_json::from_str::<Exact>("\"NaN\"").unwrap().0.is_nan());
        assert!(serde_json::from_str::<Exact>("\"a lot\"").is_err());
    }
}
