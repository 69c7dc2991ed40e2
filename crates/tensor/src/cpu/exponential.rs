//! e^x as plain arithmetic, which becomes vectors where a call into the system's library would not: attention and GELU need
//! tens of millions of them a step.
//!
//! x = n ln 2 + r with a whole n and |r| at most ln 2 / 2: e^x is 2^n times the series of e^r. Every processor rounds it alike.

use crate::dtype::Float;
use std::f32::consts::LOG2_E;

/// A float type whose e^x can be had many at a time.
pub(crate) trait Exponential: Float {
    /// e^x: f32 within two units in the last place, and 0 where that is no normal number; f64 as the system has it.
    fn exp_in_lanes(self) -> Self;
}

/// Added to a number below 2^22 it leaves the nearest whole number in the last bits.
const ROUNDER: f32 = 12_582_912.0;
/// The natural logarithm of 2 in two parts, the first of few digits, so that its multiples are exact.
const LN_2: [f32; 2] = [0.693_359_4, -2.121_944_4e-4];
/// Below this the result is no normal number.
const LEAST: f32 = -87.336_54;
/// From here on it is infinite.
const MOST: f32 = 89.0;

impl Exponential for f32 {
    #[inline(always)]
    fn exp_in_lanes(self) -> f32 {
        // Comparisons with a NaN are false, so it passes through all of this.
        let x = if self > MOST { MOST } else { self };
        let x = if x < LEAST { LEAST } else { x };
        let rounded = x.mul_add(LOG2_E, ROUNDER);
        let n = rounded - ROUNDER;
        let r = n.mul_add(-LN_2[1], n.mul_add(-LN_2[0], x));
        let mut sum = 1.0 / 5040.0;
        for term in [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0] {
            sum = r.mul_add(sum, term);
        }
        // In two factors, since 2^n may be infinite, or no normal number, where the result isn't.
        let n = rounded.to_bits().wrapping_sub(ROUNDER.to_bits()).cast_signed();
        let power = |n: i32| f32::from_bits((n.wrapping_add(127) << 23).cast_unsigned());
        if self < LEAST { 0.0 } else { sum * power(n >> 1) * power(n - (n >> 1)) }
    }
}

impl Exponential for f64 {
    #[inline(always)]
    fn exp_in_lanes(self) -> f64 {
        self.exp()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_exact_to_the_last_places_and_right_at_the_ends() {
        let mut x = -87.3f32;
        while x < 88.7 {
            let (got, want) = (x.exp_in_lanes(), f64::from(x).exp());
            assert!(
                (f64::from(got) - want).abs() <= 2.0 * f64::from(f32::EPSILON) * want,
                "{x}: {got}, not {want}"
            );
            x += 0.001_37;
        }
        assert_eq!([0.0f32, -0.0].map(f32::exp_in_lanes), [1.0, 1.0]);
        assert_eq!([-88.0, -1e9, f32::NEG_INFINITY].map(f32::exp_in_lanes), [0.0; 3]);
        assert_eq!([89.0, 1e9, f32::INFINITY].map(f32::exp_in_lanes), [f32::INFINITY; 3]);
        assert!(f32::NAN.exp_in_lanes().is_nan());
    }
}
