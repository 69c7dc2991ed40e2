//! Model parallel over ranks: each replica of the model lies on several of them, as stages of a pipeline, as parts of every matrix,
//! or both, and replicas are brought together by DDP or FSDP. Who holds what is told by a [`Mesh`].
//!
//! Along its axis [`Axis::Context`] ranks hold the same and have a stretch of each sequence: a rank computes its positions alone, and is
//! given all positions' keys and values where they are looked at. As each loss is a mean over as many positions, what ranks come
//! to is brought together as that of replicas is, of which each counts for its part.
//!
//! A rank has a model of its own, which is its part of the whole one, with parameters of its own, and in these an inner strategy trains
//! it beside the ranks of other replicas that hold the same part. The parameters that the trainer knows are the whole model's; they
//! hold values where somebody asks for them ([`Strategy::gather`]: a whole checkpoint, the end), and before the first pass
//! where they held some to begin with, of which each rank takes its part then. Otherwise their memory is given back, and whoever uses
//! them finds out. First values, files and checkpoints are the whole model's, whatever the mesh, and a run may be gone on with on
//! another.
//!
//! Invariants:
//! - **MP-WHOLE**: while the whole values are here, they are those of the parts; while they are away, they are borrowed for writing.
//! - **MP-ONCE**: what several ranks have is counted once: in the norm of gradients on the first of them, in sums over ranks as the
//!   mean over those that take the same samples, or stretches of them.
//! - **MP-TIED**: a parameter that blocks of several stages have is held by each of them, which sum their gradients of it, so that
//!   all make the same step of the same bits.

mod holding;
mod lent;
mod tied;

use crate::agreement::{same_model, told_to_first};
use crate::between_gpus::BetweenGpus;
use crate::ddp::{Ddp, DdpConfig, share_values};
use crate::error::Error;
use crate::evaluation::{EvalPass, Judge, Outputs};
use crate::fsdp::{Fsdp, FsdpConfig};
use crate::local::Pass;
use crate::mesh::{Axis, Bound, Mesh, MeshError};
use crate::pipeline::{RankPipeline, Schedule, ScheduleKind, Shape};
use crate::portion::Portion;
use crate::ranks::Ranks;
use crate::replay::{kept_from_replay, none_is_replayed};
use crate::single::SingleDevice;
use crate::strategy::{Collected, HeldGradient, Here, Place, Strategy, Sync};
use crate::tensor_parallel::{Between, Plan, cross_entropy_in_parts};
use holding::{As, Holder, Holding};
use lent::{Becomes, made_among, runs};
use phalanx_comm::{Group, Rank, ReduceOp, Trail, Via};
use phalanx_nn::optim::{Clip, Optimizer};
use phalanx_nn::{Average, Ctx, Module, NotFinite, Parameters, Shadow};
use phalanx_tensor::{Arena, Device, Later, Span, SumOverBatch, Tensor, Within};
use std::borrow::Cow;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use tied::Tied;

/// How a model lies on the ranks of a run.
#[derive(Clone)]
pub struct ModelParallelConfig {
    /// The sizes of the axes that are used. Those of the replicas are what is left of the ranks; with `sharded` they are shards, unless
    /// an axis says otherwise.
    pub mesh: Vec<(Axis, usize)>,
    /// What these sizes are bound to.
    pub bounds: Vec<Bound>,
    /// Makes the model, of which each rank keeps its part.
    pub model: Arc<dyn Fn() -> Box<dyn Module> + Send + std::marker::Sync>,
    /// How its layers are cut along the axis [`Axis::Tensor`].
    pub plan: Option<Plan>,
    /// How its blocks are cut along the axis [`Axis::Pipeline`].
    pub stages: Option<StagesConfig>,
    /// How the gradients of replicas are brought together.
    pub ddp: DdpConfig,
    /// What ranks that hold the same part of the model share out among themselves.
    pub sharded: Option<FsdpConfig>,
    /// Whether GPUs record passes in one go once, with what NCCL exchanges in them, and replay them; stages make theirs as ever.
    pub replays: bool,
}

/// A pipeline over ranks.
#[derive(Clone, Debug)]
pub struct StagesConfig {
    /// The blocks of each stage of the row; those of one rank count.
    pub blocks: Vec<Range<usize>>,
    /// Which schedule.
    pub kind: ScheduleKind,
    /// Into how many parts each batch is cut.
    pub micro_batches: usize,
}

impl fmt::Debug for ModelParallelConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ModelParallelConfig").field("mesh", &self.mesh).finish_non_exhaustive()
    }
}

impl ModelParallelConfig {
    /// The mesh of so many ranks.
    ///
    /// # Errors
    /// There is none; the message says why, and which is the nearest.
    pub fn mesh(&self, world_size: usize) -> Result<Mesh, MeshError> {
        let mesh = Mesh::fit(&self.mesh, world_size, &self.bounds)?;
        let says = |axis| self.mesh.iter().any(|(said, _)| *said == axis);
        if self.sharded.is_none() || says(Axis::Shard) || says(Axis::Replica) {
            return Ok(mesh);
        }
        let shards = [self.mesh.as_slice(), &[(Axis::Shard, mesh.size(Axis::Replica))]].concat();
        Mesh::fit(&shards, world_size, &self.bounds)
    }

    /// How many parts each rank's samples fall into, each of which a batch norm sees by itself.
    pub fn parts(&self) -> usize {
        self.stages.as_ref().map_or(1, |stages| stages.micro_batches)
    }
}

/// The strategy.
pub struct ModelParallel {
    mesh: Mesh,
    world: Group,
    /// Those that hold a replica together, this rank among them, with what each holds.
    replica: Group,
    holders: Vec<Holder>,
    pipeline: Option<Group>,
    /// Of each neighbour that it tells anything from GPU to GPU, and this rank.
    lanes: Vec<Group>,
    tensor: Option<Ranks>,
    /// Those that have the other stretches of this rank's sequences.
    context: Option<Ranks>,
    /// What this rank's GPU waits for.
    trail: Trail,
    between: Between,
    /// What ranks make of the gradients of what isn't cut, if they aren't the same bits without (T-SAME).
    uncut: Option<Becomes>,
    /// Whether this rank comes to the scores of some classes alone.
    scores_in_parts: bool,
    /// This rank's part.
    model: Box<dyn Module>,
    own: Parameters,
    holding: Holding,
    /// What stages share.
    tied: Option<Tied>,
    /// Trains it, beside those that hold the same part of other replicas.
    inner: Box<dyn Strategy>,
    /// Whether the whole model had values to begin with, of which each rank takes its part.
    begins_whole: bool,
    /// The whole model's values, while they aren't here.
    away: Option<Span<f32>>,
    /// And its buffers.
    whole_buffers: Arena,
    /// Whether the ranks have parted.
    has_parted: bool,
}

impl ModelParallel {
    /// This rank's part of the model whose parameters are `whole`; they have their values, or get them before
    /// [`Strategy::prepare`]. All ranks of `world` must come with the same config. Fails if there is no such mesh, or the model can't
    /// be cut so.
    pub fn new(
        world: &Group,
        whole: &Parameters,
        config: &ModelParallelConfig,
    ) -> Result<ModelParallel, Error> {
        ModelParallel::with_stages_of(Rank(0), world, whole, config)
    }

    /// The same with the stages of this rank, as others may have measured other times: those of one that has a part of a run
    /// that goes on.
    pub fn with_stages_of(
        speaker: Rank,
        world: &Group,
        whole: &Parameters,
        config: &ModelParallelConfig,
    ) -> Result<ModelParallel, Error> {
        let mesh = config.mesh(world.world_size())?;
        let (rank, device) = (world.rank().index(), whole.values().device());
        let at = mesh.coordinates(rank);
        let group = |axes: &[Axis]| -> Result<Option<Group>, Error> {
            let is_used = axes.iter().any(|&axis| mesh.size(axis) > 1);
            Ok(if is_used { Some(mesh.along(world, axes)?) } else { None })
        };
        // Nobody makes gradients of the whole model; on a CPU they take no memory until somebody does.
        if device.gpu().is_some() {
            let mut unused = whole.grads().arena().set_aside::<f32>(0..whole.layout().count());
            unused.give_back(0..unused.count());
        }
        let trail = Trail::default();
        // All ranks come by here in the same order.
        let ranks_along = |axis, what| -> Result<Option<Ranks>, Error> {
            let Some(group) = group(&[axis])? else { return Ok(None) };
            let gpus = config.ddp.between_gpus.meet(what, &group, device, Via::OwnStream)?;
            Ok(Some(Ranks::of(group).on(gpus, &trail)))
        };
        let tensor = ranks_along(Axis::Tensor, "sums of parts")?;
        let context = ranks_along(Axis::Context, "keys and values")?;
        let by_host = tensor.iter().chain(&context).any(|ranks| ranks.gpus().is_none());
        let pipeline = group(&[Axis::Pipeline])?;
        let replica = group(&[Axis::Pipeline, Axis::Tensor])?.unwrap_or_else(Group::solo);
        let same_part = group(&[Axis::Replica, Axis::Shard, Axis::Context])?;
        let (shard, replicas) = (group(&[Axis::Shard, Axis::Context])?, group(&[Axis::Replica])?);
        let mut replays = config.replays && !by_host;
        if config.replays && device.gpu().is_some() {
            let along = [&tensor, &context].into_iter().flatten();
            let over = match config.sharded {
                Some(_) => [&shard, &replicas].into_iter().flatten().count(),
                None => same_part.iter().count(),
            };
            let gpus = along.clone().find_map(Ranks::gpus).map(|gpus| &**gpus);
            let own = by_host.then_some("what ranks tell each other between layers goes by way of the host");
            if let Some(why) = kept_from_replay(world, own, gpus, along.count() + over)? {
                replays = false;
                if !by_host || config.stages.is_none() {
                    none_is_replayed(world, why);
                }
            }
        }
        let n_same = same_part.as_ref().map_or(1, Group::world_size);
        let stage_and_shards = match (&pipeline, &shard, config.sharded) {
            (Some(_), Some(_), Some(_)) => group(&[Axis::Pipeline, Axis::Shard, Axis::Context])?,
            _ => None,
        };

        let mut model = (config.model)();
        let of_axis = |axis| config.plan.as_ref().ok_or(Error::NoPlan { axis });
        let plan = match &tensor {
            Some(ranks) => {
                let plan = of_axis(Axis::Tensor)?;
                plan.apply(&mut model, ranks)?;
                Some(plan)
            }
            None => None,
        };
        if let Some(ranks) = &context {
            of_axis(Axis::Context)?.stretch(&mut model, ranks)?;
        }
        let stages = match (&config.stages, &pipeline) {
            (Some(stages), Some(pipeline)) => {
                let blocks = agreed(world, speaker, &stages.blocks)?;
                let (stages_of_all, ranks) = (blocks.len(), pipeline.world_size());
                if !stages_of_all.is_multiple_of(ranks) {
                    return Err(Error::Stages { stages: stages_of_all, ranks });
                }
                let ends = std::iter::once(0).chain(blocks.iter().map(|blocks| blocks.end));
                let ascend =
                    blocks.iter().zip(ends).all(|(blocks, end)| blocks.start == end && blocks.end >= end);
                if !ascend || blocks.last().map_or(0, |last| last.end) != model.blocks() {
                    let placed = blocks.iter().map(|blocks| format!("{blocks:?}")).collect();
                    return Err(Error::Places { placed, blocks: model.blocks() });
                }
                Some(StagesConfig { blocks, ..stages.clone() })
            }
            (None, Some(_)) => return Err(Error::NoPlan { axis: Axis::Pipeline }),
            (_, None) => None,
        };
        let stage_rank = |block: usize| stages.as_ref().map_or(0, |stages| holder_of(block, stages, &mesh));
        let block_of = |name: &str| if model.blocks() == 1 { 0 } else { model.block_of(name) };
        let holder = |member: usize| {
            let there = mesh.coordinates(member);
            let (stage, part) = (there.along(Axis::Pipeline), there.along(Axis::Tensor));
            let holds = |name: &str| {
                let shares = |block: usize| stage_rank(block) == stage;
                let first = (stage_rank(block_of(name)) == stage).then_some(As::First);
                first.or_else(|| model.shared_by(name).into_iter().any(shares).then_some(As::Copy))
            };
            let cut = |name: &str| plan.and_then(|plan| plan.cut(name, part, mesh.size(Axis::Tensor)));
            // What all ranks along an axis have, the first one speaks for.
            Holder { holding: Holding::of(whole, holds, cut), speaks_for_uncut: part == 0 }
        };
        let holders: Vec<Holder> =
            mesh.group(rank, &[Axis::Pipeline, Axis::Tensor]).into_iter().map(holder).collect();
        let holding = holders[replica.rank().index()].holding.clone();
        let own_stage = at.along(Axis::Pipeline);
        let holds = |block| stage_rank(block) == own_stage;
        let own = Parameters::lay_out_part(&mut model, device, holds, whole.seed());

        let local = match (&stages, &pipeline) {
            (Some(stages), Some(group)) => {
                let StagesConfig { blocks, kind, micro_batches } = stages.clone();
                let ranks = group.world_size();
                let shape = Shape { ranks, chunks: blocks.len() / ranks, micro_batches };
                let schedule = Schedule::new(kind, shape)?;
                let local = RankPipeline::new(group.clone(), schedule, blocks, device.clone());
                Some(local.behind(&trail).between_gpus(config.ddp.between_gpus)?)
            }
            _ => None,
        };
        let lanes = local.iter().flat_map(RankPipeline::lanes).cloned().collect();
        let tied = match (&pipeline, &stage_and_shards) {
            (None, _) => None,
            (Some(pipeline), over) => {
                let (over, shard) = over.as_ref().map_or((pipeline, None), |over| (over, shard.as_ref()));
                Tied::among(over, shard, whole, &holding, &holders, config.ddp.between_gpus)?
            }
        };
        if config.sharded.is_some_and(|sharded| sharded.offload) && shard.is_none() {
            return Err(Error::Offload { why: "no ranks of this mesh share anything out" });
        }
        let inner: Box<dyn Strategy> = match (same_part, shard, config.sharded) {
            (Some(all), Some(shard), Some(sharded)) => {
                let fsdp = Fsdp::hybrid(all, shard, replicas, &*model, &own, sharded)?.behind(&trail);
                Box::new(match local {
                    Some(local) => fsdp.with_local(local),
                    None if replays => fsdp.with_replays(),
                    None => fsdp,
                })
            }
            (Some(all), _, _) => {
                let ddp = Ddp::with(all, config.ddp.clone());
                Box::new(match local {
                    Some(local) => ddp.with_local(local),
                    None if replays => ddp.with_replays_behind(&trail),
                    None => ddp,
                })
            }
            (None, _, _) => {
                let alone = match local {
                    Some(local) => SingleDevice::with_local(local),
                    None if replays => SingleDevice::new().with_replays_behind(&trail),
                    None => SingleDevice::new(),
                };
                Box::new(alone.find_unused(config.ddp.find_unused))
            }
        };
        let between = plan.map_or(Between::Whole, Plan::between);
        let by_nccl = device.gpu().is_some() && config.ddp.between_gpus != BetweenGpus::Host;
        let uncut = match between {
            _ if tensor.is_none() => None,
            Between::Sequence => Some(Becomes::Sum),
            // Two numbers have one sum. Of more NCCL chooses the order, for each rank's replicas by itself.
            Between::Whole => (by_nccl && n_same > 2).then_some(Becomes::First),
        };
        let world = world.clone();
        Ok(ModelParallel {
            mesh,
            world,
            replica,
            holders,
            pipeline,
            lanes,
            tensor,
            context,
            trail,
            between,
            uncut,
            scores_in_parts: plan.is_some_and(Plan::cuts_scores),
            model,
            own,
            holding,
            tied,
            inner,
            begins_whole: false,
            away: None,
            whole_buffers: whole.buffers().clone(),
            has_parted: false,
        })
    }

    /// How the ranks lie.
    pub fn mesh(&self) -> Mesh {
        self.mesh
    }

    /// Takes this rank's part of the whole model's values, if they are here, and gives their memory back (MP-WHOLE).
    fn part_from(&mut self, whole: &Parameters) {
        if self.away.is_some() {
            return;
        }
        self.holding.take(whole, &self.own);
        self.send_away(whole);
    }

    /// Gives the memory of the whole model's values back (MP-WHOLE).
    fn send_away(&mut self, whole: &Parameters) {
        if self.away.is_some() {
            return;
        }
        let mut span = whole.values().set_aside(0..whole.layout().count());
        span.give_back(0..span.count());
        // Casts of them are of no use to the part that this rank trains.
        whole.grads().give_casts_back();
        self.away = Some(span);
    }

    /// Whether this rank is the one of its stage that what isn't cut is counted on (MP-ONCE).
    fn speaks_for_uncut(&self) -> bool {
        self.holders[self.replica.rank().index()].speaks_for_uncut
    }

    /// How many ranks take the same samples, or stretches of them.
    fn alike(&self) -> usize {
        self.replica.world_size() * self.mesh.size(Axis::Context)
    }

    /// Whether this rank is one of those that hold the first replica together.
    fn is_of_first_replica(&self) -> bool {
        self.inner.place().rank == 0
    }

    /// Fails if something did where nothing can fail, and has the others hear of it.
    fn checked<T>(&self, result: Result<T, Error>) -> Result<T, Error> {
        let failure = self.between_layers().find_map(Ranks::take_failure);
        let result = match (result, failure) {
            (Ok(_), Some(failure)) => Err(failure.into()),
            (result, _) => result,
        };
        if let Err(error) = &result {
            self.abort(&error.to_string());
        }
        result
    }

    /// Those that tell each other something in the midst of a pass, between layers.
    fn between_layers(&self) -> impl Iterator<Item = &Ranks> {
        self.tensor.iter().chain(&self.context)
    }

    /// Ends what the ranks that hold a replica together, or compute it together, have under way.
    fn abort(&self, because: &str) {
        self.between_layers().for_each(|ranks| ranks.abort(because));
        self.tied.iter().for_each(|tied| tied.abort(because));
        self.groups().for_each(|group| group.abort(because));
        self.trail.give_up(because);
    }

    /// Those of the ranks that hold a replica together.
    fn groups(&self) -> impl Iterator<Item = &Group> {
        let groups = [Some(&self.replica), self.pipeline.as_ref()];
        groups.into_iter().flatten().chain(&self.lanes)
    }

    /// This rank's positions of what a pass is given, (B, T, ...): all of them, or its stretch.
    #[track_caller]
    fn own_stretch(&self, given: &Tensor) -> Tensor {
        let Some(context) = &self.context else { return given.clone() };
        let len = context.stretch(given.dim(1));
        given.narrow(1, context.rank() * len, len).contiguous()
    }

    /// Those that come to the scores of some classes each, if ranks do.
    fn classes(&self) -> Option<&Ranks> {
        self.tensor.as_ref().filter(|_| self.scores_in_parts)
    }

    /// A pass over what is `given` as this rank makes it.
    fn own_ctx(&self, ctx: &Ctx, given: &Tensor) -> Ctx {
        let mut ctx = ctx.clone();
        if let Some(ranks) = self.classes().cloned() {
            ctx = ctx.with_classes_in_parts(Arc::new(move |scores: &Tensor, labels: &Tensor, smoothing| {
                cross_entropy_in_parts(&ranks, scores, labels, smoothing)
            }));
        }
        match self.positions(given) {
            Some(positions) => ctx.within(positions),
            None => ctx,
        }
    }

    /// Which positions of what a pass is given this rank has between layers; none where it has all.
    fn positions(&self, given: &Tensor) -> Option<Within> {
        let sequence = self.tensor.as_ref().filter(|_| self.between == Between::Sequence);
        let mut cuts = self.context.iter().chain(sequence).peekable();
        cuts.peek()?;
        let of = given.dim(1);
        let (start, _) = cuts.fold((0, of), |(start, len), ranks| {
            let len = ranks.stretch(len);
            (start + ranks.rank() * len, len)
        });
        Some(Within { dim: 1, start, of })
    }

    /// Makes the gradients of what isn't cut the same bits on all ranks of the tensor group (T-SAME): each has a part of them, of the
    /// stretches of sequences that ranks have there, or has a sum over replicas that was added up in an order of its own.
    fn settle_uncut(&mut self) -> Result<(), Error> {
        let (Some(tensor), Some(becomes)) = (&self.tensor, self.uncut) else { return Ok(()) };
        let uncut = |parameter: usize| self.holding.is_uncut(parameter);
        let numbers = runs((0..self.own.layout().count()).filter(|&own| uncut(own)));
        if let Some(gpus) = tensor.gpus()
            && made_among(gpus, becomes, &self.trail, (&mut *self.inner, &self.own), numbers)?
        {
            return Ok(());
        }
        self.trail.settle()?;
        self.inner.change_gradients(&self.own, &uncut, &mut |all| {
            match becomes {
                Becomes::Sum => tensor.group().all_reduce(all, ReduceOp::Sum)?,
                Becomes::First => tensor.group().broadcast(all, Rank(0))?,
            }
            Ok(())
        })
    }

    /// Brings the whole model's values to `whole`, and its buffers to their places.
    fn gather_into(&self, whole: &mut [f32]) -> Result<(), Error> {
        let (own, buffers) = (&self.own, &self.whole_buffers);
        own.values().with_flat(|flat: &[f32]| self.gather_array(flat, whole))?;
        let mut all = buffers.host_span::<f32>(0..buffers.layout().count());
        own.buffers().with_flat(|flat| self.gather_buffers(flat, &mut all))
    }

    /// Brings the whole of an array, of which this rank's lies as its values do.
    fn gather_array(&self, own: &[f32], whole: &mut [f32]) -> Result<(), Error> {
        let (all, layout) = (self.holding.all(), self.holding.whole());
        self.told_by_each(
            |holder| holder.packed(&all, 0, self.own.layout(), own),
            |holder| holder.len(&all),
            |holder, packed| holder.unpack(&all, packed, layout, whole),
        )
    }

    fn whole_array(&self, own: &[f32]) -> Result<Vec<f32>, Error> {
        let mut whole = vec![0.0; self.holding.whole().len()];
        self.gather_array(own, &mut whole)?;
        Ok(whole)
    }

    /// Of an array, what this rank asks for: `asked` are the parameters that each rank of the replica does. `own` has its own
    /// parameters `held` alone.
    fn bring(&self, asked: &[Range<usize>], held: &Range<usize>, own: &[f32]) -> Result<Vec<f32>, Error> {
        let rank = self.replica.rank().index();
        let layout = self.own.layout().part(held.clone());
        let wanted = &asked[rank];
        let wanted_layout = self.holding.whole().part(wanted.clone());
        let mut brought = vec![0.0; wanted_layout.len()];
        for (to, asked) in asked.iter().enumerate() {
            let packed = self.holders[rank].packed(asked, held.start, &layout, own);
            if to != rank {
                if !packed.is_empty() {
                    self.replica.send(&packed, Rank(to as u32))?;
                }
                continue;
            }
            for (from, holder) in self.holders.iter().enumerate() {
                let mut told = vec![0.0; if from == rank { 0 } else { holder.len(wanted) }];
                if !told.is_empty() {
                    self.replica.receive(&mut told, Rank(from as u32))?;
                }
                let told = if from == rank { &packed } else { &told };
                holder.unpack(wanted, told, &wanted_layout, &mut brought);
            }
        }
        Ok(brought)
    }

    /// Brings numbers that lie as the whole model's buffers do to `whole`; this rank's lie as its own.
    fn gather_buffers(&self, own: &[f32], whole: &mut [f32]) -> Result<(), Error> {
        let (own_layout, layout) = (self.own.buffers().layout(), self.whole_buffers.layout());
        self.told_by_each(
            |holder| holder.packed_buffers(own_layout, own),
            |holder| holder.buffers_len(layout),
            |holder, packed| holder.unpack_buffers(packed, layout, whole),
        )
    }

    /// Of these parameters of its own, which it has all of, a copy.
    fn own_part(&self, beside: &[&Shadow], params: &Range<usize>) -> Collected {
        let span = self.own.layout().span(params.clone());
        let copy = |read: &dyn Fn(Range<usize>, &mut [f32])| {
            let mut copy = vec![0.0; span.len()];
            read(span.clone(), &mut copy);
            copy
        };
        let values = copy(&|span, into| self.own.values().read_elements(span, into));
        let beside = beside.iter().map(|array| copy(&|span, into| array.read_range(span, into)));
        Collected { values, beside: beside.collect() }
    }

    /// What each rank of the replica has, one after the other, as [`Holder::packed`] gives it of this one.
    fn told_by_each(
        &self,
        own: impl FnOnce(&Holder) -> Vec<f32>,
        len: impl Fn(&Holder) -> usize,
        mut take: impl FnMut(&Holder, &[f32]),
    ) -> Result<(), Error> {
        let rank = self.replica.rank().index();
        let mut own = Some(own(&self.holders[rank]));
        for (i, holder) in self.holders.iter().enumerate() {
            let mut packed = if i == rank { own.take().unwrap_or_default() } else { vec![0.0; len(holder)] };
            self.replica.broadcast(&mut packed, Rank(i as u32))?;
            take(holder, &packed);
        }
        Ok(())
    }
}

/// Whose stage a block is in, along the pipeline.
fn holder_of(block: usize, stages: &StagesConfig, mesh: &Mesh) -> usize {
    let stage = stages.blocks.iter().position(|blocks| blocks.contains(&block));
    stage.unwrap_or_else(|| panic!("block {block} is in none of the stages {:?}", stages.blocks))
        % mesh.size(Axis::Pipeline)
}

/// The stages of one rank, as others may have measured other times.
fn agreed(world: &Group, speaker: Rank, blocks: &[Range<usize>]) -> Result<Vec<Range<usize>>, Error> {
    let mut bounds: Vec<u64> =
        blocks.iter().flat_map(|blocks| [blocks.start, blocks.end]).map(|at| at as u64).collect();
    world.broadcast(&mut bounds, speaker)?;
    let (pairs, _) = bounds.as_chunks();
    Ok(pairs.iter().map(|&[start, end]| start as usize..end as usize).collect())
}

impl Strategy for ModelParallel {
    /// Ranks that hold a replica together take the same samples, and so do those that have stretches of them.
    fn place(&self) -> Place {
        let of = self.mesh.size(Axis::Context);
        let Place { rank, world_size } = self.inner.place();
        Place { rank: rank / of, world_size: world_size / of }
    }

    /// First values are functions of what a rank has of them anyway, so nobody needs the whole model for them.
    fn prepare(&mut self, whole: &Parameters) -> Result<(), Error> {
        let mut has_values = [u8::from(whole.has_values())];
        self.world.broadcast(&mut has_values, Rank(0))?;
        if has_values == [0] {
            same_model(&self.world, whole)?;
            self.inner.prepare(&self.own)?;
            self.send_away(whole);
            return Ok(());
        }
        whole.give_first_values();
        self.begins_whole = true;
        self.prepare_alike(whole)?;
        share_values(&self.world, whole)
    }

    fn prepare_alike(&mut self, whole: &Parameters) -> Result<(), Error> {
        same_model(&self.world, whole)?;
        self.inner.prepare_alike(&self.own)
    }

    /// Unless the whole values are here, this rank takes what it holds.
    fn load_one(&mut self, whole: &Parameters, name: &str, values: &[f32]) {
        if self.begins_whole && self.away.is_none() {
            return whole.load_one(name, values);
        }
        self.send_away(whole);
        if let Some(part) = self.holding.part_of_one(whole, name, values) {
            self.inner.load_one(&self.own, name, &part);
        }
    }

    fn begin(&mut self, whole: &Parameters, here: Here) -> Result<(), Error> {
        match here {
            Here::All => self.part_from(whole),
            Here::Portion => self.send_away(whole),
        }
        whole.count_as_given();
        self.inner.begin(&self.own, here)
    }

    /// Parts of a replica are numbered along its pipeline, and along each stage's tensor group.
    fn portion(&self, _: &Parameters) -> Portion {
        let at = self.mesh.coordinates(self.world.rank().index());
        let part = at.along(Axis::Pipeline) * self.mesh.size(Axis::Tensor) + at.along(Axis::Tensor);
        Portion { part, ..self.inner.portion(&self.own) }
    }

    fn part(&mut self, whole: &Parameters, because: Option<&str>) {
        if let Some(because) = because {
            self.abort(because);
            self.world.abort(because);
        }
        if !std::mem::replace(&mut self.has_parted, true) {
            // Before the first pass there may be no others.
            self.part_from(whole);
        }
        self.inner.part(&self.own, because);
        self.away = None;
    }

    fn pass(&mut self, pass: &Pass<'_>) -> Result<f64, Error> {
        self.pass_while(pass, &mut || ())
    }

    fn pass_while(&mut self, pass: &Pass<'_>, meanwhile: &mut dyn FnMut()) -> Result<f64, Error> {
        self.part_from(pass.parameters);
        let own = Pass {
            model: &*self.model,
            parameters: &self.own,
            loss: pass.loss.clone(),
            input: self.own_stretch(&pass.input),
            target: self.own_stretch(&pass.target),
            ctx: self.own_ctx(&pass.ctx, &pass.input),
            // The loss is the mean over this rank's positions, of which each stretch has as many.
            weight: pass.weight / self.mesh.size(Axis::Context) as f64,
            sync: pass.sync,
        };
        // Before anyone reads the loss.
        let (trail, mut settled) = (&self.trail, Ok(()));
        let loss = self.inner.pass_while(&own, &mut || {
            meanwhile();
            settled = trail.settle();
        });
        let mut loss = settled.map_err(Error::from).and(loss);
        // The rank of the last stage has it, the others of the pipeline have 0.
        if let (Ok(loss), Some(pipeline)) = (&mut loss, &self.pipeline) {
            let mut sum = [*loss];
            let told = pipeline.all_reduce(&mut sum, ReduceOp::Sum);
            *loss = sum[0];
            self.checked(told.map_err(Error::from))?;
        }
        self.checked(loss)
    }

    /// Outputs come to the ranks of the last stage, each of which judges what it has of their positions and of their scores; the others of the
    /// pipeline are told.
    fn evaluate(&mut self, pass: &EvalPass<'_>, judge: &Judge<'_>, sums: &mut [f64]) -> Result<(), Error> {
        self.part_from(pass.parameters);
        let own = EvalPass {
            model: &*self.model,
            parameters: &self.own,
            input: self.own_stretch(&pass.input),
            target: self.own_stretch(&pass.target),
            ctx: self.own_ctx(&pass.ctx, &pass.input),
        };
        let (trail, classes) = (&self.trail, self.classes().cloned());
        let judge = |outputs: &Outputs<'_>, sums: &mut [f64]| {
            judge(&outputs.clone().behind(trail).among(classes.as_ref()), sums)
        };
        let mut found = vec![0.0; sums.len()];
        let judged = self.inner.evaluate(&own, &judge, &mut found);
        self.checked(judged)?;
        if let Some(pipeline) = &self.pipeline {
            let told = pipeline.all_reduce(&mut found, ReduceOp::Sum);
            self.checked(told.map_err(Error::from))?;
        }
        sums.iter_mut().zip(found).for_each(|(sum, found)| *sum += found);
        Ok(())
    }

    /// Panics: only [`Strategy::pass`] can make a pass, since the model is this rank's own.
    fn backward(&mut self, _: &Parameters, _: Option<&Tensor>, _: f64, _: Sync) -> Result<(), Error> {
        panic!("ModelParallel::backward: a rank has only a part of the model; call pass")
    }

    fn finish(&mut self, _: &Parameters) -> Result<(), Error> {
        let finished = self.inner.finish(&self.own).and_then(|()| self.settle_uncut());
        let finished = finished.and_then(|()| match &self.tied {
            Some(tied) => tied.sum(&mut *self.inner, &self.own, &self.trail),
            None => Ok(()),
        });
        let finished = finished.and_then(|()| Ok(self.trail.settle()?));
        self.checked(finished)
    }

    fn shared_batch(&self) -> Option<SumOverBatch> {
        self.inner.shared_batch()
    }

    fn own_parameters<'a>(&'a self, _: &'a Parameters) -> &'a Parameters {
        &self.own
    }

    fn first_gradient_not_finite(&self, _: &Parameters) -> Option<NotFinite> {
        self.inner.first_gradient_not_finite(&self.own)
    }

    fn read_held(&self, _: &Parameters, elements: Range<usize>, into: &mut [f32]) {
        self.inner.read_held(&self.own, elements, into);
    }

    fn write_held(&self, _: &Parameters, elements: Range<usize>, values: &[f32]) {
        self.inner.write_held(&self.own, elements, values);
    }

    /// The parameters are this rank's own.
    fn each_gradient(
        &mut self,
        _: &Parameters,
        of: &dyn Fn(usize) -> bool,
        each: &mut dyn FnMut(HeldGradient<'_>),
    ) {
        let (speaks, holding) = (self.speaks_for_uncut(), &self.holding);
        self.inner.each_gradient(&self.own, of, &mut |held| {
            let speaks = speaks || !holding.is_uncut(held.parameter);
            let counts = held.counts && speaks && !holding.is_copy(held.parameter);
            each(HeldGradient { counts, ..held });
        });
    }

    fn multiply_gradients(&mut self, _: &Parameters, by: f32) {
        self.inner.multiply_gradients(&self.own, by);
    }

    fn unscale(&mut self, _: &Parameters, scale: f64) -> Result<bool, Error> {
        let is_finite = self.inner.unscale(&self.own, scale)?;
        // Other ranks of the replica have other gradients.
        Ok(!self.any(!is_finite)?)
    }

    fn clip(&mut self, clip: &Clip, _: &Parameters, _: &mut Optimizer) -> Result<Option<Later>, Error> {
        if *clip == Clip::default() {
            return Ok(None);
        }
        let (speaks, holding) = (self.speaks_for_uncut(), &self.holding);
        let counts =
            |parameter: usize| (speaks || !holding.is_uncut(parameter)) && !holding.is_copy(parameter);
        let mut squares = [self.inner.cut_gradients(&self.own, clip, &counts)];
        if clip.norm.is_none() {
            return Ok(None);
        }
        self.world.all_reduce(&mut squares, ReduceOp::Sum)?;
        let norm = squares[0].sqrt();
        if let Some(factor) = clip.factor(norm) {
            self.inner.multiply_gradients(&self.own, factor);
        }
        Ok(Some(Later::here(norm)))
    }

    fn step(
        &mut self,
        optimizer: &mut Optimizer,
        _: &Parameters,
        device: &Device,
        factor: f64,
    ) -> Result<(), Error> {
        self.inner.step(optimizer, &self.own, device, factor)
    }

    fn is_sharded(&self) -> bool {
        true
    }

    fn gather(&mut self) -> Result<(), Error> {
        let Some(mut span) = self.away.take() else { return Ok(()) };
        let gathered = self.inner.gather().and_then(|()| match self.whole_buffers.device().gpu() {
            None => self.gather_into(&mut span),
            // They come together on the host.
            Some(_) => {
                let mut all = vec![0.0; span.count()];
                self.gather_into(&mut all).map(|()| span.write(&all))
            }
        });
        // With its borrow given back, everyone sees it.
        if gathered.is_err() {
            self.away = Some(span);
        }
        gathered
    }

    fn whole_state(&mut self, optimizer: &Optimizer) -> Result<Option<Vec<Vec<f32>>>, Error> {
        let inner = self.inner.whole_state(optimizer)?;
        let own = inner
            .unwrap_or_else(|| optimizer.state().map(|(_, state)| state.with(<[f32]>::to_vec)).collect());
        let own = own.iter().filter(|_| self.is_of_first_replica());
        own.map(|array| self.whole_array(array)).collect::<Result<_, _>>().map(Some)
    }

    fn mean(&mut self, whole: &Parameters) -> Average {
        // Who has parted has its part, and nothing else that means anything.
        if self.begins_whole && self.away.is_none() && !self.has_parted {
            self.holding.take(whole, &self.own);
        }
        self.inner.mean(&self.own)
    }

    fn follow(&mut self, _: &Parameters, mean: &mut Average, decay: f64) {
        self.inner.follow(&self.own, mean, decay);
    }

    fn swap(&mut self, _: &Parameters, mean: &mut Average) {
        self.inner.swap(&self.own, mean);
    }

    fn exchange(&mut self, whole: &Parameters, mean: &mut Average) -> Result<(), Error> {
        self.part_from(whole);
        self.inner.exchange(&self.own, mean)
    }

    fn whole_mean(&mut self, mean: &Average) -> Result<Option<Average>, Error> {
        let inner = self.inner.whole_mean(mean)?;
        if !self.is_of_first_replica() {
            return Ok(inner);
        }
        let own = inner.as_ref().unwrap_or(mean);
        let values = own.values().with(|values| self.whole_array(values))?;
        let buffers = own.buffers().with(|own| self.whole_buffers(own))?;
        Ok(Some(Average::of_arrays(values, buffers)))
    }

    fn whole_buffers(&mut self, own: &[f32]) -> Result<Vec<f32>, Error> {
        let mut whole = vec![0.0; self.whole_buffers.layout().len()];
        self.gather_buffers(own, &mut whole)?;
        Ok(whole)
    }

    /// Neighbouring shares are those of a replica's ranks, so that what all of them ask for is brought together once from the ranks
    /// that share out each part.
    fn collect(
        &mut self,
        _: &Parameters,
        beside: &[&Shadow],
        params: Range<usize>,
    ) -> Result<Option<Collected>, Error> {
        let mut asked = vec![[0u64; 2]; self.replica.world_size()];
        let own = [params.start as u64, params.end as u64];
        self.replica.all_gather(&own, asked.as_flattened_mut())?;
        let asked: Vec<_> = asked.iter().map(|&[start, end]| start as usize..end as usize).collect();
        let some = asked.iter().filter(|asked| !asked.is_empty());
        let start = some.clone().map(|asked| asked.start).min().unwrap_or(0);
        let held = self.holding.own_in(&(start..some.map(|asked| asked.end).max().unwrap_or(0)));
        let collected = match self.inner.collect(&self.own, beside, held.clone())? {
            Some(collected) => collected,
            None => self.own_part(beside, &held),
        };
        let values = self.bring(&asked, &held, &collected.values)?;
        let arrays = collected.beside.iter().map(|array| self.bring(&asked, &held, array));
        Ok(Some(Collected { values, beside: arrays.collect::<Result<_, _>>()? }))
    }

    fn writes(&self) -> Option<Place> {
        let (inner, replica) = (self.inner.place(), &self.replica);
        let rank = inner.rank * replica.world_size() + replica.rank().index();
        Some(Place { rank, world_size: inner.world_size * replica.world_size() })
    }

    fn report(&mut self, own: Vec<u8>) -> Result<Vec<Vec<u8>>, Error> {
        told_to_first(&self.world, own)
    }

    fn part_of<'v>(&self, whole: &Parameters, name: &str, values: &'v [f32]) -> Option<Cow<'v, [f32]>> {
        self.holding.part_of_one(whole, name, values)
    }

    fn held(&self) -> Option<Vec<Range<usize>>> {
        self.inner.held()
    }

    /// Each of the ranks that take the same samples has the same of them, and each may know something of its own.
    fn sum(&mut self, numbers: &mut [f64]) -> Result<(), Error> {
        self.world.all_reduce(numbers, ReduceOp::Sum)?;
        let alike = self.alike() as f64;
        numbers.iter_mut().for_each(|number| *number /= alike);
        Ok(())
    }
}
