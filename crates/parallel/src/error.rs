//! What can go wrong in a strategy.

use thiserror::Error;

/// Why a step couldn't be made together.
#[derive(Clone, Debug, Error)]
pub enum Error {
    /// A collective failed.
    #[error(transparent)]
    Comm(#[from] phalanx_comm::Error),
    /// Parameters without a gradient.
    #[error("these parameters got no gradient in this step: {}\nhint: use them in the loss, or set parallel.find_unused=true", .names.join(", "))]
    Unused {
        /// Their names.
        names: Vec<String>,
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
