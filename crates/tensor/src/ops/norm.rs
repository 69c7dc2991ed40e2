//! Layer and batch normalisation.

use crate::cpu;
use crate::cpu::batch_norm::{self, Fused};
use crate::device::Backend;
use crate::dtype::DType;
use crate::gpu;
use crate::graph;
use crate::kernel;
use crate::op::Op;
use crate::ops::reduce::Keep;
use crate::ops::{keep, recorded, recorded_where};
use crate::shape::{Order, Shape};
use crate::tensor::Tensor;
use std::sync::Arc;

/// Each channel's mean and variance, (C) each.
#[derive(Clone, Debug)]
pub struct ChannelStats {
    /// The mean.
    pub mean: Tensor,
    /// The mean squared distance from the mean: divided by the number of values, not by one less.
    pub variance: Tensor,
}

/// What [`Tensor::batch_norm`] gives.
#[derive(Clone, Debug)]
pub struct BatchNormed {
    /// The normalised tensor.
    pub out: Tensor,
    /// What the batch showed.
    pub stats: ChannelStats,
}

/// What follows a batch normalisation: in the same pass over memory where the tensor's order allows it.
#[derive(Clone, Copy, Debug, Default)]
pub enum Then<'a> {
    /// Nothing.
    #[default]
    Nothing,
    /// What is below zero becomes zero.
    Relu,
    /// This tensor, of the same shape, is added; then what is below zero becomes zero.
    AddRelu(&'a Tensor),
}

/// Adds up numbers over all who hold a part of the same batch, as ranks do: whoever is handed a row of f64 gives one of the sums of
/// theirs, as many and on the same device. All must come with the same calls in the same order. On a GPU it may give them before they
/// are there, so that nothing of the pass may be read before whoever it is of has waited for the others. It can't fail: whoever has
/// lost another gives what means nothing, on a CPU no numbers, and nothing of the pass may be used.
pub type SumOverBatch = Arc<dyn Fn(Tensor) -> Tensor + Send + Sync>;

/// A batch that several have parts of.
pub(crate) struct SharedBatch {
    /// (1 + 2 C): how many values a channel has in all parts, and each channel's sums of these and of their squares. Such sums can be added;
    /// in double precision little is lost where mean and variance are told apart again.
    pub(crate) totals: Tensor,
    /// Adds up over the parts.
    sum: SumOverBatch,
}

impl SharedBatch {
    #[track_caller]
    fn of(own: Tensor, sum: &SumOverBatch) -> SharedBatch {
        SharedBatch { totals: summed(own, sum), sum: sum.clone() }
    }

    /// The sums over all parts.
    #[track_caller]
    pub(crate) fn summed(&self, own: Tensor) -> Tensor {
        summed(own, &self.sum)
    }
}

/// Kernels take as many numbers as were handed over, in a row.
#[track_caller]
fn summed(own: Tensor, sum: &SumOverBatch) -> Tensor {
    let (device, shape) = (own.device().clone(), *own.shape());
    let all = sum(own);
    assert!(
        *all.shape() == shape
            && all.dtype == DType::F64
            && all.geometry.is_contiguous()
            && *all.device() == device,
        "batch_norm: a sum over a batch of {} {} in the place of {shape} f64 in a row on one device",
        all.shape(),
        all.dtype
    );
    all
}

/// Running statistics of channels, (C) each, which training moves towards what each batch shows.
#[derive(Clone, Copy, Debug)]
pub struct Running<'a> {
    /// The running mean.
    pub mean: &'a Tensor,
    /// The running variance, of what batches are samples of: their own times n / (n - 1), as in PyTorch.
    pub variance: &'a Tensor,
    /// By which share of the way.
    pub share: f64,
}

/// Where the statistics come from that a batch is normalised by.
#[derive(Clone, Copy)]
enum Source<'a> {
    /// They are to be found in it, and running ones moved.
    Batch(Option<Running<'a>>),
    /// They are those of a batch that this is a part of, and running ones are moved.
    Shared(&'a Arc<SharedBatch>, Option<Running<'a>>),
    /// They were given.
    Given,
}

impl<'a> Then<'a> {
    /// The same with another tensor in the place of the one that is added, if there is one.
    fn with(self, plus: Option<&'a Tensor>) -> Then<'a> {
        plus.map_or(self, Then::AddRelu)
    }
}

impl Tensor {
    /// On a GPU, whose kernels know rows of channels alone: (N, C, ...) of other than two or four dimensions, and what is added to
    /// it, as images (N, C, everything else, 1).
    fn as_images(&self, then: Then<'_>) -> Option<(Tensor, Option<Tensor>)> {
        let Backend::Gpu(_) = self.device().backend() else { return None };
        if matches!(self.dims().len(), 2 | 4) {
            return None;
        }
        let [n, channels, len] = self.channel_dims("batch_norm");
        let images = |x: &Tensor| x.reshape([n, channels, len, 1]);
        let plus = match then {
            Then::AddRelu(plus) => {
                self.check_like("batch_norm", plus);
                Some(images(plus))
            }
            Then::Nothing | Then::Relu => None,
        };
        Some((images(self), plus))
    }

    /// As batch norms of the device want it to lie.
    fn by_channels(&self) -> Tensor {
        match self.device().backend() {
            // A view may be dense in the order of kernels, which is none of images.
            Backend::Cpu => match self.geometry.order_among(&[Order::RowMajor, Order::Pixels]) {
                Some(_) => self.clone(),
                None => self.contiguous(),
            },
            Backend::Gpu(_) if self.dims().len() == 4 => self.arranged(self.device().image_order()),
            Backend::Gpu(_) => self.contiguous(),
        }
    }

    /// Whether what follows a normalisation can be done in the same pass.
    fn is_rows_of_channels(&self) -> bool {
        match self.device().backend() {
            Backend::Cpu => batch_norm::is_rows(self),
            Backend::Gpu(_) => true,
        }
    }

    /// Normalises each channel of (N, C, ...) to mean 0 and variance 1 over all else (with `eps` added to the variance), then
    /// multiplies by `weight` and adds `bias`, both (C), then does what `then` says. Tells what it found too, and moves `running`
    /// statistics towards it, where there are some: then a batch of one value a channel, which has no variance, panics.
    ///
    /// With `shared`, mean and variance are those of all parts of the batch together, however uneven they are; a part may be
    /// empty. A GPU's host doesn't see how many values these have: then the running variance of one value is no number.
    #[track_caller]
    pub fn batch_norm(
        &self,
        weight: Option<&Tensor>,
        bias: Option<&Tensor>,
        eps: f64,
        then: Then<'_>,
        shared: Option<&SumOverBatch>,
        running: Option<Running<'_>>,
    ) -> BatchNormed {
        let [n, channels, len] = self.channel_dims("batch_norm");
        if let Some((images, plus)) = self.as_images(then) {
            let normed = images.batch_norm(weight, bias, eps, then.with(plus.as_ref()), shared, running);
            return BatchNormed { out: normed.out.reshape(*self.shape()), ..normed };
        }
        let x = self.by_channels();
        let of_channels = || Tensor::stale(self.device(), [channels].into(), self.dtype.wide());
        let stats = ChannelStats { mean: of_channels(), variance: of_channels() };
        for running in running.iter().flat_map(|running| [running.mean, running.variance]) {
            self.check_of_channels(running, channels);
            assert!(running.geometry.is_contiguous(), "batch_norm: a view of running statistics");
        }
        let check = |count: f64| {
            let values = if count < 1.0 { "no" } else { "one" };
            assert!(
                running.is_none() || count > 1.0 || count.is_nan(),
                "batch_norm: a training pass over shape {} has {values} value a channel, and so no variance",
                self.shape()
            );
        };
        let Some(sum) = shared else {
            check((n * len) as f64);
            let out = x.batch_normalised(weight, bias, &stats, eps, then, Source::Batch(running));
            return BatchNormed { out, stats };
        };
        let totals = Tensor::stale(self.device(), [1 + 2 * channels].into(), DType::F64);
        kernel::batch_norm::totals(&x, &totals);
        let shared = SharedBatch::of(totals, sum);
        if let Backend::Cpu = self.device().backend() {
            check(shared.totals.with_slice(|totals: &[f64]| totals[0]));
        }
        let out =
            x.batch_normalised(weight, bias, &stats, eps, then, Source::Shared(&shared.into(), running));
        BatchNormed { out, stats }
    }

    /// As [`Tensor::batch_norm`], with means and variances from elsewhere, which are taken as constants.
    #[track_caller]
    pub fn batch_norm_with(
        &self,
        stats: &ChannelStats,
        weight: Option<&Tensor>,
        bias: Option<&Tensor>,
        eps: f64,
        then: Then<'_>,
    ) -> Tensor {
        self.channel_dims("batch_norm");
        if let Some((images, plus)) = self.as_images(then) {
            let out = images.batch_norm_with(stats, weight, bias, eps, then.with(plus.as_ref()));
            return out.reshape(*self.shape());
        }
        self.by_channels().batch_normalised(weight, bias, stats, eps, then, Source::Given)
    }

    /// `self` is dense; `stats` are filled where they are to be found.
    #[track_caller]
    fn batch_normalised<'a>(
        &self,
        weight: Option<&Tensor>,
        bias: Option<&Tensor>,
        stats: &ChannelStats,
        eps: f64,
        then: Then<'_>,
        source: Source<'a>,
    ) -> Tensor {
        let channels = self.dims()[1];
        let parts = [weight, bias, Some(&stats.mean), Some(&stats.variance)].map(|part| self.beside(part));
        parts.iter().flatten().for_each(|part| self.check_of_channels(part, channels));
        let [weight, bias, Some(mean), Some(variance)] = parts else { unreachable!("statistics are there") };
        assert!(weight.is_some() || bias.is_none(), "batch_norm: a bias without a weight");
        if let Then::AddRelu(plus) = then {
            self.check_like("batch_norm", plus);
        }
        if !matches!(then, Then::Nothing) && !self.is_rows_of_channels() {
            let (weight, bias) = (weight.as_ref(), bias.as_ref());
            let out = self.batch_normalised(weight, bias, stats, eps, Then::Nothing, source);
            return match then {
                Then::AddRelu(plus) => out.add(plus).relu(),
                _ => out.relu(),
            };
        }
        let [weight, bias] = [weight, bias].map(|part| part.map(|part| part.contiguous()));
        let plus = match then {
            Then::AddRelu(plus) => Some(plus.arranged(self.dense_order())),
            _ => None,
        };
        let out = self.stale_like();
        let scale = Tensor::stale(self.device(), [channels].into(), self.dtype.wide());
        let (mean, variance) = (mean.contiguous(), variance.contiguous());
        let relu = !matches!(then, Then::Nothing);
        // Where the input needs no gradient, that of what was added is made of the output itself, which is kept then.
        let bits = match self.device().backend() {
            Backend::Gpu(_) if relu && graph::records(&[self]) => gpu::batch_norm::room_for_bits(self),
            _ => None,
        };
        let fused = Fused { plus: plus.as_ref(), relu, bits: bits.as_ref() };
        let affine = [weight.as_ref(), bias.as_ref()];
        let parts = |running: Running<'a>| ([running.mean, running.variance], running.share);
        let outputs = [&out, &mean, &variance, &scale];
        let (count, shared) = match source {
            Source::Batch(running) => {
                kernel::batch_norm::train(self, affine, eps, fused, running.map(parts), outputs);
                (Some((self.count() / channels.max(1)) as f64), None)
            }
            Source::Shared(shared, running) => {
                let totals = &shared.totals;
                kernel::batch_norm::train_shared(
                    self,
                    totals,
                    affine,
                    eps,
                    fused,
                    running.map(parts),
                    outputs,
                );
                (None, Some(shared))
            }
            Source::Given => {
                kernel::batch_norm::normalise(self, [&mean, &variance], affine, eps, fused, [&out, &scale]);
                (None, None)
            }
        };
        let inputs = [Some(self), weight.as_ref(), bias.as_ref(), plus.as_ref()];
        let out = recorded_where(out, Op::BatchNorm { count, relu }, inputs, |out| {
            let mask = if relu { bits.or_else(|| keep(out)) } else { None };
            [keep(self), weight.as_ref().and_then(keep), keep(&mean), keep(&scale), mask]
        });
        if let (Some(node), Some(shared)) = (&out.node, shared) {
            node.body().shared = Some(shared.clone());
        }
        out
    }

    /// A weight, bias or statistic as kernels take it beside this tensor: in f32 where this has floats of 16 bits.
    fn beside(&self, part: Option<&Tensor>) -> Option<Tensor> {
        part.map(|part| if self.dtype.is_half() { part.widened() } else { part.clone() })
    }

    #[track_caller]
    fn check_of_channels(&self, part: &Tensor, channels: usize) {
        self.check_beside("batch_norm", part);
        assert!(
            part.dims() == [channels],
            "batch_norm: a weight, bias, mean or variance of shape {} for {channels} channels",
            part.shape()
        );
    }

    #[track_caller]
    fn check_beside(&self, op: &str, part: &Tensor) {
        let (dtype, wanted) = (part.dtype, self.dtype.wide());
        assert!(dtype == wanted, "{op}: a weight, bias or statistic of {dtype} where {wanted} is needed");
        assert!(self.device() == part.device(), "{op}: tensors that live on different devices");
    }

    /// (N, C, everything else).
    #[track_caller]
    fn channel_dims(&self, op: &str) -> [usize; 3] {
        let dims = self.dims();
        assert!(dims.len() >= 2, "{op}: a shape of (N, C, ...) is needed, not {}", self.shape());
        [dims[0], dims[1], dims[2..].iter().product()]
    }

    /// Divides each row, the last dimension, by the root of its mean square (with `eps` added to that), then multiplies by `weight`, of a
    /// row's length. It is made of other operations.
    #[track_caller]
    pub fn rms_norm(&self, weight: &Tensor, eps: f64) -> Tensor {
        let width = weight.count();
        assert!(
            self.dims().last() == Some(&width) && weight.dims() == [width],
            "rms_norm: a weight of shape {} for rows of shape {}",
            weight.shape(),
            self.shape()
        );
        let wide = self.widened();
        let square = wide.square().mean(&[self.shape().n_dims() - 1], Keep::Yes) + eps;
        let normal = wide * square.powf(-0.5) * weight;
        if self.is_raised() { normal } else { normal.cast(self.dtype) }
    }

    /// Normalises the channels of each sample of (N, C, ...) in `groups` groups, each over all of its elements, to mean 0 and variance 1 (with
    /// `eps` added to the variance), then multiplies by `weight` and adds `bias`, both of (C). On a CPU it is one operation.
    #[track_caller]
    pub fn group_norm(&self, groups: usize, weight: &Tensor, bias: &Tensor, eps: f64) -> Tensor {
        if self.is_raised() {
            return self.widened().group_norm(groups, weight, bias, eps);
        }
        let [n, channels, pixels] = self.channel_dims("group_norm");
        assert!(
            groups > 0 && channels.is_multiple_of(groups),
            "group_norm: {channels} channels of shape {} don't fall into {groups} groups",
            self.shape()
        );
        let [weight, bias] =
            [weight, bias].map(|part| if self.dtype.is_half() { part.widened() } else { part.clone() });
        for part in [&weight, &bias] {
            self.check_beside("group_norm", part);
            assert!(
                part.dims() == [channels],
                "group_norm: a weight or bias of shape {} for {channels} channels",
                part.shape()
            );
        }
        let sizes = [channels / groups, pixels];
        if self.device().gpu().is_some() || self.dtype.is_half() || self.count() == 0 {
            let rows = self.reshape([n * groups, sizes[0] * pixels]);
            let normal = rows.layer_norm(1, None, None, eps).reshape([n, channels, pixels]);
            let [weight, bias] = [&weight, &bias].map(|part| part.reshape([channels, 1]));
            return (normal * weight + bias).reshape(*self.shape());
        }
        let [x, weight, bias] = [self, &weight, &bias].map(Tensor::contiguous);
        let out = Tensor::stale(self.device(), *self.shape(), self.dtype);
        let [mean, scale] = [0, 1].map(|_| Tensor::stale(self.device(), [n, groups].into(), self.dtype));
        cpu::group_norm::forward(&x, [&weight, &bias], eps, sizes, [&out, &mean, &scale]);
        recorded(out, Op::GroupNorm { sizes }, &[&x, &weight, &bias], |_| {
            [keep(&x), keep(&weight), keep(&mean), keep(&scale)]
        })
    }

    /// Normalises over the last `n_dims` dimensions to mean 0 and variance 1 (with `eps` added to the variance), then
    /// multiplies by `weight` and adds `bias`, both of those dimensions' shape.
    #[track_caller]
    pub fn layer_norm(
        &self,
        n_dims: usize,
        weight: Option<&Tensor>,
        bias: Option<&Tensor>,
        eps: f64,
    ) -> Tensor {
        let dtype = if self.is_raised() { DType::F32 } else { self.dtype };
        self.layer_norm_in(dtype, n_dims, weight, bias, eps)
    }

    /// As [`Tensor::layer_norm`], rounded to another type of floats, for a product that takes its input in that: what
    /// `layer_norm(..).cast(dtype)` gives, forward and backward, on a CPU to the bit; from f32 to 16 bits a GPU writes the numbers in
    /// that type alone, and reads their gradients so.
    #[track_caller]
    pub fn layer_norm_in(
        &self,
        dtype: DType,
        n_dims: usize,
        weight: Option<&Tensor>,
        bias: Option<&Tensor>,
        eps: f64,
    ) -> Tensor {
        if self.is_raised() {
            return self.widened().layer_norm_in(dtype, n_dims, weight, bias, eps);
        }
        if dtype != self.dtype && !(self.dtype == DType::F32 && dtype.is_half()) {
            return self.layer_norm_in(self.dtype, n_dims, weight, bias, eps).cast(dtype);
        }
        self.layer_normed(dtype, n_dims, [weight, bias], eps, None)
    }

    /// The sum of this and a branch, and its layer norm: what `let sum = self + branch` and `sum.layer_norm_in(..)` give, forward and
    /// backward, to the bit. Where the sum is f32, branch and norm are in one type of 16 bits, and rows have up to 2048 elements, a
    /// multiple of 8, a GPU goes over memory once.
    #[track_caller]
    pub fn sum_layer_norm_in(
        &self,
        branch: &Tensor,
        dtype: DType,
        n_dims: usize,
        weight: Option<&Tensor>,
        bias: Option<&Tensor>,
        eps: f64,
    ) -> [Tensor; 2] {
        let row: usize = self.dims().iter().rev().take(n_dims).product();
        let goes = self.device().gpu().is_some()
            && self.device() == branch.device()
            && (self.dtype, branch.dtype, dtype.is_half()) == (DType::F32, dtype, true)
            && self.shape() == branch.shape()
            && [self, branch].iter().all(|x| x.geometry.is_contiguous())
            && gpu::norm::is_held(row);
        if !goes {
            let sum = self.add(branch);
            let out = sum.layer_norm_in(dtype, n_dims, weight, bias, eps);
            return [sum, out];
        }
        let sum = Tensor::stale(self.device(), *self.shape(), self.dtype);
        let sum = recorded(sum, Op::AddHalf(branch.dtype), &[self, branch], |_| [None]);
        let out = sum.layer_normed(dtype, n_dims, [weight, bias], eps, Some((self, branch)));
        [sum, out]
    }

    /// As [`Tensor::layer_norm_in`]. Where the elements are the `terms` of a sum they are written first.
    #[track_caller]
    fn layer_normed(
        &self,
        dtype: DType,
        n_dims: usize,
        [weight, bias]: [Option<&Tensor>; 2],
        eps: f64,
        terms: Option<(&Tensor, &Tensor)>,
    ) -> Tensor {
        let [weight, bias] = [weight, bias].map(|part| self.beside(part));
        let all = self.shape().n_dims();
        assert!(
            n_dims >= 1 && n_dims <= all,
            "layer_norm: over {n_dims} dimensions of shape {}",
            self.shape()
        );
        let row = Shape::new(&self.dims()[all - n_dims..]);
        for part in [&weight, &bias].into_iter().flatten() {
            self.check_beside("layer_norm", part);
            assert!(
                *part.shape() == row,
                "layer_norm: a weight or bias of shape {} for rows of shape {row}",
                part.shape()
            );
        }
        assert!(weight.is_some() || bias.is_none(), "layer_norm: a bias without a weight");
        let width = row.count();
        let x = self.contiguous();
        let [weight, bias] = [weight, bias].map(|part| part.map(|part| part.contiguous()));
        let out = Tensor::stale(self.device(), *self.shape(), dtype);
        let rows: Shape = [self.count() / width.max(1)].into();
        let (mean, scale) = [0, 1].map(|_| Tensor::stale(self.device(), rows, self.dtype.wide())).into();
        let (affine, outputs) = ([weight.as_ref(), bias.as_ref()], [&out, &mean, &scale]);
        match (terms, self.device().backend()) {
            (Some((from, branch)), Backend::Gpu(engine)) => {
                gpu::norm::sum_layer_norm(engine, from, Some((branch, &x)), affine, eps, width, outputs);
            }
            _ => kernel::norm::layer_norm(&x, affine[0], affine[1], eps, width, outputs),
        }
        let mut inputs = [&x, &x, &x];
        let n_inputs = 1 + [&weight, &bias]
            .into_iter()
            .flatten()
            .zip(&mut inputs[1..])
            .map(|(from, to)| *to = from)
            .count();
        recorded(out, Op::LayerNorm { row: width, n_dims, eps, dtype }, &inputs[..n_inputs], |_| {
            let [weight, bias] = [&weight, &bias].map(|part| part.as_ref().and_then(keep));
            [keep(&x), weight, keep(&mean), keep(&scale), bias]
        })
    }
}
