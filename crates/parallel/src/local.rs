//! One pass of one rank: forward and backward over its share of the samples, on the devices that it has.
//!
//! Strategies say how ranks share the work; how a rank does its part is behind [`Local`]: on one device, or wherever a placed
//! model's blocks lie, in one go ([`Whole`]), through a pipeline ([`crate::pipeline::Pipelined`]), or on copies of the model
//! ([`crate::DataParallel`]).

use crate::error::Error;
use crate::evaluation::{EvalPass, Judge};
use crate::pipeline::{PipelineConfig, Pipelined};
use crate::replicas::{DataParallel, DataParallelConfig};
use crate::strategy::Sync;
use phalanx_nn::{Ctx, Loss, Module, Parameters};
use phalanx_tensor::{DType, GradSink, Later, SumOverBatch, Tensor, backward};

/// A pass that is to be made.
pub struct Pass<'a> {
    /// The model.
    pub model: &'a dyn Module,
    /// Its parameters.
    pub parameters: &'a Parameters,
    /// How outputs are held against targets.
    pub loss: Loss,
    /// This rank's samples, a row each; there may be none.
    pub input: Tensor,
    /// What they are to become.
    pub target: Tensor,
    /// The pass, which names the samples.
    pub ctx: Ctx,
    /// What the gradients of the samples' mean loss count: the share of these samples in all samples of the step, times the loss scale where
    /// there is one.
    pub weight: f64,
    /// Whether the step's gradients are whole after it.
    pub sync: Sync,
}

/// The mean loss of a pass over this rank's samples, 0 without any.
pub enum PassLoss {
    /// It is known.
    Known(f64),
    /// A GPU was given the pass, and brings the loss.
    Coming {
        /// Where the loss will lie: a single f32, until the pass after this one.
        on_gpu: Tensor,
        /// The number.
        later: Later,
    },
}

impl PassLoss {
    /// That of a pass that was given to a device.
    pub(crate) fn of(loss: Tensor) -> PassLoss {
        match loss.device().gpu() {
            Some(_) => {
                let on_gpu = loss.detach().cast(DType::F32);
                PassLoss::Coming { later: on_gpu.item_later(), on_gpu }
            }
            None => PassLoss::Known(loss.item()),
        }
    }

    /// The number, once it is here.
    pub fn item(self) -> f64 {
        match self {
            PassLoss::Known(loss) => loss,
            PassLoss::Coming { later, .. } => later.item(),
        }
    }
}

impl Pass<'_> {
    /// How many samples it has.
    pub fn samples(&self) -> usize {
        self.input.dim(0)
    }

    /// The forward pass: the mean loss; none without samples. A pass without samples is made all the same where others wait for
    /// its part of their statistics.
    pub(crate) fn forward(&self, shared: Option<SumOverBatch>) -> Option<Tensor> {
        if self.samples() == 0 && shared.is_none() {
            return None;
        }
        let mut ctx = self.ctx.clone();
        if let Some(sum) = shared {
            ctx = ctx.sharing(sum);
        }
        self.input.device().begin_pass(self.samples());
        let output = self.model.forward(&self.input, &mut ctx);
        if self.samples() == 0 {
            // No sample has no loss, but the others wait for its part of their statistics.
            return Some(output.sum_all());
        }
        Some(self.loss.of_pass(&output, &self.target.to(output.device()), &ctx))
    }
}

/// How a rank makes a pass.
pub trait Local: Send {
    /// Makes it: gives the mean loss over its samples, 0 without any, and leaves the gradients of `weight` times that in their
    /// slots. `sink` is told of each when it is final for this pass.
    fn pass(&mut self, pass: &Pass<'_>, sink: &mut dyn GradSink) -> Result<f64, Error>;

    /// Makes a forward pass alone, and adds what `judge` makes of its outputs to `sums`, if they come to this rank.
    fn evaluate(&mut self, pass: &EvalPass<'_>, judge: &Judge<'_>, sums: &mut [f64]) -> Result<(), Error> {
        pass.in_one_go(judge, sums)
    }
}

impl Local for Box<dyn Local> {
    fn pass(&mut self, pass: &Pass<'_>, sink: &mut dyn GradSink) -> Result<f64, Error> {
        (**self).pass(pass, sink)
    }

    fn evaluate(&mut self, pass: &EvalPass<'_>, judge: &Judge<'_>, sums: &mut [f64]) -> Result<(), Error> {
        (**self).evaluate(pass, judge, sums)
    }
}

/// How the ranks of a run make their passes.
#[derive(Clone, Debug, Default)]
pub enum LocalConfig {
    /// In one go, wherever the model's blocks lie.
    #[default]
    Whole,
    /// As a pipeline over the devices that its blocks lie on.
    Pipeline(PipelineConfig),
    /// On copies of the model.
    DataParallel(DataParallelConfig),
}

impl LocalConfig {
    /// What makes the passes; none for those in one go. Fails if there is no such schedule, or no thread for each device.
    pub fn make(&self) -> Result<Option<Box<dyn Local>>, Error> {
        Ok(match self {
            LocalConfig::Whole => None,
            LocalConfig::Pipeline(config) => Some(Box::new(Pipelined::new(config.clone())?)),
            LocalConfig::DataParallel(config) => Some(Box::new(DataParallel::new(config)?)),
        })
    }

    /// Into how many parts the samples of a pass fall, each of which a batch norm sees by itself.
    pub fn parts(&self) -> usize {
        match self {
            LocalConfig::Whole => 1,
            LocalConfig::Pipeline(config) => config.micro_batches,
            LocalConfig::DataParallel(config) => config.others.len() + 1,
        }
    }
}

/// In one go: a forward pass, then a backward pass.
#[derive(Clone, Copy, Debug, Default)]
pub struct Whole;

impl Local for Whole {
    fn pass(&mut self, pass: &Pass<'_>, sink: &mut dyn GradSink) -> Result<f64, Error> {
        let loss = pass.forward(None);
        loss.iter().for_each(|loss| weighted(loss, pass.weight, sink));
        Ok(loss.map_or(0.0, |loss| loss.item()))
    }
}

/// A backward pass of a loss that is only a share of the step's.
pub(crate) fn weighted(loss: &Tensor, weight: f64, sink: &mut dyn GradSink) {
    let weight = Tensor::full(loss.device(), loss.shape(), weight, loss.dtype());
    backward(&[(loss, Some(&weight))], sink);
}

/// The names of those of these parameters that aren't frozen.
pub(crate) fn names_of_learned(parameters: &Parameters, which: &[usize]) -> Vec<String> {
    let learned = which.iter().filter(|&&i| !parameters.is_frozen(i));
    learned.map(|&i| parameters.names()[i].clone()).collect()
}
