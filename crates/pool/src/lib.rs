//! Who may run: the slots of a pool's nodes, shared out among the queues of teams.
//!
//! Each [`Queue`] has a quota, which is its own, and lends what it doesn't use; what all quotas leave over is shared by weight. A
//! job is a run of agents, from as few as it needs to as many as it can use, of one or several slots each. When another
//! job is owed slots, jobs that can shrink do so at the end of a step, and only if that isn't enough one is stopped, to go on
//! later. What is decided, and why each job waits, is a pure function of queues, nodes and jobs (`schedule.rs`); a
//! state machine around it (`pool.rs`) knows what has happened; a [`Server`] has sockets and a journal, so that it may end at any
//! time and begin again; nodes ([`run_node`]) start and stop agents, which go on while the pool is away.
//!
//! It knows nothing of what agents do, nor how they are started: that is the caller's.
//!
//! ```
//! use phalanx_pool::{Answer, Ask, Client, Server, ServerConfig, default_queues};
//! use phalanx_wire::Secret;
//! # let folder = tempfile::tempdir()?;
//! let secret = Secret::random()?;
//! let server = Server::open(ServerConfig {
//!     listen: "127.0.0.1:0".parse()?,
//!     secret: secret.clone(),
//!     queues: default_queues(),
//!     folder: folder.path().to_owned(),
//!     say: Box::new(|line| eprintln!("{line}")),
//! })?;
//! let (address, stopper) = (server.address(), server.stopper());
//! let asker = std::thread::spawn(move || {
//!     let answer = Client::dial(address, &secret).and_then(|client| client.ask(&Ask::Show { job: None }));
//!     stopper.stop();
//!     answer
//! });
//! server.run()?;
//! let Answer::Shown(shown) = asker.join().unwrap()? else { panic!("it shows how it is") };
//! assert_eq!((shown.queues.len(), shown.nodes.len(), shown.jobs.len()), (1, 0, 0));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![forbid(unsafe_code)]

mod client;
mod error;
mod job;
mod journal;
mod message;
mod node;
mod pool;
mod queues;
mod schedule;
mod server;
mod share;

pub use client::Client;
pub use error::Error;
pub use job::{AgentId, End, Ending, JobId, JobSpec};
pub use journal::JournalError;
pub use message::{Answer, Ask, Shown, ShownJob, ShownNode, ShownQueue, ShownState, Start};
pub use node::{AgentCommand, Leaver, NodeConfig, run_node};
pub use queues::{Queue, Queues, QueuesError, check_name, default_queues, read_queues};
pub use schedule::Why;
pub use server::{Server, ServerConfig, Stopper};
