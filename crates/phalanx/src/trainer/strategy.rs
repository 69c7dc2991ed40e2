//! Who computes what, as a trainer says: what doesn't go together, how the device computes, and the strategy.

use super::{Precision, Trainer};
use crate::error::Error;
use phalanx_comm::{Group, Rank};
use phalanx_nn::{Module, Parameters};
use phalanx_parallel::{
    Axis, Compress, Ddp, Fsdp, LogicalShards, LogicalShardsConfig, ModelParallel, ModelParallelConfig,
    Sharded, SingleDevice, Strategy,
};
use phalanx_tensor::{Arena, DebugSync, Device, Search};

/// The strategy, on a device that computes as the trainer says.
pub(crate) fn strategy(
    trainer: &Trainer,
    group: &Group,
    model: &dyn Module,
    parameters: &Parameters,
    speaker: Rank,
) -> Result<Box<dyn Strategy>, Error> {
    check(trainer)?;
    let replays = set_up(trainer, group, parameters.values().device());
    if let Some(config) = &trainer.mesh {
        let (ddp, sharded) = (trainer.ddp.clone(), trainer.sharded);
        let config = ModelParallelConfig { ddp, sharded, replays, ..config.clone() };
        return Ok(Box::new(ModelParallel::with_stages_of(speaker, group, parameters, &config)?));
    }
    // A rank alone shares nothing out, but may have no room on its GPU.
    if let Some(config) = trainer.sharded.filter(|config| group.world_size() > 1 || config.offload) {
        let fsdp = Fsdp::new(group.clone(), model, parameters, config)?;
        return Ok(Box::new(if replays { fsdp.with_replays() } else { fsdp }));
    }
    let local = trainer.local.make()?;
    // What was shared out among more ranks than are left is one again.
    parameters.values().join();
    parameters.grads().arena().join();
    parameters.grads().casts().iter().for_each(Arena::join);
    Ok(match (trainer.logical_shards, group.world_size()) {
        (Some(shards), _) => {
            let find_unused = trainer.ddp.find_unused;
            let config = LogicalShardsConfig { find_unused, ..LogicalShardsConfig::new(shards) };
            Box::new(LogicalShards::new(group.clone(), config)?)
        }
        (None, 1) => {
            let alone = local.map_or_else(SingleDevice::new, SingleDevice::with_local);
            let alone = alone.find_unused(trainer.ddp.find_unused);
            Box::new(if replays { alone.with_replays() } else { alone })
        }
        (None, _) => {
            let ddp = Ddp::with(group.clone(), trainer.ddp.clone());
            let ddp = if replays { ddp.with_replays() } else { ddp };
            Box::new(match local {
                Some(local) => ddp.with_local(local),
                None => ddp,
            })
        }
    })
}

/// Refuses what doesn't go together.
fn check(trainer: &Trainer) -> Result<(), Error> {
    let in_parts = trainer.local.parts() > 1;
    if trainer.ddp.sync_batch_norm && in_parts {
        return Err(Error::SharedInParts);
    }
    check_precision(trainer)?;
    let of_whole_models = [
        ("statistics over the batch of all ranks", trainer.ddp.sync_batch_norm),
        ("a compression of gradients", trainer.ddp.compress != Compress::Nothing),
        ("passes in parts on several devices", in_parts),
    ];
    let asked = |beside: (&'static str, bool)| {
        [beside].into_iter().chain(of_whole_models).find_map(|(what, asked)| asked.then_some(what))
    };
    if (trainer.mesh.is_some() || trainer.sharded.is_some())
        && let Some(what) = asked(("logical shards", trainer.logical_shards.is_some()))
    {
        return Err(Error::BesideSharding { what });
    }
    if trainer.logical_shards.is_some()
        && let Some(what) = asked(("several passes a step", trainer.accumulate > 1))
    {
        return Err(Error::BesideShards { what });
    }
    Ok(())
}

/// Has the device compute as the trainer says, and rank 0 tell what isn't as was asked; gives whether passes are replayed.
fn set_up(trainer: &Trainer, group: &Group, device: &Device) -> bool {
    device.set_factors(trainer.precision.factors());
    let unsearched = unsearched(trainer).filter(|_| trainer.search);
    device.set_search(if trainer.search && unsearched.is_none() { Search::Yes } else { Search::No });
    // A graph is done as a whole: one that fails would not say at what.
    let names_each = device.gpu().is_some_and(|gpu| gpu.debug_sync() == DebugSync::Yes);
    let replays = trainer.graphs && !names_each;
    let Some(gpu) = device.gpu().filter(|_| group.rank() == Rank(0)) else { return replays };
    if let Some(what) = unsearched {
        tracing::warn!(
            "train.search: {what} have to compute the same bits on all workers: the libraries choose"
        );
    }
    if trainer.precision == Precision::Bfloat16 && !gpu.architecture().has_bfloat16() {
        tracing::warn!(
            "train.precision=bfloat16: {} (sm_{}) doesn't compute with it, as GPUs from sm_80 on do: products and convolutions are slow\nhint: --set train.precision=float16",
            gpu.name(),
            gpu.architecture()
        );
    }
    if trainer.graphs && names_each {
        tracing::warn!(
            "train.graphs: passes aren't recorded, since with --debug-sync all that they give a GPU is waited for"
        );
    }
    if let Some(what) = unrecorded(trainer, group.world_size()).filter(|_| replays) {
        tracing::warn!("train.graphs: passes {what} aren't replayed, but made each time");
    }
    replays
}

/// Refuses what isn't made for a scaled loss.
fn check_precision(trainer: &Trainer) -> Result<(), Error> {
    let (precision, compress) = (trainer.precision, &trainer.ddp.compress);
    // What a rank keeps of gradients that were infinite would spoil all that come after.
    if precision.is_scaled() && compress.keeps() {
        let what = "a compression of gradients that keeps what it left out";
        return Err(Error::BesidePrecision { precision, what });
    }
    Ok(())
}

/// Which passes of this many ranks no GPU can replay, if they are such. What else keeps it from that the strategies find out, when their
/// ranks meet.
fn unrecorded(trainer: &Trainer, ranks: usize) -> Option<&'static str> {
    let comes_and_goes = trainer.sharded.is_some_and(|config| config.sharded >= Sharded::Gradients);
    let which = [
        ("of stages", trainer.mesh.as_ref().is_some_and(|mesh| mesh.stages.is_some())),
        ("of logical shards", trainer.logical_shards.is_some()),
        ("that add to gradients that are shared out", ranks > 1 && comes_and_goes && trainer.accumulate > 1),
    ];
    which.into_iter().find(|(_, are_such)| *are_such).map(|(what, _)| what)
}

/// What keeps ranks from choosing for themselves how products and convolutions are computed, if anything does.
fn unsearched(trainer: &Trainer) -> Option<&'static str> {
    let cuts = |axis: &(Axis, usize)| matches!(axis, (Axis::Tensor | Axis::Context, ranks) if *ranks > 1);
    let is_cut = trainer.mesh.as_ref().is_some_and(|config| config.mesh.iter().any(cuts));
    let which = [
        ("parts of matrices and stretches of sequences", is_cut),
        ("logical shards", trainer.logical_shards.is_some()),
    ];
    which.into_iter().find(|(_, is_so)| *is_so).map(|(what, _)| what)
}
