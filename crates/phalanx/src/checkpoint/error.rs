//! What can go wrong with a checkpoint.

use phalanx_nn::Mismatch;
use phalanx_nn::optim::ResumeError;
use std::fmt;
use std::path::PathBuf;
use std::time::Duration;
use thiserror::Error;

/// Why a checkpoint can't be written, or a run can't go on from one.
#[derive(Error)]
pub enum CheckpointError {
    /// The system refused.
    #[error("{path}: {action}: {source}", path = path.display())]
    Io {
        /// Which file or folder.
        path: PathBuf,
        /// What was tried.
        action: &'static str,
        /// What the system said.
        source: std::io::Error,
    },
    /// The newest checkpoint can't be read just now, and whether it is whole nobody knows.
    #[error(
        "{path}: can't be read: {source}\nhint: mend that and go on; if it can't be mended, move that checkpoint's folder away, and the run goes on from the one before",
        path = path.display()
    )]
    Unreadable {
        /// Which file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// Not what a run wrote: cut, altered, or of something else.
    #[error("{path}: the checkpoint is broken: {reason}", path = path.display())]
    Broken {
        /// Which file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// Written by a later version of this library.
    #[error(
        "{path}: a checkpoint of format {version}, and this version reads formats up to {newest}\nhint: go on with the version of phalanx that wrote it, or a newer one",
        path = path.display(),
        newest = super::manifest::VERSION
    )]
    Newer {
        /// The manifest.
        path: PathBuf,
        /// Its format.
        version: u32,
    },
    /// All checkpoints of a folder are broken.
    #[error(
        "{path}: none of its checkpoints can be read: {reasons}\nhint: start anew without --resume, or from weights with --init",
        path = path.display()
    )]
    NoneLeft {
        /// The folder.
        path: PathBuf,
        /// What is wrong with each.
        reasons: String,
    },
    /// Of a model with other parameters.
    #[error("{path}: the checkpoint is of another model: {mismatch}", path = path.display())]
    OtherModel {
        /// The checkpoint.
        path: PathBuf,
        /// What doesn't fit.
        mismatch: Mismatch,
    },
    /// A folder to take weights from, where there are none.
    #[error(
        "{path}: it holds neither model.safetensors nor all of its parts\nhint: name a file of weights, or the folder of one checkpoint, such as checkpoints/step-1200 of a run",
        path = path.display()
    )]
    NoWeights {
        /// The folder.
        path: PathBuf,
    },
    /// Of another optimizer.
    #[error("{path}: {source}", path = path.display())]
    OtherOptimizer {
        /// The checkpoint.
        path: PathBuf,
        /// What doesn't fit.
        source: ResumeError,
    },
    /// Of another model or optimizer, of a recipe that isn't the one that was to go on.
    #[error(
        "{error}\nhint: the recipe isn't that of the checkpoint: {changes}; go on with what was set then, or start anew from its weights with --init"
    )]
    OtherRecipe {
        /// What doesn't fit.
        error: Box<CheckpointError>,
        /// What is set, and what was.
        changes: String,
    },
    /// Of a run whose steps would not be the ones that this run takes.
    #[error(
        "{path}: the checkpoint was made with {what} {then}, and this run has {now}\nhint: {hint}",
        path = path.display()
    )]
    OtherRun {
        /// The checkpoint.
        path: PathBuf,
        /// What differs.
        what: &'static str,
        /// What it was.
        then: u64,
        /// What it is now.
        now: u64,
        /// What to do.
        hint: String,
    },
    /// A part that another rank has written isn't here.
    #[error(
        "{path}: a rank has written its part, and it isn't here: the ranks' folders are on different file systems\nhint: go on with --set train.checkpoint=whole, or with --out in a folder that all nodes share",
        path = path.display()
    )]
    Apart {
        /// The file.
        path: PathBuf,
    },
    /// Another rank couldn't write its part.
    #[error("rank {rank}: {reason}")]
    OfRank {
        /// Which.
        rank: usize,
        /// What it said.
        reason: String,
    },
    /// Another process has gone on with the run while this one stood still.
    #[error(
        "{path}: another process of this run writes checkpoints there since, as this one was taken for lost: it writes none any more",
        path = path.display()
    )]
    TakenOver {
        /// The folder.
        path: PathBuf,
    },
    /// There is something where a checkpoint is to be written.
    #[error("{path}: there is something of this name already\nhint: name another folder", path = path.display())]
    Taken {
        /// The folder.
        path: PathBuf,
    },
    /// The disk takes longer than a run waits for its last checkpoint.
    #[error("{path}: still writing the checkpoint after {} s: the run ends without it", waited.as_secs())]
    Late {
        /// The folder.
        path: PathBuf,
        /// How long the run has waited.
        waited: Duration,
    },
}

/// Its message, which is what a `main` that returns it tells.
impl fmt::Debug for CheckpointError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl CheckpointError {
    /// Whether the one before may be taken instead. A checkpoint that is whole, and not this run's, is no accident; and what can't be
    /// read for a while, as from a server that doesn't answer, or by who may not, isn't broken.
    pub(super) fn is_damage(&self) -> bool {
        use std::io::ErrorKind::{InvalidData, NotFound, UnexpectedEof};
        match self {
            CheckpointError::Io { source, .. } => {
                matches!(source.kind(), NotFound | UnexpectedEof | InvalidData)
            }
            CheckpointError::Broken { .. } => true,
            _ => false,
        }
    }
}
