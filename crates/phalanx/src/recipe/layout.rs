//! Where a recipe's model lies, and how a worker makes its passes: what `parallel.strategy` and the keys beside it stand for.

use super::keys::LANGUAGE;
use super::{Recipe, RecipeError};
use crate::error::Error;
use phalanx_nn::{Ctx, Module, Parameters};
use phalanx_parallel::pipeline::{PipelineConfig, ScheduleKind, cut, measure};
use phalanx_parallel::{DataParallelConfig, LocalConfig, Placed};
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
}

/// Devices of a worker, unless the recipe says otherwise.
const DEVICES: usize = 2;
/// Micro-batches of a pipeline's pass, unless the recipe says otherwise.
const MICRO_BATCHES: usize = 4;
/// Samples that blocks are measured with.
const MOST_MEASURED: usize = 64;

impl Recipe {
    /// The model on the devices that the recipe asks for, of which `device` is the first; the others are of its kind and get their
    /// share of its threads. Images have the shape `input_dims`.
    ///
    /// # Errors
    /// As [`Recipe::check`]; or the model has too few blocks for the devices, or these are GPUs of one process.
    pub fn lay_out(&self, device: &Device, input_dims: &[usize]) -> Result<LaidOut, Error> {
        let mut model = self.model()?;
        let seed = self.train.seed;
        let n = self.parallel.devices.unwrap_or(DEVICES);
        let whole = |mut model: Box<dyn Module>, local| {
            let parameters = Parameters::lay_out(&mut model, device, seed);
            Ok(LaidOut { model, parameters, local })
        };
        match self.parallel.strategy.as_deref() {
            Some("dp") => {
                let recipe = self.clone();
                // What is checked stays so.
                let copy = move || recipe.model().expect("a recipe that was checked has a model");
                let config = DataParallelConfig { others: others(device, n)?, model: Arc::new(copy) };
                whole(model, LocalConfig::DataParallel(config))
            }
            Some("place") => {
                let devices = all(device, others(device, n)?);
                let stages = self.stages(&mut model, n, device, input_dims)?;
                let mut model = Placed::new(model, stages.into_iter().zip(devices).collect())?;
                let parameters = model.lay_out(seed);
                Ok(LaidOut { model: Box::new(model), parameters, local: LocalConfig::Whole })
            }
            Some("pipeline") => {
                let (kind, chunks) = self.schedule_of_pipeline();
                let devices = all(device, others(device, n)?);
                let blocks = self.stages(&mut model, n * chunks, device, input_dims)?;
                let places = blocks.iter().cloned().zip(devices.iter().cloned().cycle()).collect();
                let mut model = Placed::new(model, places)?;
                let parameters = model.lay_out(seed);
                let micro_batches = self.micro_batches();
                let config = PipelineConfig { blocks, devices, kind, micro_batches };
                config.schedule()?;
                Ok(LaidOut { model: Box::new(model), parameters, local: LocalConfig::Pipeline(config) })
            }
            _ => whole(model, LocalConfig::Whole),
        }
    }

    /// What somebody who chose this strategy should know, if there is something.
    pub fn advice(&self) -> Option<&'static str> {
        (self.parallel.strategy.as_deref() == Some("dp")).then_some(
            "the strategy dp copies the model to each device in every pass: as many workers with --strategy ddp are faster (docs/parallel.md says by how much)",
        )
    }

    /// Refuses devices and micro-batches that can't be, as far as that is known without data.
    pub(super) fn check_parallel(&self, origin: &str) -> Result<(), RecipeError> {
        let refuse = |key: &str, expected: String, found: String| {
            let (origin, key) = (origin.to_owned(), key.to_owned());
            Err(RecipeError::BadValue { origin, key, expected, found, nearest: None })
        };
        let strategy = self.parallel.strategy.as_deref().unwrap_or("ddp");
        let splits = matches!(strategy, "dp" | "pipeline");
        if splits && self.parallel.sync_batch_norm {
            return refuse(
                "parallel.sync_batch_norm",
                format!("false under the strategy {strategy}"),
                "true".into(),
            );
        }
        if splits && let Some(shards) = self.parallel.logical_shards {
            let expected = format!("left out under the strategy {strategy}");
            return refuse("parallel.logical_shards", expected, shards.to_string());
        }
        if strategy == "fsdp" {
            let beside = |what: &str| format!("{what} under the strategy fsdp");
            if self.parallel.sync_batch_norm {
                return refuse("parallel.sync_batch_norm", beside("false"), "true".into());
            }
            if let Some(shards) = self.parallel.logical_shards {
                return refuse("parallel.logical_shards", beside("left out"), shards.to_string());
            }
            if let Some(compress) = self.parallel.compress.as_ref().filter(|word| *word != "none") {
                return refuse("parallel.compress", beside("none"), compress.clone());
            }
            if let Some(ema) = self.train.ema.filter(|_| self.parallel.zero.is_none_or(|stage| stage == 3)) {
                let expected = "left out where fsdp shares out parameters, or parallel.zero=2".to_owned();
                return refuse("train.ema", expected, ema.to_string());
            }
        }
        let cuts = matches!(strategy, "place" | "pipeline");
        if cuts && LANGUAGE.contains(&&*self.model.name) && self.model.tied != Some(false) {
            // The table of words would have to be on the first device and on the last.
            return refuse("model.tied", format!("false under the strategy {strategy}"), "true".into());
        }
        if let Some(cut) = &self.parallel.cut {
            let devices = self.parallel.devices.unwrap_or(DEVICES);
            let stages = devices * self.schedule_of_pipeline().1;
            let whole = cut.iter().all(|&blocks| blocks.fract() == 0.0);
            if cut.len() != stages || !whole {
                let expected = format!("{stages} whole numbers, the blocks of each stage");
                return refuse("parallel.cut", expected, format!("{cut:?}"));
            }
        }
        let (kind, chunks) = self.schedule_of_pipeline();
        if kind == ScheduleKind::Interleaved {
            let (devices, n) = (self.parallel.devices.unwrap_or(DEVICES), self.micro_batches());
            if !n.is_multiple_of(devices) {
                let expected = format!("a multiple of {devices}, the devices, under interleaved");
                return refuse("parallel.micro_batches", expected, n.to_string());
            }
        } else if chunks > 1 {
            return refuse("parallel.chunks", format!("1 under the schedule {kind}"), chunks.to_string());
        }
        Ok(())
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

    /// The blocks of each stage: as the recipe says, or such that the slowest stage is as fast as can be.
    fn stages(
        &self,
        model: &mut dyn Module,
        stages: usize,
        device: &Device,
        input_dims: &[usize],
    ) -> Result<Vec<Range<usize>>, Error> {
        if let Some(lengths) = &self.parallel.cut {
            let mut end = 0;
            let next = |&length: &f64| {
                let start = end;
                end += length as usize;
                start..end
            };
            return Ok(lengths.iter().map(next).collect());
        }
        let samples = (self.train.batch_size / self.micro_batches()).clamp(1, MOST_MEASURED);
        let dims = [&[samples], input_dims].concat();
        let here = Device::cpu(1);
        let input = if LANGUAGE.contains(&&*self.model.name) {
            Tensor::zeros(&here, dims.as_slice(), DType::I64)
        } else {
            Tensor::uniform(&here, dims.as_slice(), 0.0, 1.0, DType::F32, Philox::new(0, 0))
        };
        let ctx = Ctx::train(0, 0, (0..samples as u64).collect());
        let costs = measure(model, device.threads(), &input, &ctx);
        let blocks = cut(&costs, stages, None).map_err(phalanx_parallel::Error::from)?;
        tracing::debug!("blocks take {costs:?} and are cut into {blocks:?}");
        Ok(blocks)
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
