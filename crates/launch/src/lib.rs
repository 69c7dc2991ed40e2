//! The processes of a run on one machine: started, watched, stopped, reported. It supervises any program.
//!
//! [`run`] starts the workers, writes their output down and passes it on, and returns when all have ended. The first worker
//! that fails ends the others: SIGTERM, a grace period, SIGKILL; then all are started again, as the next generation, if the run
//! has restarts left. Signals to this process reach the workers. A worker that makes no progress for too long is killed, which
//! is a failure like any other. Nothing is polled but the workers' pulses, a few loads four times a second: every exit, every
//! signal and every notice arrives through one queue, which the supervising thread alone empties and where nothing holds it up;
//! lines and reports go to the console on threads of their own. What it doesn't decide: what is shown, and how; that is the
//! caller's, who is handed [`Report`]s.
#![forbid(unsafe_op_in_unsafe_fn)]

mod agent;
mod crew;
mod nodes;
mod report;
mod spec;
mod supervise;
mod watch;

mod blame;
mod console;
mod ending;
mod foreground;
mod full;
mod given;
mod guard;
mod hang;
mod news;
mod numa;
mod output;
mod prefix;
mod restart;
mod said;
pub mod shell;
mod signals;
pub mod slurm;
mod stack;
mod stamp;
mod worker;

pub use given::inherited_file;
pub use hang::HangLimits;
pub use nodes::{Nodes, Patience};
pub use numa::{Numa, NumaBinding};
pub use output::{Console, Streams};
pub use prefix::Prefix;
pub use report::{Failure, Outcome, Report, Who};
pub use restart::EndReason;
pub use signals::EndingSignals;
pub use spec::{LaunchError, LaunchSpec, LocalRank, MAX_GRACE, MOST_WORKERS, THIS_PROGRAM};
pub use stamp::LogTimes;
pub use supervise::run;
pub use worker::end_with_caller;
