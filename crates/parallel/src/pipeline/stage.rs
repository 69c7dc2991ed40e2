//! What one rank of a pipeline does in a step: the actions of its list, one after the other, on the device that holds its stages.
//!
//! A stage's forward begins with what the stage before made, as a leaf of a graph of its own; its backward begins with the
//! gradient that comes back for what it made, and ends with that leaf's, which goes to the stage before. So stages share no
//! graph, only values, and it doesn't matter to a stage whether its neighbours are threads or processes ([`Link`]).
//!
//! Invariants:
//! - **PIPE-SUM**: a stage takes micro-batches in rising order in both directions, so its gradients are summed in the order in
//!   which plain passes over the same micro-batches sum them, and have the same bits.
//! - **PIPE-KEY**: random numbers are keyed by sample and by the number of the layer in the whole row, which travels with the
//!   activations, so masks are those of the plain model.
//! - **PIPE-ALIVE**: activations live from a stage's forward to the end of its backward, and nowhere else.

use super::schedule::{Action, Schedule, Work};
use super::timeline::Done;
use crate::error::Error;
use crate::evaluation::Outputs;
use phalanx_nn::{Ctx, Loss, Module};
use phalanx_tensor::{Device, GradSink, LeafId, Tensor, WeightGradients, backward, backward_inputs, no_grad};
use std::collections::HashMap;
use std::ops::Range;
use std::time::Instant;

/// A part of a step's samples. What a stage doesn't ask for may be left out.
#[derive(Clone, Debug)]
pub struct MicroBatch {
    /// What the first stage begins with.
    pub input: Option<Tensor>,
    /// What the last stage holds its outputs against.
    pub target: Option<Tensor>,
    /// The pass over these samples, which is the same in all stages.
    pub ctx: Ctx,
    /// How many they are; one without samples is passed over by all stages.
    pub samples: usize,
    /// Their share in the samples of the step: what the gradients of their mean loss are weighted with.
    pub weight: f64,
}

/// What goes from stage to stage.
pub(super) struct Carried {
    /// Activations, or their gradient.
    pub(super) values: Tensor,
    /// Random layers before them.
    pub(super) layers: u64,
}

/// The way to the stages of other ranks.
pub(super) trait Link {
    /// Sends what `action` made to the rank that needs it. Doesn't wait for it.
    fn send(&mut self, action: Action, made: Carried) -> Result<(), Error>;
    /// Waits for what `action` made on another rank. `device` is where it is wanted.
    fn receive(&mut self, action: Action, device: &Device) -> Result<Carried, Error>;
    /// Called between actions, so that what is under way goes on.
    fn progress(&mut self) {}
    /// Called behind the last one, before anything is read that was made: returns when the device waits for no other rank.
    fn settle(&mut self) -> Result<(), Error> {
        Ok(())
    }
}

/// What a rank has of the model, and what it is to do with it.
pub(super) struct Rank<'a> {
    pub(super) schedule: &'a Schedule,
    pub(super) rank: usize,
    pub(super) model: &'a dyn Module,
    /// The blocks of each stage of the row.
    pub(super) blocks: &'a [Range<usize>],
    pub(super) device: &'a Device,
    pub(super) micro_batches: &'a [MicroBatch],
}

/// What a rank has made of a step.
#[derive(Debug, Default)]
pub struct Ran {
    /// The losses of the micro-batches, weighted and summed, on the rank of the last stage.
    pub loss: f64,
    /// When it did what, in seconds from `since`.
    pub done: Vec<Done>,
    /// The most micro-batches whose activations were alive at a time, counted a stage.
    pub alive: usize,
}

/// A forward that waits for its backward.
struct Live {
    /// Where the stage began, if its gradient goes anywhere.
    input: Option<Tensor>,
    /// Where it ended: activations, or on the last stage the loss.
    output: Tensor,
}

struct Running<'a, 'l> {
    rank: &'a Rank<'a>,
    link: &'l mut dyn Link,
    live: HashMap<(usize, usize), Live>,
    put_off: HashMap<(usize, usize), WeightGradients>,
    /// What stages of this rank hand to each other.
    own: HashMap<Action, Carried>,
    /// Of the micro-batches, with their weights: read when all is given to the device, which goes on meanwhile.
    losses: Vec<(Tensor, f64)>,
    ran: Ran,
}

/// Catches the gradient of a stage's input, and tells of weights that are final. On the way, letters go on.
struct Catching<'l, 's> {
    link: &'l mut dyn Link,
    input: Option<LeafId>,
    caught: Option<Tensor>,
    /// None where more micro-batches come.
    sink: Option<&'s mut dyn GradSink>,
}

impl GradSink for Catching<'_, '_> {
    fn finished(&mut self, leaf: LeafId, grad: Tensor) {
        self.link.progress();
        if self.input.as_ref() == Some(&leaf) {
            self.caught = Some(grad);
        } else if let Some(sink) = &mut self.sink {
            sink.finished(leaf, grad);
        }
    }
}

impl Rank<'_> {
    /// Does all that the schedule has for this rank. `sink` is told of each weight of its stages when its gradient is final.
    pub(super) fn run(
        &self,
        link: &mut dyn Link,
        loss: &Loss,
        sink: &mut dyn GradSink,
        since: Instant,
    ) -> Result<Ran, Error> {
        let mut running = Running::of(self, link);
        // Those without samples come last, so the last with samples is the last of all.
        let last = self.micro_batches.iter().rposition(|micro_batch| micro_batch.samples > 0);
        for &action in self.schedule.actions(self.rank) {
            let Action { work, micro_batch, .. } = action;
            if self.micro_batches[micro_batch].samples == 0 {
                continue;
            }
            let sink: Option<&mut dyn GradSink> =
                if Some(micro_batch) == last { Some(&mut *sink) } else { None };
            let needed = running.needed(action)?;
            let start = since.elapsed().as_secs_f64();
            let made = match work {
                Work::Forward => running.forward(action, needed, loss),
                Work::Backward | Work::BackwardInput => running.backward(action, needed, sink),
                Work::BackwardWeight => running.weights(action, sink),
            };
            let end = since.elapsed().as_secs_f64();
            running.ran.done.push(Done { action, start, end });
            if let Some(made) = made {
                running.hand_on(action, made)?;
            }
            running.link.progress();
        }
        running.link.settle()?;
        let Running { losses, ran, .. } = running;
        Ok(Ran { loss: losses.iter().fold(0.0, |sum, (loss, weight)| sum + loss.item() * weight), ..ran })
    }

    /// Does the forward passes that the schedule has for this rank, which has nothing else, and for which nothing is kept. On the rank of the
    /// last stage `judge` is given what each micro-batch came to.
    pub(super) fn evaluate(
        &self,
        link: &mut dyn Link,
        judge: &mut dyn FnMut(Outputs<'static>) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let mut running = Running::of(self, link);
        for &action in self.schedule.actions(self.rank) {
            let of = &self.micro_batches[action.micro_batch];
            if of.samples == 0 {
                continue;
            }
            let (x, ctx) = running.needed(action).map(|before| running.start(action, before))?;
            let (y, ctx) = no_grad(|| running.through(action.stage, x, ctx));
            if action.stage + 1 == self.schedule.stages() {
                judge(Outputs::of(y, of.target(), ctx))?;
            } else {
                running.hand_on(action, Carried { values: y, layers: ctx.layers() })?;
            }
            running.link.progress();
        }
        running.link.settle()
    }
}

impl MicroBatch {
    fn target(&self) -> Tensor {
        self.target.clone().expect("the last stage is given its targets")
    }
}

impl<'a, 'l> Running<'a, 'l> {
    fn of(rank: &'a Rank<'a>, link: &'l mut dyn Link) -> Running<'a, 'l> {
        Running {
            rank,
            link,
            live: HashMap::new(),
            put_off: HashMap::new(),
            own: HashMap::new(),
            losses: Vec::new(),
            ran: Ran::default(),
        }
    }

    /// What `action` begins with, where that comes from another stage.
    fn needed(&mut self, action: Action) -> Result<Option<Carried>, Error> {
        let Rank { schedule, rank, device, .. } = *self.rank;
        let of_others = |needed: &Action| needed.stage != action.stage;
        let Some(needed) = schedule.needs(action).into_iter().flatten().find(of_others) else {
            return Ok(None);
        };
        if schedule.rank_of(needed.stage) == rank {
            let carried = self.own.remove(&needed);
            return Ok(Some(carried.expect("a checked schedule has done what it needs")));
        }
        self.link.receive(needed, device).map(Some)
    }

    fn hand_on(&mut self, action: Action, made: Carried) -> Result<(), Error> {
        let Rank { schedule, rank, .. } = *self.rank;
        let to = if action.work == Work::Forward { action.stage + 1 } else { action.stage - 1 };
        if schedule.rank_of(to) == rank {
            self.own.insert(action, made);
            return Ok(());
        }
        self.link.send(action, made)
    }

    /// What a stage begins with, and the pass from there on.
    fn start(&self, action: Action, before: Option<Carried>) -> (Tensor, Ctx) {
        let Rank { device, micro_batches, .. } = *self.rank;
        let of = &micro_batches[action.micro_batch];
        match before {
            Some(Carried { values, layers }) => (values.to(device), of.ctx.clone().after_layers(layers)),
            None => {
                let x = of.input.as_ref().expect("the first stage is given its inputs");
                (x.to(device), of.ctx.clone())
            }
        }
    }

    /// What the blocks of a stage make of `x`.
    fn through(&mut self, stage: usize, x: Tensor, mut ctx: Ctx) -> (Tensor, Ctx) {
        let Rank { model, blocks, .. } = *self.rank;
        let y = blocks[stage].clone().fold(x, |x, block| {
            let y = model.forward_block(block, &x, &mut ctx);
            // A letter that is longer than what a connection holds goes on only while both ranks look after it.
            self.link.progress();
            y
        });
        (y, ctx)
    }

    fn forward(&mut self, action: Action, before: Option<Carried>, loss: &Loss) -> Option<Carried> {
        let Rank { schedule, micro_batches, .. } = *self.rank;
        let Action { stage, micro_batch, .. } = action;
        let of = &micro_batches[micro_batch];
        let comes_from_another = before.is_some();
        let (start, ctx) = self.start(action, before);
        let input = comes_from_another.then(|| start.clone().requires_grad());
        let (y, ctx) = self.through(stage, input.clone().unwrap_or(start), ctx);
        let (output, made) = if stage + 1 == schedule.stages() {
            let loss = loss.of_pass(&y, &of.target().to(y.device()), &ctx);
            self.losses.push((loss.detach(), of.weight));
            (loss, None)
        } else {
            let made = Carried { values: y.detach(), layers: ctx.layers() };
            (y, Some(made))
        };
        self.live.insert((stage, micro_batch), Live { input, output });
        self.ran.alive = self.ran.alive.max(self.live.len() + self.put_off.len());
        made
    }

    fn backward(
        &mut self,
        action: Action,
        behind: Option<Carried>,
        sink: Option<&mut dyn GradSink>,
    ) -> Option<Carried> {
        let Rank { device, micro_batches, .. } = *self.rank;
        let Action { work, stage, micro_batch } = action;
        let live = self.live.remove(&(stage, micro_batch));
        let Live { input, output } = live.expect("a checked schedule goes forward first");
        let grad = match behind {
            Some(carried) => carried.values.to(device),
            None => Tensor::full(device, *output.shape(), micro_batches[micro_batch].weight, output.dtype()),
        };
        let input_id = input.as_ref().and_then(Tensor::leaf_id);
        let mut catching = Catching { link: &mut *self.link, input: input_id, caught: None, sink };
        let whole = [(&output, Some(&grad))];
        // A first stage of nothing to learn has no gradients at all.
        if output.needs_grad() {
            if work == Work::BackwardInput {
                let weights = backward_inputs(&whole, &mut catching);
                self.put_off.insert((stage, micro_batch), weights);
            } else {
                backward(&whole, &mut catching);
            }
        }
        let input = input?;
        let unused = || Tensor::zeros(device, *input.shape(), input.dtype());
        Some(Carried { values: catching.caught.unwrap_or_else(unused), layers: 0 })
    }

    fn weights(&mut self, action: Action, sink: Option<&mut dyn GradSink>) -> Option<Carried> {
        let put_off = self.put_off.remove(&(action.stage, action.micro_batch));
        let mut catching = Catching { link: &mut *self.link, input: None, caught: None, sink };
        put_off.into_iter().for_each(|weights| weights.finish(&mut catching));
        None
    }
}
