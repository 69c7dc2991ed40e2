//! What a dataset is, and the buffers that it fills.

use crate::bytes::ByteSamples;
use crate::error::Result;
use crate::pictures::Scratch;
use std::sync::Arc;

/// Samples by number. Implement this to train on data of your own.
///
/// ```
/// use phalanx_data::{BatchBuffers, Dataset, Result, Target};
///
/// /// Points on a parabola.
/// struct Parabola;
///
/// impl Dataset for Parabola {
///     fn len(&self) -> usize { 100 }
///     fn input_dims(&self) -> &[usize] { &[1] }
///     fn target(&self) -> Target<'_> { Target::Values(&[1]) }
///     fn batch(&self, indices: &[usize], into: &mut BatchBuffers) -> Result<()> {
///         let batch = into.split();
///         for (slot, &i) in indices.iter().enumerate() {
///             let x = i as f32 / 100.0;
///             batch.inputs[slot] = x;
///             batch.values[slot] = x * x;
///         }
///         Ok(())
///     }
/// }
/// ```
pub trait Dataset: Send + Sync {
    /// How many samples there are.
    fn len(&self) -> usize;

    /// Whether there is no sample at all.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The shape of one sample's input: (C, H, W) for images.
    fn input_dims(&self) -> &[usize];

    /// What a sample's input is made of: by default of numbers.
    fn input(&self) -> Input {
        Input::Values
    }

    /// What a sample's target is.
    fn target(&self) -> Target<'_>;

    /// Writes the samples `indices`, each less than [`Dataset::len`], one after the other.
    ///
    /// `into` is already sized: `indices.len()` times the number of elements of [`Dataset::input_dims`], and as many targets
    /// as [`Dataset::target`] says. Its former contents are arbitrary. Each sample must be a function of its index, or of that
    /// and [`BatchBuffers::epoch`], as several threads and ranks fill batches in an order that nobody fixes.
    ///
    /// # Errors
    /// Whatever reading a sample can meet ([`Error::Other`](crate::Error::Other) of another's data); training stops with it.
    fn batch(&self, indices: &[usize], into: &mut BatchBuffers) -> Result<()>;

    /// The samples as bytes, where a device can make them of these; by default it can't.
    fn as_bytes(&self) -> Option<&dyn ByteSamples> {
        None
    }
}

impl<D: Dataset + ?Sized> Dataset for Arc<D> {
    fn len(&self) -> usize {
        (**self).len()
    }

    fn input_dims(&self) -> &[usize] {
        (**self).input_dims()
    }

    fn input(&self) -> Input {
        (**self).input()
    }

    fn target(&self) -> Target<'_> {
        (**self).target()
    }

    fn batch(&self, indices: &[usize], into: &mut BatchBuffers) -> Result<()> {
        (**self).batch(indices, into)
    }

    fn as_bytes(&self) -> Option<&dyn ByteSamples> {
        (**self).as_bytes()
    }
}

/// What a dataset's inputs are made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Input {
    /// Numbers; `f32`.
    Values,
    /// Ids of words, from 0 to below this number; `i64`.
    Ids(usize),
}

/// The kind of a dataset's targets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target<'a> {
    /// A class label from 0 to below this number; one `i64` a sample.
    Classes(usize),
    /// So many labels a sample, of the places of a sequence or the pixels of an image, row by row; each from 0 to below the number of
    /// classes, or one that the loss leaves out; `i64`.
    Sequence {
        /// How many a sample has.
        len: usize,
        /// How many classes there are.
        classes: usize,
    },
    /// Numbers of this shape; `f32`.
    Values(&'a [usize]),
}

/// The parts of a batch, sample after sample; those that the dataset doesn't have are empty.
#[derive(Debug)]
pub struct BatchParts<'a> {
    /// The inputs, if they are numbers.
    pub inputs: &'a mut [f32],
    /// The inputs, if they are ids of words.
    pub ids: &'a mut [i64],
    /// The labels, one a sample or as many as a sequence has.
    pub labels: &'a mut [i64],
    /// The values to predict.
    pub values: &'a mut [f32],
}

/// The memory of one batch, on the host, used again for later batches.
#[derive(Debug, Default)]
pub struct BatchBuffers {
    inputs: Vec<f32>,
    ids: Vec<i64>,
    labels: Vec<i64>,
    values: Vec<f32>,
    bytes: Vec<u8>,
    epoch: u64,
    scratch: Scratch,
}

impl BatchBuffers {
    /// Empty buffers; the first batch allocates.
    pub fn new() -> BatchBuffers {
        BatchBuffers::default()
    }

    /// Makes them those of a batch of this epoch.
    pub(crate) fn begin(&mut self, epoch: u64) {
        self.epoch = epoch;
        self.scratch.skipped = 0;
    }

    /// The epoch that the batch belongs to, from 0: what random changes are keyed by, besides the sample.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Sizes the buffers for `n_samples` of `dataset`. Allocates only when more is needed than ever before.
    pub fn fit(&mut self, dataset: &dyn Dataset, n_samples: usize) {
        let (n_labels, n_values) = match dataset.target() {
            Target::Classes(_) => (n_samples, 0),
            Target::Sequence { len, .. } => (n_samples * len, 0),
            Target::Values(dims) => (0, n_samples * dims.iter().product::<usize>()),
        };
        let n_inputs = n_samples * dataset.input_dims().iter().product::<usize>();
        let (n_values_in, n_ids) = match dataset.input() {
            Input::Values => (n_inputs, 0),
            Input::Ids(_) => (0, n_inputs),
        };
        self.inputs.resize(n_values_in, 0.0);
        self.ids.resize(n_ids, 0);
        self.labels.resize(n_labels, 0);
        self.values.resize(n_values, 0.0);
        self.bytes.clear();
    }

    /// Sizes the buffers for so many bytes and labels of samples that a device makes of them.
    pub fn fit_bytes(&mut self, n_bytes: usize, n_labels: usize) {
        self.inputs.clear();
        self.ids.clear();
        self.values.clear();
        self.labels.resize(n_labels, 0);
        self.bytes.resize(n_bytes, 0);
    }

    /// The bytes, sample after sample, where a device makes the samples of these: see [`ByteSamples`].
    pub fn bytes(&mut self) -> &mut [u8] {
        &mut self.bytes
    }

    /// Bytes and labels.
    pub(crate) fn bytes_and_labels(&mut self) -> (&mut [u8], &mut [i64], &mut Scratch) {
        (&mut self.bytes, &mut self.labels, &mut self.scratch)
    }

    /// The bytes.
    pub(crate) fn read_bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Inputs and targets, at once: a sample's often come from the same place.
    pub fn split(&mut self) -> BatchParts<'_> {
        let BatchBuffers { inputs, ids, labels, values, .. } = self;
        BatchParts { inputs, ids, labels, values }
    }

    /// The ids of words, sample after sample; empty if the inputs are numbers.
    pub fn ids(&mut self) -> &mut [i64] {
        &mut self.ids
    }

    /// Ids and labels.
    pub(crate) fn sequences(&mut self) -> (&mut [i64], &mut [i64]) {
        (&mut self.ids, &mut self.labels)
    }

    /// The ids of words.
    pub(crate) fn read_ids(&self) -> &[i64] {
        &self.ids
    }

    /// The inputs, sample after sample; empty if they are ids of words.
    pub fn inputs(&mut self) -> &mut [f32] {
        &mut self.inputs
    }

    /// The labels, one a sample or as many as a sequence has; empty if the targets are values.
    pub fn labels(&mut self) -> &mut [i64] {
        &mut self.labels
    }

    /// The values to predict, sample after sample; empty if the targets are labels.
    pub fn values(&mut self) -> &mut [f32] {
        &mut self.values
    }

    /// Inputs, labels and values.
    pub(crate) fn read(&self) -> (&[f32], &[i64], &[f32]) {
        (&self.inputs, &self.labels, &self.values)
    }

    /// Inputs, labels, values and the memory of transforms.
    pub(crate) fn all(&mut self) -> (&mut [f32], &mut [i64], &mut [f32], &mut Scratch) {
        (&mut self.inputs, &mut self.labels, &mut self.values, &mut self.scratch)
    }

    /// How many bad samples others took the place of.
    pub(crate) fn skipped(&self) -> usize {
        self.scratch.skipped
    }

    /// Makes the inputs the values to predict, too.
    fn inputs_become_values(&mut self) {
        self.labels.clear();
        self.values.clear();
        self.values.extend_from_slice(&self.inputs);
    }
}

/// A dataset whose samples are to be reproduced: flat inputs, and the same numbers as targets. For autoencoders.
#[derive(Debug)]
pub struct Reconstruct<D> {
    inner: D,
    dims: [usize; 1],
}

impl<D: Dataset> Reconstruct<D> {
    /// The inputs of `inner`, each flattened to one dimension.
    pub fn new(inner: D) -> Reconstruct<D> {
        let dims = [inner.input_dims().iter().product()];
        Reconstruct { inner, dims }
    }
}

impl<D: Dataset> Dataset for Reconstruct<D> {
    fn len(&self) -> usize {
        self.inner.len()
    }

    fn input_dims(&self) -> &[usize] {
        &self.dims
    }

    fn target(&self) -> Target<'_> {
        Target::Values(&self.dims)
    }

    fn batch(&self, indices: &[usize], into: &mut BatchBuffers) -> Result<()> {
        into.fit(&self.inner, indices.len());
        self.inner.batch(indices, into)?;
        into.inputs_become_values();
        Ok(())
    }
}
