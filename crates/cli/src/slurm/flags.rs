//! What can be typed behind `phalanx slurm`.

use crate::drain;
use crate::work::WorkArgs;
use clap::{Args, Subcommand};
use std::path::PathBuf;
use std::time::Duration;

/// `phalanx slurm`.
#[derive(Args)]
pub(crate) struct SlurmArgs {
    #[command(subcommand)]
    pub(crate) what: Slurm,
}

/// What can be done with Slurm.
#[derive(Subcommand)]
pub(crate) enum Slurm {
    /// Write the batch script of a run, submit it, and follow the job.
    ///
    /// The job ends in time for a checkpoint when its time is up or the machine is wanted back, has itself requeued, and goes on
    /// from there.
    Submit(Box<SubmitArgs>),
    /// Follow a job: why it waits, where its output is, how far it is.
    Follow {
        /// Its number.
        job: String,
        /// Cancel it on Ctrl-C, which otherwise ends only this view.
        #[arg(long)]
        cancel: bool,
        /// Print one JSON object a line on standard output.
        #[arg(long)]
        json: bool,
    },
    /// Find the classic mistakes of distributed training in a batch script, each with the line to write instead.
    Lint {
        /// The script.
        file: PathBuf,
        /// Print one JSON object a line on standard output.
        #[arg(long)]
        json: bool,
    },
}

/// `phalanx slurm submit`.
#[derive(Args)]
pub(crate) struct SubmitArgs {
    /// Nodes.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(crate) nodes: u32,
    /// GPUs of each node, with a worker for each; a recipe computes on them unless it has --device cpu.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) gpus_per_node: u32,
    /// Workers of each node, as in `phalanx run` [default: one a GPU, or 1].
    #[arg(long, value_name = "N")]
    pub(crate) nproc_per_node: Option<String>,
    /// Cores of each node, which the workers share [default: whole nodes].
    #[arg(long, value_name = "N")]
    pub(crate) cpus_per_node: Option<u32>,
    /// How long each start of the job may take, as in 30m, 8h or 2d [default: the partition's limit].
    #[arg(long, value_name = "TIME", value_parser = drain::duration)]
    pub(crate) time: Option<Duration>,
    /// Where it is queued [default: the cluster's default].
    #[arg(long, value_name = "NAME")]
    pub(crate) partition: Option<String>,
    /// Take from MIN to MAX nodes, and go on when some are lost.
    #[arg(long, value_name = "MIN:MAX", conflicts_with = "nodes")]
    pub(crate) elastic: Option<String>,
    /// Take so many nodes more, which stand by: one of them takes the place of one that is lost.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) spares: u32,
    /// Many jobs that are alike, by number, as in 0-15 or 1-9%3; a recipe is trained with the number as its seed unless --seed is
    /// given.
    #[arg(long, value_name = "NUMBERS")]
    pub(crate) array: Option<String>,
    /// What the job is called [default: the recipe or program].
    #[arg(long, value_name = "NAME")]
    pub(crate) name: Option<String>,
    /// Where the run keeps its files [default: runs/NAME-JOB].
    #[arg(long, value_name = "DIR")]
    pub(crate) out: Option<String>,
    /// How often workers that fail are started again.
    #[arg(long, value_name = "N", default_value_t = 3)]
    pub(crate) max_restarts: usize,
    /// Any other option of sbatch, as in --sbatch=--account=lab; may be given often.
    #[arg(long, value_name = "OPTION", allow_hyphen_values = true)]
    pub(crate) sbatch: Vec<String>,
    /// Print the script, and do nothing.
    #[arg(long)]
    pub(crate) dry_run: bool,
    /// Don't follow the job.
    #[arg(long)]
    pub(crate) no_follow: bool,
    /// Cancel the job on Ctrl-C, which otherwise ends only the view.
    #[arg(long, conflicts_with = "no_follow")]
    pub(crate) cancel: bool,
    #[command(flatten)]
    pub(crate) typed: WorkArgs,
}
