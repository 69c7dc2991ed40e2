//! Which data and losses a model can be trained with, so that a recipe whose parts don't fit is refused before any worker
//! starts.

use super::RecipeError;
use toml::Table;

/// What a model needs of the keys beside it: the choices that fit, and what the key stands for where it is left out.
struct Need {
    models: &'static [&'static str],
    key: &'static str,
    default: &'static str,
    fitting: &'static [&'static str],
}

const fn need(
    models: &'static [&'static str],
    key: &'static str,
    default: &'static str,
    fitting: &'static [&'static str],
) -> Need {
    Need { models, key, default, fitting }
}

const DIGITS: &[&str] = &["mnist", "mnist-mini", "fashion-mnist"];
const CLASSIFIERS: &[&str] = &["mnist", "mnist-hpc"];
const AUTOENCODER: &[&str] = &["autoencoder"];
const LINE: &[&str] = &["linear-regression"];

const NEEDS: &[Need] = &[
    need(CLASSIFIERS, "data.name", "", DIGITS),
    need(CLASSIFIERS, "data.targets", "own", &["own"]),
    need(CLASSIFIERS, "train.loss", "", &["nll", "cross-entropy"]),
    need(AUTOENCODER, "data.name", "", DIGITS),
    need(AUTOENCODER, "data.targets", "own", &["inputs"]),
    need(AUTOENCODER, "train.loss", "", &["mse"]),
    need(AUTOENCODER, "train.watch", "loss", &["loss"]),
    need(LINE, "train.watch", "loss", &["loss"]),
    need(LINE, "data.name", "", &["linear-regression"]),
    need(LINE, "train.loss", "", &["mse"]),
];

/// Refuses a recipe whose keys each are right and together are not.
pub(super) fn check(origin: &str, table: &Table) -> Result<(), RecipeError> {
    let value = |path: &str| {
        let (section, leaf) = path.split_once('.').expect("keys have a section");
        table.get(section).and_then(|section| section.get(leaf)).and_then(toml::Value::as_str)
    };
    let model = value("model.name").unwrap_or_default();
    for need in NEEDS.iter().filter(|need| need.models.contains(&model)) {
        let found = value(need.key).unwrap_or(need.default);
        if !need.fitting.contains(&found) {
            return Err(RecipeError::Unfit {
                origin: origin.to_owned(),
                model: model.to_owned(),
                key: need.key,
                fitting: need.fitting.join(" or "),
                found: found.to_owned(),
            });
        }
    }
    Ok(())
}
