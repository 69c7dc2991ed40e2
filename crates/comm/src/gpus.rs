//! Groups over NCCL: ranks with a GPU each, whose numbers go from GPU to GPU and never through the host.
//!
//! NCCL is told by the group who is in it: rank 0's id travels through the group's own proven connections, and whoever waits for
//! an operation looks after the group's ranks meanwhile, since NCCL itself doesn't notice one that is stopped, or that died on
//! the same host. An operation that fails, or a rank that is lost, ends both: the communicator is aborted, so that what the GPUs
//! still have of it ends, and so is the group. Then a new group makes a new one of these.
//!
//! What NCCL sends over a network is neither proven nor encrypted, so a group that encrypts has none where it spans hosts.

mod operations;

pub use operations::GpuTransfer;

use crate::error::Error;
use crate::group::Group;
use crate::queue::Elsewhere;
use phalanx_cuda::nccl::{Exchange, Exchanged, InGraph, InGraphs, Nccl, UniqueId, is_made_to_block};
use phalanx_cuda::{DebugSync, Event, Gpu, Library, Priority, Timing};
use phalanx_wire::{Deadline, Rank};
use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The ranks of a [`Group`] with a GPU each. All of them issue the same operations in the same order, and those of the group too.
pub struct GpuGroup {
    group: Group,
    exchange: Arc<Exchange>,
    in_graphs: InGraphs,
    /// What [`GpuGroup::watch`] waits for.
    watched: Event,
    /// Of marks that were reached.
    spare: Mutex<Vec<Event>>,
    usual: Arc<Usual>,
}

/// How long waits took, by what was waited for: in steps that are alike, as long as the next one will.
#[derive(Default)]
struct Usual(Mutex<HashMap<String, Duration>>);

/// A wait that is over sooner says nothing of others: what was waited for was done, as all but the first of a step's sums are.
const LEAST_USUAL: Duration = Duration::from_micros(50);

/// As many kinds of waits a step may have.
const MOST_USUAL: usize = 64;

impl Usual {
    fn of(&self, what: &str) -> Option<Duration> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).get(what).copied()
    }

    /// As [`until`], which knows of the waits before, and is known to those after it.
    fn until(
        &self,
        group: &Group,
        exchange: &Exchange,
        what: &str,
        deadline: Deadline,
        look: impl FnMut() -> Result<bool, phalanx_cuda::Error>,
    ) -> Result<(), Error> {
        until(group, exchange, self.of(what), what, deadline, look)?;
        self.took(what, deadline.begun().elapsed());
        Ok(())
    }

    /// One wait that was a little longer or shorter says less than all before it, and one that was much longer, however long it was, says no
    /// more; but a first one, for which kernels were compiled, is soon forgotten.
    fn took(&self, what: &str, took: Duration) {
        if took < LEAST_USUAL {
            return;
        }
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(usual) = all.get_mut(what) {
            let share = if took < *usual / 2 { 1 } else { 3 };
            *usual = (*usual * share + took.min(2 * *usual)) / (share + 1);
            return;
        }
        if all.len() == MOST_USUAL {
            all.clear();
        }
        all.insert(what.to_owned(), took);
    }
}

/// A point in what a GPU was given: see [`GpuGroup::mark`].
pub(crate) struct Mark(Event);

/// Which stream of a GPU the operations of a group go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Via {
    /// The one that all groups share: an operation waits for those that were given before.
    CommStream,
    /// One of the group's own: no operation of another group's keeps this one's waiting.
    OwnStream,
}

/// Two ranks of a group, and the group of these two.
pub type OfTwo = ([Rank; 2], GpuGroup);

/// Why NCCL can't be used among the ranks of a group: the same on all of them. Ranks have the numbers by which the run knows them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Unfit {
    /// A rank has no NCCL.
    Missing {
        /// The first such rank.
        rank: Rank,
        /// What it found wrong, if that is this one.
        why: Option<String>,
    },
    /// NCCL would wait within its calls on a rank, so that nothing ended them when another is lost.
    Blocks {
        /// The first such rank.
        rank: Rank,
    },
    /// Two ranks compute on one GPU, which NCCL refuses.
    SharedGpu {
        /// Two of them.
        ranks: [Rank; 2],
    },
    /// What goes over the network is to be encrypted, and NCCL doesn't.
    Encrypted,
}

/// An operation under way, on what was lent to it.
#[must_use = "the numbers are the operation's until it is waited for"]
pub struct GpuWork<L> {
    exchanged: Exchanged<L>,
    operation: String,
    waited: Waited,
    group: Group,
    exchange: Arc<Exchange>,
    usual: Arc<Usual>,
}

/// When this thread waits for an operation with [`DebugSync::Yes`], so that one that fails is named. Letters differ from what all ranks
/// do together: two ranks that send each other one before they receive any would wait for good.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Waited {
    /// When it was given to the GPU.
    AtOnce,
    /// When its numbers are wanted.
    WhenJoined,
    /// Not at all.
    Never,
}

/// How long a failure of NCCL waits for the group to find which rank was lost: then that is to blame. And how long an operation
/// goes on once a rank has left, which may be done with it sooner.
const GRACE: Duration = Duration::from_secs(3);

/// The longest name of a GPU's place that is told.
const MOST_BUS_BYTES: usize = 31;
/// What a rank tells of itself: whether it has NCCL, and its GPU's place.
type Told = [u8; MOST_BUS_BYTES + 1];

/// What a rank has of NCCL.
#[derive(Clone, Copy)]
#[repr(u8)]
enum Has {
    Nothing,
    Nccl,
    /// One that waits within its calls.
    Blocking,
}

impl GpuGroup {
    /// Brings NCCL's ranks together, this one with `gpu`, whose operations go `via` this stream. All ranks of the group must call it.
    /// Where NCCL can't be used, all learn why, and the group is as good as before.
    pub fn over(group: &Group, gpu: &Gpu, via: Via) -> Result<Result<GpuGroup, Unfit>, Error> {
        let nccl = match fit(group, gpu)? {
            Ok(nccl) => nccl,
            Err(unfit) => return Ok(Err(unfit)),
        };
        GpuGroup::join(group, &nccl, gpu, via).map(Ok)
    }

    /// For each of these pairs that this rank is of, a group of these two, in this order, with a stream of its own: what the ranks of
    /// one are at keeps no other waiting, also on the same GPU. All ranks of the group must come with the same pairs, which are theirs
    /// and of two ranks each; where NCCL can't be used among all of them, all learn why.
    #[track_caller]
    pub fn pairs(group: &Group, gpu: &Gpu, pairs: &[[Rank; 2]]) -> Result<Result<Vec<OfTwo>, Unfit>, Error> {
        let nccl = match fit(group, gpu)? {
            Ok(nccl) => nccl,
            Err(unfit) => return Ok(Err(unfit)),
        };
        let mut own = Vec::new();
        for &pair in pairs {
            if let Some(two) = group.subgroup(&pair)? {
                let joined = GpuGroup::join(&two, &nccl, gpu, Via::OwnStream);
                // The others wait for this rank at the next pair.
                own.push((pair, joined.inspect_err(|error| group.abort(&error.to_string()))?));
            }
        }
        Ok(Ok(own))
    }

    fn join(group: &Group, nccl: &Nccl, gpu: &Gpu, via: Via) -> Result<GpuGroup, Error> {
        let failed = |what: &str, error| failed(group, what, error);
        let own = match via {
            Via::CommStream => None,
            Via::OwnStream => {
                Some(gpu.stream(Priority::High).map_err(|error| failed("a new stream", error))?)
            }
        };
        let mut id = [0u8; UniqueId::BYTES];
        if group.rank() == Rank(0) {
            id = nccl.unique_id().map_err(|error| failed("an id for NCCL's ranks to meet", error))?.0;
        }
        group.broadcast(&mut id, Rank(0))?;
        let place = (group.rank().index(), group.world_size());
        let in_graphs = nccl.in_graphs().map_err(|error| failed("the library's version", error))?;
        let joined = Exchange::join(nccl, (gpu, own), &UniqueId(id), place, group.timeout());
        let exchange = joined.map_err(|error| failed("joining NCCL's ranks", error))?;
        until_at_rest(group, &exchange, "joining NCCL's ranks", || exchange.is_ready())?;
        let watched = gpu.event(Timing::No).map_err(|error| failed("a new event", error))?;
        Ok(GpuGroup {
            group: group.clone(),
            exchange,
            in_graphs,
            watched,
            spare: Mutex::default(),
            usual: Arc::default(),
        })
    }

    /// Waits until the GPU is done with all that its compute stream has by now, which may have operations of these ranks in it, as a
    /// graph that was recorded has: fails as [`GpuWork::wait`] does, and ends the group and the operations then. `what` is told.
    pub fn watch(&self, what: &str, deadline: Deadline) -> Result<(), Error> {
        let failed =
            |error: phalanx_cuda::Error| Error::Gpu { operation: what.to_owned(), reason: error.to_string() };
        self.exchange.gpu().compute().record(&self.watched).map_err(failed)?;
        let look = || Ok(self.exchange.is_ready()? && self.watched.is_done()?);
        self.usual.until(&self.group, &self.exchange, what, deadline, look)
    }

    /// A point in what the compute stream was given, behind all of it.
    pub(crate) fn mark(&self) -> Result<Mark, Error> {
        let failed = |error: phalanx_cuda::Error| Error::Gpu {
            operation: "marking a point of a stream".to_owned(),
            reason: error.to_string(),
        };
        let spare = self.spare.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let event = spare.map_or_else(|| self.exchange.gpu().event(Timing::No), Ok).map_err(failed)?;
        self.exchange.gpu().compute().record(&event).map_err(failed)?;
        Ok(Mark(event))
    }

    /// Waits until the GPU has come to a point, as [`GpuGroup::watch`] waits for all that it has.
    pub(crate) fn reach(&self, mark: &Mark, what: &str, deadline: Deadline) -> Result<(), Error> {
        let look = || Ok(self.exchange.is_ready()? && mark.0.is_done()?);
        self.usual.until(&self.group, &self.exchange, what, deadline, look)
    }

    /// The same, but for no longer than it takes to find a rank of the group that has fallen silent, or has left, and what NCCL's failure
    /// comes of: whether the GPU has come there.
    pub(crate) fn reach_in_turn(&self, mark: &Mark, what: &str, deadline: Deadline) -> Result<bool, Error> {
        let turn = Deadline::after(self.group.silence().unwrap_or_default() + 2 * GRACE);
        let mut is_there = false;
        let look = || {
            is_there = self.exchange.is_ready()? && mark.0.is_done()?;
            Ok(is_there || turn.expired())
        };
        until(&self.group, &self.exchange, self.usual.of(what), what, deadline, look)?;
        if is_there {
            self.usual.took(what, deadline.begun().elapsed());
        }
        Ok(is_there)
    }

    /// Takes a mark back that the GPU has come to.
    pub(crate) fn take_back(&self, mark: Mark) {
        self.spare.lock().unwrap_or_else(PoisonError::into_inner).push(mark.0);
    }

    /// The ranks, as they tell each other by way of the host.
    pub fn group(&self) -> &Group {
        &self.group
    }

    /// Of how many groups' operations this process may make graphs.
    pub fn in_graphs(&self) -> InGraphs {
        self.in_graphs
    }

    /// To be held by whoever has a graph of its operations, for as long as that is there: NCCL ends only behind its graphs. A launch of it
    /// is waited for before another operation, or graph, of theirs is under way.
    pub fn in_graph(&self) -> InGraph {
        self.exchange.in_graph()
    }

    /// Ends it on this rank, and the group on all, with this reason.
    pub fn abort(&self, reason: &str) {
        self.group.abort(reason);
        end(&self.exchange);
    }

    #[track_caller]
    fn begin<L>(
        &self,
        operation: String,
        waited: Waited,
        start: impl FnOnce(&Arc<Exchange>) -> Result<Exchanged<L>, phalanx_cuda::Error>,
    ) -> Result<GpuWork<L>, Error> {
        let (group, exchange, usual) = (self.group.clone(), self.exchange.clone(), self.usual.clone());
        // The library may still be at the operation before.
        rest(&group, &exchange, &operation)?;
        match start(&exchange) {
            Ok(exchanged) => {
                let mut work = GpuWork { exchanged, operation, waited, group, exchange, usual };
                if work.exchanged.is_recorded() {
                    work.settle()?;
                }
                work.named_if_it_fails(Waited::AtOnce)?;
                Ok(work)
            }
            Err(error) => {
                let error = Error::Gpu { operation, reason: error.to_string() };
                self.abort(&error.to_string());
                Err(error)
            }
        }
    }
}

impl<L> GpuWork<L> {
    /// Whether it is done, or has failed, which [`GpuWork::wait`] tells.
    pub fn poll(&mut self) -> bool {
        self.exchanged.is_done().unwrap_or(true)
    }

    /// What it is.
    pub(crate) fn operation(&self) -> &str {
        &self.operation
    }

    /// Has the compute stream wait for the operation, and not this thread, and gives the numbers back. What becomes of it is for
    /// [`GpuGroup::watch`] to tell, or for the [`Trail`](crate::Trail) that it is noted in, and of one that is recorded for those who
    /// replay it.
    pub fn join(mut self) -> Result<L, Error> {
        self.named_if_it_fails(Waited::WhenJoined)?;
        let GpuWork { exchanged, operation, group, exchange, .. } = self;
        rest(&group, &exchange, &operation)?;
        exchanged.finish().map_err(|error| Error::Gpu { operation, reason: error.to_string() })
    }

    /// Waits until the operation is done, and gives the numbers back. A rank that is lost meanwhile, a failure of NCCL's, and a
    /// deadline that passes end the group, and what the GPU still has of the operation.
    pub fn wait(mut self, deadline: Deadline) -> Result<L, Error> {
        self.until_done(deadline)?;
        let GpuWork { exchanged, operation, .. } = self;
        exchanged.finish().map_err(|error| Error::Gpu { operation, reason: error.to_string() })
    }

    /// Waits until the library has given the operation to its stream, and with it to the graph that is recorded, which it changes in a
    /// thread of its own meanwhile.
    fn settle(&mut self) -> Result<(), Error> {
        until_at_rest(&self.group, &self.exchange, &self.operation, || self.exchanged.settle())
    }

    fn until_done(&mut self, deadline: Deadline) -> Result<(), Error> {
        let GpuWork { exchanged, operation, group, exchange, usual, .. } = self;
        usual.until(group, exchange, operation, deadline, || exchanged.is_done())
    }

    /// Waits with [`DebugSync::Yes`], if this is when. Panics where it is the GPU that fails: so would whatever the pass gives it next,
    /// which it does before it looks at an error of an operation that goes on beside it.
    fn named_if_it_fails(&mut self, now: Waited) -> Result<(), Error> {
        let is_asked = self.exchange.gpu().debug_sync() == DebugSync::Yes;
        if !is_asked || self.waited != now || self.exchanged.is_recorded() {
            return Ok(());
        }
        let waited = self.until_done(Deadline::after(self.group.timeout()));
        let is_lost = || self.exchange.gpu().compute().is_done().is_err();
        waited.inspect_err(|error| assert!(!is_lost(), "{error}"))
    }
}

/// What NCCL is doing, as the group waits for it.
struct Watched<'a, F> {
    what: &'a str,
    look: F,
    /// How long it takes as a rule, if that is known.
    usual: Option<Duration>,
    /// What it says of its failure, and since when.
    failed: Option<(String, Instant)>,
    /// Since when a rank is known to have left in peace, which one that was done may.
    left: Option<Instant>,
}

impl<F: FnMut() -> Result<bool, phalanx_cuda::Error>> Elsewhere for Watched<'_, F> {
    fn describe(&self) -> String {
        format!("{} by NCCL", self.what)
    }

    fn is_done(&mut self) -> Result<bool, Error> {
        if let Some((reason, since)) = &self.failed {
            let error = || Error::Gpu { operation: self.describe(), reason: reason.clone() };
            return if since.elapsed() < GRACE { Ok(false) } else { Err(error()) };
        }
        match (self.look)() {
            Ok(done) => Ok(done),
            Err(error) => {
                self.failed = Some((error.to_string(), Instant::now()));
                Ok(false)
            }
        }
    }

    fn usual(&self) -> Option<Duration> {
        self.usual
    }

    fn left(&mut self, error: Error) -> Option<Error> {
        let since = *self.left.get_or_insert_with(Instant::now);
        (since.elapsed() >= GRACE).then_some(error)
    }
}

/// What keeps a group's ranks from anything of a GPU's: the group is ended with it.
fn failed(group: &Group, what: &str, error: phalanx_cuda::Error) -> Error {
    let error = Error::Gpu { operation: what.to_owned(), reason: error.to_string() };
    group.abort(&error.to_string());
    error
}

/// NCCL, if all ranks of a group can use it, or why not.
fn fit(group: &Group, gpu: &Gpu) -> Result<Result<Nccl, Unfit>, Error> {
    let opened = gpu.nccl();
    let bus = gpu.bus_id().map_err(|error| failed(group, "finding the place of a GPU", error))?;
    let mut all = vec![[0u8; MOST_BUS_BYTES + 1]; group.world_size()].concat();
    let has = match opened.is_ok() {
        false => Has::Nothing,
        true if is_made_to_block() => Has::Blocking,
        true => Has::Nccl,
    };
    group.all_gather(&told(has, &bus), &mut all)?;
    let all: Vec<Told> = all.as_chunks().0.to_vec();
    let spans_hosts = group.topology().hosts() > 1;
    let unfit = unfit(&all, |a, b| group.topology().is_same(a, b));
    match (unfit.or((group.is_encrypted() && spans_hosts).then_some(Unfit::Encrypted)), opened) {
        (Some(Unfit::Missing { rank, .. }), Err(error)) if rank == group.rank() => {
            Ok(Err(Unfit::Missing { rank, why: Some(error.to_string()) }.in_run(group.members())))
        }
        (Some(unfit), _) => Ok(Err(unfit.in_run(group.members()))),
        (None, opened) => opened.map(Ok).map_err(|error| failed(group, "opening NCCL", error)),
    }
}

/// Waits until the library has given its stream all that it was asked for, for which it may have to reach other ranks.
fn rest(group: &Group, exchange: &Exchange, operation: &str) -> Result<(), Error> {
    until_at_rest(group, exchange, operation, || exchange.is_ready())
}

/// Waits until `look` finds the library done with what it was asked for, which mostly it is.
fn until_at_rest(
    group: &Group,
    exchange: &Exchange,
    what: &str,
    mut look: impl FnMut() -> Result<bool, phalanx_cuda::Error>,
) -> Result<(), Error> {
    match look() {
        Ok(true) => Ok(()),
        _ => until(group, exchange, None, what, Deadline::after(group.timeout()), look),
    }
}

/// Waits until `look` says so, and looks after the group's ranks meanwhile. What fails ends what the GPU has of the communicator.
fn until(
    group: &Group,
    exchange: &Exchange,
    usual: Option<Duration>,
    what: &str,
    deadline: Deadline,
    look: impl FnMut() -> Result<bool, phalanx_cuda::Error>,
) -> Result<(), Error> {
    let mut watched = Watched { what, look, usual, failed: None, left: None };
    group.wait_elsewhere(deadline, &mut watched).inspect_err(|_| end(exchange))
}

/// Ends what the GPU has of a communicator. A failure is one that others report.
fn end(exchange: &Exchange) {
    let _ = exchange.abort();
}

fn told(has: Has, bus: &str) -> Told {
    let mut told = [0; MOST_BUS_BYTES + 1];
    told[0] = has as u8;
    let bytes = bus.as_bytes();
    // The end is what differs.
    let kept = &bytes[bytes.len().saturating_sub(MOST_BUS_BYTES)..];
    told[1..=kept.len()].copy_from_slice(kept);
    told
}

/// Why these ranks can't use NCCL, if they can't; `same` says whether two share a host.
fn unfit(all: &[Told], same: impl Fn(usize, usize) -> bool) -> Option<Unfit> {
    let rank = |rank: usize| Rank(rank as u32);
    let first = |has: Has| all.iter().position(|told| told[0] == has as u8).map(rank);
    if let Some(rank) = first(Has::Nothing) {
        return Some(Unfit::Missing { rank, why: None });
    }
    if let Some(rank) = first(Has::Blocking) {
        return Some(Unfit::Blocks { rank });
    }
    let pairs = (0..all.len()).flat_map(|b| (0..b).map(move |a| (a, b)));
    let mut shared = pairs.filter(|&(a, b)| all[a] == all[b] && same(a, b));
    shared.next().map(|(a, b)| Unfit::SharedGpu { ranks: [rank(a), rank(b)] })
}

impl Unfit {
    /// The same for those outside of the group, whose ranks are `members` to them.
    fn in_run(self, members: &[Rank]) -> Unfit {
        let rename = |rank: Rank| members[rank.index()];
        match self {
            Unfit::Missing { rank, why } => Unfit::Missing { rank: rename(rank), why },
            Unfit::Blocks { rank } => Unfit::Blocks { rank: rename(rank) },
            Unfit::SharedGpu { ranks } => Unfit::SharedGpu { ranks: ranks.map(rename) },
            Unfit::Encrypted => Unfit::Encrypted,
        }
    }
}

impl fmt::Display for Unfit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Unfit::Missing { rank, why } => match why {
                Some(why) => write!(f, "rank {rank} can't use NCCL: {why}"),
                None => write!(f, "rank {rank} has no NCCL\nhint: there, {}", Library::Nccl.packages()),
            },
            Unfit::Blocks { rank } => write!(
                f,
                "rank {rank} has NCCL_COMM_BLOCKING=1 in its environment, with which nobody could end what waits for a rank that is lost\nhint: unset it"
            ),
            Unfit::SharedGpu { ranks: [a, b] } => write!(
                f,
                "ranks {a} and {b} compute on one GPU, which NCCL refuses\nhint: take a rank a GPU: --nproc-per-node gpu"
            ),
            Unfit::Encrypted => f.write_str(
                "what goes over the network is to be encrypted, which NCCL doesn't do\nhint: leave TLS out where the network can be trusted",
            ),
        }
    }
}

impl fmt::Debug for GpuGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "GpuGroup({:?})", self.exchange)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_ranks_come_to_the_same_of_what_all_tell() {
        let one_host = |_, _| true;
        let (a, b, none) = (
            told(Has::Nccl, "0000:01:00.0"),
            told(Has::Nccl, "0000:02:00.0"),
            told(Has::Nothing, "0000:03:00.0"),
        );
        assert_eq!(unfit(&[a, b], one_host), None);
        assert_eq!(unfit(&[a, a], |_, _| false), None, "GPUs in the same slot of two hosts");
        let shared = Unfit::SharedGpu { ranks: [Rank(0), Rank(2)] };
        assert_eq!(unfit(&[a, b, a], one_host), Some(shared));
        assert_eq!(unfit(&[a, a, none], one_host), Some(Unfit::Missing { rank: Rank(2), why: None }));
        let blocking = told(Has::Blocking, "0000:02:00.0");
        assert_eq!(unfit(&[a, blocking], one_host), Some(Unfit::Blocks { rank: Rank(1) }));
    }

    #[test]
    fn what_waits_usually_take_is_told_by_those_that_were_waits() {
        let (usual, ms) = (Usual::default(), Duration::from_millis);
        let after = |all: &[u64]| {
            all.iter().for_each(|&took| usual.took("a sum", ms(took)));
            usual.of("a sum").map(|usual| usual.as_secs_f64() * 1e3)
        };
        assert_eq!(usual.of("a sum"), None);
        // The first step's, and then those of steps: those that were over at once count for nothing.
        assert_eq!(after(&[20_000]), Some(20_000.0));
        let of_steps = after(&[[5, 0, 0].as_slice(); 24].concat()).unwrap();
        assert!((of_steps - 5.0).abs() < 0.2, "{of_steps} ms");
        // One that was late, and steps again.
        let late = after(&[9_000]).unwrap();
        assert!(late < 6.5, "{late} ms");
        let again = after(&[5; 9]).unwrap();
        assert!((again - 5.0).abs() < 0.2, "{again} ms");
        // Names without end don't stay.
        (0..500).for_each(|i| usual.took(&format!("a sum of {i}"), ms(5)));
        assert!(usual.0.lock().unwrap().len() <= MOST_USUAL);
    }

    #[test]
    fn the_end_of_a_long_place_is_what_counts() {
        let long = |end: &str| told(Has::Nccl, &format!("{}{end}", "x".repeat(40)));
        assert_ne!(long("a"), long("b"));
        assert_eq!(long("a")[0], 1);
    }

    #[test]
    fn reasons_say_what_to_do() {
        let missing = Unfit::Missing { rank: Rank(1), why: None }.to_string();
        assert!(missing.contains("rank 1") && missing.contains("nvidia-nccl-cu13"), "{missing}");
        let shared = Unfit::SharedGpu { ranks: [Rank(0), Rank(1)] }.to_string();
        assert!(shared.contains("ranks 0 and 1") && shared.contains("--nproc-per-node gpu"), "{shared}");
    }
}
