//! Dropout, with masks that belong to samples.

use crate::device::Backend;
use crate::gpu;
use crate::kernel;
use crate::op::Op;
use crate::ops::recorded;
use crate::philox::Philox;
use crate::shape::Shape;
use crate::tensor::Tensor;
use std::sync::Arc;

/// What a dropout mask is a function of. The mask of one sample depends on nothing else, so it is the same whichever rank
/// computes it and whichever samples share its batch.
#[derive(Clone, Debug)]
pub struct DropoutKey {
    /// The seed of the run.
    pub seed: u64,
    /// The step, or whatever counts the times that a sample is seen.
    pub step: u64,
    /// Which dropout of the model.
    pub layer: u64,
    /// The number in the data set of each row of dimension 0.
    pub samples: Arc<[u64]>,
    /// Where only a part of a tensor is at hand, which: its mask is that part of the whole tensor's.
    pub within: Option<Within>,
}

/// Which part of a larger tensor a tensor is: it has all of the other's elements but along one dimension.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Within {
    /// The dimension, which isn't that of the samples.
    pub dim: usize,
    /// Where the part begins along it.
    pub start: usize,
    /// How long the whole is along it.
    pub of: usize,
}

impl DropoutKey {
    /// The key of a whole tensor.
    pub fn new(seed: u64, step: u64, layer: u64, samples: Arc<[u64]>) -> DropoutKey {
        DropoutKey { seed, step, layer, samples, within: None }
    }

    /// The random numbers of one sample.
    pub(crate) fn stream(&self, sample: u64) -> Philox {
        stream([self.seed, self.step, self.layer], sample)
    }
}

/// The random numbers of one sample. Seed, step and layer are mixed into the key, the sample is the stream.
pub(crate) fn stream([seed, step, layer]: [u64; 3], sample: u64) -> Philox {
    let [a, b, c, d] = Philox::new(seed, layer).block(step);
    let mixed = (u64::from(a) << 32 | u64::from(b)) ^ (u64::from(c) << 32 | u64::from(d)).rotate_left(17);
    Philox::new(mixed, sample)
}

impl Tensor {
    /// Each element is zero with probability `p` and divided by 1 - p otherwise.
    #[track_caller]
    pub fn dropout(&self, p: f64, key: &DropoutKey) -> Tensor {
        self.masked("dropout", p, key, *self.shape())
    }

    /// Each channel of (N, C, ...) is zero as a whole with probability `p` and divided by 1 - p otherwise.
    #[track_caller]
    pub fn dropout2d(&self, p: f64, key: &DropoutKey) -> Tensor {
        assert!(self.shape().n_dims() >= 2, "dropout2d: needs (N, C, ...), got shape {}", self.shape());
        let shape = (2..self.shape().n_dims()).fold(*self.shape(), |shape, dim| shape.with(dim, 1));
        self.masked("dropout2d", p, key, shape)
    }

    #[track_caller]
    fn masked(&self, op: &str, p: f64, key: &DropoutKey, shape: Shape) -> Tensor {
        assert!((0.0..1.0).contains(&p), "{op}: the probability must lie in [0, 1), got {p}");
        if p == 0.0 {
            return self.clone();
        }
        let n = self.dims().first().copied().unwrap_or(1);
        assert!(
            key.samples.len() == n,
            "{op}: {} sample ids for a tensor of shape {}",
            key.samples.len(),
            self.shape()
        );
        if let Some(within @ Within { dim, start, of }) = key.within {
            assert!(
                dim > 0 && dim < shape.n_dims() && start + shape.dims()[dim] <= of,
                "{op}: a mask of shape {shape} as the part {within:?}"
            );
        }
        let is_whole = shape == *self.shape() && key.within.is_none() && self.geometry.is_contiguous();
        if let (Backend::Gpu(engine), true) = (self.device().backend(), is_whole) {
            let key = self.device().feed_key(key);
            let out = self.stale_like();
            gpu::dropout::dropout(engine, p, key.each_ref(), self, &out);
            return recorded(out, Op::Dropout { p }, &[self], |_| key.map(Some));
        }
        let mask = Tensor::stale(self.device(), shape, self.dtype.wide());
        kernel::dropout::mask(p, key, &mask);
        self.mul(&mask).cast(self.dtype)
    }
}
