//! What is done to all values of an arena at once, wherever it lies: on a GPU its compute stream is given the work, and nobody waits
//! but who is told a number.

use crate::arena::Arena;
use crate::device::Backend;
use crate::dtype::{Element, with_element};
use crate::gpu::Engine;
use crate::tensor::Tensor;
use std::ops::Range;
use std::slice::from_ref;

impl Arena {
    /// An arena of zeros of the same layout and dtype on the same device.
    pub fn like(&self) -> Arena {
        Arena::new(self.device(), self.dtype(), self.layout())
    }

    /// Overwrites all values with those of `other`. Panics while anyone uses any parameter of this one or writes to one of the
    /// other, if both are one, or unless they have one layout, device and dtype.
    #[track_caller]
    pub fn copy_from(&self, other: &Arena) {
        self.check_alike("copy_from", other);
        match self.device().backend() {
            Backend::Cpu => {
                with_element!(self.dtype(), T => self.flat_mut::<T>().copy_from_slice(&other.flat::<T>()));
            }
            Backend::Gpu(engine) => engine.copy_arena(other, self),
        }
    }

    /// Exchanges all values with those of `other`. Panics as [`Arena::copy_from`] does, and while anyone uses any parameter of either.
    #[track_caller]
    pub fn swap(&self, other: &Arena) {
        self.check_alike("swap", other);
        match self.device().backend() {
            Backend::Cpu => {
                with_element!(self.dtype(), T => self.flat_mut::<T>().swap_with_slice(&mut other.flat_mut::<T>()));
            }
            Backend::Gpu(engine) => engine.swap_arenas(self, other),
        }
    }

    /// Moves every value by its `share` of the way to that of `to`; both hold f32. Panics as [`Arena::copy_from`] does.
    #[track_caller]
    pub fn follow(&self, to: &Arena, share: f32) {
        self.check_alike("follow", to);
        match self.device().backend() {
            Backend::Cpu => {
                let (mut values, to) = (self.flat_mut::<f32>(), to.flat::<f32>());
                values.iter_mut().zip(to.iter()).for_each(|(value, to)| *value += share * (to - *value));
            }
            Backend::Gpu(engine) => engine.follow(self, to, share),
        }
    }

    /// Multiplies all values, which are f32. Panics while anyone uses any parameter.
    #[track_caller]
    pub fn scale(&self, by: f32) {
        self.scale_in(from_ref(&(0..self.layout().len())), by);
    }

    /// The same for the elements of these ranges. Panics as [`Arena::scale`] does, or if the arena doesn't have them.
    #[track_caller]
    pub fn scale_in(&self, ranges: &[Range<usize>], by: f32) {
        self.check_ranges("scale_in", ranges);
        match self.device().backend() {
            Backend::Cpu => {
                let mut all = self.flat_mut::<f32>();
                ranges.iter().for_each(|range| all[range.clone()].iter_mut().for_each(|value| *value *= by));
            }
            Backend::Gpu(engine) => engine.scale(self, ranges, by),
        }
    }

    /// Whether all values, which are f32, are finite numbers, padding included.
    #[track_caller]
    pub fn is_finite(&self) -> bool {
        self.is_finite_in(from_ref(&(0..self.layout().len())))
    }

    /// Whether the elements of these ranges are. Panics if the arena doesn't have them.
    #[track_caller]
    pub fn is_finite_in(&self, ranges: &[Range<usize>]) -> bool {
        self.check_ranges("is_finite_in", ranges);
        match self.device().backend() {
            // Without a branch a number, so that it runs as fast as memory is read.
            Backend::Cpu => {
                let all = self.flat::<f32>();
                let no_number =
                    |block: &[f32]| block.iter().fold(false, |any, value| any | !value.is_finite());
                !ranges.iter().any(|range| all[range.clone()].chunks(BLOCK).any(no_number))
            }
            Backend::Gpu(engine) => engine.is_finite(self, ranges),
        }
    }

    /// On a GPU: the norm of all values, which are f32, a single f64 that nobody waits for. The order in which squares are added up is
    /// decided by how many they are. Panics on a CPU, where values are slices, and while anyone writes to a parameter.
    #[track_caller]
    pub fn norm(&self) -> Tensor {
        self.engine("norm").norm(self)
    }

    /// The sum of the squares of these elements, which are f32, in float64. On a GPU their order is decided by how many they are, and
    /// whoever asks waits for it.
    #[track_caller]
    pub fn sum_of_squares(&self, ranges: &[Range<usize>]) -> f64 {
        self.check_ranges("sum_of_squares", ranges);
        match self.device().backend() {
            Backend::Cpu => {
                let all = self.flat::<f32>();
                let square = |&x: &f32| f64::from(x) * f64::from(x);
                ranges.iter().map(|range| all[range.clone()].iter().map(square).sum::<f64>()).sum()
            }
            Backend::Gpu(engine) => engine.sum_of_squares(self, ranges),
        }
    }

    /// Makes each value, which is f32, at most `limit` large. Panics while anyone uses any parameter.
    #[track_caller]
    pub fn clip_value(&self, limit: f32) {
        self.clip_value_in(from_ref(&(0..self.layout().len())), limit);
    }

    /// The same for the elements of these ranges. Panics as [`Arena::clip_value`] does, or if the arena doesn't have them.
    #[track_caller]
    pub fn clip_value_in(&self, ranges: &[Range<usize>], limit: f32) {
        self.check_ranges("clip_value_in", ranges);
        match self.device().backend() {
            Backend::Cpu => {
                let mut all = self.flat_mut::<f32>();
                let cut = |value: &mut f32| *value = value.clamp(-limit, limit);
                ranges.iter().for_each(|range| all[range.clone()].iter_mut().for_each(cut));
            }
            Backend::Gpu(engine) => engine.clip_value(self, ranges, limit),
        }
    }

    /// A copy of the whole arena, as [`Arena::read_flat`] gives it, in memory that is used again.
    #[track_caller]
    pub fn read_into<T: Element>(&self, into: &mut Vec<T>) {
        match self.device().backend() {
            Backend::Cpu => {
                into.clear();
                into.extend_from_slice(&self.flat::<T>());
            }
            Backend::Gpu(engine) => {
                let _held = self.hold::<T>();
                into.resize(self.layout().len(), T::default());
                engine.download_into(self.memory(), 0, into);
            }
        }
    }

    /// Copies elements `range` of the arena, padding included, to `into`: no others leave a GPU. Panics while any parameter is
    /// being written, if `T` isn't the arena's dtype, or if the range and `into` aren't of one length within the arena.
    #[track_caller]
    pub fn read_elements<T: Element>(&self, range: Range<usize>, into: &mut [T]) {
        self.check_elements("read_elements", &range, into.len());
        match self.device().backend() {
            Backend::Cpu => into.copy_from_slice(&self.flat::<T>()[range]),
            Backend::Gpu(engine) => {
                let _held = self.hold::<T>();
                engine.download_into(self.memory(), range.start * T::DTYPE.bytes(), into);
            }
        }
    }

    /// Overwrites elements `range` of the arena, padding included: no others go to a GPU. Panics while anyone uses any parameter, and
    /// as [`Arena::read_elements`] does.
    #[track_caller]
    pub fn write_elements<T: Element>(&self, range: Range<usize>, values: &[T]) {
        self.check_elements("write_elements", &range, values.len());
        let mut span = self.flat_mut::<T>();
        match self.device().backend() {
            Backend::Cpu => span[range].copy_from_slice(values),
            Backend::Gpu(engine) => engine.upload(values, self.memory(), range.start * T::DTYPE.bytes()),
        }
    }

    #[track_caller]
    fn check_ranges(&self, op: &str, ranges: &[Range<usize>]) {
        let len = self.layout().len();
        let outside = ranges.iter().find(|range| range.start > range.end || range.end > len);
        assert!(outside.is_none(), "{op}: elements {outside:?} of an arena of {len}");
    }

    #[track_caller]
    fn check_elements(&self, op: &str, range: &Range<usize>, values: usize) {
        let len = self.layout().len();
        assert!(
            range.len() == values && range.end <= len,
            "{op}: {values} values for elements {range:?} of an arena of {len}"
        );
    }

    #[track_caller]
    fn engine(&self, op: &str) -> &Engine {
        match self.device().backend() {
            Backend::Cpu => {
                panic!("{op}: the arena lies on a CPU, where its values are slices: flat_mut lends them")
            }
            Backend::Gpu(engine) => engine,
        }
    }

    #[track_caller]
    fn check_alike(&self, op: &str, other: &Arena) {
        let alike = self.layout() == other.layout()
            && self.device() == other.device()
            && self.dtype() == other.dtype();
        assert!(alike, "{op}: arenas of different layouts, devices or dtypes");
    }
}

/// Values of which it is told together whether they are numbers.
const BLOCK: usize = 1024;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DType, Device, Layout};

    #[test]
    fn whole_arenas_are_copied_exchanged_and_moved() {
        let layout = Layout::new(&[[2].into(), [1].into()]);
        let first = |arena: &Arena| arena.flat::<f32>()[0];
        let a = Arena::new(&Device::cpu(1), DType::F32, &layout);
        a.tensor(0).fill(4.0);
        let b = a.like();
        assert_eq!(b.tensor(0).to_vec::<f32>(), [0.0; 2]);
        b.follow(&a, 0.25);
        assert_eq!((b.tensor(0).to_vec::<f32>(), b.tensor(1).item()), (vec![1.0; 2], 0.0));
        b.swap(&a);
        assert_eq!((first(&a), first(&b)), (1.0, 4.0));
        a.copy_from(&b);
        assert_eq!(first(&a), 4.0);
        assert!(a.is_finite());
        a.scale(0.5);
        assert_eq!(a.tensor(0).to_vec::<f32>(), [2.0; 2]);
        a.tensor(1).fill(f64::NEG_INFINITY);
        assert!(!a.is_finite());
    }
}
