//! In which numbers a run computes, and the scale of its loss where gradients would be too small for them.
//!
//! Weights, their gradients and the optimizer's state are float32 in any case. With [`Precision::Bfloat16`] and
//! [`Precision::Float16`] products are made in these, as [`phalanx_tensor::autocast`] says, and the rest in float32.
//!
//! Float16 has no numbers below 6e-8, where gradients of a deep network may lie. So the backward pass begins with the loss times a large
//! scale, which is taken out of the gradients again before anything else is done with them. A scale that is too large makes some of
//! them infinite: then the step is left out, on all ranks, and the scale halved; after many good steps it is doubled.

use phalanx_tensor::{DType, Factors};
use std::fmt;

/// What the products of a run are made in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Precision {
    /// Float32.
    #[default]
    Float32,
    /// Float32, whose factors are rounded to 10 bits of fraction on GPUs; on CPUs it is float32.
    Tf32,
    /// Bfloat16.
    Bfloat16,
    /// Float16, with a scaled loss.
    Float16,
}

impl Precision {
    /// The type of products.
    pub fn products(self) -> DType {
        match self {
            Precision::Float32 | Precision::Tf32 => DType::F32,
            Precision::Bfloat16 => DType::BF16,
            Precision::Float16 => DType::F16,
        }
    }

    /// What becomes of factors of float32.
    pub fn factors(self) -> Factors {
        if self == Precision::Tf32 { Factors::Tf32 } else { Factors::Exact }
    }

    /// Whether the loss is scaled.
    pub(super) fn is_scaled(self) -> bool {
        self == Precision::Float16
    }
}

impl fmt::Display for Precision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Precision::Float32 => "float32",
            Precision::Tf32 => "tf32",
            Precision::Bfloat16 => "bfloat16",
            Precision::Float16 => "float16",
        })
    }
}

/// What the loss is multiplied by before a backward pass in float16: a power of 2, so that it takes no bits from gradients.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LossScale {
    /// The factor.
    pub factor: f64,
    /// Steps since it was changed last.
    pub good_steps: u32,
}

/// Good steps after which the scale is doubled, as in PyTorch.
const PATIENCE: u32 = 2000;

impl Default for LossScale {
    /// PyTorch's first scale.
    fn default() -> LossScale {
        LossScale { factor: 65536.0, good_steps: 0 }
    }
}

/// Whether all gradients of a step were numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Found {
    Numbers,
    Overflow,
}

impl LossScale {
    /// Whether it can't be halved any more: gradients of the loss itself are what they are.
    pub(super) fn is_least(self) -> bool {
        self.factor <= 1.0
    }

    /// The scale after a step.
    pub(super) fn after(self, found: Found) -> LossScale {
        let LossScale { factor, good_steps } = self;
        match found {
            Found::Overflow => LossScale { factor: (factor / 2.0).max(1.0), good_steps: 0 },
            Found::Numbers if good_steps + 1 < PATIENCE => LossScale { factor, good_steps: good_steps + 1 },
            Found::Numbers => LossScale { factor: factor * 2.0, good_steps: 0 },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_scale_follows_pytorchs_scaler() {
        let mut scale = LossScale::default();
        let mut seen = vec![(0, scale.factor)];
        // torch.amp.GradScaler's defaults, asked after each step.
        for step in 0..6100 {
            let found = if [3, 4, 2500].contains(&step) { Found::Overflow } else { Found::Numbers };
            scale = scale.after(found);
            if scale.factor != seen[seen.len() - 1].1 {
                seen.push((step, scale.factor));
            }
        }
        let want =
            [(0, 65536.0), (3, 32768.0), (4, 16384.0), (2004, 32768.0), (2500, 16384.0), (4500, 32768.0)];
        assert_eq!(seen, want);
    }

    #[test]
    fn the_scale_ends_at_the_loss_itself() {
        let mut scale = LossScale::default();
        for _ in 0..40 {
            scale = scale.after(Found::Overflow);
        }
        assert_eq!(scale, LossScale { factor: 1.0, good_steps: 0 });
        assert!(scale.is_least() && !LossScale::default().is_least());
    }
}
