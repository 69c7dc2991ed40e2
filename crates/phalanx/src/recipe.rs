//! A training job as data: which model, optimizer, schedule and dataset, and how they are trained.
//!
//! A recipe is a TOML file, or one of those in this library, and settings of the command line over it. All of them pass
//! through one table of keys ([`KEYS`]), so a wrong key or value is refused in the same words wherever it stands, and a
//! [`Recipe`] that was read holds none. A recipe only puts the public parts of the layers below together: what it does, a program can do.

mod build;
mod changes;
mod fit;
mod keys;
mod layout;

pub(crate) use changes::{changes, differing, values};
pub use keys::{KEYS, Key, Kind};
pub use layout::LaidOut;

use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use thiserror::Error;
use toml::{Table, Value};

/// A training job.
///
/// ```
/// use phalanx::recipe::Recipe;
/// let recipe = Recipe::load("mnist", &["optimizer.name=adamw".to_owned(), "train.epochs=3".to_owned()])?;
/// assert_eq!(recipe.train.epochs, 3);
/// assert!(recipe.to_toml().contains("name = \"adamw\""));
/// # Ok::<(), phalanx::recipe::RecipeError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Recipe {
    /// What it is called: the built-in name, or the name of the file without its ending.
    #[serde(skip)]
    pub name: String,
    /// One line about it.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub about: String,
    /// What is trained.
    pub model: ModelRecipe,
    /// How parameters follow gradients.
    pub optimizer: OptimizerRecipe,
    /// How the learning rate changes.
    #[serde(default)]
    pub schedule: ScheduleRecipe,
    /// What it learns from.
    pub data: DataRecipe,
    /// How long, and in which portions.
    pub train: TrainRecipe,
    /// How ranks share the work.
    #[serde(default)]
    pub parallel: ParallelRecipe,
}

/// What is trained.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelRecipe {
    /// The model.
    pub name: String,
    /// The share of values that dropout zeroes while training; 0 switches it off.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dropout: Option<f64>,
    /// Outputs of the last layer. Default: as many as the dataset has classes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub head: Option<usize>,
    /// The first layers of a residual network: `imagenet` (torchvision's, the default) or `small` (for small images).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stem: Option<String>,
    /// Parameters that training leaves as they are ([`phalanx_nn::freeze`]). Default: none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub freeze: Option<Vec<String>>,
    /// Decoder blocks of a language model. Default 4.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub layers: Option<usize>,
    /// Numbers a position of it. Default 128.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub width: Option<usize>,
    /// Heads of each of its attentions. Default 4.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub heads: Option<usize>,
    /// Words that it sees at once. Default 128.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub context: Option<usize>,
    /// Whether its last layer multiplies with the table of words. Default yes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tied: Option<bool>,
}

/// How parameters follow gradients. What is `None` is the optimizer's default.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[allow(missing_docs, reason = "the fields are the keys, and the table of keys describes them")]
pub struct OptimizerRecipe {
    pub name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lr: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub momentum: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dampening: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nesterov: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub weight_decay: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub betas: Option<(f64, f64)>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub eps: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rho: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub alpha: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub centered: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub decay_norms_and_biases: Option<bool>,
}

/// How the learning rate changes. What is `None` is the schedule's default.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
#[allow(missing_docs, reason = "the fields are the keys, and the table of keys describes them")]
pub struct ScheduleRecipe {
    pub name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub by: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub warmup: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub warmup_steps: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub warmup_from: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub epochs: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub step_size: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub milestones: Option<Vec<f64>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gamma: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub floor: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pct_start: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub div_factor: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub final_div_factor: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub anneal: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub patience: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub threshold: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cooldown: Option<u64>,
}

impl Default for ScheduleRecipe {
    fn default() -> ScheduleRecipe {
        ScheduleRecipe {
            name: "constant".to_owned(),
            by: None,
            warmup: None,
            warmup_steps: None,
            warmup_from: None,
            epochs: None,
            step_size: None,
            milestones: None,
            gamma: None,
            floor: None,
            pct_start: None,
            div_factor: None,
            final_div_factor: None,
            anneal: None,
            patience: None,
            threshold: None,
            cooldown: None,
        }
    }
}

/// What the model learns from.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DataRecipe {
    /// The dataset.
    pub name: String,
    /// Whether training images are changed at random, as the keys below say. Default: yes, where they are colour images.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub augment: Option<bool>,
    /// What pixels become: `standard` (mean 0 and deviation 1, the default) or `unit` (0 to 1).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pixels: Option<String>,
    /// What is to be predicted: the dataset's `own` targets (the default) or its `inputs`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub targets: Option<String>,
    /// What is done to colour images.
    #[serde(flatten)]
    pub images: ImageRecipe,
    /// Threads that prepare batches ahead of the step. Default 0, and 2 where images have to be decoded.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub threads: Option<usize>,
    /// Whether all samples lie in the memory of a GPU: `auto` (if they take little of it, the default), `always` or `never`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resident: Option<String>,
}

/// What is done to colour images; see [`phalanx_data::Treatment`]. What is `None` isn't done.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the fields are the keys, and the table of keys describes them")]
pub struct ImageRecipe {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub size: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resize: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub flip: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub crop_padding: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub crop_border: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub crop_area: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub jitter: Option<[f64; 4]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cutout: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mixup: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mean: Option<[f64; 3]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub std: Option<[f64; 3]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub skip_bad: Option<bool>,
}

/// How long is trained, and in which portions.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TrainRecipe {
    /// How outputs are held against targets.
    pub loss: String,
    /// How much of a label is spread over all classes, under the loss `cross-entropy`. Default 0.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub label_smoothing: Option<f64>,
    /// How much each class counts, under the loss `cross-entropy`. Default: all count 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub class_weights: Option<Vec<f32>>,
    /// How often all samples are seen. Default 1.
    #[serde(default = "one")]
    pub epochs: u64,
    /// Samples a step and worker, or logical shard. Default 64.
    #[serde(default = "sixty_four")]
    pub batch_size: usize,
    /// Backward passes a step. Default 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub accumulate: Option<usize>,
    /// Whether the last batch of an epoch is left out where it is smaller than the others. Default no.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub drop_last: Option<bool>,
    /// Whether GPUs record the passes of a step as graphs and replay them. Default no.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub graphs: Option<bool>,
    /// Whether GPUs measure which way to compute is the fastest. Default no.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub search: Option<bool>,
    /// What products are made in: `float32`, the default, `tf32`, `bfloat16` or `float16`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub precision: Option<String>,
    /// The largest norm of all gradients together. Default: any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub clip_norm: Option<f64>,
    /// The largest absolute value of a gradient. Default: any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub clip_value: Option<f64>,
    /// What is done about numbers that are none: `loss`, the default, `stop` or `ignore`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub on_nan: Option<String>,
    /// How much of the running mean of the weights each step keeps. Default: there is no mean.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ema: Option<f64>,
    /// What evaluations tell beside the loss and the accuracy. Default: nothing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub metrics: Option<Vec<String>>,
    /// Which number of an evaluation is to get better: `loss`, the default, `accuracy`, or one of the metrics.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub watch: Option<String>,
    /// How many epochs in a row may be no better than the best. Default: any number.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub patience: Option<u64>,
    /// Whether the weights of the best epoch are kept. Default no.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub keep_best: Option<bool>,
    /// Steps from one checkpoint to the next, and to one at the end. Default: it goes by time.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub checkpoint_every: Option<u64>,
    /// Minutes from one checkpoint to the next. Default 1; no meaning beside `checkpoint_every`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub checkpoint_minutes: Option<f64>,
    /// `whole` or `parts`: whether each rank of a sharded model writes a part of a checkpoint. Default `whole`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub checkpoint: Option<String>,
    /// How many checkpoints stay. Default 2.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub keep: Option<u64>,
    /// What first values, orders and masks are functions of. Default 0.
    #[serde(default)]
    pub seed: u64,
    /// Compute threads of each worker; 0, the default, for its share of the cores.
    #[serde(default)]
    pub threads: usize,
}

fn one() -> u64 {
    1
}

fn sixty_four() -> usize {
    64
}

/// How ranks share the work.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ParallelRecipe {
    /// How the work is shared: `ddp` (workers, each with a whole model on one device, the default), `fsdp` (workers, each with a part
    /// of the model), or workers of several devices
    /// each: `dp` (a copy of the model on each), `place` (each holds some blocks) or `pipeline` (the same, all at once).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub strategy: Option<String>,
    /// What `fsdp` shares out: 1 the optimizer's state, 2 gradients as well, 3 (the default) everything.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub zero: Option<usize>,
    /// Whether `fsdp` keeps what a worker with a GPU holds in the host's memory, where the optimizer moves it. Default: no.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub offload: bool,
    /// Devices of each worker. Default 2.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub devices: Option<usize>,
    /// How many blocks each stage has. Default: such that the slowest stage is as fast as can be, by measured times.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cut: Option<Vec<f64>>,
    /// MiB that the blocks of a stage may take, where they are measured: their values and gradients, and what a micro-batch leaves in
    /// memory. Default: as many as there are.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stage_mb: Option<f64>,
    /// A pipeline's schedule: `gpipe`, `1f1b` (the default), `interleaved` or `zb-h1`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub schedule: Option<String>,
    /// Stages of each device, of an interleaved schedule. Default 2.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub chunks: Option<usize>,
    /// Into how many parts a pipeline cuts each batch. Default 4.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub micro_batches: Option<usize>,
    /// Workers that hold the stages of a replica. Default 1: each has all of it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pipeline: Option<usize>,
    /// Workers that hold a part of every matrix each. Default 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tensor: Option<usize>,
    /// Whether these also have a stretch of each sequence each, between matrices. Default no.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sequence: Option<bool>,
    /// Workers that have a stretch of each sequence each, and the same of the model. Default 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub context: Option<usize>,
    /// Workers that share out a part of the model under `fsdp`, of which others hold a copy. Default: all.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shard: Option<usize>,
    /// What is computed again in the backward pass, so that it needn't be kept: `none`, the default, `cheap` (what dense layers are given
    /// by norms and activation functions) or `blocks` (all of them but their input).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub recompute: Option<String>,
    /// The first of these blocks, and the one behind them. Default: all but the last.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub recompute_blocks: Option<[f64; 2]>,
    /// About how many MiB of gradients travel together. Default 25.
    pub bucket_mb: f64,
    /// The same for the gradients that are ready first. Default 1.
    pub first_bucket_mb: f64,
    /// Into how many shards each step is cut, whatever the number of workers. Default: workers share it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub logical_shards: Option<usize>,
    /// Whether a step may leave parameters without a gradient. Default no.
    pub find_unused: bool,
    /// Whether batch norms go by the whole batch rather than by each worker's part. Default no.
    pub sync_batch_norm: bool,
    /// How gradients go from GPU to GPU: `nccl`, `host`, or as is `best`. Default best.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub between_gpus: Option<String>,
    /// What gradients become on their way: `none`, `bf16`, `fp16` or `powersgd`. Default none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub compress: Option<String>,
    /// With `powersgd`, the rank that gradients are brought down to. Default 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rank: Option<usize>,
    /// With `powersgd`, the steps before the first that is compressed. Default 1000.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub start_step: Option<u64>,
}

impl Default for ParallelRecipe {
    fn default() -> ParallelRecipe {
        ParallelRecipe {
            strategy: None,
            zero: None,
            offload: false,
            devices: None,
            cut: None,
            stage_mb: None,
            schedule: None,
            chunks: None,
            micro_batches: None,
            pipeline: None,
            tensor: None,
            sequence: None,
            context: None,
            shard: None,
            recompute: None,
            recompute_blocks: None,
            bucket_mb: 25.0,
            first_bucket_mb: 1.0,
            logical_shards: None,
            find_unused: false,
            sync_batch_norm: false,
            between_gpus: None,
            compress: None,
            rank: None,
            start_step: None,
        }
    }
}

/// Why there is no such recipe.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum RecipeError {
    /// Neither a built-in recipe nor a file.
    #[error("no recipe is called: {name}{}", near(nearest, "`phalanx train --list` names them all"))]
    Unknown {
        /// What was asked for.
        name: String,
        /// The built-in name that looks most like it.
        nearest: Option<&'static str>,
    },
    /// The file can't be read.
    #[error(
        "cannot read the recipe {}: {error}\nhint: `phalanx train --list` names those that are built in",
        path.display()
    )]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system answered.
        error: std::io::Error,
    },
    /// The file isn't TOML.
    #[error("{origin}: not a TOML file: {reason}")]
    Syntax {
        /// The file.
        origin: String,
        /// What the parser says, with the place.
        reason: String,
    },
    /// A setting without its equals sign.
    #[error("--set needs KEY=VALUE, got: {text}\nhint: as in --set optimizer.lr=0.1")]
    NoValue {
        /// What was given.
        text: String,
    },
    /// No key of this name.
    #[error(
        "{origin}: no recipe has the key: {key}{}",
        near(nearest, "`phalanx train --keys` lists all that there are")
    )]
    UnknownKey {
        /// The file, or `--set`.
        origin: String,
        /// The key that was given.
        key: String,
        /// The key that looks most like it.
        nearest: Option<&'static str>,
    },
    /// A value that the key can't have.
    #[error("{origin}: {key} must be {expected}, got: {found}{}", nearest.map_or_else(String::new, |name| format!("\nhint: did you mean {name}?")))]
    BadValue {
        /// The file, or `--set`.
        origin: String,
        /// The key.
        key: String,
        /// What it can be, in words.
        expected: String,
        /// What it was given.
        found: String,
        /// The choice that looks most like it, of a key with choices.
        nearest: Option<&'static str>,
    },
    /// A value that the model can't be trained with.
    #[error(
        "{origin}: the model {model} needs {key} = {fitting}, got: {found}\nhint: choose another model.name, or set {key}"
    )]
    Unfit {
        /// The file, or `--set`.
        origin: String,
        /// The model.
        model: String,
        /// The key.
        key: &'static str,
        /// What it may be for this model.
        fitting: String,
        /// What it is.
        found: String,
    },
    /// Images that can't be brought to the form that was asked for.
    #[error("{origin}: {reason}")]
    Images {
        /// The file, or `--set`.
        origin: String,
        /// Why, in words.
        reason: String,
    },
    /// A key that a recipe can't do without.
    #[error("{origin}: the recipe lacks the key: {key}\nhint: it must be {expected}")]
    MissingKey {
        /// The file.
        origin: String,
        /// The key.
        key: &'static str,
        /// What it can be, in words.
        expected: String,
    },
    /// A key that has no meaning beside another one.
    #[error("{origin}: {key} has no meaning for {owner}, which takes: {takes}")]
    Inapplicable {
        /// The file, or `--set`.
        origin: String,
        /// The key.
        key: String,
        /// What it would belong to, such as `optimizer adam`.
        owner: String,
        /// The keys that have a meaning there.
        takes: String,
    },
}

impl From<RecipeError> for crate::Error {
    fn from(error: RecipeError) -> crate::Error {
        crate::Error::Recipe(error.to_string())
    }
}

fn near(nearest: &Option<&'static str>, otherwise: &str) -> String {
    match nearest {
        Some(name) => format!("\nhint: did you mean {name}? {otherwise}"),
        None => format!("\nhint: {otherwise}"),
    }
}

/// The recipes of this library, name and TOML, in the order in which they are shown.
pub const BUILT_IN: &[(&str, &str)] = &[
    ("mnist", include_str!("../recipes/mnist.toml")),
    ("mnist-mini", include_str!("../recipes/mnist-mini.toml")),
    ("mnist-hpc", include_str!("../recipes/mnist-hpc.toml")),
    ("fashion-mnist", include_str!("../recipes/fashion-mnist.toml")),
    ("mnist-autoencoder", include_str!("../recipes/mnist-autoencoder.toml")),
    ("mnist-model-parallel", include_str!("../recipes/mnist-model-parallel.toml")),
    ("cifar10-resnet18-model-parallel", include_str!("../recipes/cifar10-resnet18-model-parallel.toml")),
    ("mnist-pipeline", include_str!("../recipes/mnist-pipeline.toml")),
    ("gpt", include_str!("../recipes/gpt.toml")),
    ("linear-regression", include_str!("../recipes/linear-regression.toml")),
    ("cifar10-resnet18", include_str!("../recipes/cifar10-resnet18.toml")),
    ("cifar10-resnet18-224", include_str!("../recipes/cifar10-resnet18-224.toml")),
    ("cifar10-fast", include_str!("../recipes/cifar10-fast.toml")),
];

/// No recipe is longer: what is, isn't a recipe.
const MAX_BYTES: u64 = 1 << 20;
/// So much of each line of a recipe is shown where it is wrong, in characters.
const MOST_SHOWN: usize = 500;

/// A text without the ends of lines that nobody would read.
fn cut(text: &str) -> String {
    let line = |line: &str| match line.char_indices().nth(MOST_SHOWN) {
        Some((end, _)) => format!("{}...", &line[..end]),
        None => line.to_owned(),
    };
    text.lines().map(line).collect::<Vec<_>>().join("\n")
}

impl RecipeError {
    /// A value that the key can't have, or not beside the others of its recipe.
    fn bad(origin: &str, key: &str, expected: impl Into<String>, found: impl ToString) -> RecipeError {
        RecipeError::BadValue {
            origin: origin.to_owned(),
            key: key.to_owned(),
            expected: expected.into(),
            found: found.to_string(),
            nearest: None,
        }
    }
}

impl Recipe {
    /// The built-in recipe called `recipe`, or the one in the TOML file of this path, with the assignments `set` made as by
    /// [`Recipe::set`]. What has a slash or ends in `.toml` is a path.
    ///
    /// # Errors
    /// There is no such recipe or file, or the file or an assignment holds a wrong key or value.
    pub fn load(recipe: &str, set: &[String]) -> Result<Recipe, RecipeError> {
        let mut recipe = Recipe::find(recipe)?;
        recipe.set(set.iter().map(String::as_str))?;
        Ok(recipe)
    }

    /// The same, where the text of the file is known already.
    ///
    /// # Errors
    /// As [`Recipe::load`].
    pub fn load_text(recipe: &str, text: &str, set: &[String]) -> Result<Recipe, RecipeError> {
        let path = Path::new(recipe);
        let name = path.file_stem().map(|stem| stem.to_string_lossy().into_owned()).unwrap_or_default();
        let mut recipe = Recipe::parse(&name, &path.display().to_string(), text)?;
        recipe.set(set.iter().map(String::as_str))?;
        Ok(recipe)
    }

    /// The text of the file that [`Recipe::load`] reads; none where the recipe is a built-in one.
    ///
    /// # Errors
    /// It can't be read, or is too long for a recipe.
    pub fn text(recipe: &str) -> Result<Option<String>, RecipeError> {
        if !(recipe.contains('/') || recipe.ends_with(".toml")) {
            return Ok(None);
        }
        let path = Path::new(recipe);
        let failed = |error| RecipeError::Io { path: path.to_path_buf(), error };
        let mut text = String::new();
        // A pipe doesn't say how long it is.
        let read = File::open(path).and_then(|file| file.take(MAX_BYTES + 1).read_to_string(&mut text));
        match read.map_err(failed)? as u64 > MAX_BYTES {
            true => Err(failed(std::io::Error::other(format!("it is longer than {MAX_BYTES} bytes")))),
            false => Ok(Some(text)),
        }
    }

    fn find(recipe: &str) -> Result<Recipe, RecipeError> {
        if let Some(text) = Recipe::text(recipe)? {
            return Recipe::load_text(recipe, &text, &[]);
        }
        match BUILT_IN.iter().find(|(name, _)| *name == recipe) {
            Some((name, text)) => Recipe::parse(name, name, text),
            None => Err(RecipeError::Unknown {
                name: recipe.to_owned(),
                nearest: keys::nearest(recipe, BUILT_IN.iter().map(|(name, _)| *name)),
            }),
        }
    }

    /// Reads TOML; `origin` is what errors name.
    ///
    /// # Errors
    /// It isn't TOML, or holds a wrong key or value, or lacks a needed one.
    pub fn parse(name: &str, origin: &str, text: &str) -> Result<Recipe, RecipeError> {
        let table: Table = text.parse().map_err(|error: toml::de::Error| RecipeError::Syntax {
            origin: origin.to_owned(),
            reason: cut(error.to_string().trim_end()),
        })?;
        Recipe::from_table(name, origin, table)
    }

    /// Sets keys, each as `key=value` with a dotted key. Choosing another model, optimizer or schedule by its name forgets
    /// the former one's settings, whatever the order of the assignments.
    ///
    /// # Errors
    /// A wrong key or value. The recipe stays as it was.
    pub fn set<'a>(&mut self, assignments: impl IntoIterator<Item = &'a str>) -> Result<(), RecipeError> {
        self.check()?;
        const ORIGIN: &str = "--set";
        let mut pairs = Vec::new();
        for text in assignments {
            let (key, value) =
                text.split_once('=').ok_or_else(|| RecipeError::NoValue { text: text.to_owned() })?;
            pairs.push((keys::find(ORIGIN, key.trim())?, value.trim()));
        }
        let mut table = self.table()?;
        // Names first, as they decide what the other keys can mean. The sort is stable: of two values the last one counts.
        pairs.sort_by_key(|(key, _)| key.leaf() != "name");
        for (key, text) in pairs {
            let value = key.parse(ORIGIN, text)?;
            let section = table.entry(key.section()).or_insert_with(|| Value::Table(Table::new()));
            let section = section.as_table_mut().expect("sections are tables");
            let changed = section.get(key.leaf()) != Some(&value);
            if key.leaf() == "name" && changed && key.section() != "data" {
                section.clear();
            }
            section.insert(key.leaf().to_owned(), value);
        }
        *self = Recipe::from_table(&self.name, ORIGIN, table)?;
        Ok(())
    }

    /// The recipe as TOML that [`Recipe::parse`] reads back. Panics if a number is too large for TOML, which
    /// [`Recipe::check`] tells.
    pub fn to_toml(&self) -> String {
        toml::to_string_pretty(self).expect("a recipe is a table")
    }

    /// Checks every key again, as a program may have changed the fields.
    ///
    /// # Errors
    /// The first key with a wrong value.
    pub fn check(&self) -> Result<(), RecipeError> {
        let table = self.table()?;
        keys::check(&self.name, &table)?;
        fit::check(&self.name, &table)?;
        self.check_images(&self.name)?;
        self.check_parallel(&self.name)
    }

    fn table(&self) -> Result<Table, RecipeError> {
        if let Some((key, number)) = beyond_toml(&serde_json::to_value(self).expect("a recipe is an object"))
        {
            let expected = format!("a whole number of at most {}", i64::MAX);
            return Err(RecipeError::bad(&self.name, &key, expected, number));
        }
        Ok(Table::try_from(self).expect("a recipe is a table"))
    }

    fn from_table(name: &str, origin: &str, table: Table) -> Result<Recipe, RecipeError> {
        keys::check(origin, &table)?;
        fit::check(origin, &table)?;
        let mut recipe: Recipe = table.try_into().expect("a checked table is a recipe");
        recipe.name = name.to_owned();
        recipe.check_images(origin)?;
        recipe.check_parallel(origin)?;
        Ok(recipe)
    }

    /// Refuses what can't be done to the images of the dataset, before any worker looks at them.
    fn check_images(&self, origin: &str) -> Result<(), RecipeError> {
        let Some(input) = fit::image_size(&self.data.name) else { return Ok(()) };
        let refused = |reason: String| RecipeError::Images { origin: origin.to_owned(), reason };
        let treatment = self.view().treatment;
        let pipelines = treatment.pipelines(input, phalanx_data::Normalise::UNIT);
        let test = pipelines.map_err(|error| refused(error.to_string()))?.test;
        fit::check_size(origin, &self.model.name, test.output(input).map_err(refused)?)
    }
}

/// The first whole number of a recipe that TOML can't hold, with its key.
fn beyond_toml(recipe: &serde_json::Value) -> Option<(String, u64)> {
    let keys = recipe.as_object()?.iter().filter_map(|(section, keys)| Some((section, keys.as_object()?)));
    let mut all = keys.flat_map(|(section, keys)| keys.iter().map(move |(key, value)| (section, key, value)));
    all.find_map(|(section, key, value)| {
        let number = value.as_u64().filter(|&number| i64::try_from(number).is_err())?;
        Some((format!("{section}.{key}"), number))
    })
}

#[cfg(test)]
mod tests;
