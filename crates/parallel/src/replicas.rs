//! Data parallel in one process: a copy of the model on each device, a part of every batch for each.
//!
//! What PyTorch's `DataParallel` does, in its order: the batch is scattered over the devices, the model is replicated onto them,
//! each computes its part, and gradients are gathered on the first, where the parameters live. The copies are made anew for
//! each pass and gradients are summed when all are there, which is why ranks with [`crate::Ddp`] are faster: they hold their
//! copies, update them in step, and sum while they still compute.
//!
//! Batch norms see a device's part of the batch, and the first device's running statistics are the model's, as in PyTorch.

use crate::device_threads::DeviceThreads;
use crate::error::Error;
use crate::local::{Local, Pass, weighted};
use crate::pipeline::parts;
use phalanx_nn::{Ctx, Module, Parameters};
use phalanx_tensor::{DType, Device, GradSink, LeafId, Tensor, autocast, autocast_dtype};
use std::fmt;
use std::sync::Arc;

/// What makes the copies of a model.
#[derive(Clone)]
pub struct DataParallelConfig {
    /// The devices beside the one that the model lives on.
    pub others: Vec<Device>,
    /// Makes the model, whose values are those of the pass.
    pub model: Arc<dyn Fn() -> Box<dyn Module> + Send + Sync>,
}

impl fmt::Debug for DataParallelConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DataParallelConfig").field("others", &self.others).finish_non_exhaustive()
    }
}

/// Makes passes on several devices, each with its copy of the model.
pub struct DataParallel {
    copies: Vec<Copy>,
    threads: DeviceThreads,
}

/// The model on one of the other devices.
struct Copy {
    model: Box<dyn Module>,
    parameters: Parameters,
    device: Device,
}

impl DataParallel {
    /// Makes the copies. Fails if there is no thread for each.
    pub fn new(config: &DataParallelConfig) -> Result<DataParallel, Error> {
        let threads = DeviceThreads::new(config.others.len(), "replica")?;
        let copy = |device: &Device| {
            let mut model = (config.model)();
            let parameters = Parameters::build(&mut model, device, 0);
            Copy { model, parameters, device: device.clone() }
        };
        Ok(DataParallel { copies: config.others.iter().map(copy).collect(), threads })
    }
}

/// Leaves whose gradients are there, of the part that the first device took.
#[derive(Default)]
struct Own(Vec<(LeafId, Tensor)>);

impl GradSink for Own {
    fn finished(&mut self, leaf: LeafId, grad: Tensor) {
        self.0.push((leaf, grad));
    }
}

impl Copy {
    /// Takes the buffers of the pass, which the first device's part of it writes to: before that begins.
    fn take_buffers(&self, parameters: &Parameters) {
        parameters.buffers().with_flat(|values: &[f32]| self.parameters.buffers().write_flat(values));
    }

    /// Its part of a pass: the mean loss over so many of the pass's samples.
    fn pass(&self, pass: &Pass<'_>, part: Part, products: DType) -> f64 {
        self.parameters.grads().zero();
        pass.parameters.values().with_flat(|values: &[f32]| self.parameters.values().write_flat(values));
        let Part { input, target, mut ctx, weight } = part;
        let loss = autocast(products, || {
            let output = self.model.forward(&input.to(&self.device), &mut ctx);
            pass.loss.of_pass(&output, &target.to(&self.device), &ctx)
        });
        weighted(&loss, weight, &mut Own::default());
        self.parameters.grads().settle();
        loss.item() * weight
    }
}

/// A device's part of a pass.
struct Part {
    input: Tensor,
    target: Tensor,
    ctx: Ctx,
    weight: f64,
}

impl Local for DataParallel {
    fn pass(&mut self, pass: &Pass<'_>, sink: &mut dyn GradSink) -> Result<f64, Error> {
        let samples = pass.samples();
        if samples == 0 {
            return Ok(0.0);
        }
        let mut parts =
            parts(samples, self.copies.len() + 1).filter(|rows| !rows.is_empty()).map(|rows| Part {
                input: pass.input.narrow(0, rows.start, rows.len()).contiguous(),
                target: pass.target.narrow(0, rows.start, rows.len()).contiguous(),
                ctx: pass.ctx.of_samples(rows.clone()),
                weight: pass.weight * rows.len() as f64 / samples as f64,
            });
        let first = parts.next().expect("there are samples");
        let mut own = Own::default();
        // What holds for this thread holds for the others.
        let products = autocast_dtype();
        // A device without samples has no gradients.
        let parts: Vec<(Part, &Copy)> = parts.zip(&self.copies).collect();
        let used: Vec<&Copy> = parts.iter().map(|(_, copy)| *copy).collect();
        used.iter().for_each(|copy| copy.take_buffers(pass.parameters));
        let (loss, losses) = self.threads.run(
            parts,
            |(part, copy)| copy.pass(pass, part, products),
            || {
                let Part { input, target, mut ctx, weight } = first;
                let output = pass.model.forward(&input, &mut ctx);
                let loss = pass.loss.of_pass(&output, &target.to(output.device()), &ctx);
                weighted(&loss, weight, &mut own);
                loss.item() * weight
            },
        );
        let losses = losses.into_iter().fold(loss, |sum, loss| sum + loss);
        for (leaf, grad) in own.0 {
            if let Some(slot) = leaf.slot_of(pass.parameters.values()).filter(|_| !used.is_empty()) {
                let theirs = used.iter().map(|copy| copy.parameters.grads().arena().tensor(slot));
                let sum = theirs.fold(grad.clone(), |sum, theirs| &sum + &theirs.to(grad.device()));
                grad.copy_from(&sum);
            }
            sink.finished(leaf, grad);
        }
        Ok(losses / pass.weight)
    }
}
