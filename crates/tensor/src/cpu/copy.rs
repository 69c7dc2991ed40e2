//! Copies between views.

use crate::dtype::{Element, with_element};
use crate::shape::for_each_row;
use crate::tensor::Tensor;

/// Fills `out` with the elements of `from`, which has the same shape and dtype. Either may be any view.
pub(crate) fn copy(from: &Tensor, out: &Tensor) {
    with_element!(out.dtype, T => copy_elements::<T>(from, out));
}

fn copy_elements<T: Element>(from: &Tensor, out: &Tensor) {
    let (source, mut target) = (from.read::<T>(), out.write::<T>());
    for_each_row([&out.geometry, &from.geometry], |[to, at], [to_step, step], n| match (to_step, step) {
        (1, 1) => target[to..to + n].copy_from_slice(&source[at..at + n]),
        (1, 0) => target[to..to + n].fill(source[at]),
        _ => (0..n).for_each(|i| target[to + i * to_step] = source[at + i * step]),
    });
}
