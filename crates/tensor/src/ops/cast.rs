//! Values in another type.

use crate::dtype::DType;
use crate::graph::Kind;
use crate::kernel;
use crate::op::Op;
use crate::ops::recorded;
use crate::tensor::Tensor;

impl Tensor {
    /// The values in another type of floats, each rounded once, as numbers of their own; this tensor itself if it has that type. Its
    /// gradient comes back in the type of this tensor. To i64 and from it there is no gradient: what is behind the point is cut off, as in
    /// PyTorch, and what is too large is the largest that there is. Panics for bytes.
    #[track_caller]
    pub fn cast(&self, dtype: DType) -> Tensor {
        self.cast_by(dtype, || None)
    }

    /// The same for an operand under autocast, which nobody else sees: a parameter of an arena is rounded to 16 bits once for as long as
    /// its values stay what they are.
    #[track_caller]
    pub(crate) fn lowered(&self, dtype: DType) -> Tensor {
        self.cast_by(dtype, || self.kept_cast(dtype))
    }

    #[track_caller]
    fn cast_by(&self, dtype: DType, kept: impl FnOnce() -> Option<Tensor>) -> Tensor {
        if self.dtype == dtype {
            return self.clone();
        }
        let fits = |dtype: DType| dtype.is_float() || dtype == DType::I64;
        assert!(
            fits(self.dtype) && fits(dtype),
            "cast: from {} to {dtype}: floats and i64 are cast to each other",
            self.dtype
        );
        let out = kept().unwrap_or_else(|| {
            let x = self.detach().dense();
            let out = Tensor::stale_in(x.dense_order(), x.device(), *x.shape(), dtype);
            kernel::copy::convert(&x, &out);
            out
        });
        if !(self.dtype.is_float() && dtype.is_float()) {
            return out;
        }
        recorded(out, Op::Cast(self.dtype), &[self], |_| [None])
    }

    /// What this parameter was rounded to, if it is one.
    fn kept_cast(&self, dtype: DType) -> Option<Tensor> {
        if !dtype.is_half() {
            return None;
        }
        match &self.node.as_ref()?.body().kind {
            Kind::Leaf(Some(slot)) => slot.cast(dtype),
            _ => None,
        }
    }
}
