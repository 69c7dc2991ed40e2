//! The keys of a recipe: what each may be, and where it has a meaning.

use super::RecipeError;
use std::fmt;
use toml::{Table, Value};

/// A key of a recipe.
#[derive(Clone, Copy, Debug)]
pub struct Key {
    /// Section and name, as `optimizer.lr`.
    pub path: &'static str,
    /// What it may be.
    pub kind: Kind,
    /// Whether a recipe must have it.
    pub required: bool,
    /// Where it has a meaning: any of these names of its section, or of the loss under `train` and the strategy or the compression
    /// under `parallel`. Empty: everywhere.
    pub only_for: &'static [&'static str],
    /// One line about it.
    pub about: &'static str,
}

/// What stands in a list of all: path, where it has a meaning, and below that what it is about and may be.
impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let owners = self.owners().map_or_else(String::new, |owners| format!("  ({owners})"));
        write!(f, "{}{owners}\n    {}: {}", self.path, self.about, self.kind)
    }
}

/// What a value may be.
#[derive(Clone, Copy, Debug)]
pub enum Kind {
    /// `true` or `false`.
    Flag,
    /// A whole number of at least this.
    Count(u64),
    /// A whole number from the first to the second: of what would otherwise fill the memory.
    Between(u64, u64),
    /// Any number.
    Number,
    /// A number of at least 0.
    NotNegative,
    /// A number above 0.
    Positive,
    /// A number from 0 to below 1.
    Share,
    /// Two of those.
    Shares,
    /// A number from 0 to 1.
    Fraction,
    /// As many numbers of at least 0.
    NotNegatives(usize),
    /// Numbers above 0: as many, or any number of them.
    Positives(Option<usize>),
    /// One of these words.
    OneOf(&'static [&'static str]),
    /// Some of these words, each once.
    SomeOf(&'static [&'static str]),
    /// Names, in which `*` stands for any characters.
    Names,
}

const fn row(path: &'static str, kind: Kind, only_for: &'static [&'static str], about: &'static str) -> Key {
    Key { path, kind, required: false, only_for, about }
}

const fn must(path: &'static str, kind: Kind, about: &'static str) -> Key {
    Key { path, kind, required: true, only_for: &[], about }
}

use Kind::{
    Between, Count, Flag, Fraction, Names, NotNegative, NotNegatives, Number, OneOf, Positive, Positives,
    Share, Shares, SomeOf,
};

/// Outputs of a last layer.
const MOST_CLASSES: u64 = 1 << 20;
/// Blocks of a model.
const MOST_LAYERS: u64 = 1 << 10;
/// Numbers a position, heads and positions.
const MOST_WIDTH: u64 = 1 << 20;
/// The side of an image.
const MOST_PIXELS: u64 = 1 << 14;
/// Threads of a worker.
const MOST_THREADS: u64 = 1 << 10;
/// Shards of a step.
const MOST_SHARDS: u64 = 1 << 16;

/// The models that a recipe can name.
const MODELS: &[&str] = &[
    "mnist",
    "mnist-hpc",
    "autoencoder",
    "linear-regression",
    "resnet18",
    "resnet34",
    "resnet50",
    "resnet101",
    "resnet152",
    "resnet9",
    "gpt",
];
/// Those with torchvision's stem, or another.
const STEMMED: &[&str] = &["resnet18", "resnet34", "resnet50", "resnet101", "resnet152"];
/// Those of colour images.
pub(super) const RESNETS: &[&str] =
    &["resnet18", "resnet34", "resnet50", "resnet101", "resnet152", "resnet9"];
const OPTIMIZERS: &[&str] = &["sgd", "adam", "adamw", "adadelta", "rmsprop"];
const DATASETS: &[&str] = &[
    "mnist",
    "mnist-mini",
    "fashion-mnist",
    "cifar10",
    "cifar100",
    "image-folder",
    "text",
    "linear-regression",
];
/// Those that foretell words.
pub(super) const LANGUAGE: &[&str] = &["gpt"];
pub(super) const DIGITS: &[&str] = &["mnist", "mnist-mini", "fashion-mnist"];
pub(super) const PICTURES: &[&str] = &["cifar10", "cifar100", "image-folder"];
const IMAGES: &[&str] = &["mnist", "mnist-mini", "fashion-mnist", "cifar10", "cifar100", "image-folder"];

const SCHEDULES: &[&str] =
    &["constant", "step", "multi-step", "cosine", "linear", "inverse-sqrt", "one-cycle", "plateau"];
const ONE_CYCLE: &[&str] = &["one-cycle"];
const PLATEAU: &[&str] = &["plateau"];

const METRICS: &[&str] = &["macro_f1", "balanced_accuracy", "mean_absolute_error"];

const STRATEGIES: &[&str] = &["ddp", "fsdp", "dp", "place", "pipeline"];
/// Those of workers with one device each.
const ONE_DEVICE: &[&str] = &["ddp", "fsdp"];
/// Those of workers with several devices.
const SEVERAL: &[&str] = &["dp", "place", "pipeline"];
/// Those that may have stages.
const STAGED: &[&str] = &["pipeline", "ddp", "fsdp"];
const PIPELINES: &[&str] = &["gpipe", "1f1b", "interleaved", "zb-h1"];

/// All keys, in the order of the sections.
pub const KEYS: &[Key] = &[
    must("model.name", OneOf(MODELS), "the model"),
    row(
        "model.dropout",
        Share,
        &["mnist", "mnist-hpc", "gpt"],
        "the share of values that dropout zeroes; 0 switches it off",
    ),
    row(
        "model.head",
        Between(1, MOST_CLASSES),
        RESNETS,
        "outputs of the last layer; by default the classes of the dataset",
    ),
    row(
        "model.stem",
        OneOf(&["imagenet", "small"]),
        STEMMED,
        "first layers: torchvision's, or ones that keep small images large",
    ),
    row(
        "model.freeze",
        Names,
        &[],
        "parameters that are left as they are; in a name, * stands for any characters",
    ),
    row("model.layers", Between(0, MOST_LAYERS), LANGUAGE, "decoder blocks"),
    row("model.width", Between(1, MOST_WIDTH), LANGUAGE, "numbers a position"),
    row("model.heads", Between(1, MOST_WIDTH), LANGUAGE, "heads of each attention, which divide the width"),
    row("model.context", Between(1, MOST_WIDTH), LANGUAGE, "words that the model sees at once"),
    row("model.tied", Flag, LANGUAGE, "whether the last layer multiplies with the table of words"),
    must("optimizer.name", OneOf(OPTIMIZERS), "the optimizer"),
    row("optimizer.lr", NotNegative, &[], "learning rate"),
    row("optimizer.momentum", NotNegative, &["sgd", "rmsprop"], "share of the last direction that is kept"),
    row("optimizer.dampening", Number, &["sgd"], "how much of a gradient doesn't enter the momentum"),
    row("optimizer.nesterov", Flag, &["sgd"], "whether to look ahead along the momentum"),
    row("optimizer.weight_decay", NotNegative, &[], "how strongly parameters are drawn to 0"),
    row(
        "optimizer.betas",
        Shares,
        &["adam", "adamw"],
        "decay of the running means of gradients and their squares",
    ),
    row(
        "optimizer.decay_norms_and_biases",
        Flag,
        &[],
        "whether weight decay also draws on biases and the weights of normalisations",
    ),
    row("optimizer.eps", NotNegative, &["adam", "adamw", "adadelta", "rmsprop"], "keeps divisions from 0"),
    row("optimizer.rho", Share, &["adadelta"], "decay of the running means"),
    row("optimizer.alpha", Share, &["rmsprop"], "decay of the running mean"),
    row(
        "optimizer.centered",
        Flag,
        &["rmsprop"],
        "whether to divide by an estimate of the standard deviation",
    ),
    row("schedule.name", OneOf(SCHEDULES), &[], "how the learning rate changes"),
    row(
        "schedule.by",
        OneOf(&["step", "epoch"]),
        &[],
        "how often it changes; lengths are in epochs by either",
    ),
    row(
        "schedule.warmup",
        NotNegative,
        &[],
        "epochs of a straight line up to the learning rate, before the schedule",
    ),
    row("schedule.warmup_steps", Count(0), &[], "steps of that line, beside these epochs"),
    row("schedule.warmup_from", Share, &[], "the share of the learning rate that the warm-up begins with"),
    row(
        "schedule.epochs",
        Positive,
        &["cosine", "linear", "one-cycle"],
        "how long it takes; else all epochs after the warm-up",
    ),
    row("schedule.step_size", Positive, &["step"], "epochs from one change to the next"),
    row("schedule.milestones", Positives(None), &["multi-step"], "epochs before each change"),
    row("schedule.gamma", NotNegative, &["step", "multi-step", "plateau"], "the factor of each change"),
    row("schedule.floor", Share, &["cosine", "linear", "plateau"], "the lowest share of the learning rate"),
    row("schedule.pct_start", Share, ONE_CYCLE, "the share of the time that goes up"),
    row("schedule.div_factor", Positive, ONE_CYCLE, "how many times lower than the learning rate it begins"),
    row("schedule.final_div_factor", Positive, ONE_CYCLE, "how many times lower than it began it ends"),
    row("schedule.anneal", OneOf(&["cosine", "linear"]), ONE_CYCLE, "the way up and down"),
    row("schedule.patience", Count(0), PLATEAU, "epochs in a row that the test loss may get no better"),
    row("schedule.threshold", Share, PLATEAU, "the share of the best loss that a better one lies below it"),
    row(
        "schedule.cooldown",
        Count(0),
        PLATEAU,
        "epochs after a change that don't count against the patience",
    ),
    must("data.name", OneOf(DATASETS), "the dataset"),
    row(
        "data.augment",
        Flag,
        &[],
        "whether training images are changed at random; false switches all of it off",
    ),
    row(
        "data.pixels",
        OneOf(&["standard", "unit"]),
        IMAGES,
        "pixels of mean 0 and deviation 1, or from 0 to 1",
    ),
    row(
        "data.targets",
        OneOf(&["own", "inputs"]),
        DIGITS,
        "what is predicted: the dataset's targets or its inputs",
    ),
    row(
        "data.size",
        Between(1, MOST_PIXELS),
        PICTURES,
        "both sides of what the model sees; by default as the images are",
    ),
    row(
        "data.resize",
        Between(1, MOST_PIXELS),
        PICTURES,
        "length of the shorter side, before the middle is cut out for data.size",
    ),
    row("data.flip", Flag, PICTURES, "whether every other training image is mirrored"),
    row(
        "data.crop_padding",
        Between(0, MOST_PIXELS),
        PICTURES,
        "rows and columns around training images, before a piece is cut out at random",
    ),
    row("data.crop_border", OneOf(&["black", "reflect"]), PICTURES, "what these rows and columns show"),
    row("data.crop_area", Fraction, PICTURES, "training images are random pieces of at least this share"),
    row(
        "data.jitter",
        NotNegatives(4),
        PICTURES,
        "random changes of brightness, contrast, saturation and hue; the last is at most 0.5",
    ),
    row(
        "data.cutout",
        Between(0, MOST_PIXELS),
        PICTURES,
        "side of a square that is cut out of training images",
    ),
    row("data.mixup", Fraction, PICTURES, "alpha of mixup, which mixes each training image with another one"),
    row("data.mean", NotNegatives(3), PICTURES, "what red, green and blue, from 0 to 1, become 0 at"),
    row("data.std", Positives(Some(3)), PICTURES, "what of them becomes a distance of 1"),
    row("data.skip_bad", Flag, PICTURES, "whether another image takes the place of one that can't be read"),
    row(
        "data.threads",
        Between(0, MOST_THREADS),
        &[],
        "threads that prepare batches; 0 prepares them in the training loop",
    ),
    row(
        "data.resident",
        OneOf(&["auto", "always", "never"]),
        &[],
        "whether samples of bytes all lie in a GPU's memory, which makes batches of them; auto: if they take a fifth of what is free at most",
    ),
    must("train.loss", OneOf(&["nll", "cross-entropy", "mse"]), "how outputs are held against targets"),
    row("train.label_smoothing", Share, &["cross-entropy"], "how much of a label is spread over all classes"),
    row(
        "train.class_weights",
        Positives(None),
        &["cross-entropy"],
        "how much each class counts, as in [1, 3]",
    ),
    row("train.epochs", Count(1), &[], "how often all samples are seen"),
    row("train.batch_size", Count(1), &[], "samples a worker, or logical shard, and backward pass"),
    row("train.accumulate", Count(1), &[], "backward passes a step"),
    row(
        "train.drop_last",
        Flag,
        &[],
        "whether the last batch of an epoch is left out where it is smaller than the others",
    ),
    row("train.graphs", Flag, &[], "whether GPUs record the passes of a step as graphs and replay them"),
    row(
        "train.search",
        Flag,
        &[],
        "whether GPUs measure which of the libraries' products and convolutions are the fastest",
    ),
    row(
        "train.precision",
        OneOf(&["float32", "tf32", "bfloat16", "float16"]),
        &[],
        "what products are made in; weights, their gradients and the rest stay float32",
    ),
    row("train.clip_norm", Positive, &[], "the largest norm of all gradients together"),
    row(
        "train.clip_value",
        Positive,
        &[],
        "the largest absolute value of a gradient; cut before the norm is",
    ),
    row(
        "train.on_nan",
        OneOf(&["loss", "stop", "ignore"]),
        &[],
        "where a NaN stops the run: in the loss, in any gradient too (stop), or nowhere (ignore)",
    ),
    row(
        "train.ema",
        Share,
        &[],
        "how much of a running mean of the weights each step keeps; it is what is evaluated",
    ),
    row(
        "train.metrics",
        SomeOf(METRICS),
        &[],
        "what evaluations tell beside the loss and the accuracy, as in [macro_f1]",
    ),
    row(
        "train.watch",
        OneOf(&["loss", "accuracy", "macro_f1", "balanced_accuracy", "mean_absolute_error"]),
        &[],
        "which number of the evaluations is to get better",
    ),
    row("train.patience", Count(1), &[], "ends the run after so many epochs in a row that were no better"),
    row("train.keep_best", Flag, &[], "whether best.safetensors is kept beside the model"),
    row(
        "train.checkpoint_every",
        Count(1),
        &[],
        "steps from one checkpoint to the next, and to one at the end; else it goes by time",
    ),
    row(
        "train.checkpoint_minutes",
        Positive,
        &[],
        "minutes from one checkpoint to the next; the end of an epoch takes one after ten seconds already",
    ),
    row(
        "train.checkpoint",
        OneOf(&["whole", "parts"]),
        &[],
        "whether rank 0 brings a sharded model together for a checkpoint, or each rank writes a part into a folder that all share",
    ),
    row("train.keep", Count(1), &[], "how many checkpoints stay"),
    row("train.seed", Count(0), &[], "what first values, orders and masks are functions of"),
    row(
        "train.threads",
        Between(0, MOST_THREADS),
        &[],
        "compute threads of each worker; 0 for its share of the cores",
    ),
    row(
        "parallel.strategy",
        OneOf(STRATEGIES),
        &[],
        "how the work is shared among workers and their devices",
    ),
    row(
        "parallel.zero",
        Between(1, 3),
        &["fsdp"],
        "what is shared out: 1 the optimizer's state, 2 and gradients, 3 and parameters",
    ),
    row(
        "parallel.offload",
        Flag,
        &["fsdp"],
        "whether what a worker with a GPU holds lies in the host's memory, where the optimizer moves it",
    ),
    row("parallel.devices", Between(2, MOST_THREADS), SEVERAL, "devices of each worker"),
    row(
        "parallel.cut",
        Positives(None),
        &["place", "pipeline", "ddp", "fsdp"],
        "how many blocks each stage has; by default as measured times say",
    ),
    row(
        "parallel.stage_mb",
        Positive,
        &["place", "pipeline", "ddp", "fsdp"],
        "MiB that the blocks of a stage may take, as measured: values, gradients, what a micro-batch leaves",
    ),
    row("parallel.schedule", OneOf(PIPELINES), STAGED, "in which order stages work on micro-batches"),
    row("parallel.chunks", Between(1, MOST_THREADS), STAGED, "stages of each device, if interleaved"),
    row("parallel.micro_batches", Between(1, MOST_SHARDS), STAGED, "parts of each batch"),
    row(
        "parallel.pipeline",
        Between(1, MOST_THREADS),
        ONE_DEVICE,
        "workers that hold the stages of a replica",
    ),
    row("parallel.tensor", Between(1, MOST_THREADS), ONE_DEVICE, "workers that hold a part of every matrix"),
    row(
        "parallel.sequence",
        Flag,
        ONE_DEVICE,
        "whether these have a stretch of each sequence each between matrices",
    ),
    row(
        "parallel.context",
        Between(1, MOST_THREADS),
        ONE_DEVICE,
        "workers that have a stretch of each sequence",
    ),
    row(
        "parallel.shard",
        Between(1, MOST_THREADS),
        &["fsdp"],
        "workers that share out a part of the model; the others hold it again",
    ),
    row(
        "parallel.recompute",
        OneOf(&["none", "cheap", "blocks"]),
        &[],
        "what is computed again in the backward pass rather than kept: what costs little, or whole blocks",
    ),
    row(
        "parallel.recompute_blocks",
        NotNegatives(2),
        &[],
        "the first of these blocks and the one behind them; by default all but the last",
    ),
    row("parallel.bucket_mb", Positive, &[], "about how many MiB of gradients travel together"),
    row("parallel.first_bucket_mb", Positive, &[], "the same for the gradients that are ready first"),
    row(
        "parallel.logical_shards",
        Between(1, MOST_SHARDS),
        &[],
        "shards that each step is cut into: results don't depend on the number of workers",
    ),
    row("parallel.find_unused", Flag, &[], "whether a step may leave parameters without a gradient"),
    row("parallel.sync_batch_norm", Flag, &[], "whether batch norms go by the batch of all workers"),
    row(
        "parallel.between_gpus",
        OneOf(&["best", "nccl", "host"]),
        &["ddp", "fsdp"],
        "how gradients, values that are shared out, and what workers of a replica exchange, go from GPU to GPU: by NCCL, by way of the host, or as is best",
    ),
    row(
        "parallel.compress",
        OneOf(&["none", "bf16", "fp16", "powersgd"]),
        &[],
        "what gradients become on their way between workers",
    ),
    row(
        "parallel.rank",
        Between(1, MOST_CLASSES),
        &["powersgd"],
        "the rank that gradients are brought down to",
    ),
    row(
        "parallel.start_step",
        Count(0),
        &["powersgd"],
        "steps before the first whose gradients are compressed",
    ),
];

impl Key {
    /// The part before the dot.
    pub(super) fn section(&self) -> &'static str {
        self.path.split_once('.').expect("keys have a section").0
    }

    /// The part after the dot.
    pub(super) fn leaf(&self) -> &'static str {
        self.path.split_once('.').expect("keys have a section").1
    }

    /// The key of the section that says which others have a meaning, and what it is where a recipe doesn't say.
    pub(super) fn chooser(&self) -> (&'static str, &'static str) {
        match self.section() {
            "train" => ("loss", ""),
            "parallel" if self.only_for.iter().any(|owner| STRATEGIES.contains(owner)) => ("strategy", "ddp"),
            "parallel" => ("compress", "none"),
            "schedule" => ("name", "constant"),
            _ => ("name", ""),
        }
    }

    /// Where it has a meaning, as `optimizer.name sgd, rmsprop`; none if everywhere.
    pub(super) fn owners(&self) -> Option<String> {
        let owners = || format!("{}.{} {}", self.section(), self.chooser().0, self.only_for.join(", "));
        (!self.only_for.is_empty()).then(owners)
    }

    /// The value that `text` of the command line stands for.
    pub(super) fn parse(&self, origin: &str, text: &str) -> Result<Value, RecipeError> {
        let float = |text: &str| text.trim().parse().ok().map(Value::Float);
        let value = match self.kind {
            Kind::Flag => text.parse().ok().map(Value::Boolean),
            Kind::Count(_) | Kind::Between(..) => text.parse().ok().map(Value::Integer),
            Kind::Number | Kind::NotNegative | Kind::Positive | Kind::Share | Kind::Fraction => float(text),
            Kind::Shares | Kind::NotNegatives(_) | Kind::Positives(_) => text
                .trim_start_matches(['[', '('])
                .trim_end_matches([']', ')'])
                .split(',')
                .map(float)
                .collect::<Option<Vec<_>>>()
                .map(Value::Array),
            Kind::OneOf(_) => Some(Value::String(text.trim_matches('"').to_owned())),
            Kind::Names | Kind::SomeOf(_) => {
                let name = |text: &str| Value::String(text.trim().trim_matches(['"', '\'']).to_owned());
                let text = text.trim();
                let inside = text.strip_prefix('[').and_then(|text| text.strip_suffix(']'));
                let names = inside.unwrap_or(text).trim();
                let names = if names.is_empty() { Vec::new() } else { names.split(',').map(name).collect() };
                Some(Value::Array(names))
            }
        };
        match value {
            Some(value) => self.accept(origin, &value).map(|()| value),
            None => Err(self.refuse(origin, text.to_owned(), None)),
        }
    }

    /// Whether the key may have this value.
    fn accept(&self, origin: &str, value: &Value) -> Result<(), RecipeError> {
        let number = |value: &Value| match *value {
            Value::Integer(n) => Some(n as f64),
            Value::Float(x) => Some(x).filter(|x| x.is_finite()),
            _ => None,
        };
        let share = |value: &Value| number(value).is_some_and(|x| (0.0..1.0).contains(&x));
        let all = |n: usize, right: &dyn Fn(f64) -> bool| {
            let each = |value: &Value| number(value).is_some_and(right);
            value.as_array().is_some_and(|numbers| numbers.len() == n && numbers.iter().all(each))
        };
        let whole = |value: &Value| value.as_integer().and_then(|n| u64::try_from(n).ok());
        let right = match self.kind {
            Kind::Flag => value.is_bool(),
            Kind::Count(least) => whole(value).is_some_and(|n| n >= least),
            Kind::Between(least, most) => whole(value).is_some_and(|n| (least..=most).contains(&n)),
            Kind::Number => number(value).is_some(),
            Kind::NotNegative => number(value).is_some_and(|x| x >= 0.0),
            Kind::Positive => number(value).is_some_and(|x| x > 0.0),
            Kind::Share => share(value),
            Kind::Shares => all(2, &|x| (0.0..1.0).contains(&x)),
            Kind::Fraction => number(value).is_some_and(|x| (0.0..=1.0).contains(&x)),
            Kind::NotNegatives(n) => all(n, &|x| x >= 0.0),
            Kind::Positives(Some(n)) => all(n, &|x| x > 0.0),
            Kind::Positives(None) => value.as_array().is_some_and(|numbers| all(numbers.len(), &|x| x > 0.0)),
            Kind::OneOf(words) => value.as_str().is_some_and(|text| words.contains(&text)),
            Kind::SomeOf(words) => value.as_array().is_some_and(|some| {
                let is_right = |word: &Value| word.as_str().is_some_and(|word| words.contains(&word));
                some.iter().enumerate().all(|(i, word)| is_right(word) && !some[..i].contains(word))
            }),
            Kind::Names => value.as_array().is_some_and(|names| {
                names.iter().all(|name| name.as_str().is_some_and(|name| !name.is_empty()))
            }),
        };
        if right {
            return Ok(());
        }
        let close = match (self.kind, value.as_str()) {
            (Kind::OneOf(words), Some(text)) => nearest(text, words.iter().copied()),
            (Kind::SomeOf(words), _) => value
                .as_array()
                .into_iter()
                .flatten()
                .filter_map(Value::as_str)
                .filter(|text| !words.contains(text))
                .find_map(|text| nearest(text, words.iter().copied())),
            _ => None,
        };
        Err(self.refuse(origin, value.to_string(), close))
    }

    fn refuse(&self, origin: &str, found: String, nearest: Option<&'static str>) -> RecipeError {
        RecipeError::BadValue {
            origin: origin.to_owned(),
            key: self.path.to_owned(),
            expected: self.kind.to_string(),
            found,
            nearest,
        }
    }
}

/// For a message, as `a number above 0`.
impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Kind::Flag => f.write_str("true or false"),
            Kind::Count(least) => write!(f, "a whole number of at least {least}"),
            Kind::Between(least, most) => write!(f, "a whole number from {least} to {most}"),
            Kind::Number => f.write_str("a number"),
            Kind::NotNegative => f.write_str("a number of at least 0"),
            Kind::Positive => f.write_str("a number above 0"),
            Kind::Share => f.write_str("a number from 0 to below 1"),
            Kind::Shares => f.write_str("two numbers from 0 to below 1"),
            Kind::Fraction => f.write_str("a number from 0 to 1"),
            Kind::NotNegatives(n) => write!(f, "{n} numbers of at least 0"),
            Kind::Positives(Some(n)) => write!(f, "{n} numbers above 0"),
            Kind::Positives(None) => f.write_str("a list of numbers above 0, as in [30, 60]"),
            Kind::OneOf(words) => write!(f, "one of {}", words.join(", ")),
            Kind::SomeOf(words) => write!(f, "a list of some of {}, each once", words.join(", ")),
            Kind::Names => f.write_str("a list of names, as in [\"conv1.*\", \"*.bias\"]"),
        }
    }
}

/// The key of this path.
pub(super) fn find(origin: &str, path: &str) -> Result<&'static Key, RecipeError> {
    KEYS.iter().find(|key| key.path == path).ok_or_else(|| RecipeError::UnknownKey {
        origin: origin.to_owned(),
        key: path.to_owned(),
        nearest: nearest(path, KEYS.iter().map(|key| key.path)),
    })
}

/// Checks a whole recipe: every key is known, has a value that it may have and a meaning, and none is missing.
pub(super) fn check(origin: &str, table: &Table) -> Result<(), RecipeError> {
    for (section, content) in table {
        match content {
            Value::String(_) if section == "about" => {}
            Value::Table(keys) if KEYS.iter().any(|key| key.section() == section) => {
                for (leaf, value) in keys {
                    find(origin, &format!("{section}.{leaf}"))?.accept(origin, value)?;
                }
            }
            _ => return Err(unknown_section(origin, section, content)),
        }
    }
    let value = |section: &str, leaf: &str| table.get(section)?.get(leaf);
    for key in KEYS {
        if key.required && value(key.section(), key.leaf()).is_none() {
            let expected = key.kind.to_string();
            return Err(RecipeError::MissingKey { origin: origin.to_owned(), key: key.path, expected });
        }
    }
    for key in KEYS.iter().filter(|key| value(key.section(), key.leaf()).is_some()) {
        let (chooser, usual) = key.chooser();
        let chosen = value(key.section(), chooser).and_then(Value::as_str).unwrap_or(usual);
        if !key.only_for.is_empty() && !key.only_for.contains(&chosen) {
            return Err(inapplicable(origin, key, chosen));
        }
    }
    Ok(())
}

/// The error for something at the top of a recipe that is none of its sections.
fn unknown_section(origin: &str, section: &str, content: &Value) -> RecipeError {
    // A known section that isn't a table, or a first key of an unknown one, says more than its bare name.
    let key = match content.as_table().and_then(|keys| keys.keys().next()) {
        Some(leaf) => format!("{section}.{leaf}"),
        None => section.to_owned(),
    };
    let nearest = nearest(&key, KEYS.iter().map(|key| key.path));
    RecipeError::UnknownKey { origin: origin.to_owned(), key, nearest }
}

fn inapplicable(origin: &str, key: &Key, chosen: &str) -> RecipeError {
    let (chooser, _) = key.chooser();
    let what = if chooser == "name" { key.section() } else { chooser };
    let takes: Vec<&str> = KEYS
        .iter()
        .filter(|other| other.section() == key.section())
        .filter(|other| other.only_for.is_empty() || other.only_for.contains(&chosen))
        .map(|other| other.path)
        .collect();
    RecipeError::Inapplicable {
        origin: origin.to_owned(),
        key: key.path.to_owned(),
        owner: format!("{what} {chosen}"),
        takes: takes.join(", "),
    }
}

/// The name that looks most like `text`, if one does.
pub(super) fn nearest(text: &str, names: impl Iterator<Item = &'static str>) -> Option<&'static str> {
    /// Below this, names have little more in common than some letters.
    const ALIKE: f64 = 0.7;
    // A key is often right but for its section, as in `lr` for `optimizer.lr`.
    let likeness = |name: &'static str| {
        let leaf = name.rsplit('.').next().unwrap_or(name);
        strsim::jaro_winkler(text, name).max(if text.contains('.') {
            0.0
        } else {
            strsim::jaro_winkler(text, leaf)
        })
    };
    names
        .map(|name| (likeness(name), name))
        .filter(|&(alike, _)| alike > ALIKE)
        .max_by(|a, b| a.0.total_cmp(&b.0))
        .map(|(_, name)| name)
}
