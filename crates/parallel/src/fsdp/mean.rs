//! A running mean of the values that a rank holds, in the order of its units, as the optimizer's state lies.

use super::Fsdp;
use super::held::Held;
use super::units::Unit;
use crate::error::Error;
use crate::strategy::Strategy;
use phalanx_nn::{Average, Parameters, Shadow};
use phalanx_tensor::{Arena, DType, Layout};

impl Fsdp {
    /// That of one step, whether units are here or away.
    pub(super) fn mean_of_held(&mut self, parameters: &Parameters) -> Average {
        self.store.keep(&self.units);
        let values = match &self.store.held {
            Some(held) => held.beside(&self.units),
            None => {
                let mut all = Vec::new();
                self.each_held(|values| all.extend_from_slice(values));
                all.into()
            }
        };
        Average::of_arrays(values, Shadow::of(parameters.buffers()))
    }

    /// Moves it towards the values of now.
    pub(super) fn follow_held(&mut self, parameters: &Parameters, mean: &mut Average, decay: f64) {
        let share = Average::share(decay);
        let [values, buffers] = mean.shadows_mut();
        buffers.follow(parameters.buffers(), share);
        if let Some(held) = &self.store.held {
            return held.follow(&self.units, values, share);
        }
        let mut at = 0;
        self.each_held(|part| {
            values.follow_part(at, part, share);
            at += part.len();
        });
    }

    /// Exchanges the two.
    pub(super) fn swap_held(&mut self, parameters: &Parameters, mean: &mut Average) {
        let [values, buffers] = mean.shadows_mut();
        buffers.swap(parameters.buffers());
        if let Some(held) = &self.store.held {
            return held.swap(&self.units, values);
        }
        let mut at = 0;
        self.each_held(|part| {
            values.swap_part(at, part);
            at += part.len();
        });
    }

    /// Has other ranks have what this one holds, which isn't what they had of it: at once where each has all values, else with the next
    /// gather.
    pub(super) fn renew(&mut self) -> Result<(), Error> {
        if self.is_away_between() {
            return Ok(());
        }
        self.store.call_in(&self.units);
        self.gather()
    }

    /// All of a mean on the first rank of the shard.
    pub(super) fn whole_mean_of(&mut self, mean: &Average) -> Result<Average, Error> {
        Ok(Average::of_arrays(self.whole_array(mean.values())?, mean.buffers().clone()))
    }

    /// Calls `f` with the values of each part that this rank holds of a unit, in order, on a CPU.
    fn each_held(&mut self, mut f: impl FnMut(&mut [f32])) {
        for (unit, away) in self.units.iter().zip(&mut self.store.away) {
            let mut here = None;
            let span = match away {
                Some(span) => span,
                None => here.insert(self.store.values.range_mut(unit.params.clone())),
            };
            for part in [unit.own.clone(), unit.rest()] {
                f(&mut span[part]);
            }
        }
    }
}

impl Held {
    /// The values that are held, in an array beside them.
    fn beside(&self, units: &[Unit]) -> Shadow {
        Shadow::of(&self.in_one_run(units))
    }

    fn follow(&self, units: &[Unit], mean: &mut Shadow, share: f32) {
        let held = self.in_one_run(units);
        match held.device().gpu() {
            // The arena ends with a whole line.
            None => mean.follow_part(0, &held.flat::<f32>()[..self.count()], share),
            Some(_) => mean.follow(&held, share),
        }
    }

    fn swap(&self, units: &[Unit], mean: &mut Shadow) {
        let held = self.in_one_run(units);
        match held.device().gpu() {
            None => mean.swap_part(0, &mut held.flat_mut::<f32>()[..self.count()]),
            Some(_) => mean.swap(&held),
        }
        if !self.values.is_apart {
            let (mut values, held) = (self.values.arena.flat_mut::<f32>(), held.flat_mut::<f32>());
            for part in self.all(units) {
                values.copy_from(part.of_model.start, &held, part.held..part.held + part.of_model.len());
            }
        }
    }

    /// The values that are held, one part behind the other: where they lie so, or a copy of them.
    fn in_one_run(&self, units: &[Unit]) -> Arena {
        if self.values.is_apart {
            return self.values.arena.clone();
        }
        let run = Arena::new(self.values.arena.device(), DType::F32, &Layout::new(&[[self.count()].into()]));
        let (mut into, values) = (run.flat_mut::<f32>(), self.values.arena.flat_mut::<f32>());
        for part in self.all(units) {
            into.copy_from(part.held, &values, part.of_model);
        }
        drop(into);
        run
    }
}
