//! Where the values of units are: on this rank, on their way, or away; and the pages that units use in turn. With a region's casts to 16
//! bits, a pass may want of a unit little more than these ([`Mixed`]).

use super::MOST_SUMMING;
use super::halves::{Halves, Mixed, Use, halves};
use super::held::{Held, Moving};
use super::units::Unit;
use crate::error::Error;
use phalanx_comm::{Buffer, Deadline, Element as Sent, Group, ReduceOp, Work};
use phalanx_nn::Parameters;
use phalanx_tensor::{Arena, DType, Grads, Span, Spare};
use std::collections::VecDeque;
use std::ops::{DerefMut, Range};

/// A part of a span, as collectives take it.
pub(super) struct Piece<S> {
    pub(super) span: S,
    pub(super) range: Range<usize>,
}

impl<T: Sent, S: DerefMut<Target = [T]> + Send + 'static> Buffer for Piece<S> {
    type Item = T;

    fn as_mut_slice(&mut self) -> &mut [T] {
        &mut self.span[self.range.clone()]
    }
}

/// What a unit is wanted for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum For {
    /// Its values, in float32.
    Values,
    /// A pass, which may want most of it in the type of its products.
    Pass,
}

/// A unit on its way.
enum Coming {
    Whole(Work<Piece<Span<f32>>>),
    /// On a GPU.
    OnGpu(Moving),
    /// Its casts come, and this of it in float32.
    Mixed {
        span: Span<f32>,
        wide: Wide,
    },
}

/// What of a unit comes in float32 beside its casts.
enum Wide {
    Here(Option<Work<Vec<f32>>>),
    OnGpu(Option<Moving>),
}

/// The values of all units.
pub(super) struct Store {
    pub(super) values: Arena,
    grads: Grads,
    /// Units that are away are borrowed for writing, so that whoever uses one all the same finds out (Z-HELD).
    pub(super) away: Vec<Option<Span<f32>>>,
    coming: VecDeque<(usize, Coming)>,
    /// Of units that are here for a pass, what isn't in float32: borrowed likewise.
    partly: Vec<Vec<Span<f32>>>,
    /// What products in 16 bits make of units, if there are any.
    casts: Option<Cast>,
    /// What this rank holds, where that is a GPU's.
    pub(super) held: Option<Held>,
    /// Pages of others' parts of units, values and gradients, that are not needed now.
    pub(super) spare: Option<Spare>,
    /// Whether what is held is all that means anything.
    has_parted: bool,
}

/// The casts of a region.
struct Cast {
    halves: Box<dyn Halves>,
    /// The parameters that were cast, as far as this rank knows.
    known: Vec<bool>,
    /// How often each had been read before there were casts.
    reads: Vec<u64>,
    /// How each unit comes to a pass, once all ranks have agreed.
    plan: Option<Vec<Option<Mixed>>>,
}

/// Units that others' parts of come of at once, in the midst of a backward pass: two units' values, one's gradients, and those that
/// are on their way.
const UNITS_AT_ONCE: usize = 3 + MOST_SUMMING;

/// Room for the pages that come at once; none where the system has none. Values and gradients of units that stay are among them.
fn room(units: &[Unit]) -> Option<Spare> {
    let away = |unit: &Unit| unit.bytes_of_others().iter().map(Range::len).sum::<usize>();
    let most = units.iter().filter(|unit| !unit.stays).map(away).max().unwrap_or(0);
    let stay: usize = units.iter().filter(|unit| unit.stays).map(away).sum();
    let parts: Vec<Range<usize>> = units.iter().flat_map(Unit::bytes_of_others).collect();
    Spare::fitting(&parts, UNITS_AT_ONCE * most + 2 * stay).ok()
}

impl Store {
    /// All units are here.
    pub(super) fn of(units: &[Unit], parameters: &Parameters, held: Option<Held>) -> Store {
        Store {
            values: parameters.values().clone(),
            grads: parameters.grads().clone(),
            away: units.iter().map(|_| None).collect(),
            coming: VecDeque::new(),
            partly: units.iter().map(|_| Vec::new()).collect(),
            casts: None,
            spare: if held.is_some() { None } else { room(units) },
            held,
            has_parted: false,
        }
    }

    /// Takes units for away, of which this rank has nothing but its part.
    pub(super) fn call_in(&mut self, units: &[Unit]) {
        let span = |unit: &Unit| Some(self.values.range_mut(unit.params.clone()));
        self.away = units.iter().map(span).collect();
    }

    /// Takes over from all units that are here what this rank holds of them on a GPU.
    pub(super) fn keep(&self, units: &[Unit]) {
        let Some(held) = self.held.as_ref().filter(|_| !self.has_parted) else { return };
        for (i, _) in self.away.iter().enumerate().filter(|(_, away)| away.is_none()) {
            held.keep_values(units, i, &self.values.set_aside(units[i].params.clone()));
        }
    }

    /// Forgets where units are: what of them this rank holds is here.
    pub(super) fn let_go(&mut self) {
        self.coming.clear();
        self.held.iter_mut().for_each(Held::let_go);
        self.away.fill_with(|| None);
        self.partly.fill_with(Vec::new);
        self.casts = None;
        self.has_parted = true;
    }

    /// Makes ready for passes whose products are made in this type; all ranks have to, between two passes.
    pub(super) fn expect_products(&mut self, dtype: DType, units: &[Unit]) {
        if self.casts.as_ref().map(|casts| casts.halves.dtype()) == dtype.is_half().then_some(dtype) {
            return;
        }
        // What was borrowed of them is given back first.
        self.casts = None;
        if dtype.is_half() {
            let count = self.values.layout().count();
            let halves = halves(dtype, units, &self.grads);
            let reads = (0..count).map(|i| self.grads.reads_beside_casts(i, &self.values)).collect();
            self.casts = Some(Cast { halves, known: vec![false; count], reads, plan: None });
        }
    }

    /// Finds out, after the first passes of a region, what units are used for, on any rank; all have to ask at once.
    pub(super) fn agree_on_casts(&mut self, units: &[Unit], all: &Group, shard: &Group) -> Result<(), Error> {
        let Some(Cast { known, reads, plan: plan @ None, halves }) = &mut self.casts else { return Ok(()) };
        let is_read = |i: usize| self.grads.reads_beside_casts(i, &self.values) > reads[i];
        let mut flags: Vec<u8> =
            (0..known.len()).map(|i| u8::from(is_read(i)) | u8::from(known[i]) << 1).collect();
        all.all_reduce(&mut flags, ReduceOp::Or)?;
        let uses: Vec<Use> =
            flags.iter().map(|flag| Use { wide: flag & 1 != 0, cast: flag & 2 != 0 }).collect();
        known.iter_mut().zip(&uses).for_each(|(known, used)| *known = used.cast);
        let (layout, ranks) = (self.values.layout(), shard.world_size());
        let agreed: Vec<_> = units.iter().map(|unit| Mixed::of(unit, &uses, layout, ranks)).collect();
        if let Some(held) = &mut self.held {
            held.expect(&agreed, halves.dtype())?;
        }
        *plan = Some(agreed);
        Ok(())
    }

    /// Whether it is known what the passes of a region want of units.
    pub(super) fn has_agreed(&self) -> bool {
        self.casts.as_ref().is_none_or(|casts| casts.plan.is_some())
    }

    /// Starts to gather a unit, if it is away.
    pub(super) fn call(&mut self, units: &[Unit], unit: usize, group: &Group, wanted: For) {
        let Some(mut span) = self.away[unit].take() else { return };
        let mixed = match &mut self.casts {
            Some(Cast { halves, plan: Some(plan), .. }) if wanted == For::Pass => {
                plan[unit].as_ref().map(|mixed| (halves, mixed))
            }
            _ => None,
        };
        let coming = match (mixed, &mut self.held) {
            (Some((halves, mixed)), Some(held)) => {
                halves.start_from(held, units, unit, group);
                let wide = Wide::OnGpu(held.gather_wide(units, unit, mixed, group));
                Coming::Mixed { span, wide }
            }
            (None, Some(held)) => Coming::OnGpu(held.gather(units, unit, span, group)),
            (Some((halves, mixed)), None) => {
                halves.start(units, unit, &span, group);
                let packed = mixed.packed(group.rank().index(), &span);
                let wide = Wide::Here(packed.map(|packed| group.start_all_gather(packed)));
                Coming::Mixed { span, wide }
            }
            (None, None) => {
                make_room(&mut span, &units[unit], &mut self.spare);
                let range = units[unit].shared_out.clone();
                Coming::Whole(group.start_all_gather(Piece { span, range }))
            }
        };
        self.coming.push_back((unit, coming));
    }

    /// Returns when a unit is here.
    pub(super) fn wait_for(
        &mut self,
        units: &[Unit],
        unit: usize,
        group: &Group,
        wanted: For,
    ) -> Result<(), Error> {
        self.call(units, unit, group, wanted);
        while self.coming.iter().any(|(coming, _)| *coming == unit) {
            self.wait_for_next(units, group)?;
        }
        if wanted == For::Pass {
            self.cast(units, unit);
        }
        Ok(())
    }

    /// Returns when all units are here.
    pub(super) fn wait_for_all(&mut self, units: &[Unit], group: &Group) -> Result<(), Error> {
        (0..units.len()).for_each(|unit| self.call(units, unit, group, For::Values));
        while !self.coming.is_empty() {
            self.wait_for_next(units, group)?;
        }
        Ok(())
    }

    fn wait_for_next(&mut self, units: &[Unit], group: &Group) -> Result<(), Error> {
        let Some((unit, coming)) = self.coming.pop_front() else { return Ok(()) };
        let deadline = || Deadline::after(group.timeout());
        match coming {
            // With its borrow given back, everyone sees it.
            Coming::Whole(work) => drop(work.wait(deadline())?),
            Coming::OnGpu(moving) => {
                drop(moving.finish(group)?);
                self.note()?;
            }
            Coming::Mixed { mut span, wide } => {
                let casts = self.casts.as_mut().expect("who called for them has them until the pass ends");
                casts.halves.finish(group)?;
                let mixed = casts.plan.as_ref().and_then(|plan| plan[unit].as_ref());
                let mixed = mixed.expect("it was called for so");
                match (wide, &self.held) {
                    (Wide::Here(None), _) => {}
                    (Wide::Here(Some(work)), _) => mixed.unpack(&work.wait(deadline())?, &mut span),
                    (Wide::OnGpu(moving), held) => {
                        let all = moving.map(|moving| moving.finish(group)).transpose()?;
                        let held = held.as_ref().expect("what moves on a GPU is held apart");
                        held.put_wide(units, unit, mixed, all.as_ref(), &mut span);
                    }
                }
                drop(span);
                let narrow = mixed.narrow.iter().map(|&i| self.values.set_aside(i..i + 1));
                self.partly[unit] = narrow.collect();
                let cast = units[unit].params.clone().filter(|&i| casts.known[i]);
                self.grads.were_cast(cast, &self.values);
                self.note()?;
            }
        }
        Ok(())
    }

    /// Casts of a unit that is here what was cast before, if that isn't.
    fn cast(&mut self, units: &[Unit], unit: usize) {
        let Some(Cast { halves, known, .. }) = &mut self.casts else { return };
        if !halves.is_away(unit) {
            return;
        }
        let Unit { params, span: at, .. } = &units[unit];
        let values = self.values.set_aside::<f32>(params.clone());
        let cast = || params.clone().filter(|&i| known[i]);
        for i in cast() {
            let of = self.values.layout().range(i);
            halves.make(unit, of.start - at.start..of.end - at.start, &values);
        }
        halves.let_in(unit);
        drop(values);
        self.grads.were_cast(cast(), &self.values);
    }

    fn note(&self) -> Result<(), Error> {
        self.held.as_ref().map_or(Ok(()), Held::note)
    }

    /// Waits until the GPU is not far behind what was gathered or summed: a few units, if they go `away` after each use, else none.
    pub(super) fn keep_pace(&self, are_away: bool) -> Result<(), Error> {
        self.held.as_ref().map_or(Ok(()), |held| held.keep_pace(are_away))
    }

    /// Waits for what units that came from GPU to GPU are used for.
    pub(super) fn watch(&self, what: &str, group: &Group) -> Result<(), Error> {
        self.held.as_ref().map_or(Ok(()), |held| held.watch(what, group))
    }

    /// Gives a unit back but for this rank's part, if it is here.
    pub(super) fn send_away(&mut self, units: &[Unit], unit: usize) {
        if self.away[unit].is_some() || self.coming.iter().any(|(coming, _)| *coming == unit) {
            return;
        }
        let came_whole = self.partly[unit].drain(..).next().is_none();
        let params = units[unit].params.clone();
        if let Some(Cast { halves, known, .. }) = &mut self.casts {
            params.clone().for_each(|i| known[i] |= self.grads.is_cast(i, &self.values));
            self.grads.forget_casts(params.clone());
            halves.send_away(units, unit);
        }
        let mut span = self.values.set_aside(params);
        if let Some(held) = &self.held {
            held.leave_values(&mut span);
            self.away[unit] = Some(span);
            return;
        }
        // What came in 16 bits has hardly a page to keep.
        let mut none = None;
        keep_own(&mut span, &units[unit], if came_whole { &mut self.spare } else { &mut none });
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
