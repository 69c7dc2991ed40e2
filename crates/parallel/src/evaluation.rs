//! Forward passes alone, whose outputs are judged where they come out. Nothing is kept for a backward pass, and nobody needs more of the
//! model for it than for training.

use crate::error::Error;
use crate::ranks::Ranks;
use phalanx_comm::Trail;
use phalanx_nn::{Ctx, Loss, Metric, Module, Parameters};
use phalanx_tensor::{DType, Later, LaterVec, Tensor, no_grad};

/// A forward pass that is to be made, of samples that nothing is learned from.
pub struct EvalPass<'a> {
    /// The model.
    pub model: &'a dyn Module,
    /// Its parameters.
    pub parameters: &'a Parameters,
    /// This rank's samples, a row each; there may be none.
    pub input: Tensor,
    /// What they are held against.
    pub target: Tensor,
    /// The pass, of [`Ctx::eval`] or [`Ctx::eval_on`].
    pub ctx: Ctx,
}

/// Adds to sums over samples what some of them came to.
pub type Judge<'a> = dyn Fn(&Outputs<'_>, &mut [f64]) -> Result<(), Error> + 'a;

/// What a model made of some samples of an [`EvalPass`].
#[derive(Clone)]
pub struct Outputs<'a> {
    /// A row a sample; where ranks have the scores of some classes each, these.
    values: Tensor,
    target: Tensor,
    ctx: Ctx,
    /// Those that have the scores of the other classes.
    classes: Option<&'a Ranks>,
    /// What this rank's GPU waits for.
    trail: Option<&'a Trail>,
}

impl EvalPass<'_> {
    /// How many samples it has.
    pub fn samples(&self) -> usize {
        self.input.dim(0)
    }

    /// Makes it wherever the model's blocks lie, if it has samples.
    pub(crate) fn in_one_go(&self, judge: &Judge<'_>, sums: &mut [f64]) -> Result<(), Error> {
        if self.samples() == 0 {
            return Ok(());
        }
        let mut ctx = self.ctx.clone();
        // It keeps less for each sample than passes that have a way back.
        self.input.device().begin_pass(0);
        let output = no_grad(|| self.model.forward(&self.input, &mut ctx));
        judge(&Outputs::of(output, self.target.clone(), ctx), sums)
    }
}

impl<'a> Outputs<'a> {
    /// Of samples that are to become `target`; `ctx` is the pass that made them.
    pub(crate) fn of(values: Tensor, target: Tensor, ctx: Ctx) -> Outputs<'static> {
        let target = target.to(values.device());
        Outputs { values, target, ctx, classes: None, trail: None }
    }

    /// The same behind whatever `trail` is told of.
    pub(crate) fn behind(self, trail: &'a Trail) -> Outputs<'a> {
        Outputs { trail: Some(trail), ..self }
    }

    /// The same where these ranks have the scores of some classes each, if there are any.
    pub(crate) fn among(self, classes: Option<&'a Ranks>) -> Outputs<'a> {
        Outputs { classes, ..self }
    }

    /// How many samples they are.
    pub fn samples(&self) -> usize {
        self.values.dim(0)
    }

    /// What they were to become, a row a sample.
    pub fn target(&self) -> &Tensor {
        &self.target
    }

    /// Whether a GPU may bring what is asked for later than the strategy is done with the pass: what it comes to waits for no other rank,
    /// and no rank for it.
    pub fn may_be_owed(&self) -> bool {
        self.trail.is_none() && self.values.device().gpu().is_some()
    }

    /// Their mean loss. Ranks that have the scores of some classes each must all ask. Fails if one of them is gone or late.
    pub fn loss(&self, loss: &Loss) -> Result<Later, Error> {
        let mean = no_grad(|| loss.of_pass(&self.values, &self.target, &self.ctx));
        self.settle()?;
        Ok(mean.item_later())
    }

    /// How many classes come before each label, as [`Tensor::label_places`] has it; of those that are `ignored`, how many come before any
    /// class. Scores of sequences and of pixels are as [`Loss::rows`] has them. Asked for and failing as [`Outputs::loss`].
    pub fn label_places(&self, ignored: Option<i64>) -> Result<LaterVec<f32>, Error> {
        let places = no_grad(|| {
            let [scores, mut labels] = Loss::rows(&self.scores(), &self.target);
            if let Some(ignored) = ignored {
                let any = Tensor::scalar(labels.device(), 0.0, DType::I64);
                labels = labels.ne(ignored as f64).where_cond(&labels, &any);
            }
            scores.label_places(&labels)
        });
        self.settle()?;
        Ok(places.to_vec_later())
    }

    /// What `metric` adds to its sums ([`Metric::add`]), without labels that are `ignored`. Asked for and failing as [`Outputs::loss`].
    pub fn parts_of(&self, metric: &Metric, ignored: Option<i64>) -> Result<LaterVec<f32>, Error> {
        let parts = no_grad(|| metric.parts(&self.scores(), &self.target, ignored));
        self.settle()?;
        Ok(parts.to_vec_later())
    }

    /// The outputs in float32, row by row, with the scores of all classes. Asked for and failing as [`Outputs::loss`].
    pub fn to_vec(&self) -> Result<Vec<f32>, Error> {
        let values = no_grad(|| self.scores().cast(DType::F32));
        self.settle()?;
        Ok(values.to_vec())
    }

    /// Those of all classes.
    fn scores(&self) -> Tensor {
        self.classes
            .map_or_else(|| self.values.clone(), |ranks| ranks.side_by_side(&self.values.cast(DType::F32)))
    }

    /// Returns when nothing that the host may read waits for another rank.
    fn settle(&self) -> Result<(), Error> {
        self.trail.map_or(Ok(()), |trail| Ok(trail.settle()?))
    }
}
