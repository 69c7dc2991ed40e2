//! A few numbers that a GPU brings.

use crate::device::{Backend, Device};
use crate::dtype::{DType, Element, with_element};
use crate::tensor::Tensor;
use phalanx_cuda::Pinned;

/// More bytes than these are waited for: a buffer that is kept for a few would be as large from then on.
pub(crate) const MOST_LATER: usize = 1 << 16;

/// What [`Tensor::item_later`] gives: a number that is here, or will be.
pub struct Later(State);

enum State {
    Here(f64),
    Coming { dtype: DType, coming: Coming },
}

impl Later {
    /// A number that is here.
    pub fn here(number: f64) -> Later {
        Later(State::Here(number))
    }

    /// The element of a tensor, on its way to this buffer.
    pub(crate) fn coming(of: &Tensor, pinned: Pinned) -> Later {
        Later(State::Coming { dtype: of.dtype, coming: Coming::of(of, pinned) })
    }

    /// The number, once it is here. Panics as [`Tensor::item`] does.
    #[track_caller]
    pub fn item(self) -> f64 {
        let (dtype, coming) = match self.0 {
            State::Here(number) => return number,
            State::Coming { dtype, coming } => (dtype, coming),
        };
        let device = coming.device.clone();
        let number = with_element!(dtype, T => coming.first::<T>().to_f64());
        // One of a whole type looks like any other.
        if let (true, Backend::Gpu(engine)) = (number.is_nan() || !dtype.is_float(), device.backend()) {
            engine.check_indices();
        }
        number
    }
}

/// What [`Tensor::to_vec_later`] gives: numbers that are here, or will be.
pub struct LaterVec<T: Element>(States<T>);

enum States<T: Element> {
    Here(Vec<T>),
    Coming { count: usize, coming: Coming },
}

impl<T: Element> LaterVec<T> {
    /// Numbers that are here.
    pub fn here(numbers: Vec<T>) -> LaterVec<T> {
        LaterVec(States::Here(numbers))
    }

    /// The elements of a tensor, on their way to this buffer.
    pub(crate) fn coming(of: &Tensor, pinned: Pinned) -> LaterVec<T> {
        LaterVec(States::Coming { count: of.count(), coming: Coming::of(of, pinned) })
    }

    /// The numbers, once they are here. Panics as [`Tensor::to_vec`] does.
    #[track_caller]
    pub fn to_vec(self) -> Vec<T> {
        match self.0 {
            States::Here(numbers) => numbers,
            States::Coming { count, coming } => {
                let (mut numbers, device) = (vec![T::default(); count], coming.device.clone());
                coming.fill(&mut numbers);
                if let (false, Backend::Gpu(engine)) = (T::DTYPE.is_float(), device.backend()) {
                    engine.check_indices();
                }
                numbers
            }
        }
    }
}

/// A buffer of a GPU's, which goes back to it whatever becomes of what comes there.
struct Coming {
    device: Device,
    pinned: Option<Pinned>,
}

impl Coming {
    fn of(tensor: &Tensor, pinned: Pinned) -> Coming {
        Coming { device: tensor.device().clone(), pinned: Some(pinned) }
    }

    #[track_caller]
    fn first<T: Element>(self) -> T {
        let mut first = [T::default()];
        self.fill(&mut first);
        first[0]
    }

    #[track_caller]
    fn fill<T: Element>(mut self, into: &mut [T]) {
        let (Backend::Gpu(engine), Some(pinned)) = (self.device.backend(), self.pinned.take()) else {
            unreachable!("numbers come from a GPU, and once")
        };
        engine.came(pinned, into);
    }
}

impl Drop for Coming {
    fn drop(&mut self) {
        if let (Backend::Gpu(engine), Some(pinned)) = (self.device.backend(), self.pinned.take()) {
            engine.leave_pinned(pinned);
        }
    }
}
