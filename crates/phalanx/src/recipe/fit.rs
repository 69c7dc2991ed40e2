//! Which data and losses a model can be trained with, so that a recipe whose parts don't fit is refused before any worker
//! starts.

use super::RecipeError;
use super::build::gpt;
use super::keys::{DIGITS, PICTURES, RESNETS};
use phalanx_nn::models::ResNet9;
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

const CLASSIFIERS: &[&str] = &["mnist", "mnist-hpc"];
const AUTOENCODER: &[&str] = &["autoencoder"];
const GPT: &[&str] = &["gpt"];
const LINE: &[&str] = &["linear-regression"];

/// What evaluations tell unasked.
const BASIC: &[&str] = &["loss", "accuracy"];
/// What evaluations of values, and of classes, tell.
const OF_VALUES: &[&str] = &["loss", "mean_absolute_error"];
const OF_CLASSES: &[&str] = &["loss", "accuracy", "macro_f1", "balanced_accuracy"];

const NEEDS: &[Need] = &[
    need(CLASSIFIERS, "data.name", "", DIGITS),
    need(CLASSIFIERS, "data.targets", "own", &["own"]),
    need(CLASSIFIERS, "train.loss", "", &["nll", "cross-entropy"]),
    need(AUTOENCODER, "data.name", "", DIGITS),
    need(AUTOENCODER, "data.targets", "own", &["inputs"]),
    need(AUTOENCODER, "train.loss", "", &["mse"]),
    need(RESNETS, "data.name", "", PICTURES),
    need(RESNETS, "train.loss", "", &["cross-entropy"]),
    need(GPT, "data.name", "", &["text"]),
    need(GPT, "train.loss", "", &["cross-entropy"]),
    need(GPT, "train.watch", "loss", &["loss"]),
    need(AUTOENCODER, "train.watch", "loss", OF_VALUES),
    need(LINE, "train.watch", "loss", OF_VALUES),
    need(CLASSIFIERS, "train.watch", "loss", OF_CLASSES),
    need(RESNETS, "train.watch", "loss", OF_CLASSES),
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
    check_counts(origin, table)
}

/// The size of a dataset's colour images (`None` within: they differ), if it has such.
pub(super) fn image_size(dataset: &str) -> Option<Option<[usize; 2]>> {
    match dataset {
        "image-folder" => Some(None),
        name => PICTURES.contains(&name).then_some(Some([32, 32])),
    }
}

/// Refuses images that are too small for the model.
pub(super) fn check_size(origin: &str, model: &str, size: [usize; 2]) -> Result<(), RecipeError> {
    let least = if model == "resnet9" { ResNet9::SMALLEST } else { 1 };
    if size.iter().all(|&side| side >= least) {
        return Ok(());
    }
    let expected = format!("at least {least} for the model {model}");
    Err(RecipeError::bad(origin, "data.size", expected, format!("{}x{}", size[0], size[1])))
}

/// How many classes a dataset of images has, where its name says so.
pub(super) fn classes(dataset: &str) -> Option<usize> {
    match dataset {
        "cifar10" => Some(10),
        "cifar100" => Some(100),
        name if DIGITS.contains(&name) => Some(10),
        _ => None,
    }
}

/// Refuses a head that isn't known or too small for the classes, random changes where there are none, and what
/// does nothing without another key, or beside one.
fn check_counts(origin: &str, table: &Table) -> Result<(), RecipeError> {
    let value = |section: &str, leaf: &str| table.get(section).and_then(|section| section.get(leaf));
    let word = |section, leaf| value(section, leaf).and_then(toml::Value::as_str).unwrap_or_default();
    let (model, dataset) = (word("model", "name"), word("data", "name"));
    let refuse =
        |key: &str, expected: String, found: String| Err(RecipeError::bad(origin, key, expected, found));
    for (key, fitting) in alone() {
        check_alone(origin, table, key, &fitting)?;
    }
    if GPT.contains(&model) {
        let size = |leaf, usual: usize| {
            value("model", leaf).and_then(toml::Value::as_integer).map_or(usual, |size| size as usize)
        };
        let (width, heads) = (size("width", gpt::WIDTH), size("heads", gpt::HEADS));
        if !width.is_multiple_of(heads) {
            return refuse("model.heads", format!("a divisor of model.width = {width}"), heads.to_string());
        }
    }
    check_metrics(origin, table, model)?;
    let augment = value("data", "augment").and_then(toml::Value::as_bool);
    if augment == Some(true) && !PICTURES.contains(&dataset) {
        return refuse("data.augment", "false".into(), "true".into());
    }
    if word("schedule", "name") == "multi-step" && value("schedule", "milestones").is_none() {
        return refuse("schedule.milestones", "given, as in [30, 60] epochs".into(), "nothing".into());
    }
    let warms_up = ["warmup", "warmup_steps"].iter().any(|leaf| value("schedule", leaf).is_some());
    if value("schedule", "warmup_from").is_some() && !warms_up {
        return refuse("schedule.warmup", "given beside schedule.warmup_from".into(), "nothing".into());
    }
    if let Some(pixels) = value("data", "pixels").and_then(toml::Value::as_str)
        && (value("data", "mean").is_some() || value("data", "std").is_some())
    {
        return refuse("data.pixels", "left out beside data.mean and data.std".into(), pixels.to_owned());
    }
    if value("data", "crop_border").is_some() && value("data", "crop_padding").is_none() {
        return refuse(
            "data.crop_padding",
            "a whole number beside data.crop_border".into(),
            "nothing".into(),
        );
    }
    if !RESNETS.contains(&model) {
        return Ok(());
    }
    let head = value("model", "head").and_then(toml::Value::as_integer);
    match (head, classes(dataset)) {
        (None, None) => {
            refuse("model.head", "the number of class folders of your images".into(), "nothing".into())
        }
        (Some(head), Some(classes)) if head < classes as i64 => {
            refuse("model.head", format!("at least {classes}, the classes of {dataset}"), head.to_string())
        }
        _ => Ok(()),
    }
}

/// Refuses metrics that say nothing of the model's outputs, and one to watch that isn't among them.
fn check_metrics(origin: &str, table: &Table, model: &str) -> Result<(), RecipeError> {
    let value = |leaf: &str| table.get("train").and_then(|train| train.get(leaf));
    let refuse =
        |expected: String, found: String| Err(RecipeError::bad(origin, "train.metrics", expected, found));
    let metrics = value("metrics").and_then(toml::Value::as_array);
    let metrics: Vec<&str> = metrics.into_iter().flatten().filter_map(toml::Value::as_str).collect();
    // Of what may be watched, that which isn't told unasked.
    let told = NEEDS.iter().find(|need| need.key == "train.watch" && need.models.contains(&model));
    let told = told.map_or(&[][..], |need| need.fitting).iter().copied();
    let fitting: Vec<&str> = told.filter(|number| !BASIC.contains(number)).collect();
    if let Some(unfit) = metrics.iter().find(|metric| !fitting.contains(metric)) {
        let expected = match fitting.is_empty() {
            true => format!("left out for the model {model}"),
            false => format!("a list of some of {} for the model {model}", fitting.join(", ")),
        };
        return refuse(expected, (*unfit).to_owned());
    }
    let watch = value("watch").and_then(toml::Value::as_str).filter(|watch| !BASIC.contains(watch));
    match watch.filter(|watch| !metrics.contains(watch)) {
        Some(watch) => {
            let found = if metrics.is_empty() { "nothing".to_owned() } else { metrics.join(", ") };
            refuse(format!("a list with {watch} in it beside train.watch = {watch}"), found)
        }
        None => Ok(()),
    }
}

/// Keys that can't be had with others, and what these have to be then, if they are given.
fn alone() -> [(&'static str, Vec<(&'static str, toml::Value)>); 2] {
    [
        (
            "parallel.logical_shards",
            vec![
                ("train.accumulate", 1.into()),
                ("parallel.sync_batch_norm", false.into()),
                ("parallel.compress", "none".into()),
            ],
        ),
        ("train.class_weights", vec![("data.mixup", 0.0.into()), ("parallel.tensor", 1.into())]),
    ]
}

/// Refuses a key beside another value of others than it goes with.
fn check_alone(
    origin: &str,
    table: &Table,
    key: &str,
    fitting: &[(&str, toml::Value)],
) -> Result<(), RecipeError> {
    let value = |path: &str| path.split_once('.').and_then(|(section, leaf)| table.get(section)?.get(leaf));
    if value(key).is_none() {
        return Ok(());
    }
    for (other, want) in fitting {
        if let Some(found) = value(other).filter(|&found| found != want) {
            return Err(RecipeError::bad(origin, other, format!("{want} beside {key}"), found));
        }
    }
    Ok(())
}
