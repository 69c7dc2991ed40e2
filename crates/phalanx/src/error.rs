//! What can end a training program.

use crate::device::DeviceSpec;
use crate::trainer::{BadNumber, Precision};
use phalanx_comm::Rank;
use phalanx_job::Cause;
use phalanx_nn::NotFinite;
use std::fmt;
use thiserror::Error;

/// Why a run failed. Its `Debug` is its message, so that `fn main() -> Result<(), Error>` tells that, with what to do.
#[derive(Error)]
pub enum Error {
    /// Ranks couldn't work together.
    #[error(transparent)]
    Parallel(#[from] phalanx_parallel::Error),
    /// A collective failed.
    #[error(transparent)]
    Comm(#[from] phalanx_comm::Error),
    /// Samples can't be had.
    #[error(transparent)]
    Data(#[from] phalanx_data::Error),
    /// What the run tells can't be kept.
    #[error("{0}")]
    Untold(String),
    /// A data set holds nothing.
    #[error("there are no samples to {what} on\nhint: look at the data set that was given")]
    NoSamples {
        /// `train` or `test`.
        what: &'static str,
    },
    /// The last batch is left out, and there is no other.
    #[error(
        "{samples} samples are less than one batch of {batch_size} for each of {dealt_to}, and train.drop_last leaves smaller batches out\nhint: take a smaller --batch-size, or fewer of them"
    )]
    NoFullBatch {
        /// How many there are.
        samples: usize,
        /// Samples of a batch and rank, or logical shard.
        batch_size: usize,
        /// How many of these there are, in words.
        dealt_to: String,
    },
    /// A batch norm would see a single value.
    #[error(
        "{samples} samples in batches of {batch_size} on {dealt_to}: {which} has 1 sample, of which this model's batch norm sees 1 value per channel, and training needs more than 1\nhint: {hint}"
    )]
    SingleValue {
        /// How many samples an epoch trains on.
        samples: usize,
        /// Samples of a batch and rank, or logical shard.
        batch_size: usize,
        /// How many of these there are, in words.
        dealt_to: String,
        /// Which batches, or parts of them, are too small.
        which: String,
        /// What to do.
        hint: String,
    },
    /// A trainer has logical shards, and what can't be had with them.
    #[error(
        "logical shards can't be had with {what}\nhint: more shards make more passes; else train without them"
    )]
    BesideShards {
        /// What that is.
        what: &'static str,
    },
    /// Something that can't be had where ranks hold only parts.
    #[error(
        "{what} can't be had where the model is shared out among ranks\nhint: take --strategy ddp, or leave it out"
    )]
    BesideSharding {
        /// What was asked for.
        what: &'static str,
    },
    /// A type of numbers that can't be had with something else.
    #[error(
        "train.precision={precision} can't be had with {what}\nhint: train.precision=bfloat16 and float32 can"
    )]
    BesidePrecision {
        /// What products were to be made in.
        precision: Precision,
        /// What it can't be had with.
        what: &'static str,
    },
    /// Statistics over the batch of all ranks, of batches that fall into parts.
    #[error(
        "batch norms can't go by the batch of all ranks where each rank makes its passes in parts on several devices\nhint: leave sync_batch_norm out, or take a rank a device"
    )]
    SharedInParts,
    /// Something goes by evaluations, and there are none.
    #[error("{what} needs test samples, and there are none\nhint: give the trainer a data set to test on")]
    NothingToJudge {
        /// What goes by them.
        what: &'static str,
    },
    /// Accuracy is watched where there is none.
    #[error(
        "the trainer watches the test accuracy, and there is none: it takes a loss of class labels, and targets that are such and not the \
         words of a text\nhint: watch the loss"
    )]
    NoAccuracy,
    /// A GPU can't be used.
    #[error(transparent)]
    Gpu(#[from] phalanx_tensor::Error),
    /// There are fewer GPUs than were asked for.
    #[error(
        "--device {asked}: there is no GPU {number}, there are {present} that this process may see\nhint: {}",
        match asked {
            DeviceSpec::Cuda(None) => "take as many workers as there are GPUs, or --device cuda:0, which all of them share; under Slurm --gpus-per-node says how many there are",
            _ => "GPUs are counted from 0, among those in CUDA_VISIBLE_DEVICES where that is set",
        }
    )]
    NoSuchGpu {
        /// Which.
        number: u32,
        /// What was asked for.
        asked: DeviceSpec,
        /// How many there are.
        present: u32,
    },
    /// Weights can't be read or written.
    #[error(transparent)]
    Weights(#[from] phalanx_nn::WeightError),
    /// Weights belong to another model.
    #[error("{path}: {mismatch}", path = path.display())]
    Mismatch {
        /// The file.
        path: std::path::PathBuf,
        /// What doesn't fit.
        mismatch: phalanx_nn::Mismatch,
    },
    /// Weights have another head than the model.
    #[error(
        "{path}: {mismatch}\nhint: --set model.head={outputs} takes all other weights, and starts the last layer anew",
        path = path.display()
    )]
    OtherHead {
        /// The file.
        path: std::path::PathBuf,
        /// What doesn't fit.
        mismatch: phalanx_nn::Mismatch,
        /// How many outputs the model's last layer has.
        outputs: usize,
    },
    /// A setting of the optimizer makes no sense.
    #[error(transparent)]
    Optimizer(#[from] phalanx_nn::optim::BadValue),
    /// The loss is no number any more.
    #[error(
        "the loss is {loss} at step {step}{}{}\nhint: {}",
        place.as_ref().map_or_else(String::new, |place| format!(", where {place}")),
        sample.as_ref().map_or_else(String::new, |sample| format!("; {sample}")),
        match sample {
            Some(_) => "mend such samples or leave them out of the data, if they aren't meant to be so; else lower the learning rate (optimizer.lr)",
            None => "lower the learning rate (optimizer.lr), clip the gradients (train.clip_norm, in a program Trainer::clip), or look at the data",
        }
    )]
    Diverged {
        /// What this rank's part of it is.
        loss: f64,
        /// When.
        step: u64,
        /// The first number of this rank's samples that is none.
        sample: Option<BadNumber>,
        /// The first weight, buffer or gradient that is none.
        place: Option<NotFinite>,
    },
    /// There is nothing that a step could learn.
    #[error(
        "no label counts of those of step {step}: the loss leaves all labels, or targets, of it out\nhint: take a larger batch, or leave such samples out of the \
         data; train.on_nan=ignore makes such steps with gradients of zero"
    )]
    NoLabelCounts {
        /// When.
        step: u64,
    },
    /// A gradient is no number, where the loss still is one.
    #[error(
        "{}, at step {step}\nhint: lower the learning rate (optimizer.lr), or look at the data of that step",
        place.as_ref().map_or_else(|| "a gradient is no number (train.on_nan=stop says which)".to_owned(), NotFinite::to_string)
    )]
    BadGradient {
        /// When.
        step: u64,
        /// The first one, unless others have taken its place.
        place: Option<NotFinite>,
    },
    /// A file of weights holds what is no number.
    #[error(
        "{path}: {place}: these weights are spoilt\nhint: take weights from before; train.on_nan=ignore loads them all the same",
        path = path.display()
    )]
    SpoiltWeights {
        /// The file.
        path: std::path::PathBuf,
        /// The first one.
        place: NotFinite,
    },
    /// A group of parameters can't be made.
    #[error(transparent)]
    Group(#[from] phalanx_nn::optim::BadGroup),
    /// A rank of [`crate::spawn`] panicked.
    #[error("rank {rank} panicked: {message}")]
    Panicked {
        /// Which.
        rank: usize,
        /// What it said.
        message: String,
    },
    /// A setting of a [`crate::Trainer`] can't be.
    #[error("{name} is {value}: must be {want}")]
    Setting {
        /// Which.
        name: &'static str,
        /// What it is.
        value: String,
        /// What would do.
        want: &'static str,
    },
    /// A rank of [`crate::spawn`] couldn't be started.
    #[error("rank {rank} can't be started: {source}")]
    Thread {
        /// Which.
        rank: usize,
        /// What the system said.
        source: std::io::Error,
    },
    /// A file of the run directory can't be written.
    #[error("{path}: {source}", path = path.display())]
    Io {
        /// The file.
        path: std::path::PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The run can't go on from a checkpoint.
    #[error(transparent)]
    Checkpoint(#[from] crate::checkpoint::CheckpointError),
    /// A rank has another recipe, or other data, than rank 0.
    #[error(
        "rank {rank} would train otherwise than rank 0: {differences}\nhint: give all ranks the same recipe, flags and data, and leave these alone while a run goes on: who takes another's place reads them anew"
    )]
    OtherTraining {
        /// The first that has.
        rank: u32,
        /// What differs, by name.
        differences: String,
    },
    /// Ranks were lost with parts of the model that nobody else has.
    #[error(
        "parts of the model were lost with other workers, and there is no checkpoint to go on from: the run begins again\nhint: take one now and then (train.checkpoint_every)"
    )]
    PartLost,
    /// A rank was lost before the first step, when others had given back some of the values that a program had given.
    #[error(
        "a worker was lost before the first step, and the values that the run was to begin with are gone with it\nhint: give them again, or as Trainer::initial, which is read again"
    )]
    ValuesLost,
    /// The rank couldn't find its place in the run.
    #[error("{0}")]
    Join(String),
    /// The run was asked to end before its time: no failure, but for whoever started the workers no end of theirs either.
    #[error("it was asked to end, and did so after {steps} steps")]
    Interrupted {
        /// How many were made.
        steps: u64,
    },
    /// A rank doesn't see the folder that the run is kept in.
    #[error(
        "rank {rank} on {host} doesn't see {folder} of rank 0 on {first}: that file system isn't shared, and this run, begun again on other nodes, would find none of its checkpoints\nhint: name a folder that all nodes see, as in --out /shared/run, or under Slurm begin there: #SBATCH --chdir=/shared/folder; PHALANX_UNCHECKED=1 begins all the same",
        folder = folder.display()
    )]
    NotShared {
        /// The folder.
        folder: std::path::PathBuf,
        /// The first rank that doesn't see it, and what its node is called.
        rank: usize,
        /// See above.
        host: String,
        /// What the node of rank 0 is called.
        first: String,
    },
    /// A GPU has no memory left for something, in a run that is only rehearsed: elsewhere that is a panic, since nothing goes on.
    #[error("{0}")]
    OutOfMemory(Box<phalanx_tensor::OutOfMemory>),
    /// A recipe asks for something that isn't there.
    #[error("{0}")]
    Recipe(String),
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Error {
    /// Whether this only says that another rank has failed.
    pub fn is_consequence(&self) -> bool {
        use phalanx_comm::Error::{Aborted, PeerLost, Silent};
        matches!(self.comm(), Some(PeerLost { .. } | Silent { .. } | Aborted { .. }))
            || matches!(self, Error::Panicked { .. } | Error::PartLost)
    }

    /// Whose fault it is, as far as this rank knows.
    pub(crate) fn cause(&self) -> Cause {
        use phalanx_parallel::Error::{Cut, Schedule};
        match self {
            Error::PartLost => Cause::PartLost,
            error if error.is_consequence() => Cause::Other,
            Error::Data(error) if error.is_for_good() => Cause::Setting,
            // The same would be asked for again, of the same GPU.
            Error::Gpu(phalanx_tensor::Error::OutOfMemory { .. }) => Cause::Setting,
            Error::Recipe(_)
            | Error::OutOfMemory(_)
            | Error::Untold(_)
            | Error::Setting { .. }
            | Error::Optimizer(_)
            | Error::Group(_)
            | Error::BesideShards { .. }
            | Error::BesideSharding { .. }
            | Error::BesidePrecision { .. }
            | Error::SharedInParts
            | Error::NothingToJudge { .. }
            | Error::OtherTraining { .. }
            | Error::NoAccuracy
            | Error::NoLabelCounts { .. }
            | Error::Mismatch { .. }
            | Error::OtherHead { .. }
            | Error::SpoiltWeights { .. }
            | Error::Parallel(Cut(_) | Schedule(_)) => Cause::Setting,
            _ => Cause::Own,
        }
    }

    /// The rank that gave no sign of life, if that is what happened.
    pub(crate) fn silent(&self) -> Option<Rank> {
        match self.comm() {
            Some(phalanx_comm::Error::Silent { peer, .. }) => Some(*peer),
            _ => None,
        }
    }

    fn comm(&self) -> Option<&phalanx_comm::Error> {
        match self {
            Error::Comm(comm) | Error::Parallel(phalanx_parallel::Error::Comm(comm)) => Some(comm),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_program_ends_with_tells_what_to_do() {
        let error = Error::Diverged { loss: f64::NAN, step: 3, sample: None, place: None };
        let told = format!("{error:?}");
        assert!(told == error.to_string() && told.contains("NaN at step 3\nhint: "), "{told}");
    }
}
