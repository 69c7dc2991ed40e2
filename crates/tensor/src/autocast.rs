//! Regions in which products are made in a float of 16 bits, while all else is computed as it would be: see [`autocast`].
//!
//! Backward passes compute each gradient in the type that the operation had, whatever region they are made in.

use crate::dtype::DType;
use crate::graph::with_set;
use crate::tensor::Tensor;
use std::cell::Cell;

thread_local! {
    /// The type of this thread's products: ambient as recording is, and for the same reason.
    static PRODUCTS: Cell<DType> = const { Cell::new(DType::F32) };
}

/// Runs `f`, whose products of f32 are made in `dtype`: bf16 or f16, or as ever with f32. Panics if it is none of these.
///
/// What is done in which type goes by PyTorch's lists: matrix products, dense layers, convolutions and attention take their inputs in this
/// type; powers, exponentials and logarithms, sums, softmax, layer norms and losses take theirs in f32; everything else computes in the
/// type of what it is given, and where two types meet in f32. Batch norms give what they were given, with statistics and weights in f32.
/// Parameters stay in f32, and so do their gradients.
///
/// ```
/// use phalanx_tensor::{DType, Device, Tensor, autocast};
///
/// let device = Device::cpu(1);
/// let w = Tensor::full(&device, [1, 2], 1.001, DType::F32).requires_grad();
/// let x = Tensor::ones(&device, [1, 2], DType::F32);
/// let y = autocast(DType::BF16, || x.linear(&w, None));
/// assert_eq!((y.dtype(), y.item()), (DType::BF16, 2.0));
/// assert_eq!(y.backward().get(&w).unwrap().dtype(), DType::F32);
/// ```
#[track_caller]
pub fn autocast<R>(dtype: DType, f: impl FnOnce() -> R) -> R {
    assert!(
        dtype == DType::F32 || dtype.is_half(),
        "autocast: products in {dtype}: f32, bf16 or f16 would do"
    );
    with_set(&PRODUCTS, dtype, f)
}

/// What products of f32 are made in by this thread: for who goes on with a region's work in another.
pub fn autocast_dtype() -> DType {
    PRODUCTS.get()
}

/// The type that a product takes these in, where one of them has another: tensors of f64 stay what they are.
pub(crate) fn lowers<'a>(tensors: impl IntoIterator<Item = &'a Tensor>) -> Option<DType> {
    let dtype = PRODUCTS.get();
    if dtype == DType::F32 {
        return None;
    }
    let (mut differs, mut casts) = (false, true);
    for tensor in tensors {
        differs |= tensor.dtype != dtype;
        casts &= tensor.dtype == DType::F32 || tensor.dtype.is_half();
    }
    (differs && casts).then_some(dtype)
}

impl Tensor {
    /// Whether a region wants this tensor in f32, where an operation would lose too much in its type.
    pub(crate) fn is_raised(&self) -> bool {
        self.dtype.is_half() && PRODUCTS.get() != DType::F32
    }

    /// In f32 if it is of 16 bits.
    pub(crate) fn widened(&self) -> Tensor {
        if self.dtype.is_half() { self.cast(DType::F32) } else { self.clone() }
    }
}
