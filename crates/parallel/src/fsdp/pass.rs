//! A pass from unit to unit, each with a graph of its own, or through all of them at once.

use super::store::For;
use super::{Fsdp, Sharded};
use crate::error::Error;
use crate::evaluation::{EvalPass, Judge, Outputs};
use crate::local::{Local, Pass, PassLoss};
use crate::replay::{Replays, Way, weight_of};
use crate::single::{Nobody, begin};
use crate::strategy::{Strategy, Sync};
use phalanx_comm::Group;
use phalanx_nn::Parameters;
use phalanx_tensor::{Arena, GradSink, LeafId, Tensor, autocast_dtype, backward, no_grad};

/// A unit's forward that waits for its backward.
struct Live {
    /// Where it began, if its gradient goes anywhere.
    input: Option<Tensor>,
    /// Where it ended: activations, or the loss.
    output: Tensor,
}

/// Catches the gradient of a unit's input.
struct Catching<'a> {
    input: Option<LeafId>,
    caught: Option<Tensor>,
    /// Whose other work goes on meanwhile.
    group: &'a Group,
}

impl GradSink for Catching<'_> {
    fn finished(&mut self, leaf: LeafId, grad: Tensor) {
        if self.input.as_ref() == Some(&leaf) {
            self.caught = Some(grad);
        }
        self.group.progress();
    }
}

/// Puts replays back where they were taken from, also behind a pass that is given up: their memory goes only when the GPU waits for
/// nobody any more.
struct Replaying<'a> {
    fsdp: &'a mut Fsdp,
    replays: Option<Replays>,
}

impl Drop for Replaying<'_> {
    fn drop(&mut self) {
        self.fsdp.replays = self.replays.take();
    }
}

impl Fsdp {
    /// Gives the mean loss over this rank's samples. A rank without samples gathers and sums all the same (Z-ORDER).
    pub(super) fn pass_by_units(&mut self, pass: &Pass<'_>) -> Result<f64, Error> {
        self.take_back();
        self.expect_products();
        let adds = self.adding;
        begin(&mut self.adding, pass.parameters);
        if self.replays.is_some() && self.is_away_between() {
            // A replay gathers all units, so all ranks do.
            self.send_all_away();
        }
        let is_replayed = self.can_be_replayed(pass, adds);
        if let Some(replays) = self.replays.take_if(|_| is_replayed) {
            let mut replaying = Replaying { fsdp: self, replays: Some(replays) };
            let Replaying { fsdp, replays } = &mut replaying;
            let replays = replays.as_mut().expect("put there above");
            return replays
                .pass(pass, &mut ByUnits { fsdp, sync: pass.sync }, &mut || ())
                .map(PassLoss::item);
        }
        let loss = self.give_by_units(pass, &weight_of(pass))?;
        self.store.watch("a pass over units that are gathered", &self.shard)?;
        Ok(loss.map_or(0.0, |loss| loss.item()))
    }

    /// Whether a pass leaves all units as it found them. Where gradients are shared out, their memory comes and goes within a pass only if
    /// no other adds to them; the first passes in 16 bits find out what units are used for.
    fn can_be_replayed(&self, pass: &Pass<'_>, adds: bool) -> bool {
        let leaves_none = !adds && pass.sync == Sync::Now;
        pass.samples() > 0
            && (leaves_none || self.config.sharded < Sharded::Gradients)
            && self.store.has_agreed()
    }

    /// A pass whose loss, if this rank has samples, nobody has waited for yet; `weight` is a single number.
    fn give_by_units(&mut self, pass: &Pass<'_>, weight: &Tensor) -> Result<Option<Tensor>, Error> {
        let live = self.forward_of_pass(pass)?;
        let loss = live.last().map(|Live { output, .. }| output.detach());
        self.backward_by_units(pass, live, weight)?;
        Ok(loss)
    }

    /// Where values come and go, what the passes of this thread's region cast comes and goes with them.
    fn expect_products(&mut self) {
        if self.is_away_between() {
            self.store.expect_products(autocast_dtype(), &self.units);
        }
    }

    /// A pass that `local` makes, with all units here: they come once a step, and go with its last pass.
    pub(super) fn pass_of_all(&mut self, pass: &Pass<'_>, local: &mut dyn Local) -> Result<f64, Error> {
        begin(&mut self.adding, pass.parameters);
        self.gather_for_passes()?;
        (0..self.units.len()).for_each(|unit| self.make_room_for_gradients(unit, pass.parameters));
        let loss = local.pass(pass, &mut Nobody)?;
        if pass.sync == Sync::Now {
            if self.is_away_between() {
                self.send_all_away();
            }
            self.sum_rest(pass.parameters)?;
        }
        Ok(loss)
    }

    /// An evaluation that `local` makes, with all units here meanwhile.
    pub(super) fn evaluate_with_all(
        &mut self,
        pass: &EvalPass<'_>,
        local: &mut dyn Local,
        judge: &Judge<'_>,
        sums: &mut [f64],
    ) -> Result<(), Error> {
        self.gather_for_passes()?;
        local.evaluate(pass, judge, sums)?;
        if self.is_away_between() {
            self.send_all_away();
        }
        Ok(())
    }

    /// Brings all units, and what was cast of them.
    fn gather_for_passes(&mut self) -> Result<(), Error> {
        self.gather()?;
        self.expect_products();
        (0..self.units.len())
            .try_for_each(|unit| self.store.wait_for(&self.units, unit, &self.shard, For::Pass))
    }

    /// Lets the GPU come near to a unit that was asked for (Z-WATCH). What stays from step to step comes as a whole, and the first unit's
    /// work may be given behind it.
    fn keep_pace(&self, unit: usize) -> Result<(), Error> {
        let are_away = self.is_away_between();
        if are_away || unit > 0 { self.store.keep_pace(are_away) } else { Ok(()) }
    }

    /// Waits for a unit, and asks for the one that comes next: units come in the order in which all ranks want them (Z-ORDER).
    fn come_to(&mut self, unit: usize, next: Option<usize>) -> Result<(), Error> {
        self.store.wait_for(&self.units, unit, &self.shard, For::Pass)?;
        self.keep_pace(unit)?;
        if let Some(next) = next {
            self.store.call(&self.units, next, &self.shard, For::Pass);
        }
        Ok(())
    }

    /// A forward pass alone, of this rank's samples, if it has any, through units that are given back at once.
    pub(super) fn forward_by_units(
        &mut self,
        pass: &EvalPass<'_>,
    ) -> Result<Option<Outputs<'static>>, Error> {
        self.take_back();
        self.expect_products();
        let (count, mut ctx) = (self.units.len(), pass.ctx.clone());
        let mut x = (pass.samples() > 0).then(|| pass.input.clone());
        for unit in 0..count {
            self.come_to(unit, (unit + 1 < count).then_some(unit + 1))?;
            let blocks = self.units[unit].blocks.clone();
            let through = |x| blocks.fold(x, |x, block| pass.model.forward_block(block, &x, &mut ctx));
            x = x.map(|x| no_grad(|| through(x)));
            if self.is_away_between() && !self.units[unit].stays {
                self.store.send_away(&self.units, unit);
            }
        }
        if self.is_away_between() {
            self.send_all_away();
        }
        self.store.watch("a forward pass over units that are gathered", &self.shard)?;
        Ok(x.map(|output| Outputs::of(output, pass.target.clone(), ctx)))
    }

    fn forward_of_pass(&mut self, pass: &Pass<'_>) -> Result<Vec<Live>, Error> {
        let (count, mut ctx) = (self.units.len(), pass.ctx.clone());
        let mut x = (pass.samples() > 0).then(|| pass.input.clone());
        let mut live = Vec::with_capacity(count);
        for unit in 0..count {
            self.come_to(unit, (unit + 1 < count).then_some(unit + 1))?;
            if let Some(before) = x.take() {
                // Behind units that learn nothing there is nothing to go back for.
                let input = (unit > 0 && before.needs_grad()).then(|| before.detach().requires_grad());
                let start = input.clone().unwrap_or(before);
                let blocks = self.units[unit].blocks.clone();
                let y = blocks.fold(start, |x, block| pass.model.forward_block(block, &x, &mut ctx));
                let output =
                    if unit + 1 < count { y.clone() } else { pass.loss.of_pass(&y, &pass.target, &ctx) };
                live.push(Live { input, output });
                x = Some(y);
            }
            // The last one is the first that goes backward.
            if self.is_away_between() && unit + 1 < count && !self.units[unit].stays {
                self.store.send_away(&self.units, unit);
            }
        }
        Ok(live)
    }

    fn backward_by_units(
        &mut self,
        pass: &Pass<'_>,
        mut live: Vec<Live>,
        weight: &Tensor,
    ) -> Result<(), Error> {
        let mut grad = live.last().map(|Live { output, .. }| weight.cast(output.dtype()));
        // What a later unit shares gets a gradient before its own unit is reached.
        for unit in (0..self.units.len()).filter(|&unit| self.units[unit].stays).collect::<Vec<_>>() {
            self.make_room_for_gradients(unit, pass.parameters);
        }
        for unit in (0..self.units.len()).rev() {
            self.come_to(unit, unit.checked_sub(1))?;
            self.make_room_for_gradients(unit, pass.parameters);
            if let Some(Live { input, output }) = live.pop() {
                let id = input.as_ref().and_then(Tensor::leaf_id);
                let mut catching = Catching { input: id, caught: None, group: &self.shard };
                // A first unit of nothing to learn has no gradients at all.
                if output.needs_grad() {
                    backward(&[(&output, grad.as_ref())], &mut catching);
                }
                let caught = catching.caught;
                grad = input.map(|input| {
                    caught.unwrap_or_else(|| Tensor::zeros(input.device(), *input.shape(), input.dtype()))
                });
            }
            if self.is_away_between() {
                self.store.send_away(&self.units, unit);
            }
            if pass.sync == Sync::Now {
                self.start_sum(unit, pass.parameters)?;
            }
        }
        Ok(())
    }
}

/// A pass from unit to unit that may be recorded: with its gathers, and where it is a step's last, with its sums.
struct ByUnits<'a> {
    fsdp: &'a mut Fsdp,
    sync: Sync,
}

impl Way for ByUnits<'_> {
    fn give(&mut self, pass: &Pass<'_>, weight: &Tensor) -> Result<Tensor, Error> {
        let loss = self.fsdp.give_by_units(pass, weight)?;
        // So that all memory of units has come back within the pass.
        while !self.fsdp.summing.is_empty() {
            self.fsdp.finish_sum()?;
        }
        Ok(loss.expect("it has samples"))
    }

    fn done(&mut self) -> Result<bool, Error> {
        self.fsdp.started = 0;
        Ok(true)
    }

    fn replayed(&mut self) {
        if self.sync == Sync::Now {
            self.fsdp.started = self.fsdp.units.len();
        }
    }

    fn arenas(&self, parameters: &Parameters) -> [Vec<Arena>; 2] {
        let held = self.fsdp.store.held.as_ref().expect("it was found to lie on a GPU");
        let mut written = vec![parameters.buffers().clone()];
        written.extend(held.arenas_of_passes().cloned());
        if self.fsdp.is_away_between() {
            // Units, and casts of them, are in memory that comes and goes.
            return [written, Vec::new()];
        }
        [written, vec![parameters.values().clone()]]
    }
}
