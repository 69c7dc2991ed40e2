//! What a rank holds where it computes on a GPU. Memory is given back there in pieces, not in pages: where values are shared out, or
//! gradients, those of a unit have memory of their own, which comes and goes with the unit, and what the rank has for good of all
//! units lies beside them in an arena, one unit after the other. A gather copies the rank's part to the unit's memory and brings
//! the others' there; a sum of gradients is made in the unit's memory, and this rank's part of it copied to the arena. What isn't
//! shared out stays where it is. Either way the optimizer goes over what is held alone.

use super::FsdpConfig;
use super::Sharded;
use super::store::Piece;
use super::units::Unit;
use crate::error::Error;
use phalanx_comm::{Deadline, GpuGroup, GpuWork, Group, Rank, ReduceOp, Work};
use phalanx_nn::Parameters;
use phalanx_nn::optim::{Clip, HeldPart};
use phalanx_tensor::{Arena, DType, GpuSpan, HostSpan, Layout, Span};
use std::ops::Range;

/// What this rank holds of all units.
pub(super) struct Held {
    pub(super) values: Keep,
    pub(super) grads: Keep,
    /// Where that of each unit begins among all that is held, which is how the optimizer's state lies.
    starts: Vec<usize>,
    /// The GPUs of the ranks that parameters are shared out among, if these tell each other from GPU to GPU; those of the ranks that
    /// hold the same.
    gpus: [Option<GpuGroup>; 2],
}

/// Where values or gradients lie that a rank holds.
pub(super) struct Keep {
    /// The model's, or one of what is held.
    pub(super) arena: Arena,
    /// Whether it is the latter, and units have memory of their own.
    is_apart: bool,
}

impl Keep {
    fn of(model: &Arena, runs: &[Range<usize>], held: &Layout, is_apart: bool) -> Keep {
        if is_apart {
            model.cut(runs);
        }
        let arena = if is_apart { Arena::new(model.device(), DType::F32, held) } else { model.clone() };
        Keep { arena, is_apart }
    }

    /// Whether it lies in an arena of what is held.
    pub(super) fn is_apart(&self) -> bool {
        self.is_apart
    }

    /// Where a part of what is held lies.
    fn place(&self, part: &Part) -> Range<usize> {
        let at = if self.is_apart { part.held } else { part.of_model.start };
        at..at + part.of_model.len()
    }

    /// Takes over what is held of a unit.
    fn keep(&self, parts: &[Part], unit: &Unit, span: &Span<f32>) {
        if self.is_apart {
            let mut held = self.arena.flat_mut::<f32>();
            for part in parts {
                held.copy_from(part.held, span, part.of(unit));
            }
        }
    }

    /// Gives a unit's memory back; false where it stays, being the model's.
    fn leave(&self, span: &mut Span<f32>) -> bool {
        if self.is_apart {
            span.give_back(0..span.count());
        }
        self.is_apart
    }
}

/// Neighbouring elements that this rank holds.
pub(super) struct Part {
    /// Which of all elements of the model.
    pub(super) of_model: Range<usize>,
    /// Where they begin among all that is held.
    held: usize,
    /// Whether all ranks hold them.
    pub(super) is_rest: bool,
}

impl Part {
    /// The same, counted from the start of their unit.
    fn of(&self, unit: &Unit) -> Range<usize> {
        self.of_model.start - unit.span.start..self.of_model.end - unit.span.start
    }
}

/// A unit that is gathered, or whose gradients are summed.
pub(super) enum Moving {
    OnGpus(Result<GpuWork<GpuSpan<f32>>, phalanx_comm::Error>),
    ByHost(Work<Piece<HostSpan<f32>>>),
    /// A unit of which nothing is shared out.
    Nothing(Span<f32>),
}

impl Moving {
    /// The unit, for whoever works on it next. Among GPUs it may still be on its way: their compute streams wait for it then, and
    /// [`Held::watch`] tells what becomes of it.
    pub(super) fn finish(self, group: &Group) -> Result<Span<f32>, Error> {
        Ok(match self {
            Moving::OnGpus(work) => work?.join()?.into_span(),
            Moving::ByHost(work) => work.wait(Deadline::after(group.timeout()))?.span.into_span(),
            Moving::Nothing(span) => span,
        })
    }
}

impl Held {
    /// None where the model lies on a CPU. What is shared out of it comes and goes by unit from now on.
    pub(super) fn of(units: &[Unit], parameters: &Parameters, sharded: Sharded) -> Option<Held> {
        let device = parameters.values().device();
        device.gpu()?;
        let mut starts = vec![0];
        for unit in units {
            starts.push(starts[starts.len() - 1] + unit.own.len() + unit.rest().len());
        }
        let layout = Layout::new(&[[starts[units.len()]].into()]);
        let runs: Vec<Range<usize>> = units.iter().map(|unit| unit.params.clone()).collect();
        let values = Keep::of(parameters.values(), &runs, &layout, sharded >= Sharded::Parameters);
        let grads = Keep::of(parameters.grads().arena(), &runs, &layout, sharded >= Sharded::Gradients);
        Some(Held { values, grads, starts, gpus: [None, None] })
    }

    /// Finds out how ranks tell each other.
    pub(super) fn meet(
        &mut self,
        config: &FsdpConfig,
        shard: &Group,
        replicas: Option<&Group>,
    ) -> Result<(), Error> {
        let meet = |group: &Group| {
            config.between_gpus.meet("values and gradients", group, self.values.arena.device())
        };
        self.gpus = [meet(shard)?, replicas.map(meet).transpose()?.flatten()];
        Ok(())
    }

    /// What this rank holds of a unit.
    fn parts(&self, units: &[Unit], unit: usize) -> Vec<Part> {
        let (start, unit) = (self.starts[unit], &units[unit]);
        let of = |range: Range<usize>, held: usize, is_rest: bool| {
            let of_model = unit.span.start + range.start..unit.span.start + range.end;
            Part { of_model, held, is_rest }
        };
        let parts = [of(unit.own.clone(), start, false), of(unit.rest(), start + unit.own.len(), true)];
        parts.into_iter().filter(|part| !part.of_model.is_empty()).collect()
    }

    /// What it holds of all units, in order.
    fn all(&self, units: &[Unit]) -> impl Iterator<Item = Part> {
        (0..units.len()).flat_map(|unit| self.parts(units, unit))
    }

    /// Where the gradients lie that this rank holds; without `rests` only those that no other of the shard does.
    fn gradients(&self, units: &[Unit], rests: bool) -> Vec<Range<usize>> {
        let parts = self.all(units).filter(|part| rests || !part.is_rest);
        parts.map(|part| self.grads.place(&part)).collect()
    }

    /// For the optimizer: where what is held lies.
    pub(super) fn for_step(&self, units: &[Unit]) -> Vec<HeldPart> {
        let part = |part: Part| HeldPart {
            value: self.values.place(&part).start,
            grad: self.grads.place(&part).start,
            of_model: part.of_model,
        };
        self.all(units).map(part).collect()
    }

    /// Calls `f` with what is held of these elements of the model: which, and where it lies among values or gradients.
    pub(super) fn overlaps(
        &self,
        units: &[Unit],
        elements: &Range<usize>,
        keep: &Keep,
        mut f: impl FnMut(&Part, Range<usize>),
    ) {
        for Part { of_model, held, is_rest } in self.all(units) {
            let (from, to) = (of_model.start.max(elements.start), of_model.end.min(elements.end));
            if from < to {
                let part = Part { of_model: from..to, held: held + from - of_model.start, is_rest };
                f(&part, keep.place(&part));
            }
        }
    }

    /// What this rank holds of a unit's values, one part after the other.
    pub(super) fn values_of(&self, units: &[Unit], unit: usize) -> Vec<f32> {
        let mut values = vec![0.0; self.starts[unit + 1] - self.starts[unit]];
        let mut left = &mut values[..];
        for part in self.parts(units, unit) {
            let into = left.split_off_mut(..part.of_model.len()).expect("as many as there are");
            self.values.arena.read_elements(self.values.place(&part), into);
        }
        values
    }

    /// Multiplies the gradients that are held, and says whether all are finite then.
    pub(super) fn unscale(&self, units: &[Unit], by: f32) -> bool {
        let ranges = self.gradients(units, true);
        self.grads.arena.scale_in(&ranges, by);
        self.grads.arena.is_finite_in(&ranges)
    }

    /// Cuts them; the first rank counts what all hold. Gives their norm, if that is limited.
    pub(super) fn clip(&self, units: &[Unit], clip: &Clip, shard: &Group) -> Result<Option<f64>, Error> {
        let (arena, all) = (&self.grads.arena, self.gradients(units, true));
        if let Some(limit) = clip.value {
            arena.clip_value_in(&all, limit as f32);
        }
        if clip.norm.is_none() {
            return Ok(None);
        }
        let mut squares = [arena.sum_of_squares(&self.gradients(units, shard.rank() == Rank(0)))];
        shard.all_reduce(&mut squares, ReduceOp::Sum)?;
        let norm = squares[0].sqrt();
        if let Some(factor) = clip.factor(norm) {
            arena.scale_in(&all, factor);
        }
        Ok(Some(norm))
    }

    /// Takes over what is held of a unit's values.
    pub(super) fn keep_values(&self, units: &[Unit], unit: usize, span: &Span<f32>) {
        self.values.keep(&self.parts(units, unit), &units[unit], span);
    }

    /// Gives a unit's values back, if they have memory of their own.
    pub(super) fn leave_values(&self, span: &mut Span<f32>) {
        self.values.leave(span);
    }

    /// Takes over what is held of a unit's gradients, which are summed, and gives their memory back. True where that left nothing of
    /// them in their place.
    pub(super) fn keep_sums(&self, units: &[Unit], unit: usize, mut span: Span<f32>) -> bool {
        self.grads.keep(&self.parts(units, unit), &units[unit], &span);
        self.grads.leave(&mut span)
    }

    /// Has a unit that is away, or whose values are older ones, come.
    pub(super) fn gather(&self, units: &[Unit], unit: usize, mut span: Span<f32>, group: &Group) -> Moving {
        if self.values.is_apart {
            let held = self.values.arena.flat_mut::<f32>();
            for part in self.parts(units, unit) {
                span.copy_from(part.of(&units[unit]).start, &held, self.values.place(&part));
            }
        }
        self.start(
            units,
            unit,
            span,
            |gpus, span| gpus.start_all_gather(span),
            |piece| group.start_all_gather(piece),
        )
    }

    /// Has a unit's gradients be summed.
    pub(super) fn sum(&self, units: &[Unit], unit: usize, span: Span<f32>, group: &Group) -> Moving {
        self.start(
            units,
            unit,
            span,
            |gpus, span| gpus.start_reduce_scatter(span, ReduceOp::Sum),
            |piece| group.start_reduce_scatter(piece, ReduceOp::Sum),
        )
    }

    fn start(
        &self,
        units: &[Unit],
        unit: usize,
        span: Span<f32>,
        among_gpus: impl FnOnce(&GpuGroup, GpuSpan<f32>) -> Result<GpuWork<GpuSpan<f32>>, phalanx_comm::Error>,
        by_host: impl FnOnce(Piece<HostSpan<f32>>) -> Work<Piece<HostSpan<f32>>>,
    ) -> Moving {
        let shared_out = units[unit].shared_out.clone();
        if shared_out.is_empty() {
            return Moving::Nothing(span);
        }
        match &self.gpus[0] {
            Some(gpus) => {
                let span = span.on_gpu().expect("the model lies on a GPU");
                Moving::OnGpus(among_gpus(gpus, span.lending(shared_out)))
            }
            None => Moving::ByHost(by_host(Piece { span: span.on_host(), range: shared_out })),
        }
    }

    /// Adds up over `replicas`, who hold the same, and of what all ranks hold over the `shard`.
    pub(super) fn finish_sums(
        &self,
        units: &[Unit],
        shard: &Group,
        replicas: Option<&Group>,
    ) -> Result<(), Error> {
        let arena = &self.grads.arena;
        let sum_over = |replicas: &Group, params: Range<usize>| -> Result<(), Error> {
            let span = arena.range_mut::<f32>(params);
            match &self.gpus[1] {
                Some(gpus) => {
                    let span = span.on_gpu().expect("the model lies on a GPU");
                    gpus.start_all_reduce(span, ReduceOp::Sum)?.join()?;
                }
                None => {
                    // Nobody reads what may never come.
                    self.watch(SUMS, shard)?;
                    replicas.all_reduce(&mut span.on_host()[..], ReduceOp::Sum)?;
                }
            }
            Ok(())
        };
        match replicas {
            Some(replicas) if self.grads.is_apart => sum_over(replicas, 0..1)?,
            Some(replicas) => {
                let filled = units.iter().filter(|unit| !unit.span.is_empty());
                filled.map(|unit| unit.params.clone()).try_for_each(|params| sum_over(replicas, params))?;
            }
            None => {}
        }
        self.watch(SUMS, shard)?;
        let rests: Vec<Range<usize>> =
            self.all(units).filter(|part| part.is_rest).map(|part| self.grads.place(&part)).collect();
        if !rests.is_empty() {
            let mut all = vec![0.0; rests.iter().map(Range::len).sum()];
            let each = |all: &mut [f32], f: &mut dyn FnMut(Range<usize>, &mut [f32])| {
                let mut left = all;
                for rest in &rests {
                    f(rest.clone(), left.split_off_mut(..rest.len()).expect("as many as there are"));
                }
            };
            each(&mut all, &mut |rest, into| arena.read_elements(rest, into));
            shard.all_reduce(&mut all, ReduceOp::Sum)?;
            each(&mut all, &mut |rest, sums| arena.write_elements(rest, sums));
        }
        Ok(())
    }

    /// Waits until this rank's GPU has done all that it was given, of which operations among GPUs may be a part: fails where these do.
    /// Nobody waits where there are none.
    pub(super) fn watch(&self, what: &str, group: &Group) -> Result<(), Error> {
        match self.gpus.iter().flatten().next() {
            Some(gpus) => Ok(gpus.watch(what, Deadline::after(group.timeout()))?),
            None => Ok(()),
        }
    }

    /// Ends what ranks tell each other from GPU to GPU.
    pub(super) fn abort(&self, because: &str) {
        self.gpus.iter().flatten().for_each(|gpus| gpus.abort(because));
    }
}

/// What is waited for at the end of a step.
const SUMS: &str = "the sums of gradients";
