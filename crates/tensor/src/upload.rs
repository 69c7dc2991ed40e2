//! Values that come to a GPU while it computes, to be tensors later.

use crate::device::{Backend, Device};
use crate::dtype::{DType, bytes_of};
use crate::gpu::Landing;
use crate::shape::Shape;
use crate::tensor::Tensor;
use std::fmt;

/// Values of the host.
#[derive(Clone, Copy, Debug)]
pub enum Values<'a> {
    /// Numbers.
    F32(&'a [f32]),
    /// Whole numbers.
    I64(&'a [i64]),
    /// Bytes.
    U8(&'a [u8]),
}

impl<'a> Values<'a> {
    /// How many, of which type, and their bytes.
    fn parts(self) -> (usize, DType, &'a [u8]) {
        match self {
            Values::F32(values) => (values.len(), DType::F32, bytes_of(values)),
            Values::I64(values) => (values.len(), DType::I64, bytes_of(values)),
            Values::U8(values) => (values.len(), DType::U8, values),
        }
    }
}

/// Values on their way to a GPU.
///
/// They go in the order of a stream of their own, from pinned memory, so while kernels that were given before still run. Dropped, they
/// are nobody's.
#[must_use = "values that nobody takes go up for nothing"]
pub struct Upload {
    device: Device,
    tensors: Vec<(Shape, DType)>,
    /// Where they come to, until they are taken.
    landing: Option<Landing>,
}

impl Device {
    /// Begins to bring these values to the GPU's memory, and doesn't wait: they were copied when this returns. None on a CPU, where
    /// [`Tensor::from_slice`] has nothing to bring. Panics where there are more or fewer than a shape has.
    ///
    /// ```
    /// use phalanx_tensor::{Device, Values};
    /// assert!(Device::cpu(1).upload(&[(Values::F32(&[1.0, 2.0]), [2].into())]).is_none());
    /// ```
    #[track_caller]
    pub fn upload(&self, values: &[(Values<'_>, Shape)]) -> Option<Upload> {
        let Backend::Gpu(engine) = self.backend() else { return None };
        let mut bytes = Vec::with_capacity(values.len());
        let tensors = values.iter().map(|&(values, shape)| {
            let (count, dtype, part) = values.parts();
            assert!(count == shape.count(), "upload: {count} values for shape {shape}");
            bytes.push(part);
            (shape, dtype)
        });
        let tensors = tensors.collect();
        let landing = Some(engine.land(&bytes, self));
        Some(Upload { device: self.clone(), tensors, landing })
    }
}

impl Upload {
    /// The values as tensors of the device, in the order in which they were sent: all that is done with them comes behind their
    /// coming.
    #[track_caller]
    pub fn tensors(mut self) -> Vec<Tensor> {
        let stale = self.tensors.iter().map(|&(shape, dtype)| Tensor::stale(&self.device, shape, dtype));
        let tensors: Vec<Tensor> = stale.collect();
        if let (Backend::Gpu(engine), Some(landing)) = (self.device.backend(), self.landing.take()) {
            engine.take(landing, &tensors);
        }
        tensors
    }
}

impl Drop for Upload {
    fn drop(&mut self) {
        if let (Backend::Gpu(engine), Some(landing)) = (self.device.backend(), self.landing.take()) {
            engine.leave(landing);
        }
    }
}

impl fmt::Debug for Upload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Upload({:?} on {:?})", self.tensors, self.device)
    }
}
