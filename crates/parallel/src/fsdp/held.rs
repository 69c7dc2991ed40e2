//! What a rank holds where it computes on a GPU. Memory is given back there in pieces, not in pages: where values are shared out, or
//! gradients, those of a unit have memory of their own, which comes and goes with the unit, and what the rank has for good of all
//! units lies beside them in an arena, one unit after the other. A gather copies the rank's part to the unit's memory and brings
//! the others' there; a sum of gradients is made in the unit's memory, and this rank's part of it copied to the arena. What isn't
//! shared out stays where it is. Either way the optimizer goes over what is held alone.
//!
//! With [`FsdpConfig::offload`] the arenas of what is held are pinned memory of the host, and so is the optimizer's work the host's. The
//! GPU copies by itself, on streams of its own, while it computes with the unit before: values go up for each gather, where products are
//! made in 16 bits as the casts that the host makes of all of them once a step; and sums of gradients go down, whose unit's memory is
//! another's when the next unit's are summed.

use super::FsdpConfig;
use super::Sharded;
use super::halves::Mixed;
use super::store::Piece;
use super::units::{Unit, runs};
use crate::error::Error;
use phalanx_comm::{Deadline, Element as Sent, GpuGroup, GpuWork, Group, Rank, ReduceOp, Trail, Via, Work};
use phalanx_nn::optim::{self, Clip, HeldPart, Optimizer};
use phalanx_nn::{NotFinite, Parameters};
use phalanx_tensor::{Arena, DType, Device, Element, GpuSpan, HostSpan, Layout, Purpose, Span, Transit};
use std::ops::Range;
use std::sync::Arc;

/// What this rank holds of all units.
pub(super) struct Held {
    pub(super) values: Keep,
    pub(super) grads: Keep,
    /// Where that of each unit begins among all that is held, which is how the optimizer's state lies.
    starts: Vec<usize>,
    /// The GPUs of the ranks that parameters are shared out among, if these tell each other from GPU to GPU; those of the ranks that
    /// hold the same.
    gpus: [Option<Arc<GpuGroup>>; 2],
    /// Gathers and sums that the host hasn't seen done yet, and whatever else this rank's GPU waits for.
    pub(super) trail: Trail,
    /// The GPU.
    device: Device,
    /// Of units that come in 16 bits, what is wanted in float32, of all ranks.
    wide: Vec<Option<Arena>>,
    /// With what is held in the host's memory, the casts of its values, once any were wanted.
    casts: Option<Casts>,
    /// A unit's gradients whose sums are on their way to the host.
    falling: Option<Transit<f32>>,
}

/// The casts of all values that a rank holds in the host's memory.
struct Casts {
    arena: Arena,
    /// How often the values had been written when they were made, if they were.
    of: Option<u64>,
}

/// Where values or gradients lie that a rank holds.
pub(super) struct Keep {
    /// The model's, or one of what is held.
    pub(super) arena: Arena,
    /// Whether it is the latter, and units have memory of their own.
    pub(super) is_apart: bool,
}

impl Keep {
    /// What is held of an arena of the model: in `apart`, if there is one.
    fn of(model: &Arena, runs: &[Range<usize>], apart: Option<Arena>) -> Keep {
        let Some(arena) = apart else { return Keep { arena: model.clone(), is_apart: false } };
        model.cut(runs);
        Keep { arena, is_apart: true }
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
    pub(super) held: usize,
    /// Whether all ranks hold them.
    is_rest: bool,
}

impl Part {
    /// The same, counted from the start of their unit.
    fn of(&self, unit: &Unit) -> Range<usize> {
        self.of_model.start - unit.span.start..self.of_model.end - unit.span.start
    }
}

/// What of a unit is gathered, or summed.
pub(super) enum Moving<T: Element = f32> {
    OnGpus(Result<GpuWork<GpuSpan<T>>, phalanx_comm::Error>),
    ByHost(Work<Piece<HostSpan<T>>>),
    /// A unit of which nothing is anybody else's.
    OwnAlone(Transit<T>),
}

impl<T: Element + Sent> Moving<T> {
    /// The span, for whoever works on it next. Among GPUs it may still be on its way: their compute streams wait for it then, and
    /// [`Held::watch`] tells what becomes of it.
    pub(super) fn finish(self, group: &Group) -> Result<Span<T>, Error> {
        Ok(match self {
            Moving::OnGpus(work) => work?.join()?.into_span(),
            Moving::ByHost(work) => work.wait(Deadline::after(group.timeout()))?.span.into_span(),
            Moving::OwnAlone(transit) => transit.into_span(),
        })
    }
}

impl Held {
    /// None where the model lies on a CPU. What is shared out of it comes and goes by unit from now on.
    pub(super) fn of(
        units: &[Unit],
        parameters: &Parameters,
        config: &FsdpConfig,
        all: &Group,
    ) -> Result<Option<Held>, Error> {
        let (device, sharded) = (parameters.values().device(), config.sharded);
        let refuse = |why| Err(Error::Offload { why });
        match (device.gpu(), config.offload) {
            (None, true) => return refuse("the model lies in the host's memory as it is"),
            (None, false) => return Ok(None),
            (Some(_), true) if sharded < Sharded::Parameters => {
                return refuse("parameters aren't shared out");
            }
            (Some(_), _) => {}
        }
        let threads = std::thread::available_parallelism().map_or(1, usize::from) / all.local_world_size();
        let host = config.offload.then(|| Device::cpu(threads.max(1)));
        let mut starts = vec![0];
        for unit in units {
            starts.push(starts[starts.len() - 1] + unit.own.len() + unit.rest().len());
        }
        let layout = Layout::new(&[[starts[units.len()]].into()]);
        let runs = runs(units);
        let arena = |purpose| match &host {
            None => Ok(Arena::new(device, DType::F32, &layout).held_for(purpose)),
            Some(host) => pinned(host, device, DType::F32, &layout),
        };
        let apart = |stage: Sharded, purpose| (sharded >= stage).then_some(purpose).map(arena).transpose();
        // Where there is no memory for either, the model stays as it is.
        let (values, grads) =
            (apart(Sharded::Parameters, Purpose::Values)?, apart(Sharded::Gradients, Purpose::Gradients)?);
        let values = Keep::of(parameters.values(), &runs, values);
        let grads = Keep::of(parameters.grads().arena(), &runs, grads);
        let device = device.clone();
        Ok(Some(Held {
            values,
            grads,
            starts,
            gpus: [None, None],
            trail: Trail::default(),
            device,
            wide: Vec::new(),
            casts: None,
            falling: None,
        }))
    }

    /// Whether what is held lies in the host's memory.
    fn is_offloaded(&self) -> bool {
        self.values.arena.device().gpu().is_none()
    }

    /// Why no pass can be replayed, if none can.
    pub(super) fn never_replayed(&self, shard: &Group) -> Option<&'static str> {
        let reasons = [
            ("values lie in the host's memory", self.is_offloaded()),
            ("each shard is one rank, which has no NCCL", shard.world_size() == 1),
            ("values and gradients go by way of the host, not by NCCL", self.gpus[0].is_none()),
        ];
        reasons.into_iter().find(|(_, is_so)| *is_so).map(|(why, _)| why)
    }

    /// The GPUs of a shard, where they exchange values among themselves.
    pub(super) fn gpus(&self) -> Option<&GpuGroup> {
        self.gpus[0].as_deref()
    }

    /// What lies beside the values of units that a pass reads or writes.
    pub(super) fn arenas_of_passes(&self) -> impl Iterator<Item = &Arena> {
        let values = self.values.is_apart.then_some(&self.values.arena);
        [Some(&self.grads.arena), values].into_iter().chain(self.wide.iter().map(Option::as_ref)).flatten()
    }

    /// One step of what is held.
    pub(super) fn step(&self, units: &[Unit], optimizer: &mut Optimizer, factor: f64) {
        let (values, grads) = (&self.values.arena, &self.grads.arena);
        if !self.is_offloaded() {
            return optimizer.step_held_parts(&self.for_step(units), values, grads, factor);
        }
        let (mut all, grads) = (values.flat_mut::<f32>(), grads.flat::<f32>());
        let mut left = &mut all[..];
        let part = |part: Part| {
            // They lie one behind the other.
            let len = part.of_model.len();
            let values = left.split_off_mut(..len).expect("as many as are held");
            optim::Part { at: part.of_model.start, values, grads: &grads[part.held..part.held + len] }
        };
        optimizer.step_parts(values.device(), self.all(units).map(part), factor);
    }

    /// Finds out how ranks tell each other.
    pub(super) fn meet(
        &mut self,
        config: &FsdpConfig,
        shard: &Group,
        replicas: Option<&Group>,
    ) -> Result<(), Error> {
        let meet = |group: &Group| {
            let gpus =
                config.between_gpus.meet("values and gradients", group, &self.device, Via::CommStream)?;
            Ok::<_, Error>(gpus.map(Arc::new))
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

    /// How many elements are held of all units.
    pub(super) fn count(&self) -> usize {
        self.starts[self.starts.len() - 1]
    }

    /// What it holds of all units, in order.
    pub(super) fn all(&self, units: &[Unit]) -> impl Iterator<Item = Part> {
        (0..units.len()).flat_map(|unit| self.parts(units, unit))
    }

    /// Where the gradients lie that this rank holds; without `rests` only those that no other of the shard does.
    fn gradients(&self, units: &[Unit], rests: bool) -> Vec<Range<usize>> {
        let parts = self.all(units).filter(|part| rests || !part.is_rest);
        parts.map(|part| self.grads.place(&part)).collect()
    }

    /// For the optimizer: where what is held lies.
    fn for_step(&self, units: &[Unit]) -> Vec<HeldPart> {
        let part = |part: Part| HeldPart {
            value: self.values.place(&part).start,
            grad: self.grads.place(&part).start,
            of_model: part.of_model,
        };
        self.all(units).map(part).collect()
    }

    /// Calls `f` with what is held of these elements of the model: which, counted from their first, where it lies among values or
    /// gradients, and whether all ranks hold it.
    pub(super) fn overlaps(
        &self,
        units: &[Unit],
        elements: &Range<usize>,
        keep: &Keep,
        mut f: impl FnMut(Range<usize>, Range<usize>, bool),
    ) {
        for Part { of_model, held, is_rest } in self.all(units) {
            let (from, to) = (of_model.start.max(elements.start), of_model.end.min(elements.end));
            if from < to {
                let part = Part { of_model: from..to, held: held + from - of_model.start, is_rest };
                f(from - elements.start..to - elements.start, keep.place(&part), is_rest);
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

    /// The first of them that is no finite number.
    pub(super) fn not_finite(&self, units: &[Unit], parameters: &Parameters) -> Option<NotFinite> {
        // Mostly there is none, and one pass over all of them tells.
        if self.grads.arena.is_finite_in(&self.gradients(units, true)) {
            return None;
        }
        let (layout, mut values) = (parameters.layout(), Vec::new());
        (0..layout.count()).find_map(|parameter| {
            let elements = layout.range(parameter);
            values.clear();
            values.resize(elements.len(), 0.0);
            self.overlaps(units, &elements, &self.grads, |at, place, _| {
                self.grads.arena.read_elements(place, &mut values[at]);
            });
            parameters.not_finite_in_gradient(parameter, &values)
        })
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

    /// Cuts each gradient that is held as `clip` says; gives the sum of the squares of those of the parameters that `counts` names, if there
    /// is a limit on the norm: of what is shared out, and of what all ranks hold, where these count.
    pub(super) fn cut(
        &self,
        units: &[Unit],
        layout: &Layout,
        clip: &Clip,
        (counts, [parts, rests]): (&dyn Fn(usize) -> bool, [bool; 2]),
    ) -> f64 {
        if let Some(limit) = clip.value {
            self.grads.arena.clip_value_in(&self.gradients(units, true), limit as f32);
        }
        if clip.norm.is_none() {
            return 0.0;
        }
        let mut counted = Vec::new();
        for parameter in (0..layout.count()).filter(|&i| counts(i)) {
            self.overlaps(units, &layout.range(parameter), &self.grads, |_, place, is_rest| {
                counted.extend((if is_rest { rests } else { parts }).then_some(place));
            });
        }
        self.grads.arena.sum_of_squares(&counted)
    }

    /// Multiplies the gradients that are held.
    pub(super) fn multiply(&self, units: &[Unit], by: f32) {
        self.grads.arena.scale_in(&self.gradients(units, true), by);
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
    pub(super) fn keep_sums(&mut self, units: &[Unit], unit: usize, mut span: Span<f32>) -> bool {
        let parts = self.parts(units, unit);
        if self.is_offloaded() {
            // The one before has had the time of a unit to go down.
            self.land();
            let runs: Vec<_> = parts.iter().map(|part| (part.of(&units[unit]), part.held)).collect();
            self.falling = Some(span.go_down(&runs, &self.grads.arena));
            return true;
        }
        self.grads.keep(&parts, &units[unit], &span);
        self.grads.leave(&mut span)
    }

    /// Has the compute stream wait for gradients on their way to the host, and gives their unit's memory back.
    fn land(&mut self) {
        if let Some(transit) = self.falling.take() {
            self.grads.leave(&mut transit.into_span());
        }
    }

    /// Forgets gradients that are on their way.
    pub(super) fn give_up_sums(&mut self) {
        self.falling = None;
    }

    /// The same, and whatever else a pass may have left.
    pub(super) fn let_go(&mut self) {
        self.give_up_sums();
        self.casts = None;
        self.trail.forget();
    }

    /// Notes that the compute stream waits for a gather or a sum from here on.
    pub(super) fn note(&self) -> Result<(), Error> {
        let Some(gpus) = &self.gpus[0] else { return Ok(()) };
        Ok(self.trail.note(gpus, "a gather of a unit")?)
    }

    /// Waits for what was noted but for the last few.
    pub(super) fn keep_pace(&self, are_away: bool) -> Result<(), Error> {
        let Some(gpus) = &self.gpus[0] else { return Ok(()) };
        let most = if are_away { MOST_AHEAD } else { 0 };
        Ok(self.trail.keep(gpus, most)?)
    }

    /// Has a unit that is away, or whose values are older ones, come.
    pub(super) fn gather(&self, units: &[Unit], unit: usize, mut span: Span<f32>, group: &Group) -> Moving {
        if !self.values.is_apart {
            return self.gather_in(span.into(), units[unit].shared_out.clone(), group);
        }
        // The ranks' parts, which this and the gather bring, and what all ranks hold are the whole of it.
        span.renew();
        let runs = self.places(units, unit);
        self.gather_in(self.bring(span, &runs), units[unit].shared_out.clone(), group)
    }

    /// Where the values of a unit that are held lie, each run beside where it begins in the unit.
    fn places(&self, units: &[Unit], unit: usize) -> Vec<(usize, Range<usize>)> {
        let place = |part: &Part| (part.of(&units[unit]).start, self.values.place(part));
        self.parts(units, unit).iter().map(place).collect()
    }

    /// Has elements of a span become some of the values that are held: of each pair those from the first on those of the second.
    fn bring(&self, mut span: Span<f32>, runs: &[(usize, Range<usize>)]) -> Transit<f32> {
        let arena = &self.values.arena;
        if self.is_offloaded() {
            return span.come_up(arena, runs);
        }
        let held = arena.set_aside::<f32>(0..1);
        runs.iter().for_each(|(at, place)| span.copy_from(*at, &held, place.clone()));
        span.into()
    }

    /// Has the casts of a unit, which are away, come, beginning with those of what is held.
    pub(super) fn gather_casts<T: Element + Sent>(
        &mut self,
        units: &[Unit],
        unit: usize,
        mut casts: Span<T>,
        group: &Group,
    ) -> Moving<T> {
        let runs = self.places(units, unit);
        casts.renew();
        let transit = if self.is_offloaded() {
            casts.come_up(self.host_casts::<T>(), &runs)
        } else {
            let held = self.values.arena.set_aside::<f32>(0..1);
            runs.into_iter().for_each(|(at, place)| casts.cast_span(at, &held, place));
            casts.into()
        };
        self.gather_in(transit, units[unit].shared_out.clone(), group)
    }

    /// The casts of all values that are held in the host's memory, as these are now: made by the host, for whom the GPU waits, once a step.
    fn host_casts<T: Element>(&mut self) -> &Arena {
        let (values, casts) =
            (&self.values.arena, self.casts.as_mut().expect("there is room for what was agreed on"));
        if casts.of != Some(values.overwrites()) {
            casts.arena.flat_mut::<T>().cast_from(0, &values.flat::<f32>());
            casts.of = Some(values.overwrites());
        }
        &casts.arena
    }

    /// Makes room for casts to this type, if units come as such, and for what these are wanted in float32 for beside them.
    pub(super) fn expect(&mut self, plan: &[Option<Mixed>], dtype: DType) -> Result<(), Error> {
        if self.is_offloaded() && plan.iter().any(Option::is_some) {
            let values = &self.values.arena;
            let arena = pinned(values.device(), &self.device, dtype, values.layout())?;
            self.casts = Some(Casts { arena, of: None });
        }
        let room = |mixed: &Option<Mixed>| {
            let count = mixed.as_ref().map_or(0, Mixed::wide_count);
            let layout = Layout::new(&[[count].into()]);
            (count > 0).then(|| Arena::new(&self.device, DType::F32, &layout).held_for(Purpose::Values))
        };
        self.wide = plan.iter().map(room).collect();
        Ok(())
    }

    /// Starts to gather what of a unit that comes in 16 bits is wanted in float32, if anything is.
    pub(super) fn gather_wide(
        &self,
        units: &[Unit],
        unit: usize,
        mixed: &Mixed,
        group: &Group,
    ) -> Option<Moving> {
        let span = self.wide[unit].as_ref()?.flat_mut::<f32>();
        let (own, start) = (&units[unit].own, self.starts[unit]);
        let place = |part: Range<usize>| start + part.start - own.start..start + part.end - own.start;
        let runs: Vec<_> = mixed.wide_of(group.rank().index()).map(|(at, part)| (at, place(part))).collect();
        Some(self.gather_in(self.bring(span, &runs), 0..mixed.wide_count(), group))
    }

    /// Puts that, of all ranks, where it belongs, and what all ranks hold.
    pub(super) fn put_wide(
        &self,
        units: &[Unit],
        unit: usize,
        mixed: &Mixed,
        all: Option<&Span<f32>>,
        into: &mut Span<f32>,
    ) {
        for (at, part) in all.iter().flat_map(|_| (0..mixed.ranks()).flat_map(|rank| mixed.wide_of(rank))) {
            let len = part.len();
            all.iter().for_each(|all| into.copy_from(part.start, all, at..at + len));
        }
        for part in self.parts(units, unit).iter().filter(|part| part.is_rest) {
            let held = self.values.arena.set_aside::<f32>(0..1);
            into.copy_from(part.of(&units[unit]).start, &held, self.values.place(part));
        }
    }

    /// Has these elements of a span be gathered, of which each rank has its part.
    pub(super) fn gather_in<T: Element + Sent>(
        &self,
        transit: Transit<T>,
        elements: Range<usize>,
        group: &Group,
    ) -> Moving<T> {
        if group.world_size() == 1 {
            return Moving::OwnAlone(transit);
        }
        let by_host = |piece| group.start_all_gather(piece);
        self.start(transit, elements, |gpus, span| gpus.start_all_gather(span), by_host)
    }

    /// Has a unit's gradients be summed.
    pub(super) fn sum(&self, units: &[Unit], unit: usize, span: Span<f32>, group: &Group) -> Moving {
        if group.world_size() == 1 {
            return Moving::OwnAlone(span.into());
        }
        self.start(
            span.into(),
            units[unit].shared_out.clone(),
            |gpus, span| gpus.start_reduce_scatter(span, ReduceOp::Sum),
            |piece| group.start_reduce_scatter(piece, ReduceOp::Sum),
        )
    }

    fn start<T: Element + Sent>(
        &self,
        transit: Transit<T>,
        elements: Range<usize>,
        among_gpus: impl FnOnce(&GpuGroup, GpuSpan<T>) -> Result<GpuWork<GpuSpan<T>>, phalanx_comm::Error>,
        by_host: impl FnOnce(Piece<HostSpan<T>>) -> Work<Piece<HostSpan<T>>>,
    ) -> Moving<T> {
        if elements.is_empty() {
            return Moving::OwnAlone(transit);
        }
        match &self.gpus[0] {
            Some(gpus) => Moving::OnGpus(among_gpus(gpus, transit.on_gpu().lending(elements))),
            None => match self.trail.settle() {
                Ok(()) => {
                    let span = transit.into_span().on_host();
                    Moving::ByHost(by_host(Piece { span, range: elements }))
                }
                Err(error) => Moving::OnGpus(Err(error)),
            },
        }
    }

    /// Adds up over `replicas`, who hold the same, and of what all ranks of a shard hold over all.
    pub(super) fn finish_sums(
        &mut self,
        units: &[Unit],
        [all_ranks, shard]: [&Group; 2],
        replicas: Option<&Group>,
    ) -> Result<(), Error> {
        // Nobody reads what may never come, and whoever is lost is found by those that wait for him.
        self.land();
        self.watch(SUMS, shard)?;
        let arena = &self.grads.arena;
        let sum_over = |replicas: &Group, params: Range<usize>| -> Result<(), Error> {
            let span = arena.range_mut::<f32>(params);
            match self.gpus[1].as_ref().filter(|_| !self.is_offloaded()) {
                Some(gpus) => {
                    let span = span.on_gpu().expect("the model lies on a GPU");
                    gpus.start_all_reduce(span, ReduceOp::Sum)?.join()?;
                }
                None => replicas.all_reduce(&mut span.on_host()[..], ReduceOp::Sum)?,
            }
            Ok(())
        };
        let rests: Vec<Range<usize>> =
            self.all(units).filter(|part| part.is_rest).map(|part| self.grads.place(&part)).collect();
        let mut sums = vec![0.0; rests.iter().map(Range::len).sum()];
        let each = |sums: &mut [f32], f: &mut dyn FnMut(Range<usize>, &mut [f32])| {
            let mut left = sums;
            for rest in &rests {
                f(rest.clone(), left.split_off_mut(..rest.len()).expect("as many as there are"));
            }
        };
        if !rests.is_empty() {
            each(&mut sums, &mut |rest, into| arena.read_elements(rest, into));
            all_ranks.all_reduce(&mut sums, ReduceOp::Sum)?;
        }
        match replicas {
            Some(replicas) if self.grads.is_apart => sum_over(replicas, 0..1)?,
            Some(replicas) => {
                runs(units)
                    .into_iter()
                    .filter(|run| !run.is_empty())
                    .try_for_each(|run| sum_over(replicas, run))?;
            }
            None => {}
        }
        if let (Some(gpus), Some(replicas)) = (&self.gpus[1], replicas) {
            gpus.watch(SUMS, Deadline::after(replicas.timeout()))?;
        }
        each(&mut sums, &mut |rest, sums| arena.write_elements(rest, sums));
        Ok(())
    }

    /// Waits until this rank's GPU has done all that it was given, of which operations among GPUs may be a part: fails where these do.
    /// Nobody waits where there are none.
    pub(super) fn watch(&self, what: &str, group: &Group) -> Result<(), Error> {
        self.trail.settle()?;
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

/// Memory of the host that the GPU copies by itself.
fn pinned(host: &Device, device: &Device, dtype: DType, layout: &Layout) -> Result<Arena, Error> {
    Arena::pinned(host, device, dtype, layout).map_err(|error| Error::Pinned { error: Box::new(error) })
}

/// Gathers and sums that the host may have put behind it while its GPU waits for them: those of two units.
const MOST_AHEAD: usize = 4;
/// What is waited for at the end of a step.
const SUMS: &str = "the sums of gradients";
