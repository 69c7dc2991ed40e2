//! Where the values of units are: on this rank, on their way, or away.

use super::units::Unit;
use crate::error::Error;
use phalanx_comm::{Buffer, Deadline, Group, Work};
use phalanx_nn::Parameters;
use phalanx_tensor::{Arena, Span};
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
}

impl Store {
    /// All units are here.
    pub(super) fn of(units: &[Unit], parameters: &Parameters) -> Store {
        let (values, away) = (parameters.values().clone(), units.iter().map(|_| None).collect());
        Store { values, away, coming: VecDeque::new() }
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
        if let Some(span) = self.away[unit].take() {
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
        keep_own(&mut span, &units[unit]);
        self.away[unit] = Some(span);
    }
}

/// Gives the memory of a unit back but for what this rank holds of it.
pub(super) fn keep_own(span: &mut Span<f32>, unit: &Unit) {
    span.give_back(0..unit.own.start);
    span.give_back(unit.own.end..unit.shared_out.end);
}
