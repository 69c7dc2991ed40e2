//! Distributed data parallel: every rank holds the model, takes its share of the samples, and gradients are summed.
//!
//! Invariants:
//! - **D-ORDER**: all ranks start their buckets in the same order, bucket 0 first, whatever order gradients arrive in. Where statistics of
//!   a batch go by the same group, those of GPUs start behind the pass: when one is in the host's memory is another moment on each rank.
//! - **D-WHOLE**: a bucket is started when each of its gradients is final, and nobody writes it until its work is waited for
//!   (its span holds the write borrow). Between GPUs NCCL sums them where they lie. Where it can't, they come to pinned memory of
//!   the host first, and go back from there when their bucket is dropped, whatever the group does with them in between.
//! - **D-SUM**: ranks contribute gradients of their share of the global mean, so that the sum is the gradient of the mean.
//! - **D-SAME**: after `prepare` and after every `finish` all ranks hold the same gradients and buffers, bit by bit, so that
//!   the same optimizer keeps their values the same. Buffers, which forward passes move apart, are rank 0's, as in PyTorch.
//! - **D-ONCE**: what GPUs exchange behind a step's last pass, the compute stream waits for, and the host once for all of it, in `finish`.
//!   Buffers go no earlier than the pass is done as far as its rank can tell, and never in a graph: so no rank has them from one that
//!   has given its pass up, whose sums may have come all the same.

use crate::agreement::same_model;
use crate::between_gpus::BetweenGpus;
use crate::buckets::buckets;
use crate::error::Error;
use crate::evaluation::{EvalPass, Judge};
use crate::hook::{AllReduce, Bf16, Bucket, Fp16, Hook, Kept, Pending, PowerSgd, PowerSgdConfig};
use crate::local::{Local, Pass, PassLoss, names_of_learned, weighted};
use crate::ranks::Ranks;
use crate::replay::{self, Replays, Way};
use crate::single::{Nobody, begin};
use crate::strategy::{Place, Strategy, Sync, in_one_go};
use phalanx_comm::{Deadline, GpuGroup, GpuWork, Group, Rank, ReduceOp, Trail, Via};
use phalanx_nn::Parameters;
use phalanx_tensor::{Arena, ArenaMark, Device, GpuSpan, GradSink, LeafId, SumOverBatch, Tensor};
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// How [`Ddp`] works.
#[derive(Clone, Debug)]
pub struct DdpConfig {
    /// About how many bytes of gradients travel together. Default 25 MiB.
    pub bucket_bytes: usize,
    /// The same for the bucket that is ready first. Default 1 MiB.
    pub first_bucket_bytes: usize,
    /// Whether a step may leave parameters without a gradient, which then counts as zero. Default no.
    pub find_unused: bool,
    /// Whether batch norms go by the statistics of the whole batch rather than of each rank's part: then any number of ranks
    /// trains as one would. It costs two small all-reduces a batch norm and step. A program that makes its own passes tells each of them
    /// ([`Ctx::sharing`](phalanx_nn::Ctx::sharing) with [`Strategy::shared_batch`]). Default no, as in PyTorch.
    pub sync_batch_norm: bool,
    /// What gradients become on their way. Default nothing else. [`Ddp::with_hook`] goes before it.
    pub compress: Compress,
    /// How gradients of GPUs are summed, and what ranks of a replica exchange travels, and statistics of a batch, which go by the host where
    /// gradients do. Default as is best.
    pub between_gpus: BetweenGpus,
}

/// A compression of gradients.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Compress {
    /// They travel as they are.
    #[default]
    Nothing,
    /// As [`Bf16`].
    Bf16,
    /// As [`Fp16`].
    Fp16,
    /// As [`PowerSgd`], with the defaults for the rest.
    PowerSgd {
        /// As [`PowerSgdConfig::rank`].
        rank: usize,
        /// As [`PowerSgdConfig::start_step`].
        start_step: u64,
    },
}

impl Compress {
    /// Whether each rank keeps something for itself from step to step.
    pub fn keeps(self) -> bool {
        self.hook().keeps()
    }

    fn hook(self) -> Box<dyn Hook> {
        match self {
            Compress::Nothing => Box::new(AllReduce),
            Compress::Bf16 => Box::new(Bf16),
            Compress::Fp16 => Box::new(Fp16),
            Compress::PowerSgd { rank, start_step } => {
                Box::new(PowerSgd::new(PowerSgdConfig { rank, start_step, ..PowerSgdConfig::default() }))
            }
        }
    }
}

impl Default for DdpConfig {
    fn default() -> DdpConfig {
        DdpConfig {
            bucket_bytes: 25 << 20,
            first_bucket_bytes: 1 << 20,
            find_unused: false,
            sync_batch_norm: false,
            compress: Compress::Nothing,
            between_gpus: BetweenGpus::Best,
        }
    }
}

/// The strategy.
pub struct Ddp {
    group: Group,
    config: DdpConfig,
    hook: Box<dyn Hook>,
    /// Whether the hook is to see the gradients, and not only to have them summed.
    is_hooked: bool,
    /// Passes that are recorded once and replayed, their sums among them, if they are to be. Before the ranks' GPUs, since a graph goes
    /// before the communicator that it has operations of.
    replays: Option<Replays>,
    /// What this rank's GPU waits for.
    trail: Trail,
    /// The ranks' GPUs, where gradients go from one to another. None before `prepare`.
    gpus: Option<Arc<GpuGroup>>,
    /// Those of the parameters that it was prepared with. None before `prepare`.
    values: Option<ArenaMark>,
    /// None before `prepare`.
    buckets: Option<Vec<Range<usize>>>,
    adding: bool,
    step: Started,
    shared: Option<Shared>,
    /// How a pass is made, if not in one go.
    local: Option<Box<dyn Local>>,
}

/// Sums over the batch of all ranks, which layers ask for in the midst of a pass.
struct Shared {
    ranks: Ranks,
    sum: SumOverBatch,
    /// Whether a pass was ever given it.
    is_taken: AtomicBool,
}

impl Shared {
    fn over(ranks: Ranks) -> Shared {
        let own = ranks.clone();
        Shared { ranks, sum: Arc::new(move |numbers| own.sum(numbers)), is_taken: AtomicBool::new(false) }
    }
}

/// How far the buckets of a step are.
#[derive(Default)]
struct Started {
    /// Gradients that come to each bucket: those of all its parameters but frozen ones.
    comes: Vec<usize>,
    /// Those that each bucket still lacks.
    lacking: Vec<usize>,
    /// The first bucket that isn't complete, as far as was looked (D-ORDER).
    next: usize,
    /// Complete buckets on their way from a GPU, in order, which the group can't be handed yet. On a CPU none stays here.
    coming: VecDeque<Bucket>,
    /// What finishes those that were started.
    pending: VecDeque<Pending>,
    /// Those that GPUs sum among themselves.
    exchanged: VecDeque<GpuWork<GpuSpan<f32>>>,
    /// Why one couldn't be started.
    failure: Option<phalanx_comm::Error>,
}

impl Started {
    /// The last backward pass of the step begins.
    fn expect(&mut self) {
        self.lacking.clone_from(&self.comes);
        self.next = 0;
    }

    /// Has the compute stream wait for what GPUs sum among themselves.
    fn join(&mut self, gpus: &Arc<GpuGroup>, trail: &Trail) -> Result<(), phalanx_comm::Error> {
        while let Some(work) = self.exchanged.pop_front() {
            trail.join(gpus, work, usize::MAX)?;
        }
        Ok(())
    }

    /// The step is over.
    fn forget(&mut self) {
        self.coming.clear();
        self.pending.clear();
        self.exchanged.clear();
        self.next = 0;
        self.lacking.clear();
    }
}

/// How buckets are summed.
struct Sums<'a> {
    group: &'a Group,
    gpus: Option<&'a GpuGroup>,
    hook: &'a mut dyn Hook,
    /// Whether statistics of a batch go by the group as well.
    is_shared: bool,
}

impl Ddp {
    /// With the default buckets.
    pub fn new(group: Group) -> Ddp {
        Ddp::with(group, DdpConfig::default())
    }

    /// With other settings.
    pub fn with(group: Group, config: DdpConfig) -> Ddp {
        let shared = config.sync_batch_norm.then(|| Shared::over(Ranks::of(group.clone())));
        let (hook, is_hooked) = (config.compress.hook(), config.compress != Compress::Nothing);
        Ddp {
            group,
            config,
            hook,
            is_hooked,
            replays: None,
            trail: Trail::default(),
            gpus: None,
            values: None,
            buckets: None,
            adding: false,
            step: Started::default(),
            shared,
            local: None,
        }
    }

    /// The same, with buckets summed by `hook`.
    pub fn with_hook(self, hook: impl Hook + 'static) -> Ddp {
        Ddp { hook: Box::new(hook), is_hooked: true, ..self }
    }

    /// The same, with passes that `local` makes. It takes no statistics over the batch of all ranks
    /// ([`DdpConfig::sync_batch_norm`]).
    pub fn with_local(self, local: impl Local + 'static) -> Ddp {
        Ddp { local: Some(Box::new(local)), ..self }
    }

    /// The same with passes in one go that GPUs record once and replay, where NCCL sums their gradients: those over as many samples as
    /// the one before. What can't be recorded is made as ever, and a warning says why.
    pub fn with_replays(self) -> Ddp {
        let trail = self.trail.clone();
        self.with_replays_behind(&trail)
    }

    /// The same on a GPU that waits for others than these, too, of which `trail` is told.
    pub(crate) fn with_replays_behind(self, trail: &Trail) -> Ddp {
        Ddp { replays: Some(Replays::behind(trail)), trail: trail.clone(), ..self }
    }

    /// Why no pass can be replayed, if none can.
    fn never_replayed(&self) -> Option<&'static str> {
        let reasons = [
            ("they are made in parts", self.local.is_some()),
            ("gradients that are compressed, or summed by a hook, go by way of the host", self.is_hooked),
            ("gradients go by way of the host, not by NCCL", self.gpus.is_none()),
            // One rank would record its sums, and another that lacks a gradient not.
            (
                "a step may leave parameters without a gradient (parallel.find_unused)",
                self.config.find_unused,
            ),
        ];
        reasons.into_iter().find(|(_, is_so)| *is_so).map(|(why, _)| why)
    }

    /// Makes a pass of a step as a recorded one, or one that may come to be, where that can be.
    fn replayed(&mut self, pass: &Pass<'_>, meanwhile: &mut dyn FnMut()) -> Option<Result<f64, Error>> {
        if pass.samples() == 0 {
            return None;
        }
        self.check_finished();
        let Ddp { step, buckets, group, gpus, replays, hook, adding, shared, .. } = self;
        let (gpus, replays) = (gpus.as_ref()?, replays.as_mut()?);
        begin(adding, pass.parameters);
        let shared = shared.as_ref().map(|shared| &shared.sum);
        let mut summed =
            Summed { step, buckets: prepared(buckets), group, gpus, hook: hook.as_mut(), shared };
        let made = match pass.sync {
            Sync::Now => replays.pass(pass, &mut summed, meanwhile),
            Sync::Later => replays.pass(pass, &mut Unsummed { shared }, meanwhile),
        };
        Some(self.checked(made))
    }

    /// The loss of a pass that was given to the device. A failure of what layers exchanged in it comes before what follows from that, and
    /// ends what the ranks have under way, as one does that `finish` meets.
    fn checked(&mut self, made: Result<PassLoss, Error>) -> Result<f64, Error> {
        let failure = self.shared.as_ref().and_then(|shared| shared.ranks.take_failure());
        let error = match (failure, made) {
            (None, Ok(loss)) => return Ok(loss.item()),
            (Some(error), _) => Error::from(error),
            (None, Err(error)) => error,
        };
        self.group.abort(&error.to_string());
        self.abort_gpus(&error.to_string());
        self.step.forget();
        Err(error)
    }

    /// What a program may have wrong that makes its own passes.
    fn check_own(&self, parameters: &Parameters) -> Result<(), Error> {
        if self.values.as_ref().is_some_and(|values| !values.is_of(parameters.values())) {
            let name = parameters.names().first().cloned().unwrap_or_default();
            return Err(Error::OtherParameters { name });
        }
        let is_alone = |shared: &Shared| !shared.is_taken.load(Ordering::Relaxed);
        let may_normalise = !parameters.buffer_names().is_empty();
        if may_normalise && self.shared.as_ref().is_some_and(is_alone) {
            return Err(Error::NotShared);
        }
        Ok(())
    }

    #[track_caller]
    fn check_finished(&self) {
        assert!(
            self.step.pending.is_empty() && self.step.exchanged.is_empty(),
            "Ddp::backward: the pass before was Sync::Now, and nobody called finish"
        );
    }

    /// Lets `pass`, which has samples, make gradients: where they are the step's last, their buckets start as they come.
    #[track_caller]
    fn through<R>(
        &mut self,
        parameters: &Parameters,
        sync: Sync,
        pass: impl FnOnce(&mut dyn GradSink) -> Result<R, Error>,
    ) -> Result<R, Error> {
        self.check_finished();
        let Ddp { step, buckets, group, gpus, hook, adding, shared, .. } = self;
        let buckets = prepared(buckets);
        begin(adding, parameters);
        match sync {
            Sync::Later => pass(&mut Nobody),
            Sync::Now => {
                step.expect();
                let is_shared = shared.as_ref().is_some_and(|shared| shared.ranks.gpus().is_none());
                let sums = Sums { group, gpus: gpus.as_deref(), hook: hook.as_mut(), is_shared };
                pass(&mut Counter { step, buckets, sums, parameters })
            }
        }
    }

    /// Starts the buckets that the backward pass left, and waits for all.
    fn reduce_all(&mut self, parameters: &Parameters) -> Result<(), Error> {
        let buckets = prepared(&self.buckets);
        if self.step.next < buckets.len() {
            // Some gradients didn't come: the parameters are unused, or this rank had no samples and contributes zeros.
            let had_samples = !self.step.lacking.is_empty();
            let names = names_of_learned(parameters, &parameters.grads().settle());
            if had_samples && !names.is_empty() && !self.config.find_unused {
                self.group.abort("a rank left parameters without a gradient");
                return Err(Error::Unused { names });
            }
            self.step.lacking.clear();
            self.step.lacking.resize(buckets.len(), 0);
            let (gpus, hook) = (self.gpus.as_deref(), self.hook.as_mut());
            // The pass is over, and its sums over the batch are.
            let mut sums = Sums { group: &self.group, gpus, hook, is_shared: false };
            Ddp::start_complete(&mut self.step, buckets, &mut sums, parameters);
        }
        if let Some(error) = self.step.failure.take() {
            return Err(error.into());
        }
        if let Some(gpus) = &self.gpus {
            self.step.join(gpus, &self.trail)?;
        }
        for bucket in self.step.coming.drain(..) {
            self.step.pending.push_back(self.hook.start(bucket, &self.group));
        }
        while let Some(finish) = self.step.pending.pop_front() {
            finish(Deadline::after(self.group.timeout()))?;
        }
        Ok(())
    }

    /// Starts every bucket that is complete and here, in order.
    fn start_complete(
        step: &mut Started,
        buckets: &[Range<usize>],
        sums: &mut Sums<'_>,
        parameters: &Parameters,
    ) {
        while step.next < buckets.len() && step.lacking[step.next] == 0 && step.failure.is_none() {
            let (arena, range) = (parameters.grads().arena(), buckets[step.next].clone());
            match sums.gpus.zip(sums.gpus.and_then(|_| arena.gpu_span(range.clone()))) {
                Some((gpus, span)) => match gpus.start_all_reduce(span, ReduceOp::Sum) {
                    Ok(work) => step.exchanged.push_back(work),
                    Err(error) => step.failure = Some(error),
                },
                None => {
                    let span = arena.host_span::<f32>(range.clone());
                    step.coming.push_back(Bucket::new(step.next, span, parameters.layout(), range));
                }
            }
            step.next += 1;
        }
        // D-ORDER
        let is_late = sums.is_shared && parameters.grads().arena().device().gpu().is_some();
        while !is_late && step.coming.front().is_some_and(Bucket::is_here) {
            step.pending.extend(step.coming.pop_front().map(|bucket| sums.hook.start(bucket, sums.group)));
        }
    }

    /// The ranks' GPUs, if gradients are to go from one to another.
    fn meet_on_gpus(&self, parameters: &Parameters) -> Result<Option<GpuGroup>, Error> {
        let between = if self.is_hooked { BetweenGpus::Host } else { self.config.between_gpus };
        between.meet("gradients", &self.group, parameters.grads().arena().device(), Via::CommStream)
    }

    /// Lets ranks whose GPUs exchange numbers do so with what layers sum over the batch, too: each on a stream of its own, so that none
    /// waits for a bucket.
    fn meet_over_batch(&mut self, device: &Device) -> Result<(), Error> {
        if self.shared.is_none() {
            return Ok(());
        }
        let between = match &self.gpus {
            Some(_) => self.config.between_gpus,
            None => BetweenGpus::Host,
        };
        let gpus = between.meet("statistics of a batch", &self.group, device, Via::OwnStream)?;
        let over_gpus = Shared::over(Ranks::of(self.group.clone()).on(gpus, &self.trail));
        // A program may have asked before.
        let is_taken = self.shared.take().map_or_else(AtomicBool::default, |shared| shared.is_taken);
        self.shared = Some(Shared { is_taken, ..over_gpus });
        Ok(())
    }

    /// Ends what the ranks' GPUs have under way.
    fn abort_gpus(&self, because: &str) {
        let over_batch = self.shared.as_ref().and_then(|shared| shared.ranks.gpus());
        self.gpus.iter().chain(over_batch).for_each(|gpus| gpus.abort(because));
    }

    /// Every rank gets rank 0's buffers (D-SAME). Returns when all that GPUs exchange is done (D-ONCE).
    fn share_buffers(&self, parameters: &Parameters) -> Result<(), Error> {
        let Some(gpus) = &self.gpus else { return share_buffers(&self.group, parameters) };
        if !parameters.buffer_names().is_empty() {
            let buffers = parameters.buffers();
            let span = buffers.gpu_span::<f32>(0..buffers.layout().count());
            let span = span.expect("buffers lie where gradients do, on the GPU");
            self.trail.join(gpus, gpus.start_broadcast(span, Rank(0))?, usize::MAX)?;
        }
        Ok(self.trail.settle()?)
    }
}

/// Makes all ranks able to sum gradients. Fails if they run different models.
pub(crate) fn bring_together(group: &Group, parameters: &Parameters) -> Result<(), Error> {
    same_model(group, parameters)?;
    share_gradients(group, parameters)
}

/// Every rank gets rank 0's values and buffers (D-SAME).
pub(crate) fn share_values(group: &Group, parameters: &Parameters) -> Result<(), Error> {
    share(group, parameters.values())?;
    share_buffers(group, parameters)
}

/// Lets ranks of one host sum gradients where they lie. Whoever has them summed borrows them for writing until that is done
/// (D-WHOLE), so nobody here uses what others write to.
pub(crate) fn share_gradients(group: &Group, parameters: &Parameters) -> Result<(), Error> {
    let arena = parameters.grads().arena();
    let kept = arena.region().filter(|region| group.may_attach(region));
    let region = match kept.map_or_else(|| arena.share::<f32>(), |region| Ok(Some(Arc::clone(region)))) {
        Ok(region) => region,
        Err(error) => {
            tracing::warn!("gradients can't be shared with the ranks of this host, they are copied: {error}");
            None
        }
    };
    group.attach(region.as_ref())?;
    Ok(())
}

/// Every rank gets rank 0's buffers (D-SAME).
pub(crate) fn share_buffers(group: &Group, parameters: &Parameters) -> Result<(), Error> {
    if parameters.buffer_names().is_empty() { Ok(()) } else { share(group, parameters.buffers()) }
}

/// Every rank gets what rank 0 has in an arena.
fn share(group: &Group, arena: &Arena) -> Result<(), Error> {
    if arena.device().gpu().is_none() {
        group.broadcast(&mut arena.flat_mut::<f32>()[..], Rank(0))?;
        return Ok(());
    }
    if !arena.device().computes() {
        return Ok(());
    }
    let is_first = group.rank() == Rank(0);
    let mut values = if is_first { arena.read_flat() } else { vec![0.0f32; arena.layout().len()] };
    group.broadcast(&mut values, Rank(0))?;
    if !is_first {
        arena.write_flat(&values);
    }
    Ok(())
}

#[track_caller]
fn prepared(buckets: &Option<Vec<Range<usize>>>) -> &[Range<usize>] {
    buckets.as_deref().expect("Ddp: prepare comes before the first backward pass")
}

/// Counts gradients into buckets as the backward pass finishes them.
struct Counter<'a> {
    step: &'a mut Started,
    buckets: &'a [Range<usize>],
    sums: Sums<'a>,
    parameters: &'a Parameters,
}

impl GradSink for Counter<'_> {
    fn finished(&mut self, leaf: LeafId, grad: Tensor) {
        drop(grad);
        let Some(parameter) = leaf.slot_of(self.parameters.values()) else { return };
        let Some(bucket) = self.buckets.iter().position(|range| range.contains(&parameter)) else { return };
        self.step.lacking[bucket] -= 1;
        Ddp::start_complete(self.step, self.buckets, &mut self.sums, self.parameters);
        self.sums.group.progress();
    }

    /// Whoever sums a bucket does so once it lacks nothing.
    fn looks(&self, leaf: &LeafId) -> bool {
        let bucket = |parameter| self.buckets.iter().position(|range| range.contains(&parameter));
        leaf.slot_of(self.parameters.values())
            .and_then(bucket)
            .is_some_and(|bucket| self.step.lacking[bucket] == 1)
    }
}

/// What GPUs sum among themselves while a pass goes on, which may be a recorded one.
struct Summed<'a> {
    step: &'a mut Started,
    buckets: &'a [Range<usize>],
    group: &'a Group,
    gpus: &'a Arc<GpuGroup>,
    hook: &'a mut dyn Hook,
    shared: Option<&'a SumOverBatch>,
}

/// The same of a pass whose gradients stay where they are for now.
struct Unsummed<'a> {
    shared: Option<&'a SumOverBatch>,
}

impl Way for Unsummed<'_> {
    fn give(&mut self, pass: &Pass<'_>, weight: &Tensor) -> Result<Tensor, Error> {
        Ok(replay::in_one_go(pass, weight, self.shared.cloned(), &mut Nobody))
    }
}

impl Way for Summed<'_> {
    fn give(&mut self, pass: &Pass<'_>, weight: &Tensor) -> Result<Tensor, Error> {
        let Summed { step, buckets, group, gpus, hook, shared } = self;
        step.expect();
        let sums = Sums { group, gpus: Some(gpus), hook: &mut **hook, is_shared: false };
        let mut counter = Counter { step, buckets, sums, parameters: pass.parameters };
        Ok(replay::in_one_go(pass, weight, shared.cloned(), &mut counter))
    }

    fn done(&mut self) -> Result<bool, Error> {
        while let Some(work) = self.step.exchanged.pop_front() {
            work.wait(Deadline::after(self.group.timeout()))?;
        }
        Ok(self.step.next == self.buckets.len())
    }

    fn join(&mut self, trail: &Trail) -> Result<(), Error> {
        if let Some(error) = self.step.failure.take() {
            return Err(error.into());
        }
        Ok(self.step.join(self.gpus, trail)?)
    }

    /// As if they had been started one by one, and waited for.
    fn replayed(&mut self) {
        self.step.expect();
        self.step.next = self.buckets.len();
    }
}

impl Strategy for Ddp {
    fn place(&self) -> Place {
        Place { rank: self.group.rank().index(), world_size: self.group.world_size() }
    }

    fn prepare(&mut self, parameters: &Parameters) -> Result<(), Error> {
        parameters.give_first_values();
        self.prepare_alike(parameters)?;
        share_values(&self.group, parameters)
    }

    fn prepare_alike(&mut self, parameters: &Parameters) -> Result<(), Error> {
        let DdpConfig { bucket_bytes, first_bucket_bytes, .. } = self.config;
        let comes = |bucket: &Range<usize>| bucket.clone().filter(|&i| !parameters.is_frozen(i)).count();
        let mut buckets = buckets(parameters.layout(), first_bucket_bytes, bucket_bytes);
        buckets.retain(|bucket| comes(bucket) > 0);
        self.values = Some(parameters.values().mark());
        self.step.comes = buckets.iter().map(comes).collect();
        self.buckets = Some(buckets);
        bring_together(&self.group, parameters)?;
        // What is frozen lies in buckets of others, too, and adds nothing to them.
        for i in (0..parameters.layout().count()).filter(|&i| parameters.is_frozen(i)) {
            parameters.grads().settle_in(i..i + 1);
        }
        self.gpus = self.meet_on_gpus(parameters)?.map(Arc::new);
        self.meet_over_batch(parameters.grads().arena().device())?;
        if self.replays.is_some() {
            let (own, groups) = (self.never_replayed(), 1 + usize::from(self.shared.is_some()));
            let why = replay::kept_from_replay(&self.group, own, self.gpus.as_deref(), groups)?;
            if let Some(why) = why {
                self.replays = None;
                if parameters.grads().arena().device().gpu().is_some() {
                    replay::none_is_replayed(&self.group, why);
                }
            }
        }
        Ok(())
    }

    fn part(&mut self, _: &Parameters, because: Option<&str>) {
        if let Some(because) = because {
            self.group.abort(because);
            // What a lost rank never comes to would keep this one's GPU waiting for good.
            self.abort_gpus(because);
        }
        // Whoever comes next may have its memory lie elsewhere, which graphs keep where it is.
        self.replays = None;
        self.step.forget();
        self.trail.forget();
        self.adding = false;
    }

    fn pass(&mut self, pass: &Pass<'_>) -> Result<f64, Error> {
        self.pass_while(pass, &mut || ())
    }

    fn pass_while(&mut self, pass: &Pass<'_>, meanwhile: &mut dyn FnMut()) -> Result<f64, Error> {
        if let Some(made) = self.replayed(pass, meanwhile) {
            return made;
        }
        let Some(mut local) = self.local.take() else {
            let (trail, mut settled) = (self.trail.clone(), Ok(()));
            let loss = in_one_go(self, pass, &mut || {
                meanwhile();
                settled = trail.settle();
            });
            return self.checked(settled.map_err(Error::from).and(loss));
        };
        meanwhile();
        if pass.samples() == 0 {
            begin(&mut self.adding, pass.parameters);
            self.local = Some(local);
            return Ok(0.0);
        }
        let loss = self.through(pass.parameters, pass.sync, |sink| local.pass(pass, sink));
        self.local = Some(local);
        loss
    }

    fn evaluate(&mut self, pass: &EvalPass<'_>, judge: &Judge<'_>, sums: &mut [f64]) -> Result<(), Error> {
        match &mut self.local {
            Some(local) => local.evaluate(pass, judge, sums),
            None => pass.in_one_go(judge, sums),
        }
    }

    fn backward(
        &mut self,
        parameters: &Parameters,
        loss: Option<&Tensor>,
        weight: f64,
        sync: Sync,
    ) -> Result<(), Error> {
        let Some(loss) = loss else {
            self.check_finished();
            prepared(&self.buckets);
            begin(&mut self.adding, parameters);
            return Ok(());
        };
        if let Err(error) = self.check_own(parameters) {
            self.group.abort(&error.to_string());
            self.abort_gpus(&error.to_string());
            return Err(error);
        }
        self.through(parameters, sync, |sink| {
            weighted(loss, weight, sink);
            Ok(())
        })
    }

    fn finish(&mut self, parameters: &Parameters) -> Result<(), Error> {
        self.adding = false;
        let result = self.reduce_all(parameters).and_then(|()| self.share_buffers(parameters));
        if let Err(error) = &result {
            // Ranks hold different gradients now, and what isn't waited for would keep its part of them until it is done.
            self.group.abort(&error.to_string());
            self.abort_gpus(&error.to_string());
        }
        self.step.forget();
        match self.shared.as_ref().and_then(|shared| shared.ranks.take_failure()) {
            Some(error) => Err(error.into()),
            None => result,
        }
    }

    fn shared_batch(&self) -> Option<SumOverBatch> {
        self.shared.as_ref().map(|shared| {
            shared.is_taken.store(true, Ordering::Relaxed);
            Arc::clone(&shared.sum)
        })
    }

    fn keeps(&self) -> bool {
        self.hook.keeps()
    }

    fn kept(&mut self) -> Result<Vec<Kept>, Error> {
        let own = self.hook.kept();
        let (n, is_first) = (self.group.world_size(), self.group.rank() == Rank(0));
        let mut all = vec![Kept::new(); if is_first { n } else { 0 }];
        for (name, numbers) in own {
            let mut of_all = vec![0.0; numbers.len() * all.len()];
            self.group.gather(&numbers, &mut of_all, Rank(0))?;
            for (rank, kept) in all.iter_mut().enumerate() {
                kept.insert(name.clone(), of_all[rank * numbers.len()..][..numbers.len()].to_vec());
            }
        }
        Ok(all)
    }

    fn go_on(&mut self, mut kept: Vec<Kept>) -> Result<(), Error> {
        let (then, now) = (kept.len(), self.group.world_size());
        let own = match then == now {
            true => Some(kept.swap_remove(self.group.rank().index())),
            false => self.hook.share_out(kept, now),
        };
        self.hook.go_on(own.ok_or(Error::OtherWorldSize { then, now })?);
        Ok(())
    }

    fn sum(&mut self, numbers: &mut [f64]) -> Result<(), Error> {
        Ok(self.group.all_reduce(numbers, ReduceOp::Sum)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use phalanx_nn::{Ctx, Linear, Module, Relu, Sequential};
    use phalanx_tensor::{DType, Device, backward};

    /// Notes how many buckets were started after each gradient.
    struct Noting<'a> {
        counter: Counter<'a>,
        started: Vec<usize>,
    }

    impl GradSink for Noting<'_> {
        fn finished(&mut self, leaf: LeafId, grad: Tensor) {
            self.counter.finished(leaf, grad);
            self.started.push(self.counter.step.next);
        }
    }

    #[test]
    fn a_bucket_starts_when_its_last_gradient_is_there_and_not_after_the_pass() {
        let device = Device::cpu(1);
        let mut net = Sequential::new().then(Linear::new(2, 2)).then(Relu).then(Linear::new(2, 1));
        let parameters = Parameters::build(&mut net, &device, 0);
        let layout = parameters.layout();
        let layer = 2 * layout.span(0..1).len() * size_of::<f32>();
        for (cap, want) in [(0, [1, 2, 3, 4]), (layer, [0, 1, 1, 2]), (1 << 20, [0, 0, 0, 1])] {
            let (buckets, group) = (buckets(layout, cap, cap), Group::solo());
            parameters.grads().zero();
            let mut step =
                Started { lacking: buckets.iter().map(Range::len).collect(), ..Started::default() };
            let sums = Sums { group: &group, gpus: None, hook: &mut AllReduce, is_shared: false };
            let counter = Counter { step: &mut step, buckets: &buckets, sums, parameters: &parameters };
            let mut sink = Noting { counter, started: Vec::new() };
            let loss = net.forward(&Tensor::ones(&device, [1, 2], DType::F32), &mut Ctx::eval()).sum_all();
            backward(&[(&loss, None)], &mut sink);
            // The weight and the bias of a layer come in either order, so only the count at the end of a layer is one.
            assert_eq!(sink.started.len(), 4);
            assert_eq!([sink.started[1], sink.started[3]], [want[1], want[3]], "{:?}", sink.started);
            assert!(sink.started.is_sorted());
        }
    }
}
