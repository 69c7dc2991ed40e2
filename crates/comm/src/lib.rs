//! Collectives between the ranks of a group, on plain slices: no tensors, no launcher, usable alone.
//!
//! A [`Group`] is a rank's end of a group. Every collective is a *schedule* first: a list of rounds, made by a pure function
//! of (rank, world size, length), that says which range of the buffer goes to whom and what is done with what comes back. An
//! engine then plays the schedule over a transport: threads of one process, shared memory, or TCP. Blocking calls play it on the calling
//! thread; `start_*` calls return a [`Work`] that is played whenever anyone waits, polls or calls [`Group::progress`].
//!
//! Ranks may be threads (below), or processes, however they were started (`examples/processes.rs`).
//!
//! Rules: the ranks of a group issue the same operations in the same order. Sums have a fixed order, so all ranks get the
//! same bits, run after run. Every wait has a deadline, and an error says which operation waited how long for which ranks.
//! How peers were found is not decided here.
//!
//! Numbers in the memory of GPUs are exchanged by NCCL, from GPU to GPU: a [`GpuGroup`] is made of a group, which brings NCCL's
//! ranks together and looks after them.
//!
//! ```
//! use phalanx_comm::{Group, ReduceOp};
//! std::thread::scope(|scope| {
//!     for group in Group::threads(3) {
//!         scope.spawn(move || {
//!             let mut values = [group.rank().0 as f32, 1.0];
//!             group.all_reduce(&mut values, ReduceOp::Sum).unwrap();
//!             assert_eq!(values, [3.0, 3.0]);
//!         });
//!     }
//! });
//! ```
#![deny(unsafe_code)]

mod buffer;
mod common;
mod dial;
mod door;
mod element;
mod engine;
mod group;
mod guests;
mod lobby;
mod mail;
mod processors;
mod queue;
mod recorder;
mod schedule;
mod siblings;
mod signature;
mod topology;
mod watch;
mod word;
mod work;

mod endpoint;
mod error;
mod flight;
mod gpus;
#[cfg(test)]
mod simulation;
mod trail;
mod transport;

pub use buffer::Buffer;
pub use common::Shared;
pub use element::{Boolean, Element, ElementKind, ReduceOp};
pub use endpoint::{Endpoint, GroupConfig, PeerAddress};
pub use error::{Error, Heard, Pace};
pub use flight::{Flight, Peer, diagnosis};
pub use float8::{F8E4M3, F8E5M2};
pub use gpus::{GpuGroup, GpuTransfer, GpuWork, OfTwo, Unfit, Via};
pub use group::{Batch, Batched, Group, Member, OwnedBatch, Source, Transfer};
pub use half::{bf16, f16};
pub use num_complex::Complex;
pub use phalanx_cuda::nccl::{InGraph, InGraphs};
pub use phalanx_wire::{Deadline, Generation, Rank, Secret};
pub use queue::WaitObserver;
pub use recorder::Record;
pub use schedule::{Algorithm, Choice};
pub use trail::Trail;
pub use work::Work;
