//! Passes that a GPU records as a graph once, and then makes again with other samples at the cost of one call.
//!
//! The first pass of a kind is made as ever, the second is rehearsed (`phalanx_tensor::Rehearsal`) and recorded, all later ones are
//! replays. Kinds are the passes of a step: the first, which begins its gradients, those that add to them, and the last, which has them
//! summed over ranks; where they are over samples of several forms, these are kinds of their own. The losses and gradients of a replay
//! have the bits of the pass that it stands for.
//!
//! NCCL wants an operation to be part of a graph on all ranks or on none. So what decides is what all ranks know alike: a pass of a step
//! that comes once (`Ctx::one_off`), as the last of an epoch does, whose samples don't go around, is made as ever on all of them.
//!
//! Where GPUs exchange numbers in the midst of a pass, that is part of what is recorded ([`Way`]). Then nobody waits for it but the
//! compute stream, and whoever replays the pass finds in the rank's trail what it waits for.

use crate::error::Error;
use crate::local::{Pass, PassLoss};
use crate::single::Nobody;
use crate::strategy::Sync;
use phalanx_comm::{GpuGroup, Group, InGraph, InGraphs, Rank, ReduceOp, Trail};
use phalanx_nn::Parameters;
use phalanx_tensor::{
    Arena, DType, GradSink, Replay, Room, Shape, SumOverBatch, Tensor, autocast_dtype, backward,
};
use std::sync::Arc;

/// How a strategy makes a pass on a GPU, which may be one that is recorded.
pub(crate) trait Way {
    /// Gives the GPU a pass, which has samples: the gradients of its mean loss times `weight`, a single number. Gives that loss.
    fn give(&mut self, pass: &Pass<'_>, weight: &Tensor) -> Result<Tensor, Error>;

    /// Takes back a pass that was given, which is to be given once more: returns when all that it began is done; whether it began as
    /// much as any pass will.
    fn done(&mut self) -> Result<bool, Error> {
        Ok(true)
    }

    /// Has the compute stream wait for what the pass began, which is recorded; `trail` is told among which GPUs that is.
    fn join(&mut self, trail: &Trail) -> Result<(), Error> {
        let _ = trail;
        Ok(())
    }

    /// Takes note that a pass was replayed, with all that it begins.
    fn replayed(&mut self) {}

    /// What lies in arenas that a replay writes, and that it only reads, beside casts of the parameters.
    fn arenas(&self, parameters: &Parameters) -> [Vec<Arena>; 2] {
        let written = vec![parameters.grads().arena().clone(), parameters.buffers().clone()];
        [written, vec![parameters.values().clone()]]
    }
}

/// Where gradients stay.
impl Way for Nobody {
    fn give(&mut self, pass: &Pass<'_>, weight: &Tensor) -> Result<Tensor, Error> {
        Ok(in_one_go(pass, weight, None, self))
    }
}

/// A forward pass, with statistics over a batch that `shared` sums, if it does, then a backward pass, of which `sink` is told; gives the
/// mean loss.
pub(crate) fn in_one_go(
    pass: &Pass<'_>,
    weight: &Tensor,
    shared: Option<SumOverBatch>,
    sink: &mut dyn GradSink,
) -> Tensor {
    let loss = pass.forward(shared).expect("it has samples");
    backward(&[(&loss, Some(&weight.cast(loss.dtype())))], sink);
    loss.detach()
}

/// Tells, for all ranks, why passes that were to be replayed never are.
pub(crate) fn none_is_replayed(group: &Group, why: &str) {
    if group.rank() == Rank(0) {
        tracing::warn!("train.graphs: passes are made as ever and not replayed, since {why}");
    }
}

/// What has NCCL refuse graphs.
const REFUSED: &str = "NCCL might keep graphs waiting for each other: take NCCL 2.29 or later without NCCL_GRAPH_MIXING_SUPPORT, or an earlier one with NCCL_GRAPH_MIXING_SUPPORT=0";
/// What a rank goes by that has no reason of its own.
const ELSEWHERE: &str = "what another worker exchanges goes by way of the host";

/// Why passes aren't replayed in which numbers are exchanged in so many groups of GPUs, this one among them: for a reason of this rank's
/// own, or since NCCL keeps them from it, or for that of another rank of `group`. All of them have to ask, and get an answer or none
/// together: an operation is part of a graph on all ranks or on none.
pub(crate) fn kept_from_replay(
    group: &Group,
    own: Option<&'static str>,
    gpus: Option<&GpuGroup>,
    groups: usize,
) -> Result<Option<&'static str>, Error> {
    let needed = if groups > 1 { InGraphs::Several } else { InGraphs::One };
    let is_refused = gpus.is_some_and(|gpus| gpus.in_graphs() < needed);
    let mut worst = [if own.is_some() { 2 } else { u8::from(is_refused) }];
    group.all_reduce(&mut worst, ReduceOp::Max)?;
    Ok(own.or(match worst[0] {
        0 => None,
        1 => Some(REFUSED),
        _ => Some(ELSEWHERE),
    }))
}

/// What samples have in common that passes of one kind may be over.
#[derive(Clone, Copy, PartialEq)]
struct Form {
    input: (Shape, DType),
    target: (Shape, DType),
    products: DType,
}

impl Form {
    fn of(pass: &Pass<'_>) -> Form {
        let of = |tensor: &Tensor| (*tensor.shape(), tensor.dtype());
        Form { input: of(&pass.input), target: of(&pass.target), products: autocast_dtype() }
    }
}

/// Which of a step's passes it is.
#[derive(Clone, PartialEq)]
struct Kind {
    form: Form,
    /// The parameters that have gradients already: none in the first pass.
    adds_to: Vec<usize>,
    sync: Sync,
}

impl Kind {
    fn of(pass: &Pass<'_>) -> Kind {
        Kind { form: Form::of(pass), adds_to: pass.parameters.grads().made(), sync: pass.sync }
    }
}

/// The first, those between, the last, and the only one of a step; whatever a model leaves out in some passes makes more.
const MOST_KINDS: usize = 8;

/// The passes of a strategy, as far as they are recorded.
#[derive(Default)]
pub(crate) struct Replays {
    /// What this rank's GPU waits for.
    trail: Trail,
    /// Kinds of which a pass was made.
    seen: Vec<Kind>,
    recorded: Vec<Recorded>,
    /// What those over samples of a form work on.
    given: Vec<(Form, Given)>,
    room: Room,
    /// There is something in a pass that can't be replayed.
    is_refused: bool,
}

/// A recorded pass.
struct Recorded {
    kind: Kind,
    loss: Tensor,
    /// Parameters that have gradients after it.
    made: Vec<usize>,
    replay: Replay,
    /// What it reads of parameters in 16 bits, where whoever replays it has that made.
    casts: Option<Arena>,
    /// The GPUs that exchange numbers in it.
    among: Vec<Arc<GpuGroup>>,
    /// Their communicators end after the graph.
    _in_graph: Vec<InGraph>,
}

/// Tensors that stay where they are.
struct Given {
    input: Tensor,
    target: Tensor,
    /// What the loss weighs, and the same as the host knows it.
    weight: Tensor,
    weighs: f64,
}

impl Given {
    fn of(pass: &Pass<'_>) -> Given {
        let [input, target] = [&pass.input, &pass.target].map(Tensor::copied);
        Given { weight: weight_of(pass), weighs: pass.weight, input, target }
    }

    fn take(&mut self, pass: &Pass<'_>) {
        self.input.copy_from(&pass.input);
        self.target.copy_from(&pass.target);
        if std::mem::replace(&mut self.weighs, pass.weight) != pass.weight {
            self.weight.fill(pass.weight);
        }
    }
}

/// What a pass's loss counts, for its GPU.
pub(crate) fn weight_of(pass: &Pass<'_>) -> Tensor {
    Tensor::scalar(pass.input.device(), pass.weight, DType::F32)
}

impl Replays {
    /// None yet, on a GPU that may wait for others, of which `trail` is told.
    pub(crate) fn behind(trail: &Trail) -> Replays {
        Replays { trail: trail.clone(), ..Replays::default() }
    }

    /// Makes a pass of a step, which has samples; gives its mean loss. `meanwhile` is called when the GPU was given the pass.
    pub(crate) fn pass(
        &mut self,
        pass: &Pass<'_>,
        way: &mut dyn Way,
        meanwhile: &mut dyn FnMut(),
    ) -> Result<PassLoss, Error> {
        if self.is_refused || pass.ctx.is_one_off() {
            return self.as_ever(pass, way, meanwhile);
        }
        let kind = Kind::of(pass);
        if let Some(i) = self.recorded.iter().position(|recorded| recorded.kind == kind) {
            return self.again(i, pass, way, meanwhile);
        }
        if self.seen.contains(&kind) {
            // It is done once, and nothing may go up while the GPU records.
            meanwhile();
            return self.record(kind, pass, way).map(PassLoss::Known);
        }
        if self.seen.len() < MOST_KINDS {
            self.seen.push(kind);
        }
        self.as_ever(pass, way, meanwhile)
    }

    fn as_ever(
        &self,
        pass: &Pass<'_>,
        way: &mut dyn Way,
        meanwhile: &mut dyn FnMut(),
    ) -> Result<PassLoss, Error> {
        let loss = PassLoss::of(way.give(pass, &weight_of(pass))?);
        meanwhile();
        self.trail.settle()?;
        Ok(loss)
    }

    /// Makes the pass, and records it.
    fn record(&mut self, kind: Kind, pass: &Pass<'_>, way: &mut dyn Way) -> Result<f64, Error> {
        let given = given(&mut self.given, &kind.form, pass);
        let (parameters, ctx, weight) = (pass.parameters, &pass.ctx, given.weight.clone());
        let fixed = Pass {
            input: given.input.clone(),
            target: given.target.clone(),
            ctx: ctx.clone(),
            loss: pass.loss.clone(),
            ..*pass
        };
        let device = pass.input.device().clone();
        let rehearsed = device.rehearse(&self.room, ctx.step(), ctx.samples(), || way.give(&fixed, &weight));
        let Some((mut rehearsal, own)) = rehearsed else {
            self.is_refused = true;
            return self.as_ever(pass, way, &mut || ()).map(PassLoss::item);
        };
        let own = own?;
        self.trail.settle()?;
        let value = own.item();
        rehearsal.take_back(own);
        if let Some(why) = rehearsal.refusal() {
            tracing::warn!(
                "passes are made as ever and not replayed as graphs, since they have {why} would be those of one pass for good"
            );
            self.is_refused = true;
            return Ok(value);
        }
        // What was lent of the gradients is wanted back, and a pass that left some out lends them later.
        if !way.done()? {
            self.is_refused = true;
            return Ok(value);
        }
        // As the pass finds them each time.
        let is_cast = kind.form.products.is_half() && !parameters.values().is_cut();
        if let Some(casts) = parameters.grads().casts().filter(|_| is_cast) {
            parameters.grads().renew_casts(parameters.values(), &casts);
        }
        parameters.grads().zero();
        parameters.grads().were_made(&kind.adds_to);
        let (recorded, among) = self.trail.recorded(|| {
            rehearsal.record(|| {
                let loss = way.give(&fixed, &weight)?;
                way.join(&self.trail).map(|()| loss)
            })
        });
        let (replay, loss) = recorded.map_err(failed)?;
        let (loss, made) = (loss?, parameters.grads().made());
        // The passes before had buffers of their own, which nobody wants any more.
        device.release_cached();
        tracing::debug!(
            "a pass was recorded, to be replayed: {replay:?}, with what {} groups exchange",
            among.len()
        );
        let casts = parameters.grads().casts_of_now(parameters.values());
        let in_graph = among.iter().map(|gpus| gpus.in_graph()).collect();
        self.recorded.push(Recorded { kind, loss, made, replay, casts, among, _in_graph: in_graph });
        Ok(value)
    }

    /// Replays a pass that was recorded.
    fn again(
        &mut self,
        which: usize,
        pass: &Pass<'_>,
        way: &mut dyn Way,
        meanwhile: &mut dyn FnMut(),
    ) -> Result<PassLoss, Error> {
        let Recorded { kind, loss, made, replay, casts, among, .. } = &mut self.recorded[which];
        given(&mut self.given, &kind.form, pass);
        let (parameters, ctx) = (pass.parameters, &pass.ctx);
        let mut arenas = way.arenas(parameters);
        if let Some(casts) = casts {
            parameters.grads().renew_casts(parameters.values(), casts);
            arenas[1].push(casts.clone());
        }
        let [written, read] = arenas.each_ref().map(|arenas| arenas.iter().collect::<Vec<_>>());
        replay.again(ctx.step(), ctx.samples(), &written, &read).map_err(failed)?;
        let loss = PassLoss::of(loss.clone());
        self.trail.note_all(among, "a pass that is replayed, with what ranks exchange in it,")?;
        meanwhile();
        self.trail.settle()?;
        way.replayed();
        parameters.grads().were_made(made);
        Ok(loss)
    }
}

/// The tensors that passes over samples of this form work on, which stay where they are; their values are those of the pass at hand.
fn given<'a>(all: &'a mut Vec<(Form, Given)>, form: &Form, pass: &Pass<'_>) -> &'a Given {
    let i = match all.iter().position(|(other, _)| other == form) {
        Some(i) => {
            all[i].1.take(pass);
            i
        }
        None => {
            all.push((*form, Given::of(pass)));
            all.len() - 1
        }
    };
    &all[i].1
}

fn failed(error: phalanx_tensor::Error) -> Error {
    Error::Replay { error: Box::new(error) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_replay_together_or_not_at_all() {
        let answers = |own: [Option<&'static str>; 3]| -> Vec<Option<&'static str>> {
            std::thread::scope(|scope| {
                let asked: Vec<_> = Group::threads(3)
                    .into_iter()
                    .zip(own)
                    .map(|(group, own)| scope.spawn(move || kept_from_replay(&group, own, None, 1).unwrap()))
                    .collect();
                asked.into_iter().map(|answer| answer.join().unwrap()).collect()
            })
        };
        assert_eq!(answers([None; 3]), [None; 3]);
        assert_eq!(
            answers([None, Some("a GPU is shared"), None]),
            [Some(ELSEWHERE), Some("a GPU is shared"), Some(ELSEWHERE)]
        );
    }
}
