//! Cross entropy of scores of which each rank has those of some classes. Nobody sees the scores of all: ranks tell each other the
//! largest of each row, the sum of its exponentials, and the score of its label.

use super::crossing::Move;
use crate::ranks::Ranks;
use phalanx_comm::ReduceOp;
use phalanx_tensor::{DType, Keep, Tensor};

/// The mean cross entropy of `scores` (N, C / n), which are those of this rank's classes, with labels (N) among all C. Every rank comes
/// to the same value; its gradient goes to the scores that it has. Scores of 16 bits are taken in float32, as any loss takes them.
#[track_caller]
pub(crate) fn cross_entropy_in_parts(
    ranks: &Ranks,
    scores: &Tensor,
    labels: &Tensor,
    label_smoothing: f64,
) -> Tensor {
    let scores = &if scores.dtype().is_half() { scores.cast(DType::F32) } else { scores.clone() };
    let (width, all) = (scores.dims()[1], scores.dims()[1] * ranks.count());
    // The ranks' sums, of which each has the whole: so a gradient of it is one of each part already.
    let together = ranks.crossing(Move::Sum, Move::Keep);
    let sum = |x: &Tensor| x.sum(&[1], Keep::No).across(&together); // (N)
    let largest = ranks.reduced(&scores.detach().max(1, Keep::Yes), ReduceOp::Max); // (N, 1)
    let shifted = scores - largest;
    let first = ranks.rank() * width;
    let is_label = labels.one_hot(first..first + width, all, DType::F32);
    let picked = sum(&(&shifted * is_label));
    let rows = sum(&shifted.exp()).ln();
    let loss = if label_smoothing == 0.0 {
        rows - picked
    } else {
        rows - picked * (1.0 - label_smoothing) - sum(&shifted) * (label_smoothing / all as f64)
    };
    loss.mean_all()
}

#[cfg(test)]
mod tests {
    use super::*;
    use phalanx_comm::Group;
    use phalanx_tensor::{DType, Device, Philox};

    /// Float32 sums in another order.
    const TOLERANCE: f64 = 1e-6;

    #[test]
    fn parts_of_the_classes_come_to_the_loss_and_the_gradient_of_all() {
        let (n, classes) = (5, 12);
        let device = Device::cpu(1);
        let scores = Tensor::uniform(&device, [n, classes], -9.0, 9.0, DType::F32, Philox::new(1, 2));
        let labels = Tensor::from_slice(&device, &[0i64, 11, 5, 6, 3], [n]);
        for smoothing in [0.0, 0.2] {
            let whole = scores.detach().requires_grad();
            let want = whole.cross_entropy(&labels, smoothing);
            let want_grad = want.backward().get(&whole).unwrap().clone();
            for parts in [1, 2, 3, 4] {
                std::thread::scope(|scope| {
                    for group in Group::threads(parts) {
                        let (scores, labels, want, want_grad) = (&scores, &labels, &want, &want_grad);
                        scope.spawn(move || {
                            let ranks = Ranks::of(group);
                            let (start, width) = (ranks.rank() * classes / parts, classes / parts);
                            let own = scores.narrow(1, start, width).contiguous().requires_grad();
                            let loss = cross_entropy_in_parts(&ranks, &own, labels, smoothing);
                            assert!((loss.item() - want.item()).abs() < TOLERANCE * want.item().abs());
                            let grad = loss.backward().get(&own).unwrap().to_vec::<f32>();
                            let want = want_grad.narrow(1, start, width).to_vec::<f32>();
                            let close = |(a, b): (&f32, &f32)| f64::from((a - b).abs()) < TOLERANCE;
                            assert!(grad.iter().zip(&want).all(close), "{grad:?}, not {want:?}");
                        });
                    }
                });
            }
        }
    }
}
