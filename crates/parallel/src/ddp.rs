//! Distributed data parallel: every rank holds the model, takes its share of the samples, and gradients are summed.
//!
//! Invariants:
//! - **D-ORDER**: all ranks start their buckets in the same order, bucket 0 first, whatever order gradients arrive in.
//! - **D-WHOLE**: a bucket is started when each of its gradients is final, and nobody writes it until its work is waited for
//!   (its span holds the write borrow).
//! - **D-SUM**: ranks contribute gradients of their share of the global mean, so that the sum is the gradient of the mean.

use crate::buckets::buckets;
use crate::error::Error;
use crate::single::{Nobody, begin};
use crate::strategy::{Place, Strategy, Sync};
use phalanx_comm::{Buffer, Deadline, Group, Rank, ReduceOp, Work};
use phalanx_nn::Parameters;
use phalanx_tensor::{GradSink, LeafId, Span, Tensor, backward};
use std::collections::VecDeque;
use std::ops::Range;

/// How [`Ddp`] works.
#[derive(Clone, Debug)]
pub struct DdpConfig {
    /// About how many bytes of gradients travel together. Default 25 MiB.
    pub bucket_bytes: usize,
    /// The same for the bucket that is ready first. Default 1 MiB.
    pub first_bucket_bytes: usize,
    /// Whether a step may leave parameters without a gradient, which then counts as zero. Default no.
    pub find_unused: bool,
}

impl Default for DdpConfig {
    fn default() -> DdpConfig {
        DdpConfig { bucket_bytes: 25 << 20, first_bucket_bytes: 1 << 20, find_unused: false }
    }
}

/// The strategy.
pub struct Ddp {
    group: Group,
    config: DdpConfig,
    buckets: Vec<Range<usize>>,
    adding: bool,
    step: Started,
}

/// A range of the gradient arena on its way.
struct Bucket(Span<f32>);

impl Buffer for Bucket {
    type Item = f32;

    fn as_mut_slice(&mut self) -> &mut [f32] {
        &mut self.0
    }
}

/// How far the buckets of a step are.
#[derive(Default)]
struct Started {
    /// Gradients that each bucket still lacks.
    lacking: Vec<usize>,
    /// The first bucket that wasn't started (D-ORDER).
    next: usize,
    works: VecDeque<Work<Bucket>>,
}

impl Ddp {
    /// With the default buckets.
    pub fn new(group: Group) -> Ddp {
        Ddp::with(group, DdpConfig::default())
    }

    /// With other settings.
    pub fn with(group: Group, config: DdpConfig) -> Ddp {
        Ddp { group, config, buckets: Vec::new(), adding: false, step: Started::default() }
    }

    /// Compares the models of all ranks by name and shape; names the first difference.
    fn check_same_model(&self, parameters: &Parameters) -> Result<(), Error> {
        let lines: Vec<String> = parameters
            .names()
            .iter()
            .enumerate()
            .map(|(i, name)| format!("{name} of shape {}", parameters.layout().shape(i)))
            .collect();
        let text = lines.join("\n").into_bytes();
        let own = [digest(&text), text.len() as u64];
        let n = self.group.world_size();
        let mut all = vec![0; 2 * n];
        self.group.all_gather(&own, &mut all)?;
        let all: Vec<[u64; 2]> = all.as_chunks::<2>().0.to_vec();
        let Some(rank) = all.iter().position(|other| *other != all[0]) else { return Ok(()) };
        // All ranks see the difference, so all take part in telling it.
        let told = |from: usize| -> Result<Vec<String>, Error> {
            let mut bytes =
                if self.group.rank().index() == from { text.clone() } else { vec![0; all[from][1] as usize] };
            self.group.broadcast(&mut bytes, Rank(from as u32))?;
            Ok(String::from_utf8_lossy(&bytes).lines().map(str::to_owned).collect())
        };
        let (ours, theirs) = (told(0)?, told(rank)?);
        let at = (0..).find(|&i| ours.get(i) != theirs.get(i)).expect("their digests differ");
        let line = |lines: &[String]| {
            lines.get(at).cloned().unwrap_or_else(|| format!("only {} parameters", lines.len()))
        };
        Err(Error::DifferentModels { rank: rank as u32, theirs: line(&theirs), ours: line(&ours) })
    }

    /// Starts every bucket that is complete, in order.
    fn start_complete(step: &mut Started, buckets: &[Range<usize>], group: &Group, parameters: &Parameters) {
        while step.next < buckets.len() && step.lacking[step.next] == 0 {
            let span = parameters.grads().arena().range_mut::<f32>(buckets[step.next].clone());
            step.works.push_back(group.start_all_reduce(Bucket(span), ReduceOp::Sum));
            step.next += 1;
        }
    }
}

/// FNV-1a, 64 bits: a fingerprint, not a proof.
fn digest(bytes: &[u8]) -> u64 {
    bytes
        .iter()
        .fold(0xcbf2_9ce4_8422_2325, |hash, &byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

/// Counts gradients into buckets as the backward pass finishes them.
struct Counter<'a> {
    step: &'a mut Started,
    buckets: &'a [Range<usize>],
    group: &'a Group,
    parameters: &'a Parameters,
}

impl GradSink for Counter<'_> {
    fn finished(&mut self, leaf: LeafId, grad: Tensor) {
        drop(grad);
        let Some(parameter) = leaf.slot() else { return };
        let Some(bucket) = self.buckets.iter().position(|range| range.contains(&parameter)) else { return };
        self.step.lacking[bucket] -= 1;
        Ddp::start_complete(self.step, self.buckets, self.group, self.parameters);
        self.group.progress();
    }
}

impl Strategy for Ddp {
    fn place(&self) -> Place {
        Place { rank: self.group.rank().index(), world_size: self.group.world_size() }
    }

    fn prepare(&mut self, parameters: &Parameters) -> Result<(), Error> {
        self.check_same_model(parameters)?;
        self.buckets = buckets(parameters.layout(), self.config.first_bucket_bytes, self.config.bucket_bytes);
        self.group.broadcast(&mut parameters.values().flat_mut::<f32>()[..], Rank(0))?;
        Ok(())
    }

    fn backward(
        &mut self,
        parameters: &Parameters,
        loss: Option<&Tensor>,
        weight: f64,
        sync: Sync,
    ) -> Result<(), Error> {
        begin(&mut self.adding, parameters);
        let Some(loss) = loss else { return Ok(()) };
        let weight = Tensor::full(loss.device(), loss.shape(), weight, loss.dtype());
        let seed: [(&Tensor, Option<&Tensor>); 1] = [(loss, Some(&weight))];
        match sync {
            Sync::Later => backward(&seed, &mut Nobody),
            Sync::Now => {
                self.step.lacking.clear();
                self.step.lacking.extend(self.buckets.iter().map(Range::len));
                self.step.next = 0;
                let Ddp { step, buckets, group, .. } = self;
                backward(&seed, &mut Counter { step, buckets, group, parameters });
            }
        }
        Ok(())
    }

    fn finish(&mut self, parameters: &Parameters) -> Result<(), Error> {
        self.adding = false;
        if self.step.next < self.buckets.len() {
            // Some gradients didn't come: the parameters are unused, or this rank had no samples and contributes zeros.
            let had_samples = !self.step.lacking.is_empty();
            let unused = parameters.grads().settle();
            if had_samples && !unused.is_empty() && !self.config.find_unused {
                let names = unused.iter().map(|&i| parameters.names()[i].clone()).collect();
                self.group.abort("a rank left parameters without a gradient");
                return Err(Error::Unused { names });
            }
            self.step.lacking.clear();
            self.step.lacking.resize(self.buckets.len(), 0);
            Ddp::start_complete(&mut self.step, &self.buckets, &self.group, parameters);
        }
        while let Some(work) = self.step.works.pop_front() {
            work.wait(Deadline::after(self.group.timeout()))?;
        }
        self.step.next = 0;
        self.step.lacking.clear();
        Ok(())
    }

    fn sum(&mut self, numbers: &mut [f64]) -> Result<(), Error> {
        Ok(self.group.all_reduce(numbers, ReduceOp::Sum)?)
    }
}
