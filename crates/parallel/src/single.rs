//! One process that does everything itself.

use crate::error::Error;
use crate::evaluation::{EvalPass, Judge};
use crate::local::{Local, Pass, PassLoss, names_of_learned, weighted};
use crate::replay::Replays;
use crate::strategy::{Place, Strategy, Sync, in_one_go};
use phalanx_comm::Trail;
use phalanx_nn::Parameters;
use phalanx_tensor::{GradSink, LeafId, Tensor};

/// Trains alone.
#[derive(Default)]
pub struct SingleDevice {
    /// Whether gradients of this step are there already.
    adding: bool,
    /// How a pass is made, if not in one go.
    local: Option<Box<dyn Local>>,
    /// Passes that are recorded once and replayed, if they are to be.
    replays: Option<Replays>,
    /// Whether parameters that got no gradient are nothing to tell of: it is as it should be, or was told.
    find_unused: bool,
    /// Whether this step had samples so far.
    had_samples: bool,
}

impl SingleDevice {
    /// A strategy for one process. Parameters that get no gradient keep their values, but for weight decay and momentum: the first
    /// time a warning names them, since that is an error where several processes train.
    pub fn new() -> SingleDevice {
        SingleDevice::default()
    }

    /// The same with passes that `local` makes.
    pub fn with_local(local: impl Local + 'static) -> SingleDevice {
        SingleDevice { local: Some(Box::new(local)), ..SingleDevice::default() }
    }
}

impl SingleDevice {
    /// The same, where a step may leave parameters without a gradient or not: if it may, no warning says so.
    pub fn find_unused(self, find_unused: bool) -> SingleDevice {
        SingleDevice { find_unused, ..self }
    }

    /// The same with passes in one go that a GPU records once and replays: those over as many samples as the one before. What can't be
    /// recorded is made as ever, and a warning says why.
    pub fn with_replays(self) -> SingleDevice {
        self.with_replays_behind(&Trail::default())
    }

    /// The same on a GPU that may wait for others, of which `trail` is told.
    pub(crate) fn with_replays_behind(self, trail: &Trail) -> SingleDevice {
        SingleDevice { replays: Some(Replays::behind(trail)), ..self }
    }
}

/// Gradients already lie in their slots; nobody else wants them.
pub(crate) struct Nobody;

impl GradSink for Nobody {
    fn finished(&mut self, _: LeafId, _: Tensor) {}

    fn looks(&self, _: &LeafId) -> bool {
        false
    }
}

impl Strategy for SingleDevice {
    fn place(&self) -> Place {
        Place { rank: 0, world_size: 1 }
    }

    fn prepare(&mut self, parameters: &Parameters) -> Result<(), Error> {
        parameters.give_first_values();
        Ok(())
    }

    fn prepare_alike(&mut self, _: &Parameters) -> Result<(), Error> {
        Ok(())
    }

    /// Whoever comes next may have its memory lie elsewhere, which graphs keep where it is.
    fn part(&mut self, _: &Parameters, _: Option<&str>) {
        self.replays = None;
    }

    fn pass(&mut self, pass: &Pass<'_>) -> Result<f64, Error> {
        self.pass_while(pass, &mut || ())
    }

    fn pass_while(&mut self, pass: &Pass<'_>, meanwhile: &mut dyn FnMut()) -> Result<f64, Error> {
        self.pass_ahead(pass, meanwhile).map(PassLoss::item)
    }

    fn pass_ahead(&mut self, pass: &Pass<'_>, meanwhile: &mut dyn FnMut()) -> Result<PassLoss, Error> {
        match (&mut self.local, &mut self.replays) {
            (None, Some(replays)) if pass.samples() > 0 => {
                begin(&mut self.adding, pass.parameters);
                self.had_samples = true;
                replays.pass(pass, &mut Nobody, meanwhile)
            }
            (None, _) => in_one_go(self, pass, meanwhile),
            (Some(local), _) => {
                meanwhile();
                begin(&mut self.adding, pass.parameters);
                self.had_samples |= pass.samples() > 0;
                local.pass(pass, &mut Nobody).map(PassLoss::Known)
            }
        }
    }

    fn backward(
        &mut self,
        parameters: &Parameters,
        loss: Option<&Tensor>,
        weight: f64,
        _: Sync,
    ) -> Result<(), Error> {
        begin(&mut self.adding, parameters);
        self.had_samples |= loss.is_some();
        if let Some(loss) = loss {
            weighted(loss, weight, &mut Nobody);
        }
        Ok(())
    }

    fn evaluate(&mut self, pass: &EvalPass<'_>, judge: &Judge<'_>, sums: &mut [f64]) -> Result<(), Error> {
        match &mut self.local {
            Some(local) => local.evaluate(pass, judge, sums),
            None => pass.in_one_go(judge, sums),
        }
    }

    fn finish(&mut self, parameters: &Parameters) -> Result<(), Error> {
        self.adding = false;
        // A parameter that the loss doesn't depend on has gradient zero: weight decay and momentum still move it. PyTorch,
        // where it has no gradient at all, leaves it as it is.
        let unused = parameters.grads().settle();
        if std::mem::take(&mut self.had_samples) && !self.find_unused {
            let names = names_of_learned(parameters, &unused);
            if !names.is_empty() {
                self.find_unused = true;
                tracing::warn!(
                    "these parameters got no gradient in this step, which several workers would refuse: {}; use them in the loss, or \
                     set parallel.find_unused=true (in a program SingleDevice::find_unused)",
                    names.join(", ")
                );
            }
        }
        Ok(())
    }

    fn sum(&mut self, _: &mut [f64]) -> Result<(), Error> {
        Ok(())
    }
}

/// Forgets the gradients of the step before at the first pass of a new one.
pub(crate) fn begin(adding: &mut bool, parameters: &Parameters) {
    if !std::mem::replace(adding, true) {
        parameters.grads().zero();
    }
}
