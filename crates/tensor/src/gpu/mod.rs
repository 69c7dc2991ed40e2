//! Kernels for GPUs, family by family as in `cpu`: functions from tensors to an output that they fill whole. They give the compute
//! stream its work and return (S-STREAM in `storage.rs`); shapes were checked by the op that calls them.
//!
//! What a GPU doesn't do, and panics by name when it is asked to:
//! - computing with f64 ([`launch::check_float`]), which is cast, and summed over ranks; tensors of any type can be copied and filled;
//! - random numbers, and what is done to whole arenas, in other floats than f32;
//! - lending values as slices where they lie: `Arena::flat`, `flat_mut` and the slices of a `Span` are a CPU's;
//!   `Arena::host_span` lends copies.
//!
//! What it does by way of the host, and so waits for: `Tensor::with_slice` and `with_slice_mut`. What it does in more passes than it needs: dropout of whole channels, of a part of
//! a tensor and of views multiplies by a mask that is stored.

pub(crate) mod attention;
pub(crate) mod batch_norm;
pub(crate) mod choice;
pub(crate) mod conv;
pub(crate) mod copy;
pub(crate) mod dropout;
pub(crate) mod elementwise;
pub(crate) mod embedding;
mod engine;
mod landing;
mod launch;
pub(crate) mod loss;
pub(crate) mod matmul;
pub(crate) mod norm;
pub(crate) mod pooling;
mod random;
pub(crate) mod recurrent;
pub(crate) mod reduce;
pub(crate) mod resample;
pub(crate) mod samples;
pub(crate) mod softmax;
mod transfer;
mod update;
mod whole;

pub(crate) use engine::{Engine, succeeded};
pub(crate) use landing::Landing;
