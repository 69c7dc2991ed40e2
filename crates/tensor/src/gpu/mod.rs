//! Kernels for GPUs, family by family as in `cpu`: functions from tensors to an output that they fill whole. They give the compute
//! stream its work and return (S-STREAM in `storage.rs`); shapes were checked by the op that calls them. Only f32 is computed with.

pub(crate) mod batch_norm;
pub(crate) mod conv;
pub(crate) mod copy;
pub(crate) mod dropout;
pub(crate) mod elementwise;
pub(crate) mod embedding;
mod engine;
mod launch;
pub(crate) mod loss;
pub(crate) mod matmul;
pub(crate) mod norm;
pub(crate) mod pooling;
mod random;
pub(crate) mod reduce;
pub(crate) mod softmax;
mod transfer;

pub(crate) use engine::Engine;
