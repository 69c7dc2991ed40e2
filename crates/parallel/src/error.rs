//! What can go wrong in a strategy.

use std::fmt;
use thiserror::Error;

/// Why a step couldn't be made together.
#[derive(Clone, Error)]
pub enum Error {
    /// A collective failed.
    #[error(transparent)]
    Comm(#[from] phalanx_comm::Error),
    /// Gradients were to go from GPU to GPU by NCCL, which can't be used.
    #[error("{why}; without parallel.between_gpus=nccl gradients go by way of the host then")]
    NoNccl {
        /// Why not.
        why: phalanx_comm::Unfit,
    },
    /// A GPU can't replay the passes of a step.
    #[error("{error}\nhint: without train.graphs=true passes are made as ever")]
    Replay {
        /// Why not.
        error: Box<phalanx_tensor::Error>,
    },
    /// Parameters without a gradient.
    #[error("these parameters got no gradient in this step: {}\nhint: use them in the loss, or set parallel.find_unused=true (in a program DdpConfig::find_unused)", .names.join(", "))]
    Unused {
        /// Their names.
        names: Vec<String>,
    },
    /// Batch norms were to see the samples of all ranks, and no pass was told so.
    #[error(
        "DdpConfig::sync_batch_norm is on, and no pass was given what goes with it: each rank would normalise by its own samples\nhint: Ctx::train(..).sharing(strategy.shared_batch().expect(\"it is on\")), for each pass"
    )]
    NotShared,
    /// The parameters are those of another model.
    #[error(
        "the strategy was prepared with other parameters than these, which begin with {name}\nhint: each model has a strategy of its own"
    )]
    OtherParameters {
        /// The name of the first.
        name: String,
    },
    /// A compression was to go on with what it kept under other settings.
    #[error(
        "bucket {bucket} keeps {found} numbers as {name}, and needs {needed}: gradients were compressed with other settings when this was saved\nhint: go on with the settings of then, or start anew from the weights with --init"
    )]
    OtherCompression {
        /// Which bucket of gradients.
        bucket: usize,
        /// What was kept.
        name: String,
        /// How many numbers that were.
        found: usize,
        /// How many there must be.
        needed: usize,
    },
    /// What ranks kept for themselves can't be shared out among another number of them.
    #[error(
        "each of {then} workers kept something of how its gradients travel, which {now} can't go on with\nhint: go on with {then}, or start anew from the weights with --init"
    )]
    OtherWorldSize {
        /// How many there were.
        then: usize,
        /// How many there are.
        now: usize,
    },
    /// More ranks than there are shards, or no shards at all.
    #[error(
        "too few logical shards: {shards} for {world_size} {}, and each needs one\nhint: take {world_size} or more",
        if *world_size == 1 { "worker" } else { "workers" }
    )]
    FewShards {
        /// Into how many parts steps were to be cut.
        shards: usize,
        /// How many ranks there are.
        world_size: usize,
    },
    /// There is no such schedule.
    #[error(transparent)]
    Schedule(#[from] crate::pipeline::ScheduleError),
    /// The model can't be cut so.
    #[error(transparent)]
    Cut(#[from] crate::pipeline::CutError),
    /// The system has no threads for the devices of a worker.
    #[error(
        "the system gave no {threads} threads for a worker's other devices: {why}\nhint: take fewer devices or workers, or raise the limit of processes (ulimit -u)"
    )]
    Threads {
        /// How many were asked for.
        threads: usize,
        /// What it said.
        why: String,
    },
    /// A stage of a pipeline waited for another in vain.
    #[error("rank {rank} of the pipeline: {action} of another stage {}", waited_for(.waited))]
    StageLost {
        /// Who waited.
        rank: usize,
        /// For what.
        action: String,
        /// How long, if that was too long; else the other stage has ended.
        waited: Option<std::time::Duration>,
    },
    /// Another rank told of values that can't be.
    #[error(
        "rank of stage {stage} told of activations of an impossible form: {words:?}\nhint: start every rank with the same program"
    )]
    BadForm {
        /// Whose.
        stage: usize,
        /// What it told.
        words: Vec<u64>,
    },
    /// No mesh of these ranks is as was asked for.
    #[error(transparent)]
    Mesh(#[from] crate::mesh::MeshError),
    /// The model isn't the one that the plan cuts.
    #[error(transparent)]
    Plan(#[from] crate::tensor_parallel::PlanError),
    /// An axis that nobody says how the model is cut along.
    #[error(
        "the mesh has an axis {axis}, and nothing says how the model is cut along it\nhint: leave parallel.{axis} out"
    )]
    NoPlan {
        /// Which axis.
        axis: crate::mesh::Axis,
    },
    /// What a rank holds was to lie in the host's memory.
    #[error(
        "parallel.offload: {why}\nhint: leave it out, or take --device cuda with --strategy fsdp and parallel.zero=3"
    )]
    Offload {
        /// Why it can't.
        why: &'static str,
    },
    /// There isn't as much memory of the host that a GPU can copy by itself as this rank holds.
    #[error("parallel.offload, of which each of more workers would hold less: {error}")]
    Pinned {
        /// What the driver says.
        error: Box<phalanx_tensor::Error>,
    },
    /// Stages that ranks can't have alike.
    #[error("{stages} stages for a pipeline of {ranks} ranks\nhint: give each rank one, or each as many")]
    Stages {
        /// How many there are.
        stages: usize,
        /// How many have them.
        ranks: usize,
    },
    /// Blocks that aren't placed, or are placed twice.
    #[error("the blocks {} are placed, and the model has the blocks 0..{blocks}\nhint: place all of them, in order", .placed.join(", "))]
    Places {
        /// Which were.
        placed: Vec<String>,
        /// How many there are.
        blocks: usize,
    },
    /// A model that can't be shared out block by block.
    #[error(
        "{name} of block {block} comes after {before} of block {block_before}\nhint: name the parts of the model in the order of its blocks"
    )]
    Scattered {
        /// A parameter.
        name: String,
        /// Its block.
        block: usize,
        /// The one before it.
        before: String,
        /// And that one's.
        block_before: usize,
    },
    /// A GPU among several devices of one process.
    #[error(
        "a model can't be placed on {device} and on another device of one process\nhint: take a rank a device, as a pipeline of ranks"
    )]
    PlacedGpu {
        /// The GPU.
        device: String,
    },
    /// The ranks run different models.
    #[error(
        "the ranks have different models: rank {rank} has {theirs} where rank 0 has {ours}\nhint: start every rank with the same program and settings"
    )]
    DifferentModels {
        /// The first rank that differs.
        rank: u32,
        /// What stands there on that rank.
        theirs: String,
        /// What stands there on rank 0.
        ours: String,
    },
}

/// Its message, which is what a `main` that returns it tells.
impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

fn waited_for(waited: &Option<std::time::Duration>) -> String {
    match waited {
        Some(time) => format!("hasn't come after {} s", time.as_secs()),
        None => "won't come, as that stage has ended".to_owned(),
    }
}
