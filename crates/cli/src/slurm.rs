//! `phalanx slurm`: submit a run as a job, follow it, and look through batch scripts.

mod flags;
mod follow;
mod lint;
mod submit;

pub(crate) use flags::SlurmArgs;
pub(crate) use follow::wait_for;

use anyhow::Result;
use flags::Slurm;

pub(crate) fn slurm(args: &SlurmArgs) -> Result<u8> {
    match &args.what {
        Slurm::Submit(args) => submit::submit(args),
        Slurm::Follow { job, cancel, json } => follow::job(job, 0, *cancel, *json),
        Slurm::Lint { file, json } => lint::lint(file, *json),
    }
}
