//! One batch on its way from a dataset to a training step, and the pool that its memory returns to.

use crate::dataset::{BatchBuffers, Input, Target};
use crate::error::Result;
use crate::sampler::{Sampler, StepPlan};
use crate::supply::{Maker, Supply};
use phalanx_tensor::{Device, Shape, Tensor, Upload, Values};
use std::sync::{Arc, Mutex, PoisonError};

/// The samples of one rank for one step. Its memory is used again for a later batch once it is dropped.
#[derive(Debug)]
pub struct Batch {
    epoch: u64,
    step: usize,
    input: Input,
    input_shape: Shape,
    /// The shape of the labels, if the targets are labels.
    label_shape: Shape,
    /// The shape of the values to predict, or `None` if the targets are labels.
    value_shape: Option<Shape>,
    parts: Parts,
    /// What makes its numbers on a device, if the loader didn't make them.
    maker: Option<Arc<Maker>>,
    /// What its tensors are made of, on its way to a GPU.
    upload: Option<Upload>,
    home: Arc<Pool>,
}

/// What a batch allocates.
#[derive(Debug, Default)]
pub(crate) struct Parts {
    pub(crate) plan: StepPlan,
    sample_ids: Arc<[u64]>,
    pub(crate) buffers: BatchBuffers,
}

impl Batch {
    /// Plans and fills the batch of a step.
    pub(crate) fn prepare(
        supply: &Supply,
        sampler: &dyn Sampler,
        pool: &Arc<Pool>,
        epoch: u64,
        step: usize,
    ) -> Result<Batch> {
        let mut parts = pool.take();
        sampler.plan(epoch, step, &mut parts.plan);
        let indices = &parts.plan.indices;
        match Arc::get_mut(&mut parts.sample_ids) {
            Some(ids) if ids.len() == indices.len() => {
                ids.iter_mut().zip(indices).for_each(|(id, &index)| *id = index as u64);
            }
            // The model still holds the ids of an earlier batch, or there were more or fewer of them.
            _ => parts.sample_ids = indices.iter().map(|&index| index as u64).collect(),
        }
        parts.buffers.begin(epoch);
        supply.fill(&mut parts)?;
        let (dataset, indices) = (supply.dataset(), &parts.plan.indices);
        let value_shape = match dataset.target() {
            Target::Classes(_) | Target::Sequence { .. } => None,
            Target::Values(dims) => Some(batched(indices.len(), dims)),
        };
        let label_shape = match dataset.target() {
            Target::Sequence { len, .. } => batched(indices.len(), &[len]),
            Target::Classes(_) | Target::Values(_) => batched(indices.len(), &[]),
        };
        let input_shape = batched(indices.len(), dataset.input_dims());
        let input = dataset.input();
        let maker = supply.maker().cloned();
        let (upload, home) = (None, pool.clone());
        Ok(Batch { epoch, step, input, input_shape, label_shape, value_shape, parts, maker, upload, home })
    }

    /// The epoch, from 0.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// The step within the epoch, from 0.
    pub fn step(&self) -> usize {
        self.step
    }

    /// How many samples this rank has; possibly none at the end of an epoch.
    pub fn len(&self) -> usize {
        self.parts.plan.indices.len()
    }

    /// Whether this rank has no sample in this step. It takes part in the step's collectives all the same.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// How many samples all ranks have together in this step.
    pub fn global_samples(&self) -> usize {
        self.parts.plan.global_samples
    }

    /// How many bad samples of this rank others took the place of: see [`crate::BadImages`].
    pub fn skipped(&self) -> usize {
        self.parts.buffers.skipped()
    }

    /// The number of each sample in its dataset: what random masks are keyed by.
    pub fn sample_ids(&self) -> &Arc<[u64]> {
        &self.parts.sample_ids
    }

    /// The inputs, row-major, of shape [`Batch::input_shape`]; empty if they are ids of words, or made on a device.
    pub fn inputs(&self) -> &[f32] {
        self.parts.buffers.read().0
    }

    /// The inputs that are ids of words, of shape [`Batch::input_shape`]; empty if they are numbers, or made on a device.
    pub fn ids(&self) -> &[i64] {
        self.parts.buffers.read_ids()
    }

    /// (samples, shape of one input).
    pub fn input_shape(&self) -> Shape {
        self.input_shape
    }

    /// The class of each sample, or of each place of its sequence; empty if the targets are values, or sequences that are made on a device.
    pub fn labels(&self) -> &[i64] {
        self.parts.buffers.read().1
    }

    /// The values to predict, row-major; empty if the targets are labels.
    pub fn values(&self) -> &[f32] {
        self.parts.buffers.read().2
    }

    /// Inputs and targets on `device`: see [`Batch::input_tensor`] and [`Batch::target_tensor`]. Where a device makes batches of bytes, it
    /// does so now, both at once.
    pub fn tensors(&self, device: &Device) -> [Tensor; 2] {
        match &self.maker {
            None => [self.given_inputs(device), self.given_targets(device)],
            Some(maker) => {
                let (samples, bytes) = (&self.parts.sample_ids, self.parts.buffers.read_bytes());
                maker.make(self.epoch, samples, self.labels(), bytes).map(|tensor| tensor.to(device))
            }
        }
    }

    /// Begins to bring what its tensors are made of to `device`, where that is a GPU: beside what the GPU computes, and without a wait.
    pub fn send(&mut self, device: &Device) {
        let row = |values: &[i64]| Shape::new(&[values.len()]);
        self.upload = match &self.maker {
            None => {
                let input = match self.input {
                    Input::Values => Values::F32(self.inputs()),
                    Input::Ids(_) => Values::I64(self.ids()),
                };
                let target = match self.value_shape {
                    None => (Values::I64(self.labels()), self.label_shape),
                    Some(shape) => (Values::F32(self.values()), shape),
                };
                device.upload(&[(input, self.input_shape), target])
            }
            Some(maker) => {
                let words = maker.words(self.epoch, &self.parts.sample_ids, self.labels());
                let bytes = self.parts.buffers.read_bytes();
                let all = [(Values::I64(&words), row(&words)), (Values::U8(bytes), [bytes.len()].into())];
                device.upload(if maker.wants_bytes() { &all } else { &all[..1] })
            }
        };
    }

    /// As [`Batch::tensors`], of what was sent if it was: then `device` is the one that it was sent to.
    pub fn take_tensors(&mut self, device: &Device) -> [Tensor; 2] {
        let Some(upload) = self.upload.take() else { return self.tensors(device) };
        let mut came = upload.tensors().into_iter();
        let first = came.next().expect("a batch sends its inputs, or its words");
        match &self.maker {
            None => [first, came.next().expect("and its targets")],
            Some(maker) => maker.make_of(&first, came.next(), self.len()),
        }
    }

    /// The inputs on `device`, as `f32`, or as `i64` if they are ids of words.
    pub fn input_tensor(&self, device: &Device) -> Tensor {
        match &self.maker {
            None => self.given_inputs(device),
            Some(_) => self.tensors(device)[0].clone(),
        }
    }

    fn given_inputs(&self, device: &Device) -> Tensor {
        match self.input {
            Input::Values => Tensor::from_slice(device, self.inputs(), self.input_shape),
            Input::Ids(_) => Tensor::from_slice(device, self.ids(), self.input_shape),
        }
    }

    /// The targets on `device`: labels as `i64` of shape (samples), or (samples, places) of sequences, values as `f32` of shape (samples, shape of one target).
    pub fn target_tensor(&self, device: &Device) -> Tensor {
        match &self.maker {
            None => self.given_targets(device),
            Some(_) => self.tensors(device)[1].clone(),
        }
    }

    fn given_targets(&self, device: &Device) -> Tensor {
        match self.value_shape {
            None => Tensor::from_slice(device, self.labels(), self.label_shape),
            Some(shape) => Tensor::from_slice(device, self.values(), shape),
        }
    }
}

impl Drop for Batch {
    fn drop(&mut self) {
        self.home.give(std::mem::take(&mut self.parts));
    }
}

/// (n, dims...)
fn batched(n: usize, dims: &[usize]) -> Shape {
    let mut sizes = [n; phalanx_tensor::MAX_DIMS];
    let sizes = &mut sizes[..=dims.len()];
    sizes[1..].copy_from_slice(dims);
    Shape::new(sizes)
}

/// The memory of dropped batches.
#[derive(Debug)]
pub(crate) struct Pool {
    free: Mutex<Vec<Parts>>,
    /// More than this isn't kept.
    bound: usize,
}

impl Pool {
    pub(crate) fn new(bound: usize) -> Pool {
        Pool { free: Mutex::new(Vec::with_capacity(bound)), bound }
    }

    fn take(&self) -> Parts {
        self.free.lock().unwrap_or_else(PoisonError::into_inner).pop().unwrap_or_default()
    }

    fn give(&self, parts: Parts) {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        if free.len() < self.bound {
            free.push(parts);
        }
    }
}
