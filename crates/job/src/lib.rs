//! What crosses the border between processes: the environment a worker is given, the messages between a worker and the
//! coordinator, the worker's [`Link`], its [`Pulse`], the rendezvous [`store`] as its clients see it, where a run keeps its files,
//! and when its time is up.
//!
//! No server sockets and no launcher in here: a program that only wants to know its place depends on nothing more.
//!
//! ```
//! use phalanx_job::WorkerEnv;
//! let given = |name: &str| match name {
//!     "RANK" | "LOCAL_RANK" => Some("1".to_owned()),
//!     "WORLD_SIZE" | "LOCAL_WORLD_SIZE" => Some("2".to_owned()),
//!     "MASTER_ADDR" => Some("127.0.0.1".to_owned()),
//!     "MASTER_PORT" => Some("29500".to_owned()),
//!     _ => None,
//! };
//! let env = WorkerEnv::from_variables(given)?.expect("there is a rank");
//! assert_eq!((env.rank.0, env.world_size), (1, 2));
//! # Ok::<(), phalanx_job::Error>(())
//! ```
#![deny(unsafe_code)]

mod agent;
mod drain;
mod env;
mod environ;
mod error;
mod host;
mod link;
mod message;
mod pulse;
mod run_dir;
pub mod slurm;
mod stack;
pub mod store;
mod whereabouts;
mod work;

pub use agent::{
    AGENT_BEAT, AGENT_PURPOSE, AgentLink, End, EndWhy, FIRST_SPARE, FromAgent, MAX_AGENT_FRAME, Mishap, Node,
    NodeStanding, Phase, Return, Seat, Setback, Stage, Standing, StopWhy, Terms, ToAgent, WorkerFailure,
};
pub use drain::{DRAINED, end_time, start_time};
pub use env::{
    MOST_THREADS, SecretSource, Transport, WorkerEnv, check_settings, is_unchecked, names, port_of, wants_tls,
};
pub use environ::{Environ, processes};
pub use error::Error;
pub use host::{CLOCKS_APART, clock_ms, host_name, why_too_far_apart};
pub use link::{Link, MAX_FRAME};
pub use message::{Cause, FromWorker, GoesOn, Notice, Roster, ToWorker};
pub use pulse::{Entered, Look, Monitor, Pulse, Section, Waiting};
pub use run_dir::{Claim, RunDir, run_id};
pub use stack::STACK_SIGNAL;
pub use whereabouts::Whereabouts;
pub use work::Work;
