//! Maps that somebody else knows: a step of a computation that leaves this process, say, whose gradient takes the way back.

use crate::op::Op;
use crate::ops::recorded;
use crate::tensor::Tensor;
use std::sync::Arc;

/// A linear map, in both directions.
pub trait Crossing: Send + Sync {
    /// The image of `x`, which is outside of the graph.
    fn forth(&self, x: &Tensor) -> Tensor;

    /// The gradient of `x`, from that of its image.
    fn back(&self, grad: &Tensor) -> Tensor;
}

impl Tensor {
    /// The image of this tensor; its gradient goes back the way that `crossing` knows.
    ///
    /// ```
    /// use phalanx_tensor::{Crossing, DType, Device, Tensor};
    /// use std::sync::Arc;
    ///
    /// struct Twice;
    ///
    /// impl Crossing for Twice {
    ///     fn forth(&self, x: &Tensor) -> Tensor {
    ///         x * 2.0
    ///     }
    ///     fn back(&self, grad: &Tensor) -> Tensor {
    ///         grad * 2.0
    ///     }
    /// }
    ///
    /// let twice: Arc<dyn Crossing> = Arc::new(Twice);
    /// let x = Tensor::ones(&Device::cpu(1), [3], DType::F32).requires_grad();
    /// let grads = x.across(&twice).square().sum_all().backward();
    /// assert_eq!(grads.get(&x).unwrap().to_vec::<f32>(), [8.0; 3]);
    /// ```
    pub fn across(&self, crossing: &Arc<dyn Crossing>) -> Tensor {
        let out = recorded(crossing.forth(&self.detach()), Op::Across, &[self], |_| [None]);
        if let Some(node) = &out.node {
            node.body().crossing = Some(Arc::clone(crossing));
        }
        out
    }
}
