//! A single number that a GPU brings.

use crate::device::{Backend, Device};
use crate::dtype::{DType, with_element};
use crate::tensor::Tensor;
use phalanx_cuda::Pinned;

/// What [`Tensor::item_later`] gives: a number that is here, or will be.
pub struct Later(State);

enum State {
    Here(f64),
    Coming { device: Device, dtype: DType, pinned: Option<Pinned> },
}

impl Later {
    /// A number that is here.
    pub fn here(number: f64) -> Later {
        Later(State::Here(number))
    }

    /// The element of a tensor, on its way to this buffer.
    pub(crate) fn coming(of: &Tensor, pinned: Pinned) -> Later {
        Later(State::Coming { device: of.device().clone(), dtype: of.dtype, pinned: Some(pinned) })
    }

    /// The number, once it is here. Panics as [`Tensor::item`] does.
    #[track_caller]
    pub fn item(mut self) -> f64 {
        let (device, dtype, pinned) = match &mut self.0 {
            State::Here(number) => return *number,
            State::Coming { device, dtype, pinned } => (device, *dtype, pinned.take()),
        };
        let (Backend::Gpu(engine), Some(pinned)) = (device.backend(), pinned) else {
            unreachable!("a number comes from a GPU, and once")
        };
        let number = with_element!(dtype, T => engine.first_of::<T>(pinned).to_f64());
        if number.is_nan() {
            engine.check_indices();
        }
        number
    }
}

impl Drop for State {
    fn drop(&mut self) {
        if let State::Coming { device, pinned, .. } = self
            && let (Backend::Gpu(engine), Some(pinned)) = (device.backend(), pinned.take())
        {
            engine.leave_pinned(pinned);
        }
    }
}
