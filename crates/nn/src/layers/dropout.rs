//! Dropout layers: they act in training only.

use crate::module::{Ctx, Module, Visitor};
use crate::seam::Seam;
use phalanx_tensor::{DropoutKey, Tensor};

/// Zeroes each element with this probability and divides the rest by one minus it.
///
/// ```
/// use phalanx_nn::{Ctx, Dropout, Module};
/// use phalanx_tensor::{DType, Device, Tensor};
///
/// let x = Tensor::ones(&Device::cpu(1), [2, 3], DType::F32);
/// // Samples 7 and 9 of the data set, in step 5 of the run with seed 0.
/// let y = Dropout::new(0.5).forward(&x, &mut Ctx::train(0, 5, [7, 9].into()));
/// assert!(y.to_vec::<f32>().iter().all(|&v| v == 0.0 || v == 2.0));
/// let y = Dropout::new(0.5).forward(&x, &mut Ctx::eval());
/// assert_eq!(y.to_vec::<f32>(), [1.0; 6]);
/// ```
pub struct Dropout {
    p: f64,
    seam: Seam,
}

impl Dropout {
    /// With probability `p`, at least 0 and less than 1. Panics with another.
    #[track_caller]
    pub fn new(p: f64) -> Dropout {
        assert!((0.0..1.0).contains(&p), "dropout: p must lie in [0, 1), got {p}");
        Dropout { p, seam: Seam::default() }
    }
}

impl Module for Dropout {
    fn forward(&self, x: &Tensor, ctx: &mut Ctx) -> Tensor {
        if !ctx.training() {
            return x.clone();
        }
        let key = ctx.dropout_key();
        x.dropout(self.p, &DropoutKey { within: self.seam.within.or(key.within), ..key })
    }

    fn visit(&mut self, v: &mut Visitor<'_>) {
        v.seam("", &mut self.seam);
    }
}

/// Zeroes each channel of an image as a whole with this probability and divides the rest by one minus it.
///
/// ```
/// use phalanx_nn::{Ctx, Dropout2d, Module};
/// use phalanx_tensor::{DType, Device, Tensor};
///
/// let x = Tensor::ones(&Device::cpu(1), [1, 2, 2, 2], DType::F32);
/// let y = Dropout2d(0.5).forward(&x, &mut Ctx::train(0, 5, [7].into())).to_vec::<f32>();
/// assert!([[0.0; 4], [2.0; 4]].contains(&y[..4].try_into().unwrap()));
/// ```
pub struct Dropout2d(pub f64);

impl Module for Dropout2d {
    fn forward(&self, x: &Tensor, ctx: &mut Ctx) -> Tensor {
        if ctx.training() { x.dropout2d(self.0, &ctx.dropout_key()) } else { x.clone() }
    }

    fn visit(&mut self, _: &mut Visitor<'_>) {}
}
