//! Functions as plain arithmetic, which becomes vectors where a call into the system's library would not: attention and activations need
//! tens of millions of them a step. Every processor rounds them alike. In f64 they are the system's.
//!
//! Each brings its argument near zero and has a polynomial there. The coefficients are those of the least largest error, found by
//! Remez's exchange in forty digits; the tests say how far results are off.
//!
//! - e^x: x = n ln 2 + r with a whole n and |r| at most ln 2 / 2, and 2^n times the series of e^r.
//! - ln x: x = 2^e m with m between the roots of 1/2 and 2, and e ln 2 plus a polynomial of m - 1.
//! - sin x, cos x: x less the nearest multiple of pi / 2, in f64, and the polynomial of sine or cosine by which multiple it was.
//! - x^p: e^(p ln x) in f64, where ln x = e ln 2 + 2 artanh((m - 1) / (m + 1)), by the series of artanh, since p ln x has to be exact to
//!   more places than an f32 has.
//! - erf x: a polynomial of x^2 times x up to 1, and 1 less e to a polynomial beyond.

use crate::dtype::Float;
use std::f32::consts::LOG2_E;

/// A float type whose functions can be had many at a time. What is no number gives none.
pub(crate) trait InLanes: Float {
    /// e^x: f32 within two units in the last place, and 0 where that is no normal number.
    fn exp_in_lanes(self) -> Self;
    /// e^x - 1, exact near zero.
    fn exp_m1_in_lanes(self) -> Self;
    /// Natural logarithm.
    fn ln_in_lanes(self) -> Self;
    /// ln(1 + x), exact near zero.
    fn ln_1p_in_lanes(self) -> Self;
    /// Hyperbolic tangent.
    fn tanh_in_lanes(self) -> Self;
    /// x^p, of a `p` that is finite.
    fn pow_in_lanes(self, p: Self) -> Self;
    /// Gauss error function.
    fn erf_in_lanes(self) -> Self;
    /// Sine of an angle in radians that isn't [`InLanes::is_far`].
    fn sin_in_lanes(self) -> Self;
    /// Cosine of such an angle.
    fn cos_in_lanes(self) -> Self;
    /// Whether an angle is so large, or infinite, that only the system's functions are exact.
    fn is_far(self) -> bool;
}

/// Added to a number below 2^22 it leaves the nearest whole number in the last bits.
const ROUNDER: f32 = 12_582_912.0;
/// The same of f64, below 2^51.
const ROUNDER_64: f64 = 6_755_399_441_055_744.0;
/// The natural logarithm of 2 in two parts, the first of few digits, so that its multiples are exact.
const LN_2: [f32; 2] = [0.693_359_4, -2.121_944_4e-4];
/// Below this e^x is no normal number.
const LEAST: f32 = -87.336_54;
/// From here on it is infinite.
const MOST: f32 = 89.0;
/// The bits of the root of 1/2.
const ROOT_HALF: u32 = 0x3f35_04f3;
/// pi / 2 in two parts.
const QUARTER: [f64; 2] = [std::f64::consts::FRAC_PI_2, 6.123_233_995_736_766e-17];
/// Beyond this an angle is far: the nearest multiple of pi / 2 has 30 bits, and is taken off with all that an f64 has.
const FAR: f32 = 1_073_741_824.0;

/// Coefficients, those of the highest powers first.
const EXP: [f32; 8] = [1.0 / 5040.0, 1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0];
/// (e^r - 1 - r) / r^2.
const EXP_M1: [f32; 5] = [0.001_394_610_7, 0.008_366_407, 0.041_666_29, 0.166_665_45, 0.5];
/// (ln(1 + f) - f + f^2 / 2) / f^3.
const LN: [f32; 8] = [
    -0.078_711_07,
    0.128_767_58,
    -0.131_219_28,
    0.141_816_58,
    -0.166_253_75,
    0.200_022_77,
    -0.250_007_83,
    0.333_333_17,
];
/// (sin r / r - 1) / r^2, by r^2.
const SIN: [f32; 3] = [-0.000_195_202_37, 0.008_332_205, -0.166_666_55];
/// (cos r - 1 + r^2 / 2) / r^4, by r^2.
const COS: [f32; 3] = [2.446_103_2e-5, -0.001_388_759_3, 0.041_666_65];
/// erf x / x, by x^2.
const ERF: [f32; 7] = [
    7.853_866e-5,
    -0.000_801_019_4,
    0.005_188_327_6,
    -0.026_853_812,
    0.112_835_85,
    -0.376_126_26,
    std::f32::consts::FRAC_2_SQRT_PI,
];
/// -ln(1 - erf x), from 1 to 4.
const ERF_BEYOND: [f32; 7] =
    [-0.000_185_570_65, 0.002_939_575, -0.021_805_19, 0.103_037_11, 0.638_226, 1.127_039_9, 0.000_353_760_87];

#[inline(always)]
fn polynomial<T: Float, const N: usize>(x: T, coefficients: [T; N]) -> T {
    let mut sum = coefficients[0];
    for &term in &coefficients[1..] {
        sum = x.mul_add(sum, term);
    }
    sum
}

/// The nearest n to x / ln 2, and x - n ln 2, where e^x is neither zero nor infinite.
#[inline(always)]
fn parted(x: f32) -> (i32, f32) {
    // Comparisons with a NaN are false, so it passes through all of this.
    let x = if x > MOST { MOST } else { x };
    let x = if x < LEAST { LEAST } else { x };
    let rounded = x.mul_add(LOG2_E, ROUNDER);
    let n = rounded - ROUNDER;
    let r = n.mul_add(-LN_2[1], n.mul_add(-LN_2[0], x));
    (rounded.to_bits().wrapping_sub(ROUNDER.to_bits()).cast_signed(), r)
}

/// 2^n, of an n for which that is a normal number, or 0 below.
#[inline(always)]
fn power(n: i32) -> f32 {
    f32::from_bits((n.wrapping_add(127) << 23).cast_unsigned())
}

/// The sine of an angle that is this many right angles ahead.
#[inline(always)]
fn sine(x: f32, ahead: u32) -> f32 {
    let x = f64::from(x);
    let rounded = x.mul_add(std::f64::consts::FRAC_2_PI, ROUNDER_64);
    let n = rounded - ROUNDER_64;
    let r = n.mul_add(-QUARTER[1], n.mul_add(-QUARTER[0], x)) as f32;
    // Which quarter it is in: the last bits of the nearest whole number.
    let quarter = (rounded.to_bits() as u32).wrapping_add(ahead);
    let square = r * r;
    let sin = (r * square).mul_add(polynomial(square, SIN), r);
    let cos = (square * square).mul_add(polynomial(square, COS), square.mul_add(-0.5, 1.0));
    let of_quarter = if quarter & 1 == 0 { sin } else { cos };
    if quarter & 2 == 0 { of_quarter } else { -of_quarter }
}

/// 2 / (2 k + 1), of the highest k first.
const ARTANH: [f64; 9] =
    [2.0 / 17.0, 2.0 / 15.0, 2.0 / 13.0, 2.0 / 11.0, 2.0 / 9.0, 2.0 / 7.0, 2.0 / 5.0, 2.0 / 3.0, 2.0];
/// 1 / k!, of the highest k first.
const EXP_64: [f64; 11] = [
    1.0 / 3_628_800.0,
    1.0 / 362_880.0,
    1.0 / 40_320.0,
    1.0 / 5040.0,
    1.0 / 720.0,
    1.0 / 120.0,
    1.0 / 24.0,
    1.0 / 6.0,
    0.5,
    1.0,
    1.0,
];
/// Beyond this e^x is zero or infinite as an f32, and an f64 that isn't.
const FAR_POWER: f64 = 200.0;
/// The bits of the root of 1/2 as an f64.
const ROOT_HALF_64: u64 = 0x3fe6_a09e_667f_3bcd;

/// The natural logarithm of what is 0 or more, in f64: within 1e-12, or 0 and infinity at the ends.
#[inline(always)]
fn ln_64(x: f64) -> f64 {
    let bits = x.to_bits();
    let e = bits.wrapping_sub(ROOT_HALF_64).cast_signed() >> 52;
    let m = f64::from_bits(bits.wrapping_sub((e << 52).cast_unsigned()));
    let f = (m - 1.0) / (m + 1.0);
    // A whole number that is added to this stands in its last bits.
    let e = f64::from_bits(ROUNDER_64.to_bits().wrapping_add(e.cast_unsigned())) - ROUNDER_64;
    let ln = e.mul_add(std::f64::consts::LN_2, f * polynomial(f * f, ARTANH));
    let ends = if x == 0.0 { f64::NEG_INFINITY } else { x };
    if x > 0.0 && x < f64::INFINITY { ln } else { ends }
}

/// e^x, of any x, as an f32.
#[inline(always)]
fn exp_64(x: f64) -> f32 {
    let x = if x > FAR_POWER { FAR_POWER } else { x };
    let x = if x < -FAR_POWER { -FAR_POWER } else { x };
    let rounded = x.mul_add(std::f64::consts::LOG2_E, ROUNDER_64);
    let n = rounded - ROUNDER_64;
    let r = n.mul_add(-std::f64::consts::LN_2, x);
    let power = f64::from_bits(rounded.to_bits().wrapping_sub(ROUNDER_64.to_bits()).wrapping_add(1023) << 52);
    (polynomial(r, EXP_64) * power) as f32
}

impl InLanes for f32 {
    #[inline(always)]
    fn exp_in_lanes(self) -> f32 {
        let (n, r) = parted(self);
        // In two factors, since 2^n may be infinite, or no normal number, where the result isn't.
        let whole = polynomial(r, EXP) * power(n >> 1) * power(n - (n >> 1));
        if self < LEAST { 0.0 } else { whole }
    }

    #[inline(always)]
    fn exp_m1_in_lanes(self) -> f32 {
        let (n, r) = parted(self);
        let near = (r * r).mul_add(polynomial(r, EXP_M1), r);
        // Half of 2^n, which is infinite sooner than the result.
        let half = power(n - 1);
        2.0 * near.mul_add(half, half - 0.5)
    }

    #[inline(always)]
    fn ln_in_lanes(self) -> f32 {
        let is_tiny = self < f32::MIN_POSITIVE;
        let bits = (if is_tiny { self * 8_388_608.0 } else { self }).to_bits();
        let e = bits.wrapping_sub(ROOT_HALF).cast_signed() >> 23;
        let f = f32::from_bits(bits.wrapping_sub((e << 23).cast_unsigned())) - 1.0;
        let e = (e - if is_tiny { 23 } else { 0 }) as f32;
        let square = f * f;
        let rest = (f * square).mul_add(polynomial(f, LN), e * LN_2[1]);
        let ln = e.mul_add(LN_2[0], f + square.mul_add(-0.5, rest));
        if self > 0.0 && self < f32::INFINITY {
            ln
        } else if self == 0.0 {
            f32::NEG_INFINITY
        } else if self < 0.0 {
            f32::NAN
        } else {
            self
        }
    }

    #[inline(always)]
    fn ln_1p_in_lanes(self) -> f32 {
        let above = 1.0 + self;
        let ln = above.ln_in_lanes();
        // What was lost when 1 was added.
        let lost = (self - (above - 1.0)) / above;
        if above > 0.0 && above < f32::INFINITY { ln + lost } else { ln }
    }

    #[inline(always)]
    fn tanh_in_lanes(self) -> f32 {
        let less = (-2.0 * self.abs()).exp_m1_in_lanes();
        (-less / (2.0 + less)).copysign(self)
    }

    #[inline(always)]
    fn pow_in_lanes(self, p: f32) -> f32 {
        let p = f64::from(p);
        let size = exp_64(p * ln_64(f64::from(self.abs())));
        let (is_whole, is_odd) = (p.trunc() == p, (p / 2.0).trunc() != p / 2.0);
        let of_negative = match (is_whole, is_odd) {
            (true, true) => -size,
            (true, false) => size,
            _ if self > f32::NEG_INFINITY && self < 0.0 => f32::NAN,
            _ => size,
        };
        let signed = if self.is_sign_negative() { of_negative } else { size };
        if p == 0.0 { 1.0 } else { signed }
    }

    #[inline(always)]
    fn erf_in_lanes(self) -> f32 {
        let x = self.abs();
        let near = x * polynomial(x * x, ERF);
        // From 4 on it is 1.
        let beyond = 1.0 - (-polynomial(if x > 4.0 { 4.0 } else { x }, ERF_BEYOND)).exp_in_lanes();
        (if x < 1.0 { near } else { beyond }).copysign(self)
    }

    #[inline(always)]
    fn sin_in_lanes(self) -> f32 {
        sine(self, 0)
    }

    #[inline(always)]
    fn cos_in_lanes(self) -> f32 {
        sine(self, 1)
    }

    #[inline(always)]
    fn is_far(self) -> bool {
        self.abs() > FAR
    }
}

impl InLanes for f64 {
    #[inline(always)]
    fn exp_in_lanes(self) -> f64 {
        self.exp()
    }

    #[inline(always)]
    fn exp_m1_in_lanes(self) -> f64 {
        self.exp_m1()
    }

    #[inline(always)]
    fn ln_in_lanes(self) -> f64 {
        self.ln()
    }

    #[inline(always)]
    fn ln_1p_in_lanes(self) -> f64 {
        self.ln_1p()
    }

    #[inline(always)]
    fn tanh_in_lanes(self) -> f64 {
        self.tanh()
    }

    #[inline(always)]
    fn pow_in_lanes(self, p: f64) -> f64 {
        self.powf(p)
    }

    #[inline(always)]
    fn erf_in_lanes(self) -> f64 {
        libm::erf(self)
    }

    #[inline(always)]
    fn sin_in_lanes(self) -> f64 {
        self.sin()
    }

    #[inline(always)]
    fn cos_in_lanes(self) -> f64 {
        self.cos()
    }

    #[inline(always)]
    fn is_far(self) -> bool {
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const INF: f32 = f32::INFINITY;

    /// Holds `f` against `exact` at many numbers of [from, to], in steps of a relative and an absolute size: `last` is how many units in the
    /// last place of the result, but of no less than `least`, it may be off by.
    #[track_caller]
    fn check(
        f: fn(f32) -> f32,
        exact: fn(f64) -> f64,
        [from, to]: [f32; 2],
        step: f32,
        last: f64,
        least: f64,
    ) {
        let (mut x, mut worst) = (from, (0.0, 0.0));
        while x < to {
            let (got, want) = (f64::from(f(x)), exact(f64::from(x)));
            let off = (got - want).abs() / (f64::from(f32::EPSILON) * want.abs().max(least));
            if off > worst.1 || off.is_nan() {
                worst = (x, off);
            }
            x += step.max(x.abs() * 1e-4);
        }
        assert!(worst.1 <= last, "at {}: {} units in the last place", worst.0, worst.1);
    }

    #[test]
    fn exponentials_are_exact_to_the_last_places_and_right_at_the_ends() {
        check(f32::exp_in_lanes, f64::exp, [-87.3, 88.7], 0.001_37, 2.0, 0.0);
        assert_eq!([0.0f32, -0.0].map(f32::exp_in_lanes), [1.0, 1.0]);
        assert_eq!([-88.0, -1e9, -INF].map(f32::exp_in_lanes), [0.0; 3]);
        assert_eq!([89.0, 1e9, INF].map(f32::exp_in_lanes), [INF; 3]);
        check(f32::exp_m1_in_lanes, f64::exp_m1, [-87.3, 88.7], 0.001_37, 2.0, 0.0);
        check(f32::exp_m1_in_lanes, f64::exp_m1, [-1.0, 1.0], 1e-5, 2.0, 0.0);
        check(f32::exp_m1_in_lanes, f64::exp_m1, [1e-30, 1e-3], 1e-30, 1.0, 0.0);
        assert_eq!([0.0, -88.0, -INF, 89.0, INF].map(f32::exp_m1_in_lanes), [0.0, -1.0, -1.0, INF, INF]);
        assert!(f32::NAN.exp_in_lanes().is_nan() && f32::NAN.exp_m1_in_lanes().is_nan());
    }

    #[test]
    fn logarithms_are_exact_to_the_last_places_and_right_at_the_ends() {
        check(f32::ln_in_lanes, f64::ln, [1e-44, 3e38], 1e-44, 2.0, 0.0);
        check(f32::ln_in_lanes, f64::ln, [0.5, 2.0], 1e-5, 2.0, 0.0);
        check(f32::ln_1p_in_lanes, f64::ln_1p, [-0.999_99, 10.0], 1e-5, 2.0, 0.0);
        check(f32::ln_1p_in_lanes, f64::ln_1p, [1e-40, 1e38], 1e-40, 2.0, 0.0);
        assert_eq!([1.0, 0.0, -0.0, INF].map(f32::ln_in_lanes), [0.0, -INF, -INF, INF]);
        assert_eq!([0.0, -1.0, INF].map(f32::ln_1p_in_lanes), [0.0, -INF, INF]);
        assert!([-1e-40, -1.0, -INF, f32::NAN].iter().all(|x| x.ln_in_lanes().is_nan()));
        assert!([-1.5, -INF, f32::NAN].iter().all(|x| x.ln_1p_in_lanes().is_nan()));
    }

    #[test]
    fn tangents_and_error_functions_are_exact_to_the_last_places_and_right_at_the_ends() {
        check(f32::tanh_in_lanes, f64::tanh, [-12.0, 12.0], 1e-4, 3.0, 0.0);
        check(f32::tanh_in_lanes, f64::tanh, [1e-30, 1.0], 1e-30, 3.0, 0.0);
        check(f32::erf_in_lanes, libm::erf, [-6.0, 6.0], 1e-4, 2.0, 0.0);
        check(f32::erf_in_lanes, libm::erf, [1e-30, 1.0], 1e-30, 2.0, 0.0);
        let ends = [0.0, 20.0, -20.0, INF, -INF];
        assert_eq!(ends.map(f32::tanh_in_lanes), [0.0, 1.0, -1.0, 1.0, -1.0]);
        assert_eq!(ends.map(f32::erf_in_lanes), [0.0, 1.0, -1.0, 1.0, -1.0]);
        assert!(f32::NAN.tanh_in_lanes().is_nan() && f32::NAN.erf_in_lanes().is_nan());
    }

    #[test]
    fn powers_are_exact_to_the_last_place_and_right_at_the_ends() {
        let powers = [1.7f32, -0.5, 0.5, 2.0, 3.0, -1.0, -2.0, 1.0, 0.1, 30.3, -7.5, 1e-6, 1e6, -1e6];
        for p in powers {
            let (mut x, mut worst) = (1e-44f32, 0.0f64);
            while x < 3e38 {
                let (got, want) = (x.pow_in_lanes(p), f64::from(x).powf(f64::from(p)));
                if (want as f32).is_normal() {
                    worst = worst.max(((f64::from(got) - want) / want).abs() / f64::from(f32::EPSILON));
                } else {
                    let near = f64::from(f32::from_bits(1)) * 0.51;
                    let is_right = got == want as f32 || (f64::from(got) - want).abs() <= near;
                    assert!(is_right, "{x}^{p}: {got}, not {want}");
                }
                x = (x * 1.0003).max(f32::from_bits(x.to_bits() + 1));
            }
            // Rounding alone is half a place.
            assert!(worst <= 0.5001, "to the power of {p}: {worst} units in the last place");
        }
        let ends = [0.0, -0.0, INF, -INF, f32::NAN, -1.0, -2.5, 1.0, 1e-45, -1e-45];
        for p in powers.into_iter().chain([0.0, -0.0, 5.0, 1.5]) {
            for x in ends {
                let (got, want) = (x.pow_in_lanes(p), x.powf(p));
                let near = got == want && got.is_sign_negative() == want.is_sign_negative();
                let off = ((got - want) / want).abs() < 2e-7;
                assert!(near || off || got.is_nan() && want.is_nan(), "{x}^{p}: {got}, not {want}");
            }
        }
    }

    #[test]
    fn sines_and_cosines_are_exact_to_the_last_places_also_of_large_angles() {
        // Near their zeros, too: what is left of an angle there is exact.
        for ends in [[-10.0, 10.0], [1e5, 1.001e5], [-FAR, -FAR + 1e5], [FAR - 1e6, FAR]] {
            check(f32::sin_in_lanes, f64::sin, ends, 1e-4, 2.0, 0.0);
            check(f32::cos_in_lanes, f64::cos, ends, 1e-4, 2.0, 0.0);
        }
        assert_eq!((0.0f32.sin_in_lanes(), 0.0f32.cos_in_lanes()), (0.0, 1.0));
        assert!(INF.is_far() && (-INF).is_far() && 2e9f32.is_far() && !FAR.is_far() && !f32::NAN.is_far());
        assert!(f32::NAN.sin_in_lanes().is_nan() && f32::NAN.cos_in_lanes().is_nan());
    }
}
