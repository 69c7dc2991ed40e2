//! Runs as jobs of Slurm: the script of one, what is wrong with one that somebody wrote, and what the controller says of it.
//!
//! Scripts and judgements are pure functions; only [`queue`] asks Slurm. What it doesn't decide: how any of it is shown.

pub mod lint;
pub mod queue;
mod script;

pub use script::{Submission, run_dir, script};
