//! What a trainer asks of a strategy.

use crate::error::Error;
use crate::evaluation::{EvalPass, Judge};
use crate::hook::Kept;
use crate::local::{Pass, PassLoss};
use crate::portion::Portion;
use phalanx_nn::optim::{Clip, Optimizer};
use phalanx_nn::{Average, NotFinite, Parameters, Shadow};
use phalanx_tensor::{Device, GpuSpan, HostSpan, Later, SumOverBatch, Tensor};
use std::borrow::Cow;
use std::ops::Range;

/// Which share of the samples is this process's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// From 0.
    pub rank: usize,
    /// How many share.
    pub world_size: usize,
}

/// The shards that every step is cut into, and those of this process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shards {
    /// How many there are.
    pub of: usize,
    /// This process's, one pass each in this order.
    pub held: Range<usize>,
}

/// What [`Strategy::collect`] gives: elements of the arena, those of one parameter after the other with the padding between
/// them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Collected {
    /// The values.
    pub values: Vec<f32>,
    /// Of each array beside them.
    pub beside: Vec<Vec<f32>>,
}

/// As [`Strategy::cut_gradients`], one parameter after the other.
pub(crate) fn cut_each<S: Strategy + ?Sized>(
    strategy: &mut S,
    parameters: &Parameters,
    clip: &Clip,
    counts: &dyn Fn(usize) -> bool,
) -> f64 {
    let mut squares = 0.0;
    strategy.each_gradient(parameters, &|_| true, &mut |held| {
        let own = clip.cut(held.values);
        squares += if held.counts && counts(held.parameter) { own } else { 0.0 };
    });
    squares
}

/// As [`Strategy::multiply_gradients`], likewise.
pub(crate) fn multiply_each<S: Strategy + ?Sized>(strategy: &mut S, parameters: &Parameters, by: f32) {
    let multiply = &mut |held: HeldGradient<'_>| held.values.iter_mut().for_each(|grad| *grad *= by);
    strategy.each_gradient(parameters, &|_| true, multiply);
}

/// Whether a backward pass is the last of its step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sync {
    /// It is: gradients are made whole.
    Now,
    /// More follow: gradients add up locally, nothing is sent.
    Later,
}

/// Which values are here before the first step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Here {
    /// Those of the whole model, where they belong.
    All,
    /// Those of [`Strategy::portion`], in [`Strategy::own_parameters`], and no others that mean anything.
    Portion,
}

/// Gradients that a rank holds of one parameter once a step's are whole.
pub struct HeldGradient<'a> {
    /// Which parameter.
    pub parameter: usize,
    /// Which of its elements is the first.
    pub start: usize,
    /// Some of its gradients, or all of them.
    pub values: &'a mut [f32],
    /// Whether all ranks that share parameters out hold these.
    pub is_everywhere: bool,
    /// Whether they count here: of those that several ranks hold, they do on one.
    pub counts: bool,
}

/// How a model is trained by several ranks, or by one.
pub trait Strategy: Send {
    /// Which share is this process's.
    fn place(&self) -> Place;

    /// The shards that every step is cut into, where the strategy goes by shards; none where ranks share every pass.
    fn shards(&self) -> Option<Shards> {
        None
    }

    /// Called once before the first step: makes all ranks start from the values and buffers that the first has, or from first ones
    /// if it has none. Fails if they run different models, or don't answer.
    fn prepare(&mut self, parameters: &Parameters) -> Result<(), Error>;

    /// The same where all ranks have the same values and buffers already, which then aren't sent.
    fn prepare_alike(&mut self, parameters: &Parameters) -> Result<(), Error> {
        self.prepare(parameters)
    }

    /// Takes a parameter or buffer from a file, as [`Parameters::load_one`] does, before [`Strategy::begin`].
    fn load_one(&mut self, parameters: &Parameters, name: &str, values: &[f32]) {
        parameters.load_one(name, values);
    }

    /// Called once after that, when the values that the run begins with are here, the same on all ranks that have them.
    fn begin(&mut self, parameters: &Parameters, here: Here) -> Result<(), Error> {
        let _ = (parameters, here);
        Ok(())
    }

    /// What this rank keeps from step to step.
    fn portion(&self, parameters: &Parameters) -> Portion {
        Portion::whole(parameters.layout().len())
    }

    /// Called when the ranks part, before others come together: what this rank keeps is in [`Strategy::own_parameters`] from then on,
    /// which nobody uses, and can be handed over. `because` is what whoever waits in a collective of the strategy's own is told, where
    /// the ranks part in the middle of a step. Afterwards only [`Strategy::portion`] and what was named here are asked for, and
    /// [`Strategy::step`], if the gradients of a step are whole.
    fn part(&mut self, parameters: &Parameters, because: Option<&str>) {
        let _ = (parameters, because);
    }

    /// One pass, forward and backward: gives the mean loss over this rank's samples, 0 without any. How it is made, in one go or
    /// in parts on several devices, is the strategy's business. Panics as [`Strategy::backward`] does.
    fn pass(&mut self, pass: &Pass<'_>) -> Result<f64, Error> {
        in_one_go(self, pass, &mut || ()).map(PassLoss::item)
    }

    /// As [`Strategy::pass`]. `meanwhile` is called once: where the strategy can, when its device was given the pass and before anyone
    /// waits for that, so what it does takes no time of a GPU's; else before the pass.
    fn pass_while(&mut self, pass: &Pass<'_>, meanwhile: &mut dyn FnMut()) -> Result<f64, Error> {
        meanwhile();
        self.pass(pass)
    }

    /// As [`Strategy::pass_while`], but where the strategy can without anyone waiting for the loss, so that its device can be given what
    /// comes next.
    fn pass_ahead(&mut self, pass: &Pass<'_>, meanwhile: &mut dyn FnMut()) -> Result<PassLoss, Error> {
        self.pass_while(pass, meanwhile).map(PassLoss::Known)
    }

    /// Called before the forward pass that each [`Strategy::backward`] belongs to.
    fn begin_pass(&mut self, parameters: &Parameters) {
        let _ = parameters;
    }

    /// One backward pass. `loss` is the mean over this rank's samples, none if it has none, and `weight` is the share of
    /// these samples in all samples of the step, so that the sum over ranks and passes is the gradient of the mean over all.
    /// Panics if it comes before [`Strategy::prepare`], or after a pass with [`Sync::Now`] and before [`Strategy::finish`].
    fn backward(
        &mut self,
        parameters: &Parameters,
        loss: Option<&Tensor>,
        weight: f64,
        sync: Sync,
    ) -> Result<(), Error>;

    /// Returns when the gradients of the step are whole, and the buffers the same on all ranks. Fails if a rank is gone or
    /// late, or if parameters got no gradient where that isn't allowed.
    fn finish(&mut self, parameters: &Parameters) -> Result<(), Error>;

    /// How statistics over a batch are taken over the parts of all ranks, as with
    /// [`DdpConfig::sync_batch_norm`](crate::DdpConfig::sync_batch_norm): what a program that makes its own passes gives them by
    /// [`Ctx::sharing`](phalanx_nn::Ctx::sharing); none if each rank's part stands for itself. Where there is one, all ranks make their
    /// forward and backward passes, also one that has no samples. On GPUs nothing of these is read before [`Strategy::pass`] or
    /// [`Strategy::finish`] has returned: they wait for the other ranks, and find one that is lost.
    fn shared_batch(&self) -> Option<SumOverBatch> {
        None
    }

    /// Whether ranks keep something from step to step that [`Strategy::kept`] gives; the same on all ranks.
    fn keeps(&self) -> bool {
        false
    }

    /// What the ranks keep from step to step beside parameters and buffers, for a checkpoint: by rank, and on rank 0 only. All
    /// ranks must ask at once, between two steps.
    fn kept(&mut self) -> Result<Vec<Kept>, Error> {
        Ok(Vec::new())
    }

    /// Goes on with what [`Strategy::kept`] gave, of all ranks that there were, which may have been another number. Called before the
    /// first step, on all ranks with the same.
    fn go_on(&mut self, kept: Vec<Kept>) -> Result<(), Error> {
        drop(kept);
        Ok(())
    }

    /// Whether any rank says so. All ranks must ask.
    fn any(&mut self, says: bool) -> Result<bool, Error> {
        let mut count = [f64::from(u8::from(says))];
        self.sum(&mut count)?;
        Ok(count != [0.0])
    }

    /// The parameters whose values this rank's optimizer moves, where those that the trainer knows aren't.
    fn own_parameters<'a>(&'a self, parameters: &'a Parameters) -> &'a Parameters {
        parameters
    }

    /// The first number that is none among the gradients that this rank holds, once they are whole.
    fn first_gradient_not_finite(&self, parameters: &Parameters) -> Option<NotFinite> {
        self.own_parameters(parameters).first_gradient_not_finite()
    }

    /// Copies elements of the values of [`Strategy::own_parameters`], of which this rank holds all, to `into`, between two
    /// memberships.
    fn read_held(&self, parameters: &Parameters, elements: Range<usize>, into: &mut [f32]) {
        self.own_parameters(parameters).values().read_elements(elements, into);
    }

    /// Overwrites such elements, before [`Strategy::begin`] with [`Here::Portion`].
    fn write_held(&self, parameters: &Parameters, elements: Range<usize>, values: &[f32]) {
        self.own_parameters(parameters).values().write_elements(elements, values);
    }

    /// Calls `each` with the gradients that this rank holds of the parameters that `of` names, in order, once they are whole. Of a GPU's,
    /// these come to the host and go back, and no others.
    fn each_gradient(
        &mut self,
        parameters: &Parameters,
        of: &dyn Fn(usize) -> bool,
        each: &mut dyn FnMut(HeldGradient<'_>),
    ) {
        let (layout, arena) = (parameters.layout(), parameters.grads().arena());
        let counts = self.place().rank == 0;
        for parameter in (0..layout.count()).filter(|&i| of(i)) {
            let mut span = arena.host_span::<f32>(parameter..parameter + 1);
            let values = &mut span[..layout.range(parameter).len()];
            each(HeldGradient { parameter, start: 0, values, is_everywhere: true, counts });
        }
    }

    /// Calls `change`, once, with all gradients that this rank holds of the parameters that `of` names, one behind the other in order,
    /// once they are whole; they become what it leaves. Of a GPU's, these come to the host and go back, and no others.
    fn change_gradients(
        &mut self,
        parameters: &Parameters,
        of: &dyn Fn(usize) -> bool,
        change: &mut dyn FnMut(&mut [f32]) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let mut all = Vec::new();
        if self.is_sharded() {
            self.each_gradient(parameters, of, &mut |held| all.extend_from_slice(held.values));
            change(&mut all)?;
            let mut left = &all[..];
            self.each_gradient(parameters, of, &mut |held| {
                let (now, later) = left.split_at(held.values.len());
                held.values.copy_from_slice(now);
                left = later;
            });
            return Ok(());
        }
        let (layout, arena) = (parameters.layout(), parameters.grads().arena());
        let mut spans: Vec<HostSpan<f32>> =
            (0..layout.count()).filter(|&i| of(i)).map(|i| arena.host_span(i..i + 1)).collect();
        let count = |span: &HostSpan<f32>| layout.range(span.params().start).len();
        spans.iter().for_each(|span| all.extend_from_slice(&span[..count(span)]));
        change(&mut all)?;
        let mut left = &all[..];
        for span in &mut spans {
            let (now, later) = left.split_at(count(span));
            span[..now.len()].copy_from_slice(now);
            left = later;
        }
        Ok(())
    }

    /// Lends out the gradients that this rank holds of neighbouring parameters where they lie on a GPU, once they are whole: in one run or
    /// in several, one after the other. Says no where they lie in the host's memory.
    fn lend_gradients(
        &mut self,
        parameters: &Parameters,
        params: Range<usize>,
        lend: &mut dyn FnMut(GpuSpan<f32>) -> Result<(), Error>,
    ) -> Result<bool, Error> {
        match parameters.grads().arena().gpu_span(params) {
            Some(span) => lend(span).map(|()| true),
            None => Ok(false),
        }
    }

    /// Cuts each gradient that this rank holds as `clip` says, once they are whole; gives the sum of the squares of those that count here,
    /// of the parameters that `counts` names, if there is a limit on the norm.
    fn cut_gradients(&mut self, parameters: &Parameters, clip: &Clip, counts: &dyn Fn(usize) -> bool) -> f64 {
        let (layout, arena) = (parameters.layout(), parameters.grads().arena());
        if arena.device().gpu().is_none() || self.is_sharded() {
            return cut_each(self, parameters, clip, counts);
        }
        if let Some(limit) = clip.value {
            arena.clip_value(limit as f32);
        }
        let counts = |i: &usize| self.place().rank == 0 && counts(*i);
        let counted: Vec<Range<usize>> =
            (0..layout.count()).filter(counts).map(|i| layout.range(i)).collect();
        clip.norm.map_or(0.0, |_| arena.sum_of_squares(&counted))
    }

    /// Multiplies all gradients that this rank holds, once they are whole.
    fn multiply_gradients(&mut self, parameters: &Parameters, by: f32) {
        let arena = parameters.grads().arena();
        if arena.device().gpu().is_some() && !self.is_sharded() {
            return arena.scale(by);
        }
        multiply_each(self, parameters, by);
    }

    /// Takes the scale of the loss, a power of two, out of the gradients of the step, which are whole; says whether all of them are
    /// numbers, on all ranks.
    fn unscale(&mut self, parameters: &Parameters, scale: f64) -> Result<bool, Error> {
        let grads = parameters.grads().arena();
        grads.scale((1.0 / scale) as f32);
        Ok(grads.is_finite())
    }

    /// Cuts the gradients of the step, which are whole, where the strategy keeps them, or has `optimizer` cut them in its next step. Gives
    /// their norm before that, if there is a limit on it.
    fn clip(
        &mut self,
        clip: &Clip,
        parameters: &Parameters,
        optimizer: &mut Optimizer,
    ) -> Result<Option<Later>, Error> {
        Ok(clip.apply_to(parameters.grads().arena(), optimizer))
    }

    /// Moves the values by one step along the gradients, with the rule's learning rate times `factor`. All ranks have the same
    /// values afterwards, or each the newest of those that it holds. Where it fails, what this rank keeps has been moved all the same.
    fn step(
        &mut self,
        optimizer: &mut Optimizer,
        parameters: &Parameters,
        device: &Device,
        factor: f64,
    ) -> Result<(), Error> {
        // Where the values lie is where they are moved.
        let _ = device;
        optimizer.step_parameters(parameters, factor);
        Ok(())
    }

    /// Whether a rank holds only a part of the values or of the optimizer's state between two steps; the same on all ranks.
    fn is_sharded(&self) -> bool {
        false
    }

    /// One forward pass alone, with what each rank holds of the model: adds what `judge` makes of the outputs to `sums`, on all ranks that
    /// take the same samples. All ranks must ask at once, between two steps, whether they have samples or not, with as many sums. Fails if
    /// a rank is gone or late.
    fn evaluate(&mut self, pass: &EvalPass<'_>, judge: &Judge<'_>, sums: &mut [f64]) -> Result<(), Error> {
        self.gather()?;
        pass.in_one_go(judge, sums)
    }

    /// Brings all values to this rank, where they stay until the next pass. All ranks must ask at once, between two steps.
    fn gather(&mut self) -> Result<(), Error> {
        Ok(())
    }

    /// The same for rank 0 at least; others may go without. All ranks must ask.
    fn gather_on_first(&mut self) -> Result<(), Error> {
        self.gather()
    }

    /// The optimizer's state of all values, an array each, where a rank holds only a part of it: on rank 0, on others nothing that
    /// means anything. None where each rank has it. All ranks must ask at once, between two steps.
    fn whole_state(&mut self, optimizer: &Optimizer) -> Result<Option<Vec<Vec<f32>>>, Error> {
        let _ = optimizer;
        Ok(None)
    }

    /// A running mean of one step: the values that this rank keeps, which lie as an array of the optimizer's state does, and the
    /// buffers.
    fn mean(&mut self, parameters: &Parameters) -> Average {
        Average::of(self.own_parameters(parameters))
    }

    /// Moves a running mean towards the values that this rank keeps, and the buffers; it stays what it is to the share `decay`.
    fn follow(&mut self, parameters: &Parameters, mean: &mut Average, decay: f64) {
        mean.update(self.own_parameters(parameters), decay);
    }

    /// Exchanges the values that this rank keeps, and the buffers, with a running mean of them, between two memberships. What others keep
    /// stays what it is on this rank.
    fn swap(&mut self, parameters: &Parameters, mean: &mut Average) {
        mean.swap(self.own_parameters(parameters));
    }

    /// The same on all ranks, between two steps, after which the model has the mean everywhere, or the values again. All ranks must ask.
    /// Where it fails, what this rank keeps has been exchanged all the same.
    fn exchange(&mut self, parameters: &Parameters, mean: &mut Average) -> Result<(), Error> {
        self.swap(parameters, mean);
        Ok(())
    }

    /// The running mean of all values, where a rank holds only a part of it: on rank 0, on others nothing that means anything. None
    /// where each rank has it. All ranks must ask at once, between two steps.
    fn whole_mean(&mut self, mean: &Average) -> Result<Option<Average>, Error> {
        let _ = mean;
        Ok(None)
    }

    /// The values of these parameters, which may be others on each rank, and what arrays `beside` those that this rank keeps have of
    /// them, where a rank holds only a part of everything; none where each has all. No rank ever holds more than what it asks for
    /// beside its part and a few blocks. All ranks must ask at once, between two steps.
    fn collect(
        &mut self,
        parameters: &Parameters,
        beside: &[&Shadow],
        params: Range<usize>,
    ) -> Result<Option<Collected>, Error> {
        let _ = (parameters, beside, params);
        Ok(None)
    }

    /// The numbers of a whole model's buffers, such as their running mean, of which this rank has `own`, those of its own buffers. All
    /// ranks must ask at once, between two steps.
    fn whole_buffers(&mut self, own: &[f32]) -> Result<Vec<f32>, Error> {
        Ok(own.to_vec())
    }

    /// Which share of a checkpoint is this rank's to write, where ranks write it together; none where each rank has everything.
    /// [`Strategy::collect`] brings it, at the least cost if shares are neighbouring parameters in this order.
    fn writes(&self) -> Option<Place> {
        None
    }

    /// What [`Strategy::own_parameters`] have of a parameter with this name of the whole model, or of an array like it, whose `values` are
    /// in row-major order; none if they have none of it.
    fn part_of<'v>(&self, parameters: &Parameters, name: &str, values: &'v [f32]) -> Option<Cow<'v, [f32]>> {
        let _ = (parameters, name);
        Some(Cow::Borrowed(values))
    }

    /// The elements of the arena of [`Strategy::own_parameters`] of which this rank keeps the optimizer's state, in the order in which it
    /// does; none for all.
    fn held(&self) -> Option<Vec<Range<usize>>> {
        None
    }

    /// What every rank says, by rank: on rank 0, on others nothing that means anything. All ranks must ask. The first that writes a
    /// share ([`Strategy::writes`]) is rank 0.
    fn report(&mut self, own: Vec<u8>) -> Result<Vec<Vec<u8>>, Error> {
        Ok(vec![own])
    }

    /// Replaces each number by its sum over the ranks.
    fn sum(&mut self, numbers: &mut [f64]) -> Result<(), Error>;

    /// Sums rows of numbers over all rows of all ranks: a row for each shard of this rank, in order, where the strategy goes by
    /// shards, so that the sums have the same bits on any number of ranks; else any rows. `sum` is as long as a row.
    fn sum_parts(&mut self, parts: &[f64], sum: &mut [f64]) -> Result<(), Error> {
        sum.fill(0.0);
        for row in parts.chunks_exact(sum.len()) {
            sum.iter_mut().zip(row).for_each(|(sum, number)| *sum += number);
        }
        self.sum(sum)
    }
}

/// A forward pass over all of a rank's samples, then a backward pass; `meanwhile` is called when the device was given both.
pub(crate) fn in_one_go<S: Strategy + ?Sized>(
    strategy: &mut S,
    pass: &Pass<'_>,
    meanwhile: &mut dyn FnMut(),
) -> Result<PassLoss, Error> {
    strategy.begin_pass(pass.parameters);
    let loss = pass.forward(strategy.shared_batch());
    strategy.backward(pass.parameters, loss.as_ref(), pass.weight, pass.sync)?;
    meanwhile();
    Ok(loss.map_or(PassLoss::Known(0.0), PassLoss::of))
}
