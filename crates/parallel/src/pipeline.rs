//! Pipelines: a model as a row of stages on several ranks or devices, and a batch that goes through it in parts.
//!
//! What is done when is a [`Schedule`], a plain list that can be checked ([`check`]), timed ([`Timeline`]) and drawn ([`chart`])
//! without computing anything. [`Pipelined`] carries it out on the devices of one process, [`RankPipeline`] on the ranks of a group.

pub mod chart;
mod check;
mod cut;
mod devices;
mod lanes;
mod parts;
mod ranks;
mod schedule;
mod stage;
mod timeline;

pub use check::{Fault, Played, check};
pub use cut::{BlockCost, CutError, cut, measure};
pub use devices::{PipelineConfig, Pipelined};
pub use parts::{micro_batches, parts};
pub use ranks::RankPipeline;
pub use schedule::{Action, Schedule, ScheduleError, ScheduleKind, Shape, Times, Work};
pub use stage::{MicroBatch, Ran};
pub use timeline::{Done, Timeline};

#[cfg(test)]
mod tests;
