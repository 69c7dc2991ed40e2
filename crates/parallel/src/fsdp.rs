//! Fully sharded data parallel: each rank takes its share of the samples, as with [`crate::Ddp`], and holds only a part of what
//! belongs to the parameters. What of it is shared out is said by [`Sharded`], which are the three stages of ZeRO (Rajbhandari et
//! al., <https://arxiv.org/abs/1910.02054>).
//!
//! Nothing moves for it. Values and gradients lie in their arenas under the addresses that they always have; the elements of
//! a unit, which is a few neighbouring blocks, are cut into an equal part for each rank, and a rank that doesn't need a unit leaves
//! the pages of all parts but its own to the unit that is next, or gives them back to the system. A gather brings the others'
//! parts to their old places, in the middle of a tensor if need be. The optimizer's state is as long as the rank's parts together.
//!
//! With parameters sharded, a pass goes from unit to unit, each with a graph of its own, as a pipeline's stages do: a unit is
//! gathered, used and given back, forward, and once more backward, where its gradients are then summed, each part on the rank that
//! holds it. While one unit computes, the next one is under way. A GPU has no pages to give back: there each unit has memory of its own,
//! and what a rank holds lies beside it (`held.rs`). A rank that makes its passes in another way, as a stage of a
//! pipeline does ([`Fsdp::with_local`]), has all units from the first pass of a step to the end of the last.
//!
//! Invariants:
//! - **Z-HELD**: what of a unit isn't whole on this rank, its float32 values or their casts, is borrowed for writing, so whoever
//!   would compute with it panics.
//! - **Z-ORDER**: all ranks call for units, and have them summed, in one order, whether they have samples or not.
//! - **Z-WATCH**: among GPUs nobody waits for a gather or a sum but their compute streams; before the host waits for anything that lies
//!   behind one, it waits for that one with a deadline (`Held::watch`), and so finds a rank that is lost. So that it doesn't come to
//!   wait for room in a queue, it is never more than a few units ahead of its GPU (`Store::keep_pace`).
//! - **Z-OWN**: between two steps each rank holds the newest values, and the whole sum of the gradients, of its parts; of the
//!   few elements of a unit that can't be shared out evenly every rank does.

mod halves;
mod held;
mod mean;
mod pass;
mod store;
mod units;

use crate::agreement::{same_model, told_to_first};
use crate::between_gpus::BetweenGpus;
use crate::ddp::{share_buffers, share_gradients};
use crate::error::Error;
use crate::evaluation::{EvalPass, Judge};
use crate::local::{Local, Pass};
use crate::portion::Portion;
use crate::replay::{Replays, kept_from_replay, none_is_replayed};
use crate::single::{Nobody, begin};
use crate::strategy::{Collected, HeldGradient, Here, Place, Strategy, Sync, cut_each, multiply_each};
use held::{Held, Moving};
use phalanx_comm::{Deadline, Group, Rank, ReduceOp, Trail, Work};
use phalanx_nn::optim::{Clip, Optimizer, Part};
use phalanx_nn::{Average, Module, NotFinite, Parameters, Shadow};
use phalanx_tensor::{Device, GpuSpan, Later, Span, Tensor};
use std::collections::VecDeque;
use std::ops::Range;
use store::{For, Piece, Store, keep_own, make_room};
use units::{Unit, units};

/// What is shared out among ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Sharded {
    /// The optimizer's state: ZeRO's stage 1.
    States,
    /// And gradients: stage 2.
    Gradients,
    /// And values: stage 3, which PyTorch calls fully sharded.
    Parameters,
}

/// How [`Fsdp`] works.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FsdpConfig {
    /// What is shared out. Default: everything.
    pub sharded: Sharded,
    /// The fewest bytes of parameters that are gathered at a time. Smaller units need less memory, larger ones fewer messages.
    /// Default 1 MiB.
    pub unit_bytes: usize,
    /// How values and gradients come from one GPU to another. Default: [`BetweenGpus::Best`].
    pub between_gpus: BetweenGpus,
    /// Whether values, gradients and the optimizer's state that a rank with a GPU holds of [`Sharded::Parameters`] lie in the host's
    /// memory, where the optimizer moves them: the GPU has little more than a few units at a time. Default: no.
    pub offload: bool,
}

impl Default for FsdpConfig {
    fn default() -> FsdpConfig {
        FsdpConfig {
            sharded: Sharded::Parameters,
            unit_bytes: 1 << 20,
            between_gpus: BetweenGpus::Best,
            offload: false,
        }
    }
}

/// The strategy.
///
/// ```
/// use phalanx_comm::Group;
/// use phalanx_nn::optim::{Adam, Optimizer};
/// use phalanx_nn::{Ctx, Linear, Loss, Parameters, Relu, Sequential};
/// use phalanx_parallel::{Fsdp, FsdpConfig, Pass, Strategy, Sync};
/// use phalanx_tensor::{DType, Device, Tensor};
///
/// std::thread::scope(|scope| {
///     for group in Group::threads(2) {
///         scope.spawn(move || {
///             let device = Device::cpu(1);
///             let mut model = Sequential::new().then(Linear::new(3, 8)).then(Relu).then(Linear::new(8, 1));
///             let parameters = Parameters::build(&mut model, &device, 0);
///             let mut fsdp = Fsdp::new(group, &model, &parameters, FsdpConfig::default()).unwrap();
///             fsdp.prepare(&parameters).unwrap();
///             let mut optimizer = Optimizer::new(Adam::default()).unwrap();
///             let (input, target) = ([4, 3], [4, 1]);
///             let pass = Pass {
///                 model: &model,
///                 parameters: &parameters,
///                 loss: Loss::Mse,
///                 input: Tensor::ones(&device, input, DType::F32),
///                 target: Tensor::ones(&device, target, DType::F32),
///                 ctx: Ctx::eval(),
///                 // This rank has 4 of the 8 samples of the step.
///                 weight: 0.5,
///                 sync: Sync::Now,
///             };
///             fsdp.pass(&pass).unwrap();
///             fsdp.finish(&parameters).unwrap();
///             fsdp.step(&mut optimizer, &parameters, &device, 1.0).unwrap();
///             // Half of the elements are this rank's.
///             let held = optimizer.state().next().unwrap().1.with(<[f32]>::len);
///             assert_eq!(held, parameters.layout().len() / 2);
///         });
///     }
/// });
/// ```
pub struct Fsdp {
    /// All ranks.
    all: Group,
    /// Those that parameters are shared out among.
    shard: Group,
    /// Those that hold the same parts, where there are several of each.
    replicas: Option<Group>,
    config: FsdpConfig,
    units: Vec<Unit>,
    /// Passes that are recorded once and replayed, with their gathers and sums, if they are to be. Before the ranks' GPUs, since a graph
    /// goes before the communicator that it has operations of.
    replays: Option<Replays>,
    store: Store,
    /// Units whose gradients are being summed, in that order.
    summing: VecDeque<(usize, Summing)>,
    /// Those of which this rank's part is summed, with their gradients.
    summed: Vec<(usize, Span<f32>)>,
    /// How many were started in this step; the last unit is the first.
    started: usize,
    adding: bool,
    /// Of which units this rank has its part of the gradients alone.
    parted: Vec<bool>,
    /// Whether this rank has units that others haven't, since they were gathered for it alone.
    has_more: bool,
    /// How a pass is made, if not unit by unit.
    local: Option<Box<dyn Local>>,
}

impl Fsdp {
    /// Shares a model out among all ranks of a group. Fails if its parameters don't come in the order of its blocks, or what it
    /// holds can't be in the host's memory as it is to be.
    pub fn new(
        group: Group,
        model: &dyn Module,
        parameters: &Parameters,
        config: FsdpConfig,
    ) -> Result<Fsdp, Error> {
        Fsdp::hybrid(group.clone(), group, None, model, parameters, config)
    }

    /// Shares a model out among the ranks of `shard`, such as those of a host, of which `all` has several. `replicas` are those
    /// that hold what this one does, one of each `shard`.
    pub fn hybrid(
        all: Group,
        shard: Group,
        replicas: Option<Group>,
        model: &dyn Module,
        parameters: &Parameters,
        config: FsdpConfig,
    ) -> Result<Fsdp, Error> {
        let units = units(model, parameters, &shard, config.unit_bytes)?;
        let held = Held::of(&units, parameters, &config, &all)?;
        let (store, parted) = (Store::of(&units, parameters, held), vec![false; units.len()]);
        Ok(Fsdp {
            all,
            shard,
            replicas,
            config,
            units,
            replays: None,
            store,
            summing: VecDeque::new(),
            summed: Vec::new(),
            started: 0,
            adding: false,
            parted,
            has_more: false,
            local: None,
        })
    }

    /// The same, with passes that `local` makes, for which all units are here.
    pub fn with_local(self, local: impl Local + 'static) -> Fsdp {
        Fsdp { local: Some(Box::new(local)), ..self }
    }

    /// The same with passes that GPUs record once and replay, where NCCL gathers and sums: those over as many samples as the one before,
    /// where gradients are shared out the only one of a step. What can't be recorded is made as ever, and a warning says why.
    pub fn with_replays(self) -> Fsdp {
        let replays = self.store.held.as_ref().map(|held| Replays::behind(&held.trail));
        Fsdp { replays, ..self }
    }

    /// The same on a GPU that waits for others than these, too, which `trail` is told of: before [`Fsdp::with_replays`].
    pub(crate) fn behind(mut self, trail: &Trail) -> Fsdp {
        self.store.held.iter_mut().for_each(|held| held.trail = trail.clone());
        self
    }

    fn is_away_between(&self) -> bool {
        self.config.sharded == Sharded::Parameters
    }

    fn send_all_away(&mut self) {
        (0..self.units.len()).for_each(|unit| self.store.send_away(&self.units, unit));
    }

    /// Has what is here be the same on all ranks again.
    fn take_back(&mut self) {
        if std::mem::take(&mut self.has_more) {
            self.send_all_away();
        }
    }

    /// Starts the sums of all units that are left, from the last on.
    fn sum_rest(&mut self, parameters: &Parameters) -> Result<(), Error> {
        (0..self.units.len() - self.started).rev().try_for_each(|unit| self.start_sum(unit, parameters))
    }

    /// Has a unit's gradients lie in memory that is there, if they are to come: before the first of them does.
    fn make_room_for_gradients(&mut self, unit: usize, parameters: &Parameters) {
        // A GPU's memory comes as zeros.
        if !std::mem::take(&mut self.parted[unit]) || self.store.held.is_some() {
            return;
        }
        let (layout, Unit { params, span: of_unit, .. }) = (parameters.layout(), &self.units[unit]);
        let mut span = parameters.grads().arena().range_mut::<f32>(params.clone());
        make_room(&mut span, &self.units[unit], &mut self.store.spare);
        // What lies between parameters is nobody's gradient, and stays 0: norms are taken over it, too.
        for i in params.clone() {
            span[layout.range(i).end - of_unit.start..layout.span(i..i + 1).end - of_unit.start].fill(0.0);
        }
    }

    /// Starts to sum a unit's gradients; one whose parameters weren't used has zeros. Where gradients are shared out, no more than a few
    /// units have them whole at a time.
    fn start_sum(&mut self, unit: usize, parameters: &Parameters) -> Result<(), Error> {
        debug_assert_eq!(self.units.len() - self.started - 1, unit, "Z-ORDER");
        self.make_room_for_gradients(unit, parameters);
        let Unit { params, shared_out, .. } = &self.units[unit];
        parameters.grads().settle_in(params.clone());
        let span = parameters.grads().arena().range_mut::<f32>(params.clone());
        let summing = match &self.store.held {
            Some(held) => Summing::OnGpu(held.sum(&self.units, unit, span, &self.shard)),
            None => {
                let piece = Piece { span, range: shared_out.clone() };
                Summing::Here(self.shard.start_reduce_scatter(piece, ReduceOp::Sum))
            }
        };
        self.summing.push_back((unit, summing));
        self.started += 1;
        let most = if self.config.sharded >= Sharded::Gradients { MOST_SUMMING } else { usize::MAX };
        while self.summing.len() > most {
            self.finish_sum()?;
        }
        self.store.keep_pace(true)
    }

    /// Returns when the first of the sums that were started is there.
    fn finish_sum(&mut self) -> Result<(), Error> {
        let Some((unit, summing)) = self.summing.pop_front() else { return Ok(()) };
        let mut span = match (summing, &mut self.store.held) {
            (Summing::Here(work), _) => work.wait(Deadline::after(self.shard.timeout()))?.span,
            (Summing::OnGpu(moving), held) => {
                let span = moving.finish(&self.shard)?;
                let held = held.as_mut().expect("what moves on a GPU is held apart");
                self.parted[unit] = held.keep_sums(&self.units, unit, span);
                return held.note();
            }
        };
        if self.config.sharded >= Sharded::Gradients {
            keep_own(&mut span, &self.units[unit], &mut self.store.spare);
            self.parted[unit] = true;
        }
        self.summed.push((unit, span));
        Ok(())
    }

    /// Returns when the sums that were started are there.
    fn finish_sums(&mut self) -> Result<(), Error> {
        while !self.summing.is_empty() {
            self.finish_sum()?;
        }
        if let Some(held) = &mut self.store.held {
            return held.finish_sums(&self.units, [&self.all, &self.shard], self.replicas.as_ref());
        }
        let mut spans = std::mem::take(&mut self.summed);
        self.sum_rests(&mut spans)?;
        let Some(replicas) = &self.replicas else { return Ok(()) };
        for (unit, span) in &mut spans {
            replicas.all_reduce(&mut span[self.units[*unit].own.clone()], ReduceOp::Sum)?;
        }
        Ok(())
    }

    /// Sums what every rank holds.
    fn sum_rests(&self, spans: &mut [(usize, Span<f32>)]) -> Result<(), Error> {
        let rests = |spans: &mut [(usize, Span<f32>)], each: &mut dyn FnMut(&mut f32)| {
            for (unit, span) in spans {
                span[self.units[*unit].rest()].iter_mut().for_each(&mut *each);
            }
        };
        let mut all = Vec::new();
        rests(spans, &mut |grad| all.push(*grad));
        if all.is_empty() {
            return Ok(());
        }
        self.all.all_reduce(&mut all, ReduceOp::Sum)?;
        let mut sums = all.into_iter();
        rests(spans, &mut |grad| *grad = sums.next().expect("as many as there were"));
        Ok(())
    }

    /// Whether what this rank holds counts here: parts, which are one of each replica's, and what can't be shared out, which is every
    /// rank's.
    fn counts(&self) -> [bool; 2] {
        let is_of_first = self.replicas.as_ref().is_none_or(|replicas| replicas.rank() == Rank(0));
        [is_of_first, self.all.rank() == Rank(0)]
    }

    /// All of an array that each rank has what it holds of, on the first rank of the shard.
    fn whole_array(&self, held: &Shadow) -> Result<Vec<f32>, Error> {
        let len = self.units.last().map_or(0, |unit| unit.span.end);
        let (n, is_first) = (self.shard.world_size(), self.shard.rank() == Rank(0));
        let mut whole = vec![0.0; if is_first { len } else { 0 }];
        held.with(|mut held| {
            for Unit { span, shared_out, own, .. } in &self.units {
                let (own, rest) = held.split_at(own.len());
                let mut all = vec![0.0; if is_first { n * own.len() } else { 0 }];
                self.shard.gather(own, &mut all, Rank(0))?;
                let (rest, next) = rest.split_at(span.len() - shared_out.len());
                if is_first {
                    whole[span.start..][..all.len()].copy_from_slice(&all);
                    whole[span.start + shared_out.end..span.end].copy_from_slice(rest);
                }
                held = next;
            }
            Ok(whole)
        })
    }

    /// The spans of all units of an arena, with what this rank holds of each.
    fn held_of<'a>(&'a self, spans: &'a mut [Span<f32>]) -> impl Iterator<Item = (usize, &'a mut [f32])> {
        self.units.iter().zip(spans).flat_map(|(unit, span)| {
            let (shared_out, rest) = span.split_at_mut(unit.shared_out.end);
            let own = &mut shared_out[unit.own.clone()];
            [(unit.span.start + unit.own.start, own), (unit.span.start + unit.shared_out.end, rest)]
        })
    }

    fn gradient_spans(&self, parameters: &Parameters) -> Vec<Span<f32>> {
        let arena = parameters.grads().arena();
        self.units.iter().map(|unit| arena.range_mut(unit.params.clone())).collect()
    }
}

impl Strategy for Fsdp {
    fn place(&self) -> Place {
        Place { rank: self.all.rank().index(), world_size: self.all.world_size() }
    }

    /// Unit by unit, so that a rank has no more of first values than its parts and a unit.
    fn prepare(&mut self, parameters: &Parameters) -> Result<(), Error> {
        self.prepare_alike(parameters)?;
        let (is_first, has_values) = (self.all.rank() == Rank(0), parameters.has_values());
        for unit in 0..self.units.len() {
            let params = self.units[unit].params.clone();
            if is_first && !has_values {
                parameters.give_first_values_of(params.clone());
            }
            if !self.units[unit].span.is_empty() && parameters.values().device().computes() {
                self.all.broadcast(&mut parameters.values().host_span::<f32>(params)[..], Rank(0))?;
            }
            if let Some(held) = &self.store.held {
                let span = parameters.values().set_aside(self.units[unit].params.clone());
                held.keep_values(&self.units, unit, &span);
            }
            if self.is_away_between() {
                self.store.send_away(&self.units, unit);
            }
        }
        if is_first && !has_values {
            parameters.give_first_buffers();
        }
        share_buffers(&self.all, parameters)?;
        parameters.count_as_given();
        Ok(())
    }

    fn prepare_alike(&mut self, parameters: &Parameters) -> Result<(), Error> {
        same_model(&self.all, parameters)?;
        if let Some(held) = &mut self.store.held {
            held.meet(&self.config, &self.shard, self.replicas.as_ref())?;
            if self.replays.is_some() {
                let (own, groups) =
                    (held.never_replayed(&self.shard), 1 + usize::from(self.replicas.is_some()));
                if let Some(why) = kept_from_replay(&self.all, own, held.gpus(), groups)? {
                    self.replays = None;
                    none_is_replayed(&self.all, why);
                }
            }
            return Ok(());
        }
        // Where whole gradients come and go, pages that this process moves from one to the next cost less than ones that others see,
        // which have to be new ones each time, so these sums are made by messages.
        if self.config.sharded < Sharded::Gradients {
            share_gradients(&self.shard, parameters)
        } else {
            Ok(())
        }
    }

    /// Of a parameter that lies in a unit that is away this rank takes what it holds of it.
    fn load_one(&mut self, parameters: &Parameters, name: &str, values: &[f32]) {
        // First ones aren't wanted for the rest: the file has it.
        parameters.count_as_given();
        let Some(i) = parameters.index_of(name) else { return parameters.load_one(name, values) };
        let unit = self.units.iter().position(|unit| unit.params.contains(&i)).expect("units have them all");
        if self.is_away_between() {
            self.store.send_away(&self.units, unit);
        }
        let unit_span = self.units[unit].span.clone();
        if let Some(held) = &self.store.held {
            if self.store.away[unit].is_none() {
                return parameters.load_one(name, values);
            }
            let (at, laid) = (parameters.layout().range(i), parameters.layout().laid(i, values));
            held.overlaps(&self.units, &at, &held.values, |part, place, _| {
                held.values.arena.write_elements(place, &laid[part]);
            });
            return;
        }
        let held = [self.units[unit].own.clone(), self.units[unit].rest()];
        let Some(span) = &mut self.store.away[unit] else { return parameters.load_one(name, values) };
        let layout = parameters.layout();
        let (at, laid) = (layout.range(i), layout.laid(i, values));
        for held in held {
            let held = unit_span.start + held.start..unit_span.start + held.end;
            let (from, to) = (at.start.max(held.start), at.end.min(held.end));
            if from < to {
                span[from - unit_span.start..to - unit_span.start]
                    .copy_from_slice(&laid[from - at.start..to - at.start]);
            }
        }
    }

    fn begin(&mut self, _: &Parameters, here: Here) -> Result<(), Error> {
        if here == Here::All {
            self.store.keep(&self.units);
        }
        match (here, self.config.sharded) {
            (_, Sharded::Parameters) => {
                self.send_all_away();
                Ok(())
            }
            (Here::All, _) => Ok(()),
            (Here::Portion, _) => {
                self.store.call_in(&self.units);
                self.gather()
            }
        }
    }

    fn portion(&self, parameters: &Parameters) -> Portion {
        let elements = self.held().into_iter().flatten().filter(|range| !range.is_empty());
        Portion { part: 0, len: parameters.layout().len(), elements: elements.collect() }
    }

    fn first_gradient_not_finite(&self, parameters: &Parameters) -> Option<NotFinite> {
        let held = self.store.held.as_ref();
        held.map_or_else(
            || parameters.first_gradient_not_finite(),
            |held| held.not_finite(&self.units, parameters),
        )
    }

    fn read_held(&self, parameters: &Parameters, elements: Range<usize>, into: &mut [f32]) {
        match self.store.held.as_ref().filter(|held| held.values.is_apart) {
            None => parameters.values().read_elements(elements, into),
            Some(held) => held.overlaps(&self.units, &elements, &held.values, |at, place, _| {
                held.values.arena.read_elements(place, &mut into[at]);
            }),
        }
    }

    fn write_held(&self, parameters: &Parameters, elements: Range<usize>, values: &[f32]) {
        match self.store.held.as_ref().filter(|held| held.values.is_apart) {
            None => parameters.values().write_elements(elements, values),
            Some(held) => held.overlaps(&self.units, &elements, &held.values, |at, place, _| {
                held.values.arena.write_elements(place, &values[at]);
            }),
        }
    }

    fn part(&mut self, _: &Parameters, because: Option<&str>) {
        if let Some(because) = because {
            let groups = [Some(&self.all), Some(&self.shard), self.replicas.as_ref()];
            groups.into_iter().flatten().for_each(|group| group.abort(because));
            self.store.held.iter().for_each(|held| held.abort(because));
        } else if let Err(error) = self.store.watch(AT_REST, &self.shard) {
            // Whoever is gone by now hasn't come to what was gathered last: nobody is to wait for it.
            self.store.held.iter().for_each(|held| held.abort(&error.to_string()));
        }
        // Whoever comes next may have its memory lie elsewhere, which graphs keep where it is.
        self.replays = None;
        self.summing.clear();
        self.summed.clear();
        self.store.let_go();
        (self.started, self.adding, self.has_more) = (0, false, false);
    }

    fn pass(&mut self, pass: &Pass<'_>) -> Result<f64, Error> {
        match self.local.take() {
            Some(mut local) => {
                let made = self.pass_of_all(pass, &mut *local);
                self.local = Some(local);
                made
            }
            None => self.pass_by_units(pass),
        }
    }

    /// Panics where parameters are shared out: then only [`Strategy::pass`] can make one.
    fn backward(
        &mut self,
        parameters: &Parameters,
        loss: Option<&Tensor>,
        weight: f64,
        sync: Sync,
    ) -> Result<(), Error> {
        assert!(
            self.config.sharded < Sharded::Parameters,
            "Fsdp::backward: a rank has only a part of the parameters at a time; call pass"
        );
        begin(&mut self.adding, parameters);
        (0..self.units.len()).for_each(|unit| self.make_room_for_gradients(unit, parameters));
        if let Some(loss) = loss {
            crate::local::weighted(loss, weight, &mut Nobody);
        }
        if sync == Sync::Now { self.sum_rest(parameters) } else { Ok(()) }
    }

    fn finish(&mut self, parameters: &Parameters) -> Result<(), Error> {
        self.adding = false;
        let summed = self.sum_rest(parameters).and_then(|()| self.finish_sums());
        let summed = summed.and_then(|()| self.store.agree_on_casts(&self.units, &self.all, &self.shard));
        self.started = 0;
        if let Err(error) = &summed {
            self.all.abort(&error.to_string());
            self.shard.abort(&error.to_string());
            self.store.held.iter().for_each(|held| held.abort(&error.to_string()));
        }
        self.summing.clear();
        self.summed.clear();
        self.store.held.iter_mut().for_each(Held::give_up_sums);
        summed?;
        share_buffers(&self.all, parameters)
    }

    fn lend_gradients(
        &mut self,
        parameters: &Parameters,
        params: Range<usize>,
        lend: &mut dyn FnMut(GpuSpan<f32>) -> Result<(), Error>,
    ) -> Result<bool, Error> {
        let Some(held) = &self.store.held else { return Ok(false) };
        let (layout, mut places) = (parameters.layout(), Vec::new());
        held.overlaps(&self.units, &layout.span(params), &held.grads, |_, place, _| places.push(place));
        for place in places {
            let Some(all) = held.grads.arena.flat_mut().on_gpu() else { return Ok(false) };
            lend(all.lending(place))?;
        }
        Ok(true)
    }

    fn each_gradient(
        &mut self,
        parameters: &Parameters,
        of: &dyn Fn(usize) -> bool,
        each: &mut dyn FnMut(HeldGradient<'_>),
    ) {
        let (layout, [counts_part, counts_rest]) = (parameters.layout(), self.counts());
        if let Some(held) = &self.store.held {
            let (arena, mut values) = (&held.grads.arena, Vec::new());
            for parameter in (0..layout.count()).filter(|&i| of(i)) {
                let range = layout.range(parameter);
                held.overlaps(&self.units, &range, &held.grads, |elements, place, is_everywhere| {
                    values.resize(place.len(), 0.0);
                    arena.read_elements(place.clone(), &mut values);
                    let counts = if is_everywhere { counts_rest } else { counts_part };
                    let (start, values) = (elements.start, &mut values[..]);
                    each(HeldGradient { parameter, start, values: &mut *values, is_everywhere, counts });
                    arena.write_elements(place, values);
                });
            }
            return;
        }
        let arena = parameters.grads().arena();
        for unit in self.units.iter().filter(|unit| unit.params.clone().any(of)) {
            let (mut span, start) = (arena.host_span::<f32>(unit.params.clone()), unit.span.start);
            let parts = [(unit.own.clone(), counts_part, false), (unit.rest(), counts_rest, true)];
            for (held, counts, is_everywhere) in parts {
                let held = start + held.start..start + held.end;
                for parameter in unit.params.clone().filter(|&i| of(i)) {
                    let of = layout.range(parameter);
                    let (from, to) = (of.start.max(held.start), of.end.min(held.end));
                    if from < to {
                        let (values, start) = (&mut span[from - start..to - start], from - of.start);
                        each(HeldGradient { parameter, start, values, is_everywhere, counts });
                    }
                }
            }
        }
    }

    fn cut_gradients(&mut self, parameters: &Parameters, clip: &Clip, counts: &dyn Fn(usize) -> bool) -> f64 {
        match &self.store.held {
            Some(held) => held.cut(&self.units, parameters.layout(), clip, (counts, self.counts())),
            None => cut_each(self, parameters, clip, counts),
        }
    }

    fn multiply_gradients(&mut self, parameters: &Parameters, by: f32) {
        match &self.store.held {
            Some(held) => held.multiply(&self.units, by),
            None => multiply_each(self, parameters, by),
        }
    }

    /// Of what this rank holds, which may be well where others' isn't.
    fn unscale(&mut self, parameters: &Parameters, scale: f64) -> Result<bool, Error> {
        let (factor, mut is_finite) = ((1.0 / scale) as f32, true);
        if let Some(held) = &self.store.held {
            let is_finite = held.unscale(&self.units, factor);
            return Ok(!self.any(!is_finite)?);
        }
        for (_, held) in self.held_of(&mut self.gradient_spans(parameters)) {
            held.iter_mut().for_each(|grad| *grad *= factor);
            // Without a branch a number.
            is_finite &= held.iter().fold(true, |all, grad| all & grad.is_finite());
        }
        Ok(!self.any(!is_finite)?)
    }

    fn clip(
        &mut self,
        clip: &Clip,
        parameters: &Parameters,
        _: &mut Optimizer,
    ) -> Result<Option<Later>, Error> {
        if let Some(held) = &self.store.held {
            return Ok(held.clip(&self.units, clip, &self.shard)?.map(Later::here));
        }
        let mut spans = self.gradient_spans(parameters);
        let (mut parts, mut rests) = (Vec::new(), Vec::new());
        for (i, (_, part)) in self.held_of(&mut spans).enumerate() {
            if i % 2 == 0 { parts.push(part) } else { rests.push(part) }
        }
        // What all ranks hold counts on the first.
        let counted = parts.len() + if self.shard.rank() == Rank(0) { rests.len() } else { 0 };
        parts.append(&mut rests);
        let norm = clip.apply_parts(&mut parts, counted, |squares| -> Result<f64, Error> {
            let mut sum = [squares];
            self.shard.all_reduce(&mut sum, ReduceOp::Sum)?;
            Ok(sum[0])
        });
        Ok(norm?.map(Later::here))
    }

    fn step(
        &mut self,
        optimizer: &mut Optimizer,
        parameters: &Parameters,
        device: &Device,
        factor: f64,
    ) -> Result<(), Error> {
        if let Some(held) = &self.store.held {
            held.step(&self.units, optimizer, factor);
            // What is in the units' own memory are the values of before.
            if self.is_away_between() {
                self.send_all_away();
                return Ok(());
            }
            self.store.call_in(&self.units);
            return self.store.wait_for_all(&self.units, &self.shard);
        }
        let mut grads = self.gradient_spans(parameters);
        let away: Vec<_> = self.store.away.iter_mut().map(Option::take).collect();
        let was_here: Vec<bool> = away.iter().map(Option::is_none).collect();
        let values = parameters.values();
        let mut spans: Vec<Span<f32>> = self
            .units
            .iter()
            .zip(away)
            .map(|(unit, away)| away.unwrap_or_else(|| values.range_mut(unit.params.clone())))
            .collect();
        let parts = self.held_of(&mut spans).zip(self.held_of(&mut grads));
        let parts = parts.map(|((at, values), (_, grads))| Part { at, values, grads });
        optimizer.step_parts(device, parts, factor);
        // Where only a part is the newest, the rest has to be called for again.
        self.store.away = spans.into_iter().map(Some).collect();
        if self.config.sharded < Sharded::Parameters {
            return self.gather();
        }
        let spans = self.units.iter().zip(self.store.away.iter_mut().flatten());
        for ((unit, span), _) in spans.zip(was_here).filter(|(_, was_here)| *was_here) {
            keep_own(span, unit, &mut self.store.spare);
        }
        Ok(())
    }

    fn is_sharded(&self) -> bool {
        true
    }

    fn evaluate(&mut self, pass: &EvalPass<'_>, judge: &Judge<'_>, sums: &mut [f64]) -> Result<(), Error> {
        match self.local.take() {
            Some(mut local) => {
                let judged = self.evaluate_with_all(pass, &mut *local, judge, sums);
                self.local = Some(local);
                judged
            }
            None => match self.forward_by_units(pass)? {
                Some(outputs) => judge(&outputs, sums),
                None => Ok(()),
            },
        }
    }

    fn gather(&mut self) -> Result<(), Error> {
        self.take_back();
        self.store.wait_for_all(&self.units, &self.shard)?;
        self.store.watch("a gather of all units", &self.shard)
    }

    fn gather_on_first(&mut self) -> Result<(), Error> {
        self.take_back();
        self.store.watch(AT_REST, &self.shard)?;
        let (n, is_first) = (self.shard.world_size(), self.shard.rank() == Rank(0));
        for (i, (unit, away)) in self.units.iter().zip(&mut self.store.away).enumerate() {
            // What is away is so on all ranks.
            let Some(mut span) = away.take() else { continue };
            let held = self.store.held.as_ref().map(|held| held.values_of(&self.units, i));
            let (own, rest) = match &held {
                Some(held) => held.split_at(unit.own.len()),
                None => (&span[unit.own.clone()], &span[unit.rest()]),
            };
            let mut all = vec![0.0; if is_first { n * own.len() } else { 0 }];
            let gathered = self.shard.gather(own, &mut all, Rank(0));
            if is_first && gathered.is_ok() {
                all.extend_from_slice(rest);
                span.write(&all);
                self.has_more = true;
            } else {
                *away = Some(span);
            }
            gathered?;
        }
        Ok(())
    }

    fn whole_state(&mut self, optimizer: &Optimizer) -> Result<Option<Vec<Vec<f32>>>, Error> {
        self.store.watch(AT_REST, &self.shard)?;
        let arrays = optimizer.state().map(|(_, held)| self.whole_array(held));
        arrays.collect::<Result<_, _>>().map(Some)
    }

    fn mean(&mut self, parameters: &Parameters) -> Average {
        self.mean_of_held(parameters)
    }

    fn follow(&mut self, parameters: &Parameters, mean: &mut Average, decay: f64) {
        self.follow_held(parameters, mean, decay);
    }

    fn swap(&mut self, parameters: &Parameters, mean: &mut Average) {
        self.swap_held(parameters, mean);
    }

    fn exchange(&mut self, parameters: &Parameters, mean: &mut Average) -> Result<(), Error> {
        self.take_back();
        if self.is_away_between() {
            self.send_all_away();
        }
        self.swap_held(parameters, mean);
        self.renew()
    }

    fn whole_mean(&mut self, mean: &Average) -> Result<Option<Average>, Error> {
        self.store.watch(AT_REST, &self.shard)?;
        self.whole_mean_of(mean).map(Some)
    }

    fn collect(
        &mut self,
        parameters: &Parameters,
        beside: &[&Shadow],
        params: Range<usize>,
    ) -> Result<Option<Collected>, Error> {
        self.take_back();
        let wanted = parameters.layout().span(params);
        let mut values = vec![0.0; wanted.len()];
        for (i, unit) in self.units.iter().enumerate() {
            let was_away = self.store.away[i].is_some();
            self.store.wait_for(&self.units, i, &self.shard, For::Values)?;
            self.store.watch("a gather of a unit", &self.shard)?;
            if !unit.span.is_empty() {
                let span = parameters.values().host_span::<f32>(unit.params.clone());
                overlap(&unit.span, &span, &wanted, &mut values);
            }
            if was_away {
                self.store.send_away(&self.units, i);
            }
        }
        let mut arrays = Vec::new();
        for held in beside {
            let mut array = vec![0.0; wanted.len()];
            held.with(|mut held| {
                for Unit { span, shared_out, own, .. } in &self.units {
                    let (part, rest) = held.split_at(own.len());
                    let mut unit = vec![0.0; span.len()];
                    let (all, left) = unit.split_at_mut(shared_out.end);
                    self.shard.all_gather(part, all)?;
                    let (rest, next) = rest.split_at(left.len());
                    left.copy_from_slice(rest);
                    overlap(span, &unit, &wanted, &mut array);
                    held = next;
                }
                Ok::<_, Error>(())
            })?;
            arrays.push(array);
        }
        Ok(Some(Collected { values, beside: arrays }))
    }

    fn held(&self) -> Option<Vec<Range<usize>>> {
        let of_unit = |unit: &Unit| {
            let at = unit.span.start;
            [unit.own.clone(), unit.rest()].map(|range| at + range.start..at + range.end)
        };
        Some(self.units.iter().flat_map(of_unit).collect())
    }

    fn writes(&self) -> Option<Place> {
        Some(self.place())
    }

    fn report(&mut self, own: Vec<u8>) -> Result<Vec<Vec<u8>>, Error> {
        told_to_first(&self.all, own)
    }

    fn sum(&mut self, numbers: &mut [f64]) -> Result<(), Error> {
        Ok(self.all.all_reduce(numbers, ReduceOp::Sum)?)
    }
}

/// What is waited for before the host looks at what lies on a GPU.
const AT_REST: &str = "what a step has left to do";

/// A unit whose gradients are being summed.
enum Summing {
    Here(Work<Piece<Span<f32>>>),
    OnGpu(Moving),
}

/// Units whose gradients are on their way at a time: one more than what the next unit's backward pass can hide.
const MOST_SUMMING: usize = 2;

/// Copies what of a unit's elements, which lie in `unit` of the arena, is wanted.
fn overlap(unit: &Range<usize>, elements: &[f32], wanted: &Range<usize>, into: &mut [f32]) {
    let (first, last) = (unit.start.max(wanted.start), unit.end.min(wanted.end));
    if first < last {
        into[first - wanted.start..last - wanted.start]
            .copy_from_slice(&elements[first - unit.start..last - unit.start]);
    }
}
