//! What a recipe's words stand for. Each part is made after a check of the whole, so no word is without a meaning here.

use super::keys::RESNETS;
use super::{ImageRecipe, OptimizerRecipe, Recipe, RecipeError, ScheduleRecipe, TrainRecipe, fit};
use crate::checkpoint::{CheckpointConfig, Every};
use crate::{OnNan, Precision, Trainer, Watch};
use phalanx_data::{
    Augment, BYTES, BadImages, Border, Jitter, LoaderOptions, Normalise, Pixels, Resident, Target, Targets,
    Treatment, View,
};
use phalanx_nn::models::{
    Autoencoder, Gpt, GptConfig, Head, MnistHpcNet, MnistNet, ResNet, ResNet9, ResNetDepth, ResNetStem,
};
use phalanx_nn::optim::{Adadelta, Adam, AdamW, Clip, Group, Members, RmsProp, Rule, Sgd};
use phalanx_nn::{
    Anneal, BadFreeze, Curve, Linear, Loss, Metric, Module, OneCycle, Plateau, Schedule, Unit, Warmup,
    WeightedCrossEntropy, freeze,
};
use phalanx_parallel::{BetweenGpus, Compress, DdpConfig, FsdpConfig, PowerSgdConfig, Sharded};
use std::path::PathBuf;
use std::time::Duration;

/// The tutorials' share of dropout.
const DROPOUT: f64 = 0.5;
/// PyTorch's default for plain descent.
const SGD_LR: f64 = 0.001;
/// PyTorch's default for all schedules that take steps down.
const GAMMA: f64 = 0.1;

/// A language model that learns something within minutes on two cores.
pub(super) mod gpt {
    pub(crate) const LAYERS: usize = 4;
    pub(crate) const WIDTH: usize = 128;
    pub(crate) const HEADS: usize = 4;
    pub(crate) const CONTEXT: usize = 128;
    pub(crate) const DROPOUT: f64 = 0.1;
}

impl Recipe {
    /// The model, without values yet.
    ///
    /// # Errors
    /// As [`Recipe::check`]; or what is to be frozen is no part of the model, or all of it.
    pub fn model(&self) -> Result<Box<dyn Module>, RecipeError> {
        self.check()?;
        let dropout = self.model.dropout.unwrap_or(DROPOUT);
        let mut model: Box<dyn Module> = match self.model.name.as_str() {
            "mnist" => Box::new(MnistNet::new(dropout)),
            "mnist-hpc" => Box::new(MnistHpcNet::new(dropout)),
            "autoencoder" => Box::new(Autoencoder::new()),
            "linear-regression" => Box::new(Linear::new(1, 1)),
            "gpt" => Box::new(Gpt::new(self.gpt())),
            "resnet9" => Box::new(ResNet9::new(self.classes())),
            other => match self.depth() {
                Some(depth) => Box::new(self.resnet(depth)),
                None => unreachable!("the table of keys lets no model {other} pass"),
            },
        };
        if let Some(names) = &self.model.freeze {
            freeze(&mut model, names).map_err(|error| self.unfrozen(names, error))?;
        }
        Ok(model)
    }

    fn unfrozen(&self, names: &[String], error: BadFreeze) -> RecipeError {
        let (expected, found) = match error {
            BadFreeze::NoneNamed { pattern, names } => {
                (format!("names of the model's parameters, which are {names}"), pattern)
            }
            BadFreeze::All { parameters } => {
                (format!("a part of the model's {parameters} parameters"), format!("{names:?}, all of them"))
            }
        };
        RecipeError::bad(&self.name, "model.freeze", expected, found)
    }

    /// Of which depth the model is, if it is a residual network that has one.
    pub(super) fn depth(&self) -> Option<ResNetDepth> {
        match self.model.name.as_str() {
            "resnet18" => Some(ResNetDepth::D18),
            "resnet34" => Some(ResNetDepth::D34),
            "resnet50" => Some(ResNetDepth::D50),
            "resnet101" => Some(ResNetDepth::D101),
            "resnet152" => Some(ResNetDepth::D152),
            _ => None,
        }
    }

    /// Whether the key `model.head` has a meaning for the model.
    pub fn model_takes_head(&self) -> bool {
        RESNETS.contains(&self.model.name.as_str())
    }

    /// The sizes of a language model of bytes.
    pub(super) fn gpt(&self) -> GptConfig {
        let super::ModelRecipe { layers, width, heads, context, tied, dropout, .. } = self.model;
        GptConfig {
            layers: layers.unwrap_or(gpt::LAYERS),
            width: width.unwrap_or(gpt::WIDTH),
            heads: heads.unwrap_or(gpt::HEADS),
            context: context.unwrap_or(gpt::CONTEXT),
            vocabulary: BYTES,
            dropout: dropout.unwrap_or(gpt::DROPOUT),
            head: if tied == Some(false) { Head::Own } else { Head::Tied },
        }
    }

    fn resnet(&self, depth: ResNetDepth) -> ResNet {
        let stem = match self.model.stem.as_deref() {
            Some("small") => ResNetStem::Small,
            _ => ResNetStem::Imagenet,
        };
        ResNet::new(depth, stem, self.classes())
    }

    /// Outputs of the last layer.
    fn classes(&self) -> usize {
        self.model.head.or(fit::classes(&self.data.name)).expect("a checked recipe has a head")
    }

    /// The optimizer's rule.
    ///
    /// # Errors
    /// As [`Recipe::check`].
    pub fn rule(&self) -> Result<Rule, RecipeError> {
        self.check()?;
        let OptimizerRecipe {
            ref name,
            lr,
            momentum,
            dampening,
            nesterov,
            weight_decay,
            betas,
            eps,
            rho,
            alpha,
            centered,
            decay_norms_and_biases: _,
        } = self.optimizer;
        Ok(match name.as_str() {
            "sgd" => {
                let usual = Sgd::new(SGD_LR);
                Rule::Sgd(Sgd {
                    lr: lr.unwrap_or(usual.lr),
                    momentum: momentum.unwrap_or(usual.momentum),
                    dampening: dampening.unwrap_or(usual.dampening),
                    nesterov: nesterov.unwrap_or(usual.nesterov),
                    weight_decay: weight_decay.unwrap_or(usual.weight_decay),
                })
            }
            "adam" => {
                let usual = Adam::default();
                Rule::Adam(Adam {
                    lr: lr.unwrap_or(usual.lr),
                    betas: betas.unwrap_or(usual.betas),
                    eps: eps.unwrap_or(usual.eps),
                    weight_decay: weight_decay.unwrap_or(usual.weight_decay),
                })
            }
            "adamw" => {
                let usual = AdamW::default();
                Rule::AdamW(AdamW {
                    lr: lr.unwrap_or(usual.lr),
                    betas: betas.unwrap_or(usual.betas),
                    eps: eps.unwrap_or(usual.eps),
                    weight_decay: weight_decay.unwrap_or(usual.weight_decay),
                })
            }
            "adadelta" => {
                let usual = Adadelta::default();
                Rule::Adadelta(Adadelta {
                    lr: lr.unwrap_or(usual.lr),
                    rho: rho.unwrap_or(usual.rho),
                    eps: eps.unwrap_or(usual.eps),
                    weight_decay: weight_decay.unwrap_or(usual.weight_decay),
                })
            }
            "rmsprop" => {
                let usual = RmsProp::default();
                Rule::RmsProp(RmsProp {
                    lr: lr.unwrap_or(usual.lr),
                    alpha: alpha.unwrap_or(usual.alpha),
                    eps: eps.unwrap_or(usual.eps),
                    momentum: momentum.unwrap_or(usual.momentum),
                    centered: centered.unwrap_or(usual.centered),
                    weight_decay: weight_decay.unwrap_or(usual.weight_decay),
                })
            }
            other => unreachable!("the table of keys lets no optimizer {other} pass"),
        })
    }

    fn groups(&self) -> Vec<Group> {
        let undecayed = Group { of: Members::NormsAndBiases, lr: 1.0, weight_decay: 0.0 };
        match self.optimizer.decay_norms_and_biases {
            Some(false) => vec![undecayed],
            _ => Vec::new(),
        }
    }

    /// How the dataset is presented.
    pub fn view(&self) -> View {
        View {
            pixels: match self.data.pixels.as_deref() {
                Some("unit") => Pixels::Unit,
                _ => Pixels::Standard,
            },
            targets: match self.data.targets.as_deref() {
                Some("inputs") => Targets::Inputs,
                _ => Targets::Own,
            },
            treatment: match fit::image_size(&self.data.name) {
                Some(_) => self.treatment(),
                None => Treatment::default(),
            },
            window: (self.data.name == "text").then(|| self.gpt().context),
        }
    }

    fn treatment(&self) -> Treatment {
        let ImageRecipe {
            size,
            resize,
            flip,
            crop_padding,
            ref crop_border,
            crop_area,
            jitter,
            cutout,
            mixup,
            mean,
            std,
            skip_bad,
        } = self.data.images;
        let [brightness, contrast, saturation, hue] = jitter.unwrap_or_default();
        Treatment {
            size,
            resize,
            crop_padding: crop_padding.unwrap_or(0),
            crop_border: if crop_border.as_deref() == Some("reflect") {
                Border::Reflect
            } else {
                Border::Black
            },
            crop_area,
            flip: flip.unwrap_or(false),
            jitter: Jitter { brightness, contrast, saturation, hue },
            cutout: cutout.unwrap_or(0),
            mixup: mixup.unwrap_or(0.0),
            normalise: (mean.is_some() || std.is_some()).then(|| {
                let floats = |numbers: [f64; 3]| numbers.map(|number| number as f32);
                Normalise { mean: floats(mean.unwrap_or([0.0; 3])), std: floats(std.unwrap_or([1.0; 3])) }
            }),
            augment: if self.data.augment == Some(false) { Augment::Off } else { Augment::On },
            seed: self.train.seed,
            bad: if skip_bad == Some(true) { BadImages::Replace } else { BadImages::Refuse },
        }
    }

    /// Whether the model can tell the classes of a dataset apart, and there are as many weights as classes that it tells apart: only the
    /// dataset knows how many folders it is made of.
    ///
    /// # Errors
    /// The last layer has fewer outputs than there are classes, or another number than there are weights.
    pub fn check_classes(&self, target: Target<'_>) -> Result<(), RecipeError> {
        let (Target::Classes(classes) | Target::Sequence { classes, .. } | Target::Values(&[classes])) =
            target
        else {
            return Ok(());
        };
        let outputs = self.model.head.unwrap_or(classes);
        if classes > outputs {
            let expected = format!("at least {classes}, the classes of the images");
            return Err(RecipeError::bad(&self.name, "model.head", expected, outputs));
        }
        match &self.train.class_weights {
            Some(weights) if weights.len() != outputs => {
                let expected = format!("{outputs} numbers, one for each class that the model tells apart");
                let found = format!("{} of them", weights.len());
                Err(RecipeError::bad(&self.name, "train.class_weights", expected, found))
            }
            _ => Ok(()),
        }
    }

    /// How batches are prepared: what has to be decoded takes longer than a training loop should wait.
    fn loader(&self) -> LoaderOptions {
        const DECODING: usize = 2;
        let usual = if self.data.name == "image-folder" { DECODING } else { 0 };
        LoaderOptions { threads: self.data.threads.unwrap_or(usual), ..LoaderOptions::default() }
    }

    pub(super) fn loss(&self) -> Loss {
        match self.train.loss.as_str() {
            "nll" => Loss::Nll,
            "cross-entropy" => {
                let label_smoothing = self.train.label_smoothing.unwrap_or(0.0);
                match self.train.class_weights.clone() {
                    Some(weights) => Loss::WeightedCrossEntropy(WeightedCrossEntropy {
                        label_smoothing,
                        weights,
                        ..WeightedCrossEntropy::default()
                    }),
                    None => Loss::CrossEntropy { label_smoothing },
                }
            }
            "mse" => Loss::Mse,
            other => unreachable!("the table of keys lets no loss {other} pass"),
        }
    }

    fn metrics(&self) -> Vec<Metric> {
        let metric = |name: &String| match name.as_str() {
            "macro_f1" => Metric::macro_f1(self.classes()),
            "balanced_accuracy" => Metric::balanced_accuracy(self.classes()),
            "mean_absolute_error" => Metric::mean_absolute_error(),
            other => unreachable!("the table of keys lets no metric {other} pass"),
        };
        self.train.metrics.iter().flatten().map(metric).collect()
    }

    pub(super) fn schedule(&self) -> Schedule {
        let ScheduleRecipe { name, step_size, milestones, gamma, floor, epochs, .. } = &self.schedule;
        let gamma = gamma.unwrap_or(GAMMA);
        let curve = match name.as_str() {
            // A plateau follows the evaluations, not the time.
            "constant" | "plateau" => Curve::Constant,
            "step" => Curve::Step { size: step_size.unwrap_or(1.0), gamma },
            "multi-step" => Curve::MultiStep { milestones: milestones.clone().unwrap_or_default(), gamma },
            "cosine" => Curve::Cosine { floor: floor.unwrap_or(0.0), epochs: *epochs },
            "linear" => Curve::Linear { floor: floor.unwrap_or(0.0), epochs: *epochs },
            "inverse-sqrt" => Curve::InverseSqrt,
            "one-cycle" => Curve::OneCycle(self.one_cycle()),
            other => unreachable!("the table of keys lets no schedule {other} pass"),
        };
        let by = match self.schedule.by.as_deref() {
            Some("epoch") => Unit::Epoch,
            _ => Unit::Step,
        };
        let usual = Warmup::default();
        let warmup = Warmup {
            epochs: self.schedule.warmup.unwrap_or(usual.epochs),
            steps: self.schedule.warmup_steps.unwrap_or(usual.steps),
            from: self.schedule.warmup_from.unwrap_or(usual.from),
        };
        Schedule { curve, by, warmup }
    }

    fn one_cycle(&self) -> OneCycle {
        let usual = OneCycle::default();
        let ScheduleRecipe { epochs, pct_start, div_factor, final_div_factor, .. } = self.schedule;
        OneCycle {
            epochs,
            pct_start: pct_start.unwrap_or(usual.pct_start),
            div_factor: div_factor.unwrap_or(usual.div_factor),
            final_div_factor: final_div_factor.unwrap_or(usual.final_div_factor),
            anneal: match self.schedule.anneal.as_deref() {
                Some("linear") => Anneal::Linear,
                _ => Anneal::Cosine,
            },
        }
    }

    pub(super) fn plateau(&self) -> Option<Plateau> {
        let usual = Plateau::default();
        let ScheduleRecipe { gamma, floor, patience, threshold, cooldown, .. } = self.schedule;
        (self.schedule.name == "plateau").then(|| Plateau {
            gamma: gamma.unwrap_or(GAMMA),
            patience: patience.unwrap_or(usual.patience),
            threshold: threshold.unwrap_or(usual.threshold),
            cooldown: cooldown.unwrap_or(usual.cooldown),
            floor: floor.unwrap_or(usual.floor),
        })
    }

    /// How the model is trained.
    ///
    /// # Errors
    /// As [`Recipe::check`].
    pub fn trainer(&self) -> Result<Trainer, RecipeError> {
        self.check()?;
        const MB: f64 = (1 << 20) as f64;
        Ok(Trainer {
            loss: self.loss(),
            epochs: self.train.epochs,
            batch_size: self.train.batch_size,
            logical_shards: self.parallel.logical_shards,
            seed: self.train.seed,
            schedule: self.schedule(),
            plateau: self.plateau(),
            accumulate: self.train.accumulate.unwrap_or(1),
            drop_last: self.train.drop_last.unwrap_or(false),
            graphs: self.train.graphs.unwrap_or(false),
            search: self.train.search.unwrap_or(false),
            precision: match self.train.precision.as_deref() {
                Some("tf32") => Precision::Tf32,
                Some("bfloat16") => Precision::Bfloat16,
                Some("float16") => Precision::Float16,
                _ => Precision::Float32,
            },
            clip: Clip { norm: self.train.clip_norm, value: self.train.clip_value },
            groups: self.groups(),
            on_nan: match self.train.on_nan.as_deref() {
                Some("stop") => OnNan::Stop,
                Some("ignore") => OnNan::Ignore,
                _ => OnNan::Loss,
            },
            ema: self.train.ema,
            sharded: self.sharded(),
            metrics: self.metrics(),
            watch: match self.train.watch.as_deref() {
                None | Some("loss") => Watch::Loss,
                Some("accuracy") => Watch::Accuracy,
                Some(metric) => Watch::Metric(metric.to_owned()),
            },
            patience: self.train.patience,
            loader: self.loader(),
            resident: match self.data.resident.as_deref() {
                Some("always") => Resident::Always,
                Some("never") => Resident::Never,
                _ => Resident::Auto,
            },
            ddp: DdpConfig {
                bucket_bytes: (self.parallel.bucket_mb * MB) as usize,
                first_bucket_bytes: (self.parallel.first_bucket_mb * MB) as usize,
                find_unused: self.parallel.find_unused,
                sync_batch_norm: self.parallel.sync_batch_norm,
                between_gpus: self.between_gpus(),
                compress: match self.parallel.compress.as_deref() {
                    Some("bf16") => Compress::Bf16,
                    Some("fp16") => Compress::Fp16,
                    Some("powersgd") => {
                        let usual = PowerSgdConfig::default();
                        Compress::PowerSgd {
                            rank: self.parallel.rank.unwrap_or(usual.rank),
                            start_step: self.parallel.start_step.unwrap_or(usual.start_step),
                        }
                    }
                    _ => Compress::Nothing,
                },
            },
            ..Trainer::default()
        })
    }

    /// What workers share out among themselves.
    fn sharded(&self) -> Option<FsdpConfig> {
        let sharded = match self.parallel.zero {
            Some(1) => Sharded::States,
            Some(2) => Sharded::Gradients,
            _ => Sharded::Parameters,
        };
        let asked = self.parallel.strategy.as_deref() == Some("fsdp");
        let between_gpus = self.between_gpus();
        let offload = self.parallel.offload;
        asked.then(|| FsdpConfig { sharded, between_gpus, offload, ..FsdpConfig::default() })
    }

    /// How numbers come from one GPU to another.
    fn between_gpus(&self) -> BetweenGpus {
        match self.parallel.between_gpus.as_deref() {
            Some("nccl") => BetweenGpus::Nccl,
            Some("host") => BetweenGpus::Host,
            _ => BetweenGpus::Best,
        }
    }

    /// When checkpoints are taken, and this recipe written down in them. They go into the folder `dir`.
    pub fn checkpoint(&self, dir: PathBuf) -> CheckpointConfig {
        let usual = CheckpointConfig::new(dir);
        let TrainRecipe { checkpoint_every, checkpoint_minutes, keep, ref checkpoint, .. } = self.train;
        let parts = checkpoint.as_deref() == Some("parts");
        let every = match (checkpoint_every, checkpoint_minutes) {
            (Some(steps), _) => Every::Steps(steps),
            // So long that it is no time any more is never.
            (None, Some(minutes)) => {
                Every::Time(Duration::try_from_secs_f64(60.0 * minutes).unwrap_or(Duration::MAX))
            }
            (None, None) => usual.every,
        };
        let keep = keep.map_or(usual.keep, |keep| keep as usize);
        CheckpointConfig { every, keep, parts, recipe: Some(self.to_toml()), ..usual }
    }
}
