//! Where a recipe's model lies, and how a worker makes its passes: what `parallel.strategy` and the keys beside it stand for.

use super::keys::LANGUAGE;
use super::{ParallelRecipe, Recipe, RecipeError};
use crate::error::Error;
use phalanx_data::BYTES;
use phalanx_nn::models::{Autoencoder, MnistHpcNet, MnistNet};
use phalanx_nn::{Ctx, Module, Parameters};
use phalanx_parallel::pipeline::{
    CutError, PipelineConfig, Schedule, ScheduleKind, Shape, Timeline, Times, cut, measure,
};
use phalanx_parallel::{
    Axis, Between, Bound, By, DataParallelConfig, DdpConfig, LocalConfig, ModelParallelConfig, Placed, Plan,
    Recomputed, StagesConfig,
};
use phalanx_tensor::{DType, Device, Philox, Tensor};
use std::ops::Range;
use std::sync::Arc;

/// A model where it is to be trained.
pub struct LaidOut {
    /// The model.
    pub model: Box<dyn Module>,
    /// Its parameters, without values yet.
    pub parameters: Parameters,
    /// How a worker makes its passes.
    pub local: LocalConfig,
    /// How each replica lies on several workers, if it does.
    pub mesh: Option<ModelParallelConfig>,
    /// Where a pipeline over devices was cut by measured times: what they were, and what is to be expected of it.
    pub foretold: Option<String>,
}

/// Devices of a worker, unless the recipe says otherwise.
const DEVICES: usize = 2;
/// Micro-batches of a pipeline's pass, unless the recipe says otherwise.
const MICRO_BATCHES: usize = 4;
/// Samples that blocks are measured with: of a single one a batch norm may see one value, of which it makes nothing. Whether training can
/// do with so few is asked when that begins.
const LEAST_MEASURED: usize = 2;
const MOST_MEASURED: usize = 64;
/// The fewest channels that lie between two convolutions of a residual network.
const CHANNELS: usize = 64;
const MIB: f64 = (1 << 20) as f64;

/// Who says that a value can't be, of a recipe that comes from here.
#[derive(Clone, Copy)]
struct Refused<'a>(&'a str);

impl Refused<'_> {
    fn value(self, key: &str, expected: impl Into<String>, found: impl ToString) -> Result<(), RecipeError> {
        Err(RecipeError::bad(self.0, key, expected, found))
    }
}

impl Recipe {
    /// The model on the devices that the recipe asks for, of which `device` is the first; the others are of its kind and get their
    /// share of its threads. Images have the shape `input_dims`.
    ///
    /// # Errors
    /// As [`Recipe::check`]; or the model has too few blocks for the devices, or for those that are to be computed again, or the devices
    /// are GPUs of one process.
    pub fn lay_out(&self, device: &Device, input_dims: &[usize]) -> Result<LaidOut, Error> {
        let mut model = self.model()?;
        let seed = self.train.seed;
        let n = self.parallel.devices.unwrap_or(DEVICES);
        let again = self.computed_again(model.blocks())?;
        let whole = |model: Box<dyn Module>, local| {
            let mut model = recomputed(model, again.clone());
            let parameters = Parameters::lay_out(&mut model, device, seed);
            Ok(LaidOut { model, parameters, local, mesh: None, foretold: None })
        };
        self.check_cut(model.blocks())?;
        if self.lies_on_mesh() {
            let stages = self.parallel.pipeline.unwrap_or(1) * self.schedule_of_pipeline().1;
            let blocks = match stages {
                1 => Stages::default(),
                stages => self.stages(&mut model, stages, device, input_dims)?,
            };
            let mesh = Some(self.model_parallel(model.blocks(), blocks.blocks, again.clone()));
            return whole(model, LocalConfig::Whole).map(|laid_out| LaidOut { mesh, ..laid_out });
        }
        match self.parallel.strategy.as_deref() {
            Some("dp") => {
                let recipe = self.clone();
                // What is checked stays so.
                let of_copy = again.clone();
                let model_of = move || recipe.model().expect("a recipe that was checked has a model");
                let copy = move || recomputed(model_of(), of_copy.clone());
                let config = DataParallelConfig { others: others(device, n)?, model: Arc::new(copy) };
                whole(model, LocalConfig::DataParallel(config))
            }
            Some("place") => {
                let devices = all(device, others(device, n)?);
                let stages = self.stages(&mut model, n, device, input_dims)?;
                let mut model = Placed::new(model, stages.blocks.into_iter().zip(devices).collect())?;
                let parameters = model.lay_out(seed);
                let model = recomputed(Box::new(model), again.clone());
                Ok(LaidOut { model, parameters, local: LocalConfig::Whole, mesh: None, foretold: None })
            }
            Some("pipeline") => {
                let (kind, chunks) = self.schedule_of_pipeline();
                let devices = all(device, others(device, n)?);
                let stages = self.stages(&mut model, n * chunks, device, input_dims)?;
                let foretold = stages.foretold(self)?;
                let blocks = stages.blocks;
                let places = blocks.iter().cloned().zip(devices.iter().cloned().cycle()).collect();
                let mut model = Placed::new(model, places)?;
                let parameters = model.lay_out(seed);
                let micro_batches = self.micro_batches();
                let config = PipelineConfig { blocks, devices, kind, micro_batches };
                let model = recomputed(Box::new(model), again.clone());
                let local = LocalConfig::Pipeline(config);
                Ok(LaidOut { model, parameters, local, mesh: None, foretold })
            }
            _ => whole(model, LocalConfig::Whole),
        }
    }

    /// Whether each replica lies on several workers, or shards on some of them.
    pub fn lies_on_mesh(&self) -> bool {
        !self.axes().is_empty()
    }

    /// The axes of the mesh that a recipe asks for.
    fn axes(&self) -> Vec<(Axis, usize)> {
        let ParallelRecipe { pipeline, tensor, context, shard, .. } = self.parallel;
        let sizes = [
            (Axis::Pipeline, pipeline),
            (Axis::Context, context),
            (Axis::Tensor, tensor),
            (Axis::Shard, shard),
        ];
        let used = |(axis, size): (Axis, Option<usize>)| Some((axis, size.filter(|&size| size > 1)?));
        sizes.into_iter().filter_map(used).collect()
    }

    /// Refuses what the model's blocks and the number of workers don't go with.
    ///
    /// # Errors
    /// There is no such mesh, and the message names the nearest one; there are fewer blocks than stages; or the recipe names blocks that the model doesn't have. Or as
    /// [`Recipe::check`].
    pub fn check_workers(&self, workers: usize) -> Result<(), Error> {
        let model = self.model()?;
        self.computed_again(model.blocks())?;
        if self.lies_on_mesh() {
            let mesh = self.model_parallel(model.blocks(), Vec::new(), None).mesh(workers);
            mesh.map_err(phalanx_parallel::Error::from)?;
        } else if matches!(self.parallel.strategy.as_deref(), Some("place" | "pipeline")) {
            let (blocks, stages) = (model.blocks(), self.stage_count());
            if stages > blocks {
                return Err(phalanx_parallel::Error::from(CutError::FewBlocks { stages, blocks }).into());
            }
        }
        Ok(self.check_cut(model.blocks())?)
    }

    /// How replicas of a model of so many blocks lie on workers, with these blocks in each stage.
    fn model_parallel(
        &self,
        blocks: usize,
        stages: Vec<Range<usize>>,
        again: Option<Again>,
    ) -> ModelParallelConfig {
        let divides = |by: usize, what| Bound { axis: Axis::Tensor, by: By::Divides(by), what };
        let (gpt, (kind, chunks)) = (self.gpt(), self.schedule_of_pipeline());
        let is_gpt = LANGUAGE.contains(&&*self.model.name);
        let sequence = self.parallel.sequence == Some(true);
        let mut bounds = vec![Bound {
            axis: Axis::Pipeline,
            by: By::AtMost(blocks / chunks),
            what: match chunks {
                1 => "blocks of the model",
                _ => "times as many blocks as a worker has stages",
            },
        }];
        if kind == ScheduleKind::Interleaved {
            let by = By::Divides(self.micro_batches());
            bounds.push(Bound { axis: Axis::Pipeline, by, what: "micro-batches, in turns of all workers" });
        }
        if is_gpt {
            bounds.extend([divides(gpt.heads, "heads"), divides(BYTES, "words")]);
            bounds.push(Bound { axis: Axis::Context, by: By::Divides(gpt.context), what: "positions" });
            let by = By::DividesWith(Axis::Context, gpt.context);
            bounds.extend(sequence.then_some(Bound {
                axis: Axis::Tensor,
                by,
                what: "positions of a stretch",
            }));
        }
        bounds.extend(self.narrowest().map(|(numbers, what)| divides(numbers, what)));
        let recipe = self.clone();
        let model_of = move || recipe.model().expect("a recipe that was checked has a model");
        ModelParallelConfig {
            mesh: self.axes(),
            bounds,
            model: Arc::new(move || recomputed(model_of(), again.clone())),
            plan: self.plan(),
            stages: (!stages.is_empty()).then(|| StagesConfig {
                blocks: stages,
                kind,
                micro_batches: self.micro_batches(),
            }),
            // The trainer says.
            ddp: DdpConfig::default(),
            sharded: None,
            replays: false,
        }
    }

    /// How the layers of the model are cut under `parallel.tensor`, if they can be.
    fn plan(&self) -> Option<Plan> {
        let between = match self.parallel.sequence {
            Some(true) => Between::Sequence,
            _ => Between::Whole,
        };
        match &*self.model.name {
            "mnist" => Some(Plan::of_mnist()),
            "mnist-hpc" => Some(Plan::of_mnist_hpc()),
            "autoencoder" => Some(Plan::of_autoencoder()),
            "resnet9" => Some(Plan::of_resnet9()),
            name if LANGUAGE.contains(&name) => Some(Plan::of_gpt(self.gpt().heads, between)),
            _ => self.depth().map(Plan::of_resnet),
        }
    }

    /// What lies between two layers that are cut together, where that is least: workers have equally many of it.
    fn narrowest(&self) -> Option<(usize, &'static str)> {
        match &*self.model.name {
            "mnist" => Some((MnistNet::DENSE, "outputs of the first dense layer")),
            "mnist-hpc" => Some((MnistHpcNet::DENSE, "outputs of the first dense layer")),
            "autoencoder" => Some((Autoencoder::NARROWEST, "numbers of the narrowest layer")),
            "resnet9" => Some((CHANNELS, "channels of the narrowest blocks")),
            _ => self.depth().map(|_| (CHANNELS, "channels of the narrowest blocks")),
        }
    }

    /// Refuses stages that don't have each of so many blocks.
    fn check_cut(&self, blocks: usize) -> Result<(), RecipeError> {
        match &self.parallel.cut {
            Some(cut) if cut.iter().sum::<f64>() != blocks as f64 => {
                let expected =
                    format!("numbers whose sum is {blocks}, the blocks of the model {}", self.model.name);
                Err(RecipeError::bad(&self.name, "parallel.cut", expected, format!("{cut:?}")))
            }
            _ => Ok(()),
        }
    }

    /// What of a model of so many blocks is computed again, if anything is.
    fn computed_again(&self, blocks: usize) -> Result<Option<Again>, RecipeError> {
        let ParallelRecipe { recompute, recompute_blocks, .. } = &self.parallel;
        match recompute.as_deref() {
            Some("blocks") => {}
            Some("cheap") => return Ok(Some(Again::Cheap)),
            _ => return Ok(None),
        }
        match recompute_blocks {
            None if blocks < 2 => {
                let expected = format!("none for the model {}, which is a single block", self.model.name);
                Err(RecipeError::bad(&self.name, "parallel.recompute", expected, "blocks"))
            }
            None => Ok(Some(Again::Blocks(0..blocks - 1))),
            Some([start, end]) if *end > blocks as f64 => {
                let expected = format!("within the {blocks} blocks of the model {}", self.model.name);
                let found = format!("[{start}, {end}]");
                Err(RecipeError::bad(&self.name, "parallel.recompute_blocks", expected, found))
            }
            Some([start, end]) => Ok(Some(Again::Blocks(*start as usize..*end as usize))),
        }
    }

    /// What somebody who chose this strategy should know, if there is something.
    pub fn advice(&self) -> Option<&'static str> {
        (self.parallel.strategy.as_deref() == Some("dp")).then_some(
            "the strategy dp copies the model to each device in every pass: as many workers with --strategy ddp are faster (MNIST's network, 64 samples, two cores: 1.71 ms a step by dp, 1.56 by ddp; docs/parallel.md has the machine)",
        )
    }

    /// Refuses devices and micro-batches that can't be, as far as that is known without data.
    pub(super) fn check_parallel(&self, origin: &str) -> Result<(), RecipeError> {
        let refused = Refused(origin);
        self.check_strategy(refused)?;
        self.check_mesh(refused)?;
        self.check_recomputed(refused)?;
        self.check_stages(refused)?;
        self.check_schedule(refused)
    }

    /// How ranks bring gradients together, or share out a model.
    fn check_strategy(&self, refused: Refused<'_>) -> Result<(), RecipeError> {
        let strategy = self.strategy();
        let ParallelRecipe { between_gpus, compress, logical_shards, .. } = &self.parallel;
        if let Some(nccl) = between_gpus.as_ref().filter(|word| *word == "nccl") {
            let key = "parallel.between_gpus";
            if compress.as_ref().is_some_and(|word| word != "none") {
                return refused.value(key, "best or host beside parallel.compress", nccl);
            }
            if logical_shards.is_some() {
                return refused.value(key, "best or host beside parallel.logical_shards", nccl);
            }
        }
        let splits = matches!(strategy, "dp" | "pipeline");
        if splits && self.parallel.sync_batch_norm {
            let expected = format!("false under the strategy {strategy}");
            return refused.value("parallel.sync_batch_norm", expected, true);
        }
        if splits && let Some(shards) = logical_shards {
            let expected = format!("left out under the strategy {strategy}");
            return refused.value("parallel.logical_shards", expected, shards);
        }
        let usual = ParallelRecipe::default();
        let buckets = [
            ("parallel.bucket_mb", self.parallel.bucket_mb, usual.bucket_mb),
            ("parallel.first_bucket_mb", self.parallel.first_bucket_mb, usual.first_bucket_mb),
        ];
        let changed = buckets.into_iter().find(|(_, size, usual)| size != usual);
        let without = match (strategy, logical_shards) {
            ("fsdp", _) => Some("under the strategy fsdp"),
            (_, Some(_)) => Some("beside parallel.logical_shards"),
            _ => None,
        };
        if let (Some((key, size, _)), Some(without)) = (changed, without) {
            return refused.value(key, format!("left out {without}, which has no buckets"), size);
        }
        if strategy == "fsdp" {
            self.check_sharded(refused)?;
        }
        if self.train.checkpoint.as_deref() == Some("parts") && strategy != "fsdp" && !self.lies_on_mesh() {
            return refused.value("train.checkpoint", "whole where each worker has a whole model", "parts");
        }
        Ok(())
    }

    /// What goes with the strategy fsdp.
    fn check_sharded(&self, refused: Refused<'_>) -> Result<(), RecipeError> {
        self.needs_whole(refused, "under the strategy fsdp")?;
        if self.parallel.find_unused {
            let expected = "false under the strategy fsdp, where it changes nothing";
            return refused.value("parallel.find_unused", expected, true);
        }
        if self.parallel.offload && self.parallel.zero.is_some_and(|stage| stage < 3) {
            let expected = "false where fsdp doesn't share out parameters, or parallel.zero=3";
            return refused.value("parallel.offload", expected, true);
        }
        Ok(())
    }

    /// Refuses what can be had only where each worker has a whole model.
    fn needs_whole(&self, refused: Refused<'_>, beside: &str) -> Result<(), RecipeError> {
        let ParallelRecipe { sync_batch_norm, logical_shards, compress, .. } = &self.parallel;
        if *sync_batch_norm {
            return refused.value("parallel.sync_batch_norm", format!("false {beside}"), true);
        }
        if let Some(shards) = logical_shards {
            return refused.value("parallel.logical_shards", format!("left out {beside}"), shards);
        }
        match compress.as_ref().filter(|word| *word != "none") {
            Some(compress) => refused.value("parallel.compress", format!("none {beside}"), compress),
            None => Ok(()),
        }
    }

    /// Parts of matrices and of sequences.
    fn check_mesh(&self, refused: Refused<'_>) -> Result<(), RecipeError> {
        let (model, is_gpt) = (&self.model.name, LANGUAGE.contains(&&*self.model.name));
        if let Some(tensor) = self.parallel.tensor.filter(|&tensor| tensor > 1 && self.plan().is_none()) {
            let expected = format!("left out for the model {model}, which isn't cut so far");
            return refused.value("parallel.tensor", expected, tensor);
        }
        if self.parallel.sequence == Some(true) && self.parallel.tensor.is_none_or(|tensor| tensor == 1) {
            return refused.value("parallel.sequence", "false without parallel.tensor", true);
        }
        if self.parallel.sequence == Some(true) && !is_gpt {
            let expected = format!("false for the model {model}, which knows no sequences");
            return refused.value("parallel.sequence", expected, true);
        }
        if let Some(context) = self.parallel.context.filter(|&context| context > 1 && !is_gpt) {
            let expected = format!("left out for the model {model}, which knows no sequences");
            return refused.value("parallel.context", expected, context);
        }
        if self.lies_on_mesh() {
            self.needs_whole(refused, "where replicas lie on several workers")?;
        }
        if matches!(self.strategy(), "ddp" | "fsdp") && self.parallel.pipeline.unwrap_or(1) == 1 {
            let ParallelRecipe { cut, stage_mb, schedule, chunks, micro_batches, .. } = &self.parallel;
            let given = [
                ("parallel.cut", cut.as_ref().map(|cut| format!("{cut:?}"))),
                ("parallel.stage_mb", stage_mb.map(|mb| mb.to_string())),
                ("parallel.schedule", schedule.clone()),
                ("parallel.chunks", chunks.map(|chunks| chunks.to_string())),
                ("parallel.micro_batches", micro_batches.map(|n| n.to_string())),
            ];
            if let Some((key, found)) = given.into_iter().find_map(|(key, given)| Some((key, given?))) {
                let expected = "left out without --strategy pipeline or parallel.pipeline";
                return refused.value(key, expected, found);
            }
        }
        Ok(())
    }

    fn check_recomputed(&self, refused: Refused<'_>) -> Result<(), RecipeError> {
        let Some([start, end]) = self.parallel.recompute_blocks else { return Ok(()) };
        let whole = start.fract() == 0.0 && end.fract() == 0.0;
        if whole && start < end && self.parallel.recompute.as_deref() == Some("blocks") {
            return Ok(());
        }
        let expected = "two rising whole numbers beside parallel.recompute=blocks";
        refused.value("parallel.recompute_blocks", expected, format!("[{start}, {end}]"))
    }

    /// Where a model is cut.
    fn check_stages(&self, refused: Refused<'_>) -> Result<(), RecipeError> {
        let strategy = self.strategy();
        let cuts = matches!(strategy, "place" | "pipeline");
        if cuts && LANGUAGE.contains(&&*self.model.name) && self.model.tied != Some(false) {
            // The table of words would have to be on the first device and on the last.
            return refused.value("model.tied", format!("false under the strategy {strategy}"), true);
        }
        let Some(cut) = &self.parallel.cut else { return Ok(()) };
        if let Some(mb) = self.parallel.stage_mb {
            return refused.value("parallel.stage_mb", "left out beside parallel.cut", mb);
        }
        let stages = self.stage_count();
        let whole = cut.iter().all(|&blocks| blocks.fract() == 0.0);
        if cut.len() != stages || !whole {
            let expected = format!("{stages} whole numbers, the blocks of each stage");
            let typed: Vec<String> = cut.iter().map(f64::to_string).collect();
            return refused.value("parallel.cut", expected, format!("[{}]", typed.join(", ")));
        }
        Ok(())
    }

    /// How micro-batches go through the stages.
    fn check_schedule(&self, refused: Refused<'_>) -> Result<(), RecipeError> {
        let (kind, chunks) = self.schedule_of_pipeline();
        if kind == ScheduleKind::Interleaved {
            let (holders, n) = (self.stage_holders(), self.micro_batches());
            if !n.is_multiple_of(holders) {
                let what = if self.parallel.pipeline.unwrap_or(1) > 1 { "workers" } else { "devices" };
                let expected = format!("a multiple of {holders}, the {what}, under interleaved");
                return refused.value("parallel.micro_batches", expected, n);
            }
        } else if chunks > 1 {
            return refused.value("parallel.chunks", format!("1 under the schedule {kind}"), chunks);
        }
        Ok(())
    }

    fn strategy(&self) -> &str {
        self.parallel.strategy.as_deref().unwrap_or("ddp")
    }

    /// How many devices or workers hold the stages of a model.
    fn stage_holders(&self) -> usize {
        match self.parallel.pipeline {
            Some(workers) if workers > 1 => workers,
            _ => self.parallel.devices.unwrap_or(DEVICES),
        }
    }

    fn stage_count(&self) -> usize {
        self.stage_holders() * self.schedule_of_pipeline().1
    }

    fn micro_batches(&self) -> usize {
        self.parallel.micro_batches.unwrap_or(MICRO_BATCHES)
    }

    fn schedule_of_pipeline(&self) -> (ScheduleKind, usize) {
        let kind = self.parallel.schedule.as_deref().map(str::parse);
        let kind = kind.map_or(ScheduleKind::OneFOneB, |kind| {
            kind.unwrap_or_else(|_| unreachable!("the table of keys lets no other schedule pass"))
        });
        let usual = if kind == ScheduleKind::Interleaved { 2 } else { 1 };
        (kind, self.parallel.chunks.unwrap_or(usual))
    }

    /// Whether blocks are computed as they are measured: in float32, and once.
    fn computes_as_measured(&self) -> bool {
        self.parallel.recompute.is_none()
            && self.train.precision.as_deref().is_none_or(|precision| precision == "float32")
    }

    /// The blocks of each stage: as the recipe says, or such that the slowest stage is as fast as can be.
    fn stages(
        &self,
        model: &mut dyn Module,
        stages: usize,
        device: &Device,
        input_dims: &[usize],
    ) -> Result<Stages, Error> {
        if let Some(lengths) = &self.parallel.cut {
            let mut end = 0;
            let next = |&length: &f64| {
                let start = end;
                end += length as usize;
                start..end
            };
            return Ok(Stages { blocks: lengths.iter().map(next).collect(), measured: None });
        }
        let parts = if self.parallel.strategy.as_deref() == Some("place") { 1 } else { self.micro_batches() };
        // Times tell enough of fewer samples, and memory of all alone.
        let most = if self.parallel.stage_mb.is_some() { usize::MAX } else { MOST_MEASURED };
        let samples = (self.train.batch_size / parts).clamp(LEAST_MEASURED, most);
        let dims = [&[samples], input_dims].concat();
        let here = Device::cpu(1);
        let input = if LANGUAGE.contains(&&*self.model.name) {
            Tensor::zeros(&here, dims.as_slice(), DType::I64)
        } else {
            Tensor::uniform(&here, dims.as_slice(), 0.0, 1.0, DType::F32, Philox::new(0, 0))
        };
        let ctx = Ctx::train(0, 0, (0..samples as u64).collect());
        let costs = measure(model, device.threads(), &input, &ctx);
        let most = self.parallel.stage_mb.map(|mb| (mb * MIB) as usize);
        let blocks = cut(&costs, stages, most).map_err(phalanx_parallel::Error::from)?;
        tracing::debug!("blocks take {costs:?} and are cut into {blocks:?}");
        let seconds = |stage: &Range<usize>| costs[stage.clone()].iter().map(|cost| cost.seconds).sum();
        let seconds: Vec<f64> = blocks.iter().map(seconds).collect();
        Ok(Stages { measured: self.computes_as_measured().then_some((samples, seconds)), blocks })
    }
}

/// How a model is cut.
#[derive(Default)]
struct Stages {
    /// The blocks of each stage.
    blocks: Vec<Range<usize>>,
    /// How many samples were measured, and what each stage takes for them, forward and backward, if it does what was measured.
    measured: Option<(usize, Vec<f64>)>,
}

impl Stages {
    /// What a pipeline of them makes of their times. Fails if there is no such schedule.
    fn foretold(&self, recipe: &Recipe) -> Result<Option<String>, Error> {
        let (kind, chunks) = recipe.schedule_of_pipeline();
        let (ranks, micro_batches) = (self.blocks.len() / chunks, recipe.micro_batches());
        let schedule = Schedule::new(kind, Shape { ranks, chunks, micro_batches });
        let schedule = schedule.map_err(phalanx_parallel::Error::from)?;
        let Some((samples, seconds)) = &self.measured else { return Ok(None) };
        let times_as_fast = |seconds: &[f64]| {
            let timeline = Timeline::foretell(&schedule, seconds, Times::EQUAL);
            timeline.busy() / timeline.length()
        };
        let equal = vec![1.0; seconds.len()];
        let list = |of: &dyn Fn(usize) -> String| (0..seconds.len()).map(of).collect::<Vec<_>>().join(", ");
        Ok(Some(format!(
            "stages of blocks {} take {} ms for {samples} samples, measured one at a time: by {kind} they are {:.2} times as fast as in turn, and equal ones would be {:.2} times",
            list(&|i| format!("{} to {}", self.blocks[i].start, self.blocks[i].end - 1)),
            list(&|i| format!("{:.2}", 1e3 * seconds[i])),
            times_as_fast(seconds),
            times_as_fast(&equal),
        )))
    }
}

/// What is computed again in the backward pass.
#[derive(Clone)]
enum Again {
    /// What costs little.
    Cheap,
    /// These blocks.
    Blocks(Range<usize>),
}

/// The model with this computed again.
fn recomputed(model: Box<dyn Module>, again: Option<Again>) -> Box<dyn Module> {
    match again {
        Some(Again::Blocks(blocks)) => Box::new(Recomputed::new(model, blocks)),
        Some(Again::Cheap) => Box::new(Recomputed::cheap(model)),
        None => model,
    }
}

/// The devices of a worker beside its first. Each has its share of the worker's threads, also where they compute in turn: a device
/// is as much of the machine, whatever the others do.
fn others(device: &Device, n: usize) -> Result<Vec<Device>, Error> {
    if device.gpu().is_some() {
        let device = format!("{device:?}");
        return Err(phalanx_parallel::Error::PlacedGpu { device }.into());
    }
    let threads = (device.threads() / n).max(1);
    device.set_threads(threads);
    Ok((1..n).map(|_| Device::cpu(threads)).collect())
}

fn all(device: &Device, others: Vec<Device>) -> Vec<Device> {
    let mut devices = vec![device.clone()];
    devices.extend(others);
    devices
}
