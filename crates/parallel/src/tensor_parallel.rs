//! Tensor parallel: ranks that each hold a part of every matrix, and compute a part of every product.
//!
//! Two layers in a row are cut together: the first by its outputs, so that each rank has some of what lies between them, and the
//! second by its inputs, so that what ranks come to only has to be added up (Shoeybi et al., "Megatron-LM",
//! <https://arxiv.org/abs/1909.08053>). An attention is such a pair with whole heads between; a table of words is cut by its rows,
//! and the logits, which multiply with the same table, and their cross entropy by words. Two convolutions are such a pair with the batch
//! norm between them, each of whose channels, with their statistics, is one rank's.
//!
//! Layers know nothing of it. A [`Plan`] says, as data, which of them is cut how; it has [`phalanx_nn::Parameters`] lay out parts, and
//! puts maps at the seams of the layers ([`phalanx_nn::Seam`]) that add up or bring together, forward or backward
//! (`crates/parallel/src/tensor_parallel/crossing.rs`).
//!
//! What lies between such pairs, norms, dropout and sums, is computed by every rank alike; with [`Between::Sequence`] each rank has a
//! stretch of each sequence there in its place (Korthikanti et al., <https://arxiv.org/abs/2205.05198>). Sums over ranks then become
//! sums of which each rank takes its stretch, and gathering the stretches goes before each pair, so no more is sent.
//!
//! Invariants:
//! - **T-SAME**: what isn't cut is the same bits on all ranks of the group, values as well as gradients once a step's are whole.
//! - **T-ORDER**: all ranks of the group come to the same sums in the same order, forward and backward, as their graphs are alike.
//! - **T-MASK**: masks of dropout are those of the whole model, of which each rank takes the part that it has.

mod cross_entropy;
mod crossing;
mod plan;

pub(crate) use cross_entropy::cross_entropy_in_parts;
pub(crate) use crossing::Move;
pub use plan::{Between, Plan, PlanError, Style};
