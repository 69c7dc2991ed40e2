//! Rows of all ranks in a program's own loss.

use crate::ranks::Ranks;
use crate::tensor_parallel::Move;
use phalanx_comm::Group;
use phalanx_tensor::{DType, Tensor};

/// The rows of all ranks, rank after rank: of (N, ...) on each, which is of the same shape on all, (N world_size, ...). For a loss that
/// holds each sample against those of the whole step, as contrastive learning does. The gradient of a rank's rows is the sum of what the
/// losses of all ranks make of them, each by the weight that [`Strategy::backward`](crate::Strategy::backward) is told.
///
/// All ranks have to call it, and make the backward pass. A rank that is lost meanwhile fails the group, which the next collective says,
/// as `Strategy::finish` does. On GPUs it goes by way of the host, so it waits for the forward pass, and not for long only where that
/// waits for nobody: not with [`DdpConfig::sync_batch_norm`](crate::DdpConfig::sync_batch_norm) over NCCL.
///
/// Panics if they aren't floats, or a scalar.
///
/// ```
/// use phalanx_comm::Group;
/// use phalanx_parallel::gathered;
/// use phalanx_tensor::{Device, Tensor};
///
/// let rows = std::thread::scope(|scope| {
///     let ranks = Group::threads(2).into_iter().map(|group| {
///         scope.spawn(move || {
///             let own = [group.rank().0 as f32; 2];
///             gathered(&group, &Tensor::from_slice(&Device::cpu(1), &own, [1, 2])).to_vec::<f32>()
///         })
///     });
///     ranks.collect::<Vec<_>>().into_iter().map(|rank| rank.join().unwrap()).collect::<Vec<_>>()
/// });
/// assert_eq!(rows, [[0.0, 0.0, 1.0, 1.0], [0.0, 0.0, 1.0, 1.0]]);
/// ```
#[track_caller]
pub fn gathered(group: &Group, rows: &Tensor) -> Tensor {
    let (shape, dtype) = (rows.shape(), rows.dtype());
    let is_ours = shape.n_dims() > 0 && dtype.is_float() && dtype != DType::F64;
    assert!(is_ours, "gathered: got {dtype} of shape {shape}: rows of float32 or 16 bits would do");
    let crossing = Ranks::of(group.clone()).crossing(Move::Gather, Move::Scatter);
    // As the stretches of one sequence.
    rows.unsqueeze(0).across(&crossing).squeeze(0)
}
