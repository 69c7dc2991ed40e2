//! Where the values of units are: on this rank, on their way, or away; and the pages that units use in turn.

use super::units::Unit;
use crate::error::Error;
use phalanx_comm::{Buffer, Deadline, Group, Work};
use phalanx_nn::Parameters;
use phalanx_tensor::{Arena, Span, Spare};
use std::collections::VecDeque;
use std::ops::Range;

/// A part of a span, as collectives take it.
pub(super) struct Piece {
    pub(super) span: Span<f32>,
    pub(super) range: Range<usize>,
}

impl Buffer for Piece {
    type Item = f32;

    fn as_mut_slice(&mut self) -> &mut [f32] {
        &mut self.span[self.range.clone()]
    }
}

/// The values of all units.
pub(super) struct Store {
    values: Arena,
    /// Units that are away are borrowed for writing, so that whoever uses one all the same finds out (Z-HELD).
    pub(super) away: Vec<Option<Span<f32>>>,
    coming: VecDeque<(usize, Work<Piece>)>,
    /// Pages of others' parts of units, values and gradients, that are not needed now.
    pub(super) spare: Option<Spare>,
}

/// Units whose pages are kept while nobody needs them. At the start of a backward pass, when two units are here, others' parts of
/// the gradients of so many come.
const SPARE_UNITS: usize = 3;
/// Lots that a unit's pages come in: what doesn't fill one is given back and asked for again.
const LOTS: usize = 32;
/// The fewest bytes of a lot: to move one takes the system as long as to bring in a page or two.
const LEAST_LOT: usize = 16 << 10;

/// Room for the pages of so many units; none where the system has none.
fn room(units: &[Unit]) -> Option<Spare> {
    let away = |unit: &Unit| (unit.shared_out.len() - unit.own.len()) * size_of::<f32>();
    let most = units.iter().map(away).max().unwrap_or(0);
    let lot = most.div_ceil(LOTS).max(LEAST_LOT);
    Spare::new(SPARE_UNITS * (most / lot), lot).ok()
}

impl Store {
    /// All units are here.
    pub(super) fn of(units: &[Unit], parameters: &Parameters) -> Store {
        let (values, away) = (parameters.values().clone(), units.iter().map(|_| None).collect());
        Store { values, away, coming: VecDeque::new(), spare: room(units) }
    }

    /// Takes units for away, of which this rank has nothing but its part.
    pub(super) fn call_in(&mut self, units: &[Unit]) {
        let span = |unit: &Unit| Some(self.values.range_mut(unit.params.clone()));
        self.away = units.iter().map(span).collect();
    }

    /// Forgets where units are: what of them this rank holds is here.
    pub(super) fn let_go(&mut self) {
        self.coming.clear();
        self.away.fill_with(|| None);
    }

    /// Starts to gather a unit, if it is away.
    pub(super) fn call(&mut self, units: &[Unit], unit: usize, group: &Group) {
        if let Some(mut span) = self.away[unit].take() {
            make_room(&mut span, &units[unit], &mut self.spare);
            let range = units[unit].shared_out.clone();
            self.coming.push_back((unit, group.start_all_gather(Piece { span, range })));
        }
    }

    /// Returns when a unit is here.
    pub(super) fn wait_for(&mut self, units: &[Unit], unit: usize, group: &Group) -> Result<(), Error> {
        self.call(units, unit, group);
        while self.coming.iter().any(|(coming, _)| *coming == unit) {
            self.wait_for_next(group)?;
        }
        Ok(())
    }

    /// Returns when all units are here.
    pub(super) fn wait_for_all(&mut self, units: &[Unit], group: &Group) -> Result<(), Error> {
        (0..units.len()).for_each(|unit| self.call(units, unit, group));
        while !self.coming.is_empty() {
            self.wait_for_next(group)?;
        }
        Ok(())
    }

    fn wait_for_next(&mut self, group: &Group) -> Result<(), Error> {
        let Some((_, work)) = self.coming.pop_front() else { return Ok(()) };
        // With its borrow given back, everyone sees it.
        drop(work.wait(Deadline::after(group.timeout()))?);
        Ok(())
    }

    /// Gives a unit back but for this rank's part, if it is here.
    pub(super) fn send_away(&mut self, units: &[Unit], unit: usize) {
        if self.away[unit].is_some() || self.coming.iter().any(|(coming, _)| *coming == unit) {
            return;
        }
        let mut span = self.values.set_aside(units[unit].params.clone());
        keep_own(&mut span, &units[unit], &mut self.spare);
        self.away[unit] = Some(span);
    }
}

/// Gives the memory of a unit back but for what this rank holds of it, or keeps it for another.
pub(super) fn keep_own(span: &mut Span<f32>, unit: &Unit, spare: &mut Option<Spare>) {
    for others in unit.of_others() {
        match spare {
            Some(spare) => span.leave(others, spare),
            None => span.give_back(others),
        }
    }
}

/// Brings memory for what others hold of a unit, as far as some is kept: for one who overwrites it.
pub(super) fn make_room(span: &mut Span<f32>, unit: &Unit, spare: &mut Option<Spare>) {
    if let Some(spare) = spare {
        unit.of_others().into_iter().for_each(|others| span.refill(others, spare));
    }
}
