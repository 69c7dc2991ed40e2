//! Values on a GPU, lent to whoever works on them there beside the compute stream: for ranks that exchange activations and their
//! gradients from GPU to GPU.

use crate::device::Device;
use crate::dtype::DType;
use crate::gpu_span::number;
use crate::shape::Shape;
use crate::tensor::Tensor;
use phalanx_cuda::nccl::{Block, Lent};

/// A row-major tensor on a GPU that nobody else has a handle to.
pub struct GpuTensor(Tensor);

impl Tensor {
    /// A copy of the values to lend out; none of a tensor on a CPU.
    pub fn to_lend(&self) -> Option<GpuTensor> {
        self.device().gpu().map(|_| GpuTensor(self.copied()))
    }

    /// The values to lend out, where they lie if they lie in rows and nobody else sees them there; none of a tensor on a CPU.
    pub fn lend(self) -> Option<GpuTensor> {
        self.device().gpu()?;
        let own = if self.geometry.is_contiguous() { self } else { self.contiguous() };
        // Not with what made it, which would not be that of what becomes of it.
        Some(GpuTensor(Tensor { node: None, ..own }.into_own()))
    }

    /// Room for `parts` tensors like this one, (parts, ...), to lend out, with this one's values in the place of part `own`; what
    /// is in the others means nothing. None of a tensor on a CPU. Panics if there is no such part.
    #[track_caller]
    pub fn to_lend_among(&self, parts: usize, own: usize) -> Option<GpuTensor> {
        self.device().gpu()?;
        let shape = [&[parts], self.dims()].concat();
        let all = Tensor::stale(self.device(), Shape::from(shape.as_slice()), self.dtype());
        all.narrow(0, own, 1).copy_from(&self.detach().unsqueeze(0));
        Some(GpuTensor(all))
    }
}

impl GpuTensor {
    /// Room for values, whose memory holds whatever it held. None on a CPU.
    pub fn stale(device: &Device, shape: impl Into<Shape>, dtype: DType) -> Option<GpuTensor> {
        device.gpu().map(|_| GpuTensor(Tensor::stale(device, shape.into(), dtype)))
    }

    /// Zeros of the same shape, which are made when they are asked for.
    pub fn zeros_like(&self) -> impl FnOnce() -> Tensor + use<> {
        let (device, shape, dtype) = (self.0.device().clone(), *self.0.shape(), self.0.dtype());
        move || Tensor::zeros(&device, shape, dtype)
    }

    /// What became of the values.
    pub fn into_tensor(self) -> Tensor {
        self.0
    }
}

// SAFETY: there is no other handle to its buffer, so nobody else gives a stream work on it while it is lent, and it was given the
// compute stream's work before (S-STREAM). The buffer goes back to its cache with this value, behind which the compute stream
// waits for whoever had it.
unsafe impl Lent for GpuTensor {
    fn block(&self) -> Block {
        let Tensor { storage, geometry, dtype, .. } = &self.0;
        let number = number(*dtype);
        let at = storage.write_on_gpu().at.plus(geometry.offset * number.bytes());
        Block { at, count: self.0.count(), number }
    }
}
