//! Whether all ranks would train alike: found when they meet, where it would come out as a bad model, or not at all. One that takes the
//! place of another has read its recipe and its data later than the others, who may have edited both since.

use super::{Data, Trainer};
use crate::error::Error;
use crate::recipe::{differing, values};
use phalanx_comm::Group;
use phalanx_nn::optim::Rule;
use phalanx_parallel::first_that_differs;
use std::collections::BTreeMap;

/// What nodes may set as suits each of them.
const OWN: [&str; 7] = [
    "data.threads",
    "data.resident",
    "train.threads",
    "train.search",
    "train.checkpoint_every",
    "train.checkpoint_minutes",
    "train.keep",
];

/// Fails, on every rank with the same words, unless all ranks have the same recipe, as far as it decides what a step is, and data sets of
/// the same lengths. All have to ask.
pub(super) fn check(group: &Group, trainer: &Trainer, rule: &Rule, data: &Data) -> Result<(), Error> {
    let text = description(trainer, rule, data);
    let Some((rank, first, other)) = first_that_differs(group, &text)? else { return Ok(()) };
    Err(Error::OtherTraining { rank, differences: differences(&first, &other) })
}

/// A line for each value, `key = value`.
fn description(trainer: &Trainer, rule: &Rule, data: &Data) -> String {
    let recipe = trainer.checkpoint.as_ref().and_then(|config| config.recipe.as_deref());
    let mut told: BTreeMap<String, String> = recipe.map(values).unwrap_or_default();
    told.retain(|key, _| !OWN.contains(&key.as_str()));
    let Trainer { epochs, batch_size, logical_shards, accumulate, seed, shuffle, .. } = trainer;
    let test = data.test.as_ref().map_or(0, |test| test.dataset().len());
    let facts = [
        ("train.epochs", epochs.to_string()),
        ("train.seed", seed.to_string()),
        ("train.batch_size", batch_size.to_string()),
        ("train.accumulate", accumulate.to_string()),
        ("parallel.logical_shards", logical_shards.unwrap_or(0).to_string()),
        ("shuffle", shuffle.to_string()),
        ("training samples", data.train.dataset().len().to_string()),
        ("test samples", test.to_string()),
    ];
    // What a recipe says, where there is one.
    let settings = [
        ("drop_last", trainer.drop_last.to_string()),
        ("precision", format!("{:?}", trainer.precision)),
        ("optimizer", format!("{rule:?}")),
        ("groups", format!("{:?}", trainer.groups)),
        ("loss", format!("{:?}", trainer.loss)),
        ("clip", format!("{:?}", trainer.clip)),
        ("schedule", format!("{:?}", trainer.schedule)),
        ("plateau", format!("{:?}", trainer.plateau)),
        ("ema", format!("{:?}", trainer.ema)),
        ("metrics", format!("{:?}", trainer.metrics)),
        ("watch", format!("{:?}", trainer.watch)),
        ("patience", format!("{:?}", trainer.patience)),
        ("on_nan", format!("{:?}", trainer.on_nan)),
    ];
    let settings = settings.into_iter().filter(|_| recipe.is_none());
    let steps = trainer.steps.map(|steps| ("steps", steps.to_string()));
    told.extend(facts.into_iter().chain(settings).chain(steps).map(|(key, value)| (key.to_owned(), value)));
    told.into_iter().map(|(key, value)| format!("{key} = {value}\n")).collect()
}

/// What differs in the description of another rank from that of rank 0, in words.
fn differences(first: &str, other: &str) -> String {
    let told = |text: &str| -> BTreeMap<String, String> {
        let pairs = text.lines().filter_map(|line| line.split_once(" = "));
        pairs.map(|(key, value)| (key.to_owned(), value.to_owned())).collect()
    };
    let (first, other) = (told(first), told(other));
    let shown = |value: Option<&String>| value.cloned().unwrap_or_else(|| "not set".to_owned());
    let words: Vec<String> = differing(&first, &other)
        .map(|(key, first, other)| format!("{key} is {} there, and {} on rank 0", shown(other), shown(first)))
        .collect();
    words.join("; ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_differs_is_told_by_its_name() {
        let differ = |first: &str, other: &str| differences(first, other);
        assert_eq!(
            differ("seed = 1\nshuffle = true\n", "seed = 2\nshuffle = true\n"),
            "seed is 2 there, and 1 on rank 0"
        );
        assert_eq!(
            differ("a = 1\n", "a = 1\ntrain.clip_norm = 0.5\n"),
            "train.clip_norm is 0.5 there, and not set on rank 0"
        );
    }
}
