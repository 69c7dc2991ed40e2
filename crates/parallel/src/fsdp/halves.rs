//! What autocast makes of units' parameters, where these come and go: its casts to a float of 16 bits come and go with them.
//!
//! Once it is known which parameters of a unit are wanted in which type ([`Mixed`]), ranks gather of it what a pass wants: each casts
//! its part, the casts are gathered, half the bytes, and in float32 only the few parameters that something reads as they are, such as
//! the weights of norms. Until then, and where that saves nothing, they gather float32, and each rank casts what was cast before. Either
//! way a cast is that of the whole float32 values, to the bit.

use super::held::{Held, Moving};
use super::store::Piece;
use super::units::{Unit, runs};
use crate::error::Error;
use phalanx_comm::{Deadline, Element as Sent, Group, Work, bf16, f16};
use phalanx_tensor::{Arena, DType, Element, Grads, Layout, Span};
use std::collections::VecDeque;
use std::ops::Range;

/// The casts of all units' parameters, whatever their type.
pub(super) trait Halves: Send {
    /// Which it is.
    fn dtype(&self) -> DType;

    /// Gives the casts of a unit back and borrows them (Z-HELD), unless that is so already.
    fn send_away(&mut self, units: &[Unit], unit: usize);

    /// Whether they are away.
    fn is_away(&self, unit: usize) -> bool;

    /// Casts these elements of a unit that is away, which are counted from its start.
    fn make(&mut self, unit: usize, elements: Range<usize>, values: &Span<f32>);

    /// Lets everybody at the casts of a unit.
    fn let_in(&mut self, unit: usize);

    /// Casts what this rank holds of a unit that is away, and starts to gather what the others do.
    fn start(&mut self, units: &[Unit], unit: usize, values: &Span<f32>, group: &Group);

    /// The same on a GPU, of what lies in `held`.
    fn start_from(&mut self, held: &mut Held, units: &[Unit], unit: usize, group: &Group);

    /// Returns when those that were started first are here.
    fn finish(&mut self, group: &Group) -> Result<(), Error>;
}

/// The casts of units that are all away, in this type. Panics if it isn't one of 16 bits.
pub(super) fn halves(dtype: DType, units: &[Unit], grads: &Grads) -> Box<dyn Halves> {
    let arena = grads.casts_in(dtype);
    match dtype {
        DType::BF16 => Box::new(Typed::<bf16>::away(arena, units)),
        DType::F16 => Box::new(Typed::<f16>::away(arena, units)),
        _ => panic!("casts to {dtype}: bf16 or f16 would do"),
    }
}

/// Casts on their way.
enum Coming<T: Element + Sent> {
    Here(Work<Piece<Span<T>>>),
    OnGpu(Moving<T>),
}

struct Typed<T: Element + Sent> {
    arena: Arena,
    away: Vec<Option<Span<T>>>,
    coming: VecDeque<Coming<T>>,
}

impl<T: Element + Sent> Typed<T> {
    fn away(arena: Arena, units: &[Unit]) -> Typed<T> {
        arena.cut(&runs(units));
        let away = units.iter().map(|_| None).collect();
        let mut casts = Typed { arena, away, coming: VecDeque::new() };
        (0..units.len()).for_each(|unit| casts.send_away(units, unit));
        casts
    }
}

impl<T: Element + Sent> Halves for Typed<T> {
    fn dtype(&self) -> DType {
        T::DTYPE
    }

    fn send_away(&mut self, units: &[Unit], unit: usize) {
        if self.away[unit].is_none() {
            let mut span = self.arena.set_aside(units[unit].params.clone());
            span.give_back(0..span.count());
            self.away[unit] = Some(span);
        }
    }

    fn is_away(&self, unit: usize) -> bool {
        self.away[unit].is_some()
    }

    fn make(&mut self, unit: usize, elements: Range<usize>, values: &Span<f32>) {
        if let Some(span) = &mut self.away[unit] {
            span.cast_span(elements.start, values, elements);
        }
    }

    fn let_in(&mut self, unit: usize) {
        self.away[unit] = None;
    }

    fn start(&mut self, units: &[Unit], unit: usize, values: &Span<f32>, group: &Group) {
        for held in [units[unit].own.clone(), units[unit].rest()] {
            self.make(unit, held, values);
        }
        let Some(span) = self.away[unit].take() else { return };
        let piece = Piece { span, range: units[unit].shared_out.clone() };
        self.coming.push_back(Coming::Here(group.start_all_gather(piece)));
    }

    fn start_from(&mut self, held: &mut Held, units: &[Unit], unit: usize, group: &Group) {
        let Some(span) = self.away[unit].take() else { return };
        self.coming.push_back(Coming::OnGpu(held.gather_casts(units, unit, span, group)));
    }

    fn finish(&mut self, group: &Group) -> Result<(), Error> {
        match self.coming.pop_front() {
            None => {}
            Some(Coming::Here(work)) => drop(work.wait(Deadline::after(group.timeout()))?),
            Some(Coming::OnGpu(moving)) => drop(moving.finish(group)?),
        }
        Ok(())
    }
}

/// How parameters are used in passes: what each rank found, then what all did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Use {
    /// Whether they are read in float32.
    pub(super) wide: bool,
    /// Whether they are cast.
    pub(super) cast: bool,
}

/// A unit that comes in 16 bits, but for what of it is wanted in float32.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Mixed {
    /// The parameters that aren't.
    pub(super) narrow: Vec<usize>,
    /// The elements that are, of each rank's part, counted from the start of the unit.
    wide: Vec<Vec<Range<usize>>>,
    /// How many are the most of a rank.
    most: usize,
}

impl Mixed {
    /// None where that wouldn't save bytes: where too much is wanted in float32 as well.
    pub(super) fn of(unit: &Unit, uses: &[Use], layout: &Layout, ranks: usize) -> Option<Mixed> {
        let (part, start) = (unit.own.len(), unit.span.start);
        // What nobody has used yet may be used in any way.
        let (narrow, other): (Vec<usize>, Vec<usize>) =
            unit.params.clone().partition(|&i| uses[i].cast && !uses[i].wide);
        let of_rank = |rank: usize| {
            let own = rank * part..(rank + 1) * part;
            let held = other.iter().map(|&i| {
                let of = layout.range(i);
                (of.start - start).max(own.start)..(of.end - start).min(own.end)
            });
            held.filter(|held| !held.is_empty()).collect()
        };
        let wide: Vec<Vec<Range<usize>>> = (0..ranks).map(of_rank).collect();
        let most = wide.iter().map(|of_rank| of_rank.iter().map(Range::len).sum()).max().unwrap_or(0);
        let bytes = size_of::<u16>() * unit.shared_out.len() + size_of::<f32>() * ranks * most;
        (bytes < size_of::<f32>() * unit.shared_out.len()).then_some(Mixed { narrow, wide, most })
    }

    /// Among how many ranks it is shared out.
    pub(super) fn ranks(&self) -> usize {
        self.wide.len()
    }

    /// How many numbers are gathered in float32: as many of each rank as of the one that has most.
    pub(super) fn wide_count(&self) -> usize {
        self.wide.len() * self.most
    }

    /// What of a rank's part is wanted in float32, counted from the start of the unit, beside where it lies among that of all ranks.
    pub(super) fn wide_of(&self, rank: usize) -> impl Iterator<Item = (usize, Range<usize>)> {
        let start = rank * self.most;
        self.wide[rank].iter().scan(start, |at, part| {
            *at += part.len();
            Some((*at - part.len(), part.clone()))
        })
    }

    /// What of this rank's part is wanted in float32, where it belongs among that of all ranks; none if nothing is.
    pub(super) fn packed(&self, rank: usize, values: &[f32]) -> Option<Vec<f32>> {
        if self.most == 0 {
            return None;
        }
        let mut all = vec![0.0; self.wide.len() * self.most];
        let own = self.wide[rank].iter().flat_map(|held| &values[held.clone()]);
        all[rank * self.most..].iter_mut().zip(own).for_each(|(to, &from)| *to = from);
        Some(all)
    }

    /// Puts that of all ranks where it belongs.
    pub(super) fn unpack(&self, all: &[f32], values: &mut [f32]) {
        for (from, held) in all.chunks_exact(self.most).zip(&self.wide) {
            let mut at = 0;
            for held in held {
                values[held.clone()].copy_from_slice(&from[at..at + held.len()]);
                at += held.len();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::units::units;
    use super::*;
    use phalanx_nn::{LayerNorm, Linear, Parameters, Sequential};
    use phalanx_tensor::Device;

    #[test]
    fn what_is_wanted_in_float32_comes_from_every_rank_and_saves_bytes_or_all_of_it_does() {
        // Elements: 64 and 64 of the norm, 64 x 64 and 64 of the dense layer.
        let mut net = Sequential::new().then(LayerNorm::new(64)).then(Linear::new(64, 64));
        let parameters = Parameters::build(&mut net, &Device::cpu(1), 0);
        let values: Vec<f32> = (0..parameters.layout().len()).map(|i| i as f32).collect();
        // Nothing; the norm, which is one rank's; the matrix, and with it more than there is to save.
        for (wide, saves) in [(vec![], true), (vec![0, 1], true), (vec![2], false), (vec![0, 1, 2, 3], false)]
        {
            let uses: Vec<Use> = (0..4).map(|i| Use { wide: wide.contains(&i), cast: true }).collect();
            for n in 1..6 {
                let group = Group::threads(n).remove(0);
                let unit = units(&net, &parameters, &group, 1 << 20).unwrap().remove(0);
                let mixed = Mixed::of(&unit, &uses, parameters.layout(), n);
                assert_eq!(mixed.is_some(), saves, "{wide:?} among {n} ranks");
                let Some(mixed) = mixed else { continue };
                let narrow: Vec<usize> = (0..4).filter(|i| !wide.contains(i)).collect();
                assert_eq!(mixed.narrow, narrow);
                let all: Vec<f32> = (0..n)
                    .filter_map(|rank| {
                        let packed = mixed.packed(rank, &values)?;
                        Some(packed[rank * mixed.most..][..mixed.most].to_vec())
                    })
                    .flatten()
                    .collect();
                assert_eq!(all.len(), n * mixed.most);
                assert_eq!(mixed.most == 0, wide.is_empty());
                let mut got = vec![-1.0; values.len()];
                if mixed.most > 0 {
                    mixed.unpack(&all, &mut got);
                }
                for i in 0..4 {
                    for at in parameters.layout().range(i).filter(|at| unit.shared_out.contains(at)) {
                        let want = if wide.contains(&i) { values[at] } else { -1.0 };
                        assert_eq!(got[at], want, "element {at} of {n} ranks");
                    }
                }
            }
        }
    }
}
