//! Passes that a GPU records as a graph once, and then makes again with other samples at the cost of one call.
//!
//! The first pass of a kind is made as ever, the second is rehearsed (`phalanx_tensor::Rehearsal`) and recorded, all later ones are
//! replays. A kind is the shape of the samples and the type of products: the last, smaller batch of an epoch is another, and is
//! made as ever. The losses and gradients of a replay have the bits of the pass that it stands for.
//!
//! Where gradients go on to other GPUs in the middle of the backward pass, that is part of what is recorded ([`Beside`]).

use crate::error::Error;
use crate::local::{Local, Pass, Whole};
use crate::single::Nobody;
use phalanx_tensor::{Arena, DType, GradSink, Replay, Shape, Tensor, autocast_dtype, backward};

/// What passes of one kind have in common.
#[derive(Clone, Copy, PartialEq)]
pub(crate) struct Kind {
    input: (Shape, DType),
    target: (Shape, DType),
    products: DType,
}

impl Kind {
    fn of(pass: &Pass<'_>) -> Kind {
        let of = |tensor: &Tensor| (*tensor.shape(), tensor.dtype());
        Kind { input: of(&pass.input), target: of(&pass.target), products: autocast_dtype() }
    }
}

/// What is done with gradients as a pass makes them, on the GPU as the pass is.
pub(crate) trait Beside {
    /// Begins a pass, which tells this of each gradient that is final.
    fn sink(&mut self) -> Box<dyn GradSink + '_>;

    /// Returns when all that the pass began is done; whether it began as much as any pass will.
    fn done(&mut self) -> Result<bool, Error>;

    /// Has the compute stream wait for what the pass began, which is recorded.
    fn join(&mut self) -> Result<(), Error>;

    /// The GPU was given a recorded pass: returns when it is done with it.
    fn replayed(&mut self) -> Result<(), Error>;
}

/// Where gradients stay.
impl Beside for Nobody {
    fn sink(&mut self) -> Box<dyn GradSink + '_> {
        Box::new(Nobody)
    }

    fn done(&mut self) -> Result<bool, Error> {
        Ok(true)
    }

    fn join(&mut self) -> Result<(), Error> {
        Ok(())
    }

    /// Whoever reads its loss waits for it.
    fn replayed(&mut self) -> Result<(), Error> {
        Ok(())
    }
}

/// How far it is.
#[derive(Default)]
pub(crate) enum Replays {
    /// No pass was made.
    #[default]
    New,
    /// A pass of this kind was made.
    Seen(Kind),
    /// Passes of this kind are replayed.
    Recorded(Box<Recorded>),
    /// There is something in a pass that can't be replayed.
    Refused,
}

/// A recorded pass, and the tensors that it works on.
pub(crate) struct Recorded {
    kind: Kind,
    input: Tensor,
    target: Tensor,
    /// What the loss weighs, and the same as the host knows it.
    weight: Tensor,
    weighs: f64,
    loss: Tensor,
    /// Parameters that it makes gradients of.
    made: Vec<usize>,
    replay: Replay,
}

impl Replays {
    /// Makes the first pass of a step, which has samples; gives its mean loss. `meanwhile` is called when the GPU was given the pass.
    pub(crate) fn pass(
        &mut self,
        pass: &Pass<'_>,
        beside: &mut dyn Beside,
        meanwhile: &mut dyn FnMut(),
    ) -> Result<f64, Error> {
        let kind = Kind::of(pass);
        match self {
            Replays::Recorded(recorded) if recorded.kind == kind => recorded.again(pass, beside, meanwhile),
            Replays::Seen(seen) if *seen == kind => {
                // It is done once, and nothing may go up while the GPU records.
                meanwhile();
                self.record(pass, beside)
            }
            Replays::New | Replays::Seen(_) => {
                *self = Replays::Seen(kind);
                Whole.pass_while(pass, &mut *beside.sink(), meanwhile)
            }
            Replays::Recorded(_) | Replays::Refused => Whole.pass_while(pass, &mut *beside.sink(), meanwhile),
        }
    }

    /// Makes the pass, and records it.
    fn record(&mut self, pass: &Pass<'_>, beside: &mut dyn Beside) -> Result<f64, Error> {
        let Pass { model, parameters, loss, ctx, sync, .. } = pass;
        // They stay where they are, and their values are those of the pass at hand.
        let [input, target] = [&pass.input, &pass.target].map(Tensor::copied);
        let weight = Tensor::scalar(input.device(), pass.weight, DType::F32);
        let fixed = Pass {
            model: *model,
            parameters,
            loss: *loss,
            input: input.clone(),
            target: target.clone(),
            ctx: ctx.clone(),
            weight: pass.weight,
            sync: *sync,
        };
        let forth_and_back = |sink: &mut dyn GradSink| {
            let loss = fixed.forward(None).expect("it has samples");
            backward(&[(&loss, Some(&weight.cast(loss.dtype())))], sink);
            loss.detach()
        };
        let device = input.device().clone();
        let rehearsed = device.rehearse(ctx.step(), ctx.samples(), || forth_and_back(&mut *beside.sink()));
        let Some((mut rehearsal, own)) = rehearsed else {
            *self = Replays::Refused;
            return Whole.pass(pass, &mut *beside.sink());
        };
        let value = own.item();
        rehearsal.take_back(own);
        if let Some(why) = rehearsal.refusal() {
            tracing::warn!(
                "passes are made as ever and not replayed as graphs, since they have {why} would be those of one pass for good"
            );
            *self = Replays::Refused;
            return Ok(value);
        }
        // What was lent of the gradients is wanted back, and a pass that left some out lends them later.
        if !beside.done()? {
            *self = Replays::Refused;
            return Ok(value);
        }
        // As the pass finds them each time.
        parameters.grads().zero();
        let recorded = rehearsal.record(|| {
            let loss = forth_and_back(&mut *beside.sink());
            beside.join().map(|()| loss)
        });
        let (replay, loss) = recorded.map_err(failed)?;
        let loss = loss?;
        let (kind, made) = (Kind::of(pass), parameters.grads().made());
        // The passes before had buffers of their own, which nobody wants any more.
        device.release_cached();
        *self = Replays::Recorded(Box::new(Recorded {
            kind,
            input,
            target,
            weight,
            weighs: pass.weight,
            loss,
            made,
            replay,
        }));
        Ok(value)
    }
}

fn failed(error: phalanx_tensor::Error) -> Error {
    Error::Replay { error: Box::new(error) }
}

impl Recorded {
    fn again(
        &mut self,
        pass: &Pass<'_>,
        beside: &mut dyn Beside,
        meanwhile: &mut dyn FnMut(),
    ) -> Result<f64, Error> {
        self.input.copy_from(&pass.input);
        self.target.copy_from(&pass.target);
        if std::mem::replace(&mut self.weighs, pass.weight) != pass.weight {
            self.weight.fill(pass.weight);
        }
        let (parameters, ctx) = (pass.parameters, &pass.ctx);
        let casts = parameters.grads().casts();
        let written = [parameters.grads().arena(), parameters.buffers()];
        let written: Vec<&Arena> = written.into_iter().chain(&casts).collect();
        let again = self.replay.again(ctx.step(), ctx.samples(), &written, &[parameters.values()]);
        again.map_err(failed)?;
        meanwhile();
        beside.replayed()?;
        parameters.grads().were_made(&self.made);
        Ok(self.loss.item())
    }
}
