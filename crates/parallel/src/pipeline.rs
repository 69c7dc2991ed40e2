//! Pipelines: a model as a row of stages on several ranks or devices, and a batch that goes through it in parts.
//!
//! What is done when is a [`Schedule`], a plain list that can be checked ([`check`]), timed ([`Timeline`]) and drawn ([`chart`])
//! without computing anything.

pub mod chart;
mod check;
mod schedule;
mod timeline;

pub use check::{Fault, Played, check};
pub use schedule::{Action, Schedule, ScheduleError, ScheduleKind, Shape, Times, Work};
pub use timeline::{Done, Timeline};

#[cfg(test)]
mod tests;
