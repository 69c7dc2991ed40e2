//! What a layer is: something that computes, and that can name its parameters.

use crate::param::Param;
use crate::seam::Seam;
use phalanx_tensor::{DType, Device, DropoutKey, Shape, SumOverBatch, Tensor, Within, no_grad};
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

/// A layer or a whole model.
///
/// Most modules are a table of parts and a `forward`, which [`crate::module!`] takes; the others write `visit` by hand, a line a
/// part.
///
/// A model is a row of *blocks*, one after the other, and may be cut between any two of them: that is where pipelines and
/// placements cut it. A module that says nothing of blocks is a single one.
pub trait Module: Send + Sync {
    /// The output for `x`. What changes from call to call (training or not, random numbers) is in `ctx`.
    fn forward(&self, x: &Tensor, ctx: &mut Ctx) -> Tensor;

    /// Names every part that holds parameters or buffers, in the order in which PyTorch would list them.
    fn visit(&mut self, v: &mut Visitor<'_>);

    /// How many blocks the module is a row of.
    fn blocks(&self) -> usize {
        1
    }

    /// The output of block `block`, from 0, for that of the block before it, or for the input of the module. With one `ctx` for
    /// all of them, `forward` is all blocks in order. Panics if there is no such block.
    #[track_caller]
    fn forward_block(&self, block: usize, x: &Tensor, ctx: &mut Ctx) -> Tensor {
        assert!(block == 0, "forward_block: block {block} of a module of a single block");
        self.forward(x, ctx)
    }

    /// Which block the parameter or buffer of this name, as `visit` tells it, belongs to.
    fn block_of(&self, name: &str) -> usize {
        let _ = name;
        0
    }

    /// The blocks behind that one that have the parameter as well ([`Visitor::shared`]), in order.
    fn shared_by(&self, name: &str) -> Vec<usize> {
        let _ = name;
        Vec::new()
    }
}

impl<M: Module + ?Sized> Module for Box<M> {
    fn forward(&self, x: &Tensor, ctx: &mut Ctx) -> Tensor {
        (**self).forward(x, ctx)
    }

    fn visit(&mut self, v: &mut Visitor<'_>) {
        (**self).visit(v);
    }

    fn blocks(&self) -> usize {
        (**self).blocks()
    }

    fn forward_block(&self, block: usize, x: &Tensor, ctx: &mut Ctx) -> Tensor {
        (**self).forward_block(block, x, ctx)
    }

    fn block_of(&self, name: &str) -> usize {
        (**self).block_of(name)
    }

    fn shared_by(&self, name: &str) -> Vec<usize> {
        (**self).shared_by(name)
    }
}

/// Modules one after the other, named "0", "1" and so on, as a list of PyTorch's has them: of a length that is known late.
impl<M: Module> Module for Vec<M> {
    fn forward(&self, x: &Tensor, ctx: &mut Ctx) -> Tensor {
        self.iter().fold(x.clone(), |x, module| module.forward(&x, ctx))
    }

    fn visit(&mut self, v: &mut Visitor<'_>) {
        for (i, module) in self.iter_mut().enumerate() {
            v.child(&i.to_string(), module);
        }
    }
}

/// A part that may be left out, and then does nothing.
impl<M: Module> Module for Option<M> {
    fn forward(&self, x: &Tensor, ctx: &mut Ctx) -> Tensor {
        self.as_ref().map_or_else(|| x.clone(), |module| module.forward(x, ctx))
    }

    fn visit(&mut self, v: &mut Visitor<'_>) {
        if let Some(module) = self {
            module.visit(v);
        }
    }
}

/// What a tensor of a layer is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// A parameter: it gets gradients, and the optimizer moves it.
    Learned,
    /// A buffer, such as a running mean: saved with the model and the same on all ranks, but moved by the layer alone.
    Kept,
    /// Another use of the parameter that has this name, and that an earlier part of the model holds.
    Shared,
}

/// Walks the parts of a module and hands each parameter and buffer, with its dotted name, to whoever asked.
pub struct Visitor<'a> {
    path: String,
    found: Found<'a>,
}

/// Who asked for what.
enum Found<'a> {
    Params(&'a mut dyn FnMut(&str, Role, &mut Param)),
    Seams(&'a mut dyn FnMut(&str, &mut Seam)),
}

impl<'a> Visitor<'a> {
    /// A visitor that calls `found` for each parameter and buffer.
    pub fn new(found: &'a mut dyn FnMut(&str, Role, &mut Param)) -> Visitor<'a> {
        Visitor { path: String::new(), found: Found::Params(found) }
    }

    /// A visitor that calls `found` for the seam of each layer that has one, with the layer's dotted name.
    pub fn of_seams(found: &'a mut dyn FnMut(&str, &mut Seam)) -> Visitor<'a> {
        Visitor { path: String::new(), found: Found::Seams(found) }
    }

    /// A part that is a module itself. Without a name its parts are named as if they were those of the module around it.
    pub fn child(&mut self, name: &str, module: &mut dyn Module) {
        let before = self.enter(name);
        module.visit(self);
        self.path.truncate(before);
    }

    /// A parameter.
    pub fn param(&mut self, name: &str, param: &mut Param) {
        self.leaf(name, Role::Learned, param);
    }

    /// A parameter that an earlier part holds under this name, seen from the part around this one; both get its values, and its
    /// gradient is the sum of theirs.
    pub fn shared(&mut self, name: &str, param: &mut Param) {
        self.leaf(name, Role::Shared, param);
    }

    /// A buffer: a tensor that the layer itself overwrites, with [`Tensor::copy_from`] in a training pass.
    pub fn buffer(&mut self, name: &str, buffer: &mut Param) {
        self.leaf(name, Role::Kept, buffer);
    }

    /// The seam of the part of this name; of the module itself without one.
    pub fn seam(&mut self, name: &str, seam: &mut Seam) {
        let before = self.enter(name);
        if let Found::Seams(found) = &mut self.found {
            found(&self.path, seam);
        }
        self.path.truncate(before);
    }

    fn leaf(&mut self, name: &str, role: Role, param: &mut Param) {
        let before = self.enter(name);
        if let Found::Params(found) = &mut self.found {
            found(&self.path, role, param);
        }
        self.path.truncate(before);
    }

    fn enter(&mut self, name: &str) -> usize {
        let before = self.path.len();
        if before > 0 && !name.is_empty() {
            self.path.push('.');
        }
        self.path.push_str(name);
        before
    }
}

/// A row has fewer blocks than these bits count.
const BLOCK_BITS: u32 = 14;
/// A block has fewer random layers than these bits count.
const LAYER_BITS: u32 = 16;
/// All that a float32 below 1 has.
const NOISE_BITS: u32 = 24;

/// The mean cross entropy of scores (N, C) of some of the classes, with labels (N) among all of them, for such a label smoothing:
/// by whoever knows the scores of the other classes.
pub type CrossEntropyInParts = Arc<dyn Fn(&Tensor, &Tensor, f64) -> Tensor + Send + Sync>;

/// What a forward pass needs to know beside its input.
#[derive(Clone)]
pub struct Ctx {
    training: bool,
    seed: u64,
    step: u64,
    /// The number in the data set of each row of the batch.
    samples: Arc<[u64]>,
    /// Which block of a row it is in, if it is in one: see [`Ctx::in_block`].
    block: u64,
    /// How many random layers were asked so far, of this block.
    layer: u64,
    shared: Option<SumOverBatch>,
    fewest_normalised: Option<usize>,
    /// Whether layers have seen this pass before.
    again: bool,
    /// Which part of each sample is at hand.
    within: Option<Within>,
    classes: Option<CrossEntropyInParts>,
    one_off: bool,
}

impl fmt::Debug for Ctx {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Ctx { training, seed, step, samples, block, layer, shared, again, within, .. } = self;
        let shared = shared.is_some();
        write!(
            f,
            "Ctx {{ training: {training}, seed: {seed}, step: {step}, samples: {samples:?}, block: {block}, layer: {layer}, "
        )?;
        write!(f, "shared: {shared}, again: {again}, within: {within:?} }}")
    }
}

impl Ctx {
    /// Evaluation: dropout does nothing.
    pub fn eval() -> Ctx {
        Ctx::eval_on(0, Arc::from([]))
    }

    /// Evaluation on the samples with these numbers, in the run with seed `seed`: what noise a model makes of its own
    /// ([`Ctx::normal`]) is that of the sample, whenever it is judged.
    pub fn eval_on(seed: u64, samples: Arc<[u64]>) -> Ctx {
        Ctx { training: false, ..Ctx::train(seed, 0, samples) }
    }

    /// Training step `step` of the run with seed `seed`, on the samples with these numbers.
    pub fn train(seed: u64, step: u64, samples: Arc<[u64]>) -> Ctx {
        Ctx {
            training: true,
            seed,
            step,
            samples,
            block: 0,
            layer: 0,
            shared: None,
            fewest_normalised: None,
            again: false,
            within: None,
            classes: None,
            one_off: false,
        }
    }

    /// The same, with statistics over the batch taken over all of its parts: those of all who come with `sum`, which a strategy with
    /// synchronized batch norms gives (`Strategy::shared_batch`).
    pub fn sharing(self, sum: SumOverBatch) -> Ctx {
        Ctx { shared: Some(sum), ..self }
    }

    /// The same, of a step that comes once: it has other numbers of samples than most, on some rank. Nothing of it is recorded to be
    /// replayed.
    pub fn one_off(self) -> Ctx {
        Ctx { one_off: true, ..self }
    }

    /// See [`Ctx::one_off`].
    pub fn is_one_off(&self) -> bool {
        self.one_off
    }

    /// The same pass once more from here on, to the same values: a layer that keeps count of passes has counted it.
    pub fn again(&self) -> Ctx {
        Ctx { again: true, ..self.clone() }
    }

    /// Whether it is a pass that was made before, and whose values are only needed once more.
    pub fn is_again(&self) -> bool {
        self.again
    }

    /// The same pass over a part of each sample: what layers are given, and what they drop, is this part of the whole.
    pub fn within(self, part: Within) -> Ctx {
        Ctx { within: Some(part), ..self }
    }

    /// The same pass, in which the last layer has the scores of some classes alone.
    pub fn with_classes_in_parts(self, cross_entropy: CrossEntropyInParts) -> Ctx {
        Ctx { classes: Some(cross_entropy), ..self }
    }

    /// Who takes the cross entropy where the last layer has the scores of some classes alone.
    pub fn classes_in_parts(&self) -> Option<&CrossEntropyInParts> {
        self.classes.as_ref()
    }

    /// The number in the data set of each row of the batch; none in an evaluation that doesn't tell ([`Ctx::eval`]).
    pub fn samples(&self) -> &Arc<[u64]> {
        &self.samples
    }

    /// Which step of the run it is.
    pub fn step(&self) -> u64 {
        self.step
    }

    /// The same pass over a part of its rows.
    #[track_caller]
    pub fn of_samples(&self, rows: Range<usize>) -> Ctx {
        if self.samples.is_empty() && !self.training {
            return self.clone();
        }
        Ctx { samples: self.samples[rows].into(), ..self.clone() }
    }

    /// How statistics go over all parts of the batch, if it has more than this one.
    pub fn shared(&self) -> Option<&SumOverBatch> {
        self.shared.as_ref()
    }

    /// A batch norm tells how many values of each channel this part of the batch has for it.
    pub(crate) fn normalises(&mut self, values: usize) {
        let fewest = self.fewest_normalised.unwrap_or(usize::MAX);
        self.fewest_normalised = Some(values.min(fewest));
    }

    /// The fewest values of a channel that any batch norm had in the passes with this, if there was one. A channel with a
    /// single value has no variance, so no model with such a batch norm can be trained on batches of that size.
    pub fn fewest_normalised(&self) -> Option<usize> {
        self.fewest_normalised
    }

    /// Whether this is a training step.
    pub fn training(&self) -> bool {
        self.training
    }

    /// Runs `f` within block `block` of a row, whose random layers count by themselves: so a block has the same masks whoever runs
    /// it, and whatever was run before it.
    pub(crate) fn in_block<R>(&mut self, block: usize, f: impl FnOnce(&mut Ctx) -> R) -> R {
        let around = (self.block, self.layer);
        // A row within a block of another has numbers of its own.
        (self.block, self.layer) = ((around.0 << BLOCK_BITS).wrapping_add(block as u64 + 1), 0);
        let output = f(self);
        (self.block, self.layer) = around;
        output
    }

    /// How many random layers were asked so far: what a pass that is cut hands on from block to block.
    pub fn layers(&self) -> u64 {
        self.layer
    }

    /// The same pass, going on behind so many random layers.
    pub fn after_layers(self, layer: u64) -> Ctx {
        Ctx { layer, ..self }
    }

    /// Uniform noise from [0, 1), in steps of 2^-24, of float32 and this shape, whose first dimension is that of the batch's rows: other noise
    /// at each call, and a function of the run's seed, the step and the sample. So it is the same whichever rank makes it and whichever
    /// samples share its batch, and other noise in each replay of a recorded pass.
    ///
    /// In an evaluation it is the same at every step; where that doesn't tell its samples, rows are numbered from 0. Where each rank has a
    /// stretch of each sample's positions (`parallel.context`), these are the noise's dimension 1, if it has one.
    #[track_caller]
    pub fn uniform(&mut self, device: &Device, dims: impl Into<Shape>) -> Tensor {
        let shape = dims.into();
        let rows = shape.dims().first().copied().unwrap_or(0);
        let samples = match &*self.samples {
            [] if !self.training => (0..rows as u64).collect(),
            all => {
                assert!(rows == all.len(), "noise: {rows} rows for the {} samples of the batch", all.len());
                Arc::clone(&self.samples)
            }
        };
        let [zeros, quarters] = [0.0, 0.25].map(|x| Tensor::full(device, shape, x, DType::F32));
        // Bit after bit of each number, the last one first: what is dropped is 0, and what stays is twice the quarter that it was.
        let with_bit = |sum: Tensor, _| {
            let key = self.dropout_key();
            let within = key.within.filter(|part| part.dim < shape.n_dims());
            let key = DropoutKey { samples: Arc::clone(&samples), within, ..key };
            sum * 0.5 + quarters.dropout(0.5, &key)
        };
        no_grad(|| (0..NOISE_BITS).fold(zeros, with_bit))
    }

    /// The same of the standard normal distribution, as far as 5.8 from 0: what a model draws from besides dropout, as the noise of a
    /// variational autoencoder, or what a diffusion model adds.
    ///
    /// ```
    /// use phalanx_nn::Ctx;
    /// use phalanx_tensor::Device;
    ///
    /// let device = Device::cpu(1);
    /// let noise = |samples: &[u64]| Ctx::train(7, 100, samples.into()).normal(&device, [samples.len(), 3]);
    /// let [both, last] = [noise(&[5, 9]), noise(&[9])];
    /// assert_eq!(both.narrow(0, 1, 1).to_vec::<f32>(), last.to_vec::<f32>());
    /// ```
    #[track_caller]
    pub fn normal(&mut self, device: &Device, dims: impl Into<Shape>) -> Tensor {
        let shape = dims.into();
        let [far, turn] = [(); 2].map(|()| self.uniform(device, shape));
        // Box and Muller's way; 1 - x is never 0.
        no_grad(|| (far.affine(-1.0, 1.0).ln() * -2.0).sqrt() * (turn * std::f64::consts::TAU).cos())
    }

    /// The key of the next random layer. A mask depends on the seed, the step, the layer and the sample, not on the batch.
    pub fn dropout_key(&mut self) -> DropoutKey {
        self.layer += 1;
        let layer = (self.block << LAYER_BITS).wrapping_add(self.layer);
        let key = DropoutKey::new(self.seed, self.step, layer, Arc::clone(&self.samples));
        DropoutKey { within: self.within, ..key }
    }
}
